/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows of whole packs, several to a warp. LANES lanes share a row and have up to PACKS packs each, so that a warp
 * reduces 32 / LANES rows in one step. After up to LANES steps it has the statistics of up to 32 rows, and each lane
 * finishes one of them.
 */
#ifndef RAFTER_CUDA_ROWS_PER_WARP_CUH
#define RAFTER_CUDA_ROWS_PER_WARP_CUH

#include <type_traits>

#include "cuda/launch.cuh"

/* Steps whose packs a lane loads before it uses the first one: 8 packs, or all. */
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

/* Steps per warp, a multiple of BATCH: LANES, or fewer if the grid would have less than `enough` warps. */
template <int LANES, int PACKS> int steps_of_warp(int64_t rows, int64_t enough) {
    int steps = LANES;
    while (steps > BATCH<LANES, PACKS> && rows < enough * (WARP / LANES) * steps)
        steps /= 2;
    return steps;
}

#endif
