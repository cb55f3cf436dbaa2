/* SPDX-License-Identifier: Apache-2.0 */
/* What the pages of a report and of a comparison share: style, script, and how strings are written. */
#ifndef RAFTER_BENCH_PAGE_H
#define RAFTER_BENCH_PAGE_H

#include "report.h"

/* From the doctype to <main>. */
void page_begin(FILE *to, const char *title);
void page_end(FILE *to);

/* Writes text with HTML's reserved characters escaped, for elements and for quoted attributes. Every
 * string of a report is written by it: the report may be anybody's. */
void write_escaped(FILE *to, const char *text);
/* A figure with about four digits. */
void write_number(FILE *to, double value);
/* A link to the table's section. */
void write_link(FILE *to, const struct table *t, const char *text);

/* Opens and closes a table that scrolls in a box of its own, with its heading and its first column always in sight. */
void table_begin(FILE *to, const char *label);
void table_end(FILE *to);

/* The section of a table, with its name and, small, its title; the filter reads its attributes. */
void section_begin(FILE *to, const struct table *t);
void section_end(FILE *to);

/* Contents, and a filter by op, direction and metric. */
void contents_write(const struct report *r, FILE *to);

/* A paragraph for each reason to distrust the times: a busy machine, clocks that moved. `which` says of which run. */
void unrest_write(const struct report *r, const char *which, FILE *to);

#endif
