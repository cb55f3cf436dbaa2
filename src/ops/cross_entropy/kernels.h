/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU kernels of cross_entropy, one table per variant. All work on some columns of one row. */
#ifndef RAFTER_CROSS_ENTROPY_KERNELS_H
#define RAFTER_CROSS_ENTROPY_KERNELS_H

#include "ops/cross_entropy/call.h"

/* The most columns per kernel call if the kernel copies them to buffers on its stack. Rows that
 * need no buffers have no limit. */
enum { CROSS_ENTROPY_PIECE = 2048 };

struct cross_entropy_row {
    rafter_dtype dtype;
    const char *z; /* logits */
    char *dz;      /* gradient; may be z */
    int64_t z_stride, dz_stride;
    int64_t label;
    float softcap, scale; /* softcap 0: none */
    const char *weight;   /* fp32 class weights, or NULL */
    int64_t weight_stride;
    bool weighted, moment, argmax; /* statistics to compute besides max, sum and target */
    bool stream;                   /* write dz with non-temporal stores */
};

/* Whether the kernels copy columns to buffers: for the statistics, and for the gradient. */
static inline bool cross_entropy_stats_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || (row->weight && row->weight_stride != 1);
}

static inline bool cross_entropy_gradient_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->dz_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || row->weight;
}

struct cross_entropy_kernels {
    /* Computes the statistics of columns [first, first + n), n at least 1. */
    void (*stats)(const struct cross_entropy_row *row, int64_t first, int64_t n, struct rafter_row_stats *stats);

    /* Writes dz of columns [first, first + n). */
    void (*gradient)(const struct cross_entropy_row *row, int64_t first, int64_t n,
                     const struct rafter_row_gradient *gradient);

    /* Called at the end of every task that wrote dz with `stream` set. */
    void (*fence)(void);
};

#endif
