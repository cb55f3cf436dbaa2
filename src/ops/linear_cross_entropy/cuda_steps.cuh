/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of linear_cross_entropy on CUDA between its matrix products: fp32 logits become statistics of rows, those
 * the rows' results and coefficients, these dz; and fp32 sums become gradients.
 */
#ifndef RAFTER_LCE_CUDA_STEPS_CUH
#define RAFTER_LCE_CUDA_STEPS_CUH

#include <limits.h>

#include <type_traits>

#include "cuda/rows.cuh"
#include "ops/columns.cuh"
#include "ops/linear_cross_entropy/gradients.cuh"

namespace {

constexpr int PACKS = 4;                            /* of 4 logits, that a thread holds */
constexpr int MOST_THREADS = 512;                   /* of a block that takes a row, or a part of one */
constexpr int MOST_PART = MOST_THREADS * PACKS * 4; /* columns of a part */
constexpr int ROW_THREADS = 128;                    /* of a block whose threads take rows */
constexpr int ROW_BLOCKS = 6;                       /* of finish_tiles, that a multiprocessor has room for */

/* fp32 logits of some rows and classes, without the bias. */
struct Tile {
    float *z;
    int64_t stride; /* between rows: a multiple of 4 */
    int64_t first_row, rows, first_class, classes;
    const float *bias; /* of all classes; NULL: none */
};

/* ---- labels of rows -------------------------------------------------------------------------- */

constexpr int MANY_ROWS = 128; /* of one label: their sum is several blocks' work, see add_labels */

/* Which kept rows have something to add to dW at their label. `frequent`: the labels of MANY_ROWS rows or more, in any
 * order, behind their number. What becomes of it does not depend on the order in which rows are added. */
struct Labels {
    struct alignas(16) Class {
        int count, first, last; /* rows */
    };
    int *of_row; /* the class, or -1; NULL: not wanted, nor is anything else */
    Class *of_class;
    int *frequent;

    static constexpr int64_t bytes_of_frequent(int64_t rows) {
        return (1 + rows / MANY_ROWS) * int64_t(sizeof(int));
    }
    /* By all threads of the grid, before the first row is added. Rows are looked at four at a time: up to a multiple of
     * that, there is room behind the last. */
    DEVICE void clear(int64_t rows, int64_t classes) const {
        const int64_t thread = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
        if (thread < (-rows & 3))
            of_row[rows + thread] = -1;
        for (int64_t v = thread; v < classes; v += gridDim.x * int64_t(blockDim.x))
            of_class[v] = {0, INT_MAX, -1};
        if (thread == 0)
            *frequent = 0;
    }
    DEVICE void add(int row, int label) const {
        of_row[row] = label;
        if (label < 0)
            return;
        Class *const own = &of_class[label];
        atomicMin(&own->first, row);
        atomicMax(&own->last, row);
        if (atomicAdd(&own->count, 1) == MANY_ROWS - 1)
            frequent[1 + atomicAdd(frequent, 1)] = label;
    }
};

/* ---- before the rows ------------------------------------------------------------------------- */

/* What holds for the whole call. */
struct Common {
    Prepared prepared;
    float alpha;
    int dirty; /* an ignored row of x holds an infinity or NaN */
    int kept;  /* rows: see fused::Kept */
};

constexpr int PREPARE_THREADS = 1024;

/* Copies of the kept rows of x, elements of 2 bytes whatever their dtype, as fused::Kept has them: zeros for one that
 * is ignored and kept all the same, because what x holds there must not meet the zeros of its dz. */
struct CopyOfKept {
    Rows x;
    int64_t step; /* of a row's elements */
    int columns;
    bool wide;    /* rows of both begin at multiples of 16 bytes, and their elements are neighbours: as products take
                   * them, so that there are copies only if not all rows are kept */
    uint16_t *to; /* NULL: none */
    int64_t stride;

