/* SPDX-License-Identifier: Apache-2.0 */
/* The columns that run in Python. Each is a provider; the Python worker makes their calls. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/context.h"
#include "provider.h"
#include "worker.h"

enum { ALIGNMENT = 64, OPEN_LIMIT = 180, CALL_LIMIT = 60, DEATHS = 2 };

struct peer {
    int id, generation; /* generation: of the worker that knows this session */
};

/* The row in shared memory, and the generation of the worker that was told about it; 0: none. */
static struct {
    bool copied; /* the inputs are in shared memory */
    size_t end;
    int generation;
} row;

static int deaths[64]; /* how often the worker died, by provider */
static int next_id;

void peers_forget_row(void) {
    row.copied = false;
    row.generation = 0;
}

static size_t aligned(size_t bytes) {
    return (size_t)round_up((int64_t)bytes, ALIGNMENT);
}

static bool is_input(const problem_tensor *t) {
    return t->role == PROBLEM_INPUT || t->role == PROBLEM_UPSTREAM;
}

/* ---- asking ---------------------------------------------------------------------------------- */

struct order {
    char *text;
    size_t length;
    FILE *to;
};

static FILE *order_begin(struct order *o) {
    *o = (struct order){0};
    o->to = open_memstream(&o->text, &o->length);
    if (!o->to)
        abort();
    return o->to;
}

/* NULL: the session's reason says why. */
static struct json *order_send(struct session *s, struct order *o, double limit) {
    fputc('\n', o->to);
    fclose(o->to);
    const bool lived = worker_alive();
    struct json *answer = worker_ask(o->text, session_limit(s, limit), s->reason, sizeof s->reason);
    free(o->text);
    if (!answer && lived)
        deaths[s->provider->index]++;
    if (answer && json_get(answer, "error")) {
        session_fail(s, "%s", json_text(answer, "error"));
        s->missing = json_number(answer, "missing", 0) != 0;
        json_free(answer);
        return NULL;
    }
    return answer;
}

/* ---- the row --------------------------------------------------------------------------------- */

static void write_tensor(FILE *to, const problem_tensor *t, size_t at) {
    fprintf(to, "{\"name\": \"%s\", \"dtype\": \"%s\", \"at\": %zu, \"shape\": [", t->name,
            problem_dtype_name(t->dtype), at);
    for (int d = 0; d < t->ndim; d++)
        fprintf(to, "%s%lld", d ? ", " : "", (long long)t->shape[d]);
    fputs("]}", to);
}

static void write_list(FILE *to, const char *name, const int64_t *list, int count) {
    fprintf(to, ", \"%s\": [", name);
    for (int i = 0; i < count; i++)
        fprintf(to, "%s%lld", i ? ", " : "", (long long)list[i]);
    fputc(']', to);
}

/* A tensor of a generated problem: its layout, and the numbers that the worker draws for it. */
static void write_generated(FILE *to, const problem_tensor *t) {
    static const char *const fills[] = {"normal", "uniform", "labels", "count"}; /* by problem_fill */
    const int offset = t->layout == PROBLEM_UNALIGNED;
    fprintf(to, "{\"name\": \"%s\", \"dtype\": \"%s\", \"elements\": %lld, \"offset\": %d", t->name,
            problem_dtype_name(t->dtype), (long long)(t->memory_bytes / (size_t)problem_dtype_bytes(t->dtype)) + offset,
            offset);
    write_list(to, "shape", t->shape, t->ndim);
    write_list(to, "strides", t->stride, t->ndim);
    fprintf(to, ", \"fill\": \"%s\", \"scale\": %.17g, \"shift\": %.17g, \"low\": %lld, \"high\": %lld", fills[t->fill],
            t->scale, t->shift, (long long)t->low, (long long)t->high);
    if (t->some_ignored)
        fprintf(to, ", \"ignored\": %lld", (long long)t->ignored);
    fputc('}', to);
}

static void copy_bytes(char *to, const char *from, size_t bytes) {
    const size_t piece = (size_t)4 << 20;
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += piece)
        memcpy(to + at, from + at, (size_t)min64((int64_t)(bytes - at), (int64_t)piece));
}

/* The options of the call, as JSON. */
static void write_options(FILE *to, const struct problem_options *o) {
    fprintf(to,
            "{\"act\": \"%s\", \"dim\": %d, \"softmax_over\": \"%s\", \"offset\": %lld, \"reduction\": \"%s\", "
            "\"label_smoothing\": %g, \"z_loss\": %g, \"softcap\": %g, \"logit_scale\": %g}",
            problem_act_names[o->act], o->dim, problem_softmax_over_names[o->softmax_over], (long long)o->offset,
            problem_reduction_names[o->loss.reduction], (double)o->loss.label_smoothing, (double)o->loss.z_loss,
            (double)o->loss.softcap, (double)o->loss.logit_scale);
}

