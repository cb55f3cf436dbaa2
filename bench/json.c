/* SPDX-License-Identifier: Apache-2.0 */
/* A report as JSON, written and read back. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "json_read.h"
#include "report.h"

/* ---- writing --------------------------------------------------------------------------------- */

static void write_string(FILE *to, const char *text) {
    fputc('"', to);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(to, "\\%c", *c);
        else if (*c < 0x20)
            fprintf(to, "\\u%04x", *c);
        else
            fputc(*c, to);
    }
    fputc('"', to);
}

/* With enough digits to read back; null for values that JSON cannot represent. */
static void write_number(FILE *to, double value) {
    if (isfinite(value))
        fprintf(to, "%.9g", value);
    else
        fputs("null", to);
}

static void write_field(FILE *to, const char *name, double value) {
    fprintf(to, ", \"%s\": ", name);
    write_number(to, value);
}

static void write_text(FILE *to, const char *name, const char *text) {
    if (!text[0])
        return;
    fprintf(to, ",\n  \"%s\": ", name);
    write_string(to, text);
}

static void write_strings(FILE *to, char *const strings[], int count) {
    fputc('[', to);
    for (int i = 0; i < count; i++) {
        fputs(i ? ", " : "", to);
        write_string(to, strings[i]);
    }
    fputc(']', to);
}

static void write_place(FILE *to, const struct map_place *p) {
    fputs(", \"label\": ", to);
    write_string(to, p->label);
    fprintf(to, ", \"length\": %lld, \"layout\": ", (long long)p->length);
    write_string(to, p->layout);
    fputs(", \"option\": ", to);
    write_string(to, p->option);
    fputs(", \"gradient\": ", to);
    write_string(to, p->gradient);
    fputs(", \"dtype\": ", to);
    write_string(to, p->dtype);
}

static void write_cell(FILE *to, const struct table *t, const struct row *row, int column) {
    const struct cell *c = &row->cell[column];
    const bool measured = c->state == CELL_MEASURED;
    fputs("    {\"table\": ", to);
    write_string(to, t->title);
    fprintf(to, ", \"x\": %lld, \"provider\": ", (long long)row->x);
    write_string(to, t->column[column]);
    if (t->map[0])
        write_place(to, &row->place);
    fprintf(to, ", \"metric\": \"%s\"", metric_names[t->metric]);
    write_field(to, "median", measured ? c->value.median : NAN);
    write_field(to, "p10", measured ? c->value.p10 : NAN);
    write_field(to, "p90", measured ? c->value.p90 : NAN);
    fprintf(to, ", \"unit\": \"%s\", \"repeats\": %d", metric_units[t->metric], c->repeats);
    write_field(to, "bytes", row->bytes);
    write_field(to, "flops", row->flops);
    write_field(to, "gradient_bytes", row->gradient_bytes);
    write_field(to, "max_error", c->state == CELL_EMPTY ? NAN : c->max_error);
    if (c->state == CELL_WRONG)
        fputs(", \"wrong\": true", to);
    if (c->variant[0]) {
        fputs(", \"variant\": ", to);
        write_string(to, c->variant);
    }
    if (t->extras >> EXTRA_SHARE & 1 && measured)
        write_field(to, "share", c->share);
    if (t->extras >> EXTRA_HOST & 1 && measured)
        write_field(to, "host_us", c->host);
    if (t->extras >> EXTRA_FIRST & 1 && measured)
        write_field(to, "first_ms", c->first);
    if (c->samples.count > 0) {
        fputs(", \"samples\": [", to);
        for (int i = 0; i < c->samples.count; i++)
            fprintf(to, "%s%.5g", i ? ", " : "", c->samples.value[i]);
        fputs("]", to);
    }
    fputs("}", to);
}

static void write_table(FILE *to, const struct table *t) {
    char *columns[REPORT_COLUMNS], *ours[REPORT_COLUMNS], *early[REPORT_COLUMNS], *over[REPORT_COLUMNS];
    const int count = t->columns;
    int own = 0, marked = 0, overwriting = 0;
    for (int i = 0; i < count; i++) {
        columns[i] = (char *)t->column[i];
        if (t->ours[i])
            ours[own++] = columns[i];
        if (t->early[i])
            early[marked++] = columns[i];
        if (t->over[i])
            over[overwriting++] = columns[i];
    }
    fputs("    {\"title\": ", to);
    write_string(to, t->title);
    fprintf(to, ", \"metric\": \"%s\", \"x\": ", metric_names[t->metric]);
    write_string(to, t->x_name);
    fprintf(to, ", \"extras\": %u, \"columns\": ", t->extras);
    write_strings(to, columns, count);
    fputs(", \"ours\": ", to);
    write_strings(to, ours, own);
    fputs(", \"gradient_in_forward\": ", to);
    write_strings(to, early, marked);
    fputs(", \"gradient_overwrites_input\": ", to);
    write_strings(to, over, overwriting);
    if (t->map[0]) {
        fputs(", \"map\": ", to);
        write_string(to, t->map);
    }
    fputs(", \"notes\": ", to);
    write_strings(to, t->note, t->notes);
    fputs("}", to);
}

