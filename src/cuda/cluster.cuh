/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clusters of blocks, and the shared memory of the other blocks of a cluster. Only for code that is
 * compiled for sm_90 and later: a kernel that is also compiled for older GPUs calls these functions
 * inside #if __CUDA_ARCH__ >= 900, or in a template that is not instantiated there.
 */
#ifndef RAFTER_CUDA_CLUSTER_CUH
#define RAFTER_CUDA_CLUSTER_CUH

#include "cuda/primitives.cuh"

DEVICE unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE unsigned cluster_blocks() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

/* The two halves of a barrier of all threads of the cluster. Between them a thread may do work that does not depend on
 * other blocks. All threads of a warp call them together. */
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

/* Stores `value` at the address of `shared`, but in the shared memory of block `rank` of the cluster. That block must
 * have started, and must not have ended. */
DEVICE void store_to_cluster(void *shared, float2 value, unsigned rank) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

/* Loads from that address in block `rank`, under the same conditions. */
DEVICE float2 load_from_cluster(const void *shared, unsigned rank) {
    unsigned address;
    float2 value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

#endif
