/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over contiguous rows that fit in the registers of 1 to 32 lanes. Rows of the output are
 * whole, aligned packs. Rows of the inputs are too; or they are short and may begin anywhere
 * (cuda/unaligned_pack.cuh).
 *
 * Forward: y = e^(x - max) / sum of e^(x - max). Backward: dx = y (dy - sum of y dy). The maximum
 * starts from the lowest finite number, so that a row of all -inf is 0 / 0: NaN.
 */
#include <float.h>

#include "cuda/unaligned_pack.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

template <typename T> struct RowArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    const T *in_end, *dy_end; /* the end of each tensor's memory */
    Walk walk;                /* over rows */
    int64_t rows;
    int packs; /* per row */
};

/* GROUP lanes per row, PACKS packs per lane. A thread loads its packs of AT_ONCE rows before it uses
 * the first. SHIFTED: the rows of the inputs begin anywhere. */
template <typename T, int N, bool FORWARD, int GROUP, int PACKS, int AT_ONCE, bool SHIFTED>
__global__ void __launch_bounds__(THREADS) softmax_rows(const RowArgs<T> args) {
    wait_for_inputs();
    const int lane = threadIdx.x % GROUP;
    const int64_t first = (int64_t)blockIdx.x * (THREADS / GROUP * AT_ONCE) + threadIdx.x / GROUP;
    Pack<T, N> in[AT_ONCE][PACKS], dy[AT_ONCE][PACKS];
    UnalignedPack<T> shifted_in[SHIFTED ? AT_ONCE : 1][PACKS], shifted_dy[SHIFTED && !FORWARD ? AT_ONCE : 1][PACKS];
    int64_t out_at[AT_ONCE];
    bool has[AT_ONCE][PACKS];
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        const int64_t row = first + r * (THREADS / GROUP);
        int64_t at[3];
        args.walk.offsets(row, at);
        out_at[r] = at[OUT] + lane * N;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int own = (p * GROUP + lane) * N;
            has[r][p] = row < args.rows && p * GROUP + lane < args.packs;
            if constexpr (SHIFTED) {
                shifted_in[r][p].load(has[r][p], args.in + at[IN] + own, args.in, args.in_end);
                if (!FORWARD)
                    shifted_dy[r][p].load(has[r][p], args.dy + at[DY] + own, args.dy, args.dy_end);
            } else if (has[r][p]) {
                in[r][p] = load_once<T, N>(args.in + at[IN] + own);
                if (!FORWARD)
                    dy[r][p] = load_once<T, N>(args.dy + at[DY] + own);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (!has[r][p]) {
#pragma unroll
                for (int j = 0; j < N; j++)
                    in[r][p].v[j] = dy[r][p].v[j] = from_float<T>(FORWARD ? -INFINITY : 0.0f);
            } else if constexpr (SHIFTED) {
                in[r][p] = shifted_in[r][p].get(args.in, args.in_end);
                if (!FORWARD)
                    dy[r][p] = shifted_dy[r][p].get(args.dy, args.dy_end);
            }
        }
#pragma unroll
    for (int r = 0; r < AT_ONCE; r++) {
        float x[PACKS][N], d[PACKS][N], max = -FLT_MAX, sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            unpack(in[r][p], x[p]);
            if (!FORWARD)
                unpack(dy[r][p], d[p]);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (FORWARD)
                    max = fmaxf(max, x[p][j]);
                else
                    sum = fmaf(x[p][j], d[p][j], sum);
        }
        if (FORWARD) {
#pragma unroll
            for (int step = GROUP / 2; step > 0; step /= 2)
                max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum += x[p][j] = exp_as<T>(x[p][j] - max);
        }
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        const float scale = FORWARD ? 1.0f / sum : 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
#pragma unroll
            for (int j = 0; j < N; j++)
                x[p][j] = FORWARD ? x[p][j] * scale : x[p][j] * (d[p][j] - sum);
            if (has[r][p])
                store_once(args.out + out_at[r] + p * GROUP * N, packed<T, N>(x[p]));
        }
    }
}

