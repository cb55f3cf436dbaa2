/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on several streams at once. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "parts.h"

/* The op's largest problem that fits among others and writes over none of its inputs. */
static bool largest_problem(const struct op_cases *op, problem *largest) {
    double most = 0;
    for (int64_t index = 0; index < op->count(); index++) {
        problem p = {.op = op};
        op->make(&p, index);
        double elements = 0;
        bool in_place = false;
        for (int i = 0; i < p.tensors; i++) {
            elements += (double)p.tensor[i].numel;
            in_place |= p.tensor[i].in_place_of != NULL || p.tensor[i].accumulates;
        }
        if (!p.large && !in_place && elements > most) {
            most = elements;
            *largest = p;
        }
    }
    return most > 0;
}

struct party {
    problem p;
    rafter_context *context;
    enum problem_mode mode;
    uint64_t bits;
};

static bool join(struct party *party, const struct op_cases *op, enum problem_mode mode) {
    party->mode = mode;
    if (!largest_problem(op, &party->p) || !problem_allocate(&party->p, 3))
        return false;
    problem_solve(&party->p, PROBLEM_FORWARD);
    problem_store_outputs(&party->p);
    party->context = open_context();
    problem_poison(&party->p, mode);
    if (problem_call(&party->p, party->context, mode) != RAFTER_OK) /* alone */
        return false;
    party->bits = problem_digest(&party->p, mode);
    problem_poison(&party->p, mode);
    return true;
}

static void leave(struct party *party) {
    if (!party->context)
        return;
    problem_leave_device(&party->p, party->context);
    close_context(party->context);
    problem_free(&party->p);
}

/* Calls on two streams at once give the bits that each gives alone. */
void test_two_streams(const struct op_cases *a, const struct op_cases *b) {
    enum { ROUNDS = 20 };
    struct party one = {.context = NULL}, other = {.context = NULL};
    if (join(&one, a, PROBLEM_FORWARD) && join(&other, b, PROBLEM_BACKWARD) &&
        problem_to_device(&one.p, one.context, one.mode) && problem_to_device(&other.p, other.context, other.mode)) {
        bool good = true;
        for (int round = 0; round < ROUNDS && good; round++)
            good = one.p.op->call(&one.p, one.context, one.mode) == RAFTER_OK &&
                   other.p.op->call(&other.p, other.context, other.mode) == RAFTER_OK;
        good = good && problem_from_device(&one.p, one.context) && problem_from_device(&other.p, other.context);
        expect(good && problem_digest(&one.p, one.mode) == one.bits, "%s %s beside %s: the bits are others", a->op,
               one.p.label, b->op);
        expect(good && problem_digest(&other.p, other.mode) == other.bits, "%s %s beside %s: the bits are others",
               b->op, other.p.label, a->op);
    }
    leave(&one);
    leave(&other);
}

/* A softmax of one line, so long that its blocks fill the GPU and meet; or any other act of so many elements. */
enum { LINE = 1 << 25 };

struct line {
    int64_t shape[1];
    uint16_t *x_there, *y_there;
    DLTensor x, y;
    rafter_act_args args;
    rafter_context *context;
};

static void open_line(struct line *line, rafter_act_kind kind, bool urgent) {
    *line = (struct line){.shape = {LINE}, .context = open_on(cuda->stream(urgent))};
    line->x_there = cuda->allocate(sizeof(uint16_t) * LINE);
    line->y_there = cuda->allocate(sizeof(uint16_t) * LINE);
    line->x = rafter_tensor(line->x_there, RAFTER_BF16, 1, line->shape);
    line->y = rafter_tensor(line->y_there, RAFTER_BF16, 1, line->shape);
    line->x.device = line->y.device = line->context->device;
    line->args = (rafter_act_args){.size = sizeof line->args, .kind = kind, .x = &line->x, .y = &line->y};
    cuda->fill(line->context, line->x_there, 0, sizeof(uint16_t) * LINE);
    cuda->fill(line->context, line->y_there, 0xff, sizeof(uint16_t) * LINE);
    cuda->synchronize(line->context);
}

