/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cross_entropy on CUDA. What a call launches, each kernel overlapping with the end of the one before it:
 *
 *     rows are short, or their elements no neighbours   by_warps: all there is to do, a warp to a row
 *     forward                                           statistics, finish
 *     backward from lse                                 coefficients, gradients
 *     statistics and gradient, rows fit on an SM        terms, on_chip, finish
 *     statistics and gradient, rows few or too long     statistics, finish, gradients: reads the logits twice
 *     the call is a usual one                           see cuda_usual.cuh
 *
 *     statistics     a block to a row, or to a part of one where rows are few
 *     finish         from a row's statistics: its outputs, the coefficients of its gradient, the loss of all rows
 *     coefficients   from a row's lse
 *     gradients      from coefficients: short blocks, a few KB of a row each
 *     terms          of a row's gradient what needs no statistics, for
 *     on_chip        a block to a row, which stays in shared memory and registers between statistics and gradient
 *     prepare        first of all, where sums over classes or over many labels are needed
 *
 * Kernels that touch every column know nothing of losses, weights and means: those are worked out in double by kernels
 * that take a thread to a row.
 */
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "ops/columns.cuh"
#include "ops/cross_entropy/call.h"

#include <cuda_runtime.h>

namespace {

constexpr int MOST_THREADS = 512;                         /* of a block that gathers a row's statistics */
constexpr int ROW_THREADS = 256;                          /* of a block whose threads, or warps, take rows */
constexpr int GRADIENT_THREADS = 128, GRADIENT_PACKS = 2; /* of a block; of a thread: docs/perf/cross_entropy.md */

/* Packs that a thread loads before it uses the first. */
template <int OPTIONS> constexpr int AHEAD = OPTIONS == FULL ? IN_FLIGHT / 2 : IN_FLIGHT;

struct Call {
    Loss loss;
    Rows z, dz;              /* logits and their gradient */
    int64_t z_step, dz_step; /* between columns; 1 but for rows whose elements are no neighbours */
    bool gradient;           /* dz is wanted */
    Totals *of_block;
    unsigned *counter;
};

/* ---- statistics of columns ------------------------------------------------------------------- */

/* Packs of columns [column, column + N), [column + step, ...), ...; only the first `there` of them are, the others are
 * full of -inf. */
template <int OPTIONS, typename T, int N, int COUNT>
DEVICE void add(Gathered<OPTIONS> &g, const Pack<T, N> (&packs)[COUNT], int there, int64_t column, int64_t step,
                const Loss &loss) {
    if constexpr (OPTIONS != FULL) {
        add_packs(g.s, packs, loss.scale);
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
            g, v, [&](int k, int j) { return k < there ? column + k * step + j : -1; }, loss);
    }
}

template <int OPTIONS, typename T> DEVICE void add_one(Gathered<OPTIONS> &g, T z, int64_t column, const Loss &loss) {
    const Pack<T, 1> pack[1] = {{{z}}};
    add(g, pack, 1, column, 1, loss);
}

/* Packs of a row that lie `threads` packs apart; where there is none, one full of -inf. */
template <typename T, int COUNT> struct Group {
    Pack<T, WIDE<T>> packs[COUNT];

    DEVICE void load(const Stretch<const T> &row, int64_t first, int threads) {
        constexpr int N = WIDE<T>;
        const T *const p = row.body + first * N;
        if (first + (COUNT - 1) * threads < row.packs)
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                packs[k] = load_once<T, N>(p + int64_t(k) * threads * N);
        else
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                packs[k] = load_once_if<T, N>(first + k * threads < row.packs, p + int64_t(k) * threads * N, -INFINITY);
    }
    template <int OPTIONS>
    DEVICE void add_to(Gathered<OPTIONS> &g, const Stretch<const T> &row, int64_t origin, int64_t first, int threads,
                       const Loss &loss) const {
        int there = 0;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            there += first + k * threads < row.packs;
        add(g, packs, there, origin + row.head + first * WIDE<T>, int64_t(threads) * WIDE<T>, loss);
    }
};

template <int OPTIONS, typename T>
DEVICE void add_edges(Gathered<OPTIONS> &g, const Stretch<const T> &row, int64_t origin, int thread, int threads,
                      const Loss &loss) {
    for (int e = thread; e < row.edges; e += threads)
        add_one(g, row.body[row.edge(e)], origin + row.head + row.edge(e), loss);
}

/* One thread's share of a stretch, which begins with the column `origin`; its first group has been loaded. */
template <int OPTIONS, typename T>
DEVICE Gathered<OPTIONS> gather(const Stretch<const T> &row, int64_t origin, Group<T, AHEAD<OPTIONS>> group, int thread,
                                int threads, const Loss &loss) {
    Gathered<OPTIONS> g = none<OPTIONS>();
    for (int64_t i = thread; i < row.packs;) {
        group.add_to(g, row, origin, i, threads, loss);
        i += AHEAD<OPTIONS> * threads;
        if (i < row.packs)
            group.load(row, i, threads);
    }
    add_edges(g, row, origin, thread, threads, loss);
    return g;
}

