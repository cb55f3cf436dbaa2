/*
 * act on the CPU. Elementwise kinds are one function of a vector, mapped. Softmax has two forms, by where the lines that it
 * normalises lie in memory: rows (a line's elements are adjacent, or else gathered) and columns (the lines are adjacent and
 * their elements a row apart: vectors run across lines, and nothing is transposed).
 */
#include "ops/act/kernels.h"

#include <float.h>

#include "core/variants.h"
#include "simd/softmax.h"

V_INLINE char *row_at(int dtype, const struct act_block *b, int tensor, int64_t row) {
    return b->data[tensor] + row * b->row_stride[tensor] * v_bytes(dtype);
}

V_INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- elementwise kinds -------------------------------------------------------------------------------------------- */

/* What the functions below are specialised for: constants, once all is inlined. */
struct flavour {
    int dtype, kind;
};

struct logistic {
    vf value, complement, slope; /* sigmoid(x), 1 - sigmoid(x), their product: none of them by subtraction */
};

V_INLINE struct logistic logistic(int dtype, vf x) {
    /* With e = e^-|x|, which never overflows, and r = 1 / (1 + e), sigmoid is r where x is positive and e r where not. The
     * cheaper exponential is off by |x| * 1e-7, for |x| < 104 at most; half a unit in the last place of fp16 is 2e-4. */
    const vf magnitude = (vf)((vi)x & 0x7fffffff);
    const vf e = dtype == RAFTER_F32 ? v_exp(-magnitude) : v_exp2(magnitude * v_set(-V_LOG2E));
    const vf r = v_reciprocal(v_set(1.0f) + e), er = e * r;
    const vi negative = (vi)x >> 31;
    return (struct logistic){v_select(negative, er, r), v_select(negative, r, er), er * r};
}

V_INLINE vf forward(const vf in[], const void *env) {
    const struct flavour *const f = env;
    const vf x = in[0];
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_max(v_set(0.0f), x); /* NaN stays */
    case RAFTER_ACT_SIGMOID: return logistic(f->dtype, x).value;
    default: return x * logistic(f->dtype, x).value;
    }
}

V_INLINE vf backward(const vf in[], const void *env) {
    const struct flavour *const f = env;
    const vf x = in[0], dy = in[1];
    const struct logistic s = logistic(f->dtype, x);
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_select(x <= v_set(0.0f), v_set(0.0f), dy); /* dy where x is NaN, as in PyTorch */
    case RAFTER_ACT_SIGMOID: return dy * s.slope;
    default: return dy * (s.value * v_fma(x, s.complement, v_set(1.0f)));
    }
}

/* Elements gathered at a time where a line's are not adjacent. */
enum { GATHER = 1024 };

/* v_map over a row of the block, whatever its column strides: out from `inputs` tensors, ACT_IN first. */
V_INLINE void map_row(int dtype, int inputs, const struct act_block *b, int64_t row,
                      vf (*f)(const vf in[], const void *env), const void *env) {
    const int64_t bytes = v_bytes(dtype), n = b->columns, out_step = b->column_stride[ACT_OUT];
    const int64_t *const step = &b->column_stride[ACT_IN];
    const void *in[2] = {row_at(dtype, b, ACT_IN, row), row_at(dtype, b, inputs > 1 ? ACT_DY : ACT_IN, row)};
    char *const out = row_at(dtype, b, ACT_OUT, row);
    if (n == 1 || (out_step == 1 && step[0] == 1 && (inputs == 1 || step[1] == 1))) {
        v_map(dtype, inputs, in, out, n, b->stream, f, env);
        return;
    }
    char buffer[3][GATHER * 4];
    for (int64_t i = 0; i < n; i += GATHER) {
        const int64_t part = smaller(n - i, GATHER);
        const void *gathered[2];
        for (int k = 0; k < inputs; k++)
            gathered[k] = v_gather(dtype, (const char *)in[k] + i * step[k] * bytes, step[k], part, buffer[k]);
        v_map(dtype, inputs, gathered, buffer[2], part, false, f, env);
        v_scatter(dtype, buffer[2], out + i * out_step * bytes, out_step, part);
    }
}

V_INLINE void map_as(int dtype, int kind, bool forth, const struct act_block *b) {
    const struct flavour flavour = {dtype, kind};
    for (int64_t row = 0; row < b->rows; row++)
        map_row(dtype, forth ? 1 : 2, b, row, forth ? forward : backward, &flavour);
}

