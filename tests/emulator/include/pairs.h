/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of two 16-bit numbers, the same for bf16 and fp16. */
#ifndef RAFTER_TESTS_EMULATOR_PAIRS_H
#define RAFTER_TESTS_EMULATOR_PAIRS_H

#define EMULATED_PAIRS(One, Two)                                                                                       \
    static inline Two __hmax2(Two a, Two b) {                                                                          \
        return {fmaxf(a.x, b.x), fmaxf(a.y, b.y)};                                                                     \
    }                                                                                                                  \
    static inline Two __hmax2_nan(Two a, Two b) {                                                                      \
        const float x = fmaxf(a.x, b.x), y = fmaxf(a.y, b.y);                                                          \
        return {isnan((float)a.x) || isnan((float)b.x) ? NAN : x, isnan((float)a.y) || isnan((float)b.y) ? NAN : y};   \
    }                                                                                                                  \
    static inline Two __habs2(Two a) {                                                                                 \
        return {fabsf(a.x), fabsf(a.y)};                                                                               \
    }                                                                                                                  \
    static inline unsigned __heq2_mask(Two a, Two b) {                                                                 \
        return ((float)a.x == (float)b.x ? 0xffffu : 0u) | ((float)a.y == (float)b.y ? 0xffff0000u : 0u);              \
    }

#endif
