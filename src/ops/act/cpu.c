/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act on the CPU. Elementwise kinds are one function of a vector, mapped. Softmax has two forms, by where the lines
 * that it normalises lie in memory: rows (a line's elements are adjacent, or else gathered) and columns (the lines are
 * adjacent and their elements a row apart: vectors run across lines, and nothing is transposed).
 */
#include "ops/act/kernels.h"

#include <float.h>

#include "core/variants.h"
#include "simd/activations.h"
#include "simd/softmax.h"

V_INLINE char *row_at(int dtype, const struct act_block *b, int tensor, int64_t row) {
    return b->data[tensor] + row * b->row_stride[tensor] * v_bytes(dtype);
}

V_INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- elementwise kinds ----------------------------------------------------------------------- */

/* What `env` is below: constants, once all is inlined. */
struct flavour {
    int dtype, kind;
};

V_INLINE vf forward(const vf in[], const void *env) {
    const struct flavour *const f = env;
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_relu(in[0]);
    case RAFTER_ACT_SIGMOID: return v_sigmoid(f->dtype, in[0]);
    default: return v_silu(f->dtype, in[0]);
    }
}

V_INLINE vf backward(const vf in[], const void *env) {
    const struct flavour *const f = env;
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_relu_grad(in[0], in[1]);
    case RAFTER_ACT_SIGMOID: return v_sigmoid_grad(f->dtype, in[0], in[1]);
    default: return v_silu_grad(f->dtype, in[0], in[1]);
    }
}

/* Elements gathered at a time where a line's are not adjacent. */
enum { GATHER = 1024 };

/* v_map over a row of the block, whatever its column strides: the output from `inputs` tensors, ACT_IN first. */
V_INLINE void map_row(int dtype, int inputs, const struct act_block *b, int64_t row,
                      vf (*f)(const vf in[], const void *env), const void *env) {
    const int64_t bytes = v_bytes(dtype), n = b->columns, out_step = b->column_stride[ACT_OUT];
    const int64_t *const step = &b->column_stride[ACT_IN];
    const void *in[2] = {row_at(dtype, b, ACT_IN, row), row_at(dtype, b, inputs > 1 ? ACT_DY : ACT_IN, row)};
    char *const out = row_at(dtype, b, ACT_OUT, row);
    if (n == 1 || (out_step == 1 && step[0] == 1 && (inputs == 1 || step[1] == 1))) {
        v_map(dtype, inputs, in, out, n, b->stream, f, env);
        return;
    }
    char buffer[3][GATHER * 4];
    for (int64_t i = 0; i < n; i += GATHER) {
        const int64_t part = smaller(n - i, GATHER);
        const void *gathered[2];
        for (int k = 0; k < inputs; k++)
            gathered[k] = v_gather(dtype, (const char *)in[k] + i * step[k] * bytes, step[k], part, buffer[k]);
        v_map(dtype, inputs, gathered, buffer[2], part, false, f, env);
        v_scatter(dtype, buffer[2], out + i * out_step * bytes, out_step, part);
    }
}

V_INLINE void map_as(int dtype, int kind, bool forth, const struct act_block *b) {
    const struct flavour flavour = {dtype, kind};
    for (int64_t row = 0; row < b->rows; row++)
        map_row(dtype, forth ? 1 : 2, b, row, forth ? forward : backward, &flavour);
}

