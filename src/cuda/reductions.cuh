/* SPDX-License-Identifier: Apache-2.0 */
/* Sums and maxima over a warp, a part of one, or a block; always in the same order. */
#ifndef RAFTER_CUDA_REDUCTIONS_CUH
#define RAFTER_CUDA_REDUCTIONS_CUH

#include "cuda/primitives.cuh"

DEVICE float warp_max(float a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
    return a;
}

DEVICE float warp_sum(float a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a += __shfl_xor_sync(~0u, a, step);
    return a;
}

DEVICE double warp_sum(double a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a += __shfl_xor_sync(~0u, a, step);
    return a;
}

DEVICE int warp_sum(int a) {
    return __reduce_add_sync(~0u, a);
}

DEVICE double2 warp_sum(double2 a) {
    return make_double2(warp_sum(a.x), warp_sum(a.y));
}

/* The sum over each group of LANES adjacent lanes. */
template <int LANES> DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

/* The sum over all threads of the block. Called by all threads; every thread gets it. After a barrier the compiler knows
 * that warps have converged; otherwise it adds ten instructions per shuffle for warps that have not. */
template <typename A> DEVICE A block_sum(A a) {
    __shared__ A warp_sums[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads(); /* also: all threads have read the previous sum */
    a = warp_sum(a);
    if (lane == 0)
        warp_sums[warp] = a;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? warp_sums[lane] : A{});
}

#endif
