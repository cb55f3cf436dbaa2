/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk: every op x problem x layout x special value x variant x direction against the fp64 oracle; bitwise equality
 * over repeats, over 1, 2 and 3 threads and in a workspace of just the bytes asked for; finite differences of the
 * oracle itself.
 *
 *     test_walk [OP ...] [--large] [--variant NAME] [--device cuda] [--every N [--from K]]
 *
 * --large runs only the problems past 2^31 elements, one variant (the best), once. --device cuda runs the same problems
 * there; where there is no such device it says so and exits with 77, which ctest counts as skipped. --every takes one
 * problem in N, for runs under a checker that is slow; --from the first of them (0), so that several runs share them.
 * The oracle's own check belongs to the run that has the first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/backend.h"
#include "harness/problem.h"

static int64_t passed, failed;

static void verdict(bool good, const problem *p, const char *variant, const char *what, const char *sentence) {
    if (good) {
        passed++;
        return;
    }
    if (failed++ < 40)
        printf("FAIL %s %s | %s | %s %s | %s | %s: %s\n", p->op->op, variant, p->label, problem_layout_names[p->layout],
               problem_values_names[p->values], p->op->algorithms[p->algorithm], what, sentence);
}

/* One call in one mode, compared with the oracle. */
static void run_mode(problem *p, rafter_context *context, const char *variant, enum problem_mode mode) {
    if (mode == PROBLEM_BACKWARD && p->sample == 1) {
        problem_solve(p, PROBLEM_FORWARD);
        problem_store_outputs(p);
        problem_solve(p, PROBLEM_BACKWARD);
    }
    problem_poison(p, mode);
    const rafter_status status = problem_call(p, context, mode);
    if (status != RAFTER_OK) {
        char text[600];
        snprintf(text, sizeof text, "%s (%s)", rafter_status_name(status), rafter_last_error(context));
        verdict(false, p, variant, problem_mode_names[mode], text);
        return;
    }
    if (mode != PROBLEM_BACKWARD || p->sample > 1)
        problem_solve(p, mode);
    const struct problem_verdict v = problem_compare(p, mode);
    verdict(v.good, p, variant, problem_mode_names[mode], v.sentence);
}

/* The same bits again, and from other numbers of threads. */
static void run_bitwise(problem *p, rafter_context *contexts[], int count, const char *variant, enum problem_mode mode,
                        uint64_t *bits) {
    uint64_t first = 0;
    for (int i = 0; i < count; i++) {
        problem_poison(p, mode);
        if (problem_call(p, contexts[i], mode) != RAFTER_OK)
            return; /* reported by run_mode */
        const uint64_t digest = problem_digest(p, mode);
        if (i == 0)
            first = digest;
        else if (digest != first)
            verdict(false, p, variant, problem_mode_names[mode], "bits depend on the number of threads or the run");
    }
    *bits = first;
    verdict(true, p, variant, problem_mode_names[mode], "");
}

static bool succeeds(problem *p, rafter_context *context, const char *variant, enum problem_mode mode,
                     const char *what) {
    const rafter_status status = problem_call(p, context, mode);
    if (status != RAFTER_OK)
        verdict(false, p, variant, what, rafter_last_error(context));
    return status == RAFTER_OK;
}

/* In a workspace of the size that was asked for, badly aligned, the call gives the same bits without the allocator,
 * which this context's has none; in one byte less it is refused. */
