/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax statistics of columns: each line to reduce is a column, and neighbouring columns are
 * adjacent in memory. Vectors run across the columns, one lane per column. A lane's results depend
 * on its own column alone.
 */
#ifndef RAFTER_SIMD_COLUMNS_H
#define RAFTER_SIMD_COLUMNS_H

#include "core/sizes.h"
#include "simd/softmax.h"

enum {
    /* Columns are processed in units of two vectors: whole units as pairs (see v_load_pair), the
     * last few columns in the order of memory, in one vector or two. */
    V_UNIT = 2 * V_LANES,
    V_COLUMNS = 2048, /* the most columns per call */
    V_COLUMN_ROWS = 8 /* rows that are loaded at a time, for their maxima and then for their exponentials */
};

/* The first `count` lanes; all of them at the cost of a plain load or store. */
V_INLINE vf v_load_lanes(int dtype, const void *p, int64_t count, float fill) {
    return count == V_LANES ? v_load(dtype, p) : v_load_part(dtype, p, count, fill);
}

V_INLINE void v_store_lanes(int dtype, void *p, vf a, int64_t count) {
    if (count == V_LANES)
        v_store(dtype, p, a);
    else
        v_store_part(dtype, p, a, count);
}

/* v_pivot, lane by lane. */
V_INLINE vf v_pivots(vf max) {
    return v_select(max == v_set(-INFINITY), v_set(0.0f), max);
}

/* Reorders an array of one 32-bit value per column from the order of memory to that of units. */
V_INLINE void v_order_columns(int dtype, int64_t columns, void *values) {
    float *const at = values;
    for (int64_t c = 0; v_is_split(dtype) && c + V_UNIT <= columns; c += V_UNIT) {
        vf a = v_load(RAFTER_F32, at + c), b = v_load(RAFTER_F32, at + c + V_LANES);
        v_pair(dtype, &a, &b);
        v_store(RAFTER_F32, at + c, a);
        v_store(RAFTER_F32, at + c + V_LANES, b);
    }
}

/* The inverse. */
V_INLINE void v_restore_columns(int dtype, int64_t columns, void *values) {
    float *const at = values;
    for (int64_t c = 0; v_is_split(dtype) && c + V_UNIT <= columns; c += V_UNIT) {
        vf a = v_load(RAFTER_F32, at + c), b = v_load(RAFTER_F32, at + c + V_LANES);
        v_unpair(dtype, &a, &b);
        v_store(RAFTER_F32, at + c, a);
        v_store(RAFTER_F32, at + c + V_LANES, b);
    }
}

/* The running statistics of columns, in the order of units: a pivot, and a compensated sum. */
struct v_column_state {
    float *pivot, *sum, *lost;
    const int32_t *label; /* the row whose element goes to `target`; NULL: not wanted */
    float *target;        /* NULL if label is */
};

/* The state of one vector of columns. v_load_lines and v_store_lines: `count` of them, from column c on. */
struct v_lines {
    vf pivot;
    struct v_kahan sum;
};

V_INLINE struct v_lines v_load_lines(bool first, const struct v_column_state *s, int64_t c, int64_t count) {
    if (first)
        return (struct v_lines){v_set(-INFINITY), {v_set(0.0f), v_set(0.0f)}};
    return (struct v_lines){
        v_load_lanes(RAFTER_F32, s->pivot + c, count, -INFINITY),
        {v_load_lanes(RAFTER_F32, s->sum + c, count, 0.0f), v_load_lanes(RAFTER_F32, s->lost + c, count, 0.0f)}};
}

V_INLINE void v_store_lines(const struct v_column_state *s, int64_t c, int64_t count, const struct v_lines *l) {
    v_store_lanes(RAFTER_F32, s->pivot + c, l->pivot, count);
    v_store_lanes(RAFTER_F32, s->sum + c, l->sum.sum, count);
    v_store_lanes(RAFTER_F32, s->lost + c, l->sum.lost, count);
}

