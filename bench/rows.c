/* SPDX-License-Identifier: Apache-2.0 */
/* The loop over tables, rows and modes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/sizes.h"
#include "machine.h"
#include "progress.h"
#include "run.h"

enum {
    CHECKED = 1 << 20, /* elements of the largest tensor that are checked */
    SAVE_EVERY = 10    /* seconds between writes of the files, after a finished row */
};

/* The columns' times on the row before, to predict calls that would take too long. */
struct history {
    double seconds[REPORT_COLUMNS], work[REPORT_COLUMNS];
};

/* The table of this problem and metric; adds it if there is none. NULL: not requested. */
static struct table *find_table(struct run *run, const problem *p, enum problem_mode mode, enum metric metric,
                                const char *x_name) {
    const struct options *o = &run->options;
    if (!o->metric[metric])
        return NULL;
    char title[sizeof((struct table *)0)->title];
    snprintf(title, sizeof title, "%s-%s-%s-%s", p->op->prefix, metric_names[metric], problem_mode_names[mode],
             p->title);
    if (o->table && !strstr(title, o->table))
        return NULL;
    struct table *t = report_find_table(&run->report, title);
    if (!t) {
        t = report_add_table(&run->report);
        memcpy(t->title, title, sizeof title);
        snprintf(t->x_name, sizeof t->x_name, "%s", x_name);
        t->metric = metric;
    }
    t->printed = false;
    t->extras = (unsigned)o->error << EXTRA_ERROR;
    if (metric == METRIC_SPEED)
        t->extras |=
            (unsigned)o->percent << EXTRA_SHARE | (unsigned)o->host << EXTRA_HOST | (unsigned)o->first << EXTRA_FIRST;
    return t;
}

/* The tables of one mode of one row. False: there are none, or all have this row already. */
static bool find_tables(struct run *run, const problem *p, enum problem_mode mode, const char *x_name,
                        struct row_notes *notes) {
    bool any = false;
    for (int m = 0; m < METRICS; m++)
        find_table(run, p, mode, (enum metric)m, x_name);
    for (int m = 0; m < METRICS; m++) /* again: adding one may have moved the others */
        notes->table[m] = find_table(run, p, mode, (enum metric)m, x_name);
    for (int m = 0; m < METRICS; m++)
        any |= notes->table[m] && !table_find_row(notes->table[m], notes->x);
    return any;
}

/* "title n=4096: timing, 3 min left" */
static void show(struct run *run, const struct row_notes *notes, const char *what, const char *name) {
    const struct table *t = notes->table[METRIC_SPEED] ? notes->table[METRIC_SPEED] : notes->table[METRIC_MEMORY];
    if (!t)
        return;
    const double spent = clock_seconds() - run->started, share = run->work_all > 0 ? run->work_done / run->work_all : 0;
    char left[32] = "";
    if (share > 0.01) {
        const double seconds = spent / share - spent;
        snprintf(left, sizeof left, seconds < 90 ? "%.0f s left, " : "%.0f min left, ",
                 seconds < 90 ? seconds : seconds / 60);
    }
    progress("%3.0f %%, %s%s %s=%lld: %s%s", 100 * share, left, t->title, t->x_name, (long long)notes->x, what, name);
}

static double gradient_bytes(const problem *p, enum problem_mode mode) {
    double bytes = 0;
    for (int i = 0; i < p->tensors; i++)
        if (p->tensor[i].role == PROBLEM_GRADIENT && problem_writes(&p->tensor[i], mode) && !p->tensor[i].in_place_of)
            bytes += (double)tensor_bytes(&p->tensor[i]);
    return bytes;
}

/* Computes the outputs that backward and its oracle read. */
static void run_forward(struct run *run, problem *p) {
    p->op->call(p, run->context, PROBLEM_FORWARD);
    for (int i = 0; i < p->tensors && context_on_gpu(run->context); i++)
        if (kept_for_backward(p, &p->tensor[i]))
            problem_tensor_from_device(p, &p->tensor[i], run->context);
}

