/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walk: every op x problem x layout x special value x variant x mode against the fp64 oracle;
 * bitwise equality over repeats, over 1, 2 and 3 threads, with results written past the caches, and in a workspace
 * of exactly the reported size; finite differences of the oracle itself.
 *
 *     test_walk [OP ...] [--large] [--variant NAME] [--device cuda] [--every N [--from K] | --each N]
 *               [--others N] [--only TEXT] [--batch-invariant]
 *     test_walk [OP ...] --cells N [--seed S] [--most N] [--variant NAME] [--device cuda]
 *
 * Every variant that this device can run gets every problem; with --others, the first one does, and the
 * others get one in N. A variant may decline a call that it
 * does not serve. On a GPU the library's own choice is walked too, as "auto". The walk prints how
 * many problems each variant served; a walk over all problems and variants fails if a variant
 * served none.
 *
 * --large runs only the problems beyond 2^31 elements, once, with the library's choice. --device
 * cuda runs the same problems on a GPU; without one it prints why and exits with 77, which ctest
 * counts as skipped. --every takes one problem in N, for slow checkers; --from is the first of them
 * (default 0), so that several runs can share the problems. Only the run from 0 checks the oracle
 * by finite differences. --each gives every variant only N problems (at most 16) per mode, the
 * smallest that it serves (tests/few.h), for checkers that are slower still; a variant that serves
 * none fails the walk. --only takes the problems whose label contains TEXT. --batch-invariant: with that option of the contexts; variants that do not have
 * it decline.
 *
 * --cells takes random problems instead of the op's: N of each map of the op (harness/map.h), or of an op without maps,
 * with sizes, layouts and options that nobody has listed, and N of the op's own with random strides. Number i of a seed
 * is the same in every run. --most: elements of x, or multiplications of linear_cross_entropy, about (131072).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/pages.h"
#include "core/sizes.h"
#include "few.h"
#include "harness/context.h"
#include "harness/draw.h"
#include "harness/gpu.h"
#include "harness/map.h"
#include "harness/problem.h"
#include "harness/variants.h"

static int64_t passed, failed;
static DLDevice device = {kDLCPU, 0};
static bool batch_invariant;

/* What the arguments ask for. */
struct selection {
    bool large;
    const char *variant;         /* NULL: all */
    const char *only;            /* part of the label; NULL: all problems */
    int64_t every, from, others; /* others: variants after the first take one problem in so many */
    int64_t each;                /* problems per variant and mode; 0: all */
    int64_t cells, most; /* random problems instead, of about `most` elements or products at most; 0: the op's own */
    uint64_t seed;       /* of the random problems */
};

static void verdict(bool good, const problem *p, const char *variant, const char *what, const char *sentence) {
    if (good) {
        passed++;
        return;
    }
    if (failed++ < 40)
        printf("FAIL %s %s | %s | %s %s | %s | %s: %s\n", p->op->op, variant, p->label, problem_layout_names[p->layout],
               problem_values_names[p->values], p->op->algorithms[p->algorithm], what, sentence);
}

/* ---- variants -------------------------------------------------------------------------------- */

enum { CONTEXTS = 4 };
static const int threads_of[CONTEXTS] = {1, 2, 3, 2};

/* A variant, or the library's choice, with its contexts. */
struct variant {
    const char *name;
    bool automatic;
    rafter_context *context[CONTEXTS];
    rafter_context *without_allocator; /* its allocator always fails */
    int64_t checks, served;            /* served: problems of which it ran at least one call */
};

static void *allocate_nothing(void *user, size_t bytes) {
    (void)user, (void)bytes;
    return NULL;
}

static void release_nothing(void *user, void *memory, size_t bytes) {
    (void)user, (void)memory, (void)bytes;
}

