/*
 * Softmax statistics of rows: the running maximum and the sum of exponentials relative to it, in one pass over memory.
 * Shared by every op that normalises. Two halves of a row merge into the whole, so that rows can be split over blocks,
 * threads or ranks.
 */
#ifndef RAFTER_SIMD_SOFTMAX_H
#define RAFTER_SIMD_SOFTMAX_H

#include <math.h>

#include "simd/simd.h"

/* sum = sum of e^(x - max); an empty row is {-INFINITY, 0}. A NaN anywhere makes the sum NaN; the maximum skips it. */
struct v_stats {
    float max, sum;
};

/* What to subtract from x before the exponential: the maximum, or 0 for a row of all -inf, whose exponentials are then 0. */
V_INLINE float v_pivot(float max) {
    return max == -INFINITY ? 0.0f : max;
}

/* e^(x - pivot). */
V_INLINE vf v_exp_from(vf x, vf pivot) {
    return v_exp2((x - pivot) * v_set(V_LOG2E));
}

V_INLINE float v_exp_from_scalar(float x, float pivot) {
    return v_exp_from(v_set(x), v_set(pivot))[0];
}

V_INLINE struct v_stats v_stats_merge(struct v_stats a, struct v_stats b) {
    const float max = a.max > b.max ? a.max : b.max, pivot = v_pivot(max);
    return (struct v_stats){max, a.sum * v_exp_from_scalar(a.max, pivot) + b.sum * v_exp_from_scalar(b.max, pivot)};
}

/* log(sum of e^x). */
V_INLINE float v_stats_lse(struct v_stats s) {
    return (float)((double)s.max + log((double)s.sum));
}

/* Elements that are scanned for their maximum and then, still in L1, exponentiated. */
enum { V_STATS_BLOCK = 1024 };

/* Folds n compact elements into running statistics. */
V_INLINE struct v_stats v_stats_row(int dtype, const void *x, int64_t n, struct v_stats so_far) {
    const char *p = x;
    const int64_t step = V_LANES * v_bytes(dtype);
    const vf low = v_set(-INFINITY);
    vf s0 = v_set(0.0f), s1 = s0, s2 = s0, s3 = s0; /* four sums: the adds of one would wait for each other */
    float max = so_far.max;
    while (n > 0) {
        const int64_t block = n < V_STATS_BLOCK ? n : V_STATS_BLOCK, whole = block / V_LANES, tail = block % V_LANES;
        const char *q = p;
        int64_t i = 0;
        vf m0 = low, m1 = low, m2 = low, m3 = low;
        for (; i + 4 <= whole; i += 4, q += 4 * step) {
            m0 = v_max(v_load(dtype, q), m0);
            m1 = v_max(v_load(dtype, q + step), m1);
            m2 = v_max(v_load(dtype, q + 2 * step), m2);
            m3 = v_max(v_load(dtype, q + 3 * step), m3);
        }
        for (; i < whole; i++, q += step)
            m0 = v_max(v_load(dtype, q), m0);
        if (tail)
            m1 = v_max(v_load_part(dtype, q, tail, -INFINITY), m1);
        const float block_max = v_hmax(v_max(v_max(m0, m1), v_max(m2, m3)));
        if (block_max > max) {
            const float shrink = v_exp_from_scalar(max, block_max);
            so_far.sum *= shrink;
            s0 *= v_set(shrink), s1 *= v_set(shrink), s2 *= v_set(shrink), s3 *= v_set(shrink);
            max = block_max;
        }
        const vf pivot = v_set(v_pivot(max));
        q = p;
        i = 0;
        for (; i + 4 <= whole; i += 4, q += 4 * step) {
            s0 += v_exp_from(v_load(dtype, q), pivot);
            s1 += v_exp_from(v_load(dtype, q + step), pivot);
            s2 += v_exp_from(v_load(dtype, q + 2 * step), pivot);
            s3 += v_exp_from(v_load(dtype, q + 3 * step), pivot);
        }
        for (; i < whole; i++, q += step)
            s0 += v_exp_from(v_load(dtype, q), pivot);
        if (tail)
            s1 += v_exp_from(v_load_part(dtype, q, tail, -INFINITY), pivot);
        p += block * v_bytes(dtype);
        n -= block;
    }
    return (struct v_stats){max, so_far.sum + v_sum((s0 + s1) + (s2 + s3))};
}

#endif
