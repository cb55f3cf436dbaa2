/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of tiles.cu: statistics and gradients of slabs that threads load from memory. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH

#include "cuda/slab_tiles.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

struct TileArgs {
    Args call;
    SlabTiles tiles;
    unsigned *counters;            /* one per tile, if tiles have parts */
    void *part_stats;              /* LossStats of each row and part, if tiles have parts */
    RowCoefficients *coefficients; /* of all rows: written by statistics, if not NULL; read by gradients */
};

/* Threads per block, at most, and blocks per multiprocessor. */
template <int LINES> constexpr int TILE_THREADS = LINES > 1 ? 1024 : 256;
template <int LINES> constexpr int TILES_PER_SM = LINES > 1 ? 1 : 4;

/* Packs that a thread loads before it uses the first one. */
template <int OPTIONS, int N> constexpr int TILE_STEPS = AHEAD<OPTIONS> *(N == 1 ? 2 : 1);

/* ---- statistics ------------------------------------------------------------------------------ */

/* Statistics of the rows of a thread's packs. */
template <int OPTIONS, typename T, int N, int LINES> struct ThreadStats {
    LossStats<OPTIONS> line[LINES];

    DEVICE ThreadStats() {
#pragma unroll
        for (int j = 0; j < LINES; j++)
            line[j] = no_columns<OPTIONS>();
    }
    /* Adds packs; only the first `valid` are part of the slab. `column`: of the first one's first
     * element, if a pack holds one row; `step`: from pack to pack. */
    template <int COUNT>
    DEVICE void add_steps(const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step, const Loss &loss) {
        if constexpr (LINES == 1) {
            add(line[0], packs, valid, column, step, loss);
        } else {
            static_assert(OPTIONS != FULL, "packs of several rows have no columns");
            float x[COUNT][N], top[N];
            unpack(max_of_each(packs), top);
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                unpack(packs[k], x[k]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                RowStats &s = line[j].s;
                const float max = fmaxf(s.max, top[j]), pivot = pivot_at(max);
                float sum = s.sum * exp_term<T>(s.max - pivot, loss.scale);
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    sum += exp_term<T>(x[k][j] - pivot, loss.scale);
                    if constexpr (OPTIONS == SMOOTH)
                        line[j].weighted += k < valid ? x[k][j] : 0.0f;
                }
                s = {max, sum};
            }
        }
    }
};

template <typename T> struct SlabEdges {
    T element[2 * WIDE<T>];
    int head, edges;
};

/* A row of a tile. */
struct TileRow {
    int slab, column; /* slab of the tile; row of the slab */
    int64_t row, at;  /* among all rows; offset of its first logit */

    DEVICE TileRow(const SlabTiles &t, const SlabTile &tile, int lines, int row_of_tile) {
        slab = static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(row_of_tile)));
        column = tile.pack * lines + row_of_tile - slab * t.columns;
        int64_t offset[3];
        t.slabs.walk.offsets(tile.slab + slab, offset);
        row = offset[2] + column * t.slabs.row_step;
        at = offset[0] + column * t.slabs.across[0];
    }
};

/* Merges statistics[0 ... count) of a row by `lanes` lanes; each gets the result. */
template <int OPTIONS, typename F>
DEVICE LossStats<OPTIONS> merge_entries(bool valid, int count, int lane, int lanes, F statistics, const Loss &loss) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    if (valid && lane < count)
        g = statistics(lane);
    for (int e = lane + lanes; valid && e < count; e += lanes)
        g = merge(g, statistics(e), loss.scale);
    for (int step = lanes / 2; step > 0; step /= 2)
        g = merge(g, other_lane(g, step), loss.scale);
    return g;
}

template <int OPTIONS> DEVICE LossStats<OPTIONS> load_part(const LossStats<OPTIONS> *stored) {
    LossStats<OPTIONS> g;
    static_assert(sizeof g % 8 == 0, "loaded as pairs of words");
#pragma unroll
    for (int i = 0; i < int(sizeof g / 8); i++)
        reinterpret_cast<uint2 *>(&g)[i] = __ldcg(reinterpret_cast<const uint2 *>(stored) + i);
    return g;
}

