/*
 * linear_cross_entropy on CUDA: matrix products by cuBLASLt, and between them kernels that turn fp32 logits into
 * statistics of rows and into dz, the gradient of the logits, in the inputs' dtype.
 *
 *     fast      for each group of rows: logits of all classes; statistics; dz, written over the front of each row of
 *               logits; the group's dx = dz W; and dW += dz^T x, which grows from group to group
 *     compact   for each slice of classes: logits, group by group, and statistics. Then again for each slice: logits,
 *               dz of all rows, the slice's dW = dz^T x, and dx += dz W, which grows from slice to slice
 *
 * On Hopper, for 16-bit inputs and most options, the first product is fused with what follows it (fused.cuh), and no
 * logit is ever stored. Fast then keeps, instead of dz, the exponentials e^(u - pivot) of a group as they come out of
 * the product, before the sums of its rows are known: what a row's are to be multiplied by meets x on its way into dW,
 * and dx on its way out.
 *
 * What all rows share (dloss, denominator, scale) is no part of dz: it meets the gradients when they are stored, as
 * `alpha`, a number on the device. So dz has the size of probabilities and loses nothing to its dtype.
 */
#include "cuda/launch.cuh"
#include "cuda/products.cuh"
#include "cuda/rows.cuh"
#include "ops/columns.cuh"
#include "ops/linear_cross_entropy/call.h"
#include "ops/linear_cross_entropy/fused.cuh"

#include <cuda_runtime.h>

#include <type_traits>

namespace {

constexpr int PACKS = 4;                            /* of 4 logits, that a thread holds */
constexpr int MOST_THREADS = 512;                   /* of a block that takes a row, or a part of one */
constexpr int MOST_PART = MOST_THREADS * PACKS * 4; /* columns of a part */
constexpr int ROW_THREADS = 128;                    /* of a block whose threads take rows */

/* fp32 logits of some rows and classes, without the bias. */
struct Tile {
    float *z;
    int64_t stride; /* between rows: a multiple of 4 */
    int64_t first_row, rows, first_class, classes;
    const float *bias; /* of all classes; NULL: none */
};

/* ---- before the rows ----------------------------------------------------------------------------------------------
 */

/* What holds for the whole call. */
struct Common {
    Prepared prepared;
    float alpha;
    int dirty; /* an ignored row of x holds an infinity or NaN */
};

constexpr int PREPARE_THREADS = 1024;

/* One block. `row_scale` is what dz has been multiplied by beyond the mathematics. */
__global__ __launch_bounds__(PREPARE_THREADS) void prepare(const __grid_constant__ Loss loss, float row_scale,
                                                           Common *common) {
    double classes = 0.0;
    for (int64_t v = threadIdx.x; v < loss.classes; v += PREPARE_THREADS)
        classes += loss.weight_of(v);
    const Prepared prepared = {block_sum(classes), block_sum(count(loss, threadIdx.x, PREPARE_THREADS))};
    if (threadIdx.x > 0)
        return;
    common->prepared = prepared;
    common->dirty = 0;
    /* Of no rows all gradients are 0, whatever their mean would be multiplied by. */
    common->alpha =
        prepared.totals.counted == 0.0 ? 1.0f : static_cast<float>(common_upstream(loss, prepared.totals) / row_scale);
}

__global__ void widen(const __grid_constant__ Rows from, int64_t n, float *to) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
        to[i] = from.get(i);
}

/* Rows [first, first + rows) of any stride as rows that a product can take. Where they are x's, those of ignored rows
 * become zeros: what lies there must reach no sum. */
template <typename T>
__global__ void pack(const __grid_constant__ Rows from, int64_t step, int64_t first, int64_t rows, int64_t columns,
                     const __grid_constant__ Loss loss, bool is_x, T *to, int64_t stride) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / columns, column = i - row * columns;
        const bool ignored = is_x && loss.class_of(loss.load_label(first + row)) == IGNORED;
        to[row * stride + column] = ignored ? from_float<T>(0.0f) : from.at<const T>(first + row)[column * step];
    }
}

/* ---- statistics ---------------------------------------------------------------------------------------------------
 */

/* One thread's logits of `n` columns, at most MOST_PART; where there is none, -inf. Pack k begins at column
 * 4 * (threadIdx.x + k * blockDim.x). */
