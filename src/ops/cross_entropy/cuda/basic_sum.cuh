/* SPDX-License-Identifier: Apache-2.0 */
/* For basic calls that have one loss per row in the workspace: kernels of one block or a few that compute the factor of
 * all gradients, and that add up the losses. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_SUM_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_SUM_CUH

#include "ops/cross_entropy/cuda/basic_factor.cuh"

namespace {

constexpr int ONE_BLOCK = 512; /* threads of a kernel of one block */

/* Writes the factor of all gradients: one block. U: BasicArgs or SpacedArgs. */
template <class U>
__global__ __launch_bounds__(ONE_BLOCK) void compute_factor(const __grid_constant__ U u, double *factor) {
    wait_for_inputs();
    start_next_kernel();
    const double value = u.weighs && u.needs_totals()
                             ? u.divided_upstream(block_sum(add_weights(u, threadIdx.x, ONE_BLOCK)))
                             : u.template factor<ONE_BLOCK>();
    if (threadIdx.x == 0)
        *factor = value;
}

/* Writes the loss of all rows. With more than one block, each adds up some rows, and the last one to finish adds up
 * `sums`: loss and weight of each block. U: BasicArgs or SpacedArgs. */
template <class U> __global__ __launch_bounds__(ONE_BLOCK) void sum_losses(const __grid_constant__ U u, double2 *sums) {
    constexpr int AT_ONCE = 8;
    const int64_t step = int64_t(ONE_BLOCK) * gridDim.x;
    const int64_t own = int64_t(ONE_BLOCK) * blockIdx.x + threadIdx.x;
    double2 sum = {};
    if (u.mean)
        sum.y = gridDim.x == 1 && !u.weighs ? u.template count<ONE_BLOCK>() : block_sum(add_weights(u, own, step));
    wait_for_previous_kernel();
    for (int64_t first = own; first < u.rows; first += AT_ONCE * step) {
        double loss[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            loss[k] = __ldcg(&u.losses[min(first + k * step, int64_t(u.rows - 1))]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            sum.x += first + k * step < u.rows ? loss[k] : 0.0;
    }
    sum.x = block_sum(sum.x);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0)
            sums[blockIdx.x] = sum;
        if (!block_arrives_last(u.counter, gridDim.x))
            return;
        sum = block_sum(threadIdx.x < gridDim.x ? __ldcg(sums + threadIdx.x) : double2{});
    }
    if (threadIdx.x == 0)
        u.write_loss(sum.x, sum.y);
}

/* Enqueues the kernels that compute the factor of all gradients and the loss of all rows, with more than one block
 * if there are many rows. */
struct BasicTotals {
    size_t sums, factor; /* offsets in the workspace */

    void place(WorkspaceLayout *layout) {
        sums = layout->add(COUNT_BLOCKS * int64_t(sizeof(double2)));
        factor = layout->add(int64_t(sizeof(double)));
    }
    /* Returns where the factor will be. */
    template <class U> const double *find_factor(const rafter_context *context, const U &args, char *workspace) const {
        double *const at = at_offset<double>(workspace, factor);
        if (are_many(args.rows))
            ::launch(context, Launch{count_blocks(args), COUNT_THREADS}, write_factor<U>, args,
                     at_offset<double>(workspace, sums), at);
        else
            ::launch(context, Launch{1, ONE_BLOCK}, compute_factor<U>, args, at);
        return at;
    }
    template <class U> void add_up(const rafter_context *context, const U &args, char *workspace) const {
        const int64_t blocks =
            are_many(args.rows) ? min(ceil_div<int64_t>(args.rows, 8 * ONE_BLOCK), int64_t(COUNT_BLOCKS)) : 1;
        ::launch(context, Launch{blocks, ONE_BLOCK}, sum_losses<U>, args, at_offset<double2>(workspace, sums));
    }
};

} // namespace

#endif
