/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy on the CPU: the steps of a call (cpu_steps.c) in the order of its plan (cpu_plan.h). */
#include <string.h>

#include "core/sizes.h"
#include "ops/linear_cross_entropy/cpu_run.h"

/* ---- plan ------------------------------------------------------------------------------------ */

struct plan {
    struct lce_problem problem;
    struct lce_plan plan;
};
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

/* The first row that this context may use. Formats, and so plans, depend on it. */
const struct linear_cross_entropy_kernels *lce_kernels_of(const rafter_context *context) {
    const struct rafter_variant *row = rafter_op_linear_cross_entropy.cpu;
    while (row->level > (int)context->isa)
        row++;
    return row->kernels;
}

/* Of the formats in a plan for few rows or classes. */
static rafter_dtype few_operands(const rafter_context *context, const struct linear_cross_entropy_call *call) {
    return call->x.dtype == RAFTER_BF16 && lce_kernels_of(context)->few_pairs ? RAFTER_BF16 : RAFTER_F32;
}

/* Every row plans with the format of the first one that the context may use: none of the rows
 * behind it is ever run. */
static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    const struct linear_cross_entropy_call *const call = (const void *)common;
    struct plan *const plan = storage;
    const bool shared = rafter_group_has(&call->loss.class_group);
    plan->problem = (struct lce_problem){
        .format = lce_kernels_of(context)->format[call->x.dtype],
        .rows = call->loss.rows,
        .classes = call->loss.classes,
        .depth = call->x.shape[call->x.ndim - 1],
        .stats = rafter_loss_needs_statistics(&call->loss),
        .dentropy = rafter_loss_has(&call->loss.dentropy),
        .dx = call->dx_rows == 2 ? call->x.numel > 0 : call->dx.data != NULL,
        .dweight = call->dweight.data != NULL,
        .dbias = call->dbias.data != NULL,
        .sums_dx = !call->native && !shared && call->dx.dtype != RAFTER_F32,
        .sums_dweight = !call->native && call->dweight.dtype != RAFTER_F32,
        .ranks = call->loss.class_group.ranks,
        .streams_w = call->weight.stride[1] == 1,
        .streams_x = call->x.stride[call->x.ndim - 1] == 1,
        .invariant = common->batch_invariant,
        .exchange = (int64_t)rafter_loss_exchange_bytes(&call->loss, call->loss.rows),
    };
    const size_t alignment = rafter_scratch_request(1) - 1, given = common->budget;
    const size_t budget = given > alignment ? given - alignment : given ? 1 : 0;
    struct lce_problem few = plan->problem;
    few.format = lce_kernels_of(context)->format[few_operands(context, call)];
    if (lce_make_few_plan(&few, call->mode, budget, &plan->plan))
        plan->problem = few;
    else
        lce_make_plan(&plan->problem, call->mode, budget, &plan->plan);
    return plan->plan.bytes;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void put_coefficients(struct lce_run *run, int64_t i, struct rafter_row_gradient g) {
    run->b.pivot[i] = g.zero ? 0.0f : g.pivot;
    run->b.p[i] = g.zero ? 0.0f : (float)g.p;
    run->b.target[i] = g.zero ? 0.0f : (float)g.target;
    run->b.spread[i] = g.zero ? 0.0f : (float)g.spread;
    if (run->b.level) {
        run->b.level[i] = g.zero ? 0.0f : (float)g.level;
        run->b.tilt[i] = g.zero ? 0.0f : (float)g.tilt;
    }
}

/* Results of the rows [from, to), whose statistics are complete, and the coefficients
 * of their gradients. */
static rafter_status finish_rows(struct lce_run *run, int64_t from, int64_t to) {
    const struct linear_cross_entropy_call *c = run->call;
    for (int64_t i = from; i < to; i++)
        run->b.stats[i].target = (double)run->b.target_logit[i];
    if (rafter_group_has(&run->loss.class_group))
        RAFTER_TRY(lce_exchange_rows(run));
    for (int64_t i = from; i < to; i++) {
        struct rafter_row_stats *const stats = &run->b.stats[i];
        if (c->common.direction == RAFTER_FORWARD)
            run->loss_sum += rafter_loss_write_row(&run->loss, run->b.row[i], run->b.label[i], stats);
        if (run->b.pivot)
            put_coefficients(run, i, rafter_loss_gradient(&run->unscaled, run->b.row[i], run->b.label[i], stats));
    }
    return RAFTER_OK;
}

