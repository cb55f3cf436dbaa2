/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of many rows of adjacent elements, of any alignment. LANES lanes reduce a row. A warp
 * takes a batch of up to 32 rows, WARP / LANES at a time, and then finishes them, a lane for each.
 * Loads run ahead of the arithmetic across rows: while some packs are added, the next ones are in
 * flight, whether they belong to the same rows or to the next. Warps do not wait for each other.
 *
 * An Op says what the statistics are:
 *
 *     typedef ... Stats;      statistics of some elements of a row; can be merged
 *     typedef ... Row;        what is loaded of a row besides its elements
 *     bool LARGE              whether `add` is large, and uses the numbers of columns
 *     Stats none()
 *     void add(Stats &, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step)
 *     Stats merge_lanes(Stats, int lanes), Stats shuffled(Stats, int lane)
 *     void begin()            after the first loads: waits for the previous kernel
 *     Row no_row(), Row load_row(int64_t row)
 *     bool needs(const Row &)     whether the row has to be reduced
 *     void look(Row &, F first, int64_t step)    more loads, whose results only finish uses; first() is the
 *                                                address of the row, whose elements lie `step` apart
 *     void finish(const Row &, int64_t row, const Stats &)    also called with no_row()
 */
#ifndef RAFTER_CUDA_ROW_STREAM_CUH
#define RAFTER_CUDA_ROW_STREAM_CUH

#include "core/sizes.h"
#include "cuda/row_statistics.cuh"

constexpr int STREAM_THREADS = 256;
constexpr int STREAM_PACKS = 4; /* of a group: what a lane loads at a time */
constexpr int STREAM_SIDES = 3; /* groups in shared memory, at most */

/* As a kernel argument. */
struct RowStream {
    Rows x;
    int rows, length; /* length: elements of a row */
    int lanes, batch, blocks;
    bool one_group; /* the lanes of a row load it at once */
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Why these rows are not for stream_rows, or NULL. Warps take whole rows: few long ones would leave
 * some without work. */
static inline const char *why_not_streamed(int64_t rows, int64_t length, int bytes) {
    const int64_t row_bytes = length * bytes;
    if (rows > INT32_MAX / 2 || length > INT32_MAX / 2)
        return "it counts rows and columns in 31 bits";
    if (row_bytes < 96)
        return "rows are too short for several lanes";
    if (row_bytes <= 2048)
        return NULL;
    return row_bytes <= 32 << 10 && rows >= 1024 * ceil_div<int64_t>(row_bytes, 8 << 10)
               ? NULL
               : "rows are too long for a warp, or too few";
}

static inline RowStream stream_of(const Rows &x, int64_t rows, int64_t length, int bytes, int warps) {
    RowStream s = {};
    s.x = x;
    s.rows = static_cast<int>(rows);
    s.length = static_cast<int>(length);
    const int64_t packs = length * bytes / 16;
    s.lanes = packs <= 4 * STREAM_PACKS ? 4 : packs <= 8 * STREAM_PACKS ? 8 : WARP;
    s.one_group = packs <= s.lanes * STREAM_PACKS;
    const int at_once = WARP / s.lanes, most = STREAM_THREADS / WARP;
    s.batch = static_cast<int>(min(round_up<int64_t>(ceil_div<int64_t>(rows, warps), at_once), int64_t(WARP)));
    s.blocks = static_cast<int>(min(ceil_div<int64_t>(ceil_div<int64_t>(rows, s.batch), most), int64_t(warps / most)));
    return s;
}

/* Bytes of shared memory of a block. */
static inline size_t stream_shared() {
    return size_t(STREAM_SIDES) * STREAM_PACKS * 16 * STREAM_THREADS;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A lane's share of a row. Its packs go through shared memory, where each thread has places of its
 * own: registers are few. Edges that do not exist are -inf. */
template <typename T, int LANES, int PACKS> struct StreamedRow {
    static constexpr int N = WIDE<T>, EDGES = (2 * (N - 1) + LANES - 1) / LANES;
    const T *at; /* the next pack to load */
    int left;    /* this lane's packs are those below it, of 0, LANES, 2 * LANES, ... */
    int head, edges;
    Pack<T, 1> edge[EDGES];

    /* Starts to copy the next PACKS packs, of which the first `left` / LANES exist, to `place`. */
    DEVICE void load(int still, unsigned place) {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (k * LANES < still)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + k * STREAM_THREADS * 16),
                             "l"(at + k * LANES * N)
                             : "memory");
        at += PACKS * LANES * N;
    }
    DEVICE void begin(const T *row, int length, int lane, unsigned place) {
        const unsigned ragged = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row)) % 16 / sizeof(T);
        head = min(static_cast<int>((N - ragged) % N), length);
        const int packs = static_cast<int>(static_cast<unsigned>(length - head) / N);
        edges = length - packs * N;
        left = packs - lane;
        at = row + head + lane * N;
        load(left, place);
