/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cross_entropy in tiles: the CPU plan for short rows and for classes that are not contiguous. A run
 * is a range of rows that are a constant stride apart. A tile is a part of a run, or several whole
 * runs if these are short; a task is several tiles.
 */
#include <limits.h>
#include <string.h>

#include "core/kernel_memory.h"
#include "core/pages.h"
#include "core/sizes.h"
#include "core/threads.h"
#include "ops/cross_entropy/cpu_tiles.h"

enum {
    MOST_TASKS = 1024, /* the workspace has a number for each */
    LEAST_ROWS = 16,   /* of a tile: they fill a vector in every variant */
    UNIT_ROWS = 32,    /* tiles are multiples of this where they can be: whole vectors in every variant */
    FEW_TILES = 32,    /* with fewer tiles than this, tiles are as small as they can be */
    /* The most classes of contiguous rows. Longer rows are faster one at a time; in backward that holds
     * for shorter rows already, because a row alone takes little more than its exponentials. */
    SHORT_ROWS = 160,
    SHORT_ROWS_BACKWARD = 80
};

/* ---- plan ------------------------------------------------------------------------------------ */

static bool served(const struct cross_entropy_call *call) {
    const struct rafter_loss *const loss = &call->loss;
    const bool dense_weights = !rafter_loss_has(&loss->class_weight) || loss->class_weight.stride[0] == 1;
    return dense_weights && loss->classes > 0 && loss->classes <= INT_MAX && loss->rows > 0;
}

/* Elements from a run of rows to the next, if a run's elements are adjacent and runs evenly spaced; else 0. */
static int64_t run_stride(const rafter_view *view, int64_t run) {
    const int64_t row = view->stride[view->ndim - 2], class = view->stride[view->ndim - 1];
    return view->ndim == 3 && view->shape[1] == run && row == 1 && class == run ? view->stride[0] : 0;
}

bool cross_entropy_plan_tiles(const struct cross_entropy_call *call, struct cross_entropy_tiles *tiles) {
    if (!served(call))
        return false;
    const struct rafter_loss *const loss = &call->loss;
    const rafter_view *const z = &call->logits, *const dz = call->gradient ? &call->dlogits : z;
    const int64_t classes = loss->classes;
    struct cross_entropy_tiling *const t = &tiles->tiling;
    *tiles = (struct cross_entropy_tiles){
        .tiling = {.dtype = z->dtype,
                   .forward = loss->direction == RAFTER_FORWARD,
                   .gradient = call->gradient,
                   .stream = call->gradient && z->data != dz->data &&
                             rafter_should_stream(dz, cross_entropy_shortest_streamed),
                   .classes = classes,
                   .run = min64(z->shape[z->ndim - 2], dz->shape[dz->ndim - 2]),
                   .z_row = z->stride[z->ndim - 2],
                   .z_class = z->stride[z->ndim - 1],
                   .dz_row = dz->stride[dz->ndim - 2],
                   .dz_class = dz->stride[dz->ndim - 1],
                   .smoothing = loss->smoothing,
                   .z_loss = loss->z_loss,
                   .scale = loss->scale,
                   .softcap = loss->softcap,
                   .entropy = rafter_loss_has(&loss->entropy),
                   .argmax = rafter_loss_has(&loss->argmax),
                   .class_weight_sum = loss->class_weight_sum,
                   .denominator = loss->mean_denominator,
                   .weight = loss->smoothing != 0.0f ? (const float *)(const void *)loss->class_weight.data : NULL,
                   .lse_bound = cross_entropy_lse_bound(z->dtype)}};
    const bool contiguous = classes > 1 && t->z_class == 1 && t->dz_class == 1; /* one class: rows may be adjacent */
    const int64_t turned = cross_entropy_turned(t->gradient, t->softcap);
    const bool fits = classes <= (!contiguous  ? turned / LEAST_ROWS
                                  : t->forward ? min64(SHORT_ROWS, turned / LEAST_ROWS)
                                               : SHORT_ROWS_BACKWARD);
    const bool as_they_are = t->scale == 1.0f && t->softcap == 0.0f && !t->entropy && !t->argmax;
    const bool adjacent = !contiguous && t->z_row == 1 && t->dz_row == 1 && as_they_are;
    /* A run of fewer rows would leave lanes empty. If it has many classes, it is transposed in blocks (cpu_run.c). */
    t->direct = adjacent && t->run >= LEAST_ROWS && !call->common.batch_invariant;
    if (!t->direct && !fits)
        return false;
    int64_t rows = CROSS_ENTROPY_TILE;
    if (loss->rows < FEW_TILES * rows)
        rows = UNIT_ROWS;
    if (!t->direct)
        rows = min64(rows, turned / classes / LEAST_ROWS * LEAST_ROWS);
    if (t->run >= rows || t->direct) {
        rows = min64(rows, t->run);
        tiles->per_run = ceil_div(t->run, rows);
        tiles->tiles = loss->rows / t->run * tiles->per_run;
    } else {
        const int64_t whole = rows / t->run / LEAST_ROWS * LEAST_ROWS; /* runs that fill vectors */
        t->z_run = run_stride(z, t->run);
        t->dz_run = run_stride(dz, t->run);
        t->interleaved = t->run > 1 && whole > 0 && t->z_run > 0 && t->dz_run > 0;
        rows = (t->interleaved ? whole : rows / t->run) * t->run;
        tiles->tiles = ceil_div(loss->rows, rows);
    }
    tiles->rows = rows;
    tiles->per_task =
        max64(ceil_div(rafter_task_elements(loss->rows * classes), rows * classes), ceil_div(tiles->tiles, MOST_TASKS));
    tiles->tasks = ceil_div(tiles->tiles, tiles->per_task);
    return true;
}

