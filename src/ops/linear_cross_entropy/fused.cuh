/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logits that never leave the chip: x W^T by Hopper's tensor cores, and each tile of 128 rows x 256 classes turned, in
 * the registers that summed it, into
 *
 *     STATISTICS   the maximum and the sum of exponentials of each row over the tile
 *     EXPONENTIALS those, relative to a pivot that is known beforehand, or to the tile's, and the exponentials
 *     GRADIENT     dz, from coefficients of the rows
 *
 * for 16-bit inputs and the options that need nothing else of a column: no softcap, label smoothing, entropy, argmax.
 *
 * The products are tiles.cuh's. Rows are the call's kept ones, which alone are multiplied: see Kept.
 */
#ifndef RAFTER_LCE_FUSED_CUH
#define RAFTER_LCE_FUSED_CUH

#include "cuda/tiles.cuh"
#include "ops/columns.cuh"

namespace fused {

enum Mode { STATISTICS, EXPONENTIALS, GRADIENT };

constexpr int CLASSES = tiles::COLUMNS, PART = tiles::CHUNK; /* of a tile; of its results that are stored at a time */

/* How far above its pivot a logit may be, in units of u, before its exponential, or a sum of them, nears what a float
 * holds; and how far the pivot is put above the largest logit that is known of a row. */
constexpr float HEADROOM = 70.0f, MARGIN = 8.0f, MOST_MARGIN = 1e38f; /* the last of logits, whatever their scale */
constexpr float MOST_SUM = 1e30f; /* e^69: no sum above it without an exponential that is too large, nearly */

/* The rows of a call that are not ignored, counted in their order, as far as they are dropped: `count` of all; where
 * none is, all of them. What is known of rows on the way is known of these: row r of the call's is order[k] for the
 * k-th; behind these, order has the others. Of a copy of theirs, in as many rows as the call has, the last is the last
 * kept row's: so what is read behind it reads as 0, and the call's own x is such a copy if all rows are kept. */
struct Kept {
    const int *order, *count;
    const int *classes; /* of the rows in that order, as Loss::class_of has it */
    int64_t all;

    /* Of the k in [first, first + rows), those that are there. */
    DEVICE int among(int64_t first, int64_t rows) const {
        return static_cast<int>(max(int64_t(0), min(*count - first, rows)));
    }
    /* Where the first of them lies in the copy. */
    DEVICE int copied_at(int64_t first) const {
        return static_cast<int>(all - *count + first);
    }
};

struct Task {
    Kept kept;
    tiles::Meeting meeting;
    int64_t first_row, rows, first_class, classes; /* of kept rows and W; the first are the call's */
    int depth;
    float scale;                  /* of logits */
    const float *bias;            /* of all classes; NULL: none */
    RowStats *stats;              /* [rows][tiles]; GRADIENT: not written */
    int tiles;                    /* of a row of `stats` */
    float *z_label;               /* of all kept rows */
    const RowStats *sample;       /* EXPONENTIALS: of the task's rows, over some of their classes; or NULL */
    const RowGradient *gradients; /* GRADIENT: of all kept rows */
    void *out;                    /* [rows][out_stride] in the inputs' dtype: exponentials or dz */
    int64_t out_stride;           /* a multiple of 8 */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- results of a tile ----------------------------------------------------------------------- */

/* Over the four lanes that share a row. */
DEVICE float quad_max(float a) {
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    return fmaxf(a, __shfl_xor_sync(~0u, a, 2));
}
DEVICE float quad_sum(float a) {
    a += __shfl_xor_sync(~0u, a, 1);
    return a + __shfl_xor_sync(~0u, a, 2);
}

/* A thread's two rows of a tile, i = 0 and 1, and what it reads of them while the tile is still being summed: from its
 * registers nothing has to be waited for when the sums are there. Before that nothing that is read may be looked at,
 * not even for an address: products are given out in between. */
template <int MODE> struct TileRows {
    int64_t row[2];          /* among the task's */
    int label[2];            /* as Loss::class_of has it */
    float known[2];          /* EXPONENTIALS: the sample's maximum */
    RowGradient gradient[2]; /* GRADIENT */

    template <typename Job> DEVICE void load(const Job &job, int first) {
        const Task &task = job.task;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = first + 8 * i;
            label[i] = static_cast<int>(IGNORED);
            known[i] = 0.0f;
            gradient[i] = {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (row[i] >= job.rows)
                continue;
            label[i] = task.kept.classes[task.first_row + row[i]];
            if constexpr (MODE == EXPONENTIALS)
                known[i] = task.sample ? task.sample[row[i]].max : 0.0f;
            if constexpr (MODE == GRADIENT)
                gradient[i] = task.gradients[task.first_row + row[i]];
        }
    }
};

/* What the sums d of a tile become. */
template <typename T, int MODE> struct Results {
    const Task &task;
    const int count; /* of the task's rows that are there */
    const TileRows<MODE> &rows;
    tiles::Packed &packed; /* exponentials or dz */
    const CUtensorMap &out;
    char *const staging;

    /* Adds the bias; columns that are not there become -inf. */
    DEVICE void complete(float (&d)[128], int64_t first_class, int there) const {
        if (task.bias)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (tiles::column_of(j) + c < there) {
                        const float bias = __ldg(task.bias + first_class + tiles::column_of(j) + c);
                        d[4 * j + c] += bias;
                        d[4 * j + 2 + c] += bias;
                    }
        if (there < CLASSES)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (tiles::column_of(j) + c >= there)
                        d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
    }

    /* Whether this thread holds column `at`; -1 is none. */
    static DEVICE bool holds(int at) {
        return at >= 0 && (at / 2 & 3) == static_cast<int>(threadIdx.x & 3);
    }
    /* What it holds there of row i. */
    static DEVICE float sum_at(const float (&d)[128], int i, int at) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (tiles::column_of(j) + c == at)
                    sum = d[4 * j + 2 * i + c];
        return sum;
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

    /* Rows' exponentials relative to `pivot`: their sums over the tile, and themselves if they are wanted. */
    DEVICE void sum_up(const float (&d)[128], const float (&pivot)[2], float (&sum)[2]) const {
        const float rate = task.scale * LOG2E;
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
                tiles::pack_part<T>(packed, part, e);
        }
        sum[0] = quad_sum(of[0] + of[1]);
        sum[1] = quad_sum(of[2] + of[3]);
    }

