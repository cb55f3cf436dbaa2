/* SPDX-License-Identifier: Apache-2.0 */
/* Host helpers of the CUDA ops: fast division, dispatch on dtype, kernel launch, alignment of views, walks over
 * dimensions. */
#ifndef RAFTER_CUDA_LAUNCH_CUH
#define RAFTER_CUDA_LAUNCH_CUH

#include <atomic>

#include "core/sizes.h"
#include "core/tensor.h"
#include "cuda/backend.cuh"
#include "cuda/vocabulary.cuh"

/* Division of numbers below 2^31 by a divisor that the host knows: two instructions instead of
 * twenty. `number` is the divisor. */
struct Divisor {
    unsigned number, multiplier;
    int shift;

    Divisor() : Divisor(1) {
    }
    explicit Divisor(int64_t divisor) : number(static_cast<unsigned>(divisor)), multiplier(0), shift(0) {
        while (shift < 31 && static_cast<int64_t>(1) << shift < divisor)
            shift++;
        /* At most 1 above 2^(31 + shift) / divisor: no effect on dividends below 2^31. */
        multiplier =
            static_cast<unsigned>((static_cast<uint64_t>(1) << (31 + shift)) / static_cast<uint64_t>(divisor) + 1);
    }
    DEVICE unsigned quotient(unsigned a) const {
        return static_cast<unsigned>((uint64_t)a * multiplier >> (31 + shift));
    }
};

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

/* A grid that is too large becomes 0 instead of wrapping around: the runtime refuses it. */
static inline unsigned grid_of(int64_t blocks) {
    return blocks <= INT32_MAX ? static_cast<unsigned>(blocks) : 0;
}

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

/* Whether rows along dimension dims - 1 consist of aligned packs of 16 bytes. Later dimensions are ignored. */
static inline bool allows_wide_access(const rafter_view &view, int dims) {
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype);
    bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < dims; d++)
        all = all && (view.shape[d] == 1 || (d == dims - 1 ? view.stride[d] == 1 : view.stride[d] % wide == 0));
    return all && view.shape[dims - 1] % wide == 0;
}

/* Whether each row of `a` has the same offset from a 16-byte boundary as the same row of `b`, so that aligned packs of
 * one are aligned packs of the other. If the leading dimensions of the two views were merged differently, their strides
 * cannot be compared one by one, and must all be multiples of 16 bytes. */
static inline bool same_alignment(const rafter_view &a, const rafter_view &b) {
    const int64_t bytes = rafter_dtype_bytes(a.dtype);
    bool alike = (reinterpret_cast<uintptr_t>(a.data) - reinterpret_cast<uintptr_t>(b.data)) % 16 == 0;
    bool comparable = a.ndim == b.ndim;
    for (int d = 0; d < a.ndim && comparable; d++)
        comparable = a.shape[d] == b.shape[d];
    for (int d = 0; d < a.ndim - 1; d++)
        alike = alike && (a.stride[d] - (comparable ? b.stride[d] : 0)) * bytes % 16 == 0;
    for (int d = 0; d < b.ndim - 1 && !comparable; d++)
        alike = alike && b.stride[d] * bytes % 16 == 0;
    return alike;
}

/* The first of least, 2 * least, 4 * least, ... that is at least `a` or at least `most`. */
static inline int power_at_least(int64_t a, int least, int most) {
    while (least < a && least < most)
        least *= 2;
    return least;
}

/* The offsets, in up to three tensors, of items that are numbered in row-major order of some of their dimensions. */
struct Walk {
    int dims; /* at least one */
    int64_t size[RAFTER_VIEW_DIMS], stride[3][RAFTER_VIEW_DIMS];

    /* The offsets of item `index`, in elements. */
    DEVICE void offsets(int64_t index, int64_t (&at)[3]) const {
        at[0] = at[1] = at[2] = 0;
#pragma unroll 1
        for (int d = dims - 1; d > 0; d--) {
            const int64_t outer = quotient(index, size[d]), inner = index - outer * size[d];
            index = outer;
            for (int t = 0; t < 3; t++)
                at[t] += inner * stride[t][d];
        }
        for (int t = 0; t < 3; t++)
            at[t] += index * stride[t][0];
    }
};

/* The walk over dimensions [from, to) of the views. A view may be NULL. */
static inline Walk walk_over(const rafter_view *const views[3], int from, int to) {
    Walk walk = {};
    walk.dims = to - from;
    walk.size[0] = 1;
    for (int d = from; d < to; d++)
        for (int t = 0; t < 3; t++)
            if (views[t]) {
                walk.size[d - from] = views[t]->shape[d];
                walk.stride[t][d - from] = views[t]->stride[d];
            }
    return walk;
}

#endif
