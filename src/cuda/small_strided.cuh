/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small tensors whose rows do not have adjacent elements, in one short kernel. A block takes some rows. Adjacent
 * threads take adjacent rows, and several threads share each row and merge their parts in shared memory. (The kernels
 * for large tensors merge parts in a second kernel, which would take longer here than the rows do.)
 */
#ifndef RAFTER_CUDA_SMALL_STRIDED_CUH
#define RAFTER_CUDA_SMALL_STRIDED_CUH

#include "cuda/slabs.cuh"

constexpr int SMALL_STRIDED_THREADS_LOG2 = 8, SMALL_STRIDED_THREADS = 1 << SMALL_STRIDED_THREADS_LOG2; /* per block */
constexpr int IN_FLIGHT_ELEMENTS = 8; /* elements that a thread loads before it uses the first */

/* As a kernel argument. */
struct SmallStrided {
    Slabs slabs;
    unsigned rows;
    Divisor by_inner;
    int down_log2; /* log2 of the threads per row */

    int64_t blocks() const {
        return ceil_div<int64_t>(rows, SMALL_STRIDED_THREADS >> down_log2);
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Whether the call is for these kernels. */
inline bool is_small(int64_t rows, int64_t length, int bytes) {
    constexpr int64_t MOST_BYTES = 2 << 20, LONGEST = 512;
    return length > 1 && length <= LONGEST && rows * length * bytes <= MOST_BYTES;
}

inline SmallStrided small_strided_of(const Slabs &s) {
    constexpr int64_t ENOUGH_THREADS = 1 << 16, LEAST_PART = 4;
    constexpr int MOST_LOG2 = 5;
    SmallStrided few = {s, static_cast<unsigned>(s.rows()), Divisor(s.inner), 0};
    while (few.down_log2 < MOST_LOG2 && s.rows() << few.down_log2 < ENOUGH_THREADS &&
           s.length >> few.down_log2 > LEAST_PART)
        few.down_log2++;
    return few;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A thread's part of a row: elements first, first + down, ... */
struct RowShare {
    int down, across, own, first, length; /* down: threads per row; across: rows per block; own: which of them */
    bool present;                         /* false: the thread repeats the last row, and must not write results */
    int64_t offset[2], number;            /* the row's offset in both tensors; its number */

    DEVICE explicit RowShare(const SmallStrided &a)
        : down(1 << a.down_log2), across(SMALL_STRIDED_THREADS >> a.down_log2),
          own(static_cast<int>(threadIdx.x) & (across - 1)),
          first(static_cast<int>(threadIdx.x) >> (SMALL_STRIDED_THREADS_LOG2 - a.down_log2)),
          length(static_cast<int>(a.slabs.length)) {
        const unsigned index = blockIdx.x * across + own, row = min(index, a.rows - 1);
        const unsigned slab = a.by_inner.quotient(row), column = row - slab * a.by_inner.number;
        int64_t at[3];
        a.slabs.walk.offsets(slab, at);
        present = index < a.rows;
        for (int t = 0; t < 2; t++)
            offset[t] = at[t] + column * a.slabs.across[t];
        number = at[2] + column * a.slabs.row_step;
    }
    /* Calls f(l, packs) for the thread's elements of the row at x, IN_FLIGHT_ELEMENTS at a time: l, l + down, ...; -inf
     * past the row's end. */
    template <typename T, typename F> DEVICE void for_elements(const T *x, int64_t step, F f) const {
        for (int l = first; l < length; l += IN_FLIGHT_ELEMENTS * down) {
            Pack<T, 1> packs[IN_FLIGHT_ELEMENTS];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT_ELEMENTS; k++)
                packs[k] = load_once_if<T, 1>(l + k * down < length, x + (l + k * down) * step, -INFINITY);
            f(l, packs);
        }
    }
    /* Merges the statistics of the threads of each row; all of them get the result. `parts`: SMALL_STRIDED_THREADS entries in
     * shared memory. Called by all threads of the block. */
    template <class Stats, typename F> DEVICE Stats merged(const Stats &mine, Stats *parts, F merge) const {
        parts[threadIdx.x] = mine;
        for (int others = down / 2; others > 0; others /= 2) {
            __syncthreads();
            if (first < others)
                parts[threadIdx.x] = merge(parts[threadIdx.x], parts[threadIdx.x + others * across]);
        }
        __syncthreads();
        return parts[own];
    }
};

#endif
