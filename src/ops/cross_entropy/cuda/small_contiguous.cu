/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small calls with contiguous rows at any alignment and any options but row weights. One kernel computes the loss, or
 * the gradient, with a block per row or, for gradients, per part of a row. It has few instructions. The general kernels
 * have several times as many, and none is in a cache when a kernel starts.
 */
#include "ops/cross_entropy/cuda/basic_sum.cuh"
#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int PACKS_AT_ONCE = 4;

/* Adds up the row at z, by all threads of the block. */
template <typename T>
DEVICE void add_row(RowSums &sums, const T *z, int classes, const LossNumbers &loss, const ClassWeights &weights) {
    constexpr int N = WIDE<T>;
    const AlignedSpan<const T> span(z, classes);
    const int packs = static_cast<int>(span.packs), own = static_cast<int>(threadIdx.x);
    for (int i = own; i < packs; i += PACKS_AT_ONCE * THREADS) {
        Pack<T, N> pack[PACKS_AT_ONCE];
        load_packs(pack, span.body, packs, i, THREADS);
#pragma unroll
        for (int k = 0; k < PACKS_AT_ONCE; k++)
            if (i + k * THREADS < packs) {
                float x[N];
                unpack(pack[k], x);
                sums.add(x, N, span.head + (i + k * THREADS) * N, 1, loss, weights);
            }
    }
    if (own < span.edges) {
        const float x[1] = {to_float(span.body[span.edge(own)])};
        sums.add(x, 1, span.head + static_cast<int>(span.edge(own)), 1, loss, weights);
    }
}

template <typename T> __global__ __launch_bounds__(THREADS) void few_losses(const __grid_constant__ OptionArgs a) {
    wait_for_inputs();
    const BasicArgs &u = a.basic;
    const int row = static_cast<int>(blockIdx.x);
    const T *const z = u.row_of_z<T>(row);
    const int64_t loaded = u.load_label(row);
    const ClassWeights weights(u);
    RowSums sums = no_sums();
    add_row(sums, z, u.classes, a.loss, weights);
    const int label = u.class_of(loaded);
    const float z_label = label >= 0 ? to_float(z[label]) : 0.0f;
    const RowStats s = merge_block(sums.stats, a.loss.scale);
    const double2 of_all = a.loss.smooths ? block_sum(make_double2(sums.total, sums.weight_sum)) : double2{};
    double2 *const row_losses = reinterpret_cast<double2 *>(u.losses);
    if (threadIdx.x == 0) {
        const double2 of_row = finish_row(a, row, label, z_label, s, of_all);
        if (u.loss)
            row_losses[row] = of_row;
    }
    if (u.loss)
        add_up_blocks(u, row_losses, THREADS);
}

/* `parts` blocks per row. */
template <typename T>
__global__ __launch_bounds__(THREADS) void few_gradients(const __grid_constant__ OptionArgs a, int parts) {
    if (!a.factor)
        wait_for_inputs();
    constexpr int N = WIDE<T>;
    const BasicArgs &u = a.basic;
    const int part = static_cast<int>(blockIdx.x) / u.rows, row = static_cast<int>(blockIdx.x) - part * u.rows;
    const T *const z = u.row_of_z<T>(row);
    T *const dz = u.row_of_dz<T>(row);
    const int64_t loaded = u.load_label(row);
    const float given = u.lse ? load_now(u.lse + row) : INFINITY;
    const float dloss = a.row_dlosses ? load_now(a.row_dlosses + row) : 1.0f;
    const ClassWeights weights(u);
    if (a.factor)
        wait_for_previous_kernel();
    const double factor = a.factor ? __ldcg(a.factor) : u.factor<THREADS>();
    const int label = u.class_of(loaded);
    const float weight_sum =
        !a.loss.smooths ? 0.0f
        : u.weighs ? static_cast<float>(block_sum(static_cast<double>(weights.sum(threadIdx.x, THREADS, u.classes))))
                   : static_cast<float>(u.classes);
    __shared__ RowStats of_row;
    if (label >= 0 && !lse_is_accurate<T>(given)) {
        RowSums sums = no_sums();
        add_row(sums, z, u.classes, a.loss, weights);
        const RowStats merged = merge_block(sums.stats, a.loss.scale);
        if (threadIdx.x == 0)
            of_row = merged;
        __syncthreads(); /* and dz may overwrite z: all threads have read their logits */
    }
    const Normalizer n =
        lse_is_accurate<T>(given) ? normalizer_from_lse(a.loss, given) : normalizer_from_stats(a.loss, of_row);
    const GradientOfRow<T> gradient(a.loss, n, static_cast<float>(factor) * dloss * a.loss.scale,
                                    label >= 0 ? weights.of_class(label) : 1.0f, weight_sum);
    if (part == 0 && threadIdx.x == 0)
        u.flag_bad_label(label);
    const auto of = [&](int j, float x) {
        return from_float<T>(gradient.of(j, label, x, softcapped(x, a.loss), weights, a.loss));
    };
    const AlignedSpan<T> span(dz, u.classes);
    const T *const from = z + span.head; /* the logits of the body of dz */
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    const int packs = static_cast<int>(span.packs), own = part * THREADS + static_cast<int>(threadIdx.x);
    for (int i = own; i < packs; i += parts * THREADS) {
        Pack<T, N> pack;
        if (aligned)
            pack = load_once<T, N>(from + i * N);
        else
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = load_once<T, 1>(from + i * N + j).v[0];
#pragma unroll
        for (int j = 0; j < N; j++)
            pack.v[j] = of(span.head + i * N + j, to_float(pack.v[j]));
        store_once<T, N>(span.body + i * N, pack);
    }
    if (own < span.edges) {
        const int at = static_cast<int>(span.edge(own));
        span.body[at] = of(span.head + at, to_float(from[at]));
    }
}

