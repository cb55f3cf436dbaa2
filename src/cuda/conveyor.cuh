/*
 * Softmax over lines down a dimension, every byte of it read once: for jobs of cuda/strips.cuh whose strips are 128
 * bytes across and have many chunks, on GPUs that have a copy engine (Hopper and later).
 *
 * One block to a multiprocessor stays there and works on tiles, a tile being a chunk of a strip, which the copy engine
 * brings into a ring of slots in shared memory. Tiles are numbered strip by strip, and are handed out to blocks in
 * that order: while one is brought, others wait in their slots until all tiles of their strip have been seen, by all
 * blocks together, and the oldest are turned into results. The warps of a block share the work by kind:
 *
 *     mover       brings a tile into every slot that is free
 *     tables      fills the job's Table for its strip, where there is one
 *     statistics  (THREADS of them) those of each tile, to scratch memory
 *     merger      those of whole strips, as soon as all their tiles are counted: some lines of every so-many-th strip
 *     fetcher     brings the merged statistics of a tile's strip into shared memory
 *     results     (THREADS) those of each tile, when these are there
 *
 * Nobody waits for ever. Take the first strip whose statistics are not complete, and a tile of it that has not been
 * seen. If a block has taken it, it is in a slot, and nothing but its copy and the warps for statistics, which take
 * tiles in order and wait for nothing else, are ahead of it. If nobody has taken it, every slot of every block is full.
 * One that holds a tile of an earlier strip will be free, since that strip is complete. So all would have to hold
 * tiles of this strip, which has no more of them than there are slots (conveyor_fits): the one nobody has taken would
 * not exist. All blocks have to run at once: there are no more than multiprocessors.
 */
#ifndef RAFTER_CUDA_CONVEYOR_CUH
#define RAFTER_CUDA_CONVEYOR_CUH

#include "cuda/hopper.cuh"
#include "cuda/strips.cuh"
#include "cuda/tensor_map.cuh"

/* Where a strip begins in the tensor of an input: job.corner(strip, input). */
struct Corner {
    int column, outer[3];
};

/* Of each input, with boxes of a tile. */
template <class Job> struct Tensors { CUtensorMap map[Job::INPUTS]; };

struct ConveyorCut {
    int64_t rows; /* of a strip */
    unsigned strips, tiles;
    Divisor chunks;     /* of a strip */
    int merged_at_once; /* lines of a strip, in groups of four, that a merger takes: a power of two */
};

template <class Job> struct Conveyor {
    static constexpr int ACROSS_LOG2 = 3, ACROSS = 1 << ACROSS_LOG2, STEP = Job::THREADS / ACROSS;
    static constexpr int ITEMS = Job::INPUTS == 1 ? 8 : 4; /* of a thread */
    static constexpr int ROWS = ITEMS * STEP, LINES = ACROSS * Job::LINES, COUNT = StatisticsOf<Job>::COUNT;
    static constexpr int TILE = ITEMS * Job::THREADS, SLOT = Job::INPUTS * TILE; /* packs */
    static constexpr int SLOTS = (192 << 10) / (SLOT * 16);
    static constexpr int OTHERS = 4 * WARP, THREADS = OTHERS + 2 * Job::THREADS;
    static_assert(Job::N * sizeof(typename Job::T) == 16 && LINES == Job::MOST_LINES && LINES % WARP == 0, "");
};

template <class Job> struct ConveyorShared {
    typedef Conveyor<Job> C;
    Area<Job> area[2]; /* of this tile and the last */
    alignas(16) float total[C::SLOTS][C::COUNT][C::LINES];
    typename Job::Table table[Job::HAS_TABLE ? C::SLOTS : 1];
    uint64_t full[C::SLOTS], ready[C::SLOTS], done[C::SLOTS]; /* the tile is there; its totals are; it is used up */
    int tile[C::SLOTS];                                       /* its number; NONE: there are no more */
};

constexpr int NONE = -1;