/* Raises pivots to the maximum where it exceeds them by more than 1, and rescales their sums: up to
 * 1, x - pivot is accurate enough. `first`: nothing has been added yet. */
V_INLINE struct v_base v_move_pivots(bool first, struct v_lines *l, vf max) {
    const vi moves = max > l->pivot + v_set(1.0f);
    if (first) {
        l->pivot = max;
    } else if (v_bits(moves)) {
        const vf before = l->pivot;
        l->pivot = v_select(moves, max, before);
        v_kahan_scale(&l->sum, v_select(moves, v_exp_from(before, v_pivots(l->pivot)), v_set(1.0f)));
    }
    return v_base_per_lane(v_pivots(l->pivot));
}

/* Adds terms. */
V_INLINE void v_add_terms(bool first, struct v_lines *l, vf terms) {
    if (first)
        l->sum.sum = terms;
    else
        v_kahan_add(&l->sum, terms);
}

/* Keeps the elements of row `row` as targets in the lanes whose label it is. */
V_INLINE void v_keep_target(const struct v_column_state *s, int64_t c, int64_t count, int64_t row, vf a) {
    const vi label = (vi)v_load_lanes(RAFTER_F32, s->label + c, count, 0.0f);
    const vf target = v_load_lanes(RAFTER_F32, s->target + c, count, 0.0f);
    v_store_lanes(RAFTER_F32, s->target + c, v_select(label == (int32_t)row, a, target), count);
}

/* The same for vector k of V_COLUMN_ROWS rows. With many rows, few units have a target among these. */
V_INLINE void v_keep_targets(const struct v_column_state *s, int64_t c, int64_t row, vf a[V_COLUMN_ROWS][2], int k) {
    const vi distance = (vi)v_load(RAFTER_F32, s->label + c) - (int32_t)row;
    if (!v_bits((vi)((vu)distance < V_COLUMN_ROWS)))
        return;
    vf target = v_load(RAFTER_F32, s->target + c);
    for (int r = 0; r < V_COLUMN_ROWS; r++)
        target = v_select(distance == r, a[r][k], target);
    v_store(RAFTER_F32, s->target + c, target);
}

/* Adds V_COLUMN_ROWS rows of a unit, from row `row` on. They are loaded once, into registers: rows
 * 64 KiB apart, as in images, evict each other from L1 before a second read. The maxima ignore NaN,
 * because v_max then returns its second operand. */
V_INLINE void v_fold_unit(int dtype, bool first, const char *x, int64_t pitch, int64_t row, int64_t c,
                          const struct v_column_state *s) {
    vf a[V_COLUMN_ROWS][2];
    for (int r = 0; r < V_COLUMN_ROWS; r++)
        v_load_pair(dtype, x + r * pitch, &a[r][0], &a[r][1]);
    /* Processors prefetch only within a page. */
    for (int r = V_COLUMN_ROWS; r < 2 * V_COLUMN_ROWS && pitch >= 1024; r++)
        for (int64_t byte = 0; byte < V_UNIT * v_bytes(dtype); byte += 64)
            __builtin_prefetch(x + r * pitch + byte);
    for (int k = 0; k < 2; k++) {
        const int64_t at = c + k * V_LANES;
        struct v_lines l = v_load_lines(first, s, at, V_LANES);
        vf max = l.pivot, even = v_set(0.0f), odd = even; /* two sums hide the latency of the adds */
        for (int r = 0; r < V_COLUMN_ROWS; r++)
            max = v_max(a[r][k], max);
        const struct v_base base = v_move_pivots(first, &l, max);
        for (int r = 0; r < V_COLUMN_ROWS; r += 2) {
            even = v_add_exp(even, a[r][k], &base, false);
            odd = v_add_exp(odd, a[r + 1][k], &base, false);
        }
        v_add_terms(first, &l, even + odd);
        v_store_lines(s, at, V_LANES, &l);
        if (s->label)
            v_keep_targets(s, at, row, a, k);
    }
}

