/* SPDX-License-Identifier: Apache-2.0 */
/* The rafter command with providers that misbehave in different ways; command.sh checks the
 * consequences. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "provider.h"

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)provider, (void)p, (void)mode;
    return true;
}

/* The library's result with one element changed. */
static bool spoil(struct session *s, double *seconds) {
    const bool good = provider_rafter.time(s, seconds);
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (problem_writes(t, s->mode)) {
            memset(t->tensor.data, 0x41, tensor_bytes(t) / (size_t)t->numel); /* 12.1 in fp32 and bf16 */
            break;
        }
    }
    return good;
}

/* The library's gradient of cross entropy, in bf16, correct at the labels and constant elsewhere,
 * as if all logits were 0. */
static bool flatten(struct session *s, double *seconds) {
    const bool good = provider_rafter.time(s, seconds);
    const problem_tensor *t = problem_find(&s->problem, "dlogits");
    uint16_t each, *element = t->tensor.data;
    problem_store(RAFTER_BF16, (char *)&each, 1 / (double)t->numel);
    for (int64_t i = 0; i < t->numel; i++)
        if (!(element[i] >> 15))
            element[i] = each;
    return good;
}

static bool run_rafter(struct session *s, double *seconds) {
    return provider_rafter.time(s, seconds);
}

/* The library, plus a millisecond if RAFTER_TEST_SLOW is set. */
static bool run_slowly(struct session *s, double *seconds) {
    const bool good = provider_rafter.time(s, seconds);
    *seconds += getenv("RAFTER_TEST_SLOW") ? 1e-3 : 0;
    return good;
}

static bool crash(struct session *s, double *seconds) {
    (void)s, (void)seconds;
    return raise(SIGILL) == 0;
}

static bool hang_on_open(struct session *s) {
    (void)s;
    while (pause())
        ;
    return true;
}

/* Ends the connection with the bench, but lives. */
static bool close_and_hang(struct session *s) {
    for (int fd = STDERR_FILENO + 1; fd < 1024; fd++)
        close(fd);
    return hang_on_open(s);
}

/* Dies in the second call; the first is the one that is checked. */
static bool die_later(struct session *s, double *seconds) {
    if (s->state)
        raise(SIGKILL);
    s->state = s;
    return provider_rafter.time(s, seconds);
}

static bool refuse(struct session *s) {
    return session_fail(s, "not today");
}

static const struct provider spoiled = {.name = "spoiled", .serves = serves, .time = spoil};
/* The same, but held to the library's bounds. */
static const struct provider askew = {.name = "askew", .exact = true, .serves = serves, .time = spoil};
static const struct provider flat = {.name = "flat", .serves = serves, .time = flatten};
static const struct provider crashing = {.name = "crashing", .isolated = true, .serves = serves, .time = crash};
static const struct provider hanging = {
    .name = "hanging", .isolated = true, .limit = 0.5, .serves = serves, .open = hang_on_open, .time = crash};
static const struct provider closing = {
    .name = "closing", .isolated = true, .serves = serves, .open = close_and_hang, .time = crash};
static const struct provider dying = {.name = "dying", .isolated = true, .serves = serves, .time = die_later};
static const struct provider refusing = {.name = "refusing", .serves = serves, .open = refuse, .time = crash};
static const struct provider sluggish = {.name = "sluggish", .exact = true, .serves = serves, .time = run_slowly};
/* The library in a child process, where it must be as correct as in this one. */
static const struct provider apart = {
    .name = "apart", .exact = true, .isolated = true, .serves = serves, .time = run_rafter};

const struct provider *const providers[] = {&provider_rafter,
                                            &spoiled,
                                            &askew,
                                            &flat,
                                            &crashing,
                                            &dying,
                                            &refusing,
                                            &apart,
                                            &hanging,
                                            &closing,
                                            &sluggish,
#define RAFTER_PEER(column, has, early) &provider_##column,
#include "peers.inc"
#undef RAFTER_PEER
                                            NULL};
