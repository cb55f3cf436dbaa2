/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a call is cut: rows into groups, the vocabulary into slices, and what of it the workspace holds. Decided by
 * shapes, wanted results and the byte budget alone, never by data or threads.
 *
 * A step takes one group and one slice: it forms their logits and, from these, statistics of the rows or the gradient
 * dz; and then from dz a part of the group's dx (the sum over classes) and of the slice's dW (the sum over rows).
 *
 * fast      for each group: statistics from all slices, whose logits are kept; then the gradients from all slices.
 *           dx of a group is complete at its end. dW grows from group to group.
 * compact   for each slice, all groups: statistics. Then again, for each slice, all groups: logits, gradients.
 *           dW of a slice is complete at its end. dx grows from slice to slice.
 * A gradient that grows is kept in the workspace, all of it in fp32; or, if the caller's tensor is fp32 or accumulate
 * is native, in the caller's tensor. When compact cannot keep dx it goes over the logits twice (`split`): for dW as
 * above, and then group by group for dx.
 */
#ifndef RAFTER_LCE_PLAN_H
#define RAFTER_LCE_PLAN_H

#include "ops/linear_cross_entropy/kernels.h"
#include "ops/loss.h"

struct lce_problem {
    struct lce_format format;
    int64_t rows, classes, depth; /* N, V, D */
    bool stats;                   /* to be found, not given by the caller's lse */
    bool dx, dweight, dbias;      /* wanted */
    bool keeps_dx, keeps_dweight; /* in the workspace, should they grow */
};

struct lce_plan {
    bool fast;
    bool split;
    int64_t group, slice; /* rows, classes of a step */
    size_t bytes;         /* of the workspace */
};

/* The plan with the least overhead within `budget` bytes (0: see docs). If there is none, its bytes are the least that
 * would do, and false is returned. */
bool lce_make_plan(const struct lce_problem *problem, rafter_lce_mode mode, size_t budget, struct lce_plan *plan);

/* The workspace. Arrays over rows cover all rows that are not ignored, in their order, and can be read LCE_COLUMNS
 * elements past the end. Operands and products are as in kernels.h. What the plan does not need is NULL. */
struct lce_buffers {
    int64_t *row;       /* its number among all rows */
    const char **x_row; /* where it begins in x */
    int64_t *label;
    struct rafter_row_stats *stats; /* so far */
    float *target_logit;
    float *pivot, *p, *target, *spread; /* coefficients of the row's gradient: see struct lce_gradient */

    float *bias, *weight;       /* of the slice's classes */
    char *x_logits, *x_dweight; /* the group's rows of x as operands */
    char *w_logits, *w_dx;      /* the slice's rows of W as operands */
    float *logits;              /* of the group and slice; fast keeps those of all slices */
    float *block_stats;
    char *dz_by_row, *dz_by_class;
    float *dx;          /* of the group, or of all groups if kept */
    float *dweight;     /* of the slice, or of all slices if kept */
    float *block_dbias; /* of the slice, by blocks of rows */
    float *dbias;       /* of all classes */
};

/* Places the buffers at `memory` and returns their bytes. */
size_t lce_lay_out(const struct lce_problem *problem, const struct lce_plan *plan, char *memory, struct lce_buffers *b);

/* Whether the plan keeps the logits of all slices, all of dx, all of dW. */
static inline bool lce_keeps_logits(const struct lce_problem *problem, const struct lce_plan *plan) {
    return plan->fast && problem->stats;
}
static inline bool lce_keeps_dx(const struct lce_problem *problem, const struct lce_plan *plan) {
    return problem->dx && problem->keeps_dx && !plan->fast && !plan->split && plan->slice < problem->classes;
}
static inline bool lce_keeps_dweight(const struct lce_problem *problem, const struct lce_plan *plan) {
    return problem->dweight && problem->keeps_dweight && plan->fast && plan->group < problem->rows;
}

#endif
