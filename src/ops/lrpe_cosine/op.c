/* SPDX-License-Identifier: Apache-2.0 */
/* lrpe_cosine: checks and entry points. cpu_run.c runs it on the CPU. */
#include <stdio.h>
#include <string.h>

#include "ops/lrpe_cosine/call.h"

/* ---- checks ---------------------------------------------------------------------------------- */

/* Inserts a head dimension of size 1 into a tensor that has none. */
static void add_heads(rafter_view *view) {
    if (view->ndim == 4)
        return;
    view->shape[3] = view->shape[2], view->stride[3] = view->stride[2];
    view->shape[2] = 1, view->stride[2] = 0;
    view->ndim = 4;
}

static rafter_status check_options(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if ((unsigned)args->act > RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, bad, "act is %d, wanted 0 (none) to 4 (softmax)", (int)args->act);
    if ((unsigned)args->softmax_over > RAFTER_OVER_SEQUENCE)
        return rafter_fail(context, bad, "softmax_over is %d, wanted 0 (feature) or 1 (sequence)",
                           (int)args->softmax_over);
    if ((unsigned)args->algorithm > RAFTER_LRPE_BP)
        return rafter_fail(context, bad, "algorithm is %d, wanted 0 (auto), 1 (sp) or 2 (bp)", (int)args->algorithm);
    if (args->reserved != 0)
        return rafter_fail(context, bad, "reserved is %d, wanted 0", (int)args->reserved);
    return RAFTER_OK;
}

static rafter_status check_theta(rafter_context *context, const rafter_view *theta, const int64_t *x) {
    const bool fits = theta->ndim == 2 && (theta->shape[0] == x[2] || theta->shape[0] == 1) &&
                      (theta->shape[1] == x[3] || theta->shape[1] == 1);
    if (fits && (theta->shape[0] == x[2] || theta->shape[1] == x[3]))
        return RAFTER_OK;
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if (theta->ndim != 2)
        return rafter_fail(context, bad,
                           "theta has %d dimensions, wanted 2: [H, D], [H, 1] or [1, D] with H = %lld and D = %lld",
                           theta->ndim, (long long)x[2], (long long)x[3]);
    return rafter_fail(context, bad,
                       "theta has shape [%lld, %lld], wanted [H, D], [H, 1] or [1, D] with H = %lld and D = %lld",
                       (long long)theta->shape[0], (long long)theta->shape[1], (long long)x[2], (long long)x[3]);
}

/* Checks positions, [N] or [B, N], and makes them [B, N], with stride 0 for [N]. */
static rafter_status check_positions(rafter_context *context, rafter_view *positions, const int64_t *x) {
    const int ndim = positions->ndim;
    if (!((ndim == 1 && positions->shape[0] == x[1]) ||
          (ndim == 2 && positions->shape[0] == x[0] && positions->shape[1] == x[1]))) {
        char given[64] = "";
        if (ndim == 1)
            snprintf(given, sizeof given, "shape [%lld]", (long long)positions->shape[0]);
        else if (ndim == 2)
            snprintf(given, sizeof given, "shape [%lld, %lld]", (long long)positions->shape[0],
                     (long long)positions->shape[1]);
        else
            snprintf(given, sizeof given, "%d dimensions", ndim);
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "positions has %s, wanted [N] or [B, N] with B = %lld and N = %lld", given, (long long)x[0],
                           (long long)x[1]);
    }
    if (ndim == 1) {
        positions->shape[1] = positions->shape[0], positions->stride[1] = positions->stride[0];
        positions->shape[0] = x[0], positions->stride[0] = 0;
        positions->ndim = 2;
    }
    return RAFTER_OK;
}

/* An output of x's dtype and the given shape that shares no memory with the inputs. */
static rafter_status check_output(rafter_context *context, const char *name, const DLTensor *tensor,
                                  const struct lrpe_cosine_call *call, const int64_t *shape, rafter_view *view) {
    RAFTER_TRY(rafter_take_output(context, name, tensor, RAFTER_FLOATS, view));
    RAFTER_TRY(rafter_want_shape(context, name, view, call->x.ndim, shape));
    RAFTER_TRY(rafter_want_same_dtype(context, name, view, "x", &call->x));
    RAFTER_TRY(rafter_want_disjoint(context, name, view, "x", &call->x));
    return RAFTER_OK;
}

/* y, in forward. `shape` is x's with twice the features. */
static rafter_status check_y(rafter_context *context, const rafter_lrpe_cosine_args *args, const int64_t *shape,
                             struct lrpe_cosine_call *call) {
    RAFTER_TRY(check_output(context, "y", args->y, call, shape, &call->y));
    RAFTER_TRY(rafter_want_disjoint(context, "y", &call->y, "theta", &call->theta));
    return rafter_want_disjoint(context, "y", &call->y, "positions", &call->positions);
}

