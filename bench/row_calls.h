/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on rows of tensors in GPU memory, for programs that time the library's variants and options. */
#ifndef RAFTER_BENCH_ROW_CALLS_H
#define RAFTER_BENCH_ROW_CALLS_H

#include <stdbool.h>

#include "measure.h"
#include "rafter/rafter.h"

/* The tensors of a call: x, y and dy [rows, length], and what there is one of per row; or for linear_cross_entropy x
 * [rows, depth] and weight [length, depth]. */
struct row_tensors {
    DLTensor x, y, dy, weight, dweight, target, numbers, loss;
    int64_t shape[8][2], strides[2];
};

struct row_shape {
    rafter_dtype dtype;
    int64_t rows, length;
    int64_t depth;         /* 0: not linear_cross_entropy */
    int64_t padding;       /* elements between the rows of x */
    bool are_side_by_side; /* the elements of a row are `rows` apart */
};

/* Allocates the tensors. Their memory is set to bytes that are small numbers in every dtype, and valid labels. Prints a
 * message and exits if there is too little memory. */
void row_tensors_open(struct row_tensors *t, const rafter_context *context, const struct row_shape *shape);
void row_tensors_close(struct row_tensors *t, const rafter_context *context);

struct row_call {
    const char *name, *op;
    rafter_status (*make)(rafter_context *context, const struct row_tensors *t);
};

/* cross_entropy forward, loss and gradient at once, and backward; logsumexp; softmax forward and backward. */
enum { ROW_CALLS = 6, LINEAR_CALLS = 2 };
extern const struct row_call row_calls[ROW_CALLS], smoothed_cross_entropy, logsumexp_backward;
/* linear_cross_entropy: the loss; loss and gradients. */
extern const struct row_call linear_calls[LINEAR_CALLS];

/* Device seconds of a call, with cold caches; negative if the call failed. */
double row_call_seconds(const struct pace *pace, rafter_context *context, const struct row_call *call,
                        const struct row_tensors *t);

#endif
