/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "harness/oracle.h"
#include "ops/loss_oracle.h"

void oracle_cross_entropy(problem *p, enum problem_mode mode) {
    const problem_tensor *logits = problem_find(p, "logits");
    problem_tensor *dlogits = problem_find(p, "dlogits");
    const int64_t classes = logits->shape[logits->ndim - 1], rows = problem_find(p, "target")->numel;
    const struct oracle_loss o = oracle_loss_begin(p, rows, classes);
    double *row_loss = calloc((size_t)rows + 1, sizeof *row_loss);
#pragma omp parallel
    {
        double *z = malloc(2 * sizeof *z * ((size_t)classes + 1)), *dz = z + classes;
        if (!z || !row_loss)
            abort();
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row += p->sample) {
            for (int64_t v = 0; v < classes; v++)
                z[v] = problem_value(logits, row * classes + v);
            if (mode == PROBLEM_FORWARD) {
                row_loss[row] = oracle_loss_row(&o, row, z);
                continue;
            }
            oracle_loss_gradient(&o, row, z, dz);
            for (int64_t v = 0; v < classes; v++)
                problem_expect(dlogits, row * classes + v, dz[v]);
        }
        free(z);
    }
    if (mode == PROBLEM_FORWARD && p->sample == 1) /* the loss needs all rows */
        oracle_loss_end(&o, row_loss);
    free(row_loss);
}
