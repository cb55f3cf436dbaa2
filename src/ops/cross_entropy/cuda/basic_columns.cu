/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls without options, or with label smoothing or class weights, whose rows are short and lie side by side, as
 * in segmentation: a thread takes four rows (cuda/column_packs.cuh). Forward: one kernel. Backward: one that
 * writes the factor of all gradients, then the gradients.
 */
#include "cuda/column_packs.cuh"
#include "ops/cross_entropy/cuda/basic_factor.cuh"

namespace {

constexpr int THREADS = 256, PER_SM = 3; /* forward: threads of a block, blocks per multiprocessor */
constexpr int GRADIENT_BLOCK = 128;
constexpr int SHORT_ROW = 16; /* classes */

/* Kernel arguments. */
struct ColumnArgs {
    BasicArgs basic;
    ColumnPacks columns;
    float *row_losses;        /* reduction none: the loss of each row; NULL: not wanted */
    const float *row_dlosses; /* reduction none: dloss of each row; NULL: 1 */
    bool one_dloss;           /* the same for all rows */
};

/* Four adjacent numbers, at a multiple of 16 bytes. */
DEVICE void load_four(float (&to)[COLUMNS], const float *from) {
    const float4 all = *reinterpret_cast<const float4 *>(from);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
}
DEVICE void store_four(float *to, const float (&from)[COLUMNS]) {
    *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

/* The classes of four adjacent rows. */
struct FourLabels {
    int64_t loaded[COLUMNS];

    DEVICE FourLabels(const BasicArgs &u, int row) {
        if (u.wide_labels) {
            const longlong2 *const from =
                reinterpret_cast<const longlong2 *>(static_cast<const int64_t *>(u.labels) + row);
            const longlong2 a = from[0], b = from[1];
            loaded[0] = a.x, loaded[1] = a.y, loaded[2] = b.x, loaded[3] = b.y;
        } else {
            const int4 a = *reinterpret_cast<const int4 *>(static_cast<const int *>(u.labels) + row);
            loaded[0] = a.x, loaded[1] = a.y, loaded[2] = a.z, loaded[3] = a.w;
        }
    }
    DEVICE void classes(const BasicArgs &u, int (&label)[COLUMNS]) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            label[j] = u.class_of(loaded[j]);
    }
};

/* z_label of the labels among elements l, l + 1, ... */
template <typename T, int STEPS>
DEVICE void look_for_labels(float (&z_label)[COLUMNS], const Pack<T, COLUMNS> (&packs)[STEPS],
                            const int (&label)[COLUMNS], int l) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (label[j] - l == k)
                z_label[j] = to_float(packs[k].v[j]);
}

/* Adds the first `valid` elements of each row. */
template <typename T, int STEPS>
DEVICE void add_logits(float (&total)[COLUMNS], const Pack<T, COLUMNS> (&packs)[STEPS], int valid) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < valid)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                total[j] += to_float(packs[k].v[j]);
}

/* Writes the outputs of four rows and adds their losses and their weights to `sum`. total: of the logits of each
 * row, if there is label smoothing. OPTIONS: the call has it, or class weights. */
template <bool OPTIONS>
DEVICE void finish_rows(const ColumnArgs &a, int row, const int (&label)[COLUMNS], const RowStats (&s)[COLUMNS],
                        const float (&z_label)[COLUMNS], const float (&total)[COLUMNS], double2 *sum) {
    const BasicArgs &u = a.basic;
    float lse[COLUMNS], loss[COLUMNS], weight[COLUMNS], weights = 0.0f;
    int counted = 0;
    if (OPTIONS && u.weighs)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            weight[j] = u.class_weight_of(label[j]);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const TwoFloats log_sum = log_in_floats(s[j].max == INFINITY ? NAN : s[j].sum);
        float &value = loss[j];
        value = rounded_nll(s[j].max, z_label[j], log_sum);
        lse[j] = rounded_sum(s[j].max, log_sum);
        if (OPTIONS && u.smooths)
            value = static_cast<float>(u.smoothed(value, s[j].max, log_sum.number(), total[j]));
        if (OPTIONS && u.weighs)
            value *= weight[j];
        if (label[j] < 0) {
            value = lse[j] = label[j] == IGNORED ? 0.0f : NAN;
            u.flag_bad_label(label[j]);
        }
        if (OPTIONS && u.weighs)
            weights += weight[j];
        else
            counted += label[j] != IGNORED;
    }
    sum->x += (loss[0] + loss[1]) + (loss[2] + loss[3]);
    sum->y += OPTIONS && u.weighs ? weights : counted;
    if (u.lse)
        store_four(u.lse + row, lse);
    if (u.row_loss)
        store_four(u.row_loss + row, loss);
    if (a.row_losses)
        store_four(a.row_losses + row, loss);
}

