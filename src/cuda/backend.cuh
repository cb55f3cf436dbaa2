/* SPDX-License-Identifier: Apache-2.0 */
/* Host side of the CUDA backend: the device state behind a context, and error handling. */
#ifndef RAFTER_CUDA_BACKEND_CUH
#define RAFTER_CUDA_BACKEND_CUH

#include <cuda_runtime_api.h>

#include "core/backend.h"

enum {
    RAFTER_CUDA_COUNTERS = 1 << 16,    /* number of counters */
    RAFTER_CUDA_SMALL_BLOCK = 1 << 20, /* bytes */
    RAFTER_CUDA_ALLOWED = 256,         /* entries of the hash table of allow_shared */
    RAFTER_CUDA_ROWS_BLOCK = 1 << 16   /* bytes */
};

struct rafter_cuda_state {
    int device;
    cudaStream_t stream;
    /* For collectives that run beside other work: see rafter_cuda_fork and rafter_cuda_join. */
    cudaStream_t side;
    cudaEvent_t fork, join;
    int multiprocessors;
    int compute_capability; /* 90 for 9.0 */
    int shared_bytes;       /* most shared memory of one block */
    int cooperative;        /* whether the device has cooperative launches */
    int64_t l2_bytes;

    /* Zero between calls: kernels that count arrivals reset their counters. */
    unsigned *counters;
    float *zero_and_one; /* {0, 1} in device memory: alpha and beta of matrix products */

    /* Set by kernels that see a label out of range. In host memory that the device can write. */
    volatile int *bad_labels;  /* two flags: [0] a label was out of range, [1] ranks made different calls */
    int *bad_labels_on_device; /* their address on the device */

    /* A launch of the current call has failed: the call's remaining launches are skipped, because they would
     * work on results that do not exist. False between calls. */
    bool failed;
    bool follows; /* the last thing that the current call enqueued is one of our kernels. False between calls */

    const void *allowed[RAFTER_CUDA_ALLOWED]; /* kernels whose shared memory limit was raised: see allow_shared */

    /* cuBLASLt and its chosen algorithms; NULL until the first matrix product. */
    struct rafter_cuda_products *products;

    /* RAFTER_CUDA_SMALL_BLOCK bytes of scratch memory for small calls, also in contexts with an allocator of
     * their own: any allocator would cost the host more than the rest of such a call. */
    void *small;
    char *rows_block; /* RAFTER_CUDA_ROWS_BLOCK bytes: see ops/row_group.cu */

    /* The default scratch allocator: one block, which grows. Blocks that a graph was captured with
     * live as long as the context. */
    void *block;
    size_t block_bytes;
    bool block_taken, block_captured; /* in use by the current call; a graph was captured with it */
    struct RetiredBlock *retired;     /* older blocks that a graph was captured with */
};

/* Makes the context's device current until the end of the scope. */
struct CurrentDevice {
    int before;
    explicit CurrentDevice(const rafter_context *context) : before(-1) {
        cudaGetDevice(&before);
        if (before != context->cuda_state->device)
            cudaSetDevice(context->cuda_state->device);
        else
            before = -1;
    }
    ~CurrentDevice() {
        if (before >= 0)
            cudaSetDevice(before);
    }
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;
};

/* Returns RAFTER_OK, or fails with "<what>: <the CUDA runtime's error text>". */
static inline rafter_status rafter_cuda_check(rafter_context *context, const char *what, cudaError_t error) {
    if (error == cudaSuccess)
        return RAFTER_OK;
    return rafter_fail(context, RAFTER_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

/* Ends a call's launches: returns RAFTER_OK, or fails with "<what>: <text of the error of the failed launch>". */
static inline rafter_status rafter_cuda_launched(rafter_context *context, const char *what) {
    context->cuda_state->failed = context->cuda_state->follows = false;
    return rafter_cuda_check(context, what, cudaGetLastError());
}

/* Members of struct rafter_cuda, defined in ops/row_group.cu. */
rafter_status rafter_cuda_begin_rows(rafter_context *context, struct rafter_loss *loss);
rafter_status rafter_cuda_end_rows(rafter_context *context, const struct rafter_loss *loss);
/* The same, defined in ops/logsumexp/cuda/kernels/over_ranks.cu. */
rafter_status rafter_cuda_begin_lse(rafter_context *context, const struct logsumexp_call *call, float *own);
rafter_status rafter_cuda_end_lse(rafter_context *context, const struct logsumexp_call *call, const float *all);

/* Work that is enqueued on state->side between these two calls runs concurrently with what is enqueued on state->stream
 * between them: after everything before the fork, and before everything after the join. */
static inline rafter_status rafter_cuda_fork(rafter_context *context) {
    rafter_cuda_state *const state = context->cuda_state;
    state->follows = false;
    RAFTER_TRY(rafter_cuda_check(context, "a second stream", cudaEventRecord(state->fork, state->stream)));
    return rafter_cuda_check(context, "a second stream", cudaStreamWaitEvent(state->side, state->fork, 0));
}
static inline rafter_status rafter_cuda_join(rafter_context *context) {
    rafter_cuda_state *const state = context->cuda_state;
    state->follows = false;
    RAFTER_TRY(rafter_cuda_check(context, "a second stream", cudaEventRecord(state->join, state->side)));
    return rafter_cuda_check(context, "a second stream", cudaStreamWaitEvent(state->stream, state->join, 0));
}

/* Whether the context's stream is being captured. */
bool rafter_cuda_capturing(const rafter_cuda_state *state);

/* rafter_scratch_take, with a message of its own for a call that fails because its stream is being
 * captured. */
rafter_status rafter_cuda_scratch(rafter_context *context, void *workspace, size_t workspace_bytes, size_t bytes,
                                  struct rafter_scratch *scratch);

#endif