V_INLINE vf identity(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

/* Copies bits, so that a NaN keeps its payload. */
V_INLINE void copy(int dtype, int from, const struct act_block *b) {
    const int64_t bytes = v_bytes(dtype), n = b->columns, step = b->column_stride[from];
    for (int64_t row = 0; row < b->rows; row++) {
        const char *const in = row_at(dtype, b, from, row);
        char *const out = row_at(dtype, b, ACT_OUT, row);
        if (step == 1 && b->column_stride[ACT_OUT] == 1) {
            const int64_t words = n * bytes / 4;
            v_map(RAFTER_F32, 1, (const void *const[]){in}, out, words, b->stream, identity, NULL);
            memcpy(out + words * 4, in + words * 4, (size_t)(n * bytes - words * 4));
        } else {
            char buffer[GATHER * 4];
            for (int64_t i = 0; i < n; i += GATHER) {
                const int64_t part = smaller(n - i, GATHER);
                v_scatter(dtype, v_gather(dtype, in + i * step * bytes, step, part, buffer),
                          out + i * b->column_stride[ACT_OUT] * bytes, b->column_stride[ACT_OUT], part);
            }
        }
    }
}

/* relu and its mask for n elements: 32, but for the end of the tensor. Forward takes x and writes the bits, backward takes
 * dy and reads them. */
V_INLINE void relu_step(int dtype, bool forth, const char *in, uint8_t *mask, char *out, int n, bool stream) {
    const int64_t step = V_LANES * v_bytes(dtype);
    uint32_t bits = 0;
    for (int i = 0; i < n && !forth; i += 8)
        bits |= (uint32_t)mask[i / 8] << i;
    vf result[32 / V_LANES];
    for (int k = 0; k * V_LANES < n; k++) {
        const int lanes = (int)smaller(n - k * V_LANES, V_LANES);
        const vf a = lanes == V_LANES ? v_load(dtype, in + k * step) : v_load_part(dtype, in + k * step, lanes, 0.0f);
        if (forth) {
            bits |= (uint32_t)v_bits(~(a <= v_set(0.0f))) << k * V_LANES;
            result[k] = v_max(v_set(0.0f), a);
        } else {
            result[k] = v_select(v_from_bits(bits >> k * V_LANES), a, v_set(0.0f));
        }
        if (lanes < V_LANES)
            v_store_part(dtype, out + k * step, result[k], lanes);
        else if (!stream)
            v_store(dtype, out + k * step, result[k]);
        else if (k % 2 == 1)
            v_stream2(dtype, out + (k - 1) * step, result[k - 1], result[k]);
    }
    for (int i = 0; i < n && forth; i += 8)
        mask[i / 8] = (uint8_t)(bits >> i);
}

V_INLINE void relu_masked(int dtype, bool forth, const struct act_block *b) {
    const char *in = b->data[forth ? ACT_IN : ACT_DY];
    char *out = b->data[ACT_OUT];
    uint8_t *mask = b->mask;
    const int64_t step = 32 * v_bytes(dtype);
    const bool stream = b->stream && (uintptr_t)out % V_STREAM == 0;
    int64_t n = b->columns;
    for (; n >= 32; n -= 32, in += step, out += step, mask += 4)
        if (stream)
            relu_step(dtype, forth, in, mask, out, 32, true);
        else
            relu_step(dtype, forth, in, mask, out, 32, false);
    relu_step(dtype, forth, in, mask, out, (int)n, false);
}

V_INLINE void map(bool forth, const struct act_block *b) {
    switch (b->kind) {
    case RAFTER_ACT_NONE: V_FOR_DTYPE(b->dtype, dtype, copy(dtype, forth ? ACT_IN : ACT_DY, b)) break;
    case RAFTER_ACT_RELU:
        if (b->mask)
            V_FOR_DTYPE(b->dtype, dtype, relu_masked(dtype, forth, b))
        else
            V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_RELU, forth, b))
        break;
    case RAFTER_ACT_SIGMOID: V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_SIGMOID, forth, b)) break;
    default: V_FOR_DTYPE(b->dtype, dtype, map_as(dtype, RAFTER_ACT_SILU, forth, b)) break;
    }
    if (b->stream)
        v_fence();
}

static void map_forward(const struct act_block *b) {
    map(true, b);
}

static void map_backward(const struct act_block *b) {
    map(false, b);
}

/* ---- softmax ------------------------------------------------------------------------------------------------------ */

