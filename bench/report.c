/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const char *const metric_names[] = {"speed", "memory", "all"};
const char *const metric_units[] = {"ms", "MiB"};
const char *const extra_names[] = {"%", "error", "host us", "first ms"};

const char *extra_text(const struct cell *c, enum extra extra) {
    static char text[24];
    const double values[] = {100 * c->share, c->max_error, c->host, c->first};
    static const char *const formats[] = {"%.0f", "%.1e", "%.1f", "%.1f"};
    text[0] = '\0';
    if (c->state == CELL_MEASURED && values[extra] > 0)
        snprintf(text, sizeof text, formats[extra], values[extra]);
    return text;
}

static void *checked(void *memory) {
    if (!memory) {
        fprintf(stderr, "rafter: no memory\n");
        exit(1);
    }
    return memory;
}

/* Grows an array of `count` elements by one zeroed element. */
static void *grow(void *array, int count, size_t element) {
    void *grown = checked(realloc(array, (size_t)(count + 1) * element));
    memset((char *)grown + (size_t)count * element, 0, element);
    return grown;
}

struct table *report_add_table(struct report *r) {
    r->table = grow(r->table, r->tables, sizeof *r->table);
    return &r->table[r->tables++];
}

struct table *report_find_table(const struct report *r, const char *title) {
    for (int i = 0; i < r->tables; i++)
        if (strcmp(r->table[i].title, title) == 0)
            return &r->table[i];
    return NULL;
}

struct row *table_add_row(struct table *t, int64_t x) {
    t->row = grow(t->row, t->rows, sizeof *t->row);
    int at = t->rows++;
    for (; at > 0 && t->row[at - 1].x > x; at--)
        t->row[at] = t->row[at - 1];
    t->row[at] = (struct row){.x = x};
    return &t->row[at];
}

struct row *table_find_row(const struct table *t, int64_t x) {
    for (int i = 0; i < t->rows; i++)
        if (t->row[i].x == x)
            return &t->row[i];
    return NULL;
}

int table_column(struct table *t, const char *name) {
    int i = 0;
    while (i < t->columns && strcmp(t->column[i], name) != 0)
        i++;
    if (i == REPORT_COLUMNS) {
        fprintf(stderr, "rafter: %s has more than %d columns\n", t->title, REPORT_COLUMNS);
        exit(1);
    }
    if (i == t->columns)
        snprintf(t->column[t->columns++], REPORT_NAME, "%s", name);
    return i;
}

void table_add_note(struct table *t, const char *format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    for (int i = 0; i < t->notes; i++)
        if (strcmp(t->note[i], text) == 0)
            return;
    t->note = grow(t->note, t->notes, sizeof *t->note);
    t->note[t->notes++] = checked(strdup(text));
}

/* Whether "a, b: sentence" names this column before the colon. */
static bool names(const char *note, size_t length, const char *name) {
    const size_t size = strlen(name);
    for (const char *at = note; at + size <= note + length; at += strcspn(at, ",") + 2)
        if (strncmp(at, name, size) == 0 && (at[size] == ',' || at[size] == ':'))
            return true;
    return false;
}

bool note_names(const char *note, const char *name) {
    const char *const colon = strstr(note, ": ");
    return colon && names(note, (size_t)(colon - note), name);
}

void table_add_note_about(struct table *t, const char *name, const char *sentence) {
    for (int i = 0; i < t->notes; i++) {
        const char *colon = strstr(t->note[i], ": ");
        if (!colon || strcmp(colon + 2, sentence) != 0)
            continue;
        const size_t length = (size_t)(colon - t->note[i]), bytes = length + strlen(name) + strlen(sentence) + 5;
        if (names(t->note[i], length, name))
            return;
        char *longer = checked(malloc(bytes));
        snprintf(longer, bytes, "%.*s, %s: %s", (int)length, t->note[i], name, sentence);
        free(t->note[i]);
        t->note[i] = longer;
        return;
    }
    table_add_note(t, "%s: %s", name, sentence);
}

static void free_command(struct report *r) {
    for (char **word = r->command; word && *word; word++)
        free(*word);
    free(r->command);
    r->command = NULL;
}