V_INLINE vf identity(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

/* Copies bits, so that a NaN keeps its payload. */
V_INLINE void copy(int dtype, int from, const struct act_block *b) {
    const int64_t bytes = v_bytes(dtype), n = b->columns, step = b->column_stride[from];
    for (int64_t row = 0; row < b->rows; row++) {
        const char *const in = row_at(dtype, b, from, row);
        char *const out = row_at(dtype, b, ACT_OUT, row);
        if (step == 1 && b->column_stride[ACT_OUT] == 1) {
            const int64_t words = n * bytes / 4;
            v_map(RAFTER_F32, 1, (const void *const[]){in}, out, words, b->stream, identity, NULL);
            memcpy(out + words * 4, in + words * 4, (size_t)(n * bytes - words * 4));
        } else {
            char buffer[GATHER * 4];
            for (int64_t i = 0; i < n; i += GATHER) {
                const int64_t part = smaller(n - i, GATHER);
                v_scatter(dtype, v_gather(dtype, in + i * step * bytes, step, part, buffer),
                          out + i * b->column_stride[ACT_OUT] * bytes, b->column_stride[ACT_OUT], part);
            }
        }
    }
}

/* relu and its mask for n elements: 32, but for the end of the tensor. Forward takes x and writes the bits, backward
 * takes dy and reads them. */
V_INLINE void relu_step(int dtype, bool forth, const char *in, uint8_t *mask, char *out, int n, bool stream) {
    const int64_t step = V_LANES * v_bytes(dtype);
    uint32_t bits = 0;
    for (int i = 0; i < n && !forth; i += 8)
        bits |= (uint32_t)mask[i / 8] << i;
    vf result[32 / V_LANES];
    for (int k = 0; k * V_LANES < n; k++) {
        const int lanes = (int)smaller(n - k * V_LANES, V_LANES);
        const vf a = lanes == V_LANES ? v_load(dtype, in + k * step) : v_load_part(dtype, in + k * step, lanes, 0.0f);
        if (forth) {
            bits |= (uint32_t)v_bits(~(a <= v_set(0.0f))) << k * V_LANES;
            result[k] = v_relu(a);
        } else {
            result[k] = v_select(v_from_bits(bits >> k * V_LANES), a, v_set(0.0f));
        }
        if (lanes < V_LANES)
            v_store_part(dtype, out + k * step, result[k], lanes);
        else if (!stream)
            v_store(dtype, out + k * step, result[k]);
        else if (k % 2 == 1)
            v_stream2(dtype, out + (k - 1) * step, result[k - 1], result[k]);
    }
    for (int i = 0; i < n && forth; i += 8)
        mask[i / 8] = (uint8_t)(bits >> i);
}

V_INLINE void relu_masked(int dtype, bool forth, const struct act_block *b) {
    const char *in = b->data[forth ? ACT_IN : ACT_DY];
    char *out = b->data[ACT_OUT];
    uint8_t *mask = b->mask;
    const int64_t step = 32 * v_bytes(dtype);
    const bool stream = b->stream && (uintptr_t)out % V_STREAM == 0;
    int64_t n = b->columns;
    for (; n >= 32; n -= 32, in += step, out += step, mask += 4)
        if (stream)
            relu_step(dtype, forth, in, mask, out, 32, true);
        else
            relu_step(dtype, forth, in, mask, out, 32, false);
    relu_step(dtype, forth, in, mask, out, (int)n, false);
}

V_INLINE void map(bool forth, const struct act_block *b) {
    switch (b->kind) {
    case RAFTER_ACT_NONE: V_FOR_DTYPE(b->dtype, dtype, copy(dtype, forth ? ACT_IN : ACT_DY, b)) break;
    case RAFTER_ACT_RELU:
        if (b->mask)
            V_FOR_DTYPE(b->dtype, dtype, relu_masked(dtype, forth, b))
        else
            V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_RELU, forth, b))
        break;
    case RAFTER_ACT_SIGMOID: V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_SIGMOID, forth, b)) break;
    default: V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_SILU, forth, b)) break;
    }
}

static void map_forward(const struct act_block *b) {
    map(true, b);
}

static void map_backward(const struct act_block *b) {
    map(false, b);
}

/* ---- softmax --------------------------------------------------------------------------------- */

/*
 * Forward: y = e^(x - pivot) / sum of e^(x - pivot). Backward: dx = y (dy - sum of y dy).
 *
 * The pivot is the line's maximum. For 16 bits the line's first element is tried instead, which costs nothing to find:
 * the maximum is only needed where it is so far above that the sum leaves GUESS_LIMIT behind, or comes out NaN.
 *
 * Elements are taken in pairs of vectors (v_load_pair), whose lanes are in an order of their own. What is kept from one
 * pass to the next, exponentials or statistics of columns, is kept in that order, so all passes must pair alike: from
 * the same element on, with what is left over in single vectors.
 */

#define GUESS_LIMIT 0x1p64f

