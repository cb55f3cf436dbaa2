/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small tensors whose rows do not have adjacent elements, in one short kernel. A block takes some rows. Adjacent
 * threads take adjacent rows, and several threads share each row and merge their parts in shared memory. (The kernels
 * for large tensors merge parts in a second kernel, which would take longer here than the rows do.)
 */
#ifndef RAFTER_CUDA_FEW_COLUMNS_CUH
#define RAFTER_CUDA_FEW_COLUMNS_CUH

#include "cuda/slabs.cuh"

constexpr int FEW_THREADS_LOG2 = 8, FEW_THREADS = 1 << FEW_THREADS_LOG2; /* per block */
constexpr int FEW_AT_ONCE = 8; /* elements that a thread loads before it uses the first */

/* As a kernel argument. */
struct FewColumns {
    Slabs slabs;
    unsigned rows;
    Divisor by_inner;
    int down_log2; /* log2 of the threads per row */

    int64_t blocks() const {
        return ceil_div<int64_t>(rows, FEW_THREADS >> down_log2);
    }
};

/* ---- host ------------------------------------------------------------------------------------ */

inline bool are_few_columns(int64_t rows, int64_t length, int bytes) {
    constexpr int64_t MOST_BYTES = 2 << 20, LONGEST = 512;
    return length > 1 && length <= LONGEST && rows * length * bytes <= MOST_BYTES;
}

inline FewColumns few_columns_of(const Slabs &s) {
    constexpr int64_t ENOUGH_THREADS = 1 << 16, LEAST_PART = 4;
    constexpr int MOST_LOG2 = 5;
    FewColumns few = {s, static_cast<unsigned>(s.rows()), Divisor(s.inner), 0};
    while (few.down_log2 < MOST_LOG2 && s.rows() << few.down_log2 < ENOUGH_THREADS &&
           s.length >> few.down_log2 > LEAST_PART)
        few.down_log2++;
    return few;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A thread's part of a row: elements first, first + down, ... */
struct FewPlace {
    int down, across, own, first, length; /* down: threads per row; across: rows per block; own: which of them */
    bool present;                         /* false: the thread repeats the last row, and must not write results */
    int64_t offset[2], number;            /* the row's offset in both tensors; its number */

    DEVICE explicit FewPlace(const FewColumns &a)
        : down(1 << a.down_log2), across(FEW_THREADS >> a.down_log2), own(static_cast<int>(threadIdx.x) & (across - 1)),
          first(static_cast<int>(threadIdx.x) >> (FEW_THREADS_LOG2 - a.down_log2)),
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
    /* Calls f(l, packs) for the thread's elements of the row at x, FEW_AT_ONCE at a time: l, l + down, ...; -inf past
     * the row's end. */
    template <typename T, typename F> DEVICE void for_elements(const T *x, int64_t step, F f) const {
        for (int l = first; l < length; l += FEW_AT_ONCE * down) {
            Pack<T, 1> packs[FEW_AT_ONCE];
#pragma unroll
            for (int k = 0; k < FEW_AT_ONCE; k++)
                packs[k] = load_once_if<T, 1>(l + k * down < length, x + (l + k * down) * step, -INFINITY);
            f(l, packs);
        }
    }
    /* Merges the statistics of the threads of each row; all of them get the result. `parts`: FEW_THREADS entries in
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
