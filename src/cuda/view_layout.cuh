/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of views: alignment, and the offsets of items that are numbered along some dimensions. */
#ifndef RAFTER_CUDA_VIEW_LAYOUT_CUH
#define RAFTER_CUDA_VIEW_LAYOUT_CUH

#include "core/tensor.h"
#include "cuda/division.cuh"

/* Whether rows along dimension dims - 1 consist of aligned packs of 16 bytes. Later dimensions are ignored. */
static inline bool allows_wide_access(const rafter_view &view, int dims) {
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype);
    bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < dims; d++)
        all = all && (view.shape[d] == 1 || (d == dims - 1 ? view.stride[d] == 1 : view.stride[d] % wide == 0));
    return all && view.shape[dims - 1] % wide == 0;
}

/* Whether each row of `a` has the same offset from a 16-byte boundary as the same row of `b`, so that aligned packs of
 * one are aligned packs of the other. If the leading dimensions of the two views were merged differently, their strides
 * cannot be compared one by one, and must all be multiples of 16 bytes. */
static inline bool same_alignment(const rafter_view &a, const rafter_view &b) {
    const int64_t bytes = rafter_dtype_bytes(a.dtype);
    bool alike = (reinterpret_cast<uintptr_t>(a.data) - reinterpret_cast<uintptr_t>(b.data)) % 16 == 0;
    bool comparable = a.ndim == b.ndim;
    for (int d = 0; d < a.ndim && comparable; d++)
        comparable = a.shape[d] == b.shape[d];
    for (int d = 0; d < a.ndim - 1; d++)
        alike = alike && (a.stride[d] - (comparable ? b.stride[d] : 0)) * bytes % 16 == 0;
    for (int d = 0; d < b.ndim - 1 && !comparable; d++)
        alike = alike && b.stride[d] * bytes % 16 == 0;
    return alike;
}

/* The offsets, in up to three tensors, of items that are numbered in row-major order of some of their dimensions. */
struct Walk {
    int dims; /* at least one */
    int64_t size[RAFTER_VIEW_DIMS], stride[3][RAFTER_VIEW_DIMS];

    /* The offsets of item `index`, in elements. */
    DEVICE void offsets(int64_t index, int64_t (&at)[3]) const {
        at[0] = at[1] = at[2] = 0;
#pragma unroll 1
        for (int d = dims - 1; d > 0; d--) {
            const int64_t outer = quotient(index, size[d]), inner = index - outer * size[d];
            index = outer;
            for (int t = 0; t < 3; t++)
                at[t] += inner * stride[t][d];
        }
        for (int t = 0; t < 3; t++)
            at[t] += index * stride[t][0];
    }
};

/* The walk over dimensions [from, to) of the views. A view may be NULL. */
static inline Walk walk_over(const rafter_view *const views[3], int from, int to) {
    Walk walk = {};
    walk.dims = to - from;
    walk.size[0] = 1;
    for (int d = from; d < to; d++)
        for (int t = 0; t < 3; t++)
            if (views[t]) {
                walk.size[d - from] = views[t]->shape[d];
                walk.stride[t][d - from] = views[t]->stride[d];
            }
    return walk;
}

#endif
