/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contiguous rows of any length, any options. First the statistics: a block per row, or per part of
 * a row if rows are few and long. Then the outputs: a thread per row, or several if rows have parts.
 * Last the gradient, if it is wanted: short blocks that read the logits a second time, from L2 if it
 * holds them. If classes are spread over ranks, the statistics are exchanged before the outputs.
 */
#include "ops/cross_entropy/cuda/finish.cuh"
#include "ops/cross_entropy/cuda/gradients.cuh"
#include "ops/loss_group.cuh"

namespace {

constexpr int MOST_THREADS = 512;

/* A block per part of a row; all parts but the last have `part` elements. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS, OPTIONS >= FULL ? 2 : 3) void statistics(const __grid_constant__ Args c,
                                                                                    unsigned parts, int64_t part,
                                                                                    LossStats<OPTIONS> *part_stats) {
    wait_unless_prepared(c);
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

/* A thread per row: this rank's statistics of the row, for the other ranks. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void publish_rows(const __grid_constant__ Args c, unsigned parts,
                                                            const LossStats<OPTIONS> *part_stats,
                                                            const __grid_constant__ Exchange exchange) {
    wait_for_previous_kernel(); /* or for the inputs: this rank may have no classes */
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    if (row >= loss.rows)
        return;
    const int64_t label = loss.class_of(loss.load_label(row));
    LossStats<FULL> all = no_columns<FULL>();
    if (label >= 0 && parts > 0) {
        LossStats<OPTIONS> g = part_stats[row * parts];
        for (unsigned part = 1; part < parts; part++)
            g = merge(g, part_stats[row * parts + part], loss.scale);
        if constexpr (OPTIONS == FULL)
            all = g;
        else
            all.s = relative_to_largest(g, loss);
        if constexpr (OPTIONS == SMOOTH || OPTIONS == CAPPED)
            all.logit_sum = g.logit_sum;
        all.z_label = loss.has_class(label) ? to_float(c.z.at<const T>(row)[loss.column_of(label)]) : 0.0f;
    }
    loss_group::publish(exchange, row, all, loss);
}

__global__ __launch_bounds__(ROW_THREADS) void merge_ranks(const __grid_constant__ Args c,
                                                           const __grid_constant__ Exchange exchange,
                                                           LossStats<FULL> *rows) {
    start_next_kernel();
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    wait_for_previous_kernel();
    if (row < c.loss.rows)
        rows[row] = loss_group::merged(exchange, row, c.loss);
}

struct TwoPass {
    typedef cross_entropy_call Call;
    static constexpr bool SHARES_CLASSES = true;
    struct Plan {
        GeneralPlan general;
        Split split;                /* parts 0: there are no rows */
        size_t stats, coefficients; /* offsets in the workspace */
        size_t exchange, merged;    /* the same, if classes are spread over ranks */
        int64_t row_blocks, gradient_parts;
        RowLanes finish;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        const bool shared = call.loss.class_group.ranks > 0;
        if (p.strided && !(shared && call.logits.numel == 0)) /* without elements, strides mean nothing */
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        if (p.rows > INT32_MAX)
            return "it counts rows in 31 bits";
        if (invariant_is_faster(p, call))
            return "`invariant` is faster for so many rows of this length";
        return p.classes == 0 && !shared ? "there are no classes" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        plan->row_blocks = p.row_blocks();
        plan->gradient_parts = p.gradient_parts();
        plan->general.fill(device, p, call, 0, &unused);
        plan->split = p.rows > 0 && p.classes > 0 ? split_rows(p, call.logits.dtype, plan->general.options) : Split{};
        plan->finish = RowLanes::of(p.rows, call.loss.class_group.ranks > 0 ? 1 : plan->split.parts);
        plan->general.fill(device, p, call, plan->finish.blocks(p.rows), &layout);
        plan->stats = layout.add(p.rows * plan->split.parts * plan->general.stats_bytes());
        plan->coefficients = p.gradient ? layout.add(p.rows * int64_t(sizeof(RowCoefficients))) : 0;
        if (call.loss.class_group.ranks > 0) {
            plan->exchange = layout.add(Exchange::workspace(call.loss));
            plan->merged = layout.add(p.rows * int64_t(sizeof(LossStats<FULL>)));
        }
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        const int64_t rows = args.loss.rows;
        const unsigned parts = static_cast<unsigned>(plan.split.parts);
        RowCoefficients *const coefficients =
            args.gradient ? at_offset<RowCoefficients>(workspace, plan.coefficients) : nullptr;
        const bool shared = call.loss.class_group.ranks > 0 && rows > 0;
        rafter_status status = RAFTER_OK;
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                LossStats<OPTIONS> *const stats = at_offset<LossStats<OPTIONS>>(workspace, plan.stats);
                if (rows > 0 && parts > 0)
                    ::launch(context, Launch{rows * parts, plan.split.threads}, statistics<T, OPTIONS>, args, parts,
                             plan.split.part, stats);
                const Launch per_row = {plan.row_blocks, ROW_THREADS};
                const KnownTerms *const known = nullptr;
                if (shared) {
                    const Exchange exchange =
                        loss_group::exchange_of(context, call.loss, workspace + plan.exchange,
                                                {RAFTER_OP_INDEX_cross_entropy, call.logits.dtype});
                    LossStats<FULL> *const merged = at_offset<LossStats<FULL>>(workspace, plan.merged);
                    ::launch(context, per_row, publish_rows<T, OPTIONS>, args, parts, stats, exchange);
                    status = loss_group::gather(context, call.loss, exchange);
                    if (status != RAFTER_OK)
                        return;
                    ::launch(context, per_row, merge_ranks, args, exchange, merged);
                    launch_finish(context, args, FULL, true, plan.finish, merged, known, coefficients);
                } else {
                    launch_finish(context, args, plan.general.options, false, plan.finish, stats, known, coefficients);
                }
                if (coefficients)
                    ::launch(context, Launch{rows * plan.gradient_parts, GRADIENT_THREADS},
                             gradients<T, IN_BACKWARD<OPTIONS>>, args, coefficients,
                             static_cast<unsigned>(plan.gradient_parts));
            });
        });
        return status;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, two_pass, TwoPass)
