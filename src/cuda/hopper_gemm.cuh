/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of 16-bit matrices on Hopper's tensor cores: a[m, k] b[k, n], for linear_cross_entropy. k is
 * called the depth. A block has three warpgroups: one thread of the first copies operands, the other two
 * sum tiles in their registers, and then convert the sums to results (the epilogue, Job::finish). They do so
 *
 *     Together   both sum one tile of 128 x 256, 64 rows each. The tensor cores are idle while it is
 *                converted, so that must be short: its inputs are loaded before the sums are complete, and
 *                16-bit results stay in registers, two per register, until the next tile is being summed.
 *                Then the copy engine stores them through shared memory, in parts of 64 columns of a warp's
 *                16 rows. For tiles that take long to sum: dx, dW, logits of great depth.
 *     InTurns    each has a tile of 128 x 192 of its own, and converts it while the other one multiplies.
 *                Tiles are narrower, so more bytes are copied for each product, but a conversion may be
 *                long. For most logits: see lce::tile_classes_of.
 *
 * A cluster of two blocks takes 256 rows x 256 (192) columns. In each step, 64 elements of depth, each block
 * copies its own 128 rows of a, and one half of the columns of b into both blocks. Several steps are in
 * flight in a ring of buffers, across tiles: while one tile is converted, the operands of the next one are
 * loaded. In products of at most 128 rows a cluster takes 128 rows x 512 (384) columns, and its blocks share
 * a instead of b: see ClusterShape.
 */
#ifndef RAFTER_CUDA_HOPPER_GEMM_CUH
#define RAFTER_CUDA_HOPPER_GEMM_CUH

#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/tile_scheduler.cuh"

namespace gemm {

constexpr int CHUNK = 64; /* elements in 128 bytes, the width of the copy engine's swizzle */
constexpr int CHUNK_BYTES = CHUNK * DEPTH * 2;
constexpr int PART_ROWS = 16, PART_BYTES = PART_ROWS * 128; /* a part of the results: 16 rows of 128 bytes */
constexpr int A_BYTES = ROWS * DEPTH * 2;                   /* of a step */

/* Tiles of a block. STEPS_IN_RING: steps in flight. STORED_PARTS: parts of the results that a warp is storing.
 * SPLIT_SUM_STEPS: see TileScheduler::of; in turns, one warpgroup adds up what two would. */
template <int TILE_COLUMNS, int STEPS_IN_RING, int STORED_PARTS, int SPLIT_SUM_STEPS> struct Tiling {
    static constexpr int COLUMNS = TILE_COLUMNS, STEPS = STEPS_IN_RING, PARTS_IN_FLIGHT = STORED_PARTS,
                         SUM_STEPS = SPLIT_SUM_STEPS;
    static constexpr int SHARE = COLUMNS / CLUSTER; /* columns of b that one block copies */
    static constexpr int STEP_BYTES = A_BYTES + COLUMNS * DEPTH * 2, WARP_STAGING = PARTS_IN_FLIGHT * PART_BYTES;
    static constexpr int SHARED_BYTES =
        STEPS * STEP_BYTES + GROUPS * GROUP / WARP * WARP_STAGING + 1024; /* 1024: to align the steps to that */
    static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "1024 for static shared memory");
};
typedef Tiling<COLUMNS, 4, 2, 0> Together;
typedef Tiling<COLUMNS_IN_TURNS, 5, 1, 4> InTurns;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A position in the ring of STEPS buffers, and the parity of the phase of the barriers there. */
template <int STEPS> struct Ring {
    int step = 0;
    unsigned parity = 0;
    DEVICE void advance() {
        if (++step == STEPS) {
            step = 0;
            parity ^= 1;
        }
    }
    DEVICE void advance(int steps) {
        const int at = step + steps, rounds = at / STEPS;
        step = at - rounds * STEPS;
        parity ^= rounds & 1;
    }
};

/* Copies rows of a, or columns of b, [first, first + COUNT) at the depths [depth, depth + DEPTH), in the layout that
 * operand_of expects; into all blocks of the cluster if ALL. TRANSPOSED: in memory, the matrix has a row per depth. */
