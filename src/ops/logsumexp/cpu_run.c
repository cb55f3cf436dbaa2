/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp on the CPU. A call is brought into the form [outer ..., lines, length], the same for all of its tensors,
 * with one lse per line. A block is some neighbouring lines, or parts of them; a task is some blocks. All of that
 * follows from shapes and strides alone, so that results do not depend on the number of threads.
 */
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
        plan->stream = plan->dx.data != plan->x.data &&
                       rafter_should_stream(&plan->dx, (struct shortest_streamed){.of_others = 6 << 10});
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
