/*
 * cross_entropy on CUDA, one pass over the logits:
 *
 *     rows_by<OneWarp>     short rows: a warp to a row
 *     rows_by<WholeBlock>  statistics alone: a block to a row
 *     gradients            from a given lse: short blocks, 8 KB of a row each, after `coefficients` has worked out what
 *                          is the same all along a row
 *     held                 statistics and gradient: a row stays in the shared memory and registers of a block, or of a
 *                          cluster of blocks, between the two
 *     rows_by<Anyhow>      rows whose elements are not neighbours, or not alike in logits and dlogits
 *
 * Rows that fit on no chip are read twice by rows_by<WholeBlock>. What must be known of all labels before the first
 * gradient is written, `prepare` finds. Each block adds up the losses of its rows; what the blocks come to, the last
 * one to arrive adds up, or where blocks are short and must not wait for that, a kernel behind them.
 */
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "ops/columns.cuh"
#include "ops/cross_entropy/call.h"

#include <cuda_runtime.h>

namespace {

constexpr int MOST_THREADS = 512; /* of a block that takes a row */
constexpr int WARP_THREADS = 256; /* of a block whose warps take rows */
constexpr int MOST_RANKS = 8;     /* blocks of a cluster */

/* Packs that a thread loads before it uses the first. */
template <int OPTIONS> constexpr int AHEAD = OPTIONS == FULL ? IN_FLIGHT / 2 : IN_FLIGHT;

/* Threads of rows_by on an SM: what the registers leave room for. */
constexpr int threads_per_sm(int options, bool gradient) {
    return options != FULL && !gradient ? 1536 : 1024;
}

struct Call {
    Loss loss;
    Rows z, dz;              /* logits and their gradient */
    int64_t z_step, dz_step; /* between columns; 1 but for Anyhow */
    bool gradient;           /* dz is wanted */
    int64_t part;            /* held: packs of a row that a block holds */
    Totals *of_block;
    unsigned *counter;
    bool adds_up; /* the last block to arrive adds up the blocks' totals; else another kernel does */
};

/* ---- statistics of columns
 * ------------------------------------------------------------------------------------------------ */

/* Packs of columns [column, column + N), [column + step, ...), ...; only the first `there` of them are, the others are
 * full of -inf. */
template <int OPTIONS, typename T, int N, int COUNT>
DEVICE void add(Gathered<OPTIONS> &g, const Pack<T, N> (&packs)[COUNT], int there, int64_t column, int64_t step,
                const Call &c) {
    const float scale = c.loss.scale;
    if constexpr (OPTIONS != FULL) {
        add_packs(g.s, packs, scale);
        if constexpr (OPTIONS == SMOOTH) {
            float sum[2] = {};
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                float x[N];
                unpack(packs[k], x);
                if (k < there)
#pragma unroll
                    for (int j = 0; j < N; j++)
                        sum[j % 2] += x[j];
            }
            g.weighted += sum[0] + sum[1];
        }
    } else {
        float v[COUNT][N];
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            unpack(packs[k], v[k]);
        add_full<T>(
            g, v, [&](int k, int j) { return k < there ? column + k * step + j : -1; }, c.loss);
    }
}

template <int OPTIONS, typename T> DEVICE void add_one(Gathered<OPTIONS> &g, T z, int64_t column, const Call &c) {
    const Pack<T, 1> pack[1] = {{{z}}};
    add(g, pack, 1, column, 1, c);
}

/* One thread's share of a row of neighbours. SOON: it will be read again. */
template <int OPTIONS, bool SOON, typename T>
DEVICE Gathered<OPTIONS> gather(const Stretch<const T> &row, int thread, int threads, const Call &c) {
    constexpr int N = WIDE<T>;
    Gathered<OPTIONS> g = none<OPTIONS>();
    for (int e = thread; e < row.edges; e += threads)
        add_one(g, row.body[row.edge(e)], row.head + row.edge(e), c);

    Pack<T, N> packs[AHEAD<OPTIONS>];
    const int64_t stride = int64_t(threads) * N;
    const T *p = row.body + thread * N, *const end = row.body + row.packs * N;
    for (; p + (AHEAD<OPTIONS> - 1) * stride < end; p += AHEAD<OPTIONS> * stride) {
#pragma unroll
        for (int k = 0; k < AHEAD<OPTIONS>; k++)
            packs[k] = SOON ? load_l2<T, N>(p + k * stride) : load_once<T, N>(p + k * stride);
        add(g, packs, AHEAD<OPTIONS>, row.head + (p - row.body), stride, c);
    }
    if (p < end) {
        int there = 0;
#pragma unroll
        for (int k = 0; k < AHEAD<OPTIONS>; k++) {
            packs[k] = load_once_if<T, N>(p + k * stride < end, p + k * stride, -INFINITY);
            there += p + k * stride < end;
        }
        add(g, packs, there, row.head + (p - row.body), stride, c);
    }
    return g;
}

/* ---- gradient of columns
 * ---------------------------------------------------------------------------------------------------- */

