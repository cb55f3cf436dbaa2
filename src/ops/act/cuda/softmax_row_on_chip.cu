/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of contiguous rows, each in the registers of 16 lanes, of a warp, of a block, or of a
 * cluster of blocks that exchange their statistics through distributed shared memory. Every byte is
 * read once and written once.
 *
 * Rows may begin anywhere. They are cut into packs that are aligned in the output; the few elements
 * before the first pack and after the last one, the edges, take a thread each. A pack of an input
 * with another alignment is loaded as two aligned packs, which are shifted.
 *
 * The output may be the input: then both have the same alignment, and every element is read and
 * written by the same thread.
 */
#include <float.h>

#include "cuda/cluster.cuh"
#include "cuda/unaligned_pack.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

template <bool FORWARD> constexpr int BLOCK_PACKS = FORWARD ? 4 : 2; /* per thread and input, with blocks per row */
constexpr int BLOCK_THREADS = 512;                                   /* per block, at most ... */
constexpr int MOST_THREADS = 1024, MOST_BLOCKS = 16;                 /* ... and in clusters of MOST_BLOCKS blocks */
constexpr int PORTABLE_BLOCKS = 8; /* largest cluster that every GPU with clusters has */
constexpr int GROUP_THREADS = 128; /* per block, if a block has several rows */

template <typename T> struct RowArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    const T *in_end, *dy_end; /* the end of each tensor's memory */
    Walk walk;
    int64_t rows;
    int length;
    bool expanded; /* dy is one number per row */
};

/* Makes the compiler unpack the elements again where they are needed. Kept unpacked in registers, they
 * would take three times as many. */
template <typename T> DEVICE void keep_packed(Pack<T, WIDE<T>> &pack) {
    uint4 &word = reinterpret_cast<uint4 &>(pack);
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}

/* Whether loads are checked against the ends of the tensor pack by pack, not once per row. With many packs of fp32 that
 * is 15 % faster; why is not known. */
template <typename T, int COUNT> constexpr bool LOOKS_AT_EACH = !NARROW<T> && COUNT > 4;

/* A thread's packs of an input: the elements at the places of its packs of the output. ALIGNED: all
 * rows of all tensors are whole, aligned packs. */
template <typename T, bool ALIGNED, int COUNT> struct Under {
    static constexpr int N = WIDE<T>;
    Pack<T, N> pack[COUNT];
    Pack<T, N> next[ALIGNED ? 1 : COUNT]; /* the aligned packs after those in `pack` */
    int shift;                            /* offset of the wanted packs in aligned ones, in elements */
    bool inside;                          /* the aligned packs of the row lie inside the tensor */

    /* Issues the loads. `body`: the input of the output's first pack. [begin, end): the tensor. Packs that do
     * not exist are full of `fill`. */
    DEVICE void load(const T *body, const T *begin, const T *end, int lane, int lanes, int packs, float fill) {
        shift = ALIGNED ? 0 : offset_in_pack(body);
        constexpr bool EACH = LOOKS_AT_EACH<T, COUNT>;
        inside = EACH || shift == 0 || (body - shift >= begin && body + (packs + 1) * N <= end);
        const T *const aligned = body - shift + lane * N;
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const T *const p = aligned + k * lanes * N;
            const bool has = inside && lane + k * lanes < packs;
            pack[k] = load_once_if<T, N>(has && (!EACH || p >= begin), p, fill);
            if constexpr (!ALIGNED)
                next[k] = load_once_if<T, N>(has && shift != 0 && (!EACH || p + 2 * N <= end), p + N, fill);
        }
    }
    /* Waits for the loads, and shifts the packs. What `load` has left out, because the aligned packs reach
     * outside the tensor, is loaded here, element by element. */
    DEVICE void shift_packs(const T *body, const T *begin, const T *end, int lane, int lanes, int packs) {
        if constexpr (!ALIGNED) {
            if (shift == 0)
                return;
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                const T *const p = body + (lane + k * lanes) * N;
                uint4 &own = reinterpret_cast<uint4 &>(pack[k]);
                const uint4 &after = reinterpret_cast<const uint4 &>(next[k]);
                own = NARROW<T> ? shifted(own, after, shift * static_cast<int>(sizeof(T)))
                                : shifted_words(own, after, shift);
                if (LOOKS_AT_EACH<T, COUNT> && lane + k * lanes < packs &&
                    (p - shift < begin || p - shift + 2 * N > end))
                    load_elements(k, p);
            }
            if (!inside)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    if (lane + k * lanes < packs)
                        load_elements(k, body + (lane + k * lanes) * N);
        }
    }
    DEVICE void load_elements(int k, const T *from) {
#pragma unroll
        for (int j = 0; j < N; j++)
            pack[k].v[j] = from[j];
    }
};

