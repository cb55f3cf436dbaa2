/* SPDX-License-Identifier: Apache-2.0 */
/* The interface between scale's cpu_run.c and its CPU kernels. */
#ifndef RAFTER_SCALE_KERNELS_H
#define RAFTER_SCALE_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "rafter/rafter.h"

/* Part of a row. y may be x, with the same step. */
struct scale_part {
    rafter_dtype dtype;
    bool stream; /* write past the caches. y is aligned to its elements; the caller ends with v_fence() */
    const char *x;
    char *y;
    int64_t x_step, y_step; /* in elements */
    int64_t n;
    float factor;
};

struct scale_kernels {
    /* y[i * y_step] = factor * x[i * x_step] for i in [0, n). */
    void (*multiply)(const struct scale_part *part);
};

#endif
