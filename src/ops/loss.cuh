/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device side of loss.c, in the notation of loss.h: labels, options, and the formulas that lead from
 * the statistics of a row to its outputs and gradient coefficients. Computed in double, usually by
 * one thread per row. What is computed per column is in loss_classes.cuh and in the ops,
 * sums over rows are in loss_sums.cuh.
 */
#ifndef RAFTER_OPS_LOSS_CUH
#define RAFTER_OPS_LOSS_CUH

#include <float.h>

#include "cuda/backend.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/loss.h"

/* Loss::class_of returns one of these, or the class. */
constexpr int64_t IGNORED = -1, OUT_OF_RANGE = -2;

/* Sums over the rows that are not ignored. */
struct Totals {
    double loss, weight, counted; /* of row_loss, of w_y, and the number of rows */
};

/* Sums over all rows or classes, which a separate kernel computes before the rows. */
struct Prepared {
    double class_weight_sum; /* over all classes */
    Totals totals;           /* without the loss */
    /* Only if Loss::divides_upstream: factors of the gradients of the loss and of the entropy, for all rows of
     * linear_cross_entropy. */
    double loss_factor, entropy_factor;
};

/* What a sum of row losses is divided by. `given`: the caller's denominator, or NULL. */
DEVICE double loss_divisor(bool mean, const float *given, double weight) {
    return !mean ? 1.0 : given ? *given : weight;
}

/* The numeric options of a call, and numbers that follow from them. */
struct LossNumbers {
    float z_loss, softcap, scale;
    float inverse_cap;          /* 1 / softcap, or 0 */
    bool smooths;               /* label smoothing: the loss needs sum(w u) */
    double label_share, spread; /* 1 - s, s / V, with V the number of all classes */
};

/* struct rafter_loss as a kernel argument. */
struct Loss : LossNumbers {
    int64_t rows, ignore_index;
    int64_t classes;                  /* of this rank: its columns */
    int64_t all_classes, first_class; /* classes of all ranks; this rank's first one. Without class_group: classes, 0 */
    bool shared;                      /* classes are spread over ranks */
    rafter_reduction reduction;
    bool zero_if_all_ignored, forward;
    bool divides_upstream; /* linear_cross_entropy: rows use the factors in Prepared */
    bool row_units;        /* linear_cross_entropy: and each row divides its gradients by its row_unit() */
    bool cap_bounds;       /* the softcap bounds |u| by MOST_CAPPED: exponentials need no maximum */
    float cap_curve[7]; /* if cap_bounds, for |z| < CAP_NEAR * softcap: u log2(e) is z times this polynomial in z^2 */
    float cap_per_bit;  /* if cap_bounds: v / (u log2(e)) */

    /* The caller's tensors; most have one number per row. data NULL: not given. */
    Rows target, row_weight, dloss, lse, loss, row_loss, logprob, argmax;
    Rows entropy;              /* an output; in backward an input, given only with dentropy */
    Rows dentropy;             /* not given: no gradient of the entropy */
    const float *class_weight; /* that of this rank's first class; NULL: not given. Those of all ranks can be read */
    const float *denominator;  /* NULL: not given */
    int64_t class_stride;      /* of class_weight */
    bool wide_weights;         /* the weights of columns 4 i to 4 i + 3 can be loaded as one float4 */

    int *bad_labels;          /* set to 1 when a label is out of range */
    const Prepared *prepared; /* NULL: class_weight_sum() is V, and blocks that need the totals count them themselves */

    /* Loading a label and checking it (class_of) are two functions, so that the load can be in flight during other
     * work. */
    DEVICE int64_t load_label(int64_t row) const {
        const int64_t i = target.offset(row);
        return target.dtype == RAFTER_I64 ? reinterpret_cast<const int64_t *>(target.data)[i]
                                          : reinterpret_cast<const int *>(target.data)[i];
    }
    DEVICE int64_t class_of(int64_t label) const {
        return label == ignore_index ? IGNORED : label < 0 || label >= all_classes ? OUT_OF_RANGE : label;
    }
    /* The column of a class; outside of [0, classes) if another rank has it. */
    DEVICE int64_t column_of(int64_t y) const {
        return y - first_class;
    }
    DEVICE bool has_class(int64_t y) const {
        return static_cast<uint64_t>(y - first_class) < static_cast<uint64_t>(classes);
    }
    /* The weight of a class: by its number among all classes, and by column. */
    DEVICE double weight_of(int64_t y) const {
        return class_weight ? class_weight[(y - first_class) * class_stride] : 1.0;
    }
    DEVICE double column_weight(int64_t column) const {
        return class_weight ? class_weight[column * class_stride] : 1.0;
    }
    DEVICE double class_weight_sum() const {
        return prepared ? prepared->class_weight_sum : static_cast<double>(all_classes);
    }
    DEVICE double row_weight_at(int64_t row) const {
        return row_weight.data ? *row_weight.at<float>(row) : 1.0;
    }

