/* What host code of the CUDA backend shares: the state behind a context, launching, errors. */
#ifndef RAFTER_CUDA_BACKEND_CUH
#define RAFTER_CUDA_BACKEND_CUH

#include <cuda_runtime_api.h>

#include "core/backend.h"

struct rafter_cuda_state {
    int device;
    cudaStream_t stream;
    int multiprocessors;
    int compute_capability; /* 90 for 9.0 */
    int shared_bytes;       /* most shared memory of one block */
    int64_t l2_bytes;

    /* Zero between calls: kernels that count arrivals set their counters back. */
    unsigned *counters;

    /* Set by kernels that met a label out of range; in host memory that the device can write. */
    volatile int *bad_labels; /* as the host sees it */
    int *bad_labels_on_device;

    /* cuBLASLt and what it has chosen; NULL until the first matrix product. */
    struct rafter_cuda_products *products;

    /* The default scratch allocator: one block, kept. */
    void *block;
    size_t block_bytes;
    bool block_taken;
};

enum { RAFTER_CUDA_COUNTERS = 1 << 16 };

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

#endif
