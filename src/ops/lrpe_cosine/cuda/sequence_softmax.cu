/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine with a softmax over the sequence. `column_statistics` reads the inputs once; `rotate` (rotate.cuh), or
 * `staged` (staged.cuh) if it takes the call, reads them again and writes the results. Long sequences are cut into
 * parts, whose statistics `merge_statistics` merges. The kernels overlap (programmatic dependent launch).
 */
#include "cuda/line_statistics.cuh"
#include "ops/lrpe_cosine/cuda/dtheta.cuh"
#include "ops/lrpe_cosine/cuda/rotate.cuh"
#include "ops/lrpe_cosine/cuda/staged.cuh"

namespace {

using namespace lrpe;

/* ---- statistics of columns ------------------------------------------------------------------- */

/* What column_statistics is instantiated for. A block takes some adjacent packs of one sequence and walks down their
 * columns over its part of the tokens. A column has the sum of e^x; in backward also that of e^x g, and for dtheta
 * that of e^x position (s cos - c sin), where c and s are the two halves of dy. */
template <typename T, int N, bool FORWARD, bool DTHETA> struct Columns {
    static constexpr int INPUTS = 3;
    /* cp.async cannot copy 2 bytes: without it, AT_A_TIME packs are loaded at a time. Forward does so too. */
    static constexpr bool ASYNC = !FORWARD && sizeof(Pack<T, N>) >= 4;
    static constexpr int STAGES = ASYNC ? 4 : 0, AT_A_TIME = FORWARD && N == 1 ? 16 : 8;
    static constexpr int BLOCKS_PER_SM = FORWARD ? 4 : N == 1 ? 3 : 2;
    static constexpr int THREADS = ::THREADS, LINES = N, MOST_LINES = WARP * N, SUMS = FORWARD ? 1 : DTHETA ? 3 : 2;
    static constexpr bool HAS_MAX = true;
    typedef Statistics<1, HAS_MAX, SUMS> One;
    typedef Pack<T, N> Stage[INPUTS][THREADS]; /* threads use their own packs only */
    static constexpr size_t STAGED = STAGES * sizeof(Stage), GROUPS = sizeof(GroupStatistics<Columns>),
                            BYTES = STAGED > GROUPS ? STAGED : GROUPS; /* of dynamic shared memory */
};

/* Converts the statistics of a whole column to those that `rotate` and `staged` read, and to the moment of dtheta. */
template <bool DTHETA, int SUMS>
DEVICE void store_column(const Tiling &tiling, const Statistics<1, true, SUMS> &all, int64_t column, int64_t columns) {
    const float scale = 1.0f / all.sum[0][0];
    tiling.statistics[column] = all.max[0];
    tiling.statistics[columns + column] = scale;
    if constexpr (SUMS > 1)
        tiling.statistics[2 * columns + column] = all.sum[1][0] * scale;
    if constexpr (DTHETA)
        tiling.moments[column] = (double)(all.sum[2][0] * scale);
}

/* Stores the statistics of a column's part: [part][statistic][column]. */
template <int SUMS>
DEVICE void store_part(float *parts, int64_t part, int64_t column, int64_t columns, Statistics<1, true, SUMS> all) {
#pragma unroll
    for (int k = 0; k < 1 + SUMS; k++)
        parts[(part * (1 + SUMS) + k) * columns + column] = all.value(k, 0);
}

/* Loads a pack of each of COUNT tokens, from the thread's token number `first` on; it has `end` tokens. */
template <typename T, int N, int COUNT>
DEVICE void load_tokens(const T *x, int64_t stride, int first, int end, Pack<T, N> (&packs)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        packs[k] = load_once_if<T, N>(first + k < end, x + k * stride, -INFINITY);
}

/* Forward: adds a pack of each of COUNT tokens. */
template <typename T, int N, int COUNT>
DEVICE void add_tokens(Statistics<N, true, 1> &mine, const Pack<T, N> (&packs)[COUNT]) {
    Pack<T, N> top = packs[0];
#pragma unroll
    for (int k = 1; k < COUNT; k++)
        top = max_of(top, packs[k]);
    cover<false, N>(mine, 0, top);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N];
        unpack(packs[k], v);
#pragma unroll
        for (int j = 0; j < N; j++)
            mine.sum[0][j] += exp2_fast((v[j] - mine.max[j]) * LOG2E);
    }
}