/* Over the block; every thread gets it. */
template <int OPTIONS> DEVICE Gathered<OPTIONS> merge_block(Gathered<OPTIONS> g, float scale) {
    __shared__ Gathered<OPTIONS> of_warp[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    g = merge_warp(g, scale);
    if (lane == 0)
        of_warp[warp] = g;
    __syncthreads();
    return merge_warp(lane < blockDim.x / WARP ? of_warp[lane] : none<OPTIONS>(), scale);
}

/* ---- gradient of columns --------------------------------------------------------------------- */

/* What is the same all along a row. */
struct alignas(16) Coefficients {
    RowGradient gradient;
    int64_t label;
};

template <int OPTIONS, typename T> struct RowWriter {
    const ColumnGradient<OPTIONS, T> columns;
    const RowGradient &row;
    const int64_t label;
    const Loss &loss;

    DEVICE RowWriter(const RowGradient &gradient, int64_t class_of_row, const Loss &call)
        : columns(gradient, call), row(gradient), label(class_of_row), loss(call) {
    }
    /* Of the pack that begins with `column`. */
    template <int N> DEVICE Pack<T, N> of(const Pack<T, N> &z, int64_t column) const {
        if (row.constant)
            return all_of<T, N>(row.p);
        float d[N];
        unpack(z, d);
#pragma unroll
        for (int j = 0; j < N; j++)
            d[j] = columns.of(d[j], column + j, loss);
        if (static_cast<uint64_t>(label - column) < N)
#pragma unroll
            for (int j = 0; j < N; j++)
                d[j] = column + j == label ? row.at_label : d[j];
        return packed<T>(d);
    }
    DEVICE T of_one(T z, int64_t column) const {
        return of(Pack<T, 1>{{z}}, column).v[0];
    }
    DEVICE void write_edges(T *dz, const Stretch<const T> &stretch, int thread, int threads) const {
        for (int e = thread; e < stretch.edges; e += threads) {
            const int64_t at = stretch.head + stretch.edge(e);
            dz[at] = of_one(stretch.body[stretch.edge(e)], at);
        }
    }
};

/* Label smoothing costs gradients nothing: they need no kernels of their own for it. */
template <int OPTIONS> constexpr int IN_BACKWARD = OPTIONS == FULL ? FULL : PLAIN;

/* ---- sums over rows -------------------------------------------------------------------------- */

/* What all gradients have in common, as common_upstream. To be called by all threads, behind the kernel before. */
DEVICE double common_factor(const Call &c) {
    Totals totals = {};
    if (c.loss.needs_totals())
        totals = c.loss.prepared ? c.loss.prepared->totals : count_in_block(c.loss);
    return common_upstream(c.loss, totals);
}

/* The end of a block's threads' rows; the last to arrive writes the loss. To be called by all threads. */
DEVICE void add_up(const Call &c, const Totals &mine) {
    if (!c.loss.loss.data || c.loss.reduction == RAFTER_NONE)
        return;
    Totals all = block_sum(mine);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0)
            c.of_block[blockIdx.x] = all;
        if (!block_arrives_last(c.counter, gridDim.x))
            return;
        all = {};
        for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
            all.loss += __ldcg(&c.of_block[i].loss);
            all.weight += __ldcg(&c.of_block[i].weight);
            all.counted += __ldcg(&c.of_block[i].counted);
        }
        all = block_sum(all);
    }
    if (threadIdx.x == 0)
        write_loss(c.loss, all);
}

/* ---- a warp to a row ------------------------------------------------------------------------- */

template <int OPTIONS, typename T> DEVICE Gathered<OPTIONS> gather_anyhow(const T *z, int lane, const Call &c) {
    Gathered<OPTIONS> g = none<OPTIONS>();
    for (int64_t v = lane; v < c.loss.classes; v += WARP)
        add_one(g, z[v * c.z_step], v, c.loss);
    return g;
}

