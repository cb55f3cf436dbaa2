/*
 * Angles depend on the token, the head and the feature, but not on the batch. So a kernel walks its box in tiles, some
 * tokens by some columns (features of neighbouring heads): it computes the sines and cosines of a tile once, and then
 * goes through all batches with them.
 */
#include "ops/lrpe_cosine/kernels.h"

#include "core/variants.h"
#include "simd/activations.h"
#include "simd/sincos.h"
#include "simd/softmax.h"

extern const struct lrpe_kernels RAFTER_KERNELS(lrpe_cosine);

/* ---- tiles ---------------------------------------------------------------------------------------------------------
 */

enum {
    TILE_CELLS = 4096, /* angles of a tile: their sines and cosines take 32 KiB */
    TILE_ROWS = 16
};

struct tile {
    int64_t most_rows, most_columns;
    bool angles;                             /* whether they are wanted */
    int64_t n, rows;                         /* tokens */
    int64_t h, heads;                        /* more than one only where all the box's features are in */
    int64_t d, width;                        /* features of each head */
    int64_t pitch;                           /* width rounded up to whole vectors */
    double largest;                          /* see v_sincos_row */
    _Alignas(64) double theta[LRPE_COLUMNS]; /* [heads][pitch] */
    _Alignas(64) float sine[TILE_CELLS], cosine[TILE_CELLS]; /* [rows][heads][pitch] */
};

V_INLINE int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static void load_theta(const rafter_view *theta, struct tile *t) {
    const int64_t head_step = theta->stride[0], step = theta->stride[1]; /* 0 where one value serves all */
    vf largest = v_set(0.0f);
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->pitch; i += V_LANES) {
            const char *from = rafter_at(theta, (t->h + h) * head_step + (t->d + i) * step);
            const int64_t count = least(t->width - i, V_LANES);
            char buffer[V_LANES * 4];
            vf a = v_set(0.0f);
            V_FOR_DTYPE(theta->dtype, dtype,
                        { a = v_load_part(dtype, v_gather(dtype, from, step, count, buffer), count, 0.0f); });
            vd low, high;
            v_to_d(a, &low, &high);
            v_store_d(t->theta + h * t->pitch + i, low);
            v_store_d(t->theta + h * t->pitch + i + V_LANES / 2, high);
            const vf magnitude = (vf)((vi)a & INT32_MAX);
            largest = v_max(v_select(magnitude <= v_set(INFINITY), magnitude, v_set(INFINITY)), largest);
        }
    t->largest = (double)v_hmax(largest);
}

/* Moves on to the next tile of the box: features, then heads, then tokens. A tile with no rows is before the first. */
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
    t->width = least(box->d_end - t->d, t->most_columns);
    t->pitch = (t->width + V_LANES - 1) / V_LANES * V_LANES;
    t->heads = t->width < box->d_end - box->d ? 1 : least(box->h_end - t->h, t->most_columns / t->pitch);
    t->rows = least(box->n_end - t->n, least(t->most_rows, TILE_CELLS / (t->heads * t->pitch)));
    if (t->angles && (t->h != last_h || t->d != last_d))
        load_theta(&call->theta, t);
    return true;
}

static int64_t position_of(const struct lrpe_cosine_call *call, int64_t b, int64_t n) {
    if (!call->positions.data)
        return call->offset + n;
    const char *at = rafter_at(&call->positions, b * call->positions.stride[0] + n * call->positions.stride[1]);
    int64_t wide;
    int32_t narrow;
    if (call->positions.dtype == RAFTER_I64)
        return memcpy(&wide, at, 8), wide;
    return memcpy(&narrow, at, 4), narrow;
}

/* The tile's sines and cosines, for batch b of the box. */
static void compute_angles(const struct lrpe_cosine_call *call, struct tile *t, int64_t b) {
    const int64_t columns = t->heads * t->pitch;
    for (int64_t r = 0; r < t->rows; r++)
        v_sincos_row(t->theta, t->largest, position_of(call, b, t->n + r), columns, t->sine + r * columns,
                     t->cosine + r * columns);
}

V_INLINE bool angles_differ(const struct lrpe_cosine_call *call) {
    return call->positions.data && call->positions.stride[0] != 0;
}

/* ---- rows in memory -------------------------------------------------------------------------------------------------
 */

/* A tile's part of one head of an input, from feature d on; copied to the buffer where its elements are not neighbours.
 */
