/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/oracle.h"

#include <math.h>

void oracle_logsumexp(problem *p, enum problem_mode mode) {
    const problem_tensor *x = problem_find(p, "x"), *dlse = problem_find(p, "dlse");
    problem_tensor *lse = problem_find(p, "lse"), *rounded = problem_find(p, "rounded"), *dx = problem_find(p, "dx");
    /* x is [outer, n, inner], lse is [outer, inner]. */
    const int dim = problem_dim(p, x->ndim);
    int64_t outer = 1, n = 1, inner = 1;
    for (int d = 0; d < x->ndim; d++)
        *(d < dim ? &outer : d > dim ? &inner : &n) *= x->shape[d];
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t line = 0; line < outer * inner; line += p->sample) {
        const int64_t first = line / inner * n * inner + line % inner;
        if (mode == PROBLEM_FORWARD) {
            double max = -INFINITY, sum = 0;
            for (int64_t i = 0; i < n; i++)
                max = fmax(max, problem_value(x, first + i * inner));
            for (int64_t i = 0; i < n; i++) {
                const double value = problem_value(x, first + i * inner);
                sum += value == max ? 1 : exp(value - max);
            }
            problem_expect(lse, line, max + log(sum));
            if (rounded)
                problem_expect(rounded, line, max + log(sum));
            continue;
        }
        const double r = problem_value(lse, line), g = problem_value(dlse, line);
        for (int64_t i = 0; i < n; i++) {
            const double value = problem_value(x, first + i * inner);
            problem_expect(dx, first + i * inner, g * (r == -INFINITY && value == -INFINITY ? 0 : exp(value - r)));
        }
    }
}
