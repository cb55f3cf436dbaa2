/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_cross_entropy on CUDA: matrix products, and between them kernels that turn fp32 logits into statistics of rows
 * and into dz, the gradient of the logits, in the inputs' dtype.
 *
 *     fast      for each group of rows: logits of all classes; statistics; dz, written over the front of each row of
 *               logits; the group's dx = dz W; and dW += dz^T x, which grows from group to group
 *     compact   for each slice of classes: logits, group by group, and statistics. Then again for each slice: logits,
 *               dz of all rows, the slice's dW = dz^T x, and dx += dz W, which grows from slice to slice
 *
 * The products are cuBLASLt's; but on Hopper, for 16-bit inputs and most options, our own: then the first is fused with
 * what follows it (fused.cuh), and no logit is ever stored; dx leaves its product in its own dtype (gradients.cuh); and
 * rows that are ignored are dropped before anything is multiplied: the products take their number from the device.
 * Fast then keeps, instead of dz, the exponentials e^(u - pivot) of a group as they come out of the product, before the
 * sums of its rows are known: what a row's are to be multiplied by meets x on its way into dW, and dx on its way out.
 * The label's element of dz goes its own way, in fp32. Of a first group, or only one, some of the exponentials lie
 * where dW will be; where dW is summed up in the workspace, all of each group's. Where there are few classes,
 * exponentials are turned into dz in their place.
 *
 * What all rows share (dloss, denominator, scale) is no part of dz: it meets the gradients when they are stored, as
 * `alpha`, a number on the device. So dz has the size of probabilities and loses nothing to its dtype.
 */
#include "cuda/launch.cuh"
#include "ops/linear_cross_entropy/cuda_plan.cuh"

#include <cuda_runtime.h>

#include <type_traits>

namespace {

struct Run {
    rafter_context *context;
    const linear_cross_entropy_call *call;
    Plan plan;
    Buffers b;
    Loss loss;
    float row_scale; /* see prepare */
    int64_t blocks;  /* of finish_rows so far */

    cudaStream_t stream() const {
        return context->cuda_state->stream;
    }
};

Launch over(int64_t items, int threads, int64_t most = 1 << 20) {
    const int64_t blocks = ceil_div<int64_t>(items, threads);
    return {blocks < 1 ? 1 : blocks < most ? blocks : most, threads};
}

/* Of a kernel that begins with wait_for_previous_kernel: it is there when that one ends. */
Launch following(int64_t blocks, int threads) {
    Launch how = {blocks, threads};
    how.overlaps = true;
    return how;
}

/* Rows of x or W from `row` on. */
Operand rows_at(const char *data, int64_t stride, rafter_dtype dtype, int64_t row) {
    return {data + row * stride * rafter_dtype_bytes(dtype), stride, false};
}

Operand x_rows(const Run &run, int64_t first) {
    const Plan &plan = run.plan;
    if (plan.direct_x())
        return rows_at(run.call->x.data, plan.x.stride, plan.dtype, first);
    return rows_at(run.b.x, plan.depth_stride, plan.dtype, plan.packs_groups() ? 0 : first);
}

/* ---- kept rows ------------------------------------------------------------------------------- */

fused::Kept kept_of(const Run &run) {
    return {run.b.order, &run.b.common->kept, run.b.classes, run.plan.rows};
}

tiles::Meeting meeting_of(const Run &run) {
    return {run.b.meeting, run.b.counters, run.plan.meeting_room};
}

/* x as products take it if all rows are kept, and the copy that they take otherwise: see fused::Kept. */
fused::Matrix x_matrix(const Run &run) {
    const Plan &plan = run.plan;
    if (!plan.x.plain)
        return {run.b.x, plan.rows, plan.depth, plan.depth_stride};
    return {run.call->x.data, plan.rows, plan.depth, plan.x.stride};
}

fused::Matrix copy_matrix(const Run &run) {
    const Plan &plan = run.plan;
    if (plan.copies_into_dx())
        return {run.call->dx.data, plan.rows, plan.depth,
                plan.dx_lies.stride * rafter_dtype_bytes(run.call->dx.dtype) / rafter_dtype_bytes(plan.dtype)};
    if (plan.copies_x())
        return {run.b.x, plan.rows, plan.depth, plan.depth_stride};
    return x_matrix(run);
}

template <typename T> KeptX<T> kept_x(const Run &run) {
    const fused::Matrix x = x_matrix(run);
    return {kept_of(run), static_cast<const T *>(x.data), x.stride, !run.plan.x.plain};
}

/* Blocks that take rows in turn. */
Launch taking_rows(const Run &run) {
    const int64_t most = 8 * run.context->cuda_state->multiprocessors;
    return following(run.plan.rows < most ? run.plan.rows : most, ZERO_THREADS);
}

/* x of the kept rows, for prepare. */
CopyOfKept copy_of_kept(const Run &run) {
    const rafter_view &x = run.call->x;
    const int last = x.ndim - 1;
    const fused::Matrix to = copy_matrix(run);
    CopyOfKept copy = {};
    if (!run.plan.fused || to.data == x.data)
        return copy;
    copy.x = rows_of(x, last);
    copy.step = x.stride[last];
    copy.columns = static_cast<int>(run.plan.depth);
    copy.wide = run.plan.x.plain;
    copy.to = static_cast<uint16_t *>(const_cast<void *>(to.data));
    copy.stride = to.stride;
    return copy;
}

Operand weight_rows(const Run &run, int64_t first) {
    const Plan &plan = run.plan;
    if (plan.weight.plain)
        return rows_at(run.call->weight.data, plan.weight.stride, plan.dtype, first);
    return rows_at(run.b.weight, plan.depth_stride, plan.dtype, first);
}

void pack_rows(const Run &run, const rafter_view &view, int64_t first, int64_t rows, char *to) {
    const int last = view.ndim - 1;
    const Rows from = rows_of(view, last);
    const int64_t step = view.stride[last], columns = view.shape[last];
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, over(rows * columns, 256), pack<T>, from, step, first, rows, columns, run.loss,
               &view == &run.call->x, reinterpret_cast<T *>(to), run.plan.depth_stride);
    });
}

