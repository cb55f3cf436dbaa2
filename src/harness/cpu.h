/* SPDX-License-Identifier: Apache-2.0 */
/* What the bench asks of the library's CPU side. */
#ifndef RAFTER_HARNESS_CPU_H
#define RAFTER_HARNESS_CPU_H

#include <stdint.h>

#include "rafter/rafter.h"

/* The ISA levels that the naive baselines and the memory streams are compiled for (naive_isas in
 * bench/CMakeLists.txt). Elsewhere than on x86-64 the compiler's baseline is enough: on aarch64 it
 * has NEON. */
#if defined(__x86_64__)
#define CPU_LEVEL_LIST(X, what) X(what, portable) X(what, avx2) X(what, avx512)
#else
#define CPU_LEVEL_LIST(X, what) X(what, portable)
#endif

enum cpu_level {
#define CPU_LEVEL_ENUM(what, isa) what##isa,
    CPU_LEVEL_LIST(CPU_LEVEL_ENUM, CPU_LEVEL_)
#undef CPU_LEVEL_ENUM
        CPU_LEVELS
};

/* The highest of them that this machine runs. */
enum cpu_level cpu_level(void);

/* Runs the innermost matrix loop of linear_cross_entropy `iterations` times on every thread of the
 * context, on data in registers and L1. Returns the flops done by all threads; 0: no memory. */
double cpu_matrix_flops(rafter_context *context, rafter_dtype dtype, int64_t iterations);

/* The same with whole blocks of a product whose K is `depth`, each thread on its own operands, which
 * come from L2 or L3. */
double cpu_block_flops(rafter_context *context, rafter_dtype dtype, int64_t depth, int64_t iterations);

#endif
