/* SPDX-License-Identifier: Apache-2.0 */
/* cross_entropy: checks and entry points. cpu_run.c runs it on the CPU. */
#include "ops/cross_entropy/call.h"
#include "ops/loss_group.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static rafter_status check(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction,
                           struct cross_entropy_call *call) {
    rafter_cross_entropy_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_cross_entropy_args", args, &a, sizeof a, direction));
    RAFTER_TRY(rafter_loss_begin(context, a.options));
    *call = (struct cross_entropy_call){.common = {.direction = direction,
                                                   .batch_invariant = context->batch_invariant,
                                                   .workspace = a.workspace,
                                                   .workspace_bytes = a.workspace_bytes}};
    rafter_view *logits = &call->logits, *dlogits = &call->dlogits;
    RAFTER_TRY(rafter_take_tensor(context, "logits", a.logits, RAFTER_FLOATS, logits));
    if (logits->ndim == 0)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "logits has 0 dimensions, wanted at least one, for the classes");
    const struct rafter_loss_args loss_args = {a.options, a.target,  a.loss,   a.row_loss, a.lse,
                                               a.logprob, a.entropy, a.argmax, a.dloss,    NULL};
    const int row_dims = logits->ndim - 1;
    struct rafter_loss *const loss = &call->loss;
    RAFTER_TRY(rafter_loss_take(context, &loss_args, direction, "logits without its last dimension", row_dims,
                                logits->shape, logits->shape[row_dims], loss));
    RAFTER_TRY(rafter_loss_want_disjoint(context, loss, "logits", logits, false));
    call->gradient = a.dlogits || direction == RAFTER_BACKWARD;
    if (call->gradient) {
        RAFTER_TRY(rafter_take_output(context, "dlogits", a.dlogits, RAFTER_FLOATS, dlogits));
        RAFTER_TRY(rafter_want_same_dtype(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_want_same_shape(context, "dlogits", dlogits, "logits", logits));
        if (!rafter_same_memory(dlogits, logits))
            RAFTER_TRY(rafter_want_disjoint(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_loss_want_disjoint(context, loss, "dlogits", dlogits, true));
        rafter_collapse(&dlogits, 1, 0, row_dims);
    }
    rafter_collapse(&logits, 1, 0, row_dims);
    /* No rows: only a sum or a mean is left to write. No classes: backward writes nothing, but the
     * CPU still has labels to check. */
    const bool reduces = rafter_loss_has(&loss->loss) && loss->reduction != RAFTER_NONE;
    call->common.empty =
        loss->rows == 0 ? !reduces : context->cuda && direction == RAFTER_BACKWARD && loss->classes == 0;
    /* The other ranks wait for this one; on CUDA they exchange nothing without rows. */
    if (rafter_loss_grouped(loss) && !(context->cuda && loss->rows == 0))
        call->common.empty = false;
    return RAFTER_OK;
}

/* ---- entry points ---------------------------------------------------------------------------- */

static rafter_status check_and_run(rafter_context *context, const rafter_cross_entropy_args *args,
                                   rafter_direction direction) {
    struct cross_entropy_call call;
    rafter_status status = check(context, args, direction, &call);
    if (status == RAFTER_OK && !context->cuda && !rafter_loss_grouped(&call.loss))
        status = rafter_loss_read(context, &call.loss);
    if (status == RAFTER_OK)
        status = rafter_loss_run(context, &rafter_op_cross_entropy, &call.common, &call.loss);
    return rafter_group_settle(context, status);
}

rafter_status rafter_cross_entropy_forward(rafter_context *context, const rafter_cross_entropy_args *args) {
    return check_and_run(context, args, RAFTER_FORWARD);
}

rafter_status rafter_cross_entropy_backward(rafter_context *context, const rafter_cross_entropy_args *args) {
    return check_and_run(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_cross_entropy_workspace(rafter_context *context, const rafter_cross_entropy_args *args,
                                             rafter_direction direction, size_t *bytes) {
    struct cross_entropy_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    return rafter_ask_workspace(context, &rafter_op_cross_entropy, &call.common, bytes);
}
