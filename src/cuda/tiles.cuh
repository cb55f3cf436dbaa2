/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of 16-bit matrices by Hopper's tensor cores: a[m, k] b[k, n], a tile of 128 x 256 sums at a time in the
 * registers of two warpgroups, which turn it there into whatever is wanted of it.
 *
 * A cluster of two blocks takes 256 rows x 256 columns: one warp of each block copies, 64 elements of depth at a time,
 * the block's 128 rows of a and half of the columns of b, the latter into both blocks; two warpgroups multiply, 64 rows
 * each. Four such steps are under way at a time, across tiles: while the registers of one tile are being turned into
 * results, the operands of the next are on their way. Meanwhile nothing is multiplied, so that it must be quick: what
 * it takes is read before, and results of 16 bits stay in registers, two in one, until the next tile is being summed;
 * they leave through shared memory by the copy engine, 64 columns of a warp's 16 rows at a time. (A tile to each
 * warpgroup, in turn, hides all of it; but the tiles are narrower then, and lose more than that:
 * docs/perf/linear_cross_entropy.md.)
 */
#ifndef RAFTER_CUDA_TILES_CUH
#define RAFTER_CUDA_TILES_CUH

#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"

namespace tiles {

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64;                    /* of a block's step */
constexpr int CLUSTER = 2, STEPS = 4;                                   /* blocks; steps under way */
constexpr int GROUP_ROWS = 64, GROUPS = ROWS / GROUP_ROWS, GROUP = 128; /* of a warpgroup; warpgroups; their threads */
constexpr int THREADS = GROUP * (1 + GROUPS);
constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, STEP_BYTES = A_BYTES + B_BYTES;
constexpr int SHARE = COLUMNS / CLUSTER; /* of b's columns, that a block copies */
constexpr int CHUNK = 64;                /* elements of 128 bytes, as wide as the copy engine swizzles */
constexpr int CHUNK_BYTES = CHUNK * DEPTH * 2;
constexpr int PARTS_UNDER_WAY = 2;                          /* of the results that a warp stores */
constexpr int PART_ROWS = 16, PART_BYTES = PART_ROWS * 128; /* of a part */
constexpr int STAGING_BYTES = GROUPS * GROUP / WARP * PARTS_UNDER_WAY * PART_BYTES;
constexpr int SHARED_BYTES = STEPS * STEP_BYTES + STAGING_BYTES + 1024; /* and what aligning to 1024 takes */

/* What a cluster does in a turn: steps [first, first + steps) of a tile. */
struct Turn {
    int tile, first, steps;
};

/* How tiles are dealt out, in waves of one to each cluster. Those of a last wave that would leave many clusters idle
 * are taken apart, if that is quicker: `parts` of each tile's depth are turns of their own, and that of them which
 * ends last adds up what all have left in memory, in their order. So nobody waits, and sums do not depend on who is
 * last. */
struct Deal {
    static constexpr int MOST_PARTS = 16, LEAST_GAIN = 8; /* the latter in steps */
    static_assert(MOST_PARTS < WARP, "a lane to each number of parts");
    int whole, rest, parts, steps; /* tiles that are not taken apart, that are; steps of a tile */
    int64_t time;                  /* of all, in steps */

