/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA runtime, as on an H200. All work runs in the order in which it is enqueued, whatever its stream. */
#include <chrono>
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime.h"
#include "record_launches.h"

static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t failed(cudaError_t error) {
    return last_error = error;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    default: return "not emulated";
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static void (*recorder)(const void *kernel);

void emulator_record_launches(void (*record)(const void *kernel)) {
    recorder = record;
}
bool emulator_records_launches(void) {
    return recorder != nullptr;
}

cudaError_t emulated_launch(const cudaLaunchConfig_t *config, const void *function, char *(*shared)(),
                            std::function<void()> kernel) {
    constexpr unsigned MOST_X = INT32_MAX, MOST_Y = UINT16_MAX, MOST_THREADS = 1024;
    const dim3 grid = config->gridDim, block = config->blockDim;
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > MOST_X || grid.y > MOST_Y || grid.z > MOST_Y ||
        threads == 0 || threads > MOST_THREADS || config->dynamicSmemBytes > static_cast<size_t>(EMULATED_SHARED_BYTES))
        return failed(cudaErrorInvalidValue);
    emulator::Grid launched = {grid,
                               block,
                               static_cast<int64_t>(config->dynamicSmemBytes),
                               1,
                               false,
                               false,
                               config->stream,
                               shared,
                               std::move(kernel)};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttribute &attribute = config->attrs[i];
        if (attribute.id == cudaLaunchAttributeClusterDimension)
            launched.cluster = attribute.val.clusterDim.x;
        else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
            launched.overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
        else
            launched.cooperative = attribute.val.cooperative != 0;
    }
    if (grid.x % launched.cluster != 0 || launched.cluster > 16)
        return failed(cudaErrorInvalidValue);
    if (recorder)
        recorder(function);
    else
        emulator::launch(std::move(launched));
    return cudaSuccess;
}

/* ---- the device ------------------------------------------------------------------------------ */

enum { L2_BYTES = 50 << 20 };

/* With few of them, small products have several tiles per cluster. */
static int multiprocessors() {
    const char *const given = getenv("RAFTER_EMULATOR_MULTIPROCESSORS");
    return given ? atoi(given) : 132;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors(); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = EMULATED_SHARED_BYTES; break;
    case cudaDevAttrL2CacheSize: *value = L2_BYTES; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "an emulated H200");
    properties->major = 9;
    properties->multiProcessorCount = multiprocessors();
    properties->l2CacheSize = L2_BYTES;
    properties->totalGlobalMem = size_t(8) << 30;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

/* ---- memory ---------------------------------------------------------------------------------- */

cudaError_t emulated_malloc(void **memory, size_t bytes) {
    const size_t used = recorder ? 0 : bytes;
    if (posix_memalign(memory, 256, used > 0 ? used : 1) != 0) /* of just this size, for AddressSanitizer */
        return failed(cudaErrorMemoryAllocation);
    memset(*memory, 0xff, used); /* NaN */
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    emulator::finish();
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void *memory, cudaStream_t) {
    return cudaFree(memory);
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
    return emulated_malloc(memory, bytes);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *memory) {
    return cudaFree(memory);
}
cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    emulator::finish();
    if (!recorder)
        memset(memory, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(memory, value, bytes);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    emulator::finish();
    if (!recorder)
        memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *, int) {
    return failed(cudaErrorNotSupported);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) {
    return failed(cudaErrorNotSupported);
}

/* ---- streams and events ---------------------------------------------------------------------- */

struct emulated_stream {
    int unused;
};
struct emulated_event {
    std::chrono::steady_clock::time_point recorded;
};

cudaError_t cudaDeviceSynchronize() {
    emulator::finish();
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = *highest = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = new emulated_stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    emulator::finish();
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    emulator::finish();
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    emulator::finish();
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new emulated_event;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    emulator::finish();
    event->recorded = std::chrono::steady_clock::now();
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = std::chrono::duration<float, std::milli>(to->recorded - from->recorded).count();
    return cudaSuccess;
}

/* ---- graphs, which are not emulated ---------------------------------------------------------- */

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    return failed(cudaErrorNotSupported);
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *) {
    return failed(cudaErrorNotSupported);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long) {
    return failed(cudaErrorNotSupported);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
    return failed(cudaErrorNotSupported);
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cudaSuccess;
}

/* ---- tensor maps ----------------------------------------------------------------------------- */

static CUresult encode_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dims, void *data,
                           const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *,
                           CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill) {
    bool valid = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    memset(map, 0, sizeof *map);
    map->data = static_cast<char *>(data);
    map->type = type;
    map->dims = dims;
    map->swizzle = swizzle;
    for (cuuint32_t d = 0; d < dims; d++) {
        map->size[d] = size[d];
        map->box[d] = box[d];
        valid = valid && size[d] > 0 && size[d] <= uint64_t(1) << 32 && box[d] > 0 && box[d] <= 256;
        if (d + 1 < dims) {
            map->stride[d] = stride[d];
            valid = valid && stride[d] % 16 == 0 && stride[d] < uint64_t(1) << 40;
        }
    }
    return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(encode_map);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
