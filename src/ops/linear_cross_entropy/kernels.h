/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU kernels of linear_cross_entropy, and the formats of matrices between them.
 *
 * The op consists of three products, with x [rows, D], W [classes, D] and the
 * gradient dz of the logits:
 *     logits   z^T [classes, rows] = W x^T         left W,    right x^T
 *     for dx   dx  [rows, D]       = dz W          left dz,   right W
 *     for dW   dW  [classes, D]    = dz^T x        left dz^T, right x
 * The logits are formed transposed. Then W, the largest operand, is a left one, which is packed by
 * copying rows; vectors run across rows of the batch, so that row statistics need no horizontal
 * sums; and dz^T is computed in the order in which it is stored.
 *
 * Formats of out[m, n] = left[m, k] right[k, n]. K is cut into blocks of
 * LCE_DEPTH_BYTES of one left row.
 *     left   [k block][m panel][k unit][row of the panel][LCE_UNIT_BYTES]: what a micro-tile reads is
 *            contiguous, and so is an AMX tile
 *     right  [k block][n panel][k][columns]; bf16 pairs: [k block][n panel][k / 2][columns][2], with
 *            NEON [k / 4][columns][4]
 *     out    fp32, [n block of LCE_COLUMNS][m][columns]
 * m is padded to whole micro-tiles (with anything), n to whole panels and k to whole
 * steps (with zeros).
 */
#ifndef RAFTER_LCE_KERNELS_H
#define RAFTER_LCE_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/context.h"
#include "core/sizes.h"

enum {
    LCE_DEPTH_BYTES = 1024,
    LCE_UNIT_BYTES = 64,
    LCE_ROWS = 192,    /* A task forms LCE_ROWS x LCE_COLUMNS of a product. Its working set fits into half a megabyte */
    LCE_COLUMNS = 256, /* of L2, and is reused often enough for L3's bandwidth not to matter. */
    LCE_CHUNK = 64     /* rows per packing task */
};

/* How an ISA level multiplies inputs of one dtype. */
struct lce_format {
    int64_t element; /* bytes: 2 for bf16 pairs, 4 if inputs are widened to fp32 */
    int64_t rows;    /* of a micro-tile and a left panel; divides LCE_ROWS */
    int64_t columns; /* of a micro-tile and a right panel; divides LCE_COLUMNS */
    int64_t step;    /* K is padded to a multiple of this */
};

static inline int64_t lce_depth(const struct lce_format *f) { /* of a K block, in elements */
    return LCE_DEPTH_BYTES / f->element;
}

static inline int64_t lce_left_bytes(const struct lce_format *f, int64_t m, int64_t k) {
    return round_up(k, lce_depth(f)) / lce_depth(f) * round_up(m, f->rows) * LCE_DEPTH_BYTES;
}

/* The offset of element k of a row is the sum of these two; [m, ...] is the operand. */
static inline int64_t lce_left_row(const struct lce_format *f, int64_t row) {
    const int64_t in_panel = row % f->rows;
    return (row - in_panel) * LCE_DEPTH_BYTES + in_panel * LCE_UNIT_BYTES;
}

static inline int64_t lce_left_k(const struct lce_format *f, int64_t m, int64_t k) {
    const int64_t block = k / lce_depth(f), bytes = k % lce_depth(f) * f->element;
    return block * round_up(m, f->rows) * LCE_DEPTH_BYTES + bytes / LCE_UNIT_BYTES * f->rows * LCE_UNIT_BYTES +
           bytes % LCE_UNIT_BYTES;
}

static inline int64_t lce_right_bytes(const struct lce_format *f, int64_t k, int64_t n) {
    return round_up(k, f->step) * round_up(n, f->columns) * f->element;
}

static inline int64_t lce_out_bytes(const struct lce_format *f, int64_t m, int64_t n) {
    return round_up(m, f->rows) * round_up(n, f->columns) * (int64_t)sizeof(float);
}

/* Floats between two rows of column block `column_block` of `out`, and the offset of its row
 * `row`. */
