/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batch-invariant calls (cuda/indexed_rows.cuh) in any layout and with any options, whose rows are not short; columns
 * only if a gradient is wanted. A warp or a block takes a row, by the length of rows alone. Also other calls forward, if
 * they have many rows of medium length: see invariant_is_faster.
 *
 * If a gradient is wanted, the block keeps its row in shared memory; or, if the row is too long or strided, reads it a
 * second time, usually from L1 or L2. A kernel before computes the terms of the gradient that need no statistics. In
 * forward, a kernel after writes the outputs.
 */
#include "cuda/slot_sums.cuh"
#include "ops/cross_entropy/cuda/finish.cuh"

namespace {

/* The statistics of one thread's share of a row: every threads-th pack, and columns of the tail. */
template <typename T, bool ALIGNED>
DEVICE LossStats<FULL> full_stats(const IndexedRow<T, ALIGNED> &row, int thread, int threads, const Loss &loss) {
    constexpr int N = WIDE<T>, COUNT = AHEAD<FULL>;
    LossStats<FULL> g = no_columns<FULL>();
    for (int64_t i = thread; i < row.packs(); i += COUNT * threads) {
        Pack<T, N> group[COUNT];
        row.load(group, i, threads, -INFINITY);
        int valid = 0;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            valid += i + k * threads < row.packs();
        add(g, group, valid, i * N, int64_t(threads) * N, loss);
    }
    for (int64_t e = row.packs() * N + thread; e < row.n; e += threads)
        add_one(g, row.first[e * row.step], e, loss);
    return g;
}

/* The sums of slot_sums.cuh as LossStats. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> stats_from(const RowSums &sums) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    g.s = sums.stats;
    if constexpr (OPTIONS == SMOOTH)
        g.logit_sum = sums.total;
    return g;
}

/* The statistics of a row; every thread of the team gets them. `wanted`: see slot_stats. */
template <int OPTIONS, typename T, bool ALIGNED, typename Wanted>
DEVICE LossStats<OPTIONS> team_stats(const RowTeam &team, const IndexedRow<T, ALIGNED> &row, const Loss &loss,
                                     Wanted wanted) {
    if constexpr (OPTIONS == FULL) {
        if (!wanted())
            return no_columns<FULL>();
        const LossStats<FULL> g = full_stats(row, team.thread(), team.threads, loss);
        return team.is_warp() ? merge_warp(g, loss.scale) : merge_block_for_all(g, loss.scale);
    } else {
        return stats_from<OPTIONS>(slot_stats<OPTIONS == SMOOTH, IN_FLIGHT>(team, row, loss.scale, wanted));
    }
}

/* Writes the gradient of a row. Every element is read and written by the same thread: dz may be z. */
template <int OPTIONS, typename T, bool ALIGNED>
DEVICE void write_row_gradient(const RowWriter<OPTIONS, T> &writer, const IndexedRow<T, ALIGNED> &z, T *dz,
                               int64_t dz_step, int thread, int threads) {
    constexpr int N = WIDE<T>, COUNT = IN_FLIGHT;
    if (z.step != 1 || dz_step != 1 || !aligned_alike<const T>(z.first, dz)) {
        for (int64_t v = thread; v < z.n; v += threads)
            dz[v * dz_step] = writer.of_one(z.first[v * z.step], v);
        return;
    }
    const AlignedSpan<const T> span(z.first, z.n);
    for (int64_t i = thread; i < span.packs; i += COUNT * threads) {
        Pack<T, N> group[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (i + k * threads < span.packs)
                group[k] = load_once<T, N>(span.body + (i + k * threads) * N);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (i + k * threads < span.packs) {
                const int64_t at = span.head + (i + k * threads) * N;
                store_once<T, N>(dz + at, writer.of(group[k], at));
            }
    }
    writer.write_edges(dz, span, thread, threads);
}

/* Blocks per multiprocessor. */
template <int OPTIONS> constexpr int STATISTICS_PER_SM = OPTIONS == FULL ? 3 : 4;

/* Forward without a gradient: the statistics alone. `finish` writes the outputs: here they would take more
 * registers, so that fewer rows were in flight, and every block would end with one thread's work. */
template <typename T, int OPTIONS, bool ALIGNED>
__global__ __launch_bounds__(SLOT_THREADS,
                             STATISTICS_PER_SM<OPTIONS>) void indexed_statistics(const __grid_constant__ Args c,
                                                                                 const RowTeam team,
                                                                                 LossStats<OPTIONS> *stats) {
    wait_unless_prepared(c);
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = team.row();
    if (row >= loss.rows)
        return;
    const int64_t label = loss.load_label(row); /* issued before the row's loads, or it would arrive after them */
    const IndexedRow<T, ALIGNED> z = {c.z.at<const T>(row), loss.classes, c.z_step};
    bool wanted = false;
    const LossStats<OPTIONS> g = team_stats<OPTIONS>(team, z, loss, [&] {
        wait_for_previous_kernel();
        wanted = loss.class_of(label) >= 0;
        return wanted;
    });
    if (wanted && team.thread() == 0)
        stats[row] = g;
}

/* The gradient, and in forward the statistics. */
template <typename T, int OPTIONS, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void indexed_gradients(const __grid_constant__ Args c,
                                                                        const RowTeam team, const KnownTerms *row_terms,
                                                                        LossStats<OPTIONS> *stats) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = team.row();
    const int thread = team.thread();
    const int64_t loaded = row < loss.rows ? loss.load_label(row) : loss.ignore_index;
    wait_for_previous_kernel();
    if (row >= loss.rows)
        return;
    const int64_t label = loss.class_of(loaded);
    const IndexedRow<T, ALIGNED> z = {c.z.at<const T>(row), loss.classes, c.z_step};
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0) {
        const LossStats<OPTIONS> g = team_stats<OPTIONS>(team, z, loss, [] { return true; });
        gradient_in_float(loss, row_terms[row], g, &gradient);
        if (thread == 0 && loss.forward)
            stats[row] = g;
    }
    write_row_gradient(RowWriter<OPTIONS, T>(gradient, label, loss), z, c.dz.at<T>(row), c.dz_step, thread,
                       team.threads);
}

