/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels with a thread per row before and after those that read rows: see finish.cuh. */
#include "ops/cross_entropy/cuda/finish.cuh"

namespace {

/* The label's logit of a row, in two steps: see load_bits_now. So kernels with a thread per row are compiled for all dtypes
 * at once. */
DEVICE unsigned load_label_logit(const Args &c, int64_t row, int64_t label) {
    return load_bits_now(c.z.data, c.z.dtype, c.z.offset(row) + label * c.z_step);
}

/* A thread per row. */
__global__ __launch_bounds__(ROW_THREADS) void compute_terms(const __grid_constant__ Args c, KnownTerms *row_terms) {
    wait_unless_prepared(c);
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t label = row < loss.rows ? loss.class_of(loss.load_label(row)) : IGNORED;
    const unsigned z_label = label >= 0 ? load_label_logit(c, row, label) : 0;
    wait_for_previous_kernel();
    const double common = common_factor(c); /* while the load of the label's logit is in flight */
    if (label >= 0)
        row_terms[row] = {terms_of(loss, common, row, label), number_of_bits(z_label, c.z.dtype)};
    else
        flag_bad_label(loss, label);
}

/* A thread per row, or several: merges the row's parts, always in the same order, writes its outputs and,
 * if not NULL, coefficients. The last block writes the loss. If `known` is not NULL, it has the label's
 * logit, which dz may have overwritten. SHARED: the statistics are those of all ranks, and have the
 * label's logit, which may be another rank's. */
template <int OPTIONS, bool SHARED = false>
__global__ __launch_bounds__(ROW_THREADS) void finish(const __grid_constant__ Args c, RowLanes rows,
                                                      const LossStats<OPTIONS> *part_stats, const KnownTerms *known,
                                                      RowCoefficients *coefficients) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = (blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x) >> rows.shift;
    const unsigned lane = threadIdx.x & (rows.lanes() - 1);
    const int64_t label = row < loss.rows ? loss.class_of(loss.load_label(row)) : IGNORED;
    const unsigned loaded = label >= 0 && !known && !SHARED ? load_label_logit(c, row, label) : 0;
    wait_for_previous_kernel();
    const double common = coefficients ? common_factor(c) : 0.0;
    Totals totals = {};
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    if (label >= 0 && lane < rows.parts)
        g = part_stats[row * rows.parts + lane];
    if (rows.parts > 1) {
        for (unsigned part = lane + rows.lanes(); label >= 0 && part < rows.parts; part += rows.lanes())
            g = merge(g, part_stats[row * rows.parts + part], loss.scale);
        g = merge_lanes(g, rows.lanes(), loss.scale);
    }
    if (row < loss.rows && lane == 0) {
        RowGradient gradient = gradient_of_skipped(label);
        RowResults results = results_of_skipped(label);
        if (label >= 0) {
            float z_label = known ? known[row].z_label : number_of_bits(loaded, c.z.dtype);
            if constexpr (SHARED)
                z_label = g.z_label;
            const WholeRowStats stats = whole_row_stats(g, z_label, loss);
            if (coefficients)
                gradient = gradient_from_stats(loss, common, row, label, z_label, stats);
            if (loss.forward)
                results = results_of(loss, row, label, stats);
        }
        flag_bad_label(loss, label);
        if (loss.forward)
            write_row(loss, row, label, results, &totals);
        if (coefficients)
            coefficients[row] = {gradient, loss.column_of(label)};
    }
    if (loss.forward)
        add_up(c, totals);
}

} // namespace

void launch_terms(const rafter_context *context, const Args &args, KnownTerms *row_terms) {
    launch(context, Launch{max(ceil_div<int64_t>(args.loss.rows, ROW_THREADS), int64_t(1)), ROW_THREADS}, compute_terms,
           args, row_terms);
}

void launch_finish(const rafter_context *context, const Args &args, Options options, bool shared, const RowLanes &rows,
                   const void *stats, const KnownTerms *known, RowCoefficients *coefficients) {
    const Launch how = {rows.blocks(args.loss.rows), ROW_THREADS};
    if (shared)
        return launch(context, how, finish<FULL, true>, args, rows, static_cast<const LossStats<FULL> *>(stats), known,
                      coefficients);
    for_options(options, [&](auto o) {
        constexpr int OPTIONS = decltype(o)::value;
        launch(context, how, finish<OPTIONS>, args, rows, static_cast<const LossStats<OPTIONS> *>(stats), known,
               coefficients);
    });
}
