/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks over NCCL, for CUDA contexts. Header only, against your nccl.h (2.7 or later); link
 * your libnccl. librafter itself does not know NCCL.
 *
 *     rafter_nccl ranks;
 *     if (rafter_nccl_open(&ranks, comm) != ncclSuccess) ...
 *     rafter_loss_options o = {.size = sizeof o, .class_group = &ranks.communicator,
 *                              .first_class = first, .classes = vocabulary};
 *
 * Collectives are enqueued on the context's stream. The ncclComm_t must belong to the context's
 * device, and other collectives on it must be ordered with that stream. The library does
 * not notice a rank that has died: use ncclCommGetAsyncError and ncclCommAbort.
 *
 * If you limit the blocks of `comm` (ncclConfig_t.maxCTAs; 8 to 16 are enough beside a product), set
 * ranks.communicator.multiprocessors to that number: the sum of dx then hides behind the product for dW.
 */
#ifndef RAFTER_NCCL_H
#define RAFTER_NCCL_H

#include <nccl.h>

#include "rafter.h"

/* Must stay where it is while it is in use: `communicator` points into it. */
typedef struct rafter_nccl {
    rafter_communicator communicator;
    ncclComm_t comm;
} rafter_nccl;

static inline int rafter_nccl_all_gather(void *user, const void *send, void *receive, size_t bytes, void *stream) {
    return (int)ncclAllGather(send, receive, bytes, ncclUint8, ((rafter_nccl *)user)->comm, (cudaStream_t)stream);
}

static inline int rafter_nccl_all_reduce_sum(void *user, float *data, size_t count, void *stream) {
    return (int)ncclAllReduce(data, data, count, ncclFloat32, ncclSum, ((rafter_nccl *)user)->comm,
                              (cudaStream_t)stream);
}

static inline int rafter_nccl_reduce_scatter_sum(void *user, const float *send, float *receive, size_t count,
                                                 void *stream) {
    return (int)ncclReduceScatter(send, receive, count, ncclFloat32, ncclSum, ((rafter_nccl *)user)->comm,
                                  (cudaStream_t)stream);
}

static inline const char *rafter_nccl_describe(void *user, int error) {
    (void)user;
    return ncclGetErrorString((ncclResult_t)error);
}

/* Fills in *own for the ranks of `comm`, which must outlive it. Returns NCCL's error code. */
static inline ncclResult_t rafter_nccl_open(rafter_nccl *own, ncclComm_t comm) {
    int rank = 0, ranks = 0;
    ncclResult_t error = ncclCommUserRank(comm, &rank);
    if (error == ncclSuccess)
        error = ncclCommCount(comm, &ranks);
    if (error != ncclSuccess)
        return error;
    own->comm = comm;
    own->communicator.size = sizeof own->communicator;
    own->communicator.user = own;
    own->communicator.rank = rank;
    own->communicator.ranks = ranks;
    own->communicator.all_gather = rafter_nccl_all_gather;
    own->communicator.all_reduce_sum = rafter_nccl_all_reduce_sum;
    own->communicator.reduce_scatter_sum = rafter_nccl_reduce_scatter_sum;
    own->communicator.describe = rafter_nccl_describe;
    own->communicator.multiprocessors = 0; /* NCCL does not report it: see the top of this file */
    return ncclSuccess;
}

#endif /* RAFTER_NCCL_H */
