/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward with lse from forward, contiguous rows, any options: a thread per row computes
 * coefficients. Then short blocks, each of which takes 4 KB of a row, write the gradient.
 */
#include "ops/cross_entropy/cuda/coefficients.cuh"
#include "ops/cross_entropy/cuda/gradients.cuh"

namespace {

struct FromLse {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        size_t coefficients; /* offset in the workspace */
        int64_t row_blocks, parts;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.lse_given)
            return "it is for backward with lse";
        if (p.invariant && (p.order == TINY_ROWS || p.order == CHUNKED_ROWS))
            return "rows are short";
        if (p.rows > INT32_MAX)
            return "it counts rows in 31 bits";
        return p.strided ? "rows are not contiguous, or dlogits is aligned otherwise than logits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        plan->parts = p.gradient_parts();
        plan->general.fill(device, p, call, plan->row_blocks, &layout);
        plan->coefficients = layout.add(p.rows * int64_t(sizeof(RowCoefficients)));
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        RowCoefficients *const coefficients = at_offset<RowCoefficients>(workspace, plan.coefficients);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = IN_BACKWARD<decltype(o)::value>;
                ::launch(context, Launch{plan.row_blocks, ROW_THREADS}, compute_coefficients<T, OPTIONS, false>, args,
                         coefficients);
                ::launch(context, Launch{args.loss.rows * plan.parts, GRADIENT_THREADS}, gradients<T, OPTIONS>, args,
                         coefficients, static_cast<unsigned>(plan.parts));
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, from_lse, FromLse)
