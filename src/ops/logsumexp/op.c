/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp: checks, and how work is cut. Every call is brought into the form [outer ..., lines, length], the same for
 * all of its tensors: one lse per line. Blocks are some neighbouring lines, or parts of them; tasks are some blocks.
 * All of that follows from shapes and strides, so that results do not depend on the number of threads.
 */
#include "core/backend.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "core/variants.h"
#include "ops/logsumexp/call.h"
#include "ops/logsumexp/kernels.h"

#define RAFTER_VARIANT(isa) extern const struct logsumexp_kernels RAFTER_PASTE3(rafter_, logsumexp, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, logsumexp, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_logsumexp = {"logsumexp", sizeof variants / sizeof *variants, variants};

enum {
    TASK = 1 << 16,        /* elements that are worth a task */
    ROW_PART = 1 << 14,    /* elements of a part of a line, in rows form ... */
    COLUMN_PART = 1 << 10, /* ... and in columns form, where a part is of many lines */
    FEW_BLOCKS = 64        /* of whole lines: fewer cannot keep many threads busy, and lines are cut into parts */
};

/* ---- checks ---------------------------------------------------------------------------------- */

/* Gives a view a dimension of size 1 at `dim`. */
static void insert_dim(rafter_view *view, int dim) {
    rafter_collapse(&view, 1, dim, dim);
}

/* lse or dlse: x's shape with `dim` dropped or kept as 1; the view has it kept. */
static rafter_status take_reduced(rafter_context *context, const char *name, const DLTensor *tensor, bool output,
                                  const rafter_view *x, int dim, rafter_view *view) {
    const unsigned dtypes = RAFTER_SET(RAFTER_F32) | RAFTER_SET(x->dtype);
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

static rafter_status take(rafter_context *context, const rafter_logsumexp_args *args, rafter_direction direction,
                          struct logsumexp_call *call) {
    rafter_logsumexp_args a;
    RAFTER_TRY(rafter_take_args(context, "rafter_logsumexp_args", args, &a, sizeof a));
    if (direction != RAFTER_FORWARD && direction != RAFTER_BACKWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted 0 (forward) or 1 (backward)",
                           (int)direction);
    if ((int)a.algorithm < RAFTER_LOGSUMEXP_AUTO || a.algorithm > RAFTER_LOGSUMEXP_RECURRENCE)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "algorithm is %d, wanted 0 (auto), 1 (parallel) or 2 (recurrence)", (int)a.algorithm);
    *call = (struct logsumexp_call){.direction = direction,
                                    .algorithm = a.algorithm,
                                    .workspace = a.workspace,
                                    .workspace_bytes = a.workspace_bytes};
    const bool backward = direction == RAFTER_BACKWARD;
    rafter_view *const x = &call->x, *const lse = &call->lse, *const dlse = &call->dlse, *const dx = &call->dx;
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
    RAFTER_TRY(take_reduced(context, "lse", a.lse, !backward, x, call->dim, lse));
    if (!backward)
        return rafter_want_disjoint(context, "lse", lse, "x", x);
    RAFTER_TRY(take_reduced(context, "dlse", a.dlse, false, x, call->dim, dlse));
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
    int line;                   /* the dimension of lines; that of length is the next */
    int64_t lines, length;      /* of a block; the last one along a dimension may be smaller */
    int64_t line_blocks, parts; /* per outer index, and of a line */
    int64_t blocks, per_task;   /* a block is `lines` x `length` */
    size_t statistics;          /* bytes of scratch */
    bool stream;
};

/* Moves `dim` behind all other dimensions, and these into the order of `leader`'s memory, outermost first: transposed
 * tensors are walked as if they were not. */
