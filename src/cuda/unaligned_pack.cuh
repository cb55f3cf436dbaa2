/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs of 16 bytes that begin at any element of a tensor. A pack is loaded as the two aligned packs that contain it,
 * which are then shifted. Elements outside of the tensor are never read; padding between its rows may be. To store
 * adjacent packs, the lanes of a warp exchange elements and store aligned packs (AdjacentPacks).
 */
#ifndef RAFTER_CUDA_UNALIGNED_PACK_CUH
#define RAFTER_CUDA_UNALIGNED_PACK_CUH

#include "cuda/primitives.cuh"

/* `shifted` for fp32, by `words` words. It branches, so that the compiler loads only the words that are needed: two
 * loads of 16 bytes in flight at the same time take longer (docs/perf/act.md). */
DEVICE uint4 shifted_words(const uint4 &low, const uint4 &high, int words) {
    unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (words & 2)
#pragma unroll
        for (int i = 0; i < 6; i++)
            w[i] = w[i + 2];
    if (words & 1)
#pragma unroll
        for (int i = 0; i < 5; i++)
            w[i] = w[i + 1];
    return {w[0], w[1], w[2], w[3]};
}

/* A pack that is being loaded: load() issues the loads, get() waits for them. */
template <typename T> struct UnalignedPack {
    static constexpr int N = WIDE<T>;
    const T *first;
    bool whole; /* both aligned packs are inside of the tensor */
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
    /* The pack; 0 for elements outside of the tensor, which must be that of load(). */
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

/* For fp32, load() shifts too: see shifted_words. */
template <> struct UnalignedPack<float> {
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
            reinterpret_cast<uint4 &>(pack) = shifted_words(both[0], both[1], ragged);
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

/* Stores those elements of a pack whose index is in [low, high). `at`: the index of the first element. `to` is
 * aligned. */
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

/* Stores the first `bytes` bytes of w, an even number below 16, with up to three stores. `to` is a multiple of 16. */
DEVICE void store_front(char *to, const uint4 &w, int bytes) {
    if (bytes & 8)
        *reinterpret_cast<uint2 *>(to) = {w.x, w.y};
    const unsigned third = bytes & 8 ? w.z : w.x, fourth = bytes & 8 ? w.w : w.y;
    if (bytes & 4)
        *reinterpret_cast<unsigned *>(to + (bytes & 8)) = third;
    if (bytes & 2)
        *reinterpret_cast<unsigned short *>(to + (bytes & 12)) =
            static_cast<unsigned short>(bytes & 4 ? fourth : third);
}
/* The same where to + bytes, instead of `to`, is a multiple of 16. */
DEVICE void store_before(char *to, const uint4 &w, int bytes) {
    const unsigned bits = (bytes & 2) * 8;
    const unsigned a = __funnelshift_r(w.x, w.y, bits), b = __funnelshift_r(w.y, w.z, bits),
                   c = __funnelshift_r(w.z, w.w, bits);
    if (bytes & 2)
        *reinterpret_cast<unsigned short *>(to) = static_cast<unsigned short>(w.x);
    if (bytes & 4)
        *reinterpret_cast<unsigned *>(to + (bytes & 2)) = a;
    if (bytes & 8)
        *reinterpret_cast<uint2 *>(to + (bytes & 6)) = {bytes & 4 ? b : a, bytes & 4 ? c : b};
}

/* Which lanes of a warp have packs that are adjacent in memory. To store them, each lane completes the aligned pack
 * that begins in its own pack with elements of the next lane. All lanes of the warp take part. */
struct AdjacentPacks {
    bool before, after; /* the previous lane has the pack before this lane's; the next lane has the pack after it */

    DEVICE AdjacentPacks() {
    }
    /* `position`: number of the pack; packs with consecutive positions are adjacent in memory. */
    DEVICE AdjacentPacks(bool valid, int position) {
        const int mark = valid ? position : -2, lane = threadIdx.x % WARP;
        const int previous = __shfl_up_sync(~0u, mark, 1), next = __shfl_down_sync(~0u, mark, 1);
        before = lane > 0 && valid && previous + 1 == mark;
        after = lane < WARP - 1 && valid && next == mark + 1;
    }
    /* Stores the lane's pack, if `stores`, to an address that need not be aligned. Lanes with adjacent packs must agree
     * about `stores`. */
    template <typename T, int N> DEVICE void store(T *p, const Pack<T, N> &pack, bool stores) const {
        static_assert(N * sizeof(T) == 16, "");
        const uint4 &own = reinterpret_cast<const uint4 &>(pack);
        const uint4 next = {__shfl_down_sync(~0u, own.x, 1), __shfl_down_sync(~0u, own.y, 1),
                            __shfl_down_sync(~0u, own.z, 1), __shfl_down_sync(~0u, own.w, 1)};
        if (!stores)
            return;
        char *const to = reinterpret_cast<char *>(p);
        const int skip = static_cast<int>(-reinterpret_cast<uintptr_t>(p) % 16); /* bytes up to an aligned address */
        const uint4 aligned = sizeof(T) == 4 ? shifted_words(own, next, skip / 4) : shifted(own, next, skip);
        if (after || skip == 0)
            store_once<T, N>(reinterpret_cast<T *>(to + skip), reinterpret_cast<const Pack<T, N> &>(aligned));
        else
            store_front(to + skip, aligned, 16 - skip);
        if (!before)
            store_before(to, own, skip);
    }
};

/* The same for one pack of each lane. Called by all lanes; those that are not `valid` store nothing. */
template <typename T, int N> DEVICE void store_shifted(T *p, const Pack<T, N> &pack, bool valid, int position) {
    if (__any_sync(~0u, valid && reinterpret_cast<uintptr_t>(p) % 16 != 0))
        AdjacentPacks(valid, position).store(p, pack, valid);
    else if (valid)
        store_once<T, N>(p, pack);
}

#endif
