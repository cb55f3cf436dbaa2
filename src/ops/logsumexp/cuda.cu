/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp on CUDA: one pass over x in either direction.
 *
 *     rows of whole packs       a warp or a block to a row, short blocks in backward: kernels of few parameters
 *     dim the last (stride 1)   groups of lanes, or a block, to a row; long rows that are few are split over blocks
 *     any other                 threads along the other dimensions, walking down dim: "columns", eight to a thread
 * where they are neighbours in memory, else one
 *
 * Split rows and columns are merged by the last block to arrive, from scratch memory, in the order of the parts.
 */
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "ops/logsumexp/call.h"

namespace {

constexpr int THREADS = 256;          /* of a block, but for long rows */
constexpr int MOST_THREADS = 512;     /* of a block that takes one long row */
constexpr int GRADIENT_THREADS = 128; /* of a block that writes a gradient along rows */
constexpr int PACKED_THREADS = 64;    /* the same, where rows are whole packs */
constexpr int STEPS = 8;              /* down a column that a thread loads before it uses the first, in forward */

/* ---- how a call is cut ----------------------------------------------------------------------- */

/* By shape and alignment alone, never by the device: the same bits everywhere. */
struct Plan {
    bool columns;               /* else rows: dim has stride 1 */
    int lanes;                  /* rows: threads to a row (forward) or to a piece of a row (backward) */
    int width;                  /* columns: neighbouring ones to a thread */
    int across;                 /* columns: threads of a block along them; the others follow each other down dim */
    int64_t tasks, parts, part; /* rows or tiles of columns; parts that dim is cut into, and elements of each */