/* `variant`: NULL for the library's choice. */
static rafter_context *open_context(const char *variant, int threads, bool allocates) {
    rafter_context_options options = {.device = device, .threads = threads, .batch_invariant = batch_invariant};
    if (!allocates) {
        options.allocate = allocate_nothing;
        options.release = release_nothing;
    }
    rafter_context *context = variant_context(variant, options);
    if (!context) {
        const bool skip = device.device_type == kDLCUDA;
        printf("%s: %s\n", skip ? "skipped" : "no context", rafter_last_error(NULL));
        exit(skip ? 77 : 2);
    }
    return context;
}

static void open_variant(struct variant *v, const char *name) {
    *v = (struct variant){.name = name ? name : "auto", .automatic = !name};
    for (int i = 0; i < CONTEXTS; i++)
        v->context[i] = open_context(name, threads_of[i], true);
    v->without_allocator = open_context(name, 2, false);
}

static void close_variant(struct variant *v) {
    for (int i = 0; i < CONTEXTS; i++)
        rafter_context_destroy(v->context[i]);
    rafter_context_destroy(v->without_allocator);
}

/* All variants of the op that this device can run, or the one that is named. */
static int open_variants(const char *op, const char *only, struct variant variants[]) {
    int count = 0;
    rafter_context *const any = open_context(NULL, 1, true);
    if (device.device_type == kDLCUDA && (!only || strcmp(only, "auto") == 0))
        open_variant(&variants[count++], NULL);
    const char *name, *reason;
    for (int i = 0; rafter_describe_variant(any, op, i, &name, &reason); i++)
        if (!reason && (!only || strcmp(only, name) == 0))
            open_variant(&variants[count++], name);
    rafter_context_destroy(any);
    return count;
}

/* ---- one call -------------------------------------------------------------------------------- */

/* One call in one mode, compared with the oracle. False: the variant declined it, or it failed. */
static bool run_mode(problem *p, rafter_context *context, const char *variant, enum problem_mode mode,
                     struct problem_solution *solution) {
    if (mode == PROBLEM_BACKWARD && !solution->solved) {
        problem_prepare_backward(p);
        problem_solve_once(p, PROBLEM_BACKWARD, solution);
    }
    problem_poison(p, mode);
    const rafter_status status = problem_call(p, context, mode);
    if (variant_declined(context, status))
        return false;
    if (status != RAFTER_OK) {
        char text[600];
        snprintf(text, sizeof text, "%s (%s)", rafter_status_name(status), rafter_last_error(context));
        verdict(false, p, variant, problem_mode_names[mode], text);
        return false;
    }
    problem_solve_once(p, mode, solution);
    const struct problem_verdict v = problem_compare(p, mode);
    verdict(v.good, p, variant, problem_mode_names[mode], v.sentence);
    return true;
}

/* The same bits on every repeat and for every number of threads. `count`: how many contexts. */
static void run_bitwise(problem *p, const struct variant *v, int count, enum problem_mode mode, uint64_t *bits) {
    uint64_t first = 0;
    for (int i = 0; i < count; i++) {
        problem_poison(p, mode);
        if (problem_call(p, v->context[i], mode) != RAFTER_OK)
            return; /* reported by run_mode */
        const uint64_t digest = problem_digest(p, mode);
        if (i == 0)
            first = digest;
        else if (digest != first)
            verdict(false, p, v->name, problem_mode_names[mode], "the bits depend on the number of threads or the run");
    }
    *bits = first;
    verdict(true, p, v->name, problem_mode_names[mode], "");
}

static bool succeeds(const problem *p, rafter_context *context, rafter_status status, const char *variant,
                     const char *what) {
    if (status != RAFTER_OK)
        verdict(false, p, variant, what, rafter_last_error(context));
    return status == RAFTER_OK;
}

