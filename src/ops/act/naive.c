/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/activations_naive.h"

static bool serves(const problem *p, enum problem_mode mode) {
    (void)p, (void)mode;
    return true;
}

static struct naive_softmax_shape softmax_shape(const problem *p, const problem_tensor *x) {
    return naive_softmax_shape(x->ndim, x->shape, problem_dim(p, x->ndim));
}

static void forward(struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x");
    const struct naive_array from = naive_array(n, "x"), to = naive_array(n, "y");
    const struct naive_activation *f = naive_activation(n->problem);
    if (f)
        naive_pointwise(n, x->numel, to, from, (struct naive_array){0}, f->forward);
    else if (n->problem->options.act == RAFTER_ACT_SOFTMAX)
        naive_softmax(n, softmax_shape(n->problem, x), to, from);
    else if (to.data != from.data)
        memcpy(to.data, from.data, (size_t)x->numel * naive_bytes(x->dtype));
}

static void backward(struct naive *n) {
    const problem_tensor *dx = problem_find(n->problem, "dx");
    const struct naive_array to = naive_array(n, "dx"), upstream = naive_array(n, "dy");
    const struct naive_activation *f = naive_activation(n->problem);
    if (f)
        naive_pointwise(n, dx->numel, to, upstream, naive_array(n, f->kept), f->backward);
    else if (n->problem->options.act == RAFTER_ACT_SOFTMAX)
        naive_softmax_backward(n, softmax_shape(n->problem, dx), to, upstream, naive_array(n, "y"));
    else if (to.data != upstream.data)
        memcpy(to.data, upstream.data, (size_t)dx->numel * naive_bytes(dx->dtype));
}

const struct naive_op NAIVE_OP(act) = {.serves = serves, .forward = forward, .backward = backward};
