/* SPDX-License-Identifier: Apache-2.0 */
/* For from_lse.cu and two_pass.cu: the kernel that writes gradients from coefficients. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_GRADIENTS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_GRADIENTS_CUH

#include "ops/cross_entropy/cuda/general.cuh"

namespace {

/* `parts` blocks per row, with GRADIENT_PACKS packs per thread. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(GRADIENT_THREADS,
                             OPTIONS == FULL ? 8 : 12) void gradients(const __grid_constant__ Args c,
                                                                      const RowCoefficients *coefficients,
                                                                      unsigned parts) {
    constexpr int N = WIDE<T>;
    const unsigned row = blockIdx.x / parts, part = blockIdx.x - row * parts;
    const AlignedSpan<const T> span(c.z.at<const T>(row), c.loss.classes);
    const int64_t first = part * int64_t(GRADIENT_THREADS * GRADIENT_PACKS) + threadIdx.x;
    Pack<T, N> packs[GRADIENT_PACKS];
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * GRADIENT_THREADS < span.packs)
            packs[k] = load_once<T, N>(span.body + (first + k * GRADIENT_THREADS) * N);
    T *const dz = c.dz.at<T>(row);
    wait_for_previous_kernel();
    const RowCoefficients own = coefficients[row];
    const RowWriter<OPTIONS, T> writer(own.gradient, own.label, c.loss);
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * GRADIENT_THREADS < span.packs) {
            const int64_t at = span.head + (first + k * GRADIENT_THREADS) * N;
            store_once<T, N>(dz + at, writer.of(packs[k], at));
        }
    if (part == 0)
        writer.write_edges(dz, span, threadIdx.x, GRADIENT_THREADS);
}

} // namespace

#endif
