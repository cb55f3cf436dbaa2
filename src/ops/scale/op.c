/* SPDX-License-Identifier: Apache-2.0 */
/* scale: checks and entry points. cpu_run.c runs it on the CPU. */
#include "core/tensor.h"
#include "ops/scale/call.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static rafter_status check(rafter_context *context, const rafter_scale_args *args, rafter_direction direction,
                           struct scale_call *call) {
    rafter_scale_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_scale_args", args, &a, sizeof a, direction));
    if (direction != RAFTER_FORWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted %d (forward): scale has no other",
                           (int)direction, (int)RAFTER_FORWARD);
    *call = (struct scale_call){.common = {.direction = direction,
                                           .batch_invariant = context->batch_invariant,
                                           .workspace = a.workspace,
                                           .workspace_bytes = a.workspace_bytes}};
    rafter_view factor, *const views[] = {&call->x, &call->y};
    RAFTER_TRY(rafter_take_tensor(context, "x", a.x, RAFTER_FLOATS, &call->x));
    RAFTER_TRY(rafter_take_tensor(context, "factor", a.factor, RAFTER_SET(RAFTER_F32), &factor));
    RAFTER_TRY(rafter_take_output(context, "y", a.y, RAFTER_FLOATS, &call->y));
    RAFTER_TRY(rafter_want_same_dtype(context, "y", &call->y, "x", &call->x));
    RAFTER_TRY(rafter_want_same_shape(context, "y", &call->y, "x", &call->x));
    if (factor.numel != 1)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "factor has %lld elements, wanted 1",
                           (long long)factor.numel);
    call->in_place = rafter_same_memory(&call->y, &call->x);
    if (!call->in_place)
        RAFTER_TRY(rafter_want_disjoint(context, "y", &call->y, "x", &call->x));
    RAFTER_TRY(rafter_want_disjoint(context, "y", &call->y, "factor", &factor));
    call->factor = factor.data;
    call->common.empty = call->y.numel == 0;
    if (!call->common.empty) {
        rafter_order_by_stride(views, 2, &call->y, call->y.ndim);
        rafter_collapse(views, 2, 0, call->y.ndim);
    }
    return RAFTER_OK;
}

/* ---- entry points ---------------------------------------------------------------------------- */

rafter_status rafter_scale_forward(rafter_context *context, const rafter_scale_args *args) {
    struct scale_call call;
    RAFTER_TRY(check(context, args, RAFTER_FORWARD, &call));
    return rafter_run(context, &rafter_op_scale, &call.common);
}

rafter_status rafter_scale_workspace(rafter_context *context, const rafter_scale_args *args, rafter_direction direction,
                                     size_t *bytes) {
    struct scale_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    return rafter_ask_workspace(context, &rafter_op_scale, &call.common, bytes);
}
