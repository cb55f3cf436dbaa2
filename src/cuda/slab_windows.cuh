/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of long rows that lie side by side (slabs.cuh). A window is some adjacent rows of a slab, and a
 * step of a window is one element of each. Of the threads of a block, `across` lie along a window, with N
 * adjacent rows each, and `down` follow each other down the steps.
 *
 * Threads load aligned packs, whatever the alignment of a step. So the packs of a step begin up to N - 1 rows
 * before the window, and elements outside of the window do not count. `down` is a multiple of N. So a thread
 * takes every down-th step, its packs have the same offset from the window in all of these, and element j of
 * them always belongs to the same row.
 *
 * If few rows are side by side and slabs are dense, the window is the whole slab, and a step has `repeat`
 * elements of each row. If such slabs are small, a block takes `group` of them.
 *
 * If there are few windows, blocks share the steps of a window (`parts`), and a second kernel merges their
 * statistics in order.
 *
 * What an Op must have: see slab_statistics in slab_kernels.cuh.
 */
#ifndef RAFTER_CUDA_SLAB_WINDOWS_CUH
#define RAFTER_CUDA_SLAB_WINDOWS_CUH

#include "cuda/slab_kernels.cuh"

constexpr int WINDOW_BLOCK = 256;
constexpr int WINDOW_STEPS = 8; /* packs that a thread loads before it uses the first one */
/* A block of merge_windows: threads along the rows, and down the parts. */
constexpr int MERGE_ACROSS = 32, MERGE_DOWN = WINDOW_BLOCK / MERGE_ACROSS;

/* As a kernel argument. */
struct SlabWindows {
    Slabs slabs;
    int width, windows;        /* elements of a step of a window, at most; windows of a slab */
    int repeat;                /* elements of each row in a step */
    int group;                 /* slabs per block */
    int steps;                 /* of a slab */
    int64_t step;              /* elements from one step to the next */
    int across, down, threads; /* threads along a window; down the steps; of a block */
    int parts, part;           /* blocks per window; steps of each */
    int64_t rows;              /* of all slabs */
    int64_t extent;            /* elements from the first one of the tensor to the end of the last one */
    int lanes;                 /* threads that merge the statistics of a row */
    int64_t blocks;
    Divisor by_parts, by_windows, by_slab, by_across, by_inner, by_repeat; /* by_slab: threads of a slab */