#pragma unroll
        for (int k = 0; k < EDGES; k++) {
            const int e = lane + k * LANES;
            edge[k] = load_once_if<T, 1>(e < edges, row + (e < head ? e : e + packs * N), -INFINITY);
        }
    }
    /* The column of edge element e. */
    DEVICE int column(int e, int length) const {
        return e < head ? e : e + length - edges;
    }
};

/* Adds a lane's packs of one group. `left`: as in StreamedRow, before the group. Op::AT_ONCE packs are
 * added at a time, if all lanes have them; those of a large Op by a loop that is not unrolled. */
template <class Op, typename T, int LANES, int PACKS, int AT_ONCE>
DEVICE void add_group(const Op &op, typename Op::Stats &g, const Pack<T, WIDE<T>> *from, int left, int64_t column) {
    constexpr int N = WIDE<T>, TURNS = Op::LARGE ? 1 : PACKS;
#pragma unroll TURNS
    for (int k = 0; k < PACKS; k += AT_ONCE) {
        if (__all_sync(~0u, left > (k + AT_ONCE - 1) * LANES)) {
            Pack<T, N> packs[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                packs[j] = from[(k + j) * STREAM_THREADS];
            op.add(g, packs, AT_ONCE, column + k * LANES * N, LANES * N);
        } else {
#pragma unroll TURNS
            for (int j = k; j < k + AT_ONCE; j++) {
                const bool present = left > j * LANES;
                if (__any_sync(~0u, present)) {
                    const Pack<T, N> one[1] = {load_once_if<T, N>(present, from[j * STREAM_THREADS].v, -INFINITY)};
                    op.add(g, one, present, column + j * LANES * N, N);
                }
            }
        }
    }
}

template <class Op, typename T, int LANES, int PACKS>
DEVICE void add_edges_of(const Op &op, typename Op::Stats &g, const StreamedRow<T, LANES, PACKS> &row, int lane,
                         int length) {
    if constexpr (Op::LARGE) {
#pragma unroll
        for (int k = 0; k < row.EDGES; k++) {
            const Pack<T, 1> one[1] = {row.edge[k]};
            if (lane + k * LANES < row.edges)
                op.add(g, one, 1, row.column(lane + k * LANES, length), 1);
        }
    } else if (lane < row.edges) {
        op.add(g, row.edge, (row.edges - lane + LANES - 1) / LANES, 0, 0);
    }
}

/* The statistics of the rows that a warp has just reduced, to the lanes that finish them. */
template <class Op, int LANES>
DEVICE void hand_over(const Op &op, typename Op::Stats &mine, typename Op::Stats g, int s) {
    const int lane = threadIdx.x % WARP;
    g = op.merge_lanes(g, LANES);
    if constexpr (LANES < WARP)
        g = op.shuffled(g, (lane - s) * LANES & (WARP - 1));
    if (lane >= s && lane < s + WARP / LANES)
        mine = g;
}

/* Rows of more than one group of packs. */
template <class Op, typename T, int PACKS> DEVICE void stream_rows(Op &op, const RowStream &t, uint4 *shared_memory) {
    typedef typename Op::Row Row;
    constexpr int N = WIDE<T>, GROUP = PACKS * WARP, AHEAD_BYTES = PACKS * STREAM_THREADS * 16;
    const int lane = threadIdx.x % WARP;
    const int warp = blockIdx.x * (STREAM_THREADS / WARP) + threadIdx.x / WARP,
              step = gridDim.x * (STREAM_THREADS / WARP) * t.batch;
    const int groups = max(ceil_div(t.length / N, GROUP), 1); /* at most, of a row */
    const Pack<T, N> *const places = reinterpret_cast<const Pack<T, N> *>(shared_memory) + threadIdx.x;
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(places)); /* of the next packs */
    int side = 0;                                                             /* of the packs before them */
    StreamedRow<T, WARP, PACKS> next;
    const auto start = [&](int row, bool needed) {
        const bool present = needed && row < t.rows;
        next.begin(t.x.at<const T>(present ? row : 0), present ? t.length : 0, lane, place);
    };
    const auto load_row = [&](int row) { return lane < t.batch && row < t.rows ? op.load_row(row) : op.no_row(); };
    int base = warp * t.batch;
    start(base, true);
    copy_commit();
    place += AHEAD_BYTES;
    Row row = load_row(base + lane);
    op.begin();
    for (; base < t.rows; base += step) {
        const unsigned needed = __ballot_sync(~0u, op.needs(row));
        op.look(
            row, [&] { return t.x.at<const T>(base + lane); }, 1);
        const Row following = load_row(base + step + lane);
        typename Op::Stats mine = op.none();
#pragma unroll 1
        for (int s = 0; s < t.batch && base + s < t.rows; s++) {
            const StreamedRow<T, WARP, PACKS> now = next;
            int left = now.left; /* in this group and after it */
            typename Op::Stats g = op.none();
#pragma unroll 1
            for (int group = 0; group < groups; group++) {
                if (group + 1 < groups) {
                    next.load(left - GROUP, place);
                } else {
                    const bool more = s + 1 < t.batch;
                    const unsigned wanted = more ? needed >> (s + 1) : __ballot_sync(~0u, op.needs(following));
                    start(base + (more ? s + 1 : step), wanted & 1);
                }
                copy_commit();
                copy_wait<1>();
                add_group<Op, T, WARP, PACKS, Op::LARGE ? 2 : PACKS>(
                    op, g, places + side * PACKS * STREAM_THREADS, left, now.head + int64_t(group * GROUP + lane) * N);
                place += side ? AHEAD_BYTES : -AHEAD_BYTES;
                side ^= 1;
                left -= GROUP;
            }
            add_edges_of(op, g, now, lane, t.length);
            hand_over<Op, WARP>(op, mine, g, s);
        }
        op.finish(row, base + lane, mine);
        row = following;
    }
}

