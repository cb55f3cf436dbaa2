/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows that lie side by side, as in basic_columns.cu, with any options but row weights: a thread takes four
 * rows (cuda/column_packs.cuh).
 */
#include "ops/cross_entropy/cuda/basic_factor.cuh"
#include "ops/cross_entropy/cuda/four_rows.cuh"
#include "ops/cross_entropy/cuda/options.cuh"

namespace {

constexpr int THREADS = 128, PER_SM = 5; /* of a block; blocks */

/* Kernel arguments. */
struct OptionColumns : OptionArgs {
    ColumnPacks columns;
};

/* Logits of four rows, after the softcap; absent ones stay -inf. */
template <typename T, int STEPS>
DEVICE void cap_columns(float (&v)[STEPS][COLUMNS], const Pack<T, COLUMNS> (&packs)[STEPS], int steps,
                        const LossNumbers &loss) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        unpack(packs[k], v[k]);
        if (loss.softcap != 0.0f && k < steps)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                v[k][j] = capped(v[k][j], loss);
    }
}
template <int STEPS> DEVICE void add_columns(RowStats (&s)[COLUMNS], const float (&v)[STEPS][COLUMNS], float scale) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
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
    const float weight_sum = a.loss.weighted ? weights.sum(0, 1, u.classes) : 0.0f;
    double2 sum = {};
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < c.packs; i += gridDim.x * THREADS) {
        const PlacedColumns<T, LOOSE> place(c, i);
        const FourLabels<T, LOOSE> loaded(u, place);
        Pack<T, COLUMNS> packs[STEPS];
        place.load(packs, 0, c.length);
        int label[COLUMNS];
        loaded.classes(u, label);
        RowStats s[COLUMNS];
        float target[COLUMNS] = {}, total[COLUMNS] = {};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            s[j] = no_elements();
        place.for_columns(packs, 0, c.length, [&](int l, const Pack<T, COLUMNS>(&group)[STEPS]) {
            float v[STEPS][COLUMNS];
            cap_columns(v, group, c.length - l, a.loss);
            add_columns(s, v, a.loss.scale);
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                const float weight = a.loss.weighted && l + k < c.length ? weights.of_class(l + k) : 0.0f;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    target[j] = label[j] - l == k ? v[k][j] : target[j];
                    if (a.loss.weighted && l + k < c.length)
                        total[j] = fmaf(weight, v[k][j], total[j]);
                }
            }
        });
        float lse[COLUMNS], loss[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
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

template <typename T, bool LOOSE, int STEPS>
__global__ __launch_bounds__(THREADS, PER_SM) void option_column_gradients(const __grid_constant__ OptionColumns a) {
    const BasicArgs &u = a.basic;
    const ColumnPacks &c = a.columns;
    const ColumnPart part(c, THREADS);
    if (part.index >= c.packs)
        return;
    const int from = part.from, to = part.to;
    const PlacedColumns<T, LOOSE> place(c, part.index);
    const FourLabels<T, LOOSE> loaded(u, place);
    const FourUpstream four(place, u.lse, a.row_dlosses);
    const float(&given)[COLUMNS] = four.lse, (&dloss)[COLUMNS] = four.dloss;
    Pack<T, COLUMNS> packs[STEPS];
    place.load(packs, from, to);
    const ClassWeights weights(u);
    const float weight_sum = a.loss.weighted ? weights.sum(0, 1, u.classes) : 0.0f;
    wait_for_previous_kernel();
    const float factor = static_cast<float>(*a.factor) * a.loss.scale;
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
        place.load(packs, 0, c.length);
        place.for_columns(packs, 0, c.length, [&](int l, const Pack<T, COLUMNS>(&group)[STEPS]) {
            float v[STEPS][COLUMNS];
            cap_columns(v, group, c.length - l, a.loss);
            add_columns(s, v, a.loss.scale);
        });
        place.load(packs, from, to);
    }
    GradientOfRow<T> gradient[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const Normalizer n =
            lse_is_accurate<T>(given[j]) ? normalizer_from_lse(a.loss, given[j]) : normalizer_from_stats(a.loss, s[j]);
        gradient[j] = GradientOfRow<T>(a.loss, n, factor * dloss[j], label[j] >= 0 ? weights.of_class(label[j]) : 1.0f,
                                       weight_sum);
        u.flag_bad_label(label[j]);
    }
    place.for_columns(packs, from, to, [&](int l, const Pack<T, COLUMNS>(&group)[STEPS]) {
        float v[STEPS][COLUMNS];
        cap_columns(v, group, to - l, a.loss);
        T *dz = place.dx + l * c.slabs.step[1];
#pragma unroll
        for (int k = 0; k < STEPS; k++, dz += c.slabs.step[1])
            if (l + k < to) {
                float z[COLUMNS], d[COLUMNS];
                unpack(group[k], z);
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    d[j] = gradient[j].of(l + k, label[j], z[j], v[k][j], weights, a.loss);
                place.store(dz, packed<T>(d));
            }
    });
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
    static ColumnChoice choice(const Problem &p) {
        return {p.gradient ? 2 : 1, p.lse_given ? 256 : 64, p.lse_given, p.gradient ? 64 : 16};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_options(p, call))
            return reason;
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        if (const char *const reason = why_not_column_packs(s, choice(p), bytes))
            return reason;
        return why_not_in_fours(p, call, are_loose(s, choice(p).tensors, bytes));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        plan->args = {option_args(device, p, call), column_packs_of(s, choice(p), bytes, THREADS)};
        const ColumnPacks &columns = plan->args.columns;
        plan->forward = p.forward;
        plan->blocks = p.forward
                           ? min(ceil_div<int64_t>(columns.packs, THREADS), int64_t(PER_SM) * device.multiprocessors)
                           : int64_t(columns.across) * columns.parts;
        return plan->workspace.place(p.forward ? plan->blocks : 0, p.gradient);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        OptionColumns args = plan.args;
        args.factor = plan.workspace.start(context, !plan.forward, &args.basic, workspace);
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
