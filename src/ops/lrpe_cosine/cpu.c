/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Angles depend on the token, the head and the feature, but not on the batch. So a kernel walks its box in tiles, some
 * tokens by some columns (features of neighbouring heads): it computes the sines and cosines of a tile once, and then
 * goes through all batches with them, a line (one token's part of the tile) at a time. The walk is common to all; what
 * is done to a line is written once and compiled for each dtype and f.
 *
 * Elements are worked on in pairs of vectors, in the order of v_load_pair. Whatever is kept per column (theta, sines
 * and cosines, statistics, sums of dtheta) is in that order too.
 */
#include "ops/lrpe_cosine/kernels.h"

#include "core/variants.h"
#include "simd/activations.h"
#include "simd/sincos.h"
#include "simd/softmax.h"

extern const struct lrpe_kernels RAFTER_KERNELS(lrpe_cosine);

enum {
    PAIR = 2 * V_LANES,
    TILE_CELLS = LRPE_COLUMNS, /* angles of a tile, whose sines and cosines (16 KiB) stay in L1 */
    TILE_ROWS = 16,            /* tokens of a tile, at most */
    DTYPES = RAFTER_F16 + 1
};

V_INLINE int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

struct pair {
    vf a, b;
};

/* The next `count` elements, or a whole pair if there are more; `fill` past their end. */
V_INLINE struct pair load(int dtype, const char *p, int64_t count, float fill) {
    struct pair v;
    char buffer[PAIR * 4];
    if (count < PAIR) {
        v_store2(dtype, buffer, v_set(fill), v_set(fill));
        memcpy(buffer, p, (size_t)(count * v_bytes(dtype)));
        p = buffer;
    }
    v_load_pair(dtype, p, &v.a, &v.b);
    return v;
}

V_INLINE void store(int dtype, char *p, struct pair v, int64_t count, bool stream) {
    if (count < PAIR) {
        char buffer[PAIR * 4];
        v_store_pair(dtype, buffer, v.a, v.b);
        memcpy(p, buffer, (size_t)(count * v_bytes(dtype)));
    } else if (stream) {
        v_stream_pair(dtype, p, v.a, v.b);
    } else {
        v_store_pair(dtype, p, v.a, v.b);
    }
}

/* A pair of what is kept per column. */
V_INLINE struct pair kept(const float *p) {
    return (struct pair){v_load(RAFTER_F32, p), v_load(RAFTER_F32, p + V_LANES)};
}

V_INLINE void keep(float *p, struct pair v) {
    v_store(RAFTER_F32, p, v.a);
    v_store(RAFTER_F32, p + V_LANES, v.b);
}

V_INLINE struct pair both(float a) {
    return (struct pair){v_set(a), v_set(a)};
}

V_INLINE struct pair times(struct pair x, struct pair y) {
    return (struct pair){x.a * y.a, x.b * y.b};
}

V_INLINE struct pair plus(struct pair x, struct pair y) {
    return (struct pair){x.a + y.a, x.b + y.b};
}

V_INLINE struct pair minus(struct pair x, struct pair y) {
    return (struct pair){x.a - y.a, x.b - y.b};
}

/* x * y + z */
V_INLINE struct pair fused(struct pair x, struct pair y, struct pair z) {
    return (struct pair){v_fma(x.a, y.a, z.a), v_fma(x.b, y.b, z.b)};
}

V_INLINE struct pair larger(struct pair x, struct pair y) {
    return (struct pair){v_max(x.a, y.a), v_max(x.b, y.b)};
}

/* e^(x - pivot), see v_curve. */
V_INLINE struct pair exponential(struct pair x, struct pair pivot) {
    struct v_curve a = v_curve_of(0.0f, 1.0f), b = a;
    a.pivot = pivot.a;
    b.pivot = pivot.b;
    return (struct pair){v_curve_at(x.a, &a, v_set(0.0f)), v_curve_at(x.b, &b, v_set(0.0f))};
}

/* v_pivot of each column. */
V_INLINE struct pair pivot_of(struct pair max) {
    const vf none = v_set(-INFINITY), zero = v_set(0.0f);
    return (struct pair){v_select(max.a == none, zero, max.a), v_select(max.b == none, zero, max.b)};
}

/* Where feature d is among what is kept per column. */
static int64_t kept_at(int dtype, int64_t d) {
    const int64_t within = d % PAIR;
    return dtype == RAFTER_BF16 ? d - within + within % 2 * V_LANES + within / 2 : d;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

struct tile {
    int64_t most_columns;
    bool angles;                             /* whether they are wanted */
    int64_t n, rows;                         /* tokens */
    int64_t h, heads;                        /* more than one only where all the box's features are in */
    int64_t d, width;                        /* features of each head */
    int64_t pitch;                           /* width rounded up to whole pairs */
    double largest;                          /* see v_sincos_row */
    _Alignas(64) double theta[LRPE_COLUMNS]; /* [heads][pitch] */
    _Alignas(64) float sine[TILE_CELLS], cosine[TILE_CELLS]; /* [rows][heads][pitch] */
};

/* A pair of theta, in the order of x's dtype, which need not be theta's. */
V_INLINE struct pair load_theta_pair(int dtype, int x_dtype, const char *p, int64_t step, int64_t count) {
    char buffer[PAIR * 4];
    v_store2(dtype, buffer, v_set(0.0f), v_set(0.0f));
    const char *gathered = v_gather(dtype, p, step, count, buffer);
    if (gathered != buffer && count < PAIR)
        gathered = memcpy(buffer, p, (size_t)(count * v_bytes(dtype)));
    const struct pair v = {v_load(dtype, gathered), v_load(dtype, gathered + V_LANES * v_bytes(dtype))};
    if (x_dtype != RAFTER_BF16)
        return v;
    return (struct pair){(vf)v_even_words((vi)v.a, (vi)v.b), (vf)v_odd_words((vi)v.a, (vi)v.b)};
}

static void load_theta(const struct lrpe_cosine_call *call, struct tile *t) {
    const rafter_view *theta = &call->theta;
    const int64_t head_step = theta->stride[0], step = theta->stride[1]; /* 0 where one value serves all */
    vf largest = v_set(0.0f);
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->pitch; i += PAIR) {
            const char *from = rafter_at(theta, (t->h + h) * head_step + (t->d + i) * step);
            const int64_t count = least(t->width - i, PAIR);
            struct pair v = both(0.0f);
            V_FOR_DTYPE(theta->dtype, dtype, v = load_theta_pair(dtype, call->x.dtype, from, step, count));
            const vf vectors[] = {v.a, v.b};
            for (int k = 0; k < 2; k++) {
                vd low, high;
                v_to_d(vectors[k], &low, &high);
                double *const to = t->theta + h * t->pitch + i + k * V_LANES;
                v_store_d(to, low);
                v_store_d(to + V_LANES / 2, high);
                const vf magnitude = (vf)((vi)vectors[k] & INT32_MAX);
                largest = v_max(v_select(magnitude <= v_set(INFINITY), magnitude, v_set(INFINITY)), largest);
            }
        }
    t->largest = (double)v_hmax(largest);
}

/* Before the first tile of a box. */
static void start_tiles(struct tile *t, int64_t most_columns, bool angles) {
    t->most_columns = most_columns;
    t->angles = angles;
    t->rows = 0;
}

/* Moves on to the next tile: features, then heads, then tokens. */
static bool next_tile(const struct lrpe_cosine_call *call, const struct lrpe_box *box, struct tile *t) {
    const int64_t last_h = t->rows ? t->h : -1, last_d = t->d;
    if (t->rows == 0) {
        t->n = box->n, t->h = box->h, t->d = box->d;
    } else if ((t->d += t->width) == box->d_end) {
        t->d = box->d;
        if ((t->h += t->heads) == box->h_end) {
            t->h = box->h;
            t->n += t->rows;
        }
    }
    if (t->n == box->n_end)
        return false;
    const int64_t widest = least(box->d_end - box->d, t->most_columns),
                  widest_pitch = (widest + PAIR - 1) / PAIR * PAIR;
    const int64_t most_heads =
        widest < box->d_end - box->d ? 1 : least(box->h_end - box->h, t->most_columns / widest_pitch);
    t->rows = least(box->n_end - t->n, least(TILE_ROWS, TILE_CELLS / (most_heads * widest_pitch)));
    t->heads = least(box->h_end - t->h, most_heads);
    t->width = least(box->d_end - t->d, widest);
    t->pitch = (t->width + PAIR - 1) / PAIR * PAIR;
    if (t->angles && (t->h != last_h || t->d != last_d))
        load_theta(call, t);
    return true;
}

static int64_t position_of(const struct lrpe_cosine_call *call, int64_t b, int64_t n) {
    const rafter_view *positions = &call->positions;
    if (!positions->data)
        return call->offset + n;
    const char *at = rafter_at(positions, b * positions->stride[0] + n * positions->stride[1]);
    if (positions->dtype == RAFTER_I64) {
        int64_t position;
        memcpy(&position, at, sizeof position);
        return position;
    }
    int32_t position;
    memcpy(&position, at, sizeof position);
    return position;
}

/* The tile's sines and cosines for batch b, unless those of the batch before, which the tile has, are the same. */
static void turn_to_batch(const struct lrpe_cosine_call *call, const struct lrpe_box *box, struct tile *t, int64_t b) {
    const bool differ = call->positions.data && call->positions.stride[0] != 0;
    if (!t->angles || (b > box->b && !differ))
        return;
    const int64_t columns = t->heads * t->pitch;
    for (int64_t r = 0; r < t->rows; r++)
        v_sincos_row(t->theta, t->largest, position_of(call, b, t->n + r), columns, t->sine + r * columns,
                     t->cosine + r * columns);
}

/* ---- slabs ----------------------------------------------------------------------------------- */

/* One batch's part of a tile. Steps from row to row and from head to head are in bytes of tensors, in elements of
 * arrays. */
struct input {
    const char *at;
    int64_t row, head, half; /* dy has two halves */
    int64_t ahead;           /* from an element to that of the slab that comes next, in bytes */
};

struct output {
    char *at, *to; /* where it is written; where it belongs, if that is not the same */
    int64_t row, head, half;
    bool stream; /* what is written goes past the caches */
};

struct slab {
    int64_t rows, heads, width, pitch;
    const float *sine, *cosine; /* [rows][heads][pitch] */
    struct input x, dy;
    struct output out;
    struct lrpe_statistics statistics;
    int64_t statistics_row, statistics_head;
    double position[TILE_ROWS]; /* for dtheta only, as what follows */
    double *dtheta;
    int64_t dtheta_head;
};

/* A batch of an input that has `halves` times the features of x. Where its elements are not neighbours they are copied
 * to the buffer, which has room for all of the tile. */
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
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int k = 0; k < halves; k++) {
                const char *from = at + r * in.row + h * in.head + k * in.half;
                char *const to = buffer + r * row + h * head + k * half;
                if (bytes == 4)
                    v_gather(RAFTER_F32, from, step[3], t->width, to);
                else
                    v_gather(RAFTER_BF16, from, step[3], t->width, to);
            }
    return (struct input){buffer, row, head, half, 0};
}

