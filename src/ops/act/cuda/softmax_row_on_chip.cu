/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of contiguous rows, each in the registers of a warp, of a block, or of a cluster of
 * blocks that exchange their statistics through distributed shared memory. Every byte is read once
 * and written once.
 *
 * Rows may begin anywhere, if all tensors of the call are equally misaligned: the few elements of a
 * row before its first aligned pack and after its last one are taken by one thread each. Every
 * element is read and written by the same thread, so that the output may be the input.
 */
#include <float.h>

#include "cuda/cluster.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

template <bool FORWARD> constexpr int PACKS = FORWARD ? 4 : 2; /* per thread and input */
constexpr int BLOCK_THREADS = 512;                             /* most threads of a block ... */
constexpr int MOST_THREADS = 1024, MOST_BLOCKS = 16;           /* ... and in clusters of the most blocks */
constexpr int PORTABLE_BLOCKS = 8;                             /* largest cluster that every GPU with clusters has */
constexpr int WARP_ROWS = 4;                                   /* rows per block, with a warp per row */

enum Scope { IN_WARP, IN_BLOCK, IN_CLUSTER };

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
template <bool FORWARD> DEVICE Part merge_block(Part p, Part (&parts)[MOST_THREADS / WARP]) {
    const int lane = threadIdx.x % WARP;
    p = merge_warp<FORWARD>(p);
    if (lane == 0)
        parts[threadIdx.x / WARP] = p;
    __syncthreads();
    return merge_warp<FORWARD>(lane < blockDim.x / WARP ? parts[lane] : Part{-FLT_MAX, 0.0f});
}

/* Over the cluster, in the order of its blocks. The caller has called cluster_arrive once. */
template <bool FORWARD> DEVICE Part merge_cluster(Part p, Part (&parts)[MOST_BLOCKS], unsigned blocks) {
    const unsigned lane = threadIdx.x % WARP;
    cluster_wait(); /* all blocks have started: their shared memory can be written */
    if (threadIdx.x < blocks)
        store_to_cluster(&parts[cluster_rank()], make_float2(p.max, p.sum), threadIdx.x);
    __syncwarp(); /* the barrier wants whole warps */
    cluster_arrive();
    cluster_wait();
    return merge_warp<FORWARD>(lane < blocks ? parts[lane] : Part{-FLT_MAX, 0.0f});
}

template <typename T, bool FORWARD, bool ALIGNED, Scope SCOPE> DEVICE void softmax_of_row(const RowArgs<T> &a) {
    constexpr int N = WIDE<T>, COUNT = PACKS<FORWARD>;
    __shared__ Part warp_parts[MOST_THREADS / WARP], block_parts[MOST_BLOCKS];
    unsigned blocks = 1, rank = 0; /* of the row; of this block among them */
    if constexpr (SCOPE == IN_CLUSTER) {
        cluster_arrive();
        blocks = cluster_blocks();
        rank = cluster_rank();
    }
    const int64_t row = SCOPE == IN_WARP ? int64_t(blockIdx.x) * WARP_ROWS + threadIdx.x / WARP : blockIdx.x / blocks;
    if (SCOPE == IN_WARP && row >= a.rows)
        return;
    const int threads = SCOPE == IN_WARP ? WARP : blockDim.x,
              thread = SCOPE == IN_WARP ? threadIdx.x % WARP : threadIdx.x;
    const int first = static_cast<int>(rank) * COUNT * threads + thread;

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
    if constexpr (SCOPE == IN_CLUSTER)
        part = merge_cluster<FORWARD>(part, block_parts, blocks);

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

template <typename T, bool FORWARD, bool ALIGNED, Scope SCOPE>
__global__ void __launch_bounds__(SCOPE == IN_WARP    ? WARP * WARP_ROWS
                                  : SCOPE == IN_BLOCK ? BLOCK_THREADS
                                                      : MOST_THREADS)
    softmax_row(const __grid_constant__ RowArgs<T> a) {
#if __CUDA_ARCH__ >= 900
    softmax_of_row<T, FORWARD, ALIGNED, SCOPE>(a);
#else /* no clusters: why_not keeps the kernels that use them from being launched */
    if constexpr (SCOPE != IN_CLUSTER)
        softmax_of_row<T, FORWARD, ALIGNED, SCOPE>(a);
#endif
}

struct RowOnChip {
    typedef act_call Call;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows;
        int length, threads, blocks; /* per row; per block; per row */
        bool aligned;
    };

    static int packs_per_thread(const Call &call) {
        return is_forward(call) ? PACKS<true> : PACKS<false>;
    }
    static int64_t packs_of(const SoftmaxViews &views) {
        return views.size(views.ndim() - 1) * rafter_dtype_bytes(views.view[OUT].dtype) / 16;
    }
    /* Blocks per row. By length alone, never by the device: the same bits everywhere. */
    static int blocks_for(const Call &call, int64_t packs) {
        return power_at_least(ceil_div<int64_t>(packs, BLOCK_THREADS * packs_per_thread(call)), 1, MOST_BLOCKS);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
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
        if (!is_forward(call) && aligned && packs > BLOCK_THREADS * PACKS<false>)
            return "backward of rows longer than a block is slower in clusters: docs/perf/act.md";
        if (packs > MOST_BLOCKS * MOST_THREADS * packs_per_thread(call))
            return "rows do not fit into the registers of a cluster";
        const int blocks = blocks_for(call, packs);
        if (blocks > 1 && is_large(call) && device.compute_capability == 90)
            return "rows of a cluster in a large tensor: softmax_slabs reads them faster";
        if (blocks > 1 && device.compute_capability < 90)
            return "rows do not fit into the registers of a block, and the GPU has no clusters";
        if (blocks > PORTABLE_BLOCKS && device.compute_capability != 90)
            return "rows need a cluster of 16 blocks, which is used on compute capability 9.0 only";
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
        plan->blocks = blocks_for(call, packs);
        const int64_t threads = ceil_div<int64_t>(packs, plan->blocks * each);
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
        } else if (plan.blocks == 1) {
            ::launch(context, {plan.rows, plan.threads}, softmax_row<T, FORWARD, ALIGNED, IN_BLOCK>, args);
        } else {
            Launch how = {plan.rows * plan.blocks, plan.threads};
            how.cluster = plan.blocks;
            const auto kernel = softmax_row<T, FORWARD, ALIGNED, IN_CLUSTER>;
            if (plan.blocks > PORTABLE_BLOCKS)
                cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
            ::launch(context, how, kernel, args);
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
