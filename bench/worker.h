/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Python worker: one process that runs the columns written for PyTorch. The tool starts it when
 * a row first needs it, sends orders and reads answers as lines of JSON over a socket, and passes
 * the row's inputs in shared memory. A worker that dies or exceeds its time limit is killed, and
 * started again for the next column.
 */
#ifndef RAFTER_BENCH_WORKER_H
#define RAFTER_BENCH_WORKER_H

#include <stdbool.h>
#include <stddef.h>

#include "json_read.h"

struct worker_options {
    const char *device; /* "cpu" or "cuda" */
    int threads;
    bool warm;
    size_t evict_bytes;
    int evictions; /* before a call */
    bool fresh;    /* without caches of compiled code from earlier processes */
};

/* Starts it unless it runs. False: it cannot be started, `reason` says why, and it is not tried
 * again. */
bool worker_start(const struct worker_options *options, char *reason, size_t size);
void worker_stop(void);
bool worker_alive(void);
/* Processor time of the running worker and of its children that have ended. */
double worker_seconds(void);

/* Grows by one whenever a worker is started. A new worker knows nothing of the orders to an earlier
 * one. */
int worker_generation(void);

/* What the worker said about itself when it started: {"python": "3.12.1", "torch": "2.13.0",
 * ...}. */
const struct json *worker_greeting(void);

/* Sends one order, a line, and waits for the answer, an object that the caller frees; {"error":
 * "..."} if the order failed. NULL: the worker died, or was killed after `limit` seconds, and
 * `reason` says so. */
struct json *worker_ask(const char *order, double limit, char *reason, size_t size);

/* Memory of at least this size that the worker can map; growing keeps its content. NULL: no
 * memory. */
char *worker_memory(size_t bytes);
/* The file behind it, which the worker opens. */
const char *worker_memory_path(void);

#endif
