/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax in any layout, batch invariant (cuda/indexed_rows.cuh): a warp or a block per row, by the length of rows
 * alone. Rows of aligned packs that fit stay in registers; other rows are read a second time, usually from L1 or L2.
 * Most batch-invariant calls take another variant before: softmax_row_in_registers or softmax_slab_in_cluster (aligned packs),
 * softmax_chunks (short rows), softmax_staged_rows, or softmax_reread_columns.
 */
#include "ops/act/cuda/softmax_indexed.cuh"

namespace {

static_assert(KEPT_THREADS == INDEXED_THREADS, "");

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void indexed_rows(const __grid_constant__ IndexedArgs<T> a) {
    wait_for_inputs();
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    const IndexedRow<T, ALIGNED> in = {a.in + at[IN], a.n, a.step[IN]},
                                 dy = {FORWARD ? in.first : a.dy + at[DY], a.n, a.step[DY]};
    const ElementOf<T, FORWARD> element_of = element_from<T, FORWARD>(statistics_of<FORWARD>(a.team, in, dy));
    write_row(a.team, element_of, in, dy, a.out + at[OUT], a.step[OUT]);
}

/* Rows of whole, aligned packs in all tensors. */
template <typename T, bool FORWARD>
__global__ __launch_bounds__(INDEXED_THREADS, 3) void rows_in_registers(const __grid_constant__ IndexedArgs<T> a) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, COUNT = KEPT_PACKS<FORWARD>;
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    const int thread = a.team.thread(), threads = a.team.threads, packs = static_cast<int>(a.n / N);
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    Pack<T, N> x[COUNT], d[FORWARD ? 1 : COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const int i = thread + k * threads;
        x[k] = load_once_if<T, N>(i < packs, a.in + at[IN] + int64_t(i) * N, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            d[k] = load_once_if<T, N>(i < packs, a.dy + at[DY] + int64_t(i) * N, 0.0f);
    }
    ElementOf<T, FORWARD> element_of = {};
    if constexpr (FORWARD) {
        RowStats s = no_elements();
        add_packs(s, x, 1.0f);
        element_of = element_from<T, true>(merge_team(a.team, s, 1.0f));
    } else {
        float sum[2] = {};
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float v[N], w[N];
            unpack(x[k], v);
            unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j % 2] = fmaf(v[j], w[j], sum[j % 2]);
        }
        element_of = {0.0f, 0.0f, sum_team(a.team, sum[0] + sum[1])};
    }
    T *const out = a.out + at[OUT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N] = {};
        unpack(x[k], v);
        if constexpr (!FORWARD)
            unpack(d[k], w);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = element_of(v[j], w[j]);
        if (thread + k * threads < packs)
            store_once(out + int64_t(thread + k * threads) * N, packed<T, N>(v));
    }
}

struct SoftmaxInvariant {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan : IndexedRows {
        bool aligned, in_registers;
    };

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        Plan wanted;
        plan(device, call, &wanted);
        return wanted.team.blocks(wanted.rows).blocks > INT32_MAX ? "it counts blocks in 31 bits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const RowViews views(call);
        plan->fill(call, views);
        const int kept = is_forward(call) ? KEPT_PACKS<true> : KEPT_PACKS<false>;
        const int64_t row_bytes = plan->row_bytes(call);
        plan->team = RowTeam::of(row_bytes, kept);
        plan->aligned = rows_are_aligned(views.view[IN]) && (is_forward(call) || rows_are_aligned(views.view[DY]));
        plan->in_registers = views.wide() && row_bytes <= int64_t(16) * kept * plan->team.threads;
        return 0;
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const IndexedArgs<T> args = indexed_args<T>(call, plan, plan.rows);
        ::launch(context, plan.team.blocks(plan.rows),
                 plan.in_registers ? rows_in_registers<T, FORWARD>
                 : plan.aligned    ? indexed_rows<T, FORWARD, true>
                                   : indexed_rows<T, FORWARD, false>,
                 args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_invariant, SoftmaxInvariant)
