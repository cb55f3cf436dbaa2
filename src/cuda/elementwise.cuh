/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elementwise kernels over tensors of one shape with any strides: one output, one or two inputs.
 * launch_all picks one of six kernels by layout. A row is the last dimension:
 *
 *   by_packs     Rows of all tensors consist of aligned packs of 16 bytes, and are evenly spaced. A
 *                thread takes a pack of the output.
 *   by_rows      Rows are contiguous in the output, and contiguous or expanded (stride 0) in the
 *                inputs. A thread takes packs of 16 bytes that are aligned in the output.
 *   by_segments  The same for long rows of fp32 that are not aligned: adjacent threads take adjacent
 *                elements.
 *   by_tiles     An input is contiguous along another dimension than the output: tiles are
 *                transposed in shared memory (elementwise_tiles.cuh, which has two kernels).
 *   by_gather    Short rows of 16-bit elements of an output without gaps: a thread takes a pack of the
 *                output, which may span several rows, and gathers its elements.
 *   by_elements  Anything else.
 *
 * The output may be one of the inputs. They have the same strides then, and no thread reads what
 * another one writes.
 */
#ifndef RAFTER_CUDA_ELEMENTWISE_CUH
#define RAFTER_CUDA_ELEMENTWISE_CUH

#include "cuda/elementwise_tiles.cuh"

namespace elementwise {

constexpr int PACK_THREADS = 256;                   /* per block */
constexpr int ROW_THREADS = 128;                    /* per block */
constexpr int SEGMENT_THREADS = 128, SEGMENT = 8;   /* per block; elements of a thread */
constexpr int GATHER_THREADS = 256;                 /* per block */
constexpr int ELEMENT_THREADS = 256, ELEMENTS = 8;  /* per block; per thread at a time */
constexpr int64_t SHORT_ROW_BYTES = 128;            /* shorter rows, unless they are packs, are not for by_rows */
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 30; /* per launch: indices take 31 bits */
constexpr int64_t CUT_MULTIPLE = 64;                /* where tensors are cut, so that packs stay aligned */

/* An F for the kernels below: the output is the input. */
struct Copy {
    DEVICE bool start() const {
        return true;
    }
    template <typename T, int N> DEVICE Pack<T, N> of(const Pack<T, N> (&in)[1]) const {
        return in[0];
    }
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* An F, the function that is computed, has
 *     bool start()             called by every thread first, to load what all elements share. False: nothing to do
 *     Pack<T, N> of(packs)     a pack of the output, from one pack of each input */
template <typename T, int INPUTS, typename F>
__global__ void __launch_bounds__(PACK_THREADS)
    by_packs(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer,
             Divisor row_packs, unsigned packs, F f) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    start_next_kernel();
    if (!f.start())
        return;
    for (unsigned i = blockIdx.x * PACK_THREADS + threadIdx.x; i < packs; i += gridDim.x * PACK_THREADS) {
        const unsigned row = row_packs.quotient(i), column = (i - row * row_packs.number) * N;
        Pack<T, N> in[INPUTS];
#pragma unroll
        for (int t = 0; t < INPUTS; t++)
            in[t] = load_once<T, N>(tensors.template input<T>(t) + row * outer.stride[0][1 + t] + column);
        store_once<T, N>(tensors.template output<T>() + row * outer.stride[0][0] + column, f.of(in));
    }
}

/* How much by_rows has in flight: packs per thread at a time, and blocks per multiprocessor, at least. */
template <typename T, int INPUTS, bool PACKED> struct RowShape {
    static constexpr bool SHIFTED = NARROW<T> && !PACKED; /* two aligned packs for one */
    static constexpr int PACKS = SHIFTED && INPUTS == 2 ? 1 : 2;
    static constexpr int blocks(int dims) {
        return SHIFTED || (INPUTS == 2 && dims == ANY) ? 8 : INPUTS == 2 ? 10 : 12;
    }
};

/* An item is a pack of a row. PACKED: the rows of all tensors, except those that are expanded, consist of aligned
 * packs. */
template <typename T, int INPUTS, int DIMS, bool PACKED, typename F>
__global__ void __launch_bounds__(ROW_THREADS, RowShape<T, INPUTS, PACKED>::blocks(DIMS))
    by_rows(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, int n,
            Divisor row_packs, unsigned items, F f) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, ROW_PACKS = RowShape<T, INPUTS, PACKED>::PACKS;
    start_next_kernel();
    if (!f.start())
        return;
    for (unsigned item = blockIdx.x * (ROW_THREADS * ROW_PACKS) + threadIdx.x; item < items;
         item += gridDim.x * (ROW_THREADS * ROW_PACKS)) {
        Operand<T, PACKED> in[ROW_PACKS][INPUTS];
        T *to[ROW_PACKS];
        int column[ROW_PACKS];
#pragma unroll
        for (int k = 0; k < ROW_PACKS; k++) {
            const unsigned i = item + k * ROW_THREADS, row = row_packs.quotient(i < items ? i : 0);
            int64_t at[1 + INPUTS];
            outer.template offsets<DIMS>(row, at);
            to[k] = tensors.template output<T>() + at[0];
            const int ragged = PACKED ? 0 : offset_in_pack(to[k]);
            column[k] = i < items ? static_cast<int>(i - row * row_packs.number) * N - ragged : n;
            if (column[k] >= n)
                continue;
#pragma unroll
            for (int t = 0; t < INPUTS; t++)
                in[k][t].load(tensors, t, tensors.template input<T>(t) + at[1 + t], column[k]);
        }
#pragma unroll
        for (int k = 0; k < ROW_PACKS; k++) {
            if (column[k] >= n)
                continue;
            Pack<T, N> packs[INPUTS];
#pragma unroll
            for (int t = 0; t < INPUTS; t++)
                packs[t] = in[k][t].get(tensors, t);
            const Pack<T, N> out = f.of(packs);
            if constexpr (PACKED)
                store_once<T, N>(to[k] + column[k], out);
            else
                store_inside(to[k] + column[k], out, column[k], 0, n);
        }
    }
}

