/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows that lie side by side, as in basic_columns.cu, with any options but row weights: a thread takes four
 * rows (cuda/column_packs.cuh). Forward: one kernel. Backward: one, after a kernel that writes the factor of all
 * gradients if that takes a sum over the labels.
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/four_rows.cuh"
#include "ops/cross_entropy/cuda/options.cuh"

namespace {

constexpr int THREADS = 128, PER_SM = 5; /* of a block; blocks per multiprocessor */

/* Kernel arguments. */
struct OptionColumns : OptionArgs {
    ColumnPacks columns;
    Rows strided_dloss; /* reduction none, if it is not for row_dlosses; else data is NULL */
};

/* STEPS logits of each of four rows, after the softcap if there is one. */
template <int STEPS> struct CappedColumns {
    float v[STEPS][ROWS_PER_THREAD], slope[STEPS][ROWS_PER_THREAD]; /* after the softcap, and its derivative */

    /* Only `steps` steps exist, and only the rows that the thread has. The other logits are -inf, and stay so. */
    template <typename T, bool LOOSE>
    DEVICE CappedColumns(const FourRows<T, LOOSE> &place, const Pack<T, ROWS_PER_THREAD> (&packs)[STEPS], int steps,
                         const LossNumbers &loss, bool with_slope) {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            unpack(packs[k], v[k]);
        if (loss.softcap == 0.0f)
            return;
        typedef float(&All)[STEPS * ROWS_PER_THREAD];
        const bool whole = steps >= STEPS && place.count == ROWS_PER_THREAD;
        if (!whole) /* 0 for now: the tanh of -inf takes another branch than that of a small number */
            set_absent(place, steps, 0.0f);
        if (with_slope)
            cap_all(reinterpret_cast<All>(v), reinterpret_cast<All>(slope), loss);
        else
            cap_all(reinterpret_cast<All>(v), loss);
        if (!whole)
            set_absent(place, steps, -INFINITY);
    }
    template <typename T, bool LOOSE> DEVICE void set_absent(const FourRows<T, LOOSE> &place, int steps, float value) {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                v[k][j] = k < steps && place.has(j) ? v[k][j] : value;
    }
};

/* Adds logits v, after the softcap, to the statistics of four rows. */
template <int STEPS>
DEVICE void add_columns(RowStats (&s)[ROWS_PER_THREAD], const float (&v)[STEPS][ROWS_PER_THREAD], float scale) {
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        float max = s[j].max, sum = 0.0f;
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            max = fmaxf(max, v[k][j]);
        const float pivot = pivot_at(max);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            sum += exp_below(v[k][j] - pivot, scale);
        s[j] = {max, fmaf(s[j].sum, exp_below(s[j].max - pivot, scale), sum)};
    }
}

template <typename T, bool LOOSE, int STEPS>
__global__ __launch_bounds__(THREADS, PER_SM) void option_column_losses(const __grid_constant__ OptionColumns a) {
    wait_for_inputs();
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    const ClassWeights weights(u);
    const float weight_sum = a.loss.smooths ? weights.sum(0, 1, u.classes) : 0.0f;
    double2 sum = {};
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < c.packs; i += gridDim.x * THREADS) {
        const FourRows<T, LOOSE> place(c, i);
        const FourLabels<T, LOOSE> loaded(u, place);
        Pack<T, ROWS_PER_THREAD> packs[STEPS];
        place.load(packs, 0, c.length);
        int label[ROWS_PER_THREAD];
        loaded.classes(u, label);
        RowStats s[ROWS_PER_THREAD];
        float target[ROWS_PER_THREAD] = {}, total[ROWS_PER_THREAD] = {};
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            s[j] = no_elements();
        place.template for_packs<true>(packs, 0, c.length, [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
            const CappedColumns<STEPS> capped(place, group, c.length - l, a.loss, false);
            const float(&v)[STEPS][ROWS_PER_THREAD] = capped.v;
            add_columns(s, v, a.loss.scale);
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                const float weight = a.loss.smooths && l + k < c.length ? weights.of_class(l + k) : 0.0f;
#pragma unroll
                for (int j = 0; j < ROWS_PER_THREAD; j++) {
                    target[j] = label[j] - l == k ? v[k][j] : target[j];
                    if (a.loss.smooths && l + k < c.length)
                        total[j] = fmaf(weight, v[k][j], total[j]);
                }
            }
        });
        float lse[ROWS_PER_THREAD], loss[ROWS_PER_THREAD];
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++) {
            const float weight = label[j] >= 0 ? weights.of_class(label[j]) : 1.0f;
            const LossAndLse result =
                loss_of_row(a.loss, s[j], target[j], weight, weight_sum, fmaf(s[j].max, weight_sum, -total[j]));
            loss[j] = result.loss;
            lse[j] = result.lse;
            if (label[j] < 0) {
                loss[j] = lse[j] = label[j] == IGNORED ? 0.0f : NAN;
                u.flag_bad_label(label[j]);
            }
            sum.x += loss[j];
            sum.y += label[j] == IGNORED ? 0.0f : weight;
        }
        put_four(place, u, a.row_losses, loss, lse);
    }
    if (u.loss)
        add_up_threads<THREADS>(u, sum);
}

