/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs (slabs.cuh) as tiles of packs that threads load from memory.
 *
 * A slab is an array of `packs` columns of packs and some steps; consecutive steps lie `stride`
 * elements apart. Where a step of the reduced dimension has whole, aligned packs, a step here is
 * one of those. A dense slab has packs whatever its alignment and `inner`: a step is lcm(inner, N)
 * elements, so that element j of a column of packs always belongs to the same row. With inner = 1
 * that is a contiguous row of one column. Other layouts have packs of one element.
 *
 * A tile is `width` columns of packs of `group` slabs; `parts` blocks share its steps. Of the threads
 * of a block, the fastest index runs along the columns, then `down` the steps, then over slabs.
 */
#ifndef RAFTER_CUDA_SLAB_TILES_CUH
#define RAFTER_CUDA_SLAB_TILES_CUH

#include "cuda/slabs.cuh"

/* As a kernel argument. */
struct SlabTiles {
    Slabs slabs;
    int elements;                 /* per pack: WIDE, or 1 */
    int lines;                    /* rows per pack: 1, or `elements` */
    bool dense;                   /* the span of a slab begins at any element */
    int packs, width, wide_tiles; /* columns of packs per slab, and per tile; tiles side by side */
    int group, down;
    int columns;                 /* rows of a slab that a tile has */
    int64_t stride, pack_stride; /* between steps, and between columns of packs, of the input */
    int64_t grad_stride, grad_pack_stride;
    int64_t steps;       /* per slab, at most */
    int64_t parts, part; /* blocks per tile; steps per block */
    int64_t tiles;       /* times parts */
    int lanes;           /* that merge the statistics of a row */
    int threads;
    Divisor by_packs, by_columns;
};

/* What a thread of a tile works on. */
template <typename T, int N> struct SlabThread {
    int slab_of_tile, down, pack; /* pack: of the tile */

    DEVICE explicit SlabThread(const SlabTiles &t) {
        const int across = threadIdx.x / t.width;
        pack = threadIdx.x - across * t.width;
        slab_of_tile = across / t.down;
        down = across - slab_of_tile * t.down;
    }
};

/* One block's part of one tile, decoded. */
struct SlabTile {
    int64_t tile;     /* among all tiles */
    int64_t slab;     /* the first one */
    int64_t from, to; /* steps */
    int pack;         /* the first column of packs */
    bool first_part;
    int slabs; /* of this tile */

    DEVICE SlabTile(const SlabTiles &t, unsigned index) {
        const unsigned parts = static_cast<unsigned>(t.parts), wide = static_cast<unsigned>(t.wide_tiles);
        const unsigned number = parts == 1 ? index : index / parts, part = index - number * parts;
        const unsigned group = wide == 1 ? number : number / wide;
        tile = number;
        slab = int64_t(group) * t.group;
        slabs = t.slabs.outer - slab < t.group ? static_cast<int>(t.slabs.outer - slab) : t.group;
        pack = static_cast<int>(number - group * wide) * t.width;
        from = part * t.part;
        to = from + t.part;
        first_part = part == 0;
    }
};

