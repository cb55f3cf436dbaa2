/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the harness only. */
#ifndef RAFTER_HARNESS_INTERNAL_H
#define RAFTER_HARNESS_INTERNAL_H

#include "harness/problem.h"

/* numbers.c: the distance between neighbouring values of the dtype at x; x rounded to the dtype, to
 * nearest even, in one step; the DLPack dtype. */
double problem_unit(rafter_dtype dtype, double x);
double problem_round(rafter_dtype dtype, double x);
DLDataType problem_dl_dtype(rafter_dtype dtype);

/* tensors.c: where element `index` (row-major) is; all values as fp64, or NULL: no memory. */
char *problem_address(const problem_tensor *t, int64_t index);
double *problem_values_of(const problem_tensor *t);

/* Padding of inputs is filled with these bytes, NaN in every dtype, so that a kernel that reads it gives
 * wrong results. */
enum { PROBLEM_PADDING = 0xff, PROBLEM_PAD_ELEMENTS = 3 };

/* Whether the layout changes anything for this tensor. */
bool problem_lays_out(const problem_tensor *t, enum problem_layout layout);

/* Elements from an aligned address to a tensor's first element. */
int64_t problem_offset(const problem *p, const problem_tensor *t);

/* The problem's layout, or if that is compact, the tensor's own. */
static inline enum problem_layout problem_layout_of(const problem *p, const problem_tensor *t) {
    return p->layout == PROBLEM_COMPACT ? t->layout : p->layout;
}

static inline bool problem_is_result(const problem_tensor *t) {
    return t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT;
}

/* answers.c */
void problem_forget_answers(problem_tensor *t);

#endif
