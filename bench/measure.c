/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/threads.h"
#include "harness/context.h"
#include "harness/gpu.h"
#include "machine.h"

double clock_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Filling the caches before a call must take longer than the host's launches, or the device would wait
 * for the host while the call is timed; launches of the Python worker's columns take up to 1.3 ms. The
 * fill takes equally long for every column, because a power-limited chip computes faster after a pause:
 * products of 58 ms are 2 % faster after one millisecond and 5 % faster after seven. The worker gets
 * the same number of fills. */
static const double FILL_SECONDS = 2e-3;

static void count_fills(struct pace *pace, const rafter_context *context) {
    double least = FILL_SECONDS;
    for (int i = 0; i < 3; i++) {
        gpu_record(context, pace->before);
        gpu_fill(context, pace->device_other, 0, pace->device_bytes);
        gpu_record(context, pace->after);
        const double seconds = 1e-3 * gpu_elapsed(pace->before, pace->after);
        if (seconds > 0 && seconds < least)
            least = seconds;
    }
    pace->device_fills = (int)ceil(FILL_SECONDS / least);
    pace->device_seconds = pace->device_fills * least;
}

enum { EVICT_PIECE = 64 << 10 }; /* bytes of the other data that a task reads */

bool pace_create(struct pace *pace, bool warm, const rafter_context *context) {
    *pace = (struct pace){.warm = warm, .threads = rafter_context_threads(context)};
    if (context_on_gpu(context)) {
        struct gpu_facts facts;
        gpu_describe(context, &facts);
        pace->device_bytes = 4 * (size_t)facts.l2_bytes;
        pace->device_other = gpu_allocate(pace->device_bytes);
        pace->before = gpu_new_event();
        pace->after = gpu_new_event();
        if (!pace->device_other || !pace->before || !pace->after)
            return false;
        count_fills(pace, context);
        return true;
    }
    if (warm)
        return true;
    pace->other_bytes = (2 * machine_cache_bytes(pace->threads) / EVICT_PIECE + 1) * EVICT_PIECE;
    pace->other = aligned_alloc(64, pace->other_bytes);
    if (!pace->other)
        return false;
    memset(pace->other, 1, pace->other_bytes); /* untouched pages all map to one page of zeros */
    return true;
}

void pace_destroy(struct pace *pace, const rafter_context *context) {
    free(pace->other);
    if (!context || !context_on_gpu(context))
        return;
    gpu_release(pace->device_other);
    gpu_release_event(pace->before);
    gpu_release_event(pace->after);
}

/* Reads a piece of the other data. */
static void evict_piece(void *arg, int64_t piece) {
    const struct pace *const pace = arg;
    const char *const at = pace->other + piece * EVICT_PIECE;
    unsigned sum = 0;
    for (int i = 0; i < EVICT_PIECE; i += 64)
        sum += (unsigned char)at[i];
    static volatile unsigned keep;
    keep = sum;
    (void)keep;
}

void pace_evict(const struct pace *pace, const rafter_context *context) {
    struct pace copy = *pace;
    const int64_t pieces = (int64_t)(pace->other_bytes / EVICT_PIECE);
    if (context) {
        rafter_parallel(context, pieces, evict_piece, &copy);
        return;
    }
#pragma omp parallel for num_threads(pace->threads) schedule(static)
    for (int64_t i = 0; i < pieces; i++)
        evict_piece(&copy, i);
}

void pace_evict_device(const struct pace *pace, const rafter_context *context) {
    for (int i = 0; i < pace->device_fills; i++)
        gpu_fill(context, pace->device_other, 0, pace->device_bytes);
}
