/* SPDX-License-Identifier: Apache-2.0 */
/* A function of vectors applied to the rows of a block, with any strides. */
#ifndef RAFTER_ACT_CPU_MAP_H
#define RAFTER_ACT_CPU_MAP_H

#include "core/sizes.h"
#include "ops/act/kernels.h"
#include "simd/simd.h"

V_INLINE char *row_at(int dtype, const struct act_block *b, int tensor, int64_t row) {
    return b->data[tensor] + row * b->row_stride[tensor] * v_bytes(dtype);
}

/* Elements gathered at a time where the elements of a row are not contiguous. */
enum { GATHER = 1024 };

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
        for (int k = 0; k < inputs; k++)
            gathered[k] = v_gather(dtype, (const char *)in[k] + i * step[k] * bytes, step[k], part, buffer[k]);
        v_map(dtype, inputs, gathered, buffer[2], part, false, f, env);
        v_scatter(dtype, buffer[2], out + i * out_step * bytes, out_step, part);
    }
}

#endif