    /* By a warp. */
    DEVICE void copy(int64_t row, bool ignored, int64_t at) const {
        constexpr int N = WIDE<uint16_t>, AT_ONCE = 4;
        const int lane = threadIdx.x % WARP;
        const uint16_t *const from = x.at<const uint16_t>(row);
        uint16_t *const there = to + at * stride;
        const int whole = wide ? columns / N * N : 0;
        for (int first = lane * N; first < whole; first += AT_ONCE * WARP * N) {
            Pack<uint16_t, N> packs[AT_ONCE] = {};
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (!ignored && first + k * WARP * N < whole)
                    packs[k] = load_once<uint16_t, N>(from + first + k * WARP * N);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (first + k * WARP * N < whole)
                    store_once<uint16_t, N>(there + first + k * WARP * N, packs[k]);
        }
        for (int i = whole + lane; i < columns; i += WARP)
            there[i] = ignored ? uint16_t(0) : from[i * step];
    }
};

/* fused::Kept's order and classes, and the copies, of the block's share of rows: it counts for itself which are kept
 * before them, and of all. `drops`: ignored ones are not. */
DEVICE void keep_rows(const Loss &loss, bool drops, int blocks, int *order, int *classes, const CopyOfKept &copy) {
    __shared__ int of_warp[2][WARP]; /* kept rows of a strip, in turn */
    static_assert(PREPARE_THREADS == WARP * WARP, "a lane to each warp");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, rows = static_cast<int>(loss.rows);
    const int64_t share = ceil_div<int64_t>(rows, blocks), first = min(int64_t(rows), blockIdx.x * share),
                  end = min(int64_t(rows), first + share);
    const auto load = [&](int64_t row) { return row < end ? loss.load_label(row) : loss.ignore_index; };
    int64_t label = load(first + threadIdx.x);
    int kept = static_cast<int>(first), all = rows;
    if (drops) {
        int before = 0, behind = 0;
        for_counted_rows(loss, threadIdx.x, copy.to ? rows : first, PREPARE_THREADS,
                         [&](int64_t row) { (row < first ? before : behind)++; });
        kept = block_sum(before);
        all = kept + block_sum(behind);
    }
    const int first_kept = kept;
    for (int64_t row = first + threadIdx.x, turn = 0; row - threadIdx.x < end; row += PREPARE_THREADS, turn ^= 1) {
        const int of_row = static_cast<int>(loss.class_of(label));
        label = load(row + PREPARE_THREADS);
        const unsigned bits = __ballot_sync(~0u, row < end && !(drops && of_row == IGNORED));
        if (lane == 0)
            of_warp[turn][warp] = __popc(bits);
        __syncthreads();
        const int of_lane = of_warp[turn][lane];
        const int k = kept + warp_sum(lane < warp ? of_lane : 0) + __popc(bits & ((1u << lane) - 1));
        if (row < end) {
            const int at = bits >> lane & 1 ? k : rows - 1 - (static_cast<int>(row) - k);
            order[at] = static_cast<int>(row);
            classes[at] = of_row;
        }
        kept += warp_sum(of_lane);
    }
    if (!copy.to || (all == rows && copy.wide))
        return;
    __syncthreads(); /* order and classes are there */
    for (int64_t k = int64_t(first_kept) + warp; k < kept; k += WARP)
        copy.copy(order[k], classes[k] == IGNORED, rows - all + k);
}

/* The last block sums up; those before it, if there are any, keep rows. `row_scale` is what dz has been multiplied by
 * beyond the mathematics. `counters`: `counter_count` of tiles::Meeting's. Labels are cleared, if they are wanted. */
__global__ __launch_bounds__(PREPARE_THREADS) void prepare(const __grid_constant__ Loss loss, float row_scale,
                                                           bool drops, int *order, int *classes_in_order,
                                                           unsigned *counters, int counter_count,
                                                           const __grid_constant__ Labels labels,
                                                           const __grid_constant__ CopyOfKept copy, Common *common) {
    if (labels.of_row)
        labels.clear(loss.rows, loss.classes);
    const int last = static_cast<int>(gridDim.x) - 1;
    if (static_cast<int>(blockIdx.x) < last) {
        keep_rows(loss, drops, last, order, classes_in_order, copy);
        return;
    }
    for (int i = threadIdx.x; i < counter_count; i += PREPARE_THREADS)
        counters[i] = 0;
    double classes = 0.0;
    for (int64_t v = threadIdx.x; v < loss.classes && loss.class_weight; v += PREPARE_THREADS)
        classes += loss.weight_of(v);
    classes = loss.class_weight ? block_sum(classes) : static_cast<double>(loss.classes);
    const Prepared prepared = {classes, block_sum(count(loss, threadIdx.x, PREPARE_THREADS))};
    if (threadIdx.x > 0)
        return;
    common->prepared = prepared;
    common->dirty = 0;
    common->kept = static_cast<int>(drops ? static_cast<int64_t>(prepared.totals.counted) : loss.rows);
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

/* ---- statistics ------------------------------------------------------------------------------ */

/* One thread's logits of `n` columns, at most MOST_PART; where there is none, -inf. Pack k begins at column
 * 4 * (threadIdx.x + k * blockDim.x). */
DEVICE void load_part(float (&z)[PACKS][4], const float *row, const float *bias, int n) {
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int at = 4 * (threadIdx.x + k * blockDim.x);
        const bool whole = at + 4 <= n; /* what lies behind the last column has never been written */
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

/* Of the block's `n` logits of a row, whose first is of first_class; the result is thread 0's. T: the dtype of the
 * inputs. */
template <typename T, int OPTIONS>
DEVICE Gathered<FULL> gather_part(float (&z)[PACKS][4], const float *row, const float *bias, int64_t first_class, int n,
                                  int64_t label, const Loss &loss) {
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
    Gathered<FULL> all = none<FULL>();
    if (threadIdx.x > 0)
        return all;
    if constexpr (OPTIONS == FULL)
        all = g;
    else
        all.s = g.s;
    const int64_t at = label - first_class;
    all.z_label = at >= 0 && at < n ? row[at] + (bias ? bias[at] : 0.0f) : 0.0f;
    return all;
}

/* A block takes one of `parts` parts of a row. Its statistics are merged with those that `stats` has of that row of the
 * tile and that part, unless these are the first. */
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
    const Gathered<FULL> all = gather_part<T, OPTIONS>(z, z_row, bias, first_class, n, label, loss);
    stats += blockIdx.x;
    if (threadIdx.x == 0)
        *stats = first ? all : merge(*stats, all, loss.scale);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* The end of a row whose statistics `g` are complete, or (NULL) whose lse the caller has given: writes its results, if
 * this is forward, and returns the coefficients of its gradient, if they are wanted. `label`: as Loss::class_of has it.
 * By one thread. */
DEVICE RowGradient finish_row(const Loss &loss, int64_t row, int64_t label, const Gathered<FULL> *g, double row_scale,
                              bool wanted, Totals *totals) {
    RowGradient gradient = gradient_unread(label);
    if (label < 0) {
        write_unread(loss, row, label, totals);
    } else if (!g) {
        const float lse = loss.lse.get(row);
        gradient = lse == -INFINITY ? gradient_unread(IGNORED) /* every logit is -inf */
                                    : gradient_from_lse(loss, row_scale, row, label, 0.0f, lse);
    } else {
        const RowFigures figures = figures_of(*g, g->z_label, loss);
        if (wanted)
            gradient = gradient_from_figures(loss, row_scale, row, label, g->z_label, figures);
        if (loss.forward)
            write_row(loss, row, label, results_of(loss, row, label, figures), totals);
    }
    return gradient;
}

DEVICE void finish_block(const Totals &mine, Totals *of_block) {
    const Totals totals = block_sum(mine);
    if (threadIdx.x == 0)
        of_block[blockIdx.x] = totals;
}

/* A thread to a row, whose `parts` parts are merged in their order. Where there is an order, the k-th row is that of
 * it: see fused::Kept. */
__global__ __launch_bounds__(ROW_THREADS) void finish_rows(const __grid_constant__ Loss loss, const int *order,
                                                           int64_t first, int64_t rows, const Gathered<FULL> *stats,
                                                           int parts, double row_scale, RowGradient *gradients,
                                                           Totals *of_block) {
    const int64_t index = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    Totals totals = {};
    if (index < rows) {
        Gathered<FULL> g = none<FULL>();
        for (int part = 0; stats && part < parts; part++)
            g = part == 0 ? stats[index * parts] : merge(g, stats[index * parts + part], loss.scale);
        const int64_t row = order ? order[first + index] : first + index;
        const RowGradient gradient = finish_row(loss, row, loss.class_of(loss.load_label(row)), stats ? &g : NULL,
                                                row_scale, gradients, &totals);
        if (gradients)
            gradients[first + index] = gradient;
    }
    finish_block(totals, of_block);
}

/* A warp's way from exponentials of a row that tiles have left, each relative to its own maximum, to dz in their place:
 * a pack of a lane from each of TILES tiles at a time, of which the first are read when the row's gradient is not yet
 * known. */
template <typename T> struct Turning {
    static constexpr int N = WIDE<T>, TILES = 4;
    static_assert(fused::CLASSES == WARP * N, "a pack to a lane");
    T *row;
    const RowStats *stats;
    Pack<T, N> pack[TILES];
    float max[TILES];

    static DEVICE int64_t at(int64_t first, int k) {
        return first + k * fused::CLASSES + threadIdx.x % WARP * N;
    }
    DEVICE void load(int64_t first, int64_t classes) {
#pragma unroll
        for (int k = 0; k < TILES; k++)
            if (at(first, k) < classes) {
                pack[k] = load_once<T, N>(row + at(first, k));
                max[k] = stats[first / fused::CLASSES + k].max;
            }
    }
    DEVICE void finish(const RowGradient &gradient, int label, const Loss &loss) {
        for (int64_t first = 0; first < loss.classes; first += TILES * fused::CLASSES) {
            if (first > 0)
                load(first, loss.classes);
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                const int64_t v = at(first, k);
                if (v >= loss.classes)
                    continue;
                /* Where there is nothing, nothing is to be brought to a pivot that may be any far away. */
                const float factor =
                    gradient.p * (max[k] == -INFINITY ? 0.0f : expf((pivot_at(max[k]) - gradient.pivot) * loss.scale));
                float all[N];
                unpack(pack[k], all);
#pragma unroll
                for (int j = 0; j < N; j++)
                    all[j] = gradient.constant ? gradient.p : v + j == label ? gradient.at_label : factor * all[j];
                store_once<T, N>(row + v, packed<T>(all));
            }
        }
    }
};

/* What the lane `from` has. */
DEVICE RowGradient from_lane(const RowGradient &gradient, int from) {
    return {__shfl_sync(~0u, gradient.constant, from) != 0,
            __shfl_sync(~0u, gradient.pivot, from),
            __shfl_sync(~0u, gradient.p, from),
            __shfl_sync(~0u, gradient.spread, from),
            __shfl_sync(~0u, gradient.at_label, from),
            __shfl_sync(~0u, gradient.target, from)};
}

/* A warp to `each` rows, a lane to one of them, from the tiles of fused.cuh, which there are of kept rows; or all lanes
 * to one row, of more tiles. Rows are added to `labels`, if those are wanted. Where there are exponentials, the rows',
 * see above. */
template <typename T>
__global__ __launch_bounds__(ROW_THREADS, ROW_BLOCKS) void finish_tiles(
    const __grid_constant__ Loss loss, const __grid_constant__ fused::Kept kept, int64_t first, int64_t rows, int each,
    const RowStats *stats, int tiles, const float *z_label, double row_scale, RowGradient *gradients,
    const __grid_constant__ Labels labels, T *exponentials, int64_t stride, Totals *of_block) {
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP;
    const int64_t begin = (blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x) / WARP * each, index = begin + lane;
    const int there = kept.among(first + begin, min(int64_t(each), rows - begin)); /* these come first */
    const bool own = lane < each && index < rows;
    const int64_t row = own ? kept.order[first + index] : 0;
    const int label = own ? kept.classes[first + index] : 0;
    Turning<T> turning;
    const auto begin_turning = [&](int64_t of) {
        turning.row = exponentials + of * stride;
        turning.stats = stats + of * tiles;
        turning.load(0, loss.classes);
    };
    if (exponentials && there > 0)
        begin_turning(begin);
    Gathered<FULL> g = none<FULL>();
    if (lane < there)
        g.z_label = z_label[first + index];
    if (each > 1) {
        for (int tile = 0; tile < tiles && lane < there; tile++)
            g.s = merge(g.s, stats[index * tiles + tile], loss.scale);
    } else if (there > 0) {
        for (int tile = lane; tile < tiles; tile += WARP)
            g.s = merge(g.s, stats[begin * tiles + tile], loss.scale);
        g.s = merge_lanes<WARP>(g.s, loss.scale);
    }
    Totals totals = {};
    RowGradient gradient = gradient_unread(IGNORED);
    if (own) {
        gradient = finish_row(loss, row, label, &g, row_scale, gradients, &totals);
        if (gradients)
            gradients[first + index] = gradient;
        if (labels.of_row)
            labels.add(static_cast<int>(first + index), gradient.at_label != 0.0f ? label : -1);
    }
    for (int i = 0; i < there && exponentials; i++) {
        if (i > 0)
            begin_turning(begin + i);
        turning.finish(from_lane(gradient, i), __shfl_sync(~0u, label, i), loss);
    }
    finish_block(totals, of_block);
}

/* ---- gradient of the logits ------------------------------------------------------------------ */

/* dz at a logit. at_label of the row is not looked at: it may have been made without the label's logit. */
template <typename T, int OPTIONS>
DEVICE float gradient_at(const ColumnGradient<OPTIONS, T> &of, const RowGradient &row, float z, int64_t column,
                         int64_t label, const Loss &loss) {
    const float d = of.of(z, column, loss);
    if (column != label)
        return d;
    return d - row.target * (loss.softcap != 0.0f ? cap_slope(z, loss.softcap) : 1.0f);
}

/* dz of the block's `n` logits of a row; up to 3 elements of padding are written too. */
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
            d[j] = gradient.constant ? gradient.p
                                     : gradient_at<T>(column, gradient, z[k][j], first_class + at + j, label, loss);
        if (at < n)
            store_once<T, 4>(dz + at, packed<T>(d));
    }
}

