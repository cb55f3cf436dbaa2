/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise activations and their gradients, accurate enough to be rounded to T. Infinities
 * and NaN give the results of PyTorch: silu(-inf) is NaN (-inf times 0), and the gradients of silu
 * at both infinities are NaN too.
 *
 * In kernels that are specialised for a kind, `kind` is a compile-time constant, and the compiler
 * removes the branches.
 */
#ifndef RAFTER_CUDA_ACTIVATIONS_CUH
#define RAFTER_CUDA_ACTIVATIONS_CUH

#include "cuda/primitives.cuh"
#include "rafter/rafter.h"

/* With e = e^-|x| and r = 1 / (1 + e): sigmoid(|x|) = r and sigmoid(-|x|) = e r. Neither overflows
 * or cancels. */
template <typename T> struct Logistic {
    float e, r;
    DEVICE explicit Logistic(float x) : e(exp_as<T>(-fabsf(x))), r(reciprocal_fast(1.0f + e)) {
    }
};

template <typename T> DEVICE float act_forward(rafter_act_kind kind, float x) {
    if (kind == RAFTER_ACT_NONE)
        return x;
    if (kind == RAFTER_ACT_RELU)
        return x <= 0.0f ? 0.0f : x; /* NaN stays NaN */
    const Logistic<T> s(x);
    const float sigmoid = x < 0.0f ? s.e * s.r : s.r;
    return kind == RAFTER_ACT_SIGMOID ? sigmoid : x * sigmoid;
}

/* df/dx of sigmoid or silu. */
template <typename T> DEVICE float act_slope(rafter_act_kind kind, float x) {
    const Logistic<T> s(x);
    if (kind == RAFTER_ACT_SIGMOID)
        return s.e * s.r * s.r;
    /* sigmoid (1 + x (1 - sigmoid)). Near its root, x = -1.28, 1 + x and the sum with e are exact, so no digits are
     * lost. */
    return s.r * s.r * (x < 0.0f ? s.e * (1.0f + x + s.e) : fmaf(x, s.e, 1.0f + s.e));
}

template <typename T> DEVICE float act_backward(rafter_act_kind kind, float x, float dy) {
    if (kind == RAFTER_ACT_NONE)
        return dy;
    if (kind == RAFTER_ACT_RELU)
        return x <= 0.0f ? 0.0f : dy; /* 0 for any dy, even NaN; dy if x is NaN */
    return dy * act_slope<T>(kind, x);
}

#endif
