/* SPDX-License-Identifier: Apache-2.0 */
/* What a problem of act says about itself, for its cases and its oracle; lies in problem.row. */
#ifndef RAFTER_ACT_CASES_H
#define RAFTER_ACT_CASES_H

#include "harness/problem.h"

struct act_row {
    rafter_act_kind kind;
    int dim; /* softmax */
};

void oracle_act(problem *p, enum problem_mode mode);

#endif