/* ---- the call -------------------------------------------------------------------------------- */

/* The part is summed over the inner loop, and complete at its end: step `inner` of `inners` adds to
 * the sums, and the last one stores them. */
static struct lce_partial_sum sum_over_inner(bool wanted, int64_t inner, int64_t inners) {
    return (struct lce_partial_sum){.wanted = wanted, .accumulate = inner > 0, .store = inner == inners - 1};
}

/* The part is summed over the outer loop: in the workspace if that holds all parts, else in
 * the caller's tensor. */
static struct lce_partial_sum sum_over_outer(bool wanted, bool in_workspace, int64_t outer, int64_t outers,
                                             int64_t inner) {
    if (!in_workspace)
        return (struct lce_partial_sum){.wanted = wanted, .store = true, .add = outer > 0};
    return (struct lce_partial_sum){
        .wanted = wanted, .accumulate = outer > 0, .part = inner, .store = outer == outers - 1};
}

static rafter_status run_fast(struct lce_run *run) {
    const struct lce_problem *q = run->problem;
    const bool in_workspace = lce_stores_all_dweight(q, run->plan);
    const int64_t groups = ceil_div(run->rows, run->plan->group), slices = lce_slices(q, run->plan);
    for (int64_t group = 0; group < groups; group++) {
        if (q->stats) {
            for (int64_t slice = 0; slice < slices; slice++)
                lce_statistics_step(run, group, slice);
            RAFTER_TRY(finish_rows(run, group * run->plan->group, min64((group + 1) * run->plan->group, run->rows)));
        }
        for (int64_t slice = 0; slice < slices && (q->dx || q->dweight || q->dbias); slice++)
            lce_gradient_step(run, group, slice, sum_over_inner(q->dx, slice, slices),
                              sum_over_outer(q->dweight, in_workspace, group, groups, slice), q->dbias);
    }
    return RAFTER_OK;
}

static rafter_status run_compact(struct lce_run *run) {
    const struct lce_problem *q = run->problem;
    const bool in_workspace = lce_stores_all_dx(q, run->plan), split = run->plan->split;
    const int64_t groups = ceil_div(run->rows, run->plan->group), slices = lce_slices(q, run->plan);
    const struct lce_partial_sum none = {.wanted = false};
    if (q->stats) {
        for (int64_t slice = 0; slice < slices; slice++)
            for (int64_t group = 0; group < groups; group++)
                lce_statistics_step(run, group, slice);
        RAFTER_TRY(finish_rows(run, 0, run->rows));
    }
    if ((q->dx && !split) || q->dweight || q->dbias)
        for (int64_t slice = 0; slice < slices; slice++)
            for (int64_t group = 0; group < groups; group++)
                lce_gradient_step(run, group, slice,
                                  sum_over_outer(q->dx && !split, in_workspace, slice, slices, group),
                                  sum_over_inner(q->dweight, group, groups), q->dbias);
    if (q->dx && split)
        for (int64_t group = 0; group < groups; group++)
            for (int64_t slice = 0; slice < slices; slice++)
                lce_gradient_step(run, group, slice, sum_over_inner(true, slice, slices), none, false);
    return RAFTER_OK;
}

/* Lists the rows that are not ignored; writes the results of the others. */
static void list_rows(struct lce_run *run) {
    const struct linear_cross_entropy_call *c = run->call;
    for (int64_t row = 0; row < run->loss.rows; row++) {
        const int64_t label = rafter_loss_label(&run->loss, row);
        if (label >= 0) {
            const int64_t i = run->rows++;
            run->b.row[i] = row;
            run->b.label[i] = label;
            run->b.x_row[i] =
                run->problem->depth ? rafter_at(&c->x, rafter_offset(&c->x, 0, c->x.ndim - 1, row)) : NULL;
            if (run->b.stats) {
                run->b.stats[i] = rafter_row_empty;
                run->b.target_logit[i] = 0.0f; /* if another rank has the class */
            }
        } else if (c->common.direction == RAFTER_FORWARD) {
            rafter_loss_write_row(&run->loss, row, label, NULL);
        }
    }
}

static const float zeros[LCE_COLUMNS];

