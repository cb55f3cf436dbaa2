/* SPDX-License-Identifier: Apache-2.0 */
/* Slabs: the part of a tile that belongs to one batch, with its tensors and its rows. */
#ifndef RAFTER_LRPE_COSINE_CPU_SLABS_H
#define RAFTER_LRPE_COSINE_CPU_SLABS_H

#include "ops/lrpe_cosine/cpu_tiles.h"
#include "simd/transpose.h"

/* Strides of tensors are in bytes, strides of fp32 and fp64 arrays in elements. */
struct input {
    const char *at;
    int64_t row, head, half; /* strides; dy has two halves */
    int64_t ahead;           /* from an element to the same element of the next slab, for prefetching */
};

struct output {
    char *at, *to;           /* at: where the kernel writes. to: the final place if that is another one, else NULL */
    int64_t row, head, half; /* strides */
    bool stream;             /* write with streaming stores */
};

/* The part of a tile that belongs to one batch. */
struct slab {
    int64_t rows, heads, width, pitch;
    const float *sine, *cosine; /* [rows][heads][pitch] */
    struct input x, dy;
    struct output out;
    struct lrpe_statistics statistics;
    int64_t statistics_row, statistics_head;
    /* For dtheta only. */
    double position[TILE_ROWS];
    double *dtheta;
    int64_t dtheta_head;
};

/* Whether the tile of a tensor is transposed: its heads are contiguous instead of its features. */
static bool turns(const rafter_view *view, const struct tile *t) {
    return lrpe_view_lies_across(view) && t->heads >= TURNED_HEADS;
}

/* Prepares batch b of an input that has `halves` times the features of x. If its features are not
 * contiguous, the tile is copied to the buffer. */
static struct input open_input(const rafter_view *view, int halves, const struct lrpe_box *box, const struct tile *t,
                               int64_t b, char *buffer) {
    const int64_t *step = view->stride, bytes = rafter_dtype_bytes(view->dtype), features = view->shape[3] / halves;
    const char *at = rafter_at(view, b * step[0] + t->n * step[1] + t->h * step[2] + t->d * step[3]);
    const int64_t next_b = b + 1 < box->b_end ? 1 : box->b - b, next_n = b + 1 < box->b_end ? 0 : t->rows;
    const struct input in = {at, step[1] * bytes, step[2] * bytes, features * step[3] * bytes,
                             (next_b * step[0] + next_n * step[1]) * bytes};
    if (step[3] == 1)
        return in;
    const int64_t half = t->width * bytes, head = halves * half, row = t->heads * head;
    const bool across = turns(view, t);
    for (int64_t r = 0; r < t->rows && across; r++)
        for (int k = 0; k < halves; k++) {
            const char *from = at + r * in.row + k * in.half;
            char *const to = buffer + r * row + k * half;
            v_turn(bytes, from, step[3], t->width, t->heads, to, head / bytes);
        }
    for (int64_t r = 0; r < t->rows && !across; r++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int k = 0; k < halves; k++) {
                const char *from = at + r * in.row + h * in.head + k * in.half;
                char *const to = buffer + r * row + h * head + k * half;
                v_gather_bytes(bytes, from, step[3], t->width, to);
            }
    return (struct input){buffer, row, head, half, 0};
}

static bool is_contiguous(const rafter_view *view) {
    return view->stride[3] == 1 || view->shape[3] == 1;
}

/* The same for an output. The kernel writes to the buffer if the output's features are not contiguous;
 * and if the output is to be streamed, single heads are not aligned for that, and all heads of a
 * token are one contiguous piece, which close_output can stream. */
static struct output open_output(const rafter_view *view, int halves, const struct tile *t, int64_t b, char *buffer,
                                 bool stream) {
    const int64_t *step = view->stride, bytes = rafter_dtype_bytes(view->dtype), features = view->shape[3] / halves;
    char *const to = rafter_at(view, b * step[0] + t->n * step[1] + t->h * step[2] + t->d * step[3]);
    struct output out = {to, NULL, step[1] * bytes, step[2] * bytes, features * step[3] * bytes, stream};
    const bool aligned = ((uintptr_t)to | (uintptr_t)(out.row | out.head | out.half)) % V_STREAM == 0;
    const bool one_piece = t->width == features && (t->heads == 1 || step[2] == view->shape[3]);
    if (is_contiguous(view) && (aligned || !stream || !one_piece)) {
        out.stream = stream && aligned;
        return out;
    }
    const int64_t half = t->width * bytes, head = halves * half;
    return (struct output){buffer, to, t->heads * head, head, half, false};
}

