/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logits that never leave the chip: x W^T on Hopper's tensor cores (cuda/tiles.cuh), of which each
 * tile of 128 rows x 256 classes is converted, in the registers that summed it, to statistics,
 * exponentials or dz: see hopper_steps.cuh. For 16-bit inputs, and options that need only the
 * softmax of a column: no softcap, label smoothing, entropy, argmax.
 */
#include "cuda/tile_results.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int PART = tiles::CHUNK; /* columns of the results that are stored at a time */

/* The pivot is MARGIN above the largest logit of the sample. A logit may be HEADROOM above its
 * pivot, in units of u, before its exponential or a sum of them nears the range of a float. */
constexpr float HEADROOM = 70.0f, MARGIN = 8.0f, MOST_MARGIN = 1e38f; /* MOST_MARGIN: of logits, whatever their scale */
constexpr float MOST_SUM = 1e30f; /* e^69: nearly every larger sum has an exponential that is too large */

/* ---- results of a tile ----------------------------------------------------------------------- */

/* Reductions over the four lanes that share a row. */
DEVICE float quad_max(float a) {
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    return fmaxf(a, __shfl_xor_sync(~0u, a, 2));
}
DEVICE float quad_sum(float a) {
    a += __shfl_xor_sync(~0u, a, 1);
    return a + __shfl_xor_sync(~0u, a, 2);
}

/* A thread's two rows of a tile, i = 0 and 1, and what it loads about them while the tile is
 * being summed, so that nothing is waited for when the sums are complete. No loaded value may be
 * used before that, not even in an address: the thread would wait for it, and issues the
 * products in between. */
template <int MODE> struct TileRows {
    int64_t row[2];          /* among the task's */
    int label[2];            /* from Loss::class_of */
    float sample_max[2];     /* EXPONENTIALS */
    RowGradient gradient[2]; /* GRADIENT */

    template <typename Job> DEVICE void load(const Job &job, int first) {
        const LogitTask &task = job.task;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = first + 8 * i;
            label[i] = static_cast<int>(IGNORED);
            sample_max[i] = 0.0f;
            gradient[i] = {true, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (row[i] >= job.rows)
                continue;
            label[i] = task.active.classes[task.first_row + row[i]];
            if constexpr (MODE == EXPONENTIALS)
                sample_max[i] = task.sample ? task.sample[row[i]].max : 0.0f;
            if constexpr (MODE == GRADIENT)
                gradient[i] = task.gradients[task.first_row + row[i]];
        }
    }
};

