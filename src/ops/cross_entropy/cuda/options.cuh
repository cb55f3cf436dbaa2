/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loss and the gradient of a row with any options but row weights, as in loss.cuh, but in floats and with few
 * instructions: for short rows, and for calls so small that most of the time goes into loading code. v is a logit after
 * the softcap.
 */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_OPTIONS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_OPTIONS_CUH

#include "ops/cross_entropy/cuda/basic.cuh"

namespace {

/* Kernel arguments. */
struct OptionArgs {
    BasicArgs basic;
    LossNumbers loss;
    float *row_losses;        /* reduction none: the loss of each row; NULL: not wanted */
    const float *row_dlosses; /* reduction none: dloss of each row; NULL: 1 */
    const double *factor;     /* backward: the factor of all gradients; NULL: see common_factor */
};

/* ---- device ---------------------------------------------------------------------------------- */

DEVICE float softcapped(float z, const LossNumbers &loss) {
    return loss.softcap != 0.0f ? capped(z, loss) : z;
}

/* The statistics of v, times `scale`. */
template <int COUNT> DEVICE RowStats scaled_stats(const float (&v)[COUNT], float scale) {
    float max = -INFINITY, sum[2] = {};
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        max = fmaxf(max, v[j]);
    const float pivot = pivot_at(max);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        sum[j % 2] += exp_below(v[j] - pivot, scale);
    return {max, sum[0] + sum[1]};
}

/* The weights of classes, 1 if there are none. */
struct ClassWeights {
    const float *weights; /* NULL: none */
    int64_t stride;

