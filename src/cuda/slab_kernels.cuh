/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops over tiles of slabs (slab_tiles.cuh), for ops that reduce rows: slab_statistics, which also finishes the
 * rows, and slab_gradients, which writes the gradient element by element. An Op of slab_statistics says what the
 * statistics are. `valid`, `column` and `step`: as in row_stream.cuh. -inf fills elements that do not exist:
 *
 *     typedef ... Stats;      statistics of some elements of a row; can be merged
 *     typedef ... Row;        what is loaded of a row before its statistics are known
 *     Stats none()
 *     void add(Stats &, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step)
 *     void add_lines(Stats (&)[N], const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step)
 *                             the same where element j of each pack belongs to row j
 *     Stats merge(Stats, Stats), Stats merge_lanes(Stats, int lanes)
 *     Stats load(const Stats *)    loads statistics that another block has stored
 *     void begin()            called after the first loads: waits for the previous kernel
 *     Row no_row(), Row load_row(int64_t row, const T *first), void finish(const Row &, const Stats &)
 *
 * An Op of slab_gradients has
 *
 *     bool LABELS             whether a row may have one element, at its label, whose gradient is at_label()
 *     struct Line { Line(op, row); Pack<T, N> of(op, pack, column) }
 *     void begin(), T of_one(int64_t row, T x, int64_t column)
 *     int64_t label(int64_t row), T at_label(int64_t row)    label: -1 if none
 */
#ifndef RAFTER_CUDA_SLAB_KERNELS_CUH
#define RAFTER_CUDA_SLAB_KERNELS_CUH

#include "cuda/unaligned_pack.cuh"
#include "cuda/slab_tiles.cuh"

/* ---- statistics ------------------------------------------------------------------------------ */

/* The edge elements of a dense slab, in shared memory: `head` before the first pack, `edges` in all. */
template <typename T> struct SlabEdges {
    T element[2 * WIDE<T>];
    int head, edges;
};

/* Where the statistics of a block are in shared memory. */
template <class Stats, typename T> struct SlabShared {
    Stats *entries, *rows; /* of threads or warps, two buffers used in turns; of the rows of `batch` tiles */
    SlabEdges<T> *edges;   /* two buffers, used in turns */

    DEVICE SlabShared(const SlabTiles &t, void *memory) {
        entries = static_cast<Stats *>(memory);
        rows = entries + 2 * t.entries();
        edges = reinterpret_cast<SlabEdges<T> *>(rows + t.batch * t.rows_of_tile());
    }
};

/* `lanes` adjacent lanes merge the `count` statistics that load(i) returns; each of the lanes gets the result. */
template <class Op, typename F>
DEVICE typename Op::Stats merge_all(const Op &op, int count, int lane, int lanes, F load) {
    typename Op::Stats g = op.none();
    if (lane < count)
        g = load(lane);
#pragma unroll 4
    for (int e = lane + lanes; e < count; e += lanes)
        g = op.merge(g, load(e));
    return op.merge_lanes(g, lanes);
}

/* Copies the edges of a dense slab whose packs hold several rows to shared memory. */
template <typename T, int N>
DEVICE void store_edges(const SlabTiles &t, const SlabThread<T, N> &own, const SlabSpan<T, N> &span, bool first_part,
                        SlabEdges<T> *slabs) {
    SlabEdges<T> &edges = slabs[own.slab_of_tile];
    for (int e = own.down * t.width + own.pack; e < span.edges; e += t.down * t.width)
        edges.element[e] = span.begin[span.edge(e, t.slabs.length * t.slabs.inner)];
    if (own.pack == 0 && own.down == 0) {
        edges.head = span.head;
        edges.edges = first_part ? span.edges : 0;
    }
}

/* Merges the threads' statistics g to those of the tile's rows, of which `slabs` slabs exist, and writes these to
 * `rows`. The caller must put a barrier before they are read. */
