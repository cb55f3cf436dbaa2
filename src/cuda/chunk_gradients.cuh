/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of many short rows whose statistics are known, in the chunks of row_chunks.cuh. For each batch
 * of rows, every lane computes the coefficients of one row. Then, chunk by chunk, the lanes that share a
 * row write its gradient to shared memory. From there the chunk is stored: as one piece of memory if the
 * rows of the result follow each other without gaps, else row by row. Input and result may have any
 * alignment, and may be the same memory.
 *
 * An Op of a gradient has
 *
 *     typedef ... Row          what is loaded of a row besides its elements
 *     typedef ... Coefficient  32 bytes
 *     bool LARGE               Writer::of has many instructions: loops over it are not unrolled
 *     void begin()             called after the first loads: waits for the previous kernel
 *     Row no_row(), Row load_row(int64_t row)
 *     Coefficient coefficient(const Row &, int64_t row)    called by all lanes, with a row or no_row()
 *     Writer writer(const Coefficient &)
 *     Pack<T, N> Writer::of(pack, column)                  the gradients of a pack that begins at `column`
 *     int Writer::special(), T Writer::special_value()     the column of the element, such as the label's, whose
 *                                                          gradient is special_value() instead; -1: none
 */
#ifndef RAFTER_CUDA_CHUNK_GRADIENTS_CUH
#define RAFTER_CUDA_CHUNK_GRADIENTS_CUH

#include "cuda/row_chunks.cuh"

/* Each warp has room in shared memory for two chunks of the input, one of the result, and the coefficients of a
 * batch. */
constexpr int GRADIENT_STAGES = 2, COEFFICIENT_BYTES = 32;
constexpr int GRADIENT_PLACES = (GRADIENT_STAGES + 1) * CHUNK_BYTES + WARP * COEFFICIENT_BYTES;

static inline size_t chunk_gradients_shared() {
    return size_t(GRADIENT_PLACES) * (CHUNK_THREADS / WARP);
}

/* As a kernel argument. */
struct GradientChunks {
    RowChunks in, out;
    bool alike; /* a row has the same alignment in both: packs of one are packs of the other */
};

/* How rows of `length` elements are cut. least_lanes, factor: see ChunkLanes. Both tensors get the same lanes. */
static inline GradientChunks gradient_chunks_of(const Rows &x, const Rows &dx, bool alike, int64_t rows, int64_t length,
                                                int least_lanes, int64_t warps, int factor) {
    GradientChunks c = {};
    c.out = chunks_of(dx, rows, length, {least_lanes, factor, false}, warps, false);
    c.in = chunks_of(x, rows, length, {c.out.lanes, factor, false}, warps);
    c.out = chunks_of(dx, rows, length, {c.in.lanes, factor, false}, warps, false);
    c.alike = alike;
    return c;
}

/* Copies the results at `chunk` in shared memory to memory: `present` rows from row `first` on. Called by all lanes. */
template <typename T, int LANES> DEVICE void store_chunk(const RowChunks &t, int first, int present, unsigned chunk) {
    constexpr int N = WIDE<T>;
    const int lane = threadIdx.x % WARP;
    if (t.flat) {
        char *const to = t.x.data + static_cast<uint64_t>(static_cast<unsigned>(first)) * t.row_bytes;
        const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16);
        const int end = shift + present * static_cast<int>(t.row_bytes); /* counted from the first granule */
        T *const mine = reinterpret_cast<T *>(to - shift + lane * 16);
#pragma unroll
        for (int k = 0; k < CHUNK_PACKS; k++) {
            const int at = (lane + k * WARP) * 16;
            if (at + 16 <= end && (k > 0 || at >= shift))
                store_once<T, N>(mine + k * WARP * N, read_shared<Pack<T, N>>(chunk + at));
        }
        if (!t.whole) { /* the granules at both ends also hold elements of other rows */
            const int element = lane % N * static_cast<int>(sizeof(T)), last = end & ~15;
            const int at = lane < N ? element : last + element;
            if (lane < 2 * N && (lane < N ? shift > 0 && at >= shift : at < end))
                *reinterpret_cast<T *>(to - shift + at) = read_shared<T>(chunk + at);
        }
    } else if (lane / LANES < present) {
        const int own = lane % LANES;
        T *const to = t.x.at<T>(first + lane / LANES);
        const ChunkRow<T, LANES> row(place_in_chunk<T, LANES>(t, first, chunk), t.length, t.whole);
#pragma unroll
        for (int k = 0; k < CHUNK_PACKS; k++)
            if (own + k * LANES < row.packs)
                store_once<T, N>(to + row.head + (own + k * LANES) * N, row.pack(own, k));
#pragma unroll(row.EDGES < 4 ? row.EDGES : 4)
        for (int e = own; e < row.edges; e += LANES)
            to[row.column(e)] = read_shared<T>(row.at + row.column(e) * unsigned(sizeof(T)));
    }
}

