/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fp64 oracle of the two losses, given a row of logits: the formulas of the public header, term
 * by term, in simple loops.
 *
 * Options are read from p->options.loss, tensors by name: target, class_weight, row_weight,
 * denominator, dloss, dentropy, and the outputs loss, row_loss, lse, logprob, entropy, argmax. All
 * but target may be missing.
 */
#ifndef RAFTER_OPS_LOSS_ORACLE_H
#define RAFTER_OPS_LOSS_ORACLE_H

#include "harness/problem.h"

struct oracle_loss {
    const problem *p;
    int64_t rows, classes, ignore_index, counted;
    double smoothing, z_loss, softcap, scale, denominator;
    const problem_tensor *target, *class_weight, *row_weight, *dloss, *dentropy;
};

struct oracle_loss oracle_loss_begin(const problem *p, int64_t rows, int64_t classes);

bool oracle_loss_ignored(const struct oracle_loss *o, int64_t row);

/* Stores the row's expected outputs and returns its row_loss. z is not read if the row is
 * ignored. */
double oracle_loss_row(const struct oracle_loss *o, int64_t row, const double *z);

/* Stores the expected loss, from the row losses of all rows. */
void oracle_loss_end(const struct oracle_loss *o, const double *row_loss);

/* dz[classes]: the gradient of loss times dloss, plus that of entropy times dentropy, with respect to
 * the row's logits. */
void oracle_loss_gradient(const struct oracle_loss *o, int64_t row, const double *z, double *dz);

#endif
