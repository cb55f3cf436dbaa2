/*
 * act: checks, and how work is cut. Every call ends up as a grid of outer x rows x columns elements, the same for all of its
 * tensors, cut into blocks of rows x columns that kernels take one at a time. Elementwise kinds may cut anywhere. Softmax
 * runs along the columns dimension where that is adjacent in memory ("rows form": every row is normalised), or along the
 * rows dimension ("columns form"), and keeps the lines it normalises whole unless there are too few of them to share out.
 */
#include "ops/act/kernels.h"

#include <stdint.h>

#include "core/context.h"
#include "core/tensor.h"
#include "core/threads.h"
#include "core/variants.h"

#define RAFTER_VARIANT(isa) extern const struct act_kernels RAFTER_PASTE3(rafter_, act, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, act, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_act = {"act", sizeof variants / sizeof *variants, variants};

enum {
    TASK = 1 << 16,         /* elements that are worth a task */
    PANEL_BYTES = 1 << 19,  /* of inputs in a block in columns form, which is read twice: it should stay in L2 */
    LINE_BYTES = 64,        /* of a cache */
    FEW_BLOCKS = 16,        /* fewer than this leave threads idle: cut lines into parts */
    MOST_PARTS = 64,        /* of a line */
    PART_MULTIPLE = 64      /* elements in a part, so that parts keep the alignment of the line */
};

static int64_t at_least(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t at_most(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static int64_t round_up(int64_t a, int64_t multiple) {
    return ceil_div(a, multiple) * multiple;
}

/* ---- checks ------------------------------------------------------------------------------------------------------- */

struct call {
    rafter_act_kind kind;
    rafter_direction direction;
    rafter_view view[ACT_TENSORS]; /* compared, then brought into the form of the grid */
    rafter_view *used[ACT_TENSORS]; /* those views that the call has, `count` of them */
    int count;
    bool in_place;
    int dim; /* softmax's, resolved */
    uint8_t *mask;
    void *workspace;
    size_t workspace_bytes;
};

static bool contiguous(const rafter_view *view) {
    int64_t step = 1;
    for (int d = view->ndim - 1; d >= 0; d--) {
        if (view->shape[d] > 1 && view->stride[d] != step)
            return false;
        step *= view->shape[d];
    }
    return true;
}

static rafter_status take_mask(rafter_context *context, const DLTensor *tensor, const char *const names[],
                               struct call *call) {
    if (call->kind != RAFTER_ACT_RELU)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "relu_mask is given with kind %d, wanted it with %d (relu) only",
                           (int)call->kind, (int)RAFTER_ACT_RELU);
    rafter_view mask;
    if (call->direction == RAFTER_FORWARD)
        RAFTER_TRY(rafter_take_output(context, "relu_mask", tensor, RAFTER_SET(RAFTER_U8), &mask));
    else
        RAFTER_TRY(rafter_take_tensor(context, "relu_mask", tensor, RAFTER_SET(RAFTER_U8), &mask));
    const int64_t bytes = ceil_div(call->view[ACT_OUT].numel, 8);
    RAFTER_TRY(rafter_want_shape(context, "relu_mask", &mask, 1, &bytes));
    if (!contiguous(&mask))
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "relu_mask has stride %lld, wanted 1",
                           (long long)mask.stride[0]);
    for (int t = 0; t < ACT_TENSORS; t++)
        if (names[t]) {
            if (!contiguous(&call->view[t]))
                return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                                   "%s is not contiguous, wanted it so with relu_mask, whose bits are in row-major order",
                                   names[t]);
            if (call->direction == RAFTER_FORWARD || t == ACT_OUT)
                RAFTER_TRY(rafter_want_disjoint(context, "relu_mask", &mask, names[t], &call->view[t]));
        }
    call->mask = (uint8_t *)mask.data;
    return RAFTER_OK;
}