/* Backward: the thread's packs in a stage. */
template <typename T, int N, int INPUTS>
DEVICE void read_stage(const Pack<T, N> (&stage)[INPUTS][THREADS], Pack<T, N> (&packs)[INPUTS]) {
#pragma unroll
    for (int k = 0; k < INPUTS; k++)
        packs[k] = stage[k][threadIdx.x];
}

/* Backward: raises the maxima only if some x exceeds one by more than 16. That cannot overflow: a sum of L terms is at
 * most e^16 L. Rescaling the sums for every token would take six more instructions per element. x is both in v and in
 * `pack`. */
template <typename T, int N, int SUMS>
DEVICE void cover_loosely(Statistics<N, true, SUMS> &mine, const float (&v)[N], const Pack<T, N> &pack) {
    float above = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
        above = fmaxf(above, v[j] - mine.max[j]);
    if (above > 16.0f)
        cover<false, N>(mine, 0, pack);
}

/* Backward: adds a token with x in v and dy in c and s. */
template <bool DTHETA, int N, int SUMS>
DEVICE void add_token(Statistics<N, true, SUMS> &mine, const float (&v)[N], const float (&c)[N], const float (&s)[N],
                      const float (&cosine)[N], const float (&sine)[N], float position) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float e = exp2_fast((v[j] - mine.max[j]) * LOG2E);
        mine.sum[0][j] += e;
        mine.sum[1][j] = fmaf(e, fmaf(c[j], cosine[j], s[j] * sine[j]), mine.sum[1][j]);
        if constexpr (DTHETA)
            mine.sum[2][j] = fmaf(e, position * (s[j] * cosine[j] - c[j] * sine[j]), mine.sum[2][j]);
    }
}

/* sincos_approximate for the angles of a pack. entry(j): the entry of the table for element j. */
template <typename T, int N, class Entry>
DEVICE void approximate_angles(const AngleTable<T> &table, Entry entry, int64_t position, float (&sine)[N],
                               float (&cosine)[N]) {
    const Position at = position_of(position);
#pragma unroll
    for (int j = 0; j < N; j++)
        sincos_approximate(table.short_at(entry(j)), table.theta_at(entry(j)), at, &sine[j], &cosine[j]);
}

/* Adds to the angles of a pack those whose sines and cosines are s and c. */
template <int N>
DEVICE void advance_angles(const float (&s)[N], const float (&c)[N], float (&sine)[N], float (&cosine)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float before = cosine[j];
        cosine[j] = fmaf(before, c[j], -sine[j] * s[j]);
        sine[j] = fmaf(sine[j], c[j], before * s[j]);
    }
}

constexpr int REFRESH = 64; /* INCREMENTAL: a thread computes the angles of every 64th of its tokens afresh */

/* The part of the call that a block, and a thread of it, works on. */
template <typename T, int N> struct ColumnsPlace {
    unsigned tile;
    int64_t b, part; /* batch entry; part of the sequence */
    int64_t h, d;    /* the thread's head and first feature */
    int64_t first;   /* the thread's first token */
    bool active;     /* whether the head and the feature exist */
    int count;       /* the thread's tokens, `step` apart */

    DEVICE ColumnsPlace(const Arguments<T> &a, const Tiling &tiling, const Divisor &batch, int column, int row,
                        int step_log2) {
        const int step = 1 << step_log2;
        const unsigned chunk = tiling.tiles.quotient(blockIdx.x);
        tile = blockIdx.x - chunk * tiling.tiles.number;
        /* Blocks go from the last tokens to the first ones, so that these are still in L2 when `rotate` begins with
         * them. */
        const unsigned from_last = batch.quotient(chunk);
        b = chunk - from_last * batch.number;
        part = tiling.token_chunks.number - 1 - from_last;
        const Tiling::Place place = tiling.place<N>(tile, column, 0);
        h = place.h;
        d = place.d;
        first = part * tiling.tokens + row;
        const int64_t end = (part + 1) * tiling.tokens < a.length ? (part + 1) * tiling.tokens : a.length;
        active = h < a.heads && d < a.features;
        count = active && first < end ? (int)((end - first + step - 1) >> step_log2) : 0;
    }
    DEVICE int64_t offset(const Strides &stride) const {
        return b * stride.b + first * stride.n + h * stride.h + d * stride.d;
    }
};

