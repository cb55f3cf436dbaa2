/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics of parts of lines, and how they are merged: for the softmax kernels of slabs and columns. */
#ifndef RAFTER_ACT_CUDA_SOFTMAX_PART_CUH
#define RAFTER_ACT_CUDA_SOFTMAX_PART_CUH

#include <float.h>

#include "cuda/launch.cuh"
#include "cuda/line_statistics.cuh"
#include "cuda/primitives.cuh"

/* Statistics of a part of a line. Forward: the maximum and the sum of e^(x - max). Backward: the sum
 * of y dy; max is not used. The maximum starts from the lowest finite number: a line of all -inf has sum 0,
 * and its softmax is 0 / 0 = NaN, as in PyTorch. */
struct alignas(8) Part {
    float max, sum;
};
DEVICE Part no_part() {
    return {-FLT_MAX, 0.0f};
}

template <bool FORWARD> DEVICE Part merged(Part a, Part b) {
    if (!FORWARD)
        return {a.max, a.sum + b.sum};
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp2_fast((a.max - max) * LOG2E) + b.sum * exp2_fast((b.max - max) * LOG2E)};
}

/* Merges `a` and all of `parts`. The exponentials do not depend on each other. */
template <bool FORWARD, int COUNT> DEVICE Part merged(Part a, const Part (&parts)[COUNT]) {
    float max = a.max;
    if (FORWARD) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            max = fmaxf(max, parts[i].max);
        a.sum *= exp2_fast((a.max - max) * LOG2E);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        a.sum += FORWARD ? parts[i].sum * exp2_fast((parts[i].max - max) * LOG2E) : parts[i].sum;
    return {max, a.sum};
}