/* Turns the statistics of the rows of a tile into outputs and, if wanted, coefficients. */
template <typename T, int OPTIONS>
DEVICE void finish_rows(const TileArgs &a, const SlabTile &tile, int lines, const LossStats<OPTIONS> *rows, int count,
                        double common, Totals *totals) {
    const Loss &loss = a.call.loss;
    for (int r = threadIdx.x; r < count; r += blockDim.x) {
        const TileRow at(a.tiles, tile, lines, r);
        if (at.column >= a.tiles.slabs.inner)
            continue;
        const int64_t label = loss.class_of(loss.load_label(at.row));
        RowGradient gradient = gradient_of_skipped(label);
        if (label < 0) {
            write_skipped(loss, at.row, label, totals);
        } else {
            const float z_label = to_float(*a.tiles.slabs.at<const T>(0, at.at + label * a.tiles.slabs.step[0]));
            const WholeRowStats stats = whole_row_stats(rows[r], z_label, loss);
            if (a.coefficients)
                gradient = gradient_from_stats(loss, common, at.row, label, z_label, stats);
            if (loss.forward)
                write_row(loss, at.row, label, results_of(loss, at.row, label, stats), totals);
        }
        if (a.coefficients)
            a.coefficients[at.row] = {gradient, label};
    }
}

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_statistics(const __grid_constant__ TileArgs a) {
    constexpr int STEPS = TILE_STEPS<OPTIONS, N>;
    extern __shared__ uint4 dynamic[];
    const Loss &loss = a.call.loss;
    const SlabTiles &t = a.tiles;
    const int inner = static_cast<int>(t.slabs.inner), rows_of_tile = t.group * t.columns;
    /* Statistics of threads, then of rows, then the edges of slabs. */
    auto *const entries = reinterpret_cast<LossStats<OPTIONS> *>(dynamic);
    auto *const row_stats = entries + blockDim.x * LINES;
    auto *const slab_edges = reinterpret_cast<SlabEdges<T> *>(row_stats + rows_of_tile);
    const SlabThread<T, N> own(t);
    Totals totals = {};
    double common = 0.0;
    bool first = true;
    start_next_kernel();
    for (unsigned index = blockIdx.x; index < t.tiles; index += gridDim.x) {
        const SlabTile tile(t, index);
        const int pack = tile.pack + own.pack;
        const bool active = own.slab_of_tile < tile.slabs && pack < t.packs;
        int64_t offset[3];
        t.slabs.walk.offsets(tile.slab + (active ? own.slab_of_tile : 0), offset);
        const SlabSpan<T, N> span(t, t.slabs.at<const T>(0, offset[0]));
        const int64_t steps = active ? span.steps(t, pack) : 0, to = steps < tile.to ? steps : tile.to;
        const T *const z = span.begin + span.head + pack * t.pack_stride;
        ThreadStats<OPTIONS, T, N, LINES> g;
        Pack<T, N> packs[STEPS];
        const auto load = [&](int64_t s) {
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                packs[k] = load_once_if<T, N>(s + k * t.down < to, z + (s + k * t.down) * t.stride, -INFINITY);
        };
        int64_t s = tile.from + own.down;
        load(s);
        if (first) {
            wait_for_previous_kernel();
            if (a.coefficients)
                common = common_factor(a.call);
            first = false;
        }
        while (s < to) {
            int valid = 0;
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                valid += s + k * t.down < to;
            g.add_steps(packs, valid, LINES > 1 ? 0 : N > 1 ? span.head + s * N : s, int64_t(t.down) * N, loss);
            s += STEPS * t.down;
            if (s < to)
                load(s);
        }
        if constexpr (LINES == 1) {
            if (N > 1 && active && tile.first_part)
                for (int e = own.down; e < span.edges; e += t.down) {
                    const int64_t at = span.edge(e, t.slabs.length);
                    add_one(g.line[0], span.begin[at], at, loss);
                }
        } else {
            if (t.dense && active && own.down == 0 && own.slab_of_tile < t.group) {
                SlabEdges<T> &edges = slab_edges[own.slab_of_tile];
                for (int e = own.pack; e < span.edges; e += t.width)
                    edges.element[e] = span.begin[span.edge(e, t.slabs.length * t.slabs.inner)];
                if (own.pack == 0) {
                    edges.head = span.head;
                    edges.edges = tile.first_part ? span.edges : 0;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < LINES; j++)
            entries[threadIdx.x * LINES + j] = g.line[j];
        __syncthreads();

        const int lane = threadIdx.x & (t.lanes - 1), groups = blockDim.x / t.lanes;
        auto *const stored = static_cast<LossStats<OPTIONS> *>(a.part_stats) + tile.tile * rows_of_tile * t.parts;
        for (int base = 0; base < rows_of_tile; base += groups) {
            const int r = base + threadIdx.x / t.lanes;
            const bool valid = r < rows_of_tile;
            const int slab = valid ? static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(r))) : 0,
                      column = r - slab * t.columns;
            int head = 0, place = column, repeats = 1; /* of the row's elements in a step of the tile */
            if constexpr (LINES > 1)
                if (t.dense && valid) {
                    head = slab_edges[slab].head % inner;
                    place = column - head + (column < head ? inner : 0);
                    const int all = t.width * LINES;
                    repeats = place < all ? (all - place - 1) / inner + 1 : 0;
                }
            const int begin = slab * t.down * t.width * LINES + place;
            LossStats<OPTIONS> all = merge_entries<OPTIONS>(
                valid, repeats * t.down, lane, t.lanes,
                [&](int e) {
                    const int repeat = repeats == 1 ? 0 : e / t.down, down = e - repeat * t.down;
                    return entries[begin + down * t.width * LINES + repeat * inner];
                },
                loss);
            if (!valid || lane != 0)
                continue;
            if constexpr (LINES > 1)
                if (t.dense && slab < tile.slabs) {
                    const SlabEdges<T> &edges = slab_edges[slab];
                    SlabSpan<T, N> ends(t, nullptr);
                    ends.head = edges.head;
                    ends.edges = edges.edges;
                    for (int e = 0; e < edges.edges; e++)
                        if (ends.row_of_edge(e, inner) == column)
                            add_one(all, edges.element[e], 0, loss);
                }
            if (t.parts > 1)
                stored[r * t.parts + (index - tile.tile * t.parts)] = all;
            else
                row_stats[r] = all;
        }
        if (t.parts > 1) {
            if (!block_arrives_last(a.counters + tile.tile, static_cast<unsigned>(t.parts)))
                continue;
            int lanes = 1;
            while (lanes < WARP && lanes < t.parts && 2 * lanes * rows_of_tile <= blockDim.x)
                lanes *= 2;
            for (int base = 0; base < rows_of_tile; base += blockDim.x / lanes) {
                const int r = base + threadIdx.x / lanes;
                const LossStats<OPTIONS> all = merge_entries<OPTIONS>(
                    r < rows_of_tile, static_cast<int>(t.parts), threadIdx.x & (lanes - 1), lanes,
                    [&](int e) { return load_part(stored + r * t.parts + e); }, loss);
                if (r < rows_of_tile && (threadIdx.x & (lanes - 1)) == 0)
                    row_stats[r] = all;
            }
        }
        __syncthreads();
        finish_rows<T>(a, tile, LINES, row_stats, tile.slabs * t.columns, common, &totals);
        __syncthreads(); /* the next tile overwrites shared memory */
    }
    if (loss.forward)
        add_up(a.call, totals);
}

