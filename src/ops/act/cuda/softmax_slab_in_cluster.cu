/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of slabs that fit into the shared memory of a block, or of a cluster of blocks. A slab is
 * one contiguous row, or `inner` interleaved ones ([outer, length, inner]); it may begin anywhere.
 * Every byte is read once and written once.
 *
 * A slab is cut into packs of 16 bytes that are aligned in the output; the elements before the first
 * and after the last pack are the edges, which take a thread each. Thread t takes the packs t, t +
 * threads, ... Because threads * N is a multiple of `inner`, element j of all its packs belongs to
 * the same line. An input with another alignment is copied to shared memory by its own aligned
 * packs, and shifted when it is read from there.
 *
 * A block reads all elements that it writes before it writes, and no other block needs them: the
 * output may be the input.
 */
#include "cuda/cluster.cuh"
#include "cuda/line_statistics.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int ROW_THREADS = 256, MOST_THREADS = 1024, MOST_BLOCKS = 16, PORTABLE_BLOCKS = 8;
constexpr int AT_ONCE = 4; /* packs whose elements are unpacked together */

/* The statistics of an edge element, and its line. */
struct Edge {
    Part part;
    int column;
};

struct SlabPlan {
    int elements, inner; /* of a slab */
    int threads;         /* that take packs; a block has them rounded up to whole warps */
    int blocks;          /* per slab */
    int each;            /* packs per block, at most */
    int lanes;           /* that merge the statistics of one line, a power of two */
    bool expanded;       /* dy is one number per slab */
};

template <typename T> struct SlabArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    Walk outer;
    SlabPlan plan;
};

/* Where things are in the shared memory of a block, in bytes: the scratch memory of merge_row or of
 * merge_columns; the statistics of threads, of the block and of the slab; the inputs. */
struct SlabMemory {
    static constexpr int FIXED = 640; /* scratch */
    int partial, own, total, input, input_bytes, bytes;

    __host__ __device__ __forceinline__ SlabMemory(const SlabPlan &plan, int width, int inputs) {
        const bool row = plan.inner == 1;
        partial = FIXED;
        own = partial + (row ? 0 : plan.threads * width * (int)sizeof(Part));
        total = own + (row ? 0 : round_up(plan.inner * (int)sizeof(Part), 16));
        input = total + (row ? 0 : round_up(plan.inner * (int)sizeof(Part), 16));
        input = round_up(input, 128);
        input_bytes = (plan.each + 1) * 16;
        bytes = input + inputs * input_bytes;
    }
};

/* A block's part of one input's slab in shared memory, by the aligned packs of the input. */
template <typename T> struct Staged {
    static constexpr int N = WIDE<T>;
    const uint4 *packs;
    int shift; /* of the first element in its pack */

    int elements, begin; /* of the slab; where the first pack begins in it */
    int slots;           /* packs that are copied */
    const T *from;       /* the first one */

    /* `count` packs of the output, from element `first` of the slab on. */
    DEVICE void place(char *memory, const T *slab, int slab_elements, int first, int count) {
        packs = reinterpret_cast<const uint4 *>(memory);
        from = slab + first;
        shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T));
        from -= shift;
        begin = first - shift;
        elements = slab_elements;
        slots = count > 0 ? count + (shift > 0) : 0;
    }
    /* Starts to copy the packs [low, high). Packs that reach over an end of the slab are copied
     * element by element: the rest may lie outside the tensor. */
    DEVICE void fill(int low, int high, int threads) const {
        Pack<T, N> *const to = reinterpret_cast<Pack<T, N> *>(const_cast<uint4 *>(packs));
        for (int i = low + (int)threadIdx.x; i < min(slots, high); i += AT_ONCE * threads)
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int slot = i + u * threads, first = begin + slot * N;
                if (slot >= min(slots, high))
                    break;
                if (first >= 0 && first + N <= elements) {
                    copy_async(to + slot, from + slot * N);
                } else {
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (first + j >= 0 && first + j < elements)
                            to[slot].v[j] = from[slot * N + j];
                }
            }
    }

    /* An aligned pack as it was copied. Elements outside the block's part become -inf. */
    DEVICE Pack<T, N> copied(int slot) const {
        uint4 words = packs[slot];
        Pack<T, N> &pack = reinterpret_cast<Pack<T, N> &>(words);
        const bool first = slot == 0, last = slot == slots - 1;
        if (shift != 0 && (first || last))
#pragma unroll
            for (int j = 0; j < N; j++)
                if ((first && j < shift) || (last && j >= shift))
                    pack.v[j] = from_float<T>(-INFINITY);
        return pack;
    }
    /* The input of pack i of the block's part of the output. */
    DEVICE Pack<T, N> read(int i) const {
        uint4 low = packs[i];
        if (shift != 0) {
            const uint4 high = packs[i + 1];
            unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const int words = shift * (int)sizeof(T) / 4, bits = shift * (int)sizeof(T) % 4 * 8;
#pragma unroll
            for (int k = 0; k < 6; k++)
                w[k] = words & 2 ? w[k + 2] : w[k];
#pragma unroll
            for (int k = 0; k < 5; k++)
                w[k] = words & 1 ? w[k + 1] : w[k];
#pragma unroll
            for (int k = 0; k < 4 && sizeof(T) == 2; k++)
                w[k] = __funnelshift_r(w[k], w[k + 1], bits);
            low = make_uint4(w[0], w[1], w[2], w[3]);
        }
        return reinterpret_cast<const Pack<T, N> &>(low);
    }
};

