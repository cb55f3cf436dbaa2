/* SPDX-License-Identifier: Apache-2.0 */
/* The naive baselines, src/ops/<op>/naive.c, at the highest ISA level that this machine runs. */
#include <stdlib.h>
#include <string.h>

#include "harness/cpu.h"
#include "harness/naive.h"
#include "machine.h"
#include "provider.h"

static const struct naive_op *find_op(const char *name) {
    static const struct {
        const char *name;
        const struct naive_op *level[CPU_LEVELS];
    } ops[] = {
#define LEVEL(op, isa) &naive_##op##_##isa,
#define RAFTER_OP(op) {#op, {CPU_LEVEL_LIST(LEVEL, op)}},
#include "ops/ops.inc"
#undef RAFTER_OP
#undef LEVEL
    };
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (strcmp(ops[i].name, name) == 0)
            return ops[i].level[cpu_level()];
    return NULL;
}

void *naive_slot(struct naive *n, int index, size_t bytes) {
    if (n->slot_bytes[index] < bytes) {
        free(n->slot[index]);
        n->slot_bytes[index] = 0;
        const bool fits = bytes < (64 << 20) || bytes < machine_free_memory() / 10 * 8;
        n->slot[index] = fits ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
        if (!n->slot[index])
            longjmp(n->no_memory, 1);
        n->slot_bytes[index] = bytes;
    }
    return n->slot[index];
}

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider;
    const struct naive_op *op = find_op(p->op->op);
    return op && op->serves(p, mode);
}

static bool open_naive(struct session *s) {
    struct naive *n = calloc(1, sizeof *n);
    s->state = n;
    if (!n)
        return session_fail(s, "no memory");
    n->problem = &s->problem;
    n->threads = rafter_context_threads(s->context);
    const struct naive_op *op = find_op(s->problem.op->op);
    if (setjmp(n->no_memory))
        return session_fail(s, "its temporaries do not fit into memory");
    if (s->mode == PROBLEM_BACKWARD && op->save)
        op->save(n);
    return true;
}

static bool call(struct session *s) {
    struct naive *n = s->state;
    const struct naive_op *op = find_op(s->problem.op->op);
    if (setjmp(n->no_memory))
        return session_fail(s, "its temporaries do not fit into memory");
    if (s->mode != PROBLEM_BACKWARD)
        op->forward(n);
    if (s->mode != PROBLEM_FORWARD)
        op->backward(n);
    s->scratch = 0;
    for (int i = 0; i < NAIVE_SLOTS; i++)
        s->scratch += n->slot_bytes[i];
    return true;
}

static bool timed(struct session *s, double *seconds) {
    return time_call(s, call, seconds);
}

static void close_naive(struct session *s) {
    struct naive *n = s->state;
    for (int i = 0; n && i < NAIVE_SLOTS; i++)
        free(n->slot[i]);
    free(n);
    s->state = NULL;
}

const struct provider provider_naive = {
    .name = "naive", .serves = serves, .open = open_naive, .time = timed, .close = close_naive};
