/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/linear_cross_entropy/cuda/cublaslt_compact.cuh"

#include "cuda/variant.cuh"

namespace lce {

/* Sizes without a budget. */
static constexpr int64_t DZ_BYTES = 64 * MIB, TILE_BYTES = 32 * MIB;

const char *CublasLtCompact::why_not(const rafter_cuda_state &, const Call &call) {
    const Problem p(call);
    if (p.invariant && p.shared)
        return "classes are spread over ranks, and cuBLASLt's products are to be batch invariant";
    return why_not_compact(p);
}

size_t CublasLtCompact::make(const Problem &p, const Limits &limits, int64_t group, int64_t slice, Plan *plan) {
    const bool sums_dx = p.dx && (p.shared || p.invariant || (slice < p.classes && !p.sum_in_dx));
    *plan = {};
    plan->group = group;
    plan->slice = slice;
    plan->direct_dx = p.dx_layout.direct && !sums_dx;
    plan->pack_x = !p.x.direct || p.invariant; /* invariant: cuBLASLt chooses an algorithm by strides, too */
    plan->redo_nonfinite = p.dweight && !plan->pack_x;
    /* redo_nonfinite overwrites dW: it cannot be the caller's if that is added to. */
    plan->direct_dweight = p.dweight_layout.direct && !(plan->redo_nonfinite && p.adds_dweight);
    plan->product_bytes = limits.product_bytes;

    const int64_t tile_stride = round_up(slice, int64_t(8));
    Layout layout;
    plan->common.place(&layout, p, CommonBuffers::totals_of(p.rows, group));
    plan->ranks.place(&layout, p);
    plan->units.place(&layout, p);
    layout.place(&plan->stats, p.statistics && !p.shared, p.rows * int64_t(sizeof(LossStats<FULL>)));
    layout.place(&plan->x, plan->pack_x, p.rows * p.depth_stride() * p.bytes());
    layout.place(&plan->z, true, group * tile_stride * 4);
    layout.place(&plan->dz, p.dx || p.dweight, p.rows * tile_stride * p.bytes());
    layout.place(&plan->dx, p.dx && !plan->direct_dx && !p.shared, p.rows * p.depth_stride() * 4);
    layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, slice * p.depth_stride() * 4);
    layout.place(&plan->dbias, p.dbias, p.classes * 4);
    layout.place(&plan->products, plan->product_bytes > 0, static_cast<int64_t>(plan->product_bytes));
    return layout.bytes();
}

size_t CublasLtCompact::fit(const Problem &p, const Limits &limits, Plan *plan) {
    return fit_slices(
        p, limits.budget, slice_for(p, DZ_BYTES), p.gradients() ? TILE_BYTES : FORWARD_TILE_BYTES,
        [](int64_t slice) { return slice * 4; },
        [&](int64_t group, int64_t slice) { return make(p, limits, group, slice, plan); });
}

size_t CublasLtCompact::plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
    const Limits limits = limits_of(call);
    return bytes_to_report(limits, fit(Problem(call), limits, plan));
}

