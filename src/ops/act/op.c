/* SPDX-License-Identifier: Apache-2.0 */
/*
 * act: checks, and how the work is cut on the CPU.
 *
 * There, every call becomes a grid of outer x rows x columns elements, the same for all of its tensors, and the grid is
 * cut into blocks of rows x columns, which kernels take one at a time. Elementwise kinds may be cut anywhere. Softmax's
 * lines are the grid's rows where their elements are adjacent in memory, and its columns where the lines are; they stay
 * whole unless there are too few to share out.
 */
#include "core/backend.h"
#include "core/context.h"
#include "core/sizes.h"
#include "core/tensor.h"
#include "core/threads.h"
#include "core/variants.h"
#include "ops/act/call.h"
#include "ops/act/kernels.h"
#include "simd/simd.h"

#define RAFTER_VARIANT(isa) extern const struct act_kernels RAFTER_PASTE3(rafter_, act, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, act, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_act = {"act", sizeof variants / sizeof *variants, variants};

/* ---- checks ---------------------------------------------------------------------------------- */

static bool contiguous(const rafter_view *view) {
    int64_t step = 1;
    for (int d = view->ndim - 1; d >= 0; d--) {
        if (view->shape[d] > 1 && view->stride[d] != step)
            return false;
        step *= view->shape[d];
    }
    return true;
}

/* The call's tensors, under the names that the caller knows them by; a name is NULL where the call has no such tensor.
 */
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
    const bool forward = call->direction == RAFTER_FORWARD;
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
                               "%s is not contiguous, wanted it so with relu_mask, whose bits are in row-major order",
                               named[t].name);
        if (forward)
            RAFTER_TRY(rafter_want_disjoint(context, "relu_mask", &mask, named[t].name, named[t].view));
    }
    if (!forward)
        RAFTER_TRY(rafter_want_disjoint(context, "dx", &call->out, "relu_mask", &mask));
    call->mask = (uint8_t *)mask.data;
    return RAFTER_OK;
}

static rafter_status take(rafter_context *context, const rafter_act_args *args, rafter_direction direction,
                          struct act_call *call) {
    rafter_act_args a;
    RAFTER_TRY(rafter_take_args(context, "rafter_act_args", args, &a, sizeof a));
    if ((int)a.kind < RAFTER_ACT_NONE || a.kind > RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "kind is %d, wanted 0 (none) to 4 (softmax)", (int)a.kind);
    if (direction != RAFTER_FORWARD && direction != RAFTER_BACKWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted 0 (forward) or 1 (backward)",
                           (int)direction);
    *call = (struct act_call){
        .direction = direction, .kind = a.kind, .workspace = a.workspace, .workspace_bytes = a.workspace_bytes};

    const bool forward = direction == RAFTER_FORWARD, softmax = a.kind == RAFTER_ACT_SOFTMAX;
    const bool dy_will_do = !forward && (a.kind == RAFTER_ACT_NONE || (a.kind == RAFTER_ACT_RELU && a.relu_mask));
    const struct named named[ACT_TENSORS] = {
        [ACT_IN] = forward || !softmax ? (struct named){dy_will_do ? NULL : "x", a.x, &call->in}
                                       : (struct named){"y", a.y, &call->in},
        [ACT_DY] = {forward ? NULL : "dy", a.dy, &call->dy},
        [ACT_OUT] = forward ? (struct named){"y", a.y, &call->out} : (struct named){"dx", a.dx, &call->out},
    };
    const struct named *const first = &named[dy_will_do ? ACT_DY : ACT_IN];
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
    if (a.relu_mask)
        RAFTER_TRY(take_mask(context, a.relu_mask, named, call));
    if (softmax)
        RAFTER_TRY(rafter_take_dim(context, a.dim, call->out.ndim, &call->dim));
    return RAFTER_OK;
}

static bool in_place(const struct act_call *call) {
    return rafter_same_memory(&call->out, call->direction == RAFTER_FORWARD ? &call->in : &call->dy);
}

static bool needs_nothing(const struct act_call *call) {
    return call->out.numel == 0 || (call->kind == RAFTER_ACT_NONE && in_place(call));
}

/* ---- the grid -------------------------------------------------------------------------------- */

