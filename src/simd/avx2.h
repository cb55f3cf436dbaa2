/* SPDX-License-Identifier: Apache-2.0 */
/* The vector vocabulary with AVX2, FMA and F16C: 8 floats. See simd.h. */
#ifndef RAFTER_SIMD_AVX2_H
#define RAFTER_SIMD_AVX2_H

#define V_LANES 8
#define V_FMA 1 /* v_fma rounds once */
#define V_INT16 1
#define V_SPLIT_BF16 1
#define V_NEON 0

#include "simd/types.h"

typedef __m256i v16; /* 2 V_LANES 16-bit integers */

/* ---- arithmetic ------------------------------------------------------------------------------ */

V_INLINE vf v_set(float a) {
    return (vf)_mm256_set1_ps(a);
}

V_INLINE vf v_fma(vf a, vf b, vf c) {
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

V_INLINE vd v_fma_d(vd a, vd b, vd c) {
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}

V_INLINE vf v_select(vi mask, vf a, vf b) {
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
}

V_INLINE unsigned v_bits(vi mask) {
    return (unsigned)_mm256_movemask_ps((__m256)mask);
}

V_INLINE vf v_max(vf a, vf b) {
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

V_INLINE vf v_min(vf a, vf b) {
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}

V_INLINE vf v_floor(vf a) {
    return (vf)_mm256_floor_ps((__m256)a);
}

V_INLINE v_quad v_fold_to_quad(vf a, bool max) {
    const __m128 q0 = _mm256_castps256_ps128((__m256)a), q1 = _mm256_extractf128_ps((__m256)a, 1);
    return (v_quad)(max ? _mm_max_ps(q0, q1) : _mm_add_ps(q0, q1));
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

V_INLINE vf v_widen(int dtype, vh h) {
    return dtype == RAFTER_BF16 ? (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16)
                                : (vf)_mm256_cvtph_ps((__m128i)h);
}

V_INLINE vu v_round_bf16(vf a) {
    const vu bits = (vu)a, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return (vu)v_select(a == a, (vf)rounded, (vf)((vu){0} + 0x7fc00000u));
}

V_INLINE vh v_narrow(int dtype, vf a) {
    if (dtype == RAFTER_BF16) {
        const __m256i high = (__m256i)(v_round_bf16(a) >> 16);
        return (vh)_mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    return (vh)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

V_INLINE vu v_narrow2(int dtype, vf a, vf b) {
    if (dtype == RAFTER_BF16) {
        const __m256i high_a = (__m256i)(v_round_bf16(a) >> 16), high_b = (__m256i)(v_round_bf16(b) >> 16);
        return (vu)_mm256_permute4x64_epi64(_mm256_packus_epi32(high_a, high_b), 0xd8);
    }
    return (vu)_mm256_set_m128i((__m128i)v_narrow(dtype, b), (__m128i)v_narrow(dtype, a));
}

V_INLINE vu v_narrow_pair_bf16(vf a, vf b) {
    /* As in avx512.h: the carry of rounding is the top bit of an average. */
    const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32((__m256i)a, 16), (__m256i)b, 0xaa);
    const __m256i dropped = _mm256_blend_epi16((__m256i)a, _mm256_slli_epi32((__m256i)b, 16), 0xaa);
    const __m256i sign = _mm256_set1_epi16(-0x8000), last = _mm256_set1_epi16(1), ones = _mm256_set1_epi16(0x7ffe);
    const __m256i half = _mm256_or_si256(_mm256_and_si256(kept, last), ones);
    const __m256i carry = _mm256_srli_epi16(_mm256_avg_epu16(dropped, half), 15);
    const __m256i magnitude = _mm256_adds_epi16(_mm256_andnot_si256(sign, kept), carry);
    return (vu)_mm256_or_si256(magnitude, _mm256_and_si256(sign, kept));
}

V_INLINE v16 v_load_16(const void *p) {
    return _mm256_loadu_si256(p);
}

V_INLINE v16 v_set_16(int16_t a) {
    return _mm256_set1_epi16(a);
}

V_INLINE v16 v_max_i16(v16 a, v16 b) {
    return _mm256_max_epi16(a, b);
}

V_INLINE v16 v_min_u16(v16 a, v16 b) {
    return _mm256_min_epu16(a, b);
}

V_INLINE v16 v_select_negative_16(v16 x, v16 a, v16 b) {
    return _mm256_blendv_epi8(b, a, _mm256_srai_epi16(x, 15));
}

/* _mm_minpos_epu16 finds the smallest of eight unsigned integers; with all bits but the sign flipped,
 * it finds the largest signed one. */
V_INLINE int16_t v_fold_max_i16(v16 a) {
    const __m128i part = _mm_max_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi16(0x7fff))), 0) ^ 0x7fff);
}

V_INLINE uint16_t v_fold_min_u16(v16 a) {
    const __m128i part = _mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return (uint16_t)_mm_extract_epi16(_mm_minpos_epu16(part), 0);
}

/* ---- loads and stores ------------------------------------------------------------------------ */

V_INLINE void v_stream(void *p, vf a) {
    _mm256_stream_ps(p, (__m256)a);
}

V_INLINE void v_stream_bits(void *p, vu a) {
    _mm256_stream_si256(p, (__m256i)a);
}

/* ---- lane orders ----------------------------------------------------------------------------- */

#define V_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define V_ODD 1, 3, 5, 7, 9, 11, 13, 15
#define V_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define V_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15

V_INLINE vf v_from_d(vd low, vd high) {
    return (vf)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
}

#endif
