/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels at the beginning and the end of every call: see call_steps.cuh. */
#include <type_traits>

#include "ops/linear_cross_entropy/cuda/call_steps.cuh"
#include "ops/linear_cross_entropy/cuda/finish_row.cuh"

namespace lce {

namespace {

constexpr int PREPARE_THREADS = 1024, ZERO_THREADS = 256;

/* ---- active rows ----------------------------------------------------------------------------- */

/* Copies a row of x, by a warp. Elements have 2 bytes, whatever their dtype. A row that is ignored
 * but not dropped becomes zeros: what x holds there must not be multiplied by the zeros of its
 * dz. */
DEVICE void copy_row(const CopyOfActive &copy, int64_t row, bool ignored, int64_t at) {
    constexpr int N = WIDE<uint16_t>, BATCH = 4;
    const int lane = threadIdx.x % WARP;
    const uint16_t *const from = copy.x.at<const uint16_t>(row);
    uint16_t *const destination = copy.to + at * copy.stride;
    const int whole = copy.wide ? copy.columns / N * N : 0;
    for (int first = lane * N; first < whole; first += BATCH * WARP * N) {
        Pack<uint16_t, N> packs[BATCH] = {};
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (!ignored && first + k * WARP * N < whole)
                packs[k] = load_once<uint16_t, N>(from + first + k * WARP * N);
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (first + k * WARP * N < whole)
                store_once<uint16_t, N>(destination + first + k * WARP * N, packs[k]);
    }
    for (int i = whole + lane; i < copy.columns; i += WARP)
        destination[i] = ignored ? uint16_t(0) : from[i * copy.step];
}

/* A row's class as ActiveRows::classes has it. */
DEVICE int column_of_class(const Loss &loss, int row_class) {
    if (row_class < 0 || !loss.shared)
        return row_class;
    return loss.has_class(row_class) ? static_cast<int>(loss.column_of(row_class)) : ELSEWHERE;
}

/* Writes ActiveRows' order and classes, and the copy of x, for this block's share of the rows. Each block
 * itself counts the active rows before its share. */
DEVICE void list_active_rows(const Loss &loss, bool drop_ignored, int blocks, int *order, int *classes,
                             const CopyOfActive &copy) {
    __shared__ int warp_totals[2][WARP]; /* active rows per warp; two sets, used alternately */
    static_assert(PREPARE_THREADS == WARP * WARP, "one lane per warp");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, rows = static_cast<int>(loss.rows);
    const int64_t share = ceil_div<int64_t>(rows, blocks), first = min(int64_t(rows), blockIdx.x * share),
                  end = min(int64_t(rows), first + share);
    const auto load = [&](int64_t row) { return row < end ? loss.load_label(row) : loss.ignore_index; };
    int64_t label = load(first + threadIdx.x);
    int active = static_cast<int>(first), all = rows;
    if (drop_ignored) {
        int before = 0, behind = 0;
        for_counted_rows(loss, threadIdx.x, copy.to ? rows : first, PREPARE_THREADS,
                         [&](int64_t row) { (row < first ? before : behind)++; });
        active = block_sum(before);
        all = active + block_sum(behind);
    }
    const int first_active = active;
    for (int64_t row = first + threadIdx.x, set = 0; row - threadIdx.x < end; row += PREPARE_THREADS, set ^= 1) {
        const int row_class = static_cast<int>(loss.class_of(label));
        label = load(row + PREPARE_THREADS);
        const unsigned bits = __ballot_sync(~0u, row < end && !(drop_ignored && row_class == IGNORED));
        if (lane == 0)
            warp_totals[set][warp] = __popc(bits);
        __syncthreads();
        const int lane_total = warp_totals[set][lane];
        const int k = active + warp_sum(lane < warp ? lane_total : 0) + __popc(bits & ((1u << lane) - 1));
        if (row < end) {
            const int at = bits >> lane & 1 ? k : rows - 1 - (static_cast<int>(row) - k);
            order[at] = static_cast<int>(row);
            classes[at] = column_of_class(loss, row_class);
        }
        active += warp_sum(lane_total);
    }
    if (!copy.to || (all == rows && copy.wide))
        return;
    __syncthreads(); /* order and classes are written */
    for (int64_t k = int64_t(first_active) + warp; k < active; k += WARP)
        copy_row(copy, order[k], classes[k] == IGNORED, rows - all + k);
}

/* ---- the first kernel ------------------------------------------------------------------------ */

/* With dentropy, the gradients of the loss and of the entropy share no factor but the logit scale. And if
 * rows have weights, a z-loss or an upstream gradient each, they have coefficients of their own, which may
 * be too large or too small for fp16. So all coefficients are divided by a power of two next to the
 * largest one, the unit: then dz, rounded to 16 bits, has the same size as in other calls. alpha contains
 * the unit. With Loss::row_units each row has its own unit, and the one here is 1. Called by a block;
 * every thread gets alpha, without row_scale. */
DEVICE double divide_upstream(Loss loss, Prepared *prepared) {
    __shared__ float warp_largest[WARP];
    const double common = common_upstream(loss, prepared->totals) / loss.scale;
    loss.prepared = prepared;
    float largest = 0.0f;
    for (int64_t row = threadIdx.x; row < loss.rows && !loss.row_units; row += PREPARE_THREADS) {
        if (loss.class_of(loss.load_label(row)) < 0)
            continue;
        largest = fmaxf(largest, largest_coefficient(loss, common, row, loss.class_of(loss.load_label(row))));
    }
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0)
        warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    largest = warp_max(warp_largest[threadIdx.x % WARP]);
    const double unit = unit_next_to(largest);
    prepared->loss_factor = common / unit;
    prepared->entropy_factor = 1.0 / unit;
    return unit * loss.scale;
}

/* The last block sums over rows and classes; the blocks before it, if there are any, list active
 * rows. `row_scale`: see Run. */
__global__ __launch_bounds__(PREPARE_THREADS) void prepare_call(const __grid_constant__ Loss loss, float row_scale,
                                                                bool drop_ignored, int *order, int *classes_in_order,
                                                                unsigned *counters, int counter_count,
                                                                const __grid_constant__ Labels labels,
                                                                const __grid_constant__ CopyOfActive copy,
                                                                Common *common) {
    wait_for_inputs();
    if (labels.of_row)
        labels.clear(loss.rows, loss.classes);
    const int last = static_cast<int>(gridDim.x) - 1;
    if (static_cast<int>(blockIdx.x) < last) {
        list_active_rows(loss, drop_ignored, last, order, classes_in_order, copy);
        return;
    }
    for (int i = threadIdx.x; i < counter_count; i += PREPARE_THREADS)
        counters[i] = 0;
    double classes = 0.0;
#pragma unroll 8
    for (int64_t v = threadIdx.x; v < loss.all_classes && loss.class_weight; v += PREPARE_THREADS)
        classes += loss.weight_of(v);
    classes = loss.class_weight ? block_sum(classes) : static_cast<double>(loss.all_classes);
    Prepared prepared = {classes, block_sum(count(loss, threadIdx.x, PREPARE_THREADS)), 0.0, 0.0};
    const double shared_factor =
        loss.divides_upstream ? divide_upstream(loss, &prepared) : common_upstream(loss, prepared.totals);
    if (threadIdx.x > 0)
        return;
    common->prepared = prepared;
    common->found_nonfinite = 0;
    common->finished = 0;
    common->active = static_cast<int>(drop_ignored ? static_cast<int64_t>(prepared.totals.counted) : loss.rows);
    /* Without rows all gradients are 0, whatever the mean's denominator is. */
    common->alpha = prepared.totals.counted == 0.0 ? 1.0f : static_cast<float>(shared_factor / row_scale);
}

__global__ void widen(const __grid_constant__ Rows from, int64_t n, float *to) {
    wait_for_inputs();
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
        to[i] = from.get(i);
}

template <typename T>
__global__ void pack(const __grid_constant__ Rows from, int64_t step, int64_t first, int64_t rows, int64_t columns,
                     const __grid_constant__ Loss loss, bool is_x, T *to, int64_t stride) {
    wait_for_inputs();
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / columns, column = i - row * columns;
        const bool ignored = is_x && loss.class_of(loss.load_label(first + row)) == IGNORED;
        to[row * stride + column] = ignored ? from_float<T>(0.0f) : from.at<const T>(first + row)[column * step];
    }
}

