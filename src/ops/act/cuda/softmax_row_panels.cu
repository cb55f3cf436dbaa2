/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax over contiguous rows of any length: one block per row, or many if the row is long
 * (cuda/panel_softmax.cuh). */
#include "ops/act/cuda/softmax_panel_job.cuh"

namespace {

struct LongRows {
    typedef act_call Call;
    typedef PlannedPanels<false> Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const OrderedCall ordered(call, false);
        if (!is_softmax(call))
            return "kind is not softmax";
        if (!dim_is_contiguous(ordered.call))
            return "dim is strided";
        const int64_t numel = call.out.numel;
        return numel > INT32_MAX && numel / call.out.shape[call.dim] > INT32_MAX ? "it counts rows in 31 bits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, false);
        const SoftmaxViews views(ordered.call);
        const int dim = views.ndim() - 1;
        const int64_t length = views.size(dim), rows = views.numel() / length;
        plan->wide = views.wide();
        plan->expanded = false;
        const int64_t width = plan->wide ? 16 / rafter_dtype_bytes(call.out.dtype) : 1;
        plan->tensors = panel_tensors(ordered.call);
        plan->tensors.outer = walk_over(views.pointer, 0, dim);
        plan->tensors.panels_across = Divisor(1);
        plan->tensors.across = 1;
        plan->tensors.packs = 1;
        for (int t = 0; t < TENSORS; t++)
            plan->tensors.row_strides[t] = width;
        return plan->make(device, call, rows, length / width);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, false);
        ordered.copy(context);
        plan.launch(context, ordered.call, workspace);
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_row_panels, LongRows)
