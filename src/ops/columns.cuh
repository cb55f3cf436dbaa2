/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The columns of a row's logits on CUDA, for both losses: statistics that merge, and the gradient at a column. What
 * follows from a whole row's statistics is loss.cuh's.
 */
#ifndef RAFTER_OPS_COLUMNS_CUH
#define RAFTER_OPS_COLUMNS_CUH

#include "ops/loss.cuh"

/* What a kernel does for every column. PLAIN: the statistics of the softmax. SMOOTH: the sum of logits too, for the
 * loss. FULL: softcap, class weights under label smoothing, entropy, argmax, as the call says. Gradients are all the
 * same but for FULL. */
enum Options { PLAIN, SMOOTH, FULL };

/* ---- statistics ------------------------------------------------------------------------------ */

/* Of some columns, in units of v (see RowFigures). */
template <int OPTIONS> struct alignas(16) Gathered {
    RowStats s;
    float weighted; /* sum of w v; SMOOTH: of v */
};
template <> struct Gathered<PLAIN> { RowStats s; };
template <> struct alignas(16) Gathered<FULL> {
    RowStats s;
    float weighted;
    float z_label; /* the label's logit in the part that has it, 0 in the others */
    float moment;  /* sum of (v - max) e^(scale (v - max)) */
    float best;    /* the largest logit, or NaN, and its first column; -1: none yet */
    int64_t argmax;
};

template <int OPTIONS> DEVICE Gathered<OPTIONS> none() {
    Gathered<OPTIONS> g = {};
    g.s = no_elements();
    if constexpr (OPTIONS == FULL)
        g.argmax = -1;
    return g;
}

/* Makes `max`, of this and other columns, what the exponentials are relative to. */
template <int OPTIONS> DEVICE void rebase(Gathered<OPTIONS> &g, float max, float scale) {
    const float shift = g.s.max - pivot_at(max), shrink = expf(shift * scale);
    if constexpr (OPTIONS == FULL)
        g.moment = g.s.sum == 0.0f ? 0.0f : (g.moment + shift * g.s.sum) * shrink;
    g.s = {max, g.s.sum * shrink};
}

/* NaN counts as larger than all; of equals, the first column wins. */
DEVICE void keep_best(Gathered<FULL> &g, float best, int64_t argmax) {
    const bool larger = best > g.best || (best != best && g.best == g.best);
    const bool same = best == g.best || (best != best && g.best != g.best);
    if (argmax >= 0 && (g.argmax < 0 || larger || (same && argmax < g.argmax))) {
        g.best = best;
        g.argmax = argmax;
    }
}

template <int OPTIONS> DEVICE Gathered<OPTIONS> merge(Gathered<OPTIONS> a, Gathered<OPTIONS> b, float scale) {
    const float max = fmaxf(a.s.max, b.s.max);
    rebase(a, max, scale);
    rebase(b, max, scale);
    a.s.sum += b.s.sum;
    if constexpr (OPTIONS != PLAIN)
        a.weighted += b.weighted;
    if constexpr (OPTIONS == FULL) {
        a.z_label += b.z_label;
        a.moment += b.moment;
        keep_best(a, b.best, b.argmax);
    }
    return a;
}

template <int OPTIONS> DEVICE Gathered<OPTIONS> merge_warp(Gathered<OPTIONS> g, float scale) {
    rebase(g, warp_max(g.s.max), scale);
    g.s.sum = warp_sum(g.s.sum);
    if constexpr (OPTIONS != PLAIN)
        g.weighted = warp_sum(g.weighted);
    if constexpr (OPTIONS == FULL) {
        g.z_label = warp_sum(g.z_label);
        g.moment = warp_sum(g.moment);
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            keep_best(g, __shfl_xor_sync(~0u, g.best, step), __shfl_xor_sync(~0u, g.argmax, step));
    }
    return g;
}

/* Adds logits, of which column_of(k, j) says where they belong, or -1: those are -inf and count nowhere. The
 * exponentials are as good as rounding to T asks for. */
template <typename T, int COUNT, int N, typename F>
DEVICE void add_full(Gathered<FULL> &g, float (&v)[COUNT][N], F column_of, const Loss &loss) {
    float max = g.s.max;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int64_t column = column_of(k, j);
            if (column >= 0 && loss.argmax.data)
                keep_best(g, v[k][j], column);
            if (column >= 0 && loss.softcap != 0.0f)
                v[k][j] = capped(v[k][j], loss.softcap);
            if (column >= 0 && loss.weighted)
                g.weighted += static_cast<float>(loss.weight_of(column)) * v[k][j];
            max = fmaxf(max, v[k][j]);
        }
    rebase(g, max, loss.scale);
    const float pivot = pivot_at(max);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float d = v[k][j] - pivot, e = exp_term<T>(d, loss.scale);
            g.s.sum += e;
            g.moment = fmaf(fmaxf(d, -1e30f), e, g.moment); /* e is 0 long before the bound, which keeps -inf out */
        }
}