/* ---- gradient -------------------------------------------------------------------------------- */

/* Stores packs of adjacent elements to an address that is not aligned. All lanes of the warp take
 * part. `position`: of the pack in its span; lanes with consecutive positions in one span exchange
 * the elements that belong to each other's aligned packs; the others are stored one by one. */
template <typename T, int N> DEVICE void store_shifted(T *p, const Pack<T, N> &pack, bool valid, int64_t position) {
    const int ragged = static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T)) & (N - 1);
    if (!__any_sync(~0u, valid && ragged != 0)) {
        if (valid)
            store_once<T, N>(p, pack);
        return;
    }
    const int64_t mark = valid ? position : -2;
    const int64_t before = __shfl_up_sync(~0u, mark, 1), after = __shfl_down_sync(~0u, mark, 1);
    const int lane = threadIdx.x % WARP;
    const bool joined_before = lane > 0 && valid && before + 1 == mark,
               joined_after = lane < WARP - 1 && valid && after == mark + 1;
    constexpr int WORDS = N * (int)sizeof(T) / 4, EACH = N / WORDS;
    unsigned w[2 * WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        w[i] = reinterpret_cast<const unsigned *>(&pack)[i];
        w[WORDS + i] = __shfl_down_sync(~0u, w[i], 1);
    }
    if (!valid)
        return;
    const int skip = (N - ragged) & (N - 1); /* elements before the first aligned one */
    if (skip == 0) {
        store_once<T, N>(p, pack);
        return;
    }
    if (!joined_before)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < skip)
                p[j] = pack.v[j];
    if (!joined_after) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j >= skip)
                p[j] = pack.v[j];
        return;
    }
    /* The 16 bytes from element `skip` of this pack and the next one. */
    const int words = skip / EACH;
#pragma unroll
    for (int by = WORDS / 2; by > 0; by /= 2)
        if (words & by)
#pragma unroll
            for (int i = 0; i + by < 2 * WORDS; i++)
                w[i] = w[i + by];
    if (EACH == 2 && skip & 1)
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            w[i] = __funnelshift_r(w[i], w[i + 1], 16);
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        reinterpret_cast<unsigned *>(&out)[i] = w[i];
    store_once<T, N>(p + skip, out);
}