static void close_line(struct line *line) {
    cuda->release(line->x_there);
    cuda->release(line->y_there);
    close_context(line->context);
}

static void on_alarm(int signal) {
    (void)signal;
    static const char words[] = "FAIL blocks have waited for each other for a minute\n";
    if (write(STDOUT_FILENO, words, sizeof words - 1) > 0)
        _exit(1);
    _exit(2);
}

/* Kernels whose blocks wait for each other go on to the end though others, of a higher priority too, take their places
 * on the GPU. */
void test_meetings(void) {
    enum { ROUNDS = 100, MINUTE = 60 };
    struct line meeting, urgent, filler;
    open_line(&meeting, RAFTER_ACT_SOFTMAX, false);
    open_line(&urgent, RAFTER_ACT_SOFTMAX, true);
    open_line(&filler, RAFTER_ACT_SILU, false);
    signal(SIGALRM, on_alarm);
    alarm(MINUTE);
    for (int round = 0; round < ROUNDS; round++) {
        struct line *const turn[] = {&filler, &meeting, &urgent};
        for (int i = 0; i < 3; i++)
            expect(rafter_act_forward(turn[i]->context, &turn[i]->args) == RAFTER_OK, "%s",
                   rafter_last_error(turn[i]->context));
    }
    expect(cuda->synchronize(meeting.context) && cuda->synchronize(urgent.context) && cuda->synchronize(filler.context),
           "the device failed");
    alarm(0);
    uint16_t results[2][LINE / (1 << 15)];
    const uint16_t want = (127 - 25) << 7; /* 2^-25 in bf16 */
    for (int i = 0; i < LINE / (1 << 15); i++) {
        cuda->copy(&results[0][i], meeting.y_there + ((size_t)i << 15), sizeof want);
        cuda->copy(&results[1][i], urgent.y_there + ((size_t)i << 15), sizeof want);
        expect(results[0][i] == want && results[1][i] == want, "a softmax beside another is wrong at %d", i << 15);
    }
    close_line(&meeting);
    close_line(&urgent);
    close_line(&filler);
}

/* linear_cross_entropy whose products are so long that clusters keep pace with each other. */
enum { LONG_ROWS = 8192, LONG_DEPTH = 1024, LONG_CLASSES = 147456 };

struct product {
    DLTensor dx, dweight, loss;
    rafter_linear_cross_entropy_args args;
    rafter_context *context;
};

/* dx and dweight, compared with what another has, or kept as that. */
static void expect_same(const struct product *product, uint16_t *kept, bool keep, const char *what) {
    const size_t sizes[] = {(size_t)LONG_ROWS * LONG_DEPTH, (size_t)LONG_CLASSES * LONG_DEPTH};
    const DLTensor *const results[] = {&product->dx, &product->dweight};
    uint16_t *const got = malloc(sizes[1] * sizeof *got);
    for (int i = 0; i < 2 && got; kept += sizes[i++]) {
        cuda->copy(keep ? kept : got, results[i]->data, sizes[i] * sizeof *got);
        if (!keep)
            expect(memcmp(got, kept, sizes[i] * sizeof *got) == 0, "%s: %s has other bits", what, i ? "dweight" : "dx");
    }
    free(got);
}

/* Clusters that keep pace go on, and to the same results, though not all of them are running: beside another call
 * like it, and what is more urgent. */
