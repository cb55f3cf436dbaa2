/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary of the CPU kernels. A kernel is written once and compiled once per ISA
 * level; the compiler flags of the level pick the width. A vector `vf` has V_LANES floats: 16 with
 * AVX-512, 8 with AVX2, 4 with NEON and in portable code. + - * / and comparisons are the compiler's
 * vector extensions. The rest is defined in two layers:
 *
 *   avx512.h, avx2.h, neon.h, portable.h   primitives, one file per kind of vector
 *   simd.h (this file)                     what all share, and fallbacks for single instructions
 *
 * A dtype argument must be a compile-time constant at every call: write kernels as V_INLINE
 * functions that take the dtype, and instantiate them from a switch at the top (see V_FOR_DTYPE).
 *
 * Every such file defines the following constants and the functions below.
 *
 *   V_LANES                   floats in a vector
 *   V_FMA                     1 if v_fma rounds once
 *   V_INT16                   1 if it has v_narrow2 and v16 (below)
 *   V_SPLIT_BF16              1 if v_load_pair splits bf16 into its even and its odd elements
 *   V_NEON                    1 in neon.h
 *
 *   v_set(a)                  a in all lanes
 *   v_fma(a, b, c)            a * b + c, rounded once if V_FMA; v_fma_d: the same for doubles
 *   v_select(mask, a, b)      a where the mask (the result of a comparison) is true, else b
 *   v_bits(mask)              the mask as bits, lane 0 lowest
 *   v_max(a, b), v_min(a, b)  b if either is NaN
 *   v_floor(a)
 *   v_fold_to_quad(a, max)    4 sums or maxima of the lanes: halves are combined until 4 remain
 *   v_widen(dtype, h)         bf16 or fp16 -> fp32
 *   v_narrow(dtype, a)        fp32 -> bf16 or fp16
 *   v_round_bf16(a)           fp32 -> bf16 in the high halves; the low halves are undefined
 *   v_narrow_pair_bf16(a, b)  a pair (see v_load_pair) -> bf16; a signaling NaN may become infinity
 *   v_stream(p, a)            a streaming store; p is aligned to V_STREAM. v_stream_bits: of a vu
 *   v_from_d(low, high)       two vectors of doubles, rounded to one of floats
 *   V_EVEN, V_ODD             shuffle indices: lanes 0, 2, 4 ... or 1, 3, 5 ... of two vectors
 *   V_ZIP_LOW, V_ZIP_HIGH     shuffle indices: two vectors interleaved, first or second half
 *
 * All roundings are to nearest even; NaN stays NaN and subnormals are kept. With V_INT16 there are
 * also the following.
 *
 *   v_narrow2(dtype, a, b)    two vectors narrowed into one register: cheaper than one at a time
 *   v_set_16, v_load_16, v_max_i16, v_min_u16, v_select_negative_16   on vectors v16 of 2 V_LANES
 *                             16-bit integers; v_fold_max_i16, v_fold_min_u16: of all of them
 *
 * Functions below an #if V_LANES < 16 or #if !V_NEON are fallbacks: avx512.h and neon.h define their
 * own.
 */
#ifndef RAFTER_SIMD_H
#define RAFTER_SIMD_H

#if defined(RAFTER_PORTABLE) /* the level "portable", whatever the compiler's flags allow */
#include "simd/portable.h"
#elif defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__aarch64__)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif

/* Runs `statement` with `dtype` bound to a constant: V_FOR_DTYPE(x_dtype, d, kernel(d, x, y)); */
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

/* Defines a function that runs `statement` with `dtype` bound to a constant. Each dtype has a function of its own,
 * because GCC takes more than linear time for large functions:
 *     V_FUNCTION(sum_rows, (const struct block *b, float *to), (b, to), b->dtype, rows(dtype, b, to)) */
