/* Walks tables x rows x modes x providers: check each provider's result, then time them all in turn. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <omp.h>

#include "core/backend.h"
#include "machine.h"
#include "options.h"
#include "progress.h"
#include "provider.h"
#include "report.h"
#include "roofline.h"
#include "verbs.h"

enum {
    LEAST_REPEATS = 5,
    PATIENCE = 4,      /* a cell may take so many times its time to come to LEAST_REPEATS */
    CHECKED = 1 << 20, /* elements of the largest tensor that the oracle is asked for */
    ANSWERS = 1 << 27  /* at most so many doubles hold the oracle's answers for a tensor */
};

/* Times in seconds, of a preset. */
struct budget {
    double cell; /* repeats of one cell */
    double once; /* a call this long is not made a second time */
    double peer; /* a peer's call that would take longer is left out */
};
static const struct budget quick_budget = {0.05, 1, 2}, seeds_budget = {1, 10, 60};

struct run {
    struct options options;
    rafter_context *context;
    struct pace pace;
    struct roofline roofline;
    struct report report;
    struct budget budget;
};

/* Set by Ctrl-C, which ends the run after the call at hand; a second one ends the process. */
static volatile sig_atomic_t interrupted;

static void interrupt(int signal) {
    (void)signal;
    interrupted = 1;
}

/* ---- columns ----------------------------------------------------------------------------------------------------- */

/* One column of one row. */
struct column {
    struct session session;
    const char *name;
    struct cell cell;
    struct samples samples;
    double used; /* seconds, all told */
    bool live;   /* open, and right so far */
    bool done;
};

static bool wanted(const struct run *run, const char *name) {
    return !run->options.providers || list_has(run->options.providers, name);
}

/* The columns of this problem's table: every algorithm of the library, then the other providers. */
static int list_columns(struct run *run, const problem *p, enum problem_mode mode, struct column columns[]) {
    int count = 0;
    for (int i = 0; providers[i]; i++) {
        const bool ours = providers[i]->ours;
        if (providers[i]->device != (run->context->cuda != NULL))
            continue;
        for (int a = 0; a == 0 || (ours && p->op->algorithms[a]); a++) {
            const char *name = ours ? p->op->algorithms[a] : providers[i]->name;
            struct session s = {
                .provider = providers[i], .problem = *p, .mode = mode, .context = run->context, .pace = &run->pace};
            s.problem.algorithm = a;
            if (wanted(run, name) && providers[i]->serves(&s.problem, mode) && count < REPORT_COLUMNS)
                columns[count++] = (struct column){.name = name, .session = s};
        }
    }
    return count;
}

/* ---- checking ---------------------------------------------------------------------------------------------------- */

/* The mean size of what the oracle expects of a tensor. */
static double expected_size(const problem_tensor *t) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < (t->listed ? t->listed : t->numel); i++) {
        const double value = t->listed ? t->expected[2 * i + 1] : t->expected[i];
        if (!isnan(value)) {
            sum += fabs(value);
            count++;
        }
    }
    return count > 0 ? sum / count : 0;
}

/* Peers round intermediate results to the tensors' dtype: they may be off by 16 units of it relative to the value, and,
 * where terms cancel, by 64 units of the tensor's mean size. Something that computes another function is off by far
 * more. */
static void allow_peer_errors(problem *p, enum problem_mode mode, rafter_dtype dtype) {
    const double unit = dtype == RAFTER_BF16 ? 0x1p-8 : dtype == RAFTER_F16 ? 0x1p-11 : 1e-5;
    for (int i = 0; i < p->tensors; i++)
        if (writes_tensor(mode, &p->tensor[i])) {
            p->tensor[i].relative = fmax(p->tensor[i].relative, 16 * unit);
            p->tensor[i].absolute = fmax(p->tensor[i].absolute, 64 * unit * expected_size(&p->tensor[i]));
        }
}

/* Runs the column once and compares its result with the oracle's. The call's time counts only if it is a very long one.
 */