/* Computes a lane's share of the gradient of row `in`, and writes it to `out` in shared memory. */
template <class Writer, typename T, int LANES, bool LARGE>
DEVICE void write_chunk_row(const Writer &writer, const ChunkRow<T, LANES> &in, unsigned out, bool alike, int most,
                            bool whole) {
    constexpr int N = WIDE<T>, EDGES = ChunkRow<T, LANES>::EDGES, TURNS = LARGE ? 1 : CHUNK_PACKS;
    const int own = threadIdx.x % LANES;
#pragma unroll TURNS
    for (int k = 0; k < CHUNK_PACKS; k++) {
        if (k >= most)
            break;
        if (own + k * LANES >= in.packs)
            continue;
        const int column = in.head + (own + k * LANES) * N;
        const Pack<T, N> d = writer.of(in.pack(own, k), column);
        const unsigned at = out + column * unsigned(sizeof(T));
        if (alike)
            write_shared_16(at, reinterpret_cast<const uint4 &>(d));
        else
#pragma unroll
            for (int j = 0; j < N; j++)
                write_shared(at + j * unsigned(sizeof(T)), d.v[j]);
    }
    if (!whole)
#pragma unroll
        for (int k = 0; k < EDGES; k++)
            if (own + k * LANES < in.edges) {
                const int column = in.column(own + k * LANES);
                write_shared(out + column * unsigned(sizeof(T)), writer.of(in.edge(own, k), column).v[0]);
            }
    /* Written by the lane that has already written this element: so no barrier is needed. */
    const int special = writer.special(), inside = special - in.head;
    const int owner = static_cast<unsigned>(inside) < static_cast<unsigned>(in.packs * N) ? inside / N
                      : inside < 0                                                        ? special
                                                                                          : special - in.packs * N;
    if (special >= 0 && owner % LANES == own)
        write_shared(out + special * unsigned(sizeof(T)), writer.special_value());
}

/* The loop of a kernel. Called by all threads of the block. */
template <class Op, typename T, int LANES>
DEVICE void write_chunks(Op &op, const GradientChunks &g, uint4 *shared_memory) {
    typedef typename Op::Coefficient Coefficient;
    static_assert(sizeof(Coefficient) == COEFFICIENT_BYTES, "two loads");
    constexpr int ROWS = WARP / LANES;
    const RowChunks &t = g.in;
    const int lane = threadIdx.x % WARP, own = lane % LANES, warp = threadIdx.x / WARP;
    const int mine = own * ROWS + lane / LANES; /* the row of a batch whose coefficients this lane computes */
    const int step = gridDim.x * (CHUNK_THREADS / WARP) * t.batch;
    int base = (blockIdx.x * (CHUNK_THREADS / WARP) + warp) * t.batch;
    const unsigned places = own_places(shared_memory, GRADIENT_PLACES);
    const unsigned results = places + GRADIENT_STAGES * CHUNK_BYTES, coefficients = results + CHUNK_BYTES;
    ChunkLoader<T, LANES, GRADIENT_STAGES> loader(t, places, base, step);
    const auto load_row = [&](int first) {
        return mine < t.batch && first + mine < t.rows ? op.load_row(first + mine) : op.no_row();
    };
    loader.start();
    typename Op::Row row = load_row(base);
    op.begin();
    unsigned side = 0;
    for (; base < t.rows; base += step) {
        const typename Op::Row following = load_row(base + step);
        const Coefficient of_mine = op.coefficient(row, base + mine);
        __syncwarp(); /* all lanes have read the coefficients of the last batch */
        const uint4(&words)[2] = reinterpret_cast<const uint4(&)[2]>(of_mine);
        write_shared_16(coefficients + mine * COEFFICIENT_BYTES, words[0]);
        write_shared_16(coefficients + mine * COEFFICIENT_BYTES + 16, words[1]);
#pragma unroll 1
        for (int s = 0; s * ROWS < t.batch && base + s * ROWS < t.rows; s++) {
            __syncwarp(); /* all lanes have read the places that are filled next */
            loader.start();
            copy_wait<GRADIENT_STAGES - 1>();
            __syncwarp();
            const int first = base + s * ROWS, present = min(t.rows - first, ROWS);
            if (lane / LANES < present) {
                uint4 of_row[2];
                const unsigned at = coefficients + (s * ROWS + lane / LANES) * COEFFICIENT_BYTES;
                of_row[0] = read_shared<uint4>(at);
                of_row[1] = read_shared<uint4>(at + 16);
                const ChunkRow<T, LANES> in(place_in_chunk<T, LANES>(t, first, places + side), t.length, t.whole);
                const auto writer = op.writer(reinterpret_cast<const Coefficient &>(of_row));
                write_chunk_row<decltype(writer), T, LANES, Op::LARGE>(
                    writer, in, place_in_chunk<T, LANES>(g.out, first, results), g.alike, t.most, t.whole);
            }
            __syncwarp();
            store_chunk<T, LANES>(g.out, first, present, results);
            side = side == (GRADIENT_STAGES - 1) * CHUNK_BYTES ? 0 : side + CHUNK_BYTES;
        }
        row = following;
    }
}

#endif
