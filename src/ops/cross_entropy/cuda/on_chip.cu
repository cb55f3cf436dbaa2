/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls with any options that need statistics and gradient, contiguous rows: a block per row, which
 * keeps the row in shared memory and registers and so reads it once. A kernel before it computes
 * the terms of the gradient that need no statistics; in forward, a kernel after it writes the
 * outputs.
 */
#include "ops/cross_entropy/cuda/finish.cuh"
#include "ops/cross_entropy/cuda/on_chip.cuh"

namespace {

template <typename T, int OPTIONS, class Shape>
__global__ __launch_bounds__(Shape::THREADS, Shape::PER_SM) void on_chip(const __grid_constant__ Args c,
                                                                         const KnownTerms *row_terms,
                                                                         LossStats<OPTIONS> *stats) {
    DYNAMIC_SHARED_ALIGNED(128, uint4, slot_memory); /* unaligned, copies cost 9 % of the call */
    __shared__ KnownTerms known;
    constexpr int N = WIDE<T>, OWN = Shape::IN_REGISTERS, COPIED = Shape::COPIED;
    /* LARGE: a pack takes hundreds of instructions, so that the loops have one copy of them. */
    constexpr bool LARGE = OPTIONS >= FULL;
    constexpr int TURNS = LARGE ? 1 : OWN;
    static_assert(OWN == COPIED, "groups of one size");
    static_assert(Largest::THREADS == TwoPerSm::THREADS * TwoPerSm::PER_SM && Largest::COPIED == TwoPerSm::COPIED);
    const Loss &loss = c.loss;
    const int thread = threadIdx.x, threads = blockDim.x;
    const int64_t row = blockIdx.x;
    const AlignedSpan<const T> span(c.z.at<const T>(row), loss.classes);
    T *const dz = c.dz.at<T>(row);
    const int64_t loaded = loss.load_label(row); /* issued before the row's loads, or it would arrive after them */
    PackGroup<T, OWN> own;
    own.load(span, thread, threads);

    /* Pack i is in slots[i]. Each slot has one thread, which waits only for its own copies. */
    const int packs = static_cast<int>(span.packs), first = OWN * threads + thread, step = COPIED * threads;
    Pack<T, N> *const slots = reinterpret_cast<Pack<T, N> *>(slot_memory) - OWN * threads;
    /* Packs before this one are in groups of which all threads have all packs: no bounds to check. */
    const int whole = packs < OWN * threads ? 0 : packs - (packs - OWN * threads) % step;
    int groups = 0;
    const auto fetch = [&] {
        int i = first;
        for (; i < whole; i += step, groups++) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                copy_async<T, N>(slots + i + k * threads, span.body + int64_t(i + k * threads) * N);
            copy_commit();
        }
        for (; i < packs; i += threads)
            copy_async<T, N>(slots + i, span.body + int64_t(i) * N);
        copy_commit();
    };
    /* Alone on its SM: does not wait for the label, as no other block would work meanwhile. The kernel for Largest also
     * serves TwoPerSm, as both have 64 registers per thread. */
    const bool alone = Shape::PER_SM == 1 && (Shape::THREADS < Largest::THREADS || threads > TwoPerSm::THREADS);
    if (alone)
        fetch();
    start_next_kernel();
    const int64_t label = loss.class_of(loaded);
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0) {
        if (!alone)
            fetch();
        wait_for_previous_kernel();
        if (thread < static_cast<int>(sizeof known / 16))
            copy_async<uint32_t, 4>(reinterpret_cast<Pack<uint32_t, 4> *>(&known) + thread,
                                    reinterpret_cast<const uint32_t *>(row_terms + row) + 4 * thread);
        copy_commit();
        LossStats<OPTIONS> g = no_columns<OPTIONS>();
        add_edges(g, span, 0, thread, threads, loss);
        /* First the packs in registers, and in the second turn those behind all whole groups. */
        PackGroup<T, COPIED> group = own;
#pragma unroll 1
        for (int i = thread; i < packs;) {
            group.add_to(g, span, 0, i, threads, loss);
            i += step;
            for (; i < whole; i += step) {
                copy_wait_all_but(1 + groups--);
#pragma unroll
                for (int k = 0; k < COPIED; k++)
                    group.packs[k] = slots[i + k * threads];
                add(g, group.packs, COPIED, span.head + int64_t(i) * N, int64_t(threads) * N, loss);
            }
            copy_wait<0>();
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                group.packs[k] = i + k * threads < packs ? slots[i + k * threads] : all_of<T, N>(-INFINITY);
        }
        copy_wait<0>();
        g = merge_block_for_all(g, loss.scale);
        gradient_in_float(loss, known, g, &gradient);
        if (thread == 0 && loss.forward)
            stats[row] = g;
    } else {
        copy_wait<0>();
        wait_for_previous_kernel();
    }
    const RowWriter<OPTIONS, T> writer(gradient, label, loss);
    T *const body = dz + span.head;
    if (gradient.constant) {
        for (int i = thread; i < packs; i += threads)
            store_once<T, N>(body + int64_t(i) * N, all_of<T, N>(gradient.p));
    } else {
        const auto write = [&](int i, const Pack<T, N> &pack) {
            store_once<T, N>(body + int64_t(i) * N, writer.columns.of(pack, span.head + int64_t(i) * N, loss));
        };
        int i = first;
        if constexpr (!LARGE)
            for (; i < whole; i += step)
#pragma unroll
                for (int k = 0; k < COPIED; k++)
                    write(i + k * threads, load_once<T, N>(slots[i + k * threads].v));
#pragma unroll 1
        for (; i < packs; i += threads)
            write(i, load_once<T, N>(slots[i].v));
        const int most = min(packs, OWN * threads);
#pragma unroll TURNS
        for (i = thread; i < most; i += threads) {
            write(i, own.packs[0]);
#pragma unroll
            for (int k = 1; k < OWN; k++) /* as registers have no index */
                own.packs[k - 1] = own.packs[k];
        }
        /* The label's column is written once more, by the thread that has written its pack. */
        const int64_t at = label - span.head;
        if (at >= 0 && at < int64_t(packs) * N && static_cast<int>(at / N) % threads == thread)
            dz[label] = from_float<T>(gradient.at_label);
    }
    writer.write_edges(dz, span, thread, threads);
}

