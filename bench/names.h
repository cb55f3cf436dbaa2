/* SPDX-License-Identifier: Apache-2.0 */
/* What tables and columns are called on a page: plain words, from the short names of the tables. */
#ifndef RAFTER_BENCH_NAMES_H
#define RAFTER_BENCH_NAMES_H

#include "report.h"

enum { NAME_TEXT = 256 };

/* A table's title in plain words; "memory" is not in it. If the title is not one of `rafter bench`, `text` is the
 * title, and the others are "". */
struct table_name {
    char text[NAME_TEXT]; /* "Cross entropy, forward, 4096 rows, bf16" */
    char op[40];          /* "Cross entropy" */
    char mode[32];        /* "forward" */
};

struct table_name table_name(const struct table *t);
/* What x counts: "classes". */
const char *x_meaning(const struct table *t);

/* The name of a library whose column has a short name: "Liger Kernel"; else the column's own. */
const char *column_name(const char *column);
/* What the column is, in a phrase; NULL: not known, so probably a variant of Rafter. */
const char *column_meaning(const char *column);

/* What an extra figure is, in a phrase. */
extern const char *const extra_meanings[EXTRAS];

#endif
