/* SPDX-License-Identifier: Apache-2.0 */
/* Vector types of V_LANES floats. Included by the file of each width, which defines V_LANES. */
#ifndef RAFTER_SIMD_TYPES_H
#define RAFTER_SIMD_TYPES_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rafter/rafter.h"

/* All functions are static, so that the linker cannot use one ISA level's copy at another level. */
#define V_INLINE static inline __attribute__((always_inline))
/* Not inlined: for code with many callers, where a call costs little beside the loops. Compiled once per file. */
#define V_OUTLINE static __attribute__((noinline, unused))

typedef float vf __attribute__((vector_size(V_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(V_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(V_LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(V_LANES * 2))); /* bf16 or fp16 encodings */
typedef double vd __attribute__((vector_size(V_LANES * 4)));   /* V_LANES / 2 doubles */
typedef float v_quad __attribute__((vector_size(16)));         /* 4 floats at every width */

#endif
