/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of one block, for basic calls: the factor of all gradients, and the sum of losses, one per row
 * in the workspace. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_SUM_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_SUM_CUH

#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

constexpr int ONE_BLOCK = 512; /* threads of a kernel of one block */

/* U: BasicArgs or SpacedArgs. */
template <class U>
__global__ __launch_bounds__(ONE_BLOCK) void compute_factor(const __grid_constant__ U u, double *factor) {
    start_next_kernel();
    const double value = u.weighs && u.needs_totals()
                             ? u.divided_upstream(block_sum(add_weights(u, threadIdx.x, ONE_BLOCK)))
                             : u.template factor<ONE_BLOCK>();
    if (threadIdx.x == 0)
        *factor = value;
}

/* Writes the loss of all rows. U: BasicArgs or SpacedArgs. */
template <class U> __global__ __launch_bounds__(ONE_BLOCK) void sum_losses(const __grid_constant__ U u) {
    constexpr int AT_ONCE = 8;
    const int counted = u.mean ? u.template count<ONE_BLOCK>() : 0;
    wait_for_previous_kernel();
    double sum = 0.0;
    for (int first = threadIdx.x; first < u.rows; first += AT_ONCE * ONE_BLOCK) {
        double loss[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            loss[k] = __ldcg(&u.losses[min(first + k * ONE_BLOCK, u.rows - 1)]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            sum += first + k * ONE_BLOCK < u.rows ? loss[k] : 0.0;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        u.write_loss(sum, counted);
}

} // namespace

#endif
