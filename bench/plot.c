/* SPDX-License-Identifier: Apache-2.0 */
#include "plot.h"

#include <math.h>
#include <string.h>

enum { WIDTH = 760, HEIGHT = 400, LEFT = 62, RIGHT = 110, TOP = 14, BOTTOM = 46, LABEL_HEIGHT = 15 };

void write_escaped(FILE *to, const char *text) {
    for (; *text; text++) {
        const char *entity = *text == '&'    ? "&amp;"
                             : *text == '<'  ? "&lt;"
                             : *text == '>'  ? "&gt;"
                             : *text == '"'  ? "&quot;"
                             : *text == '\'' ? "&#39;"
                                             : NULL;
        if (entity)
            fputs(entity, to);
        else
            fputc(*text, to);
    }
}

void write_link(FILE *to, const struct table *t, const char *text) {
    fputs("<a href=\"#", to);
    write_escaped(to, t->title);
    fputs("\">", to);
    write_escaped(to, text);
    fputs("</a>", to);
}

struct axes {
    double x_low, x_high, y_low, y_high; /* logarithms to base 10 */
};

/* Both axes are logarithmic, so both values must be above 0. */
static bool is_drawn(const struct row *row, int column) {
    const struct cell *c = &row->cell[column];
    return row->x > 0 && c->state == CELL_MEASURED && c->value.median > 0 && isfinite(c->value.median);
}

static bool find_axes(const struct table *t, struct axes *a) {
    *a = (struct axes){INFINITY, -INFINITY, INFINITY, -INFINITY};
    for (int i = 0; i < t->rows; i++)
        for (int k = 0; k < t->columns; k++) {
            if (!is_drawn(&t->row[i], k))
                continue;
            const double x = log10((double)t->row[i].x), y = log10(t->row[i].cell[k].value.median);
            a->x_low = fmin(a->x_low, x);
            a->x_high = fmax(a->x_high, x);
            a->y_low = fmin(a->y_low, y);
            a->y_high = fmax(a->y_high, y);
        }
    if (a->x_low > a->x_high)
        return false;
    const double margin = fmax(0.05, 0.05 * (a->y_high - a->y_low));
    a->y_low -= margin;
    a->y_high += margin;
    if (a->x_high - a->x_low < 0.1)
        a->x_low -= 0.3, a->x_high += 0.3;
    return true;
}

static double place_x(const struct axes *a, double x) {
    return LEFT + (WIDTH - LEFT - RIGHT) * (log10(x) - a->x_low) / (a->x_high - a->x_low);
}

static double place_y(const struct axes *a, double y) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (a->y_high - log10(y)) / (a->y_high - a->y_low);
}

