/* SPDX-License-Identifier: Apache-2.0 */
/* How outputs are written, depending on the pages of memory behind them. A page is fresh until somebody writes it: then
 * the kernel provides it, cleared. */
#ifndef RAFTER_CORE_PAGES_H
#define RAFTER_CORE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/context.h"
#include "core/tensor.h"

/* The shortest rows, along a tensor's dimension of stride 1, that are worth streaming, in bytes. A cache line that two
 * rows share is written in two parts by ordinary stores, which read it from memory first: so rows that are not whole
 * cache lines must be longer. How long depends on what the kernel computes meanwhile (docs/perf/cpu.md). */
struct shortest_streamed {
    int64_t of_whole_lines, of_others;
};

/* Whether an output should be written with non-temporal stores: it would not stay in the last-level cache, its rows are
 * long enough, and its pages are not fresh. (The kernel clears fresh pages through the cache; the bytes of a
 * non-temporal store then go to memory twice.) */
bool rafter_should_stream(const rafter_view *output, struct shortest_streamed shortest);

/* Sets the limit for this process: outputs of more than `bytes` are streamed. For measurements. */
void rafter_stream_above(int64_t bytes);

/* If the pages of an output are fresh, writes a zero to each, one thread per huge page. For tasks that write blocks
 * of a matrix: threads that write the same huge page first would all clear it, and a page that is cleared in the
 * middle of a product takes the place of its operands in the cache. Every byte of the output must be written
 * afterwards. */
void rafter_touch_fresh(const rafter_context *context, void *output, int64_t bytes);

#endif