/* Converts the sums d of a tile to results. */
template <typename T, int MODE> struct Results {
    const LogitTask &task;
    const int count; /* the task's active rows */
    const TileRows<MODE> &rows;
    tiles::Packed &packed; /* exponentials or dz */
    const CUtensorMap &out;
    char *const staging;

    /* Adds the bias. Columns past the last class become -inf. */
    DEVICE void add_bias(float (&d)[128], int64_t first_class, int columns) const {
        if (task.bias)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (tiles::column_of(j) + c < columns) {
                        const float bias = __ldg(task.bias + first_class + tiles::column_of(j) + c);
                        d[4 * j + c] += bias;
                        d[4 * j + 2 + c] += bias;
                    }
        if (columns < TILE_CLASSES)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (tiles::column_of(j) + c >= columns)
                        d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
    }

    /* Whether this thread holds column `at`; -1: no column. */
    static DEVICE bool holds(int at) {
        return at >= 0 && (at / 2 & 3) == static_cast<int>(threadIdx.x & 3);
    }
    /* This thread's sum of row i at that column. */
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
        float own[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                own[k] = fmaxf(own[k], d[4 * j + k]);
        max[0] = quad_max(fmaxf(own[0], own[1]));
        max[1] = quad_max(fmaxf(own[2], own[3]));
    }

    static DEVICE void set_row(float (&d)[128], int i, float value) {
#pragma unroll
        for (int j = 0; j < 32; j++)
            d[4 * j + 2 * i] = d[4 * j + 2 * i + 1] = value;
    }

    /* Sums the rows' exponentials, relative to `pivot`, over the tile; packs them if they are
     * wanted. */
    DEVICE void sum_exponentials(const float (&d)[128], const float (&pivot)[2], float (&sum)[2]) const {
        const float rate = task.scale * LOG2E;
        float own[4] = {};
#pragma unroll
        for (int part = 0; part < TILE_CLASSES / PART; part++) {
            float e[PART / 2];
#pragma unroll
            for (int k = 0; k < PART / 2; k++) {
                e[k] = exp2_fast((d[part * PART / 2 + k] - pivot[k / 2 % 2]) * rate);
                own[k % 4] += e[k];
            }
            if constexpr (MODE == EXPONENTIALS)
                tiles::pack_part<T>(packed, part, e);
        }
        sum[0] = quad_sum(own[0] + own[1]);
        sum[1] = quad_sum(own[2] + own[3]);
    }

    DEVICE void collect(float (&d)[128], int tile, const int (&at)[2]) const {
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
            sum_exponentials(d, pivot, sum);
        } else {
            if (!task.sample)
                find_maxima(d, max);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (task.sample) /* if that is all masked, the pivot is -inf and sums are NaN: see below */
                    max[i] = rows.sample_max[i] + fminf(MARGIN / task.scale, MOST_MARGIN);
                pivot[i] = task.sample ? max[i] : pivot_at(max[i]);
                if (rows.label[i] < 0) /* an ignored row: exponentials are 0; or a label out of range: NaN */
                    set_row(d, i, rows.label[i] == IGNORED ? -INFINITY : NAN);
            }
            for (bool again = false;; again = true) {
                sum_exponentials(d, pivot, sum);
                if (again || __all_sync(~0u, sum[0] <= MOST_SUM && sum[1] <= MOST_SUM))
                    break;
                float tile_max[2];
                find_maxima(d, tile_max);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (!((tile_max[i] - pivot[i]) * task.scale <= HEADROOM)) {
                        max[i] = tile_max[i];
                        pivot[i] = pivot_at(max[i]);
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((threadIdx.x & 3) == 0 && rows.row[i] < count)
                task.stats[rows.row[i] * task.tiles + tile] = {max[i], sum[i]};
    }

    /* dz is stored part by part: all of it, packed, would take more registers than there are. */
    DEVICE void differentiate(float (&d)[128], const int (&at)[2]) const {
        ScaledExp<T> exp[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exp[i] = ScaledExp<T>(rows.gradient[i].p, rows.gradient[i].pivot, task.scale);
            if (rows.gradient[i].constant)
                set_row(d, i, rows.gradient[i].pivot); /* p e^0 */
        }
#pragma unroll
        for (int part = 0; part < TILE_CLASSES / PART; part++) {
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
        const int columns = static_cast<int>(min(int64_t(TILE_CLASSES), task.classes - column));
        int at[2]; /* the label's column in the tile, or -1 */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t label = rows.label[i], from = label - first_class;
            at[i] = label >= 0 && from >= 0 && from < columns ? static_cast<int>(from) : -1;
        }
        add_bias(d, first_class, columns);
        if constexpr (MODE == GRADIENT)
            differentiate(d, at);
        else
            collect(d, static_cast<int>(column / TILE_CLASSES), at);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

template <typename T, int MODE> struct LogitJob {
    typedef TileRows<MODE> Rows;
    static constexpr int HELD = 0;
    static constexpr bool PACKED = MODE == EXPONENTIALS;
    const CUtensorMap &x, &w, &out;
    const LogitTask &task;
    const int rows, first, steps;
    const tiles::TileOrder order;

    DEVICE LogitJob(const CUtensorMap &x_map, const CUtensorMap &w_map, const CUtensorMap &out_map, const LogitTask &t)
        : x(x_map), w(w_map), out(out_map), task(t), rows(t.active.among(t.first_row, t.rows)),
          first(t.active.copied_at(t.first_row)), steps((t.depth + tiles::DEPTH - 1) / tiles::DEPTH),
          order(rows, t.classes) {
    }
    DEVICE tiles::Source a(int) const {
        return {&x, first, 0};
    }
    DEVICE tiles::Source b(int) const {
        return {&w, static_cast<int>(task.first_class), 0};
    }
    DEVICE void finish(float (&d)[128], const tiles::TileOrigin &origin, const Rows &loaded, char *staging,
                       char *const *, tiles::Packed &packed) const {
        packed.row = static_cast<int>(loaded.row[0]);
        packed.column = origin.column;
        Results<T, MODE>{task, rows, loaded, packed, out, staging}.finish(d, origin.column);
    }
    DEVICE void store(const tiles::Packed &packed, int part, char *staging) const {
        tiles::store_part<false>(packed, part, staging, out);
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* x: the call's, and the copy of its active rows. */
template <typename T, int MODE>
__global__ __launch_bounds__(tiles::THREADS, 1) void logits_kernel(const __grid_constant__ CUtensorMap x,
                                                                   const __grid_constant__ CUtensorMap copy,
                                                                   const __grid_constant__ CUtensorMap w,
                                                                   const __grid_constant__ CUtensorMap out,
                                                                   const __grid_constant__ LogitTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ tiles::Barriers barriers;
    tiles::begin(barriers, x, copy, w, out);
    wait_for_previous_kernel();
    const bool all = *task.active.count == task.active.all;
    tiles::multiply<T, false, false>(memory, barriers, LogitJob<T, MODE>(all ? x : copy, w, out, task), task.split);
#else
    (void)x, (void)copy, (void)w, (void)out, (void)task;
#endif
}

/* ---- launching ------------------------------------------------------------------------------- */

template <int MODE>
rafter_status launch_logits(rafter_context *context, rafter_dtype dtype, const Matrix &x, const Matrix &copy,
                            const Matrix &w, const LogitTask &task) {
    CUtensorMap x_map, copy_map, w_map, out_map = {};
    if (!tiles::map_operand(&x_map, dtype, x.data, x.rows, x.columns, x.stride, false, tiles::ROWS) ||
        !tiles::map_operand(&copy_map, dtype, copy.data, copy.rows, copy.columns, copy.stride, false, tiles::ROWS) ||
        !tiles::map_operand(&w_map, dtype, w.data, w.rows, w.columns, w.stride, false, tiles::SHARE) ||
        (MODE != STATISTICS &&
         !tiles::map_matrix(&out_map, dtype, task.out, task.rows, round_up(task.classes, int64_t(8)), task.out_stride,
                            tiles::PART_ROWS)))
        return rafter_fail(context, RAFTER_DEVICE_ERROR,
                           "linear_cross_entropy: the driver could not make a tensor map");
    const Launch how = tiles::launch_for(context->cuda_state, task.rows, task.classes, task.split);
    if (dtype == RAFTER_BF16)
        launch(context, how, logits_kernel<bf16, MODE>, x_map, copy_map, w_map, out_map, task);
    else
        launch(context, how, logits_kernel<fp16, MODE>, x_map, copy_map, w_map, out_map, task);
    return RAFTER_OK;
}

} // namespace

/* Without sm_90a in the build the kernels have no static shared memory. Asked once, on the first
 * device that could run them. */
bool hopper_kernels_built() {
    static const bool built = [] {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, logits_kernel<bf16, STATISTICS>) == cudaSuccess &&
               attributes.sharedSizeBytes > 0;
    }();
    return built;
}

LogitTask statistics_task(const HopperRun &run, int64_t first, int64_t rows, RowStats *stats) {
    LogitTask task = {};
    task.first_row = first;
    task.rows = rows;
    task.classes = run.problem.classes;
    task.stats = stats;
    task.tiles = static_cast<int>(tiles_across(run.problem.classes));
    return task;
}

rafter_status multiply_logits(const HopperRun &run, LogitMode mode, LogitTask task, const Dz &out) {
    task.active = run.active;
    task.split = run.split;
    task.depth = static_cast<int>(run.problem.depth);
    task.scale = run.loss.scale;
    task.bias = run.bias;
    task.z_label = run.z_label;
    task.gradients = run.gradients;
    task.out = out.data;
    task.out_stride = out.stride;
    const auto launch_mode = mode == STATISTICS     ? launch_logits<STATISTICS>
                             : mode == EXPONENTIALS ? launch_logits<EXPONENTIALS>
                                                    : launch_logits<GRADIENT>;
    return launch_mode(run.context, run.problem.dtype, run.x, run.copy, run.w, task);
}

} // namespace lce
