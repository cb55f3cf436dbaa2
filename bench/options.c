/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "harness/variants.h"
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

/* The index of the value among the names; -1 after an error message. */
static int choose(const char *option, const char *value, const char *const names[], int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(value, names[i]) == 0)
            return i;
    complain("%s is '%s', wanted %s", option, value, spoken(names, count));
    return -1;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool read_preset(struct options *o, const char *value) {
    static const char *const names[] = {"quick", "seeds", "models", "map"};
    const int index = choose("--preset", value, names, 4);
    o->seeds = index == 1 || index == 2;
    o->models = index == 2;
    o->map = index == 3;
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
    o->has_dtype = true;
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
            return complain("--x is '%s', wanted sizes separated by commas, such as 1024,2048", value);
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

static bool read_batch_invariant(struct options *o, const char *value) {
    (void)value;
    return o->batch_invariant = true;
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

static bool read_cells(struct options *o, const char *value) {
    char *end;
    o->cells = strtoll(value, &end, 10);
    if (end == value || *end != '\0' || o->cells < 1 || o->cells > 100000)
        return complain("--cells is '%s', wanted a number of cells per map, from 1 to 100000", value);
    return true;
}

static bool read_seed(struct options *o, const char *value) {
    char *end;
    o->seed = strtoull(value, &end, 10);
    if (end == value || *end != '\0' || *value == '-')
        return complain("--seed is '%s', wanted a number", value);
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
    char text[REPORT_NAME];
    snprintf(text, sizeof text, "%.*s", (int)length, name);
    return variant_exists(text);
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

static bool read_variants(struct options *o, const char *value) {
    (void)value;
    return o->variants = true;
}

/* ---- the call of `rafter info OP` ------------------------------------------------------------ */

static bool read_shape(struct options *o, const char *value) {
    struct problem_request *const r = &o->request;
    r->ndim = 0;
    for (const char *at = value;; at++) {
        char *end;
        const long long size = strtoll(at, &end, 10);
        if (end == at || size < 0 || (*end != 'x' && *end != '\0'))
            return complain("--shape is '%s', wanted sizes separated by x, such as 32768x4096", value);
        if (r->ndim == PROBLEM_DIMS)
            return complain("--shape has more than %d dimensions", PROBLEM_DIMS);
        r->shape[r->ndim++] = size;
        if (*end == '\0')
            break;
        at = end;
    }
    return o->has_shape = true;
}

static bool read_direction(struct options *o, const char *value) {
    static const char *const names[] = {"forward", "backward"}; /* in the order of problem_mode */
    const int index = choose("--direction", value, names, 2);
    o->modes = 1u << (index & 31);
    return index >= 0;
}

static bool read_act(struct options *o, const char *value) {
    const int index = choose("--act", value, problem_act_names, RAFTER_ACT_SOFTMAX + 1);
    o->request.options.act = (rafter_act_kind)index;
    return index >= 0;
}

static bool read_softmax_over(struct options *o, const char *value) {
    const int index = choose("--softmax-over", value, problem_softmax_over_names, RAFTER_OVER_SEQUENCE + 1);
    o->request.options.softmax_over = (rafter_softmax_over)index;
    return index >= 0;
}

static bool read_reduction(struct options *o, const char *value) {
    const int index = choose("--reduction", value, problem_reduction_names, RAFTER_NONE + 1);
    o->request.options.loss.reduction = (rafter_reduction)index;
    return index >= 0;
}

static bool read_integer(const char *option, const char *value, int64_t *to) {
    char *end;
    *to = strtoll(value, &end, 10);
    return (end != value && *end == '\0') || complain("%s is '%s', wanted an integer", option, value);
}

static bool read_float(const char *option, const char *value, float *to) {
    char *end;
    *to = strtof(value, &end);
    return (end != value && *end == '\0') || complain("%s is '%s', wanted a number", option, value);
}

static bool read_dim(struct options *o, const char *value) {
    int64_t dim = 0;
    const bool good = read_integer("--dim", value, &dim);
    o->request.options.dim = (int)dim;
    return good;
}

static bool read_classes(struct options *o, const char *value) {
    return read_integer("--classes", value, &o->request.classes);
}

static bool read_offset(struct options *o, const char *value) {
    return read_integer("--offset", value, &o->request.options.offset);
}

static bool read_label_smoothing(struct options *o, const char *value) {
    return read_float("--label-smoothing", value, &o->request.options.loss.label_smoothing);
}

static bool read_z_loss(struct options *o, const char *value) {
    return read_float("--z-loss", value, &o->request.options.loss.z_loss);
}

static bool read_softcap(struct options *o, const char *value) {
    return read_float("--softcap", value, &o->request.options.loss.softcap);
}

static bool read_logit_scale(struct options *o, const char *value) {
    return read_float("--logit-scale", value, &o->request.options.loss.logit_scale);
}

static bool read_algorithm(struct options *o, const char *value) {
    o->algorithm = value;
    return true;
}

static bool read_bias(struct options *o, const char *value) {
    (void)value;
    return o->request.bias = true;
}

static bool read_class_weight(struct options *o, const char *value) {
    (void)value;
    return o->request.class_weight = true;
}

static bool read_extras(struct options *o, const char *value) {
    (void)value;
    return o->request.extras = true;
}

static bool read_in_place(struct options *o, const char *value) {
    (void)value;
    return o->request.in_place = true;
}

/* ---- the command line ------------------------------------------------------------------------ */

enum { BENCH = 1, CHECK = 2, INFO = 4 }; /* the verbs that an option belongs to */

static const struct {
    const char *name;
    bool takes_value;
    unsigned verbs;
    bool (*read)(struct options *o, const char *value);
} table[] = {
    {"--preset", true, BENCH, read_preset},
    {"--metric", true, BENCH, read_metric},
    {"--mode", true, BENCH | INFO, read_mode},
    {"--x", true, BENCH, read_x},
    {"--dtype", true, BENCH | INFO, read_dtype},
    {"--threads", true, BENCH | CHECK | INFO, read_threads},
    {"--batch-invariant", false, BENCH | INFO, read_batch_invariant},
    {"--cells", true, BENCH, read_cells},
    {"--seed", true, BENCH, read_seed},
    {"--json", true, BENCH, read_json},
    {"--csv", true, BENCH, read_csv},
    {"--html", true, BENCH, read_html},
    {"--markdown", false, BENCH, read_markdown},
    {"--percent", false, BENCH, read_percent},
    {"--error", false, BENCH, read_error},
    {"--host", false, BENCH, read_host},
    {"--first-call", false, BENCH, read_first},
    {"--providers", true, BENCH, read_providers},
    {"--variants", false, BENCH, read_variants},
    {"--table", true, BENCH, read_table},
    {"--without", true, BENCH, read_without},
    {"--seconds", true, BENCH, read_seconds},
    {"--warm", false, BENCH, read_warm},
    {"--device", true, BENCH | CHECK | INFO, read_device},
    {"--resume", false, BENCH, read_resume},
    {"--limit", true, BENCH, read_limit},
    {"--list", false, BENCH, read_list},
    {"--shape", true, INFO, read_shape},
    {"--direction", true, INFO, read_direction},
    {"--algorithm", true, INFO, read_algorithm},
    {"--act", true, INFO, read_act},
    {"--dim", true, INFO, read_dim},
    {"--softmax-over", true, INFO, read_softmax_over},
    {"--offset", true, INFO, read_offset},
    {"--classes", true, INFO, read_classes},
    {"--bias", false, INFO, read_bias},
    {"--reduction", true, INFO, read_reduction},
    {"--label-smoothing", true, INFO, read_label_smoothing},
    {"--z-loss", true, INFO, read_z_loss},
    {"--softcap", true, INFO, read_softcap},
    {"--logit-scale", true, INFO, read_logit_scale},
    {"--class-weight", false, INFO, read_class_weight},
    {"--extras", false, INFO, read_extras},
    {"--in-place", false, INFO, read_in_place},
};
enum { TABLE = sizeof table / sizeof *table };

static bool read_op(struct options *o, const char *name) {
    const char *names[OPTIONS_LIST];
    int count = 0;
    for (int i = 0; problem_ops[i]; i++) {
        const struct op_cases *op = problem_ops[i];
        names[count++] = op->op;
        if (strcmp(name, op->op) != 0 && !(op->prefix && strcmp(name, op->prefix) == 0))
            continue;
        int k = 0;
        while (k < o->named && o->op[k] != op)
            k++;
        if (k == o->named)
            o->op[o->named++] = op;
        return true;
    }
    return complain("there is no op '%s', wanted %s", name, spoken(names, count));
}

/* Reads one option, and its value, which may be the next argument. */
static bool read_option(struct options *o, const char *verb, unsigned verb_bit, int argc, char **argv, int *i) {
    const char *const argument = argv[*i];
    const size_t length = strcspn(argument, "="); /* --x=1024 is --x 1024 */
    int k = 0;
    while (k < TABLE && !(strlen(table[k].name) == length && strncmp(argument, table[k].name, length) == 0 &&
                          table[k].verbs & verb_bit))
        k++;
    if (k == TABLE)
        return complain("rafter %s has no option '%s'; `rafter help` lists the options", verb, argument);
    const char *value = argument[length] == '=' ? argument + length + 1 : NULL;
    if (table[k].takes_value && !value)
        value = *i + 1 < argc ? argv[++*i] : NULL;
    if (table[k].takes_value && (!value || !*value))
        return complain("%s wants a value", table[k].name);
    if (!table[k].takes_value && value)
        return complain("%s takes no value", table[k].name);
    return table[k].read(o, value);
}

/* The map has its own shapes, dtypes and columns. */
static bool settle_map(struct options *o) {
    if (o->x[0] || o->has_dtype || o->list || o->first || o->warm || !o->metric[METRIC_SPEED] ||
        o->metric[METRIC_MEMORY])
        return complain("--preset map takes no --x, --dtype, --list, --first-call or --warm, and measures speed only");
    for (int i = 0; i < o->named; i++)
        if (o->op[i]->maps == 0)
            return complain("%s has no map", o->op[i]->op);
    o->percent = true;
    if (!o->providers)
        o->providers = o->device.device_type == kDLCUDA ? "rafter" : "rafter,to";
    return true;
}

bool options_read(struct options *o, const char *verb, int argc, char **argv, int from) {
    *o = (struct options){
        .modes = ~0u, .dtype = RAFTER_BF16, .seed = 1, .metric = {true}, .request = {.options = {.dim = -1}}};
    const unsigned verb_bit = strcmp(verb, "check") == 0 ? CHECK : strcmp(verb, "info") == 0 ? INFO : BENCH;
    for (int i = from; i < argc; i++)
        if (argv[i][0] == '-' ? !read_option(o, verb, verb_bit, argc, argv, &i) : !read_op(o, argv[i]))
            return false;
    for (int i = 0; o->named == 0 && problem_ops[i]; i++)
        o->op[i] = problem_ops[i];
    if (o->resume && !o->json)
        return complain("--resume wants --json FILE, the file to continue");
    if ((o->cells > 0 || o->seed != 1) && !o->map)
        return complain("--cells and --seed belong to --preset map");
    return !o->map || settle_map(o);
}
