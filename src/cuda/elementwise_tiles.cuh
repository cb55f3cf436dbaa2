/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise kernels for inputs that are contiguous along another dimension than the output: by_tiles,
 * and by_aligned_tiles for rows and lines that consist of aligned packs.
 *
 * The output is [..., m, n]: rows of n adjacent elements. A turned input has the m elements of a column adjacent; a
 * direct input has rows, as the output. A block takes a tile of some rows and columns. It copies the tile of each input
 * into shared memory, and then each thread computes packs of the output from there.
 *
 * Rows and columns may begin at any address: the aligned packs that contain them are copied, and an element has the
 * same offset from a multiple of 16 bytes in shared memory as in memory. So copies take no registers and no shifts.
 *
 * Packs are aligned in the output. If its rows are not, the packs of a tile may begin up to N - 1 columns
 * before the tile does. These columns, the halo, are copied too.
 */
#ifndef RAFTER_CUDA_ELEMENTWISE_TILES_CUH
#define RAFTER_CUDA_ELEMENTWISE_TILES_CUH

#include "cuda/elementwise_operands.cuh"

namespace elementwise {

constexpr int TILE_THREADS = 256, TILE_PACKS = 2; /* per block; packs of the output per thread */
constexpr int TILE_UNITS = TILE_THREADS * TILE_PACKS;
constexpr int LINE_PACKS = 8; /* packs of a column that a tile has, if m allows; more if n is small */
/* A warp takes GROUP_ROWS x GROUP_PACKS packs of the output: reads of shared memory have few bank conflicts, and what
 * is written of a row is whole memory sectors. */
constexpr int GROUP_ROWS = 8, GROUP_PACKS = 4;
static_assert(GROUP_ROWS * GROUP_PACKS == WARP, "");
constexpr int MOST_FLAT_COLUMNS = 64;
constexpr int64_t LEAST_TILE_ROWS = 16, LEAST_TILE_COLUMNS = 16; /* less is not worth a tile */

constexpr int PAD_BYTES = 16; /* before and after a tile in shared memory: may be read, but is not used */

/* How the tile of an input lies in shared memory: as lines of adjacent elements, which are columns of a turned input,
 * rows of a direct one. */
struct TileSide {
    int lines;     /* including the halo */
    int pitch;     /* elements from line to line: whole packs */
    int skew;      /* elements more after every N lines, whole packs, so that lines N apart use different banks */
    int bytes;     /* of shared memory */
    Divisor packs; /* that a line touches, at most */
};

/* As a kernel argument. */
struct Tiles {
    int n, m;                /* columns and rows of the tensors */
    int columns, rows;       /* of a tile; rows: a multiple of N */
    int halo;                /* columns before the tile that are copied too */
    int lead;                /* elements of a direct line before the tile: the halo; if flat, N */
    TileSide turned, direct; /* direct, if flat: all rows are one line */
    Divisor across, down;    /* tiles along n and along m */
    Divisor row_groups;      /* groups of GROUP_ROWS rows per tile */
    Divisor by_n;            /* used if flat */
    int64_t count;           /* tiles in all */
};

/* `length`: elements of a line, which may begin anywhere in its first pack. */
template <typename T> TileSide tile_side(int lines, int length, bool turned) {
    constexpr int N = WIDE<T>, BYTES = sizeof(T), ALL_BANKS = 128, EIGHT_BANKS = 32; /* in bytes */
    const int packs = ceil_div(length + N - 1, N);
    TileSide side = {};
    side.lines = lines;
    side.packs = Divisor(packs);
    /* Against bank conflicts. Of a direct input, lanes read one pack from each of 8 lines: these are an odd number of
     * packs apart. Of a turned one, they read 8 rows of 4 lines that are N apart: the skew gives each of these lines 8
     * banks of its own. */
    side.pitch = (turned || packs % 2 != 0 ? packs : packs + 1) * N;
    side.skew = turned ? (ALL_BANKS + EIGHT_BANKS - N * side.pitch * BYTES % ALL_BANKS) % ALL_BANKS / BYTES : 0;
    side.bytes = 2 * PAD_BYTES + (lines * side.pitch + lines / N * side.skew) * BYTES;
    return side;
}

/* flat: the output's rows, of up to MOST_FLAT_COLUMNS elements, have no gaps between them, and tiles have whole rows:
 * a tile is one span of the output. aligned: rows consist of aligned packs. `outside`: the product of the other
 * dimensions. */
template <typename T> Tiles tiles_of(int64_t n, int64_t m, int64_t outside, bool flat, bool aligned) {
    constexpr int N = WIDE<T>, GROUPS = TILE_UNITS / WARP;
    Tiles tiles = {};
    tiles.n = static_cast<int>(n);
    tiles.m = static_cast<int>(m);
    tiles.halo = flat || aligned ? 0 : N - 1;
    tiles.lead = flat ? N : tiles.halo;
    /* A flat tile may begin at any address, and then touches one pack more. */
    const int64_t whole = flat ? n : round_up(n + tiles.halo, int64_t(N)), units = TILE_UNITS - (flat ? 1 : 0);
    int64_t line_packs = max(units / whole, int64_t(LINE_PACKS)), groups;
    do {
        line_packs = ceil_div(ceil_div(m, ceil_div(m, line_packs * N)), int64_t(N));
        tiles.rows = static_cast<int>(line_packs * N);
        tiles.columns = static_cast<int>(min(whole, units / line_packs / N * N));
        const int64_t row_groups = ceil_div(tiles.rows, GROUP_ROWS);
        if (!flat && tiles.columns < whole)
            tiles.columns = static_cast<int>(min(int64_t(tiles.columns), GROUPS / row_groups * GROUP_PACKS * N));
        groups = row_groups * ceil_div(tiles.columns, GROUP_PACKS * N);
        line_packs--;
    } while (!flat && groups > GROUPS);
    if (flat)
        tiles.columns = tiles.n;
    tiles.turned = tile_side<T>(tiles.halo + tiles.columns, tiles.rows, true);
    tiles.direct = flat ? tile_side<T>(1, tiles.lead + tiles.rows * tiles.n, false)
                        : tile_side<T>(tiles.rows, tiles.lead + tiles.columns, false);
    const int64_t across = flat ? 1 : ceil_div(n + tiles.halo, int64_t(tiles.columns)),
                  down = ceil_div(m, int64_t(tiles.rows));
    tiles.across = Divisor(across);
    tiles.down = Divisor(down);
    tiles.row_groups = Divisor(ceil_div(tiles.rows, GROUP_ROWS));
    tiles.by_n = Divisor(n);
    tiles.count = across * down * outside;
    return tiles;
}

/* The tile of an input: its lines in memory and in shared memory. */
template <typename T> struct TileLines {
    static constexpr int N = WIDE<T>;
    const TileSide &side;
    const T *from; /* element 0 of line 0: of the halo, if there is one */
    int64_t step;  /* from line to line */
    T *shared;     /* aligned */

    DEVICE TileLines(const TileSide &side, const T *from, int64_t step, char *memory)
        : side(side), from(from), step(step), shared(reinterpret_cast<T *>(memory + PAD_BYTES)) {
    }
    /* Elements between an aligned address and element 0 of a line. */
    DEVICE int ragged(int line) const {
        return static_cast<int>(offset_in_pack(from) + line * static_cast<unsigned>(step) & N - 1);
    }
    DEVICE T *start(int line) const {
        return shared + (line * side.pitch + line / N * side.skew);
    }
    DEVICE T at(int line, int i) const {
        return start(line)[ragged(line) + i];
    }
    /* Elements i, i + 1, ... of a line. */
    DEVICE Pack<T, N> pack_at(int line, int i) const {
        const int place = ragged(line) + i, offset = place & N - 1;
        const uint4 *const packs = reinterpret_cast<const uint4 *>(start(line) + (place - offset));
        uint4 pack = packs[0];
        if (offset != 0)
            pack = shifted(pack, packs[1], offset * static_cast<int>(sizeof(T)));
        return reinterpret_cast<Pack<T, N> &>(pack);
    }
    /* Copies the packs of this thread that have elements of [low, high), of lines [first_line, past_line). [begin, end):
     * the tensor. */
    DEVICE void copy(int first_line, int past_line, int low, int high, const T *begin, const T *end) const {
        const int packs = static_cast<int>(side.packs.number), all = side.lines * packs;
        for (int unit = threadIdx.x; unit < all; unit += TILE_THREADS) {
            const int line = static_cast<int>(side.packs.quotient(unit)), pack = unit - line * packs,
                      i = pack * N - ragged(line);
            if (line < first_line || line >= past_line || i + N <= low || i >= high)
                continue;
            const T *const source = from + line * step + i;
            T *const to = start(line) + pack * N;
            if (source >= begin && source + N <= end) {
                copy_async<T, N>(reinterpret_cast<Pack<T, N> *>(to), source);
            } else {
#pragma unroll 1
                for (int j = 0; j < N; j++)
                    if (source + j >= begin && source + j < end)
                        to[j] = source[j];
            }
        }
    }
};

/* Where one of a thread's packs of the output lies in a tile. */
template <bool FLAT> struct TilePlace {
    int row;      /* FLAT: 0 */
    int first;    /* its first column in the tile; FLAT: first element in the tile's span. May be negative */
    bool present; /* whether the pack has elements of the output */
};

/* A tile, as its threads see it. */
template <typename T, int INPUTS, bool FLAT> struct Tile {
    static constexpr int N = WIDE<T>;
    const Tensors<INPUTS> &tensors;
    const Tiles &tiles;
    int64_t at[1 + INPUTS]; /* offsets of the tile's origin */
    int column, row;        /* the tile's origin, in the tensors */
    int rows;               /* rows of the tile that exist */

    DEVICE Tile(const Tensors<INPUTS> &all, const Outer<INPUTS> &outer, const Tiles &how, unsigned index)
        : tensors(all), tiles(how) {
        const unsigned line = tiles.across.quotient(index), rest = tiles.down.quotient(line);
        column = static_cast<int>(index - line * tiles.across.number) * tiles.columns;
        row = static_cast<int>(line - rest * tiles.down.number) * tiles.rows;
        rows = min(tiles.m - row, tiles.rows);
        outer.template offsets<ANY>(rest, at);
#pragma unroll
        for (int t = 0; t <= INPUTS; t++)
            at[t] += column * tensors.inner[t] + row * tensors.across[t];
    }
    /* Whether input t is turned. A single input always is: else there would be no tiles. */
    DEVICE bool turned(int t) const {
        return INPUTS == 1 || tensors.inner[1 + t] > 1;
    }
    /* Whether all elements of a row of input t are the same one. */
    DEVICE bool expanded(int t) const {
        return INPUTS > 1 && tensors.inner[1 + t] == 0;
    }
    DEVICE T *output(int r) const {
        return tensors.template output<T>() + at[0] + r * tensors.across[0];
    }
    DEVICE const T *input(int t, int r) const {
        return tensors.template input<T>(t) + at[1 + t] + r * tensors.across[1 + t];
    }
    DEVICE TileLines<T> turned_lines(int t, char *memory) const {
        const int64_t inner = tensors.inner[1 + t];
        return TileLines<T>(tiles.turned, input(t, 0) - tiles.halo * inner, inner, memory);
    }
    DEVICE TileLines<T> direct_lines(int t, char *memory) const {
        return TileLines<T>(tiles.direct, input(t, 0) - tiles.lead, tensors.across[1 + t], memory);
    }
    /* Copies the tile of input t. Returns where that of the next input goes. */
    DEVICE char *copy(int t, char *memory) const {
        const T *const begin = tensors.template input<T>(t), *const end = tensors.template past<T>(t);
        if (turned(t)) {
            turned_lines(t, memory).copy(tiles.halo - column, tiles.halo + tiles.n - column, 0, rows, begin, end);
            return memory + tiles.turned.bytes;
        }
        if (expanded(t))
            return memory;
        const TileLines<T> lines = direct_lines(t, memory);
        if constexpr (FLAT)
            lines.copy(0, 1, tiles.lead, tiles.lead + rows * tiles.n, begin, end);
        else
            lines.copy(0, rows, tiles.lead - column, tiles.lead + tiles.n - column, begin, end);
        return memory + tiles.direct.bytes;
    }
    /* Where pack u of a thread lies in the output. */
    DEVICE TilePlace<FLAT> place(int u) const {
        TilePlace<FLAT> place;
        const int unit = threadIdx.x + u * TILE_THREADS;
        if constexpr (FLAT) {
            place.row = 0;
            place.first = unit * N - offset_in_pack(output(0));
            place.present = place.first < rows * tiles.n;
        } else {
            const int group = unit / WARP, lane = unit % WARP,
                      packs = static_cast<int>(tiles.row_groups.quotient(group)),
                      pack = packs * GROUP_PACKS + lane / GROUP_ROWS;
            place.row = (group - packs * static_cast<int>(tiles.row_groups.number)) * GROUP_ROWS + lane % GROUP_ROWS;
            place.first = pack * N - (tiles.halo > 0 ? offset_in_pack(output(place.row)) : 0);
            place.present = place.row < rows && pack * N < tiles.columns && column + place.first < tiles.n;
        }
        return place;
    }
    /* The elements of input t for the pack at `place`, and where the tile of the next input is. What is outside of the
     * tile is not stored. */
    DEVICE Pack<T, N> read(int t, const TilePlace<FLAT> &place, char *&memory) const {
        if (expanded(t))
            return all_same(*input(t, place.row));
        if (!turned(t)) {
            const TileLines<T> lines = direct_lines(t, memory);
            memory += tiles.direct.bytes;
            return lines.pack_at(place.row, tiles.lead + place.first);
        }
        const TileLines<T> lines = turned_lines(t, memory);
        memory += tiles.turned.bytes;
        Pack<T, N> pack;
        if constexpr (FLAT) {
            const int index = place.first + N * tiles.n; /* not below 0 */
            int y = static_cast<int>(tiles.by_n.quotient(index)), x = index - y * tiles.n;
            y -= N;
#pragma unroll
            for (int j = 0; j < N; j++) {
                pack.v[j] = lines.at(x, y);
                x++;
                y += x == tiles.n;
                x = x == tiles.n ? 0 : x;
            }
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = lines.at(tiles.halo + place.first + j, place.row);
        }
        return pack;
    }
    DEVICE void write(const TilePlace<FLAT> &place, const Pack<T, N> &pack) const {
        T *const to = output(place.row) + place.first;
        if constexpr (FLAT)
            store_inside(to, pack, place.first, 0, rows * tiles.n);
        else
            store_inside(to, pack, column + place.first, 0, tiles.n);
    }
};

template <typename T, int INPUTS, bool FLAT, typename F>
__global__ void __launch_bounds__(TILE_THREADS, INPUTS == 1 ? 6 : 5)
    by_tiles(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer,
             const __grid_constant__ Tiles tiles, F f) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    DYNAMIC_SHARED(uint4, tile_memory);
    start_next_kernel();
    if (!f.start())
        return;
    for (unsigned index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        const Tile<T, INPUTS, FLAT> tile(tensors, outer, tiles, index);
        char *memory = reinterpret_cast<char *>(tile_memory);
#pragma unroll
        for (int t = 0; t < INPUTS; t++)
            memory = tile.copy(t, memory);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int u = 0; u < TILE_PACKS; u++) {
            const TilePlace<FLAT> place = tile.place(u);
            if (!place.present)
                continue;
            memory = reinterpret_cast<char *>(tile_memory);
            Pack<T, N> packs[INPUTS];
#pragma unroll
            for (int t = 0; t < INPUTS; t++)
                packs[t] = tile.read(t, place, memory);
            tile.write(place, f.of(packs));
        }
        __syncthreads(); /* the next tile overwrites this one */
    }
}