template <class Op, typename T, int N, int LINES>
DEVICE void merge_tile(const Op &op, const SlabTiles &t, int slabs, const SlabThread<T, N> &own,
                       typename Op::Stats (&g)[LINES], typename Op::Stats *entries, const SlabEdges<T> *slab_edges,
                       typename Op::Stats *rows) {
    typedef typename Op::Stats Stats;
    if (LINES == 1 && t.rows) {
        const int lanes = t.down < WARP ? t.down : WARP, warps = t.down / WARP;
        const Stats all = op.merge_lanes(g[0], lanes);
        if (t.down <= WARP) {
            if (own.down == 0 && own.slab_of_tile < t.group)
                rows[own.slab_of_tile] = all;
            return;
        }
        if (threadIdx.x % WARP == 0)
            entries[threadIdx.x / WARP] = all;
        __syncthreads();
        if (threadIdx.x < t.group)
            rows[threadIdx.x] = merge_all(op, warps, 0, 1, [&](int e) { return entries[threadIdx.x * warps + e]; });
        return;
    }
    const int inner = static_cast<int>(t.slabs.inner);
#pragma unroll
    for (int j = 0; j < LINES; j++)
        entries[threadIdx.x * LINES + j] = g[j];
    __syncthreads();
    const int lane = threadIdx.x & (t.lanes - 1), groups = blockDim.x / t.lanes, all_rows = t.rows_of_tile();
    for (int base = 0; base < all_rows; base += groups) {
        const int r = base + threadIdx.x / t.lanes;
        const int slab = r < all_rows ? static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(r))) : t.group;
        const bool valid = slab < slabs;
        const int column = r - slab * t.columns;
        int place = column, repeats = 1; /* the row's first element in a step of the tile; how many it has there */
        if (LINES > 1 && t.dense && valid) {
            const int head = slab_edges[slab].head % inner, across = t.width * LINES;
            place = column - head + (column < head ? inner : 0);
            repeats = place < across ? (across - place - 1) / inner + 1 : 0;
        }
        const int begin = slab * t.down * t.width * LINES + place;
        Stats all = merge_all(op, valid ? repeats * t.down : 0, lane, t.lanes, [&](int e) {
            const int repeat = repeats == 1 ? 0 : e / t.down, down = e - repeat * t.down;
            return entries[begin + down * t.width * LINES + repeat * inner];
        });
        if (!valid || lane != 0)
            continue;
        if (LINES > 1 && t.dense) {
            const SlabEdges<T> &edges = slab_edges[slab];
            for (int e = 0; e < edges.edges; e++)
                if (row_of_edge(e, edges.head, edges.edges, inner) == column) {
                    const Pack<T, 1> one[1] = {{{edges.element[e]}}};
                    op.add(all, one, 1, 0, 1);
                }
        }
        rows[r] = all;
    }
}

/* Stores the statistics of a part of a tile. Returns true in the last block of the tile that does so: there, `rows`
 * gets the statistics of the whole tile, its parts merged in order. Called by all threads. */
template <class Op>
DEVICE bool merge_parts(const Op &op, const SlabTiles &t, unsigned index, unsigned *counters,
                        typename Op::Stats *part_stats, typename Op::Stats *rows) {
    const int rows_of_tile = t.rows_of_tile();
    const unsigned tile = index / t.parts;
    typename Op::Stats *const stored = part_stats + int64_t(tile) * rows_of_tile * t.parts;
    __syncthreads();
    for (int r = threadIdx.x; r < rows_of_tile; r += blockDim.x)
        stored[int64_t(r) * t.parts + (index - tile * t.parts)] = rows[r];
    if (!block_arrives_last(counters + tile, static_cast<unsigned>(t.parts)))
        return false;
    int lanes = 1;
    while (lanes < WARP && lanes < t.parts && 2 * lanes * rows_of_tile <= blockDim.x)
        lanes *= 2;
    for (int base = 0; base < rows_of_tile; base += blockDim.x / lanes) {
        const int r = base + threadIdx.x / lanes;
        const typename Op::Stats all = merge_all(op, r < rows_of_tile ? t.parts : 0, threadIdx.x & (lanes - 1), lanes,
                                                 [&](int e) { return op.load(stored + int64_t(r) * t.parts + e); });
        if (r < rows_of_tile && (threadIdx.x & (lanes - 1)) == 0)
            rows[r] = all;
    }
    return true;
}

