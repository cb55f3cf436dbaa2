/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows in any layout, through shared memory: one kernel for statistics and gradient.
 *
 * A tile is a few dense slabs (slabs.cuh), or, if COLUMNS, some rows of one slab that lie side by side. It
 * consists of spans of adjacent elements: all of its slabs are one span (one_span), each slab is one, or, if
 * COLUMNS, each step of the rows is one. Spans are copied in packs of 16 bytes, whatever their alignment:
 * an element has the same offset from a 16-byte boundary in shared memory as in memory. Only the packs at the
 * ends of a span may have to be copied element by element. While one tile is reduced, the next ones are copied.
 */
#ifndef RAFTER_CUDA_SLAB_STAGE_CUH
#define RAFTER_CUDA_SLAB_STAGE_CUH

#include "cuda/slabs.cuh"

constexpr int STAGE_THREADS = 256;
/* Tiles in shared memory: one is reduced, the others are copied. */
template <bool GRADIENT> constexpr int STAGES_OF = GRADIENT ? 2 : 3;

/* As a kernel argument. */
struct Stage {
    Slabs slabs;
    bool columns;                         /* tiles are rows side by side */
    bool one_span;                        /* all slabs of a tile are one span */
    int rows, slabs_per_tile, wide_tiles; /* rows per tile; slabs per tile; tiles side by side, if `columns` */
    int pitch;                            /* elements of shared memory from span to span, whole packs */
    int span_packs;                       /* packs that a span touches, at most */
    int lanes;                            /* threads per row: a power of two, at most a warp */
    unsigned tiles;
    int buffer;     /* elements of shared memory for a tile */
    int64_t extent; /* elements from the first one of the input to the end of the last one */
    Divisor by_packs, by_inner, by_wide_tiles;
};

/* ---- host ------------------------------------------------------------------------------------ */

/* Whether tiles are whole slabs. Contiguous rows of 1 KB and more are not: they are faster without shared memory. */
static inline bool stages_slabs(const Slabs &s, bool both, int bytes) {
    const int64_t slab = s.slab_elements() * bytes;
    return s.dense(0) && (!both || s.dense(1)) && s.inner <= 64 && (s.inner == 1 ? slab < 1024 : slab <= 8192);
}

/* Why the rows cannot be staged, or NULL. `both`: the gradient is written too. */
static inline const char *why_not_staged(const Slabs &s, bool both, int bytes) {
    if (s.rows() > int64_t(INT32_MAX) * 16)
        return "it counts tiles in 31 bits";
    if (stages_slabs(s, both, bytes))
        return NULL;
    if (s.inner <= 64 || s.across[0] != 1 || (both && s.across[1] != 1))
        return "rows are long, or apart in memory";
    return s.length <= 48 ? NULL : "rows are too long for shared memory";
}

static inline Stage stage_of(const Slabs &s, bool both, int bytes, int multiprocessors) {
    const int64_t wide = 16 / bytes, slab = s.slab_elements();
    Stage g = {};
    g.slabs = s;
    g.columns = !stages_slabs(s, both, bytes);
    int64_t spans = 1, span = 1;
    if (g.columns) {
        const int64_t fit = (12 << 10) / (s.length * bytes) / 32 * 32;
        g.rows =
            static_cast<int>(max(min(min(fit, int64_t(STAGE_THREADS)), round_up<int64_t>(s.inner, 32)), int64_t(32)));
        g.wide_tiles = static_cast<int>(ceil_div<int64_t>(s.inner, g.rows));
        g.rows = static_cast<int>(ceil_div<int64_t>(s.inner, g.wide_tiles));
        g.slabs_per_tile = 1;
        g.tiles = static_cast<unsigned>(s.outer * g.wide_tiles);
        spans = s.length;
        span = g.rows;
        g.one_span = false;
        g.lanes = 1;
    } else {
        const int64_t most = min((12 << 10) / (slab * bytes), STAGE_THREADS / s.inner);
        const int64_t enough = ceil_div<int64_t>(s.outer, 4 * multiprocessors);
        g.slabs_per_tile = static_cast<int>(max(min(most, enough), int64_t(1)));
        g.rows = g.slabs_per_tile * static_cast<int>(s.inner);
        g.wide_tiles = 1;
        g.tiles = static_cast<unsigned>(ceil_div<int64_t>(s.outer, g.slabs_per_tile));
        /* Not for slabs of whole packs: one element of many rows would lie in the same bank. Separate spans have an odd
         * number of packs as pitch. */
        g.one_span = s.packed(0) && (!both || s.packed(1)) && slab % wide != 0;
        spans = g.one_span ? 1 : g.slabs_per_tile;
        span = g.one_span ? g.slabs_per_tile * slab : slab;
        g.lanes = 1;
        while (g.lanes < WARP && g.lanes * 2 * g.rows <= STAGE_THREADS && g.lanes * 4 < s.length)
            g.lanes *= 2;
    }
    g.span_packs = static_cast<int>(ceil_div<int64_t>(span + wide - 1, wide));
    g.pitch = static_cast<int>((spans == 1 || g.columns ? g.span_packs : g.span_packs | 1) * wide);
    g.buffer = static_cast<int>(spans * g.pitch);
    g.extent = 1 + (s.length - 1) * s.step[0] + (s.inner - 1) * s.across[0];
    for (int d = 0; d < s.walk.dims; d++)
        g.extent += (s.walk.size[d] - 1) * s.walk.stride[0][d];
    g.by_packs = Divisor(g.span_packs);
    g.by_inner = Divisor(s.inner <= 64 ? s.inner : 1);
    g.by_wide_tiles = Divisor(g.wide_tiles);
    return g;
}

