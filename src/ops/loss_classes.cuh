/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What cross_entropy and linear_cross_entropy compute per column (class) of a row of logits: statistics that can be
 * merged, and the gradient at a column. loss.cuh has the formulas for whole rows.
 */
#ifndef RAFTER_OPS_LOSS_CLASSES_CUH
#define RAFTER_OPS_LOSS_CLASSES_CUH

#include "ops/loss.cuh"

/* What a kernel computes per column, as a template argument.
 * PLAIN: softmax statistics. SMOOTH: also the sum of logits, for the loss with label smoothing.
 * FULL: softcap, class weights under label smoothing, entropy and its gradient, and argmax, each if the call wants it.
 * CAPPED: as SMOOTH, with a softcap; kernels without a CAPPED form use FULL.
 * Gradients do not distinguish SMOOTH from PLAIN. */
enum Options { PLAIN, SMOOTH, FULL, CAPPED };

/* ---- statistics ------------------------------------------------------------------------------ */

/* Statistics of some columns of a row, in terms of v: the logit, after the softcap if there is one. */
template <int OPTIONS> struct alignas(16) LossStats {
    RowStats s;
    float logit_sum; /* sum of v */
};
template <> struct LossStats<PLAIN> { RowStats s; };
template <> struct alignas(16) LossStats<CAPPED> {
    RowStats s;      /* if Loss::cap_bounds, exponentials are relative to 0, and s.max is 0 */
    float logit_sum; /* sum of v */
    float largest;   /* the largest logit, before the softcap */
};
template <> struct alignas(16) LossStats<FULL> {
    RowStats s;
    float logit_sum; /* sum of w v */
    float z_label;   /* the label's logit if it is one of these columns, else 0 */
    float moment;    /* sum of (v - max) e^(scale (v - max)) */
    float best;      /* the largest logit; NaN if there is one */
    int64_t argmax;  /* the first column that has it; -1: none yet */
};

template <int OPTIONS> DEVICE LossStats<OPTIONS> no_columns() {
    LossStats<OPTIONS> g = {};
    g.s = no_elements();
    if constexpr (OPTIONS == FULL)
        g.argmax = -1;
    if constexpr (OPTIONS == CAPPED)
        g.largest = -INFINITY;
    return g;
}

/* Makes the exponentials relative to `max`, the maximum of these and other columns. */
template <int OPTIONS> DEVICE void rebase(LossStats<OPTIONS> &g, float max, float scale) {
    const float shift = g.s.max - pivot_at(max), shrink = expf(shift * scale);
    if constexpr (OPTIONS == FULL)
        g.moment = g.s.sum == 0.0f ? 0.0f : (g.moment + shift * g.s.sum) * shrink;
    g.s = {max, g.s.sum * shrink};
}

/* NaN is larger than everything; among equals the first column wins. */
DEVICE void update_argmax(LossStats<FULL> &g, float best, int64_t argmax) {
    const bool larger = best > g.best || (best != best && g.best == g.best);
    const bool same = best == g.best || (best != best && g.best != g.best);
    if (argmax >= 0 && (g.argmax < 0 || larger || (same && argmax < g.argmax))) {
        g.best = best;
        g.argmax = argmax;
    }
}

template <int OPTIONS> DEVICE LossStats<OPTIONS> merge(LossStats<OPTIONS> a, LossStats<OPTIONS> b, float scale) {
    const float max = fmaxf(a.s.max, b.s.max);
    rebase(a, max, scale);
    rebase(b, max, scale);
    a.s.sum += b.s.sum;
    if constexpr (OPTIONS != PLAIN)
        a.logit_sum += b.logit_sum;
    if constexpr (OPTIONS == CAPPED)
        a.largest = fmaxf(a.largest, b.largest);
    if constexpr (OPTIONS == FULL) {
        a.z_label += b.z_label;
        a.moment += b.moment;
        update_argmax(a, b.best, b.argmax);
    }
    return a;
}

