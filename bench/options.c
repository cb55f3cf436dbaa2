/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

static bool complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static bool complain(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("rafter: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    return false;
}

/* "a, b or c" in a static buffer. */
static const char *spoken(const char *const names[], int count) {
    static char text[512];
    text[0] = '\0';
    for (int i = 0; i < count; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s", i == 0 ? "" : i == count - 1 ? " or " : ", ", names[i]);
    }
    return text;
}

/* The index of the value among the names; -1 after a complaint. */
static int choose(const char *option, const char *value, const char *const names[], int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(value, names[i]) == 0)
            return i;
    complain("%s is '%s', wanted %s", option, value, spoken(names, count));
    return -1;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool read_preset(struct options *o, const char *value) {
    static const char *const names[] = {"quick", "seeds"};
    const int index = choose("--preset", value, names, 2);
    o->seeds = index == 1;
    return index >= 0;
}

static bool read_metric(struct options *o, const char *value) {
    const int index = choose("--metric", value, metric_names, METRICS + 1);
    for (int m = 0; m < METRICS; m++)
        o->metric[m] = index == m || index == METRICS;
    return index >= 0;
}

static bool read_mode(struct options *o, const char *value) {
    const int index = choose("--mode", value, problem_mode_names, PROBLEM_MODES);
    o->modes = 1u << (index & 31);
    return index >= 0;
}

static bool read_dtype(struct options *o, const char *value) {
    static const char *const names[] = {"fp32", "bf16", "fp16"}; /* in the order of rafter_dtype */
    const int index = choose("--dtype", value, names, 3);
    o->dtype = (rafter_dtype)index;
    return index >= 0;
}

static bool read_device(struct options *o, const char *value) {
    static const char *const names[] = {"cpu", "cuda"};
    const int index = choose("--device", value, names, 2);
    o->device.device_type = index == 1 ? kDLCUDA : kDLCPU;
    return index >= 0;
}

static bool read_x(struct options *o, const char *value) {
    int count = 0;
    for (const char *at = value;; at++) {
        char *end;
        const long long x = strtoll(at, &end, 10);
        if (end == at || x <= 0 || x > 1 << 30 || (*end != ',' && *end != '\0'))
            return complain("--x is '%s', wanted sizes between commas, such as 1024,2048", value);
        if (count == OPTIONS_LIST - 1)
            return complain("--x has more than %d sizes", OPTIONS_LIST - 1);
        o->x[count++] = x;
        if (*end == '\0')
            break;
        at = end;
    }
    o->x[count] = 0;
    return true;
}

static bool read_threads(struct options *o, const char *value) {
    char *end;
    const long threads = strtol(value, &end, 10);
    if (end == value || *end != '\0' || threads < 1 || threads > 4096)
        return complain("--threads is '%s', wanted a number from 1 to 4096", value);
    o->threads = (int)threads;
    return true;
}

static bool read_seconds(struct options *o, const char *value) {
    char *end;
    o->seconds = strtod(value, &end);
    if (end == value || *end != '\0' || !(o->seconds > 0 && o->seconds <= 3600))
        return complain("--seconds is '%s', wanted the time per cell in seconds, such as 0.5", value);
    return true;
}

static bool read_limit(struct options *o, const char *value) {
    char *end;
    o->limit = strtod(value, &end);
    if (end == value || *end != '\0' || !(o->limit > 0 && o->limit <= 86400))
        return complain("--limit is '%s', wanted seconds, such as 60", value);
    return true;
}

static bool read_json(struct options *o, const char *value) {
    o->json = value;
    return true;
}

static bool read_csv(struct options *o, const char *value) {
    o->csv = value;
    return true;
}

static bool read_html(struct options *o, const char *value) {
    o->html = value;
    return true;
}

static bool read_table(struct options *o, const char *value) {
    o->table = value;
    return true;
}

/* Whether some table of this build has a column of this name. */
static bool is_column(const char *name, size_t length) {
    for (int i = 0; providers[i]; i++)
        if (strlen(providers[i]->name) == length && strncmp(providers[i]->name, name, length) == 0)
            return true;
    for (int i = 0; problem_ops[i]; i++)
        for (const char *const *a = problem_ops[i]->algorithms; a && *a; a++)
            if (strlen(*a) == length && strncmp(*a, name, length) == 0)
                return true;
    return false;
}

static bool are_columns(const char *option, const char *value) {
    for (const char *at = value; at;) {
        const size_t length = strcspn(at, ",");
        if (!is_column(at, length))
            return complain("%s names '%.*s', which this build does not have", option, (int)length, at);
        at = at[length] ? at + length + 1 : NULL;
    }
    return true;
}

static bool read_providers(struct options *o, const char *value) {
    o->providers = value;
    return are_columns("--providers", value);
}

static bool read_without(struct options *o, const char *value) {
    o->without = value;
    return are_columns("--without", value);
}

static bool read_percent(struct options *o, const char *value) {
    (void)value;
    return o->percent = true;
}

static bool read_warm(struct options *o, const char *value) {
    (void)value;
    return o->warm = true;
}

static bool read_error(struct options *o, const char *value) {
    (void)value;
    return o->error = true;
}

static bool read_host(struct options *o, const char *value) {
    (void)value;
    return o->host = true;
}

static bool read_first(struct options *o, const char *value) {
    (void)value;
    return o->first = true;
}

static bool read_markdown(struct options *o, const char *value) {
    (void)value;
    return o->markdown = true;
}

static bool read_list(struct options *o, const char *value) {
    (void)value;
    return o->list = true;
}

static bool read_resume(struct options *o, const char *value) {
    (void)value;
    return o->resume = true;
}

/* ---- the line -------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    bool takes_value, for_check;
    bool (*read)(struct options *o, const char *value);
} table[] = {
    {"--preset", true, false, read_preset},       {"--metric", true, false, read_metric},
    {"--mode", true, false, read_mode},           {"--x", true, false, read_x},
    {"--dtype", true, false, read_dtype},         {"--threads", true, true, read_threads},
    {"--json", true, false, read_json},           {"--csv", true, false, read_csv},
    {"--html", true, false, read_html},           {"--markdown", false, false, read_markdown},
    {"--percent", false, false, read_percent},    {"--error", false, false, read_error},
    {"--host", false, false, read_host},          {"--first-call", false, false, read_first},
    {"--providers", true, false, read_providers}, {"--table", true, false, read_table},
    {"--without", true, false, read_without},     {"--seconds", true, false, read_seconds},
    {"--warm", false, false, read_warm},          {"--device", true, true, read_device},
    {"--resume", false, false, read_resume},      {"--limit", true, false, read_limit},
    {"--list", false, false, read_list},
};
enum { TABLE = sizeof table / sizeof *table };

static bool read_op(struct options *o, int *ops, const char *name) {
    const char *names[OPTIONS_LIST];
    int count = 0;
    for (int i = 0; problem_ops[i]; i++) {
        const struct op_cases *op = problem_ops[i];
        names[count++] = op->op;
        if (strcmp(name, op->op) != 0 && !(op->prefix && strcmp(name, op->prefix) == 0))
            continue;
        for (int k = 0; k < *ops; k++)
            if (o->op[k] == op)
                return true;
        o->op[(*ops)++] = op;
        return true;
    }
    return complain("there is no op '%s', wanted %s", name, spoken(names, count));
}

bool options_read(struct options *o, const char *verb, int argc, char **argv, int from) {
    *o = (struct options){.modes = ~0u, .dtype = RAFTER_BF16, .metric = {true}};
    const bool check = strcmp(verb, "check") == 0;
    int ops = 0;
    for (int i = from; i < argc; i++) {
        if (argv[i][0] != '-') {
            if (!read_op(o, &ops, argv[i]))
                return false;
            continue;
        }
        const size_t length = strcspn(argv[i], "="); /* --x=1024 is --x 1024 */
        int k = 0;
        while (k < TABLE && !(strlen(table[k].name) == length && strncmp(argv[i], table[k].name, length) == 0 &&
                              (table[k].for_check || !check)))
            k++;
        if (k == TABLE)
            return complain("rafter %s has no option '%s'; `rafter help` lists what there is", verb, argv[i]);
        const char *value = argv[i][length] == '=' ? argv[i] + length + 1 : NULL;
        if (table[k].takes_value && !value)
            value = i + 1 < argc ? argv[++i] : NULL;
        if (table[k].takes_value && (!value || !*value))
            return complain("%s wants a value", table[k].name);
        if (!table[k].takes_value && value)
            return complain("%s takes no value", table[k].name);
        if (!table[k].read(o, value))
            return false;
    }
    for (int i = 0; ops == 0 && problem_ops[i]; i++)
        o->op[i] = problem_ops[i];
    if (o->resume && !o->json)
        return complain("--resume wants --json FILE, the file to go on with");
    return true;
}
