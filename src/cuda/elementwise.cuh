/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elementwise kernels over tensors of one shape with any strides: one output, one or two inputs.
 * Three kernels, by layout:
 *
 *   by_rows      The last dimension is contiguous in the output, and contiguous or expanded in the
 *                inputs. A thread takes packs of 16 bytes that are aligned in the output. An input
 *                that is aligned otherwise is loaded as two aligned packs, which are shifted.
 *   by_tiles     An input is contiguous along another dimension than the output: tiles of 64 x 64
 *                elements are transposed in shared memory.
 *   by_elements  Anything else, and short rows.
 *
 * The output may be one of the inputs. Then they have the same strides, and no thread reads what
 * another one writes.
 */
#ifndef RAFTER_CUDA_ELEMENTWISE_CUH
#define RAFTER_CUDA_ELEMENTWISE_CUH

#include "cuda/launch.cuh"
#include "cuda/vocabulary.cuh"

namespace elementwise {

constexpr int ROW_THREADS = 128, ROW_PACKS = 2;     /* per block; per thread at a time */
constexpr int ELEMENT_THREADS = 256, ELEMENTS = 8;  /* per block; per thread at a time */
constexpr int TILE = 64, TILE_THREADS = 256;        /* elements along each side; per block */
constexpr int64_t SHORT_ROW_BYTES = 128;            /* shorter rows go by elements */
constexpr int64_t LEAST_TILE_SIDE = 16;             /* smaller dimensions are not worth a tile */
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 30; /* per launch: indices take 31 bits */

/* ---- addresses ------------------------------------------------------------------------------- */

/* The output, then the inputs. */
template <int INPUTS> struct Tensors {
    char *data[1 + INPUTS];
    const char *end[1 + INPUTS]; /* of the last element */
    int64_t inner[1 + INPUTS];   /* strides of the last dimension */
    int64_t across[1 + INPUTS];  /* by_tiles: strides of the dimension that inputs are contiguous along */

    template <typename T> DEVICE T *output() const {
        return reinterpret_cast<T *>(data[0]);
    }
    template <typename T> DEVICE const T *input(int i) const {
        return reinterpret_cast<const T *>(data[1 + i]);
    }
    /* WIDE elements at any address. Elements outside of the tensor are not read; those between its
     * rows may be. */
    template <typename T> DEVICE Pack<T, WIDE<T>> load(int i, const T *first) const {
        constexpr int N = WIDE<T>;
        const int ragged = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(T));
        const T *const aligned = first - ragged, *const begin = input<T>(i),
                       *const past = reinterpret_cast<const T *>(end[1 + i]);
        if (ragged == 0 && first >= begin && first + N <= past)
            return load_once<T, N>(first);
        Pack<T, N> pack;
        if (aligned >= begin && aligned + 2 * N <= past) {
            const uint4 *const both = reinterpret_cast<const uint4 *>(aligned);
            reinterpret_cast<uint4 &>(pack) = shifted(both[0], both[1], ragged * static_cast<int>(sizeof(T)));
            return pack;
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            pack.v[j] = first + j >= begin && first + j < past ? first[j] : from_float<T>(0.0f);
        return pack;
    }
};

/* The other dimensions, outermost first. DIMS: their number, or ANY. */
constexpr int ANY = 0;
template <int INPUTS> struct Outer {
    int dims;
    Divisor size[RAFTER_VIEW_DIMS];
    int64_t stride[RAFTER_VIEW_DIMS][1 + INPUTS];

    /* Offsets, in elements, of the index-th combination. */
    template <int DIMS> DEVICE void offsets(unsigned index, int64_t (&at)[1 + INPUTS]) const {
        for (int t = 0; t <= INPUTS; t++)
            at[t] = 0;
        if constexpr (DIMS == ANY) {
#pragma unroll 1
            for (int d = dims - 1; d > 0; d--)
                index = step(d, index, at);
        } else {
#pragma unroll
            for (int d = DIMS - 1; d > 0; d--)
                index = step(d, index, at);
        }
#pragma unroll
        for (int t = 0; t <= INPUTS; t++)
            at[t] += index * stride[0][t];
    }
    DEVICE unsigned step(int d, unsigned index, int64_t (&at)[1 + INPUTS]) const {
        const unsigned outer = size[d].quotient(index), within = index - outer * size[d].number;
#pragma unroll
        for (int t = 0; t <= INPUTS; t++)
            at[t] += within * stride[d][t];
        return outer;
    }
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* An item is a pack of a row. PACKED: the rows of all tensors that are not expanded are whole, aligned
 * packs. F: has `bool done()`, true if there is nothing to do, and
 * `of(packs)`, which makes a pack of the output of one pack of each input. */
template <typename T, int INPUTS, int DIMS, bool PACKED, typename F>
__global__ void __launch_bounds__(ROW_THREADS)
    by_rows(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, int64_t n,
            Divisor row_packs, unsigned items, F f) {
    constexpr int N = WIDE<T>;
    if (f.done())
        return;
    for (unsigned item = blockIdx.x * (ROW_THREADS * ROW_PACKS) + threadIdx.x; item < items;
         item += gridDim.x * (ROW_THREADS * ROW_PACKS)) {
        Pack<T, N> in[ROW_PACKS][INPUTS];
        T *to[ROW_PACKS];
        int64_t column[ROW_PACKS];
#pragma unroll
        for (int k = 0; k < ROW_PACKS; k++) {
            const unsigned i = item + k * ROW_THREADS, row = row_packs.quotient(i < items ? i : 0);
            int64_t at[1 + INPUTS];
            outer.template offsets<DIMS>(row, at);
            to[k] = tensors.template output<T>() + at[0];
            const int ragged = PACKED ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(to[k]) % 16 / sizeof(T));
            column[k] = i < items ? int64_t(i - row * row_packs.number) * N - ragged : n;
            if (column[k] >= n)
                continue;
#pragma unroll
            for (int t = 0; t < INPUTS; t++) {
                const T *const from = tensors.template input<T>(t) + at[1 + t];
                if (tensors.inner[1 + t] == 0)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        in[k][t].v[j] = *from;
                else if constexpr (PACKED)
                    in[k][t] = load_once<T, N>(from + column[k]);
                else
                    in[k][t] = tensors.template load<T>(t, from + column[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < ROW_PACKS; k++) {
            if (column[k] >= n)
                continue;
            const Pack<T, N> out = f.of(in[k]);
            if constexpr (!PACKED)
                if (column[k] < 0 || column[k] + N > n) {
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (column[k] + j >= 0 && column[k] + j < n)
                            to[k][column[k] + j] = out.v[j];
                    continue;
                }
            store_once<T, N>(to[k] + column[k], out);
        }
    }
}

/* `outer` has all dimensions but the last. Adjacent threads take adjacent elements. */
template <typename T, int INPUTS, int DIMS, typename F>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    by_elements(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, Divisor n,
                unsigned elements, F f) {
    if (f.done())
        return;
    for (unsigned first = blockIdx.x * (ELEMENT_THREADS * ELEMENTS) + threadIdx.x; first < elements;
         first += gridDim.x * (ELEMENT_THREADS * ELEMENTS)) {
        Pack<T, 1> in[ELEMENTS][INPUTS];
        T *to[ELEMENTS];
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) {
            const unsigned i = min(first + k * ELEMENT_THREADS, elements - 1), row = n.quotient(i),
                           column = i - row * n.number;
            int64_t at[1 + INPUTS];
            outer.template offsets<DIMS>(row, at);
            to[k] = tensors.template output<T>() + at[0] + column * tensors.inner[0];
#pragma unroll
            for (int t = 0; t < INPUTS; t++)
                in[k][t].v[0] = tensors.template input<T>(t)[at[1 + t] + column * tensors.inner[1 + t]];
        }
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++)
            if (first + k * ELEMENT_THREADS < elements)
                *to[k] = f.of(in[k]).v[0];
    }
}

/* Tiles along the last dimension, of n elements, and another one, of m elements, along which an
 * input is contiguous if it is not contiguous (or expanded) along the last. N: elements of a row of
 * the output that a thread takes at a time; if not 1, all rows of the output and of contiguous
 * inputs are aligned packs. */
template <typename T, int INPUTS, int N, typename F>
__global__ void __launch_bounds__(TILE_THREADS)
    by_tiles(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, int64_t n,
             int64_t m, Divisor tiles_n, Divisor tiles_m, unsigned tiles, F f) {
    constexpr int PACKS = TILE / WIDE<T>;
    /* An odd number of words: neither the threads that write packs nor those that read elements
     * meet in a bank (two do if N is 8). */
    constexpr int PITCH = TILE + 4 / int(sizeof(T));
    constexpr int ACROSS = TILE / N, DOWN = TILE_THREADS / ACROSS, AT_ONCE = TILE / DOWN < 8 ? TILE / DOWN : 8;
    __shared__ T tile[INPUTS][TILE * PITCH];
    if (f.done())
        return;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const unsigned line = tiles_n.quotient(index), rest = tiles_m.quotient(line);
        const int64_t first_n = int64_t(index - line * tiles_n.number) * TILE,
                      first_m = int64_t(line - rest * tiles_m.number) * TILE;
        int64_t at[1 + INPUTS];
        outer.template offsets<ANY>(rest, at);
        __syncthreads(); /* the previous tile has been read */
#pragma unroll
        for (int t = 0; t < INPUTS; t++) {
            if (tensors.inner[1 + t] <= 1)
                continue;
            const T *const from = tensors.template input<T>(t) + at[1 + t] + first_n * tensors.inner[1 + t] + first_m;
#pragma unroll
            for (int k = 0; k < TILE * PACKS / TILE_THREADS; k++) {
                const int i = threadIdx.x + k * TILE_THREADS, row = i / PACKS, column = i % PACKS * WIDE<T>;
                if (first_n + row >= n || first_m + column >= m)
                    continue;
                const Pack<T, WIDE<T>> loaded = tensors.template load<T>(t, from + row * tensors.inner[1 + t] + column);
                unsigned *const words = reinterpret_cast<unsigned *>(&tile[t][row * PITCH + column]);
#pragma unroll
                for (int w = 0; w < 4; w++)
                    words[w] = reinterpret_cast<const unsigned(&)[4]>(loaded)[w];
            }
        }
        __syncthreads();
        const int column = threadIdx.x % ACROSS * N;
        if (first_n + column >= n)
            continue;
#pragma unroll 1
        for (int first = threadIdx.x / ACROSS; first < TILE; first += DOWN * AT_ONCE) {
            Pack<T, N> in[AT_ONCE][INPUTS];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int t = 0; t < INPUTS; t++) {
                    const int64_t row = first_m + first + k * DOWN;
                    const T *const from = tensors.template input<T>(t) + at[1 + t] + row * tensors.across[1 + t];
                    if (row >= m || tensors.inner[1 + t] > 1)
                        continue;
                    if (tensors.inner[1 + t] == 1)
                        in[k][t] = load_once<T, N>(from + first_n + column);
                    else
#pragma unroll
                        for (int j = 0; j < N; j++)
                            in[k][t].v[j] = *from;
                }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const int row = first + k * DOWN;
#pragma unroll
                for (int t = 0; t < INPUTS; t++)
                    if (tensors.inner[1 + t] > 1)
#pragma unroll
                        for (int j = 0; j < N; j++)
                            in[k][t].v[j] = tile[t][(column + j) * PITCH + row];
                if (first_m + row < m)
                    store_once<T, N>(tensors.template output<T>() + at[0] + (first_m + row) * tensors.across[0] +
                                         first_n + column,
                                     f.of(in[k]));
            }
        }
    }
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* Views of one shape: the output, then the inputs; dimensions in the order of the output's
 * memory. */
