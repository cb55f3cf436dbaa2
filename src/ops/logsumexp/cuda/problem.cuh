/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA variants of logsumexp share: a call as rows x n, and the arithmetic of one row. */
#ifndef RAFTER_LOGSUMEXP_CUDA_PROBLEM_CUH
#define RAFTER_LOGSUMEXP_CUDA_PROBLEM_CUH

#include "cuda/launch.cuh"
#include "cuda/summation_order.cuh"
#include "cuda/two_floats.cuh"
#include "cuda/variant.cuh"
#include "ops/logsumexp/call.h"

namespace {

/* The view with `dim` last and the other dimensions in their order. */
rafter_view dim_last(const rafter_view &view, int dim) {
    rafter_view out = view;
    for (int d = dim; d + 1 < view.ndim; d++) {
        out.shape[d] = view.shape[d + 1];
        out.stride[d] = view.stride[d + 1];
    }
    out.shape[view.ndim - 1] = view.shape[dim];
    out.stride[view.ndim - 1] = view.stride[dim];
    return out;
}

/* A call with `dim` last and the other dimensions, the rows, merged where strides allow. */
struct Problem {
    rafter_view x, dx; /* dx: backward only */
    int64_t rows, n;
    bool backward;
    bool contiguous; /* rows of x, and of dx, are contiguous and equally aligned */

    explicit Problem(const logsumexp_call &call) : x(dim_last(call.x, call.dim)) {
        const int dims = call.x.ndim - 1;
        backward = call.common.direction == RAFTER_BACKWARD;
        rows = rafter_extent(&x, 0, dims);
        n = x.shape[dims];
        if (backward)
            dx = dim_last(call.dx, call.dim);
        rafter_view *const views[] = {&x, &dx};
        rafter_collapse(views, backward ? 2 : 1, 0, dims);
        const int dim = x.ndim - 1;
        contiguous = n > 1 && x.stride[dim] == 1 && (!backward || (dx.stride[dim] == 1 && same_alignment(x, dx)));
    }
    Rows x_rows() const {
        return rows_of(x, x.ndim - 1);
    }
    Rows dx_rows() const {
        return rows_of(dx, dx.ndim - 1);
    }
    int64_t row_bytes() const {
        return n * rafter_dtype_bytes(x.dtype);
    }
    /* Whether streamed_rows is faster than the kernels for whole packs: docs/perf/logsumexp.md. */
    bool are_streamed() const {
        constexpr int64_t LEAST_ROWS = 1 << 13, MOST_ROWS = 24000, LONGEST = 128, LEAST_BYTES = 96, MOST_PACKS = 32;
        const int64_t packs = ceil_div<int64_t>(row_bytes(), 16);
        int64_t slots = 4; /* packs of a row's lanes in short_rows */
        while (slots < packs)
            slots *= 2;
        const bool few = rows < MOST_ROWS && n <= LONGEST, empty = packs <= MOST_PACKS && 5 * packs < 4 * slots;
        return !backward && contiguous && rows >= LEAST_ROWS && row_bytes() >= LEAST_BYTES && (few || empty);
    }
    /* For batch-invariant calls: which kernels take the rows. Rows of whole packs that take a warp each are
     * faster in registers than in chunks. */
    SummationOrder order() const {
        const SummationOrder by_length = summation_order_of(n, x.stride[x.ndim - 1], x.dtype);
        return by_length == CHUNKED_ROWS && row_bytes() % 16 == 0 && 2 * row_bytes() > CHUNK_BYTES ? OTHER_ROWS
                                                                                                   : by_length;
    }
};

/* lse, or dlse: one number per row. */
Rows reduced_rows(const rafter_view &view, const logsumexp_call &call) {
    return rows_of(dim_last(view, call.dim), call.x.ndim - 1);
}

/* lse, and the same in x's dtype if the caller wants that too, with the same strides. */
struct LseNumbers {
    char *lse, *rounded; /* rounded: NULL if it is not wanted */
    rafter_dtype dtype, rounded_dtype;

    DEVICE void put(int64_t at, float value) const {
        store_number(lse, dtype, at, value);
        if (rounded)
            store_number(rounded, rounded_dtype, at, value);
    }
};
struct LseRows : Rows {
    LseNumbers numbers;

