/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a call is cut on the CPU: rows into groups, classes into slices, and what the workspace
 * holds. Plans follow from shapes, wanted results and the budget alone, never from data or threads.
 *
 * A step takes one group and one slice. It forms their logits and from these either statistics of
 * the rows or the gradient dz; and from dz a part of the group's dx (a sum over classes) and of the
 * slice's dW (a sum over rows).
 *
 * fast      for each group: statistics from all slices, whose logits are stored; then the
 * gradients from all slices.
 *           dx of a group is complete at the end of the group. dW is summed from group to group.
 * compact   for each slice, all groups: statistics. Then again for each slice, all groups: logits,
 * gradients. dW of a
 *           slice is complete at the end of the slice. dx is summed from slice to slice.
 *
 * A gradient that is summed over several steps is kept in the workspace, all of it in fp32; or, if
 * the caller's tensor is fp32 or accumulate is native, in the caller's tensor. If the budget has no
 * space for such sums of dx, compact forms the logits once more (`split`): for dW as above, and
 * then group by group for dx.
 *
 * few       of rows or of classes, for one group and one slice: a fast plan whose products read the other matrix in its
 * place (struct lce_few). Parts of it are taken at a time, whose sums of the gradient of the few are merged in the end.
 *
 * If the classes are spread over ranks, the statistics of all rows are exchanged at once: ranks may
 * cut their shards otherwise than one another, but exchange equally often. fast then has one group.
 * Slices are cut within tiles of LCE_TILE classes, at multiples of LCE_ROWS if the budget allows, and the
 * statistics of a tile are merged block by block. So they do not depend on the plan, and those of tiles
 * are merged as a tree (loss_group.h): bits do not depend on which rank has a tile.
 */
#ifndef RAFTER_LCE_CPU_PLAN_H
#define RAFTER_LCE_CPU_PLAN_H

#include "ops/linear_cross_entropy/kernels.h"
#include "ops/loss.h"

struct lce_problem {
    struct lce_format format;
    int64_t rows, classes, depth; /* N, V, D */
    bool stats;                   /* to be computed, not given by the caller's lse */
    bool dentropy;                /* given */
    bool dx, dweight, dbias;      /* wanted */
    bool sums_dx, sums_dweight;   /* partial sums must be in the workspace, not in the caller's tensor */
    int64_t exchange;             /* bytes; classes are spread over ranks, whose number is `ranks` */
    int ranks;                    /* 0: they are not */
    bool streams_w, streams_x;    /* rows of W, of x, are contiguous: products may read them in their place */
    bool invariant;               /* batch invariant: the slices, between which dx is rounded, follow from V alone */
};

/* The buffers of the workspace. Arrays over rows cover all rows that are not ignored, in
 * their order, and can be read LCE_COLUMNS elements past the end. Operands and products
 * are as in kernels.h. */
#define LCE_BUFFERS(X)                                                                                                 \
    X(int64_t, row)        /* its index among all rows */                                                              \
    X(const char *, x_row) /* where it begins in x */                                                                  \
    X(int64_t, label)                                                                                                  \
    X(struct rafter_row_stats, stats) /* so far */                                                                     \
    X(float, target_logit)                                                                                             \
    X(float, pivot) /* coefficients of the row's gradient: see struct lce_gradient */                                  \
    X(float, p)                                                                                                        \
    X(float, target)                                                                                                   \
    X(float, spread)                                                                                                   \
    X(float, level) /* only with dentropy */                                                                           \
    X(float, tilt)                                                                                                     \
    X(float, bias) /* of the slice's classes */                                                                        \
    X(float, weight)                                                                                                   \
    X(char, x_logits) /* the group's rows of x as operands */                                                          \
    X(char, x_dweight)                                                                                                 \
    X(char, w_logits) /* the slice's rows of W as operands; see lce_packs_w */                                         \
    X(char, w_dx)                                                                                                      \
    X(float, logits) /* of the group and slice; fast stores those of all slices */                                     \
    X(float, block_stats)                                                                                              \
    X(int64_t, blocks_done) /* of classes, for each block of rows */                                                   \
    X(char, dz_by_row)                                                                                                 \
    X(char, dz_by_class)                                                                                               \
    X(float, dx)      /* of the group, or of all groups */                                                             \
    X(float, dweight) /* of the slice, or of all slices */                                                             \
    X(char, few)      /* the few rows or classes: see struct lce_few */                                                \
    X(char, few_joined)                                                                                                \
    X(char, few_dz)                    /* of a block, for each part */                                                 \
    X(float, few_sums)                 /* of the gradient of the few, of each part */                                  \
    X(float, block_dbias)              /* of the slice, by blocks of rows */                                           \
    X(float, dbias)                    /* of all classes */                                                            \
    X(double, rank_prefix)             /* only if classes are spread over ranks: see rafter_loss_agree */              \
    X(double, tile_prefix)             /* the same before each tile of this rank */                                    \
    X(struct rafter_row_record, tiles) /* of each row, tile by tile */                                                 \
    X(char, exchange)                  /* see rafter_loss_exchange_bytes */                                            \
    X(float, dx_sum)   /* of all rows, ignored ones too, [rows, D]: before and after the sum over ranks */             \
    X(float, dx_share) /* this rank's share of it */

/* Offsets in bytes; -1: the plan needs no such buffer. */
struct lce_layout {
#define X(type, name) int64_t name;
    LCE_BUFFERS(X)
#undef X
};

enum lce_few_of { LCE_NOT_FEW, LCE_FEW_ROWS, LCE_FEW_CLASSES };

