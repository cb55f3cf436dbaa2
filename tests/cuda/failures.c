/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every call that the CUDA backend makes of the CUDA runtime, cuBLASLt or malloc fails once: when a
 * context is created, and in a few problems of every variant. Whatever failed, the library returns
 * an error with a sentence, or the right result; nothing leaks; and the next call on the same
 * context gives the right result.
 *
 *     test_cuda_failures [--pretend] [OP...]
 *
 * --pretend needs no GPU: kernels do not run, and only statuses, messages, the choice of variants
 * and leaks are checked. Every failure then has a process of its own, in which the library has not
 * been used before. Without a GPU and without --pretend the test prints why and exits with 77.
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "failing_runtime.h"
#include "few.h"
#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/variants.h"

static struct failing_runtime *runtime;
static int64_t passed, failed;

static void expect(bool good, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void expect(bool good, const char *format, ...) {
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
    fflush(stdout);
}

/* The k-th call from here on fails; 0: none does. */
static void watch(int k) {
    *runtime =
        (struct failing_runtime){.pretend = runtime->pretend, .live = runtime->live, .watched = 1, .fails_at = k};
}

/* Whether the failure came. */
static bool unwatch(void) {
    runtime->watched = 0;
    return runtime->failed != NULL;
}

static rafter_context *new_context(const char *variant) {
    return variant_context(variant, (rafter_context_options){.device = {kDLCUDA, 0}});
}

/* Every call of the creation fails. Returns how many there are. */
static int test_creation(void) {
    for (int k = 1;; k++) {
        const int live = runtime->live;
        watch(k);
        rafter_context *context = NULL;
        const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
        const rafter_status status = rafter_context_create(&context, &options);
        const bool reached = unwatch();
        if (!reached) {
            rafter_context_destroy(context);
            expect(status == RAFTER_OK && runtime->live == live, "a context: %s", rafter_last_error(NULL));
            return k - 1;
        }
        const char *const sentence = rafter_last_error(NULL);
        expect((status == RAFTER_OK) == (context != NULL), "%s failed: a status of %s", runtime->failed,
               rafter_status_name(status));
        expect(status == RAFTER_OK || (*sentence && !strstr(sentence, "context is NULL")),
               "%s failed: the sentence is '%s'", runtime->failed, sentence);
        rafter_context_destroy(context);
        expect(runtime->live == live, "%s failed in a creation: %d things are left", runtime->failed,
               runtime->live - live);
    }
}

/* A call, and a digest of what it wrote. */
static rafter_status call(problem *p, rafter_context *context, enum problem_mode mode, bool watched, int k,
                          uint64_t *bits) {
    rafter_status status = RAFTER_OUT_OF_MEMORY;
    *bits = 0;
    if (runtime->pretend) {
        few_pretend(p, context);
        if (watched)
            watch(k);
        status = p->op->call(p, context, mode);
        if (watched)
            unwatch();
        return status;
    }
    problem_poison(p, mode);
    if (problem_to_device(p, context, mode)) {
        if (watched)
            watch(k);
        status = p->op->call(p, context, mode);
        if (watched)
            unwatch();
        /* Wait also for a call that failed: some of its kernels may run. */
        if (!problem_from_device(p, context))
            status = RAFTER_DEVICE_ERROR;
    }
    problem_leave_device(p);
    *bits = problem_digest(p, mode);
    return status;
}

struct usual {
    const char *variant;
    uint64_t bits;
};

/* Call number k of the backend fails in this call. False: it makes fewer. */
static bool test_failure(problem *p, const struct few_problem *which, const struct usual *usual, int k) {
    const int live = runtime->live;
    uint64_t bits = 0, again = 0;
    rafter_context *const context = new_context(usual->variant);
    if (!context) {
        expect(false, "%s: %s", usual->variant, rafter_last_error(NULL));
        return false;
    }
    const rafter_status status = call(p, context, which->mode, true, k, &bits);
    const bool reached = runtime->failed != NULL;
    const int late = runtime->late;
    const char *const failing = reached ? runtime->failed : "nothing";
    char name[256];
    snprintf(name, sizeof name, "%s %s %s %s, %s (number %d) failed", p->op->op, usual->variant, p->label,
             problem_mode_names[which->mode], failing, k);
    expect(late == 0, "%s: %d kernels were launched after that", name, late);
    if (status == RAFTER_OK)
        expect(bits == usual->bits, "%s: other results", name);
    else
        expect(reached && rafter_last_error(context)[0] != '\0', "%s: %s, '%s'", name, rafter_status_name(status),
               rafter_last_error(context));
    const rafter_status second = call(p, context, which->mode, false, 0, &again);
    expect(second == RAFTER_OK && again == usual->bits, "%s: the next call returns %s (%s)%s", name,
           rafter_status_name(second), rafter_last_error(context), again == usual->bits ? "" : ", other results");
    rafter_context_destroy(context);
    expect(runtime->live == live, "%s: %d things are left", name, runtime->live - live);
    return reached;
}

/* test_failure in a process of its own. */
static bool test_failure_apart(problem *p, const struct few_problem *which, const struct usual *usual, int k) {
    enum { REACHED = 1, BAD = 2 };
    const pid_t child = fork();
    if (child == 0) {
        const int64_t before = failed;
        const bool reached = test_failure(p, which, usual, k);
        _exit((reached ? REACHED : 0) | (failed > before ? BAD : 0));
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status), "%s %s %s: signal %d when call %d failed", p->op->op, usual->variant, p->label,
           WTERMSIG(status), k);
    if (!WIFEXITED(status))
        return false;
    failed += (WEXITSTATUS(status) & BAD) != 0; /* the child has printed it */
    return WEXITSTATUS(status) & REACHED;
}

