/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sine and cosine of the exact product position * theta, for an integer position and fp32 theta.
 *
 * theta is converted once to the fraction of a full turn that one position adds, theta / (2 pi)
 * modulo 1, as a 96-bit integer F with a rounding error of at most 2^-97. The angle of position p
 * is F p modulo 2^96: integer multiplication gives it exactly and drops whole turns, however large
 * theta and p are. The error of the angle is
 *
 *     |p| 2^-97 + 2^-64 turns:  4e-19 radians at p = 2^32, 1e-16 at 2^40, 1e-9 at 2^63
 *
 * so position 10^6 is as accurate as position 1, also at zeros of the sine and the cosine. The
 * distance from the nearest quarter turn goes through polynomials in fp32, with an error of 2 units
 * in the last place. Angles below 2^-10 of a quarter turn are too small for fixed point: they are
 * taken from the product in fp32, so that the sine of a tiny angle has all its digits.
 */
#ifndef RAFTER_CUDA_SINCOS_CUH
#define RAFTER_CUDA_SINCOS_CUH

#include "cuda/primitives.cuh"

/* The angle that one position adds. */
struct alignas(16) AngleStep {
    unsigned middle, high, low; /* the fraction of a turn, times 2^96 */
    float quarters;             /* theta / (pi / 2), with whole turns; NaN if theta is not finite */
};

/* 1 / (2 pi) in 32-bit words after the binary point, preceded by five words of 0, which small theta need. */
__constant__ const unsigned inverse_turn[] = {
    0, 0, 0, 0, 0, 0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566, 0x4f10e410, 0x7f9458ea, 0xf7aef158};

/* Five words of it, from `word` on. Those for theta from 2^-41 to 2^22, the usual ones, take no access to memory,
 * because everything in a kernel waits for them. */
DEVICE void inverse_turn_from(int word, unsigned (&words)[5]) {
    const bool later = word == 4;
    if (word == 3 || later) {
        words[0] = 0;
        words[1] = later ? 0x28be60db : 0;
        words[2] = later ? 0x9391054a : 0x28be60db;
        words[3] = later ? 0x7f09d5f4 : 0x9391054a;
        words[4] = later ? 0x7d4d3770 : 0x7f09d5f4;
    } else
#pragma unroll
        for (int i = 0; i < 5; i++)
            words[i] = inverse_turn[word + i];
}

DEVICE AngleStep angle_step(float theta) {
    if (!(fabsf(theta) < INFINITY))
        return {0, 0, 0, NAN};
    /* |theta| = significand * 2^exponent. Bits of 1 / (2 pi) that 2^exponent shifts to whole turns are skipped, by
     * whole words (`word`) and then bits (`shift`). */
    const unsigned bits = __float_as_uint(theta), field = bits >> 23 & 255;
    const unsigned significand = (bits & 0x7fffff) | (field ? 0x800000 : 0);
    const int exponent = (int)(field ? field : 1) - 150, word = (exponent + 160) / 32, shift = (exponent + 160) % 32;

    /* 128 bits of 2^exponent / (2 pi), times the significand, rounded to 96. */
    uint64_t carry = 0;
    unsigned words[5], product[4];
    inverse_turn_from(word, words);
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        carry += (uint64_t)significand * __funnelshift_l(words[i + 1], words[i], shift);
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
    return {middle, high, rest, (float)((double)theta * 0.63661977236758134308)};
}

struct alignas(16) Position {
    unsigned low, high; /* words of the magnitude */
    unsigned sign;      /* as the sign bit of a float */
    float size;         /* the magnitude */
};

DEVICE Position position_of(int64_t n) {
    const uint64_t magnitude = n < 0 ? 0 - (uint64_t)n : (uint64_t)n;
    return {(unsigned)magnitude, (unsigned)(magnitude >> 32), n < 0 ? 0x80000000u : 0u, (float)magnitude};
}

