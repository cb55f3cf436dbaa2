/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine on the CPU. A call is cut into boxes of batches, tokens, heads and features, one box per task. The cut
 * follows from shapes alone, so that results do not depend on the number of threads.
 */
#include <string.h>

#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/lrpe_cosine/call.h"
#include "ops/lrpe_cosine/kernels.h"

/* ---- plan ------------------------------------------------------------------------------------ */

/* How a call is cut into boxes: `step` elements of each dimension per box, `count` boxes along it. The
 * algorithm sp cuts the sequence. bp leaves the sequence whole and cuts the features, so that the
 * second read of a softmax over the sequence is served by a cache. */
struct cut {
    int64_t b_step, n_step, h_step, d_step;
    int64_t b_count, n_count, h_count, d_count;
};

struct plan {
    enum lrpe_f f;
    struct cut cut;
    bool bp, stream;     /* stream: the output is written past the caches */
    int64_t part_step;   /* floats between the column statistics of pieces of the sequence */
    size_t dtheta_bytes; /* workspace for the parts of dtheta */
    size_t array;        /* workspace for pivot, for scale and for dot: floats of each */
};

enum {
    TASKS = 64,               /* enough to keep the threads of a large machine busy */
    TASK_ELEMENTS = 1 << 18,  /* elements of x per task */
    LEAST_ELEMENTS = 1 << 15, /* fewer elements of x are not worth a task */
    MOST_PARTS = 32,          /* pieces of the sequence where each costs workspace */
    BP_COLUMNS = 128,         /* features per box of bp */
    BP_BATCHES = 16,          /* most batches per box of bp: they share its angles */
    BP_BLOCKS = 8,            /* auto takes sp if bp would have fewer boxes */
    TURNED_HEADS = 8,         /* from this many contiguous heads on, transposing is faster than gathering */
    MOST_TURNED_HEADS = 16,   /* contiguous heads that fill a vector of any variant */
    INVARIANT_BATCH = 8,      /* the batch size that a batch-invariant softmax assumes when it cuts the sequence */
    BP_BYTES = 5 << 20        /* auto takes sp if a box of bp is larger than a thread's share of cache */
};

/* The step that cuts `size` into at most `pieces` equal pieces. */
static int64_t step_for(int64_t size, int64_t pieces) {
    return ceil_div(size, max64(1, min64(pieces, size)));
}

/* Whether auto takes bp for a softmax over the sequence: if the inputs of a box stay in a cache for the
 * second read, and there are boxes enough for all threads. Otherwise it takes sp, which reads memory
 * in sequence. */
static bool suits_bp(const struct lrpe_cosine_call *call) {
    const int64_t *const shape = call->x.shape, batches = min64(shape[0], BP_BATCHES);
    const int64_t elements = batches * shape[1] * BP_COLUMNS; /* of x; dy has twice as many */
    const int64_t inputs = call->common.direction == RAFTER_FORWARD ? 1 : 3;
    const int64_t boxes = ceil_div(shape[2] * shape[3], BP_COLUMNS) * ceil_div(shape[0], BP_BATCHES);
    return elements * inputs * rafter_dtype_bytes(call->x.dtype) <= BP_BYTES && boxes >= BP_BLOCKS &&
           !call->common.batch_invariant;
}

