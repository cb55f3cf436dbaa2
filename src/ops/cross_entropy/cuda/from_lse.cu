/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward with lse from forward, contiguous rows, any options: a thread per row computes
 * coefficients, then short blocks of 4 KB of a row each write the gradient.
 */
#include "ops/cross_entropy/cuda/gradients.cuh"

namespace {

/* A thread per row. The whole warp reads the rows whose lse is not accurate enough. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void compute_coefficients(const __grid_constant__ Args c,
                                                                    RowCoefficients *coefficients) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t loaded = row < loss.rows ? loss.load_label(row) : loss.ignore_index;
    const float lse = row < loss.rows ? loss.lse.get(row) : 0.0f;
    const int64_t label = loss.class_of(loaded);
    const float given = label >= 0 ? lse : 0.0f, z_label = label >= 0 ? to_float(c.z.at<const T>(row)[label]) : 0.0f;
    wait_for_previous_kernel();
    const double common = common_factor(c); /* while the load of the label's logit is in flight */
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0 && lse_is_accurate<T>(given))
        gradient = gradient_from_lse(loss, common, row, label, z_label, given);
    for (unsigned left = __ballot_sync(~0u, !lse_is_accurate<T>(given)); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const AlignedSpan<const T> span(c.z.at<const T>(row - lane + owner), loss.classes);
        PackGroup<T, AHEAD<OPTIONS>> group;
        group.load(span, lane, WARP);
        const LossStats<OPTIONS> g = merge_warp(span_stats<OPTIONS>(span, 0, group, lane, WARP, loss), loss.scale);
        if (lane == owner)
            gradient = gradient_from_stats(loss, common, row, label, z_label, whole_row_stats(g, z_label, loss));
    }
    if (row < loss.rows) {
        if (label < 0)
            write_skipped(loss, row, label, nullptr);
        coefficients[row] = {gradient, label};
    }
}

struct FromLse {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        size_t coefficients; /* offset in the workspace */
        int64_t row_blocks, parts;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.lse_given)
            return "it is for backward with lse";
        return p.strided ? "rows are not contiguous, or dlogits is aligned otherwise than logits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        plan->parts = p.gradient_parts();
        plan->general.fill(device, p, call, plan->row_blocks, &layout);
        plan->coefficients = layout.add(p.rows * int64_t(sizeof(RowCoefficients)));
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const Args args = plan.general.start(sequence, workspace);
        RowCoefficients *const coefficients = at_offset<RowCoefficients>(workspace, plan.coefficients);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = IN_BACKWARD<decltype(o)::value>;
                sequence.run(Launch{plan.row_blocks, ROW_THREADS}, compute_coefficients<T, OPTIONS>, args,
                             coefficients);
                sequence.run(Launch{args.loss.rows * plan.parts, GRADIENT_THREADS}, gradients<T, OPTIONS>, args,
                             coefficients, static_cast<unsigned>(plan.parts));
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, from_lse, FromLse)
