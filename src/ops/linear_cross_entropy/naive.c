/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/loss_naive.h"

enum { LOGITS, LOGP, DLOGP, DLOGITS };

/* A matrix in memory: element (i, j) is at i * row + j * column. */
struct matrix {
    struct naive_array array;
    int64_t row, column; /* strides */
};

/* c[m, n] = a[m, k] b[k, n], accumulated in fp32, rounded once. Blocks of b are converted to fp32
 * first, so that the inner loop is simple. */
static void multiply(const struct naive *naive, int64_t m, int64_t n, int64_t k, struct matrix c, struct matrix a,
                     struct matrix b) {
    enum { M = 32, N = 128, K = 128 };
    const int64_t across = ceil_div(n, N);
#pragma omp parallel for num_threads(naive->threads) schedule(dynamic, 1)
    for (int64_t tile = 0; tile < across * ceil_div(m, M); tile++) {
        const int64_t i0 = tile / across * M, j0 = tile % across * N;
        const int64_t im = min64(m - i0, M), jn = min64(n - j0, N);
        float sum[M][N] = {{0}}, block[K][N];
        for (int64_t k0 = 0; k0 < k; k0 += K) {
            const int64_t km = min64(k - k0, K);
            if (b.column == 1)
                for (int64_t t = 0; t < km; t++)
                    naive_load(block[t], b.array.dtype, b.array.data, (k0 + t) * b.row + j0, jn);
            else
                for (int64_t j = 0; j < jn; j++) {
                    float line[K];
                    naive_load(line, b.array.dtype, b.array.data, (j0 + j) * b.column + k0, km);
                    for (int64_t t = 0; t < km; t++)
                        block[t][j] = line[t];
                }
            for (int64_t i = 0; i < im; i++) {
                float line[K];
                if (a.column == 1)
                    naive_load(line, a.array.dtype, a.array.data, (i0 + i) * a.row + k0, km);
                else
                    for (int64_t t = 0; t < km; t++)
                        naive_load(&line[t], a.array.dtype, a.array.data, (i0 + i) * a.row + (k0 + t) * a.column, 1);
                for (int64_t t = 0; t < km; t++)
                    for (int64_t j = 0; j < N; j++)
                        sum[i][j] += line[t] * block[t][j];
            }
        }
        for (int64_t i = 0; i < im; i++)
            naive_store(c.array.dtype, c.array.data, (i0 + i) * c.row + j0, sum[i], jn);
    }
}

struct sizes {
    int64_t rows, features, classes;
};

static struct sizes sizes_of(const struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x"), *w = problem_find(n->problem, "weight");
    return (struct sizes){problem_find(n->problem, "target")->numel, x->shape[x->ndim - 1], w->shape[0]};
}

static struct naive_array like_logits(struct naive *n, int slot) {
    const struct sizes s = sizes_of(n);
    const rafter_dtype dtype = problem_find(n->problem, "x")->dtype;
    return (struct naive_array){dtype, naive_slot(n, slot, (size_t)(s.rows * s.classes) * naive_bytes(dtype))};
}

static bool serves(const problem *p, enum problem_mode mode) {
    (void)mode;
    return naive_loss_serves(p);
}

static void log_softmax(struct naive *n, float *lse) {
    const struct sizes s = sizes_of(n);
    multiply(n, s.rows, s.classes, s.features, (struct matrix){like_logits(n, LOGITS), s.classes, 1},
             (struct matrix){naive_array(n, "x"), s.features, 1},
             (struct matrix){naive_array(n, "weight"), 1, s.features});
    naive_log_softmax(n, s.rows, s.classes, like_logits(n, LOGP), like_logits(n, LOGITS), lse);
}

static void save(struct naive *n) {
    log_softmax(n, NULL);
}

static void forward(struct naive *n) {
    log_softmax(n, naive_lse(n));
    naive_nll(n, sizes_of(n).classes, like_logits(n, LOGP));
}

static void backward(struct naive *n) {
    const struct sizes s = sizes_of(n);
    naive_loss_backward(n, s.classes, like_logits(n, DLOGITS), like_logits(n, DLOGP), like_logits(n, LOGP));
    if (problem_find(n->problem, "dx"))
        multiply(n, s.rows, s.features, s.classes, (struct matrix){naive_array(n, "dx"), s.features, 1},
                 (struct matrix){like_logits(n, DLOGITS), s.classes, 1},
                 (struct matrix){naive_array(n, "weight"), s.features, 1});
    if (problem_find(n->problem, "dweight"))
        multiply(n, s.classes, s.features, s.rows, (struct matrix){naive_array(n, "dweight"), s.features, 1},
                 (struct matrix){like_logits(n, DLOGITS), 1, s.classes},
                 (struct matrix){naive_array(n, "x"), s.features, 1});
}

const struct naive_op NAIVE_OP(linear_cross_entropy) = {
    .serves = serves, .save = save, .forward = forward, .backward = backward};
