/* SPDX-License-Identifier: Apache-2.0 */
/* logsumexp of two kinds of very short rows. Rows of 2 or 4 elements that follow each other, so that several fill a
 * pack of 16 bytes: a thread takes one or two packs. And rows of 2 to 7 elements with gaps between them, as slices of
 * longer rows have: a thread takes up to four rows. Nothing goes through shared memory. */
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
    int pitch, dx_pitch; /* from a row to the next, in elements */
    LseRows lse;         /* contiguous */
    Rows dlse;           /* backward only; contiguous, or one number */
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

/* ---- rows with gaps --------------------------------------------------------------------------- */

constexpr int LONGEST_SPACED = 7;
constexpr int MOST_SPACED = 4; /* rows of a thread */

/* Whether gradients of rows of this length are written here. dx has no gaps in most calls. Then rows of an odd number
 * of elements, other than 3 of fp32, are better stored through shared memory (tiny_rows.cu). */
__host__ __device__ constexpr bool spaced_gradients(int length, int bytes) {
    return length % 2 == 0 || (length == 3 && bytes == 4);
}

template <typename T, int LENGTH, int ROWS>
__global__ __launch_bounds__(THREADS) void logsumexp_of_spaced(const __grid_constant__ PackArgs a) {
    wait_for_inputs();
    RowPacks<T, LENGTH, row_unit(LENGTH, sizeof(T), true)> x[ROWS];
    const T *const begin = reinterpret_cast<const T *>(a.x);
    for_rows_apart<ROWS, THREADS>(a.rows, [&](int r, int row) { x[r].load(begin + int64_t(row) * a.pitch); });
    for_rows_apart<ROWS, THREADS>(a.rows, [&](int r, int row) {
        float of_row[LENGTH];
        x[r].get(of_row);
        a.lse.numbers.put(row, lse_of_few(stats_of_row<T>(of_row)));
    });
}

template <typename T, int LENGTH, int ROWS>
__global__ __launch_bounds__(THREADS) void gradients_of_spaced(const __grid_constant__ PackArgs a) {
    wait_for_inputs();
    RowPacks<T, LENGTH, row_unit(LENGTH, sizeof(T), true)> x[ROWS];
    unsigned lse[ROWS], dlse[ROWS]; /* bits */
    const T *const begin = reinterpret_cast<const T *>(a.x);
    for_rows_apart<ROWS, THREADS>(a.rows, [&](int r, int row) {
        x[r].load(begin + int64_t(row) * a.pitch);
        lse[r] = load_bits_now(a.lse.data, a.lse.dtype, row);
        dlse[r] = load_bits_now(a.dlse.data, a.dlse.dtype, row * a.dlse.step);
    });
    T *const gradients = reinterpret_cast<T *>(a.dx);
    for_rows_apart<ROWS, THREADS>(a.rows, [&](int r, int row) {
        float d[LENGTH];
        x[r].get(d);
        const ScaledExp<T> scaled =
            gradient_of_row<T>(number_of_bits(lse[r], a.lse.dtype), number_of_bits(dlse[r], a.dlse.dtype));
#pragma unroll
        for (int j = 0; j < LENGTH; j++)
            d[j] = scaled.of(d[j]);
        store_row<T, LENGTH, row_unit(LENGTH, sizeof(T), false)>(gradients + int64_t(row) * a.dx_pitch, d);
    });
}

/* Elements from a row to the next, in x (0) or in dx (1); or 0: rows are not evenly spaced, or their elements are not
 * adjacent. */
int pitch_of(const Slabs &s, int tensor) {
    if (s.inner != 1 || s.step[tensor] != 1 || s.walk.dims > 1)
        return 0;
    const int64_t pitch = s.outer <= 1 ? s.length : s.walk.stride[tensor][0];
    return pitch >= s.length && pitch <= INT32_MAX ? static_cast<int>(pitch) : 0;
}

/* Why rows are not for the kernels of rows with gaps, or NULL. */
const char *why_not_spaced(const Problem &p, const Slabs &s) {
    const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype)), length = static_cast<int>(p.n);
    if (p.n < 2 || p.n > LONGEST_SPACED || (p.backward && !spaced_gradients(length, bytes)))
        return "rows have one element or more than 7, or gradients an odd number";
    if (p.row_bytes() % 16 == 0)
        return "rows are whole packs";
    const auto is_apart = [&](int tensor, bool gaps) {
        const int pitch = pitch_of(s, tensor), unit = row_unit(length, bytes, gaps);
        return pitch > 0 && pitch % unit == 0 && reinterpret_cast<uintptr_t>(s.data[tensor]) % (unit * bytes) == 0;
    };
    if (pitch_of(s, 0) == p.n || !is_apart(0, true) || (p.backward && !is_apart(1, false)))
        return "rows have no gaps or are not aligned";
    return NULL;
}