struct RowInRegisters {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows;
        int packs; /* per row */
        bool shifted;
    };

    enum { MOST_PACKS = 128, MOST_SHIFTED_PACKS = 15 }; /* per row */

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        if (!dim_is_contiguous(call))
            return "dim is strided";
        const SoftmaxViews views(call);
        const int64_t length = views.size(views.ndim() - 1), width = 16 / rafter_dtype_bytes(call.out.dtype);
        if (!allows_wide_access(views.view[OUT], views.ndim()))
            return "rows of the output are not aligned packs of 16 bytes";
        if (!views.wide() && length > MOST_SHIFTED_PACKS * width)
            return "rows are not aligned packs of 16 bytes, and longer than 15 of them";
        return length <= MOST_PACKS * width ? NULL : "rows are longer than 128 packs of 16 bytes";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const SoftmaxViews views(call);
        const int dim = views.ndim() - 1;
        const int64_t length = views.size(dim);
        plan->walk = walk_over(views.pointer, 0, dim);
        plan->rows = views.numel() / length;
        plan->packs = static_cast<int>(length * rafter_dtype_bytes(call.out.dtype) / 16);
        plan->shifted = !views.wide();
        return 0;
    }

    template <typename T, bool FORWARD, int GROUP, int PACKS, int AT_ONCE, bool SHIFTED = false>
    static void launch_shape(rafter_context *context, const RowArgs<T> &args) {
        ::launch(context, {ceil_div(args.rows, int64_t(THREADS / GROUP * AT_ONCE)), THREADS},
                 softmax_rows<T, WIDE<T>, FORWARD, GROUP, PACKS, AT_ONCE, SHIFTED>, args);
    }

    template <typename T, bool FORWARD>
    static void launch_shifted(rafter_context *context, int packs, const RowArgs<T> &args) {
        if (packs == 1)
            return launch_shape<T, FORWARD, 1, 1, 2, true>(context, args);
        if (packs == 2)
            return launch_shape<T, FORWARD, 2, 1, 2, true>(context, args);
        if (packs <= 4)
            return launch_shape<T, FORWARD, 4, 1, 2, true>(context, args);
        if (packs <= 8)
            return launch_shape<T, FORWARD, 8, 1, 2, true>(context, args);
        return launch_shape<T, FORWARD, 8, 2, 1, true>(context, args);
    }

    /* The shapes are measured: docs/perf/act.md. */
    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const auto end = [](const rafter_view &view) {
            return view.data ? reinterpret_cast<const T *>(view.data + rafter_span_bytes(&view)) : NULL;
        };
        const RowArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                 reinterpret_cast<const T *>(call.dy.data),
                                 reinterpret_cast<T *>(call.out.data),
                                 end(call.in),
                                 end(call.dy),
                                 plan.walk,
                                 plan.rows,
                                 plan.packs};
        if (plan.shifted)
            return launch_shifted<T, FORWARD>(context, plan.packs, args);
        if (plan.packs == 1)
            return launch_shape<T, FORWARD, 1, 1, 4>(context, args);
        if (plan.packs == 2)
            return launch_shape<T, FORWARD, 2, 1, 4>(context, args);
        if (plan.packs <= 4)
            return launch_shape<T, FORWARD, 4, 1, 4>(context, args);
        if (plan.packs <= 8)
            return launch_shape < T, FORWARD, FORWARD ? 4 : 8, FORWARD ? 2 : 1, FORWARD ? 1 : 4 > (context, args);
        if (plan.packs <= 16)
            return launch_shape < T, FORWARD, FORWARD ? 8 : 16, FORWARD ? 2 : 1, 1 > (context, args);
        if (plan.packs <= 32)
            return launch_shape<T, FORWARD, 8, 4, 1>(context, args);
        if (plan.packs <= 64)
            return launch_shape<T, FORWARD, WARP, 2, 2>(context, args);
        return launch_shape<T, FORWARD, WARP, 4, 1>(context, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_row_in_registers, RowInRegisters)