/* Calls f(slot, parity, tile) for this block's tiles, in order. */
template <int SLOTS, class Shared, class F> DEVICE void for_tiles(Shared &shared, F f) {
    for (unsigned parity = 0;; parity ^= 1)
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_wait(&shared.full[slot], parity);
            const int tile = shared.tile[slot];
            if (tile == NONE)
                return;
            f(slot, parity, (unsigned)tile);
        }
}

/* The items of a tile that a thread has. */
template <class Job>
DEVICE Items<Job> items_of(const ConveyorCut &cut, Pack<typename Job::T, Job::N> *slot, int thread, int64_t first_row,
                           bool active) {
    typedef Conveyor<Job> C;
    const int64_t row = first_row + thread / C::ACROSS, left = cut.rows - row;
    Items<Job> items;
    items.staged = slot + thread;
    items.item_stride = Job::THREADS;
    items.input_stride = C::TILE;
    items.row = row;
    items.down = 0;
    items.step = C::STEP;
    items.count = !active || left <= 0 ? 0 : left > C::ROWS - C::STEP ? C::ITEMS : ((int)left - 1) / C::STEP + 1;
    return items;
}

template <class Job>
__global__ void __launch_bounds__(Conveyor<Job>::THREADS, 1)
    conveyor(const __grid_constant__ Tensors<Job> tensors, const Job job, const ConveyorCut cut,
             const Meeting meeting) {
#if __CUDA_ARCH__ >= 900
    typedef Conveyor<Job> C;
    typedef Pack<typename Job::T, Job::N> P;
    constexpr int COUNT = C::COUNT, LINES = C::LINES, SLOTS = C::SLOTS;
    extern __shared__ uint4 staged_memory[];
    __shared__ ConveyorShared<Job> shared;
    P *const staged = reinterpret_cast<P *>(reinterpret_cast<char *>(staged_memory) +
                                            (128 - shared_address(staged_memory) % 128) % 128);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned arrivals = cut.chunks.number * (LINES / WARP) - 1; /* meeting.arrived starts from -1 */

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(&shared.full[slot], Job::HAS_TABLE ? 2 : 1);
            barrier_init(&shared.ready[slot], 1);
            barrier_init(&shared.done[slot], Job::THREADS / WARP);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warp == 0) { /* mover */
        if (lane != 0)
            return;
        unsigned tile = blockIdx.x;
        const auto bring = [&](int slot) {
            const bool more = tile < cut.tiles;
            shared.tile[slot] = more ? (int)tile : NONE;
            if (!more)
                return barrier_arrive(&shared.full[slot]);
            barrier_expect(&shared.full[slot], C::SLOT * 16);
            const unsigned index = cut.chunks.quotient(tile), chunk = tile - index * cut.chunks.number;
            const typename Job::Strip strip = job.strip_at(index);
#pragma unroll
            for (int input = 0; input < Job::INPUTS; input++) {
                const Corner at = job.corner(strip, input);
                copy_box(staged + slot * C::SLOT + input * C::TILE, &tensors.map[input], at.column,
                         (int)(chunk * C::ROWS), at.outer, &shared.full[slot]);
            }
            tile += gridDim.x;
        };
        for (int slot = 0; slot < SLOTS; slot++)
            bring(slot);
        for_tiles<SLOTS>(shared, [&](int slot, unsigned parity, unsigned) {
            barrier_wait(&shared.done[slot], parity);
            bring(slot);
        });
    } else if (warp == 1) { /* merger */
        const int lanes = cut.merged_at_once, groups = WARP / lanes, parts = LINES / 4 / lanes;
        for (unsigned item = blockIdx.x; item < cut.strips * parts; item += gridDim.x) {
            const unsigned index = item / parts, first = (item - index * parts) * lanes * 4 + lane % lanes * 4;
            if (lane == 0)
                while (load_acquire(meeting.arrived + index) != arrivals)
                    ;
            __syncwarp();
            const float *const from = meeting.statistics + (int64_t)index * cut.chunks.number * (COUNT * LINES) + first;
            constexpr int AT_A_TIME = 4;
            Statistics<4, Job::HAS_MAX, Job::SUMS> mine, other[AT_A_TIME];
            mine.clear();
            for (unsigned chunk = lane / lanes; chunk < cut.chunks.number; chunk += groups * AT_A_TIME) {
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++) {
                    other[i].clear();
                    const unsigned at = chunk + i * groups;
                    if (at < cut.chunks.number)
#pragma unroll
                        for (int k = 0; k < COUNT; k++) {
                            const float4 four =
                                __ldcg(reinterpret_cast<const float4 *>(from + (at * COUNT + k) * LINES));
                            other[i].value(k, 0) = four.x;
                            other[i].value(k, 1) = four.y;
                            other[i].value(k, 2) = four.z;
                            other[i].value(k, 3) = four.w;
                        }
                }
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        mine.add(j, other[i], j);
            }
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
                unsigned *const to = meeting.merged + (int64_t)index * (COUNT * LINES) + first;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float values[COUNT];
#pragma unroll
                    for (int k = 0; k < COUNT; k++)
                        values[k] = mine.value(k, j);
                    job.conclude(values, strip, (int)first + j);
#pragma unroll
                    for (int k = 0; k < COUNT; k++)
                        store_flagged(to + k * LINES + j, values[k]);
                }
            }
        }
    } else if (warp == 2) { /* fetcher */
        for_tiles<SLOTS>(shared, [&](int slot, unsigned, unsigned tile) {
            const unsigned *const from = meeting.merged + (int64_t)cut.chunks.quotient(tile) * (COUNT * LINES);
            for (int i = lane; i < COUNT * LINES; i += WARP) {
                unsigned word;
                while ((word = load_relaxed(from + i)) == EMPTY)
                    ;
                shared.total[slot][i / LINES][i % LINES] = __uint_as_float(word);
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&shared.ready[slot]);
        });
    } else if (warp == 3) { /* tables */
        if constexpr (Job::HAS_TABLE) {
            unsigned tile = blockIdx.x;
            for (int turn = 0;; turn++)
                for (int slot = 0; slot < SLOTS; slot++, tile += gridDim.x) {
                    if (turn > 0)
                        barrier_wait(&shared.done[slot], (turn - 1) & 1);
                    if (tile < cut.tiles)
                        job.prepare(shared.table[slot], job.strip_at(cut.chunks.quotient(tile)), lane, WARP);
                    __syncwarp();
                    if (lane == 0)
                        barrier_arrive(&shared.full[slot]);
                    if (tile >= cut.tiles)
                        return;
                }
        }
    } else {
        const bool second = threadIdx.x >= C::OTHERS + Job::THREADS;
        const int thread = (int)threadIdx.x - C::OTHERS - (second ? Job::THREADS : 0);
        if (second) /* results */
            for_tiles<SLOTS>(shared, [&](int slot, unsigned parity, unsigned tile) {
                const unsigned index = cut.chunks.quotient(tile), chunk = tile - index * cut.chunks.number;
                const int64_t first_row = (int64_t)chunk * C::ROWS;
                const typename Job::Place place =
                    job.locate(job.strip_at(index), thread % C::ACROSS, first_row + thread / C::ACROSS);
                const Items<Job> items = items_of<Job>(cut, staged + slot * C::SLOT, thread, first_row, place.active);
                barrier_wait(&shared.ready[slot], parity);
                job.finish(shared.total[slot], items, place, shared.table[Job::HAS_TABLE ? slot : 0]);
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(&shared.done[slot]);
            });
        else { /* statistics */
            int odd = 0;
            for_tiles<SLOTS>(shared, [&](int slot, unsigned, unsigned tile) {
                const unsigned index = cut.chunks.quotient(tile), chunk = tile - index * cut.chunks.number;
                const int64_t first_row = (int64_t)chunk * C::ROWS;
                const typename Job::Place place =
                    job.locate(job.strip_at(index), thread % C::ACROSS, first_row + thread / C::ACROSS);
                const Items<Job> items = items_of<Job>(cut, staged + slot * C::SLOT, thread, first_row, place.active);
                StatisticsOf<Job> mine;
                mine.clear();
                job.template accumulate<true>(mine, items, place, shared.table[Job::HAS_TABLE ? slot : 0]);
                float *const to = meeting.statistics + (int64_t)tile * (COUNT * LINES);
                combine_threads<Job>(
                    mine, thread, C::ACROSS_LOG2, shared.area[odd],
                    [] { asm volatile("bar.sync 1, %0;" ::"n"(Job::THREADS)
                                      : "memory"); },
                    [&](int line, auto &all) {
#pragma unroll
                        for (int k = 0; k < COUNT; k++)
                            to[k * LINES + line] = all.value(k, 0);
                    });
                __syncwarp();
                if (thread < LINES && lane == 0)
                    add_release(meeting.arrived + index, 1);
                odd ^= 1;
            });
        }
    }