/* ---- device ---------------------------------------------------------------------------------- */

/* One tile. */
template <typename T, bool COLUMNS> struct StageTile {
    const Stage &g;
    int64_t slab; /* its first slab */
    int column;   /* its first row of the slab, if COLUMNS */
    int rows, slabs;

    DEVICE StageTile(const Stage &stage, unsigned index) : g(stage) {
        if constexpr (COLUMNS) {
            const unsigned of = g.by_wide_tiles.quotient(index);
            slab = of;
            column = static_cast<int>(index - of * g.by_wide_tiles.number) * g.rows;
            rows = min(g.rows, static_cast<int>(g.slabs.inner) - column);
            slabs = 1;
        } else {
            slab = index * int64_t(g.slabs_per_tile);
            column = 0;
            const int64_t left = g.slabs.outer - slab;
            slabs = left < g.slabs_per_tile ? static_cast<int>(left) : g.slabs_per_tile;
            rows = slabs * static_cast<int>(g.slabs.inner);
        }
    }
    DEVICE T *slab_at(int tensor, int slab_of_tile) const {
        int64_t at[3];
        g.slabs.walk.offsets(slab + slab_of_tile, at);
        return g.slabs.at<T>(tensor, at[tensor]);
    }
    DEVICE T *span_at(int tensor, int span) const {
        if constexpr (COLUMNS)
            return slab_at(tensor, 0) + column + span * g.slabs.step[tensor];
        else
            return slab_at(tensor, span);
    }
    /* Elements from a 16-byte boundary to p. */
    static DEVICE int phase(const T *p) {
        return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T)) & (WIDE<T> - 1);
    }
    /* The number among all rows of a row of the tile. */
    DEVICE int64_t row(int row_of_tile) const {
        const int of = COLUMNS ? 0 : static_cast<int>(g.by_inner.quotient(static_cast<unsigned>(row_of_tile)));
        int64_t at[3];
        g.slabs.walk.offsets(slab + of, at);
        return at[2] + (column + row_of_tile - of * (COLUMNS ? 0 : static_cast<int>(g.slabs.inner))) * g.slabs.row_step;
    }

    /* Where the spans of a tensor begin: evenly spaced, `apart` elements, unless there are several outer dimensions. */
    struct Spans {
        const StageTile &tile;
        const int tensor;
        const bool even;
        T *const first;
        const int64_t apart;

        DEVICE Spans(const StageTile &of, int which)
            : tile(of), tensor(which), even(COLUMNS || of.g.one_span || of.g.slabs.walk.dims == 1),
              first(of.span_at(which, 0)), apart(COLUMNS ? of.g.slabs.step[which] : of.g.slabs.walk.stride[which][0]) {
        }
        DEVICE T *at(int span) const {
            return even ? first + span * apart : tile.span_at(tensor, span);
        }
    };

    /* Divides the spans of a tensor (0: the input, 1: the gradient) into aligned packs. Calls whole(to, p) for a pack
     * at p that can be accessed as a whole, and part(to, p, n) for the n elements of the span in any other pack. `to`:
     * where the first element lies in shared memory, for both tensors by the alignment of the input. A pack of the
     * gradient is whole if it lies inside the span; of the input, if it lies inside the tensor: reading elements of
     * neighbouring spans does no harm, and saves slow copies of single elements. */
    template <typename Whole, typename Part> DEVICE void for_packs(int tensor, Whole whole, Part part) const {
        constexpr int N = WIDE<T>;
        const int slab_elements = static_cast<int>(g.slabs.length * (COLUMNS ? 1 : g.slabs.inner));
        const int spans = COLUMNS ? static_cast<int>(g.slabs.length) : g.one_span ? 1 : slabs;
        const int length = COLUMNS ? rows : slab_elements * (g.one_span ? slabs : 1);
        const Spans begins(*this, tensor), inputs(*this, 0);
        const T *const lowest = g.slabs.at<T>(0, 0), *const highest = g.slabs.at<T>(0, g.extent) - N;
        for (int i = threadIdx.x; i < spans * g.span_packs; i += STAGE_THREADS) {
            const int span = static_cast<int>(g.by_packs.quotient(static_cast<unsigned>(i)));
            T *const begin = begins.at(span);
            const int own = phase(begin), from = (i - span * g.span_packs) * N - own; /* element of the span */
            const int to = span * g.pitch + from + (tensor == 0 ? own : phase(inputs.at(span)));
            T *const p = begin + from;
            const bool inside = tensor == 0 ? from > -N && from < length && p >= lowest && p <= highest
                                            : from >= 0 && from + N <= length;
            if (inside)
                whole(to, p);
            else if (from < length && from + N > 0) {
                const int skipped = from < 0 ? -from : 0;
                part(to + skipped, p + skipped, min(length - from, N) - skipped);
            }
        }
    }
    /* Starts to copy the input. */
    DEVICE void load(T *shared) const {
        constexpr int N = WIDE<T>;
        for_packs(
            0, [&](int to, const T *p) { copy_async(reinterpret_cast<Pack<T, N> *>(shared + to), p); },
            [&](int to, const T *p, int n) {
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j < n)
                        shared[to + j] = p[j];
            });
    }
    /* Copies shared memory to the gradient. */
    DEVICE void store(const T *shared) const {
        constexpr int N = WIDE<T>;
        for_packs(
            1,
            [&](int from, T *p) {
                Pack<T, N> pack;
                if (from % N == 0)
                    pack = *reinterpret_cast<const Pack<T, N> *>(shared + from);
                else
#pragma unroll
                    for (int j = 0; j < N; j++)
                        pack.v[j] = shared[from + j];
                store_once<T, N>(p, pack);
            },
            [&](int from, T *p, int n) {
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j < n)
                        p[j] = shared[from + j];
            });
    }
};