/* ---- running --------------------------------------------------------------------------------- */

struct work {
    const struct cross_entropy_call *call;
    const struct cross_entropy_tiles *tiles;
    const struct cross_entropy_kernels *kernels;
    double *sums; /* per task; NULL in backward */
};

/* Reorders 4-byte numbers, one per row, from run by run to the order of an interleaved tile (see struct
 * cross_entropy_tiling). Rows of the runs that only fill vectors get `of_absent`. */
static void interleave(const struct cross_entropy_tile *tile, int64_t run, void *numbers, int32_t of_absent) {
    const int64_t pitch = tile->rows / run;
    int32_t from[CROSS_ENTROPY_TILE];
    memcpy(from, numbers, (size_t)(tile->runs * run) * sizeof *from);
    int32_t *to = numbers;
    for (int64_t r = 0; r < run; r++)
        for (int64_t i = 0; i < pitch; i++)
            *to++ = i < tile->runs ? from[i * run + r] : of_absent;
}
/* The inverse. */
static void by_run(const struct cross_entropy_tile *tile, int64_t run, void *numbers) {
    const int64_t pitch = tile->rows / run;
    int32_t from[CROSS_ENTROPY_TILE];
    memcpy(from, numbers, (size_t)tile->rows * sizeof *from);
    int32_t *to = numbers;
    for (int64_t i = 0; i < tile->runs; i++)
        for (int64_t r = 0; r < run; r++)
            *to++ = from[r * pitch + i];
}

/* Reads the numbers of `rows` rows from `first` on, in the order of the tile's rows. */
static void load_numbers(const struct work *work, const rafter_view *view, int64_t first, int64_t rows,
                         const struct cross_entropy_tile *tile, float *numbers) {
    const struct cross_entropy_tiling *const tiling = &work->tiles->tiling;
    const bool all_alike = !rafter_loss_has(view) || view->numel == 1;
    rafter_loss_load_rows(view, first, all_alike ? tile->rows : rows, numbers);
    if (tiling->interleaved && !all_alike)
        interleave(tile, tiling->run, numbers, 0);
}