    DEVICE void gather(float (&d)[128], int tile, const int (&at)[2]) const {
        float max[2], pivot[2], sum[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (holds(at[i]))
                task.z_label[task.first_row + rows.row[i]] = sum_at(d, i, at[i]);
        if constexpr (MODE == STATISTICS) {
            find_maxima(d, max);
#pragma unroll
            for (int i = 0; i < 2; i++)
                pivot[i] = pivot_at(max[i]);
            sum_up(d, pivot, sum);
        } else {
            if (!task.sample)
                find_maxima(d, max);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (task.sample) /* where that is all masked, nothing is known: sums are not numbers then */
                    max[i] = rows.known[i] + fminf(MARGIN / task.scale, MOST_MARGIN);
                pivot[i] = task.sample ? max[i] : pivot_at(max[i]);
                if (rows.label[i] < 0) /* an ignored row: exponentials are 0; or one that is to be NaN */
                    set_row(d, i, rows.label[i] == IGNORED ? -INFINITY : NAN);
            }
            for (bool again = false;; again = true) {
                sum_up(d, pivot, sum);
                if (again || __all_sync(~0u, sum[0] <= MOST_SUM && sum[1] <= MOST_SUM))
                    break;
                float of_tile[2];
                find_maxima(d, of_tile);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (!((of_tile[i] - pivot[i]) * task.scale <= HEADROOM)) {
                        max[i] = of_tile[i];
                        pivot[i] = pivot_at(max[i]);
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((threadIdx.x & 3) == 0 && rows.row[i] < count)
                task.stats[rows.row[i] * task.tiles + tile] = {max[i], sum[i]};
    }

    /* dz is stored part by part: packed, all of it would take more registers than there are. */
    DEVICE void differentiate(float (&d)[128], const int (&at)[2]) const {
        ScaledExp<T> exp[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exp[i] = ScaledExp<T>(rows.gradient[i].p, rows.gradient[i].pivot, task.scale);
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
                if (at[i] / PART == part && holds(at[i]) && !rows.gradient[i].constant) {
#pragma unroll
                    for (int k = 0; k < PART / 4; k++)
                        if (tiles::column_of(part * (PART / 8) + k / 2) + k % 2 == at[i])
                            e[k / 2 * 4 + 2 * i + k % 2] -= rows.gradient[i].target;
                }
            tiles::pack_part<T>(packed, part, e);
            tiles::store_part<false>(packed, part, staging, out);
        }
    }

    DEVICE void finish(float (&d)[128], int64_t column) const {
        const int64_t first_class = task.first_class + column;
        const int there = static_cast<int>(min(int64_t(CLASSES), task.classes - column));
        int at[2]; /* the column of the label */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t label = rows.label[i], from = label - first_class;
            at[i] = label >= 0 && from >= 0 && from < there ? static_cast<int>(from) : -1;
        }
        complete(d, first_class, there);
        if constexpr (MODE == GRADIENT)
            differentiate(d, at);
        else
            gather(d, static_cast<int>(column / CLASSES), at);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

template <typename T, int MODE> struct Logits {
    typedef TileRows<MODE> Rows;
    static constexpr int HELD = 0;
    static constexpr bool PACKED = MODE == EXPONENTIALS;
    const CUtensorMap &x, &w, &out;
    const Task &task;
    const int rows, first, steps;
    const tiles::Order order;

    DEVICE Logits(const CUtensorMap &x_map, const CUtensorMap &w_map, const CUtensorMap &out_map, const Task &t)
        : x(x_map), w(w_map), out(out_map), task(t), rows(t.kept.among(t.first_row, t.rows)),
          first(t.kept.copied_at(t.first_row)), steps((t.depth + tiles::DEPTH - 1) / tiles::DEPTH),
          order(rows, t.classes) {
    }
    DEVICE tiles::Source a(int) const {
        return {&x, first, 0};
    }
    DEVICE tiles::Source b(int) const {
        return {&w, static_cast<int>(task.first_class), 0};
    }
    DEVICE void finish(float (&d)[128], const tiles::Place &place, const Rows &of, char *staging, char *const *,
                       tiles::Packed &packed) const {
        packed.row = static_cast<int>(of.row[0]);
        packed.column = place.column;
        Results<T, MODE>{task, rows, of, packed, out, staging}.finish(d, place.column);
    }
    DEVICE void store(const tiles::Packed &packed, int part, char *staging) const {
        tiles::store_part<false>(packed, part, staging, out);
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* x: the call's, and a copy of its kept rows. */
template <typename T, int MODE>
__global__ __launch_bounds__(tiles::THREADS, 1) void multiply(const __grid_constant__ CUtensorMap x,
                                                              const __grid_constant__ CUtensorMap copy,
                                                              const __grid_constant__ CUtensorMap w,
                                                              const __grid_constant__ CUtensorMap out,
                                                              const __grid_constant__ Task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ tiles::Barriers barriers;
    tiles::begin(barriers, x, copy, w, out);
    wait_for_previous_kernel();
    const bool all = *task.kept.count == task.kept.all;
    tiles::multiply<T, false, false>(memory, barriers, Logits<T, MODE>(all ? x : copy, w, out, task), task.meeting);
#else
    (void)x, (void)copy, (void)w, (void)out, (void)task;
#endif
}

/* ---- launching ------------------------------------------------------------------------------- */

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

/* A matrix in the inputs' dtype. */
struct Matrix {
    const void *data;
    int64_t rows, columns, stride;
};

static inline rafter_status no_map(rafter_context *context) {
    return rafter_fail(context, RAFTER_DEVICE_ERROR, "linear_cross_entropy: no tensor map could be made");
}

static inline bool map_operand(CUtensorMap *map, rafter_dtype dtype, const Matrix &m, bool turned, int count) {
    return tiles::map_operand(map, dtype, m.data, m.rows, m.columns, m.stride, turned, count);
}

/* x, and its copy: of all rows; w: of all classes. */
template <int MODE>
static inline rafter_status run(rafter_context *context, rafter_dtype dtype, const Matrix &x, const Matrix &copy,
                                const Matrix &w, const Task &task) {
    CUtensorMap x_map, copy_map, w_map, out_map = {};
    if (!map_operand(&x_map, dtype, x, false, tiles::ROWS) ||
        !map_operand(&copy_map, dtype, copy, false, tiles::ROWS) ||
        !map_operand(&w_map, dtype, w, false, tiles::SHARE) ||
        (MODE != STATISTICS &&
         !tiles::map_matrix(&out_map, dtype, task.out, task.rows, ceil_div<int64_t>(task.classes, 8) * 8,
                            task.out_stride, tiles::PART_ROWS)))
        return no_map(context);
    const Launch how = tiles::launch_for(context->cuda_state, task.rows, task.classes, task.meeting);
    if (dtype == RAFTER_BF16)
        launch(context, how, multiply<bf16, MODE>, x_map, copy_map, w_map, out_map, task);
    else
        launch(context, how, multiply<fp16, MODE>, x_map, copy_map, w_map, out_map, task);
    return RAFTER_OK;
}

} // namespace fused

#endif
