/* SPDX-License-Identifier: Apache-2.0 */
/* lrpe_cosine without a softmax over the sequence, for rows that are not aligned packs: one kernel, `staged` in
 * staged.cuh. */
#include "ops/lrpe_cosine/cuda/staged.cuh"

#include "ops/lrpe_cosine/cuda/dtheta.cuh"

namespace {

using namespace lrpe;

struct Staged {
    typedef lrpe_cosine_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Staging staging;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.x.numel == 0)
            return "x is empty";
        if (call.act == RAFTER_ACT_SOFTMAX && call.softmax_over == RAFTER_OVER_SEQUENCE)
            return "a softmax over the sequence needs the statistics of columns";
        return why_not_staged(call);
    }

    /* The workspace holds the moments of dtheta. */
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        plan->staging = plan_staged(device, call, (int)call.act);
        return call.dtheta.data ? moments_bytes(call, plan->staging.tiling.chunks()) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        Staging staging = plan.staging;
        staging.tiling.moments = reinterpret_cast<double *>(workspace);
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const auto with = [&](auto f) {
                if (call.common.direction == RAFTER_FORWARD)
                    launch_staged<T, true, f, false>(context, call, staging);
                else if (call.dtheta.data)
                    launch_staged<T, false, f == RAFTER_ACT_NONE ? RUNTIME_F : f, true>(context, call, staging);
                else
                    launch_staged<T, false, f, false>(context, call, staging);
            };
            switch (staging.tiling.f) {
            case RAFTER_ACT_NONE: return with(std::integral_constant<int, RAFTER_ACT_NONE>());
            case LANE_SOFTMAX: return with(std::integral_constant<int, LANE_SOFTMAX>());
            case BLOCK_SOFTMAX: return with(std::integral_constant<int, BLOCK_SOFTMAX>());
            default: return with(std::integral_constant<int, RUNTIME_F>());
            }
        });
        if (call.dtheta.data)
            launch_sum_moments(context, call, staging.tiling.moments, staging.tiling.chunks());
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, staged, Staged)
