/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of lrpe_cosine: the input of every variant. */
#ifndef RAFTER_LRPE_COSINE_CALL_H
#define RAFTER_LRPE_COSINE_CALL_H

#include "core/tensor.h"
#include "core/variants.h"

struct lrpe_cosine_call {
    struct rafter_call common;
    rafter_act_kind act;
    rafter_softmax_over softmax_over;
    rafter_lrpe_algorithm algorithm;
    int64_t offset;
    rafter_view x, dx;         /* [B, N, H, D]; dx in backward only, data NULL: not wanted */
    rafter_view y, dy;         /* [B, N, H, 2D]; y in forward, dy in backward */
    rafter_view theta, dtheta; /* [H or 1, D or 1]; dtheta: as dx */
    rafter_view positions;     /* [B, N], stride 0 in B if given as [N]; data NULL: offset + n */
};

#endif