V_INLINE const char *input_row(int dtype, const rafter_view *view, const struct tile *t, int64_t b, int64_t n,
                               int64_t h, int64_t d, char *buffer) {
    const int64_t *step = view->stride;
    const char *from = view->data + (b * step[0] + n * step[1] + h * step[2] + d * step[3]) * v_bytes(dtype);
    return v_gather(dtype, from, step[3], t->width, buffer);
}

/* A tile's part of one token of an output, which has one or two halves of D features per head. It is written in place,
 * or to a buffer first: where elements are not neighbours, and where whole lines are to be streamed that heads do not
 * fill. */
struct output_row {
    char *to, *at;       /* where it belongs, where it is written */
    int64_t head, half;  /* steps, in bytes, of `at` */
    bool stream, staged; /* lines of `at` go past the caches; `at` is the buffer */
};

V_INLINE struct output_row open_output(int dtype, const rafter_view *view, int halves, const struct tile *t, int64_t b,
                                       int64_t n, char *buffer, bool stream) {
    const int64_t *step = view->stride, bytes = v_bytes(dtype), features = view->shape[3] / halves;
    const bool neighbours = step[3] == 1 || view->shape[3] == 1;
    struct output_row row = {.head = step[2] * bytes, .half = features * step[3] * bytes};
    row.to = view->data + (b * step[0] + n * step[1] + t->h * step[2] + t->d * step[3]) * bytes;
    const bool lines = ((uintptr_t)row.to | (uintptr_t)row.head | (uintptr_t)row.half) % V_STREAM == 0;
    const bool one_piece = neighbours && t->width == features && (t->heads == 1 || step[2] == view->shape[3]);
    row.stream = stream && neighbours && lines;
    row.staged = !neighbours || (stream && !lines && one_piece);
    row.at = row.to;
    if (row.staged) {
        row.at = buffer;
        row.half = t->width * bytes;
        row.head = row.half * halves;
    }
    return row;
}

