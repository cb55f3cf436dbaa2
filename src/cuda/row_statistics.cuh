/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows and their softmax statistics, for logsumexp and the losses.
 *
 * A row is reduced by 8 or 32 lanes of a warp, or by a block. Each thread keeps a running maximum
 * and sum; they are merged by butterfly shuffles and through shared memory, always in the same
 * order.
 */
#ifndef RAFTER_CUDA_ROW_STATISTICS_CUH
#define RAFTER_CUDA_ROW_STATISTICS_CUH

#include "core/tensor.h"
#include "cuda/vocabulary.cuh"

/* ---- rows of a tensor ------------------------------------------------------------------------ */

/* Element i of an array of any of the three dtypes. */
DEVICE float load_number(const void *data, rafter_dtype dtype, int64_t i) {
    return dtype == RAFTER_F32    ? static_cast<const float *>(data)[i]
           : dtype == RAFTER_BF16 ? to_float(static_cast<const bf16 *>(data)[i])
                                  : to_float(static_cast<const fp16 *>(data)[i]);
}
/* The same in two steps, load and conversion, so that more loads can be issued in between. With a branch per dtype, as
 * in load_number, each branch would end with the conversion and wait for its load. */
DEVICE unsigned load_bits_now(const void *data, rafter_dtype dtype, int64_t i) {
    const bool wide = dtype == RAFTER_F32;
    return load_2_or_4_bytes_now(static_cast<const char *>(data) + (i << (wide ? 2 : 1)), wide);
}
DEVICE float number_of_bits(unsigned bits, rafter_dtype dtype) {
    return number_of<RAFTER_F32, RAFTER_BF16>(bits, static_cast<unsigned>(dtype));
}
DEVICE float load_number_now(const void *data, rafter_dtype dtype, int64_t i) {
    return number_of_bits(load_bits_now(data, dtype, i), dtype);
}
DEVICE void store_number(void *data, rafter_dtype dtype, int64_t i, float value) {
    if (dtype == RAFTER_F32)
        static_cast<float *>(data)[i] = value;
    else if (dtype == RAFTER_BF16)
        static_cast<bf16 *>(data)[i] = from_float<bf16>(value);
    else
        static_cast<fp16 *>(data)[i] = from_float<fp16>(value);
}

/* Division of numbers below 2^63 by a divisor of at least 2 that the host knows. Kernels multiply by `multiplier`
 * instead of dividing, which takes a hundred instructions. */
struct Reciprocal {
    uint64_t multiplier; /* 2^(64 + shift) / divisor, rounded up */
    int shift;
};
static inline Reciprocal reciprocal_of(int64_t divisor) {
    Reciprocal r = {0, 0};
    while (int64_t(2) << r.shift < divisor)
        r.shift++;
    const unsigned __int128 one = static_cast<unsigned __int128>(1) << (64 + r.shift);
    r.multiplier = static_cast<uint64_t>((one - 1) / static_cast<uint64_t>(divisor)) + 1;
    return r;
}

/* Where the rows of a tensor begin, as a kernel argument. Rows are numbered in row-major order of the leading
 * dimensions of a view. The members that most calls need come first. */
struct Rows {
    char *data;
    int64_t step;  /* stride of the last of these dimensions, in most calls the only one */
    int64_t inner; /* its size */
    int64_t last;  /* offset of the last row */
    rafter_dtype dtype;
    int dims;
    /* Entry d describes the step from the d-th dimension, counted from the last, to the next one outwards. `jump` is
     * the outer stride minus (inner stride * inner size). The other two divide by the inner size: see Reciprocal. */
    int64_t jump[RAFTER_VIEW_DIMS - 1];
    uint64_t multiplier[RAFTER_VIEW_DIMS - 1];
    unsigned char shift[RAFTER_VIEW_DIMS - 1];

    /* The offset of a row's first element, in elements. */
    DEVICE int64_t offset(int64_t row) const {
        int64_t at = row * step;
#pragma unroll 1
        for (int d = 0; d < dims - 1; d++) {
            row = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(row), multiplier[d]) >> shift[d]);
            at += row * jump[d];
        }
        return at;
    }
    template <typename T> DEVICE T *at(int64_t row) const {
        return reinterpret_cast<T *>(data) + offset(row);
    }

    /* For tensors that have one number per row. */
    DEVICE float get(int64_t row) const {
        return load_number(data, dtype, offset(row));
    }
    DEVICE void put(int64_t row, float value) const {
        store_number(data, dtype, offset(row), value);
    }
    /* For tensors that have one number per row: whether the number of row i is element i. */
    bool contiguous() const {
        return dims == 1 && (step == 1 || inner == 1);
    }
    /* Whether all rows begin at multiples of 16 bytes. */
    bool aligned() const {
        const int64_t bytes = rafter_dtype_bytes(dtype);
        bool all = reinterpret_cast<uintptr_t>(data) % 16 == 0 && step * bytes % 16 == 0;
        for (int d = 0; d < dims - 1; d++)
            all = all && jump[d] * bytes % 16 == 0;
        return all;
    }
    /* Whether every row, of `elements` adjacent elements, consists of whole, aligned packs of 16
     * bytes, and they are evenly spaced. */
    bool whole_packs(int64_t elements) const {
        return dims == 1 && aligned() && elements * rafter_dtype_bytes(dtype) % 16 == 0;
    }
};

