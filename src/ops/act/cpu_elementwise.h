/* SPDX-License-Identifier: Apache-2.0 */
/* The elementwise kinds: none (a copy), relu (also with a bit mask), sigmoid and silu. */
#ifndef RAFTER_ACT_CPU_ELEMENTWISE_H
#define RAFTER_ACT_CPU_ELEMENTWISE_H

#include "ops/act/cpu_map.h"
#include "simd/activations.h"

/* The `env` of the functions below. Its members are constants once everything is inlined. */
struct elementwise {
    int dtype, kind;
};

V_INLINE vf forward(const vf in[], const void *env) {
    const struct elementwise *const f = env;
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_relu(in[0]);
    case RAFTER_ACT_SIGMOID: return v_sigmoid(f->dtype, in[0]);
    default: return v_silu(f->dtype, in[0]);
    }
}

V_INLINE vf backward(const vf in[], const void *env) {
    const struct elementwise *const f = env;
    switch (f->kind) {
    case RAFTER_ACT_RELU: return v_relu_grad(in[0], in[1]);
    case RAFTER_ACT_SIGMOID: return v_sigmoid_grad(f->dtype, in[0], in[1]);
    default: return v_silu_grad(f->dtype, in[0], in[1]);
    }
}

V_INLINE void map_as(int dtype, int kind, bool is_forward, const struct act_block *b) {
    const struct elementwise env = {dtype, kind};
    map_rows(dtype, is_forward ? 1 : 2, b, 0, b->rows, is_forward ? forward : backward, &env);
}

V_INLINE vf identity(const vf in[], const void *env) {
    (void)env;
    return in[0];
}

/* Copies the bits, so that a NaN keeps its payload. */
V_INLINE void copy(int dtype, int from, const struct act_block *b) {
    const int64_t bytes = v_bytes(dtype), n = b->columns, step = b->column_stride[from];
    if (step != 1 && b->row_stride[from] == 1 && b->column_stride[ACT_OUT] == 1) {
        for (int64_t row = 0; row < b->rows; row += TILE_ROWS)
            for (int64_t i = 0; i < n; i += TILE_COLUMNS)
                v_turn(bytes, row_at(dtype, b, from, row) + i * step * bytes, step, min64(n - i, TILE_COLUMNS),
                       min64(b->rows - row, TILE_ROWS), row_at(dtype, b, ACT_OUT, row) + i * bytes,
                       b->row_stride[ACT_OUT]);
        return;
    }
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
                const int64_t part = min64(n - i, GATHER), out_step = b->column_stride[ACT_OUT];
                if (out_step == 1)
                    v_gather(dtype, in + i * step * bytes, step, part, out + i * bytes);
                else
                    v_scatter(dtype, v_gather(dtype, in + i * step * bytes, step, part, buffer),
                              out + i * out_step * bytes, out_step, part);
            }
        }
    }
}

/* relu of n elements and their mask bits. n is 32 except at the end of the tensor. Forward reads x
 * and writes the mask; backward reads dy and the mask. */
V_INLINE void relu_step(int dtype, bool is_forward, const char *in, uint8_t *mask, char *out, int n, bool stream) {
    const int64_t step = V_LANES * v_bytes(dtype);
    uint32_t bits = 0;
    for (int i = 0; i < n && !is_forward; i += 8)
        bits |= (uint32_t)mask[i / 8] << i;
    vf result[32 / V_LANES];
    for (int k = 0; k * V_LANES < n; k++) {
        const int lanes = (int)min64(n - k * V_LANES, V_LANES);
        const vf a = lanes == V_LANES ? v_load(dtype, in + k * step) : v_load_part(dtype, in + k * step, lanes, 0.0f);
        if (is_forward) {
            bits |= (uint32_t)v_bits(~(a <= v_set(0.0f))) << k * V_LANES;
            result[k] = v_relu(a);
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
    for (int i = 0; i < n && is_forward; i += 8)
        mask[i / 8] = (uint8_t)(bits >> i);
}

V_INLINE void relu_masked(int dtype, bool is_forward, const struct act_block *b) {
    const char *in = b->data[is_forward ? ACT_IN : ACT_DY];
    char *out = b->data[ACT_OUT];
    uint8_t *mask = b->mask;
    const int64_t step = 32 * v_bytes(dtype);
    const bool stream = b->stream && (uintptr_t)out % V_STREAM == 0;
    int64_t n = b->columns;
    for (; n >= 32; n -= 32, in += step, out += step, mask += 4)
        if (stream)
            relu_step(dtype, is_forward, in, mask, out, 32, true);
        else
            relu_step(dtype, is_forward, in, mask, out, 32, false);
    relu_step(dtype, is_forward, in, mask, out, (int)n, false);
}

#define MAP(direction, is_forward)                                                                                     \
    V_FUNCTION(copy_##direction, (const struct act_block *b), (b), b->dtype,                                           \
               copy(dtype, is_forward ? ACT_IN : ACT_DY, b))                                                           \
    V_FUNCTION(masked_##direction, (const struct act_block *b), (b), b->dtype, relu_masked(dtype, is_forward, b))      \
    V_FUNCTION(relu_##direction, (const struct act_block *b), (b), b->dtype,                                           \
               map_as(dtype, RAFTER_ACT_RELU, is_forward, b))                                                          \
    V_FUNCTION(sigmoid_##direction, (const struct act_block *b), (b), b->dtype,                                        \
               map_as(dtype, RAFTER_ACT_SIGMOID, is_forward, b))                                                       \
    V_FUNCTION(silu_##direction, (const struct act_block *b), (b), b->dtype,                                           \
               map_as(dtype, RAFTER_ACT_SILU, is_forward, b))                                                          \
    static void map_##direction(const struct act_block *b) {                                                           \
        switch (b->kind) {                                                                                             \
        case RAFTER_ACT_NONE: copy_##direction(b); break;                                                              \
        case RAFTER_ACT_RELU:                                                                                          \
            if (b->mask)                                                                                               \
                masked_##direction(b);                                                                                 \
            else                                                                                                       \
                relu_##direction(b);                                                                                   \
            break;                                                                                                     \
        case RAFTER_ACT_SIGMOID: sigmoid_##direction(b); break;                                                        \
        default: silu_##direction(b); break;                                                                           \
        }                                                                                                              \
    }

MAP(forward, true)
MAP(backward, false)

#endif
