/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device-side vocabulary: conversions, wide loads and stores, asynchronous copies, reductions.
 * The counterpart of src/simd/simd.h.
 *
 * Kernels are templates over the storage type T (float, __nv_bfloat16, __half) and compute in
 * float. A `Pack` is what one thread moves in one access: 16 bytes where addresses allow.
 */
#ifndef RAFTER_CUDA_VOCABULARY_CUH
#define RAFTER_CUDA_VOCABULARY_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdint.h>

#define DEVICE __device__ __forceinline__

typedef __nv_bfloat16 bf16;
typedef __half fp16;

constexpr int WARP = 32;
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float LN2 = 0.69314718055994530942f;

/* a / b for a >= 0, b > 0: in 32 bits where the numbers allow, a fifth of the instructions. */
DEVICE int64_t quotient(int64_t a, int64_t b) {
    if (static_cast<uint64_t>(a | b) >> 32 == 0)
        return static_cast<unsigned>(a) / static_cast<unsigned>(b);
    return a / b;
}

/* ---- conversions ----------------------------------------------------------------------------- */

DEVICE float to_float(float a) {
    return a;
}
DEVICE float to_float(bf16 a) {
    return __bfloat162float(a);
}
DEVICE float to_float(fp16 a) {
    return __half2float(a);
}

template <typename T> DEVICE T from_float(float a);
template <> DEVICE float from_float<float>(float a) {
    return a;
}
template <> DEVICE bf16 from_float<bf16>(float a) {
    return __float2bfloat16_rn(a);
}
template <> DEVICE fp16 from_float<fp16>(float a) {
    return __float2half_rn(a);
}

/* ---- packs ----------------------------------------------------------------------------------- */

/* N adjacent elements, loaded and stored in one access; N * sizeof(T) is 2, 4, 8 or 16. */
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T v[N]; };

template <int BYTES> struct Word;
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

/* For data that this kernel reads once. A plain load on purpose: on an H200 a copy kernel takes 4
 * to 5 % longer with streaming loads (ld.cs or L1::no_allocate), and another 1 % with streaming
 * stores: docs/perf/README.md. */
template <typename T, int N> DEVICE Pack<T, N> load_once(const T *p) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W w = *reinterpret_cast<const W *>(p);
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* For data that will be read again, or that this kernel overwrites later: cached in L2, not in
 * L1. */
template <typename T, int N> DEVICE Pack<T, N> load_l2(const T *p) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W w = __ldcg(reinterpret_cast<const W *>(p));
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* For data that no kernel reads soon. 16 bytes are always one store: left to itself, the compiler
 * has stored the parts of a pack one by one, with four times the traffic to L2. */
template <typename T, int N> DEVICE void store_once(T *p, const Pack<T, N> &a) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W &w = reinterpret_cast<const W &>(a);
    if constexpr (sizeof w == 16)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
    else
        *reinterpret_cast<W *>(p) = w;
}

/* A load that is issued here: the compiler cannot move it to the first use. */
DEVICE int64_t load_now(const int64_t *p) {
    int64_t value;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
DEVICE int load_now(const int *p) {
    int value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
DEVICE float load_now(const float *p) {
    float value;
    asm volatile("ld.global.b32 %0, [%1];" : "=f"(value) : "l"(p) : "memory");
    return value;
}

/* L2 cache policies: keep data that another block reads soon; drop data that nobody reads again. */
DEVICE uint64_t l2_evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE uint64_t l2_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <typename T, int N> DEVICE void store_with(T *p, const Pack<T, N> &a, uint64_t policy) {
    if constexpr (N * sizeof(T) == 16) {
        const uint4 &w = reinterpret_cast<const uint4 &>(a);
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(w.x), "r"(w.y),
                     "r"(w.z), "r"(w.w), "l"(policy)
                     : "memory");
    } else {
        store_once(p, a);
    }
}

/* Elements per pack of 16 bytes. */
template <typename T> constexpr int WIDE = 16 / (int)sizeof(T);

/* All elements of a pack as floats, with one instruction each. Converted one at a time, the odd
 * elements of a bf16 pack would take two. */
template <typename T, int N> DEVICE void unpack(const Pack<T, N> &pack, float (&out)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++)
        out[j] = to_float(pack.v[j]);
}
template <int N> DEVICE void unpack(const Pack<bf16, N> &pack, float (&out)[N]) {
    if constexpr (N == 1) {
        out[0] = to_float(pack.v[0]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const unsigned both = *reinterpret_cast<const unsigned *>(&pack.v[j]);
            out[j] = __uint_as_float(both << 16);
            out[j + 1] = __uint_as_float(both & 0xffff0000u);
        }
    }
}

