/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lrpe_cosine on the CPU. Angles depend on the token, the head and the feature, but not on the
 * batch. So a kernel walks its box in tiles: some tokens by some columns (features of adjacent
 * heads). It computes the sines and cosines of a tile once, and then processes the tile in all
 * batches, one row (one head of one token) at a time. The walk is common to all kernels; the work
 * on a row is written once and compiled for each dtype and f.
 */
#include "core/variants.h"
#include "ops/lrpe_cosine/cpu_softmax.h"
#include "simd/activations.h"

extern const struct lrpe_cosine_kernels RAFTER_KERNELS(lrpe_cosine);

/* ---- f and its gradient ---------------------------------------------------------------------- */

/* f(x) for the pair of features from i on. `s` points to the statistics of the row, or of its first
 * column. */
V_INLINE struct pair apply(int dtype, enum lrpe_f f, struct pair x, const struct lrpe_statistics *s, int64_t i) {
    const int fine = dtype == RAFTER_F32 ? RAFTER_F32 : RAFTER_F16; /* dtheta sums f(x) in fp32: bf16 would show */
    switch (f) {
    case LRPE_RELU: return (struct pair){v_relu(x.a), v_relu(x.b)};
    case LRPE_SIGMOID: return (struct pair){v_sigmoid(fine, x.a), v_sigmoid(fine, x.b)};
    case LRPE_SILU: return (struct pair){v_silu(fine, x.a), v_silu(fine, x.b)};
    case LRPE_FEATURE: return pair_mul(x, pair_set(*s->scale)); /* x is the exponential already */
    case LRPE_FEATURE_WIDE: return pair_mul(pair_exp(x, pair_set(*s->pivot)), pair_set(*s->scale));
    case LRPE_SEQUENCE: return pair_mul(pair_exp(x, load_pair(s->pivot + i)), load_pair(s->scale + i));
    default: return x;
    }
}

/* dx, given the gradient g of f(x). */
V_INLINE struct pair apply_grad(int dtype, enum lrpe_f f, struct pair x, struct pair g, const struct lrpe_statistics *s,
                                int64_t i) {
    switch (f) {
    case LRPE_RELU: return (struct pair){v_relu_grad(x.a, g.a), v_relu_grad(x.b, g.b)};
    case LRPE_SIGMOID: return (struct pair){v_sigmoid_grad(dtype, x.a, g.a), v_sigmoid_grad(dtype, x.b, g.b)};
    case LRPE_SILU: return (struct pair){v_silu_grad(dtype, x.a, g.a), v_silu_grad(dtype, x.b, g.b)};
    case LRPE_FEATURE:
    case LRPE_FEATURE_WIDE: return pair_mul(apply(dtype, f, x, s, i), pair_sub(g, pair_set(*s->dot)));
    case LRPE_SEQUENCE: return pair_mul(apply(dtype, f, x, s, i), pair_sub(g, load_pair(s->dot + i)));
    default: return g;
    }
}

/* ---- forward, backward and dtheta of a slab -------------------------------------------------- */

/* Softmax over features: computes what row_for() hands out. sum holds 1 / sum then, and dot the sum of
 * softmax * g. */
V_INLINE void prepare(int dtype, enum lrpe_f f, bool backward, const struct slab *slab, struct softmax_slab *softmax) {
    if (f != LRPE_FEATURE)
        return;
    exponentials(dtype, backward, slab, softmax);
    for (int64_t u = 0; u < slab->rows * slab->heads; u++) {
        softmax->sum[u] = 1.0f / softmax->sum[u];
        softmax->dot[u] *= softmax->sum[u];
    }
}

V_INLINE struct row row_for(enum lrpe_f f, const struct slab *slab, int64_t r, int64_t h,
                            struct softmax_slab *softmax) {
    struct row row = row_of(slab, r, h);
    if (f == LRPE_FEATURE) {
        const int64_t u = r * slab->heads + h;
        row.e = softmax->e + u * slab->pitch;
        row.g = softmax->g + u * slab->pitch;
        row.s = (struct lrpe_statistics){.scale = &softmax->sum[u], .dot = &softmax->dot[u]};
    }
    return row;
}

/* The argument of apply(): x, or for the softmax over features its exponentials. */
V_INLINE struct pair argument(int dtype, enum lrpe_f f, const struct row *row, int64_t i, int64_t count) {
    if (f == LRPE_FEATURE)
        return load_pair(row->e + i);
    prefetch(dtype, row->x + i * v_bytes(dtype) + row->x_ahead);
    return load_part(dtype, row->x + i * v_bytes(dtype), count, 0.0f);
}

