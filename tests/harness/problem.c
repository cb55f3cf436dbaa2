#include "harness/problem.h"

const struct op_cases *const problem_ops[] = {
#define RAFTER_OP(name) &rafter_cases_##name,
#include "ops/ops.inc"
#undef RAFTER_OP
    0};
