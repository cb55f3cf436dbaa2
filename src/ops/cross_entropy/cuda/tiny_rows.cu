/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many rows of 2 to 32 classes that follow each other, with any options, and in batch-invariant calls all rows of up
 * to 32 classes (but not gradients of columns from lse). One kernel, in which a thread takes a row
 * (cuda/tiny_rows.cuh); before it, if needed, one that adds up class weights or labels.
 */
#include "cuda/tiny_rows.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

constexpr int TINY_PER_SM = 4, TINY_GRADIENTS_PER_SM = 3; /* blocks per multiprocessor */

struct TinyArgs {
    Args call;
    TinyRows tiny;
};
struct ScatteredArgs {
    Args call;
    ScatteredRows rows;
};

/* The statistics of a row with logits x; those from `length` on are -inf. What the call does not need costs only a
 * branch. */
template <int COUNT>
DEVICE WholeRowStats stats_of_tiny(const float (&x)[COUNT], int length, float z_label, const Loss &loss) {
    WholeRowStats f = {};
    float v[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        v[j] = x[j];
    f.argmax = -1;
    if (loss.argmax.data) {
        float best = x[0];
        int at = 0;
#pragma unroll
        for (int j = 1; j < COUNT; j++)
            if (j < length && (x[j] > best || (x[j] != x[j] && best == best))) {
                best = x[j];
                at = j;
            }
        f.argmax = at;
    }
    f.target = z_label;
    if (loss.softcap != 0.0f) {
        f.target = capped(z_label, loss);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = j < length ? capped(x[j], loss) : -INFINITY;
    }
    if (loss.smooths) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (j < length)
                sum = fmaf(loss.class_weight ? loss.class_weight[j * loss.class_stride] : 1.0f, v[j], sum);
        f.logit_sum = sum;
    }
    f.max = -INFINITY;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        f.max = fmaxf(f.max, v[j]);
    const float pivot = pivot_at(f.max);
    float sum[2] = {}, moment = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const float d = v[j] - pivot, e = exp_below(d, loss.scale);
        sum[j % 2] += e;
        moment = fmaf(fmaxf(d, -1e30f), e, moment); /* keeps -inf out; e is 0 long before it */
    }
    f.sum = f.max == INFINITY ? NAN : sum[0] + sum[1];
    f.moment = moment;
    return f;
}

template <typename T> struct TinyLoss {
    const Loss &loss;
    const int length;
    Totals totals = {};
    typedef int64_t Row;

    DEVICE TinyLoss(const Args &call, int classes) : loss(call.loss), length(classes) {
    }
    DEVICE Row no_row() const {
        return loss.ignore_index;
    }
    DEVICE Row load(int row) const {
        return loss.load_label(row);
    }
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
    template <int COUNT>
    DEVICE void finish(Row loaded, int row, bool present, const float (&x)[COUNT], const T *elements, T *) {
        if (!present)
            return;
        const int64_t label = loss.class_of(loaded);
        RowResults results = results_of_skipped(label);
        if (label >= 0)
            results = results_of(loss, row, label, stats_of_tiny(x, length, to_float(elements[label]), loss));
        flag_bad_label(loss, label);
        write_row(loss, row, label, results, &totals);
    }
};

template <typename T> struct TinyGradient {
    const Args &c;
    const Loss &loss;
    const int length;
    double common = 0.0;
    struct Row {
        int64_t label;
        float lse;
    };

    DEVICE TinyGradient(const Args &call, int classes) : c(call), loss(call.loss), length(classes) {
    }
    DEVICE Row no_row() const {
        return {loss.ignore_index, 0.0f};
    }
    DEVICE Row load(int row) const {
        return {loss.load_label(row), loss.lse.data ? loss.lse.get(row) : INFINITY};
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        common = common_factor(c);
    }
    template <int COUNT>
    DEVICE void finish(const Row &loaded, int row, bool present, const float (&x)[COUNT], const T *elements,
                       T *gradient) const {
        if (!present)
            return;
        const int64_t label = loss.class_of(loaded.label);
        RowGradient g = gradient_of_skipped(label);
        if (label >= 0) {
            const float z_label = to_float(elements[label]);
            g = lse_is_accurate<T>(loaded.lse)
                    ? gradient_from_lse(loss, common, row, label, z_label, loaded.lse)
                    : gradient_from_stats(loss, common, row, label, z_label, stats_of_tiny(x, length, z_label, loss));
        }
        flag_bad_label(loss, label);
        const ColumnGradient<FULL, T> columns(g, loss);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (j < length)
                gradient[j] = from_float<T>(g.constant ? g.p : columns.of(x[j], j, loss));
        if (!g.constant)
            gradient[label] = from_float<T>(g.at_label);
    }
};

