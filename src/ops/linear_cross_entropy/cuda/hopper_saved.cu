/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward without gradients that saves its exponentials, and the backward that uses them: three
 * products in all, though the upstream gradients are not known in forward. As hopper_fast with one
 * group of all rows, cut in two after the statistics of the rows.
 */
#include "cuda/variant.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

struct HopperSaved {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;

    struct Plan {
        HopperSetup setup;
        bool direct_dx, direct_dweight; /* products write into the caller's tensor; else into sums in the workspace */
        Buffer<RowStats> stats, sample;
        Buffer<OptionStats> more;
        Buffer<char> x_scaled;
        Buffer<int> row_labels, frequent_labels; /* of Labels */
        Buffer<Labels::Class> class_rows;
        Buffer<float> dx, dweight, dbias;
        Buffer<float> logit_sums, spread_x, column_parts;
    };

    /* The same answer for forward and for backward, whichever gradients it is asked for. */
    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        Problem p(call);
        if (!p.saves)
            return "nothing is saved, or backward cannot use it";
        if (p.mode == RAFTER_LCE_COMPACT)
            return "mode is compact";
        if (call.common.budget)
            return "there is a budget";
        p.statistics = p.dweight = true;
        p.dentropy = false;
        return why_not_hopper_fast(device, p);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const bool forward = call.common.direction == RAFTER_FORWARD;
        const int64_t depth_sums = ColumnSums::padded(p.depth) * 4;
        *plan = {};
        plan->setup.drop_ignored = true;
        plan->setup.clusters = clusters_of(device);
        plan->setup.tile_classes = tile_classes_of(p, EXPONENTIALS, plan->setup.clusters);
        const int64_t tiles = plan->setup.tiles(p);
        plan->setup.split_capacity =
            split_capacity_for(p, limits_of(call), plan->setup.clusters, plan->setup.tile_classes, p.rows, false);
        plan->direct_dx = p.dx_layout.direct;
        plan->direct_dweight = p.dweight_layout.direct;
        const bool weight_sum = p.spreads_apart && forward, spread_x = p.spreads_apart && p.dweight;
        const int64_t parts = max(max(weight_sum ? ColumnSums::bytes(p.classes, p.depth) : 0,
                                      spread_x ? ColumnSums::bytes(p.rows, p.depth) : 0),
                                  p.dbias ? ColumnSums::bytes(p.rows, p.classes) : 0);
        Layout layout;
        plan->setup.place(&layout, p, CommonBuffers::totals_of(p.rows, p.rows));
        layout.place(&plan->stats, forward, p.rows * tiles * int64_t(sizeof(RowStats)));
        layout.place(&plan->more, forward && p.option_stats, p.rows * tiles * int64_t(sizeof(OptionStats)));
        layout.place(&plan->sample, forward, p.rows * int64_t(sizeof(RowStats)));
        layout.place(&plan->logit_sums, forward && p.spreads_apart, (p.rows + 1) * 4);
        layout.place(&plan->x_scaled, p.dweight, p.rows * p.depth_stride() * p.bytes());
        layout.place(&plan->row_labels, p.dweight, round_up(p.rows, int64_t(4)) * int64_t(sizeof(int)));
        layout.place(&plan->class_rows, p.dweight, p.classes * int64_t(sizeof(Labels::Class)));
        layout.place(&plan->frequent_labels, p.dweight, Labels::bytes_of_frequent(p.rows));
        layout.place(&plan->dx, p.dx && !plan->direct_dx, p.rows * p.depth_stride() * 4);
        layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, p.classes * p.depth_stride() * 4);
        layout.place(&plan->dbias, p.dbias, p.classes * 4);
        layout.place(&plan->spread_x, spread_x, depth_sums);
        layout.place(&plan->column_parts, parts > 0, parts);
        return layout.bytes();
    }

    /* Where things are in the caller's `saved`. */
    struct Saved {
        LossStats<FULL> *rows; /* of all active rows */
        float *weight_sum;     /* label smoothing */
        Dz exponentials;

        explicit Saved(const Call &call) {
            const Problem p(call);
            static_assert(sizeof(LossStats<FULL>) <= LCE_SAVED_ROW_BYTES, "lce_saved_bytes counts that much");
            char *const data = static_cast<char *>(call.saved) + p.rows * LCE_SAVED_ROW_BYTES;
            rows = static_cast<LossStats<FULL> *>(call.saved);
            weight_sum = reinterpret_cast<float *>(data);
            exponentials = {data + lce_padded_depth(p.depth) * 4, round_up(p.classes, int64_t(8)), 0, p.classes};
        }
    };

    static rafter_status run_forward(rafter_context *context, const Call &call, const Plan &plan, char *base) {
        HopperRun run(context, call, plan.setup, {}, base);
        const Problem &p = run.problem;
        const Saved saved(call);
        RowStats *const stats = plan.stats.in(base), *const sample = plan.sample.in(base);
        run.column_parts = plan.column_parts.in(base);
        run.logit_sums = plan.logit_sums.in(base);
        if (p.spreads_apart) {
            sum_weights(run, saved.weight_sum);
            sum_logits(run, saved.weight_sum, plan.logit_sums.in(base));
        }
        sample_statistics(run, sample);
        LogitTask task = statistics_task(run, 0, p.rows, stats);
        task.more = plan.more.in(base);
        task.sample = sample;
        RAFTER_TRY(multiply_logits(run, EXPONENTIALS, task, saved.exponentials));
        finish_tiles(&run, 0, p.rows, stats, task.more, {}, saved.rows);
        unify_saved_pivots(run, stats, saved.rows, saved.exponentials);
        finish_call(run, run.active, false);
        return RAFTER_OK;
    }

    static rafter_status run_backward(rafter_context *context, const Call &call, const Plan &plan, char *base) {
        const Labels labels = {plan.row_labels.in(base), plan.class_rows.in(base), plan.frequent_labels.in(base)};
        HopperRun run(context, call, plan.setup, labels, base);
        const Problem &p = run.problem;
        const Saved saved(call);
        const Dz &dz = saved.exponentials;
        const Matrix x_scaled = {plan.x_scaled.in(base), p.rows, p.dweight ? p.depth : 0, p.depth_stride()};
        float *const dx = plan.dx.in(base), *const dweight = plan.dweight.in(base), *const dbias = plan.dbias.in(base),
                     *const spread_x = plan.spread_x.in(base);
        run.column_parts = plan.column_parts.in(base);
        run.spread = spread_place_of(p);
        run.weight_sum = p.spreads_apart ? saved.weight_sum : NULL;
        finish_saved_rows(run, saved.rows);
        adjust_exponentials(run, 0, p.rows, NULL, dz, {}, x_scaled);
        if (spread_x)
            sum_spread_x(run, 0, p.rows, spread_x);
        if (p.dbias) {
            sum_dbias(run, dz, 0, p.rows, run.gradients, NULL, false, dbias);
            store_dbias(run, dbias);
        }
        const DxInput input = {dz, {}, 0, p.rows, run.gradients};
        if (p.dx && plan.direct_dx) {
            RAFTER_TRY(hopper_dx(&run, input));
        } else if (p.dx) {
            RAFTER_TRY(hopper_dx_sums(run, input, dx, p.rows, false));
            store_dx_rows(run, 0, p.rows, dx, run.gradients);
        }
        if (p.dweight)
            RAFTER_TRY(form_dweight(run, dz, x_scaled, spread_x, plan.direct_dweight, dweight));
        finish_call(run, run.active, p.dx && plan.direct_dx && !run.zeroed_dx);
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        char *const base = align_workspace(workspace);
        return call.common.direction == RAFTER_FORWARD ? run_forward(context, call, plan, base)
                                                       : run_backward(context, call, plan, base);
    }
};

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, hopper_saved, lce::HopperSaved)
