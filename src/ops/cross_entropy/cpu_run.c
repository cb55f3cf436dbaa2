/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cross_entropy on the CPU. A call takes one of these ways:
 *   tiles    short rows, and rows whose classes are not contiguous (cpu_tiles.h)
 *   rows     a task is some whole rows
 *   chunks   few long rows: a task is one chunk of the columns of one row
 *   blocks   where rows are adjacent in memory instead of classes, and tiles do not serve the call,
 *            a block of adjacent rows takes the place of a row: it is transposed through a buffer
 *   shared   classes are spread over ranks: the statistics of all rows are computed chunk by chunk
 *            before the first result is written
 */
#include <math.h>

#include "core/kernel_memory.h"
#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/cross_entropy/call.h"
#include "ops/cross_entropy/cpu_tiles.h"
#include "ops/loss_group.h"

enum {
    /* A row's statistics are always merged from those of chunks of this many columns, whether a
     * task is whole rows or one chunk. So a row's bits depend neither on the number of threads nor
     * on the number of rows. */
    CHUNK = 16384,
    MANY_BLOCKS = 64, /* with fewer blocks than this, a task has at least two neighbouring ones; else at least four */
    FEW_TASKS = 16,   /* with fewer chunks of blocks than this, blocks have fewer rows, */
    LEAST_BLOCK_ROWS = 4, /* but not fewer than these */
    FEW_ROWS = 64,        /* with fewer rows than this, a task is one chunk */
    MOST_TASKS = 1024,    /* of whole rows */
    MERGED_ROWS = 64,     /* per task that merges statistics of ranks */
};

/* ---- plan ------------------------------------------------------------------------------------ */

struct plan {
    bool tiled; /* the call runs as `tiles` says; nothing else is set */
    struct cross_entropy_tiles tiles;
    struct cross_entropy_row row; /* what all rows share */
    bool split;                   /* a task is one chunk of a row (block); else rows_per_task rows (blocks) */
    bool shared;                  /* classes are spread over ranks: a task is chunks_per_task chunks */
    int64_t chunks, rows_per_task, chunks_per_task, tasks;
    struct {
        int64_t rank_prefix, chunk_prefix, records, stats, exchange;
    } at; /* shared: offsets in the workspace, see struct work */
    /* Blocks, if `blocks` is not 0. A block has at most block_rows rows of a run of `run` adjacent rows, and is
     * transposed `piece` classes at a time. If split, a gradient task is gradient_classes classes of all rows of a
     * run, because several tasks that write neighbouring rows would share cache lines. */
    int64_t run, block_rows, blocks_per_run, blocks, piece, gradient_classes;
};

/* Lays out the workspace of a call whose classes are spread over ranks; returns its bytes. */
static size_t plan_shared(const struct rafter_loss *loss, struct plan *plan) {
    const int64_t units = loss->rows * plan->chunks;
    int64_t used = 0;
#define PLACE(array, bytes)                                                                                            \
    do {                                                                                                               \
        plan->at.array = used;                                                                                         \
        used += round_up((int64_t)(bytes), RAFTER_SCRATCH_ALIGNMENT);                                                  \
    } while (0)
    PLACE(rank_prefix, (size_t)(loss->class_group.ranks + 1) * sizeof(double));
    PLACE(chunk_prefix, (size_t)(plan->chunks + 1) * sizeof(double));
    PLACE(records, (size_t)units * sizeof(struct rafter_row_record));
    PLACE(stats, (size_t)loss->rows * sizeof(struct rafter_row_stats));
    PLACE(exchange, rafter_loss_exchange_bytes(loss, loss->rows));
#undef PLACE
    plan->chunks_per_task = rafter_task_elements(loss->rows * loss->classes) / (min64(loss->classes, CHUNK) + 1) + 1;
    plan->tasks = ceil_div(units, plan->chunks_per_task);
    return (size_t)used;
}

