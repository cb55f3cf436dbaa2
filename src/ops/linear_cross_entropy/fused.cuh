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
 * into results, the operands of the next are on their way.
 */
#ifndef RAFTER_LCE_FUSED_CUH
#define RAFTER_LCE_FUSED_CUH

#include <stdlib.h>
#include <string.h>

#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "ops/columns.cuh"

namespace fused {

enum Mode { STATISTICS, EXPONENTIALS, GRADIENT };

#ifndef TILE_CLASSES
#define TILE_CLASSES 160
#endif
constexpr int ROWS = 128, CLASSES = TILE_CLASSES, DEPTH = 64; /* of a block's step */
constexpr int CLUSTER = 2;                                    /* blocks */
constexpr int HALF = 64, HALVES = ROWS / HALF;                /* rows of one product; products of a tile */
constexpr int HELD = HALF * CLASSES / 128;                    /* elements of a half that a thread holds */
constexpr int GROUP = 128, GROUPS = 2;                        /* threads of a warpgroup; warpgroups that multiply */
constexpr int THREADS = GROUP * (1 + GROUPS);
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = CLASSES * DEPTH * 2, STEP_BYTES = X_BYTES + W_BYTES;
constexpr int STEPS = (226 << 10) / STEP_BYTES;         /* under way */
constexpr int SHARED_BYTES = STEPS * STEP_BYTES + 1024; /* and what aligning to 1024 takes */
constexpr int BAND = 8; /* clusters' rows that share a pass over the classes: 2048 rows of x stay in L2 */

/* How far above its pivot a logit may be, in units of u, before its exponential, or a sum of them, nears what a float
 * holds; and how far the pivot is put above the largest logit that is known of a row. */
constexpr float HEADROOM = 70.0f, MARGIN = 8.0f;

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

/* u[m] is of 8-byte block m and this lane; afterwards of lane m and this lane's block: 16 bytes that are neighbours. */
DEVICE uint4 turn_quad(unsigned (&u)[4]) {
    const int lane = threadIdx.x & 3;
    const bool odd = lane & 1, high = lane & 2;
    const unsigned near0 = __shfl_xor_sync(~0u, odd ? u[0] : u[1], 1);
    const unsigned near1 = __shfl_xor_sync(~0u, odd ? u[2] : u[3], 1);
    const unsigned a0 = odd ? near0 : u[0], a1 = odd ? u[1] : near0; /* block 0 or 1 of this pair of lanes */
    const unsigned b0 = odd ? near1 : u[2], b1 = odd ? u[3] : near1; /* block 2 or 3 */
    const unsigned far0 = __shfl_xor_sync(~0u, high ? a0 : b0, 2);
    const unsigned far1 = __shfl_xor_sync(~0u, high ? a1 : b1, 2);
    return high ? make_uint4(far0, far1, b0, b1) : make_uint4(a0, a1, far0, far1);
}

template <typename T> DEVICE unsigned pair_of(float a, float b) {
    const float both[2] = {a, b};
    const Pack<T, 2> pack = packed<T>(both);
    return reinterpret_cast<const unsigned &>(pack);
}

/* A thread's two rows of a tile: i = 0, 1. */
template <typename T, int MODE> struct Results {
    const Loss &loss;
    const Task &task;
    int64_t row[2];   /* among the task's */
    int64_t label[2]; /* IGNORED past the last row */

    DEVICE Results(const Loss &loss_, const Task &task_, int64_t first) : loss(loss_), task(task_) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = first + 8 * i;
            label[i] = row[i] < task.rows ? loss.class_of(loss.load_label(task.first_row + row[i])) : IGNORED;
        }
    }

    /* The columns of j: column, and the next. */
    static DEVICE int column_of(int j) {
        return 8 * j + 2 * (threadIdx.x & 3);
    }

    /* Adds the bias; columns that are not there become -inf. */
    DEVICE void complete(float (&d)[HELD], int64_t first_class, int there) const {
        if (task.bias)
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (column_of(j) + c < there) {
                        const float bias = __ldg(task.bias + first_class + column_of(j) + c);
                        d[4 * j + c] += bias;
                        d[4 * j + 2 + c] += bias;
                    }
        if (there < CLASSES)
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (column_of(j) + c >= there)
                        d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
    }

    DEVICE void note_label(const float (&d)[HELD], int i, int64_t first_class) const {
        const int64_t at = label[i] - first_class;
        if (label[i] < 0 || at < 0 || at >= CLASSES || (at / 2 % 4) != (threadIdx.x & 3))
            return;
#pragma unroll
        for (int j = 0; j < CLASSES / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (column_of(j) + c == at)
                    task.z_label[task.first_row + row[i]] = d[4 * j + 2 * i + c];
    }

    DEVICE void gather(float (&d)[HELD], int tile, int64_t first_class) const {
        const float rate = loss.scale * LOG2E;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            note_label(d, i, first_class);
            float max = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j++)
                max = fmaxf(max, fmaxf(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]));
            max = quad_max(max);
            float pivot = pivot_at(max);
            if (MODE == EXPONENTIALS) {
                const float known = row[i] < task.rows ? pivot_at(task.sample[row[i]].max) + MARGIN / loss.scale : 0.0f;
                if (!((max - known) * loss.scale > HEADROOM))
                    max = pivot = known;
            }
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float &z = d[4 * j + 2 * i + c];
                    z = exp2_fast((z - pivot) * rate);
                    sum += z;
                }
            sum = quad_sum(sum);
            if ((threadIdx.x & 3) == 0 && row[i] < task.rows)
                task.stats[row[i] * task.tiles + tile] = {max, sum};
            if (MODE == EXPONENTIALS && label[i] < 0) { /* an ignored row, or one that is to be NaN */
                const float all = gradient_unread(label[i]).p;
#pragma unroll
                for (int j = 0; j < CLASSES / 8; j++)
                    d[4 * j + 2 * i] = d[4 * j + 2 * i + 1] = all;
            }
        }
    }

    DEVICE void differentiate(float (&d)[HELD], int64_t first_class) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            RowGradient gradient = {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (row[i] < task.rows)
                gradient = task.gradients[task.first_row + row[i]];
            const ScaledExp<T> exp(gradient.p, gradient.pivot, loss.scale);
            const int64_t at = label[i] - first_class;
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float &z = d[4 * j + 2 * i + c];
                    z = gradient.constant ? gradient.p : exp.of(z);
                    if (column_of(j) + c == at && !gradient.constant)
                        z -= gradient.target;
                }
        }
    }

    DEVICE void store(const float (&d)[HELD], int64_t column, int there) const {
        T *const out = static_cast<T *>(task.out);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < CLASSES / 8; j += 4) {
                unsigned u[4];
#pragma unroll
                for (int m = 0; m < 4; m++)
                    u[m] = pair_of<T>(d[4 * (j + m) + 2 * i], d[4 * (j + m) + 2 * i + 1]);
                const uint4 eight = turn_quad(u);
                const int at = 8 * (j + (threadIdx.x & 3));
                if (row[i] < task.rows && at < there) /* padding up to a multiple of 8 is written too */
                    *reinterpret_cast<uint4 *>(out + row[i] * task.out_stride + column + at) = eight;
            }
    }

    DEVICE void finish(float (&d)[HELD], int tile) const {
        const int64_t column = int64_t(tile) * CLASSES, first_class = task.first_class + column;
        const int there = static_cast<int>(min(int64_t(CLASSES), task.classes - column));
        complete(d, first_class, there);
        if constexpr (MODE == GRADIENT)
            differentiate(d, first_class);
        else
            gather(d, tile, first_class);
        if constexpr (MODE != STATISTICS)
            store(d, column, there);
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
    DEVICE void advance(int by = 1) {
        step += by;
        parity ^= step / STEPS & 1;
        step %= STEPS;
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

template <typename T, int MODE>
__global__ __launch_bounds__(THREADS, 1) void multiply(const __grid_constant__ CUtensorMap x,
                                                       const __grid_constant__ CUtensorMap w,
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
            barrier_init(&empty[i], CLUSTER);
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
        Ring ring;
        ring.advance(group * depth_steps);
        if (group > 0)
            named_arrive(1, GROUPS * GROUP); /* the first turn is the first warpgroup's */
        for (int turn = first + group * stride; turn < order.count();
             turn += GROUPS * stride, ring.advance(depth_steps)) {
            int down, tile;
            order.at(turn, &down, &tile);
            float d[HALVES][HELD];
            int before = 0;
            named_wait(1 + group, GROUPS * GROUP);
            for (int k = 0; k < depth_steps; k++, ring.advance()) {
                const char *const from = steps + ring.step * STEP_BYTES;
                const uint64_t a = operand_of(from), b = operand_of(from + X_BYTES);
                barrier_wait(&full[ring.step], ring.parity);
                products_begin();
#pragma unroll
                for (int part = 0; part < DEPTH / 16; part++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++)
                        multiply_step<T>(d[half], a + (half * HALF * DEPTH * 2 >> 4) + 2 * part, b + 2 * part,
                                         k | part);
                products_commit();
                if (k > 0) {
                    products_wait<1>();
                    if (thread < CLUSTER)
                        barrier_arrive_at(&empty[before], thread);
                }
                before = ring.step;
            }
            named_arrive(1 + (group ^ 1), GROUPS * GROUP);
            products_wait<0>();
            if (thread < CLUSTER)
                barrier_arrive_at(&empty[before], thread);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const int64_t row =
                    (int64_t(down) * CLUSTER + rank) * ROWS + half * HALF + thread / WARP * 16 + thread % WARP / 4;
                Results<T, MODE>(loss, task, row).finish(d[half], tile);
            }
        }
    }
    cluster_sync(); /* nobody leaves while another's copies or arrivals may still reach it */
#else
    (void)x, (void)w, (void)loss, (void)task;
#endif
}

