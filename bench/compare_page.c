/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter compare --html`: two runs side by side. */
#include <math.h>
#include <string.h>

#include "compare.h"
#include "map.h"
#include "names.h"
#include "page.h"
#include "plot.h"

enum { LISTED = 50 }; /* changes in the first table of the page */

static const char *word(enum metric metric, enum change change) {
    switch (change) {
    case CHANGE_WORSE: return metric == METRIC_SPEED ? "slower" : "more";
    case CHANGE_BETTER: return metric == METRIC_SPEED ? "faster" : "less";
    case CHANGE_LOST: return "not measured now";
    case CHANGE_WRONG: return "wrong now";
    default: return "";
    }
}

static const char *colour(enum change change) {
    return change == CHANGE_BETTER                            ? " class=\"good\""
           : change == CHANGE_WORSE || change == CHANGE_WRONG ? " class=\"bad\""
                                                              : "";
}

/* Before, now, and the change, as three cells. */
static void write_cells(enum metric metric, const struct cell *old, const struct cell *new, FILE *to) {
    const struct comparison c = compare_cells(metric, old, new);
    const struct cell *const both[] = {old, new};
    for (int i = 0; i < 2; i++) {
        fputs("<td>", to);
        if (both[i]->state == CELL_MEASURED)
            write_number(to, both[i]->value.median);
        else
            fputs(both[i]->state == CELL_WRONG ? "wrong" : "–", to);
        fputs("</td>", to);
    }
    fprintf(to, "<td%s>", colour(c.change));
    if (c.ratio > 0)
        fprintf(to, "%+.1f %%", 100 * (c.ratio - 1));
    if (metric == METRIC_SPEED && c.ratio > 0)
        fprintf(to, "<small>%+.1f to %+.1f</small>", 100 * (c.low - 1), 100 * (c.high - 1));
    if (word(metric, c.change)[0])
        fprintf(to, "<small>%s</small>", word(metric, c.change));
    fputs("</td>", to);
}

static void write_table(const struct table *old, const struct table *new, FILE *to) {
    table_begin(to, table_name(new).text);
    fprintf(to,
            "<caption><span>%s, before and now; the change, and the 99 %% confidence interval of "
            "it</span></caption><thead><tr><th "
            "scope=\"col\">",
            new->metric == METRIC_SPEED ? "Milliseconds" : "MiB beyond the inputs");
    write_escaped(to, new->x_name);
    fputs("</th>", to);
    for (int k = 0; k < new->columns; k++) {
        fputs("<th scope=\"col\">", to);
        write_escaped(to, new->column[k]);
        fputs("<small>before</small></th><th scope=\"col\"><small>now</small></th><th "
              "scope=\"col\"><small>change</small></th>",
              to);
    }
    fputs("</tr></thead><tbody>\n", to);
    for (int i = 0; i < new->rows; i++) {
        const struct row *const row = &new->row[i], *const before = compare_row(old, row);
        if (!before)
            continue;
        fprintf(to, "<tr><th scope=\"row\">%lld</th>", (long long)row->x);
        for (int k = 0; k < new->columns; k++) {
            static const struct cell none = {.state = CELL_EMPTY};
            const struct cell *const cell = compare_cell(old, before, new->column[k]);
            write_cells(new->metric, cell ? cell : &none, &row->cell[k], to);
        }
        fputs("</tr>\n", to);
    }
    table_end(to);
}

/* ---- the changes of Rafter ------------------------------------------------------------------- */

struct entry {
    const struct table *table;
    const struct row *row;
    const struct cell *old, *new;
    double size; /* of the change: |log ratio|; INFINITY: lost or wrong */
};

/* Keeps the largest changes, in order. */
static int insert(struct entry list[LISTED], int count, struct entry e) {
    if (count == LISTED && e.size <= list[count - 1].size)
        return count;
    int at = count < LISTED ? count : LISTED - 1;
    for (; at > 0 && list[at - 1].size < e.size; at--)
        list[at] = list[at - 1];
    list[at] = e;
    return count < LISTED ? count + 1 : count;
}

static void write_changes(const struct report *old, const struct report *new, FILE *to) {
    struct entry list[LISTED];
    int count = 0, all = 0;
    for (int i = 0; i < new->tables; i++) {
        const struct table *const t = &new->table[i], *const before = report_find_table(old, t->title);
        for (int k = 0; k < t->rows && before; k++) {
            const struct row *const row = compare_row(before, &t->row[k]);
            const struct cell *const was = row ? compare_cell(before, row, "rafter") : NULL, *const is = compare_cell(
                                                                                                 t, &t->row[k],
                                                                                                 "rafter");
            if (!was || !is)
                continue;
            const struct comparison c = compare_cells(t->metric, was, is);
            if (c.change == CHANGE_UNKNOWN || c.change == CHANGE_NONE)
                continue;
            const double size = c.ratio > 0 ? fabs(log(c.ratio)) : INFINITY;
            count = insert(list, count, (struct entry){t, &t->row[k], was, is, size});
            all++;
        }
    }
    fputs("<section aria-labelledby=\"changes\"><h2 id=\"changes\">What changed in Rafter</h2>\n", to);
    if (count == 0)
        fputs("<p>Nothing changed beyond noise.</p></section>\n", to);
    if (count == 0)
        return;
    table_begin(to, "What changed in Rafter");
    fprintf(to,
            "<caption><span>The %d largest of %d changes beyond noise</span></caption><thead><tr><th "
            "scope=\"col\">table</th><th "
            "scope=\"col\">row</th><th scope=\"col\">before</th><th scope=\"col\">now</th><th "
            "scope=\"col\">change</th></tr>"
            "</thead><tbody>\n",
            count, all);
    for (int i = 0; i < count; i++) {
        const struct entry *const e = &list[i];
        fputs("<tr><td class=\"l\">", to);
        write_link(to, e->table, table_name(e->table).text);
        fputs(e->table->metric == METRIC_MEMORY ? ": memory</td><td>" : "</td><td>", to);
        write_escaped(to, e->table->x_name);
        fprintf(to, " = %lld</td>", (long long)e->row->x);
        write_cells(e->table->metric, e->old, e->new, to);
        fputs("</tr>\n", to);
    }
    table_end(to);
    fputs("</section>\n", to);
}

static void write_run(const char *name, const struct report *r, FILE *to) {
    fprintf(to, "<dt>%s</dt><dd>", name);
    write_escaped(to, r->date);
    fputs(", Rafter ", to);
    write_escaped(to, r->version);
    fputs(", ", to);
    write_escaped(to, r->gpu[0] ? r->gpu : r->cpu);
    fprintf(to, ", %d threads</dd>\n", r->threads);
}

void compare_page(const struct report *old, const struct report *new, FILE *to) {
    page_begin(to, "Rafter, two runs compared");
    fputs("<dl>\n", to);
    write_run("before", old, to);
    write_run("now", new, to);
    fputs("</dl>\n", to);
    unrest_write(old, "Before", to);
    unrest_write(new, "Now", to);
    fputs("</header>\n<main>\n", to);
    write_changes(old, new, to);
    for (int i = 0; i < new->tables; i++) {
        const struct table *const t = &new->table[i], *const before = report_find_table(old, t->title);
        if (!before || t->rows == 0)
            continue;
        section_begin(to, t);
        if (!t->map[0]) { /* a map has no lines */
            plot_write_pair(before, t, to);
            write_table(before, t, to);
        }
        section_end(to);
    }
    page_end(to);
}
