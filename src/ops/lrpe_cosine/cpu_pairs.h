/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic on pairs of vectors, in the order of v_load_pair. Per-column arrays (theta, sines and
 * cosines, statistics, sums of dtheta) are in that order too. */
#ifndef RAFTER_LRPE_COSINE_CPU_PAIRS_H
#define RAFTER_LRPE_COSINE_CPU_PAIRS_H

#include "simd/softmax.h"

enum { PAIR = 2 * V_LANES };

struct pair {
    vf a, b;
};

/* The next `count` elements, at most a whole pair; `fill`, 0 or infinite, past their end. */
V_INLINE struct pair load_part(int dtype, const char *p, int64_t count, float fill) {
    struct pair v;
    if (count < PAIR)
        v_load_pair_part(dtype, p, count, fill, &v.a, &v.b);
    else
        v_load_pair(dtype, p, &v.a, &v.b);
    return v;
}

V_INLINE void store_part(int dtype, char *p, struct pair v, int64_t count, bool stream) {
    if (count < PAIR)
        v_store_pair_part(dtype, p, v.a, v.b, count);
    else if (stream)
        v_stream_pair(dtype, p, v.a, v.b);
    else
        v_store_pair(dtype, p, v.a, v.b);
}

/* A pair of an fp32 array that is already in pair order: sines, statistics and the like. */
V_INLINE struct pair load_pair(const float *p) {
    return (struct pair){v_load(RAFTER_F32, p), v_load(RAFTER_F32, p + V_LANES)};
}

V_INLINE void store_pair(float *p, struct pair v) {
    v_store(RAFTER_F32, p, v.a);
    v_store(RAFTER_F32, p + V_LANES, v.b);
}

V_INLINE struct pair pair_set(float a) {
    return (struct pair){v_set(a), v_set(a)};
}

V_INLINE struct pair pair_mul(struct pair x, struct pair y) {
    return (struct pair){x.a * y.a, x.b * y.b};
}

V_INLINE struct pair pair_add(struct pair x, struct pair y) {
    return (struct pair){x.a + y.a, x.b + y.b};
}

V_INLINE struct pair pair_sub(struct pair x, struct pair y) {
    return (struct pair){x.a - y.a, x.b - y.b};
}

/* x * y + z */
V_INLINE struct pair pair_fma(struct pair x, struct pair y, struct pair z) {
    return (struct pair){v_fma(x.a, y.a, z.a), v_fma(x.b, y.b, z.b)};
}

V_INLINE struct pair pair_max(struct pair x, struct pair y) {
    return (struct pair){v_max(x.a, y.a), v_max(x.b, y.b)};
}

/* e^(x - pivot), see v_scaled_exp. */
V_INLINE struct pair pair_exp(struct pair x, struct pair pivot) {
    struct v_scaled_exp a = v_scaled_exp_of(0.0f, 1.0f), b = a;
    a.pivot = pivot.a;
    b.pivot = pivot.b;
    return (struct pair){v_scaled_exp(x.a, &a, v_set(0.0f)), v_scaled_exp(x.b, &b, v_set(0.0f))};
}

/* v_pivot, lane by lane. */
V_INLINE struct pair pair_pivot(struct pair max) {
    const vf none = v_set(-INFINITY), zero = v_set(0.0f);
    return (struct pair){v_select(max.a == none, zero, max.a), v_select(max.b == none, zero, max.b)};
}

/* The index of feature d in an array in pair order. */
static int64_t pair_order_index(int dtype, int64_t d) {
    const int64_t within = d % PAIR;
    return v_is_split(dtype) ? d - within + within % 2 * V_LANES + within / 2 : d;
}

#endif
