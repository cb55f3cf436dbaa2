/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of x and W by Hopper's tensor cores (tiles.cuh), of the kept rows alone: how many these are is known on the
 * device only. dz, or exponentials in its place, are fused.cuh's.
 *
 *     dx[rows, depth] = dz[rows, classes] W[classes, depth]
 *     dW[classes, depth] = dz^T x
 */
#ifndef RAFTER_LCE_GRADIENTS_CUH
#define RAFTER_LCE_GRADIENTS_CUH

#include "ops/linear_cross_entropy/fused.cuh"

namespace fused {

struct DweightTask {
    Kept kept;
    tiles::Meeting meeting;
    int64_t first_row, rows; /* among the kept: dz's */
    int64_t scaled; /* 0: x is the call's; or rows of another: the last are those of dz's rows that are there */
    int64_t classes, depth;
    const float *alpha; /* what the sums are multiplied by; NULL: 1 */
    void *out;          /* of dz's classes */
    int64_t out_stride;
};

struct DxTask {
    Kept kept;
    tiles::Meeting meeting;
    int64_t first_row, rows; /* among the kept: dz's */
    int64_t classes, depth;
    int64_t in_front;    /* classes of dz, the others' being behind: a multiple of tiles::DEPTH, if there are others */
    int64_t first_class; /* of dz's, in W */
    const RowGradient *gradients; /* of all kept rows, where dz is p e, but for the label's; NULL: it is dz */
    const void *weight;           /* of all classes */
    int64_t weight_stride;
    const float *alpha; /* as above; sums are left as they are */
    void *dx;           /* of all the call's rows */
    int64_t dx_stride;
};

/* dx itself; or its sums, in fp32, of kept rows, written or added to. */
enum DxEnd { RESULTS, SUMS, MORE_SUMS };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct NoRows {
    int row;
    template <typename Job> DEVICE void load(const Job &, int first) {
        row = first;
    }
};

/* U: what dW is stored as: T, or sums in fp32. */
template <typename T, typename U, bool ADD> struct Dweight {
    typedef NoRows Rows;
    static constexpr bool PACKED = sizeof(U) == 2;
    static constexpr int HELD = PACKED ? 0 : tiles::HELD_FOR_FLOATS;
    const CUtensorMap &dz, &x, &out;
    const DweightTask &task;
    const int dz_first, x_first, steps;
    const float factor;
    const tiles::Order order;

    DEVICE Dweight(const CUtensorMap &dz_map, const CUtensorMap &x_map, const CUtensorMap &out_map,
                   const DweightTask &t, int rows)
        : dz(dz_map), x(x_map), out(out_map), task(t),
          dz_first(static_cast<int>(rows > 0 ? 0 : task.rows)), /* of no rows, the sum of what is behind all */
          x_first(task.scaled ? static_cast<int>(task.scaled) - rows : task.kept.copied_at(task.first_row)),
          steps(max(1, (rows + tiles::DEPTH - 1) / tiles::DEPTH)), factor(task.alpha ? *task.alpha : 1.0f),
          order(ADD && rows == 0 ? 0 : task.classes, task.depth) {
    }
    DEVICE tiles::Source a(int) const {
        return {&dz, 0, dz_first};
    }
    DEVICE tiles::Source b(int) const {
        return {&x, 0, x_first};
    }
    DEVICE bool is_wide() const {
        return task.depth * sizeof(U) % 16 == 0;
    }
    /* Where this thread's two rows of dW begin. */
    DEVICE void rows_at(int row, U *(&to)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[i] = row + 8 * i < task.classes ? static_cast<U *>(task.out) + (row + 8 * i) * task.out_stride : NULL;
    }

    DEVICE void finish(float (&d)[128], const tiles::Place &place, const Rows &rows, char *staging, char *const *held,
                       tiles::Packed &packed) const {
        constexpr int COLUMNS = PACKED ? tiles::CHUNK : tiles::FLOATS;
        U *to[2];
        rows_at(rows.row, to);
        packed.row = rows.row;
        packed.column = place.column;
#pragma unroll
        for (int part = 0; part < tiles::COLUMNS / COLUMNS; part++) {
            float e[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < COLUMNS / 2; k++)
                e[k] = factor * d[part * COLUMNS / 2 + k];
            if constexpr (PACKED)
                tiles::pack_part<U>(packed, part, e);
            else if (is_wide())
                tiles::store_floats<ADD>(e, part, staging, held, out, place.column, rows.row);
            else
                tiles::scatter_floats<ADD>(e, part, staging, to, place.column, task.depth);
        }
    }

    DEVICE void store(const tiles::Packed &packed, int part, char *staging) const {
        if (is_wide()) {
            tiles::store_part<ADD>(packed, part, staging, out);
        } else {
            U *to[2];
            rows_at(packed.row, to);
            tiles::scatter_part<U, ADD>(packed, part, staging, to, task.depth);
        }
    }
};

/* What of a thread's two rows meets their sums: read, and not looked at, before these are there. */
struct DxRows {
    int row;
    int of_call[2], label[2]; /* the call's row, -1 if there is none; its class */
    float p[2], at_label[2];

