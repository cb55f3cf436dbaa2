/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel that writes y, or dx and the moments of dtheta: every variant ends with it. A thread
 * owns one pack of features. It computes the angles of a token once and uses them for all sequences
 * of its block. Every input is read once and every output written once.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_ROTATE_CUH
#define RAFTER_LRPE_COSINE_CUDA_ROTATE_CUH

#include "cuda/activations.cuh"
#include "cuda/line_statistics.cuh"
#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* ---- a softmax within the lanes of a warp, or the warps of a block --------------------------- */

/* The threads that hold a row: `lanes` lanes of a warp, a power of two; or if BLOCK, `warps` warps
 * of the block. All threads of the block take part in every sum and maximum, of COUNT rows at
 * once. */
template <bool BLOCK> struct RowThreads {
    static constexpr int MOST_ROWS = 4;
    typedef float Exchange[2][THREADS / WARP][MOST_ROWS]; /* two in turns, so that one barrier is enough */
    int lanes, warps;
    Exchange &exchange;
    int turn = 0;

    /* Combines x over the warps of a row, in their order. */
    template <int COUNT, class F> DEVICE void combine_warps(float (&x)[COUNT], F combine) {
        const int warp = threadIdx.x / WARP, first = warp & ~(warps - 1);
        float(&numbers)[THREADS / WARP][MOST_ROWS] = exchange[turn];
        turn ^= 1;
        if (threadIdx.x % WARP == 0)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                numbers[warp][i] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = numbers[first][i];
        for (int w = 1; w < warps; w++)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                x[i] = combine(x[i], numbers[first + w][i]);
    }
    /* All five butterfly steps are made: one that would leave the group adds nothing, or compares
     * a lane with itself. A branch around it would cost more. */
    template <int COUNT> DEVICE void sum(float (&x)[COUNT]) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float other = __shfl_xor_sync(~0u, x[i], step);
                if (BLOCK || step < lanes)
                    x[i] += other;
            }
        if constexpr (BLOCK)
            combine_warps(x, [](float a, float b) { return a + b; });
    }
    template <int COUNT> DEVICE void max(float (&x)[COUNT]) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                x[i] = fmaxf(x[i], __shfl_xor_sync(~0u, x[i], BLOCK ? step : step & (lanes - 1)));
        if constexpr (BLOCK)
            combine_warps(x, [](float a, float b) { return fmaxf(a, b); });
    }
    /* Replaces x by e^(x - max); `all` gets its sum. */
    template <typename T, int COUNT, int N> DEVICE void exponentials(float (&x)[COUNT][N], float (&all)[COUNT]) {
        float top[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            top[i] = -FLT_MAX;
            all[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
                top[i] = fmaxf(top[i], x[i][j]);
        }
        max(top);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                all[i] += x[i][j] = exp_as<T>(x[i][j] - top[i]);
        sum(all);
    }
};

/* ---- loading --------------------------------------------------------------------------------- */

/* The fastest by measurement: SEQUENCES are worked on side by side; STAGES groups of them are
 * being worked on or loaded; BLOCKS_PER_SM share an SM. cp.async cannot copy a single element of
 * 2 bytes: those have no stages, and those of several sequences are loaded together. */
template <typename T, int N, bool FORWARD, int F, bool DTHETA, bool SHIFTED> struct Pipeline {
    static constexpr bool ASYNC = !SHIFTED && sizeof(Pack<T, N>) >= 4;
    static constexpr int INPUTS = FORWARD ? 1 : 3;
    static constexpr int SEQUENCES = !ASYNC && !SHIFTED ? 4 : FORWARD && !(SHIFTED && F == COLUMN_STATISTICS) ? 2 : 1;
    static constexpr int STAGES = ASYNC ? 4 : 0;
    static constexpr bool BLOCK = F == BLOCK_SOFTMAX;
    static constexpr int BLOCKS_PER_SM = (SHIFTED || BLOCK) && !FORWARD      ? 2
                                         : FORWARD || F == COLUMN_STATISTICS ? 3
                                         : DTHETA                            ? 2
                                                                             : 4;
    typedef Pack<T, N> Stage[SEQUENCES][INPUTS][THREADS];       /* threads use their own packs only */
    static constexpr int ANGLES = N * (BLOCK ? THREADS : WARP); /* entries of the table of angles */
    static constexpr size_t STAGED = STAGES * sizeof(Stage),
                            BYTES = STAGED + ANGLES * sizeof(AngleStep); /* of dynamic shared memory */
};