struct OnChip {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        Fit fit;
        size_t stats, terms; /* offsets in the workspace; stats: forward only */
        int64_t row_blocks;
    };

    /* The shapes are in the order of the kernels in launch. */
    static bool find(const rafter_cuda_state &device, const Problem &p, Fit *fit) {
        return find_shape<ThreePerSm, TwoPerSm, OnePerSm, Largest>(device, p.row_packs(), false, fit);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        const Problem p(call);
        Fit fit;
        if (p.strided)
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        if (const char *reason = why_not_on_chip(device, p))
            return reason;
        return find(device, p, &fit) ? NULL : "a row does not fit into a block's registers and shared memory";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        find(device, p, &plan->fit);
        plan->general.fill(device, p, call, plan->row_blocks, &layout);
        plan->stats = p.forward ? layout.add(p.rows * plan->general.stats_bytes()) : 0;
        plan->terms = layout.add(p.rows * int64_t(sizeof(KnownTerms)));
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        const Launch blocks = {args.loss.rows, plan.fit.threads, plan.fit.shared};
        KnownTerms *const terms = at_offset<KnownTerms>(workspace, plan.terms);
        launch_terms(context, args, terms);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                LossStats<OPTIONS> *const stats =
                    args.loss.forward ? at_offset<LossStats<OPTIONS>>(workspace, plan.stats) : nullptr;
                void (*const kernels[])(Args, const KnownTerms *, LossStats<OPTIONS> *) = {
                    on_chip<T, OPTIONS, ThreePerSm>, on_chip<T, OPTIONS, Largest>, on_chip<T, OPTIONS, OnePerSm>,
                    on_chip<T, OPTIONS, Largest>};
                ::launch(context, blocks, kernels[plan.fit.shape], args, terms, stats);
                if (args.loss.forward)
                    launch_finish(context, args, plan.general.options, false, {1, 0}, stats, terms, nullptr);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, on_chip, OnChip)
