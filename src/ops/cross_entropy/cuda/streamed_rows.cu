/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many contiguous rows of any alignment, with any options, without a gradient: one kernel for the
 * whole call, in which warps take batches of rows (cuda/row_stream.cuh).
 */
#include "cuda/row_stream.cuh"
#include "ops/cross_entropy/cuda/row_loss.cuh"

namespace {

struct StreamArgs {
    Args call;
    RowStream stream;
};

/* Blocks per multiprocessor. LANES: see below. */
template <int OPTIONS, int LANES> constexpr int STREAMS_PER_SM = OPTIONS >= FULL || LANES != 0 ? 3 : 4;

/* LANES per row, or 0: a warp, for rows of several groups. */
template <typename T, int OPTIONS, int LANES>
__global__ __launch_bounds__(STREAM_THREADS,
                             STREAMS_PER_SM<OPTIONS, LANES>) void streamed_rows(const __grid_constant__ StreamArgs a) {
    extern __shared__ uint4 dynamic[];
    typedef RowLoss<T, OPTIONS> Op;
    Op op(a.call);
    if constexpr (LANES == 0)
        stream_rows<Op, T, STREAM_PACKS>(op, a.stream, dynamic);
    else
        stream_short_rows<Op, T, LANES, STREAM_PACKS>(op, a.stream, dynamic);
    add_up(a.call, op.totals);
}

struct StreamedRows {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        RowStream stream;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.gradient || !p.forward)
            return "it writes no gradient";
        if (p.strided)
            return "rows are not contiguous";
        return why_not_streamed(p.rows, p.classes, static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout, unused;
        plan->general.fill(device, p, call, 0, &unused);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        const auto stream = [&](int blocks) {
            return stream_of(plan->general.args.z, p.rows, p.classes, bytes,
                             blocks * device.multiprocessors * (STREAM_THREADS / WARP));
        };
        plan->stream = stream(STREAMS_PER_SM<FULL, 0>);
        if (plan->general.options != FULL && !plan->stream.one_group)
            plan->stream = stream(STREAMS_PER_SM<PLAIN, 0>);
        plan->general.fill(device, p, call, plan->stream.blocks, &layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const StreamArgs args = {plan.general.start(sequence, workspace), plan.stream};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_forward_options(plan.general.forward_options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                const Launch how = {plan.stream.blocks, STREAM_THREADS, stream_shared()};
                if (args.stream.lanes == 4)
                    sequence.run(how, streamed_rows<T, OPTIONS, 4>, args);
                else if (args.stream.lanes == 8)
                    sequence.run(how, streamed_rows<T, OPTIONS, 8>, args);
                else if (args.stream.one_group)
                    sequence.run(how, streamed_rows<T, OPTIONS, WARP>, args);
                else
                    sequence.run(how, streamed_rows<T, OPTIONS, 0>, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, streamed_rows, StreamedRows)
