/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which columns are timed. */
#ifndef RAFTER_BENCH_TURNS_H
#define RAFTER_BENCH_TURNS_H

/* The column that is the i-th of a round, of `count` columns. Over `count` rounds (twice as many if
 * that is odd) each column comes right after each other column equally often (a Williams design),
 * so that the state that one leaves behind, such as a hot chip, affects all of them equally. */
static inline int turn_of(int round, int i, int count) {
    const int place = round / count % 2 == 0 ? i : count - 1 - i;
    return (round + (place % 2 ? (place + 1) / 2 : count - place / 2)) % count;
}

#endif
