/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act on the CPU. A call is brought into the form of a grid, outer x rows x columns elements, the same for all of its
 * tensors. The grid is cut into blocks of rows x columns, and a kernel takes one block at a time. Elementwise kinds may
 * be cut anywhere. The lines of softmax are the rows of the grid if their elements are adjacent in memory, and its
 * columns if the lines are adjacent. They stay whole unless there are too few of them to keep all threads busy. If the
 * input of forward, or dy, has lines in the other form than the output, it is copied to the output first, and the call
 * goes on in place. All of that follows from shapes and strides alone, so that results do not depend on the number of
 * threads.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/act/call.h"
#include "ops/act/kernels.h"
#include "simd/simd.h"

enum {
    TILES_ROWS = 64,      /* rows and columns of a block if some tensor is transposed relative to the output: */
    TILES_COLUMNS = 1024, /* several of the kernel's tiles in both directions */
    FEW_LINES = 4,        /* with fewer lines than this, a dy that repeats one element is copied in full */
    LINE_BYTES = 64,      /* of a cache line */
    FEW_BLOCKS = 8,       /* with fewer blocks than this, lines are split into parts, */
    ENOUGH_BLOCKS = 64,   /* so that there are about this many blocks */
    PART_MULTIPLE = 64    /* elements of a part are a multiple of this: parts keep the alignment of the line */
};

/* ---- plan ------------------------------------------------------------------------------------ */

/* The tensors as views of [outer ..., rows, columns], and how that grid is cut. */
struct plan {
    rafter_view view[ACT_TENSORS];
    int row, column;        /* the two dimensions that blocks have; those before them are outer */
    bool softmax, is_short; /* is_short: rows for the whole_rows kernels */
    bool few_rows;          /* for the kernels of that name */
    bool stream;            /* the output is written past the caches */
    bool copied;            /* the input, or dy, is copied to the output first */
    bool repeated;          /* dy is one element: a line of it is made in the workspace */
    enum act_form form;
    int64_t rows, columns;             /* of a block; the last block along a dimension may be smaller */
    int64_t row_blocks, column_blocks; /* per outer index */
    int64_t blocks, per_task;          /* blocks in all; blocks per task */
    int64_t lines, parts;              /* softmax: lines of a block; parts of a line */
    int64_t inner;                     /* of rows that are several lines: see act_block */
    size_t statistics;                 /* bytes of the workspace; the line of dy, if `repeated`, comes after them */
};

/* The tensors that the call has. Their dimensions are reordered and merged alike. */
struct used {
    rafter_view *view[ACT_TENSORS];
    int count;
};

static bool view_adjacent(const rafter_view *view, int dim) {
    return view->stride[dim] == 1 || view->shape[dim] == 1;
}

static bool adjacent(const struct used *used, int dim) {
    bool all = true;
    for (int v = 0; v < used->count; v++)
        all &= view_adjacent(used->view[v], dim);
    return all;
}

static void swap_dims(const struct used *used, int a, int b) {
    for (int v = 0; v < used->count; v++) {
        rafter_view *const view = used->view[v];
        const int64_t shape = view->shape[a], stride = view->stride[a];
        view->shape[a] = view->shape[b], view->stride[a] = view->stride[b];
        view->shape[b] = shape, view->stride[b] = stride;
    }
}

/* Elementwise kinds: if some tensor is contiguous in another dimension than the columns, makes that
 * dimension the rows, so that the kernel can transpose tiles. */
static void find_rows(const struct plan *plan, const struct used *used) {
    for (int v = 0; v < used->count; v++)
        for (int d = 0; d < plan->row && !view_adjacent(used->view[v], plan->column); d++)
            if (used->view[v]->stride[d] == 1 && used->view[v]->shape[d] > 1) {
                swap_dims(used, d, plan->row);
                return;
            }
}

/* Whether some tensor is contiguous along the rows instead of the columns. */
static bool lies_across(const struct plan *plan, const struct used *used) {
    bool across = false;
    for (int v = 0; v < used->count; v++)
        across |= !view_adjacent(used->view[v], plan->column) && used->view[v]->stride[plan->row] == 1;
    return across;
}

