/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax along columns: the lines are adjacent, and their elements are one row apart. */
#ifndef RAFTER_ACT_CPU_SOFTMAX_COLUMNS_H
#define RAFTER_ACT_CPU_SOFTMAX_COLUMNS_H

#include "ops/act/cpu_softmax.h"

enum {
    /* Rows that are summed in registers before they are added to the sums of the columns. A sum of n
     * rows has FOLD + n / FOLD roundings. */
    FOLD = 8,
    /* Pairs of vectors of adjacent columns that are summed in registers at a time: so much of each row is
     * read in one piece. */
    PAIRS = 4,
    /* Prefetch distances in rows: for sums, which read a part of each row, and for results. */
    AHEAD = 16,
    APPLY_AHEAD = 4,
    /* While results are computed, rows of at least this many bytes are prefetched. */
    LONG_ROW = 1024
};

/* Column maxima over the first `rows` rows. */
V_INLINE void columns_max(int dtype, const struct act_block *b, int64_t rows, float *max) {
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    for (int64_t i = 0; i < n; i++)
        max[i] = -INFINITY;
    for (int64_t r = 0; r < rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r);
        int64_t i = 0;
        for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
            vf x0, x1;
            v_load_pair(dtype, x + i * bytes, &x0, &x1);
            v_store(RAFTER_F32, max + i, v_max(x0, v_load(RAFTER_F32, max + i)));
            v_store(RAFTER_F32, max + i + V_LANES, v_max(x1, v_load(RAFTER_F32, max + i + V_LANES)));
        }
        for (int64_t lanes; i < n; i += lanes) {
            lanes = min64(n - i, V_LANES);
            const vf a = load(dtype, x + i * bytes, lanes);
            store(RAFTER_F32, max + i, v_max(a, load(RAFTER_F32, max + i, lanes)), lanes);
        }
    }
}

/* Forward adds e^(x - pivot), backward y dy; `by` is the pivot or dy. */
V_INLINE vf add_term(bool is_forward, vf sum, vf in, vf by) {
    return is_forward ? sum + v_exp_from(in, by) : v_fma(in, by, sum);
}

/* Adds `rows` rows to the sums of the columns in `pairs` pairs of vectors, from `column` on. */
V_INLINE void fold_pairs(int dtype, bool is_forward, int pairs, const struct act_block *b, int64_t row, int rows,
                         int64_t column, const float *pivot, float *sum) {
    const int64_t bytes = v_bytes(dtype), step = 2 * V_LANES * bytes;
    const int64_t in_pitch = b->row_stride[ACT_IN] * bytes, dy_pitch = is_forward ? 0 : b->row_stride[ACT_DY] * bytes;
    const char *in = row_at(dtype, b, ACT_IN, row) + column * bytes;
    const char *dy = is_forward ? NULL : row_at(dtype, b, ACT_DY, row) + column * bytes;
    vf s[2 * PAIRS], by[2 * PAIRS];
    for (int k = 0; k < 2 * pairs; k++) {
        s[k] = v_set(0.0f);
        by[k] = is_forward ? finite_pivot(v_load(RAFTER_F32, pivot + column + k * V_LANES)) : s[k];
    }
    for (int r = 0; r < rows; r++, in += in_pitch, dy += dy_pitch)
        for (int k = 0; k < 2 * pairs; k += 2) {
            vf in0, in1;
            __builtin_prefetch(in + AHEAD * in_pitch + k / 2 * step);
            v_load_pair(dtype, in + k / 2 * step, &in0, &in1);
            if (!is_forward) {
                __builtin_prefetch(dy + AHEAD * dy_pitch + k / 2 * step);
                v_load_pair(dtype, dy + k / 2 * step, &by[k], &by[k + 1]);
            }
            s[k] = add_term(is_forward, s[k], in0, by[k]);
            s[k + 1] = add_term(is_forward, s[k + 1], in1, by[k + 1]);
        }
    for (int k = 0; k < 2 * pairs; k++)
        v_store(RAFTER_F32, sum + column + k * V_LANES, v_load(RAFTER_F32, sum + column + k * V_LANES) + s[k]);
}

V_INLINE void fold(int dtype, bool is_forward, const struct act_block *b, int64_t row, int rows, const float *pivot,
                   float *sum) {
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    int64_t i = 0;
    for (; i + PAIRS * 2 * V_LANES <= n; i += PAIRS * 2 * V_LANES)
        fold_pairs(dtype, is_forward, PAIRS, b, row, rows, i, pivot, sum);
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES)
        fold_pairs(dtype, is_forward, 1, b, row, rows, i, pivot, sum);
    for (int64_t lanes; i < n; i += lanes) {
        lanes = min64(n - i, V_LANES);
        vf s = v_set(0.0f), by = is_forward ? finite_pivot(load(RAFTER_F32, pivot + i, lanes)) : s;
        for (int r = 0; r < rows; r++) {
            if (!is_forward)
                by = load(dtype, row_at(dtype, b, ACT_DY, row + r) + i * bytes, lanes);
            s = add_term(is_forward, s, load(dtype, row_at(dtype, b, ACT_IN, row + r) + i * bytes, lanes), by);
        }
        store(RAFTER_F32, sum + i, load(RAFTER_F32, sum + i, lanes) + s, lanes);
    }
}

