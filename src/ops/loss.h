/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What cross_entropy and linear_cross_entropy share: checks of the options, the labels and the per-row tensors, and the
 * mathematics between the statistics of a row and its results. Plain scalar code built with baseline flags, called once
 * per row; what touches every column is the ops' own.
 *
 * Notation, as in the public header: z are a row's logits, u = scale * softcap(z), r = logsumexp(u), p = e^(u - r), w
 * the class weights (1 when not given), s the label smoothing, y the label.
 *
 * A call goes:
 *     rafter_loss_take           checks; reads no data, so that rafter_<op>_workspace() can use it too
 *     rafter_loss_want_disjoint  for each tensor of the op's own
 *     rafter_loss_read           labels, denominator, sum of class weights; the last that can fail, and nothing is
 * written yet then for every row         rafter_loss_label; statistics (merged over columns as the op likes);
 *                                rafter_loss_write_row and rafter_loss_gradient
 *     rafter_loss_write          once, with the sum of the rows' losses
 */
#ifndef RAFTER_OPS_LOSS_H
#define RAFTER_OPS_LOSS_H

#include "core/tensor.h"

/* ---- checks ---------------------------------------------------------------------------------- */

/* The arguments that both ops' structs carry, as the caller gave them. All but target may be NULL. */
struct rafter_loss_args {
    const rafter_loss_options *options;
    const DLTensor *target, *loss, *row_loss, *lse, *logprob, *entropy, *argmax, *dloss;
};

/* Checked. A view whose data is NULL was not given, or has no elements: there is nothing to read or write. Views shaped
 * as the labels are collapsed, each by itself: element `row` is at rafter_offset(view, 0, view->ndim, row). */
struct rafter_loss {
    int64_t rows, classes;
    rafter_reduction reduction;
    rafter_direction direction;
    bool zero_if_all_ignored;
    int64_t ignore_index;
    float smoothing, z_loss;
    float softcap; /* 0: none */
    float scale;   /* never 0 */

    rafter_view target, row_weight; /* shaped as the labels */
    rafter_view class_weight;       /* [classes], any stride */
    rafter_view denominator;        /* one element */
    rafter_view dloss;              /* one element, or (reduction none) shaped as the labels */
    rafter_view lse;                /* shaped as the labels; forward writes it, backward reads it */

    /* Outputs, forward only: in backward they are not looked at. */
    rafter_view loss;                               /* as dloss */
    rafter_view row_loss, logprob, entropy, argmax; /* shaped as the labels */

    /* Set by rafter_loss_read. */
    int64_t counted;         /* rows that are not ignored */
    double mean_denominator; /* 1 unless the reduction is mean */
    double class_weight_sum; /* over all classes; their number when there are no weights */
};

/* Whether the caller gave it and it has elements. */
static inline bool rafter_loss_has(const rafter_view *view) {
    return view->data != NULL;
}

/* Checks options, shapes, dtypes and overlaps among these tensors. `shape` is that of the rows: the leading dimensions
 * of logits or x, which is called `rows_name` in sentences. */
rafter_status rafter_loss_take(rafter_context *context, const struct rafter_loss_args *args, rafter_direction direction,
                               const char *rows_name, int ndim, const int64_t *shape, int64_t classes,
                               struct rafter_loss *loss);

/* Checks a tensor of the op's own: as an output against all tensors of the loss, as an input against the loss's
 * outputs. */
rafter_status rafter_loss_want_disjoint(rafter_context *context, const struct rafter_loss *loss, const char *name,
                                        const rafter_view *view, bool output);

/* Reads what is needed before the first row: validates every label (RAFTER_LABEL_OUT_OF_RANGE), counts. */
rafter_status rafter_loss_read(rafter_context *context, struct rafter_loss *loss);

/* The row's class in [0, classes), or -1 if the row is ignored. */
int64_t rafter_loss_label(const struct rafter_loss *loss, int64_t row);

/* lse as the caller passed it to backward. */
float rafter_loss_given_lse(const struct rafter_loss *loss, int64_t row);

/* The weight of one class; 1 when there are none. */
float rafter_loss_class_weight(const struct rafter_loss *loss, int64_t label);

/* ---- rows ------------------------------------------------------------------------------------ */

/* Statistics of a row, or of some of its columns. A NaN or +inf among u makes the sum NaN. */
struct rafter_row_stats {
    double max;      /* of u, NaN skipped; -INFINITY of no columns */
    double sum;      /* of e^(u - max), where max is finite; 0 of no columns or of all -inf */
    double moment;   /* of (u - max) e^(u - max), 0 where u is -inf; only for the entropy */
    double weighted; /* of w u; only where smoothing is not 0 */
    double target;   /* u_y in the part that holds column y, 0 elsewhere */
    double best;     /* the largest logit, NaN if one is NaN, and its first index: only for argmax */
    int64_t argmax;
};

/* Of no columns. */
extern const struct rafter_row_stats rafter_row_empty;

/* Of the columns of `a` followed by those of `b`. */
struct rafter_row_stats rafter_row_merge(const struct rafter_row_stats *a, const struct rafter_row_stats *b);

/* r. */
double rafter_row_lse(const struct rafter_row_stats *stats);

/* Writes the row's outputs (row_loss, lse, logprob, entropy, argmax, and loss where the reduction is none; those given)
 * and returns row_loss. label -1: those of an ignored row; stats is not read. */
double rafter_loss_write_row(const struct rafter_loss *loss, int64_t row, int64_t label,
                             const struct rafter_row_stats *stats);

/* Writes loss from the sum of all row losses, unless the reduction is none. */
void rafter_loss_write(const struct rafter_loss *loss, double sum);

/* The gradient of loss with respect to a row's logits, times the upstream gradient:
 *     dz_v = softcap'(z_v) * ( p * e^(u_v - pivot) - target * [v == y] - spread * w_v ),   softcap' = 1 - tanh^2(z /
 * cap) with everything that is constant along the row inside p, target and spread: dloss, row weight, denominator,
 * scale. `zero`: all of it is 0 (an ignored row, or one of all -inf), and the others must not be used. */
struct rafter_row_gradient {
    bool zero;
    float pivot; /* the largest u, or r */
    double p;
    double target;
    double spread; /* 0 without label smoothing */
};

/* From the row's statistics. label -1: zero. */
struct rafter_row_gradient rafter_loss_gradient(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                const struct rafter_row_stats *stats);

/* The same from r alone. r has the error of a float, so p has a relative one of |r| * 2^-24 or more: see its callers.
 */
struct rafter_row_gradient rafter_loss_gradient_from_lse(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                         float lse);

#endif
