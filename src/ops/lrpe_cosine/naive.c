/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/activations_naive.h"

/* What PyTorch does with x in bf16 and theta converted to fp32:
 *     angle = theta * position;  c = cos(angle), s = sin(angle)      fp32 [N, H, D]
 *     f = act(x)                                                     x's dtype
 *     y = cat([f * c, f * s], -1).to(x's dtype)                      products and cat in fp32
 * and backward df = dy_1 * c + dy_2 * s in fp32, then act's. */
enum { THETA, ANGLE, COSINE, SINE, ACTIVATED, FIRST, SECOND, WHOLE };

struct sizes {
    int64_t batch, length, heads, features;
};

static struct sizes sizes_of(const struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x");
    return (struct sizes){x->shape[0], x->shape[1], x->ndim == 4 ? x->shape[2] : 1, x->shape[x->ndim - 1]};
}

static struct naive_array temporary(struct naive *n, int slot, rafter_dtype dtype, int64_t count) {
    return (struct naive_array){dtype, naive_slot(n, slot, (size_t)count * naive_bytes(dtype))};
}

static bool serves(const problem *p, enum problem_mode mode) {
    (void)mode;
    return !problem_find(p, "positions") && !problem_find(p, "dtheta") && p->options.offset == 0;
}

static void cosine(float *out, const float *a, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        out[i] = cosf(a[i]);
}

static void sine(float *out, const float *a, const float *unused, int64_t n) {
    (void)unused;
    for (int64_t i = 0; i < n; i++)
        out[i] = sinf(a[i]);
}

static void add(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        out[i] = a[i] + b[i];
}

static void copy(float *out, const float *a, const float *unused, int64_t n) {
    (void)unused;
    memcpy(out, a, (size_t)n * sizeof *out);
}

/* The dimension of x that softmax runs over. */
static int softmax_dim(const problem *p) {
    return p->options.softmax_over == RAFTER_OVER_SEQUENCE ? 1 : problem_find(p, "x")->ndim - 1;
}

static void angles(struct naive *n, struct naive_array c, struct naive_array s) {
    const struct sizes z = sizes_of(n);
    const problem_tensor *theta = problem_find(n->problem, "theta");
    const int64_t per_token = z.heads * z.features;
    const int64_t by_head = theta->shape[0] > 1 ? theta->shape[1] : 0, by_feature = theta->shape[1] > 1;
    float *rate = naive_slot(n, THETA, (size_t)theta->numel * sizeof *rate);
    naive_load(rate, theta->dtype, theta->tensor.data, 0, theta->numel);
    const struct naive_array angle = temporary(n, ANGLE, RAFTER_F32, z.length * per_token);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t token = 0; token < z.length; token++) {
        float *to = (float *)angle.data + token * per_token;
        for (int64_t h = 0; h < z.heads; h++)
            for (int64_t d = 0; d < z.features; d++)
                to[h * z.features + d] = (float)token * rate[h * by_head + d * by_feature];
    }
    naive_pointwise(n, z.length * per_token, c, angle, (struct naive_array){0}, cosine);
    naive_pointwise(n, z.length * per_token, s, angle, (struct naive_array){0}, sine);
}

/* out = a * b. Rows of a are `stride` elements apart and are read from element a_from on; b is the
 * same for every batch. */
static void multiply(const struct naive *n, struct naive_array out, struct naive_array a, int64_t a_from,
                     int64_t stride, struct naive_array b) {
    const struct sizes z = sizes_of(n);
    const int64_t lines = z.batch * z.length * z.heads, period = z.length * z.heads;
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t line = 0; line < lines; line++)
        for (int64_t d = 0; d < z.features; d += NAIVE_BLOCK) {
            const int64_t size = min64(z.features - d, NAIVE_BLOCK);
            float u[NAIVE_BLOCK], v[NAIVE_BLOCK];
            naive_load(u, a.dtype, a.data, line * stride + a_from + d, size);
            naive_load(v, b.dtype, b.data, line % period * z.features + d, size);
            for (int64_t k = 0; k < size; k++)
                u[k] *= v[k];
            naive_store(out.dtype, out.data, line * z.features + d, u, size);
        }
}

