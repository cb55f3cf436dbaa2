/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of contiguous rows that are whole 16-byte packs and are not split; forward also of long
 * rows at any alignment. Forward: a warp or a block per row. Backward: several short blocks per row.
 * The kernels take few parameters on purpose: neither parameters nor instructions are in a cache when
 * a kernel starts.
 */
#include "cuda/block_span.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int WARP_ROW_THREADS = 128; /* per block, a warp per row */
constexpr int MOST_THREADS = 512;     /* per block, a block per row */
constexpr int GRADIENT_THREADS = 64;  /* per block of backward */

struct PackedArgs {
    const char *x;
    char *dx;
    int64_t step, dstep; /* between rows, in bytes */
    LseNumbers lse;
    const void *dlse;
    rafter_dtype dlse_dtype;
    int rows, n, packs; /* n, packs: elements and packs per row */
    Divisor parts;      /* backward: divides by the blocks of a row */

    template <typename T> DEVICE const T *row(int i) const {
        return reinterpret_cast<const T *>(x + i * step);
    }
};

/* A warp per row of up to 32 * IN_FLIGHT packs. */
template <typename T>
__global__ __launch_bounds__(WARP_ROW_THREADS) void warp_per_row(const __grid_constant__ PackedArgs p) {
    wait_for_inputs();
    const int row = blockIdx.x * (WARP_ROW_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= p.rows)
        return;
    Pack<T, WIDE<T>> packs[IN_FLIGHT];
    load_packs(packs, p.row<T>(row), p.packs, lane, WARP);
    RowStats s = no_elements();
    add_packs(s, packs, 1.0f);
    s = merge_lanes<WARP>(s, 1.0f);
    if (lane == 0)
        p.lse.put(row, lse_of(s));
}

/* A block per row; a thread loads COUNT packs at a time. WHOLE: rows are whole aligned packs. */
template <typename T, int COUNT, bool WHOLE>
__global__ __launch_bounds__(MOST_THREADS, 3) void block_per_row(const __grid_constant__ PackedArgs p) {
    wait_for_inputs();
    const BlockSpan<T, WHOLE> span(p.row<T>(blockIdx.x), p.n);
    Pack<T, WIDE<T>> packs[COUNT];
    load_packs(packs, span.body, span.packs, threadIdx.x, blockDim.x);
    const RowStats s = merge_block(span.stats(packs), 1.0f);
    if (threadIdx.x == 0)
        p.lse.put(blockIdx.x, lse_of(s));
}

/* A block takes a part of one row, with COUNT packs per thread. */
template <typename T, int COUNT>
__global__ __launch_bounds__(GRADIENT_THREADS,
                             1024 / GRADIENT_THREADS) void gradients(const __grid_constant__ PackedArgs p) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    const int row = static_cast<int>(p.parts.quotient(blockIdx.x)), part = blockIdx.x - row * p.parts.number;
    const int first = part * (GRADIENT_THREADS * COUNT) + threadIdx.x;
    const T *const x = p.row<T>(row);
    T *const dx = reinterpret_cast<T *>(p.dx + row * p.dstep);
    Pack<T, N> packs[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * GRADIENT_THREADS < p.packs)
            packs[k] = load_once<T, N>(x + (first + k * GRADIENT_THREADS) * N);
    fence_loads();
    const ScaledExp<T> gradient =
        gradient_of_row<T>(load_number_now(p.lse.lse, p.lse.dtype, row), load_number_now(p.dlse, p.dlse_dtype, row));
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * GRADIENT_THREADS < p.packs)
            store_once<T, N>(dx + (first + k * GRADIENT_THREADS) * N, gradient.of(packs[k]));
}