    template <typename Job> DEVICE void load(const Job &job, int first) {
        const DxTask &task = job.task;
        row = first;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t kept = task.first_row + first + 8 * i;
            const bool there = first + 8 * i < job.rows;
            of_call[i] = there ? task.kept.order[kept] : -1;
            label[i] = there ? task.kept.classes[kept] : 0;
            p[i] = there && task.gradients ? task.gradients[kept].p : 1.0f;
            at_label[i] = there && task.gradients ? task.gradients[kept].at_label : 0.0f;
        }
    }
};

template <typename T, typename U, int END> struct Dx {
    typedef std::conditional_t<END == RESULTS, DxRows, NoRows> Rows;
    static constexpr bool PACKED = sizeof(U) == 2;
    static constexpr int HELD = PACKED ? 0 : tiles::HELD_FOR_FLOATS;
    const CUtensorMap &dz, &dz_behind, &w, &out;
    const DxTask &task;
    const int rows, steps, in_front; /* the last two: steps, of all, of dz in front */
    const bool in_rows;              /* RESULTS: these, one after the other, as the copy engine takes them */
    const float factor;              /* RESULTS */
    const tiles::Order order;

    DEVICE Dx(const CUtensorMap &dz_map, const CUtensorMap &behind_map, const CUtensorMap &w_map,
              const CUtensorMap &out_map, const DxTask &t)
        : dz(dz_map), dz_behind(behind_map), w(w_map), out(out_map), task(t), rows(t.kept.among(t.first_row, t.rows)),
          steps(static_cast<int>((t.classes + tiles::DEPTH - 1) / tiles::DEPTH)),
          in_front(static_cast<int>((t.in_front + tiles::DEPTH - 1) / tiles::DEPTH)),
          in_rows(*t.kept.count == t.kept.all && t.depth * sizeof(U) % 16 == 0),
          factor(END == RESULTS ? *t.alpha : 1.0f), order(rows, t.depth) {
    }
    DEVICE tiles::Source a(int k) const {
        return k < in_front ? tiles::Source{&dz, 0, 0} : tiles::Source{&dz_behind, 0, -in_front * tiles::DEPTH};
    }
    DEVICE tiles::Source b(int) const {
        return {&w, 0, static_cast<int>(task.first_class)};
    }

    /* p e W, and what the label's element of dz adds to it. */
    template <int COUNT> DEVICE void add_label(float (&e)[COUNT], const Rows &of, int column) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            /* Of a row to which it adds nothing, the label may be none. */
            const int64_t label = of.at_label[i] != 0.0f ? of.label[i] : -1;
            const T *const from = static_cast<const T *>(task.weight) + label * task.weight_stride;
            Pack<T, 2> of_label[COUNT / 4];
#pragma unroll
            for (int j = 0; j < COUNT / 4; j++) {
                const int64_t at = column + tiles::column_of(j);
                of_label[j] = {};
                if (label >= 0 && at + 1 < task.depth)
                    of_label[j] = *reinterpret_cast<const Pack<T, 2> *>(from + at);
                else if (label >= 0 && at < task.depth)
                    of_label[j].v[0] = from[at];
            }
#pragma unroll
            for (int j = 0; j < COUNT / 4; j++) {
                float two[2];
                unpack(of_label[j], two);
#pragma unroll
                for (int c = 0; c < 2; c++)
                    e[4 * j + 2 * i + c] = fmaf(of.p[i], e[4 * j + 2 * i + c], of.at_label[i] * two[c]);
            }
        }
    }

    /* Where dx of this thread's two rows begins. */
    DEVICE void rows_at(const int (&of_call)[2], U *(&to)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[i] = of_call[i] >= 0 ? static_cast<U *>(task.dx) + of_call[i] * task.dx_stride : NULL;
    }

    DEVICE void finish(float (&d)[128], const tiles::Place &place, const Rows &of, char *staging, char *const *held,
                       tiles::Packed &packed) const {
        constexpr int COLUMNS = PACKED ? tiles::CHUNK : tiles::FLOATS;
        const int row = (END == RESULTS ? static_cast<int>(task.first_row) : 0) + of.row;
        packed.row = row;
        packed.column = place.column;
        if constexpr (END == RESULTS) {
            packed.at[0] = of.of_call[0];
            packed.at[1] = of.of_call[1];
        }
#pragma unroll
        for (int part = 0; part < tiles::COLUMNS / COLUMNS; part++) {
            float e[COLUMNS / 2];
#pragma unroll
            for (int k = 0; k < COLUMNS / 2; k++)
                e[k] = d[part * COLUMNS / 2 + k];
            if constexpr (END == RESULTS) {
                if (task.gradients)
                    add_label(e, of, place.column + part * COLUMNS);
#pragma unroll
                for (int k = 0; k < COLUMNS / 2; k++)
                    e[k] *= factor;
            }
            if constexpr (PACKED) {
                tiles::pack_part<U>(packed, part, e);
            } else if (END != RESULTS || in_rows) {
                tiles::store_floats<END == MORE_SUMS>(e, part, staging, held, out, place.column, row);
            } else {
                U *to[2];
                rows_at(packed.at, to);
                tiles::scatter_floats<false>(e, part, staging, to, place.column, task.depth);
            }
        }
    }

    DEVICE void store(const tiles::Packed &packed, int part, char *staging) const {
        if (in_rows) {
            tiles::store_part<false>(packed, part, staging, out);
        } else {
            U *to[2];
            rows_at(packed.at, to);
            tiles::scatter_part<U, false>(packed, part, staging, to, task.depth);
        }
    }
};

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

