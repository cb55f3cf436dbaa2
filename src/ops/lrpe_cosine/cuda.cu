/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine on CUDA: every input is read from memory once, but for long softmaxes, and every output written once.
 *
 *     none, relu, sigmoid, silu    a thread has one pack of features; it computes the angles of a token once, and uses
 *                                  them for every sequence of the batch
 *     softmax over features        likewise; lines of up to 32 packs are normalised among the lanes of a warp; of
 *                                  longer ones the statistics are computed first, by another kernel
 *     softmax over the sequence    likewise, with the statistics of columns, which another kernel computes first
 *
 * sp cuts the sequence into many short walks, bp has blocks walk all of it. dtheta is summed in fp64: over the tokens
 * of a thread, of a block, and then by a second kernel over all blocks, always in the same order.
 */
#include "cuda/activations.cuh"
#include "cuda/backend.cuh"
#include "cuda/launch.cuh"
#include "cuda/sincos.cuh"
#include "cuda/strips.cuh"
#include "ops/lrpe_cosine/call.h"

namespace {

constexpr int THREAD_BITS = 8, THREADS = 1 << THREAD_BITS;

/* ---- a call, as kernels take it -------------------------------------------------------------- */

struct Strides {
    int64_t b, n, h, d;
};

DEVICE float number_at(const void *data, rafter_dtype dtype, int64_t i) {
    return dtype == RAFTER_F32    ? static_cast<const float *>(data)[i]
           : dtype == RAFTER_BF16 ? to_float(static_cast<const bf16 *>(data)[i])
                                  : to_float(static_cast<const fp16 *>(data)[i]);
}

template <typename T> struct Call {
    const T *x, *dy;
    T *out;                 /* y or dx; NULL where only dtheta is wanted */
    Strides x_step, y_step; /* y_step: of y or dy */
    Strides dx_step;
    int64_t batch, length, heads, features;

    const void *theta;
    rafter_dtype theta_dtype;
    int64_t theta_h, theta_d;
    const void *positions; /* or NULL: offset + n */
    bool positions_are_64_bit;
    int64_t positions_b, positions_n, offset;

    DEVICE float theta_at(int64_t h, int64_t d) const {
        return number_at(theta, theta_dtype, h * theta_h + d * theta_d);
    }
    DEVICE Turns turns(int64_t h, int64_t d) const {
        return turns_of(theta_at(h, d));
    }
    DEVICE int64_t position(int64_t b, int64_t n) const {
        if (!positions)
            return offset + n;
        const int64_t i = b * positions_b + n * positions_n;
        return positions_are_64_bit ? static_cast<const int64_t *>(positions)[i]
                                    : static_cast<const int *>(positions)[i];
    }
};

/* f, besides the kinds that act has: a softmax over features whose lines are in a warp; one whose statistics are given;
 * one over the sequence, with the statistics of its columns. */
enum {
    FEATURES = RAFTER_ACT_SOFTMAX,
    GIVEN,
    COLUMNS,
    ANY = -1
}; /* ANY, as a template's argument: the one that the walk names */

/* How a call is cut: blocks take `across` packs side by side, `rows` tokens and `batch` sequences. A head is given
 * `lanes` threads, some of them idle, of which one tile holds a part, or whose heads one tile holds several of. */
struct Walk4 {
    int across_bits, lanes; /* across = 2^across_bits; lanes: across times a whole number, or a power of two below */
    int lane_bits, heads;   /* of a tile: log2 of a head's threads, and heads */
    int f, batch;
    Divisor tiles, tiles_of_head, row_chunks;
    int64_t batch_chunks, rows;
    /* A maximum, or something near it, 1 / sum, and in backward the sum of p g. GIVEN: of each line [B, N, H], these
     * side by side; COLUMNS: [these, B, H, D]. */
    float *statistics;
    double *moments; /* of each chunk [row_chunks * batch_chunks, H, D] the sum of position f(x) dTheta */

    __host__ __device__ int across() const {
        return 1 << across_bits;
    }
    /* The head and the pack of it that thread `column` of a row has. */
    struct Spot {
        int64_t h, pack;
    };
    DEVICE Spot spot(unsigned tile, int column) const {
        const unsigned head = tiles_of_head.quotient(tile);
        return {(int64_t)head * heads + (column >> lane_bits),
                (int64_t)(tile - head * tiles_of_head.number) * across() + (column & ((1 << lane_bits) - 1))};
    }
    int64_t blocks() const {
        return (int64_t)tiles.number * row_chunks.number * batch_chunks;
    }
};

/* Of the columns [B, H, D], in the order of memory. */
template <typename T> DEVICE int64_t column_of(const Call<T> &call, int64_t b, int64_t h, int64_t d) {
    return (b * call.heads + h) * call.features + d;
}

/* ---- all but the softmax over the sequence --------------------------------------------------- */

/* Sums over groups of `lanes` lanes, a power of two, for COUNT lines at once, and likewise maxima. All steps are made:
 * one that would leave a group adds nothing, or compares a lane with itself. A branch around it would cost more. */
template <int COUNT> DEVICE void sum_in_lanes(float (&x)[COUNT], int lanes) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float other = __shfl_xor_sync(~0u, x[i], step);
            if (step < lanes)
                x[i] += other;
        }
}
template <int COUNT> DEVICE void max_in_lanes(float (&x)[COUNT], int lanes) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = fmaxf(x[i], __shfl_xor_sync(~0u, x[i], step & (lanes - 1)));
}

