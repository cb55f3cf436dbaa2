/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relu with a mask of one bit per element, which forward writes and backward reads instead of x. A
 * thread takes eight elements and their byte of the mask.
 */
#include "cuda/unaligned_pack.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

/* NaN counts as positive: it is passed on, and so is its gradient. */
template <typename T> DEVICE bool passes(T x) {
    return !(to_float(x) <= 0.0f);
}

/* One byte of the mask and its eight elements, of which the first `count` exist. Forward computes y
 * and the byte from x; backward computes dx from dy and the byte. at(i, in_at, out_at) sets the
 * offsets of element i. */
template <typename T, bool FORWARD, typename F>
DEVICE void relu_byte(const T *in, uint8_t *byte, T *out, int64_t count, F at) {
    unsigned bits = FORWARD ? 0 : *byte;
    for (int i = 0; i < 8 && i < count; i++) {
        int64_t in_at, out_at;
        at(i, in_at, out_at);
        const T a = in[in_at];
        if (FORWARD)
            bits |= (unsigned)passes(a) << i;
        out[out_at] = bits >> i & 1 ? a : from_float<T>(0.0f);
    }
    if (FORWARD)
        *byte = (uint8_t)bits;
}

/* Contiguous tensors. ALIGNED: both begin at multiples of 16 bytes. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) relu_contiguous(const T *in, uint8_t *mask, T *out, int64_t n) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, PARTS = 8 / N;
    const int64_t bytes = n / 8, byte = (int64_t)blockIdx.x * THREADS + threadIdx.x, at = byte * 8;
    const bool present = byte < bytes;
    unsigned bits = FORWARD || !present ? 0 : __ldcs(mask + byte);
    Pack<T, N> a[PARTS];
    if constexpr (ALIGNED) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            if (present)
                a[p] = load_once<T, N>(in + at + p * N);
    } else {
        UnalignedPack<T> loaded[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            loaded[p].load(present, in + at + p * N, in, in + n);
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            if (present)
                a[p] = loaded[p].get(in, in + n);
    }
#pragma unroll
    for (int bit = 0; bit < 8; bit++) {
        T &element = a[bit / N].v[bit % N];
        if (FORWARD)
            bits |= (unsigned)passes(element) << bit;
        element = bits >> bit & 1 ? element : from_float<T>(0.0f);
    }
    if (present && FORWARD)
        __stcs(mask + byte, (uint8_t)bits);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        T *const to = out + at + p * N;
        if (!ALIGNED)
            store_shifted(to, a[p], present, static_cast<int>(threadIdx.x) * PARTS + p);
        else if (present)
            store_once(to, a[p]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && bytes * 8 < n)
        relu_byte<T, FORWARD>(in, mask + bytes, out, n - bytes * 8,
                              [&](int i, int64_t &in_at, int64_t &out_at) { in_at = out_at = bytes * 8 + i; });
}

/* Tensors with any strides. */
template <typename T, bool FORWARD>
__global__ void __launch_bounds__(THREADS)
    relu_strided(const T *in, uint8_t *mask, T *out, const Walk walk, int64_t n) {
    wait_for_inputs();
    const int64_t byte = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (byte * 8 < n)
        relu_byte<T, FORWARD>(in, mask + byte, out, n - byte * 8, [&](int i, int64_t &in_at, int64_t &out_at) {
            int64_t at[3];
            walk.offsets(byte * 8 + i, at);
            in_at = at[IN];
            out_at = at[OUT];
        });
}

struct ReluMask {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        bool contiguous, aligned; /* aligned: both tensors begin at multiples of 16 bytes */
        Walk walk;                /* over elements, if not contiguous */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return call.mask ? NULL : "no relu_mask is given";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        rafter_view in = is_forward(call) ? call.in : call.dy, out = call.out;
        rafter_view *const views[] = {&in, &out};
        const int dims = rafter_collapse(views, 2, 0, out.ndim); /* stays in row-major order, like the bits */
        plan->contiguous = dims == 1 && in.stride[0] == 1 && out.stride[0] == 1;
        plan->aligned = (reinterpret_cast<uintptr_t>(in.data) | reinterpret_cast<uintptr_t>(out.data)) % 16 == 0;
        const rafter_view *const walked[TENSORS] = {&in, NULL, &out};
        if (!plan->contiguous)
            plan->walk = walk_over(walked, 0, dims);
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const T *const in = reinterpret_cast<const T *>(FORWARD ? call.in.data : call.dy.data);
        T *const out = reinterpret_cast<T *>(call.out.data);
        const int64_t n = call.out.numel, blocks = ceil_div(n, int64_t(8) * THREADS);
        if (plan.contiguous)
            ::launch(context, {blocks, THREADS},
                     plan.aligned ? relu_contiguous<T, FORWARD, true> : relu_contiguous<T, FORWARD, false>, in,
                     call.mask, out, n);
        else
            ::launch(context, {blocks, THREADS}, relu_strided<T, FORWARD>, in, call.mask, out, plan.walk, n);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, relu_mask, ReluMask)
