/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows that lie side by side, as in segmentation, without options or with label smoothing, class weights or both
 * (option_columns.cu takes other options): a thread takes four rows (cuda/column_packs.cuh). Forward: one kernel.
 * Backward: a kernel that writes the factor of all gradients, then one that writes the gradients.
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/four_rows.cuh"

namespace {

constexpr int THREADS = 256; /* of a block, forward */
constexpr int GRADIENT_BLOCK = 128;
/* Forward blocks per multiprocessor. `steps`: elements of a row that a thread loads at once. */
constexpr int per_sm(bool loose, int steps) {
    return steps <= 2 || loose ? 4 : 3;
}
/* Elements of a row that a forward thread loads at once: `steps`; of loose rows at most 4. */
constexpr int loss_steps(bool loose, int steps) {
    return loose && steps > 4 ? 4 : steps;
}
/* Backward blocks per multiprocessor. */
template <typename T, bool LOOSE, bool LATE> constexpr int GRADIENT_BLOCKS = LOOSE ? 4 : !LATE || !NARROW<T> ? 5 : 6;
constexpr int SHORT_ROW = 16; /* classes */

/* The options that a kernel knows: none; label smoothing or class weights; also both at once. */
enum ColumnOptions { NONE, ONE, BOTH };

/* Kernel arguments. */
struct ColumnArgs {
    BasicArgs basic;
    ColumnPacks columns;
    float *row_losses;        /* reduction none: the loss of each row; NULL: not wanted */
    const float *row_dlosses; /* reduction none: dloss of each row; NULL: 1 */
    bool one_dloss;           /* dloss is one number for all rows */
};

/* Sets z_label of the rows whose label is among elements l, l + 1, ..., which are in `packs`. */
template <typename T, int STEPS>
DEVICE void look_for_labels(float (&z_label)[ROWS_PER_THREAD], const Pack<T, ROWS_PER_THREAD> (&packs)[STEPS],
                            const int (&label)[ROWS_PER_THREAD], int l) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            if (label[j] - l == k)
                z_label[j] = to_float(packs[k].v[j]);
}

/* The weight of a class in label smoothing. */
template <ColumnOptions OPTIONS> DEVICE float smoothing_weight(const BasicArgs &u, int class_number) {
    return OPTIONS == BOTH && u.weighs ? u.class_weight[class_number * u.class_stride] : 1.0f;
}
/* Adds elements l, l + 1, ... of each row, times their weights, to `total`. */
template <ColumnOptions OPTIONS, typename T, int STEPS>
DEVICE void add_logits(float (&total)[ROWS_PER_THREAD], const Pack<T, ROWS_PER_THREAD> (&packs)[STEPS], int l,
                       const BasicArgs &u) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (l + k < u.classes) {
            const float weight = smoothing_weight<OPTIONS>(u, l + k);
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                total[j] = fmaf(weight, to_float(packs[k].v[j]), total[j]);
        }
}
DEVICE float sum_of_weights(const BasicArgs &u) {
    float sum = 0.0f;
    for (int l = 0; l < u.classes; l++)
        sum += smoothing_weight<BOTH>(u, l);
    return sum;
}

/* Writes the outputs of four rows and adds their losses and their weights to `sum`. `total`, weight_sum: see
 * BasicArgs::smoothed; read only if there is label smoothing. */
template <ColumnOptions OPTIONS, typename T, bool LOOSE>
DEVICE void finish_rows(const ColumnArgs &a, const FourRows<T, LOOSE> &place, const int (&label)[ROWS_PER_THREAD],
                        const RowStats (&s)[ROWS_PER_THREAD], const float (&z_label)[ROWS_PER_THREAD],
                        const float (&total)[ROWS_PER_THREAD], float weight_sum, double2 *sum) {
    const BasicArgs &u = a.basic;
    float lse[ROWS_PER_THREAD], loss[ROWS_PER_THREAD], weight[ROWS_PER_THREAD], weights = 0.0f;
    int counted = 0;
    if (OPTIONS != NONE && u.weighs)
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            weight[j] = u.class_weight_of(label[j]);
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        const TwoFloats log_sum = log_in_floats(s[j].max == INFINITY ? NAN : s[j].sum);
        float &value = loss[j];
        value = rounded_nll(s[j].max, z_label[j], log_sum);
        lse[j] = rounded_sum(s[j].max, log_sum);
        if (OPTIONS != NONE && u.weighs)
            value *= weight[j];
        if (OPTIONS != NONE && u.smooths)
            value = static_cast<float>(u.smoothed(value, s[j].max, log_sum.number(), total[j], weight_sum));
        if (label[j] < 0) {
            value = lse[j] = label[j] == IGNORED ? 0.0f : NAN;
            u.flag_bad_label(label[j]);
        }
        if (OPTIONS != NONE && u.weighs)
            weights += weight[j];
        else
            counted += label[j] != IGNORED;
    }
    sum->x += (loss[0] + loss[1]) + (loss[2] + loss[3]);
    sum->y += OPTIONS != NONE && u.weighs ? weights : counted;
    put_four(place, u, a.row_losses, loss, lse);
}

