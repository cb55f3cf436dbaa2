/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/linear_cross_entropy/cuda/hopper_compact.cuh"

#include "cuda/variant.cuh"

namespace lce {

/* Sizes without a budget. ALL_BYTES: of dz and split sums together. */
static constexpr int64_t DZ_BYTES = 96 * MIB, ALL_BYTES = 122 * MIB, TILE_BYTES = 96 * MIB;

const char *HopperCompact::why_not(const rafter_cuda_state &device, const Call &call) {
    const Problem p(call);
    const char *const reason = why_not_compact(p);
    if (reason)
        return reason;
    return why_not_hopper(device, p);
}

/* ---- plan ------------------------------------------------------------------------------------ */

size_t HopperCompact::make(const Problem &p, const Limits &limits, int clusters, int64_t group, int64_t slice,
                           Plan *plan) {
    *plan = {};
    plan->group = group;
    plan->slice = slice;
    plan->setup.drop_ignored = limits.drop_ignored;
    plan->setup.clusters = clusters;
    plan->setup.tile_classes = tile_classes_of(p, STATISTICS, clusters);
    plan->setup.split_capacity = split_capacity_for(p, limits, clusters, plan->setup.tile_classes, p.rows, true);
    plan->setup.row_units = has_row_units(p);
    plan->direct_dx = p.dx_layout.direct && !(p.dx && slice < p.classes) && !p.shared && !plan->setup.row_units;
    plan->redo_nonfinite = p.dweight && p.x.direct && !limits.drop_ignored;
    /* redo_nonfinite overwrites dW: it cannot be the caller's if that is added to. */
    plan->direct_dweight = p.dweight_layout.direct && !(plan->redo_nonfinite && p.adds_dweight);
    plan->dweight_rows = p.invariant ? 0 : rows_in_dweight(p, plan->direct_dweight);

    const int64_t tile_bytes = p.statistics ? group * plan->setup.tiles(p) * int64_t(sizeof(RowStats)) : 0;
    const int64_t dz_bytes = p.gradients() ? p.rows * round_up(slice, int64_t(8)) * p.bytes() : 0;
    Layout layout;
    plan->setup.place(&layout, p, CommonBuffers::totals_of(p.rows, group));
    layout.place(&plan->dz, tile_bytes > 0 || dz_bytes > 0, max(tile_bytes, dz_bytes));
    layout.place(&plan->more, p.option_stats, group * plan->setup.tiles(p) * int64_t(sizeof(OptionStats)));
    layout.place(&plan->dbias, p.dbias, p.classes * 4);
    layout.place(&plan->weight_sum, p.logit_sums, ColumnSums::padded(p.depth) * 4);
    layout.place(&plan->logit_sums, p.logit_sums, (p.rows + 1) * 4);
    layout.place(&plan->column_parts, p.dbias || p.logit_sums,
                 max(p.dbias ? ColumnSums::bytes(p.rows, p.classes) : 0,
                     p.logit_sums ? ColumnSums::bytes(p.classes, p.depth) : 0));
    plan->ranks.place(&layout, p);
    plan->units.place(&layout, p);
    layout.place(&plan->dx, p.dx && !plan->direct_dx, p.rows * p.depth_stride() * 4);
    layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, slice * p.depth_stride() * 4);
    return layout.bytes();
}

size_t HopperCompact::fit(const Problem &p, const Limits &limits, int clusters, Plan *plan) {
    const int tile_classes = tile_classes_of(p, STATISTICS, clusters);
    const int64_t split_bytes =
        p.gradients() ? split_capacity_for(p, limits, clusters, tile_classes, p.rows, true) * gemm::SPLIT_BYTES : 0;
    return fit_slices(
        p, limits.budget, slice_for(p, min(DZ_BYTES, ALL_BYTES - split_bytes)),
        p.gradients() ? TILE_BYTES : FORWARD_TILE_BYTES,
        [&](int64_t) {
            return ceil_div<int64_t>(p.classes, tile_classes) *
                   int64_t(sizeof(RowStats) + (p.option_stats ? sizeof(OptionStats) : 0));
        },
        [&](int64_t group, int64_t slice) { return make(p, limits, clusters, group, slice, plan); });
}

size_t HopperCompact::plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
    const Limits limits = limits_of(call);
    return bytes_to_report(limits, fit(Problem(call), limits, clusters_of(device), plan));
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* The slice that begins at class v, and where its dz is stored. */
static Dz slice_at(const HopperCompact::Plan &plan, const HopperRun &run, int64_t v, char *workspace_dz) {
    const Problem &p = run.problem;
    constexpr int64_t TILE = gemm::InTurns::COLUMNS;
    const int64_t left = p.classes - v,
                  in_dweight = plan.dweight_rows * left / (plan.dweight_rows + p.rows) / TILE * TILE;
    if (in_dweight <= plan.slice)
        return {workspace_dz, round_up(plan.slice, int64_t(8)), v, min(left, plan.slice)};
    return {run.call.dweight.data + (v + in_dweight) * p.depth * p.dweight_bytes, in_dweight, v, in_dweight};
}

