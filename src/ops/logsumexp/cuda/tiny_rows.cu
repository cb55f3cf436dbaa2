/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of many rows of 2 to 32 elements that follow each other; in batch-invariant calls, forward of all rows of
 * up to 32 elements. A thread takes one row or several (cuda/tiny_rows.cuh). */
#include "cuda/tiny_rows.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int PER_SM = 4; /* blocks per multiprocessor */
/* Rows of a thread at once, at most. */
template <bool BACKWARD> constexpr int ROWS_AT_ONCE = BACKWARD ? 4 : 8;

/* Kernel arguments. */
struct TinyArgs {
    TinyRows tiny;
    LseRows lse; /* contiguous, unless rows are scattered */
    Rows dlse;   /* backward only; contiguous, or one number */
};
struct ScatteredArgs {
    TinyArgs tiny; /* only `lse` */
    ScatteredRows rows;
};

/* The Op of tiny_rows.cuh. SCATTERED: rows, and lse, may have any strides; forward only. */
template <typename T, bool BACKWARD, bool SCATTERED> struct TinyLogsumexp {
    const TinyArgs &a;
    struct Row {
        unsigned lse, dlse; /* bits */
    };

    DEVICE Row no_row() const {
        return {0, 0};
    }
    DEVICE Row load(int row) const {
        if (!BACKWARD)
            return no_row();
        return {load_bits_now(a.lse.data, a.lse.dtype, row),
                load_bits_now(a.dlse.data, a.dlse.dtype, row * a.dlse.step)};
    }
    DEVICE void begin() const {
    }
    template <int COUNT>
    DEVICE void finish(const Row &loaded, int row, bool present, const float (&x)[COUNT], const T *,
                       T *gradient) const {
        if constexpr (BACKWARD) {
            const ScaledExp<T> scaled =
                gradient_of_row<T>(number_of_bits(loaded.lse, a.lse.dtype), number_of_bits(loaded.dlse, a.dlse.dtype));
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                if (j < least_of_count(COUNT) || j < a.tiny.length)
                    gradient[j] = from_float<T>(scaled.of(x[j]));
        } else {
            const float lse = lse_of_few(stats_of_row<T>(x));
            if (present)
                a.lse.numbers.put(SCATTERED ? a.lse.offset(row) : row, lse);
        }
    }
};

template <typename T, int COUNT, int ROWS, bool BACKWARD>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void tiny(const __grid_constant__ TinyArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    typedef TinyLogsumexp<T, BACKWARD, false> Op;
    Op op = {a};
    tiny_rows<Op, T, COUNT, ROWS, BACKWARD>(op, a.tiny, dynamic);
}

template <typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS, PER_SM) void scattered(const __grid_constant__ ScatteredArgs a) {
    wait_for_inputs();
    typedef TinyLogsumexp<T, false, true> Op;
    Op op = {a.tiny};
    scattered_rows<Op, T, COUNT, false>(op, a.rows);
}

struct Tiny {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        TinyArgs args;
        ScatteredRows scattered; /* no blocks: rows follow each other */
        int64_t blocks;
        bool backward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (call.common.batch_invariant && !p.backward)
            return why_not_order(TINY_ROWS, p.order(), p.rows, p.n);
        return why_not_close(p, call);
    }
    /* Why the rows do not follow each other closely, for tiny_rows, or NULL. */
    static const char *why_not_close(const Problem &p, const Call &call) {
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        if (const char *const reason =
                why_not_tiny(s, p.backward ? 2 : 1, static_cast<int>(rafter_dtype_bytes(p.x.dtype))))
            return reason;
        if (!lse_rows(call).contiguous())
            return "lse is strided";
        if (!p.backward)
            return NULL;
        const Rows dlse = reduced_rows(call.dlse, call);
        return dlse.dims == 1 && (dlse.step == 0 || dlse.step == 1) ? NULL : "dlse is strided";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->backward = p.backward;
        plan->scattered = {};
        if (why_not_close(p, call)) {
            plan->args = {{}, lse_rows(call), {}};
            plan->scattered = scattered_rows_of(p.x, NULL, p.rows, device);
            return 0;
        }
        plan->args = {tiny_rows_of(slabs_of(p.x, p.backward ? &p.dx : NULL), p.backward ? 2 : 1,
                                   static_cast<int>(rafter_dtype_bytes(p.x.dtype)),
                                   p.backward ? ROWS_AT_ONCE<true> : ROWS_AT_ONCE<false>),
                      lse_rows(call), p.backward ? reduced_rows(call.dlse, call) : Rows{}};
        plan->blocks = tiny_blocks(plan->args.tiny, device, PER_SM);
        return 0;
    }

    template <typename T, bool BACKWARD> static void launch_close(rafter_context *context, const Plan &plan) {
        const Launch how = {plan.blocks, TINY_THREADS, tiny_shared(plan.args.tiny)};
        for_tiny_shape<T, ROWS_AT_ONCE<BACKWARD>>(plan.args.tiny, [&](auto count, auto rows) {
            ::launch(context, how, tiny<T, decltype(count)::value, decltype(rows)::value, BACKWARD>, plan.args);
        });
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.scattered.blocks > 0)
                return for_few_counts(plan.scattered.length, [&](auto count) {
                    ::launch(context, Launch{plan.scattered.blocks, TINY_THREADS}, scattered<T, decltype(count)::value>,
                             ScatteredArgs{plan.args, plan.scattered});
                });
            if (plan.backward)
                launch_close<T, true>(context, plan);
            else
                launch_close<T, false>(context, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, tiny_rows, Tiny)
