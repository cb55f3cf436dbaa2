/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp: checks, and the CPU plan. A call is brought into the form [outer ..., lines, length],
 * the same for all of its tensors, with one lse per line. A block is some neighbouring lines, or
 * parts of them; a task is some blocks. All of that follows from shapes and strides alone, so that
 * results do not depend on the number of threads. If `dim` is spread over ranks, each rank computes
 * the lse of its part in fp32, as a call without the group. The ranks gather these, and each merges
 * them in the same order.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/kernel_memory.h"
#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/logsumexp/call.h"
#include "ops/logsumexp/kernels.h"

enum {
    ROW_PART = 1 << 14,    /* elements per part of a split line, in rows form */
    COLUMN_PART = 1 << 10, /* the same in columns form, where a part covers many lines */
    FEW_BLOCKS = 64        /* with fewer blocks than this, lines are split to keep all threads busy */
};

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

/* ---- plan ------------------------------------------------------------------------------------ */

/* The call's views as [outer ..., lines, length], and how that is cut. */
struct plan {
    enum logsumexp_form form;
    rafter_view x, lse, dlse, dx;
    char *rounded;              /* as lse, in x's dtype; or NULL */
    int line;                   /* the dimension of the lines; the next one is the length */
    int64_t lines, length;      /* of a block; the last block along a dimension may be smaller */
    int64_t line_blocks, parts; /* blocks of lines per outer index; parts of a line */
    int64_t blocks, per_task;   /* blocks in all; blocks per task */
    bool stream;                /* dx is written past the caches */
};

static bool adjacent(const rafter_view *view, int dim) {
    return view->stride[dim] == 1 || view->shape[dim] <= 1;
}

/* Returns the bytes of workspace: the statistics of split lines. */
static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    (void)context;
    const struct logsumexp_call *const call = (const void *)common;
    struct plan *const plan = storage;
    const bool backward = common->direction == RAFTER_BACKWARD;
    *plan = (struct plan){.x = call->x,
                          .lse = call->lse,
                          .rounded = call->rounded.data,
                          .dlse = call->dlse,
                          .dx = backward ? call->dx : call->x};
    rafter_view *const views[] = {&plan->x, &plan->lse, &plan->dx, &plan->dlse};
    const int count = backward ? 4 : 3;
    /* `dim` last, the other dimensions in the order of dx's memory: a transposed tensor is walked
     * like any other. */
    rafter_move_dim_last(views, count, call->dim);
    rafter_order_by_stride(views, count, &plan->dx, plan->dx.ndim - 1);
    const int length = rafter_collapse(views, count, 0, plan->x.ndim - 1), line = length - 1;
    const bool along = adjacent(&plan->x, length) && adjacent(&plan->dx, length);
    const bool across = adjacent(&plan->x, line) && adjacent(&plan->dx, line);
    plan->form = across && (!along || plan->x.shape[length] == 1) ? LOGSUMEXP_COLUMNS : LOGSUMEXP_ROWS;
    plan->line = line;

    const int64_t outer = rafter_extent(&plan->x, 0, line);
    const int64_t lines = plan->lse.shape[line], whole = max64(plan->x.shape[length], 1);
    const int64_t task = rafter_task_elements(plan->x.numel);
    const bool rows = plan->form == LOGSUMEXP_ROWS;
    plan->lines = min64(lines, rows ? min64(max64(task / whole, 1), LOGSUMEXP_MOST_LINES) : LOGSUMEXP_MOST_LINES);
    /* A block of all lines may be treated as fewer, wider rows (rows_side_by_side in cpu.c). With one line less it
     * never is, so that a line's bits do not depend on the number of lines. */
    if (call->common.batch_invariant && !rows)
        plan->lines = min64(plan->lines, max64(plan->x.stride[length] - 1, 1));
    plan->line_blocks = plan->lines ? ceil_div(lines, plan->lines) : 0;

    /* The gradient may be cut anywhere; a sum only where its parts are merged again. */
    const bool few = outer * plan->line_blocks < FEW_BLOCKS && !call->common.batch_invariant;
    const bool cut =
        backward || call->algorithm == RAFTER_LOGSUMEXP_PARALLEL || (call->algorithm == RAFTER_LOGSUMEXP_AUTO && few);
    const int64_t part = backward ? max64(task / max64(plan->lines, 1), 1) : rows ? ROW_PART : COLUMN_PART;
    plan->length = cut ? min64(whole, part) : whole;
    plan->parts = ceil_div(whole, plan->length);
    plan->blocks = outer * plan->line_blocks * plan->parts;
    plan->per_task = max64(task / max64(plan->lines * plan->length, 1), 1);
    if (backward)
        plan->stream =
            plan->dx.data != plan->x.data && rafter_should_stream(plan->dx.data, rafter_span_bytes(&plan->dx));
    return !backward && plan->parts > 1 ? (size_t)(plan->blocks * 2 * plan->lines) * sizeof(float) : 0;
}
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

/* ---- running --------------------------------------------------------------------------------- */

