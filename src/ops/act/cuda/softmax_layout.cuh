/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax: how the tensors of a call lie in memory.
 *
 * The views are [outer ..., length, inner]. `length` is the reduced dimension. `inner` is the number
 * of interleaved lines: adjacent elements belong to adjacent lines (1 if the reduced dimension is
 * the innermost in memory). If length and inner have no gaps, the elements of one outer index are
 * one span of memory: a slab.
 *
 * Kernels want all tensors in the order of the output's memory. An input in another order
 * (transposed) is first copied into the output, which the kernel then takes as that input, in
 * place.
 */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_LAYOUT_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_LAYOUT_CUH

#include "ops/act/cuda/problem.cuh"

/* Copies `from` into `to`, which has another order of dimensions in memory. kernels/softmax_copy.cu. */
void act_copy_in_order(rafter_context *context, rafter_view from, rafter_view to);

namespace {

/* The views as [outer ..., length, inner]; `inner` has size 1 if the reduced dimension is the
 * innermost in memory. */
struct SlabViews : Views {
    explicit SlabViews(const act_call &call) : Views(call) {
        if (ndim() == 0) /* a scalar is a row of one element */
            rafter_collapse(used, count, 0, 0);
        else
            rafter_move_dim_last(used, count, call.dim);
        const int last = ndim() - 1;
        const rafter_view &out = view[OUT];
        rafter_order_by_stride(used, count, &out, last);
        int inside = last; /* the first dimension inside the reduced one */
        while (inside > 0 && out.shape[last] > 1 && out.stride[inside - 1] < out.stride[last] &&
               out.shape[inside - 1] > 1)
            inside--;
        const int inners = last - inside, outers = rafter_collapse(used, count, 0, inside);
        const int kept = rafter_collapse(used, count, outers, outers + inners);
        rafter_move_dim_last(used, count, outers + kept - 1);
    }
    int dim() const {
        return ndim() - 2;
    }
    int64_t length() const {
        return view[OUT].shape[dim()];
    }
    int64_t inner() const {
        return view[OUT].shape[dim() + 1];
    }
    int64_t elements() const { /* of a slab */
        return length() * inner();
    }
    int64_t slabs() const {
        return view[OUT].numel / elements();
    }
    bool is_slab(int t) const {
        const int64_t *const stride = view[t].stride + dim();
        return (length() == 1 || stride[0] == inner()) && (inner() == 1 || stride[1] == 1);
    }
    /* Whether all elements of a slab are one number in memory: an expanded gradient. */
    bool is_expanded(int t) const {
        const int64_t *const stride = view[t].stride + dim();
        return (length() == 1 || stride[0] == 0) && (inner() == 1 || stride[1] == 0);
    }
    /* Whether every tensor consists of slabs; dy may also be expanded. */
    bool all_slabs() const {
        return is_slab(IN) && is_slab(OUT) && (!pointer[DY] || is_slab(DY) || is_expanded(DY));
    }
    /* The widest packs of adjacent columns that all tensors allow: 16 bytes, two elements, or
     * one. */
    int column_width() const {
        const int bytes = static_cast<int>(rafter_dtype_bytes(view[OUT].dtype));
        for (int width = 16 / bytes; width > 1; width = width > 2 && bytes == 2 ? 2 : 1) {
            bool all = inner() % width == 0;
            for (int t = 0; t < TENSORS; t++)
                if (pointer[t] && !(t == DY && is_expanded(DY)))
                    all = all && allows_packs(view[t], width * bytes, bytes);
            if (all)
                return width;
        }
        return 1;
    }
    /* Whether all slabs consist of whole, aligned packs. An expanded dy does not count. */
    bool slabs_are_packs() const {
        const int64_t bytes = rafter_dtype_bytes(view[OUT].dtype);
        bool all = elements() * bytes % 16 == 0;
        for (int t = 0; t < TENSORS; t++)
            if (pointer[t] && is_slab(t)) {
                all = all && reinterpret_cast<uintptr_t>(view[t].data) % 16 == 0;
                for (int d = 0; d < dim(); d++)
                    all = all && (view[t].shape[d] == 1 || view[t].stride[d] * bytes % 16 == 0);
            }
        return all;
    }
    static bool allows_packs(const rafter_view &view, int wanted, int bytes) {
        bool all = reinterpret_cast<uintptr_t>(view.data) % wanted == 0;
        for (int d = 0; d < view.ndim - 1; d++)
            all = all && (view.shape[d] == 1 || view.stride[d] * bytes % wanted == 0);
        return all;
    }
};

/* Whether columns are so long that persistent blocks would hold fewer than two panels at a time and
 * wait for each other; and wide enough for softmax_columns_two_pass, whose tiles are 512 bytes wide. */
inline bool is_long(const act_call &call, const SlabViews &views) {
    const int inputs = is_forward(call) || views.is_expanded(DY) ? 1 : 2;
    return views.length() * inputs > 65536 && views.inner() * rafter_dtype_bytes(call.out.dtype) >= 1024;
}

/* Whether a call has one input and so few, narrow slabs that softmax_slab_two_pass is faster than
 * persistent blocks, which wait for each other. */
inline bool is_narrow(const act_call &call, const SlabViews &views) {
    const int64_t bytes = rafter_dtype_bytes(call.out.dtype);
    return views.all_slabs() && (is_forward(call) || views.is_expanded(DY)) && views.inner() * bytes <= 256 &&
           views.slabs() <= 8 && views.elements() * bytes >= 1 << 20 && bytes_moved(call) < int64_t(64) << 20;
}

/* ---- inputs in another order than the output ------------------------------------------------- */

/* A call changed so that its inputs are in the order of the output's memory, and the copy that this
 * takes. */
struct OrderedCall {
    act_call call;
    const rafter_view *copied; /* input of the original call that must be copied into the output first; NULL: none */
    bool expanded;             /* dy is one number per outer index, and the kernel reads it so */

    /* `original` must outlive this. `takes_expanded`: the variant reads an expanded dy as it is. */
    OrderedCall(const act_call &original, bool takes_expanded) : call(original), copied(NULL), expanded(false) {
        if (!is_softmax(original))
            return;
        const rafter_view &input = is_forward(original) ? original.in : original.dy;
        if (in_order(input, original.out))
            return;
        expanded = takes_expanded && !is_forward(original) && SlabViews(original).is_expanded(DY);
        if (expanded)
            return;
        copied = &input;
        (is_forward(original) ? call.in : call.dy) = original.out;
    }
    /* Whether the adjacent elements of `out` are adjacent in `input`; true if `out` has none. */
    static bool in_order(const rafter_view &input, const rafter_view &out) {
        for (int d = 0; d < out.ndim; d++)
            if (out.stride[d] == 1 && out.shape[d] > 1)
                return input.stride[d] == 1;
        return true;
    }

    /* Whether the elements along `dim` are adjacent in all tensors but an expanded one. */
    bool dim_is_contiguous() const {
        act_call without = call;
        if (expanded)
            without.dy = call.out;
        return ::dim_is_contiguous(without);
    }

    /* Enqueues the copy, if there is one. */
    void copy(rafter_context *context) const {
        if (!copied)
            return;
        act_copy_in_order(context, *copied, call.out);
    }
};

} // namespace

#endif
