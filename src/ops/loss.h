/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of cross_entropy and linear_cross_entropy that both share: checks of the options, the
 * labels and the per-row tensors, and the formulas that lead from the statistics of a row to its
 * outputs and gradient coefficients. Plain scalar code built with baseline flags, called once per
 * row. Loops over columns are in the ops' kernels. loss.cuh is the device side.
 *
 * Notation, as in the public header: z is a row of logits, u = scale * softcap(z), r =
 * logsumexp(u), p = e^(u - r), w the class weights (1 if not given), s the label smoothing, y the
 * label.
 *
 * The order of calls:
 *     rafter_loss_take           checks; reads no data, so that rafter_<op>_workspace() can use it too
 *     rafter_loss_want_disjoint  for each tensor that only the op has
 *     rafter_loss_read           reads labels, denominator and class weights; the last call that can fail,
 *                                before anything is written
 *     per row                    rafter_loss_label; the op computes the row's statistics;
 *                                rafter_loss_write_row and rafter_loss_gradient
 *     rafter_loss_write          once, with the sum of the row losses
 * Calls with groups of ranks take some more steps, which are in loss_group.h.
 */
#ifndef RAFTER_OPS_LOSS_H
#define RAFTER_OPS_LOSS_H

#include "core/group.h"
#include "core/tensor.h"

/* ---- checks ---------------------------------------------------------------------------------- */

/* The arguments that both ops have, as the caller gave them. All but target may be NULL. */
struct rafter_loss_args {
    const rafter_loss_options *options;
    const DLTensor *target, *loss, *row_loss, *lse, *logprob, *entropy, *argmax, *dloss, *dentropy;
};

/* The checked arguments. If a view's data is NULL, it was not given or has no elements. Views with
 * the shape of the labels are collapsed, each by itself: element `row` is at
 * rafter_offset(view, 0, view->ndim, row). */
struct rafter_loss {
    int64_t rows;
    int64_t classes; /* of this rank: the columns of its logits */
    /* The number of classes over all ranks, V, and the index of this rank's first one. Labels are in
     * [0, all_classes), and class_weight has all_classes elements. Without class_group: `classes` and 0. */
    int64_t all_classes, first_class;
    rafter_communicator class_group, row_group; /* see rafter_group_has */
    rafter_reduction reduction;
    rafter_direction direction;
    bool zero_if_all_ignored;
    int64_t ignore_index;
    float smoothing, z_loss;
    float softcap; /* 0: none */
    float scale;   /* never 0 */

    rafter_view target, row_weight; /* the shape of the labels */
    rafter_view class_weight;       /* [all_classes], any stride */
    rafter_view denominator;        /* one element */
    rafter_view dloss;              /* one element; with reduction none, the shape of the labels */
    rafter_view dentropy;           /* the shape of the labels; only linear_cross_entropy has it */
    rafter_view lse;                /* the shape of the labels; forward writes it, backward reads it */
    rafter_view entropy;            /* the same; backward has it only with dentropy */

    /* Outputs of forward; not given in backward. */
    rafter_view loss;                      /* the shape of dloss */
    rafter_view row_loss, logprob, argmax; /* the shape of the labels */

    /* Set by rafter_loss_read. */
    int64_t counted;         /* rows that are not ignored; with row_group, later those of all its ranks */
    double label_weight;     /* the sum of w_y over these rows */
    double mean_denominator; /* 1 unless the reduction is mean */
    double class_weight_sum; /* over all_classes; without weights, or if nothing needs it, all_classes */
};

/* Whether the caller gave the tensor and it has elements. */
static inline bool rafter_loss_has(const rafter_view *view) {
    return view->data != NULL;
}

/* Registers the groups of a call, before anything else is checked: see core/group.h. */
rafter_status rafter_loss_begin(rafter_context *context, const rafter_loss_options *options);

/* Checks options, shapes, dtypes and overlaps among these tensors. `shape`: the leading dimensions
 * of logits or x, which error messages call `rows_name`. classes: of this rank. */
rafter_status rafter_loss_take(rafter_context *context, const struct rafter_loss_args *args, rafter_direction direction,
                               const char *rows_name, int ndim, const int64_t *shape, int64_t classes,
                               struct rafter_loss *loss);

/* Checks a tensor that only the op has: an output against all tensors of the loss, an input against
 * the outputs of the loss. */
rafter_status rafter_loss_want_disjoint(rafter_context *context, const struct rafter_loss *loss, const char *name,
                                        const rafter_view *view, bool output);

/* Checks every label (RAFTER_LABEL_OUT_OF_RANGE) and computes the sums that rows depend on. */
rafter_status rafter_loss_read(rafter_context *context, struct rafter_loss *loss);

