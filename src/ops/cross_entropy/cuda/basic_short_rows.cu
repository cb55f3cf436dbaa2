/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Basic calls (basic.cuh) with any number of rows of up to 128 packs, also with label smoothing or class weights:
 * several rows per warp. Gradients of shorter rows with more options take the kernel in option_rows.cuh.
 *
 * A warp takes 32 rows, or a part of them. LANES lanes share a row, so that 32 / LANES rows are computed at a
 * time, in LANES steps. Each lane owns one of the 32 rows: it loads the label and finishes the row. The
 * logarithm in double and the other arithmetic of a row then run on 32 lanes at once; with a warp
 * per row they ran on one lane, and took longer than reading the row.
 */
#include "cuda/rows_per_warp.cuh"
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/option_rows.cuh"

namespace {

constexpr int THREADS = 128; /* per block */

/* The sum of a row's logits. Lane `member` of LANES has packs member, member + LANES, ... of `packs`. */
template <int LANES, typename T, int N, int PACKS>
DEVICE float sum_of_row(const Pack<T, N> (&pack)[PACKS], int member, int packs) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (member + k * LANES < packs) {
            float x[N];
            unpack(pack[k], x);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum += x[j];
        }
    return sum_of_lanes<LANES>(sum);
}

/* PACKS: packs per lane. steps: a multiple of BATCH, up to LANES; of no effect on the results. Packs past the end of
 * a row, and rows past the end, are full of -inf: all lanes take part in every shuffle. U: BasicArgs or
 * SpacedArgs. */
template <typename T, int LANES, int PACKS, bool FORWARD, bool GRADIENT, class U>
__global__ __launch_bounds__(THREADS) void rows_per_warp(const __grid_constant__ U u, int steps,
                                                         const double *factor_at) {
    if (!GRADIENT)
        wait_for_inputs();
    constexpr int N = WIDE<T>, GROUPS = WARP / LANES, BATCH = ::BATCH<LANES, PACKS>;
    const int lane = threadIdx.x % WARP, member = lane % LANES, group = lane / LANES, packs = u.classes / N;
    const int first = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * (GROUPS * steps);

    /* The row that this lane owns. Lanes without one load the last row's label and lse, but not
     * its logit, which another block may be overwriting. */
    const int own = first + member * GROUPS + group;
    const bool valid = member < steps && own < u.rows;
    const int loaded = valid ? own : u.rows - 1, label = u.class_of(u.load_label(u.label_at(loaded)));
    const float given = FORWARD || !u.lse ? INFINITY : load_now(u.lse + u.lse_at(loaded));
    const float z_label = valid && label >= 0 ? to_float(u.template row_of_z<T>(own)[label]) : 0.0f;
    RowStats own_stats = no_elements();
    float own_total = 0.0f; /* of the row's logits, if there is label smoothing */
    const float weight = GRADIENT && u.weighs ? u.class_weight_of(label) : 1.0f;
    if (GRADIENT)
        wait_for_previous_kernel();
    const double factor = GRADIENT ? __ldcg(factor_at) : 0.0;

#pragma unroll 1
    for (int step = 0; step < steps; step += BATCH) {
        Pack<T, N> pack[BATCH][PACKS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int row = first + (step + b) * GROUPS + group;
            load_packs(pack[b], u.template row_of_z<T>(min(row, u.rows - 1)), row < u.rows ? packs : 0, member, LANES);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int row = first + (step + b) * GROUPS + group, owner = group * LANES + step + b;
            const int row_label = GRADIENT ? __shfl_sync(~0u, label, owner) : 0;
            const float row_given = FORWARD ? INFINITY : __shfl_sync(~0u, given, owner);
            const bool from_lse = !FORWARD && lse_is_accurate<T>(row_given);
            RowStats s = no_elements();
            if (FORWARD || __any_sync(~0u, !from_lse)) {
                add_packs(s, pack[b], 1.0f);
                s = merge_lanes<LANES>(s, 1.0f);
            }
            if (member == step + b)
                own_stats = s;
            if (FORWARD && u.smooths) {
                const float total = sum_of_row<LANES>(pack[b], member, row < u.rows ? packs : 0);
                own_total = member == step + b ? total : own_total;
            }
            if (GRADIENT) {
                const double row_factor = u.weighs ? factor * __shfl_sync(~0u, weight, owner) : factor;
                const BasicGradient g = row_label < 0 ? u.gradient_of_skipped(row_label)
                                        : from_lse    ? u.gradient_from_lse(row_label, row_factor, row_given)
                                                      : u.gradient_from_stats(row_label, row_factor, s);
                /* dz may overwrite z. This shuffle needs the z_label of every lane: all lanes have
                 * read theirs before the first store. */
                const float row_z_label = __shfl_sync(~0u, z_label, owner);
                const bool has_label = row < u.rows && g.label >= 0 && g.label / N % LANES == member;
                write_packs(u.template row_of_dz<T>(min(row, u.rows - 1)), pack[b], member, LANES,
                            row < u.rows ? packs : 0, g, BasicSpread(u, row_factor), row_z_label, has_label);
            }
        }
    }

    if (!FORWARD) {
        if (valid)
            u.flag_bad_label(label);
        return;
    }
    double2 sum = {};
    if (valid)
        sum = make_double2(u.finish_row(own, label, own_stats, z_label, u.smooths ? &own_total : nullptr),
                           u.weight_of(label));
    if (u.loss)
        add_up_threads<THREADS>(u, sum);
}