V_INLINE vf load(int dtype, const void *p, int64_t lanes, float fill) {
    return lanes == V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, lanes, fill);
}

V_INLINE void store(int dtype, void *p, vf a, int64_t lanes) {
    if (lanes == V_LANES)
        v_store(dtype, p, a);
    else
        v_store_part(dtype, p, a, lanes);
}

/* y[i] = f(i) for n adjacent elements, a vector at a time: f is given the index of the first and how many lanes count (all,
 * but at the ends). With `stream`, whole lines go past the caches. */
V_INLINE void produce(int dtype, char *y, int64_t n, bool stream, vf (*f)(const void *env, int64_t at, int64_t lanes),
                      const void *env) {
    const int64_t bytes = v_bytes(dtype);
    int64_t i = 0;
    if (stream && (uintptr_t)y % (uintptr_t)bytes == 0) {
        for (int64_t head; i < n && (head = (int64_t)(-(uintptr_t)(y + i * bytes) % V_STREAM) / bytes) > 0; i += head) {
            head = smaller(smaller(head, V_LANES), n - i);
            store(dtype, y + i * bytes, f(env, i, head), head);
        }
        for (; i + 2 * V_LANES <= n; i += 2 * V_LANES)
            v_stream2(dtype, y + i * bytes, f(env, i, V_LANES), f(env, i + V_LANES, V_LANES));
    }
    for (; i + V_LANES <= n; i += V_LANES)
        v_store(dtype, y + i * bytes, f(env, i, V_LANES));
    if (i < n)
        v_store_part(dtype, y + i * bytes, f(env, i, n - i), n - i);
}

/* Forward, with pivot the maximum (see v_pivot): y = e^(x - pivot) / sum. Backward, with dot = sum of y dy: dx = y (dy - dot).
 */

/* ---- softmax along rows ------------------------------------------------------------------------------------------- */

V_INLINE float row_max(int dtype, const char *x, int64_t n) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf m0 = v_set(-INFINITY), m1 = m0;
    for (; n >= 2 * V_LANES; n -= 2 * V_LANES, x += 2 * step) {
        m0 = v_max(v_load(dtype, x), m0);
        m1 = v_max(v_load(dtype, x + step), m1);
    }
    for (; n > 0; n -= V_LANES, x += step)
        m0 = v_max(load(dtype, x, smaller(n, V_LANES), -INFINITY), m0);
    return v_hmax(v_max(m0, m1));
}

/* e[i] = e^(x[i] - pivot), up to the next multiple of V_LANES; returns their sum. */
V_INLINE float row_exponentials(int dtype, const char *x, int64_t n, vf pivot, float *e) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf s0 = v_set(0.0f), s1 = s0;
    for (; n >= 2 * V_LANES; n -= 2 * V_LANES, x += 2 * step, e += 2 * V_LANES) {
        const vf a = v_exp_from(v_load(dtype, x), pivot), b = v_exp_from(v_load(dtype, x + step), pivot);
        s0 += a;
        s1 += b;
        v_store(RAFTER_F32, e, a);
        v_store(RAFTER_F32, e + V_LANES, b);
    }
    for (; n > 0; n -= V_LANES, x += step, e += V_LANES) {
        const vf a = v_exp_from(load(dtype, x, smaller(n, V_LANES), -INFINITY), pivot);
        s0 += a;
        v_store(RAFTER_F32, e, a);
    }
    return v_sum(s0 + s1);
}

struct held {
    const float *e;
    vf scale;
};

V_INLINE vf held_scaled(const void *env, int64_t at, int64_t lanes) {
    const struct held *const h = env;
    (void)lanes; /* the buffer is whole vectors */
    return v_load(RAFTER_F32, h->e + at) * h->scale;
}

/* Exponentials are computed once and held between their sum and the scaling. Each pass runs over all rows of the block, so
 * that the reductions at the ends of short rows overlap. */
V_INLINE void short_rows_as(int dtype, const struct act_block *b) {
    _Alignas(64) float e[ACT_SHORT];
    float pivot[ACT_MOST_LINES], sum[ACT_MOST_LINES];
    const int64_t n = b->columns, pitch = (n + V_LANES - 1) / V_LANES * V_LANES;
    for (int64_t r = 0; r < b->rows; r++)
        pivot[r] = v_pivot(row_max(dtype, row_at(dtype, b, ACT_IN, r), n));
    for (int64_t r = 0; r < b->rows; r++)
        sum[r] = row_exponentials(dtype, row_at(dtype, b, ACT_IN, r), n, v_set(pivot[r]), e + r * pitch);
    for (int64_t r = 0; r < b->rows; r++) {
        const struct held held = {e + r * pitch, v_set(1.0f / sum[r])};
        produce(dtype, row_at(dtype, b, ACT_OUT, r), n, b->stream, held_scaled, &held);
    }
}