static bool has_neighbours(const rafter_view *view) {
    return view->stride[3] == 1 || view->shape[3] == 1;
}

/* The same of an output. It is written to the buffer first where its elements are not neighbours, and where lines are
 * to be streamed that heads do not fill but all heads of a token do. */
static struct output open_output(const rafter_view *view, int halves, const struct tile *t, int64_t b, char *buffer,
                                 bool stream) {
    const int64_t *step = view->stride, bytes = rafter_dtype_bytes(view->dtype), features = view->shape[3] / halves;
    char *const to = rafter_at(view, b * step[0] + t->n * step[1] + t->h * step[2] + t->d * step[3]);
    struct output out = {to, NULL, step[1] * bytes, step[2] * bytes, features * step[3] * bytes, stream};
    const bool lines = ((uintptr_t)to | (uintptr_t)(out.row | out.head | out.half)) % V_STREAM == 0;
    const bool one_piece = t->width == features && (t->heads == 1 || step[2] == view->shape[3]);
    if (has_neighbours(view) && (lines || !stream || !one_piece)) {
        out.stream = stream && lines;
        return out;
    }
    const int64_t half = t->width * bytes, head = halves * half;
    return (struct output){buffer, to, t->heads * head, head, half, false};
}

V_INLINE vf same(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

/* Brings what was written to the buffer to its place. */
static void close_output(const rafter_view *view, int halves, const struct tile *t, const struct output *out) {
    if (!out->to)
        return;
    const int64_t *step = view->stride, bytes = rafter_dtype_bytes(view->dtype), features = view->shape[3] / halves;
    for (int64_t r = 0; r < t->rows; r++) {
        const char *from = out->at + r * out->row;
        char *const to = out->to + r * step[1] * bytes;
        if (has_neighbours(view)) {
            const int64_t words = out->row / 4;
            v_map(RAFTER_F32, 1, (const void *const[]){from}, to, words, true, same, NULL);
            memcpy(to + words * 4, from + words * 4, (size_t)(out->row - words * 4));
            continue;
        }
        for (int64_t h = 0; h < t->heads; h++)
            for (int k = 0; k < halves; k++) {
                const char *piece = from + h * out->head + k * out->half;
                char *const place = to + (h * step[2] + k * features * step[3]) * bytes;
                if (bytes == 4)
                    v_scatter(RAFTER_F32, piece, place, step[3], t->width);
                else
                    v_scatter(RAFTER_BF16, piece, place, step[3], t->width);
            }
    }
}

/* Batch b of the tile, but for its tensors. */
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
    const float *e, *g; /* what is kept of it, for the softmax over features */
};

