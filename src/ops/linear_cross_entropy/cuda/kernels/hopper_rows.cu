/* SPDX-License-Identifier: Apache-2.0 */
/* How the Hopper variants finish rows: results and coefficients from the statistics of tiles; see
 * hopper_steps.cuh. */
#include <type_traits>

#include "ops/linear_cross_entropy/cuda/finish_row.cuh"
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

constexpr int ROW_BLOCKS = 6; /* blocks of finish_tiles_kernel per multiprocessor */
constexpr int ROW_WARPS = ROW_THREADS / WARP;

/* A warp that converts a row's exponentials to dz in place. Those of each tile are relative to the
 * tile's own maximum. A lane takes PACKS packs at a time. The first ones are loaded
 * before the row's gradient is known. */
template <typename T> struct RowConversion {
    static constexpr int N = WIDE<T>, PACKS = 4, CLASSES = PACKS * WARP * N;
    static_assert(gemm::Together::COLUMNS % N == 0 && gemm::InTurns::COLUMNS % N == 0, "a pack is in one tile");
    T *row;
    const RowStats *stats;
    int tile_classes;
    Pack<T, N> pack[PACKS];
    float max[PACKS];

    static DEVICE int64_t at(int64_t first, int k) {
        return first + (k * WARP + threadIdx.x % WARP) * N;
    }
    DEVICE void load(int64_t first, int64_t classes) {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (const int64_t v = at(first, k); v < classes) {
                pack[k] = load_once<T, N>(row + v);
                max[k] = stats[static_cast<unsigned>(v) / tile_classes].max;
            }
    }
    /* Converts classes [begin, end), of which the first have been loaded. With a softcap, exponentials have
     * been multiplied by its derivative, and there is no label smoothing. */
    DEVICE void finish(int64_t begin, int64_t end, const RowGradient &gradient, int label, const Loss &loss) {
        for (int64_t first = begin; first < end; first += CLASSES) {
            if (first > begin)
                load(first, loss.classes);
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
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
                if (loss.smooths)
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

/* The gradient that lane `from` has. */
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

/* The statistics of a row over a tile. */
template <int OPTIONS> DEVICE LossStats<OPTIONS> load_tile(const RowStats *stats, const OptionStats *more, int64_t at) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    g.s = stats[at];
    if constexpr (OPTIONS == FULL) {
        const OptionStats other = more[at];
        g.logit_sum = other.logit_sum;
        g.moment = other.moment;
        g.best = other.best;
        g.argmax = other.argmax;
    }
    return g;
}

/* Adapts the coefficients of a row to the place where the spread is subtracted. SPREAD_APART: the spread
 * is not part of at_label, because it is subtracted from all classes. SPREAD_IN_EXPONENTIALS: p becomes
 * the larger of p and the spread, a factor of both; the exponentials get what is left of p, `level`, and
 * of the spread. So they have no large elements if p is small, or 0. `here`: this rank has the label. */
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
 * row_blocks > 1: a row takes this many blocks. Each of them merges all of the row's tiles, and its warps
 * convert `piece_classes` classes each; the first warp of the row writes its results.
 *
 * finished: not NULL if these are all rows of the call: counts the blocks, of which the last one writes the
 * loss. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS, ROW_BLOCKS) void finish_tiles_kernel(
    const __grid_constant__ Loss loss, const __grid_constant__ ActiveRows active, int64_t first, int64_t rows, int each,
    int row_blocks, int64_t piece_classes, const RowStats *stats, const OptionStats *more, int tiles, int tile_classes,
    const float *z_label, const float *logit_sums, double row_scale, RowGradient *gradients, SpreadPlace spread,
    const __grid_constant__ Labels labels, T *exponentials, int64_t stride, LossStats<FULL> *saved, bool only_save,
    Totals *block_totals, unsigned *finished) {
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t unit = blockIdx.x / row_blocks; /* the blocks of a row, or a block */
    const int piece = row_blocks > 1 ? static_cast<int>(blockIdx.x - unit * row_blocks) * ROW_WARPS + warp : 0;
    const int64_t begin = row_blocks > 1 ? unit : (unit * ROW_WARPS + warp) * each, index = begin + lane,
                  first_class = piece * piece_classes,
                  end_class = row_blocks > 1 ? min(loss.classes, first_class + piece_classes) : loss.classes;
    const int count = active.among(first + begin, min(int64_t(each), rows - begin)); /* active rows come first */
    const bool own = lane < each && index < rows;
    const int64_t row = own ? active.order[first + index] : 0;
    const int label = own ? active.classes[first + index] : 0;
    RowConversion<T> conversion;
    const auto begin_conversion = [&](int64_t i) {
        conversion.row = exponentials + i * stride;
        conversion.stats = stats + i * tiles;
        conversion.tile_classes = tile_classes;
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
        g.logit_sum = logit_sums[first + index];
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

/* ---- host side ------------------------------------------------------------------------------- */

/* Rows per warp of finish_tiles_kernel. If rows have few tiles: so many that all warps run at the same
 * time. */
int rows_per_warp(const Run &run, int64_t rows, int64_t tiles) {
    constexpr int FEW = 8;
    const int64_t warps = run.context->cuda_state->multiprocessors * ROW_BLOCKS * (ROW_THREADS / WARP);
    const int64_t each = tiles <= FEW && !run.problem.invariant ? ceil_div(rows, warps) : 1;
    return static_cast<int>(min(each, int64_t(WARP)));
}

/* How finish_tiles_kernel converts: with a warp per row, few rows would leave most of the GPU idle. Blocks
 * merge tiles in another order than warps, so batch-invariant calls have one per row. */
struct RowPieces {
    int64_t row_blocks, classes; /* blocks per row; classes per warp, if there are several */

    /* As few classes per warp as let all blocks run at the same time, unless that is one block per row. */
    static RowPieces of(const Run &run, int64_t rows) {
        constexpr int64_t CLASSES = RowConversion<uint16_t>::CLASSES, BLOCK_CLASSES = CLASSES * ROW_WARPS;
        const int64_t blocks = run.context->cuda_state->multiprocessors * ROW_BLOCKS;
        if (rows >= blocks / 2 * ROW_WARPS || run.problem.invariant)
            return {1, 0};
        const int64_t classes = run.problem.classes, most = max(blocks / rows, int64_t(2)),
                      each = ceil_div(ceil_div(classes, BLOCK_CLASSES), most);
        return {ceil_div(classes, BLOCK_CLASSES * each), CLASSES * each};
    }
};

} // namespace

void finish_tiles(HopperRun *run, int64_t first, int64_t rows, const RowStats *stats, const OptionStats *more,
                  const Dz &to_dz, LossStats<FULL> *saved, bool only_save) {
    const int each = rows_per_warp(*run, rows, run->tiles);
    const RowPieces pieces = to_dz.data ? RowPieces::of(*run, rows) : RowPieces{1, 0};
    const int64_t row_blocks = pieces.row_blocks,
                  blocks = row_blocks > 1 ? rows : ceil_div<int64_t>(rows, ROW_WARPS * each);
    const bool writes_loss = rows == run->problem.rows && !only_save && run->loss.forward;
    for_16_bit(run->problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        launch(run->context, Launch{blocks * row_blocks, ROW_THREADS},
               more ? finish_tiles_kernel<T, FULL> : finish_tiles_kernel<T, PLAIN>, run->loss, run->active, first, rows,
               each, static_cast<int>(row_blocks), pieces.classes, stats, more, run->tiles, run->tile_classes,
               static_cast<const float *>(run->z_label), run->logit_sums, static_cast<double>(run->row_scale),
               run->gradients, run->spread, run->labels, reinterpret_cast<T *>(to_dz.data), to_dz.stride, saved,
               only_save, run->block_totals + run->blocks, writes_loss ? &run->common->finished : NULL);
    });
    run->loss_is_written = writes_loss;
    run->blocks += only_save ? 0 : blocks;
}

void finish_saved_rows(const HopperRun &run, const LossStats<FULL> *saved) {
    launch(run.context, Launch{ceil_div<int64_t>(run.problem.rows, ROW_THREADS), ROW_THREADS}, finish_saved, run.loss,
           run.active, saved, static_cast<double>(run.row_scale), run.gradients, run.spread, run.labels,
           run.problem.dtype == RAFTER_F16);
}

void finish_rank_rows(HopperRun *run, const LossStats<FULL> *own, const LossStats<FULL> *merged) {
    const int64_t blocks = ceil_div<int64_t>(run->problem.rows, ROW_THREADS);
    launch(run->context, Launch{blocks, ROW_THREADS}, finish_ranks, run->loss, run->active, own, merged,
           static_cast<double>(run->row_scale), run->gradients, run->spread, run->labels,
           run->block_totals + run->blocks);
    run->blocks += blocks;
}

} // namespace lce
