/* SPDX-License-Identifier: Apache-2.0 */
/* What softmax_invariant, softmax_over_ranks, softmax_reread_columns and softmax_staged_rows share: rows in any layout,
 * whose elements go to threads by their index (cuda/indexed_rows.cuh). */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_INDEXED_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_INDEXED_CUH

#include "cuda/indexed_rows.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

template <typename T> struct IndexedArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    Walk walk; /* over rows */
    int64_t rows, n;
    int64_t step[TENSORS]; /* between the elements of a row */
    RowTeam team;
};

/* The arguments from a plan that has the members walk, n, step and team. */
template <typename T, class Plan> IndexedArgs<T> indexed_args(const act_call &call, const Plan &plan, int64_t rows) {
    return {reinterpret_cast<const T *>(call.in.data),
            reinterpret_cast<const T *>(call.dy.data),
            reinterpret_cast<T *>(call.out.data),
            plan.walk,
            rows,
            plan.n,
            {plan.step[IN], plan.step[DY], plan.step[OUT]},
            plan.team};
}

/* y of x, or dx of y and dy. */
template <typename T, bool FORWARD> struct ElementOf {
    float max, scale, dot;
    DEVICE float operator()(float in, float dy) const {
        return FORWARD ? exp_as<T>(in - max) * scale : in * (dy - dot);
    }
};

/* The sum of y dy over one thread's share of a row. */
template <typename T, bool ALIGNED>
DEVICE float dot_of_share(const IndexedRow<T, ALIGNED> &y, const IndexedRow<T, ALIGNED> &dy, int thread, int threads) {
    constexpr int N = WIDE<T>, COUNT = IN_FLIGHT / 2;
    float sum[2] = {};
    for (int64_t i = thread; i < y.packs(); i += COUNT * threads) {
        Pack<T, N> a[COUNT], b[COUNT];
        y.load(a, i, threads, 0.0f);
        dy.load(b, i, threads, 0.0f);
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float v[N], w[N];
            unpack(a[k], v);
            unpack(b[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j % 2] = fmaf(v[j], w[j], sum[j % 2]);
        }
    }
    for (int64_t e = y.packs() * N + thread; e < y.n; e += threads)
        sum[0] = fmaf(y.element(e), dy.element(e), sum[0]);
    return sum[0] + sum[1];
}

/* The sum over the threads of a row; every thread gets it. */
DEVICE float sum_team(const RowTeam &team, float sum) {
    __shared__ float warp_sums[WARP];
    sum = warp_sum(sum);
    if (team.is_warp())
        return sum;
    const int lane = threadIdx.x % WARP;
    if (lane == 0)
        warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    return warp_sum(lane < team.threads / WARP ? warp_sums[lane] : 0.0f);
}

/* The statistics of a row. Forward: the maximum and the sum of exponentials. Backward: the sum of y dy, in
 * `sum`. Every thread of the row gets them. */
template <bool FORWARD, typename T, bool ALIGNED>
DEVICE RowStats statistics_of(const RowTeam &team, const IndexedRow<T, ALIGNED> &in, const IndexedRow<T, ALIGNED> &dy) {
    if constexpr (FORWARD)
        return merge_team(team, indexed_stats(in, team.thread(), team.threads, 1.0f), 1.0f);
    else
        return {0.0f, sum_team(team, dot_of_share(in, dy, team.thread(), team.threads))};
}

template <typename T, bool FORWARD> DEVICE ElementOf<T, FORWARD> element_from(RowStats s) {
    if (!FORWARD)
        return {0.0f, 0.0f, s.sum};
    /* All -inf: 0 / 0. Some +inf: NaN too, as inf - inf would be. */
    return {pivot_at(s.max), s.max == INFINITY ? NAN : 1.0f / s.sum, 0.0f};
}

/* Writes the results of a row. A thread writes only elements that it reads: the output may be an input. */
template <typename T, bool FORWARD, bool ALIGNED>
DEVICE void write_row(const RowTeam &team, const ElementOf<T, FORWARD> &element_of, const IndexedRow<T, ALIGNED> &in,
                      const IndexedRow<T, ALIGNED> &dy, T *out, int64_t out_step) {
    constexpr int N = WIDE<T>, COUNT = IN_FLIGHT / (FORWARD ? 1 : 2);
    const int thread = team.thread(), threads = team.threads;
    const bool packs = in.step == 1 && out_step == 1 && aligned_alike<const T>(in.first, out) &&
                       (FORWARD || (dy.step == 1 && aligned_alike(dy.first, in.first)));
    if (!packs) {
        for (int64_t e = thread; e < in.n; e += threads)
            out[e * out_step] = from_float<T>(element_of(in.element(e), FORWARD ? 0.0f : dy.element(e)));
        return;
    }
    const AlignedSpan<const T> span(in.first, in.n);
    for (int64_t i = thread; i < span.packs; i += COUNT * threads) {
        Pack<T, N> a[COUNT], b[FORWARD ? 1 : COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (i + k * threads < span.packs) {
                a[k] = load_once<T, N>(span.body + (i + k * threads) * N);
                if constexpr (!FORWARD)
                    b[k] = load_once<T, N>(dy.first + span.head + (i + k * threads) * N);
            }
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (i + k * threads < span.packs) {
                float v[N], w[N] = {};
                unpack(a[k], v);
                if constexpr (!FORWARD)
                    unpack(b[k], w);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[j] = element_of(v[j], w[j]);
                store_once(out + span.head + (i + k * threads) * N, packed<T, N>(v));
            }
    }
    for (int e = thread; e < span.edges; e += threads) {
        const int64_t at = span.head + span.edge(e);
        out[at] = from_float<T>(element_of(in.element(at), FORWARD ? 0.0f : dy.element(at)));
    }
}

/* The tensors as [outer ..., dim]. */
struct RowViews : Views {
    explicit RowViews(const act_call &call) : Views(call) {
        if (ndim() == 0) /* a scalar is a row of one element */
            rafter_collapse(used, count, 0, 0);
        else
            rafter_move_dim_last(used, count, call.dim);
        rafter_collapse(used, count, 0, ndim() - 1);
    }
};

/* The rows of a call, in its plan. */
struct IndexedRows {
    Walk walk;
    int64_t rows, n, step[TENSORS]; /* see IndexedArgs */
    RowTeam team;

    void fill(const act_call &call, const RowViews &views) {
        const int dim = views.ndim() - 1;
        walk = walk_over(views.pointer, 0, dim);
        n = views.view[OUT].shape[dim];
        rows = call.out.numel / n;
        for (int t = 0; t < TENSORS; t++)
            step[t] = views.pointer[t] && n > 1 ? views.view[t].stride[dim] : 1;
    }
    int64_t row_bytes(const act_call &call) const {
        return n * rafter_dtype_bytes(call.out.dtype);
    }
};

} // namespace

#endif
