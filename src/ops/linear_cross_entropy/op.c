/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "core/backend.h"
#include "core/threads.h"
#include "core/variants.h"
#include "ops/linear_cross_entropy/call.h"
#include "ops/linear_cross_entropy/plan.h"

#define RAFTER_VARIANT(isa) extern const struct lce_kernels RAFTER_PASTE3(rafter_, linear_cross_entropy, isa);
#include "variants.inc"
#undef RAFTER_VARIANT

static const struct rafter_variant variants[] = {
#define RAFTER_VARIANT(isa) {RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, linear_cross_entropy, isa)},
#include "variants.inc"
#undef RAFTER_VARIANT
};

const struct rafter_op rafter_op_linear_cross_entropy = {"linear_cross_entropy", sizeof variants / sizeof *variants,
                                                         variants};

/* ---- arguments ------------------------------------------------------------------------------- */

struct call {
    rafter_context *context;
    rafter_linear_cross_entropy_args args;
    rafter_direction direction;
    struct rafter_loss loss;
    rafter_view x, weight, bias, dx, dweight,
        dbias; /* data NULL: not given, or empty. Rows of x and dx are collapsed */
    bool has_dx, has_dweight, has_dbias;

    const struct lce_kernels *kernels;
    struct lce_problem problem;
    struct lce_plan plan;
};

/* A gradient: shaped as its input, in the input's dtype or fp32. */
static rafter_status take_gradient(rafter_context *context, const char *name, const DLTensor *tensor,
                                   const char *input_name, const rafter_view *input, rafter_view *view) {
    if (!tensor)
        return RAFTER_OK;
    const unsigned dtypes = RAFTER_SET(RAFTER_F32) | RAFTER_SET(input->dtype);
    RAFTER_TRY(rafter_take_output(context, name, tensor, dtypes, view));
    return rafter_want_same_shape(context, name, view, input_name, input);
}

static rafter_status check_choices(rafter_context *context, const rafter_linear_cross_entropy_args *a) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    if ((unsigned)a->mode > RAFTER_LCE_COMPACT)
        return rafter_fail(context, bad, "mode is %d, wanted RAFTER_LCE_AUTO, RAFTER_LCE_FAST or RAFTER_LCE_COMPACT",
                           (int)a->mode);
    if ((unsigned)a->accumulate > RAFTER_ACCUMULATE_NATIVE)
        return rafter_fail(context, bad, "accumulate is %d, wanted RAFTER_ACCUMULATE_F32 or RAFTER_ACCUMULATE_NATIVE",
                           (int)a->accumulate);
    if ((unsigned)a->accumulate_into_dweight > 1)
        return rafter_fail(context, bad, "accumulate_into_dweight is %d, wanted 0 or 1",
                           (int)a->accumulate_into_dweight);
    if (a->reserved != 0)
        return rafter_fail(context, bad, "reserved is %d, wanted 0", (int)a->reserved);
    return RAFTER_OK;
}

