/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "core/backend.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "core/variants.h"
#include "ops/lrpe_cosine/kernels.h"

#define RAFTER_VARIANT(isa) extern const struct lrpe_kernels RAFTER_PASTE3(rafter_, lrpe_cosine, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, lrpe_cosine, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_lrpe_cosine = {"lrpe_cosine", sizeof variants / sizeof *variants, variants};

/* ---- checks ---------------------------------------------------------------------------------- */

/* Gives a tensor without a head dimension one of size 1. */
static void add_heads(rafter_view *view) {
    if (view->ndim == 4)
        return;
    view->shape[3] = view->shape[2], view->stride[3] = view->stride[2];
    view->shape[2] = 1, view->stride[2] = 0;
    view->ndim = 4;
}

static rafter_status check_options(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if ((unsigned)args->act > RAFTER_ACT_SOFTMAX)
        return rafter_fail(context, bad, "act is %d, wanted 0 (none) to 4 (softmax)", (int)args->act);
    if ((unsigned)args->softmax_over > RAFTER_OVER_SEQUENCE)
        return rafter_fail(context, bad, "softmax_over is %d, wanted 0 (feature) or 1 (sequence)",
                           (int)args->softmax_over);
    if ((unsigned)args->algorithm > RAFTER_LRPE_BP)
        return rafter_fail(context, bad, "algorithm is %d, wanted 0 (auto), 1 (sp) or 2 (bp)", (int)args->algorithm);
    if (args->reserved != 0)
        return rafter_fail(context, bad, "reserved is %d, wanted 0", (int)args->reserved);
    return RAFTER_OK;
}

static rafter_status check_theta(rafter_context *context, const rafter_view *theta, const int64_t *x) {
    const bool fits = theta->ndim == 2 && (theta->shape[0] == x[2] || theta->shape[0] == 1) &&
                      (theta->shape[1] == x[3] || theta->shape[1] == 1);
    if (fits && (theta->shape[0] == x[2] || theta->shape[1] == x[3]))
        return RAFTER_OK;
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if (theta->ndim != 2)
        return rafter_fail(context, bad,
                           "theta has %d dimensions, wanted 2: [H, D], [H, 1] or [1, D] with H = %lld and D = %lld",
                           theta->ndim, (long long)x[2], (long long)x[3]);
    return rafter_fail(context, bad,
                       "theta has shape [%lld, %lld], wanted [H, D], [H, 1] or [1, D] with H = %lld and D = %lld",
                       (long long)theta->shape[0], (long long)theta->shape[1], (long long)x[2], (long long)x[3]);
}

/* positions [N] or [B, N] as [B, N]. */
static rafter_status check_positions(rafter_context *context, rafter_view *positions, const int64_t *x) {
    const int ndim = positions->ndim;
    if (!((ndim == 1 && positions->shape[0] == x[1]) ||
          (ndim == 2 && positions->shape[0] == x[0] && positions->shape[1] == x[1]))) {
        char given[64] = "";
        if (ndim == 1)
            snprintf(given, sizeof given, "shape [%lld]", (long long)positions->shape[0]);
        else if (ndim == 2)
            snprintf(given, sizeof given, "shape [%lld, %lld]", (long long)positions->shape[0],
                     (long long)positions->shape[1]);
        else
            snprintf(given, sizeof given, "%d dimensions", ndim);
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "positions has %s, wanted [N] or [B, N] with B = %lld and N = %lld", given, (long long)x[0],
                           (long long)x[1]);
    }
    if (ndim == 1) {
        positions->shape[1] = positions->shape[0], positions->stride[1] = positions->stride[0];
        positions->shape[0] = x[0], positions->stride[0] = 0;
        positions->ndim = 2;
    }
    return RAFTER_OK;
}

