/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy: checks and entry points. cpu_run.c runs it on the CPU. */
#include <inttypes.h>

#include "core/variants.h"
#include "ops/linear_cross_entropy/call.h"
#include "ops/loss_group.h"

/* ---- checks ---------------------------------------------------------------------------------- */

/* A gradient: its input's shape, and its input's dtype or fp32. */
static rafter_status take_gradient(rafter_context *context, const char *name, const DLTensor *tensor,
                                   const char *input_name, const rafter_view *input, rafter_view *view) {
    if (!tensor)
        return RAFTER_OK;
    const unsigned dtypes = RAFTER_SET(RAFTER_F32) | RAFTER_SET(input->dtype);
    RAFTER_TRY(rafter_take_output(context, name, tensor, dtypes, view));
    return rafter_want_same_shape(context, name, view, input_name, input);
}

/* dx has the shape of x; or, if class_group has reduce_scatter_sum, it may be this rank's share of the
 * rows. */
static rafter_status take_dx(rafter_context *context, const DLTensor *tensor, struct linear_cross_entropy_call *call) {
    const rafter_communicator *const group = &call->loss.class_group;
    const int64_t rows = call->loss.rows, depth = call->weight.shape[1];
    if (!tensor)
        return RAFTER_OK;
    call->dx_rows = 1;
    if (!rafter_group_has(group) || !group->reduce_scatter_sum || group->ranks == 1 || tensor->ndim != 2 ||
        !tensor->shape || tensor->shape[0] == rows)
        return take_gradient(context, "dx", tensor, "x", &call->x, &call->dx);
    const unsigned dtypes = RAFTER_SET(RAFTER_F32) | RAFTER_SET(call->x.dtype);
    RAFTER_TRY(rafter_take_output(context, "dx", tensor, dtypes, &call->dx));
    if (rows % group->ranks != 0 || call->dx.shape[0] != rows / group->ranks || call->dx.shape[1] != depth)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "dx has shape [%lld, %lld], wanted the shape of x, with %lld rows, or [rows / %d, %lld], "
                           "this rank's share",
                           (long long)call->dx.shape[0], (long long)call->dx.shape[1], (long long)rows,
                           (int)group->ranks, (long long)depth);
    call->dx_rows = 2;
    return RAFTER_OK;
}

static rafter_status check_choices(rafter_context *context, const rafter_linear_cross_entropy_args *a) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if ((unsigned)a->mode > RAFTER_LCE_COMPACT)
        return rafter_fail(context, bad, "mode is %d, wanted RAFTER_LCE_AUTO, RAFTER_LCE_FAST or RAFTER_LCE_COMPACT",
                           (int)a->mode);
    if ((unsigned)a->accumulate > RAFTER_ACCUMULATE_NATIVE)
        return rafter_fail(context, bad, "accumulate is %d, wanted RAFTER_ACCUMULATE_F32 or RAFTER_ACCUMULATE_NATIVE",
                           (int)a->accumulate);
    if ((unsigned)a->accumulate_into_dweight > 1)
        return rafter_fail(context, bad, "accumulate_into_dweight is %d, wanted 0 or 1",
                           (int)a->accumulate_into_dweight);
    if ((unsigned)a->allow_tf32 > 1)
        return rafter_fail(context, bad, "allow_tf32 is %d, wanted 0 or 1", (int)a->allow_tf32);
    if (a->reserved != 0)
        return rafter_fail(context, bad, "reserved is %d, wanted 0", (int)a->reserved);
    if (a->reserved2 != 0)
        return rafter_fail(context, bad, "reserved2 is %d, wanted 0", (int)a->reserved2);
    return RAFTER_OK;
}

static rafter_status take_inputs(rafter_context *context, const rafter_linear_cross_entropy_args *a,
                                 struct linear_cross_entropy_call *call) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    rafter_view *const x = &call->x, *const weight = &call->weight, *const bias = &call->bias;
    RAFTER_TRY(rafter_take_tensor(context, "x", a->x, RAFTER_FLOATS, x));
    if (x->ndim < 1)
        return rafter_fail(context, bad, "x has no dimensions, wanted [..., D]");
    RAFTER_TRY(rafter_take_tensor(context, "weight", a->weight, RAFTER_FLOATS, weight));
    RAFTER_TRY(rafter_want_same_dtype(context, "weight", weight, "x", x));
    if (weight->ndim != 2)
        return rafter_fail(context, bad, "weight has %d dimensions, wanted 2: [V, D]", weight->ndim);
    const int64_t classes = weight->shape[0], depth = x->shape[x->ndim - 1];
    if (weight->shape[1] != depth)
        return rafter_fail(context, bad,
                           "weight has shape [%" PRId64 ", %" PRId64 "], wanted [V, D] with D = %" PRId64
                           ", because x has shape [..., %" PRId64 "]%s",
                           classes, weight->shape[1], depth, depth,
                           classes == depth ? "; pass its transpose (weight.t() in PyTorch)" : "");
    if (!a->bias && a->dbias)
        return rafter_fail(context, bad, "dbias is given but bias is NULL, wanted both or neither");
    if (!a->bias)
        return RAFTER_OK;
    RAFTER_TRY(rafter_take_tensor(context, "bias", a->bias, RAFTER_FLOATS, bias));
    RAFTER_TRY(rafter_want_same_dtype(context, "bias", bias, "x", x));
    return rafter_want_shape(context, "bias", bias, 1, &classes);
}

