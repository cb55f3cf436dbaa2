/* SPDX-License-Identifier: Apache-2.0 */
/* none, relu, sigmoid and silu of tensors with any strides: see cuda/elementwise.cuh. */
#include "cuda/elementwise.cuh"
#include "ops/act/cuda/elementwise.cuh"

namespace {

/* An operation of cuda/elementwise.cuh. One input: forward, and backward of `none`. Two inputs: backward, from x (or y)
 * and dy. */
struct Activate {
    rafter_act_kind kind;

    DEVICE bool start() const {
        return true;
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        return activate<true>(kind, in[0], in[0]);
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[2]) const {
        return activate<false>(kind, in[0], in[1]);
    }
};

/* Backward if all elements of dy are one number in memory. */
template <typename T> struct ActivateOne {
    rafter_act_kind kind;
    const T *dy;

    DEVICE bool start() const {
        return true;
    }
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        Pack<T, N> same; /* loaded here, not in start(): there it would delay the first loads of `in` */
#pragma unroll
        for (int j = 0; j < N; j++)
            same.v[j] = *dy;
        return activate<false>(kind, in[0], same);
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

    /* Whether all elements of a view are the same one. */
    static bool is_one_number(const rafter_view &view) {
        bool all = true;
        for (int d = 0; d < view.ndim; d++)
            all = all && (view.stride[d] == 0 || view.shape[d] == 1);
        return all;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &, char *) {
        const bool one_input = is_forward(call) || call.kind == RAFTER_ACT_NONE;
        const ElementwiseViews views(call);
        const elementwise::Views<1> in_out = {{views.view[OUT], views.view[IN]}};
        /* Small tensors of aligned packs are faster with dy as a second input. */
        const bool small = call.out.numel * rafter_dtype_bytes(call.out.dtype) < 4 << 20;
        const bool one_number = !one_input && is_one_number(call.dy) && !(small && in_out.has_packs());
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (one_input)
                elementwise::launch_all<T>(context, in_out, Activate{call.kind}, INT32_MAX);
            else if (one_number)
                elementwise::launch_all<T>(
                    context, in_out, ActivateOne<T>{call.kind, reinterpret_cast<const T *>(call.dy.data)}, INT32_MAX);
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
