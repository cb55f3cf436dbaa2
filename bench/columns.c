/* SPDX-License-Identifier: Apache-2.0 */
/* The columns of a row: every provider's result is checked, then all are timed in turn. */
#include <math.h>
#include <string.h>

#include "core/sizes.h"
#include "harness/variants.h"
#include "progress.h"
#include "run.h"
#include "turns.h"

enum {
    LEAST_REPEATS = 5,
    PATIENCE = 4 /* a cell may take this many times its budget to reach LEAST_REPEATS */
};

/* Adds a note below every table of the row, about this x or about all rows. */
static void note(struct row_notes *notes, const char *name, const char *sentence, bool everywhere) {
    for (int m = 0; m < METRICS; m++) {
        struct table *t = notes->table[m];
        if (t && everywhere)
            table_add_note_about(t, name, sentence);
        else if (t)
            table_add_note(t, "%s at %s = %lld: %s", name, t->x_name, (long long)notes->x, sentence);
    }
}

static bool excluded(const struct run *run, const char *name) {
    return run->options.without && list_has(run->options.without, name);
}

static bool wanted(const struct run *run, const char *name) {
    const struct options *o = &run->options;
    return (!o->providers || list_has(o->providers, name)) && !excluded(run, name);
}

static bool runs_here(const struct run *run, const struct provider *provider) {
    return provider->anywhere || provider->device == context_on_gpu(run->context);
}

/* The context that is forced to this variant; NULL: it cannot be created. */
static rafter_context *context_of(struct run *run, const char *variant) {
    for (int i = 0; i < run->variants; i++)
        if (strcmp(run->variant[i].name, variant) == 0)
            return run->variant[i].context;
    const rafter_context_options options = {.device = context_device(run->context),
                                            .threads = rafter_context_threads(run->context),
                                            .batch_invariant = run->options.batch_invariant};
    rafter_context *const context = variant_context(variant, options);
    run->variant[run->variants++] = (struct variant_column){variant, context};
    return context;
}

/* Whether the session's variant serves its problem. Before the problem has memory, as for --list, the
 * answer is yes for every variant. */
static bool variant_serves(struct session *s) {
    char names[sizeof((struct cell *)0)->variant];
    if (s->problem.tensor[0].tensor.data) {
        problem_variant(&s->problem, s->context, s->mode, names, sizeof names);
        return strcmp(names, s->variant) == 0;
    }
    return true;
}

/* Adds a column for each variant of the op that runs here and serves the problem. */
static int list_variants(struct run *run, const struct session *rafter, struct column columns[], int count) {
    const struct options *const o = &run->options;
    const char *name, *reason;
    for (int i = 0; rafter_describe_variant(run->context, rafter->problem.op->op, i, &name, &reason); i++) {
        const bool named = o->providers && list_has(o->providers, name);
        if (reason || excluded(run, name) || !(o->variants || named) || count == REPORT_COLUMNS)
            continue;
        struct session s = *rafter;
        s.variant = name;
        s.context = context_of(run, name);
        if (s.context && variant_serves(&s))
            columns[count++] = (struct column){.name = name, .session = s};
    }
    return count;
}

int columns_list(struct run *run, const problem *p, enum problem_mode mode, struct column columns[]) {
    int count = 0;
    for (int i = 0; providers[i]; i++) {
        const bool ours = providers[i]->ours;
        if (!runs_here(run, providers[i]))
            continue;
        struct session s = {.provider = providers[i],
                            .problem = *p,
                            .mode = mode,
                            .context = run->context,
                            .pace = &run->pace,
                            .limit = run->options.limit};
        for (int a = 0; a == 0 || (ours && p->op->algorithms[a]); a++) {
            const char *name = ours ? p->op->algorithms[a] : providers[i]->name;
            s.problem = *p;
            s.problem.algorithm = a;
            const bool adapted = problem_adapt(&s.problem);
            const bool served = adapted && providers[i]->serves(providers[i], &s.problem, mode);
            if (served && wanted(run, name) && count < REPORT_COLUMNS)
                columns[count++] = (struct column){.name = name, .session = s};
            if (served && ours && a == 0)
                count = list_variants(run, &s, columns, count);
        }
    }
    return count;
}

/* ---- checking -------------------------------------------------------------------------------- */

/* The mean absolute value of a tensor's expected elements. */
static double expected_size(const problem_tensor *t) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < (t->list ? t->listed : t->numel); i++) {
        const double value = t->list ? t->list[i].value : t->expected[i];
        if (!isnan(value)) {
            sum += fabs(value);
            count++;
        }
    }
    return count > 0 ? sum / count : 0;
}

