/*
 * cross_entropy on CUDA, one pass over the logits:
 *
 *     rows_by<OneWarp>     short rows: a warp to a row
 *     rows_by<WholeBlock>  statistics alone: a block to a row
 *     gradients            from a given lse: short blocks, 8 KB of a row each, after `coefficients` has worked out what
 *                          is the same all along a row
 *     on_chip              statistics and gradient: rows stay in the shared memory of a block, or of a cluster of them,
 *                          between the two, and the next row is fetched while the gradient of this one is written
 *     rows_by<Anyhow>      rows whose elements are not neighbours, or not alike in logits and dlogits
 *
 * Rows that fit on no chip are read twice by rows_by<WholeBlock>. Blocks of rows_by and on_chip stay, and take every
 * gridDim.x-th row; each adds up the losses of its rows, and the last to arrive adds up the blocks'.
 */
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "ops/columns.cuh"
#include "ops/cross_entropy/call.h"

#include <cuda_runtime.h>

#include <mutex>

namespace {

constexpr int MOST_THREADS = 512; /* of a block that takes a row */
constexpr int WARP_THREADS = 256; /* of a block whose warps take rows */
constexpr int CHIP_THREADS = 256; /* of a block on_chip, at most */
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
    int64_t part;            /* on_chip: packs of a row that a block holds */
    Totals *of_block;
    unsigned *counter;
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
            packs[k] = SOON ? load_l2<T, N>(p + k * stride) : load_streaming<T, N>(p + k * stride);
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
        const double found = c.gradient ? common_upstream(c.loss, totals_before(c.loss)) : 0.0;
        if (threadIdx.x == 0)
            common = found;
        __syncthreads();
    }
};

/* The end of a block, one of `blocks`; the last to arrive writes the loss. */
DEVICE void finish(const Call &c, Running &running, unsigned block, unsigned blocks) {
    if (!c.loss.loss.data || c.loss.reduction == RAFTER_NONE)
        return;
    const Totals of_block = block_sum(threadIdx.x % WARP == 0 ? *running.mine() : Totals{});
    if (threadIdx.x == 0)
        c.of_block[block] = of_block;
    if (!block_arrives_last(c.counter, blocks))
        return;
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
                        gradient = gradient_from_figures(loss, running.common, row, label, z_label, figures);
                    if (loss.forward && thread == 0)
                        write_row(loss, row, label, results_of(loss, row, label, figures), running.mine());
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

/* Statistics of every warp of a cluster, in the shared memory of every block of it: two sets in turn. */
template <int OPTIONS> struct Mailbox {
    Gathered<OPTIONS> of_warp[2][MOST_RANKS * CHIP_THREADS / WARP];
    uint64_t complete[2]; /* mbarriers, in clusters of several blocks */
};

/* Warps send their statistics of a row to all blocks; each block waits until its mailbox has those of all warps. Nobody
 * can be two rows ahead: for that it would need what this block has not sent yet. */
template <int OPTIONS> struct Exchange {
    Mailbox<OPTIONS> &mine;
    int ranks = 1, rank = 0;

    /* To be made by all threads, once. */
    DEVICE explicit Exchange(Mailbox<OPTIONS> &mailbox) : mine(mailbox) {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ranks));
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        if (ranks == 1)
            return;
        if (threadIdx.x == 0) {
            for (int set = 0; set < 2; set++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&mine.complete[set])) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    /* One warp's statistics of row number `turn`, the same in all lanes. */
    DEVICE void send(const Gathered<OPTIONS> &g, int turn) {
        const int lane = threadIdx.x % WARP, set = turn % 2;
        Gathered<OPTIONS> *slot = &mine.of_warp[set][(rank * blockDim.x + threadIdx.x) / WARP];
        if (ranks == 1) {
            if (lane == 0)
                *slot = g;
            return;
        }
#if __CUDA_ARCH__ >= 900
        constexpr int WORDS = sizeof g / sizeof(uint4);
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&mine.complete[set])),
                         "r"(static_cast<unsigned>(sizeof g * ranks * (blockDim.x / WARP)))
                         : "memory");
        if (lane < ranks) {
            unsigned to, bell;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(slot)), "r"(lane));
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(address(&mine.complete[set])), "r"(lane));
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const uint4 w = reinterpret_cast<const uint4 *>(&g)[i];
                asm volatile(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                        to + i * static_cast<unsigned>(sizeof w)),
                    "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(bell)
                    : "memory");
            }
        }
