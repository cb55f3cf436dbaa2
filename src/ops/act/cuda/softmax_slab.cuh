/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs of softmax in shared memory. A slab is one contiguous row, or `inner` interleaved ones
 * ([outer, length, inner]); it may begin anywhere.
 *
 * A slab is cut into packs of 16 bytes where those of the output are aligned; what is left at either
 * end are the edges, an element per thread. Thread t takes the packs t, t + threads, ... Because
 * threads * N is a multiple of `inner`, element j of all its packs belongs to the same line. An
 * input that is aligned differently is copied to shared memory by its own aligned packs, and shifted
 * when it is read from there.
 *
 * All elements that a block writes it has read before, and no other block needs them: the output may
 * be the input.
 */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_SLAB_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_SLAB_CUH

#include <float.h>

#include "cuda/cluster.cuh"
#include "cuda/line_statistics.cuh"
#include "cuda/row_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

/* Threads per block: of a row; of interleaved lines, which take twice as many registers, if possible,
 * and at most. */
constexpr int ROW_THREADS = 512, COLUMN_THREADS = 256, MOST_COLUMN_THREADS = 576;
constexpr int AT_ONCE = 4; /* packs that are unpacked together */

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

/* ---- statistics ------------------------------------------------------------------------------ */

/* Of a part of a line. Forward: the maximum and the sum of e^(x - max). Backward: the sum of y dy; max
 * is not used. The maximum starts from the lowest finite number: a line of all -inf has sum 0, and its
 * softmax is 0 / 0 = NaN, as in PyTorch. */
struct Part {
    float max, sum;
};
DEVICE Part no_part() {
    return {-FLT_MAX, 0.0f};
}

template <bool FORWARD> DEVICE Part merged(Part a, Part b) {
    if (!FORWARD)
        return {a.max, a.sum + b.sum};
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp2_fast((a.max - max) * LOG2E) + b.sum * exp2_fast((b.max - max) * LOG2E)};
}

/* Over `lanes` neighbouring lanes, a power of two; all get the result. */
template <bool FORWARD> DEVICE Part merge_lanes(Part p, int lanes) {
    if (FORWARD) {
        float max = p.max;
        for (int step = lanes / 2; step > 0; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        p = {max, p.sum * exp2_fast((p.max - max) * LOG2E)};
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        p.sum += __shfl_xor_sync(~0u, p.sum, step);
    return p;
}
template <bool FORWARD> DEVICE Part merge_warp(Part p) {
    if (FORWARD) {
        const float max = warp_max(p.max);
        p = {max, p.sum * exp2_fast((p.max - max) * LOG2E)};
    }
    return {p.max, warp_sum(p.sum)};
}

/* Of one element. */
template <bool FORWARD> DEVICE Part part_of(float x, float d) {
    if (!FORWARD)
        return {-FLT_MAX, x * d};
    const float max = fmaxf(x, -FLT_MAX);
    return {max, exp2_fast((x - max) * LOG2E)};
}

/* e^(x - max) for a sum: unlike ExpFrom, subnormal results do not matter. */
template <typename T> struct TermFrom {
    float max;
    DEVICE float operator()(float x) const {
        return exp2_fast((x - max) * LOG2E);
    }
};
template <> struct TermFrom<fp16> : ExpFrom<fp16> { using ExpFrom<fp16>::ExpFrom; };
template <> struct TermFrom<bf16> : ExpFrom<bf16> { using ExpFrom<bf16>::ExpFrom; };

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

/* A block's part of a slab. LINES: 1 for rows, else N. */
template <typename T, bool FORWARD, bool ALIGNED, int LINES> struct SlabPart {
    static constexpr int N = WIDE<T>, COUNT = LINES;
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
        if (LINES == 1 || thread < plan.threads) {
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
            if (LINES > 1)
                edge_column = static_cast<int>((span.head + offset) % plan.inner);
            x_edge = x[offset];
            if (has_dy)
                d_edge = d[span.head + offset];
        }
    }
    DEVICE bool has(const SlabPlan &plan, int k) const {
        return (LINES == 1 || (int)threadIdx.x < plan.threads) && (int)threadIdx.x + k * plan.threads < packs;
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

    /* Adds the thread's packs, and the edge of a row. */
    DEVICE void add_to(Statistics<LINES, FORWARD, 1> &mine, const SlabPlan &plan, const char *stage) const {
        if (!ALIGNED && LINES == 1 && edge) {
            const Part all = merged<FORWARD>({mine.max[0], mine.sum[0][0]}, edge_part(plan));
            mine.max[0] = all.max;
            mine.sum[0][0] = all.sum;
        }
        for (int base = 0; base < plan.items; base += AT_ONCE) {
            Pack<T, N> x[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++)
                x[u] = has(plan, base + u) ? read_in(plan, stage, base + u) : all_of<T, N>(FORWARD ? -INFINITY : 0.0f);
            if constexpr (FORWARD) {
                static_assert(AT_ONCE == 4, "");
                cover<false, LINES>(mine, 0, max_of(max_of(x[0], x[1]), max_of(x[2], x[3])));
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
                    float &sum = mine.sum[0][j % LINES];
                    sum = FORWARD ? sum + TermFrom<T>{mine.max[j % LINES]}(v[j]) : fmaf(v[j], d[j], sum);
                }
            }
        }
    }

    DEVICE void write(const SlabPlan &plan, const char *stage, const Part (&all)[LINES], Part edge_all) const {
        const auto result = [](float x, float d, Part line, float scale) {
            return FORWARD ? ExpFrom<T>(line.max)(x) * scale : x * (d - line.sum);
        };
        float scale[LINES];
#pragma unroll
        for (int j = 0; j < LINES; j++)
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
                v[j] = result(v[j], d[j], all[j % LINES], scale[j % LINES]);
            store_once(out + ((int)threadIdx.x + k * plan.threads) * N, packed<T, N>(v));
        }
        if (!ALIGNED && edge)
            *edge = from_float<T>(result(to_float(x_edge), FORWARD ? 0.0f : to_float(plan.expanded ? upstream : d_edge),
                                         edge_all, 1.0f / edge_all.sum));
    }
};

