/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "json_read.h"
#include "machine.h"
#include "run.h"

/* Runs this command again for one cell. RAFTER_FIRST_CALL makes it report the call that is
 * otherwise only checked. */
static _Noreturn void run_again(const struct run *run, const problem *p, enum problem_mode mode, int64_t x,
                                const char *column, const char *json) {
    const struct options *o = &run->options;
    char size[32], threads[16], title[256];
    snprintf(size, sizeof size, "%lld", (long long)x);
    snprintf(threads, sizeof threads, "%d", rafter_context_threads(run->context));
    snprintf(title, sizeof title, "%s-%s-%s-%s", p->op->prefix, metric_names[METRIC_SPEED], problem_mode_names[mode],
             p->title);
    const char *argv[] = {"rafter",
                          "bench",
                          p->op->op,
                          "--preset",
                          o->models  ? "models"
                          : o->seeds ? "seeds"
                                     : "quick",
                          "--x",
                          size,
                          "--mode",
                          problem_mode_names[mode],
                          "--dtype",
                          problem_dtype_name(o->dtype),
                          "--device",
                          context_on_gpu(run->context) ? "cuda" : "cpu",
                          "--threads",
                          threads,
                          "--providers",
                          column,
                          "--table",
                          title,
                          "--first-call",
                          "--seconds",
                          "0.000001",
                          "--json",
                          json,
                          NULL};
    const int nowhere = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        dup2(nowhere, fd);
    setenv("RAFTER_FIRST_CALL", "1", 1);
    machine_unbind();
    execv("/proc/self/exe", (char **)argv);
    _exit(127);
}

double first_call(const struct run *run, const problem *p, enum problem_mode mode, int64_t x, const char *column) {
    const char *parent = getenv("TMPDIR");
    char folder[PATH_MAX], json[PATH_MAX + 16];
    snprintf(folder, sizeof folder, "%s/rafter-first-XXXXXX", parent && *parent ? parent : "/tmp");
    if (!mkdtemp(folder))
        return 0;
    snprintf(json, sizeof json, "%s/first.json", folder);
    const pid_t pid = fork();
    if (pid == 0)
        run_again(run, p, mode, x, column, json);
    int status = 1;
    double seconds = 0;
    if (pid > 0 && waitpid(pid, &status, 0) == pid && status == 0) {
        struct json *report = json_parse_file(json);
        const struct json *rows = json_get(report, "rows");
        seconds = 1e-3 * json_number(rows ? rows->first : NULL, "first_ms", 0);
        json_free(report);
    }
    unlink(json);
    rmdir(folder);
    return seconds;
}
