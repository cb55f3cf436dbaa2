/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/problem.h"

#include <stdio.h>
#include <string.h>

#include "harness/internal.h"
#include "harness/variants.h"

const char *const problem_mode_names[] = {"fwd", "bwd", "fwd+bwd"};
const char *const problem_layout_names[] = {"compact", "guarded",    "unaligned",
                                            "padded",  "transposed", "expanded",
                                            "crossed", "broadcast",  [PROBLEM_SHUFFLED] = "shuffled"};
const char *const problem_values_names[] = {"ordinary", "huge", "-inf", "+inf", "nan"};
const char *const problem_act_names[] = {"none", "relu", "sigmoid", "silu", "softmax"};
const char *const problem_softmax_over_names[] = {"feature", "sequence"};
const char *const problem_reduction_names[] = {"mean", "sum", "none"};

const struct op_cases *const problem_ops[] = {
#define RAFTER_OP(name) &rafter_cases_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
    NULL};

bool problem_adapt(problem *p) {
    return !p->op->adapt || p->op->adapt(p);
}

bool problem_writes(const problem_tensor *t, enum problem_mode mode) {
    return (t->role == PROBLEM_OUTPUT && mode != PROBLEM_BACKWARD) ||
           (t->role == PROBLEM_GRADIENT && mode != PROBLEM_FORWARD);
}

bool problem_is_one_call(const problem *p, enum problem_mode mode) {
    return mode != PROBLEM_BOTH || p->op->one_call >> p->algorithm & 1;
}

rafter_status problem_ask(problem *p, rafter_context *context, enum problem_mode mode, size_t *bytes) {
    p->ask = bytes;
    const rafter_status status = p->op->call(p, context, mode);
    p->ask = NULL;
    return status;
}

/* The variant that one call takes; "" if none. */
static const char *taken_by(problem *p, rafter_context *context, enum problem_mode mode) {
    size_t bytes = 0;
    const char *name = problem_ask(p, context, mode, &bytes) == RAFTER_OK ? variant_taken(context) : NULL;
    return name ? name : "";
}

void problem_variant(problem *p, rafter_context *context, enum problem_mode mode, char *text, size_t size) {
    if (problem_is_one_call(p, mode)) {
        snprintf(text, size, "%s", taken_by(p, context, mode));
        return;
    }
    const char *const forward = taken_by(p, context, PROBLEM_FORWARD);
    const char *const backward = taken_by(p, context, PROBLEM_BACKWARD);
    const bool same = strcmp(forward, backward) == 0;
    snprintf(text, size, "%s%s%s", forward, same ? "" : "+", same ? "" : backward);
}
