/* SPDX-License-Identifier: Apache-2.0 */
/* For basic calls (basic.cuh) with any number of rows: the kernel that computes the factor that all gradients
 * share, before the kernel that writes the gradients; and the workspace of such calls. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH

#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

constexpr int COUNT_BLOCKS = 256, COUNT_THREADS = 512; /* blocks: at most */
static_assert(COUNT_BLOCKS <= COUNT_THREADS, "one block adds up the sums of all");

/* Writes the factor of all gradients: dloss over the denominator. With more than one block it adds up the
 * weights of the rows, or counts those that are not ignored; the last block to finish adds up the sums. With
 * one block the denominator is no such sum. U: BasicArgs or SpacedArgs. */
template <class U>
__global__ __launch_bounds__(COUNT_THREADS) void write_factor(const __grid_constant__ U u, double *sums,
                                                              double *factor) {
    wait_for_inputs();
    start_next_kernel();
    double weight = 0.0;
    if (gridDim.x > 1) {
        const int64_t own = blockIdx.x * COUNT_THREADS + threadIdx.x;
        weight = block_sum(add_weights(u, own, gridDim.x * int64_t(COUNT_THREADS)));
        if (threadIdx.x == 0)
            sums[blockIdx.x] = weight;
        if (!block_arrives_last(u.counter, gridDim.x))
            return;
        weight = block_sum(threadIdx.x < gridDim.x ? __ldcg(sums + threadIdx.x) : 0.0);
    }
    if (threadIdx.x == 0)
        *factor = u.divided_upstream(weight);
}

/* Blocks of write_factor. */
inline int64_t count_blocks(const BasicArgs &u) {
    return !u.needs_totals() ? 1 : u.rows >= 1 << 22 ? COUNT_BLOCKS : COUNT_BLOCKS / 2;
}

/* What these calls have in the workspace: loss and weight of each block, and what write_factor writes. */
struct BasicWorkspace {
    size_t losses, sums, factor; /* offsets */

    /* Returns the bytes. loss_blocks: 0 if no loss is wanted. */
    size_t place(int64_t loss_blocks, bool gradient) {
        WorkspaceLayout layout;
        losses = layout.add(loss_blocks * int64_t(sizeof(double2)));
        sums = layout.add(gradient ? COUNT_BLOCKS * int64_t(sizeof(double)) : 0);
        factor = layout.add(gradient ? int64_t(sizeof(double)) : 0);
        return layout.bytes;
    }
    /* Tells args where the losses are, enqueues write_factor if a gradient is wanted, and returns where the
     * factor will be. */
    template <class U>
    const double *start(const rafter_context *context, bool gradient, U *args, char *workspace) const {
        double *const factor_at = at_offset<double>(workspace, factor);
        args->losses = at_offset<double>(workspace, losses);
        if (gradient)
            ::launch(context, Launch{count_blocks(*args), COUNT_THREADS}, write_factor<U>, *args,
                     at_offset<double>(workspace, sums), factor_at);
        return factor_at;
    }
};

} // namespace

#endif