/* ---- launching ----------------------------------------------------------------------------------------------------
 */

/* A matrix of 16-bit elements whose rows begin at multiples of 16 bytes, in boxes of `box_rows` rows x 64 columns; what
 * lies outside of it reads as 0. */
static inline bool map_matrix(CUtensorMap *map, rafter_dtype dtype, const void *data, int64_t rows, int64_t columns,
                              int64_t stride, int box_rows) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode;
    if (!encode) {
        void *function = NULL;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
                cudaSuccess ||
            found != cudaDriverEntryPointSuccess)
            return false;
        encode = reinterpret_cast<Encode>(function);
    }
    const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(stride) * 2};
    const cuuint32_t box[2] = {DEPTH, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
    return encode(map, dtype == RAFTER_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                  const_cast<void *>(data), size, row_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Until the whole walk of tests has passed with them, the kernels run only where RAFTER_FUSED is 1 in the environment.
 */
static inline bool asked_for() {
    const char *fused = getenv("RAFTER_FUSED");
    return fused && strcmp(fused, "1") == 0;
}

/* Whether this build and device have the kernels: without sm_90a their bodies are empty, and so is their shared memory.
 */
static inline bool available(const rafter_cuda_state *state) {
    cudaFuncAttributes attributes;
    return asked_for() && state->compute_capability == 90 &&
           cudaFuncGetAttributes(&attributes, multiply<bf16, STATISTICS>) == cudaSuccess &&
           attributes.sharedSizeBytes > 0;
}

static inline int64_t tiles_across(int64_t classes) {
    return ceil_div<int64_t>(classes, CLASSES);
}

/* x: from the task's first row on; w: all classes. */
template <int MODE>
static inline rafter_status run(rafter_context *context, rafter_dtype dtype, const void *x, int64_t x_stride,
                                const void *w, int64_t w_stride, int64_t all_classes, const Loss &loss,
                                const Task &task) {
    CUtensorMap x_map, w_map;
    if (!map_matrix(&x_map, dtype, x, task.rows, task.depth, x_stride, ROWS) ||
        !map_matrix(&w_map, dtype, w, all_classes, task.depth, w_stride, CLASSES / CLUSTER))
        return rafter_fail(context, RAFTER_DEVICE_ERROR, "linear_cross_entropy: no tensor map could be made");
    const int64_t tiles = ceil_div<int64_t>(task.rows, CLUSTER * ROWS) * tiles_across(task.classes);
    const int64_t most = context->cuda_state->multiprocessors / CLUSTER;
    Launch how = {CLUSTER * (tiles < most ? tiles : most), THREADS, SHARED_BYTES};
    how.cluster = CLUSTER;
    if (dtype == RAFTER_BF16)
        launch(context, how, multiply<bf16, MODE>, x_map, w_map, loss, task);
    else
        launch(context, how, multiply<fp16, MODE>, x_map, w_map, loss, task);
    return RAFTER_OK;
}

} // namespace fused

#endif
