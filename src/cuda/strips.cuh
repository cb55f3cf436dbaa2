/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over lines too long for a warp.
 *
 * A strip is a bundle of neighbouring lines (columns), or one line (rows): what is normalised together. It is cut into
 * chunks of rows, one to a block.
 *
 * A strip of one chunk is a block's own affair: it takes the statistics and writes the results, from shared memory what
 * that holds, and the rest walking back over what it has read.
 *
 * Strips of many chunks take two phases, in one grid: blocks of the first read a chunk and write its statistics to
 * scratch memory; a few blocks more merge those of the whole strip, in the order of the chunks; blocks of the second
 * read the chunk again and write the results. Blocks of both phases alternate, the second `delay` blocks behind the
 * first: far enough that the merged statistics are there, near enough that the chunk is still in L2. A block waits only
 * for blocks of lower numbers, which have started before it, so that however few of them the chip holds at a time, the
 * oldest can always go on.
 *
 * What the lines hold and what becomes of them is a Job's affair:
 *
 *     T, N              storage type; elements of a pack
 *     LINES             lines of a thread, a power of two: one, or those of its packs
 *     MOST_LINES        lines of a strip
 *     INPUTS            packs that make an item
 *     ITEMS             items of a thread that are loaded at a time, where shared memory holds so many
 *     HAS_MAX, SUMS     statistics of a line: a maximum or none, and sums, relative to the maximum if there is one
 *     THREADS, PER_SM   of a block; blocks that a multiprocessor holds
 *     Strip             what is known about a strip
 *     Place             where a thread's items are; active: whether it has any
 *     Table             what a block wants to share about a strip
 *
 *     strip_at(index)                      the Strip
 *     locate(strip, column, row)           the thread's Place in a strip, its first row being `row`
 *     prepare(table, strip)                fills the Table
 *     source(place, input)                 address of the place's first pack
 *     row_stride(input)                    elements from a row to the next
 *     has(place, input)                    whether the strip has an input
 *     accumulate<FIRST>(statistics, ...)   adds items to the thread's statistics, which are clear if they are the FIRST
 *     conclude(values, strip, line)        turns the statistics of a whole line into what finish() wants; called by one
 *                                          thread for each line
 *     finish(values, items, ...)           writes the results of items
 */
#ifndef RAFTER_CUDA_STRIPS_CUH
#define RAFTER_CUDA_STRIPS_CUH

#include <float.h>

#include "cuda/launch.cuh"

/* How a call is cut. */
struct Cut {
    int64_t rows;    /* of a strip: elements of its lines, or along a row packs */
    int64_t covered; /* rows of a chunk */
    int64_t blocks;  /* of the launch; one that has too many for a grid is refused, whatever the numbers below are */
    unsigned strips, chunks, delay; /* chunks of a strip; blocks of the first phase that start before the second */
    Divisor of_strip;               /* blocks of one phase that belong to a strip */
    int across, across_log2;        /* threads side by side in a strip, a power of two */
    int items, rounds;              /* items that a thread takes at a time, and how often */
    size_t staged;                  /* bytes of shared memory that a block's items take */
};

/* Statistics of a thread's lines. The maximum starts from the lowest finite number: a line of all -inf then has a sum
 * of 0, and nothing is ever subtracted from -inf. */
template <int LINES, bool HAS_MAX, int SUMS> struct Statistics {
    static constexpr int COUNT = HAS_MAX + SUMS;
    float max[LINES], sum[SUMS][LINES];

    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < LINES; j++) {
            max[j] = -FLT_MAX;
#pragma unroll
            for (int k = 0; k < SUMS; k++)
                sum[k][j] = 0.0f;
        }
    }
    /* Makes the sums relative to another maximum, which becomes the maximum. */
    DEVICE void rebase(int j, float other) {
        const float factor = exp2_fast((max[j] - other) * LOG2E);
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            sum[k][j] *= factor;
        max[j] = other;
    }
    DEVICE float &value(int k, int j) {
        return HAS_MAX && k == 0 ? max[j] : sum[k - HAS_MAX][j];
    }
    /* Adds line j of another. */
    template <int OTHERS> DEVICE void add(int j, Statistics<OTHERS, HAS_MAX, SUMS> other, int line) {
        if constexpr (HAS_MAX) {
            const float top = fmaxf(max[j], other.max[line]);
            rebase(j, top);
            other.rebase(line, top);
        }
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            sum[k][j] += other.sum[k][line];
    }
};

