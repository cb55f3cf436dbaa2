/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cross_entropy/kernels.h"

#include <math.h>

#include "core/backend.h"
#include "core/threads.h"
#include "core/variants.h"

#define RAFTER_VARIANT(isa) extern const struct cross_entropy_kernels RAFTER_PASTE3(rafter_, cross_entropy, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, cross_entropy, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_cross_entropy = {"cross_entropy", sizeof variants / sizeof *variants, variants};

enum {
    /* A row's statistics are always merged from those of chunks of so many columns, whether one thread takes the whole
     * row or each chunk is a task: so a row's bits depend neither on the threads nor on how many rows there are beside
     * it. */
    CHUNK = 16384,
    FEW_ROWS = 64,          /* below this, chunks are tasks */
    MOST_TASKS = 1024,      /* of whole rows */
    LEAST_ELEMENTS = 65536, /* in a task of whole rows */
};

/* A call on the CPU: how it is cut, and what its tasks share. */
struct work {
    const struct cross_entropy_call *call;
    const struct cross_entropy_kernels *kernels;
    struct cross_entropy_row row; /* all but what differs from row to row */
    bool split;                   /* tasks are chunks of columns, else several rows */
    int64_t chunks, rows_per_task, tasks;
    struct rafter_row_stats *stats; /* split: per row and chunk */
    double *sums;                   /* not split, forward: of the row losses of each task */
};

