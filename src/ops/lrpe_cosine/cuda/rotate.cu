/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine in one pass over memory: none, relu, sigmoid, silu, and the softmax over features if
 * a row is at most 32 packs, which the lanes of a warp normalise among themselves.
 */
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"

namespace {

/* The kernel for f. Forms that are not worth a kernel per f test it while they run: dtheta, and
 * tensors without 16-byte accesses. */
template <typename T, int N, bool FORWARD>
void launch_for_f(const rafter_context *context, const Arguments<T> &a, const Tiling &tiling, bool dtheta) {
    if constexpr (!FORWARD)
        if (dtheta)
            return launch_rotate<RUNTIME_F, true, T, N, false>(context, a, tiling);
    if constexpr (N == 1)
        return launch_rotate<RUNTIME_F, false, T, N, FORWARD>(context, a, tiling);
    else
        switch (tiling.f) {
        case RAFTER_ACT_NONE: return launch_rotate<RAFTER_ACT_NONE, false, T, N, FORWARD>(context, a, tiling);
        case RAFTER_ACT_RELU: return launch_rotate<RAFTER_ACT_RELU, false, T, N, FORWARD>(context, a, tiling);
        case RAFTER_ACT_SIGMOID: return launch_rotate<RAFTER_ACT_SIGMOID, false, T, N, FORWARD>(context, a, tiling);
        case RAFTER_ACT_SILU: return launch_rotate<RAFTER_ACT_SILU, false, T, N, FORWARD>(context, a, tiling);
        default: return launch_rotate<LANE_SOFTMAX, false, T, N, FORWARD>(context, a, tiling);
        }
}

struct Rotate {
    typedef lrpe_cosine_call Call;
    struct Plan {
        int width; /* elements per pack */
        Tiling tiling;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.act != RAFTER_ACT_SOFTMAX || call.x.numel == 0)
            return NULL;
        if (call.softmax_over == RAFTER_OVER_SEQUENCE)
            return "a softmax over the sequence needs the statistics of columns";
        return call.x.shape[3] / pack_width(call) <= WARP ? NULL : "rows are longer than 32 packs";
    }

    /* The workspace holds the moments of dtheta. An empty x has none, and takes no blocks. */
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        *plan = {};
        if (call.x.numel == 0)
            return 0;
        plan->width = pack_width(call);
        plan->tiling = plan_rotate(device, call, plan->width, (int)call.act);
        return call.dtheta.data ? moments_bytes(call, plan->tiling.chunks()) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const bool dtheta = call.dtheta.data != NULL;
        Tiling tiling = plan.tiling;
        tiling.moments = reinterpret_cast<double *>(workspace);
        if (call.x.numel > 0)
            for_types(call, plan.width, [&](auto zero, auto n, auto forward) {
                typedef decltype(zero) T;
                launch_for_f<T, n, forward>(context, arguments<T>(call), tiling, dtheta);
            });
        if (dtheta)
            launch_sum_moments(context, call, tiling.moments, tiling.chunks());
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, rotate, Rotate)
