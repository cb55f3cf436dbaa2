/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of rows of up to 64 whole 16-byte packs.
 *
 * Forward: a warp takes up to 32 rows. LANES lanes share a row, so that 32 / LANES rows are reduced at a
 * time, in up to LANES steps. Each lane keeps the statistics of one row and finishes that row: the
 * logarithm then runs on 32 lanes at once. With a warp per row it ran on one lane, and cost more than
 * reading the row. If rows are few, a warp takes fewer steps, so that there are enough warps.
 *
 * Backward: elementwise. Threads take packs of the whole tensor, not of a row. lse and dlse may be
 * strided.
 */
#include "cuda/rows_per_warp.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 128;           /* per block */
constexpr int64_t MANY_ROWS = 1 << 13; /* forward is faster from here on: docs/perf/logsumexp.md */

struct ShortArgs {
    const char *x;
    int64_t step; /* between rows, in bytes */
    LseNumbers lse;
    int rows, packs; /* packs: per row */
    int steps;       /* of a warp; a multiple of BATCH */
};

/* Packs past the end of a row, and rows past the end, are full of -inf: all lanes take part in every shuffle. */
template <typename T, int LANES, int PACKS>
__global__ __launch_bounds__(THREADS) void rows_per_warp(const __grid_constant__ ShortArgs a) {
    wait_for_inputs();
    constexpr int GROUPS = WARP / LANES, AT_ONCE = BATCH<LANES, PACKS>;
    const int lane = threadIdx.x % WARP, member = lane % LANES, group = lane / LANES;
    const int first = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * (GROUPS * a.steps);
    RowStats own = no_elements();
#pragma unroll 1
    for (int step = 0; step < a.steps; step += AT_ONCE) {
        Pack<T, WIDE<T>> packs[AT_ONCE][PACKS];
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            const int row = first + (step + b) * GROUPS + group;
            load_packs(packs[b], reinterpret_cast<const T *>(a.x + row * a.step), row < a.rows ? a.packs : 0, member,
                       LANES);
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            RowStats s = no_elements();
            add_packs(s, packs[b], 1.0f);
            s = merge_lanes<LANES>(s, 1.0f);
            if (member == step + b)
                own = s;
        }
    }
    const int row = first + member * GROUPS + group;
    if (member < a.steps && row < a.rows)
        a.lse.put(row, lse_of(own));
}

struct GradientArgs {
    const char *x;
    char *dx;
    int64_t step, dstep; /* between rows, in bytes */
    Rows lse, dlse;
    int64_t packs; /* of all rows */
    Divisor row_packs;
};

constexpr int GRADIENT_PACKS = 4; /* per thread */

template <typename T> __global__ __launch_bounds__(THREADS) void gradients(const __grid_constant__ GradientArgs a) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    const int64_t first = int64_t(blockIdx.x) * (THREADS * GRADIENT_PACKS) + threadIdx.x;
    Pack<T, N> packs[GRADIENT_PACKS];
    unsigned rows[GRADIENT_PACKS], lse[GRADIENT_PACKS], dlse[GRADIENT_PACKS]; /* lse, dlse: bits */
    int64_t within[GRADIENT_PACKS];                                           /* bytes from the beginning of the row */
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++) {
        const int64_t i = first + k * THREADS;
        rows[k] = a.row_packs.quotient(static_cast<unsigned>(i));
        within[k] = (i - int64_t(rows[k]) * a.row_packs.number) * 16;
        if (i < a.packs) {
            packs[k] = load_once<T, N>(reinterpret_cast<const T *>(a.x + rows[k] * a.step + within[k]));
            lse[k] = load_bits_now(a.lse.data, a.lse.dtype, a.lse.offset(rows[k]));
            dlse[k] = load_bits_now(a.dlse.data, a.dlse.dtype, a.dlse.offset(rows[k]));
        }
    }
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * THREADS < a.packs) {
            const ScaledExp<T> gradient =
                gradient_of_row<T>(number_of_bits(lse[k], a.lse.dtype), number_of_bits(dlse[k], a.dlse.dtype));
            store_once<T, N>(reinterpret_cast<T *>(a.dx + rows[k] * a.dstep + within[k]), gradient.of(packs[k]));
        }
}

struct ShortRows {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        ShortArgs forward;
        GradientArgs backward;
        int64_t blocks; /* forward */
        rafter_dtype dtype;
        bool is_backward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.contiguous || !p.x_rows().whole_packs(p.n) || (p.backward && !p.dx_rows().whole_packs(p.n)))
            return "rows are not whole, aligned packs of 16 bytes";
        const int64_t packs = p.row_bytes() / 16;
        if (packs > 64)
            return "rows are longer than 64 packs of 16 bytes";
        if (p.rows > INT32_MAX - THREADS || (p.backward && p.rows * packs > INT32_MAX))
            return "it counts rows and packs in 31 bits";
        if (p.backward)
            return NULL;
        if (call.algorithm == RAFTER_LOGSUMEXP_PARALLEL)
            return "algorithm is parallel: rows are split";
        if (p.are_streamed())
            return "so many short rows are streamed faster";
        if (p.rows < MANY_ROWS)
            return "rows are few: a warp that takes 32 of them in turn waits too long";
        return lse_rows(call).contiguous() ? NULL : "lse is strided";
    }

    /* As for_lanes_and_packs, but also for rows of 1 or 2 packs. */
    template <typename F> static void for_shape(int packs, F f) {
        typedef std::integral_constant<int, 1> One;
        packs <= 1   ? f(One(), One())
        : packs <= 2 ? f(std::integral_constant<int, 2>(), One())
                     : for_lanes_and_packs(packs, f);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const int64_t bytes = rafter_dtype_bytes(p.x.dtype), packs = p.row_bytes() / 16;
        const Rows x = p.x_rows();
        plan->dtype = p.x.dtype;
        plan->is_backward = p.backward;
        if (p.backward) {
            const Rows dx = p.dx_rows();
            plan->backward = {x.data,
                              dx.data,
                              x.step * bytes,
                              dx.step * bytes,
                              reduced_rows(call.lse, call),
                              reduced_rows(call.dlse, call),
                              p.rows * packs,
                              Divisor(packs)};
        } else {
            plan->forward = {
                x.data, x.step * bytes, lse_rows(call).numbers, static_cast<int>(p.rows), static_cast<int>(packs), 0};
            for_shape(plan->forward.packs, [&](auto lanes, auto row_packs) {
                constexpr int LANES = decltype(lanes)::value;
                plan->forward.steps =
                    steps_of_warp<LANES, decltype(row_packs)::value>(p.rows, int64_t(16) * device.multiprocessors);
                plan->blocks = ceil_div<int64_t>(p.rows, THREADS / LANES * plan->forward.steps);
            });
        }
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &, const Plan &plan, char *) {
        for_dtype(plan.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.is_backward)
                ::launch(context, {ceil_div<int64_t>(plan.backward.packs, THREADS * GRADIENT_PACKS), THREADS},
                         gradients<T>, plan.backward);
            else
                for_shape(plan.forward.packs, [&](auto lanes, auto packs) {
                    ::launch(context, {plan.blocks, THREADS},
                             rows_per_warp<T, decltype(lanes)::value, decltype(packs)::value>, plan.forward);
                });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, short_rows, ShortRows)
