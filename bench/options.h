/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of `rafter bench` and `rafter check`. */
#ifndef RAFTER_BENCH_OPTIONS_H
#define RAFTER_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "harness/problem.h"
#include "report.h"

enum { OPTIONS_LIST = 32 };

struct options {
    const struct op_cases *op[OPTIONS_LIST]; /* NULL-terminated; all of them when none was named */
    bool seeds;                              /* preset: the seeds' sizes, not the quick ones */
    bool metric[METRICS];                    /* which are wanted */
    unsigned modes;                          /* bit m set: problem_mode m is wanted */
    int64_t x[OPTIONS_LIST];                 /* zero-terminated; none: the preset's */
    rafter_dtype dtype;
    DLDevice device; /* zero: the CPU */
    int threads;     /* 0: as many as OpenMP would */
    double seconds;  /* per cell; 0: the preset's */
    const char *json, *csv, *html;
    bool percent, error, host, first; /* figures beside each provider's */
    double limit; /* seconds that a peer in a process of its own may take to open or to make a call; 0: its own */
    bool warm, markdown, resume, list;
    const char *providers; /* names between commas, or NULL for all */
    const char *without;   /* and those that are not wanted */
    const char *table;     /* part of the title; NULL: all tables */
};

/* Reads argv[from ...]. False: a sentence has been printed, and the command should end with status 2. `verb` is
 * "bench", which takes all options, or "check", which takes --threads. */
bool options_read(struct options *o, const char *verb, int argc, char **argv, int from);

#endif
