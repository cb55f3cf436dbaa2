/* SPDX-License-Identifier: Apache-2.0 */
/* Timing: a clock, statistics of repeats, and the state of the caches before a repeat. */
#ifndef RAFTER_BENCH_MEASURE_H
#define RAFTER_BENCH_MEASURE_H

#include <stdbool.h>
#include <stddef.h>

#include "rafter/rafter.h"

/* Seconds on a clock that only goes forward. */
double clock_seconds(void);

struct samples {
    double *value;
    int count, capacity;
};

bool samples_add(struct samples *s, double value); /* false: no memory */
void samples_free(struct samples *s);

struct summary {
    double median, p10, p90;
};

/* Quantiles, interpolated linearly. Sorts the samples, of which there must be at least one. */
struct summary samples_summary(struct samples *s);

/* The state of the caches before a call: filled with other data, or, if `warm`, with the call's
 * own. */
struct pace {
    bool warm;
    int threads;
    char *other; /* other data, larger than all last-level caches together */
    size_t other_bytes;
    void *device_other; /* on a GPU: other data, larger than its L2 */
    size_t device_bytes;
    int device_fills;      /* how often it is filled before a call */
    double device_seconds; /* the time of these fills */
    void *before, *after;  /* events, on a GPU */
};

/* For the context's device and threads. False: no memory. */
bool pace_create(struct pace *pace, bool warm, const rafter_context *context);
void pace_destroy(struct pace *pace, const rafter_context *context);

/* Fills the caches with other data, on the threads that the next call runs on: those of `context`, or OpenMP's if
 * that is NULL. They are awake then, and no other threads spin beside them. */
void pace_evict(const struct pace *pace, const rafter_context *context);

/* The same on the context's GPU, in stream order. */
void pace_evict_device(const struct pace *pace, const rafter_context *context);

#endif
