/* SPDX-License-Identifier: Apache-2.0 */
/* Which compiled variant of an op's kernels serves a call. */
#ifndef RAFTER_CORE_VARIANTS_H
#define RAFTER_CORE_VARIANTS_H

#include "core/context.h"

/* An op's variants.inc has one row per variant, slowest first:
 *     RAFTER_VARIANT(avx512)
 * The build compiles the op's cpu.c once per row, with that level's flags and RAFTER_ISA set to its name; there,
 * RAFTER_KERNELS(op) names the table of functions to define. A kernel takes slices: it never checks, allocates or
 * spawns. */
#define RAFTER_PASTE3_(a, b, c) a##b##_##c
#define RAFTER_PASTE3(a, b, c) RAFTER_PASTE3_(a, b, c)
#define RAFTER_KERNELS(op) RAFTER_PASTE3(rafter_, op, RAFTER_ISA)

struct rafter_variant {
    enum rafter_isa isa;
    const void *kernels;
};

struct rafter_op {
    const char *name;
    int variants;
    const struct rafter_variant *variant; /* slowest first */
};

#define RAFTER_OP(name) extern const struct rafter_op rafter_op_##name;
#include "ops/ops.inc"
#undef RAFTER_OP

/* The last row that the context's level allows; the first row is portable, so there is always one. */
const struct rafter_variant *rafter_pick(const rafter_context *context, const struct rafter_op *op);

#endif
