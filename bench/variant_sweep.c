/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times every variant that serves a call, over a grid of row lengths and row counts on a GPU, and shows where another
 * variant is faster than the library's choice. `rafter bench --preset map --variants` asks the same of random calls of
 * every layout and option; this grid is denser where most calls are: contiguous rows.
 *
 *     rafter_variant_sweep [--padding P] [--most-log2 L] [--all]
 *
 * --padding: elements between the rows of the input (0). --most-log2: of a tensor's elements (31; half as many in fp32).
 * --all prints every call, not only those with a faster variant, and the time of each variant. Device microseconds,
 * medians, variants in turns, caches cold.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/variants.h"
#include "row_calls.h"

enum { REPEATS = 7 };
static const double worth_telling = 1.05, least_difference = 0.5; /* times the fastest; microseconds */
static const double hopeless = 4;                                 /* times the choice: not timed again */

static rafter_context *choice; /* the library chooses */
static struct pace pace;

struct candidate {
    const char *name;
    rafter_context *context;
    struct samples samples;
    bool serves;
};

/* The contexts of an op: the library's choice, then one for each variant that the device runs. */
static int open_candidates(const char *op, struct candidate *candidates) {
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    int count = 1;
    candidates[0] = (struct candidate){.name = "auto", .context = choice};
    const char *name, *reason;
    for (int i = 0; rafter_describe_variant(choice, op, i, &name, &reason); i++) {
        rafter_context *const context = reason ? NULL : variant_context(name, options);
        if (context)
            candidates[count++] = (struct candidate){.name = name, .context = context};
    }
    return count;
}

/* Returns the median in microseconds; 0 if the variant was not timed. */
static double median_of(struct candidate *candidate) {
    return candidate->serves && candidate->samples.count > 0 ? 1e6 * samples_summary(&candidate->samples).median : 0;
}

static void time_candidates(struct candidate *candidates, int count, const struct row_call *call,
                            const struct row_tensors *tensors) {
    for (int c = 0; c < count; c++)
        candidates[c].serves = true;
    double expected = 0;
    for (int i = -1; i < REPEATS; i++)
        for (int c = 0; c < count; c++) {
            struct candidate *const candidate = &candidates[c];
            if (!candidate->serves)
                continue;
            const double time = row_call_seconds(&pace, candidate->context, call, tensors);
            if (c == 0)
                expected = time;
            candidate->serves = time >= 0 && (c == 0 || time <= hopeless * expected);
            if (candidate->serves && i >= 0)
                samples_add(&candidate->samples, time);
        }
}

/* Returns whether another variant is faster. */
static bool report(struct candidate *candidates, int count, const struct row_call *call, const struct row_shape *shape,
                   bool all) {
    const double chosen = median_of(&candidates[0]);
    int best = 0;
    for (int c = 1; c < count; c++) {
        const double time = median_of(&candidates[c]);
        if (time > 0 && (best == 0 || time < median_of(&candidates[best])))
            best = c;
    }
    const double fastest = best ? median_of(&candidates[best]) : chosen;
    const char *const taken = variant_taken(choice);
    const bool slow = chosen > worth_telling * fastest && chosen - fastest > least_difference;
    if (slow || all) {
        printf("%5.2f %-24s %s [%lld, %lld] %s %.1f, %s %.1f", fastest > 0 ? chosen / fastest : 0, call->name,
               shape->dtype == RAFTER_F32 ? "fp32" : "bf16", (long long)shape->rows, (long long)shape->length,
               taken ? taken : "-", chosen, best ? candidates[best].name : "-", fastest);
        for (int c = 1; all && c < count; c++)
            if (median_of(&candidates[c]) > 0)
                printf(" | %s %.1f", candidates[c].name, median_of(&candidates[c]));
        putchar('\n');
    }
    fflush(stdout);
    return slow;
}

static bool sweep_call(const struct row_call *call, const struct row_shape *shape, struct candidate *candidates,
                       int count, bool all) {
    struct row_tensors tensors;
    row_tensors_open(&tensors, choice, shape);
    time_candidates(candidates, count, call, &tensors);
    const bool slow = report(candidates, count, call, shape, all);
    for (int c = 0; c < count; c++)
        samples_free(&candidates[c].samples);
    row_tensors_close(&tensors, choice);
    return slow;
}

int main(int argc, char **argv) {
    int64_t padding = 0;
    int most_log2 = 31;
    bool all = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--padding") == 0 && i + 1 < argc)
            padding = atoll(argv[++i]);
        else if (strcmp(argv[i], "--most-log2") == 0 && i + 1 < argc)
            most_log2 = atoi(argv[++i]);
        else if (strcmp(argv[i], "--all") == 0)
            all = true;
        else {
            fprintf(stderr, "rafter_variant_sweep: unknown argument '%s'\n", argv[i]);
            return 2;
        }
    }
    const rafter_context_options options = {.size = sizeof options, .device = {kDLCUDA, 0}};
    choice = variant_context(NULL, options);
    if (!choice) {
        fprintf(stderr, "%s\n", rafter_last_error(NULL));
        return 77;
    }
    if (!pace_create(&pace, false, choice)) {
        fprintf(stderr, "no memory on the GPU\n");
        return 1;
    }
    static const int64_t lengths[] = {64,   100,  128,  256,  257,  512,  768,  1000, 1024,
                                      1536, 2048, 2053, 3072, 4096, 5000, 6144, 8192, 12288};
    const struct row_call *calls[] = {&row_calls[0], &smoothed_cross_entropy, &row_calls[1], &row_calls[2],
                                      &row_calls[3], &logsumexp_backward,     &row_calls[4], &row_calls[5]};
    int made = 0, slow = 0;
    printf("times the fastest variant | call, the library's choice, us | the fastest, us\n");
    for (size_t k = 0; k < sizeof calls / sizeof *calls; k++) {
        struct candidate candidates[1 + VARIANTS_MOST] = {{0}};
        const int count = open_candidates(calls[k]->op, candidates);
        for (int fp32 = 0; fp32 < 2; fp32++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
                for (int log2 = most_log2 - fp32; log2 >= 20; log2 -= 3) {
                    const struct row_shape shape = {.dtype = fp32 ? RAFTER_F32 : RAFTER_BF16,
                                                    .rows = ((int64_t)1 << log2) / lengths[l],
                                                    .length = lengths[l],
                                                    .padding = padding};
                    made++;
                    slow += sweep_call(calls[k], &shape, candidates, count, all);
                }
        for (int c = 1; c < count; c++)
            rafter_context_destroy(candidates[c].context);
    }
    printf("in %d of %d calls another variant is faster by more than 5 %%\n", slow, made);
    pace_destroy(&pace, choice);
    rafter_context_destroy(choice);
    return 0;
}
