/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of many short rows of adjacent elements, of any alignment.
 *
 * A warp takes a batch of up to 32 rows and works through it in chunks of WARP / LANES rows: LANES lanes
 * share a row. Chunks are copied to shared memory, where each warp has room for three: two are in flight
 * while one is reduced. If rows follow each other closely (`flat`), a chunk is copied as one piece of
 * memory, whatever the alignment of its rows. Otherwise each row is copied to a slot of its own. In both
 * cases the unit of a copy is a granule: 16 aligned bytes. The first and the last granule may also hold
 * padding, or elements of other rows.
 *
 * A row is finished by one of the lanes that reduced it, so that its statistics need not move.
 *
 * An Op says what the statistics are. It has what row_stream.cuh asks for, and
 *
 *     void look_at(Row &, F element)    as look; element(column) is an element of the row
 *     bool reduces()       true: statistics come from `reduce`; false: from `add`. The same for all threads
 *     int CHUNK_ADDS       packs that are added at a time, by a loop; 0: the Op always reduces
 *     bool ADDS_EDGES      edge elements are added at once: `add` does not use their columns
 *     Stats reduce<LANES>(packs, int most, int valid, edges, bool ragged, int valid_edges)
 *                          the statistics of a row; all of its lanes get them. `packs`: the lane's packs, at
 *                          most `most`. The first `valid` are part of the row, the others are full of -inf.
 *                          `edges`: if `ragged`, elements before and after the packs, `valid_edges` of them
 */
#ifndef RAFTER_CUDA_ROW_CHUNKS_CUH
#define RAFTER_CUDA_ROW_CHUNKS_CUH

#include <type_traits>

#include "core/sizes.h"
#include "cuda/row_statistics.cuh"

constexpr int CHUNK_THREADS = 256;
constexpr int CHUNK_PACKS = 5;                       /* most granules per lane */
constexpr int CHUNK_STAGES = 3;                      /* chunks of a warp in shared memory */
constexpr int CHUNK_BYTES = CHUNK_PACKS * WARP * 16; /* room for a chunk */
constexpr int LONGEST_CHUNKED = CHUNK_BYTES - 64;    /* bytes of a row */

