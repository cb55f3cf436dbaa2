/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine of rows that begin anywhere in memory. A block takes chunks: all features of some heads,
 * of one token or of several. A chunk goes through shared memory. It is copied in aligned packs, as
 * adjacent rows lie in memory, wherever heads begin; and it is worked on element by element, adjacent
 * threads on adjacent elements. So rows of 33 elements move as fast as rows of 32. The angles of a
 * chunk are computed once for all sequences of the block.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_STAGED_CUH
#define RAFTER_LRPE_COSINE_CUDA_STAGED_CUH

#include "cuda/activations.cuh"
#include "ops/lrpe_cosine/cuda/row_softmax.cuh"
#include "ops/lrpe_cosine/cuda/staged_memory.cuh"

namespace lrpe {

/* ---- the kernel ------------------------------------------------------------------------------ */

/* What a kernel is instantiated for. */
enum Layout {
    COMPACT, /* a chunk is one span in every tensor */
    SPREAD,  /* it may have several spans */
    DIRECT   /* and the features of dy are not adjacent: dy is read from memory */
};

template <bool FORWARD> constexpr int STAGED_STAGES = FORWARD ? 4 : 3;

/* f(x), with f known to the compiler inside of the loops; of a softmax, v is p / scale. */
template <typename T, int N> DEVICE void activate_all(int f, float scale, float (&v)[N]) {
    if (f >= LANE_SOFTMAX) {
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] *= scale;
        return;
    }
    const auto with = [&](auto kind) {
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = act_forward<T>(static_cast<rafter_act_kind>(kind.value), v[j]);
    };
    if (f == RAFTER_ACT_RELU)
        with(std::integral_constant<int, RAFTER_ACT_RELU>());
    else if (f == RAFTER_ACT_SIGMOID)
        with(std::integral_constant<int, RAFTER_ACT_SIGMOID>());
    else if (f == RAFTER_ACT_SILU)
        with(std::integral_constant<int, RAFTER_ACT_SILU>());
}

/* Replaces g, the gradient of f(x), by the gradient of x. */
template <typename T, int N> DEVICE void gradient_of_all(int f, const float (&x)[N], float (&g)[N]) {
    const auto with = [&](auto kind) {
#pragma unroll
        for (int j = 0; j < N; j++)
            g[j] = act_backward<T>(static_cast<rafter_act_kind>(kind.value), x[j], g[j]);
    };
    if (f == RAFTER_ACT_RELU)
        with(std::integral_constant<int, RAFTER_ACT_RELU>());
    else if (f == RAFTER_ACT_SIGMOID)
        with(std::integral_constant<int, RAFTER_ACT_SIGMOID>());
    else if (f == RAFTER_ACT_SILU)
        with(std::integral_constant<int, RAFTER_ACT_SILU>());
}

/* Sines and cosines of the thread's elements. `entries`: which step and position each has, in
 * the halves of a word. */
template <typename T, int N>
DEVICE void sincos_of_all(const AngleStep *steps, const Position *positions, const unsigned (&entries)[N],
                          float (&sine)[N], float (&cosine)[N]) {
    const auto step = [&](int j) { return steps[entries[j] & 0xffff]; };
    const auto position = [&](int j) { return positions[entries[j] >> 16]; };
    if constexpr (NARROW<T>) {
        unsigned bad = 0; /* which ones need the long way: as in sincos_of */
#pragma unroll
        for (int j = 0; j < N; j++) {
            const Position at = position(j);
            const bool is_short = sincos_short(step(j), at, &sine[j], &cosine[j]);
            bad |= static_cast<unsigned>(!is_short || at.high != 0 || at.low >= SHORT_POSITION) << j;
        }
        if (bad == 0)
            return;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (bad >> j & 1) {
                const float2 both = sincos_apart(step(j), position(j));
                sine[j] = both.x;
                cosine[j] = both.y;
            }
    } else {
        unsigned high = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
            high |= position(j).high;
        if (high == 0)
#pragma unroll
            for (int j = 0; j < N; j++)
                sincos_at<false>(step(j), position(j), &sine[j], &cosine[j]);
        else
#pragma unroll
            for (int j = 0; j < N; j++)
                sincos_at<true>(step(j), position(j), &sine[j], &cosine[j]);
    }
}

