/*
 * Softmax over lines too long for a warp, with each input read from memory once.
 *
 * A strip is a bundle of neighbouring lines (columns), or one line (rows): what is normalised together. A team of
 * blocks takes a strip, each block a share of its rows, and keeps that share in shared memory between the statistics
 * and the result. Every thread copies in, asynchronously, the packs that it alone will use: no barrier guards them, and
 * as soon as a pack has gone into the result, its place is filled with the team's next strip. Blocks of a team merge
 * their statistics through scratch memory; the last one to arrive does it, in the order of the blocks, and the others
 * wait. Meanwhile the other teams keep the memory busy, which is why there should be three of them or more. What a
 * block cannot keep it reads twice. A team of one block needs no scratch memory and waits for nobody.
 *
 * What the lines hold and what becomes of them is a Job's affair:
 *
 *     T, N              storage type; elements of a pack
 *     LINES             lines of a thread: N down columns, 1 along a row
 *     MOST_LINES        lines of a strip
 *     INPUTS            packs that make an item
 *     HAS_MAX, SUMS     statistics of a line: a maximum or none, and sums, relative to the maximum if there is one
 *     THREADS, PER_SM   of a block; blocks that a multiprocessor holds
 *     CHUNK             items that a thread takes into registers at a time
 *     REPLACES          whether accumulate() replaces an item by something dearer to compute, for finish() to start
 * from Place             where a thread's items are Table             what a block wants to share about a strip
 *
 *     locate(strip, column, across, row)   the thread's Place in a strip, its first row being `row`
 *     prepare(table, strip, across)        fills the Table
 *     source(place, input, down)           address of a pack, `down` rows below the place's first
 *     blank(input)                         what stands for an input that is not there
 *     accumulate(statistics, items, ...)   adds a chunk to the thread's statistics
 *     finish(statistics, items, ...)       writes the results of a chunk from those of the whole lines
 *     conclude(statistics, ...)            turns statistics of whole lines into what finish() wants; one thread is told
 * that it speaks for its lines
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
    int team, teams;      /* blocks to a team */
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
    bool is_last;
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

/* shared.total of all blocks of the team, combined, into shared.total of each. Three counters and, in scratch memory,
 * COUNT * lines floats for each block and for the result belong to the team; `round` counts its strips. */
template <class Job>
DEVICE void combine_team(const Cut &cut, int rank, unsigned round, int lines, float *scratch, unsigned *counters,
                         TeamShared<Job> &shared) {
    constexpr int COUNT = StatisticsOf<Job>::COUNT, AT_A_TIME = 8;
    const int t = threadIdx.x, line = t % lines;
    float *const result = scratch + (int64_t)cut.team * COUNT * lines;
    unsigned *const arrived = counters, *const published = counters + 1;

    if (t < lines)
        for (int k = 0; k < COUNT; k++)
            __stcg(&scratch[((int64_t)k * cut.team + rank) * lines + t], shared.total[k][t]);
    __syncthreads();
    if (t == 0) {
        __threadfence();
        shared.is_last = atomicAdd(arrived, 1) == (round + 1) * cut.team - 1;
        __threadfence();
    }
    __syncthreads();
    if (!shared.is_last) {
        if (t == 0)
            while (load_acquire(published) <= round)
                __nanosleep(32);
        __syncthreads();
        if (t < lines)
            for (int k = 0; k < COUNT; k++)
                shared.total[k][t] = __ldcg(&result[k * lines + t]);
        __syncthreads();
        return;
    }

    Statistics<1, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
    mine.clear();
    const int apart = Job::THREADS / lines;
    for (int from = t / lines; from < cut.team; from += apart * AT_A_TIME) {
        float max = mine.max[0];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            const int block = from + i * apart;
            other[i].clear();
            if (block < cut.team)
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    other[i].value(k, 0) = __ldcg(&scratch[((int64_t)k * cut.team + block) * lines + line]);
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++)
            max = fmaxf(max, other[i].max[0]);
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
    if (t < lines)
        for (int k = 0; k < COUNT; k++)
            __stcg(&result[k * lines + t], shared.total[k][t]);
    __syncthreads();
    if (t == 0) {
        __threadfence();
        store_release(published, round + 1);
    }
}

