/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax along rows: the elements of a line are contiguous, or gathered. */
#ifndef RAFTER_ACT_CPU_SOFTMAX_ROWS_H
#define RAFTER_ACT_CPU_SOFTMAX_ROWS_H

#include "core/kernel_memory.h"
#include "ops/act/cpu_softmax.h"

V_INLINE vf row_exponential(int dtype, const char *x, int64_t lanes, vf pivot) {
    return v_exp_from(v_load_part(dtype, x, lanes, -INFINITY), pivot);
}

/* Stores e^(x - pivot) in whole vectors and returns the sum. Elements after the last pair are taken
 * in single vectors; with pairs_only there are none. With `shifted`, row_scaled() begins its pairs at
 * other elements, so e is stored in the order of memory. (Both are compile-time constants.) The sum
 * depends on neither: a row's bits do not depend on the address of its result. `y`: where row_scaled() will
 * store results, whose cache lines are fetched meanwhile; NULL if it streams them. */
V_INLINE float row_exponentials(int dtype, bool pairs_only, bool shifted, const char *x, int64_t n, vf pivot, float *e,
                                const char *y) {
    const int64_t bytes = v_bytes(dtype);
    vf s0 = v_set(0.0f), s1 = s0, a, b;
    int64_t i = 0;
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        for (int64_t line = 0; y && line < 2 * V_LANES * bytes; line += 64)
            __builtin_prefetch(y + i * bytes + line, 1);
        v_load_pair(dtype, x + i * bytes, &a, &b);
        s0 += a = v_exp_from(a, pivot);
        s1 += b = v_exp_from(b, pivot);
        if (shifted)
            v_unpair(dtype, &a, &b);
        v_store(RAFTER_F32, e + i, a);
        v_store(RAFTER_F32, e + i + V_LANES, b);
    }
    for (int64_t lanes; !pairs_only && i < n; i += lanes) {
        lanes = min64(n - i, V_LANES);
        s0 += a = row_exponential(dtype, x + i * bytes, lanes, pivot);
        v_store(RAFTER_F32, e + i, a);
    }
    return v_sum(s0 + s1);
}

/* y = e * scale, with e as stored by row_exponentials. The first `head` elements are taken in single
 * vectors, so that pairs begin where y is aligned. */
V_INLINE void row_scaled(int dtype, bool pairs_only, bool shifted, const float *e, int64_t head, int64_t n, vf scale,
                         char *y, bool stream) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
    for (int64_t lanes; shifted && i < head; i += lanes) {
        lanes = min64(head - i, V_LANES);
        v_store_part(dtype, y + i * bytes, v_load(RAFTER_F32, e + i) * scale, lanes);
    }
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        vf a = v_load(RAFTER_F32, e + i) * scale, b = v_load(RAFTER_F32, e + i + V_LANES) * scale;
        if (shifted)
            v_pair(dtype, &a, &b);
        store_pair(dtype, y + i * bytes, a, b, stream);
    }
    for (int64_t lanes; !pairs_only && i < n; i += lanes) {
        lanes = min64(n - i, V_LANES);
        v_store_part(dtype, y + i * bytes, v_load(RAFTER_F32, e + i) * scale, lanes);
    }
}

/* Elements before the first address in y that is aligned for streaming. */
V_INLINE int64_t head_of(int dtype, const char *y, int64_t n) {
    return min64(n, (int64_t)(-(uintptr_t)y % V_STREAM) / v_bytes(dtype));
}

/* The exponentials are computed once and kept in a buffer until the sum is known. Each pass runs
 * over all rows of the block, so that the horizontal reductions of short rows overlap. */
V_INLINE void short_rows_as(int dtype, bool pairs_only, bool stream, const struct act_block *b) {
    const bool shifted = stream && !pairs_only;
    float *const e = rafter_kernel_memory(), sum[ACT_ROWS_BLOCK / ACT_SHORT_MARGIN];
    _Static_assert(ACT_SHORT * sizeof *e <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    const int64_t n = b->columns, pitch = n + ACT_SHORT_MARGIN;
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r), *const y = stream ? NULL : row_at(dtype, b, ACT_OUT, r);
        vf pivot = finite_pivot(v_set(guesses(dtype) ? v_get(dtype, x) : v_max_row(dtype, x, n)));
        sum[r] = row_exponentials(dtype, pairs_only, shifted, x, n, pivot, e + r * pitch, y);
        if (guesses(dtype) && guess_failed(sum[r])) {
            pivot = finite_pivot(v_set(v_max_row(dtype, x, n)));
            sum[r] = row_exponentials(dtype, pairs_only, shifted, x, n, pivot, e + r * pitch, y);
        }
    }
    for (int64_t r = 0; r < b->rows; r++) {
        char *const y = row_at(dtype, b, ACT_OUT, r);
        const vf scale = v_set(1.0f / sum[r]);
        row_scaled(dtype, pairs_only, shifted, e + r * pitch, shifted ? head_of(dtype, y, n) : 0, n, scale, y, stream);
    }
}