/* Plans blocks of adjacent rows, if the layout has them. */
static void plan_blocks(const struct cross_entropy_call *call, struct plan *plan) {
    const rafter_view *const z = &call->logits, *const dz = call->gradient ? &call->dlogits : z;
    const int row = z->ndim - 2, dz_row = dz->ndim - 2;
    const int64_t run = min64(z->shape[row], dz->shape[dz_row]);
    const bool adjacent = plan->row.z_stride != 1 && z->stride[row] == 1 && run > 1;
    const bool stores = plan->row.dz_stride == 1 || dz->stride[dz_row] == 1;
    if (!adjacent || !stores || z->shape[row] % run || dz->shape[dz_row] % run || call->common.batch_invariant)
        return;
    plan->run = run;
    plan->block_rows = min64(run, CROSS_ENTROPY_BLOCK_ROWS);
    while (ceil_div(call->loss.rows, plan->block_rows) * plan->chunks < FEW_TASKS &&
           plan->block_rows > LEAST_BLOCK_ROWS)
        plan->block_rows = ceil_div(plan->block_rows, 2);
    plan->blocks_per_run = ceil_div(run, plan->block_rows);
    plan->blocks = call->loss.rows / run * plan->blocks_per_run;
    /* Only the run decides on the piece: a row's bits depend on how it is cut into pieces. */
    plan->piece = min64(CROSS_ENTROPY_BLOCK / min64(run, CROSS_ENTROPY_BLOCK_ROWS), CROSS_ENTROPY_PIECE) / 16 * 16;
    plan->gradient_classes =
        round_up(max64(rafter_task_elements(call->loss.rows * call->loss.classes) / run, 1), plan->piece);
    plan->row.stream = false; /* blocks are written through a buffer */
}

/* Returns the bytes of workspace: the statistics of chunks, or the loss of each task. */
static size_t make_plan(const rafter_context *context, const struct rafter_call *common, void *storage) {
    (void)context;
    const struct cross_entropy_call *const call = (const void *)common;
    const struct rafter_loss *const loss = &call->loss;
    struct plan *const plan = storage;
    const int64_t rows = loss->rows, classes = loss->classes;
    const bool forward = common->direction == RAFTER_FORWARD, in_place = call->logits.data == call->dlogits.data;
    *plan = (struct plan){.chunks = ceil_div(classes, CHUNK)};
    plan->shared = rafter_group_has(&loss->class_group);
    plan->tiled = !plan->shared && cross_entropy_plan_tiles(call, &plan->tiles);
    if (plan->tiled)
        return forward ? (size_t)plan->tiles.tasks * sizeof(double) : 0;
    plan->row = (struct cross_entropy_row){
        .dtype = call->logits.dtype,
        .z_stride = classes > 1 ? call->logits.stride[call->logits.ndim - 1] : 1,
        .dz_stride = classes > 1 && call->gradient ? call->dlogits.stride[call->dlogits.ndim - 1] : 1,
        .softcap = loss->softcap,
        .scale = loss->scale,
        .weight = loss->smoothing != 0.0f && rafter_loss_has(&loss->class_weight)
                      ? rafter_at(&loss->class_weight, loss->first_class * loss->class_weight.stride[0])
                      : NULL,
        .weight_stride = loss->class_weight.stride[0],
        .logit_sum = forward && loss->smoothing != 0.0f,
        .moment = rafter_loss_has(&loss->entropy),
        .argmax = rafter_loss_has(&loss->argmax),
        .stream = call->gradient && !in_place && rafter_should_stream(&call->dlogits, cross_entropy_shortest_streamed),
    };
    if (plan->shared)
        return plan_shared(loss, plan);
    plan_blocks(call, plan);
    const int64_t units = plan->blocks ? plan->blocks : rows, unit_rows = max64(plan->block_rows, 1);
    const bool shares_lines = plan->blocks > 0 && call->gradient && plan->row.dz_stride != 1;
    plan->split = units < FEW_ROWS && (plan->chunks > 1 || shares_lines);
    if (plan->split) {
        plan->tasks = units * plan->chunks;
        return (size_t)(rows * plan->chunks) * sizeof(struct rafter_row_stats);
    }
    plan->rows_per_task =
        max64(ceil_div(units, MOST_TASKS), rafter_task_elements(rows * classes) / (classes * unit_rows + 1) + 1);
    if (plan->blocks_per_run > 1) /* neighbouring blocks share cache lines: keep most of them in one task */
        plan->rows_per_task = max64(plan->rows_per_task, units < MANY_BLOCKS ? 2 : 4);
    plan->tasks = ceil_div(units, plan->rows_per_task);
    return forward ? (size_t)plan->tasks * sizeof(double) : 0;
}
_Static_assert(sizeof(struct plan) <= RAFTER_PLAN_BYTES, "raise RAFTER_PLAN_BYTES");