/* Bounds the number of logits: they are no tensor of the call, but sizes of workspace follow from it. */
static rafter_status check_logits(rafter_context *context, const struct rafter_loss *loss) {
    int64_t logits;
    if (!__builtin_mul_overflow(loss->rows, loss->classes, &logits) && logits <= RAFTER_MOST_ELEMENTS)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                       "x has %lld rows and weight %lld, wanted at most 2^47 logits in all", (long long)loss->rows,
                       (long long)loss->classes);
}

static rafter_status take_gradients(rafter_context *context, const rafter_linear_cross_entropy_args *a,
                                    struct linear_cross_entropy_call *call) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    RAFTER_TRY(take_dx(context, a->dx, call));
    RAFTER_TRY(take_gradient(context, "dweight", a->dweight, "weight", &call->weight, &call->dweight));
    RAFTER_TRY(take_gradient(context, "dbias", a->dbias, "bias", &call->bias, &call->dbias));
    if (a->accumulate_into_dweight && a->dweight && call->dweight.dtype != RAFTER_F32)
        return rafter_fail(context, bad, "dweight has dtype %s, wanted fp32 with accumulate_into_dweight",
                           rafter_dtype_name(call->dweight.dtype));
    if (a->accumulate_into_dweight && !a->dweight)
        return rafter_fail(context, bad, "accumulate_into_dweight is 1 but dweight is NULL, wanted a tensor to add to");
    return RAFTER_OK;
}

/* Outputs share no memory with anything else. */
static rafter_status check_overlaps(rafter_context *context, const struct linear_cross_entropy_call *call) {
    const struct {
        const char *name;
        const rafter_view *view;
        bool output;
    } own[] = {{"x", &call->x, false},  {"weight", &call->weight, false},  {"bias", &call->bias, false},
               {"dx", &call->dx, true}, {"dweight", &call->dweight, true}, {"dbias", &call->dbias, true}};
    enum { OWN = sizeof own / sizeof *own };
    for (int i = 0; i < OWN; i++) {
        if (!own[i].view->data)
            continue;
        RAFTER_TRY(rafter_loss_want_disjoint(context, &call->loss, own[i].name, own[i].view, own[i].output));
        for (int j = 0; j < i && own[i].output; j++)
            if (own[j].view->data)
                RAFTER_TRY(rafter_want_disjoint(context, own[i].name, own[i].view, own[j].name, own[j].view));
    }
    return RAFTER_OK;
}

static rafter_status check_saved(rafter_context *context, const rafter_linear_cross_entropy_args *a, bool gradients,
                                 struct linear_cross_entropy_call *call) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if (!a->saved)
        return RAFTER_OK;
    const size_t least = lce_saved_bytes(call->loss.rows, call->loss.classes, call->weight.shape[1]);
    if (a->saved_bytes < least)
        return rafter_fail(context, bad, "saved_bytes is %zu, wanted at least %zu", a->saved_bytes, least);
    if ((uintptr_t)a->saved % 16 != 0)
        return rafter_fail(context, bad, "saved begins at %p, wanted a multiple of 16 bytes", a->saved);
    if (call->common.direction == RAFTER_FORWARD && gradients)
        return rafter_fail(context, bad, "saved is given to forward with a gradient, wanted one or the other");
    RAFTER_TRY(rafter_want_unused(context, "saved", a->saved, a->saved_bytes));
    RAFTER_TRY(rafter_note_memory(context, "saved", a->saved, a->saved_bytes));
    if (!context->cuda)
        return rafter_fail(context, bad, "saved is given, wanted NULL on a CPU, where nothing is saved");
    call->saved = a->saved;
    return RAFTER_OK;
}