    /* `room`: parts that a Meeting has place for. What parts cost beside their steps is that each leaves its sums, and
     * the last one of a tile reads them all: all clusters at the same time, through L2. On the device, by all lanes of
     * a warp. */
    static __host__ __device__ Deal of(int tiles, int steps, int clusters, int room) {
        const int last = tiles % clusters, waves = tiles / clusters;
        int64_t least = int64_t(last > 0 ? steps : 0) * WARP + 1; /* steps of the last wave, and parts */
        const auto consider = [&](int n) {
            const int time = (last * n + clusters - 1) / clusters * ((steps + n - 1) / n) + 4 + last * n / 4;
            if (time <= steps - LEAST_GAIN && int64_t(time) * WARP + n < least)
                least = int64_t(time) * WARP + n;
        };
        const int most = last == 0 ? 0 : MOST_PARTS < room / last ? MOST_PARTS : room / last;
#ifdef __CUDA_ARCH__
        const int n = threadIdx.x % WARP;
        if (n > 1 && n <= most)
            consider(n);
        for (int other = WARP / 2; other > 0; other /= 2)
            least = min(least, __shfl_xor_sync(~0u, least, other));
#else
        for (int n = 2; n <= most; n++)
            consider(n);
#endif
        const int parts = static_cast<int>(least % WARP);
        const int64_t time = int64_t(waves) * steps + least / WARP;
        return parts > 1 ? Deal{tiles - last, last, parts, steps, time} : Deal{tiles, 0, 1, steps, time};
    }
    DEVICE int turns() const {
        return whole + rest * parts;
    }
    /* Of a tile that is taken apart; neighbours are of the same depths, whose operands L2 has. */
    DEVICE int part_of(int turn) const {
        return (turn - whole) / rest;
    }
    DEVICE Turn at(int turn) const {
        if (turn < whole)
            return {turn, 0, steps};
        const int part = part_of(turn), first = part * steps / parts;
        return {turn - part * rest, first, (part + 1) * steps / parts - first};
    }
};

/* Where parts of tiles meet (see Deal), and clusters each other (see Pace). */
constexpr int64_t MEETING_BYTES = int64_t(CLUSTER) * ROWS * COLUMNS * 4; /* of a part */
struct Meeting {
    float *sums;
    unsigned *counters; /* counters_of(clusters); 0 before a kernel and after it */
    int room;           /* parts */
};
constexpr int PACE_COUNTERS = 5; /* the first of them */
constexpr int counters_of(int clusters) {
    return PACE_COUNTERS + clusters * CLUSTER * GROUPS;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Which step of the ring, and the parity of its barriers' phase. */
struct Ring {
    int step = 0;
    unsigned parity = 0;
    DEVICE void advance() {
        if (++step == STEPS) {
            step = 0;
            parity ^= 1;
        }
    }
};

/* Elements [first, first + COUNT) of what is multiplied by the depths [depth, depth + DEPTH), to where operand_of
 * expects them; to all blocks of the cluster if ALL. TURNED: the matrix lies with a row for each depth. */
template <bool TURNED, int COUNT, bool ALL>
DEVICE void copy_operand(char *to, const CUtensorMap &map, int first, int depth, uint64_t *barrier) {
    const auto copy = [&](char *there, int column, int row) {
        if constexpr (ALL)
            copy_box_to_all(there, &map, column, row, barrier, (1 << CLUSTER) - 1);
        else
            copy_box(there, &map, column, row, barrier);
    };
    if constexpr (TURNED) {
#pragma unroll
        for (int i = 0; i < COUNT / CHUNK; i++)
            copy(to + i * CHUNK_BYTES, first + i * CHUNK, depth);
    } else {
        copy(to, depth, first);
    }
}

/* A tile: the cluster's first row and column. */
struct Place {
    int row, column;
};

/* Where an operand of a step lies in a map: what is to be added to the tile's row or column, and to the depth. */
struct Source {
    const CUtensorMap *map;
    int first, depth;
};

/* Which tile comes when: bands of BAND tiles of rows, in each all columns, rows first, and every other band from the
 * last column to the first. So the operands of one wave of tiles, which are multiplied at about the same pace, are few,
 * and mostly come from L2. */
struct Order {
    static constexpr int BAND = 8;
    int down, across; /* tiles of rows (of a cluster) and of columns */

    DEVICE Order(int64_t rows, int64_t columns)
        : down(static_cast<int>((rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS))),
          across(static_cast<int>((columns + COLUMNS - 1) / COLUMNS)) {
    }
    DEVICE int count() const {
        return down * across;
    }
    DEVICE Place at(int tile) const {
        const int band = tile / (BAND * across), inside = tile - band * BAND * across;
        const int high = min(BAND, down - band * BAND), column = inside / high;
        return {(band * BAND + inside - column * high) * CLUSTER * ROWS,
                (band % 2 == 0 ? column : across - 1 - column) * COLUMNS};
    }
};

/* Keeps clusters together. They drift apart, the further the longer a product takes, and when one comes for what
 * another has read, L2 has lost it: at 20 ms a product reads memory three times as often as it must. So in a long
 * product, every ROUND steps, a cluster waits until all have come as far as itself the round before. Nobody relies on
 * it: where others are not running (a GPU that is shared), it is given up after MOST_LOOKS, some 70 us; and what a
 * cluster that has no more to do adds for its rounds to come counts for others at once, so that a last wave is free. */
class Pace {
    static constexpr int LONG = 2048, ROUND = 16; /* steps */
    static constexpr unsigned SLOTS = PACE_COUNTERS - 1;
    static constexpr int MOST_LOOKS = 100;
    unsigned *const counters;        /* SLOTS, which rounds' arrivals take in turn; and of clusters that are done */
    const unsigned clusters, rounds; /* the latter of a cluster, at most */
    unsigned round = 0;
    int step = 0;
    bool waits = true;

  public:
    /* `steps`: of a cluster, at most. Not more than `clusters` take part, and all of them do. */
    DEVICE Pace(const Meeting &meeting, int64_t steps, unsigned cluster_count)
        : counters(steps >= LONG ? meeting.counters : NULL), clusters(cluster_count),
          rounds(static_cast<unsigned>(steps / ROUND)) {
    }
    /* Before a step. */
    DEVICE void keep() {
        if (!counters || ++step < ROUND)
            return;
        step = 0;
        atomicAdd(counters + round % SLOTS, 1u);
        if (waits && round > 0) {
            const unsigned before = round - 1, all = (before / SLOTS + 1) * clusters;
            int looks = 0;
            while (load_relaxed(counters + before % SLOTS) < all && ++looks < MOST_LOOKS)
                ;
            waits = looks < MOST_LOOKS;
        }
        round++;
    }
    /* Behind the last: nobody has to wait for this cluster any more. */
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

/* What a block has for multiply, as __shared__ (its SHARED_BYTES are beside it). */
struct Barriers {
    uint64_t full[STEPS], empty[STEPS];
    Deal deal;
    int last[GROUPS]; /* whether a group's part of a tile is the last */
};

/* A warpgroup's sums of its turn, which is a part of a tile, left in memory. True: all parts of the tile are there, and
 * d is their sum. */
DEVICE bool meet(float (&d)[128], const Meeting &meeting, const Deal &deal, int turn, int group, int *last) {
    constexpr int FOURS = 32, AT_A_TIME = 8;
    const int thread = threadIdx.x % GROUP, own = cluster_rank() * GROUPS + group;
    const int part = deal.part_of(turn), tile = turn - part * deal.rest - deal.whole;
    float4 *const sums = reinterpret_cast<float4 *>(meeting.sums) + thread;
    const auto place_of = [&](int of_part) {
        return ((int64_t(of_part) * deal.rest + tile) * (CLUSTER * GROUPS) + own) * (FOURS * GROUP);
    };
#pragma unroll
    for (int j = 0; j < FOURS; j++)
        __stcg(sums + place_of(part) + j * GROUP, make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]));
    __threadfence();
    group_sync(1 + group);
    if (thread == 0) {
        unsigned *const arrived = meeting.counters + PACE_COUNTERS + tile * (CLUSTER * GROUPS) + own;
        *last = atomicAdd(arrived, 1u) == deal.parts - 1u;
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
    const float4 *from = sums + place_of(0);
    for (int n = 0; n < deal.parts; n++, from += place_of(1) - place_of(0))
#pragma unroll
        for (int first = 0; first < FOURS; first += AT_A_TIME) {
            float4 four[AT_A_TIME];
#pragma unroll
            for (int j = 0; j < AT_A_TIME; j++)
                four[j] = __ldcg(from + (first + j) * GROUP);
            asm volatile("" ::: "memory"); /* registers are few */
#pragma unroll
            for (int j = 0; j < AT_A_TIME; j++) {
                d[4 * (first + j)] += four[j].x;
                d[4 * (first + j) + 1] += four[j].y;
                d[4 * (first + j) + 2] += four[j].z;
                d[4 * (first + j) + 3] += four[j].w;
            }
        }
    return true;
}

/* A thread's results of 16 bits that are still to be stored: u[2 j + i] has d[4 j + 2 i] and the next. */
constexpr int PARTS = COLUMNS / CHUNK, PART_PAIRS = 64 / PARTS;
struct Packed {
    unsigned u[PARTS * PART_PAIRS];
    int row, column; /* the thread's first; the tile's */
    int at[2];       /* whatever store needs to know of the two rows */
};

/* Barriers, and what copies need to know of the maps: all that can be done before the kernel before this one has
 * ended. */
template <typename... Maps> DEVICE void begin(Barriers &barriers, const Maps &...maps) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STEPS; i++) {
            barrier_init(&barriers.full[i], 1);
            barrier_init(&barriers.empty[i], GROUPS * CLUSTER);
        }
        barriers_ready();
        (prefetch_map(&maps), ...);
    }
    cluster_sync();
}

