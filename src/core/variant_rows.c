/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of one op, from its variants.inc. Compiled once per op, with RAFTER_OP_NAME set to the
 * op's name and the op's folder in the include path. The functions of CUDA rows are in
 * librafter_cuda (cuda/variant_rows.c): here they have a name and a level.
 */
#include "core/variants.h"

#define OP RAFTER_OP_NAME
#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define KERNELS(isa) RAFTER_PASTE3(rafter_, OP, isa)

/* The op's cpu.c defines one table of kernels per ISA level. */
#define CPU(isa) extern const struct RAFTER_PASTE(OP, _kernels) KERNELS(isa);
#define CUDA(name, level)
#include "variants.inc"
#undef CPU
#undef CUDA

static const struct rafter_variant cpu[] = {
#define CPU(isa) {#isa, RAFTER_ISA_##isa, &RAFTER_PASTE3(rafter_, OP, on_cpu), &KERNELS(isa)},
#define CUDA(name, level)
#include "variants.inc"
#undef CPU
#undef CUDA
};

static const struct rafter_variant cuda[] = {
#define CPU(isa)
#define CUDA(name, level) {#name, RAFTER_LEVEL_##level, NULL, NULL},
#include "variants.inc"
#undef CPU
#undef CUDA
};

_Static_assert(sizeof cuda / sizeof *cuda <= RAFTER_MOST_CONSIDERED, "a call could not say which variant it took");

const struct rafter_op RAFTER_PASTE(rafter_op_, OP) = {
    .name = STRING(OP),
    .index = RAFTER_PASTE(RAFTER_OP_INDEX_, OP),
    .cpu_count = sizeof cpu / sizeof *cpu,
    .cuda_count = sizeof cuda / sizeof *cuda,
    .cpu = cpu,
    .cuda = cuda,
};
