/* SPDX-License-Identifier: Apache-2.0 */
/* For small_contiguous.cu and small_strided.cu: sums over a row with any options but row weights, and the row's outputs. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_ROW_SUMS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_ROW_SUMS_CUH

#include "ops/cross_entropy/cuda/options.cuh"

namespace {

/* Sums over a row, or over a thread's share of it. */
struct RowSums {
    RowStats stats;
    float total, weight_sum; /* label smoothing: sums of weight * v, and of weights */

    /* Adds the logits of classes first, first + step, ..., of which only the first `valid` exist. */
    template <int N>
    DEVICE void add(const float (&z)[N], int valid, int first, int step, const LossNumbers &loss,
                    const ClassWeights &weights) {
        float v[N], max = stats.max, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] = j < valid ? softcapped(z[j], loss) : -INFINITY;
            max = fmaxf(max, v[j]);
        }
        const float pivot = pivot_at(max);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += exp_below(v[j] - pivot, loss.scale);
        stats = {max, fmaf(stats.sum, exp_below(stats.max - pivot, loss.scale), sum)};
        if (loss.smooths)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j < valid) {
                    const float weight = weights.of_class(first + j * step);
                    weight_sum += weight;
                    total = fmaf(weight, v[j], total);
                }
    }
};

DEVICE RowSums no_sums() {
    return {no_elements(), 0.0f, 0.0f};
}

/* Writes the outputs of a row, and returns its loss and its weight. of_all: total and weight_sum of the whole row.
 * Called by one thread. */
DEVICE double2 finish_row(const OptionArgs &a, int64_t row, int label, float z_label, RowStats s, double2 of_all) {
    const BasicArgs &u = a.basic;
    LossAndLse result;
    float weight = 1.0f;
    if (label >= 0) {
        weight = ClassWeights(u).of_class(label);
        result = loss_of_row(a.loss, s, softcapped(z_label, a.loss), weight, static_cast<float>(of_all.y),
                             static_cast<float>(s.max * of_all.y - of_all.x));
    } else {
        result = loss_of_skipped(u, label);
    }
    if (u.lse)
        u.lse[row] = result.lse;
    if (u.row_loss)
        u.row_loss[row] = result.loss;
    if (a.row_losses)
        a.row_losses[row] = result.loss;
    return make_double2(result.loss, label == IGNORED ? 0.0 : weight);
}

} // namespace

#endif
