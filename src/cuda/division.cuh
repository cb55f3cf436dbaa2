/* SPDX-License-Identifier: Apache-2.0 */
/* Integer division in kernels, which have no instruction for it. */
#ifndef RAFTER_CUDA_DIVISION_CUH
#define RAFTER_CUDA_DIVISION_CUH

#include "cuda/instructions.cuh"

/* a / b for a >= 0, b > 0. In 32 bits if the numbers allow, which takes a fifth of the instructions. */
DEVICE int64_t quotient(int64_t a, int64_t b) {
    if (static_cast<uint64_t>(a | b) >> 32 == 0)
        return static_cast<unsigned>(a) / static_cast<unsigned>(b);
    return a / b;
}

/* Division of numbers below 2^31 by a divisor that the host knows: two instructions instead of
 * twenty. `number` is the divisor. */
struct Divisor {
    unsigned number, multiplier;
    int shift;

    Divisor() : Divisor(1) {
    }
    explicit Divisor(int64_t divisor) : number(static_cast<unsigned>(divisor)), multiplier(0), shift(0) {
        while (shift < 31 && static_cast<int64_t>(1) << shift < divisor)
            shift++;
        /* At most 1 above 2^(31 + shift) / divisor: no effect on dividends below 2^31. */
        multiplier =
            static_cast<unsigned>((static_cast<uint64_t>(1) << (31 + shift)) / static_cast<uint64_t>(divisor) + 1);
    }
    DEVICE unsigned quotient(unsigned a) const {
        return static_cast<unsigned>((uint64_t)a * multiplier >> (31 + shift));
    }
};

/* Division of numbers below 2^63 by a divisor of at least 2 that the host knows. Kernels multiply by `multiplier`
 * instead of dividing, which takes a hundred instructions. */
struct Reciprocal {
    uint64_t multiplier; /* 2^(64 + shift) / divisor, rounded up */
    int shift;
};
static inline Reciprocal reciprocal_of(int64_t divisor) {
    Reciprocal r = {0, 0};
    while (int64_t(2) << r.shift < divisor)
        r.shift++;
    const unsigned __int128 one = static_cast<unsigned __int128>(1) << (64 + r.shift);
    r.multiplier = static_cast<uint64_t>((one - 1) / static_cast<uint64_t>(divisor)) + 1;
    return r;
}

#endif
