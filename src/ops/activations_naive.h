/* SPDX-License-Identifier: Apache-2.0 */
/* Activations and softmax of the naive act and lrpe_cosine. */
#ifndef RAFTER_OPS_ACTIVATIONS_NAIVE_H
#define RAFTER_OPS_ACTIVATIONS_NAIVE_H

#include "harness/naive.h"

/* ---- pointwise ------------------------------------------------------------------------------- */

static void naive_relu(float *y, const float *x, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] > 0 ? x[i] : 0;
}

static void naive_relu_backward(float *dx, const float *dy, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dx[i] = x[i] > 0 ? dy[i] : 0;
}

static void naive_sigmoid(float *y, const float *x, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        y[i] = 1 / (1 + expf(-x[i]));
}

static void naive_sigmoid_backward(float *dx, const float *dy, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dx[i] = dy[i] * y[i] * (1 - y[i]);
}

static void naive_silu(float *y, const float *x, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] / (1 + expf(-x[i]));
}

static void naive_silu_backward(float *dx, const float *dy, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float s = 1 / (1 + expf(-x[i]));
        dx[i] = dy[i] * s * (1 + x[i] * (1 - s));
    }
}

struct naive_activation {
    rafter_act_kind kind;
    void (*forward)(float *y, const float *x, const float *unused, int64_t n);
    const char *kept; /* the tensor that backward reads besides dy */
    void (*backward)(float *dx, const float *dy, const float *kept, int64_t n);
};

/* The pointwise activation of the problem; NULL for none and softmax. */
static inline const struct naive_activation *naive_activation(const problem *p) {
    static const struct naive_activation all[] = {{RAFTER_ACT_RELU, naive_relu, "x", naive_relu_backward},
                                                  {RAFTER_ACT_SIGMOID, naive_sigmoid, "y", naive_sigmoid_backward},
                                                  {RAFTER_ACT_SILU, naive_silu, "x", naive_silu_backward}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (p->options.act == all[i].kind)
            return &all[i];
    return NULL;
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* A tensor as [outer, length, inner], with softmax over the middle. */
struct naive_softmax_shape {
    int64_t outer, length, inner;
};

static inline struct naive_softmax_shape naive_softmax_shape(int ndim, const int64_t *shape, int dim) {
    struct naive_softmax_shape s = {1, 1, 1};
    for (int d = 0; d < ndim; d++)
        *(d < dim ? &s.outer : d == dim ? &s.length : &s.inner) *= shape[d];
    return s;
}

/* Columns that are processed together. Softmax over the last dimension takes one row at a time. */
enum { NAIVE_COLUMNS = 128 };

/* Three passes: the maximum; the exponentials, stored, and their sum; the division. */
static inline void naive_softmax_row(struct naive_array y, struct naive_array x, int64_t from, int64_t length) {
    const float largest = naive_row_max(x, from, length);
    float v[NAIVE_BLOCK], sum = 0;
    for (int64_t i = 0; i < length; i += NAIVE_BLOCK) {
        const int64_t size = min64(length - i, NAIVE_BLOCK);
        naive_load(v, x.dtype, x.data, from + i, size);
        for (int64_t k = 0; k < size; k++) {
            v[k] = expf(v[k] - largest);
            sum += v[k];
        }
        naive_store(y.dtype, y.data, from + i, v, size);
    }
    naive_row_linear(y, y, from, length, 1 / sum, 0);
}

/* The same passes over `columns` neighbouring columns, with stride `inner`. */
static inline void naive_softmax_columns(rafter_dtype dtype, void *y, const void *x, int64_t from, int64_t length,
                                         int64_t inner, int64_t columns) {
    float v[NAIVE_COLUMNS], largest[NAIVE_COLUMNS], sum[NAIVE_COLUMNS];
    for (int64_t k = 0; k < columns; k++)
        largest[k] = -INFINITY, sum[k] = 0;
    for (int64_t i = 0; i < length; i++) {
        naive_load(v, dtype, x, from + i * inner, columns);
        for (int64_t k = 0; k < columns; k++)
            largest[k] = v[k] > largest[k] ? v[k] : largest[k];
    }
    for (int64_t i = 0; i < length; i++) {
        naive_load(v, dtype, x, from + i * inner, columns);
        for (int64_t k = 0; k < columns; k++) {
            v[k] = expf(v[k] - largest[k]);
            sum[k] += v[k];
        }
        naive_store(dtype, y, from + i * inner, v, columns);
    }
    for (int64_t i = 0; i < length; i++) {
        naive_load(v, dtype, y, from + i * inner, columns);
        for (int64_t k = 0; k < columns; k++)
            v[k] /= sum[k];
        naive_store(dtype, y, from + i * inner, v, columns);
    }
}

static inline void naive_softmax(const struct naive *n, struct naive_softmax_shape s, struct naive_array y,
                                 struct naive_array x) {
    const int64_t groups = ceil_div(s.inner, NAIVE_COLUMNS);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t task = 0; task < s.outer * groups; task++) {
        const int64_t outer = task / groups, column = task % groups * NAIVE_COLUMNS;
        const int64_t from = outer * s.length * s.inner + column, left = s.inner - column;
        if (s.inner == 1)
            naive_softmax_row(y, x, from, s.length);
        else
            naive_softmax_columns(x.dtype, y.data, x.data, from, s.length, s.inner, min64(left, NAIVE_COLUMNS));
    }
}

/* dx = y (dy - sum(y dy)): two passes. */
static inline void naive_softmax_backward(const struct naive *n, struct naive_softmax_shape s, struct naive_array dx,
                                          struct naive_array dy, struct naive_array y) {
    const int64_t groups = ceil_div(s.inner, NAIVE_COLUMNS);
    const int64_t block = s.inner == 1 ? NAIVE_BLOCK : 1; /* steps that are loaded together */
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t task = 0; task < s.outer * groups; task++) {
        const int64_t outer = task / groups, column = task % groups * NAIVE_COLUMNS;
        const int64_t from = outer * s.length * s.inner + column, left = s.inner - column;
        const int64_t columns = min64(left, NAIVE_COLUMNS);
        float v[NAIVE_BLOCK], g[NAIVE_BLOCK], sum[NAIVE_COLUMNS] = {0};
        for (int64_t i = 0; i < s.length; i += block) {
            const int64_t size = block == 1 ? columns : min64(s.length - i, block);
            naive_load(v, y.dtype, y.data, from + i * s.inner, size);
            naive_load(g, dy.dtype, dy.data, from + i * s.inner, size);
            if (block == 1)
                for (int64_t k = 0; k < size; k++)
                    sum[k] += v[k] * g[k];
            else
                for (int64_t k = 0; k < size; k++)
                    sum[0] += v[k] * g[k];
        }
        for (int64_t i = 0; i < s.length; i += block) {
            const int64_t size = block == 1 ? columns : min64(s.length - i, block);
            naive_load(v, y.dtype, y.data, from + i * s.inner, size);
            naive_load(g, dy.dtype, dy.data, from + i * s.inner, size);
            for (int64_t k = 0; k < size; k++)
                v[k] *= g[k] - sum[block == 1 ? k : 0];
            naive_store(dx.dtype, dx.data, from + i * s.inner, v, size);
        }
    }
}

#endif
