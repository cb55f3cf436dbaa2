/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA variants of lrpe_cosine share: a call as kernels take it, and how it is cut into
 * blocks. x is [B, N, H, D]: batch entries (sequences), tokens, heads, features. y = [f(x) cos, f(x) sin] of angle
 * position * theta[h, d], so y and dy have 2 D features.
 *
 * The caller may choose an algorithm: sp (sequence parallel) cuts the sequence into many short pieces; in bp (block
 * parallel) a block walks along all of it. Automatic is sp.
 */
#ifndef RAFTER_LRPE_COSINE_CUDA_PROBLEM_CUH
#define RAFTER_LRPE_COSINE_CUDA_PROBLEM_CUH

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/sincos.cuh"
#include "cuda/variant.cuh"
#include "cuda/view_layout.cuh"
#include "ops/lrpe_cosine/call.h"

namespace lrpe {

constexpr int THREADS_LOG2 = 8, THREADS = 1 << THREADS_LOG2; /* per block */

/* ---- a call, as kernels take it -------------------------------------------------------------- */

struct Strides {
    int64_t b, n, h, d;
};

template <typename T> struct Arguments {
    const T *x, *dy;
    const T *x_end, *dy_end;    /* past their last elements */
    T *out;                     /* y or dx; NULL if only dtheta is wanted */
    Strides x_stride, y_stride; /* y_stride: of y in forward, of dy in backward */
    Strides dx_stride;
    int64_t half; /* elements from the cosine of a feature in y or dy to its sine */
    int64_t batch, length, heads, features;

    const void *theta;
    rafter_dtype theta_dtype;
    int64_t theta_h, theta_d; /* strides of theta */
    const void *positions;    /* NULL: offset + n */
    bool positions_are_64_bit;
    int64_t positions_b, positions_n, offset; /* strides of positions; the first position */

    DEVICE float theta_at(int64_t h, int64_t d) const {
        return load_number(theta, theta_dtype, h * theta_h + d * theta_d);
    }
    DEVICE int64_t position(int64_t b, int64_t n) const {
        if (!positions)
            return offset + n;
        const int64_t i = b * positions_b + n * positions_n;
        return positions_are_64_bit ? static_cast<const int64_t *>(positions)[i]
                                    : static_cast<const int *>(positions)[i];
    }
    /* Whether all elements of dy are one number in memory: a gradient that was expanded from a scalar. */
    DEVICE bool dy_is_one_number() const {
        return (y_stride.b | y_stride.n | y_stride.h | y_stride.d) == 0;
    }
    /* Index in an array [B, N, H] of a number per row. */
    DEVICE int64_t row(int64_t b, int64_t n, int64_t h) const {
        return (b * length + n) * heads + h;
    }
    /* Index in an array [B, H, D] of a number per column. */
    DEVICE int64_t column(int64_t b, int64_t h, int64_t d) const {
        return (b * heads + h) * features + d;
    }
};

inline Strides strides_of(const rafter_view &view) {
    return {view.stride[0], view.stride[1], view.stride[2], view.stride[3]};
}

template <typename T> Arguments<T> arguments(const lrpe_cosine_call &call) {
    const bool forward = call.common.direction == RAFTER_FORWARD;
    Arguments<T> a = {};
    a.x = reinterpret_cast<const T *>(call.x.data);
    a.dy = reinterpret_cast<const T *>(call.dy.data);
    const auto end = [](const rafter_view &view) {
        return view.data ? reinterpret_cast<const T *>(view.data + rafter_span_bytes(&view)) : NULL;
    };
    a.x_end = end(call.x);
    a.dy_end = end(call.dy);
    a.out = reinterpret_cast<T *>(forward ? call.y.data : call.dx.data);
    a.x_stride = strides_of(call.x);
    a.y_stride = strides_of(forward ? call.y : call.dy);
    a.dx_stride = strides_of(call.dx);
    a.half = call.x.shape[3] * a.y_stride.d;
    a.batch = call.x.shape[0];
    a.length = call.x.shape[1];
    a.heads = call.x.shape[2];
    a.features = call.x.shape[3];
    a.theta = call.theta.data;
    a.theta_dtype = call.theta.dtype;
    a.theta_h = call.theta.stride[0];
    a.theta_d = call.theta.stride[1];
    a.positions = call.positions.data;
    a.positions_are_64_bit = call.positions.dtype == RAFTER_I64;
    a.positions_b = call.positions.stride[0];
    a.positions_n = call.positions.stride[1];
    a.offset = call.offset;
    return a;
}

/* Whether the features of all tensors can be accessed in aligned packs of `bytes` bytes. `expanded`: dy may also be one
 * number for all features of a row. */
inline bool takes_packs_of(const lrpe_cosine_call &call, int64_t bytes, bool expanded) {
    const int64_t width = bytes / rafter_dtype_bytes(call.x.dtype);
    /* Each half of y and dy must begin with a pack. */
    bool all = call.x.shape[3] % width == 0;
    for (const rafter_view *view : {&call.x, &call.y, &call.dy, &call.dx}) {
        if (!view->data)
            continue;
        const bool is_expanded = expanded && view == &call.dy && view->stride[3] == 0;
        all = all && (is_expanded || (reinterpret_cast<uintptr_t>(view->data) % static_cast<uint64_t>(bytes) == 0 &&
                                      (view->shape[3] == 1 || view->stride[3] == 1)));
        for (int d = 0; d < 3 && !is_expanded; d++)
            all = all && (view->shape[d] == 1 || view->stride[d] % width == 0);
    }
    return all;
}

/* The same for packs of 16 bytes. */
inline bool takes_packs(const lrpe_cosine_call &call, bool expanded) {
    return takes_packs_of(call, 16, expanded);
}

/* How many sequences use the same angles: all, unless each has positions of its own. */
inline int64_t sequences_alike(const lrpe_cosine_call &call) {
    return call.positions.data && call.positions.stride[0] != 0 ? 1 : call.x.shape[0];
}

/* If fewer sequences share their angles, arithmetic limits the speed, not memory. */
constexpr int64_t MANY_ALIKE = 8;

/* Whether a thread of `rotate` takes 8 bytes of features at a time. */
inline bool takes_half_packs(const lrpe_cosine_call &call) {
    return rafter_dtype_bytes(call.x.dtype) == 2 && call.act != RAFTER_ACT_SOFTMAX &&
           call.algorithm != RAFTER_LRPE_BP && !takes_packs(call, true) && takes_packs_of(call, 8, true);
}

/* Whether dy is turned: its heads are adjacent in memory instead of its features. For any f but a softmax, and for at
 * least a pack of heads, or if there are no gaps between the features either. */
inline bool is_turned(const lrpe_cosine_call &call) {
    const rafter_view &dy = call.dy;
    const int64_t heads = call.x.shape[2];
    return dy.data && call.act != RAFTER_ACT_SOFTMAX && heads > 1 && dy.stride[2] == 1 &&
           (dy.stride[3] == heads || (dy.stride[3] > heads && heads * rafter_dtype_bytes(dy.dtype) >= 16));
}

constexpr int NARROW_TILE = 8; /* packs of a narrow tile: 128 bytes */

/* Elements per pack of a kernel that takes packs, or else single elements. */
inline int pack_width(const lrpe_cosine_call &call) {
    return takes_packs(call, false) ? 16 / rafter_dtype_bytes(call.x.dtype) : 1;
}

/* Calls f(zero of the storage type, elements per pack, whether it is forward), the last two as compile-time
 * constants. */
template <typename F> void for_types(const lrpe_cosine_call &call, int width, F f) {
    for_dtype(call.x.dtype, [&](auto zero) {
        const auto with_width = [&](auto n) {
            if (call.common.direction == RAFTER_FORWARD)
                f(zero, n, std::true_type());
            else
                f(zero, n, std::false_type());
        };
        if (width > 1)
            with_width(std::integral_constant<int, WIDE<decltype(zero)>>());
        else
            with_width(std::integral_constant<int, 1>());
    });
}

/* ---- how a call is cut into blocks ----------------------------------------------------------- */

/* f as kernels know it: a rafter_act_kind, or how a softmax gets its statistics. */
enum {
    LANE_SOFTMAX = RAFTER_ACT_SOFTMAX, /* over features; computed by the lanes that hold a row */
    ROW_STATISTICS,                    /* over features; read from memory */
    COLUMN_STATISTICS,                 /* over the sequence; read from memory */
    BLOCK_SOFTMAX,                     /* over features; computed by the warps that hold a row */
    RUNTIME_F = -1                     /* as a template argument: the kernel reads it from Tiling::f */
};

/* How a call is cut. A block takes a tile, `tokens` tokens and `sequences` sequences. A tile is `width` threads side by
 * side along the heads and features of a token. Each head has `lanes` of these threads; the last ones may be idle. */
struct Tiling {
    int width_log2, lanes;
    int f, sequences;
    Divisor tiles, head_lanes, token_chunks; /* tiles of a token; `lanes`; pieces that the tokens are cut into */
    int64_t sequence_chunks, tokens;         /* pieces that the batch is cut into; tokens per block */
    bool unit_angles;                        /* `rotate` takes angles from the special-function unit: see angles.cuh */
    /* Statistics of a softmax: the maximum, or a number near it; 1 / sum; in backward the sum of p g.
     * ROW_STATISTICS: [B, N, H, these]. COLUMN_STATISTICS: [these, B, H, D]. */
    float *statistics;
    double *moments; /* [chunk, H, D]: the sums of position * (gradient of the angle) over the tokens of a chunk */

