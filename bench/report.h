/* SPDX-License-Identifier: Apache-2.0 */
/* The results of `rafter bench`: tables of rows of cells, collected before they are printed or
 * written. */
#ifndef RAFTER_BENCH_REPORT_H
#define RAFTER_BENCH_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "measure.h"

enum { REPORT_COLUMNS = 40, REPORT_NAME = 48 };

enum metric { METRIC_SPEED, METRIC_MEMORY, METRICS };
extern const char *const metric_names[]; /* "speed", "memory" */
extern const char *const metric_units[]; /* "ms", "MiB" */

enum cell_state {
    CELL_EMPTY, /* not run: printed as a dash */
    CELL_WRONG, /* ran, but its result differs from the oracle's */
    CELL_MEASURED
};

struct cell {
    enum cell_state state;
    struct summary value; /* in the metric's unit */
    int repeats;
    char variant[2 * REPORT_NAME]; /* of Rafter: the variant that served the call, or two: "a+b" */
    double max_error;              /* largest |got - want| / max(1, |want|) */
    double share;                  /* of the roofline; 0: not requested */
    double host;                   /* microseconds until the call returned, median; 0: not requested */
    double first;                  /* milliseconds of the first call of a process; 0: not requested */
    struct samples samples;        /* of speed, in ms, in the order they were taken, at most REPORT_SAMPLES */
};
enum { REPORT_SAMPLES = 24 };

/* What a cell of the map is. Its number, row.x, is its place in the seeded list. */
struct map_place {
    char label[256]; /* all of it: "softmax bf16 [4096, 50257] dim 1, padded rows, gradient expanded" */
    int64_t length;
    char layout[40], option[40], gradient[16], dtype[8];
};

struct row {
    int64_t x;
    struct map_place place; /* in tables of the map */
    double bytes, flops;    /* the minimum of one call */
    double gradient_bytes;  /* of the gradients among the results */
    struct cell cell[REPORT_COLUMNS];
};

/* Extra figures beside each cell. */
enum extra { EXTRA_SHARE, EXTRA_ERROR, EXTRA_HOST, EXTRA_FIRST, EXTRAS };
extern const char *const extra_names[]; /* "%", "error", "host us", "first ms" */
/* The figure as text; "" if there is none. */
const char *extra_text(const struct cell *c, enum extra extra);

struct table {
    char title[192]; /* "act-speed-fwd-batch12-head12-dim128-act_silu-bf16" */
    char x_name[REPORT_NAME];
    enum metric metric;
    char map[REPORT_NAME]; /* not empty: rows are cells of the map, and this is what place.length counts */
    unsigned extras;       /* bit e set: enum extra e is printed */
    int columns, rows, notes;
    char column[REPORT_COLUMNS][REPORT_NAME];
    bool ours[REPORT_COLUMNS];  /* a column of Rafter */
    bool early[REPORT_COLUMNS]; /* its forward also computes the gradient */
    bool over[REPORT_COLUMNS];  /* its gradient overwrites its input */
    struct row *row;
    char **note; /* sentences below the table */
    bool printed;
};

/* The state of the GPU; zero if unknown. */
struct gpu_state {
    int clock_mhz, memory_clock_mhz, temperature, watts;
};

/* What may have disturbed the run; zero if unknown. */
struct unrest {
    int processors;
    double others;   /* processors that other programs kept busy, on average over the run */
    double slowdown; /* the slowest of some loops of one length over the fastest: 1 if the clock stood still */
    int clock_low_mhz, clock_high_mhz; /* of the GPU */
};

struct report {
    char version[32], cpu[128], features[256], gpu[256], torch[64], date[32];
    int threads;
    char **command;            /* NULL-terminated */
    double read, copy, matrix; /* rates of the roofline, in bytes and flops per second; 0: not measured */
    struct gpu_state before, after;
    struct unrest unrest;
    double seconds;   /* duration of the run */
    bool interrupted; /* the run was stopped before its end */
    int tables;
    struct table *table;
};

/* Each of these exits with a message if there is no memory. Pointers stay valid until the next call
 * on the same owner. */
struct table *report_add_table(struct report *r);
struct table *report_find_table(const struct report *r, const char *title); /* NULL if there is none */
struct row *table_add_row(struct table *t, int64_t x);                      /* keeps rows sorted by x */
struct row *table_find_row(const struct table *t, int64_t x);               /* NULL if there is none */
/* The column of this name; adds it if there is none. */
int table_column(struct table *t, const char *name);
void table_add_note(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "a, b: sentence": columns with the same sentence share a note. */
void table_add_note_about(struct table *t, const char *name, const char *sentence);
bool note_names(const char *note, const char *name); /* whether it is among the columns before the colon */
void report_set_command(struct report *r, int argc, char **argv);
void report_free(struct report *r);

/* The MiB of a memory table's cell beyond inputs and gradients. A gradient that overwrites its input takes none. */
double cell_workspace(const struct table *t, const struct row *row, int column);

/* The cell of the column "rafter"; and the fastest correct cell of the other libraries (in memory
 * tables, that with the least workspace), without those whose forward also computes the gradient.
 * NULL if there is none. `name` is the other column's. */
const struct cell *row_ours(const struct table *t, const struct row *row);
const struct cell *row_best_peer(const struct table *t, const struct row *row, const char **name);

/* The index-th reason to distrust the times, as a sentence. False: there are not that many. */
bool report_unrest(const struct report *r, int index, char *text, size_t size);

/* ---- as text --------------------------------------------------------------------------------- */

/* In the layout of the seeds: title, heading, then index, x and one column per provider. */
void table_print(const struct table *t, FILE *to);
void table_markdown(const struct table *t, FILE *to);

/* One self-contained HTML file: summary, plots, tables, machine, command. */
void html_write(const struct report *r, FILE *to);

/* ---- files ----------------------------------------------------------------------------------- */

/* A file to write. A regular file is written under a temporary name beside it and then renamed, so
 * that it is never seen incomplete; of a symbolic link, the file that it names is replaced. Devices,
 * pipes and sockets are written in place. */
struct output {
    char path[1024], temporary[1056]; /* without links; "": written in place */
    FILE *file;
};

bool output_open(struct output *o, const char *path); /* false: errno says why */
bool output_commit(struct output *o);
void output_discard(struct output *o);
bool output_is_special(const char *path); /* exists, and would be written in place */
/* Whether output_open would succeed; nothing is changed. False: errno says why. */
bool output_check(const char *path);

/* The machine, the command line, the tables, then one object per cell. */
void json_write(const struct report *r, FILE *to);
/* Reads a report back. False: a message has been printed. */
bool json_read_report(struct report *r, const char *path);

/* Implements a verb that takes one report and prints it; returns the exit status. `usage` is
 * printed if the number of arguments is wrong. */
int report_print(int argc, char **argv, const char *usage, void (*write)(const struct report *r, FILE *to));

/* Writes one file per table, <directory>/<title>.csv, with unusual bytes of the title as %XX. False: a message has been
 * printed. */
bool csv_write(const struct report *r, const char *directory);

#endif