/* N elements at any address: the aligned packs that hold them, loaded first and shifted later. */
template <typename T, int N> struct ShiftedPack {
    const T *from;
    Pack<T, N> low, high;

    /* `count` of the elements are wanted, none if it is 0; the others become `instead`. Nothing outside
     * of [begin, end) is read. */
    DEVICE void load(const T *first, int count, const T *begin, const T *end, float instead) {
        from = first;
        const int shift = offset_in_pack(from);
        const T *const aligned = from - shift;
        low = load_once_if<T, N>(count > 0 && aligned >= begin && aligned + N <= end, aligned, instead);
        high = load_once_if<T, N>(shift + count > N && aligned + 2 * N <= end, aligned + N, instead);
    }
    DEVICE Pack<T, N> take(int count, const T *begin, const T *end, float instead) const {
        const int shift = offset_in_pack(from);
        const T *const aligned = from - shift;
        Pack<T, N> pack = low;
        if (shift != 0)
            reinterpret_cast<uint4 &>(pack) =
                shifted(reinterpret_cast<const uint4 &>(low), reinterpret_cast<const uint4 &>(high),
                        shift * static_cast<int>(sizeof(T)));
        if (count > 0 && (aligned < begin || aligned + (shift + count > N ? 2 * N : N) > end))
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j < count)
                    pack.v[j] = from[j];
        if (count < N)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j >= count)
                    pack.v[j] = from_float<T>(instead);
        return pack;
    }
};

/* The part of the call that a block, and a thread of it, works on. */
template <typename T, int N, bool SHIFTED> struct RotatePlace {
    unsigned chunk, tile;
    int64_t first_token, end_token; /* of the block */
    int64_t first_b;
    int sequences;
    int64_t h, d; /* the thread's head and first feature */
    bool active;  /* whether they exist */
    /* SHIFTED: features of the thread; of the next lane if it has those that follow; and whether the
     * lane before has those before. */
    int count, next_count;
    bool has_previous;

    DEVICE RotatePlace(const Arguments<T> &a, const Tiling &tiling, int column) {
        chunk = tiling.tiles.quotient(blockIdx.x);
        tile = blockIdx.x - chunk * tiling.tiles.number;
        const unsigned sequence_chunk = tiling.token_chunks.quotient(chunk);
        first_token = (int64_t)(chunk - sequence_chunk * tiling.token_chunks.number) * tiling.tokens;
        end_token = first_token + tiling.tokens < a.length ? first_token + tiling.tokens : a.length;
        first_b = (int64_t)sequence_chunk * tiling.sequences;
        const int64_t left = a.batch - first_b;
        sequences = left < tiling.sequences ? (int)left : tiling.sequences;
        const Tiling::Place first = tiling.place<N>(tile, column, 0);
        h = first.h;
        d = first.d;
        active = h < a.heads && d < a.features;
        if constexpr (SHIFTED) {
            const int left_in_head = active ? static_cast<int>(a.features - d) : 0, lane = threadIdx.x % WARP;
            const bool has_next = lane < WARP - 1 && column + 1 < tiling.width();
            count = min(left_in_head, N);
            next_count = has_next ? min(max(left_in_head - N, 0), N) : 0;
            has_previous = lane > 0 && column > 0 && d > 0;
        }
    }
    /* Of the thread's first feature. */
    DEVICE int64_t offset(int64_t n, const Strides &stride) const {
        return first_b * stride.b + n * stride.n + h * stride.h + d * stride.d;
    }
    /* Called by whole warps; `valid` is the same for all lanes of a row. SHIFTED: lanes exchange the
     * elements that belong to each other's aligned packs; those at the ends are stored one by one. */
    DEVICE void store(T *to, const Pack<T, N> &pack, bool valid) const {
        if constexpr (SHIFTED) {
            const uint4 &own = reinterpret_cast<const uint4 &>(pack);
            const uint4 next = {__shfl_down_sync(~0u, own.x, 1), __shfl_down_sync(~0u, own.y, 1),
                                __shfl_down_sync(~0u, own.z, 1), __shfl_down_sync(~0u, own.w, 1)};
            const int skip = -offset_in_pack(to) & (N - 1); /* elements before the first aligned one */
            if (!valid)
                return;
            int begin = 0, end = count; /* what is stored one by one */
            if (skip == 0 ? count == N : next_count >= skip) {
                const uint4 aligned = skip == 0 ? own : shifted(own, next, skip * static_cast<int>(sizeof(T)));
                store_once(to + skip, reinterpret_cast<const Pack<T, N> &>(aligned));
                end = skip;
            }
            if (has_previous && count >= skip)
                begin = skip;
            if (begin < end)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j >= begin && j < end)
                        to[j] = pack.v[j];
        } else if (valid) {
            store_once(to, pack);
        }
    }
};