V_INLINE vf same(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

V_INLINE void close_output(int dtype, const rafter_view *view, int halves, const struct tile *t,
                           const struct output_row *row) {
    if (!row->staged)
        return;
    const int64_t *step = view->stride, bytes = v_bytes(dtype), features = view->shape[3] / halves;
    if (step[3] == 1 || view->shape[3] == 1) {
        const void *const from[] = {row->at};
        v_map(dtype, 1, from, row->to, t->heads * halves * t->width, true, same, NULL);
        return;
    }
    for (int64_t h = 0; h < t->heads; h++)
        for (int half = 0; half < halves; half++)
            v_scatter(dtype, row->at + h * row->head + half * row->half,
                      row->to + (h * step[2] + half * features * step[3]) * bytes, step[3], t->width);
}

V_INLINE void put2(int dtype, char *p, vf a, vf b, bool stream) {
    if (stream)
        v_stream2(dtype, p, a, b);
    else
        v_store2(dtype, p, a, b);
}

/* ---- f and its gradient ---------------------------------------------------------------------------------------------
 */

V_INLINE vf load_float(const float *p) {
    return v_load(RAFTER_F32, p);
}

/* f(x) for the features from i on. `s` points at the statistics of the row, or of the row's first column. */
V_INLINE vf apply(enum lrpe_f f, vf x, const struct lrpe_statistics *s, int64_t i) {
    switch (f) {
    case LRPE_NONE: return x;
    case LRPE_RELU: return v_relu(x);
    case LRPE_SIGMOID: return v_sigmoid(x);
    case LRPE_SILU: return v_silu(x);
    case LRPE_FEATURE: return x * v_set(*s->scale); /* x is an exponential already */
    case LRPE_FEATURE_WIDE: return v_exp_from(x, v_set(*s->pivot)) * v_set(*s->scale);
    case LRPE_SEQUENCE: return v_exp_from(x, load_float(s->pivot + i)) * load_float(s->scale + i);
    }
    return x;
}

/* The gradient of x, g being that of f(x). */
V_INLINE vf apply_grad(enum lrpe_f f, vf x, vf g, const struct lrpe_statistics *s, int64_t i) {
    switch (f) {
    case LRPE_NONE: return g;
    case LRPE_RELU: return v_relu_grad(x, g);
    case LRPE_SIGMOID: return v_sigmoid_grad(x, g);
    case LRPE_SILU: return v_silu_grad(x, g);
    case LRPE_FEATURE:
    case LRPE_FEATURE_WIDE: return apply(f, x, s, i) * (g - v_set(*s->dot));
    case LRPE_SEQUENCE: return apply(f, x, s, i) * (g - load_float(s->dot + i));
    }
    return g;
}

/* Instantiates `statement` for each f. */
#define FOR_F(value, f, statement)                                                                                     \
    switch (value) {                                                                                                   \
        FOR_F_CASE(LRPE_NONE, f, statement)                                                                            \
        FOR_F_CASE(LRPE_RELU, f, statement)                                                                            \
        FOR_F_CASE(LRPE_SIGMOID, f, statement)                                                                         \
        FOR_F_CASE(LRPE_SILU, f, statement)                                                                            \
        FOR_F_CASE(LRPE_FEATURE, f, statement)                                                                         \
        FOR_F_CASE(LRPE_FEATURE_WIDE, f, statement)                                                                    \
        FOR_F_CASE(LRPE_SEQUENCE, f, statement)                                                                        \
    }
#define FOR_F_CASE(name, f, statement)                                                                                 \
    case name: {                                                                                                       \
        const enum lrpe_f f = name;                                                                                    \
        statement;                                                                                                     \
        break;                                                                                                         \
    }

/* Statistics of (b, h, d) in arrays of columns, or of (b, n, h) in arrays of rows. */
V_INLINE struct lrpe_statistics statistics_at(const struct lrpe_cosine_call *call, enum lrpe_f f,
                                              const struct lrpe_statistics *s, int64_t b, int64_t n, int64_t h,
                                              int64_t d) {
    const int64_t *shape = call->x.shape;
    const int64_t at = f == LRPE_SEQUENCE       ? (b * shape[2] + h) * lrpe_padded(shape[3]) + d
                       : f == LRPE_FEATURE_WIDE ? (b * shape[1] + n) * shape[2] + h
                                                : 0;
    struct lrpe_statistics there = {NULL, NULL, NULL};
    if (f == LRPE_SEQUENCE || f == LRPE_FEATURE_WIDE) {
        there.pivot = s->pivot + at;
        there.scale = s->scale + at;
        there.dot = s->dot ? s->dot + at : NULL;
    }
    return there;
}

/* ---- one row --------------------------------------------------------------------------------------------------------
 */

/* Inputs of one row of a tile, and the sines and cosines of its angles. */
struct row {
    const char *x, *dy_cos, *dy_sin;
    const float *sine, *cosine;
    int64_t n;
};

/* The gradient of f(x) for the features from i on. */
V_INLINE vf gradient_of_f(vf dy_cos, vf dy_sin, const struct row *row, int64_t i) {
    return v_fma(dy_cos, load_float(row->cosine + i), dy_sin * load_float(row->sine + i));
}

/* The largest x of the row. */
V_INLINE float row_max(int dtype, const struct row *row) {
    const int64_t step = V_LANES * v_bytes(dtype);
    const char *x = row->x;
    vf m0 = v_set(-INFINITY), m1 = m0;
    int64_t left = row->n;
    for (; left >= 2 * V_LANES; left -= 2 * V_LANES, x += 2 * step) {
        m0 = v_max(v_load(dtype, x), m0);
        m1 = v_max(v_load(dtype, x + step), m1);
    }
    for (; left > 0; left -= V_LANES, x += step)
        m0 = v_max(v_load_part(dtype, x, least(left, V_LANES), -INFINITY), m0);
    return v_hmax(v_max(m0, m1));
}

/* e = e^(x - max), and in backward g, for one row (in whole vectors; e is 0 past the end), with the row's statistics.
 */
struct row_statistics {
    float max, sum, dot;
};

V_INLINE struct row_statistics exponentials(int dtype, bool backward, const struct row *row, float *e, float *g) {
    const int64_t bytes = v_bytes(dtype);
    const float max = row_max(dtype, row);
    const vf pivot = v_set(v_pivot(max));
    vf sum = v_set(0.0f), dot = sum;
    for (int64_t i = 0; i < row->n; i += V_LANES) {
        const int64_t count = least(row->n - i, V_LANES);
        const bool whole = count == V_LANES;
        const char *x = row->x + i * bytes;
        const vf a = v_exp_from(whole ? v_load(dtype, x) : v_load_part(dtype, x, count, -INFINITY), pivot);
        v_store(RAFTER_F32, e + i, a);
        sum += a;
        if (backward) {
            const char *p = row->dy_cos + i * bytes, *q = row->dy_sin + i * bytes;
            const vf dy_cos = whole ? v_load(dtype, p) : v_load_part(dtype, p, count, 0.0f);
            const vf dy_sin = whole ? v_load(dtype, q) : v_load_part(dtype, q, count, 0.0f);
            const vf b = gradient_of_f(dy_cos, dy_sin, row, i);
            v_store(RAFTER_F32, g + i, b);
            dot = v_fma(a, b, dot);
        }
    }
    return (struct row_statistics){max, v_sum(sum), backward ? v_sum(dot) : 0.0f};
}

/* y = f(x) cos, f(x) sin. The elements of x are `in`s. */
V_INLINE void rotate(int in, int dtype, enum lrpe_f f, const struct row *row, const struct lrpe_statistics *s,
                     char *y_cos, char *y_sin, bool stream) {
    const int64_t step = v_bytes(in), bytes = v_bytes(dtype);
    int64_t i = 0;
    for (; i + 2 * V_LANES <= row->n; i += 2 * V_LANES) {
        const int64_t j = i + V_LANES;
        const vf a = apply(f, v_load(in, row->x + i * step), s, i);
        const vf b = apply(f, v_load(in, row->x + j * step), s, j);
        put2(dtype, y_cos + i * bytes, a * load_float(row->cosine + i), b * load_float(row->cosine + j), stream);
        put2(dtype, y_sin + i * bytes, a * load_float(row->sine + i), b * load_float(row->sine + j), stream);
    }
    for (; i < row->n; i += V_LANES) {
        const int64_t count = least(row->n - i, V_LANES);
        const vf a = apply(f, v_load_part(in, row->x + i * step, count, 0.0f), s, i);
        v_store_part(dtype, y_cos + i * bytes, a * load_float(row->cosine + i), count);
        v_store_part(dtype, y_sin + i * bytes, a * load_float(row->sine + i), count);
    }
}

/* dx from x and dy; of the softmax over a row from its exponentials and g. */
V_INLINE void rotate_back(int dtype, enum lrpe_f f, const struct row *row, const float *e, const float *g,
                          const struct lrpe_statistics *s, char *dx, bool stream) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
#define DX(at, load)                                                                                                   \
    (f == LRPE_FEATURE ? apply_grad(f, load_float(e + (at)), load_float(g + (at)), s, (at))                            \
                       : apply_grad(f, f == LRPE_NONE ? v_set(0.0f) : load(row->x),                                    \
                                    gradient_of_f(load(row->dy_cos), load(row->dy_sin), row, (at)), s, (at)))
#define WHOLE_I(p) v_load(dtype, (p) + i * bytes)
#define WHOLE_J(p) v_load(dtype, (p) + j * bytes)
#define PART(p) v_load_part(dtype, (p) + i * bytes, count, 0.0f)
    for (; i + 2 * V_LANES <= row->n; i += 2 * V_LANES) {
        const int64_t j = i + V_LANES;
        put2(dtype, dx + i * bytes, DX(i, WHOLE_I), DX(j, WHOLE_J), stream);
    }
    for (; i < row->n; i += V_LANES) {
        const int64_t count = least(row->n - i, V_LANES);
        v_store_part(dtype, dx + i * bytes, DX(i, PART), count);
    }
#undef DX
#undef WHOLE_I
#undef WHOLE_J
#undef PART
}

