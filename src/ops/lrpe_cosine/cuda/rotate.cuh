/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel `rotate`, which writes y, or dx and the moments of dtheta. It is the last step of every variant that does
 * not use `staged` (staged.cuh) instead. A thread takes one pack of features of every step-th token of its block. It
 * computes the angles of a token once and uses them for all sequences of the block. Every input is read once and every
 * output written once. rotate_memory.cuh has the loads and stores, problem.cuh the cut into blocks (Tiling).
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_ROTATE_CUH
#define RAFTER_LRPE_COSINE_CUDA_ROTATE_CUH

#include "cuda/line_statistics.cuh"
#include "ops/lrpe_cosine/cuda/acts.cuh"
#include "ops/lrpe_cosine/cuda/angles.cuh"
#include "ops/lrpe_cosine/cuda/row_softmax.cuh"
#include "ops/lrpe_cosine/cuda/rotate_memory.cuh"

namespace lrpe {

/* ---- one pack -------------------------------------------------------------------------------- */

/* A thread works on v: x, or for a softmax p / scale, where p is its result. `scale` is 1 unless the threads of a row
 * normalise it (LANE_SOFTMAX, BLOCK_SOFTMAX). g is the gradient of f(x). */

/* x of a group of sequences. */
template <typename T, int N, int SEQUENCES, int INPUTS>
DEVICE void unpack_x(const Pack<T, N> (&packs)[SEQUENCES][INPUTS], float (&x)[SEQUENCES][N]) {
#pragma unroll
    for (int k = 0; k < SEQUENCES; k++)
        unpack(packs[k][0], x[k]);
}

/* dy of one sequence: the gradients c of the cosine half of y, and s of its sine half. */
template <typename T, int N> DEVICE void unpack_dy(const Pack<T, N> (&packs)[3], float (&c)[N], float (&s)[N]) {
    unpack(packs[1], c);
    unpack(packs[2], s);
}

/* ROW_STATISTICS: replaces x by its softmax over features. Returns the row's sum of p g; 0 in forward. */
template <typename T, bool FORWARD, int N>
DEVICE float softmax_of_row(float (&v)[N], const Tiling &tiling, int64_t row) {
    const float *const statistics = tiling.statistics + row * (FORWARD ? 2 : 3);
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = exp_as<T>(v[j] - statistics[0]) * statistics[1];
    return FORWARD ? 0.0f : statistics[2];
}

/* COLUMN_STATISTICS: reads the statistics of the columns of a group of sequences, the first of which is the b-th of the
 * block. `from`: where those of that sequence are. */
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

/* COLUMN_STATISTICS: replaces x by its softmax over the sequence. */
template <typename T, int N, int COUNT>
DEVICE void softmax_of_columns(float (&v)[N], const float (&statistics)[COUNT][N]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = exp_as<T>(v[j] - statistics[0][j]) * statistics[1][j];
}

/* Computes y: c = f(x) cos, s = f(x) sin. */
template <typename T, int N>
DEVICE void y_of(int f, float (&v)[N], float scale, const float (&cosine)[N], const float (&sine)[N], float (&c)[N],
                 float (&s)[N]) {
    activate_all<T>(f, scale, v);
#pragma unroll
    for (int j = 0; j < N; j++) {
        c[j] = v[j] * cosine[j];
        s[j] = v[j] * sine[j];
    }
}

/* Replaces g by the gradient of x; and if VALUES, v by f(x). `dot`: the sum of p g of the row, for a softmax over
 * features; column_dot: those of the columns, for one over the sequence. */
template <bool VALUES, typename T, int N>
DEVICE void input_gradient(int f, float (&v)[N], float scale, float dot, const float (&column_dot)[N], float (&g)[N]) {
    if (f < LANE_SOFTMAX)
        return differentiate_all<VALUES, T>(f, v, g);
    const float shift = dot * scale;
#pragma unroll
    for (int j = 0; j < N; j++) {
        g[j] = f == COLUMN_STATISTICS ? v[j] * (g[j] - column_dot[j]) : v[j] * fmaf(g[j], scale, -shift);
        if constexpr (VALUES)
            v[j] *= scale;
    }
}

/* LANE_SOFTMAX, BLOCK_SOFTMAX: replaces x by e^(x - max) in the first `count` sequences, and gives the sums of rows.
 * `count` is the same for all threads of the block. */
template <typename T, class RowThreads, int SEQUENCES, int N>
DEVICE void exponentials_of(RowThreads &threads, int count, float (&v)[SEQUENCES][N], float (&sum)[SEQUENCES]) {
    if (count >= SEQUENCES)
        return threads.template exponentials<T>(v, sum);
#pragma unroll
    for (int k = 0; k < SEQUENCES - 1; k++)
        if (k < count)
            threads.template exponentials<T>(reinterpret_cast<float(&)[1][N]>(v[k]),
                                             reinterpret_cast<float(&)[1]>(sum[k]));
}

/* Sums the moments of the block's threads through `shared`, and stores them. Threads `width` apart have the same
 * features; there are `step` of them. */
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

/* N, SHIFTED: see RotateForm. F: Tiling::f, or RUNTIME_F. DTHETA: the moments of dtheta are wanted. */
template <typename T, int N, bool FORWARD, int F, bool DTHETA, bool SHIFTED>
__global__ void __launch_bounds__(THREADS, Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED>::BLOCKS_PER_SM)
    rotate(const Arguments<T> a, const Tiling tiling) {
    if (F != COLUMN_STATISTICS)
        wait_for_inputs();
    typedef Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED> Pipeline;
    constexpr int INPUTS = Pipeline::INPUTS, SEQUENCES = Pipeline::SEQUENCES;
    DYNAMIC_SHARED_ALIGNED(128, char, dynamic);
    /* [feature of a thread][thread of the tile] */
    const AngleTable<T> table = {dynamic + Pipeline::STAGED, Pipeline::ANGLES};
    __shared__ typename RowThreads<Pipeline::BLOCK>::Exchange exchange;
    __shared__ double moments[DTHETA ? THREADS * N : 1];
    const int f = F == RUNTIME_F ? tiling.f : F, width = tiling.width(), column = threadIdx.x & (width - 1);
    const int row = threadIdx.x >> tiling.width_log2, step_log2 = THREADS_LOG2 - tiling.width_log2,
              step = 1 << step_log2;
    const bool softmax = f >= LANE_SOFTMAX, reads_x = FORWARD || DTHETA || f != RAFTER_ACT_NONE;
    const bool on_chip = Pipeline::BLOCK || f == LANE_SOFTMAX; /* the threads of a row compute its softmax */
    RowThreads<Pipeline::BLOCK> row_threads = {tiling.lanes, tiling.lanes / WARP, exchange};

    if constexpr (DTHETA)
        start_next_kernel(); /* which sums the moments */
    const RotatePlace<T, N, SHIFTED> place(a, tiling, column);

    /* theta is loaded first: the table of angles waits for it, and everything else waits for the table. */
    const auto theta_of = [&](int i) {
        const Tiling::Place at = tiling.place<N>(place.tile, i & (width - 1), i >> tiling.width_log2);
        /* 1, not 0: an angle of 0 is computed the slow way (angles.cuh). */
        return at.h < a.heads && at.d < a.features ? a.theta_at(at.h, at.d) : 1.0f;
    };
    const int angles = N << tiling.width_log2;
    const float theta = (int)threadIdx.x < angles ? theta_of(threadIdx.x) : 1.0f;

    Inputs<T, N, FORWARD, SHIFTED, Pipeline> inputs(a, place, row, step_log2, dynamic, softmax, reads_x);
    inputs.start(on_chip && !place.active);

    const auto entry = [&](int i) { /* rows of the table have a constant length, so that offsets are constants */
                                    return (i >> tiling.width_log2) * (Pipeline::ANGLES / N) + (i & (width - 1));
    };
    if ((int)threadIdx.x < angles)
        table.put(entry(threadIdx.x), theta);
    if constexpr (Pipeline::BLOCK)
        for (int i = threadIdx.x + THREADS; i < angles; i += THREADS)
            table.put(entry(i), theta_of(i));
    __syncthreads();
    if (F == COLUMN_STATISTICS)
        wait_for_previous_kernel(); /* for the statistics; the kernel that wrote them has waited for other inputs */

    const Strides &out_stride = FORWARD ? a.y_stride : a.dx_stride;
    const int64_t row_columns = a.heads * a.features, columns = a.batch * row_columns;
    double moment[DTHETA ? N : 1] = {};
    int stage = 0; /* holds the packs that are worked on */
    T *out_token = a.out + place.offset(place.first_token + row, out_stride);
    for (int64_t first = place.first_token; first < place.end_token; first += step) {
        const int64_t n = first + row;
        const bool has_token = place.active && n < place.end_token;
        const int64_t token = a.position(place.first_b, n < place.end_token ? n : place.end_token - 1);
        float cosine[N], sine[N], angle_gradient[DTHETA ? N : 1] = {};
        const Position position = position_of(token);
        angles_at<DTHETA>(
            table, tiling.unit_angles, [&](int j) { return j * (Pipeline::ANGLES / N) + column; },
            [&](int) { return position; }, sine, cosine);

        T *out = out_token;
        const float *column_statistics = tiling.statistics + a.column(place.first_b, place.h, place.d);
#pragma unroll 1
        for (int b = 0; b < place.sequences; b += SEQUENCES) {
            Pack<T, N> packs[SEQUENCES][INPUTS];
            float given[SEQUENCES][FORWARD ? 2 : 3][N]; /* COLUMN_STATISTICS */
            if (F == COLUMN_STATISTICS)
                read_column_statistics(place, column_statistics, row_columns, columns, has_token, b, given);
            column_statistics += SEQUENCES * row_columns;
            inputs.take(stage, packs);
            /* v: x, then for a softmax p / scale. sum: of its exponentials. dot: of p g */
            float v[SEQUENCES][N], sum[SEQUENCES], dot[SEQUENCES] = {};
            if (reads_x)
                unpack_x(packs, v);
            if (on_chip)
                exponentials_of<T>(row_threads, place.sequences - b, v, sum);
#pragma unroll
            for (int k = 0; k < SEQUENCES; k++) {
                if (k > 0 && b + k >= place.sequences)
                    break; /* uniform over the block. Worth it for a batch of one */
                const bool valid = has_token;
                const float scale = on_chip ? reciprocal_fast(sum[k]) : 1.0f; /* sum >= 1, or NaN */
                if (F == ROW_STATISTICS && valid)
                    dot[k] = softmax_of_row<T, FORWARD>(v[k], tiling, a.row(place.first_b + b + k, n, place.h));
                if (F == COLUMN_STATISTICS)
                    softmax_of_columns<T>(v[k], given[k]);
                if constexpr (FORWARD) {
                    float c[N], s[N];
                    y_of<T>(f, v[k], scale, cosine, sine, c, s);
                    place.store(out, packed<T, N>(c), valid);
                    place.store(out + a.half, packed<T, N>(s), valid);
                } else {
                    float c[N], s[N], g[N], sums[1] = {};
                    unpack_dy(packs[k], c, s);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        g[j] = fmaf(c[j], cosine[j], s[j] * sine[j]);
                        if (on_chip)
                            sums[0] = fmaf(v[k][j], g[j], sums[0]);
                    }
                    if (on_chip) {
                        row_threads.sum(sums);
                        dot[k] = sums[0] * scale;
                    }
                    input_gradient<DTHETA, T>(f, v[k], scale, dot[k], given[k][2], g);
                    if constexpr (DTHETA)
                        if (valid)
#pragma unroll
                            for (int j = 0; j < N; j++)
                                angle_gradient[j] = fmaf(v[k][j], s[j] * cosine[j] - c[j] * sine[j], angle_gradient[j]);
                    if (!DTHETA || a.out)
                        place.store(out, packed<T, N>(g), valid);
                }
                out += out_stride.b;
            }
            stage = inputs.refill(stage);
        }
        out_token += step * out_stride.n;
        if constexpr (DTHETA)
#pragma unroll
            for (int j = 0; j < N; j++)
                moment[j] += (double)token * (double)angle_gradient[j];
    }

