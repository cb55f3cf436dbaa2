/* SPDX-License-Identifier: Apache-2.0 */
/* Facts about this machine, from Linux. */
#ifndef RAFTER_BENCH_MACHINE_H
#define RAFTER_BENCH_MACHINE_H

#include <stddef.h>

/* "AMD EPYC 9354 32-Core Processor"; "unknown" if /proc/cpuinfo does not say. Static. */
const char *machine_cpu(void);

/* Logical processors this process may run on. */
int machine_processors(void);

/* Lets this thread run on all processors again, before exec. An OpenMP runtime that binds threads
 * (OMP_PROC_BIND) has bound it to one, and the new program would see only that one. */
void machine_unbind(void);

/* Bytes of data (or unified) cache at a level, 1 to 3, of the first processor; 0: there is none. */
size_t machine_cache_level(int level);

/* Bytes of the last-level caches that this many threads can fill together. */
size_t machine_cache_bytes(int threads);

/* Bytes that can be allocated without swapping. */
size_t machine_free_memory(void);

#endif
