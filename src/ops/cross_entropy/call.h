/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of cross_entropy: the input of every variant. */
#ifndef RAFTER_CROSS_ENTROPY_CALL_H
#define RAFTER_CROSS_ENTROPY_CALL_H

#include "core/tensor.h"
#include "core/variants.h"
#include "ops/loss.h"

struct cross_entropy_call {
    struct rafter_call common;
    struct rafter_loss loss; /* on CUDA without the sums of rafter_loss_read: the data is on the device */
    rafter_view logits;      /* [..., V], rows merged where strides allow */
    rafter_view dlogits;     /* the same; may be the same memory as logits */
    bool gradient;           /* dlogits is to be written; in forward: loss and gradient in one pass */
};

#endif