static rafter_status take(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction,
                          struct cross_entropy_call *call) {
    rafter_cross_entropy_args a;
    RAFTER_TRY(rafter_take_args(context, "rafter_cross_entropy_args", args, &a, sizeof a));
    *call = (struct cross_entropy_call){.workspace = a.workspace, .workspace_bytes = a.workspace_bytes};
    rafter_view *logits = &call->logits, *dlogits = &call->dlogits;
    RAFTER_TRY(rafter_take_tensor(context, "logits", a.logits, RAFTER_FLOATS, logits));
    if (logits->ndim == 0)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "logits has 0 dimensions, wanted at least that of the classes");
    const struct rafter_loss_args loss_args = {a.options, a.target,  a.loss,   a.row_loss, a.lse,
                                               a.logprob, a.entropy, a.argmax, a.dloss};
    const int row_dims = logits->ndim - 1;
    RAFTER_TRY(rafter_loss_take(context, &loss_args, direction, "logits without its last dimension", row_dims,
                                logits->shape, logits->shape[row_dims], &call->loss));
    RAFTER_TRY(rafter_loss_want_disjoint(context, &call->loss, "logits", logits, false));
    call->gradient = a.dlogits || direction == RAFTER_BACKWARD;
    if (call->gradient) {
        RAFTER_TRY(rafter_take_output(context, "dlogits", a.dlogits, RAFTER_FLOATS, dlogits));
        RAFTER_TRY(rafter_want_same_dtype(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_want_same_shape(context, "dlogits", dlogits, "logits", logits));
        if (!rafter_same_memory(dlogits, logits))
            RAFTER_TRY(rafter_want_disjoint(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_loss_want_disjoint(context, &call->loss, "dlogits", dlogits, true));
        rafter_collapse(&dlogits, 1, 0, row_dims);
    }
    rafter_collapse(&logits, 1, 0, row_dims);
    return RAFTER_OK;
}

/* Bytes from a tensor's first element to past its last. */
static int64_t span_bytes(const rafter_view *view) {
    return view->numel ? (rafter_offset(view, 0, view->ndim, view->numel - 1) + 1) * rafter_dtype_bytes(view->dtype)
                       : 0;
}

/* Decides what follows from the arguments but not from data. Returns the bytes of scratch memory. */
static size_t plan(const rafter_context *context, const struct cross_entropy_call *call, struct work *work) {
    const struct rafter_loss *loss = &call->loss;
    const int64_t rows = loss->rows, classes = loss->classes;
    const bool forward = loss->direction == RAFTER_FORWARD, in_place = call->logits.data == call->dlogits.data;
    *work = (struct work){.call = call, .kernels = rafter_pick(context, &rafter_op_cross_entropy)->kernels};
    work->row = (struct cross_entropy_row){
        .dtype = call->logits.dtype,
        .z_stride = classes > 1 ? call->logits.stride[call->logits.ndim - 1] : 1,
        .dz_stride = classes > 1 && call->gradient ? call->dlogits.stride[call->dlogits.ndim - 1] : 1,
        .softcap = loss->softcap,
        .scale = loss->scale,
        .weight = loss->smoothing != 0.0f ? loss->class_weight.data : NULL,
        .weight_stride = loss->class_weight.stride[0],
        .weighted = forward && loss->smoothing != 0.0f,
        .moment = rafter_loss_has(&loss->entropy),
        .argmax = rafter_loss_has(&loss->argmax),
        .stream = call->gradient && !in_place && rafter_should_stream(span_bytes(&call->dlogits)),
    };

    work->chunks = (classes + CHUNK - 1) / CHUNK;
    work->split = rows < FEW_ROWS && work->chunks > 1;
    if (work->split) {
        work->tasks = rows * work->chunks;
        return (size_t)work->tasks * sizeof *work->stats;
    }
    const int64_t for_count = (rows + MOST_TASKS - 1) / MOST_TASKS, for_size = LEAST_ELEMENTS / (classes + 1) + 1;
    work->rows_per_task = for_count > for_size ? for_count : for_size;
    work->tasks = (rows + work->rows_per_task - 1) / work->rows_per_task;
    return forward ? (size_t)work->tasks * sizeof *work->sums : 0;
}

/* ---- one row --------------------------------------------------------------------------------- */

static struct cross_entropy_row row_at(const struct work *work, int64_t index, int64_t label) {
    const rafter_view *logits = &work->call->logits, *dlogits = &work->call->dlogits;
    struct cross_entropy_row row = work->row;
    row.label = label;
    row.z = rafter_at(logits, rafter_offset(logits, 0, logits->ndim - 1, index));
    if (work->call->gradient)
        row.dz = rafter_at(dlogits, rafter_offset(dlogits, 0, dlogits->ndim - 1, index));
    return row;
}

static int64_t chunk_end(const struct work *work, int64_t chunk) {
    return chunk + 1 < work->chunks ? (chunk + 1) * CHUNK : work->call->loss.classes;
}

/* Where the next call of a kernel ends: a piece further where it needs its buffers. */
static int64_t piece_end(bool buffered, int64_t first, int64_t end) {
    return buffered && end - first > CROSS_ENTROPY_PIECE ? first + CROSS_ENTROPY_PIECE : end;
}

static void chunk_stats(const struct work *work, const struct cross_entropy_row *row, int64_t chunk,
                        struct rafter_row_stats *stats) {
    const bool buffered = cross_entropy_stats_buffered(row);
    const int64_t start = chunk * CHUNK, end = chunk_end(work, chunk);
    for (int64_t first = start, next; first < end; first = next) {
        struct rafter_row_stats part;
        next = piece_end(buffered, first, end);
        work->kernels->stats(row, first, next - first, &part);
        *stats = first == start ? part : rafter_row_merge(stats, &part);
    }
}

static void columns_gradient(const struct work *work, const struct cross_entropy_row *row, int64_t start, int64_t end,
                             const struct rafter_row_gradient *gradient) {
    const bool buffered = !gradient->zero && cross_entropy_gradient_buffered(row);
    for (int64_t first = start, next; first < end; first = next) {
        next = piece_end(buffered, first, end);
        work->kernels->gradient(row, first, next - first, gradient);
    }
}

/* Whether backward can start from the lse it was given. A float that is too large carries an error that would show in
 * the gradient: at 1e30, a tie of two looks like no tie. The bounds keep it to 2^-13, 2^-16 and 2^-18 of p; for the
 * 16-bit dtypes that is a sixteenth of their own rounding. NaN and the infinities are past the bounds too. */
static bool lse_serves(const struct cross_entropy_call *call, int64_t index) {
    const rafter_dtype dtype = call->logits.dtype;
    const float bound = dtype == RAFTER_BF16 ? 0x1p11f : dtype == RAFTER_F16 ? 0x1p8f : 0x1p6f;
    return call->loss.direction == RAFTER_BACKWARD && rafter_loss_has(&call->loss.lse) &&
           fabsf(rafter_loss_given_lse(&call->loss, index)) <= bound;
}

/* Ignored rows need no statistics, nor does backward from an lse. */
static bool needs_stats(const struct cross_entropy_call *call, int64_t index, int64_t label) {
    return label >= 0 && !lse_serves(call, index);
}

static struct rafter_row_gradient row_gradient(const struct cross_entropy_call *call, int64_t index, int64_t label,
                                               const struct rafter_row_stats *stats) {
    if (label < 0 || needs_stats(call, index, label))
        return rafter_loss_gradient(&call->loss, index, label, stats);
    return rafter_loss_gradient_from_lse(&call->loss, index, label, rafter_loss_given_lse(&call->loss, index));
}

/* ---- tasks of whole rows --------------------------------------------------------------------- */

static double whole_row(const struct work *work, int64_t index) {
    const struct cross_entropy_call *call = work->call;
    const int64_t label = rafter_loss_label(&call->loss, index);
    const struct cross_entropy_row row = row_at(work, index, label);
    struct rafter_row_stats stats = rafter_row_empty, part;
    if (needs_stats(call, index, label))
        for (int64_t chunk = 0; chunk < work->chunks; chunk++) {
            chunk_stats(work, &row, chunk, &part);
            stats = chunk == 0 ? part : rafter_row_merge(&stats, &part);
        }
    double loss = 0.0;
    if (call->loss.direction == RAFTER_FORWARD)
        loss = rafter_loss_write_row(&call->loss, index, label, &stats);
    if (call->gradient) { /* the row is still in the second-level cache */
        const struct rafter_row_gradient gradient = row_gradient(call, index, label, &stats);
        columns_gradient(work, &row, 0, call->loss.classes, &gradient);
    }
    return loss;
}

static void rows_task(void *arg, int64_t task) {
    const struct work *work = arg;
    const int64_t from = task * work->rows_per_task, rows = work->call->loss.rows;
    const int64_t to = rows - from < work->rows_per_task ? rows : from + work->rows_per_task;
    double sum = 0.0;
    for (int64_t index = from; index < to; index++)
        sum += whole_row(work, index);
    if (work->sums)
        work->sums[task] = sum;
    if (work->row.stream)
        work->kernels->fence();
}

static double run_rows(const rafter_context *context, struct work *work) {
    double sum = 0.0;
    rafter_parallel(context, work->tasks, rows_task, work);
    for (int64_t task = 0; work->sums && task < work->tasks; task++)
        sum += work->sums[task];
    return sum;
}

/* ---- tasks of chunks of columns -------------------------------------------------------------- */

static void stats_task(void *arg, int64_t task) {
    const struct work *work = arg;
    const int64_t index = task / work->chunks, label = rafter_loss_label(&work->call->loss, index);
    if (needs_stats(work->call, index, label)) {
        const struct cross_entropy_row row = row_at(work, index, label);
        chunk_stats(work, &row, task % work->chunks, &work->stats[task]);
    }
}

static void gradient_task(void *arg, int64_t task) {
    const struct work *work = arg;
    const int64_t index = task / work->chunks, chunk = task % work->chunks;
    const int64_t label = rafter_loss_label(&work->call->loss, index);
    const struct cross_entropy_row row = row_at(work, index, label);
    const struct rafter_row_gradient gradient =
        row_gradient(work->call, index, label, &work->stats[index * work->chunks]);
    columns_gradient(work, &row, chunk * CHUNK, chunk_end(work, chunk), &gradient);
    if (row.stream)
        work->kernels->fence();
}

static double run_split(const rafter_context *context, struct work *work) {
    const struct cross_entropy_call *call = work->call;
    double sum = 0.0;
    rafter_parallel(context, work->tasks, stats_task, work);
    for (int64_t index = 0; index < call->loss.rows; index++) {
        const int64_t label = rafter_loss_label(&call->loss, index);
        struct rafter_row_stats *stats = &work->stats[index * work->chunks]; /* the first becomes that of the row */
        for (int64_t chunk = 1; needs_stats(call, index, label) && chunk < work->chunks; chunk++)
            *stats = rafter_row_merge(stats, &stats[chunk]);
        if (call->loss.direction == RAFTER_FORWARD)
            sum += rafter_loss_write_row(&call->loss, index, label, stats);
    }
    if (call->gradient)
        rafter_parallel(context, work->tasks, gradient_task, work);
    return sum;
}

/* ---- entry points ---------------------------------------------------------------------------- */

static rafter_status run(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction) {
    struct cross_entropy_call call;
    struct work work;
    struct rafter_scratch scratch;
    RAFTER_TRY(take(context, args, direction, &call));
    if (context->cuda)
        return context->cuda->cross_entropy(context, &call);
    RAFTER_TRY(rafter_loss_read(context, &call.loss));
    const size_t bytes = plan(context, &call, &work);
    RAFTER_TRY(rafter_scratch_take(context, call.workspace, call.workspace_bytes, bytes, &scratch));
    if (work.split)
        work.stats = (struct rafter_row_stats *)scratch.memory;
    else
        work.sums = (double *)scratch.memory;
    const double sum = work.split ? run_split(context, &work) : run_rows(context, &work);
    if (direction == RAFTER_FORWARD)
        rafter_loss_write(&call.loss, sum);
    rafter_scratch_release(context, &scratch);
    return RAFTER_OK;
}

rafter_status rafter_cross_entropy_forward(rafter_context *context, const rafter_cross_entropy_args *args) {
    return run(context, args, RAFTER_FORWARD);
}

rafter_status rafter_cross_entropy_backward(rafter_context *context, const rafter_cross_entropy_args *args) {
    return run(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_cross_entropy_workspace(rafter_context *context, const rafter_cross_entropy_args *args,
                                             rafter_direction direction, size_t *bytes) {
    struct cross_entropy_call call;
    struct work work;
    RAFTER_TRY(take(context, args, direction, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted a place for the answer");
    if (context->cuda) {
        *bytes = 0;
        call.ask = bytes;
        return context->cuda->cross_entropy(context, &call);
    }
    *bytes = rafter_scratch_request(plan(context, &call, &work));
    return RAFTER_OK;
}
