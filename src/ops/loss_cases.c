/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss_cases.h"

#include <stdio.h>

const struct loss_case loss_cases[LOSS_CASES] = {
    {.name = "sum", .reduction = RAFTER_SUM, .dloss = true},
    {.name = "none", .reduction = RAFTER_NONE, .dloss = true, .extras = true, .ignored = SOME_IGNORED},
    {.name = "none, no dloss", .reduction = RAFTER_NONE, .narrow = true, .extras = true},
    {.name = "some ignored", .ignored = SOME_IGNORED, .extras = true, .dloss = true},
    {.name = "label 0 ignored", .ignored = LABEL_ZERO_IGNORED, .extras = true, .narrow = true},
    {.name = "all ignored", .ignored = ALL_IGNORED, .extras = true},
    {.name = "all ignored: 0", .ignored = ALL_IGNORED, .zero_if_all_ignored = true, .narrow = true},
    {.name = "all ignored, sum", .ignored = ALL_IGNORED, .reduction = RAFTER_SUM},
    {.name = "smoothing", .smoothing = 0.1f, .extras = true},
    {.name = "smoothing 1", .smoothing = 1, .reduction = RAFTER_NONE},
    {.name = "class weights", .class_weight = true, .ignored = SOME_IGNORED, .extras = true},
    {.name = "class weights, smoothing",
     .class_weight = true,
     .smoothing = 0.2f,
     .ignored = SOME_IGNORED,
     .dloss = true},
    {.name = "class weights, smoothing, sum", .class_weight = true, .smoothing = 0.3f, .reduction = RAFTER_SUM},
    {.name = "row weights", .row_weight = true, .ignored = SOME_IGNORED, .extras = true},
    {.name = "row weights, none", .row_weight = true, .reduction = RAFTER_NONE, .dloss = true},
    {.name = "denominator", .denominator = true, .ignored = SOME_IGNORED},
    {.name = "denominator, class weights", .denominator = true, .class_weight = true, .dloss = true},
    {.name = "z_loss", .z_loss = 0.01f, .extras = true},
    {.name = "z_loss, no lse", .z_loss = 0.01f, .without_lse = true, .dloss = true},
    {.name = "z_loss, smoothing", .z_loss = 0.02f, .smoothing = 0.1f, .without_lse = true},
    {.name = "softcap", .softcap = 2.5f, .extras = true},
    {.name = "scale", .scale = 0.7f, .extras = true},
    {.name = "softcap, scale", .softcap = 30, .scale = 1.5f, .without_lse = true, .narrow = true},
    {.name = "no lse", .without_lse = true, .ignored = SOME_IGNORED},
    {.name = "all",
     .smoothing = 0.1f,
     .z_loss = 0.001f,
     .softcap = 5,
     .scale = 2,
     .ignored = SOME_IGNORED,
     .class_weight = true,
     .row_weight = true,
     .denominator = true,
     .dloss = true,
     .extras = true},
    {.name = "all, none",
     .smoothing = 0.4f,
     .z_loss = 0.005f,
     .softcap = 4,
     .scale = 0.5f,
     .ignored = SOME_IGNORED,
     .class_weight = true,
     .row_weight = true,
     .reduction = RAFTER_NONE,
     .dloss = true,
     .extras = true,
     .without_lse = true},
};

int64_t loss_case_declare(problem *p, const struct loss_case *c, int ndim, const int64_t *rows, int64_t classes) {
    static const int64_t label_zero = 0;
    p->options.loss = (rafter_loss_options){.size = sizeof p->options.loss,
                                            .reduction = c->reduction,
                                            .zero_if_all_ignored = c->zero_if_all_ignored,
                                            .ignore_index = c->ignored == LABEL_ZERO_IGNORED ? &label_zero : NULL,
                                            .label_smoothing = c->smoothing,
                                            .z_loss = c->z_loss,
                                            .softcap = c->softcap,
                                            .logit_scale = c->scale};
    p->options.backward_without_lse = c->without_lse;
    problem_tensor *t = problem_add(p, "target", PROBLEM_INPUT, c->narrow ? RAFTER_I32 : RAFTER_I64, ndim, rows);
    const int64_t count = t->numel;
    t->fill = c->ignored == ALL_IGNORED ? PROBLEM_COUNT : PROBLEM_LABELS;
    t->low = c->ignored == ALL_IGNORED ? -100 : 0;
    t->high = c->ignored == ALL_IGNORED ? 1 : classes;
    t->some_ignored = c->ignored == SOME_IGNORED;
    t->ignored = -100;
    if (c->class_weight) {
        t = problem_add(p, "class_weight", PROBLEM_INPUT, RAFTER_F32, 1, &classes);
        t->fill = PROBLEM_UNIFORM;
        t->shift = 0.5;
    }
    if (c->row_weight) /* advantages, of either sign */
        problem_add(p, "row_weight", PROBLEM_INPUT, RAFTER_F32, ndim, rows);
    if (c->denominator) {
        t = problem_add(p, "denominator", PROBLEM_INPUT, RAFTER_F32, 0, NULL);
        t->shift = LOSS_CASE_DENOMINATOR;
        t->scale = 0;
    }
    const int loss_ndim = c->reduction == RAFTER_NONE ? ndim : 0;
    problem_add(p, "loss", PROBLEM_OUTPUT, RAFTER_F32, loss_ndim, rows);
    if (c->dloss)
        problem_add(p, "dloss", PROBLEM_UPSTREAM, RAFTER_F32, loss_ndim, rows);
    problem_add(p, "lse", PROBLEM_OUTPUT, RAFTER_F32, ndim, rows);
    if (c->dentropy)
        problem_add(p, "dentropy", PROBLEM_UPSTREAM, RAFTER_F32, ndim, rows);
    if (c->dentropy || c->extras)
        problem_add(p, "entropy", PROBLEM_OUTPUT, RAFTER_F32, ndim, rows);
    if (c->extras) {
        problem_add(p, "row_loss", PROBLEM_OUTPUT, RAFTER_F32, ndim, rows);
        problem_add(p, "logprob", PROBLEM_OUTPUT, RAFTER_F32, ndim, rows);
        problem_add(p, "argmax", PROBLEM_OUTPUT, c->narrow ? RAFTER_I32 : RAFTER_I64, ndim, rows);
    }
    return count;
}

rafter_loss_options loss_case_options(const problem *p) {
    rafter_loss_options options = p->options.loss;
    options.class_weight = problem_dl(p, "class_weight");
    options.row_weight = problem_dl(p, "row_weight");
    options.denominator = problem_dl(p, "denominator");
    return options;
}

struct loss_case loss_case_request(const struct problem_request *r) {
    const rafter_loss_options *const o = &r->options.loss;
    return (struct loss_case){.name = problem_reduction_names[o->reduction],
                              .smoothing = o->label_smoothing,
                              .z_loss = o->z_loss,
                              .softcap = o->softcap,
                              .scale = o->logit_scale,
                              .reduction = o->reduction,
                              .class_weight = r->class_weight,
                              .extras = r->extras};
}

void loss_case_label(problem *p, const char *name, rafter_dtype dtype, int ndim, const int64_t *shape,
                     const char *suffix) {
    int used = snprintf(p->label, sizeof p->label, "%s %s [", name, problem_dtype_name(dtype));
    for (int d = 0; d < ndim; d++)
        used += snprintf(p->label + used, sizeof p->label - (size_t)used, d ? ", %lld" : "%lld", (long long)shape[d]);
    snprintf(p->label + used, sizeof p->label - (size_t)used, "]%s", suffix);
}
