/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient of logsumexp over a dimension that is not the last one in memory: threads take columns of packs
 * (cuda/slab_columns.cuh). */
#include "cuda/slab_columns.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

struct ColumnArgs {
    SlabColumns columns;
    Rows lse, dlse;
};

/* Loads the numbers of a thread's rows (lse or dlse). In most calls they are evenly spaced in a slab, and fp32 or of
 * x's dtype. Then an address is computed once, and all loads are issued before one is used. */
template <typename T, int N> DEVICE void load_rows(float (&to)[N], const Rows &from, const ColumnThread<T, N> &thread) {
    const int64_t row_step = thread.t.slabs.row_step, first = from.offset(thread.row(0)), apart = row_step * from.step;
    const bool even = from.dims <= 1 || (row_step == 1 && from.inner == thread.inner());
    const auto load = [&](auto data) {
        thread.for_lines([&](int j, int of_slab) { to[j] = to_float(data[first + of_slab * apart]); });
    };
    if (even && from.dtype == RAFTER_F32)
        load(reinterpret_cast<const float *>(from.data));
    else if (even && NARROW<T> && from.dtype == (__is_same(T, bf16) ? RAFTER_BF16 : RAFTER_F16))
        load(reinterpret_cast<const T *>(from.data));
    else
        thread.for_lines([&](int j, int of_slab) { to[j] = from.get(thread.row(of_slab)); });
}

/* The Op of slab_columns.cuh: dlse * e^(x - lse). */
template <typename T> struct LogsumexpColumns {
    static constexpr bool LABELS = false;
    const ColumnArgs &a;

    template <int N> struct Lines {
        ScaledExp<T> of_line[N];

        DEVICE void set(const LogsumexpColumns &op, const ColumnThread<T, N> &thread) {
            float lse[N], dlse[N];
            load_rows<T>(lse, op.a.lse, thread);
            load_rows<T>(dlse, op.a.dlse, thread);
#pragma unroll
            for (int j = 0; j < N; j++)
                of_line[j] = gradient_of_row<T>(lse[j], dlse[j]);
        }
        DEVICE Pack<T, N> of(const LogsumexpColumns &, const Pack<T, N> &pack, int, const Skips &) const {
            float x[N];
            unpack(pack, x);
#pragma unroll
            for (int j = 0; j < N; j++)
                x[j] = of_line[j].of(x[j]);
            return packed<T>(x);
        }
    };
    DEVICE void begin() const {
    }
    DEVICE T of_one(int64_t row, T x, int64_t) const {
        return from_float<T>(gradient_of_row<T>(a.lse.get(row), a.dlse.get(row)).of(to_float(x)));
    }
};

/* FEW: threads have one or two packs. Then more of them must run at once, with fewer registers each. */
constexpr int FEW_STEPS = 2;
template <int N, bool FEW> constexpr int COLUMN_BLOCKS = FEW || N == 1 ? 4 : 3; /* per multiprocessor */

template <typename T, int N, bool SHIFTED, bool FEW>
__global__ __launch_bounds__(COLUMN_BLOCK,
                             COLUMN_BLOCKS<N, FEW>) void column_gradients(const __grid_constant__ ColumnArgs a) {
    wait_for_inputs();
    const LogsumexpColumns<T> op = {a};
    slab_column_gradients<LogsumexpColumns<T>, T, N, SHIFTED, FEW ? FEW_STEPS : COLUMN_STEPS<N>>(op, a.columns);
}

struct ColumnGradients {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    typedef ColumnArgs Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.backward)
            return "it writes gradients only";
        if (p.rows == 0 || p.n == 0)
            return "there are no rows or no elements";
        const Slabs s = slabs_of(p.x, &p.dx);
        if (s.inner == 1 && s.step[0] == 1 && s.step[1] == 1)
            return "rows are contiguous";
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        return too_large(s) || columns_too_many(slab_columns_of(s, bytes)) ? "it counts rows and threads in 31 bits"
                                                                           : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const Problem p(call);
        *plan = {slab_columns_of(slabs_of(p.x, &p.dx), static_cast<int>(rafter_dtype_bytes(p.x.dtype))),
                 reduced_rows(call.lse, call), reduced_rows(call.dlse, call)};
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const Launch how = {ceil_div<int64_t>(plan.columns.threads, COLUMN_BLOCK), COLUMN_BLOCK};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_columns_of<T>(plan.columns, [&](auto n, auto shifted) {
                constexpr int N = decltype(n)::value;
                constexpr bool SHIFTED = decltype(shifted)::value;
                const bool few = N > 1 && plan.columns.most <= FEW_STEPS;
                ::launch(context, how,
                         few ? column_gradients<T, N, SHIFTED, (N > 1)> : column_gradients<T, N, SHIFTED, false>, plan);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, column_gradients, ColumnGradients)
