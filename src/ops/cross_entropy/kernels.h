/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU kernels of cross_entropy, one table per variant. A kernel works on some columns of one row,
 * or on a tile: many rows at once, one lane per row. */
#ifndef RAFTER_CROSS_ENTROPY_KERNELS_H
#define RAFTER_CROSS_ENTROPY_KERNELS_H

#include "core/pages.h"
#include "ops/cross_entropy/call.h"

/* The most columns per kernel call if the kernel copies them to buffers. Rows that need no buffers
 * have no limit. */
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
    bool logit_sum, moment, argmax; /* statistics to compute besides max, sum and target */
    bool stream;                    /* write dz with non-temporal stores */
};

/* Whether the kernels copy columns to buffers: for the statistics, and for the gradient. */
static inline bool cross_entropy_stats_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || (row->weight && row->weight_stride != 1);
}

static inline bool cross_entropy_gradient_buffered(const struct cross_entropy_row *row) {
    return row->z_stride != 1 || row->dz_stride != 1 || row->softcap != 0.0f || row->scale != 1.0f || row->weight;
}

/* Of gradients. The label's element differs from the others, so a streamed row is three pieces: rows of whole cache lines
 * that are shorter than this take up to 2.5 times as long streamed as not. */
static const struct shortest_streamed cross_entropy_shortest_streamed = {.of_whole_lines = 4 << 10,
                                                                         .of_others = 6 << 10};

/* A block of adjacent rows (see cpu_run.c): the most rows, and the most elements that are transposed into a buffer at a
 * time. */
enum { CROSS_ENTROPY_BLOCK_ROWS = 16, CROSS_ENTROPY_BLOCK = 7168 };

enum {
    CROSS_ENTROPY_TILE = 256,      /* the most rows of a tile */
    CROSS_ENTROPY_TURNED = 1 << 12 /* the most elements of a tile that is copied to a buffer */
};

/* The most elements of a tile that is copied: with a softcap, the buffer also holds the slopes for the gradient. */
static inline int64_t cross_entropy_turned(bool gradient, float softcap) {
    return gradient && softcap != 0.0f ? CROSS_ENTROPY_TURNED / 2 : CROSS_ENTROPY_TURNED;
}

/* What is the same for all tiles of a call. Strides are in elements. A run is a range of rows that are a constant
 * stride apart. */
struct cross_entropy_tiling {
    rafter_dtype dtype;
    bool forward, gradient, stream;
    bool direct; /* no buffer: neighbouring rows are adjacent in memory, and every tile lies in one run */
    int64_t classes;
    int64_t run; /* rows of a run */
    int64_t z_row, z_class, dz_row, dz_class;
    /* Runs are short, and the elements of each are adjacent: a run is transposed as if it were one long row. The rows
     * of a tile are then in this order: the first rows of all its runs, their second rows, and so on. */
    bool interleaved;
    int64_t z_run, dz_run; /* if interleaved: elements from a run to the next */
    float smoothing, z_loss, scale;
    float softcap; /* 0: none. A direct tile has neither this nor the next two */
    bool entropy, argmax;
    double class_weight_sum, denominator;
    const float *weight; /* contiguous class weights, if there are any and label smoothing needs them all */
    float lse_bound;     /* backward uses a given lse up to this size, and statistics otherwise */
};

/* The rows of a tile: whole runs, or a part of one. */
struct cross_entropy_tile {
    int64_t rows;
    int64_t runs; /* if interleaved: those that exist. `rows` also has the rows of empty runs, which fill vectors */
    const char *z[CROSS_ENTROPY_TILE]; /* of each run */
    char *dz[CROSS_ENTROPY_TILE];

    /* One number per row. The caller sets the labels (-1: ignored), the weights, dloss and, in backward, lse if it is
     * given. Forward sets lse, row_loss and logprob, and entropy and argmax if they are wanted. */
    int32_t label[CROSS_ENTROPY_TILE];
    float label_weight[CROSS_ENTROPY_TILE], row_weight[CROSS_ENTROPY_TILE], dloss[CROSS_ENTROPY_TILE];
    float lse[CROSS_ENTROPY_TILE], row_loss[CROSS_ENTROPY_TILE], logprob[CROSS_ENTROPY_TILE];
    float entropy[CROSS_ENTROPY_TILE];
    int32_t argmax[CROSS_ENTROPY_TILE];
    bool given_lse;
};

struct cross_entropy_kernels {
    /* Computes the statistics of columns [first, first + n), n at least 1. */
    void (*stats)(const struct cross_entropy_row *row, int64_t first, int64_t n, struct rafter_row_stats *stats);

    /* Writes dz of columns [first, first + n). */
    void (*gradient)(const struct cross_entropy_row *row, int64_t first, int64_t n,
                     const struct rafter_row_gradient *gradient);

    /* Everything for one tile: statistics, outputs, gradient. Returns the sum of the row losses. */
    double (*tile)(const struct cross_entropy_tiling *tiling, struct cross_entropy_tile *tile);

    /* For blocks of adjacent rows. load_block copies n classes of `rows` rows to fp32; there classes
     * are adjacent and rows `pitch` apart. It writes whole vectors, so pitch is at least n rounded up
     * to 16. fetch_block prefetches the same elements into L2. store_block copies back, to a result in
     * which either classes or rows are adjacent. Strides are in elements. */
    void (*load_block)(rafter_dtype dtype, const char *z, int64_t class_stride, int64_t rows, int64_t n, float *to,
                       int64_t pitch);
    void (*fetch_block)(rafter_dtype dtype, const char *z, int64_t class_stride, int64_t rows, int64_t n);
    void (*store_block)(rafter_dtype dtype, const float *from, int64_t pitch, int64_t rows, int64_t n, char *dz,
                        int64_t row_stride, int64_t class_stride);

    /* Called at the end of every task that wrote dz with `stream` set. */
    void (*fence)(void);
};

#endif