DEVICE void load_part(float (&z)[PACKS][4], const float *row, const float *bias, int n) {
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int at = 4 * (threadIdx.x + k * blockDim.x);
        const Pack<float, 4> pack = load_once_if<float, 4>(at < n, row + at, -INFINITY);
#pragma unroll
        for (int j = 0; j < 4; j++)
            z[k][j] = at + j < n ? pack.v[j] : -INFINITY;
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

/* Over the block; the result is warp 0's. */
template <int OPTIONS> DEVICE Gathered<OPTIONS> merge_block(Gathered<OPTIONS> g, float scale) {
    __shared__ Gathered<OPTIONS> of_warp[MOST_THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    g = merge_warp(g, scale);
    if (lane == 0)
        of_warp[warp] = g;
    __syncthreads();
    if (warp == 0)
        g = merge_warp(lane < blockDim.x / WARP ? of_warp[lane] : none<OPTIONS>(), scale);
    return g;
}

/* A block takes one of `parts` parts of a row. Its statistics are merged with those that `stats` has of that row of the
 * tile and that part, unless these are the first. T: the dtype of the inputs. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void gather(const __grid_constant__ Tile tile,
                                                       const __grid_constant__ Loss loss, int parts, bool first,
                                                       Gathered<FULL> *stats) {
    const int64_t row = blockIdx.x / parts, begin = (blockIdx.x % parts) * int64_t(MOST_PART);
    const int64_t label = loss.class_of(loss.load_label(tile.first_row + row)), first_class = tile.first_class + begin;
    if (label < 0)
        return;
    const int n = static_cast<int>(min(int64_t(MOST_PART), tile.classes - begin));
    const float *const z_row = tile.z + row * tile.stride + begin, *const bias =
                                                                       tile.bias ? tile.bias + first_class : NULL;
    float z[PACKS][4];
    load_part(z, z_row, bias, n);

    Gathered<OPTIONS> g = none<OPTIONS>();
    if constexpr (OPTIONS == FULL) {
        add_full<T>(
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
    if (threadIdx.x > 0)
        return;
    Gathered<FULL> all = none<FULL>();
    if constexpr (OPTIONS == FULL)
        all = g;
    else
        all.s = g.s;
    const int64_t at = label - first_class;
    all.z_label = at >= 0 && at < n ? z_row[at] + (bias ? bias[at] : 0.0f) : 0.0f;
    stats += blockIdx.x;
    *stats = first ? all : merge(*stats, all, loss.scale);
}

/* ---- rows ---------------------------------------------------------------------------------------------------------
 */

/* The end of a row whose statistics `g` are complete, or (NULL) whose lse the caller has given: writes its results, if
 * this is forward, and the coefficients of its gradient, if they are wanted. By one thread. */
DEVICE void finish_row(const Loss &loss, int64_t row, const Gathered<FULL> *g, double row_scale, RowGradient *gradients,
                       Totals *totals) {
    const int64_t label = loss.class_of(loss.load_label(row));
    RowGradient gradient = gradient_unread(label);
    if (label < 0) {
        write_unread(loss, row, label, totals);
    } else if (!g) {
        const float lse = loss.lse.get(row);
        gradient = lse == -INFINITY ? gradient_unread(IGNORED) /* every logit is -inf */
                                    : gradient_from_lse(loss, row_scale, row, label, 0.0f, lse);
    } else {
        const RowFigures figures = figures_of(*g, g->z_label, loss);
        if (gradients)
            gradient = gradient_from_figures(loss, row_scale, row, label, g->z_label, figures);
        if (loss.forward)
            write_row(loss, row, label, results_of(loss, row, label, figures), totals);
    }
    if (gradients)
        gradients[row] = gradient;
}

DEVICE void finish_block(const Totals &mine, Totals *of_block) {
    const Totals totals = block_sum(mine);
    if (threadIdx.x == 0)
        of_block[blockIdx.x] = totals;
}

/* A thread to a row, whose `parts` parts are merged in their order. */
__global__ __launch_bounds__(ROW_THREADS) void finish_rows(const __grid_constant__ Loss loss, int64_t first,
                                                           int64_t rows, const Gathered<FULL> *stats, int parts,
                                                           double row_scale, RowGradient *gradients, Totals *of_block) {
    const int64_t index = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    Totals totals = {};
    if (index < rows) {
        Gathered<FULL> g = none<FULL>();
        for (int part = 0; stats && part < parts; part++)
            g = part == 0 ? stats[index * parts] : merge(g, stats[index * parts + part], loss.scale);
        finish_row(loss, first + index, stats ? &g : NULL, row_scale, gradients, &totals);
    }
    finish_block(totals, of_block);
}

/* A warp to a row, from the tiles of fused.cuh. */
__global__ __launch_bounds__(ROW_THREADS) void finish_tiles(const __grid_constant__ Loss loss, int64_t first,
                                                            int64_t rows, const RowStats *stats, int tiles,
                                                            const float *z_label, double row_scale,
                                                            RowGradient *gradients, Totals *of_block) {
    const int64_t index = (blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    Totals totals = {};
    if (index < rows) {
        RowStats s = no_elements();
        for (int tile = lane; tile < tiles; tile += WARP)
            s = merge(s, stats[index * tiles + tile], loss.scale);
        Gathered<FULL> g = none<FULL>();
        g.s = merge_lanes<WARP>(s, loss.scale);
        g.z_label = z_label[first + index];
        if (lane == 0)
            finish_row(loss, first + index, &g, row_scale, gradients, &totals);
    }
    finish_block(totals, of_block);
}

/* One block. */
__global__ __launch_bounds__(PREPARE_THREADS) void finish_loss(const __grid_constant__ Loss loss,
                                                               const Totals *of_block, int64_t blocks) {
    Totals all = {};
    for (int64_t i = threadIdx.x; i < blocks; i += PREPARE_THREADS) {
        all.loss += of_block[i].loss;
        all.weight += of_block[i].weight;
        all.counted += of_block[i].counted;
    }
    all = block_sum(all);
    if (threadIdx.x == 0)
        write_loss(loss, all);
}

/* ---- gradient of the logits ---------------------------------------------------------------------------------------
 */

/* dz at a logit. at_label of the row is not looked at: it may have been made without the label's logit. */
template <typename T, int OPTIONS>
DEVICE float gradient_at(const ColumnGradient<OPTIONS, T> &of, const RowGradient &row, float z, int64_t column,
                         int64_t label, const Loss &loss) {
    const float d = of.of(z, column, loss);
    if (column != label)
        return d;
    return d - row.target * (loss.softcap != 0.0f ? cap_slope(z, loss.softcap) : 1.0f);
}

/* A block takes a row. dz may lie over the front of the row of logits: then it is no longer than those. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void write_dz(const __grid_constant__ Tile tile,
                                                         const __grid_constant__ Loss loss,
                                                         const RowGradient *gradients, T *dz, int64_t dz_stride) {
    const int64_t row = blockIdx.x, label = loss.load_label(tile.first_row + row);
    const RowGradient gradient = gradients[tile.first_row + row];
    const ColumnGradient<OPTIONS, T> column(gradient, loss);
    dz += row * dz_stride;
    for (int64_t begin = 0; begin < tile.classes; begin += PACKS * 4 * blockDim.x) {
        const int64_t first_class = tile.first_class + begin;
        const int n = static_cast<int>(min(int64_t(PACKS * 4 * blockDim.x), tile.classes - begin));
        float z[PACKS][4];
        if (!gradient.constant)
            load_part(z, tile.z + row * tile.stride + begin, tile.bias ? tile.bias + first_class : NULL, n);
        __syncthreads(); /* this part of the row has been read by all, and may be overwritten */
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int at = 4 * (threadIdx.x + k * blockDim.x);
            float d[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                d[j] = gradient.constant ? gradient.p
                                         : gradient_at<T>(column, gradient, z[k][j], first_class + at + j, label, loss);
            if (at < n) /* up to 3 elements of padding are written too */
                store_once<T, 4>(dz + begin + at, packed<T>(d));
        }
    }
}

constexpr int SUM_COLUMNS = 64, SUM_ROWS = 8;

/* sums[v] of the tile's classes, plus the sum of dz over its rows, not rounded. Blocks of SUM_COLUMNS x SUM_ROWS. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(SUM_COLUMNS *SUM_ROWS) void sum_dz(const __grid_constant__ Tile tile,
                                                                const __grid_constant__ Loss loss,
                                                                const RowGradient *gradients, bool first, float *sums) {
    __shared__ float of_rows[SUM_ROWS][SUM_COLUMNS];
    const int x = threadIdx.x % SUM_COLUMNS, y = threadIdx.x / SUM_COLUMNS;
    const int64_t v = blockIdx.x * int64_t(SUM_COLUMNS) + x, column = tile.first_class + v;
    const float bias = v < tile.classes && tile.bias ? tile.bias[column] : 0.0f;
    float sum = 0.0f;
    for (int64_t row = y; row < tile.rows && v < tile.classes; row += SUM_ROWS) {
        const RowGradient gradient = gradients[tile.first_row + row];
        const ColumnGradient<OPTIONS, T> of(gradient, loss);
        sum += gradient.constant ? gradient.p
                                 : gradient_at<T>(of, gradient, tile.z[row * tile.stride + v] + bias, column,
                                                  loss.load_label(tile.first_row + row), loss);
    }
    of_rows[y][x] = sum;
    __syncthreads();
    if (y > 0 || v >= tile.classes)
        return;
    for (int i = 1; i < SUM_ROWS; i++)
        sum += of_rows[i][x];
    sums[column] = first ? sum : sums[column] + sum;
}

/* ---- exponentials as gradients ------------------------------------------------------------------------------------
 */

constexpr int ADJUST_THREADS = 256;

/* Makes exponentials e such that dz = p * e for a whole row, and x_scaled = p * x, so that dW = e^T x_scaled. A tile of
 * the row whose pivot is not the row's is brought to it: that takes logits that are further apart than bf16 reaches. A
 * block takes a row. */
template <typename T>
__global__ __launch_bounds__(ADJUST_THREADS) void adjust(const __grid_constant__ Loss loss, int64_t first,
                                                         const RowStats *stats, int tiles, const RowGradient *gradients,
                                                         T *exponentials, int64_t stride, const T *x, int64_t x_stride,
                                                         int64_t depth, T *x_scaled, int64_t scaled_stride) {
    const int64_t index = blockIdx.x, label = loss.load_label(first + index);
    const RowGradient gradient = gradients[first + index];
    T *const row = exponentials + index * stride;
    if (!gradient.constant) {
        bool apart = false;
        for (int tile = threadIdx.x; tile < tiles; tile += ADJUST_THREADS)
            apart |= stats[index * tiles + tile].max != gradient.pivot;
        for (int tile = 0, any = __syncthreads_or(apart); any && tile < tiles; tile++) {
            const float factor = expf((stats[index * tiles + tile].max - gradient.pivot) * loss.scale);
            const int64_t begin = int64_t(tile) * fused::CLASSES, end = min(loss.classes, begin + fused::CLASSES);
            for (int64_t v = begin + threadIdx.x; v < end; v += ADJUST_THREADS)
                row[v] = from_float<T>(factor * to_float(row[v]));
        }
        __syncthreads();
        if (threadIdx.x == 0)
            row[label] = from_float<T>(gradient.p == 0.0f ? 0.0f : gradient.at_label / gradient.p);
    }
    constexpr int N = WIDE<T>;
    const T *const from = x + index * x_stride;
    T *const to = x_scaled + index * scaled_stride;
    const auto scaled = [&](float value) { return gradient.constant ? gradient.p : gradient.p * value; };
    for (int64_t i = threadIdx.x * N; i + N <= depth; i += ADJUST_THREADS * N) {
        float all[N];
        unpack(load_once<T, N>(from + i), all);
#pragma unroll
        for (int j = 0; j < N; j++)
            all[j] = scaled(all[j]);
        store_once<T, N>(to + i, packed<T>(all));
    }
    for (int64_t i = depth / N * N + threadIdx.x; i < depth; i += ADJUST_THREADS)
        to[i] = from_float<T>(scaled(to_float(from[i])));
}

/* ---- gradients out of fp32 sums -----------------------------------------------------------------------------------
 */

/* A gradient as its rows lie in the caller's memory. */
struct Out {
    Rows rows;
    int64_t step; /* between columns */
    bool add;     /* to what is there */
};

template <typename T> DEVICE void put(T *to, float value, bool add) {
    *to = from_float<T>(add ? value + to_float(*to) : value);
}

/* What a row's sums are multiplied by: p of its gradient too, where that has not been done before. */
DEVICE float factor_of(const float *alpha, const RowGradient *gradients, int64_t row) {
    return gradients ? *alpha * gradients[row].p : *alpha;
}

/* Rows [first, first + rows) become factor * sums, or 0 where sums is NULL. */
template <typename T>
__global__ void store(const __grid_constant__ Out out, int64_t first, int64_t rows, int64_t columns, const float *sums,
                      int64_t stride, const float *alpha, const RowGradient *gradients) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / columns, column = i - row * columns;
        const float value = sums ? factor_of(alpha, gradients, first + row) * sums[row * stride + column] : 0.0f;
        put(out.rows.at<T>(first + row) + column * out.step, value, out.add);
    }
}

