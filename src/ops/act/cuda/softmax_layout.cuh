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
    /* Whether all slabs, but for an expanded dy, are whole and aligned packs. */
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
    /* Whether slab i + 1 follows slab i without a gap. */
    bool is_dense(int t) const {
        return is_slab(t) && dim() == 1 && (slabs() == 1 || view[t].stride[0] == elements());
    }
};

/* ---- inputs in another order than the output ------------------------------------------------- */

constexpr int COPY_ELEMENTS = 4096, COPY_THREADS = 256; /* of a tile; per block */

template <typename T> struct CopyArgs {
    const T *from;
    T *to;
    Walk walk;          /* over what is outside; IN is `from`, OUT is `to` */
    int64_t rows, size; /* `size` elements are adjacent in `to`; rows: the dimension that is adjacent in `from` */
    int64_t from_row, from_column, to_row;
    Divisor tiles_across, tiles_down;
    int rows_log2; /* of a tile; its columns are the rest of COPY_ELEMENTS */
    int pitch;     /* of a column of the tile in shared memory: no two rows share a bank */
    /* copy_small: */
    int64_t outside; /* indices of `walk` */
    int per_block;   /* of them */
    Divisor by_size, by_all;
};

/* A tile, read along the rows and written along the columns. */
template <typename T> __global__ void __launch_bounds__(COPY_THREADS) copy_transposed(const CopyArgs<T> a) {
    constexpr int EACH = COPY_ELEMENTS / COPY_THREADS;
    extern __shared__ uint4 copy_memory[];
    T *const tile = reinterpret_cast<T *>(copy_memory);
    start_next_kernel();
    const int rows = 1 << a.rows_log2, columns = COPY_ELEMENTS >> a.rows_log2;
    const unsigned rest = a.tiles_across.quotient(blockIdx.x), outside = a.tiles_down.quotient(rest);
    const int64_t column = int64_t(blockIdx.x - rest * a.tiles_across.number) * columns,
                  row = int64_t(rest - outside * a.tiles_down.number) * rows;
    int64_t at[3];
    a.walk.offsets(outside, at);
    const T *const from = a.from + at[IN] + row * a.from_row + column * a.from_column;
    T *const to = a.to + at[OUT] + row * a.to_row + column;
    const int rows_left = static_cast<int>(min(a.rows - row, int64_t(rows))),
              columns_left = static_cast<int>(min(a.size - column, int64_t(columns)));
    T value[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * COPY_THREADS, x = i & (rows - 1), y = i >> a.rows_log2;
        if (x < rows_left && y < columns_left)
            value[k] = from[x * a.from_row + y * a.from_column];
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * COPY_THREADS;
        tile[(i >> a.rows_log2) * a.pitch + (i & (rows - 1))] = value[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = threadIdx.x + k * COPY_THREADS, x = i & (columns - 1), y = i / columns;
        if (x < columns_left && y < rows_left)
            to[y * a.to_row + x] = tile[x * a.pitch + y];
    }
}

/* Where rows * size is so small that a block takes several of them: in the order of the output. What
 * is read apart in `from` lies close enough for the cache. */
template <typename T> __global__ void __launch_bounds__(COPY_THREADS) copy_small(const CopyArgs<T> a) {
    constexpr int EACH = COPY_ELEMENTS / COPY_THREADS;
    start_next_kernel();
    const int64_t first = (int64_t)blockIdx.x * a.per_block;
    const int count = static_cast<int>(min(int64_t(a.per_block), a.outside - first)) * (int)a.by_all.number;
    T value[EACH], *to[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const unsigned i = threadIdx.x + k * COPY_THREADS;
        if ((int)i < count) {
            const unsigned index = a.by_all.quotient(i), rest = i - index * a.by_all.number,
                           y = a.by_size.quotient(rest), x = rest - y * a.by_size.number;
            int64_t at[3];
            a.walk.offsets(first + index, at);
            to[k] = a.to + at[OUT] + y * a.to_row + x;
            value[k] = a.from[at[IN] + y * a.from_row + x * a.from_column];
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if ((int)threadIdx.x + k * COPY_THREADS < count)
            *to[k] = value[k];
}

/* A call whose inputs are in the order of the output's memory, and the copy that this takes. */
struct OrderedCall {
    act_call call;
    const rafter_view *copied; /* of the original call: to be copied into the output; NULL: nothing */
    bool expanded;             /* dy is one number per outer index, and is read as that */

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

    /* Enqueues the copy, if there is one. A kernel after it may be launched with Launch::overlaps =
     * copied. */
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
            if (a.rows * a.size <= COPY_ELEMENTS / 2) {
                a.outside = many;
                a.by_size = Divisor(a.size);
                a.by_all = Divisor(a.rows * a.size);
                a.per_block = static_cast<int>(COPY_ELEMENTS / (a.rows * a.size));
                return ::launch(context, {ceil_div(many, int64_t(a.per_block)), COPY_THREADS}, copy_small<T>, a);
            }
            /* Square, or as narrow as the copy is. */
            const int rows =
                a.rows < 64 ? power_at_least(a.rows, 2, 64) : COPY_ELEMENTS / power_at_least(a.size, 2, 64);
            const int64_t columns = COPY_ELEMENTS / rows, across = ceil_div(a.size, columns),
                          down = ceil_div(a.rows, int64_t(rows));
            a.rows_log2 = Divisor(rows).shift;
            a.pitch = rows + (sizeof(T) == 2 ? 2 : 1);
            a.tiles_across = Divisor(across);
            a.tiles_down = Divisor(down);
            ::launch(context, {across * down * many, COPY_THREADS, columns * a.pitch * sizeof(T)}, copy_transposed<T>,
                     a);
        });
    }
};

} // namespace

#endif
