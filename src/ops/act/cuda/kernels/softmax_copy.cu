/* SPDX-License-Identifier: Apache-2.0 */
/* Copies an input of softmax into the output, in the order of the output's memory. */
#include "cuda/elementwise.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

constexpr int64_t MANY_BYTES = 16 << 20; /* from here on the tiles of cuda/elementwise.cuh are faster, if aligned */

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

/* Where rows * size is so small that a block takes several of them: in the order of the output.
 * What is read apart in `from` lies close enough for the cache. */
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

/* ---- tiles of packs -------------------------------------------------------------------------- */

/* Lines of `from`, adjacent elements, become columns of `to`. */
template <typename T> struct TurnArgs {
    const T *from, *from_end; /* the whole tensor */
    T *to;
    Walk walk;                        /* over what is outside; IN is `from`, OUT is `to` */
    int64_t rows, size;               /* elements of a line; lines, which are the elements of a row of `to` */
    int64_t from_line, to_row;        /* strides */
    Divisor tiles_across, tiles_down; /* along a row of `to`; over its rows */
    int tile_rows, tile_lines;        /* of a tile; rows are a multiple of a pack */
    int halo;                         /* lines before the tile that its packs of `to` may reach into */
    Divisor line_packs, row_groups;   /* packs of a line of the tile; groups of GROUP_ROWS rows */
    int pitch;                        /* of a line of the tile in shared memory, an odd number of words */
    bool flat;                        /* rows of `to` have no gaps, and the tile has all of each */
    Divisor by_size;
};

/* A warp takes GROUP_ROWS x GROUP_PACKS packs of `to`: no two lanes meet in a bank, and what they
 * write of a row is whole sectors. */
constexpr int GROUP_ROWS = 8, GROUP_PACKS = 4;
/* Less is faster by elements: docs/perf/act.md. */
constexpr int64_t LEAST_ROWS = 16, LEAST_BYTES = 2 << 20;

/* A pack at any address: two aligned packs, which are shifted. Packs that reach out of the tensor
 * are read by elements. */
template <typename T> struct PackAnywhere {
    static constexpr int N = WIDE<T>;
    const T *first;
    bool low_inside, high_inside;
    Pack<T, N> low, high;

    /* Issues the loads. */
    DEVICE void load(bool present, const T *from, const T *begin, const T *end) {
        first = from;
        const int shift = offset_in_pack(from);
        const T *const aligned = from - shift;
        low_inside = present && aligned >= begin && aligned + N <= end;
        high_inside = present && shift > 0 && aligned + 2 * N <= end;
        low = load_once_if<T, N>(low_inside, aligned, 0.0f);
        high = load_once_if<T, N>(high_inside, aligned + N, 0.0f);
    }
    DEVICE uint4 words(const T *begin, const T *end) const {
        const int shift = offset_in_pack(first);
        if (low_inside && (shift == 0 || high_inside))
            return shifted(reinterpret_cast<const uint4 &>(low), reinterpret_cast<const uint4 &>(high),
                           shift * static_cast<int>(sizeof(T)));
        Pack<T, N> pack;
#pragma unroll
        for (int j = 0; j < N; j++)
            pack.v[j] = first + j >= begin && first + j < end ? first[j] : from_float<T>(0.0f);
        return reinterpret_cast<const uint4 &>(pack);
    }
};

/* Stores those elements of a pack that are in [low, high); `at` is the index of its first one. */
template <typename T>
DEVICE void store_inside(T *to, const Pack<T, WIDE<T>> &pack, int64_t at, int64_t low, int64_t high) {
    constexpr int N = WIDE<T>;
    if (at >= low && at + N <= high) {
        store_once<T, N>(to, pack);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (at + j >= low && at + j < high)
                to[j] = pack.v[j];
    }
}

/* Reads the lines [first, first + lines) of a tile, of which `from` is the origin, into shared
 * memory. */
