/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtheta is summed in fp64, always in the same order: over the tokens of a thread, of a block, and
 * by the kernel below over all blocks.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_DTHETA_CUH
#define RAFTER_LRPE_COSINE_CUDA_DTHETA_CUH

#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

struct DTheta {
    void *data;
    rafter_dtype dtype;
    int64_t heads, features, stride_h, stride_d; /* of dtheta */
    int64_t all_heads, all_features, chunks;     /* of moments [chunk, H, D] */
    const double *moments;
};

/* dtheta[h, d], also summed over all h or all d if theta has one value for all. A block per
 * element. */
static __global__ void __launch_bounds__(THREADS) sum_moments(const DTheta dtheta) {
    __shared__ double sums[THREADS];
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
    if (threadIdx.x == 0) {
        const int64_t at = h * dtheta.stride_h + d * dtheta.stride_d;
        const float value = (float)sums[0];
        if (dtheta.dtype == RAFTER_F32)
            static_cast<float *>(dtheta.data)[at] = value;
        else if (dtheta.dtype == RAFTER_BF16)
            static_cast<bf16 *>(dtheta.data)[at] = from_float<bf16>(value);
        else
            static_cast<fp16 *>(dtheta.data)[at] = from_float<fp16>(value);
    }
}

/* `moments`: of `chunks` chunks. No chunks give zeros. */
inline void launch_sum_moments(const rafter_context *context, const lrpe_cosine_call &call, const double *moments,
                               int64_t chunks) {
    const rafter_view &view = call.dtheta;
    const DTheta dtheta = {view.data,      view.dtype,      view.shape[0],   view.shape[1], view.stride[0],
                           view.stride[1], call.x.shape[2], call.x.shape[3], chunks,        moments};
    if (view.numel > 0)
        launch(context, {view.numel, THREADS}, sum_moments, dtheta);
}

} // namespace lrpe

#endif