static rafter_status check(rafter_context *context, const rafter_linear_cross_entropy_args *args,
                           rafter_direction direction, struct call *c) {
    const rafter_status bad = RAFTER_INVALID_ARGUMENT;
    *c = (struct call){.context = context, .direction = direction};
    rafter_linear_cross_entropy_args *a = &c->args;
    RAFTER_TRY(rafter_take_args(context, "rafter_linear_cross_entropy_args", args, a, sizeof *a));
    RAFTER_TRY(check_choices(context, a));

    RAFTER_TRY(rafter_take_tensor(context, "x", a->x, RAFTER_FLOATS, &c->x));
    if (c->x.ndim < 1)
        return rafter_fail(context, bad, "x has no dimensions, wanted [..., D]");
    RAFTER_TRY(rafter_take_tensor(context, "weight", a->weight, RAFTER_FLOATS, &c->weight));
    RAFTER_TRY(rafter_want_same_dtype(context, "weight", &c->weight, "x", &c->x));
    const int leading = c->x.ndim - 1;
    const int64_t depth = c->x.shape[leading];
    if (c->weight.ndim != 2)
        return rafter_fail(context, bad, "weight has %d dimensions, wanted 2: [V, D]", c->weight.ndim);
    const int64_t classes = c->weight.shape[0];
    RAFTER_TRY(rafter_want_shape(context, "weight", &c->weight, 2, (const int64_t[]){classes, depth}));
    if (a->bias) {
        RAFTER_TRY(rafter_take_tensor(context, "bias", a->bias, RAFTER_FLOATS, &c->bias));
        RAFTER_TRY(rafter_want_same_dtype(context, "bias", &c->bias, "x", &c->x));
        RAFTER_TRY(rafter_want_shape(context, "bias", &c->bias, 1, &classes));
    } else if (a->dbias) {
        return rafter_fail(context, bad, "dbias is given but bias is NULL, wanted both or neither");
    }

    const struct rafter_loss_args loss_args = {a->options, a->target,  a->loss,   a->row_loss, a->lse,
                                               a->logprob, a->entropy, a->argmax, a->dloss};
    RAFTER_TRY(rafter_loss_take(context, &loss_args, direction, "x without its last dimension", leading, c->x.shape,
                                classes, &c->loss));

    RAFTER_TRY(take_gradient(context, "dx", a->dx, "x", &c->x, &c->dx));
    RAFTER_TRY(take_gradient(context, "dweight", a->dweight, "weight", &c->weight, &c->dweight));
    RAFTER_TRY(take_gradient(context, "dbias", a->dbias, "bias", &c->bias, &c->dbias));
    if (a->accumulate_into_dweight && a->dweight && c->dweight.dtype != RAFTER_F32)
        return rafter_fail(context, bad, "dweight has dtype %s, wanted fp32 with accumulate_into_dweight",
                           rafter_dtype_name(c->dweight.dtype));
    if (a->accumulate_into_dweight && !a->dweight)
        return rafter_fail(context, bad, "accumulate_into_dweight is 1 but dweight is NULL, wanted a tensor to add to");

    const struct {
        const char *name;
        const rafter_view *view;
        bool output;
    } own[] = {{"x", &c->x, false},  {"weight", &c->weight, false},  {"bias", &c->bias, false},
               {"dx", &c->dx, true}, {"dweight", &c->dweight, true}, {"dbias", &c->dbias, true}};
    enum { OWN = sizeof own / sizeof *own };
    for (int i = 0; i < OWN; i++) {
        if (!own[i].view->data)
            continue;
        RAFTER_TRY(rafter_loss_want_disjoint(context, &c->loss, own[i].name, own[i].view, own[i].output));
        for (int j = 0; j < i && own[i].output; j++)
            if (own[j].view->data)
                RAFTER_TRY(rafter_want_disjoint(context, own[i].name, own[i].view, own[j].name, own[j].view));
    }

    rafter_view *const x[] = {&c->x}, *const dx[] = {&c->dx};
    rafter_collapse(x, 1, 0, leading);
    if (a->dx)
        rafter_collapse(dx, 1, 0, leading);
    c->has_dx = c->dx.data != NULL;
    c->has_dweight = c->dweight.data != NULL;
    c->has_dbias = c->dbias.data != NULL;
    return RAFTER_OK;
}

