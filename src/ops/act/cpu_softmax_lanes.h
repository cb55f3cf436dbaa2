/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax where vectors along a line, or across the lines of a block, would be mostly empty. Short
 * rows are transposed into the columns of a buffer. Of a few columns without gaps between rows,
 * several rows are treated as one. This file also picks the kernel for whole rows.
 */
#ifndef RAFTER_ACT_CPU_SOFTMAX_LANES_H
#define RAFTER_ACT_CPU_SOFTMAX_LANES_H

#include "ops/act/cpu_softmax_columns.h"
#include "ops/act/cpu_softmax_rows.h"
#include "simd/columns.h"
#include "simd/transpose.h"

/* ---- short rows ------------------------------------------------------------------------------ */

enum {
    TURNED = 2048,     /* elements of each tensor transposed at a time; more if V_LANES rows have more */
    TURNED_ROWS = 256, /* the most rows transposed at a time */
    /* Elements of the buffer, which in backward holds two tensors. */
    MOST_TURNED = ACT_JOINED * V_LANES > 2 * TURNED ? ACT_JOINED *V_LANES : 2 * TURNED,
    /* Rows of up to this length are transposed. Backward transposes three tensors, which pays only
     * where several rows fit into a vector. */
    SHORTEST_FORWARD = 40,
    SHORTEST_BACKWARD = V_LANES / 2,
    MOST_VECTORS = V_LANES == 16 ? 12 : 4 /* the most vectors of a row whose gradient is computed in registers */
};

/* Softmax of V_LANES rows, one lane each, in place: element i of a row is at x + i * pitch. */
V_INLINE void lanes_forward(float *x, int64_t pitch, int64_t n) {
    vf max = v_set(-INFINITY), sum[2] = {v_set(0.0f), v_set(0.0f)};
    for (int64_t i = 0; i < n; i++)
        max = v_max(v_load(RAFTER_F32, x + i * pitch), max);
    max = finite_pivot(max);
    int64_t i = 0;
    for (; i + 2 <= n; i += 2)
        for (int k = 0; k < 2; k++) {
            const vf e = v_exp_from(v_load(RAFTER_F32, x + (i + k) * pitch), max);
            v_store(RAFTER_F32, x + (i + k) * pitch, e);
            sum[k] += e;
        }
    if (i < n) {
        const vf e = v_exp_from(v_load(RAFTER_F32, x + i * pitch), max);
        v_store(RAFTER_F32, x + i * pitch, e);
        sum[0] += e;
    }
    const vf scale = v_set(1.0f) / (sum[0] + sum[1]);
    for (i = 0; i < n; i++)
        v_store(RAFTER_F32, x + i * pitch, v_load(RAFTER_F32, x + i * pitch) * scale);
}

/* The gradient: replaces y by dx. */
V_INLINE void lanes_backward(float *y, const float *dy, int64_t pitch, int64_t n) {
    vf sum[2] = {v_set(0.0f), v_set(0.0f)};
    int64_t i = 0;
    for (; i + 2 <= n; i += 2)
        for (int k = 0; k < 2; k++)
            sum[k] = v_fma(v_load(RAFTER_F32, y + (i + k) * pitch), v_load(RAFTER_F32, dy + (i + k) * pitch), sum[k]);
    if (i < n)
        sum[0] = v_fma(v_load(RAFTER_F32, y + i * pitch), v_load(RAFTER_F32, dy + i * pitch), sum[0]);
    const vf all = sum[0] + sum[1];
    for (i = 0; i < n; i++)
        v_store(RAFTER_F32, y + i * pitch,
                v_load(RAFTER_F32, y + i * pitch) * (v_load(RAFTER_F32, dy + i * pitch) - all));
}

