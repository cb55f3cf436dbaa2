/*
 * Logits that never leave the chip: x W^T by Hopper's tensor cores, and each tile of 128 rows x 256 classes turned, in
 * the registers that summed it, into
 *
 *     STATISTICS   the maximum and the sum of exponentials of each row over the tile
 *     EXPONENTIALS those, relative to a pivot that is known beforehand, and the exponentials themselves
 *     GRADIENT     dz, from coefficients of the rows
 *
 * for 16-bit inputs and the options that need nothing else of a column: no softcap, label smoothing, entropy, argmax.
 *
 * A cluster of two blocks takes 256 rows x 256 classes: one warp of each block copies, 64 elements of depth at a time,
 * the block's 128 rows of x and half of the classes' rows of W, the latter into both blocks; two warpgroups multiply,
 * 64 rows each. Four such steps are under way at a time, across tiles: while the registers of one tile are being turned
 * into results, the operands of the next are on their way. Meanwhile nothing is multiplied, so that it must be quick:
 * what is read of the rows has been read before, and what is written leaves through shared memory by the copy engine,
 * 64 columns of a warp's 16 rows at a time. (A tile to each warpgroup, in turn, hides it; but the tiles are
 * narrower then, and lose more than that: docs/perf/linear_cross_entropy.md.)
 */
#ifndef RAFTER_LCE_FUSED_CUH
#define RAFTER_LCE_FUSED_CUH

#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"
#include "ops/columns.cuh"

