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

V_INLINE vf v_relu(vf x) {
    return v_max(v_set(0.0f), x);
}

V_INLINE vf v_sigmoid(int dtype, vf x) {
    const struct v_logistic s = v_logistic(dtype, x);
    return s.of_x / s.divisor;
}

V_INLINE vf v_silu(int dtype, vf x) {
    const struct v_logistic s = v_logistic(dtype, x);
    return x * s.of_x / s.divisor;
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