/* See rafter_context_set_batch_invariant. */
static rafter_status check_invariance(rafter_context *context, const struct linear_cross_entropy_call *call) {
    if (!call->common.batch_invariant)
        return RAFTER_OK;
    if (context->cuda && call->common.budget)
        return rafter_fail(context, RAFTER_UNSUPPORTED,
                           "budget is %zu on a batch_invariant context, wanted 0: it would decide how rows are cut",
                           call->common.budget);
    if (call->dx.data && call->loss.class_group.ranks > 2)
        return rafter_fail(context, RAFTER_UNSUPPORTED,
                           "dx is wanted of a class_group of %d ranks on a batch_invariant context, wanted at most 2: "
                           "the order of its sum is the communicator's",
                           (int)call->loss.class_group.ranks);
    return RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_linear_cross_entropy_args *args,
                           rafter_direction direction, struct linear_cross_entropy_call *call) {
    rafter_linear_cross_entropy_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_linear_cross_entropy_args", args, &a, sizeof a, direction));
    RAFTER_TRY(rafter_loss_begin(context, a.options));
    RAFTER_TRY(check_choices(context, &a));
    *call = (struct linear_cross_entropy_call){
        .common = {.direction = direction,
                   .batch_invariant = context->batch_invariant,
                   .budget = a.budget,
                   .workspace = a.workspace,
                   .workspace_bytes = a.workspace_bytes},
        .mode = a.mode,
        .native = a.accumulate == RAFTER_ACCUMULATE_NATIVE,
        .accumulate_into_dweight = a.accumulate_into_dweight,
        .allow_tf32 = a.allow_tf32,
    };
    RAFTER_TRY(take_inputs(context, &a, call));
    const struct rafter_loss_args loss_args = {a.options, a.target,  a.loss,   a.row_loss, a.lse,
                                               a.logprob, a.entropy, a.argmax, a.dloss,    a.dentropy};
    const int leading = call->x.ndim - 1;
    RAFTER_TRY(rafter_loss_take(context, &loss_args, direction, "x without its last dimension", leading, call->x.shape,
                                call->weight.shape[0], &call->loss));
    RAFTER_TRY(check_logits(context, &call->loss));
    RAFTER_TRY(take_gradients(context, &a, call));
    RAFTER_TRY(check_overlaps(context, call));

    rafter_view *const x[] = {&call->x}, *const dx[] = {&call->dx};
    rafter_collapse(x, 1, 0, leading);
    if (a.dx)
        rafter_collapse(dx, 1, 0, call->dx.ndim - 1);
    const bool gradients = call->dx.data || call->dweight.data || call->dbias.data;
    RAFTER_TRY(check_saved(context, &a, gradients, call));
    /* A rank without classes has no dweight of its own, but the others wait for it. */
    const bool grouped = rafter_loss_grouped(&call->loss) && !(context->cuda && call->loss.rows == 0);
    if (!gradients && !grouped)
        call->loss.dentropy.data = NULL; /* so that it costs no statistics */
    call->common.empty = direction == RAFTER_BACKWARD && !gradients && !grouped;
    return check_invariance(context, call);
}

/* ---- entry points ---------------------------------------------------------------------------- */

rafter_status rafter_linear_cross_entropy_forward(rafter_context *context,
                                                  const rafter_linear_cross_entropy_args *args) {
    struct linear_cross_entropy_call call;
    rafter_status status = check(context, args, RAFTER_FORWARD, &call);
    if (status == RAFTER_OK)
        status = rafter_loss_run(context, &rafter_op_linear_cross_entropy, &call.common, &call.loss);
    return rafter_group_settle(context, status);
}

rafter_status rafter_linear_cross_entropy_backward(rafter_context *context,
                                                   const rafter_linear_cross_entropy_args *args) {
    struct linear_cross_entropy_call call;
    rafter_status status = check(context, args, RAFTER_BACKWARD, &call);
    if (status == RAFTER_OK)
        status = rafter_loss_run(context, &rafter_op_linear_cross_entropy, &call.common, &call.loss);
    return rafter_group_settle(context, status);
}

rafter_status rafter_linear_cross_entropy_workspace(rafter_context *context,
                                                    const rafter_linear_cross_entropy_args *args,
                                                    rafter_direction direction, size_t *bytes) {
    struct linear_cross_entropy_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    return rafter_ask_workspace(context, &rafter_op_linear_cross_entropy, &call.common, bytes);
}

rafter_status rafter_linear_cross_entropy_saved(rafter_context *context, const rafter_linear_cross_entropy_args *args,
                                                size_t *bytes) {
    struct linear_cross_entropy_call call;
    RAFTER_TRY(check(context, args, RAFTER_FORWARD, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    *bytes = 0;
    if (!context->cuda || call.dx.data || call.dweight.data || call.dbias.data)
        return RAFTER_OK;
    size_t workspace;
    call.saved = &call; /* any address: nothing runs */
    if (rafter_ask_workspace(context, &rafter_op_linear_cross_entropy, &call.common, &workspace) == RAFTER_OK)
        *bytes = lce_saved_bytes(call.loss.rows, call.loss.classes, call.weight.shape[1]);
    return RAFTER_OK;
}
