/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp on the CPU. The statistics of a line are a pivot near the maximum and the sum of
 * exponentials relative to it. Rows use v_stats_row. Columns keep one pivot per lane, which moves
 * at most once per block of rows, so an element costs one exponential.
 */
#include "ops/logsumexp/kernels.h"

#include <math.h>

#include "core/sizes.h"
#include "core/variants.h"
#include "simd/softmax.h"

enum {
    BUFFER = 512, /* elements gathered at a time where the elements of a row are not contiguous */
    SHORT = 48    /* rows up to this length are processed as columns */
};

/* v_pivot, lane by lane. */
V_INLINE vf pivot_of(vf max) {
    return v_select(max == v_set(-INFINITY), v_set(0.0f), max);
}

/* ---- statistics of columns ------------------------------------------------------------------- */

V_INLINE bool line_has_nan(int dtype, const char *x, int64_t step, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float a = v_get(dtype, x + i * step * v_bytes(dtype));
        if (a != a)
            return true;
    }
    return false;
}

/* Columns are processed in units of UNIT, two vectors: whole units as pairs (see v_load_pair), the
 * last few columns as two vectors in the order of memory. */
enum {
    UNIT = 2 * V_LANES,
    ROWS = 16 /* of a block: its maxima are computed first, then its exponentials, which read x from L1 */
};

V_INLINE void load_few(int dtype, const char *p, int64_t columns, vf a[2]) {
    const int64_t first = min64(columns, V_LANES);
    a[0] = v_load_part(dtype, p, first, -INFINITY);
    a[1] = v_load_part(dtype, p + first * v_bytes(dtype), columns - first, -INFINITY);
}

V_INLINE void store_few(int dtype, char *p, int64_t columns, const vf a[2]) {
    const int64_t first = min64(columns, V_LANES);
    v_store_part(dtype, p, a[0], first);
    v_store_part(dtype, p + first * v_bytes(dtype), a[1], columns - first);
}

V_INLINE void load_unit(int dtype, const char *p, int64_t columns, vf a[2]) {
    if (columns == UNIT)
        v_load_pair(dtype, p, &a[0], &a[1]);
    else
        load_few(dtype, p, columns, a);
}

/* Column maxima over `rows` rows of a unit. With a NaN in a column its maximum is undefined; its
 * sum is NaN anyway. */
V_INLINE void unit_maxima(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t columns, vf max[2]) {
    struct v_peak peak = v_peak_empty();
    for (int64_t r = 0; r < rows; r++, x += pitch) {
        vf a[2];
        load_unit(dtype, x, columns, a);
        __builtin_prefetch(x + ROWS * pitch, 0, 2);
        if (columns == UNIT)
            v_peak_add(dtype, &peak, x, a[0], a[1]);
        else
            for (int k = 0; k < 2; k++)
                peak.value[k] = v_max(a[k], peak.value[k]);
    }
    if (columns == UNIT)
        v_peak_pair(dtype, &peak, &max[0], &max[1]);
    else
        for (int k = 0; k < 2; k++)
            max[k] = peak.value[k];
}

/* The running statistics of a unit's columns. */
struct unit {
    vf pivot[2];
    struct v_kahan sum[2];
};