V_INLINE void rows_forward_statistics(int dtype, const struct act_block *b, float *statistics) {
    const int64_t step = b->column_stride[ACT_IN], block = step == 1 ? b->columns : GATHER;
    char buffer[GATHER * 4];
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const x = row_at(dtype, b, ACT_IN, r);
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t i = 0; i < b->columns; i += block) {
            const int64_t part = smaller(b->columns - i, block);
            s = v_stats_row(dtype, v_gather(dtype, x + i * step * v_bytes(dtype), step, part, buffer), part, s);
        }
        statistics[r] = s.max;
        statistics[b->rows + r] = s.sum;
    }
}

struct normaliser {
    vf pivot, scale;
};

V_INLINE vf normalised(const vf in[], const void *env) {
    const struct normaliser *const n = env;
    return v_exp_from(in[0], n->pivot) * n->scale;
}

V_INLINE void rows_forward_apply(int dtype, const struct act_block *b, const float *statistics, int64_t parts) {
    for (int64_t r = 0; r < b->rows; r++) {
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t part = 0; part < parts; part++) {
            const float *const p = statistics + part * ACT_STATISTICS * b->rows;
            s = v_stats_merge(s, (struct v_stats){p[r], p[b->rows + r]});
        }
        const struct normaliser n = {v_set(v_pivot(s.max)), v_set(1.0f / s.sum)};
        map_row(dtype, 1, b, r, normalised, &n);
    }
}

V_INLINE float dot(int dtype, const char *a, const char *b, int64_t n) {
    const int64_t step = V_LANES * v_bytes(dtype);
    vf s[4] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)};
    for (; n >= 4 * V_LANES; n -= 4 * V_LANES, a += 4 * step, b += 4 * step)
        for (int k = 0; k < 4; k++)
            s[k] = v_fma(v_load(dtype, a + k * step), v_load(dtype, b + k * step), s[k]);
    for (; n > 0; n -= V_LANES, a += step, b += step) {
        const int64_t lanes = smaller(n, V_LANES);
        s[0] = v_fma(load(dtype, a, lanes, 0.0f), load(dtype, b, lanes, 0.0f), s[0]);
    }
    return v_sum((s[0] + s[1]) + (s[2] + s[3]));
}

V_INLINE void rows_backward_statistics(int dtype, const struct act_block *b, float *statistics) {
    const int64_t y_step = b->column_stride[ACT_IN], dy_step = b->column_stride[ACT_DY], bytes = v_bytes(dtype);
    const int64_t block = y_step == 1 && dy_step == 1 ? b->columns : GATHER;
    char buffer[2][GATHER * 4];
    for (int64_t r = 0; r < b->rows; r++) {
        const char *const y = row_at(dtype, b, ACT_IN, r), *const dy = row_at(dtype, b, ACT_DY, r);
        float sum = 0.0f;
        for (int64_t i = 0; i < b->columns; i += block) {
            const int64_t part = smaller(b->columns - i, block);
            sum += dot(dtype, v_gather(dtype, y + i * y_step * bytes, y_step, part, buffer[0]),
                       v_gather(dtype, dy + i * dy_step * bytes, dy_step, part, buffer[1]), part);
        }
        statistics[r] = sum;
    }
}

V_INLINE vf projected(const vf in[], const void *env) {
    const vf *const sum = env;
    return in[0] * (in[1] - *sum);
}

V_INLINE void rows_backward_apply(int dtype, const struct act_block *b, const float *statistics, int64_t parts) {
    for (int64_t r = 0; r < b->rows; r++) {
        float sum = 0.0f;
        for (int64_t part = 0; part < parts; part++)
            sum += statistics[part * ACT_STATISTICS * b->rows + r];
        const vf sums = v_set(sum);
        map_row(dtype, 2, b, r, projected, &sums);
    }
}

/* ---- softmax along columns ---------------------------------------------------------------------------------------- */

/* Rows that are folded into the running statistics of a vector of columns at a time, held in registers. */
enum { FOLD = 8 };

