/* SPDX-License-Identifier: Apache-2.0 */
/* Calls without rows or without classes: writes the results of rows and the loss, and zeros as gradients. */
#include "cuda/variant.cuh"
#include "ops/linear_cross_entropy/cuda/call_steps.cuh"

namespace lce {

struct Empty {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    static constexpr bool SHARES_CLASSES = true; /* without rows there is nothing to exchange */

    struct Plan {
        CommonBuffers common;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const bool classes = call.loss.classes > 0 || call.loss.class_group.ranks > 0; /* other ranks may have some */
        return call.loss.rows > 0 && classes ? "there are rows and classes" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        Layout layout;
        *plan = {};
        plan->common.place(&layout, p, CommonBuffers::totals_of(p.rows, max(p.rows, int64_t(1))));
        return layout.bytes();
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        Run run(context, call);
        const Problem &p = run.problem;
        plan.common.use(&run, align_workspace(workspace));
        prepare(&run, {});
        finish_rows(&run, NULL, 0, p.rows, NULL, 1);
        if (p.dx)
            store_rows(run, call.dx, p.dx_layout, false, 0, p.rows, NULL);
        if (p.dweight && !p.adds_dweight)
            store_rows(run, call.dweight, p.dweight_layout, false, 0, p.classes, NULL);
        if (p.dbias)
            store_dbias(run, NULL);
        finish_call(run, {}, false);
        return RAFTER_OK;
    }
};

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, empty, lce::Empty)