/* FORWARD, GRADIENT: the call may be a forward one, and may want dz. ANYHOW: elements of any stride, one at a time. */
template <typename T, int OPTIONS, bool FORWARD, bool GRADIENT, bool ANYHOW>
__global__ __launch_bounds__(ROW_THREADS, 4) void by_warps(const __grid_constant__ Call c) {
    [[maybe_unused]] constexpr int N = WIDE<T>;
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const bool forward = FORWARD && loss.forward, gradient_wanted = GRADIENT && c.gradient;
    const int64_t first = (blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x) / WARP,
                  step = gridDim.x * int64_t(ROW_THREADS / WARP);
    Totals totals = {};
    double common = 0.0;
    for (int64_t row = first;; row += step) {
        const bool there = row < loss.rows;
        const T *const z = c.z.at<const T>(there ? row : 0);
        const Stretch<const T> stretch(z, ANYHOW || !there ? 0 : loss.classes);
        /* All that can be is on its way before any of it is looked at. */
        const int64_t loaded = there ? loss.load_label(row) : loss.ignore_index;
        const float given = GRADIENT && there && !forward && loss.lse.data ? loss.lse.get(row) : INFINITY;
        Group<T, AHEAD<OPTIONS>> group;
        group.load(stretch, lane, WARP);
        if (row == first) { /* all threads come here, even those that have no row */
            wait_for_previous_kernel();
            if (gradient_wanted)
                common = common_factor(c);
        }
        const int64_t label = loss.class_of(loaded);
        const float z_label = label >= 0 ? to_float(z[label * c.z_step]) : 0.0f;
        if (!there)
            break;

        RowGradient gradient = gradient_unread(label);
        if (label < 0) {
            if (lane == 0)
                write_unread(loss, row, label, &totals);
        } else if (GRADIENT && lse_serves<T>(given)) {
            gradient = gradient_from_lse(loss, common, row, label, z_label, given);
        } else {
            const Gathered<OPTIONS> g = merge_warp(ANYHOW ? gather_anyhow<OPTIONS>(z, lane, c)
                                                          : gather<OPTIONS>(stretch, 0, group, lane, WARP, loss),
                                                   loss.scale);
            const RowFigures figures = figures_of(g, z_label, loss);
            if (gradient_wanted)
                gradient = gradient_from_figures(loss, common, row, label, z_label, figures);
            if (forward && lane == 0)
                write_row(loss, row, label, results_of(loss, row, label, figures), &totals);
        }
        if (!gradient_wanted)
            continue;
        __syncwarp(); /* nobody writes dz over a logit that another lane has yet to read */
        T *const dz = c.dz.at<T>(row);
        const RowWriter<OPTIONS, T> writer(gradient, label, loss);
        if constexpr (ANYHOW) {
            for (int64_t v = lane; v < loss.classes; v += WARP)
                dz[v * c.dz_step] = writer.of_one(z[v * c.z_step], v);
        } else {
            for (int64_t i = lane; i < stretch.packs; i += AHEAD<OPTIONS> * WARP) {
                if (i >= AHEAD<OPTIONS> * WARP)
                    group.load(stretch, i, WARP);
#pragma unroll
                for (int k = 0; k < AHEAD<OPTIONS>; k++)
                    if (i + k * WARP < stretch.packs) {
                        const int64_t at = stretch.head + (i + k * WARP) * N;
                        store_once<T, N>(dz + at, writer.of(group.packs[k], at));
                    }
            }
            writer.write_edges(dz, stretch, lane, WARP);
        }
    }
    if (forward)
        add_up(c, totals);
}

/* ---- statistics, and what follows from them -------------------------------------------------- */

/* One of `parts` parts of a row, of `part` elements but for the last, to a block. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(MOST_THREADS, OPTIONS == FULL ? 2 : 3) void statistics(const __grid_constant__ Call c,
                                                                                    unsigned parts, int64_t part,
                                                                                    Gathered<OPTIONS> *of_part) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const unsigned row = blockIdx.x / parts;
    const int64_t from = (blockIdx.x - row * parts) * part;
    const int64_t n = from >= loss.classes ? 0 : loss.classes - from < part ? loss.classes - from : part;
    const Stretch<const T> stretch(c.z.at<const T>(row) + (n > 0 ? from : 0), n);
    const int64_t label = loss.load_label(row); /* before the row, or it would come behind it */
    Group<T, AHEAD<OPTIONS>> group;
    group.load(stretch, threadIdx.x, blockDim.x);
    wait_for_previous_kernel();
    if (loss.class_of(label) < 0)
        return;
    const Gathered<OPTIONS> g =
        merge_block(gather<OPTIONS>(stretch, from, group, threadIdx.x, blockDim.x, loss), loss.scale);
    if (threadIdx.x == 0)
        of_part[blockIdx.x] = g;
}

/* What on_chip is told of a row beside its logits. */
struct alignas(16) Terms {
    RowTerms terms;
    float z_label;
};

/* A thread to a row, whose parts are merged in their order. `of_row` gets the coefficients of its gradient, if it is
 * not NULL. `terms`, if not NULL, has the label's logit, which may be overwritten by now. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void finish(const __grid_constant__ Call c, unsigned parts,
                                                      const Gathered<OPTIONS> *of_part, const Terms *terms,
                                                      Coefficients *of_row) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t label = row < loss.rows ? loss.class_of(loss.load_label(row)) : IGNORED;
    float z_label = label >= 0 && !terms ? to_float(c.z.at<const T>(row)[label]) : 0.0f;
    wait_for_previous_kernel();
    const double common = of_row ? common_factor(c) : 0.0;
    Totals totals = {};
    if (row < loss.rows) {
        RowGradient gradient = gradient_unread(label);
        if (label >= 0) {
            Gathered<OPTIONS> g = of_part[row * parts];
            for (unsigned part = 1; part < parts; part++)
                g = merge(g, of_part[row * parts + part], loss.scale);
            if (terms)
                z_label = terms[row].z_label;
            const RowFigures figures = figures_of(g, z_label, loss);
            if (of_row)
                gradient = gradient_from_figures(loss, common, row, label, z_label, figures);
            if (loss.forward)
                write_row(loss, row, label, results_of(loss, row, label, figures), &totals);
        } else {
            write_unread(loss, row, label, &totals);
        }
        if (of_row)
            of_row[row] = {gradient, label};
    }
    if (loss.forward)
        add_up(c, totals);
}

/* ---- gradients from coefficients ------------------------------------------------------------- */

