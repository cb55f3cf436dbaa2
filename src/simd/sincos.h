/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sine and cosine of position * theta for an integer position and fp32 theta. The product is exact,
 * so position 10^6 is as accurate as position 1. The angle is reduced to quarter * pi/2 + r with
 * |r| <= pi/4 in double precision; fp32 polynomials in r follow. The error is at most 1.5 units in
 * the last place, also near zero crossings. Only products that are closer to a multiple of pi/2
 * than double precision resolves have a larger one: up to 1e-8, absolute.
 */
#ifndef RAFTER_SIMD_SINCOS_H
#define RAFTER_SIMD_SINCOS_H

#include <math.h>

#include "simd/simd.h"

/* Sine and cosine of quarter * pi/2 + r, |r| <= pi/4. Only the low two bits of quarter are used. */
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

/* Below these bounds the vector code is exact enough: the product of the position and a 24-bit
 * theta fits in a double, and the multiple of pi/2 can be subtracted in double precision. */
#define V_SINCOS_POSITION 0x1p29
#if V_FMA
#define V_SINCOS_PRODUCT 0x1p40 /* pi/2 in two parts of 53 bits */
#else
#define V_SINCOS_PRODUCT 0x1p20 /* pi/2 in three parts; the first two have 33 bits, so that their products are exact */
#endif

/* Subtracts the nearest multiple of pi/2 from a product and returns the rest. The multiple is in
 * the low bits of *quarter. */
V_INLINE vd v_reduce_angle(vd product, vd *quarter) {
    /* Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. */
    const vd magic = v_set_d(0x1.8p52);
    *quarter = v_fma_d(product, v_set_d(0x1.45f306dc9c883p-1), magic);
    const vd multiple = *quarter - magic;
#if V_FMA
    product = v_fma_d(multiple, v_set_d(-0x1.921fb54442d18p+0), product);
    return v_fma_d(multiple, v_set_d(-0x1.1a62633145c07p-54), product);
#else
    product = product - multiple * v_set_d(0x1.921fb544p+0);
    product = product - multiple * v_set_d(0x1.0b4611a6p-34);
    return product - multiple * v_set_d(0x1.3198a2e037073p-69);
#endif
}

/* The same for a product of any size, one at a time, in integer arithmetic: multiplies the product
 * by 2/pi, beginning at the first bit of 2/pi that matters. An infinite theta gives NaN. */
