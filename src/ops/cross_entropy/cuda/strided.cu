/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serves every call: any strides and any options. One kernel for the whole call, a warp per row,
 * which loads one column at a time.
 */
#include "ops/cross_entropy/cuda/warp_per_row.cuh"

namespace {

struct Strided {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    typedef WarpRowsPlan Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        return p.invariant && are_too_many(p.order, p.rows, p.classes)
                   ? "the call is batch invariant, and has more rows than the kernels for them count"
                   : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        return plan->fill(device, call);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, Launch{plan.blocks, ROW_THREADS}, warp_per_row<T, FULL, true, true, true>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, strided, Strided)
