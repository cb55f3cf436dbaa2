/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the variants for calls with any options share. Kernels that touch every column know nothing
 * about losses, weights and means: kernels with a thread per row compute those, in double.
 */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_GENERAL_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_GENERAL_CUH

#include "ops/cross_entropy/cuda/problem.cuh"

#include <type_traits>

/* Kernel arguments. */
struct Args {
    Loss loss;
    Rows z, dz;              /* logits and their gradient */
    int64_t z_step, dz_step; /* between columns; 1 unless the variant serves strided calls */
    bool gradient;           /* dz is wanted */
    bool invariant;          /* the call is batch invariant */
    Totals *block_totals;    /* of each block, for add_up */
    unsigned *counter;       /* 0 between kernels */
};

/* What kernels that write the gradient of a row need besides its logits. */
struct alignas(16) RowCoefficients {
    RowGradient gradient;
    int64_t label; /* the label's column */
};

/* kernels/prepare.cu: the first kernel of a call that needs it adds up the weights of all classes, and the labels if there
 * are many, into prepared[0]. */
constexpr int PREPARE_BLOCKS = 256; /* at most; each has an entry after prepared[0] */
void launch_prepare(const rafter_context *context, const Args &args, Prepared *prepared);

namespace {

/* Waits for the inputs in a kernel that is the first of its call, unless `prepare` ran before it. */
DEVICE void wait_unless_prepared(const Args &c) {
    if (!c.loss.prepared)
        wait_for_inputs();
}

/* Packs that a thread loads before it uses the first one. */
template <int OPTIONS> constexpr int AHEAD = OPTIONS == FULL ? IN_FLIGHT / 2 : IN_FLIGHT;

/* Options for kernels of backward: gradients with label smoothing need no kernels of their own. */
template <int OPTIONS> constexpr int IN_BACKWARD = OPTIONS == SMOOTH ? PLAIN : OPTIONS;

/* ---- statistics of columns ------------------------------------------------------------------- */

/* Adds packs that begin at columns `column`, column + step, ... Only the first `valid` of them are
 * part of the row; the others are full of -inf. */
template <int OPTIONS, typename T, int N, int COUNT>
DEVICE void add(LossStats<OPTIONS> &g, const Pack<T, N> (&packs)[COUNT], int valid, int64_t column, int64_t step,
                const Loss &loss) {
    if constexpr (OPTIONS == PLAIN) {
        add_packs(g.s, packs, loss.scale);
    } else if constexpr (OPTIONS == SMOOTH) {
        add_packs(g.s, packs, loss.scale, &g.logit_sum, valid);
    } else if constexpr (OPTIONS == CAPPED) {
        add_capped(g, packs, valid, loss);
    } else if (valid > 0) {
        add_full(g, packs, valid, column, step, loss);
    }
}

template <int OPTIONS, typename T> DEVICE void add_one(LossStats<OPTIONS> &g, T z, int64_t column, const Loss &loss) {
    const Pack<T, 1> pack[1] = {{{z}}};
    add(g, pack, 1, column, 1, loss);
}

/* Packs first, first + threads, ... of a row; packs past its end are full of -inf. */
template <typename T, int COUNT> struct PackGroup {
    Pack<T, WIDE<T>> packs[COUNT];

    DEVICE void load(const AlignedSpan<const T> &row, int64_t first, int threads) {
        constexpr int N = WIDE<T>;
        const T *const p = row.body + first * N;
        if (first + (COUNT - 1) * threads < row.packs)
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                packs[k] = load_once<T, N>(p + int64_t(k) * threads * N);
        else
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                packs[k] = load_once_if<T, N>(first + k * threads < row.packs, p + int64_t(k) * threads * N, -INFINITY);
    }
    /* `origin`: the column at which the span begins. */
    template <int OPTIONS>
    DEVICE void add_to(LossStats<OPTIONS> &g, const AlignedSpan<const T> &row, int64_t origin, int64_t first,
                       int threads, const Loss &loss) const {
        int valid = 0;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            valid += first + k * threads < row.packs;
        add(g, packs, valid, origin + row.head + first * WIDE<T>, int64_t(threads) * WIDE<T>, loss);
    }
};

template <int OPTIONS, typename T>
DEVICE void add_edges(LossStats<OPTIONS> &g, const AlignedSpan<const T> &row, int64_t origin, int thread, int threads,
                      const Loss &loss) {
#pragma unroll 1
    for (int e = thread; e < row.edges; e += threads)
        add_one(g, row.body[row.edge(e)], origin + row.head + row.edge(e), loss);
}

/* The statistics of one thread's share of a span, which begins at column `origin`. The thread's
 * first group has been loaded. */
template <int OPTIONS, typename T>
DEVICE LossStats<OPTIONS> span_stats(const AlignedSpan<const T> &row, int64_t origin,
                                     PackGroup<T, AHEAD<OPTIONS>> group, int thread, int threads, const Loss &loss) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    for (int64_t i = thread; i < row.packs;) {
        const int64_t after = i + AHEAD<OPTIONS> * threads;
        if constexpr (OPTIONS == FULL) { /* long arithmetic: the next packs are in flight meanwhile */
            PackGroup<T, AHEAD<OPTIONS>> next = group;
            if (after < row.packs)
                next.load(row, after, threads);
            group.add_to(g, row, origin, i, threads, loss);
            group = next;
        } else {
            group.add_to(g, row, origin, i, threads, loss);
            if (after < row.packs)
                group.load(row, after, threads);
        }
        i = after;
    }
    add_edges(g, row, origin, thread, threads, loss);
    return g;
}