/* Other libraries round intermediate results to the tensors' dtype. They may be off by 32 units of
 * it relative to the value, and, where terms cancel, by 64 units relative to the tensor's mean
 * absolute value. A provider that computes another function is off by far more. */
static void allow_peer_errors(problem *p, enum problem_mode mode, rafter_dtype dtype) {
    const double unit = dtype == RAFTER_BF16 ? 0x1p-8 : dtype == RAFTER_F16 ? 0x1p-11 : 1e-5;
    for (int i = 0; i < p->tensors; i++)
        if (problem_writes(&p->tensor[i], mode)) {
            p->tensor[i].relative = fmax(p->tensor[i].relative, 32 * unit);
            p->tensor[i].absolute = fmax(p->tensor[i].absolute, 64 * unit * expected_size(&p->tensor[i]));
        }
}

/* Other libraries need not compute every statistic, but a forward must give its first output and a
 * backward all gradients. */
static bool gives_enough(struct session *s) {
    bool first = s->mode != PROBLEM_BACKWARD;
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (!problem_writes(t, s->mode))
            continue;
        if (s->without >> i & 1 && (first || t->role == PROBLEM_GRADIENT))
            return session_fail(s, "it did not compute %s", t->name);
        first = first && t->role != PROBLEM_OUTPUT;
    }
    return true;
}

/* Excludes the tensors that the session does not compute from the comparison. */
static void leave_out(problem *p, unsigned without) {
    for (int i = 0; i < p->tensors; i++)
        if (without >> i & 1)
            p->tensor[i].role = PROBLEM_INPUT;
}

static void lose(struct column *c, struct row_notes *notes) {
    note(notes, c->name, c->session.reason, c->session.missing);
    c->state = CELL_EMPTY;
    c->live = false;
}

/* Whether its forward also computes the gradient, in a table of forward or backward alone. */
static bool computes_early(const struct session *s) {
    return s->mode != PROBLEM_BOTH && s->provider->early_gradient &&
           list_has(s->provider->early_gradient, s->problem.op->op);
}

bool column_open(struct column *c, struct row_notes *notes, double *seconds) {
    struct session *s = &c->session;
    if (!session_open(s) || !session_time(s, seconds)) {
        lose(c, notes);
        return false;
    }
    c->first = s->first_call > 0 ? s->first_call : *seconds;
    if (s->provider->ours)
        problem_variant(&s->problem, s->context, s->mode, c->variant, sizeof c->variant);
    c->state = CELL_MEASURED;
    return c->live = true;
}

/* Runs the column once and compares its results with the oracle's. The time of this call is used
 * only if it is very long. */
void column_check(struct run *run, problem *p, struct column *c, struct row_notes *notes) {
    struct session *s = &c->session;
    if (context_on_gpu(run->context))
        problem_poison_device(p, run->context, s->mode);
    else
        problem_poison(p, s->mode);
    double seconds = 0;
    if (!column_open(c, notes, &seconds))
        return;
    if (!session_collect(s) || !gives_enough(s)) {
        lose(c, notes);
        return;
    }
    problem judged = s->problem;
    leave_out(&judged, s->without);
    if (!s->provider->exact)
        allow_peer_errors(&judged, s->mode, run->options.dtype);
    const struct problem_verdict verdict = problem_compare(&judged, s->mode);
    c->max_error = verdict.max_error;
    c->state = verdict.good ? CELL_MEASURED : CELL_WRONG;
    c->live = verdict.good;
    if (!verdict.good)
        note(notes, c->name, verdict.sentence, false);
    if (seconds >= run->budget.once && seconds >= PATIENCE * run->budget.cell)
        c->done = samples_add(&c->samples, seconds) && samples_add(&c->host, s->host_seconds);
    if (computes_early(s))
        note(notes, c->name, "its forward also computes the gradient: compare fwd+bwd", true);
    if (s->overwrites && s->mode != PROBLEM_FORWARD)
        note(notes, c->name, "its gradient overwrites its input", true);
}

/* ---- measuring ------------------------------------------------------------------------------- */

/* On a GPU: adds a note below the table if the device may have waited for the host while a call was timed. */
static void look_at_host(const struct run *run, struct column *c, const struct row_notes *notes) {
    if (!c->live || c->host.count == 0 || run->pace.warm || !context_on_gpu(run->context) ||
        samples_summary(&c->host).median <= run->pace.device_seconds)
        return;
    struct row_notes speed_only = *notes;
    speed_only.table[METRIC_MEMORY] = NULL;
    note(&speed_only, c->name,
         "in some rows the host takes longer to launch the call than the device takes to fill the caches: times may "
         "include waiting",
         true);
}