/* As a kernel argument. */
struct RowChunks {
    Rows x;
    const char *lowest, *highest;      /* of the tensor; highest: past its last byte */
    int rows, length;                  /* length: elements of a row */
    unsigned first, pitch, row_bytes;  /* address of the first row, modulo 2^32; from row to row, if `flat` */
    int lanes, most, batch, blocks;    /* lanes per row; granules per lane, at most; rows per batch; of the grid */
    bool flat;                         /* a chunk is copied as one piece of memory */
    bool whole;                        /* rows consist of aligned granules: they have no edges */
    bool by_index;                     /* see ChunkRow */
    bool full;                         /* `whole`, and every lane has exactly `most` granules, at least three */
    bool begins_aligned, ends_aligned; /* the tensor begins, ends at a multiple of 16 bytes */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Why these rows are not for chunks, or NULL. */
static inline const char *why_not_chunks(int64_t rows, int64_t row_bytes) {
    constexpr int64_t FEW_ROWS = 1024;
    if (rows > INT32_MAX / 2)
        return "it counts rows in 31 bits";
    if (row_bytes < 96)
        return "rows are too short for several lanes";
    return row_bytes <= (rows < FEW_ROWS ? 2048 : LONGEST_CHUNKED) ? NULL : "rows are too long for a warp";
}

/* How many lanes share a row. */
struct ChunkLanes {
    int least, factor; /* least, least * factor, least * factor^2, ..., but at most WARP */
    bool by_length;    /* how a row is summed must depend on its length only, not on alignment or pitch */
};

/* `warps`: that run at a time. `padding`: whether chunks may be copied together with padding between rows. */
static inline RowChunks chunks_of(const Rows &x, int64_t rows, int64_t length, const ChunkLanes &lanes, int64_t warps,
                                  bool padding = true) {
    RowChunks c = {};
    const int64_t bytes = rafter_dtype_bytes(x.dtype), row_bytes = length * bytes;
    const uintptr_t first = reinterpret_cast<uintptr_t>(x.data);
    const int64_t pitch = x.step * bytes;
    c.x = x;
    c.lowest = x.data;
    c.highest = x.data + x.last * bytes + row_bytes;
    c.rows = static_cast<int>(rows);
    c.length = static_cast<int>(length);
    c.first = static_cast<unsigned>(first);
    c.row_bytes = static_cast<unsigned>(row_bytes);
    const int64_t most_pitch = padding ? min(row_bytes * 5 / 4, int64_t(CHUNK_BYTES - 16)) : row_bytes;
    c.flat = x.dims == 1 && pitch >= row_bytes && pitch <= most_pitch;
    c.whole = x.aligned() && row_bytes % 16 == 0;
    c.by_index = lanes.by_length;
    c.begins_aligned = first % 16 == 0;
    c.ends_aligned = reinterpret_cast<uintptr_t>(c.highest) % 16 == 0;
    const int64_t most_granules = (row_bytes - bytes + 15) / 16 + 1; /* of a row, at any address */
    const int64_t granules = c.whole ? row_bytes / 16 : most_granules;
    const auto fits = [&](int64_t distance) { return WARP / c.lanes * distance + 16 <= CHUNK_BYTES; };
    c.lanes = lanes.least;
    while (lanes.by_length ? !fits(row_bytes) || most_granules > CHUNK_PACKS * c.lanes
           : c.flat        ? !fits(pitch)
                           : granules > CHUNK_PACKS * c.lanes)
        c.lanes = min(c.lanes * lanes.factor, WARP);
    c.flat = c.flat && fits(pitch);
    c.pitch = c.flat ? static_cast<unsigned>(pitch) : 0;
    c.most = static_cast<int>(ceil_div<int64_t>(c.whole ? granules : row_bytes / 16, c.lanes));
    c.full = c.whole && granules % c.lanes == 0 && c.most >= 3;
    const int at_once = WARP / c.lanes, most = CHUNK_THREADS / WARP;
    /* As few rounds of batches as possible, all of about the same size. */
    const int64_t rounds = ceil_div<int64_t>(rows, warps * WARP);
    c.batch = static_cast<int>(min(round_up<int64_t>(ceil_div(rows, warps * rounds), at_once), int64_t(WARP)));
    c.blocks = static_cast<int>(min(ceil_div<int64_t>(ceil_div<int64_t>(rows, c.batch), most), warps / most));
    return c;
}

/* Calls f(std::integral_constant<int, LANES>()). EACH: LANES may also be 2 or 8. */
template <bool EACH = true, typename F> void for_chunk_lanes(int lanes, F f) {
    if constexpr (EACH) {
        if (lanes == 2)
            return f(std::integral_constant<int, 2>());
        if (lanes == 8)
            return f(std::integral_constant<int, 8>());
    }
    if (lanes == 4)
        f(std::integral_constant<int, 4>());
    else if (lanes == 16)
        f(std::integral_constant<int, 16>());
    else
        f(std::integral_constant<int, WARP>());
}

/* Bytes of shared memory of a block. */
static inline size_t chunks_shared() {
    return size_t(CHUNK_STAGES) * CHUNK_BYTES * (CHUNK_THREADS / WARP);
}

/* ---- device ---------------------------------------------------------------------------------- */

/* Calls f(k) for the packs of a lane, of which there are at most `most`, and usually three or more. */
template <typename F> DEVICE void for_chunk_packs(int most, F f) {
#pragma unroll
    for (int k = 0; k < CHUNK_PACKS; k++)
        if (k < 3 || k < most)
            f(k);
}

/* The maximum of a row; all of its lanes get it. Arguments are those of Op::reduce. */
template <int LANES, typename T, int N, int EDGES>
DEVICE float max_of_row(const Pack<T, N> (&packs)[CHUNK_PACKS], int most, const Pack<T, 1> (&edges)[EDGES],
                        bool ragged) {
    Pack<T, N> top = packs[0];
    for_chunk_packs(most, [&](int k) { top = max_of(top, packs[k]); });
    const Pack<T, N> tops[1] = {top};
    float max = max_of_all(tops);
    if (ragged)
        max = fmaxf(max, max_of_all(edges));
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    return max;
}
/* Softmax statistics of a row: an Op::reduce. `total`, if not NULL, gets the sum of its elements. */
template <int LANES, typename T, int N, int EDGES>
DEVICE RowStats reduce_lanes(const Pack<T, N> (&packs)[CHUNK_PACKS], int most, int valid,
                             const Pack<T, 1> (&edges)[EDGES], bool ragged, int valid_edges, float scale,
                             float *total = nullptr) {
    const float max = max_of_row<LANES>(packs, most, edges, ragged), pivot = pivot_at(max);
    float sum[4] = {}, all = 0.0f;
    for_chunk_packs(most, [&](int k) {
        float x[N], of_pack = 0.0f;
        unpack(packs[k], x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum[j % 4] += exp_below(x[j] - pivot, scale);
            of_pack += x[j];
        }
        all += k < valid ? of_pack : 0.0f;
    });
    if (ragged)
#pragma unroll
        for (int k = 0; k < EDGES; k++) {
            const float x = to_float(edges[k].v[0]);
            sum[k % 4] += exp_below(x - pivot, scale);
            all += k < valid_edges ? x : 0.0f;
        }
    if (total)
        *total = sum_of_lanes<LANES>(all);
    return {max, sum_of_lanes<LANES>((sum[0] + sum[1]) + (sum[2] + sum[3]))};
}

/* Copies a warp's chunks to shared memory: chunk by chunk, batch by batch, to each of SIDES places in turn. */
template <typename T, int LANES, int SIDES> struct ChunkLoader {
    static constexpr int ROWS = WARP / LANES, SLOT = CHUNK_BYTES / ROWS;
    const RowChunks &t;
    const unsigned places; /* of this warp, in shared memory */
    const int step;        /* rows from a batch of this warp to its next one */
    int base, s = 0;       /* next chunk: the first row of its batch; its own first row, counted from `base` */
    unsigned side = 0;     /* next chunk: the offset of its place, in bytes */

    DEVICE ChunkLoader(const RowChunks &chunks, unsigned at, int first, int batches_apart)
        : t(chunks), places(at), step(batches_apart), base(first) {
    }
    /* APART lanes copy the `bytes` bytes at `from`, of which lane number `own` takes granules own, own + APART, ...
     * Granule 0 contains `from`. `inside`: all granules are within the tensor. If not, the lanes copy the elements of
     * the first and the last granule one by one. */
    template <int APART> DEVICE void copy(const char *from, int bytes, unsigned to, int own, bool inside) const {
        constexpr int N = WIDE<T>, SIZE = sizeof(T);
        const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16), end = bytes + shift;
        const char *const first = from - shift, *const mine = first + own * 16;
        if (inside) {
#pragma unroll
            for (int k = 0; k < CHUNK_PACKS; k++)
                if (end > (own + k * APART) * 16)
                    copy_async_to(to + (own + k * APART) * 16, mine + k * APART * 16);
            return;
        }
#pragma unroll
        for (int k = 0; k < CHUNK_PACKS; k++) {
            const int at = (own + k * APART) * 16;
            if (at >= shift && at + 16 <= end)
                copy_async_to(to + at, mine + k * APART * 16);
        }
#pragma unroll 1
        for (int e = own; e < 2 * N; e += APART) {
            const int at = e < N ? e * SIZE : (end & ~15) + (e - N) * SIZE;
            if (e < N ? shift > 0 && at >= shift : at < end)
                write_shared(to + at, *reinterpret_cast<const T *>(first + at));
        }
    }
    /* Starts to copy the next chunk, as one group of asynchronous copies. */
    DEVICE void start() {
        const int lane = threadIdx.x % WARP, first = base + s, present = min(t.rows - first, ROWS);
        if (t.flat) {
            if (present > 0)
                copy<WARP>(t.x.data + static_cast<uint64_t>(static_cast<unsigned>(first)) * t.pitch,
                           static_cast<int>((present - 1) * t.pitch + t.row_bytes), places + side, lane,
                           (first > 0 || t.begins_aligned) && (first + ROWS < t.rows || t.ends_aligned));
        } else if (lane / LANES < present) {
            const char *const row = reinterpret_cast<const char *>(t.x.at<const T>(first + lane / LANES));
            copy<LANES>(row, static_cast<int>(t.row_bytes), places + side + lane / LANES * SLOT, lane % LANES,
                        t.whole || (row - 15 >= t.lowest && row + t.row_bytes + 15 <= t.highest));
        }
        copy_commit();
        side = side == (SIDES - 1) * CHUNK_BYTES ? 0 : side + CHUNK_BYTES;
        s += ROWS;
        if (s >= t.batch) {
            s = 0;
            base += step;
        }
    }
};

