/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter compare OLD.json NEW.json`: which cells got slower beyond noise. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "verbs.h"

enum { RESAMPLES = 2000, LEAST_SAMPLES = 5 };

/* A cell is slower, or larger, if the whole interval is beyond `margin`; with too few samples for
 * an interval, if the ratio is beyond `lone_margin`. */
static const double margin = 1.02, lone_margin = 1.10;

struct interval {
    double low, ratio, high; /* of new over old */
};

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
static struct interval bootstrap(const struct cell *old, const struct cell *new) {
    struct interval i = {0, new->value.median / old->value.median, INFINITY};
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

struct counts {
    int compared, worse, better, lost;
};

static void compare_cell(const struct table *t, const struct row *row, int column, const struct cell *old,
                         const struct cell *new, struct counts *counts) {
    const char *name = t->column[column], *unit = metric_units[t->metric];
    if (old->state == CELL_MEASURED && new->state != CELL_MEASURED) {
        printf("%s %s=%lld %s: %s now\n", t->title, t->x_name, (long long)row->x, name,
               new->state == CELL_WRONG ? "wrong" : "not measured");
        counts->lost++;
        counts->worse += new->state == CELL_WRONG;
    }
    if (old->state != CELL_MEASURED || new->state != CELL_MEASURED || !(old->value.median > 0) ||
        !(new->value.median > 0))
        return;
    counts->compared++;
    struct interval i = {new->value.median / old->value.median, 0, 0};
    i.ratio = i.high = i.low;
    if (t->metric == METRIC_SPEED)
        i = bootstrap(old, new);
    const bool worse = i.low > margin, better = i.high < 1 / margin;
    counts->worse += worse;
    counts->better += better;
    if (worse || better)
        printf("%s %s=%lld %s: %.4g %s before, %.4g now, a factor of %.3f (%.3f to %.3f): %s\n", t->title, t->x_name,
               (long long)row->x, name, old->value.median, unit, new->value.median, i.ratio, i.low, i.high,
               t->metric == METRIC_SPEED ? (worse ? "slower" : "faster") : (worse ? "more" : "less"));
}

static struct counts compare_reports(const struct report *old, const struct report *new) {
    struct counts counts = {0};
    for (int i = 0; i < new->tables; i++) {
        const struct table *t = &new->table[i];
        struct table *before = report_find_table(old, t->title);
        for (int k = 0; k < t->rows && before; k++) {
            const struct row *row = table_find_row(before, t->row[k].x);
            if (row && strcmp(row->place.label, t->row[k].place.label) != 0)
                row = NULL; /* a map of another list of cells */
            for (int c = 0; c < t->columns && row; c++)
                for (int b = 0; b < before->columns; b++)
                    if (strcmp(before->column[b], t->column[c]) == 0)
                        compare_cell(t, &t->row[k], c, &row->cell[b], &t->row[k].cell[c], &counts);
        }
    }
    return counts;
}

int verb_compare(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "rafter: compare wants two reports: rafter compare OLD.json NEW.json\n");
        return 2;
    }
    struct report old = {0}, new = {0};
    int status = 2;
    if (json_read_report(&old, argv[2]) && json_read_report(&new, argv[3])) {
        if (strcmp(old.cpu, new.cpu) != 0 || strcmp(old.gpu, new.gpu) != 0 || old.threads != new.threads)
            printf("The machines differ: %s %s, %d threads; %s %s, %d threads\n", old.cpu, old.gpu, old.threads,
                   new.cpu, new.gpu, new.threads);
        const struct counts c = compare_reports(&old, &new);
        printf("%d cells compared: %d got worse, %d better, %d are no longer measured\n", c.compared, c.worse, c.better,
               c.lost);
        status = c.worse > 0 ? 1 : 0;
        if (c.compared == 0) {
            fprintf(stderr, "rafter: the two reports have no cell in common\n");
            status = 2;
        }
    }
    report_free(&old);
    report_free(&new);
    return status;
}
