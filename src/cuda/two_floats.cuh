/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers as unevaluated sums of two floats, which hold more digits than one. For logarithms of many short rows, where
 * double costs too much: a conversion from or to double takes as long as eight other instructions.
 */
#ifndef RAFTER_CUDA_TWO_FLOATS_CUH
#define RAFTER_CUDA_TWO_FLOATS_CUH

#include <cfloat>

#include "cuda/primitives.cuh"

struct TwoFloats {
    float high, low; /* low: much smaller than high, but it may exceed half a unit in high's last place */

    DEVICE float rounded() const {
        return high + low;
    }
    DEVICE double number() const {
        return static_cast<double>(high) + low;
    }
};

/* The rounding error of sum = a + b: what must be added to `sum`. Finite numbers only. */
DEVICE float rounded_off(float a, float b, float sum) {
    const float rest = sum - a;
    return (a - (sum - rest)) + (b - rest);
}

DEVICE TwoFloats add_exactly(float a, float b) {
    const float sum = a + b;
    return {sum, rounded_off(a, b, sum)};
}

/* A normal number as 2^exponent (1 + t), with sqrt(0.5) <= 1 + t < sqrt(2). */
struct NearOne {
    float exponent, t;

    DEVICE explicit NearOne(float a) {
        const int bits = __float_as_int(a), k = (bits - 0x3f3504f3) >> 23;
        t = __int_as_float(bits - k * (1 << 23)) - 1.0f;
        exponent = __int_as_float(0x4b400000 + k) - 12582912.0f; /* k, without a conversion instruction */
    }
    /* (log(1 + t) - t + t^2 / 2) / t^3 */
    DEVICE float third_order() const {
        float p = -0.0786012188f;
        p = fmaf(p, t, 0.128813729f);
        p = fmaf(p, t, -0.131284207f);
        p = fmaf(p, t, 0.14181219f);
        p = fmaf(p, t, -0.166245952f);
        p = fmaf(p, t, 0.200022861f);
        p = fmaf(p, t, -0.250008076f);
        return fmaf(p, t, 0.333333164f);
    }
};

/* log(a) with an error of 2^-26. a: 0, a normal number, infinite or NaN; not negative. */
DEVICE TwoFloats log_in_floats(float a) {
    constexpr float LN2_HIGH = 0x1.62cp-1f; /* times an exponent, it is exact */
    constexpr float LN2_LOW = 0x1.217f7ep-12f;
    if (!(a >= FLT_MIN && a < INFINITY))
        return {__logf(a), 0.0f};
    const NearOne near(a);
    const float t = near.t, p = near.third_order();
    const float square = t * t, half = -0.5f * square, first = t + half;
    const float rest = (half - (first - t)) + t * square * p;
    const TwoFloats sum = add_exactly(near.exponent * LN2_HIGH, first);
    return {sum.high, sum.low + fmaf(near.exponent, LN2_LOW, rest)};
}

/* The same as one float, with an error of one unit in the last place. */
DEVICE float log_in_float(float a) {
    if (!(a >= FLT_MIN && a < INFINITY))
        return __logf(a);
    const NearOne near(a);
    return fmaf(near.exponent, LN2, fmaf(near.t * near.t, fmaf(near.t, near.third_order(), -0.5f), near.t));
}

/* a + b, rounded once. Infinite if one of them is, NaN if they are opposite infinities. */
DEVICE float rounded_sum(float a, TwoFloats b) {
    const float sum = a + b.high;
    return fabsf(sum) < INFINITY ? sum + (rounded_off(a, b.high, sum) + b.low) : sum;
}
DEVICE float rounded_sum(float a, float b, TwoFloats c) {
    const float ab = a + b, sum = ab + c.high;
    return fabsf(sum) < INFINITY ? sum + ((rounded_off(a, b, ab) + rounded_off(ab, c.high, sum)) + c.low) : sum;
}

#endif
