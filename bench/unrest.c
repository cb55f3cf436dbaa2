/* SPDX-License-Identifier: Apache-2.0 */
#include "unrest.h"

#include <math.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gpu_state.h"
#include "machine.h"
#include "measure.h"
#include "worker.h"

/* The seconds that all processors were busy since the machine started, time stolen by other virtual machines included;
 * 0: the kernel does not tell. */
static double all_busy_seconds(void) {
    FILE *file = fopen("/proc/stat", "r");
    double user = 0, nice = 0, system = 0, idle, wait, interrupts = 0, soft = 0, stolen = 0;
    const int got = file ? fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &wait,
                                  &interrupts, &soft, &stolen)
                         : 0;
    if (file)
        fclose(file);
    return got == 8 ? (user + nice + system + interrupts + soft + stolen) / (double)sysconf(_SC_CLK_TCK) : 0;
}

static double seconds_of(struct timeval t) {
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

/* Processor time of this process, of the children that have ended, and of the Python worker. */
static double own_seconds(void) {
    struct rusage self, children;
    getrusage(RUSAGE_SELF, &self);
    getrusage(RUSAGE_CHILDREN, &children);
    return seconds_of(self.ru_utime) + seconds_of(self.ru_stime) + seconds_of(children.ru_utime) +
           seconds_of(children.ru_stime) + worker_seconds();
}

/* Seconds of a loop whose steps depend on each other, which measures the clock of one processor: the best of several,
 * so that it does not matter if another program took the processor for a moment. */
static double pulse(void) {
    enum { ROUNDS = 8, STEPS = 100000 };
    double best = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = clock_seconds();
        uint64_t x = (uint64_t)round;
        for (int i = 0; i < STEPS; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            __asm__ volatile("" : "+r"(x));
        }
        best = fmin(best, clock_seconds() - start);
    }
    return best;
}

void unrest_begin(struct unrest_watch *w) {
    *w = (struct unrest_watch){.started = clock_seconds(), .busy = all_busy_seconds(), .own = own_seconds()};
    w->fastest = w->slowest = pulse();
}

void unrest_look(struct unrest_watch *w, struct report *r) {
    enum { LEAST_SECONDS = 2 }; /* the kernel counts in steps of 10 ms on each processor */
    const double elapsed = clock_seconds() - w->started, busy = all_busy_seconds(), now = pulse();
    struct unrest *const u = &r->unrest;
    u->processors = machine_processors();
    if (elapsed >= LEAST_SECONDS && w->busy > 0 && busy > 0)
        u->others = fmax(0, (busy - w->busy - (own_seconds() - w->own)) / elapsed);
    w->fastest = fmin(w->fastest, now);
    w->slowest = fmax(w->slowest, now);
    u->slowdown = w->slowest / w->fastest;
}

void unrest_look_at_gpu(struct unrest_watch *w, struct report *r) {
    enum { EVERY_SECONDS = 1 }; /* NVML takes some milliseconds to open */
    const double now = clock_seconds();
    if (!r->gpu[0] || now - w->looked < EVERY_SECONDS)
        return;
    w->looked = now;
    struct unrest *const u = &r->unrest;
    const int clock = gpu_state().clock_mhz;
    if (clock > 0 && (u->clock_low_mhz == 0 || clock < u->clock_low_mhz))
        u->clock_low_mhz = clock;
    if (clock > u->clock_high_mhz)
        u->clock_high_mhz = clock;
}
