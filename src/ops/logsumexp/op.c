/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp: checks, calls over ranks, and entry points. cpu_run.c runs it on the CPU. If `dim` is spread over ranks,
 * each rank computes the lse of its part in fp32, as a call without the group. The ranks gather these, and each merges
 * them in the same order.
 */
#include <math.h>
#include <stdlib.h>

#include "core/backend.h"
#include "core/sizes.h"
#include "ops/logsumexp/call.h"
#include "ops/logsumexp/kernels.h"

/* ---- checks ---------------------------------------------------------------------------------- */

/* Gives a view a dimension of size 1 at `dim`. */
static void insert_dim(rafter_view *view, int dim) {
    rafter_collapse(&view, 1, dim, dim);
}

/* lse, rounded or dlse: the shape of x with `dim` dropped or of size 1. In the view it has size 1. */
static rafter_status take_reduced(rafter_context *context, const char *name, const DLTensor *tensor, bool output,
                                  unsigned dtypes, const rafter_view *x, int dim, rafter_view *view) {
    RAFTER_TRY((output ? rafter_take_output : rafter_take_tensor)(context, name, tensor, dtypes, view));
    int64_t kept[RAFTER_VIEW_DIMS], dropped[RAFTER_VIEW_DIMS];
    for (int d = 0, n = 0; d < x->ndim; d++) {
        kept[d] = d == dim ? 1 : x->shape[d];
        if (d != dim)
            dropped[n++] = x->shape[d];
    }
    if (view->ndim == x->ndim)
        return rafter_want_shape(context, name, view, x->ndim, kept);
    RAFTER_TRY(rafter_want_shape(context, name, view, x->ndim - 1, dropped));
    insert_dim(view, dim);
    return RAFTER_OK;
}

static rafter_status want_same_strides(rafter_context *context, const rafter_view *rounded, const rafter_view *lse) {
    for (int d = 0; d < lse->ndim; d++)
        if (lse->shape[d] > 1 && rounded->stride[d] != lse->stride[d])
            return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                               "rounded has another layout than lse: a stride of %lld where lse has %lld",
                               (long long)rounded->stride[d], (long long)lse->stride[d]);
    return RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_logsumexp_args *args, rafter_direction direction,
                           struct logsumexp_call *call) {
    rafter_logsumexp_args a;
    RAFTER_TRY(rafter_begin_call(context, "rafter_logsumexp_args", args, &a, sizeof a, direction));
    if ((int)a.algorithm < RAFTER_LOGSUMEXP_AUTO || a.algorithm > RAFTER_LOGSUMEXP_RECURRENCE)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "algorithm is %d, wanted 0 (auto), 1 (parallel) or 2 (recurrence)", (int)a.algorithm);
    *call = (struct logsumexp_call){.common = {.direction = direction,
                                               .batch_invariant = context->batch_invariant,
                                               .workspace = a.workspace,
                                               .workspace_bytes = a.workspace_bytes},
                                    .algorithm = a.algorithm};
    const bool backward = direction == RAFTER_BACKWARD;
    RAFTER_TRY(rafter_group_take(context, "group", a.group, false, &call->group));
    if (a.group && backward)
        return rafter_fail(context, RAFTER_UNSUPPORTED,
                           "group is given to backward, which needs nothing of other ranks, wanted NULL");
    rafter_view *const x = &call->x, *const lse = &call->lse, *const rounded = &call->rounded,
                       *const dlse = &call->dlse, *const dx = &call->dx;
    RAFTER_TRY(rafter_take_tensor(context, "x", a.x, RAFTER_FLOATS, x));
    RAFTER_TRY(rafter_take_dim(context, a.dim, x->ndim, &call->dim));
    if (backward) {
        RAFTER_TRY(rafter_take_output(context, "dx", a.dx, RAFTER_FLOATS, dx));
        RAFTER_TRY(rafter_want_same_dtype(context, "dx", dx, "x", x));
        RAFTER_TRY(rafter_want_same_shape(context, "dx", dx, "x", x));
    }
    if (x->ndim == 0) { /* a scalar is a line of one element */
        insert_dim(x, 0);
        insert_dim(dx, 0);
    }
    const unsigned own = RAFTER_SET(x->dtype), dtypes = RAFTER_SET(RAFTER_F32) | own;
    RAFTER_TRY(take_reduced(context, "lse", a.lse, !backward, dtypes, x, call->dim, lse));
    call->common.empty = backward ? dx->numel == 0 : lse->numel == 0 && !a.group;
    if (!backward) {
        RAFTER_TRY(rafter_want_disjoint(context, "lse", lse, "x", x));
        if (!a.rounded)
            return RAFTER_OK;
        RAFTER_TRY(take_reduced(context, "rounded", a.rounded, true, own, x, call->dim, rounded));
        RAFTER_TRY(want_same_strides(context, rounded, lse));
        RAFTER_TRY(rafter_want_disjoint(context, "rounded", rounded, "x", x));
        return rafter_want_disjoint(context, "rounded", rounded, "lse", lse);
    }
    RAFTER_TRY(take_reduced(context, "dlse", a.dlse, false, dtypes, x, call->dim, dlse));
    if (!rafter_same_memory(dx, x))
        RAFTER_TRY(rafter_want_disjoint(context, "dx", dx, "x", x));
    RAFTER_TRY(rafter_want_disjoint(context, "dx", dx, "lse", lse));
    return rafter_want_disjoint(context, "dx", dx, "dlse", dlse);
}

