/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels between the Hopper products: see hopper_steps.cuh. */
#include <type_traits>

#include "ops/linear_cross_entropy/cuda/finish_row.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

constexpr int ROW_BLOCKS = 6; /* of finish_tiles_kernel, that fit on a multiprocessor */
constexpr int ROW_WARPS = ROW_THREADS / WARP;

/* ---- the end of rows ------------------------------------------------------------------------- */

/* Converts a row's exponentials, each tile's relative to its own maximum, to dz in place, by a
 * warp: a pack per lane from each of TILES tiles at a time. The first ones are loaded before the
 * row's gradient is known. */
template <typename T> struct RowConversion {
    static constexpr int N = WIDE<T>, TILES = 4, CLASSES = TILES * TILE_CLASSES;
    static_assert(TILE_CLASSES == WARP * N, "one pack per lane");
    T *row;
    const RowStats *stats;
    Pack<T, N> pack[TILES];
    float max[TILES];

    static DEVICE int64_t at(int64_t first, int k) {
        return first + k * TILE_CLASSES + threadIdx.x % WARP * N;
    }
    DEVICE void load(int64_t first, int64_t classes) {
#pragma unroll
        for (int k = 0; k < TILES; k++)
            if (at(first, k) < classes) {
                pack[k] = load_once<T, N>(row + at(first, k));
                max[k] = stats[first / TILE_CLASSES + k].max;
            }
    }
    /* Classes from `begin` on, which are loaded, up to `end`. With a softcap, exponentials have been
     * multiplied by its derivative, and there is no label smoothing. */
    DEVICE void finish(int64_t begin, int64_t end, const RowGradient &gradient, int label, const Loss &loss) {
        for (int64_t first = begin; first < end; first += CLASSES) {
            if (first > begin)
                load(first, loss.classes);
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                const int64_t v = at(first, k);
                if (v >= loss.classes)
                    continue;
                /* If the tile is all -inf, there is nothing to rescale, and the pivot may be
                 * any distance away. */
                const float factor =
                    gradient.p * (max[k] == -INFINITY ? 0.0f : expf((pivot_at(max[k]) - gradient.pivot) * loss.scale));
                float all[N];
                unpack(pack[k], all);
#pragma unroll
                for (int j = 0; j < N; j++)
                    all[j] = factor * all[j];
                if (loss.weighted)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (v + j < loss.classes)
                            all[j] -= gradient.spread * static_cast<float>(loss.column_weight(v + j));
#pragma unroll
                for (int j = 0; j < N; j++)
                    all[j] = gradient.constant ? gradient.p : v + j == label ? gradient.at_label : all[j];
                store_once<T, N>(row + v, packed<T>(all));
            }
        }
    }
};

/* The value of lane `from`. */
DEVICE RowGradient from_lane(const RowGradient &gradient, int from) {
    return {__shfl_sync(~0u, gradient.constant, from) != 0,
            __shfl_sync(~0u, gradient.pivot, from),
            __shfl_sync(~0u, gradient.p, from),
            __shfl_sync(~0u, gradient.spread, from),
            __shfl_sync(~0u, gradient.at_label, from),
            __shfl_sync(~0u, gradient.target, from),
            1.0f,
            0.0f};
}

/* Statistics of a row over a tile. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> load_tile(const RowStats *stats, const OptionStats *more, int64_t at) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    g.s = stats[at];
    if constexpr (OPTIONS == FULL) {
        const OptionStats other = more[at];
        g.weighted = other.weighted;
        g.moment = other.moment;
        g.best = other.best;
        g.argmax = other.argmax;
    }
    return g;
}

/* Fits the coefficients of a row to the place of the spread. SPREAD_APART: it is not part of
 * at_label, because it is subtracted from all classes. SPREAD_IN_EXPONENTIALS: the larger of p and the
 * spread becomes p, a factor of both; the exponentials get what is left of p, `level`, and of the
 * spread. So they have no large elements if p is small, or 0. `here`: this rank has the label. */