template <typename T, bool LOOSE, ColumnOptions OPTIONS, int STEPS>
__global__ __launch_bounds__(THREADS, per_sm(LOOSE, STEPS)) void column_losses(const __grid_constant__ ColumnArgs a) {
    constexpr bool ONE_COPY = NARROW<T> || !LOOSE; /* else it would spill registers */
    wait_for_inputs();
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    double2 sum = {};
    const float weight_sum =
        OPTIONS == BOTH && u.weighs_smoothing() ? sum_of_weights(u) : static_cast<float>(u.classes);
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < c.packs; i += gridDim.x * THREADS) {
        const FourRows<T, LOOSE> place(c, i);
        const FourLabels<T, LOOSE> loaded(u, place);
        Pack<T, ROWS_PER_THREAD> packs[STEPS];
        place.load(packs, 0, c.length);
        int label[ROWS_PER_THREAD];
        loaded.classes(u, label);
        RowStats s[ROWS_PER_THREAD];
        float z_label[ROWS_PER_THREAD] = {}, total[ROWS_PER_THREAD] = {};
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            s[j] = no_elements();
        place.template for_packs<ONE_COPY>(packs, 0, c.length,
                                           [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
                                               add_lines_of(s, group, 1.0f);
                                               look_for_labels(z_label, group, label, l);
                                               if (OPTIONS != NONE && u.smooths)
                                                   add_logits<OPTIONS>(total, group, l, u);
                                           });
        finish_rows<OPTIONS>(a, place, label, s, z_label, total, weight_sum, &sum);
    }
    if (u.loss)
        add_up_threads<THREADS>(u, sum);
}

/* LATE: the labels' gradients are written after the others, which is faster unless rows are short. */
template <typename T, bool LOOSE, ColumnOptions OPTIONS, int STEPS, bool LATE>
__global__ __launch_bounds__(GRADIENT_BLOCK, GRADIENT_BLOCKS<T, LOOSE, LATE>) void column_gradients(
    const __grid_constant__ ColumnArgs a, const double *factor_at) {
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    const ColumnPart part(c, GRADIENT_BLOCK);
    if (part.index >= c.packs)
        return;
    const int from = part.from, to = part.to;
    const FourRows<T, LOOSE> place(c, part.index);
    const FourLabels<T, LOOSE> loaded(u, place);
    const FourUpstream four(place, u.lse, a.one_dloss ? nullptr : a.row_dlosses);
    const float(&given)[ROWS_PER_THREAD] = four.lse, (&dloss)[ROWS_PER_THREAD] = four.dloss;
    Pack<T, ROWS_PER_THREAD> packs[STEPS];
    place.load(packs, from, to);
    wait_for_previous_kernel();
    const double factor = *factor_at;
    int label[ROWS_PER_THREAD];
    loaded.classes(u, label);
    RowStats s[ROWS_PER_THREAD];
    bool from_lse = true;
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        s[j] = no_elements();
        from_lse = from_lse && (label[j] < 0 || lse_is_accurate<T>(given[j]));
    }
    if (!from_lse) { /* every part reads the whole rows */
        place.load(packs, 0, c.length);
        place.for_packs(packs, 0, c.length,
                        [&](int, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) { add_lines_of(s, group, 1.0f); });
        place.load(packs, from, to);
    }
    float at_label[ROWS_PER_THREAD] = {}; /* the logit, then the gradient */
    if constexpr (LATE) /* before dz may overwrite it; all these loads are issued before one is used */
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            if (label[j] >= from && label[j] < to)
                at_label[j] = to_float(place.x[label[j] * c.slabs.step[0] + place.apart(j)]);
    const bool both = OPTIONS == BOTH && u.weighs_smoothing();
    const float weight_sum = both ? sum_of_weights(u) : 0.0f;
    BasicGradient g[ROWS_PER_THREAD];
    BasicSpread spread[ROWS_PER_THREAD];
    ScaledExp<T> scaled[ROWS_PER_THREAD];
    bool constant[ROWS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        const double plain = a.row_dlosses ? factor * dloss[j] : factor;
        const float weight = both ? u.class_weight_of(label[j]) : 1.0f;
        const double own = both              ? plain * (u.label_share * weight + u.spread * weight_sum)
                           : OPTIONS != NONE ? u.weighted(plain, label[j])
                                             : plain;
        u.flag_bad_label(label[j]);
        g[j] = label[j] < 0                   ? u.gradient_of_skipped(label[j])
               : lse_is_accurate<T>(given[j]) ? u.gradient_from_lse(label[j], own, given[j])
                                              : u.gradient_from_stats(label[j], own, s[j]);
        spread[j] = both              ? BasicSpread(u, plain, weight)
                    : OPTIONS != NONE ? BasicSpread(u, own)
                                      : BasicSpread(0.0f, static_cast<float>(own));
        scaled[j] = ScaledExp<T>(g[j].c, g[j].pivot, 1.0f);
        constant[j] = g[j].label < 0;
        at_label[j] = spread[j].at_label(at_label[j], g[j]);
    }
    place.for_packs(packs, from, to, [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
        if constexpr (!LATE) {
            float z_label[ROWS_PER_THREAD] = {};
            look_for_labels(z_label, group, label, l);
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                at_label[j] = spread[j].at_label(z_label[j], g[j]);
        }
        T *dz = place.dx + l * c.slabs.step[1];
#pragma unroll
        for (int k = 0; k < STEPS; k++, dz += c.slabs.step[1]) {
            float d[ROWS_PER_THREAD];
            unpack(group[k], d);
            const float weight = both && l + k < to ? u.class_weight[(l + k) * u.class_stride] : 1.0f;
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++) {
                const float usual = both ? spread[j].of(d[j], scaled[j], weight) : spread[j].of(d[j], scaled[j]);
                d[j] = !LATE && g[j].label - l == k ? at_label[j] : constant[j] ? g[j].c : usual;
            }
            if (l + k < to)
                place.store(dz, packed<T>(d));
        }
    });
    if constexpr (LATE)
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            if (g[j].label >= from && g[j].label < to)
                place.dx[g[j].label * c.slabs.step[1] + place.apart(j)] = from_float<T>(at_label[j]);
}