/* A block takes a row. dz may lie over the front of the row of logits: then it is no longer than those. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void write_dz(const __grid_constant__ Tile tile,
                                                         const __grid_constant__ Loss loss,
                                                         const RowGradient *gradients, T *dz, int64_t dz_stride) {
    const int64_t row = blockIdx.x, label = loss.load_label(tile.first_row + row);
    const RowGradient gradient = gradients[tile.first_row + row];
    dz += row * dz_stride;
    for (int64_t begin = 0; begin < tile.classes; begin += PACKS * 4 * blockDim.x) {
        const int64_t first_class = tile.first_class + begin;
        const int n = static_cast<int>(min(int64_t(PACKS * 4 * blockDim.x), tile.classes - begin));
        float z[PACKS][4];
        if (!gradient.constant)
            load_part(z, tile.z + row * tile.stride + begin, tile.bias ? tile.bias + first_class : NULL, n);
        __syncthreads(); /* this part of the row has been read by all, and may be overwritten */
        write_part<T, OPTIONS>(z, gradient, first_class, n, label, loss, dz + begin);
    }
}

/* gather, finish_rows and write_dz in one, of rows of at most MOST_PART classes, all of them in the tile. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS) void turn_rows(const __grid_constant__ Tile tile,
                                                          const __grid_constant__ Loss loss, double row_scale,
                                                          RowGradient *gradients, Totals *of_row, T *dz,
                                                          int64_t dz_stride) {
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
    const Gathered<FULL> all = gather_part<T, OPTIONS>(capped, z_row, tile.bias, 0, n, loss.class_of(label), loss);
    if (threadIdx.x == 0) {
        Totals totals = {};
        gradients[row] = finish_row(loss, row, loss.class_of(label), &all, row_scale, true, &totals);
        of_row[index] = totals;
    }
    __syncthreads(); /* the row's coefficients are there, and its logits may be overwritten */
    write_part<T, OPTIONS>(z, gradients[row], 0, n, label, loss, dz + index * dz_stride);
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

