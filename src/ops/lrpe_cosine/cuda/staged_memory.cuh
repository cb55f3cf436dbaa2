/* SPDX-License-Identifier: Apache-2.0 */
/* How `staged` (staged.cuh) moves chunks between memory and shared memory, and where a thread finds its
 * elements there. */
#ifndef RAFTER_LRPE_COSINE_CUDA_STAGED_MEMORY_CUH
#define RAFTER_LRPE_COSINE_CUDA_STAGED_MEMORY_CUH

#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* ---- a chunk in memory and in shared memory -------------------------------------------------- */

/* How a chunk lies in one tensor: in spans of adjacent elements. In shared memory a span begins as
 * far after a multiple of 16 bytes as in memory. */
struct Spans {
    enum Kind { ROW, TOKEN, ALL } kind; /* what a span holds */
    int row, pitch;                     /* elements: of a row; from span to span in shared memory */
    Divisor packs;                      /* from span to span in shared memory */
    int64_t n, h;                       /* strides of tokens and heads in memory */
};

struct Staging {
    Tiling tiling;                  /* tiles of heads; step tokens at a time */
    int threads;                    /* of a block */
    int layout;                     /* a Layout */
    int step;                       /* tokens of a chunk; more than one only if it has all heads */
    Divisor heads, features, width; /* width: heads * features */
    Spans x, y, out;                /* y: dy. out: y or dx */
    /* Dynamic shared memory, in bytes: the table of angles, the positions of two chunks in turns, the
     * stages, each with x and dy, and the output. */
    unsigned positions_at, stages_at, stage_bytes, dy_at, out_at, out_bytes, bytes;
};

/* The part of a chunk that exists. */
struct Extent {
    int tokens, heads, rows;
};

/* Calls f(address of a pack in memory, its number in shared memory, first, end) for the thread's packs
 * of a chunk. Elements first to end - 1 of the pack belong to the chunk. MANY: it may have several
 * spans. */
template <bool MANY, typename T, class F>
DEVICE void for_each_pack(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, F f) {
    constexpr int N = WIDE<T>;
    const int threads = blockDim.x;
    const bool all = !MANY || spans.kind == Spans::ALL, of_tokens = spans.kind == Spans::TOKEN;
    const int length = spans.row * (all ? extent.rows : of_tokens ? extent.heads : 1);
    if (all) {
        const int shift = offset_in_pack(chunk), end = shift + length;
        T *const aligned = chunk - shift;
        for (int k = threadIdx.x; k * N < end; k += threads)
            f(aligned + k * N, k, k == 0 ? shift : 0, min(end - k * N, N));
        return;
    }
    const int count = of_tokens ? extent.tokens : extent.rows, packs = static_cast<int>(spans.packs.number);
    for (int k = threadIdx.x; k < count * packs; k += threads) {
        const int s = spans.packs.quotient(k), token = of_tokens ? s : static_cast<int>(heads.quotient(s));
        const int head = of_tokens ? 0 : s - token * static_cast<int>(heads.number);
        T *const span = chunk + token * spans.n + head * spans.h;
        const int before = (k - s * packs) * N - offset_in_pack(span); /* from the span to the pack */
        if (before < length)
            f(span + before, k, max(-before, 0), min(length - before, N));
    }
}

/* Starts to copy a chunk into shared memory. Nothing outside of [begin, end) is read. */
template <bool MANY, typename T>
DEVICE void copy_in(const Spans &spans, const Divisor &heads, const T *chunk, const Extent &extent, const T *begin,
                    const T *end, char *to) {
    for_each_pack<MANY>(spans, heads, chunk, extent, [&](const T *pack, int k, int from, int until) {
        Pack<T, WIDE<T>> *const place = reinterpret_cast<Pack<T, WIDE<T>> *>(to) + k;
        if (pack >= begin && pack + WIDE<T> <= end)
            copy_async(place, pack);
        else
#pragma unroll 1
            for (int j = from; j < until; j++)
                place->v[j] = pack[j];
    });
}

/* Copies a chunk out of shared memory. */
template <bool MANY, typename T>
DEVICE void copy_out(const Spans &spans, const Divisor &heads, T *chunk, const Extent &extent, const char *from) {
    for_each_pack<MANY>(spans, heads, chunk, extent, [&](T *pack, int k, int first, int until) {
        const Pack<T, WIDE<T>> *const place = reinterpret_cast<const Pack<T, WIDE<T>> *>(from) + k;
        if (until - first == WIDE<T>)
            store_once(pack, *place);
        else
#pragma unroll 1
            for (int j = first; j < until; j++)
                pack[j] = place->v[j];
    });
}

/* Keeps the compiler from computing `a` again wherever it is used. */
DEVICE void keep(unsigned &a) {
    asm volatile("" : "+r"(a));
}

/* The elements of a chunk that a thread has. Adjacent threads have adjacent elements: of the chunk, or if
 * ROWS, of a row, which `lanes` threads hold. */
