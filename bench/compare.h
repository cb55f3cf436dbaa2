/* SPDX-License-Identifier: Apache-2.0 */
/* Two runs of the same tables: which cells changed beyond noise. */
#ifndef RAFTER_BENCH_COMPARE_H
#define RAFTER_BENCH_COMPARE_H

#include "report.h"

enum change {
    CHANGE_UNKNOWN, /* one of the two was not measured, in both runs or only before */
    CHANGE_NONE,
    CHANGE_WORSE, /* slower, or more memory */
    CHANGE_BETTER,
    CHANGE_LOST, /* measured before, and not now */
    CHANGE_WRONG /* the same, because its result is wrong now */
};

/* New over old, with the 99 % confidence interval of the ratio of medians. */
struct comparison {
    enum change change;
    double low, ratio, high;
};

struct comparison compare_cells(enum metric metric, const struct cell *old, const struct cell *new);

/* The same row of the other run's table, and the cell of the same column in it; NULL: it has none. */
const struct row *compare_row(const struct table *other, const struct row *row);
const struct cell *compare_cell(const struct table *other, const struct row *row, const char *column);

/* compare_page.c: both runs side by side, as HTML. */
void compare_page(const struct report *old, const struct report *new, FILE *to);

#endif
