/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over rows or columns that are too long for a warp.
 *
 * A panel is the unit that is normalised together: adjacent columns, 128 bytes wide, or one row. The
 * reduced rows or columns of a panel are its lines. Its length is counted in "rows": steps down the
 * columns, or packs along the row. A panel is cut into chunks of rows, one chunk per block.
 *
 * A panel of one chunk takes one kernel, panel_in_block: the block computes the statistics and then
 * writes the results. The items of its last round are still in shared memory then; those of earlier
 * rounds are read again from memory, in reverse order.
 *
 * Panels of many chunks take two phases in one grid, panel_in_phases. Blocks of the first phase
 * read a chunk and write its statistics to the workspace; a few more blocks merge the statistics of
 * the whole panel, in the order of the chunks; blocks of the second phase read the chunk again and
 * write the results. Blocks of both phases alternate, the second `delay` blocks behind the first:
 * far enough that the merged statistics are ready, near enough that the chunk is still in L2. A
 * block waits only for blocks with lower numbers, which have started before it. So the oldest
 * blocks can always proceed, no matter how few the GPU runs at a time, and there is no deadlock.
 *
 * The tensors and the arithmetic are a Job:
 *
 *     T, N              storage type; elements per pack
 *     LINES             lines per thread, a power of two: 1, or the columns of a pack
 *     MOST_LINES        lines per panel, at most
 *     INPUTS            input tensors. An item is one pack of each
 *     ITEMS             items per thread and round, if shared memory holds that many
 *     HAS_MAX, SUMS     statistics of a line: whether there is a maximum; the number of sums, which
 *                       are relative to the maximum if there is one
 *     THREADS, PER_SM   threads per block; blocks per multiprocessor
 *     Panel             describes a panel
 *     Place             addresses of a thread's items; member `active`: whether the thread has any
 *     Table             shared memory for data about a panel
 *
 *     panel_at(index)                      the Panel
 *     locate(panel, column, row)           the Place of a thread whose first row is `row`
 *     prepare(table, panel)                fills the Table
 *     source(place, input)                 address of the place's first pack
 *     row_stride(input)                    elements between rows
 *     accumulate<FIRST>(statistics, ...)   adds items to the thread's statistics; FIRST: nothing has
 *                                          been added yet
 *     finalize(values, panel, line)        converts the statistics of a whole line to the values
 *                                          that finish() takes; called by one thread per line
 *     finish(values, items, ...)           writes the results of items
 */
#ifndef RAFTER_CUDA_PANEL_SOFTMAX_CUH
#define RAFTER_CUDA_PANEL_SOFTMAX_CUH

#include "cuda/division.cuh"
#include "cuda/launch.cuh"
#include "cuda/line_statistics.cuh"

/* How the panels of a call are cut. */
struct PanelPlan {
    int64_t rows;       /* per panel */
    int64_t chunk_rows; /* per chunk */
    int64_t blocks;     /* of the launch; past the limit of a grid the launch fails */
    unsigned panels;
    unsigned chunks;          /* per panel */
    unsigned delay;           /* blocks of the first phase that precede the first one of the second phase */
    Divisor blocks_per_panel; /* of one phase */
    int across, across_log2;  /* threads side by side in a panel, a power of two */
    int items, rounds;        /* items per thread and round; rounds per chunk */
    size_t staged_bytes;      /* shared memory for a block's items */
};

/* The items of one round of a thread: `count` of them, at most ITEMS, `step` rows apart. They are
 * in shared memory that no other thread accesses. */
template <class Job> struct Items {
    typedef Pack<typename Job::T, Job::N> P;
    P *staged;
    int64_t row;  /* of the first item, in the panel */
    int64_t down; /* from the first row of the thread's Place to the first item */
    int count, step;

    DEVICE P &in(int i, int input) const {
        return staged[(i * Job::INPUTS + input) * Job::THREADS];
    }
    /* Calls f(i) for each item; the code of AT_ONCE items is interleaved. */
    template <int AT_ONCE, class F> DEVICE void for_each(F f) const {
#pragma unroll AT_ONCE
        for (int i = 0; i < count; i++)
            f(i);
    }
};

/* A multiple of 128 bytes, so that the items after it start on a line of shared memory: a cp.async
 * that crosses lines takes longer (docs/perf/act.md). */
template <class Job> struct alignas(128) PanelShared {
    static constexpr int COUNT = StatisticsOf<Job>::COUNT;
    GroupStatistics<Job> groups;
    alignas(16) float totals[COUNT][Job::MOST_LINES];
    typename Job::Table table;
};

