/* SPDX-License-Identifier: Apache-2.0 */
#include "plot.h"

#include <math.h>
#include <string.h>

#include "names.h"
#include "page.h"

/* Sizes in units of the drawing. On a phone texts are larger, so there is room for letters of 17 units. */
enum { WIDTH = 614, HEIGHT = 340, LEFT = 74, RIGHT = 122, TOP = 14, BOTTOM = 50, LABEL_HEIGHT = 18, TICKS = 24 };

/* What the y axis shows. */
enum kind { OVER_FLOOR, OVER_PEER, WORKSPACE, FIGURES };

struct axes {
    enum kind kind;
    double x_low, x_high; /* logarithms */
    double y_low, y_high; /* logarithms, but for WORKSPACE */
    double most;          /* larger values are drawn at the upper edge; INFINITY: there is none */
    bool clipped;         /* there are such values */
};

static const char *const y_names[] = {
    [OVER_FLOOR] = "time over the floor", [OVER_PEER] = "time over the best other's", [WORKSPACE] = "MiB of workspace"};

/* ---- values ---------------------------------------------------------------------------------- */

/* What a figure of this row is divided by; NAN: it is not known. */
static double unit_of(const struct table *t, const struct row *row, int column, enum kind kind) {
    const char *name;
    if (kind == OVER_FLOOR)
        return row->cell[column].share > 0 ? row->cell[column].value.median * row->cell[column].share : NAN;
    if (kind == OVER_PEER) {
        const struct cell *const peer = row_best_peer(t, row, &name);
        return peer ? peer->value.median : NAN;
    }
    return 1;
}

static double value_of(const struct table *t, const struct row *row, int column, enum kind kind) {
    if (row->cell[column].state != CELL_MEASURED)
        return NAN;
    if (kind == WORKSPACE)
        return cell_workspace(t, row, column);
    return row->cell[column].value.median / unit_of(t, row, column, kind);
}

/* The x axis is always logarithmic, the y axis mostly. */
static bool is_drawn(const struct table *t, const struct row *row, int column, enum kind kind) {
    const double value = value_of(t, row, column, kind);
    return row->x > 0 && isfinite(value) && (kind == WORKSPACE || value > 0);
}

/* The most telling kind that the table has figures for. */
static enum kind choose_kind(const struct table *t) {
    if (t->metric == METRIC_MEMORY)
        return WORKSPACE;
    for (enum kind kind = OVER_FLOOR; kind <= OVER_PEER; kind++)
        for (int i = 0; i < t->rows; i++)
            for (int k = 0; k < t->columns; k++)
                if (is_drawn(t, &t->row[i], k, kind))
                    return kind;
    return FIGURES;
}

/* ---- axes ------------------------------------------------------------------------------------ */

static double on_y(const struct axes *a, double value) {
    return a->kind == WORKSPACE ? value : log(value);
}

/* Widens the axes so that they hold the table. */
static void widen(struct axes *a, const struct table *t) {
    for (int i = 0; i < t->rows; i++)
        for (int k = 0; k < t->columns; k++) {
            if (!is_drawn(t, &t->row[i], k, a->kind))
                continue;
            const double value = value_of(t, &t->row[i], k, a->kind), x = log((double)t->row[i].x);
            a->clipped |= value > a->most;
            a->x_low = fmin(a->x_low, x);
            a->x_high = fmax(a->x_high, x);
            a->y_low = fmin(a->y_low, on_y(a, fmin(value, a->most)));
            a->y_high = fmax(a->y_high, on_y(a, fmin(value, a->most)));
        }
}

/* The largest ratio of Rafter's columns. */
static double worst_of_ours(const struct table *t, enum kind kind) {
    double worst = 0;
    for (int i = 0; i < t->rows; i++)
        for (int k = 0; k < t->columns; k++)
            if (t->ours[k] && is_drawn(t, &t->row[i], k, kind))
                worst = fmax(worst, value_of(t, &t->row[i], k, kind));
    return worst;
}