/* ---- the end of rows, and of the call -------------------------------------------------------- */

/* A thread per row. */
__global__ __launch_bounds__(ROW_THREADS) void finish_each_row(const __grid_constant__ Loss loss, const int *order,
                                                               int64_t first, int64_t rows,
                                                               const LossStats<FULL> *stats, int parts,
                                                               double row_scale, RowGradient *gradients,
                                                               Totals *block_totals) {
    wait_for_inputs();
    const int64_t index = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    Totals totals = {};
    if (index < rows) {
        LossStats<FULL> g = no_columns<FULL>();
        for (int part = 0; stats && part < parts; part++)
            g = part == 0 ? stats[index * parts] : merge(g, stats[index * parts + part], loss.scale);
        const int64_t row = order ? order[first + index] : first + index;
        const RowGradient gradient = finish_row(loss, row, loss.class_of(loss.load_label(row)), stats ? &g : NULL,
                                                row_scale, gradients, &totals);
        if (gradients)
            gradients[first + index] = gradient;
    }
    add_block_totals(totals, block_totals + blockIdx.x);
}

/* Zeros dx of the rows that are not active. Called by all blocks. */
template <typename U> DEVICE void zero_inactive(const ActiveRows &active, int64_t columns, U *dx, int64_t stride) {
    for (int64_t k = *active.count + int64_t(blockIdx.x); k < active.all; k += gridDim.x)
        for_elements<WIDE<U>>(columns, [&](int64_t i, auto n) {
            store_once<U, n.value>(dx + active.order[k] * stride + i, Pack<U, n.value>{});
        });
}

