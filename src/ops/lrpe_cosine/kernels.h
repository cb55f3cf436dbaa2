/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU kernels of lrpe_cosine. Each works on a box of one call: a range of batches, tokens,
 * heads and features. */
#ifndef RAFTER_LRPE_COSINE_KERNELS_H
#define RAFTER_LRPE_COSINE_KERNELS_H

#include "ops/lrpe_cosine/call.h"

/* f, the activation of x before it is rotated: the forms that have code of their own. */
enum lrpe_f {
    LRPE_NONE,
    LRPE_RELU,
    LRPE_SIGMOID,
    LRPE_SILU,
    LRPE_FEATURE,      /* softmax over at most LRPE_COLUMNS features, a row at a time */
    LRPE_FEATURE_WIDE, /* softmax over more features, from statistics of rows */
    LRPE_SEQUENCE,     /* softmax over the sequence, from statistics of columns */
    LRPE_FS
};

enum {
    LRPE_COLUMNS = 2048, /* most features that a kernel works on at a time */
    LRPE_ALIGN = 32      /* features: boxes start at multiples of this, and column arrays are padded to it */
};

/* Entries per head in an array that has one number per feature of every head ("column"). */
static inline int64_t lrpe_padded(int64_t features) {
    return (features + LRPE_ALIGN - 1) / LRPE_ALIGN * LRPE_ALIGN;
}

/* Whether the heads of a tensor are contiguous instead of its features. */
static inline bool lrpe_view_lies_across(const rafter_view *view) {
    return view->data && view->stride[2] == 1 && view->stride[3] != 1;
}

static inline bool lrpe_lies_across(const struct lrpe_cosine_call *call) {
    return lrpe_view_lies_across(&call->x) || lrpe_view_lies_across(&call->dy) || lrpe_view_lies_across(&call->y) ||
           lrpe_view_lies_across(&call->dx);
}

/* Half-open ranges of batches, tokens, heads and features. For the softmax over features and for row
 * statistics, a box has all features. */
struct lrpe_box {
    int64_t b, b_end, n, n_end, h, h_end, d, d_end;
};

/*
 * Softmax statistics of columns [B, H, padded D] or of rows [B, N, H], where
 * g = dy_1 cos + dy_2 sin:
 *
 *              of a part                     complete
 *     pivot    max                           to be subtracted from x: max, or 0 if all are -inf
 *     scale    sum of e^(x - max)            1 / sum
 *     dot      sum of e^(x - max) * g        sum of softmax * g; in backward only
 *
 * Features of a column array are in the order in which the kernels hold them.
 */
struct lrpe_statistics {
    float *pivot, *scale, *dot;
};

struct lrpe_cosine_kernels {
    /* y from x. */
    void (*forward)(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                    const struct lrpe_statistics *statistics, bool stream);
    /* Writes dx from x and dy, if dx has data; and the box's part of dtheta [H, padded D], if dtheta is
     * not NULL, with features in the order of the kernels. */
    void (*backward)(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                     const struct lrpe_statistics *statistics, double *dtheta, bool stream);
    /* Statistics of the box's columns over the box's tokens. */
    void (*columns)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                    const struct lrpe_statistics *statistics);
    /* Merges `parts` statistics, `step` floats apart, of the box's batches and columns. The first
     * part becomes the complete statistics. */
    void (*merge)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                  const struct lrpe_statistics *statistics, int64_t parts, int64_t step);
    /* Complete statistics of the box's rows. */
    void (*rows)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                 const struct lrpe_statistics *statistics);
    /* Sums `parts` of dtheta and stores the elements [from, to), in row-major order, of
     * call->dtheta. */
    void (*dtheta)(const struct lrpe_cosine_call *call, const double *sums, int64_t parts, int64_t from, int64_t to);
};

#endif