/* Brings the views into the form of the grid. Dimensions are put in the order of the output's memory,
 * so that a transposed tensor is walked like any other. With `as_called` they stay in the order of
 * the call, and lines are rows. The form of softmax follows from the layout of `fixed`, the tensors
 * that cannot be copied to the output. */
static void arrange(struct plan *plan, const struct used *used, const struct used *fixed, int dim, bool as_called) {
    const rafter_view *const out = &plan->view[ACT_OUT];
    if (!plan->softmax) {
        rafter_order_by_stride(used->view, used->count, out, out->ndim);
        if (rafter_collapse(used->view, used->count, 0, out->ndim) == 1)
            rafter_collapse(used->view, used->count, 0, 0); /* one row */
    } else {
        if (out->ndim == 0)
            rafter_collapse(used->view, used->count, 0, 0); /* a scalar is a line of one element */
        rafter_move_dim_last(used->view, used->count, dim);
        if (!as_called)
            rafter_order_by_stride(used->view, used->count, out, out->ndim - 1);
        const int line = rafter_collapse(used->view, used->count, 0, out->ndim - 1);
        plan->form = !as_called && !adjacent(fixed, line) && adjacent(fixed, line - 1) ? ACT_COLUMNS : ACT_ROWS;
        if (plan->form == ACT_COLUMNS)
            rafter_move_dim_last(used->view, used->count, line - 1);
    }
    plan->row = out->ndim - 2;
    plan->column = out->ndim - 1;
    if (!plan->softmax)
        find_rows(plan, used);
}

static bool repeats_one_element(const rafter_view *view) {
    bool all = true;
    for (int d = 0; d < view->ndim; d++)
        all &= view->stride[d] == 0 || view->shape[d] == 1;
    return all;
}

/* Softmax: arranges the views. If only `movable` (the input of forward, or dy) does not fit the form
 * of the others, its view becomes that of the output: it is copied there first or, if it repeats one
 * element, a line of it is made in the workspace. */
static void arrange_softmax(struct plan *plan, const struct used *used, int movable, int dim) {
    struct plan trial = *plan;
    struct used trial_used = {.count = 0}, trial_fixed = {.count = 0}, fixed = {.count = 0};
    for (int t = 0; t < ACT_TENSORS; t++) {
        if (!plan->view[t].data)
            continue;
        trial_used.view[trial_used.count++] = &trial.view[t];
        if (t != movable) {
            trial_fixed.view[trial_fixed.count++] = &trial.view[t];
            fixed.view[fixed.count++] = &plan->view[t];
        }
    }
    arrange(&trial, &trial_used, &trial_fixed, dim, false);
    if (adjacent(&trial_used, trial.column) || !adjacent(&trial_fixed, trial.column)) {
        arrange(plan, used, &fixed, dim, false);
        return;
    }
    const bool one = repeats_one_element(&plan->view[movable]);
    arrange(plan, &fixed, &fixed, dim, false);
    const rafter_view *const out = &plan->view[ACT_OUT];
    plan->repeated = one && movable == ACT_DY && out->numel / out->shape[plan->column] >= FEW_LINES;
    plan->copied = !plan->repeated;
    plan->view[movable] = *out;
}

/* Makes each block of a few columns one row of several lines, if blocks are small, and contiguous in
 * every tensor: see ACT_JOINED. */
static void join_lines(struct plan *plan, const struct used *used) {
    const rafter_view *const out = &plan->view[ACT_OUT];
    const int row = plan->row, column = plan->column;
    const int64_t columns = out->shape[column], n = out->shape[row] * columns;
    const bool forward = used->count == 2;
    bool packed = row > 0 && columns < ACT_JOINED_COLUMNS && n <= (forward ? ACT_JOINED : ACT_JOINED_BACKWARD);
    for (int v = 0; v < used->count; v++)
        packed &= used->view[v]->stride[row] == columns && used->view[v]->stride[column] == 1;
    if (!packed || out->numel / n < ACT_JOINED_BLOCKS)
        return;
    for (int v = 0; v < used->count; v++) {
        used->view[v]->shape[row] = n;
        used->view[v]->stride[row] = 1;
        used->view[v]->ndim--;
    }
    plan->inner = columns;
    plan->form = ACT_ROWS;
    plan->row--;
    plan->column--;
}