struct BasicShortRows {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        OptionArgs args; /* BasicArgs alone, unless `options` */
        BasicWorkspace workspace;
        int steps;
        int64_t blocks;
        bool forward, options; /* options: by option_rows_per_warp */
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        /* Measured on an H200: docs/perf/cross_entropy.md. */
        constexpr int64_t MOST_CLASSES = 32, FORWARD_BYTES = 96, GRADIENT_BYTES = 32, VERY_MANY = 1 << 18;
        if (p.row_packs() > 128)
            return "rows are longer than 2 KB";
        if (!p.invariant && p.rows > SCANNED_ROWS && p.classes <= MOST_CLASSES &&
            p.row_bytes <= (p.gradient ? GRADIENT_BYTES : FORWARD_BYTES) && p.forward != p.gradient)
            return "rows are so short that a thread should take each";
        const bool narrow = rafter_dtype_bytes(call.logits.dtype) == 2;
        const int64_t streamed_packs = narrow && p.rows >= 2 * VERY_MANY ? 16 : 12;
        if (!p.invariant && p.forward && !p.gradient && p.rows >= VERY_MANY && p.row_packs() >= 8 &&
            p.row_packs() <= streamed_packs)
            return "so many rows are streamed faster";
        if (writes_parts_of_rows(p))
            return "rows are so long that parts of them should be written from lse";
        if (p.rows > INT32_MAX - THREADS)
            return "it counts rows in 31 bits";
        const char *const reason = why_not_basic_rows(p, call);
        return reason && p.gradient && !p.forward ? why_not_option_rows(p, call) : reason;
    }
    static const char *why_not_basic_rows(const Problem &p, const Call &call) {
        const bool knows = !p.invariant;
        return why_not_basic_options(p, call, {knows, knows});
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->forward = p.forward;
        plan->options = why_not_basic_rows(p, call) != NULL;
        if (plan->options) {
            plan->args = option_args(device, p, call);
            return plan->workspace.place(0, true);
        }
        BasicArgs &args = plan->args.basic;
        args = basic_args(device, p, call);
        write_each_loss(&args, call);
        for_shape(static_cast<int>(p.row_packs()), [&](auto lanes, auto packs) {
            constexpr int LANES = decltype(lanes)::value;
            plan->steps = steps_of_warp<LANES, decltype(packs)::value>(p.rows, int64_t(32) * device.multiprocessors);
            plan->blocks = ceil_div<int64_t>(p.rows, THREADS / LANES * plan->steps);
        });
        return plan->workspace.place(p.forward && args.loss ? plan->blocks : 0, p.gradient);
    }

    /* As for_lanes_and_packs, but for rows of up to 128 packs. */
    template <typename F> static void for_shape(int packs, F f) {
        packs <= 64 ? for_lanes_and_packs(packs, f)
                    : f(std::integral_constant<int, WARP>(), std::integral_constant<int, 4>());
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, U args,
                                     char *workspace) {
        const Launch how = {plan.blocks, THREADS};
        const double *const factor = plan.workspace.start(context, args.dz, &args, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_shape(args.classes / WIDE<T>, [&](auto lanes, auto packs) {
                constexpr int LANES = decltype(lanes)::value, PACKS = decltype(packs)::value;
                if (!args.dz)
                    ::launch(context, how, rows_per_warp<T, LANES, PACKS, true, false, U>, args, plan.steps, factor);
                else if (plan.forward)
                    ::launch(context, how, rows_per_warp<T, LANES, PACKS, true, true, U>, args, plan.steps, factor);
                else
                    ::launch(context, how, rows_per_warp<T, LANES, PACKS, false, true, U>, args, plan.steps, factor);
            });
        });
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        if (plan.options) {
            OptionArgs args = plan.args;
            const bool counts = args.basic.needs_totals();
            const double *const factor = plan.workspace.start(context, counts, &args.basic, workspace);
            args.factor = counts ? factor : nullptr;
            launch_option_rows(context, call.logits.dtype, args);
            return RAFTER_OK;
        }
        const BasicArgs &args = plan.args.basic;
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(args, p, call), workspace)
                                  : launch_with(context, call, plan, args, workspace);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_short_rows, BasicShortRows)
