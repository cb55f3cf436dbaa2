/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logits that never leave the chip: x W^T on Hopper's tensor cores (cuda/hopper_gemm.cuh). Tiles are converted
 * to statistics, exponentials or dz in the registers that summed them: see hopper_steps.cuh. For 16-bit inputs.
 * Warpgroups take tiles in turns, so that one multiplies while the other converts; or together, if there are few
 * rows.
 */
#include "cuda/hopper_epilogue.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

/* Which options a kernel has code for. SOME_OPTIONS: bias and softcap. ALL_OPTIONS: also label smoothing, and
 * everything that needs OptionStats. */
enum LogitOptions { NO_OPTIONS, SOME_OPTIONS, ALL_OPTIONS };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int PART = gemm::CHUNK; /* columns of the results that are stored at a time */

/* ---- range of stored exponentials ------------------------------------------------------------ */

/* Exponentials are stored relative to a pivot that is chosen before a row's maximum is known. A
 * logit may be up to HEADROOM above its pivot, in units of u. If a tile's maximum is higher than that, the
 * tile takes another pivot. If its sum is at most MOST_SUM, which is below e^HEADROOM, it is not. from_sample:
 * the pivot that a row's estimated statistics suggest. from_max: the pivot that suits a tile with this
 * maximum. */
template <typename T> struct ExpRange;

/* bf16 has the range of a float, so any pivot within 70 of the maximum will do. */
template <> struct ExpRange<bf16> {
    static constexpr float HEADROOM = 70.0f, MOST_SUM = 1e30f; /* e^69 */
    static constexpr float MARGIN = 8.0f, MOST_MARGIN = 1e38f; /* MOST_MARGIN: of logits, whatever their scale */

    static DEVICE float from_sample(const RowStats &sample, float scale) {
        return sample.max + fminf(MARGIN / scale, MOST_MARGIN);
    }
    static DEVICE float from_max(float max, float) {
        return max;
    }
};

/* fp16 has 11 bits from 2^-14 to 65504, and fewer below. Exponentials are about LIFT above
 * the probabilities, in units of u: then a probability of 1 is 3000 to 8000, and one of 2e-8 still
 * has 11 bits. */
template <> struct ExpRange<fp16> {
    static constexpr float HEADROOM = 11.0f, MOST_SUM = 59000.0f; /* below e^11 */
    static constexpr float LIFT = 8.0f, LIFT_OF_MAX = 9.0f, MOST_MARGIN = 1e38f;

    static DEVICE float from_sample(const RowStats &sample, float scale) {
        return sample.max + fmaxf(fminf((logf(sample.sum) - LIFT) / scale, MOST_MARGIN), -MOST_MARGIN);
    }
    static DEVICE float from_max(float max, float scale) {
        return max - fminf(LIFT_OF_MAX / scale, MOST_MARGIN);
    }
};

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

/* cap * tanh(z / cap), to about 2^-20 of the cap. */
DEVICE float capped_fast(float z, float cap, float rate) { /* rate: 2 log2(e) / cap */
    return fmaf(-2.0f * cap, reciprocal_fast(1.0f + exp2_fast(z * rate)), cap);
}

/* A thread's two rows of a tile, i = 0 and 1, and what it needs to know about them. Together, that is loaded while the
 * tile is being summed, so that nothing is waited for when the sums are complete. No loaded value may be used before
 * that, not even in an address: the thread would wait for it, and issues the products in between. */
template <int MODE> struct TileRows {
    int64_t row[2];          /* among the task's */
    int label[2];            /* from Loss::class_of */
    RowStats sample[2];      /* EXPONENTIALS */
    RowGradient gradient[2]; /* GRADIENT */

    template <typename Job> DEVICE void load(const Job &job, int first) {
        const LogitTask &task = job.task;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = first + 8 * i;
            label[i] = static_cast<int>(IGNORED);
            sample[i] = {0.0f, 1.0f};
            gradient[i] = zero_gradient();
            if (row[i] >= job.rows)
                continue;
            label[i] = task.active.classes[task.first_row + row[i]];
            if constexpr (MODE == EXPONENTIALS)
                if (task.sample)
                    sample[i] = task.sample[row[i]];
            if constexpr (MODE == GRADIENT)
                gradient[i] = task.gradients[task.first_row + row[i]];
        }
    }
};

