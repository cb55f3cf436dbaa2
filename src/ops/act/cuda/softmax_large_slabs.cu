/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of large slabs: interleaved lines ([outer, length, inner]) that no cluster holds. Three
 * kernels: statistics of every part of a slab, the statistics of whole slabs, and the results. If the
 * parts of a slab have few statistics, every block of the last kernel merges them for itself, and
 * there is no second kernel. The inputs are read twice; the last kernel begins with what the first
 * one has read last, which may still be in L2.
 *
 * A slab may begin anywhere. It is cut into packs of 16 bytes where those of the output are aligned;
 * what is left at either end are the edges, an element per thread. Thread t takes the packs t, t +
 * threads, ... Because threads * N is a multiple of `inner`, element j of all its packs belongs to the
 * same line. A block takes several pieces of a part in turn, and loads one while it works on another.
 * An input that is aligned differently is copied to shared memory by its own aligned packs, and
 * shifted when it is read from there.
 *
 * All elements that a block writes it has read before, and no other block needs them: the output may
 * be the input.
 */
#include "cuda/line_statistics.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int SLAB_THREADS = 256, MOST_THREADS = 576; /* per block, if possible; at most */
constexpr int AT_ONCE = 4;                            /* packs that are unpacked together */

struct SlabPlan {
    Walk outer;
    int64_t slabs, elements; /* elements: of a slab */
    int inner;               /* interleaved lines of a slab */
    int threads;             /* that take packs; a block has whole warps */
    int items;               /* packs per thread and input, at most */
    int blocks;              /* per slab */
    int lanes;               /* that merge the statistics of one column, a power of two */
    int input_bytes;         /* of a block's part of one input in shared memory */
    int element_bytes;
    bool aligned;  /* all slabs of all tensors are whole, aligned packs */
    bool expanded; /* dy is one number per slab */

    __host__ __device__ __forceinline__ int width() const { /* elements per pack */
        return 16 / element_bytes;
    }
    __host__ __device__ __forceinline__ int stage_bytes(bool forward) const {
        return input_bytes * (forward || expanded ? 1 : 2);
    }
};

template <typename T> struct SlabArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    const T *in_end, *dy_end; /* the end of each tensor's memory */
    SlabPlan plan;
};

/* ---- parts of slabs -------------------------------------------------------------------------- */

/* One input's part of a slab in shared memory, in packs where the source's are aligned. */
template <typename T, bool ALIGNED> struct Staged {
    static constexpr int N = WIDE<T>;

    /* Starts to copy the packs under `packs` packs of the output, of which the first begins at `from`.
     * Returns how far they lie from aligned packs. A pack that reaches out of the tensor's memory is
     * copied element by element. */
    DEVICE static int fill(char *memory, const T *from, int packs, int threads, const T *begin, const T *end) {
        Pack<T, N> *const to = reinterpret_cast<Pack<T, N> *>(memory);
        const int shift = ALIGNED ? 0 : offset_in_pack(from), slots = packs > 0 && shift > 0 ? packs + 1 : packs;
        from -= shift;
        for (int i = threadIdx.x; i < slots; i += AT_ONCE * threads)
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int slot = i + u * threads;
                const T *const p = from + slot * N;
                if (slot >= slots)
                    break;
                if (ALIGNED || (p >= begin && p + N <= end)) {
                    copy_async(to + slot, p);
                } else {
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (p + j >= begin && p + j < end)
                            to[slot].v[j] = p[j];
                }
            }
        return shift;
    }
    DEVICE static Pack<T, N> read(const char *memory, int i, int shift) {
        const uint4 *const packs = reinterpret_cast<const uint4 *>(memory);
        uint4 pack = packs[i];
        if (!ALIGNED && shift != 0)
            pack = shifted(pack, packs[i + 1], shift * static_cast<int>(sizeof(T)));
        return reinterpret_cast<const Pack<T, N> &>(pack);
    }
};