/* What a thread has of a row. */
template <typename T, bool FORWARD, bool ALIGNED, int COUNT> struct RowPart {
    static constexpr int N = WIDE<T>;
    AlignedSpan<T, int> out;
    int lane, lanes;
    Under<T, ALIGNED, COUNT> x;
    Under<T, ALIGNED, FORWARD ? 1 : COUNT> d;
    float upstream; /* dy, if expanded */
    bool expanded, has_edge;
    int edge; /* offset of the thread's edge element from out.body */
    float x_edge, d_edge;

    DEVICE void load(const RowArgs<T> &a, int64_t row, int thread, int threads) {
        int64_t at[3];
        a.walk.offsets(row, at);
        lane = thread;
        lanes = threads;
        out = AlignedSpan<T, int>(a.out + at[OUT], a.length);
        expanded = !FORWARD && a.expanded;
        const int packs = out.packs, head = out.head;
        const T *const in = a.in + at[IN] + head, *const dy = a.dy + at[DY] + (expanded ? 0 : head);
        x.load(in, a.in, a.in_end, lane, lanes, packs, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            if (!expanded)
                d.load(dy, a.dy, a.dy_end, lane, lanes, packs, 0.0f);
        has_edge = !ALIGNED && lane < out.edges;
        edge = has_edge ? out.edge(lane) : 0;
        x_edge = has_edge ? to_float(in[edge]) : FORWARD ? -INFINITY : 0.0f;
        upstream = expanded ? to_float(*dy) : 0.0f;
        d_edge = FORWARD || !has_edge ? 0.0f : expanded ? upstream : to_float(dy[edge]);
        x.shift_packs(in, a.in, a.in_end, lane, lanes, packs);
        if constexpr (!FORWARD) {
            if (!expanded)
                d.shift_packs(dy, a.dy, a.dy_end, lane, lanes, packs);
            else
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    d.pack[k] = all_of<T, N>(upstream);
        }
    }
    DEVICE float max() const {
        float top = fmaxf(x_edge, -FLT_MAX); /* a row of all -inf becomes 0 / 0: NaN */
        return fmaxf(top, max_of_all(x.pack));
    }
    DEVICE void store(int k, const float (&v)[N]) const {
        if (lane + k * lanes < out.packs)
            store_once(out.body + (lane + k * lanes) * N, packed<T, N>(v));
    }
};

/* LANES lanes per row. Unpacked elements, then exponentials, stay in registers. */
template <typename T, bool FORWARD, int LANES, int COUNT>
__global__ void __launch_bounds__(GROUP_THREADS) softmax_group(const __grid_constant__ RowArgs<T> a) {
    constexpr int N = WIDE<T>;
    const int64_t own = int64_t(blockIdx.x) * (GROUP_THREADS / LANES) + threadIdx.x / LANES;
    const bool active = own < a.rows; /* the others take part in shuffles */
    wait_for_previous_kernel();
    RowPart<T, FORWARD, false, COUNT> part;
    part.load(a, active ? own : 0, threadIdx.x % LANES, LANES);
    float x[COUNT][N], d[COUNT][N], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        unpack(part.x.pack[k], x[k]);
        if constexpr (!FORWARD)
            unpack(part.d.pack[k], d[k]);
    }
    if constexpr (FORWARD) {
        float max = part.max();
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        sum = part.x_edge = exp_as<T>(part.x_edge - max);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                sum += x[k][j] = exp_as<T>(x[k][j] - max);
    } else {
        sum = part.x_edge * part.d_edge;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                sum = fmaf(x[k][j], d[k][j], sum);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (!active)
        return;
    const float scale = reciprocal_fast(sum); /* a sum is 0, NaN, or between 1 and the length */
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
#pragma unroll
        for (int j = 0; j < N; j++)
            x[k][j] = FORWARD ? x[k][j] * scale : x[k][j] * (d[k][j] - sum);
        part.store(k, x[k]);
    }
    if (part.has_edge)
        part.out.body[part.edge] = from_float<T>(FORWARD ? part.x_edge * scale : part.x_edge * (part.d_edge - sum));
}

/* Statistics of a part of a row. Forward: the maximum and the sum of e^(x - max). Backward: the sum
 * of y dy; max is not used. */
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