/* x becomes its softmax over the `lanes` lanes of a group, times what is returned in `sum`, for COUNT lines at once. */
template <typename T, int COUNT, int N>
DEVICE void exponentials_in_lanes(float (&x)[COUNT][N], float (&sum)[COUNT], int lanes) {
    float max[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        max[i] = -FLT_MAX;
        sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++)
            max[i] = fmaxf(max[i], x[i][j]);
    }
    max_in_lanes(max, lanes);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[i] += x[i][j] = exp_as<T>(x[i][j] - max[i]);
    sum_in_lanes(sum, lanes);
}

/* Of `rotate`, the fastest by measurement: sequences that are worked on side by side, groups of such that are worked on
 * or whose packs are on their way, and blocks that share an SM. Elements of 2 bytes by themselves cannot be copied
 * while the thread goes on, and so have no stages: those of some sequences are loaded together. */
template <typename T, int N, bool FORWARD, int F, bool DTHETA> struct Depth {
    static constexpr bool COPIES = sizeof(Pack<T, N>) >= 4;
    static constexpr int INPUTS = FORWARD ? 1 : 3;
    static constexpr int TOGETHER = !COPIES ? 4 : FORWARD ? 2 : 1;
    static constexpr int STAGES = COPIES ? 4 : 0;
    static constexpr int PER_SM = FORWARD || F == COLUMNS ? 3 : DTHETA ? 2 : 4;
    typedef Pack<T, N> Stage[TOGETHER][INPUTS][THREADS]; /* each thread copies its own, and nobody else reads them */
};