/* The same where rows follow each other without gaps on either side and all begins at multiples of 16 bytes. */
template <typename T>
__global__ __launch_bounds__(256) void store_wide(T *out, int64_t first, int64_t packs, int64_t columns,
                                                  const float *sums, const float *alpha, const RowGradient *gradients) {
    constexpr int N = WIDE<T>;
    const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
    if (i >= packs)
        return;
    const float factor = factor_of(alpha, gradients, gradients ? first + i * N / columns : 0);
    float all[N];
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        const Pack<float, 4> four = load_once<float, 4>(sums + i * N + j);
#pragma unroll
        for (int l = 0; l < 4; l++)
            all[j + l] = factor * four.v[l];
    }
    store_once<T, N>(out + first * columns + i * N, packed<T>(all));
}

/* ---- what ignored rows hold ---------------------------------------------------------------------------------------
 */

/* Their dz is 0, but 0 times an infinity or NaN of x is NaN in every class's sum. Compact, which does not copy x, looks
 * for such a thing, and if there is one, which is rare, sums dW once more without them, slowly. */
template <typename T>
__global__ void find_dirt(const __grid_constant__ Loss loss, const T *x, int64_t stride, int64_t depth,
                          Common *common) {
    const int64_t row = blockIdx.x;
    if (loss.class_of(loss.load_label(row)) != IGNORED)
        return;
    bool dirty = false;
    for (int64_t i = threadIdx.x; i < depth; i += blockDim.x)
        dirty |= !(fabsf(to_float(x[row * stride + i])) < INFINITY);
    if (dirty)
        common->dirty = 1;
}

/* out[classes, depth] = factor * dz^T x over the rows that count. */
template <typename T, typename U>
__global__ void mend_dweight(const __grid_constant__ Loss loss, const Common *common, const T *dz, int64_t dz_stride,
                             const T *x, int64_t x_stride, int64_t classes, int64_t depth, U *out, int64_t out_stride,
                             const float *factor) {
    if (!common->dirty)
        return;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < classes * depth;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t v = i / depth, column = i - v * depth;
        float sum = 0.0f;
        for (int64_t row = 0; row < loss.rows; row++)
            if (loss.class_of(loss.load_label(row)) != IGNORED)
                sum = fmaf(to_float(dz[row * dz_stride + v]), to_float(x[row * x_stride + column]), sum);
        out[v * out_stride + column] = from_float<U>(factor ? *factor * sum : sum);
    }
}

/* ---- how a call is cut --------------------------------------------------------------------------------------------
 */

/* Rows of a matrix that products can take as it lies: neighbours in a row, rows that begin at multiples of 16 bytes. */
struct Lying {
    bool plain;
    int64_t stride; /* of rows, then */
};

int64_t rounded(int64_t n, int64_t multiple) {
    return ceil_div(n, multiple) * multiple;
}

Lying lying(const rafter_view &view) {
    const int last = view.ndim - 1;
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype), columns = view.shape[last];
    const bool one_row = view.ndim == 2 && view.shape[0] == 1;
    Lying l;
    l.stride = one_row ? rounded(columns, wide) : view.stride[0];
    l.plain = view.ndim == 2 && (view.stride[last] == 1 || columns == 1) && l.stride >= columns &&
              l.stride % wide == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    return l;
}

/* Whether columns need more than the softmax. */
bool needs_full(const struct rafter_loss &loss) {
    return loss.softcap != 0.0f || loss.smoothing != 0.0f || loss.entropy.data || loss.argmax.data;
}

