/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/linear_cross_entropy/cuda/cublaslt_fast.cuh"

#include "cuda/variant.cuh"

namespace lce {

const char *CublasLtFast::why_not(const rafter_cuda_state &, const Call &call) {
    const Problem p(call);
    const char *const reason = why_not_fast(p);
    if (reason)
        return reason;
    return has_row_units(p) ? "it would scale dz by the largest gradient of all rows, which is not batch invariant"
                            : NULL;
}

size_t CublasLtFast::make(const Problem &p, const Limits &limits, int64_t group, Plan *plan) {
    const bool sums_dweight = p.dweight && group < p.rows && !p.sum_in_dweight;
    *plan = {};
    plan->group = group;
    plan->parts = static_cast<int>(ceil_div<int64_t>(p.classes, MOST_PART));
    plan->one_pass = p.statistics && !p.dbias && p.classes <= MOST_PART;
    /* The packed copy has zeros in ignored rows. It is needed if dW is added to something, because then
     * redo_nonfinite is not possible; and in batch-invariant calls, so that strides are always the same:
     * cuBLASLt chooses an algorithm by strides, too. */
    plan->pack_x = !p.x.direct || group < p.rows || p.adds_dweight || p.invariant;
    plan->direct_dx = p.dx_layout.direct && !p.invariant;
    plan->direct_dweight = p.dweight_layout.direct && !sums_dweight;
    plan->redo_nonfinite = p.dweight && !plan->pack_x;
    plan->product_bytes = limits.product_bytes;

    Layout layout;
    plan->common.place(&layout, p, plan->one_pass ? p.rows : CommonBuffers::totals_of(p.rows, group));
    layout.place(&plan->stats, p.statistics && !plan->one_pass, group * plan->parts * int64_t(sizeof(LossStats<FULL>)));
    layout.place(&plan->x, plan->pack_x, group * p.depth_stride() * p.bytes());
    layout.place(&plan->z, true, group * round_up(p.classes, int64_t(8)) * 4);
    layout.place(&plan->dx, p.dx && !plan->direct_dx, group * p.depth_stride() * 4);
    layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, p.classes * p.depth_stride() * 4);
    layout.place(&plan->dbias, p.dbias, p.classes * 4);
    layout.place(&plan->products, plan->product_bytes > 0, static_cast<int64_t>(plan->product_bytes));
    return layout.bytes();
}

size_t CublasLtFast::fit(const Problem &p, const Limits &limits, bool good_only, Plan *plan) {
    if (limits.budget)
        return fit_groups(p, limits.budget, good_only,
                          [&](int64_t group, bool) { return make(p, limits, group, plan); });
    /* Groups whose logits take FAST_TILE_BYTES; or one group of all rows, which needs no fp32 sums, if
     * that takes no more memory. */
    const int64_t most = FAST_TILE_BYTES / (4 * p.classes);
    const size_t bytes = make(p, limits, even_part(p.rows, max(most, FAST_ROWS), 256), plan);
    Plan one;
    const size_t one_bytes = make(p, limits, p.rows, &one);
    if (one_bytes > bytes)
        return bytes;
    *plan = one;
    return one_bytes;
}

size_t CublasLtFast::plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
    const Limits limits = limits_of(call);
    return bytes_to_report(limits, fit(Problem(call), limits, true, plan));
}

rafter_status CublasLtFast::launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
    RAFTER_TRY(rafter_cuda_open_products(context));
    char *const base = align_workspace(workspace);
    Run run(context, call);
    const Problem &p = run.problem;
    const ProductWorkspace products = {plan.products.in(base), plan.product_bytes};
    const int64_t tile_stride = round_up(p.classes, int64_t(8));
    float *const z = plan.z.in(base), *const dx = plan.dx.in(base), *const dweight = plan.dweight.in(base),
                 *const dbias = plan.dbias.in(base);
    const Operand all_x = {call.x.data, p.x.stride, false}, packed_x = {plan.x.in(base), p.depth_stride(), false};
    plan.common.use(&run, base);
    begin_call(&run, {}, base, plan.common);

    for (int64_t first = 0; first < p.rows; first += plan.group) {
        const int64_t rows = min(plan.group, p.rows - first);
        const LogitTile tile = {z, tile_stride, first, rows, 0, p.classes, run.bias};
        const Dz dz = {reinterpret_cast<char *>(z), tile_stride * 4 / p.bytes(), 0, p.classes};
        if (plan.pack_x)
            pack_rows(run, call.x, first, rows, plan.x.in(base));
        const Operand x = plan.pack_x ? packed_x : rows_from(all_x, p.dtype, first);

        RAFTER_TRY(form_logits(run, products, x, tile));
        if (plan.one_pass) {
            convert_rows(&run, tile, dz.data, dz.stride);
        } else {
            if (p.statistics)
                collect_statistics(run, tile, plan.parts, true, plan.stats.in(base));
            finish_rows(&run, NULL, first, rows, plan.stats.in(base), plan.parts);
            write_gradient(run, tile, dz.data, dz.stride, dbias, first == 0);
        }
        if (p.dx) {
            RAFTER_TRY(multiply_dx(run, products, dz, rows,
                                   plan.direct_dx ? into_tensor(run, call.dx, p.dx_layout, first) : into_sums(run, dx),
                                   false));
            if (!plan.direct_dx)
                store_rows(run, call.dx, p.dx_layout, false, first, rows, dx);
        }
        if (p.dweight) {
            const GradientOut out =
                plan.direct_dweight ? into_tensor(run, call.dweight, p.dweight_layout, 0) : into_sums(run, dweight);
            RAFTER_TRY(multiply_dweight(run, products, dz, rows, x, out,
                                        first > 0 || (plan.direct_dweight && p.adds_dweight)));
            if (plan.redo_nonfinite) {
                find_nonfinite(run, all_x);
                redo_nonfinite(run, all_x, dz, out);
            }
        }
    }
    if (p.dweight && !plan.direct_dweight)
        store_rows(run, call.dweight, p.dweight_layout, p.adds_dweight, 0, p.classes, dweight);
    if (p.dx)
        zero_ignored_dx(run, 0, p.rows);
    if (p.dbias)
        store_dbias(run, dbias);
    finish_call(run, {}, false);
    return RAFTER_OK;
}

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, cublaslt_fast, lce::CublasLtFast)