/* A block's part of a slab, and what a thread has of it. */
template <typename T, bool FORWARD> struct SlabPart {
    static constexpr int N = WIDE<T>;
    AlignedSpan<T> out;
    int first, count; /* first pack of the block; packs of the thread */
    int half;         /* packs of a thread in the first of the two groups of copies, at most */
    int threads;
    Staged<T> in, dy;
    bool expanded;
    float upstream; /* dy, if expanded */
    bool has_edge;
    int64_t edge; /* offset of the thread's edge element from out.body */
    float x_edge, d_edge;

    DEVICE void load(const SlabArgs<T> &a, unsigned slab, unsigned rank, char *memory, const SlabMemory &at) {
        int64_t offset[3];
        a.outer.offsets(slab, offset);
        threads = a.plan.threads;
        out = AlignedSpan<T>(a.out + offset[OUT], a.plan.elements);
        first = (int)rank * a.plan.each;
        const int packs = min((int)out.packs - first, a.plan.each), thread = threadIdx.x;
        count = thread < threads && thread < packs ? (packs - thread - 1) / threads + 1 : 0;
        const int begin = out.head + first * N;
        const T *const x = a.in + offset[IN];
        expanded = !FORWARD && a.plan.expanded;
        in.place(memory + at.input, x, a.plan.elements, begin, packs);
        if (!FORWARD && !expanded)
            dy.place(memory + at.input + at.input_bytes, a.dy + offset[DY], a.plan.elements, begin, packs);
        /* Two groups of copies. + 1: a shifted pack needs the aligned pack after it, too. */
        half = round_up((ceil_div(a.plan.each, threads) + 1) / 2, AT_ONCE);
        fill(0, half * threads + 1);
        fill(half * threads + 1, INT32_MAX);
        upstream = expanded ? to_float(a.dy[offset[DY]]) : 0.0f;
        has_edge = rank == 0 && thread < out.edges;
        edge = has_edge ? out.edge(thread) : 0;
        x_edge = has_edge ? to_float(x[out.head + edge]) : FORWARD ? -INFINITY : 0.0f;
        d_edge = FORWARD || !has_edge ? 0.0f : expanded ? upstream : to_float(a.dy[offset[DY] + out.head + edge]);
    }
    /* Starts a group of copies. */
    DEVICE void fill(int low, int high) const {
        if ((int)threadIdx.x < threads) {
            in.fill(low, high, threads);
            if (!FORWARD && !expanded)
                dy.fill(low, high, threads);
        }
        copy_commit();
    }
    DEVICE Pack<T, N> read_in(int k) const {
        return in.read((int)threadIdx.x + k * threads);
    }
    DEVICE void read_dy(int k, float (&d)[N]) const {
        if (expanded) {
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = upstream;
        } else {
            unpack(dy.read((int)threadIdx.x + k * threads), d);
        }
    }

    /* Forward statistics of a row are computed of packs as they were copied, not shifted: the order does not
     * matter. */
    template <int LINES> static constexpr bool AS_COPIED = FORWARD &&LINES == 1;

    /* The statistics of the thread's packs, group by group as the copies arrive. LINES: 1, or N. */
    template <int LINES> DEVICE Statistics<LINES, FORWARD, 1> statistics() const {
        Statistics<LINES, FORWARD, 1> mine;
        mine.clear();
        const int thread = threadIdx.x, slots = thread < threads ? in.slots : 0,
                  all = !AS_COPIED<LINES> ? count
                        : thread < slots  ? (slots - thread - 1) / threads + 1
                                          : 0;
        int k = 0;
#pragma unroll 1
        for (int group = 0; group < 2; group++) {
            group == 0 ? copy_wait<1>() : copy_wait<0>();
            __syncthreads();
            for (const int end = group == 0 ? min(half, all) : all; k < end; k += AT_ONCE)
                add(mine, k, all);
        }
        return mine;
    }
    /* Adds packs k to k + AT_ONCE - 1 of the thread, which has `all` packs. */
    template <int LINES> DEVICE void add(Statistics<LINES, FORWARD, 1> &mine, int k, int all) const {
        Pack<T, N> x[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (k + u >= all)
                x[u] = all_of<T, N>(FORWARD ? -INFINITY : 0.0f);
            else if constexpr (AS_COPIED<LINES>)
                x[u] = in.copied((int)threadIdx.x + (k + u) * threads);
            else
                x[u] = read_in(k + u);
        if constexpr (FORWARD)
            cover<false, LINES>(mine, 0, max_of(max_of(x[0], x[1]), max_of(x[2], x[3])));
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float v[N], d[N];
            unpack(x[u], v);
            if (!FORWARD) {
                if (k + u >= all)
                    break;
                read_dy(k + u, d);
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                float &sum = mine.sum[0][j % LINES];
                sum = FORWARD ? sum + exp2_fast((v[j] - mine.max[j % LINES]) * LOG2E) : fmaf(v[j], d[j], sum);
            }
        }
    }

    DEVICE static float result(float x, float d, Part all, float scale) {
        return FORWARD ? exp_as<T>(x - all.max) * scale : x * (d - all.sum);
    }
    /* Writes the results. all, scale: entry j % LINES belongs to the line of element j of a pack. */
    template <int LINES> DEVICE void write(const Part (&all)[LINES], const float (&scale)[LINES]) const {
#pragma unroll 2
        for (int k = 0; k < count; k++) {
            float v[N], d[N] = {};
            unpack(read_in(k), v);
            if (!FORWARD)
                read_dy(k, d);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = result(v[j], d[j], all[j % LINES], scale[j % LINES]);
            store_once(out.body + (first + (int)threadIdx.x + k * threads) * (int64_t)N, packed<T, N>(v));
        }
    }
};