/* From lse, a thread to a row. Rows whose lse does not serve are read, by the whole warp. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(ROW_THREADS) void coefficients(const __grid_constant__ Call c, Coefficients *of_row) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int lane = threadIdx.x % WARP;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t loaded = row < loss.rows ? loss.load_label(row) : loss.ignore_index;
    const float lse = row < loss.rows ? loss.lse.get(row) : 0.0f;
    const int64_t label = loss.class_of(loaded);
    const float given = label >= 0 ? lse : 0.0f, z_label = label >= 0 ? to_float(c.z.at<const T>(row)[label]) : 0.0f;
    wait_for_previous_kernel();
    const double common = common_factor(c); /* while the label's logit is on its way */
    RowGradient gradient = gradient_unread(label);
    if (label >= 0 && lse_serves<T>(given))
        gradient = gradient_from_lse(loss, common, row, label, z_label, given);
    for (unsigned left = __ballot_sync(~0u, !lse_serves<T>(given)); left != 0; left &= left - 1) {
        const int of = __ffs(left) - 1;
        const Stretch<const T> stretch(c.z.at<const T>(row - lane + of), loss.classes);
        Group<T, AHEAD<OPTIONS>> group;
        group.load(stretch, lane, WARP);
        const Gathered<OPTIONS> g = merge_warp(gather<OPTIONS>(stretch, 0, group, lane, WARP, loss), loss.scale);
        if (lane == of)
            gradient = gradient_from_figures(loss, common, row, label, z_label, figures_of(g, z_label, loss));
    }
    if (row < loss.rows) {
        if (label < 0)
            write_unread(loss, row, label, nullptr);
        of_row[row] = {gradient, label};
    }
}

/* `parts` blocks to a row. */
template <typename T, int OPTIONS>
__global__ __launch_bounds__(GRADIENT_THREADS, 12) void gradients(const __grid_constant__ Call c,
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
    const Coefficients same = of_row[row];
    const RowWriter<OPTIONS, T> writer(same.gradient, same.label, c.loss);
#pragma unroll
    for (int k = 0; k < GRADIENT_PACKS; k++)
        if (first + k * GRADIENT_THREADS < stretch.packs) {
            const int64_t at = stretch.head + (first + k * GRADIENT_THREADS) * N;
            store_once<T, N>(dz + at, writer.of(packs[k], at));
        }
    if (part == 0)
        writer.write_edges(dz, stretch, threadIdx.x, GRADIENT_THREADS);
}

/* ---- rows held on chip ----------------------------------------------------------------------- */

/* A thread to a row. */
template <typename T>
__global__ __launch_bounds__(ROW_THREADS) void terms(const __grid_constant__ Call c, Terms *of_row) {
    start_next_kernel();
    const Loss &loss = c.loss;
    const int64_t row = blockIdx.x * int64_t(ROW_THREADS) + threadIdx.x;
    const int64_t label = row < loss.rows ? loss.class_of(loss.load_label(row)) : IGNORED;
    const float z_label = label >= 0 ? to_float(c.z.at<const T>(row)[label]) : 0.0f;
    wait_for_previous_kernel();
    const double common = common_factor(c); /* while the label's logit is on its way */
    if (label >= 0)
        of_row[row] = {terms_of(loss, common, row, label), z_label};
    else if (row < loss.rows && !loss.forward) /* else `finish` does it */
        write_unread(loss, row, label, nullptr);
}

/* How a block holds a row: so many packs of a thread in registers, the others in shared memory, of which it waits for
 * COPIED at a time. */
template <int MOST_THREADS_, int PER_SM_, int IN_REGISTERS_, int COPIED_> struct Shape {
    static constexpr int THREADS = MOST_THREADS_, PER_SM = PER_SM_, IN_REGISTERS = IN_REGISTERS_, COPIED = COPIED_;
};
/* From short rows to long ones. The first is for usual calls, the last, which holds rows that need every register too,
 * for the others. */
typedef Shape<256, 6, 2, 2> Sixth;
typedef Shape<512, 3, 2, 2> Third;
typedef Shape<512, 2, 4, 4> Half;
typedef Shape<512, 1, 4, 4> Whole;
typedef Shape<1024, 1, 4, 4> Crowded;

