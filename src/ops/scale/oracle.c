/* SPDX-License-Identifier: Apache-2.0 */
/* scale in fp64: y = factor * x. The product of two fp32 numbers is exact in fp64. */
#include "harness/oracle.h"

void oracle_scale(problem *p, enum problem_mode mode) {
    if (mode != PROBLEM_FORWARD)
        return;
    const problem_tensor *x = problem_find(p, "x");
    problem_tensor *y = problem_find(p, "y");
    const double factor = problem_value(problem_find(p, "factor"), 0);
    const int64_t samples = (y->numel + p->sample - 1) / p->sample;
#pragma omp parallel for if (samples > 100000)
    for (int64_t k = 0; k < samples; k++)
        problem_expect(y, k * p->sample, factor * problem_value(x, k * p->sample));
}
