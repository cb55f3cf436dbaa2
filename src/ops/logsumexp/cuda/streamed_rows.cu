/* SPDX-License-Identifier: Apache-2.0 */
/* Forward of many contiguous rows, of any alignment: warps take batches of rows. Short rows are reduced several at a
 * time (cuda/row_chunks.cuh), longer ones one after the other (cuda/row_stream.cuh). */
#include "cuda/summation_order.cuh"
#include "cuda/row_stream.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

constexpr int STREAMS_PER_SM = 4, CHUNKS_PER_SM = 3; /* blocks per multiprocessor */

struct StreamArgs {
    RowStream stream;
    LseRows lse;
};
struct ChunkArgs {
    RowChunks chunks;
    LseRows lse;
};

template <typename T>
__global__ __launch_bounds__(STREAM_THREADS, STREAMS_PER_SM) void streamed_rows(const __grid_constant__ StreamArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    RowLogsumexp<T> op = {a.lse};
    stream_rows<RowLogsumexp<T>, T, STREAM_PACKS>(op, a.stream, dynamic);
}

template <typename T, int LANES>
__global__ __launch_bounds__(CHUNK_THREADS, CHUNKS_PER_SM) void chunked_rows(const __grid_constant__ ChunkArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    RowLogsumexp<T> op = {a.lse};
    reduce_chunks<RowLogsumexp<T>, T, LANES>(op, a.chunks, dynamic);
}

struct StreamedRows {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        RowStream stream;
        RowChunks chunks; /* blocks 0: rows are too long, `stream` is used */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.backward)
            return "it writes no gradient";
        if (call.common.batch_invariant)
            return why_not_order(CHUNKED_ROWS, p.order(), p.rows, p.n);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        if (!p.contiguous)
            return "rows are not contiguous";
        if (p.row_bytes() > 2048 && p.row_bytes() <= 8192 && p.rows >= 2048)
            return "a warp per row is faster";
        return why_not_streamed(p.rows, p.n, static_cast<int>(rafter_dtype_bytes(p.x.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const auto warps = [&](int64_t blocks) { return blocks * device.multiprocessors * (STREAM_THREADS / WARP); };
        plan->chunks = {};
        if (call.common.batch_invariant || !why_not_chunks(p.rows, p.row_bytes()))
            plan->chunks =
                chunks_of(p.x_rows(), p.rows, p.n, {2, 2, call.common.batch_invariant}, warps(CHUNKS_PER_SM));
        else
            plan->stream = stream_of(p.x_rows(), p.rows, p.n, warps(STREAMS_PER_SM));
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const LseRows lse = lse_rows(call);
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.chunks.blocks == 0)
                return ::launch(context, Launch{plan.stream.blocks, STREAM_THREADS, stream_shared()}, streamed_rows<T>,
                                StreamArgs{plan.stream, lse});
            for_chunk_lanes(plan.chunks.lanes, [&](auto lanes) {
                ::launch(context, Launch{plan.chunks.blocks, CHUNK_THREADS, chunks_shared()},
                         chunked_rows<T, decltype(lanes)::value>, ChunkArgs{plan.chunks, lse});
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, streamed_rows, StreamedRows)
