/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy on the CPU: one step of a plan (cpu_plan.h), cut into tasks that call the kernels (kernels.h). */
#include <string.h>

#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/linear_cross_entropy/cpu_run.h"

/* ---- steps ----------------------------------------------------------------------------------- */

/* A group of rows and a slice of classes. */
struct step {
    struct lce_run *run;
    int64_t group, slice;
    int64_t first_row, rows, first_class, classes;
    int64_t tile; /* that the slice is of, if classes are spread over ranks */
    bool begins_tile, ends_tile;
    int64_t w_chunks, x_panels, x_chunks; /* packing tasks, in this order */
    bool pack_w_logits, pack_w_dx;
    bool fused; /* the gradient of each block is computed right after its logits */
    struct lce_matrix x, w;
    struct lce_logits logits;
    struct lce_gradient gradient;
    struct lce_product dx, dweight;
    bool store_dx, add_dx, store_dweight, add_dweight;
};

static struct step step_at(struct lce_run *run, int64_t group, int64_t slice) {
    const struct linear_cross_entropy_call *c = run->call;
    const struct lce_buffers *b = &run->b;
    const struct lce_plan *plan = run->plan;
    const struct lce_format *f = &run->problem->format;
    const int64_t depth = run->problem->depth;
    struct step s = {.run = run, .group = group, .slice = slice};
    s.first_row = group * plan->group;
    s.rows = min64(plan->group, run->rows - s.first_row);
    const int64_t span = lce_span(run->problem), slices = lce_slices_of_span(run->problem, plan);
    s.tile = slice / slices;
    s.first_class = s.tile * span + slice % slices * plan->slice;
    const int64_t end = min64((s.tile + 1) * span, run->problem->classes);
    s.classes = min64(plan->slice, end - s.first_class);
    s.begins_tile = slice % slices == 0;
    s.ends_tile = s.first_class + s.classes == end;
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
        lce_stores_logits(run->problem, plan) ? lce_out_bytes(f, plan->slice, plan->group) / 4 * slice : 0;
    s.logits = (struct lce_logits){.product = {.left = b->w_logits,
                                               .right = b->x_logits,
                                               .out = b->logits + part,
                                               .m = s.classes,
                                               .n = s.rows,
                                               .k = depth},
                                   .bias = b->bias,
                                   .weight = b->weight,
                                   .scale = run->loss.scale,
                                   .softcap = run->loss.softcap,
                                   .label = b->label + s.first_row,
                                   .first_class = run->loss.first_class + s.first_class};
    return s;
}

void lce_run_tasks(const struct lce_run *run, const char *phase, int64_t tasks, double elements,
                   void (*body)(void *, int64_t), void *arg) {
    if (elements >= 1 << 16)
        rafter_parallel_phase(run->context, phase, tasks, body, arg);
    else
        for (int64_t task = 0; task < tasks; task++)
            body(arg, task);
}

static int64_t product_tasks(const struct lce_product *job) {
    return job->out ? lce_blocks(job->m, job->n) : 0;
}

/* ---- packing --------------------------------------------------------------------------------- */

static void pack_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const struct linear_cross_entropy_kernels *k = s->run->kernels;
    const struct lce_buffers *b = &s->run->b;
    if (task < s->w_chunks) {
        const int64_t from = task * LCE_CHUNK, to = min64(from + LCE_CHUNK, s->classes);
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
    k->pack_right(&s->x, b->x_dweight, task * LCE_CHUNK, min64((task + 1) * LCE_CHUNK, s->rows));
}

static int64_t pack_tasks(const struct step *s) {
    return s->w_chunks + s->x_panels + s->x_chunks;
}

static double packed_elements(const struct step *s) {
    const int64_t rows = (s->w_chunks + s->x_chunks) * LCE_CHUNK + s->x_panels * s->run->problem->format.columns;
    return (double)rows * (double)s->run->problem->depth;
}

/* Loads bias and class weights of the slice, and finds which operands of the step's products are to
 * be packed: those that are not packed already. */