/* The workspace of panels of many chunks. */
struct PanelWorkspace {
    float *statistics; /* [panel][chunk][statistic][line] */
    unsigned *merged;  /* [panel][statistic][line], finalized; each word is EMPTY until it is written */
    unsigned *arrived; /* [panel]: chunks whose statistics have been written, minus 1 */
};

/* Reduces the statistics of each line over the block. One thread per line calls f(line,
 * statistics). */
template <class Job, int LINES, class F>
DEVICE void combine_block(Statistics<LINES, Job::HAS_MAX, Job::SUMS> &mine, int across_log2, PanelShared<Job> &shared,
                          F f) {
    const int lines = LINES << across_log2;
    combine_warp<Job>(mine, (int)threadIdx.x, across_log2, shared.groups);
    __syncthreads();
    if (threadIdx.x < lines) {
        auto all = combine_groups(shared.groups, across_log2, lines, (int)threadIdx.x);
        f(static_cast<int>(threadIdx.x), all);
    }
}

/* A thread's part of a chunk. */
template <class Job> struct ChunkPart {
    const Job &job;
    const PanelPlan &plan;
    typename Job::Panel panel;
    typename Job::Place place;
    int64_t row; /* the first row of `place` */
    Items<Job> items;

    DEVICE ChunkPart(const Job &job, const PanelPlan &plan, unsigned index, unsigned chunk)
        : job(job), plan(plan), panel(job.panel_at(index)) {
        DYNAMIC_SHARED(uint4, staged_memory);
        items.step = Job::THREADS >> plan.across_log2;
        items.staged = reinterpret_cast<typename Items<Job>::P *>(staged_memory) + threadIdx.x;
        row = chunk * plan.chunk_rows + (threadIdx.x >> plan.across_log2);
        place = job.locate(panel, threadIdx.x & (plan.across - 1), row);
    }
    /* Starts to load the items of a round. LAST: they are not read from memory again. */
    template <bool LAST> DEVICE void load(int round) {
        const uint64_t policy = LAST ? l2_evict_first() : l2_evict_last();
        items.down = (int64_t)round * plan.items * items.step;
        items.row = row + items.down;
        const int64_t left = place.active ? plan.rows - items.row : 0;
        items.count = left > plan.items * items.step ? plan.items
                      : left > 0                     ? (((int)left - 1) << plan.across_log2) / Job::THREADS + 1
                                                     : 0;
#pragma unroll
        for (int input = 0; input < Job::INPUTS; input++) {
            const int64_t stride = job.row_stride(input), apart = items.step * stride;
            const typename Job::T *from = job.source(place, input) + items.down * stride;
            if constexpr (sizeof(typename Items<Job>::P) < 4) {
                /* There are no asynchronous copies of 2 bytes. All loads first: the compiler cannot
                 * move one above a store to shared memory. */
                typename Items<Job>::P loaded[Job::ITEMS];
#pragma unroll
                for (int i = 0; i < Job::ITEMS; i++, from += apart)
                    loaded[i] = load_once_if<typename Job::T, Job::N>(i < items.count, from, 0.0f);
#pragma unroll
                for (int i = 0; i < Job::ITEMS; i++)
                    if (i < items.count)
                        items.in(i, input) = loaded[i];
            } else {
                /* Must be unrolled: nvcc 13.0 compiles a loop of these copies to illegal
                 * instructions (docs/perf/act.md). */
#pragma unroll
                for (int i = 0; i < Job::ITEMS; i++, from += apart)
                    if (i < items.count)
                        copy_async(&items.in(i, input), from, policy);
            }
        }
        copy_commit();
    }
};

/* Finalizes the statistics of a whole line and calls keep(k, value) for each resulting value. */
template <class Job, class F>
DEVICE void finalize(const Job &job, Statistics<1, Job::HAS_MAX, Job::SUMS> &all, const typename Job::Panel &panel,
                     int line, F keep) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    float values[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = all.value(k, 0);
    job.finalize(values, panel, line);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        keep(k, values[k]);
}

/* Computes the statistics of a thread's part of a chunk. */
template <class Job>
DEVICE void accumulate(const Job &job, ChunkPart<Job> &part, StatisticsOf<Job> &statistics, PanelShared<Job> &shared) {
    statistics.clear();
    part.template load<false>(0);
    job.prepare(shared.table, part.panel);
    copy_wait<0>();
    job.template accumulate<true>(statistics, part.items, part.place, shared.table);
    for (int round = 1; round < part.plan.rounds; round++) {
        part.template load<false>(round);
        copy_wait<0>();
        job.template accumulate<false>(statistics, part.items, part.place, shared.table);
    }
}

