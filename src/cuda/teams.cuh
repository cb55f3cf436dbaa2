/*
 * Softmax over lines too long for a warp, with each input read from memory once.
 *
 * A strip is a bundle of neighbouring lines (columns), or one line (rows): what is normalised together. A team of
 * blocks takes a strip, each block a share of its rows, and keeps that share on chip between the statistics and the
 * result: the first items of a thread in its registers, the others in shared memory, in places that no other thread
 * touches. What a block cannot keep it reads twice. Blocks end with their strip; those that run at the same time are at
 * different points of their work, which keeps the memory busy.
 *
 * Blocks of a team meet through scratch memory. Each writes the statistics of its share there and reads those of all
 * shares, and merges them in the order of the blocks, so that all have the same result. The words are empty, all ones,
 * until they are written, and each is its own flag: no fence and no counter stands between a statistic and its readers.
 * Nobody waits for a block of another strip, and blocks start in the order of their numbers, so that of one kernel only
 * the last strip to start can lack blocks. A team is at most an eighth of what the chip holds: however many kernels of
 * different priorities share it, there is always a whole team that can go on.
 *
 * What the lines hold and what becomes of them is a Job's affair:
 *
 *     T, N              storage type; elements of a pack
 *     LINES             lines of a thread: N down columns, 1 along a row
 *     MOST_LINES        lines of a strip
 *     INPUTS            packs that make an item
 *     HAS_MAX, SUMS     statistics of a line: a maximum or none, and sums, relative to the maximum if there is one
 *     THREADS, PER_SM   of a block; blocks that a multiprocessor holds
 *     CHUNK             items that a thread works on at a time
 *     HELD              items that a thread keeps in registers, a multiple of CHUNK
 *     REPLACES          whether accumulate() replaces an item by something dearer to compute, for finish() to use
 *     Place             where a thread's items are
 *     Table             what a block wants to share about a strip
 *
 *     locate(strip, column, across, row)   the thread's Place in a strip, its first row being `row`
 *     prepare(table, strip, across)        fills the Table
 *     source(place, input, down)           address of a pack, `down` rows below the place's first
 *     blank(input)                         what stands for an input that is not there
 *     accumulate(statistics, items, ...)   adds a chunk to the thread's statistics
 *     finish(statistics, items, ...)       writes the results of a chunk from those of the whole lines
 *     conclude(statistics, ...)            turns statistics of whole lines into what finish() wants; one thread is
 *                                          told that it speaks for its lines
 */
#ifndef RAFTER_CUDA_TEAMS_CUH
#define RAFTER_CUDA_TEAMS_CUH

#include <float.h>

#include "cuda/launch.cuh"

/* How a call is cut. */
struct Cut {
    int64_t strips, rows; /* rows of a strip: elements of its lines, or along a row packs */
    int64_t share;        /* rows of a block */
    int across;           /* threads side by side in a strip, a power of two */
    int team;             /* blocks to a strip */
    int kept;             /* items of a thread that stay in shared memory, a multiple of CHUNK */
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
};

template <class Job> using StatisticsOf = Statistics<Job::LINES, Job::HAS_MAX, Job::SUMS>;

template <class Job> struct Item { Pack<typename Job::T, Job::N> in[Job::INPUTS]; };

/* Adds the exponentials of COUNT packs to the first sum; the maximum follows. A line is column j of the packs, or all
 * of them. */
template <int LINES, int SUMS, int COUNT, int N>
DEVICE void add_exponentials(Statistics<LINES, true, SUMS> &statistics, const float (&x)[COUNT][N]) {
    float top[LINES];
#pragma unroll
    for (int line = 0; line < LINES; line++)
        top[line] = statistics.max[line];
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            top[j % LINES] = fmaxf(top[j % LINES], x[i][j]);
#pragma unroll
    for (int line = 0; line < LINES; line++)
        statistics.rebase(line, top[line]);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            statistics.sum[0][j % LINES] += exp2_fast((x[i][j] - top[j % LINES]) * LOG2E);
}

/* The chunk of items that a thread has in registers. */
template <class Job> struct Chunk {
    Item<Job> item[Job::CHUNK];
    bool has[Job::CHUNK]; /* else the item is blank, or nobody's */
    int64_t row, down;    /* of the first item, in the strip and from the place's first row; they are `step` apart */
    int step;
};

