/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the emulator finds mistakes: kernels that contain one give wrong results, and correct ones do not. */
#include <stdio.h>
#include <string.h>

#include "cuda/cluster.cuh"

constexpr int THREADS = 128;

/* Writes the sum of in[0 ... THREADS). */
template <bool CORRECT> static __global__ void sum_block(const int *in, int *out) {
    __shared__ int values[THREADS];
    values[threadIdx.x] = in[threadIdx.x];
    if (CORRECT)
        __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < THREADS; i++)
            sum += values[i];
        *out = sum;
    }
    __syncthreads();
    values[threadIdx.x] = 0;
}

/* The same, by lanes that exchange values. */
template <bool CORRECT> static __global__ void sum_lanes(const int *in, int *out) {
    __shared__ int of_warps[THREADS / 32];
    int sum = in[threadIdx.x];
    for (int step = CORRECT ? 16 : 8; step > 0; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        *out = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3];
}

/* The same through copies that are waited for. */
template <bool CORRECT> static __global__ void sum_copied(const int *in, int *out) {
    DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = 0;
    copy_few_async_to<4>(shared_address(values + threadIdx.x), in + threadIdx.x);
    copy_commit();
    if (CORRECT)
        copy_wait<0>();
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < THREADS; i++)
            sum += values[i];
        *out = sum;
    }
}

/* The same by a cluster of four blocks, whose first one collects what the others have. */
template <bool CORRECT> static __global__ void sum_cluster(const int *in, int *out) {
    __shared__ float2 parts[4];
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < 10000 && cluster_rank() > 0; i++) /* the first block comes first */
            __nanosleep(1);
        for (int i = 0; i < THREADS / 4; i++)
            sum += in[cluster_rank() * (THREADS / 4) + i];
        store_to_cluster(&parts[cluster_rank()], {static_cast<float>(sum), 0.0f}, 0);
    }
    if (CORRECT)
        cluster_sync();
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        float sum = 0.0f;
        for (const float2 &part : parts)
            sum += part.x;
        *out = static_cast<int>(sum);
    }
    if (CORRECT)
        cluster_sync();
}

/* Fills `in`, after the next kernel may have started. */
static __global__ void fill(const int *, int *in) {
    start_next_kernel();
    in[threadIdx.x] = static_cast<int>(threadIdx.x);
}
template <bool CORRECT> static __global__ void sum_after(const int *in, int *out) {
    if (CORRECT)
        wait_for_previous_kernel();
    int sum = 0;
    for (int i = 0; i < THREADS; i++)
        sum += in[i];
    if (!CORRECT)
        wait_for_previous_kernel();
    *out = sum;
}
/* Runs between the two, and lets the next kernel start before it has waited itself. */
template <bool CORRECT> static __global__ void nothing(const int *, int *) {
    if (CORRECT)
        wait_for_previous_kernel();
    start_next_kernel();
    if (!CORRECT)
        wait_for_previous_kernel();
}

static void launch(void (*kernel)(const int *, int *), const int *in, int *out, unsigned blocks, unsigned cluster,
                   bool overlaps) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = overlaps;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = THREADS * sizeof(int);
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config, kernel, in, out);
}

static int failed;

static void expect(const char *name, bool right, bool correct) {
    printf("%s %s: %s\n", correct ? "correct" : "wrong", name, right == correct ? "passed" : "FAILED");
    failed += right != correct;
}

template <bool CORRECT> static void test(int *in, int *out) {
    constexpr int SUM = THREADS * (THREADS - 1) / 2;
    const struct {
        const char *name;
        void (*kernel)(const int *, int *);
        unsigned cluster;
    } kernels[] = {{"barrier", sum_block<CORRECT>, 1},
                   {"exchange", sum_lanes<CORRECT>, 1},
                   {"asynchronous copy", sum_copied<CORRECT>, 1},
                   {"cluster", sum_cluster<CORRECT>, 4}};
    for (int i = 0; i < THREADS; i++)
        in[i] = i;
    for (const auto &one : kernels) {
        *out = 0;
        launch(one.kernel, in, out, one.cluster, one.cluster, false);
        cudaDeviceSynchronize();
        expect(one.name, *out == SUM, CORRECT);
    }
    memset(in, 0, THREADS * sizeof *in);
    launch(fill, nullptr, in, 1, 1, false);
    launch(sum_after<CORRECT>, in, out, 1, 1, true);
    cudaDeviceSynchronize();
    expect("wait for the kernel before", *out == SUM, CORRECT);
    /* The third kernel reads, before it waits for the second one, what the first one writes: it may, if the second one
     * has waited before it let the third one start. */
    memset(in, 0, THREADS * sizeof *in);
    launch(fill, nullptr, in, 1, 1, false);
    launch(nothing<CORRECT>, nullptr, out, 1, 1, true);
    launch(sum_after<false>, in, out, 1, 1, true);
    cudaDeviceSynchronize();
    expect("wait before the next kernel starts", *out == SUM, CORRECT);
}

int main() {
    void *in = nullptr, *out = nullptr;
    cudaMalloc(&in, THREADS * sizeof(int));
    cudaMalloc(&out, sizeof(int));
    test<true>(static_cast<int *>(in), static_cast<int *>(out));
    test<false>(static_cast<int *>(in), static_cast<int *>(out));
    return failed != 0;
}
