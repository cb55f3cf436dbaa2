/* SPDX-License-Identifier: Apache-2.0 */
/* How `staged` (staged.cuh) copies chunks between memory and shared memory, and where a thread finds its elements
 * there. */
#ifndef RAFTER_LRPE_COSINE_CUDA_STAGED_MEMORY_CUH
#define RAFTER_LRPE_COSINE_CUDA_STAGED_MEMORY_CUH

#include "ops/lrpe_cosine/cuda/problem.cuh"

namespace lrpe {

/* ---- a chunk in memory and in shared memory -------------------------------------------------- */

/* How a chunk lies in one tensor: in spans of adjacent elements. In shared memory a span has the same offset from a
 * 16-byte boundary as in memory. */
struct Spans {
    /* What a span has of the chunk: a row (all features of a head); all heads of a token; everything. In a turned dy,
     * whose heads are adjacent: the heads of one feature; or all heads and features of one half (cosines or sines) of a
     * token. */
    enum Kind { ROW, TOKEN, ALL, FEATURE, HALF } kind;
    int row, pitch;        /* elements of a row; elements from span to span in shared memory */
    Divisor packs;         /* packs from span to span in shared memory */
    int64_t n, h, d, half; /* strides of tokens, heads and features in memory; from cosines to sines */

    /* For a turned dy: bytes from the cosines to the sines of a token in shared memory. */
    template <typename T> __host__ __device__ unsigned half_bytes(int features) const {
        return static_cast<unsigned>((kind == FEATURE ? features : 1) * pitch) * static_cast<unsigned>(sizeof(T));
    }
};

/* The plan of a call, as a kernel argument. */
struct Staging {
    Tiling tiling;                  /* its tiles: pieces that the heads and features of a token are cut into */
    int threads;                    /* per block */
    int layout;                     /* a Layout */
    int step;                       /* tokens of a chunk; more than one only if it has all heads */
    Divisor heads, features, width; /* of a chunk; width: heads * features */
    Divisor feature_tiles;          /* pieces that the features are cut into; more than one only if dy is TURNED */
    Spans x, y, out;                /* x; y, in backward dy; the output: y or dx */
    /* Dynamic shared memory, in bytes: the table of angles, two buffers of positions, the stages, each with x and dy,
     * and the output. */
    unsigned positions_at, stages_at, stage_bytes, dy_at, out_at, out_bytes, bytes;
};

/* The part of a chunk that exists. rows: tokens * heads. missing: features that every row lacks. */
struct Extent {
    int tokens, heads, rows, missing;
};

/* Makes the compiler keep `a` in a register, instead of computing it again wherever it is used. */
DEVICE void keep(unsigned &a) {
    asm volatile("" : "+r"(a));
}
DEVICE void keep(uint64_t &a) {
    asm volatile("" : "+l"(a));
}

/* Copy bytes [first, end) of a pack, element by element, into and out of shared memory. */
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

/* Divides `count` spans of `length` elements each into aligned packs. Calls f(address of the pack in memory, its offset
 * in shared memory in bytes, first, end) for those of this thread. Bytes [first, end) of the pack belong to the chunk.
 * where(s): the offset of span s from the chunk's address, in elements. */
template <typename T, class Where, class F>
DEVICE void for_each_span_pack(const Divisor &span_packs, uint64_t chunk, int count, int length, Where where, F f) {
    const int packs = static_cast<int>(span_packs.number), bytes = length * static_cast<int>(sizeof(T));
    for (int k = threadIdx.x; k < count * packs; k += blockDim.x) {
        const int s = static_cast<int>(span_packs.quotient(k));
        const uint64_t span = chunk + where(s) * sizeof(T);
        const int before = (k - s * packs) * 16 - static_cast<int>(span % 16); /* from the span to the pack */
        if (before < bytes)
            f(span + before, k * 16, max(-before, 0), min(bytes - before, 16));
    }
}

/* The same for all spans of a chunk, if they are rows or tokens. */
template <typename T, class F>
DEVICE void for_each_pack(const Spans &spans, const Divisor &heads, uint64_t chunk, const Extent &extent, F f) {
    const bool of_tokens = spans.kind == Spans::TOKEN;
    const int length = spans.row * (of_tokens ? extent.heads : 1) - extent.missing;
    const auto where = [&](int s) {
        const int token = of_tokens ? s : static_cast<int>(heads.quotient(s));
        const int head = of_tokens ? 0 : s - token * static_cast<int>(heads.number);
        return token * spans.n + head * spans.h;
    };
    for_each_span_pack<T>(spans.packs, chunk, of_tokens ? extent.tokens : extent.rows, length, where, f);
}

/* Starts to copy a chunk of a turned dy into shared memory. Nothing outside of dy, [begin, end), is read. */
template <typename T>
DEVICE void copy_turned_in(const Staging &plan, uint64_t chunk, const Extent &extent, const T *begin, const T *end,
                           unsigned to) {
    const Spans &spans = plan.y;
    const int features = static_cast<int>(plan.features.number) - extent.missing;
    const auto pack_in = [&](uint64_t pack, unsigned offset, int first, int until) {
        if (pack >= reinterpret_cast<uint64_t>(begin) && pack + 16 <= reinterpret_cast<uint64_t>(end))
            copy_async_to(to + offset, reinterpret_cast<const void *>(pack));
        else
            copy_elements_in<T>(pack, to + offset, first, until);
    };
    if (spans.kind == Spans::HALF)
        for_each_span_pack<T>(
            spans.packs, chunk, 2 * extent.tokens, features * extent.heads,
            [&](int s) { return (s >> 1) * spans.n + (s & 1) * spans.half; }, pack_in);
    else
        for_each_span_pack<T>(
            spans.packs, chunk, 2 * extent.tokens * static_cast<int>(plan.features.number), extent.heads,
            [&](int s) {
                const int half = static_cast<int>(plan.features.quotient(s));
                const int d = min(s - half * static_cast<int>(plan.features.number), features - 1);
                return (half >> 1) * spans.n + (half & 1) * spans.half + d * spans.d;
            },
            pack_in);
}

/* Starts to copy a chunk into shared memory. Nothing outside of the tensor, [begin, end), is read. MANY: the chunk may
 * have several spans. */
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
    if (MANY && spans.kind != Spans::ALL)
        return for_each_pack<T>(spans, heads, chunk, extent, [&](uint64_t pack, unsigned offset, int first, int until) {
            if (until - first == 16)
                store_once(reinterpret_cast<T *>(pack), read_shared<Whole>(from + offset));
            else
                copy_elements_out<T>(pack, from + offset, first, until);
        });
    const unsigned low = static_cast<unsigned>(chunk) % 16, bytes = low + extent.rows * spans.row * sizeof(T);
    const unsigned first = low ? 16 : 0, end = bytes / 16 * 16; /* of whole packs */
    const uint64_t aligned = chunk - low;
    for (unsigned at = first + threadIdx.x * 16; at < end; at += blockDim.x * 16)
        store_once(reinterpret_cast<T *>(aligned + at), read_shared<Whole>(from + at));
    if (threadIdx.x == 0 && low)
        copy_elements_out<T>(aligned, from, low, min(bytes, 16u));
    if (threadIdx.x == WARP && bytes > end && end >= first)
        copy_elements_out<T>(aligned + end, from + end, 0, bytes - end);
}

