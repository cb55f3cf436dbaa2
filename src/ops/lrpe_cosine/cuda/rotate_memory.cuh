/* SPDX-License-Identifier: Apache-2.0 */
/* How `rotate` (rotate.cuh) reads and writes memory: which part of the call a thread takes (RotatePlace), the pipeline
 * of its loads (Pipeline, Inputs), and its stores. */
#ifndef RAFTER_LRPE_COSINE_CUDA_ROTATE_MEMORY_CUH
#define RAFTER_LRPE_COSINE_CUDA_ROTATE_MEMORY_CUH

#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* Blocks per multiprocessor. As all numbers in Pipeline, the fastest by measurement. */
constexpr int rotate_blocks(bool forward, int f, bool dtheta, bool shifted) {
    const bool block = f == BLOCK_SOFTMAX;
    return !forward && (shifted || block || dtheta) ? 2 : shifted || block || f == COLUMN_STATISTICS ? 3 : 4;
}
/* SEQUENCES: a group of sequences whose packs a thread works on at a time. STAGES: groups in shared memory, which are
 * being copied or worked on. cp.async cannot copy a single element of 2 bytes, and shifted packs are loaded into
 * registers: these have no stages. Instead, a larger group of single elements is loaded at a time. */
template <typename T, int N, bool FORWARD, int F, bool DTHETA, bool SHIFTED> struct Pipeline {
    static constexpr bool ASYNC = !SHIFTED && sizeof(Pack<T, N>) >= 4;
    static constexpr int INPUTS = FORWARD ? 1 : 3;
    static constexpr int SEQUENCES = !ASYNC && !SHIFTED ? 4 : FORWARD && !(SHIFTED && F == COLUMN_STATISTICS) ? 2 : 1;
    static constexpr int STAGES = ASYNC ? 4 : 0;
    static constexpr bool BLOCK = F == BLOCK_SOFTMAX;
    static constexpr int BLOCKS_PER_SM = rotate_blocks(FORWARD, F, DTHETA, SHIFTED);
    typedef Pack<T, N> Stage[SEQUENCES][INPUTS][THREADS];       /* threads use their own packs only */
    static constexpr int ANGLES = N * (BLOCK ? THREADS : WARP); /* entries of the table of angles */
    static constexpr size_t STAGED = STAGES * sizeof(Stage),
                            BYTES = STAGED + ANGLES * AngleTable<T>::BYTES; /* of dynamic shared memory */
};

/* N elements at any address: load() loads the two aligned packs that contain them, take() shifts. */
template <typename T, int N> struct ShiftedPack {
    const T *from;
    Pack<T, N> low, high;

    /* Loads the first `count` elements; the others become `instead`. Nothing outside of the tensor, [begin, end), is
     * read. */
    DEVICE void load(const T *first, int count, const T *begin, const T *end, float instead) {
        from = first;
        const int shift = offset_in_pack(from);
        const T *const aligned = from - shift;
        low = load_once_if<T, N>(count > 0 && aligned >= begin && aligned + N <= end, aligned, instead);
        high = load_once_if<T, N>(shift + count > N && aligned + 2 * N <= end, aligned + N, instead);
    }
    DEVICE Pack<T, N> take(int count, const T *begin, const T *end, float instead) const {
        const int shift = offset_in_pack(from);
        const T *const aligned = from - shift;
        Pack<T, N> pack = low;
        if (shift != 0)
            reinterpret_cast<uint4 &>(pack) =
                shifted(reinterpret_cast<const uint4 &>(low), reinterpret_cast<const uint4 &>(high),
                        shift * static_cast<int>(sizeof(T)));
        if (count > 0 && (aligned < begin || aligned + (shift + count > N ? 2 * N : N) > end))
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j < count)
                    pack.v[j] = from[j];
        if (count < N)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j >= count)
                    pack.v[j] = from_float<T>(instead);
        return pack;
    }
};

