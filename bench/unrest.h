/* SPDX-License-Identifier: Apache-2.0 */
/* Watches for what disturbs a run: other programs on the same processors, and clocks that move. */
#ifndef RAFTER_BENCH_UNREST_H
#define RAFTER_BENCH_UNREST_H

#include "report.h"

struct unrest_watch {
    double started, busy, own; /* seconds at the start: the clock; busy time of all processors; time of this run */
    double fastest, slowest;   /* seconds of a loop of fixed length */
    double looked;             /* when the GPU's clock was read */
};

void unrest_begin(struct unrest_watch *w);
/* Looks again, and writes into the report what was seen since the beginning. */
void unrest_look(struct unrest_watch *w, struct report *r);
/* Reads the GPU's clock, at most once a second: just after timed calls, since an idle GPU may slow down. */
void unrest_look_at_gpu(struct unrest_watch *w, struct report *r);

#endif
