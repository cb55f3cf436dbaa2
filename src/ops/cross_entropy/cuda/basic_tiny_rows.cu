/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls without options, or with label smoothing or class weights, of many rows of 2 to 32 classes that follow
 * each other (cuda/tiny_rows.cuh). Forward: one kernel. Backward: one that writes the factor of all gradients,
 * then the gradients.
 */
#include "cuda/tiny_rows.cuh"
#include "ops/cross_entropy/cuda/basic_factor.cuh"

namespace {

constexpr int PER_SM = 4;       /* blocks */
constexpr int ROWS_AT_ONCE = 4; /* of a thread, at most */

/* Kernel arguments. */
struct TinyArgs {
    BasicArgs basic;
    TinyRows tiny;
    float *row_losses;        /* reduction none: the loss of each row; NULL: not wanted */
    const float *row_dlosses; /* reduction none: dloss of each row; NULL: 1 */
    const double *factor;     /* backward: of all gradients */
};

/* OPTIONS: the call has label smoothing or class weights. */
template <typename T, bool OPTIONS> struct TinyLoss {
    const TinyArgs &a;
    double2 sum = {}; /* losses, and weights */
    typedef int64_t Row;

    DEVICE Row no_row() const {
        return a.basic.ignore_index;
    }
    DEVICE Row load(int row) const {
        return a.basic.load_label(row);
    }
    DEVICE void begin() const {
    }
    template <int COUNT>
    DEVICE void finish(Row loaded, int row, bool present, const float (&x)[COUNT], const T *elements, T *) {
        const BasicArgs &u = a.basic;
        const int label = u.class_of(loaded);
        const RowStats s = stats_of_row<T>(x);
        const TwoFloats log_sum = log_in_floats(s.max == INFINITY ? NAN : s.sum);
        float value, lse;
        if (label >= 0) {
            value = rounded_nll(s.max, to_float(elements[label]), log_sum);
            lse = rounded_sum(s.max, log_sum);
            if (OPTIONS && u.smooths) {
                float total = 0.0f;
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    total += j < a.tiny.length ? x[j] : 0.0f;
                value = static_cast<float>(u.smoothed(value, s.max, log_sum.number(), total));
            }
            if (OPTIONS && u.weighs)
                value *= u.class_weight_of(label);
        } else {
            value = lse = label == IGNORED ? 0.0f : NAN;
            u.flag_bad_label(label);
        }
        if (u.lse && present)
            u.lse[row] = lse;
        if (u.row_loss && present)
            u.row_loss[row] = value;
        if (a.row_losses && present)
            a.row_losses[row] = value;
        if (u.loss) {
            sum.x += value;
            sum.y += OPTIONS ? u.weight_of(label) : label != IGNORED;
        }
    }
};

template <typename T, bool OPTIONS> struct TinyGradient {
    const TinyArgs &a;
    double factor = 0.0;
    struct Row {
        int64_t label;
        float lse, dloss;
    };

    DEVICE Row no_row() const {
        return {a.basic.ignore_index, 0.0f, 0.0f};
    }
    DEVICE Row load(int row) const {
        return {a.basic.load_label(row), a.basic.lse ? a.basic.lse[row] : INFINITY,
                a.row_dlosses ? a.row_dlosses[row] : 1.0f};
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        factor = *a.factor;
    }
    template <int COUNT>
    DEVICE void finish(const Row &loaded, int, bool, const float (&x)[COUNT], const T *elements, T *gradient) const {
        const BasicArgs &u = a.basic;
        const int label = u.class_of(loaded.label);
        const double plain = factor * loaded.dloss, own = OPTIONS ? u.weighted(plain, label) : plain;
        const BasicSpread spread = OPTIONS ? BasicSpread(u, own) : BasicSpread(0.0f, static_cast<float>(own));
        u.flag_bad_label(label);
        const BasicGradient g = label < 0 ? u.gradient_of_skipped(label)
                                : lse_is_accurate<T>(loaded.lse)
                                    ? u.gradient_from_lse(label, own, loaded.lse)
                                    : u.gradient_from_stats(label, own, stats_of_row<T>(x));
        const float z_label = g.label >= 0 ? to_float(elements[g.label]) : 0.0f;
        const ScaledExp<T> scaled(g.c, g.pivot, 1.0f);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (j < least_of_count(COUNT) || j < a.tiny.length)
                gradient[j] = from_float<T>(g.label < 0 ? g.c : spread.of(x[j], scaled));
        if (g.label >= 0)
            gradient[g.label] = from_float<T>(spread.at_label(z_label, g));
    }
};

template <typename T, bool OPTIONS, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny_losses(const __grid_constant__ TinyArgs a) {
    extern __shared__ uint4 dynamic[];
    TinyLoss<T, OPTIONS> op = {a};
    tiny_rows<TinyLoss<T, OPTIONS>, T, COUNT, ROWS, false>(op, a.tiny, dynamic);
    if (a.basic.loss)
        add_up_threads<TINY_THREADS>(a.basic, op.sum);
}

template <typename T, bool OPTIONS, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny_gradients(const __grid_constant__ TinyArgs a) {
    extern __shared__ uint4 dynamic[];
    TinyGradient<T, OPTIONS> op = {a};
    tiny_rows<TinyGradient<T, OPTIONS>, T, COUNT, ROWS, true>(op, a.tiny, dynamic);
}

struct BasicTinyRows {
    typedef cross_entropy_call Call;
    struct Plan {
        TinyArgs args;
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        if (const char *const reason = why_not_basic_outputs(p, call, {true, true}))
            return reason;
        if (p.forward == p.gradient)
            return p.forward ? "loss and gradient are wanted at once" : "there is nothing to write";
        if (const char *const reason =
                why_not_tiny(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                             static_cast<int>(rafter_dtype_bytes(call.logits.dtype))))
            return reason;
        if (l.reduction != RAFTER_NONE)
            return NULL;
        return p.forward ? (contiguous_or_missing(l.loss) ? NULL : "loss is strided")
                         : (contiguous_or_missing(l.dloss) || is_one_number(l.dloss) ? NULL : "dloss is strided");
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        TinyArgs &args = plan->args;
        args.basic = basic_args(device, p, call);
        args.tiny = tiny_rows_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                                 static_cast<int>(rafter_dtype_bytes(call.logits.dtype)), ROWS_AT_ONCE);
        args.row_losses = nullptr;
        args.row_dlosses = nullptr;
        if (l.reduction == RAFTER_NONE) {
            args.row_losses = args.basic.loss;
            args.basic.loss = nullptr;
            if (args.basic.dloss && !is_one_number(l.dloss)) { /* write_factor leaves it to the rows */
                args.row_dlosses = args.basic.dloss;
                args.basic.dloss = nullptr;
            }
        }
        plan->forward = p.forward;
        plan->blocks = tiny_blocks(args.tiny, device, PER_SM);
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        TinyArgs args = plan.args;
        args.factor = plan.workspace.start(sequence, !plan.forward, &args.basic, workspace);
        const Launch how = {plan.blocks, TINY_THREADS, tiny_shared(args.tiny)};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_tiny_shape<T, ROWS_AT_ONCE>(args.tiny, [&](auto count, auto rows) {
                constexpr int COUNT = decltype(count)::value, ROWS = decltype(rows)::value;
                for_bool(args.basic.smooths || args.basic.weighs, [&](auto options) {
                    constexpr bool OPTIONS = decltype(options)::value;
                    if (plan.forward)
                        sequence.run(how, tiny_losses<T, OPTIONS, COUNT, ROWS>, args);
                    else
                        sequence.run(how, tiny_gradients<T, OPTIONS, COUNT, ROWS>, args);
                });
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_tiny_rows, BasicTinyRows)
