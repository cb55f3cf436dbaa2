/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that several blocks share: how many blocks, with how many threads, and which of them ends last. */
#ifndef RAFTER_CUDA_ROW_PARTS_CUH
#define RAFTER_CUDA_ROW_PARTS_CUH

#include "cuda/primitives.cuh"

/* How many blocks share a contiguous row. Few long rows are split if that saves more time than merging the parts
 * takes. Times are estimates, in us, for an H200, which runs 396 blocks at once. They depend on the shape only, never
 * on the device, so that all devices compute the same bits. */
static inline int64_t parts_of_row(int64_t rows, int64_t row_bytes) {
    constexpr int64_t AT_ONCE = 396, MULTIPROCESSORS = 132, MANY_ROWS = 1024, SHORT_ROW = 48 << 10, FEW_BLOCKS = 512;
    constexpr int64_t MOST_PARTS = WARP;     /* one warp merges them */
    constexpr int64_t USUAL_PART = 16 << 10; /* bytes: 256 threads with IN_FLIGHT packs each */
    constexpr double START = 0.6, MERGE = 2.2;
    if (rows >= MANY_ROWS || row_bytes <= SHORT_ROW)
        return 1;
    /* KB per us that each of `running` blocks reads: the least of the limits of a block, of its share of a
     * multiprocessor, and of its share of memory bandwidth. After the first wave, blocks start where others have ended,
     * often three on a multiprocessor. */
    const auto rate = [](int64_t running, bool first) {
        const double per_sm = first ? static_cast<double>((running + MULTIPROCESSORS - 1) / MULTIPROCESSORS) : 3.0;
        return fmin(fmin(26.0, 45.0 / per_sm), (first ? 4200.0 : 3500.0) / static_cast<double>(running));
    };
    int64_t best = 1;
    double least = INFINITY;
    for (int64_t parts = 1; parts <= min(row_bytes / USUAL_PART, MOST_PARTS); parts++) {
        const int64_t waves = rows * parts / AT_ONCE, rest = rows * parts % AT_ONCE;
        const double part = static_cast<double>(row_bytes) / 1024.0 / static_cast<double>(parts);
        double time = static_cast<double>(waves) * (START + part / rate(AT_ONCE, false));
        if (rest > 0)
            time += START + part / rate(rest, waves == 0);
        if (parts > 1)
            time += MERGE;
        if (time < 0.98 * least) {
            least = time;
            best = parts;
        }
    }
    /* Few blocks: parts of the usual size, which threads load all at once. */
    const int64_t usual = min(row_bytes / USUAL_PART, MOST_PARTS);
    return best > 1 && rows * usual <= FEW_BLOCKS ? usual : best;
}

/* Threads of a block that takes `bytes` bytes: a row or a part of one. With few blocks, the packs are divided evenly
 * over the threads: idle warps would only delay the block. */
static inline int threads_of_part(int64_t blocks, int64_t bytes, int in_flight, int most_threads) {
    constexpr int64_t FEW_BLOCKS = 396;
    const int64_t packs = bytes / 16;
    if (blocks > FEW_BLOCKS) {
        int threads = 2 * WARP;
        while (threads < packs / in_flight && threads < most_threads)
            threads *= 2;
        return threads;
    }
    const int64_t rounds = (packs + in_flight * most_threads - 1) / (in_flight * most_threads);
    const int64_t threads = rounds == 0 ? 0 : (packs + rounds * in_flight - 1) / (rounds * in_flight);
    return static_cast<int>(max((threads + WARP - 1) / WARP, int64_t(2))) * WARP;
}

/* Counts this block at `counter`. True in the last of `blocks` blocks, which then sees everything
 * that all of them wrote before, and has reset the counter to 0. Called by all threads. */
DEVICE bool block_arrives_last(unsigned *counter, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last)
            *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

#endif
