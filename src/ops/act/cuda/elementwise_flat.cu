/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relu, sigmoid and silu of tensors with the same layout and alignment, without gaps: a pack of 16
 * bytes per thread.
 */
#include "ops/act/cuda/elementwise.cuh"

namespace {

/* `packs` packs from element `head` on, and `edges` single elements before and after them. 64-bit
 * parts of addresses are the same for the whole block, so that a thread adds only 32 bits. */
template <rafter_act_kind KIND, bool FORWARD, typename T>
__global__ void __launch_bounds__(THREADS)
    elementwise_flat(const ElementwiseArgs<T> args, int head, int64_t packs, int edges) {
    constexpr int N = WIDE<T>;
    const int64_t block = (int64_t)blockIdx.x * THREADS, at = head + block * N, left = packs - block;
    const int mine = threadIdx.x * N;
    if (threadIdx.x < (left < THREADS ? (unsigned)left : THREADS)) {
        const Pack<T, N> in = load_once<T, N>(args.in + at + mine);
        const Pack<T, N> dy = FORWARD ? in : load_once<T, N>(args.dy + at + mine);
        store_once(args.out + at + mine, activate<FORWARD>(KIND, in, dy));
    }
    if (blockIdx.x == 0 && threadIdx.x < edges) {
        const int64_t edge = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * N;
        const Pack<T, 1> x = load_once<T, 1>(args.in + edge), d = FORWARD ? x : load_once<T, 1>(args.dy + edge);
        store_once(args.out + edge, activate<FORWARD>(KIND, x, d));
    }
}

template <typename T, bool FORWARD> auto kernel_of(rafter_act_kind kind) {
    return kind == RAFTER_ACT_RELU      ? elementwise_flat<RAFTER_ACT_RELU, FORWARD, T>
           : kind == RAFTER_ACT_SIGMOID ? elementwise_flat<RAFTER_ACT_SIGMOID, FORWARD, T>
                                        : elementwise_flat<RAFTER_ACT_SILU, FORWARD, T>;
}

struct ElementwiseFlat {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {};

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.kind == RAFTER_ACT_NONE || is_softmax(call))
            return "kind is none or softmax";
        if (call.mask)
            return "relu_mask is given";
        if (!ElementwiseViews(call).flat())
            return "the tensors have gaps or different layouts";
        return equally_aligned(call) ? NULL : "the tensors are not equally aligned";
    }

    static size_t plan(const rafter_cuda_state &, const Call &, Plan *) {
        return 0;
    }

    /* Whether all tensors are equally far from an aligned address, so that their packs coincide. */
    static bool equally_aligned(const Call &call) {
        const uintptr_t out = reinterpret_cast<uintptr_t>(call.out.data);
        const bool dy = is_forward(call) || (reinterpret_cast<uintptr_t>(call.dy.data) - out) % 16 == 0;
        return dy && (reinterpret_cast<uintptr_t>(call.in.data) - out) % 16 == 0;
    }

    template <typename T, bool FORWARD> static void launch_packs(rafter_context *context, const Call &call) {
        const int64_t n = call.out.numel;
        /* Elements before the first aligned address. */
        const int64_t ragged = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(call.out.data) % 16 / sizeof(T));
        const int64_t head = min(ragged, n), packs = (n - head) / WIDE<T>;
        ::launch(context, {ceil_div(max(packs, int64_t(1)), int64_t(THREADS)), THREADS},
                 kernel_of<T, FORWARD>(call.kind), ElementwiseArgs<T>(call), static_cast<int>(head), packs,
                 static_cast<int>(n - packs * WIDE<T>));
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            is_forward(call) ? launch_packs<T, true>(context, call) : launch_packs<T, false>(context, call);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, elementwise_flat, ElementwiseFlat)