DEVICE void place_spread(const Loss &loss, int64_t label, bool here, SpreadPlace place, RowGradient *gradient) {
    if (gradient->constant)
        return;
    if (place == SPREAD_APART && here)
        gradient->at_label += gradient->spread * static_cast<float>(loss.weight_of(label));
    if (place != SPREAD_IN_EXPONENTIALS)
        return;
    const float larger = fmaxf(fabsf(gradient->p), fabsf(gradient->spread)),
                inverse = larger > 0.0f ? 1.0f / larger : 0.0f;
    gradient->level = gradient->p * inverse;
    gradient->spread *= inverse;
    gradient->p = larger;
}

/* Stores the coefficients of active row k, if they are wanted, and adds it to the list of rows by
 * label. */
DEVICE void put_gradient(const Loss &loss, int64_t k, int label, RowGradient *gradient, SpreadPlace spread,
                         RowGradient *gradients, const Labels &labels) {
    place_spread(loss, label, label >= 0, spread, gradient);
    if (gradients)
        gradients[k] = *gradient;
    if (labels.of_row)
        labels.add(static_cast<int>(k), gradient->at_label != 0.0f ? label : -1);
}

/* A warp finishes `each` rows: one lane per row if rows have few tiles, or all lanes together for
 * one row. `stats` and `more` (FULL only) have the tiles of the group's active rows, `logit_sums`
 * (or NULL) those of all active rows. If `exponentials` is not NULL, these rows' exponentials are
 * converted to dz. `saved`: where the rows' statistics are stored, or NULL.
 *
 * row_blocks > 1: a row has so many blocks. Each one merges all of the row's tiles, and its warps convert
 * RowConversion::TILES of them each; the first warp writes the row's results.
 *
 * finished: if these are all rows of the call, where blocks are counted. The last one writes the loss. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS, ROW_BLOCKS) void finish_tiles_kernel(
    const __grid_constant__ Loss loss, const __grid_constant__ ActiveRows active, int64_t first, int64_t rows, int each,
    int row_blocks, const RowStats *stats, const OptionStats *more, int tiles, const float *z_label,
    const float *logit_sums, double row_scale, RowGradient *gradients, SpreadPlace spread,
    const __grid_constant__ Labels labels, T *exponentials, int64_t stride, LossStats<FULL> *saved, bool only_save,
    Totals *block_totals, unsigned *finished) {
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t unit = blockIdx.x / row_blocks; /* of blocks */
    const int piece = row_blocks > 1 ? static_cast<int>(blockIdx.x - unit * row_blocks) * ROW_WARPS + warp : 0;
    const int64_t begin = row_blocks > 1 ? unit : (unit * ROW_WARPS + warp) * each, index = begin + lane,
                  first_class = piece * int64_t(RowConversion<T>::CLASSES),
                  end_class =
                      row_blocks > 1 ? min(loss.classes, first_class + RowConversion<T>::CLASSES) : loss.classes;
    const int count = active.among(first + begin, min(int64_t(each), rows - begin)); /* active rows come first */
    const bool own = lane < each && index < rows;
    const int64_t row = own ? active.order[first + index] : 0;
    const int label = own ? active.classes[first + index] : 0;
    RowConversion<T> conversion;
    const auto begin_conversion = [&](int64_t i) {
        conversion.row = exponentials + i * stride;
        conversion.stats = stats + i * tiles;
        conversion.load(first_class, loss.classes);
    };
    if (exponentials && count > 0)
        begin_conversion(begin);
    LossStats<FULL> g = no_columns<FULL>();
    if (row_blocks > 1) {
        LossStats<OPTIONS> own_tiles = no_columns<OPTIONS>();
        for (int tile = threadIdx.x; tile < tiles && count > 0; tile += ROW_THREADS)
            own_tiles = merge(own_tiles, load_tile<OPTIONS>(stats, more, begin * tiles + tile), loss.scale);
        own_tiles = merge_block_for_all(own_tiles, loss.scale);
        if constexpr (OPTIONS == FULL)
            g = own_tiles;
        else
            g.s = own_tiles.s;
    } else if constexpr (OPTIONS == FULL) {
        if (each > 1) {
            for (int tile = 0; tile < tiles && lane < count; tile++)
                g = merge(g, load_tile<FULL>(stats, more, index * tiles + tile), loss.scale);
        } else if (count > 0) {
            for (int tile = lane; tile < tiles; tile += WARP)
                g = merge(g, load_tile<FULL>(stats, more, begin * tiles + tile), loss.scale);
            g = merge_warp(g, loss.scale);
        }
    } else if (each > 1) {
        for (int tile = 0; tile < tiles && lane < count; tile++)
            g.s = merge(g.s, stats[index * tiles + tile], loss.scale);
    } else if (count > 0) {
        constexpr int AT_ONCE = 4; /* loads in flight: with few rows, there is little else to wait for */
        for (int tile = lane; tile < tiles; tile += AT_ONCE * WARP) {
            RowStats some[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (tile + k * WARP < tiles)
                    some[k] = stats[begin * tiles + tile + k * WARP];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (tile + k * WARP < tiles)
                    g.s = merge(g.s, some[k], loss.scale);
        }
        g.s = merge_lanes<WARP>(g.s, loss.scale);
    }
    if (lane < count && label != ELSEWHERE)
        g.z_label = z_label[first + index];
    if (lane < count && logit_sums)
        g.weighted = logit_sums[first + index];
    if (only_save) {
        if (own)
            saved[first + index] = g;
        return;
    }
    Totals totals = {};
    RowGradient gradient = gradient_of_skipped(IGNORED);
    if (own) {
        gradient = finish_row(loss, row, label, &g, row_scale, gradients, piece == 0 ? &totals : NULL);
        if (saved && piece == 0)
            saved[first + index] = g;
        if (piece == 0)
            put_gradient(loss, first + index, label, &gradient, spread, gradients, labels);
    }
    for (int i = 0; i < count && exponentials; i++) {
        if (i > 0)
            begin_conversion(begin + i);
        conversion.finish(first_class, end_class, from_lane(gradient, i), __shfl_sync(~0u, label, i), loss);
    }
    if (blockIdx.x != unit * row_blocks)
        return;
    const unsigned units = gridDim.x / row_blocks;
    add_block_totals(totals, block_totals + unit);
    if (finished && block_arrives_last(finished, units))
        write_loss_of_blocks(loss, block_totals, units);
}

