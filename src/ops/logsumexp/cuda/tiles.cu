/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logsumexp of rows of any length in any layout: tiles of slabs (cuda/slab_tiles.cuh). Few long rows
 * are split among blocks; the last block of a row to finish merges its parts, in order.
 */
#include "cuda/slab_kernels.cuh"
#include "ops/logsumexp/cuda/row_logsumexp.cuh"

namespace {

struct TileArgs {
    SlabTiles tiles;
    LseRows lse;
    Rows dlse;
    unsigned *counters;   /* one per tile, if tiles have parts */
    RowStats *part_stats; /* of each row and part, if tiles have parts */
};

/* Threads per block, at most, and blocks per multiprocessor. */
template <int LINES> constexpr int TILE_THREADS = LINES > 1 ? 576 : 256;
template <int LINES> constexpr int TILES_PER_SM = LINES > 1 ? 1 : 4;

/* Packs that a thread loads before it uses the first one. */
template <int N> constexpr int TILE_STEPS = N == 1 ? 4 * IN_FLIGHT : IN_FLIGHT;

template <typename T, int N, int LINES>
__global__ __launch_bounds__(TILE_THREADS<LINES>,
                             TILES_PER_SM<LINES>) void tile_statistics(const __grid_constant__ TileArgs a) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, dynamic);
    SlabLogsumexp<T> op = {a.lse};
    slab_statistics<SlabLogsumexp<T>, T, N, LINES, TILE_STEPS<N>>(op, a.tiles, dynamic, a.counters, a.part_stats);
}

/* The Op of slab_gradients: dlse * e^(x - lse). */
template <typename T> struct LogsumexpGradient {
    static constexpr bool LABELS = false;
    const TileArgs &a;

    struct Line {
        const ScaledExp<T> gradient;

        DEVICE Line(const LogsumexpGradient &op, int64_t row)
            : gradient(gradient_of_row<T>(op.a.lse.get(row), op.a.dlse.get(row))) {
        }
        template <int N> DEVICE Pack<T, N> of(const LogsumexpGradient &, const Pack<T, N> &pack, int64_t) const {
            return gradient.of(pack);
        }
    };
    DEVICE void begin() const {
    }
    DEVICE T of_one(int64_t row, T x, int64_t) const {
        return from_float<T>(gradient_of_row<T>(a.lse.get(row), a.dlse.get(row)).of(to_float(x)));
    }
};

template <typename T, int N>
__global__ __launch_bounds__(TILE_THREADS<1>, TILES_PER_SM<1>) void tile_gradients(const __grid_constant__ TileArgs a) {
    wait_for_inputs();
    const LogsumexpGradient<T> op = {a};
    slab_gradients<LogsumexpGradient<T>, T, N, TILE_STEPS<N>>(op, a.tiles);
}

struct Tiles {
    typedef logsumexp_call Call;
    static constexpr bool BATCH_INVARIANT_BACKWARD = true;
    struct Plan {
        SlabTiles tiles;
        int64_t blocks;
        size_t shared;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (const char *const reason = why_not_slabs(p, call))
            return reason;
        const Slabs slabs = slabs_of(p.x, p.backward ? &p.dx : NULL);
        if (p.backward && !(slabs.inner == 1 && slabs.step[0] == 1 && slabs.step[1] == 1))
            return "its gradients are those of contiguous rows";
        return too_large(slabs) ? "it counts rows and columns in 31 bits" : why_slower(p, slabs);
    }

    /* The layouts in which more special kernels are faster, as measured: docs/perf/logsumexp.md. */
    static const char *why_slower(const Problem &p, const Slabs &s) {
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        const int64_t all = p.rows * p.n * bytes;
        if (s.inner > 1 && s.packs_across(0, bytes))
            return "every step has whole packs: columns of packs need no tiles";
        if (p.backward)
            return p.contiguous && p.row_bytes() >= 64
                       ? "rows are contiguous and dx is aligned as x: the gradient needs no tiles"
                       : NULL;
        if (s.inner == 1 && s.step[0] == 1)
            return p.row_bytes() >= 1024 || all < 1 << 20 ? "rows are long, or the tensor is small" : NULL;
        return p.n <= 64 || (s.inner <= 64 && p.n >= 16384) ? NULL : "rows are neither short nor few and long";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(p.x.dtype));
        SlabTiles &t = plan->tiles;
        t = tiles_of(slabs_of(p.x, p.backward ? &p.dx : NULL), bytes, {p.backward, true, IN_FLIGHT, 576, !p.backward});
        plan->blocks = t.tiles;
        plan->shared = 0;
        if (p.backward)
            return 0;
        plan->shared = (2 * t.entries() + static_cast<size_t>(t.batch) * t.rows_of_tile()) * sizeof(RowStats) +
                       (t.has_edges() ? 2 * t.group * (32 + 8) : 0);
        const int64_t per_sm = min(int64_t(t.lines > 1 ? 576 : 1024) / t.threads,
                                   (device.shared_bytes + 1024) / (int64_t(plan->shared) + 2048));
        plan->blocks = min(t.tiles, max(per_sm, int64_t(1)) * device.multiprocessors);
        return t.parts > 1 ? static_cast<size_t>(t.tiles * t.rows_of_tile()) * sizeof(RowStats) : 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const bool backward = call.common.direction == RAFTER_BACKWARD;
        const TileArgs args = {plan.tiles, lse_rows(call), backward ? reduced_rows(call.dlse, call) : Rows{},
                               context->cuda_state->counters, reinterpret_cast<RowStats *>(workspace)};
        const Launch how = {plan.blocks, plan.tiles.threads, plan.shared};
        for_dtype(call.x.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            constexpr int N = WIDE<T>;
            if (backward)
                ::launch(context, how, tile_gradients<T, N>, args);
            else if (plan.tiles.elements == 1)
                ::launch(context, how, tile_statistics<T, 1, 1>, args);
            else if (plan.tiles.lines == 1)
                ::launch(context, how, tile_statistics<T, N, 1>, args);
            else
                ::launch(context, how, tile_statistics<T, N, N>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(logsumexp, tiles, Tiles)
