/* SPDX-License-Identifier: Apache-2.0 */
/* act: checks and entry points. cpu_run.c runs it on the CPU. */
#include "core/sizes.h"
#include "ops/act/call.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static bool contiguous(const rafter_view *view) {
    if (view->numel == 0)
        return true;
    int64_t step = 1;
    for (int d = view->ndim - 1; d >= 0; d--) {
        if (view->shape[d] > 1 && view->stride[d] != step)
            return false;
        step *= view->shape[d];
    }
    return true;
}

/* A tensor of the call, with the name that the caller knows it by; NULL: the call has no such
 * tensor. */
struct named {
    const char *name;
    const DLTensor *tensor;
    rafter_view *view;
};

static rafter_status take_mask(rafter_context *context, const DLTensor *tensor, const struct named named[ACT_TENSORS],
                               struct act_call *call) {
    if (call->kind != RAFTER_ACT_RELU)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "relu_mask is given with kind %d, wanted it only with %d (relu)", (int)call->kind,
                           (int)RAFTER_ACT_RELU);
    const bool forward = call->common.direction == RAFTER_FORWARD;
    rafter_view mask = {0};
    RAFTER_TRY((forward ? rafter_take_output : rafter_take_tensor)(context, "relu_mask", tensor, RAFTER_SET(RAFTER_U8),
                                                                   &mask));
    const int64_t bytes = ceil_div(call->out.numel, 8);
    RAFTER_TRY(rafter_want_shape(context, "relu_mask", &mask, 1, &bytes));
    if (!contiguous(&mask))
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "relu_mask has stride %lld, wanted 1",
                           (long long)mask.stride[0]);
    for (int t = 0; t < ACT_TENSORS; t++) {
        if (!named[t].name)
            continue;
        if (!contiguous(named[t].view))
            return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                               "%s is not contiguous, which relu_mask requires: its bits are in row-major order",
                               named[t].name);
        if (forward)
            RAFTER_TRY(rafter_want_disjoint(context, "relu_mask", &mask, named[t].name, named[t].view));
    }
    if (!forward)
        RAFTER_TRY(rafter_want_disjoint(context, "dx", &call->out, "relu_mask", &mask));
    call->mask = (uint8_t *)mask.data;
    return RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_act_args *args, rafter_direction direction,
                           struct act_call *call) {
    rafter_act_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_act_args", args, &a, sizeof a, direction));
    if ((int)a.kind < RAFTER_ACT_NONE || a.kind > RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "kind is %d, wanted 0 (none) to 4 (softmax)", (int)a.kind);
    *call = (struct act_call){.common = {.direction = direction,
                                         .batch_invariant = context->batch_invariant,
                                         .workspace = a.workspace,
                                         .workspace_bytes = a.workspace_bytes},
                              .kind = a.kind};
    RAFTER_TRY(rafter_group_take(context, "group", a.group, false, &call->group));
    if (a.group && a.kind != RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "group is given to another kind than softmax, wanted NULL");

    const bool forward = direction == RAFTER_FORWARD, softmax = a.kind == RAFTER_ACT_SOFTMAX;
    const bool needs_only_dy = !forward && (a.kind == RAFTER_ACT_NONE || (a.kind == RAFTER_ACT_RELU && a.relu_mask));
    const struct named named[ACT_TENSORS] = {
        [ACT_IN] = forward || !softmax ? (struct named){needs_only_dy ? NULL : "x", a.x, &call->in}
                                       : (struct named){"y", a.y, &call->in},
        [ACT_DY] = {forward ? NULL : "dy", a.dy, &call->dy},
        [ACT_OUT] = forward ? (struct named){"y", a.y, &call->out} : (struct named){"dx", a.dx, &call->out},
    };
    const struct named *const first = &named[needs_only_dy ? ACT_DY : ACT_IN];
    for (int t = 0; t < ACT_TENSORS; t++) {
        if (!named[t].name)
            continue;
        RAFTER_TRY((t == ACT_OUT ? rafter_take_output : rafter_take_tensor)(context, named[t].name, named[t].tensor,
                                                                            RAFTER_FLOATS, named[t].view));
        RAFTER_TRY(rafter_want_same_dtype(context, named[t].name, named[t].view, first->name, first->view));
        RAFTER_TRY(rafter_want_same_shape(context, named[t].name, named[t].view, first->name, first->view));
    }
    for (int t = 0; t < ACT_OUT; t++) {
        const bool may_be_out = t == (forward ? ACT_IN : ACT_DY);
        if (named[t].name && !(may_be_out && rafter_same_memory(&call->out, named[t].view)))
            RAFTER_TRY(rafter_want_disjoint(context, named[ACT_OUT].name, &call->out, named[t].name, named[t].view));
    }
    call->in_place = rafter_same_memory(&call->out, forward ? &call->in : &call->dy);
    if (a.relu_mask)
        RAFTER_TRY(take_mask(context, a.relu_mask, named, call));
    if (softmax)
        RAFTER_TRY(rafter_take_dim(context, a.dim, call->out.ndim, &call->dim));
    call->common.empty = !a.group && (call->out.numel == 0 || (a.kind == RAFTER_ACT_NONE && call->in_place));
    return RAFTER_OK;
}

/* ---- entry points ---------------------------------------------------------------------------- */

rafter_status rafter_act_forward(rafter_context *context, const rafter_act_args *args) {
    struct act_call call;
    rafter_status status = check(context, args, RAFTER_FORWARD, &call);
    if (status == RAFTER_OK)
        status = rafter_run(context, &rafter_op_act, &call.common);
    return rafter_group_settle(context, status);
}

rafter_status rafter_act_backward(rafter_context *context, const rafter_act_args *args) {
    struct act_call call;
    rafter_status status = check(context, args, RAFTER_BACKWARD, &call);
    if (status == RAFTER_OK)
        status = rafter_run(context, &rafter_op_act, &call.common);
    return rafter_group_settle(context, status);
}

rafter_status rafter_act_workspace(rafter_context *context, const rafter_act_args *args, rafter_direction direction,
                                   size_t *bytes) {
    struct act_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    return rafter_ask_workspace(context, &rafter_op_act, &call.common, bytes);
}
