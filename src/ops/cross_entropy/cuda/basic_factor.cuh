/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel before gradients of basic calls (basic.cuh) with any number of rows, which writes their common
 * factor; and the workspace of such calls. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_FACTOR_CUH

#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

constexpr int COUNT_BLOCKS = 128, COUNT_THREADS = 512;

/* The sum of the weights of this thread's share of the rows. */
template <class U> DEVICE double add_weights(const U &u) {
    constexpr int AT_ONCE = 8; /* labels in flight, and then weights: left to itself, the compiler waits for each */
    const int step = gridDim.x * COUNT_THREADS;
    double weight = 0.0;
    for (int64_t first = blockIdx.x * COUNT_THREADS + threadIdx.x; first < u.rows; first += AT_ONCE * int64_t(step)) {
        int64_t label[AT_ONCE];
        double own[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t row = first + k * int64_t(step);
            label[k] = row < u.rows ? u.load_label(u.label_at(static_cast<int>(row))) : u.ignore_index;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            own[k] = u.weight_of(u.class_of(label[k]));
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            weight += own[k];
    }
    return weight;
}

/* Writes the factor of all gradients: dloss over the denominator. With more than one block it adds up the
 * weights of the rows, or counts those that are not ignored; the last block to finish adds up the sums. One
 * block: the denominator is not such a sum. U: BasicArgs or SpacedArgs. */
template <class U>
__global__ __launch_bounds__(COUNT_THREADS) void write_factor(const __grid_constant__ U u, double *sums,
                                                              double *factor) {
    start_next_kernel();
    double weight = 0.0;
    if (gridDim.x > 1) {
        weight = block_sum(add_weights(u));
        if (threadIdx.x == 0)
            sums[blockIdx.x] = weight;
        if (!block_arrives_last(u.counter, gridDim.x))
            return;
        weight = block_sum(threadIdx.x < gridDim.x ? __ldcg(sums + threadIdx.x) : 0.0);
    }
    if (threadIdx.x == 0)
        *factor = (u.dloss ? *u.dloss : 1.0f) / u.divisor(weight);
}

/* Blocks of write_factor. */
inline int64_t count_blocks(const BasicArgs &u) {
    return u.mean && !u.denominator ? COUNT_BLOCKS : 1;
}

/* What these calls have in the workspace: a loss for each block, and what write_factor writes. */
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
    template <class U> const double *start(LaunchSequence &sequence, bool gradient, U *args, char *workspace) const {
        double *const factor_at = at_offset<double>(workspace, factor);
        args->losses = at_offset<double>(workspace, losses);
        if (gradient)
            sequence.run(Launch{count_blocks(*args), COUNT_THREADS}, write_factor<U>, *args,
                         at_offset<double>(workspace, sums), factor_at);
        return factor_at;
    }
};

} // namespace

#endif
