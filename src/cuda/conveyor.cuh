/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax over lines down a dimension, every byte of it read once: for jobs of cuda/strips.cuh whose strips are 128
 * bytes across and have many chunks, on GPUs that have a copy engine (Hopper and later).
 *
 * One block to a multiprocessor stays there and works on tiles, a tile being a chunk of a strip, which the copy engine
 * brings into a ring of slots in shared memory. Tiles are numbered strip by strip and handed out to blocks in that
 * order: while some are brought, others wait until the statistics of their strip are known, to which all blocks
 * contribute. The warps of a block share the work by kind:
 *
 *     mover       brings a tile into every slot that is free, and has L2 fetch the one of a turn of all blocks later:
 *                 memory is read while blocks wait for each other, and slots are full sooner
 *     statistics  THREADS of them: those of each tile
 *     reporter    combines these and writes them to scratch memory
 *     merger      waits for those of a whole strip and publishes what they amount to: some lines of every so-many-th
 *                 strip
 *     results     GROUPS times THREADS, that take tiles in turns: a tile waits in their registers for what is published
 *                 about its strip, while its slot is free for another
 *
 * Words in scratch memory say by themselves whether they have been written (EMPTY), so that nobody counts arrivals:
 * a fence of the whole device would take longer than a tile.
 *
 * Nobody waits for ever. Take the first strip that is not published, and a tile of it that has not been reported. If a
 * block has taken it, it is in a slot, and all that is ahead of it are its copy, and warps that take tiles in order and
 * wait for nothing else. If nobody has taken it, every slot of every block is full, or will be: a block fills its slots
 * for the first time without waiting. One that holds a tile of an earlier strip will be free, since that is published.
 * So all would have to hold tiles of this strip, which has no more of them than there are slots (conveyor_pays): the
 * one that nobody has taken would not exist. This wants all blocks to run at the same time, whatever else is on the
 * device: two such kernels on half of the multiprocessors each would wait for each other's other half. So the launch is
 * a cooperative one, which starts when there is room for all of its blocks; and there is one to a multiprocessor, which
 * is what fits.
 */
#ifndef RAFTER_CUDA_CONVEYOR_CUH
#define RAFTER_CUDA_CONVEYOR_CUH

#include "cuda/hopper.cuh"
#include "cuda/strips.cuh"
#include "cuda/tensor_map.cuh"

/* Where a strip begins in the tensors of the inputs, which have one shape: job.corner(strip). */
struct Corner {
    int column, outer[3];
};

/* Of each input, with boxes of a tile. */
template <class Job> struct Tensors { CUtensorMap map[Job::INPUTS]; };

struct ConveyorCut {
    int64_t rows; /* of a strip */
    unsigned strips, tiles;
    Divisor chunks; /* of a strip */
    int lanes;      /* of a merger that lie side by side, four lines each: a power of two */
    bool in_turn;   /* tiles go to blocks in turn, else, but for the first ones, to whoever comes first */
    unsigned ahead; /* tiles from one that is brought to the one that L2 fetches; 0: it fetches none */
};

/* Where blocks meet: words that are EMPTY until they are written. */
struct ConveyorMeeting {
    unsigned *merged, *statistics; /* [strip or tile][statistic][line] */
    unsigned *taken;               /* tiles that went to whoever came first, less one */
};

template <class Job> struct Conveyor {
    static constexpr int ACROSS_LOG2 = 3, ACROSS = 1 << ACROSS_LOG2, STEP = Job::THREADS / ACROSS;
    static constexpr int LINES = ACROSS * Job::LINES, COUNT = StatisticsOf<Job>::COUNT, WORDS = COUNT * LINES;
    static constexpr int ITEMS = Job::INPUTS == 1 ? 8 : 4, ROWS = ITEMS * STEP;  /* of a thread, of a tile */
    static constexpr int TILE = ITEMS * Job::THREADS, SLOT = Job::INPUTS * TILE; /* packs */
    static constexpr int GROUPS = 2;
    static constexpr int MOVER = 0, MERGER = 1, REPORTER = 2, FIRST_WARP = 3; /* warps */
    static constexpr int STAGE = Job::THREADS / WARP, THREADS = (FIRST_WARP + (1 + GROUPS) * STAGE) * WARP;
    static_assert(Job::N * sizeof(typename Job::T) == 16 && LINES == Job::MOST_LINES && LINES % WARP == 0 &&
                      __is_empty(typename Job::Table),
                  "what this file is for");

    typedef Pack<typename Job::T, Job::N> P;
    struct alignas(128) Slot {
        P tile[SLOT];
        Area<Job> area;
    };
    /* A block may have 227 KB, of which ConveyorShared takes some. */
    static constexpr int SLOTS = (223 << 10) / (int)sizeof(Slot);
    static constexpr size_t SHARED_BYTES = SLOTS * sizeof(Slot) + alignof(Slot);
    /* So that whoever waits for a slot's next tile has seen the last one: of a barrier's phases only the parity shows.
     */
    static_assert(SLOTS % GROUPS == 0, "a slot's tiles go to one group");
};

