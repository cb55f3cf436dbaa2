/* SPDX-License-Identifier: Apache-2.0 */
/* cross_entropy on the CPU: the kernels for some columns of one row, and for blocks of adjacent rows.
 * The kernel for tiles, many rows at once, is in cpu_tile.h. */
#include "ops/cross_entropy/kernels.h"

#include "core/kernel_memory.h"
#include "core/variants.h"
#include "ops/cross_entropy/cpu_tile.h"
#include "ops/cross_entropy/cpu_u.h"
#include "simd/softmax.h"

enum { PIECE = CROSS_ENTROPY_PIECE };

/* u of the target, and its slope. */
V_INLINE float target_u(int dtype, const struct cross_entropy_row *row, float *slope) {
    const vf z = v_set(v_get(dtype, row->z + row->label * row->z_stride * v_bytes(dtype)));
    const int kind = kind_of(row->softcap, row->scale);
    const struct transform t = transform_of(row->softcap, row->scale);
    vf s;
    const vf u = kind == PLAIN ? z : kind == SCALED ? to_u(SCALED, z, t, &s) : to_u(CAPPED, z, t, &s);
    *slope = kind == CAPPED ? s[0] : 1.0f;
    return u[0];
}

/* ---- statistics ------------------------------------------------------------------------------ */

V_INLINE void u_of_piece(int dtype, int kind, const struct cross_entropy_row *row, const char *z, int64_t n, float *u) {
    const struct transform t = transform_of(row->softcap, row->scale);
    vf slope;
    for (; n >= V_LANES; n -= V_LANES, z += V_LANES * v_bytes(dtype), u += V_LANES)
        v_store(RAFTER_F32, u, to_u(kind, v_load(dtype, z), t, &slope));
    if (n > 0)
        v_store_part(RAFTER_F32, u, to_u(kind, v_load_part(dtype, z, n, 0.0f), t, &slope), n);
}

/* Sum of w u (of u if weight is NULL). Blocks are summed in fp32, and these sums in fp64, so that the
 * error does not grow with n. */
V_INLINE double weighted_sum(int dtype, const char *u, const float *weight, int64_t n) {
    double total = 0.0;
    while (n > 0) {
        vf a, b, s0 = v_set(0.0f), s1 = s0;
        int64_t block = n < PIECE ? n : PIECE;
        n -= block;
        for (; block >= 2 * V_LANES; block -= 2 * V_LANES, u += 2 * V_LANES * v_bytes(dtype)) {
            if (weight) {
                a = v_load(dtype, u) * v_load(RAFTER_F32, weight);
                b = v_load(dtype, u + V_LANES * v_bytes(dtype)) * v_load(RAFTER_F32, weight + V_LANES);
                weight += 2 * V_LANES;
            } else {
                v_load_pair(dtype, u, &a, &b);
            }
            s0 += a, s1 += b;
        }
        while (block > 0) {
            const int64_t part = block < V_LANES ? block : V_LANES;
            a = v_load_part(dtype, u, part, 0.0f);
            s0 += weight ? a * v_load_part(RAFTER_F32, weight, part, 0.0f) : a;
            u += part * v_bytes(dtype), weight += weight ? part : 0, block -= part;
        }
        total += (double)v_sum(s0 + s1);
    }
    return total;
}

/* sum + (u - max) e^(u - max). The bound avoids -inf * 0 where u is -inf. */
V_INLINE vf add_moment(vf sum, vf u, const struct v_scaled_exp *e) {
    return v_fma(v_max(v_set(-1e4f), u - e->pivot), v_scaled_exp(u, e, v_set(0.0f)), sum);
}

/* Sum of (u - max) e^(u - max). */
V_INLINE double moment(int dtype, const char *u, int64_t n, float max) {
    const struct v_scaled_exp e = v_scaled_exp_of(v_pivot(max), 1.0f);
    vf a, b, s0 = v_set(0.0f), s1 = s0;
    for (; n >= 2 * V_LANES; n -= 2 * V_LANES, u += 2 * V_LANES * v_bytes(dtype)) {
        v_load_pair(dtype, u, &a, &b);
        s0 = add_moment(s0, a, &e);
        s1 = add_moment(s1, b, &e);
    }
    for (; n > 0; n -= V_LANES, u += V_LANES * v_bytes(dtype))
        s0 = add_moment(s0, v_load_part(dtype, u, n < V_LANES ? n : V_LANES, -INFINITY), &e);
    return (double)v_sum(s0 + s1);
}

