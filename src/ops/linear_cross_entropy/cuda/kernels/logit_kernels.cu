/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels on fp32 logits, and the cuBLASLt products around them: see cublaslt_steps.cuh. */
#include <type_traits>

#include "ops/linear_cross_entropy/cuda/cublaslt_steps.cuh"
#include "ops/linear_cross_entropy/cuda/finish_row.cuh"

namespace lce {

namespace {

constexpr int PACKS = 4;          /* of 4 logits each, per thread */
constexpr int MOST_THREADS = 512; /* of a block that takes a row, or a part of one */
static_assert(MOST_PART == MOST_THREADS * PACKS * 4 && MOST_PART == MOST_SLICE, "a slice is one part");

/* ---- statistics ------------------------------------------------------------------------------ */

/* Loads one thread's logits of `n` columns, at most MOST_PART; -inf past the last column. Pack k
 * begins at column 4 * (threadIdx.x + k * blockDim.x). */
DEVICE void load_part(float (&z)[PACKS][4], const float *row, const float *bias, int n) {
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int at = 4 * (threadIdx.x + k * blockDim.x);
        const bool whole = at + 4 <= n; /* padding has never been written */
        const Pack<float, 4> pack = load_once_if<float, 4>(whole, row + at, -INFINITY);
#pragma unroll
        for (int j = 0; j < 4; j++)
            z[k][j] = whole || at + j >= n ? pack.v[j] : row[at + j];
    }
    if (bias) {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = 4 * (threadIdx.x + k * blockDim.x) + j;
                if (at < n)
                    z[k][j] += bias[at];
            }
    }
}

/* Merges over the block; the result is in warp 0. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> merge_block(LossStats<OPTIONS> g, float scale) {
    __shared__ LossStats<OPTIONS> warp_stats[MOST_THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    g = merge_warp(g, scale);
    if (lane == 0)
        warp_stats[warp] = g;
    __syncthreads();
    if (warp == 0)
        g = merge_warp(lane < blockDim.x / WARP ? warp_stats[lane] : no_columns<OPTIONS>(), scale);
    return g;
}

/* The statistics of the block's `n` logits of a row, of the classes from first_class on. Thread 0 gets
 * the result. T: the dtype of the inputs. */
template <typename T, int OPTIONS>
DEVICE LossStats<FULL> collect_part(float (&z)[PACKS][4], const float *row, const float *bias, int64_t first_class,
                                    int n, int64_t label, const Loss &loss) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    if constexpr (OPTIONS == FULL) {
        add_columns<T>(
            g, z,
            [&](int k, int j) {
                const int at = 4 * (threadIdx.x + k * blockDim.x) + j;
                return at < n ? first_class + at : int64_t(-1);
            },
            loss);
    } else {
        float max = -INFINITY, sum[4] = {};
#pragma unroll
        for (int k = 0; k < PACKS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                max = fmaxf(max, z[k][j]);
        const float pivot = pivot_at(max);
#pragma unroll
        for (int k = 0; k < PACKS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[j] += exp_term<T>(z[k][j] - pivot, loss.scale);
        g.s = {max, (sum[0] + sum[1]) + (sum[2] + sum[3])};
    }
    g = merge_block(g, loss.scale);
    LossStats<FULL> all = no_columns<FULL>();
    if (threadIdx.x > 0)
        return all;
    if constexpr (OPTIONS == FULL)
        all = g;
    else
        all.s = g.s;
    const int64_t at = loss.column_of(label) - first_class;
    all.z_label = at >= 0 && at < n ? row[at] + (bias ? bias[at] : 0.0f) : 0.0f;
    return all;
}

/* A block per part of a row. Merges with the statistics that `stats` holds of that row of the tile
 * and that part, unless `first`. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void collect(const __grid_constant__ LogitTile tile,
                                                        const __grid_constant__ Loss loss, int parts, bool first,
                                                        LossStats<FULL> *stats) {
    wait_for_inputs();
    const int64_t row = blockIdx.x / parts, begin = (blockIdx.x % parts) * int64_t(MOST_PART);
    const int64_t label = loss.class_of(loss.load_label(tile.first_row + row)), first_class = tile.first_class + begin;
    if (label < 0)
        return;
    const int n = static_cast<int>(min(int64_t(MOST_PART), tile.classes - begin));
    const float *const z_row = tile.z + row * tile.stride + begin, *const bias =
                                                                       tile.bias ? tile.bias + first_class : NULL;
    float z[PACKS][4];
    load_part(z, z_row, bias, n);
    const LossStats<FULL> all = collect_part<T, OPTIONS>(z, z_row, bias, first_class, n, label, loss);
    stats += blockIdx.x;
    if (threadIdx.x == 0)
        *stats = first ? all : merge(*stats, all, loss.scale);
}

/* ---- gradient of the logits ------------------------------------------------------------------ */

/* dz at a logit. The row's at_label is not used: it may have been computed without
 * the label's logit. */
template <typename T, int OPTIONS>
DEVICE float gradient_at(const ColumnGradient<OPTIONS, T> &of, const RowGradient &row, float z, int64_t column,
                         int64_t label, const Loss &loss) {
    const float d = of.of(z, column, loss);
    if (column != loss.column_of(label))
        return d;
    return d - row.target * (loss.softcap != 0.0f ? cap_slope(z, loss) : 1.0f);
}

/* Writes dz of the block's `n` logits of a row, and 0 to up to 3 elements of padding, which have no class. */
template <typename T, int OPTIONS>
DEVICE void write_part(const float (&z)[PACKS][4], const RowGradient &gradient, int64_t first_class, int n,
                       int64_t label, const Loss &loss, T *dz) {
    const ColumnGradient<OPTIONS, T> column(gradient, loss);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int at = 4 * (threadIdx.x + k * blockDim.x);
        float d[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            d[j] = at + j >= n         ? 0.0f
                   : gradient.constant ? gradient.p
                                       : gradient_at<T>(column, gradient, z[k][j], first_class + at + j, label, loss);
        if (at < n)
            store_once<T, 4>(dz + at, packed<T>(d));
    }
}

/* A block per row. dz may overwrite the front of the row of logits; it is no longer than those. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void write_dz(const __grid_constant__ LogitTile tile,
                                                         const __grid_constant__ Loss loss,
                                                         const RowGradient *gradients, T *dz, int64_t dz_stride) {
    wait_for_inputs();
    const int64_t row = blockIdx.x, label = loss.load_label(tile.first_row + row);
    const RowGradient gradient = gradients[tile.first_row + row];
    dz += row * dz_stride;
    for (int64_t begin = 0; begin < tile.classes; begin += PACKS * 4 * blockDim.x) {
        const int64_t first_class = tile.first_class + begin;
        const int n = static_cast<int>(min(int64_t(PACKS * 4 * blockDim.x), tile.classes - begin));
        float z[PACKS][4];
        if (!gradient.constant)
            load_part(z, tile.z + row * tile.stride + begin, tile.bias ? tile.bias + first_class : NULL, n);
        __syncthreads(); /* all threads have read this part of the row: it may be overwritten */
        write_part<T, OPTIONS>(z, gradient, first_class, n, label, loss, dz + begin);
    }
}

