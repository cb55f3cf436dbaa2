/* SPDX-License-Identifier: Apache-2.0 */
#include "few.h"

#include <string.h>

#include "harness/context.h"
#include "harness/variants.h"

bool few_make(const struct op_cases *op, const struct few_problem *which, problem *p) {
    *p = (problem){.op = op, .layout = which->layout, .algorithm = which->algorithm};
    op->make(p, which->index);
    return !p->large && problem_has_layout(p, p->layout) && problem_adapt(p);
}

void few_pretend(problem *p, const rafter_context *context) {
    for (int i = 0; i < p->tensors; i++)
        p->tensor[i].tensor.device = context_device(context);
}

/* The best problems so far for one mode, the best first. */
struct ranking {
    int count;
    struct few_problem problem[FEW_MOST];
    int64_t rank[FEW_MOST];
};

static int64_t rank_of(const problem *p) {
    enum { ENOUGH = 4096 };
    int64_t elements = 0;
    for (int i = 0; i < p->tensors; i++)
        elements += p->tensor[i].numel;
    return elements >= ENOUGH ? elements : INT64_MAX - elements;
}

static void offer(struct ranking *ranking, int wanted, int64_t rank, const struct few_problem *which) {
    int at = ranking->count;
    while (at > 0 && ranking->rank[at - 1] > rank)
        at--;
    if (at >= wanted)
        return;
    const int last = ranking->count < wanted ? ranking->count++ : wanted - 1;
    for (int i = last; i > at; i--) {
        ranking->problem[i] = ranking->problem[i - 1];
        ranking->rank[i] = ranking->rank[i - 1];
    }
    ranking->problem[at] = *which;
    ranking->rank[at] = rank;
}

/* Whether the context's variant serves the problem in this mode: both calls, if it takes two. */
static bool serves(problem *p, rafter_context *context, enum problem_mode mode) {
    size_t bytes = 0;
    if (!problem_is_one_call(p, mode))
        return serves(p, context, PROBLEM_FORWARD) && serves(p, context, PROBLEM_BACKWARD);
    return problem_ask(p, context, mode, &bytes) == RAFTER_OK && variant_taken(context);
}

static void try_problem(const struct op_cases *op, struct few_problem which, rafter_context *context, int wanted,
                        struct ranking *rankings) {
    problem p;
    if (!few_make(op, &which, &p) || !problem_reserve(&p))
        return;
    few_pretend(&p, context);
    for (int mode = 0; mode < PROBLEM_MODES; mode++) {
        which.mode = (enum problem_mode)mode;
        if (op->algorithm_modes[which.algorithm] >> mode & 1 && serves(&p, context, which.mode))
            offer(&rankings[mode], wanted, rank_of(&p), &which);
    }
    problem_free(&p);
}

int few_problems(const struct op_cases *op, rafter_context *context, int wanted, struct few_problem *found) {
    struct ranking rankings[PROBLEM_MODES] = {{.count = 0}};
    struct few_problem which = {.index = 0};
    for (; which.index < op->count(); which.index++)
        for (int layout = 0; layout < PROBLEM_LAYOUTS; layout++)
            for (which.algorithm = 0; op->algorithms[which.algorithm]; which.algorithm++) {
                which.layout = (enum problem_layout)layout;
                try_problem(op, which, context, wanted, rankings);
            }
    int count = 0;
    for (int mode = 0; mode < PROBLEM_MODES; mode++)
        for (int i = 0; i < rankings[mode].count; i++)
            found[count++] = rankings[mode].problem[i];
    return count;
}