static rafter_status make_plan(struct call *c) {
    static const char *const mode_names[] = {"RAFTER_LCE_AUTO", "RAFTER_LCE_FAST", "RAFTER_LCE_COMPACT"};
    const rafter_linear_cross_entropy_args *a = &c->args;
    const bool native = a->accumulate == RAFTER_ACCUMULATE_NATIVE;
    c->kernels = rafter_pick(c->context, &rafter_op_linear_cross_entropy)->kernels;
    c->problem = (struct lce_problem){
        .format = c->kernels->format[c->x.dtype],
        .rows = c->loss.rows,
        .classes = c->loss.classes,
        .depth = c->x.shape[c->x.ndim - 1],
        .stats = c->direction == RAFTER_FORWARD || !rafter_loss_has(&c->loss.lse),
        .dx = c->has_dx,
        .dweight = c->has_dweight,
        .dbias = c->has_dbias,
        .keeps_dx = !native && c->dx.dtype != RAFTER_F32,
        .keeps_dweight = !native && c->dweight.dtype != RAFTER_F32,
    };
    const size_t room = rafter_scratch_request(1) - 1; /* to align a caller's workspace */
    if (a->budget != 0 && a->budget <= room)
        return rafter_fail(c->context, RAFTER_WORKSPACE_TOO_SMALL, "budget is %zu bytes, wanted more than %zu",
                           a->budget, room);
    if (!lce_make_plan(&c->problem, a->mode, a->budget ? a->budget - room : 0, &c->plan))
        return rafter_fail(c->context, RAFTER_WORKSPACE_TOO_SMALL,
                           "budget is %zu bytes, wanted at least %zu in mode %s", a->budget, c->plan.bytes + room,
                           mode_names[a->mode]);
    return RAFTER_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

struct run {
    struct call *call;
    const struct lce_kernels *kernels;
    struct lce_buffers b;
    int64_t rows;                                /* not ignored */
    struct rafter_loss unscaled;                 /* for coefficients without what all rows share, */
    float scale;                                 /* which is this, and meets the gradients when they are stored */
    double loss;                                 /* sum over the rows so far */
    int64_t x_logits, x_dweight, w_logits, w_dx; /* which group or slice lies packed, */
    int64_t vectors;                             /* and whose bias and class weights are there; -1: none yet */
};

/* A group of rows and a slice of classes. */
struct step {
    struct run *run;
    int64_t group, slice;
    int64_t first_row, rows, first_class, classes;
    int64_t w_chunks, x_panels; /* to pack; what follows them is chunks of x */
    bool pack_w_logits, pack_w_dx;
    bool fused; /* gradient follows upon the logits, block by block */
    struct lce_matrix x, w;
    struct lce_logits logits;
    struct lce_gradient gradient;
    struct lce_product dx, dweight;
    bool store_dx, add_dx, store_dweight, add_dweight;
};

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static struct step step_at(struct run *run, int64_t group, int64_t slice) {
    const struct call *c = run->call;
    const struct lce_buffers *b = &run->b;
    const struct lce_plan *plan = &c->plan;
    const struct lce_format *f = &c->problem.format;
    const int64_t depth = c->problem.depth;
    struct step s = {.run = run, .group = group, .slice = slice};
    s.first_row = group * plan->group;
    s.rows = least(plan->group, run->rows - s.first_row);
    s.first_class = slice * plan->slice;
    s.classes = least(plan->slice, c->problem.classes - s.first_class);
    s.x = (struct lce_matrix){.dtype = c->x.dtype,
                              .rows = s.rows,
                              .columns = depth,
                              .column_stride = c->x.stride[c->x.ndim - 1],
                              .row = b->x_row + s.first_row};
    s.w = (struct lce_matrix){.dtype = c->x.dtype,
                              .rows = s.classes,
                              .columns = depth,
                              .data = depth ? rafter_at(&c->weight, s.first_class * c->weight.stride[0]) : NULL,
                              .row_stride = c->weight.stride[0],
                              .column_stride = c->weight.stride[1]};
    const int64_t part =
        lce_keeps_logits(&c->problem, plan) ? lce_out_bytes(f, plan->slice, plan->group) / 4 * slice : 0;
    s.logits = (struct lce_logits){.product = {.left = b->w_logits,
                                               .right = b->x_logits,
                                               .out = b->logits + part,
                                               .m = s.classes,
                                               .n = s.rows,
                                               .k = depth},
                                   .bias = b->bias,
                                   .weight = b->weight,
                                   .scale = c->loss.scale,
                                   .softcap = c->loss.softcap,
                                   .label = b->label + s.first_row,
                                   .first_class = s.first_class};
    return s;
}

/* Spreads tasks over the threads, unless all of them together cost less than waking these: about a microsecond for each
 * 4096 elements touched. */
static void spread(const struct run *run, int64_t tasks, double elements, void (*body)(void *, int64_t),
                   struct step *s) {
    if (elements >= 1 << 16)
        rafter_parallel(run->call->context, tasks, body, s);
    else
        for (int64_t task = 0; task < tasks; task++)
            body(s, task);
}

/* ---- packing --------------------------------------------------------------------------------- */

static void pack_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const struct lce_kernels *k = s->run->kernels;
    const struct lce_buffers *b = &s->run->b;
    if (task < s->w_chunks) {
        const int64_t from = task * LCE_CHUNK, to = least(from + LCE_CHUNK, s->classes);
        if (s->pack_w_logits)
            k->pack_left(&s->w, b->w_logits, from, to);
        if (s->pack_w_dx)
            k->pack_right(&s->w, b->w_dx, from, to);
        return;
    }
    task -= s->w_chunks;
    if (task < s->x_panels) {
        k->pack_right_transposed(&s->x, b->x_logits, task, task + 1);
        return;
    }
    task -= s->x_panels;
    k->pack_right(&s->x, b->x_dweight, task * LCE_CHUNK, least((task + 1) * LCE_CHUNK, s->rows));
}

