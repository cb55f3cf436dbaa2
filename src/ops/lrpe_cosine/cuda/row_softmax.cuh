/* SPDX-License-Identifier: Apache-2.0 */
/* The softmax over features of rows in registers, which some lanes of a warp, or some warps of a block, share. */
#ifndef RAFTER_LRPE_COSINE_CUDA_ROW_SOFTMAX_CUH
#define RAFTER_LRPE_COSINE_CUDA_ROW_SOFTMAX_CUH

#include <float.h>

#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* The threads that hold a row: `lanes` lanes of a warp; or if BLOCK, `warps` warps of the block. Both are powers of
 * two. All threads of the block take part in every sum and maximum, and combine COUNT rows at a time. */
template <bool BLOCK> struct RowThreads {
    static constexpr int MOST_ROWS = 4;
    typedef float Exchange[2][THREADS / WARP][MOST_ROWS]; /* two buffers in turns: one barrier each is enough */
    int lanes, warps;
    Exchange &exchange;
    int turn = 0;

    /* Combines x over the warps of a row, in their order. */
    template <int COUNT, class F> DEVICE void combine_warps(float (&x)[COUNT], F combine) {
        const int warp = threadIdx.x / WARP, first = warp & ~(warps - 1);
        float(&numbers)[THREADS / WARP][MOST_ROWS] = exchange[turn];
        turn ^= 1;
        if (threadIdx.x % WARP == 0)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                numbers[warp][i] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = numbers[first][i];
        for (int w = 1; w < warps; w++)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                x[i] = combine(x[i], numbers[first + w][i]);
    }
    /* The sum over the threads of the row. All five butterfly steps are made: in `sum` a step that would leave the row
     * adds nothing, in `max` it compares a lane with itself. Skipping it by a branch would cost more. */
    template <int COUNT> DEVICE void sum(float (&x)[COUNT]) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float other = __shfl_xor_sync(~0u, x[i], step);
                if (BLOCK || step < lanes)
                    x[i] += other;
            }
        if constexpr (BLOCK)
            combine_warps(x, [](float a, float b) { return a + b; });
    }
    template <int COUNT> DEVICE void max(float (&x)[COUNT]) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                x[i] = fmaxf(x[i], __shfl_xor_sync(~0u, x[i], BLOCK ? step : step & (lanes - 1)));
        if constexpr (BLOCK)
            combine_warps(x, [](float a, float b) { return fmaxf(a, b); });
    }
    /* Replaces x by e^(x - maximum of the row); `all` gets the sums of rows. */
    template <typename T, int COUNT, int N> DEVICE void exponentials(float (&x)[COUNT][N], float (&all)[COUNT]) {
        float top[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            top[i] = -FLT_MAX;
            all[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < N; j++)
                top[i] = fmaxf(top[i], x[i][j]);
        }
        max(top);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                all[i] += x[i][j] = exp_as<T>(x[i][j] - top[i]);
        sum(all);
    }
};

} // namespace lrpe

#endif
