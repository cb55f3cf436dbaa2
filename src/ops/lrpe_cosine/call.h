/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of lrpe_cosine: what op.c hands to a backend. */
#ifndef RAFTER_LRPE_COSINE_CALL_H
#define RAFTER_LRPE_COSINE_CALL_H

#include "core/tensor.h"

struct lrpe_cosine_call {
    rafter_direction direction;
    rafter_act_kind act;
    rafter_softmax_over softmax_over;
    rafter_lrpe_algorithm algorithm;
    int64_t offset;
    rafter_view x, dx;         /* [B, N, H, D]; dx in backward only */
    rafter_view y, dy;         /* [B, N, H, 2D]; forward, backward */
    rafter_view theta, dtheta; /* [H or 1, D or 1]; dtheta's data is NULL when it is not wanted */
    rafter_view positions;     /* [B, N] (stride 0 in B when one row serves all); data NULL: offset + n */
    void *workspace;           /* the caller's, or NULL */
    size_t workspace_bytes;
    size_t *ask; /* CUDA: not NULL where only the bytes of workspace are wanted, here, and nothing is to be done */
};

#endif