template <typename T, int N, bool FORWARD, int F, bool DTHETA>
__global__ void __launch_bounds__(THREADS, Depth<T, N, FORWARD, F, DTHETA>::PER_SM)
    rotate(const Call<T> call, const Walk4 walk) {
    typedef Depth<T, N, FORWARD, F, DTHETA> Depth;
    constexpr int INPUTS = Depth::INPUTS, TOGETHER = Depth::TOGETHER, STAGES = Depth::STAGES;
    extern __shared__ __align__(128) char dynamic[];
    typename Depth::Stage *const stages = reinterpret_cast<typename Depth::Stage *>(dynamic);
    __shared__ Turns turns[N * WARP]; /* [element of a pack][pack] */
    __shared__ double moments[DTHETA ? THREADS * N : 1];
    const int f = F == ANY ? walk.f : F, across = walk.across(), column = threadIdx.x & (across - 1);
    const int step_bits = THREAD_BITS - walk.across_bits, step = 1 << step_bits, line = threadIdx.x >> walk.across_bits;
    const bool softmax = f >= FEATURES, reads_x = FORWARD || DTHETA || f != RAFTER_ACT_NONE;

    const unsigned chunk = walk.tiles.quotient(blockIdx.x), tile = blockIdx.x - chunk * walk.tiles.number;
    const unsigned batch_chunk = walk.row_chunks.quotient(chunk);
    const int64_t top = (int64_t)(chunk - batch_chunk * walk.row_chunks.number) * walk.rows,
                  bottom = top + walk.rows < call.length ? top + walk.rows : call.length;
    const int64_t first_b = (int64_t)batch_chunk * walk.batch, left = call.batch - first_b;
    const int sequences = left < walk.batch ? (int)left : walk.batch;
    const Walk4::Spot spot = walk.spot(tile, column);
    const int64_t h = spot.h, d = spot.pack * N;
    const bool active = h < call.heads && d < call.features;
    /* Features of packs are next to each other. */
    const auto feature = [](int64_t i, const Strides &of) { return N > 1 ? i : i * of.d; };
    const auto offset = [&](int64_t n, const Strides &of) {
        return first_b * of.b + n * of.n + h * of.h + feature(d, of);
    };
    const int64_t half = feature(call.features, call.y_step); /* from a cosine of y or dy to its sine */

    /* On its way first of all: the table of angles waits for it, and everything for the table. */
    static_assert(N * WARP <= THREADS, "an entry of the table to a thread");
    const float theta = active && line < N ? call.theta_at(h, d + line) : 0.0f;

    /* Where the packs of the next sequences are, and behind the last one those of the thread's next token: calls
     * take(sequence, input, from, whether it is there) for each. */
    const int64_t first_n = top + line;
    const T *x = call.x + offset(first_n, call.x_step), *dy = call.dy + offset(first_n, call.y_step);
    const int last = (sequences - 1) / TOGETHER * TOGETHER; /* the first of the last group */
    const int64_t x_back = step * call.x_step.n - last * call.x_step.b,
                  dy_back = step * call.y_step.n - last * call.y_step.b;
    int tokens_left = active && first_n < bottom ? (int)((bottom - first_n + step - 1) >> step_bits) : 0, taken = 0;
    const auto next = [&](auto take) {
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            const bool there = tokens_left > 0 && (k == 0 || taken + k < sequences);
            if (reads_x)
                take(k, 0, x + k * call.x_step.b, there);
            if constexpr (!FORWARD) {
                take(k, 1, dy + k * call.y_step.b, there);
                take(k, 2, dy + k * call.y_step.b + half, there);
            }
        }
        const bool were_last = taken == last;
        x += were_last ? x_back : TOGETHER * call.x_step.b;
        dy += were_last ? dy_back : TOGETHER * call.y_step.b;
        tokens_left -= were_last;
        taken = were_last ? 0 : taken + TOGETHER;
    };
    const auto ask = [&](int stage) {
        next([&](int k, int input, const T *from, bool there) {
            if (there)
                copy_async(&stages[stage][k][input][threadIdx.x], from);
        });
        copy_commit();
    };
    const auto otherwise = [&](int input) { return all_of<T, N>(softmax && input == 0 ? -INFINITY : 0.0f); };
    if constexpr (Depth::COPIES) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++)
            ask(i);
        /* Of lanes behind the last feature, what leaves the others' sums as they are. A thread without a token works
         * on whatever lies there, and stores nothing. */
        if (f == FEATURES && !active)
            for (int i = 0; i < STAGES * TOGETHER * INPUTS; i++)
                reinterpret_cast<Pack<T, N> *>(dynamic)[i * THREADS + threadIdx.x] = otherwise(i % INPUTS);
    }

    if (line < N)
        turns[line * across + column] = turns_of(theta);
    __syncthreads();
    if (f == COLUMNS)
        wait_for_previous_kernel(); /* for the statistics; all other inputs were there before that one began */

    const Strides &out_step = FORWARD ? call.y_step : call.dx_step;
    const int64_t line_of_heads = call.heads * call.features, columns = call.batch * line_of_heads;
    double moment[DTHETA ? N : 1] = {};
    int stage = 0;
    for (int64_t row = top; row < bottom; row += step) {
        const int64_t n = row + line;
        const bool has = active && n < bottom;
        const int64_t token = has ? call.position(first_b, n) : 0;
        const Position position = position_of(token);
        float cosine[N], sine[N], turned[DTHETA ? N : 1] = {};
        sincos_of(turns + column, across, position, sine, cosine);

        T *out = call.out + offset(n, out_step);
        const float *of_columns = walk.statistics + column_of(call, first_b, h, d);
#pragma unroll 1
        for (int b = 0; b < sequences; b += TOGETHER) {
            Pack<T, N> packs[TOGETHER][INPUTS];
            float given[TOGETHER][FORWARD ? 2 : 3][N]; /* COLUMNS */
            if (f == COLUMNS)
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    if (has && (TOGETHER == 1 || b + k < sequences))
#pragma unroll
                        for (int i = 0; i < (FORWARD ? 2 : 3); i++)
                            read_numbers(of_columns + k * line_of_heads + i * columns, given[k][i]);
            of_columns += TOGETHER * line_of_heads;
            if constexpr (Depth::COPIES) {
                copy_wait<STAGES - 1>();
#pragma unroll
                for (int i = 0; i < TOGETHER * INPUTS; i++)
                    packs[i / INPUTS][i % INPUTS] = stages[stage][i / INPUTS][i % INPUTS][threadIdx.x];
            } else {
                next([&](int k, int input, const T *from, bool there) {
                    packs[k][input] = there ? load_once<T, N>(from) : otherwise(input);
                });
            }
            /* x, then f(x) of a softmax; and of one over features, unless forward, f(x) times sum */
            float v[TOGETHER][N], sum[TOGETHER], dot[TOGETHER] = {};
            if (reads_x)
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    unpack(packs[k][0], v[k]);
            if (f == FEATURES)
                exponentials_in_lanes<T>(v, sum, walk.lanes);
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                const bool there = has && (TOGETHER == 1 || b + k < sequences);
                const float scale = f == FEATURES ? reciprocal_fast(sum[k]) : 1.0f; /* of 1 and more, or NaN */
                if (f == GIVEN && there) {
                    const int64_t given_line = ((first_b + b + k) * call.length + n) * call.heads + h;
                    const float *const of_line = walk.statistics + given_line * (FORWARD ? 2 : 3);
#pragma unroll
                    for (int j = 0; j < N; j++)
                        v[k][j] = exp_as<T>(v[k][j] - of_line[0]) * of_line[1];
                    dot[k] = FORWARD ? 0.0f : of_line[2];
                }
                if (f == COLUMNS)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        v[k][j] = exp_as<T>(v[k][j] - given[k][0][j]) * given[k][1][j];
                if constexpr (FORWARD) {
                    float c[N], s[N];
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        const float value = softmax ? v[k][j] * scale : act_forward<T>((rafter_act_kind)f, v[k][j]);
                        c[j] = value * cosine[j];
                        s[j] = value * sine[j];
                    }
                    if (there) {
                        store_once(out, packed<T, N>(c));
                        store_once(out + half, packed<T, N>(s));
                    }
                } else {
                    float c[N], s[N], g[N], sums[1] = {};
                    unpack(packs[k][1], c);
                    unpack(packs[k][2], s);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                        if constexpr (DTHETA) {
                            const float value = softmax ? v[k][j] * scale : act_forward<T>((rafter_act_kind)f, v[k][j]);
                            if (there)
                                turned[j] = fmaf(value, s[j] * cosine[j] - c[j] * sine[j], turned[j]);
                        }
                        if (f == FEATURES)
                            sums[0] = fmaf(v[k][j], g[j], sums[0]);
                    }
                    if (f == FEATURES) {
                        sum_in_lanes(sums, walk.lanes);
                        dot[k] = sums[0] * scale;
                    }
                    const float shift = dot[k] * scale;
#pragma unroll
                    for (int j = 0; j < N; j++)
                        g[j] = f == COLUMNS ? v[k][j] * (g[j] - given[k][FORWARD ? 0 : 2][j])
                               : softmax    ? v[k][j] * fmaf(g[j], scale, -shift)
                               : reads_x    ? act_backward<T>((rafter_act_kind)f, v[k][j], g[j])
                                            : g[j];
                    if (there && (!DTHETA || call.out))
                        store_once(out, packed<T, N>(g));
                }
                out += out_step.b;
            }
            if constexpr (Depth::COPIES) {
                ask(stage); /* all that was in it has been used */
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
        }
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < N; j++)
                moment[j] += (double)token * (double)turned[j];
    }

    if constexpr (DTHETA) {
        /* Threads `across` apart have the same features. */
#pragma unroll
        for (int j = 0; j < N; j++)
            moments[threadIdx.x * N + j] = moment[j];
        __syncthreads();
        for (int i = threadIdx.x; i < across * N; i += THREADS) {
            double sum = 0.0;
            for (int r = 0; r < step; r++)
                sum += moments[r * across * N + i];
            const Walk4::Spot at = walk.spot(tile, i / N);
            const int64_t at_d = at.pack * N + i % N;
            if (at.h < call.heads && at_d < call.features)
                walk.moments[(chunk * call.heads + at.h) * call.features + at_d] = sum;
        }
    }
}