/* ---- one row --------------------------------------------------------------------------------- */

/* A planned call, as its tasks see it. */
struct work {
    const struct cross_entropy_call *call;
    const struct plan *plan;
    const struct cross_entropy_kernels *kernels;
    struct rafter_row_stats *stats; /* split: ordered by row, then chunk. shared: of whole rows */
    double *sums;                   /* not split, forward: the sum of the row losses of each task */
    /* shared: */
    double *rank_prefix, *chunk_prefix; /* the sum of the class weights before each rank (chunk), then that of all */
    struct rafter_row_record *records;  /* ordered by row, then chunk */
    char *exchange;                     /* see rafter_loss_exchange_bytes */
};

static struct cross_entropy_row row_at(const struct work *work, int64_t index, int64_t label) {
    const rafter_view *const logits = &work->call->logits, *const dlogits = &work->call->dlogits;
    struct cross_entropy_row row = work->plan->row;
    row.label = label - work->call->loss.first_class; /* outside of the columns if another rank has it */
    row.z = rafter_at(logits, rafter_offset(logits, 0, logits->ndim - 1, index));
    if (work->call->gradient)
        row.dz = rafter_at(dlogits, rafter_offset(dlogits, 0, dlogits->ndim - 1, index));
    return row;
}

static int64_t chunk_end(const struct work *work, int64_t chunk) {
    return min64((chunk + 1) * CHUNK, work->call->loss.classes);
}

/* Where the next call of a kernel ends: after one piece if the kernel uses its buffers. */
static int64_t piece_end(bool buffered, int64_t first, int64_t end) {
    return buffered ? min64(first + CROSS_ENTROPY_PIECE, end) : end;
}

static void chunk_stats(const struct work *work, const struct cross_entropy_row *row, int64_t chunk,
                        struct rafter_row_stats *stats) {
    const bool buffered = cross_entropy_stats_buffered(row);
    const int64_t start = chunk * CHUNK, end = chunk_end(work, chunk);
    for (int64_t first = start, next; first < end; first = next) {
        struct rafter_row_stats part;
        next = piece_end(buffered, first, end);
        work->kernels->stats(row, first, next - first, &part);
        *stats = first == start ? part : rafter_row_merge(stats, &part);
    }
}

static void columns_gradient(const struct work *work, const struct cross_entropy_row *row, int64_t start, int64_t end,
                             const struct rafter_row_gradient *gradient) {
    const bool buffered = !gradient->zero && cross_entropy_gradient_buffered(row);
    for (int64_t first = start, next; first < end; first = next) {
        next = piece_end(buffered, first, end);
        work->kernels->gradient(row, first, next - first, gradient);
    }
}

/* Whether backward can use the given lse. */
static bool lse_is_accurate(const struct cross_entropy_call *call, int64_t index) {
    const float bound = cross_entropy_lse_bound(call->logits.dtype);
    return call->common.direction == RAFTER_BACKWARD && rafter_loss_has(&call->loss.lse) &&
           fabsf(rafter_loss_given_lse(&call->loss, index)) <= bound;
}

