/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients of rows that lie side by side (slabs.cuh), element by element. A thread works down a column of
 * packs. The elements of its packs belong to the same rows in every step, so the thread loads what the
 * gradient needs of these rows once and keeps it in registers.
 *
 * Columns and steps are cut as in slab_tiles.cuh: a step is one of the reduced dimension if those consist of
 * aligned packs; in other dense slabs it is lcm(inner, N) elements of the slab's span, whatever its alignment;
 * other layouts have packs of one element. `chains` threads share a column: each takes every chains-th step.
 * Threads are numbered along the columns, then over chains, then over slabs, without gaps.
 *
 * An Op says what the gradient is:
 *
 *     bool LABELS    whether a row may have one element, at its label, with a gradient of its own
 *     void begin()   called after the first loads: waits for the previous kernel
 *     template <int N> struct Lines { set(op, thread); Pack<T, N> of(op, pack, first, skips) }
 *                    set: loads what the rows of a thread need. thread: a ColumnThread. of: the gradients of a
 *                    pack. first: the number of its first element in that element's row. skips: see Skips
 *     T of_one(int64_t row, T x, int64_t at)    the gradient of one edge element, number `at` of its row
 *     int label(int64_t row)    the number of the label's element; -1: none
 *     const float2 *end(int64_t row)            the address of what only the gradient at the label needs
 *     T Lines::at_label(op, j, x, label, end)   the gradient at the label of row j of the thread
 */
#ifndef RAFTER_CUDA_SLAB_COLUMNS_CUH
#define RAFTER_CUDA_SLAB_COLUMNS_CUH

#include <type_traits>

#include "cuda/slab_kernels.cuh"

constexpr int COLUMN_BLOCK = 256;

/* Packs that a thread loads before it uses the first one, usually. */
template <int N> constexpr int COLUMN_STEPS = N == 1 ? 16 : 4;

/* As a kernel argument. Index 0: the input, 1: its gradient. Strides are in elements. */
struct SlabColumns {
    Slabs slabs;
    int elements;                      /* per pack: WIDE, or 1 */
    bool dense;                        /* packs are those of the slabs' spans */
    bool shifted;                      /* aligned packs of the input are not aligned in the gradient */
    int columns, chains, steps;        /* columns of packs per slab; threads per column; steps per column, at most */
    int most;                          /* steps per thread, at most */
    int log2_rows;                     /* a step has 2^log2_rows elements of each row */
    int64_t stride[2], pack_stride[2]; /* between steps, between columns */
    int64_t threads;                   /* of all slabs */
    /* by_slab: threads of a slab. by_turn: elements of a row from one step of a thread to its next one. */
    Divisor by_slab, by_columns, by_chains, by_inner, by_turn;
};

/* ---- host ------------------------------------------------------------------------------------ */