template <bool TRANSPOSED, int COUNT, bool ALL>
DEVICE void copy_operand(char *to, const CUtensorMap &map, int first, int depth, uint64_t *barrier) {
    const auto copy = [&](char *destination, int column, int row) {
        if constexpr (ALL)
            copy_box_to_all(destination, &map, column, row, barrier, (1 << CLUSTER) - 1);
        else
            copy_box(destination, &map, column, row, barrier);
    };
    if constexpr (TRANSPOSED) {
#pragma unroll
        for (int i = 0; i < COUNT / CHUNK; i++)
            copy(to + i * CHUNK_BYTES, first + i * CHUNK, depth);
    } else {
        copy(to, depth, first);
    }
}

/* Where a step's operand is: the tensor map, what to add to the tile's row (of a) or column (of b), and what to
 * add to the depth. */
struct Source {
    const CUtensorMap *map;
    int first, depth;
};

/* A block's static shared memory for `multiply`, besides SHARED_BYTES of dynamic shared memory. full: a step's
 * operands have arrived; empty: they have been read. */
template <typename Tiles> struct Barriers {
    uint64_t full[Tiles::STEPS], empty[Tiles::STEPS];
    TileScheduler scheduler;
    uint64_t turn[GROUPS]; /* InTurns: the warpgroup may multiply its next tile */
    int last[GROUPS];      /* for add_split_sums */
};

/* Stores a warpgroup's sums d of one part of a split tile to memory. Returns true if this part is the last of its tile
 * to finish: then d is the sum of all parts, added in the order of the parts. `half`: which 64 rows of the block's tile
 * they are. `last`: shared memory of the warpgroup. */
template <int SUMS>
DEVICE bool add_split_sums(float (&d)[SUMS], const SplitSums &split, const TileScheduler &scheduler, int item,
                           int group, int half, int *last) {
    constexpr int FOURS = SUMS / 4, BATCH = 8;
    const int thread = threadIdx.x % GROUP, own = cluster_rank() * GROUPS + half;
    const int part = scheduler.part_of(item), tile = item - part * scheduler.rest - scheduler.whole;
    float4 *const sums = reinterpret_cast<float4 *>(split.sums) + thread;
    const auto offset_of = [&](int of_part) {
        return ((int64_t(of_part) * scheduler.rest + tile) * (CLUSTER * GROUPS) + own) * (FOURS * GROUP);
    };
#pragma unroll
    for (int j = 0; j < FOURS; j++)
        __stcg(sums + offset_of(part) + j * GROUP, make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
    __threadfence();
    group_sync(1 + group);
    if (thread == 0) {
        unsigned *const arrived = split.counters + LOCKSTEP_COUNTERS + tile * (CLUSTER * GROUPS) + own;
        *last = atomicAdd(arrived, 1u) == scheduler.parts - 1u;
        if (*last)
            *arrived = 0; /* for the next kernel */
        __threadfence();
    }
    group_sync(1 + group);
    if (!*last)
        return false;
#pragma unroll
    for (int i = 0; i < 4 * FOURS; i++)
        d[i] = 0.0f;
    const float4 *from = sums + offset_of(0);
    for (int n = 0; n < scheduler.parts; n++, from += offset_of(1) - offset_of(0))
#pragma unroll
        for (int first = 0; first < FOURS; first += BATCH) {
            float4 four[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++)
                four[j] = __ldcg(from + (first + j) * GROUP);
            asm volatile("" ::: "memory"); /* no loads of the next batch yet: registers are scarce */
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                d[4 * (first + j)] += four[j].x;
                d[4 * (first + j) + 1] += four[j].y;
                d[4 * (first + j) + 2] += four[j].z;
                d[4 * (first + j) + 3] += four[j].w;
            }
        }
    return true;
}

/* A thread's 16-bit results that are not stored yet: u[2 j + i] holds the results of d[4 j + 2 i] and the next one. */
constexpr int PARTS = COLUMNS / CHUNK, PART_PAIRS = CHUNK / 4;
struct Packed {
    unsigned u[PARTS * PART_PAIRS];
    int row, column; /* the thread's first row; the tile's first column */
    int at[2];       /* whatever Job::store needs to know about the thread's two rows */
};