/* The statistics of lines of features, for GIVEN: a warp to a line. */
template <typename T, int N, bool FORWARD>
__global__ void __launch_bounds__(THREADS) line_statistics(const Call<T> call, float *statistics) {
    const int lane = threadIdx.x % WARP;
    const int64_t line = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (line >= call.batch * call.length * call.heads)
        return;
    const int64_t h = line % call.heads, n = line / call.heads % call.length, b = line / call.heads / call.length;
    const T *const x_row = call.x + b * call.x_step.b + n * call.x_step.n + h * call.x_step.h;
    Statistics<1, true, 1> mine;
    mine.clear();
    for (int64_t d = lane * N; d < call.features; d += WARP * N) {
        const Pack<T, N> pack = load_l2<T, N>(x_row + d * call.x_step.d);
        float x[N];
        unpack(pack, x);
        cover<false, 1>(mine, 0, pack);
#pragma unroll
        for (int j = 0; j < N; j++)
            mine.sum[0][0] += exp2_fast((x[j] - mine.max[0]) * LOG2E);
    }
    mine.rebase(0, warp_max(mine.max[0]));
    const float max = mine.max[0], scale = 1.0f / warp_sum(mine.sum[0][0]);
    float dot = 0.0f;
    if constexpr (!FORWARD) {
        const Position position = position_of(call.position(b, n));
        const T *const dy_row = call.dy + b * call.y_step.b + n * call.y_step.n + h * call.y_step.h;
        for (int64_t d = lane * N; d < call.features; d += WARP * N) {
            float x[N], c[N], s[N];
            unpack(load_l2<T, N>(x_row + d * call.x_step.d), x);
            unpack(load_l2<T, N>(dy_row + d * call.y_step.d), c);
            unpack(load_l2<T, N>(dy_row + (d + call.features) * call.y_step.d), s);
            for (int j = 0; j < N; j++) {
                const Turns turns = call.turns(h, d + j);
                float sine[1], cosine[1];
                sincos_of(&turns, 0, position, sine, cosine);
                dot = fmaf(exp_as<T>(x[j] - max), fmaf(c[j], cosine[0], s[j] * sine[0]), dot);
            }
        }
        dot = warp_sum(dot) * scale;
    }
    if (lane == 0) {
        float *const out = statistics + line * (FORWARD ? 2 : 3);
        out[0] = max;
        out[1] = scale;
        if (!FORWARD)
            out[2] = dot;
    }
}

/* dtheta[h, d], or summed over all h or all d where theta has one for all: a block to an element. */
struct DTheta {
    void *data;
    rafter_dtype dtype;
    int64_t heads, features, stride_h, stride_d; /* of dtheta */
    int64_t all_heads, all_features, chunks;     /* of moments */
    const double *moments;
};

__global__ void __launch_bounds__(THREADS) sum_moments(const DTheta dtheta) {
    __shared__ double sums[THREADS];
    const int64_t h = blockIdx.x / dtheta.features, d = blockIdx.x % dtheta.features;
    const int64_t over_h = dtheta.heads == 1 ? dtheta.all_heads : 1,
                  over_d = dtheta.features == 1 ? dtheta.all_features : 1;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < dtheta.chunks * over_h * over_d; i += THREADS) {
        const int64_t from_d = d + i % over_d, from_h = h + i / over_d % over_h, chunk = i / over_d / over_h;
        sum += dtheta.moments[(chunk * dtheta.all_heads + from_h) * dtheta.all_features + from_d];
    }
    sums[threadIdx.x] = sum;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step)
            sums[threadIdx.x] += sums[threadIdx.x + step];
    }
    if (threadIdx.x == 0) {
        const int64_t at = h * dtheta.stride_h + d * dtheta.stride_d;
        const float value = (float)sums[0];
        if (dtheta.dtype == RAFTER_F32)
            static_cast<float *>(dtheta.data)[at] = value;
        else if (dtheta.dtype == RAFTER_BF16)
            static_cast<bf16 *>(dtheta.data)[at] = from_float<bf16>(value);
        else
            static_cast<fp16 *>(dtheta.data)[at] = from_float<fp16>(value);
    }
}

/* ---- softmax over the sequence --------------------------------------------------------------- */

/* The statistics of columns. A block walks down some neighbouring packs of one sequence, its part of the rows; where
 * there are several parts, another kernel merges them. */
template <typename T, int N, bool FORWARD, bool DTHETA> struct Columns {
    static constexpr int INPUTS = 3, STAGES = FORWARD ? 0 : 4, PER_SM = FORWARD ? 4 : 2;
    static constexpr int THREADS = ::THREADS, LINES = N, MOST_LINES = WARP * N, SUMS = FORWARD ? 1 : DTHETA ? 3 : 2;
    static constexpr bool HAS_MAX = true;
    typedef Statistics<1, HAS_MAX, SUMS> One;
    typedef Pack<T, N> Stage[INPUTS][THREADS]; /* each thread copies its own, and nobody else reads them */
    static constexpr size_t STAGED = STAGES * sizeof(Stage), AREA = sizeof(Area<Columns>),
                            BYTES = STAGED > AREA ? STAGED : AREA; /* of dynamic shared memory */
};

