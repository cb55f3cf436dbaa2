/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary that CPU kernels are written in. One source, compiled once per ISA level: a vector `vf` has
 * V_LANES floats, 16 with AVX-512, 8 with AVX2, 4 in portable code. + - * / and comparisons are the compiler's vector
 * extensions; the rest is below. Everything is static inline: no symbol of one level can leak into another.
 *
 * A dtype argument is meant to be a compile-time constant at every call: write kernels as V_INLINE functions that take
 * the dtype, and instantiate them from a switch at the top (see V_FOR_DTYPE).
 */
#ifndef RAFTER_SIMD_H
#define RAFTER_SIMD_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "rafter/rafter.h"

#if defined(__AVX512F__)
#define V_LANES 16
#elif defined(__AVX2__)
#define V_LANES 8
#else
#define V_LANES 4
#endif

#define V_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(V_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(V_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(V_LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(V_LANES * 2)));

/* Calls `statement` with `dtype` bound to a constant for each floating dtype: V_FOR_DTYPE(d, kernel(d, x, y)); */
#define V_FOR_DTYPE(value, dtype, statement)                                                                           \
    switch (value) {                                                                                                   \
    case RAFTER_F32: {                                                                                                 \
        enum { dtype = RAFTER_F32 };                                                                                   \
        statement;                                                                                                     \
        break;                                                                                                         \
    }                                                                                                                  \
    case RAFTER_BF16: {                                                                                                \
        enum { dtype = RAFTER_BF16 };                                                                                  \
        statement;                                                                                                     \
        break;                                                                                                         \
    }                                                                                                                  \
    default: {                                                                                                         \
        enum { dtype = RAFTER_F16 };                                                                                   \
        statement;                                                                                                     \
        break;                                                                                                         \
    }                                                                                                                  \
    }