/* y = f(x) cos, f(x) sin */
V_INLINE void forward_row(int dtype, enum lrpe_f f, bool stream, const struct row *row, char *y_cos, char *y_sin) {
    const int64_t bytes = v_bytes(dtype);
    FOR_PAIRS(i, count, row->width, {
        const struct pair a = apply(dtype, f, argument(dtype, f, row, i, count), &row->s, i);
        store_part(dtype, y_cos + i * bytes, pair_mul(a, load_pair(row->cosine + i)), count, stream);
        store_part(dtype, y_sin + i * bytes, pair_mul(a, load_pair(row->sine + i)), count, stream);
    });
}

V_INLINE void forward_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct softmax_slab *const softmax = &buffers()->softmax;
    prepare(dtype, f, false, slab, softmax);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, softmax);
            char *const y_cos = slab->out.at + r * slab->out.row + h * slab->out.head;
            char *const y_sin = y_cos + slab->out.half;
            if (slab->out.stream)
                forward_row(dtype, f, true, &row, y_cos, y_sin);
            else
                forward_row(dtype, f, false, &row, y_cos, y_sin);
        }
}

/* dx = f'(x) applied to g = dy_1 cos + dy_2 sin */
V_INLINE void backward_row(int dtype, enum lrpe_f f, bool stream, const struct row *row, char *dx) {
    FOR_PAIRS(i, count, row->width, {
        const struct pair x = f == LRPE_NONE ? pair_set(0.0f) : argument(dtype, f, row, i, count);
        const struct pair g = f == LRPE_FEATURE ? load_pair(row->g + i) : gradient(dtype, row, i, count);
        store_part(dtype, dx + i * v_bytes(dtype), apply_grad(dtype, f, x, g, &row->s, i), count, stream);
    });
}

V_INLINE void backward_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct softmax_slab *const softmax = &buffers()->softmax;
    prepare(dtype, f, true, slab, softmax);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, softmax);
            char *const dx = slab->out.at + r * slab->out.row + h * slab->out.head;
            if (slab->out.stream)
                backward_row(dtype, f, true, &row, dx);
            else
                backward_row(dtype, f, false, &row, dx);
        }
}

/* dtheta += position * f(x) * (dy_2 cos - dy_1 sin) */
V_INLINE void dtheta_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct softmax_slab *const softmax = &buffers()->softmax;
    const int64_t bytes = v_bytes(dtype);
    prepare(dtype, f, false, slab, softmax);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, softmax);
            const vd position = v_set_d(slab->position[r]);
            double *const sums = slab->dtheta + h * slab->dtheta_head;
            FOR_PAIRS(i, count, row.width, {
                const struct pair a = apply(dtype, f, argument(dtype, f, &row, i, count), &row.s, i);
                const struct pair dy_cos = load_part(dtype, row.dy_cos + i * bytes, count, 0.0f);
                const struct pair dy_sin = load_part(dtype, row.dy_sin + i * bytes, count, 0.0f);
                const struct pair slope =
                    pair_sub(pair_mul(dy_sin, load_pair(row.cosine + i)), pair_mul(dy_cos, load_pair(row.sine + i)));
                const struct pair term = pair_mul(a, slope);
                vd part[4];
                v_to_d(term.a, &part[0], &part[1]);
                v_to_d(term.b, &part[2], &part[3]);
                for (int k = 0; k < 4; k++) {
                    double *const sum = sums + i + k * V_LANES / 2;
                    v_store_d(sum, v_fma_d(position, part[k], v_load_d(sum)));
                }
            });
        }
}

/* ---- the kernels ----------------------------------------------------------------------------- */

/* Compiles a function for each dtype and f, and puts them in a table. */
typedef void slab_function(const struct slab *slab);
#define EACH_F(X, what, dtype)                                                                                         \
    X(what, dtype, LRPE_NONE)                                                                                          \
    X(what, dtype, LRPE_RELU)                                                                                          \
    X(what, dtype, LRPE_SIGMOID)                                                                                       \
    X(what, dtype, LRPE_SILU)                                                                                          \
    X(what, dtype, LRPE_FEATURE)                                                                                       \
    X(what, dtype, LRPE_FEATURE_WIDE)                                                                                  \
    X(what, dtype, LRPE_SEQUENCE)
