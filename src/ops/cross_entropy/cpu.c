#include "ops/cross_entropy/kernels.h"

#include "core/variants.h"
#include "simd/softmax.h"

enum { PIECE = CROSS_ENTROPY_PIECE };

/* How u comes from a logit: it is the logit, or a multiple of it, or that of a capped one. */
enum { PLAIN, SCALED, CAPPED };

static inline int kind_of(const struct cross_entropy_row *row) {
    return row->softcap != 0.0f ? CAPPED : row->scale != 1.0f ? SCALED : PLAIN;
}

V_INLINE vf to_u(int kind, vf z, const struct cross_entropy_row *row) {
    if (kind == CAPPED)
        z = v_set(row->softcap) * v_tanh(z / v_set(row->softcap));
    return kind == PLAIN ? z : v_set(row->scale) * z;
}

/* Up to V_LANES elements of the n that are left. */
V_INLINE vf load_some(int dtype, const void *p, int64_t n, float fill) {
    return n >= V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, n, fill);
}

/* ---- statistics ------------------------------------------------------------------------------------------------- */

V_INLINE void u_of_piece(int dtype, int kind, const struct cross_entropy_row *row, const char *z, int64_t n, float *u) {
    for (int64_t i = 0; i < n; i += V_LANES) {
        const vf a = to_u(kind, load_some(dtype, z + i * v_bytes(dtype), n - i, 0.0f), row);
        v_store_part(RAFTER_F32, u + i, a, n - i < V_LANES ? n - i : V_LANES);
    }
}

V_INLINE float weighted_sum(int dtype, const char *u, const float *weight, int64_t n) {
    vf sum[4] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)};
    for (int64_t i = 0, k = 0; i < n; i += V_LANES, k++) {
        const vf a = load_some(dtype, u + i * v_bytes(dtype), n - i, 0.0f);
        sum[k % 4] = weight ? v_fma(a, load_some(RAFTER_F32, weight + i, n - i, 0.0f), sum[k % 4]) : sum[k % 4] + a;
    }
    return v_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* Sum of (u - max) e^(u - max). */
V_INLINE float moment(int dtype, const char *u, int64_t n, float max) {
    const vf pivot = v_set(v_pivot(max));
    vf sum[2] = {v_set(0.0f), v_set(0.0f)};
    for (int64_t i = 0, k = 0; i < n; i += V_LANES, k++) {
        const vf a = load_some(dtype, u + i * v_bytes(dtype), n - i, -INFINITY);
        /* The exponential is 0 long before the bound, which keeps -inf out of the product. */
        sum[k % 2] = v_fma(v_max(v_set(-1e4f), a - pivot), v_exp_from(a, pivot), sum[k % 2]);
    }
    return v_sum(sum[0] + sum[1]);
}

/* The first index of the largest element; a NaN counts as larger than all. */
V_INLINE void best_of(int dtype, const char *z, int64_t n, float *best, int32_t *index) {
    vf top = v_set(-INFINITY);
    vi at, here;
    for (int lane = 0; lane < V_LANES; lane++)
        here[lane] = lane;
    at = here;
    for (int64_t i = 0; i < n; i += V_LANES, here += V_LANES) {
        const vf a = load_some(dtype, z + i * v_bytes(dtype), n - i, -INFINITY);
        const vi better = ~(a <= top) & (top == top);
        top = v_select(better, a, top);
        at = (vi)v_select(better, (vf)here, (vf)at);
    }
    *best = top[0];
    *index = at[0];
    for (int lane = 1; lane < V_LANES; lane++) {
        const bool larger = top[lane] > *best || (top[lane] != top[lane] && *best == *best);
        const bool same = top[lane] == *best || (top[lane] != top[lane] && *best != *best);
        if (larger || (same && at[lane] < *index)) {
            *best = top[lane];
            *index = at[lane];
        }
    }
}

V_INLINE void stats_of_u(int dtype, const struct cross_entropy_row *row, const char *u, int64_t first, int64_t n,
                         struct rafter_row_stats *stats) {
    const struct v_stats s = v_stats_row(dtype, u, n, (struct v_stats){-INFINITY, 0.0f});
    stats->max = (double)s.max;
    stats->sum = (double)s.sum;
    if (row->moment)
        stats->moment = (double)moment(dtype, u, n, s.max);
    if (row->weighted && row->weight) {
        float weight[PIECE];
        const char *from = row->weight + first * row->weight_stride * (int64_t)sizeof *weight;
        stats->weighted = (double)weighted_sum(dtype, u, v_gather(RAFTER_F32, from, row->weight_stride, n, weight), n);
    } else if (row->weighted) {
        stats->weighted = (double)weighted_sum(dtype, u, NULL, n);
    }
}

