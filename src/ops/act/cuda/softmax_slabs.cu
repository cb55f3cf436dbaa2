/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of slabs that fit into the shared memory of a block, or of a cluster of blocks that exchange
 * their statistics. Every byte is read once and written once.
 *
 * A cluster takes several slabs in turn, and has three of them in work: one is being loaded, the
 * second is being reduced, and the third, whose statistics the blocks exchange meanwhile, is being
 * written.
 */
#include "ops/act/cuda/softmax_slab.cuh"

namespace {

constexpr int STAGES = 3;
constexpr int MOST_BLOCKS = 16, PORTABLE_BLOCKS = 8; /* of a cluster; that every GPU with clusters has */

/* The statistics of rows: at the beginning of a block's shared memory. */
struct RowExchange {
    Part warp[ROW_THREADS / WARP], block[2][MOST_BLOCKS]; /* blocks: of a row, and of the next one */
};
constexpr int ROW_BYTES = 512;
static_assert(sizeof(RowExchange) <= ROW_BYTES, "");

/* Those of interleaved lines follow ColumnMemory: three times those of the block's own parts, because
 * other blocks may still read those before the last; and those of whole lines. */
struct ColumnExchange {
    Part *total;
    int inner;

    DEVICE ColumnExchange(char *memory, int lines) : total(reinterpret_cast<Part *>(memory)), inner(lines) {
    }
    DEVICE Part *own(int i) const { /* of slab i */
        return total + (1 + i % STAGES) * inner;
    }
    static int bytes(int inner) {
        return round_up((STAGES + 1) * inner * (int)sizeof(Part), 128);
    }
};

/* Before the stages. */
int exchange_bytes(const SlabPlan &plan) {
    return plan.inner == 1 ? ROW_BYTES : ColumnMemory::bytes(plan) + ColumnExchange::bytes(plan.inner);
}

template <typename T, bool FORWARD, bool ALIGNED> struct RowMerger {
    typedef SlabPart<T, FORWARD, ALIGNED, 1> Slab;
    const SlabPlan &plan;
    RowExchange *exchange;
    Part all; /* of the row to be written */

    DEVICE RowMerger(const SlabPlan &of, char *memory, int)
        : plan(of), exchange(reinterpret_cast<RowExchange *>(memory)), all(no_part()) {
    }
    DEVICE void reduce(const Slab &slab, const char *stage, int) {
        Statistics<1, FORWARD, 1> mine;
        mine.clear();
        slab.add_to(mine, plan, stage);
        const Part part = merge_warp<FORWARD>({mine.max[0], mine.sum[0][0]});
        if (threadIdx.x % WARP == 0)
            exchange->warp[threadIdx.x / WARP] = part;
    }
    /* The statistics of the blocks' parts of slab i are here. */
    DEVICE void merge(int i) {
        const unsigned lane = threadIdx.x % WARP;
        all = merge_warp<FORWARD>(lane < plan.blocks ? exchange->block[i & 1][lane] : no_part());
    }
    /* After a barrier of the block: sends those of slab i to all blocks of the cluster. */
    DEVICE void send(int i, unsigned rank) {
        const unsigned lane = threadIdx.x % WARP;
        if (threadIdx.x >= WARP)
            return;
        const Part part = merge_warp<FORWARD>(lane < blockDim.x / WARP ? exchange->warp[lane] : no_part());
        if (plan.blocks == 1 && lane == 0)
            exchange->block[i & 1][0] = part;
        if (plan.blocks > 1 && lane < plan.blocks)
            store_to_cluster(&exchange->block[i & 1][rank], make_float2(part.max, part.sum), lane);
        __syncwarp(); /* the barrier of the cluster wants whole warps */
    }
    DEVICE const Part *total() const {
        return &all;
    }
    DEVICE void end() const {
    }
};

template <typename T, bool FORWARD, bool ALIGNED> struct ColumnMerger {
    typedef SlabPart<T, FORWARD, ALIGNED, WIDE<T>> Slab;
    const SlabPlan &plan;
    ColumnMemory memory;
    ColumnExchange exchange;

    DEVICE ColumnMerger(const SlabPlan &of, char *begin, int column_bytes)
        : plan(of), memory(begin), exchange(begin + column_bytes, of.inner) {
    }
    DEVICE void reduce(const Slab &slab, const char *stage, int i) {
        Statistics<WIDE<T>, FORWARD, 1> mine;
        mine.clear();
        slab.add_to(mine, plan, stage);
        merge_columns<T, FORWARD, ALIGNED>(slab, mine, plan, memory, exchange.own(i));
    }
    DEVICE void merge(int i) {
        const Part *const own = exchange.own(i);
        const int blocks = plan.blocks, lane = threadIdx.x % blocks;
        if (blocks == 1) { /* after a barrier of the block */
            for (int column = threadIdx.x; column < plan.inner; column += blockDim.x)
                exchange.total[column] = own[column];
            return;
        }
        for (int base = 0; base < plan.inner; base += blockDim.x / blocks) {
            const int column = base + (int)threadIdx.x / blocks;
            Part part = no_part();
            if (column < plan.inner) {
                const float2 other = load_from_cluster(own + column, lane);
                part = {other.x, other.y};
            }
            part = merge_lanes<FORWARD>(part, blocks);
            if (column < plan.inner && lane == 0)
                exchange.total[column] = part;
        }
    }
    DEVICE void send(int, unsigned) const {
    }
    DEVICE const Part *total() const {
        return exchange.total;
    }
    DEVICE void end() const { /* other blocks have read this block's statistics */
        if (plan.blocks > 1)
            cluster_sync();
    }
};

/* `each`: slabs of a cluster. */
template <typename T, bool FORWARD, bool ALIGNED, class Merger>
DEVICE void softmax_of_slabs(const SlabArgs<T> &a, int each, int column_bytes, char *memory, char *stages) {
    typedef typename Merger::Slab Slab;
    const SlabPlan &plan = a.plan;
    const auto stage = [&](int i) { return stages + i % STAGES * plan.stage_bytes(FORWARD); };
    const unsigned blocks = plan.blocks, cluster = blockIdx.x / blocks, rank = blockIdx.x - cluster * blocks;
    const int64_t first = int64_t(cluster) * each;
    const int count = static_cast<int>(min(int64_t(each), plan.slabs - first));
    Merger merger(plan, memory, column_bytes);
    Slab written, reduced, loaded; /* slabs i, i + 1 and i + 2 below */
    if (blocks > 1)
        cluster_arrive();
    wait_for_previous_kernel();
    loaded.load(a, first, rank, stage(0));
    copy_commit();
    for (int i = -1; i < count; i++) {
        written = reduced;
        reduced = loaded;
        copy_wait<0>();
        __syncthreads(); /* slab i + 1 is here; slab i - 1 has been written */
        if (i + 2 < count)
            loaded.load(a, first + i + 2, rank, stage(i + 2));
        copy_commit();
        if (i + 1 < count)
            merger.reduce(reduced, stage(i + 1), i + 1);
        if (blocks > 1)
            cluster_wait(); /* the statistics of slab i are here; at first: all blocks have started */
        if (i >= 0)
            merger.merge(i);
        __syncthreads();
        if (i + 1 < count) {
            merger.send(i + 1, rank);
            if (blocks > 1)
                cluster_arrive();
        }
        if (i >= 0) {
            const ThreadLines<Slab::COUNT> lines(written, plan.inner, merger.total());
            written.write(plan, stage(i), lines.all, lines.edge);
        }
    }
    merger.end();
}

template <typename T, bool FORWARD, bool ALIGNED, bool ROW>
__global__ void __launch_bounds__(ROW ? ROW_THREADS : MOST_COLUMN_THREADS, ROW ? 2 : 1)
    softmax_slab(const __grid_constant__ SlabArgs<T> a, int each, int column_bytes, int exchange_bytes) {
#if __CUDA_ARCH__ >= 900
    typedef std::conditional_t<ROW, RowMerger<T, FORWARD, ALIGNED>, ColumnMerger<T, FORWARD, ALIGNED>> Merger;
    extern __shared__ uint4 slab_memory[];
    char *const memory = reinterpret_cast<char *>(slab_memory);
    softmax_of_slabs<T, FORWARD, ALIGNED, Merger>(a, each, column_bytes, memory, memory + exchange_bytes);
#endif
}

struct Slabs {
    typedef act_call Call;
    struct Plan {
        SlabPlan slab;
        int each; /* slabs of a cluster */
    };

