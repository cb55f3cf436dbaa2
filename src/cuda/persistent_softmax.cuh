/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Column softmax that reads every byte of its inputs once, by persistent blocks. It runs jobs of
 * cuda/panel_softmax.cuh whose panels are 128 bytes wide and have many chunks, on GPUs with TMA
 * (Hopper and later).
 *
 * One block per multiprocessor runs for the whole kernel and works on tiles. A tile is one chunk of a
 * panel; TMA copies it into one of several slots in shared memory. Tiles are numbered panel by panel and
 * given to blocks in that order. While some tiles are being loaded, others wait for the statistics of
 * their panel, to which all blocks contribute. The warps of a block specialise:
 *
 *     producer    loads a tile into every free slot, and prefetches to L2 the tile that comes
 *                 prefetch_distance tiles later: memory is read while blocks wait for each other,
 *                 and slots fill sooner
 *     statistics  THREADS threads that compute the statistics of each tile
 *     reporter    reduces these over the threads and writes those of the tile to the workspace
 *     merger      waits for the statistics of all tiles of a panel, merges them and publishes the
 *                 result. The mergers of all blocks share the work: each takes some columns of a
 *                 panel at a time
 *     results     RESULT_GROUPS groups of THREADS threads that take tiles alternately. A group
 *                 holds its tile in registers while it waits for the published statistics, so the
 *                 slot is free for the next tile
 *
 * A word of the workspace is EMPTY until it is written. So a reader sees from the word itself
 * whether it is valid, and nothing counts arrivals: a device-wide fence would take longer than a
 * tile.
 *
 * There is no deadlock. Take the first panel that is not published, and a tile of it whose
 * statistics have not been written.
 *
 * If a block has taken the tile, the tile is in a slot. Its statistics wait only for its copy, and
 * for warps that take tiles in order and wait for nothing else. So they will be written.
 *
 * If no block has taken the tile, all slots hold earlier tiles, or will: a block fills its slots
 * for the first time without waiting, and tiles are taken in order. A slot that holds a tile of an
 * earlier panel will be freed, because that panel is published. So the tile stays untaken only if
 * all slots hold other tiles of the same panel. That cannot be: a panel has no more tiles than
 * there are slots (persistent_why_not). If tiles are dealt round-robin, the same argument holds for
 * the slots of the one block that the tile belongs to.
 *
 * All this requires that all blocks run at the same time, whatever else runs on the GPU: two such
 * kernels on half of the multiprocessors each would wait forever. So the launch is cooperative: it
 * starts when all of its blocks fit at once. One block per multiprocessor is what fits.
 */
#ifndef RAFTER_CUDA_PERSISTENT_SOFTMAX_CUH
#define RAFTER_CUDA_PERSISTENT_SOFTMAX_CUH

#include "cuda/hopper.cuh"
#include "cuda/panel_softmax.cuh"
#include "cuda/tensor_map.cuh"

/* The origin of a panel in the input tensors, which all have one shape: job.tile_origin(panel). */
struct TileOrigin {
    int column, outer[3];
};

/* A tensor map per input, with boxes of one tile. */
template <class Job> struct InputMaps { CUtensorMap map[Job::INPUTS]; };

struct PersistentPlan {
    int64_t rows; /* per panel */
    unsigned panels, tiles;
    Divisor chunks;             /* tiles per panel */
    int merge_lanes;            /* lanes of a merger side by side, four columns each: a power of two */
    bool round_robin;           /* tiles are dealt round-robin; else only each block's first SLOTS, then by ticket */
    unsigned prefetch_distance; /* in tiles, ahead of the one that is loaded; 0: no prefetch to L2 */
};

/* The statistics that blocks exchange. Words are EMPTY until they are written. */
struct PersistentWorkspace {
    unsigned *merged, *statistics; /* [panel][statistic][column], finalized; [tile][statistic][column] */
    unsigned *tickets;             /* tiles dealt by ticket so far, minus 1 */
};

