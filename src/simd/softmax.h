/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax statistics of rows: the running maximum and the sum of exponentials relative to it, in
 * one pass over memory. Shared by every op that normalises. The statistics of two parts of a row
 * can be merged, so a row can be split over blocks, threads or ranks.
 */
#ifndef RAFTER_SIMD_SOFTMAX_H
#define RAFTER_SIMD_SOFTMAX_H

#include <math.h>

#include "simd/simd.h"

/* sum = sum of e^(x - max). An empty row has {-INFINITY, 0}. A NaN anywhere makes the sum NaN; the
 * maximum ignores it. */
struct v_stats {
    float max, sum;
};

/* The exp pivot, which is subtracted from x before the exponential: the maximum, or 0 for a row
 * that is all -inf, so that its exponentials are 0 and not NaN. */
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

/* The same lane by lane, with an error of 2e-8 and one rounding, for sums in [2^-100, 2^100]. An
 * infinite max is returned as it is; a NaN sum gives NaN. */
V_INLINE vf v_lse(vf max, vf sum) {
    /* sum = 2^k m with m in [sqrt(1/2), sqrt(2)). log m = f + f^2 p(f) with f = m - 1; p is a
     * minimax polynomial of absolute error 7e-9. */
    const vi k = (vi)((vu)sum - 0x3f3504f3u) >> 23;
    const vf f = (vf)((vu)sum - ((vu)k << 23)) - v_set(1.0f), whole = __builtin_convertvector(k, vf);
    vf p = v_fma(v_set(0.0873361751f), f, v_set(-0.144418672f));
    p = v_fma(p, f, v_set(0.149792865f));
    p = v_fma(p, f, v_set(-0.165523365f));
    p = v_fma(p, f, v_set(0.19953613f));
    p = v_fma(p, f, v_set(-0.250024915f));
    p = v_fma(p, f, v_set(0.333342254f));
    p = v_fma(p, f, v_set(-0.499999821f));
    const vf log_m = v_fma(f * f, p, f);
    /* k ln(2) is added in two parts. The first is exact; the rounding error of adding it to max
     * goes into the second. */
    const vf high = whole * v_set(0.693145751953125f), low = v_fma(whole, v_set(1.42860682030941723212e-6f), log_m);
    const vf rough = max + high, added = rough - max, lost = (max - (rough - added)) + (high - added);
    const vf magnitude = (vf)((vi)max & 0x7fffffff);
    return v_select(magnitude == v_set(INFINITY), max, rough + (lost + low)) + (sum - sum);
}

/* ---- sums of exponentials -------------------------------------------------------------------- */

/*
 * The terms of a sum are scaled by a power of two near the largest one: a term is e^x / 2^log2,
 * with log2 an integer. In steps of 1 / V_STEPS, x log2(e) - log2 = (k + r) / V_STEPS with k an
 * integer and |r| <= 1/2. k modulo V_STEPS selects a power of two from a table in registers; the
 * rest of k is added to the exponent bits; a short polynomial gives 2^(r / V_STEPS). Adding
 * `magic`, which is 1.5 * 2^23 - log2 * V_STEPS, rounds to k and leaves k in the low bits, so the
 * scaling costs nothing per term. Terms under 2^-125 count as 2^-125.
 *
 * Relative error of a term: 5.3e-8 from the polynomial (AVX2 2.5e-8, NEON and portable 9.2e-8)
 * and two roundings. The error of log2(e), |x| * 1.3e-8, is common to all terms and cancels when the sum is
 * divided by one of them.
 */
#if V_LANES == 16
enum { V_STEPS = 32, V_STEP_SHIFT = 18 };
#elif V_LANES == 8
enum { V_STEPS = 8, V_STEP_SHIFT = 20 };
#else
enum { V_STEPS = 1, V_STEP_SHIFT = 23 };
#endif

struct v_base {
    /* shift is subtracted from x first. low: the least x - shift; smaller ones count as it. magic: see above. */
    vf magic, low, shift;
    float pivot; /* the x whose term is 1; -INFINITY: all x so far were -inf */
    float limit; /* the largest x allowed: terms above it would overflow or lose accuracy */
    bool near;   /* shift is 0 */
};

/* The base for terms whose largest is about e^max. If max is far from zero, or without FMA, x log2(e)
 * rounds too coarsely: then the pivot is subtracted from every x first. Without FMA the pivot must
 * also be close to the largest x. */