template <int INPUTS> struct Views {
    rafter_view view[1 + INPUTS];

    int last() const {
        return view[0].ndim - 1;
    }
    bool direct(int t) const {
        const int64_t stride = view[t].stride[last()];
        return stride == 1 || (t > 0 && stride == 0) || view[t].shape[last()] == 1;
    }
    bool all_direct() const {
        bool all = true;
        for (int t = 0; t <= INPUTS; t++)
            all = all && direct(t);
        return all;
    }
    /* Whether the rows of the output, and of the inputs that are contiguous along the last
     * dimension, are whole, aligned packs. */
    bool has_packs() const {
        bool all = true;
        for (int t = 0; t <= INPUTS; t++)
            all = all && (view[t].stride[last()] != 1 || allows_wide_access(view[t], view[t].ndim));
        return all;
    }
    /* A dimension for tiles, or -1: every input that is not contiguous along the last dimension
     * must be contiguous along this one. */
    int other_dim() const {
        for (int d = last() - 1; d >= 0 && direct(0); d--) {
            bool all = view[0].shape[d] >= LEAST_TILE_SIDE && view[0].shape[last()] >= LEAST_TILE_SIDE;
            for (int t = 1; t <= INPUTS; t++)
                all = all && (direct(t) || view[t].stride[d] == 1);
            if (all)
                return d;
        }
        return -1;
    }
    /* All dimensions but the last one and `without`. */
    Outer<INPUTS> outer(int without) const {
        Outer<INPUTS> outer = {};
        for (int d = 0; d < last(); d++)
            if (d != without) {
                outer.size[outer.dims] = Divisor(view[0].shape[d]);
                for (int t = 0; t <= INPUTS; t++)
                    outer.stride[outer.dims][t] = view[t].stride[d];
                outer.dims++;
            }
        return outer;
    }
    Tensors<INPUTS> tensors(int other) const {
        Tensors<INPUTS> tensors = {};
        for (int t = 0; t <= INPUTS; t++) {
            tensors.data[t] = view[t].data;
            tensors.end[t] = view[t].data + rafter_span_bytes(&view[t]);
            tensors.inner[t] = view[t].shape[last()] == 1 ? t == 0 : view[t].stride[last()];
            tensors.across[t] = other < 0 ? 0 : view[t].stride[other];
        }
        return tensors;
    }
    /* Cuts all views in two along their largest dimension; this becomes the first part. */
    Views cut() {
        int d = 0;
        for (int i = 1; i <= last(); i++)
            if (view[0].shape[i] > view[0].shape[d])
                d = i;
        Views second = *this;
        for (int t = 0; t <= INPUTS; t++) {
            const int64_t all = view[t].shape[d], part = round_up(all / 2, int64_t(TILE));
            const int64_t rest = view[t].numel / all;
            view[t].shape[d] = part;
            view[t].numel = rest * part;
            second.view[t].shape[d] = all - part;
            second.view[t].numel = rest * (all - part);
            second.view[t].data = rafter_at(&view[t], part * view[t].stride[d]);
        }
        return second;
    }
};