/* The first block writes the loss, if block_totals is given. All blocks zero dx of the rows that are not
 * active, if it is given. */
template <typename U>
__global__ __launch_bounds__(PREPARE_THREADS) void finish(const __grid_constant__ Loss loss, const Totals *block_totals,
                                                          int64_t blocks, const __grid_constant__ ActiveRows active,
                                                          int64_t columns, U *dx, int64_t stride) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && block_totals)
        write_loss_of_blocks(loss, block_totals, blocks);
    if (dx)
        zero_inactive(active, columns, dx, stride);
}

template <typename U>
__global__ __launch_bounds__(ZERO_THREADS) void zero_inactive_kernel(const __grid_constant__ ActiveRows active,
                                                                     int64_t columns, U *dx, int64_t stride) {
    wait_for_previous_kernel();
    zero_inactive(active, columns, dx, stride);
}

/* ---- gradients from fp32 sums ---------------------------------------------------------------- */

/* A gradient in the caller's memory. */
struct Out {
    Rows rows;
    int64_t step; /* between columns */
    bool add;     /* to what is there */
};

template <typename T> DEVICE void put(T *to, float value, bool add) {
    *to = from_float<T>(add ? value + to_float(*to) : value);
}

template <typename T>
__global__ void store(const __grid_constant__ Out out, int64_t first, int64_t rows, int64_t columns, const float *sums,
                      int64_t stride, const float *alpha) {
    wait_for_inputs();
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * columns;
         i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / columns, column = i - row * columns;
        const float value = sums ? *alpha * sums[row * stride + column] : 0.0f;
        put(out.rows.at<T>(first + row) + column * out.step, value, out.add);
    }
}

/* The same if rows have no gaps on either side and everything begins at multiples of 16 bytes. */
template <typename T>
__global__ __launch_bounds__(256) void store_wide(T *out, int64_t packs, const float *sums, const float *alpha) {
    wait_for_inputs();
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

/* See zero_ignored_dx. */
template <typename T>
__global__ void zero_ignored(const __grid_constant__ Loss loss, const float *alpha, const __grid_constant__ Out dx,
                             int64_t first, int64_t rows, int64_t columns) {
    wait_for_inputs();
    if (fabsf(*alpha) < INFINITY)
        return;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        if (loss.class_of(loss.load_label(first + row)) != IGNORED)
            continue;
        T *const to = dx.rows.at<T>(row);
        for (int64_t i = threadIdx.x; i < columns; i += blockDim.x)
            to[i * dx.step] = from_float<T>(0.0f);
    }
}