V_INLINE struct v_base v_base_at(float max) {
    const float magic = 0x1.8p23f, ln2 = 0.69314718055994530942f, deepest = -125.0f * ln2;
#if V_FMA
    const float highest = 64.0f * ln2;
    if (max > -0x1p15f && max < 0x1p15f) {
        const float log2 = (float)(int)(max * V_LOG2E), pivot = log2 * ln2;
        return (struct v_base){
            v_set(magic - log2 * V_STEPS), v_set(pivot + deepest), v_set(0.0f), pivot, pivot + highest, true};
    }
#else
    const float highest = 2.0f * ln2;
#endif
    return (struct v_base){v_set(magic), v_set(deepest), v_set(v_pivot(max)), max, max + highest, false};
}

/* A base with one pivot per lane, for lanes that belong to different rows. The pivot is subtracted
 * from every x first. */
V_INLINE struct v_base v_base_per_lane(vf pivot) {
    struct v_base base = v_base_at(-INFINITY);
    base.shift = pivot;
    return base;
}

/* The bits of 2^(j / V_STEPS) minus j << V_STEP_SHIFT, where j = k modulo V_STEPS. Adding
 * k << V_STEP_SHIFT restores j << V_STEP_SHIFT and adds the rest of k to the exponent. */
V_INLINE vu v_step_bits(vf k) {
#if V_LANES == 16
    static const int32_t table[32] = {
        0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
        0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
        0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
        0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};
    return (vu)_mm512_permutex2var_epi32(_mm512_loadu_si512(table), (__m512i)k, _mm512_loadu_si512(table + 16));
#elif V_LANES == 8
    const __m256i table = _mm256_setr_epi32(0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a,
                                            0x3f7744fd, 0x3f7ac0c7);
    return (vu)_mm256_permutevar8x32_epi32(table, (__m256i)k);
#else
    (void)k;
    return (vu){0} + 0x3f800000u;
#endif
}

/* sum + e^(x - base.pivot). `near` is base.near as a compile-time constant. NaN stays NaN. */
V_INLINE vf v_add_exp(vf sum, vf x, const struct v_base *base, bool near) {
    const vf d = v_max_nan(base->low, near ? x : x - base->shift), scale = v_set(V_STEPS * V_LOG2E);
    const vf k = v_fma(d, scale, base->magic);
    const vf r = v_fma(d, scale, base->magic - k);
#if V_LANES == 16
    const vf p = v_fma(v_fma(v_set(0.0002345961839f), r, v_set(0.0216611661f)), r, v_set(1.0f));
#elif V_LANES == 8
    vf p = v_fma(v_set(0.0001083910611f), r, v_set(0.003754025558f));
    p = v_fma(p, r, v_set(0.08664340526f));
    p = v_fma(p, r, v_set(1.0f));
#else
    const vf p = v_poly5(r, 0.6931470037f, 0.2402224243f, 0.05550733581f, 0.009671512991f, 0.001326472731f);
#endif
    return v_fma(p, (vf)(v_step_bits(k) + ((vu)k << V_STEP_SHIFT)), sum);
}

/* A compensated (Kahan) sum: the rounding error of one addition is corrected in the next. */
struct v_kahan {
    vf sum, lost;
};

V_INLINE void v_kahan_add(struct v_kahan *total, vf a) {
    const vf more = a - total->lost, sum = total->sum + more;
    total->lost = (sum - total->sum) - more;
    total->sum = sum;
}

V_INLINE void v_kahan_scale(struct v_kahan *total, vf factor) {
    total->sum *= factor;
    total->lost *= factor;
}

/* e^(x - base.pivot) of one element. */
V_INLINE float v_term(float x, const struct v_base *base) {
    const vf zero = v_set(0.0f);
    return (base->near ? v_add_exp(zero, v_set(x), base, true) : v_add_exp(zero, v_set(x), base, false))[0];
}

/* ---- exponentials of a row ------------------------------------------------------------------- */

/*
 * add + scale * e^(x - pivot), where pivot and scale are the same for many x: the form of softmax
 * and of its gradients. x may exceed the pivot by at most 80. The exponential is computed in the
 * steps described above; the scale is folded into the coefficients of the polynomial, so it costs
 * nothing. Relative error of the exponential: 5.3e-8 from the polynomial (AVX2 2.5e-8, NEON and
 * portable 9.2e-8), three roundings, and |x - pivot| * 4.3e-8 (portable 1.6e-7). Exponentials under 2^-125
 * count as 0. NaN stays NaN, and +inf gives NaN.
 */
struct v_scaled_exp {
    vf pivot, scale, c1, c2, c3, c4, c5;
};

