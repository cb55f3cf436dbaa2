/* SPDX-License-Identifier: Apache-2.0 */
/* For from_lse.cu and tiles.cu: the kernel that computes the coefficients of gradients from lse. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_COEFFICIENTS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_COEFFICIENTS_CUH

#include "ops/cross_entropy/cuda/general.cuh"

namespace {

/* The statistics of one lane's share of a row with any stride. */
template <int OPTIONS, typename T> DEVICE LossStats<OPTIONS> strided_stats(const T *z, int lane, const Args &c) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    for (int64_t v = lane; v < c.loss.classes; v += WARP)
        add_one(g, z[v * c.z_step], v, c.loss);
    return g;
}

/* A thread per row. The whole warp reads the rows whose lse is not accurate enough. STRIDED: columns
 * have any stride. */
template <typename T, int OPTIONS, bool STRIDED>
__global__ __launch_bounds__(ROW_THREADS) void compute_coefficients(const __grid_constant__ Args c,
                                                                    RowCoefficients *coefficients) {
    wait_unless_prepared(c);
    start_next_kernel();
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t loaded = row < loss.rows ? loss.load_label(row) : loss.ignore_index;
    const float lse = row < loss.rows ? loss.lse.get(row) : 0.0f;
    const int64_t label = loss.class_of(loaded);
    const float given = label >= 0 ? lse : 0.0f,
                z_label = label >= 0 ? to_float(c.z.at<const T>(row)[STRIDED ? label * c.z_step : label]) : 0.0f;
    wait_for_previous_kernel();
    const double common = common_factor(c); /* while the load of the label's logit is in flight */
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0 && lse_is_accurate<T>(given))
        gradient = gradient_from_lse(loss, common, row, label, z_label, given);
    for (unsigned left = __ballot_sync(~0u, !lse_is_accurate<T>(given)); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const T *const z = c.z.at<const T>(row - lane + owner);
        LossStats<OPTIONS> g;
        if (STRIDED || c.invariant) {
            g = strided_stats<OPTIONS>(z, lane, c);
        } else {
            const AlignedSpan<const T> span(z, loss.classes);
            PackGroup<T, AHEAD<OPTIONS>> group;
            group.load(span, lane, WARP);
            g = span_stats<OPTIONS>(span, 0, group, lane, WARP, loss);
        }
        g = merge_warp(g, loss.scale);
        if (lane == owner)
            gradient = gradient_from_stats(loss, common, row, label, z_label, whole_row_stats(g, z_label, loss));
    }
    if (row < loss.rows) {
        flag_bad_label(loss, label);
        coefficients[row] = {gradient, label};
    }
}

} // namespace

#endif