/* A segment is SEGMENT_THREADS * SEGMENT elements of a row. */
template <typename T, int INPUTS, typename F>
__global__ void __launch_bounds__(SEGMENT_THREADS, INPUTS == 1 ? 12 : 8)
    by_segments(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, int n,
                Divisor row_segments, unsigned segments, F f) {
    wait_for_inputs();
    start_next_kernel();
    if (!f.start())
        return;
    for (unsigned i = blockIdx.x; i < segments; i += gridDim.x) {
        const unsigned row = row_segments.quotient(i);
        const int first = static_cast<int>((i - row * row_segments.number) * (SEGMENT_THREADS * SEGMENT) + threadIdx.x);
        int64_t at[1 + INPUTS];
        outer.template offsets<ANY>(row, at);
        Pack<T, 1> in[SEGMENT][INPUTS];
#pragma unroll
        for (int k = 0; k < SEGMENT; k++)
            if (const int column = first + k * SEGMENT_THREADS; column < n)
#pragma unroll
                for (int t = 0; t < INPUTS; t++)
                    in[k][t] =
                        load_once<T, 1>(tensors.template input<T>(t) + at[1 + t] + column * tensors.inner[1 + t]);
        T *const to = tensors.template output<T>() + at[0];
#pragma unroll
        for (int k = 0; k < SEGMENT; k++)
            if (const int column = first + k * SEGMENT_THREADS; column < n)
                store_once(to + column, f.of(in[k]));
    }
}

/* An input of by_gather. */
struct Gathered {
    bool dense;   /* without gaps, as the output: its packs are loaded whole */
    int64_t wrap; /* elements from where a row ends (first element + n strides) to the next row */
};
template <int INPUTS> struct Gather { Gathered of[INPUTS]; };

/* The output has no gaps: it consists of `packs` aligned packs from element `head` on, and `edges` single elements
 * before and after them. `outer` has at most one dimension. */
