/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of x and W on Hopper's tensor cores (cuda/hopper_gemm.cuh), for active rows only:
 *
 *     dx[rows, depth] = dz[rows, classes] W[classes, depth]
 *     dW[classes, depth] = dz^T x
 *
 * dz, or exponentials in its place, are from hopper_logits.cu.
 */
#include <type_traits>

#include "cuda/hopper_epilogue.cuh"
#include "cuda/view_layout.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

struct DweightTask {
    ActiveRows active;
    gemm::SplitSums split;
    int64_t first_row, rows; /* dz's, among the active rows */
    int64_t scaled;          /* rows of x_scaled, of which the last ones are dz's active rows; 0: x is the call's */
    int64_t classes, depth;
    const float *alpha; /* factor of the sums; NULL: 1 */
    void *out;          /* dW of dz's classes */
    int64_t out_stride;
    const float *spread_x;     /* class v gets -w_v times this; NULL: none */
    const float *class_weight; /* of dz's classes; NULL: all are 1 */
    int64_t class_stride;
};

struct DxTask {
    ActiveRows active;
    gemm::SplitSums split;
    int64_t first_row, rows; /* dz's, among the active rows */
    int64_t classes, depth;
    int64_t in_front;    /* classes of the first part of dz: a multiple of gemm::DEPTH if there is a second part */
    int64_t first_class; /* dz's, in W */
    const RowGradient *gradients; /* of all active rows, if dz is exponentials; NULL: it is dz */
    const void *weight;           /* of all classes */
    int64_t weight_stride;
    const float *weight_sum; /* rows get -spread times this; NULL: none */
    const float *alpha;      /* RESULTS only */
    void *dx;                /* of all the call's rows */
    int64_t dx_stride;
    bool wide; /* gemm::ClusterShape */
};

/* What a product for dx writes. RESULTS: dx itself. SUMS: fp32 sums of active rows; MORE_SUMS adds to
 * them. PART_SUMS: fp32 sums of each part of the classes, apart. */
