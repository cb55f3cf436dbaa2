/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device side of loss.c: labels, options and the mathematics between the statistics of a row and its results, in
 * the same notation. One thread calls it per row, in double; what touches every column is the ops' own.
 */
#ifndef RAFTER_OPS_LOSS_CUH
#define RAFTER_OPS_LOSS_CUH

#include "cuda/backend.cuh"
#include "cuda/rows.cuh"
#include "ops/loss.h"

/* What a row's label says; else it is the class. */
constexpr int64_t IGNORED = -1, OUT_OF_RANGE = -2;

/* Sums over rows: of row_loss, of w_y over those not ignored, and the number of those. */
struct Totals {
    double loss, weight, counted;
};

/* Found before the first row, where it takes a kernel of its own. */
struct Prepared {
    double class_weights; /* sum over the classes */
    Totals totals;        /* without the loss */
};

/* struct rafter_loss as kernels take it. */
struct Loss {
    int64_t rows, classes, ignore_index;
    rafter_reduction reduction;
    bool zero_if_all_ignored, forward;
    bool weighted; /* sum(w u) counts: label smoothing */
    float z_loss, softcap, scale;
    double hit, spread; /* 1 - s, s / V */

    Rows target, row_weight, dloss, lse, loss, row_loss, logprob, entropy, argmax;
    const float *class_weight, *denominator; /* NULL: not given */
    int64_t class_stride;

    int *bad_labels;          /* set to 1 where a label is out of range */
    const Prepared *prepared; /* NULL: class_weights is V, and blocks count rows themselves if they must */

    /* Apart, so that a label can be on its way while something else is done. */
    DEVICE int64_t load_label(int64_t row) const {
        const int64_t i = target.offset(row);
        return target.dtype == RAFTER_I64 ? reinterpret_cast<const int64_t *>(target.data)[i]
                                          : reinterpret_cast<const int *>(target.data)[i];
    }
    DEVICE int64_t class_of(int64_t label) const {
        return label == ignore_index ? IGNORED : label < 0 || label >= classes ? OUT_OF_RANGE : label;
    }
    DEVICE double weight_of(int64_t y) const {
        return class_weight ? class_weight[y * class_stride] : 1.0;
    }
    DEVICE double class_weights() const {
        return prepared ? prepared->class_weights : static_cast<double>(classes);
    }
    DEVICE double row_weight_at(int64_t row) const {
        return row_weight.data ? *row_weight.at<float>(row) : 1.0;
    }

    /* Whether gradients cannot be written before all labels have been seen. */
    __host__ DEVICE bool needs_totals() const {
        return reduction == RAFTER_MEAN && !denominator;
    }
    DEVICE double mean_denominator(const Totals &totals) const {
        return reduction != RAFTER_MEAN ? 1.0 : denominator ? *denominator : totals.weight;
    }
};

/* A view that may be missing: its data is NULL then. */
static inline Rows loss_rows(const rafter_view &view) {
    Rows none = {};
    return view.data ? rows_of(view, view.ndim) : none;
}

static inline Loss loss_of(const rafter_context *context, const struct rafter_loss *from) {
    Loss loss = {};
    loss.rows = from->rows;
    loss.classes = from->classes;
    loss.ignore_index = from->ignore_index;
    loss.reduction = from->reduction;
    loss.zero_if_all_ignored = from->zero_if_all_ignored;
    loss.forward = from->direction == RAFTER_FORWARD;
    loss.weighted = from->smoothing != 0.0f;
    loss.z_loss = from->z_loss;
    loss.softcap = from->softcap;
    loss.scale = from->scale;
    loss.hit = 1.0 - static_cast<double>(from->smoothing);
    loss.spread = from->classes ? static_cast<double>(from->smoothing) / static_cast<double>(from->classes) : 0.0;
    loss.target = loss_rows(from->target);
    loss.row_weight = loss_rows(from->row_weight);
    loss.dloss = loss_rows(from->dloss);
    loss.lse = loss_rows(from->lse);
    if (loss.forward) {
        loss.loss = loss_rows(from->loss);
        loss.row_loss = loss_rows(from->row_loss);
        loss.logprob = loss_rows(from->logprob);
        loss.entropy = loss_rows(from->entropy);
        loss.argmax = loss_rows(from->argmax);
    }
    loss.class_weight = reinterpret_cast<const float *>(from->class_weight.data);
    loss.class_stride = from->class_weight.stride[0];
    loss.denominator = reinterpret_cast<const float *>(from->denominator.data);
    loss.bad_labels = context->cuda_state->bad_labels_on_device;
    return loss;
}

