/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The basic device functions that all kernels use: conversions, wide loads and stores, asynchronous
 * copies. The counterpart of src/simd/simd.h.
 *
 * Kernels are templates over the storage type T (float, __nv_bfloat16, __half) and compute in
 * float. A `Pack` is what one thread loads or stores in one access: 16 bytes where alignment allows.
 */
#ifndef RAFTER_CUDA_PRIMITIVES_CUH
#define RAFTER_CUDA_PRIMITIVES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/instructions.cuh"

typedef __nv_bfloat16 bf16;
typedef __half fp16;

constexpr int WARP = 32;
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float LN2 = 0.69314718055994530942f;

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

/* Loads data that this kernel reads once. A plain load on purpose: on an H200 a copy kernel takes 4
 * to 5 % longer with streaming loads (ld.cs or L1::no_allocate), and another 1 % with streaming
 * stores: docs/perf/README.md. */
template <typename T, int N> DEVICE Pack<T, N> load_once(const T *p) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W w = *reinterpret_cast<const W *>(p);
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* Loads data that will be read again, or that this kernel overwrites later: cached in L2, not in
 * L1. */
template <typename T, int N> DEVICE Pack<T, N> load_l2(const T *p) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W w = __ldcg(reinterpret_cast<const W *>(p));
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* Stores data that no kernel reads soon. */
template <typename T, int N> DEVICE void store_once(T *p, const Pack<T, N> &a) {
    typedef typename Word<N * sizeof(T)>::type W;
    const W &w = reinterpret_cast<const W &>(a);
    if constexpr (sizeof w == 16)
        store_16_bytes(p, w);
    else
        *reinterpret_cast<W *>(p) = w;
}

/* The same with an L2 cache policy. */
template <typename T, int N> DEVICE void store_with(T *p, const Pack<T, N> &a, uint64_t policy) {
    if constexpr (N * sizeof(T) == 16)
        store_16_bytes(p, reinterpret_cast<const uint4 &>(a), policy);
    else
        store_once(p, a);
}

/* Elements per pack of 16 bytes. */
template <typename T> constexpr int WIDE = 16 / (int)sizeof(T);

/* Converts all elements of a pack to floats, with one instruction each. (Element by element, the odd elements of a bf16
 * pack would take two.) */
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

/* The reverse, rounding to nearest even; 16-bit types are converted two at a time. */
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

/* Whether T is one of the 16-bit types. */
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

/* Loads a pack; if `present` is false, gives one full of `value`. */
template <typename T, int N> DEVICE Pack<T, N> load_once_if(bool present, const T *p, float value) {
    typedef typename Word<N * sizeof(T)>::type W;
    const Pack<T, N> instead = all_of<T, N>(value);
    W w = reinterpret_cast<const W &>(instead);
    if (present)
        w = *reinterpret_cast<const W *>(p);
    return reinterpret_cast<const Pack<T, N> &>(w);
}

/* The offset of an element, in elements, from the last 16-byte boundary. */
template <typename T> DEVICE int offset_in_pack(const T *p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
}

/* 16 of the 32 bytes (low, high), from byte `bytes` on, which is even and below 16. */
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

/* ---- asynchronous copies into shared memory (cp.async) --------------------------------------- */

/* Copies one pack from global to shared memory: asynchronously if it is 4 bytes or more. */
template <typename T, int N> DEVICE void copy_async(Pack<T, N> *to, const T *from) {
    constexpr int BYTES = N * (int)sizeof(T);
    if constexpr (BYTES == 16)
        copy_async_to(shared_address(to), from);
    else if constexpr (BYTES >= 4)
        copy_few_async_to<BYTES>(shared_address(to), from);
    else
        *to = *reinterpret_cast<const Pack<T, N> *>(from);
}

/* The same with an L2 cache policy. */
template <typename T, int N> DEVICE void copy_async(Pack<T, N> *to, const T *from, uint64_t policy) {
    if constexpr (N * sizeof(T) == 16)
        copy_async_to(shared_address(to), from, policy);
    else
        copy_async(to, from);
}

/* Access to shared memory by its 32-bit address. T has 2, 4 or (read_shared only) 16 bytes. */
template <typename T> DEVICE T read_shared(unsigned at) {
    typename Word<sizeof(T)>::type w;
    read_shared(at, w);
    return reinterpret_cast<const T &>(w);
}
template <typename T> DEVICE void write_shared(unsigned at, const T &value) {
    write_shared_word(at, reinterpret_cast<const typename Word<sizeof(T)>::type &>(value));
}

/* copy_wait with N known at run time. For N above 7 it waits until at most 7 groups are in flight. */
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

/* A word holds EMPTY until its only write, so that readers see from the word whether it has been written. No float that
 * is stored has the bits of EMPTY: the one NaN with these bits is stored as another NaN. */
constexpr unsigned EMPTY = 0xffffffffu;

DEVICE void store_flagged(unsigned *p, float value) {
    const unsigned bits = __float_as_uint(value);
    store_relaxed(p, bits == EMPTY ? 0x7fffffffu : bits);
}

/* ---- waits for earlier work, and loads in order ----------------------------------------------- */

/* Waits until work before the call has ended: it may still be writing this call's inputs, or reading memory that this
 * call overwrites. The same instruction as wait_for_previous_kernel; the name says which rule the kernel follows. */
DEVICE void wait_for_inputs() {
    wait_for_previous_kernel();
}

/* Keeps the loads above this call above it, for kernels that have already waited. Otherwise the compiler moves a load
 * whose value is the same in all threads (a label, say) to the front and waits for it there, to keep the value in a
 * uniform register. */
DEVICE void fence_loads() {
    wait_for_previous_kernel();
}

#endif