/* ---- kept rows ------------------------------------------------------------------------------- */

/* f(i, a constant n): elements [i, i + n) of a row are this thread's; n is N or, behind the last N, 1. */
template <int N, typename F> DEVICE void for_elements(int64_t count, F f) {
    for (int64_t i = threadIdx.x * int64_t(N); i + N <= count; i += blockDim.x * int64_t(N))
        f(i, std::integral_constant<int, N>());
    for (int64_t i = count / N * N + threadIdx.x; i < count; i += blockDim.x)
        f(i, std::integral_constant<int, 1>());
}

template <int N, typename T> DEVICE void load_floats(float (&to)[N], const T *from) {
    unpack(load_once<T, N>(from), to);
}

/* x of kept rows: the call's, or a copy of them. */
template <typename T> struct KeptX {
    fused::Kept kept;
    const T *x;
    int64_t stride;
    bool copied;

    DEVICE const T *at(int64_t k) const {
        return x + (copied ? kept.copied_at(k) : kept.order[k]) * stride;
    }
};

constexpr int ZERO_THREADS = 256;

/* The end of a call: the first block writes the loss, from the totals of all blocks that have ended rows; and all zero
 * dx of the rows that are not kept, if it is given. */
template <typename U>
__global__ __launch_bounds__(PREPARE_THREADS) void finish_call(const __grid_constant__ Loss loss,
                                                               const Totals *of_block, int64_t blocks,
                                                               const __grid_constant__ fused::Kept kept,
                                                               int64_t columns, U *dx, int64_t stride) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && loss.forward) {
        Totals all = {};
        for (int64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
            all.loss += of_block[i].loss;
            all.weight += of_block[i].weight;
            all.counted += of_block[i].counted;
        }
        all = block_sum(all);
        if (threadIdx.x == 0)
            write_loss(loss, all);
    }
    if (!dx)
        return;
    for (int64_t k = *kept.count + int64_t(blockIdx.x); k < kept.all; k += gridDim.x)
        for_elements<WIDE<U>>(columns, [&](int64_t i, auto n) {
            store_once<U, n.value>(dx + kept.order[k] * stride + i, Pack<U, n.value>{});
        });
}

