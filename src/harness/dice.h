/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers for random problems: the same state gives the same numbers on every machine. */
#ifndef RAFTER_HARNESS_DICE_H
#define RAFTER_HARNESS_DICE_H

#include <math.h>

#include "harness/problem.h"

struct dice {
    uint64_t state;
};

static inline uint64_t roll(struct dice *d) {
    return d->state = problem_mix(d->state);
}

/* A number from 0 to count - 1. */
static inline int64_t pick(struct dice *d, int64_t count) {
    return (int64_t)(roll(d) >> 16) % count;
}

static inline bool one_in(struct dice *d, int64_t count) {
    return pick(d, count) == 0;
}

/* A number from 1 to `most`; small ones are as frequent as large ones. Half of those from 8 on are multiples of 8. */
static inline int64_t pick_size(struct dice *d, int64_t most) {
    const int64_t size = (int64_t)exp2((double)pick(d, 1 << 20) / (1 << 20) * log2((double)most + 1));
    return size >= 8 && one_in(d, 2) ? size / 8 * 8 : size;
}

#endif
