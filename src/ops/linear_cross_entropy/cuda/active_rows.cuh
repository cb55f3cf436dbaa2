/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernels of linear_cross_entropy share: numbers of the whole call, the list of active
 * rows, and the list of rows by label.
 */
#ifndef RAFTER_LCE_CUDA_ACTIVE_ROWS_CUH
#define RAFTER_LCE_CUDA_ACTIVE_ROWS_CUH

#include <limits.h>

#include "core/sizes.h"
#include "cuda/row_statistics.cuh"
#include "ops/loss_classes.cuh"
#include "ops/loss_sums.cuh"

namespace lce {

/* Numbers of the whole call, on the device. */
struct Common {
    Prepared prepared;
    /* The factor that all rows share, dloss / denominator * logit scale: applied when gradients are stored.
     * With Loss::divides_upstream: see divide_upstream. */
    float alpha;
    int found_nonfinite; /* an ignored row of x holds an infinity or NaN */
    int active;          /* number of active rows */
    unsigned finished;   /* blocks that have finished rows; 0 between kernels */
};

/* ---- active rows ----------------------------------------------------------------------------- */

constexpr int ELSEWHERE = INT_MAX; /* in place of a column: the label's class is another rank's */

/* The rows that the Hopper products multiply: the `count` rows that are not ignored, in their
 * order; or, if ignored rows are not dropped, all rows. Kernels number rows by this list: its k-th
 * row is the call's row order[k]. After the active rows, `order` has the other ones.
 *
 * x of the active rows may be copied. The copy has as many rows as the call, and ends with the last
 * active row: loads past it are outside the tensor map and return 0. If all rows are active, the
 * call's own x has the same form. */
struct ActiveRows {
    const int *order, *count;
    /* The rows' labels in that order: columns of this rank, ELSEWHERE, or negative as from Loss::class_of. */
    const int *classes;
    int64_t all; /* rows of the call */

    /* How many of the list's rows [first, first + rows) are active. */
    DEVICE int among(int64_t first, int64_t rows) const {
        return static_cast<int>(max(int64_t(0), min(*count - first, rows)));
    }
    /* The row of the copy that holds active row `first`. */
    DEVICE int copied_at(int64_t first) const {
        return static_cast<int>(all - *count + first);
    }
};

/* x of active rows: in the call's x, or in the copy. */
template <typename T> struct ActiveX {
    ActiveRows active;
    const T *x;
    int64_t stride;
    bool copied;

    DEVICE const T *at(int64_t k) const {
        return x + (copied ? active.copied_at(k) : active.order[k]) * stride;
    }
};

/* ---- rows by label --------------------------------------------------------------------------- */

constexpr int MANY_ROWS = 128; /* a label of this many rows takes several blocks: see add_labels */

/* The active rows that add to dW at their label, listed by label. `frequent`: the number of labels
 * with MANY_ROWS rows or more, and then these labels, in any order. The results do not depend on the
 * order in which rows are added to the lists. */
struct Labels {
    struct alignas(16) Class {
        int count, first, last; /* rows */
    };
    int *of_row; /* the label's class, or -1. NULL: no lists are wanted */
    Class *of_class;
    int *frequent;

    static constexpr int64_t bytes_of_frequent(int64_t rows) {
        return (1 + rows / MANY_ROWS) * int64_t(sizeof(int));
    }
    /* Called by all threads of the grid, before the first row is added. Rows are read four at a time, so
     * of_row is padded to a multiple of four. */
    DEVICE void clear(int64_t rows, int64_t classes) const {
        const int64_t thread = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
        if (thread < (-rows & 3))
            of_row[rows + thread] = -1;
        for (int64_t v = thread; v < classes; v += gridDim.x * int64_t(blockDim.x))
            of_class[v] = {0, INT_MAX, -1};
        if (thread == 0)
            *frequent = 0;
    }
    DEVICE void add(int row, int label) const {
        of_row[row] = label;
        if (label < 0)
            return;
        Class *const own = &of_class[label];
        atomicMin(&own->first, row);
        atomicMax(&own->last, row);
        if (atomicAdd(&own->count, 1) == MANY_ROWS - 1)
            frequent[1 + atomicAdd(frequent, 1)] = label;
    }
};

/* ---- elements of a row ----------------------------------------------------------------------- */

/* Calls f(i, a constant n): elements [i, i + n) of a row are this thread's. n is N, or 1
 * past the last whole N. */
template <int N, typename F> DEVICE void for_elements(int64_t count, F f) {
    for (int64_t i = threadIdx.x * int64_t(N); i + N <= count; i += blockDim.x * int64_t(N))
        f(i, std::integral_constant<int, N>());
    for (int64_t i = count / N * N + threadIdx.x; i < count; i += blockDim.x)
        f(i, std::integral_constant<int, 1>());
}

template <int N, typename T> DEVICE void load_floats(float (&to)[N], const T *from) {
    unpack(load_once<T, N>(from), to);
}

} // namespace lce

#endif
