/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a strided dimension: [outer ..., length, columns] with adjacent columns. For columns
 * that are not aligned packs of 16 bytes, or that are so long that the blocks of
 * softmax_persistent_columns would wait for each other. Three kernels: statistics of parts of the
 * length, statistics of the whole length, and the results. The inputs are read twice; the last
 * kernel begins with what the first one has read last, which may still be in L2.
 *
 * A block takes a part of the length of a tile of adjacent columns. The lanes of a warp take
 * adjacent packs of one step of the length, as wide as alignment allows; a thread has several steps
 * in flight.
 *
 * A thread writes only what it has read itself: the output may be the input.
 */
#include "cuda/line_statistics.cuh"
#include "ops/act/cuda/softmax_layout.cuh"
#include "ops/act/cuda/softmax_part.cuh"

namespace {

constexpr int TILE_THREADS = 256, TILE_WARPS = TILE_THREADS / WARP;

/* The shape of a tile, of packs of N elements. */
template <typename T, int N, bool FORWARD> struct TileShape {
    static constexpr int BYTES = N * (int)sizeof(T);
    static constexpr int WARPS_ACROSS = BYTES == 16 ? 1 : BYTES == 4 ? 2 : 4; /* 256 bytes or more side by side */
    static constexpr int ACROSS = WARPS_ACROSS * WARP, DOWN = TILE_WARPS / WARPS_ACROSS; /* packs; steps */
    static constexpr int AT_ONCE = (BYTES == 16 ? 4 : 16) / (FORWARD ? 1 : 2); /* steps of a thread in flight */
};

struct TilePlan {
    Walk outer;
    int64_t packs, length;   /* per outer index: packs side by side; steps of the length */
    int64_t part;            /* steps of a part */
    int64_t stride[TENSORS]; /* between steps */
    Divisor tiles, parts;    /* per outer index: tiles side by side; parts of the length */
    int inner;               /* columns */
    bool expanded;           /* dy is one number per outer index */
};

template <typename T> struct TileArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    TilePlan plan;
};

/* A thread's share of the part of a tile that its block takes: one pack of every DOWN-th step. */
template <typename T, int N, bool FORWARD> struct TilePart {
    typedef TileShape<T, N, FORWARD> Shape;
    static constexpr int AT_ONCE = Shape::AT_ONCE;
    unsigned outside; /* outer index */
    unsigned part;    /* number */
    int64_t pack;     /* of the thread, in the outer index */
    int left;         /* steps from the next ones on */
    const T *in, *dy; /* the next steps */
    T *out;
    float upstream; /* dy, if expanded */
    Pack<T, N> x[AT_ONCE], d[FORWARD ? 1 : AT_ONCE];

    DEVICE TilePart(const TileArgs<T> &a, unsigned block) {
        const TilePlan &plan = a.plan;
        const unsigned rest = plan.tiles.quotient(block);
        outside = plan.parts.quotient(rest);
        part = rest - outside * plan.parts.number;
        const int warp = threadIdx.x / WARP;
        pack = int64_t(block - rest * plan.tiles.number) * Shape::ACROSS + warp % Shape::WARPS_ACROSS * WARP +
               threadIdx.x % WARP;
        const int64_t first = (int64_t)part * plan.part, begin = first + warp / Shape::WARPS_ACROSS,
                      end = min(first + plan.part, plan.length);
        left = pack < plan.packs && begin < end ? static_cast<int>((end - begin - 1) / Shape::DOWN) + 1 : 0;
        int64_t at[3];
        plan.outer.offsets(outside, at);
        in = a.in + at[IN] + pack * N + begin * plan.stride[IN];
        out = a.out + at[OUT] + pack * N + begin * plan.stride[OUT];
        dy = a.dy;
        if (!FORWARD && plan.expanded)
            upstream = to_float(a.dy[at[DY]]);
        else
            dy += at[DY] + pack * N + begin * plan.stride[DY];
    }
    /* Issues the loads of the next AT_ONCE steps. */
    DEVICE void load(const TileArgs<T> &a) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            x[k] = load_once_if<T, N>(k < left, in, FORWARD ? -INFINITY : 0.0f);
            in += Shape::DOWN * a.plan.stride[IN];
        }
        if constexpr (!FORWARD)
            if (!a.plan.expanded)
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    d[k] = load_once_if<T, N>(k < left, dy, 0.0f);
                    dy += Shape::DOWN * a.plan.stride[DY];
                }
    }
    DEVICE void unpack_step(const TileArgs<T> &a, int k, float (&v)[N], float (&w)[N]) const {
        unpack(x[k], v);
        if constexpr (!FORWARD) {
            unpack(d[k], w);
            if (a.plan.expanded)
#pragma unroll
                for (int j = 0; j < N; j++)
                    w[j] = upstream;
        }
    }
};