V_FUNCTION(short_rows_of_streamed_pairs, (const struct act_block *b), (b), b->dtype,
           short_rows_as(dtype, true, true, b))
V_FUNCTION(short_rows_of_pairs, (const struct act_block *b), (b), b->dtype, short_rows_as(dtype, true, false, b))
V_FUNCTION(short_rows_streamed, (const struct act_block *b), (b), b->dtype, short_rows_as(dtype, false, true, b))
V_FUNCTION(short_rows_of_any, (const struct act_block *b), (b), b->dtype, short_rows_as(dtype, false, false, b))

static void short_rows(const struct act_block *b) {
    const bool aligned =
        (uintptr_t)b->data[ACT_OUT] % V_STREAM == 0 && b->row_stride[ACT_OUT] * v_bytes((int)b->dtype) % V_STREAM == 0;
    const bool pairs_only = b->columns % (2 * V_LANES) == 0 && (aligned || !b->stream);
    if (pairs_only && b->stream)
        short_rows_of_streamed_pairs(b);
    else if (pairs_only)
        short_rows_of_pairs(b);
    else if (b->stream)
        short_rows_streamed(b);
    else
        short_rows_of_any(b);
}

V_INLINE void rows_forward_statistics(int dtype, const struct act_block *b, float *statistics) {
    const int64_t step = b->column_stride[ACT_IN], block = step == 1 ? b->columns : GATHER;
    char buffer[GATHER * 4];
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r);
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t i = 0; i < b->columns; i += block) {
            const int64_t part = min64(b->columns - i, block);
            s = v_stats_row(dtype, v_gather(dtype, x + i * step * v_bytes(dtype), step, part, buffer), part, s);
        }
        statistics[r] = s.max;
        statistics[b->rows + r] = s.sum;
    }
}

struct normaliser {
    vf pivot, scale;
};

V_INLINE vf normalised(const vf in[], const void *env) {
    const struct normaliser *const n = env;
    return v_exp_from(in[0], n->pivot) * n->scale;
}

V_INLINE void rows_forward_apply(int dtype, const struct act_block *b, const float *statistics) {
    for (int64_t r = 0; r < b->rows; r++) {
        const struct normaliser n = {finite_pivot(v_set(statistics[r])), v_set(1.0f / statistics[b->rows + r])};
        map_rows(dtype, 1, b, r, 1, normalised, &n);
    }
}

V_INLINE float dot(int dtype, const char *y, const char *dy, int64_t n) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf s[4] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)}, y0, y1, dy0, dy1;
    for (; n >= 4 * V_LANES; n -= 4 * V_LANES)
        for (int k = 0; k < 4; k += 2, y += 2 * step, dy += 2 * step) {
            v_load_pair(dtype, y, &y0, &y1);
            v_load_pair(dtype, dy, &dy0, &dy1);
            s[k] = v_fma(y0, dy0, s[k]);
            s[k + 1] = v_fma(y1, dy1, s[k + 1]);
        }
    for (; n > 0; n -= V_LANES, y += step, dy += step) {
        const int64_t lanes = min64(n, V_LANES);
        s[0] = v_fma(load(dtype, y, lanes), load(dtype, dy, lanes), s[0]);
    }
    return v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

V_INLINE void rows_backward_statistics(int dtype, const struct act_block *b, float *sum) {
    const int64_t y_step = b->column_stride[ACT_IN], dy_step = b->column_stride[ACT_DY], bytes = v_bytes(dtype);
    const int64_t block = y_step == 1 && dy_step == 1 ? b->columns : GATHER;
    char buffer[2][GATHER * 4];
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const y = row_at(dtype, b, ACT_IN, r), *const dy = row_at(dtype, b, ACT_DY, r);
        sum[r] = 0.0f;
        for (int64_t i = 0; i < b->columns; i += block) {
            const int64_t part = min64(b->columns - i, block);
            sum[r] += dot(dtype, v_gather(dtype, y + i * y_step * bytes, y_step, part, buffer[0]),
                          v_gather(dtype, dy + i * dy_step * bytes, dy_step, part, buffer[1]), part);
        }
    }
}

V_INLINE vf projected(const vf in[], const void *env) {
    const vf *const sum = env;
    return in[0] * (in[1] - *sum);
}

V_INLINE void rows_backward_apply(int dtype, const struct act_block *b, const float *sum) {
    for (int64_t r = 0; r < b->rows; r++) {
        const vf env = v_set(sum[r]);
        map_rows(dtype, 2, b, r, 1, projected, &env);
    }
}

#endif
