/* SPDX-License-Identifier: Apache-2.0 */
/* The map as text: a summary of each table, and the worst cells by name. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "map.h"

enum { NOTES_SHOWN = 20 }; /* of a table; the files have all */

static const double behind_margin = 1.03, variant_margin = 1.05;

double map_over(const struct cell *c) {
    return 1e3 * c->value.median * (1 - c->share);
}

double map_score(const struct row *row, const struct cell *c) {
    if (row->bytes >= MAP_LARGE)
        return c->share;
    const double time = 1e3 * c->value.median, floor = time * c->share;
    return floor / fmax(floor, time - MAP_ALLOWANCE_US);
}

/* Keeps the list sorted by score, and at most MAP_WORST long. */
static int insert(struct map_entry list[MAP_WORST], int count, struct map_entry entry) {
    if (count == MAP_WORST && entry.score >= list[count - 1].score)
        return count;
    int at = count < MAP_WORST ? count : MAP_WORST - 1;
    for (; at > 0 && list[at - 1].score > entry.score; at--)
        list[at] = list[at - 1];
    list[at] = entry;
    return count < MAP_WORST ? count + 1 : count;
}

int map_worst(const struct report *r, const struct table *only, struct map_entry worst[MAP_WORST]) {
    int count = 0;
    for (int i = 0; i < r->tables; i++) {
        const struct table *t = &r->table[i];
        for (int k = 0; k < t->rows && t->map[0] && (!only || only == t); k++) {
            const struct cell *c = row_ours(t, &t->row[k]);
            if (c && t->row[k].bytes >= MAP_SMALLEST)
                count = insert(worst, count, (struct map_entry){t, &t->row[k], c, map_score(&t->row[k], c)});
        }
    }
    return count;
}

/* A function that finds what a row's cell of Rafter's own choice is compared with, and its name; NULL: nothing. */
typedef const struct cell *rival_of(const struct table *t, const struct row *row, const char **name);

/* The fastest of the variants that were not chosen. A variant's column has the variant's name. */
static const struct cell *best_other_variant(const struct table *t, const struct row *row, const char **name) {
    const struct cell *const ours = row_ours(t, row), *best = NULL;
    for (int c = 0; c < t->columns && ours; c++) {
        const struct cell *const cell = &row->cell[c];
        const bool other = strcmp(t->column[c], cell->variant) == 0 && strcmp(cell->variant, ours->variant) != 0;
        if (!t->ours[c] || !other || cell->state != CELL_MEASURED)
            continue;
        if (best && best->value.median <= cell->value.median)
            continue;
        best = cell;
        *name = t->column[c];
    }
    return best;
}

/* The cells whose rival is faster by more than the margin, furthest first. */
static int list_behind(const struct report *r, const struct table *only, rival_of *rival, double margin,
                       struct map_entry worst[MAP_WORST], int *count) {
    int listed = 0;
    *count = 0;
    for (int i = 0; i < r->tables; i++) {
        const struct table *t = &r->table[i];
        for (int k = 0; k < t->rows && t->map[0] && (!only || only == t); k++) {
            const char *name = "";
            const struct cell *c = row_ours(t, &t->row[k]), *other = rival(t, &t->row[k], &name);
            if (!c || !other || t->row[k].bytes < MAP_SMALLEST || c->value.median <= margin * other->value.median)
                continue;
            const double score = other->value.median / c->value.median;
            listed = insert(worst, listed, (struct map_entry){t, &t->row[k], c, score});
            ++*count;
        }
    }
    return listed;
}

int map_behind(const struct report *r, const struct table *only, struct map_entry worst[MAP_WORST], int *count) {
    return list_behind(r, only, row_best_peer, behind_margin, worst, count);
}

/* ---- text ------------------------------------------------------------------------------------ */

void map_name(const struct table *t, char *text, size_t size) {
    const char *const speed = strstr(t->title, "-speed-"), *const mode = speed ? speed + 7 : t->title;
    snprintf(text, size, "%.*s %.*s", speed ? (int)(speed - t->title) : 0, t->title, (int)strcspn(mode, "-"), mode);
}

