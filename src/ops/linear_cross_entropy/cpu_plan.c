/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/linear_cross_entropy/cpu_plan.h"

#include "ops/loss_group.h"

#include <math.h>
#include <stdint.h>

enum { MIB = 1 << 20 };

/* The workspace without a budget, beyond fp32 sums of all of dW or dx. */
static const size_t comfortable_fast = (size_t)1024 * MIB, comfortable_compact = (size_t)256 * MIB;

/* With fewer rows in a group, packing W for each group costs more than compact's fourth product. */
enum { FAST_ROWS = 256 };

/* Classes of a slice of a batch-invariant call, about. */
enum { INVARIANT_SLICE = 4096 };

/* A step whose operands take more than this has to write them to memory and read them again: the
 * last-level cache does not hold them from one product to the next. */
enum { SLICE_BYTES = 32 * MIB };

/* Other costs, in elements that could be moved in the same time: multiplications of a product per
 * element; the four times that a step starts tasks and waits for the last of them; and threads that
 * wait for the last task, about this many tasks' time on some 16 threads. */
enum { PRODUCT_RATE = 64, STEP_COST = 1 << 20, IDLE_TASKS = 8 };

/* Groups and slices are multiples of this; and of whole blocks, if they have so many that this makes
 * little difference. */
enum { UNIT = 32, WHOLE_BLOCKS = 4 };

/* ---- layout ---------------------------------------------------------------------------------- */

static void lay_out(const struct lce_problem *q, struct lce_plan *plan) {
    const struct lce_format *f = &q->format;
    struct lce_layout *const to = &plan->layout;
    const int64_t n = q->rows, padded = n + LCE_COLUMNS, d = q->depth, group = plan->group, slice = plan->slice;
    const int64_t groups = ceil_div(n, group), slices = lce_slices(q, plan);
    const bool gradients = q->dx || q->dweight || q->dbias, many = plan->few == LCE_NOT_FEW;
    const int64_t few = plan->few == LCE_FEW_ROWS ? n : q->classes,
                  streamed = plan->few == LCE_FEW_ROWS ? q->classes : n;
    const int64_t parts = many ? 0 : ceil_div(lce_few_blocks(streamed), lce_few_part(streamed));
    const bool sums = plan->few == LCE_FEW_ROWS ? q->dx : q->dweight;
    int64_t used = 0;
#define PLACE(buffer, wanted, bytes_)                                                                                  \
    do {                                                                                                               \
        to->buffer = (wanted) ? used : -1;                                                                             \
        used += (wanted) ? round_up(bytes_, RAFTER_SCRATCH_ALIGNMENT) : 0;                                             \
    } while (0)
    PLACE(row, true, n * 8);
    PLACE(x_row, true, n * 8);
    PLACE(label, true, padded * 8);
    PLACE(stats, q->stats, n * (int64_t)sizeof(struct rafter_row_stats));
    PLACE(target_logit, q->stats, padded * 4);
    PLACE(pivot, gradients, padded * 4);
    PLACE(p, gradients, padded * 4);
    PLACE(target, gradients, padded * 4);
    PLACE(spread, gradients, padded * 4);
    PLACE(level, gradients && q->dentropy, padded * 4);
    PLACE(tilt, gradients && q->dentropy, padded * 4);
    PLACE(bias, true, slice * 4);
    PLACE(weight, true, slice * 4);
    PLACE(x_logits, many, lce_right_bytes(f, d, group));
    PLACE(x_dweight, many && q->dweight, lce_right_bytes(f, group, d));
    PLACE(w_logits, many && lce_packs_w(plan), lce_left_bytes(f, slice, d));
    PLACE(w_dx, many && q->dx, lce_right_bytes(f, slice, d));
    PLACE(logits, true, lce_out_bytes(f, slice, group) * (lce_stores_logits(q, plan) ? slices : 1));
    PLACE(block_stats, q->stats, ceil_div(slice, LCE_ROWS) * LCE_STATS * round_up(group, LCE_COLUMNS) * 4);
    PLACE(blocks_done, q->stats, ceil_div(group, LCE_COLUMNS) * 8);
    PLACE(dz_by_row, many && q->dx, lce_left_bytes(f, group, slice));
    PLACE(dz_by_class, many && q->dweight, lce_left_bytes(f, slice, group));
    PLACE(dx, many && q->dx, lce_out_bytes(f, group, d) * (lce_stores_all_dx(q, plan) ? groups : 1));
    PLACE(dweight, many && q->dweight, lce_out_bytes(f, slice, d) * (lce_stores_all_dweight(q, plan) ? slices : 1));
    PLACE(few, !many, round_up(few, LCE_FEW_PADDED) * lce_few_pitch(d) * f->element);
    PLACE(few_joined, !many && f->element == 2, round_up(few, LCE_FEW_PADDED) * lce_few_pitch(d) * f->element);
    PLACE(few_dz, !many && gradients, parts * lce_few_dz_bytes(f));
    PLACE(few_sums, !many && sums, parts * few * lce_few_pitch(d) * 4);
    PLACE(block_dbias, q->dbias, lce_dbias_blocks(plan, group) * slice * 4);
    PLACE(dbias, q->dbias, q->classes * 4);
    PLACE(rank_prefix, q->ranks > 0, (q->ranks + 1) * 8);
    PLACE(tile_prefix, q->ranks > 0 && q->stats, (lce_tiles(q) + 1) * 8);
    PLACE(tiles, q->ranks > 0 && q->stats, n * lce_tiles(q) * (int64_t)sizeof(struct rafter_row_record));
    PLACE(exchange, q->ranks > 0 && q->stats, q->exchange);
    PLACE(dx_sum, q->ranks > 0 && q->dx, n * d * 4);
    PLACE(dx_share, q->ranks > 0 && q->dx, n * d / q->ranks * 4);
#undef PLACE
    plan->bytes = (size_t)used;
}

