/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of tiles.cu: statistics and gradients of slabs that threads load from memory. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_TILES_CUH

#include "cuda/slab_kernels.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

struct TileArgs {
    Args call;
    SlabTiles tiles;
    unsigned *counters;            /* one per tile, if tiles have parts */
    void *part_stats;              /* LossStats of each row and part, if tiles have parts */
    RowCoefficients *coefficients; /* of all rows: written by statistics, if not NULL; read by gradients */
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

    const TileArgs &a;
    const Loss &loss;
    Totals totals = {};
    double common = 0.0;

    DEVICE explicit LossOp(const TileArgs &args) : a(args), loss(args.call.loss) {
    }
    DEVICE Stats none() const {
        return no_columns<OPTIONS>();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step) const {
        ::add(g, packs, valid, column, step, loss);
    }
    template <int N, int COUNT>
    DEVICE void add_lines(Stats (&g)[N], const Pack<T, N> (&packs)[COUNT], int valid) const {
        static_assert(OPTIONS != FULL, "packs of several rows have no columns");
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
                    g[j].weighted += k < valid ? x[j] : 0.0f;
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
        if (a.coefficients)
            common = common_factor(a.call);
    }
    DEVICE Row no_row() const {
        return {-1, static_cast<int>(IGNORED), 0.0f};
    }
    DEVICE Row load_row(int64_t row, const T *first) const {
        const int64_t label = loss.class_of(loss.load_label(row));
        return {row, static_cast<int>(label), label >= 0 ? to_float(first[label * a.tiles.slabs.step[0]]) : 0.0f};
    }
    DEVICE void finish(const Row &row, const Stats &g) {
        if (row.row < 0)
            return;
        RowGradient gradient = gradient_of_skipped(row.label);
        if (row.label < 0) {
            write_skipped(loss, row.row, row.label, &totals);
        } else {
            const WholeRowStats stats = whole_row_stats(g, row.z_label, loss);
            if (a.coefficients)
                gradient = gradient_from_stats(loss, common, row.row, row.label, row.z_label, stats);
            if (loss.forward)
                write_row(loss, row.row, row.label, results_of(loss, row.row, row.label, stats), &totals);
        }
        if (a.coefficients)
            a.coefficients[row.row] = {gradient, row.label};
    }
};

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_statistics(const __grid_constant__ TileArgs a) {
    extern __shared__ uint4 dynamic[];
    start_next_kernel();
    LossOp<T, OPTIONS> op(a);
    slab_statistics<LossOp<T, OPTIONS>, T, N, LINES, TILE_STEPS<OPTIONS, N>>(
        op, a.tiles, dynamic, a.counters, static_cast<LossStats<OPTIONS> *>(a.part_stats));
    if (a.call.loss.forward)
        add_up(a.call, op.totals);
}

/* ---- gradient -------------------------------------------------------------------------------- */

/* What slab_kernels.cuh asks of an op that writes gradients. */
template <typename T, int OPTIONS> struct LossGradient {
    static constexpr bool LABELS = true;
    const TileArgs &a;

    /* The gradients of a thread's rows. */
    template <int LINES> struct Lines {
        static_assert(OPTIONS != FULL || LINES == 1, "packs of several rows have no columns");
        ColumnGradient<OPTIONS, T> of_line[LINES];
        unsigned constant = 0; /* a bit for each line */

        DEVICE void set(const LossGradient &op, int j, int64_t row) {
            const RowGradient g = op.a.coefficients[row].gradient;
            of_line[j] = ColumnGradient<OPTIONS, T>(g, op.a.call.loss);
            if (g.constant) {
                constant |= 1u << j;
                of_line[j].exp.factor = g.p;
            }
        }
        template <int N> DEVICE Pack<T, N> of(const LossGradient &op, const Pack<T, N> &pack, int64_t column) const {
            if constexpr (OPTIONS == FULL)
                return constant ? all_of<T, N>(of_line[0].exp.factor) : of_line[0].of(pack, column, op.a.call.loss);
            float z[N];
            unpack(pack, z);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const ColumnGradient<OPTIONS, T> &g = of_line[j % LINES];
                const float d = g.of(z[j], column + j, op.a.call.loss);
                z[j] = constant >> (j % LINES) & 1 ? g.exp.factor : d;
            }
            return packed<T>(z);
        }
    };
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
    DEVICE T of_one(int64_t row, T z, int64_t column) const {
        const RowCoefficients c = a.coefficients[row];
        return RowWriter<OPTIONS, T>(c.gradient, c.label, a.call.loss).of_one(z, column);
    }
    /* The column of the row that has a value of its own, or -1. */
    DEVICE int64_t label(int64_t row) const {
        const RowCoefficients &c = a.coefficients[row];
        return c.gradient.constant ? -1 : c.label;
    }
    DEVICE T at_label(int64_t row) const {
        return from_float<T>(a.coefficients[row].gradient.at_label);
    }
};

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_gradients(const __grid_constant__ TileArgs a) {
    const LossGradient<T, OPTIONS> op = {a};
    slab_gradients<LossGradient<T, OPTIONS>, T, N, LINES, TILE_STEPS<OPTIONS, N>>(op, a.tiles);
}

} // namespace

#endif
