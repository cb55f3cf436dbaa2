/* SPDX-License-Identifier: Apache-2.0 */
/* The report as one self-contained HTML file. */
#include <math.h>
#include <string.h>

#include "map.h"
#include "names.h"
#include "page.h"
#include "plot.h"
#include "verbs.h"

/* In MiB: a smaller difference of memory counts as none. */
static const double same_memory = 1;

/* ---- summary --------------------------------------------------------------------------------- */

static int column_of(const struct row *row, const struct cell *cell) {
    return (int)(cell - row->cell);
}

/* What tables compare: milliseconds, or MiB of workspace. */
static double figure(const struct table *t, const struct row *row, const struct cell *cell) {
    return t->metric == METRIC_MEMORY ? cell_workspace(t, row, column_of(row, cell)) : cell->value.median;
}

static void write_figure(const struct table *t, const struct row *row, const struct cell *cell, FILE *to) {
    write_number(to, figure(t, row, cell));
    fprintf(to, " %s", metric_units[t->metric]);
    if (t->metric == METRIC_MEMORY && t->over[column_of(row, cell)])
        fputs(", in place", to);
}

static void write_speed_verdict(double ours, double theirs, FILE *to) {
    const double ratio = fmax(theirs / ours, ours / theirs);
    const char *const good = theirs > ours ? "good" : "bad", *const word = theirs > ours ? "faster" : "slower";
    if (ratio < 1.005)
        fputs("<td>equal</td>", to);
    else
        fprintf(to, "<td class=\"%s\">%.*f× %s</td>", good, ratio < 10 ? 2 : 0, ratio, word);
}

static void write_memory_verdict(double ours, double theirs, FILE *to) {
    const double less = theirs - ours;
    if (fabs(less) < same_memory)
        fputs("<td>same</td>", to);
    else
        fprintf(to, "<td class=\"%s\">%.*f MiB %s</td>", less > 0 ? "good" : "bad", fabs(less) < 10 ? 1 : 0, fabs(less),
                less > 0 ? "less" : "more");
}

static void write_verdict(const struct table *t, const struct row *row, const struct cell *ours,
                          const struct cell *peer, FILE *to) {
    if (!ours || !peer || (t->metric == METRIC_SPEED && !(ours->value.median > 0)))
        fputs("<td>–</td>", to);
    else if (t->metric == METRIC_MEMORY)
        write_memory_verdict(figure(t, row, ours), figure(t, row, peer), to);
    else
        write_speed_verdict(ours->value.median, peer->value.median, to);
}

static void write_summary_row(const struct table *t, FILE *to) {
    const struct row *row = &t->row[t->rows - 1];
    const char *column = "";
    const struct cell *ours = row_ours(t, row), *peer = row_best_peer(t, row, &column);
    const struct table_name name = table_name(t);
    fputs("<tr data-op=\"", to);
    write_escaped(to, name.op);
    fprintf(to, "\" data-mode=\"%s\" data-metric=\"%s\"><td class=\"l\">", name.mode, metric_names[t->metric]);
    write_link(to, t, name.text);
    fputs(t->metric == METRIC_MEMORY ? ": memory</td><td>" : "</td><td>", to);
    write_escaped(to, t->x_name);
    fprintf(to, " = %lld</td><td>", (long long)row->x);
    if (ours)
        write_figure(t, row, ours, to);
    else
        fputs("–", to);
    fputs("</td><td>", to);
    if (peer) {
        write_escaped(to, column_name(column));
        fputc(' ', to);
        write_figure(t, row, peer, to);
    } else {
        fputs("–", to);
    }
    fputs("</td>", to);
    write_verdict(t, row, ours, peer, to);
    if (ours && ours->share > 0)
        fprintf(to, "<td>%.0f %%</td></tr>\n", 100 * ours->share);
    else
        fputs("<td>–</td></tr>\n", to);
}