/* Packs the operands of the products that the step will form, unless they lie there from the step before. */
static void pack(struct step *s, bool logits, bool dx, bool dweight) {
    struct run *run = s->run;
    const struct call *c = run->call;
    const rafter_view *bias = &c->bias, *weight = &c->loss.class_weight;
    if (run->vectors != s->slice) {
        if (bias->data)
            run->kernels->widen(bias->dtype, rafter_at(bias, s->first_class * bias->stride[0]), bias->stride[0],
                                s->classes, run->b.bias);
        if (rafter_loss_has(weight))
            run->kernels->widen(RAFTER_F32, rafter_at(weight, s->first_class * weight->stride[0]), weight->stride[0],
                                s->classes, run->b.weight);
        run->vectors = s->slice;
    }
    s->pack_w_logits = logits && run->w_logits != s->slice;
    s->pack_w_dx = dx && run->w_dx != s->slice;
    s->w_chunks = s->pack_w_logits || s->pack_w_dx ? lce_blocks(s->classes, LCE_CHUNK) : 0;
    s->x_panels = logits && run->x_logits != s->group ? lce_blocks(s->rows, c->problem.format.columns) : 0;
    const int64_t x_chunks = dweight && run->x_dweight != s->group ? lce_blocks(s->rows, LCE_CHUNK) : 0;
    const double elements =
        (double)(s->w_chunks * LCE_CHUNK + s->x_panels * c->problem.format.columns + x_chunks * LCE_CHUNK) *
        (double)c->problem.depth;
    spread(run, s->w_chunks + s->x_panels + x_chunks, elements, pack_task, s);
    run->x_logits = logits ? s->group : run->x_logits;
    run->x_dweight = dweight ? s->group : run->x_dweight;
    run->w_logits = logits ? s->slice : run->w_logits;
    run->w_dx = dx ? s->slice : run->w_dx;
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* Blocks that share their rows of x come one after the other. */
static void logits_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const int64_t blocks = lce_blocks(s->classes, LCE_ROWS);
    s->run->kernels->logits(s->x.dtype, &s->logits, task % blocks, task / blocks);
    if (s->fused)
        s->run->kernels->gradient(s->x.dtype, &s->gradient, task % blocks, task / blocks);
}

/* Of a product, in elements that packing takes as long for. */
static double work(const struct step *s) {
    return (double)s->rows * (double)s->classes * (1.0 + (double)s->run->call->problem.depth / 32);
}

static int64_t logits_tasks(const struct step *s) {
    return lce_blocks(s->classes, LCE_ROWS) * lce_blocks(s->rows, LCE_COLUMNS);
}

/* Statistics of one block of rows over the whole slice, and with those of the slices before. */
static void fold_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const struct lce_buffers *b = &s->run->b;
    s->run->kernels->fold(&s->logits, task);

    const int64_t padded = lce_round_up(s->rows, LCE_COLUMNS);
    const float *const block = b->block_stats;
    for (int64_t i = task * LCE_COLUMNS; i < least((task + 1) * LCE_COLUMNS, s->rows); i++) {
        struct rafter_row_stats *const so_far = &b->stats[s->first_row + i];
        struct rafter_row_stats here = {.max = (double)block[LCE_MAX * padded + i],
                                        .sum = (double)block[LCE_SUM * padded + i]};
        if (s->logits.more) {
            int32_t argmax;
            memcpy(&argmax, &block[LCE_ARGMAX * padded + i], sizeof argmax);
            here.moment = (double)block[LCE_MOMENT * padded + i];
            here.weighted = (double)block[LCE_WEIGHTED * padded + i];
            here.best = (double)block[LCE_BEST * padded + i];
            here.argmax = s->first_class + argmax;
        }
        *so_far = rafter_row_merge(so_far, &here);
    }
}