/* dtheta += position * f(x) * (dy_sin cos - dy_cos sin). */
V_INLINE void turn_theta(int in, int dtype, enum lrpe_f f, const struct row *row, const char *x,
                         const struct lrpe_statistics *s, int64_t position, double *dtheta) {
    const int64_t step = v_bytes(in), bytes = v_bytes(dtype);
    const vd scale = v_set_d((double)position);
    for (int64_t i = 0; i < row->n; i += V_LANES) {
        const int64_t count = least(row->n - i, V_LANES);
        const vf a = apply(f, v_load_part(in, x + i * step, count, 0.0f), s, i);
        const vf dy_cos = v_load_part(dtype, row->dy_cos + i * bytes, count, 0.0f);
        const vf dy_sin = v_load_part(dtype, row->dy_sin + i * bytes, count, 0.0f);
        const vf turn = a * v_fma(dy_sin, load_float(row->cosine + i), -(dy_cos * load_float(row->sine + i)));
        vd low, high;
        v_to_d(turn, &low, &high);
        v_store_d(dtheta + i, v_fma_d(scale, low, v_load_d(dtheta + i)));
        v_store_d(dtheta + i + V_LANES / 2, v_fma_d(scale, high, v_load_d(dtheta + i + V_LANES / 2)));
    }
}