template <class Job> using StatisticsOf = Statistics<Job::LINES, Job::HAS_MAX, Job::SUMS>;

/* Makes the statistics of lines [first, first + LINES) relative to maxima that cover a pack's elements too. A line is
 * column j of packs, or all of them. CLEAR: nothing has been added yet. */
template <bool CLEAR, int LINES, int ALL, int SUMS, typename T, int N>
DEVICE void cover(Statistics<ALL, true, SUMS> &statistics, int first, const Pack<T, N> &pack) {
    float x[N], top[LINES];
    unpack(pack, x);
#pragma unroll
    for (int line = 0; line < LINES; line++)
        top[line] = statistics.max[first + line];
#pragma unroll
    for (int j = 0; j < N; j++)
        top[j % LINES] = fmaxf(top[j % LINES], x[j]);
#pragma unroll
    for (int line = 0; line < LINES; line++)
        if constexpr (CLEAR)
            statistics.max[first + line] = top[line];
        else
            statistics.rebase(first + line, top[line]);
}

/* Neighbouring numbers, 16 bytes at a time if there are so many: then the first is aligned. */
template <int N> DEVICE void read_numbers(const float *from, float (&to)[N]) {
    constexpr int EACH = N % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int j = 0; j < N; j += EACH) {
        const Pack<float, EACH> pack = *reinterpret_cast<const Pack<float, EACH> *>(from + j);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            to[j + k] = pack.v[k];
    }
}

/* What a thread works on at a time: `count` items, ITEMS or fewer, `step` rows apart, in places of shared memory that
 * no other thread touches. */
template <class Job> struct Items {
    typedef Pack<typename Job::T, Job::N> P;
    P *staged;
    int64_t row, down; /* of the first item, in the strip and from the place's first row */
    int count, step;

    DEVICE P &in(int i, int input) const {
        return staged[(i * Job::INPUTS + input) * Job::THREADS];
    }
    /* f(i) for each item, the code of AT_ONCE of them interleaved. */
    template <int AT_ONCE, class F> DEVICE void for_each(F f) const {
#pragma unroll AT_ONCE
        for (int i = 0; i < count; i++)
            f(i);
    }
};

/* Statistics of each warp's lines, or of more warps where they have a line each, on the way to those of the block. */
template <class Job> struct Area {
    alignas(16) float of_warp[StatisticsOf<Job>::COUNT][Job::THREADS / WARP * Job::MOST_LINES];

    DEVICE static int together_log2(int across_log2) {
        return across_log2 < 5 ? 5 : across_log2;
    }
};

/* Whole lines of shared memory, so that the items behind it begin with one: cp.async across lines takes longer. */
template <class Job> struct alignas(128) StripShared {
    static constexpr int COUNT = StatisticsOf<Job>::COUNT;
    Area<Job> area;
    alignas(16) float total[COUNT][Job::MOST_LINES];
    typename Job::Table table;
};

/* Where blocks of the two phases meet: words of scratch memory. */
struct Meeting {
    float *statistics; /* of each chunk */
    unsigned *merged;  /* of each strip, concluded: flagged words, EMPTY until they are written */
    unsigned *arrived; /* chunks of a strip whose statistics are there, less one */
};

/* Combines what the threads of a warp have for each line, and puts it into the area. Threads 2^across_log2 apart hold
 * the same lines, LINES of them each. `thread` is one of THREADS. */
template <class Job, int LINES>
DEVICE void combine_warp(Statistics<LINES, Job::HAS_MAX, Job::SUMS> &mine, int thread, int across_log2,
                         Area<Job> &area) {
    const int across = 1 << across_log2, lines = across * LINES, together_log2 = Area<Job>::together_log2(across_log2);
    const int group = thread >> together_log2, place = thread & ((1 << together_log2) - 1);
    if constexpr (Job::HAS_MAX) {
        float top[LINES];
#pragma unroll
        for (int j = 0; j < LINES; j++)
            top[j] = mine.max[j];
        for (int apart = WARP / 2; apart >= across; apart /= 2)
#pragma unroll
            for (int j = 0; j < LINES; j++)
                top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], apart));
#pragma unroll
        for (int j = 0; j < LINES; j++)
            mine.rebase(j, top[j]);
    }
    for (int apart = WARP / 2; apart >= across; apart /= 2)
#pragma unroll
        for (int j = 0; j < LINES; j++)
#pragma unroll
            for (int k = 0; k < Job::SUMS; k++)
                mine.sum[k][j] += __shfl_xor_sync(~0u, mine.sum[k][j], apart);
    if (place < across)