/* Adds `rows` rows. */
V_INLINE void fold_rows(int dtype, const char *x, int64_t pitch, int64_t rows, int64_t columns, struct unit *u) {
    vf max[2];
    unit_maxima(dtype, x, pitch, rows, columns, max);
    /* A pivot moves only if the maximum exceeds it by more than 1: up to there x - pivot is
     * accurate enough. */
    if (v_bits((max[0] > u->pivot[0] + v_set(1.0f)) | (max[1] > u->pivot[1] + v_set(1.0f))))
        for (int k = 0; k < 2; k++) {
            const vf before = u->pivot[k];
            u->pivot[k] = v_max(max[k], before);
            v_kahan_scale(&u->sum[k], v_exp_from(before, pivot_of(u->pivot[k])));
        }
    const struct v_base base[2] = {v_base_per_lane(pivot_of(u->pivot[0])), v_base_per_lane(pivot_of(u->pivot[1]))};
    vf a[2], b[2], even[2] = {v_set(0.0f), v_set(0.0f)}, odd[2] = {v_set(0.0f), v_set(0.0f)};
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2, x += 2 * pitch) { /* two sums per column hide the latency of the adds */
        load_unit(dtype, x, columns, a);
        load_unit(dtype, x + pitch, columns, b);
        for (int k = 0; k < 2; k++) {
            even[k] = v_add_exp(even[k], a[k], &base[k], false);
            odd[k] = v_add_exp(odd[k], b[k], &base[k], false);
        }
    }
    if (r < rows) {
        load_unit(dtype, x, columns, a);
        for (int k = 0; k < 2; k++)
            even[k] = v_add_exp(even[k], a[k], &base[k], false);
    }
    for (int k = 0; k < 2; k++)
        v_kahan_add(&u->sum[k], even[k] + odd[k]);
}

V_INLINE void column_statistics(int dtype, const struct logsumexp_block *b, float *pivots, float *sums) {
    const int64_t bytes = v_bytes(dtype), pitch = b->x_step * bytes;
    const struct v_kahan empty_sum = {v_set(0.0f), v_set(0.0f)};
    struct unit units[LOGSUMEXP_MOST_LINES / UNIT];
    for (int64_t c = 0; c < b->lines; c += UNIT)
        units[c / UNIT] = (struct unit){{v_set(-INFINITY), v_set(-INFINITY)}, {empty_sum, empty_sum}};
    for (int64_t row = 0; row < b->length; row += ROWS)
        for (int64_t c = 0; c < b->lines; c += UNIT) {
            const char *const x = b->x + row * pitch + c * bytes;
            const int64_t rows = min64(b->length - row, ROWS), columns = min64(b->lines - c, UNIT);
            if (rows == ROWS && columns == UNIT)
                fold_rows(dtype, x, pitch, ROWS, UNIT, &units[c / UNIT]);
            else
                fold_rows(dtype, x, pitch, rows, columns, &units[c / UNIT]);
        }
    for (int64_t c = 0; c < b->lines; c += UNIT) {
        const int64_t columns = min64(b->lines - c, UNIT);
        vf *const pivot = units[c / UNIT].pivot, sum[2];
        for (int k = 0; k < 2; k++) { /* if all x are -inf, the sum holds only terms of 2^-125, or NaN */
            const vf terms = units[c / UNIT].sum[k].sum;
            sum[k] = v_select(pivot[k] == v_set(-INFINITY), v_set(0.0f) * terms, terms);
        }
        if (columns == UNIT) {
            v_unpair(dtype, &pivot[0], &pivot[1]);
            v_unpair(dtype, &sum[0], &sum[1]);
        }
        store_few(RAFTER_F32, (char *)(pivots + c), columns, pivot);
        store_few(RAFTER_F32, (char *)(sums + c), columns, sum);
    }
    for (int64_t c = 0; c < b->lines; c++)
        if (pivots[c] == INFINITY)
            sums[c] = line_has_nan(dtype, b->x + c * bytes, b->x_step, b->length) ? NAN : 1.0f;
}

/* ---- statistics of rows ---------------------------------------------------------------------- */

V_INLINE void row_statistics(int dtype, const struct logsumexp_block *b, float *pivots, float *sums) {
    const int64_t bytes = v_bytes(dtype), block = b->x_step == 1 ? b->length : BUFFER;
    char buffer[BUFFER * 4];
    for (int64_t line = 0; line < b->lines; line++) {
        const char *const x = b->x + line * b->x_line * bytes;
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t i = 0; i < b->length; i += block) {
            const int64_t part = min64(b->length - i, block);
            s = v_stats_row(dtype, v_gather(dtype, x + i * b->x_step * bytes, b->x_step, part, buffer), part, s);
        }
        if (s.max == INFINITY) /* inf - inf has made the sum NaN */
            s.sum = line_has_nan(dtype, x, b->x_step, b->length) ? NAN : 1.0f;
        pivots[line] = s.max;
        sums[line] = s.sum;
    }
}