/* Loads the rows of one step after the other, of one batch after the other; a row is one group. */
template <typename T, int LANES, int PACKS> struct RowLoader {
    const RowStream &t;
    const unsigned place;
    const int step;            /* from one batch to the next */
    int base, s = 0, side = 0; /* of the next rows */

    DEVICE RowLoader(const RowStream &stream, int first, int batches_apart, const void *places)
        : t(stream), place(static_cast<unsigned>(__cvta_generic_to_shared(places))), step(batches_apart), base(first) {
    }
    DEVICE StreamedRow<T, LANES, PACKS> start() {
        const int lane = threadIdx.x % WARP, row = base + s + lane / LANES;
        const bool present = row < t.rows;
        StreamedRow<T, LANES, PACKS> loaded;
        loaded.begin(t.x.at<const T>(present ? row : 0), present ? t.length : 0, lane % LANES,
                     place + side * PACKS * STREAM_THREADS * 16);
        copy_commit();
        side = side + 1 == STREAM_SIDES ? 0 : side + 1;
        s += WARP / LANES;
        if (s >= t.batch) {
            s = 0;
            base += step;
        }
        return loaded;
    }
};

/* Rows of one group: the rows of the next two steps are in flight. */
template <class Op, typename T, int LANES, int PACKS>
DEVICE void stream_short_rows(Op &op, const RowStream &t, uint4 *shared_memory) {
    typedef typename Op::Row Row;
    constexpr int N = WIDE<T>, AT_ONCE = WARP / LANES;
    const int lane = threadIdx.x % WARP, own = lane % LANES;
    const int step = gridDim.x * (STREAM_THREADS / WARP) * t.batch;
    const Pack<T, N> *const places = reinterpret_cast<const Pack<T, N> *>(shared_memory) + threadIdx.x;
    int base = (blockIdx.x * (STREAM_THREADS / WARP) + threadIdx.x / WARP) * t.batch;
    RowLoader<T, LANES, PACKS> loader(t, base, step, places);
    const auto load_row = [&](int row) { return lane < t.batch && row < t.rows ? op.load_row(row) : op.no_row(); };
    StreamedRow<T, LANES, PACKS> next = loader.start(), later = loader.start();
    Row row = load_row(base + lane);
    op.begin();
    int side = 0;
    for (; base < t.rows; base += step) {
        op.look(
            row, [&] { return t.x.at<const T>(base + lane); }, 1);
        const Row following = load_row(base + step + lane);
        typename Op::Stats mine = op.none();
#pragma unroll 1
        for (int s = 0; s < t.batch && base + s < t.rows; s += AT_ONCE) {
            const StreamedRow<T, LANES, PACKS> now = next;
            next = later;
            later = loader.start();
            copy_wait<2>();
            typename Op::Stats g = op.none();
            add_group<Op, T, LANES, PACKS, 2>(op, g, places + side * PACKS * STREAM_THREADS, now.left,
                                              now.head + int64_t(own) * N);
            side = side + 1 == STREAM_SIDES ? 0 : side + 1;
            add_edges_of(op, g, now, own, t.length);
            hand_over<Op, LANES>(op, mine, g, s);
        }
        op.finish(row, base + lane, mine);
        row = following;
    }
}

