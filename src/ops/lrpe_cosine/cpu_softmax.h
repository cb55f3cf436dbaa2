/* SPDX-License-Identifier: Apache-2.0 */
/* The softmax over features and over the sequence: exponentials of a slab, and statistics of
 * columns and rows. */
#ifndef RAFTER_LRPE_COSINE_CPU_SOFTMAX_H
#define RAFTER_LRPE_COSINE_CPU_SOFTMAX_H

#include "core/kernel_memory.h"
#include "ops/lrpe_cosine/cpu_slabs.h"

/* ---- exponentials of rows -------------------------------------------------------------------- */

V_INLINE float row_max(int dtype, const struct row *row) {
    const int64_t bytes = v_bytes(dtype);
    struct v_peak peak = v_peak_empty();
    vf rest = v_set(-INFINITY);
    FOR_PAIRS(i, count, row->width, {
        prefetch(dtype, row->x + i * bytes + row->x_ahead);
        const struct pair x = load_part(dtype, row->x + i * bytes, count, -INFINITY);
        if (count == PAIR)
            v_peak_add(dtype, &peak, row->x + i * bytes, x.a, x.b);
        else
            rest = v_max(x.a, v_max(x.b, rest));
    });
    const float of_rest = v_hmax(rest);
    if (row->width < PAIR)
        return of_rest;
    const float of_pairs = v_peak_value(dtype, &peak); /* may be NaN if an element is */
    return of_rest > of_pairs ? of_rest : of_pairs;
}

/* Intermediate results of the softmax over features, for one slab. */
struct softmax_slab {
    _Alignas(64) float e[TILE_CELLS]; /* [rows][heads][pitch]: e^(x - max), 0 past the width */
    _Alignas(64) float g[TILE_CELLS]; /* [rows][heads][pitch]: the gradient of f(x), in backward */
    float max[TILE_CELLS / PAIR], sum[TILE_CELLS / PAIR], dot[TILE_CELLS / PAIR]; /* [rows][heads] */
};