/* The part of the call that a block, and a thread of it, works on. */
template <typename T, int N, bool SHIFTED> struct RotatePlace {
    unsigned chunk, tile;
    int64_t first_token, end_token; /* of the block */
    int64_t first_b;                /* the block's first sequence */
    int sequences;                  /* of the block */
    int64_t h, d;                   /* the thread's head and first feature */
    bool active;                    /* whether they exist */
    /* SHIFTED: features that the thread has; that the next lane has, if they follow in the same head, else 0; whether
     * the previous lane has the features before, of the same head. */
    int count, next_count;
    bool has_previous;

    DEVICE RotatePlace(const Arguments<T> &a, const Tiling &tiling, int column) {
        chunk = tiling.tiles.quotient(blockIdx.x);
        tile = blockIdx.x - chunk * tiling.tiles.number;
        const unsigned sequence_chunk = tiling.token_chunks.quotient(chunk);
        first_token = (int64_t)(chunk - sequence_chunk * tiling.token_chunks.number) * tiling.tokens;
        end_token = first_token + tiling.tokens < a.length ? first_token + tiling.tokens : a.length;
        first_b = (int64_t)sequence_chunk * tiling.sequences;
        const int64_t left = a.batch - first_b;
        sequences = left < tiling.sequences ? (int)left : tiling.sequences;
        const Tiling::Place first = tiling.place<N>(tile, column, 0);
        h = first.h;
        d = first.d;
        active = h < a.heads && d < a.features;
        if constexpr (SHIFTED) {
            const int left_in_head = active ? static_cast<int>(a.features - d) : 0, lane = threadIdx.x % WARP;
            const bool has_next = lane < WARP - 1 && column + 1 < tiling.width();
            count = min(left_in_head, N);
            next_count = has_next ? min(max(left_in_head - N, 0), N) : 0;
            has_previous = lane > 0 && column > 0 && d > 0;
        }
    }
    /* The offset of the thread's first feature, for token n of the block's first sequence. */
    DEVICE int64_t offset(int64_t n, const Strides &stride) const {
        return first_b * stride.b + n * stride.n + h * stride.h + d * stride.d;
    }
    /* Stores a pack, if `valid`, which is the same for all lanes of a row. Called by whole warps. SHIFTED: each lane
     * completes an aligned pack with the first elements of the next lane; elements at the ends of a row are stored one
     * by one. */
    DEVICE void store(T *to, const Pack<T, N> &pack, bool valid) const {
        if constexpr (SHIFTED) {
            const uint4 &own = reinterpret_cast<const uint4 &>(pack);
            const uint4 next = {__shfl_down_sync(~0u, own.x, 1), __shfl_down_sync(~0u, own.y, 1),
                                __shfl_down_sync(~0u, own.z, 1), __shfl_down_sync(~0u, own.w, 1)};
            const int skip = -offset_in_pack(to) & (N - 1); /* elements before the first aligned one */
            if (!valid)
                return;
            int begin = 0, end = count; /* what is stored one by one */
            if (skip == 0 ? count == N : next_count >= skip) {
                const uint4 aligned = skip == 0 ? own : shifted(own, next, skip * static_cast<int>(sizeof(T)));
                store_once(to + skip, reinterpret_cast<const Pack<T, N> &>(aligned));
                end = skip;
            }
            if (has_previous && count >= skip)
                begin = skip;
            if (begin < end)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (j >= begin && j < end)
                        to[j] = pack.v[j];
        } else if (valid) {
            store_once(to, pack);
        }
    }
};

/* What takes the place of missing elements of x (input 0) or dy, because it adds nothing to any sum. */
DEVICE float neutral(bool softmax, int input) {
    return softmax && input == 0 ? -INFINITY : 0.0f;
}

/* The packs that a thread works on, in this order: all groups of SEQUENCES sequences of a token, then those of the
 * thread's next token. */
