/* SPDX-License-Identifier: Apache-2.0 */
/* Products with few rows or few classes: see struct lce_few in kernels.h. */
#ifndef RAFTER_LCE_CPU_FEW_H
#define RAFTER_LCE_CPU_FEW_H

#include "core/sizes.h"
#include "ops/linear_cross_entropy/micro.h"

/* Whether the few, and dz, are bf16 pairs. */
V_INLINE bool few_pairs(int dtype) {
    return LCE_FEW_PAIRS && dtype == RAFTER_BF16;
}

V_INLINE const char *streamed_row(int dtype, const struct lce_few *job, int64_t row) {
    return lce_row(&job->streamed, row, v_bytes(dtype));
}

V_INLINE vf part_of_row(int dtype, const char *row, int64_t column, int64_t n) {
    const char *const p = row + column * v_bytes(dtype);
    return n >= V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, n, 0.0f);
}

/* ---- packing --------------------------------------------------------------------------------- */

V_INLINE void few_pack_as(int dtype, const struct lce_matrix *m, int64_t pitch, char *few, char *joined) {
    enum { SOME = LCE_DEPTH_BYTES / 4 };
    const bool pairs = few_pairs(dtype);
    char buffer[2][SOME * 4];
    memset(few, 0, (size_t)(round_up(m->rows, LCE_FEW_PADDED) * pitch * (pairs ? 2 : 4)));
    for (int64_t row = 0; row < m->rows; row += 2)
        for (int64_t column = 0; column < pitch; column += SOME) {
            const int64_t n = min64(SOME, m->columns - column), wide = min64(SOME, pitch - column);
            const char *part[2] = {NULL, NULL};
            for (int i = 0; i < 2 && row + i < m->rows && n > 0; i++) {
                const char *const p = lce_row(m, row + i, v_bytes(dtype)) + column * m->column_stride * v_bytes(dtype);
                part[i] = v_gather(dtype, p, m->column_stride, n, buffer[i]);
                char *const to = few + ((row + i) * pitch + column) * (pairs ? 2 : 4);
                if (pairs)
                    memcpy(to, part[i], (size_t)n * 2);
                for (int64_t c = 0; !pairs && c < n; c += V_LANES)
                    v_store(RAFTER_F32, to + c * 4, part_of_row(dtype, part[i], c, n - c));
            }
            for (int64_t c = 0; pairs && c < wide; c += V_LANES)
                v_store(RAFTER_F32, joined + (row / 2 * pitch + column + c) * 4,
                        c < n ? pair_rows(part[0] + c * 2, part[1] ? part[1] + c * 2 : NULL, n - c) : v_set(0.0f));
        }
}