enum DxEnd { RESULTS, SUMS, MORE_SUMS, PART_SUMS };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The Job of gemm::multiply for dW, which is stored as U: T or fp32. ADD: adds to what `out` holds. */
template <typename T, typename U, bool ADD> struct DweightJob {
    typedef gemm::Together Tiles;
    typedef gemm::NoRows Rows;
    static constexpr bool PACKED = sizeof(U) == 2, KEEPS_PARTS = false;
    static constexpr int HELD = PACKED ? 0 : gemm::HELD_FOR_FLOATS;
    const CUtensorMap &dz, &x, &out;
    const DweightTask &task;
    const int dz_first, x_first, steps;
    const float factor;
    const gemm::TileOrder order;

    DEVICE DweightJob(const CUtensorMap &dz_map, const CUtensorMap &x_map, const CUtensorMap &out_map,
                      const DweightTask &t, int rows)
        : dz(dz_map), x(x_map), out(out_map), task(t),
          dz_first(static_cast<int>(rows > 0 ? 0 : task.rows)), /* no rows: start past the end, where loads return 0 */
          x_first(task.scaled ? static_cast<int>(task.scaled) - rows : task.active.copied_at(task.first_row)),
          steps(max(1, (rows + gemm::DEPTH - 1) / gemm::DEPTH)), factor(task.alpha ? *task.alpha : 1.0f),
          order(ADD && rows == 0 ? 0 : task.classes, task.depth) {
    }
    DEVICE gemm::Source a(int) const {
        return {&dz, 0, dz_first};
    }
    DEVICE gemm::Source b(int) const {
        return {&x, 0, x_first};
    }
    DEVICE bool allows_wide_access() const {
        return task.depth * sizeof(U) % 16 == 0;
    }
    /* Addresses of this thread's two rows of dW. */
    DEVICE void rows_at(int row, U *(&to)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[i] = row + 8 * i < task.classes ? static_cast<U *>(task.out) + (row + 8 * i) * task.out_stride : NULL;
    }

    DEVICE void subtract_spread(float (&d)[128], int row, int column) const {
        float w[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            w[i] = task.class_weight && row + 8 * i < task.classes
                       ? __ldg(task.class_weight + (row + 8 * i) * task.class_stride)
                       : 1.0f;
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const float2 two = __ldg(reinterpret_cast<const float2 *>(task.spread_x + column + gemm::column_of(j)));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                d[4 * j + 2 * i] = fmaf(-w[i], two.x, d[4 * j + 2 * i]);
                d[4 * j + 2 * i + 1] = fmaf(-w[i], two.y, d[4 * j + 2 * i + 1]);
            }
        }
    }

    DEVICE void finish(float (&d)[128], const gemm::TileOrigin &origin, const Rows &rows, char *staging,
                       char *const *held, gemm::Packed &packed) const {
        constexpr int COLUMNS = PACKED ? gemm::CHUNK : gemm::FLOATS;
        U *to[2];
        rows_at(rows.row, to);
        packed.row = rows.row;
        packed.column = origin.column;
        if (task.spread_x)
            subtract_spread(d, rows.row, origin.column);
#pragma unroll
        for (int part = 0; part < gemm::COLUMNS / COLUMNS; part++) {
            float e[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < COLUMNS / 2; k++)
                e[k] = factor * d[part * COLUMNS / 2 + k];
            if constexpr (PACKED)
                gemm::pack_part<U>(packed, part, e);
            else if (allows_wide_access())
                gemm::store_floats<ADD>(e, part, staging, held, out, origin.column, rows.row);
            else
                gemm::scatter_floats<ADD>(e, part, staging, to, origin.column, task.depth);
        }
    }

    DEVICE void store(const gemm::Packed &packed, int part, char *staging) const {
        if (allows_wide_access()) {
            gemm::store_part<ADD>(packed, part, staging, out);
        } else {
            U *to[2];
            rows_at(packed.row, to);
            gemm::scatter_part<U, ADD>(packed, part, staging, to, task.depth);
        }
    }
};

/* What a thread needs to know about its two rows: loaded, but not used, before their
 * sums are complete. */
struct DxRows {
    int row;
    int call_row[2], label[2]; /* the call's row, or -1; its class */
    float p[2], at_label[2], spread[2];

    template <typename Job> DEVICE void load(const Job &job, int first) {
        const DxTask &task = job.task;
        row = first;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t k = task.first_row + first + 8 * i;
            const bool valid = first + 8 * i < job.rows;
            call_row[i] = valid ? task.active.order[k] : -1;
            label[i] = valid ? task.active.classes[k] : 0;
            p[i] = valid && task.gradients ? task.gradients[k].p : 1.0f;
            at_label[i] = valid && task.gradients ? task.gradients[k].at_label : 0.0f;
            spread[i] = valid && task.weight_sum ? task.gradients[k].spread : 0.0f;
        }
    }
};