struct lce_plan {
    bool fast;
    bool split;
    enum lce_few_of few;
    int64_t group, slice; /* rows, classes of a step */
    struct lce_layout layout;
    size_t bytes; /* of the workspace */
};

/* The plan for few rows or classes, with the format of fp32 inputs; false: the call has many, or it does not fit. */
bool lce_make_few_plan(const struct lce_problem *problem, rafter_lce_mode mode, size_t budget, struct lce_plan *plan);

/* The plan with the least overhead within `budget` bytes (0: see docs/linear_cross_entropy.md). If
 * there is none, the plan that takes the least bytes. */
void lce_make_plan(const struct lce_problem *problem, rafter_lce_mode mode, size_t budget, struct lce_plan *plan);

/* Blocks of LCE_ROWS rows of a left operand that stay in the last-level cache while blocks of columns
 * of the right one pass by, of `blocks` in all: these are cut evenly. */
enum { LCE_CACHED_BYTES = 16 << 20 };

static inline int64_t lce_blocks_in_cache(const struct lce_format *f, int64_t k, int64_t blocks) {
    const int64_t fit = max64(1, LCE_CACHED_BYTES / (LCE_ROWS * max64(1, k) * f->element));
    return ceil_div(max64(1, blocks), ceil_div(max64(1, blocks), fit));
}

/* The order in which tasks form the blocks of a product. Blocks of rows that stay in the cache
 * together are taken together, for all columns; among these, consecutive tasks share columns. */
struct lce_block {
    int64_t row, column;
};

static inline int64_t lce_blocks(int64_t m, int64_t n) {
    return ceil_div(m, LCE_ROWS) * ceil_div(n, LCE_COLUMNS);
}

static inline struct lce_block lce_block_of(const struct lce_format *f, const struct lce_product *job, int64_t task) {
    const int64_t rows = ceil_div(job->m, LCE_ROWS), columns = ceil_div(job->n, LCE_COLUMNS);
    const int64_t together = lce_blocks_in_cache(f, job->k, rows), first = task / (together * columns) * together;
    const int64_t here = min64(together, rows - first), in = task - first * columns;
    return (struct lce_block){first + in % here, in / here};
}

/* The streamed rows are cut into blocks of whole panels and vectors (at every level) that do not cross blocks of
 * LCE_COLUMNS, and the blocks into parts. */
enum { LCE_FEW_BLOCK = 48, LCE_FEW_BLOCKS = (LCE_COLUMNS + LCE_FEW_BLOCK - 1) / LCE_FEW_BLOCK, LCE_FEW_PARTS = 32 };

static inline int64_t lce_few_blocks(int64_t streamed) {
    return streamed / LCE_COLUMNS * LCE_FEW_BLOCKS + ceil_div(streamed % LCE_COLUMNS, LCE_FEW_BLOCK);
}
static inline int64_t lce_few_begins(int64_t block) { /* the first row of a block */
    return block / LCE_FEW_BLOCKS * LCE_COLUMNS + block % LCE_FEW_BLOCKS * LCE_FEW_BLOCK;
}
static inline int64_t lce_few_part(int64_t streamed) { /* blocks of a part */
    return max64(1, ceil_div(lce_few_blocks(streamed), LCE_FEW_PARTS));
}
/* dz of a block in both orientations. */
static inline int64_t lce_few_dz_bytes(const struct lce_format *f) {
    return lce_left_bytes(f, LCE_FEW_BLOCK, LCE_FEW) + lce_left_bytes(f, LCE_FEW, LCE_FEW_BLOCK);
}

/* Blocks of rows whose parts of dbias are summed one after the other. */
static inline int64_t lce_dbias_blocks(const struct lce_plan *plan, int64_t rows) {
    return plan->few == LCE_FEW_CLASSES ? lce_few_blocks(rows) : ceil_div(rows, LCE_COLUMNS);
}
static inline int64_t lce_few_pitch(int64_t depth) {
    return round_up(depth, LCE_FEW_VECTOR);
}

enum { LCE_TILE = 16384 };

/* The range of classes that slices are cut from: a tile, or all. */
static inline int64_t lce_span(const struct lce_problem *problem) {
    return max64(1, problem->ranks > 0 ? min64(LCE_TILE, problem->classes) : problem->classes);
}
static inline int64_t lce_tiles(const struct lce_problem *problem) {
    return ceil_div(problem->classes, lce_span(problem));
}
static inline int64_t lce_slices_of_span(const struct lce_problem *problem, const struct lce_plan *plan) {
    return ceil_div(lce_span(problem), plan->slice);
}
static inline int64_t lce_slices(const struct lce_problem *problem, const struct lce_plan *plan) {
    const int64_t span = lce_span(problem);
    return problem->classes / span * lce_slices_of_span(problem, plan) + ceil_div(problem->classes % span, plan->slice);
}

/* Whether W is packed for the logits before they are formed: if several blocks of rows use it. For one block, each
 * task packs what it multiplies, panel by panel. */
static inline bool lce_packs_w(const struct lce_plan *plan) {
    return plan->group > LCE_COLUMNS;
}
/* Whether the workspace holds the logits of all slices, sums of all of dx, sums of all of dW. */
static inline bool lce_stores_logits(const struct lce_problem *problem, const struct lce_plan *plan) {
    return plan->fast && problem->stats;
}
static inline bool lce_stores_all_dx(const struct lce_problem *problem, const struct lce_plan *plan) {
    return problem->dx && problem->sums_dx && !plan->fast && !plan->split && plan->slice < problem->classes;
}
static inline bool lce_stores_all_dweight(const struct lce_problem *problem, const struct lce_plan *plan) {
    return problem->dweight && problem->sums_dweight && plan->fast && plan->group < problem->rows;
}

#endif
