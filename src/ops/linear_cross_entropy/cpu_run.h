/* SPDX-License-Identifier: Apache-2.0 */
/* A call that is running on the CPU, and what its parts offer to one another. */
#ifndef RAFTER_LCE_CPU_RUN_H
#define RAFTER_LCE_CPU_RUN_H

#include "ops/linear_cross_entropy/call.h"
#include "ops/linear_cross_entropy/cpu_plan.h"
#include "ops/loss_group.h"

struct lce_buffers {
#define X(type, name) type *name;
    LCE_BUFFERS(X)
#undef X
};

struct lce_run {
    rafter_context *context;
    const struct linear_cross_entropy_call *call;
    const struct linear_cross_entropy_kernels *kernels;
    const struct lce_problem *problem;
    const struct lce_plan *plan;
    struct lce_buffers b;
    struct rafter_loss loss;     /* the call's, after rafter_loss_read */
    struct rafter_loss unscaled; /* the same without the factors that all rows share, for coefficients */
    float scale;                 /* those factors, applied when gradients are stored */
    int64_t rows;                /* not ignored */
    double loss_sum;             /* over the rows so far */
    rafter_view dx;              /* the caller's; or dx_sum, if classes are spread over ranks */
    rafter_dtype operands;       /* of the formats: that of x, or fp32 if there are few rows or classes */
    struct lce_few few;
    int64_t x_logits, x_dweight, w_logits, w_dx; /* the group or slice that is packed; -1: none yet */
    int64_t vectors;                             /* the slice whose bias and class weights are loaded */
};

/* ---- steps (cpu_steps.c) ---------------------------------------------------------------------- */

/* What a step does with its part of dx or dW. */
struct lce_partial_sum {
    bool wanted;
    bool accumulate; /* adds to the sums in the workspace */
    int64_t part;    /* which part of these sums */
    bool store, add; /* stores the sums into the caller's tensor, or adds them to it */
};

/* The statistics of a group of rows over a slice of classes, merged with those of the slices before. */
void lce_statistics_step(struct lce_run *run, int64_t group, int64_t slice);

/* The gradients from a group of rows and a slice of classes. Adds to dbias, if it is wanted. */
void lce_gradient_step(struct lce_run *run, int64_t group, int64_t slice, struct lce_partial_sum dx,
                       struct lce_partial_sum dweight, bool dbias);

/* Runs tasks on all threads, or on this one if the tasks together cost less than waking the
 * threads: about a microsecond per 4096 elements. */
void lce_run_tasks(const struct lce_run *run, const char *phase, int64_t tasks, double elements,
                   void (*body)(void *, int64_t), void *arg);

/* Stores n elements of the row of dx with index `row` among those that are not ignored, or of dW's row `row`, from
 * `column` on; or adds them. */
void lce_store(const struct lce_run *run, bool is_dx, bool add, int64_t row, int64_t column, int64_t n,
               const float *source);

/* ---- few rows or classes (cpu_few.c) ---------------------------------------------------------- */

/* Widens the few. */
void lce_few_begin(struct lce_run *run);

/* The products of the logits. */
void lce_few_logits(const struct lce_run *run, const struct lce_logits *logits);

/* dz, and the gradients from it: all that the call wants. */
void lce_few_gradients(const struct lce_run *run, const struct lce_gradient *gradient);

/* ---- ranks (cpu_ranks.c) ---------------------------------------------------------------------- */

/* Reads the labels and agrees with the other ranks, if there are any. */
rafter_status lce_agree(struct lce_run *run);

/* Stores the statistics of a row, which are those of a whole tile. */
void lce_put_tile(struct lce_run *run, int64_t row, int64_t tile);

/* The statistics of all rows become those over the classes of all ranks, from those of tiles. */
rafter_status lce_exchange_rows(struct lce_run *run);

/* Where steps store dx: into the caller's tensor, or into sums that are zero so far. */
void lce_place_dx(struct lce_run *run);

/* Sums dx over the ranks and stores what the caller wants of it. */
rafter_status lce_sum_dx(struct lce_run *run);

#endif
