/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sines and cosines of a thread's elements, for results that are rounded to T. Nearly all come from a
 * short computation; those that it cannot give are computed again.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_ANGLES_CUH
#define RAFTER_LRPE_COSINE_CUDA_ANGLES_CUH

#include "cuda/sincos.cuh"

namespace lrpe {

DEVICE float smaller_size(float a, float b) {
    return fminf(fabsf(a), fabsf(b));
}

/* The given sine and cosine, if both are at least `least` and the position is short; else those of
 * sincos_at. Compiled once, and called for all elements of a thread: branches around the calls took
 * registers from the kernels. */
static __noinline__ __device__ float2 sincos_settled(float theta, const Position position, float least, float sine,
                                                     float cosine) {
    float2 both = {sine, cosine};
    if ((position.low | position.high) == 0) { /* every sequence has such a token */
        const float zero = theta * 0.0f;       /* or NaN */
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

/* The i-th sine and cosine are those of entry(i) of the table at position(i). */
template <typename T, int COUNT, class Entry, class PositionAt>
DEVICE void angles_at(const AngleTable<T> &table, Entry entry, PositionAt position, float (&sine)[COUNT],
                      float (&cosine)[COUNT]) {
    if constexpr (!NARROW<T>) {
        table.sincos(entry, position, sine, cosine);
    } else {
        float least = INFINITY;
        unsigned low = 0, high = 0; /* of all positions; a power of two limits the positions */
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Position here = position(i);
            least = fminf(least, sincos_short(table.short_at(entry(i)), here, &sine[i], &cosine[i]));
            low |= here.low;
            high |= here.high;
        }
        if (least >= SHORT_LEAST && high == 0 && low < SHORT_POSITION)
            return;
        /* If sincos_short is not to be used, the angle is within 2^-20 of a quarter turn from its zero. */
        constexpr float ENOUGH = 0x1p-19f;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float2 both = sincos_settled(table.theta_at(entry(i)), position(i), ENOUGH, sine[i], cosine[i]);
            sine[i] = both.x;
            cosine[i] = both.y;
        }
    }
}

} // namespace lrpe

#endif
