/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch-invariant forward (cuda/slot_sums.cuh) of rows that are too long for chunks, or whose elements are close to
 * each other but not adjacent: a warp or a block per row, by the length of rows alone. streamed_rows.cu and
 * tiny_rows.cu take shorter rows, thread_per_row.cu takes columns.
 */
#include "cuda/slot_sums.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

struct InvariantArgs {
    Rows x;
    LseRows lse;
    int64_t rows, n, step;
    RowTeam team;
};

/* Not inlined: it would take registers from the loop. */
__device__ __noinline__ void put_lse(const InvariantArgs &a, int64_t row, RowStats s) {
    a.lse.put(row, lse_of(s));
}

template <typename T, bool ALIGNED>
__global__ __launch_bounds__(SLOT_THREADS, 4) void indexed_rows(const __grid_constant__ InvariantArgs a) {
    wait_for_inputs();
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    const IndexedRow<T, ALIGNED> x = {a.x.at<const T>(row), a.n, a.step};
    const RowStats s = slot_stats<false, IN_FLIGHT>(a.team, x, 1.0f, [] { return true; }).stats;
    if (a.team.thread() == 0)
        put_lse(a, row, s);
}

/* Rows of whole, aligned packs. Up to 32 * IN_FLIGHT packs take a warp; longer rows take a block, of which a thread
 * loads COUNT packs at a time. As in packed_rows.cu, but rows may be any distance apart. */
constexpr int WARP_ROW_THREADS = 128, MOST_THREADS = 512;

template <typename T>
__global__ __launch_bounds__(WARP_ROW_THREADS) void short_rows_of_packs(const __grid_constant__ InvariantArgs a) {
    wait_for_inputs();
    const int64_t row = blockIdx.x * int64_t(WARP_ROW_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= a.rows)
        return;
    const int lane = threadIdx.x % WARP;
    const T *const x = a.x.at<const T>(row);
    Pack<T, WIDE<T>> packs[IN_FLIGHT];
    load_packs(packs, x, static_cast<int>(a.n / WIDE<T>), lane, WARP);
    RowStats s = no_elements();
    add_packs(s, packs, 1.0f);
    s = merge_lanes<WARP>(s, 1.0f);
    if (lane == 0)
        a.lse.put(row, lse_of(s));
}

template <typename T, int COUNT>
__global__ __launch_bounds__(MOST_THREADS, 3) void rows_of_packs(const __grid_constant__ InvariantArgs a) {
    wait_for_inputs();
    const int count = static_cast<int>(a.n / WIDE<T>);
    const T *const x = a.x.at<const T>(blockIdx.x);
    Pack<T, WIDE<T>> packs[COUNT];
    load_packs(packs, x, count, threadIdx.x, blockDim.x);
    const RowStats s = merge_block(stats_of_packs(packs, x, count, threadIdx.x, blockDim.x), 1.0f);
    if (threadIdx.x == 0)
        a.lse.put(blockIdx.x, lse_of(s));
}

struct Invariant {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        InvariantArgs args;
        bool aligned, whole; /* rows are; whole: and consist of whole packs */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.backward)
            return "it is for forward";
        if (p.order() != OTHER_ROWS)
            return "rows are short, or columns";
        return p.row_bytes() / 16 >= MOST_GRANULES ? "a row has more than 16 GiB" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = {p.x_rows(),
                      lse_rows(call),
                      p.rows,
                      p.n,
                      p.n > 1 ? p.x.stride[p.x.ndim - 1] : 1,
                      RowTeam::of(p.row_bytes(), IN_FLIGHT, SLOT_TEAM, SLOT_WARP_BYTES)};
        plan->aligned = rows_are_aligned(p.x);
        plan->whole = plan->aligned && p.row_bytes() % 16 == 0 && p.n <= 1 << 30;
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const int64_t packs = plan.args.n / WIDE<T>;
            if (plan.whole && packs <= WARP * IN_FLIGHT)
                ::launch(context, {ceil_div<int64_t>(plan.args.rows, WARP_ROW_THREADS / WARP), WARP_ROW_THREADS},
                         short_rows_of_packs<T>, plan.args);
            else if (plan.whole && packs <= 2 * 128)
                ::launch(context, {plan.args.rows, 128}, rows_of_packs<T, 2>, plan.args);
            else if (plan.whole)
                ::launch(context, {plan.args.rows, power_at_least(packs / 4, 128, MOST_THREADS)}, rows_of_packs<T, 4>,
                         plan.args);
            else
                ::launch(context, plan.args.team.blocks(plan.args.rows),
                         plan.aligned ? indexed_rows<T, true> : indexed_rows<T, false>, plan.args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, invariant, Invariant)
