/* SPDX-License-Identifier: Apache-2.0 */
/* src/cuda/instructions.cuh, whose comments say what each function does, in C++: see emulator.h. */
#ifndef RAFTER_CUDA_INSTRUCTIONS_CUH
#define RAFTER_CUDA_INSTRUCTIONS_CUH

#include "cuda_bf16.h"
#include "cuda_fp16.h"

#define DEVICE inline

/* ---- loads and stores ------------------------------------------------------------------------ */

/* As on a GPU, an access must be aligned to its size. */
template <typename T> T *aligned(const void *p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0)
        emulator::fail("an access is not aligned");
    return static_cast<T *>(const_cast<void *>(p));
}

DEVICE void store_16_bytes(void *p, const uint4 &w) {
    *aligned<uint4>(p) = w;
}
DEVICE uint64_t l2_evict_last() {
    return 0;
}
DEVICE uint64_t l2_evict_first() {
    return 0;
}
DEVICE void store_16_bytes(void *p, const uint4 &w, uint64_t) {
    store_16_bytes(p, w);
}
DEVICE int64_t load_now(const int64_t *p) {
    return *aligned<int64_t>(p);
}
DEVICE int load_now(const int *p) {
    return *aligned<int>(p);
}
DEVICE float load_now(const float *p) {
    return *aligned<float>(p);
}
DEVICE uint4 load_now_if(bool present, const void *p) {
    return present ? *aligned<uint4>(p) : uint4{0, 0, 0, 0};
}
DEVICE unsigned load_2_or_4_bytes_now(const void *p, bool wide) {
    return wide ? *aligned<unsigned>(p) : *aligned<unsigned short>(p);
}

/* ---- words that blocks wait on --------------------------------------------------------------- */

DEVICE void store_relaxed(unsigned *p, unsigned value) {
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}
DEVICE unsigned load_relaxed(const unsigned *p) {
    emulator::yield();
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
DEVICE uint4 load_four_relaxed(const unsigned *p) {
    emulator::yield();
    return {__atomic_load_n(p, __ATOMIC_SEQ_CST), __atomic_load_n(p + 1, __ATOMIC_SEQ_CST),
            __atomic_load_n(p + 2, __ATOMIC_SEQ_CST), __atomic_load_n(p + 3, __ATOMIC_SEQ_CST)};
}
DEVICE void add_release(unsigned *p, unsigned value) {
    __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
DEVICE unsigned load_acquire(const unsigned *p) {
    return load_relaxed(p);
}

/* ---- shared memory --------------------------------------------------------------------------- */

constexpr unsigned EMULATED_ORIGIN = 1u << 31; /* the address of emulated_shared */

DEVICE unsigned shared_address(const void *p) {
    const int64_t distance = static_cast<const char *>(p) - emulated_shared;
    if (distance < -(1 << 30) || distance > 1 << 30)
        emulator::fail("an address is not one of shared memory");
    return EMULATED_ORIGIN + static_cast<unsigned>(distance);
}
DEVICE void *shared_pointer(unsigned address) {
    return emulated_shared + static_cast<int>(address - EMULATED_ORIGIN);
}
template <typename W> DEVICE void read_shared(unsigned at, W &w) {
    w = *aligned<W>(shared_pointer(at));
}
template <typename W> DEVICE void write_shared_word(unsigned at, W w) {
    *aligned<W>(shared_pointer(at)) = w;
}
DEVICE void write_shared_16(unsigned at, const uint4 &w) {
    *aligned<uint4>(shared_pointer(at)) = w;
}
DEVICE void copy_async_to(unsigned at, const void *from) {
    emulator::copy_async(aligned<uint4>(shared_pointer(at)), aligned<uint4>(from), 16);
}
template <int BYTES> DEVICE void copy_few_async_to(unsigned at, const void *from) {
    typedef typename std::conditional<BYTES == 8, uint2, unsigned>::type W;
    emulator::copy_async(aligned<W>(shared_pointer(at)), aligned<W>(from), BYTES);
}
DEVICE void copy_async_to(unsigned at, const void *from, uint64_t) {
    copy_async_to(at, from);
}
DEVICE void copy_commit() {
    emulator::copy_commit();
}
template <int N> DEVICE void copy_wait() {
    emulator::copy_wait(N);
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

DEVICE float flushed(float a) {
    return fabsf(a) < 0x1p-126f ? copysignf(0.0f, a) : a;
}
DEVICE float exp2_fast(float x) {
    return flushed(exp2f(flushed(x)));
}
DEVICE float reciprocal_fast(float x) {
    return flushed(1.0f / flushed(x));
}
DEVICE float max_or_nan(float a, float b) {
    return a != a || b != b ? NAN : fmaxf(a, b);
}
DEVICE float either(bool first, float a, float b) {
    return first ? a : b;
}
template <int FP32, int BF16> DEVICE float number_of(unsigned bits, unsigned kind) {
    return kind == FP32   ? __uint_as_float(bits)
           : kind == BF16 ? __uint_as_float(bits << 16)
                          : static_cast<float>(bits_as<__half>(static_cast<unsigned short>(bits)));
}
DEVICE uint2 multiply_64x32(unsigned middle, unsigned high, unsigned factor) {
    const uint64_t product = (static_cast<uint64_t>(high) << 32 | middle) * factor;
    return {static_cast<unsigned>(product), static_cast<unsigned>(product >> 32)};
}
DEVICE float2 swapped_by_bit_30(unsigned bits, float a, float b) {
    return bits >> 30 & 1 ? float2{b, a} : float2{a, b};
}

/* ---- barriers and launches ------------------------------------------------------------------- */

template <int THREADS> DEVICE void sync_some(int number) {
    emulator::sync_threads(number, THREADS);
}
DEVICE void start_next_kernel() {
    emulator::start_next_kernel();
}
DEVICE void wait_for_previous_kernel() {
    emulator::wait_for_previous_kernel();
}

#endif
