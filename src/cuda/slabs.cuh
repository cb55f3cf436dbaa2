/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows in any layout, for ops that reduce one dimension.
 *
 * A slab is a set of `inner` rows with the same outer index. Each row has `length` elements; element l of
 * row c of a slab lies at l * step + c * across. Two cases:
 *
 *   The elements of a row are adjacent: a slab is one row (inner = 1).
 *   The reduced dimension is not the innermost one in memory: the innermost one runs across the rows of a
 *   slab, usually with across = 1, so that its rows lie side by side.
 *
 * A dense slab is one span of length * inner adjacent elements, where element i belongs to row i % inner.
 */
#ifndef RAFTER_CUDA_SLABS_CUH
#define RAFTER_CUDA_SLABS_CUH

#include "cuda/launch.cuh"
#include "cuda/row_statistics.cuh"
#include "cuda/view_layout.cuh"

/* As a kernel argument. Index 0: the input, 1: its gradient. Strides are in elements. */
struct Slabs {
    int64_t outer, inner, length; /* slabs; rows of a slab; elements of a row */
    char *data[2];
    int64_t step[2], across[2];
    int64_t row_step; /* from the number of a row to the number of the next row of the slab */
    Walk walk;        /* over the outer indices: [0], [1]: the slab's offset; [2]: the number of its first row */

    template <typename T> DEVICE T *at(int tensor, int64_t offset) const {
        return reinterpret_cast<T *>(data[tensor]) + offset;
    }
    int64_t rows() const {
        return outer * inner;
    }
    int64_t slab_elements() const {
        return length * inner;
    }
    bool dense(int tensor) const {
        return inner == 1 ? step[tensor] == 1 : across[tensor] == 1 && step[tensor] == inner;
    }
    /* Whether slabs follow each other without gaps. */
    bool packed(int tensor) const {
        return dense(tensor) && walk.dims <= 1 && (outer <= 1 || walk.stride[tensor][0] == slab_elements());
    }
    /* Whether the slabs begin at multiples of 16 bytes. */
    bool aligned(int tensor, int bytes) const {
        bool all = reinterpret_cast<uintptr_t>(data[tensor]) % 16 == 0;
        for (int d = 0; d < walk.dims; d++)
            all = all && (walk.size[d] <= 1 || walk.stride[tensor][d] * bytes % 16 == 0);
        return all;
    }
    /* Whether each step of a slab consists of whole, aligned packs of 16 bytes. */
    bool packs_across(int tensor, int bytes) const {
        return aligned(tensor, bytes) && across[tensor] == 1 && inner * bytes % 16 == 0 &&
               (length <= 1 || step[tensor] * bytes % 16 == 0);
    }
};

/* The row dimensions of a view (all but the last one), taken apart from the innermost one outwards. A dimension can be
 * taken in several steps, because two views of the same rows may have merged them differently. */
struct RowDims {
    const rafter_view *view;
    int dim;             /* the current dimension */
    int64_t left, taken; /* factors of its size: still to take; already taken */

    explicit RowDims(const rafter_view *of) : view(of), dim(of ? of->ndim - 1 : 0), left(1), taken(1) {
        next();
    }
    void next() {
        while (left == 1 && dim > 0) {
            dim--;
            left = view->shape[dim];
            taken = 1;
        }
    }
    int64_t stride() const {
        return view->stride[dim] * taken;
    }
    void take(int64_t n) {
        left /= n;
        taken *= n;
        next();
    }
};

/* The reduced dimension is the last one of the views. dx, the gradient, may be NULL. It has the shape of x, but its row
 * dimensions may have been merged differently. There is at least one row and one element. */
static inline Slabs slabs_of(const rafter_view &x, const rafter_view *dx) {
    const rafter_view *const views[2] = {&x, dx ? dx : &x};
    Slabs s = {};
    s.length = x.shape[x.ndim - 1];
    bool contiguous = true;
    for (int t = 0; t < 2; t++) {
        s.data[t] = views[t]->data;
        s.step[t] = s.length > 1 ? views[t]->stride[views[t]->ndim - 1] : 1;
        contiguous = contiguous && s.step[t] == 1;
    }
    /* The dimensions of rows, innermost first, which is also the order in which rows are numbered. */
    int dims = 0;
    int64_t size[2 * RAFTER_VIEW_DIMS], stride[3][2 * RAFTER_VIEW_DIMS], rows = 1;
    RowDims a(views[0]), b(views[1]);
    while (a.left > 1) {
        const int64_t n = min(a.left, b.left);
        size[dims] = n;
        stride[0][dims] = a.stride();
        stride[1][dims] = b.stride();
        stride[2][dims++] = rows;
        rows *= n;
        a.take(n);
        b.take(n);
    }
    /* The dimension across slabs is that of the least stride, unless the elements of rows are adjacent. */
    int inner = -1;
    for (int d = 0; d < dims && !contiguous; d++) {
        const auto rank = [&](int of) { return stride[0][of] == 0 ? INT64_MAX : stride[0][of]; };
        if (inner < 0 || rank(d) < rank(inner))
            inner = d;
    }
    s.inner = inner < 0 ? 1 : size[inner];
    s.row_step = inner < 0 ? 1 : stride[2][inner];
    for (int t = 0; t < 2; t++)
        s.across[t] = inner < 0 ? 1 : stride[t][inner];
    s.outer = rows / s.inner;
    for (int d = dims - 1; d >= 0; d--)
        if (d != inner) {
            s.walk.size[s.walk.dims] = size[d];
            for (int t = 0; t < 3; t++)
                s.walk.stride[t][s.walk.dims] = stride[t][d];
            s.walk.dims++;
        }
    if (s.walk.dims == 0)
        s.walk.size[s.walk.dims++] = 1;
    return s;
}

#endif