/* All tiles of the job, by clusters in turn (see Deal). `Job` has
 *
 *     order, steps             of tiles; and of each tile's depth, at least one
 *     a(k), b(k)               Sources of step k
 *     Rows                     what a thread reads of its two rows while they are being summed: load(job, row), the
 *                              other being row + 8
 *     PACKED                   whether results are of 16 bits, and stored while the next tile is being summed
 *     HELD                     steps of the ring, behind those of a tile's depth, which finish has to itself
 *     finish(d, place, rows, staging, held, packed)   what becomes of the sums: see multiply_64x256x16 for which thread
 *                              has which; `staging` is the warp's, PARTS_UNDER_WAY parts; held[i] the block's,
 *                              STEP_BYTES. What is not PACKED is stored here: nothing of the tile before is on its way
 *                              out of held any more, and what copies have begun to read may still be on return
 *     store(packed, part, staging)   PACKED: a part of the results
 *
 * The block has THREADS threads, SHARED_BYTES of memory, and has called begin. */
template <typename T, bool A_TURNED, bool B_TURNED, typename Job>
DEVICE void multiply(char *memory, Barriers &barriers, const Job &job, const Meeting &meeting) {
    char *const steps = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    uint64_t *const full = barriers.full, *const empty = barriers.empty;
    const int rank = static_cast<int>(cluster_rank());
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (threadIdx.x < WARP) {
        const Deal found = Deal::of(job.order.count(), job.steps, stride, meeting.room);
        if (threadIdx.x == 0)
            barriers.deal = found;
    }
    __syncthreads();
    const Deal deal = barriers.deal;

    if (threadIdx.x < GROUP) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            Ring ring;
            /* One block's is enough: the other needs its half of b. */
            Pace pace(meeting, rank == 0 ? deal.time : 0, stride);
            for (int next = first; next < deal.turns(); next += stride) {
                const Turn turn = deal.at(next);
                const Place place = job.order.at(turn.tile);
                for (int k = 0; k < turn.steps; k++, ring.advance()) {
                    char *const to = steps + ring.step * STEP_BYTES;
                    const int at = turn.first + k;
                    const Source a = job.a(at), b = job.b(at);
                    pace.keep();
                    barrier_wait(&empty[ring.step], ring.parity ^ 1); /* read by both blocks: b goes to both */
                    barrier_expect(&full[ring.step], STEP_BYTES);
                    copy_operand<A_TURNED, ROWS, false>(to, *a.map, a.first + place.row + rank * ROWS,
                                                        a.depth + at * DEPTH, &full[ring.step]);
                    copy_operand<B_TURNED, SHARE, true>(to + A_BYTES + rank * SHARE * DEPTH * 2, *b.map,
                                                        b.first + place.column + rank * SHARE, b.depth + at * DEPTH,
                                                        &full[ring.step]);
                }
                if constexpr (Job::HELD > 0)
                    for (int i = 0; i < Job::HELD; i++, ring.advance()) {
                        barrier_wait(&empty[ring.step], ring.parity ^ 1);
                        barrier_arrive(&full[ring.step]);
                    }
            }
            pace.leave();
        }
        __syncwarp();
    } else {
        take_registers<232>();
        const int thread = threadIdx.x % GROUP;
        /* Known to be the same in all lanes: so addresses of operands and barriers are of the uniform registers. */
        const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1;
        const unsigned steps_at = shared_address(steps), full_at = shared_address(full),
                       empty_at = shared_address(empty);
        const unsigned first_a = operand_of<A_TURNED>(steps_at + group * GROUP_ROWS * DEPTH * 2, CHUNK_BYTES),
                       first_b = operand_of<B_TURNED>(steps_at + A_BYTES, CHUNK_BYTES);
        /* By the group, which has read it, to both blocks. */
        const auto release = [&](int step) {
            if (thread < CLUSTER)
                barrier_arrive_at(empty_at + step * 8, thread);
        };
        char *const staging =
            steps + STEPS * STEP_BYTES + (group * GROUP + thread) / WARP * (PARTS_UNDER_WAY * PART_BYTES);
        const int own_row = rank * ROWS + group * GROUP_ROWS + thread / WARP * 16 + thread % WARP / 4;
        char *held[Job::HELD + 1];
        Packed packed;
        bool pending = false; /* results are packed, and not stored */
        Ring ring;
        for (int turn = first; turn < deal.turns(); turn += stride) {
            typename Job::Rows rows;
            float d[128];
            int before = 0;
            const int count = deal.at(turn).steps;
            const auto step = [&](int k) {
                const unsigned a = first_a + ring.step * OPERAND_BYTES<STEP_BYTES>,
                               b = first_b + ring.step * OPERAND_BYTES<STEP_BYTES>;
                barrier_wait(full_at + ring.step * 8, ring.parity);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; part++)
                    multiply_64x256x16<T, A_TURNED, B_TURNED>(d, a + part * OPERAND_STEP<A_TURNED>,
                                                              b + part * OPERAND_STEP<B_TURNED>, k | part);
                products_commit();
                if (k > 0) {
                    products_wait<1>();
                    release(before);
                } else if (Job::HELD > 0 && turn > first) { /* what the tile before has held is free */
                    if (thread % WARP == 0)
                        stores_wait<0>();
                    group_sync(1 + group);
                    for (int i = 1; i <= Job::HELD; i++)
                        release((ring.step + STEPS - i) % STEPS);
                }
                before = ring.step;
                ring.advance();
            };
            /* What is done behind a step takes no time from the products. */
            constexpr int BEGIN = Job::PACKED ? PARTS : 1;
#pragma unroll
            for (int k = 0; k < BEGIN; k++) {
                if (k < count)
                    step(k);
                if constexpr (Job::PACKED)
                    if (pending)
                        job.store(packed, k, staging);
            }
            const Place place = job.order.at(deal.at(turn).tile);
            rows.load(job, place.row + own_row);
#pragma unroll 1
            for (int k = BEGIN; k < count; k++)
                step(k);
            products_wait<0>();
            release(before);
#pragma unroll
            for (int i = 0; i < Job::HELD; i++, ring.advance()) {
                barrier_wait(full_at + ring.step * 8, ring.parity);
                held[i] = steps + ring.step * STEP_BYTES;
            }
            pending = turn < deal.whole || meet(d, meeting, deal, turn, group, &barriers.last[group]);
            if (pending)
                job.finish(d, place, rows, staging, held, packed);
            else
                packed = {}; /* so that these registers are known to be free until now */
        }
        if constexpr (Job::PACKED)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                if (pending)
                    job.store(packed, part, staging);
        stores_wait_all();
    }
    cluster_sync(); /* nobody leaves while another's copies or arrivals may still reach it */
}

