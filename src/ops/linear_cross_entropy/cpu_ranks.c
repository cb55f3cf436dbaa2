/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy on the CPU over ranks: see cpu_run.h. */
#include <string.h>

#include "core/sizes.h"
#include "core/threads.h"
#include "ops/linear_cross_entropy/cpu_run.h"

enum { MERGED_ROWS = 64 }; /* per task that merges statistics of ranks */

static void merge_ranks_task(void *arg, int64_t task) {
    const struct lce_run *const run = arg;
    for (int64_t i = task * MERGED_ROWS; i < min64((task + 1) * MERGED_ROWS, run->rows); i++)
        run->b.stats[i] = rafter_loss_merged(&run->loss, run->b.exchange, run->rows, i, run->b.rank_prefix);
}

rafter_status lce_exchange_rows(struct lce_run *run) {
    const int rank = run->loss.class_group.rank;
    const double weights = run->b.rank_prefix[rank + 1] - run->b.rank_prefix[rank];
    for (int64_t i = 0; i < run->rows; i++) {
        const struct rafter_row_record record = rafter_row_record_of(&run->b.stats[i], weights);
        rafter_loss_put_record(&run->loss, run->b.exchange, i, &record);
    }
    RAFTER_TRY(rafter_loss_exchange(run->context, &run->loss, run->b.exchange, run->rows));
    rafter_parallel(run->context, ceil_div(run->rows, MERGED_ROWS), merge_ranks_task, run);
    return RAFTER_OK;
}

rafter_status lce_agree(struct lce_run *run) {
    const struct linear_cross_entropy_call *const call = run->call;
    const struct rafter_loss_terms terms = {.op = RAFTER_OP_INDEX_linear_cross_entropy,
                                            .dtype = call->x.dtype,
                                            .depth = run->problem->depth,
                                            .dx = call->dx_rows,
                                            .exchange = run->problem->stats};
    const rafter_status status = rafter_loss_read(run->context, &run->loss);
    if (!rafter_loss_grouped(&run->loss))
        return status;
    return rafter_loss_agree(run->context, &run->loss, &terms, status, run->b.rank_prefix);
}

void lce_place_dx(struct lce_run *run) {
    const struct lce_problem *const q = run->problem;
    run->dx = run->call->dx;
    if (!run->b.dx_sum)
        return;
    memset(run->b.dx_sum, 0, (size_t)(q->rows * q->depth) * sizeof *run->b.dx_sum);
    run->dx = (rafter_view){.data = (char *)run->b.dx_sum,
                            .dtype = RAFTER_F32,
                            .ndim = 2,
                            .numel = q->rows * q->depth,
                            .shape = {q->rows, q->depth},
                            .stride = {q->depth, 1}};
}

rafter_status lce_sum_dx(struct lce_run *run) {
    const struct lce_problem *const q = run->problem;
    const rafter_communicator *const group = &run->loss.class_group;
    const rafter_view *const to = &run->call->dx;
    const bool share = run->call->dx_rows == 2;
    const int64_t rows = share ? q->rows / q->ranks : q->rows, d = q->depth;
    const float *sums = share ? run->b.dx_share : run->b.dx_sum;
    if (share)
        RAFTER_TRY(rafter_group_scatter(run->context, "options.class_group", group, run->b.dx_sum, run->b.dx_share,
                                        (size_t)(rows * d), NULL));
    else
        RAFTER_TRY(
            rafter_group_sum(run->context, "options.class_group", group, run->b.dx_sum, (size_t)(rows * d), NULL));
    for (int64_t row = 0; row < rows; row++)
        run->kernels->store(to->dtype, sums + row * d, d, 1.0f, false,
                            rafter_at(to, rafter_offset(to, 0, to->ndim - 1, row)), to->stride[to->ndim - 1]);
    return RAFTER_OK;
}
