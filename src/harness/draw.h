/* SPDX-License-Identifier: Apache-2.0 */
/* Random problems for tests, beside those of an op's maps (harness/map.h). */
#ifndef RAFTER_HARNESS_DRAW_H
#define RAFTER_HARNESS_DRAW_H

#include "harness/dice.h"

/* A problem of the op's list, but not one past 2^31 elements, whose tensors have random strides. */
void draw_shuffled(problem *p, const struct op_cases *op, struct dice *dice);

/* A problem from make_random, which the op has, in any layout that its tensors have. Both are for any algorithm. */
void draw_without_map(problem *p, const struct op_cases *op, struct dice *dice, int64_t most);

#endif
