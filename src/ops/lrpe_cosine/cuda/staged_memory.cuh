/* SPDX-License-Identifier: Apache-2.0 */
/* How `staged` (staged.cuh) moves chunks between memory and shared memory, and where a thread
 * finds its elements there. */
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
    int64_t n, h, d;                    /* strides of tokens, heads and features in memory */
};

struct Staging {
    Tiling tiling;                  /* tiles of heads; step tokens at a time */
    int threads;                    /* of a block */
    bool heads_first;               /* adjacent threads have adjacent heads, which are adjacent in dy */
    int layout;                     /* a Layout */
    int step;                       /* tokens of a chunk; more than one only if it has all heads */
    Divisor heads, features, width; /* width: heads * features */
    Spans x, y, out;                /* y: dy. out: y or dx */
    /* Dynamic shared memory, in bytes: the table of angles, the positions of two chunks in
     * turns, the stages, each with x and dy, and the output. */
    unsigned positions_at, stages_at, stage_bytes, dy_at, out_at, out_bytes, bytes;
};

/* The part of a chunk that exists. */
struct Extent {
    int tokens, heads, rows;
};

/* Keeps the compiler from computing `a` again wherever it is used. */
DEVICE void keep(unsigned &a) {
    asm volatile("" : "+r"(a));
}
DEVICE void keep(uint64_t &a) {
    asm volatile("" : "+l"(a));
}

/* Calls f(address of a pack in memory, its bytes' offset in shared memory, first, end) for the
 * thread's packs of a chunk with several spans. Bytes first to end - 1 of the pack belong to the
 * chunk. */
template <typename T, class F>
DEVICE void for_each_pack(const Spans &spans, const Divisor &heads, uint64_t chunk, const Extent &extent, F f) {
    const bool of_tokens = spans.kind == Spans::TOKEN;
    const int length = spans.row * (of_tokens ? extent.heads : 1) * static_cast<int>(sizeof(T));
    const int count = of_tokens ? extent.tokens : extent.rows, packs = static_cast<int>(spans.packs.number);
    for (int k = threadIdx.x; k < count * packs; k += blockDim.x) {
        const int s = spans.packs.quotient(k), token = of_tokens ? s : static_cast<int>(heads.quotient(s));
        const int head = of_tokens ? 0 : s - token * static_cast<int>(heads.number);
        const uint64_t span = chunk + (token * spans.n + head * spans.h) * sizeof(T);
        const int before = (k - s * packs) * 16 - static_cast<int>(span % 16); /* from the span to the pack */
        if (before < length)
            f(span + before, k * 16, max(-before, 0), min(length - before, 16));
    }
}

template <typename T> DEVICE void copy_elements_in(uint64_t pack, unsigned to, int first, int end) {
#pragma unroll 1
    for (int at = first; at < end; at += sizeof(T))
        write_shared(to + at, *reinterpret_cast<const T *>(pack + at));
}
template <typename T> DEVICE void copy_elements_out(uint64_t pack, unsigned from, int first, int end) {
#pragma unroll 1
    for (int at = first; at < end; at += sizeof(T))
        *reinterpret_cast<T *>(pack + at) = read_shared<T>(from + at);
}

/* Starts to copy a chunk into shared memory. Nothing outside of [begin, end) is read. MANY: it
 * may have several spans. */
template <bool MANY, typename T>
DEVICE void copy_in(const Spans &spans, const Divisor &heads, uint64_t chunk, const Extent &extent, const T *begin,
                    const T *end, unsigned to) {
    const auto lowest = reinterpret_cast<uint64_t>(begin), highest = reinterpret_cast<uint64_t>(end);
    const auto pack_in = [&](uint64_t pack, unsigned offset, int first, int until) {
        if (pack >= lowest && pack + 16 <= highest)
            copy_async_to(to + offset, reinterpret_cast<const void *>(pack));
        else
            copy_elements_in<T>(pack, to + offset, first, until);
    };
    if (MANY && spans.kind != Spans::ALL)
        return for_each_pack<T>(spans, heads, chunk, extent, pack_in);
    const unsigned low = static_cast<unsigned>(chunk) % 16, bytes = low + extent.rows * spans.row * sizeof(T);
    const uint64_t aligned = chunk - low;
    if (aligned >= lowest && aligned + bytes + 15 <= highest)
        for (unsigned at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16)
            copy_async_to(to + at, reinterpret_cast<const void *>(aligned + at));
    else /* at either end of the tensor */
        for (unsigned at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16)
            pack_in(aligned + at, at, at == 0 ? low : 0, min(bytes - at, 16u));
}