/* Rows too short for vectors along them: transposed to columns of a small buffer. */
V_INLINE void short_row_statistics(int dtype, const struct logsumexp_block *b, float *pivots, float *sums) {
    const int64_t bytes = v_bytes(dtype);
    char buffer[SHORT * UNIT * 4];
    for (int64_t line = 0; line < b->lines; line += UNIT) {
        const char *const x = b->x + line * b->x_line * bytes;
        const int64_t lines = min64(b->lines - line, UNIT);
        for (int64_t i = 0; i < b->length; i++)
            for (int64_t j = 0; j < lines; j++)
                memcpy(buffer + (i * UNIT + j) * bytes, x + (j * b->x_line + i * b->x_step) * bytes, (size_t)bytes);
        const struct logsumexp_block columns = {
            .dtype = b->dtype, .lines = lines, .length = b->length, .x = buffer, .x_line = 1, .x_step = UNIT};
        column_statistics(dtype, &columns, pivots + line, sums + line);
    }
}

/* ---- merging --------------------------------------------------------------------------------- */

/* lse of up to V_LANES lines. */
V_INLINE vf merged(const float *statistics, int64_t parts, int64_t lines, int64_t count) {
    vf pivot = v_set(-INFINITY);
    for (int64_t p = 0; p < parts; p++)
        pivot = v_max(v_load_part(RAFTER_F32, statistics + p * 2 * lines, count, 0.0f), pivot);
    struct v_kahan sum = {v_set(0.0f), v_set(0.0f)};
    for (int64_t p = 0; p < parts; p++) {
        const vf part_pivot = v_load_part(RAFTER_F32, statistics + p * 2 * lines, count, 0.0f);
        const vf share =
            v_select(part_pivot == pivot, v_set(1.0f), v_exp_from(part_pivot, pivot)); /* also if both are infinite */
        v_kahan_add(&sum, share * v_load_part(RAFTER_F32, statistics + (p * 2 + 1) * lines, count, 1.0f));
    }
    return v_lse(pivot, sum.sum);
}

V_INLINE void finish_as(int dtype, const float *statistics, int64_t parts, int64_t lines, char *lse, int64_t lse_line) {
    for (int64_t line = 0; line < lines; line += V_LANES) {
        const int64_t count = min64(lines - line, V_LANES);
        const vf values = merged(statistics + line, parts, lines, count);
        char *const to = lse + line * lse_line * v_bytes(dtype);
        if (lse_line == 1) {
            v_store_part(dtype, to, values, count);
        } else {
            char buffer[V_LANES * 4];
            v_store(dtype, buffer, values);
            v_scatter(dtype, buffer, to, lse_line, count);
        }
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

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
            const int64_t part = min64(b->length - i, BUFFER);
            const void *const in[] = {v_gather(dtype, x + i * b->x_step * bytes, b->x_step, part, gathered)};
            v_map(dtype, 1, in, result, part, false, gradient_of, &slope);
            v_scatter(dtype, result, dx + i * b->dx_step * bytes, b->dx_step, part);
        }
    }
    if (b->stream)
        v_fence();
}

/* lse or dlse of the columns as fp32, in the order in which the columns are loaded. */
V_INLINE void load_columns(int dtype, rafter_dtype from_dtype, const char *from, int64_t step, int64_t lines,
                           float *to) {
    for (int64_t c = 0; c < lines; c += UNIT) {
        const int64_t columns = min64(lines - c, UNIT);
        char buffer[UNIT * 4];
        vf a[2];
        V_FOR_DTYPE(from_dtype, type,
                    load_few(type, v_gather(type, from + c * step * v_bytes(type), step, columns, buffer), columns, a));
        if (columns == UNIT)
            v_pair(dtype, &a[0], &a[1]);
        v_store(RAFTER_F32, to + c, a[0]);
        v_store(RAFTER_F32, to + c + V_LANES, a[1]);
    }
}