template <typename T, int INPUTS, typename F>
__global__ void __launch_bounds__(GATHER_THREADS)
    by_gather(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer,
              const __grid_constant__ Gather<INPUTS> gather, Divisor n, int head, unsigned packs, int edges, F f) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    start_next_kernel();
    if (!f.start())
        return;
    for (unsigned i = blockIdx.x * GATHER_THREADS + threadIdx.x; i < packs; i += gridDim.x * GATHER_THREADS) {
        const unsigned first = head + i * N, row = n.quotient(first), column = first - row * n.number;
        Pack<T, N> in[INPUTS];
        UnalignedPack<T> dense[INPUTS];
#pragma unroll
        for (int t = 0; t < INPUTS; t++) {
            const T *from = tensors.template input<T>(t);
            if (gather.of[t].dense) {
                dense[t].load(true, from + first, from, tensors.template past<T>(t));
            } else {
                const int64_t step = tensors.inner[1 + t], wrap = gather.of[t].wrap;
                from += row * outer.stride[0][1 + t] + column * step;
                unsigned left = n.number - column;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    in[t].v[j] = *from;
                    left--;
                    from += left == 0 ? step + wrap : step;
                    left = left == 0 ? n.number : left;
                }
            }
        }
#pragma unroll
        for (int t = 0; t < INPUTS; t++)
            if (gather.of[t].dense)
                in[t] = dense[t].get(tensors.template input<T>(t), tensors.template past<T>(t));
        store_once<T, N>(tensors.template output<T>() + first, f.of(in));
    }
    if (blockIdx.x == 0 && threadIdx.x < edges) {
        const unsigned i = threadIdx.x < head ? threadIdx.x : threadIdx.x + packs * N, row = n.quotient(i);
        Pack<T, 1> in[INPUTS];
#pragma unroll
        for (int t = 0; t < INPUTS; t++)
            in[t].v[0] = tensors.template input<T>(
                t)[row * outer.stride[0][1 + t] + (i - row * n.number) * tensors.inner[1 + t]];
        tensors.template output<T>()[i] = f.of(in).v[0];
    }
}

