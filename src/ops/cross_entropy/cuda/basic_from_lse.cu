/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Basic calls (basic.cuh), backward with lse from forward: a thread per row computes coefficients,
 * then short blocks of 4 KB of a row each write the gradient.
 */
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

/* A thread per row. The whole warp reads the rows whose lse is not accurate enough. known_factor: NULL, if
 * every block is to compute it. U: BasicArgs or SpacedArgs. */
template <typename T, class U>
__global__ __launch_bounds__(ROW_THREADS) void coefficients(const __grid_constant__ U u, const double *known_factor,
                                                            BasicGradient *row_gradients) {
    start_next_kernel();
    const int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_THREADS + threadIdx.x;
    const bool valid = row < u.rows;
    const int64_t loaded = valid ? u.load_label(u.label_at(row)) : u.ignore_index;
    const float given = valid ? load_now(u.lse + u.lse_at(row)) : 0.0f;
    if (known_factor)
        wait_for_previous_kernel();
    const double factor = known_factor ? __ldcg(known_factor) : u.template factor<ROW_THREADS>();
    const int label = u.class_of(loaded);
    BasicGradient g = label < 0 ? u.gradient_of_skipped(label) : u.gradient_from_lse(label, factor, given);
    for (unsigned left = __ballot_sync(~0u, label >= 0 && !lse_is_accurate<T>(given)); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const AlignedSpan<const T> z(u.template row_of_z<T>(row - lane + owner), u.classes);
        const RowStats s = merge_lanes<WARP>(stats_of(z, lane, WARP, 1.0f), 1.0f);
        if (lane == owner)
            g = u.gradient_from_stats(label, factor, s);
    }
    if (valid) {
        u.flag_bad_label(label);
        row_gradients[row] = g;
    }
}

/* A block per part of a row. */
template <typename T, class U>
__global__ __launch_bounds__(GRADIENT_THREADS,
                             1536 / GRADIENT_THREADS) void gradients(const __grid_constant__ U u, const Divisor parts,
                                                                     const BasicGradient *row_gradients) {
    constexpr int THREADS = GRADIENT_THREADS, PACKS = GRADIENT_PACKS;
    constexpr int N = WIDE<T>;
    const int row = static_cast<int>(parts.quotient(blockIdx.x)), part = blockIdx.x - row * parts.number;
    const int first = part * (THREADS * PACKS) + threadIdx.x, packs = u.classes / N;
    const T *const z = u.template row_of_z<T>(row);
    Pack<T, N> pack[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (first + k * THREADS < packs)
            pack[k] = load_once<T, N>(z + (first + k * THREADS) * N);
    wait_for_previous_kernel();
    const BasicGradient g = row_gradients[row];
    const unsigned own = g.label / N - first; /* a multiple of THREADS if this thread has the label's pack */
    const bool mine = g.label >= 0 && own < THREADS * PACKS && own % THREADS == 0;
    const float z_label = mine ? to_float(z[g.label]) : 0.0f;
    write_packs(u.template row_of_dz<T>(row), pack, first, THREADS, packs, g, z_label, mine);
}

struct BasicFromLse {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        BasicArgs args;
        int64_t row_blocks, parts;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        return p.lse_given ? why_not_basic(p, call) : "it is for backward with lse";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        plan->row_blocks = p.row_blocks();
        plan->parts = p.gradient_parts();
        return p.rows * sizeof(BasicGradient) + sizeof(double);
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args,
                                     char *workspace) {
        LaunchSequence sequence = {context};
        BasicGradient *const row_gradients = at_offset<BasicGradient>(workspace, 0);
        const double *known_factor = nullptr;
        if (args.rows > 2 * SCANNED_ROWS) {
            double *const factor = reinterpret_cast<double *>(row_gradients + args.rows);
            sequence.run(Launch{1, ONE_BLOCK}, compute_factor<U>, args, factor);
            known_factor = factor;
        }
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            sequence.run(Launch{plan.row_blocks, ROW_THREADS}, coefficients<T, U>, args, known_factor, row_gradients);
            sequence.run(Launch{args.rows * plan.parts, GRADIENT_THREADS}, gradients<T, U>, args, Divisor(plan.parts),
                         row_gradients);
        });
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(plan.args, p, call), workspace)
                                  : launch_with(context, call, plan, plan.args, workspace);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_from_lse, BasicFromLse)