static struct cut make_cut(const struct lrpe_cosine_call *call, enum lrpe_f f, bool bp) {
    const int64_t batch = call->x.shape[0], length = call->x.shape[1], heads = call->x.shape[2],
                  features = call->x.shape[3];
    struct cut cut = {batch, length, heads, features, 1, 1, 1, 1};
    if (bp) {
        if (f != LRPE_FEATURE && features > BP_COLUMNS)
            cut.d_step = BP_COLUMNS;
        cut.h_step = cut.d_step < features ? 1 : min64(heads, max64(1, BP_COLUMNS / features));
        cut.b_step = min64(batch, BP_BATCHES);
    } else {
        /* Theta is loaded once per box if all columns of the box fit: heads are cut into groups that do. */
        const int64_t fit = max64(LRPE_COLUMNS / lrpe_padded(features), 1);
        int64_t groups = ceil_div(heads, fit);
        /* Contiguous heads stay together, so that they can be transposed: features are cut instead. */
        const bool turns = lrpe_lies_across(call) && heads >= TURNED_HEADS && fit < min64(heads, MOST_TURNED_HEADS);
        if (turns && f != LRPE_FEATURE) {
            cut.h_step = min64(heads, LRPE_COLUMNS / LRPE_ALIGN);
            cut.d_step = min64(features, LRPE_COLUMNS / cut.h_step / LRPE_ALIGN * LRPE_ALIGN);
            groups = ceil_div(heads, cut.h_step) * ceil_div(features, cut.d_step);
        }
        const bool invariant = f == LRPE_SEQUENCE && call->common.batch_invariant;
        const int64_t per_token =
            ceil_div(invariant ? INVARIANT_BATCH * heads * features : call->x.numel / length, groups);
        /* Small tensors have smaller tasks. Those of a batch-invariant softmax do not depend on the batch. */
        const int64_t share = max64(ceil_div(call->x.numel, TASKS), LEAST_ELEMENTS);
        const int64_t elements = invariant ? TASK_ELEMENTS : min64(share, TASK_ELEMENTS);
        cut.n_step = min64(length, round_up(max64(16, elements / per_token), 16));
        if (f == LRPE_SEQUENCE || call->dtheta.data)
            cut.n_step = min64(length, max64(cut.n_step, round_up(ceil_div(length, MOST_PARTS), 16)));
        /* If the sequence is short, heads are cut too, and then the batch, although each of its parts computes the
         * angles again. */
        const int64_t tasks = min64(TASKS, call->x.numel / LEAST_ELEMENTS), pieces = ceil_div(length, cut.n_step);
        if (cut.d_step == features)
            cut.h_step = step_for(heads, max64(tasks / pieces, groups));
        cut.b_step = step_for(batch, tasks / pieces / (ceil_div(heads, cut.h_step) * ceil_div(features, cut.d_step)));
    }
    cut.b_count = ceil_div(batch, cut.b_step);
    cut.n_count = ceil_div(length, cut.n_step);
    cut.h_count = ceil_div(heads, cut.h_step);
    cut.d_count = ceil_div(features, cut.d_step);
    return cut;
}

static enum lrpe_f kernel_f(const struct lrpe_cosine_call *call) {
    if (call->act != RAFTER_ACT_SOFTMAX)
        return (enum lrpe_f)call->act;
    if (call->softmax_over == RAFTER_OVER_SEQUENCE)
        return LRPE_SEQUENCE;
    return call->x.shape[3] <= LRPE_COLUMNS ? LRPE_FEATURE : LRPE_FEATURE_WIDE;
}

/* a * b, or a size that no allocator can give. */
static size_t times(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX / 4 : product;
}

/* The workspace holds the parts of dtheta, then the statistics of a softmax: pivot, scale and, in
 * backward, dot. */
static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    (void)context;
    const struct lrpe_cosine_call *const call = (const void *)common;
    struct plan *const plan = storage;
    *plan = (struct plan){.f = kernel_f(call)};
    if (call->x.numel == 0)
        return 0;
    const int64_t *const shape = call->x.shape;
    plan->bp = call->algorithm == RAFTER_LRPE_AUTO ? plan->f == LRPE_SEQUENCE && suits_bp(call)
                                                   : call->algorithm == RAFTER_LRPE_BP;
    const rafter_view *const out = common->direction == RAFTER_FORWARD ? &call->y : &call->dx;
    plan->stream = out->data && rafter_should_stream(out, (struct shortest_streamed){0});
    plan->cut = make_cut(call, plan->f, plan->bp);

    const size_t columns = times((size_t)shape[0], times((size_t)shape[2], (size_t)lrpe_padded(shape[3])));
    const size_t arrays = common->direction == RAFTER_FORWARD ? 2 : 3;
    if (call->dtheta.data)
        plan->dtheta_bytes =
            times((size_t)(plan->cut.n_count * plan->cut.b_count), times(sizeof(double), columns / (size_t)shape[0]));
    size_t floats = 0;
    if (plan->f == LRPE_SEQUENCE) {
        plan->part_step = (int64_t)times(arrays, columns);
        plan->array = columns;
        floats = times((size_t)plan->cut.n_count, times(arrays, columns));
    } else if (plan->f == LRPE_FEATURE_WIDE) {
        plan->array = (size_t)(call->x.numel / shape[3]);
        floats = times(arrays, plan->array);
    }
    return plan->dtheta_bytes + times(sizeof(float), floats);
}
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

/* ---- running --------------------------------------------------------------------------------- */

struct work {
    const struct lrpe_cosine_call *call;
    const struct plan *plan;
    const struct lrpe_cosine_kernels *kernels;
    struct lrpe_statistics statistics; /* of the first piece of the sequence */
    double *dtheta;                    /* [pieces of sequence and batch][H, padded D], or NULL */
};

static struct work place(const struct lrpe_cosine_call *call, const struct plan *plan, const void *kernels,
                         char *workspace) {
    struct work work = {.call = call, .plan = plan, .kernels = kernels};
    if (plan->dtheta_bytes)
        work.dtheta = (double *)(void *)workspace;
    if (plan->array) {
        float *const floats = (float *)(void *)(workspace + plan->dtheta_bytes);
        work.statistics.pivot = floats;
        work.statistics.scale = floats + plan->array;
        work.statistics.dot = call->common.direction == RAFTER_BACKWARD ? floats + 2 * plan->array : NULL;
    }
    return work;
}

