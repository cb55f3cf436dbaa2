/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary with NEON, which every aarch64 CPU has: 4 floats. The bf16 instructions are
 * used where the compiler flags allow them. See simd.h. */
#ifndef RAFTER_SIMD_NEON_H
#define RAFTER_SIMD_NEON_H

#define V_LANES 4
#define V_FMA 1        /* v_fma rounds once */
#define V_INT16 1      /* v_narrow2 and vectors of 16-bit integers */
#define V_SPLIT_BF16 0 /* widening halves of a register costs as much as splitting even from odd */
#define V_NEON 1

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define V_NEON_BF16 1
#else
#define V_NEON_BF16 0
#endif

#include "simd/types.h"

typedef uint16x8_t v16; /* 2 V_LANES 16-bit integers */

/* ---- arithmetic ------------------------------------------------------------------------------ */

V_INLINE vf v_set(float a) {
    return (vf)vdupq_n_f32(a);
}

V_INLINE vf v_fma(vf a, vf b, vf c) {
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

V_INLINE vd v_fma_d(vd a, vd b, vd c) {
    return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}

V_INLINE vf v_select(vi mask, vf a, vf b) {
    return (vf)vbslq_f32((uint32x4_t)mask, (float32x4_t)a, (float32x4_t)b);
}

V_INLINE unsigned v_bits(vi mask) {
    const uint32x4_t bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)mask, bit));
}

/* NEON's own maximum has another result for NaN: see v_max_nan. */
V_INLINE vf v_max(vf a, vf b) {
    return v_select(a > b, a, b);
}

V_INLINE vf v_min(vf a, vf b) {
    return v_select(a < b, a, b);
}

V_INLINE vf v_max_nan(vf a, vf b) {
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}

V_INLINE vf v_min_nan(vf a, vf b) {
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
}

V_INLINE vf v_floor(vf a) {
    return (vf)vrndmq_f32((float32x4_t)a);
}

V_INLINE v_quad v_fold_to_quad(vf a, bool max) {
    (void)max;
    return a;
}

V_INLINE float v_hmax(vf a) {
    return vmaxvq_f32((float32x4_t)a);
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

V_INLINE vf v_widen(int dtype, vh h) {
    return dtype == RAFTER_BF16 ? (vf)vshll_n_u16((uint16x4_t)h, 16) : (vf)vcvt_f32_f16((float16x4_t)h);
}

V_INLINE vu v_round_bf16(vf a) {
    const uint32x4_t bits = (uint32x4_t)a, last = vshlq_n_u32(bits, 15);
    const uint32x4_t rounded = vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last, 31);
    return (vu)v_select(a == a, (vf)rounded, (vf)((vu){0} + 0x7fc00000u));
}

V_INLINE vh v_narrow(int dtype, vf a) {
    if (dtype == RAFTER_F16)
        return (vh)vcvt_f16_f32((float32x4_t)a);
#if V_NEON_BF16
    return (vh)vcvt_bf16_f32((float32x4_t)a);
#else
    return (vh)vshrn_n_u32((uint32x4_t)v_round_bf16(a), 16);
#endif
}

V_INLINE vu v_narrow2(int dtype, vf a, vf b) {
    if (dtype == RAFTER_F16)
        return (vu)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)a), (float32x4_t)b);
#if V_NEON_BF16
    return (vu)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b);
#else
    return (vu)vuzp2q_u16((uint16x8_t)v_round_bf16(a), (uint16x8_t)v_round_bf16(b));
#endif
}

V_INLINE vu v_narrow_pair_bf16(vf a, vf b) {
#if V_NEON_BF16
    return v_narrow2(RAFTER_BF16, a, b);
#else
    /* As in avx512.h: the carry of rounding is the top bit of an average. */
    const uint16x8_t kept = vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b);
    const uint16x8_t dropped = vuzp1q_u16((uint16x8_t)a, (uint16x8_t)b);
    const uint16x8_t sign = vdupq_n_u16(0x8000), last = vdupq_n_u16(1), ones = vdupq_n_u16(0x7ffe);
    const uint16x8_t carry = vshrq_n_u16(vrhaddq_u16(dropped, vbslq_u16(last, kept, ones)), 15);
    const int16x8_t magnitude = vqaddq_s16((int16x8_t)vbicq_u16(kept, sign), (int16x8_t)carry);
    return (vu)vbslq_u16(sign, kept, (uint16x8_t)magnitude);
#endif
}

