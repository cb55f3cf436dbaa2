/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the parts of test_cuda. */
#ifndef RAFTER_TESTS_CUDA_PARTS_H
#define RAFTER_TESTS_CUDA_PARTS_H

#include "harness/context.h"
#include "harness/gpu.h"
#include "harness/problem.h"

/* Counts a check, and prints the message, printf-like, if it failed. */
void expect(bool good, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A context on this stream; the same, forced to a variant; and a context on a new stream that does
 * not synchronise with the default stream. Exit with 77 if there is no GPU. */
rafter_context *open_on(void *stream);
rafter_context *open_variant(void *stream, const char *variant);
rafter_context *open_context(void);
/* Releases the context and its stream. */
void close_context(rafter_context *context);

/* A tensor in new device memory: a copy of `from`, or, if that is NULL, with every bit set. */
DLTensor on_device(rafter_context *context, const void *from, rafter_dtype dtype, int ndim, int64_t *shape,
                   size_t bytes);
void release_all(const DLTensor *const *tensors, size_t count);

/* Takes one problem in `every`. */
void test_graphs(const struct op_cases *op, int64_t every);
void test_scratch_in_captures(void);
void test_two_streams(const struct op_cases *a, const struct op_cases *b);
void test_waiting_blocks(void);
void test_long_products(void);
void test_giants(void);
void test_tiles(void);
void test_bad_labels(void);
void test_layouts(void);
void test_arguments(void);

#endif