V_INLINE struct row row_of(const struct slab *slab, int64_t r, int64_t h) {
    const struct lrpe_statistics *s = &slab->statistics;
    const int64_t angles = (r * slab->heads + h) * slab->pitch,
                  at = r * slab->statistics_row + h * slab->statistics_head;
    struct row row = {.sine = slab->sine + angles, .cosine = slab->cosine + angles, .width = slab->width};
    row.x = slab->x.at + r * slab->x.row + h * slab->x.head;
    row.dy_cos = slab->dy.at + r * slab->dy.row + h * slab->dy.head;
    row.dy_sin = row.dy_cos + slab->dy.half;
    row.x_ahead = slab->x.ahead;
    row.dy_ahead = slab->dy.ahead;
    if (s->pivot)
        row.s = (struct lrpe_statistics){s->pivot + at, s->scale + at, s->dot ? s->dot + at : NULL};
    return row;
}

/* ---- f and its gradient ---------------------------------------------------------------------- */

/* f(x) for the features from i on. `s` points at the statistics of the row, or of the row's first column. */
V_INLINE struct pair apply(int dtype, enum lrpe_f f, struct pair x, const struct lrpe_statistics *s, int64_t i) {
    switch (f) {
    case LRPE_RELU: return (struct pair){v_relu(x.a), v_relu(x.b)};
    case LRPE_SIGMOID: return (struct pair){v_sigmoid(dtype, x.a), v_sigmoid(dtype, x.b)};
    case LRPE_SILU: return (struct pair){v_silu(dtype, x.a), v_silu(dtype, x.b)};
    case LRPE_FEATURE: return times(x, both(*s->scale)); /* x is an exponential already */
    case LRPE_FEATURE_WIDE: return times(exponential(x, both(*s->pivot)), both(*s->scale));
    case LRPE_SEQUENCE: return times(exponential(x, kept(s->pivot + i)), kept(s->scale + i));
    default: return x;
    }
}

