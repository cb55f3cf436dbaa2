/* SPDX-License-Identifier: Apache-2.0 */
/* `rafter bench`: opens a run, measures the ops, writes the files. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <omp.h>

#include "gpu_state.h"
#include "harness/gpu.h"
#include "machine.h"
#include "progress.h"
#include "run.h"
#include "verbs.h"
#include "worker.h"

static const struct budget quick_budget = {0.05, 0.2, 1}, seeds_budget = {1, 10, 60}, gpu_budget = {0.03, 1, 10},
                           map_budget = {0.02, 1, 10};

volatile sig_atomic_t run_interrupted;

static void interrupt(int signal) {
    run_interrupted = signal;
}

static int fail(const char *what, const char *why) {
    progress_clear();
    fprintf(stderr, "rafter: %s: %s\n", what, why);
    return 1;
}

/* ---- files ----------------------------------------------------------------------------------- */

static bool save(const char *path, const struct report *r, void (*write)(const struct report *r, FILE *to)) {
    struct output out;
    if (output_open(&out, path)) {
        write(r, out.file);
        if (output_commit(&out))
            return true;
    }
    return !fail(path, strerror(errno));
}

/* A run that is killed leaves the file of the last save, so only the last one may say that the run
 * is complete. */
static void finish_report(struct run *run, bool last) {
    struct report *r = &run->report;
    r->read = run->roofline.read;
    r->copy = run->roofline.copy;
    r->matrix = run->roofline.matrix[run->options.dtype];
    r->seconds = clock_seconds() - run->started;
    r->interrupted = run_interrupted || !last;
    if (worker_greeting())
        snprintf(r->torch, sizeof r->torch, "%s", json_text(worker_greeting(), "torch"));
    if (context_on_gpu(run->context))
        r->after = gpu_state();
    unrest_look(&run->watch, r);
}

/* A pipe or a device gets the results once, at the end. */
static bool save_all(struct run *run, bool last) {
    const struct options *o = &run->options;
    run->saved = clock_seconds();
    finish_report(run, last);
    bool good = true;
    if (o->json && (last || !output_is_special(o->json)))
        good &= save(o->json, &run->report, json_write);
    if (o->html && (last || !output_is_special(o->html)))
        good &= save(o->html, &run->report, html_write);
    return good & (!o->csv || csv_write(&run->report, o->csv));
}

bool run_save(struct run *run) {
    return save_all(run, false);
}

/* Checks that the files can be written, before hours are spent on measuring. */
static bool try_files(const struct options *o) {
    const char *const paths[] = {o->json, o->html};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (paths[i] && !output_check(paths[i]))
            return !fail(paths[i], strerror(errno));
    struct stat is;
    if (o->csv && mkdir(o->csv, 0777) != 0 && errno != EEXIST)
        return !fail(o->csv, strerror(errno));
    if (o->csv && stat(o->csv, &is) == 0 && !S_ISDIR(is.st_mode))
        return !fail(o->csv, strerror(ENOTDIR));
    if (o->csv && faccessat(AT_FDCWD, o->csv, W_OK | X_OK, AT_EACCESS) != 0)
        return !fail(o->csv, strerror(errno));
    return true;
}

/* ---- opening and closing --------------------------------------------------------------------- */

static void describe_machine(struct run *run, int argc, char **argv) {
    struct report *r = &run->report;
    snprintf(r->version, sizeof r->version, "%s", rafter_version());
    snprintf(r->cpu, sizeof r->cpu, "%s", machine_cpu());
    snprintf(r->features, sizeof r->features, "%s", rafter_cpu_features());
    r->threads = rafter_context_threads(run->context);
    const time_t now = time(NULL);
    strftime(r->date, sizeof r->date, "%Y-%m-%d", gmtime(&now));
    if (context_on_gpu(run->context)) {
        struct gpu_facts facts;
        gpu_describe(run->context, &facts);
        snprintf(r->gpu, sizeof r->gpu, "%s", facts.name);
        r->before = gpu_state();
    }
    report_set_command(r, argc, argv);
}

