/* SPDX-License-Identifier: Apache-2.0 */
/* The oracles: src/ops/<op>/oracle.c computes the op's results in fp64, from its definition,
 * sharing no code with the library. Each is the op_cases.oracle of its op. */
#ifndef RAFTER_HARNESS_ORACLE_H
#define RAFTER_HARNESS_ORACLE_H

#include "harness/problem.h"

#define RAFTER_OP(name) void oracle_##name(problem *p, enum problem_mode mode);
#include "ops/ops.inc"
#undef RAFTER_OP

#endif