V_INLINE void v_load_columns(int dtype, int vectors, const char *x, int64_t count, vf a[2]) {
    if (vectors == 2)
        v_load_pair(dtype, x, &a[0], &a[1]);
    else
        a[0] = v_load_lanes(dtype, x, count, -INFINITY);
}

/* Adds up to V_COLUMN_ROWS rows: with `vectors` 2, of a unit; with 1, of `count` columns in the order
 * of memory. */
V_INLINE void v_fold_some(int dtype, bool first, int vectors, const char *x, int64_t pitch, int64_t row, int64_t rows,
                          int64_t c, int64_t count, const struct v_column_state *s) {
    vf a[2], max[2], even[2] = {v_set(0.0f), v_set(0.0f)}, odd[2] = {v_set(0.0f), v_set(0.0f)};
    struct v_lines l[2];
    struct v_base base[2];
    for (int k = 0; k < 2; k++) {
        l[k] = v_load_lines(first, s, c + (k < vectors ? k : 0) * V_LANES, count);
        max[k] = l[k].pivot;
    }
    for (int64_t r = 0; r < rows; r++) {
        v_load_columns(dtype, vectors, x + r * pitch, count, a);
        for (int k = 0; k < vectors; k++) {
            max[k] = v_max(a[k], max[k]);
            if (s->label)
                v_keep_target(s, c + k * V_LANES, count, row + r, a[k]);
        }
    }
    for (int k = 0; k < 2; k++)
        base[k] = v_move_pivots(first, &l[k], max[k]);
    for (int64_t r = 0; r < rows; r += 2) { /* added in the order of v_fold_unit */
        v_load_columns(dtype, vectors, x + r * pitch, count, a);
        for (int k = 0; k < vectors; k++)
            even[k] = v_add_exp(even[k], a[k], &base[k], false);
        if (r + 1 == rows)
            break;
        v_load_columns(dtype, vectors, x + (r + 1) * pitch, count, a);
        for (int k = 0; k < vectors; k++)
            odd[k] = v_add_exp(odd[k], a[k], &base[k], false);
    }
    for (int k = 0; k < vectors; k++) {
        v_add_terms(first, &l[k], even[k] + odd[k]);
        v_store_lines(s, c + k * V_LANES, count, &l[k]);
    }
}

V_INLINE bool v_column_has_nan(int dtype, const char *x, int64_t pitch, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        const float a = v_get(dtype, x + r * pitch);
        if (a != a)
            return true;
    }
    return false;
}

/* Adds up to V_COLUMN_ROWS rows of all columns. */
V_INLINE void v_fold_rows(int dtype, bool first, const char *x, int64_t pitch, int64_t row, int64_t rows,
                          int64_t columns, const struct v_column_state *s) {
    const int64_t bytes = v_bytes(dtype), whole = columns / V_UNIT * V_UNIT;
    int64_t c = 0;
    if (rows == V_COLUMN_ROWS)
        for (; c < whole; c += V_UNIT)
            v_fold_unit(dtype, first, x + c * bytes, pitch, row, c, s);
    for (; c < whole; c += V_UNIT)
        v_fold_some(dtype, first, 2, x + c * bytes, pitch, row, rows, c, V_LANES, s);
    for (; c < columns; c += V_LANES)
        v_fold_some(dtype, first, 1, x + c * bytes, pitch, row, rows, c, min64(columns - c, V_LANES), s);
}

/* Computes a pivot and the sum of e^(x - pivot) of every column. The pivot is the maximum or up to 1
 * less; if the maximum is infinite, it is the maximum. A column that holds +inf has the sum 1; a
 * column that holds NaN has the sum NaN, whatever the pivot. `pitch`: bytes from row to row. With
 * labels (in the order of units), target[c] becomes the element of column c in row label[c], or 0 if
 * there is no such row; otherwise pass NULL for both. */
