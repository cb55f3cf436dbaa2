/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Basic calls (basic.cuh) that need statistics and gradient: a block per row, which keeps the row in
 * shared memory and registers and so reads it once. A kernel before it computes the factor of all
 * gradients, a kernel after it adds up the losses.
 */
#include "ops/cross_entropy/cuda/basic_sum.cuh"
#include "ops/cross_entropy/cuda/on_chip.cuh"

namespace {

/* As on_chip in on_chip.cu, with fewer parameters and instructions. */
template <typename T, class Shape, class U>
__global__ __launch_bounds__(Shape::THREADS, Shape::PER_SM) void on_chip(const __grid_constant__ U u,
                                                                         const double *factor) {
    DYNAMIC_SHARED_ALIGNED(128, uint4, slot_memory); /* unaligned, copies cost 9 % of the call */
    constexpr int N = WIDE<T>, THREADS = Shape::THREADS, OWN = Shape::IN_REGISTERS, COPIED = Shape::COPIED,
                  STEP = COPIED * THREADS;
    const int thread = threadIdx.x, row = blockIdx.x, packs = u.classes / N;
    const T *const z = u.template row_of_z<T>(row);
    T *const dz = u.template row_of_dz<T>(row);
    const int64_t label_at = u.label_at(row);
    Pack<T, N> own[OWN];
    load_packs(own, z, packs, thread, THREADS);
    const int64_t loaded = u.load_label(label_at);

    /* Pack i is in slots[i]. Each slot has one thread, which waits only for its own copies. */
    Pack<T, N> *const slots = reinterpret_cast<Pack<T, N> *>(slot_memory) - OWN * THREADS;
    const int first = OWN * THREADS + thread;
    /* Packs before this one are in groups of which all threads have all packs: no bounds to check. */
    const int whole = packs < OWN * THREADS ? 0 : packs - (packs - OWN * THREADS) % STEP;
    int groups = 0;
    const auto fetch = [&] {
        int i = first;
        for (; i < whole; i += STEP, groups++) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                copy_async<T, N>(slots + i + k * THREADS, z + (i + k * THREADS) * N);
            copy_commit();
        }
        for (; i < packs; i += THREADS)
            copy_async<T, N>(slots + i, z + i * N);
        copy_commit();
    };
    if (Shape::PER_SM == 1) /* alone on its SM: does not wait for the label, as no other block would work meanwhile */
        fetch();
    start_next_kernel();
    const int label = u.class_of(loaded);
    if (Shape::PER_SM > 1 && label >= 0)
        fetch();
    const bool mine = label >= 0 && label / N % THREADS == thread;
    const float z_label = mine || (label >= 0 && thread == 0) ? to_float(z[label]) : 0.0f;
    RowStats s = no_elements();
    if (label >= 0) {
        add_packs(s, own, 1.0f);
        Pack<T, N> pack[COPIED];
        int i = first;
        for (; i < whole; i += STEP) {
            copy_wait_all_but(groups--);
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                pack[k] = slots[i + k * THREADS];
            add_packs(s, pack, 1.0f);
        }
        copy_wait<0>();
        if (i < packs) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                pack[k] = i + k * THREADS < packs ? slots[i + k * THREADS] : all_of<T, N>(-INFINITY);
            add_packs(s, pack, 1.0f);
        }
        s = merge_block_for_all<PLAIN>({s}, 1.0f).s;
    } else {
        copy_wait<0>();
    }
    wait_for_previous_kernel();
    const BasicGradient g = label < 0 ? u.gradient_of_skipped(label) : u.gradient_from_stats(label, __ldcg(factor), s);
    if (g.label < 0) {
        for (int i = thread; i < packs; i += THREADS)
            store_once<T, N>(dz + i * N, all_of<T, N>(g.c));
    } else {
        const ScaledExp<T> scaled_exp(g.c, g.pivot, 1.0f);
        int i = first;
        for (; i < whole; i += STEP)
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                store_once<T, N>(dz + (i + k * THREADS) * N, scaled_exp.of(load_once<T, N>(slots[i + k * THREADS].v)));
        for (; i < packs; i += THREADS)
            store_once<T, N>(dz + i * N, scaled_exp.of(load_once<T, N>(slots[i].v)));
        write_packs(dz, own, thread, THREADS, packs, g, z_label, mine);
    }
    if (thread == 0)
        u.losses[row] = u.finish_row(row, label, s, z_label);
}

struct BasicOnChip {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        BasicArgs args;
        Fit fit;
        BasicTotals totals;
    };

    /* The shapes are in the order of the kernels in launch_with. */
    static bool find(const rafter_cuda_state &device, const Problem &p, Fit *fit) {
        return find_shape<SixPerSm, ThreePerSm, TwoPerSm, OnePerSm>(device, p.row_packs(), true, fit);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        const Problem p(call);
        Fit fit;
        if (const char *reason = why_not_on_chip(device, p))
            return reason;
        if (const char *reason = why_not_basic(p, call))
            return reason;
        return find(device, p, &fit) ? NULL : "a row does not fit into a block's registers and shared memory";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        find(device, p, &plan->fit);
        WorkspaceLayout layout;
        layout.add(p.rows * int64_t(sizeof(double))); /* one loss per row */
        plan->totals.place(&layout);
        return layout.bytes;
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args,
                                     char *workspace) {
        const Launch rows = {args.rows, plan.fit.threads, plan.fit.shared};
        const double *const factor = plan.totals.find_factor(context, args, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            void (*const kernels[])(U, const double *) = {on_chip<T, SixPerSm, U>, on_chip<T, ThreePerSm, U>,
                                                          on_chip<T, TwoPerSm, U>, on_chip<T, OnePerSm, U>};
            ::launch(context, rows, kernels[plan.fit.shape], args, factor);
        });
        if (args.loss)
            plan.totals.add_up(context, args, workspace);
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        BasicArgs args = plan.args;
        args.losses = at_offset<double>(workspace, 0);
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(args, p, call), workspace)
                                  : launch_with(context, call, plan, args, workspace);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_on_chip, BasicOnChip)
