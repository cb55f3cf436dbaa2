/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs of 16 bytes that begin at any element of a tensor. They are loaded as two aligned packs, which are
 * shifted: elements outside of the tensor are not read; those between its rows may be. Adjacent ones are
 * stored as aligned packs, of which the lanes of a warp exchange the parts.
 */
#ifndef RAFTER_CUDA_PACK_ANYWHERE_CUH
#define RAFTER_CUDA_PACK_ANYWHERE_CUH

#include "cuda/vocabulary.cuh"

/* 16 bytes from an aligned address, or zeros. The load is issued here: the compiler has moved such
 * loads into the branches that use them, and cut them into smaller ones. */
DEVICE uint4 load_now_if(bool present, const void *p) {
    uint4 w = {0, 0, 0, 0};
    asm volatile("{\n\t.reg .pred present;\n\tsetp.ne.u32 present, %5, 0;\n\t"
                 "@present ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)
                 : "l"(p), "r"(static_cast<unsigned>(present))
                 : "memory");
    return w;
}

template <typename T> struct PackAnywhere {
    static constexpr int N = WIDE<T>;
    const T *first;
    bool whole; /* the aligned packs are inside of the tensor */
    uint4 low, high;

    /* Issues the loads, if `present`. [begin, end): the tensor. */
    DEVICE void load(bool present, const T *from, const T *begin, const T *end) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(from), one = address & ~uintptr_t(15),
                        two = (address + 15) & ~uintptr_t(15); /* the same, if aligned */
        first = from;
        whole = one >= reinterpret_cast<uintptr_t>(begin) && two + 16 <= reinterpret_cast<uintptr_t>(end);
        present = present && whole;
        low = load_now_if(present, reinterpret_cast<const void *>(one));
        high = load_now_if(present && address % 16 != 0, reinterpret_cast<const void *>(two));
    }
    /* The pack, of the same tensor; 0 for elements outside. */
    DEVICE Pack<T, N> get(const T *begin, const T *end) const {
        Pack<T, N> pack;
        if (whole) {
            reinterpret_cast<uint4 &>(pack) = shifted(low, high, offset_in_pack(first) * static_cast<int>(sizeof(T)));
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = first + j >= begin && first + j < end ? first[j] : from_float<T>(0.0f);
        }
        return pack;
    }
};

/* fp32: what is loaded is also shifted here. The compiler then loads the words that are needed, and two
 * loads of 16 bytes, in flight at the same time, take longer: docs/perf/act.md. */
template <> struct PackAnywhere<float> {
    static constexpr int N = WIDE<float>;
    Pack<float, N> pack;

    DEVICE void load(bool present, const float *from, const float *begin, const float *end) {
        if (!present)
            return;
        const int ragged = offset_in_pack(from);
        const float *const aligned = from - ragged;
        if (ragged == 0 && from >= begin && from + N <= end) {
            pack = load_once<float, N>(from);
        } else if (aligned >= begin && aligned + 2 * N <= end) {
            const uint4 *const both = reinterpret_cast<const uint4 *>(aligned);
            reinterpret_cast<uint4 &>(pack) = shifted(both[0], both[1], ragged * static_cast<int>(sizeof(float)));
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                pack.v[j] = from + j >= begin && from + j < end ? from[j] : 0.0f;
        }
    }
    DEVICE Pack<float, N> get(const float *, const float *) const {
        return pack;
    }
};

/* Stores those elements of a pack that are in [low, high); `at` is the index of its first one. `to`
 * is aligned. */
template <typename T>
DEVICE void store_inside(T *to, const Pack<T, WIDE<T>> &pack, int64_t at, int64_t low, int64_t high) {
    constexpr int N = WIDE<T>;
    if (at >= low && at + N <= high) {
        store_once<T, N>(to, pack);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (at + j >= low && at + j < high)
                to[j] = pack.v[j];
    }
}

/* Stores packs of adjacent elements to an address that is not aligned. All lanes of the warp take
 * part. `position`: of the pack in its span; lanes with consecutive positions in one span exchange
 * the elements that belong to each other's aligned packs; the others are stored one by one. */
template <typename T, int N> DEVICE void store_shifted(T *p, const Pack<T, N> &pack, bool valid, int position) {
    const int ragged = static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T)) & (N - 1);
    if (!__any_sync(~0u, valid && ragged != 0)) {
        if (valid)
            store_once<T, N>(p, pack);
        return;
    }
    const int mark = valid ? position : -2;
    const int before = __shfl_up_sync(~0u, mark, 1), after = __shfl_down_sync(~0u, mark, 1);
    const int lane = threadIdx.x % WARP;
    const bool joined_before = lane > 0 && valid && before + 1 == mark,
               joined_after = lane < WARP - 1 && valid && after == mark + 1;
    constexpr int WORDS = N * (int)sizeof(T) / 4, EACH = N / WORDS;
    unsigned w[2 * WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        w[i] = reinterpret_cast<const unsigned *>(&pack)[i];
        w[WORDS + i] = __shfl_down_sync(~0u, w[i], 1);
    }
    if (!valid)
        return;
    const int skip = (N - ragged) & (N - 1); /* elements before the first aligned one */
    if (skip == 0) {
        store_once<T, N>(p, pack);
        return;
    }
    if (!joined_before)
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < skip)
                p[j] = pack.v[j];
    if (!joined_after) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j >= skip)
                p[j] = pack.v[j];
        return;
    }
    /* The 16 bytes from element `skip` of this pack and the next one. */
    const int words = skip / EACH;
#pragma unroll
    for (int by = WORDS / 2; by > 0; by /= 2)
        if (words & by)
#pragma unroll
            for (int i = 0; i + by < 2 * WORDS; i++)
                w[i] = w[i + by];
    if (EACH == 2 && skip & 1)
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            w[i] = __funnelshift_r(w[i], w[i + 1], 16);
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        reinterpret_cast<unsigned *>(&out)[i] = w[i];
    store_once<T, N>(p + skip, out);
}

#endif
