/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward without a gradient, of basic calls (basic.cuh) with contiguous rows at any alignment, also with label
 * smoothing or class weights. A block takes a row, or a part of a row if rows are few and long. Then one block, or a
 * few, add up the losses.
 */
#include "cuda/block_span.cuh"
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

constexpr int MOST_THREADS = 512;
/* Rows that are not whole packs have at least LEAST_BYTES if they are few: at most FEW_SHORT_ROWS of up to SHORT_ROW
 * bytes, SCANNED_ROWS of longer ones. Else they have LONG_ROW bytes, or LONG_SMOOTHED_ROW with label smoothing. */
constexpr int64_t LEAST_BYTES = 512, SHORT_ROW = 2 << 10, LONG_ROW = 4 << 10, LONG_SMOOTHED_ROW = 6 << 10,
                  FEW_SHORT_ROWS = 2048;

/* A thread loads AT_ONCE packs at a time. WHOLE: rows are whole aligned packs. SMOOTHS: the call has label smoothing.
 * U: BasicArgs or SpacedArgs. */
template <typename T, int AT_ONCE, bool WHOLE, bool SMOOTHS, class U>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_row(const __grid_constant__ U u) {
    wait_for_inputs();
    start_next_kernel();
    const int row = blockIdx.x;
    const T *const z = u.template row_of_z<T>(row);
    const int64_t label_at = u.label_at(row);
    const BlockSpan<T, WHOLE> span(z, u.classes);
    Pack<T, WIDE<T>> pack[AT_ONCE];
    load_packs(pack, span.body, span.packs, threadIdx.x, blockDim.x);
    fence_loads();
    const int label = u.class_of(u.load_label(label_at));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(z[label]) : 0.0f;
    float total = 0.0f;
    RowStats s = no_elements();
    if (label >= 0) {
        s = merge_block(span.stats(pack, SMOOTHS ? &total : nullptr), 1.0f);
        if constexpr (SMOOTHS)
            total = static_cast<float>(block_sum(static_cast<double>(total)));
    }
    if (threadIdx.x == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label, SMOOTHS ? &total : nullptr);
}

/* `parts` blocks per row; all parts but the last have `part` elements. The last block of a row to finish merges
 * the parts, in order. */
template <typename T, bool WHOLE>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_part(const __grid_constant__ BasicArgs u, unsigned parts,
                                                                  int part, RowStats *part_stats) {
    wait_for_inputs();
    start_next_kernel();
    const int row = static_cast<int>(blockIdx.x / parts);
    const int from = static_cast<int>(blockIdx.x - row * parts) * part;
    const T *const first = u.row_of_z<T>(row);
    const BlockSpan<T, WHOLE> span(first + from, min(u.classes - from, part));
    Pack<T, WIDE<T>> pack[IN_FLIGHT];
    load_packs(pack, span.body, span.packs, threadIdx.x, blockDim.x);
    fence_loads();
    const int label = u.class_of(u.load_label(row));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(first[label]) : 0.0f;
    RowStats s = no_elements();
    if (label >= 0) {
        s = merge_block(span.stats(pack), 1.0f);
        if (threadIdx.x == 0)
            part_stats[blockIdx.x] = s;
        if (!block_arrives_last(u.counter + row, parts) || threadIdx.x >= WARP)
            return;
        s = no_elements();
        for (unsigned i = threadIdx.x; i < parts; i += WARP)
            s = merge(s, load_stats(part_stats + row * parts + i), 1.0f);
        s = merge_lanes<WARP>(s, 1.0f);
    } else if (from > 0) {
        return;
    }
    if (threadIdx.x == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

struct BasicBlockPerRow {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        BasicArgs args;
        Split split;
        size_t part_stats; /* offset in the workspace, if rows are split */
        BasicTotals totals;
    };

    /* Whether rows that are not whole packs are for streamed_rows, because there are so many. */
    static bool are_streamed(const Problem &p, const Call &call) {
        constexpr int64_t LIMIT = 33 << 10, LARGE = 512 << 20, MEDIUM = 256 << 20;
        const bool smooths = call.loss.smoothing != 0.0f;
        const int64_t limit = smooths ? LIMIT : least_bytes_for_blocks(call.logits.dtype);
        return !p.invariant && !p.whole_packs && p.row_bytes < limit &&
               p.rows * p.row_bytes >= (smooths ? LARGE : MEDIUM);
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.forward || p.gradient)
            return "a gradient is wanted";
        /* Measured on an H200: docs/perf/cross_entropy.md. */
        const bool few = p.rows <= (p.row_bytes <= SHORT_ROW ? FEW_SHORT_ROWS : SCANNED_ROWS);
        const int64_t long_row = call.loss.smoothing != 0.0f ? LONG_SMOOTHED_ROW : LONG_ROW;
        if (!p.whole_packs && !(p.row_bytes >= LEAST_BYTES && few) && p.row_bytes < long_row)
            return "rows are short and not whole, aligned packs of 16 bytes";
        if (are_streamed(p, call))
            return "so many rows that are not whole packs are streamed faster";
        if (invariant_is_faster(p, call))
            return "`invariant` is faster for so many rows of this length";
        if (call.loss.smoothing != 0.0f && split_rows(p, call.logits.dtype).parts > 1)
            return "there is label smoothing, and rows are few and long";
        return why_not_any_rows(p, call, long_row);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->args = basic_args(device, p, call);
        write_each_loss(&plan->args, call);
        plan->split = p.invariant ? Split{} : split_rows(p, call.logits.dtype);
        layout.add(p.rows * int64_t(sizeof(double)));
        plan->part_stats =
            plan->split.parts > 1 ? layout.add(p.rows * plan->split.parts * int64_t(sizeof(RowStats))) : 0;
        plan->totals.place(&layout);
        return layout.bytes;
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args,
                                     char *workspace) {
        const Problem p(call);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const int packs = args.classes / WIDE<T>;
            const auto run = [&](auto whole, auto smooths) {
                constexpr bool WHOLE = decltype(whole)::value, SMOOTHS = decltype(smooths)::value;
                if (packs <= 2 * 128)
                    ::launch(context, Launch{args.rows, 128}, block_per_row<T, 2, WHOLE, SMOOTHS, U>, args);
                else
                    ::launch(context, Launch{args.rows, span_threads(packs, 4, 128, MOST_THREADS)},
                             block_per_row<T, 4, WHOLE, SMOOTHS, U>, args);
            };
            if constexpr (std::is_same<U, BasicArgs>::value)
                for_bool(p.whole_packs, [&](auto whole) {
                    if (plan.split.parts > 1)
                        return ::launch(context, Launch{args.rows * plan.split.parts, plan.split.threads},
                                        block_per_part<T, decltype(whole)::value>, args,
                                        static_cast<unsigned>(plan.split.parts), static_cast<int>(plan.split.part),
                                        at_offset<RowStats>(workspace, plan.part_stats));
                    for_bool(args.smooths, [&](auto smooths) { run(whole, smooths); });
                });
            else
                run(std::true_type(), std::false_type()); /* batch-invariant calls: not split, without options */
        });
        if (args.loss)
            plan.totals.add_up(context, args, workspace);
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        BasicArgs args = plan.args;
        args.losses = at_offset<double>(workspace, 0);
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(args, p, call), workspace)
                                  : launch_with(context, call, plan, args, workspace);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_block_per_row, BasicBlockPerRow)
