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

int tile_classes_of(const Problem &p, LogitMode mode) {
    /* Batch-invariant calls must not cut their classes by the number of rows. */
    const bool few = p.rows <= gemm::ROWS && !p.invariant, many = p.rows > 2048 || p.invariant;
    /* Few rows: the product is bound by reading W, and wide tiles divide it among the clusters as well. Little depth: a
     * tile takes less time to sum than to convert, so that converting it in turns hides little. Great depth: there is
     * little to hide, and in long products power is the limit, of which wide tiles take less. */
    const bool together = mode == STATISTICS ? few || p.depth <= 128 : few || p.depth < 512 || (p.depth > 2048 && many);
    return together ? gemm::Together::COLUMNS : gemm::InTurns::COLUMNS;
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