/* One copy for the buffers of all dtypes. */
static __attribute__((noinline)) void stats_of_buffer(const struct cross_entropy_row *row, const float *u,
                                                      int64_t first, int64_t n, struct rafter_row_stats *stats) {
    stats_of_u(RAFTER_F32, row, (const char *)u, first, n, stats);
}

V_INLINE void stats_of_dtype(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n,
                             struct rafter_row_stats *stats) {
    char gathered[PIECE * sizeof(float)];
    float u[PIECE];
    const int kind = kind_of(row);
    const char *z = v_gather(dtype, row->z + first * row->z_stride * v_bytes(dtype), row->z_stride, n, gathered);
    *stats = rafter_row_empty;
    if (row->label >= first && row->label - first < n) {
        const vf y = v_set(v_get(dtype, z + (row->label - first) * v_bytes(dtype)));
        stats->target = (double)(kind == PLAIN ? y : kind == SCALED ? to_u(SCALED, y, row) : to_u(CAPPED, y, row))[0];
    }
    if (row->argmax) {
        float best;
        int32_t index;
        best_of(dtype, z, n, &best, &index);
        stats->best = (double)best;
        stats->argmax = first + index;
    }
    if (kind == PLAIN) {
        stats_of_u(dtype, row, z, first, n, stats);
        return;
    }
    if (kind == SCALED)
        u_of_piece(dtype, SCALED, row, z, n, u);
    else
        u_of_piece(dtype, CAPPED, row, z, n, u);
    stats_of_buffer(row, u, first, n, stats);
}

static void stats(const struct cross_entropy_row *row, int64_t first, int64_t n, struct rafter_row_stats *out) {
    V_FOR_DTYPE(row->dtype, dtype, stats_of_dtype(dtype, row, first, n, out));
}

/* ---- gradient --------------------------------------------------------------------------------------------------- */

struct coefficients {
    const struct cross_entropy_row *row;
    struct v_curve p;
    vf spread;
};

/* 1 - tanh^2(x), without its cancellation. */
V_INLINE vf tanh_slope(vf x) {
    const vf magnitude = (vf)((vi)x & 0x7fffffff), q = v_exp(v_set(-2.0f) * magnitude), one_and_q = v_set(1.0f) + q;
    return v_set(4.0f) * q / (one_and_q * one_and_q);
}

/* Without the target's own term. */
V_INLINE vf gradient_of(int kind, vf z, vf spread, const struct coefficients *c) {
    const vf d = v_curve_at(to_u(kind, z, c->row), &c->p, -spread);
    return kind == CAPPED ? d * tanh_slope(z / v_set(c->row->softcap)) : d;
}

V_INLINE vf plain_gradient(const vf in[], const void *env) {
    const struct coefficients *c = env;
    return gradient_of(PLAIN, in[0], c->spread, c);
}

V_INLINE vf zero(const vf in[], const void *env) {
    (void)in, (void)env;
    return v_set(0.0f);
}

