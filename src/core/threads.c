/* SPDX-License-Identifier: Apache-2.0 */
#include "core/threads.h"

#include <string.h>

#include <omp.h>

void rafter_parallel(const rafter_context *context, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg) {
    const int64_t threads = context->threads < tasks ? context->threads : tasks;
    if (threads <= 1) {
        for (int64_t task = 0; task < tasks; task++)
            body(arg, task);
        return;
    }
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; task++)
        body(arg, task);
}

struct timed {
    void (*body)(void *arg, int64_t task);
    void *arg;
    double busy;
};

static void timed_body(void *arg, int64_t task) {
    struct timed *const timed = arg;
    const double start = omp_get_wtime();
    timed->body(timed->arg, task);
    const double seconds = omp_get_wtime() - start;
#pragma omp atomic
    timed->busy += seconds;
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
    struct timed timed = {body, arg, 0};
    const double start = omp_get_wtime();
    rafter_parallel(context, tasks, timed_body, &timed);
    struct rafter_phase *const phase = find_phase(context->phases, name);
    phase->wall += omp_get_wtime() - start;
    phase->busy += timed.busy;
    phase->tasks += tasks;
    phase->runs++;
}
