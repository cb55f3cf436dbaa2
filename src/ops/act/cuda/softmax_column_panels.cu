/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax over a strided dimension of any length: panels of adjacent columns, one block per panel or many
 * (cuda/panel_softmax.cuh). */
#include "ops/act/cuda/softmax_panel_job.cuh"

namespace {

struct Columns {
    typedef act_call Call;
    typedef PlannedPanels<true> Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const OrderedCall ordered(call, true);
        return !is_softmax(call) ? "kind is not softmax" : ordered.dim_is_contiguous() ? "dim is contiguous" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SoftmaxViews views(ordered.call, ordered.expanded);
        const ColumnPanels columns(ordered.call, views);
        plan->tensors = columns.tensors;
        plan->wide = columns.wide;
        plan->expanded = ordered.expanded;
        return plan->make(device, call, columns.panels, columns.rows);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        plan.launch(context, ordered.call, workspace);
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_column_panels, Columns)