/* Brings level + tilt * t below 1 for all t of exponentials that fp16 can store, so that their
 * products do not overflow; p makes up for it. */
DEVICE void bound_tilt(RowGradient *gradient) {
    constexpr float LEAST_LOGARITHM = 17.0f; /* -log(2^-24), and a little */
    const float bound = fabsf(gradient->level) + LEAST_LOGARITHM * fabsf(gradient->tilt);
    if (!(bound > 1.0f && bound < INFINITY))
        return;
    const float factor = exp2f(ceilf(log2f(bound)));
    gradient->level /= factor;
    gradient->tilt /= factor;
    gradient->p *= factor;
}

/* The coefficients of rows whose statistics were saved. `bounds`: exponentials are fp16. A thread per
 * row. */
__global__ __launch_bounds__(ROW_THREADS) void finish_saved(const __grid_constant__ Loss loss,
                                                            const __grid_constant__ ActiveRows active,
                                                            const LossStats<FULL> *saved, double row_scale,
                                                            RowGradient *gradients, SpreadPlace spread,
                                                            const __grid_constant__ Labels labels, bool bounds) {
    wait_for_previous_kernel();
    const int64_t k = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    if (k >= active.all)
        return;
    const int label = active.classes[k];
    LossStats<FULL> g = saved[k];
    if (loss.dentropy.data) /* the entropy is log(sum) - scale * moment / sum */
        g.moment = (logf(g.s.sum) - loss.entropy.get(active.order[k])) * g.s.sum / loss.scale;
    Totals totals = {};
    RowGradient gradient = finish_row(loss, active.order[k], label, &g, row_scale, true, &totals);
    if (loss.dentropy.data && bounds && !gradient.constant)
        bound_tilt(&gradient);
    put_gradient(loss, k, label, &gradient, spread, gradients, labels);
}

