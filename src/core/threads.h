/* SPDX-License-Identifier: Apache-2.0 */
/* The one place that spawns threads. */
#ifndef RAFTER_CORE_THREADS_H
#define RAFTER_CORE_THREADS_H

#include <stdint.h>

#include "core/context.h"

/* Runs body(arg, task) for every task in [0, tasks), spread over the context's threads. Tasks must
 * not depend on one another. For results that do not depend on the number of threads, cut work into
 * tasks by shape alone, never by thread. */
void rafter_parallel(const rafter_context *context, int64_t tasks, void (*body)(void *arg, int64_t task), void *arg);

#endif
