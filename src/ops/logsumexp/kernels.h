/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of logsumexp, one table per variant. */
#ifndef RAFTER_LOGSUMEXP_KERNELS_H
#define RAFTER_LOGSUMEXP_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

/* A line is the elements that one lse reduces. Rows form: the elements of a line are meant to be
 * adjacent in memory; if they are not, they are gathered. Columns form: neighbouring lines are
 * adjacent, and vectors run across them. */
enum logsumexp_form { LOGSUMEXP_ROWS, LOGSUMEXP_COLUMNS, LOGSUMEXP_FORMS };

enum { LOGSUMEXP_MOST_LINES = 2048 }; /* in a block */

/* Some neighbouring lines, or the same part of each. Strides are in elements: `_line` from line to
 * line, `_step` along a line. */
struct logsumexp_block {
    rafter_dtype dtype; /* of x and dx */
    int64_t lines, length;
    const char *x;
    int64_t x_line, x_step;

    const char *lse;
    int64_t lse_line;
    rafter_dtype lse_dtype;

    char *rounded; /* forward only: lse in x's dtype, with the same strides; or NULL */

    /* Backward only. */
    char *dx; /* may be x */
    int64_t dx_line, dx_step;
    bool stream;
    rafter_dtype dlse_dtype;
    const char *dlse;
    int64_t dlse_line;
};

struct logsumexp_kernels {
    /* Computes a pivot of every line, in statistics[0 .. lines), and the sum of e^(x - pivot), in the
     * next `lines` numbers. The pivot is the maximum or a little less; if the maximum is infinite, it
     * is the maximum. A line that holds +inf has the sum 1; a line that holds NaN has the sum NaN,
     * whatever the pivot. */
    void (*statistics[LOGSUMEXP_FORMS])(const struct logsumexp_block *block, float *statistics);
    /* Writes the lse of lines whose statistics were computed in `parts` parts, which follow one another. */
    void (*finish)(const float *statistics, int64_t parts, int64_t lines, rafter_dtype dtype, char *lse,
                   int64_t lse_line);
    void (*gradient[LOGSUMEXP_FORMS])(const struct logsumexp_block *block);
};

#endif