/* The gradient of x, g being that of f(x). */
V_INLINE struct pair apply_grad(int dtype, enum lrpe_f f, struct pair x, struct pair g, const struct lrpe_statistics *s,
                                int64_t i) {
    switch (f) {
    case LRPE_RELU: return (struct pair){v_relu_grad(x.a, g.a), v_relu_grad(x.b, g.b)};
    case LRPE_SIGMOID: return (struct pair){v_sigmoid_grad(dtype, x.a, g.a), v_sigmoid_grad(dtype, x.b, g.b)};
    case LRPE_SILU: return (struct pair){v_silu_grad(dtype, x.a, g.a), v_silu_grad(dtype, x.b, g.b)};
    case LRPE_FEATURE:
    case LRPE_FEATURE_WIDE: return times(apply(dtype, f, x, s, i), minus(g, both(*s->dot)));
    case LRPE_SEQUENCE: return times(apply(dtype, f, x, s, i), minus(g, kept(s->dot + i)));
    default: return g;
    }
}

/* ---- what is done to a slab ------------------------------------------------------------------ */

/* Runs step(i, count) for each pair of the row: whole ones first, without the cost of asking. */
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

/* The gradient of f(x) for the features from i on. */
V_INLINE struct pair gradient(int dtype, const struct row *row, int64_t i, int64_t count) {
    const int64_t bytes = v_bytes(dtype);
    prefetch(dtype, row->dy_cos + i * bytes + row->dy_ahead);
    prefetch(dtype, row->dy_sin + i * bytes + row->dy_ahead);
    const struct pair dy_cos = load(dtype, row->dy_cos + i * bytes, count, 0.0f);
    const struct pair dy_sin = load(dtype, row->dy_sin + i * bytes, count, 0.0f);
    return fused(dy_cos, kept(row->cosine + i), times(dy_sin, kept(row->sine + i)));
}

