/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The elementwise kernels for inputs that are contiguous along another dimension than the output: by_tiles,
 * and by_aligned_tiles for rows and lines that consist of aligned packs.
 *
 * The output is [..., m, n]: rows of n adjacent elements. A turned input has the m elements of a column
 * adjacent: these are a line. A block takes a tile of some rows and columns. It reads packs of lines into
 * shared memory, and then each thread computes packs of the output from it. Lines and rows may begin at any
 * address. All loads of a tile, also those of inputs that lie as the output does, are issued before the first
 * result is used.
 *
 * Packs are aligned in the output. If its rows are not, the packs of a tile may begin up to N - 1 columns
 * before the tile does. The lines of these columns, the halo, are read too.
 */
#ifndef RAFTER_CUDA_ELEMENTWISE_TILES_CUH
#define RAFTER_CUDA_ELEMENTWISE_TILES_CUH

#include "cuda/elementwise_operands.cuh"

namespace elementwise {

constexpr int TILE_THREADS = 256, TILE_PACKS = 2; /* per block; packs of each tensor per thread */
constexpr int TILE_UNITS = TILE_THREADS * TILE_PACKS;
constexpr int LINE_PACKS = 8; /* packs of a line that a tile has, if m allows; more if n is small */
/* A warp takes GROUP_ROWS x GROUP_PACKS packs of the output: reads of shared memory have no bank conflicts, and what is
 * written of a row is whole memory sectors. */
constexpr int GROUP_ROWS = 8, GROUP_PACKS = 4;
static_assert(GROUP_ROWS * GROUP_PACKS == WARP, "");
constexpr int MOST_FLAT_COLUMNS = 64;
constexpr int64_t LEAST_TILE_ROWS = 16, LEAST_TILE_COLUMNS = 16; /* less is not worth a tile */

constexpr int PAD_BYTES = 16; /* before and after a tile in shared memory: may be read, but is not used */

/* As a kernel argument. */
struct Tiles {
    int n, m;             /* columns and rows of the tensors */
    int columns, rows;    /* of a tile; rows: a multiple of N */
    int halo;             /* columns before the tile whose lines are read too */
    int pitch;            /* elements from line to line in shared memory: an odd number of 4-byte words */
    int bytes;            /* shared memory for a tile of a turned input */
    Divisor across, down; /* tiles along n and along m */
    Divisor line_packs;   /* packs of a line of a tile */
    Divisor row_groups;   /* groups of GROUP_ROWS rows per tile */
    Divisor by_n;         /* used if flat */
    int64_t count;        /* tiles in all */
};

/* flat: the output's rows, of up to MOST_FLAT_COLUMNS elements, have no gaps between them, and tiles have whole rows:
 * a tile is one span of the output. aligned: rows consist of aligned packs. `outside`: the product of the other
 * dimensions. */
template <typename T> Tiles tiles_of(int64_t n, int64_t m, int64_t outside, bool flat, bool aligned) {
    constexpr int N = WIDE<T>, GROUPS = TILE_UNITS / WARP;
    Tiles tiles = {};
    tiles.n = static_cast<int>(n);
    tiles.m = static_cast<int>(m);
    tiles.halo = flat || aligned ? 0 : N - 1;
    /* A flat tile may begin at any address, and then touches one pack more. */
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
    DEVICE T *output(int r) const {
        return tensors.template output<T>() + at[0] + r * tensors.across[0];
    }
    /* Unit u of a thread is a pack of a line: rows r, r + 1, ... of column `line`, counted from the halo. Returns its
     * place in shared memory, or -1 if there is none. */
    DEVICE int line_unit(int u, int &line, int &r) const {
        const int unit = threadIdx.x + u * TILE_THREADS;
        line = static_cast<int>(tiles.line_packs.quotient(unit));
        r = (unit - line * static_cast<int>(tiles.line_packs.number)) * N;
        const int own = column - tiles.halo + line;
        return line < tiles.halo + tiles.columns && own >= 0 && own < tiles.n && r < rows ? line * tiles.pitch + r : -1;
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
    /* The elements of a turned input, in shared memory, for the pack at `place`. */
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