/* Copies the inputs to shared memory, once per row, and tells the worker, once per worker. */
static bool share_row(struct session *s) {
    if (row.copied && row.generation == worker_generation())
        return true;
    const bool generated = s->problem.generated;
    size_t bytes = 0;
    for (int i = 0; i < s->problem.tensors; i++)
        if (is_input(&s->problem.tensor[i]) && !generated)
            bytes += aligned(tensor_bytes(&s->problem.tensor[i]));
    char *memory = worker_memory(bytes + 1);
    if (!memory)
        return session_fail(s, "no memory to share with the Python worker");
    struct order order;
    FILE *to = order_begin(&order);
    fprintf(to, "{\"do\": \"row\", \"op\": \"%s\", \"path\": \"%s\", \"options\": ", s->problem.op->op,
            worker_memory_path());
    write_options(to, &s->problem.options);
    fputs(", \"tensors\": [", to);
    const char *separator = "";
    row.end = 0;
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (!is_input(t))
            continue;
        fputs(separator, to);
        separator = ", ";
        if (generated) {
            write_generated(to, t);
            continue;
        }
        if (!row.copied)
            copy_bytes(memory + row.end, t->memory, tensor_bytes(t));
        write_tensor(to, t, row.end);
        row.end += aligned(tensor_bytes(t));
    }
    row.copied = true;
    fputs("]}", to);
    struct json *answer = order_send(s, &order, OPEN_LIMIT);
    row.generation = answer ? worker_generation() : 0;
    json_free(answer);
    return row.generation != 0;
}

/* ---- the provider ---------------------------------------------------------------------------- */

static bool serves(const struct provider *provider, const problem *p, enum problem_mode mode) {
    (void)mode;
    return list_has(provider->ops, p->op->op) ||
           (strcmp(p->op->op, "act") == 0 && p->options.act == RAFTER_ACT_SOFTMAX &&
            list_has(provider->ops, "act:softmax"));
}

static bool start_worker(struct session *s) {
    const bool cuda = context_on_gpu(s->context);
    const struct worker_options options = {.device = cuda ? "cuda" : "cpu",
                                           .threads = rafter_context_threads(s->context),
                                           .warm = s->pace->warm,
                                           .evict_bytes = cuda ? s->pace->device_bytes : s->pace->other_bytes,
                                           .evictions = cuda ? s->pace->device_fills : 1};
    return worker_start(&options, s->reason, sizeof s->reason);
}

static bool begin(struct session *s) {
    struct peer *peer = s->state;
    s->missing = true;
    if (deaths[s->provider->index] >= DEATHS)
        return session_fail(s, "left out after it crashed the Python worker %d times", DEATHS);
    if (!start_worker(s))
        return false;
    s->missing = false;
    if (s->problem.generated && (problem_find(&s->problem, "entropy") || problem_find(&s->problem, "dtheta")))
        return session_fail(s, "left out: it does not compute all results of the call");
    if (!share_row(s))
        return false;
    struct order order;
    peer->id = ++next_id;
    fprintf(order_begin(&order), "{\"do\": \"open\", \"session\": %d, \"column\": \"%s\", \"mode\": \"%s\"}", peer->id,
            s->provider->name, problem_mode_names[s->mode]);
    struct json *answer = order_send(s, &order, OPEN_LIMIT);
    s->first_call = json_number(answer, "first", 0);
    s->overwrites = json_number(answer, "overwrites", 0) != 0;
    json_free(answer);
    peer->generation = answer ? worker_generation() : 0;
    return answer != NULL;
}

static bool open_peer(struct session *s) {
    s->state = calloc(1, sizeof(struct peer));
    return s->state ? begin(s) : session_fail(s, "no memory");
}

/* Sends one order about this session. A worker that was started since then is first told about the
 * row and the session. */
static struct json *ask(struct session *s, const char *word) {
    struct peer *peer = s->state;
    if ((!worker_alive() || peer->generation != worker_generation()) && !begin(s))
        return NULL;
    struct order order;
    fprintf(order_begin(&order), "{\"do\": \"%s\", \"session\": %d}", word, peer->id);
    return order_send(s, &order, CALL_LIMIT);
}

static bool time_peer(struct session *s, double *seconds) {
    struct json *answer = ask(s, "time");
    *seconds = json_number(answer, "seconds", -1);
    s->host_seconds = json_number(answer, "host", 0);
    json_free(answer);
    return answer && ((*seconds >= 0 && isfinite(*seconds) && isfinite(s->host_seconds)) ||
                      session_fail(s, "the Python worker gave no time"));
}

static bool measure_memory(struct session *s, double *bytes) {
    struct json *answer = ask(s, "memory");
    *bytes = json_number(answer, "bytes", 0);
    json_free(answer);
    return answer != NULL;
}

static size_t shared_bytes(const problem_tensor *t) {
    const size_t element = tensor_bytes(t) / (size_t)t->numel;
    return problem_is_sampled(t) ? aligned((size_t)t->listed * sizeof(int64_t)) + aligned((size_t)t->listed * element)
                                 : aligned(tensor_bytes(t));
}