template <typename T, bool OPTIONS, int STEPS>
__global__ __launch_bounds__(THREADS, PER_SM) void column_losses(const __grid_constant__ ColumnArgs a) {
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    double2 sum = {};
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < c.packs; i += gridDim.x * THREADS) {
        const PlacedColumns<T> place(c, i);
        const FourLabels loaded(u, place.row);
        Pack<T, COLUMNS> packs[STEPS];
        load_columns(packs, place.x, 0, c.length, c);
        int label[COLUMNS];
        loaded.classes(u, label);
        RowStats s[COLUMNS];
        float z_label[COLUMNS] = {}, total[COLUMNS] = {};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            s[j] = no_elements();
        for_columns(packs, place.x, 0, c.length, c, [&](int l, const Pack<T, COLUMNS>(&group)[STEPS]) {
            add_lines_of(s, group, 1.0f);
            look_for_labels(z_label, group, label, l);
            if (OPTIONS && u.smooths)
                add_logits(total, group, c.length - l);
        });
        finish_rows<OPTIONS>(a, place.row, label, s, z_label, total, &sum);
    }
    if (u.loss)
        add_up_threads<THREADS>(u, sum);
}

/* LATE: the labels' gradients are written after the others, which is faster unless rows are short. */
template <typename T, bool OPTIONS, int STEPS, bool LATE>
__global__ __launch_bounds__(GRADIENT_BLOCK, 5) void column_gradients(const __grid_constant__ ColumnArgs a,
                                                                      const double *factor_at) {
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    const int part = c.parts == 1 ? 0 : static_cast<int>(blockIdx.x / c.across);
    const int from = part * c.part, to = min(from + c.part, c.length);
    const unsigned i = (blockIdx.x - part * c.across) * GRADIENT_BLOCK + threadIdx.x;
    if (i >= c.packs)
        return;
    const PlacedColumns<T> place(c, i);
    const FourLabels loaded(u, place.row);
    float given[COLUMNS] = {INFINITY, INFINITY, INFINITY, INFINITY}, dloss[COLUMNS] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (u.lse)
        load_four(given, u.lse + place.row);
    if (a.row_dlosses && !a.one_dloss)
        load_four(dloss, a.row_dlosses + place.row);
    Pack<T, COLUMNS> packs[STEPS];
    load_columns(packs, place.x, from, to, c);
    wait_for_previous_kernel();
    const double factor = *factor_at;
    int label[COLUMNS];
    loaded.classes(u, label);
    RowStats s[COLUMNS];
    bool from_lse = true;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        s[j] = no_elements();
        from_lse = from_lse && (label[j] < 0 || lse_is_accurate<T>(given[j]));
    }
    if (!from_lse) { /* every part reads the whole rows */
        load_columns(packs, place.x, 0, c.length, c);
        for_columns(packs, place.x, 0, c.length, c,
                    [&](int, const Pack<T, COLUMNS>(&group)[STEPS]) { add_lines_of(s, group, 1.0f); });
        load_columns(packs, place.x, from, to, c);
    }
    float at_label[COLUMNS] = {}; /* the logit, then the gradient */
    if constexpr (LATE) /* before it may be overwritten; all of these loads are issued before the first is used */
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (label[j] >= from && label[j] < to)
                at_label[j] = to_float(place.x[label[j] * c.slabs.step[0] + j]);
    BasicGradient g[COLUMNS];
    BasicSpread spread[COLUMNS];
    ScaledExp<T> scaled[COLUMNS];
    bool constant[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const double plain = a.row_dlosses ? factor * dloss[j] : factor,
                     own = OPTIONS ? u.weighted(plain, label[j]) : plain;
        u.flag_bad_label(label[j]);
        g[j] = label[j] < 0                   ? u.gradient_of_skipped(label[j])
               : lse_is_accurate<T>(given[j]) ? u.gradient_from_lse(label[j], own, given[j])
                                              : u.gradient_from_stats(label[j], own, s[j]);
        spread[j] = OPTIONS ? BasicSpread(u, own) : BasicSpread(0.0f, static_cast<float>(own));
        scaled[j] = ScaledExp<T>(g[j].c, g[j].pivot, 1.0f);
        constant[j] = g[j].label < 0;
        at_label[j] = spread[j].at_label(at_label[j], g[j]);
    }
    for_columns(packs, place.x, from, to, c, [&](int l, const Pack<T, COLUMNS>(&group)[STEPS]) {
        if constexpr (!LATE) {
            float z_label[COLUMNS] = {};
            look_for_labels(z_label, group, label, l);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                at_label[j] = spread[j].at_label(z_label[j], g[j]);
        }
        T *dz = place.dx + l * c.slabs.step[1];
#pragma unroll
        for (int k = 0; k < STEPS; k++, dz += c.slabs.step[1]) {
            float d[COLUMNS];
            unpack(group[k], d);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float usual = spread[j].of(d[j], scaled[j]);
                d[j] = !LATE && g[j].label - l == k ? at_label[j] : constant[j] ? g[j].c : usual;
            }
            if (l + k < to)
                store_once<T, COLUMNS>(dz, packed<T>(d));
        }
    });
    if constexpr (LATE)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (g[j].label >= from && g[j].label < to)
                place.dx[g[j].label * c.slabs.step[1] + j] = from_float<T>(at_label[j]);
}

