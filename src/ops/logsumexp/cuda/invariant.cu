/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward in any layout, batch invariant (cuda/slot_sums.cuh): a warp or a block per row, by the
 * length of rows alone.
 */
#include "cuda/slot_sums.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

struct InvariantArgs {
    Rows x, lse;
    int64_t rows, n, step;
    RowTeam team;
};

template <typename T, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS,
                             INDEXED_BLOCKS<ALIGNED>) void indexed_rows(const __grid_constant__ InvariantArgs a) {
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    const IndexedRow<T, ALIGNED> x = {a.x.at<const T>(row), a.n, a.step};
    const RowStats s = slot_stats<false, IN_FLIGHT>(a.team, x, 1.0f).stats;
    if (a.team.thread() == 0)
        a.lse.put(row, lse_of(s));
}

struct Invariant {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        InvariantArgs args;
        bool aligned;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.common.direction == RAFTER_BACKWARD)
            return "it is for forward";
        return Problem(call).row_bytes() / 16 >= MOST_GRANULES ? "a row has more than 16 GiB" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = {p.x_rows(), reduced_rows(call.lse, call),           p.rows,
                      p.n,        p.n > 1 ? p.x.stride[p.x.ndim - 1] : 1, RowTeam::of(p.row_bytes(), IN_FLIGHT)};
        plan->aligned = rows_are_aligned(p.x);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, plan.args.team.blocks(plan.args.rows),
                     plan.aligned ? indexed_rows<T, true> : indexed_rows<T, false>, plan.args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, invariant, Invariant)
