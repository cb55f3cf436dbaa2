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
#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* ---- a chunk in memory and in shared memory -------------------------------------------------- */

/* How a chunk lies in one tensor: in spans of adjacent elements. In shared memory a span begins as
 * far after a multiple of 16 bytes as in memory. */
struct Spans {
    enum Kind { ROW, TOKEN, ALL } kind; /* what a span holds */
    int row, pitch;                     /* elements: of a row; from span to span in shared memory */
    Divisor packs;                      /* from span to span in shared memory */
    int64_t n, h;                       /* strides of tokens and heads in memory */
};

struct Staging {
    Tiling tiling; /* tiles of heads; step tokens at a time */
    int step;      /* tokens of a chunk; more than one only if it has all heads */
    Divisor heads, features;
    Spans x, y, out; /* y: dy. out: y or dx */
    /* Dynamic shared memory, in bytes: the table of angles, the stages, each with x and dy, and the
     * output. */
    unsigned stages_at, stage_bytes, dy_at, out_at, bytes;
};

/* The part of a chunk that exists. */
struct Extent {
    int tokens, heads, rows;
};

/* Calls f(address of a pack in memory, its number in shared memory, first, end) for the thread's packs
 * of a chunk. Elements first to end - 1 of the pack belong to the chunk. */
template <typename T, class F>
DEVICE void for_each_pack(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, F f) {
    constexpr int N = WIDE<T>;
    const int count = spans.kind == Spans::ALL ? 1 : spans.kind == Spans::TOKEN ? extent.tokens : extent.rows;
    const int length = spans.row * (spans.kind == Spans::ALL     ? extent.rows
                                    : spans.kind == Spans::TOKEN ? extent.heads
                                                                 : 1);
    const int packs = static_cast<int>(spans.packs.number);
    for (int k = threadIdx.x; k < count * packs; k += THREADS) {
        int pack = k;
        T *span = chunk;
        if (count > 1) {
            const int s = spans.packs.quotient(k);
            pack = k - s * packs;
            const int token = spans.kind == Spans::TOKEN ? s : static_cast<int>(heads.quotient(s));
            const int head = spans.kind == Spans::TOKEN ? 0 : s - token * static_cast<int>(heads.number);
            span += token * spans.n + head * spans.h;
        }
        const int before = pack * N - offset_in_pack(span); /* from the span to the pack */
        if (before < length)
            f(span + before, k, max(-before, 0), min(length - before, N));
    }
}

/* Starts to copy a chunk into shared memory. Nothing outside of [begin, end) is read. */
template <typename T>
DEVICE void copy_in(const Spans &spans, const Divisor &heads, const T *chunk, const Extent &extent, const T *begin,
                    const T *end, char *to) {
    for_each_pack(spans, heads, chunk, extent, [&](const T *pack, int k, int from, int until) {
        Pack<T, WIDE<T>> *const place = reinterpret_cast<Pack<T, WIDE<T>> *>(to) + k;
        if (pack >= begin && pack + WIDE<T> <= end)
            copy_async(place, pack);
        else
            for (int j = from; j < until; j++)
                place->v[j] = pack[j];
    });
}

/* Copies a chunk out of shared memory. */
template <typename T>
DEVICE void copy_out(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, const char *from) {
    for_each_pack(spans, heads, chunk, extent, [&](T *pack, int k, int first, int until) {
        const Pack<T, WIDE<T>> *const place = reinterpret_cast<const Pack<T, WIDE<T>> *>(from) + k;
        if (until - first == WIDE<T>)
            store_once(pack, *place);
        else
            for (int j = first; j < until; j++)
                pack[j] = place->v[j];
    });
}

/* Where the thread's elements are in shared memory. MANY: there may be several spans; `place` then holds
 * the place without the span's distance from a pack, times 16, plus how much further from a pack the
 * span begins than the chunk. In bytes. */