/* theta of the table's entries that a thread fills: all loads at once. */
template <typename T, int N>
DEVICE void read_theta(const Arguments<T> &a, const Staging &plan, int first_head, int heads, float (&theta)[N]) {
    const auto with = [&](auto zero) {
        const auto *const from = static_cast<const decltype(zero) *>(a.theta) + first_head * a.theta_h;
        decltype(zero) loaded[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const Tiling::Place at = place_of(plan, j * plan.threads + threadIdx.x);
            loaded[j] = zero;
            if (at.h < heads && at.d < a.features)
                loaded[j] = from[at.h * a.theta_h + at.d * a.theta_d];
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            theta[j] = to_float(loaded[j]);
    };
    if (a.theta_dtype == RAFTER_F32)
        with(0.0f);
    else if (a.theta_dtype == RAFTER_BF16)
        with(from_float<bf16>(0.0f));
    else
        with(from_float<fp16>(0.0f));
}

/* Blocks that share an SM: so many that no registers are spilled. */
constexpr int staged_blocks(bool forward, int f, bool dtheta, int layout) {
    return !forward && (dtheta || f >= LANE_SOFTMAX || layout == DIRECT) ? 2 : 3;
}

/* The tokens, sequences and heads of a block. */
struct StagedBlock {
    unsigned chunk;
    int64_t first_token, end_token, first_b;
    int sequences, first_head, heads, step;

    template <typename T> DEVICE StagedBlock(const Arguments<T> &a, const Staging &plan) : step(plan.step) {
        const Tiling &tiling = plan.tiling;
        chunk = tiling.tiles.quotient(blockIdx.x);
        const unsigned tile = blockIdx.x - chunk * tiling.tiles.number;
        const unsigned sequence_chunk = tiling.token_chunks.quotient(chunk);
        first_token = (int64_t)(chunk - sequence_chunk * tiling.token_chunks.number) * tiling.tokens;
        end_token = min(first_token + tiling.tokens, a.length);
        first_b = (int64_t)sequence_chunk * tiling.sequences;
        sequences = (int)min(a.batch - first_b, (int64_t)tiling.sequences);
        first_head = (int)(tile * plan.heads.number);
        heads = min((int)a.heads - first_head, (int)plan.heads.number);
    }
    template <typename T> DEVICE ChunkAddress address(const T *tensor, const Strides &stride) const {
        return ChunkAddress(tensor, stride, first_b, first_token, first_head, sequences, step);
    }
    DEVICE Extent extent(int tokens_left) const {
        const int tokens = min(tokens_left, step);
        return Extent{tokens, heads, tokens * heads};
    }
};

/* Copies chunks into the stages, in the order of the work. */
template <typename T, bool MANY, bool X, bool DY> struct ChunkLoader {
    const Arguments<T> &a;
    const Staging &plan;
    const StagedBlock &block;
    unsigned stages;
    ChunkAddress x, dy; /* of the next chunk */
    int left, b;        /* tokens from the next chunk on; its sequence */

    DEVICE ChunkLoader(const Arguments<T> &a, const Staging &plan, const StagedBlock &block, unsigned stages)
        : a(a), plan(plan), block(block), stages(stages), x(block.address(a.x, a.x_stride)),
          dy(block.address(a.dy, a.y_stride)), left((int)(block.end_token - block.first_token)), b(0) {
    }
    DEVICE void request(int stage) {
        const unsigned to = stages + stage * plan.stage_bytes;
        if (left > 0) {
            const Extent extent = block.extent(left);
            if constexpr (X)
                copy_in<MANY>(plan.x, plan.heads, x.at, extent, a.x, a.x_end, to);
            if constexpr (DY)
                copy_in<MANY>(plan.y, plan.heads, dy.at, extent, a.dy, a.dy_end, to + plan.dy_at);
            const bool was_last = ++b == block.sequences;
            x.advance(was_last);
            dy.advance(was_last);
            b = was_last ? 0 : b;
            left -= was_last ? block.step : 0;
        }
        copy_commit();
    }
};

/* The entries of the table of angles, in the lower halves, and the tokens of the thread's
 * elements. */
template <typename T> struct Entries {
    static constexpr int COUNT = WIDE<T>;
    unsigned entries[COUNT], exist = 0;

    template <bool ROWS> DEVICE Entries(const Staging &plan, const Elements<T, ROWS> &elements) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const auto at = elements[j];
            entries[j] = at.exists ? entry_of(plan, at.head, at.d) | at.token << 16 : 0;
            exist |= unsigned(at.exists) << j;
            keep(entries[j]);
        }
        keep(exist);
    }
    DEVICE bool exists(int j) const {
        return (exist >> j & 1) != 0;
    }
    DEVICE unsigned entry(int j) const {
        return entries[j] & 0xffff;
    }
    DEVICE int token(int j) const {
        return static_cast<int>(entries[j] >> 16);
    }
};