/* One mode of one row, whose tensors are allocated. */
static void run_mode(struct run *run, problem *p, const struct bench_row *bench, enum problem_mode mode,
                     struct row_notes *notes, struct history *history) {
    show(run, notes, "oracle", "");
    if (mode != PROBLEM_FORWARD)
        run_forward(run, p);
    problem_solve(p, mode);
    struct column columns[REPORT_COLUMNS];
    const int count =
        columns_list(run, p, mode, columns); /* after problem_solve: sessions copy the list of sampled elements */

    struct row row = {.x = bench->x, .gradient_bytes = gradient_bytes(p, mode)};
    p->op->cost(p, mode, &row.bytes, &row.flops);
    const double work = row.flops > 0 ? row.flops : row.bytes;
    for (int i = 0; i < count && !run_interrupted; i++) {
        struct column *c = &columns[i];
        show(run, notes, "checking ", c->name);
        const double predicted = history->work[i] > 0 ? history->seconds[i] * work / history->work[i] : 0;
        if (predicted <= run->budget.peer || c->session.provider->exact) {
            column_check(run, p, c, notes);
            continue;
        }
        for (int m = 0; m < METRICS; m++)
            if (notes->table[m])
                table_add_note(notes->table[m], "%s at %s = %lld: left out, a call would take about %.1f s", c->name,
                               notes->table[m]->x_name, (long long)bench->x, predicted);
    }
    double roof = 0;
    if (notes->table[METRIC_SPEED]) {
        show(run, notes, "timing", "");
        if (run->options.percent && !run_interrupted)
            roof = roofline_seconds(&run->roofline, p, bench, mode);
        columns_time(run, columns, count, notes);
    }
    if (notes->table[METRIC_MEMORY]) {
        show(run, notes, "measuring memory", "");
        columns_weigh(columns, count, notes);
    }
    for (int i = 0; i < count && run->options.first && !run->fresh && !run_interrupted; i++)
        if (columns[i].live) {
            show(run, notes, "first call of ", columns[i].name);
            columns[i].first = first_call(run, p, mode, bench->x, columns[i].name);
        }

    for (int m = 0; m < METRICS && !run_interrupted; m++) /* unfinished rows are dropped */
        if (notes->table[m] && !table_find_row(notes->table[m], row.x)) {
            struct row result = row;
            columns_report(columns, count, notes->table[m], &result, roof);
            *table_add_row(notes->table[m], row.x) = result;
        }
    for (int i = 0; i < count; i++)
        if (columns[i].state == CELL_MEASURED && columns[i].samples.count > 0) {
            history->seconds[i] = samples_summary(&columns[i].samples).median;
            history->work[i] = work;
        }
    columns_close(columns, count);
}

/* The memory that a row needs: its tensors, two copies of its inputs for the Python worker, and the
 * data for checking. */
static double row_bytes(const problem *p) {
    double bytes = 0;
    for (int i = 0; i < p->tensors; i++) {
        const problem_tensor *t = &p->tensor[i];
        const bool result = t->role == PROBLEM_OUTPUT || t->role == PROBLEM_GRADIENT;
        bytes += (double)tensor_bytes(t) * (result ? 2 : 3);
        if (t->in_place_of) /* the input is kept, as stored and in fp64 */
            bytes += (double)t->numel * sizeof(double);
        else if (result)
            bytes += (double)t->numel / (double)p->sample * sizeof(struct problem_answer);
    }
    return bytes;
}

static double work_of(const problem *p, unsigned modes) {
    double work = 0;
    for (int mode = 0; mode < PROBLEM_MODES; mode++)
        if (modes >> mode & 1) {
            double bytes = 64 << 20, flops, unused; /* a fixed cost per row */
            for (int i = 0; i < p->tensors; i++)
                bytes += (double)tensor_bytes(&p->tensor[i]);
            p->op->cost(p, (enum problem_mode)mode, &unused, &flops);
            work += bytes + flops / 200;
        }
    return work;
}

static void make_row(problem *p, const struct op_cases *op, const struct bench_row *row) {
    *p = (problem){.op = op};
    op->make_bench(p, row);
    int64_t largest = 1;
    for (int i = 0; i < p->tensors; i++)
        largest = max64(p->tensor[i].numel, largest);
    p->sample = max64(p->sample, ceil_div(largest, CHECKED));
}

