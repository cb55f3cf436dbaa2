/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "machine.h"
#include "measure.h"
#include "run.h"

static const double start_limit = 180; /* seconds for `import torch` and for the first use of a GPU */
static const double CLOSE_GRACE = 2;   /* seconds between the end of the connection and that of the process */
enum { LINE_LIMIT = 1 << 20 };         /* bytes of an answer; those of worker.py have less than 1000 */

static struct {
    pid_t pid;
    int socket, log;
    int generation;
    bool hopeless; /* it cannot run, `why` says why, and it is not started again */
    char why[256];
    struct json *greeting;
    char *line; /* received bytes that were not read yet */
    size_t used, capacity;
} worker = {.socket = -1, .log = -1};

static struct {
    int fd;
    char path[64];
    char *memory;
    size_t bytes;
} shared = {.fd = -1};

/* ---- the process ----------------------------------------------------------------------------- */

static void let_go(void) {
    if (worker.socket >= 0)
        close(worker.socket);
    if (worker.log >= 0)
        close(worker.log);
    json_free(worker.greeting);
    worker.pid = 0;
    worker.socket = worker.log = -1;
    worker.greeting = NULL;
    worker.used = 0;
}

double worker_seconds(void) {
    char path[64];
    double user = 0, system = 0, waited_user = 0, waited_system = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)worker.pid);
    FILE *file = worker.pid > 0 ? fopen(path, "r") : NULL;
    /* The second field, the name of the program, is in brackets; 14 to 17 are the times. */
    if (file && fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lf %lf %lf %lf", &user, &system,
                       &waited_user, &waited_system) != 4)
        user = system = waited_user = waited_system = 0;
    if (file)
        fclose(file);
    return (user + system + waited_user + waited_system) / (double)sysconf(_SC_CLK_TCK);
}

void worker_stop(void) {
    if (worker.pid > 0) {
        kill(worker.pid, SIGKILL);
        waitpid(worker.pid, NULL, 0);
    }
    let_go();
    free(worker.line);
    worker.line = NULL;
    worker.capacity = 0;
    if (shared.memory)
        munmap(shared.memory, shared.bytes);
    if (shared.fd >= 0)
        close(shared.fd);
    shared.memory = NULL;
    shared.bytes = 0;
    shared.fd = -1;
}

/* The last line that the worker wrote to stderr: a Python exception ends with its message. */
static void last_line(char *text, size_t size) {
    char tail[4096];
    const off_t end = lseek(worker.log, 0, SEEK_END),
                from = end > (off_t)sizeof tail - 1 ? end - (off_t)sizeof tail + 1 : 0;
    const ssize_t got = end > 0 ? pread(worker.log, tail, sizeof tail - 1, from) : 0;
    text[0] = '\0';
    if (got <= 0)
        return;
    tail[got] = '\0';
    for (char *line = strtok(tail, "\n"); line; line = strtok(NULL, "\n"))
        if (line[strspn(line, " ")])
            snprintf(text, size, ": %s", line);
}

/* Reports how the worker ended, and forgets it. One that closed its socket and lives is killed
 * after `grace` seconds. */
static void report_end(double grace, char *reason, size_t size) {
    char words[160];
    int status = 0;
    const bool ended = process_wait(worker.pid, grace, &status);
    last_line(words, sizeof words);
    if (!ended)
        snprintf(reason, size, "the Python worker closed its connection, but did not end, and was killed%s", words);
    else if (WIFSIGNALED(status))
        snprintf(reason, size, "the Python worker died of signal %d (%s)%s", WTERMSIG(status),
                 strsignal(WTERMSIG(status)), words);
    else
        snprintf(reason, size, "the Python worker exited with status %d%s", WEXITSTATUS(status), words);
    let_go();
}

