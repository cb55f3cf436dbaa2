/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of 2 to 32 elements that follow each other, at any alignment, without gaps or with small ones. A block copies a
 * tile of rows into shared memory as one span of aligned packs. The tile has 256 rows or a multiple of that, and each
 * thread computes one row or several. The next two tiles are in flight meanwhile. Gradients, which must have no gaps,
 * are stored the same way. scattered_rows below serves the other layouts of batch-invariant calls.
 *
 * An Op has
 *
 *     void begin()             called after the first loads: waits for the previous kernel
 *     Row no_row(), Row load(int row)
 *     void finish(const Row &, int row, bool present, const float (&x)[COUNT], const T *elements, T *gradient)
 *                              x: the row's elements, then -inf. `elements`, `gradient`: in shared memory, may be the
 *                              same. If the row is not present, finish gets no_row() and elements of any value, and
 *                              must write nothing but `gradient`
 */
#ifndef RAFTER_CUDA_TINY_ROWS_CUH
#define RAFTER_CUDA_TINY_ROWS_CUH

#include <type_traits>

#include "cuda/slabs.cuh"

constexpr int TINY_THREADS = 256, TINY_STAGES = 3; /* per block; tiles of the input in shared memory */
constexpr int LONGEST_TINY = 32;                   /* elements of a row */

/* Kernels are compiled for a few COUNTs, each for rows of up to COUNT elements. The COUNT for a length. */
__host__ __device__ constexpr int tiny_count(int length) {
    return length <= 4    ? length
           : length <= 8  ? (length + 1) / 2 * 2
           : length <= 16 ? (length + 3) / 4 * 4
                          : (length + 7) / 8 * 8;
}
/* The shortest length that a COUNT serves: that many elements exist in all rows and need no check. */
__host__ __device__ constexpr int least_of_count(int count) {
    int length = count;
    while (length > 2 && tiny_count(length - 1) == count)
        length--;
    return length;
}

/* Rows of a tile that a thread takes if there are many rows, at most `most`. The fixed cost of a tile is about that of
 * two rows of two elements. `bytes`: of an element. */
__host__ __device__ constexpr int many_tiny_rows(int count, int bytes, int most) {
    const int many = count * bytes <= 8 ? 8 : count * bytes <= 16 ? 4 : count * bytes <= 32 ? 2 : 1;
    return many < most ? many : most;
}