/* The last call again, with results that are written past the caches, as those of large tensors are: the same bits. */
static void run_streamed(problem *p, const struct variant *v, enum problem_mode mode) {
    const uint64_t bits = problem_digest(p, mode);
    rafter_stream_above(1);
    problem_poison(p, mode);
    const rafter_status status = problem_call(p, v->context[1], mode);
    rafter_stream_above(0);
    if (succeeds(p, v->context[1], status, v->name, "a call with streamed results"))
        verdict(problem_digest(p, mode) == bits, p, v->name, "a call with streamed results", "the bits differ");
}

/* In a workspace of the reported size, misaligned and full of garbage, the call gives the same bits
 * without an allocator. With one byte less it is refused. */
static void run_in_workspace(problem *p, const struct variant *v, enum problem_mode mode, uint64_t bits) {
    enum { ALIGNMENT = 64, GARBAGE = 0xff };
    if (!problem_is_one_call(p, mode))
        return;
    rafter_context *const context = v->without_allocator;
    const bool gpu = context_on_gpu(context);
    size_t bytes = 0;
    /* The question is about tensors of the context's device. */
    const bool moved = !gpu || problem_to_device(p, context, mode);
    const rafter_status asked = moved ? problem_ask(p, context, mode, &bytes) : RAFTER_OUT_OF_MEMORY;
    if (gpu)
        problem_leave_device(p);
    if (!succeeds(p, context, asked, v->name, "asking for the workspace"))
        return;
    const size_t size = (size_t)round_up((int64_t)bytes + ALIGNMENT + 1, ALIGNMENT);
    char *const memory = gpu ? gpu_allocate(size) : aligned_alloc(ALIGNMENT, size);
    if (memory && gpu)
        gpu_fill(context, memory, GARBAGE, size);
    else if (memory)
        memset(memory, GARBAGE, size);
    p->workspace = bytes ? memory + 1 : NULL;
    p->workspace_bytes = bytes;
    problem_poison(p, mode);
    if (succeeds(p, context, problem_call(p, context, mode), v->name, "a call in its workspace"))
        verdict(problem_digest(p, mode) == bits, p, v->name, "a call in its workspace", "the bits differ");
    if (bytes > 0) {
        p->workspace_bytes = bytes - 1;
        const rafter_status status = problem_call(p, context, mode);
        const bool refused = status == RAFTER_WORKSPACE_TOO_SMALL && strstr(rafter_last_error(context), "workspace");
        verdict(refused, p, v->name, "one byte less than the reported workspace", rafter_status_name(status));
    }
    p->workspace = NULL;
    p->workspace_bytes = 0;
    if (gpu)
        gpu_release(memory);
    else
        free(memory);
}

/* ---- problems -------------------------------------------------------------------------------- */

/* Whether a call in this mode has results at all: an in-place forward may have no backward. */
static bool has_results(const problem *p, enum problem_mode mode) {
    for (int i = 0; i < p->tensors; i++)
        if (problem_writes(&p->tensor[i], mode))
            return true;
    return false;
}

/* Whether the variant ran the last call on this context: an empty call runs no variant. */
static bool ran(const struct variant *v, const rafter_context *context) {
    const char *const taken = variant_taken(context);
    return taken && (v->automatic || strcmp(taken, v->name) == 0);
}

/* All modes of an allocated problem, with all variants. */
static void walk_modes(problem *p, struct variant variants[], int count) {
    const bool thorough =
        p->values == PROBLEM_ORDINARY &&
        (p->layout == PROBLEM_COMPACT || p->layout == PROBLEM_CROSSED || p->layout == PROBLEM_BROADCAST);
    bool served[VARIANTS_MOST + 1] = {false};
    for (int m = 0; m < PROBLEM_MODES; m++) {
        const enum problem_mode mode = (enum problem_mode)m;
        if (!(p->op->algorithm_modes[p->algorithm] >> mode & 1) || !has_results(p, mode))
            continue;
        struct problem_solution solution = {false, 0};
        for (int i = 0; i < count; i++) {
            struct variant *const v = &variants[i];
            const int64_t before = passed + failed;
            if (run_mode(p, v->context[1], v->name, mode, &solution)) {
                served[i] |= ran(v, v->context[1]);
                if (p->values == PROBLEM_ORDINARY && device.device_type == kDLCPU)
                    run_streamed(p, v, mode);
                if (thorough) {
                    uint64_t bits = 0;
                    run_bitwise(p, v, p->for_cuda ? 2 : CONTEXTS, mode, &bits);
                    run_in_workspace(p, v, mode, bits);
                }
            }
            v->checks += passed + failed - before;
        }
    }
    for (int i = 0; i < count; i++)
        variants[i].served += served[i];
}