template <class Job> struct TeamShared {
    float area[Job::THREADS / WARP * Job::MOST_LINES];
    float total[StatisticsOf<Job>::COUNT][Job::MOST_LINES];
    typename Job::Table table;
};

/* Combines what all threads of a block have for each line, always in the same order, into total[line]. Threads `across`
 * apart hold the same lines, LINES of them each; across is a power of two. */
template <int THREADS, int LINES, class F>
DEVICE void block_combine(const float (&mine)[LINES], int across, float *area, float *total, F combine) {
    const int lines = across * LINES, together = across < WARP ? WARP : across;
    const int column = threadIdx.x % across, group = threadIdx.x / together;
#pragma unroll
    for (int j = 0; j < LINES; j++) {
        float a = mine[j];
        for (int step = WARP / 2; step >= across; step /= 2)
            a = combine(a, __shfl_xor_sync(~0u, a, step));
        if (threadIdx.x % together < across)
            area[group * lines + column * LINES + j] = a;
    }
    __syncthreads();
    if (threadIdx.x < lines) {
        float a = area[threadIdx.x];
        for (int g = 1; g < THREADS / together; g++)
            a = combine(a, area[g * lines + threadIdx.x]);
        total[threadIdx.x] = a;
    }
    __syncthreads();
}

/* The statistics of the block's threads, combined into shared.total. */
template <class Job, int LINES>
DEVICE void combine_statistics(Statistics<LINES, Job::HAS_MAX, Job::SUMS> &mine, int across, TeamShared<Job> &shared) {
    const int column = threadIdx.x % across;
    if constexpr (Job::HAS_MAX) {
        block_combine<Job::THREADS>(mine.max, across, shared.area, shared.total[0],
                                    [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int j = 0; j < LINES; j++)
            mine.rebase(j, shared.total[0][column * LINES + j]);
    }
#pragma unroll
    for (int k = 0; k < Job::SUMS; k++)
        block_combine<Job::THREADS>(mine.sum[k], across, shared.area, shared.total[Job::HAS_MAX + k],
                                    [](float a, float b) { return a + b; });
}

/* shared.total of all blocks of the team, combined, into shared.total of each. `words` belong to the strip: COUNT *
 * lines for each block, all of them EMPTY before the first block starts. */
template <class Job> DEVICE void combine_team(int team, int rank, int lines, unsigned *words, TeamShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT, AT_A_TIME = 4;
    const int t = threadIdx.x, line = t % lines, apart = Job::THREADS / lines;
    if (t < lines)
        for (int k = 0; k < COUNT; k++)
            store_flagged(&words[(rank * COUNT + k) * lines + t], shared.total[k][t]);

    Statistics<1, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
    mine.clear();
    for (int from = t / lines; from < team; from += apart * AT_A_TIME) {
        unsigned word[AT_A_TIME][COUNT];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            if (from + i * apart < team)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    word[i][k] = load_relaxed(&words[((from + i * apart) * COUNT + k) * lines + line]);
        float max = mine.max[0];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            other[i].clear();
            if (from + i * apart < team)
#pragma unroll
                for (int k = 0; k < COUNT; k++) {
                    while (word[i][k] == EMPTY)
                        word[i][k] = load_relaxed(&words[((from + i * apart) * COUNT + k) * lines + line]);
                    other[i].value(k, 0) = __uint_as_float(word[i][k]);
                }
            max = fmaxf(max, other[i].max[0]);
        }
        if (Job::HAS_MAX)
            mine.rebase(0, max);
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            if (Job::HAS_MAX)
                other[i].rebase(0, max);
#pragma unroll
            for (int k = 0; k < Job::SUMS; k++)
                mine.sum[k][0] += other[i].sum[k][0];
        }
    }
    combine_statistics<Job, 1>(mine, lines, shared);
}