struct RowsInPacks {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT = true; /* the sums of a row are those of tiny_rows */
    struct Plan {
        PackArgs args;
        bool backward, spaced;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        if (p.n > LONGEST_SPACED)
            return "rows have more than 7 elements";
        if (p.rows > MOST_INT_ROWS)
            return "it counts rows in 31 bits";
        const LseRows lse = lse_rows(call);
        const Rows dlse = p.backward ? reduced_rows(call.dlse, call) : Rows{};
        if (!lse.contiguous() || (p.backward && !dlse.contiguous() && (dlse.dims != 1 || dlse.step != 0)))
            return "lse or dlse is strided";
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        return why_not_spaced(p, s) ? why_not_packs(p, s, lse, dlse) : NULL;
    }
    /* Why rows are not for the kernels of several rows per pack, or NULL. */
    static const char *why_not_packs(const Problem &p, const Slabs &s, const LseRows &lse, const Rows &dlse) {
        const int64_t bytes = rafter_dtype_bytes(p.x.dtype);
        if ((p.n != 2 && p.n != 4) || p.n * bytes > 8)
            return "rows are not 2 or 4 elements, or a pack";
        if (!s.packed(0) || (p.backward && !s.packed(1)) || s.inner != 1)
            return "rows do not follow each other";
        const int64_t rows = 16 / (p.n * bytes);
        const auto in_packs = [&](const void *data, rafter_dtype dtype, int64_t count) {
            return reinterpret_cast<uintptr_t>(data) % (count * rafter_dtype_bytes(dtype)) == 0;
        };
        if (!in_packs(s.data[0], p.x.dtype, rows * p.n) || (p.backward && !in_packs(s.data[1], p.x.dtype, rows * p.n)))
            return "x or dx is not aligned";
        const auto fits = [&](const Rows &numbers) {
            return (numbers.dtype == RAFTER_F32 || numbers.dtype == p.x.dtype) &&
                   in_packs(numbers.data, numbers.dtype, rows);
        };
        if (!fits(lse) || !in_packs(lse.numbers.rounded, p.x.dtype, rows))
            return "lse or rounded is not aligned or of another dtype";
        return !p.backward || dlse.step == 0 || fits(dlse) ? NULL : "dlse is not aligned or of another dtype";
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        const Slabs s = slabs_of(p.x, p.backward ? &p.dx : NULL);
        plan->backward = p.backward;
        plan->spaced = !why_not_spaced(p, s);
        plan->args = {s.data[0],
                      p.backward ? s.data[1] : nullptr,
                      static_cast<int>(p.rows),
                      pitch_of(s, 0),
                      p.backward ? pitch_of(s, 1) : 0,
                      lse_rows(call),
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

    template <typename T, int LENGTH, int ROWS> static void launch_spaced(rafter_context *context, const Plan &plan) {
        const Launch how = {ceil_div<int64_t>(plan.args.rows, THREADS * ROWS), THREADS};
        if (!plan.backward)
            return ::launch(context, how, logsumexp_of_spaced<T, LENGTH, ROWS>, plan.args);
        if constexpr (spaced_gradients(LENGTH, sizeof(T)))
            ::launch(context, how, gradients_of_spaced<T, LENGTH, ROWS>, plan.args);
    }
    template <typename T, int LENGTH = LONGEST_SPACED>
    static void launch_length(rafter_context *context, int length, const Plan &plan) {
        constexpr int MANY_ROWS = 1 << 17;
        if constexpr (LENGTH > 2)
            if (length < LENGTH)
                return launch_length<T, LENGTH - 1>(context, length, plan);
        if constexpr (LENGTH * sizeof(T) % 16 == 0)
            return;
        else if (plan.args.rows >= MANY_ROWS)
            launch_spaced<T, LENGTH, MOST_SPACED>(context, plan);
        else
            launch_spaced<T, LENGTH, 1>(context, plan);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.spaced)
                return launch_length<T>(context, static_cast<int>(call.x.shape[call.dim]), plan);
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