rafter_status multiply(const Run &run, Product p) {
    p.dtype = run.plan.dtype;
    return rafter_cuda_multiply(run.context, p, run.b.products, run.plan.product_bytes);
}

Tile tile_at(const Run &run, int64_t first_row, int64_t rows, int64_t first_class, int64_t classes) {
    return {
        run.b.z, run.plan.tile_stride, first_row, rows, first_class, classes, run.call->bias.data ? run.b.bias : NULL};
}

/* z of the tile = x W^T. */
rafter_status form_logits(const Run &run, const Tile &t) {
    if (run.plan.depth == 0)
        return rafter_cuda_check(run.context, "linear_cross_entropy",
                                 cudaMemsetAsync(t.z, 0, t.rows * t.stride * sizeof(float), run.stream()));
    Product p = {};
    p.out_dtype = RAFTER_F32;
    p.m = t.rows;
    p.n = t.classes;
    p.k = run.plan.depth;
    p.a = x_rows(run, t.first_row);
    p.b = weight_rows(run, t.first_class);
    p.b.turned = true;
    p.c = t.z;
    p.c_stride = t.stride;
    return multiply(run, p);
}

/* Threads that take a row of n columns, or a part of one. */
int threads_for(int64_t n) {
    return power_at_least(ceil_div<int64_t>(n, PACKS * 4), 64, MOST_THREADS);
}

/* f(zero, options), with a zero of the inputs' dtype and the options as a constant. */
template <typename F> void for_options(const Run &run, F f) {
    for_dtype(run.plan.dtype, [&](auto zero) {
        if (needs_full(run.call->loss))
            f(zero, std::integral_constant<int, FULL>());
        else
            f(zero, std::integral_constant<int, PLAIN>());
    });
}

void gather_statistics(const Run &run, const Tile &t, bool first) {
    const int parts = run.plan.parts;
    /* Parts are of MOST_PART columns; a row of fewer takes fewer threads. */
    const Launch how = {t.rows * parts, threads_for(t.classes)};
    for_options(run, [&](auto zero, auto options) {
        launch(run.context, how, gather<decltype(zero), options.value>, t, run.loss, parts, first,
               run.b.stats + (run.plan.fast ? 0 : t.first_row));
    });
}

void finish(Run *run, int64_t first, int64_t rows) {
    if (rows == 0)
        return;
    const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS);
    launch(run->context, {blocks, ROW_THREADS}, finish_rows, run->loss, static_cast<const int *>(run->b.order), first,
           rows, static_cast<const Gathered<FULL> *>(run->b.stats), run->plan.parts,
           static_cast<double>(run->row_scale), run->b.gradients, run->b.of_block + run->blocks);
    run->blocks += blocks;
}

