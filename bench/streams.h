/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and copying memory as fast as one thread can; compiled per ISA level (see CMakeLists.txt). */
#ifndef RAFTER_BENCH_STREAMS_H
#define RAFTER_BENCH_STREAMS_H

#include <stddef.h>

struct streams {
    /* Adds up all words. Addresses are aligned to 64 bytes, sizes multiples of 1024, here and below. */
    float (*read)(const void *from, size_t bytes);
    /* Copies, writing past the caches. */
    void (*copy)(void *to, const void *from, size_t bytes);
};

extern const struct streams streams_portable, streams_avx2, streams_avx512;

#endif
