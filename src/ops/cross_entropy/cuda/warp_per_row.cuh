/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of warp_per_row.cu and strided.cu: one kernel for the whole call, a warp per row. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_WARP_PER_ROW_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_WARP_PER_ROW_CUH

#include "ops/cross_entropy/cuda/coefficients.cuh"

namespace {

/* A warp takes several rows in turn. FORWARD: the call may be forward. GRADIENT: it may want dz. STRIDED: columns
 * have any stride, and are loaded one at a time. */
template <typename T, int OPTIONS, bool FORWARD, bool GRADIENT, bool STRIDED>
__global__ __launch_bounds__(ROW_THREADS, 4) void warp_per_row(const __grid_constant__ Args c) {
    wait_unless_prepared(c);
    [[maybe_unused]] constexpr int N = WIDE<T>;
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const bool forward = FORWARD && loss.forward, gradient_wanted = GRADIENT && c.gradient;
    const int64_t first = (blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x) / WARP,
                  step = gridDim.x * int64_t(ROW_THREADS / WARP);
    Totals totals = {};
    double common = 0.0;
    for (int64_t row = first;; row += step) {
        const bool valid = row < loss.rows;
        const T *const z = c.z.at<const T>(valid ? row : 0);
        const AlignedSpan<const T> span(z, STRIDED || !valid ? 0 : loss.classes);
        /* All loads that do not depend on others are issued before the first result is used. */
        const int64_t loaded = valid ? loss.load_label(row) : loss.ignore_index;
        const float given = GRADIENT && valid && !forward && loss.lse.data ? loss.lse.get(row) : INFINITY;
        PackGroup<T, AHEAD<OPTIONS>> group;
        group.load(span, lane, WARP);
        if (row == first) { /* every thread gets here, also those without a row */
            wait_for_previous_kernel();
            if (gradient_wanted)
                common = common_factor(c);
        }
        const int64_t label = loss.class_of(loaded);
        const float z_label = label >= 0 ? to_float(z[label * c.z_step]) : 0.0f;
        if (!valid)
            break;

        RowGradient gradient = gradient_of_skipped(label);
        if (label < 0) {
            if (lane == 0)
                write_skipped(loss, row, label, &totals);
        } else if (GRADIENT && lse_is_accurate<T>(given)) {
            gradient = gradient_from_lse(loss, common, row, label, z_label, given);
        } else {
            const LossStats<OPTIONS> g = merge_warp(STRIDED ? strided_stats<OPTIONS>(z, lane, c)
                                                            : span_stats<OPTIONS>(span, 0, group, lane, WARP, loss),
                                                    loss.scale);
            const WholeRowStats stats = whole_row_stats(g, z_label, loss);
            if (gradient_wanted)
                gradient = gradient_from_stats(loss, common, row, label, z_label, stats);
            if (forward && lane == 0)
                write_row(loss, row, label, results_of(loss, row, label, stats), &totals);
        }
        if (!gradient_wanted)
            continue;
        __syncwarp(); /* dz may overwrite z: all lanes have read their logits */
        T *const dz = c.dz.at<T>(row);
        const RowWriter<OPTIONS, T> writer(gradient, label, loss);
        if constexpr (STRIDED) {
            for (int64_t v = lane; v < loss.classes; v += WARP)
                dz[v * c.dz_step] = writer.of_one(z[v * c.z_step], v);
        } else {
            for (int64_t i = lane; i < span.packs; i += AHEAD<OPTIONS> * WARP) {
                if (i >= AHEAD<OPTIONS> * WARP)
                    group.load(span, i, WARP);
#pragma unroll
                for (int k = 0; k < AHEAD<OPTIONS>; k++)
                    if (i + k * WARP < span.packs) {
                        const int64_t at = span.head + (i + k * WARP) * N;
                        store_once<T, N>(dz + at, writer.of(group.packs[k], at));
                    }
            }
            writer.write_edges(dz, span, lane, WARP);
        }
    }
    if (forward)
        add_up(c, totals);
}

/* The plan of the variants that launch warp_per_row. */
struct WarpRowsPlan {
    GeneralPlan general;
    int64_t blocks; /* enough to fill the device, or one warp per row if that is less */

    /* Returns the bytes of workspace. */
    size_t fill(const rafter_cuda_state &device, const cross_entropy_call &call) {
        const Problem p(call);
        WorkspaceLayout layout;
        const int64_t needed = ceil_div<int64_t>(p.rows, ROW_THREADS / WARP);
        blocks = max(min(needed, int64_t(8) * device.multiprocessors), int64_t(1));
        general.fill(device, p, call, blocks, &layout);
        return layout.bytes;
    }
};

} // namespace

#endif
