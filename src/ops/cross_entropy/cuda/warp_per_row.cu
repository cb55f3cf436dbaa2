/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of short contiguous rows, with any options: one kernel for the whole call, a warp per row. */
#include "ops/cross_entropy/cuda/warp_per_row.cuh"

namespace {

struct WarpPerRow {
    typedef cross_entropy_call Call;
    typedef WarpRowsPlan Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.gradient)
            return "it writes gradients";
        if (p.strided)
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        return p.row_bytes <= 2048 ? NULL : "rows are too long for a warp";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        return plan->fill(device, call);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        const Launch how = {plan.blocks, ROW_THREADS};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options_but_capped(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                if (args.loss.forward)
                    ::launch(context, how, warp_per_row<T, OPTIONS, true, true, false>, args);
                else
                    ::launch(context, how, warp_per_row<T, IN_BACKWARD<OPTIONS>, false, true, false>, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, warp_per_row, WarpPerRow)