V_INLINE int64_t v_bytes(int dtype) {
    return dtype == RAFTER_F32 ? 4 : 2;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

V_INLINE vf v_set(float a) {
#if V_LANES == 16
    return (vf)_mm512_set1_ps(a);
#elif V_LANES == 8
    return (vf)_mm256_set1_ps(a);
#else
    return (vf){a, a, a, a};
#endif
}

/* a * b + c, rounded once where the ISA has FMA. */
V_INLINE vf v_fma(vf a, vf b, vf c) {
#if V_LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif V_LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* b where the mask (a comparison's result) is false, a where it is true. */
V_INLINE vf v_select(vi mask, vf a, vf b) {
#if V_LANES == 16
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#elif V_LANES == 8
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
#endif
}

/* b where x's sign bit is clear, a where it is set. */
V_INLINE vf v_select_negative(vf x, vf a, vf b) {
#if V_LANES == 16
    /* By bits: a mask register would take two instructions from the pipes that multiply. */
    return (vf)_mm512_ternarylogic_epi32(_mm512_srai_epi32((__m512i)x, 31), (__m512i)a, (__m512i)b, 0xca);
#else
    return v_select((vi)x >> 31, a, b);
#endif
}

/* A mask as bits, lane 0 the lowest, and back (bits past the lanes are ignored). */
V_INLINE unsigned v_bits(vi mask) {
#if V_LANES == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif V_LANES == 8
    return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
    return (unsigned)((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
#endif
}

V_INLINE vi v_from_bits(unsigned bits) {
#if V_LANES == 16
    return (vi)_mm512_movm_epi32((__mmask16)bits);
#else
    vi lane;
    for (int i = 0; i < V_LANES; i++)
        lane[i] = 1 << i;
    return ((lane & (int32_t)bits) != 0);
#endif
}

/* The larger; b if either is NaN. */
V_INLINE vf v_max(vf a, vf b) {
#if V_LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif V_LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_select(a > b, a, b);
#endif
}

/* The smaller; b if either is NaN. */
V_INLINE vf v_min(vf a, vf b) {
#if V_LANES == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif V_LANES == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return v_select(a < b, a, b);
#endif
}

/* 1 / a to one unit in the last place, for |a| in [2^-100, 2^100]. */
V_INLINE vf v_reciprocal(vf a) {
#if V_LANES == 16
    const vf r =
        (vf)_mm512_rcp14_ps((__m512)a); /* 14 bits; a Newton step doubles them, at a third of a division's time */
    return v_fma(r, v_fma(-a, r, v_set(1.0f)), r);
#else
    return v_set(1.0f) / a;
#endif
}

/* Sum or maximum of the lanes, always in the same order: halves folded together. */
V_INLINE float v_fold(vf a, bool max) {
#if V_LANES == 4
    const vf q = a;
#else
#if V_LANES == 16
    const __m256 low = _mm512_castps512_ps256((__m512)a), high = _mm512_extractf32x8_ps((__m512)a, 1);
    const __m256 h = max ? _mm256_max_ps(low, high) : _mm256_add_ps(low, high);
#else
    const __m256 h = (__m256)a;
#endif
    const __m128 q0 = _mm256_castps256_ps128(h), q1 = _mm256_extractf128_ps(h, 1);
    const __m128 q = max ? _mm_max_ps(q0, q1) : _mm_add_ps(q0, q1);
#endif
    if (!max)
        return (q[0] + q[2]) + (q[1] + q[3]);
    const float even = q[0] > q[2] ? q[0] : q[2], odd = q[1] > q[3] ? q[1] : q[3];
    return even > odd ? even : odd;
}

V_INLINE float v_sum(vf a) {
    return v_fold(a, false);
}

V_INLINE float v_hmax(vf a) {
    return v_fold(a, true);
}

/* ---- loads and stores, any alignment --------------------------------------------------------- */

/* fp16 bits in the low halves -> fp32, and back (to nearest even), where there is no instruction. */
V_INLINE vf v_from_half_bits(vu h) {
    const vu sign = (h & 0x8000u) << 16, body = (h & 0x7fffu) << 13;
    /* Scaling by 2^112 moves the exponent bias and makes fp16's subnormals normal; infinities and NaN get theirs back.
     */
    const vf scaled = (vf)body * v_set(0x1p112f);
    const vu special = (vu)((vf)body >= (vf)((vu){0} + 0x0f800000u)) & 0x7f800000u;
    return (vf)((vu)scaled | special | sign);
}

V_INLINE vu v_to_half_bits(vf a) {
    const vu bits = (vu)a, sign = bits >> 16 & 0x8000u, body = bits & 0x7fffffffu;
    const vu round = body + 0xfffu + (body >> 13 & 1u) - (112u << 23);
    const vu normal = round >> 13;
    /* Below fp16's smallest normal: adding 0.5 lets the adder round at fp16's subnormal unit, 2^-24. */
    const vu tiny = (vu)((vf)body + v_set(0.5f)) - 0x3f000000u;
    vu out = (vu)v_select((vi)(body < 0x38800000u), (vf)tiny, (vf)normal);
    out = (vu)v_select((vi)(body >= 0x477ff000u), (vf)((vu){0} + 0x7c00u), (vf)out);
    out = (vu)v_select((vi)(body > 0x7f800000u), (vf)((vu){0} + 0x7e00u), (vf)out);
    return out | sign;
}

V_INLINE vf v_load(int dtype, const void *p) {
    if (dtype == RAFTER_F32) {
        vf a;
        memcpy(&a, p, sizeof a);
        return a;
    }
    vh h;
    memcpy(&h, p, sizeof h);
#if V_LANES == 16
    return dtype == RAFTER_BF16 ? (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16)
                                : (vf)_mm512_cvtph_ps((__m256i)h);
#elif V_LANES == 8
    return dtype == RAFTER_BF16 ? (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16)
                                : (vf)_mm256_cvtph_ps((__m128i)h);
#else
    const vu wide = __builtin_convertvector(h, vu);
    return dtype == RAFTER_BF16 ? (vf)(wide << 16) : v_from_half_bits(wide);
#endif
}

/* a rounded to bf16, to nearest even, in the high halves; NaN stays NaN, subnormals stay. The low halves hold anything.
 */
V_INLINE vu v_round_bf16(vf a) {
    const vu bits = (vu)a, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
#if V_LANES == 16
    const __mmask16 number = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_ORD_Q);
    return (vu)_mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc00000), number, (__m512i)rounded);
#else
    return (vu)v_select(a == a, (vf)rounded, (vf)((vu){0} + 0x7fc00000u));
#endif
}

/* The 16-bit encoding of a, rounded to nearest even; NaN stays NaN, subnormals stay. */
V_INLINE vh v_narrow(int dtype, vf a) {
    if (dtype == RAFTER_BF16) {
        const vu high = v_round_bf16(a) >> 16;
#if V_LANES == 16
        return (vh)_mm512_cvtepi32_epi16((__m512i)high);
#elif V_LANES == 8
        return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)high), _mm256_extracti128_si256((__m256i)high, 1));