/* Results and coefficients of all rows, from their statistics over the classes of all ranks. The
 * coefficients are for this rank's exponentials, which have the pivots of its own statistics. The
 * label's element belongs to the rank that has the class. A thread per row. */
__global__ __launch_bounds__(ROW_THREADS) void finish_ranks(const __grid_constant__ Loss loss,
                                                            const __grid_constant__ ActiveRows active,
                                                            const LossStats<FULL> *own, const LossStats<FULL> *merged,
                                                            double row_scale, RowGradient *gradients,
                                                            SpreadPlace spread, const __grid_constant__ Labels labels,
                                                            Totals *block_totals) {
    wait_for_previous_kernel();
    const int64_t k = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    Totals totals = {};
    if (k < active.all) {
        const int64_t row = active.order[k], label = loss.class_of(loss.load_label(row));
        const LossStats<FULL> g = merged[k];
        RowGradient gradient = finish_row(loss, row, label, &g, row_scale, true, &totals);
        const bool here = label >= 0 && loss.has_class(label);
        if (!gradient.constant) {
            const float pivot = own[k].s.max;
            gradient.p *= pivot == -INFINITY ? 0.0f : expf((pivot_at(pivot) - gradient.pivot) * loss.scale);
            gradient.pivot = pivot;
            if (!here)
                gradient.at_label = 0.0f;
        }
        place_spread(loss, label, here, spread, &gradient);
        gradients[k] = gradient;
        if (labels.of_row)
            labels.add(static_cast<int>(k),
                       here && gradient.at_label != 0.0f ? static_cast<int>(loss.column_of(label)) : -1);
    }
    add_block_totals(totals, block_totals + blockIdx.x);
}

/* ---- exponentials ---------------------------------------------------------------------------- */

/* dz of a row is p * e at all classes but the label's. There it is at_label, in most rows the
 * largest element. In dx neither p nor at_label is rounded to the inputs' dtype: dx = p * (e W) +
 * at_label * W[label]. dW = e^T x_scaled, with x_scaled = p * x, and at_label * x is added to the
 * label's row of dW.
 *
 * With label smoothing, dz also has -spread * w_v at every class, the label's too. That is a product
 * of two vectors: dx gets -spread * (the sum of all w_v W_v), and row v of dW gets -w_v * (the sum of
 * all spread * x).
 *
 * With a softcap as well, every element is multiplied by the softcap's derivative. So the spread is
 * subtracted from the exponentials, in a pass over them, which reads the logits back out of them. */

constexpr int LABEL_THREADS = 256;

/* e of a group's rows, in two parts: the classes below `split`, and the others. */
template <typename T> struct Exponentials {
    T *low, *high;
    int64_t low_stride, high_stride, split;

    DEVICE T *at(int64_t row, int64_t v) const {
        return v < split ? low + row * low_stride + v : high + row * high_stride + (v - split);
    }
};

/* Rescales the tiles of a row whose pivot is not the row's, which happens if logits are further
 * apart than the dtype's range allows. By a block. */
