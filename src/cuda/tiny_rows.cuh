/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of 2 to 32 elements that follow each other, at any alignment, without gaps or, if no gradient is
 * written, with small ones: blocks copy 256 rows at a time into shared memory, as one span of aligned
 * packs; then a thread takes a row. The next two tiles are in flight meanwhile. Gradients go back the same
 * way.
 *
 * An Op: Row no_row(), Row load(int row), void begin(), void finish(const Row &, int row, const float (&x)[COUNT],
 * const T *elements); and for gradients it overwrites the elements.
 */
#ifndef RAFTER_CUDA_TINY_ROWS_CUH
#define RAFTER_CUDA_TINY_ROWS_CUH

#include <type_traits>

#include "cuda/slabs.cuh"

constexpr int TINY_THREADS = 256, TINY_SIDES = 3;

/* As a kernel argument. */
struct TinyRows {
    char *data[2]; /* the input, and its gradient, aligned alike */
    int rows, length;
    int pitch; /* elements from a row to the next */
    unsigned tiles;
    int side_bytes; /* of a tile in shared memory */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Elements from a row to the next, or 0: rows are not close enough. */
static inline int64_t tiny_pitch(const Slabs &s, int tensors) {
    if (s.inner != 1 || !s.dense(0) || s.walk.dims > 1)
        return 0;
    if (tensors > 1)
        return s.packed(0) && s.packed(1) ? s.length : 0;
    const int64_t pitch = s.outer <= 1 ? s.length : s.walk.stride[0][0];
    return pitch >= s.length && pitch <= 2 * s.length ? pitch : 0;
}

/* Why these rows are not for it, or NULL. */
static inline const char *why_not_tiny(const Slabs &s, int tensors, int bytes) {
    constexpr int64_t LONGEST = 32, LEAST_ROWS = 1 << 13;
    if (s.length < 2 || s.length > LONGEST)
        return "rows have fewer than 2 or more than 32 elements";
    const int64_t pitch = tiny_pitch(s, tensors);
    if (pitch == 0)
        return "rows do not follow each other, or with large gaps";
    if (s.rows() < LEAST_ROWS || s.rows() > INT32_MAX - TINY_THREADS)
        return "rows are few, or more than 31 bits count";
    if (pitch * bytes % (pitch == s.length ? 16 : 32) == 0)
        return "threads would wait for each other's banks";
    return tensors > 1 && (reinterpret_cast<uintptr_t>(s.data[0]) - reinterpret_cast<uintptr_t>(s.data[1])) % 16 != 0
               ? "the gradient is aligned otherwise"
               : NULL;
}

static inline TinyRows tiny_rows_of(const Slabs &s, int bytes) {
    TinyRows t = {};
    t.data[0] = s.data[0];
    t.data[1] = s.data[1];
    t.rows = static_cast<int>(s.rows());
    t.length = static_cast<int>(s.length);
    t.pitch = static_cast<int>(tiny_pitch(s, 1)); /* of one tensor or of two */
    t.tiles = static_cast<unsigned>(ceil_div<int64_t>(s.rows(), TINY_THREADS));
    t.side_bytes = TINY_THREADS * t.pitch * bytes + 16; /* a multiple of 16; and what precedes the first element */
    return t;
}

static inline size_t tiny_shared(const TinyRows &t) {
    return size_t(TINY_SIDES) * t.side_bytes;
}
static inline int64_t tiny_blocks(const TinyRows &t, const rafter_cuda_state &device, int most_per_sm) {
    const int64_t fit = (device.shared_bytes + 1024) / (int64_t(tiny_shared(t)) + 2048);
    return min(int64_t(t.tiles), max(min(fit, int64_t(most_per_sm)), int64_t(1)) * device.multiprocessors);
}

/* Calls f(std::integral_constant<int, COUNT>()), COUNT at least the length of rows. */
template <typename F> static void for_tiny_count(int length, F f) {
    if (length <= 4)
        f(std::integral_constant<int, 4>());
    else if (length <= 8)
        f(std::integral_constant<int, 8>());
    else if (length <= 12)
        f(std::integral_constant<int, 12>());
    else if (length <= 16)
        f(std::integral_constant<int, 16>());
    else if (length <= 24)
        f(std::integral_constant<int, 24>());
    else
        f(std::integral_constant<int, 32>());
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A tile as a span of adjacent elements; `ragged` of them would fit before the first at an aligned address. */
template <typename T> struct TinyTile {
    AlignedSpan<const T> span;
    int64_t begin; /* of the tile in the tensor */
    int ragged;

    DEVICE TinyTile(const TinyRows &t, unsigned tile) {
        const T *const data = reinterpret_cast<const T *>(t.data[0]);
        begin = int64_t(tile) * (TINY_THREADS * t.pitch);
        const int rows = min(t.rows - static_cast<int>(tile * TINY_THREADS), TINY_THREADS);
        span = AlignedSpan<const T>(data + begin, (rows - 1) * t.pitch + t.length);
        ragged = static_cast<int>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T)); /* the same for all tiles */
    }
    /* The place of element i of the body, which may be before it. */
    DEVICE int place(int64_t i) const {
        return ragged + span.head + static_cast<int>(i);
    }
    DEVICE void load(T *side) const {
        constexpr int N = WIDE<T>;
        for (int i = threadIdx.x; i < span.packs; i += TINY_THREADS)
            copy_async<T, N>(reinterpret_cast<Pack<T, N> *>(side + place(i * N)), span.body + i * N);
        for (int e = threadIdx.x; e < span.edges; e += TINY_THREADS)
            side[place(span.edge(e))] = span.body[span.edge(e)];
    }
    DEVICE void store(const T *side, const TinyRows &t) const {
        constexpr int N = WIDE<T>;
        T *const body = reinterpret_cast<T *>(t.data[1]) + begin + span.head;
        for (int i = threadIdx.x; i < span.packs; i += TINY_THREADS)
            store_once<T, N>(body + i * N, load_once<T, N>(side + place(i * N)));
        for (int e = threadIdx.x; e < span.edges; e += TINY_THREADS)
            body[span.edge(e)] = side[place(span.edge(e))];
    }
};