/* Initialises barriers and prefetches the tensor maps: what can be done before the previous kernel ends. */
template <typename Tiles, typename... Maps> DEVICE void begin(Barriers<Tiles> &barriers, const Maps &...maps) {
    constexpr int READERS = __is_same(Tiles, InTurns) ? 1 : GROUPS; /* warpgroups of a block that read a step */
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tiles::STEPS; i++) {
            barrier_init(&barriers.full[i], 1);
            barrier_init(&barriers.empty[i], READERS * CLUSTER);
        }
        for (int i = 0; i < GROUPS; i++)
            barrier_init(&barriers.turn[i], 1);
        barriers_ready();
        (prefetch_map(&maps), ...);
    }
    cluster_sync();
}

/* The copying thread: loads the operands of all work items of its cluster into the ring. */
template <bool A_TRANSPOSED, bool B_TRANSPOSED, typename Job>
DEVICE void load_steps(char *steps, uint64_t *full, uint64_t *empty, const Job &job, const SplitSums &split,
                       const TileScheduler &scheduler, int rank, int first, int stride) {
    constexpr int STEP_BYTES = Job::Tiles::STEP_BYTES, SHARE = Job::Tiles::SHARE;
    Ring<Job::Tiles::STEPS> ring;
    /* Only in one block of the cluster: the other one waits for its half of the shared operand, and so follows. */
    ClusterLockstep lockstep(split, rank == 0 ? scheduler.time : 0, stride);
    for (int next = first; next < scheduler.items(); next += stride) {
        const WorkItem item = scheduler.at(next);
        const TileOrigin origin = job.order.at(item.tile, rank);
        for (int k = 0; k < item.steps; k++, ring.advance()) {
            char *const to = steps + ring.step * STEP_BYTES;
            const int at = item.first + k;
            const Source a = job.a(at), b = job.b(at);
            lockstep.before_step();
            barrier_wait(&empty[ring.step], ring.parity ^ 1); /* both blocks have read it: they share an operand */
            barrier_expect(&full[ring.step], STEP_BYTES);
            const int a_first = a.first + origin.row, a_depth = a.depth + at * DEPTH;
            const int b_first = b.first + origin.column, b_depth = b.depth + at * DEPTH;
            if (job.order.shape.wide) {
                constexpr int A_SHARE = ROWS / CLUSTER;
                copy_operand<A_TRANSPOSED, A_SHARE, true>(to + rank * A_SHARE * DEPTH * 2, *a.map,
                                                          a_first + rank * A_SHARE, a_depth, &full[ring.step]);
#pragma unroll
                for (int i = 0; i < CLUSTER; i++)
                    copy_operand<B_TRANSPOSED, SHARE, false>(to + A_BYTES + i * SHARE * DEPTH * 2, *b.map,
                                                             b_first + i * SHARE, b_depth, &full[ring.step]);
            } else {
                copy_operand<A_TRANSPOSED, ROWS, false>(to, *a.map, a_first, a_depth, &full[ring.step]);
                copy_operand<B_TRANSPOSED, SHARE, true>(to + A_BYTES + rank * SHARE * DEPTH * 2, *b.map,
                                                        b_first + rank * SHARE, b_depth, &full[ring.step]);
            }
        }
        if constexpr (__is_same(typename Job::Tiles, Together))
            for (int i = 0; i < Job::HELD; i++, ring.advance()) {
                barrier_wait(&empty[ring.step], ring.parity ^ 1);
                barrier_arrive(&full[ring.step]);
            }
    }
    lockstep.leave();
}

/* A warpgroup's view of the ring. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, typename Tiles> struct StepReader {
    unsigned a, b, full, empty; /* operands of the first step; addresses of its barriers */

    DEVICE StepReader(char *steps, Barriers<Tiles> &barriers)
        : a(operand_of<A_TRANSPOSED>(shared_address(steps), CHUNK_BYTES)),
          b(operand_of<B_TRANSPOSED>(shared_address(steps) + A_BYTES, CHUNK_BYTES)),
          full(shared_address(barriers.full)), empty(shared_address(barriers.empty)) {
    }
    DEVICE void wait(const Ring<Tiles::STEPS> &at) const {
        barrier_wait(full + at.step * 8, at.parity);
    }
    /* Tells the copying threads of both blocks that this group has read a step. */
    DEVICE void release(int step) const {
        const int thread = threadIdx.x % GROUP;
        if (thread < CLUSTER)
            barrier_arrive_at(empty + step * 8, thread);
    }
    /* Adds the products of step k of a tile to d; step 0 begins new sums. half: which 64 rows of the tile. The products
     * run asynchronously: what is done before products_wait overlaps with them. */
    template <int SUMS> DEVICE void multiply(float (&d)[SUMS], int step, int half, int k) const {
        const unsigned at = step * OPERAND_BYTES<Tiles::STEP_BYTES>,
                       a_at = a + at + half * OPERAND_BYTES<GROUP_ROWS * DEPTH * 2>, b_at = b + at;
#pragma unroll
        for (int part = 0; part < DEPTH / 16; part++)
            multiply_64xNx16<T, A_TRANSPOSED, B_TRANSPOSED>(d, a_at + part * OPERAND_STEP<A_TRANSPOSED>,
                                                            b_at + part * OPERAND_STEP<B_TRANSPOSED>, k | part);
    }
};

