/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax statistics of lines, for softmax and lrpe_cosine: each thread has those of some lines, which are then
 * reduced over a warp and over a block. A line is one reduced row or column.
 */
#ifndef RAFTER_CUDA_LINE_STATISTICS_CUH
#define RAFTER_CUDA_LINE_STATISTICS_CUH

#include <float.h>

#include "cuda/primitives.cuh"

/* Statistics of the LINES lines that a thread has elements of: a maximum, if HAS_MAX, and SUMS sums, which are relative
 * to the maximum. The maximum starts from the lowest finite number, so that -inf is never subtracted from -inf: a line
 * of all -inf has a sum of 0. */
template <int LINES, bool HAS_MAX, int SUMS> struct Statistics {
    static constexpr int COUNT = HAS_MAX + SUMS;
    float max[LINES], sum[SUMS][LINES];

    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < LINES; j++) {
            max[j] = -FLT_MAX;
#pragma unroll
            for (int k = 0; k < SUMS; k++)
                sum[k][j] = 0.0f;
        }
    }
    /* Rescales the sums from the current maximum to `other`, the new maximum. */
    DEVICE void rebase(int j, float other) {
        const float factor = exp2_fast((max[j] - other) * LOG2E);
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            sum[k][j] *= factor;
        max[j] = other;
    }
    /* Statistic k of line j: the maximum first, if there is one, then the sums. */
    DEVICE float &value(int k, int j) {
        return HAS_MAX && k == 0 ? max[j] : sum[k - HAS_MAX][j];
    }
    /* Adds line `line` of `other` to line j. */
    template <int OTHERS> DEVICE void add(int j, Statistics<OTHERS, HAS_MAX, SUMS> other, int line) {
        if constexpr (HAS_MAX) {
            const float top = fmaxf(max[j], other.max[line]);
            rebase(j, top);
            other.rebase(line, top);
        }
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            sum[k][j] += other.sum[k][line];
    }
};

/* Raises the maxima of lines [first, first + LINES) to at least the elements of `pack`, and rescales the sums. Element
 * j of the pack belongs to line first + j % LINES. CLEAR: nothing has been added yet, so there are no sums to rescale.
 */
template <bool CLEAR, int LINES, int ALL, int SUMS, typename T, int N>
DEVICE void cover(Statistics<ALL, true, SUMS> &statistics, int first, const Pack<T, N> &pack) {
    float x[N], top[LINES];
    unpack(pack, x);
#pragma unroll
    for (int line = 0; line < LINES; line++)
        top[line] = statistics.max[first + line];
#pragma unroll
    for (int j = 0; j < N; j++)
        top[j % LINES] = fmaxf(top[j % LINES], x[j]);
#pragma unroll
    for (int line = 0; line < LINES; line++)
        if constexpr (CLEAR)
            statistics.max[first + line] = top[line];
        else
            statistics.rebase(first + line, top[line]);
}

/* Reads N adjacent numbers, 16 bytes at a time if N is a multiple of 4; `from` must then be
 * aligned. */
template <int N> DEVICE void read_numbers(const float *from, float (&to)[N]) {
    constexpr int EACH = N % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int j = 0; j < N; j += EACH) {
        const Pack<float, EACH> pack = *reinterpret_cast<const Pack<float, EACH> *>(from + j);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            to[j + k] = pack.v[k];
    }
}

/* ---- reduction over a block ------------------------------------------------------------------ */

/*
 * 2^across_log2 threads of a block lie side by side, with LINES lines each. The other threads follow each other down
 * these lines. A Job describes the block:
 *
 *     LINES             lines per thread, a power of two
 *     MOST_LINES        lines per block, at most
 *     THREADS           threads per block
 *     HAS_MAX, SUMS     the statistics of a line
 */

template <class Job> using StatisticsOf = Statistics<Job::LINES, Job::HAS_MAX, Job::SUMS>;

/* In shared memory: the statistics of each group of threads, as combine_warp leaves them. A group is a warp; or, if
 * more than 32 threads lie side by side, as many warps as that, in which each thread has its own lines. */
template <class Job> struct GroupStatistics {
    alignas(16) float value[StatisticsOf<Job>::COUNT][Job::THREADS / WARP * Job::MOST_LINES];

    /* log2 of the threads of a group. */
    DEVICE static int group_log2(int across_log2) {
        return across_log2 < 5 ? 5 : across_log2;
    }
};

/* First step: reduces the statistics of each line over a warp and stores them in `groups`. Threads whose numbers differ
 * by a multiple of 2^across_log2 have the same lines. `thread`: this thread's number, in [0, THREADS). */
template <class Job, int LINES>
DEVICE void combine_warp(Statistics<LINES, Job::HAS_MAX, Job::SUMS> &mine, int thread, int across_log2,
                         GroupStatistics<Job> &groups) {
    const int across = 1 << across_log2, lines = across * LINES,
              group_log2 = GroupStatistics<Job>::group_log2(across_log2);
    const int group = thread >> group_log2, place = thread & ((1 << group_log2) - 1);
    if constexpr (Job::HAS_MAX) {
        float top[LINES];
#pragma unroll
        for (int j = 0; j < LINES; j++)
            top[j] = mine.max[j];
        for (int apart = WARP / 2; apart >= across; apart /= 2)
#pragma unroll
            for (int j = 0; j < LINES; j++)
                top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], apart));
#pragma unroll
        for (int j = 0; j < LINES; j++)
            mine.rebase(j, top[j]);
    }
    for (int apart = WARP / 2; apart >= across; apart /= 2)
#pragma unroll
        for (int j = 0; j < LINES; j++)
#pragma unroll
            for (int k = 0; k < Job::SUMS; k++)
                mine.sum[k][j] += __shfl_xor_sync(~0u, mine.sum[k][j], apart);
    if (place < across)
#pragma unroll
        for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
#pragma unroll
            for (int j = 0; j < LINES; j++)
                groups.value[k][group * lines + place * LINES + j] = mine.value(k, j);
}

/* Second step, after a barrier: one line's statistics over all groups, always in the same order.
 * `lines` is the number of lines of the block. */
template <class Job>
DEVICE Statistics<1, Job::HAS_MAX, Job::SUMS> combine_groups(const GroupStatistics<Job> &groups, int across_log2,
                                                             int lines, int line) {
    Statistics<1, Job::HAS_MAX, Job::SUMS> all, one;
    all.clear();
    for (int g = 0; g < Job::THREADS >> GroupStatistics<Job>::group_log2(across_log2); g++) {
#pragma unroll
        for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
            one.value(k, 0) = groups.value[k][g * lines + line];
        all.add(0, one, 0);
    }
    return all;
}

#endif
