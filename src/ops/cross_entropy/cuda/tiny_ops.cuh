/* SPDX-License-Identifier: Apache-2.0 */
/* Losses and gradients of rows of up to 32 classes, as Ops of cuda/tiny_rows.cuh. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_TINY_OPS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_TINY_OPS_CUH

#include "cuda/tiny_rows.cuh"
#include "ops/cross_entropy/cuda/options.cuh"

namespace {

/* What the Ops of losses have in common: they load a row's label, and write its results. */
struct LossOfRows {
    const BasicArgs &u;
    float *const row_losses; /* see OptionArgs */
    double2 sum = {};        /* losses, and weights */
    typedef int64_t Row;

    DEVICE explicit LossOfRows(const OptionArgs &a) : u(a.basic), row_losses(a.row_losses) {
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
    DEVICE explicit TinyLoss(const OptionArgs &args) : LossOfRows(args) {
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
                    total += j < u.classes ? x[j] : 0.0f;
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
    const OptionArgs &a;
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
        use(*a.factor);
    }
    DEVICE void use(double factor_of_all) {
        factor = factor_of_all;
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
            if (j < least_of_count(COUNT) || j < u.classes)
                gradient[j] = from_float<T>(g.label < 0 ? g.c : spread.of(x[j], scaled));
        if (g.label >= 0)
            gradient[g.label] = from_float<T>(spread.at_label(z_label, g));
    }
};

/* ---- all options ------------------------------------------------------------------------------ */

/* The logits v of a row, after the softcap, of which those from `length` on are -inf. */
template <int COUNT>
DEVICE void cap_row(float (&v)[COUNT], const float (&x)[COUNT], int length, const LossNumbers &loss) {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        v[j] = j >= length ? x[j] : softcapped(x[j], loss);
}

template <typename T> struct OptionsLoss : LossOfRows {
    const OptionArgs &a;
    const ClassWeights weights;
    const float weight_sum;

    DEVICE explicit OptionsLoss(const OptionArgs &args)
        : LossOfRows(args), a(args), weights(args.basic), weight_sum(weights.sum(0, 1, args.basic.classes)) {
    }
    template <int COUNT>
    DEVICE void finish(Row loaded, int row, bool present, const float (&x)[COUNT], const T *elements, T *) {
        const int label = u.class_of(loaded);
        float v[COUNT], weight = 1.0f, below = 0.0f;
        cap_row(v, x, u.classes, a.loss);
        const RowStats s = scaled_stats(v, a.loss.scale);
        LossAndLse result;
        if (label >= 0) {
            weight = weights.of_class(label);
            if (a.loss.smooths)
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    if (j < u.classes)
                        below = fmaf(weights.of_class(j), s.max - v[j], below);
            result = loss_of_row(a.loss, s, softcapped(to_float(elements[label]), a.loss), weight, weight_sum, below);
        } else {
            result = loss_of_skipped(u, label);
        }
        put(row, present, result.loss, result.lse, label == IGNORED ? 0.0f : weight);
    }
};

/* SCATTERED: for scattered_rows, where rows have any length up to COUNT. */
template <typename T, bool SCATTERED> struct OptionsGradient {
    const OptionArgs &a;
    const ClassWeights weights;
    const float weight_sum;
    float factor = 0.0f;
    typedef typename TinyGradient<T, true>::Row Row;

    DEVICE explicit OptionsGradient(const OptionArgs &args)
        : a(args), weights(args.basic), weight_sum(weights.sum(0, 1, args.basic.classes)) {
    }
    DEVICE Row no_row() const {
        return TinyGradient<T, true>{a}.no_row();
    }
    DEVICE Row load(int row) const {
        return TinyGradient<T, true>{a}.load(row);
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        use(*a.factor);
    }
    DEVICE void use(double factor_of_all) {
        factor = static_cast<float>(factor_of_all) * a.loss.scale;
    }
    template <int COUNT>
    DEVICE void finish(const Row &loaded, int, bool, const float (&x)[COUNT], const T *, T *gradient) const {
        const BasicArgs &u = a.basic;
        const int label = u.class_of(loaded.label);
        u.flag_bad_label(label);
        float v[COUNT];
        cap_row(v, x, u.classes, a.loss);
        const Normalizer n = lse_is_accurate<T>(loaded.lse)
                                 ? normalizer_from_lse(a.loss, loaded.lse)
                                 : normalizer_from_stats(a.loss, scaled_stats(v, a.loss.scale));
        const GradientOfRow<T> row(a.loss, n, factor * loaded.dloss, label >= 0 ? weights.of_class(label) : 1.0f,
                                   weight_sum);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if ((!SCATTERED && j < least_of_count(COUNT)) || j < u.classes)
                gradient[j] = from_float<T>(row.of(j, label, x[j], v[j], weights, a.loss));
    }
};

} // namespace

#endif
