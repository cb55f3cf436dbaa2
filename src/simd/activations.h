/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise activations and their gradients, accurate to a few units in the last place of
 * fp32. Infinities and NaN give what PyTorch gives: silu(-inf) is NaN (-inf times 0), and so are
 * the gradients of silu at both infinities.
 */
#ifndef RAFTER_SIMD_ACTIVATIONS_H
#define RAFTER_SIMD_ACTIVATIONS_H

#include "simd/simd.h"

/* With e = exp(-|x|), which never overflows, sigmoid(x) is 1 / (1 + e) for positive x and e / (1 +
 * e) for negative x; sigmoid(-x) is the other of the two. Both quotients keep full relative
 * accuracy when they are small. */
struct v_logistic {
    vf of_x, of_minus_x; /* numerators of sigmoid(x) and sigmoid(-x): 1 and e, or e and 1 */
    vf e, divisor;
};

/* `dtype` is the dtype of the result. For 16 bits the cheaper exponential is accurate enough: its
 * relative error is at most 2e-5, where e is 1e-45. */
V_INLINE struct v_logistic v_logistic(int dtype, vf x) {
    const vf magnitude = (vf)((vi)x & 0x7fffffff), one = v_set(1.0f);
    const vf e = dtype == RAFTER_F32 ? v_exp(-magnitude) : v_exp2(magnitude * v_set(-V_LOG2E));
    return (struct v_logistic){v_select_negative(x, e, one), v_select_negative(x, one, e), e, one + e};
}

/* 2^t for results that are rounded to bf16 and are products or quotients of it. A polynomial of degree 3 has a relative
 * error of at most 1.1e-4: a nineteenth of half a unit in the last place of bf16. Exact at integers. */
V_INLINE vf v_coarse_exp2(vf t) {
#if V_LANES == 16
    const vf r = (vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p = v_fma(v_set(0.0782679692f), r, v_set(0.226307675f));
    p = v_fma(p, r, v_set(0.695424318f));
    return (vf)_mm512_scalef_ps((__m512)v_fma(p, r, v_set(1.0f)), (__m512)t);
#else
    return v_exp2(t);
#endif
}

/* e^-|x| for forward. Gradients use v_logistic, whose e is more accurate for bf16: the gradient of silu
 * has a root, near which an error of e is large relative to the result. */
V_INLINE vf v_decay(int dtype, vf x) {
    const vf magnitude = (vf)((vi)x & 0x7fffffff);
    if (dtype == RAFTER_F32)
        return v_exp(-magnitude);
    const vf t = magnitude * v_set(-V_LOG2E);
    return dtype == RAFTER_BF16 ? v_coarse_exp2(t) : v_exp2(t);
}

V_INLINE vf v_relu(vf x) {
    return v_max(v_set(0.0f), x);
}

V_INLINE vf v_sigmoid(int dtype, vf x) {
    const vf e = v_decay(dtype, x), one = v_set(1.0f);
    return v_select_negative(x, e, one) / (one + e);
}

V_INLINE vf v_silu(int dtype, vf x) {
    /* x for positive x, x e for negative x; the order of operands keeps -0 and NaN. */
    const vf e = v_decay(dtype, x), zero = v_set(0.0f);
    return v_fma(v_min(zero, x), e, v_max(zero, x)) / (v_set(1.0f) + e);
}

/* ---- gradients: dx from x and dy ------------------------------------------------------------- */

/* 0 where x <= 0, whatever dy is; dy where x is NaN. */
V_INLINE vf v_relu_grad(vf x, vf dy) {
    return v_select(x <= v_set(0.0f), v_set(0.0f), dy);
}

V_INLINE vf v_sigmoid_grad(int dtype, vf x, vf dy) {
    const struct v_logistic s = v_logistic(dtype, x);
    return dy * s.e / (s.divisor * s.divisor);
}

/* dy s(x) (1 + x s(-x)), over one common divisor; s is the sigmoid. */
V_INLINE vf v_silu_grad(int dtype, vf x, vf dy) {
    const struct v_logistic s = v_logistic(dtype, x);
    return dy * s.of_x * v_fma(x, s.of_minus_x, s.divisor) / (s.divisor * s.divisor);
}

#endif
