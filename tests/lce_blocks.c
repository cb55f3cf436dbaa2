/* SPDX-License-Identifier: Apache-2.0 */
/* The order of tasks in linear_cross_entropy on the CPU: every block of a product once, in runs of
 * rows whose left operands fit into the cache. Most problems of the walk are too small for two
 * runs. */
#include <stdio.h>
#include <stdlib.h>

#include "ops/linear_cross_entropy/cpu_plan.h"

static int check(const struct lce_format *f, int64_t m, int64_t n, int64_t k) {
    const struct lce_product job = {.m = m, .n = n, .k = k};
    const int64_t rows = ceil_div(m, LCE_ROWS), columns = ceil_div(n, LCE_COLUMNS), tasks = lce_blocks(m, n);
    const int64_t together = lce_blocks_in_cache(f, k, rows), run_bytes = together * LCE_ROWS * k * f->element;
    char *const seen = calloc((size_t)tasks + 1, 1);
    int bad = seen == NULL || (together > 1 && run_bytes > LCE_CACHED_BYTES);
    for (int64_t task = 0; task < tasks && !bad; task++) {
        const struct lce_block at = lce_block_of(f, &job, task);
        bad = at.row < 0 || at.row >= rows || at.column < 0 || at.column >= columns ||
              at.row / together != task / (together * columns) || seen[at.row * columns + at.column]++;
    }
    if (bad)
        fprintf(stderr, "m %lld, n %lld, k %lld: wrong order of blocks\n", (long long)m, (long long)n, (long long)k);
    free(seen);
    return bad;
}

int main(void) {
    static const struct lce_format formats[] = {{2, 32, 32, 32}, {4, 6, 16, 1}};
    static const int64_t rows[] = {0, 1, 192, 193, 2048, 6720}, columns[] = {0, 1, 257, 2048};
    static const int64_t depths[] = {0, 1, 2048, 6720, 50000, 1 << 24};
    enum { ROWS = sizeof rows / sizeof *rows, COLUMNS = sizeof columns / sizeof *columns };
    enum { DEPTHS = sizeof depths / sizeof *depths };
    int bad = 0, runs = 0;
    for (int f = 0; f < 2; f++)
        for (int i = 0; i < ROWS * COLUMNS * DEPTHS; i++) {
            const int64_t m = rows[i % ROWS], n = columns[i / ROWS % COLUMNS], k = depths[i / ROWS / COLUMNS];
            bad += check(&formats[f], m, n, k);
            runs += m > 0 && lce_blocks_in_cache(&formats[f], k, ceil_div(m, LCE_ROWS)) < ceil_div(m, LCE_ROWS);
        }
    return bad > 0 || runs == 0;
}
