/* SPDX-License-Identifier: Apache-2.0 */
/* Forward of small tensors whose rows do not have adjacent elements: several threads share a row
 * (cuda/small_strided.cuh). */
#include "cuda/small_strided.cuh"
#include "cuda/row_threads.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

struct FewArgs {
    SmallStrided few;
    LseRows lse;
};

template <typename T>
__global__ __launch_bounds__(SMALL_STRIDED_THREADS) void small_strided(const __grid_constant__ FewArgs a) {
    wait_for_inputs();
    __shared__ RowStats parts[SMALL_STRIDED_THREADS];
    const RowShare place(a.few);
    RowStats s = no_elements();
    place.for_elements(a.few.slabs.at<const T>(0, place.offset[0]), a.few.slabs.step[0],
                       [&](int, const Pack<T, 1>(&packs)[IN_FLIGHT_ELEMENTS]) { add_packs(s, packs, 1.0f); });
    s = place.merged(s, parts, [](RowStats x, RowStats y) { return merge(x, y, 1.0f); });
    if (place.first == 0 && place.present)
        a.lse.put(place.number, lse_of(s));
}

struct FewColumnsVariant {
    typedef logsumexp_call Call;
    struct Plan {
        FewArgs args;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        constexpr int64_t SHORT = 64; /* shorter rows take one kernel anyway, if thread_per_row takes them */
        const Problem p(call);
        if (p.backward)
            return "it writes no gradient";
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        if (!is_small(p.rows, p.n, bytes))
            return "the call is not small";
        if (p.contiguous)
            return "elements of rows are adjacent";
        const bool by_threads = !why_not_threads(slabs_of(p.x, NULL), bytes);
        return p.n <= SHORT && by_threads ? "a thread per row needs no second kernel" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        plan->args = {small_strided_of(slabs_of(Problem(call).x, NULL)), lse_rows(call)};
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, {plan.args.few.blocks(), SMALL_STRIDED_THREADS}, small_strided<T>, plan.args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, small_strided, FewColumnsVariant)
