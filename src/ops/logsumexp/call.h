/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of logsumexp: the input of every variant. */
#ifndef RAFTER_LOGSUMEXP_CALL_H
#define RAFTER_LOGSUMEXP_CALL_H

#include "core/group.h"
#include "core/tensor.h"
#include "core/variants.h"

struct logsumexp_call {
    struct rafter_call common;
    rafter_logsumexp_algorithm algorithm;
    int dim;                   /* in [0, ndim) */
    rafter_view x;             /* at least one dimension */
    rafter_view lse, dlse;     /* x's shape with dim of size 1 (stride 0); dlse in backward only */
    rafter_view rounded;       /* forward only: as lse, also its strides; x's dtype. data NULL: not wanted */
    rafter_view dx;            /* backward only; may be the same memory as x */
    rafter_communicator group; /* forward only: dim is spread over its ranks. No variant sees it: see op.c */
};

#endif