template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM) panel_in_block(const Job job, const PanelPlan plan) {
    wait_for_inputs();
    __shared__ PanelShared<Job> shared;
    ChunkPart<Job> part(job, plan, blockIdx.x, 0);
    StatisticsOf<Job> statistics;
    accumulate(job, part, statistics, shared);
    combine_block<Job>(statistics, plan.across_log2, shared, [&](int line, auto &all) {
        finalize(job, all, part.panel, line, [&](int k, float value) { shared.totals[k][line] = value; });
    });
    __syncthreads();
    /* Last round first: its items are still in shared memory, and the rounds just before it are
     * most likely in L2. */
    for (int round = plan.rounds - 1;;) {
        job.finish(shared.totals, part.items, part.place, shared.table);
        if (--round < 0)
            break;
        part.template load<true>(round);
        copy_wait<0>();
    }
}

/* First phase: writes the statistics of a chunk to the workspace. */
template <class Job>
DEVICE void chunk_statistics(const Job &job, const PanelPlan &plan, const PanelWorkspace &workspace, unsigned panel,
                             unsigned chunk, PanelShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    ChunkPart<Job> part(job, plan, panel, chunk);
    StatisticsOf<Job> statistics;
    accumulate(job, part, statistics, shared);
    const int lines = plan.across * Job::LINES;
    float *const to = workspace.statistics + ((int64_t)panel * plan.chunks + chunk) * (COUNT * lines);
    combine_block<Job>(statistics, plan.across_log2, shared, [&](int line, auto &all) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            to[k * lines + line] = all.value(k, 0);
    });
    __syncthreads();
    if (threadIdx.x == 0)
        add_release(workspace.arrived + panel, 1);
}

/* Between the phases, MERGE_BLOCKS blocks merge the statistics of a panel: each takes some of its lines. */
constexpr int MERGE_BLOCKS = 4;

template <class Job>
DEVICE void merge_statistics(const Job &job, const PanelPlan &plan, const PanelWorkspace &workspace, unsigned panel,
                             int block, PanelShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT, AT_A_TIME = 8;
    const int lines = plan.across * Job::LINES, each_log2 = lines < MERGE_BLOCKS ? 0 : 31 - __clz(lines / MERGE_BLOCKS),
              each = 1 << each_log2, groups = Job::THREADS >> each_log2, first = block * each;
    if (first >= lines)
        return;
    if (threadIdx.x == 0)
        while (load_acquire(workspace.arrived + panel) != plan.chunks - 1)
            ;
    __syncthreads();
    const float *const from =
        workspace.statistics + (int64_t)panel * plan.chunks * (COUNT * lines) + first + (threadIdx.x & (each - 1));
    Statistics<1, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
    mine.clear();
    for (unsigned chunk = threadIdx.x >> each_log2; chunk < plan.chunks; chunk += groups * AT_A_TIME) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            other[i].clear();
            if (chunk + i * groups < plan.chunks)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    other[i].value(k, 0) = __ldcg(from + ((int64_t)(chunk + i * groups) * COUNT + k) * lines);
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            mine.add(0, other[i], 0);
    }
    combine_block<Job>(mine, each_log2, shared, [&](int line, auto &all) {
        unsigned *const to = workspace.merged + (int64_t)panel * (COUNT * lines) + first + line;
        finalize(job, all, job.panel_at(panel), first + line,
                 [&](int k, float value) { store_flagged(to + k * lines, value); });
    });
}

/* Second phase: writes the results of a chunk. */
template <class Job>
DEVICE void write_results(const Job &job, const PanelPlan &plan, const PanelWorkspace &workspace, unsigned panel,
                          unsigned chunk, PanelShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    ChunkPart<Job> part(job, plan, panel, chunk);
    part.template load<true>(0);
    job.prepare(shared.table, part.panel);
    const int lines = plan.across * Job::LINES;
    const unsigned *const from = workspace.merged + (int64_t)panel * (COUNT * lines);
    for (int line = threadIdx.x % Job::MOST_LINES; line < lines; line += Job::THREADS)
        for (int k = threadIdx.x / Job::MOST_LINES; k < COUNT; k += Job::THREADS / Job::MOST_LINES) {
            unsigned word;
            while ((word = load_relaxed(from + k * lines + line)) == EMPTY)
                ;
            shared.totals[k][line] = __uint_as_float(word);
        }
    __syncthreads();
    for (int round = 0;;) {
        copy_wait<0>();
        job.finish(shared.totals, part.items, part.place, shared.table);
        if (++round == plan.rounds)
            break;
        part.template load<true>(round);
    }
}

/* In each phase a panel has one block per chunk and MERGE_BLOCKS more: these merge in the first
 * phase and are idle in the second. The grid is `delay` blocks of the first phase, then blocks of
 * both phases alternately, then the rest of the second phase. */
