/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Python worker: one process that runs the providers written for PyTorch. The tool starts it when a row first needs
 * it, sends it orders and reads its answers as lines of JSON over a socket, and hands it the row's inputs in memory
 * that both map. A worker that dies or is late is killed, and started again for whoever comes next.
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
    bool fresh;    /* no cache of compiled code from earlier processes */
};

/* Starts it unless it runs. False: there is none, and `reason` says why; then nothing is tried again. */
bool worker_start(const struct worker_options *options, char *reason, size_t size);
void worker_stop(void);
bool worker_alive(void);

/* Grows by one whenever a worker is started: what was said to an earlier one is lost. */
int worker_generation(void);

/* What the worker said of itself when it started: {"torch": "2.13.0", "packages": {"fla": ""}, ...}. */
const struct json *worker_greeting(void);

/* Sends one order, a line, and waits for its answer, an object that the caller frees; {"error": "..."} where the worker
 * could not obey. NULL: the worker died or did not answer within `limit` seconds (and is gone), and `reason` says so.
 */
struct json *worker_ask(const char *order, double limit, char *reason, size_t size);

/* Memory that the worker can map, at least so large; its content stays when it grows. NULL: there is none. */
char *worker_memory(size_t bytes);
/* The file behind it, for the worker to open. */
const char *worker_memory_path(void);

#endif
