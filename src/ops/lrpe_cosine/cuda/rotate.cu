/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine in one pass over memory: none, relu, sigmoid, silu, and the softmax over features if
 * the threads of a warp can hold a row, which they normalise among themselves.
 */
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"

namespace lrpe {

void launch_general(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling, bool dtheta) {
    const RotateForm form(call);
    for_dtype(call.x.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const auto with = [&](auto n, auto spread) {
            if (call.common.direction == RAFTER_FORWARD)
                launch_form<RUNTIME_F, false, T, n, true, spread>(context, call, tiling);
            else if (dtheta)
                launch_form<RUNTIME_F, true, T, n, false, spread>(context, call, tiling);
            else
                launch_form<RUNTIME_F, false, T, n, false, spread>(context, call, tiling);
        };
        const std::integral_constant<int, WIDE<T>> wide;
        if (form.spread)
            with(wide, std::true_type());
        else if (form.n == 1)
            with(std::integral_constant<int, 1>(), std::false_type());
        else
            launch_form<RUNTIME_F, true, T, wide, false, false>(context, call, tiling);
    });
}

} // namespace lrpe

namespace {

using namespace lrpe;

template <typename T, bool FORWARD>
void launch_for_f(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling) {
    const bool dtheta = call.dtheta.data != NULL;
    switch (tiling.f) {
    case RAFTER_ACT_NONE: return launch_rotate<RAFTER_ACT_NONE, T, FORWARD>(context, call, tiling, dtheta);
    case RAFTER_ACT_RELU: return launch_rotate<RAFTER_ACT_RELU, T, FORWARD>(context, call, tiling, dtheta);
    case RAFTER_ACT_SIGMOID: return launch_rotate<RAFTER_ACT_SIGMOID, T, FORWARD>(context, call, tiling, dtheta);
    case RAFTER_ACT_SILU: return launch_rotate<RAFTER_ACT_SILU, T, FORWARD>(context, call, tiling, dtheta);
    default: return launch_rotate<LANE_SOFTMAX, T, FORWARD>(context, call, tiling, dtheta);
    }
}

struct Rotate {
    typedef lrpe_cosine_call Call;
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