    /* Whether gradients depend on a sum over all labels. */
    __host__ DEVICE bool needs_totals() const {
        return reduction == RAFTER_MEAN && !denominator;
    }
    DEVICE double mean_denominator(const Totals &totals) const {
        return loss_divisor(reduction == RAFTER_MEAN, denominator, totals.weight);
    }
};

/* Limits for cap_bounds: the largest |u|, and the least softcap; below it the coefficients could be infinite. */
constexpr float MOST_CAPPED = 60.0f, LEAST_CAP = 0x1p-6f;
/* tanh(x) / x = 1 + CAP_TERMS[0] x^2 + CAP_TERMS[1] x^4 + ... for |x| < CAP_NEAR, with an error of 2 units in the last
 * place. */
constexpr float CAP_NEAR = 1.0f;
constexpr float CAP_TERMS[6] = {-0.33332986f, 0.13326409f, -0.053498708f, 0.02035976f, -0.0062593394f, 0.0010582646f};

/* A missing view (data NULL) gives empty Rows. */
static inline Rows loss_rows(const rafter_view &view) {
    Rows none = {};
    return view.data ? rows_of(view, view.ndim) : none;
}

static inline LossNumbers numbers_of(const struct rafter_loss &from) {
    const double classes = static_cast<double>(from.all_classes), smoothing = static_cast<double>(from.smoothing);
    LossNumbers numbers = {};
    numbers.z_loss = from.z_loss;
    numbers.softcap = from.softcap;
    numbers.scale = from.scale;
    numbers.inverse_cap = from.softcap != 0.0f ? fminf(1.0f / from.softcap, FLT_MAX) : 0.0f;
    numbers.smooths = from.smoothing != 0.0f;
    numbers.label_share = 1.0 - smoothing;
    numbers.spread = from.all_classes ? smoothing / classes : 0.0;
    return numbers;
}

static inline Loss loss_of(const rafter_cuda_state &device, const struct rafter_loss *from) {
    Loss loss = {};
    static_cast<LossNumbers &>(loss) = numbers_of(*from);
    loss.rows = from->rows;
    loss.classes = from->classes;
    loss.all_classes = from->all_classes;
    loss.first_class = from->first_class;
    loss.shared = from->class_group.ranks > 0;
    loss.ignore_index = from->ignore_index;
    loss.reduction = from->reduction;
    loss.zero_if_all_ignored = from->zero_if_all_ignored;
    loss.forward = from->direction == RAFTER_FORWARD;
    loss.cap_bounds = from->softcap >= LEAST_CAP && from->softcap * from->scale <= MOST_CAPPED;
    double term = static_cast<double>(from->scale) * 1.4426950408889634;
    for (int i = 0; i < 7 && loss.cap_bounds; i++) {
        loss.cap_curve[i] = static_cast<float>(term * (i > 0 ? CAP_TERMS[i - 1] : 1.0f));
        term /= static_cast<double>(from->softcap) * from->softcap;
    }
    loss.cap_per_bit = loss.cap_bounds ? 1.0f / loss.cap_curve[0] : 0.0f;
    loss.target = loss_rows(from->target);
    loss.row_weight = loss_rows(from->row_weight);
    loss.dloss = loss_rows(from->dloss);
    loss.lse = loss_rows(from->lse);
    if (loss.forward) {
        loss.loss = loss_rows(from->loss);
        loss.row_loss = loss_rows(from->row_loss);
        loss.logprob = loss_rows(from->logprob);
        loss.argmax = loss_rows(from->argmax);
    }
    loss.entropy = loss_rows(from->entropy);
    loss.dentropy = loss_rows(from->dentropy);
    loss.class_stride = from->class_weight.stride[0];
    if (from->class_weight.data)
        loss.class_weight =
            reinterpret_cast<const float *>(from->class_weight.data) + from->first_class * loss.class_stride;
    loss.wide_weights = loss.class_stride == 1 && reinterpret_cast<uintptr_t>(loss.class_weight) % 16 == 0;
    loss.denominator = reinterpret_cast<const float *>(from->denominator.data);
    loss.bad_labels = device.bad_labels_on_device;
    return loss;
}