    DEVICE void put(int64_t row, float value) const {
        numbers.put(offset(row), value);
    }
};

LseRows lse_rows(const logsumexp_call &call) {
    return {reduced_rows(call.lse, call), {call.lse.data, call.rounded.data, call.lse.dtype, call.x.dtype}};
}

/* How dim is split among blocks whose statistics are merged in the end. By shape and alignment
 * alone, never by the device: the same bits everywhere. */
struct Split {
    int64_t parts, part; /* parts of dim; elements of each */
};

/* `tasks`: rows, or tiles of columns, that would be one block each. Few tasks are split until there
 * are blocks enough to fill any device several times over. */
Split split_dim(int64_t tasks, int64_t n, int64_t least_part, rafter_logsumexp_algorithm algorithm) {
    constexpr int64_t ENOUGH_BLOCKS = 1024;
    int64_t parts = 1;
    if (algorithm != RAFTER_LOGSUMEXP_RECURRENCE && tasks < ENOUGH_BLOCKS)
        parts = max(min(ceil_div(ENOUGH_BLOCKS, tasks), n / least_part), int64_t(1));
    if (algorithm == RAFTER_LOGSUMEXP_PARALLEL)
        parts = max(parts, int64_t(2));
    return {parts, round_up(ceil_div(n, parts), int64_t(64))}; /* multiples of 64 keep the row's alignment */
}

Split split_rows(const Problem &p, rafter_logsumexp_algorithm algorithm) {
    int64_t parts = algorithm == RAFTER_LOGSUMEXP_RECURRENCE ? 1 : parts_of_row(p.rows, p.row_bytes());
    if (algorithm == RAFTER_LOGSUMEXP_PARALLEL)
        parts = max(parts, int64_t(2));
    return {parts, round_up(ceil_div(p.n, parts), int64_t(64))}; /* multiples of 64 keep the row's alignment */
}

/* Arguments of forward kernels whose rows or columns may be split. A task is a row or a tile of columns. */
struct Forward {
    Rows x;
    LseRows lse;
    int64_t rows, n, step;      /* step: stride of dim in x */
    int64_t first, parts, part; /* the first task of this launch; see Split */
    unsigned *counters;         /* one per task of this launch, if parts > 1 */
    RowStats *stored;           /* the parts' statistics, ordered by task, then part; if parts > 1 */
};

/* Arguments of backward kernels. */
struct Backward {
    Rows x, dx, lse, dlse;
    int64_t rows, n, step, dstep; /* step, dstep: stride of dim in x, in dx */
    int64_t parts, part;
    Divisor of_row; /* divides by parts */

    template <typename T> DEVICE ScaledExp<T> gradient(int64_t row) const;
};

/* The tasks of one launch: if tasks are split, at most as many as there are counters. */
int64_t tasks_at_a_time(int64_t tasks, const Split &split) {
    return split.parts > 1 ? min(tasks, int64_t(RAFTER_CUDA_COUNTERS)) : tasks;
}

/* Calls forward(f, tasks), which launches a kernel for some tasks, until all are done. Only a call that
 * asks for RAFTER_LOGSUMEXP_PARALLEL on many rows takes more than one launch. */
template <typename F>
void launch_tasks(const rafter_context *context, const logsumexp_call &call, const Problem &p, const Split &split,
                  int64_t tasks, char *workspace, F forward) {
    Forward f = {};
    f.x = p.x_rows();
    f.lse = lse_rows(call);
    f.rows = p.rows;
    f.n = p.n;
    f.step = p.x.stride[p.x.ndim - 1];
    f.parts = split.parts;
    f.part = split.part;
    f.counters = context->cuda_state->counters;
    f.stored = reinterpret_cast<RowStats *>(workspace);
    const int64_t most = tasks_at_a_time(tasks, split);
    for (; f.first < tasks; f.first += most)
        forward(f, min(tasks - f.first, most));
}

Backward backward_of(const logsumexp_call &call, const Problem &p, const Split &split) {
    Backward b = {};
    b.x = p.x_rows();
    b.dx = p.dx_rows();
    b.lse = reduced_rows(call.lse, call);
    b.dlse = reduced_rows(call.dlse, call);
    b.rows = p.rows;
    b.n = p.n;
    b.step = p.x.stride[p.x.ndim - 1];
    b.dstep = p.dx.stride[p.dx.ndim - 1];
    b.parts = split.parts;
    b.part = split.part;
    b.of_row = Divisor(split.parts);
    return b;
}

/* lse of a row. The logarithm has more digits than a float: if it is added to a maximum of opposite sign, the
 * rounding of a float would show. */
DEVICE float lse_of(RowStats s) {
    return rounded_sum(pivot_at(s.max), log_in_floats(s.sum));
}

/* The same for a row of up to 32 elements, with 20 instructions less. The logarithm is below 3.5, and its rounding
 * error, 2^-23, is no larger than the error of the sum. */
DEVICE float lse_of_few(RowStats s) {
    return pivot_at(s.max) + log_in_float(s.sum);
}

/* The gradient of a row: dlse * e^(x - lse). A row of all -inf gets zeros. */
template <typename T> DEVICE ScaledExp<T> gradient_of_row(float lse, float dlse) {
    return lse == -INFINITY ? ScaledExp<T>(0.0f, INFINITY, 1.0f) : ScaledExp<T>(dlse, lse, 1.0f);
}

template <typename T> DEVICE ScaledExp<T> Backward::gradient(int64_t row) const {
    return gradient_of_row<T>(lse.get(row), dlse.get(row));
}

/* Why kernels that read slabs do not serve a call, whatever its layout; or NULL. */
inline const char *why_not_slabs(const Problem &p, const logsumexp_call &call) {
    if (p.rows == 0 || p.n == 0)
        return "there are no rows or no elements";
    return call.algorithm != RAFTER_LOGSUMEXP_AUTO ? "the algorithm is given" : NULL;
}

} // namespace

#endif
