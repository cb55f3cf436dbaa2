/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle's results, and the comparison of a call's results with them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/sizes.h"
#include "harness/internal.h"

/* ---- the oracle's results -------------------------------------------------------------------- */

void problem_forget_answers(problem_tensor *t) {
    if (t->list)
        munmap(t->list, t->list_bytes);
    free(t->expected);
    t->expected = NULL;
    t->list = NULL;
    t->listed = 0;
}

/* Marks an element without an expected value: a NaN that no computation produces. */
static const uint64_t unset_bits = 0x7ff4dead4badf00du;

static bool is_unset(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits == unset_bits;
}

void problem_expect(problem_tensor *t, int64_t index, double value) {
    if (!t->list) {
        t->expected[index] = value;
        return;
    }
    int64_t place;
#pragma omp atomic capture
    place = t->listed++;
    if ((size_t)place >= t->list_bytes / sizeof *t->list)
        abort(); /* the oracle gave an element twice */
    t->list[place] = (struct problem_answer){index, value};
}

/* Allocates the expected values: one per element, or, for a sampled oracle, a list. The list has
 * room for every element, but only pages that are written take memory. */
static void expect_answers(problem_tensor *t, bool sampled) {
    problem_forget_answers(t);
    const int64_t numel = max64(t->numel, 1);
    if (sampled) {
        t->list_bytes = (size_t)numel * sizeof *t->list;
        t->list = mmap(NULL, t->list_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (t->list == MAP_FAILED)
            abort();
        return;
    }
    t->expected = malloc(sizeof(double) * (size_t)numel);
    if (!t->expected)
        abort();
    for (int64_t k = 0; k < t->numel; k++)
        memcpy(&t->expected[k], &unset_bits, 8);
}

void problem_solve(problem *p, enum problem_mode mode) {
    for (int i = 0; i < p->tensors; i++)
        if (problem_writes(&p->tensor[i], mode))
            expect_answers(&p->tensor[i], p->sample > 1);
    if (mode != PROBLEM_BACKWARD)
        p->op->oracle(p, PROBLEM_FORWARD);
    if (mode != PROBLEM_FORWARD)
        p->op->oracle(p, PROBLEM_BACKWARD);
}

void problem_solve_once(problem *p, enum problem_mode mode, struct problem_solution *solution) {
    const uint64_t outputs = mode == PROBLEM_BOTH ? problem_digest(p, PROBLEM_FORWARD) : 0;
    if (solution->solved && solution->outputs == outputs)
        return;
    problem_solve(p, mode);
    *solution = (struct problem_solution){true, outputs};
}

void problem_prepare_backward(problem *p) {
    if (p->sample > 1)
        return;
    problem_solve(p, PROBLEM_FORWARD);
    for (int i = 0; i < p->tensors; i++) {
        problem_tensor *t = &p->tensor[i];
        if (t->role == PROBLEM_OUTPUT)
            for (int64_t k = 0; k < t->numel; k++)
                problem_store(t->dtype, problem_address(t, k), t->expected[k]);
    }
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* The error relative to the bound. */
static double judge(const problem_tensor *t, double got, double want) {
    const double rounded = problem_round(t->dtype, want);
    if ((isnan(got) && isnan(want)) || got == rounded)
        return 0;
    if (isnan(got) || isnan(want) || isinf(got) || isinf(want))
        return INFINITY;
    const double error = fabs(got - want), bound = t->absolute + t->relative * fabs(want);
    const double share = bound > 0 ? error / bound : INFINITY;
    if (t->dtype == RAFTER_BF16 || t->dtype == RAFTER_F16)
        return fmin(share, fabs(got - rounded) / problem_unit(t->dtype, rounded));
    return share;
}

static void compare_element(const problem_tensor *t, int64_t index, double want, struct problem_verdict *v) {
    const double got = problem_load(t->dtype, problem_address(t, index));
    const double share = judge(t, got, want), error = fabs(got - want) / fmax(1, fabs(want));
    if (share <= 1 && isfinite(error) && error > v->max_error)
        v->max_error = error;
    if (share > v->worst || (share > 1 && v->good)) {
        v->worst = share;
        if (share > 1) {
            v->good = false;
            snprintf(v->sentence, sizeof v->sentence, "%s[%lld] is %.9g, wanted %.9g (bound %.3g + %.3g relative)",
                     t->name, (long long)index, got, want, t->absolute, t->relative);
        }
    }
}

/* Whether the memory between the elements is as it was filled. */
static bool gaps_intact(const problem_tensor *t, enum problem_layout layout) {
    if ((layout != PROBLEM_PADDED && layout != PROBLEM_SHUFFLED) || !problem_lays_out(t, layout))
        return true;
    bool *const is_element = calloc(t->memory_bytes + 1, sizeof *is_element);
    if (!is_element)
        return false;
    for (int64_t i = 0; i < t->numel; i++)
        memset(is_element + (problem_address(t, i) - t->memory), true, (size_t)problem_dtype_bytes(t->dtype));
    const unsigned char *const byte = (const unsigned char *)t->memory;
    bool intact = true;
    for (size_t b = 0, first = SIZE_MAX; b < t->memory_bytes; b++)
        if (!is_element[b]) {
            first = first == SIZE_MAX ? b : first;
            intact &= byte[b] == byte[first] && (byte[b] == PROBLEM_POISON || byte[b] == PROBLEM_PADDING);
        }
    free(is_element);
    return intact;
}

struct problem_verdict problem_compare(const problem *p, enum problem_mode mode) {
    struct problem_verdict v = {.good = true};
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (!problem_writes(t, mode))
            continue;
        if (t->list)
            for (int64_t k = 0; k < t->listed; k++)
                compare_element(t, t->list[k].index, t->list[k].value, &v);
        else
            for (int64_t k = 0; k < t->numel; k++)
                if (!is_unset(t->expected[k]))
                    compare_element(t, k, t->expected[k], &v);
        if (!t->accumulates && !gaps_intact(t, problem_layout_of(p, t))) {
            v.good = false;
            v.worst = INFINITY;
            snprintf(v.sentence, sizeof v.sentence, "%s: memory between the elements was written", t->name);
        }
    }
    return v;
}

uint64_t problem_digest(const problem *p, enum problem_mode mode) {
    uint64_t digest = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        if (!problem_writes(t, mode))
            continue;
        for (int64_t k = 0; k < t->numel; k++) {
            uint64_t bits = 0;
            memcpy(&bits, problem_address(t, k), (size_t)problem_dtype_bytes(t->dtype));
            digest = problem_mix(digest ^ bits);
        }
    }
    return digest;
}
