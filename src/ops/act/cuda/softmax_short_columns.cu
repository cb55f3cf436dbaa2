/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a short dimension of [outer, length, columns]; steps of the length may be any distance apart. All
 * elements stay in registers: every byte is read once and written once.
 *
 * A thread takes a few columns and every `down`-th step of the length. If columns are aligned packs of 16 bytes, it
 * takes one pack of each step. If they are not, threads of large 16-bit tensors shift packs (unaligned_pack.cuh); other
 * threads take groups of 1 or 2 adjacent elements, so that adjacent threads take adjacent groups. In large tensors a
 * thread takes several groups, so that enough loads are in flight.
 *
 * A thread writes only what it has read itself: the output may be the input.
 */
#include "cuda/line_statistics.cuh"
#include "cuda/unaligned_pack.cuh"
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
constexpr ThreadShare TWO_SHARE = {1, 2, 256};     /* packs that are not aligned, of one or two steps */
constexpr ThreadShare PAIR_SHARE = {8, 2, 512};    /* large fp32 tensors of one or two steps */
constexpr ThreadShare LARGE_SHARE = {4, 8, 512};   /* large fp32 tensors */
constexpr ThreadShare LONG_SHARE = {1, 32, 256};   /* large fp32 tensors of few columns side by side */
constexpr ThreadShare DEEP_SHARE = {1, 32, 512};   /* forward of large fp32 tensors of many steps */
constexpr ThreadShare SMALL_SHARE = {1, 16, 1024}; /* all others; one block per SM: no loads while it stores */
constexpr int64_t LARGE_ELEMENTS = 8 << 20;        /* of a large tensor, at least */
constexpr int64_t LARGE_OF_TWO = 1 << 17;          /* the same for TWO_SHARE */
constexpr int64_t LEAST_SHIFTED = 64;              /* columns of SHIFTED_SHARE, at least: the last pack may have few */
constexpr int64_t LONGEST_LARGE = 256;             /* steps of LARGE_SHARE: a block then has 16 threads side by side */
constexpr int64_t LONGEST_DEEP = 512;              /* steps of DEEP_SHARE: longer columns are faster with SMALL_SHARE */
constexpr int64_t MANY_COLUMNS = 512; /* with fewer, several groups per thread would leave many of them unused */

struct ColumnPlan {
    Walk outer;
    int64_t slabs, inner;       /* outer indices, and columns of each */
    Divisor tiles;              /* per outer index: groups of columns, if a thread takes one; else tiles */
    int beside_log2;            /* several groups per thread: threads side by side in an outer index */
    int64_t stride[TENSORS];    /* between steps */
    int length, steps;          /* steps: per thread, at most */
    int across_log2, down_log2; /* threads of a block: side by side; per column */
    bool expanded;              /* dy is one number per outer index */

    int threads() const {
        return 1 << (across_log2 + down_log2);
    }
};

template <typename T> struct ColumnArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    ColumnPlan plan;
    const T *end[TENSORS]; /* of tensors whose packs are shifted; past the last element */
};

/* Merges the statistics of the threads of each column. shared: [row][column], followed by the totals:
 * [column]. */
template <bool FORWARD, int N>
DEVICE void merge_down(Statistics<N, FORWARD, 1> &mine, const ColumnPlan &plan, int row, int place, Part *shared) {
    static_assert((N & (N - 1)) == 0, "columns are a power of two");
    const int columns_log2 = plan.across_log2 + (31 - __clz(N)), columns = 1 << columns_log2,
              down = 1 << plan.down_log2;
    Part *const totals = shared + blockDim.x * N;
#pragma unroll
    for (int j = 0; j < N; j++)
        shared[row * columns + place * N + j] = {mine.max[j], mine.sum[0][j]};
    __syncthreads();
    const int groups = max(down / MERGED_PARTS, 1); /* of rows: each group is merged into the place of its first row */
    if (groups > 1) {
        for (int i = threadIdx.x; i < groups * columns; i += blockDim.x) {
            const int group = i >> columns_log2, column = i & (columns - 1);
            shared[i] = merge_some<FORWARD>(shared + column, group, groups, down, columns);
        }
        __syncthreads();
    }
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        totals[column] = merge_some<FORWARD>(shared + column, 0, 1, groups > 1 ? groups : down, columns);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
        const Part all = totals[place * N + j];
        mine.max[j] = all.max;
        mine.sum[0][j] = all.sum;
    }
}