/* Merges the statistics of a row over the block and over the cluster, in the order of the blocks. */
template <bool FORWARD> DEVICE Part merge_row(Part p, char *memory, unsigned blocks) {
    Part *const warps = reinterpret_cast<Part *>(memory), *const block = warps + MOST_THREADS / WARP;
    const unsigned lane = threadIdx.x % WARP;
    const Part none = {-FLT_MAX, 0.0f};
    p = merge_lanes<FORWARD>(p, WARP);
    if (lane == 0)
        warps[threadIdx.x / WARP] = p;
    __syncthreads();
    p = merge_lanes<FORWARD>(lane < blockDim.x / WARP ? warps[lane] : none, WARP);
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        if (threadIdx.x == 0)
            *block = p;
        cluster_sync();
        const float2 other = load_from_cluster(block, lane < blocks ? lane : 0);
        p = merge_lanes<FORWARD>(lane < blocks ? Part{other.x, other.y} : none, WARP);
        cluster_arrive();
    }
#else
    (void)block, (void)blocks;
#endif
    return p;
}

/* The same for interleaved lines. Writes the totals to shared memory. */
template <typename T, bool FORWARD>
DEVICE void merge_columns(const SlabPart<T, FORWARD> &part, const Statistics<WIDE<T>, FORWARD, 1> &mine,
                          const SlabPlan &plan, char *memory, const SlabMemory &at) {
    const int blocks = plan.blocks;
    constexpr int N = WIDE<T>;
    Part *const partial = reinterpret_cast<Part *>(memory + at.partial), *const own = (Part *)(memory + at.own),
                *const total = (Part *)(memory + at.total);
    Edge *const edges = reinterpret_cast<Edge *>(memory + 384);
    const int thread = threadIdx.x;
    if (thread < plan.threads)
#pragma unroll
        for (int j = 0; j < N; j++)
            partial[thread * N + j] = {mine.max[j], mine.sum[0][j]};
    if (part.has_edge)
        edges[thread] = {part_of<FORWARD>(part.x_edge, part.d_edge),
                         static_cast<int>((part.out.head + part.edge) % plan.inner)};
    const int edge_count = part.first == 0 ? part.out.edges : 0;
    __syncthreads();
    const auto edges_of = [&](int line, int lane, int lanes) {
        Part all = no_part();
        for (int e = lane; e < edge_count; e += lanes)
            if (edges[e].column == line)
                all = merged<FORWARD>(all, edges[e].part);
        return all;
    };
    merge_lines<FORWARD>(partial, plan.threads * N / plan.inner, plan.inner, part.out.head % plan.inner, plan.lanes,
                         reinterpret_cast<Part *>(memory), edges_of,
                         [&](int line, Part all) { (blocks > 1 ? own : total)[line] = all; });
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        cluster_sync();
        const int threads = blockDim.x, rank = thread % blocks; /* `blocks` lanes per column */
        for (int base = 0; base < plan.inner; base += threads / blocks) {
            const int column = base + thread / blocks;
            Part all = {-FLT_MAX, 0.0f};
            if (column < plan.inner) {
                const float2 other = load_from_cluster(own + column, rank);
                all = {other.x, other.y};
            }
            all = merge_lanes<FORWARD>(all, blocks);
            if (column < plan.inner && rank == 0)
                total[column] = all;
        }
        cluster_arrive();
    }