/* dz of the tile at `dz`; and dbias += its sum over rows. */
void differentiate(const Run &run, const Tile &t, char *dz, bool first_rows) {
    for_options(run, [&](auto zero, auto options) {
        typedef decltype(zero) T;
        const RowGradient *gradients = run.b.gradients;
        if (run.plan.dbias)
            launch(run.context, {ceil_div<int64_t>(t.classes, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS},
                   sum_dz<T, options.value>, t, run.loss, gradients, first_rows, run.b.dbias);
        if (run.plan.dx || run.plan.dweight)
            launch(run.context, {t.rows, threads_for(t.classes)}, write_dz<T, options.value>, t, run.loss, gradients,
                   reinterpret_cast<T *>(dz), run.plan.dz_stride);
    });
}

/* All of a tile of whole rows in one pass. */
void turn(Run *run, const Tile &t, char *dz) {
    for_options(*run, [&](auto zero, auto options) {
        typedef decltype(zero) T;
        launch(run->context, {t.rows, threads_for(t.classes)}, turn_rows<T, options.value>, t, run->loss,
               static_cast<double>(run->row_scale), run->b.gradients, run->b.of_block + run->blocks,
               reinterpret_cast<T *>(dz), run->plan.dz_stride);
    });
    run->blocks += t.rows;
}

void store_rows(const Run &run, const rafter_view &view, const Lying &lies, bool add, int64_t first, int64_t rows,
                const float *sums) {
    const int last = view.ndim - 1;
    const int64_t columns = view.shape[last], wide = 16 / rafter_dtype_bytes(view.dtype);
    const Out out = {rows_of(view, last), columns > 1 ? view.stride[last] : 1, add};
    const float *alpha = &run.b.common->alpha;
    for_dtype(view.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        if (sums && !add && lies.plain && lies.stride == columns && run.plan.depth_stride == columns &&
            columns % wide == 0)
            launch(run.context, over(rows * columns / wide, 256, INT64_MAX), store_wide<T>,
                   reinterpret_cast<T *>(view.data) + first * columns, rows * columns / wide, sums, alpha);
        else
            launch(run.context, over(rows * columns, 256), store<T>, out, first, rows, columns, sums,
                   run.plan.depth_stride, alpha);
    });
}

/* dz, or exponentials in its place, of some rows and the classes from first_class on. */
struct Dz {
    char *data;
    int64_t stride, first_class, classes;

    Dz from(int64_t row, rafter_dtype dtype) const {
        return {data + row * stride * rafter_dtype_bytes(dtype), stride, first_class, classes};
    }
};

/* dx of the rows [first, first + rows), from dz of theirs. `add`: to what the steps before have left. */
rafter_status multiply_dx(const Run &run, const Dz &dz, int64_t first, int64_t rows, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dx = run.call->dx;
    Product p = {};
    p.m = rows;
    p.n = plan.depth;
    p.k = dz.classes;
    p.a = {dz.data, dz.stride, false};
    p.b = weight_rows(run, dz.first_class);
    p.add = add;
    if (plan.direct_dx()) {
        p.out_dtype = dx.dtype;
        p.c = dx.data + first * plan.dx_lies.stride * rafter_dtype_bytes(dx.dtype);
        p.c_stride = plan.dx_lies.stride;
        p.alpha = &run.b.common->alpha;
    } else {
        p.out_dtype = RAFTER_F32;
        p.c = run.b.dx + (plan.fast ? 0 : first * plan.depth_stride);
        p.c_stride = plan.depth_stride;
    }
    return multiply(run, p);
}

/* dW of dz's classes, from its rows [first, first + rows), likewise. */
rafter_status multiply_dweight(const Run &run, const Dz &dz, int64_t first, int64_t rows, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    Product p = {};
    p.m = dz.classes;
    p.n = plan.depth;
    p.k = rows;
    p.a = {dz.data, dz.stride, true};
    p.b = x_rows(run, first);
    p.add = add;
    if (plan.direct_dweight()) {
        p.out_dtype = dweight.dtype;
        p.c = dweight.data + dz.first_class * plan.dweight_lies.stride * rafter_dtype_bytes(dweight.dtype);
        p.c_stride = plan.dweight_lies.stride;
        p.alpha = &run.b.common->alpha;
        p.add |= run.call->accumulate_into_dweight;
    } else {
        p.out_dtype = RAFTER_F32;
        p.c = run.b.dweight;
        p.c_stride = plan.depth_stride;
    }
    return multiply(run, p);
}

/* ---- fused ----------------------------------------------------------------------------------- */

fused::Matrix weight_matrix(const Run &run) {
    const Operand w = weight_rows(run, 0);
    return {w.data, run.plan.classes, run.plan.depth, w.stride};
}

fused::Matrix dz_matrix(const Dz &dz, int64_t rows) {
    return {dz.data, rows, dz.classes, dz.stride};
}

template <int MODE> rafter_status run_fused(const Run &run, fused::Task task, const Dz &out = {}) {
    task.kept = kept_of(run);
    task.meeting = meeting_of(run);
    task.depth = static_cast<int>(run.plan.depth);
    task.scale = run.loss.scale;
    task.bias = run.call->bias.data ? run.b.bias : NULL;
    task.z_label = run.b.z_label;
    task.gradients = run.b.gradients;
    task.out = out.data;
    task.out_stride = out.stride;
    return fused::run<MODE>(run.context, run.plan.dtype, x_matrix(run), copy_matrix(run), weight_matrix(run), task);
}

/* dW of dz's classes, from kept rows [first, first + rows), which dz has. `add`: to what the groups before have left.
 */