    if constexpr (DTHETA)
        store_moments(a, tiling, place, width, step, moment, moments);
}

/* ---- planning and launching ------------------------------------------------------------------ */

/* Whether features are adjacent in memory, in all tensors but dy. */
inline bool features_are_adjacent(const lrpe_cosine_call &call) {
    const rafter_view *const views[] = {&call.x, &call.y, &call.dx};
    bool all = true;
    for (const rafter_view *view : views)
        all = all && (!view->data || view->stride[3] == 1);
    return all;
}

/* Which instance of `rotate` a call takes. `n`: features per thread. `shifted`: they are not aligned packs in all
 * tensors, so that packs are loaded and stored shifted. Packs of 8 bytes need no shifting if rows are aligned to that.
 * bp and short rows have narrow tiles, which only single features can fill. */
struct RotateForm {
    int n;
    bool shifted;

    explicit RotateForm(const lrpe_cosine_call &call) {
        const int width = 16 / static_cast<int>(rafter_dtype_bytes(call.x.dtype));
        const bool packs = takes_packs(call, true), half_packs = takes_half_packs(call);
        shifted = !packs && !half_packs && call.algorithm != RAFTER_LRPE_BP && features_are_adjacent(call) &&
                  call.x.shape[3] >= 2 * width && call.x.shape[2] * call.x.shape[3] >= WARP * width;
        n = packs || shifted ? width : half_packs ? width / 2 : 1;
    }
};

