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
    Tiling tiling;                  /* tiles of heads; step tokens at a time */
    int layout;                     /* a Layout */
    int step;                       /* tokens of a chunk; more than one only if it has all heads */
    Divisor heads, features, width; /* width: heads * features */
    Spans x, y, out;                /* y: dy. out: y or dx */
    /* Dynamic shared memory, in bytes: the table of angles, the positions of two chunks in turns, the
     * stages, each with x and dy, and the output. */
    unsigned positions_at, stages_at, stage_bytes, dy_at, out_at, out_bytes, bytes;
};

/* The part of a chunk that exists. */
struct Extent {
    int tokens, heads, rows;
};

/* Calls f(address of a pack in memory, its number in shared memory, first, end) for the thread's packs
 * of a chunk. Elements first to end - 1 of the pack belong to the chunk. MANY: it may have several
 * spans. */
template <bool MANY, typename T, class F>
DEVICE void for_each_pack(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, F f) {
    constexpr int N = WIDE<T>;
    const bool all = !MANY || spans.kind == Spans::ALL, of_tokens = spans.kind == Spans::TOKEN;
    const int length = spans.row * (all ? extent.rows : of_tokens ? extent.heads : 1);
    if (all) {
        const int shift = offset_in_pack(chunk), end = shift + length;
        T *const aligned = chunk - shift;
        for (int k = threadIdx.x; k * N < end; k += THREADS)
            f(aligned + k * N, k, k == 0 ? shift : 0, min(end - k * N, N));
        return;
    }
    const int count = of_tokens ? extent.tokens : extent.rows, packs = static_cast<int>(spans.packs.number);
    for (int k = threadIdx.x; k < count * packs; k += THREADS) {
        const int s = spans.packs.quotient(k), token = of_tokens ? s : static_cast<int>(heads.quotient(s));
        const int head = of_tokens ? 0 : s - token * static_cast<int>(heads.number);
        T *const span = chunk + token * spans.n + head * spans.h;
        const int before = (k - s * packs) * N - offset_in_pack(span); /* from the span to the pack */
        if (before < length)
            f(span + before, k, max(-before, 0), min(length - before, N));
    }
}

/* Starts to copy a chunk into shared memory. Nothing outside of [begin, end) is read. */
template <bool MANY, typename T>
DEVICE void copy_in(const Spans &spans, const Divisor &heads, const T *chunk, const Extent &extent, const T *begin,
                    const T *end, char *to) {
    for_each_pack<MANY>(spans, heads, chunk, extent, [&](const T *pack, int k, int from, int until) {
        Pack<T, WIDE<T>> *const place = reinterpret_cast<Pack<T, WIDE<T>> *>(to) + k;
        if (pack >= begin && pack + WIDE<T> <= end)
            copy_async(place, pack);
        else
#pragma unroll 1
            for (int j = from; j < until; j++)
                place->v[j] = pack[j];
    });
}

/* Copies a chunk out of shared memory. */
template <bool MANY, typename T>
DEVICE void copy_out(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, const char *from) {
    for_each_pack<MANY>(spans, heads, chunk, extent, [&](T *pack, int k, int first, int until) {
        const Pack<T, WIDE<T>> *const place = reinterpret_cast<const Pack<T, WIDE<T>> *>(from) + k;
        if (until - first == WIDE<T>)
            store_once(pack, *place);
        else
#pragma unroll 1
            for (int j = first; j < until; j++)
                pack[j] = place->v[j];
    });
}

/* Keeps the compiler from computing `a` again wherever it is used. */
DEVICE void keep(unsigned &a) {
    asm volatile("" : "+r"(a));
}

/* The elements of a chunk that a thread has. Adjacent threads have adjacent elements: of the chunk, or if
 * ROWS, of a row, which `lanes` threads hold. */