/* ---- exponentials as gradients --------------------------------------------------------------- */

/* dz of a row is p * e at all classes but the label's, where it is the largest element of most rows and has a number of
 * its own, at_label. Neither p nor that is rounded to the inputs' dtype on dx's way: dx = p * e W + at_label *
 * W[label]. dW = e^T x_scaled, with x_scaled = p * x, and at_label * x added to the label's row of it. */

constexpr int LABEL_THREADS = 256;

/* e of a group's rows: of the classes below `split`, and of those from there on. */
template <typename T> struct Exponentials {
    T *before, *behind;
    int64_t before_stride, behind_stride, split;

    DEVICE T *at(int64_t row, int64_t v) const {
        return v < split ? before + row * before_stride + v : behind + row * behind_stride + (v - split);
    }
};

/* Brings tiles of the row whose pivot is not the row's to it (that takes logits that are further apart than bf16
 * reaches), takes the label's e out, and makes x_scaled: the last of its x_rows rows are the group's. A block takes a
 * row. */
template <typename T>
__global__ __launch_bounds__(LABEL_THREADS) void adjust(const __grid_constant__ Loss loss, int64_t first, int64_t rows,
                                                        const RowStats *stats, int tiles, const RowGradient *gradients,
                                                        const __grid_constant__ Exponentials<T> e,
                                                        const __grid_constant__ KeptX<T> x, int64_t depth, T *x_scaled,
                                                        int64_t x_rows, int64_t scaled_stride) {
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    const int there = x.kept.among(first, rows);
    if (index >= there)
        return;
    const RowGradient gradient = gradients[first + index];
    constexpr int N = WIDE<T>;
    if (!gradient.constant) {
        bool apart = false;
        for (int tile = threadIdx.x; tile < tiles; tile += LABEL_THREADS)
            apart |= stats[index * tiles + tile].max != gradient.pivot;
        static_assert(fused::CLASSES % N == 0, "a pack is of one tile");
        const int64_t end = __syncthreads_or(apart) ? loss.classes : 0;
        for (int64_t v = threadIdx.x * N; v < end; v += LABEL_THREADS * N) { /* padding up to a multiple of N too */
            const float pivot = stats[index * tiles + v / fused::CLASSES].max;
            if (pivot == gradient.pivot)
                continue;
            const float factor = expf((pivot - gradient.pivot) * loss.scale);
            float all[N];
            load_floats(all, e.at(index, v));
#pragma unroll
            for (int j = 0; j < N; j++)
                all[j] *= factor;
            store_once<T, N>(e.at(index, v), packed<T>(all));
        }
        __syncthreads();
        if (threadIdx.x == 0)
            *e.at(index, loss.load_label(x.kept.order[first + index])) = from_float<T>(0.0f);
    }
    const T *const from = x.at(first + index);
    T *const to = x_scaled + (x_rows - there + index) * scaled_stride;
    for_elements<N>(depth, [&](int64_t i, auto n) {
        float all[n.value];
        load_floats(all, from + i);
#pragma unroll
        for (int j = 0; j < n.value; j++)
            all[j] = gradient.constant ? gradient.p : gradient.p * all[j];
        store_once<T, n.value>(to + i, packed<T>(all));
    });
}