    /* Statistics that forward keeps in scratch memory when there are several parts. */
    int64_t per_tile() const {
        return columns ? int64_t(width) * across : 1;
    }
};

/* Enough blocks to fill any device several times over; where there are fewer tasks, each is cut. */
constexpr int64_t ENOUGH_BLOCKS = 1024;

void cut(Plan *plan, rafter_logsumexp_algorithm algorithm, int64_t n, int64_t least_part) {
    plan->parts = 1;
    if (algorithm != RAFTER_LOGSUMEXP_RECURRENCE && plan->tasks < ENOUGH_BLOCKS) {
        const int64_t enough = ceil_div<int64_t>(ENOUGH_BLOCKS, plan->tasks), most = n / least_part;
        plan->parts = enough < most ? enough : most > 1 ? most : 1;
    }
    if (algorithm == RAFTER_LOGSUMEXP_PARALLEL && plan->parts < 2)
        plan->parts = 2;
    plan->part = ceil_div<int64_t>(ceil_div<int64_t>(n, plan->parts), 64) * 64; /* keeps the alignment of the row */
}

/* Whether sixteen bytes at a time of the last row dimension are neighbours, in every row of every step. */
bool wide_columns(const rafter_view &x) {
    const int64_t width = 16 / rafter_dtype_bytes(x.dtype);
    const int last = x.ndim - 2;
    bool wide = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[last] == 1 && x.shape[last] % width == 0;
    for (int d = 0; d < x.ndim; d++)
        wide &= d == last || x.stride[d] % width == 0;
    return wide;
}

Plan plan_common(const rafter_view &x, const rafter_view *dx, int64_t rows) {
    Plan plan = {};
    const int dim = x.ndim - 1;
    const bool step = x.stride[dim] == 1 && (!dx || dx->stride[dim] == 1);
    plan.columns = !(x.shape[dim] > 1 && step && (!dx || packs_alike(x, *dx)));
    if (plan.columns) {
        plan.width = wide_columns(x) && (!dx || wide_columns(*dx)) ? int(16 / rafter_dtype_bytes(x.dtype)) : 1;
        plan.across = power_at_least(rows / plan.width, 1, WARP);
        plan.tasks = ceil_div<int64_t>(rows, int64_t(plan.width) * plan.across);
    } else {
        plan.tasks = rows;
    }
    return plan;
}

Plan plan_forward(const rafter_view &x, int64_t rows, rafter_logsumexp_algorithm algorithm) {
    Plan plan = plan_common(x, nullptr, rows);
    const int64_t n = x.shape[x.ndim - 1], bytes = n * rafter_dtype_bytes(x.dtype);
    if (plan.columns) {
        cut(&plan, algorithm, n, 4 * STEPS * (THREADS / plan.across));
        return plan;
    }
    cut(&plan, algorithm, n, 16384 / rafter_dtype_bytes(x.dtype));
    const bool warp_will_do = bytes <= 2048 || (bytes <= 8192 && rows >= 2048);
    if (plan.parts == 1 && warp_will_do)
        plan.lanes = bytes <= 256 ? 8 : WARP;
    else
        plan.lanes = power_at_least(plan.part * rafter_dtype_bytes(x.dtype) / (16 * IN_FLIGHT), 64, MOST_THREADS);
    return plan;
}

Plan plan_backward(const rafter_view &x, const rafter_view &dx, int64_t rows) {
    Plan plan = plan_common(x, &dx, rows);
    const int64_t n = x.shape[x.ndim - 1], bytes = n * rafter_dtype_bytes(x.dtype);
    if (plan.columns) {
        plan.part = 4 * IN_FLIGHT * (THREADS / plan.across);
        plan.parts = ceil_div<int64_t>(n, plan.part);
    } else { /* a part is what a group of lanes takes, in packs */
        plan.lanes = bytes <= 256 ? 8 : WARP;
        plan.part = plan.lanes * IN_FLIGHT;
        plan.parts = ceil_div<int64_t>(ceil_div<int64_t>(bytes, 16), plan.part);
    }
    return plan;
}

/* ---- forward --------------------------------------------------------------------------------- */

struct Forward {
    Rows x, lse;
    int64_t rows, n, step;      /* step: stride of dim in x */
    int64_t first, parts, part; /* this launch begins with task `first` */
    unsigned *counters;         /* one per task of this launch, where there are several parts */
    RowStats *stored;           /* and the parts' statistics, in the order of tasks, then parts */
};

/* The logarithm in double: next to a maximum of opposite sign its rounding would show. */
DEVICE float lse_of(RowStats s) {
    return static_cast<float>(pivot_at(s.max) + log(static_cast<double>(s.sum)));
}

template <typename T, int LANES>
__global__ __launch_bounds__(THREADS) void short_rows(const __grid_constant__ Forward f) {
    const int64_t row = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / LANES;
    const int64_t taken = row < f.rows ? row : f.rows - 1; /* all lanes stay for the shuffles */
    const Stretch<const T> stretch(f.x.at<const T>(taken), f.n);
    const RowStats s = merge_lanes<LANES>(stats_of(stretch, threadIdx.x % LANES, LANES, 1.0f), 1.0f);
    if (row < f.rows && threadIdx.x % LANES == 0)
        f.lse.put(row, lse_of(s));
}

template <typename T> __global__ __launch_bounds__(MOST_THREADS, 3) void long_rows(const __grid_constant__ Forward f) {
    const int64_t task = f.parts == 1 ? blockIdx.x : blockIdx.x / f.parts, part = blockIdx.x - task * f.parts;
    const int64_t row = f.first + task, from = part * f.part;
    const int64_t n = from >= f.n ? 0 : f.n - from < f.part ? f.n - from : f.part;
    const Stretch<const T> stretch(f.x.at<const T>(row) + (n > 0 ? from : 0), n);
    RowStats s = merge_block(stats_of(stretch, threadIdx.x, blockDim.x, 1.0f), 1.0f);
    if (f.parts > 1) {
        if (threadIdx.x == 0)
            f.stored[blockIdx.x] = s;
        if (!block_arrives_last(f.counters + task, static_cast<unsigned>(f.parts)) || threadIdx.x >= WARP)
            return;
        s = no_elements();
        for (int64_t i = threadIdx.x; i < f.parts; i += WARP)
            s = merge(s, load_stats(f.stored + task * f.parts + i), 1.0f);
        s = merge_lanes<WARP>(s, 1.0f);
    }
    if (threadIdx.x == 0)
        f.lse.put(row, lse_of(s));
}

/* ---- rows of whole packs --------------------------------------------------------------------- */

/* All that a call takes whose rows are neither split nor ragged, and whose numbers are neighbours. Little on purpose:
 * parameters and instructions are cold when a kernel starts. */
struct Packed {
    const char *x;
    char *dx;
    int64_t step, dstep; /* between rows, in bytes */
    void *lse;
    const void *dlse;
    rafter_dtype lse_dtype, dlse_dtype;
    int rows, packs; /* packs: of a row */
    Divisor parts;   /* backward: blocks to a row */