/* The maximum and the sum of exponentials of x, of which absent elements are -inf. */
template <typename T, int COUNT> DEVICE RowStats stats_of_row(const float (&x)[COUNT]) {
    float max[2] = {x[0], x[1]};
#pragma unroll
    for (int j = 2; j < COUNT; j++)
        max[j % 2] = fmaxf(max[j % 2], x[j]);
    const float top = fmaxf(fmaxf(max[0], max[1]), -INFINITY), pivot = pivot_at(top);
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        sum[j % 4] += exp_below(x[j] - pivot, 1.0f);
    return {top, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

template <class Op, typename T, int COUNT, bool GRADIENT>
DEVICE void tiny_rows(Op &op, const TinyRows &t, uint4 *shared_memory) {
    char *const sides = reinterpret_cast<char *>(shared_memory);
    const auto side_at = [&](int side) { return reinterpret_cast<T *>(sides + side * t.side_bytes); };
    const auto load = [&](unsigned tile, int side) {
        if (tile < t.tiles)
            TinyTile<T>(t, tile).load(side_at(side));
        copy_commit();
    };
    const auto row_of = [&](unsigned tile) { return static_cast<int>(tile * TINY_THREADS + threadIdx.x); };
    const auto load_row = [&](unsigned tile) {
        return tile < t.tiles && row_of(tile) < t.rows ? op.load(row_of(tile)) : op.no_row();
    };
    unsigned tile = blockIdx.x;
    load(tile, 0);
    load(tile + gridDim.x, 1);
    typename Op::Row row = load_row(tile);
    op.begin();
    for (int side = 0; tile < t.tiles; tile += gridDim.x, side = side == TINY_SIDES - 1 ? 0 : side + 1) {
        copy_wait<1>();
        __syncthreads(); /* the tile is there, and no thread uses the one before it */
        load(tile + 2 * gridDim.x, side == 0 ? TINY_SIDES - 1 : side - 1);
        const typename Op::Row following = load_row(tile + gridDim.x);
        const TinyTile<T> place(t, tile);
        if (row_of(tile) < t.rows) {
            T *const elements = side_at(side) + place.ragged + threadIdx.x * t.pitch;
            float x[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                x[j] = j < t.length ? to_float(elements[j]) : -INFINITY;
            op.finish(row, row_of(tile), x, elements);
        }
        row = following;
        if constexpr (GRADIENT) {
            __syncthreads();
            place.store(side_at(side), t);
        }
    }
}

#endif
