/* SPDX-License-Identifier: Apache-2.0 */
/* Checks an oracle's gradients against finite differences of its forward results. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/internal.h"

static problem_tensor *upstream_of(const problem *p, const problem_tensor *output) {
    char name[32];
    snprintf(name, sizeof name, "d%s", output->name);
    problem_tensor *t = problem_find(p, name);
    return t && t->role == PROBLEM_UPSTREAM ? t : NULL;
}

/* The sum over all outputs of output times upstream gradient, in fp64. A loss without an upstream
 * gradient has the factor 1. */
static double objective(problem *p) {
    problem_solve(p, PROBLEM_FORWARD);
    double sum = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i], *upstream = upstream_of(p, t);
        if (t->role != PROBLEM_OUTPUT || (!upstream && strcmp(t->name, "loss") != 0))
            continue;
        for (int64_t k = 0; k < t->numel; k++)
            sum += t->expected[k] * (upstream ? problem_value(upstream, k) : 1.0);
    }
    return sum;
}

double problem_finite_differences(problem *p) {
    for (int i = 0; i < p->tensors; i++)
        if (!problem_is_result(&p->tensor[i]) && !p->tensor[i].exact)
            p->tensor[i].exact = problem_values_of(&p->tensor[i]);
    objective(p);
    for (int i = 0; i < p->tensors; i++) { /* backward reads the unrounded outputs */
        problem_tensor *t = &p->tensor[i];
        if (t->role != PROBLEM_OUTPUT)
            continue;
        free(t->exact);
        t->exact = problem_values_of(t);
        for (int64_t k = 0; k < t->numel; k++)
            t->exact[k] = t->expected[k];
    }
    problem_solve(p, PROBLEM_BACKWARD);

    double worst = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *gradient = &p->tensor[i];
        if (gradient->role != PROBLEM_GRADIENT)
            continue;
        problem_tensor *input = problem_find(p, gradient->name + 1);
        if (!input || input->role != PROBLEM_INPUT)
            continue;
        double size = 0;
        for (int64_t k = 0; k < gradient->numel; k++)
            size = fmax(size, fabs(gradient->expected[k] - (gradient->accumulates ? gradient->initial[k] : 0)));
        const int64_t step = gradient->numel / 24 + 1;
        for (int64_t k = 0; k < gradient->numel; k += step) {
            const double x = input->exact[k], h = 1e-5 * fmax(1, fabs(x));
            input->exact[k] = x + h;
            const double above = objective(p);
            input->exact[k] = x - h;
            const double below = objective(p);
            input->exact[k] = x;
            const double slope = (above - below) / (2 * h);
            const double answer = gradient->expected[k] - (gradient->accumulates ? gradient->initial[k] : 0);
            worst = fmax(worst, fabs(slope - answer) / fmax(size, 1e-3));
        }
    }
    return worst;
}