/* One thread's share of a row whose elements are all the same. */
template <typename T> DEVICE void fill(T *dz, const Stretch<const T> &row, float value, int thread, int threads) {
    constexpr int N = WIDE<T>;
    float all[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        all[j] = value;
    for (int64_t i = thread; i < row.packs; i += threads)
        store_streaming<T, N>(dz + row.head + i * N, packed<T>(all));
    for (int e = thread; e < row.edges; e += threads)
        dz[row.head + row.edge(e)] = from_float<T>(value);
}

/* Which thread wrote the label's column, so that its second value comes after the first. */
template <typename T> DEVICE int writer_of(const Stretch<const T> &row, int64_t label, int threads) {
    const int64_t at = label - row.head, packs = row.packs * WIDE<T>;
    if (at >= 0 && at < packs)
        return static_cast<int>(at / WIDE<T> % threads);
    return static_cast<int>((at < 0 ? label : label - packs) % threads);
}

/* One thread's share of a row's gradient. dz may be the row. */
template <int OPTIONS, typename T>
DEVICE void write_gradient(T *dz, const Stretch<const T> &row, const RowGradient &gradient, int64_t label, int thread,
                           int threads, const Call &c) {
    constexpr int N = WIDE<T>;
    if (gradient.constant) {
        fill(dz, row, gradient.p, thread, threads);
        return;
    }
    const ColumnGradient<OPTIONS, T> column(gradient, c.loss);
    for (int64_t i = thread; i < row.packs; i += AHEAD<OPTIONS> * threads) {
        Pack<T, N> packs[AHEAD<OPTIONS>];
#pragma unroll
        for (int k = 0; k < AHEAD<OPTIONS>; k++)
            if (i + k * threads < row.packs)
                packs[k] = load_streaming<T, N>(row.body + (i + k * threads) * N);
#pragma unroll
        for (int k = 0; k < AHEAD<OPTIONS>; k++)
            if (i + k * threads < row.packs) {
                const int64_t at = row.head + (i + k * threads) * N;
                store_streaming<T, N>(dz + at, column.of(packs[k], at, c.loss));
            }
    }
    for (int e = thread; e < row.edges; e += threads) {
        const int64_t at = row.head + row.edge(e);
        dz[at] = from_float<T>(column.of(to_float(row.body[row.edge(e)]), at, c.loss));
    }
    if (thread == writer_of(row, label, threads))
        dz[label] = from_float<T>(gradient.at_label);
}

/* ---- totals over rows
 * ------------------------------------------------------------------------------------------------------- */

/* Known before any row: for gradients of a mean. To be called by all threads. */
DEVICE Totals totals_before(const Loss &loss) {
    if (!loss.needs_totals())
        return {};
    return loss.prepared ? loss.prepared->totals : block_sum(count(loss, threadIdx.x, blockDim.x));
}

/* What a block carries from row to row; in shared memory, because few threads use it. */
struct Running {
    double common;        /* see common_upstream */
    Totals of_warp[WARP]; /* of the rows that a warp's first lane has finished; only that lane's */

    DEVICE Totals *mine() {
        return &of_warp[threadIdx.x / WARP];
    }
    DEVICE void reset() {
        if (threadIdx.x % WARP == 0)
            *mine() = {};
    }
    /* To be called by all threads. */
    DEVICE void find_common(const Call &c) {
        const Totals totals = c.gradient ? totals_before(c.loss) : Totals{};
        if (threadIdx.x == 0)
            common = c.gradient ? common_upstream(c.loss, totals) : 0.0;
        __syncthreads();
    }
};

/* The loss, from the totals of all blocks. To be called by all threads of one block. */
DEVICE void add_up(const Call &c, unsigned blocks) {
    Totals all = {};
    for (unsigned i = threadIdx.x; i < blocks; i += blockDim.x) {
        all.loss += __ldcg(&c.of_block[i].loss);
        all.weight += __ldcg(&c.of_block[i].weight);
        all.counted += __ldcg(&c.of_block[i].counted);
    }
    all = block_sum(all);
    if (threadIdx.x == 0)
        write_loss(c.loss, all);
}

/* The end of a block, one of `blocks`. */
DEVICE void finish(const Call &c, const Running &running, unsigned block, unsigned blocks) {
    if (!c.loss.loss.data || c.loss.reduction == RAFTER_NONE)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        Totals of_block = {};
        for (int warp = 0; warp < blockDim.x / WARP; warp++) {
            of_block.loss += running.of_warp[warp].loss;
            of_block.weight += running.of_warp[warp].weight;
            of_block.counted += running.of_warp[warp].counted;
        }
        c.of_block[block] = of_block;
    }
    if (c.adds_up && block_arrives_last(c.counter, blocks))
        add_up(c, blocks);
}

constexpr int ADDING_THREADS = 512;

__global__ __launch_bounds__(ADDING_THREADS) void add_up_blocks(const __grid_constant__ Call c, unsigned blocks) {
    wait_for_previous_kernel();
    add_up(c, blocks);
}

/* What a few threads work out for a row, in double. Calls, so that the registers it takes are not everybody's. */
__device__ __noinline__ RowGradient work_out_gradient(const Loss &loss, double common, int64_t row, int64_t label,
                                                      float z, const RowFigures &figures) {
    return gradient_from_figures(loss, common, row, label, z, figures);
}
__device__ __noinline__ void work_out_results(const Loss &loss, int64_t row, int64_t label, const RowFigures &figures,
                                              Totals *totals) {
    write_row(loss, row, label, results_of(loss, row, label, figures), totals);
}

