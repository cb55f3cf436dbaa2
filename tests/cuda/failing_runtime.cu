/* SPDX-License-Identifier: Apache-2.0 */
#include "failing_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cublaslt.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

static struct failing_runtime runtime;

EXPORTED struct failing_runtime *rafter_failing_runtime(void);
struct failing_runtime *rafter_failing_runtime(void) {
    return &runtime;
}

/* The runtime's and cuBLASLt's own allocations are none of the library's. */
static thread_local int inside;

/* What cudaGetLastError returns next, if a failure was made up. */
static cudaError_t last_error = cudaSuccess;

static bool fails(const char *function) {
    if (inside || !runtime.watched)
        return false;
    const bool launch_failed =
        runtime.failed && (strstr(runtime.failed, "LaunchKernel") || strstr(runtime.failed, "MemsetAsync"));
    runtime.late += launch_failed && strcmp(function, "cudaLaunchKernelExC") == 0;
    if (++runtime.calls != runtime.fails_at)
        return false;
    runtime.failed = function;
    return true;
}

static cudaError_t made_up() {
    return last_error = cudaErrorMemoryAllocation;
}

/* ---- malloc ---------------------------------------------------------------------------------- */

extern "C" void *__real_malloc(size_t bytes);
extern "C" void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) {
    return fails("malloc") ? NULL : __real_malloc(bytes);
}

extern "C" void *__real_calloc(size_t count, size_t bytes);
extern "C" void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes) {
    return fails("calloc") ? NULL : __real_calloc(count, bytes);
}

/* ---- the CUDA runtime ------------------------------------------------------------------------ */

template <typename Call> static cudaError_t real(Call call) {
    inside++;
    const cudaError_t error = call();
    inside--;
    return error;
}

/* A function of the runtime that may fail. `pretended` is what it does without a GPU; `lives` is
 * how many things exist more after it. */
#define MAY_FAIL(name, parameters, arguments, lives, pretended)                                                        \
    extern "C" cudaError_t __real_##name parameters;                                                                   \
    extern "C" cudaError_t __wrap_##name parameters;                                                                   \
    cudaError_t __wrap_##name parameters {                                                                             \
        if (fails(#name))                                                                                              \
            return made_up();                                                                                          \
        cudaError_t error = cudaSuccess;                                                                               \
        if (runtime.pretend) {                                                                                         \
            pretended;                                                                                                 \
        } else {                                                                                                       \
            error = real([&] { return __real_##name arguments; });                                                     \
        }                                                                                                              \
        runtime.live += error == cudaSuccess ? lives : 0;                                                              \
        return error;                                                                                                  \
    }

/* A function that ends the life of something, and never fails. */
#define ENDS(name, parameters, arguments, exists, pretended)                                                           \
    extern "C" cudaError_t __real_##name parameters;                                                                   \
    extern "C" cudaError_t __wrap_##name parameters;                                                                   \
    cudaError_t __wrap_##name parameters {                                                                             \
        runtime.live -= (exists) ? 1 : 0;                                                                              \
        if (!runtime.pretend)                                                                                          \
            return real([&] { return __real_##name arguments; });                                                      \
        pretended;                                                                                                     \
        return cudaSuccess;                                                                                            \
    }

/* Device memory that nobody reads or writes: an address is enough. */
static void *some_address() {
    return aligned_alloc(1024, 1024);
}

static int attribute_of_h200(cudaDeviceAttr attribute) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
    }
}

static CUresult encode_nothing(CUtensorMap *map) {
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

static void describe_kernel(cudaFuncAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->sharedSizeBytes = 1024; /* not 0, which means that the kernel was not compiled */
}

/* Kernels whose limit of dynamic shared memory has been raised; without that a launch has 48 KiB. */
static const void *raised[1024];

static void raise_limit(const void *kernel, cudaFuncAttribute attribute) {
    int i = 0;
    while (raised[i] && raised[i] != kernel)
        i++;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && i + 1 < 1024)
        raised[i] = kernel;
}

static cudaError_t launch_nothing(const void *kernel, size_t bytes) {
    bool known = false;
    for (int i = 0; raised[i]; i++)
        known |= raised[i] == kernel;
    return bytes <= 48 << 10 || known ? cudaSuccess : last_error = cudaErrorInvalidValue;
}

static void find_encoder(void **function, cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(encode_nothing);
    *found = cudaDriverEntryPointSuccess;
}

MAY_FAIL(cudaGetDeviceCount, (int *count), (count), 0, *count = 1)
MAY_FAIL(cudaDeviceGetAttribute, (int *value, cudaDeviceAttr attribute, int device), (value, attribute, device), 0,
         *value = attribute_of_h200(attribute))
MAY_FAIL(cudaMalloc, (void **memory, size_t bytes), (memory, bytes), 1, *memory = some_address())
MAY_FAIL(cudaMallocAsync, (void **memory, size_t bytes, cudaStream_t stream), (memory, bytes, stream), 1,
         *memory = some_address())
MAY_FAIL(cudaHostAlloc, (void **memory, size_t bytes, unsigned flags), (memory, bytes, flags), 1,
         *memory = __real_calloc(1, bytes))
MAY_FAIL(cudaHostGetDevicePointer, (void **device, void *host, unsigned flags), (device, host, flags), 0,
         *device = host)
MAY_FAIL(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), (stream, flags), 1,
         *stream = static_cast<cudaStream_t>(some_address()))
MAY_FAIL(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), (event, flags), 1,
         *event = static_cast<cudaEvent_t>(some_address()))