    template <typename T> DEVICE const T *row(int i) const {
        return reinterpret_cast<const T *>(x + i * step);
    }
};

/* A warp to a row of up to 32 * IN_FLIGHT packs. */
template <typename T>
__global__ __launch_bounds__(GRADIENT_THREADS) void packed_short_rows(const __grid_constant__ Packed p) {
    const int row = blockIdx.x * (GRADIENT_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= p.rows)
        return;
    Pack<T, WIDE<T>> packs[IN_FLIGHT];
    load_packs(packs, p.row<T>(row), p.packs, lane, WARP);
    RowStats s = no_elements();
    add_packs(s, packs, 1.0f);
    s = merge_lanes<WARP>(s, 1.0f);
    if (lane == 0)
        store_number(p.lse, p.lse_dtype, row, lse_of(s));
}

/* A block to a row, of which a thread loads COUNT packs at a time. */
template <typename T, int COUNT>
__global__ __launch_bounds__(MOST_THREADS, 3) void packed_rows(const __grid_constant__ Packed p) {
    const T *const x = p.row<T>(blockIdx.x);
    Pack<T, WIDE<T>> packs[COUNT];
    load_packs(packs, x, p.packs, threadIdx.x, blockDim.x);
    const RowStats s = merge_block(stats_of_packs(packs, x, p.packs, threadIdx.x, blockDim.x), 1.0f);
    if (threadIdx.x == 0)
        store_number(p.lse, p.lse_dtype, blockIdx.x, lse_of(s));
}

/* dlse * e^(x - lse) of one row. A row of all -inf gets zeros. */
template <typename T> DEVICE ScaledExp<T> gradient_of_row(float lse, float dlse) {
    return lse == -INFINITY ? ScaledExp<T>(0.0f, INFINITY, 1.0f) : ScaledExp<T>(dlse, lse, 1.0f);
}

/* A block to a part of a row. */
template <typename T, int COUNT>
__global__ __launch_bounds__(PACKED_THREADS,
                             1024 / PACKED_THREADS) void packed_gradients(const __grid_constant__ Packed p) {
    constexpr int N = WIDE<T>;
    const int row = static_cast<int>(p.parts.quotient(blockIdx.x)), part = blockIdx.x - row * p.parts.number;
    const int first = part * (PACKED_THREADS * COUNT) + threadIdx.x;
    const T *const x = p.row<T>(row);
    T *const dx = reinterpret_cast<T *>(p.dx + row * p.dstep);
    Pack<T, N> packs[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * PACKED_THREADS < p.packs)
            packs[k] = load_once<T, N>(x + (first + k * PACKED_THREADS) * N);
    loads_so_far_first();
    const ScaledExp<T> gradient =
        gradient_of_row<T>(load_number(p.lse, p.lse_dtype, row), load_number(p.dlse, p.dlse_dtype, row));
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * PACKED_THREADS < p.packs)
            store_once<T, N>(dx + (first + k * PACKED_THREADS) * N, gradient.of(packs[k]));
}

/* Whether the kernels above serve; they are launched then. dx, dlse: NULL in forward. */
template <typename T>
bool launch_packed(const Rows &x, const Rows *dx, const Rows &lse, const Rows *dlse, int64_t rows, int64_t n,
                   cudaStream_t stream) {
    if (rows > INT32_MAX || n > 1 << 30 || !x.in_packs(n) || !lse.in_line() ||
        (dx && (!dx->in_packs(n) || !dlse->in_line())))
        return false;
    const int element = sizeof(T), packs = static_cast<int>(n / WIDE<T>);
    Packed p = {x.data,    nullptr,   x.step * element,       0,     lse.data, nullptr,
                lse.dtype, lse.dtype, static_cast<int>(rows), packs, Divisor()};
    if (!dx) {
        if (packs <= WARP * IN_FLIGHT)
            packed_short_rows<T>
                <<<grid_of(ceil_div<int64_t>(rows, GRADIENT_THREADS / WARP)), GRADIENT_THREADS, 0, stream>>>(p);
        else if (packs <= 2 * 128)
            packed_rows<T, 2><<<grid_of(rows), 128, 0, stream>>>(p);
        else
            packed_rows<T, 4><<<grid_of(rows), power_at_least(packs / 4, 128, MOST_THREADS), 0, stream>>>(p);
        return true;
    }
    const int64_t parts = ceil_div(packs, PACKED_THREADS * (packs <= 2 * PACKED_THREADS ? 2 : 4));
    if (rows * parts > INT32_MAX)
        return false;
    p.dx = dx->data;
    p.dstep = dx->step * element;
    p.dlse = dlse->data;
    p.dlse_dtype = dlse->dtype;
    p.parts = Divisor(parts);
    if (packs <= 2 * PACKED_THREADS)
        packed_gradients<T, 2><<<grid_of(rows * parts), PACKED_THREADS, 0, stream>>>(p);
    else
        packed_gradients<T, 4><<<grid_of(rows * parts), PACKED_THREADS, 0, stream>>>(p);
    return true;
}

