/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: the operands of linear_cross_entropy's products, in the formats of kernels.h. Included by cpu.c only. */
#ifndef RAFTER_LCE_CPU_PACK_H
#define RAFTER_LCE_CPU_PACK_H

#include "core/sizes.h"
#include "ops/linear_cross_entropy/micro.h"

/* Whether inputs of this dtype are multiplied as bf16 pairs. If not, packing widens them to
 * fp32. */
V_INLINE bool is_pairs(int dtype) {
    return LCE_PAIRS && dtype == RAFTER_BF16;
}

V_INLINE struct lce_format format_of(bool pairs) {
    return pairs ? (struct lce_format)PAIR_FORMAT : (struct lce_format)F32_FORMAT;
}

/* Columns [column, column + n) of a row, gathered into the buffer if they are not contiguous. */
V_INLINE const char *row_part(int dtype, const struct lce_matrix *m, int64_t row, int64_t column, int64_t n,
                              char *buffer) {
    const char *p = lce_row(m, row, v_bytes(dtype));
    return v_gather(dtype, p + column * m->column_stride * v_bytes(dtype), m->column_stride, n, buffer);
}

/* The part of a row in one K block, as a row of a left operand: widened unless pairs are used, with
 * zeros up to `padded`. Units are `stride` bytes apart. */
V_INLINE void pack_row(int dtype, const struct lce_matrix *m, int64_t row, int64_t column, int64_t n, int64_t padded,
                       char *out, int64_t stride) {
    enum { UNIT = LCE_UNIT_BYTES };
    char buffer[LCE_DEPTH_BYTES];
    const char *in = row_part(dtype, m, row, column, n, buffer);
    if (is_pairs(dtype) || dtype == RAFTER_F32) {
        const int64_t bytes = n * v_bytes(dtype), end = padded * v_bytes(dtype);
        int64_t at = 0;
        for (; at + UNIT <= bytes; at += UNIT, out += stride)
            memcpy(out, in + at, UNIT);
        if (at < bytes)
            memcpy(out, in + at, (size_t)(bytes - at));
        if (bytes < end) /* within this unit */
            memset(out + bytes - at, 0, (size_t)(end - bytes));
        return;
    }
    for (int64_t i = 0; i < n; i += V_LANES) {
        const char *p = in + i * v_bytes(dtype);
        v_store(RAFTER_F32, out + i * 4 / UNIT * stride + i * 4 % UNIT,
                i + V_LANES <= n ? v_load(dtype, p) : v_load_part(dtype, p, n - i, 0.0f));
    }
}

V_INLINE void pack_left_as(int dtype, const struct lce_matrix *m, char *left, int64_t from, int64_t to) {
    const struct lce_format f = format_of(is_pairs(dtype));
    const int64_t depth = lce_depth(&f), rows = round_up(m->rows, f.rows),
                  unit = depth * LCE_UNIT_BYTES / LCE_DEPTH_BYTES;
    for (int64_t row = from; row < to; row++)
        for (int64_t k = 0; k < m->columns; k += depth) {
            const int64_t n = min64(depth, m->columns - k);
            pack_row(dtype, m, row, k, n, round_up(n, f.step),
                     left + lce_left_row(&f, row) + lce_left_k(&f, m->rows, k), f.rows * LCE_UNIT_BYTES);
        }
    for (int64_t row = to; to == m->rows && row < rows; row++)
        for (int64_t k = 0; k < m->columns; k += unit)
            memset(left + lce_left_row(&f, row) + lce_left_k(&f, m->rows, k), 0, LCE_UNIT_BYTES);
}

static void pack_left(const struct lce_matrix *m, char *left, int64_t from, int64_t to) {
    V_FOR_DTYPE(m->dtype, d, pack_left_as(d, m, left, from, to));
}

/* The panel of a left operand from row `first` on, n elements from column k on, which are in one K block. */
V_INLINE void pack_panel_as(int dtype, const struct lce_matrix *m, int64_t first, int64_t k, int64_t n, char *panel) {
    const struct lce_format f = format_of(is_pairs(dtype));
    const int64_t units = ceil_div(n * f.element, LCE_UNIT_BYTES), inside = min64(n, m->columns - k);
    for (int64_t i = 0; i < f.rows; i++) {
        char *const to = panel + i * LCE_UNIT_BYTES;
        if (first + i < m->rows && inside > 0)
            pack_row(dtype, m, first + i, k, inside, n, to, f.rows * LCE_UNIT_BYTES);
        for (int64_t u = 0; first + i >= m->rows && u < units; u++)
            memset(to + u * f.rows * LCE_UNIT_BYTES, 0, LCE_UNIT_BYTES);
    }
}

static void pack_panel(const struct lce_matrix *m, int64_t first, int64_t k, int64_t n, char *panel) {
    V_FOR_DTYPE(m->dtype, d, pack_panel_as(d, m, first, k, n, panel));
}

/* Panels packed at a time: enough to read whole cache lines of the source, and few enough that the
 * lines written fall into different sets of L1. */
enum { PANELS = 4 };