/* Merges the parts of `lanes` adjacent lanes, a power of two; all of them get the result. */
template <bool FORWARD> DEVICE Part merge_lanes(Part p, int lanes) {
    if (FORWARD) {
        float max = p.max;
        for (int step = lanes / 2; step > 0; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        p = {max, p.sum * exp2_fast((p.max - max) * LOG2E)};
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        p.sum += __shfl_xor_sync(~0u, p.sum, step);
    return p;
}
/* The statistics of one element. */
template <bool FORWARD> DEVICE Part part_of(float x, float d) {
    if (!FORWARD)
        return {-FLT_MAX, x * d};
    const float max = fmaxf(x, -FLT_MAX);
    return {max, exp2_fast((x - max) * LOG2E)};
}

/* Adds one element of each of N adjacent columns to their sums. Forward: the maxima cover `x`
 * already; d is not used. */
template <bool FORWARD, int N>
DEVICE void add_step(Statistics<N, FORWARD, 1> &mine, const float (&x)[N], const float (&d)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        mine.sum[0][j] =
            FORWARD ? mine.sum[0][j] + exp2_fast((x[j] - mine.max[j]) * LOG2E) : fmaf(x[j], d[j], mine.sum[0][j]);
}

/* ---- merging many parts ----------------------------------------------------------------------- */

constexpr int MERGED_PARTS = 8; /* of a line, that a thread loads at once */

template <bool GLOBAL> DEVICE Part load_part(const Part *p) {
    if constexpr (!GLOBAL)
        return *p;
    const float2 both = __ldcg(reinterpret_cast<const float2 *>(p));
    return {both.x, both.y};
}

/* Merges every `step`-th of a line's `parts` parts, from number `first` on; they are `inner` apart.
 * GLOBAL: this kernel has written them to global memory, so they are read from L2. */
template <bool FORWARD, bool GLOBAL = false>
DEVICE Part merge_some(const Part *line, int first, int step, int parts, int inner) {
    Part all = no_part();
    for (int i = first; i < parts; i += step * MERGED_PARTS) {
        Part some[MERGED_PARTS];
#pragma unroll
        for (int u = 0; u < MERGED_PARTS; u++)
            some[u] = i + u * step < parts ? load_part<GLOBAL>(line + (int64_t)(i + u * step) * inner) : no_part();
        all = merged<FORWARD>(all, some);
    }
    return all;
}

/* Merges the statistics of interleaved lines over a block. partial: [thread][element of its packs] in
 * shared memory; entry i belongs to line (i + skew) % inner, and each line has `terms` entries. A
 * line is merged by `lanes` lanes, a power of two; or by several whole warps if the block has so
 * many. scratch: a Part per warp. extra(line, lane, lanes): the lane's share of what belongs to the
 * line but is not in `partial`. One thread per line calls keep(line, all). All threads call this,
 * after a barrier. */
template <bool FORWARD, class Extra, class Keep>
DEVICE void merge_lines(const Part *partial, int terms, int inner, int skew, int lanes, Part *scratch, Extra extra,
                        Keep keep) {
    const int thread = threadIdx.x, threads = blockDim.x, each = threads / WARP / inner; /* warps per line */
    const auto first_of = [&](int line) { return partial + (line < skew ? line + inner : line) - skew; };
    if (each > 1) {
        const int warp = thread / WARP, line = warp / each, own = thread - line * each * WARP;
        if (line < inner) {
            Part all = merge_some<FORWARD>(first_of(line), own, each * WARP, terms, inner);
            all = merge_lanes<FORWARD>(merged<FORWARD>(all, extra(line, own, each * WARP)), WARP);
            if (thread % WARP == 0)
                scratch[warp] = all;
        }
        __syncthreads();
        const int lane = thread % WARP;
        if (warp < inner) {
            const Part all = merge_lanes<FORWARD>(lane < each ? scratch[warp * each + lane] : no_part(), WARP);
            if (lane == 0)
                keep(warp, all);
        }
        return;
    }
    const int lane = thread % lanes;
    for (int base = 0; base < inner; base += threads / lanes) {
        const int line = base + thread / lanes;
        Part all = no_part();
        if (line < inner)
            all = merged<FORWARD>(merge_some<FORWARD>(first_of(line), lane, lanes, terms, inner),
                                  extra(line, lane, lanes));
        all = merge_lanes<FORWARD>(all, lanes);
        if (line < inner && lane == 0)
            keep(line, all);
    }
}

/* The shape of a block of merge_parts: lines, and threads per line. */
constexpr int MERGED_LINES = 8, MERGE_GROUPS = 32;

/* A kernel: merges the parts of every line, MERGED_LINES lines of a slab per block. A thread merges
 * every MERGE_GROUPS-th part of a line, then a warp what these threads have. `across`: blocks per
 * slab. parts: [slab][part][line]; totals: [slab][line]. */
template <bool FORWARD>
__global__ void __launch_bounds__(MERGED_LINES *MERGE_GROUPS)
    merge_parts(const Part *parts, Part *totals, int inner, int count, Divisor across) {
    static_assert(MERGE_GROUPS == WARP, "a warp merges the groups of a line");
    __shared__ Part groups[MERGED_LINES][MERGE_GROUPS + 1];
    wait_for_previous_kernel();
    start_next_kernel();
    const unsigned slab = across.quotient(blockIdx.x);
    const int first = static_cast<int>(blockIdx.x - slab * across.number) * MERGED_LINES;
    const int line = threadIdx.x % MERGED_LINES, group = threadIdx.x / MERGED_LINES;
    const bool active = first + line < inner;
    groups[line][group] = merge_some<FORWARD>(parts + (int64_t)slab * count * inner + first + line, group, MERGE_GROUPS,
                                              active ? count : 0, inner);
    __syncthreads();
    const int own = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Part all = merge_lanes<FORWARD>(groups[own][lane], WARP);
    if (lane == 0 && first + own < inner)
        totals[(int64_t)slab * inner + first + own] = all;
}

/* Enqueues merge_parts. */
template <bool FORWARD>
void launch_merge(const rafter_context *context, const Part *parts, Part *totals, int64_t slabs, int inner, int count) {
    const int across = ceil_div(inner, MERGED_LINES);
    Launch merge = {slabs * across, MERGED_LINES * MERGE_GROUPS};
    ::launch(context, merge, merge_parts<FORWARD>, parts, totals, inner, count, Divisor(across));
}

#endif
