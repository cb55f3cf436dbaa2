/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter check`: every variant on every test problem that it serves, against the fp64 oracle. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/problem.h"
#include "harness/variants.h"
#include "options.h"
#include "progress.h"
#include "verbs.h"

enum { DTYPES = 3, SENTENCES = 5 };

/* One line of the table. */
struct tally {
    int64_t problems, wrong;
    double worst, max_error; /* worst: relative to the bound */
};

struct check {
    const struct op_cases *op;
    bool on_gpu;
    int variants;
    const char *variant[VARIANTS_MOST];
    rafter_context *context[VARIANTS_MOST];
    struct tally tally[DTYPES][PROBLEM_MODES][VARIANTS_MOST];
    int sentences;
    char sentence[SENTENCES][512];
};

static bool is_float(rafter_dtype dtype) {
    return dtype == RAFTER_F32 || dtype == RAFTER_BF16 || dtype == RAFTER_F16;
}

/* The dtype of the first floating-point tensor. */
static rafter_dtype dtype_of(const problem *p) {
    int i = 0;
    while (i < p->tensors - 1 && !is_float(p->tensor[i].dtype))
        i++;
    return p->tensors && is_float(p->tensor[i].dtype) ? p->tensor[i].dtype : RAFTER_F32;
}

static void check_call(struct check *c, problem *p, enum problem_mode mode, int variant,
                       struct problem_solution *solution) {
    struct tally *tally = &c->tally[dtype_of(p)][mode][variant];
    problem_poison(p, mode);
    const rafter_status status = problem_call(p, c->context[variant], mode);
    if (variant_declined(c->context[variant], status))
        return;
    struct problem_verdict v = {.good = false, .worst = INFINITY};
    if (status == RAFTER_OK) {
        problem_solve_once(p, mode, solution);
        v = problem_compare(p, mode);
    } else {
        snprintf(v.sentence, sizeof v.sentence, "%s: %.200s", rafter_status_name(status),
                 rafter_last_error(c->context[variant]));
    }
    tally->problems++;
    tally->worst = fmax(tally->worst, v.worst);
    tally->max_error = fmax(tally->max_error, v.max_error);
    if (v.good)
        return;
    tally->wrong++;
    if (c->sentences < SENTENCES)
        snprintf(c->sentence[c->sentences++], sizeof *c->sentence, "%s %s, %s, %s: %s", c->variant[variant],
                 problem_mode_names[mode], p->op->algorithms[p->algorithm], p->label, v.sentence);
}

/* All modes of one problem and algorithm, on all variants. */
static void check_problem(struct check *c, problem *p) {
    for (int mode = 0; mode < PROBLEM_MODES; mode++) {
        if (!(c->op->algorithm_modes[p->algorithm] >> mode & 1))
            continue;
        struct problem_solution solution = {.solved = false};
        if (mode == PROBLEM_BACKWARD) { /* every variant's backward reads the same outputs of forward */
            problem_prepare_backward(p);
            problem_solve_once(p, PROBLEM_BACKWARD, &solution);
        }
        for (int v = 0; v < c->variants; v++)
            check_call(c, p, (enum problem_mode)mode, v, &solution);
    }
}

static void check_op(struct check *c) {
    const int64_t count = c->op->count();
    for (int64_t i = 0; i < count; i++) {
        for (int algorithm = 0; c->op->algorithms[algorithm]; algorithm++) {
            problem p = {.op = c->op, .algorithm = algorithm};
            c->op->make(&p, i);
            if (p.large || (p.for_cuda && !c->on_gpu))
                break;
            if (!problem_adapt(&p))
                continue;
            progress("%s %lld/%lld: %s", c->op->op, (long long)i + 1, (long long)count, p.label);
            if (problem_allocate(&p, (uint64_t)i + 1))
                check_problem(c, &p);
            else if (c->sentences < SENTENCES)
                snprintf(c->sentence[c->sentences++], sizeof *c->sentence, "%s: no memory, not checked", p.label);
            problem_free(&p);
        }
    }
    progress_clear();
}

static bool was_checked(const struct check *c, int variant) {
    for (int d = 0; d < DTYPES; d++)
        for (int m = 0; m < PROBLEM_MODES; m++)
            if (c->tally[d][m][variant].problems > 0)
                return true;
    return false;
}

/* Prints the op's lines. False if a result was wrong, or nothing was checked. */
static bool print_op(const struct check *c) {
    int64_t problems = 0, wrong = 0;
    for (int d = 0; d < DTYPES; d++)
        for (int m = 0; m < PROBLEM_MODES; m++)
            for (int v = 0; v < c->variants; v++) {
                const struct tally *t = &c->tally[d][m][v];
                if (t->problems == 0)
                    continue;
                printf("%-22s%-7s%-11s%-28s%8lld%14.3f%12.2e  ", c->op->op, problem_dtype_name((rafter_dtype)d),
                       problem_mode_names[m], c->variant[v], (long long)t->problems, t->worst, t->max_error);
                if (t->wrong)
                    printf("%lld wrong\n", (long long)t->wrong);
                else
                    printf("good\n");
                problems += t->problems;
                wrong += t->wrong;
            }
    for (int v = 0; v < c->variants; v++)
        if (!was_checked(c, v))
            printf("%-22s%s serves none of the problems\n", c->op->op, c->variant[v]);
    if (problems == 0)
        printf("%-22shas no problems to check\n", c->op->op);
    for (int i = 0; i < c->sentences; i++)
        printf("  %s\n", c->sentence[i]);
    fflush(stdout);
    return problems > 0 && wrong == 0 && c->sentences == 0;
}

/* A context for every variant that this device can run. */
static bool open_contexts(struct check *c, const struct options *o) {
    const rafter_context_options options = {.device = o->device, .threads = o->threads};
    rafter_context *const any = variant_context(NULL, options);
    if (!any)
        return false;
    c->on_gpu = o->device.device_type == kDLCUDA;
    bool good = true;
    const char *name, *reason;
    for (int i = 0; good && rafter_describe_variant(any, c->op->op, i, &name, &reason); i++) {
        if (reason)
            continue;
        c->variant[c->variants] = name;
        c->context[c->variants] = variant_context(name, options);
        good = c->context[c->variants] != NULL;
        c->variants += good;
    }
    rafter_context_destroy(any);
    return good && c->variants > 0;
}

int verb_check(int argc, char **argv) {
    struct options options;
    if (!options_read(&options, "check", argc, argv, 2))
        return 2;
    printf("%-22s%-7s%-11s%-28s%8s%14s%12s\n", "op", "dtype", "direction", "variant", "problems", "worst/bound",
           "max error");
    bool good = true;
    for (int i = 0; options.op[i]; i++) {
        struct check *c = calloc(1, sizeof *c);
        if (!c)
            return 1;
        c->op = options.op[i];
        if (open_contexts(c, &options)) {
            check_op(c);
            good &= print_op(c);
        } else {
            fprintf(stderr, "rafter: no context for %s: %s\n", c->op->op, rafter_last_error(NULL));
            good = false;
        }
        for (int v = 0; v < c->variants; v++)
            rafter_context_destroy(c->context[v]);
        free(c);
    }
    return good ? 0 : 1;
}
