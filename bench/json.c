#include <math.h>
#include <string.h>

#include "machine.h"
#include "report.h"

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

/* Enough digits to read back, and null for what JSON has no number for. */
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

static void write_cell(FILE *to, const struct table *t, const struct row *row, int column) {
    const struct cell *c = &row->cell[column];
    const bool measured = c->state == CELL_MEASURED;
    fputs("    {\"table\": ", to);
    write_string(to, t->title);
    fprintf(to, ", \"x\": %lld, \"provider\": ", (long long)row->x);
    write_string(to, t->column[column]);
    fprintf(to, ", \"metric\": \"%s\"", metric_names[t->metric]);
    write_field(to, "median", measured ? c->value.median : NAN);
    write_field(to, "p10", measured ? c->value.p10 : NAN);
    write_field(to, "p90", measured ? c->value.p90 : NAN);
    fprintf(to, ", \"unit\": \"%s\"", metric_units[t->metric]);
    write_field(to, "bytes", row->bytes);
    write_field(to, "flops", row->flops);
    write_field(to, "max_error", c->state == CELL_EMPTY ? NAN : c->max_error);
    if (c->state == CELL_WRONG)
        fputs(", \"wrong\": true", to);
    if (t->shares && measured)
        write_field(to, "share", c->share);
    fputs("}", to);
}

void json_write(const struct report *r, FILE *to, int threads, int argc, char **argv) {
    fputs("{\n  \"version\": ", to);
    write_string(to, rafter_version());
    fputs(",\n  \"cpu\": ", to);
    write_string(to, machine_cpu());
    fputs(",\n  \"features\": ", to);
    write_string(to, rafter_cpu_features());
    fprintf(to, ",\n  \"threads\": %d,\n  \"command\": [", threads);
    for (int i = 0; i < argc; i++) {
        fputs(i ? ", " : "", to);
        write_string(to, argv[i]);
    }
    fputs("]", to);
    const struct {
        const char *name;
        double rate;
    } rates[] = {
        {"read_bytes_per_second", r->read}, {"copy_bytes_per_second", r->copy}, {"matrix_flops_per_second", r->matrix}};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        if (rates[i].rate > 0)
            fprintf(to, ",\n  \"%s\": %.6g", rates[i].name, rates[i].rate);
    fputs(",\n  \"rows\": [", to);
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