/* The address of a warp's own part of shared memory. The shuffle makes the compiler keep it in a register, instead of
 * computing it again for every chunk. */
DEVICE unsigned own_places(const void *shared_memory, int bytes) {
    return __shfl_sync(~0u, shared_address(shared_memory) + threadIdx.x / WARP * bytes, 0);
}

/* Where this lane's row begins in shared memory. `chunk`: the place of the chunk, `first`: its first row. */
template <typename T, int LANES> DEVICE unsigned place_in_chunk(const RowChunks &t, int first, unsigned chunk) {
    const unsigned row = threadIdx.x % WARP / LANES;
    if (t.flat)
        return chunk + (t.first + first * t.pitch) % 16 + row * t.pitch;
    unsigned address = 0;
    if (!t.whole)
        address = t.first + static_cast<unsigned>(t.x.offset(min(first + int(row), t.rows - 1))) * unsigned(sizeof(T));
    return chunk + row * (CHUNK_BYTES * LANES / WARP) + address % 16;
}

/* A row in shared memory, shared by LANES lanes; `own` is the number of a lane among them. Packs are aligned, with edge
 * elements before and after them. If by_index, the first pack begins with the row's first element, aligned or not, so
 * that sums do not depend on the alignment of rows. */
template <typename T, int LANES> struct ChunkRow {
    static constexpr int N = WIDE<T>, EDGES = (2 * (N - 1) + LANES - 1) / LANES;
    unsigned at;     /* address of the row */
    int head, packs; /* elements before the first pack; packs */
    int edges;       /* elements before the first and after the last pack */

    DEVICE ChunkRow(unsigned place, int length, bool whole, bool by_index = false)
        : at(place), head(0), packs(static_cast<int>(static_cast<unsigned>(length) / N)), edges(0) {
        if (!whole) {
            if (!by_index)
                head = min(static_cast<int>((0u - place / unsigned(sizeof(T))) % N), length);
            packs = static_cast<int>(static_cast<unsigned>(length - head) / N);
            edges = length - packs * N;
        }
    }
    /* The lane's k-th pack, which must exist. */
    DEVICE Pack<T, N> present_pack(int own, int k) const {
        return read_shared<Pack<T, N>>(at + (head + (own + k * LANES) * N) * unsigned(sizeof(T)));
    }
    /* The lane's k-th pack, or one full of -inf. */
    DEVICE Pack<T, N> pack(int own, int k) const {
        const Pack<T, N> none = all_of<T, N>(-INFINITY);
        uint4 w = reinterpret_cast<const uint4 &>(none); /* as words: else the compiler moves 16-bit halves */
        if (own + k * LANES < packs)
            w = read_shared<uint4>(at + (head + (own + k * LANES) * N) * unsigned(sizeof(T)));
        return reinterpret_cast<const Pack<T, N> &>(w);
    }
    /* `pack` if by_index: put together from the two granules that hold it. */
    DEVICE Pack<T, N> shifted_pack(int own, int k) const {
        const Pack<T, N> none = all_of<T, N>(-INFINITY);
        uint4 w = reinterpret_cast<const uint4 &>(none);
        const unsigned shift = at % 16, low = at - shift + (own + k * LANES) * 16;
        if (own + k * LANES < packs)
            w = shifted(read_shared<uint4>(low), read_shared<uint4>(low + (shift > 0 ? 16 : 0)), shift);
        return reinterpret_cast<const Pack<T, N> &>(w);
    }
    /* The column of edge element e. */
    DEVICE int column(int e) const {
        return e < head ? e : e + packs * N;
    }
    /* The lane's k-th edge element, or -inf. */
    DEVICE Pack<T, 1> edge(int own, int k) const {
        Pack<T, 1> value = all_of<T, 1>(-INFINITY);
        if (own + k * LANES < edges)
            value.v[0] = read_shared<T>(at + column(own + k * LANES) * unsigned(sizeof(T)));
        return value;
    }
};

