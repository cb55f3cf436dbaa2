/* SPDX-License-Identifier: Apache-2.0 */
/* What a run of `rafter bench` found: tables of rows of cells, collected before they are printed or written. */
#ifndef RAFTER_BENCH_REPORT_H
#define RAFTER_BENCH_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "measure.h"

enum { REPORT_COLUMNS = 24, REPORT_NAME = 32 };

enum metric { METRIC_SPEED, METRIC_MEMORY, METRICS };
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
    double max_error;       /* largest |got - want| / max(1, |want|) */
    double share;           /* of the roofline; 0: not asked for */
    double host;            /* microseconds until the call came back, median; 0: not asked for */
    double first;           /* milliseconds of the first call of a process; 0: not asked for */
    struct samples samples; /* of speed, in ms, in the order they were taken, thinned to at most REPORT_SAMPLES */
};
enum { REPORT_SAMPLES = 24 };

struct row {
    int64_t x;
    double bytes, flops;   /* that one call must move and do */
    double gradient_bytes; /* of the gradients among the results */
    struct cell cell[REPORT_COLUMNS];
};

/* Figures beside each provider's. */
enum extra { EXTRA_SHARE, EXTRA_ERROR, EXTRA_HOST, EXTRA_FIRST, EXTRAS };
extern const char *const extra_names[]; /* "%", "error", "host us", "first ms" */
/* The figure as text; "" where there is none. */
const char *extra_text(const struct cell *c, enum extra extra);

struct table {
    char title[192]; /* "act-speed-fwd-batch12-head12-dim128-act_silu-bf16" */
    char x_name[REPORT_NAME];
    enum metric metric;
    unsigned extras; /* bit e set: enum extra e is printed */
    int columns, rows, notes;
    char column[REPORT_COLUMNS][REPORT_NAME];
    bool ours[REPORT_COLUMNS];  /* the library itself */
    bool early[REPORT_COLUMNS]; /* its forward does backward's work */
    struct row *row;
    char **note; /* sentences below the table */
    bool printed;
};

/* The GPU's state; zero where there is none to ask. */
struct gpu_state {
    int clock_mhz, memory_clock_mhz, temperature, watts;
};

struct report {
    char version[32], cpu[128], features[256], gpu[256], torch[64], date[32];
    int threads;
    char **command;            /* NULL-terminated */
    double read, copy, matrix; /* rates of the roofline, bytes and flops per second; 0: not measured */
    struct gpu_state before, after;
    double seconds;   /* the run took */
    bool interrupted; /* it did not come to its end */
    int tables;
    struct table *table;
};

/* Each of these exits with a sentence when there is no memory. Pointers stay valid until the next call on the same
 * owner. */
struct table *report_add_table(struct report *r);
struct table *report_find_table(const struct report *r, const char *title); /* NULL if there is none */
struct row *table_add_row(struct table *t, int64_t x);        /* in the order of x, whatever that of the calls */
struct row *table_find_row(const struct table *t, int64_t x); /* NULL if there is none */
/* The column of this name, a new one if there is none. */
int table_column(struct table *t, const char *name);
void table_add_note(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "a, b: sentence": names with the same to say share a note. */
void table_add_note_about(struct table *t, const char *name, const char *sentence);
void report_set_command(struct report *r, int argc, char **argv);
void report_free(struct report *r);

/* The cell of the library's automatic choice, and the fastest (or leanest) right cell of anybody else who does no work
 * of backward in forward; NULL if there is none. `name` is the other's. */
const struct cell *row_ours(const struct table *t, const struct row *row);
const struct cell *row_best_peer(const struct table *t, const struct row *row, const char **name);

/* ---- as text --------------------------------------------------------------------------------- */

/* The layout of the seeds: title, heading, then index, x and one column per provider. */
void table_print(const struct table *t, FILE *to);
void table_markdown(const struct table *t, FILE *to);

/* Everything in one file that a browser opens: summary, plots, tables, machine, command. */
void html_write(const struct report *r, FILE *to);

/* ---- files ----------------------------------------------------------------------------------- */

/* Written under another name, then renamed: under its own name a file is either whole or not there. */
struct output {
    char path[1024], temporary[1040];
    FILE *file;
};

bool output_open(struct output *o, const char *path); /* false: errno says why */
bool output_commit(struct output *o);
void output_discard(struct output *o);

/* The machine, the command line, the tables, then one object per cell. */
void json_write(const struct report *r, FILE *to);
/* Reads one back. False: a sentence has been printed. */
bool json_read_report(struct report *r, const char *path);

/* A verb that takes one report and prints it: the exit status. `usage` is what to say where another number is given. */
int report_print(int argc, char **argv, const char *usage, void (*write)(const struct report *r, FILE *to));

/* One file per table, <directory>/<title>.csv. False: a sentence has been printed. */
bool csv_write(const struct report *r, const char *directory);

#endif
