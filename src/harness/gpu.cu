/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/gpu.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/sizes.h"
#include "cuda/instructions.cuh"
#include "harness/problem.h"

static cudaStream_t stream_of(const rafter_context *context) {
    return static_cast<cudaStream_t>(context->stream);
}

template <typename... Wanted, typename... Given>
static bool launch(cudaStream_t stream, unsigned blocks, unsigned threads, size_t shared, void (*kernel)(Wanted...),
                   const Given &...given) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Wanted>(given)...) == cudaSuccess;
}

/* ---- the device ------------------------------------------------------------------------------ */

void gpu_describe(const rafter_context *context, struct gpu_facts *facts) {
    cudaDeviceProp properties;
    memset(facts, 0, sizeof *facts);
    if (cudaGetDeviceProperties(&properties, context->device.device_id) != cudaSuccess)
        return;
    snprintf(facts->name, sizeof facts->name, "%s", properties.name);
    facts->compute_capability = 10 * properties.major + properties.minor;
    facts->multiprocessors = properties.multiProcessorCount;
    facts->l2_bytes = properties.l2CacheSize;
    facts->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    cudaDriverGetVersion(&facts->driver);
    cudaRuntimeGetVersion(&facts->runtime);
}

/* ---- memory ---------------------------------------------------------------------------------- */

void *gpu_allocate(size_t bytes) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError(); /* clear it, or a later launch reports it again */
        return NULL;
    }
    return memory;
}

void gpu_release(void *memory) {
    cudaFree(memory);
}

int64_t gpu_pool_bytes(const rafter_context *context) {
    cudaMemPool_t pool = NULL;
    uint64_t bytes = 0;
    if (cudaDeviceGetDefaultMemPool(&pool, context->device.device_id) != cudaSuccess ||
        cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes) != cudaSuccess)
        return 0;
    return static_cast<int64_t>(bytes);
}

bool gpu_copy(void *to, const void *from, size_t bytes) {
    /* From pageable memory cudaMemcpy may return before the data has reached the device, and other
     * streams do not wait for it. */
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess && cudaStreamSynchronize(NULL) == cudaSuccess;
}

bool gpu_fill(const rafter_context *context, void *memory, int value, size_t bytes) {
    return cudaMemsetAsync(memory, value, bytes, stream_of(context)) == cudaSuccess;
}

bool gpu_move(const rafter_context *context, void *to, const void *from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(context)) == cudaSuccess;
}

/* With so much shared memory that a multiprocessor has one block of it. */
enum { COPY_THREADS = 1024, COPY_SHARED = 120 << 10 };

static __global__ void __launch_bounds__(COPY_THREADS) copy_packs(uint4 *to, const uint4 *from, int64_t packs) {
    constexpr int AT_ONCE = 4;
    const int64_t step = static_cast<int64_t>(gridDim.x) * COPY_THREADS;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * COPY_THREADS + threadIdx.x; i < packs; i += AT_ONCE * step) {
        uint4 some[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * step < packs)
                some[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * step < packs)
                to[i + k * step] = some[k];
    }
}

bool gpu_copy_on(void *stream, void *to, const void *from, size_t bytes, int blocks) {
    if (cudaFuncSetAttribute(copy_packs, cudaFuncAttributeMaxDynamicSharedMemorySize, COPY_SHARED) != cudaSuccess)
        return false;
    return launch(static_cast<cudaStream_t>(stream), static_cast<unsigned>(blocks), COPY_THREADS, COPY_SHARED,
                  copy_packs, static_cast<uint4 *>(to), static_cast<const uint4 *>(from),
                  static_cast<int64_t>(bytes / sizeof(uint4)));
}

/* Lets the next kernel start at once, and copies only when that one has long been launched. */
static __global__ void __launch_bounds__(COPY_THREADS) copy_packs_late(uint4 *to, const uint4 *from, int64_t packs) {
    start_next_kernel();
    for (int i = 0; i < 4; i++)
        __nanosleep(50000);
    const int64_t step = static_cast<int64_t>(gridDim.x) * COPY_THREADS;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * COPY_THREADS + threadIdx.x; i < packs; i += step)
        to[i] = from[i];
}

bool gpu_copy_late(const rafter_context *context, void *to, const void *from, size_t bytes) {
    const int64_t packs = static_cast<int64_t>(bytes / sizeof(uint4));
    const unsigned blocks = static_cast<unsigned>(min(ceil_div<int64_t>(packs, COPY_THREADS), int64_t(32)));
    return blocks == 0 || launch(stream_of(context), blocks, COPY_THREADS, 0, copy_packs_late, static_cast<uint4 *>(to),
                                 static_cast<const uint4 *>(from), packs);
}

template <typename T>
static __global__ void gather_elements(T *to, const T *from, const int64_t *index, int64_t count) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] = from[index[i]];
}

