/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary in portable code: 4 floats, compiler vector extensions only. See simd.h. */
#ifndef RAFTER_SIMD_PORTABLE_H
#define RAFTER_SIMD_PORTABLE_H

#define V_LANES 4
#define V_FMA 0 /* v_fma rounds twice */
#define V_INT16 0
#define V_SPLIT_BF16 1
#define V_NEON 0

#include "simd/types.h"

/* ---- arithmetic ------------------------------------------------------------------------------ */

V_INLINE vf v_set(float a) {
    return (vf){a, a, a, a};
}

V_INLINE vf v_fma(vf a, vf b, vf c) {
    return a * b + c;
}

V_INLINE vd v_fma_d(vd a, vd b, vd c) {
    return a * b + c;
}

V_INLINE vf v_select(vi mask, vf a, vf b) {
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

V_INLINE unsigned v_bits(vi mask) {
    return (unsigned)((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
}

V_INLINE vf v_max(vf a, vf b) {
    return v_select(a > b, a, b);
}

V_INLINE vf v_min(vf a, vf b) {
    return v_select(a < b, a, b);
}

V_INLINE vf v_floor(vf a) {
    /* At 2^23 and above every float is an integer already. Infinity and NaN stay as they are. */
    const vi integer = __builtin_convertvector(v_min(v_set(0x1p23f), v_max(v_set(-0x1p23f), a)), vi);
    const vf truncated = __builtin_convertvector(integer, vf);
    const vf floored = v_select(truncated > a, truncated - v_set(1.0f), truncated);
    const vf magnitude = (vf)((vi)a & 0x7fffffff);
    return v_select(magnitude < v_set(0x1p23f), floored, a);
}

V_INLINE v_quad v_fold_to_quad(vf a, bool max) {
    (void)max;
    return a;
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

/* fp16 bits in the low halves -> fp32, without a conversion instruction. */
V_INLINE vf v_from_half_bits(vu h) {
    const vu sign = (h & 0x8000u) << 16, body = (h & 0x7fffu) << 13;
    /* Scaling by 2^112 corrects the exponent bias and normalises fp16 subnormals. Infinities and
     * NaN then need their exponent set again. */
    const vf scaled = (vf)body * v_set(0x1p112f);
    const vu special = (vu)((vf)body >= (vf)((vu){0} + 0x0f800000u)) & 0x7f800000u;
    return (vf)((vu)scaled | special | sign);
}

/* fp32 -> fp16 bits in the low halves, rounded to nearest even. */
V_INLINE vu v_to_half_bits(vf a) {
    const vu bits = (vu)a, sign = bits >> 16 & 0x8000u, body = bits & 0x7fffffffu;
    const vu round = body + 0xfffu + (body >> 13 & 1u) - (112u << 23);
    const vu normal = round >> 13;
    /* Below the smallest normal fp16: adding 0.5 makes the adder round to multiples of 2^-24, the
     * fp16 subnormals. */
    const vu tiny = (vu)((vf)body + v_set(0.5f)) - 0x3f000000u;
    vu out = (vu)v_select((vi)(body < 0x38800000u), (vf)tiny, (vf)normal);
    out = (vu)v_select((vi)(body >= 0x477ff000u), (vf)((vu){0} + 0x7c00u), (vf)out);
    out = (vu)v_select((vi)(body > 0x7f800000u), (vf)((vu){0} + 0x7e00u), (vf)out);
    return out | sign;
}

V_INLINE vf v_widen(int dtype, vh h) {
    const vu wide = __builtin_convertvector(h, vu);
    return dtype == RAFTER_BF16 ? (vf)(wide << 16) : v_from_half_bits(wide);
}

V_INLINE vu v_round_bf16(vf a) {
    const vu bits = (vu)a, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return (vu)v_select(a == a, (vf)rounded, (vf)((vu){0} + 0x7fc00000u));
}

V_INLINE vh v_narrow(int dtype, vf a) {
    const vu bits = dtype == RAFTER_BF16 ? v_round_bf16(a) >> 16 : v_to_half_bits(a);
    return __builtin_convertvector(bits, vh);
}

V_INLINE vu v_narrow_pair_bf16(vf a, vf b) {
    return v_round_bf16(a) >> 16 | (v_round_bf16(b) & 0xffff0000u);
}

/* ---- loads and stores ------------------------------------------------------------------------ */

/* Plain stores: portable code has no streaming ones. */
V_INLINE void v_stream(void *p, vf a) {
    memcpy(p, &a, sizeof a);
}

V_INLINE void v_stream_bits(void *p, vu a) {
    memcpy(p, &a, sizeof a);
}

/* ---- lane orders ----------------------------------------------------------------------------- */

#define V_EVEN 0, 2, 4, 6
#define V_ODD 1, 3, 5, 7
#define V_ZIP_LOW 0, 4, 1, 5
#define V_ZIP_HIGH 2, 6, 3, 7

V_INLINE vf v_from_d(vd low, vd high) {
    return (vf){(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}

#endif