/* ---- forward and backward of a box
 * ------------------------------------------------------------------------------------ */

V_INLINE void forward_box(int dtype, enum lrpe_f f, const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                          const struct lrpe_statistics *statistics, bool stream) {
    struct tile t;
    t.most_rows = TILE_ROWS, t.most_columns = LRPE_COLUMNS, t.angles = true, t.rows = 0;
    _Alignas(64) char in[LRPE_COLUMNS * 4], out[2 * LRPE_COLUMNS * 4];
    _Alignas(64) float e[LRPE_COLUMNS];
    while (next_tile(call, box, &t))
        for (int64_t b = box->b; b < box->b_end; b++) {
            if (b == box->b || angles_differ(call))
                compute_angles(call, &t, b);
            for (int64_t r = 0; r < t.rows; r++) {
                const int64_t n = t.n + r;
                const struct output_row y = open_output(dtype, &call->y, 2, &t, b, n, out, stream);
                for (int64_t h = 0; h < t.heads; h++) {
                    const int64_t angles = (r * t.heads + h) * t.pitch;
                    struct row row = {.sine = t.sine + angles, .cosine = t.cosine + angles, .n = t.width};
                    row.x = input_row(dtype, &call->x, &t, b, n, t.h + h, t.d, in);
                    char *const y_cos = y.at + h * y.head, *const y_sin = y_cos + y.half;
                    if (f == LRPE_FEATURE) {
                        const struct row_statistics sums = exponentials(dtype, false, &row, e, NULL);
                        float scale = 1.0f / sums.sum;
                        row.x = (const char *)e;
                        rotate(RAFTER_F32, dtype, f, &row, &(struct lrpe_statistics){.scale = &scale}, y_cos, y_sin,
                               y.stream);
                    } else {
                        const struct lrpe_statistics s = statistics_at(call, f, statistics, b, n, t.h + h, t.d);
                        rotate(dtype, dtype, f, &row, &s, y_cos, y_sin, y.stream);
                    }
                }
                close_output(dtype, &call->y, 2, &t, &y);
            }
        }
    if (stream)
        v_fence();
}

static void forward(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                    const struct lrpe_statistics *statistics, bool stream) {
    V_FOR_DTYPE(call->x.dtype, dtype, FOR_F(f, g, forward_box(dtype, g, call, box, statistics, stream)));
}

V_INLINE void backward_box(int dtype, enum lrpe_f f, const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                           const struct lrpe_statistics *statistics, double *dtheta, bool stream) {
    const int64_t features = call->x.shape[3], padded = lrpe_padded(features);
    if (dtheta)
        for (int64_t h = box->h; h < box->h_end; h++)
            memset(dtheta + h * padded + box->d, 0, (size_t)(lrpe_padded(box->d_end) - box->d) * sizeof *dtheta);
    struct tile t;
    t.most_rows = TILE_ROWS, t.most_columns = LRPE_COLUMNS, t.angles = true, t.rows = 0;
    _Alignas(64) char in[3][LRPE_COLUMNS * 4], out[LRPE_COLUMNS * 4];
    _Alignas(64) float e[LRPE_COLUMNS], g[LRPE_COLUMNS];
    while (next_tile(call, box, &t))
        for (int64_t b = box->b; b < box->b_end; b++) {
            if (b == box->b || angles_differ(call))
                compute_angles(call, &t, b);
            for (int64_t r = 0; r < t.rows; r++) {
                const int64_t n = t.n + r;
                struct output_row dx = {NULL, NULL, 0, 0, false, false};
                if (call->dx.data)
                    dx = open_output(dtype, &call->dx, 1, &t, b, n, out, stream);
                for (int64_t h = 0; h < t.heads; h++) {
                    const int64_t angles = (r * t.heads + h) * t.pitch;
                    struct row row = {.sine = t.sine + angles, .cosine = t.cosine + angles, .n = t.width};
                    if (f != LRPE_NONE || dtheta)
                        row.x = input_row(dtype, &call->x, &t, b, n, t.h + h, t.d, in[0]);
                    row.dy_cos = input_row(dtype, &call->dy, &t, b, n, t.h + h, t.d, in[1]);
                    row.dy_sin = input_row(dtype, &call->dy, &t, b, n, t.h + h, features + t.d, in[2]);
                    struct lrpe_statistics s = statistics_at(call, f, statistics, b, n, t.h + h, t.d);
                    float scale, dot;
                    if (f == LRPE_FEATURE) {
                        const struct row_statistics sums = exponentials(dtype, true, &row, e, g);
                        scale = 1.0f / sums.sum;
                        dot = sums.dot * scale;
                        s = (struct lrpe_statistics){.scale = &scale, .dot = &dot};
                    }
                    if (call->dx.data)
                        rotate_back(dtype, f, &row, e, g, &s, dx.at + h * dx.head, dx.stream);
                    if (dtheta) {
                        double *const sums = dtheta + (t.h + h) * padded + t.d;
                        const int64_t position = position_of(call, b, n);
                        if (f == LRPE_FEATURE)
                            turn_theta(RAFTER_F32, dtype, f, &row, (const char *)e, &s, position, sums);
                        else
                            turn_theta(dtype, dtype, f, &row, row.x, &s, position, sums);
                    }
                }
                if (call->dx.data)
                    close_output(dtype, &call->dx, 1, &t, &dx);
            }
        }
    if (stream)
        v_fence();
}