/* A thread's packs of the input: `step` in [from, to). */
template <typename T, int N> struct SlabSpan {
    const T *begin; /* of the slab */
    int head;       /* elements before the first pack */
    int edges;      /* before the first and after the last pack */
    int64_t packs;  /* dense: of the slab */

    DEVICE SlabSpan(const SlabTiles &t, const T *slab) : begin(slab), head(0), edges(0), packs(0) {
        if (N > 1 && t.dense) {
            const AlignedSpan<const T> span(slab, t.slabs.length * t.slabs.inner);
            head = span.head;
            edges = span.edges;
            packs = span.packs;
        }
    }
    /* Steps that a column of packs has. */
    DEVICE int64_t steps(const SlabTiles &t, int pack) const {
        if (N == 1 || !t.dense)
            return t.slabs.length;
        return packs <= pack ? 0 : 1 + t.by_packs.quotient(static_cast<unsigned>(packs - 1 - pack));
    }
    /* The position in the slab of an edge element, and the row it belongs to. */
    DEVICE int64_t edge(int e, int64_t elements) const {
        return e < head ? e : elements - (edges - e);
    }
    DEVICE int row_of_edge(int e, int inner) const {
        return e < head ? e % inner : (inner - (edges - e) % inner) % inner;
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

/* How the kernels of an op take slabs. */
struct TileChoice {
    bool both;        /* the gradient is written too */
    bool lines;       /* packs may hold elements of several rows */
    int in_flight;    /* packs that a thread loads at a time; of one element: twice that */
    int most_threads; /* per block, if a pack holds several rows */
    bool split;       /* steps may be split among blocks that merge statistics */
};

/* Blocks that fill any device. */
constexpr int64_t ENOUGH_TILES = 528;

static inline int64_t gcd_of(int64_t a, int64_t b) {
    return b == 0 ? a : gcd_of(b, a % b);
}

static inline SlabTiles tiles_of(const Slabs &s, int bytes, const TileChoice &how) {
    SlabTiles t = {};
    t.slabs = s;
    const int wide = 16 / bytes;
    const bool dense = s.dense(0) && (!how.both || s.dense(1));
    const bool across = s.packs_across(0, bytes) && (!how.both || s.packs_across(1, bytes));
    const int64_t common = gcd_of(s.inner, wide), period = s.inner / common; /* packs of a dense step */
    const bool whole = common < wide; /* a row has elements in several columns of packs */
    const bool fits = s.slab_elements() / wide < INT32_MAX && (!whole || period <= how.most_threads);
    const bool long_enough = !whole || s.slab_elements() >= 2 * period * wide * how.in_flight;
    t.dense = dense && fits && long_enough && (s.inner == 1 || how.lines);
    const bool packs = t.dense || (across && how.lines && s.inner > 1);
    t.elements = packs ? wide : 1;
    t.lines = packs && s.inner > 1 ? wide : 1;
    t.dense = t.dense && !(across && s.inner > 1);
    int64_t columns = s.inner;
    if (t.dense) {
        columns = period;
        t.stride = t.grad_stride = period * wide;
        t.pack_stride = t.grad_pack_stride = wide;
        t.steps = ceil_div(s.slab_elements(), t.stride);
    } else {
        columns = s.inner / t.elements;
        t.stride = s.step[0];
        t.grad_stride = s.step[1];
        t.pack_stride = s.across[0] * t.elements;
        t.grad_pack_stride = s.across[1] * t.elements;
        t.steps = s.length;
    }
    const int in_flight = t.elements == 1 ? 2 * how.in_flight : how.in_flight;
    const int64_t bytes_of_all = s.rows() * s.length * bytes;
    const int usual = bytes_of_all < 8 << 20 ? 128 : 256;
    const int64_t most_columns = INT32_MAX;
    if (columns > most_columns)
        columns = most_columns; /* refused by why_not */
    t.packs = static_cast<int>(columns);
    /* Threads down the steps: as many as have full loads. */
    const int64_t full = max(t.steps / in_flight, int64_t(1));
    t.down = 1;
    const int most_down = columns == 1 ? usual : columns < WARP ? static_cast<int>(usual / columns) : 8;
    if (columns == 1)
        while (t.down < most_down && t.down < full)
            t.down *= 2;
    else
        t.down = static_cast<int>(max(min(full, int64_t(most_down)), int64_t(1)));
    const bool keep_whole = t.dense && whole;
    const int64_t widest = keep_whole ? columns : max(usual / t.down, 1);
    if (keep_whole)
        while (t.down > 1 && t.down * columns > max(int64_t(how.most_threads / 2), columns))
            t.down--;
    t.wide_tiles = static_cast<int>(ceil_div<int64_t>(columns, widest));
    t.width = static_cast<int>(ceil_div<int64_t>(columns, t.wide_tiles));
    t.group = 1;
    if (t.wide_tiles == 1) {
        const int64_t fit = max(usual / (t.width * t.down), 1), enough = s.outer / ENOUGH_TILES;
        t.group = static_cast<int>(max(min(fit, enough), int64_t(1)));
    }
    t.threads = round_up(t.group * t.width * t.down, WARP);
    t.columns = t.wide_tiles == 1 ? static_cast<int>(s.inner) : t.width * t.lines;
    const int64_t whole_tiles = ceil_div<int64_t>(s.outer, t.group) * t.wide_tiles;
    const int64_t least = int64_t(t.down) * in_flight; /* steps of a part */
    t.parts = 1;
    if (how.split && whole_tiles < ENOUGH_TILES)
        t.parts = max(min(ceil_div(ENOUGH_TILES, whole_tiles), t.steps / least), int64_t(1));
    if (!how.split) /* nothing to merge: short blocks */
        t.parts =
            max(max(t.steps / (4 * least), min(ceil_div(ENOUGH_TILES, whole_tiles), t.steps / least)), int64_t(1));
    t.part = ceil_div(t.steps, t.parts);
    t.parts = ceil_div(t.steps, t.part);
    t.tiles = whole_tiles * t.parts;
    const int64_t entries =
        t.dense && t.lines > 1 ? ceil_div<int64_t>(int64_t(t.width) * t.lines, s.inner) * t.down : t.down;
    t.lanes = 1;
    while (t.lanes < WARP && t.lanes < entries && 2 * t.lanes * t.group * t.columns <= t.threads)
        t.lanes *= 2;
    t.by_packs = Divisor(t.packs);
    t.by_columns = Divisor(t.columns);
    return t;
}

#endif