static void reorder(rafter_view *const views[], int count, const rafter_view *leader, int dim) {
    int order[RAFTER_VIEW_DIMS] = {0}, n = 0;
    for (int d = 0; d < leader->ndim; d++) {
        if (d == dim)
            continue;
        int at = n++;
        /* Stride 0 repeats all that is inside: outermost. */
        for (; at > 0 && leader->stride[order[at - 1]] != 0 &&
               (leader->stride[d] == 0 || leader->stride[order[at - 1]] < leader->stride[d]);
             at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    order[n] = dim;
    for (int v = 0; v < count; v++) {
        const rafter_view old = *views[v];
        for (int d = 0; d < old.ndim; d++) {
            views[v]->shape[d] = old.shape[order[d]];
            views[v]->stride[d] = old.stride[order[d]];
        }
    }
}

static bool adjacent(const rafter_view *view, int dim) {
    return view->stride[dim] == 1 || view->shape[dim] <= 1;
}

static void make_plan(const struct logsumexp_call *call, struct plan *plan) {
    const bool backward = call->direction == RAFTER_BACKWARD;
    *plan = (struct plan){.x = call->x, .lse = call->lse, .dlse = call->dlse, .dx = backward ? call->dx : call->x};
    rafter_view *const views[] = {&plan->x, &plan->lse, &plan->dx, &plan->dlse};
    const int count = backward ? 4 : 3;
    reorder(views, count, &plan->dx, call->dim);
    const int length = rafter_collapse(views, count, 0, plan->x.ndim - 1), line = length - 1;
    const bool along = adjacent(&plan->x, length) && adjacent(&plan->dx, length);
    const bool across = adjacent(&plan->x, line) && adjacent(&plan->dx, line);
    plan->form = across && (!along || plan->x.shape[length] == 1) ? LOGSUMEXP_COLUMNS : LOGSUMEXP_ROWS;
    plan->line = line;

    const int64_t outer = rafter_extent(&plan->x, 0, line);
    const int64_t lines = plan->lse.shape[line], whole = at_least(plan->x.shape[length], 1);
    const bool rows = plan->form == LOGSUMEXP_ROWS;
    plan->lines =
        at_most(lines, rows ? at_most(at_least(TASK / whole, 1), LOGSUMEXP_MOST_LINES) : LOGSUMEXP_MOST_LINES);
    plan->line_blocks = plan->lines ? ceil_div(lines, plan->lines) : 0;

    /* The gradient may be cut anywhere; a sum only where its parts are merged again. */
    const bool few = outer * plan->line_blocks < FEW_BLOCKS;
    const bool cut =
        backward || call->algorithm == RAFTER_LOGSUMEXP_PARALLEL || (call->algorithm == RAFTER_LOGSUMEXP_AUTO && few);
    const int64_t part = backward ? at_least(TASK / at_least(plan->lines, 1), 1) : rows ? ROW_PART : COLUMN_PART;
    plan->length = cut ? at_most(whole, part) : whole;
    plan->parts = ceil_div(whole, plan->length);
    plan->blocks = outer * plan->line_blocks * plan->parts;
    plan->per_task = at_least(TASK / at_least(plan->lines * plan->length, 1), 1);
    if (!backward && plan->parts > 1)
        plan->statistics = (size_t)(plan->blocks * 2 * plan->lines) * sizeof(float);
    if (backward) {
        const int64_t span = rafter_offset(&plan->dx, 0, plan->dx.ndim, at_least(plan->dx.numel - 1, 0)) + 1;
        plan->stream = plan->dx.data != plan->x.data && rafter_should_stream(span * rafter_dtype_bytes(plan->dx.dtype));
    }
}

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
        .lines = at_most(plan->lines, lse->shape[l] - line),
        .length = at_most(plan->length, x->shape[s] - from),
        .x = rafter_at(x, offset_of(x, plan, outer, line) + from * x->stride[s]),
        .x_line = x->stride[l],
        .x_step = x->stride[s],
        .lse = rafter_at(lse, offset_of(lse, plan, outer, line)),
        .lse_line = lse->stride[l],
        .lse_dtype = lse->dtype,
    };
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
}

static int64_t task_end(const struct plan *plan, int64_t task, int64_t blocks) {
    return at_most((task + 1) * plan->per_task, blocks);
}

static void lines_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    for (int64_t b = task * plan->per_task; b < task_end(plan, task, plan->blocks); b++) {
        const struct logsumexp_block block = block_at(plan, b);
        float statistics[2 * LOGSUMEXP_MOST_LINES];
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

static bool needs_nothing(const struct logsumexp_call *call) {
    return call->direction == RAFTER_BACKWARD ? call->dx.numel == 0 : call->lse.numel == 0;
}

static rafter_status run(rafter_context *context, const rafter_logsumexp_args *args, rafter_direction direction) {
    struct logsumexp_call call;
    RAFTER_TRY(take(context, args, direction, &call));
    const bool backward = direction == RAFTER_BACKWARD;
    if (needs_nothing(&call))
        return RAFTER_OK;
    if (context->cuda)
        return context->cuda->logsumexp(context, &call);

    struct plan plan;
    make_plan(&call, &plan);
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_scratch_take(context, call.workspace, call.workspace_bytes, plan.statistics, &scratch));
    struct work work = {.plan = &plan,
                        .kernels = rafter_pick(context, &rafter_op_logsumexp)->kernels,
                        .statistics = (float *)(void *)scratch.memory};
    const int64_t tasks = ceil_div(plan.blocks, plan.per_task);
    if (backward) {
        rafter_parallel(context, tasks, gradient_task, &work);
    } else if (plan.parts == 1) {
        rafter_parallel(context, tasks, lines_task, &work);
    } else {
        rafter_parallel(context, tasks, parts_task, &work);
        rafter_parallel(context, ceil_div(plan.blocks / plan.parts, plan.per_task), merge_task, &work);
    }
    rafter_scratch_release(context, &scratch);
    return RAFTER_OK;
}

rafter_status rafter_logsumexp_forward(rafter_context *context, const rafter_logsumexp_args *args) {
    return run(context, args, RAFTER_FORWARD);
}

rafter_status rafter_logsumexp_backward(rafter_context *context, const rafter_logsumexp_args *args) {
    return run(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_logsumexp_workspace(rafter_context *context, const rafter_logsumexp_args *args,
                                         rafter_direction direction, size_t *bytes) {
    struct logsumexp_call call;
    RAFTER_TRY(take(context, args, direction, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    *bytes = 0;
    if (needs_nothing(&call))
        return RAFTER_OK;
    if (context->cuda) {
        call.ask = bytes;
        return context->cuda->logsumexp(context, &call);
    }
    struct plan plan;
    make_plan(&call, &plan);
    *bytes = rafter_scratch_request(plan.statistics);
    return RAFTER_OK;
}
