/* SPDX-License-Identifier: Apache-2.0 */
/* The walk over a box in tiles, and the sines and cosines of a tile. */
#ifndef RAFTER_LRPE_COSINE_CPU_TILES_H
#define RAFTER_LRPE_COSINE_CPU_TILES_H

#include "core/sizes.h"
#include "ops/lrpe_cosine/cpu_pairs.h"
#include "ops/lrpe_cosine/kernels.h"
#include "simd/sincos.h"

enum {
    TILE_CELLS = LRPE_COLUMNS, /* angles of a tile; their sines and cosines (16 KiB) stay in L1 */
    TILE_ROWS = 16             /* most tokens of a tile */
};

struct tile {
    int64_t max_columns;                      /* heads times pitch, at most */
    bool angles;                              /* whether sines and cosines are needed */
    int64_t n, rows;                          /* tokens [n, n + rows) */
    int64_t first_n, last_n;                  /* the group of tokens that the tile is in: see next_tile */
    int64_t h, heads;                         /* more than one only if the tile has all features of the box */
    int64_t d, width;                         /* features of each head */
    int64_t pitch;                            /* width rounded up to whole pairs */
    int64_t loaded_h, loaded_heads, loaded_d; /* the heads, and the first feature, whose theta is loaded; 0: none */
    double largest;                           /* see v_sincos_row */
    _Alignas(64) double theta[LRPE_COLUMNS];  /* [loaded_heads][pitch] */
#if V_FMA
    _Alignas(64) uint64_t step[LRPE_COLUMNS]; /* [loaded_heads][pitch]: v_turn_step, if x has 16 bits */
#endif
    _Alignas(64) float sine[TILE_CELLS], cosine[TILE_CELLS]; /* [rows][heads][pitch] */
};

/* A pair of theta, in the pair order of x's dtype, which may differ from theta's. */
V_INLINE struct pair load_theta_pair(int dtype, int x_dtype, const char *p, int64_t step, int64_t count) {
    char buffer[PAIR * 4];
    v_store2(dtype, buffer, v_set(1.0f),
             v_set(1.0f)); /* past the end: any angle but 0, which is slow (v_sincos_lanes) */
    const char *contiguous = v_gather(dtype, p, step, count, buffer);
    if (contiguous != buffer && count < PAIR)
        contiguous = memcpy(buffer, p, (size_t)(count * v_bytes(dtype)));
    const struct pair v = {v_load(dtype, contiguous), v_load(dtype, contiguous + V_LANES * v_bytes(dtype))};
    if (!v_is_split(x_dtype))
        return v;
    return (struct pair){(vf)v_even_words((vi)v.a, (vi)v.b), (vf)v_odd_words((vi)v.a, (vi)v.b)};
}

/* Loads theta of the tile's features for `heads` heads, from the tile's first one on. */
static void load_theta(const struct lrpe_cosine_call *call, struct tile *t, int64_t heads) {
    const rafter_view *theta = &call->theta;
    const int64_t head_step = theta->stride[0], step = theta->stride[1]; /* 0 where theta is broadcast */
    vf largest = v_set(0.0f);
    t->loaded_h = t->h, t->loaded_d = t->d;
    t->loaded_heads = heads;
    for (int64_t h = 0; h < t->loaded_heads; h++)
        for (int64_t i = 0; i < t->pitch; i += PAIR) {
            const char *from = rafter_at(theta, (t->h + h) * head_step + (t->d + i) * step);
            const int64_t count = min64(t->width - i, PAIR);
            struct pair v = pair_set(0.0f);
            V_FOR_DTYPE(theta->dtype, dtype, v = load_theta_pair(dtype, call->x.dtype, from, step, count));
            const vf vectors[] = {v.a, v.b};
            for (int k = 0; k < 2; k++) {
                vd low, high;
                v_to_d(vectors[k], &low, &high);
                double *const to = t->theta + h * t->pitch + i + k * V_LANES;
                v_store_d(to, low);
                v_store_d(to + V_LANES / 2, high);
#if V_FMA
                if (call->x.dtype != RAFTER_F32) {
                    const vul steps[] = {v_turn_step(low), v_turn_step(high)};
                    memcpy(t->step + h * t->pitch + i + k * V_LANES, steps, sizeof steps);
                }
#endif
                const vf magnitude = (vf)((vi)vectors[k] & INT32_MAX);
                largest = v_max(v_select(magnitude <= v_set(INFINITY), magnitude, v_set(INFINITY)), largest);
            }
        }
    t->largest = (double)v_hmax(largest);
}