/* First kernel: the statistics of every part. parts: [outer][part][column]. */
template <typename T, int N, bool FORWARD>
__global__ void __launch_bounds__(TILE_THREADS, 4) tile_statistics(const __grid_constant__ TileArgs<T> a, Part *parts) {
    typedef TileShape<T, N, FORWARD> Shape;
    __shared__ Part partial[Shape::DOWN][Shape::ACROSS * N];
    wait_for_previous_kernel();
    start_next_kernel();
    TilePart<T, N, FORWARD> tile(a, blockIdx.x);
    Statistics<N, FORWARD, 1> mine;
    mine.clear();
    for (; tile.left > 0; tile.left -= Shape::AT_ONCE) {
        tile.load(a);
        if constexpr (FORWARD) {
            Pack<T, N> top = tile.x[0];
#pragma unroll
            for (int k = 1; k < Shape::AT_ONCE; k++)
                top = max_of(top, tile.x[k]);
            cover<false, N>(mine, 0, top);
        }
#pragma unroll
        for (int k = 0; k < Shape::AT_ONCE; k++) {
            float v[N], w[N];
            tile.unpack_step(a, k, v, w);
            add_step<FORWARD>(mine, v, w);
        }
    }
    const int warp = threadIdx.x / WARP, place = warp % Shape::WARPS_ACROSS * WARP + threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < N; j++)
        partial[warp / Shape::WARPS_ACROSS][place * N + j] = {mine.max[j], mine.sum[0][j]};
    __syncthreads();
    const int64_t first = (tile.pack - place) * N;
    Part *const to = parts + ((int64_t)tile.outside * a.plan.parts.number + tile.part) * a.plan.inner + first;
    for (int column = threadIdx.x; column < Shape::ACROSS * N && first + column < a.plan.inner;
         column += TILE_THREADS) {
        Part some[Shape::DOWN];
#pragma unroll
        for (int i = 0; i < Shape::DOWN; i++)
            some[i] = partial[i][column];
        to[column] = merged<FORWARD>(no_part(), some);
    }
}