template <typename T, bool ROWS> struct Elements {
    static constexpr int COUNT = WIDE<T>;
    const Staging &plan;
    int rows; /* that exist */

    struct Element {
        bool exists;
        unsigned token, head, row, d;
    };
    DEVICE Element operator[](int j) const {
        const unsigned e = j * THREADS + threadIdx.x, lanes_log2 = plan.tiling.width_log2;
        Element at;
        if (ROWS) {
            at.row = threadIdx.x >> lanes_log2;
            at.d = (j << lanes_log2) + (threadIdx.x & (plan.tiling.lanes - 1));
        } else {
            at.row = plan.features.quotient(e);
            at.d = e - at.row * plan.features.number;
        }
        at.token = plan.heads.quotient(at.row);
        at.head = at.row - at.token * plan.heads.number;
        at.exists = at.row < static_cast<unsigned>(rows) && at.d < plan.features.number;
        return at;
    }
};

enum Placing {
    LINEAR,    /* one span without gaps: element e of the chunk is element e of the span */
    ONE_SPAN,  /* with gaps */
    MANY_SPANS /* `place` holds the place without the span's distance from a pack, times 16, plus how much
                  further from a pack the span begins than the chunk */
};

/* Where the thread's elements are in the shared memory of a tensor, in bytes. Those that the chunk does
 * not have are `elsewhere`, or if LINEAR, after its end. */
template <typename T, int PLACING> struct Places {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[PLACING == LINEAR ? 1 : COUNT];

    template <bool ROWS> DEVICE Places(const Spans &spans, const Elements<T, ROWS> &elements, unsigned elsewhere) {
        if constexpr (PLACING == LINEAR)
            place[0] = threadIdx.x * sizeof(T);
        else
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const typename Elements<T, ROWS>::Element at = elements[j];
                if constexpr (PLACING == MANY_SPANS) {
                    const bool all = spans.kind == Spans::ALL, of_tokens = spans.kind == Spans::TOKEN;
                    const unsigned span = all ? 0 : of_tokens ? at.token : at.row;
                    const unsigned in_span = all ? at.row : of_tokens ? at.head : 0;
                    const unsigned shift = (all ? 0 : at.token * static_cast<unsigned>(spans.n)) +
                                           (all || of_tokens ? 0 : at.head * static_cast<unsigned>(spans.h));
                    place[j] = at.exists ? (span * spans.pitch + in_span * spans.row + at.d) * sizeof(T) * 16 +
                                               shift * sizeof(T) % 16
                                         : elsewhere * 16;
                } else {
                    place[j] = at.exists ? (at.row * spans.row + at.d) * sizeof(T) : elsewhere;
                }
                keep(place[j]);
            }
    }
    /* `low`: the lower half of the chunk's address in memory. */
    DEVICE unsigned operator()(int j, unsigned low) const {
        if constexpr (PLACING == LINEAR)
            return place[0] + low % 16 + j * THREADS * static_cast<unsigned>(sizeof(T));
        else if constexpr (PLACING == ONE_SPAN)
            return place[j] + low % 16;
        else
            return (place[j] >> 4) + (place[j] + low) % 16;
    }
    DEVICE void read(const char *from, unsigned low, float (&v)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = to_float(*reinterpret_cast<const T *>(from + (*this)(j, low)));
    }
    DEVICE void write(char *to, unsigned low, const float (&v)[COUNT]) const {
        const Pack<T, COUNT> pack = packed<T, COUNT>(v);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            *reinterpret_cast<T *>(to + (*this)(j, low)) = pack.v[j];
    }
};

/* The same for a dy that is read from memory, element by element: the offsets from the chunk. */
template <typename T> struct DirectPlaces {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[COUNT];

    template <bool ROWS> DEVICE DirectPlaces(const Strides &stride, const Elements<T, ROWS> &elements) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const typename Elements<T, ROWS>::Element at = elements[j];
            place[j] = at.token * static_cast<unsigned>(stride.n) + at.head * static_cast<unsigned>(stride.h) +
                       at.d * static_cast<unsigned>(stride.d);
            keep(place[j]);
        }
    }
    /* has(j): whether the element exists. */
    template <class Has> DEVICE void read(const T *chunk, Has has, float (&v)[COUNT]) const {
        T loaded[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            loaded[j] = has(j) ? chunk[place[j]] : from_float<T>(0.0f);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = to_float(loaded[j]);
    }
};