/* collect, finish_row and write_dz in one, for rows of at most MOST_PART classes, all
 * of them in the tile. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void convert(const __grid_constant__ LogitTile tile,
                                                        const __grid_constant__ Loss loss, double row_scale,
                                                        RowGradient *gradients, Totals *row_totals, T *dz,
                                                        int64_t dz_stride) {
    wait_for_inputs();
    const int64_t index = blockIdx.x, row = tile.first_row + index, label = loss.load_label(row);
    const int n = static_cast<int>(tile.classes);
    const float *const z_row = tile.z + index * tile.stride;
    float z[PACKS][4], capped[PACKS][4];
    load_part(z, z_row, tile.bias, n);
#pragma unroll
    for (int k = 0; k < PACKS; k++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            capped[k][j] = z[k][j];
    const LossStats<FULL> all = collect_part<T, OPTIONS>(capped, z_row, tile.bias, 0, n, loss.class_of(label), loss);
    if (threadIdx.x == 0) {
        Totals totals = {};
        gradients[row] = finish_row(loss, row, loss.class_of(label), &all, row_scale, true, &totals);
        row_totals[index] = totals;
    }
    __syncthreads(); /* the row's coefficients are written, and its logits may be overwritten */
    write_part<T, OPTIONS>(z, gradients[row], 0, n, label, loss, dz + index * dz_stride);
}

constexpr int SUM_COLUMNS = 64, SUM_ROWS = 8;

/* Adds the sum of dz over the tile's rows, of values that are not rounded, to sums[v] for the tile's classes
 * v; `first`: sets it. `units`: see Run. Blocks of SUM_COLUMNS x SUM_ROWS threads. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(SUM_COLUMNS *SUM_ROWS) void sum_dz(const __grid_constant__ LogitTile tile,
                                                                const __grid_constant__ Loss loss,
                                                                const RowGradient *gradients, const float *units,
                                                                bool first, float *sums) {
    wait_for_inputs();
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int x = threadIdx.x % SUM_COLUMNS, y = threadIdx.x / SUM_COLUMNS;
    const int64_t v = blockIdx.x * int64_t(SUM_COLUMNS) + x, column = tile.first_class + v;
    const float bias = v < tile.classes && tile.bias ? tile.bias[column] : 0.0f;
    float sum = 0.0f;
    for (int64_t row = y; row < tile.rows && v < tile.classes; row += SUM_ROWS) {
        const RowGradient gradient = gradients[tile.first_row + row];
        const ColumnGradient<OPTIONS, T> of(gradient, loss);
        const float d = gradient.constant ? gradient.p
                                          : gradient_at<T>(of, gradient, tile.z[row * tile.stride + v] + bias, column,
                                                           loss.load_label(tile.first_row + row), loss);
        sum += units ? units[tile.first_row + row] * d : d;
    }
    row_sums[y][x] = sum;
    __syncthreads();
    if (y > 0 || v >= tile.classes)
        return;
    for (int i = 1; i < SUM_ROWS; i++)
        sum += row_sums[i][x];
    sums[column] = first ? sum : sums[column] + sum;
}

/* ---- host side ------------------------------------------------------------------------------- */

