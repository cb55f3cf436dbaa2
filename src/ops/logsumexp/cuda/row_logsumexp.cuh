/* SPDX-License-Identifier: Apache-2.0 */
/* For streamed_rows.cu, thread_per_row.cu, tiles.cu and windows.cu: the statistics and the result of a row. */
#ifndef RAFTER_LOGSUMEXP_CUDA_ROW_LOGSUMEXP_CUH
#define RAFTER_LOGSUMEXP_CUDA_ROW_LOGSUMEXP_CUH

#include "cuda/row_chunks.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

/* What the Ops of all four files have in common. */
template <typename T> struct LogsumexpStats {
    typedef RowStats Stats;
    const LseRows &lse;

    DEVICE Stats none() const {
        return no_elements();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int, int64_t, int64_t) const {
        add_packs(g, packs, 1.0f);
    }
    DEVICE Stats merge(const Stats &x, const Stats &y) const {
        return ::merge(x, y, 1.0f);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return merge_some_lanes(g, lanes, 1.0f);
    }
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
};

/* The Op of row_stream.cuh, row_chunks.cuh and row_threads.cuh, which say what its members are. */
template <typename T> struct RowLogsumexp : LogsumexpStats<T> {
    typedef RowStats Stats;
    static constexpr bool LARGE = false, ADDS_EDGES = true;
    static constexpr int CHUNK_ADDS = 0;
    struct Row {
        bool present;
    };

    /* See row_chunks.cuh. */
    template <int LANES, int N, int EDGES>
    DEVICE Stats reduce(const Pack<T, N> (&packs)[CHUNK_PACKS], int most, int valid, const Pack<T, 1> (&edges)[EDGES],
                        bool ragged, int valid_edges) const {
        return reduce_lanes<LANES>(packs, most, valid, edges, ragged, valid_edges, 1.0f);
    }
    DEVICE Row no_row() const {
        return {false};
    }
    DEVICE Row load_row(int64_t) const {
        return {true};
    }
    DEVICE bool needs(const Row &row) const {
        return row.present;
    }
    DEVICE bool reduces() const {
        return true;
    }
    template <typename F> DEVICE void look_at(Row &, F) const {
    }
    template <typename F> DEVICE void look(Row &, F, int64_t) const {
    }
    DEVICE void finish(const Row &row, int64_t at, const Stats &g) const {
        if (row.present)
            this->lse.put(at, lse_of(g));
    }
};

/* The Op of slab_kernels.cuh and slab_windows.cuh. */
template <typename T> struct SlabLogsumexp : LogsumexpStats<T> {
    typedef RowStats Stats;
    struct Row {
        int64_t row; /* -1: none */
    };

    template <int N, int COUNT>
    DEVICE void add_lines(Stats (&g)[N], const Pack<T, N> (&packs)[COUNT], int, int64_t, int64_t) const {
        add_lines_of(g, packs, 1.0f);
    }
    DEVICE Stats load(const Stats *stored) const {
        return load_stats(stored);
    }
    DEVICE Row no_row() const {
        return {-1};
    }
    DEVICE Row load_row(int64_t row, const T *) const {
        return {row};
    }
    DEVICE void finish(const Row &row, const Stats &g) const {
        if (row.row >= 0)
            this->lse.put(row.row, lse_of(g));
    }
};

} // namespace

#endif