/* Softmax of short rows, through a buffer in which they are columns. */
V_INLINE void turned_rows(int dtype, bool is_forward, const struct act_block *b) {
    float *const buffer = rafter_kernel_memory();
    _Static_assert(MOST_TURNED * sizeof *buffer <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    const int64_t n = b->columns, inner = b->inner;
    const int64_t pitch = min64(max64(TURNED / n / V_LANES, 1) * V_LANES, TURNED_ROWS);
    float *const in = buffer, *const dy = buffer + n * pitch;
    for (int64_t r = 0; r < b->rows; r += pitch) {
        const int64_t rows = min64(b->rows - r, pitch);
        v_rows_to_columns(dtype, row_at(dtype, b, ACT_IN, r), b->row_stride[ACT_IN], rows, n, in, pitch);
        if (!is_forward)
            v_rows_to_columns(dtype, row_at(dtype, b, ACT_DY, r), b->row_stride[ACT_DY], rows, n, dy, pitch);
        for (int64_t line = 0; line < inner; line++)
            for (int64_t i = line * pitch; i < line * pitch + rows; i += V_LANES) {
                if (is_forward)
                    lanes_forward(in + i, inner * pitch, n / inner);
                else
                    lanes_backward(in + i, dy + i, inner * pitch, n / inner);
            }
        v_columns_to_rows(dtype, in, pitch, rows, n, row_at(dtype, b, ACT_OUT, r), b->row_stride[ACT_OUT]);
    }
}

/* The gradient of rows that are kept in registers: at most `vectors` vectors, the first `full` of them whole (both are
 * compile-time constants). */
V_INLINE void rows_in_registers(int dtype, int full, int vectors, const struct act_block *b) {
    const int64_t step = V_LANES * v_bytes(dtype);
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const in = row_at(dtype, b, ACT_IN, r), *const given = row_at(dtype, b, ACT_DY, r);
        char *const dx = row_at(dtype, b, ACT_OUT, r);
        vf y[MOST_VECTORS], dy[MOST_VECTORS], products[2] = {v_set(0.0f), v_set(0.0f)};
        for (int k = 0; k < vectors; k++) {
            const int64_t count = k < full ? V_LANES : max64(min64(b->columns - k * V_LANES, V_LANES), 0);
            y[k] = load(dtype, in + k * step, count);
            dy[k] = load(dtype, given + k * step, count);
            products[k % 2] = v_fma(y[k], dy[k], products[k % 2]);
        }
        const vf sum = v_set(v_sum(products[0] + products[1]));
        for (int k = 0; k < vectors; k++) {
            const int64_t count = k < full ? V_LANES : max64(min64(b->columns - k * V_LANES, V_LANES), 0);
            store(dtype, dx + k * step, y[k] * (dy[k] - sum), count);
        }
    }
}

V_INLINE void any_rows_in_registers(int dtype, const struct act_block *b) {
    const int64_t vectors = ceil_div(b->columns, V_LANES);
    if (vectors <= 1)
        rows_in_registers(dtype, 0, 1, b);
    else if (vectors == 2)
        rows_in_registers(dtype, 1, 2, b);
    else if (vectors == 3)
        rows_in_registers(dtype, 2, 3, b);
    else if (vectors == 4)
        rows_in_registers(dtype, 3, 4, b);
#if V_LANES == 16
    else if (vectors <= 6)
        rows_in_registers(dtype, 4, 6, b);
    else if (vectors <= 8)
        rows_in_registers(dtype, 6, 8, b);
    else
        rows_in_registers(dtype, 8, 12, b);
#endif
}

/* The gradient of rows with column stride 1, in two passes over memory. */
V_INLINE void rows_in_passes(int dtype, const struct act_block *b) {
    float sum[ACT_ROWS_BLOCK / ACT_SHORT_MARGIN];
    rows_backward_statistics(dtype, b, sum);
    rows_backward_apply(dtype, b, sum);
}

V_FUNCTION(turned_forward, (const struct act_block *b), (b), b->dtype, turned_rows(dtype, true, b))
V_FUNCTION(turned_backward, (const struct act_block *b), (b), b->dtype, turned_rows(dtype, false, b))
V_FUNCTION(backward_in_registers, (const struct act_block *b), (b), b->dtype, any_rows_in_registers(dtype, b))
V_FUNCTION(backward_in_passes, (const struct act_block *b), (b), b->dtype, rows_in_passes(dtype, b))

/* Softmax of whole rows with column stride 1. Longer rows are taken a few at a time, so that the second pass reads them
 * from L1. */
static void whole_rows(const struct act_block *b, bool is_forward) {
    /* The number of rows plays no part: a row's bits do not depend on other rows. */
    if (b->inner > 1 || b->columns <= (is_forward ? SHORTEST_FORWARD : SHORTEST_BACKWARD)) {
        if (is_forward)
            turned_forward(b);
        else
            turned_backward(b);
        return;
    }
    if (!is_forward && b->columns <= MOST_VECTORS * V_LANES) {
        backward_in_registers(b);
        return;
    }
    const int64_t some = max64(ACT_ROWS_BLOCK / (b->columns + ACT_SHORT_MARGIN), 1);
    for (int64_t r = 0; r < b->rows; r += some) {
        struct act_block part = *b;
        part.rows = min64(b->rows - r, some);
        for (int t = 0; t < ACT_TENSORS; t++)
            part.data[t] = b->data[t] ? b->data[t] + r * b->row_stride[t] * v_bytes((int)b->dtype) : NULL;
        if (is_forward)
            short_rows(&part);
        else
            backward_in_passes(&part);
    }
}

