/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of contiguous rows, each in the registers of a warp or of a block. Every byte is read once
 * and written once.
 *
 * Rows may begin anywhere, if all tensors of the call are equally misaligned: the few elements of a
 * row before its first aligned pack and after its last one are taken by one thread each. Every
 * element is read and written by the same thread, so that the output may be the input.
 */
#include <float.h>

#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

template <bool FORWARD> constexpr int PACKS = FORWARD ? 4 : 2; /* per thread and input */
constexpr int BLOCK_THREADS = 512;                             /* most threads of a block */
constexpr int WARP_ROWS = 4;                                   /* rows per block, with a warp per row */

enum Scope { IN_WARP, IN_BLOCK };

template <typename T> struct RowArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    Walk walk;
    int64_t rows;
    int length;
};

/* Keeps the compiler from holding the unpacked elements in registers until they are needed again:
 * that would take three times as many. */
template <typename T> DEVICE void keep_packed(Pack<T, WIDE<T>> &pack) {
    uint4 &word = reinterpret_cast<uint4 &>(pack);
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}

/* Statistics of a part of a row. Forward: the maximum and the sum of e^(x - max). Backward: the sum
 * of y dy; max is not used. The maximum starts from the lowest finite number: a row of all -inf has
 * sum 0, and its softmax is 0 / 0 = NaN, as in PyTorch. */
struct Part {
    float max, sum;
};

template <bool FORWARD> DEVICE Part merge_warp(Part p) {
    if (FORWARD) {
        const float max = warp_max(p.max);
        p = {max, p.sum * expf(p.max - max)};
    }
    return {p.max, warp_sum(p.sum)};
}

/* Over the block; every thread gets the result. `parts`: shared, one per warp. */
template <bool FORWARD> DEVICE Part merge_block(Part p, Part (&parts)[BLOCK_THREADS / WARP]) {
    const int lane = threadIdx.x % WARP;
    p = merge_warp<FORWARD>(p);
    if (lane == 0)
        parts[threadIdx.x / WARP] = p;
    __syncthreads();
    return merge_warp<FORWARD>(lane < blockDim.x / WARP ? parts[lane] : Part{-FLT_MAX, 0.0f});
}

template <typename T, bool FORWARD, bool ALIGNED, Scope SCOPE>
__global__ void __launch_bounds__(SCOPE == IN_WARP ? WARP * WARP_ROWS : BLOCK_THREADS)
    softmax_row(const __grid_constant__ RowArgs<T> a) {
    constexpr int N = WIDE<T>, COUNT = PACKS<FORWARD>;
    __shared__ Part warp_parts[BLOCK_THREADS / WARP];
    const int64_t row = SCOPE == IN_WARP ? int64_t(blockIdx.x) * WARP_ROWS + threadIdx.x / WARP : blockIdx.x;
    if (SCOPE == IN_WARP && row >= a.rows)
        return;
    const int threads = SCOPE == IN_WARP ? WARP : blockDim.x,
              first = SCOPE == IN_WARP ? threadIdx.x % WARP : threadIdx.x;

    int64_t at[3];
    a.walk.offsets(row, at);
    const AlignedSpan<const T> in(a.in + at[IN], a.length);
    const T *const dy = FORWARD ? in.body : a.dy + at[DY] + in.head;
    T *const out = a.out + at[OUT] + in.head;
    const auto has = [&](int k) { return first + k * threads < in.packs; };
    const bool has_edge = !ALIGNED && first < in.edges;
    const int64_t edge = has_edge ? in.edge(first) : 0;

    Pack<T, N> x[COUNT], d[FORWARD ? 1 : COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        x[k] = load_once_if<T, N>(has(k), in.body + (first + k * threads) * N, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            d[k] = load_once_if<T, N>(has(k), dy + (first + k * threads) * N, 0.0f);
    }
    const float x_edge = has_edge ? to_float(in.body[edge]) : FORWARD ? -INFINITY : 0.0f;
    const float d_edge = !FORWARD && has_edge ? to_float(dy[edge]) : 0.0f;

    Part part = {-FLT_MAX, 0.0f};
    if constexpr (FORWARD) {
        part.max = fmaxf(part.max, x_edge);
        Pack<T, N> top = x[0];
#pragma unroll
        for (int k = 1; k < COUNT; k++)
            top = max_of(top, x[k]);
        float tops[N];
        unpack(top, tops);
#pragma unroll
        for (int j = 0; j < N; j++)
            part.max = fmaxf(part.max, tops[j]);
    }
    if constexpr (!ALIGNED)
        part.sum = FORWARD ? exp_as<T>(x_edge - part.max) : x_edge * d_edge;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N];
        unpack(x[k], v);
        if constexpr (!FORWARD)
            unpack(d[k], w);
#pragma unroll
        for (int j = 0; j < N; j++)
            part.sum = FORWARD ? part.sum + exp_as<T>(v[j] - part.max) : fmaf(v[j], w[j], part.sum);
    }
    part = SCOPE == IN_WARP ? merge_warp<FORWARD>(part) : merge_block<FORWARD>(part, warp_parts);

    const float scale = 1.0f / part.sum;
    const auto result = [&](float value, float upstream) {
        return FORWARD ? exp_as<T>(value - part.max) * scale : value * (upstream - part.sum);
    };
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N];
        keep_packed(x[k]);
        unpack(x[k], v);
        if constexpr (!FORWARD) {
            keep_packed(d[k]);
            unpack(d[k], w);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = result(v[j], FORWARD ? 0.0f : w[j]);
        if (has(k))
            store_once(out + (first + k * threads) * N, packed<T, N>(v));
    }
    if (has_edge)
        out[edge] = from_float<T>(result(x_edge, d_edge));
}

