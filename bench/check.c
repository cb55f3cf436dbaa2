/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/problem.h"
#include "options.h"
#include "progress.h"
#include "verbs.h"

enum { DTYPES = 3, VARIANTS = 8, SENTENCES = 5 };

/* One line of the table. */
struct tally {
    int64_t problems, wrong;
    double worst, max_error; /* worst: as a share of the bound */
};

struct check {
    const struct op_cases *op;
    bool on_gpu;
    int variants;
    const char *variant[VARIANTS];
    rafter_context *context[VARIANTS];
    struct tally tally[DTYPES][PROBLEM_MODES][VARIANTS];
    int sentences;
    char sentence[SENTENCES][512];
};

static bool is_float(rafter_dtype dtype) {
    return dtype == RAFTER_F32 || dtype == RAFTER_BF16 || dtype == RAFTER_F16;
}

/* The dtype of the first tensor of floats, which the op is called after. */
static rafter_dtype dtype_of(const problem *p) {
    int i = 0;
    while (i < p->tensors - 1 && !is_float(p->tensor[i].dtype))
        i++;
    return p->tensors && is_float(p->tensor[i].dtype) ? p->tensor[i].dtype : RAFTER_F32;
}

static void check_call(struct check *c, problem *p, enum problem_mode mode, int variant) {
    struct tally *tally = &c->tally[dtype_of(p)][mode][variant];
    problem_poison(p, mode);
    const rafter_status status = problem_call(p, c->context[variant], mode);
    struct problem_verdict v = {.good = false, .worst = INFINITY};
    if (status == RAFTER_OK)
        v = problem_compare(p, mode);
    else
        snprintf(v.sentence, sizeof v.sentence, "%s: %.200s", rafter_status_name(status),
                 rafter_last_error(c->context[variant]));
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
        if (mode == PROBLEM_BACKWARD) { /* every variant's backward reads the exact outputs of forward */
            problem_solve(p, PROBLEM_FORWARD);
            problem_store_outputs(p);
        }
        problem_solve(p, (enum problem_mode)mode);
        for (int v = 0; v < c->variants; v++)
            check_call(c, p, (enum problem_mode)mode, v);
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

/* Prints the op's lines; false if anything was wrong, or nothing was checked. */
static bool print_op(const struct check *c) {
    int64_t problems = 0, wrong = 0;
    for (int d = 0; d < DTYPES; d++)
        for (int m = 0; m < PROBLEM_MODES; m++)
            for (int v = 0; v < c->variants; v++) {
                const struct tally *t = &c->tally[d][m][v];
                if (t->problems == 0)
                    continue;
                printf("%-22s%-7s%-11s%-12s%8lld%14.3f%12.2e  ", c->op->op, problem_dtype_name((rafter_dtype)d),
                       problem_mode_names[m], c->variant[v], (long long)t->problems, t->worst, t->max_error);
                if (t->wrong)
                    printf("%lld wrong\n", (long long)t->wrong);
                else
                    printf("good\n");
                problems += t->problems;
                wrong += t->wrong;
            }
    if (problems == 0)
        printf("%-22shas no problems to check\n", c->op->op);
    for (int i = 0; i < c->sentences; i++)
        printf("  %s\n", c->sentence[i]);
    fflush(stdout);
    return problems > 0 && wrong == 0 && c->sentences == 0;
}

static bool open_context(struct check *c, const char *name, rafter_context_options options) {
    options.size = sizeof options;
    if (rafter_context_create(&c->context[c->variants], &options) != RAFTER_OK)
        return false;
    c->variant[c->variants++] = name;
    return true;
}

/* One for every variant of the CPU, or one for the GPU. */
static bool open_contexts(struct check *c, const struct options *o) {
    c->on_gpu = o->device.device_type == kDLCUDA;
    if (c->on_gpu)
        return open_context(c, "cuda", (rafter_context_options){.device = o->device});
    bool good = true;
    const char *name;
    while (good && c->variants < VARIANTS && (name = rafter_op_variant(c->op->op, c->variants)))
        good = open_context(c, name, (rafter_context_options){.variant = name, .threads = o->threads});
    return good && c->variants > 0;
}

int verb_check(int argc, char **argv) {
    struct options options;
    if (!options_read(&options, "check", argc, argv, 2))
        return 2;
    unsetenv("RAFTER_VARIANT"); /* it would win over the variants forced here */
    printf("%-22s%-7s%-11s%-12s%8s%14s%12s\n", "op", "dtype", "direction", "variant", "problems", "worst/bound",
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
