/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fixed cost of a call on a GPU: for the smallest row of every seed table, in microseconds,
 *
 *     host    time of the calling thread for one call
 *     gpu     time on the device with cold caches, between two events
 *     empty   the same for an empty kernel
 *     bytes   time for the call's bytes at the rate of a large copy
 *     over    gpu - empty - bytes
 *
 *     rafter_launches [OP...]
 *
 * Medians. The goals are under 6 for host and at most 3 for over.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/problem.h"
#include "measure.h"

enum { REPEATS = 31, BATCH = 100, COPIED = 1 << 30 };
static const double micro = 1e-6;

static rafter_context *context;
static void *before, *after; /* events */
static char *other;          /* memory that fills L2 between repeats */
static size_t other_bytes;

typedef bool work(void *arg);

/* Device seconds of one piece of work, with other data in the caches. Filling the caches takes
 * longer than enqueueing the work, so that the device never waits for the host. */
static double device_seconds(work *enqueue, void *arg) {
    struct samples samples = {0};
    for (int i = 0; i < REPEATS; i++) {
        gpu_fill(context, other, i, other_bytes);
        gpu_record(context, before);
        if (!enqueue(arg))
            exit(1);
        gpu_record(context, after);
        samples_add(&samples, 1e-3 * gpu_elapsed(before, after));
    }
    const double median = samples_summary(&samples).median;
    samples_free(&samples);
    return median;
}

/* Host seconds of one call. The device is idle when a batch begins, and its queue is longer than a
 * batch. */
static double host_seconds(work *enqueue, void *arg) {
    struct samples samples = {0};
    for (int i = 0; i < REPEATS; i++) {
        gpu_synchronize(context);
        const double start = clock_seconds();
        for (int k = 0; k < BATCH; k++)
            if (!enqueue(arg))
                exit(1);
        samples_add(&samples, (clock_seconds() - start) / BATCH);
    }
    gpu_synchronize(context);
    const double median = samples_summary(&samples).median;
    samples_free(&samples);
    return median;
}

static bool launch_nothing(void *arg) {
    (void)arg;
    gpu_launch_nothing(context);
    return true;
}

static bool copy(void *arg) {
    char *const memory = arg;
    return gpu_move(context, memory + COPIED, memory, COPIED);
}

struct cell {
    problem problem;
    enum problem_mode mode;
};

static bool call(void *arg) {
    const struct cell *cell = arg;
    const rafter_status status = cell->problem.op->call(&cell->problem, context, cell->mode);
    if (status != RAFTER_OK)
        fprintf(stderr, "rafter: %s: %s\n", rafter_status_name(status), rafter_last_error(context));
    return status == RAFTER_OK;
}

static void measure(const struct op_cases *op, int table, enum problem_mode mode, double empty, double rate) {
    const struct bench_row row = {.table = table, .x = op->table[table].seeds_x[0], .dtype = RAFTER_BF16};
    struct cell cell = {.problem = {.op = op}, .mode = mode};
    problem *const p = &cell.problem;
    op->make_bench(p, &row);
    problem_adapt(p);
    if (!problem_allocate(p, 1) || !problem_to_device(p, context, PROBLEM_BOTH)) {
        fprintf(stderr, "rafter: no memory for %s\n", p->title);
        exit(1);
    }
    double bytes = 0, flops = 0;
    op->cost(p, mode, &bytes, &flops);
    if (p->op->call(p, context, PROBLEM_BOTH) != RAFTER_UNSUPPORTED) { /* backward reads the outputs of forward */
        const double gpu = device_seconds(call, &cell), host = host_seconds(call, &cell);
        printf("%-22s%-44s%-8s%8.2f%8.2f%8.2f%8.2f%8.2f\n", op->op, p->title, problem_mode_names[mode], host / micro,
               gpu / micro, empty / micro, bytes / rate / micro, (gpu - empty - bytes / rate) / micro);
        fflush(stdout);
    }
    problem_leave_device(p);
    problem_free(p);
}

int main(int argc, char **argv) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        fprintf(stderr, "rafter: %s\n", rafter_last_error(NULL));
        return 77;
    }
    struct gpu_facts facts;
    gpu_describe(context, &facts);
    before = gpu_new_event();
    after = gpu_new_event();
    other_bytes = 4 * (size_t)facts.l2_bytes;
    other = gpu_allocate(other_bytes);
    char *const memory = gpu_allocate(2 * (size_t)COPIED);
    if (!before || !after || !other || !memory) {
        fprintf(stderr, "rafter: no memory on the device\n");
        return 1;
    }
    const double rate = 2.0 * COPIED / device_seconds(copy, memory);
    const double empty = device_seconds(launch_nothing, NULL), launch = host_seconds(launch_nothing, NULL);
    gpu_release(memory);
    printf("%s: a copy moves %.0f GB/s, launching an empty kernel takes the host %.2f us\n", facts.name, rate / 1e9,
           launch / micro);
    printf("%-22s%-44s%-8s%8s%8s%8s%8s%8s\n", "op", "table", "mode", "host", "gpu", "empty", "bytes", "over");
    for (int o = 0; problem_ops[o]; o++) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++)
            wanted |= strcmp(argv[i], problem_ops[o]->op) == 0;
        for (int t = 0; wanted && t < problem_ops[o]->tables; t++)
            for (int mode = PROBLEM_FORWARD; mode <= PROBLEM_BACKWARD; mode++)
                if (problem_ops[o]->table[t].modes >> mode & 1)
                    measure(problem_ops[o], t, (enum problem_mode)mode, empty, rate);
    }
    gpu_release(other);
    gpu_release_event(before);
    gpu_release_event(after);
    rafter_context_destroy(context);
    return 0;
}
