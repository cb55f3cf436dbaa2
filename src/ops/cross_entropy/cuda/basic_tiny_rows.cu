/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many rows of 2 to 32 classes that follow each other (cuda/tiny_rows.cuh), with any options but row weights, and
 * without outputs that few calls want. Forward: one kernel. Backward: one that writes the factor of all gradients,
 * then the gradients.
 */
#include "cuda/tiny_rows.cuh"
#include "ops/cross_entropy/cuda/basic_factor.cuh"

namespace {

constexpr int PER_SM = 4;          /* blocks */
constexpr int ROWS_AT_ONCE = 4;    /* of a thread, at most */
constexpr int ROWS_OF_OPTIONS = 2; /* the same in calls with many options */
/* Blocks of such calls' gradients: they need more registers. */
constexpr int options_per_sm(int count) {
    return count > 16 ? 3 : 4;
}

/* Kernel arguments. */
struct TinyArgs {
    BasicArgs basic;
    TinyRows tiny;
    float *row_losses;        /* reduction none: the loss of each row; NULL: not wanted */
    const float *row_dlosses; /* reduction none: dloss of each row; NULL: 1 */
    const double *factor;     /* backward: of all gradients */
};

/* What losses have in common: rows are labels, and where results go. */
struct LossOfRows {
    const BasicArgs &u;
    float *const row_losses; /* see TinyArgs */
    double2 sum = {};        /* losses, and weights */
    typedef int64_t Row;