#else
    (void)own;
#endif
    __syncthreads();
}

template <typename T, bool FORWARD, bool ROW>
__global__ void __launch_bounds__(ROW ? ROW_THREADS : MOST_THREADS, !ROW      ? 1
                                                                    : FORWARD ? 5
                                                                              : 4)
    softmax_slab(const __grid_constant__ SlabArgs<T> a) {
    constexpr int N = WIDE<T>, LINES = ROW ? 1 : N;
    DYNAMIC_SHARED(uint4, slab_memory);
    char *const memory = reinterpret_cast<char *>(slab_memory);
    const SlabMemory at(a.plan, N, FORWARD ? 1 : 2);
    const unsigned blocks = a.plan.blocks, slab = blockIdx.x / blocks, rank = blockIdx.x - slab * blocks;
    SlabPart<T, FORWARD> part;
    wait_for_previous_kernel();
    part.load(a, slab, rank, memory, at);
    const Statistics<LINES, FORWARD, 1> mine = part.template statistics<LINES>();
    Part all[LINES];
    float scale[LINES];
    Part edge_all;
    if constexpr (ROW) {
        const Part own = {mine.max[0], mine.sum[0][0]};
        all[0] = merge_row<FORWARD>(
            part.has_edge ? merged<FORWARD>(own, part_of<FORWARD>(part.x_edge, part.d_edge)) : own, memory, blocks);
        scale[0] = 1.0f / all[0].sum;
        edge_all = all[0];
    } else {
        merge_columns<T, FORWARD>(part, mine, a.plan, memory, at);
        const Part *const total = reinterpret_cast<const Part *>(memory + at.total);
        int column = (part.out.head + (int)threadIdx.x * N) % a.plan.inner;
#pragma unroll
        for (int j = 0; j < N; j++) {
            all[j] = total[column];
            scale[j] = 1.0f / all[j].sum;
            column = column + 1 == a.plan.inner ? 0 : column + 1;
        }
        edge_all = part.has_edge ? total[(part.out.head + part.edge) % a.plan.inner] : Part{0.0f, 1.0f};
    }
    part.template write<LINES>(all, scale);
    if (part.has_edge)
        part.out.body[part.edge] =
            from_float<T>(SlabPart<T, FORWARD>::result(part.x_edge, part.d_edge, edge_all, 1.0f / edge_all.sum));
#if __CUDA_ARCH__ >= 900
    if (blocks > 1)
        cluster_wait(); /* other blocks have read this block's statistics */
#endif
}