static bool is_wanted(const struct session *s, const problem_tensor *t) {
    return problem_writes(t, s->mode) && !t->in_place_of && (t->list ? t->listed : t->numel) > 0;
}

static void write_wanted(FILE *to, const problem_tensor *t, char *memory, size_t at) {
    fprintf(to, "{\"name\": \"%s\", \"dtype\": \"%s\", ", t->name, problem_dtype_name(t->dtype));
    if (!problem_is_sampled(t)) {
        fprintf(to, "\"count\": %lld, \"at\": %zu}", (long long)t->numel, at);
        return;
    }
    int64_t *index = (int64_t *)(memory + at);
    for (int64_t k = 0; k < t->listed; k++)
        index[k] = t->list[k].index;
    fprintf(to, "\"count\": %lld, \"indices\": %zu, \"at\": %zu}", (long long)t->listed, at,
            at + aligned((size_t)t->listed * sizeof *index));
}

/* Copies a result from shared memory into the problem's tensor. */
static void take_result(problem_tensor *t, const char *memory, size_t at) {
    const size_t element = tensor_bytes(t) / (size_t)t->numel;
    if (!problem_is_sampled(t)) {
        copy_bytes(t->memory, memory + at, tensor_bytes(t));
        return;
    }
    const char *values = memory + at + aligned((size_t)t->listed * sizeof(int64_t));
    for (int64_t k = 0; k < t->listed; k++)
        memcpy(t->memory + (size_t)t->list[k].index * element, values + (size_t)k * element, element);
}

static bool collect_peer(struct session *s) {
    struct peer *peer = s->state;
    size_t bytes = row.end;
    for (int i = 0; i < s->problem.tensors; i++)
        if (is_wanted(s, &s->problem.tensor[i]))
            bytes += shared_bytes(&s->problem.tensor[i]);
    char *memory = worker_memory(bytes + 1);
    if (!memory)
        return session_fail(s, "no memory to share with the Python worker");
    struct order order;
    FILE *to = order_begin(&order);
    fprintf(to, "{\"do\": \"collect\", \"session\": %d, \"path\": \"%s\", \"results\": [", peer->id,
            worker_memory_path());
    const char *separator = "";
    size_t at = row.end;
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (!is_wanted(s, t))
            continue;
        fputs(separator, to);
        write_wanted(to, t, memory, at);
        at += shared_bytes(t);
        separator = ", ";
    }
    fputs("]}", to);
    struct json *answer = order_send(s, &order, CALL_LIMIT);
    const struct json *written = json_get(answer, "written");
    at = row.end;
    for (int i = 0; i < s->problem.tensors && answer; i++) {
        problem_tensor *t = &s->problem.tensor[i];
        if (!is_wanted(s, t))
            continue;
        const struct json *name = written ? written->first : NULL;
        while (name && strcmp(name->text, t->name) != 0)
            name = name->next;
        if (name)
            take_result(t, memory, at);
        else
            s->without |= 1u << i;
        at += shared_bytes(t);
    }
    json_free(answer);
    return answer != NULL;
}

static void close_peer(struct session *s) {
    struct peer *peer = s->state;
    if (peer && worker_alive() && peer->generation == worker_generation()) {
        struct order order;
        fprintf(order_begin(&order), "{\"do\": \"close\", \"session\": %d}", peer->id);
        json_free(order_send(s, &order, CALL_LIMIT));
    }
    free(peer);
    s->state = NULL;
}

double peers_matrix_rate(rafter_context *context, const struct pace *pace, rafter_dtype dtype) {
    struct session s = {.provider = &provider_to, .context = context, .pace = pace};
    if (!start_worker(&s))
        return 0;
    struct order order;
    fprintf(order_begin(&order), "{\"do\": \"matrix\", \"dtype\": \"%s\"}", problem_dtype_name(dtype));
    struct json *answer = order_send(&s, &order, CALL_LIMIT);
    const double rate = json_number(answer, "rate", 0);
    json_free(answer);
    return rate > 0 && isfinite(rate) ? rate : 0;
}

/* The package is Rafter, so it is held to Rafter's error bounds. */
#define COLUMN(column, has, early, is_package)                                                                         \
    const struct provider provider_##column = {.name = #column,                                                        \
                                               .exact = is_package,                                                    \
                                               .package = is_package,                                                  \
                                               .index = __COUNTER__,                                                   \
                                               .anywhere = true,                                                       \
                                               .ops = has,                                                             \
                                               .early_gradient = early,                                                \
                                               .serves = serves,                                                       \
                                               .open = open_peer,                                                      \
                                               .time = time_peer,                                                      \
                                               .memory = measure_memory,                                               \
                                               .collect = collect_peer,                                                \
                                               .close = close_peer};
#define RAFTER_PEER(column, has, early) COLUMN(column, has, early, false)
#define RAFTER_PACKAGE(column, has, early) COLUMN(column, has, early, true)
#include "peers.inc"
#undef RAFTER_PEER
