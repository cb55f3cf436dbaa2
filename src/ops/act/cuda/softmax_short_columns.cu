/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a short dimension of [outer, length, columns]. A thread takes a few columns and every `down`-th
 * step of the length, all in registers: adjacent columns, as packs of 16 bytes, if alignment allows that, or else
 * ACCESSES groups of 1 or 2 elements, such that the threads of a block take adjacent ones. Every byte is read once and
 * written once. Steps may lie any distance apart.
 *
 * A thread writes only what it has read itself: the output may be the input.
 */
#include "cuda/line_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int WIDE_THREADS = 256, NARROW_THREADS = 512; /* per block, at most: packs of 16 bytes; groups */
constexpr int STEPS = 8;                                /* per thread, at most */
constexpr int ACCESSES = 4;                             /* groups of a step */
constexpr int LEAST_BYTES = 64;                         /* of adjacent columns */

struct ColumnPlan {
    Walk outer;
    int64_t slabs, inner;    /* outer indices, and columns of each */
    Divisor tiles;           /* of an outer index: its packs; or what the threads of a block take of it at once */
    int across_log2;         /* groups: threads side by side in an outer index */
    int64_t stride[TENSORS]; /* between steps */
    int length, steps;       /* steps: per thread, at most */
    int threads, down_log2;  /* per block; threads per column */
    bool expanded;           /* dy is one number per outer index */
};

template <typename T> struct ColumnArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    ColumnPlan plan;
};

/* Merges the statistics of the threads of each column. */
template <bool FORWARD, int N>
DEVICE void merge_down(Statistics<N, FORWARD, 1> &mine, int across, int down, int place, float2 *shared) {
    const int columns = across * N;
    float2 *const totals = shared + blockDim.x * N;
    const int row = threadIdx.x / across; /* `across` is a power of two */
#pragma unroll
    for (int j = 0; j < N; j++)
        shared[row * columns + place * N + j] = make_float2(mine.max[j], mine.sum[0][j]);
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        Statistics<1, FORWARD, 1> all, one;
        all.clear();
        for (int i = 0; i < down; i++) {
            const float2 part = shared[i * columns + column];
            one.max[0] = part.x;
            one.sum[0][0] = part.y;
            all.add(0, one, 0);
        }
        totals[column] = make_float2(all.max[0], all.sum[0][0]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float2 all = totals[place * N + j];
        mine.max[j] = all.x;
        mine.sum[0][j] = all.y;
    }
}

/* A thread's columns: N / UNIT groups of UNIT adjacent elements, `apart` elements from each other. */
template <typename T, int N, int UNIT> struct ThreadColumns {
    int apart, valid; /* valid: groups that exist */

    DEVICE Pack<T, N> load(bool has, const T *from, float instead) const {
        Pack<T, N> pack;
#pragma unroll
        for (int g = 0; g < N / UNIT; g++) {
            const Pack<T, UNIT> group = load_once_if<T, UNIT>(has && g < valid, from + g * apart, instead);
#pragma unroll
            for (int j = 0; j < UNIT; j++)
                pack.v[g * UNIT + j] = group.v[j];
        }
        return pack;
    }
    DEVICE void store(bool has, T *to, const Pack<T, N> &pack) const {
#pragma unroll
        for (int g = 0; g < N / UNIT; g++) {
            Pack<T, UNIT> group;
#pragma unroll
            for (int j = 0; j < UNIT; j++)
                group.v[j] = pack.v[g * UNIT + j];
            if (has && g < valid)
                store_once<T, UNIT>(to + g * apart, group);
        }
    }
};