static void check_column(struct run *run, problem *p, struct column *c, enum problem_mode mode, struct table *table,
                         int64_t x) {
    problem_poison(p, mode);
    double seconds = 0;
    if (!session_open(&c->session) || !session_time(&c->session, &seconds)) {
        table_add_note(table, "%s at %s = %lld: %s", c->name, table->x_name, (long long)x, c->session.reason);
        return;
    }
    session_collect(&c->session);
    problem judged = *p;
    if (!c->session.provider->exact)
        allow_peer_errors(&judged, mode, run->options.dtype);
    const struct problem_verdict verdict = problem_compare(&judged, mode);
    c->cell.max_error = verdict.max_error;
    c->cell.state = verdict.good ? CELL_MEASURED : CELL_WRONG;
    if (!verdict.good)
        table_add_note(table, "%s at %s = %lld: %s", c->name, table->x_name, (long long)x, verdict.sentence);
    c->live = verdict.good;
    if (seconds >= run->budget.once && seconds >= PATIENCE * run->budget.cell)
        c->done = samples_add(&c->samples, seconds);
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static void time_columns(struct run *run, struct column columns[], int count, struct table *table, int64_t x) {
    for (bool again = true; again && !interrupted;) {
        again = false;
        for (int i = 0; i < count && !interrupted; i++) {
            struct column *c = &columns[i];
            if (!c->live || c->done)
                continue;
            const double start = clock_seconds();
            double seconds;
            if (!session_time(&c->session, &seconds) || !samples_add(&c->samples, seconds)) {
                table_add_note(table, "%s at %s = %lld: %s", c->name, table->x_name, (long long)x, c->session.reason);
                c->cell.state = CELL_EMPTY;
                c->live = false;
                continue;
            }
            c->used += clock_seconds() - start;
            c->done = (c->samples.count >= LEAST_REPEATS && c->used >= run->budget.cell) ||
                      c->used >= PATIENCE * run->budget.cell;
            again |= !c->done;
        }
    }
}

/* Bytes that the call writes for its caller, and those that it held besides. */
static double memory_of(const struct column *c, const problem *p, enum problem_mode mode) {
    double bytes = (double)c->session.scratch;
    for (int i = 0; i < p->tensors; i++)
        if (writes_tensor(mode, &p->tensor[i]) && !p->tensor[i].in_place_of)
            bytes += (double)tensor_bytes(&p->tensor[i]);
    return bytes;
}

static void summarise(struct run *run, struct column *c, const problem *p, enum problem_mode mode, double roof) {
    if (c->cell.state != CELL_MEASURED)
        return;
    if (run->options.metric == METRIC_MEMORY) {
        const double mebibytes = memory_of(c, p, mode) / (1 << 20);
        c->cell.value = (struct summary){mebibytes, mebibytes, mebibytes};
        return;
    }
    const struct summary s = samples_summary(&c->samples);
    c->cell.value = (struct summary){.median = 1e3 * s.median, .p10 = 1e3 * s.p10, .p90 = 1e3 * s.p90};
    c->cell.repeats = c->samples.count;
    c->cell.share = roof / s.median;
}

/* ---- rows and tables --------------------------------------------------------------------------------------------- */

/* What the columns took on the row before, to foresee a row that would take too long. */
struct history {
    double seconds[REPORT_COLUMNS], work[REPORT_COLUMNS];
};

static struct table *find_table(struct run *run, const problem *p, enum problem_mode mode, const char *x_name) {
    char title[sizeof((struct table *)0)->title];
    snprintf(title, sizeof title, "%s-%s-%s-%s", p->op->prefix, metric_names[run->options.metric],
             problem_mode_names[mode], p->title);
    for (int i = 0; i < run->report.tables; i++)
        if (strcmp(run->report.table[i].title, title) == 0)
            return &run->report.table[i];
    struct table *t = report_add_table(&run->report);
    memcpy(t->title, title, sizeof title);
    t->x_name = x_name;
    t->metric = run->options.metric;
    t->shares = run->options.percent && t->metric == METRIC_SPEED;
    return t;
}

/* One mode of one row, whose tensors are allocated. */
static void bench_mode(struct run *run, problem *p, const struct bench_row *row, enum problem_mode mode,
                       struct table *table, struct history *history) {
    struct column columns[REPORT_COLUMNS];
    const int count = list_columns(run, p, mode, columns);
    if (mode != PROBLEM_FORWARD) /* leave the outputs that backward, and the oracle's, reads */
        problem_call(p, run->context, PROBLEM_FORWARD);
    progress("%s %s=%lld: oracle", table->title, table->x_name, (long long)row->x);
    problem_solve(p, mode);

    struct row result = {.x = row->x};
    p->op->cost(p, mode, &result.bytes, &result.flops);
    const double work = result.flops > 0 ? result.flops : result.bytes;
    for (int i = 0; i < count && !interrupted; i++) {
        struct column *c = &columns[i];
        progress("%s %s=%lld: checking %s", table->title, table->x_name, (long long)row->x, c->name);
        const double foreseen = history->work[i] > 0 ? history->seconds[i] * work / history->work[i] : 0;
        if (foreseen > run->budget.peer && !c->session.provider->exact)
            table_add_note(table, "%s at %s = %lld: left out, a call would take about %.1f s", c->name, table->x_name,
                           (long long)row->x, foreseen);
        else
            check_column(run, p, c, mode, table, row->x);
    }
    double roof = 0;
    if (run->options.metric == METRIC_SPEED) {
        progress("%s %s=%lld: timing", table->title, table->x_name, (long long)row->x);
        if (run->options.percent && !interrupted)
            roof = roofline_seconds(&run->roofline, p, row, mode);
        time_columns(run, columns, count, table, row->x);
    }

    table->columns = count;
    for (int i = 0; i < count; i++) {
        if (!interrupted)
            summarise(run, &columns[i], p, mode, roof);
        table->column[i] = columns[i].name;
        result.cell[i] = columns[i].cell;
        if (columns[i].cell.state == CELL_MEASURED && run->options.metric == METRIC_SPEED) {
            history->seconds[i] = 1e-3 * columns[i].cell.value.median;
            history->work[i] = work;
        }
        session_close(&columns[i].session);
        samples_free(&columns[i].samples);
    }
    if (!interrupted) /* a row that is not finished is not one */
        *table_add_row(table) = result;
}

/* What the row takes: its tensors, and what checking them does. */
static double row_bytes(const problem *p) {
    double bytes = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        bytes += (double)tensor_bytes(t);
        if (t->in_place_of) /* the input is kept, as it is stored and in fp64 */
            bytes += (double)t->numel * sizeof(double);
        else if (t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT)
            bytes += fmin((double)t->numel, ANSWERS) * sizeof(double);
    }
    return bytes;
}

