/* SPDX-License-Identifier: Apache-2.0 */
/* What all CUDA variants of cross_entropy share on the host: facts about a call, how rows are split, and
 * the layout of the workspace. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_PROBLEM_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_PROBLEM_CUH

#include "cuda/launch.cuh"
#include "cuda/summation_order.cuh"
#include "cuda/variant.cuh"
#include "ops/loss_classes.cuh"
#include "ops/loss_sums.cuh"
#include "ops/cross_entropy/call.h"

namespace {

constexpr int ROW_THREADS = 256; /* per block, if a thread or a warp takes a row */

/* Shape of the blocks that write gradients from coefficients: threads, and packs per thread. Chosen
 * by the measurements in docs/perf/cross_entropy.md. */
constexpr int GRADIENT_THREADS = 128, GRADIENT_PACKS = 2;

/* With at most this many rows every block that needs the mean's denominator counts all labels
 * itself. */
constexpr int64_t SCANNED_ROWS = 1 << 13;

/* Whether there are more rows than one block should count. */
inline bool are_many(int64_t rows) {
    return rows > 2 * SCANNED_ROWS;
}

/* In batch-invariant calls, longer rows of whole packs take a block each. */
constexpr int64_t INVARIANT_PACKS = 128;

/* Facts about a call that decide which variants serve it. Cheap to compute: every why_not does. */
struct Problem {
    int64_t rows, classes, row_bytes;
    bool forward;
    bool gradient;        /* dlogits is wanted, and is not empty */
    bool lse_given;       /* backward, with lse from forward */
    bool contiguous;      /* rows are adjacent elements, in logits and dlogits */
    bool strided;         /* rows are not contiguous, or dlogits is not aligned like logits */
    bool invariant;       /* batch invariant */
    SummationOrder order; /* of the rows of logits; for batch-invariant calls */
    bool whole_packs;     /* rows are contiguous and consist of whole, aligned packs of 16 bytes */

    explicit Problem(const cross_entropy_call &call) {
        const rafter_view &z = call.logits, &dz = call.dlogits;
        rows = call.loss.rows;
        classes = call.loss.classes;
        row_bytes = classes * rafter_dtype_bytes(z.dtype);
        forward = call.common.direction == RAFTER_FORWARD;
        gradient = call.gradient && dz.numel > 0;
        lse_given = !forward && call.loss.lse.data;
        invariant = call.common.batch_invariant;
        order = summation_order_of(classes, step(z), z.dtype);
        whole_packs = allows_wide_access(z, z.ndim) && (!gradient || allows_wide_access(dz, dz.ndim));
        contiguous = step(z) == 1 && (!gradient || step(dz) == 1);
        strided = !contiguous || (gradient && !same_alignment(z, dz));
    }
    int64_t row_packs() const {
        return row_bytes / 16;
    }
    /* The stride between columns. */
    int64_t step(const rafter_view &view) const {
        return classes > 1 ? view.stride[view.ndim - 1] : 1;
    }
    /* Blocks of a kernel with a thread per row. */
    int64_t row_blocks() const {
        return rows > 0 ? ceil_div<int64_t>(rows, ROW_THREADS) : 1;
    }
    /* Blocks per row that write the gradient from coefficients. */
    int64_t gradient_parts() const {
        return ceil_div<int64_t>(row_bytes, 16 * GRADIENT_THREADS * GRADIENT_PACKS);
    }
};

/* If there are many rows, those with fewer bytes than this are too short for a block each. Measured on an H200:
 * docs/perf/cross_entropy.md. */
inline int64_t least_bytes_for_blocks(rafter_dtype dtype) {
    return (rafter_dtype_bytes(dtype) == 2 ? 7 : 5) << 10;
}

/* Whether the variant `invariant`, although made for batch-invariant calls, is the fastest: for many rows of medium
 * length, forward; and for loss and gradient of fp32 rows at once, if dlogits is aligned otherwise than logits. The
 * variants before it leave such calls to it. Measured as above. */
inline bool invariant_is_faster(const Problem &p, const cross_entropy_call &call) {
    constexpr int64_t KIB = 1 << 10, MIB = 1 << 20, LEAST_ROW = 3584, LARGE = 512 * MIB, MEDIUM = 64 * MIB;
    const struct rafter_loss &l = call.loss;
    if (!p.forward || p.invariant || l.softcap != 0.0f || l.entropy.data || l.argmax.data || l.class_weight.data ||
        l.class_group.ranks > 0)
        return false;
    const bool narrow = rafter_dtype_bytes(call.logits.dtype) == 2, smooths = l.smoothing != 0.0f;
    if (p.gradient)
        return !narrow && !smooths && p.contiguous && p.strided && p.row_bytes >= 3 * KIB && p.row_bytes <= 48 * KIB &&
               p.rows * p.row_bytes >= 16 * MIB;
    if (!p.whole_packs || p.row_bytes < LEAST_ROW)
        return false;
    const int64_t limit = smooths ? (narrow ? 28 : 36) * KIB : least_bytes_for_blocks(call.logits.dtype),
                  least = p.row_bytes < (smooths ? 7 : 5) * KIB ? MEDIUM : LARGE;
    return p.row_bytes < limit && p.rows * p.row_bytes >= least;
}

/* How blocks share rows to compute statistics. Few long rows are split, so that all multiprocessors
 * have work. By shape alone, never by the device: the same bits everywhere. */
struct Split {
    int64_t parts, part; /* parts per row; elements per part */
    int threads;         /* per block */
};

inline Split split_rows(const Problem &p, rafter_dtype dtype, Options options = PLAIN) {
    constexpr int MOST_THREADS = 512, SHORT_BLOCK = 128;
    constexpr int64_t MANY_ROWS = 1024;
    const int64_t element = rafter_dtype_bytes(dtype);
    /* With many options arithmetic takes as long as the loads. So few rows are cut into more parts, and many rows
     * take short blocks, which do not all compute or all wait at the same time. */
    const int64_t parts = parts_of_row(p.rows, options == FULL ? 2 * p.row_bytes : p.row_bytes);
    const int most_threads = options >= FULL && p.rows >= MANY_ROWS ? SHORT_BLOCK : MOST_THREADS;
    Split split;
    split.part = round_up<int64_t>(ceil_div(p.classes, parts), 64); /* multiples of 64 keep the row's alignment */
    split.parts = ceil_div(p.classes, split.part);
    split.threads = threads_of_part(p.rows * split.parts, split.part * element, IN_FLIGHT, most_threads);
    return split;
}

/* Arrays in the workspace, one after the other. */
struct WorkspaceLayout {
    size_t bytes = 0;

    /* The offset of a new array. */
    size_t add(int64_t array_bytes) {
        const size_t offset = bytes;
        bytes += static_cast<size_t>(round_up<int64_t>(array_bytes, 16));
        return offset;
    }
};

template <typename A> A *at_offset(char *workspace, size_t offset) {
    return reinterpret_cast<A *>(workspace + offset);
}

} // namespace

#endif
