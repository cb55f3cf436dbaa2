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
template <int OPTIONS, int N> constexpr int TILE_STEPS = AHEAD<OPTIONS> *(N == 1 ? 2 : 1);

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
        float x[COUNT][N], top[N];
        unpack(max_of_each(packs), top);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            unpack(packs[k], x[k]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            RowStats &s = g[j].s;
            const float max = fmaxf(s.max, top[j]), pivot = pivot_at(max);
            float sum = s.sum * exp_term<T>(s.max - pivot, loss.scale);
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                sum += exp_term<T>(x[k][j] - pivot, loss.scale);
                if constexpr (OPTIONS == SMOOTH)
                    g[j].weighted += k < valid ? x[k][j] : 0.0f;
            }
            s = {max, sum};
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

/* The gradient of a thread's rows. */
template <int OPTIONS, typename T, int N, int LINES> struct LineGradients {
    ColumnGradient<OPTIONS, T> of_line[LINES];
    unsigned constant; /* a bit for each line */

    DEVICE Pack<T, N> of(const Pack<T, N> &pack, int64_t column, const Loss &loss) const {
        float z[N];
        unpack(pack, z);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const ColumnGradient<OPTIONS, T> &g = of_line[j % LINES];
            const float d = g.of(z[j], column + j, loss);
            z[j] = constant >> (j % LINES) & 1 ? g.exp.factor : d;
        }
        return packed<T>(z);
    }
};

template <typename T, int OPTIONS, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_gradients(const __grid_constant__ TileArgs a) {
    constexpr int STEPS = TILE_STEPS<OPTIONS, N>;
    const Loss &loss = a.call.loss;
    const SlabTiles &t = a.tiles;
    const int inner = static_cast<int>(t.slabs.inner);
    const SlabThread<T, N> own(t);
    const SlabTile tile(t, blockIdx.x);
    const int pack = tile.pack + own.pack;
    const bool active = own.slab_of_tile < tile.slabs && pack < t.packs;
    int64_t offset[3];
    t.slabs.walk.offsets(tile.slab + (active ? own.slab_of_tile : 0), offset);
    const SlabSpan<T, N> span(t, t.slabs.at<const T>(0, offset[0]));
    T *const begin = t.slabs.at<T>(1, offset[1]);
    const int from = tile.part * t.part, end = min(from + t.part, t.steps),
              to = active ? min(span.steps(t, pack), end) : 0;
    int s = from + own.down;
    const T *z = span.begin + span.head + pack * t.pack_stride + s * t.stride;
    T *dz = begin + span.head + pack * t.grad_pack_stride + s * t.grad_stride;
    const int64_t ahead = t.down * t.stride, grad_ahead = t.down * t.grad_stride;
    Pack<T, N> packs[STEPS];
    const auto load = [&] {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (s + k * t.down < to)
                packs[k] = load_once<T, N>(z + k * ahead);
    };
    load();
    wait_for_previous_kernel();

    const RowCoefficients *const rows = a.coefficients + offset[2]; /* of the slab */
    LineGradients<OPTIONS, T, N, LINES> gradients;
    gradients.constant = 0;
#pragma unroll
    for (int j = 0; j < LINES; j++) {
        const int column = !active ? 0 : t.dense ? (span.head + pack * N + j) % inner : pack * LINES + j;
        const RowGradient row = rows[column * t.slabs.row_step].gradient;
        gradients.of_line[j] = ColumnGradient<OPTIONS, T>(row, loss);
        if (row.constant) {
            gradients.constant |= 1u << j;
            gradients.of_line[j].exp.factor = row.p;
        }
    }
    /* All threads of a warp take the same number of turns: they exchange elements. */
    for (int turn = from; turn < end; turn += STEPS * t.down) {
        if (turn != from)
            load();
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int step = s + k * t.down;
            const bool valid = step < to;
            const Pack<T, N> out =
                gradients.of(packs[k], N > 1 && LINES == 1 ? span.head + int64_t(step) * N : step, loss);
            if constexpr (N == 1) {
                if (valid)
                    dz[k * grad_ahead] = out.v[0];
            } else {
                store_shifted<T, N>(dz + k * grad_ahead, out, valid, step * t.packs + pack);
            }
        }
        s += STEPS * t.down;
        z += STEPS * ahead;
        dz += STEPS * grad_ahead;
    }
    if (N > 1 && t.dense && active && tile.part == 0 && own.down == 0)
        for (int e = own.pack; e < span.edges; e += t.width) {
            const int64_t at = span.edge(e, t.slabs.length * t.slabs.inner);
            const int column = LINES == 1 ? 0 : row_of_edge(e, span.head, span.edges, inner);
            const RowCoefficients row = rows[column * t.slabs.row_step];
            const RowWriter<OPTIONS, T> writer(row.gradient, row.label, loss);
            begin[at] = writer.of_one(span.begin[at], LINES == 1 ? at : (at - column) / inner);
        }
    /* The labels' columns once more, by the threads that have them: they have a term of their own. */
    __syncwarp();
    if (!active)
        return;
#pragma unroll
    for (int j = 0; j < LINES; j++) {
        const int column = t.dense ? (span.head + pack * N + j) % inner : pack * LINES + j;
        const RowCoefficients &row = rows[column * t.slabs.row_step];
        const int64_t label = row.label;
        if (label < 0 || row.gradient.constant)
            continue;
        int step = static_cast<int>(label);
        bool mine = true;
        if (N > 1 && t.dense) {
            const int64_t position = label * inner + column - span.head;
            if (position < 0 || position >= int64_t(span.packs) * N)
                continue; /* an edge, written with its label */
            const unsigned of = static_cast<unsigned>(position / N);
            step = static_cast<int>(t.by_packs.quotient(of));
            mine = static_cast<int>(of) - step * t.packs == pack && (LINES == 1 || position % N == j);
        }
        if (mine && step >= from && step < end && (step - from) % t.down == own.down)
            begin[column * t.slabs.across[1] + label * t.slabs.step[1]] = from_float<T>(row.gradient.at_label);
    }
}

} // namespace

#endif
