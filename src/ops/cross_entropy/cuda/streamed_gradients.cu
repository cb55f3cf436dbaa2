/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward with lse, of many short contiguous rows of any alignment, with any options: one kernel for
 * the whole call, in which warps take batches of rows (cuda/row_stream.cuh). Each lane computes the
 * coefficients of one row of the batch; then the lanes of each row write its gradient.
 */
#include "cuda/row_stream.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

struct GradientArgs {
    Args call;
    RowStream stream;
};

/* Blocks per multiprocessor. */
template <int OPTIONS> constexpr int STREAMS_PER_SM = OPTIONS == FULL ? 2 : 3;

/* What row_stream.cuh asks of an op of a gradient. */
template <typename T, int OPTIONS> struct StreamedGradient {
    struct Row {
        int label; /* NO_ROW: there is no row */
        float lse;
    };
    struct Coefficient {
        RowGradient gradient;
        int label;
    };
    /* RowWriter refers to the gradient. */
    struct Writer {
        Coefficient of_row;
        const Loss &loss;

        template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &z, int64_t column) const {
            return RowWriter<OPTIONS, T>(of_row.gradient, of_row.label, loss).of(z, column);
        }
        DEVICE T of_one(T z, int64_t column) const {
            return RowWriter<OPTIONS, T>(of_row.gradient, of_row.label, loss).of_one(z, column);
        }
    };
    static constexpr int NO_ROW = -3;
    static constexpr bool LARGE = OPTIONS == FULL;

    const Args &c;
    const Loss &loss;
    double common = 0.0;

    DEVICE explicit StreamedGradient(const Args &args) : c(args), loss(args.loss) {
    }
    DEVICE void begin() {
        wait_for_previous_kernel();
        common = common_factor(c);
    }
    DEVICE Row no_row() const {
        return {NO_ROW, 0.0f};
    }
    DEVICE Row load_row(int64_t row) const {
        return {static_cast<int>(loss.class_of(loss.load_label(row))), loss.lse.get(row)};
    }
    DEVICE Coefficient coefficient(const Row &row, int64_t at) const {
        Coefficient mine = {gradient_of_skipped(row.label), row.label};
        float z_label = 0.0f;
        if (row.label >= 0) {
            z_label = to_float(c.z.at<const T>(at)[row.label]);
            mine.gradient = gradient_from_lse(loss, common, at, row.label, z_label, row.lse);
        } else if (row.label != NO_ROW) {
            write_skipped(loss, at, row.label, nullptr);
        }
        /* The whole warp reads the rows whose lse is not accurate enough. */
        const int lane = threadIdx.x % WARP;
        for (unsigned left = __ballot_sync(~0u, row.label >= 0 && !lse_is_accurate<T>(row.lse)); left != 0;
             left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const AlignedSpan<const T> span(c.z.at<const T>(at - lane + owner), loss.classes);
            PackGroup<T, AHEAD<OPTIONS>> group;
            group.load(span, lane, WARP);
            const LossStats<OPTIONS> g = merge_warp(span_stats<OPTIONS>(span, 0, group, lane, WARP, loss), loss.scale);
            if (lane == owner)
                mine.gradient =
                    gradient_from_stats(loss, common, at, row.label, z_label, whole_row_stats(g, z_label, loss));
        }
        return mine;
    }
    DEVICE Coefficient shuffled(const Coefficient &mine, int lane) const {
        const RowGradient &g = mine.gradient;
        const auto from = [&](auto value) { return __shfl_sync(~0u, value, lane); };
        return {{from(static_cast<int>(g.constant)) != 0, from(g.pivot), from(g.p), from(g.spread), from(g.at_label),
                 from(g.target), from(g.level), from(g.tilt)},
                from(mine.label)};
    }
    DEVICE Writer writer(const Coefficient &of_row) const {
        return {of_row, loss};
    }
    DEVICE T *out(int64_t row) const {
        return c.dz.at<T>(row);
    }
};

template <typename T, int OPTIONS, int LANES>
__global__ __launch_bounds__(STREAM_THREADS,
                             STREAMS_PER_SM<OPTIONS>) void streamed_gradients(const __grid_constant__ GradientArgs a) {
    extern __shared__ uint4 dynamic[];
    typedef StreamedGradient<T, OPTIONS> Op;
    Op op(a.call);
    stream_short_gradients<Op, T, LANES, STREAM_PACKS>(op, a.stream, dynamic);
}

struct StreamedGradients {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        RowStream stream;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.gradient || !p.lse_given)
            return "it writes gradients from lse";
        if (p.strided)
            return "rows are not contiguous, or dlogits is aligned otherwise than logits";
        if (p.row_bytes > 2048)
            return "rows are too long";
        return why_not_streamed(p.rows, p.classes, static_cast<int>(rafter_dtype_bytes(call.logits.dtype)));
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->general.fill(device, p, call, 0, &layout);
        plan->stream = stream_of(
            plan->general.args.z, p.rows, p.classes, static_cast<int>(rafter_dtype_bytes(call.logits.dtype)),
            (plan->general.options == FULL ? STREAMS_PER_SM<FULL> : STREAMS_PER_SM<PLAIN>)*device.multiprocessors *
                (STREAM_THREADS / WARP));
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const GradientArgs args = {plan.general.start(sequence, workspace), plan.stream};
        const Launch how = {plan.stream.blocks, STREAM_THREADS, stream_shared()};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = IN_BACKWARD<decltype(o)::value>;
                if (args.stream.lanes == 4)
                    sequence.run(how, streamed_gradients<T, OPTIONS, 4>, args);
                else if (args.stream.lanes == 8)
                    sequence.run(how, streamed_gradients<T, OPTIONS, 8>, args);
                else
                    sequence.run(how, streamed_gradients<T, OPTIONS, WARP>, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, streamed_gradients, StreamedGradients)
