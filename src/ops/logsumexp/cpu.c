/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp on the CPU. The statistics of a line are a pivot near the maximum and the sum of
 * exponentials relative to it. Rows use v_stats_row, columns v_column_statistics. Vectors need many
 * columns: short rows are transposed into the columns of a buffer, and a few columns whose rows
 * follow one another without gaps are treated as many shorter ones.
 */
#include "ops/logsumexp/kernels.h"

#include <math.h>

#include "core/kernel_memory.h"
#include "core/tensor.h"
#include "core/variants.h"
#include "simd/columns.h"
#include "simd/transpose.h"

enum {
    BUFFER = 512,  /* elements gathered at a time where the elements of a row are not contiguous */
    TURNED = 4096, /* elements of short rows transposed into columns at a time: half of L1 */
    /* Rows up to these lengths are processed as columns. Backward is limited to shorter ones because it
     * also transposes the result; for 16-bit dtypes vectors along rows cost more. */
    SHORT = 80,
    SHORT_BACKWARD = 12,
    SHORT_BACKWARD_16 = 33
};

/* How many rows of `length` elements are transposed at a time: a multiple of V_UNIT. */
V_INLINE int64_t turned_lines(int64_t length) {
    return min64(max64(TURNED / max64(length, 1) / V_UNIT, 1) * V_UNIT, 8 * V_UNIT);
}
_Static_assert(SHORT *V_UNIT <= TURNED, "a unit of the longest short rows does not fit");

/* ---- a few columns as many ------------------------------------------------------------------- */

/* How many rows of memory are treated as one: see v_side_by_side. */
V_INLINE int64_t rows_side_by_side(const struct logsumexp_block *b, bool gradient) {
    const bool packed = b->x_step == b->lines && (!gradient || b->dx_step == b->lines);
    return packed ? v_side_by_side(b->lines, b->length) : 1;
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* Compiled once per dtype. Pitch in bytes. */
V_FUNCTION(statistics_of,
           (rafter_dtype any, const char *x, int64_t pitch, int64_t columns, int64_t rows, float *pivots, float *sums),
           (any, x, pitch, columns, rows, pivots, sums), any, (void)any;
           v_column_statistics(dtype, x, pitch, columns, rows, NULL, NULL, pivots, sums))

static void column_statistics(const struct logsumexp_block *b, float *pivots, float *sums) {
    const int64_t side = rows_side_by_side(b, false), wide = side * b->lines, long_rows = b->length / side;
    if (side == 1) {
        statistics_of(b->dtype, b->x, b->x_step * rafter_dtype_bytes(b->dtype), b->lines, b->length, pivots, sums);
        return;
    }
    /* Halves are merged until one set of columns remains; then the rows that were left over are merged with it. */
    float wide_pivots[V_WIDE], wide_sums[V_WIDE];
    const int64_t rest = b->length - long_rows * side, bytes = rafter_dtype_bytes(b->dtype);
    statistics_of(b->dtype, b->x, wide * bytes, wide, long_rows, wide_pivots, wide_sums);
    for (int64_t n = wide / 2; n >= b->lines; n /= 2)
        v_merge_columns(wide_pivots, wide_sums, n);
    if (rest) {
        statistics_of(b->dtype, b->x + long_rows * wide * bytes, b->lines * bytes, b->lines, rest,
                      wide_pivots + b->lines, wide_sums + b->lines);
        v_merge_columns(wide_pivots, wide_sums, b->lines);
    }
    memcpy(pivots, wide_pivots, (size_t)b->lines * sizeof *pivots);
    memcpy(sums, wide_sums, (size_t)b->lines * sizeof *sums);
}

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
            s.sum = v_column_has_nan(dtype, x, b->x_step * bytes, b->length) ? NAN : 1.0f;
        pivots[line] = s.max;
        sums[line] = s.sum;
    }
}

