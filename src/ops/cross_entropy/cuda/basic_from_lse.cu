/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward with lse from forward, of basic calls (basic.cuh) with contiguous rows at any alignment, also with label
 * smoothing or class weights. A thread per row computes coefficients. Then short blocks, each of which takes 4 KB of a
 * row, write the gradient.
 */
#include "cuda/unaligned_pack.cuh"
#include "ops/cross_entropy/cuda/basic_sum.cuh"

namespace {

/* A thread per row. The whole warp reads the rows whose lse is not accurate enough. known_factor: NULL if
 * every block computes it. U: BasicArgs or SpacedArgs. */
template <typename T, class U>
__global__ __launch_bounds__(ROW_THREADS) void coefficients(const __grid_constant__ U u, const double *known_factor,
                                                            BasicGradient *row_gradients) {
    if (!known_factor)
        wait_for_inputs();
    start_next_kernel();
    const int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_THREADS + threadIdx.x;
    const bool valid = row < u.rows;
    const int64_t loaded = valid ? u.load_label(u.label_at(row)) : u.ignore_index;
    const float given = valid ? load_now(u.lse + u.lse_at(row)) : 0.0f;
    if (known_factor)
        wait_for_previous_kernel();
    const double factor = known_factor ? __ldcg(known_factor) : u.template factor<ROW_THREADS>();
    const int label = u.class_of(loaded);
    const double own = u.weighted(factor, label);
    BasicGradient g = label < 0 ? u.gradient_of_skipped(label) : u.gradient_from_lse(label, own, given);
    for (unsigned left = __ballot_sync(~0u, label >= 0 && !lse_is_accurate<T>(given)); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const AlignedSpan<const T> z(u.template row_of_z<T>(row - lane + owner), u.classes);
        const RowStats s = merge_lanes<WARP>(stats_of(z, lane, WARP, 1.0f), 1.0f);
        if (lane == owner)
            g = u.gradient_from_stats(label, own, s);
    }
    if (valid) {
        u.flag_bad_label(label);
        row_gradients[row] = g;
    }
}

/* The alignment of rows. WHOLE: whole aligned packs. ALIKE: rows begin anywhere, but a row has the same offset from a
 * multiple of 16 bytes in logits and in dlogits. ANY: anywhere in both. */
enum RowAlignment { WHOLE, ALIKE, ANY };

/* A block takes a part of a row. The row is cut into packs that are aligned in dz; the first threads of a row also take
 * the edges, less than a pack on either side. */
template <typename T, RowAlignment ALIGNMENT, class U>
__global__ __launch_bounds__(GRADIENT_THREADS,
                             1536 / GRADIENT_THREADS) void gradients(const __grid_constant__ U u, const Divisor parts,
                                                                     const BasicGradient *row_gradients) {
    constexpr int THREADS = GRADIENT_THREADS, PACKS = GRADIENT_PACKS;
    constexpr int N = WIDE<T>;
    const int row = static_cast<int>(parts.quotient(blockIdx.x)), part = blockIdx.x - row * parts.number;
    const int first = part * (THREADS * PACKS) + threadIdx.x;
    const T *z = u.template row_of_z<T>(row);
    T *dz = u.template row_of_dz<T>(row);
    int packs = u.classes / N, head = 0;
    [[maybe_unused]] int edge = -1; /* class */
    [[maybe_unused]] float z_edge = 0.0f;
    if constexpr (ALIGNMENT != WHOLE) {
        const AlignedSpan<T> span(dz, u.classes);
        packs = static_cast<int>(span.packs);
        head = span.head;
        if (first < span.edges)
            edge = head + static_cast<int>(span.edge(first));
        if (edge >= 0)
            z_edge = to_float(z[edge]);
        z += head;
        dz += head;
    }
    Pack<T, N> pack[PACKS];
    if constexpr (ALIGNMENT == ANY) {
        const T *const begin = u.template row_of_z<T>(0), *const end = u.template row_of_z<T>(u.rows - 1) + u.classes;
        UnalignedPack<T> anywhere[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            anywhere[k].load(first + k * THREADS < packs, z + (first + k * THREADS) * N, begin, end);
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (first + k * THREADS < packs)
                pack[k] = anywhere[k].get(begin, end);
    } else {
#pragma unroll
        for (int k = 0; k < PACKS; k++)
            if (first + k * THREADS < packs)
                pack[k] = load_once<T, N>(z + (first + k * THREADS) * N);
    }
    wait_for_previous_kernel();
    BasicGradient g = row_gradients[row];
    const BasicSpread spread(u, g.target);
    if constexpr (ALIGNMENT != WHOLE)
        if (edge >= 0) {
            const float d = g.label < 0 ? g.c : spread.of(z_edge, ScaledExp<T>(g.c, g.pivot, 1.0f));
            dz[edge - head] = from_float<T>(g.label == edge ? spread.at_label(z_edge, g) : d);
        }
    const int label = g.label - head;                 /* relative to the first pack */
    const unsigned own = unsigned(label) / N - first; /* a multiple of THREADS if this thread has the label's pack */
    const bool mine = g.label >= 0 && label >= 0 && label < packs * N && own < THREADS * PACKS && own % THREADS == 0;
    const float z_label = mine ? to_float(z[label]) : 0.0f;
    if (g.label >= 0)
        g.label = label >= 0 ? label : 0; /* if the label is an edge, `mine` is false */
    write_packs(dz, pack, first, THREADS, packs, g, spread, z_label, mine);
}

struct BasicFromLse {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        BasicArgs args;
        int64_t row_blocks, parts;
        BasicTotals totals;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        /* The shortest rows that are not whole packs, in bytes: if they are few; if they are many, with dlogits
         * aligned like logits; and if it is not. docs/perf/cross_entropy.md */
        constexpr int64_t LEAST_BYTES = 1000, LEAST_OF_MANY = 1600, LEAST_SHIFTED = 2400;
        const int64_t least = !are_many(p.rows) ? LEAST_BYTES : p.strided ? LEAST_SHIFTED : LEAST_OF_MANY;
        if (!p.whole_packs && p.row_bytes < least)
            return "rows are short and not whole, aligned packs of 16 bytes";
        if (p.strided && (call.logits.ndim < 2 || call.logits.stride[0] < 0))
            return "rows go backward, or there is one";
        if (p.rows * p.gradient_parts() > INT32_MAX)
            return "it counts blocks in 31 bits";
        return p.lse_given ? why_not_any_rows(p, call, LEAST_BYTES) : "it is for backward with lse";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->args = basic_args(device, p, call);
        plan->row_blocks = p.row_blocks();
        plan->parts = p.gradient_parts();
        WorkspaceLayout layout;
        layout.add(p.rows * int64_t(sizeof(BasicGradient)));
        plan->totals.place(&layout);
        return layout.bytes;
    }

    template <class U>
    static rafter_status launch_with(rafter_context *context, const Call &call, const Plan &plan, const U &args,
                                     char *workspace) {
        const Problem p(call);
        BasicGradient *const row_gradients = at_offset<BasicGradient>(workspace, 0);
        const double *known_factor = nullptr;
        if (are_many(args.rows) || (args.weighs && args.needs_totals())) /* else every block computes it */
            known_factor = plan.totals.find_factor(context, args, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            ::launch(context, Launch{plan.row_blocks, ROW_THREADS}, coefficients<T, U>, args, known_factor,
                     row_gradients);
            const auto write = [&](void (*kernel)(U, Divisor, const BasicGradient *)) {
                ::launch(context, Launch{args.rows * plan.parts, GRADIENT_THREADS}, kernel, args, Divisor(plan.parts),
                         row_gradients);
            };
            if constexpr (std::is_same<U, BasicArgs>::value)
                if (!p.whole_packs)
                    return write(p.strided ? gradients<T, ANY, U> : gradients<T, ALIKE, U>);
            write(gradients<T, WHOLE, U>);
        });
        return RAFTER_OK;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Problem p(call);
        return is_spaced(p, call) ? launch_with(context, call, plan, spaced_args(plan.args, p, call), workspace)
                                  : launch_with(context, call, plan, plan.args, workspace);
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, basic_from_lse, BasicFromLse)
