/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over a dim that is spread over ranks, in any layout. A warp or a block per row computes the
 * statistics of this rank's part of it: the maximum and the sum of exponentials, or the sum of y dy. The
 * ranks gather those of all, 8 bytes per row and rank; then each merges them, in rank order, and reads its
 * part a second time.
 */
#include "ops/act/cuda/softmax_indexed.cuh"
#include "ops/line_group.cuh"

namespace {

typedef LineExchange<RowStats> Exchange;

/* A row of the call: what a team of threads reads and writes. Without elements nothing is accessed. */
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

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void rank_statistics(const __grid_constant__ IndexedArgs<T> a,
                                                                      const __grid_constant__ Exchange exchange) {
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

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void rank_results(const __grid_constant__ IndexedArgs<T> a,
                                                                   const __grid_constant__ Exchange exchange) {
    const int64_t line = a.team.row();
    if (line >= a.rows)
        return;
    const OwnRow<T, FORWARD, ALIGNED> row(a, line);
    RowStats s = FORWARD ? no_elements() : RowStats{0.0f, 0.0f};
    for (int rank = 0; rank < exchange.ranks; rank++) {
        const RowStats one = exchange.of(rank, line);
        s = FORWARD ? merge(s, one, 1.0f) : RowStats{0.0f, s.sum + one.sum};
    }
    if (!exchange.agree())
        s.sum = NAN;
    write_row(a.team, element_from<T, FORWARD>(s), row.in, row.dy, row.out, a.step[OUT]);
}

struct SoftmaxOverRanks {
    typedef act_call Call;
    static constexpr bool SHARES_CLASSES = true, BATCH_INVARIANT = true;
    struct Plan {
        Walk walk; /* over lines, in the order of the call, which all ranks share */
        int64_t lines, n, step[TENSORS];
        RowTeam team;
        bool aligned;
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
        }
        plan->team = RowTeam::of(plan->n * rafter_dtype_bytes(call.out.dtype), IN_FLIGHT);
        return Exchange::workspace(plan->lines, call.group.ranks);
    }

    template <typename T, bool FORWARD, bool ALIGNED>
    static rafter_status launch_as(rafter_context *context, const Call &call, const Plan &plan,
                                   const Exchange &exchange) {
        const IndexedArgs<T> args = {reinterpret_cast<const T *>(call.in.data),
                                     reinterpret_cast<const T *>(call.dy.data),
                                     reinterpret_cast<T *>(call.out.data),
                                     plan.walk,
                                     plan.lines,
                                     plan.n,
                                     {plan.step[IN], plan.step[DY], plan.step[OUT]},
                                     plan.team};
        const Launch how = plan.team.blocks(plan.lines);
        ::launch(context, how, rank_statistics<T, FORWARD, ALIGNED>, args, exchange);
        RAFTER_TRY(rafter_group_gather(context, "group", &call.group, exchange.own,
                                       const_cast<RowStats *>(exchange.all), exchange.bytes_sent()));
        ::launch(context, how, rank_results<T, FORWARD, ALIGNED>, args, exchange);
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