#else
        return __builtin_convertvector(high, vh);
#endif
    }
#if V_LANES == 16
    return (vh)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif V_LANES == 8
    return (vh)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return __builtin_convertvector(v_to_half_bits(a), vh);
#endif
}

#if V_LANES > 4
/* Two vectors' 16-bit encodings side by side, in one vector register: less work than one at a time. */
V_INLINE vu v_narrow2(int dtype, vf a, vf b) {
#if V_LANES == 16
    if (dtype == RAFTER_BF16) {
        const __m512i high_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                     29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        return (vu)_mm512_permutex2var_epi16((__m512i)v_round_bf16(a), high_halves, (__m512i)v_round_bf16(b));
    }
    return (vu)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)v_narrow(dtype, a)), (__m256i)v_narrow(dtype, b), 1);
#else
    if (dtype == RAFTER_BF16) {
        const __m256i high_a = (__m256i)(v_round_bf16(a) >> 16), high_b = (__m256i)(v_round_bf16(b) >> 16);
        return (vu)_mm256_permute4x64_epi64(_mm256_packus_epi32(high_a, high_b), 0xd8);
    }
    return (vu)_mm256_set_m128i((__m128i)v_narrow(dtype, b), (__m128i)v_narrow(dtype, a));
#endif
}
#endif

V_INLINE void v_store(int dtype, void *p, vf a) {
    if (dtype == RAFTER_F32) {
        memcpy(p, &a, sizeof a);
    } else {
        const vh h = v_narrow(dtype, a);
        memcpy(p, &h, sizeof h);
    }
}

/* Two neighbouring vectors. */
V_INLINE void v_store2(int dtype, void *p, vf a, vf b) {
#if V_LANES > 4
    if (dtype != RAFTER_F32) {
        const vu both = v_narrow2(dtype, a, b);
        memcpy(p, &both, sizeof both);
        return;
    }
#endif
    v_store(dtype, p, a);
    v_store(dtype, (char *)p + V_LANES * v_bytes(dtype), b);
}

/* The first n (at most V_LANES) elements; the other lanes hold `fill`. Reads nothing beyond them. */
V_INLINE vf v_load_part(int dtype, const void *p, int64_t n, float fill) {
#if V_LANES == 16
    const __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (dtype == RAFTER_F32)
        return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p);
    const __m256i h = _mm256_maskz_loadu_epi16(mask, p);
    const __m512 a = dtype == RAFTER_BF16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))
                                          : _mm512_cvtph_ps(h);
    return (vf)_mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), a);
#else
    if (n > V_LANES)
        __builtin_unreachable(); /* or the compiler warns of an overflow below */
    char buffer[V_LANES * 4] = {0};
    memcpy(buffer, p, (size_t)(n * v_bytes(dtype)));
    vf a = v_load(dtype, buffer);
    for (int64_t i = n; i < V_LANES; i++)
        a[i] = fill;
    return a;
#endif
}

V_INLINE void v_store_part(int dtype, void *p, vf a, int64_t n) {
#if V_LANES == 16
    const __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (dtype == RAFTER_F32)
        _mm512_mask_storeu_ps(p, mask, (__m512)a);
    else
        _mm256_mask_storeu_epi16(p, mask, (__m256i)v_narrow(dtype, a));
#else
    char buffer[V_LANES * 4];
    v_store(dtype, buffer, a);
    memcpy(p, buffer, (size_t)(n * v_bytes(dtype)));
#endif
}

/* One element. */
V_INLINE float v_get(int dtype, const void *p) {
    return v_load_part(dtype, p, 1, 0.0f)[0];
}

V_INLINE void v_put(int dtype, void *p, float a) {
    v_store_part(dtype, p, v_set(a), 1);
}

/* Two neighbouring vectors past the caches; p is aligned to V_STREAM bytes. A kernel that streams ends with v_fence().
 */
#define V_STREAM (V_LANES * 4)

V_INLINE void v_stream2(int dtype, void *p, vf a, vf b) {
#if V_LANES == 16
    if (dtype == RAFTER_F32) {
        _mm512_stream_ps(p, (__m512)a);
        _mm512_stream_ps((float *)p + V_LANES, (__m512)b);
    } else {
        _mm512_stream_si512(p, (__m512i)v_narrow2(dtype, a, b));
    }
#elif V_LANES == 8
    if (dtype == RAFTER_F32) {
        _mm256_stream_ps(p, (__m256)a);
        _mm256_stream_ps((float *)p + V_LANES, (__m256)b);
    } else {
        _mm256_stream_si256(p, (__m256i)v_narrow2(dtype, a, b));
    }
#else
    v_store2(dtype, p, a, b);
#endif
}

