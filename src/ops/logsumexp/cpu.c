#include "ops/logsumexp/kernels.h"

#include <math.h>

#include "core/variants.h"
#include "simd/softmax.h"

enum { BUFFER = 512 }; /* elements gathered at a time, where lines in rows form are not adjacent in memory */

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* What is subtracted from x: v_pivot, lane by lane. */
V_INLINE vf pivot_of(vf max) {
    return v_select(max == v_set(-INFINITY), v_set(0.0f), max);
}

/* ---- rows --------------------------------------------------------------------------------------------------------- */

V_INLINE bool row_has_nan(int dtype, const char *x, int64_t step, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float a = v_get(dtype, x + i * step * v_bytes(dtype));
        if (a != a)
            return true;
    }
    return false;
}

V_INLINE void row_statistics(int dtype, const struct logsumexp_block *b, float *statistics) {
    const int64_t bytes = v_bytes(dtype), most = b->x_step == 1 ? b->length : BUFFER;
    char buffer[BUFFER * 4];
    for (int64_t line = 0; line < b->lines; line++) {
        const char *const x = b->x + line * b->x_line * bytes;
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t i = 0; i < b->length; i += most) {
            const int64_t part = smaller(b->length - i, most);
            s = v_stats_row(dtype, v_gather(dtype, x + i * b->x_step * bytes, b->x_step, part, buffer), part, s);
        }
        if (s.max == INFINITY) /* inf - inf has made the sum NaN */
            s.sum = row_has_nan(dtype, x, b->x_step, b->length) ? NAN : 1.0f;
        statistics[line] = s.max;
        statistics[b->lines + line] = s.sum;
    }
}

struct slope {
    vf pivot, scale;
};

V_INLINE vf gradient_of(const vf in[], const void *env) {
    const struct slope *const s = env;
    return v_exp_from(in[0], s->pivot) * s->scale;
}

V_INLINE void row_gradient(int dtype, const struct logsumexp_block *b) {
    const int64_t bytes = v_bytes(dtype);
    char gathered[BUFFER * 4], result[BUFFER * 4];
    for (int64_t line = 0; line < b->lines; line++) {
        float lse = 0.0f, dlse = 0.0f;
        V_FOR_DTYPE(b->lse_dtype, type, lse = v_get(type, b->lse + line * b->lse_line * v_bytes(type)));
        V_FOR_DTYPE(b->dlse_dtype, type, dlse = v_get(type, b->dlse + line * b->dlse_line * v_bytes(type)));
        const struct slope slope = {v_set(v_pivot(lse)), v_set(dlse)};
        const char *const x = b->x + line * b->x_line * bytes;
        char *const dx = b->dx + line * b->dx_line * bytes;
        if (b->x_step == 1 && b->dx_step == 1) {
            v_map(dtype, 1, (const void *const[]){x}, dx, b->length, b->stream, gradient_of, &slope);
            continue;
        }
        for (int64_t i = 0; i < b->length; i += BUFFER) {
            const int64_t part = smaller(b->length - i, BUFFER);
            const void *const in[] = {v_gather(dtype, x + i * b->x_step * bytes, b->x_step, part, gathered)};
            v_map(dtype, 1, in, result, part, false, gradient_of, &slope);
            v_scatter(dtype, result, dx + i * b->dx_step * bytes, b->dx_step, part);
        }
    }
    if (b->stream)
        v_fence();
}

/* ---- columns ------------------------------------------------------------------------------------------------------ */

/* Columns are taken UNIT at a time, in two vectors, in an order (see v_load_pair) that the last few, loaded one vector after
 * the other, do not have. */
enum { UNIT = 2 * V_LANES, ROWS = 16 /* of a block whose maxima are found before its exponentials are taken, from L1 */ };

V_INLINE void load_unit(int dtype, const char *p, int64_t columns, vf a[2]) {
    if (columns == UNIT) {
        v_load_pair(dtype, p, &a[0], &a[1]);
        return;
    }
    const int64_t first = smaller(columns, V_LANES);
    a[0] = v_load_part(dtype, p, first, -INFINITY);
    a[1] = v_load_part(dtype, p + first * v_bytes(dtype), columns - first, -INFINITY);
}

