/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that librafter calls (struct rafter_cuda): opening contexts, scratch memory, running a call. */
#include "cuda/backend.cuh"
#include "cuda/cublaslt_products.cuh"

#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#define RAFTER_OP(name) extern const struct rafter_variant rafter_cuda_rows_##name[];
#include "ops/ops.inc"
#undef RAFTER_OP
}

/* ---- scratch memory -------------------------------------------------------------------------- */

/* A block that became too small, but that a captured graph may still use. */
struct RetiredBlock {
    void *block;
    RetiredBlock *next;
};

bool rafter_cuda_capturing(const rafter_cuda_state *state) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(state->stream, &status) == cudaSuccess)
        return status != cudaStreamCaptureStatusNone;
    /* The legacy default stream cannot be queried while another stream is being captured, and nothing can be enqueued
     * on it either: treat it as capturing. */
    cudaGetLastError();
    return true;
}

/* Frees the block once the work that is already enqueued has ended. A block that a graph was captured with is kept
 * until the context is closed. */
static bool drop_block(rafter_cuda_state *state) {
    if (state->block && state->block_captured) {
        RetiredBlock *retired = static_cast<RetiredBlock *>(malloc(sizeof *retired));
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

/* One block is enough: a context serves one call at a time, and all its work is in the order of one
 * stream. The block only grows, and never while the stream is being captured: then the caller must
 * give a workspace, or have made the same call once before. */
static void *scratch_allocate(void *user, size_t bytes) {
    rafter_cuda_state *state = static_cast<rafter_cuda_state *>(user);
    if (state->block_taken)
        return NULL;
    const bool capturing = rafter_cuda_capturing(state);
    if (state->block_bytes < bytes) {
        if (capturing || !drop_block(state))
            return NULL;
        if (cudaMallocAsync(&state->block, bytes, state->stream) != cudaSuccess) {
            cudaGetLastError(); /* the caller reports out of memory; the next launch must not report it again */
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
        CurrentDevice current(context);
        cudaDeviceSynchronize(); /* queued work may use the counters, the flag and the handles */
        rafter_cuda_close_products(state);
        state->block_captured = false; /* graphs may not outlive the context */
        drop_block(state);
        while (RetiredBlock *retired = state->retired) {
            state->retired = retired->next;
            cudaFreeAsync(retired->block, state->stream);
            free(retired);
        }
        if (state->side)
            cudaStreamDestroy(state->side);
        if (state->fork)
            cudaEventDestroy(state->fork);
        if (state->join)
            cudaEventDestroy(state->join);
        cudaFree(state->counters);
        cudaFreeHost(const_cast<int *>(state->bad_labels));
    }
    free(state);
    context->cuda_state = NULL;
}

/* The scratch block is kept: the caller has ordered the new stream after the old one. */
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
        return rafter_fail(context, RAFTER_OUT_OF_MEMORY, "there is no memory for the context's device state");
    state->device = context->device.device_id;
    state->stream = static_cast<cudaStream_t>(context->stream);
    context->cuda_state = state;
    CurrentDevice current(context);
    int major = 0, minor = 0, l2 = 0;
    const struct {
        int *to;
        cudaDeviceAttr attribute;
    } wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                  {&minor, cudaDevAttrComputeCapabilityMinor},
                  {&l2, cudaDevAttrL2CacheSize},
                  {&state->multiprocessors, cudaDevAttrMultiProcessorCount},
                  {&state->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                  {&state->cooperative, cudaDevAttrCooperativeLaunch}};
    cudaError_t error = cudaSuccess;
    for (const auto &one : wanted)
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(one.to, one.attribute, state->device);
    state->compute_capability = context->compute_capability = 10 * major + minor;
    state->l2_bytes = l2;

    void *flag = NULL, *flag_on_device = NULL;
    const float zero_and_one[] = {0.0f, 1.0f};
    const size_t counters_bytes = RAFTER_CUDA_COUNTERS * sizeof *state->counters;
    char *memory = NULL;
    if (error == cudaSuccess)
        error = cudaMalloc(&memory,
                           counters_bytes + RAFTER_CUDA_SMALL_BLOCK + RAFTER_CUDA_ROWS_BLOCK + sizeof zero_and_one);
    state->counters = reinterpret_cast<unsigned *>(memory);
    state->small = memory + counters_bytes;
    state->rows_block = memory + counters_bytes + RAFTER_CUDA_SMALL_BLOCK;
    state->zero_and_one = reinterpret_cast<float *>(state->rows_block + RAFTER_CUDA_ROWS_BLOCK);
    if (error == cudaSuccess)
        error = cudaMemset(state->counters, 0, counters_bytes);
    if (error == cudaSuccess)
        error = cudaMemcpy(state->zero_and_one, zero_and_one, sizeof zero_and_one, cudaMemcpyHostToDevice);
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&state->side, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&state->fork, cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&state->join, cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaHostAlloc(&flag, 2 * sizeof(int), cudaHostAllocMapped);
    if (error == cudaSuccess)
        error = cudaHostGetDevicePointer(&flag_on_device, flag, 0);
    if (error == cudaSuccess)
        error = cudaDeviceSynchronize(); /* the counters must be zero before the first call of any stream */
    state->bad_labels = static_cast<int *>(flag);
    state->bad_labels_on_device = static_cast<int *>(flag_on_device);
    if (error != cudaSuccess) {
        cudaGetLastError();
        close_context(context);
        return rafter_cuda_check(context, "opening the GPU", error);
    }
    state->bad_labels[0] = state->bad_labels[1] = 0;

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
    CurrentDevice current(context);
    RAFTER_TRY(rafter_cuda_check(context, "waiting for the stream", cudaStreamSynchronize(state->stream)));
    const bool disagreed = state->bad_labels[1] != 0;
    *found = state->bad_labels[0] != 0;
    state->bad_labels[0] = state->bad_labels[1] = 0;
    if (disagreed)
        return rafter_fail(context, RAFTER_RANKS_DISAGREE,
                           "ranks of a group made different calls (sizes, options or dtypes), or their shards of "
                           "classes do not follow one another; the results of those calls are NaN");
    return RAFTER_OK;
}

/* ---- running a call -------------------------------------------------------------------------- */

/* The workspace is released as soon as the kernels are enqueued: whatever uses it next comes later
 * in the same stream. */
static rafter_status run(rafter_context *context, const char *op, const struct rafter_call *call,
                         const struct rafter_plan *plan) {
    CurrentDevice current(context);
    struct rafter_scratch scratch;
    RAFTER_TRY(rafter_cuda_scratch(context, call->workspace, call->workspace_bytes, plan->workspace_bytes, &scratch));
    const rafter_status status = plan->variant->functions->run(context, call, plan->own.storage, NULL, scratch.memory);
    rafter_scratch_release(context, &scratch);
    if (status == RAFTER_OK)
        return rafter_cuda_launched(context, op);
    context->cuda_state->failed = context->cuda_state->follows = false;
    cudaGetLastError(); /* clear it: the next call must not report it */
    return status;
}

extern "C" __attribute__((visibility("default"))) const struct rafter_cuda *rafter_cuda_backend(void) {
    static struct rafter_cuda table;
    table.interface = RAFTER_CUDA_INTERFACE;
    table.shared_headers = RAFTER_SHARED_HEADERS;
    table.open = open_context;
    table.close = close_context;
    table.set_stream = set_stream;
    table.run = run;
    table.bad_labels = bad_labels;
    table.begin_rows = rafter_cuda_begin_rows;
    table.end_rows = rafter_cuda_end_rows;
    table.begin_lse = rafter_cuda_begin_lse;
    table.end_lse = rafter_cuda_end_lse;
#define RAFTER_OP(name) table.rows[RAFTER_OP_INDEX_##name] = rafter_cuda_rows_##name;
#include "ops/ops.inc"
#undef RAFTER_OP
    return &table;
}