struct RowOnChip {
    typedef act_call Call;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows;
        int length, threads; /* per row; per block */
        bool aligned;
    };

    static int packs_per_thread(const Call &call) {
        return is_forward(call) ? PACKS<true> : PACKS<false>;
    }
    static int64_t packs_of(const SoftmaxViews &views) {
        return views.size(views.ndim() - 1) * rafter_dtype_bytes(views.view[OUT].dtype) / 16;
    }
    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        if (!dim_is_contiguous(call))
            return "dim is strided";
        const SoftmaxViews views(call);
        const bool aligned = views.wide();
        for (int v = 0; v < views.count; v++)
            if (!aligned && !same_alignment(*views.used[v], views.view[OUT]))
                return "rows of the tensors are aligned differently";
        const int64_t packs = packs_of(views);
        if (aligned && packs <= 128)
            return "rows of up to 128 aligned packs of 16 bytes fit into a few lanes";
        if (!aligned && views.size(views.ndim() - 1) <= 512)
            return "rows of up to 512 elements are too short for a warp";
        if (packs > BLOCK_THREADS * packs_per_thread(call))
            return "rows do not fit into the registers of a block";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const SoftmaxViews views(call);
        const int dim = views.ndim() - 1;
        plan->walk = walk_over(views.pointer, 0, dim);
        plan->length = static_cast<int>(views.size(dim));
        plan->rows = views.numel() / plan->length;
        plan->aligned = views.wide();
        const int64_t packs = packs_of(views);
        const int each = packs_per_thread(call);
        const int64_t threads = ceil_div<int64_t>(packs, each);
        plan->threads = static_cast<int>(max(round_up<int64_t>(threads, WARP), int64_t(WARP)));
        return 0;
    }

    template <typename T, bool FORWARD, bool ALIGNED>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const RowArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                 reinterpret_cast<const T *>(call.dy.data),
                                 reinterpret_cast<T *>(call.out.data),
                                 plan.walk,
                                 plan.rows,
                                 plan.length};
        if (plan.threads == WARP) {
            ::launch(context, {ceil_div<int64_t>(plan.rows, WARP_ROWS), WARP * WARP_ROWS},
                     softmax_row<T, FORWARD, ALIGNED, IN_WARP>, args);
        } else {
            ::launch(context, {plan.rows, plan.threads}, softmax_row<T, FORWARD, ALIGNED, IN_BLOCK>, args);
        }
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (is_forward(call))
                plan.aligned ? launch_as<T, true, true>(context, call, plan)
                             : launch_as<T, true, false>(context, call, plan);
            else
                plan.aligned ? launch_as<T, false, true>(context, call, plan)
                             : launch_as<T, false, false>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_row_on_chip, RowOnChip)