/* The first index of `value`, or of a NaN if value is NaN. -1 if there is none. */
V_INLINE int64_t index_of(int dtype, const char *z, int64_t n, float value) {
    const vf wanted = v_set(value);
    const bool nan = value != value;
    for (int64_t i = 0; i < n; i += V_LANES) {
        const int64_t part = n - i < V_LANES ? n - i : V_LANES;
        const vf a = part == V_LANES ? v_load(dtype, z + i * v_bytes(dtype))
                                     : v_load_part(dtype, z + i * v_bytes(dtype), part, 0.0f);
        const unsigned lanes = part == V_LANES ? ~0u : (1u << part) - 1;
        const unsigned found = v_bits(nan ? a != a : a == wanted) & lanes;
        if (found)
            return i + __builtin_ctz(found);
    }
    return -1;
}

/* The largest logit and its first index. NaN is larger than everything. */
V_INLINE void best_of(int dtype, const char *z, int64_t first, int64_t n, bool may_be_nan,
                      struct rafter_row_stats *stats) {
    const int64_t nan = may_be_nan ? index_of(dtype, z, n, NAN) : -1;
    const float best = nan >= 0 ? NAN : v_max_row(dtype, z, n);
    stats->best = (double)best;
    stats->argmax = first + (nan >= 0 ? nan : index_of(dtype, z, n, best));
}

V_INLINE void stats_of_u(int dtype, const struct cross_entropy_row *row, const char *u, int64_t first, int64_t n,
                         struct rafter_row_stats *stats) {
    const struct v_stats s = v_stats_row(dtype, u, n, (struct v_stats){-INFINITY, 0.0f});
    stats->max = (double)s.max;
    stats->sum = (double)s.sum;
    if (row->moment)
        stats->moment = moment(dtype, u, n, s.max);
    if (row->logit_sum) {
        float gathered[PIECE];
        const float *weight = NULL;
        if (row->weight)
            weight = v_gather(RAFTER_F32, row->weight + first * row->weight_stride * (int64_t)sizeof *weight,
                              row->weight_stride, n, gathered);
        stats->logit_sum = weighted_sum(dtype, u, weight, n);
    }
}

/* Compiled once for all dtypes: the buffer is fp32. */
static __attribute__((noinline)) void stats_of_buffer(const struct cross_entropy_row *row, const float *u,
                                                      int64_t first, int64_t n, struct rafter_row_stats *stats) {
    stats_of_u(RAFTER_F32, row, (const char *)u, first, n, stats);
}

V_INLINE void stats_of_dtype(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n,
                             struct rafter_row_stats *stats) {
    struct {
        char gathered[PIECE * sizeof(float)];
        float u[PIECE];
    } *const buffer = rafter_kernel_memory();
    const int kind = kind_of(row->softcap, row->scale);
    const char *z =
        v_gather(dtype, row->z + first * row->z_stride * v_bytes(dtype), row->z_stride, n, buffer->gathered);
    *stats = rafter_row_empty;
    if (kind == PLAIN) {
        stats_of_u(dtype, row, z, first, n, stats);
    } else {
        if (kind == SCALED)
            u_of_piece(dtype, SCALED, row, z, n, buffer->u);
        else
            u_of_piece(dtype, CAPPED, row, z, n, buffer->u);
        stats_of_buffer(row, buffer->u, first, n, stats);
    }
    if (row->label >= first && row->label - first < n) {
        float slope;
        stats->target = (double)target_u(dtype, row, &slope);
    }
    if (row->argmax)
        best_of(dtype, z, first, n, stats->sum != stats->sum, stats);
}

V_FUNCTION(stats, (const struct cross_entropy_row *row, int64_t first, int64_t n, struct rafter_row_stats *out),
           (row, first, n, out), row->dtype, stats_of_dtype(dtype, row, first, n, out))

/* ---- gradient -------------------------------------------------------------------------------- */

struct coefficients {
    struct transform u;
    struct v_scaled_exp p;
    vf spread;
};

/* dz without the extra term of the target. */
V_INLINE vf gradient_of(int kind, vf z, vf spread, const struct coefficients *c) {
    vf slope;
    const vf u = to_u(kind, z, c->u, &slope), d = v_scaled_exp(u, &c->p, -spread);
    return kind == CAPPED ? d * slope : d;
}

V_INLINE vf plain_gradient(const vf in[], const void *env) {
    const struct coefficients *c = env;
    return gradient_of(PLAIN, in[0], c->spread, c);
}