/* ---- one row --------------------------------------------------------------------------------- */

/* struct rafter_row_stats of a whole row, but with max, moment, weighted and target in units of v, where u = scale * v:
 * the logit itself, or the capped one. */
struct RowFigures {
    float max, target;
    double sum, moment, weighted;
    int64_t argmax;
};

DEVICE double at_least_zero(double value) {
    return value < 0.0 ? 0.0 : value;
}

/* What the outputs of a row get. */
struct RowResults {
    double loss, lse, logprob, entropy;
    int64_t argmax;
};

/* Of a row that is ignored, or whose label is out of range. */
DEVICE RowResults results_unread(int64_t label) {
    const double all = label == IGNORED ? 0.0 : NAN;
    return {all, all, all, all, -1};
}

DEVICE RowResults results_of(const Loss &loss, int64_t row, int64_t label, const RowFigures &f) {
    const double scale = loss.scale, log_sum = log(f.sum), max = scale * f.max, weights = loss.class_weights();
    const double lse = max + log_sum, nll = at_least_zero(scale * (static_cast<double>(f.max) - f.target) + log_sum);
    double value = loss.hit * loss.weight_of(label) * nll, entropy = 0.0;
    if (loss.spread != 0.0)
        value += loss.spread * ((max * weights - scale * f.weighted) + log_sum * weights);
    if (loss.z_loss != 0.0f)
        value += loss.z_loss * lse * lse;
    if (loss.entropy.data)
        entropy = at_least_zero(log_sum - scale * f.moment / f.sum);
    return {value * loss.row_weight_at(row), lse, 0.0 - nll, entropy, f.argmax};
}

/* Writes the row's outputs, those given, and adds it to the totals. */
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

/* Writes loss from the totals of all rows, unless the reduction is none. */
DEVICE void write_loss(const Loss &loss, const Totals &totals) {
    if (loss.reduction == RAFTER_NONE || !loss.loss.data)
        return;
    const bool nothing = loss.reduction == RAFTER_MEAN && totals.counted == 0.0 && loss.zero_if_all_ignored;
    *loss.loss.at<float>(0) = nothing ? 0.0f : static_cast<float>(totals.loss / loss.mean_denominator(totals));
}

/* ---- its gradient ---------------------------------------------------------------------------- */

/* What v and 1 - tanh^2(z / cap) are of a logit. */
DEVICE float capped(float z, float cap) {
    return cap * tanhf(z / cap);
}
DEVICE float cap_slope(float z, float cap) {
    const float q = expf(-2.0f * fabsf(z / cap)), one_and_q = 1.0f + q;
    return 4.0f * q / (one_and_q * one_and_q);
}

/* dz_v = slope(z_v) * ( p * e^(scale * (v - pivot)) - spread * w_v ), and at the label `at_label`, whole: there the
 * bracket is less by `target`. `constant`: every dz_v is `p`, which is 0 or NaN, at the label too. */
struct RowGradient {
    bool constant;
    float pivot, p, spread, at_label, target;
};

/* What is the same in every row: dloss of mean and sum, the denominator, scale. */
DEVICE double common_upstream(const Loss &loss, const Totals &totals) {
    const double dloss = loss.dloss.data && loss.reduction != RAFTER_NONE ? *loss.dloss.at<float>(0) : 1.0;
    return dloss / loss.mean_denominator(totals) * loss.scale;
}

