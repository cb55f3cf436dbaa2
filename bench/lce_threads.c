/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_cross_entropy on the CPU by threads, bf16, forward + backward, and where its time goes:
 *
 *     rafter_lce_threads [N D V [THREADS...]]     default: 2048 2048 32768, and 1 2 4 8 16
 *
 * First one line per number of threads:
 *     peak     GF/s of the micro-kernel on panels that stay in L1, all threads at once
 *     block    GF/s of the blocks of a product with K = D, each thread on its own operands
 *     copy     GB/s of a copy of 256 MiB, bytes read plus bytes written
 *     ms       median of the calls
 *     share    of the peak at this number of threads
 *     scaling  time with the first number of threads / time with this one
 * Then, for each number of threads, one line per phase of the call:
 *     runs, tasks   of one call
 *     ms            from the start of the phase until its last task ends
 *     idle          share of ms x threads outside tasks: waking, imbalance, waiting
 *     stretch       time inside tasks / the same with the first number of threads: contention
 * `serial` is what the call does outside its phases.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/context.h"
#include "harness/cpu.h"
#include "harness/problem.h"
#include "machine.h"
#include "measure.h"

enum { MOST_COUNTS = 16, CALLS = 3, COPIED = 256 << 20, PIECE = 1 << 20 };

struct result {
    int threads;
    double peak, block, copy, seconds;
    struct rafter_phases phases; /* of all CALLS */
};

static char *from, *to; /* of the copy */

static double measure_copy(int threads) {
    enum { REPEATS = 4 };
    double best = 0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        const double start = clock_seconds();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int i = 0; i < COPIED / PIECE; i++)
            memcpy(to + (size_t)i * PIECE, from + (size_t)i * PIECE, PIECE);
        const double rate = 2.0 * COPIED / (clock_seconds() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

/* Flops per second of the micro-kernel, or of blocks with this K if `depth` is not 0. */
static double measure_matrix(rafter_context *context, int64_t depth) {
    enum { REPEATS = 5 };
    int64_t iterations = 1;
    double best = 0, seconds = 0;
    for (int i = 0; i < REPEATS; i++) {
        do { /* at the first repeat, until one is long enough for the clock */
            const double start = clock_seconds();
            const double flops = depth ? cpu_block_flops(context, RAFTER_BF16, depth, iterations)
                                       : cpu_matrix_flops(context, RAFTER_BF16, iterations);
            seconds = clock_seconds() - start;
            best = flops / seconds > best ? flops / seconds : best;
            iterations *= seconds < 0.02 ? 2 : 1;
        } while (seconds < 0.02);
    }
    return best;
}

static bool call(const problem *p, rafter_context *context) {
    const rafter_status status = p->op->call(p, context, PROBLEM_BOTH);
    if (status != RAFTER_OK)
        fprintf(stderr, "rafter: %s: %s\n", rafter_status_name(status), rafter_last_error(context));
    return status == RAFTER_OK;
}

static bool measure(const problem *p, int64_t depth, struct result *r) {
    rafter_context *context = NULL;
    const rafter_context_options options = {.size = sizeof options, .threads = r->threads};
    if (rafter_context_create(&context, &options) != RAFTER_OK)
        return false;
    r->copy = measure_copy(r->threads);
    r->peak = measure_matrix(context, 0);
    r->block = measure_matrix(context, depth);
    struct samples samples = {0};
    bool good = call(p, context); /* faults in the workspace */
    context_set_phases(context, &r->phases);
    for (int i = 0; good && i < CALLS; i++) {
        const double start = clock_seconds();
        good = call(p, context) && samples_add(&samples, clock_seconds() - start);
    }
    if (good)
        r->seconds = samples_summary(&samples).median;
    samples_free(&samples);
    rafter_context_destroy(context);
    return good;
}

static const struct rafter_phase *find(const struct result *r, const char *name) {
    for (int i = 0; i < r->phases.count; i++)
        if (strcmp(r->phases.phase[i].name, name) == 0)
            return &r->phases.phase[i];
    return NULL;
}

static void print_phases(const struct result *r, const struct result *first) {
    printf("\n%d threads%*s%8s%8s%10s%8s%10s\n", r->threads, 6, "", "runs", "tasks", "ms", "idle", "stretch");
    double inside = 0;
    for (int i = 0; i < r->phases.count; i++) {
        const struct rafter_phase *phase = &r->phases.phase[i], *alone = find(first, phase->name);
        inside += phase->wall / CALLS;
        printf("%-16s%8lld%8lld%10.2f%7.1f%%%10.2f\n", phase->name, (long long)phase->runs / CALLS,
               (long long)phase->tasks / CALLS, 1e3 * phase->wall / CALLS,
               100 * (1 - phase->busy / (phase->wall * r->threads)), alone ? phase->busy / alone->busy : 0.0);
    }
    printf("%-32s%10.2f\n", "serial", 1e3 * (r->seconds - inside));
}

int main(int argc, char **argv) {
    static const int usual[] = {1, 2, 4, 8, 16};
    static struct result result[MOST_COUNTS];
    int count = 0;
    for (int i = 4; i < argc && count < MOST_COUNTS; i++)
        result[count++].threads = atoi(argv[i]);
    for (size_t i = 0; argc < 5 && i < sizeof usual / sizeof *usual; i++)
        result[count++].threads = usual[i];
    const struct problem_request request = {
        .dtype = RAFTER_BF16,
        .ndim = 2,
        .shape = {argc > 3 ? atoll(argv[1]) : 2048, argc > 3 ? atoll(argv[2]) : 2048},
        .classes = argc > 3 ? atoll(argv[3]) : 32768};
    static problem p = {.op = &rafter_cases_linear_cross_entropy};
    const char *wrong = p.op->make_request(&p, &request);
    from = aligned_alloc(64, COPIED), to = aligned_alloc(64, COPIED);
    if (wrong || !from || !to || !problem_allocate(&p, 1)) {
        fprintf(stderr, "rafter: %s\n", wrong ? wrong : "no memory");
        return 1;
    }
    memset(from, 1, COPIED);
    memset(to, 1, COPIED);
    double bytes = 0, flops = 0;
    p.op->cost(&p, PROBLEM_BOTH, &bytes, &flops);
    printf("%s, %d processors, L1 %zu KiB, L2 %zu KiB, L3 %zu KiB\n%s\n", machine_cpu(), machine_processors(),
           machine_cache_level(1) >> 10, machine_cache_level(2) >> 10, machine_cache_level(3) >> 10, p.label);
    printf("%8s%10s%10s%8s%10s%8s%10s\n", "threads", "peak", "block", "copy", "ms", "share", "scaling");
    for (int i = 0; i < count; i++) {
        struct result *const r = &result[i];
        if (r->threads < 1 || !measure(&p, request.shape[1], r)) {
            fprintf(stderr, "rafter: no result with %d threads\n", r->threads);
            return 1;
        }
        printf("%8d%10.0f%10.0f%8.1f%10.1f%7.1f%%%10.2f\n", r->threads, r->peak / 1e9, r->block / 1e9, r->copy / 1e9,
               1e3 * r->seconds, 100 * flops / r->peak / r->seconds, result[0].seconds / r->seconds);
        fflush(stdout);
    }
    for (int i = 0; i < count; i++)
        print_phases(&result[i], &result[0]);
    problem_free(&p);
    free(from);
    free(to);
    return 0;
}
