/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contiguous rows of any length, any options: statistics by a block per row, or per part of a row
 * if rows are few; outputs by a thread per row; then the gradient, if it is wanted, by short blocks
 * that read the logits a second time, from L2 if it holds them.
 */
#include "ops/cross_entropy/cuda/finish.cuh"
#include "ops/cross_entropy/cuda/gradients.cuh"

namespace {

constexpr int MOST_THREADS = 512;

/* A block per part of a row; all parts but the last have `part` elements. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS, OPTIONS == FULL ? 2 : 3) void statistics(const __grid_constant__ Args c,
                                                                                    unsigned parts, int64_t part,
                                                                                    LossStats<OPTIONS> *part_stats) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const unsigned row = blockIdx.x / parts;
    const int64_t from = (blockIdx.x - row * parts) * part;
    const int64_t n = from >= loss.classes ? 0 : loss.classes - from < part ? loss.classes - from : part;
    const AlignedSpan<const T> span(c.z.at<const T>(row) + (n > 0 ? from : 0), n);
    const int64_t label = loss.load_label(row); /* issued before the row's loads, or it would arrive after them */
    PackGroup<T, AHEAD<OPTIONS>> group;
    group.load(span, threadIdx.x, blockDim.x);
    wait_for_previous_kernel();
    if (loss.class_of(label) < 0)
        return;
    const LossStats<OPTIONS> g =
        merge_block_for_all(span_stats<OPTIONS>(span, from, group, threadIdx.x, blockDim.x, loss), loss.scale);
    if (threadIdx.x == 0)
        part_stats[blockIdx.x] = g;
}

struct TwoPass {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        Split split;                /* parts 0: there are no rows */
        size_t stats, coefficients; /* offsets in the workspace */
        int64_t row_blocks, gradient_parts;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.strided)
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        return p.classes == 0 ? "there are no classes" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        plan->gradient_parts = p.gradient_parts();
        plan->split = p.rows > 0 ? split_rows(p, call.logits.dtype) : Split{};
        plan->general.fill(device, p, call, plan->row_blocks, &layout);
        plan->stats = layout.add(p.rows * plan->split.parts * plan->general.stats_bytes());
        plan->coefficients = p.gradient ? layout.add(p.rows * int64_t(sizeof(RowCoefficients))) : 0;
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const Args args = plan.general.start(sequence, workspace);
        const int64_t rows = args.loss.rows;
        const unsigned parts = static_cast<unsigned>(plan.split.parts);
        RowCoefficients *const coefficients =
            args.gradient ? at_offset<RowCoefficients>(workspace, plan.coefficients) : nullptr;
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                LossStats<OPTIONS> *const stats = at_offset<LossStats<OPTIONS>>(workspace, plan.stats);
                if (rows > 0)
                    sequence.run(Launch{rows * parts, plan.split.threads}, statistics<T, OPTIONS>, args, parts,
                                 plan.split.part, stats);
                sequence.run(Launch{plan.row_blocks, ROW_THREADS}, finish<T, OPTIONS>, args, parts, stats,
                             static_cast<const KnownTerms *>(nullptr), coefficients);
                if (coefficients)
                    sequence.run(Launch{rows * plan.gradient_parts, GRADIENT_THREADS},
                                 gradients<T, IN_BACKWARD<OPTIONS>>, args, coefficients,
                                 static_cast<unsigned>(plan.gradient_parts));
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, two_pass, TwoPass)
