/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU can run. Built with baseline flags only, so that asking is always safe. */
#ifndef RAFTER_CORE_CPU_H
#define RAFTER_CORE_CPU_H

#include <stdbool.h>
#include <stdint.h>

/* Levels of the instruction set that kernels are compiled for; each includes those before it. */
#if defined(__x86_64__)
#define RAFTER_ISA_LEVELS(X)                                                                                           \
    X(portable)   /* any x86-64 */                                                                                     \
    X(avx2)       /* AVX2, FMA, F16C */                                                                                \
    X(avx512)     /* AVX-512 F, BW, DQ, VL */                                                                          \
    X(avx512bf16) /* and its bf16 dot products */                                                                      \
    X(amx)        /* and AMX tiles for bf16, granted by the kernel */
#elif defined(__aarch64__)
#define RAFTER_ISA_LEVELS(X)                                                                                           \
    X(portable) /* the C code that any CPU runs: here to be compared with */                                           \
    X(neon)     /* any aarch64 */                                                                                      \
    X(neonbf16) /* and conversions to bf16, bf16 matrix products */
#else
#define RAFTER_ISA_LEVELS(X) X(portable)
#endif

enum rafter_isa {
#define RAFTER_ISA_ENUM(name) RAFTER_ISA_##name,
    RAFTER_ISA_LEVELS(RAFTER_ISA_ENUM)
#undef RAFTER_ISA_ENUM
        RAFTER_ISA_COUNT
};

/* The highest level that this machine runs. Asks the kernel for AMX permission on first use. */
enum rafter_isa rafter_cpu_isa(void);

const char *rafter_isa_name(enum rafter_isa isa);

/* The level called `name`, or RAFTER_ISA_COUNT. */
enum rafter_isa rafter_isa_named(const char *name);

#endif