V_INLINE vf zero(const vf in[], const void *env) {
    (void)in, (void)env;
    return v_set(0.0f);
}

V_INLINE vf identity(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

V_INLINE void gradient_of_piece(int dtype, int kind, const struct coefficients *c, const char *z, const float *weight,
                                int64_t n, char *out) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf a, b, spread_a = c->spread, spread_b = c->spread;
    for (; n >= 2 * V_LANES; n -= 2 * V_LANES, z += 2 * step, out += 2 * step) {
        if (weight) { /* weights are in the order of memory, so no pairs */
            a = v_load(dtype, z), spread_a = c->spread * v_load(RAFTER_F32, weight);
            b = v_load(dtype, z + step), spread_b = c->spread * v_load(RAFTER_F32, weight + V_LANES);
            weight += 2 * V_LANES;
        } else {
            v_load_pair(dtype, z, &a, &b);
        }
        a = gradient_of(kind, a, spread_a, c);
        b = gradient_of(kind, b, spread_b, c);
        if (weight)
            v_store2(dtype, out, a, b);
        else
            v_store_pair(dtype, out, a, b);
    }
    while (n > 0) {
        const int64_t part = n < V_LANES ? n : V_LANES;
        if (weight)
            spread_a = c->spread * v_load_part(RAFTER_F32, weight, part, 0.0f);
        v_store_part(dtype, out, gradient_of(kind, v_load_part(dtype, z, part, 0.0f), spread_a, c), part);
        n -= part, z += step, out += step, weight += weight ? part : 0;
    }
}

/* dz at the target, in fp64: its terms nearly cancel where the model is confident and right. */
V_INLINE float target_gradient(int dtype, const struct cross_entropy_row *row, const struct rafter_row_gradient *g) {
    float slope, weight = 1.0f;
    const float u = target_u(dtype, row, &slope);
    if (row->weight)
        memcpy(&weight, row->weight + row->label * row->weight_stride * (int64_t)sizeof weight, sizeof weight);
    const double d = g->p * (double)v_exp_from_scalar(u, g->pivot) - g->target - g->spread * (double)weight;
    return (float)(d * (double)slope);
}