namespace fused {

enum Mode { STATISTICS, EXPONENTIALS, GRADIENT };

constexpr int ROWS = 128, CLASSES = 256, DEPTH = 64;                    /* of a block's step */
constexpr int CLUSTER = 2, STEPS = 4;                                   /* blocks; steps under way */
constexpr int GROUP_ROWS = 64, GROUPS = ROWS / GROUP_ROWS, GROUP = 128; /* of a warpgroup; warpgroups; their threads */
constexpr int THREADS = GROUP * (1 + GROUPS);
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = CLASSES * DEPTH * 2, STEP_BYTES = X_BYTES + W_BYTES;
constexpr int PART = 64, PARTS_UNDER_WAY = 2; /* columns of results that a warp stores at a time; of these */
constexpr int PART_ROWS = 16, PART_BYTES = PART_ROWS * PART * 2; /* of a warp */
constexpr int STAGING_BYTES = GROUPS * GROUP / WARP * PARTS_UNDER_WAY * PART_BYTES;
constexpr int SHARED_BYTES = STEPS * STEP_BYTES + STAGING_BYTES + 1024; /* and what aligning to 1024 takes */
constexpr int BAND = 8; /* clusters' rows that share a pass over the classes: 2048 rows of x stay in L2 */

/* How far above its pivot a logit may be, in units of u, before its exponential, or a sum of them, nears what a float
 * holds; and how far the pivot is put above the largest logit that is known of a row. */
constexpr float HEADROOM = 70.0f, MARGIN = 8.0f;
constexpr float MOST_SUM = 1e30f; /* e^69: no sum above it without an exponential that is too large, nearly */

struct Task {
    int64_t first_row, rows, first_class, classes; /* of x and W; the first are the call's, for labels and bias */
    int depth;
    const float *bias;            /* of all classes; NULL: none */
    RowStats *stats;              /* [rows][tiles]; GRADIENT: not written */
    int tiles;                    /* of a row of `stats` */
    float *z_label;               /* of the call's rows */
    const RowStats *sample;       /* EXPONENTIALS: of the task's rows, over some of their classes */
    const RowGradient *gradients; /* GRADIENT: of the call's rows */
    void *out;                    /* [rows][out_stride] in the inputs' dtype: exponentials or dz */
    int64_t out_stride;           /* a multiple of 8 */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- results of a tile --------------------------------------------------------------------------------------------
 */

/* Over the four lanes that share a row. */
DEVICE float quad_max(float a) {
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    return fmaxf(a, __shfl_xor_sync(~0u, a, 2));
}
DEVICE float quad_sum(float a) {
    a += __shfl_xor_sync(~0u, a, 1);
    return a + __shfl_xor_sync(~0u, a, 2);
}

template <typename T> DEVICE unsigned pair_of(float a, float b) {
    const float both[2] = {a, b};
    const Pack<T, 2> pack = packed<T>(both);
    return reinterpret_cast<const unsigned &>(pack);
}

/* A thread's two rows of a tile, i = 0 and 1, and what it reads of them while the tile is still being summed: from its
 * registers nothing has to be waited for when the sums are there. */
template <int MODE> struct TileRows {
    int64_t row[2]; /* among the task's */
    int64_t label[2];
    float known[2];          /* EXPONENTIALS: the sample's maximum */
    RowGradient gradient[2]; /* GRADIENT */

    DEVICE void load(const Loss &loss, const Task &task, int64_t first) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = first + 8 * i;
            label[i] = loss.ignore_index;
            known[i] = 0.0f;
            gradient[i] = {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (row[i] >= task.rows)
                continue;
            label[i] = loss.load_label(task.first_row + row[i]);
            if constexpr (MODE == EXPONENTIALS)
                known[i] = task.sample[row[i]].max;
            if constexpr (MODE == GRADIENT)
                gradient[i] = task.gradients[task.first_row + row[i]];
        }
    }
};

/* What the sums d of a tile become. */
template <typename T, int MODE> struct Results {
    const Loss &loss;
    const Task &task;
    const TileRows<MODE> &rows;
    const CUtensorMap &out;
    char *const staging; /* the warp's: PARTS_UNDER_WAY boxes */

    /* Adds the bias; columns that are not there become -inf. */
    DEVICE void complete(float (&d)[128], int64_t first_class, int there) const {
        if (task.bias)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (column_of(j) + c < there) {
                        const float bias = __ldg(task.bias + first_class + column_of(j) + c);
                        d[4 * j + c] += bias;
                        d[4 * j + 2 + c] += bias;
                    }
        if (there < CLASSES)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (column_of(j) + c >= there)
                        d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
    }

    /* The columns of j: column, and the next. */
    static DEVICE int column_of(int j) {
        return 8 * j + 2 * (threadIdx.x & 3);
    }

    /* Whether this thread holds column `at` of the `count` that begin at column `first`; -1 is none. */
    static DEVICE bool holds(int at, int first, int count) {
        return static_cast<unsigned>(at - first) < static_cast<unsigned>(count) &&
               (at / 2 & 3) == static_cast<int>(threadIdx.x & 3);
    }

    DEVICE void note_label(const float (&d)[128], int i, int at) const {
        if (!holds(at, 0, CLASSES))
            return;
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (column_of(j) + c == at)
                    task.z_label[task.first_row + rows.row[i]] = d[4 * j + 2 * i + c];
    }

    /* The maxima of both rows over the tile. */
    static DEVICE void find_maxima(const float (&d)[128], float (&max)[2]) {
        float of[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                of[k] = fmaxf(of[k], d[4 * j + k]);
        max[0] = quad_max(fmaxf(of[0], of[1]));
        max[1] = quad_max(fmaxf(of[2], of[3]));
    }

    static DEVICE void set_row(float (&d)[128], int i, float value) {
#pragma unroll
        for (int j = 0; j < 32; j++)
            d[4 * j + 2 * i] = d[4 * j + 2 * i + 1] = value;
    }

    /* The warp's 16 rows of part `part`, out of e as the products leave it, on their way to memory. */
    DEVICE void store_part(const float (&e)[PART / 2], int part, int64_t column) const {
        char *const box = staging + part % PARTS_UNDER_WAY * PART_BYTES;
        const int lane = threadIdx.x % WARP, row = lane % 16, swizzled = (lane / 16 ^ lane % 8) * 16;
        if (lane == 0)
            stores_wait<PARTS_UNDER_WAY - 1>(); /* the box has been read */
        __syncwarp();
#pragma unroll
        for (int j = 0; j < PART / 8; j += 2) {
            unsigned u[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                u[k] = pair_of<T>(e[4 * j + 2 * k], e[4 * j + 2 * k + 1]);
            store_8x8x4(box + row * PART * 2 + (swizzled ^ j * 16), u);
        }
        shared_written();
        __syncwarp();
        if (lane == 0)
            store_box(&out, static_cast<int>(column) + part * PART, static_cast<int>(rows.row[0]), box);
    }

    /* Rows' exponentials relative to `pivot`: their sums over the tile, and themselves if they are wanted. */
    DEVICE void sum_up(const float (&d)[128], const float (&pivot)[2], int64_t column, float (&sum)[2]) const {
        const float rate = loss.scale * LOG2E;
        float of[4] = {};
#pragma unroll
        for (int part = 0; part < CLASSES / PART; part++) {
            float e[PART / 2];
#pragma unroll
            for (int k = 0; k < PART / 2; k++) {
                e[k] = exp2_fast((d[part * PART / 2 + k] - pivot[k / 2 % 2]) * rate);
                of[k % 4] += e[k];
            }
            if constexpr (MODE == EXPONENTIALS)
                store_part(e, part, column);
        }
        sum[0] = quad_sum(of[0] + of[1]);
        sum[1] = quad_sum(of[2] + of[3]);
    }

    DEVICE void gather(float (&d)[128], int tile, int64_t column, const int (&at)[2]) const {
        float max[2], pivot[2], sum[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            note_label(d, i, at[i]);
        if constexpr (MODE == STATISTICS) {
            find_maxima(d, max);
#pragma unroll
            for (int i = 0; i < 2; i++)
                pivot[i] = pivot_at(max[i]);
            sum_up(d, pivot, column, sum);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                max[i] = pivot[i] = pivot_at(rows.known[i]) + MARGIN / loss.scale;
                const int64_t label = loss.class_of(rows.label[i]);
                if (label < 0) /* an ignored row: exponentials are 0; or one that is to be NaN */
                    set_row(d, i, label == IGNORED ? -INFINITY : NAN);
            }
            for (bool again = false;; again = true) {
                sum_up(d, pivot, column, sum);
                if (again || __all_sync(~0u, sum[0] <= MOST_SUM && sum[1] <= MOST_SUM))
                    break;
                stores_wait_all(); /* of what is to be written over */
                float of_tile[2];
                find_maxima(d, of_tile);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if ((of_tile[i] - pivot[i]) * loss.scale > HEADROOM) {
                        max[i] = of_tile[i];
                        pivot[i] = pivot_at(max[i]);
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((threadIdx.x & 3) == 0 && rows.row[i] < task.rows)
                task.stats[rows.row[i] * task.tiles + tile] = {max[i], sum[i]};
    }

    DEVICE void differentiate(float (&d)[128], int64_t column, const int (&at)[2]) const {
        ScaledExp<T> exp[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exp[i] = ScaledExp<T>(rows.gradient[i].p, rows.gradient[i].pivot, loss.scale);
            if (rows.gradient[i].constant)
                set_row(d, i, rows.gradient[i].pivot); /* p e^0 */
        }
#pragma unroll
        for (int part = 0; part < CLASSES / PART; part++) {
            float e[PART / 2];
#pragma unroll
            for (int k = 0; k < PART / 2; k++)
                e[k] = exp[k / 2 % 2].of(d[part * PART / 2 + k]);
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (holds(at[i], PART * part, PART) && !rows.gradient[i].constant) {
#pragma unroll
                    for (int k = 0; k < PART / 4; k++)
                        if (column_of(part * (PART / 8) + k / 2) + k % 2 == at[i])
                            e[k / 2 * 4 + 2 * i + k % 2] -= rows.gradient[i].target;
                }
            store_part(e, part, column);
        }
    }

    DEVICE void finish(float (&d)[128], int tile) const {
        const int64_t column = int64_t(tile) * CLASSES, first_class = task.first_class + column;
        const int there = static_cast<int>(min(int64_t(CLASSES), task.classes - column));
        int at[2]; /* the column of the label */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t label = loss.class_of(rows.label[i]), from = label - first_class;
            at[i] = label >= 0 && from >= 0 && from < there ? static_cast<int>(from) : -1;
        }
        complete(d, first_class, there);
        if constexpr (MODE == GRADIENT)
            differentiate(d, column, at);
        else
            gather(d, tile, column, at);
    }
};

/* ---- the kernel ---------------------------------------------------------------------------------------------------
 */

/* Which tile comes when: bands of BAND clusters' rows, in each all classes, rows first. */
struct Order {
    int clusters_down, across; /* tiles of rows (of a cluster) and of classes */

    DEVICE explicit Order(const Task &task)
        : clusters_down(static_cast<int>((task.rows + CLUSTER * ROWS - 1) / (CLUSTER * ROWS))),
          across(static_cast<int>((task.classes + CLASSES - 1) / CLASSES)) {
    }
    DEVICE int count() const {
        return clusters_down * across;
    }
    DEVICE void at(int turn, int *down, int *tile) const {
        const int band = turn / (BAND * across), inside = turn - band * BAND * across;
        const int high = min(BAND, clusters_down - band * BAND);
        *tile = inside / high;
        *down = band * BAND + inside - *tile * high;
    }
};

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

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

template <typename T, int MODE>
__global__ __launch_bounds__(THREADS, 1) void multiply(const __grid_constant__ CUtensorMap x,
                                                       const __grid_constant__ CUtensorMap w,
                                                       const __grid_constant__ CUtensorMap out,
                                                       const __grid_constant__ Loss loss,
                                                       const __grid_constant__ Task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ uint64_t full[STEPS], empty[STEPS];
    char *const steps = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
    const unsigned rank = cluster_rank();
    const Order order(task);
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER,
              depth_steps = (task.depth + DEPTH - 1) / DEPTH;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STEPS; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], GROUPS * CLUSTER);
        }
        barriers_ready();
    }
    cluster_sync();

    if (threadIdx.x < GROUP) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            Ring ring;
            for (int turn = first; turn < order.count(); turn += stride) {
                int down, tile;
                order.at(turn, &down, &tile);
                const int row = (down * CLUSTER + static_cast<int>(rank)) * ROWS;
                const int share = CLASSES / CLUSTER * static_cast<int>(rank);
                const int64_t w_row = task.first_class + int64_t(tile) * CLASSES + share;
                for (int k = 0; k < depth_steps; k++, ring.advance()) {
                    char *const to = steps + ring.step * STEP_BYTES;
                    barrier_wait(&empty[ring.step], ring.parity ^ 1); /* read by both blocks: W goes to both */
                    barrier_expect(&full[ring.step], STEP_BYTES);
                    copy_box(to, &x, k * DEPTH, row, &full[ring.step]);
                    copy_box_to_all(to + X_BYTES + share * DEPTH * 2, &w, k * DEPTH, static_cast<int>(w_row),
                                    &full[ring.step], (1 << CLUSTER) - 1);
                }
            }
        }
        __syncwarp();
    } else {
        take_registers<232>();
        const int group = threadIdx.x / GROUP - 1, thread = threadIdx.x % GROUP;
        char *const staging =
            steps + STEPS * STEP_BYTES + (group * GROUP + thread) / WARP * (PARTS_UNDER_WAY * PART_BYTES);
        Ring ring;
        int down, tile;
        order.at(first, &down, &tile);
        for (int turn = first; turn < order.count(); turn += stride) {
            TileRows<MODE> rows;
            float d[128];
            int before = 0, next_down = 0, next_tile = 0;
            for (int k = 0; k < depth_steps; k++, ring.advance()) {
                const char *const from = steps + ring.step * STEP_BYTES;
                const uint64_t a = operand_of(from + group * GROUP_ROWS * DEPTH * 2), b = operand_of(from + X_BYTES);
                barrier_wait(&full[ring.step], ring.parity);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; part++)
                    multiply_64x256x16<T>(d, a + 2 * part, b + 2 * part, k | part);
                products_commit();
                if (k > 0) {
                    products_wait<1>();
                    if (thread < CLUSTER)
                        barrier_arrive_at(&empty[before], thread);
                } else { /* what is done here takes no time from the products */
                    rows.load(loss, task,
                              (int64_t(down) * CLUSTER + rank) * ROWS + group * GROUP_ROWS + thread / WARP * 16 +
                                  thread % WARP / 4);
                    order.at(turn + stride, &next_down, &next_tile);
                }
                before = ring.step;
            }
            products_wait<0>();
            if (thread < CLUSTER)
                barrier_arrive_at(&empty[before], thread);
            Results<T, MODE>{loss, task, rows, out, staging}.finish(d, tile);
            down = next_down;
            tile = next_tile;
        }
        stores_wait_all();
    }
    cluster_sync(); /* nobody leaves while another's copies or arrivals may still reach it */