/* Copies a chunk out of shared memory. */
template <bool MANY, typename T>
DEVICE void copy_out(const Spans &spans, const Divisor &heads, uint64_t chunk, const Extent &extent, unsigned from) {
    typedef Pack<T, WIDE<T>> Whole;
    const auto pack_out = [&](uint64_t pack, unsigned offset, int first, int until) {
        if (until - first == 16)
            store_once(reinterpret_cast<T *>(pack), read_shared<Whole>(from + offset));
        else
            copy_elements_out<T>(pack, from + offset, first, until);
    };
    if (MANY && spans.kind != Spans::ALL)
        return for_each_pack<T>(spans, heads, chunk, extent, pack_out);
    const unsigned low = static_cast<unsigned>(chunk) % 16, bytes = low + extent.rows * spans.row * sizeof(T);
    const uint64_t aligned = chunk - low;
    for (unsigned at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16)
        pack_out(aligned + at, at, at == 0 ? low : 0, min(bytes - at, 16u));
}

/* A head and a feature of a chunk as one number: the place in the table of angles. Adjacent
 * threads have adjacent places. */
DEVICE unsigned entry_of(const Staging &plan, unsigned head, unsigned d) {
    return plan.heads_first ? d * plan.heads.number + head : head * plan.features.number + d;
}
DEVICE Tiling::Place place_of(const Staging &plan, unsigned entry) {
    const unsigned major = plan.heads_first ? plan.heads.quotient(entry) : plan.features.quotient(entry);
    const unsigned minor = entry - major * (plan.heads_first ? plan.heads.number : plan.features.number);
    return plan.heads_first ? Tiling::Place{minor, major} : Tiling::Place{major, minor};
}

/* The elements of a chunk that a thread has. Adjacent threads have adjacent elements: of the
 * chunk, or if ROWS, of a row, which `lanes` threads hold. */
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
        } else if (plan.heads_first) {
            at.token = plan.width.quotient(e);
            const unsigned in_token = e - at.token * plan.width.number;
            at.d = plan.heads.quotient(in_token);
            at.row = at.token * plan.heads.number + in_token - at.d * plan.heads.number;
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
 * not have are read `elsewhere`, and not written; if LINEAR, they are after its end. */
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
    DEVICE void read(unsigned from, unsigned low, float (&v)[COUNT]) const {
        T loaded[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            loaded[j] = read_shared<T>(from + (*this)(j, low));
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            v[j] = to_float(loaded[j]);
    }
    /* `elsewhere`: the constructor's. */
    DEVICE void write(unsigned to, unsigned low, const float (&v)[COUNT], unsigned elsewhere) const {
        const Pack<T, COUNT> pack = packed<T, COUNT>(v);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (PLACING == LINEAR || place[j] != (PLACING == MANY_SPANS ? elsewhere * 16 : elsewhere))
                write_shared(to + (*this)(j, low), pack.v[j]);
    }
};

/* The same for a dy that is read from memory, element by element: the offsets from the chunk. */
template <typename T> struct DirectPlaces {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[COUNT];
    bool one_number; /* dy is the same for the whole chunk */

    template <bool ROWS> DEVICE DirectPlaces(const Spans &spans, const Elements<T, ROWS> &elements, unsigned) {
        one_number = spans.n == 0 && spans.h == 0 && spans.d == 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const typename Elements<T, ROWS>::Element at = elements[j];
            place[j] = at.token * static_cast<unsigned>(spans.n) + at.head * static_cast<unsigned>(spans.h) +
                       at.d * static_cast<unsigned>(spans.d);
            keep(place[j]);
        }
    }
    /* Both halves, `half` apart. has(j): whether the element exists. */
    template <class Has>
    DEVICE void read(const T *chunk, int64_t half, Has has, float (&c)[COUNT], float (&s)[COUNT]) const {
        if (one_number) {
            const float number = to_float(*chunk);
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                c[j] = s[j] = number;
            return;
        }
        T first[COUNT], second[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            first[j] = has(j) ? chunk[place[j]] : from_float<T>(0.0f);
            second[j] = has(j) ? chunk[place[j] + half] : from_float<T>(0.0f);
        }
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            c[j] = to_float(first[j]);
            s[j] = to_float(second[j]);
        }
    }
};

/* The address of a tensor's chunks, in the order of the work: all sequences of some tokens, then
 * those of the next. */
struct ChunkAddress {
    uint64_t at, sequence, back; /* sequence, back: from a sequence to the next; from the last to the next tokens */

    template <typename T>
    DEVICE ChunkAddress(const T *tensor, const Strides &stride, int64_t b, int64_t n, int64_t h, int sequences,
                        int step)
        : at(reinterpret_cast<uint64_t>(tensor) + (b * stride.b + n * stride.n + h * stride.h) * sizeof(T)),
          sequence(stride.b * sizeof(T)), back((step * stride.n - (sequences - 1) * stride.b) * sizeof(T)) {
        keep(sequence);
        keep(back);
    }
    DEVICE void advance(bool was_last) {
        at += was_last ? back : sequence;
    }
    DEVICE unsigned low() const {
        return static_cast<unsigned>(at);
    }
};

} // namespace lrpe

#endif
