/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of `rafter bench`, `rafter check` and `rafter info`. */
#ifndef RAFTER_BENCH_OPTIONS_H
#define RAFTER_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "harness/problem.h"
#include "report.h"

enum { OPTIONS_LIST = 32 };

struct options {
    const struct op_cases *op[OPTIONS_LIST]; /* NULL-terminated; all ops if none was named */
    int named;                               /* how many were named */
    bool seeds;                              /* preset: the seeds' sizes, not the quick ones */
    bool models;                             /* preset: the sizes of models instead; `seeds` is set too */
    bool map;                                /* preset: the map, not tables */
    uint64_t seed;                           /* map: of the list of cells */
    int64_t cells;                           /* map: cells per map; 0: the device's default */
    bool metric[METRICS];                    /* which are measured */
    unsigned modes;                          /* bit m set: problem_mode m is included */
    int64_t x[OPTIONS_LIST];                 /* zero-terminated; none: the preset's */
    rafter_dtype dtype;
    bool has_dtype;  /* it was given */
    DLDevice device; /* zero: the CPU */
    int threads;     /* 0: as many as OpenMP would */
    bool batch_invariant;
    double seconds; /* per cell; 0: the preset's */
    const char *json, *csv, *html;
    bool percent, error, host, first; /* extra figures beside each cell */
    bool variants;                    /* a column for each variant */
    double limit; /* seconds for opening or a call of a provider in another process; 0: the provider's */
    bool warm, markdown, resume, list;
    const char *providers; /* names separated by commas, or NULL for all */
    const char *without;   /* names that are left out */
    const char *table;     /* part of the title; NULL: all tables */

    /* info: the call that is asked about. */
    bool has_shape;
    const char *algorithm; /* NULL: the automatic choice */
    struct problem_request request;
};

/* Reads argv[from ...]. False: a message has been printed, and the command should end with status
 * 2. `verb` ("bench", "check" or "info") determines which options there are. */
bool options_read(struct options *o, const char *verb, int argc, char **argv, int from);

#endif