/* Merges groups of `lanes` adjacent lanes, a power of two; each lane gets its group's result. All
 * lanes of the warp take part. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> merge_lanes(LossStats<OPTIONS> g, int lanes, float scale) {
    float max = g.s.max;
    for (int step = lanes / 2; step > 0; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    rebase(g, max, scale);
    for (int step = lanes / 2; step > 0; step /= 2) {
        g.s.sum += __shfl_xor_sync(~0u, g.s.sum, step);
        if constexpr (OPTIONS != PLAIN)
            g.logit_sum += __shfl_xor_sync(~0u, g.logit_sum, step);
        if constexpr (OPTIONS == CAPPED)
            g.largest = fmaxf(g.largest, __shfl_xor_sync(~0u, g.largest, step));
        if constexpr (OPTIONS == FULL) {
            g.z_label += __shfl_xor_sync(~0u, g.z_label, step);
            g.moment += __shfl_xor_sync(~0u, g.moment, step);
            update_argmax(g, __shfl_xor_sync(~0u, g.best, step), __shfl_xor_sync(~0u, g.argmax, step));
        }
    }
    return g;
}

/* Loads statistics that another block has stored. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> load_stats(const LossStats<OPTIONS> *stored) {
    LossStats<OPTIONS> g;
    g.s = load_stats(&stored->s);
    if constexpr (OPTIONS != PLAIN)
        g.logit_sum = __ldcg(&stored->logit_sum);
    if constexpr (OPTIONS == CAPPED)
        g.largest = __ldcg(&stored->largest);
    if constexpr (OPTIONS == FULL) {
        g.z_label = __ldcg(&stored->z_label);
        g.moment = __ldcg(&stored->moment);
        g.best = __ldcg(&stored->best);
        g.argmax = __ldcg(reinterpret_cast<const long long *>(&stored->argmax));
    }
    return g;
}

/* merge_lanes for a whole warp. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> merge_warp(LossStats<OPTIONS> g, float scale) {
    rebase(g, warp_max(g.s.max), scale);
    g.s.sum = warp_sum(g.s.sum);
    if constexpr (OPTIONS != PLAIN)
        g.logit_sum = warp_sum(g.logit_sum);
    if constexpr (OPTIONS == CAPPED)
        g.largest = warp_max(g.largest);
    if constexpr (OPTIONS == FULL) {
        g.z_label = warp_sum(g.z_label);
        g.moment = warp_sum(g.moment);
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            update_argmax(g, __shfl_xor_sync(~0u, g.best, step), __shfl_xor_sync(~0u, g.argmax, step));
    }
    return g;
}

/* Merges a block of at most 32 whole warps; every thread gets the result. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> merge_block_for_all(LossStats<OPTIONS> g, float scale) {
    __shared__ LossStats<OPTIONS> warp_stats[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    g = merge_warp(g, scale);
    if (lane == 0)
        warp_stats[warp] = g;
    __syncthreads();
    return merge_warp(lane < blockDim.x / WARP ? warp_stats[lane] : no_columns<OPTIONS>(), scale);
}

/* Whether the entropy is wanted, or its gradient. */
DEVICE bool needs_moment(const Loss &loss) {
    return loss.entropy.data || loss.dentropy.data;
}

/* Adds the exponentials of v. `max`: the maximum of v, or close to it. */
template <typename T, int COUNT, int N>
DEVICE void add_exponentials(LossStats<FULL> &g, const float (&v)[COUNT][N], float max, const Loss &loss) {
    max = fmaxf(g.s.max, max);
    const float pivot = pivot_at(max), shift = g.s.max - pivot, shrink = exp_below(shift, loss.scale);
    float sum[4] = {g.s.sum * shrink}, moment[2] = {};
    g.moment = g.s.sum == 0.0f ? 0.0f : (g.moment + shift * g.s.sum) * shrink;
    if (needs_moment(loss)) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float d = v[k][j] - pivot, e = exp_below(d, loss.scale);
                sum[(k * N + j) % 4] += e;
                moment[(k * N + j) % 2] =
                    fmaf(fmaxf(d, -1e30f), e, moment[(k * N + j) % 2]); /* not -inf, which times 0 is NaN */
            }
        g.moment += moment[0] + moment[1];
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[(k * N + j) % 4] += exp_below(v[k][j] - pivot, loss.scale);
    }
    g.s = {max, (sum[0] + sum[1]) + (sum[2] + sum[3])};
}