/* The Job of gemm::multiply for dx, which is stored as U: T or fp32. END: a DxEnd. */
template <typename T, typename U, int END> struct DxJob {
    typedef gemm::Together Tiles;
    typedef std::conditional_t<END == RESULTS, DxRows, gemm::NoRows> Rows;
    static constexpr bool PACKED = sizeof(U) == 2, KEEPS_PARTS = END == PART_SUMS;
    static constexpr int HELD = PACKED ? 0 : gemm::HELD_FOR_FLOATS;
    const CUtensorMap &dz, &dz_rest, &w, &out;
    const DxTask &task;
    const int rows, steps, in_front; /* steps: of all of dz; in_front: those of its first part */
    const bool in_rows;              /* RESULTS: rows of dx are the active rows, and the copy engine can store them */
    const float factor;              /* RESULTS */
    const gemm::TileOrder order;

    DEVICE DxJob(const CUtensorMap &dz_map, const CUtensorMap &rest_map, const CUtensorMap &w_map,
                 const CUtensorMap &out_map, const DxTask &t)
        : dz(dz_map), dz_rest(rest_map), w(w_map), out(out_map), task(t), rows(t.active.among(t.first_row, t.rows)),
          steps(static_cast<int>((t.classes + gemm::DEPTH - 1) / gemm::DEPTH)),
          in_front(static_cast<int>((t.in_front + gemm::DEPTH - 1) / gemm::DEPTH)),
          in_rows(*t.active.count == t.active.all && t.depth * sizeof(U) % 16 == 0),
          factor(END == RESULTS ? *t.alpha : 1.0f), order(rows, t.depth, gemm::ClusterShape(t.wide)) {
    }
    DEVICE gemm::Source a(int k) const {
        return k < in_front ? gemm::Source{&dz, 0, 0} : gemm::Source{&dz_rest, 0, -in_front * gemm::DEPTH};
    }
    DEVICE gemm::Source b(int) const {
        return {&w, 0, static_cast<int>(task.first_class)};
    }

    /* Multiplies the sums e W by p, and adds the label's element of dz times W[label]. */
    template <int COUNT> DEVICE void add_label(float (&e)[COUNT], const Rows &loaded, int column) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            /* If at_label is 0, the row may have no valid label. */
            const int64_t label = loaded.at_label[i] != 0.0f ? loaded.label[i] : -1;
            const T *const from = static_cast<const T *>(task.weight) + label * task.weight_stride;
            Pack<T, 2> label_weight[COUNT / 4];
#pragma unroll
            for (int j = 0; j < COUNT / 4; j++) {
                const int64_t at = column + gemm::column_of(j);
                label_weight[j] = {};
                if (label >= 0 && at + 1 < task.depth)
                    label_weight[j] = *reinterpret_cast<const Pack<T, 2> *>(from + at);
                else if (label >= 0 && at < task.depth)
                    label_weight[j].v[0] = from[at];
            }
#pragma unroll
            for (int j = 0; j < COUNT / 4; j++) {
                float two[2];
                unpack(label_weight[j], two);
#pragma unroll
                for (int c = 0; c < 2; c++)
                    e[4 * j + 2 * i + c] = fmaf(loaded.p[i], e[4 * j + 2 * i + c], loaded.at_label[i] * two[c]);
            }
        }
    }

    template <int COUNT> DEVICE void subtract_spread(float (&e)[COUNT], const Rows &loaded, int column) const {
#pragma unroll
        for (int j = 0; j < COUNT / 4; j++) {
            const int at = column + gemm::column_of(j);
            if (at >= task.depth) /* the last block of a wide cluster may be past the sum's padding */
                continue;
            const float2 two = __ldg(reinterpret_cast<const float2 *>(task.weight_sum + at));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                e[4 * j + 2 * i] = fmaf(-loaded.spread[i], two.x, e[4 * j + 2 * i]);
                e[4 * j + 2 * i + 1] = fmaf(-loaded.spread[i], two.y, e[4 * j + 2 * i + 1]);
            }
        }
    }

    /* Addresses of dx of this thread's two rows. */
    DEVICE void rows_at(const int (&call_row)[2], U *(&to)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[i] = call_row[i] >= 0 ? static_cast<U *>(task.dx) + call_row[i] * task.dx_stride : NULL;
    }

    DEVICE void finish(float (&d)[128], const gemm::TileOrigin &origin, const Rows &loaded, char *staging,
                       char *const *held, gemm::Packed &packed) const {
        constexpr int COLUMNS = PACKED ? gemm::CHUNK : gemm::FLOATS;
        const int row = (END == RESULTS ? static_cast<int>(task.first_row) : 0) + loaded.row;
        if (KEEPS_PARTS && (row & ~15) % order.shape.rows() >= rows) /* the warp's 16 rows do not exist */
            return;
        packed.row = row;
        packed.column = origin.column;
        if constexpr (END == RESULTS) {
            packed.at[0] = loaded.call_row[0];
            packed.at[1] = loaded.call_row[1];
        }
#pragma unroll
        for (int part = 0; part < gemm::COLUMNS / COLUMNS; part++) {
            float e[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < COLUMNS / 2; k++)
                e[k] = d[part * COLUMNS / 2 + k];
            if constexpr (END == RESULTS) {
                if (task.gradients)
                    add_label(e, loaded, origin.column + part * COLUMNS);
                if (task.weight_sum)
                    subtract_spread(e, loaded, origin.column + part * COLUMNS);
#pragma unroll
                for (int k = 0; k < COLUMNS / 2; k++)
                    e[k] *= factor;
            }
            if constexpr (PACKED) {
                gemm::pack_part<U>(packed, part, e);
            } else if (END != RESULTS || in_rows) {
                gemm::store_floats<END == MORE_SUMS>(e, part, staging, held, out, origin.column, row);
            } else {
                U *to[2];
                rows_at(packed.at, to);
                gemm::scatter_floats<false>(e, part, staging, to, origin.column, task.depth);
            }
        }
    }

    DEVICE void store(const gemm::Packed &packed, int part, char *staging) const {
        if (in_rows) {
            gemm::store_part<false>(packed, part, staging, out);
        } else {
            U *to[2];
            rows_at(packed.at, to);
            gemm::scatter_part<U, false>(packed, part, staging, to, task.depth);
        }
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* x, copy: the call's x, and the copy of its active rows; or x_scaled twice. */
template <typename T, typename U, bool ADD>
__global__ __launch_bounds__(gemm::THREADS, 1) void dweight_kernel(const __grid_constant__ CUtensorMap dz,
                                                                   const __grid_constant__ CUtensorMap x,
                                                                   const __grid_constant__ CUtensorMap copy,
                                                                   const __grid_constant__ CUtensorMap out,
                                                                   const __grid_constant__ DweightTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYNAMIC_SHARED(char, memory);
    __shared__ gemm::Barriers<gemm::Together> barriers;
    gemm::begin(barriers, dz, x, copy, out);
    wait_for_previous_kernel();
    const bool all = *task.active.count == task.active.all;
    const int rows = task.active.among(task.first_row, task.rows);
    gemm::multiply<T, true, true>(memory, barriers, DweightJob<T, U, ADD>(dz, all ? x : copy, out, task, rows),
                                  task.split);
#else
    (void)dz, (void)x, (void)copy, (void)out, (void)task;
#endif
}

template <typename T, typename U, int END>
__global__ __launch_bounds__(gemm::THREADS, 1) void dx_kernel(const __grid_constant__ CUtensorMap dz,
                                                              const __grid_constant__ CUtensorMap dz_rest,
                                                              const __grid_constant__ CUtensorMap w,
                                                              const __grid_constant__ CUtensorMap out,
                                                              const __grid_constant__ DxTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    DYNAMIC_SHARED(char, memory);
    __shared__ gemm::Barriers<gemm::Together> barriers;
    gemm::begin(barriers, dz, dz_rest, w, out);
    wait_for_previous_kernel();
    gemm::multiply<T, false, true>(memory, barriers, DxJob<T, U, END>(dz, dz_rest, w, out, task), task.split);
#else
    (void)dz, (void)dz_rest, (void)w, (void)out, (void)task;
#endif
}

/* ---- launching ------------------------------------------------------------------------------- */

/* Calls f(zero of T, zero of U): T is the inputs' dtype, U that or fp32. */
template <typename F> void for_dtypes(rafter_dtype inputs, rafter_dtype out, F f) {
    for_16_bit(inputs, [&](auto zero) {
        if (out == RAFTER_F32)
            f(zero, 0.0f);
        else
            f(zero, zero);
    });
}

rafter_status no_map(rafter_context *context) {
    return rafter_fail(context, RAFTER_DEVICE_ERROR, "linear_cross_entropy: the driver could not make a tensor map");
}

bool map_operand(CUtensorMap *map, rafter_dtype dtype, const Matrix &m, bool transposed, int count) {
    return gemm::map_operand(map, dtype, m.data, m.rows, m.columns, m.stride, transposed, count);
}

Matrix dz_matrix(const Dz &dz, int64_t rows) {
    return {dz.data, rows, dz.classes, dz.stride};
}

/* Where dx goes: dx of the call's rows up to the task's last one, times alpha; or sums of the task's rows. */
struct DxOut {
    rafter_dtype dtype;
    void *data;
    int64_t rows, stride;
    const float *alpha; /* NULL: sums */
};

template <int END> rafter_status launch_dx(const HopperRun &run, const DxInput &in, const DxOut &out) {
    const rafter_dtype dtype = run.problem.dtype;
    const Matrix dz = dz_matrix(in.dz, in.rows), rest = in.rest.classes > 0 ? dz_matrix(in.rest, in.rows) : dz;
    DxTask task = {};
    task.active = run.active;
    task.split = run.dx_split(in.dz.classes + in.rest.classes);
    task.first_row = in.first;
    task.rows = in.rows;
    task.classes = in.dz.classes + in.rest.classes;
    task.depth = run.problem.depth;
    task.in_front = in.dz.classes;
    task.first_class = in.dz.first_class;
    task.gradients = in.gradients;
    task.weight = run.w.data;
    task.weight_stride = run.w.stride;
    task.weight_sum = in.gradients ? run.weight_sum : NULL;
    task.alpha = out.alpha;
    task.dx = out.data;
    task.dx_stride = out.stride;
    const gemm::ClusterShape shape = gemm::ClusterShape::of(task.rows);
    task.wide = shape.wide;

    CUtensorMap dz_map, rest_map, w_map, out_map = {};
    if (!map_operand(&dz_map, dtype, dz, false, shape.a_share()) ||
        !map_operand(&rest_map, dtype, rest, false, shape.a_share()) ||
        !map_operand(&w_map, dtype, run.w, true, gemm::Together::SHARE) ||
        !gemm::map_matrix(&out_map, out.dtype, out.data, out.rows, task.depth, out.stride, gemm::PART_ROWS))
        return no_map(run.context);
    const Launch how =
        gemm::launch_for<gemm::Together>(run.context->cuda_state, shape, task.rows, task.depth, task.split);
    for_dtypes(dtype, out.dtype, [&](auto zero, auto out_zero) {
        typedef decltype(zero) T;
        typedef decltype(out_zero) U;
        if constexpr (END == RESULTS || sizeof(U) == 4)
            launch(run.context, how, dx_kernel<T, U, END>, dz_map, rest_map, w_map, out_map, task);
    });
    return RAFTER_OK;
}

/* How many parts all tiles of dx are split into, if there is one tile of rows, and a kernel of its own adds
 * up the parts faster; else 1. */
int dx_parts(const HopperRun &run, const DxInput &in) {
    if (run.problem.invariant)
        return 1;
    const gemm::ClusterShape shape = gemm::ClusterShape::of(in.rows);
    const int64_t classes = in.dz.classes + in.rest.classes, tiles = shape.tiles(in.rows, run.problem.depth);
    const Launch how =
        gemm::launch_for<gemm::Together>(run.context->cuda_state, shape, in.rows, run.problem.depth, run.split);
    const gemm::TileScheduler scheduler = gemm::TileScheduler::of(
        static_cast<int>(tiles), static_cast<int>(ceil_div<int64_t>(classes, gemm::DEPTH)),
        static_cast<int>(how.blocks / gemm::CLUSTER), run.split.capacity, gemm::Together::SUM_STEPS);
    /* A cluster that adds up its tile takes 1.2 us per part, the kernel 5 to 8 us. */
    constexpr int MANY_PARTS = 6;
    const bool all_split = in.rows <= shape.rows() && scheduler.whole == 0;
    return all_split && (shape.wide || scheduler.parts > MANY_PARTS) ? scheduler.parts : 1;
}

/* Forms dx. With few rows, tiles are split into many parts. Then store(parts, elements between parts), a
 * kernel of many blocks, adds them up: that is faster than leaving it to the blocks that finish last. */
template <typename Store>
rafter_status form_dx(const HopperRun &run, const DxInput &input, const DxOut &out, Store store) {
    const int parts = dx_parts(run, input);
    if (parts == 1)
        return launch_dx<RESULTS>(run, input, out);
    const int64_t stride = run.problem.depth_stride(), rows = gemm::ClusterShape::of(input.rows).rows();
    RAFTER_TRY(launch_dx<PART_SUMS>(run, input, {RAFTER_F32, run.split.sums, parts * rows, stride, NULL}));
    store(parts, rows * stride);
    return RAFTER_OK;
}

} // namespace

