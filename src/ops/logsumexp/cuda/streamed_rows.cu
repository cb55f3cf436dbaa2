/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of many contiguous rows, of any alignment: warps take batches of rows
 * (cuda/row_stream.cuh). */
#include "cuda/row_stream.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

constexpr int STREAMS_PER_SM = 4; /* blocks per multiprocessor */

struct StreamArgs {
    RowStream stream;
    Rows lse;
};

/* LANES per row, or 0: a warp, for rows of several groups. */
template <typename T, int LANES>
__global__ __launch_bounds__(STREAM_THREADS, STREAMS_PER_SM) void streamed_rows(const __grid_constant__ StreamArgs a) {
    extern __shared__ uint4 dynamic[];
    RowLogsumexp<T> op = {a.lse};
    if constexpr (LANES == 0)
        stream_rows<RowLogsumexp<T>, T, STREAM_PACKS>(op, a.stream, dynamic);
    else
        stream_short_rows<RowLogsumexp<T>, T, LANES, STREAM_PACKS>(op, a.stream, dynamic);
}

struct StreamedRows {
    typedef logsumexp_call Call;
    struct Plan {
        RowStream stream;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        if (p.backward)
            return "it writes no gradient";
        if (!p.contiguous)
            return "rows are not contiguous";
        if (p.row_bytes() > 2048 && p.row_bytes() <= 8192 && p.rows >= 2048)
            return "a warp per row is faster";
        return why_not_streamed(p.rows, p.n, static_cast<int>(rafter_dtype_bytes(p.x.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->stream = stream_of(p.x_rows(), p.rows, p.n, static_cast<int>(rafter_dtype_bytes(p.x.dtype)),
                                 STREAMS_PER_SM * device.multiprocessors * (STREAM_THREADS / WARP));
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const StreamArgs args = {plan.stream, reduced_rows(call.lse, call)};
        const Launch how = {plan.stream.blocks, STREAM_THREADS, stream_shared()};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.stream.lanes == 4)
                ::launch(context, how, streamed_rows<T, 4>, args);
            else if (plan.stream.lanes == 8)
                ::launch(context, how, streamed_rows<T, 8>, args);
            else if (plan.stream.one_group)
                ::launch(context, how, streamed_rows<T, WARP>, args);
            else
                ::launch(context, how, streamed_rows<T, 0>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, streamed_rows, StreamedRows)
