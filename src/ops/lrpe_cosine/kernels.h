/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU kernels of lrpe_cosine. Each works on a box of one call: some batches, tokens, heads and features. */
#ifndef RAFTER_LRPE_COSINE_KERNELS_H
#define RAFTER_LRPE_COSINE_KERNELS_H

#include "ops/lrpe_cosine/call.h"

/* f, as the kernels tell it apart. */
enum lrpe_f {
    LRPE_NONE,
    LRPE_RELU,
    LRPE_SIGMOID,
    LRPE_SILU,
    LRPE_FEATURE,      /* softmax over the features of a head, at most LRPE_COLUMNS of them: a row at a time */
    LRPE_FEATURE_WIDE, /* the same over more of them: from statistics of rows */
    LRPE_SEQUENCE,     /* softmax over the sequence: from statistics of columns */
    LRPE_FS
};

enum {
    LRPE_COLUMNS = 2048, /* features that are worked on at a time, at most */
    LRPE_ALIGN = 32      /* boxes start at multiples of this many features, and arrays of columns are padded to it */
};

/* Features of a head in arrays of columns. */
static inline int64_t lrpe_padded(int64_t features) {
    return (features + LRPE_ALIGN - 1) / LRPE_ALIGN * LRPE_ALIGN;
}

/* Half-open ranges. A box of the softmax over features, and of row statistics, has all the features. */
struct lrpe_box {
    int64_t b, b_end, n, n_end, h, h_end, d, d_end;
};

/* Softmax statistics, of columns [B, H, padded D] or of rows [B, N, H]. First max, sum of e^(x - max) and, in backward,
 * sum of e^(x - max) * g, where g = dy_1 cos + dy_2 sin; once they are complete, what to subtract from x (max, but 0
 * where all is -inf), 1 / sum, and sum of softmax * g. Features of a column array are in the order of the kernels. */
struct lrpe_statistics {
    float *pivot, *scale, *dot;
};

struct lrpe_kernels {
    /* y from x. */
    void (*forward)(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                    const struct lrpe_statistics *statistics, bool stream);
    /* dx from x and dy, if dx has data; and the box's part of dtheta [H, padded D] (features in the order of the
     * kernels), if that is not NULL. */
    void (*backward)(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                     const struct lrpe_statistics *statistics, double *dtheta, bool stream);
    /* Statistics of the box's columns over its tokens. */
    void (*columns)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                    const struct lrpe_statistics *statistics);
    /* Merges `parts` statistics, `step` floats apart, and completes them in the first; for the box's batches and
     * columns. */
    void (*merge)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                  const struct lrpe_statistics *statistics, int64_t parts, int64_t step);
    /* Complete statistics of the box's rows. */
    void (*rows)(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                 const struct lrpe_statistics *statistics);
    /* Sums `parts` of dtheta into the elements [from, to), row-major, of the call's. */
    void (*dtheta)(const struct lrpe_cosine_call *call, const double *sums, int64_t parts, int64_t from, int64_t to);
};

#endif
