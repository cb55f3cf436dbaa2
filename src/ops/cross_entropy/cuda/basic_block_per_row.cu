/* SPDX-License-Identifier: Apache-2.0 */
/* Basic calls (basic.cuh), forward without a gradient: a block per row, or per part of a row if rows
 * are few and long; then one block that adds up. */
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

constexpr int MOST_THREADS = 512;

/* A thread loads AT_ONCE packs at a time. U: BasicArgs or SpacedArgs. */
template <typename T, int AT_ONCE, class U>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_row(const __grid_constant__ U u) {
    constexpr int N = WIDE<T>;
    start_next_kernel();
    const int row = blockIdx.x, packs = u.classes / N, threads = blockDim.x;
    const T *const z = u.template row_of_z<T>(row);
    const int64_t label_at = u.label_at(row);
    Pack<T, N> pack[AT_ONCE];
    load_packs(pack, z, packs, threadIdx.x, threads);
    issue_loads_first();
    const int label = u.class_of(u.load_label(label_at));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(z[label]) : 0.0f;
    const RowStats s =
        label >= 0 ? merge_block(stats_of_packs(pack, z, packs, threadIdx.x, threads), 1.0f) : no_elements();
    if (threadIdx.x == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

/* `parts` blocks per row; all parts but the last have `part` packs. The last block of a row to end merges
 * the parts, in order. */
template <typename T>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_part(const __grid_constant__ BasicArgs u, unsigned parts,
                                                                  int part, RowStats *part_stats) {
    constexpr int N = WIDE<T>;
    start_next_kernel();
    const int row = static_cast<int>(blockIdx.x / parts), threads = blockDim.x;
    const int from = static_cast<int>(blockIdx.x - row * parts) * part, packs = min(u.classes / N - from, part);
    const T *const first = u.row_of_z<T>(row), *const z = first + int64_t(from) * N;
    Pack<T, N> pack[IN_FLIGHT];
    load_packs(pack, z, packs, threadIdx.x, threads);
    issue_loads_first();
    const int label = u.class_of(u.load_label(row));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(first[label]) : 0.0f;
    RowStats s = no_elements();
    if (label >= 0) {
        s = merge_block(stats_of_packs(pack, z, packs, threadIdx.x, threads), 1.0f);
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
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.forward || p.gradient)
            return "a gradient is wanted";
        return why_not_basic(p, call);
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
        return layout.bytes;
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args,
                                     char *workspace) {
        LaunchSequence sequence = {context};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const int packs = args.classes / WIDE<T>;
            if (plan.split.parts > 1)
                sequence.run(Launch{args.rows * plan.split.parts, plan.split.threads}, block_per_part<T>,
                             static_cast<const BasicArgs &>(args), static_cast<unsigned>(plan.split.parts),
                             static_cast<int>(plan.split.part / WIDE<T>),
                             at_offset<RowStats>(workspace, plan.part_stats));
            else if (packs <= 2 * 128)
                sequence.run(Launch{args.rows, 128}, block_per_row<T, 2, U>, args);
            else
                sequence.run(Launch{args.rows, power_at_least(packs / 4, 128, MOST_THREADS)}, block_per_row<T, 4, U>,
                             args);
        });
        if (args.loss)
            sequence.run(Launch{1, ONE_BLOCK}, sum_losses<U>, args);
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