/* What results need of a column. */
template <bool DTHETA, int SUMS>
DEVICE void conclude(const Walk4 &walk, const Statistics<1, true, SUMS> &all, int64_t column, int64_t columns) {
    const float scale = 1.0f / all.sum[0][0];
    walk.statistics[column] = all.max[0];
    walk.statistics[columns + column] = scale;
    if constexpr (SUMS > 1)
        walk.statistics[2 * columns + column] = all.sum[1][0] * scale;
    if constexpr (DTHETA)
        walk.moments[column] = (double)(all.sum[2][0] * scale);
}

/* parts: [part, statistic, column]; NULL where there is one part. TURNED: angles are turned from token to token, which
 * results of 16 bits do not show, and computed anew every so often; positions are not given, and below 2^32 in size. */
template <typename T, int N, bool FORWARD, bool DTHETA, bool TURNED>
__global__ void __launch_bounds__(THREADS, Columns<T, N, FORWARD, DTHETA>::PER_SM)
    take_statistics(const Call<T> call, const Walk4 walk, const Divisor batch, float *parts) {
    typedef Columns<T, N, FORWARD, DTHETA> Columns;
    constexpr int STAGES = Columns::STAGES, INPUTS = Columns::INPUTS, COUNT = 1 + Columns::SUMS;
    extern __shared__ __align__(128) char dynamic[];
    typename Columns::Stage *const stages = reinterpret_cast<typename Columns::Stage *>(dynamic);
    Area<Columns> &area = *reinterpret_cast<Area<Columns> *>(dynamic); /* when all stages have been used */
    __shared__ Turns turns[FORWARD ? 1 : N * WARP];                    /* [element of a pack][pack] */
    __shared__ __align__(16) float cosines[TURNED ? N * WARP : 1],
        sines[TURNED ? N * WARP : 1]; /* of the angle from a thread's token to its next, [pack][element] */
    const int across = walk.across(), column = threadIdx.x & (across - 1), line = threadIdx.x >> walk.across_bits;
    const int step_bits = THREAD_BITS - walk.across_bits, step = 1 << step_bits;

    const unsigned chunk = walk.tiles.quotient(blockIdx.x), tile = blockIdx.x - chunk * walk.tiles.number;
    /* From the last rows to the first, which L2 still has when `rotate` begins with them. */
    const unsigned from_last = batch.quotient(chunk);
    const int64_t b = chunk - from_last * batch.number, part = walk.row_chunks.number - 1 - from_last;
    const Walk4::Spot spot = walk.spot(tile, column);
    const int64_t h = spot.h, d = spot.pack * N, first = part * walk.rows + line,
                  bottom = (part + 1) * walk.rows < call.length ? (part + 1) * walk.rows : call.length;
    const bool active = h < call.heads && d < call.features;
    const int count = active && first < bottom ? (int)((bottom - first + step - 1) >> step_bits) : 0;

    const T *x = call.x + b * call.x_step.b + first * call.x_step.n + h * call.x_step.h + d * call.x_step.d;
    Statistics<N, true, Columns::SUMS> mine;
    mine.clear();
    start_next_kernel();
    if constexpr (FORWARD) {
        constexpr int AT_A_TIME = 8;
        const int64_t apart = step * call.x_step.n;
        for (int i = 0; i < count; i += AT_A_TIME, x += AT_A_TIME * apart) {
            Pack<T, N> packs[AT_A_TIME], top;
#pragma unroll
            for (int k = 0; k < AT_A_TIME; k++)
                packs[k] = load_once_if<T, N>(i + k < count, x + k * apart, -INFINITY);
            top = packs[0];
#pragma unroll
            for (int k = 1; k < AT_A_TIME; k++)
                top = max_of(top, packs[k]);
            cover<false, N>(mine, 0, top);
#pragma unroll
            for (int k = 0; k < AT_A_TIME; k++) {
                float v[N];
                unpack(packs[k], v);
#pragma unroll
                for (int j = 0; j < N; j++)
                    mine.sum[0][j] += exp2_fast((v[j] - mine.max[j]) * LOG2E);
            }
        }
    } else {
        const T *dy = call.dy + b * call.y_step.b + first * call.y_step.n + h * call.y_step.h + d * call.y_step.d;
        const int64_t half = call.features * call.y_step.d; /* from a cosine of dy to its sine */
        const float theta = line < N && active ? call.theta_at(h, d + line) : 0.0f; /* everything waits for it */
        int left = count, stage = 0;
        const auto ask = [&] {
            if (left-- > 0) {
                copy_async(&stages[stage][0][threadIdx.x], x);
                copy_async(&stages[stage][1][threadIdx.x], dy);
                copy_async(&stages[stage][2][threadIdx.x], dy + half);
            }
            copy_commit();
            x += step * call.x_step.n;
            dy += step * call.y_step.n;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        };
#pragma unroll 1
        for (int i = 0; i < STAGES; i++)
            ask();

        if (line < N) {
            const Turns one = turns_of(theta);
            turns[line * across + column] = one;
            if constexpr (TURNED)
                sincos_at<false>(one, position_of(step), &sines[column * N + line], &cosines[column * N + line]);
        }
        __syncthreads();

        constexpr int ANEW = 64;
        const auto token = [&](int i) { return call.position(b, first + (int64_t)i * step); };
        float cosine[N], sine[N];
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            copy_wait<STAGES - 1>();
            Pack<T, N> packs[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; k++)
                packs[k] = stages[stage][k][threadIdx.x];
            float v[N], c[N], s[N], above = 0.0f;
            unpack(packs[0], v);
#pragma unroll
            for (int j = 0; j < N; j++)
                above = fmaxf(above, v[j] - mine.max[j]);
            if (above > 16.0f) /* the maximum may be exceeded by a little: e^16 L is far from overflowing */
                cover<false, N>(mine, 0, packs[0]);

            if constexpr (!TURNED) {
                sincos_of(turns + column, across, position_of(token(i)), sine, cosine);
            } else if (i % ANEW == 0) {
                const Position at = position_of(call.offset + first + (int64_t)i * step);
#pragma unroll
                for (int j = 0; j < N; j++)
                    sincos_roughly(turns[j * across + column], at, &sine[j], &cosine[j]);
            } else {
                read_numbers(cosines + column * N, c);
                read_numbers(sines + column * N, s);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const float before = cosine[j];
                    cosine[j] = fmaf(before, c[j], -sine[j] * s[j]);
                    sine[j] = fmaf(sine[j], c[j], before * s[j]);
                }
            }
            const float position = DTHETA ? (float)token(i) : 0.0f;
            unpack(packs[1], c);
            unpack(packs[2], s);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float e = exp2_fast((v[j] - mine.max[j]) * LOG2E);
                mine.sum[0][j] += e;
                mine.sum[1][j] = fmaf(e, fmaf(c[j], cosine[j], s[j] * sine[j]), mine.sum[1][j]);
                if constexpr (DTHETA)
                    mine.sum[2][j] = fmaf(e, position * (s[j] * cosine[j] - c[j] * sine[j]), mine.sum[2][j]);
            }
            ask(); /* all that was in the stage has been used */
        }
    }
    __syncthreads();
    combine_warp<Columns>(mine, (int)threadIdx.x, walk.across_bits, area);
    __syncthreads();
    const int lines = across * N;
    if (threadIdx.x < lines) {
        const typename Columns::One all = combine_area(area, walk.across_bits, lines, (int)threadIdx.x);
        const Walk4::Spot at = walk.spot(tile, threadIdx.x / N);
        const int64_t at_d = at.pack * N + threadIdx.x % N, columns = call.batch * call.heads * call.features;
        if (at.h < call.heads && at_d < call.features) {
            const int64_t index = column_of(call, b, at.h, at_d);
            if (parts) {
                typename Columns::One values = all;
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    parts[(part * COUNT + k) * columns + index] = values.value(k, 0);
            } else {
                conclude<DTHETA>(walk, all, index, columns);
            }
        }
    }
}