/* Fills in a tile of `rows` rows from `first` on. */
static void load_tile(const struct work *work, int64_t first, int64_t rows, struct cross_entropy_tile *tile) {
    const struct cross_entropy_call *const call = work->call;
    const struct rafter_loss *const loss = &call->loss;
    const rafter_view *const z = &call->logits, *const dz = &call->dlogits;
    const bool interleaved = work->tiles->tiling.interleaved;
    const int64_t run = work->tiles->tiling.run;
    tile->runs = interleaved ? rows / run : 0;
    tile->rows = interleaved ? round_up(tile->runs, LEAST_ROWS) * run : rows;
    for (int64_t row = 0, i = 0; row < rows; row += run, i++) {
        tile->z[i] = rafter_at(z, rafter_offset(z, 0, z->ndim - 1, first + row));
        if (call->gradient)
            tile->dz[i] = rafter_at(dz, rafter_offset(dz, 0, dz->ndim - 1, first + row));
    }
    rafter_loss_labels(loss, first, rows, tile->label);
    if (interleaved)
        interleave(tile, run, tile->label, -1);
    load_numbers(work, &loss->row_weight, first, rows, tile, tile->row_weight);
    if (rafter_loss_has(&loss->class_weight)) {
        const float *const weight = (const float *)(const void *)loss->class_weight.data; /* contiguous: see served */
        for (int64_t i = 0; i < tile->rows; i++) /* an ignored row's is not used; a branch would be mispredicted */
            tile->label_weight[i] = weight[tile->label[i] & ~(tile->label[i] >> 31)];
    } else
        load_numbers(work, &loss->class_weight, first, rows, tile, tile->label_weight);
    if (call->gradient)
        load_numbers(work, &loss->dloss, first, rows, tile, tile->dloss);
    tile->given_lse = loss->direction == RAFTER_BACKWARD && rafter_loss_has(&loss->lse);
    if (tile->given_lse)
        load_numbers(work, &loss->lse, first, rows, tile, tile->lse);
}

static void store_tile(const struct rafter_loss *loss, int64_t first, const struct cross_entropy_tiling *tiling,
                       struct cross_entropy_tile *tile) {
    if (tiling->interleaved) {
        const struct {
            bool wanted;
            void *numbers;
        } outputs[] = {{loss->reduction == RAFTER_NONE || rafter_loss_has(&loss->row_loss), tile->row_loss},
                       {rafter_loss_has(&loss->lse), tile->lse},
                       {rafter_loss_has(&loss->logprob), tile->logprob},
                       {tiling->entropy, tile->entropy},
                       {tiling->argmax, tile->argmax}};
        for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
            if (outputs[i].wanted)
                by_run(tile, tiling->run, outputs[i].numbers);
        tile->rows = tile->runs * tiling->run;
    }
    if (loss->reduction == RAFTER_NONE)
        rafter_loss_store_rows(&loss->loss, first, tile->rows, tile->row_loss);
    rafter_loss_store_rows(&loss->row_loss, first, tile->rows, tile->row_loss);
    rafter_loss_store_rows(&loss->lse, first, tile->rows, tile->lse);
    rafter_loss_store_rows(&loss->logprob, first, tile->rows, tile->logprob);
    rafter_loss_store_rows(&loss->entropy, first, tile->rows, tile->entropy);
    rafter_loss_store_argmax(loss, first, tile->rows, tile->argmax);
}

static void tiles_task(void *arg, int64_t task) {
    const struct work *const work = arg;
    const struct cross_entropy_tiles *const tiles = work->tiles;
    const int64_t run = tiles->tiling.run, all = work->call->loss.rows;
    struct cross_entropy_tile *const tile = rafter_task_memory();
    _Static_assert(sizeof *tile <= RAFTER_TASK_BYTES, "raise RAFTER_TASK_BYTES");
    double sum = 0.0;
    memset(tile, 0, sizeof *tile);
    for (int64_t i = task * tiles->per_task; i < min64((task + 1) * tiles->per_task, tiles->tiles); i++) {
        int64_t first = i * tiles->rows, end = all;
        if (tiles->per_run) {
            first = i / tiles->per_run * run + i % tiles->per_run * tiles->rows;
            end = (i / tiles->per_run + 1) * run;
        }
        load_tile(work, first, min64(tiles->rows, end - first), tile);
        sum += work->kernels->tile(&tiles->tiling, tile);
        if (work->sums)
            store_tile(&work->call->loss, first, &tiles->tiling, tile);
    }
    if (work->sums)
        work->sums[task] = sum;
    if (tiles->tiling.stream)
        work->kernels->fence();
}

double cross_entropy_run_tiles(const rafter_context *context, const struct cross_entropy_call *call,
                               const struct cross_entropy_tiles *tiles, const struct cross_entropy_kernels *kernels,
                               double *sums) {
    struct work work = {.call = call, .tiles = tiles, .kernels = kernels, .sums = sums};
    double sum = 0.0;
    rafter_parallel(context, tiles->tasks, tiles_task, &work);
    for (int64_t task = 0; sums && task < tiles->tasks; task++)
        sum += sums[task];
    return sum;
}