/* Ignored rows need no statistics, nor does backward from an accurate lse. */
static bool needs_stats(const struct cross_entropy_call *call, int64_t index, int64_t label) {
    return label >= 0 && !lse_is_accurate(call, index);
}

static struct rafter_row_gradient row_gradient(const struct cross_entropy_call *call, int64_t index, int64_t label,
                                               const struct rafter_row_stats *stats) {
    if (label < 0 || needs_stats(call, index, label))
        return rafter_loss_gradient(&call->loss, index, label, stats);
    return rafter_loss_gradient_from_lse(&call->loss, index, label, rafter_loss_given_lse(&call->loss, index));
}

/* ---- blocks of adjacent rows ----------------------------------------------------------------- */

/* Rows [first, first + rows) of one run. */
struct block {
    int64_t first, rows;
    int64_t label[CROSS_ENTROPY_BLOCK_ROWS];
    const char *z;
    char *dz;
};

static struct block block_of(const struct work *work, int64_t run, int64_t in_run, int64_t most_rows) {
    const rafter_view *const z = &work->call->logits, *const dz = &work->call->dlogits;
    struct block block = {.first = run * work->plan->run + in_run, .rows = min64(most_rows, work->plan->run - in_run)};
    for (int64_t r = 0; r < block.rows; r++)
        block.label[r] = rafter_loss_label(&work->call->loss, block.first + r);
    block.z = rafter_at(z, rafter_offset(z, 0, z->ndim - 1, block.first));
    if (work->call->gradient)
        block.dz = rafter_at(dz, rafter_offset(dz, 0, dz->ndim - 1, block.first));
    return block;
}

static struct block block_at(const struct work *work, int64_t index) {
    const struct plan *const plan = work->plan;
    return block_of(work, index / plan->blocks_per_run, index % plan->blocks_per_run * plan->block_rows,
                    plan->block_rows);
}

/* Copies classes [first, first + n) of the block to the buffer, and prefetches the next n, up to `end`.
 * Returns what the rows in the buffer share: they are fp32 and contiguous. */
static struct cross_entropy_row load_piece(const struct work *work, const struct block *block, int64_t first, int64_t n,
                                           int64_t end, float *buffer) {
    struct cross_entropy_row row = work->plan->row;
    const int64_t step = row.z_stride * rafter_dtype_bytes(row.dtype), next = min64(n, end - first - n);
    work->kernels->load_block(row.dtype, block->z + first * step, row.z_stride, block->rows, n, buffer,
                              work->plan->piece);
    work->kernels->fetch_block(row.dtype, block->z + (first + n) * step, row.z_stride, block->rows, next);
    row.dtype = RAFTER_F32;
    row.z_stride = row.dz_stride = 1;
    return row;
}

/* Makes `row` row r of the buffer. Kernels index classes from 0, so the pointers are moved back by the
 * buffer's first class. */
static void take_row(const struct plan *plan, const struct block *block, int64_t r, int64_t first, float *buffer,
                     struct cross_entropy_row *row) {
    row->label = block->label[r];
    row->dz = (char *)(buffer + r * plan->piece) - first * (int64_t)sizeof(float);
    row->z = row->dz;
}

/* Computes the statistics of one chunk of every row of the block; those of row r go to stats[r * step]. */
static void block_stats(const struct work *work, const struct block *block, int64_t chunk,
                        struct rafter_row_stats *stats, int64_t step) {
    float *const buffer = rafter_task_memory();
    _Static_assert(CROSS_ENTROPY_BLOCK * sizeof *buffer <= RAFTER_TASK_BYTES, "raise RAFTER_TASK_BYTES");
    bool needed = false;
    for (int64_t r = 0; r < block->rows; r++)
        needed |= needs_stats(work->call, block->first + r, block->label[r]);
    for (int64_t r = 0; r < block->rows && !needed; r++)
        stats[r * step] = rafter_row_empty;
    const int64_t start = chunk * CHUNK, end = needed ? chunk_end(work, chunk) : start;
    for (int64_t first = start, n; first < end; first += n) {
        n = min64(work->plan->piece, end - first);
        struct cross_entropy_row row = load_piece(work, block, first, n, end, buffer);
        for (int64_t r = 0; r < block->rows; r++) {
            struct rafter_row_stats part;
            take_row(work->plan, block, r, first, buffer, &row);
            work->kernels->stats(&row, first, n, &part);
            stats[r * step] = first == start ? part : rafter_row_merge(&stats[r * step], &part);
        }
    }
}

