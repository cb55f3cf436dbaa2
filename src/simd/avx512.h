/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary with AVX-512 (F, BW, DQ, VL): 16 floats. See simd.h. */
#ifndef RAFTER_SIMD_AVX512_H
#define RAFTER_SIMD_AVX512_H

#define V_LANES 16
#define V_FMA 1 /* v_fma rounds once */
#define V_INT16 1
#define V_SPLIT_BF16 1
#define V_NEON 0

#include "simd/types.h"

typedef __m512i v16; /* 2 V_LANES 16-bit integers */

/* ---- arithmetic ------------------------------------------------------------------------------ */

V_INLINE vf v_set(float a) {
    return (vf)_mm512_set1_ps(a);
}

V_INLINE vf v_fma(vf a, vf b, vf c) {
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

V_INLINE vd v_fma_d(vd a, vd b, vd c) {
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}

V_INLINE vf v_select(vi mask, vf a, vf b) {
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
}

V_INLINE vf v_select_negative(vf x, vf a, vf b) {
    /* Bitwise: a mask register would cost two instructions on the ports that multiply. */
    return (vf)_mm512_ternarylogic_epi32(_mm512_srai_epi32((__m512i)x, 31), (__m512i)a, (__m512i)b, 0xca);
}

V_INLINE vf v_select_bit(vu x, int bit, vf a, vf b) {
    const __mmask16 set = _mm512_test_epi32_mask((__m512i)x, _mm512_set1_epi32(1 << bit));
    return (vf)_mm512_mask_blend_ps(set, (__m512)b, (__m512)a);
}

V_INLINE unsigned v_bits_less(vf a, vf b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
}

V_INLINE unsigned v_bits(vi mask) {
    return _mm512_movepi32_mask((__m512i)mask);
}

V_INLINE vi v_from_bits(unsigned bits) {
    return (vi)_mm512_movm_epi32((__mmask16)bits);
}

V_INLINE vf v_max(vf a, vf b) {
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

V_INLINE vf v_min(vf a, vf b) {
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}

V_INLINE vf v_floor(vf a) {
    return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

V_INLINE vf v_scale(vf a, vf n) {
    return (vf)_mm512_scalef_ps((__m512)a, (__m512)n);
}

V_INLINE v_quad v_fold_to_quad(vf a, bool max) {
    const __m256 low = _mm512_castps512_ps256((__m512)a), high = _mm512_extractf32x8_ps((__m512)a, 1);
    const __m256 half = max ? _mm256_max_ps(low, high) : _mm256_add_ps(low, high);
    const __m128 q0 = _mm256_castps256_ps128(half), q1 = _mm256_extractf128_ps(half, 1);
    return (v_quad)(max ? _mm_max_ps(q0, q1) : _mm_add_ps(q0, q1));
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

V_INLINE vf v_widen(int dtype, vh h) {
    return dtype == RAFTER_BF16 ? (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16)
                                : (vf)_mm512_cvtph_ps((__m256i)h);
}

V_INLINE vu v_round_bf16(vf a) {
    const vu bits = (vu)a, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    const __mmask16 number = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q);
    return (vu)_mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc00000), number, (__m512i)rounded);
}

V_INLINE vh v_narrow(int dtype, vf a) {
    if (dtype == RAFTER_BF16)
        return (vh)_mm512_cvtepi32_epi16((__m512i)(v_round_bf16(a) >> 16));
    return (vh)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

V_INLINE vu v_narrow2(int dtype, vf a, vf b) {
    if (dtype == RAFTER_BF16) {
        const __m512i high_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                     29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        return (vu)_mm512_permutex2var_epi16((__m512i)v_round_bf16(a), high_halves, (__m512i)v_round_bf16(b));
    }
    return (vu)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)v_narrow(dtype, a)), (__m256i)v_narrow(dtype, b), 1);
}

V_INLINE vu v_narrow_pair_bf16(vf a, vf b) {
    /* Collects the 16-bit halves that stay and those that are rounded off, and rounds all of them
     * at once: the carry out of dropped + 0x7fff + (last bit of kept) is the top bit of an average.
     * The saturating add keeps a NaN from wrapping around. */
    const __m512i kept = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b);
    const __m512i dropped = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, _mm512_slli_epi32((__m512i)b, 16));
    const __m512i sign = _mm512_set1_epi16(-0x8000), last = _mm512_set1_epi16(1), ones = _mm512_set1_epi16(0x7ffe);
    const __m512i half = _mm512_or_si512(_mm512_and_si512(kept, last), ones);
    const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(dropped, half), 15);
    const __m512i magnitude = _mm512_adds_epi16(_mm512_andnot_si512(sign, kept), carry);
    return (vu)_mm512_or_si512(magnitude, _mm512_and_si512(sign, kept));
}

V_INLINE v16 v_load_16(const void *p) {
    return _mm512_loadu_si512(p);
}

V_INLINE v16 v_set_16(int16_t a) {
    return _mm512_set1_epi16(a);
}

V_INLINE v16 v_max_i16(v16 a, v16 b) {
    return _mm512_max_epi16(a, b);
}

V_INLINE v16 v_min_u16(v16 a, v16 b) {
    return _mm512_min_epu16(a, b);
}

V_INLINE v16 v_select_negative_16(v16 x, v16 a, v16 b) {
    return _mm512_mask_mov_epi16(b, _mm512_movepi16_mask(x), a);
}

/* As in avx2.h. */
V_INLINE int16_t v_fold_max_i16(v16 a) {
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m128i part = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi16(0x7fff))), 0) ^ 0x7fff);
}

V_INLINE uint16_t v_fold_min_u16(v16 a) {
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m128i part = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (uint16_t)_mm_extract_epi16(_mm_minpos_epu16(part), 0);
}

/* ---- loads and stores ------------------------------------------------------------------------ */

V_INLINE vf v_load_part(int dtype, const void *p, int64_t n, float fill) {
    const __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (dtype == RAFTER_F32)
        return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p);
    const vf a = v_widen(dtype, (vh)_mm256_maskz_loadu_epi16(mask, p));
    return (vf)_mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), (__m512)a);
}

V_INLINE void v_store_part(int dtype, void *p, vf a, int64_t n) {
    const __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (dtype == RAFTER_F32)
        _mm512_mask_storeu_ps(p, mask, (__m512)a);
    else
        _mm256_mask_storeu_epi16(p, mask, (__m256i)v_narrow(dtype, a));
}

V_INLINE void v_stream(void *p, vf a) {
    _mm512_stream_ps(p, (__m512)a);
}

V_INLINE void v_stream_bits(void *p, vu a) {
    _mm512_stream_si512(p, (__m512i)a);
}

/* ---- lane orders ----------------------------------------------------------------------------- */

#define V_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define V_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define V_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define V_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

V_INLINE vf v_from_d(vd low, vd high) {
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)), _mm512_cvtpd_ps((__m512d)high),
                                  1);
}

/* ---- functions ------------------------------------------------------------------------------- */

V_INLINE vf v_exp2(vf t) {
    /* 2^r on [0, 1) by a minimax polynomial of relative error 8.3e-8; scalef takes the floor of t
     * itself. */
    const vf r = (vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p = v_fma(v_set(0.00186713008191f), r, v_set(0.00901703028444f));
    p = v_fma(p, r, v_set(0.055799913146f));
    p = v_fma(p, r, v_set(0.240164450136f));
    p = v_fma(p, r, v_set(0.693151311808f));
    p = v_fma(p, r, v_set(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)t);
}

#endif
