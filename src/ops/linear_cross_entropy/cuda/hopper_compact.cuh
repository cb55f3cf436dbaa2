/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compact on Hopper. First the statistics of all rows, from a product that stores no logits. Then for
 * each slice of classes: dz of all rows, again from a product that stores no logits; the slice's dW;
 * and dx, summed from slice to slice.
 *
 * dz of a slice is stored in the rows of dW behind the slice's own, which are written later, as long
 * as these hold a larger slice than the workspace.
 */
#ifndef RAFTER_LCE_CUDA_HOPPER_COMPACT_CUH
#define RAFTER_LCE_CUDA_HOPPER_COMPACT_CUH

#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"
#include "ops/linear_cross_entropy/cuda/row_units.cuh"

namespace lce {

struct HopperCompact {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    static constexpr bool SHARES_CLASSES = true;

    struct Plan {
        HopperSetup setup;
        int64_t group, slice; /* rows whose statistics, classes whose dz is formed at a time */
        int64_t dweight_rows; /* from rows_in_dweight */
        bool direct_dx;       /* the product writes into the caller's dx; else into fp32 sums in the workspace */
        bool direct_dweight;
        bool redo_nonfinite;      /* ignored rows of x reach the sums of dW */
        Buffer<char> dz;          /* of all rows and a slice; before that, statistics of a group's tiles */
        Buffer<OptionStats> more; /* of a group's tiles */
        Buffer<float> dbias, weight_sum, logit_sums, column_parts;
        Buffer<float> dx, dweight;
        RankBuffers ranks;
        RowUnits units;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call);
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan);
    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace);

    /* Plans with groups of this many rows and slices of this many classes; returns the bytes. */
    static size_t make(const Problem &p, const Limits &limits, int clusters, int64_t group, int64_t slice, Plan *plan);
    /* Plans within limits.budget; without a budget, with the usual sizes. */
    static size_t fit(const Problem &p, const Limits &limits, int clusters, Plan *plan);
};

} // namespace lce

#endif