void report_set_command(struct report *r, int argc, char **argv) {
    free_command(r);
    r->command = checked(calloc((size_t)argc + 1, sizeof *r->command));
    for (int i = 0; i < argc; i++)
        r->command[i] = checked(strdup(argv[i]));
}

void report_free(struct report *r) {
    for (int i = 0; i < r->tables; i++) {
        struct table *t = &r->table[i];
        for (int k = 0; k < t->notes; k++)
            free(t->note[k]);
        for (int k = 0; k < t->rows; k++)
            for (int c = 0; c < t->columns; c++)
                samples_free(&t->row[k].cell[c].samples);
        free(t->note);
        free(t->row);
    }
    free(r->table);
    free_command(r);
    *r = (struct report){0};
}

/* ---- comparing ------------------------------------------------------------------------------- */

const struct cell *row_ours(const struct table *t, const struct row *row) {
    for (int c = 0; c < t->columns; c++)
        if (strcmp(t->column[c], "rafter") == 0 && row->cell[c].state == CELL_MEASURED)
            return &row->cell[c];
    return NULL;
}

double cell_workspace(const struct table *t, const struct row *row, int column) {
    const double gradients = t->over[column] ? 0 : row->gradient_bytes / (1 << 20);
    return fmax(0, row->cell[column].value.median - gradients);
}

const struct cell *row_best_peer(const struct table *t, const struct row *row, const char **name) {
    const struct cell *best = NULL;
    double least = INFINITY;
    for (int c = 0; c < t->columns; c++) {
        const struct cell *const cell = &row->cell[c];
        if (t->ours[c] || t->early[c] || cell->state != CELL_MEASURED)
            continue;
        const double value = t->metric == METRIC_MEMORY ? cell_workspace(t, row, c) : cell->value.median;
        if (best && least <= value)
            continue;
        best = cell;
        least = value;
        *name = t->column[c];
    }
    return best;
}

/* ---- verbs ----------------------------------------------------------------------------------- */

int report_print(int argc, char **argv, const char *usage, void (*write)(const struct report *r, FILE *to)) {
    struct report r = {0};
    if (argc != 3) {
        fprintf(stderr, "rafter: %s\n", usage);
        return 2;
    }
    if (!json_read_report(&r, argv[2]))
        return 2;
    write(&r, stdout);
    report_free(&r);
    return 0;
}

/* ---- unrest ---------------------------------------------------------------------------------- */

/* Other programs matter if they leave fewer processors than the run has threads, or, on a GPU, not even the one that
 * launches kernels. */
static bool is_busy(const struct report *r) {
    const struct unrest *const u = &r->unrest;
    const double wanted = r->gpu[0] ? 1 : fmin(r->threads, u->processors);
    return u->processors > 0 && u->processors - u->others < wanted - 0.15;
}

bool report_unrest(const struct report *r, int index, char *text, size_t size) {
    static const double moved = 1.08; /* a clock that varies less is as steady as machines are */
    const struct unrest *const u = &r->unrest;
    int low = u->clock_low_mhz, high = u->clock_high_mhz;
    if (low == 0 && r->before.clock_mhz > 0 && r->after.clock_mhz > 0) { /* a report of an earlier version */
        low = r->after.clock_mhz;
        high = r->before.clock_mhz;
    }
    if (is_busy(r) && index-- == 0)
        snprintf(
            text, size,
            "other programs kept %.1f of %d processors busy during the run, so times are longer, and vary more, than "
            "on a quiet machine.",
            u->others, u->processors);
    else if (!r->gpu[0] && u->slowdown > moved && index-- == 0)
        snprintf(text, size,
                 "the processor's clock moved: the same loop took up to %.2f times as long as at its fastest. Compare "
                 "columns of one row only.",
                 u->slowdown);
    else if (low > 0 && high > moved * low && index-- == 0)
        snprintf(text, size,
                 "the GPU's clock moved between %d and %d MHz during the run. Compare columns of one row only.", low,
                 high);
    else
        return false;
    return true;
}
