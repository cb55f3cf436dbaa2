/* SPDX-License-Identifier: Apache-2.0 */
/* Units of rows: see row_units.cuh. */
#include "ops/linear_cross_entropy/cuda/row_units.cuh"

#include "cuda/launch.cuh"

namespace lce {

namespace {

constexpr int UNIT_THREADS = 256, LARGEST_THREADS = 1024;

/* A thread per row. */
__global__ __launch_bounds__(UNIT_THREADS) void find_units(const __grid_constant__ Loss loss, const int *order,
                                                           float *units) {
    wait_for_inputs();
    const int64_t k = blockIdx.x * int64_t(UNIT_THREADS) + threadIdx.x;
    if (k >= loss.rows)
        return;
    const int64_t row = order ? order[k] : k;
    units[k] = static_cast<float>(row_unit(loss, row, loss.class_of(loss.load_label(row))));
}

/* One block: the largest unit, and dW's alpha. Ignored rows do not count: their unit is 1, which might be the
 * largest, but their dz is 0. */
__global__ __launch_bounds__(LARGEST_THREADS) void find_largest(const __grid_constant__ Loss loss, const int *order,
                                                                float *units, const float *alpha) {
    wait_for_inputs();
    __shared__ float warp_largest[WARP];
    float largest = 0.0f;
    for (int64_t k = threadIdx.x; k < loss.rows; k += LARGEST_THREADS)
        if (loss.class_of(loss.load_label(order ? order[k] : k)) >= 0)
            largest = fmaxf(largest, units[k]);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0)
        warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    largest = warp_max(warp_largest[threadIdx.x % WARP]);
    if (threadIdx.x > 0)
        return;
    units[loss.rows] = largest > 0.0f ? largest : 1.0f;
    units[loss.rows + 1] = units[loss.rows] * *alpha;
}

/* Scales x for dW: a block per row. */
__global__ __launch_bounds__(UNIT_THREADS) void scale_x(const __grid_constant__ ActiveX<fp16> x, int64_t columns,
                                                        const float *units, fp16 *to, int64_t stride) {
    wait_for_inputs();
    const int64_t k = blockIdx.x;
    const bool listed = x.active.order;
    if (listed && k >= *x.active.count)
        return;
    const fp16 *const from = listed ? x.at(k) : x.x + k * x.stride;
    to += (listed ? x.active.copied_at(k) : k) * stride;
    const float factor = fminf(units[k] / units[x.active.all], 1.0f);
    for (int64_t i = threadIdx.x; i < columns; i += UNIT_THREADS)
        to[i] = from_float<fp16>(factor * to_float(from[i]));
}

/* Multiplies sums by the units: a block per row. */
__global__ __launch_bounds__(UNIT_THREADS) void multiply_sums(const float *units, const int *count, int64_t columns,
                                                              float *sums, int64_t stride) {
    wait_for_inputs();
    if (count && blockIdx.x >= static_cast<unsigned>(*count))
        return;
    const float factor = units[blockIdx.x];
    sums += blockIdx.x * stride;
    for (int64_t i = threadIdx.x; i < columns; i += UNIT_THREADS)
        sums[i] *= factor;
}

} // namespace

void RowUnits::place(Layout *layout, const Problem &p) {
    layout->place(&units, has_row_units(p), (p.rows + 2) * int64_t(sizeof(float)));
    layout->place(&x, has_row_units(p) && p.dweight, p.rows * p.depth_stride() * p.bytes());
}

void find_row_units(Run *run, const RowUnits &buffers, const ActiveX<fp16> &x, char *workspace) {
    const Problem &p = run->problem;
    float *const units = buffers.units.in(workspace);
    run->row_units = units;
    launch(run->context, {ceil_div<int64_t>(p.rows, UNIT_THREADS), UNIT_THREADS}, find_units, run->loss, x.active.order,
           units);
    if (!p.dweight)
        return;
    launch(run->context, {1, LARGEST_THREADS}, find_largest, run->loss, x.active.order, units, run->alpha());
    launch(run->context, {p.rows, UNIT_THREADS}, scale_x, x, p.depth, static_cast<const float *>(units),
           reinterpret_cast<fp16 *>(buffers.x.in(workspace)), p.depth_stride());
}

void multiply_by_units(const Run &run, const int *count, float *sums) {
    launch(run.context, {run.problem.rows, UNIT_THREADS}, multiply_sums, run.row_units, count, run.problem.depth, sums,
           run.problem.depth_stride());
}

} // namespace lce
