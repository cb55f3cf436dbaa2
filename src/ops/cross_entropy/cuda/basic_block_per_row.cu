/* SPDX-License-Identifier: Apache-2.0 */
/* Basic calls (basic.cuh), forward without a gradient: a block per row, then one block that adds
 * up. */
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

constexpr int MOST_THREADS = 512;

/* A thread loads AT_ONCE packs at a time. */
template <typename T, int AT_ONCE>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_row(const __grid_constant__ BasicArgs u) {
    constexpr int N = WIDE<T>;
    start_next_kernel();
    const int row = blockIdx.x, packs = u.classes / N, threads = blockDim.x;
    const T *const z = u.row_of_z<T>(row);
    Pack<T, N> pack[AT_ONCE];
    load_packs(pack, z, packs, threadIdx.x, threads);
    issue_loads_first();
    const int label = u.class_of(u.load_label(row));
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(z[label]) : 0.0f;
    const RowStats s =
        label >= 0 ? merge_block(stats_of_packs(pack, z, packs, threadIdx.x, threads), 1.0f) : no_elements();
    if (threadIdx.x == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

struct BasicBlockPerRow {
    typedef cross_entropy_call Call;
    struct Plan {
        BasicArgs args;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.forward || p.gradient)
            return "a gradient is wanted";
        if (const char *reason = why_not_basic(p, call))
            return reason;
        return split_rows(p, call.logits.dtype).parts > 1 ? "rows are few and long: they are split" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        return p.rows * sizeof(double);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        BasicArgs args = plan.args;
        args.losses = at_offset<double>(workspace, 0);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const int packs = args.classes / WIDE<T>;
            if (packs <= 2 * 128)
                sequence.run(Launch{args.rows, 128}, block_per_row<T, 2>, args);
            else
                sequence.run(Launch{args.rows, power_at_least(packs / 4, 128, MOST_THREADS)}, block_per_row<T, 4>,
                             args);
        });
        if (args.loss)
            sequence.run(Launch{1, ONE_BLOCK}, sum_losses, args);
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_block_per_row, BasicBlockPerRow)
