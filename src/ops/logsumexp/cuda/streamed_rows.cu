/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of many contiguous rows, of any alignment: warps take batches of rows
 * (cuda/row_stream.cuh). */
#include "cuda/row_stream.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int STREAMS_PER_SM = 4, STREAM_PACKS = 4; /* blocks per multiprocessor; packs in flight per thread */

struct StreamArgs {
    RowStream stream;
    Rows lse;
};

/* What row_stream.cuh asks of an op. */
template <typename T> struct StreamedLogsumexp {
    static constexpr bool COLUMNS = false;
    typedef RowStats Stats;
    struct Row {
        bool present;
    };
    const Rows &lse;

    DEVICE Stats none() const {
        return no_elements();
    }
    template <int N, int COUNT>
    DEVICE void add(Stats &g, const Pack<T, N> (&packs)[COUNT], int, int64_t, int64_t) const {
        add_packs(g, packs, 1.0f);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return merge_some_lanes(g, lanes, 1.0f);
    }
    DEVICE Stats shuffled(const Stats &g, int lane) const {
        return {__shfl_sync(~0u, g.max, lane), __shfl_sync(~0u, g.sum, lane)};
    }
    DEVICE void begin() const {
    }
    DEVICE Row no_row() const {
        return {false};
    }
    DEVICE Row load_row(int) const {
        return {true};
    }
    DEVICE bool needs(const Row &row) const {
        return row.present;
    }
    DEVICE void look(Row &, const Rows &, int) const {
    }
    DEVICE void finish(const Row &row, int at, const Stats &g) const {
        if (row.present)
            lse.put(at, lse_of(g));
    }
};

template <typename T, int LANES>
__global__ __launch_bounds__(STREAM_THREADS, STREAMS_PER_SM) void streamed_rows(const __grid_constant__ StreamArgs a) {
    extern __shared__ uint4 dynamic[];
    StreamedLogsumexp<T> op = {a.lse};
    stream_rows<StreamedLogsumexp<T>, T, LANES, STREAM_PACKS>(op, a.stream, dynamic);
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
        const Launch how = {plan.stream.blocks, STREAM_THREADS, stream_shared(STREAM_PACKS)};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.stream.lanes == 4)
                ::launch(context, how, streamed_rows<T, 4>, args);
            else if (plan.stream.lanes == 8)
                ::launch(context, how, streamed_rows<T, 8>, args);
            else
                ::launch(context, how, streamed_rows<T, WARP>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, streamed_rows, StreamedRows)
