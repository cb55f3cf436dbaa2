/* SPDX-License-Identifier: Apache-2.0 */
/* A table as a plot: lines over x, both axes logarithmic, as SVG inside an HTML page. */
#ifndef RAFTER_BENCH_PLOT_H
#define RAFTER_BENCH_PLOT_H

#include "report.h"

/* The number of colours: classes c0, c1, ... of the page's style sheet. */
enum { PLOT_COLOURS = 10 };

/* Writes nothing if there is nothing to draw. Every measured cell above 0 is one <circle class="p">
 * with its text in data-v. */
void plot_write(const struct table *t, FILE *to);

/* Writes text with HTML's reserved characters escaped, for elements and for quoted attributes. Every
 * string of a report is written by it: the report may be anybody's. */
void write_escaped(FILE *to, const char *text);
/* A link to the table's section. */
void write_link(FILE *to, const struct table *t, const char *text);

#endif
