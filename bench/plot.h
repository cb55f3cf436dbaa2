/* SPDX-License-Identifier: Apache-2.0 */
/* A table as a picture: lines over x, both axes logarithmic, as SVG inside an HTML page. */
#ifndef RAFTER_BENCH_PLOT_H
#define RAFTER_BENCH_PLOT_H

#include "report.h"

/* Colours are classes c0, c1, ... of the page's style sheet; there are so many. */
enum { PLOT_COLOURS = 10 };

/* Writes nothing where the table has nothing to draw. Every measured cell above 0 is one <circle class="p">, whose
 * data-v is the text to show for it. */
void plot_write(const struct table *t, FILE *to);

/* Text with the characters that HTML reserves escaped. */
void write_escaped(FILE *to, const char *text);

#endif