template <typename T>
DEVICE void rescale_tiles(const Exponentials<T> &e, int64_t index, const RowStats *stats, int tiles, float row_pivot,
                          const Loss &loss) {
    constexpr int N = WIDE<T>;
    bool apart = false;
    for (int tile = threadIdx.x; tile < tiles; tile += LABEL_THREADS)
        apart |= stats[tile].max != row_pivot;
    static_assert(TILE_CLASSES % N == 0, "a pack is in one tile");
    const int64_t end = __syncthreads_or(apart) ? loss.classes : 0;
    for (int64_t v = threadIdx.x * N; v < end; v += LABEL_THREADS * N) { /* padding up to a multiple of N too */
        const float pivot = stats[v / TILE_CLASSES].max;
        if (pivot == row_pivot)
            continue;
        const float factor = expf((pivot - row_pivot) * loss.scale);
        float all[N];
        load_floats(all, e.at(index, v));
#pragma unroll
        for (int j = 0; j < N; j++)
            all[j] *= factor;
        store_once<T, N>(e.at(index, v), packed<T>(all));
    }
    __syncthreads();
}

/* The same for all rows, whose pivots are the saved ones. A block per row. */
template <typename T>
__global__ __launch_bounds__(LABEL_THREADS) void unify_pivots(const __grid_constant__ Loss loss,
                                                              const __grid_constant__ ActiveRows active,
                                                              const RowStats *stats, int tiles,
                                                              const LossStats<FULL> *saved,
                                                              const __grid_constant__ Exponentials<T> e) {
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    if (index < *active.count)
        rescale_tiles(e, index, stats + index * tiles, tiles, saved[index].s.max, loss);
}

/* Multiplies e^t of a row by level + tilt * t: the gradient of the entropy. t is the logarithm of the
 * rounded e^t; its error, 2^-9 or 2^-12, is as large as that of the product's rounding. By a block. */
template <typename T>
DEVICE void tilt_exponentials(const Exponentials<T> &e, int64_t index, const RowGradient &gradient, int64_t classes) {
    constexpr int N = WIDE<T>;
    for (int64_t v = threadIdx.x * N; v < classes; v += blockDim.x * N) {
        float all[N];
        load_floats(all, e.at(index, v));
#pragma unroll
        for (int j = 0; j < N; j++)
            all[j] *= tilted(gradient.level, gradient.tilt, __logf(all[j]));
        store_once<T, N>(e.at(index, v), packed<T>(all));
    }
    __syncthreads();
}

/* The derivative of the softcap at a logit, from its exponential e: the capped logit is pivot +
 * log(e) / scale. The error of e's rounding, 2^-9, moves it by that much over the scale. */
struct Slope {
    float at_pivot, per_log; /* the capped logit over the softcap is at_pivot + per_log * log(e) */

    DEVICE Slope(const Loss &loss, float pivot)
        : at_pivot(pivot / loss.softcap), per_log(1.0f / (loss.scale * loss.softcap)) {
    }
    /* 0 where e is 0: no class has such a small one (Problem::reads_logits). */
    DEVICE float of(float e) const {
        const float t = fmaf(per_log, __logf(e), at_pivot);
        return 1.0f - fminf(t * t, 1.0f);
    }
};

/* e of a row to slope(e) * (level * e - spread * w_v). By a block. */
template <typename T>
DEVICE void subtract_spread(const Exponentials<T> &e, int64_t index, const RowGradient &gradient, const Loss &loss) {
    constexpr int N = WIDE<T>;
    const Slope slope(loss, pivot_at(gradient.pivot));
    for (int64_t v = threadIdx.x * N; v < loss.classes; v += blockDim.x * N) {
        float all[N];
        load_floats(all, e.at(index, v));
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float w = v + j < loss.classes ? static_cast<float>(loss.column_weight(v + j)) : 0.0f;
            all[j] = slope.of(all[j]) * fmaf(gradient.level, all[j], -gradient.spread * w);
        }
        store_once<T, N>(e.at(index, v), packed<T>(all));
    }
    __syncthreads();
}

/* Rescales tiles (`stats` NULL: all have the row's pivot), zeroes the label's e, and writes x_scaled:
 * the last of its x_rows rows are the group's. A block per row. */