static void write_gpu_state(FILE *to, const char *name, struct gpu_state s) {
    if (s.clock_mhz > 0)
        fprintf(to, ",\n  \"%s\": {\"clock_mhz\": %d, \"memory_clock_mhz\": %d, \"temperature\": %d, \"watts\": %d}",
                name, s.clock_mhz, s.memory_clock_mhz, s.temperature, s.watts);
}

static void write_unrest(FILE *to, struct unrest u) {
    if (u.processors > 0)
        fprintf(to,
                ",\n  \"unrest\": {\"processors\": %d, \"busy_by_others\": %.3g, \"slowdown\": %.4g, "
                "\"clock_low_mhz\": %d, \"clock_high_mhz\": %d}",
                u.processors, u.others, u.slowdown, u.clock_low_mhz, u.clock_high_mhz);
}

void json_write(const struct report *r, FILE *to) {
    int words = 0;
    while (r->command && r->command[words])
        words++;
    fputs("{\n  \"version\": ", to);
    write_string(to, r->version);
    write_text(to, "date", r->date);
    write_text(to, "cpu", r->cpu);
    write_text(to, "features", r->features);
    write_text(to, "gpu", r->gpu);
    write_text(to, "torch", r->torch);
    fprintf(to, ",\n  \"threads\": %d,\n  \"command\": ", r->threads);
    write_strings(to, r->command, words);
    fprintf(to, ",\n  \"seconds\": %.1f,\n  \"interrupted\": %s", r->seconds, r->interrupted ? "true" : "false");
    write_gpu_state(to, "gpu_before", r->before);
    write_gpu_state(to, "gpu_after", r->after);
    write_unrest(to, r->unrest);
    const struct {
        const char *name;
        double rate;
    } rates[] = {
        {"read_bytes_per_second", r->read}, {"copy_bytes_per_second", r->copy}, {"matrix_flops_per_second", r->matrix}};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        if (rates[i].rate > 0)
            fprintf(to, ",\n  \"%s\": %.6g", rates[i].name, rates[i].rate);
    fputs(",\n  \"tables\": [", to);
    for (int i = 0; i < r->tables; i++) {
        fputs(i ? ",\n" : "\n", to);
        write_table(to, &r->table[i]);
    }
    fputs("\n  ],\n  \"rows\": [", to);
    const char *separator = "\n";
    for (int i = 0; i < r->tables; i++)
        for (int k = 0; k < r->table[i].rows; k++)
            for (int c = 0; c < r->table[i].columns; c++) {
                fputs(separator, to);
                write_cell(to, &r->table[i], &r->table[i].row[k], c);
                separator = ",\n";
            }
    fputs("\n  ]\n}\n", to);
}

/* ---- reading --------------------------------------------------------------------------------- */

static void copy_text(char *to, size_t size, const struct json *from, const char *key) {
    snprintf(to, size, "%s", json_text(from, key));
}

static int read_count(const struct json *from, const char *key) {
    return (int)json_integer(from, key, 0, INT_MAX);
}

/* Finite: 1e999 is an infinity to the reader. */
static double read_number(const struct json *from, const char *key, double otherwise) {
    const double value = json_number(from, key, otherwise);
    return isfinite(value) ? value : otherwise;
}

static struct gpu_state read_gpu_state(const struct json *s) {
    return (struct gpu_state){read_count(s, "clock_mhz"), read_count(s, "memory_clock_mhz"),
                              read_count(s, "temperature"), read_count(s, "watts")};
}

static struct unrest read_unrest(const struct json *u) {
    return (struct unrest){read_count(u, "processors"), read_number(u, "busy_by_others", 0),
                           read_number(u, "slowdown", 0), read_count(u, "clock_low_mhz"),
                           read_count(u, "clock_high_mhz")};
}

static void mark_columns(struct table *t, const struct json *names, bool marks[]) {
    for (const struct json *name = names ? names->first : NULL; name; name = name->next)
        if (name->text)
            marks[table_column(t, name->text)] = true;
}

