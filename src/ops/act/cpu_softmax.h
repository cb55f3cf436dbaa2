/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax. Forward: y = e^(x - pivot) / sum of e^(x - pivot). Backward: dx = y (dy - sum of y dy).
 *
 * The pivot is the maximum of the line. For 16-bit dtypes the first element of the line is tried
 * first, since finding it costs nothing. The maximum is needed only if it is so far above the first
 * element that the sum exceeds GUESS_LIMIT or is NaN.
 *
 * Elements are processed in pairs of vectors (v_load_pair), which have a lane order of their own.
 * Data that is kept from one pass to the next (exponentials, statistics of columns) stays in that
 * order. So all passes must form the same pairs: they start at the same element, and take the
 * elements after the last pair in single vectors.
 */
#ifndef RAFTER_ACT_CPU_SOFTMAX_H
#define RAFTER_ACT_CPU_SOFTMAX_H

#include <float.h>

#include "ops/act/cpu_map.h"
#include "simd/softmax.h"

#define GUESS_LIMIT 0x1p64f

V_INLINE bool guesses(int dtype) {
    return dtype != RAFTER_F32; /* in fp32 the relative error of an exponential, 1e-7 * (x - pivot), would be visible */
}

V_INLINE bool guess_failed(float sum) {
    return !(sum <= GUESS_LIMIT);
}

/* Replaces -inf by the lowest finite number: then -inf - pivot is -inf, and any larger x makes the
 * guess fail. */
V_INLINE vf finite_pivot(vf pivot) {
    return v_max(pivot, v_set(-FLT_MAX));
}

V_INLINE vf load(int dtype, const void *p, int64_t lanes) {
    return lanes == V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, lanes, 0.0f);
}

V_INLINE void store(int dtype, void *p, vf a, int64_t lanes) {
    if (lanes == V_LANES)
        v_store(dtype, p, a);
    else
        v_store_part(dtype, p, a, lanes);
}

V_INLINE void store_pair(int dtype, void *p, vf a, vf b, bool stream) {
    if (stream)
        v_stream_pair(dtype, p, a, b);
    else
        v_store_pair(dtype, p, a, b);
}

#endif
