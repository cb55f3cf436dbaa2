/* SPDX-License-Identifier: Apache-2.0 */
/* What the cases of the two losses have in common: the options of a loss, one table of them, and the tensors that they
 * ask for. */
#ifndef RAFTER_OPS_LOSS_CASES_H
#define RAFTER_OPS_LOSS_CASES_H

#include "harness/problem.h"

enum loss_ignored { NONE_IGNORED, SOME_IGNORED, LABEL_ZERO_IGNORED, ALL_IGNORED };

struct loss_case {
    const char *name;
    float smoothing, z_loss, softcap, scale;
    rafter_reduction reduction;
    enum loss_ignored ignored;
    bool zero_if_all_ignored, class_weight, row_weight, denominator, dloss;
    bool extras;      /* row_loss, logprob, entropy, argmax */
    bool narrow;      /* int32 labels and argmax */
    bool without_lse; /* backward computes it again */
};

enum { LOSS_CASES = 26 };
extern const struct loss_case loss_cases[LOSS_CASES];

/* The values of p's denominator. */
#define LOSS_CASE_DENOMINATOR 7.0

/* The options, and the tensors that every loss has: target and those that options name, then all results but gradients.
 * Rows are of the shape [ndim]. Returns their number. */
int64_t loss_case_declare(problem *p, const struct loss_case *c, int ndim, const int64_t *rows, int64_t classes);

/* The problem's options, with their tensors. */
rafter_loss_options loss_case_options(const problem *p);

/* "<name> <dtype> [2, 3" and what comes behind the shape. */
void loss_case_label(problem *p, const char *name, rafter_dtype dtype, int ndim, const int64_t *shape,
                     const char *behind);

#endif
