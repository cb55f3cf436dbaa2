/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Losses whose rows are spread over ranks, for every variant: before the call, mean's denominator is
 * summed over the ranks, and the call gets it as if the caller had given it; after the call, so is the
 * loss. Both sums run in rank order, in fp64, on every rank alike.
 */
#include "cuda/launch.cuh"
#include "ops/loss_group.cuh"
#include "ops/loss_sums.cuh"

namespace {

constexpr int COUNT_THREADS = 1024;

/* rafter_cuda_state::rows_block. */
struct RowsBlock {
    double own_weight;
    float denominator;
    float own_loss;
    double received[(RAFTER_CUDA_ROWS_BLOCK - 64) / sizeof(double)]; /* a number of each rank */
};
static_assert(sizeof(RowsBlock) <= RAFTER_CUDA_ROWS_BLOCK, "the block holds it");
constexpr int MOST_RANKS = sizeof(RowsBlock::received) / sizeof(double);

__global__ __launch_bounds__(COUNT_THREADS) void count_weight(const __grid_constant__ Loss loss, RowsBlock *block) {
    wait_for_inputs();
    const Totals totals = block_sum(count(loss, threadIdx.x, COUNT_THREADS));
    if (threadIdx.x == 0)
        block->own_weight = totals.weight;
}

__global__ void add_weights(RowsBlock *block, int ranks) {
    wait_for_inputs();
    double sum = 0.0;
    for (int r = 0; r < ranks; r++)
        sum += block->received[r];
    block->denominator = static_cast<float>(sum);
}

__global__ void take_loss(const float *loss, RowsBlock *block) {
    wait_for_inputs();
    block->own_loss = *loss;
}

__global__ void add_losses(RowsBlock *block, int ranks, float *loss) {
    wait_for_inputs();
    const float *const all = reinterpret_cast<const float *>(block->received);
    double sum = 0.0;
    for (int r = 0; r < ranks; r++)
        sum += all[r];
    *loss = static_cast<float>(sum);
}

RowsBlock *rows_block(rafter_context *context) {
    return reinterpret_cast<RowsBlock *>(context->cuda_state->rows_block);
}

/* Also if a launch has failed: the other ranks wait for this one. */
rafter_status gather(rafter_context *context, const struct rafter_loss *loss, const void *own, size_t bytes) {
    const rafter_status status =
        rafter_group_gather(context, "options.row_group", &loss->row_group, own, rows_block(context)->received, bytes);
    if (status != RAFTER_OK)
        context->cuda_state->failed = false;
    return status;
}

} // namespace

rafter_status rafter_cuda_begin_rows(rafter_context *context, struct rafter_loss *loss) {
    RowsBlock *const block = rows_block(context);
    const int ranks = loss->row_group.ranks;
    if (ranks > MOST_RANKS)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "options.row_group has %d ranks, wanted at most %d on CUDA",
                           ranks, MOST_RANKS);
    if (loss->reduction != RAFTER_MEAN || loss->denominator.data)
        return RAFTER_OK;
    CurrentDevice current(context);
    launch(context, {1, COUNT_THREADS}, count_weight, loss_of(*context->cuda_state, loss), block);
    RAFTER_TRY(gather(context, loss, &block->own_weight, sizeof block->own_weight));
    launch(context, {1, 1}, add_weights, block, ranks);
    loss->denominator = {};
    loss->denominator.data = reinterpret_cast<char *>(&block->denominator);
    loss->denominator.dtype = RAFTER_F32;
    loss->denominator.numel = 1;
    return rafter_cuda_launched(context, "the sum over options.row_group");
}

rafter_status rafter_cuda_end_rows(rafter_context *context, const struct rafter_loss *loss) {
    if (loss->direction != RAFTER_FORWARD || loss->reduction == RAFTER_NONE || !loss->loss.data)
        return RAFTER_OK;
    CurrentDevice current(context);
    RowsBlock *const block = rows_block(context);
    float *const value = reinterpret_cast<float *>(loss->loss.data);
    launch(context, {1, 1}, take_loss, static_cast<const float *>(value), block);
    RAFTER_TRY(gather(context, loss, &block->own_loss, sizeof block->own_loss));
    launch(context, {1, 1}, add_losses, block, static_cast<int>(loss->row_group.ranks), value);
    return rafter_cuda_launched(context, "the sum over options.row_group");
}