/* A row in shared memory, for staged_gradients: granule g is the 16 bytes that hold elements [g N - shift,
 * g N - shift + N). Elements of granules that are not the row's are -inf. */
template <typename T> struct StagedRow {
    static constexpr int N = WIDE<T>;
    const T *const z;
    const int n, shift, all, whole; /* elements; offset of the first; granules; those that end in the row */
    Pack<T, N> *const granules;

    DEVICE StagedRow(const T *row, int classes, void *memory)
        : z(row), n(classes), shift(offset_in_pack(row)), all((n + shift + N - 1) / N), whole((n + shift) / N),
          granules(static_cast<Pack<T, N> *>(memory)) {
    }
    DEVICE int element(int g, int j) const {
        return g * N - shift + j;
    }
    DEVICE bool present(int g, int j) const {
        return static_cast<unsigned>(element(g, j)) < static_cast<unsigned>(n);
    }
    DEVICE bool is_whole(int g) const {
        return g < whole && (g > 0 || shift == 0);
    }
    DEVICE T *elements() const {
        return granules->v + shift;
    }
    /* Starts to copy granules first, first + threads, ..., those that are whole, in chunks of COUNT per thread. A
     * chunk is a group of copies. */
    template <int COUNT> DEVICE void fetch(int first, int threads, int chunks) const {
        for (int g = first, chunk = 0; chunk < chunks; chunk++, g += COUNT * threads) {
            const bool all_whole = g > 0 && g + (COUNT - 1) * threads < whole; /* spares most tests */
            if (all_whole) {
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    copy_async<T, N>(granules + g + k * threads, z + element(g + k * threads, 0));
            } else {
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    if (is_whole(g + k * threads))
                        copy_async<T, N>(granules + g + k * threads, z + element(g + k * threads, 0));
            }
            copy_commit();
        }
    }
    /* Loads a granule that is not whole into registers. These loads are issued before the copies of other
     * granules, or they would arrive after them. */
    DEVICE Pack<T, N> load_part(int g) const {
        Pack<T, N> part;
#pragma unroll
        for (int j = 0; j < N; j++)
            part.v[j] = present(g, j) ? z[element(g, j)] : from_float<T>(-INFINITY);
        return part;
    }
};

