/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of sizes, for cutting work. */
#ifndef RAFTER_CORE_SIZES_H
#define RAFTER_CORE_SIZES_H

#include <stdint.h>

static inline int64_t at_least(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int64_t at_most(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline int64_t round_up(int64_t a, int64_t multiple) {
    return ceil_div(a, multiple) * multiple;
}

#endif
