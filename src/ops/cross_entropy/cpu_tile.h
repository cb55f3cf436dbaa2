/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles: many rows at once, one lane per row, for rows that are short or whose classes are not
 * contiguous. Where neighbouring rows are adjacent in memory, vectors are loaded from there. Other
 * rows are first copied to an fp32 buffer in which they are adjacent; the gradient replaces them
 * there and is copied to dlogits. The formulas are those of loss.c.
 */
#ifndef RAFTER_CROSS_ENTROPY_CPU_TILE_H
#define RAFTER_CROSS_ENTROPY_CPU_TILE_H

#include "ops/cross_entropy/cpu_u.h"
#include "ops/cross_entropy/kernels.h"
#include "simd/columns.h"
#include "simd/transpose.h"

enum {
    TILE = CROSS_ENTROPY_TILE,
    AHEAD = 8 /* prefetch distance in classes: processors themselves prefetch only within a page */
};

/* A number per row. */
struct lanes {
    _Alignas(64) float pivot[TILE], sum[TILE], target[TILE]; /* target: u_y */
    float logit_sum[TILE];                                   /* the sum of w u, if smoothing needs it */
    float moment[TILE];                                      /* of (u - pivot) e^(u - pivot), for the entropy */
    float log_sum[TILE];
    /* The gradient is p e^(u - pivot) - spread w, for the label p e^(u - pivot) - at_target; 0 unless active. */
    float p[TILE], spread[TILE], at_target[TILE];
    int32_t label[TILE], active[TILE];
};

/* ---- the buffer ------------------------------------------------------------------------------ */

/* Copies the rows of a tile to columns of the buffer: class c of row r goes to to[c * pitch + r]. */
V_INLINE void tile_load(int dtype, const struct cross_entropy_tiling *t, const struct cross_entropy_tile *tile,
                        float *to, int64_t pitch) {
    const int64_t bytes = v_bytes(dtype);
    if (t->interleaved) {
        v_rows_to_columns(dtype, tile->z[0], t->z_run, tile->runs, t->classes * t->run, to, tile->rows / t->run);
        return;
    }
    for (int64_t row = 0, run = 0; row < tile->rows; row += t->run, run++) {
        const int64_t rows = min64(tile->rows - row, t->run);
        const char *const z = tile->z[run];
        if (t->z_class == 1 && rows == tile->rows) { /* whole vectors are written */
            v_rows_to_columns(dtype, z, t->z_row, rows, t->classes, to + row, pitch);
            continue;
        }
        for (int64_t c = 0; c < t->classes; c++)
            for (int64_t r = 0; r < rows; r += V_LANES) {
                const char *const from = z + (c * t->z_class + r * t->z_row) * bytes;
                const int64_t count = min64(rows - r, V_LANES);
                char gathered[V_LANES * 4];
                const void *const adjacent = v_gather(dtype, from, t->z_row, count, gathered);
                v_store_part(RAFTER_F32, to + c * pitch + row + r, v_load_part(dtype, adjacent, count, 0.0f), count);
            }
    }
}

/* Turns logits in the buffer into u. slope: space for du/dz without the factor scale, or NULL. */
V_INLINE void tile_transform(int kind, const struct cross_entropy_tiling *t, float *u, float *slope, int64_t n) {
    const struct transform transform = transform_of(t->softcap, t->scale);
    for (int64_t i = 0; i < n; i += V_LANES) {
        vf s;
        v_store(RAFTER_F32, u + i, to_u(kind, v_load(RAFTER_F32, u + i), transform, &s));
        if (kind == CAPPED && slope)
            v_store(RAFTER_F32, slope + i, s);
    }
}

/* Turns the gradient with respect to u into that with respect to the logits. A 0 stays 0: the slope
 * of an ignored row may be NaN. */
static void tile_apply_slope(float *d, const float *slope, int64_t n) {
    for (int64_t i = 0; i < n; i += V_LANES) {
        const vf a = v_load(RAFTER_F32, d + i);
        v_store(RAFTER_F32, d + i, v_select(a == v_set(0.0f), a, a * v_load(RAFTER_F32, slope + i)));
    }
}

