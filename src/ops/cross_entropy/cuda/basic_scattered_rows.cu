/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any number of rows of up to 32 classes (gradients: up to 16) in any layout: a thread takes a row (scattered_rows of
 * cuda/tiny_rows.cuh). Options, outputs and kernels are those of basic_tiny_rows.cu.
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/tiny_ops.cuh"

namespace {

constexpr int PER_SM = 4;            /* blocks */
constexpr int LONGEST_GRADIENT = 16; /* classes: gradients of longer rows are slower than in other kernels */

/* Kernel arguments. */
struct ScatteredArgs : OptionArgs {
    ScatteredRows rows;
};

template <class Op, typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void scattered_losses(const __grid_constant__ ScatteredArgs a) {
    wait_for_inputs();
    Op op{a};
    scattered_rows<Op, T, COUNT, false>(op, a.rows);
    if (a.basic.loss)
        add_up_threads<TINY_THREADS>(a.basic, op.sum);
}

/* Op, but every block counts the labels, unless a kernel before this one has written the factor. */
template <class Op> struct WithFactor : Op {
    DEVICE explicit WithFactor(const ScatteredArgs &args) : Op{args} {
    }
    DEVICE void begin() {
        if (Op::a.factor)
            Op::begin();
        else
            Op::use(Op::a.basic.template factor<TINY_THREADS>());
    }
};

template <class Op, typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void scattered_gradients(const __grid_constant__ ScatteredArgs a) {
    if (!a.factor)
        wait_for_inputs();
    WithFactor<Op> op(a);
    scattered_rows<WithFactor<Op>, T, COUNT, true>(op, a.rows);
}

/* Calls f(std::integral_constant<int, COUNT>()): COUNT is at least the length of rows. */
template <typename F> void for_counts(int length, F f) {
    if (length <= 4)
        f(std::integral_constant<int, 4>());
    else if (length <= 8)
        f(std::integral_constant<int, 8>());
    else if (length <= LONGEST_GRADIENT)
        f(std::integral_constant<int, LONGEST_GRADIENT>());
    else
        f(std::integral_constant<int, LONGEST_TINY>());
}

struct BasicScatteredRows {
    typedef cross_entropy_call Call;
    struct Plan {
        ScatteredArgs args;
        BasicWorkspace workspace;
        bool forward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        constexpr int64_t MOST_BYTES = 96; /* of many contiguous rows: docs/perf/cross_entropy.md */
        const Problem p(call);
        if (p.classes > (p.gradient ? LONGEST_GRADIENT : LONGEST_TINY))
            return "rows are long";
        const bool both = call.loss.smoothing != 0.0f && call.loss.class_weight.data; /* slow elsewhere */
        if (p.forward && p.contiguous && p.rows > SCANNED_ROWS && !both && p.row_bytes >= MOST_BYTES + p.whole_packs)
            return "rows are long enough for several lanes";
        return why_not_options(p, call);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = {option_args(device, p, call),
                      scattered_rows_of(call.logits, p.gradient ? &call.dlogits : NULL, p.rows, device)};
        plan->forward = p.forward;
        return plan->workspace.place(p.forward ? plan->args.rows.blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        ScatteredArgs args = plan.args;
        const bool counts = !plan.forward && (args.basic.weighs || args.basic.rows > SCANNED_ROWS);
        const double *const factor = plan.workspace.start(context, counts, &args.basic, workspace);
        args.factor = counts ? factor : nullptr;
        const Launch how = {args.rows.blocks, TINY_THREADS};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_counts(args.rows.length, [&](auto count) {
                constexpr int COUNT = decltype(count)::value;
                const bool many = has_many_options(call.loss);
                if (plan.forward)
                    return ::launch(context, how,
                                    many ? scattered_losses<OptionsLoss<T>, T, COUNT>
                                         : scattered_losses<TinyLoss<T, true>, T, COUNT>,
                                    args);
                if constexpr (COUNT <= LONGEST_GRADIENT)
                    ::launch(context, how,
                             many ? scattered_gradients<OptionsGradient<T, true>, T, COUNT>
                                  : scattered_gradients<TinyGradient<T, true>, T, COUNT>,
                             args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_scattered_rows, BasicScatteredRows)