#define V_FUNCTION(name, parameters, arguments, value, statement)                                                      \
    static __attribute__((noinline)) void name##_f32 parameters {                                                      \
        enum { dtype = RAFTER_F32 };                                                                                   \
        statement;                                                                                                     \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_bf16 parameters {                                                     \
        enum { dtype = RAFTER_BF16 };                                                                                  \
        statement;                                                                                                     \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_f16 parameters {                                                      \
        enum { dtype = RAFTER_F16 };                                                                                   \
        statement;                                                                                                     \
    }                                                                                                                  \
    static void name parameters {                                                                                      \
        switch (value) {                                                                                               \
        case RAFTER_F32: name##_f32 arguments; break;                                                                  \
        case RAFTER_BF16: name##_bf16 arguments; break;                                                                \
        default: name##_f16 arguments; break;                                                                          \
        }                                                                                                              \
    }

V_INLINE int64_t v_bytes(int dtype) {
    return dtype == RAFTER_F32 ? 4 : 2;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

#if !V_NEON /* NEON has instructions for these */

/* The larger or the smaller. NaN if b is NaN; if only a is NaN, either b or NaN. For clamping, with
 * the bound as a and the value as b: NaN passes. One instruction on every ISA, unlike v_max. */
V_INLINE vf v_max_nan(vf a, vf b) {
    return v_max(a, b);
}

V_INLINE vf v_min_nan(vf a, vf b) {
    return v_min(a, b);
}

#endif

#if V_LANES < 16 /* AVX-512 has instructions for these */

/* a where the sign bit of x is set, b where it is clear. */
V_INLINE vf v_select_negative(vf x, vf a, vf b) {
    return v_select((vi)x >> 31, a, b);
}

/* a where that bit of x (0 to 30) is set, else b. */
V_INLINE vf v_select_bit(vu x, int bit, vf a, vf b) {
    return v_select((vi)(x << (31 - bit)) >> 31, a, b);
}

/* v_bits(a < b) */
V_INLINE unsigned v_bits_less(vf a, vf b) {
    return v_bits(a < b);
}

/* The inverse of v_bits; bits past the lanes are ignored. */
V_INLINE vi v_from_bits(unsigned bits) {
    vi lane;
    for (int i = 0; i < V_LANES; i++)
        lane[i] = 1 << i;
    return ((lane & (int32_t)bits) != 0);
}

/* a * 2^n for integer n and a in [1, 2]. Overflows to infinity, underflows through the subnormals
 * to zero. */
V_INLINE vf v_scale(vf a, vf n) {
    /* If n is NaN, it passes both bounds; the result is NaN because a is. */
    n = v_min_nan(v_set(258.0f), v_max_nan(v_set(-300.0f), n));
    const vi integer = __builtin_convertvector(n, vi), half = integer >> 1;
    return a * (vf)((half + 127) << 23) * (vf)((integer - half + 127) << 23);
}

#endif

/* Sum or maximum of the lanes. The order is fixed: halves are combined until one lane remains. */
V_INLINE float v_fold(vf a, bool max) {
    const v_quad q = v_fold_to_quad(a, max);
    if (!max)
        return (q[0] + q[2]) + (q[1] + q[3]);
    const float even = q[0] > q[2] ? q[0] : q[2], odd = q[1] > q[3] ? q[1] : q[3];
    return even > odd ? even : odd;
}

V_INLINE float v_sum(vf a) {
    return v_fold(a, false);
}

#if !V_NEON /* NEON has an instruction */

V_INLINE float v_hmax(vf a) {
    return v_fold(a, true);
}

#endif

/* ---- loads and stores, any alignment --------------------------------------------------------- */

V_INLINE vf v_load(int dtype, const void *p) {
    if (dtype == RAFTER_F32) {
        vf a;
        memcpy(&a, p, sizeof a);
        return a;
    }
    vh h;
    memcpy(&h, p, sizeof h);
    return v_widen(dtype, h);
}

V_INLINE void v_store(int dtype, void *p, vf a) {
    if (dtype == RAFTER_F32) {
        memcpy(p, &a, sizeof a);
    } else {
        const vh h = v_narrow(dtype, a);
        memcpy(p, &h, sizeof h);
    }
}

/* Stores two adjacent vectors. */
V_INLINE void v_store2(int dtype, void *p, vf a, vf b) {
#if V_INT16
    if (dtype != RAFTER_F32) {
        const vu both = v_narrow2(dtype, a, b);
        memcpy(p, &both, sizeof both);
        return;
    }
#endif
    v_store(dtype, p, a);
    v_store(dtype, (char *)p + V_LANES * v_bytes(dtype), b);
}

#if V_LANES < 16 && !V_NEON /* AVX-512 has masked loads and stores, and NEON has few lanes */

/* Loads the first n (at most V_LANES) elements and nothing past them; the other lanes hold `fill`. */
V_INLINE vf v_load_part(int dtype, const void *p, int64_t n, float fill) {
    if (n > V_LANES)
        __builtin_unreachable(); /* otherwise the compiler warns of an overflow below */
    char buffer[V_LANES * 4] = {0};
    memcpy(buffer, p, (size_t)(n * v_bytes(dtype)));
    vf a = v_load(dtype, buffer);
    for (int64_t i = n; i < V_LANES; i++)
        a[i] = fill;
    return a;
}

V_INLINE void v_store_part(int dtype, void *p, vf a, int64_t n) {
    char buffer[V_LANES * 4];
    v_store(dtype, buffer, a);
    memcpy(p, buffer, (size_t)(n * v_bytes(dtype)));
}

#endif

/* One element. */
V_INLINE float v_get(int dtype, const void *p) {
    return v_load_part(dtype, p, 1, 0.0f)[0];
}

V_INLINE void v_put(int dtype, void *p, float a) {
    v_store_part(dtype, p, v_set(a), 1);
}

/* Streaming stores bypass the caches; p is aligned to V_STREAM bytes. A kernel that streams ends
 * with v_fence(). */
#define V_STREAM (V_LANES * 4)

/* Two adjacent vectors. */
V_INLINE void v_stream2(int dtype, void *p, vf a, vf b) {
#if V_INT16
    if (dtype != RAFTER_F32) {
        v_stream_bits(p, v_narrow2(dtype, a, b));
        return;
    }
    v_stream(p, a);
    v_stream((float *)p + V_LANES, b);
#else
    v_store2(dtype, p, a, b);
#endif
}

V_INLINE void v_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* ---- pairs ----------------------------------------------------------------------------------- */

/* A pair holds 2 V_LANES adjacent elements in two vectors: in the order of memory, or split into the
 * even elements and the odd ones. v_store_pair and v_stream_pair restore the order of memory. Where
 * the order does not matter, splitting halves the cost of unpacking and packing bf16 on x86. */
V_INLINE bool v_is_split(int dtype) {
    return V_SPLIT_BF16 && dtype == RAFTER_BF16;
}

V_INLINE void v_load_pair(int dtype, const void *p, vf *a, vf *b) {
    if (v_is_split(dtype)) {
        vu both;
        memcpy(&both, p, sizeof both);
        *a = (vf)(both << 16);
        *b = (vf)(both & 0xffff0000u);
    } else {
        *a = v_load(dtype, p);
        *b = v_load(dtype, (const char *)p + V_LANES * v_bytes(dtype));
    }
}

/* Reorders a pair to two adjacent vectors in the order of memory. */
V_INLINE void v_unpair(int dtype, vf *a, vf *b) {
    const vf even = *a, odd = *b;
    if (!v_is_split(dtype))
        return;
    *a = __builtin_shufflevector(even, odd, V_ZIP_LOW);
    *b = __builtin_shufflevector(even, odd, V_ZIP_HIGH);
}

/* The inverse of v_unpair. */
V_INLINE void v_pair(int dtype, vf *a, vf *b) {
    const vf first = *a, second = *b;
    if (!v_is_split(dtype))
        return;
    *a = __builtin_shufflevector(first, second, V_EVEN);
    *b = __builtin_shufflevector(first, second, V_ODD);
}

V_INLINE void v_store_pair(int dtype, void *p, vf a, vf b) {
    if (dtype == RAFTER_BF16) {
        const vu both = v_narrow_pair_bf16(a, b);
        memcpy(p, &both, sizeof both);
    } else {
        v_store2(dtype, p, a, b);
    }
}

/* Loads the first n (fewer than 2 V_LANES) elements of a pair and nothing past them; the others are
 * `fill`, which is 0 or infinite. */
V_INLINE void v_load_pair_part(int dtype, const void *p, int64_t n, float fill, vf *a, vf *b) {
#if V_LANES == 16
    if (dtype == RAFTER_BF16) {
        const __mmask32 mask = (1u << n) - 1u;
        int32_t bits;
        memcpy(&bits, &fill, sizeof bits); /* its high half: 0 and the infinities are exact in bf16 */
        const __m512i both = _mm512_mask_loadu_epi16(_mm512_set1_epi16((short)(bits >> 16)), mask, p);
        *a = (vf)((vu)both << 16);
        *b = (vf)((vu)both & 0xffff0000u);
        return;
    }
    *a = v_load_part(dtype, p, n < V_LANES ? n : V_LANES, fill);
    *b = n > V_LANES ? v_load_part(dtype, (const char *)p + V_LANES * v_bytes(dtype), n - V_LANES, fill) : v_set(fill);
#else
    char buffer[2 * V_LANES * 4];
    v_store2(dtype, buffer, v_set(fill), v_set(fill));
    memcpy(buffer, p, (size_t)(n * v_bytes(dtype)));
    v_load_pair(dtype, buffer, a, b);
#endif
}

V_INLINE void v_store_pair_part(int dtype, void *p, vf a, vf b, int64_t n) {
#if V_LANES == 16
    if (dtype == RAFTER_BF16) {
        _mm512_mask_storeu_epi16(p, (1u << n) - 1u, (__m512i)v_narrow_pair_bf16(a, b));
        return;
    }
    v_store_part(dtype, p, a, n < V_LANES ? n : V_LANES);
    if (n > V_LANES)
        v_store_part(dtype, (char *)p + V_LANES * v_bytes(dtype), b, n - V_LANES);
#else
    char buffer[2 * V_LANES * 4];
    v_store_pair(dtype, buffer, a, b);
    memcpy(p, buffer, (size_t)(n * v_bytes(dtype)));
#endif
}

V_INLINE void v_stream_pair(int dtype, void *p, vf a, vf b) {
    if (dtype == RAFTER_BF16)
        v_stream_bits(p, v_narrow_pair_bf16(a, b));
    else
        v_stream2(dtype, p, a, b);
}

/* ---- doubles: two vectors of doubles match one of floats ------------------------------------- */

V_INLINE vd v_set_d(double a) {
    return a - (vd){0};
}

V_INLINE vd v_load_d(const double *p) {
    vd a;
    memcpy(&a, p, sizeof a);
    return a;
}

V_INLINE void v_store_d(double *p, vd a) {
    memcpy(p, &a, sizeof a);
}

#if !V_NEON /* NEON has instructions */

V_INLINE void v_to_d(vf a, vd *low, vd *high) {
    typedef float half_vector __attribute__((vector_size(V_LANES * 2)));
    half_vector half[2];
    memcpy(half, &a, sizeof a);
    *low = __builtin_convertvector(half[0], vd);
    *high = __builtin_convertvector(half[1], vd);
}

#endif

/* The even or odd 32-bit words of two vectors; of doubles: their low or high halves. */
V_INLINE vi v_even_words(vi a, vi b) {
    return __builtin_shufflevector(a, b, V_EVEN);
}

V_INLINE vi v_odd_words(vi a, vi b) {
    return __builtin_shufflevector(a, b, V_ODD);
}

/* ---- y[i] = f(x0[i], x1[i], x2[i]) ----------------------------------------------------------- */

/* Applies f to n elements of up to three inputs of one dtype. `inputs` and f are compile-time
 * constants at the call. With `stream`, whole vectors are written with streaming stores. y may be
 * one of the inputs. */
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
        while (n > 0 && (uintptr_t)out % V_STREAM != 0) { /* at most twice: up to V_LANES elements, then the rest */
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

/* 1 + c1 r + ... + c5 r^5. */
V_INLINE vf v_poly5(vf r, float c1, float c2, float c3, float c4, float c5) {
    vf p = v_fma(v_set(c5), r, v_set(c4));
    p = v_fma(p, r, v_set(c3));
    p = v_fma(p, r, v_set(c2));
    p = v_fma(p, r, v_set(c1));
    return v_fma(p, r, v_set(1.0f));
}

#if V_LANES < 16 /* AVX-512 scales by a power of two in one instruction */

/* 2^t to 3 units in the last place; exact at the limits (-inf -> 0, +inf -> +inf, NaN -> NaN). */
V_INLINE vf v_exp2(vf t) {
    /* 2^r on [-1/2, 1/2] by a minimax polynomial of relative error 9.2e-8. Adding 1.5 * 2^23 rounds
     * t to an integer and leaves it in the low bits. 2^integer is applied as two factors, so that
     * their product overflows or underflows in one rounding. NaN passes the bounds. */
    t = v_min_nan(v_set(200.0f), v_max_nan(v_set(-200.0f), t));
    const vf magic = v_set(0x1.8p23f), whole = t + magic, r = t - (whole - magic);
    const vf p = v_poly5(r, 0.6931470037f, 0.2402224243f, 0.05550733581f, 0.009671512991f, 0.001326472731f);
    const vu half = (vu)whole << 22 & 0xff800000u, rest = ((vu)whole << 23) - half;
    return p * (vf)(half + 0x3f800000u) * (vf)(rest + 0x3f800000u);
}

#endif

#define V_LOG2E 1.44269504088896340736f

/* e^x to 2 units in the last place. v_exp2(x * V_LOG2E) is cheaper: use it where a relative error
 * of 1e-7 * |x| is acceptable. */
V_INLINE vf v_exp(vf x) {
    /* whole = floor(x log2(e)); whole ln(2) is subtracted in two steps, the first one exact. */
    const vf bounded = v_min_nan(v_set(90.0f), v_max_nan(v_set(-105.0f), x));
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

/* ---- strided elements ------------------------------------------------------------------------ */

/* Functions that only move elements depend on their size alone: one function serves all dtypes, and is not inlined. */
V_OUTLINE void v_repeat_bytes(int64_t bytes, const void *p, int64_t n, void *buffer) {
    uint32_t word = 0;
    memcpy(&word, p, (size_t)bytes);
    word |= bytes == 4 ? 0 : word << 16;
    for (int64_t i = 0; i < n * bytes / 4; i++)
        memcpy((char *)buffer + i * 4, &word, 4);
    if (n * bytes % 4)
        memcpy((char *)buffer + (n - 1) * 2, &word, 2);
}

V_OUTLINE void v_gather_bytes(int64_t bytes, const void *p, int64_t stride, int64_t n, void *buffer) {
    if (stride == 0) /* as a case of its own, compilers vectorise it */
        v_repeat_bytes(bytes, p, n, buffer);
    else if (bytes == 4 && stride == 2)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 4, (const char *)p + i * 8, 4);
    else if (bytes == 4)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 4, (const char *)p + i * stride * 4, 4);
    else if (stride == 2)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 2, (const char *)p + i * 4, 2);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)buffer + i * 2, (const char *)p + i * stride * 2, 2);
}

