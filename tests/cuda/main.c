/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend apart from the numbers of single calls, which test_walk --device cuda checks:
 * calls that are captured into graphs and replayed, calls on two streams, calls of several
 * processes, contexts destroyed under queued work, labels out of range, and bad arguments, which
 * must get the same messages as on the CPU.
 *
 *     test_cuda --list               prints the names of the parts
 *     test_cuda [--every N] [PART...]  runs these parts, or all
 *
 * --every takes one problem in N. Without a GPU the test prints why and exits with 77, which ctest
 * counts as skipped.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

static int64_t passed, failed;

void expect(bool good, const char *format, ...) {
    if (good) {
        passed++;
        return;
    }
    if (failed++ >= 40)
        return;
    va_list values;
    va_start(values, format);
    printf("FAIL ");
    vprintf(format, values);
    printf("\n");
    va_end(values);
}

rafter_context *open_variant(void *stream, const char *variant) {
    const rafter_context_options options = {
        .size = sizeof options, .device = {kDLCUDA, 0}, .stream = stream, .variant = variant};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("skipped: %s\n", rafter_last_error(NULL));
        exit(77);
    }
    return context;
}

rafter_context *open_on(void *stream) {
    return open_variant(stream, NULL);
}

rafter_context *open_context(void) {
    return open_on(gpu_new_stream(false));
}

void close_context(rafter_context *context) {
    void *const stream = context_stream(context);
    rafter_context_destroy(context);
    if (stream)
        gpu_release_stream(stream);
}

DLTensor on_device(rafter_context *context, const void *from, rafter_dtype dtype, int ndim, int64_t *shape,
                   size_t bytes) {
    DLTensor t = rafter_tensor(gpu_allocate(bytes), dtype, ndim, shape);
    t.device = context_device(context);
    expect(t.data && (from ? gpu_copy(t.data, from, bytes) : gpu_fill(context, t.data, 0xff, bytes)),
           "no memory for %zu bytes", bytes);
    return t;
}

void release_all(const DLTensor *const *tensors, size_t count) {
    for (size_t i = 0; i < count; i++)
        gpu_release(tensors[i]->data);
}

static rafter_context *first_context;
static int64_t every = 1;

bool serves(const struct op_cases *op) {
    problem p = {.op = op};
    op->make(&p, 0);
    if (!problem_allocate(&p, 1))
        return false;
    const bool serves = problem_call(&p, first_context, PROBLEM_FORWARD) != RAFTER_UNSUPPORTED;
    problem_free(&p);
    if (!serves)
        printf("%s does not run on CUDA: not tested\n", op->op);
    return serves;
}

static void test_captures(void) {
    test_scratch_in_captures();
    for (int o = 0; problem_ops[o]; o++)
        if (serves(problem_ops[o]))
            test_graphs(problem_ops[o], every);
}

static void test_streams(void) {
    for (int o = 0; problem_ops[o]; o++) {
        if (!serves(problem_ops[o]))
            continue;
        for (int other = 0; problem_ops[other]; other++)
            if (serves(problem_ops[other]))
                test_two_streams(problem_ops[o], problem_ops[other]);
    }
}

static const struct {
    const char *name, *about;
    void (*test)(void);
} parts[] = {
    {"arguments", "bad arguments", test_arguments},
    {"labels", "labels out of range", test_bad_labels},
    {"layouts", "gradients with other strides", test_layouts},
    {"ranks", "ranks that make different calls", test_ranks},
    {"captures", "calls in graphs", test_captures},
    {"streams", "calls on two streams", test_streams},
    {"processes", "calls of three processes at once", test_processes},
    {"destroyed", "contexts destroyed under queued work", test_destroyed},
    {"waiting", "blocks that wait for each other", test_waiting_blocks},
    {"long", "clusters in lockstep", test_long_products},
    {"tiles", "more tiles than multiprocessors", test_tiles},
    {"giants", "more than 2^31 rows", test_giants},
};
enum { PARTS = sizeof parts / sizeof *parts };

static bool is_named(const char *name, char **names, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return count == 0;
}

int main(int argc, char **argv) {
    int first = 1;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (int k = 0; k < PARTS; k++)
            puts(parts[k].name);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "--beside") == 0) { /* test_processes starts it so */
        first_context = open_on(NULL);
        return run_beside();
    }
    if (argc >= 3 && strcmp(argv[1], "--every") == 0) {
        every = atoll(argv[2]) > 1 ? atoll(argv[2]) : 1;
        first = 3;
    }
    for (int i = first; i < argc; i++) {
        bool known = false;
        for (int k = 0; k < PARTS; k++)
            known |= strcmp(argv[i], parts[k].name) == 0;
        if (!known) {
            fprintf(stderr, "test_cuda: there is no part %s\n", argv[i]);
            return 2;
        }
    }
    unsetenv("RAFTER_VARIANT"); /* it would override the variants that tests force */
    first_context = open_on(NULL);
    for (int k = 0; k < PARTS; k++) {
        const int64_t before = passed + failed;
        if (!is_named(parts[k].name, argv + first, argc - first))
            continue;
        parts[k].test();
        printf("%-10s %-40s %lld checks\n", parts[k].name, parts[k].about, (long long)(passed + failed - before));
        fflush(stdout);
    }
    rafter_context_destroy(first_context);
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0;
}
