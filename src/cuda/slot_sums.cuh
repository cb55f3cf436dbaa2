/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax statistics of rows of any alignment, for batch-invariant calls. The bits of the result do not
 * depend on the alignment, and yet rows are read in aligned packs, as fast as without that guarantee.
 *
 * A granule is 16 aligned bytes of memory. Granule g of a row holds its elements [g N - shift, g N - shift + N),
 * where `shift` is the offset of the first element in its granule. Thread t takes granules t, t + threads, ...
 * It keeps N sums, the slots: slot j sums element j of its granules. So a slot sums the elements whose index
 * has one remainder modulo threads * N, in the order of their indices. The shift decides only which thread has
 * which remainder. In the end the slots are summed in the order of their remainders.
 *
 * A thread has no running maximum, because its terms would then depend on which elements it has. Instead all
 * terms have the same pivot: the largest of the row's first elements. If the row's maximum turns out to be far
 * from the pivot, the row is read once more, with the maximum as pivot.
 *
 * For 16-bit types, a term is 2^(rate x - offset) with rate = scale log2(e) and offset = rate pivot: one
 * instruction before the exponential instead of two. The rounding error of the offset is a factor of all terms,
 * which the last step divides out. If the error could be large, the row is read once more too, with terms
 * e^(scale (x - pivot)) (PRECISE).
 */
#ifndef RAFTER_CUDA_SLOT_SUMS_CUH
#define RAFTER_CUDA_SLOT_SUMS_CUH

#include <type_traits>

#include "cuda/indexed_rows.cuh"

/* The most threads of a block, and of a team (RowTeam) that takes a row, in kernels that only sum. With small teams,
 * more rows are in flight, which hides the latency at the start and the end of a row. */
constexpr int SLOT_THREADS = 256, SLOT_TEAM = 128;
constexpr int64_t SLOT_WARP_BYTES = 16 << 10; /* up to which a warp takes a row */

/* The largest scale * (maximum - pivot): no term exceeds e^40. The largest offset, for 16-bit types: its rounding error
 * is at most 2^-4. */
constexpr float MOST_DISTANCE = 40.0f, MOST_OFFSET = 0x1p20f;

/* The slots of one thread. TOTAL: also sums the elements themselves. */
template <typename T, bool TOTAL> struct SlotSums {
    static constexpr int N = WIDE<T>;
    float pivot, scale, max, sum[N], total[TOTAL ? N : 1];

    DEVICE SlotSums(float at, float by) : pivot(at), scale(by), max(-INFINITY), sum{}, total{} {
    }
    DEVICE float rate() const {
        return scale * LOG2E;
    }
    DEVICE float offset() const {
        return pivot * rate();
    }
    /* PRECISE: terms are precise for any offset. Elements that do not exist are -inf. present(k, j): whether element j
     * of pack k exists; called for TOTAL only. */
    template <bool PRECISE, int COUNT, typename Present>
    DEVICE void add(const Pack<T, N> (&packs)[COUNT], Present present) {
        max = fmaxf(max, max_of_all(packs));
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float x[N];
            unpack(packs[k], x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (NARROW<T> && !PRECISE)
                    sum[j] += exp2_fast(fmaf(x[j], rate(), -offset()));
                else
                    sum[j] += exp_term<T>(x[j] - pivot, scale);
                if constexpr (TOTAL)
                    total[j] += present(k, j) ? x[j] : 0.0f;
            }
        }
    }
    /* Whether sums that are not PRECISE are good enough for a row with this maximum. */
    DEVICE bool good_for(float row_max) const {
        const float distance = (row_max - pivot) * scale;
        return distance >= 0.0f && distance <= MOST_DISTANCE && (!NARROW<T> || fabsf(offset()) <= MOST_OFFSET);
    }
    /* What a sum of slots is multiplied by to become relative to the row's maximum instead of the pivot. */
    DEVICE float factor(float row_max, bool precise) const {
        return NARROW<T> && !precise ? exp2f(fmaf(-row_max, rate(), offset()))
                                     : expf((pivot - pivot_at(row_max)) * scale);
    }
};

/* The pivot of a row: the maximum of its first elements. Every warp of the team computes it by itself, with all lanes.
 * The constructor loads, value() computes, so that other loads can be issued in between. */
template <typename T> struct Pivot {
    static constexpr int EACH = 4;
    T x[EACH];

    template <bool ALIGNED> DEVICE explicit Pivot(const IndexedRow<T, ALIGNED> &row) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int e = k * WARP + static_cast<int>(threadIdx.x % WARP);
            x[k] = e < row.n ? row.first[e * row.step] : from_float<T>(-INFINITY);
        }
    }
    DEVICE float value() const {
        float max = -INFINITY;
#pragma unroll
        for (int k = 0; k < EACH; k++)
            max = fmaxf(max, to_float(x[k]));
        return pivot_at(warp_max(max));
    }
};

