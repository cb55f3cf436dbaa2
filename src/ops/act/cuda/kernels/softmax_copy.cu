/* SPDX-License-Identifier: Apache-2.0 */
/* Copies an input of softmax into the output, in the order of the output's memory. */
#include "cuda/elementwise.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

constexpr int64_t MANY_BYTES = 16 << 20; /* from here on the tiles of cuda/elementwise.cuh are faster */

/* The same elements, for cuda/elementwise.cuh. */
struct Same {
    DEVICE bool done() const {
        return false;
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        return in[0];
    }
};

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

} // namespace

void act_copy_in_order(rafter_context *context, rafter_view from, rafter_view to) {
    rafter_view *views[] = {&from, &to};
    rafter_order_by_stride(views, 2, &to, to.ndim);
    rafter_collapse(views, 2, 0, to.ndim); /* the last dimension is adjacent in `to` */
    int row = -1;
    for (int d = 0; d < to.ndim - 1; d++) /* that with the smallest stride in `from` */
        if (row < 0 || (from.stride[d] > 0 && (from.stride[row] == 0 || from.stride[d] < from.stride[row])))
            row = d;
    const int column = to.ndim - 1;
    const bool tiles = row >= 0 && from.stride[row] == 1 && to.shape[row] >= 64 && to.shape[column] >= 64;
    const rafter_view *pointer[TENSORS] = {&from, NULL, &to};
    for_dtype(to.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        if (tiles && to.numel * int64_t(sizeof(T)) >= MANY_BYTES)
            return elementwise::launch_all<T>(context, elementwise::Views<1>{{to, from}}, Same(), INT32_MAX);
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
        const int rows = a.rows < 64 ? power_at_least(a.rows, 2, 64) : COPY_ELEMENTS / power_at_least(a.size, 2, 64);
        const int64_t columns = COPY_ELEMENTS / rows, across = ceil_div(a.size, columns),
                      down = ceil_div(a.rows, int64_t(rows));
        a.rows_log2 = Divisor(rows).shift;
        a.pitch = rows + (sizeof(T) == 2 ? 2 : 1);
        a.tiles_across = Divisor(across);
        a.tiles_down = Divisor(down);
        ::launch(context, {across * down * many, COPY_THREADS, columns * a.pitch * sizeof(T)}, copy_transposed<T>, a);
    });
}
