/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The losses over the ranks of an MPI program: `mpirun -n 3 test_mpi`. Every rank computes the answer
 * alone as well. Shards are uneven, and one of them is empty if there are three ranks or more.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rafter/mpi.h"

enum { ROWS = 30, DEPTH = 24, CLASSES = 101, DX = ROWS * DEPTH };

static rafter_mpi world;
static rafter_context *context;
static int rank, ranks, failures;

static void expect(int good, const char *what, int kind) {
    if (!good) {
        failures++;
        printf("rank %d of %d, kind %d: %s (%s)\n", rank, ranks, kind, what, rafter_last_error(context));
    }
}

static int close_to(const float *a, const float *b, int64_t n) {
    int good = 1;
    for (int64_t i = 0; i < n; i++)
        good &= fabsf(a[i] - b[i]) <= 2e-6f * (1.0f + fabsf(b[i]));
    return good;
}

static int same_everywhere(const void *data, int bytes) {
    char *const first = malloc((size_t)bytes);
    if (!first)
        abort();
    memcpy(first, data, (size_t)bytes);
    MPI_Bcast(first, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    const int same = memcmp(first, data, (size_t)bytes) == 0;
    free(first);
    return same;
}

/* A call with its tensors: of rows [row, row + n) and classes [first, first + v). */
struct call {
    int64_t rows[1], shape_x[2], shape_w[2], shape_v[1], argmax_data[ROWS];
    float loss_value, entropy_data[ROWS], dx_data[DX], dw_data[CLASSES * DEPTH];
    DLTensor x, weight, target, loss, entropy, argmax, dx, dweight, class_weight;
    rafter_loss_options options;
    rafter_linear_cross_entropy_args args;
};

static float x_data[DX], w_data[CLASSES * DEPTH], class_weights[CLASSES];
static int64_t labels[ROWS];

static void set_up(struct call *c, int kind, int64_t row, int64_t n, int64_t first, int64_t v) {
    memset(c, 0, sizeof *c);
    c->rows[0] = c->shape_x[0] = n;
    c->shape_x[1] = c->shape_w[1] = DEPTH;
    c->shape_w[0] = v;
    c->shape_v[0] = CLASSES;
    c->x = rafter_tensor(x_data + row * DEPTH, RAFTER_F32, 2, c->shape_x);
    c->weight = rafter_tensor(w_data + first * DEPTH, RAFTER_F32, 2, c->shape_w);
    c->target = rafter_tensor(labels + row, RAFTER_I64, 1, c->rows);
    c->loss = rafter_tensor(&c->loss_value, RAFTER_F32, 0, NULL);
    c->entropy = rafter_tensor(c->entropy_data, RAFTER_F32, 1, c->rows);
    c->argmax = rafter_tensor(c->argmax_data, RAFTER_I64, 1, c->rows);
    c->dx = rafter_tensor(c->dx_data, RAFTER_F32, 2, c->shape_x);
    c->dweight = rafter_tensor(c->dw_data, RAFTER_F32, 2, c->shape_w);
    c->class_weight = rafter_tensor(class_weights, RAFTER_F32, 1, c->shape_v);
    c->options = (rafter_loss_options){.size = sizeof c->options};
    if (kind % 2) {
        c->options.label_smoothing = 0.1f;
        c->options.class_weight = &c->class_weight;
    }
    if (kind / 2 % 2) {
        c->options.softcap = 2;
        c->options.z_loss = 1e-2f;
        c->options.reduction = RAFTER_SUM;
    }
    c->args = (rafter_linear_cross_entropy_args){.size = sizeof c->args,
                                                 .options = &c->options,
                                                 .x = &c->x,
                                                 .weight = &c->weight,
                                                 .target = &c->target,
                                                 .loss = &c->loss,
                                                 .entropy = &c->entropy,
                                                 .argmax = &c->argmax,
                                                 .dx = &c->dx,
                                                 .dweight = &c->dweight};
}

static struct call alone, own;

static void spread_classes(int kind) {
    /* 1 class on rank 0, none on rank 1, the rest on the last: or halves, with two ranks. */
    const int64_t first = rank == 0 ? 0 : ranks == 2 ? CLASSES / 2 : 1;
    const int64_t end = rank == ranks - 1 ? CLASSES : ranks == 2 ? CLASSES / 2 : 1;
    set_up(&own, kind, 0, ROWS, first, end - first);
    own.options.class_group = &world.communicator;
    own.options.first_class = first;
    own.options.classes = CLASSES;
    expect(rafter_linear_cross_entropy_forward(context, &own.args) == RAFTER_OK, "class_group", kind);
    expect(close_to(&own.loss_value, &alone.loss_value, 1), "loss", kind);
    expect(close_to(own.entropy_data, alone.entropy_data, ROWS), "entropy", kind);
    expect(memcmp(own.argmax_data, alone.argmax_data, sizeof own.argmax_data) == 0, "argmax", kind);
    expect(close_to(own.dx_data, alone.dx_data, DX), "dx", kind);
    expect(close_to(own.dw_data, alone.dw_data + first * DEPTH, (end - first) * DEPTH), "dweight", kind);
    expect(same_everywhere(&own.loss_value, sizeof own.loss_value), "bits of the loss", kind);
    expect(same_everywhere(own.entropy_data, sizeof own.entropy_data), "bits of the entropy", kind);
    expect(same_everywhere(own.dx_data, sizeof own.dx_data), "bits of dx", kind);
    if (ROWS % ranks == 0) { /* dx of a share of the rows */
        int64_t share[] = {ROWS / ranks, DEPTH};
        own.dx = rafter_tensor(own.dx_data, RAFTER_F32, 2, share);
        expect(rafter_linear_cross_entropy_forward(context, &own.args) == RAFTER_OK, "a share of dx", kind);
        expect(close_to(own.dx_data, alone.dx_data + share[0] * rank * DEPTH, share[0] * DEPTH), "a share of dx", kind);
    }
}

static void spread_rows(int kind) {
    const int64_t first = rank == 0 ? 0 : ROWS - 3 * (ranks - rank),
                  end = rank == ranks - 1 ? ROWS : ROWS - 3 * (ranks - 1 - rank);
    set_up(&own, kind, first, end - first, 0, CLASSES);
    own.options.row_group = &world.communicator;
    expect(rafter_linear_cross_entropy_forward(context, &own.args) == RAFTER_OK, "row_group", kind);
    expect(close_to(&own.loss_value, &alone.loss_value, 1), "loss over rows", kind);
    expect(same_everywhere(&own.loss_value, sizeof own.loss_value), "bits of the loss over rows", kind);
    expect(close_to(own.dx_data, alone.dx_data + first * DEPTH, (end - first) * DEPTH), "dx over rows", kind);
    static float sum[CLASSES * DEPTH];
    MPI_Allreduce(own.dw_data, sum, CLASSES * DEPTH, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    expect(close_to(sum, alone.dw_data, CLASSES * DEPTH), "dweight over rows", kind);
}

static void disagree(void) {
    set_up(&own, 0, 0, ROWS, 0, rank == 0 ? CLASSES : 0);
    own.options.class_group = &world.communicator;
    own.options.first_class = rank == 0 ? 0 : CLASSES;
    own.options.classes = CLASSES;
    own.options.z_loss = rank == ranks - 1 ? 0.5f : 0.0f;
    expect(rafter_linear_cross_entropy_forward(context, &own.args) == RAFTER_RANKS_DISAGREE &&
               strstr(rafter_last_error(context), "z_loss is 0 on rank 0 and 0.5 on rank"),
           "a disagreement", 0);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (rafter_mpi_open(&world, MPI_COMM_WORLD) != MPI_SUCCESS)
        return 1;
    rank = world.communicator.rank;
    ranks = world.communicator.ranks;
    const rafter_context_options options = {.size = sizeof options, .threads = 1};
    if (rafter_context_create(&context, &options) != RAFTER_OK)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int i = 0; i < DX; i++)
        x_data[i] = sinf(0.7f * (float)i);
    for (int i = 0; i < CLASSES * DEPTH; i++)
        w_data[i] = cosf(0.3f * (float)i);
    for (int v = 0; v < CLASSES; v++)
        class_weights[v] = 0.5f + (float)(v % 3);
    for (int i = 0; i < ROWS; i++)
        labels[i] = i % 6 == 5 ? -100 : i * 37 % CLASSES;
    for (int kind = 0; kind < 4; kind++) {
        set_up(&alone, kind, 0, ROWS, 0, CLASSES);
        expect(rafter_linear_cross_entropy_forward(context, &alone.args) == RAFTER_OK, "alone", kind);
        spread_classes(kind);
        spread_rows(kind);
    }
    if (ranks > 1)
        disagree();
    rafter_context_destroy(context);
    int all = 0;
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d failures on %d ranks\n", all, ranks);
    MPI_Finalize();
    return all > 0;
}
