/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter compare OLD.json NEW.json`: which cells got slower beyond noise. */
#include "compare.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "verbs.h"

enum { RESAMPLES = 2000, LEAST_SAMPLES = 5 };

/* A cell is slower, or larger, if the whole interval is beyond `margin`; with too few samples for
 * an interval, if the ratio is beyond `lone_margin`. */
static const double margin = 1.02, lone_margin = 1.10;

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static double median_of_resample(const struct samples *from, struct samples *resample, uint64_t *state) {
    resample->count = 0;
    for (int i = 0; i < from->count; i++)
        samples_add(resample, from->value[next_random(state) % (uint64_t)from->count]);
    return samples_summary(resample).median;
}

/* The 99 % confidence interval of the ratio of medians, by resampling both. */
static struct comparison bootstrap(const struct cell *old, const struct cell *new) {
    struct comparison i = {CHANGE_NONE, 0, new->value.median / old->value.median, INFINITY};
    if (old->samples.count < LEAST_SAMPLES || new->samples.count < LEAST_SAMPLES) {
        i.low = i.ratio * margin / lone_margin;
        i.high = i.ratio * lone_margin / margin;
        return i;
    }
    struct samples a = {0}, b = {0}, ratios = {0};
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int k = 0; k < RESAMPLES; k++)
        samples_add(&ratios,
                    median_of_resample(&new->samples, &b, &state) / median_of_resample(&old->samples, &a, &state));
    samples_summary(&ratios); /* sorts */
    i.low = ratios.value[RESAMPLES / 200];
    i.high = ratios.value[RESAMPLES - 1 - RESAMPLES / 200];
    samples_free(&a);
    samples_free(&b);
    samples_free(&ratios);
    return i;
}

struct comparison compare_cells(enum metric metric, const struct cell *old, const struct cell *new) {
    struct comparison c = {.change = CHANGE_UNKNOWN};
    if (old->state == CELL_MEASURED && new->state != CELL_MEASURED)
        c.change = new->state == CELL_WRONG ? CHANGE_WRONG : CHANGE_LOST;
    if (old->state != CELL_MEASURED || new->state != CELL_MEASURED || !(old->value.median > 0) ||
        !(new->value.median > 0))
        return c;
    c.low = c.ratio = c.high = new->value.median / old->value.median;
    if (metric == METRIC_SPEED)
        c = bootstrap(old, new);
    c.change = c.low > margin ? CHANGE_WORSE : c.high < 1 / margin ? CHANGE_BETTER : CHANGE_NONE;
    return c;
}

const struct row *compare_row(const struct table *other, const struct row *row) {
    const struct row *const same = table_find_row(other, row->x);
    /* A map of another list of cells has other labels. */
    return same && strcmp(same->place.label, row->place.label) == 0 ? same : NULL;
}

const struct cell *compare_cell(const struct table *other, const struct row *row, const char *column) {
    for (int k = 0; k < other->columns; k++)
        if (strcmp(other->column[k], column) == 0)
            return &row->cell[k];
    return NULL;
}

/* ---- as text --------------------------------------------------------------------------------- */

struct counts {
    int compared, worse, better, lost;
};

static void print_cell(const struct table *t, const struct row *row, int column, const struct cell *old,
                       const struct cell *new, struct counts *counts) {
    const char *name = t->column[column], *unit = metric_units[t->metric];
    const struct comparison c = compare_cells(t->metric, old, new);
    const bool lost = c.change == CHANGE_LOST || c.change == CHANGE_WRONG;
    if (lost)
        printf("%s %s=%lld %s: %s now\n", t->title, t->x_name, (long long)row->x, name,
               c.change == CHANGE_WRONG ? "wrong" : "not measured");
    counts->lost += lost;
    counts->compared += c.change == CHANGE_NONE || c.change == CHANGE_WORSE || c.change == CHANGE_BETTER;
    counts->worse += c.change == CHANGE_WORSE || c.change == CHANGE_WRONG;
    counts->better += c.change == CHANGE_BETTER;
    if (c.change == CHANGE_WORSE || c.change == CHANGE_BETTER)
        printf("%s %s=%lld %s: %.4g %s before, %.4g now, a factor of %.3f (%.3f to %.3f): %s\n", t->title, t->x_name,
               (long long)row->x, name, old->value.median, unit, new->value.median, c.ratio, c.low, c.high,
               t->metric == METRIC_SPEED ? (c.change == CHANGE_WORSE ? "slower" : "faster")
                                         : (c.change == CHANGE_WORSE ? "more" : "less"));
}

static struct counts print_changes(const struct report *old, const struct report *new) {
    struct counts counts = {0};
    for (int i = 0; i < new->tables; i++) {
        const struct table *const t = &new->table[i], *const before = report_find_table(old, t->title);
        for (int k = 0; k < t->rows && before; k++) {
            const struct row *const row = compare_row(before, &t->row[k]);
            for (int c = 0; c < t->columns && row; c++) {
                const struct cell *const cell = compare_cell(before, row, t->column[c]);
                if (cell)
                    print_cell(t, &t->row[k], c, cell, &t->row[k].cell[c], &counts);
            }
        }
    }
    return counts;
}

static bool save_page(const char *path, const struct report *old, const struct report *new) {
    struct output out;
    if (output_open(&out, path)) {
        compare_page(old, new, out.file);
        if (output_commit(&out))
            return true;
    }
    fprintf(stderr, "rafter: %s: %s\n", path, strerror(errno));
    return false;
}

static int compare_reports(const struct report *old, const struct report *new, const char *html) {
    if (strcmp(old->cpu, new->cpu) != 0 || strcmp(old->gpu, new->gpu) != 0 || old->threads != new->threads)
        printf("The machines differ: %s %s, %d threads; %s %s, %d threads\n", old->cpu, old->gpu, old->threads,
               new->cpu, new->gpu, new->threads);
    const struct counts c = print_changes(old, new);
    printf("%d cells compared: %d got worse, %d better, %d are no longer measured\n", c.compared, c.worse, c.better,
           c.lost);
    if (c.compared == 0) {
        fprintf(stderr, "rafter: the two reports have no cell in common\n");
        return 2;
    }
    if (html && !save_page(html, old, new))
        return 1;
    return c.worse > 0 ? 1 : 0;
}

int verb_compare(int argc, char **argv) {
    const char *path[2] = {NULL, NULL}, *html = NULL;
    int paths = 0;
    bool good = true;
    for (int i = 2; i < argc; i++)
        if (strcmp(argv[i], "--html") == 0 && i + 1 < argc)
            html = argv[++i];
        else if (paths < 2 && strncmp(argv[i], "--", 2) != 0)
            path[paths++] = argv[i];
        else
            good = false;
    if (!good || paths != 2) {
        fprintf(stderr, "rafter: compare wants two reports: rafter compare OLD.json NEW.json [--html FILE]\n");
        return 2;
    }
    struct report old = {0}, new = {0};
    int status = 2;
    if (json_read_report(&old, path[0]) && json_read_report(&new, path[1]))
        status = compare_reports(&old, &new, html);
    report_free(&old);
    report_free(&new);
    return status;
}
