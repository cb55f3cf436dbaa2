/* SPDX-License-Identifier: Apache-2.0 */
/* The naive losses: log_softmax and nll_loss, as in eager PyTorch's cross_entropy. */
#ifndef RAFTER_OPS_LOSS_NAIVE_H
#define RAFTER_OPS_LOSS_NAIVE_H

#include "harness/naive.h"

/* The baseline has only the mean of plain losses, and only these results. */
static inline bool naive_loss_serves(const problem *p) {
    if (p->options.loss.reduction != RAFTER_MEAN || !problem_is_plain_loss(p))
        return false;
    static const char *const known[] = {"loss", "lse", "dlogits", "dx", "dweight"};
    for (int i = 0; i < p->tensors; i++) {
        bool found = p->tensor[i].role == PROBLEM_INPUT || p->tensor[i].role == PROBLEM_UPSTREAM;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            found |= strcmp(p->tensor[i].name, known[k]) == 0;
        if (!found || p->tensor[i].accumulates)
            return false;
    }
    return true;
}

static inline int64_t naive_label(const problem_tensor *target, int64_t row) {
    return target->dtype == RAFTER_I64 ? ((const int64_t *)target->tensor.data)[row]
                                       : ((const int32_t *)target->tensor.data)[row];
}

/* logp = z - lse, row by row: maximum, sum of exponentials, subtraction. Writes lse too unless it
 * is NULL. */
static inline void naive_log_softmax(const struct naive *n, int64_t rows, int64_t classes, struct naive_array logp,
                                     struct naive_array z, float *lse) {
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t from = row * classes;
        const float largest = naive_row_max(z, from, classes);
        const float total = largest + logf(naive_row_sum_exp(z, from, classes, largest));
        naive_row_linear(logp, z, from, classes, 1, total);
        if (lse)
            lse[row] = total;
    }
}

/* The memory of the problem's lse, or NULL. */
static inline float *naive_lse(const struct naive *n) {
    return problem_find(n->problem, "lse") ? naive_data(n, "lse") : NULL;
}

/* The number of rows that are not ignored. */
static inline int64_t naive_counted(const problem_tensor *target) {
    int64_t counted = 0;
    for (int64_t row = 0; row < target->numel; row++)
        counted += naive_label(target, row) >= 0;
    return counted;
}

static inline void naive_nll(const struct naive *n, int64_t classes, struct naive_array logp) {
    const problem_tensor *target = problem_find(n->problem, "target");
    double sum = 0;
    for (int64_t row = 0; row < target->numel; row++) {
        const int64_t label = naive_label(target, row);
        float value = 0;
        if (label >= 0)
            naive_load(&value, logp.dtype, logp.data, row * classes + label, 1);
        sum -= value;
    }
    *(float *)naive_data(n, "loss") = (float)(sum / (double)naive_counted(target));
}

/* dz from logp: the gradient of nll (zeros and one entry per row) is written to memory, and the
 * gradient of log_softmax reads it. */
static inline void naive_loss_backward(const struct naive *n, int64_t classes, struct naive_array dz,
                                       struct naive_array dlogp, struct naive_array logp) {
    const problem_tensor *target = problem_find(n->problem, "target"), *dloss = problem_find(n->problem, "dloss");
    const int64_t rows = target->numel;
    const float each = -(dloss ? *(const float *)dloss->tensor.data : 1) / (float)naive_counted(target);
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        memset((char *)dlogp.data + (size_t)(row * classes) * naive_bytes(dlogp.dtype), 0,
               (size_t)classes * naive_bytes(dlogp.dtype));
        const int64_t label = naive_label(target, row);
        if (label >= 0)
            naive_store(dlogp.dtype, dlogp.data, row * classes + label, &each, 1);
    }
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float sum = naive_row_sum(dlogp, row * classes, classes);
        float g[NAIVE_BLOCK], v[NAIVE_BLOCK];
        for (int64_t i = 0; i < classes; i += NAIVE_BLOCK) {
            const int64_t size = min64(classes - i, NAIVE_BLOCK);
            naive_load(g, dlogp.dtype, dlogp.data, row * classes + i, size);
            naive_load(v, logp.dtype, logp.data, row * classes + i, size);
            for (int64_t k = 0; k < size; k++)
                g[k] -= expf(v[k]) * sum;
            naive_store(dz.dtype, dz.data, row * classes + i, g, size);
        }
    }
}

#endif