static void store_zeros(const struct lce_run *run, const rafter_view *to, int64_t row) {
    const int last = to->ndim - 1;
    const int64_t at = rafter_offset(to, 0, last, row), stride = to->stride[last];
    for (int64_t i = 0; i < to->shape[last]; i += LCE_COLUMNS)
        run->kernels->store(to->dtype, zeros, min64(LCE_COLUMNS, to->shape[last] - i), 1.0f, false,
                            rafter_at(to, at + i * stride), stride);
}

/* Gradients that no step has written: of ignored rows, and all gradients if every row is
 * ignored; and dbias. */
static void store_missing(const struct lce_run *run) {
    const struct linear_cross_entropy_call *c = run->call;
    const struct lce_problem *q = run->problem;
    if (q->dx && q->ranks == 0) /* dx_sum was zero from the start */
        for (int64_t row = 0, i = 0; row < q->rows; row++) {
            if (i < run->rows && run->b.row[i] == row)
                i++;
            else
                store_zeros(run, &c->dx, row);
        }
    if (q->dweight && run->rows == 0 && !c->accumulate_into_dweight)
        for (int64_t v = 0; v < q->classes; v++)
            store_zeros(run, &c->dweight, v);
    if (q->dbias)
        run->kernels->store(c->dbias.dtype, run->b.dbias, q->classes, run->scale, false, c->dbias.data,
                            c->dbias.stride[0]);
}

/* Factors that all rows share could make small gradients underflow in bf16. So coefficients of rows
 * are computed without them, and they are applied to the results. The gradient of the entropy shares
 * only the logit scale with that of the loss. */
static void separate_scale(struct lce_run *run) {
    const struct rafter_loss *const loss = &run->loss;
    const bool loss_only = !rafter_loss_has(&loss->dentropy);
    double scale = (double)loss->scale / (loss_only ? loss->mean_denominator : 1.0);
    run->unscaled = *loss;
    run->unscaled.scale = 1.0f;
    run->unscaled.mean_denominator = loss_only ? 1.0 : loss->mean_denominator;
    if (loss_only && loss->reduction != RAFTER_NONE && rafter_loss_has(&loss->dloss)) {
        float dloss;
        memcpy(&dloss, loss->dloss.data, sizeof dloss);
        scale *= (double)dloss;
        run->unscaled.dloss.data = NULL;
    }
    run->scale = run->rows > 0 ? (float)scale : 1.0f;
}

static rafter_status run_call(rafter_context *context, const struct rafter_call *common, const void *storage,
                              const void *kernels, char *workspace) {
    const struct linear_cross_entropy_call *const call = (const void *)common;
    const struct plan *const plan = storage;
    struct lce_run run = {.context = context,
                          .call = call,
                          .kernels = kernels,
                          .problem = &plan->problem,
                          .plan = &plan->plan,
                          .loss = call->loss,
                          .operands = plan->plan.few ? few_operands(context, call) : call->x.dtype};
    run.x_logits = run.x_dweight = run.w_logits = run.w_dx = run.vectors = -1;
#define X(type, name) run.b.name = plan->plan.layout.name < 0 ? NULL : (void *)(workspace + plan->plan.layout.name);
    LCE_BUFFERS(X)
#undef X
    RAFTER_TRY(lce_agree(&run));
    lce_place_dx(&run);
    list_rows(&run);
    separate_scale(&run);

    for (int64_t v = 0; v < plan->plan.slice; v++) {
        run.b.bias[v] = 0.0f;
        run.b.weight[v] = 1.0f;
    }
    if (run.b.dbias)
        memset(run.b.dbias, 0, (size_t)plan->problem.classes * sizeof *run.b.dbias);
    if (!plan->problem.stats && run.b.pivot)
        for (int64_t i = 0; i < run.rows; i++)
            put_coefficients(&run, i,
                             rafter_loss_gradient_from_lse(&run.unscaled, run.b.row[i], run.b.label[i],
                                                           rafter_loss_given_lse(&run.loss, run.b.row[i])));
    if (run.rows > 0 && plan->plan.few)
        lce_few_begin(&run);
    if (run.rows > 0)
        RAFTER_TRY((plan->plan.fast ? run_fast : run_compact)(&run));
    store_missing(&run);
    if (run.b.dx_sum)
        RAFTER_TRY(lce_sum_dx(&run));
    return common->direction == RAFTER_FORWARD ? rafter_loss_write_sum(context, &run.loss, run.loss_sum) : RAFTER_OK;
}

const struct rafter_variant_functions rafter_linear_cross_entropy_on_cpu = {NULL, make_plan, run_call};
