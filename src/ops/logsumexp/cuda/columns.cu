/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of any layout: for calls that no other variant takes. Threads lie along the other
 * dimensions and walk down dim. A thread takes a pack of 16 bytes of adjacent columns if the layout
 * has them, else one column. If there are few columns, dim is split over blocks; the last block to
 * finish merges the statistics of all parts, in the order of the parts.
 */
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 256; /* per block */
constexpr int STEPS = 8;     /* loads down a column that a thread issues before it uses the first, in forward */

/* Statistics of a thread's N adjacent columns, one pack per step down dim. */
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

/* Merges load(first), load(first + step), ... up to number `count`. Eight are in flight at once, and do not wait for
 * each other's exponentials. */
template <typename F> DEVICE RowStats merge_every(int64_t first, int64_t count, int step, F load) {
    constexpr int AT_ONCE = 8;
    RowStats all = no_elements();
    for (int64_t i = first; i < count; i += AT_ONCE * step) {
        RowStats part[AT_ONCE];
        float max = all.max;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            part[k] = i + k * step < count ? load(i + k * step) : no_elements();
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            max = fmaxf(max, part[k].max);
        const float pivot = pivot_at(max);
        float sum = all.sum * expf(all.max - pivot);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            sum += part[k].sum * expf(part[k].max - pivot);
        all = {max, sum};
    }
    return all;
}

/* Blocks per multiprocessor, by registers. */
template <typename T, int N> constexpr int PER_SM = N == 1 ? 5 : sizeof(T) == 4 ? 4 : 3;

template <typename T, int N>
__global__ __launch_bounds__(THREADS, PER_SM<T, N>) void columns(const __grid_constant__ Forward f) {
    wait_for_inputs();
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
    /* [threadIdx.y][j][threadIdx.x]: adjacent threads write adjacent words. */
#pragma unroll
    for (int j = 0; j < N; j++)
        of_thread[(threadIdx.y * N + j) * blockDim.x + threadIdx.x] = {s.max[j], s.sum[j]};
    __syncthreads();

    const int width = N * blockDim.x, thread = threadIdx.y * blockDim.x + threadIdx.x;
    RowStats *stored = f.stored + task * f.parts * width;
    for (int c = thread; c < width; c += THREADS) {
        const RowStats all =
            merge_every(0, blockDim.y, 1, [&](int64_t y) { return of_thread[(y * N + c % N) * blockDim.x + c / N]; });
        if (f.parts > 1)
            stored[part * width + c] = all;
        else if (tile + c < f.rows)
            f.lse.put(tile + c, lse_of(all));
    }
    if (f.parts == 1 || !block_arrives_last(f.counters + task, static_cast<unsigned>(f.parts)))
        return;
    /* A column's parts are shared by all threads: width is a power of two up to THREADS. */
    const int c = thread & (width - 1), share = thread / width, shares = THREADS / width;
    of_thread[thread] =
        merge_every(share, f.parts, shares, [&](int64_t p) { return load_stats(stored + p * width + c); });
    __syncthreads();
    if (share == 0 && tile + c < f.rows)
        f.lse.put(tile + c, lse_of(merge_every(0, shares, 1, [&](int64_t k) { return of_thread[k * width + c]; })));
}

/* The gradient, of single elements: other variants write it, unless there are too many rows for them. */
template <typename T> __global__ __launch_bounds__(THREADS) void column_gradients(const __grid_constant__ Backward b) {
    wait_for_inputs();
    const int64_t tile = b.parts == 1 ? blockIdx.x : blockIdx.x / b.parts, part = blockIdx.x - tile * b.parts;
    const int64_t column = tile * blockDim.x + threadIdx.x;
    const int64_t from = part * b.part, to = b.n - from < b.part ? b.n : from + b.part;
    if (column >= b.rows)
        return;
    const T *const x = b.x.at<const T>(column);
    T *const dx = b.dx.at<T>(column);
    const ScaledExp<T> gradient = b.gradient<T>(column);
    for (int64_t i = from + threadIdx.y; i < to; i += blockDim.y)
        dx[i * b.dstep] = from_float<T>(gradient.of(to_float(x[i * b.step])));
}

