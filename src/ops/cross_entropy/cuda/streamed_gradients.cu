/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward with lse, of many short contiguous rows of any alignment, with any options: one kernel for
 * the whole call, in which warps take batches of rows (cuda/chunk_gradients.cuh).
 */
#include "cuda/chunk_gradients.cuh"
#include "ops/cross_entropy/cuda/coefficients.cuh"

namespace {

struct GradientArgs {
    Args call;
    GradientChunks chunks;
};

/* Blocks per multiprocessor. */
template <int OPTIONS> constexpr int STREAMS_PER_SM = OPTIONS == FULL ? 2 : 3;

/* A RowGradient in 32 bytes, as chunk_gradients.cuh wants it. */
struct alignas(16) RowCoefficient {
    float pivot, shift, factor, spread; /* ScaledExp, and spread; label < 0: the gradient is `factor` in every column */
    float at_label, level, tilt;
    int label;
};

/* What chunk_gradients.cuh asks of an op. */
template <typename T, int OPTIONS> struct StreamedGradient {
    struct Row {
        int label; /* NO_ROW: there is no row */
        float lse;
    };
    typedef RowCoefficient Coefficient;

    struct Writer {
        ColumnGradient<OPTIONS, T> columns;
        const Loss &loss;
        float at_label;
        int label;

        DEVICE Writer(const Coefficient &c, const Loss &of_call) : loss(of_call), at_label(c.at_label), label(c.label) {
            columns.exp.pivot = c.pivot;
            columns.exp.rate = NARROW<T> ? of_call.scale * LOG2E : of_call.scale;
            columns.exp.shift = c.shift;
            columns.exp.factor = c.factor;
            columns.spread = c.spread;
            columns.level = c.level;
            columns.tilt = c.tilt;
        }
        template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &z, int column) const {
            return label < 0 ? all_of<T, N>(columns.exp.factor) : columns.of(z, column, loss);
        }
        DEVICE int special() const {
            return label;
        }
        DEVICE T special_value() const {
            return from_float<T>(at_label);
        }
    };
    static constexpr int NO_ROW = -3;
    static constexpr bool LARGE = OPTIONS != PLAIN;

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
    DEVICE Coefficient coefficient(const Row &row, int at) const {
        RowGradient g = gradient_of_skipped(row.label);
        float z_label = 0.0f;
        if (row.label >= 0) {
            z_label = to_float(c.z.at<const T>(at)[row.label]);
            g = gradient_from_lse(loss, common, at, row.label, z_label, row.lse);
        }
        flag_bad_label(loss, row.label);
        /* The whole warp reads the rows whose lse is not accurate enough. */
        constexpr int STATS = OPTIONS == CAPPED ? FULL : OPTIONS;
        const int lane = threadIdx.x % WARP;
        for (unsigned left = __ballot_sync(~0u, row.label >= 0 && !lse_is_accurate<T>(row.lse)); left != 0;
             left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const T *const z = c.z.at<const T>(__shfl_sync(~0u, at, owner));
            const LossStats<STATS> s = merge_warp(strided_stats<STATS>(z, lane, c), loss.scale);
            if (lane == owner)
                g = gradient_from_stats(loss, common, at, row.label, z_label, whole_row_stats(s, z_label, loss));
        }
        if (g.constant)
            return {0.0f, 0.0f, g.p, 0.0f, 0.0f, 0.0f, 0.0f, -1};
        const ScaledExp<T> exp(g.p, g.pivot, loss.scale);
        return {exp.pivot, exp.shift, exp.factor, g.spread, g.at_label, g.level, g.tilt, row.label};
    }
    DEVICE Writer writer(const Coefficient &of_row) const {
        return {of_row, loss};
    }
};

template <typename T, int OPTIONS, int LANES>
__global__ __launch_bounds__(CHUNK_THREADS,
                             STREAMS_PER_SM<OPTIONS>) void streamed_gradients(const __grid_constant__ GradientArgs a) {
    wait_unless_prepared(a.call);
    DYNAMIC_SHARED(uint4, dynamic);
    typedef StreamedGradient<T, OPTIONS> Op;
    Op op(a.call);
    write_chunks<Op, T, LANES>(op, a.chunks, dynamic);
}

struct StreamedGradients {
    typedef cross_entropy_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        GeneralPlan general;
        GradientChunks chunks;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (!p.gradient || !p.lse_given)
            return "it writes gradients from lse";
        if (p.step(call.logits) != 1 || p.step(call.dlogits) != 1)
            return "rows are not contiguous";
        if (p.invariant)
            return why_not_order(CHUNKED_ROWS, p.order, p.rows, p.classes);
        constexpr int64_t LEAST_SHIFTED = 264, LEAST_OF_MANY = 160, LARGE = 32 << 20; /* docs/perf/cross_entropy.md */
        if (p.strided && p.rows * p.row_bytes < LARGE &&
            p.row_bytes < (are_many(p.rows) ? LEAST_OF_MANY : LEAST_SHIFTED))
            return "rows are short, and dlogits is aligned otherwise than logits";
        return why_not_chunks(p.rows, p.row_bytes);
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        plan->general.fill(device, p, call, 0, &layout);
        const Args &args = plan->general.args;
        const bool full = plan->general.options == FULL;
        const int64_t blocks = (full ? STREAMS_PER_SM<FULL> : STREAMS_PER_SM<PLAIN>)*device.multiprocessors;
        plan->chunks = gradient_chunks_of(args.z, args.dz, !p.strided, p.rows, p.classes, full ? 4 : 2,
                                          blocks * (CHUNK_THREADS / WARP), full ? 4 : 2);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const GradientArgs args = {plan.general.start(context, workspace), plan.chunks};
        const Launch how = {plan.chunks.in.blocks, CHUNK_THREADS, chunk_gradients_shared()};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = IN_BACKWARD<decltype(o)::value>;
                for_chunk_lanes<OPTIONS != FULL>(args.chunks.in.lanes, [&](auto lanes) {
                    ::launch(context, how, streamed_gradients<T, OPTIONS, decltype(lanes)::value>, args);
                });
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, streamed_gradients, StreamedGradients)