MAY_FAIL(cudaEventCreate, (cudaEvent_t * event), (event), 1, *event = static_cast<cudaEvent_t>(some_address()))
MAY_FAIL(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream), 0, )
MAY_FAIL(cudaEventSynchronize, (cudaEvent_t event), (event), 0, )
MAY_FAIL(cudaEventElapsedTime, (float *milliseconds, cudaEvent_t from, cudaEvent_t to), (milliseconds, from, to), 0,
         *milliseconds = 1)
MAY_FAIL(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), (stream, event, flags), 0, )
MAY_FAIL(cudaStreamSynchronize, (cudaStream_t stream), (stream), 0, )
MAY_FAIL(cudaStreamIsCapturing, (cudaStream_t stream, cudaStreamCaptureStatus *status), (stream, status), 0,
         *status = cudaStreamCaptureStatusNone)
MAY_FAIL(cudaDeviceSynchronize, (), (), 0, )
MAY_FAIL(cudaMemset, (void *memory, int value, size_t bytes), (memory, value, bytes), 0, )
MAY_FAIL(cudaMemsetAsync, (void *memory, int value, size_t bytes, cudaStream_t stream), (memory, value, bytes, stream),
         0, )
MAY_FAIL(cudaMemcpy, (void *to, const void *from, size_t bytes, cudaMemcpyKind kind), (to, from, bytes, kind), 0, )
MAY_FAIL(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream),
         (to, from, bytes, kind, stream), 0, )
MAY_FAIL(cudaFuncGetAttributes, (cudaFuncAttributes * attributes, const void *kernel), (attributes, kernel), 0,
         describe_kernel(attributes))
MAY_FAIL(cudaFuncSetAttribute, (const void *kernel, cudaFuncAttribute attribute, int value), (kernel, attribute, value),
         0, raise_limit(kernel, attribute))
MAY_FAIL(cudaLaunchKernelExC, (const cudaLaunchConfig_t *config, const void *kernel, void **arguments),
         (config, kernel, arguments), 0, error = launch_nothing(kernel, config->dynamicSmemBytes))
/* The two behind <<<>>>, before CUDA 13 and from then on. */
MAY_FAIL(cudaLaunchKernel,
         (const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream),
         (kernel, grid, block, arguments, shared, stream), 0, )
MAY_FAIL(__cudaLaunchKernel,
         (cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream),
         (kernel, grid, block, arguments, shared, stream), 0, )
MAY_FAIL(cudaGetDriverEntryPointByVersion,
         (const char *symbol, void **function, unsigned version, unsigned long long flags,
          cudaDriverEntryPointQueryResult *found),
         (symbol, function, version, flags, found), 0, find_encoder(function, found))

ENDS(cudaFree, (void *memory), (memory), memory, free(memory))
ENDS(cudaFreeAsync, (void *memory, cudaStream_t stream), (memory, stream), memory, free(memory))
ENDS(cudaFreeHost, (void *memory), (memory), memory, free(memory))
ENDS(cudaStreamDestroy, (cudaStream_t stream), (stream), true, free(stream))
ENDS(cudaEventDestroy, (cudaEvent_t event), (event), true, free(event))
ENDS(cudaGetDevice, (int *device), (device), false, *device = 0)
ENDS(cudaSetDevice, (int device), (device), false, )