/* Tiles and chunks of `rotate`. */
inline Tiling plan_rotate(const rafter_cuda_state &device, const lrpe_cosine_call &call, int f) {
    Tiling tiling = {};
    const RotateForm form(call);
    const int64_t heads = call.x.shape[2], features = call.x.shape[3];
    tiling.f = f;
    const bool bp = call.algorithm == RAFTER_LRPE_BP;

    /* bp has few blocks, so tiles are narrow. The threads that share a softmax must be in one tile. */
    const bool together = f == LANE_SOFTMAX || f == BLOCK_SOFTMAX;
    const int least = f == BLOCK_SOFTMAX ? WARP : 1;
    int row_threads = together ? power_at_least(ceil_div(features, int64_t(form.n)), least, THREADS) : 0;
    /* If arithmetic is the limit, no lanes may be idle: heads follow each other within warps. If memory is the limit, a
     * head is stored by one warp, or by whole warps. */
    if (!together && !form.shifted && sequences_alike(call) >= MANY_ALIKE) {
        const int64_t packs = ceil_div(features, int64_t(form.n));
        row_threads = packs <= WARP ? power_at_least(packs, 1, WARP) : (int)round_up(packs, int64_t(WARP));
    }
    const int least_width = form.n > 1 && !form.shifted ? NARROW_TILE : WARP;
    plan_tiles(&tiling, heads, features, form.n, least_width, max(together ? row_threads : 1, bp ? NARROW_TILE : WARP),
               row_threads);
    const bool forward = call.common.direction == RAFTER_FORWARD;
    const int blocks = rotate_blocks(forward, f, f != COLUMN_STATISTICS && call.dtheta.data, form.shifted);
    plan_waves(&tiling, call, THREADS / tiling.width(), (int64_t)device.multiprocessors * blocks, 16);
    return tiling;
}

template <int F, bool DTHETA, typename T, int N, bool FORWARD, bool SHIFTED>
void launch_form(const rafter_context *context, const lrpe_cosine_call &call, const Tiling &tiling) {
    launch(context, {tiling.blocks(), THREADS, Pipeline<T, N, FORWARD, F, DTHETA, SHIFTED>::BYTES},
           rotate<T, N, FORWARD, F, DTHETA, SHIFTED>, arguments<T>(call), tiling);
}

/* Launches the form of kernel that the call needs. `dtheta`: the kernel computes the moments of dtheta. */
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
    else if (form.n == wide)
        with(wide, std::false_type());
    else if (form.n > 1) {
        if constexpr (F == RUNTIME_F && NARROW<T>)
            with(std::integral_constant<int, WIDE<T> / 2>(), std::false_type());
    } else if constexpr (F != BLOCK_SOFTMAX)
        with(std::integral_constant<int, 1>(), std::false_type());
}

} // namespace lrpe

#endif