/* ---- results --------------------------------------------------------------------------------- */

template <typename T> DEVICE unsigned pair_of(float a, float b) {
    const float both[2] = {a, b};
    const Pack<T, 2> pack = packed<T>(both);
    return reinterpret_cast<const unsigned &>(pack);
}

/* The first of this thread's two columns of d[4 j ...]. */
DEVICE int column_of(int j) {
    return 8 * j + 2 * (threadIdx.x & 3);
}

/* Part `part` of the results. */
template <typename T> DEVICE void pack_part(Packed &packed, int part, const float (&e)[2 * PART_PAIRS]) {
#pragma unroll
    for (int k = 0; k < PART_PAIRS; k++)
        packed.u[part * PART_PAIRS + k] = pair_of<T>(e[2 * k], e[2 * k + 1]);
}

/* The warp's 16 rows of a part into a box of shared memory, swizzled: packed ones, */
DEVICE void stage_part(char *box, const Packed &packed, int part) {
    const int lane = threadIdx.x % WARP, swizzled = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j += 2) {
        const unsigned *const u = packed.u + part * PART_PAIRS + 2 * j;
        store_8x8x4(box + lane % 16 * 128 + (swizzled ^ j * 16), {u[0], u[1], u[2], u[3]});
    }
}
/* or floats, 32 columns of them, out of e as the products leave it. */
constexpr int FLOATS = 128 / sizeof(float);
DEVICE void stage_part(char *box, const float (&e)[FLOATS / 2]) {
    const int lane = threadIdx.x % WARP, row = lane / 4, pair = lane % 4;
#pragma unroll
    for (int j = 0; j < FLOATS / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<float2 *>(box + (row + 8 * i) * 128 + ((2 * j + pair / 2) ^ row) * 16 + pair % 2 * 8) =
                make_float2(e[4 * j + 2 * i], e[4 * j + 2 * i + 1]);
}

/* What lanes have written into a box on its way to memory, by the copy engine, from (row, column) on. ADD: to what is
 * there. `row` is the warp's first, for the first lane at least. What the engine writes ends at a multiple of 16 bytes:
 * padding up to there must be nobody's. */
template <bool ADD> DEVICE void send_box(const char *box, const CUtensorMap &out, int column, int row) {
    shared_written();
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        if constexpr (ADD)
            add_box(&out, column, row, box);
        else
            store_box(&out, column, row, box);
    }
}

