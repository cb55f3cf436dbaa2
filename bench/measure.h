/* SPDX-License-Identifier: Apache-2.0 */
/* Time: a clock, statistics of repeats, and the state of the caches before a repeat. */
#ifndef RAFTER_BENCH_MEASURE_H
#define RAFTER_BENCH_MEASURE_H

#include <stdbool.h>
#include <stddef.h>

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

/* Quantiles by linear interpolation between neighbours; sorts the samples. There must be at least one. */
struct summary samples_summary(struct samples *s);

/* How a call is met by the machine: with caches that hold other data, or with its own data in them (`warm`). */
struct pace {
    bool warm;
    int threads;
    char *other; /* the other data: larger than the last-level caches together */
    size_t other_bytes;
    void *device_other; /* and on a CUDA device, larger than its L2 */
    size_t device_bytes;
    int device_fills;      /* times that it is filled before a call */
    double device_seconds; /* that they take */
    void *before, *after;  /* events, on a device */
};

struct rafter_context;

/* For the context's device and threads. False: no memory. */
bool pace_create(struct pace *pace, bool warm, const struct rafter_context *context);
void pace_destroy(struct pace *pace, const struct rafter_context *context);

/* Fills the caches with other data, on all threads. */
void pace_evict(const struct pace *pace);

/* The same on the context's device, in stream order. */
void pace_evict_device(const struct pace *pace, const struct rafter_context *context);

#endif