static void whole_rows_forward(const struct act_block *b) {
    whole_rows(b, true);
}

static void whole_rows_backward(const struct act_block *b) {
    whole_rows(b, false);
}

/* ---- a few columns --------------------------------------------------------------------------- */

/* How many rows are treated as one: see v_side_by_side. */
V_INLINE int64_t rows_side_by_side(const struct act_block *b) {
    bool packed = true;
    for (int t = 0; t < ACT_TENSORS; t++)
        packed &= !b->data[t] || b->row_stride[t] == b->columns;
    return packed ? v_side_by_side(b->columns, b->rows) : 1;
}

/* The block from row `first` on, with `side` rows taken as one. */
V_INLINE struct act_block wide_block(const struct act_block *b, int64_t first, int64_t rows, int64_t side) {
    struct act_block wide = *b;
    wide.rows = rows;
    wide.columns = side * b->columns;
    for (int t = 0; t < ACT_TENSORS; t++) {
        wide.row_stride[t] = wide.columns;
        wide.data[t] = b->data[t] ? b->data[t] + first * b->columns * v_bytes((int)b->dtype) : NULL;
    }
    return wide;
}

V_INLINE void add_halves(float *sums, int64_t n) {
    for (int64_t c = 0; c < n; c++)
        sums[c] += sums[n + c];
}

/* Statistics of a block, as `statistics_of` computes them: a pivot and a sum per column in forward, a
 * sum in backward. */
V_INLINE void few_columns_statistics(int dtype, bool is_forward, const struct act_block *b, float *statistics,
                                     void (*statistics_of)(const struct act_block *b, float *statistics)) {
    const int64_t side = rows_side_by_side(b), n = b->columns, whole = b->rows / side, rest = b->rows - whole * side;
    if (side == 1) {
        statistics_of(b, statistics);
        return;
    }
    float wide[ACT_STATISTICS * V_WIDE];
    float *const pivots = wide, *const sums = is_forward ? wide + side * n : wide;
    const struct act_block block = wide_block(b, 0, whole, side);
    statistics_of(&block, wide);
    v_restore_columns(dtype, side * n, sums);
    if (is_forward)
        v_restore_columns(dtype, side * n, pivots);
    for (int64_t half = side * n / 2; half >= n; half /= 2) {
        if (is_forward)
            v_merge_columns(pivots, sums, half);
        else
            add_halves(sums, half);
    }
    if (rest) {
        const struct act_block last = wide_block(b, whole * side, rest, 1);
        float more[ACT_STATISTICS * V_UNIT];
        statistics_of(&last, more);
        memcpy(pivots + n, more, (size_t)n * sizeof *more);
        if (is_forward) {
            memcpy(sums + n, more + n, (size_t)n * sizeof *more);
            v_merge_columns(pivots, sums, n);
        } else {
            add_halves(sums, n);
        }
    }
    memcpy(statistics, pivots, (size_t)n * sizeof *statistics);
    if (is_forward)
        memcpy(statistics + n, sums, (size_t)n * sizeof *statistics);
}

V_INLINE void few_columns_apply(int dtype, bool is_forward, const struct act_block *b, const float *statistics,
                                void (*apply)(const struct act_block *b, const float *statistics)) {
    const int64_t side = rows_side_by_side(b), n = b->columns, whole = b->rows / side, rest = b->rows - whole * side;
    if (side == 1) {
        apply(b, statistics);
        return;
    }
    for (int last = 0; last < (rest ? 2 : 1); last++) { /* the rows that are left over are one narrower row */
        const struct act_block block = last ? wide_block(b, whole * side, 1, rest) : wide_block(b, 0, whole, side);
        float wide[ACT_STATISTICS * V_WIDE];
        for (int k = 0; k < (is_forward ? 2 : 1); k++) {
            float *const to = wide + k * block.columns;
            for (int64_t i = 0; i < block.columns; i++)
                to[i] = i < n ? statistics[k * n + i] : to[i - n];
            v_order_columns(dtype, block.columns, to);
        }
        apply(&block, wide);
    }
}

#endif
