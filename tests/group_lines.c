/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp and softmax over a dimension that is spread over ranks. Part of test_group_calls. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "harness/loopback.h"
#include "harness/problem.h"

void test_logsumexp(void **state);
void test_softmax(void **state);
void test_older_communicator(void **state);

enum { MOST = 4 };

static float noise(uint64_t i) {
    return (float)problem_normal(problem_mix(i));
}

/* ---- logsumexp ------------------------------------------------------------------------------- */

enum { LINES = 7, LENGTH = 50 };

struct lse_world {
    int ranks, dim;
    const int64_t *cut;
    float x[LINES * LENGTH], other[LENGTH * LINES]; /* [LINES, LENGTH], and its transpose */
    struct loopback *wire;
    rafter_context *context[MOST];
    char lse[MOST][LINES * sizeof(float)];
    rafter_status status[MOST];
    char error[MOST][512];
    int64_t odd_lines; /* what rank 1 has fewer of */
};

static void lse_body(void *arg, int r) {
    struct lse_world *const w = arg;
    const int64_t own = w->cut[r + 1] - w->cut[r], lines = LINES - (r == 1 ? w->odd_lines : 0);
    int64_t rows[] = {lines, own}, row_strides[] = {LENGTH, 1}, columns[] = {own, lines}, column_strides[] = {LINES, 1};
    int64_t shape[] = {lines};
    DLTensor x = w->dim == 1 ? rafter_tensor(w->x + w->cut[r], RAFTER_F32, 2, rows)
                             : rafter_tensor(w->other + w->cut[r] * LINES, RAFTER_F32, 2, columns);
    x.strides = w->dim == 1 ? row_strides : column_strides;
    DLTensor lse = rafter_tensor(w->lse[r], RAFTER_F32, 1, shape);
    const rafter_communicator group = loopback_rank(w->wire, r, w->context[r]);
    const rafter_logsumexp_args args = {.size = sizeof args, .x = &x, .dim = w->dim, .lse = &lse, .group = &group};
    w->status[r] = rafter_logsumexp_forward(w->context[r], &args);
    snprintf(w->error[r], sizeof w->error[r], "%s", rafter_last_error(w->context[r]));
}

void test_logsumexp(void **state) {
    (void)state;
    static const int64_t cuts[][MOST + 1] = {{0, 50}, {0, 25, 50}, {0, 1, 1, 50}, {0, 0, 20, 50, 50}};
    static struct lse_world w;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int dim = 0; dim < 2; dim++) {
            w = (struct lse_world){.ranks = ranks, .dim = dim, .cut = cuts[ranks - 1], .wire = loopback_new(ranks)};
            for (int i = 0; i < LINES * LENGTH; i++)
                w.x[i] = 3 * noise((uint64_t)i);
            for (int v = 0; v < LENGTH; v++)
                w.x[LENGTH + v] = -INFINITY; /* line 1 is empty, line 2 infinite, line 3 has a NaN */
            w.x[2 * LENGTH + 30] = INFINITY;
            w.x[3 * LENGTH + 7] = NAN;
            for (int i = 0; i < LINES * LENGTH; i++)
                w.other[i % LENGTH * LINES + i / LENGTH] = w.x[i];
            for (int r = 0; r < ranks; r++)
                assert_int_equal(rafter_context_create(&w.context[r], NULL), RAFTER_OK);
            loopback_run(ranks, lse_body, &w);
            for (int r = 0; r < ranks; r++) {
                assert_int_equal(w.status[r], RAFTER_OK);
                assert_memory_equal(w.lse[r], w.lse[0], sizeof w.lse[r]);
            }
            for (int line = 0; line < LINES; line++) {
                double sum = 0;
                float got;
                memcpy(&got, w.lse[0] + line * (int)sizeof got, sizeof got);
                for (int v = 0; v < LENGTH; v++)
                    sum += exp((double)w.x[line * LENGTH + v]);
                const double want = log(sum);
                assert_true(isnan(want)   ? isnan(got)
                            : isinf(want) ? (double)got == want
                                          : fabs((double)got - want) < 2e-6);
            }
            if (ranks > 1) {
                w.odd_lines = 1;
                loopback_run(ranks, lse_body, &w);
                for (int r = 0; r < ranks; r++) {
                    assert_int_equal(w.status[r], RAFTER_RANKS_DISAGREE);
                    assert_non_null(strstr(w.error[r], "the number of lines is 7 on rank 0 and 6 on rank 1"));
                }
            }
            for (int r = 0; r < ranks; r++)
                rafter_context_destroy(w.context[r]);
            loopback_free(w.wire);
        }
}

/* ---- softmax --------------------------------------------------------------------------------- */

struct softmax_world {
    const int64_t *cut;
    int dim;
    float x[LINES * LENGTH], y[LINES * LENGTH], dy[LINES * LENGTH], dx[LINES * LENGTH]; /* of all ranks */
    struct loopback *wire;
    rafter_context *context[MOST];
    rafter_status status[MOST];
};

