/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many contiguous rows of any alignment, with any options, without a gradient: one kernel for the
 * whole call, in which warps take batches of rows. Short rows are reduced several at a time
 * (cuda/row_chunks.cuh), longer ones one after the other (cuda/row_stream.cuh).
 */
#include "cuda/row_chunks.cuh"
#include "cuda/row_stream.cuh"
#include "ops/cross_entropy/cuda/row_loss.cuh"

namespace {

struct StreamArgs {
    Args call;
    RowStream stream;
};
struct ChunkArgs {
    Args call;
    RowChunks chunks;
};

/* Blocks per multiprocessor. */
template <int OPTIONS> constexpr int STREAMS_PER_SM = OPTIONS >= FULL ? 3 : 4;
constexpr int CHUNKS_PER_SM = 3;

template <typename T, int OPTIONS, bool WEIGHTED_SMOOTHING>
__global__ __launch_bounds__(STREAM_THREADS, STREAMS_PER_SM<WEIGHTED_SMOOTHING ? FULL : OPTIONS>) void streamed_rows(
    const __grid_constant__ StreamArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    typedef RowLoss<T, OPTIONS, WEIGHTED_SMOOTHING> Op;
    Op op(a.call);
    stream_rows<Op, T, STREAM_PACKS>(op, a.stream, dynamic);
    add_up(a.call, op.totals);
}

template <typename T, int OPTIONS, bool WEIGHTED_SMOOTHING, int LANES>
__global__ __launch_bounds__(CHUNK_THREADS, CHUNKS_PER_SM) void chunked_rows(const __grid_constant__ ChunkArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    typedef RowLoss<T, OPTIONS, WEIGHTED_SMOOTHING> Op;
    Op op(a.call);
    reduce_chunks<Op, T, LANES>(op, a.chunks, dynamic);
    add_up(a.call, op.totals);
}

struct StreamedRows {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        bool weighs; /* see RowLoss; general.options is FULL then */
        RowStream stream;
        RowChunks chunks; /* blocks 0: rows are too long, `stream` is used */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.gradient || !p.forward)
            return "it writes no gradient";
        if (p.invariant)
            return why_not_order(CHUNKED_ROWS, p.order, p.rows, p.classes);
        if (p.strided)
            return "rows are not contiguous";
        if (invariant_is_faster(p, call))
            return "`invariant` is faster for so many rows of this length";
        return why_not_streamed(p.rows, p.classes, static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        plan->general.fill(device, p, call, 0, &unused);
        const bool full = plan->general.options == FULL;
        const Loss &loss = plan->general.args.loss;
        plan->weighs = full && loss.softcap == 0.0f && !loss.entropy.data && !loss.argmax.data;
        const auto warps = [&](int64_t blocks) { return blocks * device.multiprocessors * (STREAM_THREADS / WARP); };
        plan->chunks = {};
        const ChunkLanes lanes = {full ? 4 : 2, full ? 4 : 2, p.invariant};
        if (p.invariant || !why_not_chunks(p.rows, p.row_bytes))
            plan->chunks = chunks_of(plan->general.args.z, p.rows, p.classes, lanes, warps(CHUNKS_PER_SM));
        else
            plan->stream =
                stream_of(plan->general.args.z, p.rows, p.classes,
                          warps(plan->general.options >= FULL ? STREAMS_PER_SM<FULL> : STREAMS_PER_SM<PLAIN>));
        plan->general.fill(device, p, call, plan->chunks.blocks > 0 ? plan->chunks.blocks : plan->stream.blocks,
                           &layout);
        return layout.bytes;
    }

    template <int OPTIONS, bool WEIGHTED_SMOOTHING>
    static void launch_with(const rafter_context *context, const Call &call, const Plan &plan, const Args &args) {
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.chunks.blocks == 0)
                return ::launch(context, Launch{plan.stream.blocks, STREAM_THREADS, stream_shared()},
                                streamed_rows<T, OPTIONS, WEIGHTED_SMOOTHING>, StreamArgs{args, plan.stream});
            for_chunk_lanes<OPTIONS != FULL && !WEIGHTED_SMOOTHING>(plan.chunks.lanes, [&](auto lanes) {
                ::launch(context, Launch{plan.chunks.blocks, CHUNK_THREADS, chunks_shared()},
                         chunked_rows<T, OPTIONS, WEIGHTED_SMOOTHING, decltype(lanes)::value>,
                         ChunkArgs{args, plan.chunks});
            });
        });
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        if (plan.weighs)
            launch_with<SMOOTH, true>(context, call, plan, args);
        else
            for_options(plan.general.options,
                        [&](auto o) { launch_with<decltype(o)::value, false>(context, call, plan, args); });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, streamed_rows, StreamedRows)
