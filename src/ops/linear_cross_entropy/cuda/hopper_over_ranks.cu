/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loss and gradients in three products, for classes that are spread over ranks: as hopper_saved, with
 * the exchange of statistics between its two halves. A rank's exponentials keep the pivots of its own
 * statistics; the row factor makes them the gradient of the softmax over all classes. dx is formed
 * first, and is summed over the ranks while the product for dW runs.
 */
#include "cuda/variant.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

struct HopperShared {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    static constexpr bool SHARES_CLASSES = true;

    struct Plan {
        HopperSetup setup;
        bool direct_dweight; /* the product writes into the caller's tensor; else into sums in the workspace */
        Buffer<char> exponentials;
        Buffer<RowStats> stats, sample;
        Buffer<OptionStats> more;
        Buffer<LossStats<FULL>> merged;
        Buffer<char> x_scaled;
        Buffer<int> row_labels, frequent_labels; /* of Labels */
        Buffer<Labels::Class> class_rows;
        Buffer<float> dweight, dbias;
        Buffer<float> weight_sum, logit_sums, spread_x, column_parts;
        RankBuffers ranks;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        const Problem p(call);
        if (!p.shared)
            return "classes are not spread over ranks";
        if (!p.gradients())
            return "no gradient is wanted";
        if (p.mode == RAFTER_LCE_COMPACT)
            return "mode is compact";
        if (p.saves)
            return "saved is given";
        if (call.common.budget)
            return "there is a budget";
        return why_not_hopper_fast(device, p);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const int64_t depth_sums = ColumnSums::padded(p.depth) * 4;
        *plan = {};
        plan->setup.drop_ignored = true;
        plan->setup.clusters = clusters_of(device);
        plan->setup.tile_classes = tile_classes_of(p, EXPONENTIALS, plan->setup.clusters);
        const int64_t tiles = plan->setup.tiles(p);
        plan->setup.split_capacity =
            split_capacity_for(p, limits_of(call), plan->setup.clusters, plan->setup.tile_classes, p.rows, false);
        plan->direct_dweight = p.dweight_layout.direct;
        const bool spread_x = p.spreads_apart && p.dweight;
        const int64_t parts = max(max(p.spreads_apart ? ColumnSums::bytes(p.classes, p.depth) : 0,
                                      spread_x ? ColumnSums::bytes(p.rows, p.depth) : 0),
                                  p.dbias ? ColumnSums::bytes(p.rows, p.classes) : 0);
        Layout layout;
        plan->setup.place(&layout, p, CommonBuffers::totals_of(p.rows, p.rows));
        plan->ranks.place(&layout, p);
        layout.place(&plan->exponentials, true, p.rows * round_up(p.classes, int64_t(8)) * p.bytes());
        layout.place(&plan->stats, true, p.rows * tiles * int64_t(sizeof(RowStats)));
        layout.place(&plan->more, p.option_stats, p.rows * tiles * int64_t(sizeof(OptionStats)));
        layout.place(&plan->sample, true, p.rows * int64_t(sizeof(RowStats)));
        layout.place(&plan->merged, true, p.rows * int64_t(sizeof(LossStats<FULL>)));
        layout.place(&plan->weight_sum, p.spreads_apart, depth_sums);
        layout.place(&plan->logit_sums, p.spreads_apart, (p.rows + 1) * 4);
        layout.place(&plan->x_scaled, p.dweight, p.rows * p.depth_stride() * p.bytes());
        layout.place(&plan->row_labels, p.dweight, round_up(p.rows, int64_t(4)) * int64_t(sizeof(int)));
        layout.place(&plan->class_rows, p.dweight, p.classes * int64_t(sizeof(Labels::Class)));
        layout.place(&plan->frequent_labels, p.dweight, Labels::bytes_of_frequent(p.rows));
        layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, p.classes * p.depth_stride() * 4);
        layout.place(&plan->dbias, p.dbias, p.classes * 4);
        layout.place(&plan->spread_x, spread_x, depth_sums);
        layout.place(&plan->column_parts, parts > 0, parts);
        return layout.bytes();
    }

    /* Forms the exponentials, and the statistics of all rows over all ranks. */
    static rafter_status form_exponentials(HopperRun &run, const Plan &plan, const Dz &dz, char *base) {
        const Problem &p = run.problem;
        RowStats *const stats = plan.stats.in(base), *const sample = plan.sample.in(base);
        LossStats<FULL> *const own = plan.ranks.stats.in(base);
        if (p.spreads_apart) {
            sum_weights(run, plan.weight_sum.in(base));
            sum_logits(run, plan.weight_sum.in(base), plan.logit_sums.in(base));
        }
        sample_statistics(run, sample);
        LogitTask task = statistics_task(run, 0, p.rows, stats);
        task.more = plan.more.in(base);
        task.sample = sample;
        RAFTER_TRY(multiply_logits(run, EXPONENTIALS, task, dz));
        finish_tiles(&run, 0, p.rows, stats, task.more, {}, own, true);
        return exchange_statistics(run, run.active.order, plan.ranks.exchange.in(base), own, plan.merged.in(base));
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        char *const base = align_workspace(workspace);
        const Labels labels = {plan.row_labels.in(base), plan.class_rows.in(base), plan.frequent_labels.in(base)};
        HopperRun run(context, call, plan.setup, labels, base);
        const Problem &p = run.problem;
        const Dz dz = {plan.exponentials.in(base), round_up(p.classes, int64_t(8)), 0, p.classes};
        const Matrix x_scaled = {plan.x_scaled.in(base), p.rows, p.dweight ? p.depth : 0, p.depth_stride()};
        float *const dx = plan.ranks.dx.in(base), *const share = plan.ranks.dx_share.in(base),
                     *const dweight = plan.dweight.in(base), *const dbias = plan.dbias.in(base),
                     *const spread_x = plan.spread_x.in(base);
        run.column_parts = plan.column_parts.in(base);
        run.logit_sums = plan.logit_sums.in(base);
        RAFTER_TRY(form_exponentials(run, plan, dz, base));
        run.spread = spread_place_of(p);
        run.weight_sum = plan.weight_sum.in(base);
        finish_rank_rows(&run, plan.ranks.stats.in(base), plan.merged.in(base));
        adjust_exponentials(run, 0, p.rows, plan.stats.in(base), dz, {}, x_scaled);
        if (spread_x)
            sum_spread_x(run, 0, p.rows, spread_x);
        if (p.dbias) {
            sum_dbias(run, dz, 0, p.rows, run.gradients, NULL, false, dbias);
            store_dbias(run, dbias);
        }
        if (p.dx) {
            RAFTER_TRY(hopper_rank_dx(run, {dz, {}, 0, p.rows, run.gradients}, dx));
            RAFTER_TRY(begin_dx_sum(run, dx, share));
            run.beside = p.ranks > 1 ? call.loss.class_group.multiprocessors : 0;
        }
        if (p.dweight)
            RAFTER_TRY(form_dweight(run, dz, x_scaled, spread_x, plan.direct_dweight, dweight));
        if (p.dx)
            RAFTER_TRY(end_dx_sum(run, dx, share));
        finish_call(run, run.active, false);
        return RAFTER_OK;
    }
};

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, hopper_over_ranks, lce::HopperShared)
