/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of ranks over MPI, for CPU contexts. Header only, against your mpi.h (MPI 3 or later):
 * compile with mpicc. librafter itself does not know MPI.
 *
 *     rafter_mpi ranks;
 *     if (rafter_mpi_open(&ranks, MPI_COMM_WORLD) != MPI_SUCCESS) ...
 *     rafter_loss_options o = {.size = sizeof o, .class_group = &ranks.communicator,
 *                              .first_class = first, .classes = vocabulary};
 *
 * The communicator uses `comm` as it is: calls of other parts of the program on the same `comm` must
 * not run at the same time (MPI_Comm_dup gives one of your own). MPI's default error handler ends the
 * program; with MPI_ERRORS_RETURN set on `comm`, errors come back as RAFTER_COLLECTIVE_FAILED. If
 * several threads make calls, initialise MPI with the thread level that this needs (MPI_Init_thread).
 */
#ifndef RAFTER_MPI_H
#define RAFTER_MPI_H

#include <limits.h>
#include <mpi.h>

#include "rafter.h"

/* Must stay where it is while it is in use: `communicator` points into it. */
typedef struct rafter_mpi {
    rafter_communicator communicator;
    MPI_Comm comm;
    char text[MPI_MAX_ERROR_STRING];
} rafter_mpi;

/* MPI's counts are int. The library sends whole multiples of 8 bytes, so counting in those allows 16 GiB
 * per rank. */
static inline int rafter_mpi_all_gather(void *user, const void *send, void *receive, size_t bytes, void *stream) {
    const MPI_Comm comm = ((rafter_mpi *)user)->comm;
    (void)stream;
    if (bytes % 8 == 0 && bytes / 8 <= INT_MAX)
        return MPI_Allgather(send, (int)(bytes / 8), MPI_INT64_T, receive, (int)(bytes / 8), MPI_INT64_T, comm);
    if (bytes <= INT_MAX)
        return MPI_Allgather(send, (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, comm);
    return MPI_ERR_COUNT;
}

static inline int rafter_mpi_all_reduce_sum(void *user, float *data, size_t count, void *stream) {
    const size_t most = (size_t)1 << 30;
    (void)stream;
    while (count > 0) {
        const size_t here = count < most ? count : most;
        const int error = MPI_Allreduce(MPI_IN_PLACE, data, (int)here, MPI_FLOAT, MPI_SUM, ((rafter_mpi *)user)->comm);
        if (error != MPI_SUCCESS)
            return error;
        data += here;
        count -= here;
    }
    return MPI_SUCCESS;
}

static inline int rafter_mpi_reduce_scatter_sum(void *user, const float *send, float *receive, size_t count,
                                                void *stream) {
    (void)stream;
    if (count > INT_MAX)
        return MPI_ERR_COUNT;
    return MPI_Reduce_scatter_block(send, receive, (int)count, MPI_FLOAT, MPI_SUM, ((rafter_mpi *)user)->comm);
}

static inline const char *rafter_mpi_describe(void *user, int error) {
    rafter_mpi *const own = (rafter_mpi *)user;
    int length = 0;
    own->text[0] = '\0';
    MPI_Error_string(error, own->text, &length);
    return own->text;
}

/* Fills in *own for the ranks of `comm`, which must outlive it. Returns MPI's error code. */
static inline int rafter_mpi_open(rafter_mpi *own, MPI_Comm comm) {
    int rank = 0, ranks = 0;
    int error = MPI_Comm_rank(comm, &rank);
    if (error == MPI_SUCCESS)
        error = MPI_Comm_size(comm, &ranks);
    if (error != MPI_SUCCESS)
        return error;
    own->comm = comm;
    own->text[0] = '\0';
    own->communicator.size = sizeof own->communicator;
    own->communicator.user = own;
    own->communicator.rank = rank;
    own->communicator.ranks = ranks;
    own->communicator.all_gather = rafter_mpi_all_gather;
    own->communicator.all_reduce_sum = rafter_mpi_all_reduce_sum;
    own->communicator.reduce_scatter_sum = rafter_mpi_reduce_scatter_sum;
    own->communicator.describe = rafter_mpi_describe;
    own->communicator.multiprocessors = 0;
    return MPI_SUCCESS;
}

#endif /* RAFTER_MPI_H */
