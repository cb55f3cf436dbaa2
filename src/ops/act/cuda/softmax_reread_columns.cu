/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of rows that lie side by side: adjacent threads take adjacent rows, element by element, and read them
 * twice, the second time usually from L1 or L2. For batch-invariant calls; and for 16-bit columns that are not aligned,
 * if the tensor is small, or for gradients of short columns: there a kernel of few instructions is faster than one
 * that keeps elements in registers.
 */
#include "cuda/summation_order.cuh"
#include "ops/act/cuda/softmax_indexed.cuh"
#include "ops/act/cuda/softmax_layout.cuh"

namespace {

template <int PARTS> constexpr int COLUMN_THREADS = PARTS == WARP ? WARP *WARP : 256; /* per block */
template <bool FORWARD> constexpr int COLUMN_LOADS = FORWARD ? 8 : 4; /* elements that a thread loads at a time */

/* Adjacent threads take adjacent rows. PARTS threads share a row; PARTS depends on the length of rows alone. A thread
 * writes only elements that it has read itself: the output may be an input. */
template <typename T, bool FORWARD, int PARTS>
__global__ __launch_bounds__(COLUMN_THREADS<PARTS>,
                             1024 / COLUMN_THREADS<PARTS>) void columns(const __grid_constant__ IndexedArgs<T> a) {
    wait_for_inputs();
    constexpr int ROWS = COLUMN_THREADS<PARTS> / PARTS, LOADS = COLUMN_LOADS<FORWARD>, STEP = PARTS * LOADS;
    __shared__ RowStats shares[PARTS][ROWS + 1]; /* + 1 against bank conflicts: a warp reads all parts of a row */
    const int place = threadIdx.x % ROWS, part = threadIdx.x / ROWS;
    const int64_t row = blockIdx.x * int64_t(ROWS) + place;
    const bool valid = row < a.rows;
    int64_t at[TENSORS];
    a.walk.offsets(valid ? row : 0, at);
    const T *const in = a.in + at[IN], *const dy = FORWARD ? in : a.dy + at[DY];
    const int n = valid ? static_cast<int>(a.n) : 0;
    /* Elements l, l + PARTS, ... of an input. */
    const auto load = [&](Pack<T, 1>(&to)[LOADS], const T *row, int64_t step, int l, float instead) {
        const T *p = row + l * step;
#pragma unroll
        for (int k = 0; k < LOADS; k++, p += PARTS * step)
            to[k] = load_once_if<T, 1>(l + k * PARTS < n, p, instead);
    };
    RowStats s = no_elements();
    for (int l = part; l < n; l += STEP) {
        Pack<T, 1> x[LOADS], d[LOADS];
        load(x, in, a.step[IN], l, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            load(d, dy, a.step[DY], l, 0.0f);
        if constexpr (FORWARD) {
            add_packs(s, x, 1.0f);
        } else {
#pragma unroll
            for (int k = 0; k < LOADS; k++)
                s.sum = fmaf(to_float(x[k].v[0]), to_float(d[k].v[0]), s.sum);
        }
    }
    if constexpr (PARTS > 1) {
        shares[part][place] = s;
        __syncthreads();
    }
    if constexpr (PARTS == WARP) { /* a warp merges a row */
        const RowStats share = shares[threadIdx.x % WARP][threadIdx.x / WARP];
        s = FORWARD ? merge_lanes<WARP>(share, 1.0f) : RowStats{0.0f, warp_sum(share.sum)};
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            shares[0][threadIdx.x / WARP] = s;
        __syncthreads();
        s = shares[0][place];
    } else if constexpr (PARTS > 1) {
        s = shares[0][place];
#pragma unroll
        for (int p = 1; p < PARTS; p++) {
            if constexpr (FORWARD)
                s = merge(s, shares[p][place], 1.0f);
            else
                s.sum += shares[p][place].sum;
        }
    }
    const ElementOf<T, FORWARD> element_of = element_from<T, FORWARD>(s);
    T *const out = a.out + at[OUT];
    for (int l = part; l < n; l += STEP) {
        Pack<T, 1> x[LOADS], d[LOADS];
        load(x, in, a.step[IN], l, 0.0f);
        if constexpr (!FORWARD)
            load(d, dy, a.step[DY], l, 0.0f);
        T *to = out + l * a.step[OUT];
#pragma unroll
        for (int k = 0; k < LOADS; k++, to += PARTS * a.step[OUT])
            if (l + k * PARTS < n)
                *to = from_float<T>(element_of(to_float(x[k].v[0]), FORWARD ? 0.0f : to_float(d[k].v[0])));
    }
}

struct RereadColumns {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    typedef IndexedRows Plan;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        Plan plan;
        plan.fill(call, RowViews(call));
        if (!lies_in_columns(plan.n, plan.step[IN], call.out.dtype))
            return "elements of rows are close to each other";
        return call.common.batch_invariant || is_faster(call) ? NULL : "columns are not small, or aligned";
    }

    /* Whether it is faster than other variants, as measured on an H200: docs/perf/act.md. */
    static bool is_faster(const Call &call) {
        constexpr int64_t SMALL = 1 << 21, LEAST_COLUMNS = 32; /* elements; rows side by side */
        constexpr int64_t SHORTEST = 9, LONGEST = 64;          /* lengths, for gradients of large tensors */
        constexpr int64_t LONGEST_OF_SMALL = 1024;
        const SlabViews views(call);
        const int bytes = static_cast<int>(rafter_dtype_bytes(call.out.dtype));
        for (int t = 0; t < TENSORS; t++)
            if (views.pointer[t] && views.view[t].stride[views.dim() + 1] != 1)
                return false;
        if (bytes != 2 || views.column_width() * bytes == 16 || views.inner() < LEAST_COLUMNS)
            return false;
        const int64_t length = views.length();
        return call.out.numel < SMALL ? length <= LONGEST_OF_SMALL
                                      : !is_forward(call) && length >= SHORTEST && length <= LONGEST;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        plan->fill(call, RowViews(call));
        plan->team = {};
        return 0;
    }

    template <typename T, bool FORWARD, int PARTS>
    static void launch_columns(rafter_context *context, const IndexedArgs<T> &args) {
        constexpr int THREADS = COLUMN_THREADS<PARTS>;
        ::launch(context, Launch{ceil_div<int64_t>(args.rows, THREADS / PARTS), THREADS}, columns<T, FORWARD, PARTS>,
                 args);
    }

    template <typename T, bool FORWARD>
    static void launch_as(rafter_context *context, const Call &call, const Plan &plan) {
        const IndexedArgs<T> args = indexed_args<T>(call, plan, plan.rows);
        if (plan.n <= LONGEST_TINY)
            launch_columns<T, FORWARD, 1>(context, args);
        else if (plan.n <= 512)
            launch_columns<T, FORWARD, 4>(context, args);
        else
            launch_columns<T, FORWARD, WARP>(context, args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype_and_direction(call, [&](auto zero, auto forward) {
            launch_as<decltype(zero), decltype(forward)::value>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_reread_columns, RereadColumns)
