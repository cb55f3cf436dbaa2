/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Storing the results of a tile (hopper_gemm.cuh). A part of them, 16 rows of 128 bytes, is written (staged) into a box
 * of shared memory in the swizzle of the copy engine. From there it is stored by the copy engine (store_part,
 * store_floats), or by the warp itself if rows may be at any address (scatter_part, scatter_floats). The _part
 * functions are for 16-bit results that are packed in registers, the _floats functions for fp32.
 */
#ifndef RAFTER_CUDA_HOPPER_EPILOGUE_CUH
#define RAFTER_CUDA_HOPPER_EPILOGUE_CUH

#include "cuda/hopper_gemm.cuh"

namespace gemm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int PARTS_IN_FLIGHT = Together::PARTS_IN_FLIGHT;

/* Two results in one register. */
template <typename T> DEVICE unsigned pair_of(float a, float b) {
    const float both[2] = {a, b};
    const Pack<T, 2> pack = packed<T>(both);
    return reinterpret_cast<const unsigned &>(pack);
}

/* The column of d[4 j]; d[4 j + 1] is in the next one. See multiply_64xNx16. */
DEVICE int column_of(int j) {
    return 8 * j + 2 * (threadIdx.x & 3);
}

/* Converts a part of the results, e, to 16 bits. */
template <typename T> DEVICE void pack_part(unsigned *pairs, const float (&e)[2 * PART_PAIRS]) {
#pragma unroll
    for (int k = 0; k < PART_PAIRS; k++)
        pairs[k] = pair_of<T>(e[2 * k], e[2 * k + 1]);
}
template <typename T> DEVICE void pack_part(Packed &packed, int part, const float (&e)[2 * PART_PAIRS]) {
    pack_part<T>(packed.u + part * PART_PAIRS, e);
}

/* Writes the warp's 16 rows of a packed part into a box of shared memory, swizzled. */
DEVICE void stage_pairs(char *box, const unsigned *pairs) {
    const int lane = threadIdx.x % WARP, swizzled = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j += 2) {
        const unsigned *const u = pairs + 2 * j;
        store_8x8x4(box + lane % 16 * 128 + (swizzled ^ j * 16), {u[0], u[1], u[2], u[3]});
    }
}
DEVICE void stage_part(char *box, const Packed &packed, int part) {
    stage_pairs(box, packed.u + part * PART_PAIRS);
}
/* The same for 32 columns of floats e, in the order of the sums. */
constexpr int FLOATS = 128 / sizeof(float);
DEVICE void stage_part(char *box, const float (&e)[FLOATS / 2]) {
    const int lane = threadIdx.x % WARP, row = lane / 4, pair = lane % 4;
#pragma unroll
    for (int j = 0; j < FLOATS / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<float2 *>(box + (row + 8 * i) * 128 + ((2 * j + pair / 2) ^ row) * 16 + pair % 2 * 8) =
                make_float2(e[4 * j + 2 * i], e[4 * j + 2 * i + 1]);
}

/* Lets the copy engine store a staged box at (row, column), or add it to memory if ADD. `row`: the warp's first; read
 * by lane 0 only. The engine writes up to the next multiple of 16 bytes of a row, so the padding up to there must not
 * be used. */
template <bool ADD> DEVICE void send_box(const char *box, const CUtensorMap &out, int column, int row) {
    shared_written();
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        if constexpr (ADD)
            add_box(&out, column, row, box);
        else
            store_box(&out, column, row, box);
    }
}

/* Stores a packed part. First waits until the earlier part in the same box of `staging` has been read. ADD: adds it to
 * memory, and the sum is rounded to 16 bits again. */
template <bool ADD> DEVICE void store_part(const Packed &packed, int part, char *staging, const CUtensorMap &out) {
    char *const box = staging + part % PARTS_IN_FLIGHT * PART_BYTES;
    if (threadIdx.x % WARP == 0)
        stores_wait<PARTS_IN_FLIGHT - 1>();
    __syncwarp();
    stage_part(box, packed, part);
    send_box<ADD>(box, out, packed.column + part * CHUNK, packed.row);
}