#pragma unroll
        for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
#pragma unroll
            for (int j = 0; j < LINES; j++)
                area.of_warp[k][group * lines + place * LINES + j] = mine.value(k, j);
}

/* What all of them have for a line, always in the same order. */
template <class Job>
DEVICE Statistics<1, Job::HAS_MAX, Job::SUMS> combine_area(const Area<Job> &area, int across_log2, int lines,
                                                           int line) {
    Statistics<1, Job::HAS_MAX, Job::SUMS> all, one;
    all.clear();
    for (int g = 0; g < Job::THREADS >> Area<Job>::together_log2(across_log2); g++) {
#pragma unroll
        for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
            one.value(k, 0) = area.of_warp[k][g * lines + line];
        all.add(0, one, 0);
    }
    return all;
}

/* Both, in a block; f(line, statistics) is called by one thread for each line. */
template <class Job, int LINES, class F>
DEVICE void combine_block(Statistics<LINES, Job::HAS_MAX, Job::SUMS> &mine, int across_log2, StripShared<Job> &shared,
                          F f) {
    const int lines = LINES << across_log2;
    combine_warp<Job>(mine, (int)threadIdx.x, across_log2, shared.area);
    __syncthreads();
    if (threadIdx.x < lines) {
        auto all = combine_area(shared.area, across_log2, lines, (int)threadIdx.x);
        f(static_cast<int>(threadIdx.x), all);
    }
}

/* A thread's part of a chunk. */
template <class Job> struct Part {
    const Job &job;
    const Cut &cut;
    typename Job::Strip strip;
    typename Job::Place place;
    int64_t row; /* the place's first row */
    Items<Job> items;

    DEVICE Part(const Job &job, const Cut &cut, unsigned index, unsigned chunk)
        : job(job), cut(cut), strip(job.strip_at(index)) {
        extern __shared__ uint4 staged_memory[];
        items.step = Job::THREADS >> cut.across_log2;
        items.staged = reinterpret_cast<typename Items<Job>::P *>(staged_memory) + threadIdx.x;
        row = chunk * cut.covered + (threadIdx.x >> cut.across_log2);
        place = job.locate(strip, threadIdx.x & (cut.across - 1), row);
    }
    /* Starts to load the items of a round. AGAIN: for the last time, else they will be read again soon. */
    template <bool AGAIN> DEVICE void start(int round) {
        const uint64_t policy = AGAIN ? l2_pass_on() : l2_keep();
        items.down = (int64_t)round * cut.items * items.step;
        items.row = row + items.down;
        const int64_t left = place.active ? cut.rows - items.row : 0;
        items.count = left > cut.items * items.step ? cut.items
                      : left > 0                    ? (((int)left - 1) << cut.across_log2) / Job::THREADS + 1
                                                    : 0;
#pragma unroll
        for (int input = 0; input < Job::INPUTS; input++) {
            const int64_t stride = job.row_stride(input), apart = items.step * stride;
            const typename Job::T *from = job.source(place, input) + items.down * stride;
            const int count = job.has(place, input) ? items.count : 0;
            /* Unrolled in any case: in a loop, nvcc 13.0 turns these copies into instructions that the chip refuses. */
#pragma unroll
            for (int i = 0; i < Job::ITEMS; i++, from += apart)
                if (i < count)
                    copy_async(&items.in(i, input), from, policy);
        }
        copy_commit();
    }
};

/* Puts the statistics of a whole line, concluded, where keep(k, value) takes them. */
template <class Job, class F>
DEVICE void conclude(const Job &job, Statistics<1, Job::HAS_MAX, Job::SUMS> &all, const typename Job::Strip &strip,
                     int line, F keep) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    float values[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        values[k] = all.value(k, 0);
    job.conclude(values, strip, line);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        keep(k, values[k]);
}

/* The statistics of a part. */
template <class Job>
DEVICE void accumulate(const Job &job, Part<Job> &part, StatisticsOf<Job> &statistics, StripShared<Job> &shared) {
    statistics.clear();
    part.template start<false>(0);
    job.prepare(shared.table, part.strip);
    copy_wait<0>();
    job.template accumulate<true>(statistics, part.items, part.place, shared.table);
    for (int round = 1; round < part.cut.rounds; round++) {
        part.template start<false>(round);
        copy_wait<0>();
        job.template accumulate<false>(statistics, part.items, part.place, shared.table);
    }
}

