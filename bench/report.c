#include "report.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const metric_names[] = {"speed", "memory"};
const char *const metric_units[] = {"ms", "MiB"};

/* An array of `count` elements with room for one more. */
static void *grow(void *array, int count, size_t element) {
    void *grown = realloc(array, (size_t)(count + 1) * element);
    if (!grown) {
        fprintf(stderr, "rafter: no memory\n");
        exit(1);
    }
    memset((char *)grown + (size_t)count * element, 0, element);
    return grown;
}

struct table *report_add_table(struct report *r) {
    r->table = grow(r->table, r->tables, sizeof *r->table);
    return &r->table[r->tables++];
}

struct row *table_add_row(struct table *t) {
    t->row = grow(t->row, t->rows, sizeof *t->row);
    return &t->row[t->rows++];
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
    t->note[t->notes++] = strdup(text);
}

void report_free(struct report *r) {
    for (int i = 0; i < r->tables; i++) {
        for (int k = 0; k < r->table[i].notes; k++)
            free(r->table[i].note[k]);
        free(r->table[i].note);
        free(r->table[i].row);
    }
    free(r->table);
    *r = (struct report){0};
}

bool output_open(struct output *o, const char *path) {
    if (strlen(path) >= sizeof o->path) {
        errno = ENAMETOOLONG;
        return false;
    }
    snprintf(o->path, sizeof o->path, "%s", path);
    snprintf(o->temporary, sizeof o->temporary, "%s.%ld", path, (long)getpid());
    o->file = fopen(o->temporary, "w");
    return o->file != NULL;
}

bool output_commit(struct output *o) {
    bool good = !ferror(o->file);
    good &= fclose(o->file) == 0;
    o->file = NULL;
    if (good && rename(o->temporary, o->path) == 0)
        return true;
    unlink(o->temporary);
    return false;
}

void output_discard(struct output *o) {
    if (o->file) {
        fclose(o->file);
        unlink(o->temporary);
        o->file = NULL;
    }
}
