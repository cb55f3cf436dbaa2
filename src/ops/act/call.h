/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of act: what op.c hands to a backend. */
#ifndef RAFTER_ACT_CALL_H
#define RAFTER_ACT_CALL_H

#include "core/tensor.h"

struct act_call {
    rafter_direction direction;
    rafter_act_kind kind;
    int dim;        /* softmax: in [0, ndim) */
    rafter_view in; /* forward: x. Backward: x (relu without a mask, sigmoid, silu) or y (softmax); else data is NULL */
    rafter_view dy; /* backward only */
    rafter_view out; /* forward: y. Backward: dx. May be the same memory as in (forward) or dy (backward) */
    uint8_t *mask;   /* relu_mask: forward writes it, backward reads it instead of x; NULL: none */
    void *workspace; /* the caller's, or NULL */
    size_t workspace_bytes;
    size_t *ask; /* CUDA: not NULL where only the bytes of workspace are wanted, here, and nothing is to be done */
};

#endif