/* ---- rows from memory
 * -------------------------------------------------------------------------------------------------------- */

/* Who takes a row. `decides`: this thread has the merged statistics and works out what follows from them. */
struct OneWarp {
    static constexpr int THREADS = WARP_THREADS;
    static constexpr bool ANYHOW = false;
    DEVICE int thread() const {
        return threadIdx.x % WARP;
    }
    DEVICE int threads() const {
        return WARP;
    }
    DEVICE int64_t first_row() const {
        return (blockIdx.x * int64_t(WARP_THREADS) + threadIdx.x) / WARP;
    }
    DEVICE int64_t row_step() const {
        return gridDim.x * int64_t(WARP_THREADS / WARP);
    }
    DEVICE bool decides() const {
        return true;
    }
    template <int OPTIONS> DEVICE Gathered<OPTIONS> all(Gathered<OPTIONS> g, float scale) {
        return merge_warp(g, scale);
    }
    DEVICE RowGradient share(const RowGradient &gradient) {
        __syncwarp(); /* nobody writes dz over a logit that another lane has yet to read */
        return gradient;
    }
};

struct WholeBlock {
    static constexpr int THREADS = MOST_THREADS;
    static constexpr bool ANYHOW = false;
    bool odd = false, shared_odd = false; /* two buffers in turn: one may still be read while the next is written */

    DEVICE int thread() const {
        return threadIdx.x;
    }
    DEVICE int threads() const {
        return blockDim.x;
    }
    DEVICE int64_t first_row() const {
        return blockIdx.x;
    }
    DEVICE int64_t row_step() const {
        return gridDim.x;
    }
    DEVICE bool decides() const {
        return threadIdx.x < WARP;
    }

    template <int OPTIONS> DEVICE Gathered<OPTIONS> all(Gathered<OPTIONS> g, float scale) {
        __shared__ Gathered<OPTIONS> of_warp[2][WARP];
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        g = merge_warp(g, scale);
        odd = !odd;
        if (lane == 0)
            of_warp[odd][warp] = g;
        __syncthreads();
        if (warp == 0)
            g = merge_warp(lane < blockDim.x / WARP ? of_warp[odd][lane] : none<OPTIONS>(), scale);
        return g;
    }
    DEVICE RowGradient share(const RowGradient &gradient) {
        __shared__ RowGradient shared[2];
        shared_odd = !shared_odd;
        if (threadIdx.x == 0)
            shared[shared_odd] = gradient;
        __syncthreads();
        return shared[shared_odd];
    }
};

/* Any stride, one element at a time. */
struct Anyhow : WholeBlock {
    static constexpr bool ANYHOW = true;
};

template <int OPTIONS, typename T>
DEVICE Gathered<OPTIONS> gather_anyhow(const T *z, int thread, int threads, const Call &c) {
    Gathered<OPTIONS> g = none<OPTIONS>();
    for (int64_t v = thread; v < c.loss.classes; v += threads)
        add_one(g, z[v * c.z_step], v, c);
    return g;
}

template <int OPTIONS, typename T>
DEVICE void write_gradient_anyhow(T *dz, const T *z, const RowGradient &gradient, int64_t label, int thread,
                                  int threads, const Call &c) {
    const ColumnGradient<OPTIONS, T> column(gradient, c.loss);
    for (int64_t v = thread; v < c.loss.classes; v += threads) {
        const float d = gradient.constant ? gradient.p
                        : v == label      ? gradient.at_label
                                          : column.of(to_float(z[v * c.z_step]), v, c.loss);
        dz[v * c.dz_step] = from_float<T>(d);
    }
}

template <typename T, int OPTIONS, bool GRADIENT, class By>
__global__ __launch_bounds__(By::THREADS, threads_per_sm(OPTIONS, GRADIENT) /
                                              By::THREADS) void rows_by(const __grid_constant__ Call c) {
    __shared__ Running running;
    const Loss &loss = c.loss;
    By by;
    const int thread = by.thread(), threads = by.threads();
    running.reset();
    wait_for_previous_kernel();
    if (GRADIENT)
        running.find_common(c);

    int64_t row = by.first_row(), ahead = row < loss.rows ? loss.load_label(row) : 0;
    while (row < loss.rows) {
        const int64_t label = loss.class_of(ahead), next = row + by.row_step();
        if (next < loss.rows)
            ahead = loss.load_label(next);
        const T *z = c.z.at<const T>(row);
        const Stretch<const T> stretch(z, By::ANYHOW ? 0 : loss.classes);
        RowGradient gradient = gradient_unread(label);
        if (label >= 0) {
            const float given = !loss.forward && loss.lse.data ? loss.lse.get(row) : INFINITY;
            const float z_label = by.decides() ? to_float(z[label * c.z_step]) : 0.0f;
            if (GRADIENT && lse_serves<T>(given)) {
                if (by.decides())
                    gradient = gradient_from_lse(loss, running.common, row, label, z_label, given);
            } else {
                Gathered<OPTIONS> g;
                if constexpr (By::ANYHOW)
                    g = by.all(gather_anyhow<OPTIONS>(z, thread, threads, c), loss.scale);
                else
                    g = by.all(gather<OPTIONS, GRADIENT>(stretch, thread, threads, c), loss.scale);
                if (by.decides()) {
                    const RowFigures figures = figures_of(g, z_label, c.loss);
                    if (GRADIENT && c.gradient)
                        gradient = work_out_gradient(loss, running.common, row, label, z_label, figures);
                    if (loss.forward && thread == 0)
                        work_out_results(loss, row, label, figures, running.mine());
                }
            }
            if (GRADIENT && c.gradient)
                gradient = by.share(gradient);
        } else if (thread == 0) {
            write_unread(loss, row, label, running.mine());
        }
        if (GRADIENT && c.gradient) {
            T *dz = c.dz.at<T>(row);
            if constexpr (By::ANYHOW)
                write_gradient_anyhow<OPTIONS>(dz, z, gradient, label, thread, threads, c);
            else
                write_gradient<OPTIONS>(dz, stretch, gradient, label, thread, threads, c);
        }
        row = next;
    }
    if (loss.forward)
        finish(c, running, blockIdx.x, gridDim.x);
}