V_INLINE bool guesses(int dtype) {
    return dtype != RAFTER_F32; /* there, an error of (x - pivot) 1e-7 in an exponential would show */
}

V_INLINE bool guess_failed(float sum) {
    return !(sum <= GUESS_LIMIT);
}

/* -inf becomes the lowest number: -inf - pivot is then -inf, and anything more makes the sum fail. */
V_INLINE vf finite_pivot(vf pivot) {
    return v_max(pivot, v_set(-FLT_MAX));
}

V_INLINE vf load(int dtype, const void *p, int64_t lanes) {
    return lanes == V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, lanes, 0.0f);
}

V_INLINE void store(int dtype, void *p, vf a, int64_t lanes) {
    if (lanes == V_LANES)
        v_store(dtype, p, a);
    else
        v_store_part(dtype, p, a, lanes);
}

V_INLINE void store_pair(int dtype, void *p, vf a, vf b, bool stream) {
    if (stream)
        v_stream_pair(dtype, p, a, b);
    else
        v_store_pair(dtype, p, a, b);
}

/* ---- softmax along rows ---------------------------------------------------------------------- */

V_INLINE vf row_exponential(int dtype, const char *x, int64_t lanes, vf pivot) {
    return v_exp_from(v_load_part(dtype, x, lanes, -INFINITY), pivot);
}

/* Stores e^(x - pivot) as whole vectors: of the first `head` elements, of pairs, of the rest. Returns their sum. `even`
 * (a constant): there are only pairs. */
V_INLINE float row_exponentials(int dtype, bool even, const char *x, int64_t head, int64_t n, vf pivot, float *e) {
    const int64_t bytes = v_bytes(dtype);
    vf s0 = v_set(0.0f), s1 = s0, a, b;
    int64_t i = 0;
    for (int64_t lanes; !even && i < head; i += lanes, e += V_LANES) {
        lanes = smaller(head - i, V_LANES);
        s0 += a = row_exponential(dtype, x + i * bytes, lanes, pivot);
        v_store(RAFTER_F32, e, a);
    }
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES, e += 2 * V_LANES) {
        v_load_pair(dtype, x + i * bytes, &a, &b);
        s0 += a = v_exp_from(a, pivot);
        s1 += b = v_exp_from(b, pivot);
        v_store(RAFTER_F32, e, a);
        v_store(RAFTER_F32, e + V_LANES, b);
    }
    for (int64_t lanes; !even && i < n; i += lanes, e += V_LANES) {
        lanes = smaller(n - i, V_LANES);
        s0 += a = row_exponential(dtype, x + i * bytes, lanes, pivot);
        v_store(RAFTER_F32, e, a);
    }
    return v_sum(s0 + s1);
}

/* y = e * scale, e as row_exponentials left it. */
V_INLINE void row_scaled(int dtype, bool even, const float *e, int64_t head, int64_t n, vf scale, char *y,
                         bool stream) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
    for (int64_t lanes; !even && i < head; i += lanes, e += V_LANES) {
        lanes = smaller(head - i, V_LANES);
        v_store_part(dtype, y + i * bytes, v_load(RAFTER_F32, e) * scale, lanes);
    }
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES, e += 2 * V_LANES)
        store_pair(dtype, y + i * bytes, v_load(RAFTER_F32, e) * scale, v_load(RAFTER_F32, e + V_LANES) * scale,
                   stream);
    for (int64_t lanes; !even && i < n; i += lanes, e += V_LANES) {
        lanes = smaller(n - i, V_LANES);
        v_store_part(dtype, y + i * bytes, v_load(RAFTER_F32, e) * scale, lanes);
    }
}

/* Elements before the first aligned line of y, where pairs begin if they are streamed. */
V_INLINE int64_t head_of(int dtype, const char *y, int64_t n, bool stream) {
    return stream ? smaller(n, (int64_t)(-(uintptr_t)y % V_STREAM) / v_bytes(dtype)) : 0;
}

/* Exponentials are computed once and held between their sum and the scaling. Each pass runs over all rows of the block,
 * so that the reductions at the ends of short rows overlap. */