template <typename T, bool MANY> struct Places {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[COUNT];

    DEVICE void find(const Spans &spans, const Staging &plan) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const unsigned e = j * THREADS + threadIdx.x, row = plan.features.quotient(e),
                           d = e - row * plan.features.number;
            if constexpr (MANY) {
                const unsigned token = plan.heads.quotient(row), head = row - token * plan.heads.number;
                const unsigned span = spans.kind == Spans::ALL ? 0 : spans.kind == Spans::TOKEN ? token : row;
                const unsigned in_span = spans.kind == Spans::ALL ? row : spans.kind == Spans::TOKEN ? head : 0;
                const unsigned shift = spans.kind == Spans::ALL     ? 0
                                       : spans.kind == Spans::TOKEN ? token * static_cast<unsigned>(spans.n)
                                                                    : token * static_cast<unsigned>(spans.n) +
                                                                          head * static_cast<unsigned>(spans.h);
                place[j] = (span * spans.pitch + in_span * spans.row + d) * sizeof(T) * 16 + shift * sizeof(T) % 16;
            } else {
                place[j] = (row * spans.row + d) * sizeof(T);
            }
        }
    }
    /* `chunk`: its address in memory. */
    DEVICE unsigned operator()(int j, const T *chunk) const {
        const unsigned low = static_cast<unsigned>(reinterpret_cast<uintptr_t>(chunk));
        if constexpr (MANY)
            return (place[j] >> 4) + (place[j] + low) % 16;
        else
            return place[j] + low % 16;
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

template <bool FORWARD> constexpr int STAGED_STAGES = FORWARD ? 4 : 3;

/* The elements of a chunk as f wants them, with f known to the compiler inside of the loops. */
template <typename T, int N> DEVICE void activate_all(int f, float (&v)[N]) {
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

/* The thread's elements of a chunk: number j is element threadIdx.x + j * THREADS. */
template <typename T> struct Elements {
    static constexpr int COUNT = WIDE<T>;
    int count; /* of the whole chunk */

    DEVICE bool has(int j) const {
        return j * THREADS + static_cast<int>(threadIdx.x) < count;
    }
    template <bool MANY>
    DEVICE void read(const char *from, const Places<T, MANY> &at, const T *chunk, float (&v)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = has(j) ? to_float(*reinterpret_cast<const T *>(from + at(j, chunk))) : 0.0f;
    }
    template <bool MANY>
    DEVICE void write(char *to, const Places<T, MANY> &at, const T *chunk, const float (&v)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (has(j))
                *reinterpret_cast<T *>(to + at(j, chunk)) = from_float<T>(v[j]);
    }
};

/* Sums the moments of a block over the tokens of a chunk, in `shared`, and stores them. */
template <typename T>
DEVICE void store_chunk_moments(const Arguments<T> &a, const Staging &plan, int64_t chunk, int first_head, int heads,
                                const double (&moment)[WIDE<T>], double *shared) {
    const int width = heads * static_cast<int>(plan.features.number);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WIDE<T>; j++)
        if (const int e = j * THREADS + threadIdx.x; e < plan.step * width)
            shared[e] = moment[j];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        double sum = 0.0;
        for (int token = 0; token < plan.step; token++)
            sum += shared[token * width + i];
        plan.tiling.moments[(chunk * a.heads + first_head) * a.features + i] = sum;
    }
}