enum {
    TASK = 1 << 16,     /* elements that are worth a task */
    ROWS_PANEL = 2048,  /* elements of a block of rows, which is gone over twice and should stay in L1 */
    LINE_BYTES = 64,    /* of a cache */
    FEW_BLOCKS = 8,     /* with fewer, softmax's lines are cut into parts, */
    ENOUGH_BLOCKS = 64, /* so that there are about so many */
    PART_MULTIPLE = 64  /* elements, so that parts keep the alignment of the line */
};

/* The tensors as views of [outer ..., rows, columns], and how that is cut. */
struct grid {
    rafter_view view[ACT_TENSORS];
    rafter_view *used[ACT_TENSORS]; /* those that the call has */
    int count;
    int row, column; /* the two dimensions that blocks have; those before them are outer */

    bool softmax, is_short; /* is_short: rows for the short_rows kernel */
    enum act_form form;
    bool stream;
    int64_t rows, columns;             /* of a block; the last along a dimension may be smaller */
    int64_t row_blocks, column_blocks; /* per outer index */
    int64_t blocks, per_task;
    int64_t lines, parts; /* softmax: lines of a block, parts that each is cut into */
    size_t statistics;    /* bytes that the parts' statistics take */
};

static void permute(struct grid *grid, const int order[], int ndim) {
    for (int v = 0; v < grid->count; v++) {
        rafter_view *const view = grid->used[v];
        const rafter_view old = *view;
        for (int d = 0; d < ndim; d++) {
            view->shape[d] = old.shape[order[d]];
            view->stride[d] = old.stride[order[d]];
        }
    }
}

/* The dimensions in the order of the output's memory, outermost first, so that transposed tensors are walked as if they
 * were not; `last` (-1: none) goes behind all others. */