/* The worker's script: the caller's, or the one installed with this command, or the one in the source tree. */
static const char *find_script(char *path, size_t size) {
    const char *given = secure_getenv("RAFTER_WORKER");
    if (given)
        return given;
    const ssize_t length = readlink("/proc/self/exe", path, size - 1);
    if (length > 0) {
        path[length] = 0;
        char *slash = strrchr(path, '/');
        const size_t folder = (size_t)(slash - path) + 1;
        if (snprintf(slash + 1, size - folder, "%s", RAFTER_INSTALLED_WORKER) < (int)(size - folder) &&
            access(path, R_OK) == 0)
            return path;
    }
    return RAFTER_WORKER;
}

static _Noreturn void run_python(int socket, int log, const struct worker_options *o) {
    const char *python = secure_getenv("RAFTER_PYTHON");
    char fd[16], threads[16], evict[32], times[16], path[PATH_MAX];
    signal(SIGINT, SIG_IGN); /* the tool handles both; exec keeps this setting */
    signal(SIGTERM, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int nowhere = open("/dev/null", O_RDONLY);
    dup2(nowhere, STDIN_FILENO);
    dup2(log, STDOUT_FILENO); /* libraries may print anything */
    dup2(log, STDERR_FILENO);
    fcntl(socket, F_SETFD, 0);
    if (o->fresh) {
        setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1", 1);
        setenv("TRITON_ALWAYS_COMPILE", "1", 1);
    }
    snprintf(fd, sizeof fd, "%d", socket);
    snprintf(threads, sizeof threads, "%d", o->threads);
    snprintf(evict, sizeof evict, "%zu", o->warm ? 0 : o->evict_bytes);
    snprintf(times, sizeof times, "%d", o->evictions);
    python = python ? python : "python3";
    machine_unbind();
    execlp(python, python, find_script(path, sizeof path), fd, o->device, threads, evict, times, (char *)NULL);
    dprintf(STDERR_FILENO, "%s cannot be run: %s\n", python, strerror(errno));
    _exit(127);
}

static bool spawn(const struct worker_options *options) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return false;
    worker.log = memfd_create("rafter-worker-log", MFD_CLOEXEC);
    worker.pid = fork();
    if (worker.pid == 0)
        run_python(pair[1], worker.log, options);
    close(pair[1]);
    worker.socket = pair[0];
    worker.generation++;
    return worker.pid > 0 && worker.log >= 0;
}

/* ---- orders and answers ---------------------------------------------------------------------- */

enum received { RECEIVED, LATE, CLOSED, TOO_LONG };

/* Waits until the socket is ready for `events`. False: the deadline passed, or Ctrl-C was
 * pressed. */
static bool wait_ready(short events, double deadline) {
    const double interval = 0.1;
    for (;;) {
        struct pollfd wait = {.fd = worker.socket, .events = events};
        const double left = deadline - clock_seconds();
        if (left <= 0 || run_interrupted)
            return false;
        const int ready = poll(&wait, 1, (int)((left < interval ? left : interval) * 1e3) + 1);
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return true; /* of an error, the next call on the socket tells */
    }
}

/* Waits for a whole line in worker.line; `length` includes its end, which becomes '\0'. */
static enum received receive_line(double deadline, size_t *length) {
    for (;;) {
        char *end = worker.used ? memchr(worker.line, '\n', worker.used) : NULL;
        if (end) {
            *end = '\0';
            *length = (size_t)(end - worker.line) + 1;
            return RECEIVED;
        }
        if (worker.used >= LINE_LIMIT)
            return TOO_LONG;
        if (worker.capacity - worker.used < 4096) {
            const size_t capacity = worker.capacity ? 2 * worker.capacity : 8192;
            char *grown = realloc(worker.line, capacity);
            if (!grown)
                return CLOSED;
            worker.line = grown;
            worker.capacity = capacity;
        }
        if (!wait_ready(POLLIN, deadline))
            return LATE;
        const ssize_t got = recv(worker.socket, worker.line + worker.used, worker.capacity - worker.used, 0);
        if (got <= 0)
            return CLOSED;
        worker.used += (size_t)got;
    }
}

