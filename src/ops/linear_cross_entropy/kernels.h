/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_cross_entropy's kernels, and the formats that matrices take between them.
 *
 * Three products make up the op, with x [rows, D], W [classes, D] and the gradient dz of the logits:
 *     logits   z^T [classes, rows] = W x^T         left W,    right x^T
 *     for dx   dx  [rows, D]       = dz W          left dz,   right W
 *     for dW   dW  [classes, D]    = dz^T x        left dz^T, right x
 * The logits are formed transposed: then W, the largest operand, is a left one, which packs by copying rows; a vector
 * runs across rows of the batch, so that row statistics need no horizontal sums; and dz^T leaves the softmax in the
 * order it is stored in.
 *
 * Formats of out[m, n] = left[m, k] right[k, n]. K is cut into blocks that take LCE_DEPTH_BYTES of one left row.
 *     left   [k block][m][LCE_DEPTH_BYTES]: rows of K, at a stride that is a constant of the micro-kernels
 *     right  [k block][n panel][k][columns], and of bf16 pairs [k block][n panel][k / 2][columns][2]
 *     out    fp32, [n block of LCE_COLUMNS][m][columns]
 * m is padded to whole micro-tiles (with anything), n to whole panels and k to whole steps (with zeros).
 */
#ifndef RAFTER_LCE_KERNELS_H
#define RAFTER_LCE_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/context.h"

enum {
    LCE_DEPTH_BYTES = 1024,
    LCE_ROWS = 192,    /* a task forms LCE_ROWS x LCE_COLUMNS of a product: what it reads and writes at a time fits */
    LCE_COLUMNS = 256, /* into half a megabyte of L2, and is used often enough for L3's bandwidth not to matter */
    LCE_CHUNK = 64     /* rows that a packing task takes */
};

/* How a level multiplies inputs of one dtype. */
struct lce_format {
    int64_t element; /* bytes: 2 for bf16 pairs, 4 where inputs are widened to fp32 */
    int64_t rows;    /* of a micro-tile; divides LCE_ROWS */
    int64_t columns; /* of a micro-tile and a right panel; divides LCE_COLUMNS */
    int64_t step;    /* K is padded to a multiple of this */
};

static inline int64_t lce_round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

static inline int64_t lce_depth(const struct lce_format *f) { /* of a K block, in elements */
    return LCE_DEPTH_BYTES / f->element;
}

static inline int64_t lce_left_bytes(const struct lce_format *f, int64_t m, int64_t k) {
    return lce_round_up(k, lce_depth(f)) / lce_depth(f) * lce_round_up(m, f->rows) * LCE_DEPTH_BYTES;
}

static inline int64_t lce_right_bytes(const struct lce_format *f, int64_t k, int64_t n) {
    return lce_round_up(k, f->step) * lce_round_up(n, f->columns) * f->element;
}

static inline int64_t lce_out_bytes(const struct lce_format *f, int64_t m, int64_t n) {
    return lce_round_up(m, f->rows) * lce_round_up(n, f->columns) * (int64_t)sizeof(float);
}

/* Floats between two rows of out's block `column_block`, and where row `row` of it begins. */
static inline int64_t lce_out_stride(const struct lce_format *f, int64_t n, int64_t column_block) {
    const int64_t columns = lce_round_up(n, f->columns) - column_block * LCE_COLUMNS;
    return columns < LCE_COLUMNS ? columns : LCE_COLUMNS;
}

static inline int64_t lce_out_at(const struct lce_format *f, int64_t m, int64_t n, int64_t row, int64_t column_block) {
    return column_block * LCE_COLUMNS * lce_round_up(m, f->rows) + row * lce_out_stride(f, n, column_block);
}

static inline int64_t lce_blocks(int64_t n, int64_t block) {
    return (n + block - 1) / block;
}

/* Rows of x or W to pack. */
struct lce_matrix {
    rafter_dtype dtype;
    int64_t rows, columns;
    const char *data;
    int64_t row_stride, column_stride; /* in elements */
    const char *const *row;            /* where each row begins, instead of data and row_stride; NULL: not used */
};

struct lce_product {
    const char *left, *right;
    float *out;
    int64_t m, n, k;
    bool accumulate; /* add to what out holds */
};