    /* Packs of all inputs of a row, or of interleaved lines, that a block loads at a time, so that two
     * blocks share a multiprocessor; and if a cluster of the most blocks is too small for that. */
    static constexpr int ROW_PACKS = 2048, COLUMN_PACKS = 1792, MOST_PACKS = 4096;

    /* How a slab is cut depends on its shape alone, never on the device or the number of slabs: the
     * same bits everywhere. False if it does not fit. */
    static bool cut(const SlabViews &views, bool forward, SlabPlan *plan) {
        if (!plan_slabs(views, forward, plan))
            return false;
        const int64_t packs = max(plan->elements * rafter_dtype_bytes(views.view[OUT].dtype) / 16, int64_t(1));
        const int inputs = forward || plan->expanded ? 1 : 2;
        plan->blocks = power_at_least(ceil_div<int64_t>(packs * inputs, plan->inner == 1 ? ROW_PACKS : COLUMN_PACKS), 1,
                                      MOST_BLOCKS);
        const int64_t items = ceil_div<int64_t>(packs, int64_t(plan->blocks) * plan->threads);
        if (items * plan->threads * inputs > MOST_PACKS)
            return false;
        plan->items = static_cast<int>(items);
        plan->input_bytes = round_up((plan->items * plan->threads + 1) * 16, 128);
        return true;
    }
    static int shared_bytes(const Call &call, const SlabPlan &plan) {
        return exchange_bytes(plan) + STAGES * plan.stage_bytes(is_forward(call));
    }