/* Before the first tile of a box. */
static void start_tiles(struct tile *t, int64_t max_columns, bool angles) {
    t->max_columns = max_columns;
    t->angles = angles;
    t->rows = t->loaded_heads = 0;
}

/* If heads are contiguous instead of features, a tile has as many heads as fit, so that it can be transposed. With
 * fewer heads than this, gathering is faster. */
enum { TURNED_HEADS = V_LANES / 2 };

/* Advances to the next tile; false past the last one. The innermost loop is over the tokens of a group
 * [first_n, last_n), then come features, then heads, then groups. If theta of all heads fits, a group
 * is the tokens of one tile. Otherwise it has up to TILE_ROWS tokens, so that theta, which is loaded
 * again for other columns, serves several tiles. */
static bool next_tile(const struct lrpe_cosine_call *call, const struct lrpe_box *box, struct tile *t) {
    if (t->rows == 0) {
        t->n = t->first_n = box->n, t->h = box->h, t->d = box->d;
    } else if ((t->n += t->rows) == t->last_n) {
        t->n = t->first_n;
        if ((t->d += t->width) == box->d_end) {
            t->d = box->d;
            if ((t->h += t->heads) == box->h_end) {
                t->h = box->h;
                t->n = t->first_n = t->last_n;
            }
        }
    }
    if (t->n == box->n_end)
        return false;
    const int64_t max_width = min64(box->d_end - box->d, t->max_columns), max_pitch = round_up(max_width, PAIR);
    const bool whole = max_width == box->d_end - box->d;
    const bool loads_all = whole && (box->h_end - box->h) * max_pitch <= LRPE_COLUMNS;
    /* Fewer columns leave room for more rows: 4 at least, because the angles of the next token are cheap, or 2 if theta
     * is loaded often. */
    const bool turned = lrpe_lies_across(call) && t->max_columns / max_pitch >= TURNED_HEADS;
    const int64_t columns = turned ? t->max_columns : min64(t->max_columns, TILE_CELLS / (loads_all ? 4 : 2));
    const int64_t max_heads = whole ? max64(min64(box->h_end - box->h, columns / max_pitch), 1) : 1;
    const int64_t rows = min64(TILE_ROWS, TILE_CELLS / (max_heads * max_pitch));
    t->last_n = min64(box->n_end, t->first_n + (loads_all ? rows : TILE_ROWS));
    t->rows = min64(t->last_n - t->n, rows);
    t->heads = min64(box->h_end - t->h, max_heads);
    t->width = min64(box->d_end - t->d, max_width);
    t->pitch = round_up(t->width, PAIR);
    const bool loaded = t->d == t->loaded_d && t->h >= t->loaded_h && t->h + t->heads <= t->loaded_h + t->loaded_heads;
    if (t->angles && !loaded)
        load_theta(call, t, loads_all ? box->h_end - box->h : t->heads);
    return true;
}

static int64_t position_of(const struct lrpe_cosine_call *call, int64_t b, int64_t n) {
    const rafter_view *positions = &call->positions;
    if (!positions->data)
        return call->offset + n;
    const char *at = rafter_at(positions, b * positions->stride[0] + n * positions->stride[1]);
    if (positions->dtype == RAFTER_I64) {
        int64_t position;
        memcpy(&position, at, sizeof position);
        return position;
    }
    int32_t position;
    memcpy(&position, at, sizeof position);
    return position;
}

/* Computes the sines and cosines of the tile for batch b, unless they are those of the batch before. */
static void load_angles(const struct lrpe_cosine_call *call, const struct lrpe_box *box, struct tile *t, int64_t b) {
    const bool differ = call->positions.data && call->positions.stride[0] != 0;
    if (!t->angles || (b > box->b && !differ))
        return;
    const int64_t columns = t->heads * t->pitch, from = (t->h - t->loaded_h) * t->pitch;
#if V_FMA
    if (call->x.dtype != RAFTER_F32) {
        const int64_t some = call->positions.data ? 1 : t->rows; /* rows of successive positions */
        for (int64_t r = 0; r < t->rows; r += some)
            v_sincos_rows(t->theta + from, t->step + from, t->largest, position_of(call, b, t->n + r), some, columns,
                          t->sine + r * columns, t->cosine + r * columns);
        return;
    }
#endif
    for (int64_t r = 0; r < t->rows; r++)
        v_sincos_row(t->theta + from, t->largest, position_of(call, b, t->n + r), columns, t->sine + r * columns,
                     t->cosine + r * columns);
}

#endif