template <class Job> struct PersistentColumns {
    static constexpr int ACROSS_LOG2 = 3, ACROSS = 1 << ACROSS_LOG2, STEP = Job::THREADS / ACROSS;
    static constexpr int LINES = ACROSS * Job::LINES, COUNT = StatisticsOf<Job>::COUNT, WORDS = COUNT * LINES;
    static constexpr int ITEMS = Job::INPUTS == 1 ? 8 : 4, ROWS = ITEMS * STEP;  /* per thread; per tile */
    static constexpr int TILE = ITEMS * Job::THREADS, SLOT = Job::INPUTS * TILE; /* packs */
    static constexpr int RESULT_GROUPS = 2;
    static constexpr int PRODUCER = 0, MERGER = 1, REPORTER = 2, FIRST_WARP = 3; /* warps */
    static constexpr int ROLE_WARPS = Job::THREADS / WARP,
                         THREADS = (FIRST_WARP + (1 + RESULT_GROUPS) * ROLE_WARPS) * WARP;
    static_assert(Job::N * sizeof(typename Job::T) == 16 && LINES == Job::MOST_LINES && LINES % WARP == 0 &&
                      __is_empty(typename Job::Table),
                  "panels are 128 bytes wide, and jobs have no table");

    typedef Pack<typename Job::T, Job::N> P;
    struct alignas(128) Slot {
        P tile[SLOT];
        GroupStatistics<Job> groups;
    };
    /* A block may use 227 KB; PersistentShared takes some of that. */
    static constexpr int SLOTS = (223 << 10) / (int)sizeof(Slot);
    static constexpr size_t SHARED_BYTES = SLOTS * sizeof(Slot) + alignof(Slot);
    /* A barrier shows only the parity of its phase. A group that sees every tile of a slot cannot
     * confuse two phases. */
    static_assert(SLOTS % RESULT_GROUPS == 0, "all tiles of a slot go to one group");
};

template <class Job> struct PersistentShared {
    typedef PersistentColumns<Job> C;
    /* Merged statistics, for each group: of its tile, and of the one before it, which some threads may still read. */
    alignas(16) float totals[C::RESULT_GROUPS][2][C::COUNT][C::LINES];
    /* Barriers of a slot: its tile has arrived; its statistics are written; it is free again. */
    uint64_t full[C::SLOTS], reduced[C::SLOTS], empty[C::SLOTS];
    int tile[C::SLOTS]; /* number of the tile in a slot; NONE: there are no more */
};

constexpr int NONE = -1;

/* Calls f(slot, tile, parity of the slot's barriers) for this block's first-th tile, (first + step)-th, ..., in
 * order. */
template <class C, class Shared, class F> DEVICE void for_tiles(Shared &shared, int first, int step, F f) {
    for (int i = first;; i += step) {
        const int slot = i % C::SLOTS;
        barrier_wait(&shared.full[slot], i / C::SLOTS & 1);
        const int tile = shared.tile[slot];
        if (tile == NONE)
            return;
        f(slot, (unsigned)tile, (unsigned)i / C::SLOTS & 1);
    }
}

/* A thread's items of a tile, in registers. */
template <class Job> struct HeldItems {
    typedef PersistentColumns<Job> C;
    typename C::P held[C::ITEMS][Job::INPUTS];
    int64_t down = 0; /* from the first row of the thread's Place to the first item */
    int count, step = C::STEP;

    /* Loads them from a slot. left: rows of the panel from the thread's first row to the end. */
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
    /* Returns 0, but only after the items of all lanes have been loaded. The result is added to the address of the
     * barrier that frees the slot, because an arrival does not wait for earlier loads by itself: without this, the next
     * tile can overwrite the slot before they are done. gridDim.y is 1, which the compiler does not know. */
    DEVICE unsigned zero_after_loads() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < C::ITEMS; i++)
#pragma unroll
            for (int input = 0; input < Job::INPUTS; input++)
                bits |= reinterpret_cast<const unsigned &>(held[i][input]);
        return __ballot_sync(~0u, (bits & (gridDim.y - 1)) != 0);
    }
};

/* A thread's part of a tile. */
template <class Job> struct TilePart {
    typedef PersistentColumns<Job> C;
    typename Job::Place place;
    int64_t left; /* rows of the panel from the part's first row to the end; 0: the thread has no part */

    DEVICE TilePart(const Job &job, const PersistentPlan &plan, unsigned tile, int thread) {
        const unsigned index = plan.chunks.quotient(tile), chunk = tile - index * plan.chunks.number;
        const int64_t row = (int64_t)chunk * C::ROWS + thread / C::ACROSS;
        place = job.locate(job.panel_at(index), thread % C::ACROSS, row);
        left = place.active ? plan.rows - row : 0;
    }
};

/* Loads four adjacent words; `present`: whether all have been written. */
DEVICE uint4 load_flagged(const unsigned *p, bool *present) {
    const uint4 w = load_four_relaxed(p);
    *present = w.x != EMPTY && w.y != EMPTY && w.z != EMPTY && w.w != EMPTY;
    return w;
}

