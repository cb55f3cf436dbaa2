/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows that lie side by side: a thread takes four rows, with all or, for gradients, a part of their elements.
 * It loads packs of four elements, one of each row, and several packs before it uses the first. Nothing goes through
 * shared memory.
 *
 * Usually the four rows are adjacent, and what there is one of per row (label, lse) is loaded and stored for all four
 * at once. If packs of adjacent rows would not be aligned, the four rows are LOOSE: 32 rows apart, so that the lanes of
 * a warp load adjacent elements, one by one.
 */
#ifndef RAFTER_CUDA_COLUMN_PACKS_CUH
#define RAFTER_CUDA_COLUMN_PACKS_CUH

#include <type_traits>

#include "cuda/slabs.cuh"

constexpr int ROWS_PER_THREAD = 4;
constexpr int LOOSE_ROWS = ROWS_PER_THREAD * WARP; /* loose rows per warp */

/* As a kernel argument. */
struct ColumnPacks {
    Slabs slabs;
    bool loose;
    unsigned packs;   /* groups of ROWS_PER_THREAD rows, one per thread; loose ones may have fewer rows */
    Divisor by_inner; /* packs of a slab; loose: warps of a slab */
    int length;       /* elements of a row */
    int parts, part;  /* parts that rows are cut into, for gradients; elements of a part (the last may have fewer) */
    unsigned across;  /* blocks per part */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* What a kernel can do. */
struct ColumnChoice {
    int tensors;           /* 2 if there is a gradient, else 1 */
    int64_t longest;       /* most elements of a row */
    bool splits;           /* rows may be cut into parts */
    int64_t longest_loose; /* most elements of a row, if rows are loose */
};

/* Whether some packs of four adjacent rows would not be aligned. */
static inline bool are_loose(const Slabs &s, int tensors, int bytes) {
    bool whole = s.inner % ROWS_PER_THREAD == 0;
    for (int t = 0; t < tensors; t++) {
        whole = whole && reinterpret_cast<uintptr_t>(s.data[t]) % (ROWS_PER_THREAD * bytes) == 0 &&
                (s.length <= 1 || s.step[t] % ROWS_PER_THREAD == 0);
        for (int d = 0; d < s.walk.dims; d++)
            whole = whole && (s.walk.size[d] <= 1 || s.walk.stride[t][d] % ROWS_PER_THREAD == 0);
    }
    return !whole;
}

/* Why these rows are not for packs of columns, or NULL. */
static inline const char *why_not_column_packs(const Slabs &s, const ColumnChoice &how, int bytes) {
    constexpr int64_t FEW_STEPS = 8, ROWS_PER_STEP = 2048, MANY_ROWS = 1 << 18, LEAST_ROWS = 4096;
    constexpr int64_t LEAST_LOOSE = 96; /* rows side by side: three of the four of each lane exist */
    if (s.inner == 1 || s.row_step != 1 || s.across[0] != 1 || (how.tensors > 1 && s.across[1] != 1))
        return "rows are not side by side";
    const bool loose = are_loose(s, how.tensors, bytes);
    if (s.inner * bytes < 32 || (loose && s.inner < LEAST_LOOSE))
        return "few rows are side by side";
    if (s.rows() > MOST_INT_ROWS)
        return "it counts rows in 31 bits";
    const int64_t enough = how.splits ? LEAST_ROWS : min(ROWS_PER_STEP * s.length, MANY_ROWS);
    return s.length > (loose ? how.longest_loose : how.longest) || (s.length > FEW_STEPS && s.rows() < enough)
               ? "rows are too long for one thread"
               : NULL;
}

/* `threads`: per block, a multiple of a warp. */
static inline ColumnPacks column_packs_of(const Slabs &s, const ColumnChoice &how, int bytes, int threads) {
    constexpr int64_t ENOUGH_THREADS = 1 << 18, LEAST_PART = 8;
    ColumnPacks c = {};
    c.slabs = s;
    c.loose = are_loose(s, how.tensors, bytes);
    const int64_t of_slab = c.loose ? ceil_div<int64_t>(s.inner, LOOSE_ROWS) : s.inner / ROWS_PER_THREAD;
    c.packs = static_cast<unsigned>(s.outer * of_slab * (c.loose ? WARP : 1));
    c.by_inner = Divisor(of_slab);
    c.length = static_cast<int>(s.length);
    const int64_t parts =
        how.splits ? max(min(ceil_div<int64_t>(ENOUGH_THREADS, c.packs), s.length / LEAST_PART), int64_t(1)) : 1;
    c.part = static_cast<int>(round_up<int64_t>(ceil_div(s.length, parts), 8));
    c.parts = static_cast<int>(ceil_div<int64_t>(s.length, c.part));
    c.across = static_cast<unsigned>(ceil_div<int64_t>(c.packs, threads));
    return c;
}

/* Packs that a thread loads at a time. */
static inline int column_steps(int64_t length) {
    return length <= 2 ? 2 : length <= 4 ? 4 : 8;
}
/* Calls f(std::integral_constant<int, STEPS>()) with them. */
template <typename F> static void for_column_steps(int64_t length, F f) {
    switch (column_steps(length)) {
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    default: return f(std::integral_constant<int, 8>());
    }
}

/* ---- device ---------------------------------------------------------------------------------- */

/* What a thread of a gradient kernel computes: elements [from, to) of the rows of pack `index`. */
struct ColumnPart {
    int from, to;
    unsigned index;

