/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contiguous rows of any length, any options: statistics by a block per row, or per part of a row
 * if rows are few and long. Outputs by the block of the row that ends last, if rows are few, else by a
 * thread per row; then the gradient, if it is wanted, by short blocks that read the logits a second
 * time, from L2 if it holds them. If classes are spread over ranks, the statistics are exchanged before
 * the outputs.
 */
#include "ops/cross_entropy/cuda/finish.cuh"
#include "ops/cross_entropy/cuda/gradients.cuh"
#include "ops/loss_group.cuh"

namespace {

constexpr int MOST_THREADS = 512;
constexpr int64_t FEW_ROWS = 264; /* whose blocks run at once */

/* Writes the outputs of a row whose statistics thread 0 has. Called by all threads of one block per row. */
template <int OPTIONS>
DEVICE void finish_few(const Args &c, unsigned row, int64_t label, float z_label, const LossStats<OPTIONS> &g,
                       RowCoefficients *coefficients) {
    const Loss &loss = c.loss;
    const double common = coefficients ? common_factor(c) : 0.0;
    Totals totals = {};
    if (threadIdx.x == 0) {
        RowGradient gradient = gradient_of_skipped(label);
        if (label >= 0) {
            const WholeRowStats stats = whole_row_stats(g, z_label, loss);
            if (coefficients)
                gradient = gradient_from_stats(loss, common, row, label, z_label, stats);
            if (loss.forward)
                write_row(loss, row, label, results_of(loss, row, label, stats), &totals);
        } else {
            write_skipped(loss, row, label, &totals);
        }
        if (coefficients)
            coefficients[row] = {gradient, label};
    }
    if (loss.forward && adds_up(c))
        add_up_shares(c, totals, row, static_cast<unsigned>(loss.rows));
}

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

/* Few rows: the same, and the outputs; coefficients, if not NULL. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS, 2) void few_rows(const __grid_constant__ Args c, unsigned parts,
                                                            int64_t part, LossStats<OPTIONS> *part_stats,
                                                            RowCoefficients *coefficients) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const unsigned row = blockIdx.x / parts;
    const int64_t from = (blockIdx.x - row * parts) * part;
    const int64_t n = from >= loss.classes ? 0 : loss.classes - from < part ? loss.classes - from : part;
    const T *const first = c.z.at<const T>(row);
    const AlignedSpan<const T> span(first + (n > 0 ? from : 0), n);
    const int64_t loaded = loss.load_label(row);
    PackGroup<T, AHEAD<OPTIONS>> group;
    group.load(span, threadIdx.x, blockDim.x);
    const int64_t label = loss.class_of(loaded);
    const float z_label = threadIdx.x == 0 && label >= 0 ? to_float(first[label]) : 0.0f;
    wait_for_previous_kernel();
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    if (label >= 0) {
        g = merge_block_for_all(span_stats<OPTIONS>(span, from, group, threadIdx.x, blockDim.x, loss), loss.scale);
        if (parts > 1) {
            if (threadIdx.x == 0)
                part_stats[blockIdx.x] = g;
            if (!block_arrives_last(c.counter + 1 + row, parts))
                return;
            g = no_columns<OPTIONS>();
            if (threadIdx.x < WARP) {
                for (unsigned i = threadIdx.x; i < parts; i += WARP)
                    g = merge(g, load_stats(part_stats + row * parts + i), loss.scale);
                g = merge_warp(g, loss.scale);
            }
        }
    } else if (from > 0) {
        return;
    }
    finish_few(c, row, label, z_label, g, coefficients);
}

/* A thread per row: this rank's statistics of the row, for the other ranks. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void publish_rows(const __grid_constant__ Args c, unsigned parts,
                                                            const LossStats<OPTIONS> *part_stats,
                                                            const __grid_constant__ Exchange exchange) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    wait_for_previous_kernel();
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
            all.s = g.s;
        if constexpr (OPTIONS == SMOOTH)
            all.weighted = g.weighted;
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
        bool few; /* `few_rows` computes the outputs */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.strided)
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        return p.classes == 0 && call.loss.class_group.ranks == 0 ? "there are no classes" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        plan->gradient_parts = p.gradient_parts();
        plan->split = p.rows > 0 && p.classes > 0 ? split_rows(p, call.logits.dtype) : Split{};
        plan->few = call.loss.class_group.ranks == 0 && p.rows > 0 && (plan->split.parts > 1 || p.rows <= FEW_ROWS);
        plan->general.fill(device, p, call, plan->few ? p.rows : plan->row_blocks, &layout);
        plan->stats = layout.add(p.rows * plan->split.parts * plan->general.stats_bytes());
        plan->coefficients = p.gradient ? layout.add(p.rows * int64_t(sizeof(RowCoefficients))) : 0;
        if (call.loss.class_group.ranks > 0) {
            plan->exchange = layout.add(Exchange::workspace(call.loss));
            plan->merged = layout.add(p.rows * int64_t(sizeof(LossStats<FULL>)));
        }
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const Args args = plan.general.start(sequence, workspace);
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
                if (plan.few)
                    sequence.run(Launch{rows * parts, plan.split.threads}, few_rows<T, OPTIONS>, args, parts,
                                 plan.split.part, stats, coefficients);
                else if (rows > 0 && parts > 0)
                    sequence.run(Launch{rows * parts, plan.split.threads}, statistics<T, OPTIONS>, args, parts,
                                 plan.split.part, stats);
                const Launch per_row = {plan.row_blocks, ROW_THREADS};
                const KnownTerms *const known = nullptr;
                if (shared) {
                    const Exchange exchange =
                        loss_group::exchange_of(context, call.loss, workspace + plan.exchange,
                                                {RAFTER_OP_INDEX_cross_entropy, call.logits.dtype});
                    LossStats<FULL> *const merged = at_offset<LossStats<FULL>>(workspace, plan.merged);
                    sequence.run(per_row, publish_rows<T, OPTIONS>, args, parts, stats, exchange);
                    status = loss_group::gather(context, call.loss, exchange);
                    if (status != RAFTER_OK)
                        return;
                    sequence.run(per_row, merge_ranks, args, exchange, merged);
                    sequence.run(per_row, finish<T, FULL, true>, args, merged, known, coefficients);
                } else if (!plan.few) {
                    sequence.run(per_row, finish<T, OPTIONS>, args, stats, known, coefficients);
                }
                if (coefficients)
                    sequence.run(Launch{rows * plan.gradient_parts, GRADIENT_THREADS},
                                 gradients<T, IN_BACKWARD<OPTIONS>>, args, coefficients,
                                 static_cast<unsigned>(plan.gradient_parts));
            });
        });
        return status;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, two_pass, TwoPass)