/* x, and its copy: as in fused::multiply; where the first is not the call's, both are the same. */
template <typename T, typename U, bool ADD>
__global__ __launch_bounds__(tiles::THREADS, 1) void multiply_dweight(const __grid_constant__ CUtensorMap dz,
                                                                      const __grid_constant__ CUtensorMap x,
                                                                      const __grid_constant__ CUtensorMap copy,
                                                                      const __grid_constant__ CUtensorMap out,
                                                                      const __grid_constant__ DweightTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ tiles::Barriers barriers;
    tiles::begin(barriers, dz, x, copy, out);
    wait_for_previous_kernel();
    const bool all = *task.kept.count == task.kept.all;
    const int rows = task.kept.among(task.first_row, task.rows);
    tiles::multiply<T, true, true>(memory, barriers, Dweight<T, U, ADD>(dz, all ? x : copy, out, task, rows),
                                   task.meeting);
#else
    (void)dz, (void)x, (void)copy, (void)out, (void)task;
#endif
}

template <typename T, typename U, int END>
__global__ __launch_bounds__(tiles::THREADS, 1) void multiply_dx(const __grid_constant__ CUtensorMap dz,
                                                                 const __grid_constant__ CUtensorMap dz_behind,
                                                                 const __grid_constant__ CUtensorMap w,
                                                                 const __grid_constant__ CUtensorMap out,
                                                                 const __grid_constant__ DxTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char memory[];
    __shared__ tiles::Barriers barriers;
    tiles::begin(barriers, dz, dz_behind, w, out);
    wait_for_previous_kernel();
    tiles::multiply<T, false, true>(memory, barriers, Dx<T, U, END>(dz, dz_behind, w, out, task), task.meeting);
#else
    (void)dz, (void)dz_behind, (void)w, (void)out, (void)task;
#endif
}