template <typename T, int OPTIONS, class Shape>
__global__ __launch_bounds__(Shape::THREADS, Shape::PER_SM) void on_chip(const __grid_constant__ Call c,
                                                                         const Terms *of_row,
                                                                         Gathered<OPTIONS> *stats) {
    extern __shared__ __align__(128) uint4 slot_memory[]; /* off a line, copies cost 9 % of the call */
    __shared__ Terms known;
    constexpr int N = WIDE<T>, OWN = Shape::IN_REGISTERS, COPIED = Shape::COPIED;
    const Loss &loss = c.loss;
    const int thread = threadIdx.x, threads = blockDim.x;
    const int64_t row = blockIdx.x;
    const Stretch<const T> stretch(c.z.at<const T>(row), loss.classes);
    T *const dz = c.dz.at<T>(row);
    const int64_t loaded = loss.load_label(row); /* before the row, or it would come behind it */
    Group<T, OWN> own;
    own.load(stretch, thread, threads);

    /* No other thread ever touches the slot of a pack: each waits for its own copies alone. */
    const int packs = static_cast<int>(stretch.packs), first = OWN * threads + thread, step = COPIED * threads;
    Pack<T, N> *const slots = reinterpret_cast<Pack<T, N> *>(slot_memory) - OWN * threads; /* of pack i: slots[i] */
    /* Up to here all threads have a whole group: no more questions. */
    const int whole = packs < OWN * threads ? 0 : packs - (packs - OWN * threads) % step;
    int groups = 0;
    const auto fetch = [&] {
        int i = first;
        for (; i < whole; i += step, groups++) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                copy_async<T, N>(slots + i + k * threads, stretch.body + int64_t(i + k * threads) * N);
            copy_commit();
        }
        for (; i < packs; i += threads)
            copy_async<T, N>(slots + i, stretch.body + int64_t(i) * N);
        copy_commit();
    };
    if (Shape::PER_SM == 1) /* alone on its SM: no other block makes use of the wait for the label */
        fetch();
    start_next_kernel();
    const int64_t label = loss.class_of(loaded);
    RowGradient gradient = gradient_unread(label);
    if (label >= 0) {
        if (Shape::PER_SM > 1)
            fetch();
        wait_for_previous_kernel();
        if (thread < static_cast<int>(sizeof known / 16))
            copy_async<uint32_t, 4>(reinterpret_cast<Pack<uint32_t, 4> *>(&known) + thread,
                                    reinterpret_cast<const uint32_t *>(of_row + row) + 4 * thread);
        copy_commit();
        Gathered<OPTIONS> g = none<OPTIONS>();
        add_edges(g, stretch, 0, thread, threads, loss);
        if (thread < packs)
            own.add_to(g, stretch, 0, thread, threads, loss);
        Group<T, COPIED> group;
        int i = first;
        for (; i < whole; i += step) {
            copy_wait_all_but(1 + groups--);
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                group.packs[k] = slots[i + k * threads];
            add(g, group.packs, COPIED, stretch.head + int64_t(i) * N, int64_t(threads) * N, loss);
        }
        copy_wait<0>();
        if (i < packs) {
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                group.packs[k] = i + k * threads < packs ? slots[i + k * threads] : all_of<T, N>(-INFINITY);
            group.add_to(g, stretch, 0, i, threads, loss);
        }
        g = merge_block(g, loss.scale);
        const float sum = g.s.max == INFINITY ? NAN : g.s.sum;
        if (sum == 0.0f)
            gradient = gradient_of_nothing();
        else
            gradient = gradient_of<OPTIONS == FULL>(loss, known.terms, known.z_label, g.s.max, 1.0f / sum,
                                                    loss.z_loss != 0.0f ? loss.scale * g.s.max + logf(sum) : 0.0f);
        if (thread == 0 && loss.forward)
            stats[row] = g;
    } else {
        copy_wait<0>();
        wait_for_previous_kernel();
    }
    const RowWriter<OPTIONS, T> writer(gradient, label, loss);
    T *const body = dz + stretch.head;
    if (gradient.constant) {
        for (int i = thread; i < packs; i += threads)
            store_once<T, N>(body + int64_t(i) * N, all_of<T, N>(gradient.p));
    } else {
        const auto write = [&](int i, const Pack<T, N> &pack) {
            store_once<T, N>(body + int64_t(i) * N, writer.columns.of(pack, stretch.head + int64_t(i) * N, loss));
        };
        int i = first;
        for (; i < whole; i += step)
#pragma unroll
            for (int k = 0; k < COPIED; k++)
                write(i + k * threads, load_once<T, N>(slots[i + k * threads].v));
        for (; i < packs; i += threads)
            write(i, load_once<T, N>(slots[i].v));
#pragma unroll
        for (int k = 0; k < OWN; k++)
            if (thread + k * threads < packs)
                write(thread + k * threads, own.packs[k]);
        /* The label's column once more, by the thread that has written its pack. */
        const int64_t at = label - stretch.head;
        if (at >= 0 && at < int64_t(packs) * N && static_cast<int>(at / N) % threads == thread)
            dz[label] = from_float<T>(gradient.at_label);
    }
    writer.write_edges(dz, stretch, thread, threads);
}

/* ---- before the rows ------------------------------------------------------------------------- */

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

#include "ops/cross_entropy/cuda_usual.cuh"