/* The mean's denominator, from label_weight or from the caller. */
double rafter_loss_denominator(const struct rafter_loss *loss);

/* The row's label in [0, all_classes), or -1 if the row is ignored. */
int64_t rafter_loss_label(const struct rafter_loss *loss, int64_t row);

/* Whether statistics of rows must be computed. Not in a backward that was given all it needs. */
bool rafter_loss_needs_statistics(const struct rafter_loss *loss);

/* The lse that the caller passed to backward. */
float rafter_loss_given_lse(const struct rafter_loss *loss, int64_t row);

/* The weight of one class; 1 without class weights. */
float rafter_loss_class_weight(const struct rafter_loss *loss, int64_t label);

/* ---- many rows at once ----------------------------------------------------------------------- */

/* Reads the labels of rows [first, first + n), as rafter_loss_label does. There must be at most
 * INT32_MAX classes. */
void rafter_loss_labels(const struct rafter_loss *loss, int64_t first, int64_t n, int32_t *labels);

/* Reads rows [first, first + n) of an fp32 view that has the shape of the labels or one element. A
 * view that was not given counts as 1 everywhere. */
void rafter_loss_load_rows(const rafter_view *view, int64_t first, int64_t n, float *values);

/* Writes rows [first, first + n) of an optional fp32 output. */
void rafter_loss_store_rows(const rafter_view *view, int64_t first, int64_t n, const float *values);

/* The same for argmax. */
void rafter_loss_store_argmax(const struct rafter_loss *loss, int64_t first, int64_t n, const int32_t *index);

/* ---- rows ------------------------------------------------------------------------------------ */

/* Statistics of a row, or of some of its columns. A NaN or +inf among u makes the sum NaN. */
struct rafter_row_stats {
    double max;       /* of u, NaN skipped; -INFINITY for no columns */
    double sum;       /* of e^(u - max) if max is finite; 0 for no columns or all -inf */
    double moment;    /* the sum of (u - max) e^(u - max), 0 for u = -inf; only for the entropy */
    double logit_sum; /* the sum of w u; only with label smoothing */
    double target;    /* u_y if column y is one of the columns, else 0 */
    double best;      /* the largest logit, NaN if one is NaN; only for argmax */
    int64_t argmax;   /* its first index */
};

/* The statistics of no columns. */
extern const struct rafter_row_stats rafter_row_empty;

/* The statistics of the columns of `a` followed by the columns of `b`. */
struct rafter_row_stats rafter_row_merge(const struct rafter_row_stats *a, const struct rafter_row_stats *b);

/* r = logsumexp(u). */
double rafter_row_lse(const struct rafter_row_stats *stats);

/* Writes the row's outputs, as far as the caller gave them (row_loss, lse, logprob, entropy,
 * argmax, and loss if the reduction is none), and returns row_loss. label -1: the row is ignored;
 * stats is not read. */
double rafter_loss_write_row(const struct rafter_loss *loss, int64_t row, int64_t label,
                             const struct rafter_row_stats *stats);

/* Writes loss from the sum of all row losses, unless the reduction is none. */
void rafter_loss_write(const struct rafter_loss *loss, double sum);

/* The gradient of loss with respect to a row's logits, times the upstream gradient:
 *     dz_v = softcap'(z_v) * ( p * e^t * (level + tilt * t) - target * [v == y] - spread * w_v )
 *     t = u_v - pivot,   softcap'(z) = 1 - tanh^2(z / cap)
 * level is 1 and tilt is 0 without dentropy. With it, p e^t is the softmax itself, and the rest
 * follows from d entropy / du_v = -p_v (log p_v + entropy).
 * The coefficients include the factors that are constant along the row: dloss, row weight,
 * denominator, scale. If `zero` is set, dz is 0 (an ignored row, or a row of all -inf), and the other
 * members must not be used. */
struct rafter_row_gradient {
    bool zero;
    float pivot; /* the largest u, or r */
    double p;
    double target;
    double spread; /* 0 without label smoothing */
    double level, tilt;
};

/* The coefficients from the row's statistics. label -1 gives `zero`. */
struct rafter_row_gradient rafter_loss_gradient(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                const struct rafter_row_stats *stats);

/* The coefficients from r alone and, with dentropy, the given entropy. r was rounded to a float, so p
 * has a relative error of |r| * 2^-24 or more: callers decide whether that is acceptable. */
struct rafter_row_gradient rafter_loss_gradient_from_lse(const struct rafter_loss *loss, int64_t row, int64_t label,
                                                         float lse);

#endif
