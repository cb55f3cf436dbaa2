#include "ops/cross_entropy/kernels.h"

#include <math.h>

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

/* A checked call, and how it is cut. */
struct call {
    const struct cross_entropy_kernels *kernels;
    struct rafter_loss loss;
    rafter_view logits, dlogits;  /* rows collapsed, columns last */
    bool gradient;                /* dlogits is wanted */
    struct cross_entropy_row row; /* what all rows share */

    bool split; /* tasks are chunks of columns, else several rows */
    int64_t chunks, rows_per_task, tasks;
    struct rafter_row_stats *stats; /* split: per row and chunk */
    double *sums;                   /* not split: of the row losses of each task */
};

static rafter_status take(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction,
                          rafter_cross_entropy_args *a, struct call *call) {
    *call = (struct call){0};
    RAFTER_TRY(rafter_take_args(context, "rafter_cross_entropy_args", args, a, sizeof *a));
    rafter_view *logits = &call->logits, *dlogits = &call->dlogits;
    RAFTER_TRY(rafter_take_tensor(context, "logits", a->logits, RAFTER_FLOATS, logits));
    if (logits->ndim == 0)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "logits has 0 dimensions, wanted at least the one of classes");
    const struct rafter_loss_args loss_args = {a->options, a->target,  a->loss,   a->row_loss, a->lse,
                                               a->logprob, a->entropy, a->argmax, a->dloss};
    const int row_dims = logits->ndim - 1;
    RAFTER_TRY(rafter_loss_take(context, &loss_args, direction, "logits without its last dimension", row_dims,
                                logits->shape, logits->shape[row_dims], &call->loss));
    RAFTER_TRY(rafter_loss_want_disjoint(context, &call->loss, "logits", logits, false));
    call->gradient = a->dlogits || direction == RAFTER_BACKWARD;
    if (call->gradient) {
        RAFTER_TRY(rafter_take_output(context, "dlogits", a->dlogits, RAFTER_FLOATS, dlogits));
        RAFTER_TRY(rafter_want_same_dtype(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_want_same_shape(context, "dlogits", dlogits, "logits", logits));
        if (!rafter_same_memory(dlogits, logits))
            RAFTER_TRY(rafter_want_disjoint(context, "dlogits", dlogits, "logits", logits));
        RAFTER_TRY(rafter_loss_want_disjoint(context, &call->loss, "dlogits", dlogits, true));
    }
    return RAFTER_OK;
}

/* Bytes from a tensor's first element to past its last. */
static int64_t span_bytes(const rafter_view *view) {
    return view->numel ? (rafter_offset(view, 0, view->ndim, view->numel - 1) + 1) * rafter_dtype_bytes(view->dtype)
                       : 0;
}

/* Decides everything that follows from the arguments but not from data. Returns the bytes of scratch memory. */
static size_t plan(const rafter_context *context, struct call *call) {
    const struct rafter_loss *loss = &call->loss;
    const int64_t rows = loss->rows, classes = loss->classes;
    const bool forward = loss->direction == RAFTER_FORWARD, in_place = call->logits.data == call->dlogits.data;
    call->kernels = rafter_pick(context, &rafter_op_cross_entropy)->kernels;

    const int columns = call->logits.ndim - 1; /* the dimension of classes; the collapsed rows come before it */
    call->row = (struct cross_entropy_row){
        .dtype = call->logits.dtype,
        .z_stride = classes > 1 ? call->logits.stride[columns] : 1,
        .dz_stride = classes > 1 ? call->dlogits.stride[columns] : 1,
        .softcap = loss->softcap,
        .scale = loss->scale,
        .weight = loss->smoothing != 0.0f ? loss->class_weight.data : NULL,
        .weight_stride = classes > 1 ? loss->class_weight.stride[0] : 1,
        .weighted = forward && loss->smoothing != 0.0f,
        .moment = rafter_loss_has(&loss->entropy),
        .argmax = rafter_loss_has(&loss->argmax),
        .stream = call->gradient && !in_place && rafter_should_stream(span_bytes(&call->dlogits)),
    };
    rafter_view *views[] = {&call->logits, &call->dlogits};
    for (int i = 0; i < (call->gradient ? 2 : 1); i++)
        rafter_collapse(&views[i], 1, 0, columns);

    call->chunks = (classes + CHUNK - 1) / CHUNK;
    call->split = rows < FEW_ROWS && call->chunks > 1;
    if (call->split) {
        call->tasks = rows * call->chunks;
        return (size_t)call->tasks * sizeof *call->stats;
    }
    const int64_t for_count = (rows + MOST_TASKS - 1) / MOST_TASKS, for_size = LEAST_ELEMENTS / (classes + 1) + 1;
    call->rows_per_task = for_count > for_size ? for_count : for_size;
    call->tasks = (rows + call->rows_per_task - 1) / call->rows_per_task;
    return forward ? (size_t)call->tasks * sizeof *call->sums : 0;
}