/* A piece of a slab. */
template <typename T, bool FORWARD, bool ALIGNED> struct SlabPiece {
    static constexpr int N = WIDE<T>;
    typedef Staged<T, ALIGNED> Input;
    T *out;           /* the first pack of the block */
    int packs;        /* of the block */
    int shifts;       /* of x from aligned packs, and 16 times that of dy */
    int head, edges;  /* elements before the first pack of the slab; and at both ends, if this block has them */
    T *edge;          /* of the thread in the output, or NULL */
    int edge_column;  /* its line */
    T x_edge, d_edge; /* the elements under it */
    T upstream;       /* dy, if expanded */

    /* Starts to load. The caller ends the group of copies, and waits for it with all threads. */
    DEVICE void load(const SlabArgs<T> &a, int64_t slab, unsigned rank, char *stage) {
        const SlabPlan &plan = a.plan;
        int64_t at[3];
        plan.outer.offsets(slab, at);
        const AlignedSpan<T> span(a.out + at[OUT], plan.elements);
        const int most = plan.threads * plan.items, thread = threadIdx.x;
        const int64_t first = (int64_t)rank * most;
        packs = static_cast<int>(max(min(span.packs - first, int64_t(most)), int64_t(0)));
        out = span.body + first * N;
        const T *const x = a.in + at[IN] + span.head, *const d = a.dy + at[DY];
        const bool has_dy = !FORWARD && !plan.expanded;
        shifts = 0;
        if (thread < plan.threads) {
            shifts = Input::fill(stage, x + first * N, packs, plan.threads, a.in, a.in_end);
            if (has_dy)
                shifts += 16 * Input::fill(stage + plan.input_bytes, d + span.head + first * N, packs, plan.threads,
                                           a.dy, a.dy_end);
        }
        if (!FORWARD && plan.expanded)
            upstream = *d;
        edge = NULL;
        head = span.head;
        edges = !ALIGNED && rank == 0 ? span.edges : 0;
        if (!ALIGNED && thread < edges) {
            const int64_t offset = span.edge(thread);
            edge = span.body + offset;
            edge_column = static_cast<int>((span.head + offset) % plan.inner);
            x_edge = x[offset];
            if (has_dy)
                d_edge = d[span.head + offset];
        }
    }
    DEVICE bool has(const SlabPlan &plan, int k) const {
        return (int)threadIdx.x < plan.threads && (int)threadIdx.x + k * plan.threads < packs;
    }
    DEVICE Pack<T, N> read_in(const SlabPlan &plan, const char *stage, int k) const {
        return Input::read(stage, (int)threadIdx.x + k * plan.threads, shifts & 15);
    }
    DEVICE void read_dy(const SlabPlan &plan, const char *stage, int k, float (&d)[N]) const {
        if (plan.expanded) {
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = to_float(upstream);
        } else {
            unpack(Input::read(stage + plan.input_bytes, (int)threadIdx.x + k * plan.threads, shifts >> 4), d);
        }
    }
    DEVICE Part edge_part(const SlabPlan &plan) const {
        return part_of<FORWARD>(to_float(x_edge), FORWARD ? 0.0f : to_float(plan.expanded ? upstream : d_edge));
    }

    /* Adds the thread's packs: element j of each belongs to the same line. */
    DEVICE void add_to(Statistics<N, FORWARD, 1> &mine, const SlabPlan &plan, const char *stage) const {
        for (int base = 0; base < plan.items; base += AT_ONCE) {
            Pack<T, N> x[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                x[u] = has(plan, base + u) ? read_in(plan, stage, base + u) : all_of<T, N>(FORWARD ? -INFINITY : 0.0f);
            if constexpr (FORWARD) {
                static_assert(AT_ONCE == 4, "");
                cover<false, N>(mine, 0, max_of(max_of(x[0], x[1]), max_of(x[2], x[3])));
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                float v[N], d[N];
                unpack(x[u], v);
                if (!FORWARD) {
                    if (!has(plan, base + u))
                        break;
                    read_dy(plan, stage, base + u, d);
                }
#pragma unroll
                for (int j = 0; j < N; j++) {
                    float &sum = mine.sum[0][j];
                    sum = FORWARD ? sum + exp2_fast((v[j] - mine.max[j]) * LOG2E) : fmaf(v[j], d[j], sum);
                }
            }
        }
    }

    DEVICE void write(const SlabPlan &plan, const char *stage, const Part (&all)[N], Part edge_all) const {
        const auto result = [](float x, float d, Part line, float scale) {
            return FORWARD ? exp_as<T>(x - line.max) * scale : x * (d - line.sum);
        };
        float scale[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            scale[j] = 1.0f / all[j].sum;
#pragma unroll 2
        for (int k = 0; k < plan.items; k++) {
            if (!has(plan, k))
                break;
            float v[N], d[N] = {};
            unpack(read_in(plan, stage, k), v);
            if (!FORWARD)
                read_dy(plan, stage, k, d);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = result(v[j], d[j], all[j], scale[j]);
            store_once(out + ((int)threadIdx.x + k * plan.threads) * N, packed<T, N>(v));
        }
        if (!ALIGNED && edge)
            *edge = from_float<T>(result(to_float(x_edge), FORWARD ? 0.0f : to_float(plan.expanded ? upstream : d_edge),
                                         edge_all, 1.0f / edge_all.sum));
    }
};

/* ---- lines ------------------------------------------------------------------------------------ */

struct Edge {
    Part part;
    int column;
};
constexpr int MOST_EDGES = 14;

/* In shared memory. */
struct ColumnMemory {
    Edge *edges;
    Part *scratch; /* per warp */
    Part *partial; /* of every element of the threads' packs */

    static constexpr int EDGE_BYTES = 256, SCRATCH_BYTES = 256;
    DEVICE explicit ColumnMemory(char *memory)
        : edges(reinterpret_cast<Edge *>(memory)), scratch(reinterpret_cast<Part *>(memory + EDGE_BYTES)),
          partial(reinterpret_cast<Part *>(memory + EDGE_BYTES + SCRATCH_BYTES)) {
    }
    static int bytes(const SlabPlan &plan) {
        return round_up(EDGE_BYTES + SCRATCH_BYTES + plan.threads * plan.width() * (int)sizeof(Part), 128);
    }
};
static_assert(MOST_EDGES * sizeof(Edge) <= ColumnMemory::EDGE_BYTES, "");

/* The statistics of the block's part of every line, from those of the threads. All threads call
 * this. */
template <typename T, bool FORWARD, bool ALIGNED>
DEVICE void merge_columns(const SlabPiece<T, FORWARD, ALIGNED> &part, const Statistics<WIDE<T>, FORWARD, 1> &mine,
                          const SlabPlan &plan, const ColumnMemory &memory, Part *own) {
    constexpr int N = WIDE<T>;
    const int thread = threadIdx.x;
    if (thread < plan.threads)
#pragma unroll
        for (int j = 0; j < N; j++)
            memory.partial[thread * N + j] = {mine.max[j], mine.sum[0][j]};
    if (!ALIGNED && part.edge)
        memory.edges[thread] = {part.edge_part(plan), part.edge_column};
    __syncthreads();
    const auto edges_of = [&](int line, int lane, int lanes) {
        Part all = no_part();
        for (int e = lane; e < part.edges; e += lanes)
            if (memory.edges[e].column == line)
                all = merged<FORWARD>(all, memory.edges[e].part);
        return all;
    };
    merge_lines<FORWARD>(memory.partial, plan.threads * N / plan.inner, plan.inner, part.head % plan.inner, plan.lanes,
                         memory.scratch, edges_of, [&](int line, Part all) { own[line] = all; });
}

/* The statistics of the line of each element of a thread's packs, and of its edge. total: of all
 * lines. */
template <int N> struct ThreadLines {
    Part all[N], edge;

    template <class Piece> DEVICE ThreadLines(const Piece &piece, int inner, const Part *total) {
        int column = (piece.head + (int)threadIdx.x * N) % inner;
#pragma unroll
        for (int j = 0; j < N; j++) {
            all[j] = total[column];
            column = column + 1 == inner ? 0 : column + 1;
        }
        edge = piece.edge ? total[piece.edge_column] : all[0];
    }
};

/* ---- kernels ---------------------------------------------------------------------------------- */

constexpr int STAGES = 2, PIECE_PACKS = 1024; /* of all inputs of a piece */
/* Bytes of a slab, of one input or of two, and of all inputs of a small tensor: smaller ones are
 * faster in clusters. docs/perf/act.md */
constexpr int64_t LEAST_BYTES = 850 << 10, LEAST_OF_TWO = 3 << 19, LEAST_OF_SMALL = 1 << 20;
constexpr int MOST_PIECES = 16;

/* The pieces of a block, counted from the first one of the slab. In the plan, `blocks` counts parts. */
struct Pieces {
    int64_t slab;
    int part, begin, end;

    DEVICE Pieces(const SlabPlan &plan, int each, unsigned block) {
        const int64_t all = ceil_div<int64_t>(plan.elements, (int64_t)plan.threads * plan.items * plan.width());
        slab = block / plan.blocks;
        part = static_cast<int>(block - slab * plan.blocks);
        begin = part * each;
        end = static_cast<int>(min(int64_t(begin + each), max(all, int64_t(1))));
    }
};

/* First kernel. parts: [slab][part][line]. `each`: pieces of a block. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    slab_statistics(const __grid_constant__ SlabArgs<T> a, int each, int column_bytes, Part *parts) {
    extern __shared__ uint4 statistics_memory[];
    char *const memory = reinterpret_cast<char *>(statistics_memory), *const stages = memory + column_bytes;
    const SlabPlan &plan = a.plan;
    const Pieces pieces(plan, each, blockIdx.x);
    const auto stage = [&](int i) { return stages + i % STAGES * plan.stage_bytes(FORWARD); };
    SlabPiece<T, FORWARD, ALIGNED> piece, next, first;
    Statistics<WIDE<T>, FORWARD, 1> mine;
    mine.clear();
    wait_for_previous_kernel();
    start_next_kernel();
    next.load(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    first = next; /* it has the edges */
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been read */
        if (i + 1 < pieces.end)
            next.load(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.add_to(mine, plan, stage(i));
    }
    Part *const to = parts + (int64_t)blockIdx.x * plan.inner;
    merge_columns<T, FORWARD, ALIGNED>(first, mine, plan, ColumnMemory(memory), to);
}

/* The second kernel's work for all lines of one slab, by a block of the third kernel. All threads call
 * this. */
template <bool FORWARD> DEVICE void merge_slab(const SlabPlan &plan, const Part *parts, Part *totals) {
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % plan.lanes;
    for (int base = 0; base < plan.inner; base += threads / plan.lanes) {
        const int column = base + thread / plan.lanes;
        Part all =
            merge_some<FORWARD>(parts + column, lane, plan.lanes, column < plan.inner ? plan.blocks : 0, plan.inner);
        all = merge_lanes<FORWARD>(all, plan.lanes);
        if (column < plan.inner && lane == 0)
            totals[column] = all;
    }
    __syncthreads();
}

/* Third kernel. total_bytes: for the statistics of whole lines in shared memory; 0: the second kernel
 * has written them to `totals`. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    slab_results(const __grid_constant__ SlabArgs<T> a, int each, int total_bytes, const Part *parts,
                 const Part *totals) {
    extern __shared__ uint4 results_memory[];
    char *const stages = reinterpret_cast<char *>(results_memory) + total_bytes;
    const SlabPlan &plan = a.plan;
    const Pieces pieces(plan, each, gridDim.x - 1 - blockIdx.x); /* in the reverse order of the first kernel */
    const auto stage = [&](int i) { return stages + i % STAGES * plan.stage_bytes(FORWARD); };
    SlabPiece<T, FORWARD, ALIGNED> piece, next;
    next.load(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    wait_for_previous_kernel();
    const Part *total = totals + pieces.slab * plan.inner;
    if (total_bytes > 0) {
        Part *const own = reinterpret_cast<Part *>(results_memory);
        merge_slab<FORWARD>(plan, parts + pieces.slab * plan.blocks * plan.inner, own);
        total = own;
    }
    const ThreadLines<WIDE<T>> lines(next, plan.inner, total);
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been written */
        if (i + 1 < pieces.end)
            next.load(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.write(plan, stage(i), lines.all, lines.edge);
    }
}

/* ---- host side ------------------------------------------------------------------------------- */

int64_t greatest_common_divisor(int64_t a, int64_t b) {
    while (b > 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The plan of `views` but for blocks and items. False if no block has as many threads as interleaved
 * lines take. */
bool plan_slabs(const SlabViews &views, bool forward, SlabPlan *plan) {
    const int bytes = static_cast<int>(rafter_dtype_bytes(views.view[OUT].dtype));
    const int64_t inner = views.inner(), unit = inner / greatest_common_divisor(inner, 16 / bytes);
    if (unit > MOST_THREADS)
        return false;
    *plan = {};
    plan->outer = walk_over(views.pointer, 0, views.dim());
    plan->slabs = views.slabs();
    plan->elements = views.elements();
    plan->inner = static_cast<int>(inner);
    plan->element_bytes = bytes;
    plan->expanded = !forward && !views.is_slab(DY);
    plan->aligned = views.slabs_are_packs();
    plan->threads = static_cast<int>((unit > SLAB_THREADS ? MOST_THREADS : SLAB_THREADS) / unit * unit);
    plan->lanes = 1;
    while (plan->lanes < WARP && 2 * plan->lanes * inner <= plan->threads)
        plan->lanes *= 2;
    return true;
}

template <typename T> SlabArgs<T> slab_args(const act_call &call, const SlabPlan &plan) {
    const auto end = [](const rafter_view &view) {
        return view.data ? reinterpret_cast<const T *>(view.data + rafter_span_bytes(&view)) : NULL;
    };
    return {reinterpret_cast<const T *>(call.in.data),
            reinterpret_cast<const T *>(call.dy.data),
            reinterpret_cast<T *>(call.out.data),
            end(call.in),
            end(call.dy),
            plan};
}

/* Calls f(zero, forward, aligned), where zero has the type of the elements and the others are
 * constants. */
template <class F> void for_slabs(const act_call &call, const SlabPlan &plan, F f) {
    for_dtype(call.out.dtype, [&](auto zero) {
        typedef std::true_type Yes;
        typedef std::false_type No;
        if (is_forward(call))
            plan.aligned ? f(zero, Yes(), Yes()) : f(zero, Yes(), No());
        else
            plan.aligned ? f(zero, No(), Yes()) : f(zero, No(), No());
    });
}

struct LargeSlabs {
    typedef act_call Call;
    struct Plan {
        SlabPlan slab;
        int each;   /* pieces of a block */
        bool fused; /* blocks of the last kernel merge parts */
    };
    /* Blocks of a kernel that run at the same time: as many pieces per block as that takes. */
    static int blocks_at_once(const SlabPlan &slab) {
        return 128 * (slab.threads > SLAB_THREADS ? 2 : 4);
    }

    static bool cut(const SlabViews &views, bool forward, Plan *plan) {
        SlabPlan &slab = plan->slab;
        if (!plan_slabs(views, forward, &slab))
            return false;
        const int inputs = forward || slab.expanded ? 1 : 2;
        slab.items = max(PIECE_PACKS / (slab.threads * inputs), slab.threads > SLAB_THREADS ? 4 / inputs : 1);
        slab.input_bytes = round_up((slab.items * slab.threads + 1) * 16, 128);
        const int64_t pieces = ceil_div(slab.elements, int64_t(slab.threads) * slab.items * slab.width());
        const int64_t most = min(ceil_div(pieces * slab.slabs, int64_t(blocks_at_once(slab))), int64_t(MOST_PIECES));
        const int64_t blocks = ceil_div(pieces, most), each = ceil_div(pieces, blocks);
        const int64_t part_bytes = blocks * slab.inner * (int64_t)sizeof(Part);
        plan->each = static_cast<int>(each);
        plan->fused = part_bytes <= max(int64_t(16) << 10, each * PIECE_PACKS * 16 / 8);
        slab.blocks = static_cast<int>(min(ceil_div(pieces, each), int64_t(INT32_MAX)));
        return pieces < INT32_MAX;
    }
    static int column_bytes(const SlabPlan &slab) {
        return ColumnMemory::bytes(slab);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        Plan plan;
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        const int64_t bytes = rafter_dtype_bytes(call.out.dtype), across = views.inner() * bytes;
        if (views.inner() == 1)
            return "lines are not interleaved";
        const bool narrow = is_narrow(call, views);
        if (across >= 64 && views.column_width() > 2 && !narrow)
            return "columns are aligned packs";
        if (!cut(views, is_forward(call), &plan))
            return "a block has too few threads for the interleaved lines";
        const int inputs = is_forward(call) || plan.slab.expanded ? 1 : 2;
        const int64_t least = is_small(call) || narrow      ? LEAST_OF_SMALL
                              : inputs == 1 || across >= 64 ? LEAST_BYTES
                                                            : LEAST_OF_TWO;
        if (views.elements() * bytes * inputs < least)
            return "slabs fit into the shared memory of a cluster";
        if (views.slabs() * views.inner() > INT32_MAX / 64)
            return "it counts lines in 25 bits";
        if (column_bytes(plan.slab) + STAGES * plan.slab.stage_bytes(is_forward(call)) > device.shared_bytes)
            return "the GPU has too little shared memory";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        cut(SlabViews(ordered.call), is_forward(call), plan);
        return (size_t)plan->slab.slabs * (plan->slab.blocks + 1) * plan->slab.inner * sizeof(Part);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        const SlabPlan &slab = plan.slab;
        const int64_t lines = slab.slabs * slab.inner;
        Part *const totals = reinterpret_cast<Part *>(workspace), *const parts = totals + lines;
        for_slabs(call, slab, [&](auto zero, auto forward, auto aligned) {
            typedef decltype(zero) T;
            const SlabArgs<T> args = slab_args<T>(ordered.call, slab);
            const size_t stages = STAGES * slab.stage_bytes(forward);
            Launch how = {slab.slabs * slab.blocks, round_up(slab.threads, WARP), column_bytes(slab) + stages};
            how.overlaps = ordered.copied;
            ::launch(context, how, slab_statistics<T, forward, aligned>, args, plan.each, column_bytes(slab), parts);
            how.overlaps = true;
            if (!plan.fused)
                launch_merge<forward>(context, parts, totals, slab.slabs, slab.inner, slab.blocks);
            const int total_bytes = plan.fused ? round_up(slab.inner * (int)sizeof(Part), 128) : 0;
            how.shared = total_bytes + stages;
            ::launch(context, how, slab_results<T, forward, aligned>, args, plan.each, total_bytes, parts, totals);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_large_slabs, LargeSlabs)
