/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and copies memory as fast as one thread can. Compiled once per ISA level
 * (bench/CMakeLists.txt). */
#ifndef RAFTER_HARNESS_STREAMS_H
#define RAFTER_HARNESS_STREAMS_H

#include <stddef.h>

#include "harness/cpu.h"

struct streams {
    /* Sums all words. Here and below addresses are aligned to 64 bytes and sizes are multiples of
     * 1024. */
    float (*read)(const void *from, size_t bytes);
    /* Copies with non-temporal stores. */
    void (*copy)(void *to, const void *from, size_t bytes);
};

#define STREAMS_DECLARE(what, isa) extern const struct streams what##isa;
CPU_LEVEL_LIST(STREAMS_DECLARE, streams_)
#undef STREAMS_DECLARE

#endif