/* The maximum, or for columns of all -inf the lowest number, from which their exponentials are 0 all the same. */
V_INLINE vf pivots(vf max) {
    return v_max(max, v_set(-FLT_MAX));
}

V_INLINE void fold_forward(int dtype, const char *x, int64_t pitch, int rows, int64_t lanes, float *max, float *sum) {
    vf a[FOLD];
    const vf before = load(RAFTER_F32, max, lanes, 0.0f);
    vf top = before;
    for (int r = 0; r < rows; r++) {
        a[r] = load(dtype, x + r * pitch, lanes, 0.0f);
        top = v_max(a[r], top);
    }
    const vf pivot = pivots(top);
    vf s0 = load(RAFTER_F32, sum, lanes, 0.0f) * v_exp_from(before, pivot), s1 = v_set(0.0f);
    for (int r = 0; r < rows; r += 2) {
        s0 += v_exp_from(a[r], pivot);
        if (r + 1 < rows)
            s1 += v_exp_from(a[r + 1], pivot);
    }
    store(RAFTER_F32, max, top, lanes);
    store(RAFTER_F32, sum, s0 + s1, lanes);
}

V_INLINE void fold_rows_forward(int dtype, const struct act_block *b, int64_t row, int rows, float *statistics) {
    const int64_t pitch = b->row_stride[ACT_IN] * v_bytes(dtype), n = b->columns;
    const char *const x = row_at(dtype, b, ACT_IN, row);
    int64_t c = 0;
    for (; c + V_LANES <= n; c += V_LANES)
        fold_forward(dtype, x + c * v_bytes(dtype), pitch, rows, V_LANES, statistics + c, statistics + n + c);
    if (c < n)
        fold_forward(dtype, x + c * v_bytes(dtype), pitch, rows, n - c, statistics + c, statistics + n + c);
}

V_INLINE void columns_forward_statistics(int dtype, const struct act_block *b, float *statistics) {
    for (int64_t c = 0; c < b->columns; c++) {
        statistics[c] = -INFINITY;
        statistics[b->columns + c] = 0.0f;
    }
    int64_t r = 0;
    for (; r + FOLD <= b->rows; r += FOLD)
        fold_rows_forward(dtype, b, r, FOLD, statistics);
    for (; r < b->rows; r++)
        fold_rows_forward(dtype, b, r, 1, statistics);
}

struct columns_forward {
    int dtype;
    const char *x;
    const float *pivot, *scale;
};

V_INLINE vf columns_normalised(const void *env, int64_t at, int64_t lanes) {
    const struct columns_forward *const c = env;
    const vf pivot = load(RAFTER_F32, c->pivot + at, lanes, 0.0f), scale = load(RAFTER_F32, c->scale + at, lanes, 0.0f);
    return v_exp_from(load(c->dtype, c->x + at * v_bytes(c->dtype), lanes, 0.0f), pivot) * scale;
}

V_INLINE void columns_forward_apply(int dtype, const struct act_block *b, const float *statistics, int64_t parts) {
    float pivot[ACT_MOST_LINES], scale[ACT_MOST_LINES];
    for (int64_t c = 0; c < b->columns; c++) {
        struct v_stats s = {-INFINITY, 0.0f};
        for (int64_t part = 0; part < parts; part++) {
            const float *const p = statistics + part * ACT_STATISTICS * b->columns;
            s = v_stats_merge(s, (struct v_stats){p[c], p[b->columns + c]});
        }
        pivot[c] = v_pivot(s.max);
        scale[c] = 1.0f / s.sum;
    }
    for (int64_t r = 0; r < b->rows; r++) {
        const struct columns_forward env = {dtype, row_at(dtype, b, ACT_IN, r), pivot, scale};
        produce(dtype, row_at(dtype, b, ACT_OUT, r), b->columns, b->stream, columns_normalised, &env);
    }
}

V_INLINE void fold_backward(int dtype, const char *y, int64_t y_pitch, const char *dy, int64_t dy_pitch, int rows,
                            int64_t lanes, float *sum) {
    vf s0 = v_set(0.0f), s1 = s0;
    for (int r = 0; r < rows; r += 2) {
        s0 = v_fma(load(dtype, y + r * y_pitch, lanes, 0.0f), load(dtype, dy + r * dy_pitch, lanes, 0.0f), s0);
        if (r + 1 < rows)
            s1 = v_fma(load(dtype, y + (r + 1) * y_pitch, lanes, 0.0f), load(dtype, dy + (r + 1) * dy_pitch, lanes, 0.0f),
                       s1);
    }
    store(RAFTER_F32, sum, load(RAFTER_F32, sum, lanes, 0.0f) + (s0 + s1), lanes);
}