/* The rows of a tile in shared memory. */
template <typename T, bool COLUMNS> struct StageRows {
    const StageTile<T, COLUMNS> &tile;
    const typename StageTile<T, COLUMNS>::Spans spans;
    const int phase, slope; /* phase of the first span; COLUMNS: that of step l is (slope * l + phase) % WIDE */

    DEVICE explicit StageRows(const StageTile<T, COLUMNS> &of)
        : tile(of), spans(of, 0), phase(of.phase(spans.first)),
          slope(static_cast<int>(of.g.slabs.step[0]) & (WIDE<T> - 1)) {
    }
    /* Elements of shared memory from one element of a row to the next, but for the phase if COLUMNS. */
    DEVICE int step() const {
        return COLUMNS ? tile.g.pitch : static_cast<int>(tile.g.slabs.inner);
    }
    /* The place of a row's first element; if COLUMNS, without the phase. */
    DEVICE int base(int row_of_tile) const {
        if constexpr (COLUMNS)
            return row_of_tile;
        const Stage &g = tile.g;
        const int slab = static_cast<int>(g.by_inner.quotient(static_cast<unsigned>(row_of_tile)));
        const int inner = static_cast<int>(g.slabs.inner), column = row_of_tile - slab * inner;
        if (g.one_span)
            return column + phase + slab * static_cast<int>(g.slabs.length) * inner;
        return column + slab * g.pitch + tile.phase(spans.at(slab));
    }
    /* The place of element l of a row with this base(). */
    DEVICE int at(int first, int l) const {
        return first + l * step() + (COLUMNS ? (phase + slope * l) & (WIDE<T> - 1) : 0);
    }
};

/*
 * The loop of a kernel: blocks take tiles in turn. An Op says what is computed:
 *
 *     typedef ... Stats, Row, Coefficient;
 *     bool GRADIENT                        whether the gradient is written
 *     Stats none(), add(...), merge_lanes(...)   as in slab_kernels.cuh
 *     Row no_row(), Row load_row(int64_t row)   what is loaded of a row while the tile is in flight
 *     void begin()                         called after the first loads: waits for the previous kernel
 *     bool needs_stats(const Row &)        whether the row has to be reduced
 *     int wanted(const Row &)              the element that `finish` needs, such as the label's; -1: none
 *     Coefficient finish(const Row &, const Stats &, T wanted)
 *     Writer writer(const Coefficient &), T Writer::of_one(T x, int column)   the gradient of one element
 */
