/* SPDX-License-Identifier: Apache-2.0 */
/* What is done to exponentials before the products for dx and dW, and to dx after its product: see
 * hopper_steps.cuh. */
#include "ops/linear_cross_entropy/cuda/hopper_steps.cuh"

namespace lce {

namespace {

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
 * apart than the dtype's range allows. Called by a block. */
template <typename T>
DEVICE void rescale_tiles(const Exponentials<T> &e, int64_t index, const RowStats *stats, int tiles, int tile_classes,
                          float row_pivot, const Loss &loss) {
    constexpr int N = WIDE<T>;
    bool apart = false;
    for (int tile = threadIdx.x; tile < tiles; tile += LABEL_THREADS)
        apart |= stats[tile].max != row_pivot;
    static_assert(gemm::Together::COLUMNS % N == 0 && gemm::InTurns::COLUMNS % N == 0, "a pack is in one tile");
    const int64_t end = __syncthreads_or(apart) ? loss.classes : 0;
    for (int64_t v = threadIdx.x * N; v < end; v += LABEL_THREADS * N) { /* padding up to a multiple of N too */
        const float pivot = stats[static_cast<unsigned>(v) / tile_classes].max;
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
                                                              const RowStats *stats, int tiles, int tile_classes,
                                                              const LossStats<FULL> *saved,
                                                              const __grid_constant__ Exponentials<T> e) {
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    if (index < *active.count)
        rescale_tiles(e, index, stats + index * tiles, tiles, tile_classes, saved[index].s.max, loss);
}

/* Multiplies e^t of a row by level + tilt * t: the gradient of the entropy. t is the logarithm of the
 * rounded e^t; its error, 2^-9 or 2^-12, is as large as that of the product's rounding. Called by a block. */
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

/* Replaces e of a row by slope(e) * (level * e - spread * w_v). Called by a block. */
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
__global__ __launch_bounds__(LABEL_THREADS) void adjust(const __grid_constant__ Loss loss, int64_t first, int64_t rows,
                                                        const RowStats *stats, int tiles, int tile_classes,
                                                        const RowGradient *gradients,
                                                        const __grid_constant__ Exponentials<T> e,
                                                        const __grid_constant__ ActiveX<T> x, int64_t depth,
                                                        T *x_scaled, int64_t x_rows, int64_t scaled_stride) {
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    const int count = x.active.among(first, rows);
    if (index >= count)
        return;
    const RowGradient gradient = gradients[first + index];
    constexpr int N = WIDE<T>;
    if (!gradient.constant) {
        if (stats)
            rescale_tiles(e, index, stats + index * tiles, tiles, tile_classes, gradient.pivot, loss);
        if (loss.dentropy.data)
            tilt_exponentials(e, index, gradient, loss.classes);
        if (loss.smooths && loss.softcap != 0.0f)
            subtract_spread(e, index, gradient, loss);
        const int64_t label = loss.load_label(x.active.order[first + index]);
        if (threadIdx.x == 0 && loss.has_class(label))
            *e.at(index, loss.column_of(label)) = from_float<T>(0.0f);
    }
    const T *const from = x.at(first + index);
    T *const to = x_scaled + (x_rows - count + index) * scaled_stride;
    for_elements<N>(depth, [&](int64_t i, auto n) {
        float all[n.value];
        load_floats(all, from + i);
#pragma unroll
        for (int j = 0; j < n.value; j++)
            all[j] = gradient.constant ? gradient.p : gradient.p * all[j];
        store_once<T, n.value>(to + i, packed<T>(all));
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

} // namespace

void unify_saved_pivots(const HopperRun &run, const RowStats *stats, const LossStats<FULL> *saved, const Dz &dz) {
    for_16_bit(run.problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        T *const data = reinterpret_cast<T *>(dz.data);
        launch(run.context, Launch{run.problem.rows, LABEL_THREADS}, unify_pivots<T>, run.loss, run.active, stats,
               run.tiles, run.tile_classes, saved, Exponentials<T>{data, data, dz.stride, dz.stride, dz.classes});
    });
}

void adjust_exponentials(const HopperRun &run, int64_t first, int64_t rows, const RowStats *stats, const Dz &dz,
                         const Dz &rest, const Matrix &x_scaled) {
    for_16_bit(run.problem.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const Exponentials<T> e = {reinterpret_cast<T *>(dz.data), reinterpret_cast<T *>(rest.data), dz.stride,
                                   rest.stride, dz.classes};
        launch(run.context, Launch{rows, LABEL_THREADS}, adjust<T>, run.loss, first, rows, stats, run.tiles,
               run.tile_classes, static_cast<const RowGradient *>(run.gradients), e, run.active_x<T>(),
               x_scaled.columns, static_cast<T *>(const_cast<void *>(x_scaled.data)), x_scaled.rows, x_scaled.stride);
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
        launch(run.context, Launch{p.rows, LABEL_THREADS}, store_dx<T, float>, run.loss, run.active, int64_t(0),
               rows_of(view, 1), int64_t(1), true, p.depth, sums, p.depth_stride(), parts, part_stride, 1, one,
               gradients, static_cast<const T *>(run.w.data), run.w.stride, run.weight_sum);
    });
}

void store_dx_rows(const HopperRun &run, int64_t first, int64_t rows, const float *sums, const RowGradient *gradients,
                   int parts, int64_t part_stride) {
    const Problem &p = run.problem;
    /* If rows are few, each takes several blocks, with at least 4 columns per thread. */
    const int64_t wanted = ceil_div<int64_t>(2 * run.context->cuda_state->multiprocessors, rows),
                  most = ceil_div<int64_t>(p.depth, 4 * LABEL_THREADS);
    const int row_blocks = static_cast<int>(max(int64_t(1), min(wanted, most)));
    const rafter_view &dx = run.call.dx;
    const int last = dx.ndim - 1;
    for_16_bit(p.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        const auto launch_with = [&](auto dx_zero) {
            launch(run.context, Launch{rows * row_blocks, LABEL_THREADS}, store_dx<T, decltype(dx_zero)>, run.loss,
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