static void run_row(struct run *run, const struct op_cases *op, const struct bench_row *row,
                    struct history history[PROBLEM_MODES]) {
    const struct bench_table *kind = &op->table[row->table];
    problem p;
    make_row(&p, op, row);
    bool needed = false;
    struct row_notes notes = {.x = row->x};
    const unsigned modes = kind->modes & run->options.modes;
    for (int mode = 0; mode < PROBLEM_MODES; mode++)
        needed |= modes >> mode & 1 && find_tables(run, &p, (enum problem_mode)mode, kind->x_name, &notes);
    if (!needed) {
        run->work_done += work_of(&p, modes);
        return;
    }

    const double bytes = row_bytes(&p), available = (double)machine_free_memory();
    show(run, &notes, "filling its tensors", "");
    const bool allocated = bytes <= 0.8 * available && problem_allocate(&p, 1);
    const bool placed =
        allocated && (!context_on_gpu(run->context) || problem_to_device(&p, run->context, PROBLEM_BOTH));
    for (int mode = 0; mode < PROBLEM_MODES && !run_interrupted; mode++) {
        if (!(modes >> mode & 1) || !find_tables(run, &p, (enum problem_mode)mode, kind->x_name, &notes))
            continue;
        if (placed)
            run_mode(run, &p, row, (enum problem_mode)mode, &notes, &history[mode]);
        for (int m = 0; m < METRICS && !placed; m++)
            if (notes.table[m] && allocated)
                table_add_note(notes.table[m], "%s = %lld: left out, it does not fit into the GPU's memory",
                               kind->x_name, (long long)row->x);
            else if (notes.table[m])
                table_add_note(notes.table[m], "%s = %lld: left out, it takes %.0f MiB and %.0f MiB are free",
                               kind->x_name, (long long)row->x, bytes / (1 << 20), available / (1 << 20));
    }
    run->work_done += work_of(&p, modes);
    if (allocated && context_on_gpu(run->context))
        problem_leave_device(&p);
    if (allocated)
        problem_free(&p);
    peers_forget_row();
}

/* Zero-terminated. A table without rows in the preset has none at all. */
static const int64_t *rows_of(const struct run *run, const struct op_cases *op, int table) {
    static const int64_t none[] = {0};
    const struct options *const o = &run->options;
    if (o->models != (op->models_from > 0 && table >= op->models_from))
        return none;
    const int64_t *preset = o->seeds ? op->table[table].seeds_x : op->table[table].quick_x;
    return preset[0] && o->x[0] ? o->x : preset;
}

void run_op(struct run *run, const struct op_cases *op) {
    for (int t = 0; t < op->tables && !run_interrupted; t++) {
        const struct bench_table *kind = &op->table[t];
        if (!(kind->modes & run->options.modes))
            continue;
        struct history history[PROBLEM_MODES] = {0};
        for (const int64_t *x = rows_of(run, op, t); *x && !run_interrupted; x++) {
            const struct bench_row row = {
                .table = t, .x = *x, .dtype = run->options.dtype, .quick = !run->options.seeds};
            run_row(run, op, &row, history);
            if (clock_seconds() - run->saved > SAVE_EVERY)
                run_save(run);
        }
        progress_clear();
        for (int i = 0; i < run->report.tables; i++)
            if (!run->report.table[i].printed) {
                table_print(&run->report.table[i], stdout);
                run->report.table[i].printed = true;
            }
        fflush(stdout);
        run_save(run);
    }
}

static void list_table(struct run *run, const problem *p, enum problem_mode mode, int table) {
    const int64_t *const rows = rows_of(run, p->op, table);
    struct column columns[REPORT_COLUMNS];
    const int count = columns_list(run, p, mode, columns);
    for (int m = 0; m < METRICS; m++) {
        const struct table *t = find_table(run, p, mode, (enum metric)m, p->op->table[table].x_name);
        if (!t)
            continue;
        printf("%s %s ", t->title, t->x_name);
        for (const int64_t *x = rows; *x; x++)
            printf("%s%lld", x == rows ? "" : ",", (long long)*x);
        for (int i = 0; i < count; i++)
            printf(" %s", columns[i].name);
        putchar('\n');
    }
}

void run_list(struct run *run) {
    for (int i = 0; run->options.op[i]; i++) {
        const struct op_cases *op = run->options.op[i];
        for (int t = 0; t < op->tables; t++)
            for (int mode = 0; mode < PROBLEM_MODES && rows_of(run, op, t)[0]; mode++) {
                const struct bench_row row = {
                    .table = t, .x = rows_of(run, op, t)[0], .dtype = run->options.dtype, .quick = !run->options.seeds};
                problem p;
                make_row(&p, op, &row);
                if (op->table[t].modes & run->options.modes & 1u << mode)
                    list_table(run, &p, (enum problem_mode)mode, t);
            }
    }
}

double run_work(const struct run *run) {
    double work = 0;
    for (int i = 0; run->options.op[i]; i++) {
        const struct op_cases *op = run->options.op[i];
        for (int t = 0; t < op->tables; t++)
            for (const int64_t *x = rows_of(run, op, t); *x; x++) {
                const struct bench_row row = {
                    .table = t, .x = *x, .dtype = run->options.dtype, .quick = !run->options.seeds};
                problem p;
                make_row(&p, op, &row);
                work += work_of(&p, op->table[t].modes & run->options.modes);
            }
    }
    return work;
}