struct FewRows {
    typedef cross_entropy_call Call;
    struct Plan {
        OptionArgs args;
        int parts;
        BasicTotals totals;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        /* Measured on an H200: docs/perf/cross_entropy.md. */
        constexpr int64_t FEW_ROWS = 1024, MOST_BYTES = 16 << 20;
        constexpr int64_t MOST_GRADIENT_ROWS = 2048, MOST_GRADIENT_BYTES = 4 << 20, LEAST_ROW_BYTES = 256;
        constexpr int64_t LONG_ROW = 8 << 10, ENOUGH_ROWS = 256;
        constexpr int64_t MOST_WEIGHTS = 8192; /* that every block adds up */
        const Problem p(call);
        const int64_t bytes = p.rows * p.row_bytes;
        const bool few = p.rows <= FEW_ROWS && bytes <= MOST_BYTES;
        const bool few_gradients = p.gradient && p.rows <= MOST_GRADIENT_ROWS && bytes <= MOST_GRADIENT_BYTES &&
                                   p.row_bytes >= LEAST_ROW_BYTES;
        if (!few && !few_gradients)
            return "the call is not small";
        if (!p.lse_given && p.row_bytes > LONG_ROW && p.rows < ENOUGH_ROWS)
            return "rows are long, and too few for a block each";
        if (p.gradient && p.classes > MOST_WEIGHTS && call.loss.class_weight.data && call.loss.smoothing != 0.0f)
            return "there are more class weights than every block should add up";
        if (!p.contiguous || call.logits.ndim > 2 || (p.gradient && call.dlogits.ndim > 2))
            return "rows are not contiguous or not evenly spaced";
        return why_not_options(p, call);
    }

    /* Whether a kernel before this one computes the factor: there are class weights. */
    static bool counts(const BasicArgs &args) {
        return args.dz && args.weighs && args.needs_totals();
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        constexpr int64_t ENOUGH_BLOCKS = 1024;
        const Problem p(call);
        WorkspaceLayout layout;
        plan->args = option_args(device, p, call);
        /* Every block of a row may read all of the row. In place, another block might have overwritten it. */
        const bool in_place = p.gradient && call.dlogits.data == call.logits.data;
        const int64_t most = ceil_div<int64_t>(p.row_packs(), THREADS);
        plan->parts = static_cast<int>(in_place ? 1 : max(min(ENOUGH_BLOCKS / p.rows, most), int64_t(1)));
        layout.add(plan->args.basic.loss && p.forward ? p.rows * int64_t(sizeof(double2)) : 0);
        plan->totals.place(&layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        OptionArgs args = plan.args;
        args.basic.losses = at_offset<double>(workspace, 0);
        if (counts(args.basic))
            args.factor = plan.totals.find_factor(context, args.basic, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (args.basic.dz)
                ::launch(context, Launch{int64_t(args.basic.rows) * plan.parts, THREADS}, few_gradients<T>, args,
                         plan.parts);
            else
                ::launch(context, Launch{args.basic.rows, THREADS}, few_losses<T>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, small_contiguous, FewRows)