/* ---- choice ---------------------------------------------------------------------------------- */

/* How often a product of m rows reads its right operand. */
static double passes(const struct lce_format *f, int64_t m, int64_t k) {
    const int64_t blocks = ceil_div(m, LCE_ROWS);
    return (double)ceil_div(blocks, lce_blocks_in_cache(f, k, blocks));
}

/* Elements that are packed, read or written besides the products. */
static double overhead(const struct lce_problem *q, const struct lce_plan *plan) {
    const double w = (double)q->classes * (double)q->depth, x = (double)q->rows * (double)q->depth;
    const double logits = (double)q->rows * (double)q->classes;
    const double groups = (double)ceil_div(q->rows, plan->group), slices = (double)lce_slices(q, plan);
    const double w_logits = lce_packs_w(plan) ? 1 : 0.5, x_packs = 1 + q->dweight; /* 0.5: read, not written */
    double moved = slices * x * 4 * q->dx; /* sums of dx, read and written; an fp32 number counts as two of W or x */
    if (plan->fast) {
        moved += groups * w * (w_logits + q->dx) + x * x_packs;
        moved += q->dweight ? groups * w * (groups > 1 ? 3 : 1) : 0; /* fp32 sums of dW in memory */
    } else {
        moved += w * (w_logits * (lce_packs_w(plan) ? 1 : groups) * (1 + q->stats) + q->dx + q->dweight);
        moved += groups > 1 ? slices * x * (x_packs + q->stats) : x * x_packs;
        if (plan->split)
            moved += groups * w * (w_logits + q->dx) + (q->dweight ? logits * (double)q->depth / PRODUCT_RATE : 0);
    }
    moved += groups * slices * STEP_COST;
    const double tasks = (double)(ceil_div(plan->group, LCE_COLUMNS) * ceil_div(plan->slice, LCE_ROWS));
    moved += logits * (double)q->depth / PRODUCT_RATE * IDLE_TASKS / tasks;
    const int64_t per_class = 2 * (q->format.element + 2) * (q->depth + plan->group);
    if (plan->slice * per_class > SLICE_BYTES) {
        moved += groups * w * (1 + q->dx) / 2 + logits * q->dx;
        moved += groups * w * (passes(&q->format, plan->group, plan->slice) - 1) * q->dx; /* W, the right operand */
    }
    return moved;
}

/* One of `count` parts of `total`: a multiple of UNIT, or of `block` if it has `least` of them or
 * more. */
static int64_t part(int64_t total, int64_t count, int64_t block, int64_t least) {
    const int64_t even = ceil_div(total, count);
    return round_up(max64(even, 1), even >= least * block ? block : UNIT);
}