/* dx of kept rows from the k-th on, out of their sums of dz W or, if there are gradients, of e W; and of the other rows
 * among [first, first + the grid's). A block takes a row. `wide`: rows of all begin at multiples of 16 bytes, and their
 * elements are neighbours. */
template <typename T, typename U>
__global__ __launch_bounds__(LABEL_THREADS) void store_dx(const __grid_constant__ Loss loss,
                                                          const __grid_constant__ fused::Kept kept, int64_t first,
                                                          const __grid_constant__ Rows dx, int64_t step, bool wide,
                                                          int64_t columns, const float *sums, int64_t stride,
                                                          const float *alpha, const RowGradient *gradients,
                                                          const T *weight, int64_t weight_stride) {
    wait_for_previous_kernel();
    const int64_t k = first + blockIdx.x, row = kept.order[k];
    const bool there = k < *kept.count;
    const float p = gradients && there ? gradients[k].p : 1.0f,
                at_label = gradients && there ? gradients[k].at_label : 0.0f;
    U *const to = dx.at<U>(row);
    const T *const w = at_label != 0.0f ? weight + loss.load_label(row) * weight_stride : NULL;
    const auto store_some = [&](int64_t i, auto n) {
        float sum[n.value] = {}, of_label[n.value] = {};
        if (there)
            load_floats(sum, sums + blockIdx.x * stride + i);
        if (w)
            load_floats(of_label, w + i);
#pragma unroll
        for (int j = 0; j < n.value; j++)
            sum[j] = there ? *alpha * fmaf(p, sum[j], at_label * of_label[j]) : 0.0f;
        store_once<U, n.value>(to + i * step, packed<U>(sum));
    };
    if (wide)
        for_elements<4>(columns, store_some);
    else
        for_elements<1>(columns, store_some);
}

