/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine in one pass over memory (`rotate` in rotate.cuh), for f = none, relu, sigmoid and silu, and for the
 * softmax over features if the lanes of a warp can hold a row: they normalise it among themselves.
 */
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"

namespace {

using namespace lrpe;

/* Aligned packs without dtheta have a kernel for each f; kernels of other forms read f at run time. */
template <typename T, bool FORWARD>
void launch_for_f(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling) {
    if (call.dtheta.data || !takes_packs(call, true))
        return launch_any_form<RUNTIME_F, T, FORWARD>(context, call, tiling, call.dtheta.data != NULL);
    const auto with = [&](auto f) { launch_form<f, false, T, WIDE<T>, FORWARD, false>(context, call, tiling); };
    switch (tiling.f) {
    case RAFTER_ACT_NONE: return with(std::integral_constant<int, RAFTER_ACT_NONE>());
    case RAFTER_ACT_RELU: return with(std::integral_constant<int, RAFTER_ACT_RELU>());
    case RAFTER_ACT_SIGMOID: return with(std::integral_constant<int, RAFTER_ACT_SIGMOID>());
    case RAFTER_ACT_SILU: return with(std::integral_constant<int, RAFTER_ACT_SILU>());
    default: return with(std::integral_constant<int, LANE_SOFTMAX>());
    }
}

struct Rotate {
    typedef lrpe_cosine_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Tiling tiling;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.act != RAFTER_ACT_SOFTMAX || call.x.numel == 0)
            return NULL;
        if (call.softmax_over == RAFTER_OVER_SEQUENCE)
            return "a softmax over the sequence needs the statistics of columns";
        return call.x.shape[3] <= WARP * RotateForm(call).n ? NULL : "the threads of a warp cannot hold a row";
    }

    /* The workspace holds the moments of dtheta. An empty x has none, and takes no blocks. */
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        *plan = {};
        if (call.x.numel == 0)
            return 0;
        plan->tiling = plan_rotate(device, call, (int)call.act);
        return call.dtheta.data ? moments_bytes(call, plan->tiling.chunks()) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        Tiling tiling = plan.tiling;
        tiling.moments = reinterpret_cast<double *>(workspace);
        if (call.x.numel > 0)
            for_dtype(call.x.dtype, [&](auto zero) {
                typedef decltype(zero) T;
                if (call.common.direction == RAFTER_FORWARD)
                    launch_for_f<T, true>(context, call, tiling);
                else
                    launch_for_f<T, false>(context, call, tiling);
            });
        if (call.dtheta.data)
            launch_sum_moments(context, call, tiling.moments, tiling.chunks());
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, rotate, Rotate)
