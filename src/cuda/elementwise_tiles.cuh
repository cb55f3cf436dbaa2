/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise kernel for inputs that are contiguous along another dimension than the output.
 *
 * The output is [..., m, n]: rows of n adjacent columns. A turned input has the m elements of a
 * column adjacent: a line. A block takes a tile of some rows and columns. It reads packs of lines into
 * shared memory, and its threads take packs of the output, wherever lines and rows begin. All
 * loads of a tile, also those of inputs that lie as the output does, are issued before the first use.
 *
 * If the rows of the output begin at any address, so do the aligned packs of a row: those of a tile
 * begin up to N - 1 columns before the tile does. Lines of these columns, the halo, are read too.
 */
#ifndef RAFTER_CUDA_ELEMENTWISE_TILES_CUH
#define RAFTER_CUDA_ELEMENTWISE_TILES_CUH

#include "cuda/elementwise_operands.cuh"

namespace elementwise {

constexpr int TILE_THREADS = 256, TILE_PACKS = 2; /* per block; of each input, per thread */
constexpr int TILE_UNITS = TILE_THREADS * TILE_PACKS;
constexpr int LINE_PACKS = 8; /* of a line of a tile, if m allows; more if n is small */
/* A warp takes GROUP_ROWS x GROUP_PACKS packs of the output: no two lanes meet in a bank, and what they
 * write of a row is whole sectors. */
constexpr int GROUP_ROWS = 8, GROUP_PACKS = 4;
static_assert(GROUP_ROWS * GROUP_PACKS == WARP, "");
constexpr int MOST_FLAT_COLUMNS = 64;
constexpr int64_t LEAST_TILE_ROWS = 16, LEAST_TILE_COLUMNS = 16; /* less is not worth a tile */

constexpr int PAD_BYTES = 16; /* before and after a tile in shared memory: elements that are read, but not stored */

/* As a kernel argument. */
struct Tiles {
    int n, m;             /* columns and rows of the tensors */
    int columns, rows;    /* of a tile; rows are whole packs */
    int halo;             /* columns before the tile */
    int pitch;            /* elements between lines in shared memory, an odd number of words */
    int bytes;            /* of a turned input in shared memory */
    Divisor across, down; /* tiles along n and along m */
    Divisor line_packs;   /* of a tile */
    Divisor row_groups;   /* of GROUP_ROWS rows of a tile */
    Divisor by_n;         /* flat */
    int64_t count;        /* of tiles */
};

/* flat: the output's rows, of up to MOST_FLAT_COLUMNS elements, have no gaps, and a tile has all of each.
 * aligned: rows are whole, aligned packs. `outside`: combinations of the other dimensions. */
template <typename T> Tiles tiles_of(int64_t n, int64_t m, int64_t outside, bool flat, bool aligned) {
    constexpr int N = WIDE<T>, GROUPS = TILE_UNITS / WARP;
    Tiles tiles = {};
    tiles.n = static_cast<int>(n);
    tiles.m = static_cast<int>(m);
    tiles.halo = flat || aligned ? 0 : N - 1;
    /* A flat tile may begin at any address, and then touches a pack more than it has. */
    const int64_t whole = flat ? n : round_up(n + tiles.halo, int64_t(N)), units = TILE_UNITS - (flat ? 1 : 0);
    int64_t line_packs = max(units / (whole + tiles.halo), int64_t(LINE_PACKS)), groups;
    do {
        line_packs = ceil_div(ceil_div(m, ceil_div(m, line_packs * N)), int64_t(N));
        tiles.rows = static_cast<int>(line_packs * N);
        tiles.columns = static_cast<int>(min(whole, (units / line_packs - tiles.halo) / N * N));
        const int64_t row_groups = ceil_div(tiles.rows, GROUP_ROWS);
        if (!flat && tiles.columns < whole)
            tiles.columns = static_cast<int>(min(int64_t(tiles.columns), GROUPS / row_groups * GROUP_PACKS * N));
        groups = row_groups * ceil_div(tiles.columns, GROUP_PACKS * N);
        line_packs--;
    } while (!flat && groups > GROUPS);
    if (flat)
        tiles.columns = tiles.n;
    tiles.pitch = tiles.rows + 4 / static_cast<int>(sizeof(T));
    tiles.bytes =
        2 * PAD_BYTES + round_up((tiles.halo + tiles.columns) * tiles.pitch * static_cast<int>(sizeof(T)), 16);
    const int64_t across = flat ? 1 : ceil_div(n + tiles.halo, int64_t(tiles.columns)),
                  down = ceil_div(m, int64_t(tiles.rows));
    tiles.across = Divisor(across);
    tiles.down = Divisor(down);
    tiles.line_packs = Divisor(tiles.rows / N);
    tiles.row_groups = Divisor(ceil_div(tiles.rows, GROUP_ROWS));
    tiles.by_n = Divisor(n);
    tiles.count = across * down * outside;
    return tiles;
}

/* Where the packs of the output that a thread takes begin, in a tile. */
template <bool FLAT> struct TilePlace {
    int row;   /* FLAT: 0 */
    int first; /* column of the tile; FLAT: element of the tile; may be below 0 */
    bool present;
};

/* A tile, as its threads see it. */
template <typename T, int INPUTS, bool FLAT> struct Tile {
    static constexpr int N = WIDE<T>;
    const Tensors<INPUTS> &tensors;
    const Tiles &tiles;
    int64_t at[1 + INPUTS]; /* of the tile's origin */
    int column, row;        /* of the tensors */
    int rows;               /* of the tile */

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
    /* A single input is turned: else there would be no tiles. */
    DEVICE bool turned(int t) const {
        return INPUTS == 1 || tensors.inner[1 + t] > 1;
    }
    DEVICE T *output(int r) const {
        return tensors.template output<T>() + at[0] + r * tensors.across[0];
    }
    /* Unit u of a thread: a pack of a line. Where it is in shared memory, or -1. */
    DEVICE int line_unit(int u, int &line, int &r) const {
        const int unit = threadIdx.x + u * TILE_THREADS;
        line = static_cast<int>(tiles.line_packs.quotient(unit));
        r = (unit - line * static_cast<int>(tiles.line_packs.number)) * N;
        const int own = column - tiles.halo + line;
        return line < tiles.halo + tiles.columns && own >= 0 && own < tiles.n && r < rows ? line * tiles.pitch + r : -1;
    }
    /* Pack u of a thread. */
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
    /* The pack at `place` of a turned input. */
    DEVICE Pack<T, N> read(const T *memory, const TilePlace<FLAT> &place) const {
        Pack<T, N> pack;
        if constexpr (FLAT) {
            const int index = place.first + N * tiles.n; /* not below 0 */
            int y = static_cast<int>(tiles.by_n.quotient(index)), x = index - y * tiles.n;
            const T *p = memory + x * tiles.pitch + y - N;
#pragma unroll
            for (int j = 0; j < N; j++) { /* what is outside of the tile is not stored */
                pack.v[j] = *p;
                x++;
                p += x == tiles.n ? 1 - (tiles.n - 1) * tiles.pitch : tiles.pitch;
                x = x == tiles.n ? 0 : x;
            }
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = memory[(tiles.halo + place.first + j) * tiles.pitch + place.row];
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
__global__ void __launch_bounds__(TILE_THREADS, INPUTS == 1 ? 5 : 3)
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
        Operand<T, false> in[INPUTS][TILE_PACKS];
#pragma unroll
        for (int t = 0; t < INPUTS; t++) {
            const T *const from = tensors.template input<T>(t) + tile.at[1 + t];
#pragma unroll
            for (int u = 0; u < TILE_PACKS; u++) {
                if (tile.turned(t)) {
                    int line, r;
                    if (tile.line_unit(u, line, r) >= 0)
                        in[t][u].load(tensors, t, from + (line - tiles.halo) * tensors.inner[1 + t], r);
                } else {
                    const TilePlace<FLAT> place = tile.place(u);
                    if (place.present)
                        in[t][u].load(tensors, t, from + place.row * tensors.across[1 + t], place.first);
                }
            }
        }
        char *memory = reinterpret_cast<char *>(tile_memory) + PAD_BYTES;
#pragma unroll
        for (int t = 0; t < INPUTS; t++) {
            if (!tile.turned(t))
                continue;
#pragma unroll
            for (int u = 0; u < TILE_PACKS; u++) {
                int line, r;
                const int to = tile.line_unit(u, line, r);
                if (to < 0)
                    continue;
                const Pack<T, N> pack = in[t][u].get(tensors, t);
#pragma unroll
                for (int w = 0; w < 4; w++)
                    reinterpret_cast<unsigned *>(reinterpret_cast<T *>(memory) + to)[w] =
                        reinterpret_cast<const unsigned(&)[4]>(pack)[w];
            }
            memory += tiles.bytes;
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < TILE_PACKS; u++) {
            const TilePlace<FLAT> place = tile.place(u);
            if (!place.present)
                continue;
            const char *lines = reinterpret_cast<const char *>(tile_memory) + PAD_BYTES;
            Pack<T, N> packs[INPUTS];
#pragma unroll
            for (int t = 0; t < INPUTS; t++)
                if (tile.turned(t)) {
                    packs[t] = tile.read(reinterpret_cast<const T *>(lines), place);
                    lines += tiles.bytes;
                } else {
                    packs[t] = in[t][u].get(tensors, t);
                }
            tile.write(place, f.of(packs));
        }
        __syncthreads(); /* the next tile overwrites this one */
    }
}

/* The same where rows and lines are whole, aligned packs: square tiles. */
constexpr int ALIGNED_TILE = 64; /* elements along each side */

template <typename T, int INPUTS, typename F>
__global__ void __launch_bounds__(TILE_THREADS, 4)
    by_aligned_tiles(const __grid_constant__ Tensors<INPUTS> tensors, const __grid_constant__ Outer<INPUTS> outer,
                     int n, int m, Divisor across, Divisor down, unsigned count, F f) {
    wait_for_inputs();
    constexpr int TILE = ALIGNED_TILE, N = WIDE<T>, PACKS = TILE / N, EACH = TILE * PACKS / TILE_THREADS;
    /* An odd number of words: neither the threads that write packs nor those that read elements
     * meet in a bank (two do if N is 8). */
    constexpr int PITCH = TILE + 4 / int(sizeof(T)), DOWN = TILE_THREADS / PACKS;
    __shared__ T lines[INPUTS][TILE * PITCH];
    start_next_kernel();
    if (!f.start())
        return;
    const int line = threadIdx.x / PACKS, pack = threadIdx.x % PACKS * N; /* or row and column of the output */
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