rafter_status fused_dweight(const Run &run, const Dz &dz, int64_t first, int64_t rows, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    fused::DweightTask task = {};
    task.kept = kept_of(run);
    task.meeting = meeting_of(run);
    task.first_row = first;
    task.rows = rows;
    task.classes = dz.classes;
    task.depth = plan.depth;
    fused::Matrix x = x_matrix(run), copy = copy_matrix(run);
    if (plan.exponentials()) {
        x = copy = {run.b.x_scaled, plan.first_group, plan.depth, plan.depth_stride};
        task.scaled = x.rows;
    }
    fused::Matrix out = {run.b.dweight, dz.classes, plan.depth, plan.depth_stride};
    if (plan.direct_dweight()) {
        out.stride = plan.dweight_lies.stride;
        out.data = dweight.data + dz.first_class * out.stride * rafter_dtype_bytes(dweight.dtype);
        task.alpha = &run.b.common->alpha;
        add |= run.call->accumulate_into_dweight;
    }
    task.out = const_cast<void *>(out.data);
    task.out_stride = out.stride;
    return fused::run_dweight(run.context, plan.dtype, dz_matrix(dz, rows), x, copy, out,
                              plan.direct_dweight() ? dweight.dtype : RAFTER_F32, add, task);
}

/* dx of kept rows out of their sums. */
void store_dx_rows(const Run &run, int64_t first, int64_t rows) {
    const Plan &plan = run.plan;
    const rafter_view &dx = run.call->dx;
    const int last = dx.ndim - 1;
    const fused::Matrix w = weight_matrix(run);
    fused::for_dtypes(plan.dtype, dx.dtype, [&](auto zero, auto dx_zero) {
        typedef decltype(zero) T;
        launch(run.context, following(rows, LABEL_THREADS), store_dx<T, decltype(dx_zero)>, run.loss, kept_of(run),
               first, rows_of(dx, last), dx.shape[last] > 1 ? dx.stride[last] : 1, plan.dx_lies.plain, plan.depth,
               static_cast<const float *>(run.b.dx), plan.depth_stride,
               static_cast<const float *>(&run.b.common->alpha),
               static_cast<const RowGradient *>(plan.exponentials() ? run.b.gradients : NULL),
               static_cast<const T *>(w.data), w.stride);
    });
}

/* dx of kept rows [first, first + rows), from dz of theirs in one part or two; or its sums, to which a slice adds. */
rafter_status fused_dx(const Run &run, const Dz &dz, const Dz &behind, int64_t first, int64_t rows, bool add) {
    const Plan &plan = run.plan;
    const rafter_view &dx = run.call->dx;
    fused::DxTask task = {};
    task.kept = kept_of(run);
    task.meeting = meeting_of(run);
    task.first_row = first;
    task.rows = rows;
    task.classes = dz.classes + behind.classes;
    task.depth = plan.depth;
    task.in_front = dz.classes;
    task.first_class = dz.first_class;
    task.gradients = plan.exponentials() ? run.b.gradients : NULL;
    const fused::Matrix w = weight_matrix(run), one = dz_matrix(dz, rows),
                        other = behind.classes > 0 ? dz_matrix(behind, rows) : one,
                        sums = {run.b.dx, plan.dx_rows, plan.depth, plan.depth_stride},
                        results = {dx.data, first + rows, plan.depth, plan.dx_lies.stride};
    task.weight = w.data;
    task.weight_stride = w.stride;
    task.alpha = &run.b.common->alpha;
    task.dx = dx.data;
    task.dx_stride = plan.dx_lies.stride;
    if (plan.direct_dx())
        return fused::run_dx<fused::RESULTS>(run.context, plan.dtype, one, other, w, dx.dtype, results, task);
    if (add)
        return fused::run_dx<fused::MORE_SUMS>(run.context, plan.dtype, one, other, w, dx.dtype, sums, task);
    return fused::run_dx<fused::SUMS>(run.context, plan.dtype, one, other, w, dx.dtype, sums, task);
}

fused::Task statistics_task(const Run &run, int64_t first, int64_t rows) {
    fused::Task task = {};
    task.first_row = first;
    task.rows = rows;
    task.classes = run.plan.classes;
    task.stats = run.b.tiles;
    task.tiles = static_cast<int>(fused::tiles_across(run.plan.classes));
    return task;
}

/* Rows that a warp of finish_tiles takes: so many, if they have few tiles, that all warps run at the same time. */
int rows_of_warp(const Run &run, int64_t rows, int64_t tiles) {
    constexpr int FEW = 8;
    const int64_t warps = run.context->cuda_state->multiprocessors * ROW_BLOCKS * (ROW_THREADS / WARP);
    const int64_t each = tiles <= FEW ? ceil_div(rows, warps) : 1;
    return static_cast<int>(each < WARP ? each : WARP);
}

/* `turned`: exponentials that become dz. */
void finish_fused(Run *run, int64_t first, int64_t rows, const Dz &turned = {}) {
    const int64_t tiles = fused::tiles_across(run->plan.classes);
    const int each = rows_of_warp(*run, rows, tiles);
    const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS / WARP * each);
    launch(run->context, following(blocks, ROW_THREADS), finish_tiles<bf16>, run->loss, kept_of(*run), first, rows,
           each, static_cast<const RowStats *>(run->b.tiles), static_cast<int>(tiles),
           static_cast<const float *>(run->b.z_label), static_cast<double>(run->row_scale), run->b.gradients,
           run->b.labels, reinterpret_cast<bf16 *>(turned.data), turned.stride, run->b.of_block + run->blocks);
    run->blocks += blocks;
}