static void run_in_workspace(problem *p, rafter_context *context, const char *variant, enum problem_mode mode,
                             uint64_t bits) {
    enum { ALIGNED = 64, GARBAGE = 0xff };
    if (mode == PROBLEM_BOTH && p->op->algorithm_modes[p->algorithm] != 1u << PROBLEM_BOTH)
        return; /* two calls */
    const struct rafter_cuda *const cuda = context->cuda;
    size_t bytes = 0;
    p->ask = &bytes;
    const bool told = succeeds(p, context, variant, mode, "asking for the workspace");
    p->ask = NULL;
    if (!told)
        return;
    char *const memory =
        cuda ? cuda->allocate(bytes + ALIGNED) : aligned_alloc(ALIGNED, (bytes + ALIGNED) / 64 * 64 + 64);
    if (memory && cuda)
        cuda->fill(context, memory, GARBAGE, bytes + ALIGNED);
    else if (memory)
        memset(memory, GARBAGE, bytes + ALIGNED);
    p->workspace = bytes ? memory + 1 : NULL;
    p->workspace_bytes = bytes;
    problem_poison(p, mode);
    if (succeeds(p, context, variant, mode, "a call in its workspace"))
        verdict(problem_digest(p, mode) == bits, p, variant, "a call in its workspace", "its bits are others");
    if (bytes > 0) {
        p->workspace_bytes = bytes - 1;
        const rafter_status status = problem_call(p, context, mode);
        const bool refused = status == RAFTER_WORKSPACE_TOO_SMALL && strstr(rafter_last_error(context), "workspace");
        verdict(refused, p, variant, "one byte less than asked for", rafter_status_name(status));
    }
    p->workspace = NULL;
    p->workspace_bytes = 0;
    if (cuda)
        cuda->release(memory);
    else
        free(memory);
}

static DLDevice device = {kDLCPU, 0};

static void *allocate_nothing(void *user, size_t bytes) {
    (void)user, (void)bytes;
    return NULL;
}

static void release_nothing(void *user, void *memory, size_t bytes) {
    (void)user, (void)memory, (void)bytes;
}

static rafter_context *context_with(const char *variant, int threads, bool allocates) {
    rafter_context_options options = {.size = sizeof options, .device = device, .variant = variant, .threads = threads};
    if (!allocates) {
        options.allocate = allocate_nothing;
        options.release = release_nothing;
    }
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        const bool skip = device.device_type == kDLCUDA;
        printf("%s: %s\n", skip ? "skipped" : "no context", rafter_last_error(NULL));
        exit(skip ? 77 : 2);
    }
    return context;
}

static void walk_problem(const struct op_cases *op, int64_t index, const char *variant, rafter_context *contexts[],
                         int count, rafter_context *without_memory) {
    for (int layout = 0; layout < PROBLEM_LAYOUTS; layout++)
        for (int values = 0; values < PROBLEM_VALUES; values++)
            for (int algorithm = 0; op->algorithms[algorithm]; algorithm++) {
                if (layout != PROBLEM_COMPACT && values != PROBLEM_ORDINARY)
                    continue;
                problem p = {.op = op,
                             .layout = (enum problem_layout)layout,
                             .values = (enum problem_values)values,
                             .algorithm = algorithm};
                op->make(&p, index);
                if (p.large || !problem_has_layout(&p, p.layout) || !problem_adapt(&p))
                    continue;
                const bool common =
                    values == PROBLEM_ORDINARY && (layout == PROBLEM_COMPACT || layout == PROBLEM_UNALIGNED);
                if (p.for_cuda && !(device.device_type == kDLCUDA && common))
                    continue;
                if (!problem_allocate(&p, (uint64_t)index * 7919 + 1)) {
                    verdict(false, &p, variant, "allocation", "no memory");
                    continue;
                }
                for (int mode = 0; mode < PROBLEM_MODES; mode++)
                    if (op->algorithm_modes[algorithm] >> mode & 1) {
                        run_mode(&p, contexts[1], variant, (enum problem_mode)mode);
                        if (layout == PROBLEM_COMPACT && values == PROBLEM_ORDINARY) {
                            uint64_t bits = 0;
                            run_bitwise(&p, contexts, p.for_cuda ? 2 : count, variant, (enum problem_mode)mode, &bits);
                            run_in_workspace(&p, without_memory, variant, (enum problem_mode)mode, bits);
                        }
                    }
                problem_free(&p);
            }
}

