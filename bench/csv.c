/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "report.h"

/* Puts the text in quotes if it has characters that end a field. */
static void write_field(FILE *to, const char *text, bool quoted) {
    if (!quoted && !text[strcspn(text, ",\"\r\n")]) {
        fputs(text, to);
        return;
    }
    fputc('"', to);
    for (; *text; text++)
        fprintf(to, *text == '"' ? "\"\"" : "%c", *text);
    fputc('"', to);
}

static void write_table(const struct table *t, FILE *to) {
    write_field(to, t->x_name, false);
    fputs(t->map[0] ? ",label,bytes" : "", to);
    for (int k = 0; k < t->columns; k++) {
        fputc(',', to);
        write_field(to, t->column[k], false);
    }
    fputc('\n', to);
    for (int i = 0; i < t->rows; i++) {
        fprintf(to, "%lld", (long long)t->row[i].x);
        if (t->map[0]) {
            fputc(',', to);
            write_field(to, t->row[i].place.label, true);
            fprintf(to, ",%.0f", t->row[i].bytes);
        }
        for (int k = 0; k < t->columns; k++) {
            const struct cell *c = &t->row[i].cell[k];
            if (c->state == CELL_MEASURED)
                fprintf(to, ",%.9g", c->value.median);
            else
                fprintf(to, ",%s", c->state == CELL_WRONG ? "wrong" : "");
        }
        fputc('\n', to);
    }
}

/* <directory>/<title>.csv. A title of a report that is resumed may be any text, so bytes other than
 * letters, digits and a few signs become %XX, as in a URL: the file stays in the directory, and
 * different titles have different names. False: too long. */
static bool name_file(char *path, size_t size, const char *directory, const char *title) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-+_=.,";
    int used = snprintf(path, size, "%s/%s", directory, title[0] ? "" : "%");
    for (const char *c = title; *c && used >= 0 && (size_t)used < size; c++) {
        const bool keep = strchr(plain, *c) && !(*c == '.' && c == title);
        used += snprintf(path + used, size - (size_t)used, keep ? "%c" : "%%%02X", (unsigned char)*c);
    }
    if (used >= 0 && (size_t)used < size)
        used += snprintf(path + used, size - (size_t)used, ".csv");
    errno = ENAMETOOLONG;
    return used >= 0 && (size_t)used < size;
}

bool csv_write(const struct report *r, const char *directory) {
    for (int i = 0; i < r->tables; i++) {
        char path[1024];
        struct output out;
        if (name_file(path, sizeof path, directory, r->table[i].title) && output_open(&out, path)) {
            write_table(&r->table[i], out.file);
            if (output_commit(&out))
                continue;
        }
        fprintf(stderr, "rafter: cannot write %s: %s\n", path, strerror(errno));
        return false;
    }
    return true;
}