/* The next answer. NULL: the worker is gone, and `reason` says why. */
static struct json *receive(double limit, double deadline, char *reason, size_t size) {
    size_t length = 0;
    const enum received got = receive_line(deadline, &length);
    if (got == CLOSED) {
        report_end(fmin(CLOSE_GRACE, deadline - clock_seconds()), reason, size);
        return NULL;
    }
    struct json *answer = NULL;
    if (got == RECEIVED) {
        answer = strlen(worker.line) + 1 == length ? json_parse(worker.line) : NULL;
        memmove(worker.line, worker.line + length, worker.used - length);
        worker.used -= length;
    }
    if (!answer) {
        if (got == LATE)
            snprintf(reason, size, "took longer than %.3g s", limit);
        else if (got == TOO_LONG)
            snprintf(reason, size, "the Python worker's answer is longer than the limit of %d bytes", LINE_LIMIT);
        else
            snprintf(reason, size, "the Python worker's answer is not JSON");
        kill(worker.pid, SIGKILL);
        waitpid(worker.pid, NULL, 0);
        let_go();
    }
    return answer;
}

struct json *worker_ask(const char *order, double limit, char *reason, size_t size) {
    if (worker.pid <= 0) {
        snprintf(reason, size, "the Python worker has ended");
        return NULL;
    }
    const double deadline = clock_seconds() + limit;
    const size_t length = strlen(order);
    for (size_t sent = 0; sent < length && wait_ready(POLLOUT, deadline);) {
        const ssize_t step = send(worker.socket, order + sent, length - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (step <= 0 && errno != EAGAIN)
            break; /* if the worker is gone, receive notices */
        sent += step > 0 ? (size_t)step : 0;
    }
    return receive(limit, deadline, reason, size);
}

bool worker_start(const struct worker_options *options, char *reason, size_t size) {
    if (worker.pid > 0)
        return true;
    if (!worker.hopeless) {
        if (!spawn(options)) {
            let_go();
            snprintf(worker.why, sizeof worker.why, "no process for the Python worker: %s", strerror(errno));
            worker.hopeless = true;
        } else {
            worker.greeting = receive(start_limit, clock_seconds() + start_limit, worker.why, sizeof worker.why);
            worker.hopeless = !worker.greeting;
        }
        if (worker.greeting && json_get(worker.greeting, "error")) {
            snprintf(worker.why, sizeof worker.why, "%s", json_text(worker.greeting, "error"));
            worker.hopeless = true;
            kill(worker.pid, SIGKILL);
            waitpid(worker.pid, NULL, 0);
            let_go();
        }
    }
    if (worker.hopeless)
        snprintf(reason, size, "%s", worker.why);
    return !worker.hopeless;
}

bool worker_alive(void) {
    return worker.pid > 0;
}

int worker_generation(void) {
    return worker.generation;
}

const struct json *worker_greeting(void) {
    return worker.greeting;
}

/* ---- memory ---------------------------------------------------------------------------------- */

char *worker_memory(size_t bytes) {
    if (shared.fd < 0) {
        shared.fd = memfd_create("rafter-worker", MFD_CLOEXEC);
        if (shared.fd < 0)
            return NULL;
        snprintf(shared.path, sizeof shared.path, "/proc/%ld/fd/%d", (long)getpid(), shared.fd);
    }
    if (bytes <= shared.bytes)
        return shared.memory;
    if (ftruncate(shared.fd, (off_t)bytes) != 0)
        return NULL;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fd, 0);
    if (memory == MAP_FAILED)
        return NULL;
    if (shared.memory)
        munmap(shared.memory, shared.bytes);
    shared.memory = memory;
    shared.bytes = bytes;
    return memory;
}

const char *worker_memory_path(void) {
    return shared.path;
}
