/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For basic_short_rows.cu: gradients of many short rows of whole packs, with any options but row weights. A warp takes
 * 32 rows. LANES lanes share a row, with a pack each. Each lane also owns one of the 32 rows: it computes the row's
 * coefficients and the gradient at its label. So all lanes compute those at the same time.
 */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_OPTION_ROWS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_OPTION_ROWS_CUH

#include "cuda/rows_per_warp.cuh"
#include "ops/cross_entropy/cuda/options.cuh"

namespace {

constexpr int OPTION_ROWS_THREADS = 128, OPTION_ROWS_PER_SM = 6; /* of a block; blocks per SM */
constexpr int64_t MOST_OPTION_PACKS = 8;                         /* of a row: one for each of at most 8 lanes */

/* What lanes that share a row need to know of it. */
struct RowOfPacks {
    float pivot, shift, factor, spread; /* shift INFINITY: the gradient is `factor` in every column */

    template <typename T> DEVICE RowOfPacks(const GradientOfRow<T> &g, int label) {
        pivot = g.scaled.pivot;
        shift = g.is_constant(label) ? INFINITY : g.scaled.shift;
        factor = g.is_constant(label) ? g.constant(label) : g.scaled.factor;
        spread = g.spread;
    }
    /* The RowOfPacks of the row that another lane owns. */
    DEVICE RowOfPacks of_lane(int lane, const LossNumbers &loss) const {
        RowOfPacks row = *this;
        row.pivot = __shfl_sync(~0u, pivot, lane);
        row.shift = __shfl_sync(~0u, shift, lane);
        row.factor = __shfl_sync(~0u, factor, lane);
        if (loss.smooths)
            row.spread = __shfl_sync(~0u, spread, lane);
        return row;
    }
    /* The gradients of a pack. `weight`: those of its classes; read only if loss.smooths. */
    template <typename T, int N>
    DEVICE Pack<T, N> of(const Pack<T, N> &pack, const float (&weight)[N], const LossNumbers &loss) const {
        const bool caps = loss.softcap != 0.0f;
        ScaledExp<T> exp(1.0f, pivot, loss.scale);
        exp.shift = shift;
        exp.factor = factor;
        float d[N], slope[N];
        unpack(pack, d);
        if (caps)
            cap_all(d, slope, loss);
#pragma unroll
        for (int j = 0; j < N; j++)
            d[j] = exp.of(d[j]);
        if (loss.smooths)
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = fmaf(-spread, weight[j], d[j]);
        if (caps)
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] *= slope[j];
        const Pack<T, N> usual = packed<T>(d), constant = all_of<T, N>(factor);
        return shift == INFINITY ? constant : usual;
    }
};

/* Statistics of a pack of logits. */
template <typename T, int N> DEVICE RowStats stats_of_pack(const Pack<T, N> &pack, const LossNumbers &loss) {
    float v[N];
    unpack(pack, v);
    if (loss.softcap != 0.0f)
        cap_all(v, loss);
    return scaled_stats(v, loss.scale);
}