template <typename T>
static bool launch_gather(const rafter_context *context, void *to, const void *from, const int64_t *index,
                          int64_t count) {
    const int threads = 256;
    const unsigned blocks = static_cast<unsigned>(ceil_div<int64_t>(count, threads));
    return launch(stream_of(context), blocks, threads, 0, gather_elements<T>, static_cast<T *>(to),
                  static_cast<const T *>(from), index, count);
}

bool gpu_gather(const rafter_context *context, void *to, const void *from, const int64_t *index, int64_t count,
                int element) {
    if (count <= 0)
        return true;
    switch (element) {
    case 1: return launch_gather<uint8_t>(context, to, from, index, count);
    case 2: return launch_gather<uint16_t>(context, to, from, index, count);
    case 4: return launch_gather<uint32_t>(context, to, from, index, count);
    case 8: return launch_gather<uint64_t>(context, to, from, index, count);
    default: return false;
    }
}

/* What the kernel needs of a tensor. */
struct numbers {
    enum problem_fill fill;
    float scale, shift;
    int64_t low, high, ignored;
    bool some_ignored;
};

/* As problem_mix and problem_normal in numbers.c. */
static __device__ uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static __device__ float normal(uint64_t bits) {
    const float sum =
        static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum / 65536.0f - 2.0f) * 1.7320508f;
}

static __device__ int64_t integer(const numbers &n, uint64_t bits, int64_t index) {
    if (n.fill == PROBLEM_COUNT)
        return n.low + index % n.high;
    if (n.some_ignored && bits >> 61 == 0)
        return n.ignored;
    return n.low + static_cast<int64_t>(mix(bits) % static_cast<uint64_t>(n.high - n.low));
}

template <typename T> static __global__ void generate_reals(T *to, numbers n, uint64_t seed, int64_t count) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
        const uint64_t bits = mix(seed ^ static_cast<uint64_t>(i));
        const float unit = n.fill == PROBLEM_NORMAL ? normal(bits) : static_cast<float>(bits >> 40) * 0x1p-24f;
        to[i] = static_cast<T>(n.shift + n.scale * unit);
    }
}

template <typename T> static __global__ void generate_integers(T *to, numbers n, uint64_t seed, int64_t count) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads)
        to[i] = static_cast<T>(integer(n, mix(seed ^ static_cast<uint64_t>(i)), i));
}

bool gpu_generate(const rafter_context *context, const struct problem_tensor *t, uint64_t seed) {
    const numbers n = {
        t->fill,        static_cast<float>(t->scale), static_cast<float>(t->shift), t->low, t->high, t->ignored,
        t->some_ignored};
    const int64_t count = static_cast<int64_t>(t->memory_bytes / (t->tensor.dtype.bits / 8));
    void *const to = t->device;
    const auto fill = [&](auto *typed, auto kernel) {
        const int blocks = 1024, threads = 256;
        return launch(stream_of(context), blocks, threads, 0, kernel, typed, n, seed, count);
    };
    switch (t->dtype) {
    case RAFTER_F32: return fill(static_cast<float *>(to), generate_reals<float>);
    case RAFTER_BF16: return fill(static_cast<__nv_bfloat16 *>(to), generate_reals<__nv_bfloat16>);
    case RAFTER_F16: return fill(static_cast<__half *>(to), generate_reals<__half>);
    case RAFTER_I32: return fill(static_cast<int32_t *>(to), generate_integers<int32_t>);
    case RAFTER_I64: return fill(static_cast<int64_t *>(to), generate_integers<int64_t>);
    default: return false;
    }
}

/* ---- streams and events ---------------------------------------------------------------------- */

void *gpu_new_stream(bool high_priority) {
    cudaStream_t stream = NULL;
    int lowest = 0, highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    const int priority = high_priority ? highest : lowest;
    return cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority) == cudaSuccess ? stream : NULL;
}

void gpu_release_stream(void *stream) {
    cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

bool gpu_synchronize(const rafter_context *context) {
    return cudaStreamSynchronize(stream_of(context)) == cudaSuccess;
}

static __global__ void nothing() {
}

void gpu_launch_nothing(const rafter_context *context) {
    launch(stream_of(context), 1, 32, 0, nothing);
}

void *gpu_new_event(void) {
    cudaEvent_t event = NULL;
    return cudaEventCreate(&event) == cudaSuccess ? event : NULL;
}

void gpu_release_event(void *event) {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void gpu_record(const rafter_context *context, void *event) {
    cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(context));
}

float gpu_elapsed(void *from, void *to) {
    float milliseconds = -1;
    cudaEventSynchronize(static_cast<cudaEvent_t>(to));
    cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to));
    return milliseconds;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

bool gpu_capture_begin(const rafter_context *context) {
    return cudaStreamBeginCapture(stream_of(context), cudaStreamCaptureModeGlobal) == cudaSuccess;
}

void *gpu_capture_end(const rafter_context *context) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    if (cudaStreamEndCapture(stream_of(context), &graph) == cudaSuccess && graph)
        cudaGraphInstantiate(&executable, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return executable;
}

bool gpu_replay(const rafter_context *context, void *graph) {
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(context)) == cudaSuccess;
}

void gpu_release_graph(void *graph) {
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}