static inline int64_t lce_out_stride(const struct lce_format *f, int64_t n, int64_t column_block) {
    const int64_t columns = round_up(n, f->columns) - column_block * LCE_COLUMNS;
    return columns < LCE_COLUMNS ? columns : LCE_COLUMNS;
}

static inline int64_t lce_out_at(const struct lce_format *f, int64_t m, int64_t n, int64_t row, int64_t column_block) {
    return column_block * LCE_COLUMNS * round_up(m, f->rows) + row * lce_out_stride(f, n, column_block);
}

/* Rows of x or W to pack. */
struct lce_matrix {
    rafter_dtype dtype;
    int64_t rows, columns;
    const char *data;
    int64_t row_stride, column_stride; /* in elements */
    const char *const *row;            /* where each row begins, in place of data and row_stride; or NULL */
};

/* Where a row begins; `bytes` of an element. */
static inline const char *lce_row(const struct lce_matrix *m, int64_t row, int64_t bytes) {
    return m->row ? m->row[row] : m->data + row * m->row_stride * bytes;
}

struct lce_product {
    const char *left, *right;
    float *out;
    int64_t m, n, k;
    bool accumulate; /* adds to what `out` holds */
    const struct lce_matrix
        *unpacked; /* if left is NULL: its rows, which are packed panel by panel when they are used */
};

/* Statistics of rows over one block of LCE_ROWS classes: [class block][statistic][rows
 * padded to LCE_COLUMNS]. */
enum lce_stat {
    LCE_MAX,       /* of u */
    LCE_SUM,       /* of e^(u - max) */
    LCE_MOMENT,    /* of (u - max) e^(u - max) */
    LCE_LOGIT_SUM, /* of class weight * u */
    LCE_BEST,      /* the largest z, NaN if there is one */
    LCE_ARGMAX,    /* its first class, relative to the slice's first one: int32 bits */
    LCE_STATS
};

/*
 * Products with few rows or few classes, of which blocks of the formats above would be mostly empty. The other matrix,
 * W or x, is the streamed one: its rows are read in their place, without packing, once for the logits and once for both
 * gradients. The few are copied, rounded up to LCE_FEW_PADDED, with rows of `pitch` elements and zeros in all that is not
 * theirs: widened; or, if few_pairs, as bf16, and once more with two of them joined: [few / 2][pitch][2].
 */
struct lce_few {
    struct lce_matrix streamed; /* column stride 1 */
    const char *few, *joined;
    int64_t count, pitch; /* of the few; pitch in elements, whole vectors */
};

enum {
    LCE_FEW = 32, /* at most */
    LCE_FEW_PADDED = 4,
    LCE_FEW_VECTOR = 32 /* elements of the longest vector */
};

/* A block of streamed rows, and its dz as left operands: of whole panels, which may have anything in the rest. */
struct lce_few_block {
    int64_t first_row, rows;
    const char *dz_by_streamed, *dz_by_few; /* [streamed, few]; [few, streamed], only of pairs */
    float *sums;                            /* [few][pitch]: the gradient of the few */
    bool accumulate;                        /* adds to sums */
};

/* Converts a slice's products to logits u = scale * softcap(z + bias), in place in product.out, and
 * computes statistics. */
struct lce_logits {
    struct lce_product product; /* m classes, n rows. Without a left operand: `out` has the product already */
    const float *bias, *weight; /* of the slice's classes: zeros and ones if the caller has none */
    float scale, softcap;       /* softcap 0: none */
    const int64_t *label;       /* of the rows */
    int64_t first_class;        /* of the slice */
    float *stats;               /* NULL: only the logits */
    float *target;              /* with stats: u of each row's label, if it is in the slice */
    bool more;                  /* all statistics, not only the first two */
};

/* Converts a slice's logits to dz = softcap'(z) (p e^t (level + tilt * t) - spread * weight - target
 * [v == label]), t = u - pivot, with p, pivot, level, tilt, spread and target of each row; rounded to
 * the format of a left operand, in either orientation or both. */