template <class Job> struct ConveyorShared {
    typedef Conveyor<Job> C;
    alignas(16) float total[C::GROUPS][2][C::COUNT][C::LINES];  /* of a group's tile, and of the one before */
    uint64_t full[C::SLOTS], counted[C::SLOTS], done[C::SLOTS]; /* there; its area is full; used up by all */
    int tile[C::SLOTS];                                         /* its number; NONE: there are no more */
};

constexpr int NONE = -1;

/* Calls f(slot, tile, parity of the slot's barriers) for every `step`-th of this block's tiles, in order, from `first`
 * on. */
template <class C, class Shared, class F> DEVICE void for_tiles(Shared &shared, int first, int step, F f) {
    for (int turn = first;; turn += step) {
        const int slot = turn % C::SLOTS;
        barrier_wait(&shared.full[slot], turn / C::SLOTS & 1);
        const int tile = shared.tile[slot];
        if (tile == NONE)
            return;
        f(slot, (unsigned)tile, (unsigned)turn / C::SLOTS & 1);
    }
}

/* A thread's items of a tile, in registers. */
template <class Job> struct HeldItems {
    typedef Conveyor<Job> C;
    typename C::P held[C::ITEMS][Job::INPUTS];
    int64_t down = 0; /* from the place's first row */
    int count, step = C::STEP;

    /* left: rows of the strip from the thread's first on. */
    DEVICE HeldItems(const typename C::P *tile, int thread, int64_t left) {
#pragma unroll
        for (int i = 0; i < C::ITEMS; i++)
#pragma unroll
            for (int input = 0; input < Job::INPUTS; input++)
                held[i][input] = tile[input * C::TILE + i * Job::THREADS + thread];
        count = left > C::ROWS - C::STEP ? C::ITEMS : left > 0 ? ((int)left - 1) / C::STEP + 1 : 0;
    }
    DEVICE const typename C::P &in(int i, int input) const {
        return held[i][input];
    }
    template <int, class F> DEVICE void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < C::ITEMS; i++)
            if (i < count)
                f(i);
    }
    /* 0, but not before all of the warp's items have come. To be added to the address of a barrier: an arrival would
     * not wait for loads by itself, and the next tile has been seen to overtake them. gridDim.y is 1, which the
     * compiler does not know. */
    DEVICE unsigned come() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < C::ITEMS; i++)
#pragma unroll
            for (int input = 0; input < Job::INPUTS; input++)
                bits |= reinterpret_cast<const unsigned &>(held[i][input]);
        return __ballot_sync(~0u, (bits & (gridDim.y - 1)) != 0);
    }
};

/* Where a thread's part of a tile is. */
template <class Job> struct TilePart {
    typedef Conveyor<Job> C;
    typename Job::Place place;
    int64_t left; /* rows of the strip from the part's first on; 0 where there is no part */

    DEVICE TilePart(const Job &job, const ConveyorCut &cut, unsigned tile, int thread) {
        const unsigned index = cut.chunks.quotient(tile), chunk = tile - index * cut.chunks.number;
        const int64_t row = (int64_t)chunk * C::ROWS + thread / C::ACROSS;
        place = job.locate(job.strip_at(index), thread % C::ACROSS, row);
        left = place.active ? cut.rows - row : 0;
    }
};

/* Four neighbouring words; `there`: whether all have been written. */
DEVICE uint4 load_flagged(const unsigned *p, bool *there) {
    uint4 w;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p)
                 : "memory");
    *there = w.x != EMPTY && w.y != EMPTY && w.z != EMPTY && w.w != EMPTY;
    return w;
}

/* Calls f(input, corner, row) for each input's box of a tile. */
template <class Job, class F> DEVICE void for_boxes(const Job &job, const ConveyorCut &cut, unsigned tile, F f) {
    const unsigned index = cut.chunks.quotient(tile), chunk = tile - index * cut.chunks.number;
    const typename Job::Strip strip = job.strip_at(index);
#pragma unroll
    for (int input = 0; input < Job::INPUTS; input++) {
        const Corner at = job.corner(strip); /* here: outside, it makes the kernel 6 % longer */
        f(input, at, (int)(chunk * Conveyor<Job>::ROWS));
    }
}

