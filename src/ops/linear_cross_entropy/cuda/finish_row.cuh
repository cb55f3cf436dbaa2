/* SPDX-License-Identifier: Apache-2.0 */
/* What is computed of a row once its statistics are complete: its results, and the coefficients of its
 * gradient. */
#ifndef RAFTER_LCE_CUDA_FINISH_ROW_CUH
#define RAFTER_LCE_CUDA_FINISH_ROW_CUH

#include "ops/loss_classes.cuh"
#include "ops/loss_sums.cuh"

namespace lce {

/* `g`: the row's complete statistics, or NULL if the caller has given its lse. Writes the row's
 * results, if this is forward, and returns the coefficients of its gradient if `wanted`. `label`:
 * from Loss::class_of. `totals` NULL: another thread writes. Called by one thread. */
DEVICE RowGradient finish_row(const Loss &loss, int64_t row, int64_t label, const LossStats<FULL> *g, double row_scale,
                              bool wanted, Totals *totals) {
    const bool divided = loss.divides_upstream;
    const double scale = loss.row_units ? row_scale / row_unit(loss, row, label) : row_scale;
    const double loss_factor = divided ? loss.prepared->loss_factor * scale : scale,
                 entropy_factor = divided ? loss.prepared->entropy_factor * scale : 0.0;
    RowGradient gradient = gradient_of_skipped(label);
    if (label < 0) {
        if (totals)
            write_skipped(loss, row, label, totals);
    } else if (!g) {
        const float lse = loss.lse.get(row);
        gradient = lse == -INFINITY ? gradient_of_skipped(IGNORED) /* every logit is -inf */
                                    : gradient_from_lse(loss, loss_factor, row, label, 0.0f, lse, entropy_factor);
    } else {
        const WholeRowStats stats = whole_row_stats(*g, g->z_label, loss);
        if (wanted)
            gradient = gradient_from_stats(loss, loss_factor, row, label, g->z_label, stats, entropy_factor);
        if (loss.forward && totals)
            write_row(loss, row, label, results_of(loss, row, label, stats), totals);
    }
    return gradient;
}

/* Stores the sum of `mine` over the block. */
DEVICE void add_block_totals(const Totals &mine, Totals *to) {
    const Totals totals = block_sum(mine);
    if (threadIdx.x == 0)
        *to = totals;
}

/* Writes the loss, from the totals of all blocks that have finished rows. Called by a block. */
DEVICE void write_loss_of_blocks(const Loss &loss, const Totals *block_totals, int64_t blocks) {
    Totals all = {};
    for (int64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
        all.loss += block_totals[i].loss;
        all.weight += block_totals[i].weight;
        all.counted += block_totals[i].counted;
    }
    all = block_sum(all);
    if (threadIdx.x == 0)
        write_loss(loss, all);
}

} // namespace lce

#endif