/* Where fast has a group's dz: in one or two parts. */
struct Parts {
    Dz part[2];
    int count;
};

Parts parts_of(const Run &run, int64_t hosted) {
    const Plan &plan = run.plan;
    const int64_t before = plan.classes - hosted;
    if (!plan.fused)
        return {{{reinterpret_cast<char *>(run.b.z), plan.dz_stride, 0, plan.classes}}, 1};
    char *const own = plan.lends ? run.call->dweight.data : run.b.dz;
    return {{{own, rounded(before, 8), 0, before}, {run.call->dweight.data, rounded(hosted, 8), before, hosted}},
            hosted > 0 ? 2 : 1};
}

/* Exponentials of a group, as dz is; and x_scaled, or else dz itself in their place. */
rafter_status form_exponentials(Run *run, int64_t first, int64_t rows, const Parts &dz) {
    const Plan &plan = run->plan;
    fused::Task task = statistics_task(*run, first, rows);
    task.sample = plan.exponentials() ? run->b.sample + first : NULL;
    for (int i = 0; i < dz.count; i++) {
        task.first_class = dz.part[i].first_class;
        task.classes = dz.part[i].classes;
        task.stats = run->b.tiles + task.first_class / fused::CLASSES;
        RAFTER_TRY(run_fused<fused::EXPONENTIALS>(*run, task, dz.part[i]));
    }
    finish_fused(run, first, rows, plan.turns_exponentials() ? dz.part[0] : Dz{});
    if (plan.turns_exponentials())
        return RAFTER_OK;
    const Exponentials<bf16> e = {reinterpret_cast<bf16 *>(dz.part[0].data), reinterpret_cast<bf16 *>(dz.part[1].data),
                                  dz.part[0].stride, dz.part[1].stride, dz.part[0].classes};
    launch(run->context, following(rows, LABEL_THREADS), adjust<bf16>, run->loss, first, rows,
           static_cast<const RowStats *>(run->b.tiles), task.tiles, static_cast<const RowGradient *>(run->b.gradients),
           e, kept_x<bf16>(*run), plan.dweight ? plan.depth : 0, reinterpret_cast<bf16 *>(run->b.x_scaled),
           plan.first_group, plan.depth_stride);
    return RAFTER_OK;
}

/* What labels add to dW, which has had all exponentials. */
void add_label_rows(const Run &run) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    const int64_t parts = plan.rows / MANY_ROWS * ceil_div<int64_t>(plan.depth, STRIP),
                  most = ADD_BLOCKS * run.context->cuda_state->multiprocessors;
    const int64_t for_many = parts < most ? parts : most;
    const auto launch_with = [&](auto *out, int64_t stride, const float *factor) {
        typedef std::remove_pointer_t<decltype(out)> U;
        launch(run.context, following(for_many + (plan.rows < 1 << 30 ? plan.rows : 1 << 30), ADD_THREADS),
               add_labels<bf16, U>,
               Addition<bf16, U>{run.b.labels, run.b.gradients, kept_x<bf16>(run), plan.depth, out, stride, factor},
               static_cast<int>(for_many));
    };
    if (!plan.direct_dweight())
        launch_with(run.b.dweight, plan.depth_stride, NULL);
    else
        for_dtype(dweight.dtype, [&](auto zero) {
            launch_with(reinterpret_cast<decltype(zero) *>(dweight.data), plan.dweight_lies.stride,
                        &run.b.common->alpha);
        });
}

/* The largest of a row's first logits: what its exponentials will be relative to. */
rafter_status take_sample(const Run &run) {
    fused::Task task = statistics_task(run, 0, run.plan.rows);
    task.classes = run.plan.classes < fused::CLASSES ? run.plan.classes : fused::CLASSES;
    task.stats = run.b.sample;
    task.tiles = 1;
    return run_fused<fused::STATISTICS>(run, task);
}

/* See find_dirt. */
void look_for_dirt(const Run &run) {
    const Operand x = x_rows(run, 0);
    for_dtype(run.plan.dtype, [&](auto zero) {
        launch(run.context, {run.plan.rows, 128}, find_dirt<decltype(zero)>, run.loss,
               static_cast<const decltype(zero) *>(x.data), x.stride, run.plan.depth, run.b.common);
    });
}