/* ---- one row --------------------------------------------------------------------------------- */

/* struct rafter_row_stats of a whole row, but max, moment, logit_sum and target are in terms of v,
 * where u = scale * v: v is the logit, after the softcap if there is one. */
struct WholeRowStats {
    float max, target;
    double sum, moment, logit_sum;
    int64_t argmax;
};

/* Rounding may push a sum of non-negative terms below 0. NaN stays NaN. */
DEVICE double non_negative(double value) {
    return value < 0.0 ? 0.0 : value;
}

/* r - u_y, where log_sum is the logarithm of the sum of e^(u - scale * max). Not computed from r, whose rounding could
 * lose the logarithm beside a large maximum. */
DEVICE double negative_log_prob(float max, float target, double log_sum, double scale) {
    return non_negative(scale * (static_cast<double>(max) - target) + log_sum);
}

/* The outputs of one row. */
struct RowResults {
    double loss, lse, logprob, entropy;
    int64_t argmax;
};

/* The outputs of a row that is skipped: 0 if it is ignored, NaN if its label is out of range. */
DEVICE RowResults results_of_skipped(int64_t label) {
    const double all = label == IGNORED ? 0.0 : NAN;
    return {all, all, all, all, -1};
}

DEVICE RowResults results_of(const Loss &loss, int64_t row, int64_t label, const WholeRowStats &f) {
    const double scale = loss.scale, log_sum = log_of_sum(f.sum), max = scale * f.max,
                 weights = loss.class_weight_sum();
    const double lse = max + log_sum, nll = negative_log_prob(f.max, f.target, log_sum, scale);
    double value = loss.label_share * loss.weight_of(label) * nll, entropy = 0.0;
    if (loss.spread != 0.0)
        value += loss.spread * ((max * weights - scale * f.logit_sum) + log_sum * weights);
    if (loss.z_loss != 0.0f)
        value += loss.z_loss * lse * lse;
    if (loss.entropy.data)
        entropy = non_negative(log_sum - scale * f.moment / f.sum);
    return {value * loss.row_weight_at(row), lse, 0.0 - nll, entropy, f.argmax};
}

/* Writes the outputs that the caller asked for, and adds the row to the totals. */
DEVICE void write_row(const Loss &loss, int64_t row, int64_t label, const RowResults &results, Totals *totals) {
    if (label != IGNORED) {
        totals->loss += results.loss;
        totals->weight += label >= 0 ? loss.weight_of(label) : 1.0;
        totals->counted += 1.0;
    }
    if (loss.reduction == RAFTER_NONE && loss.loss.data)
        *loss.loss.at<float>(row) = static_cast<float>(results.loss);
    if (loss.row_loss.data)
        *loss.row_loss.at<float>(row) = static_cast<float>(results.loss);
    if (loss.lse.data)
        *loss.lse.at<float>(row) = static_cast<float>(results.lse);
    if (loss.logprob.data)
        *loss.logprob.at<float>(row) = static_cast<float>(results.logprob);
    if (loss.entropy.data)
        *loss.entropy.at<float>(row) = static_cast<float>(results.entropy);
    if (loss.argmax.data && loss.argmax.dtype == RAFTER_I64)
        *loss.argmax.at<int64_t>(row) = results.argmax;
    else if (loss.argmax.data)
        *loss.argmax.at<int>(row) = static_cast<int>(results.argmax);
}

/* The sum or mean of all row losses. */
DEVICE float reduced_loss(bool mean, bool zero_if_all_ignored, const float *denominator, const Totals &totals) {
    const bool zero = mean && totals.counted == 0.0 && zero_if_all_ignored;
    return zero ? 0.0f : static_cast<float>(totals.loss / loss_divisor(mean, denominator, totals.weight));
}

