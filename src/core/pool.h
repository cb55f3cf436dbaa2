/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker threads, which all contexts share.
 *
 * A call never depends on a worker: its own thread takes tasks until none is left, and workers take
 * some of them meanwhile. So a call is complete with fewer workers than wanted, or none: where
 * threads cannot be created, in the child of a fork (which gets workers of its own), or while other
 * contexts keep them busy.
 */
#ifndef RAFTER_CORE_POOL_H
#define RAFTER_CORE_POOL_H

#include <stdint.h>

enum { RAFTER_MOST_THREADS = 1024 };

/* Runs body(arg, task) for every task in [0, tasks) on this thread and at most threads - 1 workers.
 * Workers compute with this thread's floating-point environment. */
void rafter_pool_run(int threads, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg);

/* The processors that this process may use: at least 1. */
int rafter_pool_processors(void);

#endif
