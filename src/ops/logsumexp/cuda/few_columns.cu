/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of small tensors whose rows do not have adjacent elements: one kernel with few instructions. A block takes
 * some rows, adjacent threads adjacent ones, and several threads take parts of each row, which they merge in shared
 * memory. The kernels for large tensors merge parts by a second kernel, which takes longer than the rows.
 */
#include "cuda/row_threads.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

constexpr int THREADS_LOG2 = 8, THREADS = 1 << THREADS_LOG2; /* of a block */
constexpr int AT_ONCE = 8;                                   /* elements that a thread loads before it uses the first */

struct FewArgs {
    Slabs slabs;
    LseRows lse;
    unsigned rows;
    Divisor by_inner;
    int down_log2; /* threads per row */
};

template <typename T> __global__ __launch_bounds__(THREADS) void few_columns(const __grid_constant__ FewArgs a) {
    __shared__ RowStats parts[THREADS];
    const int down = 1 << a.down_log2, across = THREADS >> a.down_log2;
    const int own = static_cast<int>(threadIdx.x) & (across - 1),
              first = static_cast<int>(threadIdx.x) >> (THREADS_LOG2 - a.down_log2);
    const unsigned index = blockIdx.x * across + own, row = min(index, a.rows - 1);
    const unsigned slab = a.by_inner.quotient(row), column = row - slab * a.by_inner.number;
    int64_t offset[3];
    a.slabs.walk.offsets(slab, offset);
    const T *const x = a.slabs.at<const T>(0, offset[0]) + column * a.slabs.across[0];
    const int length = static_cast<int>(a.slabs.length);
    RowStats s = no_elements();
    for (int l = first; l < length; l += AT_ONCE * down) {
        Pack<T, 1> packs[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            packs[k] = load_once_if<T, 1>(l + k * down < length, x + (l + k * down) * a.slabs.step[0], -INFINITY);
        add_packs(s, packs, 1.0f);
    }
    parts[threadIdx.x] = s;
    for (int others = down / 2; others > 0; others /= 2) {
        __syncthreads();
        if (first < others)
            parts[threadIdx.x] = merge(parts[threadIdx.x], parts[threadIdx.x + others * across], 1.0f);
    }
    if (first == 0 && index < a.rows)
        a.lse.put(offset[2] + column * a.slabs.row_step, lse_of(parts[threadIdx.x]));
}

struct FewColumns {
    typedef logsumexp_call Call;
    struct Plan {
        FewArgs args;
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        /* Shorter rows take one kernel anyway, if a thread per row serves them. */
        constexpr int64_t MOST_BYTES = 2 << 20, SHORT = 64, LONGEST = 512;
        const Problem p(call);
        if (p.backward)
            return "it writes no gradient";
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        if (p.n > LONGEST || p.rows * p.row_bytes() > MOST_BYTES)
            return "the call is not small";
        if (p.contiguous || p.n == 1)
            return "elements of rows are adjacent";
        const bool by_threads = !why_not_threads(slabs_of(p.x, NULL), static_cast<int>(rafter_dtype_bytes(p.x.dtype)));
        return p.n <= SHORT && by_threads ? "a thread per row needs no second kernel" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        constexpr int64_t ENOUGH_THREADS = 1 << 16, LEAST_PART = 4;
        constexpr int MOST_LOG2 = 5;
        const Problem p(call);
        FewArgs &args = plan->args;
        args = {slabs_of(p.x, NULL), lse_rows(call), static_cast<unsigned>(p.rows), {}, 0};
        args.by_inner = Divisor(args.slabs.inner);
        while (args.down_log2 < MOST_LOG2 && p.rows << args.down_log2 < ENOUGH_THREADS &&
               p.n >> args.down_log2 > LEAST_PART)
            args.down_log2++;
        plan->blocks = ceil_div<int64_t>(p.rows, THREADS >> args.down_log2);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, {plan.blocks, THREADS}, few_columns<T>, plan.args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, few_columns, FewColumns)