struct BasicColumns {
    typedef cross_entropy_call Call;
    struct Plan {
        ColumnArgs args;
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward;
    };

    /* Rows are cut if lse is given: otherwise every part would read the whole row. */
    static ColumnChoice choice(const Problem &p, rafter_dtype dtype) {
        const int64_t longest_loose = p.gradient || dtype != RAFTER_F32 ? 64 : 256;
        return {p.gradient ? 2 : 1, p.lse_given ? 1024 : p.gradient ? 64 : 256, p.lse_given, longest_loose};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_basic_outputs(p, call, {true, true, true}))
            return reason;
        if (p.forward && p.gradient)
            return "loss and gradient are wanted at once";
        if (!p.forward && !p.gradient)
            return "there is nothing to write";
        const bool plain = call.loss.smoothing == 0.0f && !call.loss.class_weight.data;
        if (p.gradient && p.lse_given && call.logits.dtype == RAFTER_F32 && plain && p.classes > SHORT_ROW &&
            p.classes <= 2 * SHORT_ROW) /* docs/perf/cross_entropy.md */
            return "option_columns writes such gradients faster";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        if (const char *const reason = why_not_column_packs(s, choice(p, call.logits.dtype), bytes))
            return reason;
        return why_not_in_fours(p, call, are_loose(s, choice(p, call.logits.dtype).tensors, bytes));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        ColumnArgs &args = plan->args;
        args.basic = basic_args(device, p, call);
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        args.columns = column_packs_of(s, choice(p, call.logits.dtype), bytes, p.forward ? THREADS : GRADIENT_BLOCK);
        const bool each = l.reduction == RAFTER_NONE;
        args.row_losses = each ? args.basic.loss : nullptr;
        args.row_dlosses = each ? args.basic.dloss : nullptr;
        args.one_dloss = is_one_number(l.dloss);
        if (each)
            args.basic.loss = nullptr;
        if (each && !args.one_dloss)
            args.basic.dloss = nullptr; /* not for write_factor: each row has its own */
        plan->forward = p.forward;
        plan->blocks =
            p.forward
                ? min(ceil_div<int64_t>(args.columns.packs, THREADS),
                      int64_t(per_sm(args.columns.loose, column_steps(args.columns.length))) * device.multiprocessors)
                : int64_t(args.columns.across) * args.columns.parts;
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        ColumnArgs args = plan.args;
        const double *const factor = plan.workspace.start(context, !plan.forward, &args.basic, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_column_steps(args.columns.length, [&](auto steps) {
                constexpr int STEPS = decltype(steps)::value;
                const auto run = [&](auto loose, auto options) {
                    constexpr bool LOOSE = decltype(loose)::value;
                    constexpr ColumnOptions OPTIONS = decltype(options)::value;
                    const Launch gradients = {plan.blocks, GRADIENT_BLOCK};
                    if (plan.forward)
                        ::launch(context, Launch{plan.blocks, THREADS},
                                 column_losses<T, LOOSE, OPTIONS, loss_steps(LOOSE, STEPS)>, args);
                    else if (STEPS == 8 && args.columns.length > SHORT_ROW)
                        ::launch(context, gradients, column_gradients<T, LOOSE, OPTIONS, 8, true>, args, factor);
                    else
                        ::launch(context, gradients, column_gradients<T, LOOSE, OPTIONS, STEPS, false>, args, factor);
                };
                typedef std::integral_constant<ColumnOptions, BOTH> AllKnown;
                typedef std::integral_constant<ColumnOptions, NONE> NothingKnown;
                if (args.columns.loose && (args.basic.smooths || args.basic.weighs))
                    run(std::true_type(), AllKnown());
                else if (args.columns.loose)
                    run(std::true_type(), NothingKnown());
                else if (args.basic.weighs_smoothing())
                    run(std::false_type(), AllKnown());
                else if (args.basic.smooths || args.basic.weighs)
                    run(std::false_type(), std::integral_constant<ColumnOptions, ONE>());
                else
                    run(std::false_type(), NothingKnown());
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_columns, BasicColumns)
