/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine of rows that begin at any address: the kernel `staged`, for staged.cu and sequence_softmax.cu.
 * why_not_staged says which calls take it; others take `rotate` (rotate.cuh).
 *
 * A block works on chunks. A chunk is all features of some heads, of one token or of several; or, if dy is turned
 * (is_turned), it may be some of the features of many heads. A chunk goes through shared memory. It is copied in
 * aligned packs, wherever heads begin, and is then worked on element by element, adjacent threads on adjacent
 * elements. So rows of 33 elements move as fast as rows of 32. The angles of a chunk are computed once for all
 * sequences of the block. staged_memory.cuh has the copies and the places of elements.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_STAGED_CUH
#define RAFTER_LRPE_COSINE_CUDA_STAGED_CUH

#include "ops/lrpe_cosine/cuda/acts.cuh"
#include "ops/lrpe_cosine/cuda/angles.cuh"
#include "ops/lrpe_cosine/cuda/row_softmax.cuh"
#include "ops/lrpe_cosine/cuda/staged_memory.cuh"

namespace lrpe {

/* ---- the kernel ------------------------------------------------------------------------------ */

/* The layouts that there are instances of the kernel for. A span is a sequence of adjacent elements: see Spans. */
enum Layout {
    COMPACT, /* a chunk is one span in every tensor */
    SPREAD,  /* a chunk may have several spans */
    TURNED,  /* as SPREAD, but in dy heads are adjacent instead of features */
    DIRECT   /* as SPREAD, but in dy neither are: it is read directly from memory, element by element */
};

/* Chunks in shared memory: one is worked on, the others are being copied. */
template <bool FORWARD> constexpr int STAGED_STAGES = FORWARD ? 4 : 3;

/* The tokens, sequences, heads and features of a block. */
struct StagedBlock {
    unsigned chunk;
    int64_t first_token, end_token, first_b;
    /* step: tokens of a chunk. missing: how many features fewer than usual the block has. */
    int sequences, first_head, heads, first_feature, features, step, missing;