template <typename T>
__global__ __launch_bounds__(LABEL_THREADS, 6) void adjust(const __grid_constant__ Loss loss, int64_t first,
                                                           int64_t rows, const RowStats *stats, int tiles,
                                                           const RowGradient *gradients,
                                                           const __grid_constant__ Exponentials<T> e,
                                                           const __grid_constant__ ActiveX<T> x, int64_t depth,
                                                           T *x_scaled, int64_t x_rows, int64_t scaled_stride) {
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    const int count = x.active.among(first, rows);
    if (index >= count)
        return;
    const RowAhead<T, LABEL_THREADS> from(x.at(first + index),
                                          depth); /* arrives while the exponentials are looked at */
    const RowGradient gradient = gradients[first + index];
    if (!gradient.constant) {
        if (stats)
            rescale_tiles(e, index, stats + index * tiles, tiles, gradient.pivot, loss);
        if (loss.dentropy.data)
            tilt_exponentials(e, index, gradient, loss.classes);
        if (loss.weighted && loss.softcap != 0.0f)
            subtract_spread(e, index, gradient, loss);
        const int64_t label = loss.load_label(x.active.order[first + index]);
        if (threadIdx.x == 0 && loss.has_class(label))
            *e.at(index, loss.column_of(label)) = from_float<T>(0.0f);
    }
    T *const to = x_scaled + (x_rows - count + index) * scaled_stride;
    from.for_each([&](int64_t i, auto pack) {
        float all[sizeof pack / sizeof(T)];
        unpack(pack, all);
        for (float &value : all)
            value = gradient.constant ? gradient.p : gradient.p * value;
        store_once<T, sizeof pack / sizeof(T)>(to + i, packed<T>(all));
    });
}

/* dx of active rows from `first` on, from their sums of dz W or, if there are gradients, of e W;
 * zeros for the other rows of the grid. `row_blocks` blocks per row. The sums are in `parts` parts,
 * part_stride elements apart. `wide`: rows of all matrices begin at multiples of 16 bytes and are
 * contiguous. */
template <typename T, typename U>
__global__ __launch_bounds__(LABEL_THREADS) void store_dx(const __grid_constant__ Loss loss,
                                                          const __grid_constant__ ActiveRows active, int64_t first,
                                                          const __grid_constant__ Rows dx, int64_t step, bool wide,
                                                          int64_t columns, const float *sums, int64_t stride, int parts,
                                                          int64_t part_stride, int row_blocks, const float *alpha,
                                                          const RowGradient *gradients, const T *weight,
                                                          int64_t weight_stride, const float *weight_sum) {
    constexpr int AT_ONCE = 8;
    wait_for_previous_kernel();
    const int own = blockIdx.x / row_blocks, piece = blockIdx.x - own * row_blocks;
    const int64_t share = round_up<int64_t>(ceil_div<int64_t>(columns, row_blocks), 4), begin = piece * share;
    const int64_t k = first + own, row = active.order[k];
    const bool is_active = k < *active.count;
    const float factor = *alpha; /* loaded early */
    const float p = gradients && is_active ? gradients[k].p : 1.0f,
                at_label = gradients && is_active ? gradients[k].at_label : 0.0f,
                spread = weight_sum && is_active ? gradients[k].spread : 0.0f;
    U *const to = dx.at<U>(row);
    const T *const w = at_label != 0.0f ? weight + loss.column_of(loss.load_label(row)) * weight_stride : NULL;
    const auto store_some = [&](int64_t i, auto n) {
        float sum[n.value] = {}, label_weight[n.value] = {}, all_weights[n.value] = {};
        for (int part = 0; part < parts && is_active; part += AT_ONCE) {
            float some[AT_ONCE][n.value] = {};
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
                if (part + p < parts)
                    load_floats(some[p], sums + (part + p) * part_stride + own * stride + i);
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
                for (int j = 0; j < n.value; j++)
                    sum[j] += some[p][j];
        }
        if (w)
            load_floats(label_weight, w + i);
        if (weight_sum)
            load_floats(all_weights, weight_sum + i);
#pragma unroll
        for (int j = 0; j < n.value; j++)
            sum[j] =
                is_active ? factor * fmaf(p, sum[j], fmaf(at_label, label_weight[j], -spread * all_weights[j])) : 0.0f;
        store_once<U, n.value>(to + i * step, packed<U>(sum));
    };
    const int64_t count = max(int64_t(0), min(share, columns - begin));
    if (wide)
        for_elements<4>(count, [&](int64_t i, auto n) { store_some(begin + i, n); });
    else
        for_elements<1>(count, [&](int64_t i, auto n) { store_some(begin + i, n); });
}