struct Plan {
    rafter_dtype dtype;
    int64_t rows, depth, classes;
    bool statistics;         /* to be found, not given by the caller's lse */
    bool dx, dweight, dbias; /* wanted */
    bool fusable, fused;     /* may be, is by fused.cuh */
    bool fast;
    int64_t group, slice; /* rows, classes of a tile: fast takes all classes at a time; so do statistics, if fused */
    int parts;            /* of a row, for its statistics */
    int64_t depth_stride, tile_stride, dz_stride;
    Lying x, weight, dx_lies, dweight_lies;
    bool grows_dx, grows_dweight; /* as fp32 sums of all of it, in the workspace */
    bool adds_dweight;            /* to what the caller's holds */
    size_t product_bytes, bytes;

    bool gradients() const {
        return dx || dweight || dbias;
    }
    /* Whether fast keeps these instead of dz. */
    bool exponentials() const {
        return fast && fused;
    }
    /* Whether x is packed group by group, however it lies: that leaves out what ignored rows hold. */
    bool packs_groups() const {
        return fast && !fused;
    }
    bool direct_x() const {
        return x.plain && !packs_groups();
    }
    /* Whether products write the gradient where the caller wants it. */
    bool direct_dx() const {
        return dx_lies.plain && !grows_dx && !exponentials();
    }
    bool direct_dweight() const {
        return dweight_lies.plain && !grows_dweight && !(mends() && adds_dweight);
    }
    /* Whether ignored rows of x may reach the sums of dW. */
    bool mends() const {
        return !fast && dweight && direct_x();
    }
};

struct Buffers {
    Common *common;
    RowStats *tiles;        /* fused: of the group's rows */
    float *z_label;         /* fused: of every row */
    RowStats *sample;       /* fused.cuh's, of every row */
    char *x_scaled;         /* the group's, by p */
    Gathered<FULL> *stats;  /* of every part of the group's rows (fast), of every row (compact) */
    RowGradient *gradients; /* of every row */
    Totals *of_block;
    float *bias;
    char *x, *weight; /* packed, where the caller's do not do: the group's rows (fast) or all; all classes */
    float *z;
    char *dz;            /* compact: of all rows and a slice */
    float *dx, *dweight; /* fp32 sums: of the group and of the slice, or of all if they grow */
    float *dbias;
    char *products; /* cuBLASLt's workspace */
};

size_t lay_out(const Plan &p, char *memory, Buffers *b) {
    const int64_t bytes = rafter_dtype_bytes(p.dtype), groups = ceil_div<int64_t>(p.rows, p.group > 0 ? p.group : 1);
    const bool gradients = p.gradients();
    /* cuBLASLt's workspace must begin at a multiple of 256 bytes, the caller's begins at one of 64. */
    constexpr int64_t ALIGNMENT = 256;
    size_t used = ALIGNMENT - RAFTER_SCRATCH_ALIGNMENT;
    if (memory)
        memory += rounded(reinterpret_cast<intptr_t>(memory), ALIGNMENT) - reinterpret_cast<intptr_t>(memory) - used;
    const auto place = [&](auto **buffer, bool wanted, int64_t size) {
        *buffer = memory && wanted ? reinterpret_cast<std::remove_reference_t<decltype(*buffer)>>(memory + used) : NULL;
        used += wanted ? static_cast<size_t>(rounded(size, ALIGNMENT)) : 0;
    };
    place(&b->common, true, sizeof(Common));
    place(&b->tiles, p.fused && p.statistics, p.group * fused::tiles_across(p.classes) * int64_t(sizeof(RowStats)));
    place(&b->z_label, p.fused, p.rows * 4);
    place(&b->sample, p.exponentials(), p.rows * int64_t(sizeof(RowStats)));
    place(&b->x_scaled, p.exponentials() && p.dweight, p.group * p.depth_stride * bytes);
    place(&b->stats, !p.fused && p.statistics, (p.fast ? p.group : p.rows) * p.parts * int64_t(sizeof(Gathered<FULL>)));
    place(&b->gradients, gradients, p.rows * int64_t(sizeof(RowGradient)));
    place(&b->of_block, true, (p.rows / (ROW_THREADS / WARP) + groups + 1) * int64_t(sizeof(Totals)));
    place(&b->bias, true, p.classes * 4);
    place(&b->x, !p.direct_x(), (p.packs_groups() ? p.group : p.rows) * p.depth_stride * bytes);
    place(&b->weight, !p.weight.plain, p.classes * p.depth_stride * bytes);
    place(&b->z, !p.fused, p.group * p.tile_stride * 4);
    place(&b->dz, (p.dx || p.dweight) && (p.fused || !p.fast), (p.fast ? p.group : p.rows) * p.dz_stride * bytes);
    place(&b->dx, p.dx && !p.direct_dx(), (p.fast ? p.group : p.rows) * p.depth_stride * 4);
    place(&b->dweight, p.dweight && !p.direct_dweight(),
          (p.fast || p.grows_dweight ? p.classes : p.slice) * p.depth_stride * 4);
    place(&b->dbias, p.dbias, p.classes * 4);
    place(&b->products, p.product_bytes > 0, static_cast<int64_t>(p.product_bytes));
    return used;
}

/* Fills in what follows from fast, group and slice. */
void complete(Plan *p, const linear_cross_entropy_call *call) {
    const int64_t bytes = rafter_dtype_bytes(p->dtype);
    const auto grows = [&](bool wanted, const Lying &lies, const rafter_view &view, bool in_steps) {
        return wanted && in_steps && !(lies.plain && (view.dtype == RAFTER_F32 || call->native));
    };
    /* Exponentials need bf16's range; and a dz that is given by lse needs none of what they save. */
    p->fused = p->fusable && (!p->fast || (p->dtype == RAFTER_BF16 && p->statistics));
    if (p->fast)
        p->slice = p->classes;
    p->parts = static_cast<int>(p->fast && p->classes > 0 ? ceil_div<int64_t>(p->classes, MOST_PART) : 1);
    p->depth_stride = rounded(p->depth, 8);
    p->tile_stride = rounded(p->slice, 8);
    p->dz_stride = p->fast && !p->fused ? p->tile_stride * 4 / bytes : p->tile_stride;
    p->grows_dx = grows(p->dx, p->dx_lies, call->dx, !p->fast && p->slice < p->classes);
    p->grows_dweight = grows(p->dweight, p->dweight_lies, call->dweight, p->fast && p->group < p->rows);
    Buffers unused;
    p->bytes = lay_out(*p, NULL, &unused);
}

constexpr int64_t MIB = 1 << 20;

/* The sizes that fast and compact like, and the least they go down to. */
constexpr int64_t FAST_TILE_BYTES = 512 * MIB, LEAST_GROUP = 32, COMPACT_DZ_BYTES = 64 * MIB,
                  COMPACT_TILE_BYTES = 32 * MIB, FORWARD_TILE_BYTES = 64 * MIB, LEAST_SLICE = 128;
/* With fewer rows in a group the products of fast run slower than compact's fourth one costs. */
constexpr int64_t FAST_ROWS = 512;

/* A part of `total` that is at most `most`, all parts being about alike and multiples of `unit`. */
int64_t even_part(int64_t total, int64_t most, int64_t unit) {
    if (total <= most)
        return total > 0 ? total : 1;
    const int64_t parts = ceil_div<int64_t>(total, most > unit ? most / unit * unit : unit);
    return rounded(ceil_div<int64_t>(total, parts), unit);
}