/* Brings tiles into slots, by one thread. */
template <class Job>
DEVICE void move_tiles(const Tensors<Job> &tensors, const Job &job, const ConveyorCut &cut,
                       const ConveyorMeeting &meeting, typename Conveyor<Job>::Slot *slots,
                       ConveyorShared<Job> &shared) {
    typedef Conveyor<Job> C;
    const unsigned first_turn = C::SLOTS * gridDim.x; /* tiles */
    for (unsigned turn = 0;; turn++)
        for (int slot = 0; slot < C::SLOTS; slot++) {
            if (turn > 0) {
                if (shared.tile[slot] == NONE)
                    return;
                barrier_wait(&shared.done[slot], (turn - 1) & 1);
            }
            const unsigned tile = turn == 0 || cut.in_turn ? blockIdx.x + (turn * C::SLOTS + slot) * gridDim.x
                                                           : first_turn + atomicAdd(meeting.taken, 1) + 1;
            if (tile >= cut.tiles) {
                shared.tile[slot] = NONE;
                barrier_arrive(&shared.full[slot]);
                continue;
            }
            shared.tile[slot] = (int)tile;
            barrier_expect(&shared.full[slot], C::SLOT * 16);
            for_boxes(job, cut, tile, [&](int input, const Corner &at, int row) {
                copy_box(slots[slot].tile + input * C::TILE, &tensors.map[input], at.column, row, at.outer,
                         &shared.full[slot]);
            });
            const unsigned soon = tile + cut.ahead;
            if (cut.ahead > 0 && soon >= first_turn && soon < cut.tiles)
                for_boxes(job, cut, soon, [&](int input, const Corner &at, int row) {
                    prefetch_box(&tensors.map[input], at.column, row, at.outer);
                });
        }
}

/* Merges the statistics of strips, by a warp: of every gridDim.x-th part of one. */
template <class Job> DEVICE void merge_tiles(const Job &job, const ConveyorCut &cut, const ConveyorMeeting &meeting) {
    typedef Conveyor<Job> C;
    constexpr int AT_A_TIME = 4, COUNT = C::COUNT;
    const int lane = threadIdx.x % WARP, lanes = cut.lanes, groups = WARP / lanes, parts = C::LINES / 4 / lanes;
    const unsigned chunks = cut.chunks.number;
    for (unsigned part = blockIdx.x; part < cut.strips * parts; part += gridDim.x) {
        const unsigned index = part / parts, first = ((part - index * parts) * lanes + lane % lanes) * 4;
        const unsigned *const from = meeting.statistics + (int64_t)index * chunks * C::WORDS + first;
        if (lane == 0) /* the last to come, most likely: asking for all of them holds up what is asked for */
            while (load_relaxed(from + (int64_t)(chunks - 1) * C::WORDS) == EMPTY)
                ;
        __syncwarp();
        Statistics<4, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
        mine.clear();
        for (unsigned chunk = lane / lanes; chunk < chunks; chunk += groups * AT_A_TIME) {
            bool missing[AT_A_TIME], any = true;
#pragma unroll
            for (int i = 0; i < AT_A_TIME; i++) {
                other[i].clear();
                missing[i] = chunk + i * groups < chunks;
            }
            while (any) {
                any = false;
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++)
                    if (missing[i]) {
                        missing[i] = false;
#pragma unroll
                        for (int k = 0; k < COUNT; k++) {
                            bool there;
                            const uint4 four =
                                load_flagged(from + (int64_t)(chunk + i * groups) * C::WORDS + k * C::LINES, &there);
                            other[i].value(k, 0) = __uint_as_float(four.x);
                            other[i].value(k, 1) = __uint_as_float(four.y);
                            other[i].value(k, 2) = __uint_as_float(four.z);
                            other[i].value(k, 3) = __uint_as_float(four.w);
                            missing[i] |= !there;
                        }
                        any |= missing[i];
                    }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) { /* one maximum for all, so that no exponential waits for another */
                if constexpr (Job::HAS_MAX) {
                    float top = mine.max[j];
#pragma unroll
                    for (int i = 0; i < AT_A_TIME; i++)
                        top = fmaxf(top, other[i].max[j]);
                    mine.rebase(j, top);
#pragma unroll
                    for (int i = 0; i < AT_A_TIME; i++)
                        other[i].rebase(j, top);
                }
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++)
#pragma unroll
                    for (int k = 0; k < Job::SUMS; k++)
                        mine.sum[k][j] += other[i].sum[k][j];
            }
        }
        __syncwarp();
        for (int apart = lanes; apart < WARP; apart *= 2) {
#pragma unroll
            for (int k = 0; k < COUNT; k++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    other[0].value(k, j) = __shfl_xor_sync(~0u, mine.value(k, j), apart);
#pragma unroll
            for (int j = 0; j < 4; j++)
                mine.add(j, other[0], j);
        }
        if (lane < lanes) {
            const typename Job::Strip strip = job.strip_at(index);
            unsigned *const to = meeting.merged + (int64_t)index * C::WORDS + first;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                Statistics<1, Job::HAS_MAX, Job::SUMS> line;
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    line.value(k, 0) = mine.value(k, j);
                conclude(job, line, strip, (int)first + j,
                         [&](int k, float value) { store_flagged(to + k * C::LINES + j, value); });
            }
        }
    }
}