void mend(const Run &run, const Dz &dz) {
    const Plan &plan = run.plan;
    const rafter_view &dweight = run.call->dweight;
    const Operand x = x_rows(run, 0);
    const Launch how = {4 * run.context->cuda_state->multiprocessors, 256};
    const auto launch_with = [&](auto zero, auto out, int64_t out_stride, const float *factor) {
        typedef decltype(zero) T;
        launch(run.context, how, mend_dweight<T, std::remove_pointer_t<decltype(out)>>, run.loss,
               static_cast<const Common *>(run.b.common), reinterpret_cast<const T *>(dz.data), dz.stride,
               static_cast<const T *>(x.data), x.stride, dz.classes, plan.depth, out, out_stride, factor);
    };
    for_dtype(plan.dtype, [&](auto zero) {
        const int64_t stride = plan.dweight_lies.stride;
        const float *const alpha = &run.b.common->alpha;
        if (!plan.direct_dweight())
            launch_with(zero, run.b.dweight, plan.depth_stride, NULL);
        else if (dweight.dtype == RAFTER_F32)
            launch_with(zero, reinterpret_cast<float *>(dweight.data) + dz.first_class * stride, stride, alpha);
        else
            launch_with(zero, reinterpret_cast<decltype(zero) *>(dweight.data) + dz.first_class * stride, stride,
                        alpha);
    });
}

/* Logits, statistics and dz of a group. */
rafter_status form_dz(Run *run, int64_t first, int64_t rows, const Dz &dz) {
    const Tile tile = tile_at(*run, first, rows, 0, run->plan.classes);
    if (!run->plan.direct_x())
        pack_rows(*run, run->call->x, first, rows, run->b.x);
    RAFTER_TRY(form_logits(*run, tile));
    if (run->plan.turns_rows()) {
        turn(run, tile, dz.data);
        return RAFTER_OK;
    }
    if (run->plan.statistics)
        gather_statistics(*run, tile, true);
    finish(run, first, rows);
    differentiate(*run, tile, dz.data, first == 0);
    return RAFTER_OK;
}

/* dx of a group that is not fused. */
rafter_status finish_dx(const Run &run, int64_t first, int64_t rows, const Dz &dz) {
    RAFTER_TRY(multiply_dx(run, dz, first, rows, false));
    if (!run.plan.direct_dx())
        store_rows(run, run.call->dx, run.plan.dx_lies, false, first, rows, run.b.dx);
    return RAFTER_OK;
}

/* dx of a group of kept rows. */
rafter_status finish_fused_dx(const Run &run, int64_t first, int64_t rows, const Parts &dz) {
    const Plan &plan = run.plan;
    if (plan.direct_dx())
        return fused_dx(run, dz.part[0], dz.part[1], first, rows, false);
    for (int64_t done = 0; done < rows; done += plan.dx_rows) {
        const int64_t count = rows - done < plan.dx_rows ? rows - done : plan.dx_rows;
        RAFTER_TRY(fused_dx(run, dz.part[0].from(done, plan.dtype), dz.part[1].from(done, plan.dtype), first + done,
                            count, false));
        store_dx_rows(run, first + done, count);
    }
    return RAFTER_OK;
}

rafter_status run_fast(Run *run) {
    const Plan &plan = run->plan;
    const linear_cross_entropy_call *call = run->call;
    if (plan.exponentials())
        RAFTER_TRY(take_sample(*run));
    for (int64_t first = 0, rows; first < plan.rows; first += rows) {
        const int64_t most = first == 0 ? plan.first_group : plan.group;
        rows = plan.rows - first < most ? plan.rows - first : most;
        const Parts dz = parts_of(*run, first == 0 ? plan.hosted : 0);
        RAFTER_TRY(plan.fused ? form_exponentials(run, first, rows, dz) : form_dz(run, first, rows, dz.part[0]));
        const auto form_dx = [&] {
            return !plan.dx     ? RAFTER_OK
                   : plan.fused ? finish_fused_dx(*run, first, rows, dz)
                                : finish_dx(*run, first, rows, dz.part[0]);
        };
        /* dx is first, where dweight may host what it is made of; last, where it may lie over what dweight is. */
        if (!plan.turns_exponentials())
            RAFTER_TRY(form_dx());
        for (int i = dz.count - 1; i >= 0 && plan.dweight; i--) /* what dweight hosts, before it is written over */
            RAFTER_TRY(plan.fused ? fused_dweight(*run, dz.part[i], first, rows, first > 0)
                                  : multiply_dweight(*run, dz.part[i], first, rows, first > 0));
        if (plan.turns_exponentials())
            RAFTER_TRY(form_dx());
        if (plan.mends()) {
            look_for_dirt(*run);
            mend(*run, dz.part[0]);
        }
    }
    if (plan.exponentials() && plan.dweight)
        add_label_rows(*run);
    if (plan.dweight && !plan.direct_dweight())
        store_rows(*run, call->dweight, plan.dweight_lies, call->accumulate_into_dweight, 0, plan.classes,
                   run->b.dweight);
    return RAFTER_OK;
}

