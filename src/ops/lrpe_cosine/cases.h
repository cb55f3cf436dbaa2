/* SPDX-License-Identifier: Apache-2.0 */
/* What the problems of lrpe_cosine and their oracle share: the options of a problem's row. */
#ifndef RAFTER_LRPE_COSINE_CASES_H
#define RAFTER_LRPE_COSINE_CASES_H

#include "harness/problem.h"

struct lrpe_row {
    rafter_act_kind act;
    rafter_softmax_over over;
    int64_t offset;
};

void oracle_lrpe_cosine(problem *p, enum problem_mode mode);

#endif