constexpr int64_t MOST_GRANULES = 1 << 30; /* a row has fewer */

/* The granules of a row. If its elements are not adjacent (strided), a granule is N elements with shift 0. */
template <typename T, bool ALIGNED> struct Granules {
    static constexpr int N = WIDE<T>;
    const IndexedRow<T, ALIGNED> &row;
    const bool adjacent;         /* whether the row's elements are */
    const int shift;             /* elements from the first granule's begin to the row's */
    const int count, begin, end; /* number of granules; those in [begin, end) lie within the row, if it is adjacent */

    DEVICE explicit Granules(const IndexedRow<T, ALIGNED> &of)
        : row(of), adjacent(ALIGNED || of.step == 1), shift(ALIGNED || of.step != 1 ? 0 : offset_in_pack(of.first)),
          count(static_cast<int>((of.n + shift + N - 1) / N)), begin(shift > 0),
          end(static_cast<int>((of.n + shift) / N)) {
    }
    /* A thread's first granule from `begin` on. */
    DEVICE int first_of(int thread, int threads) const {
        return thread < begin ? thread + threads : thread;
    }
    /* Loads granules g, g + threads, ...; those from `end` on are full of -inf. */
    template <int COUNT> DEVICE void load(Pack<T, N> (&group)[COUNT], int g, int threads) const {
        const Pack<T, N> *const base = reinterpret_cast<const Pack<T, N> *>(row.first - shift);
        if (g + (COUNT - 1) * threads < end) {
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                group[k] = load_once<T, N>(base[g + k * threads].v);
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++)
                group[k] = load_once_if<T, N>(g + k * threads < end, base[g + k * threads].v, -INFINITY);
        }
    }
    /* Adds a granule element by element: one that is only partly in the row, or whose elements are not adjacent. */
    template <bool PRECISE, bool TOTAL> DEVICE void add_some(SlotSums<T, TOTAL> &slots, int g) const {
        const int64_t first = int64_t(g) * N - shift;
        const auto present = [&](int, int j) { return first + j >= 0 && first + j < row.n; };
        Pack<T, N> pack[1] = {all_of<T, N>(-INFINITY)};
#pragma unroll
        for (int j = 0; j < N; j++)
            if (present(0, j))
                pack[0].v[j] = row.first[(first + j) * row.step];
        slots.template add<PRECISE>(pack, present);
    }
    /* Add the partial granule before `begin`, and that at `end`, by the thread that each belongs to. */
    template <bool PRECISE, bool TOTAL> DEVICE void add_before(SlotSums<T, TOTAL> &slots, int thread) const {
        if (!ALIGNED && thread < begin)
            add_some<PRECISE>(slots, thread);
    }
    template <bool PRECISE, bool TOTAL>
    DEVICE void add_after(SlotSums<T, TOTAL> &slots, int thread, int threads) const {
        if (begin <= end && end < count && (end & (threads - 1)) == thread)
            add_some<PRECISE>(slots, end);
    }
};

/* ---- merging --------------------------------------------------------------------------------- */

/* w[j] = w[j + by] for j < N, where DOUBLE is 2 N, BIT is N / 2 and by < N. */
template <int BIT, int DOUBLE> DEVICE void rotate(float (&w)[DOUBLE], int by) {
    if constexpr (BIT > 0) {
        if (by & BIT)
#pragma unroll
            for (int j = 0; j < DOUBLE - BIT; j++)
                w[j] = w[j + BIT];
        rotate<BIT / 2>(w, by);
    }
}

/* What the warps of a block exchange through shared memory. Not reused, so a kernel can do this only once. */
template <int N> struct WarpSums {
    float max[WARP], sum[WARP], total[WARP];
    float first_sum[WARP][N], first_total[WARP][N]; /* slots of each warp's first lane */
};

/* The sum of this warp's slots, in the order of their remainders. A thread's slots below `shift` come after the last
 * slots of the thread before it. So each thread sums its slots from `shift` on and the first `shift` slots of the next
 * thread. `first`: first_sum or first_total of WarpSums, read if the team is a block. */
template <int N>
DEVICE float sum_slots(const RowTeam &team, const float (&slot)[N], int shift, const float (*first)[N]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float w[2 * N]; /* this thread's slots, then the next thread's */
#pragma unroll
    for (int j = 0; j < N; j++) {
        w[j] = slot[j];
        w[N + j] = 0.0f;
    }
    if (shift != 0) {
#pragma unroll
        for (int j = 0; j < N; j++)
            w[N + j] = __shfl_sync(~0u, slot[j], (lane + 1) % WARP);
        if (!team.is_warp() && lane == WARP - 1) {
            const float *const of_next_warp = first[(warp + 1) & (team.threads / WARP - 1)];
#pragma unroll
            for (int j = 0; j < N; j++)
                w[N + j] = of_next_warp[j];
        }
        rotate<N / 2>(w, shift);
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j += 4)
        sum += (w[j] + w[j + 1]) + (w[j + 2] + w[j + 3]);
    return warp_sum(sum);
}