static void backward(const struct lrpe_cosine_call *call, const struct lrpe_box *box, enum lrpe_f f,
                     const struct lrpe_statistics *statistics, double *dtheta, bool stream) {
    V_FOR_DTYPE(call->x.dtype, dtype, FOR_F(f, g, backward_box(dtype, g, call, box, statistics, dtheta, stream)));
}

/* ---- statistics of columns
 * ---------------------------------------------------------------------------------------------- */

enum { BLOCK_ROWS = TILE_ROWS, BLOCK_COLUMNS = 256 };

/* Some rows of one tile and head: row r of x is at x + r * x_step bytes. */
struct block {
    const char *x, *dy_cos, *dy_sin;
    const float *sine, *cosine;
    int64_t rows, x_step, dy_step, angle_step;
};

/* Folds `vectors` vectors of columns of a block, from feature i on, into running statistics. Only the first `count` of
 * V_LANES columns are there when vectors is 1. */
V_INLINE void fold_columns(int dtype, bool backward, int vectors, const struct block *k, int64_t i, int64_t count,
                           const struct lrpe_statistics *s) {
    enum { MOST = 4 };
    const int64_t step = V_LANES * v_bytes(dtype), from = i * v_bytes(dtype);
    const bool whole = vectors > 1 || count == V_LANES;
#define LOAD(p, fill) (whole ? v_load(dtype, (p) + v * step) : v_load_part(dtype, (p) + v * step, count, fill))
    vf max[MOST], sum[MOST], dot[MOST], pivot[MOST];
    for (int v = 0; v < vectors; v++)
        max[v] = load_float(s->pivot + i + v * V_LANES);
    for (int64_t r = 0; r < k->rows; r++)
        for (int v = 0; v < vectors; v++)
            max[v] = v_max(LOAD(k->x + from + r * k->x_step, -INFINITY), max[v]);
    for (int v = 0; v < vectors; v++) {
        pivot[v] = v_select(max[v] == v_set(-INFINITY), v_set(0.0f), max[v]);
        const vf shrink = v_exp_from(load_float(s->pivot + i + v * V_LANES), pivot[v]);
        sum[v] = load_float(s->scale + i + v * V_LANES) * shrink;
        dot[v] = backward ? load_float(s->dot + i + v * V_LANES) * shrink : v_set(0.0f);
    }
    for (int64_t r = 0; r < k->rows; r++)
        for (int v = 0; v < vectors; v++) {
            const vf e = v_exp_from(LOAD(k->x + from + r * k->x_step, -INFINITY), pivot[v]);
            sum[v] += e;
            if (backward) {
                const struct row row = {.sine = k->sine + r * k->angle_step, .cosine = k->cosine + r * k->angle_step};
                const vf g = gradient_of_f(LOAD(k->dy_cos + from + r * k->dy_step, 0.0f),
                                           LOAD(k->dy_sin + from + r * k->dy_step, 0.0f), &row, i + v * V_LANES);
                dot[v] = v_fma(e, g, dot[v]);
            }
        }
#undef LOAD
    for (int v = 0; v < vectors; v++) {
        v_store(RAFTER_F32, s->pivot + i + v * V_LANES, max[v]);
        v_store(RAFTER_F32, s->scale + i + v * V_LANES, sum[v]);
        if (backward)
            v_store(RAFTER_F32, s->dot + i + v * V_LANES, dot[v]);
    }
}