/* ---- host side ------------------------------------------------------------------------------- */

/* Rows per warp of finish_tiles_kernel: if they have few tiles, so many that all warps
 * run at the same time. */
int rows_per_warp(const Run &run, int64_t rows, int64_t tiles) {
    constexpr int FEW = 8;
    const int64_t warps = run.context->cuda_state->multiprocessors * ROW_BLOCKS * (ROW_THREADS / WARP);
    const int64_t each = tiles <= FEW && !run.problem.invariant ? ceil_div(rows, warps) : 1;
    return static_cast<int>(min(each, int64_t(WARP)));
}

/* Blocks per row of finish_tiles_kernel, if it converts: with a warp per row, few rows would leave most
 * of the GPU idle. Blocks merge tiles in another order than warps, so batch-invariant calls have none. */
int64_t blocks_per_row(const Run &run, int64_t rows, int64_t tiles) {
    constexpr int64_t BLOCK_TILES = RowConversion<uint16_t>::CLASSES / TILE_CLASSES * ROW_WARPS;
    const int64_t enough = run.context->cuda_state->multiprocessors * (ROW_BLOCKS / 2);
    return rows < enough * ROW_WARPS && !run.problem.invariant ? ceil_div(tiles, BLOCK_TILES) : 1;
}

} // namespace

void finish_tiles(HopperRun *run, int64_t first, int64_t rows, const RowStats *stats, const OptionStats *more,
                  const Dz &to_dz, LossStats<FULL> *saved, bool only_save) {
    const int64_t tiles = tiles_across(run->problem.classes);
    const int each = rows_per_warp(*run, rows, tiles);
    const int64_t row_blocks = to_dz.data ? blocks_per_row(*run, rows, tiles) : 1,
                  blocks = row_blocks > 1 ? rows : ceil_div<int64_t>(rows, ROW_WARPS * each);
    const bool writes_loss = rows == run->problem.rows && !only_save && run->loss.forward;
    for_16_bit(run->problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run->context, overlapping(blocks * row_blocks, ROW_THREADS),
               more ? finish_tiles_kernel<T, FULL> : finish_tiles_kernel<T, PLAIN>, run->loss, run->active, first, rows,
               each, static_cast<int>(row_blocks), stats, more, static_cast<int>(tiles),
               static_cast<const float *>(run->z_label), run->logit_sums, static_cast<double>(run->row_scale),
               run->gradients, run->spread, run->labels, reinterpret_cast<T *>(to_dz.data), to_dz.stride, saved,
               only_save, run->block_totals + run->blocks, writes_loss ? &run->common->finished : NULL);
    });
    run->loss_is_written = writes_loss;
    run->blocks += only_save ? 0 : blocks;
}

void finish_saved_rows(const HopperRun &run, const LossStats<FULL> *saved) {
    launch(run.context, overlapping(ceil_div<int64_t>(run.problem.rows, ROW_THREADS), ROW_THREADS), finish_saved,
           run.loss, run.active, saved, static_cast<double>(run.row_scale), run.gradients, run.spread, run.labels,
           run.problem.dtype == RAFTER_F16);
}