/* The same for all warps of a block, in their order. Called by all threads, once per kernel; all of them get the
 * sum. */
template <int N> DEVICE float sum_block_slots(const float (&slot)[N], int shift) {
    __shared__ float first[WARP][N], warp_sums[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const RowTeam team = {static_cast<int>(blockDim.x)};
    if (lane == 0)
#pragma unroll
        for (int j = 0; j < N; j++)
            first[warp][j] = slot[j];
    __syncthreads();
    const float sum = sum_slots(team, slot, shift, first);
    if (lane == 0)
        warp_sums[warp] = sum;
    __syncthreads();
    return warp_sum(lane < team.threads / WARP ? warp_sums[lane] : 0.0f);
}

/* The statistics of a row, and the sum of its elements if TOTAL. */
struct RowSums {
    RowStats stats;
    float total;
};

/* The sums of a row, from the slots of its threads. Every thread gets the result. redo() sums the row again, PRECISE,
 * with the pivot that it finds in `slots`. Called once per kernel. */
template <typename T, bool TOTAL, typename Redo>
DEVICE RowSums merge_slots(const RowTeam &team, SlotSums<T, TOTAL> &slots, int shift, Redo redo) {
    constexpr int N = WIDE<T>;
    __shared__ WarpSums<N> of;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = team.threads / WARP;
    const bool is_block = !team.is_warp();
    const auto publish = [&] {
        if (is_block && lane == 0) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                of.first_sum[warp][j] = slots.sum[j];
                if constexpr (TOTAL)
                    of.first_total[warp][j] = slots.total[j];
            }
        }
    };
    float max = warp_max(slots.max);
    if (is_block && lane == 0)
        of.max[warp] = max;
    publish();
    if (is_block) {
        __syncthreads();
        max = warp_max(lane < warps ? of.max[lane] : -INFINITY);
    }
    const bool precise = !slots.good_for(max);
    if (precise) {
        slots = SlotSums<T, TOTAL>(pivot_at(max), slots.scale);
        redo();
        publish(); /* no barrier needed before: nobody has read the first ones */
        if (is_block)
            __syncthreads();
    }
    float sum = sum_slots(team, slots.sum, shift, of.first_sum), total = 0.0f;
    if constexpr (TOTAL)
        total = sum_slots(team, slots.total, shift, of.first_total);
    if (is_block) {
        if (lane == 0) {
            of.sum[warp] = sum;
            of.total[warp] = total;
        }
        __syncthreads();
        sum = warp_sum(lane < warps ? of.sum[lane] : 0.0f);
        if constexpr (TOTAL)
            total = warp_sum(lane < warps ? of.total[lane] : 0.0f);
    }
    return {{max, sum * slots.factor(max, precise)}, total};
}

/* The sums of a row. Called by all threads of its team, once per kernel; all of them get the result. COUNT: granules
 * that a thread loads at a time; has no effect on the result. wanted() is called after the first loads. If it returns
 * false, the row is not needed, and the result is undefined. */
template <bool TOTAL, int COUNT, typename T, bool ALIGNED, typename Wanted>
DEVICE RowSums slot_stats(const RowTeam &team, const IndexedRow<T, ALIGNED> &row, float scale, Wanted wanted) {
    constexpr int N = WIDE<T>;
    const Granules<T, ALIGNED> granules(row);
    const int thread = team.thread(), threads = team.threads, end = granules.end;
    Pack<T, N> group[COUNT];
    int g = granules.first_of(thread, threads);
    if (granules.adjacent && g < end)
        granules.load(group, g, threads);
    SlotSums<T, TOTAL> slots(Pivot<T>(row).value(), scale);
    if (!wanted())
        return {};
    const auto add_all = [&](auto precise) {
        constexpr bool PRECISE = decltype(precise)::value;
        if (!granules.adjacent) {
            for (int i = thread; i < granules.count; i += threads)
                granules.template add_some<PRECISE>(slots, i);
            return;
        }
        granules.template add_before<PRECISE>(slots, thread);
        while (g < end) {
            slots.template add<PRECISE>(group, [&](int k, int) { return g + k * threads < end; });
            g += COUNT * threads;
            if (g < end)
                granules.load(group, g, threads);
        }
        granules.template add_after<PRECISE>(slots, thread, threads);
    };
    add_all(std::false_type());
    return merge_slots(team, slots, granules.shift, [&] {
        g = granules.first_of(thread, threads);
        if (granules.adjacent && g < end)
            granules.load(group, g, threads);
        add_all(std::true_type());
    });
}

#endif