/* An output of x's dtype and the given shape that shares no memory with the inputs. */
static rafter_status check_output(rafter_context *context, const char *name, const DLTensor *tensor,
                                  const struct lrpe_cosine_call *call, const int64_t *shape, rafter_view *view) {
    RAFTER_TRY(rafter_take_output(context, name, tensor, RAFTER_FLOATS, view));
    RAFTER_TRY(rafter_want_shape(context, name, view, call->x.ndim, shape));
    RAFTER_TRY(rafter_want_same_dtype(context, name, view, "x", &call->x));
    RAFTER_TRY(rafter_want_disjoint(context, name, view, "x", &call->x));
    return RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_lrpe_cosine_args *args, rafter_direction direction,
                           struct lrpe_cosine_call *call) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    RAFTER_TRY(check_options(context, args));
    *call = (struct lrpe_cosine_call){.direction = direction,
                                      .act = args->act,
                                      .softmax_over = args->softmax_over,
                                      .algorithm = args->algorithm,
                                      .offset = args->offset,
                                      .workspace = args->workspace,
                                      .workspace_bytes = args->workspace_bytes};
    RAFTER_TRY(rafter_take_tensor(context, "x", args->x, RAFTER_FLOATS, &call->x));
    rafter_view *const x = &call->x, *const theta = &call->theta, *const positions = &call->positions;
    if (x->ndim != 3 && x->ndim != 4)
        return rafter_fail(context, bad, "x has %d dimensions, wanted 4, [B, N, H, D], or 3, [B, N, D]", x->ndim);
    const int last = x->ndim - 1;
    int64_t doubled[4];
    memcpy(doubled, x->shape, sizeof doubled);
    if (__builtin_mul_overflow(x->shape[last], 2, &doubled[last]))
        return rafter_fail(context, bad, "x has size %lld in dimension %d: y would have twice that",
                           (long long)x->shape[last], last);
    const int64_t four[] = {x->shape[0], x->shape[1], last == 3 ? x->shape[2] : 1, x->shape[last]};

    RAFTER_TRY(rafter_take_tensor(context, "theta", args->theta, RAFTER_FLOATS, theta));
    RAFTER_TRY(check_theta(context, theta, four));
    if (args->positions) {
        RAFTER_TRY(rafter_take_tensor(context, "positions", args->positions, RAFTER_INTS, positions));
        RAFTER_TRY(check_positions(context, positions, four));
    } else {
        int64_t position;
        if (four[1] > 0 && __builtin_add_overflow(args->offset, four[1] - 1, &position))
            return rafter_fail(context, bad, "offset is %lld: the positions of %lld tokens from there on pass 63 bits",
                               (long long)args->offset, (long long)four[1]);
    }

    rafter_view *const inputs[] = {theta, positions, &call->dy};
    static const char *const input_names[] = {"theta", "positions", "dy"};
    if (direction == RAFTER_FORWARD) {
        RAFTER_TRY(check_output(context, "y", args->y, call, doubled, &call->y));
        for (int i = 0; i < 2; i++)
            RAFTER_TRY(rafter_want_disjoint(context, "y", &call->y, input_names[i], inputs[i]));
    } else {
        RAFTER_TRY(rafter_take_tensor(context, "dy", args->dy, RAFTER_FLOATS, &call->dy));
        RAFTER_TRY(rafter_want_shape(context, "dy", &call->dy, x->ndim, doubled));
        RAFTER_TRY(rafter_want_same_dtype(context, "dy", &call->dy, "x", x));
        if (!args->dx && !args->dtheta)
            return rafter_fail(context, bad, "dx and dtheta are both NULL, wanted at least one of them");
        if (args->dx) {
            RAFTER_TRY(check_output(context, "dx", args->dx, call, x->shape, &call->dx));
            for (int i = 0; i < 3; i++)
                RAFTER_TRY(rafter_want_disjoint(context, "dx", &call->dx, input_names[i], inputs[i]));
        }
        if (args->dtheta) {
            rafter_view *const dtheta = &call->dtheta;
            RAFTER_TRY(rafter_take_output(context, "dtheta", args->dtheta, RAFTER_FLOATS, dtheta));
            RAFTER_TRY(rafter_want_same_shape(context, "dtheta", dtheta, "theta", theta));
            if (dtheta->dtype != RAFTER_F32)
                RAFTER_TRY(rafter_want_same_dtype(context, "dtheta", dtheta, "theta", theta));
            RAFTER_TRY(rafter_want_disjoint(context, "dtheta", dtheta, "x", x));
            for (int i = 0; i < 3; i++)
                RAFTER_TRY(rafter_want_disjoint(context, "dtheta", dtheta, input_names[i], inputs[i]));
            if (args->dx)
                RAFTER_TRY(rafter_want_disjoint(context, "dtheta", dtheta, "dx", &call->dx));
        }
    }
    add_heads(x);
    add_heads(&call->y);
    add_heads(&call->dy);
    add_heads(&call->dx);
    return RAFTER_OK;
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* The two algorithms differ in how a call is cut into boxes: sp cuts the sequence; bp leaves it whole and cuts
 * features, so that what the softmax over the sequence reads twice is still in a cache. By shape alone: results must
 * not depend on threads. */
