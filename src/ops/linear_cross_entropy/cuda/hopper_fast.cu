/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/linear_cross_entropy/cuda/hopper_fast.cuh"

#include <math.h>

#include "cuda/variant.cuh"

namespace lce {

/* Whether exponentials are converted to dz in place. That takes a pass over them, but saves the passes
 * over x and dx, and the kernels for samples and labels. For few rows these kernels would take longer
 * than the pass; but with many classes, the blocks of a row would take too long to merge its tiles. Only
 * if ignored rows are dropped: else the product for dW would multiply what x holds there, maybe NaN, by
 * a dz of 0. */
static bool converts(const Problem &p, bool drop_ignored) {
    constexpr int64_t FEW_ROWS = 128, MOST_CLASSES = 65536;
    const bool is_short = p.classes <= MOST_CLASSES_PER_DEPTH * p.depth ||
                          (p.rows <= FEW_ROWS && p.classes <= MOST_CLASSES && !p.invariant);
    return drop_ignored && is_short && !(p.caps && p.smooths);
}

const char *HopperFast::why_not(const rafter_cuda_state &device, const Call &call) {
    const Problem p(call);
    const char *const reason = why_not_fast(p);
    if (reason)
        return reason;
    if (converts(p, true) && has_row_units(p))
        return "it would scale dz by the largest gradient of all rows, which is not batch invariant";
    return why_not_hopper_fast(device, p);
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* Exponentials are stored in dweight if they take at least LARGE_BYTES, and those of LEAST_CLASSES or more
 * fit, so that the products have a good size. */
static constexpr int64_t LARGE_BYTES = 256 * MIB, LEAST_CLASSES = 8192;

/* The number of rows f of the largest first group. dweight has room for the exponentials of
 * dweight_rows rows, so the share f / (f + dweight_rows) of the first group's classes is stored in
 * the workspace. That may take as much as all classes of g rows: f^2 / (f + dweight_rows) = g. */
static int64_t largest_first_group(int64_t g, int64_t dweight_rows) {
    const double half = static_cast<double>(g) / 2;
    return static_cast<int64_t>(half + sqrt(half * half + static_cast<double>(g) * static_cast<double>(dweight_rows)));
}

/* How many classes, the last ones, have their exponentials in dweight: in the rows of the classes before
 * them. When the products write those rows, the exponentials have been used. */
static int64_t classes_that_fit(const Problem &p, int64_t first_group, int64_t dweight_rows, int tile_classes) {
    const int64_t least_before = ceil_div(p.classes * first_group, first_group + dweight_rows) + 8; /* 8: padding */
    return p.classes - round_up(least_before, int64_t(tile_classes));
}

/* How many rows' exponentials of all classes, with padding, fit into dweight. */
static int64_t padded_rows_in_dweight(const Problem &p) {
    return p.classes * p.depth * p.dweight_bytes / (round_up(p.classes, int64_t(8)) * p.bytes());
}

size_t HopperFast::make(const Problem &p, const Limits &limits, int clusters, int64_t group, bool use_dweight,
                        Plan *plan) {
    *plan = {};
    plan->group = plan->first_group = group;
    plan->setup.drop_ignored = limits.drop_ignored;
    plan->setup.clusters = clusters;
    plan->setup.tile_classes = tile_classes_of(p, EXPONENTIALS, clusters);
    plan->converts = lce::converts(p, limits.drop_ignored);
    plan->direct_dx = p.dx_layout.direct;
    const bool sums_dweight = p.dweight && group < p.rows && !p.sum_in_dweight;
    plan->direct_dweight = p.dweight_layout.direct && !sums_dweight;
    plan->exp_in_dweight = use_dweight && !plan->converts && sums_dweight && p.dweight_layout.direct &&
                           p.dweight_layout.stride == p.depth && !p.adds_dweight && group <= padded_rows_in_dweight(p);

    const int64_t dweight_rows = rows_in_dweight(p, plan->direct_dweight);
    if (!plan->converts && dweight_rows > 0 && group * p.classes * p.bytes() >= LARGE_BYTES) {
        const int64_t largest = largest_first_group(group, dweight_rows) / 256 * 256;
        const int64_t first_group = largest >= p.rows || group >= p.rows ? p.rows : max(largest, group);
        const int64_t classes = classes_that_fit(p, first_group, dweight_rows, plan->setup.tile_classes);
        if (classes >= LEAST_CLASSES) {
            plan->first_group = first_group;
            plan->classes_in_dweight = classes;
        }
    }
    plan->setup.split_capacity =
        split_capacity_for(p, limits, clusters, plan->setup.tile_classes, plan->first_group, false);

    const int64_t first = plan->first_group;
    const int64_t first_dz = first * round_up(p.classes - plan->classes_in_dweight, int64_t(8)),
                  other_dz = first < p.rows ? group * round_up(p.classes, int64_t(8)) : 0;
    const bool labels = !plan->converts && p.dweight;
    plan->spread = plan->converts ? SPREAD_IN_DZ : spread_place_of(p);
    const bool weight_sum = p.logit_sums, spread_x = plan->spread == SPREAD_APART && p.dweight;
    const int64_t depth_sums = ColumnSums::padded(p.depth) * 4,
                  parts = max(max(weight_sum ? ColumnSums::bytes(p.classes, p.depth) : 0,
                                  spread_x ? ColumnSums::bytes(first, p.depth) : 0),
                              p.dbias ? ColumnSums::bytes(first, p.classes) : 0);
    Layout layout;
    plan->setup.place(&layout, p, CommonBuffers::totals_of(p.rows, group));
    layout.place(&plan->stats, true, first * plan->setup.tiles(p) * int64_t(sizeof(RowStats)));
    layout.place(&plan->more, p.option_stats, first * plan->setup.tiles(p) * int64_t(sizeof(OptionStats)));
    layout.place(&plan->sample, !plan->converts, p.rows * int64_t(sizeof(RowStats)));
    layout.place(&plan->x_scaled, labels, first * p.depth_stride() * p.bytes());
    layout.place(&plan->row_labels, labels, round_up(p.rows, int64_t(4)) * int64_t(sizeof(int)));
    layout.place(&plan->class_rows, labels, p.classes * int64_t(sizeof(Labels::Class)));
    layout.place(&plan->frequent_labels, labels, Labels::bytes_of_frequent(p.rows));
    layout.place(&plan->dz, !plan->exp_in_dweight, max(first_dz, other_dz) * p.bytes());
    layout.place(&plan->dx, p.dx && !plan->direct_dx, group * p.depth_stride() * 4);
    layout.place(&plan->dweight, p.dweight && !plan->direct_dweight, p.classes * p.depth_stride() * 4);
    layout.place(&plan->dbias, p.dbias, p.classes * 4);
    layout.place(&plan->weight_sum, weight_sum, depth_sums);
    layout.place(&plan->logit_sums, p.logit_sums, (p.rows + 1) * 4);
    layout.place(&plan->spread_x, spread_x, depth_sums);
    layout.place(&plan->column_parts, parts > 0, parts);
    return layout.bytes();
}

/* Without a budget, groups may be larger than the usual ones if the workspace stays below this, and below what the
 * logits would take. */
static constexpr int64_t MOST_WORKSPACE = 5120 * MIB;

/* The groups of a plan. Every group after the first one costs a pass over the sums of dW. */
static int64_t count_groups(const Problem &p, const HopperFast::Plan &plan) {
    return 1 + ceil_div(max(p.rows - plan.first_group, int64_t(0)), plan.group);
}

size_t HopperFast::fit(const Problem &p, const Limits &limits, int clusters, bool good_only, Plan *plan) {
    const auto fit_into = [&](size_t budget, Plan *made) {
        return fit_groups(p, budget, good_only,
                          [&](int64_t group, bool shrunk) { return make(p, limits, clusters, group, shrunk, made); });
    };
    if (limits.budget)
        return fit_into(limits.budget, plan);
    const size_t bytes = fit_usual(p, limits, clusters, plan);
    const bool native = p.sum_in_dweight && p.dweight_bytes < 4; /* for callers who want to save memory */
    if (!p.dweight || native || plan->first_group >= p.rows)
        return bytes;
    const size_t most = static_cast<size_t>(min(p.rows * p.classes * p.bytes(), MOST_WORKSPACE));
    Plan larger;
    const size_t larger_bytes = fit_into(most, &larger);
    if (larger_bytes > most || 2 * count_groups(p, larger) > count_groups(p, *plan))
        return bytes;
    *plan = larger;
    return larger_bytes;
}

size_t HopperFast::fit_usual(const Problem &p, const Limits &limits, int clusters, Plan *plan) {
    /* Groups with exponentials of FAST_TILE_BYTES; or one group of all rows, which needs no fp32
     * sums, if that takes no more; or groups as large as dweight can hold, if that is more. */
    const int64_t most = FAST_TILE_BYTES / (2 * p.classes);
    const size_t bytes = make(p, limits, clusters, even_part(p.rows, max(most, FAST_ROWS), 256), false, plan);
    Plan other;
    const size_t one_bytes = make(p, limits, clusters, p.rows, false, &other);
    if (one_bytes <= bytes) {
        *plan = other;
        return one_bytes;
    }
    if (plan->converts || !p.dweight || plan->group >= p.rows || p.sum_in_dweight)
        return bytes;
    const size_t other_bytes =
        make(p, limits, clusters, even_part(p.rows, padded_rows_in_dweight(p), 256), true, &other);
    if (!other.exp_in_dweight || other.group < plan->group || other_bytes > bytes)
        return bytes;
    *plan = other;
    return other_bytes;
}

size_t HopperFast::plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
    const Limits limits = limits_of(call);
    return bytes_to_report(limits, fit(Problem(call), limits, clusters_of(device), true, plan));
}

/* ---- launch ---------------------------------------------------------------------------------- */

namespace {

/* A group of rows, and where its exponentials are: in one part, or two. */
struct Group {
    int64_t first, rows;
    Dz dz, rest; /* rest.classes: 0 if there is one part */
};

Group group_at(const HopperFast::Plan &plan, const HopperRun &run, int64_t first, char *base) {
    const bool is_first = first == 0;
    const int64_t classes = run.problem.classes, in_dweight = is_first ? plan.classes_in_dweight : 0,
                  before = classes - in_dweight;
    char *const dweight = run.call.dweight.data;
    return {first,
            min(run.problem.rows - first, is_first ? plan.first_group : plan.group),
            {plan.exp_in_dweight ? dweight : plan.dz.in(base), round_up(before, int64_t(8)), 0, before},
            {dweight, round_up(in_dweight, int64_t(8)), before, in_dweight}};
}

rafter_status form_exponentials(const HopperRun &run, const Group &group, RowStats *stats, OptionStats *more,
                                const RowStats *sample) {
    LogitTask task = statistics_task(run, group.first, group.rows, stats);
    task.more = more;
    task.sample = sample ? sample + group.first : NULL;
    task.classes = group.dz.classes;
    RAFTER_TRY(multiply_logits(run, EXPONENTIALS, task, group.dz));
    if (group.rest.classes == 0)
        return RAFTER_OK;
    task.first_class = group.rest.first_class;
    task.classes = group.rest.classes;
    const int64_t first_tile = task.first_class / run.tile_classes;
    task.stats = stats + first_tile;
    task.more = more ? more + first_tile : NULL;
    return multiply_logits(run, EXPONENTIALS, task, group.rest);
}

/* dx of the group. `gradients`: as in DxInput. */
rafter_status form_dx(HopperRun &run, const HopperFast::Plan &plan, const Group &group, float *sums,
                      const RowGradient *gradients) {
    if (plan.direct_dx)
        return hopper_dx(&run, {group.dz, group.rest, group.first, group.rows, gradients});
    const int64_t bytes = run.problem.bytes();
    for (int64_t done = 0; done < group.rows; done += plan.group) {
        const int64_t first = group.first + done, rows = min(group.rows - done, plan.group);
        RAFTER_TRY(hopper_dx_sums(
            run, {group.dz.from_row(done, bytes), group.rest.from_row(done, bytes), first, rows, gradients}, sums,
            plan.group, false));
        store_dx_rows(run, first, rows, sums, gradients);
    }
    return RAFTER_OK;
}

} // namespace

rafter_status HopperFast::launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
    char *const base = align_workspace(workspace);
    const Labels labels = {plan.row_labels.in(base), plan.class_rows.in(base), plan.frequent_labels.in(base)};
    HopperRun run(context, call, plan.setup, labels, base);
    const Problem &p = run.problem;
    RowStats *const stats = plan.stats.in(base), *const sample = plan.sample.in(base);
    OptionStats *const more = plan.more.in(base);
    float *const dx = plan.dx.in(base), *const dweight = plan.dweight.in(base), *const dbias = plan.dbias.in(base),
                 *const weight_sum = plan.weight_sum.in(base), *const spread_x = plan.spread_x.in(base);
    const Matrix x_scaled = {plan.x_scaled.in(base), plan.first_group, p.dweight ? p.depth : 0, p.depth_stride()};
    const auto dweight_from = [&](int64_t first_class) {
        return plan.direct_dweight ? into_tensor(run, call.dweight, p.dweight_layout, first_class)
                                   : into_sums(run, dweight);
    };
    const bool adds_to_tensor = plan.direct_dweight && p.adds_dweight;
    run.column_parts = plan.column_parts.in(base);
    run.spread = plan.spread;
    run.weight_sum = plan.spread == SPREAD_APART ? weight_sum : NULL;
    run.logit_sums = plan.logit_sums.in(base);
    if (weight_sum) {
        sum_weights(run, weight_sum);
        sum_logits(run, weight_sum, plan.logit_sums.in(base));
    }