/* dy, and dx and dtheta as far as they are given, in backward. `shape` is dy's. */
static rafter_status check_gradients(rafter_context *context, const rafter_lrpe_cosine_args *args, const int64_t *shape,
                                     struct lrpe_cosine_call *call) {
    const rafter_view *const x = &call->x, *const inputs[] = {&call->theta, &call->positions, &call->dy};
    static const char *const input_names[] = {"theta", "positions", "dy"};
    RAFTER_TRY(rafter_take_tensor(context, "dy", args->dy, RAFTER_FLOATS, &call->dy));
    RAFTER_TRY(rafter_want_shape(context, "dy", &call->dy, x->ndim, shape));
    RAFTER_TRY(rafter_want_same_dtype(context, "dy", &call->dy, "x", x));
    if (!args->dx && !args->dtheta)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "dx and dtheta are both NULL, wanted at least one of them");
    if (args->dx) {
        RAFTER_TRY(check_output(context, "dx", args->dx, call, x->shape, &call->dx));
        for (int i = 0; i < 3; i++)
            RAFTER_TRY(rafter_want_disjoint(context, "dx", &call->dx, input_names[i], inputs[i]));
    }
    if (!args->dtheta)
        return RAFTER_OK;
    rafter_view *const dtheta = &call->dtheta;
    RAFTER_TRY(rafter_take_output(context, "dtheta", args->dtheta, RAFTER_FLOATS, dtheta));
    RAFTER_TRY(rafter_want_same_shape(context, "dtheta", dtheta, "theta", &call->theta));
    if (dtheta->dtype != RAFTER_F32)
        RAFTER_TRY(rafter_want_same_dtype(context, "dtheta", dtheta, "theta", &call->theta));
    RAFTER_TRY(rafter_want_disjoint(context, "dtheta", dtheta, "x", x));
    for (int i = 0; i < 3; i++)
        RAFTER_TRY(rafter_want_disjoint(context, "dtheta", dtheta, input_names[i], inputs[i]));
    return args->dx ? rafter_want_disjoint(context, "dtheta", dtheta, "dx", &call->dx) : RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_lrpe_cosine_args *args, rafter_direction direction,
                           struct lrpe_cosine_call *call) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    rafter_lrpe_cosine_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_lrpe_cosine_args", args, &a, sizeof a, direction));
    RAFTER_TRY(check_options(context, &a));
    *call = (struct lrpe_cosine_call){.common = {.direction = direction,
                                                 .batch_invariant = context->batch_invariant,
                                                 .workspace = a.workspace,
                                                 .workspace_bytes = a.workspace_bytes},
                                      .act = a.act,
                                      .softmax_over = a.softmax_over,
                                      .algorithm = a.algorithm,
                                      .offset = a.offset};
    rafter_view *const x = &call->x;
    RAFTER_TRY(rafter_take_tensor(context, "x", a.x, RAFTER_FLOATS, x));
    if (x->ndim != 3 && x->ndim != 4)
        return rafter_fail(context, bad, "x has %d dimensions, wanted 4, [B, N, H, D], or 3, [B, N, D]", x->ndim);
    const int last = x->ndim - 1;
    int64_t doubled[4];
    memcpy(doubled, x->shape, sizeof doubled);
    if (__builtin_mul_overflow(x->shape[last], 2, &doubled[last]))
        return rafter_fail(context, bad, "x has size %lld in dimension %d: y would have twice that",
                           (long long)x->shape[last], last);
    const int64_t four[] = {x->shape[0], x->shape[1], last == 3 ? x->shape[2] : 1, x->shape[last]};
    int64_t of_token;
    if (context->cuda && (__builtin_mul_overflow(four[2], four[3], &of_token) || of_token > INT32_MAX))
        return rafter_fail(context, bad, "x has %lld heads of %lld features, wanted fewer than 2^31 elements per token",
                           (long long)four[2], (long long)four[3]);

    RAFTER_TRY(rafter_take_tensor(context, "theta", a.theta, RAFTER_FLOATS, &call->theta));
    RAFTER_TRY(check_theta(context, &call->theta, four));
    if (a.positions) {
        RAFTER_TRY(rafter_take_tensor(context, "positions", a.positions, RAFTER_INTS, &call->positions));
        RAFTER_TRY(check_positions(context, &call->positions, four));
    } else {
        int64_t position;
        if (four[1] > 0 && __builtin_add_overflow(a.offset, four[1] - 1, &position))
            return rafter_fail(context, bad, "offset is %lld: the positions of %lld tokens from there on pass 63 bits",
                               (long long)a.offset, (long long)four[1]);
    }
    RAFTER_TRY((direction == RAFTER_FORWARD ? check_y : check_gradients)(context, &a, doubled, call));
    add_heads(x);
    add_heads(&call->y);
    add_heads(&call->dy);
    add_heads(&call->dx);
    /* dtheta of an empty x is a sum over nothing: zeros are still written. */
    call->common.empty = x->numel == 0 && call->dtheta.numel == 0;
    return RAFTER_OK;
}

/* ---- entry points ---------------------------------------------------------------------------- */

rafter_status rafter_lrpe_cosine_forward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    struct lrpe_cosine_call call;
    RAFTER_TRY(check(context, args, RAFTER_FORWARD, &call));
    return rafter_run(context, &rafter_op_lrpe_cosine, &call.common);
}

rafter_status rafter_lrpe_cosine_backward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    struct lrpe_cosine_call call;
    RAFTER_TRY(check(context, args, RAFTER_BACKWARD, &call));
    return rafter_run(context, &rafter_op_lrpe_cosine, &call.common);
}

rafter_status rafter_lrpe_cosine_workspace(rafter_context *context, const rafter_lrpe_cosine_args *args,
                                           rafter_direction direction, size_t *bytes) {
    struct lrpe_cosine_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    return rafter_ask_workspace(context, &rafter_op_lrpe_cosine, &call.common, bytes);
}