template <class Job>
__global__ void __launch_bounds__(Conveyor<Job>::THREADS, 1)
    conveyor(const __grid_constant__ Tensors<Job> tensors, const Job job, const ConveyorCut cut,
             const ConveyorMeeting meeting) {
#if __CUDA_ARCH__ >= 900
    typedef Conveyor<Job> C;
    extern __shared__ uint4 staged_memory[];
    __shared__ ConveyorShared<Job> shared;
    constexpr unsigned ALIGNED = alignof(typename C::Slot);
    typename C::Slot *const slots = reinterpret_cast<typename C::Slot *>(
        reinterpret_cast<char *>(staged_memory) + (ALIGNED - shared_address(staged_memory) % ALIGNED) % ALIGNED);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < C::SLOTS; slot++) {
            barrier_init(&shared.full[slot], 1);
            barrier_init(&shared.counted[slot], C::STAGE * WARP);
            barrier_init(&shared.done[slot], (C::STAGE + 1 + C::STAGE) * WARP);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warp == C::MOVER) {
        if (lane == 0)
            move_tiles(tensors, job, cut, meeting, slots, shared);
    } else if (warp == C::MERGER) {
        merge_tiles(job, cut, meeting);
    } else if (warp == C::REPORTER) {
        for_tiles<C>(shared, 0, 1, [&](int slot, unsigned tile, unsigned parity) {
            unsigned *const to = meeting.statistics + (int64_t)tile * C::WORDS;
            barrier_wait(&shared.counted[slot], parity);
#pragma unroll
            for (int line = lane; line < C::LINES; line += WARP) {
                auto all = combine_area(slots[slot].area, C::ACROSS_LOG2, C::LINES, line);
#pragma unroll
                for (int k = 0; k < C::COUNT; k++)
                    store_flagged(to + k * C::LINES + line, all.value(k, 0));
            }
            barrier_arrive(&shared.done[slot]);
        });
    } else if (warp < C::FIRST_WARP + C::STAGE) { /* statistics */
        const int thread = (int)threadIdx.x - C::FIRST_WARP * WARP;
        for_tiles<C>(shared, 0, 1, [&](int slot, unsigned tile, unsigned) {
            const TilePart<Job> part(job, cut, tile, thread);
            const HeldItems<Job> items(slots[slot].tile, thread, part.left);
            StatisticsOf<Job> mine;
            mine.clear();
            job.template accumulate<true>(mine, items, part.place, typename Job::Table());
            __syncwarp();
            combine_warp<Job>(mine, thread, C::ACROSS_LOG2, slots[slot].area);
            barrier_arrive(&shared.counted[slot]);
            barrier_arrive(&shared.done[slot]);
        });
    } else { /* results */
        const int group = (warp - C::FIRST_WARP) / C::STAGE - 1;
        const int thread = (int)threadIdx.x - (C::FIRST_WARP + (1 + group) * C::STAGE) * WARP;
        int odd = 0;
        for_tiles<C>(shared, group, C::GROUPS, [&](int slot, unsigned tile, unsigned) {
            const TilePart<Job> part(job, cut, tile, thread);
            const HeldItems<Job> items(slots[slot].tile, thread, part.left);
            barrier_arrive(&shared.done[slot] + items.come());

            float(&total)[C::COUNT][C::LINES] = shared.total[group][odd];
            const unsigned *const from = meeting.merged + (int64_t)cut.chunks.quotient(tile) * C::WORDS;
            for (int i = thread; i < C::WORDS / 4; i += Job::THREADS) {
                bool there;
                uint4 four = load_flagged(from + 4 * i, &there);
                while (!there) {
                    __nanosleep(200); /* asking without a break takes 1 % longer */
                    four = load_flagged(from + 4 * i, &there);
                }
                reinterpret_cast<uint4 *>(total)[i] = four;
            }
            __syncwarp(); /* bar.sync counts a warp whose lanes come one by one more than once */
            asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(Job::THREADS) : "memory");
            job.finish(total, items, part.place, typename Job::Table());
            odd ^= 1;
        });
    }