rafter_status hopper_dx(HopperRun *run, const DxInput &input) {
    const rafter_view &dx = run->call.dx;
    const DxOut out = {dx.dtype, dx.data, input.first + input.rows, run->problem.dx_layout.stride, run->alpha()};
    return form_dx(*run, input, out, [&](int parts, int64_t part_stride) {
        store_dx_rows(*run, input.first, input.rows, run->split.sums, input.gradients, parts, part_stride);
        run->zeroed_dx = input.rows == run->problem.rows;
    });
}

rafter_status hopper_rank_dx(const HopperRun &run, const DxInput &input, float *to) {
    const Problem &p = run.problem;
    zero_inactive_rows(run, run.active, to);
    return form_dx(run, input, {RAFTER_F32, to, p.rows, p.depth_stride(), run.context->cuda_state->zero_and_one + 1},
                   [&](int parts, int64_t part_stride) {
                       store_rank_dx(run, run.split.sums, input.gradients, parts, part_stride, to);
                   });
}

rafter_status hopper_dx_sums(const HopperRun &run, const DxInput &input, float *sums, int64_t sums_rows, bool add) {
    const DxOut out = {RAFTER_F32, sums, sums_rows, run.problem.depth_stride(), NULL};
    return add ? launch_dx<MORE_SUMS>(run, input, out) : launch_dx<SUMS>(run, input, out);
}