/* What adds nothing to any sum, as an element of x (input 0) or dy. */
DEVICE float neutral(bool softmax, int input) {
    return softmax && input == 0 ? -INFINITY : 0.0f;
}

/* The packs that a thread works on, in order: groups of SEQUENCES sequences of a token, then
 * those of the thread's next token. */
template <typename T, int N, bool FORWARD, bool SHIFTED, class Pipeline> struct Inputs {
    static constexpr int INPUTS = Pipeline::INPUTS, SEQUENCES = Pipeline::SEQUENCES, STAGES = Pipeline::STAGES;
    const Arguments<T> &a;
    const RotatePlace<T, N, SHIFTED> &place;
    typename Pipeline::Stage *const stages;
    const bool softmax, reads_x;
    const bool expanded;     /* dy is one number for all features of a row */
    const T *x, *dy;         /* addresses of the next group to load */
    int64_t half;            /* from a cosine of dy to its sine */
    int sequences, last;     /* last: the first sequence of the last group */
    int64_t x_back, dy_back; /* from the last group of a token to the next token's first */
    int tokens_left, group;  /* group: the first sequence of the next group */

    DEVICE Inputs(const Arguments<T> &a, const RotatePlace<T, N, SHIFTED> &place, int64_t half, int row, int step_log2,
                  char *stages, bool softmax, bool reads_x)
        : a(a), place(place), stages(reinterpret_cast<typename Pipeline::Stage *>(stages)), softmax(softmax),
          reads_x(reads_x), expanded(!FORWARD && a.y_stride.d == 0), half(half), sequences(place.sequences) {
        const int step = 1 << step_log2;
        const int64_t first_n = place.first_token + row;
        x = a.x + place.offset(first_n, a.x_stride);
        dy = a.dy + place.offset(first_n, a.y_stride);
        last = (sequences - 1) / SEQUENCES * SEQUENCES;
        x_back = step * a.x_stride.n - last * a.x_stride.b;
        dy_back = step * a.y_stride.n - last * a.y_stride.b;
        tokens_left =
            place.active && first_n < place.end_token ? (int)((place.end_token - first_n + step - 1) >> step_log2) : 0;
        group = 0;
    }
    /* Calls take(sequence in the group, input, address, valid) for each pack of the next group. */
    template <class F> DEVICE void next(F take) {
#pragma unroll
        for (int k = 0; k < SEQUENCES; k++) {
            const bool valid = tokens_left > 0 && (k == 0 || group + k < sequences);
            if (reads_x)
                take(k, 0, x + k * a.x_stride.b, valid);
            if constexpr (!FORWARD) {
                take(k, 1, dy + k * a.y_stride.b, valid);
                take(k, 2, dy + k * a.y_stride.b + half, valid);
            }
        }
        const bool was_last = group == last;
        x += was_last ? x_back : SEQUENCES * a.x_stride.b;
        dy += was_last ? dy_back : SEQUENCES * a.y_stride.b;
        tokens_left -= was_last;
        group = was_last ? 0 : group + SEQUENCES;
    }
    /* Starts to load the next group. */
    DEVICE void request(int to) {
        next([&](int k, int input, const T *from, bool valid) {
            Pack<T, N> *const stage = &stages[to][k][input][threadIdx.x];
            if (valid && input > 0 && expanded)
                *stage = all_of<T, N>(to_float(*from));
            else if (valid)
                copy_async(stage, from);
        });
        copy_commit();
    }
    /* Starts to load the first groups. Lanes past the last feature (`idle`) get packs that do
     * not change the row's softmax. A thread without a token computes on whatever is in its
     * stages, and stores nothing. */
    DEVICE void start(bool idle) {
        if constexpr (Pipeline::ASYNC) {
#pragma unroll 1
            for (int i = 0; i < STAGES; i++)
                request(i);
            if (idle)
                for (int i = 0; i < STAGES * SEQUENCES * INPUTS; i++)
                    reinterpret_cast<Pack<T, N> *>(stages)[i * THREADS + threadIdx.x] =
                        all_of<T, N>(neutral(softmax, i % INPUTS));
        }
    }
    /* SHIFTED: features of dy that are not adjacent, or expanded. */
    DEVICE static Pack<T, N> strided(const T *from, int count, int64_t stride) {
        Pack<T, N> pack = all_of<T, N>(0.0f);
        if (stride == 0)
            return count > 0 ? all_of<T, N>(to_float(*from)) : pack;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < count)
                pack.v[j] = from[j * stride];
        return pack;
    }
    /* The packs of the current group. */
    DEVICE void take(int stage, Pack<T, N> (&packs)[SEQUENCES][INPUTS]) {
        if constexpr (Pipeline::ASYNC) {
            copy_wait<STAGES - 1>();
#pragma unroll
            for (int i = 0; i < SEQUENCES * INPUTS; i++)
                packs[i / INPUTS][i % INPUTS] = stages[stage][i / INPUTS][i % INPUTS][threadIdx.x];
        } else if constexpr (SHIFTED) {
            ShiftedPack<T, N> loaded[SEQUENCES][INPUTS];
            bool has[SEQUENCES] = {};
            next([&](int k, int input, const T *from, bool valid) {
                has[k] = valid;
                const float instead = neutral(softmax, input);
                if (input > 0 && a.y_stride.d != 1)
                    loaded[k][input].low = strided(from, valid ? place.count : 0, a.y_stride.d);
                else
                    loaded[k][input].load(from, valid ? place.count : 0, input ? a.dy : a.x, input ? a.dy_end : a.x_end,
                                          instead);
            });
#pragma unroll
            for (int i = 0; i < SEQUENCES * INPUTS; i++) {
                const int k = i / INPUTS, input = i % INPUTS;
                if (input > 0 && a.y_stride.d != 1)
                    packs[k][input] = loaded[k][input].low;
                else if (input > 0 || reads_x)
                    packs[k][input] = loaded[k][input].take(has[k] ? place.count : 0, input ? a.dy : a.x,
                                                            input ? a.dy_end : a.x_end, neutral(softmax, input));
            }
        } else {
            next([&](int k, int input, const T *from, bool valid) {
                packs[k][input] = load_once_if<T, N>(valid, from, neutral(softmax, input));
            });
        }
    }
    /* Call this when the group of `stage` has been used. Starts to load another one into it.
     * Returns the stage of the next group. */
    DEVICE int refill(int stage) {
        if constexpr (Pipeline::ASYNC)
            request(stage);
        return stage + 1 == STAGES ? 0 : stage + 1;
    }
};

