/* SPDX-License-Identifier: Apache-2.0 */
/* A run of `rafter bench` while it goes on. */
#ifndef RAFTER_BENCH_RUN_H
#define RAFTER_BENCH_RUN_H

#include <signal.h>

#include "core/backend.h"
#include "options.h"
#include "provider.h"
#include "report.h"
#include "roofline.h"

/* Times in seconds, of a preset. */
struct budget {
    double cell; /* repeats of one cell */
    double once; /* a call this long is not made a second time */
    double peer; /* a peer's call that would take longer is left out */
};

struct run {
    struct options options;
    rafter_context *context;
    struct pace pace;
    struct roofline roofline;
    struct report report;
    struct budget budget;
    bool fresh;                          /* a process that was started to make one first call */
    double started, work_done, work_all; /* for the estimate of the time left; work is in bytes */
    double saved;                        /* when the files were written last */
};

/* Set by Ctrl-C, which ends the run after the call at hand, and at once if that is the Python worker's; a second one
 * ends the process. */
extern volatile sig_atomic_t run_interrupted;

/* One column of one row in one mode. */
struct column {
    struct session session;
    const char *name;
    double max_error, first, bytes;
    double used;                  /* seconds, all told */
    struct samples samples, host; /* seconds */
    enum cell_state state;
    bool live; /* open, and right so far */
    bool done;
};

/* What the row's tables have to say, whatever their metric. */
struct row_notes {
    struct table *table[METRICS]; /* NULL: not wanted */
    int64_t x;
};

/* columns.c: the columns of this problem's table; checking one against the oracle; timing all of them in turn. */
int columns_list(struct run *run, const problem *p, enum problem_mode mode, struct column columns[]);
void column_check(struct run *run, problem *p, struct column *c, struct row_notes *notes);
void columns_time(struct run *run, struct column columns[], int count, struct row_notes *notes);
void columns_weigh(struct column columns[], int count, struct row_notes *notes);
/* Writes the columns' findings into a row of the table. `roof`: seconds; 0: not measured. */
void columns_report(struct column columns[], int count, struct table *table, struct row *row, double roof);
void columns_close(struct column columns[], int count);

/* rows.c: all tables of an op, row by row. */
void run_op(struct run *run, const struct op_cases *op);
/* Prints a line for every table that there would be: title, name of x, rows, columns. */
void run_list(struct run *run);
/* The work of the whole run, for the estimate. */
double run_work(const struct run *run);

/* bench.c: writes the files that were asked for, with what is there so far. */
bool run_save(struct run *run);

/* first.c: the first call of a fresh process, in seconds; 0: it could not be had. */
double first_call(const struct run *run, const problem *p, enum problem_mode mode, int64_t x, const char *column);

#endif
