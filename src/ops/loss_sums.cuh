/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over the rows of a loss that are not ignored: their number, their class weights and their losses. */
#ifndef RAFTER_OPS_LOSS_SUMS_CUH
#define RAFTER_OPS_LOSS_SUMS_CUH

#include "cuda/reductions.cuh"
#include "ops/loss.cuh"

DEVICE Totals warp_sum(const Totals &a) {
    return {warp_sum(a.loss), warp_sum(a.weight), warp_sum(a.counted)};
}

/* Calls f(row) for the rows first, first + step, ... below `end` that are not ignored. load(row) gives a row's label.
 * Loads 8 labels before it uses the first; otherwise the compiler would wait for each load. */
template <typename Load, typename F>
DEVICE void for_counted_rows(Load load, int64_t first, int64_t end, int64_t step, int64_t ignore_index, F f) {
    constexpr int AT_ONCE = 8;
#pragma unroll 1
    for (int64_t row = first; row < end; row += AT_ONCE * step) {
        int64_t label[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            label[k] = row + k * step < end ? load(row + k * step) : ignore_index;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (label[k] != ignore_index)
                f(row + k * step);
    }
}
template <typename F> DEVICE void for_counted_rows(const Loss &loss, int64_t first, int64_t end, int64_t step, F f) {
    const auto with = [&](auto load) { for_counted_rows(load, first, end, step, loss.ignore_index, f); };
    if (loss.target.dims != 1 || loss.target.step != 1)
        with([&](int64_t row) { return loss.load_label(row); });
    else if (loss.target.dtype == RAFTER_I64)
        with([&](int64_t row) { return reinterpret_cast<const int64_t *>(loss.target.data)[row]; });
    else
        with([&](int64_t row) { return int64_t(reinterpret_cast<const int *>(loss.target.data)[row]); });
}
DEVICE int64_t count_labels(const Loss &loss, int64_t first, int64_t end, int64_t step) {
    int64_t counted = 0;
    for_counted_rows(loss, first, end, step, [&](int64_t) { counted++; });
    return counted;
}

/* The totals of one thread's share of the rows: first, first + step, ... The loss is left 0. */
DEVICE Totals count(const Loss &loss, int64_t first, int64_t step) {
    Totals totals = {};
    if (!loss.class_weight) {
        totals.weight = totals.counted = static_cast<double>(count_labels(loss, first, loss.rows, step));
        return totals;
    }
#pragma unroll 1
    for (int64_t row = first; row < loss.rows; row += step) {
        const int64_t label = loss.class_of(loss.load_label(row));
        totals.weight += label == IGNORED ? 0.0 : label >= 0 ? loss.weight_of(label) : 1.0;
        totals.counted += label == IGNORED ? 0.0 : 1.0;
    }
    return totals;
}

/* The totals of all rows, without the loss, computed by one block; every thread gets them. At most INT_MAX rows. */
DEVICE Totals count_in_block(const Loss &loss) {
    if (loss.class_weight)
        return block_sum(count(loss, threadIdx.x, blockDim.x));
    const double counted = block_sum(static_cast<int>(count_labels(loss, threadIdx.x, loss.rows, blockDim.x)));
    return {0.0, counted, counted};
}

#endif