/* Writes the gradient of a row in shared memory. Called by all threads of the block. */
template <int OPTIONS, typename T>
DEVICE void write_staged(const RowWriter<OPTIONS, T> &writer, const StagedRow<T> &row, T *dz) {
    constexpr int N = WIDE<T>, COUNT = 4;
    const int thread = threadIdx.x, threads = blockDim.x, begin = row.shift > 0;
    int g = begin + thread;
    if (writer.row.constant) {
        for (; g < row.whole; g += threads)
            store_once<T, N>(dz + row.element(g, 0), all_of<T, N>(writer.row.p));
    } else {
        const auto write = [&](int at) {
            store_once<T, N>(dz + row.element(at, 0),
                             writer.columns.of(row.granules[at], row.element(at, 0), writer.loss));
        };
        for (; g + (COUNT - 1) * threads < row.whole; g += COUNT * threads)
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                write(g + k * threads);
        for (; g < row.whole; g += threads)
            write(g);
        /* The label's column is written once more, by the thread that has written its granule. */
        const int of_label = static_cast<int>((writer.label + row.shift) / N);
        if (of_label >= begin && of_label < row.whole && ((of_label - begin) & (threads - 1)) == thread)
            dz[writer.label] = from_float<T>(writer.row.at_label);
    }
    const int head = begin ? N - row.shift : 0, tail = row.n - row.element(row.whole, 0);
    for (int e = thread; e < head + tail; e += threads) {
        const int at = e < head ? e : row.n - tail + e - head;
        dz[at] = writer.of_one(row.elements()[at], at);
    }
}

/* The statistics of a row that is being copied: `chunks` chunks, and one more group of copies. FULL: threads
 * take packs of the row, each of which lies in two granules; so chunks begin at the second granule. `pivot`: see
 * SlotSums; not for FULL. */
template <int OPTIONS, typename T, int COUNT>
DEVICE LossStats<OPTIONS> staged_stats(const RowTeam &team, const StagedRow<T> &row, int chunks, float pivot,
                                       const Loss &loss) {
    constexpr int N = WIDE<T>;
    const int thread = threadIdx.x, threads = blockDim.x;
    if constexpr (OPTIONS == FULL) {
        const int packs = row.n / N;
        const uint4 *const granules = reinterpret_cast<const uint4 *>(row.granules);
        LossStats<FULL> g = no_columns<FULL>();
        for (int i = thread, chunk = 0; chunk < chunks; chunk++, i += COUNT * threads) {
            copy_wait_all_but(chunks - chunk);
            __syncthreads();
            Pack<T, N> group[COUNT];
            int valid = 0;
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                const int at = i + k * threads;
                group[k] = all_of<T, N>(-INFINITY);
                valid += at < packs;
                if (at < packs)
                    reinterpret_cast<uint4 &>(group[k]) =
                        shifted(granules[at], granules[at + (row.shift > 0)], row.shift * int(sizeof(T)));
            }
            if (valid > 0)
                add(g, group, valid, int64_t(i) * N, int64_t(threads) * N, loss);
        }
        for (int e = packs * N + thread; e < row.n; e += threads)
            add_one(g, row.elements()[e], e, loss);
        copy_wait<0>();
        return merge_block_for_all(g, loss.scale);
    } else {
        SlotSums<T, OPTIONS == SMOOTH> slots(pivot, loss.scale);
        const auto add_all = [&](auto precise) {
            for (int g = thread, chunk = 0; chunk < chunks; chunk++, g += COUNT * threads) {
                copy_wait_all_but(chunks - chunk);
                Pack<T, N> group[COUNT];
                if (g + (COUNT - 1) * threads < row.all) {
#pragma unroll
                    for (int k = 0; k < COUNT; k++)
                        group[k] = row.granules[g + k * threads];
                } else {
#pragma unroll
                    for (int k = 0; k < COUNT; k++)
                        group[k] = g + k * threads < row.all ? row.granules[g + k * threads] : all_of<T, N>(-INFINITY);
                }
                slots.template add<decltype(precise)::value>(
                    group, [&](int k, int j) { return row.present(g + k * threads, j); });
            }
        };
        add_all(std::false_type());
        copy_wait<0>();
        return stats_from<OPTIONS>(merge_slots(team, slots, row.shift, [&] { add_all(std::true_type()); }));
    }
}

