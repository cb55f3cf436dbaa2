/* SPDX-License-Identifier: Apache-2.0 */
/* For on_chip.cu, two_pass.cu and invariant.cu, a thread per row: a kernel that computes before the rows are read what
 * gradients need besides statistics; and one that turns statistics into outputs. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_FINISH_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_FINISH_CUH

#include "ops/cross_entropy/cuda/general.cuh"

/* What a kernel that computes statistics and gradient needs of a row besides its logits. */
struct alignas(16) KnownTerms {
    RowTerms terms;
    float z_label, unused; /* initialised, because all of it is copied */
};
static_assert(sizeof(KnownTerms) == sizeof(RowTerms) + 8, "no padding");

/* How the threads of `finish` share rows. */
struct RowLanes {
    unsigned parts; /* of a row */
    int shift;      /* 2^shift adjacent threads per row */

    /* Few rows take one block: to add up the losses of several blocks takes longer than to merge several parts
     * per thread. */
    static RowLanes of(int64_t rows, int64_t parts) {
        RowLanes all = {static_cast<unsigned>(max(parts, int64_t(1))), 0};
        while (all.lanes() < parts && all.lanes() < WARP && 2 * all.lanes() * rows <= ROW_THREADS)
            all.shift++;
        return all;
    }
    __host__ DEVICE int lanes() const {
        return 1 << shift;
    }
    int64_t blocks(int64_t rows) const {
        return max(ceil_div<int64_t>(rows * lanes(), ROW_THREADS), int64_t(1));
    }
};

/* kernels/finish.cu. `stats`: LossStats<options> of each part of each row, with options as stats_bytes. `shared`: the
 * statistics are those of all ranks. `known`, `coefficients` may be NULL. */
void launch_terms(const rafter_context *context, const Args &args, KnownTerms *row_terms);
void launch_finish(const rafter_context *context, const Args &args, Options options, bool shared, const RowLanes &rows,
                   const void *stats, const KnownTerms *known, RowCoefficients *coefficients);

namespace {

/* As gradient_from_stats, but in float: every thread of the block computes it. */
template <int OPTIONS>
DEVICE void gradient_in_float(const Loss &loss, const KnownTerms &known, const LossStats<OPTIONS> &g,
                              RowGradient *gradient) {
    const RowStats s = relative_to_largest(g, loss);
    const float sum = s.max == INFINITY ? NAN : s.sum;
    if (sum == 0.0f)
        *gradient = zero_gradient();
    else
        *gradient = gradient_of<(OPTIONS >= FULL)>(loss, known.terms, known.z_label, s.max, 1.0f / sum,
                                                   loss.z_loss != 0.0f ? loss.scale * s.max + logf(sum) : 0.0f);
}

} // namespace

#endif
