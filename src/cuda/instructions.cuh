/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PTX instructions, one function each; cluster.cuh and hopper.cuh have those that need sm_90. Other device code has no
 * PTX, because tests/emulator has these functions in C++, so that kernels run without a GPU.
 */
#ifndef RAFTER_CUDA_INSTRUCTIONS_CUH
#define RAFTER_CUDA_INSTRUCTIONS_CUH

#include <stdint.h>

#define DEVICE __device__ __forceinline__

/* Declares the kernel's dynamic shared memory as an array. */
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define DYNAMIC_SHARED_ALIGNED(bytes, type, name)                                                                      \
    extern __shared__ __align__(bytes)                                                                                 \
    type name[]

/* ---- loads and stores ------------------------------------------------------------------------ */

/* Always a single store. The compiler may otherwise store the parts of a pack one by one, with four times the traffic
 * to L2. */
DEVICE void store_16_bytes(void *p, const uint4 &w) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}

/* L2 cache policies. evict_last keeps data that another block reads soon; evict_first drops data that nobody reads
 * again. */
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

DEVICE void store_16_bytes(void *p, const uint4 &w, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z),
                 "r"(w.w), "l"(policy)
                 : "memory");
}

/* A load that is issued here: the compiler cannot move it down to its first use. */
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

/* Loads 16 bytes from an aligned address, or gives zeros. Issued here: the compiler would move such loads into the
 * branches that use them, and cut them into smaller ones. */
DEVICE uint4 load_now_if(bool present, const void *p) {
    uint4 w = {0, 0, 0, 0};
    asm volatile("{\n\t.reg .pred present;\n\tsetp.ne.u32 present, %5, 0;\n\t"
                 "@present ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)
                 : "l"(p), "r"(static_cast<unsigned>(present))
                 : "memory");
    return w;
}

/* Loads 4 bytes if `wide`, else 2; issued here. */
DEVICE unsigned load_2_or_4_bytes_now(const void *p, bool wide) {
    unsigned bits;
    asm volatile("{\n\t.reg .pred wide;\n\tsetp.ne.u32 wide, %2, 0;\n\t"
                 "@wide ld.global.b32 %0, [%1];\n\t@!wide ld.global.u16 %0, [%1];\n\t}"
                 : "=r"(bits)
                 : "l"(p), "r"(static_cast<unsigned>(wide)));
    return bits;
}

/* ---- words that blocks wait on --------------------------------------------------------------- */

DEVICE void store_relaxed(unsigned *p, unsigned value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DEVICE unsigned load_relaxed(const unsigned *p) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
/* Loads four adjacent words. */
DEVICE uint4 load_four_relaxed(const unsigned *p) {
    uint4 w;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p)
                 : "memory");
    return w;
}

/* To count blocks that have written their results: after a block barrier, one thread of the block calls add_release. A
 * thread that sees the new sum by load_acquire also sees everything that the block has written. */
DEVICE void add_release(unsigned *p, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
DEVICE unsigned load_acquire(const unsigned *p) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

/* ---- shared memory --------------------------------------------------------------------------- */

/* Access to shared memory by 32-bit address. With pointers, the compiler would compute the address again for every
 * access. */
DEVICE unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
DEVICE void read_shared(unsigned at, unsigned short &w) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(w) : "r"(at) : "memory");
}
DEVICE void read_shared(unsigned at, unsigned &w) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(at) : "memory");
}
DEVICE void read_shared(unsigned at, uint4 &w) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "r"(at)
                 : "memory");
}
DEVICE void write_shared_word(unsigned at, unsigned short w) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(w) : "memory");
}
DEVICE void write_shared_word(unsigned at, unsigned w) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(w) : "memory");
}
DEVICE void write_shared_16(unsigned at, const uint4 &w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
}