/* A packed part, when an earlier one has left its place in `staging`. ADD: rounded before, and after. */
template <bool ADD> DEVICE void store_part(const Packed &packed, int part, char *staging, const CUtensorMap &out) {
    char *const box = staging + part % PARTS_UNDER_WAY * PART_BYTES;
    if (threadIdx.x % WARP == 0)
        stores_wait<PARTS_UNDER_WAY - 1>();
    __syncwarp();
    stage_part(box, packed, part);
    send_box<ADD>(box, out, packed.column + part * CHUNK, packed.row);
}

/* Steps to be held so that each part of a tile of floats has a place of its own, and none waits for another: the warp's
 * for a part is in its staging, or in one of these. */
constexpr int PARTS_OF_STEP = STEP_BYTES / (GROUPS * GROUP / WARP * PART_BYTES);
constexpr int HELD_FOR_FLOATS = (COLUMNS / FLOATS - PARTS_UNDER_WAY + PARTS_OF_STEP - 1) / PARTS_OF_STEP;

template <bool ADD>
DEVICE void store_floats(const float (&e)[FLOATS / 2], int part, char *staging, char *const *held,
                         const CUtensorMap &out, int column, int row) {
    const int warp = threadIdx.x / WARP - GROUP / WARP, behind = part - PARTS_UNDER_WAY;
    char *const box = behind < 0
                          ? staging + part * PART_BYTES
                          : held[behind / PARTS_OF_STEP] + (warp * PARTS_OF_STEP + behind % PARTS_OF_STEP) * PART_BYTES;
    __syncwarp();
    stage_part(box, e);
    send_box<ADD>(box, out, column + part * FLOATS, row);
}

