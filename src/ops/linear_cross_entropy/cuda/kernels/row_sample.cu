/* SPDX-License-Identifier: Apache-2.0 */
/* Dot products of a row of x with a few vectors: an estimate of the row's softmax,
 * and the sum of its logits. See hopper_steps.cuh. */
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

/* Warps of a block, with a row each; sampled classes; warps that sample a row. */
constexpr int ROW_WARPS = 8, SAMPLES = 4, SAMPLE_WARPS = 4;

/* Statistics of every active row, estimated from SAMPLES of its logits and the label's: in a trained
 * model that is often the largest. A block per row. All rows have the same samples, whose weights stay
 * in L1, so x and the label's weights are all that is read from memory. */
template <typename T>
__global__ __launch_bounds__(SAMPLE_WARPS *WARP) void sample_rows(const __grid_constant__ Loss loss,
                                                                  const __grid_constant__ ActiveX<T> x, int64_t depth,
                                                                  const T *weight, int64_t stride, const float *bias,
                                                                  RowStats *sample) {
    constexpr int N = WIDE<T>, LOGITS = SAMPLES + 1;
    __shared__ float parts[SAMPLE_WARPS][LOGITS];
    wait_for_previous_kernel();
    const int64_t k = blockIdx.x;
    if (k >= *x.active.count)
        return;
    const int label = x.active.classes[k];
    const bool has_label = label >= 0 && label < loss.classes;
    const T *const from = x.at(k);
    const auto class_at = [&](int i) {
        return i < SAMPLES ? loss.classes * i / SAMPLES : has_label ? int64_t(label) : int64_t(0);
    };
    float sum[LOGITS] = {};
    for_elements<N>(depth, [&](int64_t at, auto n) {
        const Pack<T, n.value> own = load_l2<T, n.value>(from + at);
        Pack<T, n.value> weights[LOGITS];
#pragma unroll
        for (int i = 0; i < SAMPLES; i++)
            weights[i] = load_once<T, n.value>(weight + class_at(i) * stride + at);
        weights[SAMPLES] = load_l2<T, n.value>(weight + class_at(SAMPLES) * stride + at);
        float a[n.value];
        unpack(own, a);
#pragma unroll
        for (int i = 0; i < LOGITS; i++) {
            float b[n.value];
            unpack(weights[i], b);
#pragma unroll
            for (int j = 0; j < n.value; j++)
                sum[i] = fmaf(a[j], b[j], sum[i]);
        }
    });
#pragma unroll
    for (int i = 0; i < LOGITS; i++) {
        sum[i] = warp_sum(sum[i]);
        if (threadIdx.x % WARP == 0)
            parts[threadIdx.x / WARP][i] = sum[i];
    }
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    float logits[LOGITS], max = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < LOGITS; i++) {
        float z = bias ? bias[class_at(i)] : 0.0f;
        for (int warp = 0; warp < SAMPLE_WARPS; warp++)
            z += parts[warp][i];
        if (loss.softcap != 0.0f)
            z = capped(z, loss);
        logits[i] = i < SAMPLES || has_label ? z : -INFINITY;
        max = fmaxf(max, logits[i]);
    }
#pragma unroll
    for (int i = 0; i < SAMPLES; i++)
        total += exp_term<T>(logits[i] - pivot_at(max), loss.scale);
    const float ratio = static_cast<float>(loss.classes) / SAMPLES;
    sample[k] = {max, fmaf(total, ratio, exp_term<T>(logits[SAMPLES] - pivot_at(max), loss.scale))};
}

/* to[k] = x_k . weight_sum + the sum of w_v bias_v: the sum of w_v z_v of active row k. */
template <typename T>
__global__ __launch_bounds__(ROW_WARPS *WARP) void sum_row_logits(const __grid_constant__ ActiveX<T> x, int64_t depth,
                                                                  const float *weight_sum, const float *weighted_bias,
                                                                  float *to) {
    wait_for_previous_kernel();
    constexpr int N = WIDE<T>;
    const int lane = threadIdx.x % WARP;
    const int64_t k = blockIdx.x * int64_t(ROW_WARPS) + threadIdx.x / WARP;
    if (k >= *x.active.count)
        return;
    const T *const from = x.at(k);
    const int64_t whole = depth / N * N;
    float sum = 0.0f;
    for (int64_t at = lane * N; at < whole; at += WARP * N) {
        float own[N];
        unpack(load_once<T, N>(from + at), own);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum = fmaf(own[j], weight_sum[at + j], sum);
    }
    for (int64_t at = whole + lane; at < depth; at += WARP)
        sum = fmaf(to_float(from[at]), weight_sum[at], sum);
    sum = warp_sum(sum);
    if (lane == 0)
        to[k] = sum + (weighted_bias ? *weighted_bias : 0.0f);
}

/* *to = the sum of w_v bias_v. One block. */
__global__ __launch_bounds__(1024) void sum_weighted_bias(const __grid_constant__ Loss loss, const float *bias,
                                                          float *to) {
    wait_for_previous_kernel();
    double sum = 0.0;
    for (int64_t v = threadIdx.x; v < loss.classes; v += blockDim.x)
        sum += loss.column_weight(v) * bias[v];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *to = static_cast<float>(sum);
}

Launch warp_per_row(int64_t rows) {
    return Launch{ceil_div<int64_t>(rows, ROW_WARPS), ROW_WARPS * WARP};
}

} // namespace

void sample_statistics(const HopperRun &run, RowStats *sample) {
    const Problem &p = run.problem;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, Launch{p.rows, SAMPLE_WARPS * WARP}, sample_rows<T>, run.loss, run.active_x<T>(), p.depth,
               static_cast<const T *>(run.w.data), run.w.stride, run.bias, sample);
    });
}

void sum_logits(const HopperRun &run, const float *weight_sum, float *to) {
    const Problem &p = run.problem;
    float *const weighted_bias = run.bias ? to + p.rows : NULL;
    if (run.bias)
        launch(run.context, Launch{1, 1024}, sum_weighted_bias, run.loss, run.bias, weighted_bias);
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, warp_per_row(p.rows), sum_row_logits<T>, run.active_x<T>(), p.depth, weight_sum,
               static_cast<const float *>(weighted_bias), to);
    });
}

} // namespace lce