static void block_gradient(const struct work *work, const struct block *block, int64_t start, int64_t end,
                           const struct rafter_row_gradient *gradient) {
    float *const buffer = rafter_task_memory();
    _Static_assert(CROSS_ENTROPY_BLOCK * sizeof *buffer <= RAFTER_TASK_BYTES, "raise RAFTER_TASK_BYTES");
    const rafter_view *const dz = &work->call->dlogits;
    const int64_t stride = work->plan->row.dz_stride, row_stride = dz->stride[dz->ndim - 2];
    for (int64_t first = start, n; first < end; first += n) {
        n = min64(work->plan->piece, end - first);
        char *const to = block->dz + first * stride * rafter_dtype_bytes(dz->dtype);
        if (stride != 1 && block->dz != block->z)
            work->kernels->fetch_block(dz->dtype, to, stride, block->rows, n);
        struct cross_entropy_row row = load_piece(work, block, first, n, end, buffer);
        for (int64_t r = 0; r < block->rows; r++) {
            take_row(work->plan, block, r, first, buffer, &row);
            work->kernels->gradient(&row, first, n, &gradient[r]);
        }
        work->kernels->store_block(dz->dtype, buffer, work->plan->piece, block->rows, n, to, row_stride, stride);
    }
}

/* Writes the gradient of classes [start, end) of the block, from the statistics of row r at stats[r * step]. */
static void block_gradient_from(const struct work *work, const struct block *block, int64_t start, int64_t end,
                                const struct rafter_row_stats *stats, int64_t step) {
    struct rafter_row_gradient gradient[CROSS_ENTROPY_BLOCK_ROWS];
    for (int64_t r = 0; r < block->rows; r++)
        gradient[r] = row_gradient(work->call, block->first + r, block->label[r], &stats[r * step]);
    block_gradient(work, block, start, end, gradient);
}

static double whole_block(const struct work *work, int64_t index) {
    const struct cross_entropy_call *const call = work->call;
    const struct block block = block_at(work, index);
    struct rafter_row_stats stats[CROSS_ENTROPY_BLOCK_ROWS], part[CROSS_ENTROPY_BLOCK_ROWS];
    for (int64_t chunk = 0; chunk < work->plan->chunks; chunk++) {
        block_stats(work, &block, chunk, chunk ? part : stats, 1);
        for (int64_t r = 0; r < block.rows && chunk > 0; r++)
            stats[r] = rafter_row_merge(&stats[r], &part[r]);
    }
    double loss = 0.0;
    for (int64_t r = 0; r < block.rows && call->common.direction == RAFTER_FORWARD; r++)
        loss += rafter_loss_write_row(&call->loss, block.first + r, block.label[r], &stats[r]);
    if (call->gradient)
        block_gradient_from(work, &block, 0, call->loss.classes, stats, 1);
    return loss;
}

/* ---- tasks of whole rows --------------------------------------------------------------------- */

static double whole_row(const struct work *work, int64_t index) {
    const struct cross_entropy_call *const call = work->call;
    const int64_t label = rafter_loss_label(&call->loss, index);
    const struct cross_entropy_row row = row_at(work, index, label);
    struct rafter_row_stats stats = rafter_row_empty, part;
    if (needs_stats(call, index, label))
        for (int64_t chunk = 0; chunk < work->plan->chunks; chunk++) {
            chunk_stats(work, &row, chunk, &part);
            stats = chunk == 0 ? part : rafter_row_merge(&stats, &part);
        }
    double loss = 0.0;
    if (call->common.direction == RAFTER_FORWARD)
        loss = rafter_loss_write_row(&call->loss, index, label, &stats);
    if (call->gradient) { /* the row is still in the L2 cache */
        const struct rafter_row_gradient gradient = row_gradient(call, index, label, &stats);
        columns_gradient(work, &row, 0, call->loss.classes, &gradient);
    }
    return loss;
}