static void walk_problem(const struct op_cases *op, int64_t index, struct variant variants[], int count) {
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
                if (problem_allocate(&p, (uint64_t)index * 7919 + 1))
                    walk_modes(&p, variants, count);
                else
                    verdict(false, &p, "all", "allocation", "no memory");
                problem_free(&p);
            }
}

/* The label ends with the problem's number, which --seed and --cells find again. */
static void walk_drawn(problem *p, const struct selection *s, int64_t index, struct variant variants[], int count) {
    const size_t used = strlen(p->label);
    snprintf(p->label + used, sizeof p->label - used, ", cell %lld of seed %llu", (long long)index,
             (unsigned long long)s->seed);
    if (problem_allocate(p, s->seed + (uint64_t)index))
        walk_modes(p, variants, count);
    else
        verdict(false, p, "all", "allocation", "no memory");
    problem_free(p);
}

static void walk_cells(const struct op_cases *op, const struct selection *s, struct variant variants[], int count) {
    for (int64_t i = 0; i < s->cells; i++) {
        struct dice dice = {problem_mix(s->seed) ^ (uint64_t)i};
        problem p;
        for (int k = 0; k < op->maps; k++) {
            const struct map_cell cell = map_draw_unlisted(op, &op->map[k], s->seed, i, s->most);
            p = (problem){.op = op};
            op->map[k].make(&p, &cell);
            walk_drawn(&p, s, i, variants, count);
        }
        if (op->make_random) {
            draw_without_map(&p, op, &dice, s->most);
            walk_drawn(&p, s, i, variants, count);
        }
        do
            draw_shuffled(&p, op, &dice);
        while (p.for_cuda);
        walk_drawn(&p, s, i, variants, count);
    }
}

static bool label_contains(const struct op_cases *op, int64_t index, const char *text) {
    problem p = {.op = op};
    op->make(&p, index);
    return strstr(p.label, text) != NULL;
}

