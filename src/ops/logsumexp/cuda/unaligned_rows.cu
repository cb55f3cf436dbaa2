/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of logsumexp over contiguous rows that begin at any element, in x and in dx: a thread takes
 * packs of 16 bytes that are aligned in dx, and loads x wherever it lies (cuda/unaligned_pack.cuh).
 */
#include "cuda/elementwise.cuh"
#include "ops/logsumexp/cuda/problem.cuh"

namespace {

constexpr int THREADS = 128, PACKS = 2; /* per block; per thread */
enum { DX, X, LSE, DLSE, TENSORS };     /* lse and dlse are expanded along the rows */
typedef elementwise::Views<TENSORS - 1> Views;

struct UnalignedArgs {
    elementwise::Tensors<TENSORS - 1> tensors;
    elementwise::Outer<TENSORS - 1> rows;
    rafter_dtype lse_dtype, dlse_dtype;
    int n;
    Divisor row_packs; /* packs that a row may touch, wherever it begins */
    unsigned items;    /* packs of all rows */
};

/* DIMS: dimensions of rows, or elementwise::ANY. */
template <typename T, int DIMS>
__global__ __launch_bounds__(THREADS, 8) void unaligned_gradients(const __grid_constant__ UnalignedArgs a) {
    wait_for_inputs();
    const T *const begin = reinterpret_cast<const T *>(a.tensors.data[X]), *const end = reinterpret_cast<const T *>(
                                                                               a.tensors.end[X]);
    UnalignedPack<T> x[PACKS];
    float lse[PACKS], dlse[PACKS];
    T *to[PACKS];
    int column[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const unsigned item = blockIdx.x * (THREADS * PACKS) + k * THREADS + threadIdx.x;
        const unsigned row = a.row_packs.quotient(item < a.items ? item : 0);
        int64_t at[TENSORS];
        a.rows.template offsets<DIMS>(row, at);
        to[k] = reinterpret_cast<T *>(a.tensors.data[DX]) + at[DX];
        column[k] = static_cast<int>(item - row * a.row_packs.number) * WIDE<T> - offset_in_pack(to[k]);
        if (item >= a.items)
            column[k] = a.n;
        x[k].load(column[k] < a.n, begin + at[X] + column[k], begin, end);
        if constexpr (NARROW<T>) {
            lse[k] = load_number_now(a.tensors.data[LSE], a.lse_dtype, at[LSE]);
            dlse[k] = load_number_now(a.tensors.data[DLSE], a.dlse_dtype, at[DLSE]);
        } else { /* UnalignedPack<float> uses what it loads at once: loads in order would wait for it */
            lse[k] = load_number(a.tensors.data[LSE], a.lse_dtype, at[LSE]);
            dlse[k] = load_number(a.tensors.data[DLSE], a.dlse_dtype, at[DLSE]);
        }
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (column[k] < a.n)
            store_inside(to[k] + column[k], gradient_of_row<T>(lse[k], dlse[k]).of(x[k].get(begin, end)), column[k], 0,
                         a.n);
}

struct UnalignedRows {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {};

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        if (!p.backward)
            return "it writes gradients";
        if (p.n == 1 || p.x.stride[p.x.ndim - 1] != 1 || p.dx.stride[p.dx.ndim - 1] != 1)
            return "rows are not contiguous";
        if (p.row_bytes() < 32)
            return "rows have less than two packs of 16 bytes";
        if (p.contiguous && p.row_bytes() >= 256)
            return "dx is aligned as x";
        constexpr int64_t LONG_ROW = 8 << 10, LARGE = 64 << 20; /* docs/perf/logsumexp.md */
        if (p.x.dtype == RAFTER_F32 && !call.common.batch_invariant && p.row_bytes() >= LONG_ROW &&
            p.rows * p.row_bytes() >= LARGE)
            return "many long rows of fp32 are faster in tiles";
        return p.contiguous && p.row_bytes() < 96 ? "dx is aligned as x, and rows are short" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &, Plan *) {
        return 0;
    }

    /* A view of one number per row, expanded along the rows. */
    static rafter_view expanded(const rafter_view &numbers, const Call &call) {
        rafter_view view = dim_last(numbers, call.dim);
        view.shape[view.ndim - 1] = call.x.shape[call.dim];
        view.stride[view.ndim - 1] = 0;
        view.numel = call.x.numel;
        return view;
    }

    template <typename T> static void launch_as(const rafter_context *context, Views views) {
        while (views.view[DX].numel > elementwise::MOST_ELEMENTS)
            launch_as<T>(context, views.cut());
        const int64_t n = views.view[DX].shape[views.last()], row_packs = ceil_div(n + WIDE<T> - 1, int64_t(WIDE<T>)),
                      items = views.view[DX].numel / n * row_packs;
        const UnalignedArgs args = {views.tensors(-1),           views.outer(-1),     views.view[LSE].dtype,
                                    views.view[DLSE].dtype,      static_cast<int>(n), Divisor(row_packs),
                                    static_cast<unsigned>(items)};
        ::launch(context, {ceil_div(items, int64_t(THREADS * PACKS)), THREADS},
                 args.rows.dims <= 1 ? unaligned_gradients<T, 1> : unaligned_gradients<T, elementwise::ANY>, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &, char *) {
        Views views = {{dim_last(call.dx, call.dim), dim_last(call.x, call.dim), expanded(call.lse, call),
                        expanded(call.dlse, call)}};
        rafter_view *all[TENSORS];
        for (int t = 0; t < TENSORS; t++)
            all[t] = &views.view[t];
        const int rows = views.last();
        rafter_order_by_stride(all, TENSORS, all[DX], rows);
        rafter_collapse(all, TENSORS, 0, rows);
        for_dtype(call.x.dtype, [&](auto zero) { launch_as<decltype(zero)>(context, views); });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, unaligned_rows, UnalignedRows)
