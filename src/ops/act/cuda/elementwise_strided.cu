/* SPDX-License-Identifier: Apache-2.0 */
/*
 * none, relu, sigmoid and silu of tensors with any strides: a pack of 16 bytes per thread if all
 * tensors have aligned packs along their last dimension, else an element per thread.
 */
#include "ops/act/cuda/elementwise.cuh"

namespace {

/* An item is N adjacent elements. */
template <bool FORWARD, int N, typename T>
__global__ void __launch_bounds__(THREADS)
    elementwise_strided(const ElementwiseArgs<T> args, const Walk walk, int64_t items) {
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (item >= items)
        return;
    int64_t at[3];
    walk.offsets(item, at);
    const Pack<T, N> in = load_once<T, N>(args.in + at[IN]);
    const Pack<T, N> dy = FORWARD ? in : load_once<T, N>(args.dy + at[DY]);
    store_once(args.out + at[OUT], activate<FORWARD>(args.kind, in, dy));
}

struct ElementwiseStrided {
    typedef act_call Call;
    struct Plan {
        Walk walk; /* over items */
        int64_t items;
        bool wide;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return is_softmax(call) ? "kind is softmax" : call.mask ? "relu_mask is given" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        ElementwiseViews views(call);
        plan->wide = views.wide();
        plan->items = call.out.numel;
        if (plan->wide) {
            const int last = views.ndim() - 1;
            const int64_t width = 16 / rafter_dtype_bytes(call.out.dtype);
            plan->items /= width;
            for (int v = 0; v < views.count; v++) { /* count the last dimension in packs */
                views.used[v]->shape[last] /= width;
                views.used[v]->stride[last] = width;
            }
        }
        plan->walk = walk_over(views.pointer, 0, views.ndim());
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const bool forward = is_forward(call);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            constexpr int N = WIDE<T>;
            const auto kernel = plan.wide ? forward ? elementwise_strided<true, N, T> : elementwise_strided<false, N, T>
                                : forward ? elementwise_strided<true, 1, T>
                                          : elementwise_strided<false, 1, T>;
            ::launch(context, {ceil_div(plan.items, int64_t(THREADS)), THREADS}, kernel, ElementwiseArgs<T>(call),
                     plan.walk, plan.items);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, elementwise_strided, ElementwiseStrided)