/* Calls step(tile) for all groups of rows of all slices of classes, and then each slice's end(first class, classes). */
template <typename Step, typename End> rafter_status for_tiles(const Run &run, Step step, End end) {
    const Plan &plan = run.plan;
    for (int64_t v = 0; v < plan.classes; v += plan.slice) {
        const int64_t classes = plan.classes - v < plan.slice ? plan.classes - v : plan.slice;
        for (int64_t first = 0; first < plan.rows; first += plan.group) {
            const int64_t rows = plan.rows - first < plan.group ? plan.rows - first : plan.group;
            const Tile tile = tile_at(run, first, rows, v, classes);
            RAFTER_TRY(form_logits(run, tile));
            step(tile);
        }
        RAFTER_TRY(end(v, classes));
    }
    return RAFTER_OK;
}

/* The slice of classes that begins at v, and where its dz goes: behind its rows of dweight, as long as a larger slice
 * fits there. */
Dz slice_at(const Run &run, int64_t v) {
    const Plan &plan = run.plan;
    const int64_t hosted = hosted_slice(plan, v), left = plan.classes - v;
    if (hosted <= plan.slice)
        return {run.b.dz, plan.dz_stride, v, left < plan.slice ? left : plan.slice};
    const int64_t row_bytes = plan.depth * rafter_dtype_bytes(run.call->dweight.dtype);
    return {run.call->dweight.data + (v + hosted) * row_bytes, hosted, v, hosted};
}

rafter_status run_compact(Run *run) {
    const Plan &plan = run->plan;
    const linear_cross_entropy_call *call = run->call;
    if (!plan.x.plain && !plan.fused)
        pack_rows(*run, call->x, 0, plan.rows, run->b.x);
    for (int64_t first = 0; plan.fused && plan.statistics && first < plan.rows; first += plan.group) {
        const int64_t rows = plan.rows - first < plan.group ? plan.rows - first : plan.group;
        RAFTER_TRY(run_fused<fused::STATISTICS>(*run, statistics_task(*run, first, rows)));
        finish_fused(run, first, rows);
    }
    if (plan.statistics && !plan.fused)
        RAFTER_TRY(for_tiles(
            *run, [&](const Tile &tile) { gather_statistics(*run, tile, tile.first_class == 0); },
            [](int64_t, int64_t) { return RAFTER_OK; }));
    if (!plan.statistics || !plan.fused)
        finish(run, 0, plan.rows);
    if (!plan.gradients())
        return RAFTER_OK;
    if (plan.mends())
        look_for_dirt(*run);
    const auto write = [&](const Tile &tile) {
        char *const dz = run->b.dz + tile.first_row * plan.dz_stride * rafter_dtype_bytes(plan.dtype);
        differentiate(*run, tile, dz, tile.first_row == 0);
    };
    const auto multiply_slice = [&](const Dz &dz) {
        if (plan.dweight) {
            RAFTER_TRY(plan.fused ? fused_dweight(*run, dz, 0, plan.rows, false)
                                  : multiply_dweight(*run, dz, 0, plan.rows, false));
            if (plan.mends())
                mend(*run, dz);
            if (!plan.direct_dweight())
                store_rows(*run, call->dweight, plan.dweight_lies, call->accumulate_into_dweight, dz.first_class,
                           dz.classes, run->b.dweight);
        }
        if (plan.dx && plan.fused)
            return fused_dx(*run, dz, {}, 0, plan.rows, dz.first_class > 0);
        return plan.dx ? multiply_dx(*run, dz, 0, plan.rows, dz.first_class > 0) : RAFTER_OK;
    };
    if (!plan.fused)
        RAFTER_TRY(for_tiles(*run, write, [&](int64_t v, int64_t classes) {
            return multiply_slice({run->b.dz, plan.dz_stride, v, classes});
        }));
    fused::Task task = {};
    task.rows = plan.rows;
    for (int64_t v = 0; plan.fused && v < plan.classes; v += task.classes) {
        const Dz dz = slice_at(*run, v);
        task.first_class = v;
        task.classes = dz.classes;
        RAFTER_TRY(run_fused<fused::GRADIENT>(*run, task, dz));
        RAFTER_TRY(multiply_slice(dz));
    }
    if (plan.dx && !plan.direct_dx()) {
        if (plan.fused)
            store_dx_rows(*run, 0, plan.rows);
        else
            store_rows(*run, call->dx, plan.dx_lies, false, 0, plan.rows, run->b.dx);
    }
    return RAFTER_OK;
}

/* No rows, or no classes. */
void store_nothing(const Run &run) {
    const Plan &plan = run.plan;
    const linear_cross_entropy_call *call = run.call;
    if (plan.dx)
        store_rows(run, call->dx, plan.dx_lies, false, 0, plan.rows, NULL);
    if (plan.dweight && !call->accumulate_into_dweight)
        store_rows(run, call->dweight, plan.dweight_lies, false, 0, plan.classes, NULL);
    if (plan.dbias)
        cudaMemsetAsync(run.b.dbias, 0, plan.classes * sizeof(float), run.stream());
}

/* dbias as a matrix of one row. */
rafter_view as_row(const rafter_view &view) {
    rafter_view row = view;
    row.ndim = 2;
    row.shape[0] = 1;
    row.stride[0] = 0;
    row.shape[1] = view.shape[0];
    row.stride[1] = view.stride[0];
    return row;
}