/* Whether every step down dim has whole, aligned packs of 16 bytes along the innermost row
 * dimension. */
bool packed_columns(const rafter_view &x) {
    const int64_t width = 16 / rafter_dtype_bytes(x.dtype);
    const int last = x.ndim - 2;
    bool packed = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[last] == 1 && x.shape[last] % width == 0;
    for (int d = 0; d < x.ndim; d++)
        packed &= d == last || x.stride[d] % width == 0;
    return packed;
}

/* `split`, or fewer parts if these are faster: with many tiles, but fewer than two waves of blocks, a second wave that
 * is not full takes too long. By shape and dtype alone: the same bits everywhere. per_sm: blocks per multiprocessor.
 * turn: steps that a block loads at a time. */
Split in_full_waves(const Split &split, int64_t tiles, int64_t n, int per_sm, int64_t turn) {
    constexpr int64_t MULTIPROCESSORS = 132, MANY_TILES = 32;
    const int64_t wave = per_sm * MULTIPROCESSORS;
    Split best = split;
    int64_t least = INT64_MAX;
    for (int64_t parts = split.parts; tiles >= MANY_TILES && tiles * split.parts < 2 * wave && parts > 0; parts--) {
        const int64_t part = round_up(ceil_div(n, parts), int64_t(64)),
                      time = ceil_div(tiles * parts, wave) * (part + 2 * turn); /* in steps */
        if (time < least) {
            least = time;
            best = {parts, part};
        }
    }
    return best;
}

struct Columns {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        Split split;
        int width;     /* adjacent columns per thread */
        int across;    /* threads of a block along the columns; the others follow each other down dim */
        int64_t tiles; /* of width * across columns */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &) {
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->width = !p.backward && packed_columns(p.x) ? int(16 / rafter_dtype_bytes(p.x.dtype)) : 1;
        plan->across = power_at_least(p.rows / plan->width, 1, WARP);
        plan->tiles = ceil_div<int64_t>(p.rows, int64_t(plan->width) * plan->across);
        const int down = THREADS / plan->across;
        if (p.backward) {
            plan->split.part = 4 * IN_FLIGHT * down;
            plan->split.parts = ceil_div<int64_t>(p.n, plan->split.part);
            return 0;
        }
        plan->split = split_dim(plan->tiles, p.n, 4 * STEPS * down, call.algorithm);
        if (call.algorithm == RAFTER_LOGSUMEXP_AUTO)
            plan->split = in_full_waves(plan->split, plan->tiles, p.n,
                                        plan->width == 1          ? PER_SM<float, 1>
                                        : p.x.dtype == RAFTER_F32 ? PER_SM<float, 4>
                                                                  : PER_SM<bf16, 8>,
                                        int64_t(STEPS) * down);
        const int64_t columns = int64_t(plan->width) * plan->across;
        return plan->split.parts > 1
                   ? tasks_at_a_time(plan->tiles, plan->split) * plan->split.parts * columns * sizeof(RowStats)
                   : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        Launch how = {0, plan.across};
        how.threads_down = THREADS / plan.across;
        for_dtype(p.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (p.backward) {
                const Backward b = backward_of(call, p, plan.split);
                how.blocks = plan.tiles * plan.split.parts;
                return ::launch(context, how, column_gradients<T>, b);
            }
            launch_tasks(context, call, p, plan.split, plan.tiles, workspace, [&](const Forward &f, int64_t tiles) {
                how.blocks = tiles * plan.split.parts;
                ::launch(context, how, plan.width == 1 ? columns<T, 1> : columns<T, WIDE<T>>, f);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, columns, Columns)
