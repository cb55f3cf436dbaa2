/* SPDX-License-Identifier: Apache-2.0 */
/* From logits z to u = scale * softcap(z), of which the loss is a function. */
#ifndef RAFTER_CROSS_ENTROPY_CPU_U_H
#define RAFTER_CROSS_ENTROPY_CPU_U_H

#include "simd/simd.h"

/* u is the logit itself, the scaled logit, or the capped and scaled logit. */
enum { PLAIN, SCALED, CAPPED };

static inline int kind_of(float softcap, float scale) {
    return softcap != 0.0f ? CAPPED : scale != 1.0f ? SCALED : PLAIN;
}

/* tanh x to about 3 units in the last place, and its derivative, without cancellation where tanh x
 * is near 1. */
struct tanh {
    vf value, slope;
};

V_INLINE struct tanh tanh_of(vf x) {
    const vf magnitude = (vf)((vi)x & 0x7fffffff), one = v_set(1.0f);
    const vf q = v_exp2(magnitude * v_set(-2.0f * V_LOG2E)), share = one / (one + q), twice = (q + q) * share;
    const vf large = (vf)((vi)(one - twice) | ((vi)x & (vi)((vu){0} + 0x80000000u)));
    const vf s = x * x;
    vf p = v_fma(v_set(-0.00570498795486f), s, v_set(0.0206390881102f)); /* as v_tanh, for |x| below 0.625 */
    p = v_fma(p, s, v_set(-0.05373971535f));
    p = v_fma(p, s, v_set(0.133314422013f));
    p = v_fma(p, s, v_set(-0.333332819421f));
    return (struct tanh){v_select(magnitude < v_set(0.625f), v_fma(x * s, p, x), large), (twice + twice) * share};
}

/* The constants of u(z), in registers. */
struct transform {
    vf inverse_cap, cap, scale;
};

static inline struct transform transform_of(float softcap, float scale) {
    /* If 1 / softcap overflows, every logit but 0 is at the cap. */
    const float inverse = softcap < 1e-38f ? 1e38f : 1.0f / softcap;
    return (struct transform){v_set(inverse), v_set(softcap), v_set(scale)};
}

/* Returns u; *slope is du/dz without the factor scale. */
V_INLINE vf to_u(int kind, vf z, struct transform t, vf *slope) {
    *slope = v_set(1.0f);
    if (kind == PLAIN)
        return z;
    if (kind == CAPPED) {
        const struct tanh tanh = tanh_of(z * t.inverse_cap);
        z = t.cap * tanh.value;
        *slope = tanh.slope;
    }
    return t.scale * z;
}

#endif