static void test_problem(const struct op_cases *op, const struct few_problem *which, const char *variant) {
    problem p;
    if (!few_make(op, which, &p) || !(runtime->pretend ? problem_reserve(&p) : problem_allocate(&p, 1)))
        return;
    struct usual usual = {variant, 0};
    if (!runtime->pretend) {
        rafter_context *const context = new_context(variant);
        if (which->mode == PROBLEM_BACKWARD)
            problem_prepare_backward(&p);
        const rafter_status status = call(&p, context, which->mode, false, 0, &usual.bits);
        expect(status == RAFTER_OK, "%s %s: %s", variant, p.label, rafter_last_error(context));
        rafter_context_destroy(context);
    }
    int k = 1;
    while (runtime->pretend ? test_failure_apart(&p, which, &usual, k) : test_failure(&p, which, &usual, k))
        k++;
    problem_free(&p);
}

/* In a process of its own, so that this one has never asked a variant. */
static int find_problems(const struct op_cases *op, const char *variant, struct few_problem *found) {
    const int wanted = runtime->pretend ? 1 : 2; /* per mode */
    int both[2];
    if (!runtime->pretend || pipe(both) != 0) {
        rafter_context *const context = new_context(variant);
        const int count = context ? few_problems(op, context, wanted, found) : 0;
        rafter_context_destroy(context);
        return count;
    }
    if (fork() == 0) {
        rafter_context *const context = new_context(variant);
        const int count = context ? few_problems(op, context, wanted, found) : 0;
        const ssize_t bytes = (ssize_t)((size_t)count * sizeof *found);
        _exit(write(both[1], found, (size_t)bytes) != bytes);
    }
    close(both[1]);
    const ssize_t bytes = read(both[0], found, PROBLEM_MODES * FEW_MOST * sizeof *found);
    close(both[0]);
    int status;
    wait(&status);
    return bytes > 0 ? (int)((size_t)bytes / sizeof *found) : 0;
}

static void test_op(const struct op_cases *op) {
    struct variant_row row;
    for (int v = 0; variant_row(op->op, kDLCUDA, v, &row); v++) {
        struct few_problem found[PROBLEM_MODES * FEW_MOST];
        const int64_t before = passed + failed;
        const int count = find_problems(op, row.name, found);
        for (int i = 0; i < count; i++)
            test_problem(op, &found[i], row.name);
        printf("%-22s %-28s %d problems, %lld checks\n", op->op, row.name, count,
               (long long)(passed + failed - before));
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    unsetenv("RAFTER_VARIANT");
    setenv("RAFTER_CUDA_LIBRARY", FAILING_LIBRARY, 1);
    setenv("RAFTER_CUBLASLT_LIBRARY", FAILING_LIBRARY, 1);
    void *const library = dlopen(FAILING_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    failing_runtime_entry *entry = NULL;
    if (library)
        *(void **)&entry = dlsym(library, FAILING_RUNTIME_ENTRY);
    if (!entry) {
        printf("FAIL %s\n", dlerror());
        return 1;
    }
    runtime = entry();
    bool named = false;
    for (int i = 1; i < argc; i++) {
        runtime->pretend |= strcmp(argv[i], "--pretend") == 0;
        named |= argv[i][0] != '-';
    }
    if (!runtime->pretend) {
        rafter_context *const context = new_context(NULL);
        if (!context) {
            printf("skipped: %s\n", rafter_last_error(NULL));
            return 77;
        }
        rafter_context_destroy(context);
    }
    printf("a context: %d calls, each of which failed once\n", test_creation());
    for (int o = 0; problem_ops[o]; o++) {
        bool wanted = !named;
        for (int i = 1; i < argc; i++)
            wanted |= strcmp(argv[i], problem_ops[o]->op) == 0;
        if (wanted)
            test_op(problem_ops[o]);
    }
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0 || passed == 0;
}