    __host__ __device__ int width() const {
        return 1 << width_log2;
    }
    struct Place {
        int64_t h, d;
    };
    /* Head and feature of the j-th of the N features of thread `column` of a tile. Both may be past the last one. */
    template <int N> DEVICE Place place(unsigned tile, int column, int j) const {
        const unsigned i = (tile << width_log2) + column, h = head_lanes.quotient(i), lane = i - h * head_lanes.number;
        return {h, int64_t(lane) * N + j};
    }
    /* Pieces of tokens and sequences; a block takes one tile of one chunk. */
    int64_t chunks() const {
        return token_chunks.number * sequence_chunks;
    }
    int64_t blocks() const {
        return (int64_t)tiles.number * token_chunks.number * sequence_chunks;
    }
};

/* Bytes of the moments [chunks, H, D] of dtheta, rounded up so that what follows is aligned. */
inline size_t moments_bytes(const lrpe_cosine_call &call, int64_t chunks) {
    return round_up((size_t)(chunks * call.x.shape[2] * call.x.shape[3]) * sizeof(double), (size_t)256);
}

/* Sets the tiles: `least` to `most` threads side by side, or fewer if there is less work, with `n` features each.
 * `row_threads`: if not 0, the threads of a head: a power of two, or a multiple of a tile. */
inline void plan_tiles(Tiling *tiling, int64_t heads, int64_t features, int n, int least, int most, int row_threads) {
    tiling->lanes = row_threads ? row_threads : (int)ceil_div(features, int64_t(n));
    const int64_t side_by_side = heads * tiling->lanes;
    int64_t width = power_at_least(side_by_side, 1, most);
    /* Narrower tiles, if more than an eighth of the threads would be idle, and fewer are then. */
    const auto lanes_of = [&](int64_t tile) { return round_up(side_by_side, tile); };
    for (int64_t tile = width; !row_threads && tile >= least; tile /= 2)
        if (lanes_of(width) - side_by_side > side_by_side / 8 && lanes_of(tile) < lanes_of(width))
            width = tile;
    while (tiling->width() < width)
        tiling->width_log2++;
    tiling->tiles = Divisor(ceil_div(side_by_side, width));
    tiling->head_lanes = Divisor(tiling->lanes);
}

/* Whether `rotate` takes angles from the special-function unit (angles.cuh). That is faster if arithmetic is the limit:
 * each angle serves only one element, and there is an f or a gradient to compute. It is slower in short calls and for
 * long rows: a thread takes 0.5 us for an angle that must be computed again, which a short call cannot hide, and the
 * other threads of a long row wait for it. Measured on an H200: docs/perf/lrpe_cosine.md. */
inline bool takes_unit_angles(const lrpe_cosine_call &call) {
    constexpr int64_t LONG_CALL = int64_t(1) << 21, LONGEST_ROW = 256; /* elements */
    const bool copies = call.act == RAFTER_ACT_NONE && call.common.direction == RAFTER_FORWARD;
    return sequences_alike(call) == 1 && !copies && call.x.numel >= LONG_CALL && call.x.shape[3] <= LONGEST_ROW &&
           !call.common.batch_invariant;
}

/* Sets the tokens and sequences of a block. The tiles have been set. A block works on `step` tokens at a time (a step),
 * and `wave` blocks run at once. Angles are computed once for all sequences of a block.
 *
 * Many steps per block save work: filling the table of angles, storing moments of dtheta, loading column statistics.
 * Few steps per block read and write memory faster (docs/perf/lrpe_cosine.md). So, if there are so many tokens, a table
 * serves at least SERVED of them, and a block has at least `least` steps of one sequence. The number of blocks is a
 * multiple of `wave`, or a little less: a little more than one wave would take as long as two. */
inline void plan_waves(Tiling *tiling, const lrpe_cosine_call &call, int64_t step, int64_t wave, int64_t least) {
    constexpr int64_t SERVED = 64;
    const int64_t batch = call.x.shape[0], length = call.x.shape[1], alike = sequences_alike(call);
    tiling->unit_angles = takes_unit_angles(call);
    if (call.algorithm == RAFTER_LRPE_BP) {
        tiling->tokens = length;
        tiling->token_chunks = Divisor(1);
        tiling->sequences = 1;
        tiling->sequence_chunks = batch;
        return;
    }
    const int64_t apart = alike < batch ? batch : 1; /* sequences that have blocks of their own */
    const int64_t chunks = ceil_div(length, step), work = chunks * tiling->tiles.number * apart;
    const bool column_statistics = tiling->f == COLUMN_STATISTICS;
    const int64_t fewest = column_statistics && call.common.direction == RAFTER_BACKWARD ? 2 : 1;
    const int64_t most = !column_statistics && call.dtheta.data
                             ? chunks
                             : max(max(SERVED / min(step * alike, SERVED), least / min(alike, least)), fewest);
    const int64_t waves = ceil_div(work, wave * most), steps = ceil_div(work, wave * waves);
    tiling->tokens = step * steps;
    tiling->token_chunks = Divisor(ceil_div(chunks, steps));
    /* If there are few blocks, cut the batch too: into one wave of blocks; or, if each block still has many sequences,
     * into so many waves that the idle time in the last one does not matter. */
    constexpr int64_t MANY_SEQUENCES = 32, MANY_WAVES = 8;
    const int64_t blocks = tiling->token_chunks.number * tiling->tiles.number;
    const int64_t one_wave = ceil_div(batch, min(max(wave / blocks, int64_t(1)), batch));
    const int64_t many_waves = ceil_div(batch * blocks, wave * MANY_WAVES);
    const int64_t sequences = many_waves >= MANY_SEQUENCES ? min(one_wave, many_waves) : one_wave;
    tiling->sequences = apart > 1 ? 1 : (int)min(sequences, int64_t(4096));
    tiling->sequence_chunks = ceil_div(batch, (int64_t)tiling->sequences);
}

} // namespace lrpe

#endif
