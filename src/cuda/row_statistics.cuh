/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The softmax statistics of rows, for logsumexp and the losses.
 *
 * A row is reduced by 8 or 32 lanes of a warp, or by a block. Each thread keeps a running maximum
 * and sum; they are merged by butterfly shuffles and through shared memory, always in the same
 * order.
 */
#ifndef RAFTER_CUDA_ROW_STATISTICS_CUH
#define RAFTER_CUDA_ROW_STATISTICS_CUH

#include "cuda/reductions.cuh"
#include "cuda/row_parts.cuh"
#include "cuda/rows.cuh"

/* ---- maxima and exponentials ----------------------------------------------------------------- */

template <typename T, int N, int COUNT> DEVICE Pack<T, N> max_of_each(const Pack<T, N> (&packs)[COUNT]) {
    Pack<T, N> top = packs[0];
#pragma unroll
    for (int k = 1; k < COUNT; k++)
        top = max_of(top, packs[k]);
    return top;
}

/* The largest element, NaN skipped; -inf if all are NaN. */
template <typename T, int N, int COUNT> DEVICE float max_of_all(const Pack<T, N> (&packs)[COUNT]) {
    float all = -INFINITY;
    if constexpr (NARROW<T> && N % 2 == 0) {
        Pack<T, 2> top = reinterpret_cast<const Pack<T, 2> &>(packs[0]);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j += 2)
                top = max_of(top, reinterpret_cast<const Pack<T, 2> &>(packs[k].v[j]));
        float x[2];
        unpack(top, x);
        all = fmaxf(fmaxf(all, x[0]), x[1]);
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                all = fmaxf(all, to_float(packs[k].v[j]));
    }
    return all;
}

/* e^(scale * d) for sums over elements of type T: full precision for float, relative error of 2^-17
 * or less for the 16-bit types. */
template <typename T> DEVICE float exp_term(float d, float scale) {
    if constexpr (NARROW<T>)
        return exp2_fast(d * (scale * LOG2E));
    else
        return expf(d * scale);
}

/* The same for d <= 0, in sums relative to their maximum, for any T. The relative error is 2^-22 plus 2^-24 times the
 * exponent. Terms with a large exponent hardly count in the sum, so it is off by a few units in the last place. Takes 3
 * instructions, exp_term<float> 9. */
DEVICE float exp_below(float d, float scale) {
    return exp2_fast(d * (scale * LOG2E));
}

/* c * e^(scale * (x - pivot)) for many x, each to be rounded to T. For the 16-bit types the exponent of c is added to
 * the argument of the exponential, so that a large c is not multiplied by an exponential that was flushed to 0. The
 * argument gets 24 more, which `factor` takes back: that last product rounds to subnormals correctly. */
template <typename T> struct ScaledExp {
    float pivot, rate, shift, factor;

    DEVICE ScaledExp() {
    }
    DEVICE ScaledExp(float c, float at, float scale) : pivot(at), rate(scale), shift(0.0f), factor(c) {
        if constexpr (NARROW<T>) {
            rate = scale * LOG2E;
            const int biased = __float_as_int(c) >> 23 & 255;
            if (biased != 0 && biased != 255) {
                const int exponent = biased - 127, spare = exponent < 100 ? 24 : 0;
                shift = static_cast<float>(exponent + spare);
                factor = __int_as_float((__float_as_int(c) & 0x807fffff) | (127 - spare) << 23);
            }
        }
    }
    DEVICE float exp(float x) const {
        if constexpr (NARROW<T>)
            return exp2_fast(fmaf(x - pivot, rate, shift));
        else
            return expf((x - pivot) * rate);
    }
    DEVICE float of(float x) const {
        return factor * exp(x);
    }
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &pack) const {
        float x[N];
        unpack(pack, x);
#pragma unroll
        for (int j = 0; j < N; j++)
            x[j] = of(x[j]);
        return packed<T>(x);
    }
};

