/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a group that make different calls of logsumexp or softmax: the results are NaN on every rank,
 * and rafter_bad_labels() says so, once. */
#include <math.h>

#include "harness/loopback.h"
#include "parts.h"

enum { RANKS = 2, LINES = 5, LENGTH = 24 };

enum call { LOGSUMEXP, LOGSUMEXP_BF16, SOFTMAX, SOFTMAX_BACKWARD };

struct rank {
    enum call call;
    rafter_context *context;
    struct loopback *wire;
    rafter_status status, told, told_again;
    float first; /* of its results */
};

static void make_call(void *arg, int r) {
    struct rank *const own = (struct rank *)arg + r;
    const bool lse = own->call == LOGSUMEXP || own->call == LOGSUMEXP_BF16;
    const rafter_dtype dtype = own->call == LOGSUMEXP_BF16 ? RAFTER_BF16 : RAFTER_F32;
    int64_t shape[] = {LINES, LENGTH}, lines[] = {LINES};
    static const float zeros[LINES * LENGTH];
    DLTensor x = on_device(own->context, zeros, dtype, 2, shape, sizeof zeros),
             y = on_device(own->context, zeros, RAFTER_F32, lse ? 1 : 2, lse ? lines : shape, sizeof zeros),
             dx = on_device(own->context, zeros, RAFTER_F32, 2, shape, sizeof zeros);
    const rafter_communicator group = loopback_rank(own->wire, r, own->context);
    const rafter_logsumexp_args of_lse = {.size = sizeof of_lse, .dim = 1, .x = &x, .lse = &y, .group = &group};
    const rafter_act_args of_softmax = {.size = sizeof of_softmax,
                                        .kind = RAFTER_ACT_SOFTMAX,
                                        .dim = 1,
                                        .x = &x,
                                        .y = &y,
                                        .dy = &x,
                                        .dx = &dx,
                                        .group = &group};
    own->status = lse                    ? rafter_logsumexp_forward(own->context, &of_lse)
                  : own->call == SOFTMAX ? rafter_act_forward(own->context, &of_softmax)
                                         : rafter_act_backward(own->context, &of_softmax);
    int32_t found = 0;
    own->told = rafter_bad_labels(own->context, &found);
    own->told_again = rafter_bad_labels(own->context, &found);
    gpu_copy(&own->first, own->call == SOFTMAX_BACKWARD ? dx.data : y.data, sizeof own->first);
    const DLTensor *const all[] = {&x, &y, &dx};
    release_all(all, 3);
}

/* The calls of rank 0 and rank 1. */
static void run_ranks(const char *name, enum call first, enum call second) {
    struct rank ranks[RANKS] = {{.call = first}, {.call = second}};
    struct loopback *const wire = loopback_new(RANKS);
    for (int r = 0; r < RANKS; r++) {
        ranks[r].context = open_context();
        ranks[r].wire = wire;
    }
    loopback_run(RANKS, make_call, ranks);
    for (int r = 0; r < RANKS; r++) {
        const struct rank *const own = &ranks[r];
        const bool differ = first != second;
        expect(own->status == RAFTER_OK, "%s: rank %d: %s", name, r, rafter_last_error(own->context));
        expect(own->told == (differ ? RAFTER_RANKS_DISAGREE : RAFTER_OK) && own->told_again == RAFTER_OK,
               "%s: rank %d: rafter_bad_labels says %s, then %s", name, r, rafter_status_name(own->told),
               rafter_status_name(own->told_again));
        expect((isnan(own->first) != 0) == differ, "%s: rank %d has %g", name, r, (double)own->first);
        close_context(own->context);
    }
    loopback_free(wire);
}

void test_ranks(void) {
    run_ranks("logsumexp of fp32, and of bf16", LOGSUMEXP, LOGSUMEXP_BF16);
    run_ranks("softmax, forward and backward", SOFTMAX, SOFTMAX_BACKWARD);
    run_ranks("two equal calls of logsumexp", LOGSUMEXP, LOGSUMEXP);
    run_ranks("two equal calls of softmax", SOFTMAX, SOFTMAX);
}
