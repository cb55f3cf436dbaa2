/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of rows that lie side by side, or of very short rows: one thread reduces and finishes a row.
 * The lanes of a warp load adjacent elements, one each, and issue enough loads ahead to use the full
 * memory bandwidth. If fewer rows than a warp has lanes are side by side, the first load of a cache line
 * brings it into L1, where the later ones find it. Few long rows are cut into parts, with a thread for
 * each part; a second kernel merges the parts, in order, and finishes the rows.
 *
 * An Op has what row_stream.cuh asks for, and Stats merge(Stats, Stats).
 */
#ifndef RAFTER_CUDA_ROW_THREADS_CUH
#define RAFTER_CUDA_ROW_THREADS_CUH

#include "cuda/summation_order.cuh"
#include "cuda/slabs.cuh"

constexpr int ROW_THREADS_BLOCK = 256;
constexpr int64_t MANY_THREADS = 1 << 17; /* enough to fill any device */

/* As a kernel argument. */
struct RowThreads {
    Slabs slabs;
    unsigned rows;
    int parts, part; /* parts of a row; elements of a part (the last one may be shorter) */
    unsigned blocks, merge_blocks;
    int merge_lanes; /* threads that merge the parts of a row */
    Divisor by_inner, by_rows;
    bool flat;       /* slabs are evenly spaced, a row's index is its number, and offsets fit into 31 bits */
    int slab_stride; /* if flat: elements from one slab to the next */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Why these rows are not for threads, or NULL. */
static inline const char *why_not_threads(const Slabs &s, int bytes) {
    if (s.rows() > MOST_INT_ROWS || s.length > INT32_MAX / 2)
        return "it counts rows and columns in 31 bits";
    if (s.inner == 1) { /* rows are at most 32 bytes apart: a warp touches eight cache lines at a time */
        const bool close = s.step[0] == 1 && s.walk.dims == 1 && s.walk.stride[0][0] * bytes <= 32;
        return close && s.length * bytes <= 32 ? NULL : "rows are not side by side";
    }
    if (s.across[0] != 1)
        return "rows are not side by side";
    if (s.inner * bytes < 14)
        return "fewer than 14 bytes of rows are adjacent";
    /* Few rows of a large tensor are read faster by packs. */
    return s.rows() >= MANY_THREADS || s.rows() * s.length * bytes <= 64 << 20 ? NULL : "rows are few and long";
}

/* Parts depend on the shape only, so that all devices compute the same bits. by_length: only on the length of rows.
 * `blocks`: the most that a grid has. */
static inline RowThreads threads_of(const Slabs &s, int blocks, bool by_length) {
    RowThreads t = {};
    t.slabs = s;
    t.rows = static_cast<unsigned>(s.rows());
    const int64_t filling = min(ceil_div(MANY_THREADS, s.rows()), s.length / 32);
    const int64_t parts = by_length        ? ceil_div(s.length, COLUMN_PART)
                          : s.length <= 64 ? 1
                                           : max(min(filling, int64_t(512)), int64_t(1));
    t.part = static_cast<int>(round_up<int64_t>(ceil_div(s.length, parts), 16));
    t.parts = static_cast<int>(ceil_div<int64_t>(s.length, t.part));
    const auto needed = [&](int64_t threads) {
        return static_cast<unsigned>(min(ceil_div<int64_t>(threads, ROW_THREADS_BLOCK), int64_t(blocks)));
    };
    t.merge_lanes = t.parts > 8 ? WARP : 1;
    t.blocks = needed(s.rows() * t.parts);
    t.merge_blocks = needed(s.rows() * t.merge_lanes);
    t.by_inner = Divisor(s.inner);
    t.by_rows = Divisor(s.rows());
    const int64_t slab_stride = s.outer > 1 ? s.walk.stride[0][0] : 0;
    t.flat = s.walk.dims <= 1 && (s.inner == 1 || (s.row_step == 1 && s.across[0] == 1)) &&
             (s.outer <= 1 || s.walk.stride[2][0] == s.inner) && slab_stride >= 0 &&
             (s.outer - 1) * slab_stride + s.inner <= INT32_MAX;
    t.slab_stride = t.flat ? static_cast<int>(slab_stride) : 0;
    return t;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* Where a row begins, and its number in the tensors of one number per row. `index` counts the rows of all slabs. */
template <typename T> struct PlacedRow {
    const T *first;
    int64_t number;

    DEVICE PlacedRow(const RowThreads &t, unsigned index) {
        const unsigned slab = t.by_inner.quotient(index);
        const int column = static_cast<int>(index - slab * t.by_inner.number);
        if (t.flat) {
            first = t.slabs.at<const T>(0, 0) + (static_cast<int>(slab) * t.slab_stride + column);
            number = index;
            return;
        }
        int64_t offset[3];
        t.slabs.walk.offsets(slab, offset);
        first = t.slabs.at<const T>(0, offset[0]) + column * t.slabs.across[0];
        number = offset[2] + column * t.slabs.row_step;
    }
};

/* The loop of a kernel: a thread per row, or if PARTS, per part of a row. part_stats [part][row] gets the statistics of
 * parts. STEPS: elements that a thread loads before it uses the first one. */
template <class Op, typename T, int STEPS, bool PARTS>
DEVICE void thread_rows(Op &op, const RowThreads &t, typename Op::Stats *part_stats) {
    const int64_t step = t.slabs.step[0];
    const unsigned tasks = t.rows * (PARTS ? t.parts : 1);
    Pack<T, 1> packs[STEPS];
    bool first_row = true;
    for (unsigned i = blockIdx.x * ROW_THREADS_BLOCK + threadIdx.x; i < tasks || first_row;
         i += gridDim.x * ROW_THREADS_BLOCK) {
        const unsigned task = i < tasks ? i : 0;
        const int part = PARTS ? static_cast<int>(t.by_rows.quotient(task)) : 0;
        const PlacedRow<T> place(t, task - part * t.rows);
        const int from = PARTS ? part * t.part : 0,
                  to = PARTS ? min(from + t.part, static_cast<int>(t.slabs.length)) : static_cast<int>(t.slabs.length);
        const T *p = place.first + from * step;
        const auto load = [&](int l) {
            if (l + STEPS <= to) {
#pragma unroll
                for (int k = 0; k < STEPS; k++, p += step)
                    packs[k] = load_once<T, 1>(p);
            } else {
#pragma unroll
                for (int k = 0; k < STEPS; k++, p += step)
                    packs[k] = load_once_if<T, 1>(l + k < to, p, -INFINITY);
            }
        };
        typename Op::Row row = !PARTS && i < tasks ? op.load_row(place.number) : op.no_row();
        load(from);
        if (first_row)
            op.begin();
        first_row = false;
        if constexpr (!PARTS)
            op.look(
                row, [&] { return place.first; }, step);
        typename Op::Stats g = op.none();
#pragma unroll 1
        for (int l = from; l < to;) {
            op.add(g, packs, min(to - l, STEPS), l, 1);
            l += STEPS;
            if (l < to)
                load(l);
        }
        if constexpr (!PARTS)
            op.finish(row, place.number, g);
        else if (i < tasks)
            part_stats[i] = g;
    }
}

/* The second kernel, if PARTS: LANES lanes merge the parts of a row, and lane 0 of them finishes it. */
template <class Op, typename T, int LANES>
DEVICE void merge_thread_rows(Op &op, const RowThreads &t, const typename Op::Stats *part_stats) {
    const int lane = threadIdx.x % LANES;
    unsigned i = (blockIdx.x * ROW_THREADS_BLOCK + threadIdx.x) / LANES;
    const unsigned rounds = ceil_div<unsigned>(t.rows, gridDim.x * (ROW_THREADS_BLOCK / LANES));
    for (unsigned round = 0; round < rounds; round++, i += gridDim.x * (ROW_THREADS_BLOCK / LANES)) {
        const bool present = i < t.rows;
        const PlacedRow<T> place(t, present ? i : 0);
        typename Op::Row row = present && lane == 0 ? op.load_row(place.number) : op.no_row();
        op.look(
            row, [&] { return place.first; }, t.slabs.step[0]);
        if (round == 0)
            op.begin();
        typename Op::Stats g = op.none();
#pragma unroll 4
        for (int part = lane; part < t.parts; part += LANES)
            g = op.merge(g, part_stats[int64_t(part) * t.rows + (present ? i : 0)]);
        op.finish(row, place.number, op.merge_lanes(g, LANES));
    }
}

#endif
