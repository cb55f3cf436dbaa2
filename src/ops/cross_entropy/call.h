/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of cross_entropy: what op.c hands to a backend. */
#ifndef RAFTER_CROSS_ENTROPY_CALL_H
#define RAFTER_CROSS_ENTROPY_CALL_H

#include "core/tensor.h"
#include "ops/loss.h"

struct cross_entropy_call {
    struct rafter_loss
        loss; /* its direction is the call's. rafter_loss_read has not been called: data may be on a device */
    rafter_view logits,
        dlogits;     /* [..., V]: row r begins at rafter_offset(view, 0, ndim - 1, r); dlogits may be the logits */
    bool gradient;   /* dlogits is wanted; in forward: loss and gradient in one pass */
    void *workspace; /* the caller's, or NULL */
    size_t workspace_bytes;
    size_t *ask; /* CUDA: not NULL where only the bytes of workspace are wanted, here, and nothing is to be done */
};

#endif
