/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a short dimension of [outer, length, columns]. A thread takes a few adjacent
 * columns, as wide as alignment allows, and every `down`-th step of the length, all in registers.
 * Every byte is read once and written once. Steps may lie any distance apart.
 *
 * A thread writes only what it has read itself: the output may be the input.
 */
#include "cuda/line_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int WIDE_THREADS = 256, NARROW_THREADS = 1024;        /* per block, at most: packs of 16 bytes; less */
template <int BYTES> constexpr int STEPS = BYTES < 16 ? 16 : 8; /* per thread, at most, of packs of BYTES */
constexpr int LEAST_BYTES = 64;                                 /* of adjacent columns */

struct ColumnPlan {
    Walk outer;
    Divisor packs;           /* side by side */
    int64_t columns;         /* packs of all outer indices */
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

template <typename T, int N, bool FORWARD>
__global__ void __launch_bounds__(N == WIDE<T> ? WIDE_THREADS : NARROW_THREADS, N == WIDE<T> ? FORWARD ? 4 : 2 : 1)
    softmax_short_column(const __grid_constant__ ColumnArgs<T> a) {
    extern __shared__ uint4 column_memory[];
    constexpr int COUNT = STEPS<N * sizeof(T)>;
    const ColumnPlan &plan = a.plan;
    const int down = 1 << plan.down_log2, across = plan.threads >> plan.down_log2;
    const int place = threadIdx.x & (across - 1), row = (int)threadIdx.x / across;
    const unsigned column = blockIdx.x * across + place, outside = plan.packs.quotient(column);
    const int64_t pack = column - outside * plan.packs.number;
    const int length = column < plan.columns ? plan.length : 0;
    int64_t at[3];
    plan.outer.offsets(outside, at);
    const T *const in = a.in + at[IN] + pack * N + row * plan.stride[IN];
    const T *const dy = a.dy + at[DY] + (FORWARD || plan.expanded ? 0 : pack * N + row * plan.stride[DY]);
    T *const out = a.out + at[OUT] + pack * N + row * plan.stride[OUT];

    wait_for_previous_kernel();
    Pack<T, N> x[COUNT], d[FORWARD ? 1 : COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k < plan.steps) {
            const bool has = row + k * down < length;
            x[k] = load_once_if<T, N>(has, in + k * down * plan.stride[IN], FORWARD ? -INFINITY : 0.0f);
            if constexpr (!FORWARD)
                if (!plan.expanded)
                    d[k] = load_once_if<T, N>(has, dy + k * down * plan.stride[DY], 0.0f);
        }
    if constexpr (!FORWARD)
        if (plan.expanded) {
            const Pack<T, N> all = all_of<T, N>(to_float(*dy));
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                d[k] = all;
        }

    Statistics<N, FORWARD, 1> mine;
    mine.clear();
    if constexpr (FORWARD) {
        Pack<T, N> top = x[0];
#pragma unroll
        for (int k = 1; k < COUNT; k++)
            if (k < plan.steps)
                top = max_of(top, x[k]);
        cover<true, N>(mine, 0, top);
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++)
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
    for (int k = 0; k < COUNT; k++)
        if (k < plan.steps) {
            float v[N], w[N];
            unpack(x[k], v);
            if constexpr (!FORWARD)
                unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = FORWARD ? exp_as<T>(v[j] - mine.max[j]) * scale[j] : v[j] * (w[j] - mine.sum[0][j]);
            if (row + k * down < length)
                store_once(out + k * down * plan.stride[OUT], packed<T, N>(v));
        }
}

struct ShortColumns {
    typedef act_call Call;
    struct Plan {
        int width; /* elements per pack */
        ColumnPlan columns;
    };

    /* Threads per block and log2 of those per column. False if the dimension is too long. */
    static bool cut(int64_t length, int width, int bytes, ColumnPlan *plan) {
        const bool wide = width * bytes == 16;
        plan->threads = WIDE_THREADS;
        plan->down_log2 = 0;
        while (length > int64_t(wide ? STEPS<16> : STEPS<1>) << plan->down_log2 && plan->down_log2 < 10)
            plan->down_log2++;
        const int least = 2 * LEAST_BYTES << plan->down_log2; /* so that a block is twice LEAST_BYTES wide */
        while (!wide && plan->threads < NARROW_THREADS && plan->threads * width * bytes < least)
            plan->threads *= 2;
        return plan->threads * width * bytes >= (wide ? least : least / 2);
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
        const int width = views.column_width();
        const int64_t bytes = rafter_dtype_bytes(call.out.dtype);
        if (views.inner() * bytes < LEAST_BYTES)
            return "there are less than 64 bytes of adjacent columns";
        ColumnPlan plan;
        if (!cut(views.length(), width, static_cast<int>(bytes), &plan))
            return "the dimension is too long for the registers of a block";
        if (views.inner() / width * views.slabs() > INT32_MAX / 2)
            return "it counts columns in 30 bits";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        plan->width = views.column_width();
        ColumnPlan &columns = plan->columns;
        columns.length = static_cast<int>(views.length());
        columns.packs = Divisor(views.inner() / plan->width);
        columns.columns = views.inner() / plan->width * views.slabs();
        cut(columns.length, plan->width, static_cast<int>(rafter_dtype_bytes(call.out.dtype)), &columns);
        columns.steps = ceil_div(columns.length, 1 << columns.down_log2);
        columns.outer = walk_over(views.pointer, 0, views.dim());
        for (int t = 0; t < TENSORS; t++)
            columns.stride[t] = views.pointer[t] ? views.view[t].stride[views.dim()] : 0;
        columns.expanded = !is_forward(call) && views.is_expanded(DY);
        return 0;
    }

    template <typename T, int N>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const ColumnPlan &plan) {
        const Call &call = ordered.call;
        const ColumnArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                    reinterpret_cast<const T *>(call.dy.data), reinterpret_cast<T *>(call.out.data),
                                    plan};
        const int across = plan.threads >> plan.down_log2;
        Launch how = {ceil_div(plan.columns, int64_t(across)), plan.threads};
        how.overlaps = ordered.copied;
        if (plan.down_log2 > 0)
            how.shared = (plan.threads + across) * N * sizeof(float2);
        ::launch(context, how, is_forward(call) ? softmax_short_column<T, N, true> : softmax_short_column<T, N, false>,
                 args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.width == WIDE<T>)
                return launch_as<T, WIDE<T>>(context, ordered, plan.columns);
            if constexpr (sizeof(T) == 2)
                if (plan.width == 2)
                    return launch_as<T, 2>(context, ordered, plan.columns);
            launch_as<T, 1>(context, ordered, plan.columns);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_short_columns, ShortColumns)
