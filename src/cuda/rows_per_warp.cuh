/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows of whole packs, several to a warp: LANES lanes share a row, each has PACKS of its packs, and a warp
 * takes 32 / LANES rows at a time, in up to LANES steps. So every lane can finish one row.
 */
#ifndef RAFTER_CUDA_ROWS_PER_WARP_CUH
#define RAFTER_CUDA_ROWS_PER_WARP_CUH

#include <type_traits>

#include "cuda/launch.cuh"

/* Rows that a lane loads before it uses the first: 8 packs. */
template <int LANES, int PACKS> constexpr int BATCH = 8 / PACKS < LANES ? 8 / PACKS : LANES;

/* Calls f(std::integral_constant<int, LANES>(), std::integral_constant<int, PACKS>()) for rows of 3 to 64 packs. */
template <typename F> void for_lanes_and_packs(int packs, F f) {
    typedef std::integral_constant<int, 1> One;
    typedef std::integral_constant<int, 2> Two;
    typedef std::integral_constant<int, 4> Four;
    typedef std::integral_constant<int, 8> Eight;
    typedef std::integral_constant<int, 16> Sixteen;
    packs <= 4    ? f(Four(), One())
    : packs <= 8  ? f(Eight(), One())
    : packs <= 16 ? f(Eight(), Two())
    : packs <= 32 ? f(Sixteen(), Two())
                  : f(Sixteen(), Four());
}

/* Steps of a warp, a multiple of BATCH: fewer than LANES, if there would be less than `enough` warps. */
template <int LANES, int PACKS> int steps_of_warp(int64_t rows, int64_t enough) {
    int steps = LANES;
    while (steps > BATCH<LANES, PACKS> && rows < enough * (WARP / LANES) * steps)
        steps /= 2;
    return steps;
}

#endif
