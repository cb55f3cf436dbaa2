/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which cluster sums which tile of a matrix product (hopper_gemm.cuh), and when: tile sizes, the scheduler, split
 * tiles, the order of tiles, and the lockstep of clusters.
 */
#ifndef RAFTER_CUDA_TILE_SCHEDULER_CUH
#define RAFTER_CUDA_TILE_SCHEDULER_CUH

#include "cuda/hopper.cuh"

namespace gemm {

constexpr int ROWS = 128, DEPTH = 64;                /* rows of a block's tile; elements of depth per step */
constexpr int COLUMNS = 256, COLUMNS_IN_TURNS = 192; /* columns of a block's tile: see hopper_gemm.cuh */
constexpr int CLUSTER = 2;                           /* blocks */
constexpr int GROUP_ROWS = 64, GROUPS = ROWS / GROUP_ROWS, GROUP = 128; /* rows, count and threads of warpgroups */
constexpr int THREADS = GROUP * (1 + GROUPS);

/* The tile of a cluster consists of the tiles of its two blocks. Usually one is below the other, and the blocks
 * share their part of b. For products of so few rows that one block has them all, the cluster is wide: they are
 * side by side and share their part of a. */
struct ClusterShape {
    bool wide;
    int block_columns;

    __host__ __device__ explicit ClusterShape(bool side_by_side, int columns_of_block = COLUMNS)
        : wide(side_by_side), block_columns(columns_of_block) {
    }
    /* For a product of this many rows. */
    static __host__ ClusterShape of(int64_t rows, int columns_of_block = COLUMNS) {
        return ClusterShape(rows <= ROWS, columns_of_block);
    }
    __host__ __device__ int rows() const {
        return wide ? ROWS : CLUSTER * ROWS;
    }
    __host__ __device__ int columns() const {
        return wide ? CLUSTER * block_columns : block_columns;
    }
    int64_t tiles(int64_t down, int64_t across) const {
        return ceil_div<int64_t>(down, rows()) * ceil_div<int64_t>(across, columns());
    }
    /* Rows of a that one block copies. */
    int a_share() const {
        return wide ? ROWS / CLUSTER : ROWS;
    }
};

/* What a cluster is given at a time: steps [first, first + steps) of the depth of a tile. */
struct WorkItem {
    int tile, first, steps;
};

/* Tiles are scheduled in waves, one tile per cluster. If the last wave would leave many clusters idle, its tiles
 * are split where that is faster: the depth of a tile is cut into `parts` parts, each a work item that stores its
 * sums in memory. The part that finishes last adds up all parts of its tile, in the order of the parts. So no
 * cluster waits, and results do not depend on which part is last. */
struct TileScheduler {
    static constexpr int MOST_PARTS = 16, LEAST_GAIN = 8; /* LEAST_GAIN: in steps */
    static_assert(MOST_PARTS < WARP, "one lane per number of parts");
    int whole, rest, parts, steps; /* tiles that are not split; tiles that are; parts of each; steps of a tile */
    int64_t time;                  /* estimate for the whole product, in steps */

    /* The search for the best number of parts. */
    struct Search {
        int tiles, steps, clusters, sum_steps;
        int last, most; /* tiles of the last wave; parts of each, at most */
        int64_t least;  /* of the best so far: WARP * steps of the last wave + parts, so that a minimum finds it */

        __host__ __device__ Search(int tiles_, int steps_, int clusters_, int capacity, int sum_steps_)
            : tiles(tiles_), steps(steps_), clusters(clusters_), sum_steps(sum_steps_), last(tiles_ % clusters_),
              most(last == 0                      ? 0
                   : MOST_PARTS < capacity / last ? MOST_PARTS
                                                  : capacity / last),
              least(int64_t(last > 0 ? steps_ : 0) * WARP + 1) {
        }
        /* Estimates the last wave if it has n parts per tile. 4 + last * n / 4 + sum_steps * n steps are for their sums:
         * see `of`. */
        __host__ __device__ void consider(int n) {
            const int time =
                (last * n + clusters - 1) / clusters * ((steps + n - 1) / n) + 4 + last * n / 4 + sum_steps * n;
            if (time <= steps - LEAST_GAIN && int64_t(time) * WARP + n < least)
                least = int64_t(time) * WARP + n;
        }
        __host__ __device__ TileScheduler best() const {
            const int parts = static_cast<int>(least % WARP);
            const int64_t time = int64_t(tiles / clusters) * steps + least / WARP;
            return parts > 1 ? TileScheduler{tiles - last, last, parts, steps, time}
                             : TileScheduler{tiles, 0, 1, steps, time};
        }
    };