/* The kernel memory of lrpe_cosine. */
struct buffers {
    struct tile tile;
    _Alignas(64) char one[TILE_CELLS * 4], two[2 * TILE_CELLS * 4],
        three[TILE_CELLS * 4]; /* see open_input and open_output: one for x, two for y or dy, three for dx */
    struct softmax_slab softmax;
};
_Static_assert(sizeof(struct buffers) <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");

V_INLINE struct buffers *buffers(void) {
    return rafter_kernel_memory();
}

/* Computes the exponentials of a slab and their sums. All maxima come first, then all sums, so that the
 * horizontal reduction of one row overlaps with the next row. */
V_INLINE void exponentials(int dtype, bool backward, const struct slab *slab, struct softmax_slab *softmax) {
    for (int64_t r = 0, u = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++, u++) {
            const struct row row = row_of(slab, r, h);
            softmax->max[u] = row_max(dtype, &row);
        }
    for (int64_t r = 0, u = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++, u++) {
            const struct row row = row_of(slab, r, h);
            float *const e = softmax->e + u * slab->pitch, *const g = softmax->g + u * slab->pitch;
            const struct pair pivot = pair_set(v_pivot(softmax->max[u]));
            struct pair sum = pair_set(0.0f), dot = sum;
            FOR_PAIRS(i, count, row.width, {
                const struct pair x = load_part(dtype, row.x + i * v_bytes(dtype), count, -INFINITY);
                const struct pair term = pair_exp(x, pivot);
                store_pair(e + i, term);
                sum = pair_add(sum, term);
                if (backward) {
                    const struct pair slope = gradient(dtype, &row, i, count);
                    store_pair(g + i, slope);
                    dot = pair_fma(term, slope, dot);
                }
            });
            softmax->sum[u] = v_sum(sum.a + sum.b);
            softmax->dot[u] = backward ? v_sum(dot.a + dot.b) : 0.0f;
        }
}

/* ---- statistics of columns ------------------------------------------------------------------- */

enum { PAIRS = 2 };

/* Adds all rows of a slab to the running statistics of `pairs` pairs of columns of one head, from
 * feature i on. `count`: columns of each pair; fewer than PAIR only in the last one of a head. */
V_INLINE void fold_columns(int dtype, bool backward, int pairs, const struct slab *slab, int64_t h, int64_t i,
                           int64_t count) {
    const int64_t from = i * v_bytes(dtype), step = PAIR * v_bytes(dtype), angles = slab->heads * slab->pitch;
    struct row row = row_of(slab, 0, h);
    const struct lrpe_statistics s = {row.s.pivot + i, row.s.scale + i, backward ? row.s.dot + i : NULL};
    struct pair max[PAIRS], pivot[PAIRS], sum[PAIRS], dot[PAIRS];
    for (int k = 0; k < pairs; k++)
        max[k] = load_pair(s.pivot + k * PAIR);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int k = 0; k < pairs; k++) {
            const char *x = row.x + r * slab->x.row + from + k * step;
            prefetch(dtype, x + row.x_ahead);
            max[k] = pair_max(load_part(dtype, x, count, -INFINITY), max[k]);
        }
    for (int k = 0; k < pairs; k++) {
        pivot[k] = pair_pivot(max[k]);
        const struct pair shrink = pair_exp(load_pair(s.pivot + k * PAIR), pivot[k]);
        sum[k] = pair_mul(load_pair(s.scale + k * PAIR), shrink);
        dot[k] = backward ? pair_mul(load_pair(s.dot + k * PAIR), shrink) : pair_set(0.0f);
    }
    for (int64_t r = 0; r < slab->rows; r++) {
        for (int k = 0; k < pairs; k++) {
            const struct pair e = pair_exp(load_part(dtype, row.x + from + k * step, count, -INFINITY), pivot[k]);
            sum[k] = pair_add(sum[k], e);
            if (backward)
                dot[k] = pair_fma(e, gradient(dtype, &row, i + k * PAIR, count), dot[k]);
        }
        row.x += slab->x.row;
        row.dy_cos += slab->dy.row, row.dy_sin += slab->dy.row;
        row.sine += angles, row.cosine += angles;
    }
    for (int k = 0; k < pairs; k++) {
        store_pair(s.pivot + k * PAIR, max[k]);
        store_pair(s.scale + k * PAIR, sum[k]);
        if (backward)
            store_pair(s.dot + k * PAIR, dot[k]);
    }
}

V_INLINE void fold_slab(int dtype, bool backward, const struct slab *slab) {
    for (int64_t h = 0; h < slab->heads; h++) {
        int64_t i = 0;
        for (; i + PAIRS * PAIR <= slab->width; i += PAIRS * PAIR)
            fold_columns(dtype, backward, PAIRS, slab, h, i, PAIR);
        for (; i + PAIR <= slab->width; i += PAIR)
            fold_columns(dtype, backward, 1, slab, h, i, PAIR);
        if (i < slab->width)
            fold_columns(dtype, backward, 1, slab, h, i, slab->width - i);
    }
}

static void columns(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                    const struct lrpe_statistics *statistics) {
    const bool backwards = call->common.direction == RAFTER_BACKWARD;
    const int64_t *shape = call->x.shape, padded = lrpe_padded(shape[3]);
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++)
            for (int64_t d = box->d; d < lrpe_padded(box->d_end); d++) {
                const int64_t at = (b * shape[2] + h) * padded + d;
                statistics->pivot[at] = -INFINITY;
                statistics->scale[at] = 0.0f;
                if (backwards)
                    statistics->dot[at] = 0.0f;
            }
    struct buffers *const memory = buffers();
    struct tile *const t = &memory->tile;
    struct slab slab = {0};
    for (start_tiles(t, TILE_CELLS / TILE_ROWS, backwards); next_tile(call, box, t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            load_angles(call, box, t, b);
            open_slab(call, t, LRPE_SEQUENCE, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, t, b, memory->one);
            if (backwards) {
                slab.dy = open_input(&call->dy, 2, box, t, b, memory->two);
                V_FOR_DTYPE(call->x.dtype, dtype, fold_slab(dtype, true, &slab))
            } else {
                V_FOR_DTYPE(call->x.dtype, dtype, fold_slab(dtype, false, &slab))
            }
        }
}

