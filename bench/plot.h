/* SPDX-License-Identifier: Apache-2.0 */
/* A table as a plot: lines over x, as SVG inside an HTML page. */
#ifndef RAFTER_BENCH_PLOT_H
#define RAFTER_BENCH_PLOT_H

#include "report.h"

/* The number of colours: classes c0, c1, ... of the page's style sheet. */
enum { PLOT_COLOURS = 10 };

/* Two plots, or nothing if there is nothing to draw. The first shows time over the floor; without shares of the floor,
 * over the time of the best other library; of memory, workspace. The second, in a <details>, shows the table's figures
 * on logarithmic axes. Each figure that a plot can show is one <circle class="p"> with its text in data-v. */
void plot_write(const struct table *t, FILE *to);

/* The first plot of two runs of one table, side by side on the same axes. */
void plot_write_pair(const struct table *old, const struct table *new, FILE *to);

#endif
