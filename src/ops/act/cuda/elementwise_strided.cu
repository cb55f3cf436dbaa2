/* SPDX-License-Identifier: Apache-2.0 */
/* none, relu, sigmoid and silu of tensors with any strides: see cuda/elementwise.cuh. */
#include "cuda/elementwise.cuh"
#include "ops/act/cuda/elementwise.cuh"

namespace {

/* Forward, and backward of `none`: INPUTS is 1. */
struct Activate {
    rafter_act_kind kind;

    DEVICE bool done() const {
        return false;
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        return activate<true>(kind, in[0], in[0]);
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[2]) const {
        return activate<false>(kind, in[0], in[1]);
    }
};

struct ElementwiseStrided {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {};

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return is_softmax(call) ? "kind is softmax" : call.mask ? "relu_mask is given" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &, Plan *) {
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &, char *) {
        const ElementwiseViews views(call);
        const bool one_input = is_forward(call) || call.kind == RAFTER_ACT_NONE;
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (one_input)
                elementwise::launch_all<T>(context, elementwise::Views<1>{{views.view[OUT], views.view[IN]}},
                                           Activate{call.kind}, INT32_MAX);
            else
                elementwise::launch_all<T>(context,
                                           elementwise::Views<2>{{views.view[OUT], views.view[IN], views.view[DY]}},
                                           Activate{call.kind}, INT32_MAX);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, elementwise_strided, ElementwiseStrided)
