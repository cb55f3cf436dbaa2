/* SPDX-License-Identifier: Apache-2.0 */
/* Launching kernels: dispatch on dtype, launch shapes, dynamic shared memory, programmatic dependent launch. */
#ifndef RAFTER_CUDA_LAUNCH_CUH
#define RAFTER_CUDA_LAUNCH_CUH

#include <atomic>
#include <type_traits>

#include "core/sizes.h"
#include "core/tensor.h"
#include "cuda/backend.cuh"
#include "cuda/primitives.cuh"

/* Calls f(zero), where zero has the type that stores `dtype`. */
template <typename F> auto for_dtype(rafter_dtype dtype, F f) {
    switch (dtype) {
    case RAFTER_F32: return f(float());
    case RAFTER_BF16: return f(bf16());
    default: return f(fp16());
    }
}

/* The same for the 16-bit dtypes. */
template <typename F> auto for_16_bit(rafter_dtype dtype, F f) {
    return dtype == RAFTER_BF16 ? f(bf16()) : f(fp16());
}

/* Calls f(std::bool_constant<value>()). */
template <typename F> void for_bool(bool value, F f) {
    if (value)
        f(std::true_type());
    else
        f(std::false_type());
}

/* A grid that is too large becomes 0 instead of wrapping around: the runtime refuses it. */
static inline unsigned grid_of(int64_t blocks) {
    return blocks <= INT32_MAX ? static_cast<unsigned>(blocks) : 0;
}

/* The most rows of kernels that number rows by an int: the numbers past the last row, which the last block of a grid or
 * the last step of a loop over a grid may reach, fit too. */
constexpr int64_t MOST_INT_ROWS = INT32_MAX - (1 << 24);

struct Launch {
    int64_t blocks;
    int threads;
    size_t shared = 0;        /* dynamic shared memory, in bytes */
    int cluster = 1;          /* blocks per cluster */
    bool cooperative = false; /* all blocks run at the same time; the launch fails if they cannot */
    int threads_down = 1;     /* a block has threads x threads_down threads: threadIdx.x and threadIdx.y */
};

/* Raises the kernel's limit of dynamic shared memory to all that a block can have. A hash table in the device state
 * remembers for which kernels this has been done: setting the attribute costs the host more than a launch. */
static inline void allow_shared(rafter_cuda_state *state, const void *kernel) {
    const void **known = NULL;
    for (int i = 0; i < RAFTER_CUDA_ALLOWED && !(known && !*known); i++) {
        known = &state->allowed[(reinterpret_cast<uintptr_t>(kernel) / 16 + i) % RAFTER_CUDA_ALLOWED];
        if (*known == kernel)
            return;
    }
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess)
        return;
    const int own =
        ceil_div(static_cast<int>(attributes.sharedSizeBytes), 128) * 128; /* the dynamic part begins aligned */
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, state->shared_bytes - own) ==
            cudaSuccess &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) ==
            cudaSuccess)
        *known = kernel;
}

/* Whether this build has code of a kernel for the device. For kernels that use static shared memory, and whose body is
 * empty when they are compiled for other architectures: then they use none. */
class BuiltKernel {
    enum Answer { UNKNOWN, NO, YES };
    std::atomic<Answer> answer{UNKNOWN};

  public:
    bool is_built(int device, const void *kernel) {
        if (answer.load(std::memory_order_relaxed) != UNKNOWN)
            return answer.load(std::memory_order_relaxed) == YES;
        int before = 0;
        cudaFuncAttributes attributes;
        cudaGetDevice(&before);
        cudaSetDevice(device);
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        cudaSetDevice(before);
        if (error == cudaSuccess) {
            answer = attributes.sharedSizeBytes > 0 ? YES : NO;
            return answer == YES;
        }
        /* The call above loads the kernel, so there may be too little memory. Then the launch will report it, and the
         * next call asks again. */
        cudaGetLastError();
        return error != cudaErrorInvalidDeviceFunction && error != cudaErrorNoKernelImageForDevice;
    }
};

/* Whether the kernel may start before the previous kernel of the stream has ended, whoever launched that: programmatic
 * dependent launch, which saves 1 us. Not the first kernel of a call that is being captured: what precedes it may not
 * be a kernel, and some GPUs refuse the attribute then. */
static inline bool may_overlap(const rafter_cuda_state *state, const Launch &how) {
    return !how.cooperative && state->compute_capability >= 90 && (state->follows || !rafter_cuda_capturing(state));
}

/* Enqueues a kernel, unless a launch of this call has failed. As it may overlap with the previous kernel, every kernel
 * calls wait_for_previous_kernel or wait_for_inputs: see instructions.cuh. */
template <typename... Wanted, typename... Given>
static inline void launch(const rafter_context *context, const Launch &how, void (*kernel)(Wanted...),
                          const Given &...given) {
    if (context->cuda_state->failed)
        return;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_of(how.blocks));
    config.blockDim = dim3(static_cast<unsigned>(how.threads), static_cast<unsigned>(how.threads_down));
    config.dynamicSmemBytes = how.shared;
    config.stream = context->cuda_state->stream;
    cudaLaunchAttribute attributes[3] = {};
    config.attrs = attributes;
    if (how.cluster > 1) {
        cudaLaunchAttribute *const cluster = &attributes[config.numAttrs++];
        cluster->id = cudaLaunchAttributeClusterDimension;
        cluster->val.clusterDim.x = static_cast<unsigned>(how.cluster);
        cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    }
    if (may_overlap(context->cuda_state, how)) {
        cudaLaunchAttribute *const overlaps = &attributes[config.numAttrs++];
        overlaps->id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlaps->val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cooperative) {
        cudaLaunchAttribute *const cooperative = &attributes[config.numAttrs++];
        cooperative->id = cudaLaunchAttributeCooperative;
        cooperative->val.cooperative = 1;
    }
    if (how.shared > 16 << 10) /* up to 48 KB in all, static and dynamic, need no attribute */
        allow_shared(context->cuda_state, reinterpret_cast<const void *>(kernel));
    context->cuda_state->failed = cudaLaunchKernelEx(&config, kernel, static_cast<Wanted>(given)...) != cudaSuccess;
    context->cuda_state->follows = true;
}

/* Enqueues setting all bytes to `value`, unless a launch of this call has failed. */
static inline void fill_bytes(const rafter_context *context, void *memory, int value, size_t bytes) {
    rafter_cuda_state *const state = context->cuda_state;
    state->follows = false;
    if (!state->failed)
        state->failed = cudaMemsetAsync(memory, value, bytes, state->stream) != cudaSuccess;
}

/* The smallest of first, 2 * first, 4 * first, ... that is at least `wanted`; `most`, which is one of them, if that is
 * smaller. */
static inline int power_at_least(int64_t wanted, int first, int most) {
    while (first < wanted && first < most)
        first *= 2;
    return first;
}

#endif
