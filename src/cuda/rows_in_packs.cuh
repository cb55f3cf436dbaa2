/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loops over very short rows, where a thread takes whole rows. Two cases:
 *
 *   Rows of 2 or 4 elements without gaps (for_packs). Several rows fill a pack of 16 bytes, and a thread takes one pack
 *   or a few. The last pack may have fewer rows.
 *
 *   Rows of 2 to 7 elements with gaps between them (for_rows_apart). A thread takes a few rows.
 */
#ifndef RAFTER_CUDA_ROWS_IN_PACKS_CUH
#define RAFTER_CUDA_ROWS_IN_PACKS_CUH

#include "cuda/primitives.cuh"

/* COUNT adjacent numbers from index `first` on, of which the first `present` exist; the others are 0. */
template <typename U, int COUNT> DEVICE Pack<U, COUNT> load_numbers(const void *data, int64_t first, int present) {
    const U *const from = static_cast<const U *>(data) + first;
    if (present == COUNT)
        return load_once<U, COUNT>(from);
    Pack<U, COUNT> pack;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        pack.v[j] = j < present ? from[j] : from_float<U>(0.0f);
    return pack;
}
template <typename U, int COUNT>
DEVICE void store_numbers(void *data, int64_t first, int present, const float (&numbers)[COUNT]) {
    U *const to = static_cast<U *>(data) + first;
    const Pack<U, COUNT> pack = packed<U>(numbers);
    if (present == COUNT)
        return store_once<U, COUNT>(to, pack);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (j < present)
            to[j] = pack.v[j];
}

/* Calls f(k, row, present) for each pack k of this thread: its first row, and how many of its ROWS rows exist. */
template <int ROWS, int PACKS, int THREADS, typename F> DEVICE void for_packs(int64_t rows, F f) {
    const int64_t first = blockIdx.x * int64_t(THREADS * PACKS) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int64_t row = (first + k * THREADS) * ROWS;
        const int64_t left = rows - row;
        if (left > 0)
            f(k, row, left < ROWS ? static_cast<int>(left) : ROWS);
    }
}

/* ---- rows with gaps --------------------------------------------------------------------------- */

/* How many elements of a row of `length` are accessed at a time: a power of two, at most 16 bytes. Rows must be a
 * multiple of it apart. Without `gaps` it divides `length`. With `gaps` it may be twice as large, which suits rows that
 * are the first half of rows twice as long; then the rest of a row is 0 or a power of two. */
__host__ __device__ constexpr int row_unit(int length, int bytes, bool gaps) {
    const int divides = length % 2 != 0 ? 1 : length % 4 != 0 ? 2 : length % 8 != 0 ? 4 : 8;
    int unit = gaps ? 2 * divides : divides;
    while (unit > length || unit * bytes > 16)
        unit /= 2;
    return unit;
}

/* The elements of one row, as loaded: nothing waits for the loads until `get` converts them. */
template <typename T, int LENGTH, int UNIT> struct RowPacks {
    static constexpr int WHOLE = LENGTH / UNIT, REST = LENGTH % UNIT;
    Pack<T, UNIT> whole[WHOLE];
    Pack<T, REST == 0 ? 1 : REST> rest;

    DEVICE void load(const T *row) {
#pragma unroll
        for (int i = 0; i < WHOLE; i++)
            whole[i] = load_once<T, UNIT>(row + i * UNIT);
        if constexpr (REST > 0)
            rest = load_once<T, REST>(row + WHOLE * UNIT);
    }
    DEVICE void get(float (&x)[LENGTH]) const {
#pragma unroll
        for (int i = 0; i < WHOLE; i++) {
            float of_pack[UNIT];
            unpack(whole[i], of_pack);
#pragma unroll
            for (int j = 0; j < UNIT; j++)
                x[i * UNIT + j] = of_pack[j];
        }
        if constexpr (REST > 0) {
            float of_rest[REST];
            unpack(rest, of_rest);
#pragma unroll
            for (int j = 0; j < REST; j++)
                x[WHOLE * UNIT + j] = of_rest[j];
        }
    }
};

template <typename T, int LENGTH, int UNIT> DEVICE void store_row(T *row, const float (&x)[LENGTH]) {
    static_assert(LENGTH % UNIT == 0, "only loads have a rest");
#pragma unroll
    for (int i = 0; i < LENGTH; i += UNIT) {
        float of_pack[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; j++)
            of_pack[j] = x[i + j];
        store_once<T, UNIT>(row + i, packed<T>(of_pack));
    }
}

/* Calls f(r, row) for those of this thread's ROWS rows that exist. */
template <int ROWS, int THREADS, typename F> DEVICE void for_rows_apart(int rows, F f) {
    const int first = static_cast<int>(blockIdx.x * (THREADS * ROWS) + threadIdx.x);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first + r * THREADS < rows)
            f(r, first + r * THREADS);
}

#endif