static void rows_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t from = task * work->plan->rows_per_task;
    const int64_t all = work->plan->blocks ? work->plan->blocks : work->call->loss.rows;
    const int64_t to = min64(from + work->plan->rows_per_task, all);
    double sum = 0.0;
    for (int64_t index = from; index < to; index++)
        sum += work->plan->blocks ? whole_block(work, index) : whole_row(work, index);
    if (work->sums)
        work->sums[task] = sum;
    if (work->plan->row.stream)
        work->kernels->fence();
}

static double run_rows(const rafter_context *context, struct work *work) {
    double sum = 0.0;
    rafter_parallel(context, work->plan->tasks, rows_task, work);
    for (int64_t task = 0; work->sums && task < work->plan->tasks; task++)
        sum += work->sums[task];
    return sum;
}

/* ---- tasks of chunks of columns -------------------------------------------------------------- */

static void stats_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t chunks = work->plan->chunks;
    if (work->plan->blocks) {
        const struct block block = block_at(work, task / chunks);
        block_stats(work, &block, task % chunks, &work->stats[block.first * chunks + task % chunks], chunks);
        return;
    }
    const int64_t index = task / chunks, label = rafter_loss_label(&work->call->loss, index);
    if (needs_stats(work->call, index, label)) {
        const struct cross_entropy_row row = row_at(work, index, label);
        chunk_stats(work, &row, task % chunks, &work->stats[task]);
    }
}

static int64_t gradient_ranges(const struct plan *plan, int64_t classes) { /* of a run */
    return ceil_div(classes, plan->gradient_classes);
}

static void blocks_gradient_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct plan *const plan = work->plan;
    const int64_t classes = work->call->loss.classes, ranges = gradient_ranges(plan, classes);
    const int64_t start = task % ranges * plan->gradient_classes, end = min64(start + plan->gradient_classes, classes);
    for (int64_t in_run = 0; in_run < plan->run; in_run += CROSS_ENTROPY_BLOCK_ROWS) {
        const struct block block = block_of(work, task / ranges, in_run, CROSS_ENTROPY_BLOCK_ROWS);
        block_gradient_from(work, &block, start, end, &work->stats[block.first * plan->chunks], plan->chunks);
    }
}

static void gradient_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t index = task / work->plan->chunks, chunk = task % work->plan->chunks;
    const int64_t label = rafter_loss_label(&work->call->loss, index);
    const struct cross_entropy_row row = row_at(work, index, label);
    const struct rafter_row_gradient gradient =
        row_gradient(work->call, index, label, &work->stats[index * work->plan->chunks]);
    columns_gradient(work, &row, chunk * CHUNK, chunk_end(work, chunk), &gradient);
    if (row.stream)
        work->kernels->fence();
}

static double run_split(const rafter_context *context, struct work *work) {
    const struct cross_entropy_call *const call = work->call;
    double sum = 0.0;
    rafter_parallel(context, work->plan->tasks, stats_task, work);
    for (int64_t index = 0; index < call->loss.rows; index++) {
        const int64_t label = rafter_loss_label(&call->loss, index);
        struct rafter_row_stats *const stats =
            &work->stats[index * work->plan->chunks]; /* the first becomes the whole row's */
        for (int64_t chunk = 1; needs_stats(call, index, label) && chunk < work->plan->chunks; chunk++)
            *stats = rafter_row_merge(stats, &stats[chunk]);
        if (call->common.direction == RAFTER_FORWARD)
            sum += rafter_loss_write_row(&call->loss, index, label, stats);
    }
    if (call->gradient && work->plan->blocks)
        rafter_parallel(context, call->loss.rows / work->plan->run * gradient_ranges(work->plan, call->loss.classes),
                        blocks_gradient_task, work);
    else if (call->gradient)
        rafter_parallel(context, work->plan->tasks, gradient_task, work);
    return sum;
}

