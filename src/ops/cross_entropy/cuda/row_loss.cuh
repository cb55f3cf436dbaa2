/* SPDX-License-Identifier: Apache-2.0 */
/* The statistics and outputs of a row, for streamed_rows.cu and thread_per_row.cu. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_ROW_LOSS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_ROW_LOSS_CUH

#include "ops/cross_entropy/cuda/general.cuh"

namespace {

/* What row_stream.cuh asks of an op: results of whole rows, without a gradient. */
template <typename T, int OPTIONS> struct RowLoss {
    typedef LossStats<OPTIONS> Stats;
    struct Row {
        int label; /* NO_ROW: there is no row */
        float z_label;
    };

    static constexpr int NO_ROW = -3;
    static constexpr bool LARGE = OPTIONS == FULL;

    const Loss &loss;
    Totals totals = {};

    DEVICE explicit RowLoss(const Args &args) : loss(args.loss) {
    }
    DEVICE Stats none() const {
        return no_columns<OPTIONS>();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step) const {
        ::add(g, packs, valid, column, step, loss);
    }
    DEVICE Stats merge(const Stats &x, const Stats &y) const {
        return ::merge(x, y, loss.scale);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return ::merge_lanes(g, lanes, loss.scale);
    }
    DEVICE Stats shuffled(const Stats &g, int lane) const {
        return ::shuffled(g, lane);
    }
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
    DEVICE Row no_row() const {
        return {NO_ROW, 0.0f};
    }
    DEVICE Row load_row(int64_t row) const {
        return {static_cast<int>(loss.class_of(loss.load_label(row))), 0.0f};
    }
    DEVICE bool needs(const Row &row) const {
        return row.label >= 0;
    }
    template <typename F> DEVICE void look(Row &row, F first, int64_t step) const {
        if (row.label >= 0)
            row.z_label = to_float(first()[row.label * step]);
    }
    DEVICE void finish(const Row &row, int64_t at, const Stats &g) {
        if (row.label == NO_ROW)
            return;
        if (row.label < 0)
            write_skipped(loss, at, row.label, &totals);
        else
            write_row(loss, at, row.label, results_of(loss, at, row.label, whole_row_stats(g, row.z_label, loss)),
                      &totals);
    }
};

} // namespace

#endif