/* For slabs that are not too_large. */
static inline SlabColumns slab_columns_of(const Slabs &s, int bytes) {
    /* WAVE: the threads that an H200 runs at once, 768 per multiprocessor. BLOCKS: one block for each multiprocessor.
     * Before its first step a thread loads what it needs of its rows; SEVERAL steps should follow to pay for that. */
    constexpr int64_t WAVE = 132 * 768, BLOCKS = 132 * COLUMN_BLOCK, SEVERAL = 4,
                      MOST = 128; /* MOST: see ColumnLabels::turns */
    const int64_t wide = 16 / bytes, common = gcd_of(s.inner, wide), period = s.inner / common;
    const bool across = s.inner > 1 && s.packs_across(0, bytes) && s.packs_across(1, bytes);
    SlabColumns t = {};
    t.slabs = s;
    t.dense = !across && s.dense(0) && s.dense(1) && period * wide < INT32_MAX && s.slab_elements() / wide < INT32_MAX;
    t.elements = static_cast<int>(across || t.dense ? wide : 1);
    int64_t columns = s.inner / t.elements, steps = s.length;
    for (int i = 0; i < 2; i++) {
        t.stride[i] = s.step[i];
        t.pack_stride[i] = s.across[i] * t.elements;
    }
    if (t.dense) {
        t.shifted = (s.data[0] - s.data[1]) % 16 != 0;
        for (int d = 0; d < s.walk.dims; d++)
            t.shifted = t.shifted || (s.walk.stride[0][d] - s.walk.stride[1][d]) * bytes % 16 != 0;
        columns = max(min(period, s.slab_elements() / wide), int64_t(1));
        steps = ceil_div(s.slab_elements(), columns * wide);
        while (1 << t.log2_rows < wide / common)
            t.log2_rows++;
        t.stride[0] = t.stride[1] = columns * wide;
        t.pack_stride[0] = t.pack_stride[1] = wide;
    }
    const int64_t packs = s.outer * columns * steps;
    const int64_t each = max(min(max(ceil_div(packs, WAVE), min(packs / BLOCKS, SEVERAL)), MOST), int64_t(1));
    /* Eight threads read adjacent packs, 128 bytes, if that leaves several steps for each. */
    const int64_t adjacent = min(steps / SEVERAL, ceil_div<int64_t>(8, columns));
    const int64_t chains = max(ceil_div(steps, each), adjacent);
    t.columns = static_cast<int>(columns);
    t.chains = static_cast<int>(chains);
    t.steps = static_cast<int>(steps);
    t.most = static_cast<int>(ceil_div(steps, chains));
    t.threads = s.outer * columns * chains;
    t.by_slab = Divisor(columns * chains);
    t.by_columns = Divisor(columns);
    t.by_chains = Divisor(chains);
    t.by_inner = Divisor(s.inner);
    t.by_turn = Divisor(chains << t.log2_rows);
    return t;
}

/* Whether there are more threads than 31 bits can count. */
static inline bool columns_too_many(const SlabColumns &t) {
    return t.threads > INT32_MAX - COLUMN_BLOCK;
}

/* Calls f(std::integral_constant<int, N>(), std::bool_constant<SHIFTED>()). */
template <typename T, typename F> static void for_columns_of(const SlabColumns &t, F f) {
    if (t.elements == 1)
        f(std::integral_constant<int, 1>(), std::false_type());
    else if (t.shifted)
        f(std::integral_constant<int, WIDE<T>>(), std::true_type());
    else
        f(std::integral_constant<int, WIDE<T>>(), std::false_type());
}

/* ---- device ---------------------------------------------------------------------------------- */

/* A pack's elements lie in adjacent rows, and after the slab's last row comes the next element of its first one. So the
 * number of element j in its row is that of element 0 in its own row, plus of(j). Stored in 4 bits each. */
struct Skips {
    unsigned bits;

    DEVICE int of(int j) const {
        return static_cast<int>(bits >> (4 * j) & 15);
    }
};

