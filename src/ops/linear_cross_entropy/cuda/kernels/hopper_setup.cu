/* SPDX-License-Identifier: Apache-2.0 */
/* Host code that all Hopper variants share: see hopper_steps.cuh. */
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

/* ---- which calls ----------------------------------------------------------------------------- */

bool few_dweight_tiles(const Problem &p, int clusters, int parts) {
    const double flops =
        2.0 * static_cast<double>(p.rows) * static_cast<double>(p.depth) * static_cast<double>(p.classes);
    return p.dweight && (flops > 1e10 || p.invariant) &&
           2 * parts * gemm::ClusterShape(false).tiles(p.classes, p.depth) < clusters;
}

const char *why_not_hopper(const rafter_cuda_state &device, const Problem &p) {
    if (p.rows == 0 || p.classes == 0 || p.depth == 0)
        return "there are no rows, no classes, or no elements in a row";
    if (p.dtype == RAFTER_F32)
        return "inputs are fp32";
    if (p.rows > INT32_MAX)
        return "it counts rows in 31 bits";
    if (device.compute_capability != 90 || clusters_of(device) == 0 || !hopper_kernels_built(device.device))
        return "this build or device does not have Hopper's kernels";
    if (few_dweight_tiles(p, clusters_of(device), gemm::TileScheduler::MOST_PARTS))
        return "dweight has too few tiles to occupy the GPU";
    return NULL;
}