V_INLINE vf identity(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

/* Copies what was written to the buffer to its final place. */
static void close_output(const rafter_view *view, int halves, const struct tile *t, const struct output *out) {
    if (!out->to)
        return;
    const int64_t *step = view->stride, bytes = rafter_dtype_bytes(view->dtype), features = view->shape[3] / halves;
    for (int64_t r = 0; r < t->rows; r++) {
        const char *from = out->at + r * out->row;
        char *const to = out->to + r * step[1] * bytes;
        if (is_contiguous(view)) {
            const int64_t words = out->row / 4;
            v_map(RAFTER_F32, 1, (const void *const[]){from}, to, words, true, identity, NULL);
            memcpy(to + words * 4, from + words * 4, (size_t)(out->row - words * 4));
            continue;
        }
        const bool across = turns(view, t);
        for (int k = 0; k < halves && across; k++)
            v_turn(bytes, from + k * out->half, out->head / bytes, t->heads, t->width,
                   to + k * features * step[3] * bytes, step[3]);
        for (int64_t h = 0; h < t->heads && !across; h++)
            for (int k = 0; k < halves; k++) {
                const char *piece = from + h * out->head + k * out->half;
                char *const place = to + (h * step[2] + k * features * step[3]) * bytes;
                v_scatter_bytes(bytes, piece, place, step[3], t->width);
            }
    }
}

/* Fills in a slab except for its tensors. */
static void open_slab(const struct lrpe_cosine_call *call, const struct tile *t, enum lrpe_f f,
                      const struct lrpe_statistics *s, int64_t b, struct slab *slab) {
    const int64_t *shape = call->x.shape, padded = lrpe_padded(shape[3]);
    slab->rows = t->rows, slab->heads = t->heads, slab->width = t->width, slab->pitch = t->pitch;
    slab->sine = t->sine, slab->cosine = t->cosine;
    slab->statistics = (struct lrpe_statistics){NULL, NULL, NULL};
    if (f == LRPE_SEQUENCE || f == LRPE_FEATURE_WIDE) {
        const bool columns = f == LRPE_SEQUENCE;
        const int64_t at = columns ? (b * shape[2] + t->h) * padded + t->d : (b * shape[1] + t->n) * shape[2] + t->h;
        slab->statistics = (struct lrpe_statistics){s->pivot + at, s->scale + at, s->dot ? s->dot + at : NULL};
        slab->statistics_row = columns ? 0 : shape[2];
        slab->statistics_head = columns ? padded : 1;
    }
}

/* One head of one token. */
struct row {
    const char *x, *dy_cos, *dy_sin;
    int64_t x_ahead, dy_ahead;
    const float *sine, *cosine;
    int64_t width;
    struct lrpe_statistics s;
    const float *e, *g; /* exponentials and gradients, for the softmax over features */
};

V_INLINE struct row row_of(const struct slab *slab, int64_t r, int64_t h) {
    const struct lrpe_statistics *s = &slab->statistics;
    const int64_t angles = (r * slab->heads + h) * slab->pitch,
                  at = r * slab->statistics_row + h * slab->statistics_head;
    struct row row = {.sine = slab->sine + angles, .cosine = slab->cosine + angles, .width = slab->width};
    row.x = slab->x.at + r * slab->x.row + h * slab->x.head;
    if (slab->dy.at) {
        row.dy_cos = slab->dy.at + r * slab->dy.row + h * slab->dy.head;
        row.dy_sin = row.dy_cos + slab->dy.half;
    }
    row.x_ahead = slab->x.ahead;
    row.dy_ahead = slab->dy.ahead;
    if (s->pivot)
        row.s = (struct lrpe_statistics){s->pivot + at, s->scale + at, s->dot ? s->dot + at : NULL};
    return row;
}

/* Runs `step` for each pair of vectors of a row. i is bound to its first feature, count to its number of
 * features: a constant for whole pairs. */
#define FOR_PAIRS(i, count, width, step)                                                                               \
    do {                                                                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + PAIR <= (width); i += PAIR) {                                                                       \
            const int64_t count = PAIR;                                                                                \
            step;                                                                                                      \
        }                                                                                                              \
        if (i < (width)) {                                                                                             \
            const int64_t count = (width)-i;                                                                           \
            step;                                                                                                      \
        }                                                                                                              \
    } while (0)

V_INLINE void prefetch(int dtype, const char *p) {
    __builtin_prefetch(p, 0, 2);
    if (dtype == RAFTER_F32 && V_LANES == 16)
        __builtin_prefetch(p + 64, 0, 2);
}

/* g = dy_1 cos + dy_2 sin, the gradient of f(x), for the features from i on. */
V_INLINE struct pair gradient(int dtype, const struct row *row, int64_t i, int64_t count) {
    const int64_t bytes = v_bytes(dtype);
    prefetch(dtype, row->dy_cos + i * bytes + row->dy_ahead);
    prefetch(dtype, row->dy_sin + i * bytes + row->dy_ahead);
    const struct pair dy_cos = load_part(dtype, row->dy_cos + i * bytes, count, 0.0f);
    const struct pair dy_sin = load_part(dtype, row->dy_sin + i * bytes, count, 0.0f);
    return pair_fma(dy_cos, load_pair(row->cosine + i), pair_mul(dy_sin, load_pair(row->sine + i)));
}

#endif