/* ---- classes spread over ranks --------------------------------------------------------------- */

static int64_t units_end(const struct work *work, int64_t task) {
    return min64((task + 1) * work->plan->chunks_per_task, work->call->loss.rows * work->plan->chunks);
}

static void record_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t chunks = work->plan->chunks;
    for (int64_t unit = task * work->plan->chunks_per_task; unit < units_end(work, task); unit++) {
        const int64_t index = unit / chunks, chunk = unit % chunks;
        const int64_t label = rafter_loss_label(&work->call->loss, index);
        struct rafter_row_stats stats = rafter_row_empty;
        if (label >= 0) {
            const struct cross_entropy_row row = row_at(work, index, label);
            chunk_stats(work, &row, chunk, &stats);
            stats.argmax += stats.argmax < 0 ? 0 : work->call->loss.first_class;
        }
        work->records[unit] = rafter_row_record_of(&stats, work->chunk_prefix[chunk + 1] - work->chunk_prefix[chunk]);
    }
}

static int64_t rows_end(const struct work *work, int64_t task) {
    return min64((task + 1) * MERGED_ROWS, work->call->loss.rows);
}

/* Merges the chunks of rows to this rank's records, which are sent. */
static void send_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t chunks = work->plan->chunks;
    const size_t bytes = sizeof *work->records;
    const double *const prefix = work->chunk_prefix;
    for (int64_t index = task * MERGED_ROWS; index < rows_end(work, task); index++) {
        const char *const parts = (const char *)(work->records + index * chunks);
        const struct rafter_row_stats stats = rafter_row_merge_tree(parts, bytes, bytes, prefix, 0, chunks);
        const struct rafter_row_record record = rafter_row_record_of(&stats, prefix[chunks] - prefix[0]);
        rafter_loss_put_record(&work->call->loss, work->exchange, index, &record);
    }
}

/* Merges the records of all ranks to statistics of rows over all classes. */
static void merge_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct rafter_loss *const loss = &work->call->loss;
    for (int64_t index = task * MERGED_ROWS; index < rows_end(work, task); index++)
        work->stats[index] = rafter_loss_merged(loss, work->exchange, loss->rows, index, work->rank_prefix);
}

static void shared_gradient_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const int64_t chunks = work->plan->chunks;
    for (int64_t unit = task * work->plan->chunks_per_task; unit < units_end(work, task); unit++) {
        const int64_t index = unit / chunks, chunk = unit % chunks;
        const int64_t label = rafter_loss_label(&work->call->loss, index);
        const struct cross_entropy_row row = row_at(work, index, label);
        const struct rafter_row_gradient gradient = row_gradient(work->call, index, label, &work->stats[index]);
        columns_gradient(work, &row, chunk * CHUNK, chunk_end(work, chunk), &gradient);
    }
    if (work->plan->row.stream)
        work->kernels->fence();
}

/* Whether some row's statistics must be computed. The answer is the same on every rank: labels and
 * lse are. */
static bool needs_exchange(const struct cross_entropy_call *call) {
    for (int64_t index = 0; index < call->loss.rows; index++)
        if (needs_stats(call, index, rafter_loss_label(&call->loss, index)))
            return true;
    return false;
}