constexpr int ADD_THREADS = 256, ADD_BLOCKS = 5;                       /* of a multiprocessor */
constexpr int SEARCHED = 8, SEARCHED_AT_ONCE = ADD_THREADS * SEARCHED; /* labels, by a thread and by a block */
constexpr int STRIP = 64;                                              /* columns of a block, where rows are many */

/* Puts rows of this label among [begin, begin + SEARCHED_AT_ONCE), none of them behind `last`, into the block's `found`
 * in their order. Returns how many. begin: a multiple of 4. */
DEVICE int find_rows(const int *labels, int64_t begin, int last, int label, int *found) {
    constexpr int WARPS = ADD_THREADS / WARP;
    __shared__ int of_warp[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t own = begin + threadIdx.x * SEARCHED;
    unsigned alike = 0; /* a bit for each row */
    int4 four[SEARCHED / 4];
#pragma unroll
    for (int i = 0; i < SEARCHED / 4; i++)
        if (own + 4 * i <= last)
            four[i] = *reinterpret_cast<const int4 *>(labels + own + 4 * i);
#pragma unroll
    for (int i = 0; i < SEARCHED / 4; i++) {
        const int of_row[] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            alike |= (own + 4 * i + j <= last && of_row[j] == label ? 1u : 0u) << (4 * i + j);
    }
    const int count = __popc(alike);
    int up_to = count; /* this lane */
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(~0u, up_to, step);
        up_to += lane >= step ? below : 0;
    }
    if (lane == WARP - 1)
        of_warp[warp] = up_to;
    __syncthreads();
    const int of_lane = lane < WARPS ? of_warp[lane] : 0;
    int at = warp_sum(lane < warp ? of_lane : 0) + up_to - count;
    for (; alike != 0; alike &= alike - 1)
        found[at++] = static_cast<int>(own) + __ffs(static_cast<int>(alike)) - 1;
    __syncthreads();
    return warp_sum(of_lane);
}