struct cut {
    int64_t b_step, n_step, h_step, d_step;
    int64_t b_count, n_count, h_count, d_count;
};

struct plan {
    const struct lrpe_cosine_call *call;
    const struct lrpe_kernels *kernels;
    enum lrpe_f f;
    struct cut cut;
    bool bp, stream;
    int64_t parts;     /* of column statistics, one per piece of the sequence */
    int64_t part_step; /* floats from one to the next */
    struct lrpe_statistics statistics;
    double *dtheta;             /* [pieces of the sequence and the batch][H, padded D] */
    size_t dtheta_bytes, array; /* sizes of the scratch memory: of dtheta; of pivot, of scale and of dot, in floats */
};

enum {
    TASKS = 64,               /* as many as keep a large machine's threads busy */
    TASK_ELEMENTS = 1 << 18,  /* of x: what a task should take */
    LEAST_ELEMENTS = 1 << 15, /* less is not worth a task */
    MOST_PARTS = 32,          /* pieces of the sequence where each costs workspace */
    BP_COLUMNS = 128,         /* features of a block */
    BP_BATCHES = 16,          /* batches that share its angles, at most */
    BP_BLOCKS = 8,            /* fewer are not worth the choice */
    BP_BYTES = 5 << 20        /* what a thread may hope to find again in its share of the caches */
};

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Cuts `size` into at most `pieces` equal steps. */
static int64_t step_for(int64_t size, int64_t pieces) {
    return ceil_div(size, most(1, least(pieces, size)));
}

/* Whether the softmax over the sequence had better be done in blocks of features: where what it reads twice of a block
 * stays in a cache, and there are blocks enough to share out. Else memory is read best in the order in which it lies.
 */
static bool suits_bp(const struct lrpe_cosine_call *call) {
    const int64_t *shape = call->x.shape, batches = least(shape[0], BP_BATCHES);
    const int64_t elements = batches * shape[1] * BP_COLUMNS; /* of x; there are twice as many of dy */
    const int64_t bytes = elements * rafter_dtype_bytes(call->x.dtype) * (call->direction == RAFTER_FORWARD ? 1 : 3);
    return bytes <= BP_BYTES && ceil_div(shape[2] * shape[3], BP_COLUMNS) * ceil_div(shape[0], BP_BATCHES) >= BP_BLOCKS;
}

static struct cut make_cut(const struct plan *plan) {
    const struct lrpe_cosine_call *call = plan->call;
    const int64_t batch = call->x.shape[0], length = call->x.shape[1], heads = call->x.shape[2],
                  features = call->x.shape[3];
    struct cut cut = {batch, length, heads, features, 1, 1, 1, 1};
    if (plan->bp) {
        if (plan->f != LRPE_FEATURE && features > BP_COLUMNS)
            cut.d_step = BP_COLUMNS;
        cut.h_step = cut.d_step < features ? 1 : least(heads, most(1, BP_COLUMNS / features));
        cut.b_step = least(batch, BP_BATCHES);
    } else {
        cut.n_step = least(length, ceil_div(most(16, TASK_ELEMENTS / (call->x.numel / length)), 16) * 16);
        if (plan->f == LRPE_SEQUENCE || call->dtheta.data)
            cut.n_step = least(length, most(cut.n_step, ceil_div(ceil_div(length, MOST_PARTS), 16) * 16));
        /* A short sequence: cut heads too, and then the batch, which costs computing angles again. */
        const int64_t tasks = least(TASKS, call->x.numel / LEAST_ELEMENTS), pieces = ceil_div(length, cut.n_step);
        cut.h_step = step_for(heads, tasks / pieces);
        cut.b_step = step_for(batch, tasks / pieces / ceil_div(heads, cut.h_step));
    }
    cut.b_count = ceil_div(batch, cut.b_step);
    cut.n_count = ceil_div(length, cut.n_step);
    cut.h_count = ceil_div(heads, cut.h_step);
    cut.d_count = ceil_div(features, cut.d_step);
    return cut;
}

static int64_t tasks_of(const struct cut *cut) {
    return cut->b_count * cut->n_count * cut->h_count * cut->d_count;
}