/* fp16 holds nothing under 2^-24, and 13 bits above 2^-14 at most: so dz takes up what is left at its upper end, unless
 * weights of the caller's, or z-loss, may take it there. */
float row_scale_of(const linear_cross_entropy_call *call) {
    const struct rafter_loss &loss = call->loss;
    const bool bounded =
        !loss.row_weight.data && !loss.class_weight.data && loss.reduction != RAFTER_NONE && loss.z_loss == 0.0f;
    return call->x.dtype == RAFTER_F16 && bounded ? 0x1p12f : 1.0f;
}

/* A block that sums up, and some that keep rows: those go through all labels before theirs, or all there are. */
Launch prepare_launch(const Run &run) {
    const int64_t most = run.context->cuda_state->multiprocessors - 1;
    constexpr int LEAST_ROWS = 64; /* of a block */
    const int64_t blocks = run.plan.fused ? ceil_div<int64_t>(run.plan.rows, LEAST_ROWS) : 0;
    return {1 + (blocks < most ? blocks : most), PREPARE_THREADS};
}

/* What is left when all rows that are not ignored have ended. */
void finish_all(const Run &run) {
    const Plan &plan = run.plan;
    const rafter_view &dx = run.call->dx;
    const bool zeros = plan.fused && plan.dx && plan.drops && plan.direct_dx();
    if (!zeros && !run.loss.forward)
        return;
    for_dtype(zeros ? dx.dtype : RAFTER_F32, [&](auto zero) {
        typedef decltype(zero) U;
        launch(run.context, zeros ? taking_rows(run) : following(1, PREPARE_THREADS), finish_call<U>, run.loss,
               static_cast<const Totals *>(run.b.of_block), run.blocks, kept_of(run), plan.depth,
               zeros ? reinterpret_cast<U *>(dx.data) : NULL, plan.dx_lies.stride);
    });
}

rafter_status execute(Run *run) {
    const linear_cross_entropy_call *call = run->call;
    const Plan &plan = run->plan;
    run->row_scale = row_scale_of(call);
    launch(run->context, prepare_launch(*run), prepare, run->loss, run->row_scale, plan.drops, run->b.order,
           run->b.classes, run->b.counters, plan.fused ? tiles::counters_of(plan.clusters) : 0, run->b.labels,
           copy_of_kept(*run), run->b.common);
    run->loss.prepared = &run->b.common->prepared;
    if (call->bias.data)
        launch(run->context, over(plan.classes, 256), widen, rows_of(call->bias, 1), plan.classes, run->b.bias);
    if (!plan.weight.plain && plan.rows > 0 && plan.classes > 0 && plan.depth > 0)
        pack_rows(*run, call->weight, 0, plan.classes, run->b.weight);

    if (plan.rows == 0 || plan.classes == 0) {
        finish(run, 0, plan.rows);
        store_nothing(*run);
    } else if (plan.fast) {
        RAFTER_TRY(run_fast(run));
    } else {
        RAFTER_TRY(run_compact(run));
    }
    if (plan.dbias)
        store_rows(*run, as_row(call->dbias), Lying{}, false, 0, 1, run->b.dbias);
    finish_all(*run);
    return rafter_cuda_launched(run->context, "linear_cross_entropy");
}

} // namespace

extern "C" rafter_status rafter_cuda_linear_cross_entropy(rafter_context *context,
                                                          const struct linear_cross_entropy_call *call) {
    static const char *const mode_names[] = {"RAFTER_LCE_AUTO", "RAFTER_LCE_FAST", "RAFTER_LCE_COMPACT"};
    OnDevice current(context);
    Run run = {};
    run.context = context;
    run.call = call;
    const size_t room = rafter_scratch_request(1) - 1; /* to align a caller's workspace */
    const size_t budget = call->budget > room ? call->budget - room : call->budget ? 1 : 0;
    if (!make_plan(context->cuda_state, call, budget, &run.plan))
        return rafter_fail(context, RAFTER_WORKSPACE_TOO_SMALL, "budget is %zu bytes, wanted at least %zu in mode %s",
                           call->budget, run.plan.bytes + room, mode_names[call->mode]);
    const bool nothing = call->loss.direction == RAFTER_BACKWARD && !run.plan.gradients();
    if (call->ask)
        *call->ask = nothing ? 0 : rafter_scratch_request(run.plan.bytes);
    if (call->ask || nothing)
        return RAFTER_OK;
    if (!run.plan.fused)
        RAFTER_TRY(rafter_cuda_open_products(context));
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_cuda_scratch(context, call->workspace, call->workspace_bytes, run.plan.bytes, &scratch));
    lay_out(run.plan, scratch.memory, &run.b);
    run.loss = loss_of(context, &call->loss);
    const rafter_status status = execute(&run);
    rafter_scratch_release(context, &scratch);
    return status;
}