/* Writes loss from the totals of all rows, unless the reduction is none. */
DEVICE void write_loss(const Loss &loss, const Totals &totals) {
    if (loss.reduction == RAFTER_NONE || !loss.loss.data)
        return;
    *loss.loss.at<float>(0) =
        reduced_loss(loss.reduction == RAFTER_MEAN, loss.zero_if_all_ignored, loss.denominator, totals);
}

/* ---- the gradient of a row ------------------------------------------------------------------- */

/* tanh of the softcap has two forms. The near one is for |z| < CAP_NEAR * softcap, where the other would lose digits.
 * The far one takes special functions. Which one is used depends on the logit itself, never on its neighbours, so that
 * the bits of a row do not depend on how it is cut into packs. */
DEVICE bool is_near_zero(float z, const LossNumbers &loss) {
    return fabsf(z) < CAP_NEAR * loss.softcap;
}
struct FarCap {
    float tanh, slope; /* tanh(z / cap), and its derivative by z / cap. (1 - tanh^2 would lose digits.) */
};
DEVICE FarCap far_cap(float z, const LossNumbers &loss) {
    const float q = exp2_fast(fabsf(z * loss.inverse_cap) * (-2.0f * LOG2E)), r = reciprocal_fast(1.0f + q);
    return {copysignf((1.0f - q) * r, z), 4.0f * q * (r * r)};
}

/* cap * tanh(z / cap), to 3 units in the last place: the near form, and the right one of both. */
DEVICE float capped_near(float z, const LossNumbers &loss) {
    const float x = z * loss.inverse_cap, s = x * x;
    const float high = fmaf(fmaf(CAP_TERMS[5], s, CAP_TERMS[4]), s, CAP_TERMS[3]);
    const float p = fmaf(fmaf(fmaf(high, s, CAP_TERMS[2]), s, CAP_TERMS[1]), s, CAP_TERMS[0]);
    return fmaf(z * s, p, z);
}
DEVICE float capped(float z, const LossNumbers &loss) {
    return either(is_near_zero(z, loss), capped_near(z, loss), loss.softcap * far_cap(z, loss).tanh);
}
/* The same as u log2(e), the argument of exp2, if Loss::cap_bounds. */
DEVICE float capped_bits_near(float z, const Loss &loss) {
    const float s = z * z;
    float p = loss.cap_curve[6];
#pragma unroll
    for (int i = 5; i >= 0; i--)
        p = fmaf(p, s, loss.cap_curve[i]);
    return z * p;
}
DEVICE float capped_bits(float z, const Loss &loss) {
    const float far = loss.softcap * loss.cap_curve[0];
    return either(is_near_zero(z, loss), capped_bits_near(z, loss), far * far_cap(z, loss).tanh);
}
/* The derivative of capped(z) by z: 1 - tanh^2. `tanh`: capped(z) / softcap. */
DEVICE float cap_slope_near(float tanh) {
    return fmaf(-tanh, tanh, 1.0f);
}
DEVICE float cap_slope(float z, float tanh, const LossNumbers &loss) {
    return either(is_near_zero(z, loss), cap_slope_near(tanh), far_cap(z, loss).slope);
}
DEVICE float cap_slope(float z, const LossNumbers &loss) {
    return cap_slope(z, capped_near(z, loss) * loss.inverse_cap, loss);
}

template <int N> DEVICE bool all_near_zero(const float (&z)[N], const LossNumbers &loss) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
        largest = fmaxf(largest, fabsf(z[j]));
    return is_near_zero(largest, loss);
}
/* Replaces logits by capped(z). */
template <int N> DEVICE void cap_all(float (&z)[N], const LossNumbers &loss) {
    if (all_near_zero(z, loss)) {
#pragma unroll
        for (int j = 0; j < N; j++)
            z[j] = capped_near(z[j], loss);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            z[j] = capped(z[j], loss);
    }
}
/* The same, and its derivative. */
template <int N> DEVICE void cap_all(float (&z)[N], float (&slope)[N], const LossNumbers &loss) {
    if (all_near_zero(z, loss)) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            z[j] = capped_near(z[j], loss);
            slope[j] = cap_slope_near(z[j] * loss.inverse_cap);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float v = capped(z[j], loss);
            slope[j] = cap_slope(z[j], v * loss.inverse_cap, loss);
            z[j] = v;
        }
    }
}

