/* SPDX-License-Identifier: Apache-2.0 */
/* The oracles: what every op must answer, computed in fp64 from scratch. Each is op_cases.oracle of its op. */
#ifndef RAFTER_ORACLE_H
#define RAFTER_ORACLE_H

#include "harness/problem.h"

#define RAFTER_OP(name) void oracle_##name(problem *p, enum problem_mode mode);
#include "ops/ops.inc"
#undef RAFTER_OP

#endif