/* The warpgroup among those that sum. The shuffle tells the compiler that the value is the same in all lanes, so that
 * addresses of operands and barriers are in uniform registers. */
DEVICE int own_group() {
    return __shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1;
}
/* The thread's first row of a warpgroup's 64. */
DEVICE int own_row() {
    const int thread = threadIdx.x % GROUP;
    return thread / WARP * 16 + thread % WARP / 4;
}
/* The warp's shared memory for parts of the results. */
template <typename Tiles> DEVICE char *own_staging(char *steps) {
    return steps + Tiles::STEPS * Tiles::STEP_BYTES + (threadIdx.x / WARP - GROUP / WARP) * Tiles::WARP_STAGING;
}

/* Together: Rows of a job that needs to know nothing else about them. */
struct NoRows {
    int row;
    template <typename Job> DEVICE void load(const Job &, int first) {
        row = first;
    }
};

/* Together: the loop of a warpgroup without rows, in a wide cluster. It only tells the copying threads that it does not
 * need the steps. */
template <typename Job>
DEVICE void skip_steps(Barriers<Together> &barriers, const TileScheduler &scheduler, int first_item, int stride) {
    const int thread = threadIdx.x % GROUP;
    Ring<Together::STEPS> ring;
    for (int item = first_item; item < scheduler.items(); item += stride)
        for (int k = scheduler.at(item).steps + Job::HELD; k > 0; k--, ring.advance()) {
            barrier_wait(&barriers.full[ring.step], ring.parity);
            if (thread < CLUSTER)
                barrier_arrive_at(shared_address(&barriers.empty[ring.step]), thread);
        }
}

/* Together: the loop of a warpgroup, which sums its rows of this cluster's work items and converts the sums to
 * results. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, typename Job>
DEVICE void sum_together(char *steps, Barriers<Together> &barriers, const Job &job, const SplitSums &split,
                         const TileScheduler &scheduler, int rank, int first_item, int stride) {
    constexpr int STEPS = Together::STEPS;
    const int group = own_group();
    const StepReader<T, A_TRANSPOSED, B_TRANSPOSED, Together> reader(steps, barriers);
    char *const staging = own_staging<Together>(steps);
    char *held[Job::HELD + 1];
    Packed packed;
    bool pending = false; /* there are packed results that are not stored */
    Ring<STEPS> ring;
    for (int item = first_item; item < scheduler.items(); item += stride) {
        typename Job::Rows rows;
        float d[128];
        int before = 0;
        const int count = scheduler.at(item).steps;
        const auto step = [&](int k) {
            reader.wait(ring);
            products_begin();
            reader.multiply(d, ring.step, group, k);
            products_commit();
            if (k > 0) {
                products_wait<1>();
                reader.release(before);
            } else if (Job::HELD > 0 && item > first_item) { /* release the steps that the previous tile held */
                if (threadIdx.x % WARP == 0)
                    stores_wait<0>();
                group_sync(1 + group);
                for (int i = 1; i <= Job::HELD; i++)
                    reader.release((ring.step + STEPS - i) % STEPS);
            }
            before = ring.step;
            ring.advance();
        };
        constexpr int BEGIN = Job::PACKED ? PARTS : 1;
#pragma unroll
        for (int k = 0; k < BEGIN; k++) {
            if (k < count)
                step(k);
            if constexpr (Job::PACKED)
                if (pending)
                    job.store(packed, k, staging);
        }
        TileOrigin origin = job.order.at(scheduler.at(item).tile, rank);
        if constexpr (Job::KEEPS_PARTS)
            origin.row += scheduler.part_of(item) * job.order.shape.rows();
        rows.load(job, origin.row + group * GROUP_ROWS + own_row());
#pragma unroll 1
        for (int k = BEGIN; k < count; k++)
            step(k);
        products_wait<0>();
        reader.release(before);
#pragma unroll
        for (int i = 0; i < Job::HELD; i++, ring.advance()) {
            reader.wait(ring);
            held[i] = steps + ring.step * Together::STEP_BYTES;
        }
        pending = Job::KEEPS_PARTS || item < scheduler.whole ||
                  add_split_sums(d, split, scheduler, item, group, group, &barriers.last[group]);
        if (pending)
            job.finish(d, origin, rows, staging, held, packed);
        else
            packed = {}; /* tells the compiler that these registers need not be preserved up to here */
    }
    if constexpr (Job::PACKED)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            if (pending)
                job.store(packed, part, staging);
    stores_wait_all();
}