template <class Op, typename T, bool COLUMNS> DEVICE void staged_rows(Op &op, const Stage &g, uint4 *shared_memory) {
    typedef typename Op::Stats Stats;
    typedef typename Op::Coefficient Coefficient;
    constexpr int STAGES = STAGES_OF<Op::GRADIENT>;
    T *const buffers = reinterpret_cast<T *>(shared_memory);
    char *const rest = reinterpret_cast<char *>(buffers + STAGES * g.buffer);
    Stats *const stats = reinterpret_cast<Stats *>(rest);
    Coefficient *const coefficients = reinterpret_cast<Coefficient *>(rest + round_up<int>(g.rows * sizeof(Stats), 16));
    const int length = static_cast<int>(g.slabs.length);
    const int lane = threadIdx.x & (g.lanes - 1), groups = STAGE_THREADS / g.lanes, group = threadIdx.x / g.lanes;
    const auto load_row = [&](unsigned index) {
        const StageTile<T, COLUMNS> tile(g, index);
        return threadIdx.x < tile.rows ? op.load_row(tile.row(threadIdx.x)) : op.no_row();
    };
    const auto load = [&](unsigned index, int which) {
        if (index < g.tiles)
            StageTile<T, COLUMNS>(g, index).load(buffers + which * g.buffer);
        copy_commit();
    };
    unsigned index = blockIdx.x;
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ahead++)
        load(index + ahead * gridDim.x, ahead);
    typename Op::Row row = load_row(index);
    op.begin();
    for (int which = 0; index < g.tiles; which = which + 1 == STAGES ? 0 : which + 1) {
        const StageTile<T, COLUMNS> tile(g, index);
        load(index + (STAGES - 1) * gridDim.x, which == 0 ? STAGES - 1 : which - 1);
        copy_wait<STAGES - 1>();
        T *const buffer = buffers + which * g.buffer;
        const StageRows<T, COLUMNS> places(tile);
        if (__syncthreads_or(op.needs_stats(row))) {
            for (int r = group; r - group < tile.rows; r += groups) {
                const int base = places.base(r < tile.rows ? r : 0);
                Stats s = op.none();
                constexpr int AT_ONCE = 8, AT_END = 4;
                int v = lane;
                for (; v + (AT_ONCE - 1) * g.lanes < length; v += AT_ONCE * g.lanes) {
                    Pack<T, 1> x[AT_ONCE];
#pragma unroll
                    for (int k = 0; k < AT_ONCE; k++)
                        x[k].v[0] = buffer[places.at(base, v + k * g.lanes)];
                    op.add(s, x, AT_ONCE, v, g.lanes);
                }
                for (; v < length; v += AT_END * g.lanes) {
                    Pack<T, 1> x[AT_END];
                    int valid = 0;
#pragma unroll
                    for (int k = 0; k < AT_END; k++) {
                        const bool present = v + k * g.lanes < length;
                        x[k].v[0] = present ? buffer[places.at(base, v + k * g.lanes)] : from_float<T>(-INFINITY);
                        valid += present;
                    }
                    op.add(s, x, valid, v, g.lanes);
                }
                s = op.merge_lanes(s, g.lanes);
                if (lane == 0 && r < tile.rows)
                    stats[r] = s;
            }
            __syncthreads();
        }
        if (threadIdx.x < tile.rows) {
            const int wanted = op.wanted(row);
            const T x = wanted >= 0 ? buffer[places.at(places.base(threadIdx.x), wanted)] : T();
            const Coefficient c = op.finish(row, stats[threadIdx.x], x);
            if constexpr (Op::GRADIENT)
                coefficients[threadIdx.x] = c;
        }
        index += gridDim.x;
        if (index < g.tiles)
            row = load_row(index);
        if constexpr (Op::GRADIENT) {
            __syncthreads();
            for (int r = group; r < tile.rows; r += groups) {
                const int base = places.base(r);
                const Coefficient c = coefficients[r];
                const auto writer = op.writer(c);
#pragma unroll 4
                for (int v = lane; v < length; v += g.lanes) {
                    T &x = buffer[places.at(base, v)];
                    x = writer.of_one(x, v);
                }
            }
            __syncthreads();
            tile.store(buffer);
        }
        __syncthreads(); /* the next copy overwrites this tile */
    }
}

/* Bytes of shared memory of a block. coefficient_bytes: 0 without a gradient. */
static inline size_t stage_shared(const Stage &g, int bytes, int64_t stats_bytes, int64_t coefficient_bytes) {
    const int64_t stages = coefficient_bytes > 0 ? STAGES_OF<true> : STAGES_OF<false>;
    return static_cast<size_t>(stages * g.buffer * bytes + round_up<int64_t>(g.rows * stats_bytes, 16) +
                               g.rows * coefficient_bytes);
}
/* Blocks of a launch: at most per_sm on each multiprocessor, and as many as its shared memory allows. */
static inline int64_t stage_blocks(const rafter_cuda_state &device, const Stage &g, size_t shared, int per_sm) {
    const int64_t fit = (device.shared_bytes + 1024) / (int64_t(shared) + 3 * 1024);
    return min(int64_t(g.tiles), max(min(int64_t(per_sm), fit), int64_t(1)) * device.multiprocessors);
}

#endif
