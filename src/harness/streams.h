/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and copies memory as fast as one thread can. Compiled once per ISA level
 * (bench/CMakeLists.txt). */
#ifndef RAFTER_HARNESS_STREAMS_H
#define RAFTER_HARNESS_STREAMS_H

#include <stddef.h>

struct streams {
    /* Sums all words. Here and below addresses are aligned to 64 bytes and sizes are multiples of
     * 1024. */
    float (*read)(const void *from, size_t bytes);
    /* Copies with non-temporal stores. */
    void (*copy)(void *to, const void *from, size_t bytes);
};

extern const struct streams streams_portable, streams_avx2, streams_avx512;

#endif
