/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic that both variants of scale share. */
#ifndef RAFTER_SCALE_CUDA_TIMES_CUH
#define RAFTER_SCALE_CUDA_TIMES_CUH

#include "cuda/primitives.cuh"

namespace {

/* pack * factor, computed in fp32. */
template <typename T, int N> DEVICE Pack<T, N> times(const Pack<T, N> &pack, float factor) {
    float x[N];
    unpack(pack, x);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] *= factor;
    return packed<T, N>(x);
}

} // namespace

#endif