/* Threads for a row of n columns, or a part of one. */
int threads_for(int64_t n) {
    return power_at_least(ceil_div<int64_t>(n, PACKS * 4), 64, MOST_THREADS);
}

/* Calls f(zero, options) with a zero of the inputs' dtype and the options as a constant. */
template <typename F> void for_options(const Problem &p, F f) {
    for_dtype(p.dtype, [&](auto zero) {
        if (p.all_statistics)
            f(zero, std::integral_constant<int, FULL>());
        else
            f(zero, std::integral_constant<int, PLAIN>());
    });
}

rafter_status multiply(const Run &run, const ProductWorkspace &workspace, Product *p) {
    p->dtype = run.problem.dtype;
    p->tf32 = run.call.allow_tf32;
    return rafter_cuda_multiply(run.context, *p, workspace.memory, workspace.bytes);
}

} // namespace

rafter_status form_logits(const Run &run, const ProductWorkspace &workspace, const Operand &x, const LogitTile &tile) {
    if (run.problem.depth == 0)
        return rafter_cuda_check(
            run.context, "linear_cross_entropy",
            cudaMemsetAsync(tile.z, 0, tile.rows * tile.stride * sizeof(float), run.context->cuda_state->stream));
    Product p = {};
    p.rigid = run.problem.invariant;
    p.out_dtype = RAFTER_F32;
    p.m = tile.rows;
    p.n = tile.classes;
    p.k = run.problem.depth;
    p.a = x;
    p.b = rows_from(run.weight, run.problem.dtype, tile.first_class);
    p.b.transposed = true;
    p.c = tile.z;
    p.c_stride = tile.stride;
    return multiply(run, workspace, &p);
}

rafter_status multiply_dx(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                          const GradientOut &out, bool add) {
    Product p = {};
    p.rigid = run.problem.invariant;
    p.m = rows;
    p.n = run.problem.depth;
    p.k = dz.classes;
    p.a = {dz.data, dz.stride, false};
    p.b = rows_from(run.weight, run.problem.dtype, dz.first_class);
    p.add = add;
    p.out_dtype = out.dtype;
    p.c = out.data;
    p.c_stride = out.stride;
    p.alpha = out.alpha;
    return multiply(run, workspace, &p);
}

rafter_status multiply_dweight(const Run &run, const ProductWorkspace &workspace, const Dz &dz, int64_t rows,
                               const Operand &x, const GradientOut &out, bool add) {
    Product p = {};
    p.m = dz.classes;
    p.n = run.problem.depth;
    p.k = rows;
    p.a = {dz.data, dz.stride, true};
    p.b = x;
    p.add = add;
    p.out_dtype = out.dtype;
    p.c = out.data;
    p.c_stride = out.stride;
    p.alpha = out.alpha;
    return multiply(run, workspace, &p);
}

void collect_statistics(const Run &run, const LogitTile &tile, int parts, bool first, LossStats<FULL> *stats) {
    /* Parts have MOST_PART columns; a shorter row takes fewer threads. */
    const Launch how = {tile.rows * parts, threads_for(tile.classes)};
    for_options(run.problem, [&](auto zero, auto options) {
        launch(run.context, how, collect<decltype(zero), options.value>, tile, run.loss, parts, first, stats);
    });
}

void write_gradient(const Run &run, const LogitTile &tile, char *dz, int64_t dz_stride, float *dbias, bool first_rows) {
    for_options(run.problem, [&](auto zero, auto options) {
        typedef decltype(zero) T;
        const RowGradient *gradients = run.gradients;
        if (run.problem.dbias)
            launch(run.context, {ceil_div<int64_t>(tile.classes, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS},
                   sum_dz<T, options.value>, tile, run.loss, gradients, run.row_units, first_rows, dbias);
        if (run.problem.dx || run.problem.dweight)
            launch(run.context, {tile.rows, threads_for(tile.classes)}, write_dz<T, options.value>, tile, run.loss,
                   gradients, reinterpret_cast<T *>(dz), dz_stride);
    });
}

void convert_rows(Run *run, const LogitTile &tile, char *dz, int64_t dz_stride) {
    for_options(run->problem, [&](auto zero, auto options) {
        typedef decltype(zero) T;
        launch(run->context, {tile.rows, threads_for(tile.classes)}, convert<T, options.value>, tile, run->loss,
               static_cast<double>(run->row_scale), run->gradients, run->block_totals + run->blocks,
               reinterpret_cast<T *>(dz), dz_stride);
    });
    run->blocks += tile.rows;
}

} // namespace lce