template <typename T>
DEVICE void read_lines(const TurnArgs<T> &a, const T *from, int first, int lines, int64_t rows_left, T *tile) {
    constexpr int N = WIDE<T>, AT_ONCE = 3;
    const int units = lines * static_cast<int>(a.line_packs.number);
    for (int base = threadIdx.x; base < units; base += AT_ONCE * COPY_THREADS) {
        PackAnywhere<T> loaded[AT_ONCE];
        int place[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int unit = base + u * COPY_THREADS, line = static_cast<int>(a.line_packs.quotient(unit)),
                      row = (unit - line * static_cast<int>(a.line_packs.number)) * N;
            place[u] = unit < units && row < rows_left ? line * a.pitch + row : -1;
            loaded[u].load(place[u] >= 0, from + (first + line) * a.from_line + row, a.from, a.from_end);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (place[u] >= 0) {
                const uint4 four = loaded[u].words(a.from, a.from_end);
                unsigned *const words = reinterpret_cast<unsigned *>(tile + place[u]);
                words[0] = four.x;
                words[1] = four.y;
                words[2] = four.z;
                words[3] = four.w;
            }
    }
}

template <typename T>
__global__ void __launch_bounds__(COPY_THREADS, 4) turn_tiles(const __grid_constant__ TurnArgs<T> a) {
    constexpr int N = WIDE<T>;
    extern __shared__ uint4 turn_memory[];
    T *const tile = reinterpret_cast<T *>(turn_memory);
    start_next_kernel();
    const unsigned rest = a.tiles_across.quotient(blockIdx.x), outside = a.tiles_down.quotient(rest),
                   across = blockIdx.x - rest * a.tiles_across.number;
    const int64_t column = int64_t(across) * a.tile_lines,
                  row = int64_t(rest - outside * a.tiles_down.number) * a.tile_rows;
    int64_t at[3];
    a.walk.offsets(outside, at);
    const int64_t rows_left = min(a.rows - row, int64_t(a.tile_rows));
    const int halo = column > 0 ? a.halo : 0, lines = static_cast<int>(min(a.size - column, int64_t(a.tile_lines)));
    read_lines(a, a.from + at[IN] + column * a.from_line + row, -halo, halo + lines, rows_left, tile);
    __syncthreads();

    T *const to = a.to + at[OUT] + row * a.to_row + column;
    if (a.flat) {
        const int count = static_cast<int>(rows_left) * static_cast<int>(a.size), shift = offset_in_pack(to);
        for (int i = threadIdx.x; i * N < count + shift; i += COPY_THREADS) {
            const int first = i * N - shift, begin = max(first, 0);
            int y = static_cast<int>(a.by_size.quotient(begin)), x = begin - y * static_cast<int>(a.size);
            Pack<T, N> pack;
#pragma unroll
            for (int j = 0; j < N; j++)
                if (first + j >= 0 && first + j < count) {
                    pack.v[j] = tile[x * a.pitch + y];
                    x = x + 1 == a.size ? 0 : x + 1;
                    y += x == 0;
                }
            store_inside(to + first, pack, first, 0, count);
        }
        return;
    }
    const bool last = across + 1 == a.tiles_across.number;
    const int lane = threadIdx.x % WARP, packs = a.tile_lines / N,
              groups = (packs + GROUP_PACKS) / GROUP_PACKS * static_cast<int>(a.row_groups.number);
    for (int group = threadIdx.x / WARP; group < groups; group += COPY_THREADS / WARP) {
        const int pack_group = static_cast<int>(a.row_groups.quotient(group)),
                  y = (group - pack_group * static_cast<int>(a.row_groups.number)) * GROUP_ROWS + lane % GROUP_ROWS,
                  i = pack_group * GROUP_PACKS + lane / GROUP_ROWS;
        if (y >= rows_left || i > packs)
            continue;
        T *const own = to + y * a.to_row;
        const int first = i * N - offset_in_pack(own);
        if (i == packs && !last) /* the next tile's */
            continue;
        if (column + first >= a.size)
            continue;
        Pack<T, N> pack;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (first + j >= -halo)
                pack.v[j] = tile[(halo + first + j) * a.pitch + y];
        store_inside(own + first, pack, column + first, 0, a.size);
    }
}

/* Whether every row of `view` begins at a multiple of 16 bytes. */
bool rows_begin_aligned(const rafter_view &view) {
    const int64_t bytes = rafter_dtype_bytes(view.dtype);
    bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < view.ndim - 1; d++)
        all = all && (view.shape[d] == 1 || view.stride[d] * bytes % 16 == 0);
    return all;
}

/* The lines of `a` become rows by packs; `many`: combinations of the dimensions outside. */
template <typename T> void launch_turn(rafter_context *context, TurnArgs<T> a, bool aligned, int64_t many) {
    constexpr int N = WIDE<T>;
    const int64_t rows = round_up(a.rows, int64_t(GROUP_ROWS));
    a.flat = a.size < 64 && (a.to_row == a.size || a.rows == 1);
    if (a.flat) {
        a.tile_lines = static_cast<int>(a.size);
        a.tile_rows = static_cast<int>(min(rows, COPY_ELEMENTS / a.size / GROUP_ROWS * GROUP_ROWS));
    } else {
        a.tile_rows = static_cast<int>(min(rows, int64_t(64)));
        a.tile_lines =
            static_cast<int>(min(round_up(a.size, int64_t(N)), int64_t(min(COPY_ELEMENTS / a.tile_rows, 512)) / N * N));
    }
    a.halo = a.flat || aligned ? 0 : N - 1;
    const int line_packs = a.tile_rows / N;
    const int64_t across = ceil_div(a.size, int64_t(a.tile_lines)), down = ceil_div(a.rows, int64_t(a.tile_rows));
    a.line_packs = Divisor(line_packs);
    a.row_groups = Divisor(a.tile_rows / GROUP_ROWS);
    a.pitch = a.tile_rows + 4 / static_cast<int>(sizeof(T));
    a.tiles_across = Divisor(across);
    a.tiles_down = Divisor(down);
    a.by_size = Divisor(a.size);
    const size_t lines = a.flat ? a.tile_lines : a.halo + a.tile_lines + N;
    ::launch(context, {across * down * many, COPY_THREADS, lines * a.pitch * sizeof(T)}, turn_tiles<T>, a);
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
    const bool turned = row >= 0 && from.stride[row] == 1 && to.stride[column] == 1 && to.shape[column] > 1,
               aligned = rows_begin_aligned(to),
               tiles = turned && to.shape[row] >= 64 && to.shape[column] >= 64 && aligned &&
                       to.shape[column] * rafter_dtype_bytes(to.dtype) % 16 == 0;
    const char *const end = from.data + rafter_span_bytes(&from);
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
        if (turned && a.rows >= LEAST_ROWS && to.numel * int64_t(sizeof(T)) >= LEAST_BYTES &&
            a.rows * a.size > COPY_ELEMENTS / 2) {
            TurnArgs<T> turn = {};
            turn.from = a.from;
            turn.from_end = reinterpret_cast<const T *>(end);
            turn.to = a.to;
            turn.walk = a.walk;
            turn.rows = a.rows;
            turn.size = a.size;
            turn.from_line = a.from_column;
            turn.to_row = a.to_row;
            return launch_turn(context, turn, aligned, many);
        }
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