    /* Statistics in shared memory. */
    __host__ DEVICE int entries() const {
        return group * down * width;
    }
    int64_t merge_blocks() const {
        return ceil_div<int64_t>(rows, MERGE_ACROSS);
    }
    /* Statistics in the workspace. */
    int64_t part_stats() const {
        return parts > 1 ? rows * parts : 0;
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

/* What the kernels of an op can do. */
struct WindowChoice {
    int bytes, elements; /* bytes per element; elements per pack */
    bool repeats;        /* whether a step may have several elements of a row */
    /* Threads that a multiprocessor runs at once: few windows are cut into whole waves of blocks. 0: they are not. */
    int resident = 0;

    /* Elements across which the lanes of one warp lie. */
    int64_t widest() const {
        return int64_t(WARP) * elements;
    }
};

/* Whether a window may be a whole slab, with several elements of a row per step. */
static inline bool repeats_in_window(const Slabs &s, const WindowChoice &how) {
    return how.repeats && s.dense(0) && s.inner > 1 && 2 * s.inner <= how.widest() - how.elements + 1;
}

/* The value of SlabWindows::repeat. A thread has at least WINDOW_STEPS packs, if the slab has enough elements. */
static inline int64_t window_repeat(const Slabs &s, const WindowChoice &how) {
    if (!repeats_in_window(s, how))
        return 1;
    const int64_t unit = how.elements / gcd_of(s.inner, how.elements), per_lane = how.elements * WINDOW_STEPS * 8;
    const int64_t width = max(min(s.slab_elements() / per_lane, int64_t(WARP)), int64_t(1)) * how.elements;
    /* Whole packs per step, if the slabs are aligned. */
    const int64_t aligned = max(width / s.inner / unit, int64_t(1)) * unit;
    if (s.aligned(0, how.bytes) && aligned * s.inner <= how.widest() && aligned <= s.length)
        return aligned;
    return min(max((width - how.elements + 1) / s.inner, int64_t(1)), s.length);
}

/* Why rows are not for windows, or NULL. */
static inline const char *why_not_windows(const Slabs &s, const WindowChoice &how) {
    constexpr int64_t LONG_WINDOW = 48 << 10, LONG_SLAB = 2 << 10, SMALL = 64 << 20, FEW_ROWS = 1 << 16;
    if (s.inner == 1 || s.across[0] != 1)
        return "rows are not side by side";
    if (s.length > 1 && s.step[0] < s.inner) /* more than one of a thread's packs could reach out of the tensor */
        return "steps overlap";
    const bool repeats = repeats_in_window(s, how);
    if (!repeats && s.inner < 3 * how.elements)
        return "too few rows are side by side";
    const bool few = s.rows() <= FEW_ROWS && s.rows() * s.length * how.bytes <= SMALL;
    if (!(few && s.length >= 16 * how.elements) &&
        min(s.inner, how.widest()) * s.length * how.bytes < (repeats ? LONG_SLAB : LONG_WINDOW))
        return "rows are short";
    return too_large(s) || s.rows() > INT32_MAX || s.outer * ceil_div<int64_t>(s.inner, 64) > INT32_MAX / 4
               ? "it counts rows and blocks in 31 bits"
               : NULL;
}

/* Whether windows are faster than the variants that take a row, or a column of packs, per thread. As measured on an
 * H200: in nearly all large tensors; in others if few rows are side by side, or if rows are so long that blocks share
 * them. */
static inline bool windows_are_faster(const Slabs &s, int bytes) {
    constexpr int64_t LARGE = 768 << 20, MEDIUM = 64 << 20, LONG_ROW = 16384, SHORT_ROW = 128, NARROW_SLAB = 16;
    constexpr int64_t LEAST_NARROW = 512, LINE = 128, LEAST_LINES = 1024; /* steps; bytes; steps */
    const int64_t all = s.rows() * s.length * bytes;
    if (s.length < SHORT_ROW)
        return false;
    if (all >= LARGE) /* all but aligned steps of up to one memory line, unless rows are long */
        return s.inner * bytes > LINE || s.inner * bytes % 16 != 0 || s.length >= LEAST_LINES;
    const bool narrow = s.inner < NARROW_SLAB && s.length >= LEAST_NARROW;
    return s.length >= LONG_ROW ? narrow || (bytes == 2 && all >= MEDIUM) : narrow && all >= MEDIUM;
}

/* Sets how many blocks share the steps of a window. A turn is the WINDOW_STEPS loads that a thread has in flight.
 *
 * Usually there are so many blocks that the last wave hardly counts. But a block of few turns spends as long on
 * starting and ending as on its turns, and leaves a part to merge. So few windows (`waves`) are cut into one wave of
 * blocks, or into two if blocks still have eight turns each. */
static inline void split_windows(SlabWindows &w, int64_t tiles, int64_t least, int64_t most, int resident) {
    constexpr int64_t FILLING = 792, MANY = 4096, FEW_TURNS = 16, TURNS = 8, MULTIPROCESSORS = 132;
    const int64_t turn = int64_t(w.down) * WINDOW_STEPS, steps = w.steps, wave = resident / w.threads * MULTIPROCESSORS;
    int64_t parts = max(min(ceil_div(MANY, tiles), steps / (4 * turn)), min(ceil_div(FILLING, tiles), steps / turn));
    const bool waves = 8 * tiles <= wave && steps < FEW_TURNS * turn * parts;
    if (waves)
        parts = min((steps * tiles >= 2 * wave * TURNS * turn ? 2 : 1) * wave / tiles, steps / turn);
    parts = w.group > 1 ? 1 : max(min(max(parts, least), most), int64_t(1));
    const int64_t unit = waves && steps >= parts * turn ? turn : w.down;
    w.part = static_cast<int>(round_up<int64_t>(ceil_div(steps, parts), unit));
    w.parts = static_cast<int>(ceil_div<int64_t>(steps, w.part));
    w.blocks = tiles * w.parts;
}

/* least, most: bounds for the parts of a row. How rows are cut depends on shape and alignment only, so that all devices
 * compute the same bits. */
static inline SlabWindows slab_windows_of(const Slabs &s, const WindowChoice &how, int64_t least = 1,
                                          int64_t most = INT32_MAX) {
    constexpr int64_t ENOUGH_BLOCKS = 264;
    SlabWindows w = {};
    w.slabs = s;
    w.repeat = static_cast<int>(window_repeat(s, how));
    const int64_t adjacent = s.inner * w.repeat;
    w.step = w.repeat > 1 ? adjacent : s.step[0];
    w.steps = static_cast<int>(ceil_div<int64_t>(s.length, w.repeat));
    const bool whole =
        w.repeat > 1 ? s.aligned(0, how.bytes) && adjacent * how.bytes % 16 == 0 : s.packs_across(0, how.bytes);
    const int64_t spare = whole ? 0 : how.elements - 1;
    w.windows = static_cast<int>(ceil_div<int64_t>(adjacent, how.widest() - spare));
    w.width = static_cast<int>(ceil_div<int64_t>(adjacent, w.windows));
    if (whole)
        w.width = round_up(w.width, how.elements);
    w.across = static_cast<int>(ceil_div<int64_t>(w.width + spare, how.elements));
    w.down = 8;
    w.group = 1;
    if (repeats_in_window(s, how) && least == 1)
        w.group = static_cast<int>(
            max(min(int64_t(WINDOW_BLOCK / (w.across * w.down)), s.outer / ENOUGH_BLOCKS), int64_t(1)));
    while (2 * w.down * w.across * w.group <= WINDOW_BLOCK)
        w.down *= 2;
    w.threads = round_up(w.group * w.across * w.down, WARP);
    w.rows = s.rows();
    w.extent = 1 + (s.length - 1) * s.step[0] + (s.inner - 1) * s.across[0];
    for (int d = 0; d < s.walk.dims; d++)
        w.extent += (s.walk.size[d] - 1) * s.walk.stride[0][d];
    split_windows(w, ceil_div<int64_t>(s.outer, w.group) * w.windows, least, most, how.resident);
    w.lanes = 1;
    while (w.lanes < WARP && w.lanes < w.down * w.repeat && 2 * w.lanes * w.group * (w.width / w.repeat) <= w.threads)
        w.lanes *= 2;
    w.by_parts = Divisor(w.parts);
    w.by_windows = Divisor(w.windows);
    w.by_slab = Divisor(w.across * w.down);
    w.by_across = Divisor(w.across);
    w.by_inner = Divisor(s.inner);
    w.by_repeat = Divisor(w.repeat);
    return w;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* Loads elements [from, to) of a pack at the edge of the tensor; the others are -inf. */
template <typename T, int N> DEVICE Pack<T, N> load_some_elements(const T *p, int from, int to) {
    Pack<T, N> pack = all_of<T, N>(-INFINITY);
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j >= from && j < to)
            pack.v[j] = p[j];
    return pack;
}

/* The block's slabs, window and steps. */
struct WindowBlock {
    const SlabWindows &w;
    unsigned slab, part; /* the first slab; which part of the steps */
    int begin;           /* the window's first element in a step of the slab */
    int width, rows;     /* of this window: elements per step; rows of each slab */
    int from, to;        /* steps of this part */

    DEVICE explicit WindowBlock(const SlabWindows &windows) : w(windows) {
        const unsigned tile = w.by_parts.quotient(blockIdx.x), group = w.by_windows.quotient(tile);
        part = blockIdx.x - tile * w.by_parts.number;
        slab = group * w.group;
        begin = static_cast<int>(tile - group * w.by_windows.number) * w.width;
        width = min(w.width, static_cast<int>(w.slabs.inner) * w.repeat - begin);
        rows = w.repeat == 1 ? width : static_cast<int>(w.slabs.inner);
        from = static_cast<int>(part) * w.part;
        to = min(from + w.part, w.steps);
    }
    /* Loads row c of the block, counted over all of its slabs. */
    template <class Op, typename T> DEVICE typename Op::Row load_row(const Op &op, int c) const {
        const int of = w.group == 1 ? 0 : static_cast<int>(w.by_inner.quotient(static_cast<unsigned>(c)));
        if (of >= w.group || c - of * rows >= rows || slab + of >= w.slabs.outer)
            return op.no_row();
        const int column = begin + c - of * rows;
        int64_t offset[3];
        w.slabs.walk.offsets(slab + of, offset);
        return op.load_row(offset[2] + column * w.slabs.row_step, w.slabs.at<const T>(0, offset[0]) + column);
    }
    /* Merges the threads' statistics in entries[]. Those of a row are left at its first entry, or in part_stats[] if
     * there are several parts. */
    template <class Op>
    DEVICE void merge(const Op &op, typename Op::Stats *entries, typename Op::Stats *part_stats) const {
        const int lane = threadIdx.x & (w.lanes - 1), groups = w.threads / w.lanes, all_rows = w.group * rows;
        const int inner = static_cast<int>(w.slabs.inner);
        for (int base = 0; base < all_rows; base += groups) {
            const int c = base + threadIdx.x / w.lanes;
            const int slab_at = w.group == 1 ? 0 : static_cast<int>(w.by_inner.quotient(static_cast<unsigned>(c)));
            const int row = c - slab_at * rows;
            typename Op::Stats *const of_row = entries + slab_at * w.down * w.width + row;
            const typename Op::Stats all =
                merge_all(op, c < all_rows ? w.down * w.repeat : 0, lane, w.lanes, [&](int e) {
                    const int y = static_cast<int>(w.by_repeat.quotient(static_cast<unsigned>(e)));
                    return of_row[y * w.width + (e - y * w.repeat) * inner];
                });
            if (lane != 0 || c >= all_rows)
                continue;
            if (w.parts > 1)
                part_stats[part * w.rows + slab * w.slabs.inner + begin + row] = all;
            else
                *of_row = all; /* nobody else reads it before the barrier */
        }
    }
};

/* The body of the first kernel. `entries`: in shared memory. part_stats: [part][slab][row of the slab]. */
template <class Op, typename T, int N>
DEVICE void window_statistics_of(Op &op, const SlabWindows &w, typename Op::Stats *entries,
                                 typename Op::Stats *part_stats) {
    typedef typename Op::Stats Stats;
    const WindowBlock block(w);
    const int of_group = static_cast<int>(w.by_slab.quotient(threadIdx.x)),
              index = static_cast<int>(threadIdx.x - of_group * w.by_slab.number),
              y = static_cast<int>(w.by_across.quotient(static_cast<unsigned>(index))), x = index - y * w.across;
    const bool present = of_group < w.group && block.slab + of_group < w.slabs.outer;
    int64_t offset[3];
    w.slabs.walk.offsets(block.slab + (present ? of_group : 0), offset);
    const T *const window = w.slabs.at<const T>(0, offset[0]) + block.begin;
    int l = block.from + y;
    const T *p = window + l * w.step;
    /* The first element of the thread's packs, counted from the window's; negative before it. */
    const int column = x * N - static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % N);
    p += column;
    const bool active = present && column < block.width && column + N > 0;
    int to = active ? block.to : 0;
    const int64_t ahead = w.down * w.step;
    Stats g[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        g[j] = op.none();
    /* The thread's first and last pack may reach out of the tensor, and if steps have several elements of a row, the
     * last step may be shorter than the others: add_edge reads only the elements that count. */
    const T *const end = w.repeat == 1 ? w.slabs.at<const T>(0, w.extent) : window + w.slabs.length * w.slabs.inner;
    const auto add_edge = [&](const T *edge, int step) {
        const int from = -column,
                  until = end - edge < block.width - column ? static_cast<int>(end - edge) : block.width - column;
        const Pack<T, N> pack[1] = {load_some_elements<T, N>(edge, from, until)};
        Stats before[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            before[j] = g[j];
        op.add_lines(g, pack, 1, step, 1);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < from || j >= until)
                g[j] = before[j];
    };
    if (l < to && p < w.slabs.at<const T>(0, 0)) {
        add_edge(p, l);
        l += w.down;
        p += ahead;
    }
    const int last = l + ((to - 1 - l) & -w.down); /* this thread's last step */
    if (l < to && p + (last - l) * w.step + N > end) {
        add_edge(p + (last - l) * w.step, last);
        to = last;
    }
    Pack<T, N> packs[WINDOW_STEPS];
    const auto load = [&] {
#pragma unroll
        for (int k = 0; k < WINDOW_STEPS; k++)
            packs[k] = load_once_if<T, N>(l + k * w.down < to, p + k * ahead, -INFINITY);
    };
    load();
#pragma unroll 1
    while (l < to) {
        int valid = 0;
#pragma unroll
        for (int k = 0; k < WINDOW_STEPS; k++)
            valid += l + k * w.down < to;
        op.add_lines(g, packs, valid, l, w.down);
        l += WINDOW_STEPS * w.down;
        p += WINDOW_STEPS * ahead;
        if (l < to)
            load();
    }
    /* The rows are loaded only now, because registers are scarce above. */
    if (w.parts == 1)
        op.begin();
    else
        wait_for_previous_kernel(); /* the next kernel relies on it: it waits for this one only */
    typename Op::Row row = w.parts == 1 ? block.template load_row<Op, T>(op, threadIdx.x) : op.no_row();
    if (active)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (static_cast<unsigned>(column + j) < static_cast<unsigned>(block.width))
                entries[(of_group * w.down + y) * w.width + column + j] = g[j];
    __syncthreads();
    block.merge(op, entries, part_stats);
    if (w.parts > 1)
        return;
    __syncthreads();
    for (int c = threadIdx.x; c < w.group * block.rows; c += w.threads) {
        if (c != threadIdx.x)
            row = block.template load_row<Op, T>(op, c);
        const int slab_at = w.group == 1 ? 0 : static_cast<int>(w.by_inner.quotient(static_cast<unsigned>(c)));
        op.finish(row, entries[slab_at * w.down * w.width + c - slab_at * block.rows]);
    }
}

/* Loads what op.finish needs of row i, counted over all slabs. */
template <class Op, typename T> DEVICE typename Op::Row load_merged_row(const Op &op, const SlabWindows &w, int64_t i) {
    const unsigned slab = w.by_inner.quotient(static_cast<unsigned>(i)),
                   column = static_cast<unsigned>(i) - slab * w.by_inner.number;
    int64_t offset[3];
    w.slabs.walk.offsets(slab, offset);
    return op.load_row(offset[2] + column * w.slabs.row_step, w.slabs.at<const T>(0, offset[0]) + column);
}

/* Merges parts share, share + SHARES, ... of row i. */
template <int SHARES, class Op>
DEVICE typename Op::Stats merge_share(const Op &op, const SlabWindows &w, const typename Op::Stats *part_stats,
                                      int64_t i, int share) {
    constexpr int AT_ONCE = 8;
    typename Op::Stats g = op.none();
    for (int part = share; part < w.parts; part += AT_ONCE * SHARES) {
        typename Op::Stats loaded[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            loaded[k] =
                part + k * SHARES < w.parts && i < w.rows ? part_stats[(part + k * SHARES) * w.rows + i] : op.none();
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            g = op.merge(g, loaded[k]);
    }
    return g;
}

/* The second kernel: a block takes MERGE_ACROSS rows, and MERGE_DOWN threads share the parts of each. */
template <class Op, typename T>
DEVICE void merge_windows(Op &op, const SlabWindows &w, const typename Op::Stats *part_stats) {
    __shared__ typename Op::Stats shares[WINDOW_BLOCK];
    const int x = threadIdx.x % MERGE_ACROSS, y = threadIdx.x / MERGE_ACROSS;
    const int64_t i = int64_t(blockIdx.x) * MERGE_ACROSS + x;
    typename Op::Row row = op.no_row();
    if (y == 0 && i < w.rows)
        row = load_merged_row<Op, T>(op, w, i);
    op.begin();
    typename Op::Stats g = merge_share<MERGE_DOWN>(op, w, part_stats, i, y);
    shares[threadIdx.x] = g;
    __syncthreads();
    if (y != 0)
        return;
#pragma unroll
    for (int k = 1; k < MERGE_DOWN; k++)
        g = op.merge(g, shares[k * MERGE_ACROSS + x]);
    op.finish(row, g);
}

/* The second kernel for rows of many parts: a warp per row. */
constexpr int MERGE_ROWS = WINDOW_BLOCK / WARP; /* rows per block */

template <class Op, typename T>
DEVICE void merge_windows_by_warps(Op &op, const SlabWindows &w, const typename Op::Stats *part_stats) {
    __shared__ typename Op::Stats shares[WINDOW_BLOCK];
    /* First, adjacent threads load adjacent rows of a part. Then, through shared memory, a warp gets the shares of its
     * row. */
    const int64_t first = int64_t(blockIdx.x) * MERGE_ROWS, own = first + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    typename Op::Row row = op.no_row();
    if (lane == 0 && own < w.rows)
        row = load_merged_row<Op, T>(op, w, own);
    op.begin();
    shares[threadIdx.x] =
        merge_share<WARP>(op, w, part_stats, first + threadIdx.x % MERGE_ROWS, threadIdx.x / MERGE_ROWS);
    __syncthreads();
    op.finish(row, op.merge_lanes(shares[lane * MERGE_ROWS + threadIdx.x / WARP], WARP));
}

#endif