/* Adds logits v. column_of(k, j): the column of v[k][j], or -1 if there is none; v[k][j] must be -inf then, and has no
 * effect. */
template <typename T, int COUNT, int N, typename F>
DEVICE void add_columns(LossStats<FULL> &g, float (&v)[COUNT][N], F column_of, const Loss &loss) {
    if (loss.argmax.data) {
        float top = v[0][0], all = 0.0f; /* all: NaN if any of them is */
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                top = fmaxf(top, v[k][j]);
                all = fmaf(v[k][j], 0.0f, all);
            }
        /* Rarely true: a thread's running maximum grows a logarithmic number of times. `all` is NaN not only for NaN
         * but also for infinities, which does no harm. */
        if (g.argmax < 0 || top >= g.best || all != all)
#pragma unroll
            for (int k = 0; k < COUNT; k++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (column_of(k, j) >= 0)
                        update_argmax(g, v[k][j], column_of(k, j));
    }
    if (loss.softcap != 0.0f)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++) /* a missing column must stay -inf: the softcap would make it finite */
                v[k][j] = column_of(k, j) >= 0 ? capped(v[k][j], loss) : -INFINITY;
    if (loss.smooths)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (column_of(k, j) >= 0)
                    g.logit_sum = fmaf(static_cast<float>(loss.column_weight(column_of(k, j))), v[k][j], g.logit_sum);
    float max = g.s.max;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int j = 0; j < N; j++)
            max = fmaxf(max, v[k][j]);
    add_exponentials<T>(g, v, max, loss);
}

/* ---- the same for packs of adjacent columns -------------------------------------------------- */

/* The largest |z|, NaN skipped. */
template <typename T, int N, int COUNT> DEVICE float largest_of(const Pack<T, N> (&packs)[COUNT]) {
    if constexpr (NARROW<T> && N % 2 == 0) {
        typedef typename Pair<T>::type P;
        P top = __habs2(reinterpret_cast<const P &>(packs[0]));
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j += 2)
                top = __hmax2(top, __habs2(reinterpret_cast<const P &>(packs[k].v[j])));
        return fmaxf(to_float(top.x), to_float(top.y));
    } else {
        float top = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                top = fmaxf(top, fabsf(to_float(packs[k].v[j])));
        return top;
    }
}

/* For Loss::cap_bounds: u log2(e) of packs of logits, the argument of exp2. The first `valid` packs are part of the
 * row; the others are full of -inf, and stay so. */
template <typename T, int N, int COUNT>
DEVICE void cap_to_bits(float (&bits)[COUNT][N], const Pack<T, N> (&packs)[COUNT], int valid, const Loss &loss) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        unpack(packs[k], bits[k]);
    if (is_near_zero(largest_of(packs), loss)) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                bits[k][j] = capped_bits_near(bits[k][j], loss);
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k < valid)
#pragma unroll
                for (int j = 0; j < N; j++)
                    bits[k][j] = capped_bits(bits[k][j], loss);
    }
}

/* Adds packs of logits under a softcap, of which the first `valid` are part of the row; the others are full of -inf.
 * add_bounded is for Loss::cap_bounds, where exponentials need no maximum; add_capped is for any call. */