/* ---- over ranks ------------------------------------------------------------------------------ */

/* The call for this rank's part of dim. Its lse, at `own`, is fp32 and row-major, so that all ranks
 * have the lines in the same order. */
static struct logsumexp_call part_of(const struct logsumexp_call *call, void *own) {
    struct logsumexp_call part = *call;
    rafter_view *const lse = &part.lse;
    int64_t step = 1;
    for (int d = lse->ndim - 1; d >= 0; d--) {
        lse->stride[d] = lse->shape[d] > 1 ? step : 0;
        step *= lse->shape[d];
    }
    lse->dtype = RAFTER_F32;
    lse->data = own;
    part.rounded = (rafter_view){0};
    part.group = (rafter_communicator){0};
    part.common.empty = lse->numel == 0;
    part.common.workspace = NULL;
    part.common.workspace_bytes = 0;
    return part;
}

/* The workspace of a call over ranks: `sent` numbers of this rank, those of all ranks, and then the
 * workspace of the part's own call. On CUDA a hash of the call follows the lines: see core/backend.h. */
struct rank_bytes {
    int64_t sent;
    size_t exchange, part;
};

static rafter_status plan_over_ranks(rafter_context *context, const struct logsumexp_call *call,
                                     struct rank_bytes *bytes) {
    static char somewhere[RAFTER_SCRATCH_ALIGNMENT] __attribute__((aligned(RAFTER_SCRATCH_ALIGNMENT)));
    const struct logsumexp_call part = part_of(call, somewhere);
    bytes->sent = call->lse.numel + (context->cuda ? 1 : 0);
    const int64_t numbers = bytes->sent * (1 + (int64_t)call->group.ranks);
    bytes->exchange = (size_t)round_up(numbers * (int64_t)sizeof(float), RAFTER_SCRATCH_ALIGNMENT);
    return rafter_ask_workspace(context, &rafter_op_logsumexp, &part.common, &bytes->part);
}

static rafter_status agree(rafter_context *context, const struct logsumexp_call *call) {
    const double term[RAFTER_MOST_TERMS] = {RAFTER_OP_INDEX_logsumexp, call->x.dtype, (double)call->lse.numel};
    static const char *const names[RAFTER_MOST_TERMS] = {"the op", "the dtype", "the number of lines"};
    struct rafter_tender *const all = malloc((size_t)call->group.ranks * sizeof *all);
    if (!all)
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for what %d ranks say of their calls",
                           (int)call->group.ranks);
    const rafter_status status = rafter_group_agree(context, "group", &call->group, RAFTER_OK, term, names, all);
    free(all);
    return status;
}