static void few_pack(const struct lce_matrix *m, int64_t pitch, char *few, char *joined) {
    V_FOR_DTYPE(m->dtype, d, few_pack_as(d, m, pitch, few, joined));
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* V_LANES dot products at a time, of `group` of the few and V_LANES / group streamed rows, with the lanes along D. */
V_INLINE void few_dots(int dtype, int group, const struct lce_few *job, const char *const row[V_LANES], int64_t first,
                       float dots[V_LANES]) {
    const bool pairs = few_pairs(dtype);
    const int64_t depth = job->streamed.columns, step = pairs ? 2 * V_LANES : V_LANES;
    vf sum[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        sum[i] = v_set(0.0f);
    for (int64_t k = 0; k < depth; k += step) {
        vf streamed[V_LANES];
        for (int i = 0; i < V_LANES / group; i++)
            streamed[i] = pairs ? load_pairs(row[i] + k * 2, depth - k) : part_of_row(dtype, row[i], k, depth - k);
        for (int j = 0; j < group; j++) {
            const vf x = v_load(RAFTER_F32, job->few + ((first + j) * job->pitch + k) * (pairs ? 2 : 4));
            for (int i = 0; i < V_LANES / group; i++)
                sum[i * group + j] =
                    pairs ? add_pairs(sum[i * group + j], streamed[i], x) : v_fma(streamed[i], x, sum[i * group + j]);
        }
    }
    transpose(sum);
    vf all = sum[0];
    for (int i = 1; i < V_LANES; i++)
        all += sum[i];
    v_store(RAFTER_F32, dots, all);
}

V_INLINE void few_logits_as(int dtype, int group, const struct lce_few *job, int64_t from, int64_t to, float *out,
                            int64_t streamed_stride, int64_t few_stride) {
    const int64_t together = V_LANES / group;
    for (int64_t r = from; r < to; r += together) {
        const char *row[V_LANES];
        for (int64_t i = 0; i < together; i++)
            row[i] = streamed_row(dtype, job, min64(r + i, to - 1));
        for (int64_t n = 0; n < job->count; n += group) {
            float dots[V_LANES];
            few_dots(dtype, group, job, row, n, dots);
            for (int64_t i = 0; i < min64(together, to - r); i++)
                for (int64_t j = 0; j < min64(group, job->count - n); j++)
                    out[(r - from + i) * streamed_stride + (n + j) * few_stride] = dots[i * group + j];
        }
    }
}

static void few_logits(const struct lce_few *job, int64_t from, int64_t to, float *out, int64_t streamed_stride,
                       int64_t few_stride) {
#define FEW_LOGITS(group)                                                                                              \
    V_FOR_DTYPE(job->streamed.dtype, d, few_logits_as(d, group, job, from, to, out, streamed_stride, few_stride))
    if (job->count == 1) {
        FEW_LOGITS(1);
    } else if (job->count == 2) {
        FEW_LOGITS(2);
    } else {
        FEW_LOGITS(4);
    }
#undef FEW_LOGITS
}
_Static_assert(LCE_FEW_PADDED % 4 == 0, "the few are padded to whole groups");

/* ---- the gradient of the few ----------------------------------------------------------------- */

enum { FEW_SUMS = V_LANES == 16 ? 16 : 8 }; /* of one vector each, in registers; PAIRED_ROWS of pairs */
_Static_assert((int)PAIRED_ROWS <= (int)FEW_SUMS, "sums of pairs stay in registers too");

V_INLINE vf pair_at(const char *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (vf)((vi){0} + pair);
}

/* One vector of columns of `some` of the few, from n on. Those past job->count are not stored. Of pairs, all belong to
 * one panel of dz, so that their addresses differ by constants. */
V_INLINE void few_sum_of(int dtype, int some, const struct lce_few *job, const struct lce_few_block *b, int64_t n,
                         int64_t column) {
    const bool pairs = few_pairs(dtype);
    const struct lce_format f = pairs ? (struct lce_format)PAIR_FORMAT : (struct lce_format)F32_FORMAT;
    const int64_t left = job->streamed.columns - column, there = min64(some, job->count - n),
                  at = column * v_bytes(dtype);
    float *const to = b->sums + n * job->pitch + column;
    vf sum[FEW_SUMS];
    for (int i = 0; i < some; i++)
        sum[i] = b->accumulate && i < there ? v_load(RAFTER_F32, to + i * job->pitch) : v_set(0.0f);
    for (int64_t r = 0; pairs && r < b->rows; r += 2) {
        const char *const even = streamed_row(dtype, job, b->first_row + r);
        const char *const odd = r + 1 < b->rows ? streamed_row(dtype, job, b->first_row + r + 1) + at : NULL;
        const vf w = pair_rows(even + at, odd, left);
        const char *const dz = b->dz_by_few + lce_left_row(&f, n) + lce_left_k(&f, 1, r);
        for (int i = 0; i < some; i++)
            sum[i] = add_pairs(sum[i], pair_at(dz + i * LCE_UNIT_BYTES), w);
    }
    for (int64_t r = 0; !pairs && r < b->rows; r++) {
        const vf w = part_of_row(dtype, streamed_row(dtype, job, b->first_row + r), column, left);
        const float *const factor =
            (const float *)(const void *)(b->dz_by_streamed + lce_left_row(&f, r) + lce_left_k(&f, 1, n));
        for (int i = 0; i < some; i++)
            sum[i] = v_fma(v_set(factor[i]), w, sum[i]);
    }
    for (int i = 0; i < some; i++)
        if (i < there)
            v_store(RAFTER_F32, to + i * job->pitch, sum[i]);
}

V_INLINE void few_sum_as(int dtype, int some, const struct lce_few *job, const struct lce_few_block *b) {
    for (int64_t column = 0; column < job->streamed.columns; column += V_LANES)
        for (int64_t n = 0; n < job->count; n += some)
            few_sum_of(dtype, some, job, b, n, column);
}

static void few_sum(const struct lce_few *job, const struct lce_few_block *b) {
#define FEW_SUM(some) V_FOR_DTYPE(job->streamed.dtype, d, few_sum_as(d, some, job, b))
    if (job->count == 1) {
        FEW_SUM(1);
    } else if (job->count <= 4) {
        FEW_SUM(4);
    } else if (job->count <= 8) {
        FEW_SUM(8);
    } else {
        FEW_SUM(few_pairs(d) ? PAIRED_ROWS : FEW_SUMS);
    }
#undef FEW_SUM
}

/* ---- the gradient of the streamed rows ------------------------------------------------------- */

enum { SINGLE_ROWS = F32_ROWS, MOST_ROWS = 16 }; /* whose sums of one vector stay in registers; PAIRED_ROWS of pairs */

/* One vector of columns of as many rows of a panel, from row `first` on. */
V_INLINE void few_apply_to(int dtype, const struct lce_few *job, const char *dz, int64_t column, float *out) {
    const bool pairs = few_pairs(dtype);
    const struct lce_format f = pairs ? (struct lce_format)PAIR_FORMAT : (struct lce_format)F32_FORMAT;
    const int rows = pairs ? PAIRED_ROWS : SINGLE_ROWS, step = pairs ? 2 : 1;
    vf sum[MOST_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        sum[i] = v_set(0.0f);
    for (int64_t n = 0; n < job->count; n += step) {
        const vf x = v_load(RAFTER_F32, (pairs ? job->joined : job->few) + (n / step * job->pitch + column) * 4);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const vf g = pair_at(dz + i * LCE_UNIT_BYTES + lce_left_k(&f, 1, n));
            sum[i] = pairs ? add_pairs(sum[i], g, x) : v_fma(g, x, sum[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        v_store(RAFTER_F32, out + i * LCE_COLUMNS, sum[i]);
}

V_INLINE void few_apply_as(int dtype, const struct lce_few *job, const char *dz, int64_t rows, int64_t column,
                           int64_t columns, float *out) {
    const int64_t some = few_pairs(dtype) ? PAIRED_ROWS : SINGLE_ROWS;
    for (int64_t first = 0; first < rows; first += some)
        for (int64_t c = 0; c < columns; c += V_LANES)
            few_apply_to(dtype, job, dz + first * LCE_UNIT_BYTES, column + c, out + first * LCE_COLUMNS + c);
}

static void few_apply(const struct lce_few *job, const char *dz, int64_t rows, int64_t column, int64_t columns,
                      float *out) {
    V_FOR_DTYPE(job->streamed.dtype, d, few_apply_as(d, job, dz, rows, column, columns, out));
}

#endif