/* How the elements of a chunk are given to threads. Adjacent threads have */
enum Order {
    BY_FEATURE, /* adjacent elements of the chunk: features of a head, and so on to the next head */
    BY_HEAD,    /* adjacent heads, for the same feature */
    BY_ROW      /* adjacent features of a row; exactly Tiling::lanes threads share a row */
};

/* The entry of the table of angles for a head and a feature of a chunk; place_of is the reverse. Adjacent threads have
 * adjacent entries. */
template <int ORDER> DEVICE unsigned entry_of(const Staging &plan, unsigned head, unsigned d) {
    return ORDER == BY_HEAD ? d * plan.heads.number + head : head * plan.features.number + d;
}
template <int ORDER> DEVICE Tiling::Place place_of(const Staging &plan, unsigned entry) {
    if constexpr (ORDER == BY_HEAD) {
        const unsigned d = plan.heads.quotient(entry);
        return {entry - d * plan.heads.number, d};
    } else {
        const unsigned head = plan.features.quotient(entry);
        return {head, entry - head * plan.features.number};
    }
}

/* The COUNT elements of a chunk that a thread has; operator[] gives the j-th. */
template <typename T, int ORDER> struct Elements {
    static constexpr int COUNT = WIDE<T>;
    const Staging &plan;
    int rows, features; /* that exist */

    struct Element {
        bool exists;
        unsigned token, head, row, d;
    };
    DEVICE Element operator[](int j) const {
        const unsigned e = j * plan.threads + threadIdx.x, lanes_log2 = plan.tiling.width_log2;
        Element at;
        if constexpr (ORDER == BY_ROW) {
            at.row = threadIdx.x >> lanes_log2;
            at.d = (j << lanes_log2) + (threadIdx.x & (plan.tiling.lanes - 1));
        } else if constexpr (ORDER == BY_HEAD) {
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
        at.exists = at.row < static_cast<unsigned>(rows) && at.d < static_cast<unsigned>(features);
        return at;
    }
};

/* How Places finds elements. The shift of a span is its offset from a 16-byte boundary, in bytes, which is known only
 * when the chunk's address is. */
enum Placing {
    LINEAR,      /* one span without gaps: element e of the chunk is element e of the span */
    ONE_SPAN,    /* one span, with other places: rows of y and dy have two halves, or the order is BY_ROW */
    MANY_SPANS,  /* place[j] is 16 times the place without the span's shift, plus the span's shift minus the
                   chunk's, modulo 16 */
    TURNED_SPANS /* the same for a turned dy; places of its cosines */
};

/* Where the thread's elements are in the shared memory of a tensor, in bytes. For elements that the chunk does not
 * have, it reads from `elsewhere` and writes nothing; if LINEAR, their places are after the end of the chunk. */
template <typename T, int PLACING> struct Places {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[PLACING == LINEAR ? 1 : COUNT];

    template <int ORDER> DEVICE Places(const Spans &spans, const Elements<T, ORDER> &elements, unsigned elsewhere) {
        if constexpr (PLACING == LINEAR)
            place[0] = threadIdx.x * sizeof(T);
        else
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const typename Elements<T, ORDER>::Element at = elements[j];
                if constexpr (PLACING == TURNED_SPANS) {
                    const bool halves = spans.kind == Spans::HALF;
                    const unsigned in_half = halves ? at.d * elements.plan.heads.number + at.head
                                                    : at.d * static_cast<unsigned>(spans.pitch) + at.head;
                    const unsigned half_bytes = spans.half_bytes<T>(static_cast<int>(elements.plan.features.number));
                    const unsigned shift = at.token * static_cast<unsigned>(spans.n) +
                                           (halves ? 0 : at.d * static_cast<unsigned>(spans.d));
                    place[j] = at.exists
                                   ? (at.token * 2 * half_bytes + in_half * sizeof(T)) * 16 + shift * sizeof(T) % 16
                                   : elsewhere * 16;
                } else if constexpr (PLACING == MANY_SPANS) {
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
    /* The place of the j-th element. `low`: the lower half of the chunk's address in memory. */
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
    /* `elsewhere`: as given to the constructor. */
    DEVICE void write(unsigned to, unsigned low, const float (&v)[COUNT], unsigned elsewhere) const {
        const Pack<T, COUNT> pack = packed<T, COUNT>(v);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (PLACING == LINEAR || place[j] != (PLACING >= MANY_SPANS ? elsewhere * 16 : elsewhere))
                write_shared(to + (*this)(j, low), pack.v[j]);
    }
};

/* The same for a dy that is read directly from memory, element by element: offsets from the chunk's address, in
 * elements. */
template <typename T> struct DirectPlaces {
    static constexpr int COUNT = WIDE<T>;
    unsigned place[COUNT];
    bool one_per_chunk, one_number; /* dy is one number for a whole chunk; one number for all chunks */
    float number;                   /* that number, if one_number */

    template <int ORDER>
    DEVICE DirectPlaces(const Spans &spans, const Elements<T, ORDER> &elements, const Arguments<T> &a)
        : one_per_chunk(spans.n == 0 && spans.h == 0 && spans.d == 0), one_number(a.dy_is_one_number()),
          number(one_number ? to_float(*a.dy) : 0.0f) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const typename Elements<T, ORDER>::Element at = elements[j];
            place[j] = at.token * static_cast<unsigned>(spans.n) + at.head * static_cast<unsigned>(spans.h) +
                       at.d * static_cast<unsigned>(spans.d);
            keep(place[j]);
        }
    }
    /* Reads both halves, `half` elements apart. has(j): whether element j exists. */
    template <class Has>
    DEVICE void read(const T *chunk, int64_t half, Has has, float (&c)[COUNT], float (&s)[COUNT]) const {
        if (one_per_chunk) {
            const float value = one_number ? number : to_float(*chunk);
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                c[j] = s[j] = value;
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

/* The address of a tensor's chunks, in the order in which they are worked on: all sequences of some tokens, then those
 * of the next tokens. `sequence`: bytes to the next sequence. `back`: bytes from the last sequence to the first one of
 * the next tokens. */
struct ChunkAddress {
    uint64_t at, sequence, back;

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