    DEVICE explicit ClassWeights(const BasicArgs &u)
        : weights(u.weighs ? u.class_weight : nullptr), stride(u.class_stride) {
    }
    DEVICE float of_class(int j) const {
        return weights ? weights[j * stride] : 1.0f;
    }
    /* The sum of the weights of classes first, first + step, ... */
    DEVICE float sum(int first, int step, int classes) const {
        float all = 0.0f;
        for (int j = first; j < classes; j += step)
            all += of_class(j);
        return all;
    }
};

struct LossAndLse {
    float loss, lse;
};

/* Loss and lse of a row. `target`: v of the label. `weight`: that of the label. weight_sum: the sum over all classes.
 * `below`: the sum of weight * (max - v) over all classes. The last two: only if loss.smooths. */
DEVICE LossAndLse loss_of_row(const LossNumbers &loss, RowStats s, float target, float weight, float weight_sum,
                              float below) {
    const TwoFloats log_sum = log_in_floats(s.max == INFINITY ? NAN : s.sum);
    const float nll = rounded_sum(loss.scale * (s.max - target), log_sum);
    const float lse = rounded_sum(loss.scale * s.max, log_sum);
    float value = static_cast<float>(loss.label_share) * weight * (nll < 0.0f ? 0.0f : nll);
    if (loss.smooths)
        value = fmaf(static_cast<float>(loss.spread), fmaf(log_sum.rounded(), weight_sum, loss.scale * below), value);
    if (loss.z_loss != 0.0f)
        value = fmaf(loss.z_loss * lse, lse, value);
    return {value, lse};
}

/* The same of a row that is ignored, or whose label is out of range; flags the latter. */
DEVICE LossAndLse loss_of_skipped(const BasicArgs &u, int label) {
    const float all = label == IGNORED ? 0.0f : NAN;
    u.flag_bad_label(label);
    return {all, all};
}

/* Backward: the factor that the gradients of all rows share, times the scale. OptionArgs::factor is NULL if it takes no
 * sum over labels; then this kernel is the first of its call, and has waited for the inputs. Loads above this call are
 * issued before it. */
DEVICE float common_factor(const OptionArgs &a) {
    wait_for_previous_kernel();
    return static_cast<float>(a.factor ? __ldcg(a.factor) : a.basic.divided_upstream(0.0)) * a.loss.scale;
}

/* What normalizes the exponentials of a row: share * e^(scale (v - pivot)) is a probability. */
struct Normalizer {
    float pivot, share, lse;
};
DEVICE Normalizer normalizer_from_lse(const LossNumbers &loss, float lse) {
    const float pivot = lse / loss.scale;
    return {pivot, 1.0f + fmaf(loss.scale, pivot, -lse), lse}; /* share corrects the rounding error of the pivot */
}
DEVICE Normalizer normalizer_from_stats(const LossNumbers &loss, RowStats s) {
    const float sum = s.max == INFINITY ? NAN : s.sum;
    return {s.max, 1.0f / sum, fmaf(loss.scale, s.max, logf(sum))};
}

/* dz = slope * (c e^(scale (v - pivot)) - spread w - target [at the label]); see RowGradient. */
template <typename T> struct GradientOfRow {
    ScaledExp<T> scaled;
    float c, pivot, target, spread;
    bool zero; /* every logit is -inf */

    DEVICE GradientOfRow() {
    }
    /* `own`: dloss over the denominator, times the scale. The others: as in loss_of_row. */
    DEVICE GradientOfRow(const LossNumbers &loss, const Normalizer &n, float own, float weight, float weight_sum)
        : pivot(n.pivot), target(own * static_cast<float>(loss.label_share) * weight),
          spread(own * static_cast<float>(loss.spread)), zero(n.share == INFINITY) {
        float p = loss.smooths ? fmaf(spread, weight_sum, target) : target;
        if (loss.z_loss != 0.0f)
            p = fmaf(own * 2.0f * loss.z_loss, n.lse, p);
        c = p * n.share;
        scaled = ScaledExp<T>(c, pivot, loss.scale);
    }
    /* The gradient of class j, whose logit is z before and v after the softcap. */
    DEVICE float of(int j, int label, float z, float v, const ClassWeights &weights, const LossNumbers &loss) const {
        float d = scaled.of(v);
        if (j == label)
            d = fmaf(c, expf(loss.scale * (v - pivot)), -target);
        if (loss.smooths)
            d = fmaf(-spread, weights.of_class(j), d);
        if (loss.softcap != 0.0f)
            d *= cap_slope(z, v * loss.inverse_cap, loss);
        return is_constant(label) ? constant(label) : d;
    }
    /* The gradient at the label, if there is one; z is its logit. */
    DEVICE float at_label(int label, float z, const ClassWeights &weights, const LossNumbers &loss) const {
        return of(max(label, 0), label, z, softcapped(z, loss), weights, loss);
    }
    /* Whether all classes of a row have the same gradient; and which. */
    DEVICE bool is_constant(int label) const {
        return label < 0 || zero;
    }
    DEVICE float constant(int label) const {
        return label == OUT_OF_RANGE ? NAN : 0.0f;
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Whether a call has more than one option, or one that BasicArgs does not have. */
inline bool has_many_options(const struct rafter_loss &l) {
    return (l.smoothing != 0.0f && l.class_weight.data) || l.z_loss != 0.0f || l.softcap != 0.0f || l.scale != 1.0f;
}

/* Why a call, with logits in any layout, is not for OptionArgs, or NULL. any_dloss: whether a kernel takes a strided
 * dloss. */
inline const char *why_not_options(const Problem &p, const cross_entropy_call &call, bool any_dloss = false) {
    const struct rafter_loss &l = call.loss;
    if (const char *const reason = why_not_basic_outputs(p, call, {true, true, true, true}))
        return reason;
    if (p.forward == p.gradient)
        return p.forward ? "loss and gradient are wanted at once" : "there is nothing to write";
    if (p.rows > MOST_INT_ROWS)
        return "it counts rows in 31 bits";
    if (l.reduction != RAFTER_NONE)
        return NULL;
    return p.forward
               ? (contiguous_or_missing(l.loss) ? NULL : "loss is strided")
               : (any_dloss || contiguous_or_missing(l.dloss) || is_one_number(l.dloss) ? NULL : "dloss is strided");
}

/* All arguments but those in the workspace. */
inline OptionArgs option_args(const rafter_cuda_state &device, const Problem &p, const cross_entropy_call &call) {
    const struct rafter_loss &l = call.loss;
    OptionArgs args = {basic_args(device, p, call), numbers_of(l), nullptr, nullptr, nullptr};
    if (l.reduction == RAFTER_NONE) {
        args.row_losses = args.basic.loss;
        args.basic.loss = nullptr;
        if (args.basic.dloss && !is_one_number(l.dloss)) { /* not in the common factor: each row has its own */
            args.row_dlosses = args.basic.dloss;
            args.basic.dloss = nullptr;
        }
    }
    return args;
}

} // namespace

#endif
