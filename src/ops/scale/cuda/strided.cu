/* SPDX-License-Identifier: Apache-2.0 */
/* scale of tensors with any strides, element by element. In place, a factor of 1 ends it at once,
 * as in flat.cu. */
#include "cuda/launch.cuh"
#include "cuda/variant.cuh"
#include "ops/scale/call.h"

namespace {

enum { X, Y }; /* the order of the walk's offsets */

constexpr int THREADS = 256; /* per block */
constexpr int BLOCKS = 8;    /* per multiprocessor, so that all blocks run at a time */

template <typename T>
__global__ void __launch_bounds__(THREADS)
    scale_strided(const T *x, T *y, const __grid_constant__ Walk walk, int64_t n, const float *factor) {
    const float f = *factor;
    if (f == 1.0f && x == y)
        return;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += int64_t(gridDim.x) * THREADS) {
        int64_t at[3];
        walk.offsets(i, at);
        y[at[Y]] = from_float<T>(to_float(x[at[X]]) * f);
    }
}

struct Strided {
    typedef scale_call Call;
    struct Plan {
        Walk walk;
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &) {
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const rafter_view *const views[3] = {&call.x, &call.y, NULL};
        plan->walk = walk_over(views, 0, call.y.ndim);
        plan->blocks = min(ceil_div(call.y.numel, int64_t(THREADS)), int64_t(BLOCKS) * device.multiprocessors);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.y.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, {plan.blocks, THREADS}, scale_strided<T>, reinterpret_cast<const T *>(call.x.data),
                     reinterpret_cast<T *>(call.y.data), plan.walk, call.y.numel,
                     static_cast<const float *>(call.factor));
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(scale, strided, Strided)
