/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fast with cuBLASLt. For each group of rows: fp32 logits of all classes; statistics; dz, which
 * overwrites the front of each row of logits; the group's dx = dz W; and dW += dz^T x, summed from
 * group to group.
 */
#ifndef RAFTER_LCE_CUDA_CUBLASLT_FAST_CUH
#define RAFTER_LCE_CUDA_CUBLASLT_FAST_CUH

#include "ops/linear_cross_entropy/cuda/cublaslt_steps.cuh"

namespace lce {

struct CublasLtFast {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;

    struct Plan {
        int64_t group;       /* rows */
        int parts;           /* of a row, for its statistics */
        bool one_pass;       /* a block converts a row's logits to dz in one pass: see convert_rows */
        bool pack_x;         /* each group's rows of x are packed: see make */
        bool direct_dx;      /* the product writes into the caller's dx */
        bool direct_dweight; /* the same for dW; else it is summed in fp32 in the workspace */
        bool redo_nonfinite; /* ignored rows of x reach the sums of dW */
        size_t product_bytes;
        CommonBuffers common;
        Buffer<LossStats<FULL>> stats;
        Buffer<char> x, products;
        Buffer<float> z, dx, dweight, dbias;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call);
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan);
    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace);

    /* Plans with groups of this many rows; returns the bytes. */
    static size_t make(const Problem &p, const Limits &limits, int64_t group, Plan *plan);
    /* Plans within limits.budget; without a budget, with the usual sizes. good_only: see fit_groups. */
    static size_t fit(const Problem &p, const Limits &limits, bool good_only, Plan *plan);
};

} // namespace lce

#endif