/*
 * The gradient of rows of one group, from what is known of each row. An Op of a gradient:
 *
 *     typedef ... Row, Coefficient;
 *     bool LARGE              as above
 *     void begin(), Row no_row(), Row load_row(int64_t row)
 *     Coefficient coefficient(const Row &, int64_t row)    called by all lanes, with a row or no_row()
 *     Coefficient shuffled(Coefficient, int lane)
 *     Writer writer(Coefficient), Pack<T, N> Writer::of(pack, column), T Writer::of_one(T x, int64_t column)
 *     T *out(int64_t row)     aligned as the input
 */
template <class Op, typename T, int LANES, int PACKS>
DEVICE void stream_short_gradients(Op &op, const RowStream &t, uint4 *shared_memory) {
    constexpr int N = WIDE<T>, AT_ONCE = WARP / LANES, TURNS = Op::LARGE ? 1 : PACKS;
    const int lane = threadIdx.x % WARP, own = lane % LANES, which = lane / LANES;
    const int step = gridDim.x * (STREAM_THREADS / WARP) * t.batch;
    const Pack<T, N> *const places = reinterpret_cast<const Pack<T, N> *>(shared_memory) + threadIdx.x;
    int base = (blockIdx.x * (STREAM_THREADS / WARP) + threadIdx.x / WARP) * t.batch;
    RowLoader<T, LANES, PACKS> loader(t, base, step, places);
    const auto load_row = [&](int row) { return lane < t.batch && row < t.rows ? op.load_row(row) : op.no_row(); };
    StreamedRow<T, LANES, PACKS> next = loader.start(), later = loader.start();
    typename Op::Row row = load_row(base + lane);
    op.begin();
    int side = 0;
    for (; base < t.rows; base += step) {
        const typename Op::Row following = load_row(base + step + lane);
        const typename Op::Coefficient mine = op.coefficient(row, base + lane);
#pragma unroll 1
        for (int s = 0; s < t.batch && base + s < t.rows; s += AT_ONCE) {
            const StreamedRow<T, LANES, PACKS> now = next;
            next = later;
            later = loader.start();
            copy_wait<2>();
            const typename Op::Coefficient of_row = op.shuffled(mine, s + which);
            const Pack<T, N> *const from = places + side * PACKS * STREAM_THREADS;
            side = side + 1 == STREAM_SIDES ? 0 : side + 1;
            if (base + s + which >= t.rows)
                continue;
            const auto writer = op.writer(of_row);
            T *const out = op.out(base + s + which);
#pragma unroll TURNS
            for (int k = 0; k < PACKS; k++)
                if (now.left > k * LANES) {
                    const int column = now.head + (own + k * LANES) * N;
                    store_once<T, N>(out + column, writer.of(from[k * STREAM_THREADS], column));
                }
#pragma unroll
            for (int k = 0; k < now.EDGES; k++)
                if (own + k * LANES < now.edges) {
                    const int column = now.column(own + k * LANES, t.length);
                    out[column] = writer.of_one(now.edge[k].v[0], column);
                }
        }
        row = following;
    }
}

#endif