V_OUTLINE void v_scatter_bytes(int64_t bytes, const void *buffer, void *p, int64_t stride, int64_t n) {
    if (bytes == 4)
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)p + i * stride * 4, (const char *)buffer + i * 4, 4);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)p + i * stride * 2, (const char *)buffer + i * 2, 2);
}

/* Copies `rows` rows of n elements into the buffer, one right after another. In p, rows are `pitch` elements apart and
 * columns `step`. May write up to a vector past the last row. */
V_OUTLINE void v_pack_rows(int64_t bytes, const void *p, int64_t pitch, int64_t step, int64_t rows, int64_t n,
                           void *buffer) {
    const int64_t wide = n * bytes, apart = pitch * bytes;
    const char *from = p;
    char *to = buffer;
#define V_PACK_WORDS(count)                                                                                            \
    for (int64_t r = 0; r < rows; r++)                                                                                 \
    memcpy(to + r * (count), from + r * apart, (count))
    if (step != 1) {
        for (int64_t r = 0; r < rows; r++, from += apart, to += wide)
            v_gather_bytes(bytes, from, step, n, to);
    } else if (wide == 4) {
        V_PACK_WORDS(4);
    } else if (wide == 8) {
        V_PACK_WORDS(8);
    } else if (wide == 16) {
        V_PACK_WORDS(16);
    } else {
        /* Whole vectors read past the end of a row. That stays within the next row if it begins at least a vector
         * after this one. What they write too much is overwritten by the next row. */
        const bool whole = apart >= V_LANES * 4;
        for (int64_t r = 0; r < rows; r++, from += apart, to += wide)
            if (whole && r < rows - 1)
                for (int64_t i = 0; i < wide; i += V_LANES * 4)
                    v_store(RAFTER_F32, to + i, v_load(RAFTER_F32, from + i));
            else if (apart >= 16 && r < rows - 1)
                for (int64_t i = 0; i < wide; i += 16)
                    memcpy(to + i, from + i, 16);
            else
                memcpy(to, from, (size_t)wide);
    }
#undef V_PACK_WORDS
}

/* Copies n elements that are `stride` elements apart to a contiguous buffer, and back. v_gather
 * returns the elements: p itself if they are contiguous already. */
V_INLINE const void *v_gather(int dtype, const void *p, int64_t stride, int64_t n, void *buffer) {
    if (stride == 1)
        return p;
    v_gather_bytes(v_bytes(dtype), p, stride, n, buffer);
    return buffer;
}

V_INLINE void v_scatter(int dtype, const void *buffer, void *p, int64_t stride, int64_t n) {
    v_scatter_bytes(v_bytes(dtype), buffer, p, stride, n);
}

#endif