/* Statistics of the rows over one block of LCE_ROWS classes: [class block][statistic][rows padded to LCE_COLUMNS]. */
enum lce_stat {
    LCE_MAX,      /* of u */
    LCE_SUM,      /* of e^(u - max) */
    LCE_MOMENT,   /* of (u - max) e^(u - max) */
    LCE_WEIGHTED, /* of class weight * u */
    LCE_BEST,     /* the largest z, NaN if there is one */
    LCE_ARGMAX,   /* its first class, counted from the slice's first: int32 bits */
    LCE_STATS
};

/* From a slice's products to its logits u = scale * softcap(z + bias), in place in product.out, and statistics. */
struct lce_logits {
    struct lce_product product; /* m classes, n rows */
    const float *bias, *weight; /* of the slice's classes: zeros and ones where the caller has none */
    float scale, softcap;       /* softcap 0: none */
    const int64_t *label;       /* of the rows */
    int64_t first_class;        /* of the slice */
    float *stats;               /* NULL: only the logits */
    float *target;              /* with stats: u of each row's label, where the slice holds it */
    bool more;                  /* all statistics, not only the first two */
};

/* From a slice's logits to dz = softcap'(z) (p e^(u - pivot) - spread * weight - target [v == label]), p, pivot, spread
 * and target being each row's: rounded to the format of a left operand, in either orientation or both. */
struct lce_gradient {
    const float *u; /* format out, m classes x n rows */
    int64_t m, n;
    const float *weight; /* of the slice's classes */
    float cap;           /* scale * softcap: |u| stays under it; 0: no softcap */
    const int64_t *label;
    int64_t first_class;
    const float *pivot, *p, *target, *spread;
    char *by_row;   /* left, [rows, classes]; NULL: not wanted */
    char *by_class; /* left, [classes, rows] */
    float *sum;     /* [row block of LCE_COLUMNS][m]: sum of dz over the block's rows, before rounding */
};

struct lce_kernels {
    struct lce_format format[3]; /* by dtype of the inputs */

    /* Packs rows [from, to). */
    void (*pack_left)(const struct lce_matrix *matrix, char *left, int64_t from, int64_t to);
    /* Packs the matrix as it lies, rows being K: rows [from, to), from a multiple of LCE_CHUNK. */
    void (*pack_right)(const struct lce_matrix *matrix, char *right, int64_t from, int64_t to);
    /* Packs its transpose, rows being columns of the operand: panels [from, to). */
    void (*pack_right_transposed)(const struct lce_matrix *matrix, char *right, int64_t from, int64_t to);

    /* One LCE_ROWS x LCE_COLUMNS block. */
    void (*product)(rafter_dtype dtype, const struct lce_product *job, int64_t row_block, int64_t column_block);
    /* The same and, while it is in cache, logits and statistics. */
    void (*logits)(rafter_dtype dtype, const struct lce_logits *job, int64_t row_block, int64_t column_block);
    void (*gradient)(rafter_dtype dtype, const struct lce_gradient *job, int64_t row_block, int64_t column_block);

    /* Folds the statistics of all class blocks into the first's, for one block of rows, in the classes' order. */
    void (*fold)(const struct lce_logits *job, int64_t column_block);

    /* destination[i] = scale * source[i] (+ destination[i]), n elements of `dtype`, `stride` apart. */
    void (*store)(rafter_dtype dtype, const float *source, int64_t n, float scale, bool add, char *destination,
                  int64_t stride);

    /* destination[i] = source[i], n elements of `dtype`, `stride` apart. */
    void (*widen)(rafter_dtype dtype, const char *source, int64_t stride, int64_t n, float *destination);

    /* Runs the micro-kernel `iterations` times on panels that stay in L1; scratch has LCE_PEAK_BYTES zero bytes.
     * Returns the flops done. */
    double (*peak)(rafter_dtype dtype, int64_t iterations, char *scratch);
};

enum { LCE_PEAK_BYTES = 128 << 10 };

/* The most that the matrix products can reach: every thread of the context runs the micro-kernel `iterations` times on
 * panels that stay in L1. Returns the flops done, for the caller to time; 0 if there is no memory. For the bench. */
double rafter_lce_peak_flops(rafter_context *context, rafter_dtype dtype, int64_t iterations);

#endif
