/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax statistics of a contiguous row, or of a part of it, by the threads of one block. */
#ifndef RAFTER_CUDA_BLOCK_SPAN_CUH
#define RAFTER_CUDA_BLOCK_SPAN_CUH

#include "core/sizes.h"
#include "cuda/row_statistics.cuh"

/* Threads of a block for a row of `packs` packs, of which a thread loads at_once at a time. Chosen such that few
 * threads are idle in the last round of loads. A multiple of a warp, from `least` to `most`. */
static inline int span_threads(int64_t packs, int at_once, int least, int most) {
    const int64_t rounds = max(ceil_div<int64_t>(packs, int64_t(at_once) * most), int64_t(1));
    const int64_t threads = round_up<int64_t>(ceil_div<int64_t>(packs, at_once * rounds), WARP);
    return static_cast<int>(max(min(threads, int64_t(most)), int64_t(least)));
}

/* The adjacent elements that a block reads: packs of 16 bytes, and less than a pack of edge elements on either side,
 * one per thread. WHOLE: the elements are aligned packs, so there are no edges. */
template <typename T, bool WHOLE> struct BlockSpan {
    const T *body;
    int packs;
    bool has_edge = false;  /* whether this thread has an edge element */
    float edge = -INFINITY; /* that element */

    DEVICE BlockSpan(const T *first, int count) : body(first), packs(count / WIDE<T>) {
        if constexpr (!WHOLE) {
            const AlignedSpan<const T> span(first, count);
            body = span.body;
            packs = static_cast<int>(span.packs);
            has_edge = static_cast<int>(threadIdx.x) < span.edges;
            if (has_edge)
                edge = to_float(body[span.edge(threadIdx.x)]);
        }
    }
    /* The statistics of this thread's elements. `pack`: its first packs, from load_packs. `total`, if not NULL: the
     * sum of the elements is added to it. */
    template <int COUNT> DEVICE RowStats stats(Pack<T, WIDE<T>> (&pack)[COUNT], float *total = nullptr) const {
        const RowStats s = stats_of_packs(pack, body, packs, threadIdx.x, blockDim.x, total);
        if constexpr (WHOLE)
            return s;
        if (total && has_edge)
            *total += edge;
        const float max = fmaxf(s.max, edge), pivot = pivot_at(max);
        return {max, fmaf(s.sum, exp_below(s.max - pivot, 1.0f), exp_below(edge - pivot, 1.0f))};
    }
};

#endif
