/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces of slabs of interleaved lines, for softmax_slab_two_pass: [outer, length, inner], where length
 * and inner have no gaps. A block loads a piece into shared memory, and then adds it to the
 * statistics of its lines or writes its results.
 *
 * A slab may begin anywhere. It is cut into packs of 16 bytes that are aligned in the output; the
 * elements before the first and after the last pack are the edges, which take a thread each. Thread
 * t takes the packs t, t + threads, ... Because threads * N is a multiple of `inner`, element j of
 * all its packs belongs to the same line. An input with another alignment is copied to shared
 * memory by its own aligned packs, and shifted when it is read from there.
 */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_PIECES_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_PIECES_CUH

#include "cuda/line_statistics.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

/* The L2 policy of the copies of an input: none; keep it, because it is read again soon; or evict
 * it first, because it is not. */
enum Hint { NO_HINT, KEEP, DROP };

constexpr int SLAB_THREADS = 256, MOST_THREADS = 576; /* per block: usually; at most */
constexpr int AT_ONCE = 4;                            /* packs that are unpacked together */

struct SlabPlan {
    Walk outer;
    int64_t slabs, elements; /* elements: of a slab */
    int inner;               /* interleaved lines of a slab */
    int threads;             /* that take packs; a block has them rounded up to whole warps */
    int items;               /* packs per thread and input, at most */
    int blocks;              /* per slab */
    int lanes;               /* that merge the statistics of one line, a power of two */
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

/* One input's piece of a slab in shared memory, by the aligned packs of the input. */
template <typename T, bool ALIGNED> struct Staged {
    static constexpr int N = WIDE<T>;

    /* Starts to copy the input of `packs` packs of the output; the input of the first one begins at
     * `from`. Returns the offset of `from` in its aligned pack, in elements. An aligned pack that
     * reaches outside the tensor [begin, end) is copied element by element. */
    template <Hint HINT>
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
                    if constexpr (HINT == NO_HINT)
                        copy_async(to + slot, p);
                    else
                        copy_async(to + slot, p, HINT == KEEP ? l2_evict_last() : l2_evict_first());
                } else {
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (p + j >= begin && p + j < end)
                            to[slot].v[j] = p[j];
                }
            }
        return shift;
    }
    /* The input of pack i of the output. `shift`: what `fill` returned. */
    DEVICE static Pack<T, N> read(const char *memory, int i, int shift) {
        const uint4 *const packs = reinterpret_cast<const uint4 *>(memory);
        uint4 pack = packs[i];
        if (!ALIGNED && shift != 0)
            pack = shifted(pack, packs[i + 1], shift * static_cast<int>(sizeof(T)));
        return reinterpret_cast<const Pack<T, N> &>(pack);
    }
};

/* A piece of a slab, and what a thread has of it. */
template <typename T, bool FORWARD, bool ALIGNED> struct SlabPiece {
    static constexpr int N = WIDE<T>;
    typedef Staged<T, ALIGNED> Input;
    T *out;           /* the piece's first pack in the output */
    int packs;        /* of the piece */
    int shifts;       /* offsets from Staged::fill: that of x, and 16 times that of dy */
    int head, edges;  /* elements before the first pack of the slab; and at both ends, if this piece has them */
    T *edge;          /* the thread's edge element in the output, or NULL */
    int edge_column;  /* its line */
    T x_edge, d_edge; /* the inputs of that element */
    T upstream;       /* dy, if expanded */

    /* Starts to load piece number `rank` of the slab. The caller ends the group of copies, and waits
     * for it with all threads. */
    template <Hint HINT> DEVICE void load(const SlabArgs<T> &a, int64_t slab, unsigned rank, char *stage) {
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
            shifts = Input::template fill<HINT>(stage, x + first * N, packs, plan.threads, a.in, a.in_end);
            if (has_dy)
                shifts += 16 * Input::template fill<HINT>(stage + plan.input_bytes, d + span.head + first * N, packs,
                                                          plan.threads, a.dy, a.dy_end);
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

    /* Adds the thread's packs to its statistics: element j of each pack belongs to the same line. */
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

    template <Hint HINT>
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
            T *const to = out + ((int)threadIdx.x + k * plan.threads) * N;
            if constexpr (HINT == NO_HINT)
                store_once(to, packed<T, N>(v));
            else
                store_with(to, packed<T, N>(v), l2_evict_first());
        }
        if (!ALIGNED && edge)
            *edge = from_float<T>(result(to_float(x_edge), FORWARD ? 0.0f : to_float(plan.expanded ? upstream : d_edge),
                                         edge_all, 1.0f / edge_all.sum));
    }
};

/* ---- lines ------------------------------------------------------------------------------------ */

/* The statistics of an edge element, and its line. */
struct Edge {
    Part part;
    int column;
};
constexpr int MOST_EDGES = 14; /* of a slab: less than a pack of 16-bit elements at either end */

/* What merge_columns needs in shared memory. */
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

/* Merges the statistics `mine` of all threads and those of the edges, to `own`: [line]. All threads
 * call this. */
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

/* For each element of a thread's packs, and for its edge element: the statistics of its line. total:
 * those of all lines of the slab. */
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

} // namespace

#endif