template <typename T, int N, int UNIT, bool FORWARD>
__global__ void __launch_bounds__(UNIT == N ? WIDE_THREADS : NARROW_THREADS, (FORWARD ? 1024 : 512) /
                                                                                 (UNIT == N ? WIDE_THREADS
                                                                                            : NARROW_THREADS))
    softmax_short_column(const __grid_constant__ ColumnArgs<T> a) {
    extern __shared__ uint4 column_memory[];
    const ColumnPlan &plan = a.plan;
    const int length = plan.length, down = 1 << plan.down_log2, across = plan.threads >> plan.down_log2;
    const int place = threadIdx.x & (across - 1), row = (int)threadIdx.x / across;
    unsigned outside;
    int64_t column;
    ThreadColumns<T, N, UNIT> columns = {0, 0};
    if constexpr (UNIT == N) {
        const unsigned pack = blockIdx.x * across + place;
        outside = plan.tiles.quotient(pack);
        column = int64_t(pack - outside * plan.tiles.number) * N;
        columns.valid = outside < plan.slabs;
    } else {
        const int beside = 1 << plan.across_log2;
        const unsigned tiles = plan.tiles.quotient(blockIdx.x);
        outside = tiles * (across >> plan.across_log2) + (place >> plan.across_log2);
        column = int64_t(blockIdx.x - tiles * plan.tiles.number) * (beside * N) + (place & (beside - 1)) * UNIT;
        columns.apart = beside * UNIT;
#pragma unroll
        for (int g = 0; g < N / UNIT; g++)
            columns.valid += outside < plan.slabs && column + g * columns.apart < plan.inner;
    }
    int64_t at[3];
    plan.outer.offsets(outside, at);
    const T *const in = a.in + at[IN] + column + row * plan.stride[IN];
    const T *const dy = a.dy + at[DY] + (FORWARD || plan.expanded ? 0 : column + row * plan.stride[DY]);
    T *const out = a.out + at[OUT] + column + row * plan.stride[OUT];

    wait_for_previous_kernel();
    Pack<T, N> x[STEPS], d[FORWARD ? 1 : STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < plan.steps) {
            const bool has = row + k * down < length;
            x[k] = columns.load(has, in + k * down * plan.stride[IN], FORWARD ? -INFINITY : 0.0f);
            if constexpr (!FORWARD)
                if (!plan.expanded)
                    d[k] = columns.load(has, dy + k * down * plan.stride[DY], 0.0f);
        }
    if constexpr (!FORWARD)
        if (plan.expanded) {
            const Pack<T, N> all = all_of<T, N>(columns.valid > 0 ? to_float(*dy) : 0.0f);
#pragma unroll
            for (int k = 0; k < STEPS; k++)
                d[k] = all;
        }

    Statistics<N, FORWARD, 1> mine;
    mine.clear();
    if constexpr (FORWARD) {
        Pack<T, N> top = x[0];
#pragma unroll
        for (int k = 1; k < STEPS; k++)
            if (k < plan.steps)
                top = max_of(top, x[k]);
        cover<true, N>(mine, 0, top);
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < plan.steps) {
            float v[N], w[N];
            unpack(x[k], v);
            if constexpr (!FORWARD)
                unpack(d[k], w);
            add_step<FORWARD>(mine, v, w);
        }
    if (down > 1)
        merge_down<FORWARD, N>(mine, across, down, place, reinterpret_cast<float2 *>(column_memory));

    float scale[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        scale[j] = 1.0f / mine.sum[0][j];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < plan.steps) {
            float v[N], w[N];
            unpack(x[k], v);
            if constexpr (!FORWARD)
                unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = FORWARD ? exp_as<T>(v[j] - mine.max[j]) * scale[j] : v[j] * (w[j] - mine.sum[0][j]);
            columns.store(row + k * down < length, out + k * down * plan.stride[OUT], packed<T, N>(v));
        }
}

struct ShortColumns {
    typedef act_call Call;
    struct Plan {
        int unit; /* adjacent elements of an access */
        ColumnPlan columns;
        int64_t blocks;
    };

