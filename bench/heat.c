/* SPDX-License-Identifier: Apache-2.0 */
/* A table of the map as a heat map: one column per power of two of the length; rows by size,
 * layout, option, dtype and gradient. A tile shows the worst score of its cells. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "map.h"
#include "names.h"
#include "page.h"

enum { BINS = 20, LINES = 64, LEFT = 190, TILE = 34, HEIGHT = 20, TOP = 8, GAP = 10, BOTTOM = 42 };

struct tile {
    int cells;
    double worst;
    const struct row *row; /* of the worst cell */
    const struct cell *cell;
};

struct line {
    char name[56];
    double key; /* lines of a group are sorted by it */
    int group;
    struct tile tile[BINS];
};

struct heat {
    int low, high; /* bins with cells */
    int lines;
    struct line line[LINES];
};

static int bin_of(int64_t length) {
    int bin = 0;
    while (bin < BINS - 1 && length >> (bin + 1) > 0)
        bin++;
    return bin;
}

/* ---- lines ----------------------------------------------------------------------------------- */

static double size_line(const struct row *row, const char **name) {
    static const struct {
        double below;
        const char *name;
    } classes[] = {{MAP_SMALLEST, "moves under 1 MB"}, {8 << 20, "moves 1 to 8 MB"},     {64 << 20, "moves 8 to 64 MB"},
                   {MAP_LARGE, "moves 64 to 256 MB"},  {0x1p30, "moves 256 MB to 1 GB"}, {0x1p32, "moves 1 to 4 GB"},
                   {INFINITY, "moves over 4 GB"}};
    int i = 0;
    while (row->bytes >= classes[i].below)
        i++;
    *name = classes[i].name;
    return i;
}

/* "last" before "middle" before "first", then by the inner size. */
static double layout_line(const struct row *row, const char **name) {
    *name = row->place.layout;
    const double dim = **name == 'l' ? 0 : **name == 'm' ? 1 : 2;
    const char *const inner = strstr(*name, "inner ");
    const double size = !inner ? (double)strlen(*name) : atof(inner + 6);
    return 1e9 * dim + (inner && size == 0 ? 1e8 : size);
}

static double option_line(const struct row *row, const char **name) {
    *name = row->place.option;
    return 0;
}

static double dtype_line(const struct row *row, const char **name) {
    *name = row->place.dtype;
    return 0;
}

static double gradient_line(const struct row *row, const char **name) {
    static const char *const names[] = {"gradient dense", "gradient expanded", "gradient transposed", "gradient none"};
    int i = 0; /* "none" is that of a mean loss */
    while (i < 3 && strcmp(names[i] + strlen("gradient "), row->place.gradient) != 0)
        i++;
    *name = names[i];
    return i;
}

static double (*const groups[])(const struct row *row, const char **name) = {size_line, layout_line, option_line,
                                                                             dtype_line, gradient_line};
enum { GROUPS = sizeof groups / sizeof *groups, GRADIENT_GROUP = GROUPS - 1 };

/* The line of this name in the group; lines with equal keys keep the order in which they came.
 * NULL: there are too many. */
static struct line *find_line(struct heat *h, int group, const char *name, double key) {
    for (int i = 0; i < h->lines; i++)
        if (h->line[i].group == group && strcmp(h->line[i].name, name) == 0)
            return &h->line[i];
    if (h->lines == LINES)
        return NULL;
    int at = h->lines++;
    for (; at > 0 && h->line[at - 1].group == group && h->line[at - 1].key > key; at--)
        h->line[at] = h->line[at - 1];
    h->line[at] = (struct line){.key = key, .group = group};
    snprintf(h->line[at].name, sizeof h->line[at].name, "%s", name);
    return &h->line[at];
}

static void add_cell(struct heat *h, int group, const struct row *row, const struct cell *c) {
    const char *name = "";
    const double key = groups[group](row, &name), score = map_score(row, c);
    struct line *const line = find_line(h, group, name, key);
    const int bin = bin_of(row->place.length);
    h->low = bin < h->low ? bin : h->low;
    h->high = bin > h->high ? bin : h->high;
    if (!line)
        return;
    struct tile *t = &line->tile[bin];
    if (t->cells++ == 0 || score < t->worst) {
        t->worst = score;
        t->row = row;
        t->cell = c;
    }
}