/* 2 V_LANES neighbouring elements in two vectors, in an order that suits the dtype (bf16: the even ones and the odd
 * ones) and that v_store_pair and v_stream_pair undo: for work that does not mind the order, half the cost of unpacking
 * and packing. */
V_INLINE void v_load_pair(int dtype, const void *p, vf *a, vf *b) {
    if (dtype == RAFTER_BF16) {
        vu both;
        memcpy(&both, p, sizeof both);
        *a = (vf)(both << 16);
        *b = (vf)(both & 0xffff0000u);
    } else {
        *a = v_load(dtype, p);
        *b = v_load(dtype, (const char *)p + V_LANES * v_bytes(dtype));
    }
}

/* Two neighbouring vectors, in the order of memory, from those of a pair; and a pair from them. */
V_INLINE void v_unpair(int dtype, vf *a, vf *b) {
    const vf even = *a, odd = *b;
    if (dtype != RAFTER_BF16)
        return;
#if V_LANES == 16
    *a = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *b = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif V_LANES == 8
    *a = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
    *b = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    *a = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
    *b = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
#endif
}

V_INLINE void v_pair(int dtype, vf *a, vf *b) {
    const vf first = *a, second = *b;
    if (dtype != RAFTER_BF16)
        return;
#if V_LANES == 16
    *a = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *b = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif V_LANES == 8
    *a = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
    *b = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    *a = __builtin_shufflevector(first, second, 0, 2, 4, 6);
    *b = __builtin_shufflevector(first, second, 1, 3, 5, 7);
#endif
}

/* A pair as bf16, rounded to nearest even; quiet NaN (what arithmetic gives) stays NaN, subnormals stay. */
V_INLINE vu v_narrow_pair_bf16(vf a, vf b) {
#if V_LANES > 4
    /* Gathers the halves that stay and the halves that go, 16 bits each, and rounds all at once: the carry out of
     * gone + 0x7fff + (last bit kept) is the top bit of an average. The saturating add keeps NaN from wrapping. */
#if V_LANES == 16
    const __m512i kept = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b);
    const __m512i gone = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, _mm512_slli_epi32((__m512i)b, 16));
    const __m512i sign = _mm512_set1_epi16(-0x8000), last = _mm512_set1_epi16(1), most = _mm512_set1_epi16(0x7ffe);
    const __m512i half = _mm512_or_si512(_mm512_and_si512(kept, last), most);
    const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(gone, half), 15);
    const __m512i magnitude = _mm512_adds_epi16(_mm512_andnot_si512(sign, kept), carry);
    return (vu)_mm512_or_si512(magnitude, _mm512_and_si512(sign, kept));
#else
    const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32((__m256i)a, 16), (__m256i)b, 0xaa);
    const __m256i gone = _mm256_blend_epi16((__m256i)a, _mm256_slli_epi32((__m256i)b, 16), 0xaa);
    const __m256i sign = _mm256_set1_epi16(-0x8000), last = _mm256_set1_epi16(1), most = _mm256_set1_epi16(0x7ffe);
    const __m256i half = _mm256_or_si256(_mm256_and_si256(kept, last), most);
    const __m256i carry = _mm256_srli_epi16(_mm256_avg_epu16(gone, half), 15);
    const __m256i magnitude = _mm256_adds_epi16(_mm256_andnot_si256(sign, kept), carry);
    return (vu)_mm256_or_si256(magnitude, _mm256_and_si256(sign, kept));
#endif
#else
    return v_round_bf16(a) >> 16 | (v_round_bf16(b) & 0xffff0000u);
#endif
}

V_INLINE void v_store_pair(int dtype, void *p, vf a, vf b) {
    if (dtype == RAFTER_BF16) {
        const vu both = v_narrow_pair_bf16(a, b);
        memcpy(p, &both, sizeof both);
    } else {
        v_store2(dtype, p, a, b);
    }
}