static void plan_packing(struct step *s, bool logits, bool dx, bool dweight) {
    struct lce_run *run = s->run;
    const struct linear_cross_entropy_call *c = run->call;
    const rafter_view *bias = &c->bias, *weight = &run->loss.class_weight;
    if (run->vectors != s->slice) {
        if (bias->data)
            run->kernels->widen(bias->dtype, rafter_at(bias, s->first_class * bias->stride[0]), bias->stride[0],
                                s->classes, run->b.bias);
        if (rafter_loss_has(weight))
            run->kernels->widen(RAFTER_F32, rafter_at(weight, s->logits.first_class * weight->stride[0]),
                                weight->stride[0], s->classes, run->b.weight);
        run->vectors = s->slice;
    }
    if (run->plan->few)
        return;
    s->logits.product.unpacked = lce_packs_w(run->plan) ? NULL : &s->w;
    s->pack_w_logits = logits && lce_packs_w(run->plan) && run->w_logits != s->slice;
    s->pack_w_dx = dx && run->w_dx != s->slice;
    s->w_chunks = s->pack_w_logits || s->pack_w_dx ? ceil_div(s->classes, LCE_CHUNK) : 0;
    s->x_panels = logits && run->x_logits != s->group ? ceil_div(s->rows, run->problem->format.columns) : 0;
    s->x_chunks = dweight && run->x_dweight != s->group ? ceil_div(s->rows, LCE_CHUNK) : 0;
    run->x_logits = logits ? s->group : run->x_logits;
    run->x_dweight = dweight ? s->group : run->x_dweight;
    run->w_logits = logits ? s->slice : run->w_logits;
    run->w_dx = dx ? s->slice : run->w_dx;
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* The cost of a product, as a number of elements whose packing takes as long. */
static double work(const struct step *s) {
    return (double)s->rows * (double)s->classes * (1.0 + (double)s->run->problem->depth / 32);
}

/* Statistics of row i of the group over a block of classes. */
static struct rafter_row_stats block_at(const struct step *s, int64_t number, int64_t i) {
    const int64_t padded = round_up(s->rows, LCE_COLUMNS);
    const float *const block = s->run->b.block_stats + number * LCE_STATS * padded + i;
    struct rafter_row_stats here = {.max = (double)block[LCE_MAX * padded], .sum = (double)block[LCE_SUM * padded]};
    if (s->logits.more) {
        int32_t argmax;
        memcpy(&argmax, &block[LCE_ARGMAX * padded], sizeof argmax);
        here.moment = (double)block[LCE_MOMENT * padded];
        here.logit_sum = (double)block[LCE_LOGIT_SUM * padded];
        here.best = (double)block[LCE_BEST * padded];
        here.argmax = s->logits.first_class + argmax;
    }
    return here;
}

/* Merges statistics of one block of rows over the whole slice, and with those of the slices
 * before. Kernels do the first, in an order that depends on the slice; so not if classes are spread over
 * ranks. */
static void fold(const struct step *s, int64_t task) {
    const struct lce_buffers *b = &s->run->b;
    const int64_t blocks = b->tiles ? ceil_div(s->classes, LCE_ROWS) : 1;
    if (!b->tiles)
        s->run->kernels->fold(&s->logits, task);
    for (int64_t i = task * LCE_COLUMNS; i < min64((task + 1) * LCE_COLUMNS, s->rows); i++) {
        struct rafter_row_stats *const merged = &b->stats[s->first_row + i];
        if (b->tiles && s->begins_tile)
            *merged = rafter_row_empty;
        for (int64_t block = 0; block < blocks; block++) {
            const struct rafter_row_stats here = block_at(s, block, i);
            *merged = rafter_row_merge(merged, &here);
        }
        if (b->tiles && s->ends_tile)
            lce_put_tile(s->run, s->first_row + i, s->tile);
    }
}

static void logits_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const struct linear_cross_entropy_kernels *k = s->run->kernels;
    const struct lce_block at = lce_block_of(&s->run->problem->format, &s->logits.product, task);
    k->logits(s->run->operands, &s->logits, at.row, at.column);
    if (s->fused)
        k->gradient(s->run->operands, &s->gradient, at.row, at.column);
    /* Whichever thread ends the last block of classes merges their statistics. */
    if (s->logits.stats &&
        __atomic_add_fetch(&s->run->b.blocks_done[at.column], 1, __ATOMIC_ACQ_REL) == ceil_div(s->classes, LCE_ROWS))
        fold(s, at.column);
}

