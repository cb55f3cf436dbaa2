/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loss of an output layer, and all its gradients, with the vocabulary spread over the ranks of an MPI
 * program. Every rank has the same batch x, and its own rows of the weight, any number of them.
 *
 *     mpicc vocabulary_parallel.c $(pkg-config --cflags --libs rafter) -lm
 *     mpirun -n 3 ./a.out
 */
#include <rafter/mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 64, DEPTH = 32, VOCABULARY = 1000 };

static void check(rafter_context *ctx, rafter_status status) {
    if (status == RAFTER_OK)
        return;
    fprintf(stderr, "%s: %s\n", rafter_status_name(status), rafter_last_error(ctx));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    rafter_mpi ranks;
    rafter_mpi_open(&ranks, MPI_COMM_WORLD);
    const int rank = ranks.communicator.rank, count = ranks.communicator.ranks;

    /* This rank's classes, and its rows of the weight. */
    const int64_t first = (int64_t)VOCABULARY * rank / count, end = (int64_t)VOCABULARY * (rank + 1) / count;
    int64_t labels[ROWS], rows[] = {ROWS}, batch[] = {ROWS, DEPTH}, shard[] = {end - first, DEPTH};
    static float x_data[ROWS * DEPTH], dx_data[ROWS * DEPTH], w_data[VOCABULARY * DEPTH], dw_data[VOCABULARY * DEPTH];
    for (int i = 0; i < ROWS * DEPTH; i++)
        x_data[i] = sinf(0.7f * (float)i);
    for (int64_t i = 0; i < (end - first) * DEPTH; i++)
        w_data[i] = cosf(0.3f * (float)(first * DEPTH + i)) / 4;
    for (int i = 0; i < ROWS; i++)
        labels[i] = i % 7 == 6 ? -100 : (int64_t)i * 131 % VOCABULARY; /* -100: ignored */

    float loss_value = 0;
    DLTensor x = rafter_tensor(x_data, RAFTER_F32, 2, batch), dx = rafter_tensor(dx_data, RAFTER_F32, 2, batch);
    DLTensor weight = rafter_tensor(w_data, RAFTER_F32, 2, shard),
             dweight = rafter_tensor(dw_data, RAFTER_F32, 2, shard);
    DLTensor target = rafter_tensor(labels, RAFTER_I64, 1, rows),
             loss = rafter_tensor(&loss_value, RAFTER_F32, 0, NULL);

    rafter_context *ctx = NULL;
    rafter_context_options one_thread = {.size = sizeof one_thread, .threads = 1};
    check(NULL, rafter_context_create(&ctx, &one_thread));
    rafter_loss_options options = {.size = sizeof options,
                                   .label_smoothing = 0.1f,
                                   .class_group = &ranks.communicator,
                                   .first_class = first,
                                   .classes = VOCABULARY};
    rafter_linear_cross_entropy_args args = {.size = sizeof args,
                                             .options = &options,
                                             .x = &x,
                                             .weight = &weight,
                                             .target = &target,
                                             .loss = &loss,
                                             .dx = &dx,
                                             .dweight = &dweight};
    check(ctx, rafter_linear_cross_entropy_forward(ctx, &args));

    float gradient = 0, least = 0, most = 0;
    for (int i = 0; i < ROWS * DEPTH; i++)
        gradient += fabsf(dx_data[i]);
    MPI_Allreduce(&loss_value, &least, 1, MPI_FLOAT, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(&loss_value, &most, 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0)
        printf("loss %.5f on %d ranks, absolute sum of dx %.4f\n", (double)loss_value, count, (double)gradient);
    rafter_context_destroy(ctx);
    MPI_Finalize();
    return !(least == most && gradient > 0); /* the same bits on every rank */
}
