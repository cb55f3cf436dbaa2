/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine with a softmax over features, in one pass over memory (`rotate` in rotate.cuh), for rows that the
 * registers of a warp cannot hold but those of a block can.
 */
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"

namespace {

using namespace lrpe;

struct FeatureSoftmax {
    typedef lrpe_cosine_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Tiling tiling;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.x.numel == 0)
            return "x is empty";
        if (call.act != RAFTER_ACT_SOFTMAX || call.softmax_over != RAFTER_OVER_FEATURE)
            return "act is not a softmax over features";
        const RotateForm form(call);
        return form.n == 1                                   ? "features are loaded one by one"
               : call.x.shape[3] > int64_t(THREADS) * form.n ? "the threads of a block cannot hold a row"
                                                             : NULL;
    }

    /* The workspace holds the moments of dtheta. */
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        plan->tiling = plan_rotate(device, call, BLOCK_SOFTMAX);
        return call.dtheta.data ? moments_bytes(call, plan->tiling.chunks()) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        Tiling tiling = plan.tiling;
        tiling.moments = reinterpret_cast<double *>(workspace);
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const bool dtheta = call.dtheta.data != NULL;
            if (call.common.direction == RAFTER_FORWARD)
                launch_any_form<BLOCK_SOFTMAX, T, true>(context, call, tiling, false);
            else
                launch_any_form<BLOCK_SOFTMAX, T, false>(context, call, tiling, dtheta);
        });
        if (call.dtheta.data)
            launch_sum_moments(context, call, tiling.moments, tiling.chunks());
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, feature_softmax, FeatureSoftmax)