static void statistics_step(struct run *run, int64_t group, int64_t slice) {
    struct step s = step_at(run, group, slice);
    const struct rafter_loss *loss = &run->call->loss;
    pack(&s, true, false, false);
    s.logits.stats = run->b.block_stats;
    s.logits.target = run->b.target_logit + s.first_row;
    s.logits.more = loss->smoothing != 0.0f || rafter_loss_has(&loss->entropy) || rafter_loss_has(&loss->argmax);
    spread(run, logits_tasks(&s), work(&s), logits_task, &s);
    spread(run, lce_blocks(s.rows, LCE_COLUMNS), work(&s) / LCE_ROWS, fold_task, &s);
}

static void put_coefficients(struct run *run, int64_t i, struct rafter_row_gradient g) {
    run->b.pivot[i] = g.zero ? 0.0f : g.pivot;
    run->b.p[i] = g.zero ? 0.0f : (float)g.p;
    run->b.target[i] = g.zero ? 0.0f : (float)g.target;
    run->b.spread[i] = g.zero ? 0.0f : (float)g.spread;
}

/* Results of the rows [from, to), whose statistics are complete, and the coefficients of their gradients. */
static void finish_rows(struct run *run, int64_t from, int64_t to) {
    const struct call *c = run->call;
    for (int64_t i = from; i < to; i++) {
        struct rafter_row_stats *const stats = &run->b.stats[i];
        stats->target = (double)run->b.target_logit[i];
        if (c->direction == RAFTER_FORWARD)
            run->loss += rafter_loss_write_row(&c->loss, run->b.row[i], run->b.label[i], stats);
        if (run->b.pivot)
            put_coefficients(run, i, rafter_loss_gradient(&run->unscaled, run->b.row[i], run->b.label[i], stats));
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* What a step does with its part of dx or dW. */
struct growth {
    bool wanted;
    bool accumulate; /* adds to the part that the workspace holds, */
    int64_t part;    /* which is this one, */
    bool store, add; /* and stores it to the caller's tensor, or adds it there */
};

/* Inner step `inner` of `inners` adds to what the steps of this outer turn have summed, and the last one stores it. */
static struct growth complete_in_turn(bool wanted, int64_t inner, int64_t inners) {
    return (struct growth){.wanted = wanted, .accumulate = inner > 0, .store = inner == inners - 1};
}

/* A part grows from one outer turn to the next: in the workspace if that keeps all parts, else in the caller's tensor.
 */
static struct growth grows_by_turn(bool wanted, bool kept, int64_t outer, int64_t outers, int64_t inner) {
    if (!kept)
        return (struct growth){.wanted = wanted, .store = true, .add = outer > 0};
    return (struct growth){.wanted = wanted, .accumulate = outer > 0, .part = inner, .store = outer == outers - 1};
}

static void store_block(const struct step *s, const struct lce_product *job, int64_t row_block, int64_t column_block) {
    const struct call *c = s->run->call;
    const struct lce_format *f = &c->problem.format;
    const bool is_dx = job == &s->dx;
    const rafter_view *to = is_dx ? &c->dx : &c->dweight;
    const int64_t column = column_block * LCE_COLUMNS, columns = least(LCE_COLUMNS, job->n - column);
    const int64_t column_stride = to->stride[to->ndim - 1];
    const bool add = is_dx ? s->add_dx : s->add_dweight;
    for (int64_t i = row_block * LCE_ROWS; i < least((row_block + 1) * LCE_ROWS, job->m); i++) {
        const int64_t row = is_dx ? s->run->b.row[s->first_row + i] : s->first_class + i;
        const int64_t at = rafter_offset(to, 0, to->ndim - 1, row) + column * column_stride;
        s->run->kernels->store(to->dtype, job->out + lce_out_at(f, job->m, job->n, i, column_block), columns,
                               s->run->scale, add, rafter_at(to, at), column_stride);
    }
}

static int64_t product_tasks(const struct lce_product *job) {
    return job->out ? lce_blocks(job->m, LCE_ROWS) * lce_blocks(job->n, LCE_COLUMNS) : 0;
}

/* Blocks of dx, then of dW. */
static void product_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const bool is_dx = task < product_tasks(&s->dx);
    const struct lce_product *job = is_dx ? &s->dx : &s->dweight;
    task -= is_dx ? 0 : product_tasks(&s->dx);
    const int64_t blocks = lce_blocks(job->m, LCE_ROWS), row_block = task % blocks, column_block = task / blocks;
    s->run->kernels->product(s->x.dtype, job, row_block, column_block);
    if (is_dx ? s->store_dx : s->store_dweight)
        store_block(s, job, row_block, column_block);
}

static void gradient_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const int64_t blocks = lce_blocks(s->classes, LCE_ROWS);
    s->run->kernels->gradient(s->x.dtype, &s->gradient, task % blocks, task / blocks);
}