/* Asynchronous copies into shared memory, of 16 bytes, of BYTES = 4 or 8, and of 16 with an L2 cache policy. */
DEVICE void copy_async_to(unsigned at, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
template <int BYTES> DEVICE void copy_few_async_to(unsigned at, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void copy_async_to(unsigned at, const void *from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "l"(policy)
                 : "memory");
}
/* Makes the copies since the last call a group, which may be empty. */
DEVICE void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most the last N groups of this thread are in flight. */
template <int N> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

/* 2^x by the special-function unit, to 2 units in the last place; -inf -> 0, NaN -> NaN. Subnormal
 * results are flushed to 0; callers that need them scale the argument. */
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x by the special-function unit, to 1 unit in the last place, for x in [2^-126, 2^126]. */
DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The maximum; NaN if either is NaN. */
DEVICE float max_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

/* first ? a : b, where both are always computed. For ?: the compiler would branch around each special function. */
DEVICE float either(bool first, float a, float b) {
    float chosen;
    asm("{ .reg .pred p; setp.ne.s32 p, %1, 0; selp.f32 %0, %2, %3, p; }"
        : "=f"(chosen)
        : "r"(static_cast<int>(first)), "f"(a), "f"(b));
    return chosen;
}

/* The number that has these bits: an fp32 if `kind` is FP32, a bf16 if it is BF16, else an fp16. */
template <int FP32, int BF16> DEVICE float number_of(unsigned bits, unsigned kind) {
    float number;
    asm("{\n\t.reg .pred wide, brain;\n\t.reg .b16 low, high;\n\t.reg .b32 shifted, half;\n\t"
        "setp.eq.u32 wide, %2, %3;\n\tsetp.eq.u32 brain, %2, %4;\n\t"
        "mov.b32 {low, high}, %1;\n\tcvt.f32.f16 half, low;\n\tshl.b32 shifted, %1, 16;\n\t"
        "selp.b32 shifted, shifted, half, brain;\n\tselp.b32 %0, %1, shifted, wide;\n\t}"
        : "=f"(number)
        : "r"(bits), "r"(kind), "n"(FP32), "n"(BF16));
    return number;
}

/* The lower 64 bits of the product of the 64-bit number (high, middle) and `factor`. */
DEVICE uint2 multiply_64x32(unsigned middle, unsigned high, unsigned factor) {
    uint2 product;
    asm("{ .reg .b64 lower; .reg .b32 carry;\n"
        "mul.wide.u32 lower, %2, %4; mov.b64 {%0, carry}, lower; mad.lo.u32 %1, %3, %4, carry; }"
        : "=r"(product.x), "=r"(product.y)
        : "r"(middle), "r"(high), "r"(factor));
    return product;
}

/* (a, b), or (b, a) if bit 30 of `bits` is set. In C++ the predicate would take three instructions. */
DEVICE float2 swapped_by_bit_30(unsigned bits, float a, float b) {
    float2 both;
    asm("{ .reg .pred odd; .reg .b32 bit;\n"
        "and.b32 bit, %2, 0x40000000; setp.ne.u32 odd, bit, 0;\n"
        "selp.f32 %0, %4, %3, odd; selp.f32 %1, %3, %4, odd; }"
        : "=f"(both.x), "=f"(both.y)
        : "r"(bits), "f"(a), "f"(b));
    return both;
}

/* ---- barriers and launches ------------------------------------------------------------------- */

/* A barrier of some of the block's warps, with THREADS threads in all. `number`: 1 to 15, a different one for each such
 * group. */
template <int THREADS> DEVICE void sync_some(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

/* Programmatic dependent launch: a kernel may start before the previous one has ended (launch in launch.cuh). Rules:
 *   A kernel that may be the first of a call calls wait_for_inputs (primitives.cuh) before any access to global memory.
 *   A later kernel calls wait_for_previous_kernel before it uses results of the previous one. It may read the call's
 *   inputs at once, because the first kernel has waited for them.
 *   Every kernel waits before it ends, and the first one waits before it lets the next kernel start.
 * In tests, inputs_come_late (harness/device.c) checks that all kernels comply. */

/* Lets the next kernel start once all blocks of this one have called this or ended. Without it, the next kernel starts
 * when all blocks have ended, which is still earlier than in an ordinary launch. */
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the previous kernel has ended. Then everything before it has ended too, because it has waited as well. */
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