/* The same as indexed_gradients, with the same bits, for adjacent elements and dz aligned like z: the row is
 * read once, into shared memory. `alone`: the block has its multiprocessor to itself, so that no other one
 * works while it waits for the label. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(INDEXED_THREADS,
                             2) void staged_gradients(const __grid_constant__ Args c, const RowTeam team, bool alone,
                                                      const KnownTerms *row_terms, LossStats<OPTIONS> *stats) {
    DYNAMIC_SHARED_ALIGNED(128, uint4, memory);
    __shared__ KnownTerms known;
    constexpr int N = WIDE<T>, COUNT = AHEAD<OPTIONS>, FIRST = OPTIONS == FULL;
    const Loss &loss = c.loss;
    const int64_t at_row = blockIdx.x;
    const int thread = threadIdx.x, threads = blockDim.x;
    const StagedRow<T> row(c.z.at<const T>(at_row), static_cast<int>(loss.classes), memory);
    /* What is needed first is loaded before the row, or it would arrive after the row. */
    const int64_t loaded = loss.load_label(at_row);
    const int last = row.all - 1, of_last = max(last - FIRST, 0) & (threads - 1);
    Pack<T, N> head, tail;
    if (thread == 0 && !row.is_whole(0))
        head = row.load_part(0);
    if (thread == of_last && !row.is_whole(last))
        tail = row.load_part(last);
    const Pivot<T> first_elements(IndexedRow<T, false>{row.z, row.n, 1});
    static_assert((COUNT & (COUNT - 1)) == 0, "chunks are shifted out");
    const int chunk_log2 = 31 - __clz(COUNT * threads), /* divisions would take as long as a pack of a row */
        chunks = max((row.all - FIRST + COUNT * threads - 1) >> chunk_log2, 1), early = alone ? chunks : 1;
    if (FIRST > 0 && thread == 0 && row.is_whole(0))
        copy_async<T, N>(row.granules, row.z);
    row.template fetch<COUNT>(FIRST + thread, threads, early);
    start_next_kernel();
    const int64_t label = loss.class_of(loaded);
    if (label >= 0)
        row.template fetch<COUNT>(FIRST + thread + early * COUNT * threads, threads, chunks - early);
    if (thread == 0 && !row.is_whole(0))
        row.granules[0] = head;
    if (thread == of_last && !row.is_whole(last))
        row.granules[last] = tail;
    wait_for_previous_kernel();
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0) {
        if (thread < static_cast<int>(sizeof known / 16))
            copy_async<uint32_t, 4>(reinterpret_cast<Pack<uint32_t, 4> *>(&known) + thread,
                                    reinterpret_cast<const uint32_t *>(row_terms + at_row) + 4 * thread);
        copy_commit();
        const float pivot = OPTIONS == FULL ? 0.0f : first_elements.value();
        const LossStats<OPTIONS> g = staged_stats<OPTIONS, T, COUNT>(team, row, chunks, pivot, loss);
        gradient_in_float(loss, known, g, &gradient);
        if (thread == 0 && loss.forward)
            stats[at_row] = g;
    } else {
        copy_wait<0>();
    }
    write_staged(RowWriter<OPTIONS, T>(gradient, label, loss), row, c.dz.at<T>(at_row));
}

