/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums over the rows of a 16-bit matrix, each row times a coefficient, in fp32: dbias, and the two
 * vectors of the spread of label smoothing (see hopper_steps.cuh).
 *
 * A block sums COLUMNS columns of a chunk of the rows, a pack of 16 bytes per thread. A second kernel
 * adds the chunks in their order, so results are the same every time.
 */
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

constexpr int SUM_THREADS = 256, IN_FLIGHT_ROWS = 8;
constexpr int COLUMNS = SUM_THREADS * WIDE<bf16>;
constexpr int STAGED_ROWS = SUM_THREADS;         /* whose coefficients are in shared memory at a time */
constexpr int64_t BLOCKS = 792, LEAST_ROWS = 32; /* blocks of a sum, at most; rows per chunk, at least */

/* ---- what is summed -------------------------------------------------------------------------- */

/* Rows of W times their class weights w_v. */
template <typename T> struct WeightRows {
    const T *weight;
    int64_t stride, classes;
    const float *class_weight; /* NULL: all are 1 */
    int64_t class_stride;

    DEVICE int64_t count() const {
        return classes;
    }
    DEVICE const T *at(int64_t k) const {
        return weight + k * stride;
    }
    DEVICE float coefficient(int64_t k) const {
        return class_weight ? class_weight[k * class_stride] : 1.0f;
    }
    static constexpr bool HAS_LABELS = false;
    DEVICE float subtracted(int64_t) const {
        return 0.0f;
    }
};

/* Active rows of x times their spread. */
template <typename T> struct SpreadRows {
    ActiveX<T> x;
    int64_t first, rows;
    const RowGradient *gradients;

    DEVICE int64_t count() const {
        return x.active.among(first, rows);
    }
    DEVICE const T *at(int64_t k) const {
        return x.at(first + k);
    }
    DEVICE float coefficient(int64_t k) const {
        return gradients[first + k].spread;
    }
    static constexpr bool HAS_LABELS = false;
    DEVICE float subtracted(int64_t) const {
        return 0.0f;
    }
};

/* dz of active rows: as it is stored, or from exponentials e as p e - spread w_v. At the label it is at_label. */
template <typename T> struct DzRows {
    ActiveRows active;
    int64_t first, rows;
    const T *dz;
    int64_t stride;
    const RowGradient *gradients; /* NULL: it is dz */
    const float *label_elements;  /* NULL: those of all_gradients */
    const RowGradient *all_gradients;
    int64_t first_class;
    const float *units; /* of Run */

    static constexpr bool HAS_LABELS = true;
    DEVICE int label_column(int64_t k) const {
        return static_cast<int>(active.classes[first + k] - first_class);
    }
    DEVICE float unit(int64_t k) const {
        return units ? units[first + k] : 1.0f;
    }
    DEVICE float at_label(int64_t k) const {
        return (label_elements ? label_elements[first + k] : all_gradients[first + k].at_label) * unit(k);
    }
    DEVICE int64_t count() const {
        return active.among(first, rows);
    }
    DEVICE const T *at(int64_t k) const {
        return dz + k * stride;
    }
    DEVICE float coefficient(int64_t k) const {
        return gradients ? gradients[first + k].p : unit(k);
    }
    DEVICE float subtracted(int64_t k) const {
        return gradients ? gradients[first + k].spread : 0.0f;
    }
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* parts[chunk][columns] = sums over the chunk's rows. `subtracted` has its own sum in
 * spread_parts[chunk], if that is not NULL. Rows begin at multiples of 16 bytes. */
template <typename T, typename Source>
__global__ __launch_bounds__(SUM_THREADS) void sum_chunk(const __grid_constant__ Source source, int64_t columns,
                                                         int chunks, float *parts, float *spread_parts) {
    constexpr int N = WIDE<T>;
    __shared__ float coefficients[STAGED_ROWS];
    __shared__ int labels[STAGED_ROWS]; /* columns */
    wait_for_previous_kernel();
    const int across = gridDim.x / chunks, block = blockIdx.x % across, chunk = blockIdx.x / across;
    const int64_t count = source.count();
    const int64_t share = ceil_div<int64_t>(count, chunks), begin = min(count, chunk * share),
                  end = min(count, begin + share);
    const int64_t column = int64_t(block) * COLUMNS + threadIdx.x * N;
    const int present = static_cast<int>(max(int64_t(0), min(int64_t(N), columns - column)));
    const bool sums_spread = spread_parts && block == 0;
    float sum[N] = {}, spread = 0.0f;
    const auto add_row = [&](int64_t k, int i, const Pack<T, N> &pack) {
        const float coefficient = coefficients[i];
        if (coefficient == 0.0f && !Source::HAS_LABELS) /* an ignored row, which may hold NaN */
            return;
        float values[N];
        unpack(pack, values);
        if constexpr (Source::HAS_LABELS)
            if (const int64_t label = labels[i] - column; label >= 0 && label < N) { /* rare */
                const float element = source.at_label(k);
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j == label)
                        sum[j] += element, values[j] = 0.0f;
            }
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = fmaf(coefficient, values[j], sum[j]);
    };
    for (int64_t first = begin; first < end; first += STAGED_ROWS) {
        const int rows = static_cast<int>(min(int64_t(STAGED_ROWS), end - first));
        __syncthreads(); /* the rows before have been added */
        if (threadIdx.x < rows) {
            coefficients[threadIdx.x] = source.coefficient(first + threadIdx.x);
            if constexpr (Source::HAS_LABELS)
                labels[threadIdx.x] = source.label_column(first + threadIdx.x);
            if (sums_spread)
                spread += source.subtracted(first + threadIdx.x);
        }
        __syncthreads();
        if (present < N) {
            for (int i = 0; i < rows && present > 0; i++) {
                Pack<T, N> pack = {};
                for (int j = 0; j < present; j++)
                    pack.v[j] = source.at(first + i)[column + j];
                add_row(first + i, i, pack);
            }
            continue;
        }
        int i = 0;
        for (; i + IN_FLIGHT_ROWS <= rows; i += IN_FLIGHT_ROWS) {
            Pack<T, N> pack[IN_FLIGHT_ROWS];
#pragma unroll
            for (int r = 0; r < IN_FLIGHT_ROWS; r++)
                pack[r] = load_once<T, N>(source.at(first + i + r) + column);
#pragma unroll
            for (int r = 0; r < IN_FLIGHT_ROWS; r++)
                add_row(first + i + r, i + r, pack[r]);
        }
        for (; i < rows; i++)
            add_row(first + i, i, load_once<T, N>(source.at(first + i) + column));
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < present)
            parts[chunk * columns + column + j] = sum[j];
    if (sums_spread) {
        spread = block_sum(spread);
        if (threadIdx.x == 0)
            spread_parts[chunk] = spread;
    }
}

