/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many rows side by side (classes not last), with any options, without a gradient: one kernel for the
 * whole call, in which a thread takes a row (cuda/row_threads.cuh).
 */
#include "cuda/row_threads.cuh"
#include "ops/cross_entropy/cuda/row_loss.cuh"
#include "ops/cross_entropy/cuda/windows.cuh"

namespace {

struct ThreadArgs {
    Args call;
    RowThreads threads;
    void *part_stats; /* if rows are cut */
};

constexpr int THREADS_PER_SM = 4;             /* blocks per multiprocessor */
constexpr int FEW_STEPS = 4, MANY_STEPS = 16; /* elements that a thread loads at a time */

template <typename T, int OPTIONS, int STEPS, bool PARTS>
__global__ __launch_bounds__(ROW_THREADS_BLOCK,
                             THREADS_PER_SM) void thread_per_row(const __grid_constant__ ThreadArgs a) {
    wait_unless_prepared(a.call);
    start_next_kernel();
    RowLoss<T, OPTIONS> op(a.call);
    thread_rows<RowLoss<T, OPTIONS>, T, STEPS, PARTS>(op, a.threads, static_cast<LossStats<OPTIONS> *>(a.part_stats));
    if constexpr (!PARTS)
        add_up(a.call, op.totals);
}

template <typename T, int OPTIONS, int LANES>
__global__ __launch_bounds__(ROW_THREADS_BLOCK) void merge_parts(const __grid_constant__ ThreadArgs a) {
    RowLoss<T, OPTIONS> op(a.call);
    merge_thread_rows<RowLoss<T, OPTIONS>, T, LANES>(op, a.threads,
                                                     static_cast<const LossStats<OPTIONS> *>(a.part_stats));
    add_up(a.call, op.totals);
}

struct ThreadPerRow {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        RowThreads threads;
        size_t part_stats; /* offset in the workspace */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.gradient || !p.forward)
            return "it writes no gradient";
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        if (p.invariant)
            return why_not_order(STRIDED_ROWS, p.order, p.rows, p.classes);
        const Slabs s = slabs_of(call.logits, NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        constexpr int64_t FEW_ROWS = 32, LONG = 1 << 16; /* docs/perf/cross_entropy.md */
        const struct rafter_loss &l = call.loss;
        const bool extras = l.softcap != 0.0f || l.logprob.data || l.entropy.data || l.argmax.data;
        if (p.rows < FEW_ROWS && p.classes > LONG && !extras)
            return "rows are few and long";
        if (windows_are_faster(p, s, call))
            return "the tensor is large: windows of packs are faster";
        return why_not_threads(s, bytes);
    }

    /* Whether tiles.cu, with windows of packs, is faster. It is not with options whose arithmetic takes longer than the
     * loads. Measured on an H200. */
    static bool windows_are_faster(const Problem &p, const Slabs &s, const Call &call) {
        constexpr int64_t LARGE = 1 << 30, MEDIUM = 64 << 20;
        const WindowChoice choice = window_choice(call);
        const bool general = !choice.repeats || call.loss.softcap != 0.0f;
        const int64_t all = p.rows * p.row_bytes;
        const bool faster =
            all >= LARGE ? p.classes >= 128 : all > MEDIUM && p.classes >= 4096 && s.packs_across(0, choice.bytes);
        return !general && faster && !why_not_windows(s, choice);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->threads = threads_of(slabs_of(call.logits, NULL), THREADS_PER_SM * device.multiprocessors, p.invariant);
        const RowThreads &t = plan->threads;
        plan->general.fill(device, p, call, t.parts > 1 ? t.merge_blocks : t.blocks, &layout);
        plan->part_stats = t.parts > 1 ? layout.add(p.rows * t.parts * plan->general.stats_bytes()) : 0;
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const ThreadArgs args = {plan.general.start(context, workspace), plan.threads,
                                 at_offset<char>(workspace, plan.part_stats)};
        const Launch how = {plan.threads.blocks, ROW_THREADS_BLOCK},
                     merging = {plan.threads.merge_blocks, ROW_THREADS_BLOCK};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                if (args.threads.parts > 1) {
                    ::launch(context, how, thread_per_row<T, OPTIONS, MANY_STEPS, true>, args);
                    if (args.threads.merge_lanes == 1)
                        ::launch(context, merging, merge_parts<T, OPTIONS, 1>, args);
                    else
                        ::launch(context, merging, merge_parts<T, OPTIONS, WARP>, args);
                } else if (args.call.loss.classes <= FEW_STEPS) {
                    ::launch(context, how, thread_per_row<T, OPTIONS, FEW_STEPS, false>, args);
                } else {
                    ::launch(context, how, thread_per_row<T, OPTIONS, MANY_STEPS, false>, args);
                }
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, thread_per_row, ThreadPerRow)