template <typename T, int N, int COUNT>
DEVICE void add_bounded(LossStats<CAPPED> &g, const Pack<T, N> (&packs)[COUNT], int valid, const Loss &loss) {
    constexpr int TOGETHER = N >= 8 ? 1 : COUNT < 8 / N ? COUNT : 8 / N; /* packs that share a branch */
    static_assert(COUNT % TOGETHER == 0, "the last group would be short");
    float sum[4] = {g.s.sum}, all = 0.0f;
#pragma unroll
    for (int first = 0; first < COUNT; first += TOGETHER) {
        float bits[TOGETHER][N];
        cap_to_bits(bits, reinterpret_cast<const Pack<T, N>(&)[TOGETHER]>(packs[first]), valid - first, loss);
#pragma unroll
        for (int i = 0; i < TOGETHER * N; i++)
            sum[i % 4] += exp2_fast(bits[i / N][i % N]);
        if (loss.smooths)
#pragma unroll
            for (int i = 0; i < TOGETHER * N; i++)
                all += first + i / N < valid ? bits[i / N][i % N] : 0.0f;
    }
    g.s = {0.0f, (sum[0] + sum[1]) + (sum[2] + sum[3])};
    g.logit_sum = fmaf(loss.cap_per_bit, all, g.logit_sum);
    g.largest = fmaxf(g.largest, max_of_all(packs));
}
template <typename T, int N, int COUNT>
DEVICE void add_capped(LossStats<CAPPED> &g, const Pack<T, N> (&packs)[COUNT], int valid, const Loss &loss) {
    if (loss.cap_bounds)
        return add_bounded(g, packs, valid, loss);
    /* The softcap is monotonic, so this is about the maximum of v, which is good enough as a pivot. */
    const float max = fmaxf(g.s.max, capped(max_of_all(packs), loss)), pivot = pivot_at(max);
    float sum = g.s.sum * exp_below(g.s.max - pivot, loss.scale);
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int j = 0; j < N && k < valid; j++) {
            const float v = capped(to_float(packs[k].v[j]), loss);
            sum += exp_below(v - pivot, loss.scale);
            g.logit_sum += v;
        }
    g.s = {max, sum};
}

/* The largest element; NaN if there is one. */
template <typename T, int N, int COUNT> DEVICE float max_or_nan(const Pack<T, N> (&packs)[COUNT]) {
    float all;
    if constexpr (NARROW<T> && N % 2 == 0) {
        typedef typename Pair<T>::type P;
        P top = reinterpret_cast<const P &>(packs[0]);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j += 2)
                top = __hmax2_nan(top, reinterpret_cast<const P &>(packs[k].v[j]));
        all = max_or_nan(to_float(top.x), to_float(top.y));
    } else {
        all = to_float(packs[0].v[0]);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                all = max_or_nan(all, to_float(packs[k].v[j]));
    }
    return all;
}

/* The index of the first element, counted over all packs, that equals `top`. There is one. */
template <typename T, int N, int COUNT> DEVICE int first_equal(const Pack<T, N> (&packs)[COUNT], float top) {
    if constexpr (NARROW<T> && N % 2 == 0 && COUNT * N <= 32) {
        typedef typename Pair<T>::type P;
        const P both = {from_float<T>(top), from_float<T>(top)};
        unsigned found = 0; /* bit i: element 2 i; bit 16 + i: element 2 i + 1 */
#pragma unroll
        for (int i = 0; i < COUNT * N / 2; i++)
            found |= __heq2_mask(reinterpret_cast<const P &>(packs[2 * i / N].v[2 * i % N]), both) & (0x10001u << i);
        const int even = __ffs(found & 0xffffu), odd = __ffs(found >> 16); /* 0: none */
        return odd == 0 || (even != 0 && even <= odd) ? 2 * even - 2 : 2 * odd - 1;
    } else {
        int at = 0;
#pragma unroll
        for (int i = COUNT * N - 1; i >= 0; i--)
            at = to_float(packs[i / N].v[i % N]) == top ? i : at;
        return at;
    }
}
/* The index of the first NaN. There is one. */
template <typename T, int N, int COUNT> DEVICE int first_nan(const Pack<T, N> (&packs)[COUNT]) {
    int at = 0;
#pragma unroll
    for (int i = COUNT * N - 1; i >= 0; i--)
        at = to_float(packs[i / N].v[i % N]) != to_float(packs[i / N].v[i % N]) ? i : at;
    return at;
}