#else
    (void)tensors, (void)job, (void)cut, (void)meeting;
#endif
}

/* ---- how to cut ----------------------------------------------------------------------------------------------------
 */

template <class Job> static inline ConveyorCut cut_for_conveyor(int64_t strips, int64_t rows) {
    typedef Conveyor<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    ConveyorCut cut;
    cut.rows = rows;
    cut.strips = (unsigned)strips;
    cut.tiles = (unsigned)(strips * chunks);
    cut.chunks = Divisor(chunks);
    /* Few lines where there are many chunks, so that all of them are under way at once. */
    cut.merged_at_once = C::LINES / 4 < WARP ? C::LINES / 4 : WARP;
    while (cut.merged_at_once > 2 && chunks * cut.merged_at_once > 8 * WARP)
        cut.merged_at_once /= 2;
    return cut;
}

/* Whether this build and device have the kernel, whether it may be used (the comment on top), and whether strips are
 * long enough for it to pay: docs/perf/act.md. Without sm_90 its body is empty, and so is its shared memory. */
template <class Job>
static inline bool conveyor_fits(const rafter_cuda_state *state, int64_t strips, int64_t rows, int across) {
    typedef Conveyor<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    const int64_t dynamic = C::SLOTS * C::SLOT * 16 + 128;
    if (across != C::ACROSS || state->compute_capability < 90 ||
        dynamic + (int64_t)sizeof(ConveyorShared<Job>) > state->shared_bytes || rows > INT32_MAX ||
        strips * chunks > INT32_MAX || chunks < 4 || chunks > (int64_t)state->multiprocessors * C::SLOTS)
        return false;
    static const bool built = [] {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, conveyor<Job>) == cudaSuccess && attributes.sharedSizeBytes > 0;
    }();
    return built;
}

