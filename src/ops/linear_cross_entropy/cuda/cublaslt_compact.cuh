/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compact with cuBLASLt. First pass over slices of classes: logits, group by group, and their
 * statistics. Second pass: logits again, dz of all rows, the slice's dW = dz^T x, and dx += dz W,
 * summed from slice to slice.
 */
#ifndef RAFTER_LCE_CUDA_CUBLASLT_COMPACT_CUH
#define RAFTER_LCE_CUDA_CUBLASLT_COMPACT_CUH

#include "ops/linear_cross_entropy/cuda/cublaslt_steps.cuh"
#include "ops/linear_cross_entropy/cuda/row_units.cuh"

namespace lce {

struct CublasLtCompact {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    static constexpr bool SHARES_CLASSES = true;

    struct Plan {
        int64_t group, slice; /* rows, classes of a tile of logits */
        bool direct_dx;       /* the product writes into the caller's dx; else into fp32 sums in the workspace */
        bool direct_dweight;
        bool pack_x;         /* products use a copy of x */
        bool redo_nonfinite; /* ignored rows of x reach the sums of dW */
        size_t product_bytes;
        CommonBuffers common;
        Buffer<LossStats<FULL>> stats;
        Buffer<char> x, dz, products; /* dz: of all rows and a slice */
        Buffer<float> z, dx, dweight, dbias;
        RankBuffers ranks;
        RowUnits units;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call);
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan);
    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace);

    /* Plans with groups of this many rows and slices of this many classes; returns the bytes. */
    static size_t make(const Problem &p, const Limits &limits, int64_t group, int64_t slice, Plan *plan);
    /* Plans within limits.budget; without a budget, with the usual sizes. */
    static size_t fit(const Problem &p, const Limits &limits, Plan *plan);
};

} // namespace lce

#endif