#else
    (void)x, (void)w, (void)out, (void)loss, (void)task;
#endif
}

/* ---- launching ----------------------------------------------------------------------------------------------------
 */

/* A matrix of 16-bit elements whose rows begin at multiples of 16 bytes, in boxes of box_rows x 64 columns; what lies
 * outside of it reads as 0, and is not written. */
static inline bool map_matrix(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                              int64_t stride, int box_rows) {
    const int64_t size[] = {columns, rows};
    return make_tensor_map(map, dtype, data, 2, size, &stride, {DEPTH, box_rows}, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/* Whether this build and device have the kernels: without sm_90a their bodies are empty, and so is their shared memory.
 * That is asked once, on the first device that could run them. */
static inline bool available(const rafter_cuda_state *state) {
    if (!hopper_allowed() || state->compute_capability != 90)
        return false;
    static const bool built = [] {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, multiply<bf16, STATISTICS>) == cudaSuccess &&
               attributes.sharedSizeBytes > 0;
    }();
    return built;
}

static inline int64_t tiles_across(int64_t classes) {
    return ceil_div<int64_t>(classes, CLASSES);
}

/* x: from the task's first row on; w: all classes. */
template <int MODE>
static inline rafter_status run(rafter_context *context, rafter_dtype dtype, const void *x, int64_t x_stride,
                                const void *w, int64_t w_stride, int64_t all_classes, const Loss &loss,
                                const Task &task) {
    CUtensorMap x_map, w_map, out_map = {};
    static_assert(PART == DEPTH, "both are 128 bytes, as wide as the copy engine swizzles");
    if (!map_matrix(&x_map, dtype, x, task.rows, task.depth, x_stride, ROWS) ||
        !map_matrix(&w_map, dtype, w, all_classes, task.depth, w_stride, CLASSES / CLUSTER) ||
        (MODE != STATISTICS && !map_matrix(&out_map, dtype, task.out, task.rows, ceil_div<int64_t>(task.classes, 8) * 8,
                                           task.out_stride, PART_ROWS)))
        return rafter_fail(context, RAFTER_DEVICE_ERROR, "linear_cross_entropy: no tensor map could be made");
    const int64_t tiles = ceil_div<int64_t>(task.rows, CLUSTER * ROWS) * tiles_across(task.classes);
    const int64_t most = context->cuda_state->multiprocessors / CLUSTER;
    Launch how = {CLUSTER * (tiles < most ? tiles : most), THREADS, SHARED_BYTES};
    how.cluster = CLUSTER;
    if (dtype == RAFTER_BF16)
        launch(context, how, multiply<bf16, MODE>, x_map, w_map, out_map, loss, task);
    else
        launch(context, how, multiply<fp16, MODE>, x_map, w_map, out_map, loss, task);
    return RAFTER_OK;
}

} // namespace fused

#endif