/* ---- one pack -------------------------------------------------------------------------------- */

/* A thread works on v: x, or for a softmax p / scale. scale is 1 unless lanes normalise the row. */

/* x of a group. */
template <typename T, int N, int SEQUENCES, int INPUTS>
DEVICE void unpack_x(const Pack<T, N> (&packs)[SEQUENCES][INPUTS], float (&x)[SEQUENCES][N]) {
#pragma unroll
    for (int k = 0; k < SEQUENCES; k++)
        unpack(packs[k][0], x[k]);
}

/* dy of one sequence: the halves of cosines and of sines. */
template <typename T, int N> DEVICE void unpack_dy(const Pack<T, N> (&packs)[3], float (&c)[N], float (&s)[N]) {
    unpack(packs[1], c);
    unpack(packs[2], s);
}

/* Replaces x by its softmax over features, from the statistics of the row. Returns the sum of p
 * g; 0 in forward. */
template <typename T, bool FORWARD, int N>
DEVICE float softmax_of_row(float (&v)[N], const Tiling &tiling, int64_t row) {
    const float *const statistics = tiling.statistics + row * (FORWARD ? 2 : 3);
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = exp_as<T>(v[j] - statistics[0]) * statistics[1];
    return FORWARD ? 0.0f : statistics[2];
}

