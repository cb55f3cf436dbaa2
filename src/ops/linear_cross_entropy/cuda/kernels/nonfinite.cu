/* SPDX-License-Identifier: Apache-2.0 */
/* Finds infinities and NaN in ignored rows of x, and repairs dW: see gradient_steps.cuh. */
#include "ops/linear_cross_entropy/cuda/gradient_steps.cuh"

namespace lce {

namespace {

/* A block per row. */
template <typename T>
__global__ void find_in_ignored_rows(const __grid_constant__ Loss loss, const T *x, int64_t stride, int64_t depth,
                                     Common *common) {
    wait_for_inputs();
    const int64_t row = blockIdx.x;
    if (loss.class_of(loss.load_label(row)) != IGNORED)
        return;
    bool found = false;
    for (int64_t i = threadIdx.x; i < depth; i += blockDim.x)
        found |= !(fabsf(to_float(x[row * stride + i])) < INFINITY);
    if (found)
        common->found_nonfinite = 1;
}

/* out[classes, depth] = factor * dz^T x over the rows that are not ignored. */
template <typename T, typename U>
__global__ void redo_dweight(const __grid_constant__ Loss loss, const Common *common, const T *dz, int64_t dz_stride,
                             const T *x, int64_t x_stride, int64_t classes, int64_t depth, U *out, int64_t out_stride,
                             const float *factor) {
    wait_for_inputs();
    if (!common->found_nonfinite)
        return;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < classes * depth;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t v = i / depth, column = i - v * depth;
        float sum = 0.0f;
        for (int64_t row = 0; row < loss.rows; row++)
            if (loss.class_of(loss.load_label(row)) != IGNORED)
                sum = fmaf(to_float(dz[row * dz_stride + v]), to_float(x[row * x_stride + column]), sum);
        out[v * out_stride + column] = from_float<U>(factor ? *factor * sum : sum);
    }
}

} // namespace

void find_nonfinite(const Run &run, const Operand &x) {
    for_dtype(run.problem.dtype, [&](auto zero) {
        launch(run.context, {run.problem.rows, 128}, find_in_ignored_rows<decltype(zero)>, run.loss,
               static_cast<const decltype(zero) *>(x.data), x.stride, run.problem.depth, run.common);
    });
}

void redo_nonfinite(const Run &run, const Operand &x, const Dz &dz, const GradientOut &out) {
    const Launch how = {4 * run.context->cuda_state->multiprocessors, 256};
    const auto launch_with = [&](auto zero, auto *to) {
        typedef decltype(zero) T;
        launch(run.context, how, redo_dweight<T, std::remove_pointer_t<decltype(to)>>, run.loss,
               static_cast<const Common *>(run.common), reinterpret_cast<const T *>(dz.data), dz.stride,
               static_cast<const T *>(x.data), x.stride, dz.classes, run.problem.depth, to, out.stride, out.alpha);
    };
    for_dtype(run.problem.dtype, [&](auto zero) {
        if (out.dtype == RAFTER_F32)
            launch_with(zero, static_cast<float *>(out.data));
        else
            launch_with(zero, static_cast<decltype(zero) *>(out.data));
    });
}

} // namespace lce