/* log(a) with a relative error of 2^-31, in a third of the instructions of log(). Enough for results that are rounded
 * to fp32, also after other numbers were added. */
DEVICE double log_of_sum(double a) {
    const int high = __double2hiint(a);
    if (static_cast<unsigned>(high) - 0x00100000u >= 0x7fe00000u)
        return log(a);                       /* 0, infinite, NaN, subnormal or negative */
    const int k = (high - 0x3fe6a09e) >> 20; /* a = 2^k m, sqrt(0.5) <= m < sqrt(2) */
    const double t = __hiloint2double(high - k * (1 << 20), __double2loint(a)) - 1.0;
    double p = -0.06176834941170832;
    p = fma(p, t, 0.10688850998534408);
    p = fma(p, t, -0.10749106143653182);
    p = fma(p, t, 0.11017633350199126);
    p = fma(p, t, -0.12432559251043672);
    p = fma(p, t, 0.142870051706968);
    p = fma(p, t, -0.1666904465638839);
    p = fma(p, t, 0.2000002142574707);
    p = fma(p, t, -0.24999970676556021);
    p = fma(p, t, 0.3333333305176766);
    p = fma(p, t, -0.5000000005836666);
    return fma(static_cast<double>(k), 0.69314718055994530942, fma(t * t, p, t));
}

/* ---- running statistics ---------------------------------------------------------------------- */

/* `sum` is the sum of e^(scale * (x - pivot_at(max))). A NaN makes the sum NaN, and the maximum
 * skips it; a +inf makes the sum +inf (or NaN). */
struct alignas(8) RowStats {
    float max, sum;
};

DEVICE RowStats no_elements() {
    return {-INFINITY, 0.0f};
}

/* What is subtracted before the exponential. Never an infinity: inf - inf would be NaN. */
DEVICE float pivot_at(float max) {
    return fabsf(max) == INFINITY ? 0.0f : max;
}

template <typename T> DEVICE RowStats stats_of_one(T x, float scale) {
    const float a = to_float(x);
    return {a, exp_term<T>(a - pivot_at(a), scale)};
}

DEVICE RowStats merge(RowStats a, RowStats b, float scale) {
    const float max = fmaxf(a.max, b.max), pivot = pivot_at(max);
    return {max, a.sum * expf((a.max - pivot) * scale) + b.sum * expf((b.max - pivot) * scale)};
}

/* Merges groups of LANES adjacent lanes. All lanes of the warp take part; each gets its group's
 * result. */
template <int LANES> DEVICE RowStats merge_lanes(RowStats s, float scale) {
    float max = s.max;
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    float sum = s.sum * expf((s.max - pivot_at(max)) * scale);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    return {max, sum};
}

/* The same for a number of lanes that is known at run time. */
DEVICE RowStats merge_some_lanes(RowStats s, int lanes, float scale) {
    float max = s.max;
    for (int step = lanes / 2; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    float sum = s.sum * expf((s.max - pivot_at(max)) * scale);
    for (int step = lanes / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    return {max, sum};
}

/* Loads statistics that another block has stored. */
DEVICE RowStats load_stats(const RowStats *stored) {
    const float2 both = __ldcg(reinterpret_cast<const float2 *>(stored));
    return {both.x, both.y};
}

/* Merges a block of at most 32 whole warps; only warp 0 gets the result. */
DEVICE RowStats merge_block(RowStats s, float scale) {
    __shared__ RowStats warp_stats[WARP];
    s = merge_lanes<WARP>(s, scale);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0)
        warp_stats[warp] = s;
    __syncthreads();
    if (warp == 0)
        s = merge_lanes<WARP>(lane < blockDim.x / WARP ? warp_stats[lane] : no_elements(), scale);
    return s;
}

/* ---- the inner loop -------------------------------------------------------------------------- */

/* Packs that a thread loads before it uses the first one. */
constexpr int IN_FLIGHT = 4;

/* Adds packs of one row to `s`. `total`, if not NULL, gets the sum of the elements of the first `valid` packs. */
template <typename T, int N, int COUNT>
DEVICE void add_packs(RowStats &s, const Pack<T, N> (&packs)[COUNT], float scale, float *total = nullptr,
                      int valid = COUNT) {
    const float max = fmaxf(s.max, max_of_all(packs)), pivot = pivot_at(max);
    float sum[4] = {s.sum * exp_below(s.max - pivot, scale), 0.0f, 0.0f, 0.0f}, all = 0.0f;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float x[N], of_pack = 0.0f;
        unpack(packs[k], x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum[(k * N + j) % 4] += exp_below(x[j] - pivot, scale);
            of_pack += x[j];
        }
        all += k < valid ? of_pack : 0.0f;
    }
    s = {max, (sum[0] + sum[1]) + (sum[2] + sum[3])};
    if (total)
        *total += all;
}

