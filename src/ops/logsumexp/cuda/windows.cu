/* SPDX-License-Identifier: Apache-2.0 */
/* Forward over a long dimension that is not the last one in memory: a block takes a window of adjacent rows, or a part
 * of its steps; a second kernel merges the parts (cuda/slab_windows.cuh). */
#include "cuda/slab_windows.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

struct WindowArgs {
    SlabWindows windows;
    LseRows lse;
    RowStats *part_stats; /* if windows have parts */
};

constexpr int RESIDENT = 65536 / 80; /* threads per multiprocessor, of 80 registers each */

template <typename T>
__global__ __launch_bounds__(WINDOW_BLOCK, 3) void window_statistics(const __grid_constant__ WindowArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    start_next_kernel();
    SlabLogsumexp<T> op = {a.lse};
    window_statistics_of<SlabLogsumexp<T>, T, WIDE<T>>(op, a.windows, reinterpret_cast<RowStats *>(dynamic),
                                                       a.part_stats);
}

/* MANY: rows have many parts; a warp merges each. */
template <typename T, bool MANY>
__global__ __launch_bounds__(WINDOW_BLOCK) void merge_parts(const __grid_constant__ WindowArgs a) {
    SlabLogsumexp<T> op = {a.lse};
    if (MANY)
        merge_windows_by_warps<SlabLogsumexp<T>, T>(op, a.windows, a.part_stats);
    else
        merge_windows<SlabLogsumexp<T>, T>(op, a.windows, a.part_stats);
}

struct Windows {
    typedef logsumexp_call Call;
    struct Plan {
        SlabWindows windows;
    };

    static WindowChoice choice(const Problem &p) {
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        return {bytes, 16 / bytes, true, RESIDENT};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.backward)
            return "it writes no gradient";
        if (p.rows == 0 || p.n == 0)
            return "there are no rows or no elements";
        const Slabs s = slabs_of(p.x, NULL);
        if (!windows_are_faster(s, static_cast<int>(rafter_dtype_bytes(p.x.dtype))))
            return "the tensor is small, or rows are short";
        return why_not_windows(s, choice(p));
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->windows =
            slab_windows_of(slabs_of(p.x, NULL), choice(p), call.algorithm == RAFTER_LOGSUMEXP_PARALLEL ? 2 : 1,
                            call.algorithm == RAFTER_LOGSUMEXP_RECURRENCE ? 1 : INT32_MAX);
        return static_cast<size_t>(plan->windows.part_stats()) * sizeof(RowStats);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const SlabWindows &w = plan.windows;
        const WindowArgs args = {w, lse_rows(call), reinterpret_cast<RowStats *>(workspace)};
        const Launch how = {w.blocks, w.threads, static_cast<size_t>(w.entries()) * sizeof(RowStats)};
        constexpr int MANY_PARTS = 16;
        const bool many = w.parts >= MANY_PARTS;
        const Launch merging = {many ? ceil_div<int64_t>(w.rows, MERGE_ROWS) : w.merge_blocks(), WINDOW_BLOCK};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, how, window_statistics<T>, args);
            if (w.parts > 1)
                ::launch(context, merging, many ? merge_parts<T, true> : merge_parts<T, false>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, windows, Windows)