#else
    (void)tensors, (void)job, (void)cut, (void)meeting;
#endif
}

/* ---- how to cut ------------------------------------------------------------------------------ */

template <class Job>
static inline ConveyorCut cut_for_conveyor(const rafter_cuda_state *state, int64_t strips, int64_t rows) {
    typedef Conveyor<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    ConveyorCut cut;
    cut.rows = rows;
    cut.strips = (unsigned)strips;
    cut.tiles = (unsigned)(strips * chunks);
    cut.chunks = Divisor(chunks);
    /* Few lines where there are many chunks, so that most of them are under way at once. In turn where there are few:
     * then blocks end together, and asking costs more than waiting for each other. Ahead where there are many: else
     * blocks hardly wait. All by measurement. */
    cut.lanes = C::LINES / 4 < WARP ? C::LINES / 4 : WARP;
    while (cut.lanes > 2 * C::COUNT && chunks * cut.lanes > 8 * WARP)
        cut.lanes /= 2;
    cut.in_turn = chunks <= 16;
    cut.ahead = chunks >= (Job::INPUTS == 1 ? 16 : 128) ? (unsigned)state->multiprocessors : 0;
    return cut;
}

/* Whether strips are longer than those that a block of strips.cuh does as fast by itself, whether there are slots
 * enough (the comment on top), and whether this build and device have the kernel: without sm_90 its body is empty, and
 * so is its shared memory. */
template <class Job>
static inline bool conveyor_pays(const rafter_cuda_state *state, int64_t strips, int64_t rows, int across) {
    typedef Conveyor<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    if (across != C::ACROSS || state->compute_capability < 90 || !state->cooperative || !hopper_allowed() ||
        (int64_t)(C::SHARED_BYTES + sizeof(ConveyorShared<Job>)) > state->shared_bytes || rows > INT32_MAX ||
        strips * chunks > INT32_MAX / 2 || rows <= 2 * Job::ITEMS * C::STEP / Job::INPUTS ||
        chunks > (int64_t)state->multiprocessors * C::SLOTS)
        return false;
    static const bool built = [] {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, conveyor<Job>) == cudaSuccess && attributes.sharedSizeBytes > 0;
    }();
    return built;
}

/* Maps an input of a job: `dims` dimensions, two to five, as make_tensor_map has them, the first two being columns and
 * rows. False where the copy engine cannot address it. */
template <class Job>
static inline bool map_tiles(Tensors<Job> *tensors, int input, const rafter_view &view, int dims, const int64_t *sizes,
                             const int64_t *strides) {
    int64_t size[5] = {1, 1, 1, 1, 1}, stride[4];
    for (int d = 0; d < dims; d++)
        size[d] = sizes[d];
    for (int d = 0; d < 4; d++) {
        stride[d] = size[d + 1] > 1 ? strides[d] : Job::N; /* of one of size 1, any that a map may have */
        if (size[d] > INT32_MAX || size[d + 1] > INT32_MAX || stride[d] == 0)
            return false;
    }
    return make_tensor_map(&tensors->map[input], view.dtype, view.data, 5, size, stride,
                           {Conveyor<Job>::ACROSS * Job::N, Conveyor<Job>::ROWS}, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

/* Scratch memory: merged statistics, those of tiles, and one more word. */
template <class Job> static inline size_t conveyor_bytes(const ConveyorCut &cut) {
    return ((size_t)(cut.strips + cut.tiles) * Conveyor<Job>::WORDS + 1) * sizeof(unsigned);
}

template <class Job>
static inline void launch_conveyor(const rafter_context *context, const Tensors<Job> &tensors, const Job &job,
                                   const ConveyorCut &cut, char *scratch) {
    typedef Conveyor<Job> C;
    cudaMemsetAsync(scratch, 0xff, conveyor_bytes<Job>(cut), context->cuda_state->stream); /* EMPTY, and -1 */
    unsigned *const words = reinterpret_cast<unsigned *>(scratch), *const tiles = words + (size_t)cut.strips * C::WORDS;
    const ConveyorMeeting meeting = {words, tiles, tiles + (size_t)cut.tiles * C::WORDS};
    const int64_t most = context->cuda_state->multiprocessors;
    Launch how = {cut.tiles < most ? cut.tiles : most, C::THREADS, C::SHARED_BYTES};
    how.together = true;
    launch(context, how, conveyor<Job>, tensors, job, cut, meeting);
}

#endif
