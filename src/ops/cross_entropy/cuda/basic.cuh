/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernels for basic calls share. A basic call has reduction mean or sum (forward also none), no
 * options beyond reduction and ignore_index, no outputs beyond loss, row_loss and lse, rows of whole
 * aligned packs, and contiguous per-row tensors. Some kernels take more: see BasicOptions and BasicRows.
 *
 * These kernels have few parameters and few instructions. Neither is in a cache when a kernel starts, and
 * with short rows it takes most of the time to load them.
 */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_BASIC_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_BASIC_CUH

#include "cuda/two_floats.cuh"
#include "ops/cross_entropy/cuda/problem.cuh"

namespace {

/* The same as negative_log_prob (loss.cuh) for a scale of 1, in floats. */
DEVICE float rounded_nll(float max, float target, TwoFloats log_sum) {
    const float value = rounded_sum(max, -target, log_sum);
    return value < 0.0f ? 0.0f : value;
}

/* dz = c * e^(z - pivot), minus `target` at the label. A negative label: dz = c in every column. */
struct alignas(16) BasicGradient {
    float c, pivot, target;
    int label;
};

/* Kernel arguments. The losses are computed by functions of loss.cuh. The gradient coefficients are
 * computed here again, for scale 1 and few options: those of loss.cuh take struct Loss, which means 3.5 KB
 * of parameters instead of 200 bytes, and at least four times the instructions. */
struct BasicArgs {
    const char *z; /* logits */
    char *dz;
    int64_t z_step, dz_step; /* between rows, in bytes */
    const void *labels;
    float *lse;
    int64_t ignore_index;
    int rows, classes;
    bool wide_labels;         /* int64, else int32 */
    int *bad_labels;          /* set to 1 when a label is out of range */
    double *losses;           /* one per row; or loss and weight of each block, a double2: see add_up_threads */
    unsigned *counter;        /* of blocks that have ended; 0 between calls */
    float *row_loss;          /* NULL: not wanted */
    float *loss;              /* NULL: not wanted */
    const float *dloss;       /* NULL: 1 */
    const float *denominator; /* NULL: the number of labels that are not ignored */
    bool mean, zero_if_all_ignored;
    /* Whether the call has label smoothing, and class weights; only for kernels whose BasicOptions allow them.
     * To test a number or a pointer for every row would take longer. */
    bool smooths, weighs;
    double label_share, spread; /* 1 - s, s / V */
    const float *class_weight;
    int64_t class_stride;