template <class Job>
__global__ void __launch_bounds__(Job::THREADS, Job::PER_SM)
    team_softmax(const Job job, const Cut cut, float *scratch, unsigned *counters) {
    typedef Pack<typename Job::T, Job::N> P;
    constexpr int THREADS = Job::THREADS, CHUNK = Job::CHUNK, INPUTS = Job::INPUTS, LINES = Job::LINES;
    extern __shared__ uint4 kept_memory[];
    __shared__ TeamShared<Job> shared;
    P *const kept = reinterpret_cast<P *>(kept_memory) + threadIdx.x; /* the thread's own places: every THREADS-th */

    const int column = threadIdx.x % cut.across, first = threadIdx.x / cut.across, step = THREADS / cut.across;
    const int team = blockIdx.x / cut.team, rank = blockIdx.x % cut.team, lines = cut.across * LINES;
    const int64_t begin = rank * cut.share, left = cut.rows - begin,
                  rows = left < 0           ? 0
                         : left < cut.share ? left
                                            : cut.share;
    const int steps = (int)ceil_div(rows, (int64_t)step),
              items = (int)((rows - first + step - 1) / step); /* block's, own */
    const int chunks = ceil_div(steps < cut.kept ? steps : cut.kept, CHUNK);
    scratch += (int64_t)team * (cut.team + 1) * StatisticsOf<Job>::COUNT * lines;
    counters += team * 3;

    /* Asks for chunk c of a strip. */
    const auto ask = [&](const typename Job::Place &place, int c) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const int k = c * CHUNK + i;
            if (k < items && place.active)
#pragma unroll
                for (int input = 0; input < INPUTS; input++)
                    copy_async(&kept[(k * INPUTS + input) * THREADS], job.source(place, input, k * step));
        }
        copy_commit();
    };
    /* Takes kept items from the k-th on into registers; others are read from where they came. */
    const auto take = [&](const typename Job::Place &place, int k, Chunk<Job> &chunk) {
        chunk.down = k * step;
        chunk.row = begin + first + chunk.down;
        chunk.step = step;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            chunk.has[i] = k + i < items && place.active;
#pragma unroll
            for (int input = 0; input < INPUTS; input++)
                chunk.item[i].in[input] = kept[((k + i) * INPUTS + input) * THREADS];
        }
    };
    const auto read = [&](const typename Job::Place &place, int k, Chunk<Job> &chunk) {
        chunk.down = (int64_t)k * step;
        chunk.row = begin + first + chunk.down;
        chunk.step = step;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            chunk.has[i] = k + i < items && place.active;
#pragma unroll
            for (int input = 0; input < INPUTS; input++)
                chunk.item[i].in[input] =
                    chunk.has[i] ? load_l2<typename Job::T, Job::N>(job.source(place, input, chunk.down + i * step))
                                 : job.blank(input);
        }
    };

    for (int k = 0; k < chunks * CHUNK; k++) /* what nothing is ever copied into stays blank */
        for (int input = 0; input < INPUTS; input++)
            kept[(k * INPUTS + input) * THREADS] = job.blank(input);
    typename Job::Place place = job.locate(team, column, cut.across, begin + first);
    for (int c = 0; c < chunks; c++)
        ask(place, c);
    unsigned round = 0;
    for (int64_t strip = team; strip < cut.strips; strip += cut.teams, round++) {
        StatisticsOf<Job> statistics;
        statistics.clear();
        job.prepare(shared.table, strip, cut.across);
        for (int c = 0; c < chunks; c++) {
            Chunk<Job> chunk;
            copy_wait_all_but(chunks - 1 - c);
            take(place, c * CHUNK, chunk);
            job.accumulate(statistics, chunk, place, shared.table);
            if constexpr (Job::REPLACES)
#pragma unroll
                for (int i = 0; i < CHUNK; i++)
                    if (chunk.has[i])
#pragma unroll
                        for (int input = 0; input < INPUTS; input++)
                            kept[((c * CHUNK + i) * INPUTS + input) * THREADS] = chunk.item[i].in[input];
        }
        for (int k = chunks * CHUNK; k < steps; k += CHUNK) {
            Chunk<Job> chunk;
            read(place, k, chunk);
            job.accumulate(statistics, chunk, place, shared.table);
        }

        combine_statistics<Job>(statistics, cut.across, shared);
        if (cut.team > 1)
            combine_team<Job>(cut, rank, round, lines, scratch, counters, shared);
#pragma unroll
        for (int k = 0; k < StatisticsOf<Job>::COUNT; k++)
#pragma unroll
            for (int j = 0; j < LINES; j++)
                statistics.value(k, j) = shared.total[k][column * LINES + j];
        job.conclude(statistics, strip, column, cut.across, place.active && rank == 0 && first == 0);

        const bool more = strip + cut.teams < cut.strips;
        const typename Job::Place next =
            job.locate(more ? strip + cut.teams : strip, column, cut.across, begin + first);
        for (int c = 0; c < chunks; c++) {
            Chunk<Job> chunk;
            take(place, c * CHUNK, chunk);
            job.template finish<Job::REPLACES>(statistics, chunk, place, shared.table);
            if (more)
                ask(next, c);
        }
        for (int k = chunks * CHUNK; k < steps; k += CHUNK) {
            Chunk<Job> chunk;
            read(place, k, chunk);
            job.template finish<false>(statistics, chunk, place, shared.table);
        }
        place = next;
    }
    /* The last block to leave sets the counters back. */
    if (cut.team > 1 && threadIdx.x == 0 && atomicAdd(counters + 2, 1) == cut.team - 1)
        counters[0] = counters[1] = counters[2] = 0;
}