/* The row's slice of the tensors. */
static struct cross_entropy_row row_at(const struct call *call, int64_t index, int64_t label) {
    struct cross_entropy_row row = call->row;
    row.label = label;
    row.z = rafter_at(&call->logits, rafter_offset(&call->logits, 0, call->logits.ndim - 1, index));
    if (call->gradient)
        row.dz = rafter_at(&call->dlogits, rafter_offset(&call->dlogits, 0, call->dlogits.ndim - 1, index));
    return row;
}

/* Calls visit for [first, end) in pieces that fit a kernel's buffers, or all at once where it needs none. */
static int64_t piece_end(bool buffered, int64_t first, int64_t end) {
    return buffered && end - first > CROSS_ENTROPY_PIECE ? first + CROSS_ENTROPY_PIECE : end;
}

static int64_t chunk_end(const struct call *call, int64_t chunk) {
    return chunk + 1 < call->chunks ? (chunk + 1) * CHUNK : call->loss.classes;
}

static void chunk_stats(const struct call *call, const struct cross_entropy_row *row, int64_t chunk,
                        struct rafter_row_stats *stats) {
    const bool buffered = cross_entropy_stats_buffered(row);
    const int64_t start = chunk * CHUNK, end = chunk_end(call, chunk);
    for (int64_t first = start, next; first < end; first = next) {
        struct rafter_row_stats part;
        next = piece_end(buffered, first, end);
        call->kernels->stats(row, first, next - first, &part);
        *stats = first == start ? part : rafter_row_merge(stats, &part);
    }
}

static void columns_gradient(const struct call *call, const struct cross_entropy_row *row, int64_t start, int64_t end,
                             const struct rafter_row_gradient *gradient) {
    const bool buffered = !gradient->zero && cross_entropy_gradient_buffered(row);
    for (int64_t first = start, next; first < end; first = next) {
        next = piece_end(buffered, first, end);
        call->kernels->gradient(row, first, next - first, gradient);
    }
}

/* Whether backward can start from the lse it was given. A float that large carries an error that would show in the
 * gradient: at 1e30, a tie of two looks like no tie. The bounds keep it to 2^-13, 2^-16 and 2^-18 of p, which for the
 * 16-bit dtypes is a sixteenth of their own rounding. (NaN and infinities are not below them either.) */
static bool lse_serves(const struct call *call, int64_t row) {
    const rafter_dtype dtype = call->logits.dtype;
    const float bound = dtype == RAFTER_BF16 ? 0x1p11f : dtype == RAFTER_F16 ? 0x1p8f : 0x1p6f;
    return call->loss.direction == RAFTER_BACKWARD && rafter_loss_has(&call->loss.lse) &&
           fabsf(rafter_loss_given_lse(&call->loss, row)) <= bound;
}

/* Statistics are not needed for ignored rows, nor for backward from a given lse. */
static bool needs_stats(const struct call *call, int64_t row, int64_t label) {
    return label >= 0 && !lse_serves(call, row);
}

static struct rafter_row_gradient row_gradient(const struct call *call, int64_t row, int64_t label,
                                               const struct rafter_row_stats *stats) {
    return label >= 0 && lse_serves(call, row)
               ? rafter_loss_gradient_from_lse(&call->loss, row, label, rafter_loss_given_lse(&call->loss, row))
               : rafter_loss_gradient(&call->loss, row, label, stats);
}

/* ---- tasks of whole rows ------------------------------------------------------------------------------------------
 */