template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM) strip_in_block(const Job job, const Cut cut) {
    __shared__ StripShared<Job> shared;
    Part<Job> part(job, cut, blockIdx.x, 0);
    StatisticsOf<Job> statistics;
    accumulate(job, part, statistics, shared);
    combine_block<Job>(statistics, cut.across_log2, shared, [&](int line, auto &all) {
        conclude(job, all, part.strip, line, [&](int k, float value) { shared.total[k][line] = value; });
    });
    __syncthreads();
    /* Backwards: the last items are still there, and those before them are what L2 is most likely to have. */
    for (int round = cut.rounds - 1;;) {
        job.finish(shared.total, part.items, part.place, shared.table);
        if (--round < 0)
            break;
        part.template start<true>(round);
        copy_wait<0>();
    }
}

/* First phase: the statistics of a chunk. */
template <class Job>
DEVICE void take_statistics(const Job &job, const Cut &cut, const Meeting &meeting, unsigned strip, unsigned chunk,
                            StripShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    Part<Job> part(job, cut, strip, chunk);
    StatisticsOf<Job> statistics;
    accumulate(job, part, statistics, shared);
    const int lines = cut.across * Job::LINES;
    float *const to = meeting.statistics + ((int64_t)strip * cut.chunks + chunk) * (COUNT * lines);
    combine_block<Job>(statistics, cut.across_log2, shared, [&](int line, auto &all) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            to[k * lines + line] = all.value(k, 0);
    });
    __syncthreads();
    if (threadIdx.x == 0)
        add_release(meeting.arrived + strip, 1);
}

/* Between the phases: the statistics of a whole strip, for MERGERS blocks, each of which takes some of its lines. */
constexpr int MERGERS = 4;

template <class Job>
DEVICE void merge_statistics(const Job &job, const Cut &cut, const Meeting &meeting, unsigned strip, int merger,
                             StripShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT, AT_A_TIME = 8;
    const int lines = cut.across * Job::LINES, each_log2 = lines < MERGERS ? 0 : 31 - __clz(lines / MERGERS),
              each = 1 << each_log2, groups = Job::THREADS >> each_log2, first = merger * each;
    if (first >= lines)
        return;
    if (threadIdx.x == 0)
        while (load_acquire(meeting.arrived + strip) != cut.chunks - 1)
            ;
    __syncthreads();
    const float *const from =
        meeting.statistics + (int64_t)strip * cut.chunks * (COUNT * lines) + first + (threadIdx.x & (each - 1));
    Statistics<1, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
    mine.clear();
    for (unsigned chunk = threadIdx.x >> each_log2; chunk < cut.chunks; chunk += groups * AT_A_TIME) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            other[i].clear();
            if (chunk + i * groups < cut.chunks)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    other[i].value(k, 0) = __ldcg(from + ((int64_t)(chunk + i * groups) * COUNT + k) * lines);
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            mine.add(0, other[i], 0);
    }
    combine_block<Job>(mine, each_log2, shared, [&](int line, auto &all) {
        unsigned *const to = meeting.merged + (int64_t)strip * (COUNT * lines) + first + line;
        conclude(job, all, job.strip_at(strip), first + line,
                 [&](int k, float value) { store_flagged(to + k * lines, value); });
    });
}

/* Second phase: the results of a chunk. */
template <class Job>
DEVICE void write_results(const Job &job, const Cut &cut, const Meeting &meeting, unsigned strip, unsigned chunk,
                          StripShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT;
    Part<Job> part(job, cut, strip, chunk);
    part.template start<true>(0);
    job.prepare(shared.table, part.strip);
    const int lines = cut.across * Job::LINES;
    const unsigned *const from = meeting.merged + (int64_t)strip * (COUNT * lines);
    for (int line = threadIdx.x % Job::MOST_LINES; line < lines; line += Job::THREADS)
        for (int k = threadIdx.x / Job::MOST_LINES; k < COUNT; k += Job::THREADS / Job::MOST_LINES) {
            unsigned word;
            while ((word = load_relaxed(from + k * lines + line)) == EMPTY)
                ;
            shared.total[k][line] = __uint_as_float(word);
        }
    __syncthreads();
    for (int round = 0;;) {
        copy_wait<0>();
        job.finish(shared.total, part.items, part.place, shared.table);
        if (++round == cut.rounds)
            break;
        part.template start<true>(round);
    }
}

