/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "report.h"

static void write_table(const struct table *t, FILE *to) {
    fputs(t->x_name, to);
    fputs(t->map[0] ? ",label,bytes" : "", to);
    for (int k = 0; k < t->columns; k++)
        fprintf(to, ",%s", t->column[k]);
    fputc('\n', to);
    for (int i = 0; i < t->rows; i++) {
        fprintf(to, "%lld", (long long)t->row[i].x);
        if (t->map[0])
            fprintf(to, ",\"%s\",%.0f", t->row[i].place.label, t->row[i].bytes);
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

bool csv_write(const struct report *r, const char *directory) {
    for (int i = 0; i < r->tables; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s.csv", directory, r->table[i].title);
        struct output out;
        if (output_open(&out, path)) {
            write_table(&r->table[i], out.file);
            if (output_commit(&out))
                continue;
        }
        fprintf(stderr, "rafter: cannot write %s: %s\n", path, strerror(errno));
        return false;
    }
    return true;
}