static void bench_row(struct run *run, const struct op_cases *op, const struct bench_row *row,
                      struct history history[PROBLEM_MODES]) {
    const struct bench_table *kind = &op->table[row->table];
    problem p = {.op = op};
    op->make_bench(&p, row);
    int64_t largest = 1;
    for (int i = 0; i < p.tensors; i++)
        largest = p.tensor[i].numel > largest ? p.tensor[i].numel : largest;
    const int64_t sample = (largest + CHECKED - 1) / CHECKED;
    p.sample = p.sample > sample ? p.sample : sample;

    const double bytes = row_bytes(&p), available = (double)machine_free_memory();
    const bool there = bytes <= 0.8 * available && problem_allocate(&p, 1);
    for (int mode = 0; mode < PROBLEM_MODES && !interrupted; mode++) {
        if (!(kind->modes & run->options.modes & 1u << mode))
            continue;
        struct table *table = find_table(run, &p, (enum problem_mode)mode, kind->x_name);
        if (there)
            bench_mode(run, &p, row, (enum problem_mode)mode, table, &history[mode]);
        else
            table_add_note(table, "%s = %lld: left out, it takes %.0f MiB and %.0f MiB are free", kind->x_name,
                           (long long)row->x, bytes / (1 << 20), available / (1 << 20));
    }
    if (there)
        problem_free(&p);
}

static void bench_op(struct run *run, const struct op_cases *op) {
    for (int t = 0; t < op->tables && !interrupted; t++) {
        const struct bench_table *kind = &op->table[t];
        if (!(kind->modes & run->options.modes))
            continue;
        const int64_t *x = run->options.x[0] ? run->options.x : run->options.seeds ? kind->seeds_x : kind->quick_x;
        const int before = run->report.tables;
        struct history history[PROBLEM_MODES] = {0};
        for (; *x && !interrupted; x++) {
            const struct bench_row row = {
                .table = t, .x = *x, .dtype = run->options.dtype, .quick = !run->options.seeds};
            bench_row(run, op, &row, history);
        }
        progress_clear();
        for (int i = before; i < run->report.tables; i++)
            table_print(&run->report.table[i], stdout);
        fflush(stdout);
    }
}

