/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fast on Hopper, for 16-bit inputs. For each group of rows: the exponentials e^(u - pivot) of all
 * classes, stored by the product that forms the logits, before the sums of the rows are known; the
 * group's dx; and dW, summed from group to group.
 *
 * With many classes, exponentials are used in place of dz. The row factor p is applied to x before
 * the dW product, and to dx after its product. The label's element of dz is left out of the products
 * and added in fp32. So is the spread of label smoothing, which is a product of two vectors. With few
 * classes, exponentials are converted to dz in place.
 *
 * dW's memory is free until dW is written. The first or only group stores some of its exponentials
 * there; if dW is summed in the workspace, every group may store all of them there.
 */
#ifndef RAFTER_LCE_CUDA_HOPPER_FAST_CUH
#define RAFTER_LCE_CUDA_HOPPER_FAST_CUH

#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

struct HopperFast {
    typedef linear_cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;

    struct Plan {
        HopperSetup setup;
        bool converts;              /* exponentials to dz in place; else they go through the products */
        bool direct_dx;             /* the product writes into the caller's dx */
        bool direct_dweight;        /* the same for dW; else it is summed in fp32 in the workspace */
        int64_t group, first_group; /* rows; the first group may have more than the others */
        int64_t classes_in_dweight; /* the first group's exponentials of the last classes are stored in dweight */
        bool exp_in_dweight;        /* all exponentials of every group are */
        SpreadPlace spread;
        Buffer<RowStats> stats;                  /* of the group's tiles */
        Buffer<OptionStats> more;                /* the same */
        Buffer<RowStats> sample;                 /* of every row */
        Buffer<char> dz, x_scaled;               /* of the group. dz: exponentials, or dz after the conversion */
        Buffer<int> row_labels, frequent_labels; /* of Labels */
        Buffer<Labels::Class> class_rows;
        Buffer<float> dx, dweight; /* fp32 sums: of `group` rows; of all classes */
        Buffer<float> dbias, weight_sum, logit_sums, spread_x, column_parts;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call);
    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan);
    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace);

    /* Plans with groups of this many rows; returns the bytes. `use_dweight`: sets exp_in_dweight if that is
     * possible. */
    static size_t make(const Problem &p, const Limits &limits, int clusters, int64_t group, bool use_dweight,
                       Plan *plan);
    /* Plans within limits.budget; without a budget, as is fastest. good_only: see fit_groups. */
    static size_t fit(const Problem &p, const Limits &limits, int clusters, bool good_only, Plan *plan);
    /* Plans with small groups that are still good. */
    static size_t fit_usual(const Problem &p, const Limits &limits, int clusters, Plan *plan);
};

} // namespace lce

#endif