template <typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS, TINY_PER_SM) void tiny_losses(const __grid_constant__ TinyArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    TinyLoss<T> op(a.call, a.tiny.length);
    tiny_rows<TinyLoss<T>, T, COUNT, 1, false, 2>(op, a.tiny, dynamic);
    add_up(a.call, op.totals);
}

template <typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS,
                             TINY_GRADIENTS_PER_SM) void tiny_gradients(const __grid_constant__ TinyArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    TinyGradient<T> op(a.call, a.tiny.length);
    tiny_rows<TinyGradient<T>, T, COUNT, 1, true, 2>(op, a.tiny, dynamic);
}

template <typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS, TINY_PER_SM) void scattered_losses(const __grid_constant__ ScatteredArgs a) {
    wait_unless_prepared(a.call);
    TinyLoss<T> op(a.call, a.rows.length);
    scattered_rows<TinyLoss<T>, T, COUNT, false>(op, a.rows);
    add_up(a.call, op.totals);
}

template <typename T, int COUNT>
__global__ __launch_bounds__(TINY_THREADS,
                             TINY_GRADIENTS_PER_SM) void scattered_gradients(const __grid_constant__ ScatteredArgs a) {
    wait_unless_prepared(a.call);
    TinyGradient<T> op(a.call, a.rows.length);
    scattered_rows<TinyGradient<T>, T, COUNT, true>(op, a.rows);
}

struct TinyRowsVariant {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        TinyRows tiny;
        ScatteredRows scattered; /* no blocks: rows follow each other */
        int64_t blocks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.forward == p.gradient)
            return p.forward ? "loss and gradient are wanted at once" : "there is nothing to write";
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        if (!p.invariant)
            return why_not_close(p, call);
        return p.gradient && p.lse_given && p.step(call.logits) != 1
                   ? "rows are not contiguous, and lse is given"
                   : why_not_order(TINY_ROWS, p.order, p.rows, p.classes);
    }
    /* Why the rows do not follow each other closely, for tiny_rows, or NULL. */
    static const char *why_not_close(const Problem &p, const Call &call) {
        return why_not_tiny(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                            static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->scattered = {};
        if (why_not_close(p, call)) {
            plan->scattered = scattered_rows_of(call.logits, p.gradient ? &call.dlogits : NULL, p.rows, device);
            plan->general.fill(device, p, call, plan->scattered.blocks, &layout);
            return layout.bytes;
        }
        plan->tiny = tiny_rows_of(slabs_of(call.logits, p.gradient ? &call.dlogits : NULL), p.gradient ? 2 : 1,
                                  static_cast<int>(rafter_dtype_bytes(call.logits.dtype)), 1);
        plan->blocks = tiny_blocks(plan->tiny, device, p.gradient ? TINY_GRADIENTS_PER_SM : TINY_PER_SM);
        plan->general.fill(device, p, call, plan->blocks, &layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const Args args = plan.general.start(context, workspace);
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            if (plan.scattered.blocks > 0)
                return for_few_counts(plan.scattered.length, [&](auto count) {
                    constexpr int COUNT = decltype(count)::value;
                    ::launch(context, Launch{plan.scattered.blocks, TINY_THREADS},
                             args.gradient ? scattered_gradients<T, COUNT> : scattered_losses<T, COUNT>,
                             ScatteredArgs{args, plan.scattered});
                });
            for_few_counts(plan.tiny.length,
                           [&](auto count) { /* few calls get here: see basic_tiny_rows.cu */
                                             constexpr int COUNT = decltype(count)::value;
                                             ::launch(context,
                                                      Launch{plan.blocks, TINY_THREADS, tiny_shared(plan.tiny)},
                                                      args.gradient ? tiny_gradients<T, COUNT> : tiny_losses<T, COUNT>,
                                                      TinyArgs{args, plan.tiny});
                           });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, tiny_rows, TinyRowsVariant)