/* In turns: the loop of a warpgroup, which takes every other work item of this cluster. It waits for its turn before it
 * waits for steps: by the parity of its phase, a barrier cannot tell the next step in a buffer from the one after that. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, typename Job>
DEVICE void sum_in_turns(char *steps, Barriers<InTurns> &barriers, const Job &job, const SplitSums &split,
                         const TileScheduler &scheduler, int rank, int first_item, int stride) {
    const int group = own_group();
    const StepReader<T, A_TRANSPOSED, B_TRANSPOSED, InTurns> reader(steps, barriers);
    char *const staging = own_staging<InTurns>(steps);
    Ring<InTurns::STEPS> ring;
    int turn = 0;
    for (int item = first_item; item < scheduler.items(); item += stride, turn++) {
        const int count = scheduler.at(item).steps;
        if (turn % GROUPS != group) {
            ring.advance(count);
            continue;
        }
        if (turn > 0)
            barrier_wait(&barriers.turn[group], (turn - 1) / GROUPS % 2);
        TileOrigin origin = job.order.at(scheduler.at(item).tile, rank);
        origin.row += own_row();
        float upper[96], lower[96]; /* the tile's first 64 rows, and the others */
        int before = 0;
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            reader.wait(ring);
            products_begin();
            reader.multiply(upper, ring.step, 0, k);
            reader.multiply(lower, ring.step, 1, k);
            products_commit();
            if (k > 0) {
                products_wait<1>();
                reader.release(before);
            }
            before = ring.step;
            ring.advance();
        }
        if (threadIdx.x % GROUP == 0)
            barrier_arrive(&barriers.turn[1 - group]);
        products_wait<0>();
        reader.release(before);
        /* One copy of the conversion for both halves: as straight code, it takes long to fetch. */
#pragma unroll 1
        for (int half = 0; half < ROWS / GROUP_ROWS; half++) {
            if (half > 0)
#pragma unroll
                for (int i = 0; i < 96; i++)
                    upper[i] = lower[i];
            if (item < scheduler.whole ||
                add_split_sums(upper, split, scheduler, item, group, half, &barriers.last[group]))
                job.finish(upper, {origin.row + half * GROUP_ROWS, origin.column}, staging);
        }
    }
    stores_wait_all();
}

