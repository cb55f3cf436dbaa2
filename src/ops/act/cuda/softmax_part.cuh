/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics of parts of softmax's lines, in the kernels for slabs. */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_PART_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_PART_CUH

#include <float.h>

#include "cuda/vocabulary.cuh"

/* Of a part of a line. Forward: the maximum and the sum of e^(x - max). Backward: the sum of y dy; max
 * is not used. The maximum starts from the lowest finite number: a line of all -inf has sum 0, and its
 * softmax is 0 / 0 = NaN, as in PyTorch. */
struct alignas(8) Part {
    float max, sum;
};
DEVICE Part no_part() {
    return {-FLT_MAX, 0.0f};
}

template <bool FORWARD> DEVICE Part merged(Part a, Part b) {
    if (!FORWARD)
        return {a.max, a.sum + b.sum};
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp2_fast((a.max - max) * LOG2E) + b.sum * exp2_fast((b.max - max) * LOG2E)};
}

/* The same for `a` and all of `parts`, whose exponentials do not wait for each other. */
template <bool FORWARD, int COUNT> DEVICE Part merged(Part a, const Part (&parts)[COUNT]) {
    float max = a.max;
    if (FORWARD) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            max = fmaxf(max, parts[i].max);
        a.sum *= exp2_fast((a.max - max) * LOG2E);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        a.sum += FORWARD ? parts[i].sum * exp2_fast((parts[i].max - max) * LOG2E) : parts[i].sum;
    return {max, a.sum};
}

/* Over `lanes` neighbouring lanes, a power of two; all get the result. */
template <bool FORWARD> DEVICE Part merge_lanes(Part p, int lanes) {
    if (FORWARD) {
        float max = p.max;
        for (int step = lanes / 2; step > 0; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        p = {max, p.sum * exp2_fast((p.max - max) * LOG2E)};
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        p.sum += __shfl_xor_sync(~0u, p.sum, step);
    return p;
}
/* Of one element. */
template <bool FORWARD> DEVICE Part part_of(float x, float d) {
    if (!FORWARD)
        return {-FLT_MAX, x * d};
    const float max = fmaxf(x, -FLT_MAX);
    return {max, exp2_fast((x - max) * LOG2E)};
}

#endif
