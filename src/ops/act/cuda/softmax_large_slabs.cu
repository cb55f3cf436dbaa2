/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of slabs of any size, in three kernels: statistics of every part of a slab, the statistics
 * of whole slabs, and the results. The inputs are read twice; the last kernel begins with what the
 * first one has read last, which may still be in L2.
 *
 * A block takes several pieces of a part in turn, and loads one while it works on another.
 */
#include "ops/act/cuda/softmax_slab.cuh"

namespace {

constexpr int STAGES = 2, PIECE_PACKS = 1024; /* of all inputs of a piece */
constexpr int MOST_PIECES = 16, ENOUGH_BLOCKS = 528, MERGE_THREADS = 256;

/* The pieces of a block, counted from the first one of the slab. In the plan, `blocks` counts parts. */
struct Pieces {
    int64_t slab;
    int part, begin, end;

    DEVICE Pieces(const SlabPlan &plan, int each, unsigned block) {
        const int64_t all = ceil_div<int64_t>(plan.elements, (int64_t)plan.threads * plan.items * plan.width());
        slab = block / plan.blocks;
        part = static_cast<int>(block - slab * plan.blocks);
        begin = part * each;
        end = static_cast<int>(min(int64_t(begin + each), max(all, int64_t(1))));
    }
};

template <bool ROW> __host__ __device__ constexpr int most_threads() {
    return ROW ? ROW_THREADS : MOST_COLUMN_THREADS;
}

/* First kernel. parts: [slab][part][line]. `each`: pieces of a block. */
template <typename T, bool FORWARD, bool ALIGNED, bool ROW>
__global__ void __launch_bounds__(most_threads<ROW>())
    slab_statistics(const __grid_constant__ SlabArgs<T> a, int each, int column_bytes, Part *parts) {
    constexpr int LINES = ROW ? 1 : WIDE<T>;
    extern __shared__ uint4 statistics_memory[];
    char *const memory = reinterpret_cast<char *>(statistics_memory), *const stages = memory + column_bytes;
    __shared__ Part warps[WARP];
    const SlabPlan &plan = a.plan;
    const Pieces pieces(plan, each, blockIdx.x);
    const auto stage = [&](int i) { return stages + i % STAGES * plan.stage_bytes(FORWARD); };
    SlabPart<T, FORWARD, ALIGNED, LINES> piece, next, first;
    Statistics<LINES, FORWARD, 1> mine;
    mine.clear();
    wait_for_previous_kernel();
    start_next_kernel();
    next.load(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    first = next; /* it has the edges */
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been read */
        if (i + 1 < pieces.end)
            next.load(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.add_to(mine, plan, stage(i));
    }
    Part *const to = parts + (int64_t)blockIdx.x * plan.inner;
    if constexpr (ROW) {
        const Part own = merge_warp<FORWARD>({mine.max[0], mine.sum[0][0]});
        const unsigned lane = threadIdx.x % WARP;
        if (lane == 0)
            warps[threadIdx.x / WARP] = own;
        __syncthreads();
        if (threadIdx.x >= WARP)
            return;
        const Part all = merge_warp<FORWARD>(lane < blockDim.x / WARP ? warps[lane] : no_part());
        if (lane == 0)
            *to = all;
    } else {
        merge_columns<T, FORWARD, ALIGNED>(first, mine, plan, ColumnMemory(memory), to);
    }
}

/* Second kernel: `lanes` lanes per line of all slabs. totals: [slab][line]. */
template <bool FORWARD>
__global__ void __launch_bounds__(MERGE_THREADS)
    merge_parts(const Part *parts, Part *totals, int64_t lines, Divisor inner, int blocks, int lanes) {
    wait_for_previous_kernel();
    start_next_kernel();
    const int64_t line = (blockIdx.x * (int64_t)MERGE_THREADS + threadIdx.x) / lanes;
    const bool active = line < lines; /* the others take part in shuffles */
    const int64_t slab = active ? inner.quotient(static_cast<unsigned>(line)) : 0;
    Part all = no_part();
    const Part *const from = parts + slab * blocks * inner.number + (line - slab * inner.number);
    for (int i = threadIdx.x % lanes; i < blocks && active; i += lanes)
        all = merged<FORWARD>(all, from[(int64_t)i * inner.number]);
    all = merge_lanes<FORWARD>(all, lanes);
    if (active && threadIdx.x % lanes == 0)
        totals[line] = all;
}

/* Third kernel. */
template <typename T, bool FORWARD, bool ALIGNED, bool ROW>
__global__ void __launch_bounds__(most_threads<ROW>())
    slab_results(const __grid_constant__ SlabArgs<T> a, int each, const Part *totals) {
    constexpr int LINES = ROW ? 1 : WIDE<T>;
    extern __shared__ uint4 results_memory[];
    char *const stages = reinterpret_cast<char *>(results_memory);
    const SlabPlan &plan = a.plan;
    const Pieces pieces(plan, each, gridDim.x - 1 - blockIdx.x); /* in the reverse order of the first kernel */
    const auto stage = [&](int i) { return stages + i % STAGES * plan.stage_bytes(FORWARD); };
    SlabPart<T, FORWARD, ALIGNED, LINES> piece, next;
    next.load(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    wait_for_previous_kernel();
    const ThreadLines<LINES> lines(next, plan.inner, totals + pieces.slab * plan.inner);
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been written */
        if (i + 1 < pieces.end)
            next.load(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.write(plan, stage(i), lines.all, lines.edge);
    }
}

struct LargeSlabs {
    typedef act_call Call;
    struct Plan {
        SlabPlan slab;
        int each; /* pieces of a block */
    };

    static bool cut(const SlabViews &views, bool forward, Plan *plan) {
        SlabPlan &slab = plan->slab;
        if (!plan_slabs(views, forward, &slab))
            return false;
        const int inputs = forward || slab.expanded ? 1 : 2;
        slab.items = max(PIECE_PACKS / (slab.threads * inputs), 1);
        slab.input_bytes = round_up((slab.items * slab.threads + 1) * 16, 128);
        const int64_t pieces = ceil_div(slab.elements, int64_t(slab.threads) * slab.items * slab.width());
        const int64_t each = max(min(pieces * slab.slabs / ENOUGH_BLOCKS, int64_t(MOST_PIECES)), int64_t(1));
        plan->each = static_cast<int>(each);
        slab.blocks = static_cast<int>(min(ceil_div(pieces, each), int64_t(INT32_MAX)));
        return pieces < INT32_MAX;
    }
    static int column_bytes(const SlabPlan &slab) {
        return slab.inner == 1 ? 0 : ColumnMemory::bytes(slab);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        Plan plan;
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        if (!cut(views, is_forward(call), &plan))
            return "a block has too few threads for the interleaved lines";
        if (views.slabs() * views.inner() > INT32_MAX / 64)
            return "it counts lines in 25 bits";
        if (column_bytes(plan.slab) + STAGES * plan.slab.stage_bytes(is_forward(call)) > device.shared_bytes)
            return "the GPU has too little shared memory";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        cut(SlabViews(ordered.call), is_forward(call), plan);
        return (size_t)plan->slab.slabs * (plan->slab.blocks + 1) * plan->slab.inner * sizeof(Part);
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        const SlabPlan &slab = plan.slab;
        const int64_t lines = slab.slabs * slab.inner;
        Part *const totals = reinterpret_cast<Part *>(workspace), *const parts = totals + lines;
        for_slabs(call, slab, [&](auto zero, auto forward, auto aligned, auto row) {
            typedef decltype(zero) T;
            const SlabArgs<T> args = slab_args<T>(ordered.call, slab);
            const size_t stages = STAGES * slab.stage_bytes(forward);
            Launch how = {slab.slabs * slab.blocks, round_up(slab.threads, WARP), column_bytes(slab) + stages};
            how.overlaps = ordered.copied;
            ::launch(context, how, slab_statistics<T, forward, aligned, row>, args, plan.each, column_bytes(slab),
                     parts);
            /* Neighbouring lines share a sector; few lines have many parts. */
            const int lanes = slab.inner >= 32 ? 8 : WARP;
            Launch merge = {ceil_div(lines * lanes, int64_t(MERGE_THREADS)), MERGE_THREADS};
            merge.overlaps = how.overlaps = true;
            ::launch(context, merge, merge_parts<forward>, parts, totals, lines, Divisor(slab.inner), slab.blocks,
                     lanes);
            how.shared = stages;
            ::launch(context, how, slab_results<T, forward, aligned, row>, args, plan.each, totals);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_large_slabs, LargeSlabs)