/* ---- launching ------------------------------------------------------------------------------- */

/* f(zero of T, zero of U), T being the inputs' dtype, U that or fp32. */
template <typename F> static inline void for_dtypes(rafter_dtype inputs, rafter_dtype out, F f) {
    const auto with = [&](auto zero) {
        if (out == RAFTER_F32)
            f(zero, 0.0f);
        else
            f(zero, zero);
    };
    if (inputs == RAFTER_BF16)
        with(bf16());
    else
        with(fp16());
}

/* dz: [task.rows, classes]. x: [rows of it, depth]. out: in out_dtype, of dz's classes. */
static inline rafter_status run_dweight(rafter_context *context, rafter_dtype dtype, const Matrix &dz, const Matrix &x,
                                        const Matrix &copy, const Matrix &out, rafter_dtype out_dtype, bool add,
                                        const DweightTask &task) {
    CUtensorMap dz_map, x_map, copy_map, out_map;
    if (!map_operand(&dz_map, dtype, dz, true, tiles::ROWS) || !map_operand(&x_map, dtype, x, true, tiles::SHARE) ||
        !map_operand(&copy_map, dtype, copy, true, tiles::SHARE) ||
        !tiles::map_matrix(&out_map, out_dtype, out.data, out.rows, out.columns, out.stride, tiles::PART_ROWS))
        return no_map(context);
    const Launch how = tiles::launch_for(context->cuda_state, task.classes, task.depth, task.meeting);
    for_dtypes(dtype, out_dtype, [&](auto zero, auto out_zero) {
        typedef decltype(zero) T;
        typedef decltype(out_zero) U;
        launch(context, how, add ? multiply_dweight<T, U, true> : multiply_dweight<T, U, false>, dz_map, x_map,
               copy_map, out_map, task);
    });
    return RAFTER_OK;
}

/* dz: [task.rows, in_front], and behind it the other classes'; w: of all classes; out: dx of the call's rows up to the
 * task's last, if all are kept; or sums of the task's. */
template <int END>
static inline rafter_status run_dx(rafter_context *context, rafter_dtype dtype, const Matrix &dz,
                                   const Matrix &dz_behind, const Matrix &w, rafter_dtype dx_dtype, const Matrix &out,
                                   const DxTask &task) {
    CUtensorMap dz_map, behind_map, w_map, out_map = {};
    if (!map_operand(&dz_map, dtype, dz, false, tiles::ROWS) ||
        !map_operand(&behind_map, dtype, dz_behind, false, tiles::ROWS) ||
        !map_operand(&w_map, dtype, w, true, tiles::SHARE) ||
        !tiles::map_matrix(&out_map, END == RESULTS ? dx_dtype : RAFTER_F32, out.data, out.rows, out.columns,
                           out.stride, tiles::PART_ROWS))
        return no_map(context);
    const Launch how = tiles::launch_for(context->cuda_state, task.rows, task.depth, task.meeting);
    for_dtypes(dtype, END == RESULTS ? dx_dtype : RAFTER_F32, [&](auto zero, auto out_zero) {
        typedef decltype(zero) T;
        typedef decltype(out_zero) U;
        if constexpr (END == RESULTS || sizeof(U) == 4)
            launch(context, how, multiply_dx<T, U, END>, dz_map, behind_map, w_map, out_map, task);
    });
    return RAFTER_OK;
}

} // namespace fused

#endif
