/* SPDX-License-Identifier: Apache-2.0 */
/* Small calls whose rows do not have adjacent elements, with any options but row weights. One kernel computes the loss,
 * or the gradient; several threads share a row (cuda/small_strided.cuh). */
#include "cuda/small_strided.cuh"
#include "ops/cross_entropy/cuda/basic_sum.cuh"
#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace {

struct FewArgs : OptionArgs {
    SmallStrided few;
};

/* Adds up the row of `place` at z, by all threads that have parts of it; each gets the sums of the whole row. Called by
 * all threads of the block. */
template <typename T>
DEVICE RowSums sums_of_row(const FewArgs &a, const RowShare &place, const T *z, const ClassWeights &weights) {
    __shared__ RowSums parts[SMALL_STRIDED_THREADS];
    RowSums sums = no_sums();
    place.for_elements(z, a.few.slabs.step[0], [&](int l, const Pack<T, 1>(&packs)[IN_FLIGHT_ELEMENTS]) {
        float x[IN_FLIGHT_ELEMENTS];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT_ELEMENTS; k++)
            x[k] = to_float(packs[k].v[0]);
        sums.add(x, ceil_div(place.length - l, place.down), l, place.down, a.loss, weights);
    });
    return place.merged(sums, parts, [&](const RowSums &x, const RowSums &y) {
        return RowSums{merge(x.stats, y.stats, a.loss.scale), x.total + y.total, x.weight_sum + y.weight_sum};
    });
}

template <typename T>
__global__ __launch_bounds__(SMALL_STRIDED_THREADS) void few_column_losses(const __grid_constant__ FewArgs a) {
    wait_for_inputs();
    const BasicArgs &u = a.basic;
    const RowShare place(a.few);
    const T *const z = a.few.slabs.at<const T>(0, place.offset[0]);
    const bool finishes = place.first == 0 && place.present;
    const int label = finishes ? u.class_of(u.load_label(place.number)) : static_cast<int>(IGNORED);
    const float z_label = label >= 0 ? to_float(z[label * a.few.slabs.step[0]]) : 0.0f;
    const RowSums sums = sums_of_row(a, place, z, ClassWeights(u));
    double2 loss = {};
    if (finishes)
        loss = finish_row(a, place.number, label, z_label, sums.stats, make_double2(sums.total, sums.weight_sum));
    if (u.loss)
        add_up_threads<SMALL_STRIDED_THREADS>(u, loss);
}

template <typename T>
__global__ __launch_bounds__(SMALL_STRIDED_THREADS) void few_column_gradients(const __grid_constant__ FewArgs a) {
    if (!a.factor)
        wait_for_inputs();
    const BasicArgs &u = a.basic;
    const RowShare place(a.few);
    const int64_t step = a.few.slabs.step[0], gradient_step = a.few.slabs.step[1];
    const T *const z = a.few.slabs.at<const T>(0, place.offset[0]);
    T *const dz = a.few.slabs.at<T>(1, place.offset[1]);
    const int64_t loaded = u.load_label(place.number);
    const float given = u.lse ? load_now(u.lse + place.number) : INFINITY;
    const float dloss = a.row_dlosses ? load_now(a.row_dlosses + place.number) : 1.0f;
    const ClassWeights weights(u);
    if (a.factor)
        wait_for_previous_kernel();
    const double factor = a.factor ? __ldcg(a.factor) : u.factor<SMALL_STRIDED_THREADS>();
    const int label = u.class_of(loaded);
    const float weight_sum =
        !a.loss.smooths ? 0.0f
        : u.weighs      ? static_cast<float>(
                         block_sum(static_cast<double>(weights.sum(threadIdx.x, SMALL_STRIDED_THREADS, u.classes))))
                   : static_cast<float>(u.classes);
    RowStats s = no_elements();
    if (__syncthreads_or(label >= 0 && !lse_is_accurate<T>(given)))
        s = sums_of_row(a, place, z, weights).stats; /* and dz may overwrite z: all threads have read their logits */
    const Normalizer n =
        lse_is_accurate<T>(given) ? normalizer_from_lse(a.loss, given) : normalizer_from_stats(a.loss, s);
    const GradientOfRow<T> gradient(a.loss, n, static_cast<float>(factor) * dloss * a.loss.scale,
                                    label >= 0 ? weights.of_class(label) : 1.0f, weight_sum);
    if (!place.present)
        return;
    if (place.first == 0)
        u.flag_bad_label(label);
    place.for_elements(z, step, [&](int l, const Pack<T, 1>(&packs)[IN_FLIGHT_ELEMENTS]) {
#pragma unroll
        for (int k = 0; k < IN_FLIGHT_ELEMENTS; k++)
            if (const int j = l + k * place.down; j < place.length) {
                const float x = to_float(packs[k].v[0]);
                dz[j * gradient_step] = from_float<T>(gradient.of(j, label, x, softcapped(x, a.loss), weights, a.loss));
            }
    });
}

struct FewColumnsVariant {
    typedef cross_entropy_call Call;
    struct Plan {
        FewArgs args;
        BasicTotals totals;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.contiguous)
            return "elements of rows are adjacent";
        if (p.rows == 0 || !is_small(p.rows, p.classes, static_cast<int>(rafter_dtype_bytes(call.logits.dtype))))
            return "the call is not small";
        return why_not_options(p, call);
    }

    /* Whether a kernel before this one computes the factor: there are class weights, or many labels. */
    static bool counts(const BasicArgs &args) {
        return args.dz && args.needs_totals() && (args.weighs || args.rows > SCANNED_ROWS);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->args = {option_args(device, p, call),
                      small_strided_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL))};
        layout.add(plan->args.basic.loss && p.forward ? plan->args.few.blocks() * int64_t(sizeof(double2)) : 0);
        plan->totals.place(&layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        FewArgs args = plan.args;
        args.basic.losses = at_offset<double>(workspace, 0);
        if (counts(args.basic))
            args.factor = plan.totals.find_factor(context, args.basic, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, {args.few.blocks(), SMALL_STRIDED_THREADS},
                     args.basic.dz ? few_column_gradients<T> : few_column_losses<T>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, small_strided, FewColumnsVariant)