template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM)
    team_softmax(const Job job, const Cut cut, unsigned *words) {
    typedef Pack<typename Job::T, Job::N> P;
    constexpr int THREADS = Job::THREADS, CHUNK = Job::CHUNK, INPUTS = Job::INPUTS, LINES = Job::LINES,
                  HELD = Job::HELD;
    extern __shared__ uint4 kept_memory[];
    __shared__ TeamShared<Job> shared;
    P *const kept = reinterpret_cast<P *>(kept_memory) + threadIdx.x; /* the thread's own places: every THREADS-th */

    const int column = threadIdx.x % cut.across, first = threadIdx.x / cut.across, step = THREADS / cut.across;
    const int64_t strip = cut.team == 1 ? blockIdx.x : blockIdx.x / cut.team;
    const int rank = static_cast<int>(blockIdx.x - strip * cut.team);
    const int64_t begin = rank * cut.share, left = cut.rows - begin,
                  rows = left < 0           ? 0
                         : left < cut.share ? left
                                            : cut.share;
    /* A thread's items are `step` rows apart: HELD, then those kept, then those that are read twice. */
    const int steps = (int)ceil_div(rows, (int64_t)step), items = (int)((rows - first + step - 1) / step);
    const int on_chip = steps < HELD + cut.kept ? steps : HELD + cut.kept,
              chunks = on_chip > HELD ? ceil_div(on_chip - HELD, CHUNK) : 0;
    const typename Job::Place place = job.locate(strip, column, cut.across, begin + first);

    /* Where the chunk from item k on lies. */
    const auto chunk_at = [&](int k) {
        Chunk<Job> chunk;
        chunk.down = (int64_t)k * step;
        chunk.row = begin + first + chunk.down;
        chunk.step = step;
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            chunk.has[i] = k + i < items && place.active;
        return chunk;
    };
    const auto load = [&](const Chunk<Job> &chunk, int i, int input, bool again) {
        const typename Job::T *const from = job.source(place, input, chunk.down + i * step);
        return !chunk.has[i] ? job.blank(input)
               : again       ? load_l2<typename Job::T, Job::N>(from)
                             : load_once<typename Job::T, Job::N>(from);
    };

    const auto take_kept = [&](Chunk<Job> &chunk, int c) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
#pragma unroll
            for (int input = 0; input < INPUTS; input++)
                chunk.item[i].in[input] = kept[((c * CHUNK + i) * INPUTS + input) * THREADS];
    };
    const auto read_again = [&](Chunk<Job> &chunk) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
#pragma unroll
            for (int input = 0; input < INPUTS; input++)
                chunk.item[i].in[input] = load(chunk, i, input, true);
    };

    Item<Job> held[HELD > 0 ? HELD : 1];
#pragma unroll
    for (int k = 0; k < HELD; k += CHUNK) {
        const Chunk<Job> chunk = chunk_at(k);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
#pragma unroll
            for (int input = 0; input < INPUTS; input++)
                held[k + i].in[input] = load(chunk, i, input, false);
    }
    for (int c = 0; c < chunks; c++) {
        const Chunk<Job> chunk = chunk_at(HELD + c * CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
#pragma unroll
            for (int input = 0; input < INPUTS; input++) {
                P *const to = &kept[((c * CHUNK + i) * INPUTS + input) * THREADS];
                if (chunk.has[i])
                    copy_async(to, job.source(place, input, chunk.down + i * step));
                else
                    *to = job.blank(input);
            }
        copy_commit();
    }

    StatisticsOf<Job> statistics;
    statistics.clear();
    job.prepare(shared.table, strip, cut.across);
#pragma unroll
    for (int k = 0; k < HELD; k += CHUNK) {
        Chunk<Job> chunk = chunk_at(k);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            chunk.item[i] = held[k + i];
        job.accumulate(statistics, chunk, place, shared.table);
        if constexpr (Job::REPLACES)
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                held[k + i] = chunk.item[i];
    }
    for (int c = 0; c < chunks; c++) {
        Chunk<Job> chunk = chunk_at(HELD + c * CHUNK);
        copy_wait_all_but(chunks - 1 - c);
        take_kept(chunk, c);
        job.accumulate(statistics, chunk, place, shared.table);
        if constexpr (Job::REPLACES)
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
#pragma unroll
                for (int input = 0; input < INPUTS; input++)
                    kept[((c * CHUNK + i) * INPUTS + input) * THREADS] = chunk.item[i].in[input];
    }
    for (int k = HELD + cut.kept; k < steps; k += CHUNK) {
        Chunk<Job> chunk = chunk_at(k);
        read_again(chunk);
        job.accumulate(statistics, chunk, place, shared.table);
    }

    combine_statistics<Job>(statistics, cut.across, shared);
    if (cut.team > 1) {
        const int lines = cut.across * LINES;
        combine_team<Job>(cut.team, rank, lines, words + strip * cut.team * StatisticsOf<Job>::COUNT * lines, shared);
    }
#pragma unroll
    for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
#pragma unroll
        for (int j = 0; j < LINES; j++)
            statistics.value(k, j) = shared.total[k][column * LINES + j];
    job.conclude(statistics, strip, column, cut.across, place.active && rank == 0 && first == 0);

#pragma unroll
    for (int k = 0; k < HELD; k += CHUNK) {
        Chunk<Job> chunk = chunk_at(k);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            chunk.item[i] = held[k + i];
        job.template finish<Job::REPLACES>(statistics, chunk, place, shared.table);
    }
    for (int c = 0; c < chunks; c++) {
        Chunk<Job> chunk = chunk_at(HELD + c * CHUNK);
        take_kept(chunk, c);
        job.template finish<Job::REPLACES>(statistics, chunk, place, shared.table);
    }
    for (int k = HELD + cut.kept; k < steps; k += CHUNK) {
        Chunk<Job> chunk = chunk_at(k);
        read_again(chunk);
        job.template finish<false>(statistics, chunk, place, shared.table);
    }
}