/* Loads row `slot` of the tiles that are finished together. The k-th of them is tile index + k * gridDim.x. */
template <class Op, typename T>
DEVICE typename Op::Row load_slot(const Op &op, const SlabTiles &t, unsigned index, int slot) {
    const int k = static_cast<int>(t.by_rows.quotient(static_cast<unsigned>(slot)));
    const int64_t of = index + int64_t(k) * gridDim.x;
    if (k < t.batch && of < t.tiles) {
        const SlabTile place(t, static_cast<unsigned>(of));
        const TileRow at(t, place, slot - k * t.rows_of_tile());
        if (at.slab < place.slabs && at.column < t.slabs.inner)
            return op.load_row(at.row, t.slabs.at<const T>(0, at.at));
    }
    return op.no_row();
}

/* The loop of a kernel. N, LINES: SlabTiles::elements and lines. STEPS: packs that a thread loads at a time. */
template <class Op, typename T, int N, int LINES, int STEPS>
DEVICE void slab_statistics(Op &op, const SlabTiles &t, void *shared_memory, unsigned *counters,
                            typename Op::Stats *part_stats) {
    typedef typename Op::Stats Stats;
    const SlabShared<Stats, T> shared(t, shared_memory);
    const SlabThread<T, N> own(t);
    const int rows_of_tile = t.rows_of_tile();
    const int64_t ahead = t.down * t.stride; /* from one load to the next */
    Pack<T, N> packs[STEPS];
    SlabSpan<T, N> span(t, nullptr);
    const T *p = nullptr; /* the thread's pack of step s */
    int s = 0, to = 0;    /* its next step; the end of its steps */
    bool active = false;
    const auto load = [&] {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            packs[k] = load_once_if<T, N>(s + k * t.down < to, p + k * ahead, -INFINITY);
    };
    /* Loads the first packs of a tile. Returns how many slabs it has. */
    const auto start = [&](unsigned index) {
        const SlabTile tile(t, index);
        const int pack = tile.pack + own.pack;
        active = own.slab_of_tile < tile.slabs && pack < t.packs;
        int64_t offset[3];
        t.slabs.walk.offsets(tile.slab + (active ? own.slab_of_tile : 0), offset);
        span = SlabSpan<T, N>(t, t.slabs.at<const T>(0, offset[0]));
        s = tile.part * t.part + own.down;
        to = active ? min(span.steps(t, pack), (tile.part + 1) * t.part) : 0;
        p = span.begin + span.head + pack * t.pack_stride + s * t.stride;
        load();
        return tile.slabs;
    };
    unsigned index = blockIdx.x, first = index; /* this tile; the first of those that are finished together */
    int filled = 0, buffer = 0, slabs = start(index);
    typename Op::Row row = load_slot<Op, T>(op, t, first, threadIdx.x);
    op.begin();
    while (true) {
        const bool first_part = t.parts == 1 || index % t.parts == 0;
        Stats g[LINES];
#pragma unroll
        for (int j = 0; j < LINES; j++)
            g[j] = op.none();
        while (s < to) {
            int valid = 0;
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                valid += s + k * t.down < to;
            if constexpr (LINES == 1)
                op.add(g[0], packs, valid, N > 1 ? span.head + int64_t(s) * N : s, int64_t(t.down) * N);
            else
                op.add_lines(g, packs, valid, 0, 0);
            s += STEPS * t.down;
            p += STEPS * ahead;
            if (s < to)
                load();
        }
        if (LINES == 1 && N > 1 && active && first_part)
            for (int e = own.down; e < span.edges; e += t.down) {
                const int64_t at = span.edge(e, t.slabs.length);
                const Pack<T, 1> one[1] = {{{span.begin[at]}}};
                op.add(g[0], one, 1, at, 1);
            }
        Stats *const rows = shared.rows + filled * rows_of_tile;
        if (t.direct) {
            if (active)
#pragma unroll
                for (int j = 0; j < LINES; j++)
                    rows[own.slab_of_tile * t.columns + own.pack * LINES + j] = g[j];
        } else if (LINES > 1 && t.dense && active) {
            store_edges(t, own, span, first_part, shared.edges + buffer * t.group);
        }
        const unsigned next = index + gridDim.x;
        const int slabs_before = slabs;
        if (next < t.tiles) /* in flight while this tile is merged */
            slabs = start(next);
        if (!t.direct)
            merge_tile<Op, T, N, LINES>(op, t, slabs_before, own, g, shared.entries + buffer * t.entries(),
                                        shared.edges + buffer * t.group, rows);
        buffer ^= 1;
        filled++;
        const bool finish =
            t.parts > 1 ? merge_parts(op, t, index, counters, part_stats, rows) : filled == t.batch || next >= t.tiles;
        if (finish) {
            __syncthreads();
            for (int slot = threadIdx.x; slot < filled * rows_of_tile; slot += blockDim.x) {
                if (slot != threadIdx.x)
                    row = load_slot<Op, T>(op, t, first, slot);
                op.finish(row, shared.rows[slot]);
            }
        }
        if (next >= t.tiles)
            break;
        if (finish || t.parts > 1) {
            filled = 0;
            first = next;
            row = load_slot<Op, T>(op, t, first, threadIdx.x);
            __syncthreads(); /* the next tiles overwrite the statistics */
        }
        index = next;
    }
}