/* Computes the statistics of columns. `parts`: [part][statistic][column]; NULL if there is one part. INCREMENTAL: a
 * thread gets the angles of its next token by adding a constant angle, and computes them afresh every REFRESH tokens.
 * The error does not show in 16-bit results. Positions must be offset + n then, and below 2^32 in size. */
template <typename T, int N, bool FORWARD, bool DTHETA, bool INCREMENTAL>
__global__ void __launch_bounds__(THREADS, Columns<T, N, FORWARD, DTHETA>::BLOCKS_PER_SM)
    column_statistics(const Arguments<T> a, const Tiling tiling, const Divisor batch, float *parts) {
    wait_for_inputs();
    typedef Columns<T, N, FORWARD, DTHETA> Columns;
    constexpr int STAGES = Columns::STAGES, INPUTS = Columns::INPUTS, COUNT = 1 + Columns::SUMS,
                  AT_A_TIME = Columns::AT_A_TIME;
    DYNAMIC_SHARED_ALIGNED(128, char, dynamic);
    typename Columns::Stage *const stages = reinterpret_cast<typename Columns::Stage *>(dynamic);
    auto &groups = *reinterpret_cast<GroupStatistics<Columns> *>(dynamic); /* after the loop */
    __shared__ __align__(
        16) char angles[FORWARD ? 16 : N * WARP * AngleTable<T>::BYTES]; /* [element of a pack][pack] */
    const AngleTable<T> table = {angles, N * WARP};
    /* INCREMENTAL: of the angle from a thread's token to its next one, [pack][element]. */
    __shared__ __align__(16) float cosines[INCREMENTAL ? N * WARP : 1], sines[INCREMENTAL ? N * WARP : 1];
    const int width = tiling.width(), column = threadIdx.x & (width - 1), row = threadIdx.x >> tiling.width_log2;
    const int step_log2 = THREADS_LOG2 - tiling.width_log2, step = 1 << step_log2;

    const ColumnsPlace<T, N> place(a, tiling, batch, column, row, step_log2);
    const int count = place.count;
    const T *x = a.x + place.offset(a.x_stride);
    Statistics<N, true, Columns::SUMS> mine;
    mine.clear();
    start_next_kernel();
    if constexpr (FORWARD) {
        const int64_t apart = step * a.x_stride.n;
        for (int i = 0; i < count; i += AT_A_TIME, x += AT_A_TIME * apart) {
            Pack<T, N> packs[AT_A_TIME];
            load_tokens(x, apart, i, count, packs);
            add_tokens(mine, packs);
        }
    } else {
        const T *dy = a.dy + place.offset(a.y_stride);
        const float theta =
            row < N && place.active ? a.theta_at(place.h, place.d + row) : 0.0f; /* first: everything waits for it */
        int left = count, stage = 0;
        const auto request = [&] {
            if (left-- > 0) {
                copy_async(&stages[stage][0][threadIdx.x], x);
                copy_async(&stages[stage][1][threadIdx.x], dy);
                copy_async(&stages[stage][2][threadIdx.x], dy + a.half);
            }
            copy_commit();
            x += step * a.x_stride.n;
            dy += step * a.y_stride.n;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        };
        if constexpr (Columns::ASYNC)
#pragma unroll 1
            for (int i = 0; i < STAGES; i++)
                request();

        if (row < N) {
            table.put(row * WARP + column, theta);
            if constexpr (INCREMENTAL)
                sincos_at<false>(angle_step(theta), position_of(step), &sines[column * N + row],
                                 &cosines[column * N + row]);
        }
        __syncthreads();

        const auto token = [&](int i) { return a.position(place.b, place.first + (int64_t)i * step); };
        float cosine[N], sine[N];
        const auto add = [&](int i, const Pack<T, N>(&packs)[INPUTS]) {
            float v[N], c[N], s[N];
            unpack(packs[0], v);
            cover_loosely(mine, v, packs[0]);
            const auto entry = [&](int j) { return j * WARP + column; };
            if constexpr (!INCREMENTAL) {
                const Position position = position_of(token(i));
                angles_at<true>(
                    table, false, entry, [&](int) { return position; }, sine, cosine);
            } else if (i % REFRESH == 0)
                approximate_angles(table, entry, a.offset + place.first + (int64_t)i * step, sine, cosine);
            else {
                read_numbers(cosines + column * N, c);
                read_numbers(sines + column * N, s);
                advance_angles(s, c, sine, cosine);
            }
            const float position = DTHETA ? (float)token(i) : 0.0f;
            unpack_dy(packs, c, s);
            add_token<DTHETA>(mine, v, c, s, cosine, sine, position);
        };
        if constexpr (Columns::ASYNC) {
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                copy_wait<STAGES - 1>();
                Pack<T, N> packs[INPUTS];
                read_stage(stages[stage], packs);
                add(i, packs);
                request(); /* into the same stage, which has been used */
            }
        } else {
            const int64_t x_apart = step * a.x_stride.n, dy_apart = step * a.y_stride.n;
#pragma unroll 1
            for (int i = 0; i < count; i += AT_A_TIME) {
                Pack<T, N> loaded[INPUTS][AT_A_TIME];
                load_tokens(x + i * x_apart, x_apart, i, count, loaded[0]);
                load_tokens(dy + i * dy_apart, dy_apart, i, count, loaded[1]);
                load_tokens(dy + i * dy_apart + a.half, dy_apart, i, count, loaded[2]);
#pragma unroll
                for (int k = 0; k < AT_A_TIME; k++)
                    if (i + k < count)
                        add(i + k, {loaded[0][k], loaded[1][k], loaded[2][k]});
            }
        }
    }
    __syncthreads();
    combine_warp<Columns>(mine, (int)threadIdx.x, tiling.width_log2, groups);
    __syncthreads();
    const int lines = width * N;
    if (threadIdx.x < lines) {
        typename Columns::One all = combine_groups(groups, tiling.width_log2, lines, (int)threadIdx.x);
        const Tiling::Place at = tiling.place<N>(place.tile, threadIdx.x / N, threadIdx.x % N);
        const int64_t columns = a.batch * a.heads * a.features;
        if (at.h < a.heads && at.d < a.features) {
            const int64_t index = a.column(place.b, at.h, at.d);
            if (parts) {
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    parts[(place.part * COUNT + k) * columns + index] = all.value(k, 0);
            } else
                store_column<DTHETA>(tiling, all, index, columns);
        }
    }
}

