/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter headline REPORT.json`: the largest row of every table as Markdown, with forward and
 * backward side by side. */
#include <string.h>

#include "report.h"
#include "verbs.h"

/* "0.265 (98 %) | pt 0.391" */
static void write_half(const struct table *t, const struct row *row, FILE *to) {
    const char *name = "";
    const struct cell *ours = row ? row_ours(t, row) : NULL, *peer = row ? row_best_peer(t, row, &name) : NULL;
    if (ours && ours->share > 0)
        fprintf(to, " **%.3g** (%.0f %%) |", ours->value.median, 100 * ours->share);
    else if (ours)
        fprintf(to, " **%.3g** |", ours->value.median);
    else
        fprintf(to, " |");
    if (peer)
        fprintf(to, " %.3g `%s` |", peer->value.median, name);
    else
        fprintf(to, " |");
}

/* The table of the same op and options in another mode; NULL if there is none. */
static const struct table *in_mode(const struct report *r, const struct table *t, const char *mode) {
    const char *rest = strstr(t->title, "-speed-") + strlen("-speed-");
    char title[sizeof t->title];
    snprintf(title, sizeof title, "%.*s%s%s", (int)(rest - t->title), t->title, mode, strchr(rest, '-'));
    return report_find_table(r, title);
}

/* The largest row that both tables have; if there is none, the largest row of t. */
static const struct row *largest_row(const struct table *t, const struct table *other) {
    for (int i = t->rows - 1; i >= 0 && other; i--)
        if (table_find_row(other, t->row[i].x))
            return &t->row[i];
    return &t->row[t->rows - 1];
}

static void write_rows(const struct report *r, FILE *to) {
    fprintf(to, "| table, largest row | forward, ms | best peer | backward, ms | best peer |\n|---|---|---|---|---|\n");
    for (int i = 0; i < r->tables; i++) {
        const struct table *t = &r->table[i];
        const bool forward = strstr(t->title, "-speed-fwd-") != NULL,
                   alone = strstr(t->title, "-speed-fwd+bwd-") && !in_mode(r, t, "fwd");
        if (t->rows == 0 || !(forward || alone) || (strncmp(t->title, "act-", 4) == 0 && strstr(t->title, "act_none")))
            continue;
        const struct table *backward = forward ? in_mode(r, t, "bwd") : NULL;
        const struct row *row = largest_row(t, backward);
        const char *rest = strchr(strstr(t->title, "-speed-") + strlen("-speed-"), '-');
        fprintf(to, "| %.*s%s, %s = %lld |", (int)strcspn(t->title, "-"), t->title, rest, t->x_name, (long long)row->x);
        write_half(t, row, to);
        if (forward)
            write_half(backward, backward ? table_find_row(backward, row->x) : NULL, to);
        else
            fprintf(to, " (forward and backward) | |");
        fputc('\n', to);
    }
}

static void headline_write(const struct report *r, FILE *to) {
    fprintf(to, "On %s (%s%s%s), in brackets the share of the floor measured in the same run:\n\n",
            r->gpu[0] ? r->gpu : r->cpu, r->date, r->torch[0] ? ", PyTorch " : "", r->torch);
    write_rows(r, to);
}

int verb_headline(int argc, char **argv) {
    return report_print(argc, argv, "headline wants one report: rafter headline REPORT.json", headline_write);
}
