/*
 * The CUDA backend apart from the numbers of single calls, which test_walk --device cuda checks: calls that are
 * captured into graphs and replayed, calls on two streams, labels out of range, and bad arguments, which must get the
 * sentences that they get on the CPU.
 *
 *     test_cuda [--every N]
 *
 * --every takes one problem in N. Without a GPU it says so and exits with 77, which ctest counts as skipped.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

static int64_t passed, failed;
const struct rafter_cuda *cuda;

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

rafter_context *open_on(void *stream) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}, .stream = stream};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("skipped: %s\n", rafter_last_error(NULL));
        exit(77);
    }
    return context;
}

rafter_context *open_context(void) {
    return open_on(cuda ? cuda->stream(false) : NULL);
}

void close_context(rafter_context *context) {
    void *const stream = context->stream;
    rafter_context_destroy(context);
    if (stream)
        cuda->forget_stream(stream);
}

/* Whether the op runs on CUDA at all. */
static bool serves(const struct op_cases *op, rafter_context *context) {
    problem p = {.op = op};
    op->make(&p, 0);
    if (!problem_allocate(&p, 1))
        return false;
    const bool serves = problem_call(&p, context, PROBLEM_FORWARD) != RAFTER_UNSUPPORTED;
    problem_free(&p);
    if (!serves)
        printf("%s does not run on CUDA: left out\n", op->op);
    return serves;
}

static void count_off(const char *what) {
    static int64_t before;
    printf("%-40s %lld checks\n", what, (long long)(passed + failed - before));
    fflush(stdout);
    before = passed + failed;
}

int main(int argc, char **argv) {
    const bool sampled = argc == 3 && strcmp(argv[1], "--every") == 0 && atoll(argv[2]) > 1;
    const int64_t every = sampled ? atoll(argv[2]) : 1;
    rafter_context *context = open_context();
    cuda = context->cuda;
    const char *op, *variant;
    expect(rafter_describe_op(context, 0, &op, &variant) && strcmp(variant, "cuda") == 0,
           "the GPU's variant is not cuda");
    test_arguments();
    count_off("arguments");
    test_bad_labels();
    count_off("labels out of range");
    test_layouts();
    count_off("gradients that lie otherwise");
    test_scratch_in_captures();
    count_off("scratch memory and captures");
    for (int o = 0; problem_ops[o]; o++) {
        if (!serves(problem_ops[o], context))
            continue;
        test_graphs(problem_ops[o], every);
        count_off(problem_ops[o]->op);
        for (int other = 0; problem_ops[other]; other++)
            if (serves(problem_ops[other], context))
                test_two_streams(problem_ops[o], problem_ops[other]);
        count_off("on two streams");
    }
    test_meetings();
    count_off("blocks that meet");
    test_tiles();
    count_off("more tiles than multiprocessors");
    test_giants();
    count_off("more than 2^31 rows");
    rafter_context_destroy(context);
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0;
}
