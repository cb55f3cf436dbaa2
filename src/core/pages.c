/* SPDX-License-Identifier: Apache-2.0 */
#include "core/pages.h"

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/sizes.h"
#include "core/threads.h"

/* Asks Linux first: on AMD virtual machines glibc reports ten times too much. */
static int64_t last_level_cache(void) {
    long kibibytes = 0;
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    if (file) {
        if (fscanf(file, "%ldK", &kibibytes) != 1)
            kibibytes = 0;
        fclose(file);
    }
    if (kibibytes > 0)
        return (int64_t)kibibytes << 10;
    const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return found > 0 ? found : 32 << 20;
}

/* 0: not known yet. Every thread that races there writes the same value. */
static _Atomic int64_t stream_limit;

/* Whether the page at the middle of a span has memory. True if that cannot be known. */
static bool has_been_used(const void *memory, int64_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t middle = ((uintptr_t)memory + (uintptr_t)bytes / 2) / page * page;
    unsigned char resident = 1;
    const int kept = errno;
    if (mincore((void *)middle, page, &resident) != 0)
        errno = kept;
    return resident & 1;
}

/* Whether the rows of an output, along its dimension of stride 1, are long enough to be streamed. */
static bool has_rows_to_stream(const rafter_view *output, struct shortest_streamed shortest) {
    const int64_t line = 64, bytes = rafter_dtype_bytes(output->dtype);
    int64_t row = 0;
    bool whole_lines = (uintptr_t)output->data % (uintptr_t)line == 0;
    for (int d = 0; d < output->ndim; d++) {
        if (output->shape[d] > 1 && output->stride[d] == 1)
            row = output->shape[d] * bytes;
        else if (output->shape[d] > 1)
            whole_lines &= output->stride[d] * bytes % line == 0;
    }
    whole_lines &= row % line == 0;
    return row >= (whole_lines ? shortest.of_whole_lines : shortest.of_others);
}

bool rafter_should_stream(const rafter_view *output, struct shortest_streamed shortest) {
    /* Half of the cache, but no more than this: virtual machines see the whole cache of a processor
     * that they share with others (300 MiB on a Xeon, where copies of 32 MiB and more are a third
     * faster past the caches). */
    const int64_t most = 32 << 20;
    if (stream_limit == 0) {
        const int64_t half = last_level_cache() / 2;
        stream_limit = half < most ? half : most;
    }
    const int64_t bytes = rafter_span_bytes(output);
    return bytes > stream_limit && has_rows_to_stream(output, shortest) && has_been_used(output->data, bytes);
}

void rafter_stream_above(int64_t bytes) {
    stream_limit = bytes;
}

enum { HUGE_PAGE = 2 << 20 };

struct output {
    char *begin, *end;
    uintptr_t page; /* bytes of a small one */
};

static void touch_task(void *arg, int64_t task) {
    const struct output *const o = arg;
    const uintptr_t first = (uintptr_t)o->begin / HUGE_PAGE + (uintptr_t)task;
    char *from = task == 0 ? o->begin : (char *)(first * HUGE_PAGE), *const to = (char *)((first + 1) * HUGE_PAGE);
    while (from < to && from < o->end) {
        *(volatile char *)from = 0;
        from = (char *)(((uintptr_t)from / o->page + 1) * o->page);
    }
}

void rafter_touch_fresh(const rafter_context *context, void *output, int64_t bytes) {
    if (bytes < HUGE_PAGE || has_been_used(output, bytes))
        return;
    struct output o = {.begin = output, .end = (char *)output + bytes, .page = (uintptr_t)sysconf(_SC_PAGESIZE)};
    const uintptr_t pages = ((uintptr_t)o.end - 1) / HUGE_PAGE + 1 - (uintptr_t)o.begin / HUGE_PAGE;
    rafter_parallel_phase(context, "fresh pages", (int64_t)pages, touch_task, &o);
}