template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM)
    panel_in_phases(const Job job, const PanelPlan plan, const PanelWorkspace workspace) {
    wait_for_inputs();
    __shared__ PanelShared<Job> shared;
    const unsigned all = plan.panels * plan.blocks_per_panel.number, alternating = 2 * (all - plan.delay);
    const int behind = static_cast<int>(blockIdx.x - plan.delay);
    const bool ending = behind >= static_cast<int>(alternating), second = behind >= 0 && (ending || behind % 2 == 1);
    const unsigned index = behind < 0 ? blockIdx.x : ending ? blockIdx.x - all : behind / 2 + (second ? 0 : plan.delay);
    const unsigned panel = plan.blocks_per_panel.quotient(index), chunk = index - panel * plan.blocks_per_panel.number;
    if (chunk < plan.chunks)
        second ? write_results(job, plan, workspace, panel, chunk, shared)
               : chunk_statistics(job, plan, workspace, panel, chunk, shared);
    else if (!second)
        merge_statistics(job, plan, workspace, panel, (int)(chunk - plan.chunks), shared);
}

/* ---- host side ------------------------------------------------------------------------------- */

/* A panel is one chunk if it takes one or two rounds: then at least half of it is still in shared memory when results
 * are written. `across`: threads side by side in a panel. */
template <class Job>
static inline PanelPlan plan_panels(const rafter_cuda_state &device, int64_t panels, int64_t rows, int across) {
    constexpr int64_t MOST_CHUNKS = 1024, ITEM = (int64_t)Job::INPUTS * Job::THREADS * Job::N * sizeof(typename Job::T);
    const int64_t fit = (device.shared_bytes - (int64_t)sizeof(PanelShared<Job>)) / ITEM;
    const int64_t items = min(fit, int64_t(Job::ITEMS));
    const int64_t step = Job::THREADS / across * items, steps = ceil_div(rows, step);
    const int64_t rounds = steps <= 2 ? steps : ceil_div(steps, MOST_CHUNKS), chunks = ceil_div(steps, rounds);
    const int64_t blocks_per_panel = chunks + MERGE_BLOCKS, all = panels * blocks_per_panel;
    /* Bytes of input that are read between the last statistics of a panel and its first results, as measured:
     * docs/perf/act.md. */
    const int64_t behind = device.l2_bytes / 4, delay = blocks_per_panel + ceil_div(behind, rounds * items * ITEM);
    PanelPlan plan;
    plan.rows = rows;
    plan.chunk_rows = rounds * step;
    plan.blocks = chunks == 1 ? panels : 2 * all;
    plan.panels = (unsigned)panels;
    plan.chunks = (unsigned)chunks;
    plan.delay = (unsigned)min(delay, all);
    plan.blocks_per_panel = Divisor(blocks_per_panel);
    plan.across = across;
    plan.across_log2 = Divisor(across).shift;
    plan.items = (int)items;
    plan.rounds = (int)rounds;
    plan.staged_bytes = (size_t)(items * ITEM);
    return plan;
}

/* The bytes of each part of the workspace, in this order. */
template <class Job> struct PanelWorkspaceBytes {
    size_t merged = 0, arrived = 0, statistics = 0;

    explicit PanelWorkspaceBytes(const PanelPlan &plan) {
        if (plan.chunks > 1) {
            merged = (size_t)plan.panels * StatisticsOf<Job>::COUNT * plan.across * Job::LINES * sizeof(unsigned);
            statistics = merged * (size_t)plan.chunks;
            arrived = (size_t)plan.panels * sizeof(unsigned);
        }
    }
    size_t all() const {
        return merged + statistics + arrived;
    }
};

template <class Job>
static inline void launch_panels(const rafter_context *context, const Job &job, const PanelPlan &plan, char *memory) {
    if (plan.chunks == 1)
        return launch(context, {plan.blocks, Job::THREADS, plan.staged_bytes}, panel_in_block<Job>, job, plan);
    const PanelWorkspaceBytes<Job> sizes(plan);
    /* All ones: EMPTY in `merged`, -1 in `arrived`. */
    fill_bytes(context, memory, 0xff, sizes.merged + sizes.arrived);
    const PanelWorkspace workspace = {reinterpret_cast<float *>(memory + sizes.merged + sizes.arrived),
                                      reinterpret_cast<unsigned *>(memory),
                                      reinterpret_cast<unsigned *>(memory + sizes.merged)};
    launch(context, {plan.blocks, Job::THREADS, plan.staged_bytes}, panel_in_phases<Job>, job, plan, workspace);
}

#endif