V_INLINE float row_max(int dtype, const struct row *row) {
    const int64_t bytes = v_bytes(dtype);
    struct v_peak peak = v_peak_of_none();
    vf rest = v_set(-INFINITY);
    FOR_PAIRS(i, count, row->width, {
        prefetch(dtype, row->x + i * bytes + row->x_ahead);
        const struct pair x = load(dtype, row->x + i * bytes, count, -INFINITY);
        if (count == PAIR)
            v_peak_add(dtype, &peak, row->x + i * bytes, x.a, x.b);
        else
            rest = v_max(x.a, v_max(x.b, rest));
    });
    const float of_rest = v_hmax(rest);
    if (row->width < PAIR)
        return of_rest;
    const float of_pairs = v_peak_value(dtype, &peak); /* NaN if one of them is */
    return of_rest > of_pairs ? of_rest : of_pairs;
}

/* What the softmax over features keeps of a slab. */
struct kept_slab {
    _Alignas(64) float e[TILE_CELLS],
        g[TILE_CELLS]; /* [rows][heads][pitch]: e^(x - max), 0 past the width; g, in backward */
    float max[TILE_CELLS / PAIR], sum[TILE_CELLS / PAIR], dot[TILE_CELLS / PAIR]; /* [rows][heads] */
};

/* First all maxima, then all sums, so that the horizontal end of one row overlaps with the next. */
V_INLINE void exponentials(int dtype, bool backward, const struct slab *slab, struct kept_slab *keeps) {
    for (int64_t r = 0, u = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++, u++) {
            const struct row row = row_of(slab, r, h);
            keeps->max[u] = row_max(dtype, &row);
        }
    for (int64_t r = 0, u = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++, u++) {
            const struct row row = row_of(slab, r, h);
            float *const e = keeps->e + u * slab->pitch, *const g = keeps->g + u * slab->pitch;
            const struct pair pivot = both(v_pivot(keeps->max[u]));
            struct pair sum = both(0.0f), dot = sum;
            FOR_PAIRS(i, count, row.width, {
                const struct pair x = load(dtype, row.x + i * v_bytes(dtype), count, -INFINITY);
                const struct pair term = exponential(x, pivot);
                keep(e + i, term);
                sum = plus(sum, term);
                if (backward) {
                    const struct pair slope = gradient(dtype, &row, i, count);
                    keep(g + i, slope);
                    dot = fused(term, slope, dot);
                }
            });
            keeps->sum[u] = v_sum(sum.a + sum.b);
            keeps->dot[u] = backward ? v_sum(dot.a + dot.b) : 0.0f;
        }
}

/* Makes what row_for() needs of the softmax over features: sum becomes 1 / sum, dot the sum of softmax * g. */
V_INLINE void prepare(int dtype, enum lrpe_f f, bool backward, const struct slab *slab, struct kept_slab *keeps) {
    if (f != LRPE_FEATURE)
        return;
    exponentials(dtype, backward, slab, keeps);
    for (int64_t u = 0; u < slab->rows * slab->heads; u++) {
        keeps->sum[u] = 1.0f / keeps->sum[u];
        keeps->dot[u] *= keeps->sum[u];
    }
}

V_INLINE struct row row_for(enum lrpe_f f, const struct slab *slab, int64_t r, int64_t h, struct kept_slab *keeps) {
    struct row row = row_of(slab, r, h);
    if (f == LRPE_FEATURE) {
        const int64_t u = r * slab->heads + h;
        row.e = keeps->e + u * slab->pitch;
        row.g = keeps->g + u * slab->pitch;
        row.s = (struct lrpe_statistics){.scale = &keeps->sum[u], .dot = &keeps->dot[u]};
    }
    return row;
}

/* The row's x; of the softmax over features its exponentials. */
V_INLINE struct pair argument(int dtype, enum lrpe_f f, const struct row *row, int64_t i, int64_t count) {
    if (f == LRPE_FEATURE)
        return kept(row->e + i);
    prefetch(dtype, row->x + i * v_bytes(dtype) + row->x_ahead);
    return load(dtype, row->x + i * v_bytes(dtype), count, 0.0f);
}

/* y = f(x) cos, f(x) sin */
V_INLINE void forward_row(int dtype, enum lrpe_f f, bool stream, const struct row *row, char *y_cos, char *y_sin) {
    const int64_t bytes = v_bytes(dtype);
    FOR_PAIRS(i, count, row->width, {
        const struct pair a = apply(dtype, f, argument(dtype, f, row, i, count), &row->s, i);
        store(dtype, y_cos + i * bytes, times(a, kept(row->cosine + i)), count, stream);
        store(dtype, y_sin + i * bytes, times(a, kept(row->sine + i)), count, stream);
    });
}