/* ---- how a call is cut ----------------------------------------------------------------------- */

enum Kind { IN_WARPS, BY_WARPS, FORWARD, FROM_LSE, ON_CHIP, READ_TWICE };

struct Plan {
    Kind kind; /* IN_WARPS: usual calls alone; BY_WARPS, READ_TWICE: no usual ones */
    Options options;
    bool usual; /* and `call` it is */
    Usual call;
    bool anyhow, prepares;
    int64_t warp_blocks;            /* IN_WARPS, BY_WARPS */
    int64_t parts, part;            /* statistics: of a row; elements of one */
    int threads;                    /* of statistics, or on_chip */
    int shape;                      /* on_chip: of Sixth, Third, ... */
    size_t shared;                  /* on_chip */
    int64_t row_blocks, grad_parts; /* blocks of kernels that take a thread to a row; of gradients to a row */
};

/* Whether a row of so many packs fits into one block of a shape, and how. */
template <class Shape> bool fits(const rafter_cuda_state *state, int64_t packs, Plan *plan) {
    const int64_t own = 2 << 10, reserved = 1 << 10; /* shared memory of the kernel's, and of the system's, per block */
    plan->threads = plan->usual ? Shape::THREADS : power_at_least(packs / 8, 64, Shape::THREADS);
    const int64_t slots = packs - Shape::IN_REGISTERS * plan->threads;
    plan->shared = slots > 0 ? static_cast<size_t>(slots) * 16 : 0;
    return int64_t(plan->shared) <= (state->shared_bytes + reserved) / Shape::PER_SM - reserved - own;
}

bool fits_on_chip(const rafter_cuda_state *state, int64_t packs, Plan *plan) {
    typedef bool Fits(const rafter_cuda_state *, int64_t, Plan *);
    Fits *const shapes[] = {fits<Sixth>, fits<Third>, fits<Half>, fits<Whole>, fits<Crowded>};
    for (plan->shape = plan->usual ? 0 : 1; plan->shape < 5; plan->shape++) {
        plan->usual = plan->usual && plan->shape < 4;
        if (shapes[plan->shape](state, packs, plan))
            return true;
    }
    return false;
}

/* Rows that are few are cut, so that all SMs have their part. By shape alone: the same bits everywhere. */
void cut_rows(int64_t rows, int64_t bytes, int element, Plan *plan) {
    const int64_t enough = ceil_div<int64_t>(1024, rows), most = bytes / (16 << 10);
    const int64_t parts = enough < most ? enough : most > 1 ? most : 1;
    plan->part = ceil_div<int64_t>(ceil_div<int64_t>(bytes / element, parts), 64) * 64; /* keeps the row's alignment */
    plan->parts = ceil_div<int64_t>(bytes / element, plan->part);
    plan->threads = power_at_least(plan->part * element / (16 * IN_FLIGHT), 64, MOST_THREADS);
}

