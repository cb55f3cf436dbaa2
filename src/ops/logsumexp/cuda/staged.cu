/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of short rows in any layout, of any alignment: blocks copy tiles of rows into shared memory
 * (cuda/slab_stage.cuh). */
#include "cuda/slab_stage.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int PER_SM = 5; /* blocks per multiprocessor */

struct StagedArgs {
    Stage stage;
    LseRows lse;
    Rows dlse;
};

template <typename T> struct GradientWriter {
    ScaledExp<T> gradient;

    DEVICE T of_one(T x, int) const {
        return from_float<T>(gradient.of(to_float(x)));
    }
};

/* What slab_stage.cuh asks of an op. */
template <typename T, bool BACKWARD> struct StagedLogsumexp {
    static constexpr bool GRADIENT = BACKWARD;
    typedef RowStats Stats;
    struct Row {
        int64_t row; /* -1: none */
        float lse, dlse;
    };
    struct Coefficient {
        float lse, dlse;
    };
    const StagedArgs &a;

    DEVICE Stats none() const {
        return no_elements();
    }
    template <int COUNT> DEVICE void add(Stats &g, const Pack<T, 1> (&packs)[COUNT], int, int, int) const {
        add_packs(g, packs, 1.0f);
    }
    DEVICE Stats merge_lanes(const Stats &g, int lanes) const {
        return merge_some_lanes(g, lanes, 1.0f);
    }
    DEVICE Row no_row() const {
        return {-1, 0.0f, 0.0f};
    }
    DEVICE Row load_row(int64_t row) const {
        if constexpr (BACKWARD)
            return {row, a.lse.get(row), a.dlse.get(row)};
        return {row, 0.0f, 0.0f};
    }
    DEVICE void begin() const {
    }
    DEVICE bool needs_stats(const Row &) const {
        return !BACKWARD;
    }
    DEVICE int wanted(const Row &) const {
        return -1;
    }
    DEVICE Coefficient finish(const Row &row, const Stats &g, T) const {
        if (!BACKWARD && row.row >= 0)
            a.lse.put(row.row, lse_of(g));
        return {row.lse, row.dlse};
    }
    DEVICE GradientWriter<T> writer(const Coefficient &c) const {
        return {gradient_of_row<T>(c.lse, c.dlse)};
    }
};

template <typename T, bool BACKWARD, bool COLUMNS>
__global__ __launch_bounds__(STAGE_THREADS, PER_SM) void staged(const __grid_constant__ StagedArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    StagedLogsumexp<T, BACKWARD> op = {a};
    staged_rows<StagedLogsumexp<T, BACKWARD>, T, COLUMNS>(op, a.stage, dynamic);
}

struct Staged {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        Stage stage;
        int64_t blocks;
        size_t shared;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        if (s.inner == 1 && p.row_bytes() >= 256)
            return "rows are long enough to be loaded into registers";
        if (s.inner > 1 && p.backward)
            return "gradients of rows side by side need no shared memory";
        if (s.inner > 1 && p.n > 16 && s.packs_across(0, bytes))
            return "every step has whole packs: columns of packs need no shared memory";
        return why_not_staged(s, p.backward, bytes);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        plan->stage = stage_of(slabs_of(p.x, p.backward ? &p.dx : NULL), p.backward, bytes, device.multiprocessors);
        plan->shared = stage_shared(plan->stage, bytes, sizeof(RowStats), p.backward ? 8 : 0);
        plan->blocks = stage_blocks(device, plan->stage, plan->shared, PER_SM);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const bool backward = call.common.direction == RAFTER_BACKWARD;
        const StagedArgs args = {plan.stage, lse_rows(call), backward ? reduced_rows(call.dlse, call) : Rows{}};
        const Launch how = {plan.blocks, STAGE_THREADS, plan.shared};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (backward)
                ::launch(context, how, staged<T, true, false>, args);
            else if (plan.stage.columns)
                ::launch(context, how, staged<T, false, true>, args);
            else
                ::launch(context, how, staged<T, false, false>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, staged, Staged)