/* Where column i of a unit is. */
V_INLINE int64_t slot(int dtype, int64_t columns, int64_t i) {
    return dtype == RAFTER_BF16 && columns == UNIT ? i % 2 * V_LANES + i / 2 : i;
}

/* Raises max to the largest of `rows` rows of a unit. */
V_INLINE void raise_maxima(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t columns, vf max[2]) {
    for (int64_t r = 0; r < rows; r++) {
        vf a[2];
        load_unit(dtype, x + r * pitch, columns, a);
        max[0] = v_max(a[0], max[0]);
        max[1] = v_max(a[1], max[1]);
    }
}

/* The running statistics of a unit's columns. */
struct unit {
    vf max[2];
    struct v_total sum[2];
};

/* Folds `rows` more rows into them. */
V_INLINE void fold_rows(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t columns, struct unit *u) {
    const vf before[2] = {u->max[0], u->max[1]};
    raise_maxima(dtype, x, pitch, rows, columns, u->max);
    struct v_base base[2];
    for (int k = 0; k < 2; k++) {
        const vf pivot = pivot_of(u->max[k]);
        v_total_scale(&u->sum[k], v_exp_from(before[k], pivot));
        base[k] = v_base_per_lane(pivot);
    }
    vf a[2], b[2], even[2] = {v_set(0.0f), v_set(0.0f)}, odd[2] = {v_set(0.0f), v_set(0.0f)};
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) { /* two sums a column: the adds of one would wait for each other */
        load_unit(dtype, x + r * pitch, columns, a);
        load_unit(dtype, x + (r + 1) * pitch, columns, b);
        for (int k = 0; k < 2; k++) {
            even[k] = v_add_exp(even[k], a[k], &base[k], false);
            odd[k] = v_add_exp(odd[k], b[k], &base[k], false);
        }
    }
    if (r < rows) {
        load_unit(dtype, x + r * pitch, columns, a);
        for (int k = 0; k < 2; k++)
            even[k] = v_add_exp(even[k], a[k], &base[k], false);
    }
    for (int k = 0; k < 2; k++)
        v_total_add(&u->sum[k], even[k] + odd[k]);
}

V_INLINE void column_statistics(int dtype, const struct logsumexp_block *b, float *statistics) {
    const int64_t bytes = v_bytes(dtype), pitch = b->x_step * bytes;
    const struct v_total nothing = {v_set(0.0f), v_set(0.0f)};
    struct unit units[LOGSUMEXP_MOST_LINES / UNIT];
    for (int64_t c = 0; c < b->lines; c += UNIT)
        units[c / UNIT] = (struct unit){{v_set(-INFINITY), v_set(-INFINITY)}, {nothing, nothing}};
    for (int64_t row = 0; row < b->length; row += ROWS)
        for (int64_t c = 0; c < b->lines; c += UNIT) {
            const char *const x = b->x + row * pitch + c * bytes;
            const int64_t rows = smaller(b->length - row, ROWS);
            if (b->lines - c >= UNIT)
                fold_rows(dtype, x, pitch, rows, UNIT, &units[c / UNIT]);
            else
                fold_rows(dtype, x, pitch, rows, b->lines - c, &units[c / UNIT]);
        }
    for (int64_t c = 0; c < b->lines; c++) {
        const struct unit *const u = &units[c / UNIT];
        const int64_t at = slot(dtype, smaller(b->lines - c / UNIT * UNIT, UNIT), c % UNIT);
        const float max = u->max[at / V_LANES][at % V_LANES];
        float sum = u->sum[at / V_LANES].sum[at % V_LANES];
        if (max == -INFINITY)
            sum *= 0.0f; /* there are none but smallest terms, and NaN */
        if (max == INFINITY)
            sum = row_has_nan(dtype, b->x + c * bytes, b->x_step, b->length) ? NAN : 1.0f;
        statistics[c] = max;
        statistics[b->lines + c] = sum;
    }
}