    /* `threads`: per block. */
    DEVICE ColumnPart(const ColumnPacks &c, int threads) {
        const int part = c.parts == 1 ? 0 : static_cast<int>(blockIdx.x / c.across);
        from = part * c.part;
        to = min(from + c.part, c.length);
        index = (blockIdx.x - part * c.across) * threads + threadIdx.x;
    }
};

/* The rows of pack `index`: the addresses of their first elements in the input and the gradient, and the number of
 * the first row. */
template <typename T, bool LOOSE> struct FourRows {
    const ColumnPacks &c;
    const T *x;
    T *dx;
    int row;
    int count; /* rows that exist: four, or fewer if LOOSE */

    DEVICE FourRows(const ColumnPacks &columns, unsigned index) : c(columns) {
        const unsigned pack = LOOSE ? index / WARP : index, slab = c.by_inner.quotient(pack);
        const int of_slab = static_cast<int>(pack - slab * c.by_inner.number),
                  column =
                      LOOSE ? of_slab * LOOSE_ROWS + static_cast<int>(threadIdx.x % WARP) : of_slab * ROWS_PER_THREAD;
        int64_t offset[3];
        c.slabs.walk.offsets(slab, offset);
        x = c.slabs.at<const T>(0, offset[0]) + column;
        dx = c.slabs.at<T>(1, offset[1]) + column;
        row = static_cast<int>(offset[2]) + column;
        count = 0;
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            count += column + apart(j) < static_cast<int>(c.slabs.inner);
    }
    /* The distance from the first row to row j. */
    static DEVICE int apart(int j) {
        return LOOSE ? j * WARP : j;
    }
    DEVICE bool has(int j) const {
        return !LOOSE || j < count;
    }
    /* Loads elements l, l + 1, ... of the rows; -inf from `to` on. */
    template <int STEPS> DEVICE void load(Pack<T, ROWS_PER_THREAD> (&packs)[STEPS], int l, int to) const {
        const T *p = x + l * c.slabs.step[0];
#pragma unroll
        for (int k = 0; k < STEPS; k++, p += c.slabs.step[0]) {
            if constexpr (LOOSE) {
#pragma unroll
                for (int j = 0; j < ROWS_PER_THREAD; j++)
                    packs[k].v[j] = load_once_if<T, 1>(l + k < to && has(j), p + apart(j), -INFINITY).v[0];
            } else {
                packs[k] = load_once_if<T, ROWS_PER_THREAD>(l + k < to, p, -INFINITY);
            }
        }
    }
    /* Calls f(l, packs) for elements [from, to) of the rows, STEPS at a time. The first packs have been loaded. f is
     * compiled twice, for the first packs and for the others, unless ONE_COPY: where f stores packs, that would be slower. */
    template <bool ONE_COPY = false, int STEPS, typename F>
    DEVICE void for_packs(Pack<T, ROWS_PER_THREAD> (&packs)[STEPS], int from, int to, F f) const {
        if constexpr (ONE_COPY) {
#pragma unroll 1
            for (int l = from;; load(packs, l, to)) {
                f(l, packs);
                l += STEPS;
                if (l >= to)
                    return;
            }
        } else {
            f(from, packs);
#pragma unroll 1
            for (int l = from + STEPS; l < to; l += STEPS) {
                load(packs, l, to);
                f(l, packs);
            }
        }
    }
    /* Stores one number per row. `to`: the place of the first row's number. load_numbers is the reverse. */
    template <typename U> DEVICE void store(U *to, const Pack<U, ROWS_PER_THREAD> &pack) const {
        if constexpr (LOOSE) {
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                if (has(j))
                    to[apart(j)] = pack.v[j];
        } else {
            store_once<U, ROWS_PER_THREAD>(to, pack);
        }
    }
    template <typename U> DEVICE Pack<U, ROWS_PER_THREAD> load_numbers(const U *from) const {
        if constexpr (LOOSE) {
            Pack<U, ROWS_PER_THREAD> pack;
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                pack.v[j] = has(j) ? from[apart(j)] : from_float<U>(0.0f);
            return pack;
        } else {
            return load_once<U, ROWS_PER_THREAD>(from);
        }
    }
};

#endif
