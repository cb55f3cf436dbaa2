/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a dim that is spread over ranks, in any layout. One kernel computes the statistics of this
 * rank's part of every line: the maximum and the sum of exponentials, or the sum of y dy. The ranks gather
 * the statistics of all ranks, 8 bytes per line and rank. The second kernel merges them, in rank order,
 * reads this rank's part again and writes the results. A warp or a block takes a line; or, if the elements
 * of a line are not adjacent but those of neighbouring lines are, a lane takes a line, and the warps of a
 * block share its elements.
 */
#include "ops/act/cuda/softmax_indexed.cuh"
#include "ops/line_group.cuh"

namespace {

typedef LineExchange<RowStats> Exchange;

/* This rank's part of a line: what a team of threads reads and writes. It may have no elements. */
template <typename T, bool FORWARD, bool ALIGNED> struct OwnRow {
    IndexedRow<T, ALIGNED> in, dy;
    T *out;

    DEVICE OwnRow(const IndexedArgs<T> &a, int64_t row) {
        int64_t at[TENSORS];
        a.walk.offsets(row, at);
        in = {a.in + at[IN], a.n, a.step[IN]};
        dy = {FORWARD ? in.first : a.dy + at[DY], a.n, a.step[DY]};
        out = a.out + at[OUT];
    }
};

template <bool FORWARD> DEVICE RowStats merged(RowStats a, RowStats b) {
    return FORWARD ? merge(a, b, 1.0f) : RowStats{0.0f, a.sum + b.sum};
}

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void rank_statistics(const __grid_constant__ IndexedArgs<T> a,
                                                                      const __grid_constant__ Exchange exchange) {
    wait_for_inputs();
    const int64_t line = a.team.row();
    if (line >= a.rows)
        return;
    const OwnRow<T, FORWARD, ALIGNED> row(a, line);
    const RowStats s = statistics_of<FORWARD>(a.team, row.in, row.dy);
    if (a.team.thread() != 0)
        return;
    exchange.own[line] = s;
    if (line == 0)
        exchange.put_hash();
}

/* The statistics of a line over all ranks. The sum is NaN if the ranks made different calls. */
template <bool FORWARD> DEVICE RowStats over_ranks(const Exchange &exchange, int64_t line) {
    RowStats s = FORWARD ? no_elements() : RowStats{0.0f, 0.0f};
    for (int rank = 0; rank < exchange.ranks; rank++)
        s = merged<FORWARD>(s, exchange.of(rank, line));
    if (!exchange.agree())
        s.sum = NAN;
    return s;
}

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void rank_results(const __grid_constant__ IndexedArgs<T> a,
                                                                   const __grid_constant__ Exchange exchange) {
    wait_for_inputs();
    const int64_t line = a.team.row();
    if (line >= a.rows)
        return;
    const OwnRow<T, FORWARD, ALIGNED> row(a, line);
    const RowStats s = over_ranks<FORWARD>(exchange, line);
    write_row(a.team, element_from<T, FORWARD>(s), row.in, row.dy, row.out, a.step[OUT]);
}

/* ---- a lane per line ------------------------------------------------------------------------- */

constexpr int MOST_WARPS = 32, AT_ONCE = 8; /* warps of a block; elements that a lane loads at a time */

/* The statistics of every `warps`-th element of a line, from `first` on. */
template <typename T, bool FORWARD>
DEVICE RowStats column_share(const OwnRow<T, FORWARD, false> &line, int first, int warps) {
    RowStats s = FORWARD ? no_elements() : RowStats{0.0f, 0.0f};
    for (int64_t from = first; from < line.in.n; from += warps * AT_ONCE) {
        Pack<T, 1> x[AT_ONCE], d[FORWARD ? 1 : AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t e = from + k * warps;
            x[k] = load_once_if<T, 1>(e < line.in.n, line.in.first + e * line.in.step, FORWARD ? -INFINITY : 0.0f);
            if constexpr (!FORWARD)
                d[k] = load_once_if<T, 1>(e < line.in.n, line.dy.first + e * line.dy.step, 0.0f);
        }
        if constexpr (FORWARD)
            add_packs(s, x, 1.0f);
        else
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                s.sum = fmaf(to_float(x[k].v[0]), to_float(d[k].v[0]), s.sum);
    }
    return s;
}

template <typename T, bool FORWARD>
__global__ __launch_bounds__(MOST_WARPS *WARP) void column_statistics(const __grid_constant__ IndexedArgs<T> a,
                                                                      const __grid_constant__ Exchange exchange) {
    wait_for_inputs();
    __shared__ RowStats shares[MOST_WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int64_t line = blockIdx.x * int64_t(WARP) + lane;
    if (line < a.rows)
        shares[warp][lane] = column_share<T, FORWARD>(OwnRow<T, FORWARD, false>(a, line), warp, warps);
    __syncthreads();
    if (warp > 0 || line >= a.rows)
        return;
    RowStats s = shares[0][lane];
    for (int other = 1; other < warps; other++)
        s = merged<FORWARD>(s, shares[other][lane]);
    exchange.own[line] = s;
    if (line == 0)
        exchange.put_hash();
}

template <typename T, bool FORWARD>
__global__ __launch_bounds__(MOST_WARPS *WARP) void column_results(const __grid_constant__ IndexedArgs<T> a,
                                                                   const __grid_constant__ Exchange exchange) {
    wait_for_inputs();
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int64_t line = blockIdx.x * int64_t(WARP) + threadIdx.x % WARP;
    if (line >= a.rows)
        return;
    const OwnRow<T, FORWARD, false> row(a, line);
    const ElementOf<T, FORWARD> element_of = element_from<T, FORWARD>(over_ranks<FORWARD>(exchange, line));
#pragma unroll 4
    for (int64_t e = warp; e < a.n; e += warps)
        row.out[e * a.step[OUT]] = from_float<T>(element_of(row.in.element(e), FORWARD ? 0.0f : row.dy.element(e)));
}

/* ---- host side ------------------------------------------------------------------------------- */

struct SoftmaxOverRanks {
    typedef act_call Call;
    static constexpr bool SHARES_CLASSES = true, BATCH_INVARIANT = true;
    struct Plan {
        Walk walk; /* over lines, in the order of the call's dimensions: the same in all ranks */
        int64_t lines, n, step[TENSORS];
        RowTeam team;
        bool aligned, columns; /* columns: a lane per line */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return call.group.ranks > 0 ? NULL : "dim is not spread over ranks";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        *plan = {};
        plan->lines = 1;
        for (int d = 0; d < call.out.ndim; d++)
            plan->lines *= d == call.dim ? 1 : call.out.shape[d];
        plan->n = call.out.ndim > 0 ? call.out.shape[call.dim] : 1;
        for (int64_t &step : plan->step)
            step = 1;
        plan->walk.size[0] = 1;
        if (call.out.numel > 0) {
            const RowViews views(call);
            const int dim = views.ndim() - 1;
            plan->walk = walk_over(views.pointer, 0, dim);
            for (int t = 0; t < TENSORS && plan->n > 1; t++)
                plan->step[t] = views.pointer[t] ? views.view[t].stride[dim] : 1;
            plan->aligned = rows_are_aligned(views.view[IN]) && (is_forward(call) || rows_are_aligned(views.view[DY]));
            plan->columns = plan->step[IN] != 1 && dim > 0 && views.view[IN].stride[dim - 1] == 1 &&
                            !call.common.batch_invariant; /* a line without neighbours would be summed otherwise */
        }
        plan->team = RowTeam::of(plan->n * rafter_dtype_bytes(call.out.dtype), IN_FLIGHT);
        return Exchange::workspace(plan->lines, call.group.ranks);
    }

    template <typename T, bool FORWARD, bool ALIGNED>
    static rafter_status launch_as(rafter_context *context, const Call &call, const Plan &plan,
                                   const Exchange &exchange) {
        const IndexedArgs<T> args = indexed_args<T>(call, plan, plan.lines);
        const int warps = power_at_least(ceil_div<int64_t>(plan.n, 2 * AT_ONCE), 1, MOST_WARPS);
        const Launch how =
            plan.columns ? Launch{ceil_div<int64_t>(plan.lines, WARP), warps * WARP} : plan.team.blocks(plan.lines);
        ::launch(context, how, plan.columns ? column_statistics<T, FORWARD> : rank_statistics<T, FORWARD, ALIGNED>,
                 args, exchange);
        RAFTER_TRY(rafter_group_gather(context, "group", &call.group, exchange.own,
                                       const_cast<RowStats *>(exchange.all), exchange.bytes_sent()));
        ::launch(context, how, plan.columns ? column_results<T, FORWARD> : rank_results<T, FORWARD, ALIGNED>, args,
                 exchange);
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        if (plan.lines == 0)
            return RAFTER_OK;
        RowStats *const own = reinterpret_cast<RowStats *>(workspace);
        const Exchange exchange =
            line_exchange<RowStats>(context, call.group, plan.lines, own, own + plan.lines + 1,
                                    {RAFTER_OP_INDEX_act, call.common.direction, call.out.dtype, plan.lines});
        return for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (is_forward(call))
                return plan.aligned ? launch_as<T, true, true>(context, call, plan, exchange)
                                    : launch_as<T, true, false>(context, call, plan, exchange);
            return plan.aligned ? launch_as<T, false, true>(context, call, plan, exchange)
                                : launch_as<T, false, false>(context, call, plan, exchange);
        });
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_over_ranks, SoftmaxOverRanks)
