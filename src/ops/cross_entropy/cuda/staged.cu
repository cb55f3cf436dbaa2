/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows in any layout, of any alignment, with any options: one kernel for the whole call, which
 * copies tiles of rows into shared memory (cuda/slab_stage.cuh) and computes the results of up to 256
 * rows at once, a thread per row.
 */
#include "cuda/slab_stage.cuh"
#include "cuda/slab_tiles.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

constexpr int PER_SM = 4;              /* blocks per multiprocessor */
constexpr int64_t LONG_SLAB = 3 << 10; /* bytes of interleaved rows: tiles are faster */
/* From here on, gradients of rows side by side from lse go to tiles.cu, which stores coefficients in memory. Shorter
 * rows and smaller tensors would be slowed down by that. */
constexpr int64_t LONG_COLUMNS = 64, WIDE_COLUMNS = 64, LARGE_COLUMNS = 8 << 20; /* classes; rows; bytes of logits */

struct StagedArgs {
    Args call;
    Stage stage;
};

/* What slab_stage.cuh asks of an op. */
template <typename T, int OPTIONS, bool WITH_GRADIENT> struct StagedLoss {
    static constexpr bool GRADIENT = WITH_GRADIENT;
    typedef LossStats<OPTIONS> Stats;
    typedef RowCoefficients Coefficient;
    struct Row {
        int64_t row; /* -1: none */
        int64_t label;
        float lse; /* backward only; INFINITY: not given */
    };
    const Args &c;
    const Loss &loss;
    Totals totals = {};
    double common = 0.0;

    DEVICE explicit StagedLoss(const Args &args) : c(args), loss(args.loss) {
    }
    DEVICE Stats none() const {
        return no_columns<OPTIONS>();
    }
    template <int COUNT>
    DEVICE void add(Stats &g, const Pack<T, 1> (&packs)[COUNT], int valid, int column, int step) const {
        ::add(g, packs, valid, column, step, loss);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return ::merge_lanes(g, lanes, loss.scale);
    }
    DEVICE Row no_row() const {
        return {-1, loss.ignore_index, INFINITY};
    }
    DEVICE Row load_row(int64_t row) const {
        const bool given = GRADIENT && !loss.forward && loss.lse.data;
        return {row, loss.load_label(row), given ? loss.lse.get(row) : INFINITY};
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        if constexpr (GRADIENT)
            common = common_factor(c);
    }
    DEVICE bool knows(const Row &row) const {
        return GRADIENT && lse_is_accurate<T>(row.lse);
    }
    DEVICE bool needs_stats(const Row &row) const {
        return loss.class_of(row.label) >= 0 && !knows(row);
    }
    DEVICE int wanted(const Row &row) const {
        return static_cast<int>(loss.class_of(row.label));
    }
    DEVICE Coefficient finish(const Row &row, const Stats &g, T at_label) {
        const int64_t label = loss.class_of(row.label);
        const float z_label = to_float(at_label);
        RowGradient gradient = gradient_of_skipped(label);
        RowResults results = results_of_skipped(label);
        if (label >= 0 && knows(row)) {
            gradient = gradient_from_lse(loss, common, row.row, label, z_label, row.lse);
        } else if (label >= 0) {
            const WholeRowStats stats = whole_row_stats(g, z_label, loss);
            if constexpr (GRADIENT)
                gradient = gradient_from_stats(loss, common, row.row, label, z_label, stats);
            if (loss.forward)
                results = results_of(loss, row.row, label, stats);
        }
        flag_bad_label(loss, label);
        if (loss.forward)
            write_row(loss, row.row, label, results, &totals);
        return {gradient, label};
    }
    DEVICE RowWriter<IN_BACKWARD<OPTIONS>, T> writer(const Coefficient &row) const {
        return RowWriter<IN_BACKWARD<OPTIONS>, T>(row.gradient, row.label, loss);
    }
};

template <typename T, int OPTIONS, bool GRADIENT, bool COLUMNS>
__global__ __launch_bounds__(STAGE_THREADS, PER_SM) void staged(const __grid_constant__ StagedArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    StagedLoss<T, OPTIONS, GRADIENT> op(a.call);
    staged_rows<StagedLoss<T, OPTIONS, GRADIENT>, T, COLUMNS>(op, a.stage, dynamic);
    if (a.call.loss.forward)
        add_up(a.call, op.totals);
}

struct Staged {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        Stage stage;
        int64_t blocks;
        size_t shared;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        if (p.gradient && p.lse_given && s.inner > 1 &&
            (p.classes >= LONG_COLUMNS || (s.inner >= WIDE_COLUMNS && s.across[1] == 1)) &&
            p.rows * p.row_bytes >= LARGE_COLUMNS && !too_large(s))
            return "rows lie side by side and lse is given: the gradient needs no shared memory";
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        if (s.inner > 1 && stages_slabs(s, p.gradient, bytes) && s.slab_elements() * bytes >= LONG_SLAB &&
            p.rows * p.row_bytes >= LARGE_COLUMNS && !p.invariant && !p.lse_given && !too_large(s))
            return "interleaved rows are so long that tiles are faster";
        return why_not_staged(s, p.gradient, bytes);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        plan->stage = stage_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient, bytes,
                               device.multiprocessors);
        plan->general.fill(device, p, call, 0, &unused);
        plan->shared = stage_shared(plan->stage, bytes, plan->general.stats_bytes(),
                                    p.gradient ? int64_t(sizeof(RowCoefficients)) : 0);
        plan->blocks = stage_blocks(device, plan->stage, plan->shared, PER_SM);
        plan->general.fill(device, p, call, plan->blocks, &layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const StagedArgs args = {plan.general.start(context, workspace), plan.stage};
        const Launch how = {plan.blocks, STAGE_THREADS, plan.shared};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options_but_capped(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                const auto run = [&](auto gradient) {
                    constexpr bool GRADIENT = decltype(gradient)::value;
                    if (args.stage.columns)
                        ::launch(context, how, staged<T, OPTIONS, GRADIENT, true>, args);
                    else
                        ::launch(context, how, staged<T, OPTIONS, GRADIENT, false>, args);
                };
                if (args.call.gradient)
                    run(std::true_type());
                else
                    run(std::false_type());
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, staged, Staged)