/* `most_blocks`: of a grid; blocks loop if there is more work. */
template <typename T, int INPUTS, typename F>
void launch_all(const rafter_context *context, Views<INPUTS> views, const F &f, int64_t most_blocks) {
    if (views.view[0].numel == 0)
        return;
    while (views.view[0].numel > MOST_ELEMENTS)
        launch_all<T>(context, views.cut(), f, most_blocks);
    const int64_t n = views.view[0].shape[views.last()], rows = views.view[0].numel / n;
    const auto grid = [&](int64_t work, int per_block) { return min(ceil_div(work, int64_t(per_block)), most_blocks); };
    if (views.all_direct() && n * int64_t(sizeof(T)) >= SHORT_ROW_BYTES) {
        const bool packed = views.has_packs();
        /* If rows are not whole packs: those that a row touches wherever it begins. */
        const int64_t row_packs = ceil_div(packed ? n : n + WIDE<T> - 1, int64_t(WIDE<T>)), items = rows * row_packs;
        const Outer<INPUTS> outer = views.outer(-1);
        const auto kernel = packed ? outer.dims <= 1 ? by_rows<T, INPUTS, 1, true, F> : by_rows<T, INPUTS, ANY, true, F>
                            : outer.dims <= 1 ? by_rows<T, INPUTS, 1, false, F>
                                              : by_rows<T, INPUTS, ANY, false, F>;
        launch(context, {grid(items, ROW_THREADS * ROW_PACKS), ROW_THREADS}, kernel, views.tensors(-1), outer, n,
               Divisor(row_packs), static_cast<unsigned>(items), f);
        return;
    }
    const int other = views.all_direct() ? -1 : views.other_dim();
    if (other >= 0) {
        const int64_t m = views.view[0].shape[other], tiles_n = ceil_div(n, int64_t(TILE)),
                      tiles_m = ceil_div(m, int64_t(TILE)), tiles = rows / m * tiles_n * tiles_m;
        const auto kernel = views.has_packs() ? by_tiles<T, INPUTS, WIDE<T>, F> : by_tiles<T, INPUTS, 1, F>;
        launch(context, {grid(tiles, 1), TILE_THREADS}, kernel, views.tensors(other), views.outer(other), n, m,
               Divisor(tiles_n), Divisor(tiles_m), static_cast<unsigned>(tiles), f);
        return;
    }
    const Outer<INPUTS> outer = views.outer(-1);
    const auto kernel = outer.dims <= 1   ? by_elements<T, INPUTS, 1, F>
                        : outer.dims == 2 ? by_elements<T, INPUTS, 2, F>
                                          : by_elements<T, INPUTS, ANY, F>;
    launch(context, {grid(views.view[0].numel, ELEMENT_THREADS * ELEMENTS), ELEMENT_THREADS}, kernel, views.tensors(-1),
           outer, Divisor(n), static_cast<unsigned>(views.view[0].numel), f);
}

} // namespace elementwise

#endif