template <int SUMS, bool DTHETA>
__global__ void __launch_bounds__(THREADS) merge_statistics(const Walk4 walk, const float *parts, int64_t columns) {
    const int64_t column = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    start_next_kernel();
    wait_for_previous_kernel();
    if (column >= columns)
        return;
    constexpr int AT_A_TIME = 16;
    Statistics<1, true, SUMS> all, one[AT_A_TIME];
    all.clear();
    for (int64_t part = 0; part < walk.row_chunks.number; part += AT_A_TIME) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            one[i].clear();
            if (part + i < walk.row_chunks.number)
#pragma unroll
                for (int k = 0; k < 1 + SUMS; k++)
                    one[i].value(k, 0) = parts[((part + i) * (1 + SUMS) + k) * columns + column];
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            all.add(0, one[i], 0);
    }
    conclude<DTHETA>(walk, all, column, columns);
}

/* ---- how calls are cut ----------------------------------------------------------------------- */

Strides strides_of(const rafter_view &view) {
    return {view.stride[0], view.stride[1], view.stride[2], view.stride[3]};
}

template <typename T> Call<T> call_for(const lrpe_cosine_call *from) {
    const bool forward = from->direction == RAFTER_FORWARD;
    Call<T> call = {};
    call.x = reinterpret_cast<const T *>(from->x.data);
    call.dy = reinterpret_cast<const T *>(from->dy.data);
    call.out = reinterpret_cast<T *>(forward ? from->y.data : from->dx.data);
    call.x_step = strides_of(from->x);
    call.y_step = strides_of(forward ? from->y : from->dy);
    call.dx_step = strides_of(from->dx);
    call.batch = from->x.shape[0];
    call.length = from->x.shape[1];
    call.heads = from->x.shape[2];
    call.features = from->x.shape[3];
    call.theta = from->theta.data;
    call.theta_dtype = from->theta.dtype;
    call.theta_h = from->theta.stride[0];
    call.theta_d = from->theta.stride[1];
    call.positions = from->positions.data;
    call.positions_are_64_bit = from->positions.dtype == RAFTER_I64;
    call.positions_b = from->positions.stride[0];
    call.positions_n = from->positions.stride[1];
    call.offset = from->offset;
    return call;
}

bool all_wide(const lrpe_cosine_call *call) {
    const rafter_view *const views[] = {&call->x, &call->y, &call->dy, &call->dx};
    bool wide = call->x.shape[3] % (16 / rafter_dtype_bytes(call->x.dtype)) == 0; /* of y and dy: each half */
    for (const rafter_view *view : views)
        wide = wide && (!view->data || is_wide(*view, 4));
    return wide;
}

/* How packs lie side by side in blocks: `most` at a time. */
void plan_tiles(Walk4 *walk, int64_t heads, int64_t packs, int most) {
    walk->lanes = packs <= WARP ? power_at_least(packs, 1, WARP) : (int)ceil_div(packs, (int64_t)WARP) * WARP;
    const int64_t side_by_side = heads * walk->lanes;
    const int across = power_at_least(side_by_side, 1, most);
    while (walk->across() < across)
        walk->across_bits++;
    while (1 << walk->lane_bits < (walk->lanes < across ? walk->lanes : across))
        walk->lane_bits++;
    walk->heads = walk->lanes < across ? across / walk->lanes : 1;
    walk->tiles = Divisor(ceil_div(side_by_side, (int64_t)across));
    walk->tiles_of_head = Divisor(walk->lanes > across ? walk->lanes / across : 1);
}