/* Loads a number of each of four rows. Offsets take divisions: the loop is not unrolled, so that their code is there
 * once. */
template <typename T, bool LOOSE>
DEVICE void load_strided(float (&numbers)[ROWS_PER_THREAD], const Rows &from, const FourRows<T, LOOSE> &place) {
    int64_t offset[ROWS_PER_THREAD] = {};
#pragma unroll 1
    for (int j = 0; j < ROWS_PER_THREAD && place.has(j); j++) {
        const int64_t at = from.offset(place.row + place.apart(j));
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++)
            offset[i] = i == j ? at : offset[i];
    }
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++)
        if (place.has(j))
            numbers[j] = reinterpret_cast<const float *>(from.data)[offset[j]];
}

template <typename T, bool LOOSE, int STEPS>
__global__ __launch_bounds__(THREADS, PER_SM) void option_column_gradients(const __grid_constant__ OptionColumns a) {
    constexpr bool LATE = STEPS > 2; /* labels' gradients are written after the others; else `packs` holds whole rows */
    if (!a.factor)
        wait_for_inputs();
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    const ColumnPart part(c, THREADS);
    if (part.index >= c.packs)
        return;
    const int from = part.from, to = part.to;
    const FourRows<T, LOOSE> place(c, part.index);
    const FourLabels<T, LOOSE> loaded(u, place);
    FourUpstream four(place, u.lse, a.row_dlosses);
    const float(&given)[ROWS_PER_THREAD] = four.lse, (&dloss)[ROWS_PER_THREAD] = four.dloss;
    if (a.strided_dloss.data)
        load_strided(four.dloss, a.strided_dloss, place);
    Pack<T, ROWS_PER_THREAD> packs[STEPS];
    place.load(packs, from, to);
    const ClassWeights weights(u);
    const float weight_sum = a.loss.smooths ? weights.sum(0, 1, u.classes) : 0.0f, factor = common_factor(a);
    int label[ROWS_PER_THREAD];
    loaded.classes(u, label);
    RowStats s[ROWS_PER_THREAD];
    float at_label[ROWS_PER_THREAD] = {}; /* the logit, before it may be overwritten; then the gradient */
    bool from_lse = true;
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        s[j] = no_elements();
        from_lse = from_lse && (label[j] < 0 || lse_is_accurate<T>(given[j]));
        if (LATE && label[j] >= from && label[j] < to)
            at_label[j] = to_float(place.x[label[j] * c.slabs.step[0] + place.apart(j)]);
        else if (!LATE)
            at_label[j] = to_float(packs[label[j] == 1].v[j]);
    }
    if (!from_lse) { /* every part reads the whole rows */
        place.load(packs, 0, c.length);
        place.for_packs(packs, 0, c.length, [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
            add_columns(s, CappedColumns<STEPS>(place, group, c.length - l, a.loss, false).v, a.loss.scale);
        });
        place.load(packs, from, to);
    }
    GradientOfRow<T> gradient[ROWS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++) {
        const Normalizer n =
            lse_is_accurate<T>(given[j]) ? normalizer_from_lse(a.loss, given[j]) : normalizer_from_stats(a.loss, s[j]);
        gradient[j] = GradientOfRow<T>(a.loss, n, factor * dloss[j], label[j] >= 0 ? weights.of_class(label[j]) : 1.0f,
                                       weight_sum);
        at_label[j] = gradient[j].at_label(label[j], at_label[j], weights, a.loss);
        u.flag_bad_label(label[j]);
    }
    place.for_packs(packs, from, to, [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
        const CappedColumns<STEPS> capped(place, group, to - l, a.loss, true);
        T *dz = place.dx + l * c.slabs.step[1];
#pragma unroll
        for (int k = 0; k < STEPS; k++, dz += c.slabs.step[1])
            if (l + k < to) {
                const float weight = a.loss.smooths ? weights.of_class(l + k) : 0.0f;
                float d[ROWS_PER_THREAD];
#pragma unroll
                for (int j = 0; j < ROWS_PER_THREAD; j++) {
                    const GradientOfRow<T> &g = gradient[j];
                    d[j] = g.scaled.of(capped.v[k][j]);
                    if (a.loss.smooths)
                        d[j] = fmaf(-g.spread, weight, d[j]);
                    if (a.loss.softcap != 0.0f)
                        d[j] *= capped.slope[k][j];
                    d[j] = g.is_constant(label[j]) ? g.constant(label[j]) : !LATE && label[j] == k ? at_label[j] : d[j];
                }
                place.store(dz, packed<T>(d));
            }
    });
    if constexpr (LATE)
