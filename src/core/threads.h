/* SPDX-License-Identifier: Apache-2.0 */
/* The one way to spread work over threads; the threads themselves are in core/pool.c. */
#ifndef RAFTER_CORE_THREADS_H
#define RAFTER_CORE_THREADS_H

#include <stdint.h>

#include "core/context.h"

/* Threads of a context that does not say: OMP_NUM_THREADS, else the processors of this process. */
int rafter_default_threads(void);

/* Runs body(arg, task) for every task in [0, tasks), spread over the context's threads. Tasks must
 * not depend on one another. For results that do not depend on the number of threads, cut work into
 * tasks by shape alone, never by thread. */
void rafter_parallel(const rafter_context *context, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg);

/* How many of `all` elements a task should take: few enough that a small tensor gives all threads of a large machine
 * work, and enough that a task is worth its overhead. A power of two. */
static inline int64_t rafter_task_elements(int64_t all) {
    enum { LEAST = 1 << 14, MOST = 1 << 16, ENOUGH_TASKS = 64 };
    int64_t elements = LEAST;
    while (elements < MOST && elements * ENOUGH_TASKS < all)
        elements *= 2;
    return elements;
}

/* For the bench: times of one parallel phase of an op, summed over all its runs. */
struct rafter_phase {
    const char *name;
    int64_t runs, tasks;
    double wall, busy; /* seconds. wall: until the last task ended; busy: inside tasks, summed over threads */
};
enum { RAFTER_MOST_PHASES = 16 };
struct rafter_phases {
    struct rafter_phase phase[RAFTER_MOST_PHASES];
    int count;
};

/* rafter_parallel, which also adds its times to the phase of this name if context->phases is set. */
void rafter_parallel_phase(const rafter_context *context, const char *name, int64_t tasks,
                           void (*body)(void *arg, int64_t task), void *arg);

#endif