V_INLINE void forward_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct kept_slab keeps;
    prepare(dtype, f, false, slab, &keeps);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, &keeps);
            char *const y_cos = slab->out.at + r * slab->out.row + h * slab->out.head, *const y_sin =
                                                                                           y_cos + slab->out.half;
            if (slab->out.stream)
                forward_row(dtype, f, true, &row, y_cos, y_sin);
            else
                forward_row(dtype, f, false, &row, y_cos, y_sin);
        }
}

/* dx = f'(x) applied to dy_1 cos + dy_2 sin */
V_INLINE void backward_row(int dtype, enum lrpe_f f, bool stream, const struct row *row, char *dx) {
    FOR_PAIRS(i, count, row->width, {
        const struct pair x = f == LRPE_NONE ? both(0.0f) : argument(dtype, f, row, i, count);
        const struct pair g = f == LRPE_FEATURE ? kept(row->g + i) : gradient(dtype, row, i, count);
        store(dtype, dx + i * v_bytes(dtype), apply_grad(dtype, f, x, g, &row->s, i), count, stream);
    });
}

V_INLINE void backward_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct kept_slab keeps;
    prepare(dtype, f, true, slab, &keeps);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, &keeps);
            char *const dx = slab->out.at + r * slab->out.row + h * slab->out.head;
            if (slab->out.stream)
                backward_row(dtype, f, true, &row, dx);
            else
                backward_row(dtype, f, false, &row, dx);
        }
}