#pragma unroll
        for (int j = 0; j < ROWS_PER_THREAD; j++)
            if (label[j] >= from && label[j] < to)
                place.dx[label[j] * c.slabs.step[1] + place.apart(j)] = from_float<T>(at_label[j]);
}

struct OptionColumnsVariant {
    typedef cross_entropy_call Call;
    struct Plan {
        OptionColumns args;
        BasicWorkspace workspace;
        int64_t blocks;
        bool forward;
    };

    /* Rows are cut if lse is given: otherwise every part would read the whole row. */
    static ColumnChoice choice(const Problem &p, const Call &call, const Slabs &s) {
        /* thread_per_row has more instructions for each logit, but a warp of it has 32 rows of a slab, not 128. */
        constexpr int64_t MANY_COLUMNS = 4096;
        const bool many = p.gradient || (call.loss.softcap != 0.0f && s.inner >= MANY_COLUMNS);
        return {p.gradient ? 2 : 1, p.lse_given ? 256 : 64, p.lse_given, many ? 64 : 16};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_options(p, call, true))
            return reason;
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        if (const char *const reason = why_not_column_packs(s, choice(p, call, s), bytes))
            return reason;
        return why_not_in_fours(p, call, are_loose(s, choice(p, call, s).tensors, bytes), true);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        plan->args = {option_args(device, p, call), column_packs_of(s, choice(p, call, s), bytes, THREADS), {}};
        const ColumnPacks &columns = plan->args.columns;
        if (plan->args.row_dlosses && !in_fours(call.loss.dloss, columns.loose)) {
            plan->args.strided_dloss = loss_rows(call.loss.dloss);
            plan->args.row_dlosses = nullptr;
        }
        plan->forward = p.forward;
        plan->blocks = p.forward
                           ? min(ceil_div<int64_t>(columns.packs, THREADS), int64_t(PER_SM) * device.multiprocessors)
                           : int64_t(columns.across) * columns.parts;
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        OptionColumns args = plan.args;
        const bool counts = !plan.forward && args.basic.needs_totals();
        const double *const factor = plan.workspace.start(context, counts, &args.basic, workspace);
        args.factor = counts ? factor : nullptr;
        const Launch how = {plan.blocks, THREADS};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const auto run = [&](auto loose, auto steps) {
                constexpr bool LOOSE = decltype(loose)::value;
                constexpr int STEPS = decltype(steps)::value;
                ::launch(context, how,
                         plan.forward ? option_column_losses<T, LOOSE, STEPS>
                                      : option_column_gradients<T, LOOSE, STEPS>,
                         args);
            };
            for_bool(args.columns.loose, [&](auto loose) {
                if (args.columns.length <= 2)
                    run(loose, std::integral_constant<int, 2>());
                else
                    run(loose, std::integral_constant<int, 4>());
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, option_columns, OptionColumnsVariant)