template <typename T, bool ROWS> struct Elements {
    static constexpr int COUNT = WIDE<T>;
    const Staging &plan;
    int rows; /* that exist */

    struct Element {
        bool exists;
        unsigned token, head, row, d;
    };
    DEVICE Element operator[](int j) const {
        const unsigned e = j * plan.threads + threadIdx.x, lanes_log2 = plan.tiling.width_log2;
        Element at;
        if (ROWS) {
            at.row = threadIdx.x >> lanes_log2;
            at.d = (j << lanes_log2) + (threadIdx.x & (plan.tiling.lanes - 1));
        } else {
            at.row = plan.features.quotient(e);
            at.d = e - at.row * plan.features.number;
        }
        at.token = plan.heads.quotient(at.row);
        at.head = at.row - at.token * plan.heads.number;
        at.exists = at.row < static_cast<unsigned>(rows) && at.d < plan.features.number;
        return at;
    }
};

enum Placing {
    LINEAR,    /* one span without gaps: element e of the chunk is element e of the span */
    ONE_SPAN,  /* with gaps */
    MANY_SPANS /* `place` holds the place without the span's distance from a pack, times 16, plus how much
                  further from a pack the span begins than the chunk */
};

/* Where the thread's elements are in the shared memory of a tensor, in bytes. Those that the chunk does
 * not have are `elsewhere`, or if LINEAR, after its end. */
template <typename T, int PLACING> struct Places {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[PLACING == LINEAR ? 1 : COUNT];

    template <bool ROWS> DEVICE Places(const Spans &spans, const Elements<T, ROWS> &elements, unsigned elsewhere) {
        if constexpr (PLACING == LINEAR)
            place[0] = threadIdx.x * sizeof(T);
        else
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const typename Elements<T, ROWS>::Element at = elements[j];
                if constexpr (PLACING == MANY_SPANS) {
                    const bool all = spans.kind == Spans::ALL, of_tokens = spans.kind == Spans::TOKEN;
                    const unsigned span = all ? 0 : of_tokens ? at.token : at.row;
                    const unsigned in_span = all ? at.row : of_tokens ? at.head : 0;
                    const unsigned shift = (all ? 0 : at.token * static_cast<unsigned>(spans.n)) +
                                           (all || of_tokens ? 0 : at.head * static_cast<unsigned>(spans.h));
                    place[j] = at.exists ? (span * spans.pitch + in_span * spans.row + at.d) * sizeof(T) * 16 +
                                               shift * sizeof(T) % 16
                                         : elsewhere * 16;
                } else {
                    place[j] = at.exists ? (at.row * spans.row + at.d) * sizeof(T) : elsewhere;
                }
                keep(place[j]);
            }
    }
    /* `low`: the lower half of the chunk's address in memory. */
    DEVICE unsigned operator()(int j, unsigned low) const {
        if constexpr (PLACING == LINEAR)
            return place[0] + low % 16 + j * blockDim.x * static_cast<unsigned>(sizeof(T));
        else if constexpr (PLACING == ONE_SPAN)
            return place[j] + low % 16;
        else
            return (place[j] >> 4) + (place[j] + low) % 16;
    }
    DEVICE void read(const char *from, unsigned low, float (&v)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = to_float(*reinterpret_cast<const T *>(from + (*this)(j, low)));
    }
    DEVICE void write(char *to, unsigned low, const float (&v)[COUNT]) const {
        const Pack<T, COUNT> pack = packed<T, COUNT>(v);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            *reinterpret_cast<T *>(to + (*this)(j, low)) = pack.v[j];
    }
};

/* The same for a dy that is read from memory, element by element: the offsets from the chunk. */
template <typename T> struct DirectPlaces {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[COUNT];

    template <bool ROWS> DEVICE DirectPlaces(const Strides &stride, const Elements<T, ROWS> &elements) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const typename Elements<T, ROWS>::Element at = elements[j];
            place[j] = at.token * static_cast<unsigned>(stride.n) + at.head * static_cast<unsigned>(stride.h) +
                       at.d * static_cast<unsigned>(stride.d);
            keep(place[j]);
        }
    }
    /* has(j): whether the element exists. */
    template <class Has> DEVICE void read(const T *chunk, Has has, float (&v)[COUNT]) const {
        T loaded[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            loaded[j] = has(j) ? chunk[place[j]] : from_float<T>(0.0f);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = to_float(loaded[j]);
    }
};

/* The address of a tensor's chunks, or its lower half, in the order of the work: all sequences of some
 * tokens, then those of the next. */
template <typename Address> struct ChunkAddress {
    Address at, sequence,
        back; /* sequence, back: from one sequence to the next; from the last one to the next tokens */

    DEVICE ChunkAddress(const void *tensor, int bytes, const Strides &stride, int64_t b, int64_t n, int64_t h,
                        int sequences, int step)
        : at((Address)((uintptr_t)tensor + (b * stride.b + n * stride.n + h * stride.h) * bytes)),
          sequence((Address)(stride.b * bytes)),
          back((Address)((step * stride.n - (sequences - 1) * stride.b) * bytes)) {
    }
    DEVICE void advance(bool was_last) {
        at += was_last ? back : sequence;
    }
};

} // namespace lrpe

#endif