/* The statistics of a group's columns. `from` has those of its first sequence, in batch entry b. */
template <int SEQUENCES, int COUNT, typename T, int N, bool SHIFTED>
DEVICE void read_column_statistics(const RotatePlace<T, N, SHIFTED> &place, const float *from, int64_t row_columns,
                                   int64_t columns, bool has_token, int b, float (&statistics)[SEQUENCES][COUNT][N]) {
#pragma unroll
    for (int k = 0; k < SEQUENCES; k++)
        if (has_token && (SEQUENCES == 1 || b + k < place.sequences))
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float *const at = from + k * row_columns + i * columns;
                if constexpr (SHIFTED) {
#pragma unroll
                    for (int j = 0; j < N; j++)
                        statistics[k][i][j] = j < place.count ? at[j] : 0.0f;
                } else {
                    read_numbers(at, statistics[k][i]);
                }
            }
}

/* Replaces x by its softmax over the sequence, from the statistics of the pack's columns. */
template <typename T, int N, int COUNT>
DEVICE void softmax_of_columns(float (&v)[N], const float (&statistics)[COUNT][N]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = exp_as<T>(v[j] - statistics[0][j]) * statistics[1][j];
}

/* f(x). */
template <typename T> DEVICE float activate(int f, float v, float scale) {
    return f >= LANE_SOFTMAX ? v * scale : act_forward<T>((rafter_act_kind)f, v);
}

/* y: f(x) cos, f(x) sin. */
template <typename T, int N>
DEVICE void y_of(int f, const float (&v)[N], float scale, const float (&cosine)[N], const float (&sine)[N],
                 float (&c)[N], float (&s)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float value = activate<T>(f, v[j], scale);
        c[j] = value * cosine[j];
        s[j] = value * sine[j];
    }
}

/* Replaces g, the gradient of f(x), by the gradient of x. `dot` is the sum of p g of the row,
 * column_dot the sums of the columns. */
template <typename T, int N>
DEVICE void input_gradient(int f, bool reads_x, const float (&v)[N], float scale, float dot,
                           const float (&column_dot)[N], float (&g)[N]) {
    const float shift = dot * scale;
#pragma unroll
    for (int j = 0; j < N; j++)
        g[j] = f == COLUMN_STATISTICS ? v[j] * (g[j] - column_dot[j])
               : f >= LANE_SOFTMAX    ? v[j] * fmaf(g[j], scale, -shift)
               : reads_x              ? act_backward<T>((rafter_act_kind)f, v[j], g[j])
                                      : g[j];
}

/* Sums the moments of a block's threads, in `shared`, and stores them. Threads `width` apart
 * have the same features. */