V_INLINE void short_rows_as(int dtype, bool even, const struct act_block *b) {
    _Alignas(64) float e[ACT_SHORT];
    float sum[ACT_MOST_LINES];
    const int64_t n = b->columns, pitch = n + ACT_SHORT_MARGIN;
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r);
        const int64_t head = head_of(dtype, row_at(dtype, b, ACT_OUT, r), n, b->stream);
        vf pivot = finite_pivot(v_set(guesses(dtype) ? v_get(dtype, x) : v_max_row(dtype, x, n)));
        sum[r] = row_exponentials(dtype, even, x, head, n, pivot, e + r * pitch);
        if (guesses(dtype) && guess_failed(sum[r])) {
            pivot = finite_pivot(v_set(v_max_row(dtype, x, n)));
            sum[r] = row_exponentials(dtype, even, x, head, n, pivot, e + r * pitch);
        }
    }
    for (int64_t r = 0; r < b->rows; r++) {
        char *const y = row_at(dtype, b, ACT_OUT, r);
        const vf scale = v_set(1.0f / sum[r]);
        if (b->stream)
            row_scaled(dtype, even, e + r * pitch, head_of(dtype, y, n, true), n, scale, y, true);
        else
            row_scaled(dtype, even, e + r * pitch, 0, n, scale, y, false);
    }
}

static void short_rows(const struct act_block *b) {
    const bool aligned =
        (uintptr_t)b->data[ACT_OUT] % V_STREAM == 0 && b->row_stride[ACT_OUT] * v_bytes((int)b->dtype) % V_STREAM == 0;
    if (b->columns % (2 * V_LANES) == 0 && (aligned || !b->stream))
        V_FOR_DTYPE(b->dtype, dtype, short_rows_as(dtype, true, b))
    else
        V_FOR_DTYPE(b->dtype, dtype, short_rows_as(dtype, false, b))
}

V_INLINE void rows_forward_statistics(int dtype, const struct act_block *b, float *statistics) {
    const int64_t step = b->column_stride[ACT_IN], block = step == 1 ? b->columns : GATHER;
    char buffer[GATHER * 4];
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r);
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t i = 0; i < b->columns; i += block) {
            const int64_t part = smaller(b->columns - i, block);
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
        map_row(dtype, 1, b, r, normalised, &n);
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
        const int64_t lanes = smaller(n, V_LANES);
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
            const int64_t part = smaller(b->columns - i, block);
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
        map_row(dtype, 2, b, r, projected, &env);
    }
}

/* ---- softmax along columns ------------------------------------------------------------------- */

enum {
    FOLD = 8,  /* rows that are summed before they are added to the columns' sums: FOLD + n / FOLD roundings */
    PAIRS = 4, /* pairs of vectors across columns whose sums are in registers meanwhile, so that memory is read straight
                  on for at least that long */
    AHEAD = 16, /* rows ahead that memory is asked for */
};

/* The maxima of the columns over the first `rows` rows. */
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
            lanes = smaller(n - i, V_LANES);
            const vf a = load(dtype, x + i * bytes, lanes);
            store(RAFTER_F32, max + i, v_max(a, load(RAFTER_F32, max + i, lanes)), lanes);
        }
    }
}

/* Forward sums e^(x - pivot), backward y dy; `by` is the pivot or dy. */
V_INLINE vf add_term(bool forth, vf sum, vf in, vf by) {
    return forth ? sum + v_exp_from(in, by) : v_fma(in, by, sum);
}