/* ---- columns, forward ------------------------------------------------------------------------ */

/* A thread's N columns: those of one pack in every step. */
template <typename T, int N> struct ColumnStats {
    float max[N], sum[N];

    template <int COUNT> DEVICE void add(const Pack<T, N> (&packs)[COUNT]) {
        float x[COUNT][N], top[N];
        unpack(max_of_each(packs), top);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            unpack(packs[k], x[k]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float before = max[j];
            max[j] = fmaxf(before, top[j]);
            const float pivot = pivot_at(max[j]);
            sum[j] *= exp_term<T>(before - pivot, 1.0f);
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                sum[j] += exp_term<T>(x[k][j] - pivot, 1.0f);
        }
    }
};

template <typename T, int N> __global__ __launch_bounds__(THREADS) void columns(const __grid_constant__ Forward f) {
    __shared__ RowStats of_thread[THREADS * N];
    const int64_t task = f.parts == 1 ? blockIdx.x : blockIdx.x / f.parts, part = blockIdx.x - task * f.parts;
    const int64_t tile = (f.first + task) * blockDim.x * N, column = tile + threadIdx.x * N;
    const int64_t from = part * f.part, to = f.n - from < f.part ? f.n : from + f.part;

    ColumnStats<T, N> s;
#pragma unroll
    for (int j = 0; j < N; j++)
        s.max[j] = -INFINITY, s.sum[j] = 0.0f;
    if (column < f.rows) {
        const T *x = f.x.at<const T>(column);
        for (int64_t i = from + threadIdx.y; i < to; i += STEPS * blockDim.y) {
            Pack<T, N> packs[STEPS];
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                packs[k] = load_once_if<T, N>(i + k * blockDim.y < to, x + (i + k * blockDim.y) * f.step, -INFINITY);
            s.add(packs);
        }
    }
    /* Neighbouring threads write neighbouring words: [threadIdx.y][j][threadIdx.x]. */
#pragma unroll
    for (int j = 0; j < N; j++)
        of_thread[(threadIdx.y * N + j) * blockDim.x + threadIdx.x] = {s.max[j], s.sum[j]};
    __syncthreads();

    const int width = N * blockDim.x, thread = threadIdx.y * blockDim.x + threadIdx.x;
    RowStats *stored = f.stored + task * f.parts * width;
    for (int c = thread; c < width; c += THREADS) {
        RowStats all = no_elements();
        for (int y = 0; y < blockDim.y; y++)
            all = merge(all, of_thread[(y * N + c % N) * blockDim.x + c / N], 1.0f);
        if (f.parts > 1)
            stored[part * width + c] = all;
        else if (tile + c < f.rows)
            f.lse.put(tile + c, lse_of(all));
    }
    if (f.parts == 1 || !block_arrives_last(f.counters + task, static_cast<unsigned>(f.parts)))
        return;
    for (int c = thread; c < width && tile + c < f.rows; c += THREADS) {
        RowStats all = no_elements();
        for (int64_t p = 0; p < f.parts; p++)
            all = merge(all, load_stats(stored + p * width + c), 1.0f);
        f.lse.put(tile + c, lse_of(all));
    }
}