/* The first `dims` dimensions of the view, merged where strides allow. */
static inline Rows rows_of(const rafter_view &view, int dims) {
    rafter_view rows = view, *only = &rows;
    Rows out = {};
    out.data = view.data;
    out.dtype = view.dtype;
    out.dims = rafter_collapse(&only, 1, 0, dims);
    const int last = out.dims - 1;
    out.inner = rows.shape[last];
    out.step = rows.stride[last];
    for (int d = 0; d <= last; d++)
        out.last += (rows.shape[d] - 1) * rows.stride[d];
    for (int d = last; d > 0; d--) {
        const Reciprocal by_size = reciprocal_of(max(rows.shape[d], int64_t(2))); /* below 2: there are no rows */
        out.jump[last - d] = rows.stride[d - 1] - rows.shape[d] * rows.stride[d];
        out.multiplier[last - d] = by_size.multiplier;
        out.shift[last - d] = static_cast<unsigned char>(by_size.shift);
    }
    return out;
}

/* A span of adjacent elements: its body, which consists of aligned packs, and its edges, less than one pack at either
 * end. */
template <typename T, typename Size = int64_t> struct AlignedSpan {
    T *body;
    Size packs;
    int head, edges; /* elements before the body; elements before and after it */

    DEVICE AlignedSpan() {
    }
    DEVICE AlignedSpan(T *first, Size n) {
        const int ragged = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T));
        head = ragged == 0 ? 0 : WIDE<T> - ragged;
        if (head > n)
            head = static_cast<int>(n);
        body = first + head;
        packs = (n - head) / WIDE<T>;
        edges = static_cast<int>(n - packs * WIDE<T>);
    }
    /* The offset of edge element e from the body. Elements before the body come first, with negative offsets. */
    DEVICE Size edge(int e) const {
        return e < head ? e - head : e - head + packs * WIDE<T>;
    }
};

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

/* ---- rows in parts --------------------------------------------------------------------------- */

/* How many blocks share a contiguous row. Few long rows are split if that saves more time than merging the parts
 * takes. Times are estimates, in us, for an H200, which runs 396 blocks at once. They depend on the shape only, never
 * on the device, so that all devices compute the same bits. */
static inline int64_t parts_of_row(int64_t rows, int64_t row_bytes) {
    constexpr int64_t AT_ONCE = 396, MULTIPROCESSORS = 132, MANY_ROWS = 1024, SHORT_ROW = 48 << 10, FEW_BLOCKS = 512;
    constexpr int64_t MOST_PARTS = WARP;     /* one warp merges them */
    constexpr int64_t USUAL_PART = 16 << 10; /* bytes: 256 threads with IN_FLIGHT packs each */
    constexpr double START = 0.6, MERGE = 2.2;
    if (rows >= MANY_ROWS || row_bytes <= SHORT_ROW)
        return 1;
    /* KB per us that each of `running` blocks reads: the least of the limits of a block, of its share of a
     * multiprocessor, and of its share of memory bandwidth. After the first wave, blocks start where others have ended,
     * often three on a multiprocessor. */
    const auto rate = [](int64_t running, bool first) {
        const double per_sm = first ? static_cast<double>((running + MULTIPROCESSORS - 1) / MULTIPROCESSORS) : 3.0;
        return fmin(fmin(26.0, 45.0 / per_sm), (first ? 4200.0 : 3500.0) / static_cast<double>(running));
    };
    int64_t best = 1;
    double least = INFINITY;
    for (int64_t parts = 1; parts <= min(row_bytes / USUAL_PART, MOST_PARTS); parts++) {
        const int64_t waves = rows * parts / AT_ONCE, rest = rows * parts % AT_ONCE;
        const double part = static_cast<double>(row_bytes) / 1024.0 / static_cast<double>(parts);
        double time = static_cast<double>(waves) * (START + part / rate(AT_ONCE, false));
        if (rest > 0)
            time += START + part / rate(rest, waves == 0);
        if (parts > 1)
            time += MERGE;
        if (time < 0.98 * least) {
            least = time;
            best = parts;
        }
    }
    /* Few blocks: parts of the usual size, which threads load all at once. */
    const int64_t usual = min(row_bytes / USUAL_PART, MOST_PARTS);
    return best > 1 && rows * usual <= FEW_BLOCKS ? usual : best;
}

/* Threads of a block that takes `bytes` bytes: a row or a part of one. With few blocks, the packs are divided evenly
 * over the threads: idle warps would only delay the block. */
static inline int threads_of_part(int64_t blocks, int64_t bytes, int in_flight, int most_threads) {
    constexpr int64_t FEW_BLOCKS = 396;
    const int64_t packs = bytes / 16;
    if (blocks > FEW_BLOCKS) {
        int threads = 2 * WARP;
        while (threads < packs / in_flight && threads < most_threads)
            threads *= 2;
        return threads;
    }
    const int64_t rounds = (packs + in_flight * most_threads - 1) / (in_flight * most_threads);
    const int64_t threads = rounds == 0 ? 0 : (packs + rounds * in_flight - 1) / (rounds * in_flight);
    return static_cast<int>(max((threads + WARP - 1) / WARP, int64_t(2))) * WARP;
}

/* Counts this block at `counter`. True in the last of `blocks` blocks, which then sees everything
 * that all of them wrote before, and has reset the counter to 0. Called by all threads. */
DEVICE bool block_arrives_last(unsigned *counter, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last)
            *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
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
