/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/naive.h"

/* torch.logsumexp is m + log(sum(exp(x - m))) with m = amax(x): four operations over memory, with
 * one temporary of x's size. Its backward is exp(x - lse) * dlse: three operations. */
enum { DIFFERENCE, LARGEST };

static bool serves(const problem *p, enum problem_mode mode) {
    (void)mode;
    const problem_tensor *x = problem_find(p, "x"), *lse = problem_find(p, "lse");
    return lse->dtype == RAFTER_F32 && !problem_find(p, "rounded") && problem_dim(p, x->ndim) == x->ndim - 1;
}

struct sizes {
    int64_t rows, length;
};

static struct sizes sizes_of(const struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x");
    return (struct sizes){x->numel / x->shape[x->ndim - 1], x->shape[x->ndim - 1]};
}

static struct naive_array difference(struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x");
    return (struct naive_array){x->dtype, naive_slot(n, DIFFERENCE, (size_t)x->numel * naive_bytes(x->dtype))};
}

/* to = x - shift, with one shift per row. */
static void subtract(const struct naive *n, struct sizes s, struct naive_array to, struct naive_array x,
                     const float *shift) {
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++)
        naive_row_linear(to, x, row * s.length, s.length, 1, shift[row]);
}

static void exponential(float *y, const float *x, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        y[i] = expf(x[i]);
}

static void forward(struct naive *n) {
    const struct sizes s = sizes_of(n);
    const struct naive_array x = naive_array(n, "x"), t = difference(n);
    float *largest = naive_slot(n, LARGEST, (size_t)s.rows * 4), *lse = naive_data(n, "lse");
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++)
        largest[row] = naive_row_max(x, row * s.length, s.length);
    subtract(n, s, t, x, largest);
    naive_pointwise(n, s.rows * s.length, t, t, (struct naive_array){0}, exponential);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++)
        lse[row] = largest[row] + logf(naive_row_sum(t, row * s.length, s.length));
}

static void backward(struct naive *n) {
    const struct sizes s = sizes_of(n);
    const struct naive_array x = naive_array(n, "x"), dx = naive_array(n, "dx"), dlse = naive_array(n, "dlse");
    const struct naive_array t = difference(n);
    subtract(n, s, t, x, naive_data(n, "lse"));
    naive_pointwise(n, s.rows * s.length, t, t, (struct naive_array){0}, exponential);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++) {
        float upstream;
        naive_load(&upstream, dlse.dtype, dlse.data, row, 1);
        naive_row_linear(dx, t, row * s.length, s.length, upstream, 0);
    }
}

const struct naive_op NAIVE_OP(logsumexp) = {.serves = serves, .forward = forward, .backward = backward};
