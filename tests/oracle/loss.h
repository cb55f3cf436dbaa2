/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fp64 oracle of the two losses, from a row of logits on: what the public header says, term by term, in simple
 * loops.
 *
 * Options are read from p->loss_options, tensors by their names: target, class_weight, row_weight, denominator, dloss,
 * and the outputs loss, row_loss, lse, logprob, entropy, argmax; all but target may be missing.
 */
#ifndef RAFTER_ORACLE_LOSS_H
#define RAFTER_ORACLE_LOSS_H

#include "harness/problem.h"

struct oracle_loss {
    const problem *p;
    int64_t rows, classes, ignore_index, counted;
    double smoothing, z_loss, softcap, scale, denominator;
    const problem_tensor *target, *class_weight, *row_weight, *dloss;
};

struct oracle_loss oracle_loss_begin(const problem *p, int64_t rows, int64_t classes);

bool oracle_loss_ignored(const struct oracle_loss *o, int64_t row);

/* Expects the row's outputs and returns its row_loss. z is not read if the row is ignored. */
double oracle_loss_row(const struct oracle_loss *o, int64_t row, const double *z);

/* Expects loss, from the row losses of all rows. */
void oracle_loss_end(const struct oracle_loss *o, const double *row_loss);

/* dz[classes]: the gradient of loss, times dloss, with respect to the row's logits. */
void oracle_loss_gradient(const struct oracle_loss *o, int64_t row, const double *z, double *dz);

#endif