/* How many columns a block of softmax along columns has: all of them, because memory is read fastest
 * in sequence; if they are too many, equal shares of whole cache lines. */
static int64_t columns_per_block(int64_t columns, int64_t bytes) {
    const int64_t shares = ceil_div(columns, ACT_MOST_LINES);
    return min64(columns, round_up(ceil_div(columns, shares), LINE_BYTES / bytes));
}

/* Cuts the grid into blocks. Returns the bytes of workspace: the statistics of split lines. */
static size_t cut(struct plan *plan, const struct used *used, bool batch_invariant) {
    const rafter_view *const out = &plan->view[ACT_OUT];
    const int64_t rows = out->shape[plan->row], columns = out->shape[plan->column];
    const int64_t outer = rafter_extent(out, 0, plan->row), bytes = rafter_dtype_bytes(out->dtype);
    const int64_t task = rafter_task_elements(out->numel);
    const bool by_rows = plan->form == ACT_ROWS;
    size_t statistics = 0;
    if (!plan->softmax && lies_across(plan, used)) {
        plan->columns = min64(columns, TILES_COLUMNS);
        plan->rows = min64(rows, TILES_ROWS);
    } else if (!plan->softmax) {
        plan->columns = min64(columns, task);
        plan->rows = min64(rows, max64(task / columns, 1));
    } else if (by_rows) {
        plan->columns = columns;
        plan->is_short = columns + ACT_SHORT_MARGIN <= ACT_SHORT && adjacent(used, plan->column);
        plan->rows =
            min64(rows, max64(plan->is_short ? task / columns : ACT_ROWS_BLOCK / (columns + ACT_SHORT_MARGIN), 1));
    } else if (rows <= ACT_FEW_ROWS) {
        plan->few_rows = true;
        plan->columns = min64(columns, round_up(max64(task / rows, 1), LINE_BYTES / bytes));
        plan->rows = rows;
    } else {
        plan->columns = columns_per_block(columns, bytes);
        plan->rows = rows;
        /* The kernel treats several rows as one if a block has all columns. With one column less it never does,
         * so that a line's bits do not depend on the number of lines. */
        if (batch_invariant)
            plan->columns = min64(plan->columns, max64(out->stride[plan->row] - 1, 1));
    }
    plan->parts = 1;
    plan->lines = by_rows ? plan->rows : plan->columns;
    const int64_t units = outer * ceil_div(rows, plan->rows) * ceil_div(columns, plan->columns);
    const int64_t parts = min64(ceil_div(ENOUGH_BLOCKS, units), plan->rows * plan->columns / task);
    if (plan->softmax && !plan->few_rows && units < FEW_BLOCKS && parts > 1 && !batch_invariant) {
        int64_t *const length = by_rows ? &plan->columns : &plan->rows;
        const int64_t whole = *length;
        *length = round_up(ceil_div(whole, parts), PART_MULTIPLE);
        plan->parts = ceil_div(whole, *length);
        statistics = (size_t)(units * plan->parts * ACT_STATISTICS * plan->lines) * sizeof(float);
    }
    plan->row_blocks = ceil_div(rows, plan->rows);
    plan->column_blocks = ceil_div(columns, plan->columns);
    plan->blocks = outer * plan->row_blocks * plan->column_blocks;
    plan->per_task = max64(task / (plan->rows * plan->columns), 1);
    return statistics;
}

static int64_t lines_of(const struct act_call *call) {
    int64_t lines = 1;
    for (int d = 0; d < call->out.ndim; d++)
        lines *= d == call->dim ? 1 : call->out.shape[d];
    return lines;
}

/* The plan of a softmax over ranks: a block is one line, and lines are numbered in the order of the
 * call, which all ranks share. Returns the bytes of their statistics: this rank's, then those of all
 * ranks. */
static size_t plan_over_ranks(const struct act_call *call, const struct used *used, struct plan *plan) {
    if (call->out.numel > 0) {
        arrange(plan, used, used, call->dim, true);
        plan->rows = 1;
        plan->row_blocks = plan->view[ACT_OUT].shape[plan->row];
        plan->columns = plan->view[ACT_OUT].shape[plan->column];
    }
    return (size_t)(lines_of(call) * ACT_STATISTICS * (1 + (int64_t)call->group.ranks)) * sizeof(float);
}