void lce_statistics_step(struct lce_run *run, int64_t group, int64_t slice) {
    struct step s = step_at(run, group, slice);
    const struct rafter_loss *loss = &run->loss;
    plan_packing(&s, true, false, false);
    lce_run_tasks(run, "pack", pack_tasks(&s), packed_elements(&s), pack_task, &s);
    s.logits.stats = run->b.block_stats;
    s.logits.target = run->b.target_logit + s.first_row;
    s.logits.more = loss->smoothing != 0.0f || rafter_loss_has(&loss->entropy) || rafter_loss_has(&loss->argmax) ||
                    rafter_loss_has(&loss->dentropy);
    memset(run->b.blocks_done, 0, (size_t)ceil_div(s.rows, LCE_COLUMNS) * sizeof *run->b.blocks_done);
    if (run->plan->few)
        lce_few_logits(run, &s.logits);
    lce_run_tasks(run, "logits", product_tasks(&s.logits.product), work(&s), logits_task, &s);
}

/* ---- gradients ------------------------------------------------------------------------------- */

void lce_store(const struct lce_run *run, bool is_dx, bool add, int64_t row, int64_t column, int64_t n,
               const float *source) {
    const rafter_view *to = is_dx ? &run->dx : &run->call->dweight;
    const int64_t stride = to->stride[to->ndim - 1];
    const int64_t at = rafter_offset(to, 0, to->ndim - 1, is_dx ? run->b.row[row] : row) + column * stride;
    run->kernels->store(to->dtype, source, n, run->scale, add, rafter_at(to, at), stride);
}

static void store_block(const struct step *s, const struct lce_product *job, int64_t row_block, int64_t column_block) {
    const struct lce_format *f = &s->run->problem->format;
    const bool is_dx = job == &s->dx, add = is_dx ? s->add_dx : s->add_dweight;
    const int64_t first = is_dx ? s->first_row : s->first_class;
    const int64_t column = column_block * LCE_COLUMNS, columns = min64(LCE_COLUMNS, job->n - column);
    for (int64_t i = row_block * LCE_ROWS; i < min64((row_block + 1) * LCE_ROWS, job->m); i++)
        lce_store(s->run, is_dx, add, first + i, column, columns,
                  job->out + lce_out_at(f, job->m, job->n, i, column_block));
}

/* Blocks of dx, then of dW. */
static void product_task(void *arg, int64_t task) {
    const struct step *s = arg;
    const bool is_dx = task < product_tasks(&s->dx);
    const struct lce_product *job = is_dx ? &s->dx : &s->dweight;
    task -= is_dx ? 0 : product_tasks(&s->dx);
    const struct lce_block at = lce_block_of(&s->run->problem->format, job, task);
    s->run->kernels->product(s->x.dtype, job, at.row, at.column);
    if (is_dx ? s->store_dx : s->store_dweight)
        store_block(s, job, at.row, at.column);
}

/* Packs operands, then forms blocks of dz. */
static void pack_or_gradient_task(void *arg, int64_t task) {
    const struct step *s = arg;
    if (task < pack_tasks(s)) {
        pack_task(arg, task);
        return;
    }
    const struct lce_block at = lce_block_of(&s->run->problem->format, &s->logits.product, task - pack_tasks(s));
    s->run->kernels->gradient(s->x.dtype, &s->gradient, at.row, at.column);
}

/* Provides the pages of rows [first, first + rows) of dx or dW, all of which this step writes, block by block. */
static void touch_fresh(const struct lce_run *run, const rafter_view *to, int64_t first, int64_t rows) {
    const int64_t width = to->shape[to->ndim - 1], bytes = rafter_dtype_bytes(to->dtype);
    const bool dense = rafter_span_bytes(to) == to->numel * bytes, all = rows * width == to->numel;
    if (dense && (all || (to->ndim == 2 && to->stride[1] == 1)))
        rafter_touch_fresh(run->context, to->data + first * width * bytes, rows * width * bytes);
}

