/* SPDX-License-Identifier: Apache-2.0 */
/* scale of tensors with any strides (cuda/elementwise.cuh). As in flat.cu, a call in place with a factor of 1 returns
 * at once. */
#include "cuda/elementwise.cuh"
#include "cuda/variant.cuh"
#include "ops/scale/call.h"
#include "ops/scale/cuda/times.cuh"

namespace {

constexpr int BLOCKS = 16; /* per multiprocessor, so that all blocks run at a time */

struct Multiply {
    const float *factor;
    bool in_place;
    float value; /* of *factor */

    DEVICE bool start() {
        value = *factor;
        return !in_place || value != 1.0f;
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        return times(in[0], value);
    }
};

struct Strided {
    typedef scale_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &) {
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        plan->blocks = call.in_place ? int64_t(BLOCKS) * device.multiprocessors : INT32_MAX;
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.y.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            elementwise::launch_all<T>(context, elementwise::Views<1>{{call.y, call.x}},
                                       Multiply{static_cast<const float *>(call.factor), call.in_place, 0.0f},
                                       plan.blocks);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(scale, strided, Strided)