/* Past the caches; p is aligned to V_STREAM bytes. */
V_INLINE void v_stream_pair(int dtype, void *p, vf a, vf b) {
#if V_LANES == 16
    if (dtype == RAFTER_BF16)
        _mm512_stream_si512(p, (__m512i)v_narrow_pair_bf16(a, b));
    else
        v_stream2(dtype, p, a, b);
#elif V_LANES == 8
    if (dtype == RAFTER_BF16)
        _mm256_stream_si256(p, (__m256i)v_narrow_pair_bf16(a, b));
    else
        v_stream2(dtype, p, a, b);
#else
    v_store_pair(dtype, p, a, b);
#endif
}

V_INLINE void v_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* ---- y[i] = f(x0[i], x1[i], x2[i]) ----------------------------------------------------------- */

/* Applies f to n elements of up to three inputs of one dtype. `inputs` and f are compile-time constants at the call.
 * With `stream`, whole lines go past the caches. y may be one of the inputs. */
V_INLINE void v_map(int dtype, int inputs, const void *const x[], void *y, int64_t n, bool stream,
                    vf (*f)(const vf in[], const void *env), const void *env) {
    const int64_t bytes = v_bytes(dtype);
    const char *in[3] = {inputs > 0 ? x[0] : NULL, inputs > 1 ? x[1] : NULL, inputs > 2 ? x[2] : NULL};
    char *out = y;
    vf a[3], b[3];
#define V_STEP(count, load, store)                                                                                     \
    do {                                                                                                               \
        for (int k = 0; k < inputs; k++)                                                                               \
            load;                                                                                                      \
        store;                                                                                                         \
        for (int k = 0; k < inputs; k++)                                                                               \
            in[k] += (count)*bytes;                                                                                    \
        out += (count)*bytes;                                                                                          \
        n -= (count);                                                                                                  \
    } while (0)
    if (stream && (uintptr_t)out % (uintptr_t)bytes == 0) {
        while (n > 0 && (uintptr_t)out % V_STREAM != 0) { /* at most twice: a part of up to V_LANES, then the rest */
            int64_t head = (int64_t)(V_STREAM - (uintptr_t)out % V_STREAM) / bytes;
            head = head > V_LANES ? V_LANES : head;
            head = head > n ? n : head;
            V_STEP(head, a[k] = v_load_part(dtype, in[k], head, 0.0f), v_store_part(dtype, out, f(a, env), head));
        }
        while (n >= 2 * V_LANES)
            V_STEP(2 * V_LANES, v_load_pair(dtype, in[k], &a[k], &b[k]),
                   v_stream_pair(dtype, out, f(a, env), f(b, env)));
    }
    while (n >= 2 * V_LANES)
        V_STEP(2 * V_LANES, v_load_pair(dtype, in[k], &a[k], &b[k]), v_store_pair(dtype, out, f(a, env), f(b, env)));
    while (n > 0) {
        const int64_t part = n < V_LANES ? n : V_LANES;
        V_STEP(part, a[k] = v_load_part(dtype, in[k], part, 0.0f), v_store_part(dtype, out, f(a, env), part));
    }
#undef V_STEP
}

/* ---- functions ------------------------------------------------------------------------------- */

