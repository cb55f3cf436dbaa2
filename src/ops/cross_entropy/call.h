/* A checked call of cross_entropy: what op.c hands to a backend. */
#ifndef RAFTER_CROSS_ENTROPY_CALL_H
#define RAFTER_CROSS_ENTROPY_CALL_H

#include "core/tensor.h"
#include "ops/loss.h"

struct cross_entropy_call {
    rafter_direction direction;
    struct rafter_loss *loss;    /* rafter_loss_read has not been called: the data may be on a device */
    rafter_view logits, dlogits; /* [..., V]: row r begins at rafter_offset(view, 0, ndim - 1, r); dlogits may be the logits, and
                                    in forward its data is NULL unless loss and gradient are wanted in one pass */
    void *workspace;             /* the caller's, or NULL */
    size_t workspace_bytes;
};

#endif
