/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of large slabs: interleaved lines ([outer, length, inner]) that do not fit into the shared
 * memory of a cluster. A slab is cut into parts, one per block. A block takes the pieces
 * (softmax_pieces.cuh) of its part in turn, and loads the next one while it works on the current
 * one. The inputs are read twice, in one of two ways.
 *
 * Three kernels: the statistics of every part of a slab, the statistics of whole slabs, and the
 * results. If the parts of a slab have few statistics, every block of the last kernel merges them
 * for itself, and there is no second kernel. The last kernel begins with what the first one has
 * read last, which may still be in L2.
 *
 * Two phases in one grid, if the tensor is larger than L2, slabs are not, and their parts have few
 * statistics. Blocks of both phases alternate. Those of the results are `delay` blocks behind those
 * of the statistics: far enough that the statistics of their slab are ready, near enough that the
 * slab is still in L2. A block waits only for blocks with lower numbers, which have started before
 * it.
 *
 * A block reads all elements that it writes before it writes, and no other block needs them later:
 * the output may be the input.
 */
#include "ops/act/cuda/softmax_pieces.cuh"

namespace {

/* ---- kernels ---------------------------------------------------------------------------------- */

constexpr int STAGES = 2, PIECE_PACKS = 1024; /* pieces in shared memory; packs of all inputs of a piece */
/* The least bytes of a slab's inputs: of one input, of two, of small tensors. Smaller slabs are faster
 * in clusters (softmax_slab_in_cluster): docs/perf/act.md. */
constexpr int64_t LEAST_BYTES = 850 << 10, LEAST_OF_TWO = 3 << 19, LEAST_OF_SMALL = 1 << 20;
constexpr int MOST_PIECES = 16; /* of a part */
/* Two phases: pieces of a part; the least bytes of all inputs; the most bytes of a slab's inputs; and
 * the bytes that are read between the last statistics of a slab and its first results. */
constexpr int PHASE_PIECES = 3;
constexpr int64_t PHASES_BYTES = 32 << 20, MOST_PHASE_BYTES = 8 << 20, BEHIND_BYTES = 8 << 20;

/* The pieces [begin, end) of a block's part, numbered from the first one of the slab. `each`: pieces
 * of a part. SlabPlan::blocks is the number of parts of a slab. */
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

/* Where piece i is in shared memory. */
template <bool FORWARD> DEVICE char *stage_of(const SlabPlan &plan, char *stages, int i) {
    return stages + i % STAGES * plan.stage_bytes(FORWARD);
}

/* Computes the statistics of a block's part, to `own`: [line]. All threads call this. */
template <Hint HINT, typename T, bool FORWARD, bool ALIGNED>
DEVICE void add_pieces(const SlabArgs<T> &a, const Pieces &pieces, char *memory, int column_bytes, Part *own) {
    const SlabPlan &plan = a.plan;
    const auto stage = [&](int i) { return stage_of<FORWARD>(plan, memory + column_bytes, i); };
    SlabPiece<T, FORWARD, ALIGNED> piece, next, first;
    Statistics<WIDE<T>, FORWARD, 1> mine;
    mine.clear();
    next.template load<HINT>(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    first = next; /* it has the edges */
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been read */
        if (i + 1 < pieces.end)
            next.template load<HINT>(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.add_to(mine, plan, stage(i));
    }
    merge_columns<T, FORWARD, ALIGNED>(first, mine, plan, ColumnMemory(memory), own);
}

/* Writes the results of a block's part. total() waits for the statistics of the slab and returns them:
 * [line]. All threads call this. */
template <Hint HINT, typename T, bool FORWARD, bool ALIGNED, class Total>
DEVICE void write_pieces(const SlabArgs<T> &a, const Pieces &pieces, char *stages, Total total) {
    const SlabPlan &plan = a.plan;
    const auto stage = [&](int i) { return stage_of<FORWARD>(plan, stages, i); };
    SlabPiece<T, FORWARD, ALIGNED> piece, next;
    next.template load<HINT>(a, pieces.slab, pieces.begin, stage(pieces.begin));
    copy_commit();
    const ThreadLines<WIDE<T>> lines(next, plan.inner, total());
    for (int i = pieces.begin; i < pieces.end; i++) {
        piece = next;
        copy_wait<0>();
        __syncthreads(); /* piece i is here; piece i - 1 has been written */
        if (i + 1 < pieces.end)
            next.template load<HINT>(a, pieces.slab, i + 1, stage(i + 1));
        copy_commit();
        piece.template write<HINT>(plan, stage(i), lines.all, lines.edge);
    }
}

/* Merges the statistics of a slab's parts, which are in global memory, to `totals`: [line].
 * SAME_KERNEL: this kernel has written them, so they are read from L2. Else L1 may serve them: all
 * blocks of a multiprocessor read the same ones. All threads call this. */
template <bool FORWARD, bool SAME_KERNEL>
DEVICE void merge_slab(const SlabPlan &plan, const Part *parts, Part *totals) {
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % plan.lanes;
    for (int base = 0; base < plan.inner; base += threads / plan.lanes) {
        const int column = base + thread / plan.lanes;
        Part all = merge_some<FORWARD, SAME_KERNEL>(parts + column, lane, plan.lanes,
                                                    column < plan.inner ? plan.blocks : 0, plan.inner);
        all = merge_lanes<FORWARD>(all, plan.lanes);
        if (column < plan.inner && lane == 0)
            totals[column] = all;
    }
    __syncthreads();
}

/* First kernel: the statistics of every part. parts: [slab][part][line]. `each`: pieces of a part. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    slab_statistics(const __grid_constant__ SlabArgs<T> a, int each, int column_bytes, Part *parts) {
    DYNAMIC_SHARED(uint4, statistics_memory);
    const Pieces pieces(a.plan, each, blockIdx.x);
    wait_for_previous_kernel();
    start_next_kernel();
    add_pieces<NO_HINT, T, FORWARD, ALIGNED>(a, pieces, reinterpret_cast<char *>(statistics_memory), column_bytes,
                                             parts + (int64_t)blockIdx.x * a.plan.inner);
}

/* Third kernel: the results. total_bytes: shared memory for the statistics of whole lines; 0: the
 * second kernel has written them to `totals`. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(MOST_THREADS, 2)
    slab_results(const __grid_constant__ SlabArgs<T> a, int each, int total_bytes, const Part *parts,
                 const Part *totals) {
    DYNAMIC_SHARED(uint4, results_memory);
    const SlabPlan &plan = a.plan;
    const Pieces pieces(plan, each, gridDim.x - 1 - blockIdx.x); /* the reverse order of the first kernel */
    write_pieces<NO_HINT, T, FORWARD, ALIGNED>(
        a, pieces, reinterpret_cast<char *>(results_memory) + total_bytes, [&]() -> const Part * {
            wait_for_previous_kernel();
            if (total_bytes == 0)
                return totals + pieces.slab * plan.inner;
            Part *const own = reinterpret_cast<Part *>(results_memory);
            merge_slab<FORWARD, false>(plan, parts + pieces.slab * plan.blocks * plan.inner, own);
            return own;
        });
}

/* Both phases in one grid: `delay` blocks of the first, then blocks of both alternately, then the
 * rest of the second. arrived: [slab], the number of parts whose statistics have been written. */
template <typename T, bool FORWARD, bool ALIGNED>
__global__ void __launch_bounds__(SLAB_THREADS, 4)
    slab_phases(const __grid_constant__ SlabArgs<T> a, int each, int column_bytes, unsigned delay, Part *parts,
                unsigned *arrived) {
    wait_for_inputs();
    DYNAMIC_SHARED(uint4, phases_memory);
    char *const memory = reinterpret_cast<char *>(phases_memory);
    const SlabPlan &plan = a.plan;
    const unsigned all = gridDim.x / 2, alternating = 2 * (all - delay);
    const int behind = static_cast<int>(blockIdx.x - delay);
    const bool ending = behind >= static_cast<int>(alternating), second = behind >= 0 && (ending || behind % 2 == 1);
    const unsigned index = behind < 0 ? blockIdx.x : ending ? blockIdx.x - all : behind / 2 + (second ? 0 : delay);
    const Pieces pieces(plan, each, index);
    if (!second) {
        add_pieces<KEEP, T, FORWARD, ALIGNED>(a, pieces, memory, column_bytes, parts + (int64_t)index * plan.inner);
        __syncthreads();
        if (threadIdx.x == 0)
            add_release(arrived + pieces.slab, 1);
        return;
    }
    write_pieces<DROP, T, FORWARD, ALIGNED>(a, pieces, memory + column_bytes, [&]() -> const Part * {
        if (threadIdx.x == 0)
            while (load_acquire(arrived + pieces.slab) != (unsigned)plan.blocks)
                ;
        __syncthreads();
        merge_slab<FORWARD, true>(plan, parts + pieces.slab * plan.blocks * plan.inner,
                                  reinterpret_cast<Part *>(memory));
        return reinterpret_cast<const Part *>(memory);
    });
}

/* ---- host side ------------------------------------------------------------------------------- */

int64_t greatest_common_divisor(int64_t a, int64_t b) {
    while (b > 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Fills the plan, except for blocks, items and input_bytes. False if no block has so many threads that
 * their packs are a multiple of `inner` elements. */
bool plan_slabs(const SlabViews &views, bool forward, SlabPlan *plan) {
    const int bytes = static_cast<int>(rafter_dtype_bytes(views.view[OUT].dtype));
    const int64_t inner = views.inner(), unit = inner / greatest_common_divisor(inner, 16 / bytes);
    if (unit > MOST_THREADS)
        return false;
    *plan = {};
    plan->outer = walk_over(views.pointer, 0, views.dim());
    plan->slabs = views.slabs();
    plan->elements = views.elements();
    plan->inner = static_cast<int>(inner);
    plan->element_bytes = bytes;
    plan->expanded = !forward && !views.is_slab(DY);
    plan->aligned = views.slabs_are_packs();
    plan->threads = static_cast<int>((unit > SLAB_THREADS ? MOST_THREADS : SLAB_THREADS) / unit * unit);
    plan->lanes = 1;
    while (plan->lanes < WARP && 2 * plan->lanes * inner <= plan->threads)
        plan->lanes *= 2;
    return true;
}

template <typename T> SlabArgs<T> slab_args(const act_call &call, const SlabPlan &plan) {
    const auto end = [](const rafter_view &view) {
        return view.data ? reinterpret_cast<const T *>(view.data + rafter_span_bytes(&view)) : NULL;
    };
    return {reinterpret_cast<const T *>(call.in.data),
            reinterpret_cast<const T *>(call.dy.data),
            reinterpret_cast<T *>(call.out.data),
            end(call.in),
            end(call.dy),
            plan};
}

/* Calls f(zero, forward, aligned), where zero has the type of the elements and the others are
 * constants. */
template <class F> void for_slabs(const act_call &call, const SlabPlan &plan, F f) {
    for_dtype(call.out.dtype, [&](auto zero) {
        typedef std::true_type Yes;
        typedef std::false_type No;
        if (is_forward(call))
            plan.aligned ? f(zero, Yes(), Yes()) : f(zero, Yes(), No());
        else
            plan.aligned ? f(zero, No(), Yes()) : f(zero, No(), No());
    });
}

struct LargeSlabs {
    typedef act_call Call;
    struct Plan {
        SlabPlan slab;
        int each;       /* pieces of a part */
        bool fused;     /* every block of the last kernel merges the parts of its slab: no second kernel */
        unsigned delay; /* blocks from a part's statistics to its results; 0: three kernels, no phases */
    };
    /* Blocks that run at the same time on an H200. Parts have enough pieces that there are no more blocks. */
    static int blocks_at_once(const SlabPlan &slab) {
        return 132 * (slab.threads > SLAB_THREADS ? 2 : 4);
    }

    /* Cuts slabs of `pieces` pieces into parts of at most `most` pieces. */
    static void cut_into(int64_t pieces, int64_t most, Plan *plan) {
        SlabPlan &slab = plan->slab;
        const int64_t blocks = ceil_div(pieces, most), each = ceil_div(pieces, blocks);
        slab.blocks = static_cast<int>(min(ceil_div(pieces, each), int64_t(INT32_MAX)));
        plan->each = static_cast<int>(each);
        plan->fused =
            slab.blocks * (int64_t)sizeof(Part) * slab.inner <= max(int64_t(16) << 10, each * PIECE_PACKS * 16 / 8);
    }
    /* Fills the plan. False if the kernels cannot take such slabs. */
    static bool cut(const SlabViews &views, bool forward, Plan *plan) {
        SlabPlan &slab = plan->slab;
        if (!plan_slabs(views, forward, &slab))
            return false;
        const int inputs = forward || slab.expanded ? 1 : 2;
        plan->delay = 0;
        slab.items = max(PIECE_PACKS / (slab.threads * inputs), slab.threads > SLAB_THREADS ? 4 / inputs : 1);
        slab.input_bytes = round_up((slab.items * slab.threads + 1) * 16, 128);
        const int64_t pieces = ceil_div(slab.elements, int64_t(slab.threads) * slab.items * slab.width());
        const int64_t slab_bytes = slab.elements * slab.element_bytes * inputs;
        /* Two inputs of 16 bits are no faster in phases: docs/perf/act.md. */
        if (slab_bytes * slab.slabs >= PHASES_BYTES && slab_bytes <= MOST_PHASE_BYTES && slab.threads <= SLAB_THREADS &&
            (inputs == 1 || slab.element_bytes == 4)) {
            cut_into(pieces, PHASE_PIECES, plan);
            const int64_t all = slab.slabs * slab.blocks,
                          delay = slab.blocks + ceil_div(BEHIND_BYTES, slab_bytes / slab.blocks);
            if (plan->fused && all < INT32_MAX / 4) {
                plan->delay = static_cast<unsigned>(min(delay, all));
                return true;
            }
        }
        const int64_t most = ceil_div(pieces * slab.slabs, int64_t(blocks_at_once(slab)));
        cut_into(pieces, min(most, int64_t(MOST_PIECES)), plan);
        return pieces < INT32_MAX;
    }
    static int column_bytes(const SlabPlan &slab) {
        return ColumnMemory::bytes(slab);
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        Plan plan;
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        const int64_t bytes = rafter_dtype_bytes(call.out.dtype), across = views.inner() * bytes;
        if (views.inner() == 1)
            return "lines are not interleaved";
        const bool narrow = is_narrow(call, views);
        if (across >= 64 && views.column_width() > 2 && !narrow)
            return "columns are aligned packs";
        if (!cut(views, is_forward(call), &plan))
            return "a block has too few threads for the interleaved lines";
        const int inputs = is_forward(call) || plan.slab.expanded ? 1 : 2;
        const int64_t least = is_small(call) || narrow      ? LEAST_OF_SMALL
                              : inputs == 1 || across >= 64 ? LEAST_BYTES
                                                            : LEAST_OF_TWO;
        if (views.elements() * bytes * inputs < least)
            return "slabs fit into the shared memory of a cluster";
        if (views.slabs() * views.inner() > INT32_MAX / 64)
            return "it counts lines in 25 bits";
        if (column_bytes(plan.slab) + STAGES * plan.slab.stage_bytes(is_forward(call)) > device.shared_bytes)
            return "the GPU has too little shared memory";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        cut(SlabViews(ordered.call), is_forward(call), plan);
        return (size_t)plan->slab.slabs *
               ((plan->slab.blocks + 1) * plan->slab.inner * sizeof(Part) + sizeof(unsigned));
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *workspace) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        const SlabPlan &slab = plan.slab;
        const int64_t lines = slab.slabs * slab.inner;
        Part *const totals = reinterpret_cast<Part *>(workspace), *const parts = totals + lines;
        for_slabs(call, slab, [&](auto zero, auto forward, auto aligned) {
            typedef decltype(zero) T;
            const SlabArgs<T> args = slab_args<T>(ordered.call, slab);
            const size_t stages = STAGES * slab.stage_bytes(forward);
            Launch how = {slab.slabs * slab.blocks, round_up(slab.threads, WARP), column_bytes(slab) + stages};
            if (plan.delay > 0) {
                unsigned *const arrived = reinterpret_cast<unsigned *>(parts + lines * slab.blocks);
                fill_bytes(context, arrived, 0, slab.slabs * sizeof(unsigned));
                how.blocks *= 2;
                return ::launch(context, how, slab_phases<T, forward, aligned>, args, plan.each, column_bytes(slab),
                                plan.delay, parts, arrived);
            }
            ::launch(context, how, slab_statistics<T, forward, aligned>, args, plan.each, column_bytes(slab), parts);
            if (!plan.fused)
                launch_merge<forward>(context, parts, totals, slab.slabs, slab.inner, slab.blocks);
            const int total_bytes = plan.fused ? round_up(slab.inner * (int)sizeof(Part), 128) : 0;
            how.shared = total_bytes + stages;
            ::launch(context, how, slab_results<T, forward, aligned>, args, plan.each, total_bytes, parts, totals);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_slab_two_pass, LargeSlabs)