V_INLINE void columns_sum(int dtype, bool is_forward, const struct act_block *b, const float *pivot, float *sum) {
    for (int64_t i = 0; i < b->columns; i++)
        sum[i] = 0.0f;
    int64_t r = 0;
    for (; r + FOLD <= b->rows; r += FOLD)
        fold(dtype, is_forward, b, r, FOLD, pivot, sum);
    for (; r < b->rows; r++)
        fold(dtype, is_forward, b, r, 1, pivot, sum);
}

V_INLINE void columns_forward_statistics(int dtype, const struct act_block *b, float *statistics) {
    float *const pivot = statistics, *const sum = statistics + b->columns;
    columns_max(dtype, b, guesses(dtype) ? 1 : b->rows, pivot);
    columns_sum(dtype, true, b, pivot, sum);
    bool failed = false;
    for (int64_t i = 0; i < b->columns; i++)
        failed |= guess_failed(sum[i]);
    if (guesses(dtype) && failed) {
        columns_max(dtype, b, b->rows, pivot);
        columns_sum(dtype, true, b, pivot, sum);
    }
}

/* For a store if to_write, else for a load. Clang's __builtin_prefetch takes no variable, not even of an inlined call. */
V_INLINE void fetch_line(const char *at, bool to_write) {
    if (to_write)
        __builtin_prefetch(at, 1);
    else
        __builtin_prefetch(at, 0);
}

/* Results are computed from the last row to the first, because the rows read last may still be in L2. Processors
 * prefetch short rows in that order by themselves, but not long ones. */
V_INLINE void fetch_ahead(int dtype, const struct act_block *b, int tensor, const char *at) {
    const int64_t pitch = b->row_stride[tensor] * v_bytes(dtype);
    if (pitch >= LONG_ROW)
        fetch_line(at - APPLY_AHEAD * pitch, tensor == ACT_OUT);
}

V_INLINE void normalise_row(int dtype, const struct act_block *b, int64_t row, const float *pivot, const float *scale,
                            bool stream) {
    const char *const x = row_at(dtype, b, ACT_IN, row);
    char *const y = row_at(dtype, b, ACT_OUT, row);
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    int64_t i = 0;
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        vf x0, x1;
        fetch_ahead(dtype, b, ACT_IN, x + i * bytes);
        if (!stream)
            fetch_ahead(dtype, b, ACT_OUT, y + i * bytes);
        v_load_pair(dtype, x + i * bytes, &x0, &x1);
        x0 = v_exp_from(x0, v_load(RAFTER_F32, pivot + i)) * v_load(RAFTER_F32, scale + i);
        x1 = v_exp_from(x1, v_load(RAFTER_F32, pivot + i + V_LANES)) * v_load(RAFTER_F32, scale + i + V_LANES);
        store_pair(dtype, y + i * bytes, x0, x1, stream);
    }
    for (int64_t lanes; i < n; i += lanes) {
        lanes = min64(n - i, V_LANES);
        const vf e = v_exp_from(load(dtype, x + i * bytes, lanes), load(RAFTER_F32, pivot + i, lanes));
        store(dtype, y + i * bytes, e * load(RAFTER_F32, scale + i, lanes), lanes);
    }
}

/* Whether a row of the output can be streamed. */
V_INLINE bool streams(int dtype, const struct act_block *b, int64_t row) {
    return b->stream && (uintptr_t)row_at(dtype, b, ACT_OUT, row) % V_STREAM == 0;
}

V_INLINE void columns_forward_apply(int dtype, const struct act_block *b, const float *statistics) {
    float pivot[ACT_MOST_LINES], scale[ACT_MOST_LINES];
    for (int64_t i = 0; i < b->columns; i++) {
        pivot[i] = v_pivot(statistics[i]);
        scale[i] = 1.0f / statistics[b->columns + i];
    }
    for (int64_t r = b->rows - 1; r >= 0; r--) {
        if (streams(dtype, b, r))
            normalise_row(dtype, b, r, pivot, scale, true);
        else
            normalise_row(dtype, b, r, pivot, scale, false);
    }
}

V_INLINE void columns_backward_statistics(int dtype, const struct act_block *b, float *sum) {
    columns_sum(dtype, false, b, NULL, sum);
}