/* Writes the call's lse and rounded, from those of all ranks. */
static rafter_status merge_ranks(rafter_context *context, const struct logsumexp_call *call, const float *all) {
    const struct logsumexp_kernels *const kernels = context->plan.variant->kernels; /* of the part's call */
    const rafter_view *const to = &call->lse, *const rounded = &call->rounded;
    const int ranks = call->group.ranks;
    float *const statistics = malloc((size_t)ranks * 2 * sizeof *statistics);
    if (!statistics)
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for %d ranks", ranks);
    for (int64_t line = 0; line < to->numel; line++) {
        for (int r = 0; r < ranks; r++) {
            const float lse = all[r * to->numel + line];
            statistics[2 * r] = isnan(lse) ? 0.0f : lse;
            statistics[2 * r + 1] = isnan(lse) ? NAN : lse == -INFINITY ? 0.0f : 1.0f;
        }
        const int64_t at = rafter_offset(to, 0, to->ndim, line);
        kernels->finish(statistics, ranks, 1, to->dtype, rafter_at(to, at), 1);
        if (rounded->data)
            kernels->finish(statistics, ranks, 1, rounded->dtype, rafter_at(rounded, at), 1);
    }
    free(statistics);
    return RAFTER_OK;
}

static rafter_status exchange(rafter_context *context, const struct logsumexp_call *call, struct rank_bytes bytes,
                              char *workspace) {
    float *const own = (float *)(void *)workspace, *const all = own + bytes.sent;
    struct logsumexp_call part = part_of(call, own);
    part.common.workspace = workspace + bytes.exchange;
    part.common.workspace_bytes = bytes.part;
    if (!context->cuda)
        RAFTER_TRY(agree(context, call));
    if (call->lse.numel == 0)
        return RAFTER_OK;
    RAFTER_TRY(rafter_run(context, &rafter_op_logsumexp, &part.common));
    if (context->cuda)
        RAFTER_TRY(context->cuda->begin_lse(context, call, own));
    RAFTER_TRY(rafter_group_gather(context, "group", &call->group, own, all, (size_t)bytes.sent * sizeof *own));
    return context->cuda ? context->cuda->end_lse(context, call, all) : merge_ranks(context, call, all);
}

static rafter_status run_over_ranks(rafter_context *context, const struct logsumexp_call *call) {
    const struct rafter_call *const common = &call->common;
    struct rank_bytes bytes;
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_want_unused(context, "workspace", common->workspace, common->workspace_bytes));
    RAFTER_TRY(plan_over_ranks(context, call, &bytes));
    RAFTER_TRY(rafter_scratch_take(context, common->workspace, common->workspace_bytes, bytes.exchange + bytes.part,
                                   &scratch));
    const rafter_status status = exchange(context, call, bytes, scratch.memory);
    rafter_scratch_release(context, &scratch);
    return status;
}

/* ---- entry points ---------------------------------------------------------------------------- */

rafter_status rafter_logsumexp_forward(rafter_context *context, const rafter_logsumexp_args *args) {
    struct logsumexp_call call;
    rafter_status status = check(context, args, RAFTER_FORWARD, &call);
    if (status == RAFTER_OK)
        status = rafter_group_has(&call.group) ? run_over_ranks(context, &call)
                                               : rafter_run(context, &rafter_op_logsumexp, &call.common);
    return rafter_group_settle(context, status);
}

rafter_status rafter_logsumexp_backward(rafter_context *context, const rafter_logsumexp_args *args) {
    struct logsumexp_call call;
    RAFTER_TRY(check(context, args, RAFTER_BACKWARD, &call));
    return rafter_run(context, &rafter_op_logsumexp, &call.common);
}

rafter_status rafter_logsumexp_workspace(rafter_context *context, const rafter_logsumexp_args *args,
                                         rafter_direction direction, size_t *bytes) {
    struct logsumexp_call call;
    RAFTER_TRY(check(context, args, direction, &call));
    if (!rafter_group_has(&call.group) || !bytes)
        return rafter_ask_workspace(context, &rafter_op_logsumexp, &call.common, bytes);
    struct rank_bytes over_ranks;
    RAFTER_TRY(plan_over_ranks(context, &call, &over_ranks));
    *bytes = rafter_scratch_request(over_ranks.exchange + over_ranks.part);
    return RAFTER_OK;
}