/* Maps an input of a job: `dims` dimensions, four or five, as make_tensor_map has them, the first two being columns and
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

/* Scratch memory: merged statistics, counters, statistics of tiles. */
template <class Job> struct ConveyorScratch {
    size_t merged, arrived, statistics;

    explicit ConveyorScratch(const ConveyorCut &cut) {
        const size_t each = Conveyor<Job>::COUNT * Conveyor<Job>::LINES * sizeof(unsigned);
        merged = (size_t)cut.strips * each;
        arrived = ceil_div((size_t)cut.strips * sizeof(unsigned), (size_t)16) * 16;
        statistics = (size_t)cut.tiles * each;
    }
    size_t bytes() const {
        return merged + statistics + arrived;
    }
};

template <class Job>
static inline void launch_conveyor(const rafter_context *context, const Tensors<Job> &tensors, const Job &job,
                                   const ConveyorCut &cut, char *scratch) {
    typedef Conveyor<Job> C;
    const ConveyorScratch<Job> sizes(cut);
    cudaMemsetAsync(scratch, 0xff, sizes.merged + sizes.arrived, context->cuda_state->stream); /* EMPTY, and -1 */
    const Meeting meeting = {reinterpret_cast<float *>(scratch + sizes.merged + sizes.arrived),
                             reinterpret_cast<unsigned *>(scratch),
                             reinterpret_cast<unsigned *>(scratch + sizes.merged)};
    const int64_t most = context->cuda_state->multiprocessors;
    launch(context, {cut.tiles < most ? cut.tiles : most, C::THREADS, C::SLOTS * C::SLOT * 16 + 128}, conveyor<Job>,
           tensors, job, cut, meeting);
}

#endif