DEVICE int64_t number_of(const Position &position) {
    const uint64_t magnitude = (uint64_t)position.high << 32 | position.low;
    return static_cast<int64_t>(position.sign ? 0 - magnitude : magnitude);
}

/* Sine and cosine of position * theta, to fp32 accuracy. LARGE: the position may be 2^32 or more. */
template <bool LARGE>
DEVICE void sincos_at(const AngleStep step, const Position &position, float *sine, float *cosine) {
    /* The upper 64 bits of the 96-bit product. */
    const uint64_t lower = (uint64_t)step.middle * position.low + __umulhi(step.low, position.low);
    unsigned high = step.high * position.low + (unsigned)(lower >> 32), low = (unsigned)lower;
    if constexpr (LARGE) {
        const uint64_t more = (uint64_t)step.low * position.high + low;
        high += step.middle * position.high + (unsigned)(more >> 32);
        low = (unsigned)more;
    }

    /* The nearest quarter turn (in the upper two bits of `nearest`), and the distance r from it, in quarter turns. */
    const unsigned nearest = high + 0x20000000u;
    const float upper = (float)(int)__funnelshift_l(low, high, 2) * 0x1p-32f;
    const float left = fmaf((float)(low << 2), 0x1p-64f, upper);
    const float plain = position.size * step.quarters;
    const float r = fabsf(plain) >= 0x1p-10f ? left : plain; /* NaN takes plain */

    const float u = r * r;
    /* Minimax polynomials of sin(r pi / 2) / r, with pi / 2 in two parts, and cos(r pi / 2):
     * relative errors 6.5e-9 and 1.1e-10. */
    float s = fmaf(-0x1.2d9af4p-8f, u, 0x1.465f68p-4f);
    s = fmaf(s, u, -0x1.4abbbep-1f);
    s = fmaf(s, u, -0x1.777a5cp-25f);
    s = fmaf(r, 0x1.921fb6p+0f, r * s);
    float c = fmaf(0x1.d9c252p-11f, u, -0x1.55c5e0p-6f);
    c = fmaf(c, u, 0x1.03c1dep-2f);
    c = fmaf(c, u, -0x1.3bd3ccp+0f);
    c = fmaf(c, u, 1.0f);
    /* Odd quarters swap sine and cosine; the sine is negative in quarters 2 and 3, the cosine in
     * 1 and 2. */
    const bool odd = nearest & 0x40000000u;
    *sine = __uint_as_float(__float_as_uint(odd ? c : s) ^ (nearest & 0x80000000u) ^ position.sign);
    *cosine = __uint_as_float(__float_as_uint(odd ? s : c) ^ (nearest + 0x40000000u & 0x80000000u));
}

/* ---- 16-bit results -------------------------------------------------------------------------- */

/* The upper two words of an AngleStep: 64 bits of the fraction of a turn. 0 if theta is not finite. */
struct alignas(8) ShortStep {
    unsigned middle, high;
};

DEVICE ShortStep short_step(float theta) {
    if (!(fabsf(theta) < INFINITY))
        return {0, 0};
    /* As angle_step, without the lowest word, and with a complement instead of a negation: that changes the result by
     * at most one unit in the last place. */
    const unsigned bits = __float_as_uint(theta), field = bits >> 23 & 255, sign = (int)bits >> 31;
    const unsigned significand = (bits & 0x7fffff) | (field ? 0x800000 : 0);
    const unsigned at = (field ? field : 1) + 10, shift = at % 32;
    unsigned words[5];
    inverse_turn_from(at / 32, words);
    uint64_t sum = (uint64_t)significand * __funnelshift_l(words[3], words[2], shift) >> 32;
    sum += (uint64_t)significand * __funnelshift_l(words[2], words[1], shift);
    const unsigned middle = (unsigned)sum;
    const unsigned high = significand * __funnelshift_l(words[1], words[0], shift) + (unsigned)(sum >> 32);
    return {middle ^ sign, high ^ sign};
}