/* Axes for one or two tables. False: there is nothing to draw. */
static bool find_axes(struct axes *a, enum kind kind, const struct table *t, const struct table *other) {
    *a = (struct axes){kind, INFINITY, -INFINITY, INFINITY, -INFINITY, INFINITY, false};
    if (kind == OVER_FLOOR || kind == OVER_PEER) /* what is far off must not squeeze the rest */
        a->most = fmax(5, 1.3 * fmax(worst_of_ours(t, kind), other ? worst_of_ours(other, kind) : 0));
    widen(a, t);
    if (other)
        widen(a, other);
    if (a->x_low > a->x_high)
        return false;
    if (kind == WORKSPACE) {
        a->y_low = 0;
        a->y_high = fmax(1.05 * a->y_high, 1);
    } else {
        if (kind != FIGURES) { /* the reference, 1, is always in sight */
            a->y_low = fmin(a->y_low, 0);
            a->y_high = fmax(a->y_high, log(1.2));
        }
        const double margin = fmax(kind == FIGURES ? 0.12 : 0.03, 0.05 * (a->y_high - a->y_low));
        a->y_low -= margin;
        a->y_high += a->clipped ? 0 : margin;
    }
    if (a->x_high - a->x_low < 0.2)
        a->x_low -= 0.7, a->x_high += 0.7;
    return true;
}

static double place_x(const struct axes *a, double x) {
    return LEFT + (WIDTH - LEFT - RIGHT) * (log(x) - a->x_low) / (a->x_high - a->x_low);
}

static double place_y(const struct axes *a, double y) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (a->y_high - on_y(a, fmin(y, a->most))) / (a->y_high - a->y_low);
}

/* Adds a tick if it is on the axis and its text would not touch another's. */
static void add_tick(const struct axes *a, double ticks[TICKS], int *count, double value) {
    const double y = place_y(a, value);
    bool free = *count < TICKS && value <= a->most && y >= TOP - 1 && y <= HEIGHT - BOTTOM + 1;
    for (int i = 0; i < *count && free; i++)
        free = fabs(place_y(a, ticks[i]) - y) >= LABEL_HEIGHT;
    if (free)
        ticks[(*count)++] = value;
}

static int find_ticks(const struct axes *a, double ticks[TICKS]) {
    static const double steps[] = {1, 5, 2, 3, 1.5, 7, 1.2, 1.1, 9, 8, 1.3, 1.05, 9.5}; /* the most wanted first */
    int count = 0;
    if (a->kind == WORKSPACE) {
        double step = pow(10, floor(log10(a->y_high / 5)));
        step *= a->y_high / step > 25 ? 5 : a->y_high / step > 12 ? 2 : 1;
        for (double value = 0; value <= a->y_high; value += step)
            add_tick(a, ticks, &count, value);
        return count;
    }
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++)
        for (int decade = (int)floor(a->y_low / log(10)); decade <= (int)ceil(a->y_high / log(10)); decade++)
            if (a->kind != FIGURES || s < 3)
                add_tick(a, ticks, &count, steps[s] * pow(10, decade));
    return count;
}

/* "4K" for 4096. */
static void write_x(FILE *to, int64_t x) {
    if (x >= 1024 && x % 1024 == 0)
        fprintf(to, "%lldK", (long long)x / 1024);
    else
        fprintf(to, "%lld", (long long)x);
}

