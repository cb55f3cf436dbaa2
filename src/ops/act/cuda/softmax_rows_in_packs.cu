/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax of rows of 2 or 4 elements that follow each other without gaps, several in a pack of 16 bytes
 * (cuda/rows_in_packs.cuh). A thread takes a pack; nothing goes through shared memory. */
#include <float.h>

#include "cuda/rows_in_packs.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

/* Overwrites x (forward) or y (backward) with the result. The formulas are in softmax_row_in_registers.cu. */
template <typename T, bool FORWARD, int LENGTH> DEVICE void softmax_of_row(float *x, const float *dy) {
    float sum = 0.0f;
    if constexpr (FORWARD) {
        float max = -FLT_MAX;
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            max = fmaxf(max, x[j]);
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            sum += x[j] = exp_as<T>(x[j] - max);
        const float scale = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            x[j] *= scale;
    } else {
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            sum = fmaf(x[j], dy[j], sum);
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            x[j] *= dy[j] - sum;
    }
}

template <typename T, bool FORWARD, int LENGTH>
__global__ void __launch_bounds__(THREADS) softmax_in_packs(const T *in, const T *dy, T *out, int64_t rows) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, ROWS = N / LENGTH;
    for_packs<ROWS, 1, THREADS>(rows, [&](int, int64_t row, int present) {
        float v[N], w[N];
        const Pack<T, N> x = load_numbers<T, N>(in, row * LENGTH, present * LENGTH);
        if constexpr (!FORWARD)
            unpack(load_numbers<T, N>(dy, row * LENGTH, present * LENGTH), w);
        unpack(x, v);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            softmax_of_row<T, FORWARD, LENGTH>(v + r * LENGTH, w + r * LENGTH);
        store_numbers<T>(out, row * LENGTH, present * LENGTH, v);
    });
}

struct RowsInPacks {
    typedef act_call Call;
    struct Plan {
        int64_t length; /* of rows */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        if (!dim_is_contiguous(call))
            return "dim is strided";
        const SoftmaxViews views(call);
        const int last = views.ndim() - 1;
        const int64_t length = views.size(last);
        if ((length != 2 && length != 4) || length * rafter_dtype_bytes(call.out.dtype) > 8)
            return "rows are not 2 or 4 elements, or a pack";
        bool adjacent = last <= 1, aligned = true;
        for (int v = 0; v < views.count; v++) {
            adjacent = adjacent && (last == 0 || views.size(0) == 1 || views.used[v]->stride[0] == length);
            aligned = aligned && reinterpret_cast<uintptr_t>(views.used[v]->data) % 16 == 0;
        }
        return !adjacent ? "rows do not follow each other" : aligned ? NULL : "the tensors are not aligned";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const SoftmaxViews views(call);
        plan->length = views.size(views.ndim() - 1);
        return 0;
    }

    template <typename T, int LENGTH> static void launch_packs(rafter_context *context, const Call &call) {
        const int64_t rows = call.out.numel / LENGTH, packs = ceil_div<int64_t>(rows, WIDE<T> / LENGTH);
        ::launch(context, {ceil_div<int64_t>(packs, THREADS), THREADS},
                 is_forward(call) ? softmax_in_packs<T, true, LENGTH> : softmax_in_packs<T, false, LENGTH>,
                 reinterpret_cast<const T *>(call.in.data), reinterpret_cast<const T *>(call.dy.data),
                 reinterpret_cast<T *>(call.out.data), rows);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if constexpr (NARROW<T>)
                if (plan.length == 4)
                    return launch_packs<T, 4>(context, call);
            launch_packs<T, 2>(context, call);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_rows_in_packs, RowsInPacks)