/* Walks for `rotate`, N elements to a pack. */
template <typename T>
Walk4 plan_walk(const rafter_cuda_state *state, const lrpe_cosine_call *from, const Call<T> &call, int n) {
    Walk4 walk = {};
    const int64_t packs = call.features / n;
    walk.f = from->act != RAFTER_ACT_SOFTMAX              ? (int)from->act
             : from->softmax_over == RAFTER_OVER_SEQUENCE ? (int)COLUMNS
             : packs <= WARP                              ? (int)FEATURES
                                                          : (int)GIVEN;
    const bool bp = from->algorithm == RAFTER_LRPE_BP, own_positions = call.positions && call.positions_b != 0;

    /* bp: narrow blocks, as there are few. A softmax's lanes stay together. */
    const int least = walk.f == FEATURES ? power_at_least(packs, 1, WARP) : 1;
    plan_tiles(&walk, call.heads, packs, bp ? (least > 8 ? least : 8) : WARP);
    const int64_t tiles = walk.tiles.number;
    const int64_t step = THREADS / walk.across(), wanted = (int64_t)state->multiprocessors * 8;
    if (bp) {
        walk.rows = call.length;
        walk.batch = 1;
    } else {
        /* Long walks save tables, dtheta's moments, and loads of columns' statistics; short ones are kinder to the
         * memory: docs/perf/lrpe_cosine.md. */
        const int64_t most = walk.f == COLUMNS   ? (from->direction == RAFTER_FORWARD ? 1 : 2)
                             : from->dtheta.data ? INT64_MAX / step
                                                 : 1,
                      steps = ceil_div(call.length, step);
        const int64_t each = steps * tiles / wanted;
        walk.rows = step * (each < 1 ? 1 : each < most ? each : most);
        const int64_t blocks = tiles * ceil_div(call.length, walk.rows);
        const int64_t at_a_time = (int64_t)state->multiprocessors * 3; /* one wave, not a little more than one */
        const int64_t pieces = blocks < at_a_time ? at_a_time / blocks : 1;
        const int64_t together = own_positions ? 1 : ceil_div(call.batch, pieces < call.batch ? pieces : call.batch);
        walk.batch = (int)(together < 4096 ? together : 4096);
    }
    walk.row_chunks = Divisor(ceil_div(call.length, walk.rows));
    walk.batch_chunks = ceil_div(call.batch, (int64_t)walk.batch);
    return walk;
}

/* Walks for `take_statistics`: all rows to a block where they are few or bp asks for it, else enough blocks for the
 * device, of at least 8 tokens to a thread. */
template <typename T>
Walk4 plan_columns(const rafter_cuda_state *state, const lrpe_cosine_call *from, const Call<T> &call, int n) {
    constexpr int NARROW_TILE = 8; /* packs: 128 bytes */
    Walk4 walk = {};
    const bool one_part = from->algorithm == RAFTER_LRPE_BP || call.length <= THREADS / NARROW_TILE * 16;
    plan_tiles(&walk, call.heads, call.features / n, one_part ? NARROW_TILE : WARP);
    const int64_t step = THREADS / walk.across(), tasks = walk.tiles.number * call.batch;
    const int64_t wanted = ceil_div((int64_t)state->multiprocessors * 16, tasks), most = call.length / (step * 8);
    const int64_t parts = one_part || wanted < 1 || most < 1 ? 1 : wanted < most ? wanted : most;
    walk.rows = ceil_div(ceil_div(call.length, parts), step) * step;
    walk.row_chunks = Divisor(ceil_div(call.length, walk.rows));
    walk.batch_chunks = call.batch;
    return walk;
}

template <typename T, int N, bool FORWARD, int F, bool DTHETA>
void launch_rotate(const rafter_context *context, const Call<T> &call, const Walk4 &walk) {
    typedef Depth<T, N, FORWARD, F, DTHETA> Depth;
    launch(context, {walk.blocks(), THREADS, Depth::STAGES * sizeof(typename Depth::Stage), 1, walk.f == COLUMNS},
           rotate<T, N, FORWARD, F, DTHETA>, call, walk);
}

template <typename T, int N, bool FORWARD>
void launch_rotate(const rafter_context *context, const Call<T> &call, const Walk4 &walk, bool dtheta) {
    if constexpr (!FORWARD)
        if (dtheta)
            return launch_rotate<T, N, false, ANY, true>(context, call, walk);
    if constexpr (N == 1)
        return launch_rotate<T, N, FORWARD, ANY, false>(context, call, walk);
    else
        switch (walk.f) {
        case RAFTER_ACT_NONE: return launch_rotate<T, N, FORWARD, RAFTER_ACT_NONE, false>(context, call, walk);
        case RAFTER_ACT_RELU: return launch_rotate<T, N, FORWARD, RAFTER_ACT_RELU, false>(context, call, walk);
        case RAFTER_ACT_SIGMOID: return launch_rotate<T, N, FORWARD, RAFTER_ACT_SIGMOID, false>(context, call, walk);
        case RAFTER_ACT_SILU: return launch_rotate<T, N, FORWARD, RAFTER_ACT_SILU, false>(context, call, walk);
        case FEATURES: return launch_rotate<T, N, FORWARD, FEATURES, false>(context, call, walk);
        case COLUMNS: return launch_rotate<T, N, FORWARD, COLUMNS, false>(context, call, walk);
        default: return launch_rotate<T, N, FORWARD, GIVEN, false>(context, call, walk);
        }
}