/* The coefficients of a row's gradient. In column c, with capped logit v and t = scale * (v - pivot),
 *     dz_c = slope(z_c) * (p * e^t * (level + tilt * t) - spread * w_c - target * [c == y])
 * Without dentropy, level is 1 and tilt is 0; with it, p * e^t is the softmax. at_label: the complete dz at the label.
 * constant: dz is `p`, which is 0 or NaN, in every column. */
struct RowGradient {
    bool constant;
    float pivot, p, spread, at_label, target, level, tilt;
};

/* level + tilt * t. t is bounded because -inf would give NaN; below the bound, e^t is 0 anyway. */
DEVICE float tilted(float level, float tilt, float t) {
    return fmaf(tilt, fmaxf(t, -256.0f), level);
}

/* The factor that the gradients of all rows have: dloss if it is one number (mean or sum), over the denominator, times
 * scale. */
DEVICE double common_upstream(const Loss &loss, const Totals &totals) {
    const double dloss = loss.dloss.data && loss.reduction != RAFTER_NONE ? *loss.dloss.at<float>(0) : 1.0;
    return dloss / loss.mean_denominator(totals) * loss.scale;
}

/* The part of a row's gradient that does not depend on its softmax:
 *     p = (softmax + z_loss * r) * share,   dz_y = p * e^(scale * (v_y - pivot)) - at_label
 * with at_label = target + spread * w_y. */
struct RowTerms {
    double softmax, z_loss, spread, target, at_label;
};

/* The gradient of the entropy with respect to u_c is -p_c (log p_c + entropy), times h, the upstream gradient. With p_c
 * = share * e^t that is -p_c h (t + surprise), where surprise = log(share) + entropy. Both are 0 without dentropy. */
struct EntropyTerms {
    double h, surprise;
};

/* `common`: common_upstream, or loss_factor of Prepared. */
DEVICE RowTerms terms_of(const Loss &loss, double common, int64_t row, int64_t label) {
    const double dloss = loss.dloss.data && loss.reduction == RAFTER_NONE ? *loss.dloss.at<float>(row) : 1.0;
    const double upstream = common * dloss * loss.row_weight_at(row), weight = loss.weight_of(label);
    const double target = upstream * loss.label_share * weight, spread = upstream * loss.spread;
    return {target + spread * loss.class_weight_sum(), loss.z_loss != 0.0f ? upstream * 2.0 * loss.z_loss : 0.0, spread,
            target, target + spread * weight};
}

/* About the largest coefficient of a row's gradient; and the power of two at or below it, to scale a dz that is stored
 * in fp16. */
DEVICE float largest_coefficient(const Loss &loss, double common, int64_t row, int64_t label) {
    constexpr double LARGE_LSE = 65536.0; /* lse is not known yet; fp16's logits are at most that */
    const RowTerms terms = terms_of(loss, common, row, label);
    const float largest = static_cast<float>(fabs(terms.softmax) + LARGE_LSE * fabs(terms.z_loss));
    return loss.dentropy.data ? fmaxf(largest, fabsf(loss.dentropy.get(row))) : largest;
}
DEVICE double unit_next_to(float largest) {
    return largest > 0.0f && largest < INFINITY ? exp2(static_cast<double>(ilogbf(largest))) : 1.0;
}
/* What the coefficients of a row are divided by, if Loss::row_units. */
DEVICE double row_unit(const Loss &loss, int64_t row, int64_t label) {
    return label < 0 ? 1.0 : unit_next_to(largest_coefficient(loss, loss.prepared->loss_factor, row, label));
}

/* The coefficients of a row whose softmax is share * e^(u - scale * pivot). z: the logit at the label. lse: only used
 * for z_loss. MAY_CAP: false if the call has no softcap. */
