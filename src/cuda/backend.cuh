/* SPDX-License-Identifier: Apache-2.0 */
/* What host code of the CUDA backend shares: the state behind a context, launching, errors. */
#ifndef RAFTER_CUDA_BACKEND_CUH
#define RAFTER_CUDA_BACKEND_CUH

#include <cuda_runtime_api.h>

#include "core/backend.h"

enum { RAFTER_CUDA_COUNTERS = 1 << 16, RAFTER_CUDA_SMALL_BLOCK = 1 << 20, RAFTER_CUDA_ALLOWED = 256 };

struct rafter_cuda_state {
    int device;
    cudaStream_t stream;
    int multiprocessors;
    int compute_capability; /* 90 for 9.0 */
    int shared_bytes;       /* most shared memory of one block */
    int cooperative;        /* whether kernels can ask for all their blocks to run at the same time */
    int64_t l2_bytes;

    /* Zero between calls: kernels that count arrivals set their counters back. */
    unsigned *counters;
    float *zero_and_one; /* on the device, for scalars of matrix products */

    /* Set by kernels that met a label out of range; in host memory that the device can write. */
    volatile int *bad_labels; /* as the host sees it */
    int *bad_labels_on_device;

    const void *allowed[RAFTER_CUDA_ALLOWED]; /* kernels with more shared memory: see allow_shared */

    /* cuBLASLt and what it has chosen; NULL until the first matrix product. */
    struct rafter_cuda_products *products;

    /* Scratch memory of calls that take little, whoever allocates for the others: any allocator would cost the host
     * more than the rest of such a call. */
    void *small;

    /* The default scratch allocator: a block, which grows. Graphs hold on to the blocks that their calls were captured
     * with, so that those live as long as the context. */
    void *block;
    size_t block_bytes;
    bool block_taken, block_captured;
    struct Retired *retired;
};

/* Makes the context's device current for the length of a call. */
struct OnDevice {
    int before;
    explicit OnDevice(const rafter_context *context) : before(-1) {
        cudaGetDevice(&before);
        if (before != context->cuda_state->device)
            cudaSetDevice(context->cuda_state->device);
        else
            before = -1;
    }
    ~OnDevice() {
        if (before >= 0)
            cudaSetDevice(before);
    }
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;
};

/* RAFTER_OK, or the runtime's own words about what `what` did. */
static inline rafter_status rafter_cuda_check(rafter_context *context, const char *what, cudaError_t error) {
    if (error == cudaSuccess)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

/* To return from the function that launched `kernel`. */
static inline rafter_status rafter_cuda_launched(rafter_context *context, const char *kernel) {
    return rafter_cuda_check(context, kernel, cudaGetLastError());
}

bool rafter_cuda_capturing(const rafter_cuda_state *state);

/* rafter_scratch_take, and a sentence of its own where there is no memory because the stream is being captured. */
rafter_status rafter_cuda_scratch(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch);

/* How every op's call ends: launch(memory) enqueues its kernels, `memory` being `bytes` of scratch memory, aligned.
 * That is given back at once: what uses it next comes behind in the same stream. Where the call only asks how many
 * bytes it takes, that is answered instead. `what` begins the sentence if a launch fails. */
template <class Call, typename F>
static inline rafter_status run_with_scratch(rafter_context *context, const Call *call, size_t bytes, const char *what,
                                             F launch) {
    if (call->ask) {
        *call->ask = rafter_scratch_request(bytes);
        return RAFTER_OK;
    }
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_cuda_scratch(context, call->workspace, call->workspace_bytes, bytes, &scratch));
    launch(scratch.memory);
    rafter_scratch_release(context, &scratch);
    return rafter_cuda_launched(context, what);
}

#endif
