/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the cases of the two losses: a table of options, and the tensors that the options
 * need. */
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
    bool dentropy;    /* linear_cross_entropy; also declares the entropy */
    bool extras;      /* row_loss, logprob, entropy, argmax */
    bool narrow;      /* int32 labels and argmax */
    bool without_lse; /* backward computes it again */
};

enum { LOSS_CASES = 26 };
extern const struct loss_case loss_cases[LOSS_CASES];

/* The value of the `denominator` tensor. */
#define LOSS_CASE_DENOMINATOR 7.0

/* Sets the options and declares the tensors that both losses have: target, the options' tensors,
 * and all results but gradients. `rows` is the shape of target. Returns the number of rows. */
int64_t loss_case_declare(problem *p, const struct loss_case *c, int ndim, const int64_t *rows, int64_t classes);

/* The problem's options as an argument of the call, with their tensors. */
rafter_loss_options loss_case_options(const problem *p);

/* The case that `rafter info` describes. */
struct loss_case loss_case_request(const struct problem_request *request);

/* The label "<name> <dtype> [2, 3]<suffix>". */
void loss_case_label(problem *p, const char *name, rafter_dtype dtype, int ndim, const int64_t *shape,
                     const char *suffix);

#endif