/* The class weights of a pack of columns that begins at `column`. The call must have class weights. */
template <int N> DEVICE void load_weights(float (&w)[N], int64_t column, const Loss &loss) {
    const float *const p = loss.class_weight + column * loss.class_stride;
    if (N % 4 == 0 && loss.wide_weights && column % 4 == 0) {
#pragma unroll
        for (int j = 0; j + 3 < N; j += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(p + j);
            w[j] = four.x;
            w[j + 1] = four.y;
            w[j + 2] = four.z;
            w[j + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            w[j] = p[j * loss.class_stride];
    }
}

/* The sum of w v over a pack; of v if the call has no class weights. */
template <int N> DEVICE float weighted_sum(const float (&v)[N], const float (&weights)[N], const Loss &loss) {
    float sum[2] = {};
    if (loss.class_weight) {
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j % 2] = fmaf(weights[j], v[j], sum[j % 2]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j % 2] += v[j];
    }
    return sum[0] + sum[1];
}
template <int N> DEVICE float weighted_sum(const float (&v)[N], int64_t column, const Loss &loss) {
    float weights[N];
    if (loss.class_weight)
        load_weights(weights, column, loss);
    return weighted_sum(v, weights, loss);
}

/* Adds packs that begin at columns `column`, column + step, ... Only the first `valid` of them, at
 * least one, are part of the row; the others are full of -inf. An option that the call does not use
 * costs one branch per call of this function, no instructions per element. */
template <typename T, int N, int COUNT>
DEVICE void add_full(LossStats<FULL> &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step,
                     const Loss &loss) {
    if (loss.argmax.data) {
        const float top = max_or_nan(packs);
        /* A thread's running maximum grows a logarithmic number of times. */
        if (g.argmax < 0 || !(top <= g.best) || (top == g.best && column < g.argmax)) {
            const int at = top == top ? first_equal(packs, top) : first_nan(packs);
            update_argmax(g, top, column + at / N * step + at % N);
        }
    }
    float v[COUNT][N], max = max_of_all(packs);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        unpack(packs[k], v[k]);
    if (loss.softcap != 0.0f) {
        max = capped(max, loss); /* monotonic: about the maximum of v, good enough as a pivot */
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k < valid)
                cap_all(v[k], loss);
    }
    if (loss.smooths)
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k < valid)
                g.logit_sum += weighted_sum(v[k], column + k * step, loss);
    add_exponentials<T>(g, v, max, loss);
}

/* g.s of a whole row, with exponentials relative to the largest v, also if cap_bounds. Then e^u of the largest logit is
 * computed exactly as it was for the sum, so that the quotient loses no digits. */
template <int OPTIONS> DEVICE RowStats relative_to_largest(const LossStats<OPTIONS> &g, const Loss &loss) {
    if constexpr (OPTIONS == CAPPED)
        if (loss.cap_bounds && g.s.sum != 0.0f)
            return {capped(g.largest, loss), g.s.sum / exp2_fast(capped_bits(g.largest, loss))};
    return g.s;
}

/* The statistics of a whole row. z: the label's logit. */
template <int OPTIONS> DEVICE WholeRowStats whole_row_stats(const LossStats<OPTIONS> &g, float z, const Loss &loss) {
    WholeRowStats f = {};
    const RowStats s = relative_to_largest(g, loss);
    f.max = s.max;
    f.sum = s.max == INFINITY ? NAN : s.sum;
    f.target = loss.softcap != 0.0f ? capped(z, loss) : z;
    f.argmax = -1;
    if constexpr (OPTIONS != PLAIN)
        f.logit_sum = g.logit_sum;
    if constexpr (OPTIONS == FULL) {
        f.moment = g.moment;
        f.argmax = g.argmax;
    }
    return f;
}