static void draw_axes(const struct table *t, const struct axes *a, FILE *to) {
    double ticks[TICKS], last = WIDTH;
    const int count = find_ticks(a, ticks);
    for (int i = 0; i < count; i++) {
        const double y = place_y(a, ticks[i]);
        const bool reference = ticks[i] == 1 && (a->kind == OVER_FLOOR || a->kind == OVER_PEER);
        fprintf(to, "<line class=\"%s\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", reference ? "floor" : "grid",
                LEFT, WIDTH - RIGHT, y, y);
        fprintf(to, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g%s</text>\n", LEFT - 6, y + 5, ticks[i],
                a->kind == OVER_FLOOR || a->kind == OVER_PEER ? "×" : "");
    }
    for (int i = t->rows - 1; i >= 0; i--) {
        if (t->row[i].x <= 0)
            continue;
        const double x = place_x(a, (double)t->row[i].x);
        if (x < LEFT - 1 || x > WIDTH - RIGHT + 1)
            continue;
        fprintf(to, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>", x, x, TOP, HEIGHT - BOTTOM);
        if (last - x < 46)
            continue;
        last = x;
        fprintf(to, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", x, HEIGHT - BOTTOM + 18);
        write_x(to, t->row[i].x);
        fputs("</text>\n", to);
    }
    fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
    write_escaped(to, t->x_name);
    if (x_meaning(t)[0]) {
        fputs(": ", to);
        write_escaped(to, x_meaning(t));
    }
    fprintf(to, "</text><text transform=\"translate(14 %d) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
            (TOP + HEIGHT - BOTTOM) / 2, a->kind == FIGURES ? metric_units[t->metric] : y_names[a->kind]);
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* A band from the 10th to the 90th percentile of the repeats: its outline runs along one and back along the other. */
static void draw_band(const struct table *t, const struct axes *a, int column, FILE *to) {
    if (t->metric != METRIC_SPEED)
        return;
    fputs("<polygon class=\"band\" points=\"", to);
    for (int pass = 0; pass < 2; pass++)
        for (int n = 0; n < t->rows; n++) {
            const struct row *const row = &t->row[pass ? t->rows - 1 - n : n];
            const struct summary s = row->cell[column].value;
            const double value = pass ? s.p90 : s.p10;
            if (is_drawn(t, row, column, a->kind) && value > 0 && isfinite(value))
                fprintf(to, "%.1f,%.1f ", place_x(a, (double)row->x),
                        fmin(place_y(a, value / unit_of(t, row, column, a->kind)), HEIGHT - BOTTOM));
        }
    fputs("\"/>\n", to);
}

static void write_point(const struct table *t, const struct axes *a, const struct row *row, int column, FILE *to) {
    const struct cell *const c = &row->cell[column];
    const double value = value_of(t, row, column, a->kind);
    fprintf(to, "<circle class=\"p\" cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" data-v=\"", place_x(a, (double)row->x),
            place_y(a, value), t->ours[column] ? "4" : "3");
    write_escaped(to, column_name(t->column[column]));
    fputs(", ", to);
    write_escaped(to, t->x_name);
    fprintf(to, " = %lld: %.4g %s", (long long)row->x, c->value.median, metric_units[t->metric]);
    if (t->metric == METRIC_SPEED && c->repeats > 1)
        fprintf(to, " (%.4g to %.4g)", c->value.p10, c->value.p90);
    if (a->kind == OVER_FLOOR)
        fprintf(to, ", %.2f× the floor", value);
    else if (a->kind == OVER_PEER)
        fprintf(to, ", %.2f× the best other's", value);
    else if (a->kind == WORKSPACE)
        fprintf(to, ", %.4g of it workspace%s", value, t->over[column] ? ", in place" : "");
    fputs("\"/>\n", to);
}

static void draw_line(const struct table *t, const struct axes *a, int column, FILE *to) {
    draw_band(t, a, column, to);
    fprintf(to, "<polyline class=\"%s\" points=\"", t->ours[column] ? "ours" : "peer");
    for (int i = 0; i < t->rows; i++)
        if (is_drawn(t, &t->row[i], column, a->kind))
            fprintf(to, "%.1f,%.1f ", place_x(a, (double)t->row[i].x),
                    place_y(a, value_of(t, &t->row[i], column, a->kind)));
    fputs("\"/>\n", to);
    for (int i = 0; i < t->rows; i++)
        if (is_drawn(t, &t->row[i], column, a->kind))
            write_point(t, a, &t->row[i], column, to);
}

/* The names of the lines at their right ends, moved apart where they would overlap. */
static void draw_names(const struct table *t, const struct axes *a, FILE *to) {
    double wanted[REPORT_COLUMNS], at[REPORT_COLUMNS];
    int order[REPORT_COLUMNS], count = 0;
    for (int k = 0; k < t->columns; k++)
        for (int i = t->rows - 1; i >= 0; i--)
            if (is_drawn(t, &t->row[i], k, a->kind)) {
                wanted[k] = place_y(a, value_of(t, &t->row[i], k, a->kind));
                int place = count++;
                while (place > 0 && wanted[order[place - 1]] > wanted[k]) {
                    order[place] = order[place - 1];
                    place--;
                }
                order[place] = k;
                break;
            }
    for (int i = 0; i < count; i++) {
        const double above = i > 0 ? at[i - 1] + LABEL_HEIGHT : TOP;
        at[i] = fmax(wanted[order[i]], above);
    }
    for (int i = count - 1; i >= 0; i--) {
        const double below = i + 1 < count ? at[i + 1] - LABEL_HEIGHT : HEIGHT - BOTTOM;
        at[i] = fmin(at[i], below);
    }
    for (int i = 0; i < count; i++) {
        const int k = order[i];
        fprintf(to, "<path class=\"lead c%d\" d=\"M%d %.1f L%d %.1f\"/>", k % PLOT_COLOURS, WIDTH - RIGHT + 4,
                wanted[k], WIDTH - RIGHT + 14, at[i]);
        fprintf(to, "<text class=\"%s\" x=\"%d\" y=\"%.1f\">", t->ours[k] ? "own" : "other", WIDTH - RIGHT + 18,
                at[i] + 4);
        write_escaped(to, t->column[k]);
        fputs(t->early[k] ? "*</text>\n" : "</text>\n", to);
    }
}

/* ---- plots ----------------------------------------------------------------------------------- */

static void describe(const struct table *t, enum kind kind, FILE *to) {
    const struct row *last = &t->row[t->rows - 1];
    const char *separator = "";
    fprintf(to, "%s against ", kind == FIGURES ? metric_units[t->metric] : y_names[kind]);
    write_escaped(to, t->x_name);
    fputs(". At ", to);
    write_escaped(to, t->x_name);
    fprintf(to, " = %lld: ", (long long)last->x);
    for (int k = 0; k < t->columns; k++)
        if (is_drawn(t, last, k, kind)) {
            fputs(separator, to);
            write_escaped(to, column_name(t->column[k]));
            fprintf(to, " %.4g", value_of(t, last, k, kind));
            separator = ", ";
        }
}

static void draw(const struct table *t, const struct axes *a, FILE *to) {
    fprintf(to, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    describe(t, a->kind, to);
    fputs("\">\n", to);
    draw_axes(t, a, to);
    for (int k = t->columns - 1; k >= 0; k--) { /* Rafter's lines are drawn last, on top */
        fprintf(to, "<g class=\"c%d\">", k % PLOT_COLOURS);
        draw_line(t, a, k, to);
        fputs("</g>\n", to);
    }
    draw_names(t, a, to);
    fputs("</svg>\n", to);
}

static void write_caption(const struct axes *a, FILE *to) {
    static const char *const captions[] = {
        [OVER_FLOOR] =
            "Time divided by the floor, the dashed line: what the call's bytes and flops take at the rates "
            "measured in the same run. Lower is better. The band is the 10th to the 90th percentile of the repeats.",
        [OVER_PEER] =
            "Time divided by that of the fastest other library, the dashed line. Lower is better. The band is "
            "the 10th to the 90th percentile of the repeats.",
        [WORKSPACE] = "Memory beyond inputs and gradients at the peak of the call, in MiB. Lower is better.",
        [FIGURES] = "The band is the 10th to the 90th percentile of the repeats."};
    fprintf(to, "<figcaption>%s%s</figcaption>\n", captions[a->kind],
            a->clipped ? " Points at the upper edge lie beyond it." : "");
}

void plot_write(const struct table *t, FILE *to) {
    struct axes a;
    const enum kind kind = t->rows > 0 ? choose_kind(t) : FIGURES;
    if (t->rows == 0 || !find_axes(&a, kind, t, NULL))
        return;
    fputs("<figure class=\"first\">", to);
    draw(t, &a, to);
    write_caption(&a, to);
    fputs("</figure>\n", to);
    if (kind == FIGURES || !find_axes(&a, FIGURES, t, NULL))
        return;
    fprintf(to, "<details class=\"log\"><summary>Plot of %s, both axes logarithmic</summary><figure>",
            t->metric == METRIC_MEMORY ? "all memory beyond inputs, in MiB" : "time in ms");
    draw(t, &a, to);
    fputs("</figure></details>\n", to);
}

void plot_write_pair(const struct table *old, const struct table *new, FILE *to) {
    struct axes a;
    if (old->rows == 0 || new->rows == 0)
        return;
    enum kind kind = choose_kind(new);
    kind = choose_kind(old) == kind ? kind : FIGURES;
    if (!find_axes(&a, kind, old, new))
        return;
    fputs("<div class=\"pair\"><figure><figcaption><strong>Before</strong></figcaption>", to);
    draw(old, &a, to);
    fputs("</figure><figure><figcaption><strong>Now</strong></figcaption>", to);
    draw(new, &a, to);
    fputs("</figure></div>\n<figure>", to);
    write_caption(&a, to);
    fputs("</figure>\n", to);
}
