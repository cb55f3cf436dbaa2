/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The minimum time of a call on this machine, from rates measured in the same run:
 *     memory    the bytes that must move, at the rate of copying (non-temporal) or reading memory
 *     L1        the op's own loops, run by the library on data that stays in L1, times threads
 *     matrix    the flops of matrix products, at the rate of the best matrix instructions; on a
 *               GPU, of a large product by PyTorch
 * The roof is the longest of the three.
 */
#ifndef RAFTER_BENCH_ROOFLINE_H
#define RAFTER_BENCH_ROOFLINE_H

#include "harness/problem.h"
#include "measure.h"

struct roofline {
    rafter_context *context;
    const struct pace *pace;
    double read, copy; /* bytes per second; a copy counts the bytes read and the bytes written */
    double matrix[3];  /* flops per second by dtype; 0: not measured yet */
};

/* Measures the memory rates with the context's threads. False: no memory. */
bool roofline_create(struct roofline *r, rafter_context *context, const struct pace *pace);

/* Seconds to move `bytes` in a call of this problem: results are written, the rest is read. */
double roofline_memory_seconds(const struct roofline *r, const problem *p, enum problem_mode mode, double bytes);

/* Minimum seconds of one call of the problem that was made from this row; 0: unknown. */
double roofline_seconds(struct roofline *r, const problem *p, const struct bench_row *row, enum problem_mode mode);

#endif