/* The products of a gradient step on packed operands. */
static void many_gradients(struct step *s, bool stored_logits) {
    struct lce_run *run = s->run;
    if (s->store_dweight && !s->add_dweight)
        touch_fresh(run, &run->call->dweight, s->first_class, s->classes);
    if (s->store_dx && !s->add_dx && run->rows == run->problem->rows)
        touch_fresh(run, &run->dx, s->first_row, s->rows);
    s->fused = !stored_logits;
    if (stored_logits) {
        lce_run_tasks(run, "pack, dz", pack_tasks(s) + product_tasks(&s->logits.product), work(s),
                      pack_or_gradient_task, s);
    } else {
        lce_run_tasks(run, "pack", pack_tasks(s), packed_elements(s), pack_task, s);
        lce_run_tasks(run, "logits, dz", product_tasks(&s->logits.product), work(s), logits_task, s);
    }
    lce_run_tasks(run, "dx, dW", product_tasks(&s->dx) + product_tasks(&s->dweight), work(s), product_task, s);
}

void lce_gradient_step(struct lce_run *run, int64_t group, int64_t slice, struct lce_partial_sum dx,
                       struct lce_partial_sum dweight, bool dbias) {
    struct step s = step_at(run, group, slice);
    const struct linear_cross_entropy_call *c = run->call;
    const struct lce_buffers *b = &run->b;
    const struct lce_format *f = &run->problem->format;
    const int64_t depth = run->problem->depth;
    const bool stored_logits = lce_stores_logits(run->problem, run->plan);

    s.gradient = (struct lce_gradient){.u = s.logits.product.out,
                                       .m = s.classes,
                                       .n = s.rows,
                                       .weight = b->weight,
                                       .cap = run->loss.scale * run->loss.softcap,
                                       .label = s.logits.label,
                                       .first_class = s.logits.first_class,
                                       .pivot = b->pivot + s.first_row,
                                       .p = b->p + s.first_row,
                                       .target = b->target + s.first_row,
                                       .spread = b->spread + s.first_row,
                                       .level = b->level ? b->level + s.first_row : NULL,
                                       .tilt = b->tilt ? b->tilt + s.first_row : NULL,
                                       .by_row = dx.wanted ? b->dz_by_row : NULL,
                                       .by_class = dweight.wanted ? b->dz_by_class : NULL,
                                       .sum = dbias ? b->block_dbias : NULL};
    if (dx.wanted) {
        float *const out = b->dx + lce_out_bytes(f, run->plan->group, depth) / 4 * dx.part;
        s.dx = (struct lce_product){.left = b->dz_by_row,
                                    .right = b->w_dx,
                                    .out = out,
                                    .m = s.rows,
                                    .n = depth,
                                    .k = s.classes,
                                    .accumulate = dx.accumulate};
        s.store_dx = dx.store;
        s.add_dx = dx.add;
    }
    if (dweight.wanted) {
        float *const out = b->dweight + lce_out_bytes(f, run->plan->slice, depth) / 4 * dweight.part;
        s.dweight = (struct lce_product){.left = b->dz_by_class,
                                         .right = b->x_dweight,
                                         .out = out,
                                         .m = s.classes,
                                         .n = depth,
                                         .k = s.rows,
                                         .accumulate = dweight.accumulate};
        s.store_dweight = dweight.store;
        s.add_dweight = dweight.add || c->accumulate_into_dweight;
    }

    plan_packing(&s, !stored_logits, dx.wanted, dweight.wanted);
    if (run->plan->few) {
        if (!stored_logits) {
            lce_few_logits(run, &s.logits);
            lce_run_tasks(run, "logits", product_tasks(&s.logits.product), work(&s), logits_task, &s);
        }
        lce_few_gradients(run, &s.gradient);
    } else {
        many_gradients(&s, stored_logits);
    }
    const int64_t blocks = lce_dbias_blocks(run->plan, s.rows);
    for (int64_t block = 0; dbias && block < blocks; block++)
        for (int64_t v = 0; v < s.classes; v++)
            b->dbias[s.first_class + v] += b->block_dbias[block * s.classes + v];
}
