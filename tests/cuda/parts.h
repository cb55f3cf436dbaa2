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

/* A problem on a context and stream of its own, and the bits of its results when it was called
 * alone. */
struct party {
    problem p;
    rafter_context *context;
    enum problem_mode mode;
    uint64_t bits;
};
/* Makes the party of an op's largest problem that is not `large`, and calls it once, alone. False: it has none. Call
 * `leave` in both cases. */
bool join(struct party *party, const struct op_cases *op, enum problem_mode mode);
void leave(struct party *party);

/* A softmax of one row, so long that its blocks fill the GPU and wait for each other; or another
 * act of that size. */
enum { LINE = 1 << 25 };
struct line {
    int64_t shape[1];
    uint16_t *gpu_x, *gpu_y;
    DLTensor x, y;
    rafter_act_args args;
    rafter_context *context;
};
/* x is 0. The stream becomes the line's. */
void open_line(struct line *line, rafter_act_kind kind, void *stream);
void close_line(struct line *line);

/* Whether the op runs on CUDA at all. */
bool serves(const struct op_cases *op);

/* Takes one problem in `every`. */
void test_graphs(const struct op_cases *op, int64_t every);
void test_scratch_in_captures(void);
void test_two_streams(const struct op_cases *a, const struct op_cases *b);
void test_processes(void);
int run_beside(void); /* the program that test_processes starts */
void test_destroyed(void);
void test_waiting_blocks(void);
void test_long_products(void);
void test_giants(void);
void test_tiles(void);
void test_bad_labels(void);
void test_layouts(void);
void test_arguments(void);
void test_ranks(void);

#endif
