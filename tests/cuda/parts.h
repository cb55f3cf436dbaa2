/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of test_cuda share. */
#ifndef RAFTER_TESTS_CUDA_PARTS_H
#define RAFTER_TESTS_CUDA_PARTS_H

#include "core/backend.h"
#include "harness/problem.h"

/* The backend's table. */
extern const struct rafter_cuda *cuda;

/* Counts a check; prints the sentence, printf-like, where it failed. */
void expect(bool good, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A context on this stream, or on one of its own, which takes no heed of the default one. */
rafter_context *open_on(void *stream);
rafter_context *open_context(void);
/* With its stream. */
void close_context(rafter_context *context);

/* A tensor in device memory of its own: `bytes` of `from`, or, if that is NULL, of which every bit is set. */
DLTensor on_device(rafter_context *context, const void *from, rafter_dtype dtype, int ndim, int64_t *shape,
                   size_t bytes);
void release_all(const DLTensor *const *tensors, size_t count);

/* One problem in `every`. */
void test_graphs(const struct op_cases *op, int64_t every);
void test_scratch_in_captures(void);
void test_two_streams(const struct op_cases *a, const struct op_cases *b);
void test_meetings(void);
void test_long_products(void);
void test_giants(void);
void test_tiles(void);
void test_bad_labels(void);
void test_layouts(void);
void test_arguments(void);

#endif