/* to[c] = the sum of all chunks, minus w_c times the sum of spread_parts; 0 from `columns` on, up to
 * `padded`. `add`: to what is there. */
__global__ __launch_bounds__(SUM_THREADS) void add_chunks(const float *parts, const float *spread_parts, int chunks,
                                                          int64_t columns, int64_t padded,
                                                          const __grid_constant__ Loss loss, int64_t first_class,
                                                          bool add, float *to) {
    wait_for_previous_kernel();
    const int64_t c = blockIdx.x * int64_t(SUM_THREADS) + threadIdx.x;
    if (c >= padded)
        return;
    float sum = 0.0f, spread = 0.0f;
    for (int i = 0; i < chunks && c < columns; i++) {
        sum += parts[i * columns + c];
        spread += spread_parts ? spread_parts[i] : 0.0f;
    }
    if (spread != 0.0f)
        sum -= spread * static_cast<float>(loss.column_weight(first_class + c));
    to[c] = add && c < columns ? to[c] + sum : sum;
}

/* ---- host side ------------------------------------------------------------------------------- */

template <typename T, typename Source>
void sum_rows(const HopperRun &run, const Source &source, int64_t rows, int64_t columns, bool spreads,
              int64_t first_class, bool add, int64_t padded, float *to) {
    const int chunks = ColumnSums::chunks(rows, columns);
    float *const parts = run.column_parts, *const spread_parts = spreads ? parts + chunks * columns : NULL;
    launch(run.context, Launch{ceil_div<int64_t>(columns, COLUMNS) * chunks, SUM_THREADS}, sum_chunk<T, Source>, source,
           columns, chunks, parts, spread_parts);
    launch(run.context, Launch{ceil_div<int64_t>(padded, SUM_THREADS), SUM_THREADS}, add_chunks,
           static_cast<const float *>(parts), static_cast<const float *>(spread_parts), chunks, columns, padded,
           run.loss, first_class, add, to);
}

} // namespace

int ColumnSums::chunks(int64_t rows, int64_t columns) {
    const int64_t across = ceil_div<int64_t>(columns, COLUMNS);
    return static_cast<int>(max(int64_t(1), min(ceil_div<int64_t>(BLOCKS, across), rows / LEAST_ROWS)));
}

int64_t ColumnSums::bytes(int64_t rows, int64_t columns) {
    const int64_t few_rows = max(int64_t(1), rows / LEAST_ROWS) * (columns + 1),
                  many_rows = BLOCKS * COLUMNS + columns + BLOCKS + 1;
    return min(few_rows, many_rows) * int64_t(sizeof(float));
}

void sum_weights(const HopperRun &run, float *to) {
    const Problem &p = run.problem;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const WeightRows<T> source = {static_cast<const T *>(run.w.data), run.w.stride, p.classes,
                                      run.loss.class_weight, run.loss.class_stride};
        sum_rows<T>(run, source, p.classes, p.depth, false, 0, false, ColumnSums::padded(p.depth), to);
    });
}

void sum_spread_x(const HopperRun &run, int64_t first, int64_t rows, float *to) {
    const Problem &p = run.problem;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const SpreadRows<T> source = {run.active_x<T>(), first, rows, run.gradients};
        sum_rows<T>(run, source, rows, p.depth, false, 0, false, ColumnSums::padded(p.depth), to);
    });
}

void sum_dbias(const HopperRun &run, const Dz &dz, int64_t first, int64_t rows, const RowGradient *gradients,
               const float *at_label, bool add, float *dbias) {
    for_16_bit(run.problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const DzRows<T> source = {run.active,     first,        rows,     reinterpret_cast<const T *>(dz.data),
                                  dz.stride,      gradients,    at_label, run.gradients,
                                  dz.first_class, run.row_units};
        sum_rows<T>(run, source, rows, dz.classes, gradients != NULL && run.spread == SPREAD_APART, dz.first_class, add,
                    dz.classes, dbias + dz.first_class);
    });
}

} // namespace lce
