/* What a run of `rafter bench` found: tables of rows of cells, collected before they are printed or written. */
#ifndef RAFTER_BENCH_REPORT_H
#define RAFTER_BENCH_REPORT_H

#include <stdbool.h>
#include <stdio.h>

#include "harness/problem.h"
#include "measure.h"

enum { REPORT_COLUMNS = 12 };

enum metric { METRIC_SPEED, METRIC_MEMORY };
extern const char *const metric_names[]; /* "speed", "memory" */
extern const char *const metric_units[]; /* "ms", "MiB" */

enum cell_state {
    CELL_EMPTY, /* not run: printed as a dash */
    CELL_WRONG, /* ran, and its result is not the oracle's */
    CELL_MEASURED
};

struct cell {
    enum cell_state state;
    struct summary value; /* in the metric's unit */
    int repeats;
    double max_error; /* largest |got - want| / max(1, |want|) */
    double share;     /* of the roofline; 0: not asked for */
};

struct row {
    int64_t x;
    double bytes, flops; /* that one call must move and do */
    struct cell cell[REPORT_COLUMNS];
};

struct table {
    char title[192]; /* "act-speed-fwd-batch12-head12-dim128-act_silu-bf16" */
    const char *x_name;
    enum metric metric;
    bool shares; /* print them */
    int columns, rows, notes;
    const char *column[REPORT_COLUMNS];
    struct row *row;
    char **note; /* sentences below the table */
};

struct report {
    int tables;
    struct table *table;
    double read, copy, matrix; /* rates of the roofline, bytes and flops per second; 0: not measured */
};

/* Each of these exits with a sentence when there is no memory. Pointers stay valid until the next call on the same
 * owner. */
struct table *report_add_table(struct report *r);
struct row *table_add_row(struct table *t);
void table_add_note(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
void report_free(struct report *r);

/* The layout of the seeds: title, heading, then index, x and one column per provider. */
void table_print(const struct table *t, FILE *to);

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Written under another name, then renamed: under its own name a file is either whole or not there. */
struct output {
    char path[1024], temporary[1040];
    FILE *file;
};

bool output_open(struct output *o, const char *path); /* false: errno says why */
bool output_commit(struct output *o);
void output_discard(struct output *o);

/* The machine, the command line, then one object per cell. */
void json_write(const struct report *r, FILE *to, int threads, int argc, char **argv);

/* One file per table, <directory>/<title>.csv. False: a sentence has been printed. */
bool csv_write(const struct report *r, const char *directory);

#endif