int64_t unit_of(int64_t rows) {
    return rows >= 1024 ? 256 : rows >= 128 ? 128 : LEAST_GROUP;
}

/* Fewer and fewer rows in a group until the plan fits. False: none does, and the plan is the smallest. */
bool fit_fast(Plan *p, const linear_cross_entropy_call *call, size_t limit) {
    p->fast = true;
    p->group = p->rows > 0 ? p->rows : 1;
    complete(p, call);
    for (int64_t most = p->group; p->bytes > limit && most > LEAST_GROUP; complete(p, call)) {
        most = most / 8 * 7 > LEAST_GROUP ? most / 8 * 7 : LEAST_GROUP;
        p->group = even_part(p->rows, most, unit_of(most));
    }
    return p->bytes <= limit;
}

bool fit_compact(Plan *p, const linear_cross_entropy_call *call, size_t limit) {
    const int64_t bytes = rafter_dtype_bytes(p->dtype), rows = p->rows > 0 ? p->rows : 1;
    const bool gradients = p->gradients();
    p->fast = false;
    int64_t slice = MOST_PART;
    while (gradients && slice > 512 && slice * rows * bytes > COMPACT_DZ_BYTES)
        slice /= 2;
    int64_t tile = gradients ? COMPACT_TILE_BYTES : FORWARD_TILE_BYTES;
    for (;;) {
        p->slice = slice < p->classes ? slice : p->classes > 0 ? p->classes : 1;
        const int64_t row_bytes =
            p->fusable ? fused::tiles_across(p->classes) * int64_t(sizeof(RowStats)) : p->slice * 4;
        const int64_t most = tile / (row_bytes > 0 ? row_bytes : 1);
        p->group = even_part(rows, most > LEAST_GROUP ? most : LEAST_GROUP, unit_of(most));
        complete(p, call);
        if (p->bytes <= limit)
            return true;
        if (p->group > LEAST_GROUP && tile > row_bytes * LEAST_GROUP)
            tile /= 2;
        else if (slice > LEAST_SLICE && slice / 2 < p->classes)
            slice /= 2;
        else if (slice > LEAST_SLICE)
            slice =
                LEAST_SLICE < p->classes ? p->classes / 2 > LEAST_SLICE ? p->classes / 2 : LEAST_SLICE : LEAST_SLICE;
        else
            return false;
    }
}

/* Whether `call` may be done this way. */
bool may_be_fast(const Plan &p, const linear_cross_entropy_call *call) {
    return p.gradients() && call->mode != RAFTER_LCE_COMPACT && (call->mode == RAFTER_LCE_FAST || p.statistics);
}
bool may_be_compact(const Plan &p, const linear_cross_entropy_call *call) {
    return call->mode != RAFTER_LCE_FAST || !p.gradients();
}

/* Without a budget: groups whose logits take FAST_TILE_BYTES; or one group of all rows, after which nothing has to be
 * kept in fp32, if that takes no more. */
Plan comfortable_fast(Plan p, const linear_cross_entropy_call *call) {
    p.fast = true;
    complete(&p, call);
    const int64_t most = FAST_TILE_BYTES / ((p.fused ? 2 : 4) * (p.classes > 0 ? p.classes : 1));
    p.group = even_part(p.rows, most > FAST_ROWS ? most : FAST_ROWS, 256);
    complete(&p, call);
    Plan one = p;
    one.group = p.rows > 0 ? p.rows : 1;
    complete(&one, call);
    return one.bytes <= p.bytes ? one : p;
}

/* With p->product_bytes for cuBLASLt. False: no plan fits the budget, and the plan is the smallest. */
bool choose(Plan *p, const linear_cross_entropy_call *call, size_t budget) {
    Plan fast = *p, compact = *p;
    bool fits = false;
    if (may_be_fast(*p, call)) {
        fits = budget ? fit_fast(&fast, call, budget) : true;
        if (!budget)
            fast = comfortable_fast(fast, call);
        const bool good = call->mode == RAFTER_LCE_FAST || fast.group >= FAST_ROWS || fast.group >= p->rows;
        if (!may_be_compact(*p, call) || (fits && good)) {
            *p = fast;
            return fits;
        }
    }
    if (fit_compact(&compact, call, budget ? budget : SIZE_MAX)) {
        *p = compact;
        return true;
    }
    *p = fits || (may_be_fast(*p, call) && fast.bytes < compact.bytes) ? fast : compact;
    return fits;
}

/* Decided by shapes, dtypes, wanted results and the budget alone. False: the budget is too small, and the plan's bytes
 * are what would do. */
bool make_plan(const rafter_cuda_state *state, const linear_cross_entropy_call *call, size_t budget, Plan *plan) {
    Plan p = {};
    p.dtype = call->x.dtype;
    p.rows = call->loss.rows;
    p.depth = call->x.shape[call->x.ndim - 1];
    p.classes = call->loss.classes;
    p.statistics = call->loss.direction == RAFTER_FORWARD || !call->loss.lse.data;
    p.dx = call->dx.data;
    p.dweight = call->dweight.data;
    p.dbias = call->dbias.data;
    p.adds_dweight = call->accumulate_into_dweight;
    p.x = lying(call->x);
    p.weight = lying(call->weight);
    p.dx_lies = p.dx ? lying(call->dx) : Lying{};
    p.dweight_lies = p.dweight ? lying(call->dweight) : Lying{};
    p.fusable = p.dtype != RAFTER_F32 && p.depth > 0 && p.classes > 0 && p.rows > 0 && !p.dbias &&
                !needs_full(call->loss) && fused::available(state);
    p.product_bytes = PRODUCT_BYTES;
    while (budget && p.product_bytes > budget / 16)
        p.product_bytes = p.product_bytes > 65536 ? p.product_bytes / 2 : 0;
    *plan = p;
    if (choose(plan, call, budget))
        return true;
    *plan = p;
    plan->product_bytes = 0;
    return choose(plan, call, budget);
}

/* ---- running it ---------------------------------------------------------------------------------------------------
 */

struct Run {
    rafter_context *context;
    const linear_cross_entropy_call *call;
    Plan plan;
    Buffers b;
    Loss loss;
    float row_scale; /* see prepare */
    int64_t blocks;  /* of finish_rows so far */

    cudaStream_t stream() const {
        return context->cuda_state->stream;
    }
};

Launch over(int64_t items, int threads, int64_t most = 1 << 20) {
    const int64_t blocks = ceil_div<int64_t>(items, threads);
    return {blocks < 1 ? 1 : blocks < most ? blocks : most, threads};
}

/* Rows of x or W from `row` on. */
Operand rows_at(const char *data, int64_t stride, rafter_dtype dtype, int64_t row) {
    return {data + row * stride * rafter_dtype_bytes(dtype), stride, false};
}

Operand x_rows(const Run &run, int64_t first) {
    const Plan &plan = run.plan;
    if (plan.direct_x())
        return rows_at(run.call->x.data, plan.x.stride, plan.dtype, first);
    return rows_at(run.b.x, plan.depth_stride, plan.dtype, plan.packs_groups() ? 0 : first);
}

