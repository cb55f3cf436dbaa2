/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of any length in any layout, with any options.
 *
 * Forward: one kernel, in which threads load packs of slabs (cuda/slab_tiles.cuh). Few long rows are
 * split among blocks, and the last block of a row to finish merges its parts, in order. Long rows
 * side by side have kernels of their own (cuda/slab_windows.cuh).
 *
 * Backward: first coefficients of all rows, from lse or from statistics. Then the gradient, of
 * contiguous rows by short blocks, of others by columns of packs (cuda/slab_columns.cuh).
 */
#include "ops/cross_entropy/cuda/tiles.cuh"

namespace {

struct Tiles {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        GeneralPlan general;
        SlabTiles forward, backward;     /* backward: of contiguous rows */
        bool statistics, in_windows;     /* are needed: lse is not given; by window_statistics */
        bool sideways;                   /* rows are not contiguous */
        int64_t blocks;                  /* of tile_statistics */
        size_t part_stats, coefficients; /* offsets in the workspace */
        size_t shared;
    };

    static bool is_sideways(const Slabs &s) {
        return s.inner > 1 || s.step[0] != 1 || s.step[1] != 1;
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        if (call.common.batch_invariant && !p.lse_given)
            return "its statistics are not batch invariant";
        if (invariant_is_faster(p, call))
            return "`invariant` is faster for so many rows of this length";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        return too_large(s) || (p.gradient && is_sideways(s) && columns_too_many(slab_columns_of(s, bytes)))
                   ? "it counts rows and columns in 31 bits"
                   : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        plan->general.fill(device, p, call, 0, &unused);
        const bool full = plan->general.options >= FULL;
        plan->statistics = !p.lse_given;
        plan->forward = tiles_of(s, bytes, {false, !full, full ? 2 : 4, 576, true});
        plan->sideways = is_sideways(s);
        if (p.gradient && !plan->sideways)
            plan->backward = tiles_of(s, bytes, {true, !full, full ? 2 : 4, 576, false});
        const SlabTiles &t = plan->forward;
        const int64_t stats = plan->general.stats_bytes();
        plan->shared = static_cast<size_t>((2 * t.entries() + int64_t(t.batch) * t.rows_of_tile()) * stats +
                                           (t.has_edges() ? 2 * t.group * (32 + 8) : 0));
        const int64_t own = 3 << 10, per_sm = min(int64_t(t.lines > 1 ? 576 : 768) / t.threads,
                                                  (device.shared_bytes + 1024) / (int64_t(plan->shared) + own));
        plan->blocks = min(t.tiles, max(per_sm, int64_t(1)) * device.multiprocessors);
        const WindowChoice choice = window_choice(call);
        plan->in_windows = plan->statistics && !why_not_windows(s, choice);
        if (plan->in_windows) {
            const SlabWindows w = slab_windows_of(s, choice);
            plan->general.fill(device, p, call, w.parts > 1 ? w.merge_blocks() : int64_t(w.blocks), &layout);
            plan->part_stats = layout.add(w.part_stats() * stats);
        } else {
            plan->general.fill(device, p, call, plan->blocks, &layout);
            plan->part_stats =
                t.parts > 1 && plan->statistics ? layout.add(t.tiles * int64_t(t.rows_of_tile()) * stats) : 0;
        }
        plan->coefficients = !p.gradient ? 0
                                         : layout.add(plan->sideways ? ColumnCoefficients::bytes(p.rows)
                                                                     : p.rows * int64_t(sizeof(RowCoefficients)));
        return layout.bytes;
    }

    template <typename T, int OPTIONS, int N, int LINES>
    static void tiles(const rafter_context *context, const Plan &plan, const TileArgs &args) {
        ::launch(context, Launch{plan.blocks, plan.forward.threads, plan.shared}, tile_statistics<T, OPTIONS, N, LINES>,
                 args);
    }
    template <typename T, int OPTIONS>
    static void windows(const rafter_context *context, const Call &call, const Plan &plan, const TileArgs &args) {
        const SlabWindows w = slab_windows_of(plan.forward.slabs, window_choice(call));
        const WindowArgs in_windows = {args.call, w, args.part_stats, args.outputs};
        const size_t shared = static_cast<size_t>(w.entries()) * sizeof(LossStats<OPTIONS>);
        ::launch(context, Launch{w.blocks, w.threads, shared}, window_statistics<T, OPTIONS>, in_windows);
        if (w.parts > 1)
            ::launch(context, Launch{w.merge_blocks(), WINDOW_BLOCK}, merge_window_parts<T, OPTIONS>, in_windows);
    }
    template <typename T, int OPTIONS>
    static void statistics(const rafter_context *context, const Plan &plan, const TileArgs &args) {
        constexpr int N = WIDE<T>;
        if (plan.forward.elements == 1)
            tiles<T, OPTIONS, 1, 1>(context, plan, args);
        else if (plan.forward.lines == 1)
            tiles<T, OPTIONS, N, 1>(context, plan, args);
        else if constexpr (OPTIONS != FULL)
            tiles<T, OPTIONS, N, N>(context, plan, args);
    }
    template <typename T, int OPTIONS>
    static void gradients(const rafter_context *context, const Call &call, const Plan &plan, TileArgs args) {
        if (plan.sideways) {
            const ColumnArgs columns = {args.call, slab_columns_of(slabs_of(call.logits, &call.dlogits), sizeof(T)),
                                        args.outputs.columns};
            const Launch how = {ceil_div<int64_t>(columns.columns.threads, COLUMN_BLOCK), COLUMN_BLOCK};
            for_columns_of<T>(columns.columns, [&](auto n, auto shifted) {
                ::launch(context, how, column_gradients<T, OPTIONS, decltype(n)::value, decltype(shifted)::value>,
                         columns);
            });
        } else {
            args.tiles = plan.backward;
            ::launch(context, Launch{plan.backward.tiles, plan.backward.threads}, tile_gradients<T, OPTIONS, WIDE<T>>,
                     args);
        }
    }
    /* Computes coefficients from lse. */
    template <typename T, int OPTIONS>
    static void coefficients(const rafter_context *context, const Plan &plan, const TileArgs &args) {
        const Launch how = {ceil_div<int64_t>(args.call.loss.rows, ROW_THREADS), ROW_THREADS};
        if (plan.sideways)
            ::launch(context, how, column_coefficients<T, OPTIONS>, args.call, args.outputs.columns);
        else
            ::launch(context, how, compute_coefficients<T, OPTIONS, true>, args.call, args.outputs.rows);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        TileArgs args = {};
        args.call = plan.general.start(context, workspace);
        args.tiles = plan.forward;
        args.counters = context->cuda_state->counters + 1;
        args.part_stats = at_offset<char>(workspace, plan.part_stats);
        char *const coefficients_at = at_offset<char>(workspace, plan.coefficients);
        if (args.call.gradient && plan.sideways)
            args.outputs.columns = ColumnCoefficients::at(coefficients_at, args.call.loss.rows);
        else if (args.call.gradient)
            args.outputs.rows = reinterpret_cast<RowCoefficients *>(coefficients_at);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.in_windows)
                for_options(plan.general.options,
                            [&](auto o) { windows<T, decltype(o)::value>(context, call, plan, args); });
            for_options_but_capped(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value, BACKWARD = IN_BACKWARD<OPTIONS>;
                if (!plan.statistics)
                    coefficients<T, BACKWARD>(context, plan, args);
                else if (!plan.in_windows)
                    statistics<T, OPTIONS>(context, plan, args);
                if (args.call.gradient)
                    gradients<T, BACKWARD>(context, call, plan, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, tiles, Tiles)
