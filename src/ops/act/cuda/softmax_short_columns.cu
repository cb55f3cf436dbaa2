/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a short dimension of [outer, length, columns]. A thread takes a few columns and every `down`-th
 * step of the length, all in registers: a pack of 16 bytes. If packs are not aligned, threads of large 16-bit tensors
 * shift them (pack_anywhere.cuh). Others take groups of 1 or 2 elements, such that adjacent threads take adjacent ones:
 * several groups in large tensors, so that enough loads are in flight. Every byte is read once and written once. Steps
 * may lie any distance apart.
 *
 * A thread writes only what it has read itself: the output may be the input.
 */
#include "cuda/line_statistics.cuh"
#include "cuda/pack_anywhere.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int LEAST_BYTES = 64; /* of adjacent columns */

/* What a thread takes at most, and the threads of a block. */
struct ThreadShare {
    int groups, steps, threads; /* groups: of columns */
};
constexpr ThreadShare WIDE_SHARE = {1, 8, 256};    /* groups are packs of 16 bytes */
constexpr ThreadShare SHIFTED_SHARE = {1, 4, 256}; /* packs that are not aligned; forward: twice as many steps */
constexpr ThreadShare TWO_SHARE = {1, 2, 256};     /* the same, of one or two steps */
constexpr ThreadShare PAIR_SHARE = {8, 2, 512};    /* large fp32 tensors of one or two steps */
constexpr ThreadShare LARGE_SHARE = {4, 8, 512};   /* large fp32 tensors */
constexpr ThreadShare LONG_SHARE = {1, 32, 256};   /* large fp32 tensors of few columns side by side */
constexpr ThreadShare SMALL_SHARE = {1, 16, 1024};
constexpr int64_t LARGE_ELEMENTS = 8 << 20;
constexpr int64_t LARGE_OF_TWO = 1 << 17; /* the same for shifted packs of one or two steps */
constexpr int64_t LEAST_SHIFTED = 64;     /* columns side by side: the last pack of them may have few */
constexpr int64_t LONGEST_LARGE = 256;    /* then 16 threads take adjacent elements */
constexpr int64_t MANY_COLUMNS = 512;     /* with fewer, the last ones of a block's columns are a large part */

struct ColumnPlan {
    Walk outer;
    int64_t slabs, inner;    /* outer indices, and columns of each */
    Divisor tiles;           /* of an outer index: its groups, if a thread takes one; or what a block takes at once */
    int across_log2;         /* several groups per thread: threads side by side in an outer index */
    int64_t stride[TENSORS]; /* between steps */
    int length, steps;       /* steps: per thread, at most */
    int threads, down_log2;  /* per block; threads per column */
    bool expanded;           /* dy is one number per outer index */
};

template <typename T> struct ColumnArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    ColumnPlan plan;
    const T *end[TENSORS]; /* of tensors whose packs are shifted; past the last element */
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

    static_assert(UNIT == N || UNIT == 1, "several groups are single elements");

    DEVICE Pack<T, N> load(bool has, const T *from, float instead) const {
        if constexpr (UNIT == N) { /* copied element by element, it would be waited for */
            return load_once_if<T, N>(has && valid > 0, from, instead);
        } else {
            Pack<T, N> pack;
#pragma unroll
            for (int g = 0; g < N; g++)
                pack.v[g] = load_once_if<T, 1>(has && g < valid, from + g * apart, instead).v[0];
            return pack;
        }
    }
    DEVICE void store(bool has, T *to, const Pack<T, N> &pack) const {
        if constexpr (UNIT == N) {
            if (has && valid > 0)
                store_once<T, N>(to, pack);
        } else {
#pragma unroll
            for (int g = 0; g < N; g++)
                if (has && g < valid)
                    to[g * apart] = pack.v[g];
        }
    }
};