static void walk_large(const struct op_cases *op, int64_t index) {
    problem p = {.op = op};
    op->make(&p, index);
    if (!p.large)
        return;
    rafter_context *context = open_context(NULL, 0, true);
    printf("%s: %s\n", op->op, p.label);
    fflush(stdout);
    if (problem_allocate(&p, 1)) {
        run_mode(&p, context, "auto", PROBLEM_FORWARD, &(struct problem_solution){false, 0});
        if (op->algorithm_modes[0] >> PROBLEM_BACKWARD & 1)
            run_mode(&p, context, "auto", PROBLEM_BACKWARD, &(struct problem_solution){false, 0});
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

/* The smallest problems that the variant serves. */
static void walk_few(const struct op_cases *op, struct variant *v, int wanted) {
    struct few_problem found[PROBLEM_MODES * FEW_MOST];
    const int count = few_problems(op, v->context[1], wanted, found);
    const int64_t before = passed + failed;
    for (int i = 0; i < count; i++) {
        const enum problem_mode mode = found[i].mode;
        problem p;
        uint64_t bits = 0;
        if (!few_make(op, &found[i], &p) || !has_results(&p, mode) || !problem_allocate(&p, (uint64_t)i + 1))
            continue;
        if (run_mode(&p, v->context[1], v->name, mode, &(struct problem_solution){false, 0})) {
            v->served += ran(v, v->context[1]);
            run_bitwise(&p, v, 1, mode, &bits);
            run_in_workspace(&p, v, mode, bits);
        }
        problem_free(&p);
    }
    v->checks += passed + failed - before;
}

/* ---- ops ------------------------------------------------------------------------------------- */

static void walk_all_finite_differences(const struct op_cases *op) {
    const int64_t before = passed;
    for (int64_t i = 0; i < op->count(); i++)
        walk_finite_differences(op, i);
    const bool has_backward = op->algorithm_modes[0] >> PROBLEM_BACKWARD & 1;
    verdict(passed > before || !has_backward, &(problem){.op = op}, "oracle", "finite differences",
            "no problem is small enough for them");
}

static void walk_op(const struct op_cases *op, const struct selection *s) {
    if (s->large) {
        for (int64_t i = 0; i < op->count(); i++)
            walk_large(op, i);
        return;
    }
    if (s->each == 0 && s->from == 0 && s->cells == 0)
        walk_all_finite_differences(op);
    struct variant variants[VARIANTS_MOST + 1];
    const int count = open_variants(op->op, s->variant, variants);
    walk_cells(op, s, variants, count);
    for (int64_t i = s->from; i < op->count() && s->each == 0 && s->cells == 0; i += s->every)
        if (!s->only || label_contains(op, i, s->only))
            walk_problem(op, i, variants, i % s->others == 0 ? count : 1);
    for (int i = 0; i < count; i++) {
        struct variant *const v = &variants[i];
        if (s->each > 0 && !v->automatic)
            walk_few(op, v, (int)s->each);
        printf("%-22s %-28s served %lld problems, %lld checks\n", op->op, v->name, (long long)v->served,
               (long long)v->checks);
        fflush(stdout); /* if a time limit ends the walk, it has said which variants were done */
        /* Variants for calls of several ranks: tests/groups.c. */
        const bool for_ranks = strcmp(v->name, "hopper_over_ranks") == 0 || strstr(v->name, "over_ranks");
        if (s->every == 1 && s->cells == 0 && !s->only && !batch_invariant && !for_ranks)
            verdict(v->served > 0 || v->automatic, &(problem){.op = op}, v->name, "the whole walk",
                    "the variant served no problem");
        close_variant(v);
    }
}

int main(int argc, char **argv) {
    /* Idle threads must sleep, not spin: the threads of three contexts may share two cores. The
     * runtime reads this variable when it is loaded, so the program starts itself again. */
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    struct selection s = {.every = 1, .others = 1, .most = 1 << 17, .seed = 1};
    bool named = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--large") == 0)
            s.large = true;
        else if (strcmp(argv[i], "--batch-invariant") == 0)
            batch_invariant = true;
        else if (strcmp(argv[i], "--variant") == 0 && i + 1 < argc)
            s.variant = argv[++i];
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            s.only = argv[++i];
        else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc)
            s.every = max64(atoll(argv[++i]), 1);
        else if (strcmp(argv[i], "--others") == 0 && i + 1 < argc)
            s.others = max64(atoll(argv[++i]), 1);
        else if (strcmp(argv[i], "--from") == 0 && i + 1 < argc)
            s.from = max64(atoll(argv[++i]), 0);
        else if (strcmp(argv[i], "--each") == 0 && i + 1 < argc)
            s.each = max64(min64(atoll(argv[++i]), FEW_MOST), 1);
        else if (strcmp(argv[i], "--cells") == 0 && i + 1 < argc)
            s.cells = max64(atoll(argv[++i]), 1);
        else if (strcmp(argv[i], "--most") == 0 && i + 1 < argc)
            s.most = max64(atoll(argv[++i]), 1);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            s.seed = strtoull(argv[++i], NULL, 10);
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
            walk_op(problem_ops[o], &s);
    }
    printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
    return failed > 0 || passed == 0;
}
