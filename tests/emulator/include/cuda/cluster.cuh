/* SPDX-License-Identifier: Apache-2.0 */
/* src/cuda/cluster.cuh, whose comments say what each function does, in C++: see emulator.h. */
#ifndef RAFTER_CUDA_CLUSTER_CUH
#define RAFTER_CUDA_CLUSTER_CUH

#include "cuda/primitives.cuh"

DEVICE unsigned cluster_rank() {
    return emulator::place.cluster_rank;
}
DEVICE unsigned cluster_blocks() {
    return emulator::place.cluster_blocks;
}
DEVICE void cluster_arrive() {
    emulator::cluster_arrive();
}
DEVICE void cluster_wait() {
    emulator::cluster_wait();
}
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
DEVICE void store_to_cluster(void *shared, float2 value, unsigned rank) {
    *aligned<float2>(emulator::in_cluster(shared, rank)) = value;
}
DEVICE float2 load_from_cluster(const void *shared, unsigned rank) {
    return *aligned<float2>(emulator::in_cluster(shared, rank));
}

#endif
