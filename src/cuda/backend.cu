/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/backend.cuh"
#include "cuda/products.cuh"

#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#define RAFTER_OP(name) rafter_status rafter_cuda_##name(rafter_context *context, const struct name##_call *call);
#include "ops/ops.inc"
#undef RAFTER_OP
}

/* ---- scratch memory -------------------------------------------------------------------------- */

/* A block that has become too small, but that a graph may still use. */
struct Retired {
    void *block;
    Retired *next;
};

bool rafter_cuda_capturing(const rafter_cuda_state *state) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(state->stream, &status) == cudaSuccess)
        return status != cudaStreamCaptureStatusNone;
    cudaGetLastError(); /* the default stream, while another is being captured: nothing can be enqueued there either */
    return true;
}

/* Lets go of the block once the work that is enqueued has used it. */
static bool drop_block(rafter_cuda_state *state) {
    if (state->block && state->block_captured) {
        Retired *retired = static_cast<Retired *>(malloc(sizeof *retired));
        if (!retired)
            return false;
        *retired = {state->block, state->retired};
        state->retired = retired;
    } else if (state->block) {
        cudaFreeAsync(state->block, state->stream);
    }
    state->block = NULL;
    state->block_bytes = 0;
    state->block_captured = false;
    return true;
}

/* One block at a time is enough: a context serves one call at a time and all its work is in the order of one stream.
 * It only grows, and not while the stream is being captured: then a caller gives a workspace, or has made the same call
 * once before. */
static void *scratch_allocate(void *user, size_t bytes) {
    rafter_cuda_state *state = static_cast<rafter_cuda_state *>(user);
    if (state->block_taken)
        return NULL;
    const bool capturing = rafter_cuda_capturing(state);
    if (state->block_bytes < bytes) {
        if (capturing || !drop_block(state))
            return NULL;
        if (cudaMallocAsync(&state->block, bytes, state->stream) != cudaSuccess) {
            cudaGetLastError(); /* reported as out of memory; do not leave it for the next launch */
            state->block = NULL;
            return NULL;
        }
        state->block_bytes = bytes;
    }
    state->block_captured |= capturing;
    state->block_taken = true;
    return state->block;
}

static void scratch_release(void *user, void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    static_cast<rafter_cuda_state *>(user)->block_taken = false;
}

rafter_status rafter_cuda_scratch(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch) {
    if (!workspace && bytes <= RAFTER_CUDA_SMALL_BLOCK) {
        workspace = context->cuda_state->small;
        workspace_bytes = RAFTER_CUDA_SMALL_BLOCK;
    }
    const rafter_status status = rafter_scratch_take(context, workspace, workspace_bytes, bytes, scratch);
    if (status != RAFTER_OUT_OF_MEMORY || context->allocate != scratch_allocate ||
        !rafter_cuda_capturing(context->cuda_state))
        return status;
    return rafter_fail(context, status,
                       "the call takes %zu bytes of workspace, and while its stream is being captured nothing is "
                       "allocated: wanted a workspace, or the same call once before the capture",
                       rafter_scratch_request(bytes));
}

/* ---- open and close -------------------------------------------------------------------------- */

static void close_context(rafter_context *context) {
    rafter_cuda_state *state = context->cuda_state;
    if (!state)
        return;
    {
        OnDevice current(context);
        rafter_cuda_close_products(state);
        state->block_captured = false; /* graphs may not outlive the context */
        drop_block(state);
        while (Retired *retired = state->retired) {
            state->retired = retired->next;
            cudaFreeAsync(retired->block, state->stream);
            free(retired);
        }
        cudaFree(state->counters);
        cudaFreeHost(const_cast<int *>(state->bad_labels));
    }
    free(state);
    context->cuda_state = NULL;
}

/* The scratch block stays where it is: whoever sets a stream has ordered it after the old one. */
static void set_stream(rafter_context *context) {
    context->cuda_state->stream = static_cast<cudaStream_t>(context->stream);
}