/* What a thread works on. */
template <typename T, int N> struct ColumnThread {
    const SlabColumns &t;
    bool active;
    int chain, pack;   /* its steps are chain, chain + chains, ... of column `pack` */
    int index;         /* among the threads of the slab */
    int64_t offset[3]; /* of the slab: see Slabs::walk */
    const T *begin;    /* of the slab */
    T *grad_begin;
    int head, edges, steps; /* elements before the first pack; before and after all packs; steps of the column */
    int count;              /* steps of this thread */
    int first, column;      /* the column's very first element: its number in its row; which row of the slab that is */
    Skips skips;

    DEVICE ColumnThread(const SlabColumns &columns, int64_t number)
        : t(columns), active(number < columns.threads), head(0), edges(0), steps(columns.steps), skips({0}) {
        const unsigned all = active ? static_cast<unsigned>(number) : 0, slab = t.by_slab.quotient(all);
        index = static_cast<int>(all - slab * t.by_slab.number);
        chain = static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(index)));
        pack = index - chain * t.columns;
        t.slabs.walk.offsets(slab, offset);
        begin = t.slabs.at<const T>(0, offset[0]);
        grad_begin = t.slabs.at<T>(1, offset[1]);
        if (N > 1 && t.dense) {
            const AlignedSpan<const T> span(begin, elements());
            head = span.head;
            edges = span.edges;
            const int after = static_cast<int>(span.packs) - 1 - pack;
            steps = after < 0 ? 0 : 1 + static_cast<int>(t.by_columns.quotient(static_cast<unsigned>(after)));
        }
        count = !active || steps <= chain
                    ? 0
                    : 1 + static_cast<int>(t.by_chains.quotient(static_cast<unsigned>(steps - 1 - chain)));
        const int place = head + pack * N;
        first = static_cast<int>(t.by_inner.quotient(static_cast<unsigned>(place)));
        column = place - first * inner();
    }
    DEVICE int inner() const {
        return static_cast<int>(t.slabs.inner);
    }
    DEVICE int64_t elements() const {
        return t.slabs.length * t.slabs.inner;
    }
    DEVICE int64_t row(int of_slab) const {
        return offset[2] + of_slab * t.slabs.row_step;
    }
    /* Where element `at` of a row is, in the input (0) or in its gradient (1). */
    DEVICE int64_t place(int tensor, int of_slab, int at) const {
        return of_slab * t.slabs.across[tensor] + at * t.slabs.step[tensor];
    }
    /* Calls f(j, row of the slab) for each element j of the thread's packs. */
    template <typename F> DEVICE void for_lines(F f) const {
        int of_slab = column;
#pragma unroll
        for (int j = 0; j < N; j++) {
            f(j, of_slab);
            of_slab = of_slab + 1 == inner() ? 0 : of_slab + 1;
        }
    }
    DEVICE void set_skips() {
        int skipped = 0;
        for_lines([&](int j, int of_slab) {
            skips.bits |= static_cast<unsigned>(skipped) << (4 * j);
            skipped += of_slab + 1 == inner();
        });
    }
    /* In which of its steps (0, 1, ...) the thread has element number `at` of its row j; -1: in none. */
    DEVICE int turn_of(int j, int at) const {
        const int later = at - (chain << t.log2_rows) - first - skips.of(j);
        const unsigned turn = t.by_turn.quotient(static_cast<unsigned>(later));
        const bool mine = later >= 0 && turn * t.by_turn.number == static_cast<unsigned>(later) &&
                          turn < static_cast<unsigned>(count);
        return mine ? static_cast<int>(turn) : -1;
    }
};

/* The labels of the rows that a thread has elements of. A turn is one of the thread's steps, counted from 0. */
template <typename T, int N> struct ColumnLabels {
    static constexpr int WORDS = N < 4 ? 1 : N / 4;
    unsigned turns[WORDS]; /* a byte per row: the turn in which the thread has its label; 255: never */

    /* Loads them. `ends`: Op::end of the rows of all threads, in shared memory. It is copied asynchronously; `correct`
     * waits for it. */
    template <class Op> DEVICE void load(const Op &op, const ColumnThread<T, N> &own, Pack<float, 2> *ends) {
        own.for_lines([&](int j, int of_slab) {
            copy_async(&ends[j * COLUMN_BLOCK + threadIdx.x], &op.end(own.row(of_slab))->x);
        });
        copy_commit();
        int labels[N];
        own.for_lines([&](int j, int of_slab) { labels[j] = op.label(own.row(of_slab)); });
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            turns[i] = ~0u;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int turn = own.turn_of(j, labels[j]);
            if (turn >= 0)
                turns[j / 4] ^= static_cast<unsigned>(255 ^ turn) << (8 * (j % 4));
        }
    }
    /* Whether any row has its label in this turn. Sets bit 8 k + 7 of found[i] if row 4 i + k has. */
    DEVICE bool find(int turn, unsigned (&found)[WORDS]) const {
        unsigned any = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const unsigned differs = turns[i] ^ static_cast<unsigned>(turn) * 0x01010101u;
            found[i] = ~(((differs & 0x7f7f7f7fu) + 0x7f7f7f7fu) | differs | 0x7f7f7f7fu);
            any |= found[i];
        }
        return any != 0;
    }
    /* Replaces the gradients at labels in `out`. x: the pack. `first`: the number of its first element in its row. */
    template <class Op, class Lines>
    DEVICE void correct(const Op &op, const Lines &lines, Pack<T, N> &out, const Pack<T, N> &x,
                        const unsigned (&found)[WORDS], int first, const Skips &skips,
                        const Pack<float, 2> *ends) const {
        copy_wait<0>();
#pragma unroll
        for (int j = 0; j < N; j++)
            if (found[j / 4] >> (8 * (j % 4) + 7) & 1) {
                const Pack<float, 2> end = ends[j * COLUMN_BLOCK + threadIdx.x];
                out.v[j] = lines.at_label(op, j, x.v[j], first + skips.of(j), make_float2(end.v[0], end.v[1]));
            }
    }
};

