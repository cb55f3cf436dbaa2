/* SPDX-License-Identifier: Apache-2.0 */
/* Whose turn it is, where columns are timed in rounds. */
#ifndef RAFTER_BENCH_TURNS_H
#define RAFTER_BENCH_TURNS_H

/* Which of `count` columns is the i-th of a round. Over `count` rounds, twice as many if that is odd, each column comes
 * right after each other one equally often (Williams' squares): what one leaves behind, a chip that is hot or has
 * cooled, meets all. */
static inline int turn_of(int round, int i, int count) {
    const int place = round / count % 2 == 0 ? i : count - 1 - i;
    return (round + (place % 2 ? (place + 1) / 2 : count - place / 2)) % count;
}

#endif
