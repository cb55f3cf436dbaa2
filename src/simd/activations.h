/*
 * The elementwise activations and their gradients, to a few units in the last place of fp32. Infinities and NaN come
 * out as in PyTorch: silu(-inf) is NaN (-inf times 0), and so are the gradients of silu at both infinities.
 */
#ifndef RAFTER_SIMD_ACTIVATIONS_H
#define RAFTER_SIMD_ACTIVATIONS_H

#include "simd/simd.h"

/* 1 / a for a in [1, 2] (or NaN), to one unit in the last place. */
V_INLINE vf v_reciprocal_1_2(vf a) {
#if V_LANES == 16
    const vf estimate = (vf)_mm512_rcp14_ps((__m512)a);
    return v_fma(estimate, v_fma(-a, estimate, v_set(1.0f)), estimate);
#else
    return v_set(1.0f) / a;
#endif
}

/* The sigmoid of x and of -x, each accurate however small: with e = exp(-|x|) they are 1 / (1 + e) and e / (1 + e). */
struct v_logistic {
    vf of_x, of_minus_x;
};

V_INLINE struct v_logistic v_logistic(vf x) {
    const vf e = v_exp((vf)((vi)x | (vi)((vu){0} + 0x80000000u)));
    const vf large = v_reciprocal_1_2(v_set(1.0f) + e), small = e * large;
    const vi negative = (vi)x < 0; /* by the sign bit, so that NaN takes a side too: both are NaN */
    return (struct v_logistic){v_select(negative, small, large), v_select(negative, large, small)};
}

V_INLINE vf v_relu(vf x) {
    return v_max(v_set(0.0f), x);
}

V_INLINE vf v_sigmoid(vf x) {
    return v_logistic(x).of_x;
}

V_INLINE vf v_silu(vf x) {
    return x * v_logistic(x).of_x;
}

/* Gradients: dx from x and dy. */

/* 0 where x is 0 or less, whatever dy is; NaN lets dy through. */
V_INLINE vf v_relu_grad(vf x, vf dy) {
    return v_select(x <= v_set(0.0f), v_set(0.0f), dy);
}

V_INLINE vf v_sigmoid_grad(vf x, vf dy) {
    const struct v_logistic s = v_logistic(x);
    return dy * (s.of_x * s.of_minus_x);
}

V_INLINE vf v_silu_grad(vf x, vf dy) {
    const struct v_logistic s = v_logistic(x);
    return dy * (s.of_x * v_fma(x, s.of_minus_x, v_set(1.0f)));
}

#endif