void launch_sum_moments(const rafter_context *context, const lrpe_cosine_call *from, const double *moments,
                        int64_t chunks) {
    const rafter_view &view = from->dtheta;
    const DTheta dtheta = {view.data,      view.dtype,       view.shape[0],    view.shape[1], view.stride[0],
                           view.stride[1], from->x.shape[2], from->x.shape[3], chunks,        moments};
    if (view.numel > 0)
        launch(context, {view.numel, THREADS}, sum_moments, dtheta);
}

/* Scratch memory in two parts, each aligned. */
size_t rounded(size_t bytes) {
    return ceil_div(bytes, (size_t)256) * 256;
}

template <typename T, int N, bool FORWARD>
rafter_status start_rotate(rafter_context *context, const lrpe_cosine_call *from) {
    const Call<T> call = call_for<T>(from);
    Walk4 walk = plan_walk(context->cuda_state, from, call, N);
    const int64_t lines = call.batch * call.length * call.heads, chunks = walk.row_chunks.number * walk.batch_chunks;
    const bool dtheta = from->dtheta.data != NULL;
    const size_t moments = dtheta ? rounded((size_t)(chunks * call.heads * call.features) * sizeof(double)) : 0;
    const size_t statistics = walk.f == GIVEN ? (size_t)(lines * (FORWARD ? 2 : 3)) * sizeof(float) : 0;
    return run_with_scratch(context, from, moments + statistics, "lrpe_cosine", [&](char *scratch) {
        walk.moments = reinterpret_cast<double *>(scratch);
        if (walk.f == GIVEN) {
            float *const memory = reinterpret_cast<float *>(scratch + moments);
            launch(context, {ceil_div(lines, (int64_t)(THREADS / WARP)), THREADS}, line_statistics<T, N, FORWARD>, call,
                   memory);
            walk.statistics = memory;
        }
        launch_rotate<T, N, FORWARD>(context, call, walk, dtheta);
        if (dtheta)
            launch_sum_moments(context, from, walk.moments, chunks);
    });
}

template <typename T, int N, bool FORWARD, bool DTHETA, bool TURNED>
rafter_status start_columns(rafter_context *context, const lrpe_cosine_call *from) {
    typedef Columns<T, N, FORWARD, DTHETA> Columns;
    const Call<T> call = call_for<T>(from);
    Walk4 walk = plan_walk(context->cuda_state, from, call, N), down = plan_columns(context->cuda_state, from, call, N);
    const int64_t columns = call.batch * call.heads * call.features, parts = down.row_chunks.number;
    const size_t moments = DTHETA ? rounded((size_t)columns * sizeof(double)) : 0;
    const size_t statistics = rounded((size_t)columns * (FORWARD ? 2 : 3) * sizeof(float));
    const size_t of_parts = parts > 1 ? (size_t)(parts * columns * (1 + Columns::SUMS)) * sizeof(float) : 0;
    return run_with_scratch(context, from, moments + statistics + of_parts, "lrpe_cosine", [&](char *scratch) {
        down.moments = reinterpret_cast<double *>(scratch);
        walk.statistics = down.statistics = reinterpret_cast<float *>(scratch + moments);
        float *const memory = parts > 1 ? reinterpret_cast<float *>(scratch + moments + statistics) : NULL;
        launch(context, {down.blocks(), THREADS, Columns::BYTES}, take_statistics<T, N, FORWARD, DTHETA, TURNED>, call,
               down, Divisor(call.batch), memory);
        if (memory)
            launch(context, {ceil_div(columns, (int64_t)THREADS), THREADS, 0, 1, true},
                   merge_statistics<Columns::SUMS, DTHETA>, down, memory, columns);
        if (call.out)
            launch_rotate<T, N, FORWARD>(context, call, walk, false);
        if (DTHETA)
            launch_sum_moments(context, from, down.moments, call.batch);
    });
}

template <typename T, int N, bool FORWARD> rafter_status start(rafter_context *context, const lrpe_cosine_call *call) {
    if (call->act != RAFTER_ACT_SOFTMAX || call->softmax_over != RAFTER_OVER_SEQUENCE)
        return start_rotate<T, N, FORWARD>(context, call);
    if constexpr (FORWARD) {
        return start_columns<T, N, true, false, false>(context, call);
    } else {
        if constexpr (NARROW<T> && N > 1) {
            const int64_t far = (int64_t)1 << 32;
            if (!call->positions.data && call->offset > -far && call->offset < far - call->x.shape[1])
                return call->dtheta.data ? start_columns<T, N, false, true, true>(context, call)
                                         : start_columns<T, N, false, false, true>(context, call);
        }
        return call->dtheta.data ? start_columns<T, N, false, true, false>(context, call)
                                 : start_columns<T, N, false, false, false>(context, call);
    }
}

template <typename T> rafter_status start(rafter_context *context, const lrpe_cosine_call *call) {
    const bool forward = call->direction == RAFTER_FORWARD;
    if (all_wide(call))
        return forward ? start<T, WIDE<T>, true>(context, call) : start<T, WIDE<T>, false>(context, call);
    return forward ? start<T, 1, true>(context, call) : start<T, 1, false>(context, call);
}

} // namespace

extern "C" rafter_status rafter_cuda_lrpe_cosine(rafter_context *context, const struct lrpe_cosine_call *call) {
    OnDevice current(context);
    if (call->x.numel > 0)
        return for_dtype(call->x.dtype, [&](auto zero) { return start<decltype(zero)>(context, call); });
    return run_with_scratch(context, call, 0, "lrpe_cosine", [&](char *) {
        if (call->dtheta.data)
            launch_sum_moments(context, call, NULL, 0);
    });
}
