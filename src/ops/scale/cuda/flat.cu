/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scale of tensors that have the same layout, without gaps. A thread takes packs of 16 bytes. Every block
 * reads the factor first, and returns at once if the call is in place and the factor is 1. The grid is no
 * larger than the GPU holds at a time, so that this takes no longer than an empty kernel, whatever the size
 * of the tensor.
 */
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/variant.cuh"
#include "cuda/view_layout.cuh"
#include "ops/scale/call.h"
#include "ops/scale/cuda/times.cuh"

namespace {

constexpr int THREADS = 256; /* per block */
constexpr int BLOCKS = 8;    /* per multiprocessor */
constexpr int PACKS = 4;     /* packs of 16 bytes that a thread has in flight */

/* x and y must have the same offset from a 16-byte boundary. */
template <typename T>
__global__ void __launch_bounds__(THREADS) scale_flat(const T *x, T *y, int64_t n, const float *factor) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    const float f = *factor;
    if (f == 1.0f && x == y)
        return;
    const AlignedSpan<T> to(y, n);
    const T *const from = x + to.head;
    const int64_t step = int64_t(gridDim.x) * THREADS, thread = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    int64_t i = thread;
    for (; i + (PACKS - 1) * step < to.packs; i += PACKS * step) {
        Pack<T, N> packs[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            packs[k] = load_once<T, N>(from + (i + k * step) * N);
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            store_once(to.body + (i + k * step) * N, times(packs[k], f));
    }
    for (; i < to.packs; i += step)
        store_once(to.body + i * N, times(load_once<T, N>(from + i * N), f));
    if (thread < to.edges) {
        const int64_t edge = to.edge(static_cast<int>(thread));
        to.body[edge] = from_float<T>(to_float(from[edge]) * f);
    }
}

struct Flat {
    typedef scale_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const bool one_row = call.y.ndim == 1;
        if (!one_row || (call.y.shape[0] > 1 && (call.x.stride[0] != 1 || call.y.stride[0] != 1)))
            return "the tensors have gaps or different layouts";
        return same_alignment(call.x, call.y) ? NULL : "x and y are not equally aligned";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const int64_t bytes = call.y.numel * rafter_dtype_bytes(call.y.dtype);
        plan->blocks = min(ceil_div(bytes, int64_t(16 * THREADS * PACKS)), int64_t(BLOCKS) * device.multiprocessors);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.y.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, {plan.blocks, THREADS}, scale_flat<T>, reinterpret_cast<const T *>(call.x.data),
                     reinterpret_cast<T *>(call.y.data), call.y.numel, static_cast<const float *>(call.factor));
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(scale, flat, Flat)
