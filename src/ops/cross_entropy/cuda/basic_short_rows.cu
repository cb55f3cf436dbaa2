/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Basic calls (basic.cuh) with any number of rows of up to 128 packs: several rows per warp.
 *
 * A warp takes 32 rows. LANES lanes share a row, so that 32 / LANES rows are computed at a time, in
 * LANES steps. Each lane owns one of the 32 rows: it loads the label and finishes the row. The
 * logarithm in double and the other arithmetic of a row then run on 32 lanes at once; with a warp
 * per row they ran on one lane, and took longer than reading the row.
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"

namespace {

constexpr int THREADS = 128, LOADS = 8; /* per block; packs that a lane loads before it uses the first */

/* PACKS: packs per lane. A lane loads BATCH rows before it uses the first. Packs past the end of a
 * row, and rows past the end, are full of -inf: all lanes take part in every shuffle. */
template <typename T, int LANES, int PACKS, bool FORWARD, bool GRADIENT>
__global__ __launch_bounds__(THREADS) void rows_per_warp(const __grid_constant__ BasicArgs u, const double *factor_at) {
    constexpr int N = WIDE<T>, GROUPS = WARP / LANES, BATCH = LOADS / PACKS < LANES ? LOADS / PACKS : LANES;
    const int lane = threadIdx.x % WARP, member = lane % LANES, group = lane / LANES, packs = u.classes / N;
    const int first = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * WARP;

    /* The row that this lane owns. Lanes past the end load the last row's label and lse, but not
     * its logit, which another block may be overwriting. */
    const int own = first + member * GROUPS + group;
    const bool valid = own < u.rows;
    const int loaded = valid ? own : u.rows - 1, label = u.class_of(u.load_label(loaded));
    const float given = FORWARD || !u.lse ? INFINITY : load_now(u.lse + loaded);
    const float z_label = valid && label >= 0 ? to_float(u.row_of_z<T>(own)[label]) : 0.0f;
    RowStats own_stats = no_elements();
    if (GRADIENT)
        wait_for_previous_kernel();
    const double factor = GRADIENT ? __ldcg(factor_at) : 0.0;

#pragma unroll 1
    for (int step = 0; step < LANES; step += BATCH) {
        Pack<T, N> pack[BATCH][PACKS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int row = first + (step + b) * GROUPS + group;
            load_packs(pack[b], u.row_of_z<T>(row), row < u.rows ? packs : 0, member, LANES);
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
            if (GRADIENT) {
                const BasicGradient g = row_label < 0 ? u.gradient_of_skipped(row_label)
                                        : from_lse    ? u.gradient_from_lse(row_label, factor, row_given)
                                                      : u.gradient_from_stats(row_label, factor, s);
                /* dz may overwrite z. This shuffle needs the z_label of every lane: all lanes have
                 * read theirs before the first store. */
                const float row_z_label = __shfl_sync(~0u, z_label, owner);
                const bool has_label = row < u.rows && g.label >= 0 && g.label / N % LANES == member;
                write_packs(u.row_of_dz<T>(row), pack[b], member, LANES, row < u.rows ? packs : 0, g, row_z_label,
                            has_label);
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
        sum = make_double2(u.finish_row(own, label, own_stats, z_label), label != IGNORED);
    if (u.loss)
        add_up_threads<THREADS>(u, sum);
}

struct BasicShortRows {
    typedef cross_entropy_call Call;
    struct Plan {
        BasicArgs args;
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.row_packs() > 128)
            return "rows are longer than 2 KB";
        if (p.rows > INT32_MAX - THREADS)
            return "it counts rows in 31 bits";
        return why_not_basic_options(p, call);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        write_each_loss(&plan->args, call);
        plan->forward = p.forward;
        plan->blocks = ceil_div<int64_t>(p.rows, THREADS);
        return plan->workspace.place(p.forward && plan->args.loss ? plan->blocks : 0, p.gradient);
    }

    template <typename T, int LANES, int PACKS>
    static void launch_rows(LaunchSequence &sequence, const Plan &plan, const BasicArgs &args, const double *factor) {
        const Launch how = {plan.blocks, THREADS};
        if (!args.dz)
            sequence.run(how, rows_per_warp<T, LANES, PACKS, true, false>, args, factor);
        else if (plan.forward)
            sequence.run(how, rows_per_warp<T, LANES, PACKS, true, true>, args, factor);
        else
            sequence.run(how, rows_per_warp<T, LANES, PACKS, false, true>, args, factor);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        BasicArgs args = plan.args;
        const double *const factor = plan.workspace.start(sequence, args.dz, &args, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const int packs = args.classes / WIDE<T>;
            packs <= 4    ? launch_rows<T, 4, 1>(sequence, plan, args, factor)
            : packs <= 8  ? launch_rows<T, 8, 1>(sequence, plan, args, factor)
            : packs <= 16 ? launch_rows<T, 8, 2>(sequence, plan, args, factor)
            : packs <= 32 ? launch_rows<T, 16, 2>(sequence, plan, args, factor)
            : packs <= 64 ? launch_rows<T, 16, 4>(sequence, plan, args, factor)
                          : launch_rows<T, 32, 4>(sequence, plan, args, factor);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_short_rows, BasicShortRows)