/* The body of a kernel. N, SHIFTED: SlabColumns::elements and shifted. */
template <class Op, typename T, int N, bool SHIFTED, int STEPS = COLUMN_STEPS<N>>
DEVICE void slab_column_gradients(const Op &op, const SlabColumns &t) {
    ColumnThread<T, N> own(t, int64_t(blockIdx.x) * COLUMN_BLOCK + threadIdx.x);
    if (!SHIFTED && !own.active)
        return;
    const T *x = own.begin + own.head + own.pack * t.pack_stride[0] + own.chain * t.stride[0];
    T *dx = own.grad_begin + own.head + own.pack * t.pack_stride[1] + own.chain * t.stride[1];
    const int64_t ahead = t.chains * t.stride[0], grad_ahead = t.chains * t.stride[1];
    Pack<T, N> packs[STEPS];
    const auto load = [&](int done) {
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            if (done + k < own.count)
                packs[k] = load_once<T, N>(x + k * ahead);
    };
    load(0);
    op.begin();
    own.set_skips();
    __shared__ Pack<float, 2> ends[Op::LABELS ? N * COLUMN_BLOCK : 1];
    ColumnLabels<T, N> labels;
    if constexpr (Op::LABELS)
        labels.load(op, own, ends);
    typename Op::template Lines<N> lines;
    lines.set(op, own);

    /* Shifted packs: all threads of a warp take the same number of turns, because they exchange elements. */
    int step = own.chain;
#pragma unroll 1
    for (int done = 0; done < (SHIFTED ? t.most : own.count); done += STEPS) {
        if (done > 0)
            load(done);
#pragma unroll
        for (int k = 0; k < STEPS; k++, step += t.chains) {
            const bool valid = done + k < own.count;
            if (!SHIFTED && !valid)
                continue;
            const int first = (step << t.log2_rows) + own.first;
            Pack<T, N> out = lines.of(op, packs[k], first, own.skips);
            if constexpr (Op::LABELS) {
                unsigned found[ColumnLabels<T, N>::WORDS];
                if (labels.find(done + k, found))
                    labels.correct(op, lines, out, packs[k], found, first, own.skips, ends);
            }
            if constexpr (N == 1)
                dx[k * grad_ahead] = out.v[0];
            else if constexpr (SHIFTED)
                store_shifted<T, N>(dx + k * grad_ahead, out, valid, step * t.columns + own.pack);
            else
                store_once<T, N>(dx + k * grad_ahead, out);
        }
        x += STEPS * ahead;
        dx += STEPS * grad_ahead;
    }
    if (own.active)
        for (int e = own.index; e < own.edges; e += t.columns * t.chains) {
            const int64_t at = e < own.head ? e : own.elements() - (own.edges - e);
            const int of_slab = row_of_edge(e, own.head, own.edges, own.inner());
            own.grad_begin[at] = op.of_one(own.row(of_slab), own.begin[at], (at - of_slab) / own.inner());
        }
}

#endif