struct PackedRows {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        PackedArgs args;
        rafter_dtype dtype;
        bool backward, whole; /* whole: rows are whole aligned packs */
    };

    /* Backward: packs that a thread takes, and blocks per row. */
    static int packs_per_thread(int64_t packs) {
        return packs <= 2 * GRADIENT_THREADS ? 2 : 4;
    }
    static int64_t blocks_per_row(int64_t packs) {
        return ceil_div<int64_t>(packs, GRADIENT_THREADS * packs_per_thread(packs));
    }

    /* Whether forward takes rows that are not whole packs. Measured on an H200: docs/perf/logsumexp.md. */
    static bool takes_any_alignment(const Problem &p) {
        constexpr int64_t SHORT_ROW = 2 << 10, LONG_ROW = 6 << 10, FEW_ROWS = 8 << 10;
        return !p.backward && p.x_rows().dims == 1 &&
               (p.row_bytes() >= LONG_ROW || (p.row_bytes() > SHORT_ROW && p.rows <= FEW_ROWS));
    }
    /* Whether a warp per row (contiguous_rows) is faster than a block of 128 threads: rows in which every lane of a warp
     * has as many packs. Measured on an H200: docs/perf/logsumexp.md. */
    static bool are_for_warps(const Problem &p) {
        constexpr int64_t SHORT_ROW = 2 << 10, LONG_ROW = 6 << 10, MANY_ROWS = 1 << 15;
        return !p.backward && p.row_bytes() > SHORT_ROW && p.row_bytes() <= LONG_ROW &&
               p.row_bytes() % (16 * WARP) == 0 && p.rows >= MANY_ROWS;
    }
    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.contiguous)
            return "rows are not contiguous";
        if (are_for_warps(p) && !call.common.batch_invariant)
            return "`contiguous_rows`, a warp per row, is faster for so many rows of this length";
        if (!p.backward && split_rows(p, call.algorithm).parts > 1)
            return "rows are few and long, or algorithm is parallel: they are split";
        const bool packs = p.x_rows().whole_packs(p.n) && (!p.backward || p.dx_rows().whole_packs(p.n));
        if (!packs && !takes_any_alignment(p))
            return "rows are not whole, aligned packs of 16 bytes";
        if (p.are_streamed() && !call.common.batch_invariant)
            return "so many short rows are streamed faster";
        if (!lse_rows(call).contiguous() || (p.backward && !reduced_rows(call.dlse, call).contiguous()))
            return "lse or dlse is strided";
        const int64_t row_packs = p.row_bytes() / 16;
        if (p.rows > INT32_MAX || p.n > 1 << 30 || (p.backward && p.rows * blocks_per_row(row_packs) > INT32_MAX))
            return "it counts rows and blocks in 31 bits";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        const int64_t bytes = rafter_dtype_bytes(p.x.dtype);
        const Rows x = p.x_rows();
        const int packs = static_cast<int>(p.row_bytes() / 16);
        plan->dtype = p.x.dtype;
        plan->backward = p.backward;
        plan->whole = x.whole_packs(p.n);
        plan->args = {x.data,
                      nullptr,
                      x.step * bytes,
                      0,
                      lse_rows(call).numbers,
                      nullptr,
                      RAFTER_F32,
                      static_cast<int>(p.rows),
                      static_cast<int>(p.n),
                      packs,
                      Divisor()};
        if (p.backward) {
            const Rows dx = p.dx_rows(), dlse = reduced_rows(call.dlse, call);
            plan->args.dx = dx.data;
            plan->args.dstep = dx.step * bytes;
            plan->args.dlse = dlse.data;
            plan->args.dlse_dtype = dlse.dtype;
            plan->args.parts = Divisor(blocks_per_row(packs));
        }
        return 0;
    }

    template <typename T, bool WHOLE>
    static void forward_by_blocks(const rafter_context *context, const PackedArgs &args) {
        if (args.packs <= 2 * 128)
            ::launch(context, {args.rows, 128}, block_per_row<T, 2, WHOLE>, args);
        else
            ::launch(context, {args.rows, span_threads(args.packs, 4, 128, MOST_THREADS)}, block_per_row<T, 4, WHOLE>,
                     args);
    }
    template <typename T> static void forward(const rafter_context *context, const PackedArgs &args, bool whole) {
        if (!whole)
            forward_by_blocks<T, false>(context, args);
        else if (args.packs <= WARP * IN_FLIGHT)
            ::launch(context, {ceil_div<int64_t>(args.rows, WARP_ROW_THREADS / WARP), WARP_ROW_THREADS},
                     warp_per_row<T>, args);
        else
            forward_by_blocks<T, true>(context, args);
    }

    template <typename T> static void backward(const rafter_context *context, const PackedArgs &args) {
        ::launch(context, {int64_t(args.rows) * args.parts.number, GRADIENT_THREADS},
                 packs_per_thread(args.packs) == 2 ? gradients<T, 2> : gradients<T, 4>, args);
    }

    static rafter_status launch(rafter_context *context, const Call &, const Plan &plan, char *) {
        for_dtype(plan.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            plan.backward ? backward<T>(context, plan.args) : forward<T>(context, plan.args, plan.whole);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, packed_rows, PackedRows)