/* ---- host side ------------------------------------------------------------------------------- */

/* fp16 holds nothing below 2^-24, and at most 13 bits above 2^-14. So dz is scaled up to use fp16's
 * upper range. (Rows with larger coefficients than 1 are divided first: divide_upstream. With
 * dentropy, p |log p + entropy| is at most ln(V) / 4 or so.) */
float row_scale_of(const Problem &p) {
    return p.dtype == RAFTER_F16 ? 0x1p12f : 1.0f;
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

} // namespace

Run::Run(rafter_context *for_context, const linear_cross_entropy_call &for_call)
    : context(for_context), call(for_call), problem(for_call), loss(loss_of(*for_context->cuda_state, &for_call.loss)),
      row_scale(row_scale_of(problem)), common(NULL), block_totals(NULL), blocks(0), loss_is_written(false),
      gradients(NULL), row_units(NULL), bias(NULL), weight() {
    loss.divides_upstream = problem.divides_upstream;
}

void CommonBuffers::place(Layout *layout, const Problem &p, int64_t totals) {
    layout->place(&common, true, sizeof(Common));
    layout->place(&gradients, p.gradients(), p.rows * int64_t(sizeof(RowGradient)));
    layout->place(&block_totals, true, totals * int64_t(sizeof(Totals)));
    layout->place(&bias, true, p.classes * 4);
    layout->place(&weight, !p.weight.direct, p.classes * p.depth_stride() * p.bytes());
}

void CommonBuffers::use(Run *run, char *workspace) const {
    const Problem &p = run->problem;
    run->common = common.in(workspace);
    run->block_totals = block_totals.in(workspace);
    run->gradients = gradients.in(workspace);
    run->bias = run->call.bias.data ? bias.in(workspace) : NULL;
    run->weight = p.weight.direct ? Operand{run->call.weight.data, p.weight.stride, false}
                                  : Operand{weight.in(workspace), p.depth_stride(), false};
}

void prepare(Run *run, const ActiveRowsSetup &setup) {
    /* The least of a block that lists rows, which reads all labels, or all before its own. Blocks also clear
     * the list of rows by label, which has an element per class. */
    constexpr int LEAST_ROWS = 64, LEAST_CLASSES = 4096;
    const int64_t most = run->context->cuda_state->multiprocessors - 1;
    const int64_t for_rows = ceil_div<int64_t>(run->problem.rows, LEAST_ROWS),
                  for_classes = setup.labels.of_row ? ceil_div<int64_t>(run->problem.classes, LEAST_CLASSES) : 0;
    const int64_t blocks = setup.order ? min(max(for_rows, for_classes), most) : 0;
    launch(run->context, {1 + blocks, PREPARE_THREADS}, prepare_call, run->loss, run->row_scale, setup.drop_ignored,
           setup.order, setup.classes, setup.counters, setup.counter_count, setup.labels, setup.copy, run->common);
    run->loss.prepared = &run->common->prepared;
}

void begin_call(Run *run, const ActiveRowsSetup &setup, char *workspace, const CommonBuffers &buffers) {
    const Problem &p = run->problem;
    prepare(run, setup);
    if (run->bias)
        launch(run->context, thread_per_item(p.classes, 256), widen, rows_of(run->call.bias, 1), p.classes,
               buffers.bias.in(workspace));
    if (!p.weight.direct && p.depth > 0)
        pack_rows(*run, run->call.weight, 0, p.classes, buffers.weight.in(workspace));
}

