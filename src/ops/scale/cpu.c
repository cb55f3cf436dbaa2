/* SPDX-License-Identifier: Apache-2.0 */
/* scale on the CPU. Compiled once per ISA level. */
#include "core/sizes.h"
#include "core/variants.h"
#include "ops/scale/kernels.h"
#include "simd/simd.h"

enum { GATHER = 1024 }; /* elements gathered at a time if they are not adjacent */

V_INLINE vf product(const vf in[], const void *env) {
    return in[0] * v_set(*(const float *)env);
}

V_INLINE void multiply_as(int dtype, const struct scale_part *part) {
    const int64_t bytes = v_bytes(dtype), n = part->n;
    if (n == 1 || (part->x_step == 1 && part->y_step == 1)) {
        v_map(dtype, 1, (const void *const[]){part->x}, part->y, n, part->stream, product, &part->factor);
        return;
    }
    char gathered[GATHER * 4], result[GATHER * 4];
    for (int64_t i = 0; i < n; i += GATHER) {
        const int64_t count = min64(n - i, GATHER);
        const void *const x = v_gather(dtype, part->x + i * part->x_step * bytes, part->x_step, count, gathered);
        v_map(dtype, 1, (const void *const[]){x}, result, count, false, product, &part->factor);
        v_scatter(dtype, result, part->y + i * part->y_step * bytes, part->y_step, count);
    }
}

static void multiply(const struct scale_part *part) {
    V_FOR_DTYPE(part->dtype, constant, multiply_as(constant, part))
}

const struct scale_kernels RAFTER_KERNELS(scale) = {multiply};
