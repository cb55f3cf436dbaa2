/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of 2 or 4 elements, several of which fill a pack of 16 bytes: a thread takes one pack or a few. The last pack
 * may have fewer rows. */
#ifndef RAFTER_CUDA_ROWS_IN_PACKS_CUH
#define RAFTER_CUDA_ROWS_IN_PACKS_CUH

#include "cuda/vocabulary.cuh"

/* COUNT adjacent numbers from index `first` on, of which `present` exist. */
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

/* f(k, row, present): for pack k of this thread, its first row, and how many of its rows exist. */
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

#endif
