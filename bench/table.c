#include <stdlib.h>
#include <string.h>

#include "report.h"

enum { WIDTH = 24 };

/* A column of text: a heading and one cell per row. */
struct text {
    const char *heading;
    char (*cell)[WIDTH];
};

/* Cuts the zeros that all numbers of a column end in, as the seeds' tables do; one decimal stays. */
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

static void print_columns(const struct text *texts, int columns, int rows, FILE *to) {
    for (int i = -1; i < rows; i++) {
        for (int k = 0; k < columns; k++) {
            const char *cell = i < 0 ? texts[k].heading : texts[k].cell[i];
            if (k == 0)
                fprintf(to, "%-*s", width_of(&texts[k], rows), cell);
            else
                fprintf(to, "  %*s", width_of(&texts[k], rows), cell);
        }
        fputc('\n', to);
    }
}

void table_print(const struct table *t, FILE *to) {
    struct text texts[2 + 2 * REPORT_COLUMNS];
    char(*cells)[WIDTH] = calloc((size_t)(t->rows + 1) * (sizeof texts / sizeof *texts), WIDTH);
    if (!cells)
        return;
    int columns = 0;
#define ADD(text) (texts[columns] = (struct text){text, cells + columns * (t->rows + 1)}, columns++)
    ADD("");
    ADD(t->x_name);
    for (int i = 0; i < t->rows; i++) {
        snprintf(texts[0].cell[i], WIDTH, "%d", i);
        snprintf(texts[1].cell[i], WIDTH, "%.1f", (double)t->row[i].x);
    }
    for (int k = 0; k < t->columns; k++) {
        ADD(t->column[k]);
        for (int i = 0; i < t->rows; i++)
            format_cell(texts[columns - 1].cell[i], &t->row[i].cell[k]);
        trim_zeros(&texts[columns - 1], t->rows);
        if (!t->shares)
            continue;
        ADD("%");
        for (int i = 0; i < t->rows; i++)
            if (t->row[i].cell[k].state == CELL_MEASURED && t->row[i].cell[k].share > 0)
                snprintf(texts[columns - 1].cell[i], WIDTH, "%.0f", 100 * t->row[i].cell[k].share);
    }
#undef ADD
    fprintf(to, "%s:\n", t->title);
    print_columns(texts, columns, t->rows, to);
    for (int i = 0; i < t->notes; i++)
        fprintf(to, "  %s\n", t->note[i]);
    fputc('\n', to);
    free(cells);
}