#endif
    }

    /* Statistics of the whole row, for the lanes of warp 0. To be called by all threads. */
    DEVICE Gathered<OPTIONS> receive(int turn, float scale) {
        const int set = turn % 2;
        Gathered<OPTIONS> g = none<OPTIONS>();
        if (ranks == 1)
            __syncthreads();
        if (threadIdx.x >= WARP)
            return g;
#if __CUDA_ARCH__ >= 900
        for (unsigned done = ranks == 1; !done;)
            asm volatile("{\n\t.reg .pred p;\n\t"
                         "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                         "selp.u32 %0, 1, 0, p;\n\t}"
                         : "=r"(done)
                         : "r"(address(&mine.complete[set])), "r"(turn / 2 % 2)
                         : "memory");
#endif
        for (int i = threadIdx.x; i < ranks * static_cast<int>(blockDim.x / WARP); i += WARP)
            g = merge(g, mine.of_warp[set][i], scale);
        return merge_warp(g, scale);
    }

    static DEVICE unsigned address(const void *shared) {
        return static_cast<unsigned>(__cvta_generic_to_shared(shared));
    }
};

/* The part of a row that one block of a cluster holds: columns [first, first + n). row is past the last when there is
 * none. */
template <typename T> struct Held {
    int64_t row, label, first, n;
    Stretch<const T> stretch;
};

/* All parts begin where packs do, but for the first; the last ends where the row does. */
template <typename T> DEVICE void hold(Held<T> &held, const Call &c, int rank, int ranks) {
    const T *z = c.z.at<const T>(held.row);
    const int64_t head = Stretch<const T>(z, c.loss.classes).head, part = c.part * WIDE<T>;
    const int64_t end = rank == ranks - 1 ? c.loss.classes : head + (rank + 1) * part;
    held.first = rank == 0 ? 0 : head + rank * part;
    held.n = end - held.first;
    held.stretch = Stretch<const T>(z + held.first, held.n);
}

/* The first row from held.row on, in steps of `step`, that is to be read; those before it are dealt with here. `ahead`
 * is the label of held.row as it was loaded, and becomes that of the row a step behind the one found. */
template <typename T>
DEVICE void seek(Held<T> &held, int64_t &ahead, int64_t step, int rank, int ranks, Totals *totals, const Call &c) {
    for (; held.row < c.loss.rows; held.row += step) {
        held.label = c.loss.class_of(ahead);
        if (held.row + step < c.loss.rows)
            ahead = c.loss.load_label(held.row + step);
        hold(held, c, rank, ranks);
        if (held.label >= 0)
            return;
        if (rank == 0 && threadIdx.x == 0)
            write_unread(c.loss, held.row, held.label, totals);
        if (c.gradient)
            fill(c.dz.at<T>(held.row) + held.first, held.stretch, gradient_unread(held.label).p, threadIdx.x,
                 blockDim.x);
    }
    held.stretch.packs = 0;
}

/* Pack i of the part has slot i, which only thread i % threads ever touches: its own copies are all it waits for. Packs
 * come in groups of AHEAD to a thread. */
template <int OPTIONS, typename T> DEVICE void fetch_group(Pack<T, WIDE<T>> *slots, const Held<T> &held, int group) {
    const int threads = blockDim.x;
    int i = group * AHEAD<OPTIONS> * threads + threadIdx.x;
#pragma unroll
    for (int k = 0; k < AHEAD<OPTIONS>; k++, i += threads)
        if (i < held.stretch.packs)
            copy_async<T, WIDE<T>>(slots + i, held.stretch.body + int64_t(i) * WIDE<T>);
    copy_commit();
}