/* Merges the parts of columns, a thread per column. */
template <int SUMS, bool DTHETA>
__global__ void __launch_bounds__(THREADS) merge_statistics(const Tiling tiling, const float *parts, int64_t columns) {
    const int64_t column = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    start_next_kernel();
    wait_for_previous_kernel();
    if (column >= columns)
        return;
    constexpr int AT_A_TIME = 16;
    Statistics<1, true, SUMS> all, one[AT_A_TIME];
    all.clear();
    for (int64_t part = 0; part < tiling.token_chunks.number; part += AT_A_TIME) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            one[i].clear();
            if (part + i < tiling.token_chunks.number)
#pragma unroll
                for (int k = 0; k < 1 + SUMS; k++)
                    one[i].value(k, 0) = parts[((part + i) * (1 + SUMS) + k) * columns + column];
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            all.add(0, one[i], 0);
    }
    store_column<DTHETA>(tiling, all, column, columns);
}

/* ---- the variant ----------------------------------------------------------------------------- */

/* How column_statistics is cut. A block takes all tokens of a sequence if they are few, or if the algorithm is bp; else
 * there are enough blocks for the device, but a thread has at least 8 tokens. */
Tiling plan_columns(const rafter_cuda_state &device, const lrpe_cosine_call &call, int n) {
    Tiling tiling = {};
    constexpr int64_t INVARIANT_BATCH = 8; /* a batch-invariant call is cut as if it had this batch */
    const int64_t batch = call.common.batch_invariant ? INVARIANT_BATCH : call.x.shape[0], length = call.x.shape[1];
    const bool one_part = call.algorithm == RAFTER_LRPE_BP || length <= THREADS / NARROW_TILE * 16;
    /* Single elements of 2 bytes need a whole warp to fill 64 bytes. */
    const int least = n > 1 ? NARROW_TILE : WARP, most = one_part ? least : WARP;
    plan_tiles(&tiling, call.x.shape[2], call.x.shape[3], n, least, most, 0);
    const int64_t step = THREADS / tiling.width(), tasks = tiling.tiles.number * batch;
    const int64_t wanted = ceil_div((int64_t)device.multiprocessors * 16, tasks), fitting = length / (step * 8);
    const int64_t parts = one_part ? 1 : max(min(wanted, fitting), int64_t(1));
    tiling.tokens = round_up(ceil_div(length, parts), step);
    tiling.token_chunks = Divisor(ceil_div(length, tiling.tokens));
    tiling.sequence_chunks = call.x.shape[0];
    return tiling;
}

