/* SPDX-License-Identifier: Apache-2.0 */
#include "row_calls.h"

#include <stdio.h>
#include <stdlib.h>

#include "harness/context.h"
#include "harness/gpu.h"

/* ---- calls ----------------------------------------------------------------------------------- */

static rafter_status cross_entropy(rafter_context *context, const struct row_tensors *t, float smoothing,
                                   const DLTensor *gradient) {
    const rafter_loss_options options = {.size = sizeof options, .label_smoothing = smoothing};
    const rafter_cross_entropy_args a = {.size = sizeof a,
                                         .options = &options,
                                         .logits = &t->x,
                                         .target = &t->target,
                                         .loss = &t->loss,
                                         .lse = &t->numbers,
                                         .dlogits = gradient};
    return rafter_cross_entropy_forward(context, &a);
}
static rafter_status ce_forward(rafter_context *context, const struct row_tensors *t) {
    return cross_entropy(context, t, 0.0f, NULL);
}
static rafter_status ce_smoothed(rafter_context *context, const struct row_tensors *t) {
    return cross_entropy(context, t, 0.1f, NULL);
}
static rafter_status ce_gradient(rafter_context *context, const struct row_tensors *t) {
    return cross_entropy(context, t, 0.0f, &t->y);
}
static rafter_status ce_backward(rafter_context *context, const struct row_tensors *t) {
    const rafter_cross_entropy_args a = {
        .size = sizeof a, .logits = &t->x, .target = &t->target, .lse = &t->numbers, .dlogits = &t->y};
    return rafter_cross_entropy_backward(context, &a);
}
static rafter_status lse_forward(rafter_context *context, const struct row_tensors *t) {
    const rafter_logsumexp_args a = {.size = sizeof a, .dim = 1, .x = &t->x, .lse = &t->numbers};
    return rafter_logsumexp_forward(context, &a);
}
static rafter_status lse_backward(rafter_context *context, const struct row_tensors *t) {
    const rafter_logsumexp_args a = {
        .size = sizeof a, .dim = 1, .x = &t->x, .lse = &t->numbers, .dlse = &t->numbers, .dx = &t->y};
    return rafter_logsumexp_backward(context, &a);
}
static rafter_status softmax(rafter_context *context, const struct row_tensors *t) {
    const rafter_act_args a = {.size = sizeof a, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .x = &t->x, .y = &t->y};
    return rafter_act_forward(context, &a);
}
static rafter_status softmax_backward(rafter_context *context, const struct row_tensors *t) {
    const rafter_act_args a = {
        .size = sizeof a, .kind = RAFTER_ACT_SOFTMAX, .dim = 1, .y = &t->x, .dy = &t->dy, .dx = &t->y};
    return rafter_act_backward(context, &a);
}
static rafter_status lce_forward(rafter_context *context, const struct row_tensors *t) {
    const rafter_linear_cross_entropy_args a = {
        .size = sizeof a, .x = &t->x, .weight = &t->weight, .target = &t->target, .loss = &t->loss, .lse = &t->numbers};
    return rafter_linear_cross_entropy_forward(context, &a);
}
static rafter_status lce_gradients(rafter_context *context, const struct row_tensors *t) {
    const rafter_linear_cross_entropy_args a = {.size = sizeof a,
                                                .x = &t->x,
                                                .weight = &t->weight,
                                                .target = &t->target,
                                                .loss = &t->loss,
                                                .dx = &t->y,
                                                .dweight = &t->dweight};
    return rafter_linear_cross_entropy_forward(context, &a);
}

const struct row_call row_calls[ROW_CALLS] = {{"cross_entropy", "cross_entropy", ce_forward},
                                              {"cross_entropy, dlogits", "cross_entropy", ce_gradient},
                                              {"cross_entropy backward", "cross_entropy", ce_backward},
                                              {"logsumexp", "logsumexp", lse_forward},
                                              {"softmax", "act", softmax},
                                              {"softmax backward", "act", softmax_backward}},
                      smoothed_cross_entropy = {"cross_entropy, smoothed", "cross_entropy", ce_smoothed},
                      logsumexp_backward = {"logsumexp backward", "logsumexp", lse_backward},
                      linear_calls[LINEAR_CALLS] = {{"lce", "linear_cross_entropy", lce_forward},
                                                    {"lce, gradients", "linear_cross_entropy", lce_gradients}};

/* ---- tensors --------------------------------------------------------------------------------- */

static DLTensor tensor(const rafter_context *context, rafter_dtype dtype, int ndim, int64_t rows, int64_t columns,
                       int64_t padding, int64_t *shape) {
    const size_t element = dtype == RAFTER_I64   ? 8
                           : dtype == RAFTER_F32 ? 4
                                                 : 2,
                 bytes = (size_t)rows * (size_t)(ndim > 1 ? columns + padding : 1) * element;
    shape[0] = rows;
    shape[1] = columns;
    DLTensor t = rafter_tensor(gpu_allocate(bytes), dtype, ndim, shape);
    t.device = context_device(context);
    if (!t.data || !gpu_fill(context, t.data, dtype == RAFTER_I64 ? 0 : 0x3c, bytes)) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return t;
}

void row_tensors_open(struct row_tensors *t, const rafter_context *context, const struct row_shape *s) {
    const int64_t columns = s->depth ? s->depth : s->length;
    t->x = tensor(context, s->dtype, 2, s->rows, columns, s->padding, t->shape[0]);
    t->y = tensor(context, s->dtype, 2, s->rows, columns, 0, t->shape[1]);
    t->dy = tensor(context, s->dtype, 2, s->depth ? 1 : s->rows, columns, 0, t->shape[2]);
    t->weight = tensor(context, s->dtype, 2, s->depth ? s->length : 1, columns, 0, t->shape[3]);
    t->dweight = tensor(context, s->dtype, 2, s->depth ? s->length : 1, columns, 0, t->shape[4]);
    t->target = tensor(context, RAFTER_I64, 1, s->rows, 1, 0, t->shape[5]);
    t->numbers = tensor(context, RAFTER_F32, 1, s->rows, 1, 0, t->shape[6]);
    t->loss = tensor(context, RAFTER_F32, 1, 1, 1, 0, t->shape[7]);
    t->loss.ndim = 0;
    t->strides[0] = s->are_side_by_side ? 1 : columns + s->padding;
    t->strides[1] = s->are_side_by_side ? s->rows : 1;
    t->x.strides = t->strides;
    if (s->are_side_by_side)
        t->y.strides = t->dy.strides = t->strides;
}

void row_tensors_close(struct row_tensors *t, const rafter_context *context) {
    const DLTensor *const all[] = {&t->x, &t->y, &t->dy, &t->weight, &t->dweight, &t->target, &t->numbers, &t->loss};
    gpu_synchronize(context);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        gpu_release(all[i]->data);
}

/* ---- timing ---------------------------------------------------------------------------------- */

double row_call_seconds(const struct pace *pace, rafter_context *context, const struct row_call *call,
                        const struct row_tensors *t) {
    pace_evict_device(pace, context);
    gpu_record(context, pace->before);
    if (call->make(context, t) != RAFTER_OK)
        return -1;
    gpu_record(context, pace->after);
    return 1e-3 * gpu_elapsed(pace->before, pace->after);
}
