/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of tiles.cu: statistics of slabs, and gradients of contiguous rows. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH

#include "ops/cross_entropy/cuda/column_gradients.cuh"
#include "ops/cross_entropy/cuda/windows.cuh"

namespace {

/* Where kernels that compute statistics write the coefficients of all rows: `rows` for gradients of contiguous
 * rows, `columns` for those of others. NULL: not wanted. */
struct StatisticsOutputs {
    RowCoefficients *rows;
    ColumnCoefficients columns;

    DEVICE bool wanted() const {
        return rows || columns.rows;
    }
};

struct TileArgs {
    Args call;
    SlabTiles tiles;
    unsigned *counters; /* one per tile, if tiles have parts */
    void *part_stats;   /* LossStats of each row and part, if tiles have parts */
    StatisticsOutputs outputs;
};

/* Threads per block, at most, and blocks per multiprocessor. */
template <int LINES> constexpr int TILE_THREADS = LINES > 1 ? 576 : 256;
template <int LINES> constexpr int TILES_PER_SM = LINES > 1 ? 1 : 3;

/* Packs that a thread loads before it uses the first one. */
template <int OPTIONS, int N> constexpr int TILE_STEPS = AHEAD<OPTIONS> *(N == 1 ? 4 : 1);

/* ---- statistics ------------------------------------------------------------------------------ */

/* What slab_kernels.cuh asks of an op. */
template <typename T, int OPTIONS> struct LossOp {
    typedef LossStats<OPTIONS> Stats;
    struct Row {
        int64_t row; /* -1: none */
        int label;
        float z_label;
    };

    const Args &call;
    const StatisticsOutputs &outputs;
    const int64_t step; /* between the elements of a row */
    const Loss &loss;
    Totals totals = {};
    double common = 0.0;

    DEVICE LossOp(const Args &args, const StatisticsOutputs &out, const Slabs &slabs)
        : call(args), outputs(out), step(slabs.step[0]), loss(args.loss) {
    }
    DEVICE Stats none() const {
        return no_columns<OPTIONS>();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step) const {
        ::add(g, packs, valid, column, step, loss);
    }
    template <int N, int COUNT>
    DEVICE void add_lines(Stats (&g)[N], const Pack<T, N> (&packs)[COUNT], int valid, int64_t column,
                          int64_t step) const {
        if constexpr (OPTIONS == FULL || OPTIONS == CAPPED) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                Pack<T, 1> of_line[COUNT];
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    of_line[k].v[0] = packs[k].v[j];
                ::add(g[j], of_line, valid, column, step, loss);
            }
        } else {
            add_plain_lines(g, packs, valid);
        }
    }
    template <int N, int COUNT>
    DEVICE void add_plain_lines(Stats (&g)[N], const Pack<T, N> (&packs)[COUNT], int valid) const {
        RowStats lines[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            lines[j] = g[j].s;
        add_lines_of(lines, packs, loss.scale);
#pragma unroll
        for (int j = 0; j < N; j++)
            g[j].s = lines[j];
        if constexpr (OPTIONS == SMOOTH)
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                float x[N];
                unpack(packs[k], x);
#pragma unroll
                for (int j = 0; j < N; j++)
                    g[j].logit_sum += k < valid ? x[j] : 0.0f;
            }
    }
    DEVICE Stats merge(const Stats &x, const Stats &y) const {
        return ::merge(x, y, loss.scale);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return ::merge_lanes(g, lanes, loss.scale);
    }
    DEVICE Stats load(const Stats *stored) const {
        return load_stats(stored);
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        if (outputs.wanted())
            common = common_factor(call);
    }
    DEVICE Row no_row() const {
        return {-1, static_cast<int>(IGNORED), 0.0f};
    }
    DEVICE Row load_row(int64_t row, const T *first) const {
        const int64_t label = loss.class_of(loss.load_label(row));
        return {row, static_cast<int>(label), label >= 0 ? to_float(first[label * step]) : 0.0f};
    }
    DEVICE void finish(const Row &row, const Stats &g) {
        if (row.row < 0)
            return;
        RowGradient gradient = gradient_of_skipped(row.label);
        RowResults results = results_of_skipped(row.label);
        if (row.label >= 0) {
            const WholeRowStats stats = whole_row_stats(g, row.z_label, loss);
            if (outputs.wanted())
                gradient = gradient_from_stats(loss, common, row.row, row.label, row.z_label, stats);
            if (loss.forward)
                results = results_of(loss, row.row, row.label, stats);
        }
        flag_bad_label(loss, row.label);
        if (loss.forward)
            write_row(loss, row.row, row.label, results, &totals);
        if (outputs.rows)
            outputs.rows[row.row] = {gradient, row.label};
        else if (outputs.columns.rows)
            outputs.columns.template put<T>(row.row, gradient, row.label, loss.scale);
    }
};

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_statistics(const __grid_constant__ TileArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    start_next_kernel();
    LossOp<T, OPTIONS> op(a.call, a.outputs, a.tiles.slabs);
    slab_statistics<LossOp<T, OPTIONS>, T, N, LINES, TILE_STEPS<OPTIONS, N>>(
        op, a.tiles, dynamic, a.counters, static_cast<LossStats<OPTIONS> *>(a.part_stats));
    if (a.call.loss.forward)
        add_up(a.call, op.totals);
}

