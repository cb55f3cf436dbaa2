/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the first use of the CUDA backend costs, in this process: milliseconds to load the library
 * and open a context, then of the first and the second call of every op, forward, each until the
 * device is done. The device's own start comes before, and is printed on its own.
 *
 *     rafter_first_calls
 *
 * One line: "device D load L", then "OP FIRST SECOND" for every op, all on one line. Exits with 77
 * without a GPU. bench/first_calls.sh compares two builds of librafter_cuda.
 */
#include <stdio.h>

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/problem.h"
#include "measure.h"

/* Milliseconds of a call until its results are there; negative: it failed. */
static double time_call(const problem *p, rafter_context *context) {
    const double start = clock_seconds();
    const bool good = p->op->call(p, context, PROBLEM_FORWARD) == RAFTER_OK && gpu_synchronize(context);
    return good ? 1e3 * (clock_seconds() - start) : -1;
}

static bool make(problem *p, const struct op_cases *op) {
    struct problem_request request = {.ndim = 2, .shape = {1024, 1024}, .dtype = RAFTER_BF16, .classes = 8192};
    *p = (problem){.op = op};
    if (op->make_request(p, &request)) { /* it wants other dimensions */
        request = (struct problem_request){.ndim = 4, .shape = {2, 512, 8, 64}, .dtype = RAFTER_BF16};
        *p = (problem){.op = op};
        if (op->make_request(p, &request))
            return false;
    }
    return problem_allocate(p, 1);
}

int main(void) {
    double start = clock_seconds();
    void *const memory = gpu_allocate(1); /* starts the device; the library under test is not loaded yet */
    if (!memory) {
        printf("skipped: there is no GPU\n");
        return 77;
    }
    printf("device %.1f", 1e3 * (clock_seconds() - start));
    start = clock_seconds();
    rafter_context *context = NULL;
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        printf("\n%s\n", rafter_last_error(NULL));
        return 1;
    }
    printf(" load %.1f", 1e3 * (clock_seconds() - start));
    int failed = 0;
    for (int o = 0; problem_ops[o]; o++) {
        problem p;
        if (!make(&p, problem_ops[o]) || !problem_to_device(&p, context, PROBLEM_FORWARD)) {
            printf("\n%s could not be made\n", problem_ops[o]->op);
            return 1;
        }
        const double first = time_call(&p, context), second = time_call(&p, context);
        failed += first < 0 || second < 0;
        printf(" %s %.2f %.2f", problem_ops[o]->op, first, second);
        problem_leave_device(&p);
        problem_free(&p);
    }
    printf("\n");
    rafter_context_destroy(context);
    gpu_release(memory);
    return failed > 0;
}
