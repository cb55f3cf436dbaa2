/* SPDX-License-Identifier: Apache-2.0 */
/* Worker threads: their number, failures to create them, signals, exit and unloading. */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "failures.h"
#include "host.h"

enum { MOST_CALLS = 80 };

static void serial_results(uint64_t *wanted) {
    rafter_context *const context = new_context(1, NULL);
    for (int call = 0; call < calls_count(); call++)
        wanted[call] = result_of(context, call);
    rafter_context_destroy(context);
}

static void expect_results(int threads, const uint64_t *wanted, const char *where) {
    rafter_context *const context = new_context(threads, NULL);
    for (int call = 0; call < calls_count(); call++)
        expect(result_of(context, call) == wanted[call], "%s: %s has other bits with %d threads", where,
               call_name(call), threads);
    rafter_context_destroy(context);
}

void threads_do_not_change_bits(void) {
    static const int threads[] = {2, 3, 8, 1, 5};
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    expect(count_workers() == 0, "a context with one thread has created %d", count_workers());
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++)
        expect_results(threads[i], wanted, "in turn");
    expect(count_workers() > 0, "no call had a second thread: the test tests nothing");
}

void no_thread_can_be_created(void) {
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    threads_left = 0;
    expect_results(8, wanted, "without threads");
    expect(count_workers() == 0, "%d workers, wanted none", count_workers());
}

static uint64_t wanted_in_child[MOST_CALLS];
static int left_in_child;

static void with_some_threads(void) {
    threads_left = left_in_child;
    expect_results(8, wanted_in_child, "with some threads");
    expect(count_workers() <= left_in_child, "%d workers, wanted %d", count_workers(), left_in_child);
}

/* For all k: every pthread_create after the k-th fails. */
void some_threads_can_be_created(void) {
    serial_results(wanted_in_child);
    for (left_in_child = 0; left_in_child < 8; left_in_child++)
        expect(in_child(with_some_threads, TEST_SECONDS / 2) == 0, "with %d threads", left_in_child);
}

void threads_past_the_limit_of_processes(void) {
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    if (getuid() == 0) /* root has no such limit */
        expect(setgid(65534) == 0 && setuid(65534) == 0, "cannot become another user");
    const struct rlimit limit = {0, 0};
    expect(setrlimit(RLIMIT_NPROC, &limit) == 0, "no limit");
    expect_results(8, wanted, "under RLIMIT_NPROC");
    expect(count_workers() == 0, "%d workers, wanted none: the limit has no effect", count_workers());
}

/* So little that a thread's stack does not fit. */
void address_space_is_exhausted(void) {
    if (SANITIZED)
        return; /* shadow memory is larger than any limit */
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    struct outputs outputs = new_outputs();
    rafter_context *const context = new_context(8, NULL);
    const struct rlimit limit = {1, 1};
    expect(setrlimit(RLIMIT_AS, &limit) == 0, "no limit");
    for (int call = 0; call < calls_count(); call++) {
        const rafter_status status = make_call(context, call, &outputs);
        expect(status == RAFTER_OK ? hash_of(&outputs) == wanted[call]
                                   : status == RAFTER_OUT_OF_MEMORY && untouched(&outputs),
               "%s: status %d", call_name(call), (int)status);
    }
    expect(count_workers() == 0, "%d workers, wanted none: the limit has no effect", count_workers());
    rafter_context_destroy(context);
    free_outputs(&outputs);
}

/* ---- several contexts ------------------------------------------------------------------------ */

struct caller {
    int threads, rounds;
    const uint64_t *wanted;
};

static void *call_all(void *arg) {
    const struct caller *const caller = arg;
    for (int i = 0; i < caller->rounds; i++)
        expect_results(caller->threads, caller->wanted, "side by side");
    return NULL;
}