/* Tasks that follow one another share tokens. */
static struct lrpe_box box_of(const struct plan *plan, int64_t task) {
    const struct cut *cut = &plan->cut;
    const int64_t *shape = plan->call->x.shape;
    struct lrpe_box box;
    box.d = task % cut->d_count * cut->d_step, task /= cut->d_count;
    box.h = task % cut->h_count * cut->h_step, task /= cut->h_count;
    box.b = task % cut->b_count * cut->b_step, task /= cut->b_count;
    box.n = task * cut->n_step;
    box.b_end = least(box.b + cut->b_step, shape[0]);
    box.n_end = least(box.n + cut->n_step, shape[1]);
    box.h_end = least(box.h + cut->h_step, shape[2]);
    box.d_end = least(box.d + cut->d_step, shape[3]);
    return box;
}

/* Bytes from a tensor's first element to its last. */
static int64_t span(const rafter_view *view) {
    int64_t elements = 1;
    for (int d = 0; d < view->ndim; d++)
        elements += (view->shape[d] - 1) * view->stride[d];
    return elements * rafter_dtype_bytes(view->dtype);
}

/* a * b, or a number that no allocator has. */
static size_t times(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX / 4 : product;
}

/* Returns the bytes of scratch memory that the call takes. */
static size_t make_plan(const rafter_context *context, const struct lrpe_cosine_call *call, struct plan *plan) {
    *plan = (struct plan){.call = call, .kernels = rafter_pick(context, &rafter_op_lrpe_cosine)->kernels};
    if (call->x.numel == 0)
        return 0;
    const int64_t *shape = call->x.shape;
    const bool softmax = call->act == RAFTER_ACT_SOFTMAX, sequence = call->softmax_over == RAFTER_OVER_SEQUENCE;
    plan->f = !softmax                   ? (enum lrpe_f)call->act
              : sequence                 ? LRPE_SEQUENCE
              : shape[3] <= LRPE_COLUMNS ? LRPE_FEATURE
                                         : LRPE_FEATURE_WIDE;
    plan->bp = call->algorithm == RAFTER_LRPE_AUTO ? plan->f == LRPE_SEQUENCE && suits_bp(call)
                                                   : call->algorithm == RAFTER_LRPE_BP;
    const rafter_view *out = call->direction == RAFTER_FORWARD ? &call->y : &call->dx;
    plan->stream = out->data && rafter_should_stream(span(out));
    plan->cut = make_cut(plan);

    const size_t columns = times((size_t)shape[0], times((size_t)shape[2], (size_t)lrpe_padded(shape[3])));
    const size_t arrays = call->direction == RAFTER_FORWARD ? 2 : 3;
    plan->parts = plan->cut.n_count;
    if (call->dtheta.data)
        plan->dtheta_bytes =
            times((size_t)(plan->cut.n_count * plan->cut.b_count), times(sizeof(double), columns / (size_t)shape[0]));
    size_t floats = 0;
    if (plan->f == LRPE_SEQUENCE) {
        plan->part_step = (int64_t)times(arrays, columns);
        plan->array = columns;
        floats = times((size_t)plan->parts, times(arrays, columns));
    } else if (plan->f == LRPE_FEATURE_WIDE) {
        plan->array = (size_t)(call->x.numel / shape[3]);
        floats = times(arrays, plan->array);
    }
    return plan->dtheta_bytes + times(sizeof(float), floats);
}

