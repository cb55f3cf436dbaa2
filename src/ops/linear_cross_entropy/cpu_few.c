/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cross_entropy on the CPU with few rows or few classes: see struct lce_few, and cpu_run.h. */
#include <string.h>

#include "core/kernel_memory.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/linear_cross_entropy/cpu_run.h"

static bool few_rows(const struct lce_run *run) {
    return run->plan->few == LCE_FEW_ROWS;
}

void lce_few_begin(struct lce_run *run) {
    const struct linear_cross_entropy_call *const c = run->call;
    const int64_t depth = run->problem->depth;
    const struct lce_matrix x = {.dtype = c->x.dtype,
                                 .rows = run->rows,
                                 .columns = depth,
                                 .column_stride = c->x.stride[c->x.ndim - 1],
                                 .row = run->b.x_row};
    const struct lce_matrix w = {.dtype = c->x.dtype,
                                 .rows = run->problem->classes,
                                 .columns = depth,
                                 .data = rafter_at(&c->weight, 0),
                                 .row_stride = c->weight.stride[0],
                                 .column_stride = c->weight.stride[1]};
    const struct lce_matrix *const few = few_rows(run) ? &x : &w;
    run->few = (struct lce_few){.streamed = few_rows(run) ? w : x,
                                .few = run->b.few,
                                .joined = run->b.few_joined,
                                .count = few->rows,
                                .pitch = lce_few_pitch(depth)};
    run->kernels->few_pack(few, run->few.pitch, run->b.few, run->b.few_joined);
}

/* The rows of a block. */
struct range {
    int64_t from, to;
};

static struct range rows_of(const struct lce_run *run, int64_t block) {
    return (struct range){lce_few_begins(block), min64(lce_few_begins(block + 1), run->few.streamed.rows)};
}

/* Where the logits of the streamed row `row` begin, in floats. */
static int64_t logits_at(const struct lce_run *run, int64_t row) {
    const struct lce_format *const f = &run->problem->format;
    if (few_rows(run))
        return row * lce_out_stride(f, run->few.count, 0);
    return lce_out_at(f, run->few.count, run->few.streamed.rows, 0, row / LCE_COLUMNS) + row % LCE_COLUMNS;
}

/* Floats from the logits of one class to those of the next. */
static int64_t class_stride(const struct lce_run *run, int64_t row) {
    const struct lce_format *const f = &run->problem->format;
    return few_rows(run) ? lce_out_stride(f, run->few.count, 0)
                         : lce_out_stride(f, run->few.streamed.rows, row / LCE_COLUMNS);
}

/* Blocks of a part: the plan's, whether rows are ignored or not. */
static int64_t part_blocks(const struct lce_run *run) {
    return lce_few_part(few_rows(run) ? run->problem->classes : run->problem->rows);
}

struct few_tasks {
    const struct lce_run *run;
    const struct lce_logits *logits;
    const struct lce_gradient *gradient;
    int64_t parts;
};

/* ---- logits ---------------------------------------------------------------------------------- */

static void logits_task(void *arg, int64_t block) {
    const struct few_tasks *const t = arg;
    const struct lce_run *const run = t->run;
    const struct range rows = rows_of(run, block);
    const int64_t stride = class_stride(run, rows.from), high = rows.to - rows.from, last = rows.to % LCE_COLUMNS;
    float *const out = t->logits->product.out + logits_at(run, rows.from);
    /* Kernels read whole vectors of rows. */
    if (few_rows(run))
        memset(out, 0, (size_t)(high * stride) * sizeof *out);
    else if (rows.to == run->few.streamed.rows && last > 0)
        for (int64_t v = 0; v < run->few.count; v++)
            memset(out + v * stride + high, 0, (size_t)(stride - last) * sizeof *out);
    run->kernels->few_logits(&run->few, rows.from, rows.to, out, few_rows(run) ? stride : 1,
                             few_rows(run) ? 1 : stride);
}

/* The cost of the products, in elements that could be packed in the same time. */
static double work(const struct lce_run *run) {
    return (double)run->few.streamed.rows * (double)run->problem->depth * (1.0 + (double)run->few.count / 32);
}