template <typename T> void launch_forward(const Plan &plan, const Forward &f, int64_t tasks, cudaStream_t stream) {
    const unsigned grid = grid_of(tasks * plan.parts);
    if (plan.columns) {
        const dim3 threads(plan.across, THREADS / plan.across);
        if (plan.width == 1)
            columns<T, 1><<<grid, threads, 0, stream>>>(f);
        else
            columns<T, WIDE<T>><<<grid, threads, 0, stream>>>(f);
    } else if (plan.lanes == 8) {
        short_rows<T, 8><<<grid_of(ceil_div<int64_t>(tasks, THREADS / 8)), THREADS, 0, stream>>>(f);
    } else if (plan.lanes == WARP) {
        short_rows<T, WARP><<<grid_of(ceil_div<int64_t>(tasks, THREADS / WARP)), THREADS, 0, stream>>>(f);
    } else {
        long_rows<T><<<grid, plan.lanes, 0, stream>>>(f);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

struct Backward {
    Rows x, dx, lse, dlse;
    int64_t rows, n, step, dstep;
    int64_t parts, part;
    Divisor of_row; /* parts */

    template <typename T> DEVICE ScaledExp<T> gradient(int64_t row) const {
        return gradient_of_row<T>(lse.get(row), dlse.get(row));
    }
};

/* Short blocks, whose packs are on their way before anything else is known of the row: kindest to the memory. */
template <typename T, int LANES>
__global__ __launch_bounds__(GRADIENT_THREADS) void row_gradients(const __grid_constant__ Backward b) {
    constexpr int N = WIDE<T>;
    const int64_t piece = (blockIdx.x * int64_t(GRADIENT_THREADS) + threadIdx.x) / LANES;
    /* Where rows have several, a piece is 2 KB: there are less than 2^31 of them. */
    const int64_t row = b.parts == 1 ? piece : b.of_row.quotient(static_cast<unsigned>(piece));
    if (row >= b.rows)
        return;
    const int lane = threadIdx.x % LANES;
    const Stretch<const T> x(b.x.at<const T>(row), b.n);
    T *dx = b.dx.at<T>(row) + x.head;
    const int64_t first = (piece - row * b.parts) * (LANES * IN_FLIGHT) + lane;
    Pack<T, N> packs[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (first + k * LANES < x.packs)
            packs[k] = load_once<T, N>(x.body + (first + k * LANES) * N);
    const ScaledExp<T> gradient = b.gradient<T>(row);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (first + k * LANES < x.packs)
            store_once<T, N>(dx + (first + k * LANES) * N, gradient.of(packs[k]));
    if (piece == row * b.parts)
        for (int e = lane; e < x.edges; e += LANES)
            dx[x.edge(e)] = from_float<T>(gradient.of(to_float(x.body[x.edge(e)])));
}

template <typename T, int N>
__global__ __launch_bounds__(THREADS) void column_gradients(const __grid_constant__ Backward b) {
    const int64_t tile = b.parts == 1 ? blockIdx.x : blockIdx.x / b.parts, part = blockIdx.x - tile * b.parts;
    const int64_t column = (tile * blockDim.x + threadIdx.x) * N;
    const int64_t from = part * b.part, to = b.n - from < b.part ? b.n : from + b.part;
    if (column >= b.rows)
        return;
    const T *x = b.x.at<const T>(column);
    T *dx = b.dx.at<T>(column);
    ScaledExp<T> gradient[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        gradient[j] = b.gradient<T>(column + j);
    for (int64_t i = from + threadIdx.y; i < to; i += IN_FLIGHT * blockDim.y) {
        Pack<T, N> packs[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * blockDim.y < to)
                packs[k] = load_once<T, N>(x + (i + k * blockDim.y) * b.step);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * blockDim.y < to) {
                float y[N];
                unpack(packs[k], y);
#pragma unroll
                for (int j = 0; j < N; j++)
                    y[j] = gradient[j].of(y[j]);
                store_once<T, N>(dx + (i + k * blockDim.y) * b.dstep, packed<T>(y));
            }
    }
}

template <typename T> void launch_backward(const Plan &plan, const Backward &b, cudaStream_t stream) {
    const int64_t pieces = plan.tasks * plan.parts;
    if (plan.columns) {
        const dim3 threads(plan.across, THREADS / plan.across);
        if (plan.width == 1)
            column_gradients<T, 1><<<grid_of(pieces), threads, 0, stream>>>(b);
        else
            column_gradients<T, WIDE<T>><<<grid_of(pieces), threads, 0, stream>>>(b);
    } else if (plan.lanes == 8) {
        const unsigned grid = grid_of(ceil_div<int64_t>(pieces, GRADIENT_THREADS / 8));
        row_gradients<T, 8><<<grid, GRADIENT_THREADS, 0, stream>>>(b);
    } else {
        const unsigned grid = grid_of(ceil_div<int64_t>(pieces, GRADIENT_THREADS / WARP));
        row_gradients<T, WARP><<<grid, GRADIENT_THREADS, 0, stream>>>(b);
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* dim last, the others in order. */
rafter_view dim_last(const rafter_view &view, int dim) {
    rafter_view out = view;
    for (int d = dim; d + 1 < view.ndim; d++) {
        out.shape[d] = view.shape[d + 1];
        out.stride[d] = view.stride[d + 1];
    }
    out.shape[view.ndim - 1] = view.shape[dim];
    out.stride[view.ndim - 1] = view.stride[dim];
    return out;
}

rafter_status forward(rafter_context *context, const logsumexp_call *call, const rafter_view &x, int64_t rows) {
    const int dims = call->x.ndim - 1;
    const rafter_view lse = dim_last(call->lse, call->dim);
    const Plan plan = plan_forward(x, rows, call->algorithm);
    /* Only a call that is told to split more tasks than there are counters takes several launches. */
    const int64_t counters = RAFTER_CUDA_COUNTERS,
                  most = plan.parts > 1 && plan.tasks > counters ? counters : plan.tasks;

    const int64_t stored = plan.parts > 1 ? most * plan.parts * plan.per_tile() : 0;
    Forward f = {};
    f.x = rows_of(x, x.ndim - 1);
    f.lse = rows_of(lse, dims);
    f.rows = rows;
    f.n = x.shape[x.ndim - 1];
    f.step = x.stride[x.ndim - 1];
    f.parts = plan.parts;
    f.part = plan.part;
    f.counters = context->cuda_state->counters;
    return run_with_scratch(context, call, stored * sizeof(RowStats), "logsumexp forward", [&](char *scratch) {
        f.stored = reinterpret_cast<RowStats *>(scratch);
        for (f.first = 0; f.first < plan.tasks; f.first += most) {
            const int64_t tasks = plan.tasks - f.first < most ? plan.tasks - f.first : most;
            for_dtype(x.dtype, [&](auto zero) {
                typedef decltype(zero) T;
                if (plan.columns || plan.parts > 1 ||
                    !launch_packed<T>(f.x, nullptr, f.lse, nullptr, rows, f.n, context->cuda_state->stream))
                    launch_forward<T>(plan, f, tasks, context->cuda_state->stream);
            });
        }
    });
}

rafter_status backward(rafter_context *context, const logsumexp_call *call, const rafter_view &x, const rafter_view &dx,
                       int64_t rows) {
    const int dims = call->x.ndim - 1;
    const Plan plan = plan_backward(x, dx, rows);
    Backward b = {};
    b.x = rows_of(x, x.ndim - 1);
    b.dx = rows_of(dx, dx.ndim - 1);
    b.lse = rows_of(dim_last(call->lse, call->dim), dims);
    b.dlse = rows_of(dim_last(call->dlse, call->dim), dims);
    b.rows = rows;
    b.n = x.shape[x.ndim - 1];
    b.step = x.stride[x.ndim - 1];
    b.dstep = dx.stride[dx.ndim - 1];
    b.parts = plan.parts;
    b.part = plan.part;
    b.of_row = Divisor(plan.parts);
    return run_with_scratch(context, call, 0, "logsumexp backward", [&](char *) {
        for_dtype(x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.columns || !launch_packed<T>(b.x, &b.dx, b.lse, &b.dlse, rows, b.n, context->cuda_state->stream))
                launch_backward<T>(plan, b, context->cuda_state->stream);
        });
    });
}

} // namespace

extern "C" rafter_status rafter_cuda_logsumexp(rafter_context *context, const struct logsumexp_call *call) {
    OnDevice current(context);
    const int dims = call->x.ndim - 1;
    rafter_view x = dim_last(call->x, call->dim), dx = call->dx;
    const int64_t rows = rafter_extent(&x, 0, dims);
    const bool is_backward = call->direction == RAFTER_BACKWARD;
    if (rows == 0 || (is_backward && x.numel == 0))
        return RAFTER_OK;
    if (!is_backward) {
        rafter_view *one[] = {&x};
        rafter_collapse(one, 1, 0, dims);
        return forward(context, call, x, rows);
    }
    dx = dim_last(dx, call->dim);
    rafter_view *both[] = {&x, &dx};
    rafter_collapse(both, 2, 0, dims);
    return backward(context, call, x, dx, rows);
}