/* What f is besides an act: x becomes p / scale, and g, the gradient of f(x), that of x. */
template <typename T, int F> struct StagedF {
    static constexpr int COUNT = WIDE<T>;
    static constexpr bool SOFTMAX = F == LANE_SOFTMAX || F == BLOCK_SOFTMAX;
    const int f;
    const Entries<T> &entries;
    RowThreads<F == BLOCK_SOFTMAX> row_threads;
    int64_t columns; /* COLUMN_STATISTICS: from one statistic to the next */

    DEVICE float normalise(const float *statistics, float (&v)[1][COUNT]) {
        if constexpr (SOFTMAX) {
            float sum[1];
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                v[0][j] = entries.exists(j) ? v[0][j] : -INFINITY;
            row_threads.template exponentials<T>(v, sum);
            return reciprocal_fast(sum[0]); /* sum >= 1, or NaN */
        } else {
            if constexpr (F == COLUMN_STATISTICS)
#pragma unroll
                for (int j = 0; j < COUNT; j++) {
                    const float *const at = statistics + entries.entry(j);
                    v[0][j] = exp_as<T>(v[0][j] - at[0]) * at[columns];
                }
            return 1.0f;
        }
    }
    DEVICE void differentiate(const float *statistics, const float (&v)[COUNT], float scale, float (&g)[COUNT]) {
        if constexpr (SOFTMAX) {
            float dot[1] = {};
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                dot[0] = entries.exists(j) ? fmaf(v[j], g[j], dot[0]) : dot[0];
            row_threads.sum(dot);
            const float shift = dot[0] * scale * scale;
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                g[j] = v[j] * fmaf(g[j], scale, -shift);
        } else if constexpr (F == COLUMN_STATISTICS) {
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                g[j] = v[j] * (g[j] - statistics[2 * columns + entries.entry(j)]);
        } else if constexpr (F != RAFTER_ACT_NONE) {
            gradient_of_all<T>(f, v, g);
        }
    }
};

/* Sums the moments of a block over the tokens of a chunk, in `shared`, and stores them. */
template <typename T>
DEVICE void store_chunk_moments(const Arguments<T> &a, const Staging &plan, const StagedBlock &block,
                                const Entries<T> &entries, const double (&moment)[WIDE<T>], double *shared) {
    const unsigned width = plan.width.number;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WIDE<T>; j++)
        if (entries.exists(j))
            shared[entries.token(j) * width + entries.entry(j)] = moment[j];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < width; i += plan.threads) {
        const Tiling::Place at = place_of(plan, i);
        double sum = 0.0;
        if (at.h >= block.heads)
            continue;
        for (int token = 0; token < plan.step; token++)
            sum += shared[token * width + i];
        plan.tiling.moments[(block.chunk * a.heads + block.first_head + at.h) * a.features + at.d] = sum;
    }
}

