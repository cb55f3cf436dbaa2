/* SPDX-License-Identifier: Apache-2.0 */
/* For tiles.cu: the gradient of rows that are not contiguous (cuda/slab_columns.cuh) from coefficients of all
 * rows, and the kernel that computes these from lse. */
#ifndef RAFTER_CROSS_ENTROPY_CUDA_COLUMN_GRADIENTS_CUH
#define RAFTER_CROSS_ENTROPY_CUDA_COLUMN_GRADIENTS_CUH

#include "cuda/slab_columns.cuh"
#include "ops/cross_entropy/cuda/coefficients.cuh"

namespace {

/* What the gradient needs to know of each row. Not the gradient at the label, which takes the label's logit: to
 * fetch that would read 32 bytes per row, and the kernel that writes the gradient loads it anyway. */
struct ColumnCoefficients {
    float4 *rows; /* x, y, z: pivot, shift and factor of ScaledExp; w: minus the spread of RowGradient */
    int *labels;  /* -1: the gradient is w in every column */
    float2 *ends; /* p and target of RowGradient: for the label only */

    static int64_t bytes(int64_t rows) {
        return rows * int64_t(sizeof(float4) + sizeof(float2) + sizeof(int));
    }
    static ColumnCoefficients at(char *memory, int64_t rows) {
        float4 *const first = reinterpret_cast<float4 *>(memory);
        float2 *const ends = reinterpret_cast<float2 *>(first + rows);
        return {first, reinterpret_cast<int *>(ends + rows), ends};
    }
    template <typename T> DEVICE void put(int64_t row, const RowGradient &g, int64_t label, float scale) const {
        const ScaledExp<T> exp(g.p, g.pivot, scale);
        rows[row] =
            g.constant ? make_float4(0.0f, 0.0f, 0.0f, g.p) : make_float4(exp.pivot, exp.shift, exp.factor, -g.spread);
        labels[row] = g.constant ? -1 : static_cast<int>(label);
        ends[row] = make_float2(g.p, g.target);
    }
};

struct ColumnArgs {
    Args call;
    SlabColumns columns;
    ColumnCoefficients coefficients;
};

/* A thread per row. The whole warp reads the rows whose lse is not accurate enough. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void column_coefficients(const __grid_constant__ Args c,
                                                                   ColumnCoefficients coefficients) {
    wait_unless_prepared(c);
    start_next_kernel();
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t loaded = row < loss.rows ? loss.load_label(row) : loss.ignore_index;
    const float lse = row < loss.rows ? loss.lse.get(row) : 0.0f;
    const int64_t label = loss.class_of(loaded);
    const float given = label >= 0 ? lse : 0.0f;
    wait_for_previous_kernel();
    const double common = common_factor(c);
    RowGradient gradient = gradient_of_skipped(label);
    if (label >= 0 && lse_is_accurate<T>(given))
        gradient = gradient_from_lse(loss, common, row, label, 0.0f, given);
    for (unsigned left = __ballot_sync(~0u, !lse_is_accurate<T>(given)); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const LossStats<OPTIONS> g =
            merge_warp(strided_stats<OPTIONS>(c.z.at<const T>(row - lane + owner), lane, c), loss.scale);
        if (lane == owner)
            gradient = gradient_from_stats(loss, common, row, label, 0.0f, whole_row_stats(g, 0.0f, loss));
    }
    if (row < loss.rows) {
        flag_bad_label(loss, label);
        coefficients.put<T>(row, gradient, label, loss.scale);
    }
}

/* What slab_columns.cuh asks of an op. */
template <typename T, int OPTIONS> struct LossColumns {
    static constexpr bool LABELS = true;
    const ColumnArgs &a;

    template <int N> struct Lines {
        static constexpr int WORDS = N * (int)sizeof(T) < 4 ? 1 : N * (int)sizeof(T) / 4, EACH = N / WORDS;
        ScaledExp<T> exp[N];
        float minus_spread[N];
        unsigned mask[WORDS]; /* 0 where a row's gradient does not depend on its logits */

        template <class Thread> DEVICE void set(const LossColumns &op, const Thread &thread) {
            float4 c[N];
            int label[N];
            thread.for_lines([&](int j, int of_slab) {
                c[j] = op.a.coefficients.rows[thread.row(of_slab)];
                label[j] = op.a.coefficients.labels[thread.row(of_slab)];
            });
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                mask[i] = ~0u;
#pragma unroll
            for (int j = 0; j < N; j++) {
                exp[j].pivot = c[j].x;
                exp[j].shift = c[j].y;
                exp[j].factor = c[j].z;
                exp[j].rate = ScaledExp<T>(1.0f, 0.0f, op.a.call.loss.scale).rate;
                minus_spread[j] = c[j].w;
                if (label[j] < 0)
                    mask[j / EACH] &= EACH == 1 ? 0u : j % 2 ? 0x0000ffffu : 0xffff0000u;
            }
        }
        DEVICE void masked(const Pack<T, N> &pack, float (&z)[N]) const {
            if constexpr (N == 1) {
                z[0] = mask[0] ? to_float(pack.v[0]) : 0.0f;
            } else {
                Pack<T, N> kept;
#pragma unroll
                for (int i = 0; i < WORDS; i++)
                    reinterpret_cast<unsigned *>(&kept)[i] = reinterpret_cast<const unsigned *>(&pack)[i] & mask[i];
                unpack(kept, z);
            }
        }
        DEVICE T at_label(const LossColumns &op, int j, T x, int label, float2 end) const {
            const Loss &loss = op.a.call.loss;
            const float z = to_float(x), v = OPTIONS == FULL && loss.softcap != 0.0f ? capped(z, loss) : z;
            const float weight = OPTIONS == FULL ? static_cast<float>(loss.column_weight(label)) : 1.0f;
            const float d = end.x * expf(loss.scale * (v - exp[j].pivot)) - (end.y - minus_spread[j] * weight);
            return from_float<T>(OPTIONS == FULL && loss.softcap != 0.0f ? d * cap_slope(z, loss) : d);
        }
        /* The gradients of a pack: element j is number first + skips.of(j) of its row. */
        DEVICE Pack<T, N> of(const LossColumns &op, const Pack<T, N> &pack, int first, const Skips &skips) const {
            const Loss &loss = op.a.call.loss;
            float z[N];
            masked(pack, z);
            if constexpr (OPTIONS != FULL) {
#pragma unroll
                for (int j = 0; j < N; j++)
                    z[j] = fmaf(exp[j].factor, exp[j].exp(z[j]), minus_spread[j]);
                return packed<T>(z);
            }
            float slope[N];
            const bool caps = loss.softcap != 0.0f;
            if (caps)
                cap_all(z, slope, loss);
            if (loss.smooths && loss.class_weight) {
                const float *const w = loss.class_weight + first * loss.class_stride;
#pragma unroll
                for (int j = 0; j < N; j++)
                    z[j] = fmaf(exp[j].factor, exp[j].exp(z[j]), minus_spread[j] * w[skips.of(j) * loss.class_stride]);
            } else {
#pragma unroll
                for (int j = 0; j < N; j++)
                    z[j] = fmaf(exp[j].factor, exp[j].exp(z[j]), minus_spread[j]);
            }
            if (caps)
#pragma unroll
                for (int j = 0; j < N; j++)
                    z[j] *= slope[j];
            return packed<T>(z);
        }
    };
    DEVICE void begin() const {
        wait_for_previous_kernel();
    }
    /* The element of the row that has a value of its own, or -1. */
    DEVICE int label(int64_t row) const {
        return a.coefficients.labels[row];
    }
    DEVICE const float2 *end(int64_t row) const {
        return a.coefficients.ends + row;
    }
    /* In place of a ColumnThread, for Lines of one element. */
    struct OneRow {
        int64_t number;

        DEVICE int64_t row(int) const {
            return number;
        }
        template <typename F> DEVICE void for_lines(F f) const {
            f(0, 0);
        }
    };
    DEVICE T of_one(int64_t row, T x, int64_t at) const {
        Lines<1> line;
        line.set(*this, OneRow{row});
        if (label(row) == at)
            return line.at_label(*this, 0, x, static_cast<int>(at), *end(row));
        return line.of(*this, Pack<T, 1>{{x}}, static_cast<int>(at), Skips{0}).v[0];
    }
};

template <typename T, int OPTIONS, int N, bool SHIFTED>
__global__ __launch_bounds__(COLUMN_BLOCK, N == 1 ? 4
                                           : OPTIONS == FULL
                                               ? 2
                                               : 3) void column_gradients(const __grid_constant__ ColumnArgs a) {
    const LossColumns<T, OPTIONS> op = {a};
    slab_column_gradients<LossColumns<T, OPTIONS>, T, N, SHIFTED>(op, a.columns);
}

} // namespace

#endif