static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    (void)context;
    const struct act_call *const call = (const void *)common;
    struct plan *const plan = storage;
    *plan = (struct plan){.view = {[ACT_IN] = call->in, [ACT_DY] = call->dy, [ACT_OUT] = call->out},
                          .softmax = call->kind == RAFTER_ACT_SOFTMAX};
    const bool forward = common->direction == RAFTER_FORWARD;
    struct used used = {.count = 0};
    for (int t = 0; t < ACT_TENSORS; t++)
        if (plan->view[t].data)
            used.view[used.count++] = &plan->view[t];
    if (rafter_group_has(&call->group))
        return plan_over_ranks(call, &used, plan);
    if (plan->softmax) {
        arrange_softmax(plan, &used, forward ? ACT_IN : ACT_DY, call->dim);
        if (plan->form == ACT_COLUMNS && !common->batch_invariant)
            join_lines(plan, &used);
    } else {
        arrange(plan, &used, &used, 0, false);
    }
    plan->statistics = cut(plan, &used, common->batch_invariant);
    size_t line_bytes = 0;
    if (plan->repeated) {
        rafter_view *const dy = &plan->view[ACT_DY];
        for (int d = 0; d < dy->ndim; d++)
            dy->stride[d] = d == plan->column;
        line_bytes = (size_t)(dy->shape[plan->column] * rafter_dtype_bytes(dy->dtype));
    }

    /* In place, the output's cache lines are already in the cache: streaming would gain nothing.
     * The span counts, not the number of elements: the bench writes a few elements again and
     * again. */
    const rafter_view *const out = &plan->view[ACT_OUT];
    const struct shortest_streamed shortest = {.of_others = call->kind <= RAFTER_ACT_RELU ? 3 << 10 : 6 << 10};
    plan->stream = !call->in_place && !plan->copied &&
                   (uintptr_t)out->data % (uintptr_t)rafter_dtype_bytes(out->dtype) == 0 &&
                   rafter_should_stream(out, shortest);
    return plan->statistics + line_bytes;
}
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

/* ---- running --------------------------------------------------------------------------------- */

struct work {
    const struct act_call *call;
    const struct plan *plan;
    const struct act_kernels *kernels;
    float *statistics; /* of split lines, in units of ACT_STATISTICS * lines * parts */
    char *dy;          /* a line of dy, if it is repeated */
    bool merged;       /* the statistics of parts have been merged: this pass writes the results */
};

/* A unit is the set of lines that would be one block if lines were not split into parts. */
static float *unit_statistics(const struct work *work, int64_t unit) {
    return work->statistics + unit * work->plan->parts * ACT_STATISTICS * work->plan->lines;
}

/* Block number (row, column) of the outer index. */
static struct act_block block_at(const struct work *work, int64_t outer, int64_t row, int64_t column) {
    const struct plan *const plan = work->plan;
    const rafter_view *const out = &plan->view[ACT_OUT];
    struct act_block block = {
        .dtype = out->dtype,
        .kind = work->call->kind,
        .stream = plan->stream,
        .inner = max64(plan->inner, 1),
        .rows = min64(plan->rows, out->shape[plan->row] - row * plan->rows),
        .columns = min64(plan->columns, out->shape[plan->column] - column * plan->columns),
    };
    for (int t = 0; t < ACT_TENSORS; t++) {
        const rafter_view *const view = &plan->view[t];
        if (!view->data)
            continue;
        block.row_stride[t] = view->stride[plan->row];
        block.column_stride[t] = view->stride[plan->column];
        block.data[t] =
            rafter_at(view, rafter_offset(view, 0, plan->row, outer) + row * plan->rows * block.row_stride[t] +
                                column * plan->columns * block.column_stride[t]);
    }
    if (work->dy) /* blocks may begin inside a line */
        block.data[ACT_DY] = work->dy;
    if (work->call->mask) /* the grid is one contiguous row, cut at multiples of a task's elements */
        block.mask = work->call->mask + column * plan->columns / 8;
    return block;
}

/* Block number `index`: blocks along the columns follow one another, then along the rows, then
 * outer indices. */