template <typename T, bool FORWARD, int F, bool DTHETA, int LAYOUT>
__global__ void __launch_bounds__(THREADS, staged_blocks(FORWARD, F, DTHETA, LAYOUT))
    staged(const Arguments<T> a, const Staging plan) {
    constexpr int COUNT = WIDE<T>, STAGES = STAGED_STAGES<FORWARD>;
    constexpr bool READS_X = FORWARD || DTHETA || F != RAFTER_ACT_NONE, MANY = LAYOUT != COMPACT;
    constexpr bool SOFTMAX = StagedF<T, F>::SOFTMAX;
    constexpr int OF_X = MANY ? MANY_SPANS : SOFTMAX ? ONE_SPAN : LINEAR, OF_Y = MANY ? MANY_SPANS : ONE_SPAN;
    extern __shared__ __align__(128) char dynamic[];
    __shared__ typename RowThreads<F == BLOCK_SOFTMAX>::Exchange exchange;
    AngleStep *const angle_steps = reinterpret_cast<AngleStep *>(dynamic);
    Position *positions = reinterpret_cast<Position *>(dynamic + plan.positions_at);
    unsigned stages = shared_address(dynamic + plan.stages_at), results = shared_address(dynamic + plan.out_at);
    keep(stages);
    keep(results);
    if constexpr (DTHETA)
        start_next_kernel(); /* the sum of moments */

    const StagedBlock block(a, plan);
    const int features = (int)plan.features.number, sequences = block.sequences;
    ChunkLoader<T, MANY, READS_X, !FORWARD && LAYOUT != DIRECT> loader(a, plan, block, stages);
    ChunkAddress x = loader.x, dy = loader.dy, out = block.address(a.out, FORWARD ? a.y_stride : a.dx_stride);
    float theta[COUNT]; /* everything waits for it */
    read_theta(a, plan, block.first_head, block.heads, theta);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++)
        loader.request(i);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (const unsigned i = j * plan.threads + threadIdx.x; i < plan.width.number)
            angle_steps[i] = angle_step(theta[j]);

    const Elements<T, SOFTMAX> elements = {plan, plan.step * block.heads};
    const Entries<T> entries(plan, elements);
    const Places<T, OF_X> x_at(plan.x, elements, 0);
    const Places<T, FORWARD ? OF_Y : OF_X> out_at(plan.out, elements, plan.out_bytes);
    const std::conditional_t<LAYOUT == DIRECT, DirectPlaces<T>, Places<T, OF_Y>> dy_at(plan.y, elements, 0);
    const int64_t row_columns = a.heads * a.features;
    StagedF<T, F> function = {F == RUNTIME_F ? plan.tiling.f : F,
                              entries,
                              {plan.tiling.lanes, plan.tiling.lanes / WARP, exchange},
                              a.batch * row_columns};
    double moment[DTHETA ? COUNT : 1] = {};
    int stage = 0;
    if constexpr (F == COLUMN_STATISTICS)
        wait_for_previous_kernel(); /* for the statistics; other inputs are older */

    for (int64_t n = block.first_token; n < block.end_token; n += plan.step) {
        const Extent extent = block.extent((int)(block.end_token - n));
        const auto has = [&](int j) { return entries.exists(j) && entries.token(j) < extent.tokens; };
        for (int i = threadIdx.x; i < plan.step; i += plan.threads)
            positions[i] = position_of(a.position(block.first_b, min(n + i, block.end_token - 1)));
        __syncthreads(); /* for the positions, and the table */
        float cosine[COUNT], sine[COUNT], angle_gradient[DTHETA ? COUNT : 1] = {};
        sincos_of_all<T>(angle_steps, positions, entries.entries, sine, cosine);
#pragma unroll 1
        for (int b = 0; b < sequences; b++) {
            const unsigned staged_x = stages + stage * plan.stage_bytes, staged_dy = staged_x + plan.dy_at;
            const float *const statistics = /* of the chunk's columns */
                plan.tiling.statistics + (block.first_b + b) * row_columns + block.first_head * a.features;
            copy_wait<STAGES - 2>();
            __syncthreads(); /* the chunk is here, and all threads are done with the one before */
            loader.request(stage == 0 ? STAGES - 1 : stage - 1);
            float v[1][COUNT], c[COUNT], s[COUNT], scale = 1.0f; /* v: x; of a softmax p / scale */
            if constexpr (READS_X) {
                x_at.read(staged_x, x.low(), v[0]);
                scale = function.normalise(statistics, v);
            }
            if constexpr (FORWARD) {
                activate_all<T>(function.f, scale, v[0]);
#pragma unroll
                for (int j = 0; j < COUNT; j++) {
                    c[j] = v[0][j] * cosine[j];
                    s[j] = v[0][j] * sine[j];
                }
                out_at.write(results, out.low(), c, plan.out_bytes);
                out_at.write(results + features * sizeof(T), out.low(), s, plan.out_bytes);
            } else {
                float g[COUNT];
                if constexpr (LAYOUT == DIRECT)
                    dy_at.read(reinterpret_cast<const T *>(dy.at), features * a.y_stride.d, has, c, s);
                else {
                    dy_at.read(staged_dy, dy.low(), c);
                    dy_at.read(staged_dy + features * sizeof(T), dy.low(), s);
                }
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                function.differentiate(statistics, v[0], scale, g);
                if (!DTHETA || a.out)
                    out_at.write(results, out.low(), g, plan.out_bytes);
                if constexpr (DTHETA) {
                    activate_all<T>(function.f, scale, v[0]);
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        angle_gradient[j] = fmaf(v[0][j], s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
                }
            }
            __syncthreads();
            if (!DTHETA || a.out)
                copy_out<MANY, T>(plan.out, plan.heads, out.at, extent, results);
            const bool was_last = b + 1 == sequences;
            x.advance(was_last);
            dy.advance(was_last);
            out.advance(was_last);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                if (has(j))
                    moment[j] += (double)number_of(positions[entries.token(j)]) * (double)angle_gradient[j];
        Position *const first = reinterpret_cast<Position *>(dynamic + plan.positions_at);
        positions = positions == first ? first + plan.step : first;
    }
    if constexpr (DTHETA) {
        copy_wait<0>();
        store_chunk_moments(a, plan, block, entries, moment, reinterpret_cast<double *>(dynamic + plan.stages_at));
    }
}

/* ---- planning -------------------------------------------------------------------------------- */

/* How chunks lie in `view`, with rows of `row` elements. `apart`: rows are spans of their own,
 * an odd number of packs apart in shared memory, where threads with adjacent heads otherwise met
 * in one bank. */
inline Spans spans_of(const rafter_view &view, int64_t row, int64_t heads, int64_t step, bool apart = false) {
    Spans spans = {};
    spans.kind = Spans::ALL;
    if (!view.data)
        return spans;
    const int64_t n = view.stride[1], h = view.stride[2], width = 16 / rafter_dtype_bytes(view.dtype);
    const bool heads_adjacent = heads == 1 || h == row, tokens_adjacent = step == 1 || n == heads * row;
    spans.kind = !heads_adjacent || apart ? Spans::ROW : tokens_adjacent ? Spans::ALL : Spans::TOKEN;
    spans.row = (int)row;
    const int64_t length = row * (spans.kind == Spans::ALL ? heads * step : spans.kind == Spans::TOKEN ? heads : 1);
    spans.pitch = (int)round_up(length + width - 1, width);
    if (apart && spans.pitch / width % 2 == 0)
        spans.pitch += (int)width;
    spans.packs = Divisor(spans.pitch / width);
    spans.n = n;
    spans.h = h;
    spans.d = view.stride[3];
    return spans;
}

/* Bytes of a chunk in shared memory. There are bytes for all elements that threads may touch. */
inline unsigned staged_bytes(const Spans &spans, int64_t heads, int64_t step, int bytes, int threads) {
    const int64_t count = spans.kind == Spans::ALL ? 1 : spans.kind == Spans::TOKEN ? step : heads * step;
    return (unsigned)round_up(max(count * spans.pitch * bytes, int64_t(threads + 1) * 16), int64_t(128));
}

/* The heads and tokens of a chunk: as many elements as the threads can hold, or fewer if the
 * tensor is so small that some blocks would have none. Then all blocks run at once. */
inline void plan_chunk(Staging *plan, const rafter_cuda_state &device, const lrpe_cosine_call &call) {
    const int64_t batch = call.x.shape[0], length = call.x.shape[1], heads = call.x.shape[2],
                  features = call.x.shape[3], width = 16 / rafter_dtype_bytes(call.x.dtype);
    const bool softmax = plan->tiling.f == LANE_SOFTMAX || plan->tiling.f == BLOCK_SOFTMAX;
    /* Very short rows that are not adjacent take more shared memory than they have elements. */
    const int64_t most = softmax ? THREADS / plan->tiling.lanes
                                 : max(THREADS * width / (features < width ? features + width : features), int64_t(1));
    const int64_t least = min(max(THREADS / features, int64_t(1)), most), wave = (int64_t)device.multiprocessors * 3;
    int64_t rows = min(max(ceil_div(batch * length * heads, wave), least), most);
    for (;; rows = min(rows + ceil_div(rows, int64_t(8)), most)) {
        const int64_t tiles = ceil_div(heads, min(heads, rows));
        plan->step = (int)(tiles == 1 ? min(max(rows / heads, int64_t(1)), length) : 1);
        plan->tiling.tiles = Divisor(tiles);
        plan->heads = Divisor(ceil_div(heads, tiles));
        if (rows == most || tiles * ceil_div(length, (int64_t)plan->step) * batch <= wave)
            break;
    }
    const int64_t chunk_rows = plan->heads.number * plan->step;
    const int64_t threads = softmax ? chunk_rows * plan->tiling.lanes : ceil_div(chunk_rows * features, width);
    plan->threads = (int)min(max(round_up(threads, int64_t(WARP)), int64_t(128)), int64_t(THREADS));
    plan->features = Divisor(features);
    plan->width = Divisor(plan->heads.number * features);
}

/* The tokens and sequences of a block: whole waves of `wave` blocks, and a table of angles for
 * at least 64 tokens if there are so many. Angles are computed once for all sequences of a
 * block. */
inline void plan_waves(Tiling *tiling, const lrpe_cosine_call &call, int64_t step, int64_t wave) {
    constexpr int64_t SERVED = 64;
    const int64_t batch = call.x.shape[0], length = call.x.shape[1], alike = sequences_alike(call);
    const int64_t apart = alike < batch ? batch : 1; /* sequences whose blocks share nothing */
    const int64_t chunks = ceil_div(length, step), work = chunks * tiling->tiles.number * apart;
    const bool dtheta = tiling->f != COLUMN_STATISTICS && call.dtheta.data;
    const int64_t most = dtheta ? chunks : max(SERVED / min(step * alike, SERVED), int64_t(1));
    const int64_t waves = ceil_div(work, wave * most), steps = ceil_div(work, wave * waves);
    tiling->tokens = step * steps;
    tiling->token_chunks = Divisor(ceil_div(chunks, steps));
    /* Few blocks: cut the batch, into one wave, or if each block still has many sequences, into
     * so many waves that the end of the last one does not matter. */
    constexpr int64_t MANY_SEQUENCES = 32, MANY_WAVES = 8;
    const int64_t blocks = tiling->token_chunks.number * tiling->tiles.number;
    const int64_t one_wave = ceil_div(batch, min(max(wave / blocks, int64_t(1)), batch));
    const int64_t many_waves = ceil_div(batch * blocks, wave * MANY_WAVES);
    const int64_t sequences = many_waves >= MANY_SEQUENCES ? min(one_wave, many_waves) : one_wave;
    tiling->sequences = apart > 1 ? 1 : (int)min(sequences, int64_t(4096));
    tiling->sequence_chunks = ceil_div(batch, (int64_t)tiling->sequences);
}

/* f: an act, COLUMN_STATISTICS, or for a softmax over features RAFTER_ACT_SOFTMAX. */
inline Staging plan_staged(const rafter_cuda_state &device, const lrpe_cosine_call &call, int f) {
    Staging plan = {};
    const bool forward = call.common.direction == RAFTER_FORWARD, dtheta = call.dtheta.data != NULL;
    const rafter_view &y = forward ? call.y : call.dy, &out = forward ? call.y : call.dx;
    const int bytes = (int)rafter_dtype_bytes(call.x.dtype);
    const int64_t features = call.x.shape[3], width = 16 / bytes;
    plan.tiling.f = f;
    plan.tiling.lanes = 1;
    if (f == LANE_SOFTMAX) { /* a row has a power of two of threads */
        plan.tiling.lanes = power_at_least(ceil_div(features, width), 1, THREADS);
        plan.tiling.f = plan.tiling.lanes > WARP ? BLOCK_SOFTMAX : LANE_SOFTMAX;
        while (1 << plan.tiling.width_log2 < plan.tiling.lanes)
            plan.tiling.width_log2++;
    }
    plan_chunk(&plan, device, call);
    const int64_t heads = plan.heads.number;
    /* Shorter rows would take more copies of their own than the loads of dy save. */
    plan.heads_first = f < LANE_SOFTMAX && heads > 1 && features >= 32 && y.stride[2] > 0 && y.stride[2] < y.stride[3];
    const bool apart = plan.heads_first && features % width == 0;
    plan.x = spans_of(call.x, features, heads, plan.step, apart);
    plan.y = spans_of(y, 2 * features, heads, plan.step);
    plan.out = forward ? plan.y : spans_of(out, features, heads, plan.step, apart);
    const bool compact = plan.x.kind == Spans::ALL && plan.y.kind == Spans::ALL && plan.out.kind == Spans::ALL;
    plan.layout = y.stride[3] != 1 ? DIRECT : compact ? COMPACT : SPREAD;
    const auto bytes_of = [&](const Spans &spans) {
        return staged_bytes(spans, heads, plan.step, bytes, plan.threads);
    };
    const unsigned stages = forward ? STAGED_STAGES<true> : STAGED_STAGES<false>;
    plan.positions_at = (unsigned)(heads * features * (int64_t)sizeof(AngleStep));
    plan.stages_at = (unsigned)round_up(plan.positions_at + 2 * plan.step * (int64_t)sizeof(Position), int64_t(128));
    plan.dy_at = bytes_of(plan.x);
    plan.stage_bytes = plan.dy_at + (forward || plan.layout == DIRECT ? 0 : bytes_of(plan.y));
    plan.out_at = plan.stages_at + stages * plan.stage_bytes;
    plan.out_bytes = bytes_of(plan.out);
    plan.bytes = plan.out_at + plan.out_bytes + (unsigned)round_up((features + width) * bytes, int64_t(128));

    const int blocks = staged_blocks(forward, plan.tiling.f, dtheta, plan.layout) * THREADS / plan.threads;
    const int fitting = (int)(227 << 10) / (int)(plan.bytes + (1 << 10));
    plan_waves(&plan.tiling, call, plan.step, (int64_t)device.multiprocessors * max(min(blocks, fitting), 1));
    return plan;
}

template <typename T, bool FORWARD, int F, bool DTHETA>
void launch_staged(const rafter_context *context, const lrpe_cosine_call &call, const Staging &plan) {
    auto kernel =
        plan.layout == COMPACT ? staged<T, FORWARD, F, DTHETA, COMPACT> : staged<T, FORWARD, F, DTHETA, SPREAD>;
    if constexpr (!FORWARD)
        if (plan.layout == DIRECT)
            kernel = staged<T, FORWARD, F, DTHETA, DIRECT>;
    launch(context, {plan.tiling.blocks(), plan.threads, plan.bytes, 1, F == COLUMN_STATISTICS}, kernel,
           arguments<T>(call), plan);
}

/* Why a call is not for `staged`, whatever f is; or NULL. */
inline const char *why_not_staged(const lrpe_cosine_call &call) {
    const int64_t width = 16 / rafter_dtype_bytes(call.x.dtype);
    if (call.algorithm == RAFTER_LRPE_BP)
        return "bp has a block walk along the sequence";
    if (takes_packs(call, true))
        return "rows are aligned packs";
    if (call.x.shape[3] > THREADS * width)
        return "the threads of a block cannot hold a row";
    for (const rafter_view *view : {&call.x, &call.y, &call.dx})
        if (view->data && view->stride[3] != 1)
            return "features are not adjacent";
    if (call.act != RAFTER_ACT_SOFTMAX && call.y.data && allows_wide_access(call.y, 4) &&
        call.x.shape[3] % width == 0 && call.x.shape[2] > 1 && call.x.stride[2] != call.x.shape[3])
        return "y is aligned packs, and rows of x lie apart: it takes less to shift them";
    /* Going through shared memory takes longer than a small call has: up to 4 MB it pays off
     * only for rows so short that `rotate` wastes many lanes at their ends. */
    const int64_t bytes = call.x.numel * rafter_dtype_bytes(call.x.dtype), features = call.x.shape[3];
    const bool strided = call.dy.data && call.dy.stride[3] != 1, fills = call.x.shape[2] * features >= WARP * width;
    const bool rotates = strided || (features >= 64 && width == 8 && fills);
    if (call.act != RAFTER_ACT_SOFTMAX && !call.common.batch_invariant &&
        ((bytes <= 4 << 20 && rotates) || (bytes <= 128 << 10 && !fills)))
        return "x is small";
    /* A chunk has at most 2048 tokens. */
    const rafter_view &dy = call.dy;
    if (dy.data && dy.stride[3] != 1 &&
        2048 * dy.stride[1] + dy.shape[2] * dy.stride[2] + dy.shape[3] * dy.stride[3] > INT32_MAX)
        return "dy is spread over more memory than 32 bits can count";
    return NULL;
}

} // namespace lrpe

#endif