const char *why_not_hopper_fast(const rafter_cuda_state &device, const Problem &p) {
    if (const char *reason = why_not_hopper(device, p))
        return reason;
    if (!p.statistics)
        return "lse is given";
    if (p.caps && p.smooths && !p.reads_logits)
        return "softcap and label smoothing together need logits that exponentials of this dtype cannot hold";
    if (p.dentropy)
        return "the gradient of the entropy needs every row's entropy first";
    if (few_dweight_tiles(p, clusters_of(device), 1) && p.classes > MOST_CLASSES_PER_DEPTH * p.depth)
        return "dweight has few tiles: the passes over x and dx would cost more than exponentials save";
    return NULL;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Estimated cycles for the logits of a call with tiles of `columns` classes, if `clusters` of them run at a time;
 * tile_cycles: of one, converted. */
static double logit_cycles(const Problem &p, int clusters, int columns, double tile_cycles) {
    if (p.invariant) /* must not depend on the number of rows */
        return tile_cycles / columns;
    const int64_t tiles = gemm::ClusterShape::of(p.rows, columns).tiles(p.rows, p.classes);
    const double waves = static_cast<double>(tiles) / clusters;
    /* Tiles of few waves wait longer for memory than those of many; narrow ones by a tenth more. */
    const double delay = columns == gemm::InTurns::COLUMNS ? 1.1 : 1;
    return tile_cycles * (waves <= 8 ? delay * ceil(waves) : waves);
}

int tile_classes_of(const Problem &p, LogitMode mode, int clusters) {
    constexpr int WIDE_TILE = gemm::Together::COLUMNS, TILE = gemm::InTurns::COLUMNS;
    /* Few rows: bound by reading W, which wide tiles divide among the clusters as well. */
    if (p.rows <= gemm::ROWS && !p.invariant)
        return WIDE_TILE;
    /* Great depth: there is little to hide, and power is the limit, of which wide tiles take less. */
    if (mode == EXPONENTIALS && p.depth > 2048 && (p.rows > 2048 || p.invariant))
        return WIDE_TILE;
    /* Cycles on an H200: of a tile's products, 4 per column and step; of its conversion, together and by one warpgroup. */
    const double steps = static_cast<double>(ceil_div<int64_t>(p.depth, gemm::DEPTH)), sum = 4 * WIDE_TILE * steps,
                 sum_in_turns = 4 * TILE * steps, convert = mode == STATISTICS ? 2600 : 3400,
                 convert_in_turns = mode == STATISTICS ? 6000 : 11000;
    const double together = logit_cycles(p, clusters, WIDE_TILE, sum + convert),
                 in_turns = logit_cycles(p, clusters, TILE, max(sum_in_turns, (sum_in_turns + convert_in_turns) / 2)) +
                            (p.invariant ? 0 : convert_in_turns);
    return together <= in_turns ? WIDE_TILE : TILE;
}

int split_capacity_for(const Problem &p, const Limits &limits, int clusters, int tile_classes, int64_t rows,
                       bool sliced) {
    const int most = static_cast<int>(2 * static_cast<int64_t>(limits.product_bytes) / gemm::SPLIT_BYTES);
    bool gains = false;
    int capacity = 0;
    const auto add_product = [&](gemm::ClusterShape shape, int64_t down, int64_t across, int64_t depth) {
        const int tiles = static_cast<int>(shape.tiles(down, across)),
                  steps = static_cast<int>(ceil_div<int64_t>(depth, gemm::DEPTH));
        const gemm::TileScheduler split = gemm::TileScheduler::of(tiles, steps, clusters, most, 0);
        const int64_t whole = gemm::TileScheduler::of(tiles, steps, clusters, 0, 0).time;
        gains = gains || whole - split.time > whole / 50;
        capacity = max(capacity, split.rest * split.parts);
    };
    const gemm::ClusterShape shape = gemm::ClusterShape::of(rows);
    add_product(gemm::ClusterShape::of(rows, tile_classes), rows, p.classes, p.depth);
    if (p.dx)
        add_product(shape, rows, p.depth, p.classes);
    if (p.dweight)
        add_product(gemm::ClusterShape(false), p.classes, p.depth, rows);
    capacity = !gains ? 0 : sliced ? most : capacity;
    if (const int parts = invariant_dx_parts(p, p.classes); parts > 1 && p.dx)
        capacity = max(capacity, parts * static_cast<int>(shape.tiles(rows, p.depth)));
    return capacity;
}

int64_t rows_in_dweight(const Problem &p, bool direct_dweight) {
    const bool is_free = p.dweight && direct_dweight && p.dweight_layout.stride == p.depth && !p.adds_dweight;
    return is_free ? p.depth * p.dweight_bytes / p.bytes() : 0;
}

void HopperSetup::place(Layout *layout, const Problem &p, int64_t totals) {
    constexpr int64_t SMALL_COPY = 4 * MIB; /* has a place of its own, so that dx can be computed before dW */
    copy_into_dx = drop_ignored && p.x.direct && p.dx && p.dx_layout.direct && !p.share_of_dx &&
                   p.rows * p.depth_stride() * p.bytes() > SMALL_COPY;
    const bool copies = !p.x.direct || (drop_ignored && !copy_into_dx);
    common.place(layout, p, totals);
    layout->place(&order, true, p.rows * int64_t(sizeof(int)));
    layout->place(&classes, true, p.rows * int64_t(sizeof(int)));
    layout->place(&z_label, true, p.rows * 4);
    layout->place(&x, copies, p.rows * p.depth_stride() * p.bytes());
    layout->place(&split_sums, split_capacity > 0, split_capacity * gemm::SPLIT_BYTES);
    layout->place(&counters, true, gemm::counters_of(max(clusters, split_capacity)) * int64_t(sizeof(unsigned)));
}

/* ---- running --------------------------------------------------------------------------------- */

/* The copy of active rows that the first kernel makes. */
static CopyOfActive copy_of(const HopperRun &run) {
    const rafter_view &x = run.call.x;
    const int last = x.ndim - 1;
    CopyOfActive copy = {};
    if (run.copy.data == x.data)
        return copy;
    copy.x = rows_of(x, last);
    copy.step = x.stride[last];
    copy.columns = static_cast<int>(run.problem.depth);
    copy.wide = run.problem.x.direct;
    copy.to = static_cast<uint16_t *>(const_cast<void *>(run.copy.data));
    copy.stride = run.copy.stride;
    return copy;
}

HopperRun::HopperRun(rafter_context *for_context, const linear_cross_entropy_call &for_call, const HopperSetup &setup,
                     const Labels &for_labels, char *workspace)
    : Run(for_context, for_call), labels(for_labels), column_parts(NULL), tile_classes(setup.tile_classes),
      tiles(static_cast<int>(setup.tiles(problem))), spread(SPREAD_IN_DZ), weight_sum(NULL), logit_sums(NULL),
      zeroed_dx(false) {
    const Problem &p = problem;
    int *const order = setup.order.in(workspace), *const classes = setup.classes.in(workspace);
    unsigned *const counters = setup.counters.in(workspace);
    const Matrix packed = {setup.x.in(workspace), p.rows, p.depth, p.depth_stride()};
    setup.common.use(this, workspace);
    loss.row_units = setup.row_units;
    active = {order, &common->active, classes, p.rows};
    split = {setup.split_sums.in(workspace), counters, setup.split_capacity};
    x = p.x.direct ? Matrix{call.x.data, p.rows, p.depth, p.x.stride} : packed;
    copy = packed.data ? packed : x;
    if (setup.copy_into_dx)
        copy = {call.dx.data, p.rows, p.depth, p.dx_layout.stride * p.dx_bytes / p.bytes()};
    w = {weight.data, p.classes, p.depth, weight.stride};
    z_label = setup.z_label.in(workspace);
    begin_call(this,
               {setup.drop_ignored, order, classes, counters,
                gemm::counters_of(max(setup.clusters, setup.split_capacity)), labels, copy_of(*this)},
               workspace, setup.common);
}

} // namespace lce