/* Blocks of the first phase, MERGERS behind those of each strip, and blocks of the second phase, as many idle ones
 * behind those of each strip: `delay` of the first, then both in turns, then the rest of the second. */
template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM)
    strip_in_phases(const Job job, const Cut cut, const Meeting meeting) {
    __shared__ StripShared<Job> shared;
    const unsigned all = cut.strips * cut.of_strip.number, alternating = 2 * (all - cut.delay);
    const int behind = static_cast<int>(blockIdx.x - cut.delay);
    const bool ending = behind >= static_cast<int>(alternating), second = behind >= 0 && (ending || behind % 2 == 1);
    const unsigned index = behind < 0 ? blockIdx.x : ending ? blockIdx.x - all : behind / 2 + (second ? 0 : cut.delay);
    const unsigned strip = cut.of_strip.quotient(index), chunk = index - strip * cut.of_strip.number;
    if (chunk < cut.chunks)
        second ? write_results(job, cut, meeting, strip, chunk, shared)
               : take_statistics(job, cut, meeting, strip, chunk, shared);
    else if (!second)
        merge_statistics(job, cut, meeting, strip, (int)(chunk - cut.chunks), shared);
}

/* ---- how to cut ------------------------------------------------------------------------------ */

/* One chunk to a strip where that is asked for, or where at least half of it stays in shared memory. */
template <class Job>
static inline Cut cut_into_strips(const rafter_cuda_state *state, int64_t strips, int64_t rows, int across,
                                  bool one_chunk) {
    constexpr int64_t MOST_CHUNKS = 1024, ITEM = (int64_t)Job::INPUTS * Job::THREADS * Job::N * sizeof(typename Job::T);
    const int64_t fit = (state->shared_bytes - (int64_t)sizeof(StripShared<Job>)) / ITEM;
    const int64_t items = fit < Job::ITEMS ? fit : Job::ITEMS;
    const int64_t step = Job::THREADS / across * items, steps = ceil_div(rows, step);
    const int64_t rounds = one_chunk || steps <= 2 ? steps : ceil_div(steps, MOST_CHUNKS),
                  chunks = ceil_div(steps, rounds);
    const int64_t of_strip = chunks + MERGERS, all = strips * of_strip;
    /* Inputs that are read between the last statistics of a strip and its first results: docs/perf/act.md. */
    const int64_t behind = state->l2_bytes / 4, delay = of_strip + ceil_div(behind, rounds * items * ITEM);
    Cut cut;
    cut.rows = rows;
    cut.covered = rounds * step;
    cut.blocks = chunks == 1 ? strips : 2 * all;
    cut.strips = (unsigned)strips;
    cut.chunks = (unsigned)chunks;
    cut.delay = (unsigned)(delay < all ? delay : all);
    cut.of_strip = Divisor(of_strip);
    cut.across = across;
    cut.across_log2 = Divisor(across).shift;
    cut.items = (int)items;
    cut.rounds = (int)rounds;
    cut.staged = (size_t)(items * ITEM);
    return cut;
}

/* Scratch memory, in bytes: merged statistics, counters, statistics of chunks; and the launch. */
template <class Job> struct StripScratch {
    size_t merged, arrived, statistics;

    explicit StripScratch(const Cut &cut) : merged(0), arrived(0), statistics(0) {
        if (cut.chunks > 1) {
            merged = (size_t)cut.strips * StatisticsOf<Job>::COUNT * cut.across * Job::LINES * sizeof(unsigned);
            statistics = merged * (size_t)cut.chunks;
            arrived = (size_t)cut.strips * sizeof(unsigned);
        }
    }
    size_t bytes() const {
        return merged + statistics + arrived;
    }
};

template <class Job>
static inline void launch_strips(const rafter_context *context, const Job &job, const Cut &cut, char *scratch) {
    if (cut.chunks == 1)
        return launch(context, {cut.blocks, Job::THREADS, cut.staged}, strip_in_block<Job>, job, cut);
    const StripScratch<Job> sizes(cut);
    cudaMemsetAsync(scratch, 0xff, sizes.merged + sizes.arrived, context->cuda_state->stream); /* EMPTY, and -1 */
    const Meeting meeting = {reinterpret_cast<float *>(scratch + sizes.merged + sizes.arrived),
                             reinterpret_cast<unsigned *>(scratch),
                             reinterpret_cast<unsigned *>(scratch + sizes.merged)};
    launch(context, {cut.blocks, Job::THREADS, cut.staged}, strip_in_phases<Job>, job, cut, meeting);
}

#endif