Operand weight_rows(const Run &run, int64_t first) {
    const Plan &plan = run.plan;
    if (plan.weight.plain)
        return rows_at(run.call->weight.data, plan.weight.stride, plan.dtype, first);
    return rows_at(run.b.weight, plan.depth_stride, plan.dtype, first);
}

void pack_rows(const Run &run, const rafter_view &view, int64_t first, int64_t rows, char *to) {
    const int last = view.ndim - 1;
    const Rows from = rows_of(view, last);
    const int64_t step = view.stride[last], columns = view.shape[last];
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, over(rows * columns, 256), pack<T>, from, step, first, rows, columns, run.loss,
               &view == &run.call->x, reinterpret_cast<T *>(to), run.plan.depth_stride);
    });
}

rafter_status multiply(const Run &run, Product p) {
    p.dtype = run.plan.dtype;
    return rafter_cuda_multiply(run.context, p, run.b.products, run.plan.product_bytes);
}

Tile tile_at(const Run &run, int64_t first_row, int64_t rows, int64_t first_class, int64_t classes) {
    return {
        run.b.z, run.plan.tile_stride, first_row, rows, first_class, classes, run.call->bias.data ? run.b.bias : NULL};
}

/* z of the tile = x W^T. */
rafter_status form_logits(const Run &run, const Tile &t) {
    if (run.plan.depth == 0)
        return rafter_cuda_check(run.context, "linear_cross_entropy",
                                 cudaMemsetAsync(t.z, 0, t.rows * t.stride * sizeof(float), run.stream()));
    Product p = {};
    p.out_dtype = RAFTER_F32;
    p.m = t.rows;
    p.n = t.classes;
    p.k = run.plan.depth;
    p.a = x_rows(run, t.first_row);
    p.b = weight_rows(run, t.first_class);
    p.b.turned = true;
    p.c = t.z;
    p.c_stride = t.stride;
    return multiply(run, p);
}

/* Threads that take a row of n columns, or a part of one. */
int threads_for(int64_t n) {
    int threads = 64;
    while (threads < MOST_THREADS && threads * PACKS * 4 < n)
        threads *= 2;
    return threads;
}

/* f(zero, options), with a zero of the inputs' dtype and the options as a constant. */
template <typename F> void for_options(const Run &run, F f) {
    for_dtype(run.plan.dtype, [&](auto zero) {
        if (needs_full(run.call->loss))
            f(zero, std::integral_constant<int, FULL>());
        else
            f(zero, std::integral_constant<int, PLAIN>());
    });
}

void gather_statistics(const Run &run, const Tile &t, bool first) {
    const int parts = run.plan.parts;
    /* Parts are of MOST_PART columns; a row of fewer takes fewer threads. */
    const Launch how = {t.rows * parts, threads_for(t.classes)};
    for_options(run, [&](auto zero, auto options) {
        launch(run.context, how, gather<decltype(zero), options.value>, t, run.loss, parts, first,
               run.b.stats + (run.plan.fast ? 0 : t.first_row));
    });
}

void finish(Run *run, int64_t first, int64_t rows) {
    if (rows == 0)
        return;
    const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS);
    launch(run->context, {blocks, ROW_THREADS}, finish_rows, run->loss, first, rows,
           static_cast<const Gathered<FULL> *>(run->b.stats), run->plan.parts, static_cast<double>(run->row_scale),
           run->b.gradients, run->b.of_block + run->blocks);
    run->blocks += blocks;
}

/* dz of the tile at `dz`; and dbias += its sum over rows. */
void differentiate(const Run &run, const Tile &t, char *dz, bool first_rows) {
    for_options(run, [&](auto zero, auto options) {
        typedef decltype(zero) T;
        const RowGradient *gradients = run.b.gradients;
        if (run.plan.dbias)
            launch(run.context, {ceil_div<int64_t>(t.classes, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS},
                   sum_dz<T, options.value>, t, run.loss, gradients, first_rows, run.b.dbias);
        if (run.plan.dx || run.plan.dweight)
            launch(run.context, {t.rows, threads_for(t.classes)}, write_dz<T, options.value>, t, run.loss, gradients,
                   reinterpret_cast<T *>(dz), run.plan.dz_stride);
    });
}

void store_rows(const Run &run, const rafter_view &view, const Lying &lies, bool add, int64_t first, int64_t rows,
                const float *sums, const RowGradient *gradients = NULL) {
    const int last = view.ndim - 1;
    const int64_t columns = view.shape[last], wide = 16 / rafter_dtype_bytes(view.dtype);
    const Out out = {rows_of(view, last), columns > 1 ? view.stride[last] : 1, add};
    const float *alpha = &run.b.common->alpha;
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        if (sums && !add && lies.plain && lies.stride == columns && run.plan.depth_stride == columns &&
            columns % wide == 0)
            launch(run.context, over(rows * columns / wide, 256, INT64_MAX), store_wide<T>,
                   reinterpret_cast<T *>(view.data), first, rows * columns / wide, columns, sums, alpha, gradients);
        else
            launch(run.context, over(rows * columns, 256), store<T>, out, first, rows, columns, sums,
                   run.plan.depth_stride, alpha, gradients);
    });
}

/* dx of the rows [first, first + rows), from dz of theirs and of the classes from first_class on. `add`: to what the
 * steps before have left. */
rafter_status multiply_dx(const Run &run, const char *dz, int64_t first, int64_t rows, int64_t first_class,
                          int64_t classes, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dx = run.call->dx;
    Product p = {};
    p.m = rows;
    p.n = plan.depth;
    p.k = classes;
    p.a = {dz, plan.dz_stride, false};
    p.b = weight_rows(run, first_class);
    p.add = add;
    if (plan.direct_dx()) {
        p.out_dtype = dx.dtype;
        p.c = dx.data + first * plan.dx_lies.stride * rafter_dtype_bytes(dx.dtype);
        p.c_stride = plan.dx_lies.stride;
        p.alpha = &run.b.common->alpha;
    } else {
        p.out_dtype = RAFTER_F32;
        p.c = run.b.dx + (plan.fast ? 0 : first * plan.depth_stride);
        p.c_stride = plan.depth_stride;
    }
    return multiply(run, p);
}

/* dW of the classes [first_class, first_class + classes), likewise. */
rafter_status multiply_dweight(const Run &run, const char *dz, int64_t first, int64_t rows, int64_t first_class,
                               int64_t classes, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    Product p = {};
    p.m = classes;
    p.n = plan.depth;
    p.k = rows;
    p.a = {dz, plan.dz_stride, true};
    p.b = plan.exponentials() ? Operand{run.b.x_scaled, plan.depth_stride, false} : x_rows(run, first);
    p.add = add;
    if (plan.direct_dweight()) {
        p.out_dtype = dweight.dtype;
        p.c = dweight.data + first_class * plan.dweight_lies.stride * rafter_dtype_bytes(dweight.dtype);
        p.c_stride = plan.dweight_lies.stride;
        p.alpha = &run.b.common->alpha;
        p.add |= run.call->accumulate_into_dweight;
    } else {
        p.out_dtype = RAFTER_F32;
        p.c = run.b.dweight;
        p.c_stride = plan.depth_stride;
    }
    return multiply(run, p);
}

