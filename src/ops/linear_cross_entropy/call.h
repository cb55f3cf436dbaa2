/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of linear_cross_entropy: the input of every variant. */
#ifndef RAFTER_LINEAR_CROSS_ENTROPY_CALL_H
#define RAFTER_LINEAR_CROSS_ENTROPY_CALL_H

#include "core/tensor.h"
#include "core/variants.h"
#include "ops/loss.h"

struct linear_cross_entropy_call {
    struct rafter_call common;
    struct rafter_loss loss;        /* checked; rafter_loss_read has not been called */
    rafter_view x, weight, bias;    /* rows of x and dx are collapsed. bias: data NULL if there is none */
    rafter_view dx, dweight, dbias; /* data NULL: not wanted, or empty */
    int dx_rows;                    /* 0: dx is not wanted; 1: of all rows; 2: of this rank's share */
    rafter_lce_mode mode;
    bool native;                  /* partial sums may be kept in a 16-bit gradient */
    bool accumulate_into_dweight; /* dweight is fp32 then */
    void *saved;                  /* NULL: none */
    bool allow_tf32;              /* in products of fp32 inputs on CUDA */
};

enum { LCE_SAVED_ROW_BYTES = 64 };

/* Elements of the sum of W's rows (see below), which is read in whole tiles. */
static inline int64_t lce_padded_depth(int64_t depth) {
    return (depth + 255) / 256 * 256;
}

/* Bytes of `saved`: exponentials of two bytes each, in rows of whole packs; the statistics of the
 * rows; and the sum of W's rows, for label smoothing. */
static inline size_t lce_saved_bytes(int64_t rows, int64_t classes, int64_t depth) {
    return (size_t)rows * ((size_t)(classes + 7) / 8 * 16 + LCE_SAVED_ROW_BYTES) + (size_t)lce_padded_depth(depth) * 4;
}

#endif