/* ---- rows held on chip
 * ------------------------------------------------------------------------------------------------------ */

/* Where the warps of a block, and the blocks of a cluster, leave their statistics of a row. */
template <int OPTIONS> struct Mailbox {
    Gathered<OPTIONS> of_warp[WARP], of_block[MOST_RANKS];
    uint64_t complete; /* an mbarrier: all blocks' statistics are here */
};

/* The blocks that share a row. */
template <int OPTIONS> struct Cluster {
    Mailbox<OPTIONS> &mine;
    int ranks = 1, rank = 0;

    /* To be made by all threads, once. */
    DEVICE explicit Cluster(Mailbox<OPTIONS> &mailbox) : mine(mailbox) {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ranks));
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (ranks == 1)
            return;
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&mine.complete)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&mine.complete)),
                         "r"(static_cast<unsigned>(sizeof(Gathered<OPTIONS>) * ranks))
                         : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    /* Statistics of the whole row, for the lanes of warp 0. To be called by all threads, once. */
    DEVICE Gathered<OPTIONS> all(Gathered<OPTIONS> g, float scale) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        g = merge_warp(g, scale);
        if (lane == 0)
            mine.of_warp[warp] = g;
        __syncthreads();
        if (warp > 0)
            return g;
        g = merge_warp(lane < blockDim.x / WARP ? mine.of_warp[lane] : none<OPTIONS>(), scale);
#if __CUDA_ARCH__ >= 900
        if (ranks > 1) {
            if (lane < ranks)
                send(g, lane);
            for (unsigned done = 0; !done;)
                asm volatile("{\n\t.reg .pred p;\n\t"
                             "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
                             "selp.u32 %0, 1, 0, p;\n\t}"
                             : "=r"(done)
                             : "r"(address(&mine.complete))
                             : "memory");
            g = merge_warp(lane < ranks ? mine.of_block[lane] : none<OPTIONS>(), scale);
        }
#endif
        return g;
    }

#if __CUDA_ARCH__ >= 900
    /* Writes into the mailbox of another block, and rings there. */
    DEVICE void send(const Gathered<OPTIONS> &g, int receiver) {
        unsigned to, bell;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(&mine.of_block[rank])), "r"(receiver));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(address(&mine.complete)), "r"(receiver));
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof g / sizeof(uint4)); i++) {
            const uint4 w = reinterpret_cast<const uint4 *>(&g)[i];
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                    to + i * static_cast<unsigned>(sizeof w)),
                "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(bell)
                : "memory");
        }
    }
#endif

    static DEVICE unsigned address(const void *shared) {
        return static_cast<unsigned>(__cvta_generic_to_shared(shared));
    }
};

/* Columns [first, first + n) of a row: what one block of a cluster holds. All parts begin where packs do, but for the
 * first; the last ends where the row does. */
template <typename T> struct Part {
    int64_t first, n;
    Stretch<const T> stretch;

    DEVICE Part(const T *z, const Call &c, int rank, int ranks) {
        const int64_t head = Stretch<const T>(z, c.loss.classes).head, part = c.part * WIDE<T>;
        const int64_t end = rank == ranks - 1 ? c.loss.classes : head + (rank + 1) * part;
        first = rank == 0 ? 0 : head + rank * part;
        n = end - first;
        stretch = Stretch<const T>(z + first, n);
    }
};

/* A block, or a cluster of them, to a row. Pack i of a part is thread i % THREADS's alone: its first REGISTERS packs
 * stay in registers, the others in shared memory, where it waits for nobody's copies but its own. Blocks that have the
 * registers too are alone on their multiprocessor; what they move is marked as streaming, which pays there only. */