void test_long_products(void) {
    enum { ROUNDS = 3, MINUTE = 60, CALLS = 2 };
    int64_t shape_x[2] = {LONG_ROWS, LONG_DEPTH}, shape_w[2] = {LONG_CLASSES, LONG_DEPTH}, rows[1] = {LONG_ROWS};
    const size_t x_size = (size_t)LONG_ROWS * LONG_DEPTH, w_size = (size_t)LONG_CLASSES * LONG_DEPTH;
    uint16_t *const host = malloc((x_size + w_size) * sizeof *host);
    int64_t *const labels = malloc(LONG_ROWS * sizeof *labels);
    struct rafter_cuda_facts facts;
    struct line urgent;
    open_line(&urgent, RAFTER_ACT_SOFTMAX, true);
    cuda->facts(urgent.context, &facts);
    if (!host || !labels || facts.memory_bytes < (int64_t)24 << 30) {
        close_line(&urgent);
        free(host);
        free(labels);
        return;
    }
    /* Signs, and 2^-3 to 2^0 with a random fraction: near enough to anything. */
    for (size_t i = 0; i < x_size + w_size; i++) {
        const uint64_t bits = problem_mix(i);
        host[i] = (uint16_t)((bits & 0x80ff) + (124 << 7) + (bits >> 16 & 0x80));
    }
    for (int64_t i = 0; i < LONG_ROWS; i++)
        labels[i] = (int64_t)(problem_mix((uint64_t)i + 7) % LONG_CLASSES);
    DLTensor x = on_device(urgent.context, host, RAFTER_BF16, 2, shape_x, x_size * sizeof *host);
    DLTensor weight = on_device(urgent.context, host + x_size, RAFTER_BF16, 2, shape_w, w_size * sizeof *host);
    DLTensor target = on_device(urgent.context, labels, RAFTER_I64, 1, rows, LONG_ROWS * sizeof *labels);
    struct product calls[CALLS];
    const rafter_loss_options options = {.size = sizeof options, .logit_scale = 1.0f / 32};
    for (int i = 0; i < CALLS; i++) {
        rafter_context *const own = open_on(cuda->stream(false));
        calls[i] = (struct product){.dx = on_device(own, NULL, RAFTER_BF16, 2, shape_x, x_size * sizeof *host),
                                    .dweight = on_device(own, NULL, RAFTER_BF16, 2, shape_w, w_size * sizeof *host),
                                    .loss = on_device(own, NULL, RAFTER_F32, 0, NULL, sizeof(float)),
                                    .context = own};
        calls[i].args = (rafter_linear_cross_entropy_args){.size = sizeof calls[i].args,
                                                           .options = &options,
                                                           .x = &x,
                                                           .weight = &weight,
                                                           .target = &target,
                                                           .loss = &calls[i].loss,
                                                           .dx = &calls[i].dx,
                                                           .dweight = &calls[i].dweight};
    }
    signal(SIGALRM, on_alarm);
    alarm(MINUTE);
    expect(rafter_linear_cross_entropy_forward(calls[0].context, &calls[0].args) == RAFTER_OK &&
               cuda->synchronize(calls[0].context),
           "%s", rafter_last_error(calls[0].context));
    expect_same(&calls[0], host, true, "alone");
    for (int i = 0; i < CALLS; i++)
        cuda->fill(calls[i].context, calls[i].dweight.data, 0xff, w_size * sizeof *host);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CALLS; i++)
            expect(rafter_linear_cross_entropy_forward(calls[i].context, &calls[i].args) == RAFTER_OK, "%s",
                   rafter_last_error(calls[i].context));
        for (int i = 0; i < 20; i++)
            rafter_act_forward(urgent.context, &urgent.args);
    }
    for (int i = 0; i < CALLS; i++) {
        expect(cuda->synchronize(calls[i].context), "the device failed");
        expect_same(&calls[i], host, false, "a long product beside another");
    }
    alarm(0);
    for (int i = 0; i < CALLS; i++) {
        const DLTensor *const results[] = {&calls[i].dx, &calls[i].dweight, &calls[i].loss};
        release_all(results, sizeof results / sizeof *results);
        close_context(calls[i].context);
    }
    const DLTensor *const inputs[] = {&x, &weight, &target};
    release_all(inputs, sizeof inputs / sizeof *inputs);
    close_line(&urgent);
    free(host);
    free(labels);
}