template <int OPTIONS> DEVICE RowFigures figures_of(const Gathered<OPTIONS> &g, float z, const Loss &loss) {
    RowFigures f = {};
    f.max = g.s.max;
    f.sum = g.s.max == INFINITY ? NAN : g.s.sum;
    f.target = loss.softcap != 0.0f ? capped(z, loss.softcap) : z;
    f.argmax = -1;
    if constexpr (OPTIONS != PLAIN)
        f.weighted = g.weighted;
    if constexpr (OPTIONS == FULL) {
        f.moment = g.moment;
        f.argmax = g.argmax;
    }
    return f;
}

/* ---- gradient -------------------------------------------------------------------------------- */

template <int OPTIONS, typename T> struct ColumnGradient {
    ScaledExp<T> exp;
    float spread;

    DEVICE ColumnGradient(const RowGradient &row, const Loss &loss)
        : exp(row.p, row.pivot, loss.scale), spread(row.spread) {
    }

    DEVICE float of(float z, int64_t column, const Loss &loss) const {
        if constexpr (OPTIONS != FULL) {
            return fmaf(exp.factor, exp.exp(z), -spread);
        } else {
            const float w = loss.weighted ? static_cast<float>(loss.weight_of(column)) : 1.0f;
            if (loss.softcap == 0.0f)
                return fmaf(exp.factor, exp.exp(z), -spread * w);
            return fmaf(exp.factor, exp.exp(capped(z, loss.softcap)), -spread * w) * cap_slope(z, loss.softcap);
        }
    }
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &pack, int64_t column, const Loss &loss) const {
        float z[N];
        unpack(pack, z);
#pragma unroll
        for (int j = 0; j < N; j++)
            z[j] = of(z[j], column + j, loss);
        return packed<T>(z);
    }
};

/* ---- sums over rows -------------------------------------------------------------------------- */

DEVICE double warp_sum(double a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a += __shfl_xor_sync(~0u, a, step);
    return a;
}

DEVICE int warp_sum(int a) {
    return __reduce_add_sync(~0u, a);
}

DEVICE double2 warp_sum(double2 a) {
    return make_double2(warp_sum(a.x), warp_sum(a.y));
}

DEVICE Totals warp_sum(const Totals &a) {
    return {warp_sum(a.loss), warp_sum(a.weight), warp_sum(a.counted)};
}

/* Of all threads of the block; every thread gets it. */
template <typename A> DEVICE A block_sum(A a) {
    __shared__ A of_warp[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    a = warp_sum(a);
    __syncthreads(); /* the last one's readers are done */
    if (lane == 0)
        of_warp[warp] = a;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? of_warp[lane] : A{});
}

/* f(row) for the rows that are not ignored, of every step-th in [first, end). Labels of several are asked for before
 * the first is looked at: left to itself, the compiler waits for each of them. */
template <typename Load, typename F>
DEVICE void for_counted_rows(Load load, int64_t first, int64_t end, int64_t step, int64_t ignore_index, F f) {
    constexpr int AT_ONCE = 8;
#pragma unroll 1
    for (int64_t row = first; row < end; row += AT_ONCE * step) {
        int64_t label[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            label[k] = row + k * step < end ? load(row + k * step) : ignore_index;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (label[k] != ignore_index)
                f(row + k * step);
    }
}
template <typename F> DEVICE void for_counted_rows(const Loss &loss, int64_t first, int64_t end, int64_t step, F f) {
    const auto with = [&](auto load) { for_counted_rows(load, first, end, step, loss.ignore_index, f); };
    if (loss.target.dims != 1 || loss.target.step != 1)
        with([&](int64_t row) { return loss.load_label(row); });
    else if (loss.target.dtype == RAFTER_I64)
        with([&](int64_t row) { return reinterpret_cast<const int64_t *>(loss.target.data)[row]; });
    else
        with([&](int64_t row) { return int64_t(reinterpret_cast<const int *>(loss.target.data)[row]); });
}
DEVICE int64_t count_labels(const Loss &loss, int64_t first, int64_t end, int64_t step) {
    int64_t counted = 0;
    for_counted_rows(loss, first, end, step, [&](int64_t) { counted++; });
    return counted;
}

/* One thread's share of the labels. */
DEVICE Totals count(const Loss &loss, int64_t first, int64_t step) {
    Totals totals = {};
    if (!loss.class_weight) {
        totals.weight = totals.counted = static_cast<double>(count_labels(loss, first, loss.rows, step));
        return totals;
    }
#pragma unroll 1
    for (int64_t row = first; row < loss.rows; row += step) {
        const int64_t label = loss.class_of(loss.load_label(row));
        totals.weight += label == IGNORED ? 0.0 : label >= 0 ? loss.weight_of(label) : 1.0;
        totals.counted += label == IGNORED ? 0.0 : 1.0;
    }
    return totals;
}

/* Of all labels, by one block: every thread gets it. For as many rows as an int can count. */
DEVICE Totals count_in_block(const Loss &loss) {
    if (loss.class_weight)
        return block_sum(count(loss, threadIdx.x, blockDim.x));
    const double counted = block_sum(static_cast<int>(count_labels(loss, threadIdx.x, loss.rows, blockDim.x)));
    return {0.0, counted, counted};
}

#endif
