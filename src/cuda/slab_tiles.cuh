/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs (slabs.cuh) cut into tiles, for kernels in which threads load packs directly from memory.
 *
 * A slab is seen as an array of packs: `packs` columns, and a number of steps that lie `stride` elements apart.
 * What a step is depends on the layout:
 *
 *   Each step of the reduced dimension consists of aligned packs: a step here is the same.
 *   Other dense slabs, of any alignment and any `inner`: a step is lcm(inner, N) elements of the slab's span, so
 *   that element j of a column of packs always belongs to the same row. If inner = 1, a slab is a contiguous row
 *   and has one column.
 *   Other layouts: as the first case, with packs of one element.
 *
 * A tile is `width` columns of packs of `group` slabs. `parts` blocks share the steps of a tile. The threads of
 * a block are numbered along the columns first, then `down` the steps, then over the slabs.
 */
#ifndef RAFTER_CUDA_SLAB_TILES_CUH
#define RAFTER_CUDA_SLAB_TILES_CUH

#include "cuda/slabs.cuh"

/* As a kernel argument. */
struct SlabTiles {
    Slabs slabs;
    int elements;                          /* per pack: WIDE, or 1 */
    int lines;                             /* rows that a pack has elements of: 1, or `elements` */
    bool dense;                            /* the second case above: packs are those of the slab's span */
    bool direct;                           /* no two threads share a row: nothing to merge within a block */
    bool rows;                             /* a slab is one column, shared by 2^n lanes of a warp, or by whole warps */
    int packs, width, wide_tiles;          /* columns of packs per slab, and per tile; tiles side by side */
    int group, down, threads;              /* slabs per tile; threads down the steps; threads of a block */
    int columns;                           /* rows of a slab that a tile has */
    int64_t stride, pack_stride;           /* elements between steps, and between columns of packs, of the input */
    int64_t grad_stride, grad_pack_stride; /* the same of the gradient */
    int steps;                             /* per slab, at most */
    int parts, part;                       /* blocks per tile; steps per block */
    int64_t tiles;                         /* parts of all tiles: what blocks are given */
    int lanes;                             /* threads that merge the statistics of a row, unless `rows` or `direct` */
    int batch;                             /* tiles whose rows a block finishes together */
    Divisor by_packs, by_columns, by_rows; /* by_rows: rows of a tile */

    __host__ DEVICE int rows_of_tile() const {
        return group * columns;
    }
    /* Statistics that the threads of a block exchange through shared memory. */
    __host__ DEVICE int entries() const {
        return direct || (rows && down <= WARP) ? 0 : rows ? threads / WARP : threads * lines;
    }
    __host__ DEVICE bool has_edges() const {
        return dense && lines > 1;
    }
};

/* What a thread of a tile works on. */
template <typename T, int N> struct SlabThread {
    int slab_of_tile, down, pack; /* its slab; its first step of the part; its column of packs; all within the tile */

    DEVICE explicit SlabThread(const SlabTiles &t) {
        const int across = threadIdx.x / t.width;
        pack = threadIdx.x - across * t.width;
        slab_of_tile = across / t.down;
        down = across - slab_of_tile * t.down;
    }
};

/* One part of one tile: what a block is given, decoded from its index. */
struct SlabTile {
    unsigned tile;   /* number among all tiles */
    int part, slabs; /* which part of it; slabs that it has */
    int pack;        /* its first column of packs */
    int64_t slab;    /* its first slab */

    DEVICE SlabTile(const SlabTiles &t, unsigned index) {
        const unsigned parts = t.parts, wide = t.wide_tiles;
        tile = parts == 1 ? index : index / parts;
        part = index - tile * parts;
        const unsigned group = wide == 1 ? tile : tile / wide;
        slab = int64_t(group) * t.group;
        slabs = t.slabs.outer - slab < t.group ? static_cast<int>(t.slabs.outer - slab) : t.group;
        pack = static_cast<int>(tile - group * wide) * t.width;
    }
};

/* A row of a tile. */
struct TileRow {
    int slab, column; /* slab of the tile; row of the slab: from `inner` on there is none */
    int64_t row, at;  /* number among all rows; offset of its first element */