/* Adds `rows` rows to the sums of the columns that `pairs` pairs of vectors hold. */
V_INLINE void fold_pairs(int dtype, bool forth, int pairs, const struct act_block *b, int64_t row, int rows,
                         int64_t column, const float *pivot, float *sum) {
    const int64_t bytes = v_bytes(dtype), step = 2 * V_LANES * bytes;
    const int64_t in_pitch = b->row_stride[ACT_IN] * bytes, dy_pitch = forth ? 0 : b->row_stride[ACT_DY] * bytes;
    const char *in = row_at(dtype, b, ACT_IN, row) + column * bytes;
    const char *dy = forth ? NULL : row_at(dtype, b, ACT_DY, row) + column * bytes;
    vf s[2 * PAIRS], by[2 * PAIRS];
    for (int k = 0; k < 2 * pairs; k++) {
        s[k] = v_set(0.0f);
        by[k] = forth ? finite_pivot(v_load(RAFTER_F32, pivot + column + k * V_LANES)) : s[k];
    }
    for (int r = 0; r < rows; r++, in += in_pitch, dy += dy_pitch)
        for (int k = 0; k < 2 * pairs; k += 2) {
            vf in0, in1;
            __builtin_prefetch(in + AHEAD * in_pitch + k / 2 * step);
            v_load_pair(dtype, in + k / 2 * step, &in0, &in1);
            if (!forth) {
                __builtin_prefetch(dy + AHEAD * dy_pitch + k / 2 * step);
                v_load_pair(dtype, dy + k / 2 * step, &by[k], &by[k + 1]);
            }
            s[k] = add_term(forth, s[k], in0, by[k]);
            s[k + 1] = add_term(forth, s[k + 1], in1, by[k + 1]);
        }
    for (int k = 0; k < 2 * pairs; k++)
        v_store(RAFTER_F32, sum + column + k * V_LANES, v_load(RAFTER_F32, sum + column + k * V_LANES) + s[k]);
}

V_INLINE void fold(int dtype, bool forth, const struct act_block *b, int64_t row, int rows, const float *pivot,
                   float *sum) {
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    int64_t i = 0;
    for (; i + PAIRS * 2 * V_LANES <= n; i += PAIRS * 2 * V_LANES)
        fold_pairs(dtype, forth, PAIRS, b, row, rows, i, pivot, sum);
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES)
        fold_pairs(dtype, forth, 1, b, row, rows, i, pivot, sum);
    for (int64_t lanes; i < n; i += lanes) {
        lanes = smaller(n - i, V_LANES);
        vf s = v_set(0.0f), by = forth ? finite_pivot(load(RAFTER_F32, pivot + i, lanes)) : s;
        for (int r = 0; r < rows; r++) {
            if (!forth)
                by = load(dtype, row_at(dtype, b, ACT_DY, row + r) + i * bytes, lanes);
            s = add_term(forth, s, load(dtype, row_at(dtype, b, ACT_IN, row + r) + i * bytes, lanes), by);
        }
        store(RAFTER_F32, sum + i, load(RAFTER_F32, sum + i, lanes) + s, lanes);
    }
}

V_INLINE void columns_sum(int dtype, bool forth, const struct act_block *b, const float *pivot, float *sum) {
    for (int64_t i = 0; i < b->columns; i++)
        sum[i] = 0.0f;
    int64_t r = 0;
    for (; r + FOLD <= b->rows; r += FOLD)
        fold(dtype, forth, b, r, FOLD, pivot, sum);
    for (; r < b->rows; r++)
        fold(dtype, forth, b, r, 1, pivot, sum);
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

V_INLINE void normalise_row(int dtype, const char *x, const float *pivot, const float *scale, int64_t n, char *y,
                            bool stream) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        vf x0, x1;
        v_load_pair(dtype, x + i * bytes, &x0, &x1);
        x0 = v_exp_from(x0, v_load(RAFTER_F32, pivot + i)) * v_load(RAFTER_F32, scale + i);
        x1 = v_exp_from(x1, v_load(RAFTER_F32, pivot + i + V_LANES)) * v_load(RAFTER_F32, scale + i + V_LANES);
        store_pair(dtype, y + i * bytes, x0, x1, stream);
    }
    for (int64_t lanes; i < n; i += lanes) {
        lanes = smaller(n - i, V_LANES);
        const vf e = v_exp_from(load(dtype, x + i * bytes, lanes), load(RAFTER_F32, pivot + i, lanes));
        store(dtype, y + i * bytes, e * load(RAFTER_F32, scale + i, lanes), lanes);
    }
}

V_INLINE void columns_forward_apply(int dtype, const struct act_block *b, const float *statistics) {
    float pivot[ACT_MOST_LINES], scale[ACT_MOST_LINES];
    for (int64_t i = 0; i < b->columns; i++) {
        pivot[i] = v_pivot(statistics[i]);
        scale[i] = 1.0f / statistics[b->columns + i];
    }
    for (int64_t r = b->rows - 1; r >= 0; r--) { /* the last that were read come first: they may still be in L2 */
        const char *const x = row_at(dtype, b, ACT_IN, r);
        char *const y = row_at(dtype, b, ACT_OUT, r);
        if (b->stream && (uintptr_t)y % V_STREAM == 0)
            normalise_row(dtype, x, pivot, scale, b->columns, y, true);
        else
            normalise_row(dtype, x, pivot, scale, b->columns, y, false);
    }
}

