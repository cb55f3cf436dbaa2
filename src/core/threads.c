/* SPDX-License-Identifier: Apache-2.0 */
#include "core/threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/pool.h"

int rafter_default_threads(void) {
    const char *const given = getenv("OMP_NUM_THREADS");
    const long threads = given ? strtol(given, NULL, 10) : 0; /* the first number of a list */
    if (threads <= 0)
        return rafter_pool_processors();
    return threads < RAFTER_MOST_THREADS ? (int)threads : RAFTER_MOST_THREADS;
}

void rafter_parallel(const rafter_context *context, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg) {
    rafter_pool_run(context->threads, tasks, body, arg);
}

struct timed {
    void (*body)(void *arg, int64_t task);
    void *arg;
    _Atomic int64_t busy; /* nanoseconds */
};

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void timed_body(void *arg, int64_t task) {
    struct timed *const timed = arg;
    const int64_t start = nanoseconds();
    timed->body(timed->arg, task);
    atomic_fetch_add(&timed->busy, nanoseconds() - start);
}

/* The phase of this name. Names past the end of the table share its last entry. */
static struct rafter_phase *find_phase(struct rafter_phases *phases, const char *name) {
    for (int i = 0; i < phases->count; i++)
        if (strcmp(phases->phase[i].name, name) == 0)
            return &phases->phase[i];
    if (phases->count < RAFTER_MOST_PHASES)
        phases->phase[phases->count++].name = name;
    return &phases->phase[phases->count - 1];
}

void rafter_parallel_phase(const rafter_context *context, const char *name, int64_t tasks,
                           void (*body)(void *arg, int64_t task), void *arg) {
    if (!context->phases) {
        rafter_parallel(context, tasks, body, arg);
        return;
    }
    struct timed timed = {.body = body, .arg = arg};
    const int64_t start = nanoseconds();
    rafter_parallel(context, tasks, timed_body, &timed);
    struct rafter_phase *const phase = find_phase(context->phases, name);
    phase->wall += 1e-9 * (double)(nanoseconds() - start);
    phase->busy += 1e-9 * (double)timed.busy;
    phase->tasks += tasks;
    phase->runs++;
}