rafter_status CublasLtCompact::launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
    RAFTER_TRY(rafter_cuda_open_products(context));
    char *const base = align_workspace(workspace);
    Run run(context, call);
    const Problem &p = run.problem;
    const ProductWorkspace products = {plan.products.in(base), plan.product_bytes};
    const int64_t tile_stride = round_up(plan.slice, int64_t(8));
    char *const all_dz = plan.dz.in(base);
    float *const dx = p.shared ? plan.ranks.dx.in(base) : plan.dx.in(base), *const dweight = plan.dweight.in(base),
                 *const dbias = plan.dbias.in(base);
    LossStats<FULL> *const stats = p.shared ? plan.ranks.stats.in(base) : plan.stats.in(base);
    const Operand x =
        !plan.pack_x ? Operand{call.x.data, p.x.stride, false} : Operand{plan.x.in(base), p.depth_stride(), false};
    plan.common.use(&run, base);
    run.loss.row_units = plan.units.any();
    begin_call(&run, {}, base, plan.common);
    if (plan.pack_x)
        pack_rows(run, call.x, 0, p.rows, plan.x.in(base));
    Operand dweight_x = x;
    const float *const dweight_alpha = plan.units.dweight_alpha(p, base);
    if (plan.units.any()) {
        const ActiveRows all = {NULL, NULL, NULL, p.rows};
        find_row_units(&run, plan.units, {all, static_cast<const fp16 *>(x.data), x.stride, false}, base);
        dweight_x.data = plan.units.x.in(base);
    }

    /* Forms the logits of a slice, group by group, and calls step(tile) for each. */
    const auto for_groups = [&](int64_t first_class, int64_t classes, auto step) {
        for (int64_t first = 0; first < p.rows; first += plan.group) {
            const LogitTile tile = {plan.z.in(base), tile_stride, first,   min(plan.group, p.rows - first),
                                    first_class,     classes,     run.bias};
            RAFTER_TRY(form_logits(run, products, rows_from(x, p.dtype, first), tile));
            step(tile);
        }
        return RAFTER_OK;
    };

    for (int64_t v = 0; p.statistics && v < p.classes; v += plan.slice)
        RAFTER_TRY(for_groups(v, min(plan.slice, p.classes - v), [&](const LogitTile &tile) {
            collect_statistics(run, tile, 1, v == 0, stats + tile.first_row);
        }));
    if (p.shared && p.statistics)
        RAFTER_TRY(exchange_statistics(run, NULL, plan.ranks.exchange.in(base), stats, stats));
    finish_rows(&run, NULL, 0, p.rows, stats, 1);

    if (plan.redo_nonfinite)
        find_nonfinite(run, x);
    for (int64_t v = 0; p.gradients() && v < p.classes; v += plan.slice) {
        const Dz dz = {all_dz, tile_stride, v, min(plan.slice, p.classes - v)};
        RAFTER_TRY(for_groups(v, dz.classes, [&](const LogitTile &tile) {
            const Dz group_dz = dz.from_row(tile.first_row, p.bytes());
            write_gradient(run, tile, group_dz.data, group_dz.stride, dbias, tile.first_row == 0);
        }));
        if (p.dweight) {
            GradientOut out =
                plan.direct_dweight ? into_tensor(run, call.dweight, p.dweight_layout, v) : into_sums(run, dweight);
            if (plan.direct_dweight && dweight_alpha)
                out.alpha = dweight_alpha;
            RAFTER_TRY(
                multiply_dweight(run, products, dz, p.rows, dweight_x, out, plan.direct_dweight && p.adds_dweight));
            if (plan.redo_nonfinite)
                redo_nonfinite(run, x, dz, out);
            if (!plan.direct_dweight)
                store_rows(run, call.dweight, p.dweight_layout, p.adds_dweight, v, dz.classes, dweight, dweight_alpha);
        }
        if (p.dx)
            RAFTER_TRY(multiply_dx(run, products, dz, p.rows,
                                   plan.direct_dx ? into_tensor(run, call.dx, p.dx_layout, 0) : into_sums(run, dx),
                                   v > 0));
    }
    if (p.dx && p.shared) {
        RAFTER_TRY(begin_dx_sum(run, dx, plan.ranks.dx_share.in(base)));
        RAFTER_TRY(end_dx_sum(run, dx, plan.ranks.dx_share.in(base)));
    } else if (p.dx) {
        if (plan.units.any())
            multiply_by_units(run, NULL, dx);
        if (!plan.direct_dx)
            store_rows(run, call.dx, p.dx_layout, false, 0, p.rows, dx);
        zero_ignored_dx(run, 0, p.rows);
    }
    if (p.dbias)
        store_dbias(run, dbias);
    finish_call(run, {}, false);
    return RAFTER_OK;
}

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, cublaslt_compact, lce::CublasLtCompact)
