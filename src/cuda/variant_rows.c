/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA rows of one op, with their functions, from its variants.inc. Compiled once per op, with
 * RAFTER_OP_NAME set to the op's name and the op's folder in the include path.
 */
#include "core/variants.h"

#define OP RAFTER_OP_NAME
#define FUNCTIONS(name) RAFTER_PASTE3(rafter_cuda_, OP, name)

#define CPU(isa)
#define CUDA(name, level) extern const struct rafter_variant_functions FUNCTIONS(name);
#include "variants.inc"
#undef CUDA

extern const struct rafter_variant RAFTER_PASTE(rafter_cuda_rows_, OP)[];
const struct rafter_variant RAFTER_PASTE(rafter_cuda_rows_, OP)[] = {
#define CUDA(name, level) {#name, RAFTER_LEVEL_##level, &FUNCTIONS(name), NULL},
#include "variants.inc"
};