/* The first of the tile's rows of one head of an input, and by *step (in bytes) the others. */
V_INLINE const char *input_block(int dtype, const rafter_view *view, const struct tile *t, int64_t b, int64_t h,
                                 int64_t d, char *buffer, int64_t *step) {
    const int64_t bytes = v_bytes(dtype);
    const char *first = input_row(dtype, view, t, b, t->n, h, d, buffer);
    *step = view->stride[1] * bytes;
    if (first == buffer) {
        *step = t->width * bytes;
        for (int64_t r = 1; r < t->rows; r++)
            input_row(dtype, view, t, b, t->n + r, h, d, buffer + r * *step);
    }
    return first;
}

V_INLINE void columns_box(int dtype, bool backward, const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                          const struct lrpe_statistics *statistics) {
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++) {
            const struct lrpe_statistics s = statistics_at(call, LRPE_SEQUENCE, statistics, b, 0, h, 0);
            for (int64_t d = box->d; d < lrpe_padded(box->d_end); d++) {
                s.pivot[d] = -INFINITY;
                s.scale[d] = 0.0f;
                if (backward)
                    s.dot[d] = 0.0f;
            }
        }
    struct tile t;
    t.most_rows = BLOCK_ROWS, t.most_columns = BLOCK_COLUMNS, t.angles = backward, t.rows = 0;
    _Alignas(64) char in[3][BLOCK_ROWS * BLOCK_COLUMNS * 4];
    while (next_tile(call, box, &t))
        for (int64_t b = box->b; b < box->b_end; b++) {
            if (backward && (b == box->b || angles_differ(call)))
                compute_angles(call, &t, b);
            for (int64_t h = 0; h < t.heads; h++) {
                struct block k = {.sine = t.sine + h * t.pitch,
                                  .cosine = t.cosine + h * t.pitch,
                                  .rows = t.rows,
                                  .angle_step = t.heads * t.pitch};
                k.x = input_block(dtype, &call->x, &t, b, t.h + h, t.d, in[0], &k.x_step);
                if (backward) {
                    k.dy_cos = input_block(dtype, &call->dy, &t, b, t.h + h, t.d, in[1], &k.dy_step);
                    k.dy_sin = input_block(dtype, &call->dy, &t, b, t.h + h, call->x.shape[3] + t.d, in[2], &k.dy_step);
                }
                const struct lrpe_statistics s = statistics_at(call, LRPE_SEQUENCE, statistics, b, 0, t.h + h, t.d);
                int64_t i = 0;
                for (; i + 4 * V_LANES <= t.width; i += 4 * V_LANES)
                    fold_columns(dtype, backward, 4, &k, i, V_LANES, &s);
                for (; i < t.width; i += V_LANES)
                    fold_columns(dtype, backward, 1, &k, i, least(t.width - i, V_LANES), &s);
            }
        }
}

static void columns(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                    const struct lrpe_statistics *statistics) {
    if (call->direction == RAFTER_FORWARD)
        V_FOR_DTYPE(call->x.dtype, dtype, columns_box(dtype, false, call, box, statistics))
    else
        V_FOR_DTYPE(call->x.dtype, dtype, columns_box(dtype, true, call, box, statistics))
}

static void merge(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                  const struct lrpe_statistics *statistics, int64_t parts, int64_t step) {
    for (int64_t b = box->b; b < box->b_end; b++)
        for (int64_t h = box->h; h < box->h_end; h++) {
            const struct lrpe_statistics s = statistics_at(call, LRPE_SEQUENCE, statistics, b, 0, h, 0);
            for (int64_t d = box->d; d < box->d_end; d += V_LANES) {
                vf max = load_float(s.pivot + d);
                for (int64_t p = 1; p < parts; p++)
                    max = v_max(load_float(s.pivot + d + p * step), max);
                const vf pivot = v_select(max == v_set(-INFINITY), v_set(0.0f), max);
                vf sum = v_set(0.0f), dot = sum;
                for (int64_t p = 0; p < parts; p++) {
                    const vf shrink = v_exp_from(load_float(s.pivot + d + p * step), pivot);
                    sum = v_fma(load_float(s.scale + d + p * step), shrink, sum);
                    if (s.dot)
                        dot = v_fma(load_float(s.dot + d + p * step), shrink, dot);
                }
                v_store(RAFTER_F32, s.pivot + d, pivot);
                v_store(RAFTER_F32, s.scale + d, v_set(1.0f) / sum);
                if (s.dot)
                    v_store(RAFTER_F32, s.dot + d, dot / sum);
            }
        }
}