/* ---- how to cut
 * ------------------------------------------------------------------------------------------------------------- */

struct Candidate {
    Cut cut;
    float cost; /* about the time, in units that only compare */
};

/* The better of two teams for strips of a given width: as small as one can be without reading twice, and as large as
 * leaves no block idle. An item moves `moved_bytes` through memory, in and out. */
template <class Job>
static inline Candidate cut_into_teams(const rafter_cuda_state *state, int64_t strips, int64_t rows, int across,
                                       int moved_bytes, int64_t most_team) {
    const int64_t item = (int64_t)Job::INPUTS * Job::N * sizeof(typename Job::T), step = Job::THREADS / across;
    const int64_t room = (state->shared_bytes + 1024) / Job::PER_SM - 1024 - (int64_t)sizeof(TeamShared<Job>);
    const int64_t most_kept = room / (Job::THREADS * item) / Job::CHUNK * Job::CHUNK,
                  blocks = (int64_t)state->multiprocessors * Job::PER_SM;
    const int64_t steps = ceil_div(rows, step), most = most_team < blocks ? most_team : blocks;
    const int64_t least = ceil_div(steps, most_kept) < most ? ceil_div(steps, most_kept) : most;
    const int64_t teams = blocks / least < strips ? blocks / least : strips;
    int64_t largest = blocks / teams < steps ? blocks / teams : steps;
    largest = largest < most ? largest : most;

    Candidate best = {{}, INFINITY};
    for (int64_t team = least;; team = largest) {
        const int64_t share = ceil_div(rows, team), share_steps = ceil_div(share, step);
        const int64_t kept =
            share_steps < most_kept ? ceil_div(share_steps, (int64_t)Job::CHUNK) * Job::CHUNK : most_kept;
        /* What a block moves for a strip, over its part of a multiprocessor's bandwidth, about 32 KB in a microsecond;
         * and what it waits for others, most of which is hidden where there are several teams. */
        const float read_twice = share_steps > kept ? (float)((share_steps - kept) * item) : 0.0f;
        const float bytes = (float)Job::THREADS * ((float)(share_steps * moved_bytes) + read_twice);
        const float neighbours = (float)ceil_div(team * teams, (int64_t)state->multiprocessors);
        const float wait = team == 1 ? 0.5f : teams >= 3 ? 1.0f : 4.0f;
        const float cost = (float)ceil_div(strips, teams) * (bytes * neighbours / 32e3f + wait);
        if (cost < best.cost)
            best = {{strips, rows, share, across, (int)team, (int)teams, (int)kept}, cost};
        if (team == largest)
            return best;
    }
}

/* What it costs that a row of a strip is so few bytes wide: memory is read by 32, and written by pages. */
static inline float narrowness(int64_t bytes) {
    return bytes >= 256   ? 1.0f
           : bytes >= 128 ? 1.03f
           : bytes >= 64  ? 1.1f
           : bytes >= 32  ? 1.3f
                          : 1.3f * 32.0f / (float)bytes;
}

/* Bytes of scratch memory, and the launch. */
template <class Job> static inline size_t team_scratch(const Cut &cut) {
    const size_t floats = (size_t)(cut.team + 1) * StatisticsOf<Job>::COUNT * cut.across * Job::LINES;
    return cut.team == 1 ? 0 : cut.teams * floats * sizeof(float);
}

template <class Job>
static inline void launch_teams(const rafter_context *context, const Job &job, const Cut &cut, char *scratch) {
    const size_t shared = (size_t)cut.kept * Job::INPUTS * Job::THREADS * Job::N * sizeof(typename Job::T);
    const Launch how = {(int64_t)cut.team * cut.teams, Job::THREADS, shared, cut.team > 1};
    launch(context, how, team_softmax<Job>, job, cut, reinterpret_cast<float *>(scratch),
           context->cuda_state->counters);
}

#endif