void contexts_side_by_side(void) {
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    struct caller callers[] = {{2, 3, wanted}, {3, 2, wanted}, {8, 2, wanted}, {1, 3, wanted}, {2, 3, wanted}};
    enum { CALLERS = sizeof callers / sizeof *callers };
    pthread_t thread[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        expect(pthread_create(&thread[i], NULL, call_all, &callers[i]) == 0, "no thread");
    for (int i = 0; i < CALLERS; i++)
        pthread_join(thread[i], NULL);
    expect(count_workers() <= 7, "%d workers, wanted no more than the largest context asks for", count_workers());
}

/* However many contexts there are, workers are as many as the largest of them asks for. */
void workers_are_shared(void) {
    uint64_t wanted[MOST_CALLS];
    serial_results(wanted);
    rafter_context *contexts[20];
    for (int i = 0; i < 20; i++) {
        contexts[i] = new_context(1 + i % 4, NULL);
        expect(result_of(contexts[i], i % calls_count()) == wanted[i % calls_count()], "other bits");
    }
    expect(count_workers() <= 3, "%d workers for contexts of at most 4", count_workers());
    for (int i = 0; i < 20; i++)
        rafter_context_destroy(contexts[i]);
}

/* ---- the host's affairs ---------------------------------------------------------------------- */

/* The blocked signals of this process's threads named rafter, or'ed and and'ed. */
static int blocked_signals(uint64_t *any, uint64_t *all) {
    int workers = 0;
    *any = 0;
    *all = UINT64_MAX;
    DIR *const tasks = opendir("/proc/self/task");
    for (const struct dirent *entry; tasks && (entry = readdir(tasks));) {
        char path[300], line[200];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *const file = fopen(path, "r");
        int ours = 0;
        while (file && fgets(line, sizeof line, file)) {
            ours |= strcmp(line, "Name:\trafter\n") == 0;
            if (ours && strncmp(line, "SigBlk:", 7) == 0) {
                const uint64_t mask = strtoull(line + 7, NULL, 16);
                *any |= mask;
                *all &= mask;
                workers++;
            }
        }
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return workers;
}

void signals_stay_with_the_host(void) {
    rafter_context *const context = new_context(3, NULL);
    result_of(context, 0);
    uint64_t any = 0, all = 0;
    int workers = 0;
    /* The C library starts a thread with all signals blocked; a busy machine may take a while to run it. */
    for (int tries = 0; tries < 2000 && (workers != 2 || any >> (SIGSEGV - 1) & 1); tries++) {
        workers = blocked_signals(&any, &all);
        usleep(1000);
    }
    expect(workers == 2, "two workers were expected");
    static const int blocked[] = {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM},
                     open[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof blocked / sizeof *blocked; i++)
        expect(all >> (blocked[i] - 1) & 1, "a worker takes signal %d", blocked[i]);
    for (size_t i = 0; i < sizeof open / sizeof *open; i++)
        expect(!(any >> (open[i] - 1) & 1), "a worker blocks signal %d", open[i]);
    sigset_t mine;
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    expect(!sigismember(&mine, SIGINT), "the caller's mask has changed");
    rafter_context_destroy(context);
}

static void exits(void) {
    rafter_context *const context = new_context(4, NULL);
    result_of(context, 0);
    exit(7); /* without destroying the context */
}

void exit_with_workers(void) {
    for (int i = 0; i < 20; i++) {
        const int status = in_child(exits, TEST_SECONDS / 4);
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "status %x", status);
    }
}

static void *call_for_ever(void *arg) {
    struct outputs outputs = new_outputs();
    for (int i = 0;; i++)
        expect(make_call(arg, i % calls_count(), &outputs) == RAFTER_OK, "a call failed");
    return NULL;
}

static void exits_meanwhile(void) {
    pthread_t thread;
    expect(pthread_create(&thread, NULL, call_for_ever, new_context(4, NULL)) == 0, "no thread");
    usleep(20000);
    exit(7);
}

void exit_while_a_thread_calls(void) {
    for (int i = 0; i < 10; i++) {
        const int status = in_child(exits_meanwhile, TEST_SECONDS / 4);
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "status %x", status);
    }
}

void unload_with_workers(void) {
    for (int i = 0; i < 10; i++) {
        void *const library = dlopen(RAFTER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        expect(library != NULL, "%s", dlerror());
        rafter_status (*create)(rafter_context **, const rafter_context_options *);
        rafter_status (*forward)(rafter_context *, const rafter_act_args *);
        void (*destroy)(rafter_context *);
        *(void **)&create = dlsym(library, "rafter_context_create");
        *(void **)&forward = dlsym(library, "rafter_act_forward");
        *(void **)&destroy = dlsym(library, "rafter_context_destroy");
        const rafter_context_options options = {.size = sizeof options, .threads = 4};
        rafter_context *context;
        expect(create(&context, &options) == RAFTER_OK, "no context");
        static float data[1 << 20];
        int64_t shape[] = {1 << 20};
        const DLTensor x = rafter_tensor(data, RAFTER_F32, 1, shape);
        const rafter_act_args args = {.size = sizeof args, .kind = RAFTER_ACT_SILU, .x = &x, .y = &x};
        expect(forward(context, &args) == RAFTER_OK, "no result");
        expect(count_workers() == 3, "%d workers, wanted 3", count_workers());
        destroy(context);
        dlclose(library);
        /* /proc may list a thread for a moment after it was joined. */
        for (int wait = 0; count_workers() > 0 && wait < 2000; wait++)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        expect(count_workers() == 0, "%d workers after unloading, wanted none", count_workers());
    }
}