#define DEFINE(what, dtype, f)                                                                                         \
    static void what##_##dtype##_##f(const struct slab *slab) {                                                        \
        what##_slab(dtype, f, slab);                                                                                   \
    }
#define ENTRY(what, dtype, f) [dtype][f] = what##_##dtype##_##f,
#define TABLE(what)                                                                                                    \
    EACH_F(DEFINE, what, RAFTER_F32)                                                                                   \
    EACH_F(DEFINE, what, RAFTER_BF16)                                                                                  \
    EACH_F(DEFINE, what, RAFTER_F16)                                                                                   \
    static slab_function *const what##_table[RAFTER_F16 + 1][LRPE_FS] = {                                              \
        EACH_F(ENTRY, what, RAFTER_F32) EACH_F(ENTRY, what, RAFTER_BF16) EACH_F(ENTRY, what, RAFTER_F16)};
TABLE(forward)
TABLE(backward)
TABLE(dtheta)

static void forward(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                    const struct lrpe_statistics *statistics, bool stream) {
    slab_function *const work = forward_table[call->x.dtype][f];
    struct buffers *const memory = buffers();
    struct tile *const t = &memory->tile;
    struct slab slab = {0};
    for (start_tiles(t, TILE_CELLS, true); next_tile(call, box, t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            load_angles(call, box, t, b);
            open_slab(call, t, f, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, t, b, memory->one);
            slab.out = open_output(&call->y, 2, t, b, memory->two, stream);
            work(&slab);
            close_output(&call->y, 2, t, &slab.out);
        }
    if (stream)
        v_fence();
}

static void backward(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                     const struct lrpe_statistics *statistics, double *dtheta, bool stream) {
    const int64_t padded = lrpe_padded(call->x.shape[3]);
    if (dtheta)
        for (int64_t h = box->h; h < box->h_end; h++)
            memset(dtheta + h * padded + box->d, 0, (size_t)(lrpe_padded(box->d_end) - box->d) * sizeof *dtheta);
    slab_function *const work = backward_table[call->x.dtype][f], *const work_dtheta = dtheta_table[call->x.dtype][f];
    struct buffers *const memory = buffers();
    struct tile *const t = &memory->tile;
    struct slab slab = {0};
    for (start_tiles(t, TILE_CELLS, true); next_tile(call, box, t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            load_angles(call, box, t, b);
            open_slab(call, t, f, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, t, b, memory->one);
            slab.dy = open_input(&call->dy, 2, box, t, b, memory->two);
            if (call->dx.data) {
                slab.out = open_output(&call->dx, 1, t, b, memory->three, stream);
                work(&slab);
                close_output(&call->dx, 1, t, &slab.out);
            }
            if (dtheta) {
                for (int64_t r = 0; r < t->rows; r++)
                    slab.position[r] = (double)position_of(call, b, t->n + r);
                slab.dtheta = dtheta + t->h * padded + t->d;
                slab.dtheta_head = padded;
                work_dtheta(&slab);
            }
        }
    if (stream)
        v_fence();
}

static void sum_dtheta(const struct lrpe_cosine_call *call, const double *sums, int64_t parts, int64_t from,
                       int64_t to) {
    const rafter_view *out = &call->dtheta;
    const int64_t heads = call->x.shape[2], features = call->x.shape[3], padded = lrpe_padded(features);
    const bool all_heads = out->shape[0] != heads, all_features = out->shape[1] != features;
    for (int64_t i = from; i < to; i++) {
        const int64_t row = i / out->shape[1], column = i % out->shape[1];
        double sum = 0;
        for (int64_t p = 0; p < parts; p++)
            for (int64_t h = all_heads ? 0 : row; h < (all_heads ? heads : row + 1); h++)
                for (int64_t d = all_features ? 0 : column; d < (all_features ? features : column + 1); d++)
                    sum += sums[(p * heads + h) * padded + pair_order_index(call->x.dtype, d)];
        char *const at = rafter_at(out, row * out->stride[0] + column * out->stride[1]);
        V_FOR_DTYPE(out->dtype, dtype, v_put(dtype, at, (float)sum))
    }
}

const struct lrpe_cosine_kernels RAFTER_KERNELS(lrpe_cosine) = {forward, backward, columns, merge, rows, sum_dtheta};