static void write_summary(const struct report *r, FILE *to) {
    fputs("<section aria-labelledby=\"summary\"><h2 id=\"summary\">Summary</h2>\n", to);
    table_begin(to, "Summary table");
    fputs(
        "<caption><span>Each table at its largest row: Rafter against the best of the others, and its share of the "
        "floor "
        "(the "
        "time that the bytes or flops take at the rates measured in the same run). Memory is workspace, beyond inputs "
        "and gradients; a difference of less than 1 MiB is \"same\".</span></caption><thead><tr><th "
        "scope=\"col\">table</th><th "
        "scope=\"col\">row</th><th scope=\"col\">Rafter</th><th scope=\"col\">best other</th><th "
        "scope=\"col\">Rafter is</th><th scope=\"col\">of the floor</th></tr></thead><tbody>\n",
        to);
    for (int i = 0; i < r->tables; i++)
        if (r->table[i].rows > 0 && !r->table[i].map[0])
            write_summary_row(&r->table[i], to);
    table_end(to);
    fputs("</section>\n", to);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void write_heading(const struct table *t, FILE *to) {
    fputs("<thead><tr><th scope=\"col\">", to);
    write_escaped(to, t->x_name);
    fputs("</th>", to);
    for (int k = 0; k < t->columns; k++) {
        const char *const name = column_name(t->column[k]);
        fputs("<th scope=\"col\"><a href=\"#column-", to);
        write_escaped(to, t->column[k]);
        fputs("\">", to);
        write_escaped(to, t->column[k]);
        fputs(t->early[k] ? "*</a>" : "</a>", to);
        if (strcmp(name, t->column[k]) != 0) {
            fputs("<small>", to);
            write_escaped(to, name);
            fputs("</small>", to);
        }
        fputs("</th>", to);
    }
    fputs(t->metric == METRIC_MEMORY ? "<th scope=\"col\">gradients</th></tr></thead>" : "</tr></thead>", to);
}

/* The extra figures, below the main one. */
static void write_extras(const struct table *t, const struct cell *c, FILE *to) {
    static const char *const before[] = {"", "error ", "host ", "first "}, *const after[] = {" %", "", " us", " ms"};
    for (int e = 0; e < EXTRAS; e++) {
        const char *const text = t->extras >> e & 1 ? extra_text(c, (enum extra)e) : "";
        if (text[0])
            fprintf(to, "<small>%s%s%s</small>", before[e], text, after[e]);
    }
}

static void write_cell(const struct table *t, const struct row *row, int column, double best, FILE *to) {
    const struct cell *const c = &row->cell[column];
    if (c->state != CELL_MEASURED) {
        fputs(c->state == CELL_WRONG ? "<td class=\"bad\">wrong</td>" : "<td>–</td>", to);
        return;
    }
    fputs(figure(t, row, c) <= best ? "<td class=\"best\">" : "<td>", to);
    write_number(to, figure(t, row, c));
    if (t->metric == METRIC_MEMORY) {
        fputs("<small>", to);
        write_number(to, c->value.median);
        fputs(t->over[column] ? " in all, in place</small>" : " in all</small>", to);
    }
    write_extras(t, c, to);
    fputs("</td>", to);
}

static void write_notes(const struct table *t, FILE *to) {
    if (t->notes > 0)
        fputs("<ul class=\"notes\">\n", to);
    for (int i = 0; i < t->notes; i++) {
        fputs("<li>", to);
        write_escaped(to, t->note[i]);
        fputs("</li>\n", to);
    }
    if (t->notes > 0)
        fputs("</ul>\n", to);
}

static void write_table(const struct table *t, FILE *to) {
    table_begin(to, table_name(t).text);
    if (t->metric == METRIC_SPEED)
        fputs("<caption><span>Milliseconds, median of the repeats</span></caption>", to);
    else
        fputs("<caption><span>MiB at the peak of the call, beyond its inputs and gradients; below, with "
              "gradients</span></caption>",
              to);
    write_heading(t, to);
    fputs("<tbody>\n", to);
    for (int i = 0; i < t->rows; i++) {
        const struct row *row = &t->row[i];
        double best = INFINITY;
        for (int k = 0; k < t->columns; k++)
            if (row->cell[k].state == CELL_MEASURED)
                best = fmin(best, figure(t, row, &row->cell[k]));
        fprintf(to, "<tr><th scope=\"row\">%lld</th>", (long long)row->x);
        for (int k = 0; k < t->columns; k++)
            write_cell(t, row, k, best, to);
        if (t->metric == METRIC_MEMORY) {
            fputs("<td>", to);
            write_number(to, row->gradient_bytes / (1 << 20));
            fputs("</td>", to);
        }
        fputs("</tr>\n", to);
    }
    table_end(to);
    write_notes(t, to);
}

/* ---- the columns ----------------------------------------------------------------------------- */

static bool has_column(const struct table *t, const char *column) {
    for (int k = 0; k < t->columns; k++)
        if (strcmp(t->column[k], column) == 0)
            return true;
    return false;
}

/* An entry for the column, unless a table before this one has it too. */
static void explain_column(const struct report *r, int table, int column, FILE *to) {
    const struct table *const t = &r->table[table];
    const char *const name = t->column[column], *const meaning = column_meaning(name);
    for (int i = 0; i < table; i++)
        if (has_column(&r->table[i], name))
            return;
    fputs("<dt id=\"column-", to);
    write_escaped(to, name);
    fputs("\">", to);
    write_escaped(to, name);
    fputs("</dt><dd>", to);
    if (meaning)
        write_escaped(to, meaning);
    else
        fputs(t->ours[column] ? "Rafter, forced to the kernel variant of this name" : "another library", to);
    fputs("</dd>\n", to);
}

static void write_columns(const struct report *r, FILE *to) {
    unsigned extras = 0;
    fputs("<section aria-labelledby=\"columns\"><h2 id=\"columns\">What the columns are</h2>\n<dl>\n", to);
    for (int i = 0; i < r->tables; i++) {
        extras |= r->table[i].extras;
        for (int k = 0; k < r->table[i].columns; k++)
            explain_column(r, i, k, to);
    }
    for (int e = 0; e < EXTRAS; e++)
        if (extras >> e & 1)
            fprintf(to, "<dt>%s</dt><dd>%s</dd>\n", extra_names[e], extra_meanings[e]);
    fputs("<dt>*</dt><dd>its forward also computes the gradient: compare forward and backward together</dd>\n"
          "<dt>in place</dt><dd>its gradient overwrites its input, so it takes no memory for gradients</dd>\n"
          "<dt>gradients</dt><dd>MiB of the gradients that the call returns</dd>\n"
          "<dt>–</dt><dd>it did not run; the reason is below the table</dd>\n"
          "<dt>wrong</dt><dd>its result differs from the fp64 oracle's by more than rounding "
          "explains</dd>\n</dl></section>\n",
          to);
}

/* ---- the machine ----------------------------------------------------------------------------- */

static void write_fact(FILE *to, const char *name, const char *value) {
    if (!value[0])
        return;
    fprintf(to, "<dt>%s</dt><dd>", name);
    write_escaped(to, value);
    fputs("</dd>\n", to);
}

static void write_gpu_state(FILE *to, const char *name, struct gpu_state s) {
    if (s.clock_mhz > 0)
        fprintf(to, "<dt>%s</dt><dd>%d MHz, memory %d MHz, %d °C, %d W</dd>\n", name, s.clock_mhz, s.memory_clock_mhz,
                s.temperature, s.watts);
}

static void write_machine(const struct report *r, FILE *to) {
    fputs("<section aria-labelledby=\"machine\"><h2 id=\"machine\">Machine and command</h2>\n<dl>\n", to);
    write_fact(to, "CPU", r->cpu);
    fprintf(to, "<dt>threads</dt><dd>%d</dd>\n", r->threads);
    write_fact(to, "GPU", r->gpu);
    write_gpu_state(to, "GPU before", r->before);
    write_gpu_state(to, "GPU after", r->after);
    write_fact(to, "Rafter", r->version);
    write_fact(to, "PyTorch", r->torch);
    if (r->copy > 0)
        fprintf(to, "<dt>copy rate</dt><dd>%.1f GB/s</dd>\n", r->copy / 1e9);
    if (r->matrix > 0)
        fprintf(to, "<dt>matrix rate</dt><dd>%.1f GFLOP/s</dd>\n", r->matrix / 1e9);
    fprintf(to, "<dt>the run took</dt><dd>%.0f s%s</dd>\n</dl>\n<pre tabindex=\"0\" aria-label=\"command\"><code>",
            r->seconds, r->interrupted ? ", and was interrupted" : "");
    for (char **word = r->command; word && *word; word++) {
        fputs(word == r->command ? "" : " ", to);
        write_escaped(to, *word);
    }
    fputs("</code></pre></section>\n", to);
}

static int tables_of_maps(const struct report *r) {
    int count = 0;
    for (int i = 0; i < r->tables; i++)
        count += r->table[i].map[0] != '\0';
    return count;
}

void html_write(const struct report *r, FILE *to) {
    const bool only_maps = r->tables == tables_of_maps(r);
    char title[300];
    snprintf(title, sizeof title, "Rafter on %s", r->gpu[0] ? r->gpu : r->cpu);
    page_begin(to, title);
    fputs("<p>", to);
    write_escaped(to, r->date);
    fputs(", Rafter ", to);
    write_escaped(to, r->version);
    fputs(". Every column of a table was measured in the same run, in turn, on the same data; every "
          "result was compared with an fp64 oracle first, but for the map's larger cells. Bold: the best of the "
          "row.</p>\n",
          to);
    unrest_write(r, "This run", to);
    fputs("</header>\n<main>\n", to);
    contents_write(r, to);
    if (!only_maps)
        write_summary(r, to);
    heat_write_worst(r, to);
    for (int i = 0; i < r->tables; i++) {
        const struct table *t = &r->table[i];
        section_begin(to, t);
        if (t->map[0]) {
            heat_write(r, t, to);
            write_notes(t, to);
        } else {
            plot_write(t, to);
            if (t->rows > 0)
                write_table(t, to);
        }
        section_end(to);
    }
    write_columns(r, to);
    write_machine(r, to);
    page_end(to);
}

int verb_page(int argc, char **argv) {
    return report_print(argc, argv, "page wants one report: rafter page REPORT.json > REPORT.html", html_write);
}