template <typename T, int N, bool SHIFTED>
DEVICE void store_moments(const Arguments<T> &a, const Tiling &tiling, const RotatePlace<T, N, SHIFTED> &place,
                          int width, int step, const double (&moment)[N], double *shared) {
#pragma unroll
    for (int j = 0; j < N; j++)
        shared[threadIdx.x * N + j] = moment[j];
    __syncthreads();
    for (int i = threadIdx.x; i < width * N; i += THREADS) {
        double sum = 0.0;
        for (int r = 0; r < step; r++)
            sum += shared[r * width * N + i];
        const Tiling::Place at = tiling.place<N>(place.tile, i / N, i % N);
        if (at.h < a.heads && at.d < a.features)
            tiling.moments[(place.chunk * a.heads + at.h) * a.features + at.d] = sum;
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <typename T, int N, bool FORWARD, int F, bool DTHETA, bool SHIFTED>
__global__ void __launch_bounds__(THREADS, Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED>::BLOCKS_PER_SM)
    rotate(const Arguments<T> a, const Tiling tiling) {
    typedef Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED> Pipeline;
    constexpr int INPUTS = Pipeline::INPUTS, SEQUENCES = Pipeline::SEQUENCES;
    extern __shared__ __align__(128) char dynamic[];
    /* [feature of a thread][thread] */
    AngleStep *const angle_steps = reinterpret_cast<AngleStep *>(dynamic + Pipeline::STAGED);
    __shared__ typename RowThreads<Pipeline::BLOCK>::Exchange exchange;
    __shared__ double moments[DTHETA ? THREADS * N : 1];
    const int f = F == RUNTIME_F ? tiling.f : F, width = tiling.width(), column = threadIdx.x & (width - 1);
    const int row = threadIdx.x >> tiling.width_log2, step_log2 = THREADS_LOG2 - tiling.width_log2,
              step = 1 << step_log2;
    const bool softmax = f >= LANE_SOFTMAX, reads_x = FORWARD || DTHETA || f != RAFTER_ACT_NONE;
    const bool on_chip = Pipeline::BLOCK || f == LANE_SOFTMAX; /* the threads of a row normalise it */
    RowThreads<Pipeline::BLOCK> row_threads = {tiling.lanes, tiling.lanes / WARP, exchange};

    if constexpr (DTHETA)
        start_next_kernel(); /* the sum of moments */
    const RotatePlace<T, N, SHIFTED> place(a, tiling, column);
    const int64_t half = a.features * a.y_stride.d; /* from cosines to sines */

    /* Loaded first: the table of angles waits for it, and everything else for the table. */
    const auto theta_of = [&](int i) {
        const Tiling::Place at = tiling.place<N>(place.tile, i & (width - 1), i >> tiling.width_log2);
        return at.h < a.heads && at.d < a.features ? a.theta_at(at.h, at.d) : 0.0f;
    };
    const int angles = N << tiling.width_log2;
    const float theta = (int)threadIdx.x < angles ? theta_of(threadIdx.x) : 0.0f;

    Inputs<T, N, FORWARD, SHIFTED, Pipeline> inputs(a, place, half, row, step_log2, dynamic, softmax, reads_x);
    inputs.start(on_chip && !place.active);

    if ((int)threadIdx.x < angles)
        angle_steps[threadIdx.x] = angle_step(theta);
    if constexpr (Pipeline::BLOCK)
        for (int i = threadIdx.x + THREADS; i < angles; i += THREADS)
            angle_steps[i] = angle_step(theta_of(i));
    __syncthreads();
    if (F == COLUMN_STATISTICS)
        wait_for_previous_kernel(); /* for the statistics; other inputs are older */

    const Strides &out_stride = FORWARD ? a.y_stride : a.dx_stride;
    const int64_t row_columns = a.heads * a.features, columns = a.batch * row_columns;
    double moment[DTHETA ? N : 1] = {};
    int stage = 0; /* holds the packs that are worked on */
    for (int64_t first = place.first_token; first < place.end_token; first += step) {
        const int64_t n = first + row;
        const bool has_token = place.active && n < place.end_token;
        const int64_t token = has_token ? a.position(place.first_b, n) : 0;
        float cosine[N], sine[N], angle_gradient[DTHETA ? N : 1] = {};
        sincos_of<T>(angle_steps + column, width, position_of(token), sine, cosine);

        T *out = a.out + place.offset(n, out_stride);
        const float *column_statistics = tiling.statistics + a.column(place.first_b, place.h, place.d);
#pragma unroll 1
        for (int b = 0; b < place.sequences; b += SEQUENCES) {
            Pack<T, N> packs[SEQUENCES][INPUTS];
            float given[SEQUENCES][FORWARD ? 2 : 3][N]; /* COLUMN_STATISTICS */
            if (F == COLUMN_STATISTICS)
                read_column_statistics(place, column_statistics, row_columns, columns, has_token, b, given);
            column_statistics += SEQUENCES * row_columns;
            inputs.take(stage, packs);
            /* x; then for a softmax p / scale, with the sum of p g in dot */
            float v[SEQUENCES][N], sum[SEQUENCES], dot[SEQUENCES] = {};
            if (reads_x)
                unpack_x(packs, v);
            if (on_chip)
                row_threads.template exponentials<T>(v, sum);
#pragma unroll
            for (int k = 0; k < SEQUENCES; k++) {
                const bool valid = has_token && (SEQUENCES == 1 || b + k < place.sequences);
                const float scale = on_chip ? reciprocal_fast(sum[k]) : 1.0f; /* sum >= 1, or NaN */
                if (F == ROW_STATISTICS && valid)
                    dot[k] = softmax_of_row<T, FORWARD>(v[k], tiling, a.row(place.first_b + b + k, n, place.h));
                if (F == COLUMN_STATISTICS)
                    softmax_of_columns<T>(v[k], given[k]);
                if constexpr (FORWARD) {
                    float c[N], s[N];
                    y_of<T>(f, v[k], scale, cosine, sine, c, s);
                    place.store(out, packed<T, N>(c), valid);
                    place.store(out + half, packed<T, N>(s), valid);
                } else {
                    float c[N], s[N], g[N], sums[1] = {};
                    unpack_dy(packs[k], c, s);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                        if constexpr (DTHETA)
                            if (const float value = activate<T>(f, v[k][j], scale); valid)
                                angle_gradient[j] = fmaf(value, s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
                        if (on_chip)
                            sums[0] = fmaf(v[k][j], g[j], sums[0]);
                    }
                    if (on_chip) {
                        row_threads.sum(sums);
                        dot[k] = sums[0] * scale;
                    }
                    input_gradient<T>(f, reads_x, v[k], scale, dot[k], given[k][2], g);
                    if (!DTHETA || a.out)
                        place.store(out, packed<T, N>(g), valid);
                }
                out += out_stride.b;
            }
            stage = inputs.refill(stage);
        }
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < N; j++)
                moment[j] += (double)token * (double)angle_gradient[j];
    }

    if constexpr (DTHETA)
        store_moments(a, tiling, place, width, step, moment, moments);
}

/* ---- planning and launching ------------------------------------------------------------------ */

/* Whether adjacent features are adjacent in all tensors but dy. */
inline bool features_are_adjacent(const lrpe_cosine_call &call) {
    const rafter_view *const views[] = {&call.x, &call.y, &call.dx};
    bool all = true;
    for (const rafter_view *view : views)
        all = all && (!view->data || view->stride[3] == 1);
    return all;
}

/* Sequences that use the same angles. */
inline int64_t sequences_alike(const lrpe_cosine_call &call) {
    return call.positions.data && call.positions.stride[0] != 0 ? 1 : call.x.shape[0];
}

/* What `rotate` is instantiated for: features per thread, and whether they are shifted, because they
 * are not aligned packs in all tensors. bp and short rows have narrow tiles, which only single features
 * fill. */
struct RotateForm {
    int n;
    bool shifted;

    explicit RotateForm(const lrpe_cosine_call &call) {
        const int width = 16 / static_cast<int>(rafter_dtype_bytes(call.x.dtype));
        const bool packs = takes_packs(call, true);
        shifted =
            !packs && call.algorithm != RAFTER_LRPE_BP && features_are_adjacent(call) && call.x.shape[3] >= 2 * width;
        n = packs || shifted ? width : 1;
    }
};

/* Tiles and chunks of `rotate`. */
inline Tiling plan_rotate(const rafter_cuda_state &device, const lrpe_cosine_call &call, int f) {
    Tiling tiling = {};
    const RotateForm form(call);
    const int64_t batch = call.x.shape[0], length = call.x.shape[1], heads = call.x.shape[2],
                  features = call.x.shape[3];
    tiling.f = f;
    const bool bp = call.algorithm == RAFTER_LRPE_BP, own_positions = sequences_alike(call) < call.x.shape[0];

    /* bp has few blocks, so they are narrow. The lanes of a softmax stay together. */
    const bool together = f == LANE_SOFTMAX || f == BLOCK_SOFTMAX;
    const int least = f == BLOCK_SOFTMAX ? WARP : 1;
    int row_threads = together ? power_at_least(ceil_div(features, int64_t(form.n)), least, THREADS) : 0;
    /* If arithmetic is the limit, all lanes work: heads share warps wherever they begin. If memory is,
     * whole heads are stored by a warp, or by whole warps. */
    if (!together && !form.shifted && sequences_alike(call) >= 8) {
        const int64_t packs = ceil_div(features, int64_t(form.n));
        row_threads = packs <= WARP ? power_at_least(packs, 1, WARP) : (int)round_up(packs, int64_t(WARP));
    }
    plan_tiles(&tiling, heads, features, form.n, max(together ? row_threads : 1, bp ? 8 : WARP), row_threads);
    const int64_t tiles = tiling.tiles.number, step = THREADS / tiling.width();
    if (bp) {
        tiling.tokens = length;
        tiling.sequences = 1;
    } else {
        /* Many steps per block save tables, moments of dtheta and loads of column statistics;
         * few steps read and write memory faster: docs/perf/lrpe_cosine.md. A table should serve
         * SERVED tokens. */
        constexpr int64_t SERVED = 64;
        const int64_t served = min(step * (own_positions ? 1 : batch), SERVED);
        const int64_t fewest = f == COLUMN_STATISTICS && call.common.direction == RAFTER_BACKWARD ? 2 : 1;
        const int64_t most =
            f != COLUMN_STATISTICS && call.dtheta.data ? INT64_MAX / step : max(fewest, SERVED / served);
        const int64_t wanted_blocks = (int64_t)device.multiprocessors * 4; /* they run at a time */
        const int64_t steps = ceil_div(length, step) * tiles / wanted_blocks;
        tiling.tokens = step * max(min(steps, most), int64_t(1));
        /* Few blocks: cut the batch too, into one wave of blocks and not a little more than one. */
        const int64_t blocks = tiles * ceil_div(length, tiling.tokens);
        const int64_t wave = (int64_t)device.multiprocessors * 3;
        const int64_t pieces = blocks < wave ? wave / blocks : 1;
        const int64_t sequences = own_positions ? 1 : ceil_div(batch, min(pieces, batch));
        tiling.sequences = (int)min(sequences, int64_t(4096));
    }
    tiling.token_chunks = Divisor(ceil_div(length, tiling.tokens));
    tiling.sequence_chunks = ceil_div(batch, (int64_t)tiling.sequences);
    return tiling;
}

template <int F, bool DTHETA, typename T, int N, bool FORWARD, bool SHIFTED>
void launch_form(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling) {
    launch(context,
           {tiling.blocks(), THREADS, Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED>::BYTES, 1,
            tiling.f == COLUMN_STATISTICS},
           rotate<T, N, FORWARD, F, DTHETA, SHIFTED>, arguments<T>(call), tiling);
}

/* The form of kernel that the call needs. `dtheta`: the kernel computes its moments. */
template <int F, typename T, bool FORWARD>
void launch_any_form(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling, bool dtheta) {
    const RotateForm form(call);
    const auto with = [&](auto n, auto shifted) {
        if constexpr (!FORWARD && F != COLUMN_STATISTICS)
            if (dtheta)
                return launch_form<F, true, T, n, FORWARD, shifted>(context, call, tiling);
        launch_form<F, false, T, n, FORWARD, shifted>(context, call, tiling);
    };
    const std::integral_constant<int, WIDE<T>> wide;
    if (form.shifted)
        with(wide, std::true_type());
    else if (form.n > 1)
        with(wide, std::false_type());
    else if constexpr (F != BLOCK_SOFTMAX)
        with(std::integral_constant<int, 1>(), std::false_type());
}

} // namespace lrpe

#endif