static rafter_status take(rafter_context *context, const rafter_act_args *args, rafter_direction direction,
                          struct call *call) {
    rafter_act_args a;
    RAFTER_TRY(rafter_take_args(context, "rafter_act_args", args, &a, sizeof a));
    if ((int)a.kind < RAFTER_ACT_NONE || a.kind > RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "kind is %d, wanted 0 (none) to 4 (softmax)", (int)a.kind);
    if (direction != RAFTER_FORWARD && direction != RAFTER_BACKWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted 0 (forward) or 1 (backward)",
                           (int)direction);
    *call = (struct call){
        .kind = a.kind, .direction = direction, .workspace = a.workspace, .workspace_bytes = a.workspace_bytes};

    const bool forward = direction == RAFTER_FORWARD, softmax = a.kind == RAFTER_ACT_SOFTMAX;
    const bool reads_no_more = a.kind == RAFTER_ACT_NONE || (a.kind == RAFTER_ACT_RELU && a.relu_mask);
    const char *const names[ACT_TENSORS] = {
        [ACT_IN] = forward ? "x" : reads_no_more ? NULL : softmax ? "y" : "x",
        [ACT_DY] = forward ? NULL : "dy",
        [ACT_OUT] = forward ? "y" : "dx",
    };
    const DLTensor *const tensors[ACT_TENSORS] = {
        [ACT_IN] = !forward && softmax ? a.y : a.x,
        [ACT_DY] = a.dy,
        [ACT_OUT] = forward ? a.y : a.dx,
    };
    const int in_place = forward ? ACT_IN : ACT_DY; /* the input whose memory the output may be */
    rafter_view *const out = &call->view[ACT_OUT];
    for (int t = 0; t < ACT_TENSORS; t++) {
        if (!names[t])
            continue;
        rafter_view *const view = &call->view[t];
        RAFTER_TRY((t == ACT_OUT ? rafter_take_output : rafter_take_tensor)(context, names[t], tensors[t], RAFTER_FLOATS,
                                                                           view));
        call->used[call->count++] = view;
        const int first = names[ACT_IN] ? ACT_IN : ACT_DY;
        RAFTER_TRY(rafter_want_same_dtype(context, names[t], view, names[first], &call->view[first]));
        RAFTER_TRY(rafter_want_same_shape(context, names[t], view, names[first], &call->view[first]));
    }
    call->in_place = rafter_same_memory(out, &call->view[in_place]);
    for (int t = 0; t < ACT_OUT; t++)
        if (names[t] && !(t == in_place && call->in_place))
            RAFTER_TRY(rafter_want_disjoint(context, names[ACT_OUT], out, names[t], &call->view[t]));
    if (a.relu_mask)
        RAFTER_TRY(take_mask(context, a.relu_mask, names, call));
    if (softmax)
        RAFTER_TRY(rafter_take_dim(context, a.dim, out->ndim, &call->dim));
    return RAFTER_OK;
}

/* ---- the grid ----------------------------------------------------------------------------------------------------- */

enum form { ROWS = ACT_ROWS, COLUMNS = ACT_COLUMNS, ELEMENTWISE };

/* All views as [outer ..., rows, columns], and how that is cut. */
struct plan {
    enum form form;
    int dims;
    int64_t rows, columns;             /* of a block; the last one along a dimension may be smaller */
    int64_t row_blocks, column_blocks; /* per outer index */
    int64_t parts;                     /* a line is cut into; 1 unless lines are few */
    int64_t blocks, per_task;
    int64_t lines;     /* of a block, softmax only */
    size_t statistics; /* bytes */
    bool stream;
    bool is_short; /* for the short_rows kernel */
};

static void permute(const struct call *call, const int order[], int ndim) {
    for (int v = 0; v < call->count; v++) {
        rafter_view *const view = call->used[v];
        const rafter_view old = *view;
        for (int d = 0; d < ndim; d++) {
            view->shape[d] = old.shape[order[d]];
            view->stride[d] = old.stride[order[d]];
        }
    }
}

/* The dimensions in the order of the output's memory, outermost first; `last` (or -1) goes behind all of them. Transposed
 * tensors are walked as if they were not. */
