/* SPDX-License-Identifier: Apache-2.0 */
#include "core/threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/fp.h"
#include "core/kernel_memory.h"
#include "core/pool.h"

int rafter_default_threads(void) {
    const char *const given = getenv("OMP_NUM_THREADS");
    const long threads = given ? strtol(given, NULL, 10) : 0; /* the first number of a list */
    if (threads <= 0)
        return rafter_pool_processors();
    return threads < RAFTER_MOST_THREADS ? (int)threads : RAFTER_MOST_THREADS;
}

/* The tasks of a call that runs on the host's threads, cut into ranges. Each thread first takes the tasks of its own
 * range in order, so that it writes adjacent memory and page faults of different threads do not contend. Then it takes
 * what is left of other ranges. */
enum { MOST_RANGES = 64, LINE_BYTES = 64 };
struct range {
    _Alignas(LINE_BYTES) _Atomic int64_t next; /* task to take. Threads that share no range share no cache line. */
};
struct host_tasks {
    const rafter_context *context;
    int64_t tasks;
    void (*body)(void *arg, int64_t task);
    void *arg;
    struct rafter_fp fp; /* of the caller */
    int ranges;
    struct range range[MOST_RANGES];
};

/* The first task of a range. */
static int64_t range_begin(const struct host_tasks *t, int range) {
    const int64_t each = t->tasks / t->ranges, more = t->tasks % t->ranges; /* the first ranges have one more */
    return range * each + (range < more ? range : more);
}

static void take_range(struct host_tasks *t, int range) {
    const int64_t end = range_begin(t, range + 1);
    while (atomic_load_explicit(&t->range[range].next, memory_order_relaxed) < end) {
        const int64_t task = atomic_fetch_add_explicit(&t->range[range].next, 1, memory_order_relaxed);
        if (task < end)
            t->body(t->arg, task);
    }
}

/* Runs on the i-th of the host's threads, and restores the thread's own kernel memory and floating-point environment at
 * the end. */
static void take_tasks(void *arg, int32_t i) {
    struct host_tasks *const t = arg;
    char *const memory = rafter_thread_memory;
    const struct rafter_fp fp = rafter_fp_get();
    rafter_thread_memory = t->context->kernel_memory + (size_t)i * RAFTER_THREAD_BYTES;
    rafter_fp_set(t->fp);
    for (int r = 0; r < t->ranges; r++)
        take_range(t, (i + r) % t->ranges);
    rafter_fp_set(fp);
    rafter_thread_memory = memory;
}

void rafter_parallel(const rafter_context *context, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg) {
    if (!context->parallel) {
        rafter_pool_run(context->threads, tasks, body, arg);
        return;
    }
    struct host_tasks t = {.context = context, .tasks = tasks, .body = body, .arg = arg, .fp = rafter_fp_get()};
    const int32_t count = tasks < context->threads ? (int32_t)tasks : context->threads;
    t.ranges = count < MOST_RANGES ? count : MOST_RANGES;
    for (int range = 0; range < t.ranges; range++)
        t.range[range].next = range_begin(&t, range);
    if (count > 1)
        context->parallel(context->parallel_user, count, take_tasks, &t);
    take_tasks(&t, 0); /* what the host has left */
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