static void gradient_step(struct run *run, int64_t group, int64_t slice, struct growth dx, struct growth dweight,
                          bool dbias) {
    struct step s = step_at(run, group, slice);
    const struct call *c = run->call;
    const struct lce_buffers *b = &run->b;
    const struct lce_format *f = &c->problem.format;
    const int64_t depth = c->problem.depth;
    const bool kept_logits = lce_keeps_logits(&c->problem, &c->plan);

    s.gradient = (struct lce_gradient){.u = s.logits.product.out,
                                       .m = s.classes,
                                       .n = s.rows,
                                       .weight = b->weight,
                                       .cap = c->loss.scale * c->loss.softcap,
                                       .label = s.logits.label,
                                       .first_class = s.first_class,
                                       .pivot = b->pivot + s.first_row,
                                       .p = b->p + s.first_row,
                                       .target = b->target + s.first_row,
                                       .spread = b->spread + s.first_row,
                                       .by_row = dx.wanted ? b->dz_by_row : NULL,
                                       .by_class = dweight.wanted ? b->dz_by_class : NULL,
                                       .sum = dbias ? b->block_dbias : NULL};
    if (dx.wanted) {
        float *const out = b->dx + lce_out_bytes(f, c->plan.group, depth) / 4 * dx.part;
        s.dx = (struct lce_product){b->dz_by_row, b->w_dx, out, s.rows, depth, s.classes, dx.accumulate};
    }
    if (dweight.wanted) {
        float *const out = b->dweight + lce_out_bytes(f, c->plan.slice, depth) / 4 * dweight.part;
        s.dweight =
            (struct lce_product){b->dz_by_class, b->x_dweight, out, s.classes, depth, s.rows, dweight.accumulate};
    }
    s.store_dx = dx.store;
    s.add_dx = dx.add;
    s.store_dweight = dweight.store;
    s.add_dweight = dweight.add || c->args.accumulate_into_dweight;

    pack(&s, !kept_logits, dx.wanted, dweight.wanted);
    s.fused = !kept_logits;
    spread(run, logits_tasks(&s), work(&s), kept_logits ? gradient_task : logits_task, &s);
    spread(run, product_tasks(&s.dx) + product_tasks(&s.dweight), work(&s), product_task, &s);
    if (dbias)
        for (int64_t block = 0; block < lce_blocks(s.rows, LCE_COLUMNS); block++)
            for (int64_t v = 0; v < s.classes; v++)
                b->dbias[s.first_class + v] += b->block_dbias[block * s.classes + v];
}

/* ---- the call -------------------------------------------------------------------------------- */

static void run_fast(struct run *run) {
    const struct call *c = run->call;
    const struct lce_problem *q = &c->problem;
    const bool kept = lce_keeps_dweight(q, &c->plan);
    const int64_t groups = lce_blocks(run->rows, c->plan.group), slices = lce_blocks(q->classes, c->plan.slice);
    for (int64_t group = 0; group < groups; group++) {
        if (q->stats) {
            for (int64_t slice = 0; slice < slices; slice++)
                statistics_step(run, group, slice);
            finish_rows(run, group * c->plan.group, least((group + 1) * c->plan.group, run->rows));
        }
        for (int64_t slice = 0; slice < slices; slice++)
            gradient_step(run, group, slice, complete_in_turn(q->dx, slice, slices),
                          grows_by_turn(q->dweight, kept, group, groups, slice), q->dbias);
    }
}