    DEVICE explicit LossOfRows(const TinyArgs &a) : u(a.basic), row_losses(a.row_losses) {
    }
    DEVICE Row no_row() const {
        return u.ignore_index;
    }
    DEVICE Row load(int row) const {
        return u.load_label(row);
    }
    DEVICE void begin() const {
    }
    /* weight: of the row's label. */
    DEVICE void put(int row, bool present, float value, float lse, double weight) {
        if (u.lse && present)
            u.lse[row] = lse;
        if (u.row_loss && present)
            u.row_loss[row] = value;
        if (row_losses && present)
            row_losses[row] = value;
        if (u.loss) {
            sum.x += value;
            sum.y += weight;
        }
    }
};

/* OPTIONS: the call has label smoothing or class weights. */
template <typename T, bool OPTIONS> struct TinyLoss : LossOfRows {
    const TinyArgs &a;

    DEVICE explicit TinyLoss(const TinyArgs &args) : LossOfRows(args), a(args) {
    }
    template <int COUNT>
    DEVICE void finish(Row loaded, int row, bool present, const float (&x)[COUNT], const T *elements, T *) {
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
        put(row, present, value, lse, OPTIONS ? u.weight_of(label) : label != IGNORED);
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

/* ---- all options ------------------------------------------------------------------------------ */

/* Kernel arguments. */
struct ManyOptions : TinyArgs {
    Loss loss; /* the numbers of options */
};

/* The logits v of a row, after the softcap, of which those from `length` on are -inf. */
template <int COUNT> DEVICE void cap_row(float (&v)[COUNT], const float (&x)[COUNT], int length, const Loss &loss) {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        v[j] = loss.softcap == 0.0f || j >= length ? x[j] : capped(x[j], loss);
}

/* The weights of classes, and their sum. */
struct ClassWeights {
    const Loss &loss;
    float sum;

    DEVICE ClassWeights(const Loss &of, int classes) : loss(of), sum(static_cast<float>(classes)) {
        if (!loss.class_weight)
            return;
        sum = 0.0f;
        for (int j = 0; j < classes; j++)
            sum += of_class(j);
    }
    DEVICE float of_class(int j) const {
        return loss.class_weight ? loss.class_weight[j * loss.class_stride] : 1.0f;
    }
};

/* Statistics of v for a scale. */
template <int COUNT> DEVICE RowStats scaled_stats(const float (&v)[COUNT], float scale) {
    float max = -INFINITY, sum[2] = {};
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        max = fmaxf(max, v[j]);
    const float pivot = pivot_at(max);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        sum[j % 2] += exp_below(v[j] - pivot, scale);
    return {max, max == INFINITY ? NAN : sum[0] + sum[1]};
}

template <typename T> struct OptionsLoss : LossOfRows {
    const ManyOptions &a;
    const ClassWeights weights;

    DEVICE explicit OptionsLoss(const ManyOptions &args)
        : LossOfRows(args), a(args), weights(args.loss, args.tiny.length) {
    }
    template <int COUNT>
    DEVICE void finish(Row loaded, int row, bool present, const float (&x)[COUNT], const T *elements, T *) {
        const Loss &loss = a.loss;
        const int label = u.class_of(loaded);
        float v[COUNT], value, lse, weight = 1.0f;
        cap_row(v, x, a.tiny.length, loss);
        const RowStats s = scaled_stats(v, loss.scale);
        if (label >= 0) {
            const float z = to_float(elements[label]), target = loss.softcap != 0.0f ? capped(z, loss) : z;
            const TwoFloats log_sum = log_in_floats(s.sum);
            const float nll = rounded_sum(loss.scale * (s.max - target), log_sum);
            lse = rounded_sum(loss.scale * s.max, log_sum);
            weight = weights.of_class(label);
            value = static_cast<float>(loss.label_share) * weight * (nll < 0.0f ? 0.0f : nll);
            if (loss.weighted) {
                float below = 0.0f; /* of all logits, to the largest one */
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    if (j < a.tiny.length)
                        below = fmaf(weights.of_class(j), s.max - v[j], below);
                const float of_all = fmaf(log_sum.rounded(), weights.sum, loss.scale * below);
                value = fmaf(static_cast<float>(loss.spread), of_all, value);
            }
            if (loss.z_loss != 0.0f)
                value = fmaf(loss.z_loss * lse, lse, value);
        } else {
            value = lse = label == IGNORED ? 0.0f : NAN;
            u.flag_bad_label(label);
        }
        put(row, present, value, lse, label == IGNORED ? 0.0f : weight);
    }
};

/* dz = slope * (p e^(scale v - lse) - spread w - target [at the label]); see RowGradient. */
template <typename T> struct OptionsGradient {
    const ManyOptions &a;
    const ClassWeights weights;
    float factor = 0.0f;
    typedef typename TinyGradient<T, true>::Row Row;

    DEVICE explicit OptionsGradient(const ManyOptions &args) : a(args), weights(args.loss, args.tiny.length) {
    }
    DEVICE Row no_row() const {
        return TinyGradient<T, true>{a}.no_row();
    }
    DEVICE Row load(int row) const {
        return TinyGradient<T, true>{a}.load(row);
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        factor = static_cast<float>(*a.factor) * a.loss.scale;
    }
    template <int COUNT>
    DEVICE void finish(const Row &loaded, int, bool, const float (&x)[COUNT], const T *, T *gradient) const {
        const BasicArgs &u = a.basic;
        const Loss &loss = a.loss;
        const int label = u.class_of(loaded.label);
        u.flag_bad_label(label);
        float v[COUNT], pivot = loaded.lse, share = 1.0f, lse = loaded.lse;
        cap_row(v, x, a.tiny.length, loss);
        if (lse_is_accurate<T>(loaded.lse)) {
            pivot = loaded.lse / loss.scale;
            share += fmaf(loss.scale, pivot, -loaded.lse); /* the rounding error of the pivot */
        } else {
            const RowStats s = scaled_stats(v, loss.scale);
            pivot = s.max;
            share = 1.0f / s.sum;
            lse = fmaf(loss.scale, s.max, logf(s.sum));
        }
        const bool zero = share == INFINITY; /* every logit is -inf */
        const float own = factor * loaded.dloss,
                    target = own * static_cast<float>(loss.label_share) * (label >= 0 ? weights.of_class(label) : 1.0f),
                    spread = own * static_cast<float>(loss.spread);
        float p = loss.weighted ? fmaf(spread, weights.sum, target) : target;
        if (loss.z_loss != 0.0f)
            p = fmaf(own * 2.0f * loss.z_loss, lse, p);
        const ScaledExp<T> scaled(p * share, pivot, loss.scale);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (j < least_of_count(COUNT) || j < a.tiny.length) {
                float d = scaled.of(v[j]);
                if (j == label)
                    d = fmaf(p * share, expf(loss.scale * (v[j] - pivot)), -target);
                if (loss.weighted)
                    d = fmaf(-spread, weights.of_class(j), d);
                if (loss.softcap != 0.0f)
                    d *= cap_slope(x[j], v[j] * loss.inverse_cap, loss);
                gradient[j] = from_float<T>(label == OUT_OF_RANGE ? NAN : label < 0 || zero ? 0.0f : d);
            }
    }
};

template <typename T, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void options_losses(const __grid_constant__ ManyOptions a) {
    extern __shared__ uint4 dynamic[];
    OptionsLoss<T> op(a);
    tiny_rows<OptionsLoss<T>, T, COUNT, ROWS, false>(op, a.tiny, dynamic);
    if (a.basic.loss)
        add_up_threads<TINY_THREADS>(a.basic, op.sum);
}

template <typename T, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS,
                             options_per_sm(COUNT)) void options_gradients(const __grid_constant__ ManyOptions a) {
    extern __shared__ uint4 dynamic[];
    OptionsGradient<T> op(a);
    tiny_rows<OptionsGradient<T>, T, COUNT, ROWS, true>(op, a.tiny, dynamic);
}

/* ---- no options, or one ----------------------------------------------------------------------- */

template <typename T, bool OPTIONS, int COUNT, int ROWS>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny_losses(const __grid_constant__ TinyArgs a) {
    extern __shared__ uint4 dynamic[];
    TinyLoss<T, OPTIONS> op(a);
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
        Loss loss; /* only if `many` */
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward, many; /* many: more than one option, or one that BasicArgs does not have */
    };

    static bool has_many_options(const struct rafter_loss &l) {
        return (l.smoothing != 0.0f && l.class_weight.data) || l.z_loss != 0.0f || l.softcap != 0.0f || l.scale != 1.0f;
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        if (const char *const reason = why_not_basic_outputs(p, call, {true, true, true, true}))
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
        plan->many = has_many_options(l);
        plan->loss = plan->many ? loss_of(device, &l) : Loss{};
        args.tiny = tiny_rows_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                                 static_cast<int>(rafter_dtype_bytes(call.logits.dtype)),
                                 plan->many ? ROWS_OF_OPTIONS : ROWS_AT_ONCE);
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
        plan->blocks = tiny_blocks(args.tiny, device,
                                   plan->many && !p.forward ? options_per_sm(tiny_count(args.tiny.length)) : PER_SM);
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        TinyArgs args = plan.args;
        args.factor = plan.workspace.start(sequence, !plan.forward, &args.basic, workspace);
        const Launch how = {plan.blocks, TINY_THREADS, tiny_shared(args.tiny)};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.many)
                return for_tiny_shape<T, ROWS_OF_OPTIONS>(args.tiny, [&](auto count, auto rows) {
                    constexpr int COUNT = decltype(count)::value, ROWS = decltype(rows)::value;
                    const ManyOptions all = {args, plan.loss};
                    if (plan.forward)
                        sequence.run(how, options_losses<T, COUNT, ROWS>, all);
                    else
                        sequence.run(how, options_gradients<T, COUNT, ROWS>, all);
                });
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