/* The address of a tensor's chunks, or its lower half, in the order of the work: all sequences of some
 * tokens, then those of the next. */
template <typename Address> struct ChunkAddress {
    Address at, sequence,
        back; /* sequence, back: from one sequence to the next; from the last one to the next tokens */

    DEVICE ChunkAddress(const void *tensor, int bytes, const Strides &stride, int64_t b, int64_t n, int64_t h,
                        int sequences, int step)
        : at((Address)((uintptr_t)tensor + (b * stride.b + n * stride.n + h * stride.h) * bytes)),
          sequence((Address)(stride.b * bytes)),
          back((Address)((step * stride.n - (sequences - 1) * stride.b) * bytes)) {
    }
    DEVICE void advance(bool was_last) {
        at += was_last ? back : sequence;
    }
};

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

/* Sines and cosines of the thread's elements. `entries`: which step and position each has, in the halves
 * of a word. */
template <typename T, int N>
DEVICE void sincos_of_all(const AngleStep *steps, const Position *positions, const unsigned (&entries)[N],
                          float (&sine)[N], float (&cosine)[N]) {
    const auto step = [&](int j) { return steps[entries[j] & 0xffff]; };
    const auto position = [&](int j) { return positions[entries[j] >> 16]; };
    if constexpr (NARROW<T>) {
        bool good = true;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const Position at = position(j);
            good &= at.high == 0 && at.low < SHORT_POSITION;
            good &= sincos_short(step(j), at, &sine[j], &cosine[j]);
        }
        if (good)
            return;
#pragma unroll
        for (int j = 0; j < N; j++) {
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

/* Sums the moments of a block over the tokens of a chunk, in `shared`, and stores them. `entries`: as
 * above. */
template <typename T, class Has>
DEVICE void store_chunk_moments(const Arguments<T> &a, const Staging &plan, int64_t chunk, int first_head, int width,
                                const unsigned (&entries)[WIDE<T>], Has has, const double (&moment)[WIDE<T>],
                                double *shared) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < WIDE<T>; j++)
        if (has(j))
            shared[(entries[j] >> 16) * width + (entries[j] & 0xffff)] = moment[j];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        double sum = 0.0;
        for (int token = 0; token < plan.step; token++)
            sum += shared[token * width + i];
        plan.tiling.moments[(chunk * a.heads + first_head) * a.features + i] = sum;
    }
}

/* Blocks that share an SM: so many that no registers are spilled. */
template <bool FORWARD, int F, bool DTHETA, int LAYOUT>
constexpr int STAGED_BLOCKS = !FORWARD && (DTHETA || F >= LANE_SOFTMAX || LAYOUT == DIRECT) ? 2 : 3;