rafter_status hopper_dweight(const HopperRun &run, const Dz &dz, int64_t first, int64_t rows, const Matrix *scaled,
                             const float *spread_x, const GradientOut &out, bool add) {
    const rafter_dtype dtype = run.problem.dtype;
    const Matrix &x = scaled ? *scaled : run.x, &copy = scaled ? *scaled : run.copy;
    DweightTask task = {};
    task.active = run.active;
    task.split = run.split;
    task.split.left = run.beside;
    task.first_row = first;
    task.rows = rows;
    task.scaled = scaled ? scaled->rows : 0;
    task.classes = dz.classes;
    task.depth = run.problem.depth;
    task.alpha = out.alpha;
    task.out = out.data;
    task.out_stride = out.stride;
    task.spread_x = spread_x;
    task.class_stride = run.loss.class_stride;
    if (run.loss.class_weight)
        task.class_weight = run.loss.class_weight + dz.first_class * task.class_stride;

    CUtensorMap dz_map, x_map, copy_map, out_map;
    if (!map_operand(&dz_map, dtype, dz_matrix(dz, rows), true, gemm::ROWS) ||
        !map_operand(&x_map, dtype, x, true, gemm::Together::SHARE) ||
        !map_operand(&copy_map, dtype, copy, true, gemm::Together::SHARE) ||
        !gemm::map_matrix(&out_map, out.dtype, out.data, dz.classes, run.problem.depth, out.stride, gemm::PART_ROWS))
        return no_map(run.context);
    const Launch how = gemm::launch_for<gemm::Together>(run.context->cuda_state, gemm::ClusterShape(false),
                                                        task.classes, task.depth, task.split);
    for_dtypes(dtype, out.dtype, [&](auto zero, auto out_zero) {
        typedef decltype(zero) T;
        typedef decltype(out_zero) U;
        launch(run.context, how, add ? dweight_kernel<T, U, true> : dweight_kernel<T, U, false>, dz_map, x_map,
               copy_map, out_map, task);
    });
    return RAFTER_OK;
}

} // namespace lce