    template <typename T> DEVICE const T *row_of_z(int row) const {
        return reinterpret_cast<const T *>(z + row * z_step);
    }
    template <typename T> DEVICE T *row_of_dz(int row) const {
        return reinterpret_cast<T *>(dz + row * dz_step);
    }
    /* A label takes three functions: label_at finds it, load_label loads it, class_of checks it. So the load can
     * be in flight during other work. Finding it may take a division, which is a function call: it should come
     * before other loads, whose results the call would have to save. */
    DEVICE int label_at(int row) const {
        return row;
    }
    DEVICE int lse_at(int row) const {
        return row;
    }
    DEVICE int64_t load_label(int64_t at) const {
        return wide_labels ? load_now(static_cast<const int64_t *>(labels) + at)
                           : load_now(static_cast<const int *>(labels) + at);
    }
    DEVICE int class_of(int64_t label) const {
        return label == ignore_index                     ? static_cast<int>(IGNORED)
               : static_cast<uint64_t>(label) >= classes ? static_cast<int>(OUT_OF_RANGE)
                                                         : static_cast<int>(label);
    }
    /* The weight of a row with this label (from class_of), in a call with class weights. */
    DEVICE float class_weight_of(int label) const {
        return label >= 0 ? class_weight[label * class_stride] : label == IGNORED ? 0.0f : 1.0f;
    }
    /* The same in any call. All threads take the same branch: that is faster than to multiply by weights of 1. */
    DEVICE double weight_of(int label) const {
        return weighs ? class_weight_of(label) : label != IGNORED;
    }
    /* factor() times the weight of a row. */
    DEVICE double weighted(double factor, int label) const {
        return weighs ? factor * class_weight_of(label) : factor;
    }
    /* Whether label smoothing is weighted by class. */
    __host__ DEVICE bool weighs_smoothing() const {
        return smooths && weighs;
    }
    /* The loss of a row with label smoothing. `nll`: the negative logarithm of the label's probability, times its
     * weight. `total`: the sum of the row's logits, each times its class weight. weight_sum: the sum of the weights of
     * all classes. See results_of in loss.cuh. */
    DEVICE double smoothed(double nll, float max, double log_sum, float total, double weight_sum) const {
        return label_share * nll + spread * ((max * weight_sum - total) + log_sum * weight_sum);
    }
    DEVICE double smoothed(double nll, float max, double log_sum, float total) const {
        return smoothed(nll, max, log_sum, total, classes);
    }
    /* The number of labels that are not ignored. Called by all THREADS threads of a block. */
    template <int THREADS, typename L> DEVICE int count_in(const L *all) const {
        constexpr int AT_ONCE = 16;
        int counted = 0;
#pragma unroll 1
        for (int first = threadIdx.x; first < rows; first += AT_ONCE * THREADS) {
            L label[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                label[k] = all[min(first + k * THREADS, rows - 1)];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                counted += first + k * THREADS < rows && label[k] != ignore_index;
        }
        return block_sum(counted);
    }
    template <int THREADS> DEVICE int count() const {
        return wide_labels ? count_in<THREADS>(static_cast<const int64_t *>(labels))
                           : count_in<THREADS>(static_cast<const int *>(labels));
    }
    /* Whether gradients depend on a sum over all labels. */
    __host__ DEVICE bool needs_totals() const {
        return mean && !denominator;
    }
    /* `weight`: the sum of weight_of over all rows, if needs_totals(). */
    DEVICE double divided_upstream(double weight) const {
        return (dloss ? *dloss : 1.0f) / loss_divisor(mean, denominator, weight);
    }
    /* The factor of all gradients, dloss over the denominator, in a call without class weights. Called by all
     * THREADS threads of a block. */
    template <int THREADS> DEVICE double factor() const {
        return divided_upstream(needs_totals() ? count<THREADS>() : 0);
    }

    /* Writes the outputs of a row and returns its loss. `total`, if not NULL: see smoothed. weight_sum: NULL, if
     * label smoothing is not weighted. Called by one thread. */
    DEVICE double finish_row(int row, int label, RowStats s, float z_label, const float *total = nullptr,
                             const float *weight_sum = nullptr) const {
        return finish_row_at(row, row, label, s, z_label, total, weight_sum);
    }
    /* lse_at, loss_at: the index of the row in lse and in row_loss. */
    DEVICE double finish_row_at(int64_t lse_at, int64_t loss_at, int label, RowStats s, float z_label,
                                const float *total = nullptr, const float *weight_sum = nullptr) const {
        double value, log_sum_exp;
        if (label >= 0) {
            const double log_sum = log_of_sum(s.max == INFINITY ? NAN : s.sum);
            value = negative_log_prob(s.max, z_label, log_sum, 1.0);
            log_sum_exp = s.max + log_sum;
            if (weighs)
                value *= class_weight_of(label);
            if (total)
                value = smoothed(value, s.max, log_sum, *total, weight_sum ? *weight_sum : classes);
        } else {
            value = log_sum_exp = label == IGNORED ? 0.0 : NAN;
            flag_bad_label(label);
        }
        if (lse)
            lse[lse_at] = static_cast<float>(log_sum_exp);
        if (row_loss)
            row_loss[loss_at] = static_cast<float>(value);
        return value;
    }
    /* Writes the loss of all rows. `weight`: the sum of weight_of; without class weights, the number of
     * labels that are not ignored. Called by one thread. */
    DEVICE void write_loss(double sum, double weight) const {
        if (loss)
            *loss = reduced_loss(mean, zero_if_all_ignored, denominator, {sum, weight, weight});
    }
    DEVICE void flag_bad_label(int label) const {
        if (label == OUT_OF_RANGE)
            *static_cast<volatile int *>(bad_labels) = 1;
    }

    /* The gradient of a row: of one that is ignored or has a label out of range; from lse; from its statistics.
     * `factor`: factor(), times the weight of the row. */
    DEVICE BasicGradient gradient_of_skipped(int label) const {
        return {label == IGNORED ? 0.0f : NAN, 0.0f, 0.0f, label};
    }
    DEVICE BasicGradient gradient_from_lse(int label, double factor, float given) const {
        return {static_cast<float>(factor), given, static_cast<float>(factor), label};
    }
    DEVICE BasicGradient gradient_from_stats(int label, double factor, RowStats s) const {
        const float sum = s.max == INFINITY ? NAN : s.sum;
        if (sum == 0.0f)
            return {0.0f, 0.0f, 0.0f, static_cast<int>(IGNORED)};
        return {static_cast<float>(factor / static_cast<double>(sum)), s.max, static_cast<float>(factor), label};
    }
};

/* For batch-invariant calls in which rows, or the per-row tensors, have any strides. Compiled for these
 * arguments, kernels do the same arithmetic. So a row alone, which is evenly spaced, gets the same bits as
 * among rows that are not. */
struct SpacedArgs : BasicArgs {
    Rows z_rows, dz_rows, label_rows, lse_rows, row_loss_rows;

