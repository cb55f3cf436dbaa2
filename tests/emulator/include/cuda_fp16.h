/* SPDX-License-Identifier: Apache-2.0 */
/* fp16, as far as the library uses it: see emulator.h. */
#ifndef RAFTER_TESTS_EMULATOR_CUDA_FP16_H
#define RAFTER_TESTS_EMULATOR_CUDA_FP16_H

#include "cuda_runtime_api.h"

struct __half {
    unsigned short bits;

    __half() = default;
    __half(float a) : bits(bits_as<unsigned short>(static_cast<_Float16>(a))) {
    }
    operator float() const {
        return static_cast<float>(bits_as<_Float16>(bits));
    }
};
struct alignas(4) __half2 {
    __half x, y;
};

static inline float __half2float(__half a) {
    return a;
}
static inline __half __float2half_rn(float a) {
    return a;
}
static inline __half2 __floats2half2_rn(float a, float b) {
    return {a, b};
}

#include "pairs.h"
EMULATED_PAIRS(__half, __half2)

#endif