/* Copies short rows from `line` on to columns of fp32: element i of the j-th goes to to[i * pitch + j]. */
V_INLINE void turn(int dtype, const struct logsumexp_block *b, int64_t line, int64_t lines, float *to, int64_t pitch) {
    const int64_t bytes = v_bytes(dtype);
    const char *const x = b->x + line * b->x_line * bytes;
    if (b->x_step == 1) {
        v_rows_to_columns(dtype, x, b->x_line, lines, b->length, to, pitch);
        return;
    }
    for (int64_t i = 0; i < b->length; i++)
        for (int64_t j = 0; j < lines; j++)
            to[i * pitch + j] = v_get(dtype, x + (j * b->x_line + i * b->x_step) * bytes);
}

V_INLINE void short_row_statistics(int dtype, const struct logsumexp_block *b, float *pivots, float *sums) {
    float *const columns = rafter_kernel_memory();
    const int64_t step = turned_lines(b->length);
    for (int64_t line = 0; line < b->lines; line += step) {
        const int64_t lines = min64(b->lines - line, step);
        turn(dtype, b, line, lines, columns, step);
        statistics_of(RAFTER_F32, (const char *)columns, step * 4, lines, b->length, pivots + line, sums + line);
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
            v_select(part_pivot == pivot, v_set(1.0f), v_exp_from(part_pivot, pivot)); /* 1 for two infinite ones too */
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

/* Reads lse or dlse of some lines as fp32. */
V_INLINE void load_lines(rafter_dtype dtype, const char *from, int64_t step, int64_t lines, float *to) {
    for (int64_t c = 0; c < lines; c += V_LANES) {
        const int64_t count = min64(lines - c, V_LANES);
        char buffer[V_LANES * 4];
        vf a = v_set(0.0f);
        V_FOR_DTYPE(
            dtype, type,
            a = v_load_part(type, v_gather(type, from + c * step * v_bytes(type), step, count, buffer), count, 0.0f));
        v_store_part(RAFTER_F32, to + c, a, count);
    }
}

/* What the gradient of each column needs, in the order of units. */
struct slopes {
    float pivot[LOGSUMEXP_MOST_LINES], scale[LOGSUMEXP_MOST_LINES];
};

/* Loads lse and dlse of the block's lines from `line` on, repeated `times` times. */
V_INLINE void load_slopes(int dtype, const struct logsumexp_block *b, int64_t line, int64_t lines, int64_t times,
                          struct slopes *s) {
    const int64_t lse_bytes = rafter_dtype_bytes(b->lse_dtype), dlse_bytes = rafter_dtype_bytes(b->dlse_dtype);
    load_lines(b->lse_dtype, b->lse + line * b->lse_line * lse_bytes, b->lse_line, lines, s->pivot);
    load_lines(b->dlse_dtype, b->dlse + line * b->dlse_line * dlse_bytes, b->dlse_line, lines, s->scale);
    for (int64_t c = 0; c < lines; c++)
        s->pivot[c] = v_pivot(s->pivot[c]);
    for (int64_t i = lines; i < times * lines; i++) {
        s->pivot[i] = s->pivot[i - lines];
        s->scale[i] = s->scale[i - lines];
    }
    v_order_columns(dtype, times * lines, s->pivot);
    v_order_columns(dtype, times * lines, s->scale);
}

V_INLINE vf slope_at(vf a, const struct slopes *s, int64_t c, int64_t count) {
    return v_exp_from(a, v_load_lanes(RAFTER_F32, s->pivot + c, count, 0.0f)) *
           v_load_lanes(RAFTER_F32, s->scale + c, count, 0.0f);
}

/* Pitches are in bytes. */
V_INLINE void gradient_of_columns(int dtype, const char *x, int64_t x_pitch, char *dx, int64_t dx_pitch,
                                  int64_t columns, int64_t rows, const struct slopes *s, bool stream) {
    const int64_t bytes = v_bytes(dtype);
    for (int64_t row = 0; row < rows; row++, x += x_pitch, dx += dx_pitch) {
        int64_t c = 0;
        for (; c + V_UNIT <= columns; c += V_UNIT) {
            vf a, b;
            v_load_pair(dtype, x + c * bytes, &a, &b);
            __builtin_prefetch(x + x_pitch + c * bytes, 0, 2);
            a = slope_at(a, s, c, V_LANES);
            b = slope_at(b, s, c + V_LANES, V_LANES);
            if (stream)
                v_stream_pair(dtype, dx + c * bytes, a, b);
            else
                v_store_pair(dtype, dx + c * bytes, a, b);
        }
        for (; c < columns; c += V_LANES) {
            const int64_t count = min64(columns - c, V_LANES);
            const vf a = v_load_part(dtype, x + c * bytes, count, 0.0f);
            v_store_part(dtype, dx + c * bytes, slope_at(a, s, c, count), count);
        }
    }
}

V_INLINE void column_gradient(int dtype, const struct logsumexp_block *b) {
    const int64_t side = rows_side_by_side(b, true), long_rows = b->length / side, rest = b->length - long_rows * side;
    const int64_t bytes = v_bytes(dtype), x_pitch = side * b->x_step * bytes, dx_pitch = side * b->dx_step * bytes;
    const bool stream = b->stream && ((uintptr_t)b->dx | (uintptr_t)dx_pitch) % V_STREAM == 0;
    struct slopes slopes;
    load_slopes(dtype, b, 0, b->lines, side, &slopes);
    if (stream)
        gradient_of_columns(dtype, b->x, x_pitch, b->dx, dx_pitch, side * b->lines, long_rows, &slopes, true);
    else
        gradient_of_columns(dtype, b->x, x_pitch, b->dx, dx_pitch, side * b->lines, long_rows, &slopes, false);
    if (rest) { /* one shorter row */
        load_slopes(dtype, b, 0, b->lines, rest, &slopes);
        gradient_of_columns(dtype, b->x + long_rows * x_pitch, 0, b->dx + long_rows * dx_pitch, 0, rest * b->lines, 1,
                            &slopes, false);
    }
    if (stream)
        v_fence();
}

V_INLINE void short_row_gradient(int dtype, const struct logsumexp_block *b) {
    float *const columns = rafter_kernel_memory();
    struct slopes *const slopes = (void *)(columns + TURNED);
    _Static_assert(TURNED * sizeof *columns + sizeof *slopes <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    const int64_t step = turned_lines(b->length);
    for (int64_t line = 0; line < b->lines; line += step) {
        const int64_t lines = min64(b->lines - line, step);
        turn(dtype, b, line, lines, columns, step);
        load_slopes(RAFTER_F32, b, line, lines, 1, slopes);
        gradient_of_columns(RAFTER_F32, (const char *)columns, step * 4, (char *)columns, step * 4, lines, b->length,
                            slopes, false);
        v_columns_to_rows(dtype, columns, step, lines, b->length, b->dx + line * b->dx_line * v_bytes(dtype),
                          b->dx_line);
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

V_FUNCTION(short_rows, (const struct logsumexp_block *block, float *statistics), (block, statistics), block->dtype,
           short_row_statistics(dtype, block, statistics, statistics + block->lines))
V_FUNCTION(long_rows, (const struct logsumexp_block *block, float *statistics), (block, statistics), block->dtype,
           row_statistics(dtype, block, statistics, statistics + block->lines))

static void row_statistics_of(const struct logsumexp_block *block, float *statistics) {
    if (block->length <= SHORT) /* also a single line: the bits of a line do not depend on others */
        short_rows(block, statistics);
    else
        long_rows(block, statistics);
}

static void column_statistics_of(const struct logsumexp_block *block, float *statistics) {
    column_statistics(block, statistics, statistics + block->lines);
}

V_FUNCTION(short_gradient, (const struct logsumexp_block *block), (block), block->dtype,
           short_row_gradient(dtype, block))
V_FUNCTION(long_gradient, (const struct logsumexp_block *block), (block), block->dtype, row_gradient(dtype, block))

static void row_gradient_of(const struct logsumexp_block *block) {
    const int64_t most = block->dtype == RAFTER_F32 ? SHORT_BACKWARD : SHORT_BACKWARD_16;
    if (block->length <= most && block->dx_step == 1)
        short_gradient(block);
    else
        long_gradient(block);
}

V_FUNCTION(column_gradient_of, (const struct logsumexp_block *block), (block), block->dtype,
           column_gradient(dtype, block))

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