/* Merges the parts of the cluster's blocks, in the order of the blocks. The caller has called
 * cluster_arrive once. */
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

/* A block, or a cluster, per row. 16-bit elements are kept packed, and their exponentials are computed twice. With fp32
 * the exponentials are kept, relative to the largest element of the thread. */
template <typename T, bool FORWARD, bool ALIGNED, bool CLUSTER> DEVICE void softmax_of_row(const RowArgs<T> &a) {
    constexpr int N = WIDE<T>, COUNT = BLOCK_PACKS<FORWARD>;
    constexpr bool KEEPS = FORWARD && !NARROW<T>;
    __shared__ Part warps[MOST_THREADS / WARP], parts[MOST_BLOCKS];
    unsigned blocks = 1, rank = 0; /* of the row; of this block among them */
    if constexpr (CLUSTER) {
        cluster_arrive();
        blocks = cluster_blocks();
        rank = cluster_rank();
    }
    wait_for_previous_kernel();
    RowPart<T, FORWARD, ALIGNED, COUNT> row;
    row.load(a, blockIdx.x / blocks, static_cast<int>(rank) * COUNT * blockDim.x + threadIdx.x, blockDim.x);
    Part part = {FORWARD ? row.max() : -FLT_MAX, 0.0f};
    const float own_max = part.max;
    if constexpr (!ALIGNED) {
        part.sum = FORWARD ? exp_as<T>(row.x_edge - own_max) : row.x_edge * row.d_edge;
        row.x_edge = KEEPS ? part.sum : row.x_edge;
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N];
        unpack(row.x.pack[k], v);
        if constexpr (!FORWARD)
            unpack(row.d.pack[k], w);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float e = FORWARD ? exp_as<T>(v[j] - own_max) : 0.0f;
            part.sum = FORWARD ? part.sum + e : fmaf(v[j], w[j], part.sum);
            if constexpr (KEEPS)
                row.x.pack[k].v[j] = e;
        }
    }
    const int lane = threadIdx.x % WARP;
    part = merge_warp<FORWARD>(part);
    if (lane == 0)
        warps[threadIdx.x / WARP] = part;
    __syncthreads();
    part = merge_warp<FORWARD>(lane < blockDim.x / WARP ? warps[lane] : Part{-FLT_MAX, 0.0f});
    if constexpr (CLUSTER)
        part = merge_cluster<FORWARD>(part, parts, blocks);

    const float scale = (KEEPS ? expf(own_max - part.max) : 1.0f) / part.sum;
    const auto result = [&](float value, float upstream) {
        return KEEPS ? value * scale : FORWARD ? exp_as<T>(value - part.max) * scale : value * (upstream - part.sum);
    };
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N];
        keep_packed(row.x.pack[k]);
        unpack(row.x.pack[k], v);
        if constexpr (!FORWARD) {
            keep_packed(row.d.pack[k]);
            unpack(row.d.pack[k], w);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = result(v[j], FORWARD ? 0.0f : w[j]);
        row.store(k, v);
    }
    if (row.has_edge)
        row.out.body[row.edge] = from_float<T>(result(row.x_edge, row.d_edge));
}

template <typename T, bool FORWARD, bool ALIGNED, bool CLUSTER>
__global__ void __launch_bounds__(CLUSTER ? MOST_THREADS : BLOCK_THREADS)
    softmax_row(const __grid_constant__ RowArgs<T> a) {
#if __CUDA_ARCH__ >= 900
    softmax_of_row<T, FORWARD, ALIGNED, CLUSTER>(a);
#else /* no clusters: why_not keeps the kernels that use them from being launched */
    if constexpr (!CLUSTER)
        softmax_of_row<T, FORWARD, ALIGNED, CLUSTER>(a);
#endif
}

