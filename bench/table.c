/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report.h"

enum { WIDTH = 24 };

/* A column of text: a heading and one cell per row. */
struct text {
    const char *heading;
    char (*cell)[WIDTH];
};

/* Removes trailing zeros that all numbers of a column have, as in the seeds' tables, but keeps one
 * decimal. */
static void trim_zeros(struct text *t, int rows) {
    size_t cut = WIDTH;
    for (int i = 0; i < rows; i++) {
        const char *point = strchr(t->cell[i], '.');
        if (!point)
            continue;
        size_t zeros = 0;
        for (const char *end = t->cell[i] + strlen(t->cell[i]) - 1; end > point + 1 && *end == '0'; end--)
            zeros++;
        cut = zeros < cut ? zeros : cut;
    }
    for (int i = 0; i < rows && cut < WIDTH; i++)
        if (strchr(t->cell[i], '.'))
            t->cell[i][strlen(t->cell[i]) - cut] = '\0';
}

static void format_cell(char *to, const struct cell *c) {
    if (c->state == CELL_MEASURED)
        snprintf(to, WIDTH, "%.6f", c->value.median);
    else
        snprintf(to, WIDTH, "%s", c->state == CELL_WRONG ? "wrong" : "-");
}

static int width_of(const struct text *t, int rows) {
    size_t width = strlen(t->heading);
    for (int i = 0; i < rows; i++)
        width = strlen(t->cell[i]) > width ? strlen(t->cell[i]) : width;
    return (int)width;
}

/* A table as text: index, x, then the providers, each with its extra figures; in memory tables the
 * bytes of the gradients come last. */
struct layout {
    struct text column[3 + (1 + EXTRAS) * REPORT_COLUMNS];
    int columns, rows;
    char (*cells)[WIDTH]; /* of all columns */
};

static struct text *add_column(struct layout *l, const char *heading) {
    struct text *t = &l->column[l->columns];
    *t = (struct text){heading, l->cells + l->columns * l->rows};
    l->columns++;
    return t;
}

static void add_providers(struct layout *l, const struct table *t) {
    for (int k = 0; k < t->columns; k++) {
        struct text *values = add_column(l, t->column[k]);
        for (int i = 0; i < t->rows; i++)
            format_cell(values->cell[i], &t->row[i].cell[k]);
        trim_zeros(values, t->rows);
        for (int e = 0; e < EXTRAS; e++) {
            if (!(t->extras >> e & 1))
                continue;
            struct text *beside = add_column(l, extra_names[e]);
            for (int i = 0; i < t->rows; i++)
                snprintf(beside->cell[i], WIDTH, "%s", extra_text(&t->row[i].cell[k], (enum extra)e));
        }
    }
}

static void add_gradients(struct layout *l, const struct table *t) {
    struct text *gradients = add_column(l, "(gradients)");
    for (int i = 0; i < t->rows; i++)
        snprintf(gradients->cell[i], WIDTH, "%.6f", t->row[i].gradient_bytes / (1 << 20));
    trim_zeros(gradients, t->rows);
}

static bool layout_create(struct layout *l, const struct table *t) {
    *l = (struct layout){.rows = t->rows};
    l->cells = calloc((size_t)t->rows * (sizeof l->column / sizeof *l->column) + 1, WIDTH);
    if (!l->cells)
        return false;
    struct text *index = add_column(l, ""), *x = add_column(l, t->x_name);
    for (int i = 0; i < t->rows; i++) {
        snprintf(index->cell[i], WIDTH, "%d", i);
        snprintf(x->cell[i], WIDTH, "%.1f", (double)t->row[i].x);
    }
    add_providers(l, t);
    if (t->metric == METRIC_MEMORY)
        add_gradients(l, t);
    return true;
}

static void print_layout(const struct layout *l, FILE *to) {
    for (int i = -1; i < l->rows; i++) {
        for (int k = 0; k < l->columns; k++) {
            const struct text *t = &l->column[k];
            const char *cell = i < 0 ? t->heading : t->cell[i];
            const int width = width_of(t, l->rows);
            fprintf(to, k == 0 ? "%-*s" : "  %*s", width, cell);
        }
        fputc('\n', to);
    }
}

void table_print(const struct table *t, FILE *to) {
    struct layout l;
    if (!layout_create(&l, t))
        return;
    const bool terminal = isatty(fileno(to));
    fprintf(to, terminal ? "\033[1m%s:\033[0m\n" : "%s:\n", t->title);
    print_layout(&l, to);
    for (int i = 0; i < t->notes; i++)
        fprintf(to, "  %s\n", t->note[i]);
    fputc('\n', to);
    free(l.cells);
}

void table_markdown(const struct table *t, FILE *to) {
    struct layout l;
    if (!layout_create(&l, t))
        return;
    fprintf(to, "**%s** (%s)\n\n", t->title, metric_units[t->metric]);
    for (int i = -2; i < l.rows; i++) {
        for (int k = 1; k < l.columns; k++) /* without the index */
            fprintf(to, "| %s ", i == -2 ? l.column[k].heading : i == -1 ? "---:" : l.column[k].cell[i]);
        fputs("|\n", to);
    }
    for (int i = 0; i < t->notes; i++)
        fprintf(to, "%s- %s\n", i ? "" : "\n", t->note[i]);
    fputc('\n', to);
    free(l.cells);
}