/* What a row's gradient is made of before its softmax is known: p = (whole + of_lse * r) * share, and at the label the
 * bracket is less by `target` and that class's part of the spread, together `off_label`. */
struct RowTerms {
    double whole, of_lse, spread, target, off_label;
};

DEVICE RowTerms terms_of(const Loss &loss, double common, int64_t row, int64_t label) {
    const double dloss = loss.dloss.data && loss.reduction == RAFTER_NONE ? *loss.dloss.at<float>(row) : 1.0;
    const double upstream = common * dloss * loss.row_weight_at(row), weight = loss.weight_of(label);
    const double target = upstream * loss.hit * weight, spread = upstream * loss.spread;
    return {target + spread * loss.class_weights(), loss.z_loss != 0.0f ? upstream * 2.0 * loss.z_loss : 0.0, spread,
            target, target + spread * weight};
}

/* Where the softmax is share * e^(u - scale * pivot). z is the logit at the label; lse is looked at for z_loss alone.
 * MAY_CAP: there may be a softcap. */
template <bool MAY_CAP = true>
DEVICE RowGradient gradient_of(const Loss &loss, const RowTerms &terms, float z, float pivot, double share,
                               double lse) {
    const double p = (loss.z_loss != 0.0f ? terms.whole + terms.of_lse * lse : terms.whole) * share;
    const float v = MAY_CAP && loss.softcap != 0.0f ? capped(z, loss.softcap) : z;
    double at_label = p * expf(loss.scale * (v - pivot)) - terms.off_label;
    if (MAY_CAP && loss.softcap != 0.0f)
        at_label *= cap_slope(z, loss.softcap);
    return {false,
            pivot,
            static_cast<float>(p),
            static_cast<float>(terms.spread),
            static_cast<float>(at_label),
            static_cast<float>(terms.target)};
}

/* Of a row that is all -inf. */
DEVICE RowGradient gradient_of_nothing() {
    return {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
}

DEVICE RowGradient gradient_from_figures(const Loss &loss, double common, int64_t row, int64_t label, float z,
                                         const RowFigures &f) {
    if (f.sum == 0.0)
        return gradient_of_nothing();
    const double lse = loss.z_loss != 0.0f ? static_cast<double>(loss.scale) * f.max + log(f.sum) : 0.0;
    return gradient_of(loss, terms_of(loss, common, row, label), z, f.max, 1.0 / f.sum, lse);
}

/* From r alone, of at most 2^11 or so: the caller sees to that. */
DEVICE RowGradient gradient_from_lse(const Loss &loss, double common, int64_t row, int64_t label, float z, float lse) {
    const RowTerms terms = terms_of(loss, common, row, label);
    if (loss.scale == 1.0f)
        return gradient_of(loss, terms, z, lse, 1.0, lse);
    const float pivot = static_cast<float>(static_cast<double>(lse) / loss.scale);
    const double left = static_cast<double>(loss.scale) * pivot - lse; /* what rounding the pivot left, |left| << 1 */
    return gradient_of(loss, terms, z, pivot, 1.0 + left, lse);
}

/* Whether backward can start from the lse it was given: see lse_serves in op.c. */
template <typename T> DEVICE bool lse_serves(float lse) {
    const float bound = sizeof(T) == 4 ? 0x1p6f : __is_same(T, bf16) ? 0x1p11f : 0x1p8f;
    return fabsf(lse) <= bound;
}

/* What is done once for a row that is not read, by one thread. */
DEVICE void write_unread(const Loss &loss, int64_t row, int64_t label, Totals *totals) {
    if (label == OUT_OF_RANGE)
        *static_cast<volatile int *>(loss.bad_labels) = 1;
    if (loss.forward)
        write_row(loss, row, label, results_unread(label), totals);
}

/* Its gradient: zeros where it is ignored, NaN where the label is out of range. */
DEVICE RowGradient gradient_unread(int64_t label) {
    return {true, 0.0f, label == IGNORED ? 0.0f : NAN, 0.0f, 0.0f, 0.0f};
}

#endif