/* a * 2^n for integral n, a in [1, 2]; overflows to infinity, underflows through the subnormals to zero. */
V_INLINE vf v_scale(vf a, vf n) {
#if V_LANES == 16
    return (vf)_mm512_scalef_ps((__m512)a, (__m512)n);
#else
    /* NaN passes through both bounds (second operand), and out again through a. */
    n = v_min(v_set(258.0f), v_max(v_set(-300.0f), n));
    const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
    return a * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

V_INLINE vf v_floor(vf a) {
#if V_LANES == 16
    return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif V_LANES == 8
    return (vf)_mm256_floor_ps((__m256)a);
#else
    /* Beyond 2^23 every float is whole already (and NaN and infinity stay themselves). */
    const vi whole = __builtin_convertvector(v_min(v_set(0x1p23f), v_max(v_set(-0x1p23f), a)), vi);
    const vf down = __builtin_convertvector(whole, vf);
    const vf floored = v_select(down > a, down - v_set(1.0f), down);
    const vf magnitude = (vf)((vi)a & 0x7fffffff);
    return v_select(magnitude < v_set(0x1p23f), floored, a);
#endif
}

/* 1 + c1 r + ... + c5 r^5. */
V_INLINE vf v_poly5(vf r, float c1, float c2, float c3, float c4, float c5) {
    vf p = v_fma(v_set(c5), r, v_set(c4));
    p = v_fma(p, r, v_set(c3));
    p = v_fma(p, r, v_set(c2));
    p = v_fma(p, r, v_set(c1));
    return v_fma(p, r, v_set(1.0f));
}

/* 2^t to 3 units in the last place; exact at the limits (-inf -> 0, +inf -> +inf, NaN -> NaN). */
V_INLINE vf v_exp2(vf t) {
#if V_LANES == 16
    /* 2^r on [0, 1), minimax, relative error 8.3e-8; the scaling takes t's floor by itself. */
    const vf r = (vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const vf p = v_poly5(r, 0.693151311808f, 0.240164450136f, 0.055799913146f, 0.00901703028444f, 0.00186713008191f);
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)t);
#else
    /* 2^r on [-1/2, 1/2], minimax, relative error 9.2e-8. Adding 1.5 * 2^23 rounds t to a whole number and leaves that
     * in the low bits. The scaling is done in two halves, whose product under- or overflows in one rounding. NaN
     * passes. */
    t = v_min(v_set(200.0f), v_max(v_set(-200.0f), t));
    const vf magic = v_set(0x1.8p23f), whole = t + magic, r = t - (whole - magic);
    const vf p = v_poly5(r, 0.6931470037f, 0.2402224243f, 0.05550733581f, 0.009671512991f, 0.001326472731f);
    const vu half = (vu)whole << 22 & 0xff800000u, rest = ((vu)whole << 23) - half;
    return p * (vf)(half + 0x3f800000u) * (vf)(rest + 0x3f800000u);
#endif
}

#define V_LOG2E 1.44269504088896340736f

/* e^x to 2 units in the last place. Use v_exp2(x * V_LOG2E), which is cheaper, where an error of |x| * 1e-7 will do. */
V_INLINE vf v_exp(vf x) {
    /* whole = floor(x log2(e)); x - whole ln(2) in two steps, whose first product is exact. */
    const vf bounded = v_min(v_set(90.0f), v_max(v_set(-105.0f), x));
    const vf whole = v_floor(bounded * v_set(V_LOG2E));
    const vf high = v_fma(whole, v_set(-0.693145751953125f), bounded);
    const vf rest = v_fma(whole, v_set(-1.42860682030941723212e-6f), high);
    const vf f = rest * v_set(V_LOG2E);
    vf p = v_fma(v_set(0.000216129149696f), f, v_set(0.00124678464508f)); /* degree 6: relative error 2.0e-9 */
    p = v_fma(p, f, v_set(0.00967545156522f));
    p = v_fma(p, f, v_set(0.0554852806202f));
    p = v_fma(p, f, v_set(0.240229305552f));
    p = v_fma(p, f, v_set(0.693147044443f));
    return v_scale(v_fma(p, f, v_set(1.0f)), whole);
}

/* tanh x to about 2 units in the last place. */
V_INLINE vf v_tanh(vf x) {
    const vf magnitude = (vf)((vi)x & 0x7fffffff);
    const vf s = x * x;
    vf p = v_fma(v_set(-0.00570498795486f), s, v_set(0.0206390881102f));
    p = v_fma(p, s, v_set(-0.05373971535f));
    p = v_fma(p, s, v_set(0.133314422013f));
    p = v_fma(p, s, v_set(-0.333332819421f));
    const vf small = v_fma(x * s, p, x);
    const vf large = v_set(1.0f) - v_set(2.0f) / (v_exp(magnitude + magnitude) + v_set(1.0f));
    const vf signed_large = (vf)((vi)large | ((vi)x & (vi)((vu){0} + 0x80000000u)));
    return v_select(magnitude < v_set(0.625f), small, signed_large);
}

/* Where the row stride within a tensor is not 1: copies n elements of `stride` (in elements) to a compact buffer, and
 * back. */
V_INLINE const void *v_gather(int dtype, const void *p, int64_t stride, int64_t n, void *buffer) {
    if (stride == 1)
        return p;
    if (dtype == RAFTER_F32)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 4, (const char *)p + i * stride * 4, 4);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 2, (const char *)p + i * stride * 2, 2);
    return buffer;
}

V_INLINE void v_scatter(int dtype, const void *buffer, void *p, int64_t stride, int64_t n) {
    if (dtype == RAFTER_F32)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)p + i * stride * 4, (const char *)buffer + i * 4, 4);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)p + i * stride * 2, (const char *)buffer + i * 2, 2);
}

#endif
