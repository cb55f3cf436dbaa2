/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss_naive.h"

enum { LOGP, DLOGP };

static int64_t classes_of(const struct naive *n) {
    const problem_tensor *z = problem_find(n->problem, "logits");
    return z->shape[z->ndim - 1];
}

/* A temporary with the shape and dtype of the logits. */
static struct naive_array like_logits(struct naive *n, int slot) {
    const problem_tensor *z = problem_find(n->problem, "logits");
    return (struct naive_array){z->dtype, naive_slot(n, slot, (size_t)z->numel * naive_bytes(z->dtype))};
}

static bool serves(const problem *p, enum problem_mode mode) {
    (void)mode;
    return naive_loss_serves(p);
}

static void log_softmax(struct naive *n, float *lse) {
    const int64_t rows = problem_find(n->problem, "target")->numel;
    naive_log_softmax(n, rows, classes_of(n), like_logits(n, LOGP), naive_array(n, "logits"), lse);
}

static void save(struct naive *n) {
    log_softmax(n, NULL);
}

static void forward(struct naive *n) {
    log_softmax(n, naive_lse(n));
    naive_nll(n, classes_of(n), like_logits(n, LOGP));
}

static void backward(struct naive *n) {
    naive_loss_backward(n, classes_of(n), naive_array(n, "dlogits"), like_logits(n, DLOGP), like_logits(n, LOGP));
}

const struct naive_op NAIVE_OP(cross_entropy) = {
    .serves = serves, .save = save, .forward = forward, .backward = backward};