static void run_block(const struct work *work, int64_t index) {
    const struct plan *const plan = work->plan;
    const struct act_kernels *const kernels = work->kernels;
    const rafter_direction direction = work->call->common.direction;
    const int64_t column = index % plan->column_blocks, rest = index / plan->column_blocks;
    const int64_t row = rest % plan->row_blocks, outer = rest / plan->row_blocks;
    const struct act_block block = block_at(work, outer, row, column);
    if (!plan->softmax) {
        kernels->map[direction](&block);
    } else if (plan->is_short) {
        kernels->whole_rows[direction](&block);
    } else if (plan->few_rows) {
        kernels->few_rows[direction](&block);
    } else if (plan->parts == 1) {
        float statistics[ACT_STATISTICS * ACT_MOST_LINES];
        kernels->statistics[plan->form][direction](&block, statistics);
        kernels->apply[plan->form][direction](&block, statistics);
    } else {
        const bool by_rows = plan->form == ACT_ROWS;
        const int64_t unit = by_rows ? outer * plan->row_blocks + row : outer * plan->column_blocks + column;
        const int64_t part = by_rows ? column : row, lines = by_rows ? block.rows : block.columns;
        float *const statistics = unit_statistics(work, unit);
        if (work->merged)
            kernels->apply[plan->form][direction](&block, statistics);
        else
            kernels->statistics[plan->form][direction](&block, statistics + part * ACT_STATISTICS * lines);
    }
}

/* Merges the statistics of the parts of one unit. */
static void merge_task(void *arg, int64_t unit) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    const int dim = plan->form == ACT_ROWS ? plan->row : plan->column;
    const int64_t per_outer = plan->form == ACT_ROWS ? plan->row_blocks : plan->column_blocks;
    const int64_t lines = min64(plan->lines, plan->view[ACT_OUT].shape[dim] - unit % per_outer * plan->lines);
    work->kernels->merge[work->call->common.direction](unit_statistics(work, unit), lines, plan->parts);
}

static void run_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t first = task * work->plan->per_task, end = min64(first + work->plan->per_task, work->plan->blocks);
    for (int64_t b = first; b < end; b++)
        run_block(work, b);
    v_fence(); /* once for all blocks: it waits until their streamed stores are done */
}

/* Copies the input, or dy, to the output. */
static void copy_first(const rafter_context *context, const struct act_call *call, const struct act_kernels *kernels) {
    const bool forward = call->common.direction == RAFTER_FORWARD;
    struct act_call copy = {.common.direction = RAFTER_FORWARD,
                            .kind = RAFTER_ACT_NONE,
                            .in = forward ? call->in : call->dy,
                            .out = call->out};
    struct plan plan;
    make_plan(context, &copy.common, &plan);
    plan.stream = false; /* the output is read next */
    struct work work = {.call = &copy, .plan = &plan, .kernels = kernels};
    rafter_parallel(context, ceil_div(plan.blocks, plan.per_task), run_task, &work);
}

/* Fills a line with the one element that dy repeats. */
static void repeat_element(const rafter_view *dy, const struct plan *plan, char *line) {
    const int64_t bytes = rafter_dtype_bytes(dy->dtype), n = plan->view[ACT_DY].shape[plan->column];
    for (int64_t done = 0; done < n; done += max64(done, 1))
        memcpy(line + done * bytes, done ? line : dy->data, (size_t)(min64(max64(done, 1), n - done) * bytes));
}

/* ---- softmax over ranks ---------------------------------------------------------------------- */

enum { RANK_LINES = 64 }; /* per task */

struct rank_work {
    struct work work;
    int64_t lines;
    float *own, *all; /* statistics of the lines, ACT_STATISTICS each: this rank's, later merged; those of all ranks */
    bool apply;       /* own has been merged: this pass writes the results */
};

static void rank_task(void *arg, int64_t task) {
    const struct rank_work *const w = arg;
    const struct plan *const plan = w->work.plan;
    const struct act_call *const call = w->work.call;
    const rafter_direction direction = call->common.direction;
    for (int64_t line = task * RANK_LINES; line < min64((task + 1) * RANK_LINES, w->lines); line++) {
        float *const own = w->own + line * ACT_STATISTICS;
        if (call->out.numel > 0) {
            const struct act_block block = block_at(&w->work, line / plan->row_blocks, line % plan->row_blocks, 0);
            if (w->apply)
                w->work.kernels->apply[ACT_ROWS][direction](&block, own);
            else
                w->work.kernels->statistics[ACT_ROWS][direction](&block, own);
        }
    }
}