V_INLINE struct v_scaled_exp v_scaled_exp_of(float pivot, float scale) {
#if V_LANES == 16
    return (struct v_scaled_exp){
        v_set(pivot), v_set(scale), v_set(0.0216611661f * scale), v_set(0.0002345961839f * scale), v_set(0.0f),
        v_set(0.0f),  v_set(0.0f)};
#elif V_LANES == 8
    return (struct v_scaled_exp){v_set(pivot),
                                 v_set(scale),
                                 v_set(0.08664340526f * scale),
                                 v_set(0.003754025558f * scale),
                                 v_set(0.0001083910611f * scale),
                                 v_set(0.0f),
                                 v_set(0.0f)};
#else
    return (struct v_scaled_exp){v_set(pivot),
                                 v_set(scale),
                                 v_set(0.6931470037f * scale),
                                 v_set(0.2402224243f * scale),
                                 v_set(0.05550733581f * scale),
                                 v_set(0.009671512991f * scale),
                                 v_set(0.001326472731f * scale)};
#endif
}

V_INLINE vf v_scaled_exp(vf x, const struct v_scaled_exp *e, vf add) {
    const vf d = x - e->pivot, low = v_set(-125.0f * 0.69314718055994530942f), step = v_set(V_STEPS * V_LOG2E);
    const vf magic = v_set(0x1.8p23f);
#if V_LANES == 16
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)d, (__m512)low, _CMP_NLT_UQ);
    const vf k = v_fma(d, step, magic), r = v_fma(d, step, magic - k);
    const vf p = v_fma(v_fma(e->c2, r, e->c1), r, e->scale);
    const vf power = (vf)(v_step_bits(k) + ((vu)k << V_STEP_SHIFT));
    return (vf)_mm512_mask3_fmadd_ps((__m512)p, (__m512)power, (__m512)add, counts);
#else
    const vf bounded = v_max_nan(low, d);
    const vf k = v_fma(bounded, step, magic), r = v_fma(bounded, step, magic - k);
#if V_LANES == 8
    const vf p = v_fma(v_fma(v_fma(e->c3, r, e->c2), r, e->c1), r, e->scale);
#else
    const vf high = v_fma(v_fma(e->c5, r, e->c4), r, e->c3);
    const vf p = v_fma(v_fma(v_fma(high, r, e->c2), r, e->c1), r, e->scale);
#endif
    const vu power = (v_step_bits(k) + ((vu)k << V_STEP_SHIFT)) & (vu)(d > low);
    return v_fma(p, (vf)power, add);
#endif
}

/* ---- maxima ---------------------------------------------------------------------------------- */

/* The largest of n elements. NaN is ignored; the result is -INFINITY if nothing remains. */
V_INLINE float v_max_row(int dtype, const void *x, int64_t n) {
    const char *p = x;
    vf max = v_set(-INFINITY);
    for (; n >= V_LANES; n -= V_LANES, p += V_LANES * v_bytes(dtype))
        max = v_max(v_load(dtype, p), max);
    return v_hmax(n ? v_max(v_load_part(dtype, p, n, -INFINITY), max) : max);
}

/* Running maxima of pairs (see v_load_pair), lane by lane. With V_INT16, maxima of 16-bit
 * floats are computed on their bits, 2 V_LANES at a time: among encodings with the sign bit clear
 * the largest integer is the largest float; among the others the smallest unsigned integer is. A
 * NaN may hide a maximum; the result is then NaN. */
struct v_peak {
    vf value[2];
#if V_INT16
    v16 positive, negative;
#endif
};

V_INLINE struct v_peak v_peak_empty(void) {
    struct v_peak peak = {.value = {v_set(-INFINITY), v_set(-INFINITY)}};
#if V_INT16
    peak.positive = v_set_16(-0x8000), peak.negative = v_set_16(-1);
#endif
    return peak;
}

/* Adds the pair at p, which has been loaded into a and b. */
V_INLINE void v_peak_add(int dtype, struct v_peak *peak, const void *p, vf a, vf b) {
    (void)dtype, (void)p;
#if V_INT16
    if (dtype != RAFTER_F32) {
        const v16 bits = v_load_16(p);
        peak->positive = v_max_i16(peak->positive, bits);
        peak->negative = v_min_u16(peak->negative, bits);
        return;
    }
#endif
    peak->value[0] = v_max_nan(a, peak->value[0]);
    peak->value[1] = v_max_nan(b, peak->value[1]);
}