static void rows_task(void *arg, int64_t task) {
    const struct call *call = arg;
    const int64_t from = task * call->rows_per_task, to = from + call->rows_per_task;
    double sum = 0.0;
    for (int64_t index = from; index < to && index < call->loss.rows; index++) {
        const int64_t label = rafter_loss_label(&call->loss, index);
        const struct cross_entropy_row row = row_at(call, index, label);
        struct rafter_row_stats stats = rafter_row_empty, part;
        if (needs_stats(call, index, label))
            for (int64_t chunk = 0; chunk < call->chunks; chunk++) {
                chunk_stats(call, &row, chunk, &part);
                stats = chunk == 0 ? part : rafter_row_merge(&stats, &part);
            }
        if (call->sums)
            sum += rafter_loss_write_row(&call->loss, index, label, &stats);
        if (call->gradient) {
            const struct rafter_row_gradient gradient = row_gradient(call, index, label, &stats);
            columns_gradient(call, &row, 0, call->loss.classes, &gradient);
        }
    }
    if (call->sums)
        call->sums[task] = sum;
    if (call->row.stream)
        call->kernels->fence();
}

/* ---- tasks of chunks of columns -----------------------------------------------------------------------------------
 */

static void stats_task(void *arg, int64_t task) {
    const struct call *call = arg;
    const int64_t index = task / call->chunks, label = rafter_loss_label(&call->loss, index);
    if (needs_stats(call, index, label)) {
        const struct cross_entropy_row row = row_at(call, index, label);
        chunk_stats(call, &row, task % call->chunks, &call->stats[task]);
    }
}

static void gradient_task(void *arg, int64_t task) {
    const struct call *call = arg;
    const int64_t index = task / call->chunks, chunk = task % call->chunks;
    const int64_t label = rafter_loss_label(&call->loss, index);
    const struct cross_entropy_row row = row_at(call, index, label);
    const struct rafter_row_gradient gradient = row_gradient(call, index, label, &call->stats[index * call->chunks]);
    columns_gradient(call, &row, chunk * CHUNK, chunk_end(call, chunk), &gradient);
    if (call->row.stream)
        call->kernels->fence();
}

/* Returns the sum of the row losses. */
static double run_split(const rafter_context *context, struct call *call) {
    double sum = 0.0;
    rafter_parallel(context, call->tasks, stats_task, call);
    for (int64_t index = 0; index < call->loss.rows; index++) {
        const int64_t label = rafter_loss_label(&call->loss, index);
        struct rafter_row_stats *stats = &call->stats[index * call->chunks]; /* the first becomes that of the row */
        if (needs_stats(call, index, label))
            for (int64_t chunk = 1; chunk < call->chunks; chunk++)
                *stats = rafter_row_merge(stats, &stats[chunk]);
        if (call->loss.direction == RAFTER_FORWARD)
            sum += rafter_loss_write_row(&call->loss, index, label, stats);
    }
    if (call->gradient)
        rafter_parallel(context, call->tasks, gradient_task, call);
    return sum;
}

/* ---- entry points -------------------------------------------------------------------------------------------------
 */

static rafter_status run(rafter_context *context, const rafter_cross_entropy_args *args, rafter_direction direction) {
    rafter_cross_entropy_args a;
    struct call call;
    RAFTER_TRY(take(context, args, direction, &a, &call));
    RAFTER_TRY(rafter_loss_read(context, &call.loss));
    struct rafter_scratch scratch;
    const size_t bytes = plan(context, &call);
    RAFTER_TRY(rafter_scratch_take(context, a.workspace, a.workspace_bytes, bytes, &scratch));
    double sum = 0.0;
    if (call.split) {
        call.stats = (struct rafter_row_stats *)scratch.memory;
        sum = run_split(context, &call);
    } else {
        call.sums = (double *)scratch.memory;
        rafter_parallel(context, call.tasks, rows_task, &call);
        for (int64_t task = 0; call.sums && task < call.tasks; task++)
            sum += call.sums[task];
    }
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
    rafter_cross_entropy_args a;
    struct call call;
    RAFTER_TRY(take(context, args, direction, &a, &call));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted somewhere to write the size");
    *bytes = rafter_scratch_request(plan(context, &call));
    return RAFTER_OK;
}