template <typename T, int OPTIONS, int THREADS, int REGISTERS>
__global__ __launch_bounds__(THREADS, THREADS == 1024 ? 1 : 3) void held(const __grid_constant__ Call c) {
    constexpr int N = WIDE<T>, SOME = AHEAD<OPTIONS>;
    typedef Pack<T, N> P;
    extern __shared__ uint4 slot_memory[];
    P *const slots = reinterpret_cast<P *>(slot_memory) + threadIdx.x;
    __shared__ Mailbox<OPTIONS> mailbox;
    __shared__ RowGradient shared;
    __shared__ Running running;
    const Loss &loss = c.loss;
    Cluster<OPTIONS> cluster(mailbox);
    const int thread = threadIdx.x, threads = blockDim.x;
    const int64_t row = blockIdx.x / cluster.ranks, label = loss.class_of(loss.load_label(row));
    const T *const z = c.z.at<const T>(row);
    const Part<T> part(z, c, cluster.rank, cluster.ranks);
    const Stretch<const T> &stretch = part.stretch;
    const int packs = static_cast<int>(stretch.packs);

    P mine[REGISTERS > 0 ? REGISTERS : 1];
    if (label >= 0) {
#pragma unroll
        for (int k = 0; k < REGISTERS; k++)
            if (thread + k * threads < packs)
                mine[k] = load_streaming<T, N>(stretch.body + int64_t(thread + k * threads) * N);
        for (int i = thread + REGISTERS * threads, slot = 0; i < packs; i += threads, slot += threads)
            copy_async<T, N>(slots + slot, stretch.body + int64_t(i) * N);
        copy_commit();
    }
    running.reset();
    wait_for_previous_kernel();
    running.find_common(c);

    RowGradient gradient = gradient_unread(label);
    if (label >= 0) {
        const float z_label = cluster.rank == 0 && thread < WARP ? to_float(z[label]) : 0.0f;
        const int64_t column = part.first + stretch.head;
        Gathered<OPTIONS> g = none<OPTIONS>();
        for (int e = thread; e < stretch.edges; e += threads)
            add_one(g, stretch.body[stretch.edge(e)], column + stretch.edge(e), c);
#pragma unroll
        for (int k = 0; k < REGISTERS; k++)
            if (thread + k * threads < packs) {
                const P pack[1] = {mine[k]};
                add(g, pack, 1, column + int64_t(thread + k * threads) * N, 0, c);
            }
        copy_wait<0>();
        int i = thread + REGISTERS * threads, slot = 0;
        for (; i + (SOME - 1) * threads < packs; i += SOME * threads, slot += SOME * threads) {
            P some[SOME];
#pragma unroll
            for (int k = 0; k < SOME; k++)
                some[k] = slots[slot + k * threads];
            add(g, some, SOME, column + int64_t(i) * N, int64_t(threads) * N, c);
        }
        for (; i < packs; i += threads, slot += threads) {
            const P pack[1] = {slots[slot]};
            add(g, pack, 1, column + int64_t(i) * N, 0, c);
        }
        if (thread == 0)
            g.z_label = z_label;
        g = cluster.all(g, loss.scale);
        const RowFigures figures = figures_of(g, g.z_label, c.loss); /* warp 0's are the row's */
        if (thread < WARP) {
            if (c.gradient)
                gradient = work_out_gradient(loss, running.common, row, label, g.z_label, figures);
            if (thread == 0)
                shared = gradient;
        }
        __syncthreads();
        gradient = shared;
        if (thread == 0 && cluster.rank == 0 && loss.forward) /* while the others write the gradient */
            work_out_results(loss, row, label, figures, running.mine());
    } else if (thread == 0 && cluster.rank == 0) {
        write_unread(c.loss, row, label, running.mine());
    }

    if (c.gradient) {
        T *const dz = c.dz.at<T>(row) + part.first; /* as the part begins */
        if (gradient.constant) {
            fill(dz, stretch, gradient.p, thread, threads);
        } else {
            const ColumnGradient<OPTIONS, T> columns(gradient, c.loss);
            const auto write = [&](const P &pack, int i) {
                const int64_t at = stretch.head + int64_t(i) * N;
                const P d = columns.of(pack, part.first + at, c.loss);
                REGISTERS > 0 ? store_streaming<T, N>(dz + at, d) : store_once<T, N>(dz + at, d);
            };
#pragma unroll
            for (int k = 0; k < REGISTERS; k++)
                if (thread + k * threads < packs)
                    write(mine[k], thread + k * threads);
#pragma unroll 4
            for (int i = thread + REGISTERS * threads, slot = 0; i < packs; i += threads, slot += threads)
                write(slots[slot], i);
            for (int e = thread; e < stretch.edges; e += threads) {
                const int64_t at = stretch.head + stretch.edge(e);
                dz[at] = from_float<T>(columns.of(to_float(stretch.body[stretch.edge(e)]), part.first + at, c.loss));
            }
            const int64_t at = label - part.first;
            if (at >= 0 && at < part.n && thread == writer_of(stretch, at, threads))
                dz[at] = from_float<T>(gradient.at_label);
        }
    }
    if (loss.forward && cluster.rank == 0)
        finish(c, running, static_cast<unsigned>(row), static_cast<unsigned>(loss.rows));
}

/* ---- gradients from lse
 * ----------------------------------------------------------------------------------------------------- */

/* What is the same all along a row. */
struct alignas(16) Coefficients {
    RowGradient gradient;
    int64_t label;
};