static void print_entry(const struct map_entry *e, FILE *to) {
    char name[sizeof e->table->title];
    map_name(e->table, name, sizeof name);
    fprintf(to, "%6.1f %%  %9.1f  %9.1f  %8.1f  %-28s %s %s\n", 100 * e->cell->share, map_over(e->cell),
            1e3 * e->cell->value.median, e->row->bytes / 1e6, e->cell->variant, name, e->row->place.label);
}

static const char heading[] = "   share    us over         us        MB  variant                      cell\n";

void map_print_summary(const struct table *t, FILE *to) {
    const struct report alone = {.tables = 1, .table = (struct table *)t};
    struct map_entry worst[MAP_WORST];
    struct samples scores = {0};
    int measured = 0, good = 0, wrong = 0, small = 0;
    for (int i = 0; i < t->rows; i++) {
        const struct row *row = &t->row[i];
        const struct cell *c = row_ours(t, row);
        for (int k = 0; k < t->columns; k++)
            wrong += row->cell[k].state == CELL_WRONG;
        measured += c != NULL;
        if (!c)
            continue;
        small += row->bytes < MAP_SMALLEST;
        if (row->bytes >= MAP_SMALLEST && samples_add(&scores, map_score(row, c)))
            good += map_score(row, c) >= 0.9;
    }
    fprintf(to, "%s: %d cells, %d measured, %d wrong, %d of under 1 MB and not judged\n", t->title, t->rows, measured,
            wrong, small);
    if (scores.count > 0) {
        const struct summary s = samples_summary(&scores);
        fprintf(to, "  of the %d judged: %d at 90 %% of the floor or more; median %.0f %%, worst tenth under %.0f %%\n",
                scores.count, good, 100 * s.median, 100 * s.p10);
    }
    int behind = 0;
    if (map_behind(&alone, NULL, worst, &behind) > 0)
        fprintf(to, "  %d are more than 3 %% behind the best other library\n", behind);
    samples_free(&scores);
    for (int i = 0; i < t->notes && i < NOTES_SHOWN; i++)
        fprintf(to, "  %s\n", t->note[i]);
    if (t->notes > NOTES_SHOWN)
        fprintf(to, "  and %d more notes: --json and --html have them\n", t->notes - NOTES_SHOWN);
    const int count = map_worst(&alone, NULL, worst);
    fputs(count > 0 ? heading : "", to);
    for (int i = 0; i < count; i++)
        print_entry(&worst[i], to);
    fputc('\n', to);
}

void map_explain(FILE *to) {
    fprintf(
        to,
        "Calls that move %d MB or more are judged by their share of the floor. Smaller ones may take %.0f us longer "
        "than the floor before they lose; those of under 1 MB are shown and not judged. Results of cells whose "
        "tensors take up to %d MB were compared with the fp64 oracle, about %d elements of each; larger cells and "
        "other libraries were timed without a check.",
        MAP_LARGE >> 20, MAP_ALLOWANCE_US, MAP_CHECKED >> 20, MAP_CHECKED_ELEMENTS);
}

/* The cells furthest behind their rivals. `whom`: what these are. */
static void print_behind(const struct report *r, rival_of *rival, double margin, const char *whom, FILE *to) {
    struct map_entry worst[MAP_WORST];
    int behind = 0;
    const int count = list_behind(r, NULL, rival, margin, worst, &behind);
    if (count > 0)
        fprintf(to, "\nThe %d cells furthest behind another %s, of %d\n%8s  %-30s%s", count, whom, behind, "times",
                "slower than", heading);
    for (int i = 0; i < count; i++) {
        const char *name = "";
        rival(worst[i].table, worst[i].row, &name);
        fprintf(to, "%8.2f  %-30s", 1 / worst[i].score, name);
        print_entry(&worst[i], to);
    }
}

void map_print_worst(const struct report *r, FILE *to) {
    struct map_entry worst[MAP_WORST];
    const int count = map_worst(r, NULL, worst);
    map_explain(to);
    fprintf(to, "\n\nThe worst %d cells of all maps\n%s", count, heading);
    for (int i = 0; i < count; i++)
        print_entry(&worst[i], to);
    print_behind(r, row_best_peer, behind_margin, "library", to);
    print_behind(r, best_other_variant, variant_margin, "variant", to);
}