    if (!plan.converts)
        sample_statistics(run, sample);
    for (int64_t first = 0; first < p.rows;) {
        const Group group = group_at(plan, run, first, base);
        const bool add = first > 0 || adds_to_tensor;
        RAFTER_TRY(form_exponentials(run, group, stats, more, sample));
        if (plan.converts) {
            finish_tiles(&run, first, group.rows, stats, more, group.dz);
            if (p.dbias)
                sum_dbias(run, group.dz, first, group.rows, NULL, NULL, first > 0, dbias);
            /* dx is first, while W is still in L2; unless it overwrites the copy of x, which dW is formed
             * from. */
            const bool dx_first = !plan.setup.copy_into_dx;
            if (p.dx && dx_first)
                RAFTER_TRY(form_dx(run, plan, group, dx, NULL));
            if (p.dweight)
                RAFTER_TRY(hopper_dweight(run, group.dz, first, group.rows, NULL, NULL, dweight_from(0), add));
            if (p.dx && !dx_first)
                RAFTER_TRY(form_dx(run, plan, group, dx, NULL));
        } else {
            finish_tiles(&run, first, group.rows, stats, more, {});
            adjust_exponentials(run, first, group.rows, stats, group.dz, group.rest, x_scaled);
            if (spread_x)
                sum_spread_x(run, first, group.rows, spread_x);
            if (p.dbias)
                sum_dbias(run, group.dz, first, group.rows, run.gradients, NULL, first > 0, dbias);
            if (p.dbias && group.rest.classes > 0)
                sum_dbias(run, group.rest, first, group.rows, run.gradients, NULL, first > 0, dbias);
            /* dW is last: it may overwrite exponentials, which dx is formed from. The classes whose
             * exponentials are in dweight come first. */
            if (p.dx)
                RAFTER_TRY(form_dx(run, plan, group, dx, run.gradients));
            if (p.dweight && group.rest.classes > 0)
                RAFTER_TRY(hopper_dweight(run, group.rest, first, group.rows, &x_scaled, spread_x,
                                          dweight_from(group.rest.first_class), add));
            if (p.dweight)
                RAFTER_TRY(hopper_dweight(run, group.dz, first, group.rows, &x_scaled, spread_x, dweight_from(0), add));
        }
        first += group.rows;
    }
    if (p.dweight && !plan.converts)
        add_label_rows(run, dweight_from(0));
    if (p.dbias)
        store_dbias(run, dbias);
    if (p.dweight && !plan.direct_dweight)
        store_rows(run, call.dweight, p.dweight_layout, p.adds_dweight, 0, p.classes, dweight);
    if (p.dx && !plan.setup.drop_ignored)
        zero_ignored_dx(run, 0, p.rows);
    finish_call(run, run.active, p.dx && plan.setup.drop_ignored && plan.direct_dx && !run.zeroed_dx);
    return RAFTER_OK;
}

} // namespace lce

RAFTER_CUDA_VARIANT(linear_cross_entropy, hopper_fast, lce::HopperFast)