template <typename T, bool FORWARD, int F, bool DTHETA, int LAYOUT>
__global__ void __launch_bounds__(THREADS, STAGED_BLOCKS<FORWARD, F, DTHETA, LAYOUT>)
    staged(const Arguments<T> a, const Staging plan) {
    constexpr int COUNT = WIDE<T>, STAGES = STAGED_STAGES<FORWARD>;
    constexpr bool READS_X = FORWARD || DTHETA || F != RAFTER_ACT_NONE, MANY = LAYOUT != COMPACT;
    constexpr bool STAGES_DY = !FORWARD && LAYOUT != DIRECT;
    constexpr bool SOFTMAX = F == LANE_SOFTMAX || F == BLOCK_SOFTMAX;
    constexpr int OF_X = MANY ? MANY_SPANS : SOFTMAX ? ONE_SPAN : LINEAR, OF_Y = MANY ? MANY_SPANS : ONE_SPAN;
    extern __shared__ __align__(128) char dynamic[];
    __shared__ typename RowThreads<F == BLOCK_SOFTMAX>::Exchange exchange;
    AngleStep *const angle_steps = reinterpret_cast<AngleStep *>(dynamic);
    Position *positions = reinterpret_cast<Position *>(dynamic + plan.positions_at);
    char *const stages = dynamic + plan.stages_at, *const results = dynamic + plan.out_at;
    const int f = F == RUNTIME_F ? plan.tiling.f : F;
    if constexpr (DTHETA)
        start_next_kernel(); /* the sum of moments */

    /* The block's tokens, sequences and heads. */
    const Tiling &tiling = plan.tiling;
    const unsigned chunk = tiling.tiles.quotient(blockIdx.x), tile = blockIdx.x - chunk * tiling.tiles.number;
    const unsigned sequence_chunk = tiling.token_chunks.quotient(chunk);
    const int64_t first_token = (int64_t)(chunk - sequence_chunk * tiling.token_chunks.number) * tiling.tokens;
    const int64_t end_token = min(first_token + tiling.tokens, a.length);
    const int64_t first_b = (int64_t)sequence_chunk * tiling.sequences;
    const int sequences = (int)min(a.batch - first_b, (int64_t)tiling.sequences);
    const int first_head = (int)(tile * plan.heads.number);
    const int heads = min((int)a.heads - first_head, (int)plan.heads.number);
    const int features = (int)plan.features.number, width = heads * features, step = plan.step;
    const auto extent_at = [&](int64_t n) {
        const int tokens = (int)min(end_token - n, (int64_t)step);
        return Extent{tokens, heads, tokens * heads};
    };
    const auto address = [&](auto kind, const T *tensor, const Strides &stride) {
        return ChunkAddress<decltype(kind)>(tensor, sizeof(T), stride, first_b, first_token, first_head, sequences,
                                            step);
    };

    /* What is loaded next, and what is worked on. */
    const uintptr_t whole = 0;
    const unsigned lower = 0;
    auto next_x = address(whole, a.x, a.x_stride), next_dy = address(whole, a.dy, a.y_stride);
    auto x = address(lower, a.x, a.x_stride);
    auto dy = address(std::conditional_t<STAGES_DY, unsigned, uintptr_t>(), a.dy, a.y_stride);
    auto out = address(whole, a.out, FORWARD ? a.y_stride : a.dx_stride);
    int64_t next_token = first_token;
    int next_b = 0;
    const auto request = [&](int stage) {
        char *const to = stages + stage * plan.stage_bytes;
        if (next_token < end_token) {
            const Extent extent = extent_at(next_token);
            if constexpr (READS_X)
                copy_in<MANY>(plan.x, plan.heads, reinterpret_cast<const T *>(next_x.at), extent, a.x, a.x_end, to);
            if constexpr (STAGES_DY)
                copy_in<MANY>(plan.y, plan.heads, reinterpret_cast<const T *>(next_dy.at), extent, a.dy, a.dy_end,
                              to + plan.dy_at);
            const bool was_last = ++next_b == sequences;
            next_x.advance(was_last);
            next_dy.advance(was_last);
            next_b = was_last ? 0 : next_b;
            next_token += was_last ? step : 0;
        }
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++)
        request(i);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const int h = plan.features.quotient(i);
        angle_steps[i] = angle_step(a.theta_at(first_head + h, i - h * features));
    }
    const Elements<T, SOFTMAX> elements = {plan, step * heads};
    const Places<T, OF_X> x_at(plan.x, elements, 0);
    const Places<T, FORWARD ? OF_Y : OF_X> out_at(plan.out, elements, plan.out_bytes);
    const auto dy_at = [&] {
        if constexpr (LAYOUT == DIRECT)
            return DirectPlaces<T>(a.y_stride, elements);
        else
            return Places<T, OF_Y>(plan.y, elements, 0);
    }();
    unsigned entries[COUNT], exist = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const auto at = elements[j];
        entries[j] = at.exists ? (at.head * features + at.d) | at.token << 16 : 0;
        exist |= unsigned(at.exists) << j;
        keep(entries[j]);
    }
    keep(exist);
    const auto exists = [&](int j) { return (exist >> j & 1) != 0; };
    RowThreads<F == BLOCK_SOFTMAX> row_threads = {tiling.lanes, tiling.lanes / WARP, exchange};
    double moment[DTHETA ? COUNT : 1] = {};
    int stage = 0;

    for (int64_t n = first_token; n < end_token; n += step) {
        const Extent extent = extent_at(n);
        for (int i = threadIdx.x; i < step; i += THREADS)
            positions[i] = position_of(a.position(first_b, min(n + i, end_token - 1)));
        __syncthreads(); /* for the positions, and the table */
        float cosine[COUNT], sine[COUNT], angle_gradient[DTHETA ? COUNT : 1] = {};
        sincos_of_all<T>(angle_steps, positions, entries, sine, cosine);
#pragma unroll 1
        for (int b = 0; b < sequences; b++) {
            const char *const staged_x = stages + stage * plan.stage_bytes, *const staged_dy = staged_x + plan.dy_at;
            copy_wait<STAGES - 2>();
            __syncthreads(); /* the chunk is here, and all threads are done with the one before */
            request(stage == 0 ? STAGES - 1 : stage - 1);
            const auto has = [&](int j) { return exists(j) && int(entries[j] >> 16) < extent.tokens; };
            float v[1][COUNT], sum[1], scale = 1.0f; /* x; of a softmax p / scale */
            if constexpr (READS_X)
                x_at.read(staged_x, x.at, v[0]);
            if constexpr (SOFTMAX) {
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    v[0][j] = exists(j) ? v[0][j] : -INFINITY;
                row_threads.template exponentials<T>(v, sum);
                scale = reciprocal_fast(sum[0]); /* sum >= 1, or NaN */
            }
            if constexpr (FORWARD) {
                activate_all<T>(f, scale, v[0]);
                float c[COUNT], s[COUNT];
#pragma unroll
                for (int j = 0; j < COUNT; j++) {
                    c[j] = v[0][j] * cosine[j];
                    s[j] = v[0][j] * sine[j];
                }
                out_at.write(results, (unsigned)out.at, c);
                out_at.write(results + features * sizeof(T), (unsigned)out.at, s);
            } else {
                float c[COUNT], s[COUNT], g[COUNT];
                if constexpr (LAYOUT == DIRECT) {
                    const T *const from = reinterpret_cast<const T *>(dy.at);
                    dy_at.read(from, has, c);
                    dy_at.read(from + features * a.y_stride.d, has, s);
                } else {
                    dy_at.read(staged_dy, dy.at, c);
                    dy_at.read(staged_dy + features * sizeof(T), dy.at, s);
                }
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                if constexpr (SOFTMAX) {
                    float dot[1] = {};
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        dot[0] = exists(j) ? fmaf(v[0][j], g[j], dot[0]) : dot[0];
                    row_threads.sum(dot);
                    const float shift = dot[0] * scale * scale;
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        g[j] = v[0][j] * fmaf(g[j], scale, -shift);
                } else if constexpr (READS_X) {
                    gradient_of_all<T>(f, v[0], g);
                }
                if (!DTHETA || a.out)
                    out_at.write(results, (unsigned)out.at, g);
                if constexpr (DTHETA) {
                    activate_all<T>(f, scale, v[0]);
#pragma unroll
                    for (int j = 0; j < COUNT; j++)
                        angle_gradient[j] = fmaf(v[0][j], s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
                }
            }
            __syncthreads();
            if (!DTHETA || a.out)
                copy_out<MANY>(plan.out, plan.heads, reinterpret_cast<T *>(out.at), extent, results);
            const bool was_last = b + 1 == sequences;
            x.advance(was_last);
            dy.advance(was_last);
            out.advance(was_last);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                if (exists(j) && int(entries[j] >> 16) < extent.tokens)
                    moment[j] += (double)number_of(positions[entries[j] >> 16]) * (double)angle_gradient[j];
        positions = reinterpret_cast<Position *>(dynamic + plan.positions_at) +
                    (positions == reinterpret_cast<Position *>(dynamic + plan.positions_at) ? step : 0);
    }
    if constexpr (DTHETA) {
        copy_wait<0>();
        store_chunk_moments(a, plan, chunk, first_head, width, entries, exists, moment,
                            reinterpret_cast<double *>(stages));
    }
}

/* ---- planning -------------------------------------------------------------------------------- */

/* How chunks lie in `view`, with rows of `row` elements. */
inline Spans spans_of(const rafter_view &view, int64_t row, int64_t heads, int64_t step) {
    Spans spans = {};
    spans.kind = Spans::ALL;
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

/* Bytes of a chunk in shared memory. There are bytes for all elements that threads may touch. */
inline unsigned staged_bytes(const Spans &spans, int64_t heads, int64_t step, int bytes) {
    const int64_t count = spans.kind == Spans::ALL ? 1 : spans.kind == Spans::TOKEN ? step : heads * step;
    return (unsigned)round_up(max(count * spans.pitch * bytes, int64_t(THREADS + 1) * 16), int64_t(128));
}

/* Chunks of as many elements as the threads can hold, or of fewer if the tensor is so small that some
 * blocks would have none. */
inline Staging plan_staged(const rafter_cuda_state &device, const lrpe_cosine_call &call) {
    Staging plan = {};
    const bool forward = call.common.direction == RAFTER_FORWARD;
    const rafter_view &y = forward ? call.y : call.dy, &out = forward ? call.y : call.dx;
    const int bytes = (int)rafter_dtype_bytes(call.x.dtype);
    const int64_t heads = call.x.shape[2], features = call.x.shape[3], width = 16 / bytes;
    const bool softmax = call.act == RAFTER_ACT_SOFTMAX;
    /* A row of a softmax has a power of two of threads. */
    plan.tiling.lanes = softmax ? power_at_least(ceil_div(features, width), 1, THREADS) : 1;
    while (1 << plan.tiling.width_log2 < plan.tiling.lanes)
        plan.tiling.width_log2++;
    const int64_t most = softmax ? THREADS / plan.tiling.lanes * features : THREADS * width;
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
    plan.width = Divisor(chunk_heads * features);
    plan.tiling.f = !softmax ? (int)call.act : plan.tiling.lanes > WARP ? BLOCK_SOFTMAX : LANE_SOFTMAX;
    plan.tiling.tiles = Divisor(tiles);
    plan_blocks(&plan.tiling, device, call, plan.step);

    plan.x = spans_of(call.x, features, chunk_heads, plan.step);
    plan.y = spans_of(y, 2 * features, chunk_heads, plan.step);
    plan.out = forward ? plan.y : spans_of(out, features, chunk_heads, plan.step);
    const bool compact = plan.x.kind == Spans::ALL && plan.y.kind == Spans::ALL && plan.out.kind == Spans::ALL;
    plan.layout = y.stride[3] != 1 ? DIRECT : compact ? COMPACT : SPREAD;
    const auto bytes_of = [&](const Spans &spans) { return staged_bytes(spans, chunk_heads, plan.step, bytes); };
    const unsigned stages = forward ? STAGED_STAGES<true> : STAGED_STAGES<false>;
    plan.positions_at = (unsigned)(chunk_heads * features * (int64_t)sizeof(AngleStep));
    plan.stages_at = (unsigned)round_up(plan.positions_at + 2 * plan.step * (int64_t)sizeof(Position), int64_t(128));
    plan.dy_at = bytes_of(plan.x);
    plan.stage_bytes = plan.dy_at + (forward || plan.layout == DIRECT ? 0 : bytes_of(plan.y));
    plan.out_at = plan.stages_at + stages * plan.stage_bytes;
    plan.out_bytes = bytes_of(plan.out);
    plan.bytes = plan.out_at + plan.out_bytes + (unsigned)round_up((features + width) * bytes, int64_t(128));
    return plan;
}

} // namespace lrpe

#endif
