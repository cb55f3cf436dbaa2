/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax in any layout, batch invariant: a warp or a block per row, by the length of rows alone. Rows of aligned
 * packs that fit stay in registers, and other rows of adjacent elements in shared memory (cuda/slot_sums.cuh).
 * Columns, and what does not fit, are read a second time, usually from L1 or L2. Most rows of aligned packs are
 * taken by softmax_row_in_registers and softmax_slabs, short rows by softmax_chunks.
 */
#include "cuda/slot_sums.cuh"
#include "ops/act/cuda/softmax_indexed.cuh"

namespace {

static_assert(KEPT_THREADS == INDEXED_THREADS, "");

template <typename T, bool FORWARD, bool ALIGNED>
__global__ __launch_bounds__(INDEXED_THREADS, 2) void indexed_rows(const __grid_constant__ IndexedArgs<T> a) {
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    const IndexedRow<T, ALIGNED> in = {a.in + at[IN], a.n, a.step[IN]},
                                 dy = {FORWARD ? in.first : a.dy + at[DY], a.n, a.step[DY]};
    const ElementOf<T, FORWARD> element_of = element_from<T, FORWARD>(statistics_of<FORWARD>(a.team, in, dy));
    write_row(a.team, element_of, in, dy, a.out + at[OUT], a.step[OUT]);
}

/* Rows of whole, aligned packs in all tensors. */
template <typename T, bool FORWARD>
__global__ __launch_bounds__(INDEXED_THREADS, 3) void rows_in_registers(const __grid_constant__ IndexedArgs<T> a) {
    constexpr int N = WIDE<T>, COUNT = KEPT_PACKS<FORWARD>;
    const int64_t row = a.team.row();
    if (row >= a.rows)
        return;
    const int thread = a.team.thread(), threads = a.team.threads, packs = static_cast<int>(a.n / N);
    int64_t at[TENSORS];
    a.walk.offsets(row, at);
    Pack<T, N> x[COUNT], d[FORWARD ? 1 : COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const int i = thread + k * threads;
        x[k] = load_once_if<T, N>(i < packs, a.in + at[IN] + int64_t(i) * N, FORWARD ? -INFINITY : 0.0f);
        if constexpr (!FORWARD)
            d[k] = load_once_if<T, N>(i < packs, a.dy + at[DY] + int64_t(i) * N, 0.0f);
    }
    ElementOf<T, FORWARD> element_of = {};
    if constexpr (FORWARD) {
        RowStats s = no_elements();
        add_packs(s, x, 1.0f);
        element_of = element_from<T, true>(merge_team(a.team, s, 1.0f));
    } else {
        float sum[2] = {};
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float v[N], w[N];
            unpack(x[k], v);
            unpack(d[k], w);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j % 2] = fmaf(v[j], w[j], sum[j % 2]);
        }
        element_of = {0.0f, 0.0f, sum_team(a.team, sum[0] + sum[1])};
    }
    T *const out = a.out + at[OUT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float v[N], w[N] = {};
        unpack(x[k], v);
        if constexpr (!FORWARD)
            unpack(d[k], w);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = element_of(v[j], w[j]);
        if (thread + k * threads < packs)
            store_once(out + int64_t(thread + k * threads) * N, packed<T, N>(v));
    }
}

/* ---- rows in shared memory -------------------------------------------------------------------- */

constexpr int STAGED_THREADS = 1024; /* at most */

/* A row of adjacent elements in shared memory, as far from a multiple of 16 bytes as in memory. Granules are 16
 * bytes; elements of the first and the last one that are not the row's are `instead`. */
