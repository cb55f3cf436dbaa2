#include <math.h>

#include "naive/naive.h"

/* torch.logsumexp is m + log(sum(exp(x - m))) with m = amax(x): four operations over memory, one temporary of x's size. Its
 * backward is exp(x - lse) * dlse: three. */
enum { DIFFERENCE, LARGEST };

static bool serves(const problem *p, enum problem_mode mode) {
    (void)mode;
    const problem_tensor *lse = problem_find(p, "lse"); /* the tables reduce the last dimension */
    return lse && lse->dtype == RAFTER_F32;
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

/* to = x - s, with one s a row. */
static void subtract(const struct naive *n, struct sizes s, struct naive_array to, struct naive_array x, const float *shift) {
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t i = 0; i < s.length; i += NAIVE_BLOCK) {
            const int64_t size = s.length - i < NAIVE_BLOCK ? s.length - i : NAIVE_BLOCK;
            float v[NAIVE_BLOCK];
            naive_load(v, x.dtype, x.data, row * s.length + i, size);
            for (int64_t k = 0; k < size; k++)
                v[k] -= shift[row];
            naive_store(to.dtype, to.data, row * s.length + i, v, size);
        }
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
    for (int64_t row = 0; row < s.rows; row++) {
        float v[NAIVE_BLOCK], most = -INFINITY;
        for (int64_t i = 0; i < s.length; i += NAIVE_BLOCK) {
            const int64_t size = s.length - i < NAIVE_BLOCK ? s.length - i : NAIVE_BLOCK;
            naive_load(v, x.dtype, x.data, row * s.length + i, size);
#pragma omp simd reduction(max : most)
            for (int64_t k = 0; k < size; k++)
                most = v[k] > most ? v[k] : most;
        }
        largest[row] = most;
    }
    subtract(n, s, t, x, largest);
    naive_pointwise(n, s.rows * s.length, t, t, (struct naive_array){0}, exponential);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++) {
        float v[NAIVE_BLOCK], sum = 0;
        for (int64_t i = 0; i < s.length; i += NAIVE_BLOCK) {
            const int64_t size = s.length - i < NAIVE_BLOCK ? s.length - i : NAIVE_BLOCK;
            naive_load(v, t.dtype, t.data, row * s.length + i, size);
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < size; k++)
                sum += v[k];
        }
        lse[row] = largest[row] + logf(sum);
    }
}

static void backward(struct naive *n) {
    const struct sizes s = sizes_of(n);
    const struct naive_array x = naive_array(n, "x"), dx = naive_array(n, "dx"), dlse = naive_array(n, "dlse"),
                             t = difference(n);
    subtract(n, s, t, x, naive_data(n, "lse"));
    naive_pointwise(n, s.rows * s.length, t, t, (struct naive_array){0}, exponential);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < s.rows; row++) {
        float v[NAIVE_BLOCK], upstream;
        naive_load(&upstream, dlse.dtype, dlse.data, row, 1);
        for (int64_t i = 0; i < s.length; i += NAIVE_BLOCK) {
            const int64_t size = s.length - i < NAIVE_BLOCK ? s.length - i : NAIVE_BLOCK;
            naive_load(v, t.dtype, t.data, row * s.length + i, size);
            for (int64_t k = 0; k < size; k++)
                v[k] *= upstream;
            naive_store(dx.dtype, dx.data, row * s.length + i, v, size);
        }
    }
}

const struct naive_op NAIVE_OP(logsumexp) = {.serves = serves, .forward = forward, .backward = backward};
