/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows that lie side by side: a thread takes four adjacent rows and all their elements. It loads
 * packs of four elements, one of each row, several of them before it uses the first; nothing goes
 * through shared memory, and the numbers of four rows (labels, lse) are loaded and stored at once.
 */
#ifndef RAFTER_CUDA_COLUMN_PACKS_CUH
#define RAFTER_CUDA_COLUMN_PACKS_CUH

#include <type_traits>

#include "cuda/slabs.cuh"

constexpr int COLUMNS = 4; /* rows of a thread */

/* As a kernel argument. */
struct ColumnPacks {
    Slabs slabs;
    unsigned packs;   /* of COLUMNS rows */
    Divisor by_inner; /* packs of a slab */
    int length;
    int parts, part; /* of the rows, for gradients; elements of each part but the last */
    unsigned across; /* blocks of a part */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* How a kernel takes rows. */
struct ColumnChoice {
    int tensors;     /* 2 if there is a gradient */
    int64_t longest; /* elements of a row */
    bool splits;     /* rows may be cut into parts */
};

/* Why these rows are not for packs of columns, or NULL. */
static inline const char *why_not_column_packs(const Slabs &s, const ColumnChoice &how, int bytes) {
    constexpr int64_t FEW_STEPS = 8, ROWS_PER_STEP = 2048, MANY_ROWS = 1 << 18, LEAST_ROWS = 4096;
    if (s.inner == 1 || s.row_step != 1)
        return "rows are not side by side";
    if (s.inner % COLUMNS != 0 || s.inner * bytes < 32)
        return "the number of rows side by side is not a multiple of 4, or small";
    if (s.rows() > INT32_MAX)
        return "it counts rows in 31 bits";
    const int64_t enough = how.splits ? LEAST_ROWS : min(ROWS_PER_STEP * s.length, MANY_ROWS);
    if (s.length > how.longest || (s.length > FEW_STEPS && s.rows() < enough))
        return "rows are too long for one thread";
    for (int t = 0; t < how.tensors; t++) {
        bool whole = s.across[t] == 1 && reinterpret_cast<uintptr_t>(s.data[t]) % (COLUMNS * bytes) == 0 &&
                     (s.length <= 1 || s.step[t] % COLUMNS == 0);
        for (int d = 0; d < s.walk.dims; d++)
            whole = whole && (s.walk.size[d] <= 1 || s.walk.stride[t][d] % COLUMNS == 0);
        if (!whole)
            return "packs of 4 elements are not aligned";
    }
    return NULL;
}

/* For blocks of `threads` threads. */
static inline ColumnPacks column_packs_of(const Slabs &s, bool splits, int threads) {
    constexpr int64_t ENOUGH_THREADS = 1 << 18, LEAST_PART = 8;
    ColumnPacks c = {};
    c.slabs = s;
    c.packs = static_cast<unsigned>(s.rows() / COLUMNS);
    c.by_inner = Divisor(s.inner / COLUMNS);
    c.length = static_cast<int>(s.length);
    const int64_t parts =
        splits ? max(min(ceil_div<int64_t>(ENOUGH_THREADS, c.packs), s.length / LEAST_PART), int64_t(1)) : 1;
    c.part = static_cast<int>(round_up<int64_t>(ceil_div(s.length, parts), 8));
    c.parts = static_cast<int>(ceil_div<int64_t>(s.length, c.part));
    c.across = static_cast<unsigned>(ceil_div<int64_t>(c.packs, threads));
    return c;
}

/* Calls f(std::integral_constant<int, STEPS>()) with the steps that a thread loads at a time. */
template <typename F> static void for_column_steps(int64_t length, F f) {
    if (length <= 2)
        f(std::integral_constant<int, 2>());
    else if (length <= 4)
        f(std::integral_constant<int, 4>());
    else
        f(std::integral_constant<int, 8>());
}

/* ---- device ---------------------------------------------------------------------------------- */

/* Pack `index` of rows: where its first elements are, in the input and in its gradient, and the number
 * of its first row. */
template <typename T> struct PlacedColumns {
    const T *x;
    T *dx;
    int row;

    DEVICE PlacedColumns(const ColumnPacks &c, unsigned index) {
        const unsigned slab = c.by_inner.quotient(index);
        const int column = static_cast<int>(index - slab * c.by_inner.number) * COLUMNS;
        int64_t offset[3];
        c.slabs.walk.offsets(slab, offset);
        x = c.slabs.at<const T>(0, offset[0]) + column;
        dx = c.slabs.at<T>(1, offset[1]) + column;
        row = static_cast<int>(offset[2]) + column;
    }
};

/* Elements l, l + 1, ... of the rows; -inf from `to` on. */
template <typename T, int STEPS>
DEVICE void load_columns(Pack<T, COLUMNS> (&packs)[STEPS], const T *x, int l, int to, const ColumnPacks &c) {
    const T *p = x + l * c.slabs.step[0];
#pragma unroll
    for (int k = 0; k < STEPS; k++, p += c.slabs.step[0])
        packs[k] = load_once_if<T, COLUMNS>(l + k < to, p, -INFINITY);
}

/* f(l, packs) for elements `from` to `to` of the rows. The first packs have been loaded. */
template <typename T, int STEPS, typename F>
DEVICE void for_columns(Pack<T, COLUMNS> (&packs)[STEPS], const T *x, int from, int to, const ColumnPacks &c, F f) {
    f(from, packs);
#pragma unroll 1
    for (int l = from + STEPS; l < to; l += STEPS) {
        load_columns(packs, x, l, to, c);
        f(l, packs);
    }
}

#endif