/* ---- the verb ---------------------------------------------------------------------------------------------------- */

static int fail(const char *what, const char *why) {
    fprintf(stderr, "rafter: %s: %s\n", what, why);
    return 1;
}

static bool open_run(struct run *run) {
    const rafter_context_options options = {
        .size = sizeof options, .device = run->options.device, .threads = run->options.threads};
    const rafter_status status = rafter_context_create(&run->context, &options);
    if (status != RAFTER_OK && run->options.device.device_type == kDLCUDA)
        return !fail("no CUDA context (is there a GPU, and librafter_cuda beside this program?)",
                     rafter_status_name(status));
    if (status != RAFTER_OK)
        return !fail("no context (is RAFTER_VARIANT one that this machine can run?)", rafter_status_name(status));
    const int threads = rafter_context_threads(run->context);
    omp_set_num_threads(threads);
    run->budget = run->options.seeds ? seeds_budget : quick_budget;
    if (run->options.seconds > 0)
        run->budget.cell = run->options.seconds;
    if (!pace_create(&run->pace, run->options.warm, threads))
        return !fail("cannot flush the caches", "no memory");
    if (run->options.percent && run->options.metric == METRIC_SPEED) {
        progress("measuring the rates of memory");
        if (!roofline_create(&run->roofline, run->context))
            return !fail("cannot measure the rates of memory", "no memory");
        progress_clear();
        printf("roofline: copy %.1f GB/s, read %.1f GB/s, ", run->roofline.copy / 1e9, run->roofline.read / 1e9);
        if (run->context->cuda) {
            struct rafter_cuda_facts facts;
            run->context->cuda->facts(run->context, &facts);
            printf("%s\n\n", facts.name);
        } else {
            printf("%d threads\n\n", threads);
        }
    }
    return true;
}

static void close_run(struct run *run) {
    rafter_context_destroy(run->context);
    pace_destroy(&run->pace);
    report_free(&run->report);
}

/* Idle OpenMP threads spin for milliseconds by default, and would take the processor from the provider that is measured
 * next in a process of its own. A fraction of a millisecond bridges the gap between two loops of one call all the same.
 * The runtime reads this when it is loaded, so start over with it. */
static void shorten_spinning(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME"))
        return;
    setenv("GOMP_SPINCOUNT", "10000", 1); /* GCC's runtime: turns */
    setenv("KMP_BLOCKTIME", "1", 1);      /* LLVM's: milliseconds */
    execv("/proc/self/exe", argv);        /* where that fails, go on as we are */
}

int verb_bench(int argc, char **argv) {
    struct run run = {0};
    if (!options_read(&run.options, "bench", argc, argv, 2))
        return 2;
    shorten_spinning(argv);
    struct output json = {0};
    if (run.options.json && !output_open(&json, run.options.json))
        return fail(run.options.json, strerror(errno));
    if (run.options.csv && mkdir(run.options.csv, 0777) != 0 && errno != EEXIST)
        return fail(run.options.csv, strerror(errno));

    const struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);

    int status = 1;
    if (open_run(&run)) {
        for (int i = 0; run.options.op[i] && !interrupted; i++)
            bench_op(&run, run.options.op[i]);
        status = interrupted ? 130 : 0;
        run.report.read = run.roofline.read;
        run.report.copy = run.roofline.copy;
        run.report.matrix = run.roofline.matrix[run.options.dtype];
        if (json.file) {
            json_write(&run.report, json.file, rafter_context_threads(run.context), argc, argv);
            if (!output_commit(&json))
                status = fail(run.options.json, strerror(errno));
        }
        if (run.options.csv && !csv_write(&run.report, run.options.csv))
            status = 1;
        if (run.report.tables == 0 && status == 0)
            status = fail("nothing to measure", "no table has this mode");
    }
    output_discard(&json);
    close_run(&run);
    return status;
}