/* ---- how to cut
 * ------------------------------------------------------------------------------------------------------------- */

/* Teams as small as can keep a strip on chip, or as large as leaves no multiprocessor idle; never more than
 * `most_team`, nor than an eighth of the blocks that run at a time: see above. */
template <class Job>
static inline Cut cut_into_teams(const rafter_cuda_state *state, int64_t strips, int64_t rows, int across,
                                 int64_t most_team) {
    const int64_t item = (int64_t)Job::INPUTS * Job::N * sizeof(typename Job::T), step = Job::THREADS / across;
    const int64_t room = (state->shared_bytes + 1024) / Job::PER_SM - 1024 - (int64_t)sizeof(TeamShared<Job>);
    const int64_t most_kept = room / (Job::THREADS * item) / Job::CHUNK * Job::CHUNK;
    const int64_t blocks = (int64_t)state->multiprocessors * Job::PER_SM, steps = ceil_div(rows, step);
    const int64_t keeps = ceil_div(steps, Job::HELD + most_kept),
                  idle = blocks / strips < steps ? blocks / strips : steps;
    int64_t team = keeps > idle ? keeps : idle;
    team = team < most_team ? team : most_team;
    team = team < blocks / 8 ? team : blocks / 8 > 0 ? blocks / 8 : 1;
    const int64_t share = ceil_div(steps, team) * step, left = share / step - Job::HELD;
    const int64_t kept = left <= 0          ? 0
                         : left < most_kept ? ceil_div(left, (int64_t)Job::CHUNK) * Job::CHUNK
                                            : most_kept;
    return {strips, rows, share, across, (int)ceil_div(rows, share), (int)kept};
}

/* Words of scratch memory where blocks meet, in bytes; and the launch. */
template <class Job> static inline size_t team_scratch(const Cut &cut) {
    const size_t words = (size_t)cut.team * StatisticsOf<Job>::COUNT * cut.across * Job::LINES;
    return cut.team == 1 ? 0 : cut.strips * words * sizeof(unsigned);
}

template <class Job>
static inline void launch_teams(const rafter_context *context, const Job &job, const Cut &cut, char *scratch) {
    const size_t shared = (size_t)cut.kept * Job::INPUTS * Job::THREADS * Job::N * sizeof(typename Job::T);
    if (cut.team > 1)
        cudaMemsetAsync(scratch, 0xff, team_scratch<Job>(cut), context->cuda_state->stream); /* EMPTY */
    launch(context, {cut.strips * cut.team, Job::THREADS, shared}, team_softmax<Job>, job, cut,
           reinterpret_cast<unsigned *>(scratch));
}

#endif
