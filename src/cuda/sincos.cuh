/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sine and cosine of position * theta for an integer position and fp32 theta, of the exact product.
 *
 * theta is turned once into the fraction of a full turn that one position adds, theta / (2 pi) modulo 1, as an integer
 * F of 96 bits: exact but for a rounding of 2^-97. A position p is then at F p modulo 2^96, which integer
 * multiplication gives exactly: whole turns drop out by themselves, however large theta and p are. The angle is off by
 *
 *     |p| 2^-97 + 2^-64 turns:  4e-19 radians at p = 2^32, 1e-16 at 2^40, 1e-9 at 2^63
 *
 * so that position 10^6 is as accurate as position 1, at zeros of the sine and cosine too. What is left of the nearest
 * quarter turn goes through polynomials in fp32: 2 units in the last place. Angles too small for fixed point, below
 * 2^-10 of a quarter turn, are taken from the product in fp32, so that the sine of a tiny angle has all its digits.
 */
#ifndef RAFTER_CUDA_SINCOS_CUH
#define RAFTER_CUDA_SINCOS_CUH

#include "cuda/vocabulary.cuh"

/* What one position adds. */
struct alignas(16) Turns {
    unsigned low, middle, high; /* the fraction of a turn, times 2^96 */
    float quarters;             /* theta / (pi / 2): the same as a plain number; NaN if theta is infinite or NaN */
};

/* The words of 1 / (2 pi) behind the binary point, from word -5 on. */
__constant__ const unsigned inverse_turn[] = {
    0, 0, 0, 0, 0, 0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566, 0x4f10e410, 0x7f9458ea, 0xf7aef158};

DEVICE Turns turns_of(float theta) {
    if (!(fabsf(theta) < INFINITY))
        return {0, 0, 0, NAN};
    /* |theta| = significand * 2^exponent. Bits of 1 / (2 pi) that 2^exponent makes whole turns are skipped. */
    const unsigned bits = __float_as_uint(theta), field = bits >> 23 & 255;
    const unsigned significand = (bits & 0x7fffff) | (field ? 0x800000 : 0);
    const int exponent = (int)(field ? field : 1) - 150, word = (exponent + 160) / 32, shift = (exponent + 160) % 32;

    /* 128 bits of 2^exponent / (2 pi), times the significand, rounded to 96. */
    uint64_t carry = 0;
    unsigned product[4];
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        carry += (uint64_t)significand * __funnelshift_l(inverse_turn[word + i + 1], inverse_turn[word + i], shift);
        product[i] = (unsigned)carry;
        carry >>= 32;
    }
    uint64_t low = (uint64_t)product[2] << 32 | product[3];
    unsigned high = product[0], middle = product[1];
    low += 0x80000000u;
    if (low < 0x80000000u && ++middle == 0)
        high++;
    unsigned rest = (unsigned)(low >> 32);
    if (theta < 0) { /* modulo 1 */
        rest = 0 - rest;
        middle = ~middle + (rest == 0);
        high = ~high + (rest == 0 && middle == 0);
    }
    return {rest, middle, high, (float)((double)theta * 0.63661977236758134308)};
}

struct Position {
    unsigned low, high; /* of the magnitude */
    unsigned sign;      /* the sign bit of a float */
    float size;
};

DEVICE Position position_of(int64_t n) {
    const uint64_t magnitude = n < 0 ? 0 - (uint64_t)n : (uint64_t)n;
    return {(unsigned)magnitude, (unsigned)(magnitude >> 32), n < 0 ? 0x80000000u : 0u, (float)magnitude};
}

/* FAR: the position is 2^32 or more. */
template <bool FAR> DEVICE void sincos_at(const Turns turns, const Position &position, float *sine, float *cosine) {
    /* The upper 64 of the 96 bits. */
    const uint64_t lower = (uint64_t)turns.middle * position.low + __umulhi(turns.low, position.low);
    unsigned high = turns.high * position.low + (unsigned)(lower >> 32), low = (unsigned)lower;
    if constexpr (FAR) {
        const uint64_t more = (uint64_t)turns.low * position.high + low;
        high += turns.middle * position.high + (unsigned)(more >> 32);
        low = (unsigned)more;
    }

    /* The nearest quarter turn, and what is left, in quarter turns. */
    const unsigned nearest = high + 0x20000000u;
    const float upper = (float)(int)__funnelshift_l(low, high, 2) * 0x1p-32f;
    const float left = fmaf((float)(low << 2), 0x1p-64f, upper);
    const float plain = position.size * turns.quarters;
    const float r = fabsf(plain) >= 0x1p-10f ? left : plain; /* NaN too */

    const float u = r * r;
    /* sin(r pi / 2) / r and cos(r pi / 2), minimax: relative errors 6.5e-9, with pi / 2 in two parts, and 1.1e-10. */
    float s = fmaf(-0x1.2d9af4p-8f, u, 0x1.465f68p-4f);
    s = fmaf(s, u, -0x1.4abbbep-1f);
    s = fmaf(s, u, -0x1.777a5cp-25f);
    s = fmaf(r, 0x1.921fb6p+0f, r * s);
    float c = fmaf(0x1.d9c252p-11f, u, -0x1.55c5e0p-6f);
    c = fmaf(c, u, 0x1.03c1dep-2f);
    c = fmaf(c, u, -0x1.3bd3ccp+0f);
    c = fmaf(c, u, 1.0f);
    /* Odd quarters swap the two; the sine changes sign in quarters 2 and 3, the cosine in 1 and 2. */
    const bool odd = nearest & 0x40000000u;
    *sine = __uint_as_float(__float_as_uint(odd ? c : s) ^ (nearest & 0x80000000u) ^ position.sign);
    *cosine = __uint_as_float(__float_as_uint(odd ? s : c) ^ (nearest + 0x40000000u & 0x80000000u));
}

/* To 2^-21 of a full swing, however small the sine or cosine is, for a position below 2^32: a quarter of the
 * instructions, for sums that such an error is lost in. */
DEVICE void sincos_roughly(const Turns turns, const Position &position, float *sine, float *cosine) {
    const unsigned turn = turns.high * position.low + __umulhi(turns.middle, position.low);
    const float angle = (float)(int)turn * (6.28318530717958647693f * 0x1p-32f);
    *sine = __uint_as_float(__float_as_uint(__sinf(angle)) ^ position.sign);
    *cosine = turns.quarters == turns.quarters ? __cosf(angle) : NAN; /* the one NaN makes sums with it NaN */
}

/* The same for COUNT entries of a table, `apart` from each other. */
template <int COUNT>
DEVICE void sincos_of(const Turns *turns, int apart, const Position &position, float (&sine)[COUNT],
                      float (&cosine)[COUNT]) {
    if (position.high == 0)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            sincos_at<false>(turns[i * apart], position, &sine[i], &cosine[i]);
    else
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            sincos_at<true>(turns[i * apart], position, &sine[i], &cosine[i]);
}

#endif