    /* `capacity`: parts that SplitSums can hold. Besides their steps, parts cost memory traffic through L2, in all
     * clusters at the same time: each part stores its sums, and the last one of a tile loads those of all. sum_steps: in
     * how many steps it adds a part. */
    static TileScheduler of(int tiles, int steps, int clusters, int capacity, int sum_steps) {
        Search search(tiles, steps, clusters, capacity, sum_steps);
        for (int n = 2; n <= search.most; n++)
            search.consider(n);
        return search.best();
    }
    /* The same on the device, by all lanes of a warp. */
    static DEVICE TileScheduler of_warp(int tiles, int steps, int clusters, int capacity, int sum_steps) {
        Search search(tiles, steps, clusters, capacity, sum_steps);
        const int n = threadIdx.x % WARP;
        if (n > 1 && n <= search.most)
            search.consider(n);
        for (int other = WARP / 2; other > 0; other /= 2)
            search.least = min(search.least, __shfl_xor_sync(~0u, search.least, other));
        return search.best();
    }
    /* Splits every tile into `parts`, however many tiles there are. For batch invariance: a sum is always cut in the
     * same places. */
    static __host__ __device__ TileScheduler fixed(int tiles, int steps, int clusters, int parts) {
        return {0, tiles, parts, steps,
                int64_t((tiles * parts + clusters - 1) / clusters) * ((steps + parts - 1) / parts)};
    }
    DEVICE int items() const {
        return whole + rest * parts;
    }
    /* Which part of its tile a work item is. Consecutive items are the same part of different tiles: they share
     * operands, which are in L2 then. */
    DEVICE int part_of(int item) const {
        return (item - whole) / rest;
    }
    DEVICE WorkItem at(int item) const {
        if (item < whole)
            return {item, 0, steps};
        const int part = part_of(item), first = part * steps / parts;
        return {item - part * rest, first, (part + 1) * steps / parts - first};
    }
};

/* Workspace of a product: the sums of parts of split tiles, and counters. */
constexpr int64_t SPLIT_BYTES = int64_t(CLUSTER) * ROWS * COLUMNS * 4; /* of one part */
struct SplitSums {
    float *sums;
    unsigned *counters; /* counters_of(split tiles) of them; 0 before and after a kernel */
    int capacity;       /* parts that fit into `sums` */
    int parts = 0;      /* TileScheduler::fixed with so many parts, which must fit; 0: TileScheduler::of */
    /* Multiprocessors that are left to other work that runs at the same time. Which tiles a cluster takes is fixed
     * beforehand. So if the other work held some of its multiprocessors, a cluster would start late and end late. */
    int left = 0;
};
constexpr int LOCKSTEP_COUNTERS = 5; /* the first of the counters are those of ClusterLockstep */
constexpr int counters_of(int split_tiles) {
    return LOCKSTEP_COUNTERS + split_tiles * CLUSTER * GROUPS;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Row and column of the first element of a tile. */
struct TileOrigin {
    int row, column;
};

/* The order of tiles. The tiles of rows are grouped into bands of BAND. Within a band, tiles are ordered by column,
 * then by row; every other band goes from the last column to the first. So the tiles of one wave, which advance at
 * about the same speed, need only few different rows of a and columns of b, and most loads hit L2. */
struct TileOrder {
    static constexpr int BAND = 8;
    ClusterShape shape;
    int64_t rows;
    int down, across; /* tiles of a cluster along the rows and along the columns */

    DEVICE TileOrder(int64_t all_rows, int64_t columns, ClusterShape cluster = ClusterShape(false))
        : shape(cluster), rows(all_rows), down(static_cast<int>((rows + shape.rows() - 1) / shape.rows())),
          across(static_cast<int>((columns + shape.columns() - 1) / shape.columns())) {
    }
    DEVICE int count() const {
        return down * across;
    }
    /* The origin of the tile of block `rank` of the cluster. It may be past the last row or column. */
    DEVICE TileOrigin at(int tile, int rank) const {
        const int band = tile / (BAND * across), inside = tile - band * BAND * across;
        const int high = min(BAND, down - band * BAND), column = inside / high;
        return {(band * BAND + inside - column * high) * shape.rows() + (shape.wide ? 0 : rank * ROWS),
                (band % 2 == 0 ? column : across - 1 - column) * shape.columns() +
                    (shape.wide ? rank * shape.block_columns : 0)};
    }
};

/* Keeps the clusters of a long product in lockstep. Without it they drift apart, and operands that they share are
 * evicted from L2 and read again: a product of 20 ms reads memory three times as often as it must. A round is ROUND
 * steps. At the end of a round a cluster waits until all others have ended the round before.
 *
 * Correctness does not depend on it. If other clusters do not run (on a shared GPU), a cluster gives up waiting after
 * MOST_POLLS, about 70 us, for the rest of the kernel. A cluster without further work reports the end of all its
 * remaining rounds at once, so that nobody waits for it in a last wave. */
class ClusterLockstep {
    static constexpr int LONG = 2048, ROUND = 16; /* steps */
    static constexpr unsigned SLOTS = LOCKSTEP_COUNTERS - 1;
    static constexpr int MOST_POLLS = 100;
    unsigned *const counters;        /* arrivals, those of round r in counter r % SLOTS; last, the finished clusters */
    const unsigned clusters, rounds; /* rounds: most that any cluster has */
    unsigned round = 0;
    int step = 0;
    bool waits = true;

  public:
    /* `steps`: the most that any cluster has. All of the cluster_count clusters must take part. */
    DEVICE ClusterLockstep(const SplitSums &split, int64_t steps, unsigned cluster_count)
        : counters(steps >= LONG ? split.counters : NULL), clusters(cluster_count),
          rounds(static_cast<unsigned>(steps / ROUND)) {
    }
    /* Before every step. */
    DEVICE void before_step() {
        if (!counters || ++step < ROUND)
            return;
        step = 0;
        atomicAdd(counters + round % SLOTS, 1u);
        if (waits && round > 0) {
            const unsigned before = round - 1, all = (before / SLOTS + 1) * clusters;
            int polls = 0;
            while (load_relaxed(counters + before % SLOTS) < all && ++polls < MOST_POLLS)
                ;
            waits = polls < MOST_POLLS;
        }
        round++;
    }
    /* After the last step: from now on nobody waits for this cluster. */
    DEVICE void leave() {
        if (!counters)
            return;
        for (; round < rounds; round++)
            atomicAdd(counters + round % SLOTS, 1u);
        __threadfence();
        if (atomicAdd(counters + SLOTS, 1u) == clusters - 1)
            for (unsigned i = 0; i <= SLOTS; i++)
                counters[i] = 0; /* for the next kernel */
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

} // namespace gemm

#endif