extern "C" cudaError_t __real_cudaGetLastError(void);
extern "C" cudaError_t __wrap_cudaGetLastError(void);
cudaError_t __wrap_cudaGetLastError(void) {
    const cudaError_t was = runtime.pretend ? cudaSuccess : __real_cudaGetLastError();
    const cudaError_t error = last_error == cudaSuccess ? was : last_error;
    last_error = cudaSuccess;
    return error;
}

/* ---- cuBLASLt -------------------------------------------------------------------------------- */

/* The test names this library as RAFTER_CUBLASLT_LIBRARY; its functions call cuBLASLt's. */
static void *in_cublaslt(const char *name) {
    static void *library;
    if (!library)
        library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        library = dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

enum { LT_ALLOCATION_FAILED = 3 };

template <typename Function, typename... Given>
static LtStatus forward(Function LtFunctions::*, const char *name, int lives, Given... given) {
    inside++;
    const Function function = reinterpret_cast<Function>(in_cublaslt(name));
    const LtStatus status = function ? function(given...) : 1; /* 1: not initialised */
    inside--;
    runtime.live += status == 0 ? lives : 0;
    return status;
}

#define LT(name, parameters, lives, pretended, ...)                                                                    \
    EXPORTED LtStatus name parameters;                                                                                 \
    LtStatus name parameters {                                                                                         \
        if (lives >= 0 && fails(#name))                                                                                \
            return LT_ALLOCATION_FAILED;                                                                               \
        if (!runtime.pretend)                                                                                          \
            return forward(&LtFunctions::name, #name, lives, __VA_ARGS__);                                             \
        pretended;                                                                                                     \
        runtime.live += lives;                                                                                         \
        return 0;                                                                                                      \
    }

LT(cublasLtCreate, (LtHandle * handle), 1, *handle = static_cast<LtHandle>(some_address()), handle)
LT(cublasLtDestroy, (LtHandle handle), -1, free(handle), handle)
LT(cublasLtMatmulDescCreate, (LtOperation * operation, int compute, cudaDataType_t scalars), 1,
   *operation = static_cast<LtOperation>(some_address()), operation, compute, scalars)
LT(cublasLtMatmulDescDestroy, (LtOperation operation), -1, free(operation), operation)
LT(cublasLtMatmulDescSetAttribute,
   (LtOperation operation, LtOperationAttribute attribute, const void *value, size_t bytes), 0, , operation, attribute,
   value, bytes)
LT(cublasLtMatrixLayoutCreate,
   (LtLayout * layout, cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t leading), 1,
   *layout = static_cast<LtLayout>(some_address()), layout, type, rows, columns, leading)
LT(cublasLtMatrixLayoutDestroy, (LtLayout layout), -1, free(layout), layout)
LT(cublasLtMatmulPreferenceCreate, (LtPreference * preference), 1,
   *preference = static_cast<LtPreference>(some_address()), preference)
LT(cublasLtMatmulPreferenceDestroy, (LtPreference preference), -1, free(preference), preference)
LT(cublasLtMatmulPreferenceSetAttribute,
   (LtPreference preference, LtPreferenceAttribute attribute, const void *value, size_t bytes), 0, , preference,
   attribute, value, bytes)
LT(cublasLtMatmulAlgoGetHeuristic,
   (LtHandle handle, LtOperation operation, LtLayout a, LtLayout b, LtLayout c, LtLayout d, LtPreference preference,
    int wanted, LtCandidate *found, int *count),
   0, *count = 1, handle, operation, a, b, c, d, preference, wanted, found, count)
LT(cublasLtMatmulAlgoConfigGetAttribute,
   (const LtAlgorithm *algorithm, LtAlgorithmAttribute attribute, void *value, size_t bytes, size_t *written), 0,
   memset(value, 0, bytes), algorithm, attribute, value, bytes, written)
LT(cublasLtMatmul,
   (LtHandle handle, LtOperation operation, const void *alpha, const void *a, LtLayout a_layout, const void *b,
    LtLayout b_layout, const void *beta, const void *c, LtLayout c_layout, void *d, LtLayout d_layout,
    const LtAlgorithm *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream),
   0, , handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace,
   workspace_bytes, stream)
