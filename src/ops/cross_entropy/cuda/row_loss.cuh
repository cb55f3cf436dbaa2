/* SPDX-License-Identifier: Apache-2.0 */
/* For streamed_rows.cu and thread_per_row.cu: the statistics and outputs of a row. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_ROW_LOSS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_ROW_LOSS_CUH

#include "cuda/row_chunks.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

/* The Op of row_stream.cuh, row_chunks.cuh and row_threads.cuh, which say what its members are: the outputs of rows,
 * without a gradient. WEIGHTED_SMOOTHING, with SMOOTH: label smoothing is weighted by class. */
template <typename T, int OPTIONS, bool WEIGHTED_SMOOTHING = false> struct RowLoss {
    typedef LossStats<OPTIONS> Stats;
    struct Row {
        int label; /* NO_ROW: there is no row */
        float z_label;
    };

    static constexpr int NO_ROW = -3;
    static constexpr bool LARGE = OPTIONS == FULL || WEIGHTED_SMOOTHING, ADDS_EDGES = !LARGE;
    static constexpr int CHUNK_ADDS = OPTIONS >= FULL || WEIGHTED_SMOOTHING ? 2 : 0;

    const Loss &loss;
    Totals totals = {};

    DEVICE explicit RowLoss(const Args &args) : loss(args.loss) {
    }
    DEVICE Stats none() const {
        return no_columns<OPTIONS>();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step) const {
        if constexpr (WEIGHTED_SMOOTHING)
            add_weighted(g, packs, valid, column, step);
        else
            ::add(g, packs, valid, column, step, loss);
    }
    template <int N, int COUNT>
    DEVICE void add_weighted(Stats &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column,
                             int64_t step) const {
        add_packs(g.s, packs, loss.scale);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k < valid) {
                float v[N];
                unpack(packs[k], v);
                g.logit_sum += weighted_sum(v, column + k * step, loss);
            }
    }
    /* See row_chunks.cuh. */
    template <int LANES, int N, int EDGES>
    DEVICE Stats reduce(const Pack<T, N> (&packs)[CHUNK_PACKS], int most, int valid, const Pack<T, 1> (&edges)[EDGES],
                        bool ragged, int valid_edges) const {
        Stats g = none();
        if constexpr (OPTIONS == SMOOTH)
            g.s = reduce_lanes<LANES>(packs, most, valid, edges, ragged, valid_edges, loss.scale, &g.logit_sum);
        else if constexpr (OPTIONS == PLAIN)
            g.s = reduce_lanes<LANES>(packs, most, valid, edges, ragged, valid_edges, loss.scale);
        else if constexpr (OPTIONS == CAPPED)
            g = reduce_capped<LANES>(packs, most, valid, edges, ragged, valid_edges);
        return g;
    }
    /* The same under a softcap, if Loss::cap_bounds: exponentials need no maximum. */
    template <int LANES, int N, int EDGES>
    DEVICE Stats reduce_capped(const Pack<T, N> (&packs)[CHUNK_PACKS], int most, int valid,
                               const Pack<T, 1> (&edges)[EDGES], bool ragged, int valid_edges) const {
        float sum[2] = {}, all = 0.0f;
        for_chunk_packs(most, [&](int k) {
            if (k >= valid)
                return;
            float bits[1][N];
            cap_to_bits(bits, reinterpret_cast<const Pack<T, N>(&)[1]>(packs[k]), 1, loss);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j % 2] += exp2_fast(bits[0][j]);
            if (loss.smooths)
#pragma unroll
                for (int j = 0; j < N; j++)
                    all += bits[0][j];
        });
        if (ragged)
#pragma unroll
            for (int k = 0; k < EDGES; k++) {
                const float bits = capped_bits(to_float(edges[k].v[0]), loss);
                sum[k % 2] += k < valid_edges ? exp2_fast(bits) : 0.0f;
                all += k < valid_edges ? bits : 0.0f;
            }
        Stats g = none();
        g.s = {0.0f, sum_of_lanes<LANES>(sum[0] + sum[1])};
        g.largest = max_of_row<LANES>(packs, most, edges, ragged);
        if (loss.smooths)
            g.logit_sum = loss.cap_per_bit * sum_of_lanes<LANES>(all);
        return g;
    }
    /* Whether `reduce` serves the call; else packs are added one after the other. */
    DEVICE bool reduces() const {
        return !WEIGHTED_SMOOTHING && (OPTIONS < FULL || (OPTIONS == CAPPED && loss.cap_bounds));
    }
    DEVICE Stats merge(const Stats &x, const Stats &y) const {
        return ::merge(x, y, loss.scale);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return ::merge_lanes(g, lanes, loss.scale);
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
    template <typename F> DEVICE void look_at(Row &row, F element) const {
        if (row.label >= 0)
            row.z_label = to_float(element(row.label));
    }
    template <typename F> DEVICE void look(Row &row, F first, int64_t step) const {
        if (row.label >= 0)
            row.z_label = to_float(first()[row.label * step]);
    }
    DEVICE void finish(const Row &row, int64_t at, const Stats &g) {
        if (row.label == NO_ROW)
            return;
        RowResults results = results_of_skipped(row.label);
        if (row.label >= 0)
            results = results_of(loss, at, row.label, whole_row_stats(g, row.z_label, loss));
        flag_bad_label(loss, row.label);
        write_row(loss, at, row.label, results, &totals);
    }
};

} // namespace

#endif