static float v_reduce_angle_exactly(float theta, int64_t position, int32_t *quarter) {
    __extension__ typedef unsigned __int128 u128;
    __extension__ typedef __int128 s128;
    static const uint64_t two_over_pi[] = {0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041,
                                           0xfe5163abdebbc561, 0xb7246e3a424dd2e0};
    *quarter = 0;
    const double rounded = (double)theta * (double)position;
    if (!(fabs(rounded) > 0.75) || isinf(theta))
        return isinf(theta) ? NAN : (float)rounded; /* already reduced */

    /* |position * theta| = m * 2^e */
    uint32_t bits;
    memcpy(&bits, &theta, 4);
    const int field = bits >> 23 & 255, e = (field ? field : 1) - 150;
    const uint64_t significand = (bits & 0x7fffff) | (field ? 0x800000u : 0);
    const u128 m = (u128)significand * (position < 0 ? 0 - (uint64_t)position : (uint64_t)position);

    /* Bit k of 2/pi weighs 2^-k. Bits with e - k >= 2 only add multiples of four quarters and are
     * skipped; the next 192 bits are enough. */
    const int skip = e > 2 ? e - 2 : 0;
    uint64_t window[3];
    for (int i = 0; i < 3; i++) {
        const int word = skip / 64 + i, shift = skip % 64;
        window[i] = two_over_pi[word] << shift | (shift ? two_over_pi[word + 1] >> (64 - shift) : 0);
    }
    uint64_t product[6] = {0}; /* m * window, lowest word first, in units of 2^(e - skip - 192) */
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
    /* The quarters modulo 4, in units of 2^-126. The product is above 0.75 and m below 2^87, so e
     * is above -88 and all words read below are within product[]. */
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

/* Computes the sine and cosine of position * theta[i] for i in [0, n). n is a multiple of V_LANES.
 * theta holds fp32 values; `largest` bounds their magnitudes, and is infinite if any of them is
 * infinite or NaN. */
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

/* ---- results that are rounded to 16 bits ----------------------------------------------------- */

#if V_FMA

typedef uint64_t vul __attribute__((vector_size(V_LANES * 4))); /* as many as a vd has doubles */

/* Below these bounds the vector code is exact enough: a step is off by at most 2^-64 turns, and by the
 * position times that at the angle. */
#define V_TURN_POSITION 0x1p26
#define V_TURN_THETA 0x1p20

/* The fraction of a turn that one position adds, theta / (2 pi) modulo 1, times 2^64. */
V_INLINE vul v_turn_step(vd theta) {
    /* 1 / (2 pi) in two parts. `turns` is rounded, `lost` is what that took away. */
    const vd one = v_set_d(0x1.45f306dc9c883p-3), two = v_set_d(-0x1.6b01ec5417056p-57);
    const vd turns = theta * one, lost = v_fma_d(theta, two, v_fma_d(theta, one, -turns));
    /* Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. All differences are exact. */
    const vd magic = v_set_d(0x1.8p52), word = v_set_d(0x1p32);
    const vd fraction = turns - ((turns + magic) - magic), upper = v_fma_d(fraction, word, magic);
    const vd rest = v_fma_d(fraction, word, magic - upper), lower = v_fma_d(v_fma_d(lost, word, rest), word, magic);
    return (((vul)upper - (vul)magic) << 32) + ((vul)lower - (vul)magic);
}

/* Replaces the sines and cosines of the lanes in `lanes`. */
static __attribute__((noinline)) void v_sincos_lanes(const double *theta, double largest, int64_t position,
                                                     unsigned lanes, float *sine, float *cosine) {
    float s[V_LANES], c[V_LANES];
    v_sincos_row(theta, largest, position, V_LANES, s, c);
    for (int k = 0; k < V_LANES; k++)
        if (lanes >> k & 1) {
            sine[k] = s[k];
            cosine[k] = c[k];
        }
}

/*
 * Sines and cosines for positions from `position` on, `rows` of them, as v_sincos_row computes them but with
 * a relative error of up to 4e-5, and 3e-7 where they are not small. `step` has v_turn_step of theta. Results
 * are n floats from row to row.
 *
 * Angles are 64-bit fractions of a turn, which wrap around; from row to row one step is added. The upper 32 bits are
 * the angle to 2^-33 turns. The nearest quarter turn is split off; polynomials of the distance from it follow. Where
 * the distance is so small that its last bit counts, both results come from v_sincos_row: once in 30,000 angles, and at
 * position 0.
 */
V_INLINE void v_sincos_rows(const double *theta, const uint64_t *step, double largest, int64_t position, int64_t rows,
                            int64_t n, float *sine, float *cosine) {
    /* The positions of rows [from, to) are within the bound. It is tested row by row, so that a row's bits do not
     * depend on the position that a call begins with. */
    const double p = (double)position, bound = largest < V_TURN_THETA ? V_TURN_POSITION : 0.0;
    const int64_t from = (int64_t)fmin(fmax(1.0 - bound - p, 0.0), (double)rows);
    const int64_t to = (int64_t)fmin(fmax(bound - p, (double)from), (double)rows);
    for (int64_t r = 0; r < rows; r++)
        if (r < from || r >= to)
            v_sincos_row(theta, largest, position + r, n, sine + r * n, cosine + r * n);
    for (int64_t i = 0; i < n; i += V_LANES) {
        vul step_low, step_high;
        memcpy(&step_low, step + i, sizeof step_low);
        memcpy(&step_high, step + i + V_LANES / 2, sizeof step_high);
        const uint64_t first = (uint64_t)(position + from);
        vul low = step_low * first + 0x80000000u, high = step_high * first + 0x80000000u;
        for (int64_t r = from; r < to; r++, low += step_low, high += step_high) {
            const vu turn = (vu)v_odd_words((vi)low, (vi)high), nearest = turn + 0x20000000u;
            const vf d = __builtin_convertvector((vi)(turn << 2), vf) * v_set(0x1p-32f), u = d * d;
            /* Minimax polynomials of sin(d pi / 2) and cos(d pi / 2): relative errors 3.3e-9 and 3.9e-8. */
            vf s = v_fma(v_set(-0x1.2d9302p-8f), u, v_set(0x1.465e92p-4f));
            s = v_fma(s, u, v_set(-0x1.4abbbap-1f));
            s = v_fma(s, u, v_set(0x1.921fb6p+0f)) * d;
            vf c = v_fma(v_set(-0x1.4e844ap-6f), u, v_set(0x1.03b090p-2f));
            c = v_fma(c, u, v_set(-0x1.3bd39cp+0f));
            c = v_fma(c, u, v_set(1.0f));
            /* As in v_sincos_reduced. */
            const vu sign = (vu){0} + 0x80000000u;
            float *const to_sine = sine + r * n + i, *const to_cosine = cosine + r * n + i;
            v_store(RAFTER_F32, to_sine, (vf)((vu)v_select_bit(nearest, 30, c, s) ^ (nearest & sign)));
            v_store(RAFTER_F32, to_cosine,
                    (vf)((vu)v_select_bit(nearest, 30, s, c) ^ ((nearest + 0x40000000u) & sign)));
            const unsigned close = v_bits_less(u, v_set(0x1p-32f));
            if (__builtin_expect(close != 0, 0))
                v_sincos_lanes(theta + i, largest, position + r, close, to_sine, to_cosine);
        }
    }
}

#endif

#endif