V_INLINE void project_row(int dtype, const struct act_block *b, int64_t row, const float *sum, bool stream) {
    const char *const y = row_at(dtype, b, ACT_IN, row), *const dy = row_at(dtype, b, ACT_DY, row);
    char *const dx = row_at(dtype, b, ACT_OUT, row);
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    int64_t i = 0;
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        vf y0, y1, dy0, dy1;
        fetch_ahead(dtype, b, ACT_IN, y + i * bytes);
        fetch_ahead(dtype, b, ACT_DY, dy + i * bytes);
        if (!stream)
            fetch_ahead(dtype, b, ACT_OUT, dx + i * bytes);
        v_load_pair(dtype, y + i * bytes, &y0, &y1);
        v_load_pair(dtype, dy + i * bytes, &dy0, &dy1);
        store_pair(dtype, dx + i * bytes, y0 * (dy0 - v_load(RAFTER_F32, sum + i)),
                   y1 * (dy1 - v_load(RAFTER_F32, sum + i + V_LANES)), stream);
    }
    for (int64_t lanes; i < n; i += lanes) {
        lanes = min64(n - i, V_LANES);
        const vf centred = load(dtype, dy + i * bytes, lanes) - load(RAFTER_F32, sum + i, lanes);
        store(dtype, dx + i * bytes, load(dtype, y + i * bytes, lanes) * centred, lanes);
    }
}

V_INLINE void columns_backward_apply(int dtype, const struct act_block *b, const float *sum) {
    for (int64_t r = b->rows - 1; r >= 0; r--) {
        if (streams(dtype, b, r))
            project_row(dtype, b, r, sum, true);
        else
            project_row(dtype, b, r, sum, false);
    }
}

/* ---- few rows -------------------------------------------------------------------------------- */

/* Loads the first n elements of a pair, then zeros; n is at least 1, and often a whole pair. */
V_INLINE void load_pair_part(int dtype, const void *p, int64_t n, vf *a, vf *b) {
    if (n < 2 * V_LANES)
        v_load_pair_part(dtype, p, n, 0.0f, a, b);
    else
        v_load_pair(dtype, p, a, b);
}

/* Backward reads and writes more streams than processors prefetch, so it prefetches them itself, this many bytes
 * ahead. */
enum { FAR = 512 };

V_INLINE void fetch_pair(int dtype, const char *p, bool to_write) {
    for (int64_t i = 0; i < 2 * V_LANES * v_bytes(dtype); i += 64)
        fetch_line(p + i, to_write);
}

/* Softmax of the n columns from `column` on, in registers: a pair of vectors from every row. n is 2 V_LANES except at
 * the end of the rows. */
V_INLINE void few_rows_at(int dtype, bool is_forward, const struct act_block *b, int64_t column, int64_t n,
                          bool stream) {
    const int64_t at = column * v_bytes(dtype), rows = b->rows;
    vf in[ACT_FEW_ROWS][2], dy[ACT_FEW_ROWS][2];
    vf max[2] = {v_set(-INFINITY), v_set(-INFINITY)}, sum[2] = {v_set(0.0f), v_set(0.0f)};
    for (int64_t r = 0; r < rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r) + at;
        load_pair_part(dtype, x, n, &in[r][0], &in[r][1]);
        if (!is_forward) {
            const char *const g = row_at(dtype, b, ACT_DY, r) + at;
            load_pair_part(dtype, g, n, &dy[r][0], &dy[r][1]);
            fetch_pair(dtype, x + FAR, false);
            fetch_pair(dtype, g + FAR, false);
            if (!stream)
                fetch_pair(dtype, row_at(dtype, b, ACT_OUT, r) + at + FAR, true);
        }
        for (int k = 0; k < 2; k++) {
            if (is_forward)
                max[k] = v_max(in[r][k], max[k]);
            else
                sum[k] = v_fma(in[r][k], dy[r][k], sum[k]);
        }
    }
    for (int64_t r = 0; is_forward && r < rows; r++)
        for (int k = 0; k < 2; k++)
            sum[k] += in[r][k] = v_exp_from(in[r][k], finite_pivot(max[k]));
    const vf scale[2] = {v_set(1.0f) / sum[0], v_set(1.0f) / sum[1]};
    for (int64_t r = 0; r < rows; r++) {
        vf out[2];
        for (int k = 0; k < 2; k++)
            out[k] = in[r][k] * (is_forward ? scale[k] : dy[r][k] - sum[k]);
        char *const to = row_at(dtype, b, ACT_OUT, r) + at;
        if (n < 2 * V_LANES)
            v_store_pair_part(dtype, to, out[0], out[1], n);
        else
            store_pair(dtype, to, out[0], out[1], stream);
    }
}

/* Takes all rows of two vectors of columns at once, so that nothing is read or computed twice. */
V_INLINE void few_rows(int dtype, bool is_forward, const struct act_block *b) {
    const int64_t pitch = b->row_stride[ACT_OUT] * v_bytes(dtype), whole = b->columns / (2 * V_LANES) * (2 * V_LANES);
    const bool stream = streams(dtype, b, 0) && pitch % V_STREAM == 0;
    for (int64_t i = 0; i < whole; i += 2 * V_LANES)
        if (stream)
            few_rows_at(dtype, is_forward, b, i, 2 * V_LANES, true);
        else
            few_rows_at(dtype, is_forward, b, i, 2 * V_LANES, false);
    if (whole < b->columns)
        few_rows_at(dtype, is_forward, b, whole, b->columns - whole, false);
}

V_FUNCTION(few_rows_forward, (const struct act_block *b), (b), b->dtype, few_rows(dtype, true, b))
V_FUNCTION(few_rows_backward, (const struct act_block *b), (b), b->dtype, few_rows(dtype, false, b))

#endif