template <typename T, int N, bool FORWARD, bool SHIFTED, class Pipeline> struct Inputs {
    static constexpr int INPUTS = Pipeline::INPUTS, SEQUENCES = Pipeline::SEQUENCES, STAGES = Pipeline::STAGES;
    const Arguments<T> &a;
    const RotatePlace<T, N, SHIFTED> &place;
    typename Pipeline::Stage *const stages;
    const bool softmax, reads_x;
    const bool expanded;     /* dy is one number for all features of a row */
    const bool one_number;   /* and for all rows: it is put into each stage only once */
    const T *x, *dy;         /* addresses of the next group to load */
    int sequences, last;     /* last: the first sequence of the last group */
    int64_t x_back, dy_back; /* from the last group of a token to the next token's first */
    int tokens_left, group;  /* group: the first sequence of the next group */

    DEVICE Inputs(const Arguments<T> &a, const RotatePlace<T, N, SHIFTED> &place, int row, int step_log2, char *stages,
                  bool softmax, bool reads_x)
        : a(a), place(place), stages(reinterpret_cast<typename Pipeline::Stage *>(stages)), softmax(softmax),
          reads_x(reads_x), expanded(!FORWARD && a.y_stride.d == 0), one_number(expanded && a.dy_is_one_number()),
          sequences(place.sequences) {
        const int step = 1 << step_log2;
        const int64_t first_n = place.first_token + row;
        x = a.x + place.offset(first_n, a.x_stride);
        dy = a.dy + place.offset(first_n, a.y_stride);
        last = (sequences - 1) / SEQUENCES * SEQUENCES;
        x_back = step * a.x_stride.n - last * a.x_stride.b;
        dy_back = step * a.y_stride.n - last * a.y_stride.b;
        tokens_left =
            place.active && first_n < place.end_token ? (int)((place.end_token - first_n + step - 1) >> step_log2) : 0;
        group = 0;
    }
    /* Calls take(sequence in the group, input, address, valid) for each pack of the next group, and moves on. Inputs: 0
     * is x; 1 and 2 are the cosine and the sine half of dy. */
    template <class F> DEVICE void next(F take) {
#pragma unroll
        for (int k = 0; k < SEQUENCES; k++) {
            const bool valid = tokens_left > 0 && (k == 0 || group + k < sequences);
            if (reads_x)
                take(k, 0, x + k * a.x_stride.b, valid);
            if constexpr (!FORWARD) {
                take(k, 1, dy + k * a.y_stride.b, valid);
                take(k, 2, dy + k * a.y_stride.b + a.half, valid);
            }
        }
        const bool was_last = group == last;
        x += was_last ? x_back : SEQUENCES * a.x_stride.b;
        dy += was_last ? dy_back : SEQUENCES * a.y_stride.b;
        tokens_left -= was_last;
        group = was_last ? 0 : group + SEQUENCES;
    }
    /* Starts to load the next group into stage `to`. `first`: it is the first group in this stage. */
    DEVICE void request(int to, bool first) {
        next([&](int k, int input, const T *from, bool valid) {
            Pack<T, N> *const stage = &stages[to][k][input][threadIdx.x];
            if (valid && input > 0 && expanded) {
                if (first || !one_number)
                    *stage = all_of<T, N>(to_float(*from));
            } else if (valid)
                copy_async(stage, from);
        });
        copy_commit();
    }
    /* Starts to load the first groups. `idle`: the thread is past the last feature of a row whose softmax is computed
     * on chip, and gets packs that do not change it. A thread without a token computes on whatever is in its stages,
     * and stores nothing. */
    DEVICE void start(bool idle) {
        if constexpr (Pipeline::ASYNC) {
#pragma unroll 1
            for (int i = 0; i < STAGES; i++)
                request(i, true);
            if (idle)
                for (int i = 0; i < STAGES * SEQUENCES * INPUTS; i++)
                    reinterpret_cast<Pack<T, N> *>(stages)[i * THREADS + threadIdx.x] =
                        all_of<T, N>(neutral(softmax, i % INPUTS));
        }
    }
    /* SHIFTED: loads features of dy that are not adjacent, or expanded. */
    DEVICE static Pack<T, N> strided(const T *from, int count, int64_t stride) {
        Pack<T, N> pack = all_of<T, N>(0.0f);
        if (stride == 0)
            return count > 0 ? all_of<T, N>(to_float(*from)) : pack;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < count)
                pack.v[j] = from[j * stride];
        return pack;
    }
    /* Gets the packs of the next group to be worked on, which is in `stage` if there are stages. */
    DEVICE void take(int stage, Pack<T, N> (&packs)[SEQUENCES][INPUTS]) {
        if constexpr (Pipeline::ASYNC) {
            copy_wait<STAGES - 1>();
#pragma unroll
            for (int i = 0; i < SEQUENCES * INPUTS; i++)
                packs[i / INPUTS][i % INPUTS] = stages[stage][i / INPUTS][i % INPUTS][threadIdx.x];
        } else if constexpr (SHIFTED) {
            ShiftedPack<T, N> loaded[SEQUENCES][INPUTS];
            bool has[SEQUENCES] = {};
            next([&](int k, int input, const T *from, bool valid) {
                has[k] = valid;
                const float instead = neutral(softmax, input);
                if (input > 0 && a.y_stride.d != 1)
                    loaded[k][input].low = strided(from, valid ? place.count : 0, a.y_stride.d);
                else
                    loaded[k][input].load(from, valid ? place.count : 0, input ? a.dy : a.x, input ? a.dy_end : a.x_end,
                                          instead);
            });
#pragma unroll
            for (int i = 0; i < SEQUENCES * INPUTS; i++) {
                const int k = i / INPUTS, input = i % INPUTS;
                if (input > 0 && a.y_stride.d != 1)
                    packs[k][input] = loaded[k][input].low;
                else if (input > 0 || reads_x)
                    packs[k][input] = loaded[k][input].take(has[k] ? place.count : 0, input ? a.dy : a.x,
                                                            input ? a.dy_end : a.x_end, neutral(softmax, input));
            }
        } else {
            next([&](int k, int input, const T *from, bool valid) {
                packs[k][input] = load_once_if<T, N>(valid, from, neutral(softmax, input));
            });
        }
    }
    /* To be called when the group in `stage` has been used: starts to load another one into it. Returns the stage of
     * the next group. */
    DEVICE int refill(int stage) {
        if constexpr (Pipeline::ASYNC)
            request(stage, false);
        return stage + 1 == STAGES ? 0 : stage + 1;
    }
};

} // namespace lrpe

#endif