/* sincos_at for results that are rounded to 16 bits, for a position below SHORT_POSITION: relative
 * errors of up to 2.1e-7 in 26 instructions instead of 40. Returns the square of the distance from the
 * nearest quarter turn, in quarter turns. If that is below SHORT_LEAST, which happens once in 500,000
 * angles, the errors are larger and the results are not to be used. */
constexpr unsigned SHORT_POSITION = 1u << 18;
constexpr float SHORT_LEAST = 0x1p-40f;
DEVICE float sincos_short(const ShortStep step, const Position &position, float *sine, float *cosine) {
    /* 64 bits of the fraction of a turn, without the lowest word of the step: 2^-46 turns. */
    const uint2 fraction = multiply_64x32(step.middle, step.high, position.low);
    const unsigned low = fraction.x, turn = fraction.y;
    /* The upper word as a signed distance from the nearest quarter turn, in quarter turns, and the lower
     * word, which adds to it. */
    const float upper = (float)(int)(turn << 2) * 0x1p-32f, r = fmaf((float)low, 0x1p-62f, upper);
    const float u = r * r;
    /* Minimax polynomials: relative errors 3.3e-9 and 3.9e-8. */
    float s = fmaf(-0x1.2d9302p-8f, u, 0x1.465e92p-4f);
    s = fmaf(s, u, -0x1.4abbbap-1f);
    s = fmaf(s, u, 0x1.921fb6p+0f) * r;
    float c = fmaf(-0x1.4e844ap-6f, u, 0x1.03b090p-2f);
    c = fmaf(c, u, -0x1.3bd39cp+0f);
    c = fmaf(c, u, 1.0f);
    /* The nearest quarter turn as in sincos_at; adding the position's sign flips that of the sine. */
    const unsigned nearest = turn + (0x20000000u + position.sign);
    const float2 both = swapped_by_bit_30(nearest, s, c);
    *sine = __uint_as_float(__float_as_uint(both.x) ^ (nearest & 0x80000000u));
    *cosine = __uint_as_float(__float_as_uint(both.y) ^ (turn + 0x60000000u & 0x80000000u));
    return u;
}

DEVICE bool is_short(const Position &position) {
    return position.high == 0 && position.low < SHORT_POSITION;
}

/* Sine and cosine with an absolute error of 2^-21, for a position below 2^32. A quarter of the instructions of
 * sincos_at, for sums in which such an error does not matter. */
DEVICE void sincos_approximate(const ShortStep step, float theta, const Position &position, float *sine,
                               float *cosine) {
    const unsigned turn = step.high * position.low + __umulhi(step.middle, position.low);
    const float angle = (float)(int)turn * (6.28318530717958647693f * 0x1p-32f);
    *sine = __uint_as_float(__float_as_uint(__sinf(angle)) ^ position.sign);
    *cosine = fabsf(theta) < INFINITY ? __cosf(angle) : NAN; /* one NaN is enough to make the sums NaN */
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* A table of angle steps in shared memory, for sines and cosines that are accurate enough to be rounded to T. `memory`
 * is aligned to 16 bytes and has BYTES * entries bytes. */
template <typename T> struct AngleTable {
    static constexpr int BYTES = NARROW<T> ? sizeof(ShortStep) + sizeof(float) : sizeof(AngleStep); /* per entry */
    char *const memory;
    const int entries;

    /* If T is NARROW. */
    DEVICE ShortStep &short_at(int i) const {
        return reinterpret_cast<ShortStep *>(memory)[i];
    }
    DEVICE float &theta_at(int i) const {
        return reinterpret_cast<float *>(memory + entries * sizeof(ShortStep))[i];
    }
    /* If it is not. */
    DEVICE AngleStep &at(int i) const {
        return reinterpret_cast<AngleStep *>(memory)[i];
    }
    DEVICE void put(int i, float theta) const {
        if constexpr (NARROW<T>) {
            short_at(i) = short_step(theta);
            theta_at(i) = theta;
        } else {
            at(i) = angle_step(theta);
        }
    }
};

#endif
