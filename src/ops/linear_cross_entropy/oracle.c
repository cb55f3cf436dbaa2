/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "core/sizes.h"
#include "harness/oracle.h"
#include "ops/loss_oracle.h"

/* If the logits take more multiplications than this, only sampled rows are computed, and results
 * that need all rows are not checked. */
static const double most_products = 4e10;

static double *numbers(int64_t count) {
    double *p = calloc((size_t)count + 1, sizeof *p);
    if (!p)
        abort();
    return p;
}

static void read_row(const problem_tensor *t, int64_t row, int64_t columns, double *to) {
    for (int64_t i = 0; i < columns; i++)
        to[i] = problem_value(t, row * columns + i);
}

void oracle_linear_cross_entropy(problem *p, enum problem_mode mode) {
    const problem_tensor *x = problem_find(p, "x"), *weight = problem_find(p, "weight"),
                         *bias = problem_find(p, "bias");
    problem_tensor *dx = problem_find(p, "dx"), *dweight = problem_find(p, "dweight"),
                   *dbias = problem_find(p, "dbias");
    const int64_t depth = weight->shape[1], classes = weight->shape[0], rows = problem_find(p, "target")->numel;
    const struct oracle_loss o = oracle_loss_begin(p, rows, classes);

    const bool all = p->sample == 1 || (double)rows * (double)classes * (double)depth <= most_products;
    const int64_t step = all ? 1 : p->sample, count = ceil_div(rows, step);        /* sample i is row i * step */
    double *inputs = numbers(count * depth), *transposed = numbers(count * depth); /* [row][k] and [k][row] */
    double *z = numbers(count * classes), *row_loss = numbers(rows);
    for (int64_t i = 0; i < count; i++) {
        read_row(x, i * step, depth, inputs + i * depth);
        for (int64_t k = 0; k < depth; k++)
            transposed[k * count + i] = inputs[i * depth + k];
    }

#pragma omp parallel
    {
        double *w = numbers(depth), *sum = numbers(count);
#pragma omp for schedule(static)
        for (int64_t v = 0; v < classes; v++) {
            read_row(weight, v, depth, w);
            for (int64_t i = 0; i < count; i++)
                sum[i] = bias ? problem_value(bias, v) : 0;
            for (int64_t k = 0; k < depth; k++)
                for (int64_t i = 0; i < count; i++)
                    sum[i] += transposed[k * count + i] * w[k];
            for (int64_t i = 0; i < count; i++)
                z[i * classes + v] = sum[i];
        }
        free(sum);
        free(w);
    }

    if (mode == PROBLEM_FORWARD) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            row_loss[i * step] = oracle_loss_row(&o, i * step, z + i * classes);
        if (all)
            oracle_loss_end(&o, row_loss);
    } else {
        double *dz = numbers(count * classes), *sums = numbers(count * depth);
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            oracle_loss_gradient(&o, i * step, z + i * classes, dz + i * classes);
#pragma omp parallel
        {
            double *w = numbers(depth), *dw = numbers(depth), *partial = numbers(count * depth);
#pragma omp for schedule(static)
            for (int64_t v = 0; v < classes; v++) {
                double db = 0;
                read_row(weight, v, depth, w);
                for (int64_t k = 0; k < depth; k++)
                    dw[k] = 0;
                for (int64_t i = 0; i < count; i++) {
                    if (oracle_loss_ignored(&o, i * step))
                        continue;
                    const double g = dz[i * classes + v];
                    for (int64_t k = 0; dx && k < depth; k++)
                        partial[i * depth + k] += g * w[k];
                    for (int64_t k = 0; k < depth; k++)
                        dw[k] += g * inputs[i * depth + k];
                    db += g;
                }
                if (!all || v % p->sample != 0)
                    continue;
                for (int64_t k = 0; dweight && k < depth; k++)
                    problem_expect(dweight, v * depth + k,
                                   dw[k] + (dweight->accumulates ? problem_initial(dweight, v * depth + k) : 0));
                if (dbias)
                    problem_expect(dbias, v, db);
            }
#pragma omp critical
            for (int64_t i = 0; i < count * depth; i++)
                sums[i] += partial[i];
            free(partial);
            free(dw);
            free(w);
        }
        for (int64_t i = 0; dx && i < count; i++)
            for (int64_t k = 0; k < depth && i * step % p->sample == 0; k++)
                problem_expect(dx, i * step * depth + k, sums[i * depth + k]);
        free(sums);
        free(dz);
    }
    free(row_loss);
    free(z);
    free(transposed);
    free(inputs);
}