/* As a kernel argument. */
struct TinyRows {
    char *data[2]; /* the input, and its gradient */
    int rows, length;
    int per_thread; /* rows of a tile: 1, or many_tiny_rows */
    int pitch;      /* elements of the input from one row to the next */
    unsigned tiles;
    int side_bytes;     /* shared memory for a tile of the input */
    int gradient_bytes; /* for a tile of the gradient; 0: it overwrites the input's tile */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Elements from one row to the next; 0 if rows are not close enough for tiny_rows. */
static inline int64_t tiny_pitch(const Slabs &s) {
    if (s.inner != 1 || !s.dense(0) || s.walk.dims > 1)
        return 0;
    const int64_t pitch = s.outer <= 1 ? s.length : s.walk.stride[0][0];
    return pitch >= s.length && pitch <= 2 * s.length ? pitch : 0;
}

/* Why these rows are not for tiny_rows, or NULL. `tensors`: 2 if there is a gradient. */
static inline const char *why_not_tiny(const Slabs &s, int tensors, int bytes) {
    constexpr int64_t LEAST_ROWS = 1 << 13;
    if (s.length < 2 || s.length > LONGEST_TINY)
        return "rows have fewer than 2 or more than 32 elements";
    const int64_t pitch = tiny_pitch(s);
    if (pitch == 0)
        return "rows do not follow each other, or with large gaps";
    if (tensors > 1 && !s.packed(1))
        return "gradients do not follow each other";
    if (s.rows() < LEAST_ROWS || s.rows() > MOST_INT_ROWS)
        return "rows are few, or more than 31 bits count";
    if (pitch * bytes % (pitch == s.length ? 16 : 32) == 0)
        return "threads would wait for each other's banks";
    return NULL;
}

/* `most`: rows of a tile that a thread may take, limited by the registers that an Op needs for each. */
static inline TinyRows tiny_rows_of(const Slabs &s, int tensors, int bytes, int most) {
    constexpr int64_t MANY_ROWS = 1 << 20;
    TinyRows t = {};
    t.per_thread = s.rows() >= MANY_ROWS ? many_tiny_rows(tiny_count(static_cast<int>(s.length)), bytes, most) : 1;
    const int tile = TINY_THREADS * t.per_thread;
    t.data[0] = s.data[0];
    t.data[1] = s.data[1];
    t.rows = static_cast<int>(s.rows());
    t.length = static_cast<int>(s.length);
    t.pitch = static_cast<int>(tiny_pitch(s));
    t.tiles = static_cast<unsigned>(ceil_div<int64_t>(s.rows(), tile));
    t.side_bytes = tile * t.pitch * bytes + 16; /* 16 more, because the first element need not be aligned */
    const bool alike = t.pitch == t.length &&
                       (reinterpret_cast<uintptr_t>(s.data[0]) - reinterpret_cast<uintptr_t>(s.data[1])) % 16 == 0;
    t.gradient_bytes = tensors > 1 && !alike ? tile * t.length * bytes + 16 : 0;
    return t;
}

static inline size_t tiny_shared(const TinyRows &t) {
    return size_t(TINY_STAGES) * t.side_bytes + t.gradient_bytes;
}
static inline int64_t tiny_blocks(const TinyRows &t, const rafter_cuda_state &device, int most_per_sm) {
    const int64_t fit = (device.shared_bytes + 1024) / (int64_t(tiny_shared(t)) + 2048);
    return min(int64_t(t.tiles), max(min(fit, int64_t(most_per_sm)), int64_t(1)) * device.multiprocessors);
}

/* Calls f(std::integral_constant<int, COUNT>(), std::integral_constant<int, ROWS>()). COUNT: tiny_count of the length.
 * ROWS: rows per thread. MOST: `most` of tiny_rows_of. */
template <typename T, int MOST, typename F> static void for_tiny_shape(const TinyRows &t, F f) {
    const auto with = [&](auto count) {
        constexpr int MANY = many_tiny_rows(decltype(count)::value, sizeof(T), MOST);
        if (t.per_thread == 1)
            f(count, std::integral_constant<int, 1>());
        else if constexpr (MANY > 1)
            f(count, std::integral_constant<int, MANY>());
    };
    switch (tiny_count(t.length)) {
    case 2: return with(std::integral_constant<int, 2>());
    case 3: return with(std::integral_constant<int, 3>());
    case 4: return with(std::integral_constant<int, 4>());
    case 6: return with(std::integral_constant<int, 6>());
    case 8: return with(std::integral_constant<int, 8>());
    case 12: return with(std::integral_constant<int, 12>());
    case 16: return with(std::integral_constant<int, 16>());
    case 24: return with(std::integral_constant<int, 24>());
    default: return with(std::integral_constant<int, 32>());
    }
}

/* ---- rows in any layout ----------------------------------------------------------------------- */

/* Few rows, or rows that lie anywhere, for the same Ops and with the same results bit for bit. Batch-invariant calls
 * need both kernels. As a kernel argument. */
struct ScatteredRows {
    Rows in, out; /* out: the gradient */
    int rows, length;
    int64_t in_step, out_step; /* between elements */
    bool in_packs, out_packs;  /* rows consist of whole, aligned packs of 16 bytes */
    unsigned blocks;
};

/* The last dimension of the views is a row. dx may be NULL. */
static inline ScatteredRows scattered_rows_of(const rafter_view &x, const rafter_view *dx, int64_t rows,
                                              const rafter_cuda_state &device) {
    const auto step = [](const rafter_view &view) {
        return view.shape[view.ndim - 1] > 1 ? view.stride[view.ndim - 1] : 1;
    };
    ScatteredRows s = {};
    s.rows = static_cast<int>(rows);
    s.length = static_cast<int>(x.shape[x.ndim - 1]);
    s.in = rows_of(x, x.ndim - 1);
    s.in_step = step(x);
    s.in_packs = s.in_step == 1 && s.in.whole_packs(s.length);
    if (dx) {
        s.out = rows_of(*dx, dx->ndim - 1);
        s.out_step = step(*dx);
        s.out_packs = s.out_step == 1 && s.out.whole_packs(s.length);
    }
    s.blocks = static_cast<unsigned>(
        max(min(ceil_div<int64_t>(rows, TINY_THREADS), int64_t(4) * device.multiprocessors), int64_t(1)));
    return s;
}

/* Calls f(std::integral_constant<int, COUNT>()): COUNT is at least the length of rows. */
template <typename F> static void for_few_counts(int length, F f) {
    if (length <= 8)
        f(std::integral_constant<int, 8>());
    else
        f(std::integral_constant<int, LONGEST_TINY>());
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A tile as a span of adjacent elements. */
template <typename T> struct TinyTile {
    AlignedSpan<T> span;
    int ragged; /* elements between an aligned address and the first element, in memory and in shared memory */

    /* `rows` rows from row number `first` on, in a tensor at `data`. */
    DEVICE TinyTile(T *data, int64_t first, int rows, int pitch, int length) {
        span = AlignedSpan<T>(data + first * pitch, (rows - 1) * pitch + length);
        ragged = offset_in_pack(data); /* the same for all tiles */
    }
    /* The place in shared memory of element i, counted from the body; negative before it. */
    DEVICE int place(int64_t i) const {
        return ragged + span.head + static_cast<int>(i);
    }
    DEVICE void load(T *side) const {
        constexpr int N = WIDE<T>;
        const int packs = static_cast<int>(span.packs), own = static_cast<int>(threadIdx.x);
        for (int i = own; i < packs; i += TINY_THREADS)
            copy_async<T, N>(reinterpret_cast<Pack<T, N> *>(side + place(i * N)), span.body + i * N);
        if (own < span.edges)
            side[place(span.edge(own))] = span.body[span.edge(own)];
    }
    DEVICE void store(const T *side) const {
        constexpr int N = WIDE<T>;
        const int packs = static_cast<int>(span.packs), own = static_cast<int>(threadIdx.x);
        for (int i = own; i < packs; i += TINY_THREADS)
            store_once<T, N>(span.body + i * N, load_once<T, N>(side + place(i * N)));
        if (own < span.edges)
            span.body[span.edge(own)] = side[place(span.edge(own))];
    }
};

/* The statistics of one row. Absent elements are -inf. */
template <typename T, int COUNT> DEVICE RowStats stats_of_row(const float (&x)[COUNT]) {
    float max[2] = {x[0], x[1]};
#pragma unroll
    for (int j = 2; j < COUNT; j++)
        max[j % 2] = fmaxf(max[j % 2], x[j]);
    const float top = fmaxf(fmaxf(max[0], max[1]), -INFINITY), pivot = pivot_at(top);
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const float e = exp_below(x[j] - pivot, 1.0f);
        sum[j % 4] = j < 4 ? e : sum[j % 4] + e;
    }
    return {top, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

/* The loop of a kernel. ROWS: rows of a tile per thread. LEAST: elements that all rows have. */
template <class Op, typename T, int COUNT, int ROWS, bool GRADIENT, int LEAST = least_of_count(COUNT)>
DEVICE void tiny_rows(Op &op, const TinyRows &t, uint4 *shared_memory) {
    constexpr int TILE = ROWS * TINY_THREADS;
    char *const sides = reinterpret_cast<char *>(shared_memory);
    T *const data = reinterpret_cast<T *>(t.data[0]), *const gradients = reinterpret_cast<T *>(t.data[1]);
    const auto side_at = [&](int side) { return reinterpret_cast<T *>(sides + side * t.side_bytes); };
    const auto tile_of = [&](T *tensor, unsigned tile, int pitch) {
        const int first = static_cast<int>(tile * TILE);
        return TinyTile<T>(tensor, first, min(t.rows - first, TILE), pitch, t.length);
    };
    const auto load = [&](unsigned tile, int side) {
        if (tile < t.tiles)
            tile_of(data, tile, t.pitch).load(side_at(side));
        copy_commit();
    };
    const auto row_of = [&](unsigned tile, int r) {
        return static_cast<int>(tile * TILE + r * TINY_THREADS + threadIdx.x);
    };
    typename Op::Row row[ROWS], following[ROWS];
    const auto load_rows = [&](unsigned tile, typename Op::Row(&to)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            to[r] = tile < t.tiles && row_of(tile, r) < t.rows ? op.load(row_of(tile, r)) : op.no_row();
    };
    unsigned tile = blockIdx.x;
    load(tile, 0);
    load(tile + gridDim.x, 1);
    load_rows(tile, row);
    op.begin();
    for (int side = 0; tile < t.tiles; tile += gridDim.x, side = side == TINY_STAGES - 1 ? 0 : side + 1) {
        copy_wait<1>();
        __syncthreads(); /* the tile is there, and no thread uses the one before it */
        load(tile + 2 * gridDim.x, side == 0 ? TINY_STAGES - 1 : side - 1);
        load_rows(tile + gridDim.x, following);
        const bool in_place = !GRADIENT || t.gradient_bytes == 0;
        T *const results = side_at(in_place ? side : TINY_STAGES); /* after the sides */
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int at = r * TINY_THREADS + threadIdx.x;
            const T *const elements = side_at(side) + offset_in_pack(data) + at * t.pitch;
            T *const gradient = GRADIENT ? results + offset_in_pack(gradients) + at * t.length : nullptr;
            float x[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                x[j] = j < LEAST || j < t.length ? to_float(elements[j]) : -INFINITY;
            op.finish(row[r], row_of(tile, r), row_of(tile, r) < t.rows, x, elements, gradient);
            row[r] = following[r];
        }
        if constexpr (GRADIENT) {
            __syncthreads();
            tile_of(gradients, tile, t.length).store(results);
        }
    }
}

/* The loop of a kernel for ScatteredRows: a thread per row, with room for the row in shared memory. */
template <class Op, typename T, int COUNT, bool GRADIENT> DEVICE void scattered_rows(Op &op, const ScatteredRows &s) {
    constexpr int N = WIDE<T>, PACKS = COUNT / N;
    constexpr int PITCH = COUNT + 4 / int(sizeof(T)); /* an odd number of words: threads use different banks */
    __shared__ T places[TINY_THREADS * PITCH];
    T *const place = places + threadIdx.x * PITCH;
    int row = static_cast<int>(blockIdx.x * TINY_THREADS + threadIdx.x);
    for (bool first = true; first || row < s.rows; first = false, row += static_cast<int>(gridDim.x * TINY_THREADS)) {
        const bool present = row < s.rows;
        const typename Op::Row loaded = present ? op.load(row) : op.no_row();
        const T *const from = s.in.at<const T>(present ? row : 0);
        T x[COUNT];
        if (s.in_packs) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                const Pack<T, N> pack = load_once_if<T, N>(present && k * N < s.length, from + k * N, -INFINITY);
#pragma unroll
                for (int j = 0; j < N; j++)
                    x[k * N + j] = pack.v[j];
            }
        } else {
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                x[j] = present && j < s.length ? from[j * s.in_step] : from_float<T>(-INFINITY);
        }
        if (first) /* before any thread breaks: all of them call it */
            op.begin();
        if (!present)
            break;
        float v[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            v[j] = to_float(x[j]);
            place[j] = x[j];
        }
        op.finish(loaded, row, true, v, place, place);
        if constexpr (GRADIENT) {
            T *const to = s.out.at<T>(row);
            if (s.out_packs) {
#pragma unroll
                for (int k = 0; k < PACKS; k++)
                    if (k * N < s.length) {
                        Pack<T, N> pack;
#pragma unroll
                        for (int j = 0; j < N; j++)
                            pack.v[j] = place[k * N + j];
                        store_once<T, N>(to + k * N, pack);
                    }
            } else {
#pragma unroll
                for (int j = 0; j < COUNT; j++)
                    if (j < s.length)
                        to[j * s.out_step] = place[j];
            }
        }
    }
}

#endif