struct work {
    const struct plan *plan;
    const struct logsumexp_kernels *kernels;
    float *statistics; /* of parts of lines, block by block */
};

static int64_t offset_of(const rafter_view *view, const struct plan *plan, int64_t outer, int64_t line) {
    return rafter_offset(view, 0, plan->line, outer) + line * view->stride[plan->line];
}

/* Block number `index`: parts follow one another, then groups of lines, then outer indices. */
static struct logsumexp_block block_at(const struct plan *plan, int64_t index) {
    const int64_t part = index % plan->parts, group = index / plan->parts;
    const int64_t outer = group / plan->line_blocks, line = group % plan->line_blocks * plan->lines;
    const int64_t from = part * plan->length;
    const int l = plan->line, s = l + 1;
    const rafter_view *const x = &plan->x, *const dx = &plan->dx, *const lse = &plan->lse, *const dlse = &plan->dlse;
    struct logsumexp_block block = {
        .dtype = x->dtype,
        .lines = min64(plan->lines, lse->shape[l] - line),
        .length = min64(plan->length, x->shape[s] - from),
        .x = rafter_at(x, offset_of(x, plan, outer, line) + from * x->stride[s]),
        .x_line = x->stride[l],
        .x_step = x->stride[s],
        .lse = rafter_at(lse, offset_of(lse, plan, outer, line)),
        .lse_line = lse->stride[l],
        .lse_dtype = lse->dtype,
    };
    if (plan->rounded)
        block.rounded = plan->rounded + offset_of(lse, plan, outer, line) * rafter_dtype_bytes(x->dtype);
    if (dlse->data) {
        block.dx = rafter_at(dx, offset_of(dx, plan, outer, line) + from * dx->stride[s]);
        block.dx_line = dx->stride[l];
        block.dx_step = dx->stride[s];
        block.stream = plan->stream;
        block.dlse = rafter_at(dlse, offset_of(dlse, plan, outer, line));
        block.dlse_line = dlse->stride[l];
        block.dlse_dtype = dlse->dtype;
    }
    return block;
}

static void finish(const struct work *work, const struct logsumexp_block *block, const float *statistics,
                   int64_t parts) {
    work->kernels->finish(statistics, parts, block->lines, block->lse_dtype, (char *)block->lse, block->lse_line);
    if (block->rounded)
        work->kernels->finish(statistics, parts, block->lines, block->dtype, block->rounded, block->lse_line);
}

static int64_t task_end(const struct plan *plan, int64_t task, int64_t blocks) {
    return min64((task + 1) * plan->per_task, blocks);
}

static void lines_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    for (int64_t b = task * plan->per_task; b < task_end(plan, task, plan->blocks); b++) {
        const struct logsumexp_block block = block_at(plan, b);
        float *const statistics = rafter_task_memory();
        _Static_assert(2 * LOGSUMEXP_MOST_LINES * sizeof *statistics <= RAFTER_TASK_BYTES, "raise RAFTER_TASK_BYTES");
        work->kernels->statistics[plan->form](&block, statistics);
        finish(work, &block, statistics, 1);
    }
}

static void parts_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    for (int64_t b = task * plan->per_task; b < task_end(plan, task, plan->blocks); b++) {
        const struct logsumexp_block block = block_at(plan, b);
        float *const group = work->statistics + b / plan->parts * plan->parts * 2 * plan->lines;
        work->kernels->statistics[plan->form](&block, group + b % plan->parts * 2 * block.lines);
    }
}

static void merge_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    const int64_t groups = plan->blocks / plan->parts;
    for (int64_t g = task * plan->per_task; g < task_end(plan, task, groups); g++) {
        const struct logsumexp_block block = block_at(plan, g * plan->parts);
        finish(work, &block, work->statistics + g * plan->parts * 2 * plan->lines, plan->parts);
    }
}

static void gradient_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    for (int64_t b = task * plan->per_task; b < task_end(plan, task, plan->blocks); b++) {
        const struct logsumexp_block block = block_at(plan, b);
        work->kernels->gradient[plan->form](&block);
    }
}

static rafter_status run(rafter_context *context, const struct rafter_call *call, const void *plan_storage,
                         const void *kernels, char *workspace) {
    const struct plan *const plan = plan_storage;
    struct work work = {.plan = plan, .kernels = kernels, .statistics = (float *)(void *)workspace};
    const int64_t tasks = ceil_div(plan->blocks, plan->per_task);
    if (call->direction == RAFTER_BACKWARD) {
        rafter_parallel(context, tasks, gradient_task, &work);
    } else if (plan->parts == 1) {
        rafter_parallel(context, tasks, lines_task, &work);
    } else {
        rafter_parallel(context, tasks, parts_task, &work);
        rafter_parallel(context, ceil_div(plan->blocks / plan->parts, plan->per_task), merge_task, &work);
    }
    return RAFTER_OK;
}

const struct rafter_variant_functions rafter_logsumexp_on_cpu = {NULL, make_plan, run};

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