/* dW[label] += factor * at_label * x, of all rows of a label in their order, in fp32, rounded once. */
template <typename T, typename U> struct Addition {
    Labels labels;
    const RowGradient *gradients;
    KeptX<T> x;
    int64_t depth;
    U *dweight;
    int64_t stride;
    const float *factor;

    DEVICE float scale() const {
        return factor ? *factor : 1.0f;
    }

    /* What a row adds, to sums of neighbouring columns. */
    struct Row {
        float at_label;
        const T *x;

        template <int N> DEVICE void add(float (&sum)[N], int64_t column) const {
            float of_row[N];
            load_floats(of_row, x + column);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] = fmaf(at_label, of_row[j], sum[j]);
        }
    };
    DEVICE Row row_at(int64_t k) const {
        return {gradients[k].at_label, x.at(k)};
    }

    /* The rows of a label that has fewer than MANY_ROWS, of which the caller has the first. One or two are known
     * without a search. */
    DEVICE void add_few(int label, const Labels::Class &rows, const Row &first) const {
        __shared__ int found[MANY_ROWS];
        const float by = scale();
        int so_far = 0;
        for (int64_t begin = rows.first & ~3; rows.count > 2 && begin <= rows.last; begin += SEARCHED_AT_ONCE)
            so_far += find_rows(labels.of_row, begin, rows.last, label, found + so_far);
        U *const to = dweight + label * stride;
        for_elements<WIDE<U>>(depth, [&](int64_t i, auto n) {
            float sum[n.value] = {}, before[n.value];
            load_floats(before, to + i);
            first.add(sum, i);
#pragma unroll 4
            for (int k = 1; k < rows.count; k++)
                row_at(rows.count > 2 ? found[k] : rows.last).add(sum, i);
#pragma unroll
            for (int j = 0; j < n.value; j++)
                sum[j] = fmaf(by, sum[j], before[j]);
            store_once<U, n.value>(to + i, packed<U>(sum));
        });
    }

    /* The rows of one that has more, in STRIP columns from `first` on: some lanes to a row, and what they have summed
     * is summed up in turn. */
    DEVICE void add_many(int label, const Labels::Class &rows, int64_t first) const {
        constexpr int N = WIDE<T>, LANES = STRIP / N, AT_ONCE = ADD_THREADS / LANES;
        __shared__ int found[SEARCHED_AT_ONCE];
        __shared__ float sums[AT_ONCE][STRIP];
        const int lane = threadIdx.x % LANES * N, own = threadIdx.x / LANES;
        const int64_t left = depth - first - lane;
        float sum[N] = {};
        for (int64_t begin = rows.first & ~3; begin <= rows.last; begin += SEARCHED_AT_ONCE) {
            const int count = find_rows(labels.of_row, begin, rows.last, label, found);
            if (left >= N) {
#pragma unroll 4
                for (int k = own; k < count; k += AT_ONCE)
                    row_at(found[k]).add(sum, first + lane);
                continue;
            }
            for (int k = own; k < count; k += AT_ONCE) {
                const Row row = row_at(found[k]);
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j < left)
                        sum[j] = fmaf(row.at_label, to_float(row.x[first + lane + j]), sum[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            sums[own][lane + j] = sum[j];
        __syncthreads();
        if (threadIdx.x < STRIP && first + threadIdx.x < depth) {
            float all = 0.0f;
            for (int k = 0; k < AT_ONCE; k++)
                all += sums[k][threadIdx.x];
            U *const to = dweight + label * stride + first + threadIdx.x;
            *to = from_float<U>(fmaf(scale(), all, to_float(*to)));
        }
    }
};

/* The first `for_many` blocks take strips of frequent labels; the others a row at a time, and if it is the first of its
 * label, all of them. */
template <typename T, typename U>
__global__ __launch_bounds__(ADD_THREADS, ADD_BLOCKS) void add_labels(const __grid_constant__ Addition<T, U> a,
                                                                      int for_many) {
    wait_for_previous_kernel();
    const int block = static_cast<int>(blockIdx.x);
    if (block < for_many) {
        const int64_t strips = ceil_div<int64_t>(a.depth, STRIP), parts = *a.labels.frequent * strips;
        for (int64_t part = block; part < parts; part += for_many) {
            const int label = a.labels.frequent[1 + part / strips];
            a.add_many(label, a.labels.of_class[label], part % strips * STRIP);
        }
        return;
    }
    for (int64_t row = block - for_many; row < a.x.kept.all; row += gridDim.x - for_many) {
        const int label = a.labels.of_row[row];
        const auto own = a.row_at(row); /* asked for together with the label */
        if (label < 0)
            continue;
        const Labels::Class rows = a.labels.of_class[label];
        if (row == rows.first && rows.count < MANY_ROWS)
            a.add_few(label, rows, own);
    }
}

/* ---- gradients out of fp32 sums -------------------------------------------------------------- */

/* A gradient as its rows lie in the caller's memory. */
struct Out {
    Rows rows;
    int64_t step; /* between columns */
    bool add;     /* to what is there */
};

template <typename T> DEVICE void put(T *to, float value, bool add) {
    *to = from_float<T>(add ? value + to_float(*to) : value);
}

/* Rows [first, first + rows) become alpha * sums, or 0 where sums is NULL. */
template <typename T>
__global__ void store(const __grid_constant__ Out out, int64_t first, int64_t rows, int64_t columns, const float *sums,
                      int64_t stride, const float *alpha) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / columns, column = i - row * columns;
        const float value = sums ? *alpha * sums[row * stride + column] : 0.0f;
        put(out.rows.at<T>(first + row) + column * out.step, value, out.add);
    }
}

/* The same where rows follow each other without gaps on either side and all begins at multiples of 16 bytes. */
template <typename T>
__global__ __launch_bounds__(256) void store_wide(T *out, int64_t packs, const float *sums, const float *alpha) {
    constexpr int N = WIDE<T>;
    const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
    if (i >= packs)
        return;
    const float factor = *alpha;
    float all[N];
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        const Pack<float, 4> four = load_once<float, 4>(sums + i * N + j);
#pragma unroll
        for (int l = 0; l < 4; l++)
            all[j + l] = factor * four.v[l];
    }
    store_once<T, N>(out + i * N, packed<T>(all));
}

/* ---- what ignored rows hold ------------------------------------------------------------------ */

/* Their dz is 0, but 0 times an infinity or NaN of x is NaN in every class's sum. Where x is not copied, such a
 * thing is looked for, and if there is one, which is rare, dW is summed once more without those rows, slowly. */
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

} // namespace

#endif