V_INLINE vf same(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

V_INLINE void gradient_of_piece(int dtype, int kind, const struct coefficients *c, const char *z, const float *weight,
                                int64_t n, char *out) {
    for (int64_t i = 0; i < n; i += V_LANES) {
        const vf spread = weight ? c->spread * load_some(RAFTER_F32, weight + i, n - i, 0.0f) : c->spread;
        const vf d = gradient_of(kind, load_some(dtype, z + i * v_bytes(dtype), n - i, 0.0f), spread, c);
        v_store_part(dtype, out + i * v_bytes(dtype), d, n - i < V_LANES ? n - i : V_LANES);
    }
}

/* The gradient at the target, in fp64: its terms nearly cancel where the model is sure and right. */
V_INLINE float target_gradient(int dtype, const struct cross_entropy_row *row, const struct rafter_row_gradient *g) {
    const int kind = kind_of(row);
    const vf z = v_set(v_get(dtype, row->z + row->label * row->z_stride * v_bytes(dtype)));
    const vf u = kind == PLAIN ? z : kind == SCALED ? to_u(SCALED, z, row) : to_u(CAPPED, z, row);
    float weight = 1.0f;
    if (row->weight)
        memcpy(&weight, row->weight + row->label * row->weight_stride * (int64_t)sizeof weight, sizeof weight);
    const double d = g->p * (double)v_exp_from(u, v_set(g->pivot))[0] - g->target - g->spread * (double)weight;
    return (float)(kind == CAPPED ? d * (double)tanh_slope(z / v_set(row->softcap))[0] : d);
}

/* At most PIECE columns, through buffers: any stride and any option. */
V_INLINE void buffered_gradient(int dtype, const struct cross_entropy_row *row, int64_t first, int64_t n,
                                const struct coefficients *c, float at_target) {
    char gathered[PIECE * sizeof(float)], out[PIECE * sizeof(float)];
    float weights[PIECE];
    const int kind = kind_of(row);
    const char *z = v_gather(dtype, row->z + first * row->z_stride * v_bytes(dtype), row->z_stride, n, gathered);
    const float *weight = NULL;
    if (row->weight)
        weight = v_gather(RAFTER_F32, row->weight + first * row->weight_stride * (int64_t)sizeof *weight,
                          row->weight_stride, n, weights);
    if (kind == PLAIN)
        gradient_of_piece(dtype, PLAIN, c, z, weight, n, out);
    else if (kind == SCALED)
        gradient_of_piece(dtype, SCALED, c, z, weight, n, out);
    else
        gradient_of_piece(dtype, CAPPED, c, z, weight, n, out);
    if (row->label >= first && row->label - first < n)
        v_put(dtype, out + (row->label - first) * v_bytes(dtype), at_target);
    char *dz = row->dz + first * row->dz_stride * v_bytes(dtype);
    if (row->dz_stride == 1)
        v_map(dtype, 1, (const void *const[]){out}, dz, n, row->stream, same, NULL);
    else
        v_scatter(dtype, out, dz, row->dz_stride, n);
}

/* Any number of columns that need no buffer. */
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
    /* A curve's scale does not show where its exponential is 0; a row that is NaN shall be so all over. */
    const float spread = g->p != g->p ? NAN : (float)g->spread;
    const struct coefficients c = {row, v_curve_of(g->pivot, (float)g->p), v_set(spread)};
    const int64_t end = first + n, bytes = v_bytes(dtype);
    const bool has_target = row->label >= first && row->label < end;
    const float at_target = has_target ? target_gradient(dtype, row, g) : 0.0f; /* before z is overwritten, if it is */
    if (cross_entropy_gradient_buffered(row)) {
        buffered_gradient(dtype, row, first, n, &c, at_target);
    } else if (!has_target || !row->stream) {
        direct_gradient(dtype, row, first, end, &c, row->dz + first * bytes, row->stream);
        if (has_target)
            v_put(dtype, row->dz + row->label * bytes, at_target);
    } else {
        /* The lines around the target are made apart: to patch them in memory would fetch back what was just streamed.
         */
        char lines[128];
        const int64_t width = (int64_t)sizeof lines / bytes;
        const int64_t into = (int64_t)((uintptr_t)(row->dz + row->label * bytes) % sizeof lines) / bytes;
        const int64_t from = row->label - first < into ? first : row->label - into;
        const int64_t to = end - row->label < width - into ? end : row->label - into + width;
        direct_gradient(dtype, row, first, from, &c, row->dz + first * bytes, true);
        direct_gradient(dtype, row, from, to, &c, lines, false);
        v_put(dtype, lines + (row->label - from) * bytes, at_target);
        v_map(dtype, 1, (const void *const[]){lines}, row->dz + from * bytes, to - from, true, same, NULL);
        direct_gradient(dtype, row, to, end, &c, row->dz + to * bytes, true);
    }
}

static void gradient(const struct cross_entropy_row *row, int64_t first, int64_t n,
                     const struct rafter_row_gradient *g) {
    V_FOR_DTYPE(row->dtype, dtype, gradient_of_dtype(dtype, row, first, n, g));
}

static void fence(void) {
    v_fence();
}

extern const struct cross_entropy_kernels RAFTER_KERNELS(cross_entropy);
const struct cross_entropy_kernels RAFTER_KERNELS(cross_entropy) = {stats, gradient, fence};