/* A part that the lanes have written into a box, by the warp itself, 16 bytes to a lane at a time, to rows that may lie
 * anywhere: to[i] is where this thread's begin, NULL if there is none. `column` is the part's first; from `columns` on
 * they are left alone. */
template <typename U, bool ADD>
DEVICE void scatter_box(const char *box, U *const (&to)[2], int column, int64_t columns) {
    constexpr int N = 16 / sizeof(U), LANES = 128 / 16;
    const int lane = threadIdx.x % WARP;
    const int64_t at = column + lane % LANES * N;
    __syncwarp();
#pragma unroll
    for (int first = 0; first < PART_ROWS; first += WARP / LANES) {
        const int row = first + lane / LANES, holder = row % 8 * 4;
        U *const low = reinterpret_cast<U *>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to[0]), holder));
        U *const high = reinterpret_cast<U *>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to[1]), holder));
        U *const there = row < 8 ? low : high;
        const Pack<U, N> pack = *reinterpret_cast<const Pack<U, N> *>(box + row * 128 + (lane % LANES ^ row % 8) * 16);
        if (!ADD && there && at + N <= columns)
            store_once<U, N>(there + at, pack);
        else if (there)
            for (int i = 0; i < N && at + i < columns; i++)
                there[at + i] = ADD ? from_float<U>(to_float(there[at + i]) + to_float(pack.v[i])) : pack.v[i];
    }
}
/* Two parts ago all had read the box: they have met since. */
template <typename U, bool ADD>
DEVICE void scatter_part(const Packed &packed, int part, char *staging, U *const (&to)[2], int64_t columns) {
    char *const box = staging + part % PARTS_UNDER_WAY * PART_BYTES;
    stage_part(box, packed, part);
    scatter_box<U, ADD>(box, to, packed.column + part * CHUNK, columns);
}
template <bool ADD>
DEVICE void scatter_floats(const float (&e)[FLOATS / 2], int part, char *staging, float *const (&to)[2], int column,
                           int64_t columns) {
    char *const box = staging + part % PARTS_UNDER_WAY * PART_BYTES;
    stage_part(box, e);
    scatter_box<float, ADD>(box, to, column + part * FLOATS, columns);
}

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* ---- launching ------------------------------------------------------------------------------- */