static void place_scratch(struct plan *plan, char *memory) {
    plan->dtheta = plan->dtheta_bytes ? (double *)memory : NULL;
    if (plan->array) {
        float *const floats = (float *)(memory + plan->dtheta_bytes);
        plan->statistics.pivot = floats;
        plan->statistics.scale = floats + plan->array;
        plan->statistics.dot = plan->call->direction == RAFTER_BACKWARD ? floats + 2 * plan->array : NULL;
    }
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static void column_task(void *arg, int64_t task) {
    const struct plan *plan = arg;
    const struct lrpe_box box = box_of(plan, task);
    const int64_t part = box.n / plan->cut.n_step * plan->part_step;
    struct lrpe_statistics there = {plan->statistics.pivot + part, plan->statistics.scale + part, NULL};
    if (plan->statistics.dot)
        there.dot = plan->statistics.dot + part;
    plan->kernels->columns(plan->call, &box, &there);
}

/* One task per batch. */
static void merge_task(void *arg, int64_t task) {
    const struct plan *plan = arg;
    const int64_t *shape = plan->call->x.shape;
    const struct lrpe_box box = {.b = task, .b_end = task + 1, .h_end = shape[2], .d_end = shape[3]};
    plan->kernels->merge(plan->call, &box, &plan->statistics, plan->parts, plan->part_step);
}

static void row_task(void *arg, int64_t task) {
    const struct plan *plan = arg;
    struct lrpe_box box = box_of(plan, task);
    if (box.d > 0)
        return; /* where features are cut, the first piece does the whole row */
    box.d_end = plan->call->x.shape[3];
    plan->kernels->rows(plan->call, &box, &plan->statistics);
}

static void main_task(void *arg, int64_t task) {
    const struct plan *plan = arg;
    const struct lrpe_cosine_call *call = plan->call;
    const struct lrpe_box box = box_of(plan, task);
    if (plan->f == LRPE_SEQUENCE && plan->bp) {
        plan->kernels->columns(call, &box, &plan->statistics);
        plan->kernels->merge(call, &box, &plan->statistics, 1, 0);
    }
    if (call->direction == RAFTER_FORWARD) {
        plan->kernels->forward(call, &box, plan->f, &plan->statistics, plan->stream);
        return;
    }
    double *part = NULL;
    if (plan->dtheta) {
        const int64_t pieces_before = box.n / plan->cut.n_step * plan->cut.b_count + box.b / plan->cut.b_step;
        part = plan->dtheta + pieces_before * call->x.shape[2] * lrpe_padded(call->x.shape[3]);
    }
    plan->kernels->backward(call, &box, plan->f, &plan->statistics, part, plan->stream);
}

enum { DTHETA_STEP = 256 }; /* elements of dtheta in a task */

static void dtheta_task(void *arg, int64_t task) {
    const struct plan *plan = arg;
    const struct lrpe_cosine_call *call = plan->call;
    const int64_t parts = call->x.numel > 0 ? plan->cut.n_count * plan->cut.b_count : 0;
    plan->kernels->dtheta(call, plan->dtheta, parts, task * DTHETA_STEP,
                          least((task + 1) * DTHETA_STEP, call->dtheta.numel));
}

static rafter_status run(rafter_context *context, const struct lrpe_cosine_call *call) {
    struct plan plan;
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_scratch_take(context, call->workspace, call->workspace_bytes, make_plan(context, call, &plan),
                                   &scratch));
    place_scratch(&plan, scratch.memory);
    if (call->x.numel > 0) {
        const int64_t tasks = tasks_of(&plan.cut);
        if (plan.f == LRPE_SEQUENCE && !plan.bp) {
            rafter_parallel(context, tasks, column_task, &plan);
            rafter_parallel(context, call->x.shape[0], merge_task, &plan);
        } else if (plan.f == LRPE_FEATURE_WIDE) {
            rafter_parallel(context, tasks, row_task, &plan);
        }
        rafter_parallel(context, tasks, main_task, &plan);
    }
    if (call->dtheta.data)
        rafter_parallel(context, ceil_div(call->dtheta.numel, DTHETA_STEP), dtheta_task, &plan);
    rafter_scratch_release(context, &scratch);
    return RAFTER_OK;
}

/* ---- the API --------------------------------------------------------------------------------- */

static rafter_status call_op(rafter_context *context, const rafter_lrpe_cosine_args *args, rafter_direction direction) {
    rafter_lrpe_cosine_args a;
    struct lrpe_cosine_call call;
    RAFTER_TRY(rafter_take_args(context, "rafter_lrpe_cosine_args", args, &a, sizeof a));
    RAFTER_TRY(check(context, &a, direction, &call));
    return context->cuda ? context->cuda->lrpe_cosine(context, &call) : run(context, &call);
}

rafter_status rafter_lrpe_cosine_forward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    return call_op(context, args, RAFTER_FORWARD);
}

rafter_status rafter_lrpe_cosine_backward(rafter_context *context, const rafter_lrpe_cosine_args *args) {
    return call_op(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_lrpe_cosine_workspace(rafter_context *context, const rafter_lrpe_cosine_args *args,
                                           rafter_direction direction, size_t *bytes) {
    rafter_lrpe_cosine_args a;
    struct lrpe_cosine_call call;
    struct plan plan;
    RAFTER_TRY(rafter_take_args(context, "rafter_lrpe_cosine_args", args, &a, sizeof a));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted where to put the size");
    if (direction != RAFTER_FORWARD && direction != RAFTER_BACKWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "direction is %d, wanted 0 (forward) or 1 (backward)",
                           (int)direction);
    RAFTER_TRY(check(context, &a, direction, &call));
    if (context->cuda) {
        *bytes = 0;
        call.ask = bytes;
        return context->cuda->lrpe_cosine(context, &call);
    }
    *bytes = rafter_scratch_request(make_plan(context, &call, &plan));
    return RAFTER_OK;
}