/* Calls f(input, origin, row) for each input's box of a tile. */
template <class Job, class F> DEVICE void for_boxes(const Job &job, const PersistentPlan &plan, unsigned tile, F f) {
    const unsigned index = plan.chunks.quotient(tile), chunk = tile - index * plan.chunks.number;
    const typename Job::Panel panel = job.panel_at(index);
#pragma unroll
    for (int input = 0; input < Job::INPUTS; input++) {
        const TileOrigin at = job.tile_origin(panel); /* before the loop, it would make the kernel 6 % slower */
        f(input, at, (int)(chunk * PersistentColumns<Job>::ROWS));
    }
}

/* The producer: one thread loads tiles into slots. */
template <class Job>
DEVICE void load_tiles(const InputMaps<Job> &maps, const Job &job, const PersistentPlan &plan,
                       const PersistentWorkspace &workspace, typename PersistentColumns<Job>::Slot *slots,
                       PersistentShared<Job> &shared) {
    typedef PersistentColumns<Job> C;
    const unsigned first_round = C::SLOTS * gridDim.x; /* tiles that are dealt before any slot is reused */
    for (unsigned round = 0;; round++)
        for (int slot = 0; slot < C::SLOTS; slot++) {
            if (round > 0) {
                if (shared.tile[slot] == NONE)
                    return;
                barrier_wait(&shared.empty[slot], (round - 1) & 1);
            }
            const unsigned tile = round == 0 || plan.round_robin ? blockIdx.x + (round * C::SLOTS + slot) * gridDim.x
                                                                 : first_round + atomicAdd(workspace.tickets, 1) + 1;
            if (tile >= plan.tiles) {
                shared.tile[slot] = NONE;
                barrier_arrive(&shared.full[slot]);
                continue;
            }
            shared.tile[slot] = (int)tile;
            barrier_expect(&shared.full[slot], C::SLOT * 16);
            for_boxes(job, plan, tile, [&](int input, const TileOrigin &at, int row) {
                copy_box(slots[slot].tile + input * C::TILE, &maps.map[input], at.column, row, at.outer,
                         &shared.full[slot]);
            });
            const unsigned soon = tile + plan.prefetch_distance;
            if (plan.prefetch_distance > 0 && soon >= first_round && soon < plan.tiles)
                for_boxes(job, plan, soon, [&](int input, const TileOrigin &at, int row) {
                    prefetch_box(&maps.map[input], at.column, row, at.outer);
                });
        }
}

/* The merger: one warp. The panels are divided into parts of 4 * merge_lanes columns; it takes every gridDim.x-th. */
template <class Job>
DEVICE void merge_panels(const Job &job, const PersistentPlan &plan, const PersistentWorkspace &workspace) {
    typedef PersistentColumns<Job> C;
    constexpr int AT_A_TIME = 4, COUNT = C::COUNT;
    const int lane = threadIdx.x % WARP, lanes = plan.merge_lanes, groups = WARP / lanes, parts = C::LINES / 4 / lanes;
    const unsigned chunks = plan.chunks.number;
    for (unsigned part = blockIdx.x; part < plan.panels * parts; part += gridDim.x) {
        const unsigned index = part / parts, first = ((part - index * parts) * lanes + lane % lanes) * 4;
        const unsigned *const from = workspace.statistics + (int64_t)index * chunks * C::WORDS + first;
        if (lane == 0) /* wait for the tile that is most likely written last: polling all would delay the writes */
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
                            bool present;
                            const uint4 four =
                                load_flagged(from + (int64_t)(chunk + i * groups) * C::WORDS + k * C::LINES, &present);
                            other[i].value(k, 0) = __uint_as_float(four.x);
                            other[i].value(k, 1) = __uint_as_float(four.y);
                            other[i].value(k, 2) = __uint_as_float(four.z);
                            other[i].value(k, 3) = __uint_as_float(four.w);
                            missing[i] |= !present;
                        }
                        any |= missing[i];
                    }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) { /* one common maximum, so that the exponentials do not depend on each other */
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
            const typename Job::Panel panel = job.panel_at(index);
            unsigned *const to = workspace.merged + (int64_t)index * C::WORDS + first;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                Statistics<1, Job::HAS_MAX, Job::SUMS> line;
#pragma unroll
                for (int k = 0; k < COUNT; k++)
                    line.value(k, 0) = mine.value(k, j);
                finalize(job, line, panel, (int)first + j,
                         [&](int k, float value) { store_flagged(to + k * C::LINES + j, value); });
            }
        }
    }
}

