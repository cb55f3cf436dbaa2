/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Basic calls (basic.cuh) whose rows fit into the registers of one warp: one kernel, a warp per row, for
 * forward, for backward, and for loss and gradient at once. Also with class weights; forward or backward
 * alone also with label smoothing, and with both.
 */
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

/* Threads of the block have written loss and weight of its rows to `row_losses`. The last block to
 * finish writes the loss of all rows. Called by all threads. */
template <int ROWS> DEVICE void add_up_rows(const BasicArgs &u, const double2 (&row_losses)[ROWS]) {
    double2 *const block_losses = reinterpret_cast<double2 *>(u.losses);
    __syncthreads();
    if (threadIdx.x == 0) {
        double2 sum = row_losses[0];
#pragma unroll
        for (int i = 1; i < ROWS; i++)
            sum = make_double2(sum.x + row_losses[i].x, sum.y + row_losses[i].y);
        block_losses[blockIdx.x] = sum;
    }
    add_up_blocks(u, block_losses, blockDim.x);
}

/* How a kernel handles label smoothing. NO_SMOOTHING: not in forward; in gradients, where it costs nothing. SMOOTHING:
 * in forward, which adds up the logits. WEIGHTED_SMOOTHING: weighted by class, in forward or backward. */
enum Smoothing { NO_SMOOTHING, SMOOTHING, WEIGHTED_SMOOTHING };

/* Calls f(k, j, weight) for the elements j of a lane's packs k, of a row of `packs` packs. */
template <int PACKS, int N, typename F> DEVICE void for_class_weights(const BasicArgs &u, int lane, int packs, F f) {
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (lane + k * WARP < packs)
#pragma unroll
            for (int j = 0; j < N; j++)
                f(k, j, u.class_weight[((lane + k * WARP) * N + j) * u.class_stride]);
}

/* PACKS: packs per lane. known_factor: NULL if every block computes it. U: BasicArgs or SpacedArgs. */
template <typename T, int PACKS, bool FORWARD, bool GRADIENT, Smoothing SMOOTHS, class U>
__global__ __launch_bounds__(ROW_THREADS) void warp_per_row(const __grid_constant__ U u, const double *known_factor) {
    if (!known_factor)
        wait_for_inputs();
    constexpr int N = WIDE<T>;
    const int lane = threadIdx.x % WARP, own = (blockIdx.x * ROW_THREADS + threadIdx.x) / WARP;
    const bool valid = own < u.rows;
    const int row = valid ? own : u.rows - 1, packs = u.classes / N;
    const T *const z = u.template row_of_z<T>(row);
    T *const dz = GRADIENT ? u.template row_of_dz<T>(row) : nullptr;
    const int64_t label_at = u.label_at(row), lse_at = FORWARD || !u.lse ? 0 : u.lse_at(row);
    Pack<T, N> pack[PACKS];
    load_packs(pack, z, packs, lane, WARP);
    fence_loads();
    const int64_t loaded = u.load_label(label_at);
    const float given = FORWARD || !u.lse ? INFINITY : load_now(u.lse + lse_at);
    if (GRADIENT && known_factor)
        wait_for_previous_kernel();
    const double factor = !GRADIENT ? 0.0 : known_factor ? __ldcg(known_factor) : u.template factor<ROW_THREADS>();
    const int label = u.class_of(loaded);
    const float z_label = label >= 0 ? to_float(z[label]) : 0.0f;
    const bool from_lse = lse_is_accurate<T>(given);
    RowStats s = no_elements();
    [[maybe_unused]] float total = 0.0f, weight_sum = 0.0f;
    if constexpr (SMOOTHS == WEIGHTED_SMOOTHING) {
        for_class_weights<PACKS, N>(u, lane, packs, [&](int k, int j, float weight) {
            weight_sum += weight;
            total = FORWARD ? fmaf(weight, to_float(pack[k].v[j]), total) : 0.0f;
        });
        weight_sum = warp_sum(weight_sum);
        total = FORWARD ? warp_sum(total) : 0.0f;
    }
    if (__any_sync(~0u, label >= 0 && !from_lse)) {
        if constexpr (SMOOTHS == SMOOTHING) {
            int own_packs = 0;
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                own_packs += lane + k * WARP < packs;
            add_packs(s, pack, 1.0f, &total, own_packs);
            total = warp_sum(total);
        } else {
            add_packs(s, pack, 1.0f);
        }
        s = merge_lanes<WARP>(s, 1.0f);
    }
    if (GRADIENT) {
        __syncwarp(); /* dz may overwrite z: all lanes have read their logits */
        if (!FORWARD && lane == 0)
            u.flag_bad_label(label);
        constexpr bool WEIGHTED = SMOOTHS == WEIGHTED_SMOOTHING;
        const float weight = WEIGHTED ? u.class_weight_of(label) : 1.0f;
        const double own_factor =
            WEIGHTED ? factor * (u.label_share * weight + u.spread * weight_sum) : u.weighted(factor, label);
        const BasicGradient g = label < 0  ? u.gradient_of_skipped(label)
                                : from_lse ? u.gradient_from_lse(label, own_factor, given)
                                           : u.gradient_from_stats(label, own_factor, s);
        const bool mine = valid && g.label >= 0 && g.label / N % WARP == lane;
        if constexpr (WEIGHTED) {
            const BasicSpread spread(u, factor, weight);
            const ScaledExp<T> scaled(g.c, g.pivot, 1.0f);
            for_class_weights<PACKS, N>(u, lane, valid ? packs : 0, [&](int k, int j, float of_class) {
                const float d = spread.of(to_float(pack[k].v[j]), scaled, of_class);
                pack[k].v[j] = from_float<T>(g.label < 0 ? g.c : d);
            });
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                if (lane + k * WARP < (valid ? packs : 0))
                    store_once<T, N>(dz + (lane + k * WARP) * N, pack[k]);
            if (mine)
                dz[g.label] = from_float<T>(spread.at_label(z_label, g));
        } else {
            write_packs(dz, pack, lane, WARP, valid ? packs : 0, g, BasicSpread(u, own_factor), z_label, mine);
        }
    }
    if (FORWARD) {
        __shared__ double2 row_losses[ROW_THREADS / WARP];
        if (lane == 0)
            row_losses[threadIdx.x / WARP] =
                valid ? make_double2(u.finish_row(row, label, s, z_label, SMOOTHS != NO_SMOOTHING ? &total : nullptr,
                                                  SMOOTHS == WEIGHTED_SMOOTHING ? &weight_sum : nullptr),
                                     u.weight_of(label))
                      : make_double2(0.0, 0.0);
        if (u.loss)
            add_up_rows(u, row_losses);
    }
}

