/* SPDX-License-Identifier: Apache-2.0 */
/* A run of `rafter bench`. */
#ifndef RAFTER_BENCH_RUN_H
#define RAFTER_BENCH_RUN_H

#include <signal.h>

#include "harness/context.h"
#include "harness/variants.h"
#include "options.h"
#include "provider.h"
#include "report.h"
#include "roofline.h"
#include "unrest.h"

/* The time limits of a preset, in seconds. */
struct budget {
    double cell; /* for the repeats of one cell */
    double once; /* a call this long is made only once */
    double peer; /* calls of other libraries that would take longer are left out */
};

/* A context that is forced to a variant. */
struct variant_column {
    const char *name;
    rafter_context *context; /* NULL: it cannot be created */
};

struct run {
    struct options options;
    rafter_context *context;
    struct variant_column variant[VARIANTS_MOST_OF_ALL]; /* created when a table first needs them */
    int variants;
    struct pace pace;
    struct roofline roofline;
    struct report report;
    struct unrest_watch watch;
    struct budget budget;
    bool fresh;                          /* this process was started to measure one first call */
    double started, work_done, work_all; /* for the estimate of the time left; work is in bytes */
    double saved;                        /* when the files were last written */
};

/* Set to the signal's number by Ctrl-C or SIGTERM. The run ends after the current call, or at once if
 * the Python worker is making that call. A second signal ends the process. */
extern volatile sig_atomic_t run_interrupted;

/* One column of one row in one mode. */
struct column {
    struct session session;
    const char *name;
    char variant[sizeof((struct cell *)0)->variant]; /* of Rafter: what served the call */
    double max_error, first, bytes;
    double used;                  /* seconds spent on it so far */
    struct samples samples, host; /* seconds */
    enum cell_state state;
    bool live; /* open, and correct so far */
    bool done;
};

/* The tables of a row, for notes below them. */
struct row_notes {
    struct table *table[METRICS]; /* NULL: not requested */
    int64_t x;
};

/* columns.c: lists the columns of this problem's table; checks one against the oracle; times all in
 * turn. */
int columns_list(struct run *run, const problem *p, enum problem_mode mode, struct column columns[]);
/* Opens the column and makes one call. False: it failed, and a note says why. */
bool column_open(struct column *c, struct row_notes *notes, double *seconds);
void column_check(struct run *run, problem *p, struct column *c, struct row_notes *notes);
void columns_time(struct run *run, struct column columns[], int count, struct row_notes *notes);
void columns_weigh(struct column columns[], int count, struct row_notes *notes);
/* Writes the columns' results into a row of the table. `roof`: minimum seconds; 0: not measured. */
void columns_report(struct column columns[], int count, struct table *table, struct row *row, double roof);
void columns_close(struct column columns[], int count);

/* map.c: draws the cells of the run's ops, measures them, prints the worst. */
void run_map(struct run *run);

/* rows.c: all tables of an op, row by row. */
void run_op(struct run *run, const struct op_cases *op);
/* Prints a line for every table of the run: title, name of x, rows, columns. */
void run_list(struct run *run);
/* The work of the whole run, for the estimate of the time left. */
double run_work(const struct run *run);

/* bench.c: writes the requested files with the results so far, but for pipes and devices. */
bool run_save(struct run *run);

/* first.c: seconds of the first call in a fresh process; 0: it failed. */
double first_call(const struct run *run, const problem *p, enum problem_mode mode, int64_t x, const char *column);

#endif