/* Third kernel: the results. (The second one is merge_parts.) totals: [outer][column]. */
template <typename T, int N, bool FORWARD>
__global__ void __launch_bounds__(TILE_THREADS, 4)
    tile_results(const __grid_constant__ TileArgs<T> a, const Part *totals) {
    typedef TileShape<T, N, FORWARD> Shape;
    TilePart<T, N, FORWARD> tile(a, gridDim.x - 1 - blockIdx.x); /* in the reverse order of the first kernel */
    tile.load(a);
    wait_for_previous_kernel();
    const Part *const total = totals + (int64_t)tile.outside * a.plan.inner + tile.pack * N;
    Part all[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        all[j] = load_part<true>(tile.left > 0 ? total + j : totals); /* no branch: loads are in flight together */
    float max[N], sum[N], scale[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        max[j] = all[j].max;
        sum[j] = all[j].sum;
        scale[j] = 1.0f / all[j].sum;
    }
    while (tile.left > 0) {
#pragma unroll
        for (int k = 0; k < Shape::AT_ONCE; k++) {
            float v[N], w[N];
            tile.unpack_step(a, k, v, w);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = FORWARD ? exp_as<T>(v[j] - max[j]) * scale[j] : v[j] * (w[j] - sum[j]);
            if (k < tile.left)
                store_once(tile.out, packed<T, N>(v));
            tile.out += Shape::DOWN * a.plan.stride[OUT];
        }
        tile.left -= Shape::AT_ONCE;
        if (tile.left > 0)
            tile.load(a);
    }
}

struct ColumnTiles {
    typedef act_call Call;
    struct Plan {
        int width; /* elements per pack */
        int64_t slabs;
        TilePlan tile;
    };
    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        const int column = views.dim() + 1;
        const int64_t bytes = rafter_dtype_bytes(call.out.dtype);
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t] && views.view[t].stride[column] != 1 && !(t == DY && views.is_expanded(DY)))
                return "columns are not adjacent";
        if (views.inner() * bytes < 128)
            return "there are less than 128 bytes of adjacent columns";
        if (views.column_width() * bytes == 16 && !is_long(call, views))
            return "columns are aligned packs, and not very long";
        if (views.inner() > INT32_MAX / 2 || views.slabs() > INT32_MAX / 2)
            return "it counts columns in 30 bits";
        Plan plan;
        make(views, is_forward(call), &plan);
        if (plan.slabs * plan.tile.tiles.number * plan.tile.parts.number > INT32_MAX / 2)
            return "it counts blocks in 30 bits";
        return NULL;
    }

    static void make(const SlabViews &views, bool forward, Plan *plan) {
        const int bytes = static_cast<int>(rafter_dtype_bytes(views.view[OUT].dtype));
        /* Enough parts to give every multiprocessor several blocks. But not so short ones that the
         * traffic of their statistics matters, unless there would be too few blocks. */
        constexpr int64_t ENOUGH_BLOCKS = 528, PART = 512, LEAST = 64;
        TilePlan &tile = plan->tile;
        tile = {};
        plan->width = views.column_width();
        plan->slabs = views.slabs();
        const int across = plan->width * bytes == 16 ? WARP : plan->width * bytes == 4 ? 2 * WARP : 4 * WARP;
        tile.outer = walk_over(views.pointer, 0, views.dim());
        tile.inner = static_cast<int>(views.inner());
        tile.packs = views.inner() / plan->width;
        tile.length = views.length();
        tile.expanded = !forward && views.is_expanded(DY);
        for (int t = 0; t < TENSORS; t++)
            tile.stride[t] = views.pointer[t] ? views.view[t].stride[views.dim()] : 0;
        const int64_t tiles = ceil_div(tile.packs, int64_t(across)), all = tiles * plan->slabs;
        const int64_t parts =
            min(min(ceil_div(8 * ENOUGH_BLOCKS, all), max(ceil_div(ENOUGH_BLOCKS, all), tile.length / PART)),
                ceil_div(tile.length, LEAST));
        tile.part = ceil_div(tile.length, max(parts, int64_t(1)));
        tile.tiles = Divisor(tiles);
        tile.parts = Divisor(ceil_div(tile.length, tile.part));
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        make(SlabViews(ordered.call), is_forward(call), plan);
        return (size_t)plan->slabs * (plan->tile.parts.number + 1) * plan->tile.inner * sizeof(Part);
    }

    template <typename T, int N, bool FORWARD>
    static void launch_as(rafter_context *context, const OrderedCall &ordered, const Plan &plan, char *workspace) {
        const Call &call = ordered.call;
        const TilePlan &tile = plan.tile;
        const TileArgs<T> args = {reinterpret_cast<const T *>(call.in.data), reinterpret_cast<const T *>(call.dy.data),
                                  reinterpret_cast<T *>(call.out.data), tile};
        Part *const totals = reinterpret_cast<Part *>(workspace), *const parts = totals + plan.slabs * tile.inner;
        Launch how = {plan.slabs * tile.tiles.number * tile.parts.number, TILE_THREADS};
        ::launch(context, how, tile_statistics<T, N, FORWARD>, args, parts);
        launch_merge<FORWARD>(context, parts, totals, plan.slabs, tile.inner, static_cast<int>(tile.parts.number));
        ::launch(context, how, tile_results<T, N, FORWARD>, args, totals);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const auto with_width = [&](auto width) {
                constexpr int N = decltype(width)::value;
                is_forward(call) ? launch_as<T, N, true>(context, ordered, plan, workspace)
                                 : launch_as<T, N, false>(context, ordered, plan, workspace);
            };
            if (plan.width == WIDE<T>)
                return with_width(std::integral_constant<int, WIDE<T>>());
            if constexpr (sizeof(T) == 2)
                if (plan.width == 2)
                    return with_width(std::integral_constant<int, 2>());
            with_width(std::integral_constant<int, 1>());
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_columns_two_pass, ColumnTiles)
