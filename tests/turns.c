/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which the bench times its columns: every round has all of them, and each comes right
 * after each other one equally often. */
#include <stdio.h>

#include "turns.h"

enum { MOST = 16 };

static int check(int count) {
    const int rounds = count % 2 ? 2 * count : count;
    int followed[MOST][MOST] = {{0}}, failed = 0;
    for (int round = 0; round < rounds; round++) {
        int seen[MOST] = {0};
        for (int i = 0; i < count; i++) {
            const int column = turn_of(round, i, count);
            if (column < 0 || column >= count || seen[column]++) {
                printf("FAIL %d columns, round %d: column %d is out of turn\n", count, round, column);
                return 1;
            }
            if (i > 0)
                followed[turn_of(round, i - 1, count)][column]++;
        }
    }
    for (int a = 0; a < count; a++)
        for (int b = 0; b < count; b++)
            if (a != b && followed[a][b] != rounds / count) {
                printf("FAIL %d columns: %d comes right after %d %d times in %d rounds\n", count, b, a, followed[a][b],
                       rounds);
                failed++;
            }
    return failed;
}

int main(void) {
    int failed = 0;
    for (int count = 1; count <= MOST; count++)
        failed += check(count);
    printf("%d failed\n", failed);
    return failed > 0;
}
