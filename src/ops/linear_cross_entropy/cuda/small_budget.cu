/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The last resort for a budget that is too small for the other variants. Runs their steps with less
 * workspace: fast with groups of fewer than FAST_ROWS rows; and if that does not fit either, fast or
 * compact without workspace for products and, on Hopper, without dropping ignored rows, for which x
 * may have to be copied.
 */
#include "cuda/variant.cuh"
#include "ops/linear_cross_entropy/cuda/cublaslt_compact.cuh"
#include "ops/linear_cross_entropy/cuda/cublaslt_fast.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_compact.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_fast.cuh"

namespace lce {

struct SmallBudget {
    typedef linear_cross_entropy_call Call;

    enum Steps { HOPPER_FAST, CUBLASLT_FAST, HOPPER_COMPACT, CUBLASLT_COMPACT };
    struct Plan {
        Steps steps;
        union {
            HopperFast::Plan hopper_fast;
            CublasLtFast::Plan cublaslt_fast;
            HopperCompact::Plan hopper_compact;
            CublasLtCompact::Plan cublaslt_compact;
        };
        Plan() {
        }
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (call.loss.rows == 0 || call.loss.classes == 0)
            return "there are no rows or no classes";
        if (call.saved)
            return "saved is given";
        return call.common.budget ? NULL : "there is no budget";
    }

    /* Plans fast with groups of any size. *good: they are as large as fast should use. */
    static size_t fit_fast(const rafter_cuda_state &device, const Problem &p, const Limits &limits, Plan *plan,
                           bool *good) {
        size_t bytes;
        if (!why_not_hopper_fast(device, p)) {
            plan->steps = HOPPER_FAST;
            bytes = HopperFast::fit(p, limits, clusters_of(device), false, &plan->hopper_fast);
            *good = is_good_group(p, plan->hopper_fast.group);
        } else {
            plan->steps = CUBLASLT_FAST;
            bytes = CublasLtFast::fit(p, limits, false, &plan->cublaslt_fast);
            *good = is_good_group(p, plan->cublaslt_fast.group);
        }
        return bytes;
    }

    static size_t fit_compact(const rafter_cuda_state &device, const Problem &p, const Limits &limits, Plan *plan) {
        if (!why_not_hopper(device, p)) {
            plan->steps = HOPPER_COMPACT;
            return HopperCompact::fit(p, limits, clusters_of(device), &plan->hopper_compact);
        }
        plan->steps = CUBLASLT_COMPACT;
        return CublasLtCompact::fit(p, limits, &plan->cublaslt_compact);
    }

    /* The first that fits of: fast with groups of a good size, compact, fast with small groups. */
    static size_t fit(const rafter_cuda_state &device, const Problem &p, const Limits &limits, Plan *plan) {
        const bool may_be_fast = !why_not_fast(p), may_be_compact = !why_not_compact(p);
        size_t fast_bytes = SIZE_MAX;
        bool good = false;
        if (may_be_fast) {
            fast_bytes = fit_fast(device, p, limits, plan, &good);
            if (!may_be_compact || (fast_bytes <= limits.budget && good))
                return fast_bytes;
        }
        Plan compact;
        const size_t compact_bytes = fit_compact(device, p, limits, &compact);
        if (compact_bytes > limits.budget && fast_bytes < compact_bytes)
            return fast_bytes;
        *plan = compact;
        return compact_bytes;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const Limits limits = limits_of(call);
        const size_t bytes = fit(device, p, limits, plan);
        return bytes <= limits.budget ? bytes : fit(device, p, tight_limits_of(call), plan);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        switch (plan.steps) {
        case HOPPER_FAST: return HopperFast::launch(context, call, plan.hopper_fast, workspace);
        case CUBLASLT_FAST: return CublasLtFast::launch(context, call, plan.cublaslt_fast, workspace);
        case HOPPER_COMPACT: return HopperCompact::launch(context, call, plan.hopper_compact, workspace);
        default: return CublasLtCompact::launch(context, call, plan.cublaslt_compact, workspace);
        }
    }
};

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, small_budget, lce::SmallBudget)