/* Converts the sums d of 64 rows of a tile to results. */
template <typename T, int MODE, int OPTIONS, int COLUMNS> struct Results {
    static constexpr int FOURS = COLUMNS / 8, SUMS = 4 * FOURS; /* sums of a thread, of two rows */
    static constexpr bool CAPS = OPTIONS != NO_OPTIONS, ALL = OPTIONS == ALL_OPTIONS,
                          TOGETHER = COLUMNS == gemm::Together::COLUMNS;
    const LogitTask &task;
    const int count; /* the task's active rows */
    const TileRows<MODE> &rows;
    const int column;       /* the tile's first */
    const CUtensorMap &out; /* exponentials or dz */
    char *const staging;
    gemm::Packed *const packed; /* together: exponentials, which are stored later */

    /* Whether maxima are looked for only if a sum shows that the sample's pivot may not have suited: together, because
     * nothing is multiplied meanwhile. With options, registers do not suffice to keep the logits until then. */
    DEVICE bool trusts_sample() const {
        return TOGETHER && MODE == EXPONENTIALS && !CAPS && task.sample;
    }

    DEVICE void add_bias(float (&d)[SUMS], int64_t first_class, int columns) const {
        if (!task.bias)
            return;
        const float *const bias = task.bias + first_class;
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const int column = gemm::column_of(j);
            float2 two = {};
            if (column + 1 < columns)
                two = __ldg(reinterpret_cast<const float2 *>(bias + column));
            else if (column < columns)
                two.x = __ldg(bias + column);
            d[4 * j] += two.x;
            d[4 * j + 1] += two.y;
            d[4 * j + 2] += two.x;
            d[4 * j + 3] += two.y;
        }
    }
    DEVICE void apply_softcap(float (&d)[SUMS]) const {
        const float rate = 2.0f * LOG2E / task.softcap;
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            d[k] = capped_fast(d[k], task.softcap, rate);
    }
    /* The derivative of the softcap where the capped logit is v; 1 if there is no softcap; 0 past the last
     * class, where v is -inf. (A branch would keep more registers in use than there are.) */
    DEVICE float slope_at(float v) const {
        const float t = v * task.inverse_softcap;
        return 1.0f - fminf(t * t, 1.0f);
    }
    /* Columns past the last class become -inf. */
    static DEVICE void mask_columns(float (&d)[SUMS], int columns) {
        if (columns < COLUMNS)
#pragma unroll
            for (int j = 0; j < FOURS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (gemm::column_of(j) + c >= columns)
                        d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
    }
    DEVICE float class_weight(int64_t v) const {
        return task.class_weight ? __ldg(task.class_weight + v * task.class_stride) : 1.0f;
    }

    /* Whether this thread holds column `at`; -1: no column. */
    static DEVICE bool holds(int at) {
        return at >= 0 && (at / 2 & 3) == static_cast<int>(threadIdx.x & 3);
    }
    /* This thread's logit of row i at that column. */
    static DEVICE float sum_at(const float (&d)[SUMS], int i, int at) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (gemm::column_of(j) + c == at)
                    sum = d[4 * j + 2 * i + c];
        return sum;
    }
    /* The maxima of both rows over the tile. */
    static DEVICE void find_maxima(const float (&d)[SUMS], float (&max)[2]) {
        float own[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                own[k] = fmaxf(own[k], d[4 * j + k]);
        max[0] = quad_max(fmaxf(own[0], own[1]));
        max[1] = quad_max(fmaxf(own[2], own[3]));
    }

    static DEVICE void set_row(float (&d)[SUMS], int i, float value) {
#pragma unroll
        for (int j = 0; j < FOURS; j++)
            d[4 * j + 2 * i] = d[4 * j + 2 * i + 1] = value;
    }

    /* The largest logits of both rows over the tile's columns, before the softcap, and their first
     * columns. NaN is larger than everything. */
    static DEVICE void find_argmax(const float (&d)[SUMS], int64_t first_class, int columns, OptionStats (&more)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float best = -INFINITY;
            int at = -1;
#pragma unroll
            for (int j = 0; j < FOURS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float z = d[4 * j + 2 * i + c];
                    const bool better = at < 0 || z > best || (z != z && best == best);
                    if (better && gemm::column_of(j) + c < columns) {
                        best = z;
                        at = gemm::column_of(j) + c;
                    }
                }
            LossStats<FULL> g = no_columns<FULL>();
            update_argmax(g, best, at);
#pragma unroll
            for (int step = 1; step < 4; step *= 2)
                update_argmax(g, __shfl_xor_sync(~0u, g.best, step), __shfl_xor_sync(~0u, g.argmax, step));
            more[i].best = g.best;
            more[i].argmax = static_cast<int>(first_class + g.argmax);
        }
    }
    /* The sums of both rows' logits, for label smoothing. */
    DEVICE void sum_weighted(const float (&d)[SUMS], int64_t first_class, int columns, OptionStats (&more)[2]) const {
        float own[2] = {};
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (gemm::column_of(j) + c < columns) {
                    const float w = class_weight(first_class + gemm::column_of(j) + c);
                    own[0] = fmaf(w, d[4 * j + c], own[0]);
                    own[1] = fmaf(w, d[4 * j + 2 + c], own[1]);
                }
        more[0].logit_sum = quad_sum(own[0]);
        more[1].logit_sum = quad_sum(own[1]);
    }

    /* Sums the rows' exponentials, relative to `pivot`, over the tile; stores them if they are wanted. */
    DEVICE void sum_exponentials(const float (&d)[SUMS], const float (&pivot)[2], float (&sum)[2],
                                 float (&moment)[2]) const {
        const float rate = task.scale * LOG2E;
        float own[4] = {}, moments[2] = {};
#pragma unroll
        for (int part = 0; part < COLUMNS / PART; part++) {
            float e[PART / 2];
#pragma unroll
            for (int k = 0; k < PART / 2; k++) {
                const float over = d[part * PART / 2 + k] - pivot[k / 2 % 2];
                e[k] = exp2_fast(over * rate);
                own[k % 4] += e[k];
                if constexpr (ALL) /* the bound keeps -inf out; e is 0 long before it */
                    moments[k / 2 % 2] = fmaf(fmaxf(over, -1e30f), e[k], moments[k / 2 % 2]);
                if constexpr (CAPS && MODE == EXPONENTIALS)
                    e[k] *= slope_at(d[part * PART / 2 + k]);
            }
            if constexpr (MODE == EXPONENTIALS)
                store_part(e, part);
        }
        sum[0] = quad_sum(own[0] + own[1]);
        sum[1] = quad_sum(own[2] + own[3]);
        if constexpr (ALL) {
            moment[0] = quad_sum(moments[0]);
            moment[1] = quad_sum(moments[1]);
        }
    }
    DEVICE void store_part(const float (&e)[PART / 2], int part) const {
        if constexpr (TOGETHER)
            gemm::pack_part<T>(*packed, part, e);
        else
            gemm::store_at_once<T>(e, staging, out, column + part * PART, static_cast<int>(rows.row[0]));
    }

    DEVICE float max_from_sample(int i) const {
        return task.sample ? ExpRange<T>::from_sample(rows.sample[i], task.scale) : -INFINITY;
    }
    /* A maximum of exponentials whose pivot suits their dtype: the one from the sample, unless the tile's maximum is too
     * far above it, or there is no sample. */
    DEVICE float suitable_max(float tile_max, int i) const {
        const float max = max_from_sample(i);
        return (tile_max - max) * task.scale <= ExpRange<T>::HEADROOM ? max
                                                                      : ExpRange<T>::from_max(tile_max, task.scale);
    }
    DEVICE void form_exponentials(float (&d)[SUMS], float (&max)[2], float (&sum)[2], float (&moment)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            max[i] = trusts_sample() ? max_from_sample(i) : suitable_max(max[i], i);
            if (rows.label[i] < 0) /* an ignored row: exponentials are 0; or a label out of range: NaN */
                set_row(d, i, rows.label[i] == IGNORED ? -INFINITY : NAN);
        }
        for (bool suits = !trusts_sample();; suits = true) {
            /* If the sample is all masked, the pivot is -inf, and the first sum infinite or NaN. */
            const float pivot[2] = {suits ? pivot_at(max[0]) : max[0], suits ? pivot_at(max[1]) : max[1]};
            sum_exponentials(d, pivot, sum, moment);
            if (suits || __all_sync(~0u, sum[0] <= ExpRange<T>::MOST_SUM && sum[1] <= ExpRange<T>::MOST_SUM))
                break;
            find_maxima(d, max);
#pragma unroll
            for (int i = 0; i < 2; i++)
                max[i] = suitable_max(max[i], i);
        }
    }

    /* Computes statistics, and exponentials if they are wanted. `at`: the label's column in the tile, or -1. */
    DEVICE void collect(float (&d)[SUMS], int64_t first_class, int columns, int tile, const int (&at)[2]) const {
        float max[2], sum[2], moment[2];
        OptionStats more[2] = {};
        if constexpr (!CAPS) { /* before anything waits for the labels */
            mask_columns(d, columns);
            if (!trusts_sample())
                find_maxima(d, max);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (holds(at[i]))
                task.z_label[task.first_row + rows.row[i]] = sum_at(d, i, at[i]);
        if constexpr (ALL)
            if (task.wants_argmax)
                find_argmax(d, first_class, columns, more);
        if constexpr (CAPS)
            if (task.softcap != 0.0f)
                apply_softcap(d);
        if constexpr (ALL)
            if (task.smooths)
                sum_weighted(d, first_class, columns, more);
        if constexpr (CAPS) {
            mask_columns(d, columns);
            find_maxima(d, max);
        }
        if constexpr (MODE == EXPONENTIALS) {
            form_exponentials(d, max, sum, moment);
        } else {
            const float pivot[2] = {pivot_at(max[0]), pivot_at(max[1])};
            sum_exponentials(d, pivot, sum, moment);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((threadIdx.x & 3) == 0 && rows.row[i] < count) {
                const int64_t to = rows.row[i] * task.tiles + tile;
                task.stats[to] = {max[i], sum[i]};
                if constexpr (ALL)
                    if (task.more) {
                        more[i].moment = moment[i];
                        task.more[to] = more[i];
                    }
            }
    }

    /* Computes dz. */
    DEVICE void differentiate(float (&d)[SUMS], int64_t first_class, int columns, const int (&at)[2]) const {
        ScaledExp<T> exp[2];
        if constexpr (CAPS)
            if (task.softcap != 0.0f)
                apply_softcap(d);
        mask_columns(d, columns);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exp[i] = ScaledExp<T>(rows.gradient[i].p, rows.gradient[i].pivot, task.scale);
            if (rows.gradient[i].constant)
                set_row(d, i, rows.gradient[i].pivot); /* p e^0 */
        }
#pragma unroll
        for (int part = 0; part < COLUMNS / PART; part++) {
            float e[PART / 2];
#pragma unroll
            for (int k = 0; k < PART / 2; k++)
                e[k] = exp[k / 2 % 2].of(d[part * PART / 2 + k]);
            if constexpr (ALL)
                add_entropy_and_spread(d, e, first_class, columns, part);
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (at[i] / PART == part && holds(at[i]) && !rows.gradient[i].constant) {
#pragma unroll
                    for (int k = 0; k < PART / 4; k++)
                        if (gemm::column_of(part * (PART / 8) + k / 2) + k % 2 == at[i])
                            e[k / 2 * 4 + 2 * i + k % 2] -= rows.gradient[i].target;
                }
            if constexpr (CAPS)
                if (task.softcap != 0.0f)
#pragma unroll
                    for (int k = 0; k < PART / 2; k++)
                        if (!rows.gradient[k / 2 % 2].constant)
                            e[k] *= slope_at(d[part * PART / 2 + k]);
            if (task.dz_label)
                store_label(e, part, at);
            store_part(e, part);
        }
    }
    /* Stores the label's element of dz, before it is rounded. */
    DEVICE void store_label(const float (&e)[PART / 2], int part, const int (&at)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (at[i] / PART == part && holds(at[i]))
#pragma unroll
                for (int k = 0; k < PART / 4; k++)
                    if (gemm::column_of(part * (PART / 8) + k / 2) + k % 2 == at[i])
                        task.dz_label[task.first_row + rows.row[i]] = e[k / 2 * 4 + 2 * i + k % 2];
    }
    /* Adds the gradient of the entropy, and the spread of label smoothing, to a part of dz. */
    DEVICE void add_entropy_and_spread(const float (&d)[SUMS], float (&e)[PART / 2], int64_t first_class, int columns,
                                       int part) const {
        if (task.differentiates_entropy)
#pragma unroll
            for (int k = 0; k < PART / 2; k++) {
                const RowGradient &g = rows.gradient[k / 2 % 2];
                if (!g.constant)
                    e[k] *= tilted(g.level, g.tilt, (d[part * PART / 2 + k] - g.pivot) * task.scale);
            }
        if (task.smooths)
#pragma unroll
            for (int k = 0; k < PART / 2; k++) {
                const int column = gemm::column_of(part * (PART / 8) + k / 4) + k % 2;
                if (column < columns)
                    e[k] = fmaf(-rows.gradient[k / 2 % 2].spread, class_weight(first_class + column), e[k]);
            }
    }

    DEVICE void finish(float (&d)[SUMS]) const {
        const int64_t first_class = task.first_class + column;
        const int columns = static_cast<int>(min(int64_t(COLUMNS), task.classes - column));
        if (columns <= 0) { /* the last block of a wide cluster may have no columns */
            if constexpr (TOGETHER)
#pragma unroll
                for (unsigned &pair : packed->u)
                    pair = 0; /* tells the compiler that these registers were free until here */
            return;
        }
        int at[2]; /* the label's column in the tile, or -1 */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t label = rows.label[i], from = label - first_class;
            at[i] = label >= 0 && from >= 0 && from < columns ? static_cast<int>(from) : -1;
        }
        if constexpr (CAPS)
            add_bias(d, first_class, columns);
        if constexpr (MODE == GRADIENT)
            differentiate(d, first_class, columns, at);
        else
            collect(d, first_class, columns, column / COLUMNS, at);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

/* What gemm::sum_together asks of a job. */
template <int MODE> struct JobOfTiles {
    typedef TileRows<MODE> Rows;
    enum { HELD = 0, PACKED = MODE == EXPONENTIALS, KEEPS_PARTS = false };
};

/* The Job of gemm::multiply. */
template <typename T, int MODE, int OPTIONS, typename JobTiles> struct LogitJob : JobOfTiles<MODE> {
    typedef JobTiles Tiles;
    const CUtensorMap &x, &w, &out;
    const LogitTask &task;
    const int rows, first, steps;
    const gemm::TileOrder order;

    DEVICE LogitJob(const CUtensorMap &x_map, const CUtensorMap &w_map, const CUtensorMap &out_map, const LogitTask &t)
        : x(x_map), w(w_map), out(out_map), task(t), rows(t.active.among(t.first_row, t.rows)),
          first(t.active.copied_at(t.first_row)), steps((t.depth + gemm::DEPTH - 1) / gemm::DEPTH),
          order(rows, t.classes, gemm::ClusterShape(t.wide, Tiles::COLUMNS)) {
    }
    DEVICE gemm::Source a(int) const {
        return {&x, first, 0};
    }
    DEVICE gemm::Source b(int) const {
        return {&w, static_cast<int>(task.first_class), 0};
    }
    /* In turns. */
    DEVICE void finish(float (&d)[96], const gemm::TileOrigin &origin, char *staging) const {
        TileRows<MODE> loaded;
        loaded.load(*this, origin.row);
        const Results<T, MODE, OPTIONS, Tiles::COLUMNS> results = {task, rows,    loaded, origin.column,
                                                                   out,  staging, NULL};
        results.finish(d);
    }
    /* Together. */
    DEVICE void finish(float (&d)[128], const gemm::TileOrigin &origin, const TileRows<MODE> &loaded, char *staging,
                       char *const *, gemm::Packed &packed) const {
        packed.row = static_cast<int>(loaded.row[0]);
        packed.column = origin.column;
        const Results<T, MODE, OPTIONS, Tiles::COLUMNS> results = {task, rows,    loaded, origin.column,
                                                                   out,  staging, &packed};
        results.finish(d);
    }
    DEVICE void store(const gemm::Packed &packed, int part, char *staging) const {
        gemm::store_part<false>(packed, part, staging, out);
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* x, copy: the call's x, and the copy of its active rows. */
template <typename T, int MODE, int OPTIONS, typename Tiles>
__global__ __launch_bounds__(gemm::THREADS, 1) void logits_kernel(const __grid_constant__ CUtensorMap x,
                                                                  const __grid_constant__ CUtensorMap copy,
                                                                  const __grid_constant__ CUtensorMap w,
                                                                  const __grid_constant__ CUtensorMap out,
                                                                  const __grid_constant__ LogitTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYNAMIC_SHARED(char, memory);
    __shared__ gemm::Barriers<Tiles> barriers;
    gemm::begin(barriers, x, copy, w, out);
    wait_for_previous_kernel();
    const bool all = *task.active.count == task.active.all;
    const LogitJob<T, MODE, OPTIONS, Tiles> job(all ? x : copy, w, out, task);
    gemm::multiply<T, false, false>(memory, barriers, job, task.split);
#else
    (void)x, (void)copy, (void)w, (void)out, (void)task;
#endif
}

/* ---- launching ------------------------------------------------------------------------------- */

template <int MODE, typename Tiles>
rafter_status launch_logits(rafter_context *context, rafter_dtype dtype, const Matrix &x, const Matrix &copy,
                            const Matrix &w, LogitTask task) {
    const gemm::ClusterShape shape = gemm::ClusterShape::of(task.rows, Tiles::COLUMNS);
    task.wide = shape.wide;
    CUtensorMap x_map, copy_map, w_map, out_map = {};
    const int x_rows = shape.a_share();
    if (!gemm::map_operand(&x_map, dtype, x.data, x.rows, x.columns, x.stride, false, x_rows) ||
        !gemm::map_operand(&copy_map, dtype, copy.data, copy.rows, copy.columns, copy.stride, false, x_rows) ||
        !gemm::map_operand(&w_map, dtype, w.data, w.rows, w.columns, w.stride, false, Tiles::SHARE, shape.wide) ||
        (MODE != STATISTICS && !gemm::map_matrix(&out_map, dtype, task.out, task.rows,
                                                 round_up(task.classes, int64_t(8)), task.out_stride, gemm::PART_ROWS)))
        return rafter_fail(context, RAFTER_DEVICE_ERROR,
                           "linear_cross_entropy: the driver could not make a tensor map");
    const Launch how = gemm::launch_for<Tiles>(context->cuda_state, shape, task.rows, task.classes, task.split);
    const bool all = task.more || task.smooths || task.differentiates_entropy;
    const bool some = task.softcap != 0.0f || task.bias;
    for_16_bit(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(context, how,
               all    ? logits_kernel<T, MODE, ALL_OPTIONS, Tiles>
               : some ? logits_kernel<T, MODE, SOME_OPTIONS, Tiles>
                      : logits_kernel<T, MODE, NO_OPTIONS, Tiles>,
               x_map, copy_map, w_map, out_map, task);
    });
    return RAFTER_OK;
}

} // namespace

bool hopper_kernels_built(int device) {
    static BuiltKernel known;
    return known.is_built(device,
                          reinterpret_cast<const void *>(logits_kernel<bf16, STATISTICS, NO_OPTIONS, gemm::InTurns>));
}

LogitTask statistics_task(const HopperRun &run, int64_t first, int64_t rows, RowStats *stats) {
    LogitTask task = {};
    task.first_row = first;
    task.rows = rows;
    task.classes = run.problem.classes;
    task.stats = stats;
    task.tiles = run.tiles;
    return task;
}

rafter_status multiply_logits(const HopperRun &run, LogitMode mode, LogitTask task, const Dz &out) {
    task.active = run.active;
    task.split = run.logit_split();
    task.depth = static_cast<int>(run.problem.depth);
    task.scale = run.loss.scale;
    task.bias = run.bias;
    task.softcap = run.loss.softcap;
    /* Exponentials that the spread is subtracted from get the derivative of the softcap after that. */
    const bool slopes = task.softcap != 0.0f && !(mode == EXPONENTIALS && run.problem.smooths);
    task.inverse_softcap = slopes ? 1.0f / task.softcap : 0.0f;
    task.class_weight = run.loss.class_weight;
    task.class_stride = run.loss.class_stride;
    task.smooths = run.loss.smooths && (run.loss.softcap != 0.0f ? task.more || mode == GRADIENT : mode == GRADIENT);
    task.dz_label = mode == GRADIENT && run.problem.dbias ? run.z_label : NULL;
    task.wants_argmax = task.more && run.loss.argmax.data;
    task.differentiates_entropy = mode == GRADIENT && run.loss.dentropy.data;
    task.z_label = run.z_label;
    task.gradients = run.gradients;
    task.out = out.data;
    task.out_stride = out.stride;
    const bool together = mode != GRADIENT && run.tile_classes == gemm::Together::COLUMNS;
    const auto launch_mode = mode == GRADIENT     ? launch_logits<GRADIENT, gemm::InTurns>
                             : mode == STATISTICS ? together ? launch_logits<STATISTICS, gemm::Together>
                                                             : launch_logits<STATISTICS, gemm::InTurns>
                             : together ? launch_logits<EXPONENTIALS, gemm::Together>
                                                  : launch_logits<EXPONENTIALS, gemm::InTurns>;
    return launch_mode(run.context, run.problem.dtype, run.x, run.copy, run.w, task);
}

} // namespace lce