/* The maxima lane by lane, in the order of a pair. */
V_INLINE void v_peak_pair(int dtype, const struct v_peak *peak, vf *a, vf *b) {
    *a = peak->value[0];
    *b = peak->value[1];
    (void)dtype;
#if V_INT16
    if (dtype != RAFTER_F32) {
        const v16 bits = v_select_negative_16(peak->positive, peak->negative, peak->positive);
        v_load_pair(dtype, &bits, a, b);
    }
#endif
}

/* The largest of all lanes. */
V_INLINE float v_peak_value(int dtype, const struct v_peak *peak) {
    const float value = v_hmax(v_max_nan(peak->value[0], peak->value[1]));
    (void)dtype;
#if V_INT16
    if (dtype != RAFTER_F32) {
        const int16_t positive = v_fold_max_i16(peak->positive);
        const uint16_t bits = positive < 0 ? v_fold_min_u16(peak->negative) : (uint16_t)positive;
        const float top = v_get(dtype, &bits);
        return value > top ? value : top;
    }
#endif
    return value;
}

/* ---- statistics of a row --------------------------------------------------------------------- */

/* V_STATS_BLOCK elements are summed before their maximum is checked against the base. The first
 * base is guessed from the maximum of V_STATS_GUESS elements: without FMA, where the pivot must be
 * close to the largest x, from a whole block. */
#if V_FMA
enum { V_STATS_BLOCK = 1024, V_STATS_GUESS = V_LANES };
#else
enum { V_STATS_BLOCK = 1024, V_STATS_GUESS = V_STATS_BLOCK };
#endif

/* The sum of n terms. *top is the largest x; it may be NaN if any x is. */
V_INLINE vf v_sum_block(int dtype, const char *p, int64_t n, const struct v_base *base, bool near, float *top) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf s0 = v_set(0.0f), s1 = s0, s2 = s0, s3 = s0; /* four independent sums hide the latency of the adds */
    struct v_peak peak = v_peak_empty();
    for (; n >= 4 * V_LANES; n -= 4 * V_LANES, p += 4 * step) {
        vf a, b, c, d;
        v_load_pair(dtype, p, &a, &b);
        v_load_pair(dtype, p + 2 * step, &c, &d);
        v_peak_add(dtype, &peak, p, a, b);
        v_peak_add(dtype, &peak, p + 2 * step, c, d);
        s0 = v_add_exp(s0, a, base, near);
        s1 = v_add_exp(s1, b, base, near);
        s2 = v_add_exp(s2, c, base, near);
        s3 = v_add_exp(s3, d, base, near);
    }
    for (; n > 0; n -= V_LANES, p += step) {
        const vf a = v_load_part(dtype, p, n < V_LANES ? n : V_LANES, -INFINITY);
        peak.value[0] = v_max(a, peak.value[0]);
        s0 = v_add_exp(s0, a, base, near);
    }
    *top = v_peak_value(dtype, &peak);
    return (s0 + s1) + (s2 + s3);
}

/* Adds n contiguous elements to running statistics. */
V_INLINE struct v_stats v_stats_row(int dtype, const void *x, int64_t n, struct v_stats so_far) {
    if (n <= 0)
        return so_far;
    const char *p = x;
    float max = so_far.max;
    if (max == -INFINITY)
        max = v_max_row(dtype, p, n < V_STATS_GUESS ? n : V_STATS_GUESS);
    struct v_base base = v_base_at(max);
    struct v_kahan total = {v_set(0.0f), v_set(0.0f)};
    total.sum[0] = so_far.max == -INFINITY ? so_far.sum : so_far.sum * v_term(so_far.max, &base);
    while (n > 0) {
        const int64_t block = n < V_STATS_BLOCK ? n : V_STATS_BLOCK;
        vf sum;
        float top;
        for (;;) {
            sum = base.near ? v_sum_block(dtype, p, block, &base, true, &top)
                            : v_sum_block(dtype, p, block, &base, false, &top);
            if (top <= base.limit)
                break;
            /* An element is too large for this base, or a NaN hides the maximum. This is rare: the
             * limit is 44 above the pivot. */
            top = v_max_row(dtype, p, block);
            if (!(top > base.limit))
                break;
            const struct v_base higher = v_base_at(top);
            v_kahan_scale(&total, v_set(v_exp_from_scalar(base.pivot, higher.pivot)));
            base = higher;
        }
        v_kahan_add(&total, sum);
        max = top > max ? top : max;
        p += block * v_bytes(dtype);
        n -= block;
    }
    const float sum = v_sum(total.sum);
    /* If all x are -inf, the sum holds only terms of 2^-125 (or NaN). */
    return (struct v_stats){max, max > -INFINITY ? sum / v_term(max, &base) : sum == sum ? 0.0f : sum};
}

#endif