V_INLINE void fold_rows_backward(int dtype, const struct act_block *b, int64_t row, int rows, float *sums) {
    const int64_t bytes = v_bytes(dtype), n = b->columns;
    const int64_t y_pitch = b->row_stride[ACT_IN] * bytes, dy_pitch = b->row_stride[ACT_DY] * bytes;
    const char *const y = row_at(dtype, b, ACT_IN, row), *const dy = row_at(dtype, b, ACT_DY, row);
    int64_t c = 0;
    for (; c + V_LANES <= n; c += V_LANES)
        fold_backward(dtype, y + c * bytes, y_pitch, dy + c * bytes, dy_pitch, rows, V_LANES, sums + c);
    if (c < n)
        fold_backward(dtype, y + c * bytes, y_pitch, dy + c * bytes, dy_pitch, rows, n - c, sums + c);
}

V_INLINE void columns_backward_statistics(int dtype, const struct act_block *b, float *statistics) {
    for (int64_t c = 0; c < b->columns; c++)
        statistics[c] = 0.0f;
    int64_t r = 0;
    for (; r + FOLD <= b->rows; r += FOLD)
        fold_rows_backward(dtype, b, r, FOLD, statistics);
    for (; r < b->rows; r++)
        fold_rows_backward(dtype, b, r, 1, statistics);
}

struct columns_backward {
    int dtype;
    const char *y, *dy;
    const float *sum;
};

V_INLINE vf columns_projected(const void *env, int64_t at, int64_t lanes) {
    const struct columns_backward *const c = env;
    const vf y = load(c->dtype, c->y + at * v_bytes(c->dtype), lanes, 0.0f);
    const vf dy = load(c->dtype, c->dy + at * v_bytes(c->dtype), lanes, 0.0f);
    return y * (dy - load(RAFTER_F32, c->sum + at, lanes, 0.0f));
}

V_INLINE void columns_backward_apply(int dtype, const struct act_block *b, const float *statistics, int64_t parts) {
    float sum[ACT_MOST_LINES];
    for (int64_t c = 0; c < b->columns; c++) {
        sum[c] = 0.0f;
        for (int64_t part = 0; part < parts; part++)
            sum[c] += statistics[part * ACT_STATISTICS * b->columns + c];
    }
    for (int64_t r = 0; r < b->rows; r++) {
        const struct columns_backward env = {dtype, row_at(dtype, b, ACT_IN, r), row_at(dtype, b, ACT_DY, r), sum};
        produce(dtype, row_at(dtype, b, ACT_OUT, r), b->columns, b->stream, columns_projected, &env);
    }
}

/* ---- the table ---------------------------------------------------------------------------------------------------- */

static void short_rows(const struct act_block *b) {
    V_FOR_DTYPE(b->dtype, dtype, short_rows_as(dtype, b))
    if (b->stream)
        v_fence();
}

#define SOFTMAX(form_direction)                                                                                        \
    static void form_direction##_statistics_any(const struct act_block *b, float *statistics) {                        \
        V_FOR_DTYPE(b->dtype, dtype, form_direction##_statistics(dtype, b, statistics))                                \
    }                                                                                                                  \
    static void form_direction##_apply_any(const struct act_block *b, const float *statistics, int64_t parts) {        \
        V_FOR_DTYPE(b->dtype, dtype, form_direction##_apply(dtype, b, statistics, parts))                              \
        if (b->stream)                                                                                                 \
            v_fence();                                                                                                 \
    }

SOFTMAX(rows_forward)
SOFTMAX(rows_backward)
SOFTMAX(columns_forward)
SOFTMAX(columns_backward)

extern const struct act_kernels RAFTER_KERNELS(act);
const struct act_kernels RAFTER_KERNELS(act) = {
    .map = {map_forward, map_backward},
    .short_rows = short_rows,
    .statistics = {{rows_forward_statistics_any, rows_backward_statistics_any},
                   {columns_forward_statistics_any, columns_backward_statistics_any}},
    .apply = {{rows_forward_apply_any, rows_backward_apply_any}, {columns_forward_apply_any, columns_backward_apply_any}},
};
