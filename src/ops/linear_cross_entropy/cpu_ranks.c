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

void lce_put_tile(struct lce_run *run, int64_t row, int64_t tile) {
    const double weights = run->b.tile_prefix[tile + 1] - run->b.tile_prefix[tile];
    run->b.tiles[row * lce_tiles(run->problem) + tile] = rafter_row_record_of(&run->b.stats[row], weights);
}

static void send_task(void *arg, int64_t task) {
    const struct lce_run *const run = arg;
    const int64_t tiles = lce_tiles(run->problem);
    const double *const prefix = run->b.tile_prefix;
    const size_t bytes = sizeof *run->b.tiles;
    for (int64_t i = task * MERGED_ROWS; i < min64((task + 1) * MERGED_ROWS, run->rows); i++) {
        const char *const parts = (const char *)(run->b.tiles + i * tiles);
        struct rafter_row_stats stats = rafter_row_merge_tree(parts, bytes, bytes, prefix, 0, tiles);
        stats.target = (double)run->b.target_logit[i];
        const struct rafter_row_record record = rafter_row_record_of(&stats, prefix[tiles] - prefix[0]);
        rafter_loss_put_record(&run->loss, run->b.exchange, i, &record);
    }
}

rafter_status lce_exchange_rows(struct lce_run *run) {
    const int64_t tasks = ceil_div(run->rows, MERGED_ROWS);
    rafter_parallel(run->context, tasks, send_task, run);
    RAFTER_TRY(rafter_loss_exchange(run->context, &run->loss, run->b.exchange, run->rows));
    rafter_parallel(run->context, tasks, merge_ranks_task, run);
    return RAFTER_OK;
}

/* The sums of the class weights before each tile. */
static void sum_weights(struct lce_run *run) {
    const int64_t first = run->loss.first_class, span = lce_span(run->problem);
    run->b.tile_prefix[0] = run->b.rank_prefix[run->loss.class_group.rank];
    for (int64_t tile = 0; tile < lce_tiles(run->problem); tile++) {
        const int64_t end = min64((tile + 1) * span, run->problem->classes);
        run->b.tile_prefix[tile + 1] =
            rafter_loss_add_weights(&run->loss, run->b.tile_prefix[tile], first + tile * span, first + end);
    }
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
    RAFTER_TRY(rafter_loss_agree(run->context, &run->loss, &terms, status, run->b.rank_prefix));
    if (run->b.tiles)
        sum_weights(run);
    return RAFTER_OK;
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