V_INLINE void v_column_statistics(int dtype, const char *x, int64_t pitch, int64_t columns, int64_t rows,
                                  const int32_t *label, float *target, float *pivots, float *sums) {
    float lost[V_COLUMNS];
    const struct v_column_state s = {pivots, sums, lost, label, target};
    for (int64_t c = 0; target && c < columns; c++)
        target[c] = 0.0f;
    for (int64_t c = 0; rows == 0 && c < columns; c++) {
        pivots[c] = -INFINITY;
        sums[c] = 0.0f;
    }
    for (int64_t row = 0; row < rows; row += V_COLUMN_ROWS) {
        const int64_t some = min64(rows - row, V_COLUMN_ROWS);
        if (row == 0)
            v_fold_rows(dtype, true, x, pitch, row, some, columns, &s);
        else
            v_fold_rows(dtype, false, x + row * pitch, pitch, row, some, columns, &s);
    }
    v_restore_columns(dtype, columns, pivots);
    v_restore_columns(dtype, columns, sums);
    if (target)
        v_restore_columns(dtype, columns, target);
    unsigned infinite = 0;
    for (int64_t c = 0; c < columns; c += V_LANES) { /* if all x are -inf, the sum holds only terms of 2^-125, or NaN */
        const int64_t count = min64(columns - c, V_LANES);
        const vf pivot = v_load_lanes(RAFTER_F32, pivots + c, count, 0.0f);
        const vf sum = v_load_lanes(RAFTER_F32, sums + c, count, 0.0f);
        const vf none = v_select(pivot == v_set(-INFINITY), v_set(0.0f) * sum, sum);
        v_store_lanes(RAFTER_F32, sums + c, none, count);
        infinite |= v_bits(pivot == v_set(INFINITY));
    }
    for (int64_t c = 0; infinite && c < columns; c++)
        if (pivots[c] == INFINITY)
            sums[c] = v_column_has_nan(dtype, x + c * v_bytes(dtype), pitch, rows) ? NAN : 1.0f;
}

/* ---- a few columns as many ------------------------------------------------------------------- */

/* Fewer columns than a unit leave lanes empty. If rows follow one another in memory without gaps,
 * `side` of them can be treated as one row of `side` times as many columns. The statistics of
 * columns that belong together are merged afterwards. */
enum { V_WIDE = V_UNIT * V_UNIT }; /* such a row has fewer columns than this */

/* `side`, a power of two; 1 if there are too many columns or too few rows. */
V_INLINE int64_t v_side_by_side(int64_t columns, int64_t rows) {
    const int64_t side = columns < 8 ? V_UNIT : V_LANES;
    return columns < V_UNIT && rows >= 2 * side ? side : 1;
}

/* Merges statistics of n columns with those of the next n. */
V_INLINE void v_merge_columns(float *pivots, float *sums, int64_t n) {
    for (int64_t c = 0; c < n; c += V_LANES) {
        const int64_t count = min64(n - c, V_LANES);
        vf pivot[2], sum[2], total = v_set(0.0f);
        for (int k = 0; k < 2; k++) {
            pivot[k] = v_load_lanes(RAFTER_F32, pivots + k * n + c, count, 0.0f);
            sum[k] = v_load_lanes(RAFTER_F32, sums + k * n + c, count, 0.0f);
        }
        const vf top = v_max(pivot[0], pivot[1]);
        for (int k = 0; k < 2; k++) /* no factor for equal pivots: infinite ones would give inf - inf */
            total += v_select(pivot[k] == top, sum[k], sum[k] * v_exp_from(pivot[k], top));
        v_store_part(RAFTER_F32, pivots + c, top, count);
        v_store_part(RAFTER_F32, sums + c, total, count);
    }
}

#endif