rafter_status HopperCompact::launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
    char *const base = align_workspace(workspace);
    HopperRun run(context, call, plan.setup, {}, base);
    const Problem &p = run.problem;
    char *const workspace_dz = plan.dz.in(base);
    RowStats *const stats = reinterpret_cast<RowStats *>(workspace_dz);
    OptionStats *const more = plan.more.in(base);
    LossStats<FULL> *const row_stats = plan.ranks.stats.in(base);
    float *const dx = plan.dx.in(base), *const dweight = plan.dweight.in(base), *const dbias = plan.dbias.in(base);
    run.column_parts = plan.column_parts.in(base);
    const Operand x = {run.x.data, run.x.stride, false};

    run.logit_sums = plan.logit_sums.in(base);
    if (p.logit_sums) {
        sum_weights(run, plan.weight_sum.in(base));
        sum_logits(run, plan.weight_sum.in(base), plan.logit_sums.in(base));
    }
    for (int64_t first = 0; p.statistics && first < p.rows; first += plan.group) {
        const int64_t rows = min(p.rows - first, plan.group);
        LogitTask task = statistics_task(run, first, rows, stats);
        task.more = more;
        RAFTER_TRY(multiply_logits(run, STATISTICS, task, {}));
        finish_tiles(&run, first, rows, stats, more, {}, row_stats, p.shared);
    }
    if (p.shared && p.statistics) {
        RAFTER_TRY(exchange_statistics(run, run.active.order, plan.ranks.exchange.in(base), row_stats, row_stats));
        finish_rows(&run, run.active.order, 0, p.rows, row_stats, 1);
    }
    if (!p.statistics)
        finish_rows(&run, run.active.order, 0, p.rows, NULL, 1);

    const Matrix scaled_x = {plan.units.x.in(base), p.rows, p.depth, p.depth_stride()}, *const dweight_x =
                                                                                            plan.units.any() ? &scaled_x
                                                                                                             : NULL;
    const float *const dweight_alpha = plan.units.dweight_alpha(p, base);
    if (plan.units.any())
        find_row_units(&run, plan.units, run.active_x<fp16>(), base);
    if (plan.redo_nonfinite)
        find_nonfinite(run, x);
    for (int64_t v = 0; p.gradients() && v < p.classes;) {
        const Dz dz = slice_at(plan, run, v, workspace_dz);
        LogitTask task = {};
        task.rows = p.rows;
        task.first_class = v;
        task.classes = dz.classes;
        RAFTER_TRY(multiply_logits(run, GRADIENT, task, dz));
        if (p.dbias)
            sum_dbias(run, dz, 0, p.rows, NULL, run.z_label, false, dbias);
        if (p.dweight) {
            GradientOut out =
                plan.direct_dweight ? into_tensor(run, call.dweight, p.dweight_layout, v) : into_sums(run, dweight);
            if (plan.direct_dweight && dweight_alpha)
                out.alpha = dweight_alpha;
            RAFTER_TRY(hopper_dweight(run, dz, 0, p.rows, dweight_x, NULL, out, plan.direct_dweight && p.adds_dweight));
            if (plan.redo_nonfinite)
                redo_nonfinite(run, x, dz, out);
            if (!plan.direct_dweight)
                store_rows(run, call.dweight, p.dweight_layout, p.adds_dweight, v, dz.classes, dweight, dweight_alpha);
        }
        const DxInput input = {dz, {}, 0, p.rows, NULL};
        if (p.dx)
            RAFTER_TRY(plan.direct_dx ? hopper_dx(&run, input) : hopper_dx_sums(run, input, dx, p.rows, v > 0));
        v += dz.classes;
    }
    if (p.dbias)
        store_dbias(run, dbias);
    if (p.dx && plan.units.any())
        multiply_by_units(run, run.active.count, dx);
    if (p.dx && p.shared) {
        float *const in_order = plan.ranks.dx.in(base);
        put_in_order(run, run.active, dx, in_order);
        RAFTER_TRY(begin_dx_sum(run, in_order, plan.ranks.dx_share.in(base)));
        RAFTER_TRY(end_dx_sum(run, in_order, plan.ranks.dx_share.in(base)));
    } else if (p.dx) {
        if (!plan.direct_dx)
            store_dx_rows(run, 0, p.rows, dx, NULL);
        if (!plan.setup.drop_ignored)
            zero_ignored_dx(run, 0, p.rows);
    }
    finish_call(run, run.active, p.dx && plan.setup.drop_ignored && plan.direct_dx && !run.zeroed_dx);
    return RAFTER_OK;
}

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, hopper_compact, lce::HopperCompact)
