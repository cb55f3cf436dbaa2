/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA variants of act share: the tensors of a call, with dimensions reordered and merged. */
#ifndef RAFTER_ACT_CUDA_PROBLEM_CUH
#define RAFTER_ACT_CUDA_PROBLEM_CUH

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/variant.cuh"
#include "cuda/view_layout.cuh"
#include "ops/act/call.h"

namespace {

enum { IN, DY, OUT, TENSORS }; /* the tensors of a call; the order of a Walk's offsets */

constexpr int THREADS = 128; /* per block; each thread takes a pack of 16 bytes: docs/perf/README.md */

/* Backward of `none`, and of relu with a mask, has no `in`: IN is dy then. */
const rafter_view &input_of(const act_call &call) {
    return call.in.data ? call.in : call.dy;
}

bool is_forward(const act_call &call) {
    return call.common.direction == RAFTER_FORWARD;
}

/* Calls f(zero, forward), where zero has the type that stores the output and forward is a std::bool_constant. */
template <typename F> void for_dtype_and_direction(const act_call &call, F f) {
    for_dtype(call.out.dtype,
              [&](auto zero) { is_forward(call) ? f(zero, std::true_type()) : f(zero, std::false_type()); });
}

bool is_softmax(const act_call &call) {
    return call.kind == RAFTER_ACT_SOFTMAX;
}

/* The views of a call's tensors. Derived structs reorder and merge dimensions, in all views alike. */
struct Views {
    rafter_view view[TENSORS];
    const rafter_view *pointer[TENSORS]; /* NULL: the call has no such tensor */
    rafter_view *used[TENSORS];          /* the tensors that the call has */
    int count;
    const rafter_view *expanded; /* a dy that is read as one number per line, so its layout does not matter; or NULL */

    explicit Views(const act_call &call) : count(0), expanded(NULL) {
        view[IN] = input_of(call);
        view[DY] = call.dy;
        view[OUT] = call.out;
        for (int t = 0; t < TENSORS; t++) {
            pointer[t] = t == DY && is_forward(call) ? NULL : &view[t];
            if (pointer[t])
                used[count++] = &view[t];
        }
    }
    Views(const Views &) = delete; /* it points into itself */
    Views &operator=(const Views &) = delete;

    int ndim() const {
        return view[OUT].ndim;
    }
    /* Whether 16-byte accesses can be used along the last dimension of all tensors. */
    bool wide() const {
        bool all = true;
        for (int v = 0; v < count; v++)
            all = all && (used[v] == expanded || allows_wide_access(*used[v], ndim()));
        return all;
    }
    bool contiguous(int dim) const {
        bool all = true;
        for (int v = 0; v < count; v++)
            all = all && (used[v] == expanded || used[v]->stride[dim] == 1 || used[v]->shape[dim] == 1);
        return all;
    }
};

/* Elementwise kinds: dimensions in the order of the output's memory, merged where strides allow. */
struct ElementwiseViews : Views {
    explicit ElementwiseViews(const act_call &call) : Views(call) {
        rafter_order_by_stride(used, count, &view[OUT], ndim());
        rafter_collapse(used, count, 0, ndim());
    }
    /* All tensors have the same layout without gaps. */
    bool flat() const {
        return ndim() == 1 && contiguous(0);
    }
};

/* Softmax: the bytes that a call moves, and which calls count as small and as large: docs/perf/act.md. */
int64_t bytes_moved(const act_call &call) {
    return call.out.numel * rafter_dtype_bytes(call.out.dtype) * (is_forward(call) ? 2 : 3);
}
bool is_small(const act_call &call) {
    return bytes_moved(call) < int64_t(32) << 20;
}
bool is_large(const act_call &call) {
    return bytes_moved(call) >= int64_t(256) << 20;
}

/* Batch-invariant softmax: a block of KEPT_THREADS threads with KEPT_PACKS packs of each input per
 * thread keeps a row in registers. Longer rows of aligned packs take softmax_slab_in_cluster. */
template <bool FORWARD> constexpr int KEPT_PACKS = FORWARD ? 4 : 2;
constexpr int KEPT_THREADS = 512;

/* Softmax: whether the elements along `dim` are adjacent in all tensors. */
bool dim_is_contiguous(const act_call &call) {
    const rafter_view *const views[TENSORS] = {&call.in, is_forward(call) ? NULL : &call.dy, &call.out};
    bool all = true;
    for (const rafter_view *view : views)
        all = all && (!view || view->ndim == 0 || view->stride[call.dim] == 1 || view->shape[call.dim] == 1);
    return all;
}

/* The longest line that softmax_chunks takes, in elements. */
constexpr int MOST_CHUNKED_LENGTH = 512;

/* Softmax: the tensors as [outer ..., dim] if dim is contiguous, else as [outer ..., dim, columns].
 * The other dimensions are in the order of the output's memory, and merged where strides allow. */
struct SoftmaxViews : Views {
    explicit SoftmaxViews(const act_call &call, bool dy_is_expanded = false) : Views(call) {
        if (dy_is_expanded)
            expanded = &view[DY];
        if (ndim() == 0) /* a scalar is a row of one element */
            rafter_collapse(used, count, 0, 0);
        else
            rafter_move_dim_last(used, count, call.dim);
        rafter_order_by_stride(used, count, &view[OUT], ndim() - 1);
        const int dim = rafter_collapse(used, count, 0, ndim() - 1);
        if (!contiguous(dim))
            rafter_move_dim_last(used, count, dim - 1);
    }
    int64_t size(int dim) const {
        return view[OUT].shape[dim];
    }
    int64_t numel() const {
        return view[OUT].numel;
    }
};

} // namespace

#endif
