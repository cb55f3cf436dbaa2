/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/streams.h"

#include "simd/simd.h"

static float read_all(const void *from, size_t bytes) {
    enum { UNROLL = 8 };
    const float *p = from;
    vf sum[UNROLL] = {{0}};
    for (size_t i = 0; i < bytes / sizeof(float); i += UNROLL * V_LANES)
        for (int k = 0; k < UNROLL; k++)
            sum[k] += v_load(RAFTER_F32, p + i + k * V_LANES);
    for (int k = 1; k < UNROLL; k++)
        sum[0] += sum[k];
    return v_sum(sum[0]);
}

static void copy_all(void *to, const void *from, size_t bytes) {
    const float *p = from;
    float *q = to;
    for (size_t i = 0; i < bytes / sizeof(float); i += 2 * V_LANES)
        v_stream2(RAFTER_F32, q + i, v_load(RAFTER_F32, p + i), v_load(RAFTER_F32, p + i + V_LANES));
    v_fence();
}

#define PASTE_(isa) streams_##isa
#define PASTE(isa) PASTE_(isa)
const struct streams PASTE(RAFTER_ISA) = {read_all, copy_all};
