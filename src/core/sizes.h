/* SPDX-License-Identifier: Apache-2.0 */
/* Integer helpers for sizes. CUDA code has min and max from CUDA itself, and takes the rest from
 * here. */
#ifndef RAFTER_CORE_SIZES_H
#define RAFTER_CORE_SIZES_H

#include <stdint.h>

#ifdef __CUDACC__

template <typename A> __host__ __device__ constexpr A ceil_div(A a, A b) {
    return (a + b - 1) / b;
}

template <typename A> __host__ __device__ constexpr A round_up(A a, A multiple) {
    return ceil_div(a, multiple) * multiple;
}

#else

static inline __attribute__((always_inline)) int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline __attribute__((always_inline)) int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline __attribute__((always_inline)) int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline __attribute__((always_inline)) int64_t round_up(int64_t a, int64_t multiple) {
    return ceil_div(a, multiple) * multiple;
}

#endif

#endif