/* Adjacent threads take adjacent elements of a row. */
template <typename T, int INPUTS, int DIMS, typename F>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    by_elements(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer, Divisor n,
                unsigned elements, F f) {
    wait_for_inputs();
    start_next_kernel();
    if (!f.start())
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

/* ---- launch ---------------------------------------------------------------------------------- */

/* Views of one shape: the output, then the inputs. Dimensions are in the order of the output's memory, innermost
 * last. */
template <int INPUTS> struct Views {
    rafter_view view[1 + INPUTS];

    int last() const {
        return view[0].ndim - 1;
    }
    /* Whether rows of tensor t are contiguous; for an input, also expanded. */
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
    /* Whether some input has one element per row. */
    bool any_expanded() const {
        bool any = false;
        for (int t = 1; t <= INPUTS; t++)
            any = any || (view[t].stride[last()] == 0 && view[t].shape[last()] > 1);
        return any;
    }
    /* Whether the rows of the output, and of the inputs that are contiguous along the last dimension, consist of
     * aligned packs. */
    bool has_packs() const {
        bool all = allows_wide_access(view[0], view[0].ndim);
        for (int t = 1; t <= INPUTS; t++)
            all = all && (view[t].stride[last()] != 1 || allows_wide_access(view[t], view[t].ndim));
        return all;
    }
    /* The second dimension of tiles: every input that is not contiguous along the last dimension must be contiguous
     * along this one. -1: there is none. */
    int other_dim() const {
        for (int d = last() - 1; d >= 0 && direct(0); d--) {
            bool all = view[0].shape[d] >= LEAST_TILE_ROWS;
            for (int t = 1; t <= INPUTS; t++)
                all = all && (direct(t) || view[t].stride[d] == 1);
            if (all && (view[0].shape[last()] >= LEAST_TILE_COLUMNS || flat(d)))
                return d;
        }
        return -1;
    }
    /* Whether the lines along `d` of the inputs that are contiguous there consist of aligned packs. */
    bool has_line_packs(int d) const {
        const int64_t bytes = rafter_dtype_bytes(view[0].dtype);
        bool all = view[0].shape[d] * bytes % 16 == 0;
        for (int t = 1; t <= INPUTS; t++)
            if (!direct(t)) {
                all = all && reinterpret_cast<uintptr_t>(view[t].data) % 16 == 0;
                for (int i = 0; i <= last(); i++)
                    all = all && (i == d || view[t].shape[i] == 1 || view[t].stride[i] * bytes % 16 == 0);
            }
        return all;
    }
    /* Whether the rows of tensor t follow each other along `d` without gaps. */
    bool has_dense_rows(int t, int d) const {
        const int64_t n = view[t].shape[last()];
        return (n == 1 || view[t].stride[last()] == 1) && (view[t].shape[d] == 1 || view[t].stride[d] == n);
    }
    /* Whether tiles along `d` can have whole rows and be written as spans without gaps: for short rows. */
    bool flat(int d) const {
        bool all = view[0].shape[last()] <= MOST_FLAT_COLUMNS && has_dense_rows(0, d);
        for (int t = 1; t <= INPUTS; t++) {
            const bool turned = !direct(t), same = view[t].stride[last()] == 0 && view[t].stride[d] == 0;
            all = all && (turned || same || has_dense_rows(t, d));
        }
        return all;
    }
    /* Whether the output has no gaps, and at most two dimensions. */
    bool is_dense() const {
        return view[0].ndim <= 2 && (view[0].ndim == 1 ? direct(0) : has_dense_rows(0, 0));
    }
    Gather<INPUTS> gather() const {
        Gather<INPUTS> gather = {};
        const bool rows = view[0].ndim == 2;
        for (int t = 1; t <= INPUTS; t++) {
            const int64_t step = view[t].shape[last()] == 1 ? 0 : view[t].stride[last()];
            gather.of[t - 1].dense = rows ? has_dense_rows(t, 0) : step == 1;
            gather.of[t - 1].wrap = (rows ? view[t].stride[0] : 0) - view[t].shape[last()] * step;
        }
        return gather;
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
    /* Cuts all views in two along their largest dimension. This object becomes the first part; returns the second. */
    Views cut() {
        int d = 0;
        for (int i = 1; i <= last(); i++)
            if (view[0].shape[i] > view[0].shape[d])
                d = i;
        Views second = *this;
        for (int t = 0; t <= INPUTS; t++) {
            const int64_t all = view[t].shape[d], part = round_up(all / 2, CUT_MULTIPLE);
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

/* The launch of one kernel. The tensors have at most MOST_ELEMENTS. */
template <typename T, int INPUTS, typename F> struct Launcher {
    const rafter_context *context;
    const Views<INPUTS> &views;
    const F &f;
    int64_t most_blocks;
    int64_t n, rows; /* elements of a row; rows */

    int64_t grid(int64_t work, int per_block) const {
        return min(ceil_div(work, int64_t(per_block)), most_blocks);
    }
    void launch_rows() const {
        const bool packed = views.has_packs(), whole = allows_wide_access(views.view[0], views.view[0].ndim);
        /* Packs per row. If rows need not be aligned: those that a row touches wherever it begins. */
        const int64_t row_packs = ceil_div(whole ? n : n + WIDE<T> - 1, int64_t(WIDE<T>)), items = rows * row_packs;
        const Outer<INPUTS> outer = views.outer(-1);
        if (packed && outer.dims <= 1 && !views.any_expanded())
            return launch(context, {grid(items, PACK_THREADS), PACK_THREADS}, by_packs<T, INPUTS, F>, views.tensors(-1),
                          outer, Divisor(row_packs), static_cast<unsigned>(items), f);
        if constexpr (!NARROW<T>) {
            constexpr int64_t LONG_ROW = INPUTS == 2 ? 2048 : 8192;
            const int64_t row_segments = ceil_div(n, int64_t(SEGMENT_THREADS * SEGMENT)),
                          segments = rows * row_segments;
            if (!packed && n >= LONG_ROW)
                return launch(context, {grid(segments, 1), SEGMENT_THREADS}, by_segments<T, INPUTS, F>,
                              views.tensors(-1), outer, static_cast<int>(n), Divisor(row_segments),
                              static_cast<unsigned>(segments), f);
        }
        const auto kernel = packed            ? by_rows<T, INPUTS, ANY, true, F>
                            : outer.dims <= 1 ? by_rows<T, INPUTS, 1, false, F>
                                              : by_rows<T, INPUTS, ANY, false, F>;
        const int packs = packed ? RowShape<T, INPUTS, true>::PACKS : RowShape<T, INPUTS, false>::PACKS;
        launch(context, {grid(items, ROW_THREADS * packs), ROW_THREADS}, kernel, views.tensors(-1), outer,
               static_cast<int>(n), Divisor(row_packs), static_cast<unsigned>(items), f);
    }
    void launch_tiles(int other) const {
        const bool flat = views.flat(other);
        const int64_t m = views.view[0].shape[other];
        const bool large = n * rows >= int64_t(4) << 20; /* if small, half-empty tiles are still faster */
        if (views.has_packs() && views.has_line_packs(other) && n >= ALIGNED_TILE && (m >= ALIGNED_TILE || !large)) {
            const int64_t across = ceil_div(n, int64_t(ALIGNED_TILE)), down = ceil_div(m, int64_t(ALIGNED_TILE)),
                          count = rows / m * across * down;
            launch(context, {grid(count, 1), TILE_THREADS}, by_aligned_tiles<T, INPUTS, F>, views.tensors(other),
                   views.outer(other), static_cast<int>(n), static_cast<int>(m), Divisor(across), Divisor(down),
                   static_cast<unsigned>(count), f);
            return;
        }
        const Tiles tiles = tiles_of<T>(n, m, rows / m, flat, views.has_packs());
        size_t shared = 0;
        for (int t = 1; t <= INPUTS; t++)
            shared += static_cast<size_t>(views.direct(t) ? tiles.direct.bytes : tiles.turned.bytes);
        launch(context, {grid(tiles.count, 1), TILE_THREADS, shared},
               flat ? by_tiles<T, INPUTS, true, F> : by_tiles<T, INPUTS, false, F>, views.tensors(other),
               views.outer(other), tiles, f);
    }
    void launch_gather() const {
        const int64_t elements = views.view[0].numel;
        const int64_t ragged = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(views.view[0].data) % 16 / sizeof(T));
        const int64_t head = min(ragged, elements), packs = (elements - head) / WIDE<T>;
        launch(context, {grid(max(packs, int64_t(1)), GATHER_THREADS), GATHER_THREADS}, by_gather<T, INPUTS, F>,
               views.tensors(-1), views.outer(-1), views.gather(), Divisor(n), static_cast<int>(head),
               static_cast<unsigned>(packs), static_cast<int>(elements - packs * WIDE<T>), f);
    }
    void launch_elements() const {
        const Outer<INPUTS> outer = views.outer(-1);
        const auto kernel = outer.dims <= 1   ? by_elements<T, INPUTS, 1, F>
                            : outer.dims == 2 ? by_elements<T, INPUTS, 2, F>
                                              : by_elements<T, INPUTS, ANY, F>;
        launch(context, {grid(n * rows, ELEMENT_THREADS * ELEMENTS), ELEMENT_THREADS}, kernel, views.tensors(-1), outer,
               Divisor(n), static_cast<unsigned>(n * rows), f);
    }
};

/* Computes the output from the inputs. `most_blocks`: of a grid; blocks loop if there is more work. */
template <typename T, int INPUTS, typename F>
void launch_all(const rafter_context *context, Views<INPUTS> views, const F &f, int64_t most_blocks) {
    if (views.view[0].numel == 0)
        return;
    while (views.view[0].numel > MOST_ELEMENTS)
        launch_all<T>(context, views.cut(), f, most_blocks);
    const int64_t n = views.view[0].shape[views.last()];
    const Launcher<T, INPUTS, F> launcher = {context, views, f, most_blocks, n, views.view[0].numel / n};
    if (views.all_direct() && (n * int64_t(sizeof(T)) >= SHORT_ROW_BYTES || views.has_packs()))
        return launcher.launch_rows();
    const int other = views.all_direct() ? -1 : views.other_dim();
    if (other >= 0)
        return launcher.launch_tiles(other);
    const bool is_short = n * int64_t(sizeof(T)) < SHORT_ROW_BYTES;
    NARROW<T> &&is_short &&views.is_dense() ? launcher.launch_gather() : launcher.launch_elements();
}

} // namespace elementwise

#endif