/* A matrix whose rows begin at multiples of 16 bytes, in boxes of box_rows x 128 bytes; what lies outside of it reads
 * as 0, and is not written. (L2 is not asked for more at a time: that made a half more of its halves' exchange.) */
static inline bool map_matrix(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                              int64_t stride, int box_rows) {
    const int64_t size[] = {columns, rows};
    return make_tensor_map(map, dtype, data, 2, size, &stride,
                           {128 / static_cast<int>(rafter_dtype_bytes(dtype)), box_rows}, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

/* As an operand of which COUNT elements are copied at a time; `turned`: its rows are depths. */
static inline bool map_operand(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                               int64_t stride, bool turned, int count) {
    return map_matrix(map, dtype, data, rows, columns, stride, turned ? DEPTH : count);
}

/* Blocks for all tiles of rows x columns results, or parts of them, of a kernel that begins with
 * wait_for_previous_kernel. */
static inline Launch launch_for(const rafter_cuda_state *state, int64_t rows, int64_t columns, const Meeting &meeting) {
    const int64_t tiles = ceil_div<int64_t>(rows, CLUSTER * ROWS) * ceil_div<int64_t>(columns, COLUMNS);
    const int64_t turns = tiles < meeting.room ? meeting.room : tiles, most = state->multiprocessors / CLUSTER;
    Launch how = {CLUSTER * (turns < most ? turns : most), THREADS, SHARED_BYTES};
    how.cluster = CLUSTER;
    how.overlaps = true;
    return how;
}

} // namespace tiles

#endif