struct RowOnChip {
    typedef act_call Call;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows;
        int length, packs, blocks; /* blocks: of a cluster */
        bool aligned, expanded;
    };

    static constexpr int64_t AT_ONCE = 264; /* blocks of 512 threads that run at a time, two per multiprocessor */

    static int packs_per_thread(const Call &call) {
        return is_forward(call) ? BLOCK_PACKS<true> : BLOCK_PACKS<false>;
    }
    /* Blocks per row, at least. */
    static int blocks_for(const Call &call, int64_t packs) {
        return power_at_least(ceil_div<int64_t>(packs, BLOCK_THREADS * packs_per_thread(call)), 1, MOST_BLOCKS);
    }
    /* The same; but more if rows take a cluster each and are so few that multiprocessors would be idle. */
    static int blocks_of_few(const rafter_cuda_state &device, const Call &call, int64_t packs, int64_t rows) {
        constexpr int64_t ENOUGH_BLOCKS = 128, LEAST_THREADS = 128;
        const int64_t most = device.compute_capability == 90 ? MOST_BLOCKS : 1;
        int blocks = blocks_for(call, packs);
        while (blocks > 1 && 2 * blocks <= most && 2 * blocks * rows <= ENOUGH_BLOCKS &&
               packs >= 2 * blocks * LEAST_THREADS * packs_per_thread(call))
            blocks *= 2;
        return blocks;
    }

    static int64_t packs_of(const SlabViews &views) {
        return views.length() * rafter_dtype_bytes(views.view[OUT].dtype) / 16;
    }
    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        if (views.inner() != 1 || !views.all_slabs())
            return "dim is strided";
        if (packs_of(views) < 16)
            return "rows of less than 16 packs of 16 bytes leave lanes idle";
        /* Forward with more threads per block is slower than shared memory: docs/perf/act.md. */
        if (packs_of(views) > MOST_BLOCKS * (is_forward(call) ? BLOCK_THREADS : MOST_THREADS) * packs_per_thread(call))
            return "rows do not fit into the registers of a cluster";
        const int blocks = blocks_for(call, packs_of(views));
        if (blocks > 1 && device.compute_capability < 90)
            return "rows do not fit into the registers of a block, and the GPU has no clusters";
        if (blocks > PORTABLE_BLOCKS && device.compute_capability != 90)
            return "rows need a cluster of 16 blocks, which is used on compute capability 9.0 only";
        if (blocks > 1 && device.compute_capability == 90 && is_large(call))
            return "rows of a cluster in a large tensor: shared memory holds more of them";
        if (blocks > 1 && device.compute_capability == 90 && views.slabs() * blocks > AT_ONCE &&
            (is_forward(call) || !views.slabs_are_packs()))
            return "more clusters than run at a time: shared memory holds more of them";
        if (blocks > 1 && !is_forward(call) && views.slabs_are_packs() && !is_small(call))
            return "gradients of rows of a cluster, unless the tensor is small, are faster in two passes";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        plan->walk = walk_over(views.pointer, 0, views.dim());
        plan->rows = views.slabs();
        plan->length = static_cast<int>(views.length());
        plan->packs = static_cast<int>(packs_of(views));
        plan->blocks = blocks_of_few(device, call, plan->packs, plan->rows);
        plan->expanded = !is_forward(call) && !views.is_slab(DY);
        plan->aligned = views.slabs_are_packs();
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &plan) {
        const Call &call = ordered.call;
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
                                 plan.length,
                                 plan.expanded};
        const auto groups = [&](int lanes, void (*kernel)(RowArgs<T>)) {
            Launch how = {ceil_div<int64_t>(plan.rows, GROUP_THREADS / lanes), GROUP_THREADS};
            ::launch(context, how, kernel, args);
        };
        if (plan.packs <= 16)
            return groups(16, softmax_group<T, FORWARD, 16, 1>);
        if (plan.packs <= 32)
            return groups(16, softmax_group<T, FORWARD, 16, 2>);
        if (plan.packs <= 64)
            return groups(WARP, softmax_group<T, FORWARD, WARP, 2>);
        if (plan.packs <= 128)
            return groups(WARP, softmax_group<T, FORWARD, WARP, 4>);
        if constexpr (FORWARD)
            if (plan.packs <= 256)
                return groups(WARP, plan.packs <= 192 ? softmax_group<T, FORWARD, WARP, 6>
                                                      : softmax_group<T, FORWARD, WARP, 8>);
        const int threads = ceil_div(plan.packs, plan.blocks * BLOCK_PACKS<FORWARD>);
        Launch how = {plan.rows * plan.blocks, round_up(threads, WARP)};
        how.cluster = plan.blocks;
        if (plan.blocks == 1)
            return ::launch(context, how,
                            plan.aligned ? softmax_row<T, FORWARD, true, false> : softmax_row<T, FORWARD, false, false>,
                            args);
        const auto kernel = plan.aligned ? softmax_row<T, FORWARD, true, true> : softmax_row<T, FORWARD, false, true>;
        if (plan.blocks > PORTABLE_BLOCKS)
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        ::launch(context, how, kernel, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_row_on_chip, RowOnChip)
