/* SPDX-License-Identifier: Apache-2.0 */
/* lrpe_cosine in fp64, from its definition, one row or column of x at a time. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "harness/oracle.h"

/* Sine and cosine of the exact product position * theta. The position is cut into pieces of 24
 * bits, each product is a sum of two doubles, and angle addition formulas combine them. libm
 * reduces a double of any size exactly. */
static void sincos_of_product(double theta, int64_t position, double *sine, double *cosine) {
    const uint64_t magnitude = position < 0 ? 0 - (uint64_t)position : (uint64_t)position;
    double s = 0, c = 1;
    for (int piece = 0; piece < 3; piece++) {
        const double factor = ldexp((double)(magnitude >> (24 * piece) & 0xffffff), 24 * piece);
        const double product = theta * (position < 0 ? -factor : factor);
        const double rest = fma(theta, position < 0 ? -factor : factor, -product);
        const double angles[] = {product, rest};
        for (int i = 0; i < 2; i++) {
            const double s1 = sin(angles[i]), c1 = cos(angles[i]), sum = s * c1 + c * s1;
            c = c * c1 - s * s1;
            s = sum;
        }
    }
    *sine = s;
    *cosine = c;
}

/* Activations and their derivatives, with PyTorch's results at infinities and NaN. */
static double act(rafter_act_kind kind, double x) {
    switch (kind) {
    case RAFTER_ACT_RELU: return x <= 0 ? 0 : x;
    case RAFTER_ACT_SIGMOID: return 1 / (1 + exp(-x));
    case RAFTER_ACT_SILU: return x * (1 / (1 + exp(-x)));
    default: return x;
    }
}

static double act_gradient(rafter_act_kind kind, double x, double g) {
    const double s = 1 / (1 + exp(-x)), not_s = 1 / (1 + exp(x));
    switch (kind) {
    case RAFTER_ACT_RELU: return x <= 0 ? 0 : g;
    case RAFTER_ACT_SIGMOID: return g * (s * not_s);
    case RAFTER_ACT_SILU: return g * (s * (1 + x * not_s));
    default: return g;
    }
}

void oracle_lrpe_cosine(problem *p, enum problem_mode mode) {
    const struct problem_options *const options = &p->options;
    problem_tensor *x = problem_find(p, "x"), *theta = problem_find(p, "theta"),
                   *positions = problem_find(p, "positions");
    problem_tensor *y = problem_find(p, "y"), *dy = problem_find(p, "dy");
    problem_tensor *dx = problem_find(p, "dx"), *dtheta = problem_find(p, "dtheta");
    const int64_t B = x->shape[0], N = x->shape[1], H = x->ndim == 4 ? x->shape[2] : 1, D = x->shape[x->ndim - 1];
    const bool softmax = options->act == RAFTER_ACT_SOFTMAX,
               sequence = softmax && options->softmax_over == RAFTER_OVER_SEQUENCE;
    const bool backward = mode == PROBLEM_BACKWARD;

    /* A line is a softmax: a column over the sequence, or a row of a head's features. */
    const int64_t length = sequence ? N : D, lines = sequence ? B * H * D : B * N * H;
    double *const dtheta_sums = dtheta && backward ? calloc((size_t)(theta->numel + 1), sizeof(double)) : NULL;
    if (dtheta && backward && !dtheta_sums)
        abort();
#pragma omp parallel
    {
        double *const f = malloc(4 * sizeof(double) * (size_t)(length + 1));
        double *const g = f + length, *const sine = g + length, *const cosine = sine + length;
        double *const sums = calloc((size_t)(theta->numel + 1), sizeof(double));
        if (!f || !sums)
            abort();
#pragma omp for schedule(static)
        for (int64_t line = 0; line < lines; line += p->sample) {
            double max = -INFINITY, sum = 0, dot = 0;
            for (int pass = 0; pass < 2; pass++)
                for (int64_t i = 0; i < length; i++) {
                    const int64_t b = sequence ? line / (H * D) : line / (N * H);
                    const int64_t n = sequence ? i : line / H % N;
                    const int64_t h = sequence ? line / D % H : line % H;
                    const int64_t d = sequence ? line % D : i;
                    const int64_t at = ((b * N + n) * H + h) * D + d, twice = ((b * N + n) * H + h) * 2 * D + d;
                    const int64_t theta_at =
                        (theta->shape[0] == 1 ? 0 : h) * theta->shape[1] + (theta->shape[1] == 1 ? 0 : d);
                    int64_t position = options->offset + n;
                    if (positions)
                        position = (int64_t)problem_value(positions, positions->ndim == 2 ? b * N + n : n);
                    const double value = problem_value(x, at);
                    if (pass ==
                        0) { /* f(x) (for softmax the exponent), the angle, and the gradient with respect to f(x) */
                        f[i] = softmax ? value : act(options->act, value);
                        max = fmax(max, value);
                        sincos_of_product(problem_value(theta, theta_at), position, &sine[i], &cosine[i]);
                        if (backward)
                            g[i] = problem_value(dy, twice) * cosine[i] + problem_value(dy, twice + D) * sine[i];
                        continue;
                    }
                    if (softmax && i == 0) {
                        for (int64_t k = 0; k < length; k++) {
                            f[k] = exp(f[k] - (max == -INFINITY ? 0 : max));
                            sum += f[k];
                        }
                        for (int64_t k = 0; k < length; k++) {
                            f[k] /= sum;
                            dot += backward ? f[k] * g[k] : 0;
                        }
                    }
                    if (!backward) {
                        problem_expect(y, twice, f[i] * cosine[i]);
                        problem_expect(y, twice + D, f[i] * sine[i]);
                        continue;
                    }
                    if (dx)
                        problem_expect(dx, at, softmax ? f[i] * (g[i] - dot) : act_gradient(options->act, value, g[i]));
                    sums[theta_at] += (double)position * f[i] *
                                      (problem_value(dy, twice + D) * cosine[i] - problem_value(dy, twice) * sine[i]);
                }
        }
#pragma omp critical
        for (int64_t i = 0; dtheta_sums && i < theta->numel; i++)
            dtheta_sums[i] += sums[i];
        free(f);
        free(sums);
    }
    for (int64_t i = 0; dtheta_sums && i < theta->numel && p->sample == 1; i++)
        problem_expect(dtheta, i, dtheta_sums[i]);
    free(dtheta_sums);
}
