/*
 * The walk: every op x problem x layout x special value x variant x direction against the fp64 oracle; bitwise equality
 * over repeats and over 1, 2 and 3 threads; finite differences of the oracle itself.
 *
 *     test_walk [OP ...] [--large] [--variant NAME] [--device cuda]
 *
 * --large runs only the problems past 2^31 elements, one variant (the best), once. --device cuda runs the same problems
 * there; where there is no such device it says so and exits with 77, which ctest counts as skipped.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
static void run_bitwise(problem *p, rafter_context *contexts[], int count, const char *variant,
                        enum problem_mode mode) {
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
    verdict(true, p, variant, problem_mode_names[mode], "");
}

static DLDevice device = {kDLCPU, 0};

static rafter_context *context_with(const char *variant, int threads) {
    const rafter_context_options options = {
        .size = sizeof options, .device = device, .variant = variant, .threads = threads};
    rafter_context *context = NULL;
    if (rafter_context_create(&context, &options) != RAFTER_OK) {
        if (device.device_type == kDLCUDA) {
            printf("no CUDA device here, or no librafter_cuda: skipped\n");
            exit(77);
        }
        fprintf(stderr, "no context for variant %s\n", variant ? variant : "auto");
        exit(2);
    }
    return context;
}

static void walk_problem(const struct op_cases *op, int64_t index, const char *variant, rafter_context *contexts[],
                         int count) {
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
                if (p.large || !problem_has_layout(&p, p.layout))
                    continue;
                if (!problem_allocate(&p, (uint64_t)index * 7919 + 1)) {
                    verdict(false, &p, variant, "allocation", "no memory");
                    continue;
                }
                for (int mode = 0; mode < PROBLEM_MODES; mode++)
                    if (op->algorithm_modes[algorithm] >> mode & 1) {
                        run_mode(&p, contexts[1], variant, (enum problem_mode)mode);
                        if (layout == PROBLEM_COMPACT && values == PROBLEM_ORDINARY)
                            run_bitwise(&p, contexts, count, variant, (enum problem_mode)mode);
                    }
                problem_free(&p);
            }
}

static void walk_large(const struct op_cases *op, int64_t index) {
    problem p = {.op = op};
    op->make(&p, index);
    if (!p.large)
        return;
    rafter_context *context = context_with(NULL, 0);
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

static void walk_op(const struct op_cases *op, bool large, const char *only_variant) {
    if (large) {
        for (int64_t i = 0; i < op->count(); i++)
            walk_large(op, i);
        return;
    }
    int64_t differences = passed;
    for (int64_t i = 0; i < op->count(); i++)
        walk_finite_differences(op, i);
    differences = passed - differences;
    verdict(differences > 0, &(problem){.op = op}, "oracle", "finite differences",
            "no problem is small enough for them");
    const bool cuda = device.device_type == kDLCUDA;
    const char *variant;
    for (int v = 0; (variant = cuda ? (v == 0 ? "cuda" : NULL) : rafter_op_variant(op->op, v)); v++) {
        if (only_variant && strcmp(variant, only_variant) != 0)
            continue;
        const char *forced = cuda ? NULL : variant;
        rafter_context *contexts[] = {context_with(forced, 1), context_with(forced, 2), context_with(forced, 3),
                                      context_with(forced, 2)};
        enum { COUNT = sizeof contexts / sizeof *contexts };
        const int64_t before = passed + failed;
        for (int64_t i = 0; i < op->count(); i++)
            walk_problem(op, i, variant, contexts, COUNT);
        printf("%-22s %-11s %lld checks\n", op->op, variant, (long long)(passed + failed - before));
        fflush(stdout);
        for (int i = 0; i < COUNT; i++)
            rafter_context_destroy(contexts[i]);
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
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--large") == 0)
            large = true;
        else if (strcmp(argv[i], "--variant") == 0 && i + 1 < argc)
            variant = argv[++i];
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
            walk_op(problem_ops[o], large, variant);
    }
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0 || passed == 0;
}