/* Converts a part of the results and stores it at once, through the first box of `staging`. `column`: of the part. */
template <typename T>
DEVICE void store_at_once(const float (&e)[2 * PART_PAIRS], char *staging, const CUtensorMap &out, int column,
                          int row) {
    unsigned pairs[PART_PAIRS];
    pack_part<T>(pairs, e);
    if (threadIdx.x % WARP == 0)
        stores_wait<0>();
    __syncwarp();
    stage_pairs(staging, pairs);
    send_box<false>(staging, out, column, row);
}

/* Job::HELD for results that are floats: how many buffers of the ring a tile needs so that each part has a box of its
 * own and need not wait for another one. A warp's boxes are in its staging and in the held buffers. */
constexpr int PARTS_OF_STEP = Together::STEP_BYTES / (GROUPS * GROUP / WARP * PART_BYTES);
constexpr int HELD_FOR_FLOATS = (COLUMNS / FLOATS - PARTS_IN_FLIGHT + PARTS_OF_STEP - 1) / PARTS_OF_STEP;

/* Stores a part of floats, in its own box. */
template <bool ADD>
DEVICE void store_floats(const float (&e)[FLOATS / 2], int part, char *staging, char *const *held,
                         const CUtensorMap &out, int column, int row) {
    const int warp = threadIdx.x / WARP - GROUP / WARP, behind = part - PARTS_IN_FLIGHT;
    char *const box = behind < 0
                          ? staging + part * PART_BYTES
                          : held[behind / PARTS_OF_STEP] + (warp * PARTS_OF_STEP + behind % PARTS_OF_STEP) * PART_BYTES;
    __syncwarp();
    stage_part(box, e);
    send_box<ADD>(box, out, column + part * FLOATS, row);
}

/* The warp itself stores a staged box, 16 bytes per lane at a time, to rows that may lie anywhere. to[i]: where this
 * thread's row i (of two) begins; NULL if it does not exist. `column`: the first of the part. Columns from `columns` on
 * are not written. */
template <typename U, bool ADD>
DEVICE void scatter_box(const char *box, U *const (&to)[2], int column, int64_t columns) {
    constexpr int N = 16 / sizeof(U), LANES = 128 / 16;
    const int lane = threadIdx.x % WARP;
    const int64_t at = column + lane % LANES * N;
    __syncwarp();
#pragma unroll
    for (int first = 0; first < PART_ROWS; first += WARP / LANES) {
        const int row = first + lane / LANES, holder = row % 8 * 4;
        U *const low = reinterpret_cast<U *>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to[0]), holder));
        U *const high = reinterpret_cast<U *>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to[1]), holder));
        U *const destination = row < 8 ? low : high;
        const Pack<U, N> pack = *reinterpret_cast<const Pack<U, N> *>(box + row * 128 + (lane % LANES ^ row % 8) * 16);
        if (!ADD && destination && at + N <= columns)
            store_once<U, N>(destination + at, pack);
        else if (destination)
            for (int i = 0; i < N && at + i < columns; i++)
                destination[at + i] =
                    ADD ? from_float<U>(to_float(destination[at + i]) + to_float(pack.v[i])) : pack.v[i];
    }
}
/* Stores a packed part. No wait for the box is needed: it was last used two parts ago, and since then the lanes, which
 * read it themselves, have synchronised. */
template <typename U, bool ADD>
DEVICE void scatter_part(const Packed &packed, int part, char *staging, U *const (&to)[2], int64_t columns) {
    char *const box = staging + part % PARTS_IN_FLIGHT * PART_BYTES;
    stage_part(box, packed, part);
    scatter_box<U, ADD>(box, to, packed.column + part * CHUNK, columns);
}
template <bool ADD>
DEVICE void scatter_floats(const float (&e)[FLOATS / 2], int part, char *staging, float *const (&to)[2], int column,
                           int64_t columns) {
    char *const box = staging + part % PARTS_IN_FLIGHT * PART_BYTES;
    stage_part(box, e);
    scatter_box<float, ADD>(box, to, column + part * FLOATS, columns);
}

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

} // namespace gemm

#endif
