/* SPDX-License-Identifier: Apache-2.0 */
/* What a variant of cross_entropy's CPU kernels provides. */
#ifndef RAFTER_CROSS_ENTROPY_KERNELS_H
#define RAFTER_CROSS_ENTROPY_KERNELS_H

#include "ops/cross_entropy/call.h"

/* ---- CPU kernels: all work on some columns of one row ---------------------------------------- */

/* A piece is what a kernel holds in buffers on its stack. Kernels take any number of columns of rows that need no
 * buffer. */
enum { CROSS_ENTROPY_PIECE = 2048 };

struct cross_entropy_row {
    rafter_dtype dtype;
    const char *z; /* logits */
    char *dz;      /* their gradient; may be z */
    int64_t z_stride, dz_stride;
    int64_t label;
    float softcap, scale; /* softcap 0: none */
    const char *weight;   /* fp32 class weights, or NULL */
    int64_t weight_stride;
    bool weighted, moment, argmax; /* statistics wanted beyond max, sum and target */
    bool stream;                   /* write dz past the caches */
};

/* Whether columns must go through buffers, in the statistics and in the gradient. */
static inline bool cross_entropy_stats_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || (row->weight && row->weight_stride != 1);
}

static inline bool cross_entropy_gradient_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->dz_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || row->weight;
}

struct cross_entropy_kernels {
    /* Statistics of columns [first, first + n), n at least 1. */
    void (*stats)(const struct cross_entropy_row *row, int64_t first, int64_t n, struct rafter_row_stats *stats);

    /* dz of columns [first, first + n). */
    void (*gradient)(const struct cross_entropy_row *row, int64_t first, int64_t n,
                     const struct rafter_row_gradient *gradient);

    /* To be called by every task that wrote dz with `stream` set, when it is done. */
    void (*fence)(void);
};

#endif