/* SHIFTED: packs are not aligned, and the last one of an outer index may have less than UNIT columns. */
template <typename T, int UNIT, int GROUPS, int STEPS, int THREADS, bool FORWARD, bool SHIFTED>
__global__ void __launch_bounds__(THREADS, THREADS >= 1024 ? 1 : (FORWARD && !SHIFTED ? 1024 : 512) / THREADS)
    softmax_short_column(const __grid_constant__ ColumnArgs<T> a) {
    constexpr int N = UNIT * GROUPS;
    extern __shared__ uint4 column_memory[];
    const ColumnPlan &plan = a.plan;
    const int length = plan.length, down = 1 << plan.down_log2, across = plan.threads >> plan.down_log2;
    const int place = threadIdx.x & (across - 1), row = (int)threadIdx.x / across;
    unsigned outside;
    int64_t column;
    ThreadColumns<T, N, UNIT> columns = {0, 0};
    if constexpr (GROUPS == 1) {
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
    if constexpr (SHIFTED) {
        PackAnywhere<T> in_packs[STEPS], dy_packs[FORWARD ? 1 : STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                const bool has = row + k * down < length && columns.valid > 0;
                in_packs[k].load(has, in + k * down * plan.stride[IN], a.in, a.end[IN]);
                if constexpr (!FORWARD)
                    if (!plan.expanded)
                        dy_packs[k].load(has, dy + k * down * plan.stride[DY], a.dy, a.end[DY]);
            }
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                const bool has = row + k * down < length && columns.valid > 0;
                x[k] = has ? in_packs[k].get(a.in, a.end[IN]) : all_of<T, N>(FORWARD ? -INFINITY : 0.0f);
                if constexpr (!FORWARD)
                    if (!plan.expanded)
                        d[k] = has ? dy_packs[k].get(a.dy, a.end[DY]) : all_of<T, N>(0.0f);
            }
    } else {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                const bool has = row + k * down < length;
                x[k] = columns.load(has, in + k * down * plan.stride[IN], FORWARD ? -INFINITY : 0.0f);
                if constexpr (!FORWARD)
                    if (!plan.expanded)
                        d[k] = columns.load(has, dy + k * down * plan.stride[DY], 0.0f);
            }
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
    /* The exponentials of fp32 are kept in place of x, relative to the largest element of this thread. */
    constexpr bool KEEPS = FORWARD && !NARROW<T>;
    [[maybe_unused]] float own_max[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        own_max[j] = mine.max[j];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < plan.steps) {
            float v[N], w[N];
            unpack(x[k], v);
            if constexpr (!FORWARD)
                unpack(d[k], w);
            if constexpr (KEEPS)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    x[k].v[j] = exp_as<T>(v[j] - own_max[j]);
                    mine.sum[0][j] += x[k].v[j];
                }
            else
                add_step<FORWARD>(mine, v, w);
        }
    if (down > 1)
        merge_down<FORWARD, N>(mine, across, down, place, reinterpret_cast<float2 *>(column_memory));

    float scale[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        scale[j] = (KEEPS && down > 1 ? expf(own_max[j] - mine.max[j]) : 1.0f) / mine.sum[0][j];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < plan.steps) {
            float v[N], w[N];
            unpack(x[k], v);
            if constexpr (!FORWARD)
                unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = KEEPS     ? v[j] * scale[j]
                       : FORWARD ? exp_as<T>(v[j] - mine.max[j]) * scale[j]
                                 : v[j] * (w[j] - mine.sum[0][j]);
            T *const to = out + k * down * plan.stride[OUT];
            if constexpr (SHIFTED) {
                const bool has = row + k * down < length && columns.valid > 0, whole = plan.inner - column >= N;
                const Pack<T, N> pack = packed<T, N>(v);
                /* A gap between outer indices, whose columns are not adjacent. */
                const unsigned position = outside * (plan.tiles.number + 1) + static_cast<unsigned>(column / N);
                store_shifted<T, N>(to, pack, has && whole, static_cast<int>(position));
                if (has && !whole)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (column + j < plan.inner)
                            to[j] = pack.v[j];
            } else {
                columns.store(row + k * down < length, to, packed<T, N>(v));
            }
        }
}