/* The reverse, rounding to nearest even, two at a time. */
template <typename T, int N> DEVICE Pack<T, N> packed(const float (&in)[N]) {
    Pack<T, N> pack;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            if constexpr (__is_same(T, bf16))
                *reinterpret_cast<__nv_bfloat162 *>(&pack.v[j]) = __floats2bfloat162_rn(in[j], in[j + 1]);
            else
                *reinterpret_cast<__half2 *>(&pack.v[j]) = __floats2half2_rn(in[j], in[j + 1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            pack.v[j] = from_float<T>(in[j]);
    }
    return pack;
}

template <typename T> constexpr bool NARROW = sizeof(T) == 2;

template <typename T> struct Pair;
template <> struct Pair<bf16> { typedef __nv_bfloat162 type; };
template <> struct Pair<fp16> { typedef __half2 type; };

/* The elementwise maximum of two packs, NaN skipped. 16-bit types are compared two at a time. */
template <typename T, int N> DEVICE Pack<T, N> max_of(const Pack<T, N> &a, const Pack<T, N> &b) {
    Pack<T, N> top;
    if constexpr (NARROW<T> && N % 2 == 0) {
        typedef typename Pair<T>::type P;
#pragma unroll
        for (int j = 0; j < N; j += 2)
            reinterpret_cast<P &>(top.v[j]) =
                __hmax2(reinterpret_cast<const P &>(a.v[j]), reinterpret_cast<const P &>(b.v[j]));
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            top.v[j] = from_float<T>(fmaxf(to_float(a.v[j]), to_float(b.v[j])));
    }
    return top;
}

template <typename T, int N> DEVICE Pack<T, N> all_of(float value) {
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; j++)
        pack.v[j] = from_float<T>(value);
    return pack;
}

/* A pack, or one full of `value` if `present` is false. */
template <typename T, int N> DEVICE Pack<T, N> load_once_if(bool present, const T *p, float value) {
    typedef typename Word<N * sizeof(T)>::type W;
    const Pack<T, N> instead = all_of<T, N>(value);
    W w = reinterpret_cast<const W &>(instead);
    if (present)
        w = *reinterpret_cast<const W *>(p);
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* Where an element lies in its pack of 16 bytes. */
template <typename T> DEVICE int offset_in_pack(const T *p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
}

/* The 16 bytes that begin `bytes` bytes, an even number below 16, after the beginning of `low`. */
DEVICE uint4 shifted(const uint4 &low, const uint4 &high, int bytes) {
    const bool eight = bytes & 8, four = bytes & 4;
    const unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, bits = (bytes & 2) * 8;
    unsigned a[6], b[5];
#pragma unroll
    for (int i = 0; i < 6; i++)
        a[i] = eight ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; i++)
        b[i] = four ? a[i + 1] : a[i];
    return {__funnelshift_r(b[0], b[1], bits), __funnelshift_r(b[1], b[2], bits), __funnelshift_r(b[2], b[3], bits),
            __funnelshift_r(b[3], b[4], bits)};
}

/* ---- functions ------------------------------------------------------------------------------- */

/* 2^x by the special-function unit, to 2 units in the last place; -inf -> 0, NaN -> NaN. Subnormal
 * results are flushed to 0; callers that need them scale the argument. */
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* e^x for x <= 80, accurate enough to be rounded to T. Subnormal results are kept if T can store
 * them. */
template <typename T> DEVICE float exp_as(float x);
template <> DEVICE float exp_as<float>(float x) {
    return expf(x);
}
template <> DEVICE float exp_as<bf16>(float x) {
    const float root = exp2_fast(x * (LOG2E / 2)); /* the unit flushes subnormals; the product does not */
    return root * root;
}
template <> DEVICE float exp_as<fp16>(float x) {
    return exp2_fast(x * LOG2E);
}