void pack_rows(const Run &run, const rafter_view &view, int64_t first, int64_t rows, char *to) {
    const int last = view.ndim - 1;
    const Rows from = rows_of(view, last);
    const int64_t step = view.stride[last], columns = view.shape[last];
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, thread_per_item(rows * columns, 256), pack<T>, from, step, first, rows, columns, run.loss,
               &view == &run.call.x, reinterpret_cast<T *>(to), run.problem.depth_stride());
    });
}

void finish_rows(Run *run, const int *order, int64_t first, int64_t rows, const LossStats<FULL> *stats, int parts) {
    if (rows == 0)
        return;
    const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS);
    launch(run->context, {blocks, ROW_THREADS}, finish_each_row, run->loss, order, first, rows, stats, parts,
           static_cast<double>(run->row_scale), run->gradients, run->block_totals + run->blocks);
    run->blocks += blocks;
}

void store_rows(const Run &run, const rafter_view &view, const RowLayout &layout, bool add, int64_t first, int64_t rows,
                const float *sums, const float *alpha) {
    const int last = view.ndim - 1;
    const float *const factor = alpha ? alpha : run.alpha();
    const int64_t columns = view.shape[last], wide = 16 / rafter_dtype_bytes(view.dtype);
    const int64_t stride = run.problem.depth_stride();
    const Out out = {rows_of(view, last), columns > 1 ? view.stride[last] : 1, add};
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        if (sums && !add && layout.direct && layout.stride == columns && stride == columns && columns % wide == 0)
            launch(run.context, thread_per_item(rows * columns / wide, 256, INT64_MAX), store_wide<T>,
                   reinterpret_cast<T *>(view.data) + first * columns, rows * columns / wide, sums, factor);
        else
            launch(run.context, thread_per_item(rows * columns, 256), store<T>, out, first, rows, columns, sums, stride,
                   factor);
    });
}

void store_dbias(const Run &run, const float *sums) {
    store_rows(run, as_row(run.call.dbias), RowLayout{}, false, 0, 1, sums);
}

void zero_ignored_dx(const Run &run, int64_t first, int64_t rows) {
    /* In other calls alpha is finite: the logit scale over a number of rows. */
    const bool may_be_infinite = run.loss.reduction != RAFTER_NONE && !run.loss.dentropy.data &&
                                 (run.loss.dloss.data || run.loss.denominator || run.loss.class_weight);
    const rafter_view &view = run.call.dx;
    const int last = view.ndim - 1;
    const int64_t columns = view.shape[last], most = 4 * run.context->cuda_state->multiprocessors;
    if (!may_be_infinite)
        return;
    const Out out = {rows_of(view, last), columns > 1 ? view.stride[last] : 1, false};
    for_dtype(view.dtype, [&](auto zero) {
        launch(run.context, {min(rows, most), 128}, zero_ignored<decltype(zero)>, run.loss, run.alpha(), out, first,
               rows, columns);
    });
}

void zero_inactive_rows(const Run &run, const ActiveRows &active, float *dx) {
    const int64_t blocks = min(run.problem.rows, int64_t(run.context->cuda_state->multiprocessors));
    launch(run.context, Launch{blocks, ZERO_THREADS}, zero_inactive_kernel<float>, active, run.problem.depth, dx,
           run.problem.depth_stride());
}

void finish_call(const Run &run, const ActiveRows &active, bool zero_inactive_dx) {
    const rafter_view &dx = run.call.dx;
    const bool writes_loss = run.loss.forward && !run.loss_is_written;
    if (!zero_inactive_dx && !writes_loss)
        return;
    const int64_t most = 8 * run.context->cuda_state->multiprocessors;
    for_dtype(zero_inactive_dx ? dx.dtype : RAFTER_F32, [&](auto zero) {
        typedef decltype(zero) U;
        launch(run.context,
               zero_inactive_dx ? Launch{min(run.problem.rows, most), ZERO_THREADS} : Launch{1, PREPARE_THREADS},
               finish<U>, run.loss, writes_loss ? static_cast<const Totals *>(run.block_totals) : NULL, run.blocks,
               active, run.problem.depth, zero_inactive_dx ? reinterpret_cast<U *>(dx.data) : NULL,
               run.problem.dx_layout.stride);
    });
}

} // namespace lce
