/* SPDX-License-Identifier: Apache-2.0 */
/* The statistics and the result of a row, for streamed_rows.cu and thread_per_row.cu. */
#ifndef RAFTER_LOGSUMEXP_CUDA_ROW_LOGSUMEXP_CUH
#define RAFTER_LOGSUMEXP_CUDA_ROW_LOGSUMEXP_CUH

#include "ops/logsumexp/cuda/problem.cuh"

namespace {

/* What row_stream.cuh asks of an op. */
template <typename T> struct RowLogsumexp {
    static constexpr bool LARGE = false;
    typedef RowStats Stats;
    struct Row {
        bool present;
    };
    const Rows &lse;

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
    DEVICE Stats shuffled(const Stats &g, int lane) const {
        return {__shfl_sync(~0u, g.max, lane), __shfl_sync(~0u, g.sum, lane)};
    }
    DEVICE void begin() const {
        wait_for_previous_kernel();
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
    template <typename F> DEVICE void look(Row &, F, int64_t) const {
    }
    DEVICE void finish(const Row &row, int64_t at, const Stats &g) const {
        if (row.present)
            lse.put(at, lse_of(g));
    }
};

} // namespace

#endif