template <typename T> struct StagedRow {
    static constexpr int N = WIDE<T>;
    Pack<T, N> *granules;
    int n, shift, count; /* elements; of the first one in its granule; granules */

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
    /* Elements first, first + 1, ..., of which those that are not the row's are undefined. */
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

/* Bytes of shared memory of a row. */
__host__ DEVICE constexpr int64_t staged_bytes(int64_t row_bytes) {
    return (row_bytes / 16 + 2) * 16;
}

/* Writes elements first, first + 1, ..., of a row of n. */
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
    constexpr int N = WIDE<T>;
    extern __shared__ uint4 memory[];
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

/* ---- columns ---------------------------------------------------------------------------------- */

template <int PARTS> constexpr int COLUMN_THREADS = PARTS == WARP ? WARP *WARP : 256; /* per block */
template <bool FORWARD> constexpr int COLUMN_LOADS = FORWARD ? 8 : 4; /* elements that a thread loads at a time */

/* Rows that lie side by side: adjacent threads take adjacent rows. PARTS threads share a row, by the length of rows
 * alone. Every thread reads its share twice: the output may be an input. */
template <typename T, bool FORWARD, int PARTS>
__global__ __launch_bounds__(COLUMN_THREADS<PARTS>,
                             1024 / COLUMN_THREADS<PARTS>) void columns(const __grid_constant__ IndexedArgs<T> a) {
    constexpr int ROWS = COLUMN_THREADS<PARTS> / PARTS, LOADS = COLUMN_LOADS<FORWARD>, STEP = PARTS * LOADS;
    __shared__ RowStats shares[PARTS][ROWS + 1]; /* one more: a warp reads all parts of a row */
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

struct SoftmaxInvariant {
    typedef act_call Call;
    static constexpr bool BATCH_INVARIANT = true;
    struct Plan {
        Walk walk; /* over rows */
        int64_t rows, n, step[TENSORS];
        RowTeam team;
        bool aligned, in_registers;
        int64_t staged; /* bytes of shared memory of staged_rows; 0: not used */
        bool columns;
    };

    /* Shared memory: what staged_rows has besides; and from where on a multiprocessor has one block. */
    static constexpr int64_t OWN_BYTES = 4 << 10, ALONE_BYTES = 100 << 10;

    static const char *why_not(const rafter_cuda_state &, const Call &call) {
        return is_softmax(call) ? NULL : "kind is not softmax";
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const RowViews views(call);
        const int dim = views.ndim() - 1;
        *plan = {};
        plan->walk = walk_over(views.pointer, 0, dim);
        plan->n = views.view[OUT].shape[dim];
        plan->rows = call.out.numel / plan->n;
        for (int t = 0; t < TENSORS; t++)
            plan->step[t] = views.pointer[t] && plan->n > 1 ? views.view[t].stride[dim] : 1;
        const int kept = is_forward(call) ? KEPT_PACKS<true> : KEPT_PACKS<false>;
        const int64_t row_bytes = plan->n * rafter_dtype_bytes(call.out.dtype);
        plan->team = RowTeam::of(row_bytes, kept);
        plan->aligned = rows_are_aligned(views.view[IN]) && (is_forward(call) || rows_are_aligned(views.view[DY]));
        plan->in_registers = views.wide() && row_bytes <= int64_t(16) * kept * plan->team.threads;
        const int64_t staged = (is_forward(call) ? 1 : 2) * staged_bytes(row_bytes);
        if (dim_is_contiguous(call) && plan->n > 1 && staged + OWN_BYTES <= device.shared_bytes)
            plan->staged = staged;
        plan->columns =
            plan->n > 1 && plan->n <= INT32_MAX / 2 && plan->step[IN] * rafter_dtype_bytes(call.out.dtype) >= 16;
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
        if (plan.columns) {
            if (plan.n <= 32)
                launch_columns<T, FORWARD, 1>(context, args);
            else if (plan.n <= 512)
                launch_columns<T, FORWARD, 4>(context, args);
            else
                launch_columns<T, FORWARD, WARP>(context, args);
            return;
        }
        if (!plan.in_registers && plan.staged > 0) {
            const int most = plan.staged > ALONE_BYTES ? STAGED_THREADS : STAGED_THREADS / 2;
            const int threads = power_at_least(ceil_div<int64_t>(plan.n, 4 * WIDE<T>), 64, most);
            return ::launch(context, Launch{plan.rows, threads, static_cast<size_t>(plan.staged)},
                            staged_rows<T, FORWARD>, args);
        }
        ::launch(context, plan.team.blocks(plan.rows),
                 plan.in_registers ? rows_in_registers<T, FORWARD>
                 : plan.aligned    ? indexed_rows<T, FORWARD, true>
                                   : indexed_rows<T, FORWARD, false>,
                 args);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        for_dtype(call.out.dtype, [&](auto zero) {
            typedef decltype(zero) T;
            is_forward(call) ? launch_as<T, true>(context, call, plan) : launch_as<T, false>(context, call, plan);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_invariant, SoftmaxInvariant)
