/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on several streams at once. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "parts.h"

/* Calls on two streams at once give the same bits as alone. The second op runs backward if it has
 * one. */
void test_two_streams(const struct op_cases *a, const struct op_cases *b) {
    enum { ROUNDS = 20 };
    struct party one = {.context = NULL}, other = {.context = NULL};
    const bool has_backward = b->algorithm_modes[0] >> PROBLEM_BACKWARD & 1;
    if (join(&one, a, PROBLEM_FORWARD) && join(&other, b, has_backward ? PROBLEM_BACKWARD : PROBLEM_FORWARD) &&
        problem_to_device(&one.p, one.context, one.mode) && problem_to_device(&other.p, other.context, other.mode)) {
        bool good = true;
        for (int round = 0; round < ROUNDS && good; round++)
            good = one.p.op->call(&one.p, one.context, one.mode) == RAFTER_OK &&
                   other.p.op->call(&other.p, other.context, other.mode) == RAFTER_OK;
        good = good && problem_from_device(&one.p, one.context) && problem_from_device(&other.p, other.context);
        expect(good && problem_digest(&one.p, one.mode) == one.bits, "%s %s beside %s: the bits differ", a->op,
               one.p.label, b->op);
        expect(good && problem_digest(&other.p, other.mode) == other.bits, "%s %s beside %s: the bits differ", b->op,
               other.p.label, a->op);
    }
    leave(&one);
    leave(&other);
}

static void on_alarm(int signal) {
    (void)signal;
    static const char words[] = "FAIL blocks have waited for each other for a minute\n";
    if (write(STDOUT_FILENO, words, sizeof words - 1) > 0)
        _exit(1);
    _exit(2);
}

/* Kernels whose blocks wait for each other finish even if other kernels, also of a higher priority,
 * take their places on the GPU. */
void test_waiting_blocks(void) {
    enum { ROUNDS = 100, MINUTE = 60 };
    struct line waiting, urgent, filler;
    open_line(&waiting, RAFTER_ACT_SOFTMAX, gpu_new_stream(false));
    open_line(&urgent, RAFTER_ACT_SOFTMAX, gpu_new_stream(true));
    open_line(&filler, RAFTER_ACT_SILU, gpu_new_stream(false));
    signal(SIGALRM, on_alarm);
    alarm(MINUTE);
    for (int round = 0; round < ROUNDS; round++) {
        struct line *const turn[] = {&filler, &waiting, &urgent};
        for (int i = 0; i < 3; i++)
            expect(rafter_act_forward(turn[i]->context, &turn[i]->args) == RAFTER_OK, "%s",
                   rafter_last_error(turn[i]->context));
    }
    expect(gpu_synchronize(waiting.context) && gpu_synchronize(urgent.context) && gpu_synchronize(filler.context),
           "the device failed");
    alarm(0);
    uint16_t results[2][LINE / (1 << 15)];
    const uint16_t want = (127 - 25) << 7; /* 2^-25 in bf16 */
    for (int i = 0; i < LINE / (1 << 15); i++) {
        gpu_copy(&results[0][i], waiting.gpu_y + ((size_t)i << 15), sizeof want);
        gpu_copy(&results[1][i], urgent.gpu_y + ((size_t)i << 15), sizeof want);
        expect(results[0][i] == want && results[1][i] == want, "a softmax beside another is wrong at %d", i << 15);
    }
    close_line(&waiting);
    close_line(&urgent);
    close_line(&filler);
}

/* linear_cross_entropy whose products are so long that clusters are kept in lockstep. */
enum { LONG_ROWS = 8192, LONG_DEPTH = 1024, LONG_CLASSES = 147456 };

struct product {
    DLTensor dx, dweight, loss;
    rafter_linear_cross_entropy_args args;
    rafter_context *context;
};

/* Compares dx and dweight with the kept bits of another call, or keeps them. */
static void expect_same(const struct product *product, uint16_t *kept, bool keep, const char *what) {
    const size_t sizes[] = {(size_t)LONG_ROWS * LONG_DEPTH, (size_t)LONG_CLASSES * LONG_DEPTH};
    const DLTensor *const results[] = {&product->dx, &product->dweight};
    uint16_t *const got = malloc(sizes[1] * sizeof *got);
    for (int i = 0; i < 2 && got; kept += sizes[i++]) {
        gpu_copy(keep ? kept : got, results[i]->data, sizes[i] * sizeof *got);
        if (!keep)
            expect(memcmp(got, kept, sizes[i] * sizeof *got) == 0, "%s: the bits of %s differ", what,
                   i ? "dweight" : "dx");
    }
    free(got);
}

/* Clusters in lockstep finish, with the same results, even if not all of them are running: beside
 * another such call, and beside kernels of a higher priority. */
void test_long_products(void) {
    enum { ROUNDS = 3, MINUTE = 60, CALLS = 2 };
    int64_t shape_x[2] = {LONG_ROWS, LONG_DEPTH}, shape_w[2] = {LONG_CLASSES, LONG_DEPTH}, rows[1] = {LONG_ROWS};
    const size_t x_size = (size_t)LONG_ROWS * LONG_DEPTH, w_size = (size_t)LONG_CLASSES * LONG_DEPTH;
    uint16_t *const host = malloc((x_size + w_size) * sizeof *host);
    int64_t *const labels = malloc(LONG_ROWS * sizeof *labels);
    struct gpu_facts facts;
    struct line urgent;
    open_line(&urgent, RAFTER_ACT_SOFTMAX, gpu_new_stream(true));
    gpu_describe(urgent.context, &facts);
    if (!host || !labels || facts.memory_bytes < (int64_t)24 << 30) {
        close_line(&urgent);
        free(host);
        free(labels);
        return;
    }
    /* Random signs and fractions, magnitudes from 2^-3 to 2^0. */
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
        rafter_context *const own = open_on(gpu_new_stream(false));
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
               gpu_synchronize(calls[0].context),
           "%s", rafter_last_error(calls[0].context));
    expect_same(&calls[0], host, true, "alone");
    for (int i = 0; i < CALLS; i++)
        gpu_fill(calls[i].context, calls[i].dweight.data, 0xff, w_size * sizeof *host);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CALLS; i++)
            expect(rafter_linear_cross_entropy_forward(calls[i].context, &calls[i].args) == RAFTER_OK, "%s",
                   rafter_last_error(calls[i].context));
        for (int i = 0; i < 20; i++)
            rafter_act_forward(urgent.context, &urgent.args);
    }
    for (int i = 0; i < CALLS; i++) {
        expect(gpu_synchronize(calls[i].context), "the device failed");
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