/* Adds packs whose element j belongs to row j. */
template <typename T, int N, int COUNT>
DEVICE void add_lines_of(RowStats (&lines)[N], const Pack<T, N> (&packs)[COUNT], float scale) {
    float x[COUNT][N], top[N];
    unpack(max_of_each(packs), top);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        unpack(packs[k], x[k]);
#pragma unroll
    for (int j = 0; j < N; j++) {
        RowStats &s = lines[j];
        const float max = fmaxf(s.max, top[j]), pivot = pivot_at(max);
        float sum = s.sum * exp_below(s.max - pivot, scale);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            sum += exp_below(x[k][j] - pivot, scale);
        s = {max, sum};
    }
}

/* The statistics of one thread's share of a row: every threads-th pack and edge element. */
template <typename T> DEVICE RowStats stats_of(const AlignedSpan<const T> &row, int thread, int threads, float scale) {
    constexpr int N = WIDE<T>;
    RowStats s = no_elements();
#pragma unroll 1
    for (int e = thread; e < row.edges; e += threads)
        s = merge(s, stats_of_one(row.body[row.edge(e)], scale), scale);

    Pack<T, N> packs[IN_FLIGHT];
    const int64_t stride = int64_t(threads) * N;
    const T *p = row.body + thread * N, *const end = row.body + row.packs * N;
    for (; p + (IN_FLIGHT - 1) * stride < end; p += IN_FLIGHT * stride) {
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            packs[k] = load_once<T, N>(p + k * stride);
        add_packs(s, packs, scale);
    }
    if (p < end) {
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            packs[k] = load_once_if<T, N>(p + k * stride < end, p + k * stride, -INFINITY);
        add_packs(s, packs, scale);
    }
    return s;
}

/* The same for rows of whole packs, in two steps, so that other loads can be issued in between.
 * Packs past the end of the row are full of -inf. */
template <typename T, int COUNT>
DEVICE void load_packs(Pack<T, WIDE<T>> (&packs)[COUNT], const T *row, int row_packs, int first, int step) {
    constexpr int N = WIDE<T>;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        packs[k] = load_once_if<T, N>(first + k * step < row_packs, row + (first + k * step) * N, -INFINITY);
}
/* `packs` holds the first packs, loaded with load_packs. `total`, if not NULL, gets the sum of the elements. */
template <typename T, int COUNT>
DEVICE RowStats stats_of_packs(Pack<T, WIDE<T>> (&packs)[COUNT], const T *row, int row_packs, int thread, int threads,
                               float *total = nullptr) {
    RowStats s = no_elements();
    for (int i = thread; i < row_packs;) {
        add_packs(s, packs, 1.0f, total, total ? min((row_packs - i + threads - 1) / threads, COUNT) : COUNT);
        i += COUNT * threads;
        if (i < row_packs)
            load_packs(packs, row, row_packs, i, threads);
    }
    return s;
}

#endif