/* dtheta += position * f(x) * (dy_2 cos - dy_1 sin) */
V_INLINE void dtheta_slab(int dtype, enum lrpe_f f, const struct slab *slab) {
    struct kept_slab keeps;
    const int64_t bytes = v_bytes(dtype);
    prepare(dtype, f, false, slab, &keeps);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int64_t h = 0; h < slab->heads; h++) {
            const struct row row = row_for(f, slab, r, h, &keeps);
            const vd position = v_set_d(slab->position[r]);
            double *const sums = slab->dtheta + h * slab->dtheta_head;
            FOR_PAIRS(i, count, row.width, {
                const struct pair a = apply(dtype, f, argument(dtype, f, &row, i, count), &row.s, i);
                const struct pair dy_cos = load(dtype, row.dy_cos + i * bytes, count, 0.0f);
                const struct pair dy_sin = load(dtype, row.dy_sin + i * bytes, count, 0.0f);
                const struct pair turn = minus(times(dy_sin, kept(row.cosine + i)), times(dy_cos, kept(row.sine + i)));
                const struct pair term = times(a, turn);
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

/* Compiles a function for each dtype and f, and makes the table of them. */
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
    static slab_function *const what##_table[DTYPES][LRPE_FS] = {                                                      \
        EACH_F(ENTRY, what, RAFTER_F32) EACH_F(ENTRY, what, RAFTER_BF16) EACH_F(ENTRY, what, RAFTER_F16)};
TABLE(forward)
TABLE(backward)
TABLE(dtheta)

static void forward(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                    const struct lrpe_statistics *statistics, bool stream) {
    slab_function *const work = forward_table[call->x.dtype][f];
    struct tile t;
    struct slab slab = {0};
    _Alignas(64) char in[TILE_CELLS * 4], out[2 * TILE_CELLS * 4];
    for (start_tiles(&t, TILE_CELLS, true); next_tile(call, box, &t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            turn_to_batch(call, box, &t, b);
            open_slab(call, &t, f, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, &t, b, in);
            slab.out = open_output(&call->y, 2, &t, b, out, stream);
            work(&slab);
            close_output(&call->y, 2, &t, &slab.out);
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
    struct tile t;
    struct slab slab = {0};
    _Alignas(64) char x[TILE_CELLS * 4], dy[2 * TILE_CELLS * 4], out[TILE_CELLS * 4];
    for (start_tiles(&t, TILE_CELLS, true); next_tile(call, box, &t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            turn_to_batch(call, box, &t, b);
            open_slab(call, &t, f, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, &t, b, x);
            slab.dy = open_input(&call->dy, 2, box, &t, b, dy);
            if (call->dx.data) {
                slab.out = open_output(&call->dx, 1, &t, b, out, stream);
                work(&slab);
                close_output(&call->dx, 1, &t, &slab.out);
            }
            if (dtheta) {
                for (int64_t r = 0; r < t.rows; r++)
                    slab.position[r] = (double)position_of(call, b, t.n + r);
                slab.dtheta = dtheta + t.h * padded + t.d;
                slab.dtheta_head = padded;
                work_dtheta(&slab);
            }
        }
    if (stream)
        v_fence();
}

/* ---- statistics of columns ------------------------------------------------------------------- */

/* Folds `pairs` pairs of columns of one head, from feature i on, into their running statistics. Only `count` columns
 * are there when that is less than a pair. */
enum { PAIRS = 2 };

V_INLINE void fold_columns(int dtype, bool backward, int pairs, const struct slab *slab, int64_t h, int64_t i,
                           int64_t count) {
    const int64_t from = i * v_bytes(dtype), step = PAIR * v_bytes(dtype), angles = slab->heads * slab->pitch;
    struct row row = row_of(slab, 0, h);
    const struct lrpe_statistics s = {row.s.pivot + i, row.s.scale + i, backward ? row.s.dot + i : NULL};
    struct pair max[PAIRS], pivot[PAIRS], sum[PAIRS], dot[PAIRS];
    for (int k = 0; k < pairs; k++)
        max[k] = kept(s.pivot + k * PAIR);
    for (int64_t r = 0; r < slab->rows; r++)
        for (int k = 0; k < pairs; k++) {
            const char *x = row.x + r * slab->x.row + from + k * step;
            prefetch(dtype, x + row.x_ahead);
            max[k] = larger(load(dtype, x, count, -INFINITY), max[k]);
        }
    for (int k = 0; k < pairs; k++) {
        pivot[k] = pivot_of(max[k]);
        const struct pair shrink = exponential(kept(s.pivot + k * PAIR), pivot[k]);
        sum[k] = times(kept(s.scale + k * PAIR), shrink);
        dot[k] = backward ? times(kept(s.dot + k * PAIR), shrink) : both(0.0f);
    }
    for (int64_t r = 0; r < slab->rows; r++) {
        for (int k = 0; k < pairs; k++) {
            const struct pair e = exponential(load(dtype, row.x + from + k * step, count, -INFINITY), pivot[k]);
            sum[k] = plus(sum[k], e);
            if (backward)
                dot[k] = fused(e, gradient(dtype, &row, i + k * PAIR, count), dot[k]);
        }
        row.x += slab->x.row;
        row.dy_cos += slab->dy.row, row.dy_sin += slab->dy.row;
        row.sine += angles, row.cosine += angles;
    }
    for (int k = 0; k < pairs; k++) {
        keep(s.pivot + k * PAIR, max[k]);
        keep(s.scale + k * PAIR, sum[k]);
        if (backward)
            keep(s.dot + k * PAIR, dot[k]);
    }
}

V_INLINE void fold_slab(int dtype, bool backward, const struct slab *slab) {
    for (int64_t h = 0; h < slab->heads; h++) {
        int64_t i = 0;
        for (; i + PAIRS * PAIR <= slab->width; i += PAIRS * PAIR)
            fold_columns(dtype, backward, PAIRS, slab, h, i, PAIR);
        for (; i + PAIR <= slab->width; i += PAIR)
            fold_columns(dtype, backward, 1, slab, h, i, PAIR);
        if (i < slab->width)
            fold_columns(dtype, backward, 1, slab, h, i, slab->width - i);
    }
}

static void columns(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                    const struct lrpe_statistics *statistics) {
    const bool backwards = call->direction == RAFTER_BACKWARD;
    const int64_t *shape = call->x.shape, padded = lrpe_padded(shape[3]);
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++)
            for (int64_t d = box->d; d < lrpe_padded(box->d_end); d++) {
                const int64_t at = (b * shape[2] + h) * padded + d;
                statistics->pivot[at] = -INFINITY;
                statistics->scale[at] = 0.0f;
                if (backwards)
                    statistics->dot[at] = 0.0f;
            }
    struct tile t;
    struct slab slab = {0};
    _Alignas(64) char x[TILE_CELLS * 4], dy[2 * TILE_CELLS * 4];
    for (start_tiles(&t, TILE_CELLS / TILE_ROWS, backwards); next_tile(call, box, &t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            turn_to_batch(call, box, &t, b);
            open_slab(call, &t, LRPE_SEQUENCE, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, &t, b, x);
            if (backwards) {
                slab.dy = open_input(&call->dy, 2, box, &t, b, dy);
                V_FOR_DTYPE(call->x.dtype, dtype, fold_slab(dtype, true, &slab))
            } else {
                V_FOR_DTYPE(call->x.dtype, dtype, fold_slab(dtype, false, &slab))
            }
        }
}

static void merge(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                  const struct lrpe_statistics *statistics, int64_t parts, int64_t step) {
    const int64_t heads = call->x.shape[2], padded = lrpe_padded(call->x.shape[3]);
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++)
            for (int64_t d = box->d; d < box->d_end; d += PAIR) {
                const int64_t at = (b * heads + h) * padded + d;
                const struct lrpe_statistics s = {statistics->pivot + at, statistics->scale + at,
                                                  statistics->dot ? statistics->dot + at : NULL};
                struct pair max = kept(s.pivot), sum = both(0.0f), dot = sum;
                for (int64_t p = 1; p < parts; p++)
                    max = larger(kept(s.pivot + p * step), max);
                const struct pair pivot = pivot_of(max);
                for (int64_t p = 0; p < parts; p++) {
                    const struct pair shrink = exponential(kept(s.pivot + p * step), pivot);
                    sum = fused(kept(s.scale + p * step), shrink, sum);
                    if (s.dot)
                        dot = fused(kept(s.dot + p * step), shrink, dot);
                }
                keep(s.pivot, pivot);
                keep(s.scale, (struct pair){v_set(1.0f) / sum.a, v_set(1.0f) / sum.b});
                if (s.dot)
                    keep(s.dot, (struct pair){dot.a / sum.a, dot.b / sum.b});
            }
}

/* ---- statistics of rows ---------------------------------------------------------------------- */

/* Folds a slab, which has a part of one head's features, into the statistics of its rows. */
V_INLINE void fold_rows(int dtype, bool backward, const struct slab *slab, bool first, bool last) {
    struct kept_slab part;
    exponentials(dtype, backward, slab, &part);
    for (int64_t r = 0; r < slab->rows; r++) {
        const struct lrpe_statistics s = row_of(slab, r, 0).s;
        const float before = first ? -INFINITY : *s.pivot;
        const float max = part.max[r] > before ? part.max[r] : before, pivot = v_pivot(max);
        const float shrink = v_exp_from_scalar(before, pivot), fit = v_exp_from_scalar(part.max[r], pivot);
        const float sum = (first ? 0.0f : *s.scale * shrink) + part.sum[r] * fit;
        *s.pivot = last ? pivot : max;
        *s.scale = last ? 1.0f / sum : sum;
        if (backward) {
            const float dot = (first ? 0.0f : *s.dot * shrink) + part.dot[r] * fit;
            *s.dot = last ? dot / sum : dot;
        }
    }
}

static void rows(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                 const struct lrpe_statistics *statistics) {
    const bool backwards = call->direction == RAFTER_BACKWARD;
    struct tile t;
    struct slab slab = {0};
    _Alignas(64) char x[TILE_CELLS * 4], dy[2 * TILE_CELLS * 4];
    for (start_tiles(&t, TILE_CELLS, backwards); next_tile(call, box, &t);)
        for (int64_t b = box->b; b < box->b_end; b++) {
            turn_to_batch(call, box, &t, b);
            open_slab(call, &t, LRPE_FEATURE_WIDE, statistics, b, &slab);
            slab.x = open_input(&call->x, 1, box, &t, b, x);
            const bool first = t.d == box->d, last = t.d + t.width == box->d_end;
            if (backwards) {
                slab.dy = open_input(&call->dy, 2, box, &t, b, dy);
                V_FOR_DTYPE(call->x.dtype, dtype, fold_rows(dtype, true, &slab, first, last))
            } else {
                V_FOR_DTYPE(call->x.dtype, dtype, fold_rows(dtype, false, &slab, first, last))
            }
        }
}

/* ---- dtheta ---------------------------------------------------------------------------------- */

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
                    sum += sums[(p * heads + h) * padded + kept_at(call->x.dtype, d)];
        char *const at = rafter_at(out, row * out->stride[0] + column * out->stride[1]);
        V_FOR_DTYPE(out->dtype, dtype, v_put(dtype, at, (float)sum))
    }
}

const struct lrpe_kernels RAFTER_KERNELS(lrpe_cosine) = {forward, backward, columns, merge, rows, sum_dtheta};