/* Continues the report of an interrupted run. False: a message has been printed. */
static bool resume(struct run *run) {
    if (!run->options.resume || access(run->options.json, F_OK) != 0)
        return true;
    struct report old = {0}, *r = &run->report;
    if (!json_read_report(&old, run->options.json))
        return false;
    if (strcmp(old.cpu, r->cpu) != 0 || strcmp(old.gpu, r->gpu) != 0 || old.threads != r->threads) {
        fprintf(stderr, "rafter: %s was measured on another machine (%s%s%s, %d threads)\n", run->options.json, old.cpu,
                old.gpu[0] ? ", " : "", old.gpu, old.threads);
        report_free(&old);
        return false;
    }
    r->tables = old.tables;
    r->table = old.table;
    r->before = old.before;
    old.tables = 0;
    old.table = NULL;
    report_free(&old);
    for (int i = 0; i < r->tables; i++)
        r->table[i].printed = true;
    return true;
}

static bool open_run(struct run *run, int argc, char **argv) {
    const struct options *o = &run->options;
    const rafter_context_options options = {
        .size = sizeof options, .device = o->device, .threads = o->threads, .batch_invariant = o->batch_invariant};
    const rafter_status status = rafter_context_create(&run->context, &options);
    if (status != RAFTER_OK && o->device.device_type == kDLCUDA)
        return !fail("no CUDA context", rafter_last_error(NULL));
    if (status != RAFTER_OK)
        return !fail("no context", rafter_last_error(NULL));
    omp_set_num_threads(rafter_context_threads(run->context));
    run->budget = o->map                         ? map_budget
                  : context_on_gpu(run->context) ? gpu_budget
                  : o->seeds                     ? seeds_budget
                                                 : quick_budget;
    if (o->seconds > 0)
        run->budget.cell = o->seconds;
    run->fresh = getenv("RAFTER_FIRST_CALL") != NULL;
    describe_machine(run, argc, argv);
    if (!resume(run))
        return false;
    if (!pace_create(&run->pace, o->warm, run->context))
        return !fail("cannot flush the caches", "no memory");
    if (o->percent && o->metric[METRIC_SPEED]) {
        progress("measuring memory bandwidth");
        if (!roofline_create(&run->roofline, run->context, &run->pace))
            return !fail("cannot measure memory bandwidth", "no memory");
        progress_clear();
        printf("roofline: copy %.1f GB/s, read %.1f GB/s, ", run->roofline.copy / 1e9, run->roofline.read / 1e9);
        if (context_on_gpu(run->context))
            printf("%s\n\n", run->report.gpu);
        else
            printf("%d threads\n\n", rafter_context_threads(run->context));
    }
    run->work_all = run_work(run);
    unrest_begin(&run->watch);
    run->started = clock_seconds();
    return true;
}

static void close_run(struct run *run) {
    worker_stop();
    pace_destroy(&run->pace, run->context);
    for (int i = 0; i < run->variants; i++)
        rafter_context_destroy(run->variant[i].context);
    rafter_context_destroy(run->context);
    report_free(&run->report);
}

/* By default idle OpenMP threads spin for milliseconds, and would take processor time from the next
 * provider if that runs in another process. A fraction of a millisecond still bridges the gap
 * between two loops of one call. The runtime reads these variables when it is loaded, so the
 * program starts itself again. */
static void shorten_spinning(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME"))
        return;
    setenv("GOMP_SPINCOUNT", "10000", 1); /* GCC's runtime: iterations */
    setenv("KMP_BLOCKTIME", "1", 1);      /* LLVM's: milliseconds */
    machine_unbind();
    execv("/proc/self/exe", argv); /* if that fails, continue as we are */
}

static int list(struct run *run) {
    run_list(run);
    return 0;
}

static int measure(struct run *run) {
    if (run->options.map)
        run_map(run);
    for (int i = 0; run->options.op[i] && !run->options.map && !run_interrupted; i++)
        run_op(run, run->options.op[i]);
    progress_clear();
    const bool saved = save_all(run, true);
    char text[256];
    for (int i = 0; !run->fresh && report_unrest(&run->report, i, text, sizeof text); i++)
        printf("This run: %s\n", text);
    for (int i = 0; i < run->report.tables && run->options.markdown; i++)
        table_markdown(&run->report.table[i], stdout);
    if (run->report.tables == 0 && !run_interrupted)
        return fail("nothing to measure", "no table of this preset has this mode");
    return !saved ? 1 : run_interrupted ? 128 + run_interrupted : 0;
}

int verb_bench(int argc, char **argv) {
    struct run run = {0};
    if (!options_read(&run.options, "bench", argc, argv, 2))
        return 2;
    shorten_spinning(argv);
    if (!try_files(&run.options))
        return 1;
    const struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);

    int status = 1;
    if (open_run(&run, argc, argv))
        status = run.options.list ? list(&run) : measure(&run);
    close_run(&run);
    return status;
}