/* The box of a task. Consecutive tasks share tokens. */
static struct lrpe_box box_of(const struct work *work, int64_t task) {
    const struct cut *const cut = &work->plan->cut;
    const int64_t *const shape = work->call->x.shape;
    struct lrpe_box box;
    box.d = task % cut->d_count * cut->d_step, task /= cut->d_count;
    box.h = task % cut->h_count * cut->h_step, task /= cut->h_count;
    box.b = task % cut->b_count * cut->b_step, task /= cut->b_count;
    box.n = task * cut->n_step;
    box.b_end = min64(box.b + cut->b_step, shape[0]);
    box.n_end = min64(box.n + cut->n_step, shape[1]);
    box.h_end = min64(box.h + cut->h_step, shape[2]);
    box.d_end = min64(box.d + cut->d_step, shape[3]);
    return box;
}

/* sp: the statistics of a box's columns over its piece of the sequence. */
static void columns_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct lrpe_box box = box_of(work, task);
    const int64_t part = box.n / work->plan->cut.n_step * work->plan->part_step;
    struct lrpe_statistics statistics = {work->statistics.pivot + part, work->statistics.scale + part, NULL};
    if (work->statistics.dot)
        statistics.dot = work->statistics.dot + part;
    work->kernels->columns(work->call, &box, &statistics);
}

/* sp: merges the pieces of the sequence. One task per batch. */
static void merge_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t *const shape = work->call->x.shape;
    const struct lrpe_box box = {.b = task, .b_end = task + 1, .h_end = shape[2], .d_end = shape[3]};
    work->kernels->merge(work->call, &box, &work->statistics, work->plan->cut.n_count, work->plan->part_step);
}

static void rows_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    struct lrpe_box box = box_of(work, task);
    if (box.d > 0)
        return; /* if features are cut, the first piece takes the whole row */
    box.d_end = work->call->x.shape[3];
    work->kernels->rows(work->call, &box, &work->statistics);
}

static void results_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct lrpe_cosine_call *const call = work->call;
    const struct plan *const plan = work->plan;
    const struct lrpe_box box = box_of(work, task);
    if (plan->f == LRPE_SEQUENCE && plan->bp) {
        work->kernels->columns(call, &box, &work->statistics);
        work->kernels->merge(call, &box, &work->statistics, 1, 0);
    }
    if (call->common.direction == RAFTER_FORWARD) {
        work->kernels->forward(call, &box, plan->f, &work->statistics, plan->stream);
        return;
    }
    double *part = NULL;
    if (work->dtheta) {
        const int64_t pieces_before = box.n / plan->cut.n_step * plan->cut.b_count + box.b / plan->cut.b_step;
        part = work->dtheta + pieces_before * call->x.shape[2] * lrpe_padded(call->x.shape[3]);
    }
    work->kernels->backward(call, &box, plan->f, &work->statistics, part, plan->stream);
}

enum { DTHETA_STEP = 256 }; /* elements of dtheta per task */

static void dtheta_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct lrpe_cosine_call *const call = work->call;
    const int64_t parts = work->plan->cut.n_count * work->plan->cut.b_count; /* 0 if x is empty */
    work->kernels->dtheta(call, work->dtheta, parts, task * DTHETA_STEP,
                          min64((task + 1) * DTHETA_STEP, call->dtheta.numel));
}

static rafter_status run(rafter_context *context, const struct rafter_call *common, const void *plan_storage,
                         const void *kernels, char *workspace) {
    const struct lrpe_cosine_call *const call = (const void *)common;
    const struct plan *const plan = plan_storage;
    const struct cut *const cut = &plan->cut;
    struct work work = place(call, plan, kernels, workspace);
    const int64_t tasks = cut->b_count * cut->n_count * cut->h_count * cut->d_count;
    if (plan->f == LRPE_SEQUENCE && !plan->bp) {
        rafter_parallel(context, tasks, columns_task, &work);
        rafter_parallel(context, tasks > 0 ? call->x.shape[0] : 0, merge_task, &work);
    } else if (plan->f == LRPE_FEATURE_WIDE) {
        rafter_parallel(context, tasks, rows_task, &work);
    }
    rafter_parallel(context, tasks, results_task, &work);
    if (call->dtheta.data)
        rafter_parallel(context, ceil_div(call->dtheta.numel, DTHETA_STEP), dtheta_task, &work);
    return RAFTER_OK;
}

const struct rafter_variant_functions rafter_lrpe_cosine_on_cpu = {NULL, make_plan, run};
