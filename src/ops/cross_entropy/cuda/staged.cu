/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short rows in any layout that keeps them together, any alignment, any options: one kernel for the
 * whole call. A block copies a tile of slabs (cuda/slabs.cuh) into shared memory, reduces each row by
 * a few lanes, and computes the results of up to 256 rows at once, a thread per row. A gradient is
 * written over the logits in shared memory, then copied out.
 */
#include "cuda/slabs.cuh"
#include "ops/cross_entropy/cuda/general.cuh"

namespace {

constexpr int THREADS = 256, PER_SM = 4; /* threads per block; blocks per multiprocessor */
constexpr int TILE_BYTES = 16 << 10;     /* of logits */

struct StagedArgs {
    Args call;
    Slabs slabs;
    Stage stage;
    int lanes; /* per row: a power of two, at most a warp */
    unsigned tiles;
    Divisor by_inner;
    int stats, coefficients; /* offsets in shared memory */
};

/* Rows of a tile by number; `row`: among all rows. */
template <typename T> struct StagedRow {
    int64_t row;
    int place; /* of its first element in shared memory */

    DEVICE StagedRow(const StagedArgs &a, const StagedTile<T> &tile, int row_of_tile) {
        const int slab = static_cast<int>(a.by_inner.quotient(static_cast<unsigned>(row_of_tile)));
        const int column = row_of_tile - slab * static_cast<int>(a.slabs.inner);
        int64_t at[3];
        a.slabs.walk.offsets(tile.first + slab, at);
        row = at[2] + column * a.slabs.row_step;
        place = tile.place(slab) + column;
    }
};

/* The statistics of a row, computed by `lanes` lanes; each gets them. All lanes of the warp take
 * part. */
template <int OPTIONS, typename T>
DEVICE LossStats<OPTIONS> staged_stats(const T *z, int inner, int length, int lane, int lanes, const Loss &loss) {
    LossStats<OPTIONS> g = no_columns<OPTIONS>();
    if constexpr (OPTIONS != FULL) {
        float max = -INFINITY, sum = 0.0f, weighted = 0.0f;
#pragma unroll 4
        for (int v = lane; v < length; v += lanes)
            max = fmaxf(max, to_float(z[v * inner]));
        for (int step = lanes / 2; step > 0; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        const float pivot = pivot_at(max);
#pragma unroll 4
        for (int v = lane; v < length; v += lanes) {
            const float x = to_float(z[v * inner]);
            sum += exp_term<T>(x - pivot, loss.scale);
            weighted += x;
        }
        for (int step = lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            if constexpr (OPTIONS == SMOOTH)
                weighted += __shfl_xor_sync(~0u, weighted, step);
        }
        g.s = {max, sum};
        if constexpr (OPTIONS == SMOOTH)
            g.weighted = weighted;
    } else {
        constexpr int AT_ONCE = 4;
        for (int v = lane; v < length; v += AT_ONCE * lanes) {
            float x[AT_ONCE][1];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                x[k][0] = v + k * lanes < length ? to_float(z[(v + k * lanes) * inner]) : -INFINITY;
            add_columns<T>(
                g, x, [&](int k, int) { return v + k * lanes < length ? v + k * lanes : -1; }, loss);
        }
        g = merge_lanes(g, lanes, loss.scale);
    }
    return g;
}

/* GRADIENT: dz is wanted. */
template <typename T, int OPTIONS, bool GRADIENT>
__global__ __launch_bounds__(THREADS, PER_SM) void staged(const __grid_constant__ StagedArgs a) {
    extern __shared__ uint4 dynamic[];
    const Loss &loss = a.call.loss;
    T *const buffer = reinterpret_cast<T *>(dynamic);
    auto *const row_stats = reinterpret_cast<LossStats<OPTIONS> *>(reinterpret_cast<char *>(dynamic) + a.stats);
    auto *const coefficients = reinterpret_cast<RowCoefficients *>(reinterpret_cast<char *>(dynamic) + a.coefficients);
    const int inner = static_cast<int>(a.slabs.inner), length = static_cast<int>(a.slabs.length);
    const int lane = threadIdx.x & (a.lanes - 1), groups = THREADS / a.lanes, group = threadIdx.x / a.lanes;
    Totals totals = {};
    double common = 0.0;
    bool first = true;
    for (unsigned t = blockIdx.x; t < a.tiles; t += gridDim.x) {
        const int64_t from = t * int64_t(a.stage.slabs), left = a.slabs.outer - from;
        const StagedTile<T> tile = {a.slabs, a.stage, from,
                                    left < a.stage.slabs ? static_cast<int>(left) : a.stage.slabs};
        const int rows = tile.count * inner;
        tile.load(buffer);
        /* The rest of what a row needs is loaded while the logits are in flight. */
        const bool mine = threadIdx.x < rows;
        const StagedRow<T> own(a, tile, mine ? threadIdx.x : 0);
        const int64_t loaded = mine ? loss.load_label(own.row) : loss.ignore_index;
        const float given = GRADIENT && mine && !loss.forward && loss.lse.data ? loss.lse.get(own.row) : INFINITY;
        if (first) {
            wait_for_previous_kernel();
            if constexpr (GRADIENT)
                common = common_factor(a.call);
            first = false;
        }
        const int64_t label = loss.class_of(loaded);
        const bool known = GRADIENT && lse_is_accurate<T>(given);
        copy_wait<0>();
        if (__syncthreads_or(mine && label >= 0 && !known)) {
            for (int r = group; r - group < rows; r += groups) {
                const int at = StagedRow<T>(a, tile, r < rows ? r : 0).place;
                const LossStats<OPTIONS> g = staged_stats<OPTIONS>(buffer + at, inner, length, lane, a.lanes, loss);
                if (lane == 0 && r < rows)
                    row_stats[r] = g;
            }
            __syncthreads();
        }
        if (mine) {
            [[maybe_unused]] RowGradient gradient = gradient_of_skipped(label);
            if (label < 0) {
                write_skipped(loss, own.row, label, &totals);
            } else {
                const float z_label = to_float(buffer[own.place + static_cast<int>(label) * inner]);
                if (known) {
                    gradient = gradient_from_lse(loss, common, own.row, label, z_label, given);
                } else {
                    const WholeRowStats stats = whole_row_stats(row_stats[threadIdx.x], z_label, loss);
                    if constexpr (GRADIENT)
                        gradient = gradient_from_stats(loss, common, own.row, label, z_label, stats);
                    if (loss.forward)
                        write_row(loss, own.row, label, results_of(loss, own.row, label, stats), &totals);
                }
            }
            if constexpr (GRADIENT)
                coefficients[threadIdx.x] = {gradient, label};
        }
        if constexpr (GRADIENT) {
            __syncthreads();
            for (int r = group; r < rows; r += groups) {
                T *const z = buffer + StagedRow<T>(a, tile, r).place;
                const RowCoefficients row = coefficients[r];
                const RowWriter<IN_BACKWARD<OPTIONS>, T> writer(row.gradient, row.label, loss);
#pragma unroll 4
                for (int v = lane; v < length; v += a.lanes)
                    z[v * inner] = writer.of_one(z[v * inner], v);
            }
            __syncthreads();
            tile.store(buffer);
        }
        __syncthreads(); /* the next tile overwrites shared memory */
    }
    if (loss.forward)
        add_up(a.call, totals);
}

struct Staged {
    typedef cross_entropy_call Call;
    struct Plan {
        GeneralPlan general;
        Slabs slabs;
        Stage stage;
        int lanes;
        int64_t tiles, blocks;
        int stats, coefficients, shared;
    };

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        const Problem p(call);
        if (p.rows == 0 || p.classes == 0)
            return "there are no rows or no classes";
        const Slabs s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        if (!s.dense(0) || !s.dense(1))
            return "slabs are not dense";
        const int64_t bytes = s.slab_elements() * rafter_dtype_bytes(call.logits.dtype);
        if (s.inner > 64 || (s.inner == 1 ? bytes >= 1024 : bytes > TILE_BYTES))
            return "slabs are too large for shared memory";
        return s.outer > int64_t(INT32_MAX) ? "it counts slabs in 31 bits" : NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const Problem p(call);
        WorkspaceLayout layout;
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.logits.dtype));
        Slabs &s = plan->slabs;
        s = slabs_of(call.logits, p.gradient ? &call.dlogits : NULL);
        const int64_t most = min(int64_t(TILE_BYTES) / (s.slab_elements() * bytes), int64_t(THREADS) / s.inner);
        const int64_t enough = ceil_div<int64_t>(s.outer, 4 * device.multiprocessors);
        plan->stage = stage_of(s, p.gradient, static_cast<int>(max(min(most, enough), int64_t(1))), bytes);
        plan->tiles = ceil_div<int64_t>(s.outer, plan->stage.slabs);
        const int64_t rows = plan->stage.slabs * s.inner;
        plan->lanes = 1;
        while (plan->lanes < WARP && plan->lanes * 2 * rows <= THREADS && plan->lanes < s.length)
            plan->lanes *= 2;
        plan->general.fill(device, p, call, 0, &layout);
        plan->stats = static_cast<int>(round_up<int64_t>(plan->stage.bytes, 16));
        plan->coefficients = plan->stats + static_cast<int>(round_up<int64_t>(rows * plan->general.stats_bytes(), 16));
        plan->shared = plan->coefficients + (p.gradient ? static_cast<int>(rows * sizeof(RowCoefficients)) : 0);
        const int64_t per_sm = min(int64_t(PER_SM), int64_t(device.shared_bytes + 1024) / (plan->shared + 3 * 1024));
        plan->blocks = min(plan->tiles, max(per_sm, int64_t(1)) * device.multiprocessors);
        layout = {};
        plan->general.fill(device, p, call, plan->blocks, &layout);
        return layout.bytes;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        LaunchSequence sequence = {context};
        const StagedArgs args = {plan.general.start(sequence, workspace),
                                 plan.slabs,
                                 plan.stage,
                                 plan.lanes,
                                 static_cast<unsigned>(plan.tiles),
                                 Divisor(plan.slabs.inner),
                                 plan.stats,
                                 plan.coefficients};
        const Launch how = {plan.blocks, THREADS, static_cast<size_t>(plan.shared)};
        for_dtype(call.logits.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            for_options(plan.general.options, [&](auto o) {
                constexpr int OPTIONS = decltype(o)::value;
                if (args.call.gradient)
                    sequence.run(how, staged<T, OPTIONS, true>, args);
                else
                    sequence.run(how, staged<T, OPTIONS, false>, args);
            });
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(cross_entropy, staged, Staged)