template <int OPTIONS, typename T>
DEVICE Gathered<OPTIONS> gather_held(const Pack<T, WIDE<T>> *slots, const Held<T> &held, int groups, const Call &c) {
    constexpr int N = WIDE<T>;
    const int thread = threadIdx.x, threads = blockDim.x;
    const Stretch<const T> &row = held.stretch;
    Gathered<OPTIONS> g = none<OPTIONS>();
    for (int e = thread; e < row.edges; e += threads)
        add_one(g, row.body[row.edge(e)], held.first + row.head + row.edge(e), c);
    for (int group = 0; group < groups; group++) {
        copy_wait_all_but(groups - 1 - group);
        const int i = group * AHEAD<OPTIONS> * threads + thread;
        const int64_t column = held.first + row.head + int64_t(i) * N;
        Pack<T, N> packs[AHEAD<OPTIONS>];
        if (i + (AHEAD<OPTIONS> - 1) * threads < row.packs) {
#pragma unroll
            for (int k = 0; k < AHEAD<OPTIONS>; k++)
                packs[k] = slots[i + k * threads];
            add(g, packs, AHEAD<OPTIONS>, column, int64_t(threads) * N, c);
        } else if (i < row.packs) {
            for (int k = 0; i + k * threads < row.packs; k++) {
                const Pack<T, N> pack[1] = {slots[i + k * threads]};
                add(g, pack, 1, column + int64_t(k) * threads * N, 0, c);
            }
        }
    }
    return g;
}

/* Gradient of `held` out of its slots, which `next` is fetched into. */
template <int OPTIONS, typename T>
DEVICE void write_and_fetch(Pack<T, WIDE<T>> *slots, const Held<T> &held, const RowGradient &gradient,
                            const Held<T> &next, int groups, const Call &c) {
    constexpr int N = WIDE<T>;
    const int thread = threadIdx.x, threads = blockDim.x;
    const Stretch<const T> &row = held.stretch;
    T *dz = c.dz.at<T>(held.row) + held.first; /* as the part begins */
    const ColumnGradient<OPTIONS, T> column(gradient, c.loss);
    for (int group = 0; group < groups; group++) {
        int i = group * AHEAD<OPTIONS> * threads + thread;
#pragma unroll
        for (int k = 0; k < AHEAD<OPTIONS>; k++, i += threads)
            if (i < row.packs) {
                const int64_t at = row.head + int64_t(i) * N;
                store_streaming<T, N>(dz + at, column.of(slots[i], held.first + at, c.loss));
            }
        fetch_group<OPTIONS>(slots, next, group);
    }
    for (int e = thread; e < row.edges; e += threads) {
        const int64_t at = row.head + row.edge(e);
        dz[at] = from_float<T>(column.of(to_float(row.body[row.edge(e)]), held.first + at, c.loss));
    }
    const int64_t label = held.label - held.first;
    if (label >= 0 && label < held.n && thread == writer_of(row, label, threads))
        dz[label] = from_float<T>(gradient.at_label);
}