/* A warp to a row. Rows whose lse does not serve are read here. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(WARP_THREADS) void coefficients(const __grid_constant__ Call c, Coefficients *of_row) {
    __shared__ Running running;
    start_next_kernel();
    wait_for_previous_kernel();
    running.find_common(c);
    const Loss &loss = c.loss;
    OneWarp by;
    const int64_t row = by.first_row();
    if (row >= loss.rows)
        return;
    const int64_t label = loss.class_of(loss.load_label(row));
    RowGradient gradient = gradient_unread(label);
    if (label >= 0) {
        const T *const z = c.z.at<const T>(row);
        const float given = loss.lse.get(row), z_label = to_float(z[label]);
        if (lse_serves<T>(given)) {
            gradient = gradient_from_lse(loss, running.common, row, label, z_label, given);
        } else {
            const Stretch<const T> stretch(z, loss.classes);
            const Gathered<OPTIONS> g = by.all(gather<OPTIONS, true>(stretch, by.thread(), WARP, c), loss.scale);
            gradient = gradient_from_figures(loss, running.common, row, label, z_label, figures_of(g, z_label, c.loss));
        }
    } else if (by.thread() == 0) {
        write_unread(c.loss, row, label, nullptr);
    }
    if (by.thread() == 0)
        of_row[row] = {gradient, label};
}

constexpr int GRADIENT_THREADS = 256, GRADIENT_PACKS = 2; /* of a block; of a thread: docs/perf/cross_entropy.md */

/* `parts` blocks to a row. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(GRADIENT_THREADS) void gradients(const __grid_constant__ Call c,
                                                              const Coefficients *of_row, unsigned parts) {
    constexpr int N = WIDE<T>;
    const unsigned row = blockIdx.x / parts, part = blockIdx.x - row * parts;
    const Stretch<const T> stretch(c.z.at<const T>(row), c.loss.classes);
    const int64_t first = part * int64_t(GRADIENT_THREADS * GRADIENT_PACKS) + threadIdx.x;
    Pack<T, N> packs[GRADIENT_PACKS];
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * GRADIENT_THREADS < stretch.packs)
            packs[k] = load_once<T, N>(stretch.body + (first + k * GRADIENT_THREADS) * N);
    T *const dz = c.dz.at<T>(row);
    wait_for_previous_kernel();
    const RowGradient gradient = of_row[row].gradient;
    const int64_t label = of_row[row].label;
    const ColumnGradient<OPTIONS, T> columns(gradient, c.loss);
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * GRADIENT_THREADS < stretch.packs) {
            const int64_t at = stretch.head + (first + k * GRADIENT_THREADS) * N;
            float d[N];
            unpack(packs[k], d);
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = gradient.constant ? gradient.p : columns.of(d[j], at + j, c.loss);
            if (label >= at && label < at + N && !gradient.constant)
#pragma unroll
                for (int j = 0; j < N; j++)
                    d[j] = at + j == label ? gradient.at_label : d[j];
            store_once<T, N>(dz + at, packed<T>(d));
        }
    if (part == 0 && threadIdx.x < stretch.edges) {
        const int64_t at = stretch.head + stretch.edge(threadIdx.x);
        const float z = to_float(stretch.body[stretch.edge(threadIdx.x)]);
        dz[at] = from_float<T>(gradient.constant ? gradient.p
                               : at == label     ? gradient.at_label
                                                 : columns.of(z, at, c.loss));
    }
}

/* ---- before the rows
 * -------------------------------------------------------------------------------------------------------- */

constexpr int PREPARE_BLOCKS = 64, PREPARE_THREADS = 512;
constexpr int64_t SCANNED_ROWS = 1 << 13; /* up to so many labels every block goes through by itself */

/* Sums over classes and over labels, where they are many. The last block to arrive writes the first of `prepared`. */
__global__ __launch_bounds__(PREPARE_THREADS) void prepare(const __grid_constant__ Call c, Prepared *prepared) {
    start_next_kernel();
    const int64_t first = blockIdx.x * int64_t(PREPARE_THREADS) + threadIdx.x,
                  step = gridDim.x * int64_t(PREPARE_THREADS);
    double classes = 0.0;
    for (int64_t v = first; v < c.loss.classes; v += step)
        classes += c.loss.weight_of(v);
    const Totals totals = c.loss.needs_totals() && c.gradient ? count(c.loss, first, step) : Totals{};
    const Prepared mine = {block_sum(classes), block_sum(totals)};
    if (threadIdx.x == 0)
        prepared[1 + blockIdx.x] = mine;
    if (!block_arrives_last(c.counter, gridDim.x) || threadIdx.x > 0)
        return;
    Prepared all = {};
    for (unsigned i = 1; i <= gridDim.x; i++) {
        all.class_weights += __ldcg(&prepared[i].class_weights);
        all.totals.weight += __ldcg(&prepared[i].totals.weight);
        all.totals.counted += __ldcg(&prepared[i].totals.counted);
    }
    prepared[0] = all;
}

/* ---- how a call is cut
 * ------------------------------------------------------------------------------------------------------ */

typedef void (*Kernel)(const Call);

enum Kind { BY_WARP, BY_BLOCK, BY_ANYHOW, HELD, FROM_LSE };

struct Plan {
    Kind kind;
    Options options;
    bool prepares;
    int threads, ranks;
    int64_t blocks, part;
    size_t shared;
};

int power_at_least(int64_t a, int least, int most) {
    while (least < a && least < most)
        least *= 2;
    return least;
}