static rafter_status open_context(rafter_context *context) {
    int devices = 0;
    const cudaError_t counted = cudaGetDeviceCount(&devices);
    if (counted != cudaSuccess) {
        cudaGetLastError();
        return rafter_fail(context, RAFTER_UNSUPPORTED, "the CUDA runtime finds no GPU: %s",
                           cudaGetErrorString(counted));
    }
    if (context->device.device_id < 0 || context->device.device_id >= devices)
        return rafter_fail(context, RAFTER_UNSUPPORTED, "device_id is %d, wanted 0 to %d: there are %d CUDA devices",
                           (int)context->device.device_id, devices - 1, devices);
    rafter_cuda_state *state = static_cast<rafter_cuda_state *>(calloc(1, sizeof *state));
    if (!state)
        return RAFTER_OUT_OF_MEMORY;
    state->device = context->device.device_id;
    state->stream = static_cast<cudaStream_t>(context->stream);
    context->cuda_state = state;
    OnDevice current(context);
    int major = 0, minor = 0, l2 = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, state->device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, state->device);
    cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, state->device);
    cudaDeviceGetAttribute(&state->multiprocessors, cudaDevAttrMultiProcessorCount, state->device);
    cudaDeviceGetAttribute(&state->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, state->device);
    cudaDeviceGetAttribute(&state->cooperative, cudaDevAttrCooperativeLaunch, state->device);
    state->compute_capability = 10 * major + minor;
    state->l2_bytes = l2;

    void *flag = NULL, *flag_on_device = NULL;
    const float zero_and_one[] = {0.0f, 1.0f};
    const size_t counters_bytes = RAFTER_CUDA_COUNTERS * sizeof *state->counters;
    char *memory = NULL;
    cudaError_t error = cudaMalloc(&memory, counters_bytes + RAFTER_CUDA_SMALL_BLOCK + sizeof zero_and_one);
    state->counters = reinterpret_cast<unsigned *>(memory);
    state->small = memory + counters_bytes;
    state->zero_and_one = reinterpret_cast<float *>(memory + counters_bytes + RAFTER_CUDA_SMALL_BLOCK);
    if (error == cudaSuccess)
        error = cudaMemset(state->counters, 0, counters_bytes);
    if (error == cudaSuccess)
        error = cudaMemcpy(memory + counters_bytes + RAFTER_CUDA_SMALL_BLOCK, zero_and_one, sizeof zero_and_one,
                           cudaMemcpyHostToDevice);
    if (error == cudaSuccess)
        error = cudaHostAlloc(&flag, sizeof(int), cudaHostAllocMapped);
    if (error == cudaSuccess)
        error = cudaHostGetDevicePointer(&flag_on_device, flag, 0);
    if (error == cudaSuccess)
        error = cudaDeviceSynchronize(); /* the counters are zero before any stream's first call */
    state->bad_labels = static_cast<int *>(flag);
    state->bad_labels_on_device = static_cast<int *>(flag_on_device);
    if (error != cudaSuccess) {
        cudaGetLastError();
        close_context(context);
        return rafter_cuda_check(context, "opening the GPU", error);
    }
    *state->bad_labels = 0;

    if (!context->allocate) {
        context->allocate = scratch_allocate;
        context->release = scratch_release;
        context->user = state;
    }
    return RAFTER_OK;
}

/* ---- labels out of range --------------------------------------------------------------------- */

static rafter_status bad_labels(rafter_context *context, bool *found) {
    rafter_cuda_state *state = context->cuda_state;
    if (rafter_cuda_capturing(state))
        return rafter_fail(context, RAFTER_UNSUPPORTED, "the stream is being captured, and cannot be waited for");
    OnDevice current(context);
    RAFTER_TRY(rafter_cuda_check(context, "waiting for the stream", cudaStreamSynchronize(state->stream)));
    *found = *state->bad_labels != 0;
    *state->bad_labels = 0;
    return RAFTER_OK;
}

/* ---- for tests and the bench ----------------------------------------------------------------- */

static void facts(const rafter_context *context, struct rafter_cuda_facts *out) {
    cudaDeviceProp properties;
    memset(out, 0, sizeof *out);
    if (cudaGetDeviceProperties(&properties, context->cuda_state->device) != cudaSuccess)
        return;
    snprintf(out->name, sizeof out->name, "%s", properties.name);
    out->compute_capability = 10 * properties.major + properties.minor;
    out->multiprocessors = properties.multiProcessorCount;
    out->l2_bytes = properties.l2CacheSize;
    out->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    cudaDriverGetVersion(&out->driver);
    cudaRuntimeGetVersion(&out->runtime);
}

static void *plain_allocate(size_t bytes) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    return memory;
}

static void plain_release(void *memory) {
    cudaFree(memory);
}

static int64_t pool_bytes(const rafter_context *context) {
    cudaMemPool_t pool = NULL;
    uint64_t bytes = 0;
    if (cudaDeviceGetDefaultMemPool(&pool, context->cuda_state->device) != cudaSuccess ||
        cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes) != cudaSuccess)
        return 0;
    return static_cast<int64_t>(bytes);
}

