/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of short rows side by side: a thread takes four of them (cuda/column_packs.cuh). */
#include "cuda/column_packs.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 128;

/* Kernel arguments. */
struct ColumnArgs {
    ColumnPacks columns;
    LseRows lse; /* contiguous */
    Rows dlse;   /* backward only; contiguous */
};

/* Numbers of four rows, in a tensor that is fp32 or has x's dtype. They are converted when they are used: see
 * load_bits_now. */
template <typename T> struct FourNumbers {
    Pack<float, ROWS_PER_THREAD> wide;
    Pack<T, ROWS_PER_THREAD> narrow;

    template <bool LOOSE> DEVICE void load(const Rows &from, const FourRows<T, LOOSE> &place) {
        if (from.dtype == RAFTER_F32)
            wide = place.load_numbers(reinterpret_cast<const float *>(from.data) + place.row);
        else
            narrow = place.load_numbers(reinterpret_cast<const T *>(from.data) + place.row);
    }
    DEVICE float get(const Rows &from, int j) const {
        return from.dtype == RAFTER_F32 ? wide.v[j] : to_float(narrow.v[j]);
    }
};

template <typename T, bool LOOSE, int STEPS>
__global__ __launch_bounds__(THREADS, 6) void column_logsumexp(const __grid_constant__ ColumnArgs a) {
    wait_for_inputs();
    const ColumnPacks &c = a.columns;
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= c.packs)
        return;
    const FourRows<T, LOOSE> place(c, i);
    Pack<T, ROWS_PER_THREAD> packs[STEPS];
    place.load(packs, 0, c.length);
    RowStats s[ROWS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++)
        s[j] = no_elements();
    place.for_packs(packs, 0, c.length,
                    [&](int, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) { add_lines_of(s, group, 1.0f); });
    float lse[ROWS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++)
        lse[j] = lse_of(s[j]);
    const LseNumbers &to = a.lse.numbers;
    if (to.dtype == RAFTER_F32)
        place.store(reinterpret_cast<float *>(to.lse) + place.row, packed<float>(lse));
    else
        place.store(reinterpret_cast<T *>(to.lse) + place.row, packed<T>(lse));
    if (to.rounded)
        place.store(reinterpret_cast<T *>(to.rounded) + place.row, packed<T>(lse));
}

template <typename T, bool LOOSE, int STEPS>
__global__ __launch_bounds__(THREADS, 6) void column_gradients(const __grid_constant__ ColumnArgs a, bool one_dlse) {
    wait_for_inputs();
    const ColumnPacks &c = a.columns;
    const ColumnPart part(c, THREADS);
    if (part.index >= c.packs)
        return;
    const int from = part.from, to = part.to;
    const FourRows<T, LOOSE> place(c, part.index);
    FourNumbers<T> lse, dlse;
    lse.load(a.lse, place);
    if (!one_dlse)
        dlse.load(a.dlse, place);
    Pack<T, ROWS_PER_THREAD> packs[STEPS];
    place.load(packs, from, to);
    const float of_all = one_dlse ? load_number_now(a.dlse.data, a.dlse.dtype, 0) : 0.0f;
    ScaledExp<T> gradient[ROWS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_PER_THREAD; j++)
        gradient[j] = gradient_of_row<T>(lse.get(a.lse, j), one_dlse ? of_all : dlse.get(a.dlse, j));
    place.for_packs(packs, from, to, [&](int l, const Pack<T, ROWS_PER_THREAD>(&group)[STEPS]) {
        T *dx = place.dx + l * c.slabs.step[1];
#pragma unroll
        for (int k = 0; k < STEPS; k++, dx += c.slabs.step[1]) {
            float d[ROWS_PER_THREAD];
            unpack(group[k], d);
#pragma unroll
            for (int j = 0; j < ROWS_PER_THREAD; j++)
                d[j] = gradient[j].of(d[j]);
            if (l + k < to)
                place.store(dx, packed<T>(d));
        }
    });
}

struct ShortColumns {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        ColumnArgs args;
        bool backward, one_dlse;
    };

    /* Whether a thread can access its four rows' numbers: as one aligned pack, or one by one if the rows are
     * loose. */
    static bool in_fours(const Rows &numbers, rafter_dtype dtype, bool loose) {
        const bool aligned =
            reinterpret_cast<uintptr_t>(numbers.data) % (ROWS_PER_THREAD * rafter_dtype_bytes(numbers.dtype)) == 0;
        return numbers.contiguous() && (numbers.dtype == RAFTER_F32 || numbers.dtype == dtype) && (loose || aligned);
    }
    static bool is_one_number(const Rows &numbers) {
        return numbers.dims == 1 && numbers.step == 0;
    }

    static ColumnChoice choice(const Problem &p) {
        const int64_t longest = !p.backward ? 64 : p.x.dtype == RAFTER_F32 ? 256 : 1024;
        return {p.backward ? 2 : 1, longest, p.backward, p.backward ? 32 : 64};
    }

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        if (const char *const reason = why_not_column_packs(s, choice(p), bytes))
            return reason;
        const LseRows lse = lse_rows(call);
        const int64_t four = ROWS_PER_THREAD * bytes;
        const bool loose = are_loose(s, choice(p).tensors, bytes);
        if (!in_fours(lse, p.x.dtype, loose) ||
            (!loose && reinterpret_cast<uintptr_t>(lse.numbers.rounded) % four != 0))
            return "lse or rounded is strided, not aligned or of another dtype";
        if (!p.backward)
            return NULL;
        const Rows dlse = reduced_rows(call.dlse, call);
        return in_fours(dlse, p.x.dtype, loose) || is_one_number(dlse)
                   ? NULL
                   : "dlse is strided, not aligned or of another dtype";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        plan->backward = p.backward;
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        plan->args = {column_packs_of(s, choice(p), bytes, THREADS), lse_rows(call),
                      p.backward ? reduced_rows(call.dlse, call) : Rows{}};
        plan->one_dlse = p.backward && is_one_number(plan->args.dlse);
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const Launch how = {int64_t(plan.args.columns.across) * plan.args.columns.parts, THREADS};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_column_steps(plan.args.columns.length, [&](auto steps) {
                constexpr int STEPS = decltype(steps)::value;
                const auto run = [&](auto loose) {
                    constexpr bool LOOSE = decltype(loose)::value;
                    if (plan.backward)
                        ::launch(context, how, column_gradients<T, LOOSE, STEPS>, plan.args, plan.one_dlse);
                    else
                        ::launch(context, how, column_logsumexp<T, LOOSE, STEPS>, plan.args);
                };
                if (plan.args.columns.loose)
                    run(std::true_type());
                else
                    run(std::false_type());
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, short_columns, ShortColumns)
