/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act in fp64, from the definitions:
 *     relu      x if x > 0, NaN if NaN, else 0;      dx = dy unless x <= 0: dy at NaN, as in PyTorch
 *     sigmoid   s(x) = 1 / (1 + e^-x);               dx = dy s(x) s(-x)
 *     silu      x s(x): NaN at -inf, as in PyTorch;  dx = dy s(x) (1 + x s(-x)), NaN at +-inf
 *     softmax   e^(x - m) / sum of e^(x - m), with m the maximum;  dx = y (dy - sum of y dy)
 * A softmax line that is all -inf, or holds +inf or NaN, is all NaN: m is infinite, and inf - inf
 * is NaN.
 */
#include <math.h>

#include "harness/oracle.h"

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static double forward(rafter_act_kind kind, double x) {
    switch (kind) {
    case RAFTER_ACT_RELU: return x <= 0 ? 0 : x;
    case RAFTER_ACT_SIGMOID: return sigmoid(x);
    case RAFTER_ACT_SILU: return x * sigmoid(x);
    default: return x;
    }
}

static double backward(rafter_act_kind kind, double x, double dy) {
    switch (kind) {
    case RAFTER_ACT_RELU: return x <= 0 ? 0 : dy;
    case RAFTER_ACT_SIGMOID: return dy * sigmoid(x) * sigmoid(-x); /* 1 - s(x) is s(-x), without the cancellation */
    case RAFTER_ACT_SILU: return dy * sigmoid(x) * (1 + x * sigmoid(-x));
    default: return dy;
    }
}

static void elementwise(problem *p, enum problem_mode mode) {
    const rafter_act_kind kind = p->options.act;
    problem_tensor *x = problem_find(p, "x"), *y = problem_find(p, "y"), *dy = problem_find(p, "dy"),
                   *dx = problem_find(p, "dx"), *mask = problem_find(p, "relu_mask");
    const int64_t n = x->numel, samples = (n + p->sample - 1) / p->sample;
#pragma omp parallel for if (x->numel > 100000)
    for (int64_t k = 0; k < samples; k++) {
        const int64_t i = k * p->sample;
        if (mode == PROBLEM_FORWARD)
            problem_expect(y, i, forward(kind, problem_value(x, i)));
        else if (dx)
            problem_expect(dx, i, backward(kind, problem_value(x, i), problem_value(dy, i)));
    }
    const int64_t bytes = mask && mode == PROBLEM_FORWARD ? (mask->numel + p->sample - 1) / p->sample : 0;
#pragma omp parallel for if (x->numel > 100000)
    for (int64_t k = 0; k < bytes; k++) {
        const int64_t byte = k * p->sample;
        int bits = 0;
        for (int64_t i = 8 * byte; i < 8 * byte + 8 && i < n; i++)
            if (!(problem_value(x, i) <= 0))
                bits |= 1 << i % 8;
        problem_expect(mask, byte, bits);
    }
}

static void softmax_line(problem *p, enum problem_mode mode, int64_t first, int64_t step, int64_t length) {
    problem_tensor *x = problem_find(p, "x"), *y = problem_find(p, "y"), *dy = problem_find(p, "dy"),
                   *dx = problem_find(p, "dx");
    if (mode == PROBLEM_FORWARD) {
        double max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < length; i++)
            max = fmax(max, problem_value(x, first + i * step));
        for (int64_t i = 0; i < length; i++)
            sum += exp(problem_value(x, first + i * step) - max);
        for (int64_t i = 0; i < length; i++)
            problem_expect(y, first + i * step, exp(problem_value(x, first + i * step) - max) / sum);
    } else if (dx) {
        double sum = 0;
        for (int64_t i = 0; i < length; i++)
            sum += problem_value(y, first + i * step) * problem_value(dy, first + i * step);
        for (int64_t i = 0; i < length; i++)
            problem_expect(dx, first + i * step,
                           problem_value(y, first + i * step) * (problem_value(dy, first + i * step) - sum));
    }
}

static void softmax(problem *p, enum problem_mode mode) {
    const problem_tensor *x = problem_find(p, "x");
    const int dim = problem_dim(p, x->ndim);
    int64_t length = x->ndim > 0 ? x->shape[dim] : 1, inner = 1;
    for (int d = dim + 1; d < x->ndim; d++)
        inner *= x->shape[d];
    const int64_t lines = x->numel > 0 ? x->numel / length : 0, samples = (lines + p->sample - 1) / p->sample;
#pragma omp parallel for if (x->numel > 100000)
    for (int64_t k = 0; k < samples; k++) {
        const int64_t line = k * p->sample;
        softmax_line(p, mode, line / inner * length * inner + line % inner, inner, length);
    }
}

void oracle_act(problem *p, enum problem_mode mode) {
    if (p->options.act == RAFTER_ACT_SOFTMAX)
        softmax(p, mode);
    else
        elementwise(p, mode);
}