V_INLINE void unit_gradient(vf a[2], const float *pivot, const float *scale) {
    for (int k = 0; k < 2; k++)
        a[k] = v_exp_from(a[k], v_load(RAFTER_F32, pivot + k * V_LANES)) * v_load(RAFTER_F32, scale + k * V_LANES);
}

V_INLINE void column_gradient(int dtype, const struct logsumexp_block *b) {
    const int64_t bytes = v_bytes(dtype), x_pitch = b->x_step * bytes, dx_pitch = b->dx_step * bytes;
    const bool stream = b->stream && ((uintptr_t)b->dx | (uintptr_t)dx_pitch) % V_STREAM == 0;
    float pivot[LOGSUMEXP_MOST_LINES], scale[LOGSUMEXP_MOST_LINES];
    load_columns(dtype, b->lse_dtype, b->lse, b->lse_line, b->lines, pivot);
    load_columns(dtype, b->dlse_dtype, b->dlse, b->dlse_line, b->lines, scale);
    for (int64_t c = 0; c < b->lines; c += V_LANES)
        v_store(RAFTER_F32, pivot + c, pivot_of(v_load(RAFTER_F32, pivot + c)));
    const int64_t whole = b->lines / UNIT * UNIT, rest = b->lines - whole;
    for (int64_t row = 0; row < b->length; row++) {
        const char *const x = b->x + row * x_pitch;
        char *const dx = b->dx + row * dx_pitch;
        vf a[2];
        for (int64_t c = 0; c < whole; c += UNIT) {
            v_load_pair(dtype, x + c * bytes, &a[0], &a[1]);
            __builtin_prefetch(x + x_pitch + c * bytes, 0, 2);
            unit_gradient(a, pivot + c, scale + c);
            if (stream)
                v_stream_pair(dtype, dx + c * bytes, a[0], a[1]);
            else
                v_store_pair(dtype, dx + c * bytes, a[0], a[1]);
        }
        if (rest) {
            load_few(dtype, x + whole * bytes, rest, a);
            unit_gradient(a, pivot + whole, scale + whole);
            store_few(dtype, dx + whole * bytes, rest, a);
        }
    }
    if (stream)
        v_fence();
}

/* ---- the table ------------------------------------------------------------------------------- */

static void row_statistics_of(const struct logsumexp_block *block, float *statistics) {
    float *const sums = statistics + block->lines;
    if (block->length <= SHORT && block->lines > 1)
        V_FOR_DTYPE(block->dtype, dtype, short_row_statistics(dtype, block, statistics, sums))
    else
        V_FOR_DTYPE(block->dtype, dtype, row_statistics(dtype, block, statistics, sums))
}

static void column_statistics_of(const struct logsumexp_block *block, float *statistics) {
    V_FOR_DTYPE(block->dtype, dtype, column_statistics(dtype, block, statistics, statistics + block->lines));
}

static void row_gradient_of(const struct logsumexp_block *block) {
    V_FOR_DTYPE(block->dtype, dtype, row_gradient(dtype, block));
}

static void column_gradient_of(const struct logsumexp_block *block) {
    V_FOR_DTYPE(block->dtype, dtype, column_gradient(dtype, block));
}

static void finish(const float *statistics, int64_t parts, int64_t lines, rafter_dtype dtype, char *lse,
                   int64_t lse_line) {
    V_FOR_DTYPE(dtype, type, finish_as(type, statistics, parts, lines, lse, lse_line));
}

extern const struct logsumexp_kernels RAFTER_KERNELS(logsumexp);
const struct logsumexp_kernels RAFTER_KERNELS(logsumexp) = {
    .statistics = {[LOGSUMEXP_ROWS] = row_statistics_of, [LOGSUMEXP_COLUMNS] = column_statistics_of},
    .finish = finish,
    .gradient = {[LOGSUMEXP_ROWS] = row_gradient_of, [LOGSUMEXP_COLUMNS] = column_gradient_of},
};
