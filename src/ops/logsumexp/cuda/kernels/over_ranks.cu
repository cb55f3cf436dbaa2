/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp over ranks: what comes before and after the all-gather of their lse. See core/backend.h. */
#include "ops/line_group.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int MERGE_THREADS = 128;

LineExchange<float> exchange_of(const rafter_context *context, const logsumexp_call &call, float *own,
                                const float *all) {
    return line_exchange(context, call.group, call.lse.numel, own, all,
                         {RAFTER_OP_INDEX_logsumexp, call.x.dtype, call.lse.numel});
}

__global__ void put_hash(const __grid_constant__ LineExchange<float> exchange) {
    wait_for_inputs();
    exchange.put_hash();
}

/* The statistics of a rank's part of a line: those of one element with the value lse. */
DEVICE RowStats part_of_line(float lse) {
    if (isnan(lse))
        return {0.0f, NAN};
    return {lse, lse == -INFINITY ? 0.0f : expf(lse - pivot_at(lse))};
}

__global__ __launch_bounds__(MERGE_THREADS) void merge_lse(const __grid_constant__ LineExchange<float> exchange,
                                                           const __grid_constant__ LseRows lse) {
    wait_for_inputs();
    const int64_t line = blockIdx.x * int64_t(MERGE_THREADS) + threadIdx.x;
    if (line >= exchange.lines)
        return;
    RowStats s = no_elements();
    for (int rank = 0; rank < exchange.ranks; rank++)
        s = merge(s, part_of_line(exchange.of(rank, line)), 1.0f);
    lse.put(line, exchange.agree() ? lse_of(s) : NAN);
}

} // namespace

rafter_status rafter_cuda_begin_lse(rafter_context *context, const logsumexp_call *call, float *own) {
    CurrentDevice current(context);
    launch(context, {1, 1}, put_hash, exchange_of(context, *call, own, NULL));
    return rafter_cuda_launched(context, "logsumexp over ranks");
}

rafter_status rafter_cuda_end_lse(rafter_context *context, const logsumexp_call *call, const float *all) {
    CurrentDevice current(context);
    launch(context, {ceil_div<int64_t>(call->lse.numel, MERGE_THREADS), MERGE_THREADS}, merge_lse,
           exchange_of(context, *call, NULL, all), lse_rows(*call));
    return rafter_cuda_launched(context, "logsumexp over ranks");
}