static void draw_axes(const struct table *t, const struct axes *a, FILE *to) {
    static const double steps[] = {1, 2, 5};
    const bool fine = a->y_high - a->y_low < 2; /* under two decades: 1, 2, 5, else powers of ten */
    for (int decade = (int)floor(a->y_low); decade <= (int)ceil(a->y_high); decade++)
        for (int s = 0; s < (fine ? 3 : 1); s++) {
            const double value = steps[s] * pow(10, decade), y = place_y(a, value);
            if (log10(value) < a->y_low || log10(value) > a->y_high)
                continue;
            fprintf(to, "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, WIDTH - RIGHT, y,
                    y);
            fprintf(to, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT - 8, y + 4, value);
        }
    for (int i = 0; i < t->rows; i++) {
        if (t->row[i].x <= 0)
            continue;
        const double x = place_x(a, (double)t->row[i].x);
        if (log10((double)t->row[i].x) < a->x_low - 1e-9 || log10((double)t->row[i].x) > a->x_high + 1e-9)
            continue;
        fprintf(to, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>", x, x, TOP, HEIGHT - BOTTOM);
        fprintf(to, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%lld</text>\n", x, HEIGHT - BOTTOM + 18,
                (long long)t->row[i].x);
    }
    fprintf(to, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
    write_escaped(to, t->x_name);
    fprintf(to, "</text><text transform=\"translate(14 %d) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
            (TOP + HEIGHT - BOTTOM) / 2, metric_units[t->metric]);
}

static void draw_line(const struct table *t, const struct axes *a, int column, FILE *to) {
    fprintf(to, "<polyline class=\"%s\" points=\"", t->ours[column] ? "ours" : "peer");
    for (int i = 0; i < t->rows; i++)
        if (is_drawn(&t->row[i], column))
            fprintf(to, "%.1f,%.1f ", place_x(a, (double)t->row[i].x), place_y(a, t->row[i].cell[column].value.median));
    fputs("\"/>\n", to);
    for (int i = 0; i < t->rows; i++) {
        const struct cell *c = &t->row[i].cell[column];
        if (!is_drawn(&t->row[i], column))
            continue;
        fprintf(to, "<circle class=\"p\" cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" data-v=\"", place_x(a, (double)t->row[i].x),
                place_y(a, c->value.median), t->ours[column] ? "4" : "3");
        write_escaped(to, t->column[column]);
        fputs(", ", to);
        write_escaped(to, t->x_name);
        fprintf(to, " = %lld: %.4g %s", (long long)t->row[i].x, c->value.median, metric_units[t->metric]);
        if (t->metric == METRIC_SPEED && c->repeats > 1)
            fprintf(to, " (%.4g to %.4g)", c->value.p10, c->value.p90);
        fputs("\"/>\n", to);
    }
}

/* The names of the lines at their right ends, moved apart where they would overlap. */
static void draw_names(const struct table *t, const struct axes *a, FILE *to) {
    double wanted[REPORT_COLUMNS], at[REPORT_COLUMNS];
    int order[REPORT_COLUMNS], count = 0;
    for (int k = 0; k < t->columns; k++)
        for (int i = t->rows - 1; i >= 0; i--)
            if (is_drawn(&t->row[i], k)) {
                wanted[k] = place_y(a, t->row[i].cell[k].value.median);
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
                wanted[k], WIDTH - RIGHT + 16, at[i]);
        fprintf(to, "<text class=\"%s\" x=\"%d\" y=\"%.1f\">", t->ours[k] ? "own" : "other", WIDTH - RIGHT + 20,
                at[i] + 4);
        write_escaped(to, t->column[k]);
        fputs(t->early[k] ? "*</text>\n" : "</text>\n", to);
    }
}

static void describe(const struct table *t, FILE *to) {
    const struct row *last = &t->row[t->rows - 1];
    const char *separator = "";
    fprintf(to, "%s in %s against ", t->metric == METRIC_SPEED ? "Time" : "Memory", metric_units[t->metric]);
    write_escaped(to, t->x_name);
    fputs(", both axes logarithmic. At ", to);
    write_escaped(to, t->x_name);
    fprintf(to, " = %lld: ", (long long)last->x);
    for (int k = 0; k < t->columns; k++)
        if (is_drawn(last, k)) {
            fputs(separator, to);
            write_escaped(to, t->column[k]);
            fprintf(to, " %.4g", last->cell[k].value.median);
            separator = ", ";
        }
}

void plot_write(const struct table *t, FILE *to) {
    struct axes a;
    if (t->rows == 0 || !find_axes(t, &a))
        return;
    fprintf(to, "<figure><svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    describe(t, to);
    fputs("\">\n", to);
    draw_axes(t, &a, to);
    for (int k = t->columns - 1; k >= 0; k--) { /* Rafter's lines are drawn last, on top */
        fprintf(to, "<g class=\"c%d\">", k % PLOT_COLOURS);
        draw_line(t, &a, k, to);
        fputs("</g>\n", to);
    }
    draw_names(t, &a, to);
    fputs("</svg></figure>\n", to);
}