template <int MODE> rafter_status run_fused(const Run &run, fused::Task task) {
    const Operand x = x_rows(run, task.first_row), w = weight_rows(run, 0);
    task.depth = static_cast<int>(run.plan.depth);
    task.bias = run.call->bias.data ? run.b.bias : NULL;
    task.z_label = run.b.z_label;
    task.gradients = run.b.gradients;
    task.out = run.b.dz;
    task.out_stride = run.plan.dz_stride;
    return fused::run<MODE>(run.context, run.plan.dtype, x.data, x.stride, w.data, w.stride, run.plan.classes, run.loss,
                            task);
}

fused::Task statistics_task(const Run &run, int64_t first, int64_t rows) {
    fused::Task task = {};
    task.first_row = first;
    task.rows = rows;
    task.classes = run.plan.classes;
    task.stats = run.b.tiles;
    task.tiles = static_cast<int>(fused::tiles_across(run.plan.classes));
    return task;
}

void finish_fused(Run *run, int64_t first, int64_t rows) {
    const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS / WARP);
    launch(run->context, {blocks, ROW_THREADS}, finish_tiles, run->loss, first, rows,
           static_cast<const RowStats *>(run->b.tiles), static_cast<int>(fused::tiles_across(run->plan.classes)),
           static_cast<const float *>(run->b.z_label), static_cast<double>(run->row_scale), run->b.gradients,
           run->b.of_block + run->blocks);
    run->blocks += blocks;
}

/* Exponentials of a group, as dz is; and x_scaled. */
rafter_status form_exponentials(Run *run, int64_t first, int64_t rows) {
    const Plan &plan = run->plan;
    const Operand x = x_rows(*run, first);
    fused::Task task = statistics_task(*run, first, rows);
    task.sample = run->b.sample + first;
    RAFTER_TRY(run_fused<fused::EXPONENTIALS>(*run, task));
    finish_fused(run, first, rows);
    launch(run->context, {rows, ADJUST_THREADS}, adjust<bf16>, run->loss, first,
           static_cast<const RowStats *>(run->b.tiles), task.tiles, static_cast<const RowGradient *>(run->b.gradients),
           reinterpret_cast<bf16 *>(run->b.dz), plan.dz_stride, static_cast<const bf16 *>(x.data), x.stride,
           plan.dweight ? plan.depth : 0, reinterpret_cast<bf16 *>(run->b.x_scaled), plan.depth_stride);
    return RAFTER_OK;
}

/* The largest of a row's first logits: what its exponentials will be relative to. */
rafter_status take_sample(const Run &run) {
    fused::Task task = statistics_task(run, 0, run.plan.rows);
    task.classes = run.plan.classes < fused::CLASSES ? run.plan.classes : fused::CLASSES;
    task.stats = run.b.sample;
    task.tiles = 1;
    return run_fused<fused::STATISTICS>(run, task);
}

/* Logits, statistics and dz of a group. */
rafter_status form_dz(Run *run, int64_t first, int64_t rows, char *dz) {
    const Tile tile = tile_at(*run, first, rows, 0, run->plan.classes);
    pack_rows(*run, run->call->x, first, rows, run->b.x);
    RAFTER_TRY(form_logits(*run, tile));
    if (run->plan.statistics)
        gather_statistics(*run, tile, true);
    finish(run, first, rows);
    differentiate(*run, tile, dz, first == 0);
    return RAFTER_OK;
}

rafter_status run_fast(Run *run) {
    const Plan &plan = run->plan;
    const linear_cross_entropy_call *call = run->call;
    char *const dz = plan.exponentials() ? run->b.dz : reinterpret_cast<char *>(run->b.z);
    if (plan.exponentials()) {
        if (!plan.x.plain)
            pack_rows(*run, call->x, 0, plan.rows, run->b.x);
        RAFTER_TRY(take_sample(*run));
    }
    for (int64_t first = 0; first < plan.rows; first += plan.group) {
        const int64_t rows = plan.rows - first < plan.group ? plan.rows - first : plan.group;
        RAFTER_TRY(plan.exponentials() ? form_exponentials(run, first, rows) : form_dz(run, first, rows, dz));
        if (plan.dx) {
            RAFTER_TRY(multiply_dx(*run, dz, first, rows, 0, plan.classes, false));
            if (!plan.direct_dx())
                store_rows(*run, call->dx, plan.dx_lies, false, first, rows, run->b.dx,
                           plan.exponentials() ? run->b.gradients : NULL);
        }
        if (plan.dweight)
            RAFTER_TRY(multiply_dweight(*run, dz, first, rows, 0, plan.classes, first > 0));
    }
    if (plan.dweight && !plan.direct_dweight())
        store_rows(*run, call->dweight, plan.dweight_lies, call->accumulate_into_dweight, 0, plan.classes,
                   run->b.dweight);
    return RAFTER_OK;
}

/* Calls step(tile) for all groups of rows of all slices of classes, and then each slice's end(first class, classes). */
template <typename Step, typename End> rafter_status for_tiles(const Run &run, Step step, End end) {
    const Plan &plan = run.plan;
    for (int64_t v = 0; v < plan.classes; v += plan.slice) {
        const int64_t classes = plan.classes - v < plan.slice ? plan.classes - v : plan.slice;
        for (int64_t first = 0; first < plan.rows; first += plan.group) {
            const int64_t rows = plan.rows - first < plan.group ? plan.rows - first : plan.group;
            const Tile tile = tile_at(run, first, rows, v, classes);
            RAFTER_TRY(form_logits(run, tile));
            step(tile);
        }
        RAFTER_TRY(end(v, classes));
    }
    return RAFTER_OK;
}

/* See find_dirt. */
void look_for_dirt(const Run &run) {
    const Operand x = x_rows(run, 0);
    for_dtype(run.plan.dtype, [&](auto zero) {
        launch(run.context, {run.plan.rows, 128}, find_dirt<decltype(zero)>, run.loss,
               static_cast<const decltype(zero) *>(x.data), x.stride, run.plan.depth, run.b.common);
    });
}

void mend(const Run &run, int64_t first_class, int64_t classes) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    const Operand x = x_rows(run, 0);
    const Launch how = {4 * run.context->cuda_state->multiprocessors, 256};
    const auto launch_with = [&](auto zero, auto out, int64_t out_stride, const float *factor) {
        typedef decltype(zero) T;
        launch(run.context, how, mend_dweight<T, std::remove_pointer_t<decltype(out)>>, run.loss,
               static_cast<const Common *>(run.b.common), reinterpret_cast<const T *>(run.b.dz), plan.dz_stride,
               static_cast<const T *>(x.data), x.stride, classes, plan.depth, out, out_stride, factor);
    };
    for_dtype(plan.dtype, [&](auto zero) {
        const int64_t stride = plan.dweight_lies.stride;
        const float *const alpha = &run.b.common->alpha;
        if (!plan.direct_dweight())
            launch_with(zero, run.b.dweight, plan.depth_stride, NULL);
        else if (dweight.dtype == RAFTER_F32)
            launch_with(zero, reinterpret_cast<float *>(dweight.data) + first_class * stride, stride, alpha);
        else
            launch_with(zero, reinterpret_cast<decltype(zero) *>(dweight.data) + first_class * stride, stride, alpha);
    });
}