/* ---- gradient of columns --------------------------------------------------------------------- */

template <int OPTIONS, typename T> struct RowWriter {
    const ColumnGradient<OPTIONS, T> columns;
    const RowGradient &row;
    const int64_t label;
    const Loss &loss;

    DEVICE RowWriter(const RowGradient &gradient, int64_t class_of_row, const Loss &call)
        : columns(gradient, call), row(gradient), label(class_of_row), loss(call) {
    }
    /* The gradient of a pack that begins at `column`. */
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &z, int64_t column) const {
        if (row.constant)
            return all_of<T, N>(row.p);
        if constexpr (OPTIONS >= FULL) {
            Pack<T, N> all = columns.of(z, column, loss);
            if (static_cast<uint64_t>(label - column) < N)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (column + j == label)
                        all.v[j] = from_float<T>(row.at_label);
            return all;
        }
        float d[N];
        unpack(z, d);
#pragma unroll
        for (int j = 0; j < N; j++)
            d[j] = columns.of(d[j], column + j, loss);
        if (static_cast<uint64_t>(label - column) < N)
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = column + j == label ? row.at_label : d[j];
        return packed<T>(d);
    }
    DEVICE T of_one(T z, int64_t column) const {
        return of(Pack<T, 1>{{z}}, column).v[0];
    }
    DEVICE void write_edges(T *dz, const AlignedSpan<const T> &span, int thread, int threads) const {
#pragma unroll 1
        for (int e = thread; e < span.edges; e += threads) {
            const int64_t at = span.head + span.edge(e);
            dz[at] = of_one(span.body[span.edge(e)], at);
        }
    }
};

/* ---- sums over rows -------------------------------------------------------------------------- */

/* The factor that the gradients of all rows share. Called by all threads, after
 * wait_for_previous_kernel. */
DEVICE double common_factor(const Args &c) {
    Totals totals = {};
    if (c.loss.needs_totals())
        totals = c.loss.prepared ? c.loss.prepared->totals : count_in_block(c.loss);
    return common_upstream(c.loss, totals);
}

/* Whether the loss of all rows is wanted. */
DEVICE bool adds_up(const Args &c) {
    return c.loss.loss.data && c.loss.reduction != RAFTER_NONE;
}

/* Adds up the totals of `shares` blocks; thread 0 of this one has its totals in `all`, which are number
 * `own`. The last block to arrive writes the loss. Called by all threads. */
