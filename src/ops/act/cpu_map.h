/* SPDX-License-Identifier: Apache-2.0 */
/* A function of vectors applied to the rows of a block, with any strides. */
#ifndef RAFTER_ACT_CPU_MAP_H
#define RAFTER_ACT_CPU_MAP_H

#include "core/sizes.h"
#include "ops/act/kernels.h"
#include "simd/simd.h"
#include "simd/transpose.h"

V_INLINE char *row_at(int dtype, const struct act_block *b, int tensor, int64_t row) {
    return b->data[tensor] + row * b->row_stride[tensor] * v_bytes(dtype);
}

/* Elements gathered at a time where the elements of a row are not contiguous. */
enum { GATHER = 1024 };

/* Tiles of tensors that lie across the rows of the output are turned into a buffer. */
enum { TILE_ROWS = 32, TILE_COLUMNS = 64, TILE_ELEMENTS = TILE_ROWS * TILE_COLUMNS };

/* The tile of rows x columns elements at (row, column) of an input, with column stride 1: in its own
 * place, or copied to the buffer. *pitch: bytes from row to row. */
V_INLINE const char *tile_of(int dtype, const struct act_block *b, int tensor, int64_t row, int64_t rows,
                             int64_t column, int64_t columns, char *buffer, int64_t *pitch) {
    const int64_t bytes = v_bytes(dtype), step = b->column_stride[tensor], row_step = b->row_stride[tensor];
    const char *const from = row_at(dtype, b, tensor, row) + column * step * bytes;
    *pitch = row_step * bytes;
    if (step == 1)
        return from;
    *pitch = TILE_COLUMNS * bytes;
    if (row_step == 1)
        v_turn(dtype, from, step, columns, rows, buffer, TILE_COLUMNS);
    else
        for (int64_t r = 0; r < rows; r++)
            v_gather(dtype, from + r * row_step * bytes, step, columns, buffer + r * *pitch);
    return buffer;
}

/* Whether an input lies across the rows. The output does not. */
V_INLINE bool lies_across(int inputs, const struct act_block *b) {
    bool across = false;
    for (int t = 0; t < inputs; t++)
        across |= b->column_stride[t] != 1 && b->row_stride[t] == 1;
    return across && b->rows > 1 && b->column_stride[ACT_OUT] == 1;
}

/* v_map over a block, tile by tile. `inputs` tensors are read: ACT_IN, then ACT_DY. */
V_INLINE void map_tiles(int dtype, int inputs, const struct act_block *b, vf (*f)(const vf in[], const void *env),
                        const void *env) {
    char buffer[2][TILE_ELEMENTS * 4];
    const int64_t bytes = v_bytes(dtype);
    for (int64_t row = 0; row < b->rows; row += TILE_ROWS)
        for (int64_t column = 0; column < b->columns; column += TILE_COLUMNS) {
            const int64_t rows = min64(b->rows - row, TILE_ROWS), columns = min64(b->columns - column, TILE_COLUMNS);
            const char *tile[2];
            int64_t pitch[2] = {0, 0};
            for (int t = 0; t < inputs; t++)
                tile[t] = tile_of(dtype, b, t, row, rows, column, columns, buffer[t], &pitch[t]);
            for (int64_t r = 0; r < rows; r++) {
                const void *const in[2] = {tile[0] + r * pitch[0], inputs > 1 ? tile[1] + r * pitch[1] : NULL};
                v_map(dtype, inputs, in, row_at(dtype, b, ACT_OUT, row + r) + column * bytes, columns, b->stream, f,
                      env);
            }
        }
}

/* v_map over one row of the block, with any column strides. `inputs` tensors are read: ACT_IN, then
 * ACT_DY. */
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
        const int64_t part = min64(n - i, GATHER);
        const void *gathered[2];
        for (int k = 0; k < inputs; k++) {
            gathered[k] = buffer[k];
            if (i == 0 || step[k] != 0) /* a repeated element is the same in all parts */
                gathered[k] = v_gather(dtype, (const char *)in[k] + i * step[k] * bytes, step[k], part, buffer[k]);
        }
        if (out_step == 1) {
            v_map(dtype, inputs, gathered, out + i * bytes, part, b->stream, f, env);
        } else {
            v_map(dtype, inputs, gathered, buffer[2], part, false, f, env);
            v_scatter(dtype, buffer[2], out + i * out_step * bytes, out_step, part);
        }
    }
}

#endif