template <typename T, bool FORWARD, int F, bool DTHETA, bool MANY>
__global__ void __launch_bounds__(THREADS, DTHETA ? 2 : 3) staged(const Arguments<T> a, const Staging plan) {
    constexpr int COUNT = WIDE<T>, STAGES = STAGED_STAGES<FORWARD>;
    constexpr bool READS_X = FORWARD || DTHETA || F != RAFTER_ACT_NONE;
    extern __shared__ __align__(128) char dynamic[];
    AngleStep *const angle_steps = reinterpret_cast<AngleStep *>(dynamic);
    char *const stages = dynamic + plan.stages_at, *const results = dynamic + plan.out_at;
    const int f = F == RUNTIME_F ? plan.tiling.f : F;
    if constexpr (DTHETA)
        start_next_kernel(); /* the sum of moments */

    /* The block's tokens, sequences and heads. */
    const unsigned chunk = plan.tiling.tiles.quotient(blockIdx.x), tile = blockIdx.x - chunk * plan.tiling.tiles.number;
    const unsigned sequence_chunk = plan.tiling.token_chunks.quotient(chunk);
    const int64_t first_token =
        (int64_t)(chunk - sequence_chunk * plan.tiling.token_chunks.number) * plan.tiling.tokens;
    const int64_t end_token = min(first_token + plan.tiling.tokens, a.length);
    const int64_t first_b = (int64_t)sequence_chunk * plan.tiling.sequences;
    const int sequences = (int)min(a.batch - first_b, (int64_t)plan.tiling.sequences);
    const int first_head = (int)(tile * plan.heads.number);
    const int heads = min((int)a.heads - first_head, (int)plan.heads.number);
    const int features = (int)plan.features.number, width = heads * features;
    const auto extent_at = [&](int64_t n) {
        const int tokens = (int)min(end_token - n, (int64_t)plan.step);
        return Extent{tokens, heads, tokens * heads};
    };
    const auto offset = [&](const Strides &stride, int64_t n, int b) {
        return (first_b + b) * stride.b + n * stride.n + first_head * stride.h;
    };

    int64_t next_token = first_token; /* of the next chunk to load */
    int next_b = 0;
    const auto request = [&](int stage) {
        char *const to = stages + stage * plan.stage_bytes;
        if (next_token < end_token) {
            const Extent extent = extent_at(next_token);
            if constexpr (READS_X)
                copy_in(plan.x, plan.heads, a.x + offset(a.x_stride, next_token, next_b), extent, a.x, a.x_end, to);
            if constexpr (!FORWARD)
                copy_in(plan.y, plan.heads, a.dy + offset(a.y_stride, next_token, next_b), extent, a.dy, a.dy_end,
                        to + plan.dy_at);
            if (++next_b == sequences) {
                next_b = 0;
                next_token += plan.step;
            }
        }
        copy_commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        request(i);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const int h = plan.features.quotient(i);
        angle_steps[i] = angle_step(a.theta_at(first_head + h, i - h * features));
    }
    Places<T, MANY> x_at, dy_at, out_at;
    x_at.find(plan.x, plan);
    dy_at.find(plan.y, plan);
    out_at.find(plan.out, plan);
    const Strides &out_stride = FORWARD ? a.y_stride : a.dx_stride;
    double moment[DTHETA ? COUNT : 1] = {};
    int stage = 0;
    __syncthreads(); /* the table */

    for (int64_t n = first_token; n < end_token; n += plan.step) {
        const Extent extent = extent_at(n);
        const Elements<T> elements = {extent.tokens * width};
        float cosine[COUNT], sine[COUNT], angle_gradient[DTHETA ? COUNT : 1] = {};
        int64_t position[DTHETA ? COUNT : 1];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            cosine[j] = sine[j] = 0.0f;
            if (elements.has(j)) {
                const int e = j * THREADS + threadIdx.x;
                const int token = plan.step == 1 ? 0 : (int)plan.heads.quotient(plan.features.quotient(e));
                const int64_t at = a.position(first_b, n + token);
                float s[1], c[1];
                sincos_of<T>(angle_steps + (e - token * width), 0, position_of(at), s, c);
                sine[j] = s[0];
                cosine[j] = c[0];
                if constexpr (DTHETA)
                    position[j] = at;
            }
        }
#pragma unroll 1
        for (int b = 0; b < sequences; b++) {
            const char *const staged_x = stages + stage * plan.stage_bytes, *const staged_dy = staged_x + plan.dy_at;
            T *const out = a.out + offset(out_stride, n, b);
            copy_wait<STAGES - 2>();
            __syncthreads(); /* the chunk is here, and all threads are done with the one before */
            request(stage == 0 ? STAGES - 1 : stage - 1);
            float v[COUNT];
            if constexpr (READS_X)
                elements.read(staged_x, x_at, a.x + offset(a.x_stride, n, b), v);
            if constexpr (FORWARD) {
                activate_all<T>(f, v);
                float c[COUNT], s[COUNT];
#pragma unroll
                for (int j = 0; j < COUNT; j++) {
                    c[j] = v[j] * cosine[j];
                    s[j] = v[j] * sine[j];
                }
                elements.write(results, out_at, out, c);
                elements.write(results + features * sizeof(T), out_at, out, s);
            } else {
                const T *const dy = a.dy + offset(a.y_stride, n, b);
                float c[COUNT], s[COUNT], g[COUNT];
                elements.read(staged_dy, dy_at, dy, c);
                elements.read(staged_dy + features * sizeof(T), dy_at, dy, s);
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                if constexpr (READS_X)
                    gradient_of_all<T>(f, v, g);
                if (!DTHETA || a.out)
                    elements.write(results, out_at, out, g);
                if constexpr (DTHETA) {
                    activate_all<T>(f, v);
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        if (elements.has(j))
                            angle_gradient[j] = fmaf(v[j], s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
                }
            }
            __syncthreads();
            if (!DTHETA || a.out)
                copy_out(plan.out, plan.heads, out, extent, results);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                if (elements.has(j))
                    moment[j] += (double)position[j] * (double)angle_gradient[j];
    }
    if constexpr (DTHETA) {
        copy_wait<0>();
        store_chunk_moments(a, plan, chunk, first_head, heads, moment, reinterpret_cast<double *>(stages));
    }
}

/* ---- planning -------------------------------------------------------------------------------- */

/* How chunks lie in `view`, with rows of `row` elements. */
inline Spans spans_of(const rafter_view &view, int64_t row, int64_t heads, int64_t step) {
    Spans spans = {};
    if (!view.data)
        return spans;
    const int64_t n = view.stride[1], h = view.stride[2], width = 16 / rafter_dtype_bytes(view.dtype);
    const bool heads_adjacent = heads == 1 || h == row, tokens_adjacent = step == 1 || n == heads * row;
    spans.kind = !heads_adjacent ? Spans::ROW : tokens_adjacent ? Spans::ALL : Spans::TOKEN;
    spans.row = (int)row;
    const int64_t length = row * (spans.kind == Spans::ALL ? heads * step : spans.kind == Spans::TOKEN ? heads : 1);
    spans.pitch = (int)round_up(length + width - 1, width);
    spans.packs = Divisor(spans.pitch / width);
    spans.n = n;
    spans.h = h;
    return spans;
}

/* Bytes of a chunk in shared memory. */
inline unsigned staged_bytes(const Spans &spans, int64_t heads, int64_t step, int bytes) {
    const int64_t count = spans.kind == Spans::ALL ? 1 : spans.kind == Spans::TOKEN ? step : heads * step;
    return (unsigned)round_up(count * spans.pitch * bytes, int64_t(128));
}

/* Chunks of as many elements as the threads can hold, or of fewer if the tensor is so small that some
 * blocks would have none. */
inline Staging plan_staged(const rafter_cuda_state &device, const lrpe_cosine_call &call) {
    Staging plan = {};
    const bool forward = call.common.direction == RAFTER_FORWARD;
    const rafter_view &y = forward ? call.y : call.dy, &out = forward ? call.y : call.dx;
    const int bytes = (int)rafter_dtype_bytes(call.x.dtype);
    const int64_t heads = call.x.shape[2], features = call.x.shape[3], width = 16 / bytes, most = THREADS * width;
    const bool rows_adjacent = heads == 1 || (call.x.stride[2] == features && y.stride[2] == 2 * features &&
                                              (forward || !out.data || out.stride[2] == features));
    const int64_t most_rows = max(most / (rows_adjacent ? features : features + width), int64_t(1));
    const int64_t least_rows = min(max(THREADS / features, int64_t(1)), most_rows);
    const int64_t blocks = (int64_t)device.multiprocessors * 3, rows = call.x.numel / features / blocks;
    const int64_t chunk_rows = min(max(rows, least_rows), most_rows);
    const int64_t tiles = ceil_div(heads, min(heads, chunk_rows)), chunk_heads = ceil_div(heads, tiles);
    plan.step = (int)(tiles == 1 ? min(max(chunk_rows / heads, int64_t(1)), call.x.shape[1]) : 1);
    plan.heads = Divisor(chunk_heads);
    plan.features = Divisor(features);
    plan.tiling.f = (int)call.act;
    plan.tiling.tiles = Divisor(tiles);
    plan_blocks(&plan.tiling, device, call, plan.step);

    plan.x = spans_of(call.x, features, chunk_heads, plan.step);
    plan.y = spans_of(y, 2 * features, chunk_heads, plan.step);
    plan.out = forward ? plan.y : spans_of(out, features, chunk_heads, plan.step);
    const unsigned x_bytes = staged_bytes(plan.x, chunk_heads, plan.step, bytes),
                   y_bytes = staged_bytes(plan.y, chunk_heads, plan.step, bytes),
                   out_bytes = out.data ? staged_bytes(plan.out, chunk_heads, plan.step, bytes) : 0;
    const unsigned stages = forward ? STAGED_STAGES<true> : STAGED_STAGES<false>;
    plan.stages_at = (unsigned)round_up(chunk_heads * features * (int64_t)sizeof(AngleStep), int64_t(128));
    plan.dy_at = x_bytes;
    plan.stage_bytes = x_bytes + (forward ? 0 : y_bytes);
    plan.out_at = plan.stages_at + stages * plan.stage_bytes;
    plan.bytes = plan.out_at + out_bytes;
    return plan;
}

/* Whether a chunk may have several spans in some tensor. */
inline bool has_many_spans(const Staging &plan, bool has_out) {
    return plan.x.kind != Spans::ALL || plan.y.kind != Spans::ALL || (has_out && plan.out.kind != Spans::ALL);
}

} // namespace lrpe

#endif