/* The same for rows and lines that consist of aligned packs, in square tiles. */
constexpr int ALIGNED_TILE = 64; /* elements along each side */

template <typename T, int INPUTS, typename F>
__global__ void __launch_bounds__(TILE_THREADS, 4)
    by_aligned_tiles(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer,
                     int n, int m, Divisor across, Divisor down, unsigned count, F f) {
    wait_for_inputs();
    constexpr int TILE = ALIGNED_TILE, N = WIDE<T>, PACKS = TILE / N, EACH = TILE * PACKS / TILE_THREADS;
    /* PITCH is an odd number of words: no bank conflicts, neither when packs are written nor when elements are read
     * (two threads per bank if N is 8). */
    constexpr int PITCH = TILE + 4 / int(sizeof(T)), DOWN = TILE_THREADS / PACKS;
    __shared__ T lines[INPUTS][TILE * PITCH];
    start_next_kernel();
    if (!f.start())
        return;
    const int line = threadIdx.x / PACKS,
              pack = threadIdx.x % PACKS * N; /* if not turned: row and column of the output */
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const unsigned tile = across.quotient(index), rest = down.quotient(tile);
        const int column = static_cast<int>(index - tile * across.number) * TILE,
                  row = static_cast<int>(tile - rest * down.number) * TILE;
        int64_t at[1 + INPUTS];
        outer.template offsets<ANY>(rest, at);
        Pack<T, N> in[INPUTS][EACH];
#pragma unroll
        for (int t = 0; t < INPUTS; t++) {
            const int64_t inner = tensors.inner[1 + t], step = tensors.across[1 + t];
            const T *const from = tensors.template input<T>(t) + at[1 + t];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int other = line + k * DOWN; /* line or row of the tile */
                if (INPUTS == 1 || inner > 1) {
                    if (column + other < n && row + pack < m)
                        in[t][k] = load_once<T, N>(from + (column + other) * inner + row + pack);
                } else if (row + other < m && column + pack < n) {
                    in[t][k] = inner == 0 ? all_same(from[(row + other) * step])
                                          : load_once<T, N>(from + (row + other) * step + column + pack);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < INPUTS; t++)
            if (INPUTS == 1 || tensors.inner[1 + t] > 1)
#pragma unroll
                for (int k = 0; k < EACH; k++) {
                    unsigned *const words = reinterpret_cast<unsigned *>(&lines[t][(line + k * DOWN) * PITCH + pack]);
#pragma unroll
                    for (int w = 0; w < 4; w++)
                        words[w] = reinterpret_cast<const unsigned(&)[4]>(in[t][k])[w];
                }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int other = line + k * DOWN;
            Pack<T, N> packs[INPUTS];
#pragma unroll
            for (int t = 0; t < INPUTS; t++) {
                packs[t] = in[t][k];
                if (INPUTS == 1 || tensors.inner[1 + t] > 1)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        packs[t].v[j] = lines[t][(pack + j) * PITCH + other];
            }
            if (row + other < m && column + pack < n)
                store_once<T, N>(tensors.template output<T>() + at[0] + (row + other) * tensors.across[0] + column +
                                     pack,
                                 f.of(packs));
        }
        __syncthreads(); /* the next tile overwrites this one */
    }
}

} // namespace elementwise

#endif
