/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dW[label] += factor * at_label * x for all rows: the labels' elements of dz, which the Hopper product
 * of exponentials leaves out. The rows of a label are summed in fp32, in a fixed order, and rounded once.
 */
#include <type_traits>

#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

constexpr int ADD_THREADS = 256, ADD_BLOCKS = 5;                       /* blocks per multiprocessor */
constexpr int SEARCHED = 8, SEARCHED_AT_ONCE = ADD_THREADS * SEARCHED; /* labels per thread, and per block */
constexpr int COLUMNS = 64;                                            /* per block, if a label has many rows */

/* Lists the rows of this label among [begin, begin + SEARCHED_AT_ONCE), up to `last`, in the
 * block's `found`, in their order. Returns how many. begin: a multiple of 4. */
DEVICE int find_rows(const int *labels, int64_t begin, int last, int label, int *found) {
    constexpr int WARPS = ADD_THREADS / WARP;
    __shared__ int warp_totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t own = begin + threadIdx.x * SEARCHED;
    unsigned matches = 0; /* a bit per row */
    int4 four[SEARCHED / 4];
#pragma unroll
    for (int i = 0; i < SEARCHED / 4; i++)
        if (own + 4 * i <= last)
            four[i] = *reinterpret_cast<const int4 *>(labels + own + 4 * i);
#pragma unroll
    for (int i = 0; i < SEARCHED / 4; i++) {
        const int row_labels[] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            matches |= (own + 4 * i + j <= last && row_labels[j] == label ? 1u : 0u) << (4 * i + j);
    }
    const int count = __popc(matches);
    int up_to = count; /* matches up to this lane */
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(~0u, up_to, step);
        up_to += lane >= step ? below : 0;
    }
    if (lane == WARP - 1)
        warp_totals[warp] = up_to;
    __syncthreads();
    const int lane_total = lane < WARPS ? warp_totals[lane] : 0;
    int at = warp_sum(lane < warp ? lane_total : 0) + up_to - count;
    for (; matches != 0; matches &= matches - 1)
        found[at++] = static_cast<int>(own) + __ffs(static_cast<int>(matches)) - 1;
    __syncthreads();
    return warp_sum(lane_total);
}

template <typename T, typename U> struct LabelSums {
    Labels labels;
    const RowGradient *gradients;
    ActiveX<T> x;
    int64_t depth;
    U *dweight;
    int64_t stride;
    const float *factor;

    DEVICE float scale() const {
        return factor ? *factor : 1.0f;
    }

    /* An active row. `add` adds it to sums of adjacent columns. */
    struct Row {
        float at_label;
        const T *x;

        template <int N> DEVICE void add(float (&sum)[N], int64_t column) const {
            float values[N];
            load_floats(values, x + column);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] = fmaf(at_label, values[j], sum[j]);
        }
    };
    DEVICE Row row_at(int64_t k) const {
        return {gradients[k].at_label, x.at(k)};
    }

    /* Adds the rows of a label with fewer than MANY_ROWS rows, of which the caller has loaded the first. One
     * or two rows are known without a search. */
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

    /* Adds the rows of a label with more rows, in COLUMNS columns from `first` on. LANES threads take a row;
     * their sums are then added in a fixed order. */
    DEVICE void add_many(int label, const Labels::Class &rows, int64_t first) const {
        constexpr int N = WIDE<T>, LANES = COLUMNS / N, ROWS_AT_ONCE = ADD_THREADS / LANES;
        __shared__ int found[SEARCHED_AT_ONCE];
        __shared__ float sums[ROWS_AT_ONCE][COLUMNS];
        const int lane = threadIdx.x % LANES * N, own = threadIdx.x / LANES;
        const int64_t left = depth - first - lane;
        float sum[N] = {};
        for (int64_t begin = rows.first & ~3; begin <= rows.last; begin += SEARCHED_AT_ONCE) {
            const int count = find_rows(labels.of_row, begin, rows.last, label, found);
            if (left >= N) {
#pragma unroll 4
                for (int k = own; k < count; k += ROWS_AT_ONCE)
                    row_at(found[k]).add(sum, first + lane);
                continue;
            }
            for (int k = own; k < count; k += ROWS_AT_ONCE) {
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
        if (threadIdx.x < COLUMNS && first + threadIdx.x < depth) {
            float all = 0.0f;
            for (int k = 0; k < ROWS_AT_ONCE; k++)
                all += sums[k][threadIdx.x];
            U *const to = dweight + label * stride + first + threadIdx.x;
            *to = from_float<U>(fmaf(scale(), all, to_float(*to)));
        }
    }
};

/* The first `for_many` blocks take frequent labels, COLUMNS columns at a time. The others take a
 * row at a time; if it is the first of its label, they take all rows of the label. */
template <typename T, typename U>
__global__ __launch_bounds__(ADD_THREADS, ADD_BLOCKS) void add_labels(const __grid_constant__ LabelSums<T, U> a,
                                                                      int for_many) {
    wait_for_previous_kernel();
    const int block = static_cast<int>(blockIdx.x);
    if (block < for_many) {
        const int64_t column_blocks = ceil_div<int64_t>(a.depth, COLUMNS), parts = *a.labels.frequent * column_blocks;
        for (int64_t part = block; part < parts; part += for_many) {
            const int label = a.labels.frequent[1 + part / column_blocks];
            a.add_many(label, a.labels.of_class[label], part % column_blocks * COLUMNS);
        }
        return;
    }
    for (int64_t row = block - for_many; row < a.x.active.all; row += gridDim.x - for_many) {
        const int label = a.labels.of_row[row];
        const auto own = a.row_at(row); /* loaded together with the label */
        if (label < 0)
            continue;
        const Labels::Class rows = a.labels.of_class[label];
        if (row == rows.first && rows.count < MANY_ROWS)
            a.add_few(label, rows, own);
    }
}

} // namespace

void add_label_rows(const HopperRun &run, const GradientOut &out) {
    const Problem &p = run.problem;
    const int64_t most = ADD_BLOCKS * run.context->cuda_state->multiprocessors;
    const int64_t for_many = min(p.rows / MANY_ROWS * ceil_div<int64_t>(p.depth, COLUMNS), most);
    for_dtype(out.dtype, [&](auto zero) {
        typedef decltype(zero) U;
        for_16_bit(p.dtype, [&](auto input_zero) {
            typedef decltype(input_zero) T;
            launch(run.context, Launch{for_many + min(p.rows, int64_t(1) << 30), ADD_THREADS}, add_labels<T, U>,
                   LabelSums<T, U>{run.labels, run.gradients, run.active_x<T>(), p.depth, static_cast<U *>(out.data),
                                   out.stride, out.alpha},
                   static_cast<int>(for_many));
        });
    });
}

} // namespace lce