/* Merges the statistics of all ranks, in rank order. `parts`: space for those of one line. */
static void merge_ranks(const struct rank_work *w, float *parts) {
    const int ranks = w->work.call->group.ranks;
    for (int64_t line = 0; line < w->lines; line++) {
        for (int64_t r = 0; r < ranks; r++)
            memcpy(parts + r * ACT_STATISTICS, w->all + (r * w->lines + line) * ACT_STATISTICS,
                   ACT_STATISTICS * sizeof *parts);
        w->work.kernels->merge[w->work.call->common.direction](parts, 1, ranks);
        memcpy(w->own + line * ACT_STATISTICS, parts, ACT_STATISTICS * sizeof *parts);
    }
}

static rafter_status agree(rafter_context *context, const struct act_call *call, struct rafter_tender *all) {
    const double term[RAFTER_MOST_TERMS] = {RAFTER_OP_INDEX_act, call->common.direction, call->out.dtype,
                                            (double)lines_of(call)};
    static const char *const names[RAFTER_MOST_TERMS] = {"the op", "the direction", "the dtype", "the number of lines"};
    return rafter_group_agree(context, "group", &call->group, RAFTER_OK, term, names, all);
}

static rafter_status run_over_ranks(rafter_context *context, const struct act_call *call, const struct plan *plan,
                                    const void *kernels, char *workspace) {
    struct rank_work w = {.work = {.call = call, .plan = plan, .kernels = kernels}, .lines = lines_of(call)};
    const int64_t tasks = ceil_div(w.lines, RANK_LINES), count = w.lines * ACT_STATISTICS;
    w.own = (float *)(void *)workspace;
    w.all = w.own + count;
    /* Either what the ranks say of their calls, or the statistics of one line. */
    struct rafter_tender *const all = malloc((size_t)call->group.ranks * sizeof *all);
    if (!all)
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "no memory for %d ranks", (int)call->group.ranks);
    rafter_status status = agree(context, call, all);
    if (status == RAFTER_OK && w.lines > 0) {
        for (int64_t line = 0; line < w.lines; line++) { /* the statistics of no elements: this rank may have none */
            w.own[line * ACT_STATISTICS] = call->common.direction == RAFTER_FORWARD ? -INFINITY : 0.0f;
            w.own[line * ACT_STATISTICS + 1] = 0.0f;
        }
        rafter_parallel(context, tasks, rank_task, &w);
        status = rafter_group_gather(context, "group", &call->group, w.own, w.all, (size_t)count * sizeof *w.own);
    }
    if (status == RAFTER_OK && w.lines > 0) {
        merge_ranks(&w, (float *)(void *)all);
        w.apply = true;
        rafter_parallel(context, tasks, rank_task, &w);
    }
    free(all);
    return status;
}

static rafter_status run(rafter_context *context, const struct rafter_call *common, const void *plan_storage,
                         const void *kernels, char *workspace) {
    const struct act_call *const call = (const void *)common;
    const struct plan *const plan = plan_storage;
    if (rafter_group_has(&call->group))
        return run_over_ranks(context, call, plan, kernels, workspace);
    struct work work = {.call = call, .plan = plan, .kernels = kernels, .statistics = (float *)(void *)workspace};
    if (plan->copied)
        copy_first(context, call, kernels);
    if (plan->repeated) {
        work.dy = workspace + plan->statistics;
        repeat_element(&call->dy, plan, work.dy);
    }
    const int64_t tasks = ceil_div(plan->blocks, plan->per_task);
    rafter_parallel(context, tasks, run_task, &work);
    if (plan->parts > 1) { /* so far only statistics */
        rafter_parallel(context, plan->blocks / plan->parts, merge_task, &work);
        work.merged = true;
        rafter_parallel(context, tasks, run_task, &work);
    }
    return RAFTER_OK;
}

const struct rafter_variant_functions rafter_act_on_cpu = {NULL, make_plan, run};
