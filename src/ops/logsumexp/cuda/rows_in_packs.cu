/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of rows of 2 or 4 elements, several of which fill a pack of 16 bytes: a thread takes one pack or a few.
 * Nothing goes through shared memory. */
#include "cuda/rows_in_packs.cuh"
#include "cuda/tiny_rows.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 128;

/* Kernel arguments. */
struct PackArgs {
    const char *x;
    char *dx; /* backward only */
    int rows;
    LseRows lse; /* contiguous */
    Rows dlse;   /* backward only; contiguous, or one number */
};

/* Numbers of ROWS rows in a tensor that is fp32 or has x's dtype. They are converted when they are used: see
 * load_bits_now. */
template <typename T, int ROWS> struct NumbersOfRows {
    Pack<float, ROWS> wide;
    Pack<T, ROWS> narrow;

    DEVICE void load(const Rows &from, int64_t row, int present) {
        if (from.dtype == RAFTER_F32)
            wide = load_numbers<float, ROWS>(from.data, row, present);
        else
            narrow = load_numbers<T, ROWS>(from.data, row, present);
    }
    DEVICE void get(const Rows &from, float (&numbers)[ROWS]) const {
        if (from.dtype == RAFTER_F32)
            unpack(wide, numbers);
        else
            unpack(narrow, numbers);
    }
};

/* LENGTH: elements of a row. PACKS: of a thread. */
template <typename T, int LENGTH, int PACKS>
__global__ __launch_bounds__(THREADS) void logsumexp_in_packs(const __grid_constant__ PackArgs a) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, ROWS = N / LENGTH;
    Pack<T, N> x[PACKS];
    for_packs<ROWS, PACKS, THREADS>(a.rows, [&](int k, int64_t row, int present) {
        x[k] = load_numbers<T, N>(a.x, row * LENGTH, present * LENGTH);
    });
    for_packs<ROWS, PACKS, THREADS>(a.rows, [&](int k, int64_t row, int present) {
        float of_pack[N], lse[ROWS];
        unpack(x[k], of_pack);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float of_row[LENGTH];
#pragma unroll
            for (int j = 0; j < LENGTH; j++)
                of_row[j] = of_pack[r * LENGTH + j];
            lse[r] = lse_of_few(stats_of_row<T>(of_row));
        }
        const LseNumbers &to = a.lse.numbers;
        if (to.dtype == RAFTER_F32)
            store_numbers<float>(to.lse, row, present, lse);
        else
            store_numbers<T>(to.lse, row, present, lse);
        if (to.rounded)
            store_numbers<T>(to.rounded, row, present, lse);
    });
}

template <typename T, int LENGTH, int PACKS>
__global__ __launch_bounds__(THREADS) void gradients_in_packs(const __grid_constant__ PackArgs a) {
    wait_for_inputs();
    constexpr int N = WIDE<T>, ROWS = N / LENGTH;
    const bool one_dlse = a.dlse.step == 0;
    Pack<T, N> x[PACKS];
    NumbersOfRows<T, ROWS> lse[PACKS], dlse[PACKS];
    for_packs<ROWS, PACKS, THREADS>(a.rows, [&](int k, int64_t row, int present) {
        x[k] = load_numbers<T, N>(a.x, row * LENGTH, present * LENGTH);
        lse[k].load(a.lse, row, present);
        if (!one_dlse)
            dlse[k].load(a.dlse, row, present);
    });
    const float of_all = one_dlse ? load_number_now(a.dlse.data, a.dlse.dtype, 0) : 0.0f;
    for_packs<ROWS, PACKS, THREADS>(a.rows, [&](int k, int64_t row, int present) {
        float d[N], lse_of_row[ROWS], dlse_of_row[ROWS];
        unpack(x[k], d);
        lse[k].get(a.lse, lse_of_row);
        if (!one_dlse)
            dlse[k].get(a.dlse, dlse_of_row);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const ScaledExp<T> scaled = gradient_of_row<T>(lse_of_row[r], one_dlse ? of_all : dlse_of_row[r]);
#pragma unroll
            for (int j = 0; j < LENGTH; j++)
                d[r * LENGTH + j] = scaled.of(d[r * LENGTH + j]);
        }
        store_numbers<T>(a.dx, row * LENGTH, present * LENGTH, d);
    });
}

struct RowsInPacks {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true; /* the sums of a row are those of tiny_rows */
    struct Plan {
        PackArgs args;
        bool backward;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const int64_t bytes = rafter_dtype_bytes(p.x.dtype);
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        if ((p.n != 2 && p.n != 4) || p.n * bytes > 8)
            return "rows are not 2 or 4 elements, or a pack";
        if (!s.packed(0) || (p.backward && !s.packed(1)) || s.inner != 1)
            return "rows do not follow each other";
        if (p.rows > INT32_MAX / 2)
            return "it counts rows in 31 bits";
        const int64_t rows = 16 / (p.n * bytes);
        const auto in_packs = [&](const void *data, rafter_dtype dtype, int64_t count) {
            return reinterpret_cast<uintptr_t>(data) % (count * rafter_dtype_bytes(dtype)) == 0;
        };
        if (!in_packs(s.data[0], p.x.dtype, rows * p.n) || (p.backward && !in_packs(s.data[1], p.x.dtype, rows * p.n)))
            return "x or dx is not aligned";
        const LseRows lse = lse_rows(call);
        const auto fits = [&](const Rows &numbers) {
            return numbers.contiguous() && (numbers.dtype == RAFTER_F32 || numbers.dtype == p.x.dtype) &&
                   in_packs(numbers.data, numbers.dtype, rows);
        };
        if (!fits(lse) || !in_packs(lse.numbers.rounded, p.x.dtype, rows))
            return "lse or rounded is strided, not aligned or of another dtype";
        if (!p.backward)
            return NULL;
        const Rows dlse = reduced_rows(call.dlse, call);
        return fits(dlse) || (dlse.dims == 1 && dlse.step == 0) ? NULL
                                                                : "dlse is strided, not aligned or of another dtype";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        plan->backward = p.backward;
        plan->args = {s.data[0], p.backward ? s.data[1] : nullptr, static_cast<int>(p.rows), lse_rows(call),
                      p.backward ? reduced_rows(call.dlse, call) : Rows{}};
        return 0;
    }

    template <typename T, int LENGTH, int PACKS> static void launch_packs(rafter_context *context, const Plan &plan) {
        const int64_t packs = ceil_div<int64_t>(plan.args.rows, WIDE<T> / LENGTH);
        const Launch how = {ceil_div<int64_t>(packs, THREADS * PACKS), THREADS};
        ::launch(context, how,
                 plan.backward ? gradients_in_packs<T, LENGTH, PACKS> : logsumexp_in_packs<T, LENGTH, PACKS>,
                 plan.args);
    }
    template <typename T, int LENGTH> static void launch_rows(rafter_context *context, const Plan &plan) {
        constexpr int MANY_ROWS = 1 << 21;
        if (plan.args.rows >= MANY_ROWS)
            launch_packs<T, LENGTH, 2>(context, plan);
        else
            launch_packs<T, LENGTH, 1>(context, plan);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if constexpr (NARROW<T>)
                if (Problem(call).n == 4)
                    return launch_rows<T, 4>(context, plan);
            launch_rows<T, 2>(context, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, rows_in_packs, RowsInPacks)