struct Invariant {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        RowTeam team;
        bool aligned;
        int per_sm;          /* blocks of staged_gradients per multiprocessor; 0: not used */
        size_t shared;       /* of each */
        size_t stats, terms; /* offsets in the workspace; stats: forward only; terms: if a gradient is wanted */
        int64_t row_blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.lse_given)
            return "lse is given: no statistics are needed";
        if (p.order == TINY_ROWS || (p.order == CHUNKED_ROWS && p.forward) || (p.order == STRIDED_ROWS && !p.gradient))
            return "rows are short, or columns";
        if (p.forward && are_too_many(p.order, p.rows, p.classes))
            return "the kernels for such rows count fewer";
        if (p.row_packs() >= MOST_GRANULES)
            return "a row has more than 16 GiB";
        return p.rows == 0 || p.classes == 0 ? "there are no rows or no classes" : NULL;
    }

    /* Rows of up to this many bytes take fewer threads, so that a multiprocessor has more rows at a time. */
    static constexpr int64_t MEDIUM_ROW = 32 << 10;

    /* Blocks of staged_gradients that a multiprocessor holds, at most 2 of 512 threads; 0: it is not for the call.
     * `shared`: bytes of dynamic shared memory of a block. */
    static int staged_blocks(const rafter_cuda_state &device, const Problem &p, const RowTeam &team, size_t *shared) {
        constexpr int64_t OWN = 4 << 10, RESERVED = 1 << 10; /* shared memory: static, and the system's */
        *shared = static_cast<size_t>(p.row_bytes / 16 + 2) * 16;
        const int64_t most = 2 * INDEXED_THREADS / team.threads,
                      fit = (device.shared_bytes + RESERVED) / (static_cast<int64_t>(*shared) + OWN + RESERVED);
        return p.gradient && !p.strided && team.threads > WARP ? static_cast<int>(min(most, fit)) : 0;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->row_blocks = p.row_blocks();
        const int packs = p.row_bytes <= MEDIUM_ROW ? 2 * IN_FLIGHT : IN_FLIGHT; /* per thread */
        plan->team = p.gradient ? RowTeam::of(p.row_bytes, packs)
                                : RowTeam::of(p.row_bytes, IN_FLIGHT, SLOT_TEAM, SLOT_WARP_BYTES);
        plan->aligned = rows_are_aligned(call.logits);
        plan->per_sm = staged_blocks(device, p, plan->team, &plan->shared);
        plan->general.fill(device, p, call, plan->row_blocks, &layout);
        plan->stats = p.forward ? layout.add(p.rows * plan->general.stats_bytes()) : 0;
        plan->terms = p.gradient ? layout.add(p.rows * int64_t(sizeof(KnownTerms))) : 0;
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        const Launch teams = plan.team.blocks(args.loss.rows);
        KnownTerms *const terms = args.gradient ? at_offset<KnownTerms>(workspace, plan.terms) : nullptr;
        if (terms)
            launch_terms(context, args, terms);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options_but_capped(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                LossStats<OPTIONS> *const stats =
                    args.loss.forward ? at_offset<LossStats<OPTIONS>>(workspace, plan.stats) : nullptr;
                if (!terms)
                    ::launch(context, teams,
                             plan.aligned ? indexed_statistics<T, OPTIONS, true>
                                          : indexed_statistics<T, OPTIONS, false>,
                             args, plan.team, stats);
                else if (plan.per_sm > 0)
                    ::launch(context, Launch{teams.blocks, teams.threads, plan.shared}, staged_gradients<T, OPTIONS>,
                             args, plan.team, plan.per_sm == 1, terms, stats);
                else
                    ::launch(context, teams,
                             plan.aligned ? indexed_gradients<T, OPTIONS, true> : indexed_gradients<T, OPTIONS, false>,
                             args, plan.team, terms, stats);
                if (args.loss.forward)
                    launch_finish(context, args, static_cast<Options>(OPTIONS), false, {1, 0}, stats, terms, nullptr);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, invariant, Invariant)