    DEVICE TileRow(const SlabTiles &t, const SlabTile &tile, int row_of_tile) {
        slab = static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(row_of_tile)));
        column = tile.pack * t.lines + row_of_tile - slab * t.columns;
        int64_t offset[3];
        t.slabs.walk.offsets(tile.slab + slab, offset);
        row = offset[2] + column * t.slabs.row_step;
        at = offset[0] + column * t.slabs.across[0];
    }
};

/* How the packs of one slab of the input lie in memory. The last three are 0 unless the tiles are dense. */
template <typename T, int N> struct SlabSpan {
    const T *begin; /* of the slab */
    int head;       /* elements before the first pack */
    int edges;      /* elements before the first and after the last pack */
    int packs;      /* of the slab */

    DEVICE SlabSpan(const SlabTiles &t, const T *slab) : begin(slab), head(0), edges(0), packs(0) {
        if (N > 1 && t.dense) {
            const AlignedSpan<const T> span(slab, t.slabs.length * t.slabs.inner);
            head = span.head;
            edges = span.edges;
            packs = static_cast<int>(span.packs);
        }
    }
    /* Steps that column `pack` has. */
    DEVICE int steps(const SlabTiles &t, int pack) const {
        if (N == 1 || !t.dense)
            return t.steps;
        return packs <= pack ? 0 : 1 + static_cast<int>(t.by_packs.quotient(static_cast<unsigned>(packs - 1 - pack)));
    }
    /* The position in the slab of an edge element. */
    DEVICE int64_t edge(int e, int64_t elements) const {
        return e < head ? e : elements - (edges - e);
    }
};

/* The row of a slab that edge element e belongs to. */
DEVICE int row_of_edge(int e, int head, int edges, int inner) {
    return e < head ? e % inner : (inner - (edges - e) % inner) % inner;
}

/* ---- host ------------------------------------------------------------------------------------ */

/* What the kernels of an op can do. */
struct TileChoice {
    bool both;        /* they write the gradient too */
    bool lines;       /* packs may hold elements of several rows */
    int in_flight;    /* packs that a thread loads at a time; four times as many if packs have one element */
    int most_threads; /* per block, if packs hold elements of several rows */
    bool split;       /* they compute statistics: blocks that share the steps of a tile merge theirs */
};

/* Blocks that fill any device. */
constexpr int64_t ENOUGH_TILES = 528;

static inline int64_t gcd_of(int64_t a, int64_t b) {
    return b == 0 ? a : gcd_of(b, a % b);
}

/* Whether some count exceeds the 31 bits of the kernels' counters. */
static inline bool too_large(const Slabs &s) {
    const int64_t most = INT32_MAX / 2;
    return s.inner > most || (s.length > most && !(s.inner == 1 && s.length / 8 < most)) || s.rows() > most * 64;
}

