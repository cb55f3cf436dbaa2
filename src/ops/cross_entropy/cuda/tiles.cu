/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of any length in any layout, with any options. Forward: one kernel, in which threads load
 * packs of slabs (cuda/slab_tiles.cuh); few long rows are split among blocks, and the last block of
 * a row to finish merges its parts, in order. Backward: coefficients of all rows, from lse or from
 * statistics, then the gradient by short blocks.
 */
#include "ops/cross_entropy/cuda/coefficients.cuh"
#include "ops/cross_entropy/cuda/tiles.cuh"

namespace {

struct Tiles {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        GeneralPlan general;
        SlabTiles forward, backward;
        bool statistics;
        int64_t blocks;                  /* of statistics */
        size_t part_stats, coefficients; /* offsets in the workspace */
        size_t shared;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        if (call.common.batch_invariant && !p.lse_given)
            return "its statistics are not batch invariant";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        return too_large(s) ? "it counts rows and columns in 31 bits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        plan->general.fill(device, p, call, 0, &unused);
        const bool full = plan->general.options == FULL;
        plan->statistics = !p.lse_given;
        plan->forward = tiles_of(s, bytes, {false, !full, full ? 2 : 4, 576, true});
        if (p.gradient)
            plan->backward = tiles_of(s, bytes, {true, !full, full ? 2 : 4, 576, false});
        const SlabTiles &t = plan->forward;
        const int64_t stats = plan->general.stats_bytes();
        plan->shared = static_cast<size_t>((2 * t.entries() + int64_t(t.batch) * t.rows_of_tile()) * stats +
                                           (t.has_edges() ? 2 * t.group * (32 + 8) : 0));
        const int64_t own = 3 << 10, per_sm = min(int64_t(t.lines > 1 ? 576 : 768) / t.threads,
                                                  (device.shared_bytes + 1024) / (int64_t(plan->shared) + own));
        plan->blocks = min(t.tiles, max(per_sm, int64_t(1)) * device.multiprocessors);
        plan->general.fill(device, p, call, plan->blocks, &layout);
        plan->part_stats =
            t.parts > 1 && plan->statistics ? layout.add(t.tiles * int64_t(t.rows_of_tile()) * stats) : 0;
        plan->coefficients = p.gradient ? layout.add(p.rows * int64_t(sizeof(RowCoefficients))) : 0;
        return layout.bytes;
    }

    template <typename T, int OPTIONS, int N, int LINES>
    static void statistics(LaunchSequence &sequence, const Plan &plan, const TileArgs &args) {
        sequence.run(Launch{plan.blocks, plan.forward.threads, plan.shared}, tile_statistics<T, OPTIONS, N, LINES>,
                     args);
    }
    template <typename T, int OPTIONS, int N, int LINES>
    static void gradients(LaunchSequence &sequence, const Plan &plan, const TileArgs &args) {
        sequence.run(Launch{plan.backward.tiles, plan.backward.threads}, tile_gradients<T, OPTIONS, N, LINES>, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        TileArgs args = {plan.general.start(sequence, workspace), plan.forward, context->cuda_state->counters + 1,
                         at_offset<char>(workspace, plan.part_stats), nullptr};
        if (args.call.gradient)
            args.coefficients = at_offset<RowCoefficients>(workspace, plan.coefficients);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            constexpr int N = WIDE<T>;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value, BACKWARD = IN_BACKWARD<OPTIONS>;
                const SlabTiles &f = plan.forward, &b = plan.backward;
                if (!plan.statistics)
                    sequence.run(Launch{ceil_div<int64_t>(args.call.loss.rows, ROW_THREADS), ROW_THREADS},
                                 compute_coefficients<T, BACKWARD, true>, args.call, args.coefficients);
                else if (f.elements == 1)
                    statistics<T, OPTIONS, 1, 1>(sequence, plan, args);
                else if (f.lines == 1)
                    statistics<T, OPTIONS, N, 1>(sequence, plan, args);
                else if constexpr (OPTIONS != FULL)
                    statistics<T, OPTIONS, N, N>(sequence, plan, args);
                if (!args.call.gradient)
                    return;
                args.tiles = b;
                if (b.elements == 1)
                    gradients<T, BACKWARD, 1, 1>(sequence, plan, args);
                else if (b.lines == 1)
                    gradients<T, BACKWARD, N, 1>(sequence, plan, args);
                else if constexpr (BACKWARD != FULL)
                    gradients<T, BACKWARD, N, N>(sequence, plan, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, tiles, Tiles)