template <typename T, int OPTIONS>
__global__ __launch_bounds__(CHIP_THREADS, 3) void on_chip(const __grid_constant__ Call c) {
    extern __shared__ uint4 slot_memory[];
    Pack<T, WIDE<T>> *const slots = reinterpret_cast<Pack<T, WIDE<T>> *>(slot_memory);
    __shared__ Mailbox<OPTIONS> mailbox;
    __shared__ RowGradient shared[2];
    __shared__ Running running;
    const Loss &loss = c.loss;
    Exchange<OPTIONS> exchange(mailbox);
    const int ranks = exchange.ranks, rank = exchange.rank, thread = threadIdx.x;
    const int group_packs = AHEAD<OPTIONS> * blockDim.x,
              groups = static_cast<int>((c.part + group_packs - 1) / group_packs);
    const int64_t clusters = gridDim.x / ranks;
    running.reset();

    Held<T> now;
    now.row = blockIdx.x / ranks;
    int64_t ahead = now.row < loss.rows ? loss.load_label(now.row) : 0;
    seek(now, ahead, clusters, rank, ranks, running.mine(), c);
    for (int group = 0; group < groups; group++)
        fetch_group<OPTIONS>(slots, now, group);
    running.find_common(c); /* while the first row is on its way */

    for (int turn = 0; now.row < loss.rows; turn++) {
        const float z_label = rank == 0 && thread < WARP ? to_float(c.z.at<const T>(now.row)[now.label]) : 0.0f;
        Held<T> next = now;
        next.row += clusters;
        seek(next, ahead, clusters, rank, ranks, running.mine(), c);

        Gathered<OPTIONS> g = merge_warp(gather_held<OPTIONS>(slots, now, groups, c), loss.scale);
        g.z_label = z_label;
        exchange.send(g, turn);
        g = exchange.receive(turn, loss.scale);
        if (thread < WARP) {
            const RowFigures figures = figures_of(g, g.z_label, c.loss);
            const RowGradient gradient =
                c.gradient ? gradient_from_figures(loss, running.common, now.row, now.label, g.z_label, figures)
                           : RowGradient{};
            if (thread == 0)
                shared[turn % 2] = gradient;
            if (thread == 0 && rank == 0 && loss.forward)
                write_row(loss, now.row, now.label, results_of(loss, now.row, now.label, figures), running.mine());
        }
        __syncthreads();
        const RowGradient gradient = shared[turn % 2];
        if (c.gradient && !gradient.constant) {
            write_and_fetch<OPTIONS>(slots, now, gradient, next, groups, c);
        } else {
            if (c.gradient)
                fill(c.dz.at<T>(now.row) + now.first, now.stretch, gradient.p, thread, blockDim.x);
            for (int group = 0; group < groups; group++)
                fetch_group<OPTIONS>(slots, next, group);
        }
        now = next;
    }
    if (loss.forward && rank == 0)
        finish(c, running, blockIdx.x / ranks, static_cast<unsigned>(clusters));
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

enum Kind { BY_WARP, BY_BLOCK, BY_ANYHOW, ON_CHIP, FROM_LSE };

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
    case ON_CHIP: return plan.options == FULL ? on_chip<T, FULL> : on_chip<T, SMOOTH>;
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

Kernel kernel_of(rafter_dtype dtype, const Plan &plan, bool gradient) {
    return for_dtype(dtype, [&](auto zero) { return kernel_of<decltype(zero)>(plan, gradient); });
}

cudaLaunchConfig_t launch_of(const Plan &plan, cudaStream_t stream, cudaLaunchAttribute *cluster) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
    config.blockDim = dim3(static_cast<unsigned>(plan.threads));
    config.dynamicSmemBytes = plan.shared;
    config.stream = stream;
    if (plan.ranks > 1) {
        cluster->id = cudaLaunchAttributeClusterDimension;
        cluster->val.clusterDim.x = static_cast<unsigned>(plan.ranks);
        cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
        config.attrs = cluster;
        config.numAttrs = 1;
    }
    return config;
}

/* How many clusters of a plan run at a time; asked of the driver once for each. Blocks that stay must all be there at
 * once. */
int64_t clusters_at_a_time(const rafter_cuda_state *state, Kernel kernel, const Plan &plan) {
    struct Known {
        int device, ranks, threads, clusters;
        size_t shared;
        Kernel kernel;
    };
    static Known known[64];
    static int count;
    static std::mutex lock;
    const std::lock_guard<std::mutex> locked(lock);
    for (int i = 0; i < count; i++)
        if (known[i].device == state->device && known[i].kernel == kernel && known[i].ranks == plan.ranks &&
            known[i].threads == plan.threads && known[i].shared == plan.shared)
            return known[i].clusters;

    const void *function = reinterpret_cast<const void *>(kernel);
    int clusters = 0;
    cudaFuncAttributes attributes;
    bool good = cudaFuncGetAttributes(&attributes, function) == cudaSuccess;
    good =
        good && cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     state->shared_bytes - static_cast<int>(attributes.sharedSizeBytes)) == cudaSuccess;
    good = good && cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared) == cudaSuccess;
    if (good && plan.ranks > 1) {
        Plan whole = plan;
        whole.blocks = plan.ranks;
        cudaLaunchAttribute cluster;
        const cudaLaunchConfig_t config = launch_of(whole, state->stream, &cluster);
        good = cudaOccupancyMaxActiveClusters(&clusters, function, &config) == cudaSuccess;
    } else if (good) {
        good = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, function, plan.threads, plan.shared) ==
               cudaSuccess;
        clusters *= state->multiprocessors;
    }
    if (!good) {
        cudaGetLastError(); /* another kernel will do */
        clusters = 0;
    }
    if (count < static_cast<int>(sizeof known / sizeof *known))
        known[count++] = {state->device, plan.ranks, plan.threads, clusters, plan.shared, kernel};
    return clusters;
}