static inline SlabTiles tiles_of(const Slabs &s, int bytes, const TileChoice &how) {
    SlabTiles t = {};
    t.slabs = s;
    const int wide = 16 / bytes;
    const bool dense = s.dense(0) && (!how.both || s.dense(1));
    const bool across = s.packs_across(0, bytes) && (!how.both || s.packs_across(1, bytes));
    const int64_t common = gcd_of(s.inner, wide), period = s.inner / common; /* packs of a dense step */
    const bool whole = !across && s.inner > 1; /* a row may have elements in several columns of packs */
    const bool fits = s.slab_elements() / wide < INT32_MAX && (!whole || period <= how.most_threads);
    const bool long_enough = !whole || s.slab_elements() >= 2 * period * wide * how.in_flight;
    t.dense = dense && fits && long_enough && (s.inner == 1 || how.lines);
    const bool packs = t.dense || (across && how.lines && s.inner > 1);
    t.elements = packs ? wide : 1;
    t.lines = packs && s.inner > 1 ? wide : 1;
    t.dense = t.dense && !(across && s.inner > 1);
    int64_t columns = s.inner, steps = s.length;
    if (t.dense) {
        columns = period;
        t.stride = t.grad_stride = period * wide;
        t.pack_stride = t.grad_pack_stride = wide;
        steps = ceil_div(s.slab_elements(), t.stride);
    } else {
        columns = s.inner / t.elements;
        t.stride = s.step[0];
        t.grad_stride = s.step[1];
        t.pack_stride = s.across[0] * t.elements;
        t.grad_pack_stride = s.across[1] * t.elements;
    }
    const int in_flight = t.elements == 1 ? 4 * how.in_flight : how.in_flight;
    const int usual = s.rows() * s.length * bytes < 8 << 20 ? 128 : 256;
    t.packs = static_cast<int>(min(columns, int64_t(INT32_MAX))); /* more are refused: see too_large */
    t.steps = static_cast<int>(min(steps, int64_t(INT32_MAX)));
    /* As many threads down the steps as can issue all of their in_flight loads. */
    const int64_t full = max(ceil_div<int64_t>(steps, in_flight), int64_t(1));
    t.rows = columns == 1 && t.lines == 1;
    if (t.rows && full <= WARP)
        t.down = power_at_least(full, 1, WARP);
    else if (t.rows)
        t.down = static_cast<int>(round_up<int64_t>(ceil_div(full, ceil_div<int64_t>(full, usual)), WARP));
    else if (t.elements == 1 && (how.split ? bytes == 4 && columns >= 32 * usual : columns >= 4 * usual))
        t.down = 1; /* blocks as wide as possible, so that few memory sectors are shared by two blocks */
    else
        t.down = static_cast<int>(max(min(full, columns < WARP ? usual / columns : int64_t(8)), int64_t(1)));
    const bool keep_whole = t.dense && whole;
    while (keep_whole && t.down > 1 && t.down * columns > how.most_threads / 2)
        t.down--;
    const int64_t widest = keep_whole ? columns : max(usual / t.down, 1);
    t.wide_tiles = static_cast<int>(ceil_div<int64_t>(columns, widest));
    t.width = static_cast<int>(ceil_div<int64_t>(columns, t.wide_tiles));
    t.group = 1;
    if (t.wide_tiles == 1) {
        const int64_t fit = max(usual / (t.width * t.down), 1), enough = s.outer / ENOUGH_TILES;
        t.group = static_cast<int>(max(min(fit, enough), int64_t(1)));
        if (t.rows) /* fill whole warps */
            while (t.group * t.down % WARP != 0 && t.group < fit)
                t.group++;
    }
    t.threads = round_up(t.group * t.width * t.down, WARP);
    t.columns = t.wide_tiles == 1 ? static_cast<int>(s.inner) : t.width * t.lines;
    t.direct = t.down == 1 && !keep_whole;
    const int64_t whole_tiles = ceil_div<int64_t>(s.outer, t.group) * t.wide_tiles;
    const int64_t least = int64_t(t.down) * in_flight; /* steps of a part */
    /* With many rows to a tile a thread merges all parts of a row. */
    const int64_t most_parts = how.split && 4 * t.rows_of_tile() > t.threads ? 16 : 256;
    const int64_t filling = min(min(ceil_div(ENOUGH_TILES, whole_tiles), steps / least), most_parts);
    /* Without statistics to merge, blocks are short, but long enough to outweigh what they load per row. */
    const int64_t parts = max(how.split ? filling : max(filling, steps / (16 * least)), int64_t(1));
    t.part = static_cast<int>(ceil_div(steps, parts));
    t.parts = static_cast<int>(ceil_div<int64_t>(steps, t.part));
    t.tiles = whole_tiles * t.parts;
    const int64_t entries = keep_whole ? ceil_div<int64_t>(int64_t(t.width) * t.lines, s.inner) * t.down : t.down;
    t.lanes = 1;
    while (t.lanes < WARP && t.lanes < entries && 2 * t.lanes * t.rows_of_tile() <= t.threads)
        t.lanes *= 2;
    t.batch = t.parts > 1 ? 1 : max(t.threads / t.rows_of_tile(), 1);
    t.by_packs = Divisor(t.packs);
    t.by_columns = Divisor(t.columns);
    t.by_rows = Divisor(t.rows_of_tile());
    return t;
}

#endif