/* ---- interleaved lines ----------------------------------------------------------------------- */

struct Edge {
    Part part;
    int column;
};
constexpr int MOST_EDGES = 14;

/* In shared memory, for interleaved lines. */
struct ColumnMemory {
    Edge *edges;
    Part *partial; /* of every element of the threads' packs */

    static constexpr int EDGE_BYTES = 256;
    DEVICE explicit ColumnMemory(char *memory)
        : edges(reinterpret_cast<Edge *>(memory)), partial(reinterpret_cast<Part *>(memory + EDGE_BYTES)) {
    }
    static int bytes(const SlabPlan &plan) {
        return round_up(EDGE_BYTES + plan.threads * plan.width() * (int)sizeof(Part), 128);
    }
};
static_assert(MOST_EDGES * sizeof(Edge) <= ColumnMemory::EDGE_BYTES, "");

/* The statistics of the block's part of every line, from those of the threads. All threads call
 * this; a barrier follows before `own` is read. */
template <typename T, bool FORWARD, bool ALIGNED>
DEVICE void merge_columns(const SlabPart<T, FORWARD, ALIGNED, WIDE<T>> &part,
                          const Statistics<WIDE<T>, FORWARD, 1> &mine, const SlabPlan &plan, const ColumnMemory &memory,
                          Part *own) {
    constexpr int N = WIDE<T>;
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % plan.lanes;
    if (thread < plan.threads)
#pragma unroll
        for (int j = 0; j < N; j++)
            memory.partial[thread * N + j] = {mine.max[j], mine.sum[0][j]};
    if (!ALIGNED && part.edge)
        memory.edges[thread] = {part.edge_part(plan), part.edge_column};
    __syncthreads();
    const int skew = part.head % plan.inner, terms = plan.threads * N / plan.inner;
    for (int base = 0; base < plan.inner; base += threads / plan.lanes) {
        const int column = base + thread / plan.lanes;
        Part all = no_part();
        if (column < plan.inner) {
            const Part *const from = memory.partial + (column < skew ? column + plan.inner : column) - skew;
            for (int m = lane; m < terms; m += plan.lanes)
                all = merged<FORWARD>(all, from[m * plan.inner]);
            for (int e = lane; e < part.edges; e += plan.lanes)
                if (memory.edges[e].column == column)
                    all = merged<FORWARD>(all, memory.edges[e].part);
        }
        all = merge_lanes<FORWARD>(all, plan.lanes);
        if (column < plan.inner && lane == 0)
            own[column] = all;
    }
}

/* The statistics of the line of each element of a thread's packs, modulo LINES, and of its edge.
 * total: of all lines. */
template <int LINES> struct ThreadLines {
    Part all[LINES], edge;

    template <class Slab> DEVICE ThreadLines(const Slab &slab, int inner, const Part *total) {
        int column = LINES == 1 ? 0 : (slab.head + (int)threadIdx.x * LINES) % inner;
#pragma unroll
        for (int j = 0; j < LINES; j++) {
            all[j] = total[column];
            column = column + 1 == inner ? 0 : column + 1;
        }
        edge = all[0];
        if (LINES > 1 && slab.edge)
            edge = total[slab.edge_column];
    }
};

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
    if (unit > MOST_COLUMN_THREADS)
        return false;
    *plan = {};
    plan->outer = walk_over(views.pointer, 0, views.dim());
    plan->slabs = views.slabs();
    plan->elements = views.elements();
    plan->inner = static_cast<int>(inner);
    plan->element_bytes = bytes;
    plan->expanded = !forward && !views.is_slab(DY);
    plan->aligned = views.slabs_are_packs();
    const int64_t most = inner == 1 ? ROW_THREADS : unit > COLUMN_THREADS ? MOST_COLUMN_THREADS : COLUMN_THREADS;
    plan->threads = static_cast<int>(most / unit * unit);
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

/* Calls f(zero, forward, aligned, row), where zero has the type of the elements and the others are
 * constants. */
template <class F> void for_slabs(const act_call &call, const SlabPlan &plan, F f) {
    for_dtype(call.out.dtype, [&](auto zero) {
        typedef std::true_type Yes;
        typedef std::false_type No;
        const auto with = [&](auto forward) {
            const bool row = plan.inner == 1;
            plan.aligned ? row ? f(zero, forward, Yes(), Yes()) : f(zero, forward, Yes(), No())
            : row ? f(zero, forward, No(), Yes())
                         : f(zero, forward, No(), No());
        };
        is_forward(call) ? with(Yes()) : with(No());
    });
}

} // namespace

#endif
