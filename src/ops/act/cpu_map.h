/* SPDX-License-Identifier: Apache-2.0 */
/* A function of vectors applied to the rows of a block, with any strides. */
#ifndef RAFTER_ACT_CPU_MAP_H
#define RAFTER_ACT_CPU_MAP_H

#include "core/kernel_memory.h"
#include "core/sizes.h"
#include "ops/act/kernels.h"
#include "simd/simd.h"
#include "simd/transpose.h"

V_INLINE char *row_at(int dtype, const struct act_block *b, int tensor, int64_t row) {
    return b->data[tensor] + row * b->row_stride[tensor] * v_bytes(dtype);
}

/* Inputs whose rows are not contiguous are copied to a buffer tile by tile. A tile is a part of one row; or, if the
 * input's columns are contiguous, TILE_COLUMNS columns of TILE_ROWS rows, which are transposed. Results of such tiles
 * are written in parts of TILE_COLUMNS, which end in incomplete cache lines. If the rows of the output are short and
 * packed, several of them are computed as one. */
enum { GATHER = 1024, TILE_ROWS = 32, TILE_COLUMNS = 256, TILE_ELEMENTS = TILE_ROWS * TILE_COLUMNS };
enum { SHORT_COLUMNS = V_LANES, PACKED_ELEMENTS = 2048 };

/* Returns the tile of rows x columns elements at (row, column) of an input with column stride 1: where it is, or copied
 * to the buffer. *pitch: bytes from row to row. Must be called for a row's tiles in order, from column 0 on. */
V_INLINE const char *tile_of(int dtype, const struct act_block *b, int tensor, int64_t row, int64_t rows,
                             int64_t column, int64_t columns, char *buffer, int64_t *pitch) {
    const int64_t bytes = v_bytes(dtype), step = b->column_stride[tensor], row_step = b->row_stride[tensor];
    const char *const from = row_at(dtype, b, tensor, row) + column * step * bytes;
    *pitch = row_step * bytes;
    if (step == 1 || b->columns == 1)
        return from;
    *pitch = TILE_COLUMNS * bytes;
    if (step == 0 && column > 0)
        return buffer; /* the row repeats one element, which the tile before has put there */
    if (row_step == 1 && rows > 1)
        v_turn(bytes, from, step, columns, rows, buffer, TILE_COLUMNS);
    else
        for (int64_t r = 0; r < rows; r++)
            v_gather_bytes(bytes, from + r * row_step * bytes, step, columns, buffer + r * *pitch);
    return buffer;
}

/* Returns rows [row, row + rows) of an input without gaps: where they are, or packed into the buffer. */
V_INLINE const char *packed_rows(int dtype, const struct act_block *b, int tensor, int64_t row, int64_t rows,
                                 char *buffer) {
    const int64_t bytes = v_bytes(dtype), step = b->column_stride[tensor], row_step = b->row_stride[tensor];
    const char *const from = row_at(dtype, b, tensor, row);
    if (step == 1 && row_step == b->columns)
        return from;
    if (row_step == 1 && step != 1)
        v_turn(bytes, from, step, b->columns, rows, buffer, b->columns);
    else
        v_pack_rows(bytes, from, row_step, step, rows, b->columns, buffer);
    return buffer;
}

/* v_map over `rows` rows of the block from row `first` on. `inputs` tensors are read: ACT_IN, then ACT_DY. */
V_INLINE void map_rows(int dtype, int inputs, const struct act_block *b, int64_t first, int64_t rows,
                       vf (*f)(const vf in[], const void *env), const void *env) {
    char(*const buffer)[TILE_ELEMENTS * 4] = rafter_kernel_memory();
    _Static_assert(2 * sizeof *buffer <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    const int64_t bytes = v_bytes(dtype), out_step = b->columns == 1 ? 1 : b->column_stride[ACT_OUT];
    if (rows > 1 && b->columns < SHORT_COLUMNS && out_step == 1 && b->row_stride[ACT_OUT] == b->columns) {
        const int64_t some = PACKED_ELEMENTS / b->columns;
        for (int64_t row = first; row < first + rows; row += some) {
            const int64_t high = min64(first + rows - row, some);
            const void *in[2] = {NULL, NULL};
            for (int t = 0; t < inputs; t++)
                in[t] = packed_rows(dtype, b, t, row, high, buffer[t]);
            v_map(dtype, inputs, in, row_at(dtype, b, ACT_OUT, row), high * b->columns, b->stream, f, env);
        }
        return;
    }
    bool contiguous = out_step == 1, across = false;
    for (int t = 0; t < inputs && b->columns > 1; t++) {
        contiguous &= b->column_stride[t] == 1;
        across |= b->column_stride[t] != 1 && b->row_stride[t] == 1;
    }
    across &= rows > 1 && out_step == 1;
    const int64_t tile_rows = contiguous ? rows : across ? TILE_ROWS : 1;
    const int64_t tile_columns = contiguous ? b->columns : across ? TILE_COLUMNS : GATHER;
    char *const gathered = buffer[0] + GATHER * 4; /* for results to scatter; tiles of one row leave it free */
    for (int64_t row = first; row < first + rows; row += tile_rows)
        for (int64_t column = 0; column < b->columns; column += tile_columns) {
            const int64_t high = min64(first + rows - row, tile_rows), wide = min64(b->columns - column, tile_columns);
            const char *tile[2];
            int64_t pitch[2] = {0, 0};
            for (int t = 0; t < inputs; t++)
                tile[t] = tile_of(dtype, b, t, row, high, column, wide, buffer[t], &pitch[t]);
            for (int64_t r = 0; r < high; r++) {
                const void *const in[2] = {tile[0] + r * pitch[0], inputs > 1 ? tile[1] + r * pitch[1] : NULL};
                char *const out = row_at(dtype, b, ACT_OUT, row + r) + column * out_step * bytes;
                v_map(dtype, inputs, in, out_step == 1 ? out : gathered, wide, out_step == 1 && b->stream, f, env);
                if (out_step != 1)
                    v_scatter(dtype, gathered, out, out_step, wide);
            }
        }
}

#endif
