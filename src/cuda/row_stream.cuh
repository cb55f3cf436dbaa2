/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of many rows of adjacent elements, of any alignment. A warp takes a batch of up to 32 rows. It
 * reduces them one after the other, all lanes working on the same row; then each lane finishes one row.
 * While some packs are added, the next ones are in flight, also across the end of a row. Warps do not wait
 * for each other. row_chunks.cuh is for shorter rows.
 *
 * An Op says what the statistics are. `column` is the column of the first element of the first pack, `step` the
 * distance in columns from one pack to the next, and the first `valid` packs are part of the row:
 *
 *     typedef ... Stats;      statistics of some elements of a row; can be merged
 *     typedef ... Row;        what is loaded of a row besides its elements
 *     bool LARGE              `add` has many instructions, so that loops over it are not unrolled, and uses columns
 *     Stats none()
 *     void add(Stats &, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step)
 *     Stats merge_lanes(Stats, int lanes)    merges groups of `lanes` adjacent lanes
 *     void begin()            called after the first loads: waits for the previous kernel
 *     Row no_row(), Row load_row(int64_t row)
 *     bool needs(const Row &)     whether the row has to be reduced
 *     void look(Row &, F first, int64_t step)    starts loads whose results only finish uses. first() is the
 *                                                address of the row; its elements lie `step` apart
 *     void finish(const Row &, int64_t row, const Stats &)    also called with no_row()
 */
#ifndef RAFTER_CUDA_ROW_STREAM_CUH
#define RAFTER_CUDA_ROW_STREAM_CUH

#include "core/sizes.h"
#include "cuda/row_statistics.cuh"

constexpr int STREAM_THREADS = 256;
constexpr int STREAM_PACKS = 4;  /* packs of a group: what a lane loads at a time */
constexpr int STREAM_STAGES = 2; /* groups in shared memory: one is added, one is in flight */

/* As a kernel argument. */
struct RowStream {
    Rows x;
    int rows, length;  /* length: elements of a row */
    int batch, blocks; /* rows per batch; blocks of the grid */
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

/* `warps`: that run at a time. */
static inline RowStream stream_of(const Rows &x, int64_t rows, int64_t length, int64_t warps) {
    constexpr int PER_BLOCK = STREAM_THREADS / WARP;
    RowStream s = {};
    s.x = x;
    s.rows = static_cast<int>(rows);
    s.length = static_cast<int>(length);
    const int64_t rounds = ceil_div<int64_t>(rows, warps * WARP); /* batches per warp, all of about the same size */
    s.batch = static_cast<int>(ceil_div(rows, warps * rounds));
    s.blocks = static_cast<int>(min(ceil_div<int64_t>(ceil_div<int64_t>(rows, s.batch), PER_BLOCK), warps / PER_BLOCK));
    return s;
}

/* Bytes of shared memory of a block. */
static inline size_t stream_shared() {
    return size_t(STREAM_STAGES) * STREAM_PACKS * 16 * STREAM_THREADS;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A lane's share of a row. Packs that are in flight go to shared memory, not to registers, which are scarce; each
 * thread has places of its own there. Edge elements that do not exist are -inf. */
template <typename T, int LANES, int PACKS> struct StreamedRow {
    static constexpr int N = WIDE<T>, EDGES = (2 * (N - 1) + LANES - 1) / LANES;
    const T *at;     /* the next pack to load */
    int left;        /* packs from the lane's first one to the end of the row: 0, LANES, ... below it are the lane's */
    int head, edges; /* elements before the first pack; before the first and after the last one */
    Pack<T, 1> edge[EDGES];

    /* Starts to copy the lane's next PACKS packs to `place`. `still`: as `left`, counted from the first of them. */
    DEVICE void load(int still, unsigned place) {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (k * LANES < still)
                copy_async_to(place + k * STREAM_THREADS * 16, at + k * LANES * N);
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

/* Adds a lane's packs of one group. `left`: as in StreamedRow, counted from the group's first pack. AT_ONCE packs are
 * added at a time if all lanes have them, else one at a time. */
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

/* The loop of a kernel. Called by all threads of the block. */
template <class Op, typename T, int PACKS> DEVICE void stream_rows(Op &op, const RowStream &t, uint4 *shared_memory) {
    typedef typename Op::Row Row;
    constexpr int N = WIDE<T>, GROUP = PACKS * WARP, AHEAD_BYTES = PACKS * STREAM_THREADS * 16;
    const int lane = threadIdx.x % WARP;
    const int warp = blockIdx.x * (STREAM_THREADS / WARP) + threadIdx.x / WARP,
              step = gridDim.x * (STREAM_THREADS / WARP) * t.batch;
    const int groups = max(ceil_div(t.length / N, GROUP), 1); /* per row, at most */
    const Pack<T, N> *const places = reinterpret_cast<const Pack<T, N> *>(shared_memory) + threadIdx.x;
    unsigned place = shared_address(places); /* where the next group is copied to */
    int side = 0;                            /* of the group that is added next */
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
            int left = now.left; /* counted from this group's first pack */
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
            g = op.merge_lanes(g, WARP);
            if (lane == s)
                mine = g;
        }
        op.finish(row, base + lane, mine);
        row = following;
    }
}

#endif