/* NULL: nothing was measured, or there is no memory. */
static struct heat *collect(const struct table *t) {
    struct heat *h = calloc(1, sizeof *h);
    if (!h)
        return NULL;
    h->low = BINS;
    h->high = -1;
    for (int group = 0; group < GROUPS; group++) /* a group's lines follow each other */
        for (int i = 0; i < t->rows; i++) {
            const struct cell *c = row_ours(t, &t->row[i]);
            const bool backward = strstr(t->title, "-bwd-") != NULL;
            if (c && (group != GRADIENT_GROUP || backward))
                add_cell(h, group, &t->row[i], c);
        }
    if (h->high >= 0)
        return h;
    free(h);
    return NULL;
}

/* ---- drawing --------------------------------------------------------------------------------- */

/* The colour class of a score: h0 at the floor, h4 far from it. */
static int grade(double score) {
    return score >= 0.9 ? 0 : score >= 0.7 ? 1 : score >= 0.5 ? 2 : score >= 0.3 ? 3 : 4;
}

static void write_facts(const struct row *row, const struct cell *c, FILE *to) {
    fprintf(to, "%.0f %% of the floor, %.1f us over it, %.1f MB, ", 100 * c->share, map_over(c), row->bytes / 1e6);
    write_escaped(to, c->variant);
    fputs(": ", to);
    write_escaped(to, row->place.label);
}

static void draw_tile(const struct tile *t, int group, int x, int y, FILE *to) {
    if (t->cells == 0)
        return;
    fprintf(to,
            "<g class=\"tile h%d\" data-group=\"%d\" data-cells=\"%d\"><title>%d cells, the worst: ", grade(t->worst),
            group, t->cells, t->cells);
    write_facts(t->row, t->cell, to);
    fprintf(to, "</title><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>", x, y, TILE - 2, HEIGHT - 2);
    fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.0f</text></g>\n", x + TILE / 2 - 1, y + 14,
            100 * fmin(t->worst, 9.99));
}

static void draw(const struct table *t, const struct heat *h, FILE *to) {
    const int bins = h->high - h->low + 1;
    const int width = LEFT + (bins > 8 ? bins : 8) * TILE + 10, bottom = TOP + h->lines * HEIGHT + GROUPS * GAP;
    fprintf(to, "<figure><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"Worst share of the floor in percent, by ",
            width, bottom + BOTTOM);
    write_escaped(to, t->map);
    fputs(" and by size, layout, option, dtype and gradient.\">\n", to);
    for (int i = 0; i < h->lines; i++) {
        const int y = TOP + i * HEIGHT + h->line[i].group * GAP;
        fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">", LEFT - 8, y + 14);
        write_escaped(to, h->line[i].name);
        fputs("</text>\n", to);
        for (int bin = h->low; bin <= h->high; bin++)
            draw_tile(&h->line[i].tile[bin], h->line[i].group, LEFT + (bin - h->low) * TILE, y, to);
    }
    for (int bin = h->low; bin <= h->high; bin++)
        fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d%s</text>\n",
                LEFT + (bin - h->low) * TILE + TILE / 2, bottom + 14, bin >= 10 ? 1 << (bin - 10) : 1 << bin,
                bin >= 10 ? "K" : "");
    fprintf(to, "<text x=\"%d\" y=\"%d\">", LEFT, bottom + 34);
    write_escaped(to, t->map);
    fputs(", from this power of two to the next</text>\n</svg></figure>\n", to);
    free((void *)h);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void write_entries(const struct map_entry *list, int count, const char *caption, FILE *to) {
    table_begin(to, caption);
    fprintf(
        to,
        "<caption><span>%s</span></caption><thead>"
        "<tr><th scope=\"col\">cell</th><th scope=\"col\">of the floor</th><th scope=\"col\">us over it</th>"
        "<th scope=\"col\">us</th><th scope=\"col\">MB</th><th scope=\"col\">variant</th><th scope=\"col\">best other"
        "</th></tr></thead><tbody>\n",
        caption);
    for (int i = 0; i < count; i++) {
        const struct map_entry *e = &list[i];
        const char *name = "";
        const struct cell *peer = row_best_peer(e->table, e->row, &name);
        char title[sizeof e->table->title];
        map_name(e->table, title, sizeof title);
        fputs("<tr><td class=\"l\">", to);
        write_link(to, e->table, title);
        fprintf(to, " %lld: ", (long long)e->row->x);
        write_escaped(to, e->row->place.label);
        fprintf(to, "</td><td>%.1f %%</td><td>%.1f</td><td>%.1f</td><td>%.1f</td><td>", 100 * e->cell->share,
                map_over(e->cell), 1e3 * e->cell->value.median, e->row->bytes / 1e6);
        write_escaped(to, e->cell->variant);
        fputs("</td><td>", to);
        write_escaped(to, peer ? column_name(name) : "–");
        if (peer)
            fprintf(to, " %.1f us", 1e3 * peer->value.median);
        fputs("</td></tr>\n", to);
    }
    table_end(to);
}