/* ---- statistics of rows
 * ------------------------------------------------------------------------------------------------- */

/* Of rows too wide for one tile. */
V_INLINE void rows_box(int dtype, bool backward, const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                       const struct lrpe_statistics *statistics) {
    const int64_t features = call->x.shape[3];
    struct tile t;
    t.most_rows = TILE_ROWS, t.most_columns = LRPE_COLUMNS, t.angles = backward, t.rows = 0;
    _Alignas(64) char in[3][LRPE_COLUMNS * 4];
    _Alignas(64) float e[LRPE_COLUMNS], g[LRPE_COLUMNS];
    while (next_tile(call, box, &t))
        for (int64_t b = box->b; b < box->b_end; b++) {
            if (backward && (b == box->b || angles_differ(call)))
                compute_angles(call, &t, b);
            for (int64_t r = 0; r < t.rows; r++) { /* of one head: the tile has a part of its features */
                const int64_t n = t.n + r;
                const struct lrpe_statistics s = statistics_at(call, LRPE_FEATURE_WIDE, statistics, b, n, t.h, 0);
                struct row row = {.sine = t.sine + r * t.pitch, .cosine = t.cosine + r * t.pitch, .n = t.width};
                row.x = input_row(dtype, &call->x, &t, b, n, t.h, t.d, in[0]);
                if (backward) {
                    row.dy_cos = input_row(dtype, &call->dy, &t, b, n, t.h, t.d, in[1]);
                    row.dy_sin = input_row(dtype, &call->dy, &t, b, n, t.h, features + t.d, in[2]);
                }
                const struct row_statistics part = exponentials(dtype, backward, &row, e, g);
                const bool first = t.d == 0;
                const float before = first ? -INFINITY : *s.pivot, max = part.max > before ? part.max : before;
                const float shrink = v_exp_from_scalar(before, v_pivot(max)),
                            fit = v_exp_from_scalar(part.max, v_pivot(max));
                float sum = (first ? 0.0f : *s.scale * shrink) + part.sum * fit, dot = 0.0f;
                if (backward)
                    dot = (first ? 0.0f : *s.dot * shrink) + part.dot * fit;
                const bool last = t.d + t.width == features;
                *s.pivot = last ? v_pivot(max) : max;
                *s.scale = last ? 1.0f / sum : sum;
                if (backward)
                    *s.dot = last ? dot / sum : dot;
            }
        }
}

static void rows(const struct lrpe_cosine_call *call, const struct lrpe_box *box,
                 const struct lrpe_statistics *statistics) {
    if (call->direction == RAFTER_FORWARD)
        V_FOR_DTYPE(call->x.dtype, dtype, rows_box(dtype, false, call, box, statistics))
    else
        V_FOR_DTYPE(call->x.dtype, dtype, rows_box(dtype, true, call, box, statistics))
}

/* ---- dtheta
 * --------------------------------------------------------------------------------------------------------------- */

static void dtheta(const struct lrpe_cosine_call *call, const double *sums, int64_t parts, int64_t from, int64_t to) {
    const rafter_view *out = &call->dtheta;
    const int64_t heads = call->x.shape[2], features = call->x.shape[3], padded = lrpe_padded(features);
    for (int64_t i = from; i < to; i++) {
        const int64_t row = i / out->shape[1], column = i % out->shape[1];
        const bool all_heads = out->shape[0] != heads, all_features = out->shape[1] != features;
        double sum = 0;
        for (int64_t p = 0; p < parts; p++)
            for (int64_t h = all_heads ? 0 : row; h < (all_heads ? heads : row + 1); h++)
                for (int64_t d = all_features ? 0 : column; d < (all_features ? features : column + 1); d++)
                    sum += sums[(p * heads + h) * padded + d];
        char *const to_element = rafter_at(out, row * out->stride[0] + column * out->stride[1]);
        V_FOR_DTYPE(out->dtype, dtype, v_put(dtype, to_element, (float)sum));
    }
}

const struct lrpe_kernels RAFTER_KERNELS(lrpe_cosine) = {forward, backward, columns, merge, rows, dtheta};
