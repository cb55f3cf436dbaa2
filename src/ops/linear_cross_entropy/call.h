/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of linear_cross_entropy: what op.c hands to a backend. */
#ifndef RAFTER_LINEAR_CROSS_ENTROPY_CALL_H
#define RAFTER_LINEAR_CROSS_ENTROPY_CALL_H

#include "core/tensor.h"
#include "ops/loss.h"

struct linear_cross_entropy_call {
    struct rafter_loss loss;        /* its direction is the call's; rafter_loss_read has not been called on CUDA */
    rafter_view x, weight, bias;    /* rows of x and dx are collapsed. bias: data NULL where there is none */
    rafter_view dx, dweight, dbias; /* data NULL: not wanted, or empty */
    rafter_lce_mode mode;
    bool native;                  /* sums that grow may do so in a 16-bit gradient */
    bool accumulate_into_dweight; /* dweight is fp32 then */
    size_t budget;                /* 0: none */
    void *workspace;              /* the caller's, or NULL */
    size_t workspace_bytes;
    size_t *ask; /* CUDA: not NULL where only the bytes of workspace are wanted, here, and nothing is to be done */
};

#endif
