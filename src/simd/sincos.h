/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sine and cosine of position * theta for an integer position and fp32 theta: of the exact product, so that position
 * 10^6 is as accurate as position 1. The angle is brought to quarter * pi/2 + r with |r| <= pi/4 in double precision;
 * polynomials in fp32 do the rest. Within 1.5 units in the last place, zero crossings included (absolute error 1e-8
 * there at the very worst products, whose distance to a multiple of pi/2 is below what double precision resolves).
 */
#ifndef RAFTER_SIMD_SINCOS_H
#define RAFTER_SIMD_SINCOS_H

#include <math.h>

#include "simd/simd.h"

/* Doubles, as many bytes as vf: two of them go with one vf. */
typedef double vd __attribute__((vector_size(V_LANES * 4)));
typedef float v_half_f __attribute__((vector_size(V_LANES * 2)));

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

V_INLINE vd v_fma_d(vd a, vd b, vd c) {
#if V_LANES == 16
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif V_LANES == 8
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

/* Two vectors of doubles, rounded, in one of floats; and a vector of floats as two of doubles. */
V_INLINE vf v_from_d(vd low, vd high) {
#if V_LANES == 16
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)), _mm512_cvtpd_ps((__m512d)high),
                                  1);
#elif V_LANES == 8
    return (vf)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