static void read_table(struct report *r, const struct json *from) {
    struct table *t = report_add_table(r);
    copy_text(t->title, sizeof t->title, from, "title");
    copy_text(t->x_name, sizeof t->x_name, from, "x");
    t->metric = strcmp(json_text(from, "metric"), metric_names[METRIC_MEMORY]) == 0 ? METRIC_MEMORY : METRIC_SPEED;
    t->extras = (unsigned)json_integer(from, "extras", 0, (1 << EXTRAS) - 1);
    copy_text(t->map, sizeof t->map, from, "map");
    bool columns[REPORT_COLUMNS];
    mark_columns(t, json_get(from, "columns"), columns);
    mark_columns(t, json_get(from, "ours"), t->ours);
    mark_columns(t, json_get(from, "gradient_in_forward"), t->early);
    mark_columns(t, json_get(from, "gradient_overwrites_input"), t->over);
    const struct json *notes = json_get(from, "notes");
    for (const struct json *note = notes ? notes->first : NULL; note; note = note->next) {
        if (!note->text)
            continue;
        table_add_note(t, "%s", note->text);
        /* Reports of 0.1 say it in a note only. */
        for (int k = 0; k < t->columns && strstr(note->text, ": its gradient lies over its input"); k++)
            t->over[k] |= note_names(note->text, t->column[k]);
    }
}

static void read_place(struct map_place *p, const struct json *from) {
    p->length = json_integer(from, "length", 0, INT64_MAX);
    copy_text(p->label, sizeof p->label, from, "label");
    copy_text(p->layout, sizeof p->layout, from, "layout");
    copy_text(p->option, sizeof p->option, from, "option");
    copy_text(p->gradient, sizeof p->gradient, from, "gradient");
    copy_text(p->dtype, sizeof p->dtype, from, "dtype");
}

static void read_cell(struct report *r, const struct json *from) {
    struct table *t = report_find_table(r, json_text(from, "table"));
    if (!t)
        return;
    const int64_t x = json_integer(from, "x", 0, INT64_MAX);
    struct row *row = table_find_row(t, x);
    row = row ? row : table_add_row(t, x);
    row->bytes = read_number(from, "bytes", 0);
    row->flops = read_number(from, "flops", 0);
    row->gradient_bytes = read_number(from, "gradient_bytes", 0);
    if (t->map[0])
        read_place(&row->place, from);
    struct cell *c = &row->cell[table_column(t, json_text(from, "provider"))];
    c->value.median = read_number(from, "median", NAN);
    c->value.p10 = read_number(from, "p10", NAN);
    c->value.p90 = read_number(from, "p90", NAN);
    c->repeats = read_count(from, "repeats");
    c->max_error = read_number(from, "max_error", 0);
    c->share = read_number(from, "share", 0);
    c->host = read_number(from, "host_us", 0);
    c->first = read_number(from, "first_ms", 0);
    copy_text(c->variant, sizeof c->variant, from, "variant");
    c->state = json_number(from, "wrong", 0) != 0 ? CELL_WRONG : isnan(c->value.median) ? CELL_EMPTY : CELL_MEASURED;
    const struct json *samples = json_get(from, "samples");
    for (const struct json *s = samples ? samples->first : NULL; s; s = s->next)
        if (isfinite(s->number))
            samples_add(&c->samples, s->number);
}

bool json_read_report(struct report *r, const char *path) {
    struct json *from = json_parse_file(path);
    const struct json *tables = json_get(from, "tables"), *rows = json_get(from, "rows");
    if (!tables || !rows) {
        fprintf(stderr, "rafter: %s: %s\n", path,
                from || errno == 0 ? "not a report of rafter bench" : strerror(errno));
        json_free(from);
        return false;
    }
    *r = (struct report){.threads = read_count(from, "threads"),
                         .read = read_number(from, "read_bytes_per_second", 0),
                         .copy = read_number(from, "copy_bytes_per_second", 0),
                         .matrix = read_number(from, "matrix_flops_per_second", 0),
                         .seconds = read_number(from, "seconds", 0),
                         .interrupted = json_number(from, "interrupted", 0) != 0,
                         .before = read_gpu_state(json_get(from, "gpu_before")),
                         .after = read_gpu_state(json_get(from, "gpu_after")),
                         .unrest = read_unrest(json_get(from, "unrest"))};
    copy_text(r->version, sizeof r->version, from, "version");
    copy_text(r->date, sizeof r->date, from, "date");
    copy_text(r->cpu, sizeof r->cpu, from, "cpu");
    copy_text(r->features, sizeof r->features, from, "features");
    copy_text(r->gpu, sizeof r->gpu, from, "gpu");
    copy_text(r->torch, sizeof r->torch, from, "torch");
    const struct json *command = json_get(from, "command");
    char *words[64];
    int count = 0;
    for (const struct json *word = command ? command->first : NULL; word && count < 64; word = word->next)
        words[count++] = word->text ? word->text : (char *)"";
    report_set_command(r, count, words);
    for (const struct json *t = tables->first; t; t = t->next)
        read_table(r, t);
    for (const struct json *c = rows->first; c; c = c->next)
        read_cell(r, c);
    json_free(from);
    return true;
}