rafter_status run_compact(Run *run) {
    const Plan &plan = run->plan;
    const linear_cross_entropy_call *call = run->call;
    if (!plan.x.plain)
        pack_rows(*run, call->x, 0, plan.rows, run->b.x);
    for (int64_t first = 0; plan.fused && plan.statistics && first < plan.rows; first += plan.group) {
        const int64_t rows = plan.rows - first < plan.group ? plan.rows - first : plan.group;
        RAFTER_TRY(run_fused<fused::STATISTICS>(*run, statistics_task(*run, first, rows)));
        finish_fused(run, first, rows);
    }
    if (plan.statistics && !plan.fused)
        RAFTER_TRY(for_tiles(
            *run, [&](const Tile &tile) { gather_statistics(*run, tile, tile.first_class == 0); },
            [](int64_t, int64_t) { return RAFTER_OK; }));
    if (!plan.statistics || !plan.fused)
        finish(run, 0, plan.rows);
    if (!plan.gradients())
        return RAFTER_OK;
    if (plan.mends())
        look_for_dirt(*run);
    const auto write = [&](const Tile &tile) {
        char *const dz = run->b.dz + tile.first_row * plan.dz_stride * rafter_dtype_bytes(plan.dtype);
        differentiate(*run, tile, dz, tile.first_row == 0);
    };
    const auto multiply_slice = [&](int64_t v, int64_t classes) {
        if (plan.dweight) {
            RAFTER_TRY(multiply_dweight(*run, run->b.dz, 0, plan.rows, v, classes, false));
            if (plan.mends())
                mend(*run, v, classes);
            if (!plan.direct_dweight())
                store_rows(*run, call->dweight, plan.dweight_lies, call->accumulate_into_dweight, v, classes,
                           run->b.dweight);
        }
        return plan.dx ? multiply_dx(*run, run->b.dz, 0, plan.rows, v, classes, v > 0) : RAFTER_OK;
    };
    if (!plan.fused)
        RAFTER_TRY(for_tiles(*run, write, multiply_slice));
    for (int64_t v = 0; plan.fused && v < plan.classes; v += plan.slice) {
        fused::Task task = {};
        task.rows = plan.rows;
        task.first_class = v;
        task.classes = plan.classes - v < plan.slice ? plan.classes - v : plan.slice;
        RAFTER_TRY(run_fused<fused::GRADIENT>(*run, task));
        RAFTER_TRY(multiply_slice(v, task.classes));
    }
    if (plan.dx && !plan.direct_dx())
        store_rows(*run, call->dx, plan.dx_lies, false, 0, plan.rows, run->b.dx);
    return RAFTER_OK;
}

/* No rows, or no classes. */
void store_nothing(const Run &run) {
    const Plan &plan = run.plan;
    const linear_cross_entropy_call *call = run.call;
    if (plan.dx)
        store_rows(run, call->dx, plan.dx_lies, false, 0, plan.rows, NULL);
    if (plan.dweight && !call->accumulate_into_dweight)
        store_rows(run, call->dweight, plan.dweight_lies, false, 0, plan.classes, NULL);
    if (plan.dbias)
        cudaMemsetAsync(run.b.dbias, 0, plan.classes * sizeof(float), run.stream());
}

/* dbias as a matrix of one row. */
rafter_view as_row(const rafter_view &view) {
    rafter_view row = view;
    row.ndim = 2;
    row.shape[0] = 1;
    row.stride[0] = 0;
    row.shape[1] = view.shape[0];
    row.stride[1] = view.stride[0];
    return row;
}

/* fp16 holds nothing under 2^-24, and 13 bits above 2^-14 at most: so dz takes up what is left at its upper end, unless
 * weights of the caller's may take it there. */
float row_scale_of(const linear_cross_entropy_call *call) {
    const struct rafter_loss &loss = call->loss;
    const bool weights = loss.row_weight.data || loss.class_weight.data || loss.reduction == RAFTER_NONE;
    return call->x.dtype == RAFTER_F16 && !weights ? 0x1p12f : 1.0f;
}

rafter_status execute(Run *run) {
    const linear_cross_entropy_call *call = run->call;
    const Plan &plan = run->plan;
    run->row_scale = row_scale_of(call);
    launch(run->context, {1, PREPARE_THREADS}, prepare, run->loss, run->row_scale, run->b.common);
    run->loss.prepared = &run->b.common->prepared;
    if (call->bias.data)
        launch(run->context, over(plan.classes, 256), widen, rows_of(call->bias, 1), plan.classes, run->b.bias);
    if (!plan.weight.plain && plan.rows > 0 && plan.classes > 0 && plan.depth > 0)
        pack_rows(*run, call->weight, 0, plan.classes, run->b.weight);

    if (plan.rows == 0 || plan.classes == 0) {
        finish(run, 0, plan.rows);
        store_nothing(*run);
    } else if (plan.fast) {
        RAFTER_TRY(run_fast(run));
    } else {
        RAFTER_TRY(run_compact(run));
    }
    if (plan.dbias)
        store_rows(*run, as_row(call->dbias), Lying{}, false, 0, 1, run->b.dbias);
    if (run->loss.forward)
        launch(run->context, {1, PREPARE_THREADS}, finish_loss, run->loss, static_cast<const Totals *>(run->b.of_block),
               run->blocks);
    return rafter_cuda_launched(run->context, "linear_cross_entropy");
}

} // namespace

extern "C" rafter_status rafter_cuda_linear_cross_entropy(rafter_context *context,
                                                          const struct linear_cross_entropy_call *call) {
    static const char *const mode_names[] = {"RAFTER_LCE_AUTO", "RAFTER_LCE_FAST", "RAFTER_LCE_COMPACT"};
    OnDevice current(context);
    Run run = {};
    run.context = context;
    run.call = call;
    const size_t room = rafter_scratch_request(1) - 1; /* to align a caller's workspace */
    const size_t budget = call->budget > room ? call->budget - room : call->budget ? 1 : 0;
    if (!make_plan(context->cuda_state, call, budget, &run.plan))
        return rafter_fail(context, RAFTER_WORKSPACE_TOO_SMALL, "budget is %zu bytes, wanted at least %zu in mode %s",
                           call->budget, run.plan.bytes + room, mode_names[call->mode]);
    if (call->ask) {
        *call->ask = rafter_scratch_request(run.plan.bytes);
        return RAFTER_OK;
    }
    if (call->loss.direction == RAFTER_BACKWARD && !run.plan.gradients())
        return RAFTER_OK;
    RAFTER_TRY(rafter_cuda_open_products(context));
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_cuda_scratch(context, call->workspace, call->workspace_bytes, run.plan.bytes, &scratch));
    lay_out(run.plan, scratch.memory, &run.b);
    run.loss = loss_of(context, &call->loss);
    const rafter_status status = execute(&run);
    rafter_scratch_release(context, &scratch);
    return status;
}