    template <typename T> DEVICE const T *row_of_z(int row) const {
        return z_rows.at<const T>(row);
    }
    template <typename T> DEVICE T *row_of_dz(int row) const {
        return dz_rows.at<T>(row);
    }
    DEVICE int64_t label_at(int row) const {
        return label_rows.offset(row);
    }
    DEVICE int64_t lse_at(int row) const {
        return lse_rows.offset(row);
    }
    template <int THREADS> DEVICE int count() const {
        if (label_rows.dims == 1 && label_rows.step == 1)
            return BasicArgs::count<THREADS>();
        int counted = 0;
        for (int row = threadIdx.x; row < rows; row += THREADS)
            counted += load_label(label_at(row)) != ignore_index;
        return block_sum(counted);
    }
    template <int THREADS> DEVICE double factor() const {
        return divided_upstream(needs_totals() ? count<THREADS>() : 0);
    }
    DEVICE double finish_row(int row, int label, RowStats s, float z_label, const float *total = nullptr,
                             const float *weight_sum = nullptr) const {
        return finish_row_at(lse ? lse_rows.offset(row) : 0, row_loss ? row_loss_rows.offset(row) : 0, label, s,
                             z_label, total, weight_sum);
    }
};

/* The sum of weight_of over rows first, first + step, ... U: BasicArgs or SpacedArgs. */
template <class U> DEVICE double add_weights(const U &u, int64_t first, int64_t step) {
    constexpr int AT_ONCE = 8; /* labels in flight, then weights: the compiler alone would wait for each */
    double sum = 0.0;
#pragma unroll 1
    for (; first < u.rows; first += AT_ONCE * step) {
        int64_t label[AT_ONCE];
        double weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t row = first + k * step;
            label[k] = row < u.rows ? u.load_label(u.label_at(static_cast<int>(row))) : u.ignore_index;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            weight[k] = u.weight_of(u.class_of(label[k]));
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            sum += weight[k];
    }
    return sum;
}

/* The last block to call this adds up block_losses, one per block, and writes the loss of all rows. Called
 * by all `threads` threads of every block, after one of them has written the block's own. */
DEVICE void add_up_blocks(const BasicArgs &u, const double2 *block_losses, unsigned threads) {
    if (!block_arrives_last(u.counter, gridDim.x))
        return;
    double2 sum = {};
    for (unsigned i = threadIdx.x; i < gridDim.x; i += threads) {
        const double2 more = __ldcg(&block_losses[i]);
        sum = make_double2(sum.x + more.x, sum.y + more.y);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        u.write_loss(sum.x, sum.y);
}

/* The same from `sum`: the loss and the weight of a thread's rows. */
template <int THREADS> DEVICE void add_up_threads(const BasicArgs &u, double2 sum) {
    double2 *const block_losses = reinterpret_cast<double2 *>(u.losses);
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        block_losses[blockIdx.x] = sum;
    add_up_blocks(u, block_losses, THREADS);
}

/* Label smoothing: what is subtracted from dz, `target` at the label and `spread` in all other columns. */
struct BasicSpread {
    float spread, target;

    DEVICE BasicSpread() {
    }
    DEVICE BasicSpread(float of_all, float at_label) : spread(of_all), target(at_label) {
    }
    /* `factor`: as in gradient_from_lse. */
    DEVICE BasicSpread(const BasicArgs &u, double factor)
        : spread(u.smooths ? static_cast<float>(factor * u.spread) : 0.0f),
          target(static_cast<float>(u.smooths ? factor * (u.label_share + u.spread) : factor)) {
    }
    /* If label smoothing is weighted by class. `weight`: that of the label. */
    DEVICE BasicSpread(const BasicArgs &u, double factor, float weight)
        : spread(static_cast<float>(factor * u.spread)),
          target(static_cast<float>(factor * (u.label_share + u.spread) * weight)) {
    }
    template <typename T> DEVICE float of(float z, const ScaledExp<T> &exp) const {
        return fmaf(exp.factor, exp.exp(z), -spread);
    }
    template <typename T> DEVICE float of(float z, const ScaledExp<T> &exp, float weight) const {
        return fmaf(exp.factor, exp.exp(z), -spread * weight);
    }
    DEVICE float at_label(float z_label, const BasicGradient &g) const {
        return g.c * expf(z_label - g.pivot) - target;
    }
};

/* Writes the gradient of packs first, first + step, ... of a row of `packs` packs. `mine`: one of them has
 * the label's column. The thread then writes that column once more, from its logit z_label. */
template <typename T, int COUNT>
DEVICE void write_packs(T *dz, const Pack<T, WIDE<T>> (&pack)[COUNT], int first, int step, int packs,
                        const BasicGradient &g, const BasicSpread &spread, float z_label, bool mine) {
    constexpr int N = WIDE<T>;
    const ScaledExp<T> scaled_exp(g.c, g.pivot, 1.0f);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (first + k * step < packs) {
            float d[N];
            unpack(pack[k], d);
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = g.label < 0 ? g.c : spread.of(d[j], scaled_exp);
            store_once<T, N>(dz + (first + k * step) * N, packed<T>(d));
        }
    if (mine)
        dz[g.label] = from_float<T>(spread.at_label(z_label, g));
}
/* The same without label smoothing. */
template <typename T, int COUNT>
DEVICE void write_packs(T *dz, const Pack<T, WIDE<T>> (&pack)[COUNT], int first, int step, int packs,
                        const BasicGradient &g, float z_label, bool mine) {
    write_packs(dz, pack, first, step, packs, g, BasicSpread(0.0f, g.target), z_label, mine);
}

/* ---- host ------------------------------------------------------------------------------------ */

/* The views of a call are collapsed: contiguous ones have one dimension, and logits have two if
 * their rows are evenly spaced. */
inline bool contiguous_or_missing(const rafter_view &view) {
    return !view.data || (view.ndim == 1 && (view.stride[0] == 1 || view.shape[0] == 1));
}

/* Whether all rows have the same number in memory. */
inline bool is_one_number(const rafter_view &view) {
    return view.ndim == 1 && view.stride[0] == 0;
}

/* Whether rows are evenly spaced and consist of whole, aligned packs. */
inline bool rows_of_packs(const rafter_view &view) {
    const int64_t bytes = rafter_dtype_bytes(view.dtype);
    return view.ndim == 2 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.shape[1] * bytes % 16 == 0 &&
           (view.stride[0] * bytes % 16 == 0 || view.shape[0] == 1);
}

/* Options that a basic kernel knows. */
struct BasicOptions {
    bool smoothing;     /* label smoothing */
    bool class_weights; /* unless there is label smoothing too */
    bool both = false;  /* class weights and label smoothing */
    bool all = false;   /* every option but row weights */
};

/* Whether rows are for basic_short_rows; else basic_warp_per_row takes up to 2 * SCANNED_ROWS of them. */
inline bool are_many_short_rows(const Problem &p) {
    constexpr int64_t SHORT = 64; /* packs */
    return !p.invariant && (are_many(p.rows) || (p.row_packs() <= SHORT && p.rows > SCANNED_ROWS));
}

/* Whether gradients are for basic_from_lse, though rows are short: many rows of more than 64 packs. */
inline bool writes_parts_of_rows(const Problem &p) {
    return !p.invariant && p.lse_given && p.row_packs() > 64 && p.rows > SCANNED_ROWS;
}

/* NULL if the call has no options or outputs that basic kernels do not know, else the reason. */
inline const char *why_not_basic_outputs(const Problem &p, const cross_entropy_call &call, BasicOptions known = {}) {
    const struct rafter_loss &l = call.loss;
    const bool smooths = l.smoothing != 0.0f, weights = l.class_weight.data;
    const bool more = l.z_loss != 0.0f || l.softcap != 0.0f || l.scale != 1.0f;
    if ((smooths && !known.smoothing) || (weights && !known.class_weights) || (weights && smooths && !known.both) ||
        (more && !known.all) || l.row_weight.data)
        return "the call has options that the kernel does not know";
    if (weights && l.zero_if_all_ignored) /* the kernels add up weights, and do not also count rows */
        return "the loss is 0 if all rows are ignored, and there are class weights";
    if (l.logprob.data || l.entropy.data || l.argmax.data)
        return "logprob, entropy or argmax is wanted";
    if (!p.invariant &&
        (!contiguous_or_missing(l.target) || !contiguous_or_missing(l.lse) || !contiguous_or_missing(l.row_loss)))
        return "target, lse or row_loss is strided";
    if (p.rows == 0 || p.classes == 0)
        return "there are no rows or no classes";
    return p.classes > 1 << 30 ? "it counts columns in 31 bits" : NULL;
}

/* The rows that a kernel takes: whole, aligned packs; or any contiguous and evenly spaced rows. In batch-invariant
 * calls both mean whole, aligned packs. */
enum BasicRows { WHOLE_PACKS, ANY_ROWS };

/* NULL if the call is basic, with any number of rows, else the reason. */
inline const char *why_not_basic_options(const Problem &p, const cross_entropy_call &call, BasicOptions known = {},
                                         BasicRows rows = WHOLE_PACKS) {
    const struct rafter_loss &l = call.loss;
    const bool each = p.forward && !p.gradient && !p.invariant && !l.row_loss.data && contiguous_or_missing(l.loss);
    if (l.reduction == RAFTER_NONE && !each)
        return "the reduction is none, and the call is not forward alone with one output per row";
    if (const char *const reason = why_not_basic_outputs(p, call, known))
        return reason;
    if (rows == ANY_ROWS ? !p.contiguous : p.strided)
        return "rows are not contiguous, or dlogits is aligned otherwise than logits";
    if (p.rows > MOST_INT_ROWS)
        return "it counts rows in 31 bits";
    if (p.invariant) /* SpacedArgs */
        return p.whole_packs ? NULL : "rows are not whole, aligned packs of 16 bytes";
    if (rows == ANY_ROWS)
        return call.logits.ndim > 2 || (p.gradient && call.dlogits.ndim > 2) ? "rows are not evenly spaced" : NULL;
    return !rows_of_packs(call.logits) || (p.gradient && !rows_of_packs(call.dlogits))
               ? "rows are not whole, aligned packs of 16 bytes"
               : NULL;
}

/* The same for kernels in which every block counts all labels. Rows may be many (are_many) only if each has at least
 * many_from bytes: then another kernel counts the labels. */
inline const char *why_not_basic(const Problem &p, const cross_entropy_call &call, BasicOptions known = {},
                                 BasicRows rows = WHOLE_PACKS, int64_t many_from = INT64_MAX) {
    if (are_many(p.rows) && !p.invariant && p.row_bytes < many_from)
        return "there are more labels than one block should count";
    if (p.invariant && p.row_packs() <= INVARIANT_PACKS)
        return "the call is batch invariant, and rows are short";
    return why_not_basic_options(p, call, known, rows);
}
/* The same for kernels that take ANY_ROWS, and know label smoothing or class weights. */
inline const char *why_not_any_rows(const Problem &p, const cross_entropy_call &call, int64_t many_from) {
    return why_not_basic(p, call, {!p.invariant, !p.invariant}, ANY_ROWS, many_from);
}

/* Reduction none: writes the loss of each row as if it were row_loss. */
inline void write_each_loss(BasicArgs *args, const cross_entropy_call &call) {
    if (call.loss.reduction == RAFTER_NONE) {
        args->row_loss = args->loss;
        args->loss = nullptr;
    }
}

/* All arguments but `losses`, which is in the workspace. */
inline BasicArgs basic_args(const rafter_cuda_state &device, const Problem &p, const cross_entropy_call &call) {
    const struct rafter_loss &l = call.loss;
    const int64_t element = rafter_dtype_bytes(call.logits.dtype);
    return {call.logits.data,
            p.gradient ? call.dlogits.data : nullptr,
            call.logits.stride[0] * element,
            p.gradient ? call.dlogits.stride[0] * element : 0,
            l.target.data,
            reinterpret_cast<float *>(l.lse.data),
            l.ignore_index,
            static_cast<int>(p.rows),
            static_cast<int>(p.classes),
            l.target.dtype == RAFTER_I64,
            device.bad_labels_on_device,
            nullptr,
            device.counters,
            reinterpret_cast<float *>(l.row_loss.data),
            reinterpret_cast<float *>(l.loss.data),
            reinterpret_cast<const float *>(l.dloss.data),
            reinterpret_cast<const float *>(l.denominator.data),
            l.reduction == RAFTER_MEAN,
            l.zero_if_all_ignored,
            l.smoothing != 0.0f,
            l.class_weight.data != nullptr,
            1.0 - static_cast<double>(l.smoothing),
            p.classes > 0 ? static_cast<double>(l.smoothing) / static_cast<double>(p.classes) : 0.0,
            reinterpret_cast<const float *>(l.class_weight.data),
            l.class_weight.stride[0]};
}

/* Whether a batch-invariant call needs SpacedArgs to find its rows. If not, kernels with BasicArgs do the same
 * arithmetic, and so give the same bits: only addresses are computed otherwise. */
inline bool is_spaced(const Problem &p, const cross_entropy_call &call) {
    const struct rafter_loss &l = call.loss;
    return p.invariant &&
           !(rows_of_packs(call.logits) && (!p.gradient || rows_of_packs(call.dlogits)) &&
             contiguous_or_missing(l.target) && contiguous_or_missing(l.lse) && contiguous_or_missing(l.row_loss));
}

/* The arguments of a batch-invariant call: see is_spaced. */
inline SpacedArgs spaced_args(const BasicArgs &args, const Problem &p, const cross_entropy_call &call) {
    const struct rafter_loss &l = call.loss;
    SpacedArgs all = {args,
                      rows_of(call.logits, call.logits.ndim - 1),
                      {},
                      loss_rows(l.target),
                      loss_rows(l.lse),
                      loss_rows(l.row_loss)};
    if (p.gradient)
        all.dz_rows = rows_of(call.dlogits, call.dlogits.ndim - 1);
    return all;
}

} // namespace

#endif
