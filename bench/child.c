/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A provider in a child process. The child is forked for one session, so it sees the row's inputs
 * without a copy. It writes results to shared memory, from where they are copied into the problem's
 * tensors when they are collected. Orders (one byte: time a call) and reports go over a socket
 * pair.
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/sizes.h"
#include "provider.h"

enum { ALIGNMENT = 64, LIMIT_SECONDS = 60 };
static const double CLOSE_GRACE = 2; /* seconds between the end of the connection and that of the process */

struct child {
    pid_t pid;
    int socket;
    char *shared;
    size_t shared_bytes;
};

struct child_report {
    bool good;
    double seconds;
    size_t scratch;
    char reason[sizeof((struct session *)0)->reason];
};

static size_t aligned(size_t bytes) {
    return (size_t)round_up((int64_t)bytes, ALIGNMENT);
}

static void send_report(struct session *s, bool good, double seconds) {
    struct child_report report = {.good = good, .seconds = seconds, .scratch = s->scratch};
    memcpy(report.reason, s->reason, sizeof report.reason);
    if (send(s->child->socket, &report, sizeof report, MSG_NOSIGNAL) != (ssize_t)sizeof report)
        _exit(1);
}

static void *serve(void *arg) {
    struct session *s = arg;
    const bool open = !s->provider->open || s->provider->open(s);
    send_report(s, open, 0);
    char order;
    while (open && recv(s->child->socket, &order, 1, 0) == 1) {
        double seconds = 0;
        const bool good = s->provider->time(s, &seconds);
        send_report(s, good, seconds);
    }
    return NULL;
}

/* Runs the session to its end. OpenMP's threads belong to the thread that started them, and do not
 * survive a fork, so the work is done in a new thread, which starts its own. */
static _Noreturn void child_main(struct session *s) {
    signal(SIGINT, SIG_IGN); /* the parent handles both, and kills this process at the end */
    signal(SIGTERM, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char *place = s->child->shared;
    for (int i = 0; i < s->problem.tensors; i++) {
        problem_tensor *t = &s->problem.tensor[i];
        if (problem_writes(t, s->mode)) {
            t->tensor.data = place;
            place += aligned(tensor_bytes(t));
        }
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, s) == 0)
        pthread_join(thread, NULL);
    _exit(0);
}

/* Keeps the outputs out of the fork: the child does not need them. If pages were shared with it, the parent's
 * next write to each would copy it, in the middle of a measurement. */
static void advise_outputs(const struct session *s, int advice) {
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (problem_writes(t, s->mode) && t->mapping)
            madvise(t->mapping, t->mapping_bytes, advice);
    }
}

static void reap(struct child *c) {
    if (c->pid > 0) {
        kill(c->pid, SIGKILL);
        waitpid(c->pid, NULL, 0);
        c->pid = 0;
    }
}

static bool receive_report(struct session *s, double *seconds) {
    struct child *c = s->child;
    const double limit = session_limit(s, LIMIT_SECONDS), deadline = clock_seconds() + limit;
    struct pollfd wait = {.fd = c->socket, .events = POLLIN};
    int ready;
    do {
        const double left = deadline - clock_seconds();
        ready = poll(&wait, 1, left > 0 ? (int)(left * 1e3) : 0);
    } while (ready < 0 && errno == EINTR);
    if (ready == 0) {
        reap(c);
        return session_fail(s, "took longer than %.3g s", limit);
    }

    struct child_report report;
    if (recv(c->socket, &report, sizeof report, MSG_WAITALL) != (ssize_t)sizeof report) {
        int status = 0;
        const bool ended = process_wait(c->pid, fmin(CLOSE_GRACE, deadline - clock_seconds()), &status);
        c->pid = 0;
        if (!ended)
            return session_fail(s, "closed its connection, but did not end, and was killed");
        if (WIFSIGNALED(status))
            return session_fail(s, "died of signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
        return session_fail(s, "exited with status %d", WEXITSTATUS(status));
    }
    s->scratch = report.scratch;
    memcpy(s->reason, report.reason, sizeof s->reason);
    if (seconds)
        *seconds = report.seconds;
    return report.good;
}

bool child_open(struct session *s) {
    struct child *c = calloc(1, sizeof *c);
    s->child = c;
    if (!c)
        return session_fail(s, "no memory");
    c->socket = -1;
    for (int i = 0; i < s->problem.tensors; i++)
        if (problem_writes(&s->problem.tensor[i], s->mode)) {
            if (s->problem.tensor[i].in_place_of)
                return session_fail(s, "does not work in place");
            c->shared_bytes += aligned(tensor_bytes(&s->problem.tensor[i]));
        }
    c->shared = mmap(NULL, c->shared_bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c->shared == MAP_FAILED) {
        c->shared = NULL;
        return session_fail(s, "no memory");
    }

    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return session_fail(s, "no socket: %s", strerror(errno));
    advise_outputs(s, MADV_DONTFORK);
    c->pid = fork();
    if (c->pid == 0) {
        close(pair[0]);
        c->socket = pair[1];
        child_main(s);
    }
    advise_outputs(s, MADV_DOFORK);
    close(pair[1]);
    c->socket = pair[0];
    if (c->pid < 0)
        return session_fail(s, "no process: %s", strerror(errno));
    return receive_report(s, NULL);
}

bool child_time(struct session *s, double *seconds) {
    send(s->child->socket, "t", 1, MSG_NOSIGNAL); /* if the child is gone, receive_report notices */
    return receive_report(s, seconds);
}

bool child_collect(struct session *s) {
    const char *place = s->child->shared;
    for (int i = 0; i < s->problem.tensors; i++) {
        const problem_tensor *t = &s->problem.tensor[i];
        if (problem_writes(t, s->mode)) {
            memcpy((char *)t->tensor.data + t->tensor.byte_offset, place, tensor_bytes(t));
            place += aligned(tensor_bytes(t));
        }
    }
    return true;
}

void child_close(struct session *s) {
    struct child *c = s->child;
    if (!c)
        return;
    reap(c);
    if (c->socket >= 0)
        close(c->socket);
    if (c->shared)
        munmap(c->shared, c->shared_bytes + 1);
    free(c);
    s->child = NULL;
}