Plan plan_call(const rafter_cuda_state *state, const cross_entropy_call *call, const Call &c) {
    const struct rafter_loss *loss = &call->loss;
    const int element = rafter_dtype_bytes(call->logits.dtype);
    const int64_t rows = loss->rows, bytes = loss->classes * element;
    const bool smooth = loss->smoothing != 0.0f, weights = smooth && c.loss.class_weight;
    const bool from_lse = !c.loss.forward && c.loss.lse.data;
    Plan plan = {};
    plan.options = loss->softcap != 0.0f || weights || c.loss.entropy.data || c.loss.argmax.data ? FULL
                   : smooth && c.loss.forward                                                    ? SMOOTH
                                                                                                 : PLAIN;
    plan.prepares = weights || (c.gradient && c.loss.needs_totals() && rows > SCANNED_ROWS);
    plan.row_blocks = rows > 0 ? ceil_div<int64_t>(rows, ROW_THREADS) : 1;
    plan.grad_parts = ceil_div<int64_t>(bytes, 16 * GRADIENT_THREADS * GRADIENT_PACKS);

    plan.usual = take_usual(c, &plan.call);
    plan.anyhow = c.z_step != 1 || (c.gradient && (c.dz_step != 1 || !packs_alike(call->logits, call->dlogits)));
    if (plan.usual && bytes / 16 <= (c.gradient ? 256 : 128)) {
        plan.kind = IN_WARPS;
        plan.warp_blocks = ceil_div<int64_t>(rows, ROW_THREADS / WARP);
    } else if (plan.anyhow || bytes <= 2048 ||
               (bytes <= 8192 && rows >= 2048 && (!c.gradient || from_lse) && !plan.usual)) {
        plan.kind = BY_WARPS;
        if (plan.anyhow)
            plan.options = FULL;
        const int64_t blocks = ceil_div<int64_t>(rows, ROW_THREADS / WARP), most = 8 * state->multiprocessors;
        plan.warp_blocks = blocks == 0 ? 1 : blocks < most ? blocks : most;
    } else if (from_lse) {
        plan.kind = FROM_LSE;
    } else if (c.gradient && 2 * rows >= state->multiprocessors && fits_on_chip(state, bytes / 16, &plan)) {
        plan.kind = ON_CHIP;
    } else {
        plan.kind = c.gradient ? READ_TWICE : FORWARD;
        if (rows > 0)
            cut_rows(rows, bytes, element, &plan);
        plan.usual = plan.usual && plan.kind == FORWARD && plan.parts == 1;
    }
    return plan;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* A call's scratch memory; what it does not need takes no room. */
struct Places {
    Totals *of_block;
    Prepared *prepared; /* the result, then what the blocks have found */
    void *stats;        /* Gathered of all rows, or their parts */
    Terms *terms;
    Coefficients *coefficients;
    double *losses; /* usual calls: of rows, or of blocks with their counts */
    UsualGradient *usual_coefficients;
};

size_t place(const Call &c, const Plan &plan, char *memory, Places *at) {
    size_t used = 0;
    const auto take = [&](bool needed, int64_t bytes) {
        char *const there = memory + used;
        used += needed ? static_cast<size_t>(ceil_div<int64_t>(bytes, 16) * 16) : 0;
        return needed ? static_cast<void *>(there) : nullptr;
    };
    const bool reduces = c.loss.loss.data && c.loss.reduction != RAFTER_NONE && !plan.usual;
    const bool warps = plan.kind == BY_WARPS || plan.kind == IN_WARPS;
    const int64_t rows = c.loss.rows, stats = plan.kind == ON_CHIP ? rows : rows * plan.parts;
    const size_t each = plan.options == FULL     ? sizeof(Gathered<FULL>)
                        : plan.options == SMOOTH ? sizeof(Gathered<SMOOTH>)
                                                 : sizeof(Gathered<PLAIN>);
    at->of_block = static_cast<Totals *>(
        take(reduces, (warps ? plan.warp_blocks : plan.row_blocks) * static_cast<int64_t>(sizeof(Totals))));
    at->prepared = static_cast<Prepared *>(take(plan.prepares, (1 + PREPARE_BLOCKS) * int64_t(sizeof(Prepared))));
    at->stats = take(!warps && plan.kind != FROM_LSE && !(plan.kind == ON_CHIP && !c.loss.forward) && !plan.usual,
                     stats * static_cast<int64_t>(each));
    at->terms =
        static_cast<Terms *>(take(plan.kind == ON_CHIP && !plan.usual, rows * static_cast<int64_t>(sizeof(Terms))));
    at->coefficients =
        static_cast<Coefficients *>(take((plan.kind == FROM_LSE && !plan.usual) || plan.kind == READ_TWICE,
                                         rows * static_cast<int64_t>(sizeof(Coefficients))));
    at->losses = static_cast<double *>(
        take(plan.usual && plan.kind != FROM_LSE, plan.kind == IN_WARPS ? plan.warp_blocks * int64_t(sizeof(double2))
                                                                        : (rows + 1) * int64_t(sizeof(double))));
    at->usual_coefficients = static_cast<UsualGradient *>(
        take(plan.kind == FROM_LSE && plan.usual, rows * static_cast<int64_t>(sizeof(UsualGradient))));
    return used;
}

/* Launches a call's kernels behind each other: all but the first overlap with the one before. */
struct Sequence {
    const rafter_context *context;
    bool first = true;

    template <typename... Wanted, typename... Given>
    void run(Launch how, void (*kernel)(Wanted...), const Given &...given) {
        how.overlaps = !first;
        first = false;
        launch(context, how, kernel, given...);
    }
};

template <typename T, int OPTIONS> void launch_by_warps(Sequence &sequence, const Call &c, const Plan &plan) {
    const Launch how = {plan.warp_blocks, ROW_THREADS};
    if (OPTIONS == FULL && plan.anyhow)
        sequence.run(how, by_warps<T, FULL, true, true, true>, c);
    else if (!c.gradient)
        sequence.run(how, by_warps<T, OPTIONS, true, false, false>, c);
    else if (c.loss.forward)
        sequence.run(how, by_warps<T, OPTIONS, true, true, false>, c);
    else
        sequence.run(how, by_warps<T, IN_BACKWARD<OPTIONS>, false, true, false>, c);
}

/* PACKS: of a row to a lane. */
template <typename T, int PACKS>
void launch_in_warps(Sequence &sequence, const Call &c, const Plan &plan, const Usual &u) {
    const Launch how = {plan.warp_blocks, ROW_THREADS};
    if (!c.gradient)
        sequence.run(how, usual_short_rows<T, PACKS, true, false>, u);
    else if (c.loss.forward)
        sequence.run(how, usual_short_rows<T, PACKS, true, true>, u);
    else
        sequence.run(how, usual_short_rows<T, PACKS, false, true>, u);
}

template <typename T>
void launch_usual(const rafter_context *context, const Call &c, const Plan &plan, const Places &at) {
    Sequence sequence = {context};
    Usual u = plan.call;
    u.losses = at.losses;
    const int64_t packs = u.classes / WIDE<T>;
    const Launch rows = {plan.row_blocks, ROW_THREADS}, one = {1, ONE_BLOCK};
    switch (plan.kind) {
    case IN_WARPS:
        if (packs <= 4 * WARP)
            launch_in_warps<T, 4>(sequence, c, plan, u);
        else
            launch_in_warps<T, 8>(sequence, c, plan, u);
        break;
    case FORWARD:
        if (packs <= 2 * 128)
            sequence.run(Launch{u.rows, 128}, usual_long_rows<T, 2>, u);
        else
            sequence.run(Launch{u.rows, power_at_least(packs / 4, 128, MOST_THREADS)}, usual_long_rows<T, 4>, u);
        if (u.loss)
            sequence.run(one, usual_sum, u);
        break;
    case FROM_LSE:
        sequence.run(rows, usual_coefficients<T>, u, at.usual_coefficients);
        sequence.run(Launch{u.rows * plan.grad_parts, GRADIENT_THREADS}, usual_gradients<T>, u,
                     Divisor(plan.grad_parts), at.usual_coefficients);
        break;
    default: {
        void (*const shapes[])(Usual, const double *) = {usual_on_chip<T, Sixth>, usual_on_chip<T, Third>,
                                                         usual_on_chip<T, Half>, usual_on_chip<T, Whole>};
        double *const factor = u.losses + u.rows;
        sequence.run(one, usual_factor, u, factor);
        sequence.run(Launch{u.rows, plan.threads, plan.shared}, shapes[plan.shape], u, factor);
        if (u.loss)
            sequence.run(one, usual_sum, u);
    }
    }
}

template <typename T, int OPTIONS>
void launch_rows(Sequence &sequence, const Call &c, const Plan &plan, const Places &at) {
    const Launch rows = {plan.row_blocks, ROW_THREADS}, gradient = {c.loss.rows * plan.grad_parts, GRADIENT_THREADS};
    Gathered<OPTIONS> *const stats = static_cast<Gathered<OPTIONS> *>(at.stats);
    const unsigned parts = plan.kind == ON_CHIP ? 1 : static_cast<unsigned>(plan.parts);
    if ((plan.kind == FORWARD || plan.kind == READ_TWICE) && c.loss.rows > 0)
        sequence.run(Launch{c.loss.rows * plan.parts, plan.threads}, statistics<T, OPTIONS>, c, parts, plan.part,
                     stats);
    if (plan.kind == FROM_LSE)
        sequence.run(rows, coefficients<T, IN_BACKWARD<OPTIONS>>, c, at.coefficients);
    if (plan.kind == ON_CHIP) {
        void (*const shapes[])(Call, const Terms *,
                               Gathered<OPTIONS> *) = {on_chip<T, OPTIONS, Third>, on_chip<T, OPTIONS, Half>,
                                                       on_chip<T, OPTIONS, Whole>, on_chip<T, OPTIONS, Crowded>};
        sequence.run(rows, terms<T>, c, at.terms);
        sequence.run(Launch{c.loss.rows, plan.threads, plan.shared}, shapes[plan.shape - 1], c, at.terms, stats);
    }
    if (plan.kind != FROM_LSE && (plan.kind != ON_CHIP || c.loss.forward))
        sequence.run(rows, finish<T, OPTIONS>, c, parts, stats, at.terms, at.coefficients);
    if (at.coefficients)
        sequence.run(gradient, gradients<T, IN_BACKWARD<OPTIONS>>, c, at.coefficients,
                     static_cast<unsigned>(plan.grad_parts));
}

template <typename T, int OPTIONS>
void launch_call(const rafter_context *context, Call &c, const Plan &plan, const Places &at) {
    Sequence sequence = {context};
    c.of_block = at.of_block;
    if (plan.prepares) {
        sequence.run(Launch{PREPARE_BLOCKS, PREPARE_THREADS}, prepare, c, at.prepared);
        c.loss.prepared = at.prepared;
    }
    if (plan.kind == BY_WARPS)
        launch_by_warps<T, OPTIONS>(sequence, c, plan);
    else
        launch_rows<T, OPTIONS>(sequence, c, plan, at);
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

    const Plan plan = plan_call(context->cuda_state, call, c);
    Places at;
    const size_t bytes = place(c, plan, nullptr, &at);
    return run_with_scratch(context, call, bytes, c.loss.forward ? "cross_entropy forward" : "cross_entropy backward",
                            [&](char *scratch) {
                                place(c, plan, scratch, &at);
                                for_dtype(call->logits.dtype, [&](auto zero) {
                                    typedef decltype(zero) T;
                                    if (plan.usual)
                                        return launch_usual<T>(context, c, plan, at);
                                    switch (plan.options) {
                                    case PLAIN: return launch_call<T, PLAIN>(context, c, plan, at);
                                    case SMOOTH: return launch_call<T, SMOOTH>(context, c, plan, at);
                                    default: return launch_call<T, FULL>(context, c, plan, at);
                                    }
                                });
                            });
}