/* A thread's columns: N / UNIT groups of UNIT adjacent elements; groups are `apart` elements apart. */
template <typename T, int N, int UNIT> struct ThreadColumns {
    int apart, valid; /* valid: groups that exist */

    static_assert(UNIT == N || UNIT == 1, "several groups are single elements");

    DEVICE Pack<T, N> load(bool has, const T *from, float instead) const {
        if constexpr (UNIT == N) { /* to copy the pack element by element would wait for the load */
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

/* Packs that are not aligned, one for each of a thread's steps: each is shifted out of two aligned packs. The loads of
 * all steps are in flight at the same time. */
template <typename T, int STEPS> struct ShiftedSteps {
    static constexpr int N = WIDE<T>;
    const T *first;
    int64_t step; /* elements from one to the next */
    bool inside;  /* all aligned packs lie inside the tensor; else elements are loaded one by one */
    uint4 low[STEPS], high[STEPS];

    /* `count` steps, of `most` that threads of the kernel have. [begin, end): the tensor. */
    DEVICE void load(const T *from, int64_t apart, int count, int most, const T *begin, const T *end) {
        first = from;
        step = apart;
        inside = from - offset_in_pack(from) >= begin && from + (count - 1) * apart + 2 * N <= end;
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < most) {
                const char *const p = reinterpret_cast<const char *>(from + k * apart), *const aligned =
                                                                                            p -
                                                                                            reinterpret_cast<uintptr_t>(
                                                                                                p) %
                                                                                                16;
                low[k] = load_now_if(inside && k < count, aligned);
                high[k] = load_now_if(inside && k < count, aligned + 16);
            }
    }
    /* The pack of step k. Elements past `end` belong to no column and are not read. */
    DEVICE Pack<T, N> get(int k, const T *end) const {
        const T *const from = first + k * step;
        Pack<T, N> pack;
        if (inside) {
            reinterpret_cast<uint4 &>(pack) =
                shifted(low[k], high[k], static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16));
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = from + j < end ? from[j] : from_float<T>(0.0f);
        }
        return pack;
    }
};

/* GROUPS groups of UNIT adjacent columns and at most STEPS steps per thread. SHIFTED: packs are not aligned, and the
 * last one of an outer index may have fewer than UNIT columns. */
template <typename T, int UNIT, int GROUPS, int STEPS, int THREADS, bool FORWARD, bool SHIFTED>
__global__ void __launch_bounds__(THREADS, THREADS >= 1024 ? 1 : (FORWARD && !SHIFTED ? 1024 : 512) / THREADS)
    softmax_short_column(const __grid_constant__ ColumnArgs<T> a) {
    constexpr int N = UNIT * GROUPS;
    DYNAMIC_SHARED(uint4, column_memory);
    const ColumnPlan &plan = a.plan;
    const int place = threadIdx.x & ((1 << plan.across_log2) - 1), row = threadIdx.x >> plan.across_log2;
    unsigned outside;
    int64_t column;
    ThreadColumns<T, N, UNIT> columns = {0, 0};
    if constexpr (GROUPS == 1) {
        const unsigned pack = (blockIdx.x << plan.across_log2) + place;
        outside = plan.tiles.quotient(pack);
        column = int64_t(pack - outside * plan.tiles.number) * N;
        columns.valid = outside < plan.slabs;
    } else {
        const int beside = 1 << plan.beside_log2;
        const unsigned tiles = plan.tiles.quotient(blockIdx.x);
        outside = (tiles << (plan.across_log2 - plan.beside_log2)) + (place >> plan.beside_log2);
        column = int64_t(blockIdx.x - tiles * plan.tiles.number) * (beside * N) + (place & (beside - 1));
        columns.apart = beside;
        const int left = static_cast<int>(min(plan.inner - column, int64_t(beside * N))); /* single elements */
        columns.valid = outside < plan.slabs && left > 0 ? (left + beside - 1) >> plan.beside_log2 : 0;
    }
    /* Steps of this thread; they are 1 << down_log2 apart. */
    const int count = columns.valid > 0 ? (plan.length - row + (1 << plan.down_log2) - 1) >> plan.down_log2 : 0;
    const int64_t in_step = plan.stride[IN] << plan.down_log2, dy_step = plan.stride[DY] << plan.down_log2,
                  out_step = plan.stride[OUT] << plan.down_log2;
    int64_t at[3];
    plan.outer.offsets(outside, at);
    const T *in = a.in + at[IN] + column + row * plan.stride[IN];
    const T *dy = a.dy + at[DY] + (FORWARD || plan.expanded ? 0 : column + row * plan.stride[DY]);
    T *to = a.out + at[OUT] + column + row * plan.stride[OUT];

    wait_for_previous_kernel();
    Pack<T, N> x[STEPS], d[FORWARD ? 1 : STEPS];
    if constexpr (SHIFTED) {
        ShiftedSteps<T, STEPS> in_packs;
        ShiftedSteps<T, FORWARD ? 1 : STEPS> dy_packs;
        in_packs.load(in, in_step, count, plan.steps, a.in, a.end[IN]);
        if constexpr (!FORWARD)
            if (!plan.expanded)
                dy_packs.load(dy, dy_step, count, plan.steps, a.dy, a.end[DY]);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps)
                x[k] = k < count ? in_packs.get(k, a.end[IN]) : all_of<T, N>(FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            if (!plan.expanded)
#pragma unroll
                for (int k = 0; k < STEPS; k++)
                    if (k < plan.steps)
                        d[k] = k < count ? dy_packs.get(k, a.end[DY]) : all_of<T, N>(0.0f);
    } else {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (k < plan.steps) {
                x[k] = columns.load(k < count, in + k * in_step, FORWARD ? -INFINITY : 0.0f);
                if constexpr (!FORWARD)
                    if (!plan.expanded)
                        d[k] = columns.load(k < count, dy + k * dy_step, 0.0f);
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
    if (plan.down_log2 > 0)
        merge_down<FORWARD, N>(mine, plan, row, place, reinterpret_cast<Part *>(column_memory));

    float scale[N];
    if constexpr (FORWARD)
#pragma unroll
        for (int j = 0; j < N; j++)
            scale[j] = reciprocal_fast(mine.sum[0][j]); /* a sum is 0, NaN, or between 1 and the length */
    if constexpr (KEEPS)
        if (plan.down_log2 > 0)
#pragma unroll
            for (int j = 0; j < N; j++)
                scale[j] *= expf(own_max[j] - mine.max[j]);
    [[maybe_unused]] const bool whole = columns.valid > 0 && plan.inner - column >= N;
    /* Packs are numbered with a gap between outer indices, whose columns are not adjacent. */
    [[maybe_unused]] AdjacentPacks adjacent;
    if constexpr (SHIFTED)
        adjacent = AdjacentPacks(whole, static_cast<int>(outside * (plan.tiles.number + 1) + column / N));
#pragma unroll
    for (int k = 0; k < STEPS; k++, to += out_step)
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
            if constexpr (SHIFTED) {
                const Pack<T, N> pack = packed<T, N>(v);
                adjacent.store(to, pack, whole && k < count);
                if (!whole && k < count)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (column + j < plan.inner)
                            to[j] = pack.v[j];
            } else {
                columns.store(k < count, to, packed<T, N>(v));
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

    /* Whether softmax_column_panels is faster: 16-bit gradients of this many steps, of many aligned packs side by side.
     * Measured on an H200: docs/perf/act.md. */
    static bool is_slower(const SlabViews &views, int bytes, bool forward) {
        constexpr int64_t SHORTEST = 64, LONGEST = 128, LEAST_INNER = 4096;
        return !forward && bytes == 2 && views.column_width() * bytes == 16 && views.length() >= SHORTEST &&
               views.length() <= LONGEST && views.inner() >= LEAST_INNER;
    }

    /* The share of a thread, by shape and dtype. */
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
            if (bytes == 4 && forward && length > LONGEST_LARGE && length <= LONGEST_DEEP &&
                cut(DEEP_SHARE, length, inner, width, bytes, &plan))
                return {DEEP_SHARE, width, false};
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
    /* Fills the shape of a block: the members of `plan` that end in _log2. False if the dimension is too long. */
    static bool cut(const ThreadShare &share, int64_t length, int64_t inner, int unit, int bytes, ColumnPlan *plan) {
        const bool wide = unit * bytes == 16;
        const int columns = unit * share.groups, width = columns * bytes;
        int threads = min(share.threads, WIDE_SHARE.threads);
        plan->down_log2 = 0;
        while (length > int64_t(share.steps) << plan->down_log2 && plan->down_log2 < 10)
            plan->down_log2++;
        const int least = 2 * LEAST_BYTES << plan->down_log2; /* so that a block is twice LEAST_BYTES wide */
        while (threads < share.threads && threads * width < least)
            threads *= 2;
        plan->across_log2 = 0;
        while (threads >> plan->down_log2 > 1 << plan->across_log2)
            plan->across_log2++;
        plan->beside_log2 = 0;
        while (plan->beside_log2 < plan->across_log2 && columns << plan->beside_log2 < inner)
            plan->beside_log2++;
        return threads * width >= (wide ? least : least / 2);
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
        if (is_slower(views, bytes, is_forward(call)))
            return "gradients of packs of some hundred steps are faster in panels";
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
        const int64_t across = 1 << columns.across_log2;
        if (choice.share.groups == 1) {
            columns.tiles = Divisor(ceil_div(columns.inner, int64_t(choice.unit)));
            plan->blocks = ceil_div(columns.tiles.number * columns.slabs, across);
        } else {
            columns.tiles =
                Divisor(ceil_div(columns.inner, int64_t(choice.unit) * choice.share.groups << columns.beside_log2));
            plan->blocks = columns.tiles.number * ceil_div(columns.slabs, across >> columns.beside_log2);
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
        Launch how = {planned.blocks, plan.threads()};
        if (plan.down_log2 > 0)
            how.shared = (plan.threads() + (1 << plan.across_log2)) * (UNIT * GROUPS) * sizeof(Part);
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
                              A = LONG_SHARE, D = DEEP_SHARE;
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
            if constexpr (FORWARD)
                if (choice.share.threads == D.threads && choice.share.steps == D.steps)
                    return launch_share<T, 1, D.groups, D.steps, D.threads, FORWARD>(context, ordered, plan);
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
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, ordered, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_short_columns, ShortColumns)