template <typename T> Kernel kernel_of(const Plan &plan, bool gradient) {
    switch (plan.kind) {
    case HELD:
        if (plan.threads == 1024)
            return plan.options == FULL ? held<T, FULL, 1024, 4> : held<T, SMOOTH, 1024, 4>;
        return plan.options == FULL ? held<T, FULL, 256, 0> : held<T, SMOOTH, 256, 0>;
    case BY_ANYHOW: return rows_by<T, FULL, true, Anyhow>;
    case BY_WARP:
        if (gradient)
            return plan.options == FULL ? rows_by<T, FULL, true, OneWarp> : rows_by<T, SMOOTH, true, OneWarp>;
        return plan.options == FULL     ? rows_by<T, FULL, false, OneWarp>
               : plan.options == SMOOTH ? rows_by<T, SMOOTH, false, OneWarp>
                                        : rows_by<T, PLAIN, false, OneWarp>;
    default:
        if (gradient)
            return plan.options == FULL ? rows_by<T, FULL, true, WholeBlock> : rows_by<T, SMOOTH, true, WholeBlock>;
        return plan.options == FULL     ? rows_by<T, FULL, false, WholeBlock>
               : plan.options == SMOOTH ? rows_by<T, SMOOTH, false, WholeBlock>
                                        : rows_by<T, PLAIN, false, WholeBlock>;
    }
}

/* Rows in blocks of at most 256 threads, two, three or more to a multiprocessor, if they fit; else in all of one
 * multiprocessor, or of a cluster of them. False: in none. */
bool plan_held(const rafter_cuda_state *state, int64_t rows, int64_t packs, Plan *plan) {
    const int64_t statics = 4 << 10,
                  reserved = 1 << 10; /* the kernel's own shared memory, and the system's, per block */
    const int64_t room = state->shared_bytes + reserved, registers = 4 * 1024;
    const int most = state->compute_capability >= 90 ? MOST_RANKS : 1;
    plan->kind = HELD;
    plan->ranks = 1;
    if (rows > 1 << 27) /* of which each takes a block */
        return false;
    if (16 * packs <= room / 2 - reserved - statics) {
        plan->threads = power_at_least(packs / 8, 64, 256);
    } else {
        plan->threads = 1024;
        while (plan->ranks < most &&
               16 * (ceil_div<int64_t>(packs, plan->ranks) - registers) > state->shared_bytes - statics)
            plan->ranks *= 2;
        if (16 * (ceil_div<int64_t>(packs, plan->ranks) - registers) > state->shared_bytes - statics)
            return false;
    }
    while (2 * plan->ranks <= most && 2 * plan->ranks * rows <= state->multiprocessors && packs / plan->ranks >= 2048)
        plan->ranks *= 2;
    plan->part = ceil_div<int64_t>(packs, plan->ranks);
    const int64_t in_shared = plan->part - (plan->threads == 1024 ? registers : 0);
    plan->shared = in_shared > 0 ? static_cast<size_t>(in_shared) * 16 : 0;
    plan->blocks = plan->ranks * rows;
    return true;
}

/* Whether packs of the logits' rows are packs of dlogits' too. */
bool alike(const rafter_view &a, const rafter_view &b) {
    const int64_t bytes = rafter_dtype_bytes(a.dtype);
    bool same = (reinterpret_cast<uintptr_t>(a.data) - reinterpret_cast<uintptr_t>(b.data)) % 16 == 0;
    same &= a.ndim == b.ndim;
    for (int d = 0; d < a.ndim - 1 && same; d++)
        same &= a.shape[d] == b.shape[d] && (a.stride[d] - b.stride[d]) * bytes % 16 == 0;
    return same;
}

/* The most blocks of rows_by. Those that only read are many and short, down to a row each; those that write too stay,
 * as many as run at a time. */
int64_t most_blocks(const rafter_cuda_state *state, const Plan &plan, bool gradient) {
    if (plan.kind == BY_BLOCK && !gradient)
        return 1 << 14;
    return int64_t(state->multiprocessors) * (threads_per_sm(plan.options, gradient) / plan.threads);
}

Plan plan_call(const rafter_cuda_state *state, const cross_entropy_call *call, const Call &c) {
    const struct rafter_loss *loss = &call->loss;
    const int64_t rows = loss->rows, bytes = loss->classes * rafter_dtype_bytes(call->logits.dtype);
    const bool smooth = loss->smoothing != 0.0f, weights = smooth && c.loss.class_weight;
    Plan plan = {};
    plan.options = loss->softcap != 0.0f || weights || c.loss.entropy.data || c.loss.argmax.data ? FULL
                   : smooth || c.gradient                                                        ? SMOOTH
                                                                                                 : PLAIN;
    const bool sees_all_labels = c.gradient && c.loss.needs_totals();
    plan.prepares = weights || (sees_all_labels && rows > SCANNED_ROWS);
    plan.ranks = 1;

    const bool neighbours = c.z_step == 1 && (!c.gradient || (c.dz_step == 1 && alike(call->logits, call->dlogits)));
    const bool from_lse = !c.loss.forward && c.loss.lse.data,
               both = c.gradient && !from_lse; /* statistics and gradient */
    const int64_t parts = ceil_div<int64_t>(bytes, 16 * GRADIENT_THREADS * GRADIENT_PACKS);
    if (!neighbours) {
        plan.kind = BY_ANYHOW;
        plan.options = FULL;
    } else if (bytes <= 2048 || (bytes <= 8192 && rows >= 2048 && !both)) {
        plan.kind = BY_WARP;
        plan.threads = WARP_THREADS;
        const int64_t blocks = ceil_div<int64_t>(rows, WARP_THREADS / WARP),
                      most = most_blocks(state, plan, c.gradient);
        plan.blocks = blocks < most ? blocks : most;
        return plan;
    } else if (from_lse && rows < (int64_t(1) << 31) / parts) {
        plan.kind = FROM_LSE;
        plan.part = parts;
        plan.blocks = rows * parts;
        return plan;
    } else if ((both || rows < state->multiprocessors) && rows > 0 && plan_held(state, rows, bytes / 16, &plan)) {
        plan.prepares |= sees_all_labels;
        return plan;
    } else {
        plan.kind = BY_BLOCK;
    }
    plan.ranks = 1;
    plan.shared = 0;
    plan.threads = power_at_least(bytes / (16 * IN_FLIGHT), 64, MOST_THREADS);
    const int64_t most = most_blocks(state, plan, plan.kind == BY_ANYHOW || c.gradient);
    plan.blocks = rows < most ? rows : most;
    return plan;
}

