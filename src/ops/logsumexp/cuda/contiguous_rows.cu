/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of contiguous rows, of any length and alignment. Forward: 8 lanes, a warp or a block
 * per row. Few long rows are split over blocks; the last block of a row to finish merges the
 * statistics of all parts, in the order of the parts. Backward: 8 lanes or a warp per piece of a
 * row.
 */
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 256;          /* per block, if a block takes several rows */
constexpr int MOST_THREADS = 512;     /* per block, if it takes one row or a part of one */
constexpr int GRADIENT_THREADS = 128; /* per block of backward */

template <typename T, int LANES>
__global__ __launch_bounds__(THREADS) void short_rows(const __grid_constant__ Forward f) {
    wait_for_inputs();
    const int64_t row = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / LANES;
    const int64_t taken = row < f.rows ? row : f.rows - 1; /* idle lanes still take part in the shuffles */
    const AlignedSpan<const T> span(f.x.at<const T>(taken), f.n);
    const RowStats s = merge_lanes<LANES>(stats_of(span, threadIdx.x % LANES, LANES, 1.0f), 1.0f);
    if (row < f.rows && threadIdx.x % LANES == 0)
        f.lse.put(row, lse_of(s));
}

template <typename T> __global__ __launch_bounds__(MOST_THREADS, 3) void long_rows(const __grid_constant__ Forward f) {
    wait_for_inputs();
    const int64_t task = f.parts == 1 ? blockIdx.x : blockIdx.x / f.parts, part = blockIdx.x - task * f.parts;
    const int64_t row = f.first + task, from = part * f.part;
    const int64_t n = from >= f.n ? 0 : f.n - from < f.part ? f.n - from : f.part;
    const AlignedSpan<const T> span(f.x.at<const T>(row) + (n > 0 ? from : 0), n);
    RowStats s = merge_block(stats_of(span, threadIdx.x, blockDim.x, 1.0f), 1.0f);
    if (f.parts > 1) {
        if (threadIdx.x == 0)
            f.stored[blockIdx.x] = s;
        if (!block_arrives_last(f.counters + task, static_cast<unsigned>(f.parts)) || threadIdx.x >= WARP)
            return;
        s = no_elements();
        for (int64_t i = threadIdx.x; i < f.parts; i += WARP)
            s = merge(s, load_stats(f.stored + task * f.parts + i), 1.0f);
        s = merge_lanes<WARP>(s, 1.0f);
    }
    if (threadIdx.x == 0)
        f.lse.put(row, lse_of(s));
}

/* Blocks are short and issue their loads before they need anything else of the row: that gives the most
 * bandwidth. */
template <typename T, int LANES>
__global__ __launch_bounds__(GRADIENT_THREADS) void row_gradients(const __grid_constant__ Backward b) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    const int64_t piece = (blockIdx.x * int64_t(GRADIENT_THREADS) + threadIdx.x) / LANES;
    /* If rows have several pieces, a piece is 2 KB, so there are fewer than 2^31 of them. */
    const int64_t row = b.parts == 1 ? piece : b.of_row.quotient(static_cast<unsigned>(piece));
    if (row >= b.rows)
        return;
    const int lane = threadIdx.x % LANES;
    const AlignedSpan<const T> x(b.x.at<const T>(row), b.n);
    T *dx = b.dx.at<T>(row) + x.head;
    const int64_t first = (piece - row * b.parts) * (LANES * IN_FLIGHT) + lane;
    Pack<T, N> packs[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (first + k * LANES < x.packs)
            packs[k] = load_once<T, N>(x.body + (first + k * LANES) * N);
    const ScaledExp<T> gradient = b.gradient<T>(row);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (first + k * LANES < x.packs)
            store_once<T, N>(dx + (first + k * LANES) * N, gradient.of(packs[k]));
    if (piece == row * b.parts)
        for (int e = lane; e < x.edges; e += LANES)
            dx[x.edge(e)] = from_float<T>(gradient.of(to_float(x.body[x.edge(e)])));
}

struct ContiguousRows {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        Split split;
        int lanes; /* threads per row (forward) or per piece of a row (backward) */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return Problem(call).contiguous ? NULL : "rows are not contiguous, or dx is aligned otherwise than x";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        const int64_t bytes = p.row_bytes();
        if (p.backward) {
            plan->lanes = bytes <= 256 ? 8 : WARP;
            plan->split.part = plan->lanes * IN_FLIGHT; /* in packs */
            plan->split.parts = ceil_div<int64_t>(ceil_div<int64_t>(bytes, 16), plan->split.part);
            return 0;
        }
        plan->split = split_rows(p, call.algorithm);
        const bool warp_per_row = bytes <= 2048 || (bytes <= 8192 && p.rows >= 2048);
        if (plan->split.parts == 1 && warp_per_row)
            plan->lanes = bytes <= 256 ? 8 : WARP;
        else
            plan->lanes = threads_of_part(p.rows * plan->split.parts, plan->split.part * rafter_dtype_bytes(p.x.dtype),
                                          IN_FLIGHT, MOST_THREADS);
        return plan->split.parts > 1 ? tasks_at_a_time(p.rows, plan->split) * plan->split.parts * sizeof(RowStats) : 0;
    }

    template <typename T>
    static void forward(const rafter_context *context, const Plan &plan, const Forward &f, int64_t rows) {
        if (plan.lanes == 8)
            ::launch(context, {ceil_div<int64_t>(rows, THREADS / 8), THREADS}, short_rows<T, 8>, f);
        else if (plan.lanes == WARP)
            ::launch(context, {ceil_div<int64_t>(rows, THREADS / WARP), THREADS}, short_rows<T, WARP>, f);
        else
            ::launch(context, {rows * plan.split.parts, plan.lanes}, long_rows<T>, f);
    }

    template <typename T> static void backward(const rafter_context *context, const Plan &plan, const Backward &b) {
        const int64_t pieces = b.rows * plan.split.parts;
        const Launch how = {ceil_div<int64_t>(pieces, GRADIENT_THREADS / plan.lanes), GRADIENT_THREADS};
        ::launch(context, how, plan.lanes == 8 ? row_gradients<T, 8> : row_gradients<T, WARP>, b);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        for_dtype(p.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (p.backward)
                backward<T>(context, plan, backward_of(call, p, plan.split));
            else
                launch_tasks(context, call, p, plan.split, p.rows, workspace,
                             [&](const Forward &f, int64_t rows) { forward<T>(context, plan, f, rows); });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, contiguous_rows, ContiguousRows)