/* ---- statistics of long rows side by side: cuda/slab_windows.cuh ----------------------------- */

struct WindowArgs {
    Args call;
    SlabWindows windows;
    void *part_stats; /* LossStats, if windows have parts */
    StatisticsOutputs outputs;
};

template <typename T, int OPTIONS>
__global__ __launch_bounds__(WINDOW_BLOCK,
                             OPTIONS == PLAIN ? 3 : 2) void window_statistics(const __grid_constant__ WindowArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    start_next_kernel();
    typedef LossStats<OPTIONS> Stats;
    LossOp<T, OPTIONS> op(a.call, a.outputs, a.windows.slabs);
    window_statistics_of<LossOp<T, OPTIONS>, T, WINDOW_ELEMENTS<T, OPTIONS>>(
        op, a.windows, reinterpret_cast<Stats *>(dynamic), static_cast<Stats *>(a.part_stats));
    if (a.windows.parts == 1 && a.call.loss.forward)
        add_up(a.call, op.totals);
}

template <typename T, int OPTIONS>
__global__ __launch_bounds__(WINDOW_BLOCK) void merge_window_parts(const __grid_constant__ WindowArgs a) {
    start_next_kernel();
    LossOp<T, OPTIONS> op(a.call, a.outputs, a.windows.slabs);
    merge_windows<LossOp<T, OPTIONS>, T>(op, a.windows, static_cast<const LossStats<OPTIONS> *>(a.part_stats));
    if (a.call.loss.forward)
        add_up(a.call, op.totals);
}

/* ---- gradient -------------------------------------------------------------------------------- */

/* What slab_kernels.cuh asks of an op that writes gradients. */
template <typename T, int OPTIONS> struct LossGradient {
    static constexpr bool LABELS = true;
    const TileArgs &a;

    struct Line {
        const RowGradient row;
        const ColumnGradient<OPTIONS, T> columns;

        DEVICE Line(const LossGradient &op, int64_t of_row)
            : row(op.a.outputs.rows[of_row].gradient), columns(row, op.a.call.loss) {
        }
        template <int N> DEVICE Pack<T, N> of(const LossGradient &op, const Pack<T, N> &pack, int64_t column) const {
            return row.constant ? all_of<T, N>(row.p) : columns.of(pack, column, op.a.call.loss);
        }
    };
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
    DEVICE T of_one(int64_t row, T z, int64_t column) const {
        const RowCoefficients c = a.outputs.rows[row];
        return RowWriter<OPTIONS, T>(c.gradient, c.label, a.call.loss).of_one(z, column);
    }
    /* The column of the row that has a value of its own, or -1. */
    DEVICE int64_t label(int64_t row) const {
        const RowCoefficients &c = a.outputs.rows[row];
        return c.gradient.constant ? -1 : c.label;
    }
    DEVICE T at_label(int64_t row) const {
        return from_float<T>(a.outputs.rows[row].gradient.at_label);
    }
};

template <typename T, int OPTIONS, int N>
__global__ __launch_bounds__(TILE_THREADS<1>, TILES_PER_SM<1>) void tile_gradients(const __grid_constant__ TileArgs a) {
    const LossGradient<T, OPTIONS> op = {a};
    slab_gradients<LossGradient<T, OPTIONS>, T, N, TILE_STEPS<OPTIONS, N>>(op, a.tiles);
}

} // namespace

#endif
