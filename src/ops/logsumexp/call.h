/* SPDX-License-Identifier: Apache-2.0 */
/* A checked call of logsumexp: what op.c hands to a backend. */
#ifndef RAFTER_LOGSUMEXP_CALL_H
#define RAFTER_LOGSUMEXP_CALL_H

#include "core/tensor.h"

struct logsumexp_call {
    rafter_direction direction;
    rafter_logsumexp_algorithm algorithm;
    int dim;               /* in [0, ndim) */
    rafter_view x;         /* at least one dimension */
    rafter_view lse, dlse; /* x's shape with dim of size 1 (stride 0); dlse in backward only */
    rafter_view dx;        /* backward only; may be the same memory as x */
    void *workspace;       /* the caller's, or NULL */
    size_t workspace_bytes;
    size_t *ask; /* CUDA: not NULL where only the bytes of workspace are wanted, here, and nothing is to be done */
};

#endif
