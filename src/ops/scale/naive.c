/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/naive.h"

static bool serves(const problem *p, enum problem_mode mode) {
    (void)p;
    return mode == PROBLEM_FORWARD;
}

static void forward(struct naive *n) {
    const int64_t count = problem_find(n->problem, "x")->numel;
    const struct naive_array from = naive_array(n, "x"), to = naive_array(n, "y");
    const float factor = *(const float *)naive_data(n, "factor");
#pragma omp parallel for num_threads(n->threads) schedule(static)
    for (int64_t block = 0; block < ceil_div(count, NAIVE_BLOCK); block++)
        naive_row_linear(to, from, block * NAIVE_BLOCK, min64(count - block * NAIVE_BLOCK, NAIVE_BLOCK), factor, 0);
}

const struct naive_op NAIVE_OP(scale) = {.serves = serves, .forward = forward};