static bool copy(void *to, const void *from, size_t bytes) {
    /* From pageable memory the first returns early, and other streams do not wait for it. */
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess && cudaStreamSynchronize(NULL) == cudaSuccess;
}

static bool fill(const rafter_context *context, void *memory, int value, size_t bytes) {
    return cudaMemsetAsync(memory, value, bytes, context->cuda_state->stream) == cudaSuccess;
}

static bool move(const rafter_context *context, void *to, const void *from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, context->cuda_state->stream) == cudaSuccess;
}

template <typename T>
static __global__ void gather_elements(T *to, const T *from, const int64_t *index, int64_t count) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] = from[index[i]];
}

template <typename T>
static void launch_gather(const rafter_context *context, void *to, const void *from, const int64_t *index,
                          int64_t count) {
    const int threads = 256;
    gather_elements<<<static_cast<unsigned>((count + threads - 1) / threads), threads, 0,
                      context->cuda_state->stream>>>(static_cast<T *>(to), static_cast<const T *>(from), index, count);
}

static bool gather(const rafter_context *context, void *to, const void *from, const int64_t *index, int64_t count,
                   int element) {
    switch (count > 0 ? element : 0) {
    case 0: return true;
    case 1: launch_gather<uint8_t>(context, to, from, index, count); break;
    case 2: launch_gather<uint16_t>(context, to, from, index, count); break;
    case 4: launch_gather<uint32_t>(context, to, from, index, count); break;
    case 8: launch_gather<uint64_t>(context, to, from, index, count); break;
    default: return false;
    }
    return cudaGetLastError() == cudaSuccess;
}

static bool synchronize(const rafter_context *context) {
    return cudaStreamSynchronize(context->cuda_state->stream) == cudaSuccess;
}

static void *new_stream(bool urgent) {
    cudaStream_t stream = NULL;
    int lowest = 0, highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    const int priority = urgent ? highest : lowest;
    return cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority) == cudaSuccess ? stream : NULL;
}

static void forget_stream(void *stream) {
    cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

static __global__ void nothing() {
}

static void launch_nothing(const rafter_context *context) {
    nothing<<<1, 32, 0, context->cuda_state->stream>>>();
}

static void *new_event(void) {
    cudaEvent_t event = NULL;
    return cudaEventCreate(&event) == cudaSuccess ? event : NULL;
}

static void record(const rafter_context *context, void *event) {
    cudaEventRecord(static_cast<cudaEvent_t>(event), context->cuda_state->stream);
}

static float elapsed(void *from, void *to) {
    float milliseconds = -1;
    cudaEventSynchronize(static_cast<cudaEvent_t>(to));
    cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to));
    return milliseconds;
}

static void forget(void *event) {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

static bool capture_begin(const rafter_context *context) {
    return cudaStreamBeginCapture(context->cuda_state->stream, cudaStreamCaptureModeGlobal) == cudaSuccess;
}

static void *capture_end(const rafter_context *context) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    if (cudaStreamEndCapture(context->cuda_state->stream, &graph) == cudaSuccess && graph)
        cudaGraphInstantiate(&executable, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return executable;
}

static bool replay(const rafter_context *context, void *graph) {
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), context->cuda_state->stream) == cudaSuccess;
}

static void forget_graph(void *graph) {
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

extern "C" __attribute__((visibility("default"))) const struct rafter_cuda *rafter_cuda_backend(void) {
    static struct rafter_cuda table;
    table.interface = RAFTER_CUDA_INTERFACE;
    table.open = open_context;
    table.close = close_context;
    table.set_stream = set_stream;
#define RAFTER_OP(name) table.name = rafter_cuda_##name;
#include "ops/ops.inc"
#undef RAFTER_OP
    table.bad_labels = bad_labels;
    table.facts = facts;
    table.allocate = plain_allocate;
    table.release = plain_release;
    table.pool_bytes = pool_bytes;
    table.copy = copy;
    table.fill = fill;
    table.move = move;
    table.gather = gather;
    table.synchronize = synchronize;
    table.stream = new_stream;
    table.forget_stream = forget_stream;
    table.launch_nothing = launch_nothing;
    table.event = new_event;
    table.record = record;
    table.elapsed = elapsed;
    table.forget = forget;
    table.capture_begin = capture_begin;
    table.capture_end = capture_end;
    table.replay = replay;
    table.forget_graph = forget_graph;
    return &table;
}