struct SequenceSoftmax {
    typedef lrpe_cosine_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        int width; /* elements per pack of column_statistics */
        Tiling columns, rotate;
        bool staged;                    /* `staged` writes the results instead of `rotate` */
        Staging staging;                /* used if so */
        int64_t count, parts;           /* columns; parts of the sequence */
        size_t statistics_at, parts_at; /* bytes into the workspace, after dtheta's moments */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.x.numel == 0)
            return "x is empty";
        return call.act == RAFTER_ACT_SOFTMAX && call.softmax_over == RAFTER_OVER_SEQUENCE
                   ? NULL
                   : "act is not a softmax over the sequence";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const bool forward = call.common.direction == RAFTER_FORWARD;
        plan->width = pack_width(call);
        plan->columns = plan_columns(device, call, plan->width);
        plan->rotate = plan_rotate(device, call, COLUMN_STATISTICS);
        plan->staged = !why_not_staged(call);
        if (plan->staged)
            plan->staging = plan_staged(device, call, COLUMN_STATISTICS);
        plan->count = call.x.shape[0] * call.x.shape[2] * call.x.shape[3];
        plan->parts = plan->columns.token_chunks.number;
        plan->statistics_at = call.dtheta.data ? moments_bytes(call, call.x.shape[0]) : 0;
        const size_t statistics = (size_t)plan->count * (forward ? 2 : 3) * sizeof(float);
        plan->parts_at = plan->statistics_at + round_up(statistics, (size_t)256);
        const int64_t numbers = forward ? 2 : call.dtheta.data ? 4 : 3; /* of a part, per column */
        return plan->parts_at + (plan->parts > 1 ? (size_t)(plan->parts * plan->count * numbers) * sizeof(float) : 0);
    }

    /* Whether the angles of a token may be computed from those of the token before it. */
    static bool incremental(const Call &call) {
        const int64_t limit = (int64_t)1 << 32;
        return !call.positions.data && call.offset > -limit && call.offset < limit - call.x.shape[1];
    }

    template <typename T, int N, bool FORWARD, bool DTHETA, bool INCREMENTAL>
    static void launch_columns(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        typedef Columns<T, N, FORWARD, DTHETA> Columns;
        const Arguments<T> a = arguments<T>(call);
        Tiling columns = plan.columns, tiling = plan.rotate;
        columns.moments = reinterpret_cast<double *>(workspace);
        columns.statistics = tiling.statistics = reinterpret_cast<float *>(workspace + plan.statistics_at);
        float *const parts = plan.parts > 1 ? reinterpret_cast<float *>(workspace + plan.parts_at) : NULL;
        ::launch(context, {columns.blocks(), THREADS, Columns::BYTES},
                 column_statistics<T, N, FORWARD, DTHETA, INCREMENTAL>, a, columns, Divisor(a.batch), parts);
        if (parts)
            ::launch(context, {ceil_div(plan.count, (int64_t)THREADS), THREADS},
                     merge_statistics<Columns::SUMS, DTHETA>, columns, parts, plan.count);
        Staging staging = plan.staging;
        staging.tiling.statistics = tiling.statistics;
        if (a.out && plan.staged)
            launch_staged<T, FORWARD, COLUMN_STATISTICS, false>(context, call, staging);
        else if (a.out)
            launch_any_form<COLUMN_STATISTICS, T, FORWARD>(context, call, tiling, false);
        if (DTHETA)
            launch_sum_moments(context, call, columns.moments, a.batch);
    }

    template <typename T, int N>
    static void launch_backward(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const bool dtheta = call.dtheta.data != NULL;
        if constexpr (NARROW<T>)
            if (incremental(call))
                return dtheta ? launch_columns<T, N, false, true, true>(context, call, plan, workspace)
                              : launch_columns<T, N, false, false, true>(context, call, plan, workspace);
        return dtheta ? launch_columns<T, N, false, true, false>(context, call, plan, workspace)
                      : launch_columns<T, N, false, false, false>(context, call, plan, workspace);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        for_types(call, plan.width, [&](auto zero, auto n, auto forward) {
            typedef decltype(zero) T;
            if constexpr (forward)
                launch_columns<T, n, true, false, false>(context, call, plan, workspace);
            else
                launch_backward<T, n>(context, call, plan, workspace);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(lrpe_cosine, sequence_softmax, SequenceSoftmax)
