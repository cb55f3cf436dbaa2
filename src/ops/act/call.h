/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of act: the input of every variant. */
#ifndef RAFTER_ACT_CALL_H
#define RAFTER_ACT_CALL_H

#include "core/group.h"
#include "core/tensor.h"
#include "core/variants.h"

/* The tensors of a call. Forward: x (ACT_IN) and y (ACT_OUT). Backward: dy, dx (ACT_OUT) and, if it
 * reads more than dy, x or the y of softmax (ACT_IN). */
enum { ACT_IN, ACT_DY, ACT_OUT, ACT_TENSORS };

struct act_call {
    struct rafter_call common;
    rafter_act_kind kind;
    int dim; /* softmax: in [0, ndim) */
    /* Forward: x. Backward: x (relu without a mask, sigmoid, silu) or y (softmax); for other kinds data
     * is NULL. */
    rafter_view in;
    rafter_view dy;            /* backward only */
    rafter_view out;           /* forward: y. Backward: dx */
    bool in_place;             /* out is the same memory as in (forward) or dy (backward) */
    uint8_t *mask;             /* relu_mask: forward writes it, backward reads it instead of x; NULL: none */
    rafter_communicator group; /* softmax only: dim is spread over its ranks */
};

#endif
