/* SPDX-License-Identifier: Apache-2.0 */
/* The map in the report: how a cell is judged, which ones are worst, and how that is shown. */
#ifndef RAFTER_BENCH_MAP_H
#define RAFTER_BENCH_MAP_H

#include "report.h"

enum {
    MAP_WORST = 20,                /* cells that are listed */
    MAP_SMALLEST = 1 << 20,        /* bytes; calls that move less are shown but not judged */
    MAP_LARGE = 256 << 20,         /* bytes; calls that move as much are judged by their share of the floor */
    MAP_CHECKED = 32 << 20,        /* bytes of all tensors; results of larger cells are not checked */
    MAP_CHECKED_ELEMENTS = 1 << 16 /* about as many elements of a result are checked */
};

/* Smaller calls may take this many microseconds longer than the floor. */
#define MAP_ALLOWANCE_US 5.0

/* 1 is at the floor. Large calls: the share of the floor. Others: the same after the allowance. */
double map_score(const struct row *row, const struct cell *c);
/* Microseconds over the floor. */
double map_over(const struct cell *c);

/* What a line about one of its cells begins with: "act fwd". */
void map_name(const struct table *t, char *text, size_t size);

struct map_entry {
    const struct table *table;
    const struct row *row;
    const struct cell *cell;
    double score;
};

/* The judged cells of Rafter's own choice with the lowest scores, worst first, of one table or of
 * all (NULL). Returns their number. */
int map_worst(const struct report *r, const struct table *only, struct map_entry worst[MAP_WORST]);
/* The cells where the best of the other libraries is more than 3 % faster, by the ratio; `score` is
 * their time over ours. */
int map_behind(const struct report *r, const struct table *only, struct map_entry worst[MAP_WORST], int *count);

/* One paragraph about a table: how many cells are at the floor, the median, and notes. */
void map_print_summary(const struct table *t, FILE *to);
/* How cells are judged and what was checked, in one paragraph. */
void map_explain(FILE *to);
/* The worst cells of all tables. */
void map_print_worst(const struct report *r, FILE *to);

/* heat.c: the table as a heat map, its worst cells, and all cells, as HTML. */
void heat_write(const struct report *r, const struct table *t, FILE *to);
/* The worst cells of all maps, as HTML; nothing if there is no map. */
void heat_write_worst(const struct report *r, FILE *to);

#endif