struct Slabs {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true; /* rows: see why_not */
    struct Plan {
        Walk outer;
        int64_t slabs;
        SlabPlan slab;
    };

    /* BLOCK_PACKS: packs of one input per block, so few that several blocks share a multiprocessor and
     * one loads while another stores. Twice as many where a larger cluster costs more. Measured:
     * docs/perf/act.md. MOST_BYTES: shared memory of a block. */
    static constexpr int BLOCK_PACKS = 2048, MOST_BYTES = 192 << 10;
    /* With more shared memory than this a multiprocessor has one block, and idles while that waits. */
    static constexpr int ALONE_BYTES = 96 << 10;
    /* Gradients of aligned rows of up to this many bytes are read twice, the second time from L1 or L2: 4 to 8 % faster
     * than from shared memory (docs/perf/act.md). */
    static constexpr int64_t MOST_TWO_PASS = 36 << 10;

    static int greatest_common_divisor(int64_t a, int64_t b) {
        while (b > 0) {
            const int64_t rest = a % b;
            a = b;
            b = rest;
        }
        return static_cast<int>(a);
    }

    /* With fewer slabs of interleaved lines, a block each would leave multiprocessors idle. */
    static constexpr int64_t FEW_SLABS = 256;
    static bool are_few(const SlabViews &views) {
        return views.inner() > 1 && views.slabs() < FEW_SLABS;
    }
    /* Blocks per slab, so that few slabs keep all multiprocessors busy. */
    static int blocks_for_few(const SlabViews &views, int64_t packs) {
        constexpr int64_t LEAST_PACKS = 512; /* per block: less is not worth a cluster */
        return are_few(views) ? power_at_least(min(FEW_SLABS / views.slabs(), packs / LEAST_PACKS), 1, MOST_BLOCKS) : 1;
    }