struct BasicWarpPerRow {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        BasicArgs args;
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        const bool both = call.loss.smoothing != 0.0f && call.loss.class_weight.data;
        if (p.row_packs() > (p.gradient || both ? 8 : 4) * WARP)
            return p.gradient ? "rows are longer than 4 KB" : "rows are longer than 2 KB";
        const bool only_here = both && !are_many(p.rows); /* other basic kernels do not take both */
        if (are_many_short_rows(p) && !only_here)
            return "there are so many short rows that a warp should take several";
        if (writes_parts_of_rows(p) && !only_here)
            return "there are so many rows that parts of them should be written from lse";
        /* With more than 64 packs, the sums are those of basic_short_rows, which takes many rows. */
        if (p.invariant && p.row_packs() > 64 && p.row_packs() <= INVARIANT_PACKS)
            return are_many(p.rows) ? "there are more labels than one block should count"
                                    : why_not_basic_options(p, call);
        const bool alone = !p.invariant && p.forward != p.gradient; /* loss or gradient */
        return why_not_basic(p, call, {!p.gradient || (!p.invariant && !p.forward), !p.invariant, alone});
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        write_each_loss(&plan->args, call);
        plan->blocks = ceil_div<int64_t>(p.rows, ROW_THREADS / WARP);
        return (plan->args.loss ? plan->blocks : 0) * sizeof(double2) + (counts(plan->args) ? sizeof(double) : 0);
    }

    /* Whether a kernel before this one computes the factor: there are class weights, or more labels than every
     * block should count. */
    static bool counts(const BasicArgs &args) {
        return args.dz && (args.weighs || args.rows > SCANNED_ROWS);
    }

    template <typename T, int PACKS, class U>
    static void launch_rows(const rafter_context *context, const Call &call, const Plan &plan, const U &args,
                            const double *factor) {
        const Launch how = {plan.blocks, ROW_THREADS};
        if constexpr (std::is_same<U, BasicArgs>::value)
            if (args.weighs_smoothing())
                return args.dz ? ::launch(context, how, warp_per_row<T, PACKS, false, true, WEIGHTED_SMOOTHING, U>,
                                          args, factor)
                               : ::launch(context, how, warp_per_row<T, PACKS, true, false, WEIGHTED_SMOOTHING, U>,
                                          args, factor);
        if constexpr (PACKS == 4) { /* see why_not: longer rows want a gradient, batch-invariant calls no smoothing */
            if (!args.dz && !args.smooths)
                return ::launch(context, how, warp_per_row<T, PACKS, true, false, NO_SMOOTHING, U>, args, factor);
            if constexpr (std::is_same<U, BasicArgs>::value)
                if (!args.dz)
                    return ::launch(context, how, warp_per_row<T, PACKS, true, false, SMOOTHING, U>, args, factor);
        }
        if (call.common.direction == RAFTER_FORWARD)
            ::launch(context, how, warp_per_row<T, PACKS, true, true, NO_SMOOTHING, U>, args, factor);
        else
            ::launch(context, how, warp_per_row<T, PACKS, false, true, NO_SMOOTHING, U>, args, factor);
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args) {
        double *const factor = counts(args) ? args.losses + (args.loss ? 2 * plan.blocks : 0) : nullptr;
        if (factor)
            ::launch(context, Launch{1, ONE_BLOCK}, compute_factor<U>, args, factor);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (args.classes / WIDE<T> <= 4 * WARP)
                launch_rows<T, 4>(context, call, plan, args, factor);
            else
                launch_rows<T, 8>(context, call, plan, args, factor);
        });
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        BasicArgs args = plan.args;
        args.losses = at_offset<double>(workspace, 0);
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(args, p, call))
                                  : launch_with(context, call, plan, args);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_warp_per_row, BasicWarpPerRow)