/* The gradient of a thread's rows. */
template <int OPTIONS, typename T, int N, int LINES> struct LineGradients {
    ColumnGradient<OPTIONS, T> of_line[LINES];
    unsigned constant; /* a bit for each line */

    DEVICE Pack<T, N> of(const Pack<T, N> &pack, int64_t column, const Loss &loss) const {
        float z[N];
        unpack(pack, z);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const ColumnGradient<OPTIONS, T> &g = of_line[j % LINES];
            const float d = g.of(z[j], column + j, loss);
            z[j] = constant >> (j % LINES) & 1 ? g.exp.factor : d;
        }
        return packed<T>(z);
    }
};

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             LINES > 1 ? 1 : 4) void tile_gradients(const __grid_constant__ TileArgs a) {
    constexpr int STEPS = TILE_STEPS<OPTIONS, N>;
    const Loss &loss = a.call.loss;
    const SlabTiles &t = a.tiles;
    const int inner = static_cast<int>(t.slabs.inner);
    const SlabThread<T, N> own(t);
    const SlabTile tile(t, blockIdx.x);
    const int pack = tile.pack + own.pack;
    const bool active = own.slab_of_tile < tile.slabs && pack < t.packs;
    int64_t offset[3];
    t.slabs.walk.offsets(tile.slab + (active ? own.slab_of_tile : 0), offset);
    const SlabSpan<T, N> span(t, t.slabs.at<const T>(0, offset[0]));
    T *const begin = t.slabs.at<T>(1, offset[1]);
    const int64_t steps = active ? span.steps(t, pack) : 0, to = steps < tile.to ? steps : tile.to;
    const T *const z = span.begin + span.head + pack * t.pack_stride;
    T *const dz = begin + span.head + pack * t.grad_pack_stride;
    Pack<T, N> packs[STEPS];
    const auto load = [&](int64_t s) {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (s + k * t.down < to)
                packs[k] = load_once<T, N>(z + (s + k * t.down) * t.stride);
    };
    int64_t s = tile.from + own.down;
    load(s);
    wait_for_previous_kernel();

    const RowCoefficients *const rows = a.coefficients + offset[2]; /* of the slab */
    LineGradients<OPTIONS, T, N, LINES> gradients;
    gradients.constant = 0;
#pragma unroll
    for (int j = 0; j < LINES; j++) {
        const int column = !active ? 0 : t.dense ? (span.head + pack * N + j) % inner : pack * LINES + j;
        const RowGradient row = rows[column * t.slabs.row_step].gradient;
        gradients.of_line[j] = ColumnGradient<OPTIONS, T>(row, loss);
        if (row.constant) {
            gradients.constant |= 1u << j;
            gradients.of_line[j].exp.factor = row.p;
        }
    }
    /* All threads of a warp take the same number of turns: they exchange elements. */
    for (int64_t turn = tile.from; turn < tile.to && turn < t.steps; turn += STEPS * t.down) {
        if (turn != tile.from)
            load(s);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int64_t step = s + k * t.down;
            const bool valid = step < to;
            const Pack<T, N> out = gradients.of(packs[k], N > 1 && LINES == 1 ? span.head + step * N : step, loss);
            if constexpr (N == 1) {
                if (valid)
                    dz[step * t.grad_stride] = out.v[0];
            } else {
                store_shifted<T, N>(dz + step * t.grad_stride, out, valid, step * t.packs + pack);
            }
        }
        s += STEPS * t.down;
    }
    if (N > 1 && t.dense && active && tile.first_part && own.down == 0)
        for (int e = own.pack; e < span.edges; e += t.width) {
            const int64_t at = span.edge(e, t.slabs.length * t.slabs.inner);
            const int column = LINES == 1 ? 0 : span.row_of_edge(e, inner);
            const RowCoefficients row = rows[column * t.slabs.row_step];
            const RowWriter<OPTIONS, T> writer(row.gradient, row.label, loss);
            begin[at] = writer.of_one(span.begin[at], LINES == 1 ? at : (at - column) / inner);
        }
    __syncthreads();
    /* The labels' columns once more: they have a term of their own. */
    for (int r = threadIdx.x; r < tile.slabs * t.columns; r += blockDim.x) {
        const TileRow at(t, tile, LINES, r);
        if (at.column >= inner)
            continue;
        const RowCoefficients row = a.coefficients[at.row];
        if (row.label < 0 || row.gradient.constant)
            continue;
        t.slabs.walk.offsets(tile.slab + at.slab, offset);
        int64_t step = row.label;
        if (N > 1 && t.dense) {
            const SlabSpan<T, N> of_slab(t, t.slabs.at<const T>(0, offset[0]));
            const int64_t position = row.label * inner + at.column - of_slab.head;
            if (position < 0 || position >= of_slab.packs * N)
                continue; /* an edge, written with its label */
            step = t.by_packs.quotient(static_cast<unsigned>(position / N));
        }
        if (step >= tile.from && step < tile.to)
            t.slabs.at<T>(1, offset[1])[at.column * t.slabs.across[1] + row.label * t.slabs.step[1]] =
                from_float<T>(row.gradient.at_label);
    }
}

} // namespace

#endif
