/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax: how the tensors of a call lie in memory.
 *
 * The views are [outer ..., length, inner]: `length` is the reduced dimension, `inner` the adjacent
 * lines that lie interleaved (1 if the reduced dimension is the last in memory). Where length and
 * inner have no gaps, what belongs to one outer index is one span of memory: a slab.
 *
 * Kernels want all tensors in the order of the output's memory. An input in another order
 * (transposed) is first copied into the output, which the kernel then takes as that input, in place.
 */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_LAYOUT_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_LAYOUT_CUH

#include "ops/act/cuda/problem.cuh"

namespace {

/* The views as [outer ..., length, inner], `inner` of size 1 if nothing lies inside. */
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
    /* One number for all elements of a slab: an expanded gradient. */
    bool is_expanded(int t) const {
        const int64_t *const stride = view[t].stride + dim();
        return (length() == 1 || stride[0] == 0) && (inner() == 1 || stride[1] == 0);
    }
    /* Whether every tensor consists of slabs; dy may also be expanded. */
    bool all_slabs() const {
        return is_slab(IN) && is_slab(OUT) && (!pointer[DY] || is_slab(DY) || is_expanded(DY));
    }
    /* The widest packs of adjacent columns that all tensors allow: 16 bytes, two elements, or one. */
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
    static bool allows_packs(const rafter_view &view, int wanted, int bytes) {
        bool all = reinterpret_cast<uintptr_t>(view.data) % wanted == 0;
        for (int d = 0; d < view.ndim - 1; d++)
            all = all && (view.shape[d] == 1 || view.stride[d] * bytes % wanted == 0);
        return all;
    }
    /* Whether slab i + 1 follows slab i without a gap. */
    bool is_dense(int t) const {
        return is_slab(t) && dim() == 1 && (slabs() == 1 || view[t].stride[0] == elements());
    }
};

/* ---- inputs in another order than the output ------------------------------------------------- */

constexpr int COPY_TILE = 64, COPY_THREADS = 256;

template <typename T> struct CopyArgs {
    const T *from;
    T *to;
    Walk walk;          /* over what is outside; IN is `from`, OUT is `to` */
    int64_t rows, size; /* `size` elements are adjacent in `to`; rows: the dimension that is adjacent in `from` */
    int64_t from_row, from_column, to_row;
    Divisor tiles_across, tiles_down;
};

/* A tile of COPY_TILE by COPY_TILE, read along the rows and written along the columns. */
template <typename T> __global__ void __launch_bounds__(COPY_THREADS) copy_transposed(const CopyArgs<T> a) {
    constexpr int EACH = COPY_TILE * COPY_TILE / COPY_THREADS, STEP = COPY_THREADS / COPY_TILE;
    __shared__ T tile[COPY_TILE][COPY_TILE + (sizeof(T) == 2 ? 2 : 1)];
    const unsigned rest = a.tiles_across.quotient(blockIdx.x), outside = a.tiles_down.quotient(rest);
    const int64_t column = int64_t(blockIdx.x - rest * a.tiles_across.number) * COPY_TILE,
                  row = int64_t(rest - outside * a.tiles_down.number) * COPY_TILE;
    const int x = threadIdx.x % COPY_TILE, y = threadIdx.x / COPY_TILE;
    int64_t at[3];
    a.walk.offsets(outside, at);
    const T *const from = a.from + at[IN] + (row + x) * a.from_row + column * a.from_column;
    T *const to = a.to + at[OUT] + row * a.to_row + column + x;
    T value[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (row + x < a.rows && column + y + k * STEP < a.size)
            value[k] = from[(y + k * STEP) * a.from_column];
#pragma unroll
    for (int k = 0; k < EACH; k++)
        tile[y + k * STEP][x] = value[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (column + x < a.size && row + y + k * STEP < a.rows)
            to[(y + k * STEP) * a.to_row] = tile[x][y + k * STEP];
}

/* A call whose inputs are in the order of the output's memory, and the copy that this takes. */
struct OrderedCall {
    act_call call;
    const rafter_view *copied; /* of the original call: to be copied into the output; NULL: nothing */

    /* `original` must outlive this. `takes_expanded`: the variant reads an expanded dy as it is. */
    OrderedCall(const act_call &original, bool takes_expanded) : call(original), copied(NULL) {
        if (!is_softmax(original))
            return;
        const rafter_view &input = is_forward(original) ? original.in : original.dy;
        if (in_order(input, original.out) || (takes_expanded && is_constant(input)))
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
    static bool is_constant(const rafter_view &input) {
        bool all = true;
        for (int d = 0; d < input.ndim; d++)
            all = all && (input.stride[d] == 0 || input.shape[d] == 1);
        return all;
    }

    /* Enqueues the copy, if there is one. */
    void copy(rafter_context *context) const {
        if (!copied)
            return;
        rafter_view from = *copied, to = call.out, *views[] = {&from, &to};
        rafter_order_by_stride(views, 2, &to, to.ndim);
        rafter_collapse(views, 2, 0, to.ndim); /* the last dimension is adjacent in `to` */
        int row = -1;
        for (int d = 0; d < to.ndim - 1; d++) /* that with the smallest stride in `from` */
            if (row < 0 || (from.stride[d] > 0 && (from.stride[row] == 0 || from.stride[d] < from.stride[row])))
                row = d;
        const int column = to.ndim - 1;
        const rafter_view *pointer[TENSORS] = {&from, NULL, &to};
        for_dtype(to.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            CopyArgs<T> a = {};
            a.from = reinterpret_cast<const T *>(from.data);
            a.to = reinterpret_cast<T *>(to.data);
            a.size = to.shape[column];
            a.from_column = from.stride[column];
            a.rows = row < 0 ? 1 : to.shape[row];
            a.from_row = row < 0 ? 0 : from.stride[row];
            a.to_row = row < 0 ? 0 : to.stride[row];
            for (rafter_view *view : views) { /* leaves the dimensions outside */
                if (row >= 0)
                    for (int d = row; d < column - 1; d++) {
                        view->shape[d] = view->shape[d + 1];
                        view->stride[d] = view->stride[d + 1];
                    }
            }
            const int outside = column - (row >= 0);
            a.walk = walk_over(pointer, 0, outside > 0 ? outside : 0);
            int64_t many = 1;
            for (int d = 0; d < outside; d++)
                many *= to.shape[d];
            const int64_t across = ceil_div(a.size, int64_t(COPY_TILE)), down = ceil_div(a.rows, int64_t(COPY_TILE));
            a.tiles_across = Divisor(across);
            a.tiles_down = Divisor(down);
            ::launch(context, {across * down * many, COPY_THREADS}, copy_transposed<T>, a);
        });
    }
};

} // namespace

#endif
