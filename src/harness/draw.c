/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/draw.h"

/* The first in half of the problems. */
static int pick_algorithm(const struct op_cases *op, struct dice *dice) {
    int algorithms = 0;
    while (op->algorithms[algorithms])
        algorithms++;
    return one_in(dice, 2) ? 0 : (int)pick(dice, algorithms);
}

static bool is_made(problem *p) {
    return problem_has_layout(p, p->layout) && problem_adapt(p);
}

void draw_shuffled(problem *p, const struct op_cases *op, struct dice *dice) {
    do {
        *p = (problem){.op = op, .algorithm = pick_algorithm(op, dice), .layout = PROBLEM_SHUFFLED};
        p->shuffle = roll(dice);
        op->make(p, pick(dice, op->count()));
    } while (p->large || !is_made(p));
}

void draw_without_map(problem *p, const struct op_cases *op, struct dice *dice, int64_t most) {
    do {
        *p = (problem){.op = op, .algorithm = pick_algorithm(op, dice)};
        p->layout = one_in(dice, 2) ? PROBLEM_COMPACT : (enum problem_layout)pick(dice, PROBLEM_LAYOUTS);
        op->make_random(p, dice, most);
    } while (!is_made(p));
}
