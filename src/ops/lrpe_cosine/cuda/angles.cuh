/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sines and cosines for a thread's elements, accurate enough for results that are rounded to T. For 16-bit T nearly
 * all come from a short computation; the few for which it is not accurate enough are computed again.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_ANGLES_CUH
#define RAFTER_LRPE_COSINE_CUDA_ANGLES_CUH

#include "cuda/sincos.cuh"

namespace lrpe {

/* Whether sines and cosines may come from the special-function unit. Its absolute error is up to 2^-21.2 for angles of
 * up to half a turn, and rounding the angle adds 2^-22: together 2^-20.5, however small the sine is. So a sine or
 * cosine of at least UNIT_LEAST is off by at most 0.7 units of bf16: its product, rounded to bf16, is the correctly
 * rounded value or a neighbour of it. One angle in 3,200 has a smaller sine or cosine and is computed again. For fp16
 * it would be one in 400, so that most warps would have to compute some angles again. */
template <typename T> constexpr bool TAKES_UNIT = false;
template <> inline constexpr bool TAKES_UNIT<bf16> = true;
constexpr float UNIT_LEAST = 0x1p-12f;

/* The smaller of |a| and |b|. */
DEVICE float smaller_size(float a, float b) {
    return fminf(fabsf(a), fabsf(b));
}

/* Sine and cosine by the special-function unit: ten instructions instead of the 26 of sincos_short. The position must
 * be below 2^32. Returns the smaller of |sine| and |cosine|. */
DEVICE float sincos_by_unit(const ShortStep step, const Position &position, float *sine, float *cosine) {
    constexpr float RADIANS = 6.28318530717958647693f * 0x1p-32f;
    const unsigned turn = multiply_64x32(step.middle, step.high, position.low).y;
    const float angle = (float)(int)turn * __uint_as_float(__float_as_uint(RADIANS) ^ position.sign);
    *sine = __sinf(angle);
    *cosine = __cosf(angle);
    return smaller_size(*sine, *cosine);
}

/* Returns the given sine and cosine if both are at least `least` in size and the position is short; else those of
 * sincos_short if that is accurate enough, else those of sincos_at. Not inlined, and called for all elements of a
 * thread without branches around the calls: these would cost the kernels registers. */
static __noinline__ __device__ float2 sincos_settled(float theta, const Position position, float least, float sine,
                                                     float cosine) {
    float2 both = {sine, cosine};
    if ((position.low | position.high) == 0) { /* common: the first token of a sequence */
        const float zero = theta * 0.0f;       /* 0, or NaN if theta is not finite */
        return {zero, 1.0f + zero};
    }
    if (is_short(position) && (smaller_size(sine, cosine) >= least ||
                               sincos_short(short_step(theta), position, &both.x, &both.y) >= SHORT_LEAST))
        return both;
    const AngleStep step = angle_step(theta);
    if (position.high == 0)
        sincos_at<false>(step, position, &both.x, &both.y);
    else
        sincos_at<true>(step, position, &both.x, &both.y);
    return both;
}

/* Computes COUNT sines and cosines. The i-th are those of entry(i) of the table at position(i). by_unit: from the
 * special-function unit, unless EXACT, or unless T is not accurate enough for it: see TAKES_UNIT. */
template <bool EXACT, typename T, int COUNT, class Entry, class PositionAt>
DEVICE void angles_at(const AngleTable<T> &table, bool by_unit, Entry entry, PositionAt position, float (&sine)[COUNT],
                      float (&cosine)[COUNT]) {
    if constexpr (!NARROW<T>) {
        unsigned high = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            high |= position(i).high;
        if (high == 0)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                sincos_at<false>(table.at(entry(i)), position(i), &sine[i], &cosine[i]);
        else
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                sincos_at<true>(table.at(entry(i)), position(i), &sine[i], &cosine[i]);
    } else {
        by_unit = by_unit && TAKES_UNIT<T> && !EXACT;
        float least = INFINITY;
        unsigned low = 0, high = 0; /* bitwise or of all positions: enough, because the limit is a power of two */
        const auto each = [&](auto compute) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const Position here = position(i);
                least = fminf(least, compute(table.short_at(entry(i)), here, &sine[i], &cosine[i]));
                low |= here.low;
                high |= here.high;
            }
        };
        if (by_unit)
            each([](auto... a) { return sincos_by_unit(a...); });
        else
            each([](auto... a) { return sincos_short(a...); });
        if (least >= (by_unit ? UNIT_LEAST : SHORT_LEAST) && high == 0 && low < SHORT_POSITION)
            return;
        /* If sincos_short is not accurate enough, its smaller result is below this: r^2 < SHORT_LEAST means that r, the
         * distance from a zero, is below 2^-20 quarter turns. */
        const float enough = by_unit ? UNIT_LEAST : 0x1p-19f;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float2 both = sincos_settled(table.theta_at(entry(i)), position(i), enough, sine[i], cosine[i]);
            sine[i] = both.x;
            cosine[i] = both.y;
        }
    }
}

} // namespace lrpe

#endif