static void order_by_stride(const struct call *call, int last) {
    const rafter_view *const out = &call->view[ACT_OUT];
    int order[RAFTER_VIEW_DIMS], n = 0;
    for (int d = 0; d < out->ndim; d++) {
        if (d == last)
            continue;
        int at = n++;
        /* Stride 0 repeats all that is inside (only the bench has such outputs): outermost. */
        for (; at > 0 && out->stride[order[at - 1]] != 0 &&
               (out->stride[d] == 0 || out->stride[order[at - 1]] < out->stride[d]);
             at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    if (last >= 0)
        order[n] = last;
    permute(call, order, out->ndim);
}

static bool adjacent(const struct call *call, int dim) {
    bool all = true;
    for (int v = 0; v < call->count; v++)
        all &= call->used[v]->stride[dim] == 1 || call->used[v]->shape[dim] == 1;
    return all;
}

/* Brings the views into the form of the grid. */
static enum form arrange(struct call *call) {
    rafter_view *const out = &call->view[ACT_OUT];
    if (call->kind != RAFTER_ACT_SOFTMAX) {
        order_by_stride(call, -1);
        if (rafter_collapse(call->used, call->count, 0, out->ndim) == 1)
            rafter_collapse(call->used, call->count, 0, 0); /* one row */
        return ELEMENTWISE;
    }
    if (out->ndim == 0) /* a scalar is a line of one element */
        rafter_collapse(call->used, call->count, 0, 0);
    order_by_stride(call, call->dim);
    const int line = rafter_collapse(call->used, call->count, 0, out->ndim - 1);
    if (adjacent(call, line) || !adjacent(call, line - 1))
        return ROWS;
    int order[RAFTER_VIEW_DIMS];
    for (int d = 0; d <= line; d++)
        order[d] = d;
    order[line - 1] = line;
    order[line] = line - 1;
    permute(call, order, line + 1);
    return COLUMNS;
}

/* Columns of a block in columns form: whole cache lines, as many as leave the panel of all inputs in L2, shared out evenly.
 * `columns_per_line` is of one tensor's cache line. */
static int64_t strip(int64_t columns, int64_t panel_columns, int64_t columns_per_line) {
    int64_t most = panel_columns / columns_per_line * columns_per_line;
    most = at_most(at_least(most, columns_per_line), ACT_MOST_LINES);
    const int64_t even = ceil_div(columns, ceil_div(columns, most));
    return at_most(round_up(even, columns_per_line), columns);
}

static struct plan make_plan(struct call *call) {
    struct plan plan = {.form = arrange(call), .parts = 1};
    const rafter_view *const out = &call->view[ACT_OUT];
    const int64_t bytes = rafter_dtype_bytes(out->dtype);
    plan.dims = out->ndim;
    const int64_t outer = rafter_extent(out, 0, plan.dims - 2);
    const int64_t rows = out->shape[plan.dims - 2], columns = out->shape[plan.dims - 1];

    const bool down = plan.form == COLUMNS;
    if (plan.form == ELEMENTWISE) {
        plan.columns = at_most(columns, TASK);
        plan.rows = at_most(rows, at_least(TASK / columns, 1));
    } else if (plan.form == ROWS) {
        plan.columns = columns;
        plan.rows = at_most(at_most(rows, ACT_MOST_LINES), at_least(ACT_SHORT / round_up(columns, 16), 1));
        plan.is_short = call->direction == RAFTER_FORWARD && columns <= ACT_SHORT && adjacent(call, plan.dims - 1);
    } else {
        plan.columns = strip(columns, PANEL_BYTES / (bytes * (call->count - 1)) / rows, LINE_BYTES / bytes);
        plan.rows = rows;
    }
    if (plan.form != ELEMENTWISE) {
        const int64_t units = outer * ceil_div(rows, plan.rows) * ceil_div(columns, plan.columns);
        int64_t *const length = down ? &plan.rows : &plan.columns;
        plan.lines = down ? plan.columns : plan.rows;
        if (units < FEW_BLOCKS && plan.rows * plan.columns >= 2 * TASK) {
            const int64_t parts = at_most(plan.rows * plan.columns / TASK, MOST_PARTS), whole = *length;
            *length = round_up(ceil_div(whole, parts), PART_MULTIPLE);
            plan.parts = ceil_div(whole, *length);
        }
        if (plan.parts > 1)
            plan.statistics = (size_t)(units * plan.parts * ACT_STATISTICS * plan.lines) * sizeof(float);
    }
    plan.row_blocks = ceil_div(rows, plan.rows);
    plan.column_blocks = ceil_div(columns, plan.columns);
    plan.blocks = outer * plan.row_blocks * plan.column_blocks;
    plan.per_task = at_least(TASK / (plan.rows * plan.columns), 1);

    int64_t span = 1;
    for (int d = 0; d < plan.dims; d++)
        span += (out->shape[d] - 1) * out->stride[d];
    plan.stream = !call->in_place && rafter_should_stream(span * bytes);
    return plan;
}

/* ---- running ------------------------------------------------------------------------------------------------------ */

struct work {
    const struct call *call;
    const struct plan *plan;
    const struct act_kernels *kernels;
    float *statistics; /* of parts of lines: the first round over all blocks writes them, the second reads them */
    bool second;
};

static struct act_block block_at(const struct call *call, const struct plan *plan, int64_t outer, int64_t row,
                                 int64_t column) {
    const rafter_view *const out = &call->view[ACT_OUT];
    const int64_t bytes = rafter_dtype_bytes(out->dtype);
    const int r = plan->dims - 2, c = plan->dims - 1;
    struct act_block block = {
        .dtype = out->dtype,
        .kind = call->kind,
        .stream = plan->stream,
        .rows = at_most(plan->rows, out->shape[r] - row),
        .columns = at_most(plan->columns, out->shape[c] - column),
    };
    for (int t = 0; t < ACT_TENSORS; t++) {
        const rafter_view *const view = &call->view[t];
        if (!view->data)
            continue;
        const int64_t offset = rafter_offset(view, 0, r, outer) + row * view->stride[r] + column * view->stride[c];
        block.data[t] = view->data + offset * bytes;
        block.row_stride[t] = view->stride[r];
        block.column_stride[t] = view->stride[c];
    }
    if (call->mask) /* one compact row, cut at multiples of TASK elements */
        block.mask = call->mask + column / 8;
    return block;
}

static void run_block(const struct work *work, int64_t index) {
    const struct plan *const plan = work->plan;
    const int64_t column = index % plan->column_blocks, rest = index / plan->column_blocks;
    const int64_t row = rest % plan->row_blocks, outer = rest / plan->row_blocks;
    const struct act_block block =
        block_at(work->call, plan, outer, row * plan->rows, column * plan->columns);
    const struct act_kernels *const kernels = work->kernels;
    const rafter_direction direction = work->call->direction;
    if (plan->form == ELEMENTWISE) {
        kernels->map[direction](&block);
    } else if (plan->is_short) {
        kernels->short_rows(&block);
    } else if (plan->parts == 1) {
        float statistics[ACT_STATISTICS * ACT_MOST_LINES];
        kernels->statistics[plan->form][direction](&block, statistics);
        kernels->apply[plan->form][direction](&block, statistics, 1);
    } else {
        const bool down = plan->form == COLUMNS;
        const int64_t unit = down ? outer * plan->column_blocks + column : outer * plan->row_blocks + row;
        float *const statistics = work->statistics + unit * plan->parts * ACT_STATISTICS * plan->lines;
        const int64_t part = down ? row : column, lines = down ? block.columns : block.rows;
        if (work->second)
            kernels->apply[plan->form][direction](&block, statistics, plan->parts);
        else
            kernels->statistics[plan->form][direction](&block, statistics + part * ACT_STATISTICS * lines);
    }
}

static void run_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t first = task * work->plan->per_task;
    for (int64_t b = first; b < at_most(first + work->plan->per_task, work->plan->blocks); b++)
        run_block(work, b);
}

static rafter_status run(rafter_context *context, const rafter_act_args *args, rafter_direction direction) {
    struct call call;
    RAFTER_TRY(take(context, args, direction, &call));
    if (call.view[ACT_OUT].numel == 0 || (call.kind == RAFTER_ACT_NONE && call.in_place))
        return RAFTER_OK;
    const struct plan plan = make_plan(&call);
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_scratch_take(context, call.workspace, call.workspace_bytes, plan.statistics, &scratch));
    struct work work = {.call = &call,
                        .plan = &plan,
                        .kernels = rafter_pick(context, &rafter_op_act)->kernels,
                        .statistics = (float *)(void *)scratch.memory};
    const int64_t tasks = ceil_div(plan.blocks, plan.per_task);
    rafter_parallel(context, tasks, run_task, &work);
    if (plan.parts > 1) {
        work.second = true;
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
    struct call call;
    RAFTER_TRY(take(context, args, direction, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    *bytes = call.view[ACT_OUT].numel == 0 ? 0 : rafter_scratch_request(make_plan(&call).statistics);
    return RAFTER_OK;
}