static void concatenate(const struct naive *n, struct naive_array out, struct naive_array a, struct naive_array b) {
    const struct sizes z = sizes_of(n);
    const size_t bytes = (size_t)z.features * naive_bytes(out.dtype);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t line = 0; line < z.batch * z.length * z.heads; line++) {
        memcpy((char *)out.data + (size_t)(2 * line) * bytes, (const char *)a.data + (size_t)line * bytes, bytes);
        memcpy((char *)out.data + (size_t)(2 * line + 1) * bytes, (const char *)b.data + (size_t)line * bytes, bytes);
    }
}

/* Computes cos, sin and f(x), which backward reads too. Returns f(x). */
static struct naive_array prepare(struct naive *n, struct naive_array *c, struct naive_array *s) {
    const struct sizes z = sizes_of(n);
    const problem_tensor *x = problem_find(n->problem, "x");
    const struct naive_activation *f = naive_activation(n->problem);
    *c = temporary(n, COSINE, RAFTER_F32, z.length * z.heads * z.features);
    *s = temporary(n, SINE, RAFTER_F32, z.length * z.heads * z.features);
    angles(n, *c, *s);

    const struct naive_array from = naive_array(n, "x");
    if (!f && n->problem->options.act != RAFTER_ACT_SOFTMAX)
        return from;
    const struct naive_array activated = temporary(n, ACTIVATED, x->dtype, x->numel);
    if (f)
        naive_pointwise(n, x->numel, activated, from, (struct naive_array){0}, f->forward);
    else
        naive_softmax(n, naive_softmax_shape(x->ndim, x->shape, softmax_dim(n->problem)), activated, from);
    return activated;
}

static void save(struct naive *n) {
    struct naive_array c, s;
    prepare(n, &c, &s);
}

static void forward(struct naive *n) {
    const problem_tensor *x = problem_find(n->problem, "x");
    struct naive_array c, s;
    const struct naive_array f = prepare(n, &c, &s), first = temporary(n, FIRST, RAFTER_F32, x->numel),
                             second = temporary(n, SECOND, RAFTER_F32, x->numel),
                             whole = temporary(n, WHOLE, RAFTER_F32, 2 * x->numel);
    multiply(n, first, f, 0, sizes_of(n).features, c);
    multiply(n, second, f, 0, sizes_of(n).features, s);
    concatenate(n, whole, first, second);
    naive_pointwise(n, 2 * x->numel, naive_array(n, "y"), whole, (struct naive_array){0}, copy);
}

static void backward(struct naive *n) {
    const struct sizes z = sizes_of(n);
    const problem_tensor *x = problem_find(n->problem, "x");
    const struct naive_array dy = naive_array(n, "dy"), dx = naive_array(n, "dx");
    const struct naive_array c = temporary(n, COSINE, RAFTER_F32, z.length * z.heads * z.features);
    const struct naive_array s = temporary(n, SINE, RAFTER_F32, z.length * z.heads * z.features);
    const struct naive_array first = temporary(n, FIRST, RAFTER_F32, x->numel),
                             second = temporary(n, SECOND, RAFTER_F32, x->numel);
    multiply(n, first, dy, 0, 2 * z.features, c);
    multiply(n, second, dy, z.features, 2 * z.features, s);
    naive_pointwise(n, x->numel, first, first, second, add);

    const struct naive_activation *f = naive_activation(n->problem);
    if (f)
        naive_pointwise(n, x->numel, dx, first,
                        strcmp(f->kept, "x") == 0 ? naive_array(n, "x") : temporary(n, ACTIVATED, x->dtype, x->numel),
                        f->backward);
    else if (n->problem->options.act == RAFTER_ACT_SOFTMAX)
        naive_softmax_backward(n, naive_softmax_shape(x->ndim, x->shape, softmax_dim(n->problem)), dx, first,
                               temporary(n, ACTIVATED, x->dtype, x->numel));
    else
        naive_pointwise(n, x->numel, dx, first, (struct naive_array){0}, copy);
}

const struct naive_op NAIVE_OP(lrpe_cosine) = {
    .serves = serves, .save = save, .forward = forward, .backward = backward};