/* ---- gradient -------------------------------------------------------------------------------- */

/* The gradients of a row at all columns but the label's, to be rounded to T: see RowGradient. */
template <int OPTIONS, typename T> struct ColumnGradient {
    ScaledExp<T> exp;
    float spread, level, tilt;

    DEVICE ColumnGradient() {
    }
    DEVICE ColumnGradient(const RowGradient &row, const Loss &loss)
        : exp(row.p, row.pivot, loss.scale), spread(row.spread), level(row.level), tilt(row.tilt) {
    }

    /* The gradient at one column with logit z. */
    DEVICE float of(float z, int64_t column, const Loss &loss) const {
        if constexpr (OPTIONS < FULL) {
            return fmaf(exp.factor, exp.exp(z), -spread);
        } else {
            const bool weights = OPTIONS == FULL && loss.smooths && loss.class_weight;
            const float w = weights ? loss.class_weight[column * loss.class_stride] : 1.0f;
            const float v = loss.softcap == 0.0f ? z : capped(z, loss);
            float e = exp.exp(v);
            if (OPTIONS == FULL && loss.dentropy.data)
                e *= tilted(level, tilt, loss.scale * (v - exp.pivot));
            const float d = fmaf(exp.factor, e, -spread * w);
            return loss.softcap == 0.0f ? d : d * cap_slope(z, loss);
        }
    }
    /* The gradients of logits z, for CAPPED with Loss::cap_bounds. NEAR: all |z| < CAP_NEAR * softcap. */
    template <bool NEAR, int N> DEVICE Pack<T, N> of_bounded(float (&z)[N], const Loss &loss) const {
        const float unit = loss.cap_curve[0], per_unit = loss.inverse_cap * loss.cap_per_bit;
        const float rest = fmaf(-exp.pivot, unit, NARROW<T> ? exp.shift : 0.0f);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float bits = NEAR ? capped_bits_near(z[j], loss) : capped_bits(z[j], loss), tanh = bits * per_unit;
            const float slope = NEAR ? cap_slope_near(tanh) : cap_slope(z[j], tanh, loss);
            z[j] = fmaf(exp.factor, exp2_fast(bits + rest), -spread) * slope;
        }
        return packed<T>(z);
    }
    /* The gradients of a pack that begins at `column`. Branches once per pack: FULL on the options of the call, CAPPED
     * on how large the logits are. */
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &pack, int64_t column, const Loss &loss) const {
        float z[N];
        unpack(pack, z);
        if constexpr (OPTIONS == CAPPED) {
            if (loss.cap_bounds)
                return is_near_zero(largest_of(reinterpret_cast<const Pack<T, N>(&)[1]>(pack)), loss)
                           ? of_bounded<true>(z, loss)
                           : of_bounded<false>(z, loss);
        }
        if constexpr (OPTIONS != FULL) {
#pragma unroll
            for (int j = 0; j < N; j++)
                z[j] = of(z[j], column + j, loss);
            return packed<T>(z);
        }
        float slope[N], e[N];
        const bool caps = loss.softcap != 0.0f;
        if (caps)
            cap_all(z, slope, loss);
#pragma unroll
        for (int j = 0; j < N; j++)
            e[j] = exp.exp(z[j]);
        if (loss.dentropy.data)
#pragma unroll
            for (int j = 0; j < N; j++)
                e[j] *= tilted(level, tilt, loss.scale * (z[j] - exp.pivot));
        if (loss.smooths && loss.class_weight) {
            float w[N];
            load_weights(w, column, loss);
#pragma unroll
            for (int j = 0; j < N; j++)
                z[j] = fmaf(exp.factor, e[j], -spread * w[j]);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                z[j] = fmaf(exp.factor, e[j], -spread);
        }
        if (caps)
#pragma unroll
            for (int j = 0; j < N; j++)
                z[j] *= slope[j];
        return packed<T>(z);
    }
};

#endif