#else
    return (vf){(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
#endif
}

V_INLINE void v_to_d(vf a, vd *low, vd *high) {
    v_half_f half[2];
    memcpy(half, &a, sizeof a);
    *low = __builtin_convertvector(half[0], vd);
    *high = __builtin_convertvector(half[1], vd);
}

/* Words 0, 2, 4 ... of two vectors one after the other (of doubles: their low halves), and words 1, 3, 5 ... */
#if V_LANES == 16
#define V_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define V_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif V_LANES == 8
#define V_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define V_ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define V_EVEN 0, 2, 4, 6
#define V_ODD 1, 3, 5, 7
#endif

V_INLINE vi v_even_words(vi a, vi b) {
    return __builtin_shufflevector(a, b, V_EVEN);
}

V_INLINE vi v_odd_words(vi a, vi b) {
    return __builtin_shufflevector(a, b, V_ODD);
}

/* Sine and cosine of quarter * pi/2 + r, |r| <= pi/4; only the low two bits of quarter count. */
V_INLINE void v_sincos_reduced(vf r, vi quarter, vf *sine, vf *cosine) {
    const vf u = r * r;
    /* (sin r - r) / r^3, minimax: relative error of sin 4.0e-9. */
    vf s = v_fma(v_set(-0x1.9952fap-13f), u, v_set(0x1.110776p-7f));
    s = v_fma(s, u, v_set(-0x1.555546p-3f));
    s = v_fma(s, r * u, r);
    /* (cos r - 1) / r^2, minimax: relative error of cos 1.2e-10. */
    vf c = v_fma(v_set(0x1.99e80cp-16f), u, v_set(-0x1.6c0c28p-10f));
    c = v_fma(c, u, v_set(0x1.55554ap-5f));
    c = v_fma(c, u, v_set(-0.5f));
    c = v_fma(c, u, v_set(1.0f));
    /* Odd quarters swap the two; sine changes sign in quarters 2 and 3, cosine in 1 and 2. */
    const vi swap = quarter << 31 >> 31;
    const vi sine_sign = quarter << 30 & INT32_MIN, cosine_sign = (quarter + 1) << 30 & INT32_MIN;
    *sine = (vf)((vi)v_select(swap, c, s) ^ sine_sign);
    *cosine = (vf)((vi)v_select(swap, s, c) ^ cosine_sign);
}

/* Below these bounds the vector code is exact enough: the product with a 24-bit theta fits in a double, and the
 * multiple of pi/2 can be taken off in double precision. */
#define V_SINCOS_POSITION 0x1p29
#if V_LANES > 4
#define V_SINCOS_PRODUCT 0x1p40 /* with fma: pi/2 in two parts of 53 bits */
#else
#define V_SINCOS_PRODUCT 0x1p20 /* without: in three parts, the first two of 33 bits, whose products are exact */
#endif

/* Takes the nearest multiple of pi/2 off a product: returns the rest; the multiple is in the low bits of *quarter. */
V_INLINE vd v_reduce_angle(vd product, vd *quarter) {
    /* Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. */
    const vd magic = v_set_d(0x1.8p52);
    *quarter = v_fma_d(product, v_set_d(0x1.45f306dc9c883p-1), magic);
    const vd multiple = *quarter - magic;
#if V_LANES > 4
    product = v_fma_d(multiple, v_set_d(-0x1.921fb54442d18p+0), product);
    return v_fma_d(multiple, v_set_d(-0x1.1a62633145c07p-54), product);
#else
    product = product - multiple * v_set_d(0x1.921fb544p+0);
    product = product - multiple * v_set_d(0x1.0b4611a6p-34);
    return product - multiple * v_set_d(0x1.3198a2e037073p-69);
#endif
}

/* The same for any product at all, one at a time, in integers: the product times 2/pi, from the first bit of 2/pi that
 * matters. Infinite theta gives NaN. */
static float v_reduce_angle_exactly(float theta, int64_t position, int32_t *quarter) {
    __extension__ typedef unsigned __int128 u128;
    __extension__ typedef __int128 s128;
    static const uint64_t two_over_pi[] = {0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041,
                                           0xfe5163abdebbc561, 0xb7246e3a424dd2e0};
    *quarter = 0;
    const double rounded = (double)theta * (double)position;
    if (!(fabs(rounded) > 0.75) || isinf(theta))
        return isinf(theta) ? NAN : (float)rounded; /* there is nothing to take off */

    /* |position * theta| = m * 2^e */
    uint32_t bits;
    memcpy(&bits, &theta, 4);
    const int field = bits >> 23 & 255, e = (field ? field : 1) - 150;
    const uint64_t significand = (bits & 0x7fffff) | (field ? 0x800000u : 0);
    const u128 m = (u128)significand * (position < 0 ? 0 - (uint64_t)position : (uint64_t)position);

    /* Bit k of 2/pi weighs 2^-k: those with e - k >= 2 only add multiples of four quarters. Then 192 bits are enough.
     */
    const int skip = e > 2 ? e - 2 : 0;
    uint64_t window[3];
    for (int i = 0; i < 3; i++) {
        const int word = skip / 64 + i, shift = skip % 64;
        window[i] = two_over_pi[word] << shift | (shift ? two_over_pi[word + 1] >> (64 - shift) : 0);
    }
    uint64_t product[6] = {0}; /* m * window, least word first, in units of 2^(e - skip - 192) */
    for (int j = 0; j < 2; j++) {
        const uint64_t factor = (uint64_t)(m >> (64 * j));
        u128 carry = 0;
        for (int i = 0; i < 3; i++) {
            carry += (u128)factor * window[2 - i] + product[i + j];
            product[i + j] = (uint64_t)carry;
            carry >>= 64;
        }
        product[3 + j] = (uint64_t)carry;
    }
    /* The quarters modulo 4, in units of 2^-126. (The product is above 0.75 and m below 2^87, so e is above -88 and the
     * words read are there.) */
    const int drop = 192 + skip - e - 126, word = drop / 64, shift = drop % 64;
    u128 quarters = (u128)product[word + 1] << 64 | product[word];
    if (shift)
        quarters = quarters >> shift | (u128)product[word + 2] << (128 - shift);
    const int32_t nearest = (int32_t)((quarters + ((u128)1 << 125)) >> 126);
    const double rest = (double)(s128)(quarters << 2) * (0x1p-128 * 0x1.921fb54442d18p+0);
    const bool negative = (theta < 0) != (position < 0);
    *quarter = negative ? -nearest : nearest;
    return (float)(negative ? -rest : rest);
}

/* n sines and cosines of position * theta[i]. n is a multiple of V_LANES; theta holds fp32 values, none above `largest`
 * in magnitude (which is infinite if any is infinite or NaN). */
V_INLINE void v_sincos_row(const double *theta, double largest, int64_t position, int64_t n, float *sine,
                           float *cosine) {
    const double p = (double)position;
    if (fabs(p) < V_SINCOS_POSITION && fabs(p) * largest < V_SINCOS_PRODUCT) {
        for (int64_t i = 0; i < n; i += V_LANES) {
            vd low_quarter, high_quarter;
            const vd low = v_reduce_angle(v_load_d(theta + i) * v_set_d(p), &low_quarter);
            const vd high = v_reduce_angle(v_load_d(theta + i + V_LANES / 2) * v_set_d(p), &high_quarter);
            vf s, c;
            v_sincos_reduced(v_from_d(low, high), v_even_words((vi)low_quarter, (vi)high_quarter), &s, &c);
            v_store(RAFTER_F32, sine + i, s);
            v_store(RAFTER_F32, cosine + i, c);
        }
        return;
    }
    for (int64_t i = 0; i < n; i += V_LANES) {
        vf r, s, c;
        vi quarter;
        for (int k = 0; k < V_LANES; k++) {
            int32_t q;
            r[k] = v_reduce_angle_exactly((float)theta[i + k], position, &q);
            quarter[k] = q;
        }
        v_sincos_reduced(r, quarter, &s, &c);
        v_store(RAFTER_F32, sine + i, s);
        v_store(RAFTER_F32, cosine + i, c);
    }
}

#endif