static int64_t more(int64_t count) {
    return count < 4 ? count + 1 : count + count / 3;
}

/* The plan of one kind with the least overhead within `limit`; if none fits, the smallest. */
static bool search(const struct lce_problem *q, bool fast, bool split, size_t limit, struct lce_plan *best) {
    *best = (struct lce_plan){.bytes = SIZE_MAX};
    double least = INFINITY;
    struct lce_plan plan = {.fast = fast, .split = split, .group = INT64_MAX};
    for (int64_t groups = 1; plan.group > UNIT && (groups == 1 || !fast || q->ranks == 0); groups = more(groups)) {
        plan.group = part(q->rows, groups, LCE_COLUMNS, WHOLE_BLOCKS);
        plan.slice = INT64_MAX;
        const int64_t fewest = q->invariant ? ceil_div(lce_span(q), INVARIANT_SLICE) : 1;
        for (int64_t slices = fewest; plan.slice > UNIT && !(q->invariant && slices > fewest); slices = more(slices)) {
            plan.slice = part(lce_span(q), slices, LCE_ROWS, q->ranks > 0 ? 1 : WHOLE_BLOCKS);
            lay_out(q, &plan);
            const double cost = plan.bytes <= limit ? overhead(q, &plan) : INFINITY;
            if (cost < least || (least == INFINITY && plan.bytes < best->bytes)) {
                *best = plan;
                least = cost;
            }
        }
    }
    return least < INFINITY;
}

/* fp32 sums of a whole gradient. */
static size_t sums_bytes(const struct lce_problem *q, int64_t rows) {
    return (size_t)lce_out_bytes(&q->format, rows, q->depth);
}

/* Whether the call has few rows or classes. What is decided by their number is not batch invariant. */
static enum lce_few_of few_of(const struct lce_problem *q) {
    if (q->invariant || q->ranks > 0 || q->depth == 0)
        return LCE_NOT_FEW;
    if (q->rows <= LCE_FEW && q->rows <= q->classes && q->streams_w)
        return LCE_FEW_ROWS;
    return q->classes <= LCE_FEW && q->streams_x ? LCE_FEW_CLASSES : LCE_NOT_FEW;
}

bool lce_make_few_plan(const struct lce_problem *q, rafter_lce_mode mode, size_t budget, struct lce_plan *plan) {
    *plan =
        (struct lce_plan){.fast = true, .few = few_of(q), .group = max64(q->rows, 1), .slice = max64(q->classes, 1)};
    if (plan->few == LCE_NOT_FEW || mode == RAFTER_LCE_COMPACT)
        return false;
    lay_out(q, plan);
    return plan->bytes <= (budget ? budget : comfortable_fast);
}

void lce_make_plan(const struct lce_problem *q, rafter_lce_mode mode, size_t budget, struct lce_plan *plan) {
    const bool gradients = q->dx || q->dweight || q->dbias;
    const bool may_split = q->dx && q->sums_dx;
    struct lce_plan fast, compact, split;
    bool fast_fits = false, compact_fits = false, split_fits = false;
    fast.bytes = compact.bytes = split.bytes = SIZE_MAX;

    if (gradients && (mode == RAFTER_LCE_FAST || (mode == RAFTER_LCE_AUTO && q->stats))) {
        const size_t sums = q->dweight && q->sums_dweight ? sums_bytes(q, q->classes) : 0;
        fast_fits = search(q, true, false, budget ? budget : comfortable_fast + sums, &fast);
        if (fast_fits &&
            (mode == RAFTER_LCE_FAST || q->invariant || fast.group >= FAST_ROWS || fast.group >= q->rows)) {
            *plan = fast;
            return;
        }
    }
    if (!gradients || mode != RAFTER_LCE_FAST) {
        const size_t sums = may_split ? sums_bytes(q, q->rows) : 0;
        compact_fits = search(q, false, false, budget ? budget : comfortable_compact + sums, &compact);
        if (!compact_fits && may_split)
            split_fits = search(q, false, true, budget ? budget : comfortable_compact, &split);
    }
    if (compact_fits) {
        *plan = compact;
    } else if (fast_fits) {
        *plan = fast;
    } else if (split_fits) {
        *plan = split;
    } else {
        *plan = fast.bytes < compact.bytes ? fast : compact;
        if (split.bytes < plan->bytes)
            *plan = split;
    }
}
