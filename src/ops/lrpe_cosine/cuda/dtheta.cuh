/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtheta, summed in fp64 and always in the same order: first over the tokens of a thread, then over the threads of a
 * block, which gives the moments of a chunk (Tiling::moments), and finally over all chunks by one of the two kernels
 * below.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_DTHETA_CUH
#define RAFTER_LRPE_COSINE_CUDA_DTHETA_CUH

#include "cuda/reductions.cuh"
#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

struct DTheta {
    void *data;
    rafter_dtype dtype;
    int64_t heads, features, stride_h, stride_d; /* of dtheta */
    int64_t all_heads, all_features, chunks;     /* of moments [chunk, H, D] */
    const double *moments;

    DEVICE void store(int64_t h, int64_t d, double sum) const {
        store_number(data, dtype, h * stride_h + d * stride_d, (float)sum);
    }
};

/* dtheta[h, d], a block per element. If theta has one value for all h, or for all d, the sum is also over these. */
static __global__ void __launch_bounds__(THREADS) sum_moments(const DTheta dtheta) {
    __shared__ double sums[THREADS];
    wait_for_previous_kernel();
    const int64_t h = blockIdx.x / dtheta.features, d = blockIdx.x % dtheta.features;
    const int64_t over_h = dtheta.heads == 1 ? dtheta.all_heads : 1,
                  over_d = dtheta.features == 1 ? dtheta.all_features : 1;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < dtheta.chunks * over_h * over_d; i += THREADS) {
        const int64_t from_d = d + i % over_d, from_h = h + i / over_d % over_h, chunk = i / over_d / over_h;
        sum += dtheta.moments[(chunk * dtheta.all_heads + from_h) * dtheta.all_features + from_d];
    }
    sums[threadIdx.x] = sum;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step)
            sums[threadIdx.x] += sums[threadIdx.x + step];
    }
    if (threadIdx.x == 0)
        dtheta.store(h, d, sums[0]);
}

constexpr int ALL_THREADS = WARP * WARP;

/* The same if theta has a value for every h and d. A block takes 32 adjacent elements, a lane each, and its warps share
 * the chunks. */
static __global__ void __launch_bounds__(ALL_THREADS) sum_moments_of_all(const DTheta dtheta) {
    constexpr int AT_ONCE = 8;
    __shared__ double sums[WARP][WARP + 1]; /* [warp][element] */
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t all = dtheta.all_heads * dtheta.all_features, first = int64_t(blockIdx.x) * WARP;
    double sum = 0.0;
    wait_for_previous_kernel();
    if (first + lane < all)
#pragma unroll 1
        for (int64_t chunk = warp; chunk < dtheta.chunks; chunk += AT_ONCE * WARP) {
            double some[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                some[k] =
                    chunk + k * WARP < dtheta.chunks ? dtheta.moments[(chunk + k * WARP) * all + first + lane] : 0;
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                sum += some[k];
        }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane][warp]); /* from here on, a warp per element */
    const int64_t i = first + warp;
    if (lane > 0 || i >= all)
        return;
    const int64_t h = i / dtheta.all_features, d = i - h * dtheta.all_features;
    dtheta.store(h, d, sum);
}

/* Enqueues the last sum. `moments`: [chunk, H, D]. Without chunks, dtheta is 0. */
inline void launch_sum_moments(const rafter_context *context, const lrpe_cosine_call &call, const double *moments,
                               int64_t chunks) {
    const rafter_view &view = call.dtheta;
    const DTheta dtheta = {view.data,      view.dtype,      view.shape[0],   view.shape[1], view.stride[0],
                           view.stride[1], call.x.shape[2], call.x.shape[3], chunks,        moments};
    if (view.numel == 0)
        return;
    const bool all = view.numel == dtheta.all_heads * dtheta.all_features;
    if (all)
        launch(context, {ceil_div(view.numel, int64_t(WARP)), ALL_THREADS}, sum_moments_of_all, dtheta);
    else
        launch(context, {view.numel, THREADS}, sum_moments, dtheta);
}

} // namespace lrpe

#endif