    /* Fills the plan. It depends on the shape of a slab, with interleaved lines also on the number of
     * slabs; never on the device. False if a slab does not fit. */
    static bool cut(const SlabViews &views, bool forward, SlabPlan *plan) {
        const int width = 16 / static_cast<int>(rafter_dtype_bytes(views.view[OUT].dtype));
        const int64_t inner = views.inner(), elements = views.elements(), packs = max(elements / width, int64_t(1));
        const int inputs = forward || (views.is_expanded(DY) && !views.is_slab(DY)) ? 1 : 2;
        if (elements > INT32_MAX / 4)
            return false;
        const int64_t unit = inner / greatest_common_divisor(inner, width);
        if (unit > MOST_THREADS)
            return false;
        *plan = {};
        plan->elements = static_cast<int>(elements);
        plan->inner = static_cast<int>(inner);
        plan->expanded = !forward && inputs == 1;
        const bool few = are_few(views);
        const int least = blocks_for_few(views, packs);
        const int64_t most = inner == 1 || (unit <= 32 && !few) ? ROW_THREADS : unit <= 256 ? 512 : MOST_THREADS;
        const int64_t each = few ? 4 * least : inner > 1 && inputs == 1 ? 16 : 8; /* packs per thread and slab */
        const int64_t wanted = min(round_up(ceil_div<int64_t>(packs, each), int64_t(WARP)), most);
        plan->threads = static_cast<int>(max(wanted / unit, int64_t(1)) * unit);
        const bool twice = inputs == 1 && (inner > 1 || packs <= 2 * BLOCK_PACKS || packs > 8 * BLOCK_PACKS);
        const int64_t block = twice ? plan->threads > 512 ? 4 * BLOCK_PACKS : 2 * BLOCK_PACKS : BLOCK_PACKS;
        plan->blocks = max(power_at_least(ceil_div(packs, max(block, int64_t(plan->threads))), 1, MOST_BLOCKS), least);
        /* All blocks have the same number of packs, and begin with the same line. */
        plan->each = static_cast<int>(round_up(ceil_div(packs, int64_t(plan->blocks)), unit));
        plan->lanes = 1;
        while (plan->lanes < WARP && 2 * plan->lanes * inner <= plan->threads)
            plan->lanes *= 2;
        return SlabMemory(*plan, width, inputs).bytes <= MOST_BYTES;
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        SlabPlan plan;
        if (!cut(views, is_forward(call), &plan))
            return "slabs do not fit into the shared memory of a cluster";
        if (views.slabs() > INT32_MAX / plan.blocks)
            return "it counts blocks in 31 bits";
        if (plan.blocks == MOST_BLOCKS && views.inner() * rafter_dtype_bytes(call.out.dtype) >= 128 &&
            views.column_width() > 2)
            return "columns of this length are read once by persistent blocks";
        if (MOST_BYTES > device.shared_bytes)
            return "the GPU has too little shared memory";
        if (call.common.batch_invariant) {
            const int kept = is_forward(call) ? KEPT_PACKS<true> : KEPT_PACKS<false>;
            if (views.inner() != 1 || !views.slabs_are_packs())
                return "batch invariant, and lines are not rows of aligned packs, which are cut by their length alone";
            if (views.elements() * rafter_dtype_bytes(call.out.dtype) <= int64_t(16) * KEPT_THREADS * kept)
                return "batch invariant rows that fit into the registers of a block";
        }
        if (is_small(call) && views.inner() * rafter_dtype_bytes(call.out.dtype) >= 64 && views.column_width() > 2)
            return "aligned columns of a small tensor";
        if (!is_forward(call) && views.inner() == 1 && dim_is_contiguous(call) && !call.common.batch_invariant) {
            const bool is_long = views.elements() * rafter_dtype_bytes(call.out.dtype) > MOST_TWO_PASS || plan.expanded;
            if (views.slabs_are_packs() && !(is_large(call) && is_long))
                return "gradients of aligned rows, unless they are long and many, are faster in two passes";
            if (plan.each * 16 * (plan.expanded ? 1 : 2) > ALONE_BYTES)
                return "gradients of rows of which a multiprocessor holds one part are faster in two passes";
        }
        if (plan.blocks > 1 && device.compute_capability < 90)
            return "slabs do not fit into the shared memory of a block, and the GPU has no clusters";
        if (plan.blocks > PORTABLE_BLOCKS && device.compute_capability != 90)
            return "slabs need a cluster of 16 blocks, which is used on compute capability 9.0 only";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        plan->outer = walk_over(views.pointer, 0, views.dim());
        plan->slabs = views.slabs();
        cut(views, is_forward(call), &plan->slab);
        return 0;
    }

    template <typename T, bool FORWARD, bool ROW>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &plan) {
        const Call &call = ordered.call;
        const SlabArgs<T> args = {reinterpret_cast<const T *>(call.in.data), reinterpret_cast<const T *>(call.dy.data),
                                  reinterpret_cast<T *>(call.out.data), plan.outer, plan.slab};
        Launch how = {plan.slabs * plan.slab.blocks, round_up(plan.slab.threads, WARP)};
        how.shared = SlabMemory(plan.slab, WIDE<T>, FORWARD || plan.slab.expanded ? 1 : 2).bytes;
        how.cluster = plan.slab.blocks;
        const auto kernel = softmax_slab<T, FORWARD, ROW>;
        if (plan.slab.blocks > PORTABLE_BLOCKS)
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        ::launch(context, how, kernel, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const bool row = plan.slab.inner == 1;
            if (is_forward(call))
                row ? launch_as<T, true, true>(context, ordered, plan)
                    : launch_as<T, true, false>(context, ordered, plan);
            else
                row ? launch_as<T, false, true>(context, ordered, plan)
                    : launch_as<T, false, false>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_slab_in_cluster, Slabs)