/* Computes all tiles of the job: clusters take work items in turn (see TileScheduler). A `Job` has
 *
 *     Tiles          Together or InTurns
 *     order, steps   a TileOrder; the steps of a tile's depth, at least one
 *     a(k), b(k)     the Sources of step k
 *
 * multiply_64xNx16 says which sums d a thread has. `staging` is shared memory of the warp, for PARTS_IN_FLIGHT
 * parts. In turns, a Job also has
 *
 *     finish(d, origin, staging)
 *                    converts 64 rows of a tile, and stores the results. The origin's row is the thread's
 *                    first; the other one is 8 rows further down
 *
 * Together:
 *
 *     Rows           what a thread loads about its two rows while they are being summed, by
 *                    load(job, row); the other row is row + 8
 *     PACKED         results are 16-bit, and are stored while the next tile is being summed, by
 *                    store(packed, part, staging)
 *     KEEPS_PARTS    all tiles are split, and there is one tile of rows. Parts are not added up here: the
 *                    results of part n are stored n tiles further down, and the next kernel adds them
 *     HELD           buffers of the ring that `finish` may use, after those of the tile's own steps
 *     finish(d, origin, rows, staging, held, packed)
 *                    converts the sums to results. held[i]: shared memory of the block, STEP_BYTES each.
 *                    Results that are not PACKED are stored here: no store of the previous tile still reads
 *                    `held`, and stores may still read it when `finish` returns
 *
 * The block has THREADS threads and Tiles::SHARED_BYTES of dynamic shared memory, and has called begin. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, typename Job>
DEVICE void multiply(char *memory, Barriers<typename Job::Tiles> &barriers, const Job &job, const SplitSums &split) {
    char *const steps = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    const int rank = static_cast<int>(cluster_rank());
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (threadIdx.x < WARP) {
        const int tiles = job.order.count();
        const TileScheduler found =
            split.parts ? TileScheduler::fixed(tiles, job.steps, stride, split.parts)
                        : TileScheduler::of_warp(tiles, job.steps, stride, split.capacity, Job::Tiles::SUM_STEPS);
        if (threadIdx.x == 0)
            barriers.scheduler = found;
    }
    __syncthreads();
    const TileScheduler scheduler = barriers.scheduler;

    if (threadIdx.x < GROUP) {
        give_registers<40>();
        if (threadIdx.x == 0)
            load_steps<A_TRANSPOSED, B_TRANSPOSED>(steps, barriers.full, barriers.empty, job, split, scheduler, rank,
                                                   first, stride);
        __syncwarp();
    } else {
        take_registers<232>();
        if constexpr (__is_same(typename Job::Tiles, InTurns)) {
            sum_in_turns<T, A_TRANSPOSED, B_TRANSPOSED>(steps, barriers, job, split, scheduler, rank, first, stride);
        } else {
            const int first_row = static_cast<int>(threadIdx.x / GROUP - 1) * GROUP_ROWS; /* of a wide cluster */
            if (job.order.shape.wide && first_row >= job.order.rows)
                skip_steps<Job>(barriers, scheduler, first, stride);
            else
                sum_together<T, A_TRANSPOSED, B_TRANSPOSED>(steps, barriers, job, split, scheduler, rank, first,
                                                            stride);
        }
    }
    cluster_sync(); /* no block exits while copies or arrivals of the other one may still reach it */
}

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* ---- launching ------------------------------------------------------------------------------- */

/* The map of a matrix whose rows begin at multiples of 16 bytes, in boxes of box_rows x 128 bytes. Elements
 * outside of it read as 0 and are not written. `streamed`: it is read only once, so L2 loads 256 bytes at a
 * time. (For operands that are read from L2 several times, that would increase the traffic between the two
 * halves of L2 by half.) */
static inline bool map_matrix(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                              int64_t stride, int box_rows, bool streamed = false) {
    const int64_t size[] = {columns, rows};
    return make_tensor_map(map, dtype, data, 2, size, &stride,
                           {128 / static_cast<int>(rafter_dtype_bytes(dtype)), box_rows}, CU_TENSOR_MAP_SWIZZLE_128B,
                           streamed ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

/* The map of an operand, of which `count` rows of a, or columns of b, are copied at a time. `transposed`: in memory, it
 * has a row per depth. */
static inline bool map_operand(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                               int64_t stride, bool transposed, int count, bool streamed = false) {
    return map_matrix(map, dtype, data, rows, columns, stride, transposed ? DEPTH : count, streamed);
}

/* The launch of a kernel that computes rows x columns results. */
template <typename Tiles>
Launch launch_for(const rafter_cuda_state *state, ClusterShape shape, int64_t rows, int64_t columns,
                  const SplitSums &split) {
    const int64_t tiles = shape.tiles(rows, columns);
    const int64_t items = split.parts              ? tiles * split.parts
                          : tiles < split.capacity ? split.capacity
                                                   : tiles,
                  most = max((state->multiprocessors - split.left) / CLUSTER, 1);
    Launch how = {CLUSTER * (items < most ? items : most), THREADS, Tiles::SHARED_BYTES};
    how.cluster = CLUSTER;
    return how;
}

} // namespace gemm

#endif