static void order_by_stride(struct grid *grid, int last) {
    const rafter_view *const out = &grid->view[ACT_OUT];
    int order[RAFTER_VIEW_DIMS], n = 0;
    for (int d = 0; d < out->ndim; d++) {
        if (d == last)
            continue;
        /* Stride 0 (size 1, or an output of the bench's) repeats what is inside: outermost. */
        int at = n++;
        for (; at > 0 && out->stride[order[at - 1]] != 0 &&
               (out->stride[d] == 0 || out->stride[d] > out->stride[order[at - 1]]);
             at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    if (last >= 0)
        order[n] = last;
    permute(grid, order, out->ndim);
}

static bool adjacent(const struct grid *grid, int dim) {
    bool all = true;
    for (int v = 0; v < grid->count; v++)
        all &= grid->used[v]->stride[dim] == 1 || grid->used[v]->shape[dim] == 1;
    return all;
}

/* Brings the views into the form of the grid. */
static void arrange(struct grid *grid, int dim) {
    const rafter_view *const out = &grid->view[ACT_OUT];
    if (!grid->softmax) {
        order_by_stride(grid, -1);
        if (rafter_collapse(grid->used, grid->count, 0, out->ndim) == 1)
            rafter_collapse(grid->used, grid->count, 0, 0); /* one row */
    } else {
        if (out->ndim == 0)
            rafter_collapse(grid->used, grid->count, 0, 0); /* a scalar is a line of one element */
        order_by_stride(grid, dim);
        const int line = rafter_collapse(grid->used, grid->count, 0, out->ndim - 1);
        grid->form = !adjacent(grid, line) && adjacent(grid, line - 1) ? ACT_COLUMNS : ACT_ROWS;
        if (grid->form == ACT_COLUMNS) {
            int order[RAFTER_VIEW_DIMS];
            for (int d = 0; d < line - 1; d++)
                order[d] = d;
            order[line - 1] = line;
            order[line] = line - 1;
            permute(grid, order, line + 1);
        }
    }
    grid->row = out->ndim - 2;
    grid->column = out->ndim - 1;
}

/* Columns of a block: all of them, for memory is read fastest straight on; if they are too many, equal shares of whole
 * cache lines. */
static int64_t strip(int64_t columns, int64_t bytes) {
    const int64_t shares = ceil_div(columns, ACT_MOST_LINES);
    return at_most(columns, round_up(ceil_div(columns, shares), LINE_BYTES / bytes));
}

static void cut(struct grid *grid, bool forward) {
    const rafter_view *const out = &grid->view[ACT_OUT];
    const int64_t rows = out->shape[grid->row], columns = out->shape[grid->column];
    const int64_t outer = rafter_extent(out, 0, grid->row), bytes = rafter_dtype_bytes(out->dtype);
    const bool by_rows = grid->form == ACT_ROWS;
    if (!grid->softmax) {
        grid->columns = at_most(columns, TASK);
        grid->rows = at_most(rows, at_least(TASK / columns, 1));
    } else if (by_rows) {
        grid->columns = columns;
        grid->rows = at_most(rows, at_least(ROWS_PANEL / (columns + ACT_SHORT_MARGIN), 1));
        grid->is_short = forward && columns + ACT_SHORT_MARGIN <= ACT_SHORT && adjacent(grid, grid->column);
    } else {
        grid->columns = strip(columns, bytes);
        grid->rows = rows;
    }
    grid->parts = 1;
    grid->lines = by_rows ? grid->rows : grid->columns;
    const int64_t units = outer * ceil_div(rows, grid->rows) * ceil_div(columns, grid->columns);
    const int64_t parts = at_most(ceil_div(ENOUGH_BLOCKS, units), grid->rows * grid->columns / TASK);
    if (grid->softmax && units < FEW_BLOCKS && parts > 1) {
        int64_t *const length = by_rows ? &grid->columns : &grid->rows;
        const int64_t whole = *length;
        *length = round_up(ceil_div(whole, parts), PART_MULTIPLE);
        grid->parts = ceil_div(whole, *length);
        grid->statistics = (size_t)(units * grid->parts * ACT_STATISTICS * grid->lines) * sizeof(float);
    }
    grid->row_blocks = ceil_div(rows, grid->rows);
    grid->column_blocks = ceil_div(columns, grid->columns);
    grid->blocks = outer * grid->row_blocks * grid->column_blocks;
    grid->per_task = at_least(TASK / (grid->rows * grid->columns), 1);
}

static void make_grid(const struct act_call *call, struct grid *grid) {
    *grid = (struct grid){.view = {[ACT_IN] = call->in, [ACT_DY] = call->dy, [ACT_OUT] = call->out},
                          .softmax = call->kind == RAFTER_ACT_SOFTMAX};
    for (int t = 0; t < ACT_TENSORS; t++)
        if (grid->view[t].data)
            grid->used[grid->count++] = &grid->view[t];
    arrange(grid, call->dim);
    cut(grid, call->direction == RAFTER_FORWARD);

    const rafter_view *const out = &grid->view[ACT_OUT];
    int64_t span = 1; /* not the number of elements: the bench writes the same few again and again */
    for (int d = 0; d < out->ndim; d++)
        span += (out->shape[d] - 1) * out->stride[d];
    /* In place the lines are in the cache already: writing them past it would gain nothing. */
    const int64_t bytes = rafter_dtype_bytes(out->dtype);
    grid->stream =
        !in_place(call) && (uintptr_t)out->data % (uintptr_t)bytes == 0 && rafter_should_stream(span * bytes);
}

/* ---- running --------------------------------------------------------------------------------- */

struct work {
    const struct act_call *call;
    const struct grid *grid;
    const struct act_kernels *kernels;
    float *statistics; /* of parts of lines, in units of ACT_STATISTICS * lines * parts */
    bool merged;
};

static float *unit_statistics(const struct work *work, int64_t unit) {
    return work->statistics + unit * work->grid->parts * ACT_STATISTICS * work->grid->lines;
}

static void run_block(const struct work *work, int64_t index) {
    const struct grid *const grid = work->grid;
    const rafter_view *const out = &grid->view[ACT_OUT];
    const int64_t column = index % grid->column_blocks, rest = index / grid->column_blocks;
    const int64_t row = rest % grid->row_blocks, outer = rest / grid->row_blocks;
    struct act_block block = {
        .dtype = out->dtype,
        .kind = work->call->kind,
        .stream = grid->stream,
        .rows = at_most(grid->rows, out->shape[grid->row] - row * grid->rows),
        .columns = at_most(grid->columns, out->shape[grid->column] - column * grid->columns),
    };
    for (int t = 0; t < ACT_TENSORS; t++) {
        const rafter_view *const view = &grid->view[t];
        if (!view->data)
            continue;
        block.row_stride[t] = view->stride[grid->row];
        block.column_stride[t] = view->stride[grid->column];
        block.data[t] =
            rafter_at(view, rafter_offset(view, 0, grid->row, outer) + row * grid->rows * block.row_stride[t] +
                                column * grid->columns * block.column_stride[t]);
    }
    if (work->call->mask) /* one compact row, cut at multiples of TASK */
        block.mask = work->call->mask + column * grid->columns / 8;

    const struct act_kernels *const kernels = work->kernels;
    const rafter_direction direction = work->call->direction;
    if (!grid->softmax) {
        kernels->map[direction](&block);
    } else if (grid->is_short) {
        kernels->short_rows(&block);
    } else if (grid->parts == 1) {
        float statistics[ACT_STATISTICS * ACT_MOST_LINES];
        kernels->statistics[grid->form][direction](&block, statistics);
        kernels->apply[grid->form][direction](&block, statistics);
    } else {
        const bool by_rows = grid->form == ACT_ROWS;
        const int64_t unit = by_rows ? outer * grid->row_blocks + row : outer * grid->column_blocks + column;
        float *const statistics = unit_statistics(work, unit);
        if (work->merged)
            kernels->apply[grid->form][direction](&block, statistics);
        else
            kernels->statistics[grid->form][direction](&block, statistics + (by_rows ? column : row) * ACT_STATISTICS *
                                                                                (by_rows ? block.rows : block.columns));
    }
}

/* Merges the statistics of the parts of one unit: of the lines that one block of whole lines would have. */
static void merge_task(void *arg, int64_t unit) {
    const struct work *const work = arg;
    const struct grid *const grid = work->grid;
    const int dim = grid->form == ACT_ROWS ? grid->row : grid->column;
    const int64_t per_outer = grid->form == ACT_ROWS ? grid->row_blocks : grid->column_blocks;
    const int64_t lines = at_most(grid->lines, grid->view[ACT_OUT].shape[dim] - unit % per_outer * grid->lines);
    work->kernels->merge[work->call->direction](unit_statistics(work, unit), lines, grid->parts);
}

static void run_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t first = task * work->grid->per_task, end = at_most(first + work->grid->per_task, work->grid->blocks);
    for (int64_t b = first; b < end; b++)
        run_block(work, b);
    v_fence(); /* once for all blocks: it waits until what they have streamed is out */
}

static rafter_status run(rafter_context *context, const rafter_act_args *args, rafter_direction direction) {
    struct act_call call;
    RAFTER_TRY(take(context, args, direction, &call));
    if (needs_nothing(&call))
        return RAFTER_OK;
    if (context->cuda)
        return context->cuda->act(context, &call);

    struct grid grid;
    make_grid(&call, &grid);
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_scratch_take(context, call.workspace, call.workspace_bytes, grid.statistics, &scratch));
    struct work work = {.call = &call,
                        .grid = &grid,
                        .kernels = rafter_pick(context, &rafter_op_act)->kernels,
                        .statistics = (float *)(void *)scratch.memory};
    const int64_t tasks = ceil_div(grid.blocks, grid.per_task);
    rafter_parallel(context, tasks, run_task, &work);
    if (grid.parts > 1) { /* that was their statistics */
        rafter_parallel(context, grid.blocks / grid.parts, merge_task, &work);
        work.merged = true;
        rafter_parallel(context, tasks, run_task, &work);
    }
    rafter_scratch_release(context, &scratch);
    return RAFTER_OK;
}

rafter_status rafter_act_forward(rafter_context *context, const rafter_act_args *args) {
    return run(context, args, RAFTER_FORWARD);
}

rafter_status rafter_act_backward(rafter_context *context, const rafter_act_args *args) {
    return run(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_act_workspace(rafter_context *context, const rafter_act_args *args, rafter_direction direction,
                                   size_t *bytes) {
    struct act_call call;
    RAFTER_TRY(take(context, args, direction, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    *bytes = 0;
    if (needs_nothing(&call))
        return RAFTER_OK;
    if (context->cuda) {
        call.ask = bytes;
        return context->cuda->act(context, &call);
    }
    struct grid grid;
    make_grid(&call, &grid);
    *bytes = rafter_scratch_request(grid.statistics);
    return RAFTER_OK;
}