/* One vector of a row (with pairs: of two rows) of a right panel: n elements, then zeros. NULL
 * stands for a row of zeros. */
V_INLINE vf right_vector(int dtype, const char *even, const char *odd, int64_t n) {
    if (n <= 0 || !even)
        return v_set(0.0f);
    if (is_pairs(dtype))
        return join_pairs(load_halves(even, n), load_halves(odd, n));
    return v_load_part(dtype, even, n, 0.0f);
}

V_INLINE void pack_right_as(int dtype, const struct lce_matrix *m, char *right, int64_t from, int64_t to) {
    const struct lce_format f = format_of(is_pairs(dtype));
    const int64_t depth = lce_depth(&f), k_padded = round_up(m->rows, f.step), bytes = v_bytes(dtype);
    const int64_t panels = ceil_div(m->columns, f.columns), block = from / depth * depth;
    const int64_t panel_bytes = min64(depth, k_padded - block) * f.columns * f.element;
    char *const base = right + block * panels * f.columns * f.element;
    char buffer[2][PANELS * F32_COLUMNS * 4];
    if (to == m->rows)
        to = k_padded;
    for (int64_t j = 0; j < panels; j += PANELS) {
        const int64_t column = j * f.columns, n = min64(PANELS * f.columns, m->columns - column);
        for (int64_t k = from; k < to; k += is_pairs(dtype) ? 2 : 1) {
            const char *even = k < m->rows ? row_part(dtype, m, k, column, n, buffer[0]) : NULL;
            const char *odd =
                is_pairs(dtype) && k + 1 < m->rows ? row_part(dtype, m, k + 1, column, n, buffer[1]) : NULL;
            char *out = base + j * panel_bytes + (k - block) * f.columns * f.element;
            for (int64_t i = 0; i < n; i += f.columns, out += panel_bytes)
                for (int64_t c = 0; c < f.columns; c += V_LANES) {
                    const int64_t at = (i + c) * bytes;
                    v_store(
                        RAFTER_F32, out + c * 4,
                        right_vector(dtype, even ? even + at : NULL, odd ? odd + at : NULL, min64(V_LANES, n - i - c)));
                }
        }
        for (int64_t i = 0; is_pairs(dtype) && i < n; i += f.columns)
            order_right(base + (j + i / f.columns) * panel_bytes + (from - block) * f.columns * f.element, to - from);
    }
}

static void pack_right(const struct lce_matrix *m, char *right, int64_t from, int64_t to) {
    V_FOR_DTYPE(m->dtype, d, pack_right_as(d, m, right, from, to));
}

V_INLINE void pack_right_transposed_as(int dtype, const struct lce_matrix *m, char *right, int64_t from, int64_t to) {
    const struct lce_format f = format_of(is_pairs(dtype));
    const int64_t depth = lce_depth(&f), k_padded = round_up(m->columns, f.step);
    const int64_t columns = round_up(m->rows, f.columns), row_bytes = f.columns * 4;
    char *const stage = rafter_kernel_memory();
    _Static_assert(V_LANES * LCE_DEPTH_BYTES <= RAFTER_KERNEL_BYTES, "raise RAFTER_KERNEL_BYTES");
    for (int64_t k = 0; k < m->columns; k += depth) {
        const int64_t in_block = min64(depth, k_padded - k), n = min64(depth, m->columns - k);
        const int64_t units = in_block * f.element / 4; /* fp32 numbers or bf16 pairs: 4 bytes each */
        for (int64_t c = from * f.columns; c < to * f.columns; c += V_LANES) {
            for (int64_t i = 0; i < V_LANES; i++)
                if (c + i < m->rows)
                    pack_row(dtype, m, c + i, k, n, in_block, stage + i * LCE_DEPTH_BYTES, LCE_UNIT_BYTES);
                else
                    memset(stage + i * LCE_DEPTH_BYTES, 0, LCE_DEPTH_BYTES);
            char *out = right + (k * columns + c / f.columns * f.columns * in_block) * f.element + c % f.columns * 4;
            for (int64_t u = 0; u < units; u += V_LANES) {
                vf row[V_LANES];
                for (int i = 0; i < V_LANES; i++)
                    row[i] = v_load(RAFTER_F32, stage + i * LCE_DEPTH_BYTES + u * 4);
                transpose(row);
                if (u + V_LANES <= units)
                    for (int i = 0; i < V_LANES; i++)
                        v_store(RAFTER_F32, out + (u + i) * row_bytes, row[i]);
                else
                    for (int i = 0; u + i < units; i++)
                        v_store(RAFTER_F32, out + (u + i) * row_bytes, row[i]);
            }
            if (is_pairs(dtype) && (c + V_LANES) % f.columns == 0) /* the panel is complete */
                order_right(right + (k * columns + c / f.columns * f.columns * in_block) * f.element, in_block);
        }
    }
}

static void pack_right_transposed(const struct lce_matrix *m, char *right, int64_t from, int64_t to) {
    V_FOR_DTYPE(m->dtype, d, pack_right_transposed_as(d, m, right, from, to));
}

#endif