    template <typename T> DEVICE StagedBlock(const Arguments<T> &a, const Staging &plan) : step(plan.step) {
        const Tiling &tiling = plan.tiling;
        chunk = tiling.tiles.quotient(blockIdx.x);
        const unsigned tile = blockIdx.x - chunk * tiling.tiles.number;
        const unsigned sequence_chunk = tiling.token_chunks.quotient(chunk);
        first_token = (int64_t)(chunk - sequence_chunk * tiling.token_chunks.number) * tiling.tokens;
        end_token = min(first_token + tiling.tokens, a.length);
        first_b = (int64_t)sequence_chunk * tiling.sequences;
        sequences = (int)min(a.batch - first_b, (int64_t)tiling.sequences);
        const unsigned head_tile = plan.feature_tiles.quotient(tile);
        first_head = (int)(head_tile * plan.heads.number);
        heads = min((int)a.heads - first_head, (int)plan.heads.number);
        first_feature = (int)((tile - head_tile * plan.feature_tiles.number) * plan.features.number);
        features = min((int)a.features - first_feature, (int)plan.features.number);
        missing = (int)plan.features.number - features;
    }
    template <typename T> DEVICE ChunkAddress address(const T *tensor, const Strides &stride) const {
        return ChunkAddress(tensor + first_feature * stride.d, stride, first_b, first_token, first_head, sequences,
                            step);
    }
    /* The part of a chunk that exists. tokens_left: from its first token to the block's end. */
    DEVICE Extent extent(int tokens_left) const {
        const int tokens = min(tokens_left, step);
        return Extent{tokens, heads, tokens * heads, missing};
    }
};

/* Loads theta for the entries of the table of angles that a thread fills, all loads at once. */
template <int ORDER, typename T, int N>
DEVICE void read_theta(const Arguments<T> &a, const Staging &plan, const StagedBlock &block, float (&theta)[N]) {
    const auto with = [&](auto zero) {
        const auto *const from = static_cast<const decltype(zero) *>(a.theta) + block.first_head * a.theta_h +
                                 block.first_feature * a.theta_d;
        decltype(zero) loaded[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const Tiling::Place at = place_of<ORDER>(plan, j * plan.threads + threadIdx.x);
            loaded[j] = zero;
            if (at.h < block.heads && at.d < block.features)
                loaded[j] = from[(int)at.h * (int)a.theta_h + (int)at.d * (int)a.theta_d];
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

/* Blocks per multiprocessor: as many as possible without spilling registers. `width`: elements per thread. */
constexpr int staged_blocks(int width, bool forward, int f, bool dtheta, int layout) {
    return !forward && (dtheta || layout == DIRECT || (f >= LANE_SOFTMAX && width > 4)) ? 2 : 3;
}

/* Copies chunks into the stages in the order in which they are worked on: all sequences of some tokens, then of the
 * next tokens. X, DY: which inputs it copies. */
template <typename T, int LAYOUT, bool X, bool DY> struct ChunkLoader {
    static constexpr bool MANY = LAYOUT != COMPACT;
    const Arguments<T> &a;
    const Staging &plan;
    const StagedBlock &block;
    unsigned stages;
    ChunkAddress x, dy; /* of the next chunk to copy */
    int left, b;        /* tokens from that chunk on; its sequence in the block */

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
            if constexpr (DY && LAYOUT == TURNED)
                copy_turned_in(plan, dy.at, extent, a.dy, a.dy_end, to + plan.dy_at);
            else if constexpr (DY)
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

/* What a thread knows about each of its elements: the entry of the table of angles (lower half of entries[j]), the
 * token of the chunk (upper half), and whether the element exists. */
template <typename T> struct Entries {
    static constexpr int COUNT = WIDE<T>;
    unsigned entries[COUNT], exist = 0;

    template <int ORDER> DEVICE Entries(const Staging &plan, const Elements<T, ORDER> &elements) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const auto at = elements[j];
            entries[j] = at.exists ? entry_of<ORDER>(plan, at.head, at.d) | at.token << 16 : 0;
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

/* f and its gradient, for a thread's elements. normalise() replaces x by v, which is x itself, or for a softmax p /
 * scale where p is its result; it returns `scale`. differentiate() replaces g, the gradient of f(x), by that of x; and
 * if VALUES, v by f(x). */
template <typename T, int F> struct StagedF {
    static constexpr int COUNT = WIDE<T>;
    static constexpr bool SOFTMAX = F == LANE_SOFTMAX || F == BLOCK_SOFTMAX;
    const int f;
    const Entries<T> &entries;
    RowThreads<F == BLOCK_SOFTMAX> row_threads;
    int64_t columns; /* COLUMN_STATISTICS: elements from one statistic to the next */

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
    template <bool VALUES>
    DEVICE void differentiate(const float *statistics, float (&v)[COUNT], float scale, float (&g)[COUNT]) {
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
            if constexpr (VALUES)
                activate_all<T>(F, scale, v);
        } else if constexpr (F == COLUMN_STATISTICS) {
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                g[j] = v[j] * (g[j] - statistics[2 * columns + entries.entry(j)]);
        } else if constexpr (F != RAFTER_ACT_NONE) {
            differentiate_all<VALUES, T>(f, v, g);
        }
    }
};

/* Sums the moments of a block over the tokens of a chunk, through `shared`, and stores them. */
template <int ORDER, typename T>
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
        const Tiling::Place at = place_of<ORDER>(plan, i);
        double sum = 0.0;
        if (at.h >= block.heads || at.d >= block.features)
            continue;
        for (int token = 0; token < plan.step; token++)
            sum += shared[token * width + i];
        plan.tiling
            .moments[(block.chunk * a.heads + block.first_head + at.h) * a.features + block.first_feature + at.d] = sum;
    }
}

/* F: Tiling::f, or RUNTIME_F. DTHETA: the moments of dtheta are wanted. LAYOUT: a Layout. */
template <typename T, bool FORWARD, int F, bool DTHETA, int LAYOUT>
__global__ void __launch_bounds__(THREADS, staged_blocks(WIDE<T>, FORWARD, F, DTHETA, LAYOUT))
    staged(const Arguments<T> a, const Staging plan) {
    if (F != COLUMN_STATISTICS)
        wait_for_inputs();
    constexpr int COUNT = WIDE<T>, STAGES = STAGED_STAGES<FORWARD>;
    constexpr bool READS_X = FORWARD || DTHETA || F != RAFTER_ACT_NONE, MANY = LAYOUT != COMPACT;
    constexpr bool SOFTMAX = StagedF<T, F>::SOFTMAX;
    constexpr int ORDER = SOFTMAX ? BY_ROW : LAYOUT == TURNED ? BY_HEAD : BY_FEATURE;
    constexpr int OF_X = MANY      ? MANY_SPANS
                         : SOFTMAX ? ONE_SPAN
                                   : LINEAR,
                  OF_Y = LAYOUT == TURNED ? TURNED_SPANS
                         : MANY           ? MANY_SPANS
                                          : ONE_SPAN;
    DYNAMIC_SHARED_ALIGNED(128, char, dynamic);
    __shared__ typename RowThreads<F == BLOCK_SOFTMAX>::Exchange exchange;
    const AngleTable<T> table = {dynamic, static_cast<int>(plan.width.number)};
    unsigned stages = shared_address(dynamic + plan.stages_at), results = shared_address(dynamic + plan.out_at);
    keep(stages);
    keep(results);
    if constexpr (DTHETA)
        start_next_kernel(); /* which sums the moments */

    const StagedBlock block(a, plan);
    const int features = (int)plan.features.number, sequences = block.sequences;
    ChunkLoader<T, LAYOUT, READS_X, !FORWARD && LAYOUT != DIRECT> loader(a, plan, block, stages);
    ChunkAddress x = loader.x, dy = loader.dy, out = block.address(a.out, FORWARD ? a.y_stride : a.dx_stride);
    float theta[COUNT]; /* loaded first: everything waits for it */
    read_theta<ORDER>(a, plan, block, theta);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++)
        loader.request(i);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (const unsigned i = j * plan.threads + threadIdx.x; i < plan.width.number)
            table.put(i, theta[j]);

    const Elements<T, ORDER> elements = {plan, plan.step * block.heads, block.features};
    const Entries<T> entries(plan, elements);
    const Places<T, OF_X> x_at(plan.x, elements, 0);
    const Places<T, FORWARD ? OF_Y : OF_X> out_at(plan.out, elements, plan.out_bytes);
    const auto dy_at = [&] {
        if constexpr (LAYOUT == DIRECT)
            return DirectPlaces<T>(plan.y, elements, a);
        else
            return Places<T, OF_Y>(plan.y, elements, 0);
    }();
    const int64_t row_columns = a.heads * a.features;
    StagedF<T, F> function = {F == RUNTIME_F ? plan.tiling.f : F,
                              entries,
                              {plan.tiling.lanes, plan.tiling.lanes / WARP, exchange},
                              a.batch * row_columns};
    double moment[DTHETA ? COUNT : 1] = {};
    int stage = 0;
    if constexpr (F == COLUMN_STATISTICS)
        wait_for_previous_kernel(); /* for the statistics; the kernel that wrote them has waited for other inputs */

    /* The positions of a chunk's tokens, from token n on, in two buffers: those of the next tokens are filled in while
     * the current ones are used. fill_positions gets the thread's first number, which was loaded long before. */
    Position *const two_positions = reinterpret_cast<Position *>(dynamic + plan.positions_at);
    const auto number_at = [&](int64_t n, int i) { return a.position(block.first_b, min(n + i, block.end_token - 1)); };
    const auto fill_positions = [&](int64_t n, int which, int64_t first) {
        Position *const to = two_positions + which * plan.step;
        if (static_cast<int>(threadIdx.x) < plan.step)
            to[threadIdx.x] = position_of(first);
        for (int i = threadIdx.x + plan.threads; i < plan.step; i += plan.threads)
            to[i] = position_of(number_at(n, i));
    };
    int which = 0;
    fill_positions(block.first_token, which, number_at(block.first_token, threadIdx.x));
    __syncthreads(); /* for the positions, and the table */

    for (int64_t n = block.first_token; n < block.end_token; n += plan.step) {
        const Extent extent = block.extent((int)(block.end_token - n));
        const auto has = [&](int j) { return entries.exists(j) && entries.token(j) < extent.tokens; };
        const Position *const positions = two_positions + which * plan.step;
        which ^= 1;
        const int64_t next = number_at(n + plan.step, threadIdx.x);
        float cosine[COUNT], sine[COUNT], angle_gradient[DTHETA ? COUNT : 1] = {};
        angles_at<DTHETA>(
            table, false, [&](int j) { return entries.entry(j); }, [&](int j) { return positions[entries.token(j)]; },
            sine, cosine);
#pragma unroll 1
        for (int b = 0; b < sequences; b++) {
            const unsigned staged_x = stages + stage * plan.stage_bytes, staged_dy = staged_x + plan.dy_at;
            const float *const statistics = /* of the chunk's columns */
                plan.tiling.statistics + (block.first_b + b) * row_columns + block.first_head * a.features;
            copy_wait<STAGES - 2>();
            __syncthreads(); /* the chunk is here, and all threads are done with the one before */
            loader.request(stage == 0 ? STAGES - 1 : stage - 1);
            float v[1][COUNT], c[COUNT], s[COUNT], scale = 1.0f; /* v: x; for a softmax p / scale */
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
                    dy_at.read(reinterpret_cast<const T *>(dy.at), a.half, has, c, s);
                else {
                    dy_at.read(staged_dy, dy.low(), c);
                    if constexpr (LAYOUT == TURNED)
                        dy_at.read(staged_dy + plan.y.half_bytes<T>(features),
                                   dy.low() + static_cast<unsigned>(a.half * sizeof(T)), s);
                    else
                        dy_at.read(staged_dy + features * sizeof(T), dy.low(), s);
                }
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                function.template differentiate<DTHETA>(statistics, v[0], scale, g);
                if (!DTHETA || a.out)
                    out_at.write(results, out.low(), g, plan.out_bytes);
                if constexpr (DTHETA)
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        angle_gradient[j] = fmaf(v[0][j], s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
            }
            const bool was_last = b + 1 == sequences;
            if (was_last)
                fill_positions(n + plan.step, which, next);
            __syncthreads();
            if (!DTHETA || a.out)
                copy_out<MANY, T>(plan.out, plan.heads, out.at, extent, results);
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
    }
    if constexpr (DTHETA) {
        copy_wait<0>();
        store_chunk_moments<ORDER>(a, plan, block, entries, moment,
                                   reinterpret_cast<double *>(dynamic + plan.stages_at));
    }
}

/* ---- planning -------------------------------------------------------------------------------- */

/* How chunks lie in `view`, with rows of `row` elements. `apart`: each row is a span of its own, and these are an odd
 * number of packs apart in shared memory, which avoids bank conflicts between threads with adjacent heads. */
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

/* The same for a turned dy. `all`: the chunk has all heads. */
inline Spans turned_spans_of(const rafter_view &dy, int64_t features, int64_t heads, bool all) {
    Spans spans = {};
    const int64_t width = 16 / rafter_dtype_bytes(dy.dtype);
    spans.kind = all && dy.stride[3] == heads ? Spans::HALF : Spans::FEATURE;
    spans.pitch = (int)round_up((spans.kind == Spans::HALF ? features : 1) * heads + width - 1, width);
    spans.packs = Divisor(spans.pitch / width);
    spans.n = dy.stride[1];
    spans.d = dy.stride[3];
    spans.half = dy.shape[3] / 2 * dy.stride[3];
    return spans;
}

/* Bytes of shared memory for a chunk of one tensor, including elements that threads access though the chunk does not
 * have them. */
inline unsigned staged_bytes(const Spans &spans, const Staging &plan, int bytes) {
    const int64_t heads = plan.heads.number, features = plan.features.number, step = plan.step;
    const int64_t count = spans.kind == Spans::ALL       ? 1
                          : spans.kind == Spans::TOKEN   ? step
                          : spans.kind == Spans::ROW     ? heads * step
                          : spans.kind == Spans::FEATURE ? 2 * features * step
                                                         : 2 * step;
    return (unsigned)round_up(max(count * spans.pitch * bytes, int64_t(plan.threads + 1) * 16), int64_t(128));
}

/* Sets the heads and tokens of a chunk, which has `least` to `most` rows: as many elements as the threads can hold
 * (`most`), or fewer if the tensor is so small that some multiprocessors would be idle. Then all blocks run at once. */
inline void plan_rows(Staging *plan, const rafter_cuda_state &device, const lrpe_cosine_call &call, int64_t least,
                      int64_t most) {
    const int64_t batch = call.x.shape[0], length = call.x.shape[1], heads = call.x.shape[2];
    const int64_t wave = (int64_t)device.multiprocessors * 3;
    int64_t rows = min(max(ceil_div(batch * length * heads, wave), least), most);
    for (;; rows = min(rows + ceil_div(rows, int64_t(8)), most)) {
        const int64_t tiles = ceil_div(heads, min(heads, rows));
        plan->step = (int)(tiles == 1 ? min(max(rows / heads, int64_t(1)), length) : 1);
        plan->tiling.tiles = Divisor(tiles);
        plan->heads = Divisor(ceil_div(heads, tiles));
        if (rows == most || tiles * ceil_div(length, (int64_t)plan->step) * batch <= wave)
            break;
    }
    plan->features = Divisor(call.x.shape[3]);
    plan->feature_tiles = Divisor(1);
}

/* Sets the heads, tokens and features of a chunk, and the threads of a block. */
inline void plan_chunk(Staging *plan, const rafter_cuda_state &device, const lrpe_cosine_call &call) {
    const int64_t heads = call.x.shape[2], features = call.x.shape[3], bytes = rafter_dtype_bytes(call.x.dtype),
                  width = 16 / bytes;
    const bool softmax = plan->tiling.f == LANE_SOFTMAX || plan->tiling.f == BLOCK_SOFTMAX;
    /* Very short rows that are not adjacent take up to a pack more of shared memory than they have elements. */
    const int64_t most = softmax ? THREADS / plan->tiling.lanes
                                 : max(THREADS * width / (features < width ? features + width : features), int64_t(1));
    const int64_t least = min(max(THREADS / features, int64_t(1)), most);
    /* If dy is turned, a chunk should have at least SIDE bytes of adjacent heads. If it cannot have that with all
     * features, it takes only some features. */
    constexpr int64_t SIDE = 64;
    const int64_t side = min(SIDE / bytes, heads), wanted = ceil_div(heads, ceil_div(heads, min(heads, most)));
    if (plan->layout == TURNED && wanted < side) {
        const int64_t head_tiles = ceil_div(heads, int64_t(SIDE)), head_count = ceil_div(heads, head_tiles);
        const int64_t fitting = max(THREADS * width / head_count / 16 * 16, int64_t(16));
        const int64_t feature_count =
            min(round_up(ceil_div(features, ceil_div(features, fitting)), int64_t(16)), features);
        plan->step = 1;
        plan->heads = Divisor(head_count);
        plan->features = Divisor(feature_count);
        plan->feature_tiles = Divisor(ceil_div(features, feature_count));
        plan->tiling.tiles = Divisor(head_tiles * plan->feature_tiles.number);
    } else {
        plan_rows(plan, device, call, plan->layout == TURNED ? max(least, side) : least, most);
    }
    const int64_t chunk_rows = plan->heads.number * plan->step, chunk_features = plan->features.number;
    const int64_t threads = softmax ? chunk_rows * plan->tiling.lanes : ceil_div(chunk_rows * chunk_features, width);
    plan->threads = (int)min(max(round_up(threads, int64_t(WARP)), int64_t(128)), int64_t(THREADS));
    plan->width = Divisor(plan->heads.number * chunk_features);
}

/* f: the act of the call, or COLUMN_STATISTICS for a softmax over the sequence. */
inline Staging plan_staged(const rafter_cuda_state &device, const lrpe_cosine_call &call, int f) {
    Staging plan = {};
    const bool forward = call.common.direction == RAFTER_FORWARD, dtheta = call.dtheta.data != NULL;
    const rafter_view &y = forward ? call.y : call.dy, &out = forward ? call.y : call.dx;
    const int bytes = (int)rafter_dtype_bytes(call.x.dtype);
    const int64_t width = 16 / bytes;
    plan.tiling.f = f;
    plan.tiling.lanes = 1;
    if (f == LANE_SOFTMAX) { /* the threads of a row are a power of two */
        plan.tiling.lanes = power_at_least(ceil_div(call.x.shape[3], width), 1, THREADS);
        plan.tiling.f = plan.tiling.lanes > WARP ? BLOCK_SOFTMAX : LANE_SOFTMAX;
        while (1 << plan.tiling.width_log2 < plan.tiling.lanes)
            plan.tiling.width_log2++;
    }
    plan.layout = f < LANE_SOFTMAX && is_turned(call) ? TURNED : y.stride[3] != 1 ? DIRECT : SPREAD;
    plan_chunk(&plan, device, call);
    const int64_t heads = plan.heads.number, features = plan.features.number;
    /* Not for short rows: to copy each row on its own would cost more than the bank conflicts do. */
    const bool apart =
        plan.layout == TURNED && (plan.feature_tiles.number > 1 || (features >= 32 && features % width == 0));
    plan.x = spans_of(call.x, features, heads, plan.step, apart);
    plan.y = plan.layout == TURNED ? turned_spans_of(y, features, heads, heads == call.x.shape[2])
                                   : spans_of(y, 2 * features, heads, plan.step);
    plan.out = forward ? plan.y : spans_of(out, features, heads, plan.step, apart);
    const bool compact = plan.x.kind == Spans::ALL && plan.y.kind == Spans::ALL && plan.out.kind == Spans::ALL;
    if (plan.layout == SPREAD && compact)
        plan.layout = COMPACT;
    const auto bytes_of = [&](const Spans &spans) { return staged_bytes(spans, plan, bytes); };
    const unsigned stages = forward ? STAGED_STAGES<true> : STAGED_STAGES<false>;
    const int table_entry = bytes == 2 ? AngleTable<bf16>::BYTES : AngleTable<float>::BYTES;
    plan.positions_at = (unsigned)round_up(heads * features * table_entry, int64_t(16));
    plan.stages_at = (unsigned)round_up(plan.positions_at + 2 * plan.step * (int64_t)sizeof(Position), int64_t(128));
    plan.dy_at = bytes_of(plan.x);
    plan.stage_bytes = plan.dy_at + (forward || plan.layout == DIRECT ? 0 : bytes_of(plan.y));
    plan.out_at = plan.stages_at + stages * plan.stage_bytes;
    plan.out_bytes = bytes_of(plan.out);
    plan.bytes = plan.out_at + plan.out_bytes + (unsigned)round_up((features + width) * bytes, int64_t(128));

    const int blocks = staged_blocks((int)width, forward, plan.tiling.f, dtheta, plan.layout) * THREADS / plan.threads;
    const int fitting = (int)(227 << 10) / (int)(plan.bytes + (1 << 10));
    const bool own_positions = sequences_alike(call) < call.x.shape[0]; /* every step loads positions */
    plan_waves(&plan.tiling, call, plan.step, (int64_t)device.multiprocessors * max(min(blocks, fitting), 1),
               own_positions ? 1 : 32);
    return plan;
}

template <typename T, bool FORWARD, int F, bool DTHETA>
void launch_staged(const rafter_context *context, const lrpe_cosine_call &call, const Staging &plan) {
    auto kernel =
        plan.layout == COMPACT ? staged<T, FORWARD, F, DTHETA, COMPACT> : staged<T, FORWARD, F, DTHETA, SPREAD>;
    if constexpr (!FORWARD)
        if (plan.layout == DIRECT)
            kernel = staged<T, FORWARD, F, DTHETA, DIRECT>;
    if constexpr (!FORWARD && F < LANE_SOFTMAX)
        if (plan.layout == TURNED)
            kernel = staged<T, FORWARD, F, DTHETA, TURNED>;
    launch(context, {plan.tiling.blocks(), plan.threads, plan.bytes}, kernel, arguments<T>(call), plan);
}

/* Why a call is not for `staged`, whatever f is; or NULL. */
inline const char *why_not_staged(const lrpe_cosine_call &call) {
    const int64_t width = 16 / rafter_dtype_bytes(call.x.dtype);
    if (call.algorithm == RAFTER_LRPE_BP)
        return "bp has a block walk along the sequence";
    if (takes_packs(call, true))
        return "rows are aligned packs";
    if (takes_half_packs(call) && call.x.shape[3] >= 64 && sequences_alike(call) < MANY_ALIKE &&
        !call.common.batch_invariant)
        return "rows are aligned packs of 8 bytes, and few sequences share angles: that takes fewer instructions";
    if (call.x.shape[3] > THREADS * width)
        return "the threads of a block cannot hold a row";
    if (rafter_span_bytes(&call.theta) > INT32_MAX)
        return "theta is spread over more memory than 32 bits can count";
    for (const rafter_view *view : {&call.x, &call.y, &call.dx})
        if (view->data && view->stride[3] != 1)
            return "features are not adjacent";
    if (call.act != RAFTER_ACT_SOFTMAX && call.y.data && allows_wide_access(call.y, 4) &&
        call.x.shape[3] % width == 0 && call.x.shape[2] > 1 && call.x.stride[2] != call.x.shape[3])
        return "y is aligned packs, and rows of x lie apart: it takes less to shift them";
    /* For small calls, the latency of going through shared memory counts: up to 4 MB it pays only for rows that are so
     * short that `rotate` would leave many lanes idle at their ends. */
    const rafter_view &dy = call.dy;
    const int64_t bytes = call.x.numel * rafter_dtype_bytes(call.x.dtype), features = call.x.shape[3];
    const bool strided = dy.data && dy.stride[3] != 1, fills = call.x.shape[2] * features >= WARP * width;
    const bool rotates = strided || (features >= 64 && width == 8 && fills);
    if (call.act != RAFTER_ACT_SOFTMAX && !call.common.batch_invariant &&
        ((bytes <= 4 << 20 && rotates) || (bytes <= 128 << 10 && !fills)))
        return "x is small";
    if (is_turned(call))
        return NULL;
    /* A chunk has at most 2048 tokens. */
    if (strided && 2048 * dy.stride[1] + dy.shape[2] * dy.stride[2] + dy.shape[3] * dy.stride[3] > INT32_MAX)
        return "dy is spread over more memory than 32 bits can count";
    return NULL;
}

} // namespace lrpe

#endif