static void merge(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                  const struct lrpe_statistics *statistics, int64_t parts, int64_t step) {
    const int64_t heads = call->x.shape[2], padded = lrpe_padded(call->x.shape[3]);
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++)
            for (int64_t d = box->d; d < box->d_end; d += PAIR) {
                const int64_t at = (b * heads + h) * padded + d;
                const struct lrpe_statistics s = {statistics->pivot + at, statistics->scale + at,
                                                  statistics->dot ? statistics->dot + at : NULL};
                struct pair max = load_pair(s.pivot), sum = pair_set(0.0f), dot = sum;
                for (int64_t p = 1; p < parts; p++)
                    max = pair_max(load_pair(s.pivot + p * step), max);
                const struct pair pivot = pair_pivot(max);
                for (int64_t p = 0; p < parts; p++) {
                    const struct pair shrink = pair_exp(load_pair(s.pivot + p * step), pivot);
                    sum = pair_fma(load_pair(s.scale + p * step), shrink, sum);
                    if (s.dot)
                        dot = pair_fma(load_pair(s.dot + p * step), shrink, dot);
                }
                store_pair(s.pivot, pivot);
                store_pair(s.scale, (struct pair){v_set(1.0f) / sum.a, v_set(1.0f) / sum.b});
                if (s.dot)
                    store_pair(s.dot, (struct pair){dot.a / sum.a, dot.b / sum.b});
            }
}

/* ---- statistics of rows ---------------------------------------------------------------------- */

/* Adds a slab, which has some features of one head, to the statistics of its rows. */
V_INLINE void fold_rows(int dtype, bool backward, const struct slab *slab, bool first, bool last) {
    struct softmax_slab *const part = &buffers()->softmax;
    exponentials(dtype, backward, slab, part);
    for (int64_t r = 0; r < slab->rows; r++) {
        const struct lrpe_statistics s = row_of(slab, r, 0).s;
        const float before = first ? -INFINITY : *s.pivot;
        const float max = part->max[r] > before ? part->max[r] : before, pivot = v_pivot(max);
        const float shrink = v_exp_from_scalar(before, pivot), fit = v_exp_from_scalar(part->max[r], pivot);
        const float sum = (first ? 0.0f : *s.scale * shrink) + part->sum[r] * fit;
        *s.pivot = last ? pivot : max;
        *s.scale = last ? 1.0f / sum : sum;
        if (backward) {
            const float dot = (first ? 0.0f : *s.dot * shrink) + part->dot[r] * fit;
            *s.dot = last ? dot / sum : dot;
        }
    }
}

static void rows(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                 const struct lrpe_statistics *statistics) {
    const bool backwards = call->common.direction == RAFTER_BACKWARD;
    struct buffers *const memory = buffers();
    struct tile *const t = &memory->tile;
    struct slab slab = {0};
    for (start_tiles(t, TILE_CELLS, backwards); next_tile(call, box, t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            load_angles(call, box, t, b);
            open_slab(call, t, LRPE_FEATURE_WIDE, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, t, b, memory->one);
            const bool first = t->d == box->d, last = t->d + t->width == box->d_end;
            if (backwards) {
                slab.dy = open_input(&call->dy, 2, box, t, b, memory->two);
                V_FOR_DTYPE(call->x.dtype, dtype, fold_rows(dtype, true, &slab, first, last))
            } else {
                V_FOR_DTYPE(call->x.dtype, dtype, fold_rows(dtype, false, &slab, first, last))
            }
        }
}

#endif
