/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows whose elements are assigned to threads by index, whatever their stride and alignment. For
 * batch-invariant calls: the order of a row's sums must not depend on its address. (AlignedSpan in
 * row_statistics.cuh assigns elements by address.)
 */
#ifndef RAFTER_CUDA_INDEXED_ROWS_CUH
#define RAFTER_CUDA_INDEXED_ROWS_CUH

#include "core/sizes.h"
#include "cuda/elementwise.cuh"
#include "cuda/row_statistics.cuh"

/* A row. Pack i holds elements [i N, i N + N); the elements after the last whole pack are the tail. ALIGNED: the
 * elements are adjacent, and the first one is at a multiple of 16 bytes. ALIGNED or not, sums have the same bits. */
template <typename T, bool ALIGNED> struct IndexedRow {
    static constexpr int N = WIDE<T>;
    const T *first;
    int64_t n, step; /* elements; distance between them */

    DEVICE int64_t packs() const {
        return n / N;
    }
    DEVICE float element(int64_t i) const {
        return to_float(first[i * step]);
    }
    /* Loads packs i, i + threads, ...; those that do not exist are full of `instead`. */
    template <int COUNT> DEVICE void load(Pack<T, N> (&group)[COUNT], int64_t i, int threads, float instead) const {
        const int left = static_cast<int>(min(packs() - i, int64_t(1) << 30));
        if constexpr (ALIGNED)
            load_some<WHOLE>(group, i, left, threads, instead);
        else if (step == 1)
            load_some<SHIFTED>(group, i, left, threads, instead);
        else
            load_some<STRIDED>(group, i, left, threads, instead);
    }

  private:
    /* How packs are loaded: as one aligned pack, as two of which each has a part, element by element. */
    enum Kind { WHOLE, SHIFTED, STRIDED };

    template <Kind KIND, int COUNT>
    DEVICE void load_some(Pack<T, N> (&group)[COUNT], int64_t i, int left, int threads, float instead) const {
        if constexpr (KIND == WHOLE) {
            const T *const p = first + i * N;
            if ((COUNT - 1) * threads < left) {
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    group[k] = load_once<T, N>(p + k * threads * N);
            } else {
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    group[k] = load_once_if<T, N>(k * threads < left, p + k * threads * N, instead);
            }
        } else if constexpr (KIND == STRIDED) {
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                group[k] = k * threads < left ? elements(i + k * threads) : all_of<T, N>(instead);
        } else {
            /* From two aligned packs, if both lie within the row; else element by element. */
            const int shift = offset_in_pack(first);
            const T *const p = first - shift + i * N;
            uint4 low[COUNT], high[COUNT];
            if (i > 0 && (COUNT - 1) * threads + 1 < left) {
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    low[k] = *reinterpret_cast<const uint4 *>(p + k * threads * N);
                    high[k] = *reinterpret_cast<const uint4 *>(p + k * threads * N + N);
                }
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    reinterpret_cast<uint4 &>(group[k]) = shifted(low[k], high[k], shift * int(sizeof(T)));
                return;
            }
            const auto inside = [&](int k) { return (i > 0 || k > 0) && k * threads + 1 < left; };
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                if (inside(k)) {
                    low[k] = *reinterpret_cast<const uint4 *>(p + k * threads * N);
                    high[k] = *reinterpret_cast<const uint4 *>(p + k * threads * N + N);
                }
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                if (inside(k))
                    reinterpret_cast<uint4 &>(group[k]) = shifted(low[k], high[k], shift * int(sizeof(T)));
                else
                    group[k] = k * threads < left ? elements(i + k * threads) : all_of<T, N>(instead);
        }
    }
    DEVICE Pack<T, N> elements(int64_t i) const {
        Pack<T, N> pack;
#pragma unroll
        for (int j = 0; j < N; j++)
            pack.v[j] = first[(i * N + j) * step];
        return pack;
    }
};

/* ---- threads per row ------------------------------------------------------------------------- */

constexpr int INDEXED_THREADS = 512; /* per block, at most */

/* The threads that share a row: a warp, with several rows per block; or a block. Depends on the length of rows only. */
struct RowTeam {
    static constexpr int ROWS = 8; /* per block, if a warp takes a row */
    int threads;                   /* per row: a power of two */

    /* `packs`: how many a thread should have, if most_threads allows. short_row: bytes up to which a warp takes a
     * row. */
    static __host__ RowTeam of(int64_t row_bytes, int packs, int most_threads = INDEXED_THREADS,
                               int64_t short_row = 2048) {
        return {row_bytes <= short_row ? WARP
                                       : power_at_least(ceil_div<int64_t>(row_bytes, 16 * packs), 64, most_threads)};
    }
    Launch blocks(int64_t rows) const {
        return threads == WARP ? Launch{ceil_div<int64_t>(rows, ROWS), ROWS * WARP} : Launch{rows, threads};
    }
    DEVICE bool is_warp() const {
        return threads == WARP;
    }
    DEVICE int64_t row() const {
        return is_warp() ? blockIdx.x * int64_t(ROWS) + threadIdx.x / WARP : blockIdx.x;
    }
    DEVICE int thread() const {
        return is_warp() ? threadIdx.x % WARP : threadIdx.x;
    }
    /* A barrier of the row's threads. */
    DEVICE void sync() const {
        is_warp() ? __syncwarp() : __syncthreads();
    }
};

/* Whether IndexedRow's ALIGNED holds for the last dimension of a view. */
inline bool rows_are_aligned(const rafter_view &view) {
    const int last = view.ndim - 1;
    const int64_t bytes = rafter_dtype_bytes(view.dtype);
    bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && (view.stride[last] == 1 || view.shape[last] == 1);
    for (int d = 0; d < last; d++)
        all = all && (view.shape[d] == 1 || view.stride[d] * bytes % 16 == 0);
    return all;
}

/* ---- elements, one by one -------------------------------------------------------------------- */

/* Whether aligned packs of one row are aligned packs of the other. */
template <typename T> DEVICE bool aligned_alike(const T *a, const T *b) {
    return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

/* ---- softmax statistics ---------------------------------------------------------------------- */

/* The statistics of one thread's share of a row: every threads-th pack, and every threads-th element of the tail. */
template <typename T, bool ALIGNED>
DEVICE RowStats indexed_stats(const IndexedRow<T, ALIGNED> &row, int thread, int threads, float scale) {
    RowStats s = no_elements();
    for (int64_t i = thread; i < row.packs(); i += IN_FLIGHT * threads) {
        Pack<T, WIDE<T>> group[IN_FLIGHT];
        row.load(group, i, threads, -INFINITY);
        add_packs(s, group, scale);
    }
    for (int64_t e = row.packs() * WIDE<T> + thread; e < row.n; e += threads)
        s = merge(s, stats_of_one(row.first[e * row.step], scale), scale);
    return s;
}

/* The statistics of the whole row, from those of its threads. Every thread gets them, after all threads have computed
 * their own: from then on the row may be overwritten. */
DEVICE RowStats merge_team(const RowTeam &team, RowStats s, float scale) {
    __shared__ RowStats warp_stats[WARP];
    s = merge_lanes<WARP>(s, scale);
    if (team.is_warp())
        return s;
    const int lane = threadIdx.x % WARP;
    if (lane == 0)
        warp_stats[threadIdx.x / WARP] = s;
    __syncthreads();
    return merge_lanes<WARP>(lane < team.threads / WARP ? warp_stats[lane] : no_elements(), scale);
}

#endif