/* ---- calls
 * --------------------------------------------------------------------------------------------------------------------
 */

/* Scratch memory of a call: the blocks' totals, or the rows' coefficients, and what `prepare` finds. */
size_t scratch_bytes(const Call &c, const Plan &plan) {
    const bool reduces = c.loss.loss.data && c.loss.reduction != RAFTER_NONE;
    if (plan.kind == FROM_LSE)
        return c.loss.rows * sizeof(Coefficients);
    return reduces || plan.prepares ? plan.blocks / plan.ranks * sizeof(Totals) : 0;
}

template <typename T>
void launch_from_lse(const rafter_context *context, const Call &c, const Plan &plan, char *scratch) {
    Coefficients *const of_row = reinterpret_cast<Coefficients *>(scratch);
    const Launch first = {ceil_div<int64_t>(c.loss.rows, WARP_THREADS / WARP), WARP_THREADS, 0, 1, plan.prepares},
                 second = {plan.blocks, GRADIENT_THREADS, 0, 1, true};
    const unsigned parts = static_cast<unsigned>(plan.part);
    if (plan.options == FULL) {
        launch(context, first, coefficients<T, FULL>, c, of_row);
        launch(context, second, gradients<T, FULL>, c, of_row, parts);
    } else {
        launch(context, first, coefficients<T, SMOOTH>, c, of_row);
        launch(context, second, gradients<T, SMOOTH>, c, of_row, parts);
    }
}

void launch_call(const rafter_context *context, const cross_entropy_call *call, Call &c, const Plan &plan,
                 char *scratch) {
    const bool reduces = c.loss.loss.data && c.loss.reduction != RAFTER_NONE;
    c.part = plan.part;
    c.of_block = reinterpret_cast<Totals *>(scratch);
    c.adds_up = plan.kind == BY_WARP || plan.kind == BY_ANYHOW;
    if (plan.prepares) {
        Prepared *const prepared = reinterpret_cast<Prepared *>(scratch + scratch_bytes(c, plan));
        launch(context, {PREPARE_BLOCKS, PREPARE_THREADS}, prepare, c, prepared);
        c.loss.prepared = prepared;
    }
    for_dtype(call->logits.dtype, [&](auto zero) {
        typedef decltype(zero) T;
        if (plan.kind == FROM_LSE)
            launch_from_lse<T>(context, c, plan, scratch);
        else
            launch(context, {plan.blocks, plan.threads, plan.shared, plan.ranks, plan.prepares},
                   kernel_of<T>(plan, c.gradient), c);
    });
    if (reduces && !c.adds_up)
        launch(context, {1, ADDING_THREADS, 0, 1, true}, add_up_blocks, c,
               static_cast<unsigned>(plan.blocks / plan.ranks));
}

} // namespace

extern "C" rafter_status rafter_cuda_cross_entropy(rafter_context *context, const struct cross_entropy_call *call) {
    OnDevice current(context);
    const int columns = call->logits.ndim - 1;
    Call c = {};
    c.loss = loss_of(context, &call->loss);
    c.gradient = call->gradient && call->dlogits.numel > 0;
    c.z = rows_of(call->logits, columns);
    c.z_step = call->loss.classes > 1 ? call->logits.stride[columns] : 1;
    if (c.gradient) {
        c.dz = rows_of(call->dlogits, call->dlogits.ndim - 1);
        c.dz_step = call->loss.classes > 1 ? call->dlogits.stride[call->dlogits.ndim - 1] : 1;
    }
    c.counter = context->cuda_state->counters;
    const bool reduces = c.loss.loss.data && c.loss.reduction != RAFTER_NONE;
    if (c.loss.rows == 0 ? !reduces : !c.loss.forward && !c.gradient)
        return RAFTER_OK;

    Plan plan = plan_call(context->cuda_state, call, c);
    if (plan.blocks == 0)
        plan.blocks = 1; /* no rows, but a loss */
    const size_t bytes = scratch_bytes(c, plan) + (plan.prepares ? (1 + PREPARE_BLOCKS) * sizeof(Prepared) : 0);
    return run_with_scratch(context, call, bytes, c.loss.forward ? "cross_entropy forward" : "cross_entropy backward",
                            [&](char *scratch) { launch_call(context, call, c, plan, scratch); });
}