DEVICE void add_up_shares(const Args &c, Totals all, unsigned own, unsigned shares) {
    if (shares > 1) {
        if (threadIdx.x == 0)
            c.block_totals[own] = all;
        if (!block_arrives_last(c.counter, shares))
            return;
        all = {};
        for (unsigned i = threadIdx.x; i < shares; i += blockDim.x) {
            all.loss += __ldcg(&c.block_totals[i].loss);
            all.weight += __ldcg(&c.block_totals[i].weight);
            all.counted += __ldcg(&c.block_totals[i].counted);
        }
        all = block_sum(all);
    }
    if (threadIdx.x == 0)
        write_loss(c.loss, all);
}

/* The same, if all blocks of the kernel have totals. */
DEVICE void add_up_blocks(const Args &c, const Totals &all) {
    add_up_shares(c, all, blockIdx.x, gridDim.x);
}

/* The same from the totals of each thread, if the loss is wanted. Called by all threads. */
DEVICE void add_up(const Args &c, const Totals &mine) {
    if (adds_up(c))
        add_up_blocks(c, block_sum(mine));
}

/* ---- host ------------------------------------------------------------------------------------ */

/* Calls f(std::integral_constant<int, OPTIONS>()). */
template <typename F> auto for_options(Options options, F f) {
    switch (options) {
    case PLAIN: return f(std::integral_constant<int, PLAIN>());
    case SMOOTH: return f(std::integral_constant<int, SMOOTH>());
    case CAPPED: return f(std::integral_constant<int, CAPPED>());
    default: return f(std::integral_constant<int, FULL>());
    }
}

/* The same for kernels that do not know CAPPED. */
template <typename F> auto for_options_but_capped(Options options, F f) {
    switch (options) {
    case PLAIN: return f(std::integral_constant<int, PLAIN>());
    case SMOOTH: return f(std::integral_constant<int, SMOOTH>());
    default: return f(std::integral_constant<int, FULL>());
    }
}

/* The part of a plan that all general variants share. */
struct GeneralPlan {
    Args args; /* without the workspace */
    Options options;
    bool prepares, reduces;        /* whether `prepare` runs; whether add_up writes the loss */
    size_t prepared, block_totals; /* offsets in the workspace */

    /* summing_blocks: blocks of the kernel that calls add_up. */
    void fill(const rafter_cuda_state &device, const Problem &p, const cross_entropy_call &call, int64_t summing_blocks,
              WorkspaceLayout *layout) {
        args = {};
        Loss &loss = args.loss;
        loss = loss_of(device, &call.loss);
        args.gradient = p.gradient;
        args.invariant = call.common.batch_invariant;
        args.z = rows_of(call.logits, call.logits.ndim - 1);
        args.z_step = p.step(call.logits);
        if (p.gradient) {
            args.dz = rows_of(call.dlogits, call.dlogits.ndim - 1);
            args.dz_step = p.step(call.dlogits);
        }
        args.counter = device.counters;
        const bool weights = loss.smooths && loss.class_weight;
        const bool caps = loss.softcap != 0.0f, more = weights || loss.entropy.data || loss.argmax.data;
        options = more ? FULL : caps ? CAPPED : loss.smooths && loss.forward ? SMOOTH : PLAIN;
        prepares = weights || (p.gradient && loss.needs_totals() && p.rows > SCANNED_ROWS);
        reduces = loss.loss.data && loss.reduction != RAFTER_NONE;
        block_totals = reduces ? layout->add(summing_blocks * int64_t(sizeof(Totals))) : 0;
        prepared = prepares ? layout->add((1 + PREPARE_BLOCKS) * int64_t(sizeof(Prepared))) : 0;
    }

    /* Bytes of one LossStats, also in kernels that do not know CAPPED. */
    int64_t stats_bytes() const {
        return for_options_but_capped(options, [](auto o) { return int64_t(sizeof(LossStats<decltype(o)::value>)); });
    }

    /* Runs `prepare` if it is needed, and returns the arguments of the kernels after it. */
    Args start(const rafter_context *context, char *workspace) const {
        Args complete = args;
        complete.block_totals = reduces ? at_offset<Totals>(workspace, block_totals) : nullptr;
        if (prepares) {
            Prepared *const sums = at_offset<Prepared>(workspace, prepared);
            launch_prepare(context, complete, sums);
            complete.loss.prepared = sums;
        }
        return complete;
    }
};

} // namespace

#endif
