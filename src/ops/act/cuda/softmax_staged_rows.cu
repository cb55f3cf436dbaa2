/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of rows of adjacent elements that are not aligned packs: a block per row, which it keeps in shared memory.
 * Sums do not depend on the alignment of rows (cuda/slot_sums.cuh).
 *
 * For the forward of many rows of 64 to 111 KB, of which a multiprocessor holds two at a time; and for batch-invariant
 * calls with rows of more than 512 elements that fit.
 */
#include "cuda/slot_sums.cuh"
#include "ops/act/cuda/softmax_indexed.cuh"

namespace {

constexpr int STAGED_THREADS = 1024; /* at most */

/* A row of adjacent elements in shared memory, with the same offset from a multiple of 16 bytes as in global memory. A
 * granule is 16 aligned bytes; elements of the first and the last one that are not the row's are `instead`. */
template <typename T> struct StagedRow {
    static constexpr int N = WIDE<T>;
    Pack<T, N> *granules;
    int n, shift, count; /* elements; offset of the first one in its granule; granules */

    DEVICE StagedRow(const T *row, int length, void *memory, float instead)
        : granules(static_cast<Pack<T, N> *>(memory)), n(length), shift(offset_in_pack(row)),
          count((length + shift + N - 1) / N) {
        for (int g = threadIdx.x; g < count; g += blockDim.x) {
            const int first = g * N - shift;
            if (first >= 0 && first + N <= n) {
                copy_async<T, N>(granules + g, row + first);
            } else {
#pragma unroll
                for (int j = 0; j < N; j++)
                    granules[g].v[j] = first + j >= 0 && first + j < n ? row[first + j] : from_float<T>(instead);
            }
        }
        copy_commit();
    }
    DEVICE T element(int i) const {
        return granules->v[i + shift];
    }
    /* Elements first, ..., first + N - 1. Those that are not the row's are undefined. */
    DEVICE void get(int first, float (&v)[N]) const {
        if ((first + shift) % N == 0) {
            unpack(granules[(first + shift) / N], v);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = to_float(element(min(max(first + j, 0), n - 1)));
        }
    }
};

/* Bytes of shared memory that a row takes, at most. */
__host__ DEVICE constexpr int64_t staged_bytes(int64_t row_bytes) {
    return (row_bytes / 16 + 2) * 16;
}

/* Writes elements first, ..., first + N - 1 of a row of n elements; those that are not the row's are left out. */
template <typename T> DEVICE void store_granule(T *row, int n, int first, const Pack<T, WIDE<T>> &pack) {
    constexpr int N = WIDE<T>;
    if (first >= 0 && first + N <= n) {
        store_once(row + first, pack);
    } else if (first + N > 0 && first < n) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (first + j >= 0 && first + j < n)
                row[first + j] = pack.v[j];
    }
}

template <typename T, bool FORWARD>
__global__ __launch_bounds__(STAGED_THREADS, 1) void staged_rows(const __grid_constant__ IndexedArgs<T> a) {
    wait_for_inputs();
    constexpr int N = WIDE<T>;
    DYNAMIC_SHARED(uint4, memory);
    __shared__ float warp_tops[WARP];
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % WARP, n = static_cast<int>(a.n);
    int64_t at[TENSORS];
    a.walk.offsets(blockIdx.x, at);
    const StagedRow<T> in(a.in + at[IN], n, memory, FORWARD ? -INFINITY : 0.0f);
    const StagedRow<T> dy =
        FORWARD ? in : StagedRow<T>(a.dy + at[DY], n, memory + staged_bytes(int64_t(n) * sizeof(T)) / 16, 0.0f);
    copy_wait<0>();
    __syncthreads();
    float slot[N] = {};
    ElementOf<T, FORWARD> element_of = {};
    if constexpr (FORWARD) {
        float top = -INFINITY;
        for (int g = thread; g < in.count; g += threads) {
            const Pack<T, N> pack[1] = {in.granules[g]};
            top = fmaxf(top, max_of_all(pack));
        }
        top = warp_max(top);
        if (lane == 0)
            warp_tops[thread / WARP] = top;
        __syncthreads();
        top = warp_max(lane < threads / WARP ? warp_tops[lane] : -INFINITY);
        const float pivot = pivot_at(top);
        for (int g = thread; g < in.count; g += threads) {
            float v[N];
            unpack(in.granules[g], v);
#pragma unroll
            for (int j = 0; j < N; j++)
                slot[j] += exp_as<T>(v[j] - pivot);
        }
        element_of = element_from<T, true>({top, sum_block_slots(slot, in.shift)});
    } else {
        for (int g = thread; g < in.count; g += threads) {
            const int first = g * N - in.shift;
            const bool whole = first >= 0 && first + N <= n;
            float v[N], w[N];
            unpack(in.granules[g], v);
            dy.get(first, w);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (whole || (first + j >= 0 && first + j < n))
                    slot[j] = fmaf(v[j], w[j], slot[j]);
        }
        element_of = element_from<T, false>({0.0f, sum_block_slots(slot, in.shift)});
    }
    T *const out = a.out + at[OUT];
    const int shift = offset_in_pack(out);
    for (int g = thread; g * N < n + shift; g += threads) {
        const int first = g * N - shift;
        float v[N], w[N] = {};
        in.get(first, v);
        if constexpr (!FORWARD)
            dy.get(first, w);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = element_of(v[j], w[j]);
        store_granule(out, n, first, packed<T, N>(v));
    }
}

struct StagedRows {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan : IndexedRows {
        int64_t shared;
    };

    /* Shared memory that the kernel needs besides; and above which a multiprocessor has only one block. */
    static constexpr int64_t OWN_BYTES = 4 << 10, ALONE_BYTES = 111 << 10;

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        constexpr int64_t LEAST_BYTES = 64 << 10, LEAST_ROWS = 1024; /* measured: docs/perf/act.md */
        if (!is_softmax(call))
            return "kind is not softmax";
        if (!dim_is_contiguous(call))
            return "dim is strided";
        const RowViews views(call);
        if (views.wide())
            return "rows are aligned packs of 16 bytes";
        const int64_t n = views.view[OUT].shape[views.ndim() - 1], row_bytes = n * rafter_dtype_bytes(call.out.dtype);
        if ((is_forward(call) ? 1 : 2) * staged_bytes(row_bytes) + OWN_BYTES > device.shared_bytes)
            return "rows do not fit into shared memory";
        if (call.common.batch_invariant)
            return n > MOST_CHUNKED_LENGTH ? NULL : "rows are short";
        if (!is_forward(call))
            return "a cluster per row is faster";
        if (row_bytes <= LEAST_BYTES || row_bytes > ALONE_BYTES)
            return "a cluster per row is faster";
        return call.out.numel < LEAST_ROWS * n ? "rows are few" : NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        plan->fill(call, RowViews(call));
        const int64_t row_bytes = plan->row_bytes(call);
        plan->shared = (is_forward(call) ? 1 : 2) * staged_bytes(row_bytes);
        const int most = plan->shared > ALONE_BYTES ? STAGED_THREADS : STAGED_THREADS / 2;
        plan->team = {power_at_least(ceil_div<int64_t>(row_bytes, 4 * 16), 64, most)};
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            const IndexedArgs<T> args = indexed_args<T>(call, plan, plan.rows);
            ::launch(context, Launch{plan.rows, plan.team.threads, static_cast<size_t>(plan.shared)},
                     is_forward(call) ? staged_rows<T, true> : staged_rows<T, false>, args);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_staged_rows, StagedRows)