static int still_timed(struct column columns[], int count, struct column *timed[]) {
    int n = 0;
    for (int i = 0; i < count; i++)
        if (columns[i].live && !columns[i].done)
            timed[n++] = &columns[i];
    return n;
}

void columns_time(struct run *run, struct column columns[], int count, struct row_notes *notes) {
    struct column *timed[REPORT_COLUMNS];
    for (int round = 0, n; (n = still_timed(columns, count, timed)) > 0 && !run_interrupted; round++) {
        for (int i = 0; i < n && !run_interrupted; i++) {
            struct column *c = timed[turn_of(round, i, n)];
            const double start = clock_seconds();
            double seconds;
            if (!session_time(&c->session, &seconds)) {
                lose(c, notes);
                continue;
            }
            if (!samples_add(&c->samples, seconds) || !samples_add(&c->host, c->session.host_seconds)) {
                session_fail(&c->session, "no memory");
                lose(c, notes);
                continue;
            }
            c->used += clock_seconds() - start;
            c->done = (c->samples.count >= LEAST_REPEATS && c->used >= run->budget.cell) ||
                      c->used >= PATIENCE * run->budget.cell;
        }
    }
    unrest_look_at_gpu(&run->watch, &run->report);
    for (int i = 0; i < count; i++)
        look_at_host(run, &columns[i], notes);
}

void columns_weigh(struct column columns[], int count, struct row_notes *notes) {
    for (int i = 0; i < count && !run_interrupted; i++) {
        struct column *c = &columns[i];
        if (!c->live)
            continue;
        if (!session_memory(&c->session, &c->bytes)) {
            struct row_notes memory_only = *notes;
            memory_only.table[METRIC_SPEED] = NULL;
            note(&memory_only, c->name, c->session.reason, c->session.missing);
            c->bytes = -1;
        }
    }
}

/* ---- reporting ------------------------------------------------------------------------------- */

/* At most REPORT_SAMPLES of the samples, evenly spread, in milliseconds. */
static struct samples thinned(const struct samples *all) {
    struct samples few = {0};
    const int count = (int)min64(all->count, REPORT_SAMPLES);
    for (int i = 0; i < count; i++)
        samples_add(&few, 1e3 * all->value[(int64_t)i * all->count / count]);
    return few;
}

static struct cell speed_cell(struct column *c, double roof) {
    struct cell cell = {.state = c->state, .max_error = c->max_error};
    memcpy(cell.variant, c->variant, sizeof cell.variant);
    if (c->state != CELL_MEASURED)
        return cell;
    cell.samples = thinned(&c->samples);
    const struct summary s = samples_summary(&c->samples), host = samples_summary(&c->host);
    cell.value = (struct summary){.median = 1e3 * s.median, .p10 = 1e3 * s.p10, .p90 = 1e3 * s.p90};
    cell.repeats = c->samples.count;
    cell.share = roof / s.median;
    cell.host = 1e6 * host.median;
    cell.first = 1e3 * c->first;
    return cell;
}

static struct cell memory_cell(const struct column *c) {
    struct cell cell = {.state = c->bytes < 0 ? CELL_EMPTY : c->state, .max_error = c->max_error, .repeats = 1};
    memcpy(cell.variant, c->variant, sizeof cell.variant);
    const double mebibytes = c->bytes / (1 << 20);
    if (cell.state == CELL_MEASURED)
        cell.value = (struct summary){mebibytes, mebibytes, mebibytes};
    return cell;
}

void columns_report(struct column columns[], int count, struct table *table, struct row *row, double roof) {
    for (int i = 0; i < count; i++) {
        const int k = table_column(table, columns[i].name);
        table->ours[k] = columns[i].session.provider->ours || columns[i].session.provider->package;
        table->early[k] = computes_early(&columns[i].session);
        table->over[k] |= columns[i].session.overwrites && columns[i].session.mode != PROBLEM_FORWARD;
        row->cell[k] = table->metric == METRIC_MEMORY ? memory_cell(&columns[i]) : speed_cell(&columns[i], roof);
    }
}

void columns_close(struct column columns[], int count) {
    for (int i = 0; i < count; i++) {
        session_close(&columns[i].session);
        samples_free(&columns[i].samples);
        samples_free(&columns[i].host);
    }
}
