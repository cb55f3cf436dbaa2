/* SPDX-License-Identifier: Apache-2.0 */
/* What the ops' host code shares: a template chosen by dtype, a launch, how wide an access may be, walks over
 * dimensions. */
#ifndef RAFTER_CUDA_LAUNCH_CUH
#define RAFTER_CUDA_LAUNCH_CUH

#include "core/tensor.h"
#include "cuda/backend.cuh"
#include "cuda/vocabulary.cuh"

template <typename A> __host__ __device__ constexpr A ceil_div(A a, A b) {
    return (a + b - 1) / b;
}

/* Division of numbers below 2^31 by one that is known before a kernel starts: two instructions instead of twenty. */
struct Divisor {
    unsigned number, multiplier;
    int shift;

    Divisor() : Divisor(1) {
    }
    explicit Divisor(int64_t divisor) : number(static_cast<unsigned>(divisor)), multiplier(0), shift(0) {
        while (shift < 31 && static_cast<int64_t>(1) << shift < divisor)
            shift++;
        /* Above 2^(31 + shift) / divisor by at most 1, which is not seen for dividends below 2^31. */
        multiplier =
            static_cast<unsigned>((static_cast<uint64_t>(1) << (31 + shift)) / static_cast<uint64_t>(divisor) + 1);
    }
    DEVICE unsigned quotient(unsigned a) const {
        return static_cast<unsigned>((uint64_t)a * multiplier >> (31 + shift));
    }
};

/* f(zero), with a zero of the type that stores `dtype`. */
template <typename F> auto for_dtype(rafter_dtype dtype, F f) {
    switch (dtype) {
    case RAFTER_F32: return f(float());
    case RAFTER_BF16: return f(bf16());
    default: return f(fp16());
    }
}

/* A grid that is too large is one that the runtime refuses, not one that wraps around. */
static inline unsigned grid_of(int64_t blocks) {
    return blocks <= INT32_MAX ? static_cast<unsigned>(blocks) : 0;
}

struct Launch {
    int64_t blocks;
    int threads;
    size_t shared = 0;     /* dynamic shared memory, in bytes */
    int cluster = 1;       /* blocks of a cluster */
    bool overlaps = false; /* may start before the kernel before it has ended: see wait_for_previous_kernel */
    bool together = false; /* starts when all of its blocks can run at the same time; fails if they never can */
};

/* Lets the kernel take all the shared memory that a block can have. The state remembers the kernels that may, each in
 * the first place from its own on that was free: asking every time would cost the host more than the launch. */
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
    *known = kernel;
    const int own = ceil_div(static_cast<int>(attributes.sharedSizeBytes), 128) * 128; /* the dynamic part is aligned */
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, state->shared_bytes - own);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

template <typename... Wanted, typename... Given>
static inline void launch(const rafter_context *context, const Launch &how, void (*kernel)(Wanted...),
                          const Given &...given) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_of(how.blocks));
    config.blockDim = dim3(static_cast<unsigned>(how.threads));
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
    if (how.overlaps && context->cuda_state->compute_capability >= 90) {
        cudaLaunchAttribute *const overlaps = &attributes[config.numAttrs++];
        overlaps->id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlaps->val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.together) {
        cudaLaunchAttribute *const together = &attributes[config.numAttrs++];
        together->id = cudaLaunchAttributeCooperative;
        together->val.cooperative = 1;
    }
    if (how.shared > 16 << 10) /* with what is static, 48 KB are there without asking */
        allow_shared(context->cuda_state, reinterpret_cast<const void *>(kernel));
    cudaLaunchKernelEx(&config, kernel, static_cast<Wanted>(given)...);
}

/* Whether 16-byte accesses may be used all along the last of `dims` dimensions of a view. */
static inline bool is_wide(const rafter_view &view, int dims) {
    const int64_t wide = 16 / rafter_dtype_bytes(view.dtype);
    bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < dims; d++)
        all = all && (view.shape[d] == 1 || (d == dims - 1 ? view.stride[d] == 1 : view.stride[d] % wide == 0));
    return all && view.shape[dims - 1] % wide == 0;
}

/* Whether packs along the last dimension of `a` are packs of `b` too, which has the same rows: in each of them the two
 * are equally far from an aligned address. Dimensions before the last may have been merged in one of them alone; then
 * their steps cannot be compared, and must all be whole packs. */
static inline bool packs_alike(const rafter_view &a, const rafter_view &b) {
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

/* The least of `least`, 2 * least, ... that is not below `a`, or the first that is not below `most`. */
static inline int power_at_least(int64_t a, int least, int most) {
    while (least < a && least < most)
        least *= 2;
    return least;
}

/* Where the items of up to three tensors of one shape lie: their dimensions [from, to), in row-major order. */
struct Walk {
    int dims;
    int64_t size[RAFTER_VIEW_DIMS], stride[3][RAFTER_VIEW_DIMS];

    /* Offsets, in elements, of item `index`. */
    DEVICE void offsets(int64_t index, int64_t (&at)[3]) const {
        at[0] = at[1] = at[2] = 0;
#pragma unroll 1
        for (int d = dims - 1; d > 0; d--) {
            const int64_t outer = index / size[d], inner = index - outer * size[d];
            index = outer;
            for (int t = 0; t < 3; t++)
                at[t] += inner * stride[t][d];
        }
        for (int t = 0; t < 3; t++)
            at[t] += index * stride[t][0];
    }
};

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