/* ---- elementwise ----------------------------------------------------------------------------- */

/* Writes the gradient of contiguous rows element by element; a block per tile. Other layouts:
 * slab_columns.cuh. */
template <class Op, typename T, int N, int STEPS> DEVICE void slab_gradients(const Op &op, const SlabTiles &t) {
    const SlabThread<T, N> own(t);
    const SlabTile tile(t, blockIdx.x);
    const bool active = own.slab_of_tile < tile.slabs;
    int64_t offset[3];
    t.slabs.walk.offsets(tile.slab + (active ? own.slab_of_tile : 0), offset);
    const SlabSpan<T, N> span(t, t.slabs.at<const T>(0, offset[0]));
    T *const begin = t.slabs.at<T>(1, offset[1]);
    const int64_t row = offset[2];
    const int from = tile.part * t.part, end = min(from + t.part, t.steps),
              to = active ? min(span.steps(t, 0), end) : 0;
    int s = from + own.down;
    const T *x = span.begin + span.head + s * t.stride;
    T *dx = begin + span.head + s * t.grad_stride;
    const int64_t ahead = t.down * t.stride, grad_ahead = t.down * t.grad_stride;
    Pack<T, N> packs[STEPS];
    const auto load = [&] {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (s + k * t.down < to)
                packs[k] = load_once<T, N>(x + k * ahead);
    };
    load();
    op.begin();
    const typename Op::Line line(op, row);
    /* All threads of a warp take the same number of turns, because store_shifted exchanges elements. */
    for (int turn = from; turn < end; turn += STEPS * t.down) {
        if (turn != from)
            load();
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int step = s + k * t.down;
            const Pack<T, N> out = line.of(op, packs[k], span.head + int64_t(step) * N);
            store_shifted<T, N>(dx + k * grad_ahead, out, step < to, step);
        }
        s += STEPS * t.down;
        x += STEPS * ahead;
        dx += STEPS * grad_ahead;
    }
    if (active && tile.part == 0)
        for (int e = own.down; e < span.edges; e += t.down) {
            const int64_t at = span.edge(e, t.slabs.length);
            begin[at] = op.of_one(row, span.begin[at], at);
        }
    if constexpr (Op::LABELS) {
        /* The label's element is written again, by the thread that has just written it. */
        __syncwarp();
        const int64_t label = active ? op.label(row) : -1, position = label - span.head;
        const int step = static_cast<int>(position / N);
        if (label >= 0 && position >= 0 && position < int64_t(span.packs) * N && /* else an edge, written above */
            step >= from && step < end && (step - from) % t.down == own.down)
            begin[label] = op.at_label(row);
    }
}

#endif
