/* SPDX-License-Identifier: Apache-2.0 */
/* bf16, as far as the library uses it: see emulator.h. */
#ifndef RAFTER_TESTS_EMULATOR_CUDA_BF16_H
#define RAFTER_TESTS_EMULATOR_CUDA_BF16_H

#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float a) {
        const unsigned word = __float_as_uint(a);
        bits = static_cast<unsigned short>(a != a ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline float __bfloat162float(__nv_bfloat16 a) {
    return a;
}
static inline __nv_bfloat16 __float2bfloat16_rn(float a) {
    return a;
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {a, b};
}

#include "pairs.h"
EMULATED_PAIRS(__nv_bfloat16, __nv_bfloat162)

#endif