template <class Job>
__global__ void __launch_bounds__(PersistentColumns<Job>::THREADS, 1)
    persistent_columns(const __grid_constant__ InputMaps<Job> maps, const Job job, const PersistentPlan plan,
                       const PersistentWorkspace workspace) {
    wait_for_inputs();
#if __CUDA_ARCH__ >= 900
    typedef PersistentColumns<Job> C;
    DYNAMIC_SHARED(uint4, staged_memory);
    __shared__ PersistentShared<Job> shared;
    constexpr unsigned ALIGNED = alignof(typename C::Slot);
    typename C::Slot *const slots = reinterpret_cast<typename C::Slot *>(
        reinterpret_cast<char *>(staged_memory) + (ALIGNED - shared_address(staged_memory) % ALIGNED) % ALIGNED);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < C::SLOTS; slot++) {
            barrier_init(&shared.full[slot], 1);
            barrier_init(&shared.reduced[slot], C::ROLE_WARPS * WARP);
            barrier_init(&shared.empty[slot], (C::ROLE_WARPS + 1 + C::ROLE_WARPS) * WARP);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warp == C::PRODUCER) {
        if (lane == 0)
            load_tiles(maps, job, plan, workspace, slots, shared);
    } else if (warp == C::MERGER) {
        merge_panels(job, plan, workspace);
    } else if (warp == C::REPORTER) {
        for_tiles<C>(shared, 0, 1, [&](int slot, unsigned tile, unsigned parity) {
            unsigned *const to = workspace.statistics + (int64_t)tile * C::WORDS;
            barrier_wait(&shared.reduced[slot], parity);
#pragma unroll
            for (int line = lane; line < C::LINES; line += WARP) {
                auto all = combine_groups(slots[slot].groups, C::ACROSS_LOG2, C::LINES, line);
#pragma unroll
                for (int k = 0; k < C::COUNT; k++)
                    store_flagged(to + k * C::LINES + line, all.value(k, 0));
            }
            barrier_arrive(&shared.empty[slot]);
        });
    } else if (warp < C::FIRST_WARP + C::ROLE_WARPS) { /* statistics */
        const int thread = (int)threadIdx.x - C::FIRST_WARP * WARP;
        for_tiles<C>(shared, 0, 1, [&](int slot, unsigned tile, unsigned) {
            const TilePart<Job> part(job, plan, tile, thread);
            const HeldItems<Job> items(slots[slot].tile, thread, part.left);
            StatisticsOf<Job> mine;
            mine.clear();
            job.template accumulate<true>(mine, items, part.place, typename Job::Table());
            __syncwarp();
            combine_warp<Job>(mine, thread, C::ACROSS_LOG2, slots[slot].groups);
            barrier_arrive(&shared.reduced[slot]);
            barrier_arrive(&shared.empty[slot]);
        });
    } else { /* results */
        const int group = (warp - C::FIRST_WARP) / C::ROLE_WARPS - 1;
        const int thread = (int)threadIdx.x - (C::FIRST_WARP + (1 + group) * C::ROLE_WARPS) * WARP;
        int odd = 0;
        for_tiles<C>(shared, group, C::RESULT_GROUPS, [&](int slot, unsigned tile, unsigned) {
            const TilePart<Job> part(job, plan, tile, thread);
            const HeldItems<Job> items(slots[slot].tile, thread, part.left);
            barrier_arrive(&shared.empty[slot] + items.zero_after_loads());

            float(&total)[C::COUNT][C::LINES] = shared.totals[group][odd];
            const unsigned *const from = workspace.merged + (int64_t)plan.chunks.quotient(tile) * C::WORDS;
            for (int i = thread; i < C::WORDS / 4; i += Job::THREADS) {
                bool present;
                uint4 four = load_flagged(from + 4 * i, &present);
                while (!present) {
                    __nanosleep(200); /* polling without a pause takes 1 % longer */
                    four = load_flagged(from + 4 * i, &present);
                }
                reinterpret_cast<uint4 *>(total)[i] = four;
            }
            __syncwarp(); /* lanes must arrive together: bar.sync would count a diverged warp more than once */
            sync_some<Job::THREADS>(1 + group);
            job.finish(total, items, part.place, typename Job::Table());
            odd ^= 1;
        });
    }
#else
    (void)maps, (void)job, (void)plan, (void)workspace;
#endif
}

/* ---- host side ------------------------------------------------------------------------------- */