static void run_compact(struct run *run) {
    const struct call *c = run->call;
    const struct lce_problem *q = &c->problem;
    const bool kept = lce_keeps_dx(q, &c->plan), split = c->plan.split;
    const int64_t groups = lce_blocks(run->rows, c->plan.group), slices = lce_blocks(q->classes, c->plan.slice);
    const struct growth none = {.wanted = false};
    if (q->stats) {
        for (int64_t slice = 0; slice < slices; slice++)
            for (int64_t group = 0; group < groups; group++)
                statistics_step(run, group, slice);
        finish_rows(run, 0, run->rows);
    }
    if ((q->dx && !split) || q->dweight || q->dbias)
        for (int64_t slice = 0; slice < slices; slice++)
            for (int64_t group = 0; group < groups; group++)
                gradient_step(run, group, slice, grows_by_turn(q->dx && !split, kept, slice, slices, group),
                              complete_in_turn(q->dweight, group, groups), q->dbias);
    if (q->dx && split)
        for (int64_t group = 0; group < groups; group++)
            for (int64_t slice = 0; slice < slices; slice++)
                gradient_step(run, group, slice, complete_in_turn(true, slice, slices), none, false);
}

/* Lists the rows that count; gives the others their results. */
static void list_rows(struct run *run) {
    const struct call *c = run->call;
    for (int64_t row = 0; row < c->loss.rows; row++) {
        const int64_t label = rafter_loss_label(&c->loss, row);
        if (label >= 0) {
            const int64_t i = run->rows++;
            run->b.row[i] = row;
            run->b.label[i] = label;
            run->b.x_row[i] = c->problem.depth ? rafter_at(&c->x, rafter_offset(&c->x, 0, c->x.ndim - 1, row)) : NULL;
            if (run->b.stats)
                run->b.stats[i] = rafter_row_empty;
        } else if (c->direction == RAFTER_FORWARD) {
            rafter_loss_write_row(&c->loss, row, label, NULL);
        }
    }
}

static const float zeros[LCE_COLUMNS];

static void store_zeros(const struct run *run, const rafter_view *to, int64_t row) {
    const int last = to->ndim - 1;
    const int64_t at = rafter_offset(to, 0, last, row), stride = to->stride[last];
    for (int64_t i = 0; i < to->shape[last]; i += LCE_COLUMNS)
        run->kernels->store(to->dtype, zeros, least(LCE_COLUMNS, to->shape[last] - i), 1.0f, false,
                            rafter_at(to, at + i * stride), stride);
}

/* Gradients that no step has written: those of ignored rows, and all of them if every row is. */
static void store_missing(const struct run *run) {
    const struct call *c = run->call;
    const struct lce_problem *q = &c->problem;
    if (q->dx)
        for (int64_t row = 0, i = 0; row < q->rows; row++) {
            if (i < run->rows && run->b.row[i] == row)
                i++;
            else
                store_zeros(run, &c->dx, row);
        }
    if (q->dweight && run->rows == 0 && !c->args.accumulate_into_dweight)
        for (int64_t v = 0; v < q->classes; v++)
            store_zeros(run, &c->dweight, v);
    if (q->dbias)
        run->kernels->store(c->dbias.dtype, run->b.dbias, q->classes, run->scale, false, c->dbias.data,
                            c->dbias.stride[0]);
}

static void execute(struct call *c, char *memory) {
    struct run run = {.call = c, .kernels = c->kernels, .unscaled = c->loss, .scale = 1.0f};
    run.x_logits = run.x_dweight = run.w_logits = run.w_dx = run.vectors = -1;
    lce_lay_out(&c->problem, &c->plan, memory, &run.b);
    list_rows(&run);

    /* What all rows share would push small gradients under what bf16 holds, so it waits for the results. */
    run.unscaled.scale = 1.0f;
    run.unscaled.mean_denominator = 1.0;
    double scale = (double)c->loss.scale / c->loss.mean_denominator;
    if (c->loss.reduction != RAFTER_NONE && rafter_loss_has(&c->loss.dloss)) {
        float dloss;
        memcpy(&dloss, c->loss.dloss.data, sizeof dloss);
        scale *= (double)dloss;
        run.unscaled.dloss.data = NULL;
    }
    if (run.rows > 0)
        run.scale = (float)scale;

    for (int64_t v = 0; v < c->plan.slice; v++) {
        run.b.bias[v] = 0.0f;
        run.b.weight[v] = 1.0f;
    }
    if (run.b.dbias)
        memset(run.b.dbias, 0, (size_t)c->problem.classes * sizeof *run.b.dbias);
    if (!c->problem.stats && run.b.pivot)
        for (int64_t i = 0; i < run.rows; i++)
            put_coefficients(&run, i,
                             rafter_loss_gradient_from_lse(&run.unscaled, run.b.row[i], run.b.label[i],
                                                           rafter_loss_given_lse(&c->loss, run.b.row[i])));
    if (run.rows > 0 && c->plan.fast)
        run_fast(&run);
    else if (run.rows > 0)
        run_compact(&run);
    store_missing(&run);
    if (c->direction == RAFTER_FORWARD)
        rafter_loss_write(&c->loss, run.loss);
}