static rafter_status run_shared(rafter_context *context, struct work *work, double *sum) {
    const struct cross_entropy_call *const call = work->call;
    const int64_t rows = call->loss.rows, row_tasks = ceil_div(rows, MERGED_ROWS);
    int64_t first = call->loss.first_class;
    work->chunk_prefix[0] = work->rank_prefix[call->loss.class_group.rank];
    for (int64_t chunk = 0; chunk < work->plan->chunks; chunk++) {
        const int64_t end = call->loss.first_class + chunk_end(work, chunk);
        work->chunk_prefix[chunk + 1] = rafter_loss_add_weights(&call->loss, work->chunk_prefix[chunk], first, end);
        first = end;
    }
    if (needs_exchange(call)) {
        rafter_parallel(context, work->plan->tasks, record_task, work);
        rafter_parallel(context, row_tasks, send_task, work);
        RAFTER_TRY(rafter_loss_exchange(context, &call->loss, work->exchange, rows));
        rafter_parallel(context, row_tasks, merge_task, work);
    }
    for (int64_t index = 0; call->common.direction == RAFTER_FORWARD && index < rows; index++)
        *sum += rafter_loss_write_row(&call->loss, index, rafter_loss_label(&call->loss, index), &work->stats[index]);
    if (call->gradient)
        rafter_parallel(context, work->plan->tasks, shared_gradient_task, work);
    return RAFTER_OK;
}

/* Reads the labels and agrees with the other ranks. */
static rafter_status agree(rafter_context *context, struct cross_entropy_call *call, double *rank_prefix) {
    const rafter_status status = rafter_loss_read(context, &call->loss);
    const struct rafter_loss_terms terms = {.op = RAFTER_OP_INDEX_cross_entropy,
                                            .dtype = call->logits.dtype,
                                            .exchange = status == RAFTER_OK && needs_exchange(call)};
    return rafter_loss_agree(context, &call->loss, &terms, status, rank_prefix);
}

static rafter_status run_planned(rafter_context *context, const struct cross_entropy_call *call,
                                 const struct plan *plan, const void *kernels, char *workspace);

static rafter_status run_grouped(rafter_context *context, const struct cross_entropy_call *common,
                                 const struct plan *planned, const void *kernels, char *workspace) {
    struct cross_entropy_call call = *common;
    struct plan plan = *planned;
    RAFTER_TRY(agree(context, &call, plan.shared ? (double *)(void *)(workspace + plan.at.rank_prefix) : NULL));
    plan.tiles.tiling.class_weight_sum = call.loss.class_weight_sum;
    plan.tiles.tiling.denominator = call.loss.mean_denominator;
    return run_planned(context, &call, &plan, kernels, workspace);
}

/* ---- running --------------------------------------------------------------------------------- */

static rafter_status run_planned(rafter_context *context, const struct cross_entropy_call *call,
                                 const struct plan *plan, const void *kernels, char *workspace) {
    const bool forward = call->common.direction == RAFTER_FORWARD;
    struct work work = {.call = call, .plan = plan, .kernels = kernels};
    double sum = 0.0;
    if (plan->shared) {
        work.rank_prefix = (double *)(void *)(workspace + plan->at.rank_prefix);
        work.chunk_prefix = (double *)(void *)(workspace + plan->at.chunk_prefix);
        work.records = (struct rafter_row_record *)(void *)(workspace + plan->at.records);
        work.stats = (struct rafter_row_stats *)(void *)(workspace + plan->at.stats);
        work.exchange = workspace + plan->at.exchange;
        RAFTER_TRY(run_shared(context, &work, &sum));
    } else if (plan->split) {
        work.stats = (struct rafter_row_stats *)(void *)workspace;
        sum = run_split(context, &work);
    } else {
        work.sums = forward ? (double *)(void *)workspace : NULL;
        sum = plan->tiled ? cross_entropy_run_tiles(context, call, &plan->tiles, kernels, work.sums)
                          : run_rows(context, &work);
    }
    return forward ? rafter_loss_write_sum(context, &call->loss, sum) : RAFTER_OK;
}

static rafter_status run(rafter_context *context, const struct rafter_call *common, const void *plan,
                         const void *kernels, char *workspace) {
    const struct cross_entropy_call *const call = (const void *)common;
    return (rafter_loss_grouped(&call->loss) ? run_grouped : run_planned)(context, call, plan, kernels, workspace);
}

const struct rafter_variant_functions rafter_cross_entropy_on_cpu = {NULL, make_plan, run};