static void walk_large(const struct op_cases *op, int64_t index) {
    problem p = {.op = op};
    op->make(&p, index);
    if (!p.large)
        return;
    rafter_context *context = context_with(NULL, 0, true);
    printf("%s: %s\n", op->op, p.label);
    fflush(stdout);
    if (problem_allocate(&p, 1)) {
        run_mode(&p, context, "auto", PROBLEM_FORWARD);
        if (op->algorithm_modes[0] >> PROBLEM_BACKWARD & 1)
            run_mode(&p, context, "auto", PROBLEM_BACKWARD);
    } else {
        verdict(false, &p, "auto", "allocation", "no memory");
    }
    problem_free(&p);
    rafter_context_destroy(context);
}

static void walk_finite_differences(const struct op_cases *op, int64_t index) {
    problem p = {.op = op};
    op->make(&p, index);
    if (!p.finite_differences || !problem_allocate(&p, (uint64_t)index + 5))
        return;
    const double error = problem_finite_differences(&p);
    char text[64];
    snprintf(text, sizeof text, "off by %.3g of the gradient's size", error);
    verdict(error < 1e-6, &p, "oracle", "finite differences", text);
    problem_free(&p);
}

static void walk_op(const struct op_cases *op, bool large, const char *only_variant, int64_t every, int64_t from) {
    if (large) {
        for (int64_t i = 0; i < op->count(); i++)
            walk_large(op, i);
        return;
    }
    int64_t differences = passed;
    for (int64_t i = 0; i < op->count() && from == 0; i++)
        walk_finite_differences(op, i);
    differences = passed - differences;
    verdict(differences > 0 || from > 0, &(problem){.op = op}, "oracle", "finite differences",
            "no problem is small enough for them");
    const bool cuda = device.device_type == kDLCUDA;
    const char *variant;
    for (int v = 0; (variant = cuda ? (v == 0 ? "cuda" : NULL) : rafter_op_variant(op->op, v)); v++) {
        if (only_variant && strcmp(variant, only_variant) != 0)
            continue;
        const char *forced = cuda ? NULL : variant;
        rafter_context *contexts[] = {context_with(forced, 1, true), context_with(forced, 2, true),
                                      context_with(forced, 3, true), context_with(forced, 2, true)};
        rafter_context *without_memory = context_with(forced, 2, false);
        enum { COUNT = sizeof contexts / sizeof *contexts };
        const int64_t before = passed + failed;
        for (int64_t i = from; i < op->count(); i += every)
            walk_problem(op, i, variant, contexts, COUNT, without_memory);
        printf("%-22s %-11s %lld checks\n", op->op, variant, (long long)(passed + failed - before));
        fflush(stdout);
        for (int i = 0; i < COUNT; i++)
            rafter_context_destroy(contexts[i]);
        rafter_context_destroy(without_memory);
    }
}

int main(int argc, char **argv) {
    /* Idle threads must sleep, not spin: three of them share what may be two cores. The runtime reads this when it is
     * loaded, so start over with it. */
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    unsetenv("RAFTER_VARIANT"); /* it would win over the variants forced here */
    bool large = false, named = false;
    const char *variant = NULL;
    long long every = 1, from = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--large") == 0)
            large = true;
        else if (strcmp(argv[i], "--variant") == 0 && i + 1 < argc)
            variant = argv[++i];
        else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc)
            every = atoll(argv[++i]);
        else if (strcmp(argv[i], "--from") == 0 && i + 1 < argc)
            from = atoll(argv[++i]);
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device.device_type = strcmp(argv[++i], "cuda") == 0 ? kDLCUDA : kDLCPU;
        else
            named = true;
    }
    for (int o = 0; problem_ops[o]; o++) {
        bool wanted = !named;
        for (int i = 1; i < argc; i++)
            wanted |= strcmp(argv[i], problem_ops[o]->op) == 0;
        if (wanted)
            walk_op(problem_ops[o], large, variant, every > 1 ? every : 1, from > 0 ? from : 0);
    }
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0 || passed == 0;
}