/* Every cell, those that were not measured too. */
static void write_cells(const struct table *t, FILE *to) {
    fprintf(to, "<details><summary>All %d cells</summary>", t->rows);
    table_begin(to, "All cells");
    fputs("<caption><span>All cells: microseconds, and percent of the floor</span></caption><thead><tr><th "
          "scope=\"col\">cell</th>"
          "<th scope=\"col\">MB</th>",
          to);
    for (int k = 0; k < t->columns; k++) {
        fputs("<th scope=\"col\">", to);
        write_escaped(to, t->column[k]);
        fputs(" us</th><th scope=\"col\">%</th>", to);
    }
    fputs("</tr></thead><tbody>\n", to);
    for (int i = 0; i < t->rows; i++) {
        const struct row *row = &t->row[i];
        fprintf(to, "<tr><td class=\"l\">%lld: ", (long long)row->x);
        write_escaped(to, row->place.label);
        fprintf(to, "</td><td>%.1f</td>", row->bytes / 1e6);
        for (int k = 0; k < t->columns; k++)
            if (row->cell[k].state == CELL_MEASURED)
                fprintf(to, "<td>%.1f</td><td>%.0f</td>", 1e3 * row->cell[k].value.median, 100 * row->cell[k].share);
            else
                fputs(row->cell[k].state == CELL_WRONG ? "<td class=\"bad\">wrong</td><td></td>"
                                                       : "<td>–</td><td></td>",
                      to);
        fputs("</tr>\n", to);
    }
    table_end(to);
    fputs("</details>\n", to);
}

void heat_write(const struct report *r, const struct table *t, FILE *to) {
    struct map_entry worst[MAP_WORST];
    struct heat *const h = collect(t);
    if (h)
        draw(t, h, to);
    const int count = map_worst(r, t, worst);
    if (count > 0)
        write_entries(worst, count, "The worst cells", to);
    if (t->rows > 0)
        write_cells(t, to);
}

void heat_write_worst(const struct report *r, FILE *to) {
    struct map_entry worst[MAP_WORST];
    int count = map_worst(r, NULL, worst), behind = 0;
    if (count == 0)
        return;
    fputs("<section aria-labelledby=\"worst\"><h2 id=\"worst\">The map</h2>\n<p>The floor of a call is the least bytes "
          "it must move, over the copy rate of this run. ",
          to);
    map_explain(to);
    fputs(" A tile of a heat map has the lowest such share of its cells, in percent.</p>\n", to);
    write_entries(worst, count, "The worst twenty cells of all maps", to);
    count = map_behind(r, NULL, worst, &behind);
    if (count > 0) {
        fprintf(to, "<p>In %d cells another library is more than 3 %% faster.</p>\n", behind);
        write_entries(worst, count, "The cells furthest behind another library", to);
    }
    fputs("</section>\n", to);
}
