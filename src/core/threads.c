/* SPDX-License-Identifier: Apache-2.0 */
#include "core/threads.h"

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
