/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of scale: the input of every variant. */
#ifndef RAFTER_SCALE_CALL_H
#define RAFTER_SCALE_CALL_H

#include "core/tensor.h"
#include "core/variants.h"

struct scale_call {
    struct rafter_call common;
    /* Dimensions in the order of y's memory, merged where the strides of both allow. */
    rafter_view x, y;
    bool in_place;      /* y is x: a factor of 1 leaves nothing to do */
    const void *factor; /* one fp32 number, in the memory of the context's device */
};

#endif