/* At most PIECE columns, through buffers: for any stride and any option. */
V_INLINE void buffered_gradient(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n,
                                const struct coefficients *c, float at_target) {
    struct {
        char gathered[PIECE * sizeof(float)], made[PIECE * sizeof(float)];
        float weights[PIECE];
    } *const buffer = rafter_kernel_memory();
    _Static_assert(sizeof *buffer <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    const int kind = kind_of(row->softcap, row->scale);
    char *dz = row->dz + first * row->dz_stride * v_bytes(dtype),
         *out = row->dz_stride == 1 && !row->stream ? dz : buffer->made;
    const char *z =
        v_gather(dtype, row->z + first * row->z_stride * v_bytes(dtype), row->z_stride, n, buffer->gathered);
    const float *weight = NULL;
    if (row->weight)
        weight = v_gather(RAFTER_F32, row->weight + first * row->weight_stride * (int64_t)sizeof *weight,
                          row->weight_stride, n, buffer->weights);
    if (kind == PLAIN)
        gradient_of_piece(dtype, PLAIN, c, z, weight, n, out);
    else if (kind == SCALED)
        gradient_of_piece(dtype, SCALED, c, z, weight, n, out);
    else
        gradient_of_piece(dtype, CAPPED, c, z, weight, n, out);
    if (row->label >= first && row->label - first < n)
        v_put(dtype, out + (row->label - first) * v_bytes(dtype), at_target);
    if (row->dz_stride == 1 && row->stream)
        v_map(dtype, 1, (const void *const[]){buffer->made}, dz, n, true, identity, NULL);
    else if (row->dz_stride != 1)
        v_scatter(dtype, buffer->made, dz, row->dz_stride, n);
}

/* Any number of columns, without buffers. */
V_INLINE void direct_gradient(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t end,
                              const struct coefficients *c, char *dz, bool stream) {
    v_map(dtype, 1, (const void *const[]){row->z + first * v_bytes(dtype)}, dz, end - first, stream, plain_gradient, c);
}

V_INLINE void zero_gradient(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n) {
    char *dz = row->dz + first * row->dz_stride * v_bytes(dtype);
    if (row->dz_stride == 1)
        v_map(dtype, 0, NULL, dz, n, row->stream, zero, NULL);
    else
        for (int64_t i = 0; i < n; i++)
            memset(dz + i * row->dz_stride * v_bytes(dtype), 0, (size_t)v_bytes(dtype));
}

V_INLINE void gradient_of_dtype(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n,
                                const struct rafter_row_gradient *g) {
    if (g->zero) {
        zero_gradient(dtype, row, first, n);
        return;
    }
    /* A NaN p makes the whole row NaN by way of the spread: where the exponential is 0, a NaN factor of it
     * would have no effect. */
    const float spread = g->p != g->p ? NAN : (float)g->spread;
    const struct coefficients c = {transform_of(row->softcap, row->scale), v_scaled_exp_of(g->pivot, (float)g->p),
                                   v_set(spread)};
    const int64_t end = first + n, bytes = v_bytes(dtype);
    const bool has_target = row->label >= first && row->label < end;
    const float at_target = has_target ? target_gradient(dtype, row, g) : 0.0f; /* dz may overwrite z */
    if (cross_entropy_gradient_buffered(row)) {
        buffered_gradient(dtype, row, first, n, &c, at_target);
    } else if (!has_target || !row->stream) {
        direct_gradient(dtype, row, first, end, &c, row->dz + first * bytes, row->stream);
        if (has_target)
            v_put(dtype, row->dz + row->label * bytes, at_target);
    } else {
        /* The 128 bytes around the target are computed in a buffer and then streamed. Patching them
         * in memory would read back the cache lines that were just streamed. */
        char around[128];
        const int64_t width = (int64_t)sizeof around / bytes;
        const int64_t into = (int64_t)((uintptr_t)(row->dz + row->label * bytes) % sizeof around) / bytes;
        const int64_t from = row->label - first < into ? first : row->label - into;
        const int64_t to = end - row->label < width - into ? end : row->label - into + width;
        direct_gradient(dtype, row, first, from, &c, row->dz + first * bytes, true);
        direct_gradient(dtype, row, from, to, &c, around, false);
        v_put(dtype, around + (row->label - from) * bytes, at_target);
        v_map(dtype, 1, (const void *const[]){around}, row->dz + from * bytes, to - from, true, identity, NULL);
        direct_gradient(dtype, row, to, end, &c, row->dz + to * bytes, true);
    }
}

V_FUNCTION(gradient,
           (const struct cross_entropy_row *row, int64_t first, int64_t n, const struct rafter_row_gradient *g),
           (row, first, n, g), row->dtype, gradient_of_dtype(dtype, row, first, n, g))

/* ---- blocks of adjacent rows ----------------------------------------------------------------- */

static void load_block(rafter_dtype dtype, const char *z, int64_t class_stride, int64_t rows, int64_t n, float *to,
                       int64_t pitch) {
    v_rows_to_columns((int)dtype, z, class_stride, n, rows, to, pitch);
}

static void fetch_block(rafter_dtype dtype, const char *z, int64_t class_stride, int64_t rows, int64_t n) {
    const int64_t step = class_stride * rafter_dtype_bytes(dtype), wide = rows * rafter_dtype_bytes(dtype) - 1;
    const int64_t classes = step > 0 ? max64(64 / step, 1) : max64(n, 1); /* whose rows begin in one cache line */
    for (int64_t i = 0; i < n; i += classes) {
        __builtin_prefetch(z + i * step, 0, 2);
        if (((uintptr_t)(z + i * step) ^ (uintptr_t)(z + i * step + wide)) >> 6)
            __builtin_prefetch(z + i * step + wide, 0, 2);
    }
}

V_INLINE void store_rows(int dtype, const float *from, int64_t pitch, int64_t rows, int64_t n, char *dz,
                         int64_t row_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i += V_LANES)
            v_store_part(dtype, dz + (r * row_stride + i) * v_bytes(dtype), v_load(RAFTER_F32, from + r * pitch + i),
                         min64(n - i, V_LANES));
}

static void store_block(rafter_dtype any, const float *from, int64_t pitch, int64_t rows, int64_t n, char *dz,
                        int64_t row_stride, int64_t class_stride) {
    if (class_stride == 1)
        V_FOR_DTYPE(any, dtype, store_rows(dtype, from, pitch, rows, n, dz, row_stride))
    else
        v_columns_to_rows((int)any, from, pitch, n, rows, dz, class_stride);
}

static void fence(void) {
    v_fence();
}

extern const struct cross_entropy_kernels RAFTER_KERNELS(cross_entropy);
const struct cross_entropy_kernels RAFTER_KERNELS(cross_entropy) = {stats,       gradient,    tile, load_block,
                                                                    fetch_block, store_block, fence};