V_INLINE void columns_backward_statistics(int dtype, const struct act_block *b, float *sum) {
    columns_sum(dtype, false, b, NULL, sum);
}

V_INLINE void project_row(int dtype, const char *y, const char *dy, const float *sum, int64_t n, char *dx,
                          bool stream) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
    for (; i + 2 * V_LANES <= n; i += 2 * V_LANES) {
        vf y0, y1, dy0, dy1;
        v_load_pair(dtype, y + i * bytes, &y0, &y1);
        v_load_pair(dtype, dy + i * bytes, &dy0, &dy1);
        store_pair(dtype, dx + i * bytes, y0 * (dy0 - v_load(RAFTER_F32, sum + i)),
                   y1 * (dy1 - v_load(RAFTER_F32, sum + i + V_LANES)), stream);
    }
    for (int64_t lanes; i < n; i += lanes) {
        lanes = smaller(n - i, V_LANES);
        const vf centred = load(dtype, dy + i * bytes, lanes) - load(RAFTER_F32, sum + i, lanes);
        store(dtype, dx + i * bytes, load(dtype, y + i * bytes, lanes) * centred, lanes);
    }
}

V_INLINE void columns_backward_apply(int dtype, const struct act_block *b, const float *sum) {
    for (int64_t r = b->rows - 1; r >= 0; r--) { /* as above */
        const char *const y = row_at(dtype, b, ACT_IN, r), *const dy = row_at(dtype, b, ACT_DY, r);
        char *const dx = row_at(dtype, b, ACT_OUT, r);
        if (b->stream && (uintptr_t)dx % V_STREAM == 0)
            project_row(dtype, y, dy, sum, b->columns, dx, true);
        else
            project_row(dtype, y, dy, sum, b->columns, dx, false);
    }
}

/* ---- parts of lines -------------------------------------------------------------------------- */

static void merge_forward(float *statistics, int64_t lines, int64_t parts) {
    for (int64_t i = 0; i < lines; i++) {
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t part = 0; part < parts; part++) {
            const float *const p = statistics + part * ACT_STATISTICS * lines;
            s = v_stats_merge(s, (struct v_stats){p[i], p[lines + i]});
        }
        statistics[i] = s.max;
        statistics[lines + i] = s.sum;
    }
}

static void merge_backward(float *sum, int64_t lines, int64_t parts) {
    for (int64_t part = 1; part < parts; part++)
        for (int64_t i = 0; i < lines; i++)
            sum[i] += sum[part * ACT_STATISTICS * lines + i];
}

/* ---- the table ------------------------------------------------------------------------------- */

#define SOFTMAX(form_direction)                                                                                        \
    static void form_direction##_statistics_any(const struct act_block *b, float *statistics) {                        \
        V_FOR_DTYPE(b->dtype, dtype, form_direction##_statistics(dtype, b, statistics))                                \
    }                                                                                                                  \
    static void form_direction##_apply_any(const struct act_block *b, const float *statistics) {                       \
        V_FOR_DTYPE(b->dtype, dtype, form_direction##_apply(dtype, b, statistics))                                     \
    }

SOFTMAX(rows_forward)
SOFTMAX(rows_backward)
SOFTMAX(columns_forward)
SOFTMAX(columns_backward)

extern const struct act_kernels RAFTER_KERNELS(act);
const struct act_kernels RAFTER_KERNELS(act) = {
    .map = {map_forward, map_backward},
    .short_rows = short_rows,
    .statistics = {{rows_forward_statistics_any, rows_backward_statistics_any},
                   {columns_forward_statistics_any, columns_backward_statistics_any}},
    .apply = {{rows_forward_apply_any, rows_backward_apply_any},
              {columns_forward_apply_any, columns_backward_apply_any}},
    .merge = {merge_forward, merge_backward},
};