template <class Job>
static inline PersistentPlan plan_persistent(const rafter_cuda_state &device, int64_t panels, int64_t rows) {
    typedef PersistentColumns<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    PersistentPlan plan;
    plan.rows = rows;
    plan.panels = (unsigned)panels;
    plan.tiles = (unsigned)(panels * chunks);
    plan.chunks = Divisor(chunks);
    /* The three thresholds were measured: docs/perf/act.md.
     * merge_lanes: with many chunks, a merger takes few columns, so that most of its loads are in flight at once.
     * round_robin, with few chunks: blocks end together, and a ticket costs more than waiting.
     * No prefetch, with few chunks: blocks hardly wait for each other. */
    plan.merge_lanes = min(C::LINES / 4, WARP);
    while (plan.merge_lanes > 2 * C::COUNT && chunks * plan.merge_lanes > 8 * WARP)
        plan.merge_lanes /= 2;
    plan.round_robin = chunks <= 16;
    plan.prefetch_distance = chunks >= (Job::INPUTS == 1 ? 16 : 128) ? (unsigned)device.multiprocessors : 0;
    return plan;
}

/* NULL if the kernel can run, and is faster than one block per panel; else the reason. */
template <class Job>
static inline const char *persistent_why_not(const rafter_cuda_state &device, int64_t panels, int64_t rows,
                                             int across) {
    typedef PersistentColumns<Job> C;
    const int64_t chunks = ceil_div(rows, (int64_t)C::ROWS);
    if (across != C::ACROSS)
        return "there are less than 128 bytes of adjacent columns";
    if (rows <= 2 * Job::ITEMS * C::STEP / Job::INPUTS)
        return "columns are short enough for one block per panel";
    if (chunks > (int64_t)device.multiprocessors * C::SLOTS)
        return "columns have more tiles than the GPU has slots";
    if (rows > INT32_MAX || panels * chunks > INT32_MAX / 2)
        return "it counts tiles in 30 bits";
    if (!device.cooperative || (int64_t)(C::SHARED_BYTES + sizeof(PersistentShared<Job>)) > device.shared_bytes)
        return "the GPU lacks cooperative launches or shared memory";
    static BuiltKernel known;
    return known.is_built(device.device, reinterpret_cast<const void *>(persistent_columns<Job>))
               ? NULL
               : "this build has no sm_90 code";
}

/* Makes the tensor map of one input. It has `dims` dimensions, two to five, as for make_tensor_map;
 * the first two are columns and rows. False if TMA cannot address the tensor. */
template <class Job>
static inline bool map_input(InputMaps<Job> *maps, int input, const rafter_view &view, int dims, const int64_t *sizes,
                             const int64_t *strides) {
    int64_t size[5] = {1, 1, 1, 1, 1}, stride[4];
    for (int d = 0; d < dims; d++)
        size[d] = sizes[d];
    for (int d = 0; d < 4; d++) {
        stride[d] = size[d + 1] > 1 ? strides[d] : Job::N; /* a dimension of size 1: any valid stride */
        if (size[d] > INT32_MAX || size[d + 1] > INT32_MAX || stride[d] == 0)
            return false;
    }
    return make_tensor_map(&maps->map[input], view.dtype, view.data, 5, size, stride,
                           {PersistentColumns<Job>::ACROSS * Job::N, PersistentColumns<Job>::ROWS},
                           CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

/* Bytes of workspace: the members of PersistentWorkspace, one after another. */
template <class Job> static inline size_t persistent_bytes(const PersistentPlan &plan) {
    return ((size_t)(plan.panels + plan.tiles) * PersistentColumns<Job>::WORDS + 1) * sizeof(unsigned);
}

template <class Job>
static inline void launch_persistent(const rafter_context *context, const InputMaps<Job> &maps, const Job &job,
                                     const PersistentPlan &plan, char *memory) {
    typedef PersistentColumns<Job> C;
    /* All ones: EMPTY in `merged` and `statistics`, -1 in `tickets`. */
    fill_bytes(context, memory, 0xff, persistent_bytes<Job>(plan));
    unsigned *const merged = reinterpret_cast<unsigned *>(memory);
    unsigned *const statistics = merged + (size_t)plan.panels * C::WORDS;
    const PersistentWorkspace workspace = {merged, statistics, statistics + (size_t)plan.tiles * C::WORDS};
    Launch how = {min(int64_t(plan.tiles), int64_t(context->cuda_state->multiprocessors)), C::THREADS, C::SHARED_BYTES};
    how.cooperative = true;
    launch(context, how, persistent_columns<Job>, maps, job, plan, workspace);
}

#endif