struct lce_gradient {
    const float *u; /* format out, m classes x n rows */
    int64_t m, n;
    int64_t stride;      /* floats from class to class, if not that of the format: m and n are then one block; else 0 */
    const float *weight; /* of the slice's classes */
    float cap;           /* scale * softcap, the bound of |u|; 0: no softcap */
    const int64_t *label;
    int64_t first_class;
    const float *pivot, *p, *target, *spread;
    const float *level, *tilt; /* NULL: 1 and 0 */
    char *by_row;              /* left, [rows, classes]; NULL: not wanted */
    char *by_class;            /* left, [classes, rows] */
    float *sum;                /* [row block of LCE_COLUMNS][m]: sum of dz over the block's rows, before rounding */
};

struct linear_cross_entropy_kernels {
    struct lce_format format[3]; /* by dtype of the inputs */

    /* Packs rows [from, to). */
    void (*pack_left)(const struct lce_matrix *matrix, char *left, int64_t from, int64_t to);
    /* Packs the matrix itself, with rows as K: rows [from, to); `from` is a multiple of
     * LCE_CHUNK. */
    void (*pack_right)(const struct lce_matrix *matrix, char *right, int64_t from, int64_t to);
    /* Packs its transpose, with rows as columns of the operand: panels [from, to). */
    void (*pack_right_transposed)(const struct lce_matrix *matrix, char *right, int64_t from, int64_t to);

    /* One block of LCE_ROWS x LCE_COLUMNS. */
    void (*product)(rafter_dtype dtype, const struct lce_product *job, int64_t row_block, int64_t column_block);
    /* The same; then logits and statistics, while the block is in cache. */
    void (*logits)(rafter_dtype dtype, const struct lce_logits *job, int64_t row_block, int64_t column_block);
    void (*gradient)(rafter_dtype dtype, const struct lce_gradient *job, int64_t row_block, int64_t column_block);

    /* Logits of the few and the streamed rows [from, to), of which the first one's are out[0], out[few_stride], ... */
    void (*few_logits)(const struct lce_few *job, int64_t from, int64_t to, float *out, int64_t streamed_stride,
                       int64_t few_stride);
    /* The part of a block in the gradient of the few. */
    void (*few_sum)(const struct lce_few *job, const struct lce_few_block *block);
    /* Columns [column, column + columns), at most LCE_COLUMNS, of the gradient of a panel's streamed rows, from their dz:
     * out [row of the panel][LCE_COLUMNS]. */
    void (*few_apply)(const struct lce_few *job, const char *dz, int64_t rows, int64_t column, int64_t columns,
                      float *out);
    void (*few_pack)(const struct lce_matrix *matrix, int64_t pitch, char *few, char *joined);
    bool few_pairs; /* bf16 is multiplied as pairs, also with few rows or classes */

    /* Merges the statistics of all class blocks into those of the first, for one block of rows, in
     * the order of the classes. */
    void (*fold)(const struct lce_logits *job, int64_t column_block);

    /* destination[i] = scale * source[i] (+ destination[i]), n elements of `dtype`, `stride`
     * apart. */
    void (*store)(rafter_dtype dtype, const float *source, int64_t n, float scale, bool add, char *destination,
                  int64_t stride);

    /* destination[i] = source[i], n elements of `dtype`, `stride` apart. */
    void (*widen)(rafter_dtype dtype, const char *source, int64_t stride, int64_t n, float *destination);

    /* For the bench: runs the micro-kernel `iterations` times on panels that stay in L1. `scratch`
     * has LCE_PEAK_BYTES zero bytes. Returns the flops done. */
    double (*peak)(rafter_dtype dtype, int64_t iterations, char *scratch);
};

enum { LCE_PEAK_BYTES = 128 << 10 };

/* The kernels that a CPU context uses. */
const struct linear_cross_entropy_kernels *lce_kernels_of(const rafter_context *context);

#endif