/* The first index of the largest logit of every row; NaN is larger than everything. */
static void tile_argmax(const struct cross_entropy_tiling *t, struct cross_entropy_tile *tile, const float *z,
                        int64_t pitch) {
    for (int64_t r = 0; r < tile->rows; r += V_LANES) {
        vf best = v_set(-INFINITY), index = (vf)(vi){0};
        vi nan = {0};
        for (int64_t c = 0; c < t->classes; c++) {
            const vf a = v_load(RAFTER_F32, z + c * pitch + r);
            const vi better = ((a > best) | (a != a)) & ~nan;
            best = v_select(better, a, best);
            index = v_select(better, (vf)((vi){0} + (int32_t)c), index);
            nan |= a != a;
        }
        v_store(RAFTER_F32, tile->argmax + r, index);
        for (int64_t i = r; i < min64(r + V_LANES, tile->rows); i++)
            tile->argmax[i] = tile->label[i] < 0 ? -1 : tile->argmax[i];
    }
}

V_INLINE void tile_store(int dtype, const struct cross_entropy_tiling *t, const struct cross_entropy_tile *tile,
                         const float *from, int64_t pitch) {
    const int64_t bytes = v_bytes(dtype);
    if (t->interleaved) {
        v_columns_to_rows(dtype, from, tile->rows / t->run, tile->runs, t->classes * t->run, tile->dz[0], t->dz_run);
        return;
    }
    for (int64_t row = 0, run = 0; row < tile->rows; row += t->run, run++) {
        const int64_t rows = min64(tile->rows - row, t->run);
        char *const dz = tile->dz[run];
        if (t->dz_class == 1 && rows == tile->rows) {
            v_columns_to_rows(dtype, from + row, pitch, rows, t->classes, dz, t->dz_row);
            continue;
        }
        for (int64_t c = 0; c < t->classes; c++)
            for (int64_t r = 0; r < rows; r += V_LANES) {
                char *const to = dz + (c * t->dz_class + r * t->dz_row) * bytes;
                const int64_t count = min64(rows - r, V_LANES);
                const vf a = v_load_part(RAFTER_F32, from + c * pitch + row + r, count, 0.0f);
                char narrowed[V_LANES * 4];
                v_store(dtype, narrowed, a);
                v_scatter(dtype, narrowed, to, t->dz_row, count);
            }
    }
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* The sum of w u of every row. A few classes at a time are summed in fp32, and these sums in fp64, so
 * that the error does not grow with the number of classes. */
V_INLINE void tile_weighted(int dtype, const struct cross_entropy_tiling *t, const char *z, int64_t pitch, int64_t rows,
                            struct lanes *l) {
    enum { SOME = 16 };
    for (int64_t r = 0; r < rows; r += V_LANES) {
        const int64_t count = min64(rows - r, V_LANES);
        vd low = v_set_d(0.0), high = low, low_part, high_part;
        for (int64_t c = 0; c < t->classes; c += SOME) {
            vf sum = v_set(0.0f);
            for (int64_t i = c; i < min64(c + SOME, t->classes); i++) {
                const vf u = v_load_lanes(dtype, z + i * pitch + r * v_bytes(dtype), count, 0.0f);
                sum += t->weight ? u * v_set(t->weight[i]) : u;
            }
            v_to_d(sum, &low_part, &high_part);
            low += low_part;
            high += high_part;
        }
        v_store_lanes(RAFTER_F32, l->logit_sum + r, v_from_d(low, high), count);
    }
}

/* The sums of (u - pivot) e^(u - pivot), as tile_weighted; 0 for u = -inf. */
static void tile_moments(const struct cross_entropy_tiling *t, const float *u, int64_t pitch, int64_t rows,
                         struct lanes *l) {
    enum { SOME = 16 };
    for (int64_t r = 0; r < rows; r += V_LANES) {
        vf pivot = v_load(RAFTER_F32, l->pivot + r);
        pivot = v_select(pivot == v_set(-INFINITY), v_set(0.0f), pivot);
        vd low = v_set_d(0.0), high = low, low_part, high_part;
        for (int64_t c = 0; c < t->classes; c += SOME) {
            vf sum = v_set(0.0f);
            for (int64_t i = c; i < min64(c + SOME, t->classes); i++) {
                const vf a = v_load(RAFTER_F32, u + i * pitch + r);
                sum = v_fma(v_max(v_set(-1e4f), a - pivot), v_exp_from(a, pivot), sum);
            }
            v_to_d(sum, &low_part, &high_part);
            low += low_part;
            high += high_part;
        }
        v_store(RAFTER_F32, l->moment + r, v_from_d(low, high));
    }
}

V_INLINE void tile_statistics(int dtype, const struct cross_entropy_tiling *t, const char *z, int64_t pitch,
                              int64_t rows, struct lanes *l) {
    v_column_statistics(dtype, z, pitch, rows, t->classes, l->label, l->target, l->pivot, l->sum);
    if (t->forward && t->smoothing != 0.0f)
        tile_weighted(dtype, t, z, pitch, rows, l);
    for (int64_t r = 0; r < rows; r += V_LANES) {
        const vf sum = v_load(RAFTER_F32, l->sum + r), pivot = v_load(RAFTER_F32, l->pivot + r);
        const vf finite = v_select(pivot == v_set(INFINITY), v_set(NAN), sum); /* +inf makes the sum NaN */
        const vf log = v_lse(v_set(0.0f), finite);
        v_store(RAFTER_F32, l->sum + r, finite);
        v_store(RAFTER_F32, l->log_sum + r, v_select(finite == v_set(0.0f), v_set(-INFINITY), log));
    }
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* As rafter_loss_write_row: lse, row_loss and logprob. Returns the sum of row_loss, always added in
 * the same order. */
static double tile_losses(const struct cross_entropy_tiling *t, struct cross_entropy_tile *tile,
                          const struct lanes *l) {
    enum { SUMS = 8 };
    const double s = (double)t->smoothing, share = s / (double)t->classes, weights = t->class_weight_sum;
    const double z_loss = (double)t->z_loss;
    double sum[SUMS] = {0};
    _Alignas(64) double values[TILE];
    for (int64_t r = 0; r < tile->rows; r++) {
        const bool active = tile->label[r] >= 0;
        const double max = (double)l->pivot[r], log_sum = (double)l->log_sum[r], lse = max + log_sum;
        double nll = (max - (double)l->target[r]) + log_sum;
        nll = nll < 0.0 ? 0.0 : nll;
        double value = (1.0 - s) * (double)tile->label_weight[r] * nll;
        if (s != 0.0)
            value += share * ((max * weights - (double)l->logit_sum[r]) + log_sum * weights);
        if (z_loss != 0.0)
            value += z_loss * lse * lse;
        value *= (double)tile->row_weight[r];
        values[r] = active ? value : 0.0;
        tile->row_loss[r] = (float)values[r];
        tile->lse[r] = active ? (float)lse : 0.0f;
        tile->logprob[r] = active ? (float)(0.0 - nll) : 0.0f;
        if (t->entropy) {
            const double entropy = log_sum - (double)l->moment[r] / (double)l->sum[r];
            tile->entropy[r] = !active ? 0.0f : entropy < 0.0 ? 0.0f : (float)entropy;
        }
    }
    int64_t r = 0;
    for (; r + SUMS <= tile->rows; r += SUMS)
        for (int k = 0; k < SUMS; k++)
            sum[k] += values[r + k];
    for (; r < tile->rows; r++)
        sum[0] += values[r];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* The numbers of half a vector of rows, in fp64, that the formulas of rafter_loss_gradient take. */
struct half_rows {
    vd dloss, row_weight, label_weight, sum, lse;
};

/* As rafter_loss_gradient, or rafter_loss_gradient_from_lse for rows whose given lse is accurate
 * enough. `statistics`: pivot, sum and log_sum are set. */
static void tile_coefficients(const struct cross_entropy_tiling *t, const struct cross_entropy_tile *tile,
                              bool statistics, struct lanes *l) {
    const double s = (double)t->smoothing, spread = s / (double)t->classes, weights = spread * t->class_weight_sum;
    const double factor = (double)t->scale / t->denominator, z_loss = 2.0 * (double)t->z_loss;
    const vd label_share = v_set_d(t->weight ? spread : 0.0), other_share = v_set_d(t->weight ? 0.0 : spread);
    const vf one = v_set(1.0f), none = v_set(0.0f), bound = v_set(t->lse_bound);
    for (int64_t r = 0; r < tile->rows; r += V_LANES) {
        const vf given = v_load(RAFTER_F32, tile->lse + r), size = (vf)((vi)given & 0x7fffffff);
        const vi from_lse = tile->given_lse ? size <= bound : (vi)none;
        const vf sum = v_select(from_lse, one, statistics ? v_load(RAFTER_F32, l->sum + r) : one);
        const vf log_sum = v_select(from_lse, none, statistics ? v_load(RAFTER_F32, l->log_sum + r) : none);
        const vf pivot = v_select(from_lse, given, statistics ? v_load(RAFTER_F32, l->pivot + r) : none);
        const vi label = (vi)v_load(RAFTER_F32, tile->label + r);
        struct half_rows half[2];
        vd pivots[2], logs[2], p[2], spreads[2], at_target[2];
        v_to_d(v_load(RAFTER_F32, tile->dloss + r), &half[0].dloss, &half[1].dloss);
        v_to_d(v_load(RAFTER_F32, tile->row_weight + r), &half[0].row_weight, &half[1].row_weight);
        v_to_d(v_load(RAFTER_F32, tile->label_weight + r), &half[0].label_weight, &half[1].label_weight);
        v_to_d(sum, &half[0].sum, &half[1].sum);
        v_to_d(pivot, &pivots[0], &pivots[1]);
        v_to_d(log_sum, &logs[0], &logs[1]);
        for (int k = 0; k < 2; k++) {
            const vd upstream = half[k].dloss * half[k].row_weight * v_set_d(factor);
            const vd target = v_set_d(1.0 - s) * half[k].label_weight;
            vd whole = target + v_set_d(weights);
            if (z_loss != 0.0)
                whole += v_set_d(z_loss) * (pivots[k] + logs[k]);
            p[k] = upstream * whole / half[k].sum;
            spreads[k] = upstream * v_set_d(spread);
            /* Smoothing weighs the label like every class: with its weight, or with 1. */
            at_target[k] = upstream * (target + label_share * half[k].label_weight + other_share);
        }
        v_store(RAFTER_F32, l->pivot + r, pivot);
        v_store(RAFTER_F32, l->p + r, v_from_d(p[0], p[1]));
        v_store(RAFTER_F32, l->spread + r, v_from_d(spreads[0], spreads[1]));
        v_store(RAFTER_F32, l->at_target + r, v_from_d(at_target[0], at_target[1]));
        v_store(RAFTER_F32, l->active + r, (vf)((label >= 0) & (sum != none)));
    }
}

/* ---- gradient -------------------------------------------------------------------------------- */

V_INLINE vf lane_gradient(vf z, const struct lanes *l, int64_t r, int64_t count, int32_t class, vf weight,
                          bool smoothing) {
    const vf e = v_exp_from(z, v_load_lanes(RAFTER_F32, l->pivot + r, count, 0.0f));
    const vi label = (vi)v_load_lanes(RAFTER_F32, l->label + r, count, 0.0f);
    const vf others = smoothing ? v_load_lanes(RAFTER_F32, l->spread + r, count, 0.0f) * weight : v_set(0.0f);
    const vf less = v_select(label == class, v_load_lanes(RAFTER_F32, l->at_target + r, count, 0.0f), others);
    const vf d = v_fma(e, v_load_lanes(RAFTER_F32, l->p + r, count, 0.0f), -less);
    return (vf)((vi)d & (vi)v_load_lanes(RAFTER_F32, l->active + r, count, 0.0f));
}

/* Pitches are in bytes. */
V_INLINE void tile_gradient(int dtype, bool stream, const struct cross_entropy_tiling *t, const char *z,
                            int64_t z_pitch, char *dz, int64_t dz_pitch, int64_t rows, const struct lanes *l) {
    const int64_t bytes = v_bytes(dtype);
    const bool smoothing = t->smoothing != 0.0f;
    for (int64_t c = 0; c < t->classes; c++, z += z_pitch, dz += dz_pitch) {
        const vf weight = v_set(t->weight ? t->weight[c] : 1.0f);
        int64_t r = 0;
        for (; r + V_UNIT <= rows; r += V_UNIT) {
            vf a, b;
            for (int64_t byte = r * bytes; byte < (r + V_UNIT) * bytes; byte += 64) {
                __builtin_prefetch(z + AHEAD * z_pitch + byte);
                if (!stream && dz != z)
                    __builtin_prefetch(dz + AHEAD * dz_pitch + byte, 1);
            }
            v_load_pair(dtype, z + r * bytes, &a, &b);
            a = lane_gradient(a, l, r, V_LANES, (int32_t)c, weight, smoothing);
            b = lane_gradient(b, l, r + V_LANES, V_LANES, (int32_t)c, weight, smoothing);
            if (stream)
                v_stream_pair(dtype, dz + r * bytes, a, b);
            else
                v_store_pair(dtype, dz + r * bytes, a, b);
        }
        for (; r < rows; r += V_LANES) {
            const int64_t count = min64(rows - r, V_LANES);
            const vf a = v_load_part(dtype, z + r * bytes, count, 0.0f);
            v_store_part(dtype, dz + r * bytes, lane_gradient(a, l, r, count, (int32_t)c, weight, smoothing), count);
        }
    }
}

/* ---- a tile ---------------------------------------------------------------------------------- */

/* Whether some row needs its statistics. In backward it does not if its lse is given and accurate enough. */
static bool tile_needs_statistics(const struct cross_entropy_tiling *t, const struct cross_entropy_tile *tile) {
    if (t->forward || !tile->given_lse)
        return true;
    int inaccurate = 0;
    for (int64_t r = 0; r < tile->rows; r++)
        inaccurate |= (tile->label[r] >= 0) & !(fabsf(tile->lse[r]) <= t->lse_bound);
    return inaccurate;
}

/* Computes a tile whose neighbouring rows are adjacent, in memory or in the buffer: logits in `dtype`
 * at z, pitches from class to class in bytes. */
V_INLINE double tile_of(int dtype, const struct cross_entropy_tiling *t, struct cross_entropy_tile *tile, const char *z,
                        int64_t z_pitch, char *dz, int64_t dz_pitch) {
    struct lanes *const l = (void *)((float *)rafter_kernel_memory() + CROSS_ENTROPY_TURNED); /* after the buffer */
    _Static_assert(CROSS_ENTROPY_TURNED * sizeof(float) + sizeof *l <= RAFTER_KERNEL_BYTES,
                   "raise RAFTER_KERNEL_BYTES");
    double sum = 0.0;
    const int64_t rows = tile->rows;
    const bool statistics = tile_needs_statistics(t, tile);
    memcpy(l->label, tile->label, (size_t)rows * sizeof *l->label);
    v_order_columns(dtype, rows, l->label);
    if (statistics)
        tile_statistics(dtype, t, z, z_pitch, rows, l);
    if (t->forward && t->entropy) /* in the buffer */
        tile_moments(t, (const float *)(const void *)z, z_pitch / 4, rows, l);
    if (t->forward)
        sum = tile_losses(t, tile, l);
    if (t->gradient) {
        tile_coefficients(t, tile, statistics, l);
        void *const ordered[] = {l->pivot, l->p, l->spread, l->at_target, l->active};
        for (size_t i = 0; i < sizeof ordered / sizeof *ordered; i++)
            v_order_columns(dtype, rows, ordered[i]);
        if (t->stream && t->direct && ((uintptr_t)dz | (uintptr_t)dz_pitch) % V_STREAM == 0)
            tile_gradient(dtype, true, t, z, z_pitch, dz, dz_pitch, rows, l);
        else
            tile_gradient(dtype, false, t, z, z_pitch, dz, dz_pitch, rows, l);
    }
    return sum;
}

/* Compiled once per dtype, for tiles in memory and in the buffer. */
V_FUNCTION(tile_of_any,
           (rafter_dtype any, const struct cross_entropy_tiling *t, struct cross_entropy_tile *tile, const char *z,
            int64_t z_pitch, char *dz, int64_t dz_pitch, double *sum),
           (any, t, tile, z, z_pitch, dz, dz_pitch, sum), any, (void)any;
           *sum = tile_of(dtype, t, tile, z, z_pitch, dz, dz_pitch))

V_INLINE double buffered_tile(int dtype, const struct cross_entropy_tiling *t, struct cross_entropy_tile *tile) {
    float *const buffer = rafter_kernel_memory();
    const int64_t pitch = round_up(tile->rows, V_LANES), n = t->classes * pitch;
    float *const slope = t->gradient && t->softcap != 0.0f ? buffer + n : NULL;
    tile_load(dtype, t, tile, buffer, pitch);
    if (t->forward && t->argmax)
        tile_argmax(t, tile, buffer, pitch);
    if (t->softcap != 0.0f)
        tile_transform(CAPPED, t, buffer, slope, n);
    else if (t->scale != 1.0f)
        tile_transform(SCALED, t, buffer, NULL, n);
    double sum;
    tile_of_any(RAFTER_F32, t, tile, (const char *)buffer, pitch * 4, (char *)buffer, pitch * 4, &sum);
    if (slope)
        tile_apply_slope(buffer, slope, n);
    if (t->gradient)
        tile_store(dtype, t, tile, buffer, pitch);
    return sum;
}

static double tile(const struct cross_entropy_tiling *t, struct cross_entropy_tile *rows) {
    double sum = 0.0;
    const int64_t bytes = rafter_dtype_bytes(t->dtype);
    if (t->direct)
        tile_of_any(t->dtype, t, rows, rows->z[0], t->z_class * bytes, rows->dz[0], t->dz_class * bytes, &sum);
    else
        V_FOR_DTYPE(t->dtype, dtype, sum = buffered_tile(dtype, t, rows));
    return sum;
}

#endif
