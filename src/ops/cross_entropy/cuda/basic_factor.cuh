/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before gradients of basic calls (basic.cuh) with any number of rows, which writes their common
 * factor; and the workspace of such calls. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH

#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

constexpr int COUNT_BLOCKS = 128, COUNT_THREADS = 512;

/* Writes the factor of all gradients: dloss over the denominator. With more than one block it
 * counts the labels that are not ignored; the last block to finish adds up the counts. One block:
 * the denominator is not a count. U: BasicArgs or SpacedArgs. */
template <class U>
__global__ __launch_bounds__(COUNT_THREADS) void write_factor(const __grid_constant__ U u, int *counts,
                                                              double *factor) {
    start_next_kernel();
    int counted = 0;
    if (gridDim.x > 1) {
        const int step = gridDim.x * COUNT_THREADS;
        for (int64_t row = blockIdx.x * COUNT_THREADS + threadIdx.x; row < u.rows; row += step)
            counted += u.load_label(u.label_at(static_cast<int>(row))) != u.ignore_index;
        counted = block_sum(counted);
        if (threadIdx.x == 0)
            counts[blockIdx.x] = counted;
        if (!block_arrives_last(u.counter, gridDim.x))
            return;
        counted = block_sum(threadIdx.x < gridDim.x ? __ldcg(counts + threadIdx.x) : 0);
    }
    if (threadIdx.x == 0)
        *factor = (u.dloss ? *u.dloss : 1.0f) / u.divisor(counted);
}

/* Blocks of write_factor. */
inline int64_t count_blocks(const BasicArgs &u) {
    return u.mean && !u.denominator ? COUNT_BLOCKS : 1;
}

/* What these calls have in the workspace: a loss for each block, and what write_factor writes. */
struct BasicWorkspace {
    size_t losses, counts, factor; /* offsets */

    /* Returns the bytes. loss_blocks: 0 if no loss is wanted. */
    size_t place(int64_t loss_blocks, bool gradient) {
        WorkspaceLayout layout;
        losses = layout.add(loss_blocks * int64_t(sizeof(double2)));
        counts = layout.add(gradient ? COUNT_BLOCKS * int64_t(sizeof(int)) : 0);
        factor = layout.add(gradient ? int64_t(sizeof(double)) : 0);
        return layout.bytes;
    }
    /* Tells args where the losses are, enqueues write_factor if a gradient is wanted, and returns where the
     * factor will be. */
    template <class U> const double *start(LaunchSequence &sequence, bool gradient, U *args, char *workspace) const {
        double *const factor_at = at_offset<double>(workspace, factor);
        args->losses = at_offset<double>(workspace, losses);
        if (gradient)
            sequence.run(Launch{count_blocks(*args), COUNT_THREADS}, write_factor<U>, *args,
                         at_offset<int>(workspace, counts), factor_at);
        return factor_at;
    }
};

} // namespace

#endif