template <typename T, int LANES>
__global__ __launch_bounds__(OPTION_ROWS_THREADS,
                             OPTION_ROWS_PER_SM) void option_rows_per_warp(const __grid_constant__ OptionArgs a) {
    if (!a.factor)
        wait_for_inputs();
    constexpr int N = WIDE<T>, GROUPS = WARP / LANES;
    const BasicArgs &u = a.basic;
    const LossNumbers &loss = a.loss;
    const int lane = threadIdx.x % WARP, member = lane % LANES, group = lane / LANES;
    const int first = (blockIdx.x * (OPTION_ROWS_THREADS / WARP) + threadIdx.x / WARP) * WARP;
    const bool present = member < u.classes / N; /* whether this lane has a pack of each row */

    /* The row that this lane owns; and this lane's packs of rows first + group, first + GROUPS + group, ... */
    const int own = first + member * GROUPS + group, loaded = min(own, u.rows - 1);
    const int64_t loaded_label = u.load_label(loaded);
    const float given = u.lse ? load_now(u.lse + loaded) : INFINITY,
                dloss = a.row_dlosses ? load_now(a.row_dlosses + loaded) : 1.0f;
    Pack<T, N> pack[LANES];
#pragma unroll
    for (int step = 0; step < LANES; step++) {
        const int row = first + step * GROUPS + group;
        pack[step] =
            load_once_if<T, N>(present && row < u.rows, u.row_of_z<T>(min(row, u.rows - 1)) + member * N, -INFINITY);
    }
    const float own_factor = common_factor(a) * dloss;
    const int label = own < u.rows ? u.class_of(loaded_label) : static_cast<int>(IGNORED);
    const float z_label = label >= 0 ? to_float(u.row_of_z<T>(own)[label]) : 0.0f;
    const ClassWeights weights(u);
    float weight[N] = {}, weight_sum = 0.0f;
    if (loss.smooths) {
#pragma unroll
        for (int j = 0; j < N; j++)
            weight_sum += weight[j] = present ? weights.of_class(member * N + j) : 0.0f;
        weight_sum = sum_of_lanes<LANES>(weight_sum);
    }

    RowStats s = no_elements();
    const bool from_lse = label < 0 || lse_is_accurate<T>(given);
    if (__any_sync(~0u, !from_lse))
#pragma unroll
        for (int step = 0; step < LANES; step++) {
            const RowStats mine = present ? stats_of_pack(pack[step], loss) : no_elements();
            const RowStats of_row = merge_lanes<LANES>(mine, loss.scale);
            s = member == step ? of_row : s;
        }
    const GradientOfRow<T> gradient(loss, from_lse ? normalizer_from_lse(loss, given) : normalizer_from_stats(loss, s),
                                    own_factor, label >= 0 ? weights.of_class(label) : 1.0f, weight_sum);
    const float at_label = gradient.at_label(label, z_label, weights, loss);
    const RowOfPacks of_own(gradient, label);
    u.flag_bad_label(label);

    __syncwarp(); /* dz may overwrite z: all lanes have their logits */
#pragma unroll
    for (int step = 0; step < LANES; step++) {
        const int row = first + step * GROUPS + group;
        const RowOfPacks of_row = of_own.of_lane(group * LANES + step, loss);
        if (present && row < u.rows)
            store_once<T, N>(u.row_of_dz<T>(row) + member * N, of_row.of(pack[step], weight, loss));
    }
    __syncwarp(); /* labels' gradients overwrite those of other lanes */
    if (label >= 0)
        u.row_of_dz<T>(own)[label] = from_float<T>(at_label);
}

/* ---- host ------------------------------------------------------------------------------------ */

/* Why a call is not for option_rows_per_warp, or NULL. */
inline const char *why_not_option_rows(const Problem &p, const cross_entropy_call &call) {
    if (p.forward || p.invariant)
        return "the kernel for any options writes gradients, of calls that are not batch invariant";
    if (p.rows <= SCANNED_ROWS)
        return "rows are few";
    if (p.row_packs() > MOST_OPTION_PACKS)
        return "rows with such options are longer than 128 bytes";
    if (const char *const reason = why_not_options(p, call))
        return reason;
    return p.strided || !rows_of_packs(call.logits) || !rows_of_packs(call.dlogits)
               ? "rows are not whole, aligned packs of 16 bytes"
               : NULL;
}

inline void launch_option_rows(const rafter_context *context, rafter_dtype dtype, const OptionArgs &args) {
    const Launch how = {ceil_div<int64_t>(args.basic.rows, OPTION_ROWS_THREADS), OPTION_ROWS_THREADS};
    for_dtype(dtype, [&](auto zero) {
        typedef decltype(zero) T;
        ::launch(context, how,
                 args.basic.classes / WIDE<T> <= 4 ? option_rows_per_warp<T, 4> : option_rows_per_warp<T, 8>, args);
    });
}

} // namespace

#endif