template <bool MAY_CAP = true>
DEVICE RowGradient gradient_of(const Loss &loss, const RowTerms &terms, float z, float pivot, double share, double lse,
                               const EntropyTerms &entropy = {}) {
    const double softmax = loss.z_loss != 0.0f ? terms.softmax + terms.z_loss * lse : terms.softmax;
    const float v = MAY_CAP && loss.softcap != 0.0f ? capped(z, loss) : z, t = loss.scale * (v - pivot);
    double p = softmax * share, level = 1.0, at_label = p * expf(t) - terms.at_label;
    if (loss.dentropy.data) {
        p = share;
        level = softmax - entropy.h * entropy.surprise;
        at_label = p * expf(t) * (level - entropy.h * fmaxf(t, -256.0f)) - terms.at_label;
    }
    if (MAY_CAP && loss.softcap != 0.0f)
        at_label *= cap_slope(z, loss);
    return {false,
            pivot,
            static_cast<float>(p),
            static_cast<float>(terms.spread),
            static_cast<float>(at_label),
            static_cast<float>(terms.target),
            static_cast<float>(level),
            static_cast<float>(0.0 - entropy.h)};
}

/* The gradient of a row of all -inf. */
DEVICE RowGradient zero_gradient() {
    return {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f};
}

/* The coefficients of a row from its statistics. entropy_factor: the factor of dentropy, as `common` is that of the
 * loss. Both include the logit scale, or neither does. */
DEVICE RowGradient gradient_from_stats(const Loss &loss, double common, int64_t row, int64_t label, float z,
                                       const WholeRowStats &f, double entropy_factor = 0.0) {
    if (f.sum == 0.0)
        return zero_gradient();
    const double lse = loss.z_loss != 0.0f ? static_cast<double>(loss.scale) * f.max + log(f.sum) : 0.0;
    EntropyTerms entropy = {};
    if (loss.dentropy.data) /* log(share) = -log(sum), and the entropy is log(sum) - scale * moment / sum */
        entropy = {loss.dentropy.get(row) * entropy_factor, -(static_cast<double>(loss.scale) * f.moment / f.sum)};
    return gradient_of(loss, terms_of(loss, common, row, label), z, f.max, 1.0 / f.sum, lse, entropy);
}

/* The coefficients of a row from lse alone; if there is a dentropy, also from the given entropy. |lse| must be small
 * enough: see lse_is_accurate. */
DEVICE RowGradient gradient_from_lse(const Loss &loss, double common, int64_t row, int64_t label, float z, float lse,
                                     double entropy_factor = 0.0) {
    const RowTerms terms = terms_of(loss, common, row, label);
    EntropyTerms entropy = {};
    if (loss.dentropy.data)
        entropy = {loss.dentropy.get(row) * entropy_factor, loss.entropy.get(row)};
    if (loss.scale == 1.0f)
        return gradient_of(loss, terms, z, lse, 1.0, lse, entropy);
    const float pivot = static_cast<float>(static_cast<double>(lse) / loss.scale);
    const double left =
        static_cast<double>(loss.scale) * pivot - lse; /* the rounding error of the pivot, |left| << 1 */
    entropy.surprise += left;
    return gradient_of(loss, terms, z, pivot, 1.0 + left, lse, entropy);
}

/* Whether backward can use the given lse: see lse_is_accurate in cross_entropy/cpu_run.c. */
template <typename T> DEVICE bool lse_is_accurate(float lse) {
    const float bound = sizeof(T) == 4 ? 0x1p6f : __is_same(T, bf16) ? 0x1p11f : 0x1p8f;
    return fabsf(lse) <= bound;
}

DEVICE void flag_bad_label(const Loss &loss, int64_t label) {
    if (label == OUT_OF_RANGE)
        *static_cast<volatile int *>(loss.bad_labels) = 1;
}
/* Writes the outputs of a skipped row; called by one thread. A kernel that also writes those of other rows should rather
 * have one write_row for all: it has 400 instructions. */
DEVICE void write_skipped(const Loss &loss, int64_t row, int64_t label, Totals *totals) {
    flag_bad_label(loss, label);
    if (loss.forward)
        write_row(loss, row, label, results_of_skipped(label), totals);
}

/* Zeros if the row is ignored, NaN if the label is out of range. */
DEVICE RowGradient gradient_of_skipped(int64_t label) {
    return {true, 0.0f, label == IGNORED ? 0.0f : NAN, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f};
}

#endif
