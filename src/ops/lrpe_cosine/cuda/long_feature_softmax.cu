/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine with a softmax over features, for rows of any length: a first kernel computes the statistics of
 * rows, and `rotate` (rotate.cuh) uses them.
 */
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"

namespace {

using namespace lrpe;

/* Writes the statistics of rows, a warp per row. `statistics`: [B, N, H, 2 or 3] numbers: the maximum, 1 / sum, and in
 * backward the sum of p g, where p is the softmax and g its gradient. */
template <typename T, int N, bool FORWARD>
__global__ void __launch_bounds__(THREADS) row_statistics(const Arguments<T> a, float *statistics) {
    wait_for_inputs();
    const int lane = threadIdx.x % WARP;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= a.batch * a.length * a.heads)
        return;
    const int64_t h = row % a.heads, n = row / a.heads % a.length, b = row / a.heads / a.length;
    const T *const x_row = a.x + b * a.x_stride.b + n * a.x_stride.n + h * a.x_stride.h;
    Statistics<1, true, 1> mine;
    mine.clear();
    for (int64_t d = lane * N; d < a.features; d += WARP * N) {
        const Pack<T, N> pack = load_l2<T, N>(x_row + d * a.x_stride.d);
        float x[N];
        unpack(pack, x);
        cover<false, 1>(mine, 0, pack);
#pragma unroll
        for (int j = 0; j < N; j++)
            mine.sum[0][0] += exp2_fast((x[j] - mine.max[0]) * LOG2E);
    }
    mine.rebase(0, warp_max(mine.max[0]));
    const float max = mine.max[0], scale = 1.0f / warp_sum(mine.sum[0][0]);
    float dot = 0.0f;
    if constexpr (!FORWARD) {
        const Position position = position_of(a.position(b, n));
        const T *const dy_row = a.dy + b * a.y_stride.b + n * a.y_stride.n + h * a.y_stride.h;
        for (int64_t d = lane * N; d < a.features; d += WARP * N) {
            float x[N], c[N], s[N];
            unpack(load_l2<T, N>(x_row + d * a.x_stride.d), x);
            unpack(load_l2<T, N>(dy_row + d * a.y_stride.d), c);
            unpack(load_l2<T, N>(dy_row + (d + a.features) * a.y_stride.d), s);
            for (int j = 0; j < N; j++) {
                float sine, cosine;
                sincos_at<true>(angle_step(a.theta_at(h, d + j)), position, &sine, &cosine);
                dot = fmaf(exp_as<T>(x[j] - max), fmaf(c[j], cosine, s[j] * sine), dot);
            }
        }
        dot = warp_sum(dot) * scale;
    }
    if (lane == 0) {
        float *const out = statistics + row * (FORWARD ? 2 : 3);
        out[0] = max;
        out[1] = scale;
        if (!FORWARD)
            out[2] = dot;
    }
}

struct LongFeatureSoftmax {
    typedef lrpe_cosine_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        int width; /* elements per pack */
        Tiling tiling;
        int64_t rows;
        size_t statistics_at; /* bytes into the workspace, after dtheta's moments */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.x.numel == 0)
            return "x is empty";
        return call.act == RAFTER_ACT_SOFTMAX && call.softmax_over == RAFTER_OVER_FEATURE
                   ? NULL
                   : "act is not a softmax over features";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        plan->width = pack_width(call);
        plan->tiling = plan_rotate(device, call, ROW_STATISTICS);
        plan->rows = rafter_extent(&call.x, 0, 3);
        plan->statistics_at = call.dtheta.data ? moments_bytes(call, plan->tiling.chunks()) : 0;
        const int64_t numbers = call.common.direction == RAFTER_FORWARD ? 2 : 3;
        return plan->statistics_at + (size_t)(plan->rows * numbers) * sizeof(float);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        Tiling tiling = plan.tiling;
        tiling.moments = reinterpret_cast<double *>(workspace);
        tiling.statistics = reinterpret_cast<float *>(workspace + plan.statistics_at);
        for_types(call, plan.width, [&](auto zero, auto n, auto forward) {
            typedef decltype(zero) T;
            ::launch(context, {ceil_div(plan.rows, (int64_t)(THREADS / WARP)), THREADS}, row_statistics<T, n, forward>,
                     arguments<T>(call), tiling.statistics);
            launch_any_form<ROW_STATISTICS, T, forward>(context, call, tiling, call.dtheta.data != NULL);
        });
        if (call.dtheta.data)
            launch_sum_moments(context, call, tiling.moments, tiling.chunks());
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, long_feature_softmax, LongFeatureSoftmax)
