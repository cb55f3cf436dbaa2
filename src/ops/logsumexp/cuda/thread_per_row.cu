/* SPDX-License-Identifier: Apache-2.0 */
/* Forward of many rows side by side: a thread takes a row or a part of one (cuda/row_threads.cuh). */
#include "cuda/row_threads.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

/* Blocks per multiprocessor. */
constexpr int THREADS_PER_SM = 4;
constexpr int FEW_STEPS = 4, MANY_STEPS = 16; /* elements that a thread loads at a time */

struct ThreadArgs {
    RowThreads threads;
    LseRows lse;
    RowStats *part_stats; /* if rows are cut */
};

template <typename T, int STEPS, bool PARTS>
__global__ __launch_bounds__(ROW_THREADS_BLOCK,
                             THREADS_PER_SM) void thread_per_row(const __grid_constant__ ThreadArgs a) {
    wait_for_inputs();
    start_next_kernel();
    RowLogsumexp<T> op = {a.lse};
    thread_rows<RowLogsumexp<T>, T, STEPS, PARTS>(op, a.threads, a.part_stats);
}

template <typename T, int LANES>
__global__ __launch_bounds__(ROW_THREADS_BLOCK) void merge_parts(const __grid_constant__ ThreadArgs a) {
    RowLogsumexp<T> op = {a.lse};
    merge_thread_rows<RowLogsumexp<T>, T, LANES>(op, a.threads, a.part_stats);
}

struct ThreadPerRow {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        RowThreads threads;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.backward)
            return "it writes no gradient";
        if (call.common.batch_invariant)
            return why_not_order(STRIDED_ROWS, p.order(), p.rows, p.n);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        const Slabs s = slabs_of(p.x, NULL);
        if (p.n > 32 && p.rows * p.row_bytes() > 10 << 20 && s.packs_across(0, bytes))
            return "every step has whole packs: columns of packs are faster";
        return why_not_threads(s, bytes);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const RowThreads &t = plan->threads = threads_of(
            slabs_of(Problem(call).x, NULL), THREADS_PER_SM * device.multiprocessors, call.common.batch_invariant);
        return t.parts > 1 ? size_t(t.rows) * t.parts * sizeof(RowStats) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const ThreadArgs args = {plan.threads, lse_rows(call), reinterpret_cast<RowStats *>(workspace)};
        const Launch how = {plan.threads.blocks, ROW_THREADS_BLOCK};
        Launch merging = {plan.threads.merge_blocks, ROW_THREADS_BLOCK};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.threads.parts > 1) {
                ::launch(context, how, thread_per_row<T, MANY_STEPS, true>, args);
                if (plan.threads.merge_lanes == 1)
                    ::launch(context, merging, merge_parts<T, 1>, args);
                else
                    ::launch(context, merging, merge_parts<T, WARP>, args);
            } else if (plan.threads.slabs.length <= FEW_STEPS) {
                ::launch(context, how, thread_per_row<T, FEW_STEPS, false>, args);
            } else {
                ::launch(context, how, thread_per_row<T, MANY_STEPS, false>, args);
            }
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, thread_per_row, ThreadPerRow)
