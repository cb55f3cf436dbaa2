/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many rows side by side (classes not last), with any options, without a gradient: one kernel for the
 * whole call, in which a thread takes a row (cuda/row_threads.cuh).
 */
#include "cuda/row_threads.cuh"
#include "ops/cross_entropy/cuda/row_loss.cuh"

namespace {

struct ThreadArgs {
    Args call;
    RowThreads threads;
};

constexpr int THREADS_PER_SM = 4;             /* blocks per multiprocessor */
constexpr int FEW_STEPS = 4, MANY_STEPS = 16; /* elements that a thread loads at a time */

template <typename T, int OPTIONS, int STEPS>
__global__ __launch_bounds__(ROW_THREADS_BLOCK,
                             THREADS_PER_SM) void thread_per_row(const __grid_constant__ ThreadArgs a) {
    RowLoss<T, OPTIONS> op(a.call);
    thread_rows<RowLoss<T, OPTIONS>, T, STEPS>(op, a.threads);
    add_up(a.call, op.totals);
}

struct ThreadPerRow {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        RowThreads threads;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.gradient || !p.forward)
            return "it writes no gradient";
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        return why_not_threads(slabs_of(call.logits, NULL), static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->threads = threads_of(slabs_of(call.logits, NULL), THREADS_PER_SM * device.multiprocessors);
        plan->general.fill(device, p, call, plan->threads.blocks, &layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const ThreadArgs args = {plan.general.start(sequence, workspace), plan.threads};
        const Launch how = {plan.threads.blocks, ROW_THREADS_BLOCK};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                if (args.call.loss.classes <= FEW_STEPS)
                    sequence.run(how, thread_per_row<T, OPTIONS, FEW_STEPS>, args);
                else
                    sequence.run(how, thread_per_row<T, OPTIONS, MANY_STEPS>, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, thread_per_row, ThreadPerRow)