/* 1 / x by the special-function unit, to 1 unit in the last place, for x in [2^-126, 2^126]. */
DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- asynchronous copies into shared memory (cp.async) --------------------------------------- */

/* Copies one pack from global to shared memory: asynchronously if it is 4 bytes or more. */
template <typename T, int N> DEVICE void copy_async(Pack<T, N> *to, const T *from) {
    constexpr int BYTES = N * (int)sizeof(T);
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
    else if constexpr (BYTES >= 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES) : "memory");
    else
        *to = *reinterpret_cast<const Pack<T, N> *>(from);
}

/* The same with an L2 cache policy (above). */
template <typename T, int N> DEVICE void copy_async(Pack<T, N> *to, const T *from, uint64_t policy) {
    if constexpr (N * sizeof(T) == 16)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
                     "l"(from), "l"(policy)
                     : "memory");
    else
        copy_async(to, from);
}

/* Shared memory by its 32-bit address there. The compiler computes the address behind a pointer
 * again for every access. */
DEVICE unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
template <typename T> DEVICE T read_shared(unsigned at) {
    typename Word<sizeof(T)>::type w;
    if constexpr (sizeof w == 2)
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(w) : "r"(at) : "memory");
    else if constexpr (sizeof w == 4)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(at) : "memory");
    else
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "r"(at)
                     : "memory");
    return reinterpret_cast<const T &>(w);
}
template <typename T> DEVICE void write_shared(unsigned at, const T &value) {
    const auto &w = reinterpret_cast<const typename Word<sizeof(T)>::type &>(value);
    if constexpr (sizeof w == 2)
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(w) : "memory");
    else
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(w) : "memory");
}
DEVICE void write_shared_16(unsigned at, const uint4 &w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}
/* cp.async of 16 bytes. */
DEVICE void copy_async_to(unsigned at, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

/* Ends a group of copies: cp.async.commit_group. */
DEVICE void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most the last N groups of this thread are in flight. */
template <int N> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* The same with N known at run time. Above 7 it waits until 7 are in flight. */
DEVICE void copy_wait_all_but(int groups) {
    switch (groups) {
    case 0: copy_wait<0>(); break;
    case 1: copy_wait<1>(); break;
    case 2: copy_wait<2>(); break;
    case 3: copy_wait<3>(); break;
    case 4: copy_wait<4>(); break;
    case 5: copy_wait<5>(); break;
    case 6: copy_wait<6>(); break;
    default: copy_wait<7>(); break;
    }
}

/* ---- words that blocks wait on --------------------------------------------------------------- */

/* A word that holds EMPTY until its one write, so that readers see whether it was written. No float
 * looks like EMPTY: the one NaN with these bits is stored as another NaN. */
constexpr unsigned EMPTY = 0xffffffffu;

DEVICE void store_flagged(unsigned *p, float value) {
    const unsigned bits = __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(bits == EMPTY ? 0x7fffffffu : bits) : "memory");
}

DEVICE unsigned load_relaxed(const unsigned *p) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

/* After a block barrier, one thread of the block adds with release; a thread that sees the sum with
 * acquire then sees everything the block has written. */
DEVICE void add_release(unsigned *p, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DEVICE unsigned load_acquire(const unsigned *p) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

/* ---- programmatic dependent launch ----------------------------------------------------------- */

/* Lets the next kernel, if it was launched with Launch::overlaps, start when all blocks of this
 * kernel have called this or ended. */
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* In a kernel launched with Launch::overlaps: waits until the previous kernel has ended. Everything
 * before that one has ended too: it did not overlap with its predecessor, or it has waited as
 * well. */
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Issues all loads above this call before any load below it. Otherwise the compiler moves a load
 * whose value is the same in all threads to the front: it puts the value into a uniform register,
 * and waits for it there. In a kernel launched with Launch::overlaps this also waits for the
 * previous kernel. */
DEVICE void issue_loads_first() {
    wait_for_previous_kernel();
}

/* ---- reductions over a warp, always in the same order ---------------------------------------- */

DEVICE float warp_max(float a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
    return a;
}

DEVICE float warp_sum(float a) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        a += __shfl_xor_sync(~0u, a, step);
    return a;
}

#endif