/* Whether four adjacent numbers of a tensor, one per row, can be accessed at once. */
inline bool in_fours(const rafter_view &view) {
    return !view.data || (contiguous_or_missing(view) && reinterpret_cast<uintptr_t>(view.data) % 16 == 0);
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
    static ColumnChoice choice(const Problem &p) {
        return {p.gradient ? 2 : 1, p.lse_given ? 1024 : p.gradient ? 64 : 256, p.lse_given};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        if (const char *const reason = why_not_basic_outputs(p, call, {true, true}))
            return reason;
        if (p.forward && p.gradient)
            return "loss and gradient are wanted at once";
        if (!p.forward && !p.gradient)
            return "there is nothing to write";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        if (const char *const reason = why_not_column_packs(s, choice(p), bytes))
            return reason;
        const bool each = l.reduction == RAFTER_NONE, one_dloss = is_one_number(l.dloss);
        const rafter_view &numbers = p.forward ? l.loss : l.dloss;
        return in_fours(l.target) && in_fours(l.lse) && in_fours(l.row_loss) &&
                       (!each || in_fours(numbers) || (!p.forward && one_dloss))
                   ? NULL
                   : "numbers of four rows cannot be accessed at once";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const struct rafter_loss &l = call.loss;
        ColumnArgs &args = plan->args;
        args.basic = basic_args(device, p, call);
        args.columns = column_packs_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), choice(p).splits,
                                       p.forward ? THREADS : GRADIENT_BLOCK);
        const bool each = l.reduction == RAFTER_NONE;
        args.row_losses = each ? args.basic.loss : nullptr;
        args.row_dlosses = each ? args.basic.dloss : nullptr;
        args.one_dloss = is_one_number(l.dloss);
        if (each)
            args.basic.loss = nullptr;
        if (each && !args.one_dloss)
            args.basic.dloss = nullptr; /* write_factor leaves it to the rows */
        plan->forward = p.forward;
        plan->blocks =
            p.forward ? min(ceil_div<int64_t>(args.columns.packs, THREADS), int64_t(PER_SM) * device.multiprocessors)
                      : int64_t(args.columns.across) * args.columns.parts;
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        ColumnArgs args = plan.args;
        const double *const factor = plan.workspace.start(sequence, !plan.forward, &args.basic, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_column_steps(args.columns.length, [&](auto steps) {
                constexpr int STEPS = decltype(steps)::value;
                for_bool(args.basic.smooths || args.basic.weighs, [&](auto options) {
                    constexpr bool OPTIONS = decltype(options)::value;
                    const Launch gradients = {plan.blocks, GRADIENT_BLOCK};
                    if (plan.forward)
                        sequence.run(Launch{plan.blocks, THREADS}, column_losses<T, OPTIONS, STEPS>, args);
                    else if (STEPS == 8 && args.columns.length > SHORT_ROW)
                        sequence.run(gradients, column_gradients<T, OPTIONS, 8, true>, args, factor);
                    else
                        sequence.run(gradients, column_gradients<T, OPTIONS, STEPS, false>, args, factor);
                });
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_columns, BasicColumns)
