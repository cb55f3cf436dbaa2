/* SPDX-License-Identifier: Apache-2.0 */
/* A few problems for every variant of an op, for checks that are too slow for all problems. */
#ifndef RAFTER_TESTS_FEW_H
#define RAFTER_TESTS_FEW_H

#include "harness/problem.h"

/* A problem, by its number and form, and the mode to call it in. */
struct few_problem {
    int64_t index;
    enum problem_layout layout;
    int algorithm;
    enum problem_mode mode;
};

enum { FEW_MOST = 16 };

/* Finds up to `wanted` (at most FEW_MOST) problems per mode that the context's variant serves. The
 * context is forced to that variant. Takes the smallest problems that have 4096 elements; if there
 * are not enough of them, the largest that have fewer. Only asks: no call is made. Returns how many
 * it found; `found` has PROBLEM_MODES * FEW_MOST places. */
int few_problems(const struct op_cases *op, rafter_context *context, int wanted, struct few_problem *found);

/* Declares the problem and adapts it to its algorithm. False: it has no such form. */
bool few_make(const struct op_cases *op, const struct few_problem *which, problem *p);

/* Makes the context's device that of the reserved tensors, wherever their memory is. Then they are
 * good for questions only. */
void few_pretend(problem *p, const rafter_context *context);

#endif