void lce_few_logits(const struct lce_run *run, const struct lce_logits *logits) {
    struct few_tasks tasks = {.run = run, .logits = logits};
    lce_run_tasks(run, "logits", lce_few_blocks(run->few.streamed.rows), work(run), logits_task, &tasks);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* dz of a block as left operands: by streamed row, and by row of the few. */
struct few_dz {
    char *by_streamed, *by_few;
};

static void form_dz(const struct lce_run *run, const struct lce_gradient *whole, int64_t block, struct few_dz dz) {
    const struct range rows = rows_of(run, block);
    struct lce_gradient g = *whole;
    g.u += logits_at(run, rows.from);
    g.stride = class_stride(run, rows.from);
    if (few_rows(run)) {
        g.m = rows.to - rows.from;
        g.weight += rows.from;
        g.first_class += rows.from;
        g.by_class = dz.by_streamed;
        g.by_row = dz.by_few;
        g.sum = g.sum ? g.sum + rows.from : NULL;
    } else {
        g.n = rows.to - rows.from;
        g.label += rows.from;
        g.pivot += rows.from, g.p += rows.from, g.target += rows.from, g.spread += rows.from;
        if (g.level)
            g.level += rows.from, g.tilt += rows.from;
        g.by_row = dz.by_streamed;
        g.by_class = dz.by_few;
        g.sum = g.sum ? g.sum + block * g.m : NULL;
    }
    run->kernels->gradient(run->operands, &g, 0, 0);
}

/* Columns of the block behind this one, into L2: few_sum reads its rows side by side, which the hardware does not
 * foresee. Loads, because the processor drops most of so many prefetches. */
static void fetch_next(const struct lce_run *run, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const struct lce_matrix *const m = &run->few.streamed;
    const int64_t bytes = rafter_dtype_bytes(m->dtype);
    for (int64_t i = row + LCE_FEW_BLOCK; i < min64(row + LCE_FEW_BLOCK + rows, m->rows); i++) {
        const char *const p = lce_row(m, i, bytes) + column * bytes;
        for (int64_t at = 0; at < columns * bytes; at += 64)
            (void)*(const volatile char *)(p + at);
    }
}

_Static_assert(32 * LCE_COLUMNS * sizeof(float) <= RAFTER_TASK_BYTES, "raise RAFTER_TASK_BYTES: the largest panel");

/* The gradient of the streamed rows of a block. */
static void store_streamed(const struct lce_run *run, struct range rows, const char *dz) {
    const struct lce_format *const f = &run->problem->format;
    const bool is_dx = !few_rows(run);
    float *const out = rafter_task_memory();
    for (int64_t first = rows.from; first < rows.to; first += f->rows)
        for (int64_t column = 0; column < run->problem->depth; column += LCE_COLUMNS) {
            const int64_t high = min64(f->rows, rows.to - first),
                          columns = min64(LCE_COLUMNS, run->problem->depth - column);
            fetch_next(run, first, high, column, columns);
            run->kernels->few_apply(&run->few, dz + lce_left_row(f, first - rows.from), high, column, columns, out);
            for (int64_t i = 0; i < high; i++)
                lce_store(run, is_dx, !is_dx && run->call->accumulate_into_dweight, first + i, column, columns,
                          out + i * LCE_COLUMNS);
        }
}

static void gradients_task(void *arg, int64_t part) {
    const struct few_tasks *const t = arg;
    const struct lce_run *const run = t->run;
    const struct lce_format *const f = &run->problem->format;
    const int64_t per = part_blocks(run), blocks = lce_few_blocks(run->few.streamed.rows);
    char *const memory = run->b.few_dz + part * lce_few_dz_bytes(f);
    const struct few_dz dz = {memory,
                              run->operands == RAFTER_BF16 ? memory + lce_left_bytes(f, LCE_FEW_BLOCK, LCE_FEW) : NULL};
    float *const sums = run->b.few_sums ? run->b.few_sums + part * run->few.count * run->few.pitch : NULL;
    const bool streamed = few_rows(run) ? run->problem->dweight : run->problem->dx;
    for (int64_t block = part * per; block < min64((part + 1) * per, blocks); block++) {
        const struct range rows = rows_of(run, block);
        form_dz(run, t->gradient, block, dz);
        if (sums)
            run->kernels->few_sum(&run->few, &(struct lce_few_block){.first_row = rows.from,
                                                                     .rows = rows.to - rows.from,
                                                                     .dz_by_streamed = dz.by_streamed,
                                                                     .dz_by_few = dz.by_few,
                                                                     .sums = sums,
                                                                     .accumulate = block > part * per});
        if (streamed)
            store_streamed(run, rows, dz.by_streamed);
    }
}

/* Sums a part of one row of the few over all parts of the streamed rows, and stores it. */
static void merge_task(void *arg, int64_t task) {
    const struct few_tasks *const t = arg;
    const struct lce_run *const run = t->run;
    const int64_t chunks = ceil_div(run->problem->depth, LCE_COLUMNS), row = task / chunks;
    const int64_t column = task % chunks * LCE_COLUMNS, columns = min64(LCE_COLUMNS, run->problem->depth - column);
    float *const sum = run->b.few_sums + row * run->few.pitch + column;
    for (int64_t part = 1; part < t->parts; part++)
        for (int64_t i = 0; i < columns; i++)
            sum[i] += sum[part * run->few.count * run->few.pitch + i];
    lce_store(run, few_rows(run), !few_rows(run) && run->call->accumulate_into_dweight, row, column, columns, sum);
}

void lce_few_gradients(const struct lce_run *run, const struct lce_gradient *gradient) {
    struct few_tasks tasks = {
        .run = run, .gradient = gradient, .parts = ceil_div(lce_few_blocks(run->few.streamed.rows), part_blocks(run))};
    lce_run_tasks(run, "gradients", tasks.parts, 2 * work(run), gradients_task, &tasks);
    if (run->b.few_sums)
        lce_run_tasks(run, "merge", run->few.count * ceil_div(run->problem->depth, LCE_COLUMNS),
                      (double)(tasks.parts * run->few.count * run->problem->depth), merge_task, &tasks);
}
