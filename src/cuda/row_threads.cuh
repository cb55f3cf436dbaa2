/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of many rows that lie side by side: a thread takes a row and finishes it. The threads of
 * a warp load adjacent elements, one each; enough of them are in flight to fill the bus. If fewer rows
 * than a warp are adjacent, a cache line is loaded for the first of its elements and found in L1 for
 * the others.
 *
 * What an Op must have: see row_stream.cuh.
 */
#ifndef RAFTER_CUDA_ROW_THREADS_CUH
#define RAFTER_CUDA_ROW_THREADS_CUH

#include "cuda/slabs.cuh"

constexpr int ROW_THREADS_BLOCK = 256;

/* As a kernel argument. */
struct RowThreads {
    Slabs slabs;
    unsigned rows, blocks;
    Divisor by_inner;
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Why these rows are not for threads, or NULL. */
static inline const char *why_not_threads(const Slabs &s, int bytes) {
    if (s.rows() > INT32_MAX / 2 || s.length > INT32_MAX / 2 || s.inner > INT32_MAX / 2)
        return "it counts rows and columns in 31 bits";
    if (s.inner == 1 || s.across[0] != 1)
        return "rows are not side by side";
    if (s.inner * bytes < 14)
        return "fewer than 14 bytes of rows are adjacent";
    /* A thread per row has to fill the device. */
    return s.rows() >= 1 << 17 || s.length <= 64 ? NULL : "rows are few and long";
}

static inline RowThreads threads_of(const Slabs &s, int blocks) {
    RowThreads t = {};
    t.slabs = s;
    t.rows = static_cast<unsigned>(s.rows());
    t.blocks = static_cast<unsigned>(min(ceil_div<int64_t>(s.rows(), ROW_THREADS_BLOCK), int64_t(blocks)));
    t.by_inner = Divisor(s.inner);
    return t;
}

/* ---- device ---------------------------------------------------------------------------------- */

template <class Op, typename T, int STEPS> DEVICE void thread_rows(Op &op, const RowThreads &t) {
    const int length = static_cast<int>(t.slabs.length);
    const int64_t step = t.slabs.step[0];
    Pack<T, 1> packs[STEPS];
    bool first_row = true;
    for (unsigned i = blockIdx.x * ROW_THREADS_BLOCK + threadIdx.x; i < t.rows || first_row;
         i += gridDim.x * ROW_THREADS_BLOCK) {
        const unsigned taken = i < t.rows ? i : 0, slab = t.by_inner.quotient(taken);
        const int column = static_cast<int>(taken - slab * t.by_inner.number);
        int64_t offset[3];
        t.slabs.walk.offsets(slab, offset);
        const T *const first = t.slabs.at<const T>(0, offset[0]) + column, *p = first;
        const int64_t number = offset[2] + column * t.slabs.row_step;
        const auto load = [&](int l) {
            if (l + STEPS <= length) {
#pragma unroll
                for (int k = 0; k < STEPS; k++, p += step)
                    packs[k] = load_once<T, 1>(p);
            } else {
#pragma unroll
                for (int k = 0; k < STEPS; k++, p += step)
                    packs[k] = load_once_if<T, 1>(l + k < length, p, -INFINITY);
            }
        };
        typename Op::Row row = i < t.rows ? op.load_row(number) : op.no_row();
        load(0);
        if (first_row)
            op.begin();
        first_row = false;
        op.look(
            row, [&] { return first; }, step);
        typename Op::Stats g = op.none();
#pragma unroll 1
        for (int l = 0; l < length;) {
            op.add(g, packs, min(length - l, STEPS), l, 1);
            l += STEPS;
            if (l < length)
                load(l);
        }
        op.finish(row, number, g);
    }
}

#endif
