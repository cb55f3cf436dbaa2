/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loss and gradient at once, of short rows, and in batch-invariant calls also of columns: runs the variant that
 * writes losses, then one that writes gradients from lse. For rows of any alignment that is faster than a kernel that
 * writes both.
 */
#include "ops/cross_entropy/cuda/problem.cuh"

extern "C" {
extern const struct rafter_variant_functions rafter_cuda_cross_entropy_tiny_rows,
    rafter_cuda_cross_entropy_streamed_rows, rafter_cuda_cross_entropy_streamed_gradients,
    rafter_cuda_cross_entropy_thread_per_row, rafter_cuda_cross_entropy_tiles,
    rafter_cuda_cross_entropy_loss_then_gradient;
}

namespace {

constexpr int64_t LEAST_ROWS = 1 << 13; /* with fewer of them, two more launches take longer than the rows */

const cross_entropy_call &typed(const struct rafter_call *call) {
    return *reinterpret_cast<const cross_entropy_call *>(call);
}

/* The two calls that replace a call, and their variants. */
struct Halves {
    cross_entropy_call loss, gradient;
    const struct rafter_variant_functions *loss_variant, *gradient_variant;

    /* `lse`: memory for a float per row, used if the caller does not want lse. */
    Halves(const cross_entropy_call &call, char *lse) : loss(call), gradient(call) {
        const Problem p(call);
        const bool columns = p.invariant && p.step(call.logits) != 1;
        loss_variant = p.order == TINY_ROWS      ? &rafter_cuda_cross_entropy_tiny_rows
                       : p.order == CHUNKED_ROWS ? &rafter_cuda_cross_entropy_streamed_rows
                                                 : &rafter_cuda_cross_entropy_thread_per_row;
        gradient_variant = columns                   ? &rafter_cuda_cross_entropy_tiles
                           : p.order == CHUNKED_ROWS ? &rafter_cuda_cross_entropy_streamed_gradients
                                                     : &rafter_cuda_cross_entropy_tiny_rows;
        loss.gradient = false;
        loss.dlogits = {};
        if (!call.loss.lse.data) {
            rafter_view &view = loss.loss.lse;
            view = call.loss.target;
            view.dtype = RAFTER_F32;
            view.data = lse;
            int64_t stride = 1;
            for (int d = view.ndim - 1; d >= 0; d--) {
                view.stride[d] = stride;
                stride *= view.shape[d];
            }
        }
        struct rafter_loss &backward = gradient.loss;
        gradient.common.direction = backward.direction = RAFTER_BACKWARD;
        backward.lse = loss.loss.lse;
        backward.loss = backward.row_loss = backward.logprob = backward.argmax = backward.entropy = {};
    }
};

/* Bytes for lse at the beginning of the workspace; the workspace of the halves follows. */
size_t lse_bytes(const cross_entropy_call &call) {
    return call.loss.lse.data ? 0 : static_cast<size_t>(round_up<int64_t>(call.loss.rows * 4, 256));
}

const char *why_not(const rafter_context *context, const struct rafter_call *call) {
    const Problem p(typed(call));
    if (!p.forward || !p.gradient)
        return "it is for loss and gradient at once";
    if (p.order == OTHER_ROWS || (p.order == STRIDED_ROWS && !p.invariant))
        return "rows are too long, or not contiguous";
    if (p.rows == 0 || p.classes == 0)
        return "there are no rows or no classes";
    if (!p.invariant && p.rows < LEAST_ROWS)
        return "rows are few";
    char unused;
    const Halves halves(typed(call), &unused);
    const char *const reason = halves.loss_variant->why_not(context, &halves.loss.common);
    return reason ? reason : halves.gradient_variant->why_not(context, &halves.gradient.common);
}

size_t plan(const rafter_context *context, const struct rafter_call *call, void *) {
    alignas(16) char storage[RAFTER_PLAN_BYTES];
    char unused;
    const Halves halves(typed(call), &unused);
    const size_t loss = halves.loss_variant->plan(context, &halves.loss.common, storage),
                 gradient = halves.gradient_variant->plan(context, &halves.gradient.common, storage);
    return lse_bytes(typed(call)) + max(loss, gradient);
}

rafter_status run(rafter_context *context, const struct rafter_call *call, const void *, const void *,
                  char *workspace) {
    alignas(16) char storage[RAFTER_PLAN_BYTES]; /* planned again: the plan of this variant has no place for two */
    const Halves halves(typed(call), workspace);
    char *const rest = workspace + lse_bytes(typed(call));
    halves.loss_variant->plan(context, &halves.loss.common, storage);
    const rafter_status status = halves.loss_variant->run(context, &halves.loss.common, storage, NULL, rest);
    if (status != RAFTER_OK)
        return status;
    halves.gradient_variant->plan(context, &halves.gradient.common, storage);
    return halves.gradient_variant->run(context, &halves.gradient.common, storage, NULL, rest);
}

} // namespace

const struct rafter_variant_functions rafter_cuda_cross_entropy_loss_then_gradient = {why_not, plan, run};