V_INLINE v16 v_load_16(const void *p) {
    v16 a;
    memcpy(&a, p, sizeof a);
    return a;
}

V_INLINE v16 v_set_16(int16_t a) {
    return vdupq_n_u16((uint16_t)a);
}

V_INLINE v16 v_max_i16(v16 a, v16 b) {
    return (v16)vmaxq_s16((int16x8_t)a, (int16x8_t)b);
}

V_INLINE v16 v_min_u16(v16 a, v16 b) {
    return vminq_u16(a, b);
}

V_INLINE v16 v_select_negative_16(v16 x, v16 a, v16 b) {
    return vbslq_u16(vcltzq_s16((int16x8_t)x), a, b);
}

V_INLINE int16_t v_fold_max_i16(v16 a) {
    return vmaxvq_s16((int16x8_t)a);
}

V_INLINE uint16_t v_fold_min_u16(v16 a) {
    return vminvq_u16(a);
}

/* ---- loads and stores ------------------------------------------------------------------------ */

/* `count` (at most 3) elements of 4 or 2 bytes into the low lanes; the others are undefined or 0. */
V_INLINE uint32x4_t v_load_words(const char *p, int64_t count) {
    uint32x4_t a = vdupq_n_u32(0);
    uint64_t two;
    uint32_t one;
    if (count & 2) {
        memcpy(&two, p, sizeof two);
        a = (uint32x4_t)vsetq_lane_u64(two, (uint64x2_t)a, 0);
    }
    if (count & 1) {
        memcpy(&one, p + (count - 1) * 4, sizeof one);
        a = count & 2 ? vsetq_lane_u32(one, a, 2) : vsetq_lane_u32(one, a, 0);
    }
    return a;
}

V_INLINE uint16x4_t v_load_halves(const char *p, int64_t count) {
    uint16x4_t a = vdup_n_u16(0);
    uint32_t two;
    uint16_t one;
    if (count & 2) {
        memcpy(&two, p, sizeof two);
        a = (uint16x4_t)vset_lane_u32(two, (uint32x2_t)a, 0);
    }
    if (count & 1) {
        memcpy(&one, p + (count - 1) * 2, sizeof one);
        a = count & 2 ? vset_lane_u16(one, a, 2) : vset_lane_u16(one, a, 0);
    }
    return a;
}

V_INLINE vf v_load_part(int dtype, const void *p, int64_t n, float fill) {
    const vi lane = {0, 1, 2, 3};
    vf a;
    if (dtype == RAFTER_F32) {
        if (n >= V_LANES)
            return (vf)vld1q_f32(p);
        a = (vf)v_load_words(p, n);
    } else {
        a = v_widen(dtype, n >= V_LANES ? (vh)vld1_u16(p) : (vh)v_load_halves(p, n));
    }
    return v_select(lane < (int32_t)n, a, v_set(fill));
}

V_INLINE void v_store_part(int dtype, void *p, vf a, int64_t n) {
    char *const to = p;
    if (dtype == RAFTER_F32) {
        if (n >= V_LANES)
            vst1q_f32(p, (float32x4_t)a);
        if (n >= V_LANES)
            return;
        if (n & 2)
            memcpy(to, &a, 8);
        const float last = n & 2 ? a[2] : a[0];
        if (n & 1)
            memcpy(to + (n - 1) * 4, &last, 4);
        return;
    }
    const vh h = v_narrow(dtype, a);
    if (n >= V_LANES) {
        memcpy(p, &h, sizeof h);
        return;
    }
    if (n & 2)
        memcpy(to, &h, 4);
    const uint16_t last = n & 2 ? h[2] : h[0];
    if (n & 1)
        memcpy(to + (n - 1) * 2, &last, 2);
}

/* Plain stores: the cores detect streams of whole lines themselves, and STNP is only a hint. */
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

V_INLINE vf v_permute(vf a, vi index) {
    const vu bytes = (vu)index * 0x04040404u + 0x03020100u;
    return (vf)vqtbl1q_u8((uint8x16_t)a, (uint8x16_t)bytes);
}

V_INLINE void v_to_d(vf a, vd *low, vd *high) {
    *low = (vd)vcvt_f64_f32(vget_low_f32((float32x4_t)a));
    *high = (vd)vcvt_high_f64_f32((float32x4_t)a);
}

V_INLINE vf v_from_d(vd low, vd high) {
    return (vf)vcvt_high_f32_f64(vcvt_f32_f64((float64x2_t)low), (float64x2_t)high);
}

#endif