/* Enqueues the checked call on the context's device; or, if `ask` is not NULL, puts there what workspace it takes. */
static rafter_status on_cuda(const struct call *c, size_t *ask) {
    const rafter_linear_cross_entropy_args *a = &c->args;
    const struct linear_cross_entropy_call call = {
        .loss = c->loss,
        .x = c->x,
        .weight = c->weight,
        .bias = c->bias,
        .dx = c->dx,
        .dweight = c->dweight,
        .dbias = c->dbias,
        .mode = a->mode,
        .native = a->accumulate == RAFTER_ACCUMULATE_NATIVE,
        .accumulate_into_dweight = a->accumulate_into_dweight,
        .budget = a->budget,
        .workspace = a->workspace,
        .workspace_bytes = a->workspace_bytes,
        .ask = ask,
    };
    return c->context->cuda->linear_cross_entropy(c->context, &call);
}

static rafter_status start(rafter_context *context, const rafter_linear_cross_entropy_args *args,
                           rafter_direction direction) {
    struct call c;
    struct rafter_scratch scratch;
    RAFTER_TRY(check(context, args, direction, &c));
    if (context->cuda)
        return on_cuda(&c, NULL);
    RAFTER_TRY(make_plan(&c));
    RAFTER_TRY(rafter_loss_read(context, &c.loss));
    RAFTER_TRY(rafter_scratch_take(context, c.args.workspace, c.args.workspace_bytes, c.plan.bytes, &scratch));
    execute(&c, scratch.memory);
    rafter_scratch_release(context, &scratch);
    return RAFTER_OK;
}

rafter_status rafter_linear_cross_entropy_forward(rafter_context *context,
                                                  const rafter_linear_cross_entropy_args *args) {
    return start(context, args, RAFTER_FORWARD);
}

rafter_status rafter_linear_cross_entropy_backward(rafter_context *context,
                                                   const rafter_linear_cross_entropy_args *args) {
    return start(context, args, RAFTER_BACKWARD);
}

rafter_status rafter_linear_cross_entropy_workspace(rafter_context *context,
                                                    const rafter_linear_cross_entropy_args *args,
                                                    rafter_direction direction, size_t *bytes) {
    struct call c;
    RAFTER_TRY(check(context, args, direction, &c));
    if (!bytes)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT, "bytes is NULL, wanted where to put the answer");
    if ((unsigned)direction > RAFTER_BACKWARD)
        return rafter_fail(context, RAFTER_INVALID_ARGUMENT,
                           "direction is %d, wanted RAFTER_FORWARD or RAFTER_BACKWARD", (int)direction);
    if (context->cuda)
        return on_cuda(&c, bytes);
    RAFTER_TRY(make_plan(&c));
    *bytes = rafter_scratch_request(c.plan.bytes);
    return RAFTER_OK;
}

/* ---- for the bench --------------------------------------------------------------------------- */

struct peak {
    const struct lce_kernels *kernels;
    rafter_dtype dtype;
    int64_t iterations;
    char *memory;
    double flops; /* of one thread */
};

static void peak_task(void *arg, int64_t task) {
    struct peak *p = arg;
    const double flops = p->kernels->peak(p->dtype, p->iterations, p->memory + task * LCE_PEAK_BYTES);
    if (task == 0)
        p->flops = flops;
}

double rafter_lce_peak_flops(rafter_context *context, rafter_dtype dtype, int64_t iterations) {
    struct peak p = {rafter_pick(context, &rafter_op_linear_cross_entropy)->kernels, dtype, iterations, NULL, 0.0};
    struct rafter_scratch scratch;
    const size_t bytes = (size_t)context->threads * LCE_PEAK_BYTES;
    if (rafter_scratch_take(context, NULL, 0, bytes, &scratch) != RAFTER_OK)
        return 0.0;
    memset(scratch.memory, 0, bytes);
    p.memory = scratch.memory;
    rafter_parallel(context, context->threads, peak_task, &p);
    rafter_scratch_release(context, &scratch);
    return p.flops * context->threads;
}