void finish_rank_rows(HopperRun *run, const LossStats<FULL> *own, const LossStats<FULL> *merged) {
    const int64_t blocks = ceil_div<int64_t>(run->problem.rows, ROW_THREADS);
    launch(run->context, overlapping(blocks, ROW_THREADS), finish_ranks, run->loss, run->active, own, merged,
           static_cast<double>(run->row_scale), run->gradients, run->spread, run->labels,
           run->block_totals + run->blocks);
    run->blocks += blocks;
}

void unify_saved_pivots(const HopperRun &run, const RowStats *stats, const LossStats<FULL> *saved, const Dz &dz) {
    for_16_bit(run.problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        T *const data = reinterpret_cast<T *>(dz.data);
        launch(run.context, overlapping(run.problem.rows, LABEL_THREADS), unify_pivots<T>, run.loss, run.active, stats,
               static_cast<int>(tiles_across(run.problem.classes)), saved,
               Exponentials<T>{data, data, dz.stride, dz.stride, dz.classes});
    });
}

void adjust_exponentials(const HopperRun &run, int64_t first, int64_t rows, const RowStats *stats, const Dz &dz,
                         const Dz &rest, const Matrix &x_scaled) {
    for_16_bit(run.problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const Exponentials<T> e = {reinterpret_cast<T *>(dz.data), reinterpret_cast<T *>(rest.data), dz.stride,
                                   rest.stride, dz.classes};
        launch(run.context, overlapping(rows, LABEL_THREADS), adjust<T>, run.loss, first, rows, stats,
               static_cast<int>(tiles_across(run.problem.classes)), static_cast<const RowGradient *>(run.gradients), e,
               run.active_x<T>(), x_scaled.columns, static_cast<T *>(const_cast<void *>(x_scaled.data)), x_scaled.rows,
               x_scaled.stride);
    });
}

void store_rank_dx(const HopperRun &run, const float *sums, const RowGradient *gradients, int parts,
                   int64_t part_stride, float *to) {
    const Problem &p = run.problem;
    rafter_view view = {};
    view.data = reinterpret_cast<char *>(to);
    view.dtype = RAFTER_F32;
    view.ndim = 2;
    view.numel = p.rows * p.depth;
    view.shape[0] = p.rows;
    view.shape[1] = p.depth;
    view.stride[0] = p.depth_stride();
    view.stride[1] = 1;
    const float *const one = run.context->cuda_state->zero_and_one + 1;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run.context, overlapping(p.rows, LABEL_THREADS), store_dx<T, float>, run.loss, run.active, int64_t(0),
               rows_of(view, 1), int64_t(1), true, p.depth, sums, p.depth_stride(), parts, part_stride, 1, one,
               gradients, static_cast<const T *>(run.w.data), run.w.stride, run.weight_sum);
    });
}

void store_dx_rows(const HopperRun &run, int64_t first, int64_t rows, const float *sums, const RowGradient *gradients,
                   int parts, int64_t part_stride) {
    const Problem &p = run.problem;
    /* Few rows: several blocks for each, which have 4 columns per thread. */
    const int64_t wanted = ceil_div<int64_t>(2 * run.context->cuda_state->multiprocessors, rows),
                  most = ceil_div<int64_t>(p.depth, 4 * LABEL_THREADS);
    const int row_blocks = static_cast<int>(max(int64_t(1), min(wanted, most)));
    const rafter_view &dx = run.call.dx;
    const int last = dx.ndim - 1;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const auto launch_with = [&](auto dx_zero) {
            launch(run.context, overlapping(rows * row_blocks, LABEL_THREADS), store_dx<T, decltype(dx_zero)>, run.loss,
                   run.active, first, rows_of(dx, last), dx.shape[last] > 1 ? dx.stride[last] : 1, p.dx_layout.direct,
                   p.depth, sums, p.depth_stride(), parts, part_stride, row_blocks, run.alpha(), gradients,
                   static_cast<const T *>(run.w.data), run.w.stride, gradients ? run.weight_sum : NULL);
        };
        if (dx.dtype == RAFTER_F32)
            launch_with(0.0f);
        else
            launch_with(zero);
    });
}

} // namespace lce