/* The statistics of a row; all of its lanes get them. */
template <class Op, typename T, int LANES>
DEVICE typename Op::Stats reduce_chunk_row(const Op &op, const RowChunks &t, const ChunkRow<T, LANES> &row, int own) {
    constexpr int N = WIDE<T>, EDGES = ChunkRow<T, LANES>::EDGES;
    const bool shifts = t.by_index && !t.whole;
    const auto of = [&](int all) { return max((all - own + LANES - 1) / LANES, 0); }; /* this lane's share */
    if (Op::CHUNK_ADDS > 0 && !op.reduces()) {
        constexpr int COUNT = Op::CHUNK_ADDS > 0 ? Op::CHUNK_ADDS : 1;
        typename Op::Stats g = op.none();
#pragma unroll 1
        for (int k = 0; k < t.most; k += COUNT) {
            Pack<T, N> packs[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                packs[j] = shifts ? row.shifted_pack(own, k + j) : row.pack(own, k + j);
            op.add(g, packs, min(max(of(row.packs) - k, 0), COUNT), row.head + int64_t(own + k * LANES) * N, LANES * N);
        }
        if (!t.whole && Op::ADDS_EDGES) {
            Pack<T, 1> edges[EDGES];
#pragma unroll
            for (int k = 0; k < EDGES; k++)
                edges[k] = row.edge(own, k);
            op.add(g, edges, of(row.edges), 0, 0);
        } else if (!t.whole) {
#pragma unroll 1
            for (int k = 0; own + k * LANES < row.edges; k++) {
                const Pack<T, 1> one[1] = {row.edge(own, k)};
                op.add(g, one, 1, row.column(own + k * LANES), 1);
            }
        }
        return op.merge_lanes(g, LANES);
    } else {
        Pack<T, N> packs[CHUNK_PACKS];
        Pack<T, 1> edges[EDGES];
        if (t.full)
            for_chunk_packs(t.most, [&](int k) { packs[k] = row.present_pack(own, k); });
        else if (shifts)
            for_chunk_packs(t.most, [&](int k) { packs[k] = row.shifted_pack(own, k); });
        else
            for_chunk_packs(t.most, [&](int k) { packs[k] = row.pack(own, k); });
        if (!t.whole)
#pragma unroll
            for (int k = 0; k < EDGES; k++)
                edges[k] = row.edge(own, k);
        return op.template reduce<LANES>(packs, t.most, of(row.packs), edges, !t.whole, of(row.edges));
    }
}

/* The loop of a kernel. Called by all threads of the block. */
template <class Op, typename T, int LANES> DEVICE void reduce_chunks(Op &op, const RowChunks &t, uint4 *shared_memory) {
    constexpr int ROWS = WARP / LANES;
    const int lane = threadIdx.x % WARP, own = lane % LANES, warp = threadIdx.x / WARP;
    const int mine = own * ROWS + lane / LANES; /* the row of a batch that this lane finishes */
    const int step = gridDim.x * (CHUNK_THREADS / WARP) * t.batch;
    int base = (blockIdx.x * (CHUNK_THREADS / WARP) + warp) * t.batch;
    ChunkLoader<T, LANES, CHUNK_STAGES> loader(t, own_places(shared_memory, CHUNK_STAGES * CHUNK_BYTES), base, step);
    const auto load_row = [&](int first) {
        return mine < t.batch && first + mine < t.rows ? op.load_row(first + mine) : op.no_row();
    };
#pragma unroll 1
    for (int i = 1; i < CHUNK_STAGES; i++)
        loader.start();
    typename Op::Row row = load_row(base);
    op.begin();
    unsigned side = 0;
    for (; base < t.rows; base += step) {
        const typename Op::Row following = load_row(base + step);
        typename Op::Stats of_mine = op.none();
#pragma unroll 1
        for (int s = 0; s * ROWS < t.batch && base + s * ROWS < t.rows; s++) {
            __syncwarp(); /* all lanes have read the chunk whose place is filled next */
            loader.start();
            copy_wait<CHUNK_STAGES - 1>();
            __syncwarp();
            const int first = base + s * ROWS;
            const ChunkRow<T, LANES> of_lane(place_in_chunk<T, LANES>(t, first, loader.places + side),
                                             first + lane / LANES < t.rows ? t.length : 0, t.whole, t.by_index);
            if (own == s)
                op.look_at(row, [&](int column) { return read_shared<T>(of_lane.at + column * unsigned(sizeof(T))); });
            const typename Op::Stats g = reduce_chunk_row<Op, T, LANES>(op, t, of_lane, own);
            if (own == s)
                of_mine = g;
            side = side == (CHUNK_STAGES - 1) * CHUNK_BYTES ? 0 : side + CHUNK_BYTES;
        }
        op.finish(row, base + mine, of_mine);
        row = following;
    }
}

#endif
