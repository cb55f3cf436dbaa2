/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax in any layout, batch invariant (cuda/indexed_rows.cuh): a warp or a block per row, by the
 * length of rows alone. Rows that fit stay in registers; others are read a second time, usually from
 * L1 or L2. Of those, softmax_slabs takes the ones that are aligned packs.
 */
#include "cuda/indexed_rows.cuh"
#include "ops/act/cuda/problem.cuh"

namespace {

static_assert(KEPT_THREADS == INDEXED_THREADS, "");

template <typename T> struct IndexedArgs {
    const T *in, *dy; /* in: x (forward) or y (backward) */
    T *out;
    Walk walk; /* over rows */
    int64_t rows, n;
    int64_t step[TENSORS]; /* between the elements of a row */
    RowTeam team;
};

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

template <bool FORWARD, typename T, bool ALIGNED>
DEVICE ElementOf<T, FORWARD> statistics_of(const RowTeam &team, const IndexedRow<T, ALIGNED> &in,
                                           const IndexedRow<T, ALIGNED> &dy) {
    if constexpr (FORWARD) {
        const RowStats s = merge_team(team, indexed_stats(in, team.thread(), team.threads, 1.0f), 1.0f);
        /* All -inf: 0 / 0. Some +inf: NaN too, as inf - inf would be. */
        return {pivot_at(s.max), s.max == INFINITY ? NAN : 1.0f / s.sum, 0.0f};
    } else {
        return {0.0f, 0.0f, sum_team(team, dot_of_share(in, dy, team.thread(), team.threads))};
    }
}

/* Every element is read and written by the same thread: the output may be an input. */
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

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void indexed_rows(const __grid_constant__ IndexedArgs<T> a) {
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    const IndexedRow<T, ALIGNED> in = {a.in + at[IN], a.n, a.step[IN]},
                                 dy = {FORWARD ? in.first : a.dy + at[DY], a.n, a.step[DY]};
    const ElementOf<T, FORWARD> element_of = statistics_of<FORWARD>(a.team, in, dy);
    write_row(a.team, element_of, in, dy, a.out + at[OUT], a.step[OUT]);
}

/* Rows of whole, aligned packs in all tensors. */
template <typename T, bool FORWARD>
__global__ __launch_bounds__(INDEXED_THREADS, 3) void rows_in_registers(const __grid_constant__ IndexedArgs<T> a) {
    constexpr int N = WIDE<T>, COUNT = KEPT_PACKS<FORWARD>;
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    const int thread = a.team.thread(), threads = a.team.threads, packs = static_cast<int>(a.n / N);
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    Pack<T, N> x[COUNT], d[FORWARD ? 1 : COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const int i = thread + k * threads;
        x[k] = load_once_if<T, N>(i < packs, a.in + at[IN] + int64_t(i) * N, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            d[k] = load_once_if<T, N>(i < packs, a.dy + at[DY] + int64_t(i) * N, 0.0f);
    }
    ElementOf<T, FORWARD> element_of = {};
    if constexpr (FORWARD) {
        RowStats s = no_elements();
        add_packs(s, x, 1.0f);
        s = merge_team(a.team, s, 1.0f);
        element_of = {pivot_at(s.max), s.max == INFINITY ? NAN : 1.0f / s.sum, 0.0f};
    } else {
        float sum[2] = {};
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float v[N], w[N];
            unpack(x[k], v);
            unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j % 2] = fmaf(v[j], w[j], sum[j % 2]);
        }
        element_of = {0.0f, 0.0f, sum_team(a.team, sum[0] + sum[1])};
    }
    T *const out = a.out + at[OUT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N] = {};
        unpack(x[k], v);
        if constexpr (!FORWARD)
            unpack(d[k], w);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = element_of(v[j], w[j]);
        if (thread + k * threads < packs)
            store_once(out + int64_t(thread + k * threads) * N, packed<T, N>(v));
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

struct SoftmaxInvariant {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows, n, step[TENSORS];
        RowTeam team;
        bool aligned, in_registers;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return is_softmax(call) ? NULL : "kind is not softmax";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const RowViews views(call);
        const int dim = views.ndim() - 1;
        *plan = {};
        plan->walk = walk_over(views.pointer, 0, dim);
        plan->n = views.view[OUT].shape[dim];
        plan->rows = call.out.numel / plan->n;
        for (int t = 0; t < TENSORS; t++)
            plan->step[t] = views.pointer[t] && plan->n > 1 ? views.view[t].stride[dim] : 1;
        const int kept = is_forward(call) ? KEPT_PACKS<true> : KEPT_PACKS<false>;
        const int64_t row_bytes = plan->n * rafter_dtype_bytes(call.out.dtype);
        plan->team = RowTeam::of(row_bytes, kept);
        plan->aligned = rows_are_aligned(views.view[IN]) && (is_forward(call) || rows_are_aligned(views.view[DY]));
        plan->in_registers = views.wide() && row_bytes <= int64_t(16) * kept * plan->team.threads;
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const IndexedArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                     reinterpret_cast<const T *>(call.dy.data),
                                     reinterpret_cast<T *>(call.out.data),
                                     plan.walk,
                                     plan.rows,
                                     plan.n,
                                     {plan.step[IN], plan.step[DY], plan.step[OUT]},
                                     plan.team};
        ::launch(context, plan.team.blocks(plan.rows),
                 plan.in_registers ? rows_in_registers<T, FORWARD>
                 : plan.aligned    ? indexed_rows<T, FORWARD, true>
                                   : indexed_rows<T, FORWARD, false>,
                 args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            is_forward(call) ? launch_as<T, true>(context, call, plan) : launch_as<T, false>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_invariant, SoftmaxInvariant)