struct ShortColumns {
    typedef act_call Call;
    /* What threads take of a call, and the adjacent elements of a group. */
    struct Choice {
        ThreadShare share;
        int unit;
        bool shifted;
    };
    struct Plan {
        Choice choice;
        ColumnPlan columns;
        int64_t blocks;
    };

    static Choice choose(const SlabViews &views, int bytes, bool forward) {
        const int64_t length = views.length(), inner = views.inner();
        const int width = views.column_width(), wide = 16 / bytes;
        if (width == wide)
            return {WIDE_SHARE, width, false};
        ColumnPlan plan;
        const int64_t elements = inner * length * views.slabs();
        const bool two = length <= TWO_SHARE.steps;
        if (bytes == 2 && elements >= (two ? LARGE_OF_TWO : LARGE_ELEMENTS) && inner >= LEAST_SHIFTED &&
            strides_are_positive(views)) {
            const ThreadShare many = {1, (forward ? 2 : 1) * SHIFTED_SHARE.steps, SHIFTED_SHARE.threads};
            const ThreadShare shifted = two ? TWO_SHARE : many;
            if (cut(shifted, length, inner, wide, bytes, &plan))
                return {shifted, wide, true};
        }
        if (elements >= LARGE_ELEMENTS) {
            if (bytes == 4 && length <= PAIR_SHARE.steps)
                return {PAIR_SHARE, width, false};
            if (bytes == 4 && length > LARGE_SHARE.steps && length <= LONG_SHARE.steps && inner < MANY_COLUMNS)
                return {LONG_SHARE, width, false};
            if (bytes == 4 && length <= LONGEST_LARGE && cut(LARGE_SHARE, length, inner, width, bytes, &plan))
                return {LARGE_SHARE, width, false};
        }
        return {SMALL_SHARE, width, false};
    }
    static bool strides_are_positive(const SlabViews &views) {
        bool all = true;
        for (int t = 0; t < TENSORS; t++)
            for (int d = 0; views.pointer[t] && d < views.view[t].ndim; d++)
                all = all && views.view[t].stride[d] >= 0;
        return all;
    }
    /* Threads per block and log2 of those per column. False if the dimension is too long. */
    static bool cut(const ThreadShare &share, int64_t length, int64_t inner, int unit, int bytes, ColumnPlan *plan) {
        const bool wide = unit * bytes == 16;
        const int columns = unit * share.groups, width = columns * bytes;
        plan->threads = min(share.threads, WIDE_SHARE.threads);
        plan->down_log2 = 0;
        while (length > int64_t(share.steps) << plan->down_log2 && plan->down_log2 < 10)
            plan->down_log2++;
        const int least = 2 * LEAST_BYTES << plan->down_log2; /* so that a block is twice LEAST_BYTES wide */
        while (plan->threads < share.threads && plan->threads * width < least)
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
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype));
        if (views.inner() * bytes < LEAST_BYTES)
            return "there are less than 64 bytes of adjacent columns";
        ColumnPlan plan;
        const Choice choice = choose(views, bytes, is_forward(call));
        if (!cut(choice.share, views.length(), views.inner(), choice.unit, bytes, &plan))
            return "the dimension is too long for the registers of a block";
        if ((ceil_div(views.inner(), int64_t(choice.unit) * choice.share.groups) + 1) * views.slabs() > INT32_MAX / 2)
            return "it counts what threads take in 30 bits";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype));
        const Choice choice = plan->choice = choose(views, bytes, is_forward(call));
        ColumnPlan &columns = plan->columns;
        columns.length = static_cast<int>(views.length());
        columns.inner = views.inner();
        columns.slabs = views.slabs();
        cut(choice.share, columns.length, columns.inner, choice.unit, bytes, &columns);
        const int64_t across = columns.threads >> columns.down_log2;
        if (choice.share.groups == 1) {
            columns.tiles = Divisor(ceil_div(columns.inner, int64_t(choice.unit)));
            plan->blocks = ceil_div(columns.tiles.number * columns.slabs, across);
        } else {
            columns.tiles =
                Divisor(ceil_div(columns.inner, int64_t(choice.unit) * choice.share.groups << columns.across_log2));
            plan->blocks = columns.tiles.number * ceil_div(columns.slabs, across >> columns.across_log2);
        }
        columns.steps = ceil_div(columns.length, 1 << columns.down_log2);
        columns.outer = walk_over(views.pointer, 0, views.dim());
        for (int t = 0; t < TENSORS; t++)
            columns.stride[t] = views.pointer[t] ? views.view[t].stride[views.dim()] : 0;
        columns.expanded = !is_forward(call) && views.is_expanded(DY);
        return 0;
    }

    template <typename T, int UNIT, int GROUPS, int STEPS, int THREADS, bool FORWARD, bool SHIFTED = false>
    static void launch_share(rafter_context *context, const OrderedCall &ordered, const Plan &planned) {
        const Call &call = ordered.call;
        const ColumnPlan &plan = planned.columns;
        ColumnArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                              reinterpret_cast<const T *>(call.dy.data),
                              reinterpret_cast<T *>(call.out.data),
                              plan,
                              {}};
        if (SHIFTED) {
            args.end[IN] = end_of<T>(call.in);
            args.end[DY] = FORWARD ? nullptr : end_of<T>(call.dy);
        }
        const int across = plan.threads >> plan.down_log2;
        Launch how = {planned.blocks, plan.threads};
        how.overlaps = ordered.copied;
        if (plan.down_log2 > 0)
            how.shared = (plan.threads + across) * (UNIT * GROUPS) * sizeof(float2);
        ::launch(context, how, softmax_short_column<T, UNIT, GROUPS, STEPS, THREADS, FORWARD, SHIFTED>, args);
    }

    template <typename T> static const T *end_of(const rafter_view &view) {
        const T *last = reinterpret_cast<const T *>(view.data);
        for (int d = 0; d < view.ndim; d++)
            last += (view.shape[d] - 1) * view.stride[d];
        return last + 1;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &plan) {
        constexpr ThreadShare W = WIDE_SHARE, H = SHIFTED_SHARE, P = PAIR_SHARE, L = LARGE_SHARE, S = SMALL_SHARE,
                              A = LONG_SHARE;
        const Choice &choice = plan.choice;
        if (choice.unit == WIDE<T> && !choice.shifted)
            return launch_share<T, WIDE<T>, W.groups, W.steps, W.threads, FORWARD>(context, ordered, plan);
        if constexpr (sizeof(T) == 2) {
            if (choice.shifted && choice.share.steps == TWO_SHARE.steps)
                return launch_share<T, WIDE<T>, 1, TWO_SHARE.steps, TWO_SHARE.threads, FORWARD, true>(context, ordered,
                                                                                                      plan);
            if (choice.shifted)
                return launch_share<T, WIDE<T>, H.groups, (FORWARD ? 2 : 1) * H.steps, H.threads, FORWARD, true>(
                    context, ordered, plan);
            if (choice.unit == 2)
                return launch_share<T, 2, S.groups, S.steps, S.threads, FORWARD>(context, ordered, plan);
        } else {
            if (choice.share.groups == P.groups)
                return launch_share<T, 1, P.groups, P.steps, P.threads, FORWARD>(context, ordered, plan);
            if (choice.share.steps == A.steps)
                return launch_share<T, 1, A.groups, A.steps, A.threads, FORWARD>(context, ordered, plan);
            if (choice.share.groups == L.groups)
                return launch_share<T, 1, L.groups, L.steps, L.threads, FORWARD>(context, ordered, plan);
        }
        launch_share<T, 1, S.groups, S.steps, S.threads, FORWARD>(context, ordered, plan);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (is_forward(call))
                launch_as<T, true>(context, ordered, plan);
            else
                launch_as<T, false>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_short_columns, ShortColumns)