    static const char *why_not(const rafter_cuda_state &device, const Call &call) {
        if (!is_softmax(call))
            return "kind is not softmax";
        const OrderedCall ordered(call, true);
        const SlabViews views(ordered.call);
        if (!views.all_slabs())
            return "length and inner dimensions have gaps";
        SlabPlan plan;
        if (!cut(views, is_forward(call), &plan))
            return "slabs do not fit into the shared memory of a cluster";
        if (shared_bytes(call, plan) > device.shared_bytes)
            return "the GPU has too little shared memory";
        if (plan.blocks > PORTABLE_BLOCKS && device.compute_capability != 90)
            return "slabs need a cluster of 16 blocks, which is used on compute capability 9.0 only";
        return NULL;
    }

    static size_t plan(const rafter_cuda_state &device, const Call &call, Plan *plan) {
        const OrderedCall ordered(call, true);
        cut(SlabViews(ordered.call), is_forward(call), &plan->slab);
        /* Many slabs per cluster, but several times as many clusters as run at a time. */
        const int at_a_time = max(2 * device.multiprocessors / plan->slab.blocks, 1);
        plan->each = static_cast<int>(max(min(plan->slab.slabs / (4 * at_a_time), int64_t(16)), int64_t(1)));
        return 0;
    }

    static rafter_status launch(rafter_context *context, const Call &call, const Plan &plan, char *) {
        const OrderedCall ordered(call, true);
        ordered.copy(context);
        const SlabPlan &slab = plan.slab;
        for_slabs(call, slab, [&](auto zero, auto forward, auto aligned, auto row) {
            typedef decltype(zero) T;
            Launch how = {ceil_div(slab.slabs, int64_t(plan.each)) * slab.blocks, round_up(slab.threads, WARP)};
            const int exchange = exchange_bytes(slab);
            how.shared = exchange + min(STAGES, plan.each) * slab.stage_bytes(forward);
            how.cluster = slab.blocks;
            how.overlaps = ordered.copied;
            const auto kernel = softmax_slab<T, forward, aligned, row>;
            if (slab.blocks > PORTABLE_BLOCKS)
                cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
            ::launch(context, how, kernel, slab_args<T>(ordered.call, slab), plan.each,
                     row ? 0 : ColumnMemory::bytes(slab), exchange);
        });
        return RAFTER_OK;
    }
};

} // namespace

RAFTER_CUDA_VARIANT(act, softmax_slabs, Slabs)
