/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relu (without a mask), sigmoid and silu of tensors with the same layout, without gaps. A thread takes one pack of 16
 * bytes that is aligned in the output. The other tensors must have the same offset from a multiple of 16 bytes; only a
 * 16-bit x (in the backward of relu and sigmoid: y) may begin anywhere.
 */
#include "cuda/unaligned_pack.cuh"
#include "ops/act/cuda/elementwise.cuh"

namespace {

/* `packs` packs from element `head` on, and `edges` single elements before and after them. The
 * 64-bit parts of addresses are the same for the whole block, so that a thread adds only 32 bits.
 * SHIFTED: packs of the input begin `shift` bytes after an aligned address. The two aligned packs that each of them
 * overlaps lie inside the tensor. */
template <rafter_act_kind KIND, bool FORWARD, bool SHIFTED, typename T>
__global__ void __launch_bounds__(THREADS)
    elementwise_flat(const ElementwiseArgs<T> args, int head, int64_t packs, int edges, int shift) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    const int64_t block = (int64_t)blockIdx.x * THREADS, at = head + block * N, left = packs - block;
    const int mine = threadIdx.x * N;
    if (threadIdx.x < (left < THREADS ? (unsigned)left : THREADS)) {
        Pack<T, N> in, dy;
        [[maybe_unused]] uint4 low, high;
        if constexpr (SHIFTED) {
            const char *const aligned = reinterpret_cast<const char *>(args.in + at + mine) - shift;
            low = load_now_if(true, aligned);
            high = load_now_if(true, aligned + 16);
        } else {
            in = load_once<T, N>(args.in + at + mine);
        }
        if constexpr (!FORWARD)
            dy = load_once<T, N>(args.dy + at + mine);
        if constexpr (SHIFTED)
            reinterpret_cast<uint4 &>(in) = shifted(low, high, shift);
        if constexpr (FORWARD)
            dy = in;
        store_once(args.out + at + mine, activate<FORWARD>(KIND, in, dy));
    }
    if (blockIdx.x == 0 && threadIdx.x < edges) {
        const int64_t edge = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * N;
        const Pack<T, 1> x = load_once<T, 1>(args.in + edge), d = FORWARD ? x : load_once<T, 1>(args.dy + edge);
        store_once(args.out + edge, activate<FORWARD>(KIND, x, d));
    }
}

template <typename T, bool FORWARD, bool SHIFTED> auto kernel_of(rafter_act_kind kind) {
    return kind == RAFTER_ACT_RELU      ? elementwise_flat<RAFTER_ACT_RELU, FORWARD, SHIFTED, T>
           : kind == RAFTER_ACT_SIGMOID ? elementwise_flat<RAFTER_ACT_SIGMOID, FORWARD, SHIFTED, T>
                                        : elementwise_flat<RAFTER_ACT_SILU, FORWARD, SHIFTED, T>;
}

/* Bytes from the last multiple of 16 to `p`. */
int past_aligned(const void *p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
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
        if (!is_forward(call) && past_aligned(call.dy.data) != past_aligned(call.out.data))
            return "dy and dx are not equally aligned";
        return is_shifted(call) && rafter_dtype_bytes(call.out.dtype) > 2 ? "the tensors are not equally aligned"
                                                                          : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &, Plan *) {
        return 0;
    }

    /* Whether input and output have different offsets from a multiple of 16 bytes. */
    static bool is_shifted(const Call &call) {
        return past_aligned(call.in.data) != past_aligned(call.out.data);
    }

    template <typename T, bool FORWARD, bool SHIFTED>
    static void launch_packs(rafter_context *context, const Call &call) {
        const int64_t n = call.out.numel;
        const T *const in = reinterpret_cast<const T *>(call.in.data);
        /* Elements before the first aligned address. */
        int64_t head = (16 - past_aligned(call.out.data)) % 16 / static_cast<int>(sizeof(T));
        int shift = 0;
        if (SHIFTED) { /* the aligned pack in which the first pack begins must not begin before the tensor */
            shift = past_aligned(in + head);
            head += head * static_cast<int>(sizeof(T)) < shift ? WIDE<T> : 0;
        }
        head = min(head, n);
        const int64_t packs = max((n - head - (SHIFTED ? WIDE<T> : 0)) / WIDE<T>, int64_t(0));
        ::launch(context, {ceil_div(max(packs, int64_t(1)), int64_t(THREADS)), THREADS},
                 kernel_of<T, FORWARD, SHIFTED>(call.kind), ElementwiseArgs<T>(call), static_cast<int>(head), packs,
                 static_cast<int>(n - packs * WIDE<T>), shift);
    }

    template <typename T, bool FORWARD> static void launch_as(rafter_context *context, const Call &call) {
        if constexpr (NARROW<T>)
            if (is_shifted(call))
                return launch_packs<T, FORWARD, true>(context, call);
        launch_packs<T, FORWARD, false>(context, call);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &, char *) {
        for_dtype_and_direction(
            call, [&](auto zero, auto forward) { launch_as<decltype(zero), decltype(forward)::value>(context, call); });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, elementwise_flat, ElementwiseFlat)
