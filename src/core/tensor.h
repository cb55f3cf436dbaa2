/* SPDX-License-Identifier: Apache-2.0 */
/* Checked views of DLTensors, and the checks that every op shares. */
#ifndef RAFTER_CORE_TENSOR_H
#define RAFTER_CORE_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#include "core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most dimensions of a caller's tensor, and of a view, which may gain two. */
enum { RAFTER_MAX_DIMS = 16, RAFTER_VIEW_DIMS = RAFTER_MAX_DIMS + 2 };

/* The most elements of a tensor, and the most that lie between its first and its last one. No GPU
 * or CPU has that much memory, and any product of a tensor's sizes, padded to a tile and times the
 * bytes of an element or of a row's statistics, stays far below 2^63. Ops whose tensors together
 * span a larger grid bound that grid as well. */
#define RAFTER_MOST_ELEMENTS ((int64_t)1 << 47)

/* A tensor that has passed the checks: byte offset applied, strides filled in. */
typedef struct rafter_view {
    char *data;
    rafter_dtype dtype;
    int ndim;
    int64_t numel;
    int64_t shape[RAFTER_VIEW_DIMS];
    int64_t stride[RAFTER_VIEW_DIMS]; /* in elements, never negative; 0 in dimensions of size 1 or less */
} rafter_view;

/* Sets of dtypes, for `dtypes` below. */
#define RAFTER_SET(dtype) (1u << (dtype))
#define RAFTER_FLOATS (RAFTER_SET(RAFTER_F32) | RAFTER_SET(RAFTER_BF16) | RAFTER_SET(RAFTER_F16))
#define RAFTER_INTS (RAFTER_SET(RAFTER_I32) | RAFTER_SET(RAFTER_I64))

static inline int64_t rafter_dtype_bytes(rafter_dtype dtype) {
    return dtype == RAFTER_I64 ? 8 : dtype == RAFTER_F32 || dtype == RAFTER_I32 ? 4 : dtype == RAFTER_U8 ? 1 : 2;
}
const char *rafter_dtype_name(rafter_dtype dtype);

/* Checks that `tensor` is given, is on the context's device, has one of `dtypes`, and valid sizes
 * and strides within RAFTER_MOST_ELEMENTS. Notes its memory. */
rafter_status rafter_take_tensor(rafter_context *context, const char *name, const DLTensor *tensor, unsigned dtypes,
                                 rafter_view *view);

/* The same, and that no two indices of it share memory. */
rafter_status rafter_take_output(rafter_context *context, const char *name, const DLTensor *tensor, unsigned dtypes,
                                 rafter_view *view);

/* Notes memory that the call uses under this name. */
rafter_status rafter_note_memory(rafter_context *context, const char *name, const void *memory, size_t bytes);

/* Fails if the memory overlaps any that has been noted: "workspace (..., 64 bytes) overlaps x". The
 * gaps of a strided tensor count as its memory. */
rafter_status rafter_want_unused(rafter_context *context, const char *name, const void *memory, size_t bytes);

/* Fails with "name has shape [2, 3], wanted [2, 4]" unless the view has this shape. */
rafter_status rafter_want_shape(rafter_context *context, const char *name, const rafter_view *view, int ndim,
                                const int64_t *shape);

/* The same with another tensor's shape: "y has shape [2, 3], wanted the shape of x, [2, 4]". */
rafter_status rafter_want_same_shape(rafter_context *context, const char *name, const rafter_view *view,
                                     const char *other_name, const rafter_view *other);

/* Fails with "y has dtype bf16, wanted the dtype of x, fp32" unless they are the same. */
rafter_status rafter_want_same_dtype(rafter_context *context, const char *name, const rafter_view *view,
                                     const char *other_name, const rafter_view *other);

/* Fails when the output shares memory with `other`; interleaved columns of one buffer do not. */
rafter_status rafter_want_disjoint(rafter_context *context, const char *output_name, const rafter_view *output,
                                   const char *other_name, const rafter_view *other);

/* The same memory, element for element: what "in place" means. */
bool rafter_same_memory(const rafter_view *a, const rafter_view *b);

/* Resolves a dimension given as -ndim .. ndim-1. A zero-dimensional tensor takes 0 and -1, as in
 * PyTorch. */
rafter_status rafter_take_dim(rafter_context *context, int32_t given, int ndim, int *dim);

/* Merges the dimensions [from, to) of all views, which have one shape there, where every view
 * allows it, and drops those of size 1. Returns how many dimensions of the range remain: at least
 * one, of size 1 if need be. The dimensions from `to` on move up after these. */
int rafter_collapse(rafter_view *const views[], int count, int from, int to);

/* Makes dimension `dim` the last one; the others keep their order. */
void rafter_move_dim_last(rafter_view *const views[], int count, int dim);

/* Sorts the first `dims` dimensions of all views into the order of `leader`'s memory, outermost
 * first. A stride of 0 repeats everything inside it, and counts as outermost. `leader` may be one
 * of the views. */
void rafter_order_by_stride(rafter_view *const views[], int count, const rafter_view *leader, int dims);

/* Bytes from the first element to the end of the last one; 0 if the view is empty. */
int64_t rafter_span_bytes(const rafter_view *view);

/* Offset in elements of the `index`-th combination (row-major) of dimensions [from, to). */
static inline int64_t rafter_offset(const rafter_view *view, int from, int to, int64_t index) {
    int64_t offset = 0;
    for (int d = to - 1; d > from; d--) {
        offset += index % view->shape[d] * view->stride[d];
        index /= view->shape[d];
    }
    return to > from ? offset + index * view->stride[from] : 0;
}

/* Product of the sizes of dimensions [from, to). */
static inline int64_t rafter_extent(const rafter_view *view, int from, int to) {
    int64_t extent = 1;
    for (int d = from; d < to; d++)
        extent *= view->shape[d];
    return extent;
}

static inline char *rafter_at(const rafter_view *view, int64_t offset) {
    return view->data + offset * rafter_dtype_bytes(view->dtype);
}

#ifdef __cplusplus
}
#endif

#endif