/* dim 1: [LINES, LENGTH]; dim 0: [LENGTH, LINES]. */
static void softmax_body(void *arg, int r) {
    struct softmax_world *const w = arg;
    const int64_t own = w->cut[r + 1] - w->cut[r], from = w->dim == 1 ? w->cut[r] : w->cut[r] * LINES;
    int64_t shape[] = {w->dim == 1 ? LINES : own, w->dim == 1 ? own : LINES},
            strides[] = {w->dim == 1 ? LENGTH : LINES, 1};
    DLTensor x = rafter_tensor(w->x + from, RAFTER_F32, 2, shape), y = rafter_tensor(w->y + from, RAFTER_F32, 2, shape);
    DLTensor dy = rafter_tensor(w->dy + from, RAFTER_F32, 2, shape),
             dx = rafter_tensor(w->dx + from, RAFTER_F32, 2, shape);
    x.strides = y.strides = dy.strides = dx.strides = strides;
    const rafter_communicator group = loopback_rank(w->wire, r, w->context[r]);
    const rafter_act_args args = {.size = sizeof args,
                                  .kind = RAFTER_ACT_SOFTMAX,
                                  .dim = w->dim,
                                  .x = &x,
                                  .y = &y,
                                  .dy = &dy,
                                  .dx = &dx,
                                  .group = &group};
    w->status[r] = rafter_act_forward(w->context[r], &args);
    if (w->status[r] == RAFTER_OK)
        w->status[r] = rafter_act_backward(w->context[r], &args);
}

void test_softmax(void **state) {
    (void)state;
    static const int64_t cuts[][MOST + 1] = {{0, 50}, {0, 25, 50}, {0, 1, 1, 50}, {0, 0, 20, 50, 50}};
    static struct softmax_world w;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int dim = 0; dim < 2; dim++) {
            w = (struct softmax_world){.dim = dim, .cut = cuts[ranks - 1]};
            for (int i = 0; i < LINES * LENGTH; i++) {
                w.x[i] = 3 * noise((uint64_t)i);
                w.dy[i] = noise((uint64_t)i + 1000);
            }
            for (int v = 0; v < LENGTH; v++) /* line 1 is all -inf; line 2 has a NaN */
                w.x[dim == 1 ? LENGTH + v : v * LINES + 1] = -INFINITY;
            w.x[dim == 1 ? 2 * LENGTH + 30 : 30 * LINES + 2] = NAN;
            w.wire = loopback_new(ranks);
            for (int r = 0; r < ranks; r++)
                assert_int_equal(rafter_context_create(&w.context[r], NULL), RAFTER_OK);
            loopback_run(ranks, softmax_body, &w);
            for (int r = 0; r < ranks; r++) {
                if (w.status[r] != RAFTER_OK)
                    fail_msg("%s", rafter_last_error(w.context[r]));
                rafter_context_destroy(w.context[r]);
            }
            for (int line = 0; line < LINES; line++) {
                double sum = 0, dot = 0;
                const int step = dim == 1 ? 1 : LINES, first = dim == 1 ? line * LENGTH : line;
                for (int v = 0; v < LENGTH; v++)
                    sum += exp((double)w.x[first + v * step]);
                for (int v = 0; v < LENGTH; v++)
                    dot += exp((double)w.x[first + v * step]) / sum * (double)w.dy[first + v * step];
                for (int v = 0; v < LENGTH; v++) {
                    const int i = first + v * step;
                    const double y = exp((double)w.x[i]) / sum, dx = y * ((double)w.dy[i] - dot);
                    assert_true(isnan(y) ? isnan(w.y[i]) && isnan(w.dx[i])
                                         : fabs((double)w.y[i] - y) < 1e-6 && fabs((double)w.dx[i] - dx) < 1e-6);
                }
            }
            loopback_free(w.wire);
        }
}

/* ---- an older caller's communicator ---------------------------------------------------------- */

/* It ends before the multiprocessors, which are not read. */
void test_older_communicator(void **state) {
    (void)state;
    float data[] = {1, 2, 3}, y[3];
    int64_t shape[] = {3};
    const DLTensor x = rafter_tensor(data, RAFTER_F32, 1, shape), out = rafter_tensor(y, RAFTER_F32, 1, shape);
    struct loopback *const wire = loopback_new(1);
    rafter_context *context = NULL;
    assert_int_equal(rafter_context_create(&context, NULL), RAFTER_OK);
    rafter_communicator group = loopback_rank(wire, 0, context);
    const rafter_act_args args = {.size = sizeof args, .kind = RAFTER_ACT_SOFTMAX, .x = &x, .y = &out, .group = &group};
    group.multiprocessors = -1;
    assert_int_equal(rafter_act_forward(context, &args), RAFTER_INVALID_ARGUMENT);
    assert_non_null(strstr(rafter_last_error(context), "group.multiprocessors is -1, wanted at least 0"));
    group.size = offsetof(rafter_communicator, multiprocessors);
    assert_int_equal(rafter_act_forward(context, &args), RAFTER_OK);
    rafter_context_destroy(context);
    loopback_free(wire);
}
