/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hopper's asynchronous instructions, one function each: barriers in shared memory (mbarrier), bulk
 * tensor copies by the copy engine (TMA), warpgroup matrix products (wgmma). The products, and the
 * registers that warpgroups exchange, are only for code inside #ifdef __CUDA_ARCH_FEAT_SM90_ALL; the
 * rest is also for any code that is compiled for sm_90 and later.
 */
#ifndef RAFTER_CUDA_HOPPER_CUH
#define RAFTER_CUDA_HOPPER_CUH

#include <cuda.h>

#include "cuda/cluster.cuh"

/* A barrier of all threads of a warpgroup. `number`: 1 to 15, a different one for each group of the block. */
DEVICE void group_sync(int number) {
    sync_some<128>(number);
}

/* ---- barriers -------------------------------------------------------------------------------- */

DEVICE void barrier_init(uint64_t *barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the other blocks of the cluster and to the copy engine. */
DEVICE void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives, and announces how many bytes copies will write before the phase is complete. */
DEVICE void barrier_expect(uint64_t *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

DEVICE void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Arrives at the barrier at the same shared memory address in block `rank` of the cluster. Does not order this thread's
 * accesses for the other block: a release to the cluster costs hundreds of cycles, as a fence of the whole device does.
 * It is not needed: when products_wait returns, the operands have been read, and the copy engine may overwrite them. */
DEVICE void barrier_arrive_at(unsigned barrier, unsigned rank) {
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* Waits until the phase with this parity is complete. */
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
DEVICE void barrier_wait(uint64_t *barrier, unsigned parity) {
    barrier_wait(shared_address(barrier), parity);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Prefetches the map itself, before the first copy needs it. */
DEVICE void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Starts to copy the box of a matrix that begins at (row, column) into this block's shared memory. Its bytes are
 * counted by the barrier: see barrier_expect. */
DEVICE void copy_box(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

/* The same for a tensor of five dimensions. */
DEVICE void copy_box(void *to, const CUtensorMap *map, int column, int row, const int (&outer)[3], uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(outer[0]), "r"(outer[1]), "r"(outer[2]),
                 "r"(shared_address(barrier))
                 : "memory");
}

/* Prefetches a box into L2. */
DEVICE void prefetch_box(const CUtensorMap *map, int column, int row, const int (&outer)[3]) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(column),
                 "r"(row), "r"(outer[0]), "r"(outer[1]), "r"(outer[2])
                 : "memory");
}

/* Starts to copy a box to the same address in all blocks of the cluster that are set in `mask`. In each of them the
 * barrier at this address counts the bytes. */
DEVICE void copy_box_to_all(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier,
                            unsigned short mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(mask)
                 : "memory");
}

/* Makes shared memory that this thread has written visible to the copy engine. */
DEVICE void shared_written() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Starts to store a box from shared memory, as a group of its own: see stores_wait. */
DEVICE void store_box(const CUtensorMap *map, int column, int row, const void *from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(column), "r"(row), "r"(shared_address(from))
                 : "memory");
}
/* The same, but adds the box to what is in memory, in the tensor's dtype. */
DEVICE void add_box(const CUtensorMap *map, int column, int row, const void *from) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(column), "r"(row), "r"(shared_address(from))
                 : "memory");
}
/* Waits until the copy engine has read all but the last N boxes that this thread has stored: the shared memory of the
 * earlier ones may be reused. */
template <int N> DEVICE void stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Waits until all of this thread's stored boxes are in memory. */
DEVICE void stores_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Stores four matrices of 8 x 8 elements of 2 bytes. The first 8 lanes pass the addresses of the
 * first matrix's rows, the next 8 those of the second, and so on. u[k]: lane l's elements of matrix
 * k, row l / 4, columns 2 (l % 4) and the next. */
DEVICE void store_8x8x4(void *row, const unsigned (&u)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(u[0]), "r"(u[1]), "r"(u[2]), "r"(u[3])
                 : "memory");
}

/* ---- products -------------------------------------------------------------------------------- */

/* The lower half of wgmma's descriptor of an operand in shared memory, at address `shared`. The operand has rows of 128
 * bytes in the copy engine's 128-byte swizzle. The reduced dimension runs along the rows. If TRANSPOSED, it runs across
 * them: a row has 64 elements of 2 bytes of the other dimension, and the next 64 are `chunk` bytes further. */
template <bool TRANSPOSED> DEVICE unsigned operand_of(unsigned shared, int chunk) {
    /* The descriptor takes 18 bits of the address. The bits above differ between the blocks of a cluster. */
    return (shared & 0x3ffff) >> 4 | (TRANSPOSED ? chunk >> 4 : 1) << 16;
}
/* The upper half of all descriptors: 1024 bytes from eight rows to the next eight, and the 128-byte swizzle. */
constexpr uint64_t OPERANDS = uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
/* What to add to the lower half to move on by BYTES bytes, or by 16 elements of the reduced dimension. */
template <int BYTES> constexpr unsigned OPERAND_BYTES = BYTES >> 4;
template <bool TRANSPOSED> constexpr unsigned OPERAND_STEP = OPERAND_BYTES<TRANSPOSED ? 16 * 128 : 16 * 2>;

/* products_begin: before the first product, orders earlier accesses to the registers of its results. products_commit:
 * ends a group of products. */
DEVICE void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N committed groups of products are unfinished. */
template <int N> DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define RAFTER_8(d, i)                                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define RAFTER_32(d, i) RAFTER_8(d, i), RAFTER_8(d, i + 8), RAFTER_8(d, i + 16), RAFTER_8(d, i + 24)
#define RAFTER_MULTIPLY_256(type)                                                                                      \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                    \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                    \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "        \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "   \
                 "%128, %129, p, 1, 1, %131, %132;\n\t}"                                                               \
                 : RAFTER_32(d, 0), RAFTER_32(d, 32), RAFTER_32(d, 64), RAFTER_32(d, 96)                               \
                 : "l"(a), "l"(b), "r"(add), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED))

#define RAFTER_MULTIPLY_192(type)                                                                                      \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %98, 0;\n\t"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                             \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                    \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                    \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                    \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                    \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "                   \
                 "%96, %97, p, 1, 1, %99, %100;\n\t}"                                                                  \
                 : RAFTER_32(d, 0), RAFTER_32(d, 32), RAFTER_32(d, 64)                                                 \
                 : "l"(a), "l"(b), "r"(add), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED))

/* d[64, N] = a[64, 16] b[N, 16]^T, added to d if `add`, by the four warps of a warpgroup. N = 2 SUMS is 256 or 192.
 * a_low, b_low: operand_of. Lane l of warp w holds, for j < SUMS / 4, i < 2 and c < 2, element
 * (16 w + l / 4 + 8 i, 8 j + 2 (l % 4) + c) as d[4 j + 2 i + c]. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, int SUMS>
DEVICE void multiply_64xNx16(float (&d)[SUMS], unsigned a_low, unsigned b_low, int add) {
    static_assert(SUMS == 128 || SUMS == 96, "N");
    const uint64_t a = OPERANDS | a_low, b = OPERANDS | b_low;
    if constexpr (SUMS == 128 && __is_same(T, bf16))
        RAFTER_MULTIPLY_256("bf16");
    else if constexpr (SUMS == 128)
        RAFTER_MULTIPLY_256("f16");
    else if constexpr (__is_same(T, bf16))
        RAFTER_MULTIPLY_192("bf16");
    else
        RAFTER_MULTIPLY_192("f16");
}

/* Raise or lower the registers per thread of this warpgroup to REGISTERS. */
template <int REGISTERS> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
