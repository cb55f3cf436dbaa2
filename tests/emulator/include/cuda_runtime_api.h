/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's notation and runtime, as far as the library and its tests use them: see emulator.h. */
#ifndef RAFTER_TESTS_EMULATOR_CUDA_RUNTIME_API_H
#define RAFTER_TESTS_EMULATOR_CUDA_RUNTIME_API_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>

#include "emulator.h"

/* ---- notation -------------------------------------------------------------------------------- */

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#pragma GCC visibility push(default)
extern __thread emulator::Index threadIdx __attribute__((tls_model("initial-exec")));
extern __thread emulator::Index blockIdx __attribute__((tls_model("initial-exec")));
extern __thread emulator::Index blockDim __attribute__((tls_model("initial-exec")));
extern __thread emulator::Index gridDim __attribute__((tls_model("initial-exec")));
#pragma GCC visibility pop

/* Dynamic shared memory. It and all other shared memory of a library's kernels lie together, and at the same distances
 * from each other on each operating system thread: 32-bit addresses are distances from here. */
constexpr int EMULATED_SHARED_BYTES = 227 << 10, EMULATED_GUARD_BYTES = 64;
alignas(1024) inline thread_local char emulated_shared[EMULATED_SHARED_BYTES + EMULATED_GUARD_BYTES];
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(emulated_shared)
#define DYNAMIC_SHARED_ALIGNED(bytes, type, name) DYNAMIC_SHARED(type, name)

/* ---- vectors --------------------------------------------------------------------------------- */

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) longlong2 {
    long long x, y;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
static inline float2 make_float2(float x, float y) {
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
static inline double2 make_double2(double x, double y) {
    return {x, y};
}

/* ---- functions of one thread ----------------------------------------------------------------- */

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

template <typename To, typename From> static inline To bits_as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned a) {
    return bits_as<float>(a);
}
static inline unsigned __float_as_uint(float a) {
    return bits_as<unsigned>(a);
}
static inline float __int_as_float(int a) {
    return bits_as<float>(a);
}
static inline int __float_as_int(float a) {
    return bits_as<int>(a);
}
static inline double __hiloint2double(int high, int low) {
    return bits_as<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low));
}
static inline int __double2loint(double a) {
    return static_cast<int>(bits_as<uint64_t>(a));
}
static inline int __double2hiint(double a) {
    return static_cast<int>(bits_as<uint64_t>(a) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
static inline int __ffs(int a) {
    return __builtin_ffs(a);
}
static inline int __popc(unsigned a) {
    return __builtin_popcount(a);
}
static inline int __clz(int a) {
    return a ? __builtin_clz(static_cast<unsigned>(a)) : 32;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
#define __sinf sinf
#define __cosf cosf
#define __logf logf

template <typename T> static inline T __ldg(const T *p) {
    return *p;
}
template <typename T> static inline T __ldcg(const T *p) {
    return *p;
}
template <typename T> static inline T __ldcs(const T *p) {
    return *p;
}
template <typename T> static inline void __stcg(T *p, T value) {
    *p = value;
}
template <typename T> static inline void __stcs(T *p, T value) {
    *p = value;
}
static inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __nanosleep(unsigned) {
    emulator::yield();
}

template <typename T, typename U> static inline T atomicAdd(T *p, U value) {
    return __atomic_fetch_add(p, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename F> static inline T atomic_update(T *p, F f) {
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(p, &old, f(old), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}
template <typename T> static inline T atomicMin(T *p, T value) {
    return atomic_update(p, [&](T old) { return value < old ? value : old; });
}
template <typename T> static inline T atomicMax(T *p, T value) {
    return atomic_update(p, [&](T old) { return old < value ? value : old; });
}

/* ---- functions of several threads ------------------------------------------------------------ */

static inline void __syncthreads() {
    emulator::sync_threads(0, 0);
}
static inline void __syncwarp(unsigned mask = ~0u) {
    emulator::exchange(mask, 0);
}

template <typename T> static inline uint64_t as_exchanged(T value) {
    static_assert(sizeof(T) <= 8, "");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
/* What lane `from` has given, or, if that is outside of the lane's part of the warp, its own value. */
template <typename T> static inline T shuffled(unsigned mask, T value, int from, int width) {
    const int lane = static_cast<int>(emulator::place.lane);
    const uint64_t *const all = emulator::exchange(mask, as_exchanged(value));
    T result;
    memcpy(&result, &all[from >= 0 && from / width == lane / width ? from : lane], sizeof result);
    return result;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const int lane = static_cast<int>(emulator::place.lane);
    return shuffled(mask, value, lane / width * width + (from & (width - 1)), width);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return shuffled(mask, value, static_cast<int>(emulator::place.lane) ^ lanes, width);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return shuffled(mask, value, static_cast<int>(emulator::place.lane + lanes), width);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return shuffled(mask, value, static_cast<int>(emulator::place.lane) - static_cast<int>(lanes), width);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t *const all = emulator::exchange(mask, predicate != 0);
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++)
        ballot |= (all[i] == 1 ? 1u : 0u) << i;
    return ballot & mask;
}
static inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, !predicate) == 0;
}
template <typename T> static inline T __reduce_add_sync(unsigned mask, T value) {
    const uint64_t *const all = emulator::exchange(mask, as_exchanged(value));
    T sum = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && all[i] != emulator::NO_VALUE)
            sum += static_cast<T>(all[i]);
    return sum;
}
#pragma GCC visibility push(default)

int __syncthreads_or(int predicate);

/* ---- the runtime ----------------------------------------------------------------------------- */

typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef struct emulated_pool *cudaMemPool_t;
typedef struct emulated_graph *cudaGraph_t;
typedef struct emulated_executable *cudaGraphExec_t;

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorNotSupported,
    cudaErrorInvalidDeviceFunction,
    cudaErrorNoKernelImageForDevice
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrL2CacheSize,
    cudaDevAttrCooperativeLaunch
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
    cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum {
    cudaSharedmemCarveoutMaxShared = 100,
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocMapped = 2
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
enum cudaMemPoolAttr { cudaMemPoolAttrUsedMemCurrent };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };
enum cudaDataType_t { CUDA_R_32F, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

struct cudaFuncAttributes {
    size_t sharedSizeBytes;
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, l2CacheSize;
    size_t totalGlobalMem;
};

enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeCooperative
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        struct {
            unsigned x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed, cooperative;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

/* `kernel` is run by every thread. function: its address. shared: see emulator::Grid. */
cudaError_t emulated_launch(const cudaLaunchConfig_t *config, const void *function, char *(*shared)(),
                            std::function<void()> kernel);

template <typename... Wanted, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Wanted...), Given &&...given) {
    std::tuple<std::remove_cv_t<Wanted>...> arguments(static_cast<Wanted>(given)...);
    return emulated_launch(
        config, reinterpret_cast<const void *>(kernel), []() -> char * { return emulated_shared; },
        [kernel, arguments] { std::apply(kernel, arguments); });
}

cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize();
cudaError_t emulated_malloc(void **memory, size_t bytes);
template <typename T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return emulated_malloc(reinterpret_cast<void **>(memory), bytes);
}
template <typename T> cudaError_t cudaMallocAsync(T **memory, size_t bytes, cudaStream_t) {
    return emulated_malloc(reinterpret_cast<void **>(memory), bytes);
}
cudaError_t cudaFree(void *memory);
cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value);
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to);
template <typename Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel) {
    *attributes = {1024}; /* not 0, which means that the kernel was not compiled */
    return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *found);

#pragma GCC visibility pop

#endif