/* Holds rows in as few blocks as leave room for three on an SM; else in more room, or not at all. */
bool plan_on_chip(const rafter_cuda_state *state, rafter_dtype dtype, int64_t rows, int64_t packs, bool gradient,
                  Plan *plan) {
    const int64_t statics = 6 << 10,
                  reserved = 1 << 10; /* shared memory of the kernel's own, and of the system's, per block */
    const int most = state->compute_capability >= 90 ? MOST_RANKS : 1;
    plan->kind = ON_CHIP;
    plan->ranks = 0;
    for (int blocks = 3; blocks > 0 && plan->ranks == 0; blocks--)
        for (int ranks = 1; ranks <= most && plan->ranks == 0; ranks *= 2)
            if (ceil_div<int64_t>(packs, ranks) * 16 <= (state->shared_bytes + reserved) / blocks - reserved - statics)
                plan->ranks = ranks;
    if (plan->ranks == 0)
        return false;
    while (2 * plan->ranks <= most && 2 * plan->ranks * rows <= state->multiprocessors && packs / plan->ranks >= 2048)
        plan->ranks *= 2;
    plan->part = ceil_div<int64_t>(packs, plan->ranks);
    plan->shared = static_cast<size_t>(plan->part) * 16;
    plan->threads = power_at_least(plan->part / IN_FLIGHT, 64, CHIP_THREADS);
    const int64_t fit = clusters_at_a_time(state, kernel_of(dtype, *plan, gradient), *plan);
    plan->blocks = plan->ranks * (rows < fit ? rows : fit);
    return fit > 0;
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

/* Blocks of rows_by. */
int64_t at_a_time(const rafter_cuda_state *state, const Plan &plan, bool gradient) {
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
    plan.prepares = weights || (c.gradient && c.loss.needs_totals() && rows > SCANNED_ROWS);
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
        const int64_t blocks = ceil_div<int64_t>(rows, WARP_THREADS / WARP), most = at_a_time(state, plan, c.gradient);
        plan.blocks = blocks < most ? blocks : most;
        return plan;
    } else if (from_lse && rows < (int64_t(1) << 31) / parts) {
        plan.kind = FROM_LSE;
        plan.part = parts;
        plan.blocks = rows * parts;
        return plan;
    } else if ((both || rows < state->multiprocessors) && rows > 0 &&
               plan_on_chip(state, call->logits.dtype, rows, bytes / 16, c.gradient, &plan)) {
        return plan;
    } else {
        plan.kind = BY_BLOCK;
    }
    plan.ranks = 1;
    plan.shared = 0;
    plan.threads = power_at_least(bytes / (16 * IN_FLIGHT), 64, MOST_THREADS);
    const int64_t most = at_a_time(state, plan, plan.kind == BY_ANYHOW || c.gradient);
    plan.blocks = rows < most ? rows : most;
    return plan;
}

/* ---- calls
 * --------------------------------------------------------------------------------------------------------------------
 */

/* Scratch memory of a call: the blocks' totals, or the rows' coefficients; behind it is what `prepare` finds. */
size_t scratch_bytes(const Call &c, const Plan &plan) {
    const bool reduces = c.loss.loss.data && c.loss.reduction != RAFTER_NONE;
    if (plan.kind == FROM_LSE)
        return c.loss.rows * sizeof(Coefficients);
    return reduces || plan.prepares ? plan.blocks * sizeof(Totals) : 0;
}

template <typename T>
void launch_from_lse(const rafter_context *context, const Call &c, const Plan &plan, char *scratch) {
    Coefficients *const of_row = reinterpret_cast<Coefficients *>(scratch);
    const Launch first = {ceil_div<int64_t>(c.loss.rows, WARP_THREADS / WARP), WARP_THREADS},
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
    const cudaStream_t stream = context->cuda_state->stream;
    c.part = plan.part;
    c.of_block = reinterpret_cast<Totals *>(scratch);
    if (plan.prepares) {
        Prepared *const prepared = reinterpret_cast<Prepared *>(scratch + scratch_bytes(c, plan));
        prepare<<<PREPARE_BLOCKS, PREPARE_THREADS, 0, stream>>>(c, prepared);
        c.loss.prepared = prepared;
    }
    if (plan.kind == FROM_LSE)
        return for_dtype(call->logits.dtype,
                         [&](auto zero) { launch_from_lse<decltype(zero)>(context, c, plan, scratch); });
    const Kernel kernel = kernel_of(call->logits.dtype, plan, c.gradient);
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = launch_of(plan, stream, &cluster);
    void *args[] = {&c};
    cudaLaunchKernelExC(&config, reinterpret_cast<const void *>(kernel), args);
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