V_INLINE void column_gradient(int dtype, const struct logsumexp_block *b) {
    const int64_t bytes = v_bytes(dtype), x_pitch = b->x_step * bytes, dx_pitch = b->dx_step * bytes;
    const bool stream = b->stream && ((uintptr_t)b->dx | (uintptr_t)dx_pitch) % V_STREAM == 0;
    float pivot[LOGSUMEXP_MOST_LINES + UNIT] = {0}, scale[LOGSUMEXP_MOST_LINES + UNIT] = {0};
    for (int64_t c = 0; c < b->lines; c++) {
        const int64_t at = c / UNIT * UNIT + slot(dtype, smaller(b->lines - c / UNIT * UNIT, UNIT), c % UNIT);
        V_FOR_DTYPE(b->lse_dtype, type, pivot[at] = v_pivot(v_get(type, b->lse + c * b->lse_line * v_bytes(type))));
        V_FOR_DTYPE(b->dlse_dtype, type, scale[at] = v_get(type, b->dlse + c * b->dlse_line * v_bytes(type)));
    }
    const int64_t whole = b->lines / UNIT * UNIT, rest = b->lines - whole;
    for (int64_t row = 0; row < b->length; row++) {
        const char *const x = b->x + row * x_pitch;
        char *const dx = b->dx + row * dx_pitch;
        vf a[2];
        for (int64_t c = 0; c < b->lines; c += UNIT) {
            load_unit(dtype, x + c * bytes, c < whole ? UNIT : rest, a);
            for (int k = 0; k < 2; k++)
                a[k] = v_exp_from(a[k], v_load(RAFTER_F32, pivot + c + k * V_LANES)) *
                       v_load(RAFTER_F32, scale + c + k * V_LANES);
            if (c == whole) {
                const int64_t first = smaller(rest, V_LANES);
                v_store_part(dtype, dx + c * bytes, a[0], first);
                v_store_part(dtype, dx + (c + first) * bytes, a[1], rest - first);
            } else if (stream) {
                v_stream_pair(dtype, dx + c * bytes, a[0], a[1]);
            } else {
                v_store_pair(dtype, dx + c * bytes, a[0], a[1]);
            }
        }
    }
    if (stream)
        v_fence();
}

/* ---- the table ---------------------------------------------------------------------------------------------------- */

static void row_statistics_of(const struct logsumexp_block *block, float *statistics) {
    V_FOR_DTYPE(block->dtype, dtype, row_statistics(dtype, block, statistics));
}

static void column_statistics_of(const struct logsumexp_block *block, float *statistics) {
    V_FOR_DTYPE(block->dtype, dtype, column_statistics(dtype, block, statistics));
}

static void row_gradient_of(const struct logsumexp_block *block) {
    V_FOR_DTYPE(block->dtype, dtype, row_gradient(dtype, block));
}

static void column_gradient_of(const struct logsumexp_block *block) {
    V_FOR_DTYPE(block->dtype, dtype, column_gradient(dtype, block));
}

static void finish(const float *statistics, int64_t parts, int64_t lines, rafter_dtype dtype, char *lse,
                   int64_t lse_line) {
    for (int64_t line = 0; line < lines; line++) {
        const float *const s = statistics + line;
        double max = s[0], sum = 0.0;
        for (int64_t p = 1; p < parts; p++)
            max = s[p * 2 * lines] > max ? s[p * 2 * lines] : max;
        for (int64_t p = 0; p < parts; p++) {
            const double top = s[p * 2 * lines];
            sum += s[(p * 2 + 1) * lines] * (top == max ? 1.0 : exp(top - max)); /* == holds of infinities too */
        }
        const float value = (float)(max + log(sum));
        V_FOR_DTYPE(dtype, type, v_put(type, lse + line * lse_line * v_bytes(type), value));
    }
}

extern const struct logsumexp_kernels RAFTER_KERNELS(logsumexp);
const struct logsumexp_kernels RAFTER_KERNELS(logsumexp) = {
    .statistics = {[LOGSUMEXP_ROWS] = row_statistics_of, [LOGSUMEXP_COLUMNS] = column_statistics_of},
    .finish = finish,
    .gradient = {[LOGSUMEXP_ROWS] = row_gradient_of, [LOGSUMEXP_COLUMNS] = column_gradient_of},
};
