/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange between ranks over which classes are spread: see call_steps.cuh. */
#include "ops/linear_cross_entropy/cuda/call_steps.cuh"
#include "ops/loss_group.cuh"

namespace lce {

namespace {

/* A thread per row. `stats` NULL: this rank has no classes. */
__global__ __launch_bounds__(ROW_THREADS) void publish_rows(const __grid_constant__ Loss loss, const int *order,
                                                            const LossStats<FULL> *stats,
                                                            const __grid_constant__ Exchange exchange) {
    wait_for_previous_kernel();
    const int64_t k = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    if (k >= loss.rows)
        return;
    const int64_t row = order ? order[k] : k;
    const bool counted = loss.class_of(loss.load_label(row)) >= 0;
    loss_group::publish(exchange, row, counted && stats ? stats[k] : no_columns<FULL>(), loss);
}

__global__ __launch_bounds__(ROW_THREADS) void merge_ranks(const __grid_constant__ Loss loss, const int *order,
                                                           const __grid_constant__ Exchange exchange,
                                                           LossStats<FULL> *stats) {
    wait_for_previous_kernel();
    const int64_t k = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    if (k < loss.rows)
        stats[k] = loss_group::merged(exchange, order ? order[k] : k, loss);
}

/* Puts sums of active rows in the order of the call's rows: a block per row. */
__global__ __launch_bounds__(256) void scatter_rows(const __grid_constant__ ActiveRows active, int64_t stride,
                                                    const float *sums, float *to) {
    wait_for_inputs();
    const int64_t k = blockIdx.x;
    const bool is_active = k < *active.count;
    float *const row = to + active.order[k] * stride;
    for (int64_t i = threadIdx.x; i < stride; i += blockDim.x)
        row[i] = is_active ? sums[k * stride + i] : 0.0f;
}

} // namespace

void RankBuffers::place(Layout *layout, const Problem &p) {
    const int64_t dx_bytes = p.rows * p.depth_stride() * 4;
    layout->place(&stats, p.shared && p.statistics, p.rows * int64_t(sizeof(LossStats<FULL>)));
    layout->place(&exchange, p.shared && p.statistics, p.exchange_bytes);
    layout->place(&dx, p.shared && p.dx, dx_bytes);
    layout->place(&dx_share, p.share_of_dx && p.dx, p.share_of_dx ? dx_bytes / p.ranks : 0);
}

rafter_status exchange_statistics(const Run &run, const int *order, char *exchange, const LossStats<FULL> *own,
                                  LossStats<FULL> *merged) {
    const Problem &p = run.problem;
    const struct rafter_loss &loss = run.call.loss;
    const Launch per_row = Launch{ceil_div<int64_t>(p.rows, ROW_THREADS), ROW_THREADS};
    const Exchange e = loss_group::exchange_of(
        run.context, loss, exchange, {RAFTER_OP_INDEX_linear_cross_entropy, p.dtype, p.depth, run.call.dx_rows});
    const LossStats<FULL> *const known = p.classes > 0 ? own : NULL;
    launch(run.context, per_row, publish_rows, run.loss, order, known, e);
    RAFTER_TRY(loss_group::gather(run.context, loss, e));
    launch(run.context, per_row, merge_ranks, run.loss, order, e, merged);
    return RAFTER_OK;
}

void put_in_order(const Run &run, const ActiveRows &active, const float *sums, float *to) {
    launch(run.context, {run.problem.rows, 256}, scatter_rows, active, run.problem.depth_stride(), sums, to);
}

/* Rows of dx that this rank gets. */
static int64_t rows_of_dx(const Problem &p) {
    return p.share_of_dx ? p.rows / p.ranks : p.rows;
}

rafter_status begin_dx_sum(const Run &run, float *dx, float *share) {
    const Problem &p = run.problem;
    const rafter_communicator &group = run.call.loss.class_group;
    const size_t count = static_cast<size_t>(rows_of_dx(p) * p.depth_stride());
    const char *const name = "options.class_group";
    rafter_cuda_state *const state = run.context->cuda_state;
    if (p.classes == 0)
        RAFTER_TRY(rafter_cuda_check(run.context, "linear_cross_entropy",
                                     cudaMemsetAsync(dx, 0, p.rows * p.depth_stride() * sizeof *dx, state->stream)));
    RAFTER_TRY(rafter_cuda_fork(run.context));
    return p.share_of_dx ? rafter_group_scatter(run.context, name, &group, dx, share, count, state->side)
                         : rafter_group_sum(run.context, name, &group, dx, count, state->side);
}

rafter_status end_dx_sum(const Run &run, const float *dx, const float *share) {
    const Problem &p = run.problem;
    const int64_t rows = rows_of_dx(p);
    RAFTER_TRY(rafter_cuda_join(run.context));
    store_rows(run, run.call.dx, p.dx_layout, false, 0, rows, p.share_of_dx ? share : dx);
    zero_ignored_dx(run, p.share_of_dx ? rows * run.call.loss.class_group.rank : 0, rows);
    return RAFTER_OK;
}

} // namespace lce