    /* Elements of a step that a thread takes. */
    static int columns_of_thread(int unit, int bytes) {
        return unit * bytes == 16 ? unit : unit * ACCESSES;
    }
    /* Threads per block and log2 of those per column. False if the dimension is too long. */
    static bool cut(int64_t length, int64_t inner, int unit, int bytes, ColumnPlan *plan) {
        const bool wide = unit * bytes == 16;
        const int columns = columns_of_thread(unit, bytes), width = columns * bytes;
        plan->threads = WIDE_THREADS;
        plan->down_log2 = 0;
        while (length > int64_t(STEPS) << plan->down_log2 && plan->down_log2 < 10)
            plan->down_log2++;
        const int least = 2 * LEAST_BYTES << plan->down_log2; /* so that a block is twice LEAST_BYTES wide */
        while (!wide && plan->threads < NARROW_THREADS && plan->threads * width < least)
            plan->threads *= 2;
        plan->across_log2 = 0;
        while (plan->threads >> plan->down_log2 > 1 << plan->across_log2 && columns << plan->across_log2 < inner)
            plan->across_log2++;
        return plan->threads * width >= (wide ? least : least / 2);
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        const int column = views.dim() + 1;
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t] && views.view[t].stride[column] != 1 && !(t == DY && views.is_expanded(DY)))
                return "columns are not adjacent";
        const int unit = views.column_width(), bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype));
        if (views.inner() * bytes < LEAST_BYTES)
            return "there are less than 64 bytes of adjacent columns";
        ColumnPlan plan;
        if (!cut(views.length(), views.inner(), unit, bytes, &plan))
            return "the dimension is too long for the registers of a block";
        if (ceil_div(views.inner(), int64_t(columns_of_thread(unit, bytes))) * views.slabs() > INT32_MAX / 2)
            return "it counts a thread's columns in 30 bits";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype));
        plan->unit = views.column_width();
        ColumnPlan &columns = plan->columns;
        columns.length = static_cast<int>(views.length());
        columns.inner = views.inner();
        columns.slabs = views.slabs();
        cut(columns.length, columns.inner, plan->unit, bytes, &columns);
        const int64_t across = columns.threads >> columns.down_log2;
        if (plan->unit * bytes == 16) {
            columns.tiles = Divisor(columns.inner / plan->unit);
            plan->blocks = ceil_div(columns.tiles.number * columns.slabs, across);
        } else {
            columns.tiles = Divisor(
                ceil_div(columns.inner, int64_t(columns_of_thread(plan->unit, bytes)) << columns.across_log2));
            plan->blocks = columns.tiles.number * ceil_div(columns.slabs, across >> columns.across_log2);
        }
        columns.steps = ceil_div(columns.length, 1 << columns.down_log2);
        columns.outer = walk_over(views.pointer, 0, views.dim());
        for (int t = 0; t < TENSORS; t++)
            columns.stride[t] = views.pointer[t] ? views.view[t].stride[views.dim()] : 0;
        columns.expanded = !is_forward(call) && views.is_expanded(DY);
        return 0;
    }

    template <typename T, int N, int UNIT>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &planned) {
        const Call &call = ordered.call;
        const ColumnPlan &plan = planned.columns;
        const ColumnArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                    reinterpret_cast<const T *>(call.dy.data), reinterpret_cast<T *>(call.out.data),
                                    plan};
        const int across = plan.threads >> plan.down_log2;
        Launch how = {planned.blocks, plan.threads};
        how.overlaps = ordered.copied;
        if (plan.down_log2 > 0)
            how.shared = (plan.threads + across) * N * sizeof(float2);
        ::launch(
            context, how,
            is_forward(call) ? softmax_short_column<T, N, UNIT, true> : softmax_short_column<T, N, UNIT, false>, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.unit == WIDE<T>)
                return launch_as<T, WIDE<T>, WIDE<T>>(context, ordered, plan);
            if constexpr (sizeof(T) == 2)
                if (plan.unit == 2)
                    return launch_as<T, 2 * ACCESSES, 2>(context, ordered, plan);
            launch_as<T, ACCESSES, 1>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_short_columns, ShortColumns)
